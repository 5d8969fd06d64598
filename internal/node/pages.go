package node

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// Where the engine chooses pages (arena.allocate), each page is in one place more:
// the engine's. It gives pages to streams with the calls that need them (give), and
// hears of each that is its own again once: in an event of the session, or, if there
// is none, in the answer to the next Open. An answer to the call that let them go
// could be lost with that call.

// maxEventPages bounds the pages of one event.
const maxEventPages = 65536

// engineChooses says whether the engine chooses the pages of streams.
func (n *Node) engineChooses() bool { return n.config.Arena.Allocate == config.EngineAllocates }

// give gives pages to streams of the session's requests, all or none. The error
// wraps [manager.ErrPage], whatever it is.
func (ss *sessions) give(s *session, grants []*kvferrypb.Grant) error {
	if len(grants) == 0 {
		return nil
	}
	list := make([]manager.Grant, len(grants))
	for i, g := range grants {
		r := id.Request(g.GetRequest())
		if err := ss.own(s, r); err != nil {
			return fmt.Errorf("%w: %w", manager.ErrPage, err)
		}
		list[i] = manager.Grant{Request: r, Label: labelOf(g.GetLabel()), Pages: pagesOf(g.GetPages())}
	}
	if err := ss.node.manager.Give(list...); err != nil {
		return fmt.Errorf("%w: %w", manager.ErrPage, err)
	}
	return nil
}

func pagesOf(list []uint32) []page.Index {
	out := make([]page.Index, len(list))
	for i, p := range list {
		out[i] = page.Index(p)
	}
	return out
}

func pageNumbers(list []page.Index) []uint32 {
	out := make([]uint32, len(list))
	for i, p := range list {
		out[i] = uint32(p)
	}
	return out
}

// openCounted opens a session, and says which pages are its engine's.
func (ss *sessions) openCounted(ctx context.Context, engine string) (*session, []*kvferrypb.OpenResponse_Run, error) {
	if ss.node.engineChooses() {
		if ctx.Err() != nil { // the engine may be opening the next already
			return nil, nil, context.Cause(ctx)
		}
		ss.endUnheard()
	}
	ss.told.Lock()
	defer ss.told.Unlock()
	s, err := ss.open(time.Now(), engine)
	if err != nil || !ss.node.engineChooses() {
		return s, nil, err
	}
	var runs []*kvferrypb.OpenResponse_Run
	for _, r := range ss.node.manager.Engine() {
		runs = append(runs, &kvferrypb.OpenResponse_Run{First: uint32(r.First), Count: r.Count})
	}
	return s, runs, nil
}

// tellPages tells the session which pages are its engine's again, as they come back.
func (ss *sessions) tellPages() {
	n := ss.node
	for {
		select {
		case <-n.manager.Returns():
		case <-n.ctx.Done():
			return
		}
		ss.tellReturned()
	}
}

func (ss *sessions) tellReturned() {
	ss.told.Lock()
	defer ss.told.Unlock()
	// Without a session they are in the answer to the next Open.
	for some := range slices.Chunk(ss.node.manager.Returned(), maxEventPages) {
		ss.emitAll(func() *kvferrypb.Event {
			return &kvferrypb.Event{Kind: kvferrypb.Event_PAGES, Outcome: "returned", Pages: pageNumbers(some)}
		})
	}
}
