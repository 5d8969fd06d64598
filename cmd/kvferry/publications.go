package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newPublications(t *target) *cobra.Command {
	req := &kvferrypb.PublicationsRequest{}
	l := &look[*kvferrypb.PublicationsResponse]{
		target: t,
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.PublicationsResponse, error) {
			return a.Publications(ctx, req)
		},
		show: func(w io.Writer, m *kvferrypb.PublicationsResponse) {
			rows := newTable(w, "owner", "publication", "request", "state", "tokens", "pages", "labels", "leases", "read by", "age", "expires in")
			for _, i := range m.GetItems() {
				request := i.GetRequest()
				if request == "" {
					request = "#" + i.GetRequestHash()
				}
				rows.AppendRow([]any{
					i.GetOwner(), i.GetPublication(), request, i.GetState(), i.GetTokens(), i.GetPages(), strings.Join(i.GetLabels(), ","),
					i.GetLeases(), fmt.Sprintf("%d of %d", i.GetAcknowledged(), i.GetReaders()), formatDuration(i.GetAge()), formatDuration(i.GetExpiresIn()),
				})
			}
			rows.Render()
		},
	}
	cmd := l.command(&cobra.Command{
		Use:   "publications",
		Short: "Show what a node offers, or what it knows of others' offers",
	})
	cmd.Flags().BoolVar(&req.Remote, "remote", false, "those of other nodes, as this one knows them")
	cmd.Flags().Uint32Var(&req.Limit, "limit", 0, "at most so many (default 1000)")
	return cmd
}
