package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// The ranks of one engine may be spread over the nodes of a group. Each of them
// publishes its own ranks' pages, under a name and a seal word of its own. A
// reader that needs ranks of several follows one of them, and the others beside
// it: with a lease at each, one retrieval of all, and every word read after its
// owner's bytes.

// part is one owner's share of what is read.
type part struct {
	source *manager.Source
	seal   uint32 // index of its word
}

// whole is what a query is answered from: the source that is followed, with its
// Rest, and the seal words of all. missing says why it is not more.
type whole struct {
	parts   []part // the source first
	missing error
}

func (w *whole) source() *manager.Source { return w.parts[0].source }

// gather completes a source that lacks some of our ranks by what the other
// nodes of its owner's group have published of the request, the newest of each.
func (n *Node) gather(ctx context.Context, q query, seal uint32, source *manager.Source) whole {
	w := whole{parts: []part{{source, seal}}}
	ours := n.lacking(source)
	if len(ours) == 0 {
		return w
	}
	owner := n.peers.byLife(source.Name.Owner)
	if owner == nil {
		return w
	}
	q.reference = nil // it is of one of them
	asked := []id.Life{source.Name.Owner}
	var rest []manager.Source
	for _, e := range n.board.ByRequest(time.Now(), q.request) {
		p := n.peers.byLife(e.Name.Owner)
		if len(ours) == 0 || p == nil || p.member.Meta.Group != owner.member.Meta.Group || slices.Contains(asked, e.Name.Owner) {
			continue
		}
		asked = append(asked, e.Name.Owner)
		e, s, err := n.fetch(ctx, q, e.Name)
		if err != nil {
			if _, unmet := errors.AsType[*unmetError](err); unmet {
				w.missing = err
			}
			continue
		}
		theirs := ranksOf(s)
		if !slices.ContainsFunc(theirs, func(r id.Rank) bool { return slices.Contains(ours, r) }) {
			continue
		}
		ours = slices.DeleteFunc(ours, func(r id.Rank) bool { return slices.Contains(theirs, r) })
		rest = append(rest, *s)
		w.parts = append(w.parts, part{s, e.Seal})
	}
	whole := *source
	whole.Rest = rest
	w.parts[0].source = &whole
	return w
}

// lacking are our ranks that a source does not have.
func (n *Node) lacking(s *manager.Source) []id.Rank {
	theirs := ranksOf(s)
	return slices.DeleteFunc(slices.Clone(n.ranks), func(r id.Rank) bool { return slices.Contains(theirs, r) })
}

// ranksOf are the ranks that a source has, ascending.
func ranksOf(s *manager.Source) []id.Rank {
	var all []id.Rank
	for _, st := range s.Publication.Streams {
		all = append(all, st.Ranks...)
	}
	for i := range s.Rest {
		all = append(all, ranksOf(&s.Rest[i])...)
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// beside makes the follow hold a lease at each of the other owners, and at
// nobody else.
func (n *Node) beside(f *follow, others []part) {
	fs := n.follows
	fs.mu.Lock()
	f.mu.Lock()
	if fs.byRequest[f.request] != f || f.over {
		f.mu.Unlock()
		fs.mu.Unlock()
		return
	}
	old := f.rest
	f.rest = nil
	for _, o := range others {
		at := slices.IndexFunc(old, func(c *follow) bool { return c.source == o.source.Name })
		if at >= 0 {
			f.rest = append(f.rest, old[at])
			old = slices.Delete(old, at, at+1)
			continue
		}
		fs.attempts++
		c := &follow{
			node: n, session: f.session, request: f.request, source: o.source.Name, seal: o.seal, attempt: fs.attempts,
			accepted: time.Now(), changed: make(chan struct{}), lead: f,
		}
		fs.call(c, c.source)
		f.rest = append(f.rest, c)
	}
	for _, c := range old {
		fs.forget(c)
	}
	now := slices.Clone(f.rest)
	f.mu.Unlock()
	fs.mu.Unlock()
	for _, c := range old {
		c.acknowledge(kvferrypb.CompleteItem_FAILED)
	}
	for _, c := range now {
		c.keep()
	}
}

// isBeside says that others are followed beside it.
func (f *follow) isBeside() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.rest) > 0
}

// leader is the follow that a follow beside it belongs to; nil if it is one itself.
func (f *follow) leader() *follow {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lead
}

// covers refuses what has not all of our ranks: whoever has may publish it yet.
func (n *Node) covers(s *manager.Source) error {
	if theirs := ranksOf(s); len(theirs) > 0 && len(n.lacking(s)) > 0 {
		return &manager.IncompatibleError{Fields: []page.Difference{{
			Field: "ranks", Ours: fmt.Sprint(n.ranks), Theirs: fmt.Sprint(theirs),
		}}}
	}
	return nil
}
