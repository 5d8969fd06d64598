package manager

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Admit reserves pages for all that the step will write, or nothing. Streams
// that do not exist are created. If the lane has staged this very step
// ([Manager.Stage]), that one is it; another staged one is dropped.
//
// It refuses, and holds nothing then: unknown requests (ErrUnknownRequest),
// requests that are being read into (ErrReading), streams that are not on the
// device ([*OffloadingError]), duplicates, bad spans, bad labels, bad forks and
// bad Combined (ErrInvalid), too few free pages ([*AllocationError]), and more
// steps, labels, forks, or tokens than the bounds allow ([*FullError]).
//
// A stream may be admitted again while a step on it is in flight, but only one
// of these steps can be committed. A request of which a stream is forked is in
// one step alone (ErrStepInFlight).
func (m *Manager) Admit(s Step) (Token, error) {
	m.mu.Lock()
	defer m.unlock()
	if t, ok := m.staged[s.Lane]; ok {
		delete(m.staged, s.Lane)
		if a := m.steps[t]; a.staged.equal(&s) && a.current() {
			m.promote(a)
			return t, nil
		}
		m.drop(t)
	}
	t, err := m.open(s, nil)
	if err != nil {
		return 0, fmt.Errorf("admit: %w", err)
	}
	return t, nil
}

// open makes a step of s; staged is that step as its own, or nil.
func (m *Manager) open(s Step, staged *Step) (Token, error) {
	if len(m.steps) >= m.limits.steps {
		return 0, &FullError{"steps in flight", m.limits.steps}
	}
	m.lastToken++ // a refused one is not used again, it has left its mark on streams
	t := m.lastToken
	a := m.spare
	if a == nil {
		a = new(step)
	}
	m.spare = nil
	a.discard, a.lease, a.staged = s.Discard, s.Lease, staged
	if err := m.admit(t, a, &s); err != nil {
		for _, g := range slices.Backward(a.created) {
			g.request.drop(g.stream)
		}
		m.recycle(a)
		return 0, err
	}
	m.steps[t] = a
	return t, nil
}

// admit walks the step in the order in which it will happen, with the length
// that each stream then has, and reserves the most that each reaches.
func (m *Manager) admit(t Token, a *step, s *Step) error {
	if slots := m.geometry.Layout.Pages * m.size; s.Lease.Slot < 0 || s.Lease.Tokens < 0 || s.Lease.Tokens > slots {
		return fmt.Errorf("%w: lease of slot %d, %d tokens, and the arena has room for %d", ErrInvalid, s.Lease.Slot, s.Lease.Tokens, slots)
	}
	if max(len(s.PreForks), len(s.PostForks)) > m.limits.labels {
		return &FullError{"forks before or after a step, as many as labels", m.limits.labels}
	}
	if err := m.resolve(t, s); err != nil {
		return err
	}
	if err := m.walkForks(t, a, s.PreForks); err != nil {
		return err
	}
	a.pre = len(a.forks)
	if err := m.walkSegments(t, a, s); err != nil {
		return err
	}
	if err := m.walkForks(t, a, s.PostForks); err != nil {
		return err
	}
	if err := m.packing.pack(a, s); err != nil {
		return err
	}
	if err := m.enough(a); err != nil {
		return err
	}
	m.reserve(a)
	a.carry(0, a.pre)
	return nil
}

// resolve finds the requests that forks are made for.
func (m *Manager) resolve(t Token, s *Step) error {
	m.rows = m.rows[:0]
	if len(s.PreForks)+len(s.PostForks) == 0 {
		return nil
	}
	row := func(r id.Request) error {
		req := m.requests[r]
		switch {
		case req == nil:
			return fmt.Errorf("%q: %w", r, ErrUnknownRequest)
		case req.row == t:
			return nil
		case req.reading != nil:
			return fmt.Errorf("%q: %w", r, ErrReading)
		case req.inFlight > 0:
			return fmt.Errorf("fork of %q: %w", r, ErrStepInFlight)
		}
		req.row = t
		m.rows = append(m.rows, req)
		return nil
	}
	if s.Rows != nil {
		for _, r := range s.Rows {
			if err := row(r); err != nil {
				return err
			}
		}
		return nil
	}
	for _, g := range s.Segments {
		if err := row(g.Request); err != nil {
			return err
		}
	}
	return nil
}

// touch makes a stream one that the step takes somewhere.
func (m *Manager) touch(t Token, req *request, st *stream) (*reach, error) {
	if st.state != Resident {
		return nil, &OffloadingError{req.id, st.label}
	}
	if st.reach.step != t {
		st.reach = reach{step: t, tokens: st.stored, own: st.stored}
	}
	return &st.reach, nil
}

