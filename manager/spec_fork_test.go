package manager

import (
	"errors"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

var toCfg = []Fork{{"main", "cfg"}}

func mainStep(span int) Step { return Step{Segments: []Segment{{"a", "main", span}}} }

// A stream with a step in flight can't be claimed, and a claimed one takes no
// step, so no commit ever meets a claim.
func spec024(t *testing.T) {
	b := newBed(t, 8, 8, func(o *Options) { o.Host = 8 })
	b.ingest("a")
	b.grow("a", "main", 10)
	tok := b.admit(Segment{"a", "main", 4})
	_, err := b.Offload("a")
	b.fails(err, ErrStepInFlight)
	b.commit(tok)
	b.stored("a", "main", 14)
	w, err := b.Offload("a")
	b.ok(err)
	_, err = b.Admit(mainStep(4))
	b.offloading(err, "a", "main")
	b.ok(b.Abandon(w.ID))
	b.grow("a", "main", 4)
	b.stored("a", "main", 18)
}

func spec025(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	s := mainStep(4)
	s.PreForks = toCfg
	tok := b.step(s)
	p := b.plans(tok)
	b.same("copies", p.Copies, []Copy{{"a", "main", "cfg", []page.Index{1, 2}, []page.Index{3, 4}, 12}})
	b.same("slots", p.Plans[0].Slots, slots(at(2, 4), at(2, 5), at(2, 6), at(2, 7)))
	b.same("after", b.posts(tok), []Copy(nil))
	b.stored("a", "cfg", 0)
	b.commit(tok)
	b.pages("a", "cfg", 3, 4)
	b.stored("a", "cfg", 12)
	b.stored("a", "main", 16)
}

func spec026(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	s := mainStep(5)
	s.PostForks = toCfg
	tok := b.step(s)
	p := b.plans(tok)
	b.same("before", p.Copies, []Copy(nil))
	b.same("view", p.Plans[0].Views[0].Pages, []page.Index{1, 2, 6})
	b.same("after", b.posts(tok), []Copy{{"a", "main", "cfg", []page.Index{1, 2, 6}, []page.Index{3, 4, 5}, 17}})
	b.commit(tok)
	b.pages("a", "cfg", 3, 4, 5)
	b.pages("a", "main", 1, 2, 6)
	b.stored("a", "cfg", 17)
	b.stored("a", "main", 17)
}

func spec027(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	tok := b.step(Step{Segments: []Segment{{"a", "x", 9}}, PostForks: []Fork{{"x", "y"}}})
	b.same("after", b.posts(tok), []Copy{{"a", "x", "y", []page.Index{3, 4}, []page.Index{1, 2}, 9}})
	b.commit(tok)
	b.pages("a", "y", 1, 2)
	b.pages("a", "x", 3, 4)
	b.stored("a", "y", 9)
}

func spec028(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	s := mainStep(8)
	s.Discard, s.PostForks = true, toCfg
	tok := b.step(s)
	b.same("after", b.posts(tok), []Copy{{"a", "main", "cfg", []page.Index{1, 2}, []page.Index{3, 4}, 12}})
	b.commit(tok)
	b.stored("a", "cfg", 12)
	b.stored("a", "main", 12)
	b.pages("a", "cfg", 3, 4)
	b.pages("a", "main", 1, 2, 5)
}

func spec029(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a", "pad")
	b.grow("a", "x", 3)
	s := Step{Segments: []Segment{{"a", "x", 1}}, PreForks: []Fork{{"x", "y"}}, PostForks: []Fork{{"y", "z"}}, Rows: []id.Request{"a", "pad", "pad"}}
	tok := b.step(s)
	b.same("before", b.plans(tok).Copies, []Copy{{"a", "x", "y", []page.Index{1}, []page.Index{2}, 3}})
	b.same("after", b.posts(tok), []Copy{{"a", "y", "z", []page.Index{2}, []page.Index{3}, 3}})
	b.inFlight("pad", false)
	b.commit(tok)
	_, err := b.Stored("pad", "y")
	b.fails(err, ErrUnknownLabel)

	// No rows are none, whatever the segments.
	s.Rows = []id.Request{}
	tok = b.step(s)
	b.same("before", b.plans(tok).Copies, []Copy(nil))
	b.commit(tok)
}

// The shortage is that of the whole step, one page for the fork and one for
// the segment, not that of the first reservation that fails.
func spec030(t *testing.T) {
	b := newBed(t, 6, 8)
	b.ingest("a")
	b.grow("a", "main", 24)
	s := mainStep(1)
	s.PreForks = toCfg
	_, err := b.Admit(s)
	short, ok := errors.AsType[*AllocationError](err)
	if !ok {
		t.Fatalf("error is %v", err)
	}
	b.same("shortage", *short, AllocationError{"a", "cfg", 2, 2})
	b.inFlight("a", false)
	b.same("streams", len(b.requests["a"].streams), 1)
	b.free(2)
}

func spec031(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.ok(b.Abort(b.admit(Segment{"a", "cfg", 24}))) // 1 2 3
	b.grow("a", "main", 12)                         // 4 5
	s := mainStep(0)
	s.PreForks = toCfg
	tok := b.step(s)
	b.same("copies", b.plans(tok).Copies, []Copy{{"a", "main", "cfg", []page.Index{4, 5}, []page.Index{6, 7}, 12}})
	b.commit(tok)
	b.pages("a", "cfg", 6, 7)
	b.freeList(8, 9, 10, 11, 1, 2, 3)
}

func spec032(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.commit(b.admit(Segment{"a", "main", 12}, Segment{"a", "cfg", 12}))
	before := b.state("a", "cfg").Generation
	s := mainStep(0)
	s.PostForks = toCfg
	b.commit(b.step(s))
	if now := b.state("a", "cfg").Generation; now <= before {
		t.Errorf("generation %d after %d", now, before)
	}
	b.stored("a", "cfg", 12)
}

func spec033(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.grow("a", "main", 16)
	tok := b.step(Step{Segments: []Segment{{"a", "cfg", 1}}, PreForks: toCfg})
	p := b.plans(tok)
	b.same("copies", p.Copies, []Copy{{"a", "main", "cfg", []page.Index{1, 2}, []page.Index{3, 4}, 16}})
	b.same("view", p.Plans[0].Views[0].Pages, []page.Index{3, 4, 5})
	b.same("slots", p.Plans[0].Slots, slots(at(5, 0)))
	b.commit(tok)
	b.pages("a", "cfg", 3, 4, 5)
	b.stored("a", "cfg", 17)
	b.stored("a", "main", 16)
}

func spec034(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ingest("a")
	b.grow("a", "a", 16)
	tok := b.step(Step{Segments: []Segment{{"a", "a", 0}}, PreForks: []Fork{{"a", "b"}, {"b", "c"}}})
	b.same("copies", b.plans(tok).Copies, []Copy{
		{"a", "a", "b", []page.Index{1, 2}, []page.Index{3, 4}, 16},
		{"a", "b", "c", []page.Index{3, 4}, []page.Index{5, 6}, 16},
	})
	b.commit(tok)
	for _, l := range []id.Label{"b", "c"} {
		b.stored("a", l, 16)
	}
	b.pages("a", "b", 3, 4)
	b.pages("a", "c", 5, 6)
}

func spec035(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ok(b.Ingest("a", RequestConfig{Retention: map[id.Label]Retention{"main": {Budget: 16, Prefix: 8}}}))
	b.grow("a", "main", 44)
	b.ok(b.SetPosition("a", "main", 17))
	want := b.state("a", "main")
	b.same("trimmed", []int{want.Tokens, want.Released, want.Prefix}, []int{44, 24, 8})
	tok := b.step(Step{Segments: []Segment{{"a", "main", 0}}, PreForks: toCfg, PostForks: []Fork{{"main", "late"}, {"cfg", "early"}}})
	b.same("copies", b.plans(tok).Copies[0].Tokens, 20)
	b.ok(b.SetPosition("a", "main", 18)) // while the step runs
	b.commit(tok)
	for l, position := range map[id.Label]int{"cfg": 17, "late": 18, "early": 17} {
		got := b.state("a", l)
		b.same("position", got.Position, position)
		got.Label, got.Position, got.Generation = want.Label, want.Position, want.Generation
		b.same("stream", got, want)
	}
	// The retention is the target's from now on.
	b.grow("a", "cfg", 12)
	b.same("released", b.state("a", "cfg").Released, 40)
}

func spec036(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	before := b.state("a", "main")
	b.free(13)
	s := mainStep(1)
	s.PreForks = toCfg
	tok := b.stage(s)
	b.same("forked", b.steps[tok].forks[0].pages, []page.Index{3, 4})
	b.free(11)
	b.inFlight("a", true)
	b.Unstage(0)
	_, err := b.Stored("a", "cfg")
	b.fails(err, ErrUnknownLabel)
	b.free(13)
	b.inFlight("a", false)
	b.same("stream", b.state("a", "main"), before)
	b.fails(b.Plan(tok, new(Plans)), ErrUnknownToken)
}

func spec037(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	s := mainStep(5)
	s.PreForks, s.Walk = toCfg, "decode"
	tok := b.stage(s)
	staged := b.plans(tok)
	b.same("copies of a staged step", staged.Copies, []Copy(nil))
	_, err := b.Commit(tok)
	b.fails(err, ErrStaged)
	_, err = b.PostForks(tok)
	b.fails(err, ErrStaged)
	before := b.Counts()
	b.same("token", b.step(s), tok)
	b.same("counts", b.Counts(), before)
	p := b.plans(tok)
	b.same("plans", p.Plans, staged.Plans)
	b.same("copies", p.Copies, []Copy{{"a", "main", "cfg", []page.Index{1, 2}, []page.Index{3, 4}, 12}})
	b.commit(tok)
	b.stored("a", "main", 17)
	b.stored("a", "cfg", 12)
	b.grow("a", "main", 8)
	b.pages("a", "main", 1, 2, 5, 6)
}

func spec038(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a", "b")
	b.stage(mainStep(1))
	_, err := b.Stage(mainStep(1))
	b.fails(err, ErrStaged)
	_, err = b.Stage(Step{Segments: []Segment{{"b", "main", 1}}})
	b.fails(err, ErrStaged)
	b.stage(Step{Segments: []Segment{{"b", "main", 1}}, Lane: 1})
	b.same("steps", b.Counts().Steps, 2)
}

func spec039(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	before := b.Counts()
	b.Unstage(0)
	b.same("counts", b.Counts(), before)
	s := mainStep(1)
	s.PostForks = toCfg
	b.stage(s)
	b.remove("a", false)
	b.ingest("a") // the same name is another request
	b.grow("a", "main", 3)
	b.Unstage(0)
	b.Unstage(0)
	b.stored("a", "main", 3)
	b.free(14)
}

func spec040(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "cfg", 4)
	b.grow("a", "main", 12)
	before := b.state("a", "cfg")
	s := mainStep(1)
	s.PreForks = toCfg
	tok := b.stage(s)
	for _, x := range b.steps[tok].forks[0].pages { // all that would be written
		if x == 1 {
			t.Error("the fork would write what is there")
		}
	}
	b.Unstage(0)
	b.same("stream", b.state("a", "cfg"), before)
	b.pages("a", "cfg", 1)
}

