package manager

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// PageState is one page for people to look at: who holds it, and why.
type PageState struct {
	Page  page.Index
	Place string // free, owned, limbo, quarantine, sink, engine
	// Whose it is: the stream that has it in its list, or will have it when the
	// retrieval, the step or the move below ends well. "" for none: in limbo, and
	// in quarantine once the request was removed or reset.
	Request id.Request
	Kept    id.Request // the key of Request, if it is kept
	Label   id.Label
	// Tokens of that stream that lie there, or will, from First on; 0: reserve.
	First, Tokens int
	// What runs and has the page for its own, writes it, or copies it; 0: nothing.
	Retrieval RetrievalID
	Step      Token
	Move      MoveID
	// Publications are the live ones that name it, ascending: as long as there
	// is one nobody writes what it names.
	Publications []PublicationID
}

// Page looks a page up. It takes time in proportion to all tables. The error
// wraps ErrInvalid: there is no such page.
func (m *Manager) Page(p page.Index) (PageState, error) {
	m.mu.Lock()
	defer m.unlock()
	if int64(p) >= int64(len(m.arena.pages)) {
		return PageState{}, fmt.Errorf("%w: page %d of an arena of %d", ErrInvalid, p, len(m.arena.pages))
	}
	s := PageState{Page: p, Place: m.arena.pages[p].place.String()}
	if m.arena.held(p) {
		for i, published := range m.publications {
			if slices.Contains(published.pages, p) {
				s.Publications = append(s.Publications, i)
			}
		}
		slices.Sort(s.Publications)
	}
	switch m.arena.pages[p].place {
	case owned, quarantine:
		m.lookInStreams(&s)
		m.lookInReads(&s)
		m.lookInSteps(&s)
		m.lookInMoves(&s)
	default:
	}
	return s, nil
}

// found says that the page is the i-th of a list that the stream has or will have.
func (s *PageState) found(r *request, l id.Label, i, size, length, released, prefix int) {
	s.Request, s.Kept, s.Label = r.id, r.key, l
	s.First = i * size
	if s.First >= prefix {
		s.First += released
	}
	s.Tokens = min(size, max(0, length-s.First))
}

func (m *Manager) lookInStreams(s *PageState) {
	for r := range m.all {
		for _, p := range r.purses {
			if slices.Contains(p.pages, s.Page) {
				s.Request, s.Label = r.id, p.label
				return
			}
		}
		for _, t := range r.streams {
			i := slices.Index(t.pages, s.Page)
			if i < 0 {
				continue
			}
			s.found(r, t.label, i, m.size, t.stored, t.released, t.prefix)
			if t.state == Offloading {
				s.Move = r.moving.id
			}
			if r.reading == nil {
				return
			}
			for _, p := range r.reading.parts {
				if p.stream == t && i >= p.first(m.size) && i < page.Count(p.to-p.released, m.size) {
					s.Retrieval = r.reading.id
				}
			}
			return
		}
	}
}

func (m *Manager) lookInReads(s *PageState) {
	for _, t := range m.retrievals {
		if slices.Contains(t.drain, s.Page) {
			s.Retrieval = t.id
		}
		for _, p := range t.parts {
			if i := slices.Index(p.reserved, s.Page); i >= 0 {
				if p.stream != nil {
					i += len(p.stream.pages)
				}
				s.found(t.request, p.label, i, m.size, p.to, p.released, p.prefix)
				s.Retrieval = t.id
			}
		}
	}
}

func (m *Manager) lookInSteps(s *PageState) {
	note := func(t Token) { // the first of those that write the page
		if s.Step == 0 || t < s.Step {
			s.Step = t
		}
	}
	for t, a := range m.steps {
		if slices.Contains(a.drain, s.Page) {
			note(t)
		}
		for i := range a.forks {
			f := &a.forks[i]
			if k := slices.Index(f.pages, s.Page); k >= 0 {
				if f.live() {
					s.found(f.request, f.to.label, k, m.size, f.reach, f.released, f.prefix)
				}
				note(t)
			}
		}
		for i := range a.segments {
			g := &a.segments[i]
			if !g.live() || !g.writes() || s.Request != g.request.id || s.Label != g.stream.label {
				continue
			}
			k := slices.Index(g.stream.pages, s.Page)
			first, last := (g.base-g.stream.released)/m.size, (g.base+g.span-g.stream.released-1)/m.size
			if k >= 0 && k >= first && k <= last {
				note(t)
			}
		}
	}
}

func (m *Manager) lookInMoves(s *PageState) {
	for _, w := range m.moves {
		if slices.Contains(w.drain, s.Page) {
			s.Move = w.id
		}
		if !w.reload {
			continue
		}
		for _, p := range w.parts {
			if k := slices.Index(p.to, s.Page); k >= 0 {
				s.Move = w.id
				if w.request != nil {
					s.found(w.request, p.stream.label, k, m.size, p.stream.stored, p.stream.released, p.stream.prefix)
				}
			}
		}
	}
}
