package publish

import (
	"fmt"
	"iter"
	"maps"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// seeds are those of a test: so many, or as many as there's time for.
func seeds(least uint64) iter.Seq[uint64] {
	start := time.Now()
	return func(yield func(uint64) bool) {
		for seed := uint64(0); (seed < least || time.Since(start) < *soak) && yield(seed); seed++ {
		}
	}
}

// TestLoss: with every fifth packet lost, every replica holds what its owner
// holds within two seconds after the traffic, or very rarely, when a replica hears
// neither the last of it nor the checkpoint, within four.
func TestLoss(t *testing.T) {
	runs, late := 0, 0
	for seed := range seeds(2) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			n := newNetwork(t, seed, 8)
			n.loss = 0.2
			n.traffic(2*time.Second, 300, 50)
			took := n.settles(4 * time.Second)
			n.verify()
			if runs++; took > 2*time.Second {
				late++
			}
			repaired, nacks := uint64(0), uint64(0)
			for _, m := range n.members {
				s := m.board.Stats()
				repaired, nacks = repaired+s.Repaired, nacks+s.Nacks
			}
			t.Logf("settled after %v; %d sequences repaired by %d nacks", took, repaired, nacks)
			if repaired == 0 {
				t.Error("nothing was lost")
			}
		})
	}
	if t.Logf("%d of %d were late", late, runs); late > 1+runs/50 {
		t.Error("which are too many")
	}
}

// TestTheLastAnnouncementIsLost everywhere: the checkpoint tells, and it is there
// after one and a half seconds.
func TestTheLastAnnouncementIsLost(t *testing.T) {
	for seed := range seeds(5) {
		n := newNetwork(t, seed, 6)
		n.run(n.ms(0, 2000))
		owner := n.members[0]
		for range 50 {
			owner.publish(time.Hour)
		}
		n.lose = func([]byte) bool { return true }
		last := owner.publish(time.Hour)
		n.lose = nil
		n.run(20 * ms)
		for _, m := range n.members[1:] {
			if m.sees(last) {
				t.Fatal("it was not lost")
			}
		}
		n.settles(1500 * ms)
		for _, m := range n.members[1:] {
			if !m.sees(last) {
				t.Errorf("%s does not show %s", m.life, last)
			}
		}
		n.verify()
	}
}