func spec041(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 8)
	staged := Step{
		Segments: []Segment{{"a", "main", 9}, {"a", "new", 3}}, PreForks: toCfg, PostForks: []Fork{{"new", "more"}}, Rows: []id.Request{"a"},
		Combined: []Combined{{[]id.Label{"main"}, "x"}}, Walk: "decode", Lease: Lease{1, 16},
	}
	for name, change := range map[string]func(*Step){
		"segments":        func(s *Step) { s.Segments = s.Segments[:1]; s.PostForks = nil },
		"span":            func(s *Step) { s.Segments = []Segment{{"a", "main", 8}, {"a", "new", 3}} },
		"discard":         func(s *Step) { s.Discard = true },
		"forks before":    func(s *Step) { s.PreForks = nil },
		"forks after":     func(s *Step) { s.PostForks = nil },
		"rows":            func(s *Step) { s.Rows = nil },
		"rows of none":    func(s *Step) { s.Rows = []id.Request{} },
		"combined":        func(s *Step) { s.Combined = nil },
		"combined source": func(s *Step) { s.Combined = []Combined{{[]id.Label{"new"}, "x"}} },
		"walk":            func(s *Step) { s.Walk = "prefill" },
		"lease":           func(s *Step) { s.Lease.Slot++ },
	} {
		old := b.stage(staged)
		other := staged
		change(&other)
		tok := b.step(other)
		if tok == old {
			t.Errorf("%s: another step was promoted", name)
		}
		b.fails(b.Plan(old, new(Plans)), ErrUnknownToken)
		b.ok(b.Abort(tok))
		b.same("steps", b.Counts().Steps, 0)
	}
	// Nor is it the staged one if what it stands on has moved.
	for name, move := range map[string]func(){
		"another lane": func() { b.grow("a", "main", 1) },
		"reset":        func() { b.reset("a", true); b.grow("a", "main", 8) },
	} {
		s := mainStep(1)
		s.Lane = 3
		old := b.stage(s)
		move()
		tok := b.step(s)
		if tok == old {
			t.Errorf("%s: a stale step was promoted", name)
		}
		n, err := b.Stored("a", "main")
		b.ok(err)
		b.same("first slot", b.plan(tok).Slots[0].Slot, int32(n%8))
		b.ok(b.Abort(tok))
	}
}
