package manager

import (
	"errors"
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func TestPlanStateRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		s       PlanState
		from    []page.Slot
		capture int
	}{
		"more tokens than room":  {PlanState{Pages: []int64{9}, Slots: []int64{9}}, slots(at(1, 1), at(1, 2)), 1},
		"more captured":          {PlanState{Pages: []int64{9}, Slots: []int64{9}}, nil, 2},
		"negative":               {PlanState{Pages: []int64{9}, Slots: []int64{9}}, nil, -1},
		"vectors of two lengths": {PlanState{Pages: []int64{9}}, nil, 0},
	} {
		if err := c.s.Stage(c.from, c.capture); !errors.Is(err, ErrInvalid) || c.s.Pages[0] != 9 {
			t.Errorf("%s: %v, %v", name, err, c.s)
		}
	}
}

// A captured graph writes all its tokens: what no request has goes to the sink,
// whatever an earlier plan has left there.
func TestBuffers(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a", "b")
	var bufs Buffers
	lease := Lease{Slot: 3, Tokens: 4}
	stage := func(spans ...int) *PlanState {
		t.Helper()
		var s []Segment
		for i, n := range spans {
			s = append(s, Segment{[]id.Request{"a", "b"}[i], "main", n})
		}
		tok, err := b.Admit(Step{Segments: s, Lease: lease})
		b.ok(err)
		p := b.plan(tok)
		b.same("padded", len(p.Slots), max(p.Total, lease.Tokens))
		state, err := bufs.Stage(lease, &p)
		b.ok(err)
		b.commit(tok)
		return state
	}
	bufs.Grow(6)
	first := stage(3, 1) // pages 1 and 2
	b.same("state", *first, PlanState{Pages: []int64{1, 1, 1, 2, 0, 0}, Slots: []int64{0, 1, 2, 0, 0, 0}, Total: 4})
	if again := stage(1, 1); again != first {
		t.Error("the state has moved")
	}
	b.same("state", *first, PlanState{Pages: []int64{1, 2, 0, 0, 0, 0}, Slots: []int64{3, 1, 0, 0, 0, 0}, Total: 2})
	stage(4, 1) // more than was captured: nothing is padded, nothing lost
	b.same("total", first.Total, 5)
	bufs.Grow(2)
	bufs.Grow(8)
	b.same("grown", *first, PlanState{Pages: []int64{1, 1, 1, 1, 2, 0, 0, 0}, Slots: []int64{4, 5, 6, 7, 2, 0, 0, 0}, Total: 5})
	lease.Slot = 4
	if stage(1, 1) == first {
		t.Error("two slots have one state")
	}

	for _, l := range []Lease{{}, {Slot: 1}, {Slot: -1, Tokens: 1}, {Slot: 1, Tokens: 9}} {
		_, err := bufs.Stage(l, &Plan{Label: "x"})
		b.fails(err, ErrInvalid)
	}
	_, err := bufs.Stage(lease, &Plan{Label: "x", Total: 9, Slots: make([]page.Slot, 9)})
	b.fails(err, ErrInvalid)
	for i := range maxBuffers - 2 {
		_, err := bufs.Stage(lease, &Plan{Label: id.Label(fmt.Sprint(i))})
		b.ok(err)
	}
	_, err = bufs.Stage(lease, &Plan{Label: "x"})
	b.fails(err, ErrFull)
}

func spec020(t *testing.T) {
	s := PlanState{Pages: []int64{9, 9, 9, 9, 9, 9, 0, 0}, Slots: []int64{3, 3, 3, 3, 3, 3, 3, 3}}
	if err := s.Stage(slots(at(5, 6), at(5, 7), at(6, 0)), 5); err != nil {
		t.Fatal(err)
	}
	want := PlanState{Pages: []int64{5, 5, 6, 0, 0, 9, 0, 0}, Slots: []int64{6, 7, 0, 0, 0, 3, 3, 3}, Total: 3}
	if !equal(s, want) {
		t.Errorf("%+v, want %+v", s, want)
	}
}

func spec021(t *testing.T) {
	var b Buffers
	b.Grow(128)
	b.Grow(64)
	s, err := b.Stage(Lease{Tokens: 128}, &Plan{Label: "main"})
	if err != nil || len(s.Pages) != 128 || len(s.Slots) != 128 {
		t.Errorf("%+v, %v", s, err)
	}
}
