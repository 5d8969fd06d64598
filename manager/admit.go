package manager

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Segment appends Span tokens to a stream in one step; 0 only reads it.
type Segment struct {
	Request id.Request
	Label   id.Label
	Span    int
}

// Step is one forward pass over many requests. At most one segment a (request, label).
type Step struct {
	Segments []Segment
	// Discard: the tokens of the step do not become part of the streams (M*'s commit=false).
	Discard bool
	// Combined packs the segments of several labels into one plan label.
	Combined []Combined
}

// Combined packs the segments of Sources, in this order, label by label, under
// Label. Each source is in at most one Combined.
type Combined struct {
	Sources []id.Label
	Label   id.Label
}

// Token names an admitted step, from 1, never reused. It ends with Commit or Abort.
type Token uint64

// step is an admitted step.
type step struct {
	segments []segment // as they were given
	discard  bool
	order    []int32 // of segments, in pack order; empty: as they were given
	plans    []packed
}

// packed is one plan label: the segments [from, to) of the pack order.
type packed struct {
	label    id.Label
	from, to int
}

type segment struct {
	request    *request
	stream     *stream
	epoch      uint32 // of the request at Admit
	base, span int    // tokens: stored at Admit, and new
}

// live reports whether the stream is still the one that the step was admitted to.
func (g *segment) live() bool { return g.epoch == g.request.epoch }

// overtaken reports whether another step has written where this one would.
func (g *segment) overtaken() bool { return g.span > 0 && g.base != g.stream.stored }

// at returns the i-th segment in pack order.
func (s *step) at(i int) *segment {
	if len(s.order) > 0 {
		i = int(s.order[i])
	}
	return &s.segments[i]
}

// Admit reserves pages for all that the step will write, or nothing. Streams
// that do not exist are created.
//
// It refuses, and holds nothing then: unknown requests (ErrUnknownRequest),
// requests that are being read into (ErrReading), duplicates, bad spans, bad
// labels and bad Combined (ErrInvalid), too few free pages
// ([*AllocationError]), and more steps or labels than the bounds allow
// ([*FullError]).
//
// A stream may be admitted again while a step on it is in flight, but only one
// of these steps can be committed.
func (m *Manager) Admit(s Step) (Token, error) {
	m.mu.Lock()
	defer m.unlock()
	if len(m.steps) >= m.limits.steps {
		return 0, fmt.Errorf("admit: %w", &FullError{"steps in flight", m.limits.steps})
	}
	m.lastToken++ // a refused one is not used again, it has marked streams as seen
	t := m.lastToken
	a := m.spare
	if a == nil {
		a = new(step)
	}
	m.spare = nil
	a.discard = s.Discard
	if err := m.admit(t, a, s); err != nil {
		m.recycle(a)
		return 0, fmt.Errorf("admit: %w", err)
	}
	m.steps[t] = a
	return t, nil
}