// TestReplay: all that was ever said is said again, after releases, the end of
// holds, restarts, and deaths, to members that forget the dead at different
// times, and to one that has just joined. Nothing changes.
func TestReplay(t *testing.T) {
	n := newNetwork(t, 1, 0)
	for i, grace := range []time.Duration{time.Second, 10 * time.Second, 30 * time.Second, 90 * time.Second, 30 * time.Second} {
		n.join(id.Life{Node: id.Node(fmt.Sprintf("n-%d", i)), Incarnation: 1}, BoardOptions{Grace: grace})
	}
	n.tape = make(map[string]bool)
	n.loss = 0.05
	n.traffic(2*time.Second, 200, 20)
	for range 20 { // holds that run out
		n.members[0].publish(3 * time.Second)
	}
	n.run(100 * ms)

	replay := func(when string) {
		t.Helper()
		n.settles(3 * time.Second)
		before := make([][]string, len(n.members))
		for i, m := range n.members {
			before[i] = shown(m.board, n.now)
		}
		var tape [][]byte
		for _, item := range slices.Sorted(maps.Keys(n.tape)) {
			tape = append(tape, []byte(item))
		}
		for round := range 2 {
			n.r.Shuffle(len(tape), func(i, j int) { tape[i], tape[j] = tape[j], tape[i] })
			for i, m := range n.members {
				if m.gone {
					continue
				}
				for _, item := range tape {
					if _, _, err := m.board.Receive(n.now, item); err != nil {
						t.Fatal(err)
					}
				}
				if got := shown(m.board, n.now); !slices.Equal(got, before[i]) {
					t.Fatalf("%s, round %d: %s shows\n%v, before it was\n%v", when, round, m.life, got, before[i])
				}
			}
			n.run(500 * ms) // what it asks for now must do no harm either
		}
		for i, m := range n.members {
			if got := shown(m.board, n.now); !m.gone && !slices.Equal(got, before[i]) {
				t.Fatalf("%s: afterwards %s shows\n%v, before it was\n%v", when, m.life, got, before[i])
			}
		}
		n.verify()
	}

	replay("at once")
	for _, m := range n.members {
		for len(m.open) > 5 {
			m.end()
		}
	}
	replay("after releases")
	n.run(3 * time.Second)
	replay("after holds have run out")
	// One restarts, one dies, one says goodbye.
	restarts, dies, leaves := n.members[0], n.members[1], n.members[2]
	for _, m := range []*member{restarts, dies} {
		m.gone = true
		for _, other := range n.members {
			other.miss(m)
		}
	}
	leaves.send(leaves.log.Bye())
	n.run(50 * ms)
	leaves.gone = true
	for _, other := range n.members {
		other.miss(leaves)
	}
	n.run(1500 * ms) // some have forgotten them already
	again := n.join(id.Life{Node: restarts.life.Node, Incarnation: 2}, BoardOptions{})
	again.exchange(n.members[3])
	for range 10 {
		again.publish(time.Hour)
	}
	replay("after a restart, a death, and a goodbye")
	fresh := n.join(id.Life{Node: "fresh", Incarnation: 1}, BoardOptions{})
	fresh.exchange(n.members[3])
	replay("to a fresh member")
	for _, after := range []time.Duration{20 * time.Second, 60 * time.Second, 11 * time.Minute} {
		n.every = after / 500 // nothing happens
		n.run(after)
		n.every = sweepEvery
		replay(fmt.Sprintf("after %v more", after))
	}
	for _, m := range n.members {
		if _, ok := m.board.past[dies.life.Node.Hash()]; ok && !m.gone {
			t.Errorf("%s remembers %s", m.life, dies.life)
		}
	}
	t.Logf("%d items were replayed, again and again", len(n.tape))
	if len(n.tape) < 500 {
		t.Error("which is few")
	}
}

// TestPartition: two halves that take each other for dead for longer than they
// remember the dead, and publish and end on. Once they have met again each side
// shows what lives on the other, and nothing that has ended.
func TestPartition(t *testing.T) {
	for seed := range seeds(1) {
		n := newNetwork(t, seed, 6)
		n.loss = 0.02
		n.traffic(2*time.Second, 200, 30)
		n.settles(2 * time.Second)
		side := make(map[*member]int)
		for i, m := range n.members {
			side[m] = i / 3
		}
		n.cut = func(from, to *member) bool { return side[from] != side[to] }
		n.traffic(4*time.Second, 100, 30)
		var before []id.Publication
		for _, m := range n.members {
			for _, i := range m.open {
				before = append(before, id.Publication{Owner: m.life, Sequence: m.log.held[i].name})
			}
		}
		for _, m := range n.members {
			for _, other := range n.members {
				if side[m] != side[other] {
					m.miss(other)
				}
			}
		}
		n.every = 50 * ms // little happens
		n.traffic(90*time.Second, 20, 30)
		n.every = sweepEvery
		n.settles(2 * time.Second)
		n.cut = nil
		for _, m := range n.members {
			for _, other := range n.members {
				if side[m] != side[other] {
					m.meet(other)
				}
			}
		}
		n.members[0].exchange(n.members[3])
		took := n.settles(15 * time.Second)
		n.verify()
		t.Logf("merged after %v", took)
		live, ended := 0, 0
		for _, p := range before {
			owner := n.members[slices.IndexFunc(n.members, func(m *member) bool { return m.life == p.Owner })]
			lives := owner.log.names[p.Sequence] != nil
			for _, m := range n.members {
				if m != owner && m.sees(p) != lives {
					t.Errorf("%s shows %s: %v, it lives: %v", m.life, p, !lives, lives)
				}
			}
			if lives {
				live++
			} else {
				ended++
			}
		}
		if ended == 0 {
			t.Errorf("%d lived on, %d ended: the test tests nothing", live, ended)
		}
	}
}

