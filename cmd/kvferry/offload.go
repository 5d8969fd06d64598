package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
)

// moveTimeout bounds the copy of one request between the arena and the host.
const moveTimeout = time.Minute

func newOffload(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "offload [REQUEST]",
		Short: "Move a request's tokens from a node's arena to its host",
		Long: `Move a request's tokens from a node's arena to its host tier, as far as they fit
there, and return when its pages are free. Without REQUEST it is the one that the
node would choose if it were short of pages.

Steps of the request are refused as OFFLOADING until "kvferry reload", or its
engine, brings it back; a retrieve brings it back by itself. A request that is
read, or has a step in flight, stays where it is.`,
		Example: "  kvferry --node decode-0 offload r1\n  kvferry --node decode-0 offload",
		Args:    cobra.MatchAll(atMostOneArgument, anyRequest),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &kvferrypb.AdminOffloadRequest{Request: strings.Join(args, "")}
			return t.move(cmd, func(ctx context.Context, a kvferrypb.AdminClient) (string, error) {
				m, err := a.Offload(ctx, req)
				if m.GetFreed() == 0 {
					return "nothing to offload", err
				}
				return "offloaded " + m.GetRequest() + ", " + count(m.GetFreed(), "page") + " freed", err
			})
		},
		ValidArgsFunction: t.completeRequest,
	}
}

func newReload(t *target) *cobra.Command {
	return &cobra.Command{
		Use:   "reload REQUEST",
		Short: "Bring a request's tokens back from a node's host to its arena",
		Long: `Bring back to the arena what a request has on the node's host, all of it or none,
and return when it is there. If pages are short, the node offloads others first,
unless its configuration says that it never does.`,
		Example: "  kvferry --node decode-0 reload r1",
		Args:    cobra.MatchAll(oneArgument, anyRequest),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &kvferrypb.AdminReloadRequest{Request: args[0]}
			return t.move(cmd, func(ctx context.Context, a kvferrypb.AdminClient) (string, error) {
				m, err := a.Reload(ctx, req)
				if m.GetPages() == 0 {
					return "nothing to reload", err
				}
				return "reloaded, " + count(m.GetPages(), "page"), err
			})
		},
		ValidArgsFunction: t.completeRequest,
	}
}

// move asks the node for a move and prints what came of it.
func (t *target) move(cmd *cobra.Command, ask func(context.Context, kvferrypb.AdminClient) (string, error)) error {
	c, err := t.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), moveTimeout)
	defer cancel()
	done, err := ask(ctx, c.Admin())
	if err != nil {
		return late(err, fmt.Errorf("not done within %v; it goes on, and kvferry arena shows how far it is", moveTimeout))
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), done)
	return err
}

// anyRequest refuses an argument that is no request's id.
func anyRequest(_ *cobra.Command, args []string) error {
	for _, a := range args {
		if err := id.Request(a).Validate(); err != nil {
			return err
		}
	}
	return nil
}

// completeRequest offers the requests of the node to the shell.
func (t *target) completeRequest(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return t.completeFrom(cmd.Context(), func(ctx context.Context, a kvferrypb.AdminClient) (names []cobra.Completion) {
		m, err := a.Arena(ctx, &kvferrypb.ArenaRequest{})
		if err != nil {
			return nil
		}
		seen := make(map[string]bool)
		for _, i := range m.GetItems() {
			if !seen[i.GetRequest()] {
				seen[i.GetRequest()] = true
				names = append(names, i.GetRequest())
			}
		}
		return names
	}), cobra.ShellCompDirectiveNoFileComp
}