func (m *Manager) admit(t Token, a *step, s Step) (err error) {
	var created []segment // streams to be taken back if the step is refused
	defer func() {
		if err != nil {
			for _, g := range slices.Backward(created) {
				g.request.drop(g.stream)
			}
		}
	}()

	var pages, tokens, tight int // tight is the first segment that does not fit
	for i, g := range s.Segments {
		req := m.requests[g.Request]
		switch {
		case req == nil:
			return fmt.Errorf("%q: %w", g.Request, ErrUnknownRequest)
		case req.reading != nil:
			return fmt.Errorf("%q: %w", g.Request, ErrReading)
		case g.Span < 0 || g.Span > math.MaxInt32-tokens:
			return fmt.Errorf("%w: %q label %q: span %d", ErrInvalid, g.Request, g.Label, g.Span)
		}
		st := req.byLabel[g.Label]
		if st == nil {
			if err := m.mayAdd(req, g.Label); err != nil {
				return err
			}
			st = req.add(g.Label)
			created = append(created, segment{request: req, stream: st})
		}
		if st.seen == t {
			return fmt.Errorf("%w: two segments of %q label %q", ErrInvalid, g.Request, g.Label)
		}
		st.seen = t
		tokens += g.Span
		pages += max(0, page.Count(st.stored+g.Span, m.size)-len(st.pages))
		if pages <= m.arena.counts[free] {
			tight = i + 1
		}
		a.segments = append(a.segments, segment{req, st, req.epoch, st.stored, g.Span})
	}
	if err := m.packing.pack(a, s); err != nil {
		return err
	}
	if short := pages - m.arena.counts[free]; short > 0 {
		g := s.Segments[tight]
		return &AllocationError{Request: g.Request, Label: g.Label, Short: short, Free: m.arena.counts[free]}
	}

	for i := range a.segments {
		g := &a.segments[i]
		if n := page.Count(g.base+g.span, m.size) - len(g.stream.pages); n > 0 {
			g.stream.pages, _ = m.arena.take(g.stream.pages, n)
			g.stream.mutation++
		}
		g.request.inFlight++
		if g.span > 0 {
			g.stream.writing++
		}
	}
	return nil
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

// packing is the scratch memory that pack works in.
type packing struct {
	index  map[id.Label]int32 // label to group
	groups []group
	of     []int32 // a segment's group
	order  []int32 // groups in pack order
}

// group is the segments of one label.
type group struct {
	label    id.Label
	segments int32
	combined bool
	next     int32 // where its next segment goes in pack order
}

// pack sorts the segments by plan label: first the combined ones, then each
// label that is in none under its own name.
func (k *packing) pack(a *step, s Step) error {
	k.group(s.Segments)
	k.order = k.order[:0]
	planned := 0 // segments
	plan := func(l id.Label, groups []int32) {
		from := planned
		for _, g := range groups {
			k.groups[g].next = int32(planned)
			planned += int(k.groups[g].segments)
		}
		a.plans = append(a.plans, packed{l, from, planned})
	}
	for _, c := range s.Combined {
		if err := c.Label.Validate(); err != nil {
			return fmt.Errorf("%w: combined label: %w", ErrInvalid, err)
		}
		if len(c.Sources) == 0 {
			return fmt.Errorf("%w: combined label %q has no sources", ErrInvalid, c.Label)
		}
		from := len(k.order)
		for _, l := range c.Sources {
			g, ok := k.index[l]
			if !ok {
				return fmt.Errorf("%w: combined label %q: source %q has no segment", ErrInvalid, c.Label, l)
			}
			if k.groups[g].combined {
				return fmt.Errorf("%w: combined label %q: source %q is used twice", ErrInvalid, c.Label, l)
			}
			k.groups[g].combined = true
			k.order = append(k.order, g)
		}
		plan(c.Label, k.order[from:])
	}
	for g := range k.groups {
		if !k.groups[g].combined {
			k.order = append(k.order, int32(g))
			plan(k.groups[g].label, k.order[len(k.order)-1:])
		}
	}
	if len(s.Combined) > 0 {
		clear(k.index)
		for i, p := range a.plans {
			if _, ok := k.index[p.label]; ok {
				return fmt.Errorf("%w: combined label %q is also another plan's", ErrInvalid, p.label)
			}
			k.index[p.label] = int32(i)
		}
	}
	if len(k.groups) < 2 {
		return nil
	}
	a.order = slices.Grow(a.order[:0], len(a.segments))[:len(a.segments)]
	for i := range a.segments {
		g := &k.groups[k.of[i]]
		a.order[g.next] = int32(i)
		g.next++
	}
	return nil
}

// group numbers the labels in the order in which they appear.
func (k *packing) group(segments []Segment) {
	if k.index == nil {
		k.index = make(map[id.Label]int32)
	}
	clear(k.index)
	clear(k.groups) // they hold strings
	k.groups = k.groups[:0]
	k.of = k.of[:0]
	var last int32
	for i, g := range segments {
		if i == 0 || g.Label != segments[i-1].Label {
			n, ok := k.index[g.Label]
			if !ok {
				n = int32(len(k.groups))
				k.index[g.Label] = n
				k.groups = append(k.groups, group{label: g.Label})
			}
			last = n
		}
		k.groups[last].segments++
		k.of = append(k.of, last)
	}
}

// Commit makes the step's tokens part of the streams: the engine has written
// them, and peers may read them once they are published.
//
// Requests of which nothing was committed are returned: those that were
// removed or reset since Admit, and those that another step, admitted at the
// same length, has advanced. The others are committed. A step with Discard
// loses only the former.
func (m *Manager) Commit(t Token) (missing []id.Request, err error) {
	m.mu.Lock()
	defer m.unlock()
	a := m.steps[t]
	if a == nil {
		return nil, fmt.Errorf("commit step %d: %w", t, ErrUnknownToken)
	}
	for i := range a.segments {
		g := &a.segments[i]
		if g.request.missing != t && (!g.live() || !a.discard && g.overtaken()) {
			g.request.missing = t
			missing = append(missing, g.request.id)
		}
	}
	m.retire(a)
	for i := range a.segments {
		g := &a.segments[i]
		if a.discard || g.span == 0 || g.request.missing == t {
			continue
		}
		s := g.stream
		s.stored += g.span
		s.mutation++
		s.overtaken += s.writing
		s.writing = 0
	}
	delete(m.steps, t)
	m.recycle(a)
	return missing, nil
}

// Abort ends a step that did not run: lengths stay, pages stay as reserve. The
// caller promises that nothing writes the planned slots any more.
func (m *Manager) Abort(t Token) error {
	m.mu.Lock()
	defer m.unlock()
	a := m.steps[t]
	if a == nil {
		return fmt.Errorf("abort step %d: %w", t, ErrUnknownToken)
	}
	m.retire(a)
	delete(m.steps, t)
	m.recycle(a)
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
		case g.span == 0:
		case g.overtaken():
			g.stream.overtaken--
		default:
			g.stream.writing--
		}
	}
}

// recycle keeps one ended step, so that steady decoding allocates nothing here.
func (m *Manager) recycle(a *step) {
	clear(a.segments)
	clear(a.plans)
	a.segments, a.plans, a.order = a.segments[:0], a.plans[:0], a.order[:0]
	m.spare = a
}
