package manager

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Grant is pages that the engine gives to a stream.
type Grant struct {
	Request id.Request
	Label   id.Label // need not exist
	Pages   []page.Index
}

// PageError names a page that cannot be given. It wraps ErrPage.
type PageError struct {
	Page    page.Index
	Problem string
}

func (e *PageError) Error() string { return fmt.Sprintf("%v: page %d: %s", ErrPage, e.Page, e.Problem) }
func (e *PageError) Unwrap() error { return ErrPage }

// purse is what the engine has given to a stream, and the stream has not used.
type purse struct {
	label id.Label
	pages []page.Index
	left  int    // scratch of a budget
	mark  uint64 // of the budget that left is of
}

// Give makes pages of the engine's the request's: the streams use them, in the
// order in which they were given, wherever else they would get free ones: for new
// tokens, forks onto them, and what is retrieved. What they do not use, and what a
// step or a read has taken that came to nothing, stays given: it goes back with
// Remove, and with Reset that frees. A grant without pages gives nothing.
//
// It refuses, and gives none then: a manager whose pages the engine does not choose
// and bad labels (ErrInvalid), unknown requests (ErrUnknownRequest), more labels of a
// request than the bound ([*FullError]), and pages that the engine does not have, or
// has not been told that it has ([*PageError]).
func (m *Manager) Give(grants ...Grant) error {
	m.mu.Lock()
	defer m.unlock()
	if !m.arena.chosen {
		return fmt.Errorf("give pages: %w: the node chooses them", ErrInvalid)
	}
	for i := range grants {
		if err := m.give(&grants[i]); err != nil {
			for _, g := range slices.Backward(grants[:i]) {
				m.takeBack(&g)
			}
			return fmt.Errorf("give pages to %q: %w", grants[i].Request, err)
		}
	}
	return nil
}

