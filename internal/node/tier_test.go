package node

import (
	"cmp"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// moves runs an offload whose bytes are nobody's.
func (o *owner) moves(t *testing.T, r id.Request) []news {
	t.Helper()
	w, err := o.manager.Offload(r)
	if err != nil {
		t.Fatal(err)
	}
	_, said, err := o.offloaded(time.Now(), w.ID)
	if err != nil {
		t.Fatal(err)
	}
	return said
}

// back runs a reload.
func (o *owner) back(t *testing.T, r id.Request) ([]news, error) {
	t.Helper()
	w, err := o.manager.Reload(r)
	if err != nil {
		t.Fatal(err)
	}
	_, said, err := o.reloaded(time.Now(), w.ID)
	return said, err
}

// grown commits tokens of one label of a request.
func (o *owner) grown(t *testing.T, r id.Request, l id.Label, tokens int) {
	t.Helper()
	token, err := o.manager.Admit(manager.Step{Segments: []manager.Segment{{Request: r, Label: l, Span: tokens}}})
	if err == nil {
		_, err = o.manager.Commit(token)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestGoesOnByTheOwnersRule: the word of what has moved is cleared, and another
// publication goes on for it by each of its names, also where there is room for
// one alone.
func TestGoesOnByTheOwnersRule(t *testing.T) {
	o := newTestOwner(t, holdTimers{}, 1)
	o.written(t, "r1", 20)
	now := time.Now()
	old, err := o.publish(now, nil, "r1", publishOptions{target: "delta", hold: time.Minute, final: true})
	if err != nil {
		t.Fatal(err)
	}
	d := reader{life: id.Life{Node: "delta", Incarnation: 1}, attempt: 1}
	if _, err := o.holds.lease(now, old.name.Sequence, d); err != nil {
		t.Fatal(err)
	}
	name := old.name
	var newest offer
	for range 3 { // each time from the device
		said := o.moves(t, "r1")
		if len(said) != 1 || said[0].offer == nil || len(said[0].ends) != 1 {
			t.Fatalf("%+v", said)
		}
		end := said[0].ends[0]
		if end.name != name || end.cause != holdOffloaded || len(end.readers) != 1 || end.session != nil {
			t.Errorf("it ended as %+v", end)
		}
		if newest = *said[0].offer; !newest.value.Final || newest.target != "delta" || newest.given != old.given || len(newest.readers) != 1 ||
			newest.value.Streams[0].State != manager.OnHost || newest.value.Streams[0].Tokens != 20 || len(newest.value.Streams[0].Pages) != 0 {
			t.Errorf("what goes on is %+v", newest)
		}
		if (newest.seal != old.seal && o.sealed(t, old.seal)) || !o.sealed(t, newest.seal) {
			t.Error("the words are wrong")
		}
		if c := o.manager.Counts(); c.Free != 63 || c.Limbo != 0 || c.Publications != 1 {
			t.Errorf("%+v", c)
		}
		name = newest.name
		back, err := o.back(t, "r1")
		if err != nil || len(back) != 1 || back[0].offer == nil || back[0].offer.name != name || len(back[0].offer.value.Streams[0].Pages) != 3 {
			t.Errorf("back: %+v, %v", back, err)
		}
	}
	for s, moved := range map[id.Sequence]bool{old.name.Sequence: true, name.Sequence: false} {
		full, r, continues, err := o.find(now, s, "r1")
		if err != nil || r != "r1" || continues != moved || len(full) == 0 {
			t.Errorf("%d: %q, %v, %v", s, r, continues, err)
		}
		if _, _, _, err := o.find(now, s, "r2"); !errors.Is(err, wire.ErrReference) {
			t.Errorf("%d is found as another request's: %v", s, err)
		}
	}
	ref := wire.Reference{Publication: old.name, Request: "r1", Seal: old.seal}
	if p, err := o.own(old.name.Sequence, &ref); err != nil || p.name != name {
		t.Errorf("%v, %v", p.name, err)
	}
	ref.Seal++
	if _, err := o.own(old.name.Sequence, &ref); !errors.Is(err, wire.ErrReference) {
		t.Errorf("a reference that lies: %v", err)
	}
	ends, err := o.revoke(now, old.name.Sequence)
	if err != nil || len(ends) != 1 || ends[0].name != name {
		t.Errorf("%+v, %v", ends, err)
	}
	if _, _, _, err := o.find(now, old.name.Sequence, "r1"); !errors.Is(err, errRevoked) {
		t.Errorf("after its end: %v", err)
	}
	if o.sealed(t, newest.seal) || len(o.published)+len(o.bySeq) != 0 {
		t.Error("something is left")
	}
}

// TestTakenBackWhileItMoves: nothing goes on for what has ended in the copy window,
// and nothing is left of it.
func TestTakenBackWhileItMoves(t *testing.T) {
	o := newTestOwner(t, holdTimers{}, 1)
	o.written(t, "r1", 20)
	p, err := o.publish(time.Now(), nil, "r1", publishOptions{final: true})
	if err != nil {
		t.Fatal(err)
	}
	w, err := o.manager.Offload("r1")
	if err != nil {
		t.Fatal(err)
	}
	removed, _, err := o.remove(time.Now(), "r1", true) // in the copy window
	if err != nil || len(removed) != 1 || removed[0].cause != "revoked" {
		t.Fatalf("%+v, %v", removed, err)
	}
	freed, said, err := o.offloaded(time.Now(), w.ID)
	if err != nil || freed != 0 || len(said) != 0 {
		t.Errorf("%d, %+v, %v", freed, said, err)
	}
	if c := o.manager.Counts(); c.Free != 63 || c.HostUsed != 0 || c.Moves != 0 || o.sealed(t, p.seal) {
		t.Errorf("%+v", c)
	}
}

// TestGoesOnForAKeptRequest: what has gone to the host goes on when its request is
// removed, comes back and goes again, and ends with its hold or when it is revoked.
func TestGoesOnForAKeptRequest(t *testing.T) {
	for _, moving := range []bool{false, true} {
		o := newTestOwner(t, holdTimers{}, 1)
		o.written(t, "r1", 20)
		now := time.Now()
		first, err := o.publish(now, nil, "r1", publishOptions{hold: time.Minute, final: true})
		if err != nil {
			t.Fatal(err)
		}
		w, err := o.manager.Offload("r1")
		if err != nil {
			t.Fatal(err)
		}
		if !moving {
			if _, _, err := o.offloaded(now, w.ID); err != nil {
				t.Fatal(err)
			}
		}
		ends, kept, err := o.remove(now, "r1", false)
		if err != nil || len(ends) != 0 || kept == "" {
			t.Fatalf("%+v, %q, %v", ends, kept, err)
		}
		if moving {
			if freed, said, err := o.offloaded(now, w.ID); err != nil || freed != 3 || len(said) != 1 || said[0].offer == nil {
				t.Fatalf("%d, %+v, %v", freed, said, err)
			}
		}
		o.written(t, "r1", 9) // another life
		newest := first.published
		for range 2 {
			live := o.live()
			if len(live) != 1 || live[0].value.Request != "r1" || live[0].value.Streams[0].Tokens != 20 || live[0].given != first.given {
				t.Fatalf("%+v", live)
			}
			newest = live[0]
			if got := o.away([]id.Sequence{newest.name.Sequence}); len(got) != 1 || got[0] != kept {
				t.Errorf("%q are away", got)
			}
			back, err := o.back(t, kept)
			if err != nil || len(back) != 1 || back[0].offer == nil || len(back[0].offer.value.Streams[0].Pages) != 3 || back[0].offer.name != newest.name {
				t.Fatalf("back: %+v, %v", back, err)
			}
			if said := o.moves(t, kept); len(said) != 1 || said[0].offer == nil || said[0].offer.value.ContentEpoch != first.value.ContentEpoch {
				t.Fatalf("%+v", said)
			}
		}
		if c := o.manager.Counts(); c.Kept != 1 || c.HostUsed != 3 || c.Owned != 2 {
			t.Errorf("%+v", c)
		}
		if ends, err := o.revoke(now, first.name.Sequence); err != nil || len(ends) != 1 {
			t.Errorf("%+v, %v", ends, err)
		}
		if c := o.manager.Counts(); c.Kept != 0 || c.HostUsed != 0 || c.Owned != 2 || len(o.published) != 0 {
			t.Errorf("%+v", c)
		}
	}
}

// TestNothingGoesOnOfWhatWasTrimmed: retention has let go of what was offered
// before it went to the host. Its readers hear that it has ended; the engine may
// publish what there is.
func TestNothingGoesOnOfWhatWasTrimmed(t *testing.T) {
	for _, final := range []bool{false, true} {
		o := newTestOwner(t, holdTimers{}, 2)
		err := o.manager.Ingest("r1", manager.RequestConfig{Retention: map[id.Label]manager.Retention{id.Main: {Budget: 16, Prefix: 8}}})
		if err != nil {
			t.Fatal(err)
		}
		o.grown(t, "r1", id.Main, 16)
		now := time.Now()
		old, err := o.publish(now, nil, "r1", publishOptions{final: final})
		if err != nil {
			t.Fatal(err)
		}
		d := reader{life: id.Life{Node: "delta", Incarnation: 1}, attempt: 1}
		if _, err := o.holds.lease(now, old.name.Sequence, d); err != nil {
			t.Fatal(err)
		}
		o.grown(t, "r1", id.Main, 16)
		said := o.moves(t, "r1")
		if len(said) != 1 || said[0].offer != nil || len(said[0].ends) != 1 {
			t.Fatalf("%+v", said)
		}
		if end := said[0].ends[0]; end.name != old.name || end.cause != "revoked" || len(end.readers) != 1 {
			t.Errorf("it ended as %+v", end)
		}
		if _, _, _, err := o.find(now, old.name.Sequence, "r1"); !errors.Is(err, errRevoked) {
			t.Errorf("after its end: %v", err)
		}
		if c := o.manager.Counts(); c.Publications != 0 || c.Limbo != 0 || o.sealed(t, old.seal) || len(o.published) != 0 {
			t.Errorf("%+v", c)
		}
		again, err := o.publish(now, nil, "r1", publishOptions{final: true})
		if err != nil || again.value.Streams[0].Start != 24 || again.value.Streams[0].Prefix != 8 || again.value.Streams[0].Tokens != 32 {
			t.Errorf("%+v, %v", again.value, err)
		}
	}
}

// TestWhatCannotComeBackEnds: a final publication has tokens on the host, and when
// they are back retention has let go of others that it offers. Its readers need
// not wait until its hold is over.
func TestWhatCannotComeBackEnds(t *testing.T) {
	for _, final := range []bool{false, true} {
		o := newTestOwner(t, holdTimers{}, 2)
		err := o.manager.Ingest("r1", manager.RequestConfig{Retention: map[id.Label]manager.Retention{"cfg": {Budget: 8}}})
		if err != nil {
			t.Fatal(err)
		}
		o.grown(t, "r1", id.Main, 20)
		o.moves(t, "r1")
		o.grown(t, "r1", "cfg", 8) // main is on the host, cfg is not
		now := time.Now()
		p, err := o.publish(now, nil, "r1", publishOptions{final: final})
		if err != nil || !away(p.value) {
			t.Fatalf("%+v, %v", p.value, err)
		}
		o.grown(t, "r1", "cfg", 8)
		said, err := o.back(t, "r1")
		if err != nil {
			t.Fatal(err)
		}
		if !final { // its engine publishes again
			if len(said) != 0 || len(o.published) != 1 {
				t.Errorf("%+v", said)
			}
			continue
		}
		if len(said) != 1 || said[0].offer != nil || len(said[0].ends) != 1 || said[0].ends[0].cause != "revoked" || o.sealed(t, p.seal) {
			t.Errorf("%+v", said)
		}
	}
}

// TestWhatHasJustComeIsNoVictim: else who brings it back does so for nothing.
func TestWhatHasJustComeIsNoVictim(t *testing.T) {
	for preset, rest := range map[string]time.Duration{"default": restTime, "fast": restTime / 10} {
		synctest.Test(t, func(t *testing.T) {
			o := newTestOwner(t, holdTimers{}, 1)
			n := &Node{config: &config.Config{}, manager: o.manager, owner: o}
			n.config.Cluster.Preset = preset
			n.tier = &tier{node: n, evict: "recent", layout: page.Layout{Pages: 64}, recent: make(map[id.Request]time.Time)}
			if r, err := n.tier.victim(); !errors.Is(err, errNoVictim) {
				t.Errorf("%q, %v", r, err)
			}
			o.written(t, "a", 20)
			o.written(t, "b", 20)
			n.tier.arrived("a")
			for _, want := range []id.Request{"b", "a"} {
				if r, err := n.tier.victim(); err != nil || r != want {
					t.Errorf("%s: %q, %v, want %q", preset, r, err, want)
				}
				time.Sleep(rest + 1)
			}
			n.tier.arrived("b")
			if len(n.tier.recent) != 1 {
				t.Errorf("%v", n.tier.recent)
			}
		})
	}
}

// TestVictimOrder: the unpublished first, then as the policy says.
func TestVictimOrder(t *testing.T) {
	old, small := manager.Victim{Request: "old", Active: 1, Pages: 2}, manager.Victim{Request: "small", Active: 2, Pages: 1}
	large, kept := manager.Victim{Request: "large", Active: 3, Pages: 9}, manager.Victim{Request: "kept", Pages: 99, Published: 1}
	tie := manager.Victim{Request: "tie", Active: 1, Pages: 3}
	for evict, order := range map[string][]manager.Victim{
		"recent": {tie, old, small, large, kept},
		"pages":  {large, tie, old, small, kept},
	} {
		v := tier{evict: evict}
		for i, a := range order {
			for j, b := range order {
				if got := v.compare(a, b); got != cmp.Compare(i, j) {
					t.Errorf("%s: %s and %s: %d", evict, a.Request, b.Request, got)
				}
			}
		}
	}
}
