package manager

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// View is one stream as a step sees it: the tokens [0, Length), those of the
// step included, without the Released ones behind the first Prefix.
type View struct {
	Request    id.Request
	Label      id.Label
	Pages      []page.Index // ceil((Length-Released)/PageSize) of them
	Length     int          // tokens
	Released   int          // tokens, whole pages
	Prefix     int          // tokens, whole pages; 0 if Released is
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

// Plan is the packing and the write addresses of one plan label.
type Plan struct {
	Label   id.Label
	Views   []View
	Indptrs Indptrs
	// Slots are where the new tokens are written, in pack order; with a lease,
	// the sink up to the tokens that its graph writes.
	Slots []page.Slot
	Total int // of Slots, those that are tokens

	pages []page.Index // of all views
}

// Plans are the plans of one step. They are its caller's, who may use them
// again for another step: then nothing is allocated that was there already.
type Plans struct {
	// Copies are to be made, in this order, before the engine writes anything.
	Copies []Copy
	Plans  []Plan
}

// Plan fills in views and write addresses of an admitted step, by plan label:
// the combined ones in the order of Step.Combined, then the others in the order
// in which they appear, and the copies that its forks before the segments need,
// unless the step is only staged. It changes nothing. The engine writes the
// slots before Commit or Abort only.
//
// It refuses a step of which a request was removed or reset since Admit
// (ErrUnknownRequest), or was advanced by another step (ErrInvalid): its slots
// are no longer the step's. Abort it, and admit what is left.
func (m *Manager) Plan(t Token, into *Plans) error {
	m.mu.Lock()
	defer m.unlock()
	a := m.steps[t]
	if a == nil {
		return fmt.Errorf("plan step %d: %w", t, ErrUnknownToken)
	}
	for i := range a.segments {
		g := &a.segments[i]
		if !g.live() {
			return fmt.Errorf("plan step %d: %q was removed or reset: %w", t, g.request.id, ErrUnknownRequest)
		}
		if g.overtaken() {
			return fmt.Errorf("plan step %d: %w: another step has advanced %q label %q", t, ErrInvalid, g.request.id, g.stream.label)
		}
	}
	into.Copies = into.Copies[:0]
	if a.staged == nil {
		into.Copies = a.copies(into.Copies, a.forks[:a.pre], m.size)
	}
	into.Plans = into.Plans[:cap(into.Plans)] // with what they have allocated
	for len(into.Plans) < len(a.plans) {
		into.Plans = append(into.Plans, Plan{})
	}
	into.Plans = into.Plans[:len(a.plans)]
	for i, p := range a.plans {
		m.plan(&into.Plans[i], a, p)
	}
	return nil
}

func (m *Manager) plan(out *Plan, a *step, p packed) {
	out.Label = p.label
	out.Views, out.pages, out.Slots = out.Views[:0], out.pages[:0], out.Slots[:0]
	x := &out.Indptrs
	x.QO, x.Pages = append(x.QO[:0], 0), append(x.Pages[:0], 0)
	x.Indices, x.LastPageLen = x.Indices[:0], x.LastPageLen[:0]
	tokens := int32(0)
	size := uint32(m.size)
	for i := p.from; i < p.to; i++ {
		g := a.at(i)
		released, prefix := g.stream.released, g.stream.prefix
		if g.list > 0 {
			released, prefix = a.forks[g.list-1].released, a.forks[g.list-1].prefix
		}
		length := g.base + g.span
		held := uint32(length - released)
		list := a.pages(g.stream, g.list)[:(held+size-1)/size]
		from := len(out.pages)
		out.pages = append(out.pages, list...)
		x.Indices = slices.Grow(x.Indices, len(list))[:from+len(list)]
		indices := x.Indices[from:][:len(list)]
		for j, p := range list { // with no test of bounds: there are many
			indices[j] = int32(p)
		}
		out.Views = append(out.Views, View{
			Request: g.request.id, Label: g.stream.label, Length: length, Released: released, Prefix: prefix,
			Compute: g.span, Generation: g.stream.mutation,
		})
		last := held - uint32(max(0, len(list)-1))*size
		if held == 0 {
			last = size
		}
		tokens += int32(g.span)
		x.QO = append(x.QO, tokens)
		x.Pages = append(x.Pages, int32(len(out.pages)))
		x.LastPageLen = append(x.LastPageLen, int32(last))
		first := uint32(g.base - released)
		at, slot := first/size, first%size
		for range g.span {
			out.Slots = append(out.Slots, page.Slot{Page: list[at], Slot: int32(slot)})
			if slot++; slot == size {
				at, slot = at+1, 0
			}
		}
	}
	for i := range out.Views { // the lists have their places now
		out.Views[i].Pages = out.pages[x.Pages[i]:x.Pages[i+1]:x.Pages[i+1]]
	}
	out.Total = len(out.Slots)
	for len(out.Slots) < a.lease.Tokens {
		out.Slots = append(out.Slots, page.Slot{Page: page.Sink})
	}
}