func (m *Manager) give(g *Grant) error {
	req := m.requests[g.Request]
	if req == nil {
		return ErrUnknownRequest
	}
	if err := g.Label.Validate(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if len(g.Pages) == 0 {
		return nil
	}
	if req.purse(g.Label) == nil && len(req.purses) >= m.limits.labels {
		return &FullError{"labels a request", m.limits.labels}
	}
	p := req.openPurse(g.Label)
	for i, x := range g.Pages {
		if problem := m.arena.problem(x); problem != "" {
			if slices.Contains(g.Pages[:i], x) {
				problem = "it is given twice"
			}
			m.takeBack(&Grant{Request: g.Request, Label: g.Label, Pages: g.Pages[:i]})
			return &PageError{x, problem}
		}
		m.arena.move(x, owned)
		p.pages = append(p.pages, x)
	}
	return nil
}

// takeBack undoes what give has just done, the last of the grants first: their
// pages are at the end of their purses.
func (m *Manager) takeBack(g *Grant) {
	req := m.requests[g.Request]
	p := req.purse(g.Label)
	if p == nil { // the grant was empty, and has opened none
		return
	}
	for _, x := range g.Pages {
		m.arena.move(x, engine)
	}
	if p.pages = p.pages[:len(p.pages)-len(g.Pages)]; len(p.pages) == 0 {
		req.purses = slices.DeleteFunc(req.purses, func(q purse) bool { return q.label == g.Label })
	}
}

// problem says why the engine cannot give a page; "" if it can.
func (a *arena) problem(p page.Index) string {
	switch {
	case int64(p) >= int64(len(a.pages)):
		return fmt.Sprintf("the arena has %d", len(a.pages))
	case a.pages[p].place != engine:
		return fmt.Sprintf("it is %v", a.pages[p].place)
	case a.pages[p].untold:
		return "it has come back, and the engine was not told yet"
	default:
		return ""
	}
}

// Returned names the pages that are the engine's again, each once: nothing
// writes, reads, or names them any more.
func (m *Manager) Returned() []page.Index {
	m.mu.Lock()
	defer m.unlock()
	return m.returned()
}

func (m *Manager) returned() []page.Index {
	list := m.arena.returned
	m.arena.returned = nil
	for _, p := range list {
		m.arena.pages[p].untold = false
	}
	return list
}

// Returns has something in it when Returned has.
func (m *Manager) Returns() <-chan struct{} { return m.returns }

// Engine lists all pages that the engine keeps, for one that has lost count: they
// have been told by that, and are in no later Returned.
func (m *Manager) Engine() []page.Run {
	m.mu.Lock()
	defer m.unlock()
	m.returned()
	var runs []page.Run
	for i := range m.arena.pages {
		if m.arena.pages[i].place != engine {
			continue
		}
		p := page.Index(i)
		if n := len(runs); n > 0 && runs[n-1].First+page.Index(runs[n-1].Count) == p {
			runs[n-1].Count++
		} else {
			runs = append(runs, page.Run{First: p, Count: 1})
		}
	}
	return runs
}

// purse returns nil if the engine has given nothing to the label.
func (r *request) purse(l id.Label) *purse {
	for i := range r.purses {
		if r.purses[i].label == l {
			return &r.purses[i]
		}
	}
	return nil
}

// openPurse makes one if there is none.
func (r *request) openPurse(l id.Label) *purse {
	if p := r.purse(l); p != nil {
		return p
	}
	r.purses = append(r.purses, purse{label: l})
	return &r.purses[len(r.purses)-1]
}

// empty gives the engine back what the request's streams have not used.
func (m *Manager) empty(r *request) {
	for i := range r.purses {
		m.release(r.purses[i].pages)
	}
	r.purses = nil
}

// take appends n pages for a stream to dst, which have been counted: free ones, or
// those that the engine has given to it.
func (m *Manager) take(dst []page.Index, n int, r *request, l id.Label) []page.Index {
	if !m.arena.chosen {
		dst, _ = m.arena.take(dst, n)
		return dst
	}
	return r.spend(dst, n, l)
}

// takeLike is take of as many pages as like has; see [arena.takeLike].
func (m *Manager) takeLike(dst, like []page.Index, next page.Index, r *request, l id.Label) []page.Index {
	if !m.arena.chosen {
		dst, _ = m.arena.takeLike(dst, like, next)
		return dst
	}
	return r.spend(dst, len(like), l)
}

func (r *request) spend(dst []page.Index, n int, l id.Label) []page.Index {
	if n <= 0 {
		return dst
	}
	p := r.purse(l)
	dst = append(dst, p.pages[:n]...)
	p.pages = p.pages[n:]
	return dst
}

// unspend puts back, in front, what a step or a read of the live request has taken
// for a stream and not used; without grants it becomes free.
func (m *Manager) unspend(pages []page.Index, r *request, l id.Label) {
	if !m.arena.chosen {
		m.release(pages)
		return
	}
	if len(pages) == 0 {
		return
	}
	p := r.openPurse(l)
	for _, x := range pages {
		m.arena.move(x, owned) // from quarantine, if the read was given up
	}
	p.pages = slices.Concat(pages, p.pages)
}

// budget counts what one call takes, before it takes anything.
type budget struct {
	m     *Manager
	mark  uint64 // of the purses
	left  int    // free pages, and what the call gives back first
	short int    // pages missing so far
	of    id.Request
	label id.Label // the first that does not fit
}

func (m *Manager) budget() budget {
	if m.arena.chosen {
		return budget{m: m, mark: m.tick()}
	}
	return budget{m: m, left: m.arena.counts[free]}
}

// back says that the call gives so many pages back before it takes any.
func (b *budget) back(n int) {
	if !b.m.arena.chosen { // they are the engine's
		b.left += n
	}
}

// spend counts n more pages for a stream.
func (b *budget) spend(n int, r *request, l id.Label) {
	if n <= 0 {
		return
	}
	left := &b.left
	if b.m.arena.chosen {
		p := r.purse(l)
		if p == nil {
			p = new(purse)
		}
		if p.mark != b.mark {
			p.left, p.mark = len(p.pages), b.mark
		}
		left = &p.left
	}
	missing := max(0, n-*left)
	*left -= n - missing
	if missing > 0 && b.short == 0 {
		b.of, b.label = r.id, l
	}
	b.short += missing
}

// err is nil if there is enough.
func (b *budget) err() error {
	if b.short == 0 {
		return nil
	}
	return &AllocationError{Request: b.of, Label: b.label, Short: b.short, Free: b.m.arena.counts[free]}
}
