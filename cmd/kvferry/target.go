package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
)

// callTimeout bounds every call to a daemon that does not wait for others.
const callTimeout = 10 * time.Second

// completeTimeout bounds what a person waits for after the tabulator.
const completeTimeout = time.Second

// target is the node that a command talks to, by the flags of all commands.
type target struct {
	cluster string
	node    string
	socket  string
}

func (t *target) addFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&t.cluster, "name", localcluster.DefaultName, "the local cluster")
	f.StringVar(&t.node, "node", "", "talk to this node of this machine")
	f.StringVar(&t.socket, "socket", "", "talk to the node at this engine socket (default $KVFERRY_SOCKET)")
	root.MarkFlagsMutuallyExclusive("node", "socket")
	must(root.RegisterFlagCompletionFunc("node", t.completeNode))
}

// addCUDALibrary adds the flag of commands that write and read arenas themselves.
func addCUDALibrary(cmd *cobra.Command, path *string) {
	cmd.Flags().StringVar(path, "cuda-library", "", "path of libcuda.so.1, where arenas are in device memory (default $KVFERRY_ARENA_CUDA_LIBRARY, else where the loader finds it)")
}

// cudaLibrary is that flag's value.
func cudaLibrary(path string) string { return cmp.Or(path, os.Getenv("KVFERRY_ARENA_CUDA_LIBRARY")) }

// completeNode offers the nodes of the local cluster to the shell.
func (t *target) completeNode(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	c, err := localcluster.Load(t.cluster)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []cobra.Completion
	for _, n := range c.Nodes() {
		names = append(names, cobra.CompletionWithDesc(n.Node, n.Role))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// path finds the engine socket.
func (t *target) path() (string, error) {
	if t.socket != "" {
		return t.socket, nil
	}
	if t.node == "" {
		if s := os.Getenv("KVFERRY_SOCKET"); s != "" {
			return s, nil
		}
	}
	c, err := localcluster.Load(t.cluster)
	switch {
	case err == nil && t.node == "":
		return c.Nodes()[0].Engine, nil
	case err == nil:
		if n, ok := c.Node(t.node); ok {
			return n.Engine, nil
		}
	case !errors.Is(err, localcluster.ErrNotUp):
		return "", err
	case t.node == "":
		return "", fmt.Errorf("find a node: %w: %w (name one with --node or --socket)", client.ErrUnreachable, err)
	}
	return config.DefaultSocket(t.node), nil
}

// dial connects to the node; the caller closes the client.
func (t *target) dial() (*client.Client, error) {
	path, err := t.path()
	if err != nil {
		return nil, err
	}
	return client.Dial(path)
}

// nameOf asks a node for its name, as a terminal may get it.
func nameOf(ctx context.Context, c *client.Client) (string, error) {
	ctx, cancel := soon(ctx)
	defer cancel()
	s, err := c.Admin().Status(ctx, &kvferrypb.StatusRequest{})
	return printable(s.GetNode()), err
}

// completeFrom offers what a node says to the shell; one that says nothing at
// once offers nothing.
func (t *target) completeFrom(ctx context.Context, ask func(context.Context, kvferrypb.AdminClient) []cobra.Completion) []cobra.Completion {
	c, err := t.dial()
	if err != nil {
		return nil
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, completeTimeout)
	defer cancel()
	return ask(ctx, c.Admin())
}

// late is a call's error; where the node is at work and had no answer by the
// deadline, it is what that means.
func late(err, meaning error) error {
	if errors.Is(err, context.DeadlineExceeded) && client.CodeOf(err) == kvferrypb.Failure_UNSPECIFIED && !errors.Is(err, client.ErrUnreachable) {
		return meaning
	}
	return err
}

// soon is ctx with the deadline of one call.
func soon(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, callTimeout, fmt.Errorf("no answer for %v", callTimeout))
}
