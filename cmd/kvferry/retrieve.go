package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/replay"
)

func newRetrieve(t *target) *cobra.Command {
	o := replay.RetrieveOptions{}
	var output *format
	cmd := &cobra.Command{
		Use:   "retrieve REFERENCE|REQUEST",
		Short: "Pull a published request into a node, and say how that went",
		Long: `Do what a decode engine does with one request: ingest, retrieve what others
published of it, and remove. A reference names one publication; a request's id
takes it from whichever node offers it.

With --verify every byte is compared with what "kvferry publish" writes; exit
code 4 if one differs.`,
		Example: `  kvferry --node decode-0 retrieve "$(kvferry publish r1)" --verify
  kvferry --node decode-0 retrieve r1 --wait 30s`,
		Args: oneArgument,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.Request = id.Request(args[0])
			if wire.IsReference(args[0]) {
				r, err := wire.Peek(args[0])
				if err != nil {
					return usage(cmd, "%w", err)
				}
				o.Request, o.Reference = r.Request, args[0]
			}
			if err := o.Request.Validate(); err != nil {
				return usage(cmd, "%w", err)
			}
			if o.Wait < 0 || o.MinTokens < 0 || o.MinTokens > replay.MaxTokens {
				return usage(cmd, "--wait=%v --min-tokens=%d: want no negative time and 0 to %d tokens", o.Wait, o.MinTokens, replay.MaxTokens)
			}
			var err error
			if o.Socket, err = t.path(); err != nil {
				return err
			}
			// The node answers at the end of the wait; what is beside that has
			// the time of a few calls.
			ctx, cancel := context.WithTimeout(cmd.Context(), o.Wait+3*callTimeout)
			defer cancel()
			o.CUDALibrary = cudaLibrary(o.CUDALibrary)
			r, err := replay.Retrieve(ctx, o)
			if errors.Is(err, replay.ErrWrongBytes) {
				return fmt.Errorf("%w: %w", errVerify, err)
			}
			if err != nil {
				return err
			}
			if output.value != asTable {
				return printDocument(cmd.OutOrStdout(), output, r)
			}
			list := newTable(cmd.OutOrStdout())
			list.AppendRow([]any{"request", o.Request})
			list.AppendRow([]any{"owner", id.Life{Node: r.Owner, Incarnation: r.Incarnation}})
			list.AppendRow([]any{"transport", orDash(r.Transport)})
			list.AppendRow([]any{"tokens", r.Tokens})
			list.AppendRow([]any{"bytes", r.Bytes})
			list.AppendRow([]any{"took", time.Duration(r.Seconds * float64(time.Second)).Round(time.Microsecond)})
			if o.Verify {
				list.AppendRow([]any{"verified", r.Verified})
			}
			list.Render()
			return nil
		},
	}
	f := cmd.Flags()
	f.DurationVar(&o.Wait, "wait", 10*time.Second, "for the request to be published and landed")
	addCUDALibrary(cmd, &o.CUDALibrary)
	f.IntVar(&o.MinTokens, "min-tokens", 0, "be content with so many tokens (default all, up to the final publication)")
	f.BoolVar(&o.Verify, "verify", false, "compare every byte with what kvferry publish writes")
	output = addFormat(cmd)
	return cmd
}
