package manager

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Copy is bytes to be moved inside the arena of every local rank: the first
// Tokens slots of Source onto those of Target, all layers, K and V, and no slot
// beyond. To do it again changes nothing.
type Copy struct {
	Request        id.Request
	From, To       id.Label
	Source, Target []page.Index // as many as the tokens need
	Tokens         int
}

// Committed is what came of a step.
type Committed struct {
	// Missing are the requests of which nothing was committed.
	Missing []id.Request
	// Unseal are publications of tokens that a fork has replaced: clear their
	// seal words, then call Unsealed.
	Unseal []PublicationID
}

// PostForks returns the copies that the step's forks after the segments need,
// in order. The engine has written all tokens of the step. Make them, then
// commit: until the step ends nobody else writes the pages. It refuses a staged
// step (ErrStaged).
func (m *Manager) PostForks(t Token) ([]Copy, error) {
	m.mu.Lock()
	defer m.unlock()
	a, err := m.running(t)
	if err != nil {
		return nil, fmt.Errorf("forks of step %d: %w", t, err)
	}
	return a.copies(nil, a.forks[a.pre:], m.size), nil
}

// running returns a step that may be committed.
func (m *Manager) running(t Token) (*step, error) {
	a := m.steps[t]
	switch {
	case a == nil:
		return nil, ErrUnknownToken
	case a.staged != nil:
		return nil, ErrStaged
	default:
		return a, nil
	}
}

// copies appends what the forks need. The lists are the caller's.
func (s *step) copies(dst []Copy, forks []fork, size int) []Copy {
	for i := range forks {
		f := &forks[i]
		n := page.Count(f.tokens-f.released, size)
		if n == 0 || !f.live() {
			continue
		}
		dst = append(dst, Copy{
			Request: f.request.id, From: f.from.label, To: f.to.label, Tokens: f.tokens - f.released,
			Source: slices.Clone(s.pages(f.from, f.source)[:n]), Target: slices.Clone(f.pages[:n]),
		})
	}
	return dst
}

// Commit makes the step's tokens part of the streams, and its forks: the engine
// has written them, the caller has made the copies, and peers may read them
// once they are published. Streams with a retention are trimmed.
//
// Requests of which nothing was committed are returned: those that were
// removed or reset since Admit, and those that another step, admitted at the
// same length, has advanced. The others are committed. A step with Discard
// loses only the former, and leaves no label that it made and did not fork onto. It refuses a staged step (ErrStaged).
func (m *Manager) Commit(t Token) (Committed, error) {
	m.mu.Lock()
	defer m.unlock()
	a, err := m.running(t)
	if err != nil {
		return Committed{}, fmt.Errorf("commit step %d: %w", t, err)
	}
	var out Committed
	for i := range a.segments {
		g := &a.segments[i]
		if g.request.missing != t && (!g.live() || !a.discard && g.overtaken()) {
			g.request.missing = t
			out.Missing = append(out.Missing, g.request.id)
		}
	}
	for i := range a.forks { // also of rows without a segment
		if f := &a.forks[i]; f.request.missing != t && !f.live() {
			f.request.missing = t
			out.Missing = append(out.Missing, f.request.id)
		}
	}
	m.retire(a)
	now := m.tick()
	for i := range a.segments {
		g := &a.segments[i]
		if g.request.missing == t {
			continue
		}
		g.request.active = now
		if a.discard || g.span == 0 {
			continue
		}
		if g.list > 0 { // the fork's target is the stream that grows
			f := &a.forks[g.list-1]
			f.tokens = max(f.tokens, g.base+g.span)
			continue
		}
		s := g.stream
		s.stored += g.span
		s.mutation++
		s.overtaken += s.writing
		s.writing = 0
	}
	a.carry(a.pre, len(a.forks))
	for i := range a.forks {
		f := &a.forks[i]
		f.request.active = now
		if f.request.missing != t && f.last {
			out.Unseal = m.replace(out.Unseal, f)
		}
	}
	for i := range a.segments {
		if g := &a.segments[i]; g.request.missing != t {
			m.trim(g.request, g.stream)
		}
	}
	for i := range a.forks {
		if f := &a.forks[i]; f.request.missing != t {
			m.trim(f.request, f.to)
		}
	}
	if a.discard {
		for i := range a.created {
			if g := &a.created[i]; g.request.missing != t {
				g.epoch = g.request.epoch // a fork may have moved it
			}
		}
		m.uncreate(a)
	}
	m.end(t)
	return out, nil
}

// replace gives the fork's pages to its target. Those that it had go, to limbo
// if they are published; then that publication is of other tokens, and ends.
func (m *Manager) replace(unseal []PublicationID, f *fork) []PublicationID {
	s, req := f.to, f.request
	if s.offered > 0 {
		unseal = append(unseal, req.publication.id)
		req.disown()
	}
	if s.stored > 0 && req.publication == nil { // a live one does not name it
		req.epoch++
		req.ended = false
	}
	m.release(s.pages)
	s.pages, f.pages = f.pages, nil
	s.stored, s.released, s.prefix = f.tokens, f.released, f.prefix
	s.position, s.retention = f.position, f.retention
	s.origin, s.landed = origin{}, 0 // the copy is nobody's but ours
	s.mutation++
	return unseal
}

// Abort ends a step that did not run: lengths stay, pages stay as reserve,
// forks were never made, and labels that it made are gone. The caller promises that nothing writes the planned
// slots any more, and that no copy of the step is being made.
func (m *Manager) Abort(t Token) error {
	m.mu.Lock()
	defer m.unlock()
	a := m.steps[t]
	if a == nil {
		return fmt.Errorf("abort step %d: %w", t, ErrUnknownToken)
	}
	if a.staged != nil {
		delete(m.staged, a.staged.Lane)
		m.drop(t)
		return nil
	}
	m.retire(a)
	m.uncreate(a)
	m.end(t)
	return nil
}

// retire takes the marks of a step off its streams.
func (m *Manager) retire(a *step) {
	for i := range a.segments {
		g := &a.segments[i]
		if !g.live() {
			continue // Reset and Remove have taken them
		}
		g.request.inFlight--
		switch {
		case !g.writes() || a.staged != nil:
		case g.overtaken():
			g.stream.overtaken--
		default:
			g.stream.writing--
		}
	}
	for i := range a.forks {
		f := &a.forks[i]
		if f.live() {
			f.request.inFlight--
		}
		if f.request.forking == a { // also of one that is kept
			f.request.forking = nil
		}
	}
}

// end forgets a step whose marks have been taken off, and lets go of the pages
// that are still its own.
func (m *Manager) end(t Token) {
	a := m.steps[t]
	for i := range a.forks {
		if f := &a.forks[i]; f.live() {
			m.unspend(f.pages, f.request, f.to.label)
		} else {
			m.release(f.pages)
		}
	}
	m.release(a.drain)
	delete(m.steps, t)
	m.recycle(a)
}

// recycle keeps one ended step, so that steady decoding allocates nothing here.
func (m *Manager) recycle(a *step) {
	clear(a.segments)
	clear(a.plans)
	clear(a.forks)
	clear(a.created)
	a.segments, a.plans, a.order, a.forks, a.created = a.segments[:0], a.plans[:0], a.order[:0], a.forks[:0], a.created[:0]
	a.pre, a.staged, a.drain = 0, nil, nil
	m.spare = a
}
