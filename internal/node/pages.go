package node

import (
	"fmt"
	"slices"
	"sync"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// Where the engine chooses pages (arena.allocate), each page is in one place more:
// the engine's. It gives pages to streams with the calls that need them (give), and
// hears of each that is its own again once: in the answer to the Remove that let it
// go, in an event, or, if it has lost count, in the answer to Open.

// maxEventPages bounds the pages of one event.
const maxEventPages = 65536

// pagesTold orders what the engine is told of its pages. Its mutex is taken before
// that of the sessions.
type pagesTold struct {
	mu      sync.Mutex
	holding int           // calls that answer with pages themselves
	resume  chan struct{} // one: the last of them is over
}

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
func (ss *sessions) openCounted(open func() (*session, error)) (*session, []*kvferrypb.OpenResponse_Run, error) {
	ss.told.mu.Lock()
	defer ss.told.mu.Unlock()
	s, err := open()
	if err != nil || !ss.node.engineChooses() {
		return s, nil, err
	}
	var runs []*kvferrypb.OpenResponse_Run
	for _, r := range ss.node.manager.Engine() {
		runs = append(runs, &kvferrypb.OpenResponse_Run{First: uint32(r.First), Count: r.Count})
	}
	return s, runs, nil
}

// hold keeps events about pages back until release, which takes those that have
// come back until then for an answer, or leaves them to an event.
func (ss *sessions) hold() (release func(take bool) []uint32) {
	t := &ss.told
	t.mu.Lock()
	defer t.mu.Unlock()
	t.holding++
	return func(take bool) (pages []uint32) {
		t.mu.Lock()
		defer t.mu.Unlock()
		if take {
			pages = pageNumbers(ss.node.manager.Returned())
		}
		if t.holding--; t.holding == 0 {
			select {
			case t.resume <- struct{}{}:
			default: // one is there already
			}
		}
		return pages
	}
}

// tellPages tells the session which pages are its engine's again, as they come back.
func (ss *sessions) tellPages() {
	n := ss.node
	for {
		select {
		case <-n.manager.Returns():
		case <-ss.told.resume:
		case <-n.ctx.Done():
			return
		}
		ss.tellReturned()
	}
}

func (ss *sessions) tellReturned() {
	ss.told.mu.Lock()
	defer ss.told.mu.Unlock()
	if ss.told.holding > 0 {
		return
	}
	// Without a session they are in the answer to the next Open.
	for some := range slices.Chunk(ss.node.manager.Returned(), maxEventPages) {
		ss.emitAll(func() *kvferrypb.Event {
			return &kvferrypb.Event{Kind: kvferrypb.Event_PAGES, Outcome: "returned", Pages: pageNumbers(some)}
		})
	}
}
