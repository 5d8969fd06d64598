package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newMembers(t *target) *cobra.Command {
	l := &look[*kvferrypb.MembersResponse]{
		target: t,
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.MembersResponse, error) {
			return a.Members(ctx, &kvferrypb.MembersRequest{})
		},
		show: func(w io.Writer, m *kvferrypb.MembersResponse) {
			rows := newTable(w, "node", "incarnation", "role", "group", "gossip", "peer", "compatible", "draining", "self")
			for _, i := range m.GetItems() {
				rows.AppendRow([]any{i.GetNode(), i.GetIncarnation(), i.GetRole(), i.GetGroup(), i.GetGossip(), i.GetPeer(), i.GetCompatible(), i.GetDraining(), i.GetSelf()})
			}
			rows.Render()
		},
	}
	return l.command(&cobra.Command{
		Use:   "members",
		Short: "Show the live members of the cluster, as a node sees them",
	})
}
