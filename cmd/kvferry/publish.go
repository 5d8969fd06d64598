package main

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/replay"
)

func newPublish(t *target) *cobra.Command {
	o := replay.PublishOptions{}
	var node string
	var timeout time.Duration
	var output *format
	cmd := &cobra.Command{
		Use:   "publish REQUEST",
		Short: "Publish a request made up on a node, and print its reference",
		Long: `Do what a prefill engine does with one request: ingest, admit in chunks, write
KV through the mapped arena, commit, publish each chunk, the last one as final,
and remove. The KV is a function of the request's name, which "kvferry retrieve
--verify" checks.

The publication outlives the command, until enough readers have it or its hold
is over, which the node's timers.max_hold caps. The announcement goes out by
gossip in any case: a --target that is not a member learns of it by that alone.`,
		Example: `  kvferry publish r1 --tokens 1000 --chunks 4
  kvferry publish r1 --target decode-0 --hold 5m`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Request, o.Target = id.Request(args[0]), id.Node(node)
			if err := o.Request.Validate(); err != nil {
				return usage(cmd, "%w", err)
			}
			if o.Tokens < 1 || o.Tokens > replay.MaxTokens || o.Chunks < 1 || o.Chunks > o.Tokens {
				return usage(cmd, "--tokens=%d --chunks=%d: want 1 to %d tokens, and a token in each chunk", o.Tokens, o.Chunks, replay.MaxTokens)
			}
			switch {
			case o.Readers < 1 || o.Readers > kvferrypb.MaxReaders:
				return usage(cmd, "--readers=%d: want 1 to %d", o.Readers, kvferrypb.MaxReaders)
			case o.Hold < 0:
				return usage(cmd, "--hold=%v is negative", o.Hold)
			case timeout <= 0:
				return usage(cmd, "--timeout=%v: want more than 0s", timeout)
			}
			var err error
			if o.Socket, err = t.path(); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeoutCause(cmd.Context(), timeout, fmt.Errorf("not published within %v", timeout))
			defer cancel()
			o.CUDALibrary = cudaLibrary(o.CUDALibrary)
			p, err := replay.Publish(ctx, o)
			if err != nil {
				return err
			}
			if output.value != asTable {
				return printDocument(cmd.OutOrStdout(), output, p)
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), p.Reference)
			return err
		},
	}
	f := cmd.Flags()
	f.IntVar(&o.Tokens, "tokens", 256, "tokens of the prompt")
	f.IntVar(&o.Chunks, "chunks", 1, "publish so many times")
	f.StringVar(&node, "target", "", "push the announcement to this node (default gossip alone)")
	f.IntVar(&o.Readers, "readers", 1, "nodes that will read, 256 at most")
	f.DurationVar(&o.Hold, "hold", 0, "how long the pages are held for the first reader (default the node's)")
	f.DurationVar(&timeout, "timeout", 30*time.Second, "for all of it")
	addCUDALibrary(cmd, &o.CUDALibrary)
	output = addFormat(cmd)
	return cmd
}
