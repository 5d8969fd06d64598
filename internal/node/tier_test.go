package node

import (
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// moves runs an offload whose bytes are nobody's.
func (o *owner) moves(t *testing.T, r id.Request) []news {
	t.Helper()
	w, err := o.manager.Offload(r)
	if err != nil {
		t.Fatal(err)
	}
	_, said, err := o.offloaded(time.Now(), r, w.ID)
	if err != nil {
		t.Fatal(err)
	}
	return said
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
		w, err := o.manager.Reload("r1")
		if err != nil {
			t.Fatal(err)
		}
		back, err := o.reloaded(now, "r1", w.ID)
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
	removed, err := o.remove(time.Now(), "r1", true) // in the copy window
	if err != nil || len(removed) != 1 || removed[0].cause != "revoked" {
		t.Fatalf("%+v, %v", removed, err)
	}
	freed, said, err := o.offloaded(time.Now(), "r1", w.ID)
	if err != nil || freed != 0 || len(said) != 0 {
		t.Errorf("%d, %+v, %v", freed, said, err)
	}
	if c := o.manager.Counts(); c.Free != 63 || c.HostUsed != 0 || c.Moves != 0 || o.sealed(t, p.seal) {
		t.Errorf("%+v", c)
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
				if got := v.before(a, b); got != (i < j) {
					t.Errorf("%s: %s before %s: %v", evict, a.Request, b.Request, got)
				}
			}
		}
	}
}
