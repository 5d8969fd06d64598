package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newRetrievals(t *target) *cobra.Command {
	req := &kvferrypb.RetrievalsRequest{}
	l := &look[*kvferrypb.RetrievalsResponse]{
		target: t,
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.RetrievalsResponse, error) {
			return a.Retrievals(ctx, req)
		},
		show: func(w io.Writer, m *kvferrypb.RetrievalsResponse) {
			rows := newTable(w, "request", "owner", "incarnation", "publication", "state", "transport", "attempt", "bytes", "age")
			for _, i := range m.GetItems() {
				rows.AppendRow([]any{
					i.GetRequest(), orDash(i.GetOwner()), i.GetIncarnation(), i.GetPublication(), i.GetState(),
					orDash(i.GetTransport()), i.GetAttempt(), formatBytes(i.GetBytes()), formatDuration(i.GetAge()),
				})
			}
			rows.Render()
		},
	}
	cmd := l.command(&cobra.Command{
		Use:   "retrievals",
		Short: "Show the retrievals that a node has under way",
	})
	cmd.Flags().Uint32Var(&req.Limit, "limit", 0, "at most so many (default the node's)")
	return cmd
}