// TestOverload: ten times what the network carries, for ten seconds. Nothing of
// an owner's is lost on its way out, the backlog stays bounded, and all converges
// within five seconds after it.
func TestOverload(t *testing.T) {
	n := newNetwork(t, 1, 4)
	n.rate = 30 << 10 // to three others: 10 kB of items a second, which are 160 announcements of all owners
	n.room = n.rate / 3
	const live = 120
	worst, oldest := 0, time.Duration(0)
	for range 100 {
		n.traffic(100*ms, 1600, live)
		for _, m := range n.members {
			waiting, since := m.log.Backlog()
			worst = max(worst, waiting)
			if waiting > 0 {
				oldest = max(oldest, n.now.Sub(since))
			}
			if w := m.log.out.waiting(); w > live+1 {
				t.Fatalf("%d announcements wait of %d live", w, live)
			}
			if r := len(m.log.out.ended.ranges); r > 2*live {
				t.Fatalf("%d ranges wait", r)
			}
			if m.bytes > n.room {
				t.Fatalf("%d bytes in the outbox", m.bytes)
			}
		}
	}
	took := n.settles(5 * time.Second)
	n.verify()
	var overtaken, announced uint64
	shut := 0
	for _, m := range n.members {
		s := m.log.Stats()
		overtaken, announced = overtaken+s.Overtaken, announced+s.Announced
		shut += m.shut
	}
	t.Logf("%d of %d announcements were overtaken; at worst %d sequences waited, and %v; %d items of others were not passed on; settled after %v",
		overtaken, announced, worst, oldest, shut, took)
	if worst == 0 || overtaken == 0 {
		t.Error("there was no backlog")
	}
}

// TestRejoin: an owner says goodbye, is back at once as a new life, and
// publishes. Whatever order all that is heard in, the new life shows and the old
// one does not.
func TestRejoin(t *testing.T) {
	second := id.Life{Node: alpha.Node, Incarnation: alpha.Incarnation + 1}
	old, again := NewLog(LogOptions{Life: alpha}), NewLog(LogOptions{Life: second})
	item := func(what []byte) func(*testing.T, *Board) {
		return func(t *testing.T, b *Board) { receive(t, b, t0, what) }
	}
	member := func(life id.Life, up bool) func(*testing.T, *Board) {
		return func(_ *testing.T, b *Board) { b.Member(t0, life, up) }
	}
	heard := []func(*testing.T, *Board){
		item(announce(t, old, t0, publication(1, "r1", 16, true), time.Minute).items[0]),
		item(old.Tick(t0).Broadcast[0]),
		item(old.Bye().Broadcast[0]),
		member(alpha, false),
		item(announce(t, again, t0, publication(1, "r1", 64, true), time.Minute).items[0]),
		item(again.Tick(t0).Broadcast[0]),
		member(second, true),
	}
	orders := 0
	permute(len(heard), func(order []int) {
		b := board(BoardOptions{})
		newer := false
		for _, i := range order {
			heard[i](t, b)
			newer = newer || i >= 4
			for _, e := range b.ByRequest(t0, "r1") {
				if newer && e.Name.Owner != second {
					t.Fatalf("order %v: after %d %s shows", order, i, e.Name)
				}
			}
		}
		if got := shown(b, t0); !slices.Equal(got, []string{"alpha.1002/1@1"}) {
			t.Fatalf("order %v: %v shows", order, got)
		}
		b.Tick(t0.Add(60 * ms))
		if out := b.Tick(t0.Add(120 * ms)); out.Send != nil || out.Resync != nil {
			t.Fatalf("order %v: something is missing", order)
		}
		orders++
	})
	if orders != 5040 {
		t.Errorf("%d orders", orders)
	}
}

// permute calls f with every order of n things.
func permute(n int, f func(order []int)) {
	order := make([]int, n)
	for i := range order {
		order[i] = i
	}
	var rest func(k int)
	rest = func(k int) {
		if k == n {
			f(order)
			return
		}
		for i := k; i < n; i++ {
			order[k], order[i] = order[i], order[k]
			rest(k + 1)
			order[k], order[i] = order[i], order[k]
		}
	}
	rest(0)
}