func (m *Manager) walkForks(t Token, a *step, forks []Fork) error {
	for _, f := range forks {
		if f.From == f.To {
			return fmt.Errorf("%w: fork of label %q onto itself", ErrInvalid, f.From)
		}
		if err := f.To.Validate(); err != nil {
			return fmt.Errorf("%w: fork of %q: %w", ErrInvalid, f.From, err)
		}
		for _, req := range m.rows {
			if err := m.walkFork(t, a, req, f); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Manager) walkFork(t Token, a *step, req *request, f Fork) error {
	source := req.stream(f.From)
	if source == nil {
		return nil // a row that pads
	}
	from, err := m.touch(t, req, source)
	if err != nil {
		return err
	}
	target := req.stream(f.To)
	if target == nil {
		if target, err = m.create(a, req, f.To); err != nil {
			return err
		}
	}
	to, err := m.touch(t, req, target)
	if err != nil {
		return err
	}
	tokens := from.tokens
	a.forks = append(a.forks, fork{
		request: req, from: source, to: target, epoch: req.epoch, source: from.list,
		tokens: tokens, reach: tokens, released: source.released, prefix: source.prefix,
	})
	if from.list > 0 { // it has been forked itself: the length is its source's
		up := &a.forks[from.list-1]
		last := &a.forks[len(a.forks)-1]
		last.released, last.prefix = up.released, up.prefix
	}
	to.tokens, to.list = tokens, int32(len(a.forks))
	return nil
}

func (m *Manager) walkSegments(t Token, a *step, s *Step) error {
	tokens := 0
	for i := range s.Segments {
		g := &s.Segments[i]
		req := m.requests[g.Request]
		switch {
		case req == nil:
			return fmt.Errorf("%q: %w", g.Request, ErrUnknownRequest)
		case req.reading != nil:
			return fmt.Errorf("%q: %w", g.Request, ErrReading)
		case req.forking != nil:
			return fmt.Errorf("%q: it is being forked: %w", g.Request, ErrStepInFlight)
		case g.Span < 0 || g.Span > math.MaxInt32-tokens:
			return fmt.Errorf("%w: %q label %q: span %d", ErrInvalid, g.Request, g.Label, g.Span)
		}
		st := req.stream(g.Label)
		if st == nil {
			var err error
			if st, err = m.create(a, req, g.Label); err != nil {
				return err
			}
		}
		to, err := m.touch(t, req, st)
		if err != nil {
			return err
		}
		end := to.tokens + g.Span
		switch {
		case to.written:
			return fmt.Errorf("%w: two segments of %q label %q", ErrInvalid, g.Request, g.Label)
		case end > m.limits.tokens:
			return fmt.Errorf("%q label %q: %w", g.Request, g.Label, &FullError{"tokens a stream", m.limits.tokens})
		}
		a.segments = append(a.segments, segment{req, st, req.epoch, to.tokens, g.Span, to.list})
		to.written = true
		if to.list > 0 {
			f := &a.forks[to.list-1]
			f.reach = max(f.reach, end)
		} else {
			to.own = end
		}
		if !s.Discard {
			to.tokens = end
		}
		tokens += g.Span
	}
	return nil
}

// create makes a stream for the step.
func (m *Manager) create(a *step, req *request, l id.Label) (*stream, error) {
	if err := m.mayAdd(req, l); err != nil {
		return nil, err
	}
	st := req.add(l)
	a.created = append(a.created, segment{request: req, stream: st, epoch: req.epoch})
	return st, nil
}

// mayAdd checks the label and the bound of labels.
func (m *Manager) mayAdd(req *request, l id.Label) error {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("%q: %w: %w", req.id, ErrInvalid, err)
	}
	if len(req.streams) >= m.limits.labels {
		return fmt.Errorf("%q: %w", req.id, &FullError{"labels a request", m.limits.labels})
	}
	return nil
}

// enough checks that the whole step fits: what forks and segments need beyond
// what their streams have, forks first.
func (m *Manager) enough(a *step) error {
	b := m.budget()
	for i := range a.forks {
		b.back(len(m.idle(a, i)))
	}
	for i := range a.forks {
		f := &a.forks[i]
		b.spend(page.Count(f.reach-f.released, m.size), f.request, f.to.label)
	}
	for i := range a.segments {
		g := &a.segments[i]
		b.spend(m.lack(g), g.request, g.stream.label)
	}
	return b.err()
}

// lack returns how many pages the stream has to have beyond its own.
func (m *Manager) lack(g *segment) int {
	if g.list > 0 {
		return 0
	}
	return page.Count(g.base+g.span-g.stream.released, m.size) - len(g.stream.pages)
}

// idle returns the pages that the target of a fork has for nothing: its tokens
// will lie in others.
func (m *Manager) idle(a *step, i int) []page.Index {
	to := a.forks[i].to
	if to.reach.list != int32(i+1) {
		return nil // a later fork onto it counts
	}
	return to.pages[min(len(to.pages), page.Count(to.reach.own-to.released, m.size)):]
}

// reserve takes the pages, which have been counted, and marks the streams.
func (m *Manager) reserve(a *step) {
	for i := range a.forks {
		f := &a.forks[i]
		if spare := m.idle(a, i); len(spare) > 0 {
			m.release(spare)
			f.to.pages = f.to.pages[:len(f.to.pages)-len(spare)]
			f.to.mutation++
		}
	}
	for i := range a.forks {
		f := &a.forks[i]
		f.pages = m.take(nil, page.Count(f.reach-f.released, m.size), f.request, f.to.label)
		f.last = f.to.reach.list == int32(i+1)
		f.request.inFlight++
		f.request.forking = a
		f.request.active = m.tick()
	}
	now := m.tick()
	for i := range a.segments {
		g := &a.segments[i]
		if n := m.lack(g); n > 0 {
			g.stream.pages = m.take(g.stream.pages, n, g.request, g.stream.label)
			g.stream.mutation++
		}
		g.request.inFlight++
		g.request.active = now
		if g.writes() && a.staged == nil {
			g.stream.writing++
		}
	}
}

// promote makes a staged step one that runs.
func (m *Manager) promote(a *step) {
	a.staged = nil
	now := m.tick()
	for i := range a.segments {
		g := &a.segments[i]
		g.request.active = now
		if g.writes() {
			g.stream.writing++
		}
	}
	a.carry(0, a.pre)
}

// tick counts what happens to requests, so that one can tell which was active last.
func (m *Manager) tick() uint64 {
	m.ticks++
	return m.ticks
}
