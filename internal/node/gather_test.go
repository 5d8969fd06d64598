package node

import (
	"errors"
	"slices"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// namedPart is what a node has published.
func namedPart(node id.Node, seq id.Sequence) part {
	name := id.Publication{Owner: id.Life{Node: node, Incarnation: 1}, Sequence: seq}
	return part{source: &manager.Source{Name: name}, seal: 7}
}

// follower is a node without peers.
func follower() *Node {
	n := &Node{follows: newFollows(), config: &config.Config{}}
	n.peers, n.metrics = newPeers(n), newMetrics(n)
	return n
}

// TestBeside: what is followed beside a follow is what it was told last: with one
// lease at each owner, which is kept where the owner's publication goes on, and
// nothing of what is followed no more is left.
func TestBeside(t *testing.T) {
	n := follower()
	fs := n.follows
	a, b, c := namedPart("a", 1), namedPart("b", 1), namedPart("c", 1)
	f, _, _, err := n.accept(t.Context(), nil, "r1", a.source.Name, 1)
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, want ...part) {
		t.Helper()
		got := f.all()[1:]
		if len(got) != len(want) || len(fs.leases()) != 1+len(want) {
			t.Fatalf("%s: %d are followed beside it, want %d", what, len(got), len(want))
		}
		for i, p := range want {
			if got[i].source != p.source.Name || fs.from(p.source.Name) != got[i] || got[i].isOver() || !got[i].leased || got[i].leader() != f {
				t.Errorf("%s: %v is not followed, %v is", what, p.source.Name, got[i].source)
			}
		}
	}
	n.beside(f, nil)
	check("nobody")
	n.beside(f, []part{b, c})
	check("two", b, c)
	first := f.all()
	n.beside(f, []part{c})
	check("one less", c)
	if first[2] != f.all()[1] || !first[1].isOver() || fs.from(b.source.Name) != nil {
		t.Error("the other lease was not kept, or this one was")
	}
	first[1].fail(errOwnerLost) // late: nobody follows it any more
	first[1].refuse("revoked")
	if err := f.failure(); err != nil {
		t.Errorf("what is followed no more fails it: %v", err)
	}
	on := namedPart("c", 5)
	on.was = c.source.Name
	n.beside(f, []part{on})
	check("one that has moved", on)
	if next := f.all()[1]; next.attempt != first[2].attempt || fs.from(c.source.Name) != next || !first[2].isOver() {
		t.Error("it has another lease, or is not known by its old name")
	}
	n.beside(f, []part{namedPart("c", 9)})
	if f.all()[1].attempt == first[2].attempt {
		t.Error("one that goes on for nothing has the lease of another one")
	}
	f.all()[1].refuse("revoked")
	if err := f.failure(); !errors.Is(err, errRevoked) || blamed(err, f.source).Owner.Node != "c" {
		t.Errorf("%v of %v, want that c has revoked it", err, blamed(err, f.source))
	}
	f.all()[1].fail(errOwnerLost)
	if err := f.failure(); !errors.Is(err, errOwnerLost) || blamed(err, f.source).Owner.Node != "c" {
		t.Errorf("%v of %v, want that c is lost", err, blamed(err, f.source))
	}
	n.finish(f, kvferrypb.CompleteItem_FAILED)
	n.beside(f, []part{b}) // late
	if len(fs.byRequest)+len(fs.bySource) != 0 || slices.ContainsFunc(f.all(), func(c *follow) bool { return !c.isOver() }) {
		t.Errorf("%d, %d are left", len(fs.byRequest), len(fs.bySource))
	}
}

// TestBesideAtOnce: whoever comes and goes at the same time, in the end nothing
// is left.
func TestBesideAtOnce(t *testing.T) {
	n := follower()
	for range 200 {
		f, _, _, err := n.accept(t.Context(), nil, "r1", namedPart("a", 1).source.Name, 1)
		if err != nil {
			t.Fatal(err)
		}
		n.beside(f, []part{namedPart("b", 1), namedPart("c", 1)})
		moved := namedPart("b", 2)
		moved.was = namedPart("b", 1).source.Name
		var work sync.WaitGroup
		for _, do := range []func(){
			func() { n.beside(f, []part{moved}) },
			func() { n.beside(f, []part{namedPart("c", 1), namedPart("b", 1)}) },
			func() { n.follows.lost(id.Life{Node: "b", Incarnation: 1}, errOwnerLost) },
			func() { n.finish(f, kvferrypb.CompleteItem_LANDED) },
			func() { n.renew() },
		} {
			work.Go(do)
		}
		work.Wait()
		if len(n.follows.bySource) != 0 {
			t.Fatalf("%d names are left", len(n.follows.bySource))
		}
	}
}

// TestWholeOwnerCostsNothing: an owner that has all ranks is not looked beside.
func TestWholeOwnerCostsNothing(t *testing.T) {
	n := &Node{ranks: []id.Rank{0, 1}, geometry: page.Geometry{WorldSize: 4}}
	p := namedPart("a", 1)
	p.source.Publication.Streams = []manager.Stream{{Label: id.Main, Ranks: []id.Rank{0}}, {Label: id.Main, Ranks: []id.Rank{1}}}
	cost := testing.AllocsPerRun(100, func() {
		if w, err := n.gather(t.Context(), query{}, p, nil); err != nil || w.source() != p.source || w.short != nil || w.moved() {
			t.Error(w, err)
		}
	})
	if cost > 1 {
		t.Errorf("%v allocations", cost)
	}
}
