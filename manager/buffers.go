package manager

import (
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// PlanState is the write addresses of one plan label as a captured graph reads
// them, at places that do not move (M*'s KVPlanState): token i goes to slot
// Slots[i] of page Pages[i]. Both have the length of the capacity.
type PlanState struct {
	Pages, Slots []int64 // M*'s token_to_page and token_to_cache
	Total        int     // of both, those that are tokens; the others are the sink's or stale
}

// Stage takes over the addresses of one plan (M*'s copy_), and pads them by
// writes to the sink up to the tokens that the graph always writes: what is
// left of an earlier plan there would land in somebody else's page. What lies
// behind is not touched. More than fits is refused (ErrInvalid), and nothing
// has changed then.
func (s *PlanState) Stage(from []page.Slot, capture int) error {
	if room := len(s.Pages); len(s.Slots) != room || capture < 0 || max(len(from), capture) > room {
		return fmt.Errorf("stage plan: %w: %d tokens, %d captured, in vectors of %d and %d", ErrInvalid, len(from), capture, room, len(s.Slots))
	}
	for i, at := range from {
		s.Pages[i], s.Slots[i] = int64(at.Page), int64(at.Slot)
	}
	for i := len(from); i < capture; i++ {
		s.Pages[i], s.Slots[i] = int64(page.Sink), 0
	}
	s.Total = len(from)
	return nil
}

// maxBuffers bounds the states of Buffers.
const maxBuffers = 4096

// Buffers are the plan states of captured graphs, one a graph slot and plan
// label, made when they are first staged (M*'s build_cuda_graph_buffers). The
// zero value has room for no token. They belong to one driver of steps: no two
// calls at once.
type Buffers struct {
	tokens int
	states map[bufferKey]*PlanState
}

type bufferKey struct {
	slot  int
	label id.Label
}

// Grow makes room for so many tokens in every state, those that exist
// included, unless there is as much already. Graphs that were captured over
// smaller vectors must be captured again.
func (b *Buffers) Grow(tokens int) {
	if tokens <= b.tokens {
		return
	}
	b.tokens = tokens
	for _, s := range b.states {
		more := make([]int64, 2*tokens)
		pages, slots := more[:tokens:tokens], more[tokens:]
		copy(pages, s.Pages)
		copy(slots, s.Slots)
		s.Pages, s.Slots = pages, slots
	}
}

// Stage puts a plan into the state of the lease's slot and the plan's label.
// The state is the buffers', and holds the plan until the next one is staged
// there.
//
// It refuses a lease without tokens, and a plan or a lease of more than there
// is room for (ErrInvalid), and a new state above the bound ([*FullError]).
func (b *Buffers) Stage(lease Lease, p *Plan) (*PlanState, error) {
	if lease.Slot < 0 || lease.Tokens <= 0 || max(p.Total, lease.Tokens) > b.tokens {
		return nil, fmt.Errorf("stage plan %q: %w: %d tokens, slot %d captured with %d, room for %d",
			p.Label, ErrInvalid, p.Total, lease.Slot, lease.Tokens, b.tokens)
	}
	key := bufferKey{lease.Slot, p.Label}
	s := b.states[key]
	if s == nil {
		if len(b.states) >= maxBuffers {
			return nil, fmt.Errorf("stage plan %q: %w", p.Label, &FullError{"graph buffers", maxBuffers})
		}
		if b.states == nil {
			b.states = make(map[bufferKey]*PlanState)
		}
		s = &PlanState{Pages: make([]int64, b.tokens), Slots: make([]int64, b.tokens)} // all the sink's
		b.states[key] = s
	}
	if err := s.Stage(p.Slots[:p.Total], lease.Tokens); err != nil {
		return nil, err
	}
	return s, nil
}
