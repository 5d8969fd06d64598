package node

import (
	"cmp"
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
// owner's bytes. What is followed is followed by name until it ends; only what is
// missing is looked for on the board.

// part is one owner's share of what is read.
type part struct {
	source *manager.Source
	seal   uint32         // index of its word
	was    id.Publication // what was followed, of which it is what is there now; zero: it is new
}

// whole is what a query is answered from: the source that is followed, with its
// Rest, and the seal words of all.
type whole struct {
	parts []part // the source first; none: it is short
	short error  // a [*shortError] if they have not all of our ranks
}

func (w *whole) source() *manager.Source { return w.parts[0].source }

// moved says that another publication goes on for one that is followed beside it.
func (w *whole) moved() bool {
	return slices.ContainsFunc(w.parts[1:], func(p part) bool { return p.was.Sequence != 0 && p.was != p.source.Name })
}

// shortError: a group has not published all ranks that are needed here.
type shortError struct{ err error }

func (e *shortError) Error() string { return e.err.Error() }
func (e *shortError) Unwrap() error { return e.err }

func isShort(err error) bool {
	_, ok := errors.AsType[*shortError](err)
	return ok
}

// partError is the failure of one owner's part.
type partError struct {
	source id.Publication
	err    error
}

func (e *partError) Error() string { return e.err.Error() }
func (e *partError) Unwrap() error { return e.err }

// blamed is the publication that a failure is of: the first, unless it says which.
func blamed(err error, first id.Publication) id.Publication {
	if p, ok := errors.AsType[*partError](err); ok {
		return p.source
	}
	return first
}

// gather completes a publication that lacks ranks of ours: by what is followed
// beside it, and by what the other nodes of its owner's group have published of
// the request. One that is not followed yet, and has none of our ranks, only says
// which group is meant. The error is of one that is followed; without followed
// there is none.
func (n *Node) gather(ctx context.Context, q query, first part, followed []*follow) (whole, error) {
	w := whole{parts: []part{first}}
	has := ranksOf(first.source)
	ours := maskOf(n.ranks)
	if has == 0 || ours&^has == 0 || has>>n.geometry.WorldSize != 0 {
		return w, nil // the manager refuses ranks that there are not
	}
	if len(followed) == 0 && has&ours == 0 {
		w.parts = nil
	}
	q.reference = nil // it is of one of them
	asked := []id.Life{first.source.Name.Owner}
	take := func(name, was id.Publication) error {
		asked = append(asked, name.Owner)
		e, s, err := n.fetch(ctx, q, name)
		if err != nil {
			return &partError{name, err}
		}
		if theirs := ranksOf(s); theirs&ours&^has != 0 {
			has |= theirs
			w.parts = append(w.parts, part{s, e.Seal, was})
		}
		return nil
	}
	for _, c := range followed[min(1, len(followed)):] {
		if err := take(c.source, c.source); err != nil {
			return w, err
		}
	}
	group := n.peers.groupOf(first.source.Name.Owner)
	var unmet error
	for _, e := range n.board.ByRequest(time.Now(), q.request) {
		if ours&^has == 0 || group == "" || len(asked) > id.MaxRanks {
			break
		}
		p := n.peers.byLife(e.Name.Owner)
		if p == nil || p.member.Meta.Group != group || slices.Contains(asked, p.life) {
			continue
		}
		switch h, met := p.said(); {
		case !met:
			unmet = &unmetError{e.Name, p}
		case h.ranks()&ours&^has != 0:
			_ = take(e.Name, id.Publication{}) // another one may have them
		}
	}
	switch {
	case ours&^has == 0:
	case unmet != nil:
		w.short = &shortError{unmet}
	default:
		w.short = &shortError{&manager.IncompatibleError{Fields: []page.Difference{{
			Field: "ranks", Ours: fmt.Sprint(n.ranks), Theirs: fmt.Sprint(ranksIn(has)),
		}}}}
	}
	if len(w.parts) > 1 {
		source := *w.parts[0].source
		for _, p := range w.parts[1:] {
			source.Rest = append(source.Rest, *p.source)
		}
		w.parts[0].source = &source
	}
	return w, nil
}

// maskOf is a bit a rank. What is no rank has none.
func maskOf(ranks []id.Rank) (mask uint64) {
	for _, r := range ranks {
		mask |= 1 << r
	}
	return mask
}

// ranksIn lists the ranks of a mask.
func ranksIn(mask uint64) (ranks []id.Rank) {
	for r := range id.Rank(id.MaxRanks) {
		if mask&(1<<r) != 0 {
			ranks = append(ranks, r)
		}
	}
	return ranks
}

// ranksOf are the ranks that one owner has published.
func ranksOf(s *manager.Source) (mask uint64) {
	for _, st := range s.Publication.Streams {
		mask |= maskOf(st.Ranks)
	}
	return mask
}

// ranks are those that a peer says it has.
func (h hello) ranks() (mask uint64) {
	for r := range h.arenas {
		mask |= 1 << r
	}
	return mask
}

// beside makes the follow hold a lease at each of the other owners, and at
// nobody else.
func (n *Node) beside(f *follow, others []part) {
	if len(others) == 0 && len(f.all()) == 1 {
		return
	}
	old, now := n.follows.beside(f, others)
	for _, c := range old {
		c.acknowledge(kvferrypb.CompleteItem_FAILED)
	}
	for _, c := range now {
		c.keep()
	}
}

// beside replaces what is followed beside a follow. It returns what is followed
// no more, and what is.
func (fs *follows) beside(f *follow, others []part) (old, now []*follow) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	f.mu.Lock()
	defer f.mu.Unlock()
	if fs.byRequest[f.request] != f || f.over {
		return nil, nil
	}
	old = slices.Clone(f.rest)
	for _, o := range others {
		var was *follow
		if at := slices.IndexFunc(old, func(c *follow) bool { return c.source == o.source.Name || c.source == o.was }); at >= 0 {
			was = old[at]
			old = slices.Delete(old, at, at+1)
		}
		if was == nil || was.source != o.source.Name {
			was = fs.joinLocked(f, o, was)
		}
		now = append(now, was)
	}
	for _, c := range old {
		fs.forget(c)
	}
	f.rest = now // never changed in place: it is looked through without the mutex
	return old, now
}

// joinLocked makes a follow of a part, beside another. If it goes on for one that
// was followed its lease is the same, as the owner has taken it along. The
// mutexes of the follows and of the one that leads are held.
func (fs *follows) joinLocked(lead *follow, p part, was *follow) *follow {
	c := &follow{
		node: lead.node, session: lead.session, request: lead.request, source: p.source.Name, seal: p.seal,
		accepted: lead.accepted, changed: make(chan struct{}), lead: lead,
	}
	if was == nil {
		fs.attempts++
		c.attempt = fs.attempts
	} else {
		c.attempt = was.attempt
		names := was.names
		fs.forget(was)
		for _, name := range names {
			fs.call(c, name)
		}
		was.leave()
	}
	fs.call(c, c.source)
	return c
}

// all are the follow itself, and those beside it.
func (f *follow) all() []*follow {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]*follow{f}, f.rest...)
}

// leader is the follow itself, or the one that it is beside.
func (f *follow) leader() *follow {
	f.mu.Lock()
	defer f.mu.Unlock()
	return cmp.Or(f.lead, f)
}

// join makes a follow one beside another.
func (f *follow) join(lead *follow) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lead = lead
}

// leave ends a follow whose lease another one goes on with.
func (f *follow) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.over = true
}
