package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newDrain(t *target) *cobra.Command {
	var timeout time.Duration
	var output *format
	cmd := &cobra.Command{
		Use:   "drain",
		Short: "Take a node out of the cluster: what runs may finish first",
		Long: `Take a node out of the cluster. It refuses new work at once, gives readers,
leases, and reads that run the time of --timeout, says goodbye, and ends.

How far it is goes to standard error. The command returns when the node has
left, and says what was cut: what had not ended in time, and publications that
no other member could read. It may be interrupted: the drain goes on without it.

Of a drain that runs already a shorter --timeout brings the end nearer; a longer
one, or none, changes nothing and shows how far it is.`,
		Example: `  kvferry --node prefill-0 drain
  kvferry --socket /run/kvferry/node.sock drain --timeout 2m`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout < 0 {
				return usage(cmd, "--timeout=%v is negative", timeout)
			}
			c, err := t.dial()
			if err != nil {
				return err
			}
			defer c.Close()
			node, err := nameOf(cmd.Context(), c)
			if err != nil {
				return err
			}
			last, err := drain(cmd.Context(), c, timeout, callTimeout, cmd.ErrOrStderr())
			if err != nil {
				return fmt.Errorf("drain %s: %w", node, err)
			}
			if output.value != asTable {
				return printMessage(cmd.OutOrStdout(), output, last)
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "%s has left the cluster%s\n", node, wasCut(last.GetCut()))
			return err
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "what runs may take so long (default the node's timers.drain)")
	output = addFormat(cmd)
	return cmd
}

var errDrainGoesOn = errors.New("interrupted, but the drain goes on (kvferry status shows it, kvferry leave ends it at once)")

// drain drains the node, shows how far it is, and returns the last that the
// node said: that it has left. A node that says nothing for so long as silence
// counts as unreachable; the drain itself may take longer.
func drain(ctx context.Context, c *client.Client, timeout, silence time.Duration, progress io.Writer) (*kvferrypb.DrainResponse, error) {
	heard, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	watch := time.AfterFunc(silence, func() {
		cancel(fmt.Errorf("no word from it for %v, its process may be stopped: %w", silence, client.ErrUnreachable))
	})
	defer watch.Stop()

	p := &drainProgress{out: progress, terminal: isTerminal(progress)}
	defer p.end()
	stream, err := c.Admin().Drain(heard, &kvferrypb.DrainRequest{Timeout: durationpb.New(timeout)})
	for err == nil {
		var m *kvferrypb.DrainResponse
		if m, err = stream.Recv(); err != nil {
			break
		}
		watch.Reset(silence)
		if m.GetLeft() {
			return m, nil
		}
		p.show(m)
	}
	switch {
	case ctx.Err() != nil:
		return nil, errDrainGoesOn
	case heard.Err() != nil:
		return nil, context.Cause(heard)
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("it ended before it had left (its log says why): %w", client.ErrUnreachable)
	}
	return nil, err
}

// drainProgress shows how far a drain is: one line that changes on a terminal,
// else a line for every change.
type drainProgress struct {
	out      io.Writer
	terminal bool
	last     string
}

func (p *drainProgress) show(m *kvferrypb.DrainResponse) {
	text := fmt.Sprintf("draining: %s, %s, %s", count(m.GetPublications(), "publication"), count(m.GetLeases(), "lease"), count(m.GetRetrievals(), "retrieval"))
	left := m.GetRemaining().AsDuration().Round(100 * time.Millisecond)
	switch {
	case p.terminal:
		fmt.Fprintf(p.out, "\r\x1b[K%s, %v left", text, left)
	case text != p.last:
		fmt.Fprintf(p.out, "%s, %v left\n", text, left)
	}
	p.last = text
}

// end leaves the cursor on an empty line.
func (p *drainProgress) end() {
	if p.terminal && p.last != "" {
		fmt.Fprint(p.out, "\r\x1b[K")
	}
}

// wasCut says what did not end by itself; "" if everything did.
func wasCut(cut *kvferrypb.DrainResponse_Cut) string {
	var parts []string
	if n := cut.GetPublications(); n > 0 {
		parts = append(parts, count(n, "publication")+" not read to the end")
	}
	if n := cut.GetLeases(); n > 0 {
		parts = append(parts, count(n, "lease"))
	}
	if n := cut.GetRetrievals(); n > 0 {
		parts = append(parts, count(n, "retrieval"))
	}
	if len(parts) == 0 {
		return ""
	}
	return "; cut: " + strings.Join(parts, ", ")
}

// count is a number of things for people.
func count(n uint32, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
