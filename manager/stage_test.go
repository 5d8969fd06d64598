package manager

import (
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// A staged step writes nothing, so what it will write keeps nobody from
// publishing what another step has committed.
func TestPublishBesideStaged(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	tok := b.admit(Segment{"a", "main", 4})
	s := mainStep(1)
	s.Lane = 1
	staged := b.stage(s) // at length 0
	b.commit(tok)
	b.same("offered", b.publish("a", false).Streams[0].Tokens, 4)
	b.fails(b.Plan(staged, new(Plans)), ErrInvalid)
	tok = b.step(s)
	b.same("slots", b.plan(tok).Slots, slots(at(1, 4)))
	b.commit(tok)
	b.stored("a", "main", 5)

	// One that was promoted does.
	b.stage(s)
	tok = b.step(s)
	b.grow("a", "main", 1)
	_, err := b.Publish("a", false)
	b.fails(err, ErrStepInFlight)
	b.commit(tok, "a")
}

// A label that a staged step made is nobody's to take back once the request was
// reset: a retrieve may be filling it.
func TestUnstageAfterReset(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ok(b.Ingest("a", RequestConfig{Needs: Needs{Labels: []id.Label{"new"}}}))
	b.stage(Step{Segments: []Segment{{"a", "new", 16}}}) // 1 2
	b.reset("a", false)
	got := b.retrieve("a", peer(true, remote("new", 20, 11)), 0, Reading)
	b.same("local", got.Moves[0].Local, upFrom(1, 3))
	b.Unstage(0)
	b.ok(b.Landed(got.ID))
	b.pages("a", "new", 1, 2, 3)
	b.stored("a", "new", 20)
}

// The label stays while a step of another lane is on it, and its pages too.
func TestUnstageBesideAnother(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	s := Step{Segments: []Segment{{"a", "new", 16}}}
	b.stage(s)
	s.Lane = 1
	tok := b.step(s)
	b.Unstage(0)
	b.commit(tok)
	b.pages("a", "new", 1, 2)
	b.stored("a", "new", 16)
}

// Removed or reset under a staged fork: its pages wait for the step.
func TestLostUnderStaged(t *testing.T) {
	for _, lose := range []func(bed){
		func(b bed) { b.remove("a", false) },
		func(b bed) { b.reset("a", false); b.pages("a", "main"); b.remove("a", false) },
	} {
		b := newBed(t, 16, 8)
		b.ingest("a")
		b.grow("a", "main", 12)
		s := mainStep(1)
		s.PreForks = toCfg
		b.stage(s)
		lose(b)
		b.same("counts", b.Counts(), Counts{Free: 11, Owned: 2, Quarantine: 2, Sink: 1, Steps: 1})
		b.Unstage(0)
		b.free(15)
	}
}

// What a fork before the segments takes over is of the moment of Admit.
func TestPromotedPosition(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	s := mainStep(1)
	s.PreForks = toCfg
	b.stage(s)
	b.ok(b.SetPosition("a", "main", 12))
	b.commit(b.step(s))
	b.same("position", b.state("a", "cfg").Position, 12)
	b.same("slot", b.grow("a", "cfg", 1).Slots[0], page.Slot{Page: 4, Slot: 4})
}

// A label that was published stays, also when the staged step that made it goes.
func TestUnstagePublished(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 3)
	b.stage(Step{Segments: []Segment{{"a", "cfg", 1}}})
	b.same("streams", len(b.publish("a", false).Streams), 2)
	b.Unstage(0)
	b.same("streams", len(b.publish("a", true).Streams), 2)
	b.stored("a", "cfg", 0)
}
