package main

import (
	"context"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newPeers(t *target) *cobra.Command {
	l := &look[*kvferrypb.PeersResponse]{
		target: t,
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.PeersResponse, error) {
			return a.Peers(ctx, &kvferrypb.PeersRequest{})
		},
		show: func(w io.Writer, m *kvferrypb.PeersResponse) {
			rows := newTable(w, "node", "incarnation", "address", "state", "transport", "path", "refused", "last error", "geometry")
			rows.wrapped("refused", "last error")
			for _, i := range m.GetItems() {
				refused := make([]string, 0, len(i.GetRefused()))
				for _, r := range i.GetRefused() {
					why := r.GetTransport() + ": " + r.GetReason()
					if r.GetRetryIn() != nil {
						why += " (again in " + formatDuration(r.GetRetryIn()) + ")"
					}
					refused = append(refused, why)
				}
				geometry := "-" // until it has said it
				if g := i.GetGeometry(); g != nil {
					geometry = formatModel(g) + ": " + formatGeometry(g)
				}
				rows.AppendRow([]any{
					i.GetNode(), i.GetIncarnation(), i.GetAddress(), i.GetState(), orDash(i.GetTransport()), orDash(i.GetPath()),
					orDash(strings.Join(refused, "; ")), orDash(i.GetLastError()),
					geometry,
				})
			}
			rows.Render()
		},
	}
	return l.command(&cobra.Command{
		Use:   "peers",
		Short: "Show a node's connections to others, the transport of each, and why not a better one",
	})
}
