package main

import (
	"context"
	"fmt"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

func newPage(t *target) *cobra.Command {
	req := &kvferrypb.PageRequest{}
	l := &look[*kvferrypb.PageResponse]{
		target: t,
		take: func(cmd *cobra.Command, arg string) error {
			n, err := strconv.ParseUint(arg, 10, 32)
			if err != nil {
				return usage(cmd, "page %q: want its number in the arena", arg)
			}
			req.Page = uint32(n)
			return nil
		},
		ask: func(ctx context.Context, a kvferrypb.AdminClient) (*kvferrypb.PageResponse, error) {
			return a.Page(ctx, req)
		},
		show: showPage,
	}
	return l.command(&cobra.Command{
		Use:   "page N",
		Short: "Show who holds a page of a node's arena, and why",
		Long: `Show who holds a page of a node's arena, and why: the request whose tokens lie in
it, the publications that name it, and the step, retrieval, or move that is at it.
Page 0 is the sink, which nothing holds: captured graphs write their padding there.`,
		Example: "  kvferry --node decode-0 page 17\n  kvferry page 17 --watch",
	})
}

func showPage(w io.Writer, p *kvferrypb.PageResponse) {
	list := newTable(w)
	add := func(name string, value any) { list.AppendRow([]any{name, value}) }
	add("page", p.GetPage())
	add("place", p.GetPlace())
	add("why", orDash(p.GetWhy()))
	add("request", orDash(p.GetRequest()))
	add("label", orDash(p.GetLabel()))
	tokens := "-"
	if n := p.GetTokens(); n > 0 {
		tokens = fmt.Sprintf("%d, from %d on", n, p.GetFirstToken())
	}
	add("tokens", tokens)
	for _, by := range []struct {
		name string
		id   uint64
	}{{"step", p.GetStep()}, {"retrieval", p.GetRetrieval()}, {"move", p.GetMove()}} {
		if by.id != 0 {
			add(by.name, by.id)
		}
	}
	list.Render()
	if len(p.GetPublications()) == 0 {
		return
	}
	fmt.Fprintln(w)
	rows := newTable(w, "publication", "request", "final", "leases", "age", "expires in")
	for _, i := range p.GetPublications() {
		rows.AppendRow([]any{i.GetPublication(), orDash(i.GetRequest()), yesNo(i.GetFinal()), i.GetLeases(), formatDuration(i.GetAge()), formatDuration(i.GetExpiresIn())})
	}
	rows.Render()
}
