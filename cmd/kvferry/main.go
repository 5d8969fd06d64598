// Kvferry moves the KV cache of LLM requests between prefill and decode nodes.
//
// It is the one binary: `kvferry agent` runs a node, every other command talks
// to one through its socket, or starts some. Each command has a file; none has
// logic beyond flags, calls, and printing.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/internal/localcluster"
)

// Exit codes.
const (
	exitDone        = 0
	exitFailed      = 1
	exitUsage       = 2
	exitUnreachable = 3
	exitVerify      = 4
)

// errVerify is wrapped when bytes were not what they should have been.
var errVerify = errors.New("verification failed")

// usageError is what the user has to type differently.
type usageError struct {
	command string // that was typed, such as "kvferry publish"
	err     error
}

func (e *usageError) Error() string {
	return fmt.Sprintf("%v (see %s --help)", e.err, e.command)
}

func (e *usageError) Unwrap() error { return e.err }

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// run executes one command line and returns its exit code.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// Whoever asks a second time does not want to wait any longer.
	defer context.AfterFunc(ctx, stop)()

	begun := false
	root := newRoot()
	onBegin(root, func() { begun = true })
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err != nil && !begun {
		// Unknown commands and flags, wrong values, wrong arguments.
		err = &usageError{cmd.CommandPath(), err}
	}
	if err != nil {
		// Of many lines, some of which may quote others.
		for i, line := range strings.Split(err.Error(), "\n") {
			if i == 0 {
				line = "kvferry: " + line
			}
			fmt.Fprintln(stderr, printable(line))
		}
	}
	return exitCode(err)
}

func exitCode(err error) int {
	_, usage := errors.AsType[*usageError](err)
	switch {
	case err == nil:
		return exitDone
	case usage:
		return exitUsage
	case errors.Is(err, errVerify):
		return exitVerify
	case errors.Is(err, client.ErrUnreachable), errors.Is(err, localcluster.ErrNotUp):
		return exitUnreachable
	default:
		return exitFailed
	}
}

func newRoot() *cobra.Command {
	t := &target{}
	root := &cobra.Command{
		Use:   "kvferry",
		Short: "Move the KV cache of LLM requests between prefill and decode nodes",
		Long: `kvferry moves the KV cache of LLM requests between prefill and decode nodes.

Run a node with "kvferry agent", or a whole cluster on this machine with
"kvferry local up". Every other command talks to one node: the one that --node
or --socket names, else the one at KVFERRY_SOCKET, else the first node of the
local cluster.

Exit codes: 0 done, 1 failed, 2 usage, 3 node not reachable, 4 verification failed.`,
		Args:          onlyCommands,
		RunE:          help,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	t.addFlags(root)
	root.AddGroup(
		&cobra.Group{ID: "run", Title: "Run:"},
		&cobra.Group{ID: "look", Title: "Look:"},
		&cobra.Group{ID: "operate", Title: "Operate:"},
		&cobra.Group{ID: "hand", Title: "By hand:"},
	)
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("run", newAgent(), newLocal(t), newReplay(t), newBench(t))
	add("look", newStatus(t), newMembers(t), newPeers(t), newPublications(t), newRetrievals(t), newArena(t), newPage(t))
	add("operate", newDrain(t), newLeave(t), newJoin(t), newKeyring(t), newCompat(t), newDoctor(t))
	add("hand", newPublish(t), newRetrieve(t), newRelease(t), newRevoke(t), newOffload(t), newReload(t))
	root.AddCommand(newConfig(t), newVersion())
	return root
}

// help is what a command that only groups others does.
func help(cmd *cobra.Command, _ []string) error { return cmd.Help() }

// onBegin has begin called when a command begins, after everything that was
// typed has been checked.
func onBegin(cmd *cobra.Command, begin func()) {
	if run := cmd.RunE; run != nil {
		cmd.RunE = func(c *cobra.Command, args []string) error {
			begin()
			return run(c, args)
		}
	}
	for _, c := range cmd.Commands() {
		onBegin(c, begin)
	}
}

// onlyCommands are the arguments of a command that only groups others.
func onlyCommands(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	if s := cmd.SuggestionsFor(args[0]); len(s) > 0 {
		return fmt.Errorf("unknown command %q, did you mean %q?", args[0], s[0])
	}
	return fmt.Errorf("unknown command %q", args[0])
}

// noArguments and oneArgument are the arguments of a command that does something.
func noArguments(_ *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unexpected argument %q", args[0])
	}
	return nil
}

func oneArgument(cmd *cobra.Command, args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%d arguments, want: %s", len(args), cmd.Use)
	}
	return nil
}

func atMostOneArgument(cmd *cobra.Command, args []string) error {
	if len(args) > 1 {
		return fmt.Errorf("%d arguments, want: %s", len(args), cmd.Use)
	}
	return nil
}

// usage is an error of a command that has begun about what was typed.
func usage(cmd *cobra.Command, format string, args ...any) error {
	return &usageError{cmd.CommandPath(), fmt.Errorf(format, args...)}
}

// must is for what only fails if a command is put together wrongly.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
