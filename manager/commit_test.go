package manager

import (
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// A fork onto what is published takes fresh pages, and ends the publication:
// what it names stays as it was.
func TestForkOntoPublished(t *testing.T) {
	for _, fill := range []func(b bed, s *Step){
		func(_ bed, s *Step) { s.PreForks = toCfg },
		func(_ bed, s *Step) { s.PostForks = toCfg },
		func(_ bed, s *Step) { // chained, and twice onto the same
			s.PreForks = []Fork{{"main", "x"}, {"x", "cfg"}}
			s.PostForks = []Fork{{"cfg", "x"}, {"main", "cfg"}}
		},
	} {
		b := newBed(t, 24, 8)
		b.ingest("a")
		b.commit(b.admit(Segment{"a", "main", 12}, Segment{"a", "cfg", 20})) // 1 2, 3 4 5
		p := b.publish("a", true)
		s := mainStep(0)
		fill(b, &s)
		tok := b.step(s)
		for _, c := range append(b.plans(tok).Copies, b.posts(tok)...) {
			for _, x := range c.Target {
				if x <= 5 {
					t.Fatalf("page %d is written while it is published", x)
				}
			}
		}
		got, err := b.Commit(tok)
		b.ok(err)
		b.same("committed", got, Committed{Unseal: []PublicationID{p.ID}})
		b.same("limbo", b.Counts().Limbo, 3)
		b.stored("a", "cfg", 12)
		again := b.publish("a", true)
		b.same("epoch", again.ContentEpoch, p.ContentEpoch+1)
		b.same("id", again.ID, p.ID+1)
		b.Unsealed(p.ID)
		b.same("limbo", b.Counts().Limbo, 0)
	}
}

// A publication that says where tokens are has offered them, though it names
// no pages: it ends with them, too.
func TestForkOntoOffered(t *testing.T) {
	b := newBed(t, 24, 8, func(o *Options) { o.Host = 8 })
	b.ingest("a")
	b.commit(b.admit(Segment{"a", "main", 12}, Segment{"a", "cfg", 20}))
	b.away("a", 5)
	p := b.publish("a", true)
	b.same("state", p.Streams[0], Stream{Label: "cfg", Ranks: []id.Rank{0}, Tokens: 20, State: OnHost})
	b.back("a")
	s := mainStep(0)
	s.PostForks = toCfg
	got, err := b.Commit(b.step(s))
	b.ok(err)
	b.same("unseal", got.Unseal, []PublicationID{p.ID})
}

// A fork onto what was never offered ends nothing.
func TestForkBesidePublication(t *testing.T) {
	b := newBed(t, 24, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	p := b.publish("a", false)
	b.grow("a", "cfg", 3)
	s := mainStep(1)
	s.PostForks = toCfg
	b.commit(b.step(s)) // nothing to unseal
	again := b.publish("a", false)
	b.same("id", again.ID, p.ID)
	b.same("epoch", again.ContentEpoch, p.ContentEpoch)
	b.same("cfg", again.Streams[0].Tokens, 13)
}

// A request that is forked is in one step alone.
func TestForkAlone(t *testing.T) {
	b := newBed(t, 24, 8)
	b.ingest("a", "b")
	b.grow("a", "main", 12)
	fork := Step{Segments: []Segment{{"a", "main", 1}, {"b", "main", 1}}, PreForks: toCfg, Rows: []id.Request{"a"}}
	tok := b.step(mainStep(1))
	_, err := b.Admit(fork)
	b.fails(err, ErrStepInFlight)
	b.ok(b.Abort(tok))
	tok = b.step(fork)
	_, err = b.Admit(mainStep(1))
	b.fails(err, ErrStepInFlight)
	_, err = b.Stage(mainStep(1))
	b.fails(err, ErrStepInFlight)
	b.refused("a", peer(true, remote("main", 20, 11)), ErrStepInFlight)
	b.grow("b", "main", 1) // no row of the forks
	b.commit(tok, "b")
	b.grow("a", "main", 1)
}

// Abort leaves no trace of a fork.
func TestAbortedFork(t *testing.T) {
	b := newBed(t, 24, 8)
	b.ingest("a")
	b.commit(b.admit(Segment{"a", "main", 12}, Segment{"a", "cfg", 4}))
	p := b.publish("a", false)
	before := b.state("a", "cfg")
	s := mainStep(1)
	s.PreForks = toCfg
	tok := b.step(s)
	b.plans(tok)
	b.ok(b.Abort(tok))
	b.same("cfg", b.state("a", "cfg"), before)
	b.pages("a", "cfg", 3)
	b.free(20)
	b.same("published", b.publish("a", false).ID, p.ID)
}

// Whatever a lost request leaves behind is neither given out nor written while
// a copy of the step may read it, and of the step nothing comes.
func TestForkOfLost(t *testing.T) {
	for _, end := range []func(bed, Token){
		func(b bed, tok Token) { b.commit(tok, "a") },
		func(b bed, tok Token) { b.ok(b.Abort(tok)) },
	} {
		b := newBed(t, 12, 8)
		b.ingest("a", "b")
		b.grow("a", "main", 12) // 1 2
		p := b.publish("a", false)
		s := mainStep(9)
		s.PreForks = toCfg
		tok := b.step(s)
		copies := b.plans(tok).Copies
		b.same("removed", b.remove("a", false), Removed{Unseal: []PublicationID{p.ID}})
		b.Unsealed(p.ID)
		b.ingest("a")
		b.grow("a", "main", 1)
		b.grow("b", "main", 8*b.Counts().Free)
		for _, r := range []id.Request{"a", "b"} {
			for _, x := range b.requests[r].streams[0].pages {
				for _, c := range copies {
					for _, y := range append(c.Source, c.Target...) {
						if x == y {
							t.Fatalf("page %d was given out", x)
						}
					}
				}
			}
		}
		b.same("copies", b.posts(tok), []Copy(nil))
		b.fails(b.Plan(tok, new(Plans)), ErrUnknownRequest)
		end(b, tok)
		b.stored("a", "main", 1)
		b.free(5)
	}
}

func TestBadForks(t *testing.T) {
	b := newBed(t, 24, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	before := b.Counts()
	for name, s := range map[string]Step{
		"onto itself":     {Segments: []Segment{{"a", "main", 0}}, PreForks: []Fork{{"main", "main"}}},
		"onto no label":   {Segments: []Segment{{"a", "main", 0}}, PostForks: []Fork{{"main", ""}}},
		"negative slot":   {Segments: []Segment{{"a", "main", 0}}, Lease: Lease{Slot: -1}},
		"a huge lease":    {Segments: []Segment{{"a", "main", 0}}, Lease: Lease{Tokens: 24*8 + 1}},
		"negative tokens": {Segments: []Segment{{"a", "main", 0}}, Lease: Lease{Tokens: -1}},
	} {
		_, err := b.Admit(s)
		b.fails(err, ErrInvalid)
		t.Log(name, err)
	}
	_, err := b.Admit(Step{Segments: []Segment{{"a", "main", 0}}, PreForks: toCfg, Rows: []id.Request{"a", "nosuch"}})
	b.fails(err, ErrUnknownRequest)
	_, err = b.Admit(Step{Segments: []Segment{{"a", "cfg", 1}, {"a", "cfg", 1}}, PreForks: toCfg})
	b.fails(err, ErrInvalid)
	_, err = b.Admit(Step{Segments: []Segment{{"a", "main", 0}}, PostForks: make([]Fork, 256)})
	b.fails(err, ErrFull)
	b.same("counts", b.Counts(), before)
	b.same("streams", len(b.requests["a"].streams), 1)
}

// The length that counts is the one a stream has at that moment of the step.
func TestForkWalk(t *testing.T) {
	b := newBed(t, 32, 8)
	b.ingest("a")
	b.grow("a", "main", 16) // 1 2
	tok := b.step(Step{
		Segments:  []Segment{{"a", "cfg", 3}, {"a", "main", 5}},
		PreForks:  toCfg,
		PostForks: []Fork{{"cfg", "x"}, {"main", "cfg"}, {"cfg", "y"}},
	})
	p := b.plans(tok)
	b.same("views", []int{p.Plans[0].Views[0].Length, p.Plans[1].Views[0].Length}, []int{19, 21})
	var tokens []int
	for _, c := range append(p.Copies, b.posts(tok)...) {
		tokens = append(tokens, c.Tokens)
		b.same("pages", len(c.Target), page.Count(c.Tokens, 8))
	}
	b.same("tokens", tokens, []int{16, 19, 21, 21})
	b.commit(tok)
	for l, n := range map[id.Label]int{"main": 21, "x": 19, "cfg": 21, "y": 21} {
		b.stored("a", l, n)
	}
	b.free(31 - 4*3)
}

// A label that a step made and put nothing into is gone when the step did not
// run: published, it would say that nothing belongs there.
func TestAbortLeavesNoLabels(t *testing.T) {
	toCfg := []Fork{{"main", "cfg"}}
	for name, run := range map[string]func(bed){
		"aborted segment": func(b bed) { b.ok(b.Abort(b.admit(Segment{"a", "cfg", 3}))) },
		"aborted forks": func(b bed) {
			b.ok(b.Abort(b.step(Step{Segments: []Segment{{"a", "main", 1}}, PostForks: toCfg})))
			b.ok(b.Abort(b.step(Step{Segments: []Segment{{"a", "main", 1}}, PreForks: toCfg})))
		},
		"discarded": func(b bed) {
			b.commit(b.step(Step{Segments: []Segment{{"a", "main", 1}, {"a", "cfg", 3}}, Discard: true}))
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 16, 8)
			b.ingest("a")
			b.grow("a", "main", 9)
			run(b)
			b.same("streams", len(b.publish("a", true).Streams), 1)
			b.free(13)
		})
	}
	t.Run("what was there, or was forked, stays", func(t *testing.T) {
		b := newBed(t, 16, 8)
		b.ingest("a")
		b.grow("a", "main", 9)
		b.grow("a", "cfg", 0)
		b.ok(b.Abort(b.admit(Segment{"a", "cfg", 3})))
		b.stored("a", "cfg", 0)
		b.commit(b.step(Step{Segments: []Segment{{"a", "main", 1}}, PreForks: []Fork{{"main", "img"}}, Discard: true}))
		b.stored("a", "img", 9)
	})
}
