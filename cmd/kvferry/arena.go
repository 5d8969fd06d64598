package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newArena(t *target) *cobra.Command {
	req := &kvferrypb.ArenaRequest{}
	l := &look[*kvferrypb.ArenaResponse]{
		target: t,
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.ArenaResponse, error) {
			return a.Arena(ctx, req)
		},
		show: func(w io.Writer, m *kvferrypb.ArenaResponse) {
			list := newTable(w)
			list.AppendRow([]any{"geometry", formatGeometry(m.GetGeometry())})
			list.AppendRow([]any{"memory", fmt.Sprintf("%s a rank, ranks %d", formatBytes(m.GetBytesPerRank()), m.GetRanks())})
			list.AppendRow([]any{"lies in", formatMemory(m.GetMemory())})
			list.AppendRow([]any{"pages", formatPages(m.GetPages())})
			list.AppendRow([]any{"host pages", formatHostPages(m.GetPages())})
			list.Render()
			fmt.Fprintln(w)
			rows := newTable(w, "request", "label", "tokens", "released", "pages", "host pages", "state")
			for _, i := range m.GetItems() {
				rows.AppendRow([]any{i.GetRequest(), i.GetLabel(), i.GetTokens(), i.GetReleased(), i.GetPages(), i.GetHostPages(), i.GetState()})
			}
			rows.Render()
		},
	}
	cmd := l.command(&cobra.Command{
		Use:   "arena",
		Short: "Show a node's pages: what is free, and which request has which",
	})
	cmd.Flags().Uint32Var(&req.Limit, "limit", 0, "at most so many requests (default the node's)")
	return cmd
}