// TestJoinUnderTraffic: whoever joins while others publish finds all that was
// live then, as soon as it has read what it was told of at the join.
func TestJoinUnderTraffic(t *testing.T) {
	n := newNetwork(t, 1, 5)
	for range 1500 { // one owner with more than a replica asks for one by one
		n.members[0].publish(time.Hour)
	}
	n.traffic(2*time.Second, 500, 1500)
	joiner := n.join(id.Life{Node: "joiner", Incarnation: 1}, BoardOptions{})
	var live []id.Publication
	for _, m := range n.members {
		for _, i := range m.open {
			live = append(live, id.Publication{Owner: m.life, Sequence: m.log.held[i].name})
		}
	}
	joiner.exchange(n.members[1])
	n.traffic(300*ms, 500, 1500)
	missed, ended := 0, 0
	for _, p := range live {
		switch owner := n.members[slices.IndexFunc(n.members, func(m *member) bool { return m.life == p.Owner })]; {
		case owner.log.names[p.Sequence] == nil:
			ended++
		case !joiner.sees(p):
			missed++
		}
	}
	if missed > 0 || len(live)-ended < 1500 {
		t.Errorf("%d of %d are not seen 300 ms after the join, %d ended meanwhile", missed, len(live), ended)
	}
	if s := joiner.board.Stats(); s.Synced == 0 || s.Nacks == 0 {
		t.Errorf("neither way of repair was needed: %+v", s)
	}
	n.settles(time.Second)
	n.verify()
}

// TestManyRequests: a hundred thousand request ids pass, watched and woken, or
// watched in vain. Nothing of them stays: no goroutine, no watch, no entry.
func TestManyRequests(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	goroutines := runtime.NumGoroutine()
	const live = 100
	for i := range manager.PublicationID(100000) {
		r := id.Request(fmt.Sprint("r-", i))
		changed, cancel := b.Watch(r)
		if i%10 == 0 {
			for _, item := range announce(t, l, t0, publication(i+1, r, 16, true), time.Minute).items {
				if _, _, err := b.Receive(t0, item); err != nil {
					t.Fatal(err)
				}
			}
			if !woken(changed) {
				t.Fatalf("%s: not woken", r)
			}
		}
		if i >= 10*live && i%10 == 0 {
			for _, item := range release(t, l, t0, i+1-10*live) {
				if _, _, err := b.Receive(t0, item); err != nil {
					t.Fatal(err)
				}
			}
		}
		cancel()
	}
	if s := b.Stats(); s.Watched != 0 || s.Entries != live || len(b.requests) != live {
		t.Errorf("%+v, %d requests", s, len(b.requests))
	}
	if n := runtime.NumGoroutine(); n > goroutines {
		t.Errorf("%d goroutines, %d before", n, goroutines)
	}
	verify(t, b, t0)
}

// TestCoverage: in a healthy network nearly every beacon reaches nearly everybody
// in a moment, and one that is cut off shows.
func TestCoverage(t *testing.T) {
	const others = 9
	n := newNetwork(t, 1, others+1)
	n.every = 50 * ms // little happens
	n.run(80 * time.Second)
	owner := n.members[0]
	s := owner.log.Stats()
	t.Logf("%d beacons, %d answers expected, %d heard, %d missed", s.Beacons, s.EchoesExpected, s.EchoesHeard, s.EchoesMissed)
	if s.Beacons < 7 || s.EchoesExpected != others*s.Beacons || s.EchoesHeard < s.EchoesExpected*95/100 {
		t.Errorf("%+v", s)
	}
	cut := n.members[7]
	n.cut = func(from, to *member) bool { return from == cut || to == cut }
	n.run(50 * time.Second)
	after := owner.log.Stats()
	if missed := after.EchoesMissed - s.EchoesMissed; missed < 4 || missed > 8 {
		t.Errorf("with one cut off %d answers are missed of %d", missed, after.EchoesExpected-s.EchoesExpected)
	}
	if s := cut.log.Stats(); s.EchoesMissed < 4*others {
		t.Errorf("whoever is cut off misses %+v", s)
	}
}
