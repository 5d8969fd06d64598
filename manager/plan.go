package manager

import (
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// View is one stream as a step sees it.
type View struct {
	Request    id.Request
	Label      id.Label
	Pages      []page.Index // ceil(Length/PageSize) of them
	Length     int          // tokens, the step's included
	Compute    int          // new tokens: the segment's span
	Generation uint64       // the stream's mutation epoch
}

// Indptrs are the ragged index vectors of one plan label in pack order, as
// paged attention kernels take them. LastPageLen is in 1..PageSize.
type Indptrs struct {
	QO          []int32 // len(views)+1: prefix sums of Compute
	Pages       []int32 // len(views)+1: prefix sums of page counts
	Indices     []int32 // all pages, one after the other
	LastPageLen []int32 // len(views); PageSize for a view without tokens
}

// Slot is where one new token is written.
type Slot struct {
	Page page.Index
	Slot int32
}

// Plan is the packing and the write addresses of one plan label.
type Plan struct {
	Label   id.Label
	Views   []View
	Indptrs Indptrs
	Slots   []Slot // one a new token, in pack order
}

// Plan returns views and write addresses of an admitted step, by plan label:
// the combined ones in the order of Step.Combined, then the others in the order
// in which they appear. It changes nothing. The caller owns what it returns and
// writes the slots before Commit or Abort only.
//
// It refuses a step of which a request was removed or reset since Admit
// (ErrUnknownRequest), or was advanced by another step (ErrInvalid): its slots
// are no longer the step's. Abort it, and admit what is left.
func (m *Manager) Plan(t Token) ([]Plan, error) {
	m.mu.Lock()
	defer m.unlock()
	a := m.steps[t]
	if a == nil {
		return nil, fmt.Errorf("plan step %d: %w", t, ErrUnknownToken)
	}
	for i := range a.segments {
		g := &a.segments[i]
		if !g.live() {
			return nil, fmt.Errorf("plan step %d: %q was removed or reset: %w", t, g.request.id, ErrUnknownRequest)
		}
		if g.overtaken() {
			return nil, fmt.Errorf("plan step %d: %w: another step has advanced %q label %q", t, ErrInvalid, g.request.id, g.stream.label)
		}
	}
	plans := make([]Plan, len(a.plans))
	for i, p := range a.plans {
		plans[i] = m.plan(a, p)
	}
	return plans, nil
}

func (m *Manager) plan(a *step, p packed) Plan {
	var pages, tokens int
	for i := p.from; i < p.to; i++ {
		g := a.at(i)
		pages += page.Count(g.base+g.span, m.size)
		tokens += g.span
	}
	n := p.to - p.from
	all := make([]page.Index, 0, pages) // of all views
	ints := make([]int32, 2*(n+1)+n+pages)
	cut := func(n int) (part []int32) {
		part, ints = ints[:n:n], ints[n:]
		return part
	}
	out := Plan{
		Label:   p.label,
		Views:   make([]View, n),
		Slots:   make([]Slot, 0, tokens),
		Indptrs: Indptrs{QO: cut(n + 1), Pages: cut(n + 1), LastPageLen: cut(n), Indices: cut(pages)},
	}
	for i := range n {
		g := a.at(p.from + i)
		length := g.base + g.span
		list := g.stream.pages[:page.Count(length, m.size)]
		from := len(all)
		all = append(all, list...)
		indices := out.Indptrs.Indices[from:len(all)]
		for j, x := range all[from:] {
			indices[j] = int32(x)
		}
		out.Views[i] = View{
			Request:    g.request.id,
			Label:      g.stream.label,
			Pages:      all[from:len(all):len(all)],
			Length:     length,
			Compute:    g.span,
			Generation: g.stream.mutation,
		}
		last := m.size
		if length > 0 {
			last = (length-1)%m.size + 1
		}
		out.Indptrs.QO[i+1] = out.Indptrs.QO[i] + int32(g.span)
		out.Indptrs.Pages[i+1] = int32(len(all))
		out.Indptrs.LastPageLen[i] = int32(last)
		for token := g.base; token < length; token++ {
			out.Slots = append(out.Slots, Slot{list[token/m.size], int32(token % m.size)})
		}
	}
	return out
}
