package transfer

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
)

const mib = 1 << 20

func life(n int) id.Life {
	return id.Life{Node: id.Node(fmt.Sprintf("node-%d", n)), Incarnation: 1}
}

// join is Join by somebody who is not refused.
func join(t testing.TB, q *Queue, peer int, bytes int64, urgent bool) *Place {
	t.Helper()
	p, err := q.Join(life(peer), bytes, urgent)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// began reports whether p is under way.
func began(p *Place) bool {
	p.q.mu.Lock()
	defer p.q.mu.Unlock()
	return p.phase == begun
}

// walked is a class as its definition has it: flows in a ring, each of which is
// visited in every round, given the quantum if it lacks one, and served while it
// can pay. One that can, but whose peer is at its cap, is passed by from then on,
// until another place of the peer leaves.
type walked struct {
	round, at int
	ring      []*walkedFlow
}

type walkedFlow struct {
	peer    int
	places  []*walkedPlace
	credit  int64
	visited int // latest round
	aside   bool
}

type walkedPlace struct {
	peer   int
	bytes  int64
	urgent bool
	phase  phase
	real   *Place
}

func (w *walked) next(capped func(*walkedPlace) bool) *walkedPlace {
	for slices.ContainsFunc(w.ring, func(f *walkedFlow) bool { return !f.aside }) {
		if w.at == len(w.ring) {
			w.round, w.at = w.round+1, 0
		}
		f := w.ring[w.at]
		p := f.places[0]
		if f.visited < w.round {
			f.visited = w.round
			if p.bytes > f.credit && !f.aside {
				f.credit += quantum
			}
		}
		switch {
		case p.bytes > f.credit || f.aside:
			w.at++
		case capped(p):
			f.aside = true
		default:
			return p
		}
	}
	return nil
}

func (w *walked) add(p *walkedPlace) {
	for _, f := range w.ring {
		if f.peer == p.peer {
			f.places = append(f.places, p)
			return
		}
	}
	w.ring = append(w.ring, &walkedFlow{peer: p.peer, places: []*walkedPlace{p}, visited: w.round})
}

func (w *walked) remove(p *walkedPlace, pays bool) {
	for i, f := range w.ring {
		at := slices.Index(f.places, p)
		if at < 0 {
			continue
		}
		if pays {
			f.credit -= p.bytes
		}
		f.places = slices.Delete(f.places, at, at+1)
		if len(f.places) == 0 {
			w.ring = slices.Delete(w.ring, i, i+1)
			if i < w.at {
				w.at--
			}
		}
		return
	}
}

// model is a Queue, worked out naively.
type model struct {
	o       QueueOptions
	places  []*walkedPlace
	classes [2]walked
}

func (m *model) class(p *walkedPlace) *walked {
	if p.urgent {
		return &m.classes[1]
	}
	return &m.classes[0]
}

func (m *model) load(is func(*walkedPlace) bool) (l Load) {
	for _, p := range m.places {
		if is(p) {
			l.Places++
			l.Bytes += p.bytes
		}
	}
	return l
}

func (m *model) underway() Load { return m.load(func(p *walkedPlace) bool { return p.phase == begun }) }

func (m *model) waits(urgent bool) Load {
	return m.load(func(p *walkedPlace) bool { return p.phase == waiting && p.urgent == urgent })
}

func (m *model) fits(p *walkedPlace) bool {
	l := m.underway()
	return l.Places == 0 || l.Places < m.o.Places && l.Bytes+p.bytes <= m.o.Bytes
}

func (m *model) capped(p *walkedPlace) bool {
	urgent := m.load(func(other *walkedPlace) bool { return other.peer == p.peer && other.phase == waiting && other.urgent })
	l := m.load(func(other *walkedPlace) bool { return other.peer == p.peer && other.phase == begun })
	return !p.urgent && urgent.Places > 0 || l.Places > 0 && (l.Places == m.o.PeerPlaces || l.Bytes+p.bytes > m.o.PeerBytes)
}

// resume is for when any place of the peer has stopped to wait or has left.
func (m *model) resume(peer int) {
	for _, c := range m.classes {
		for _, f := range c.ring {
			if f.peer == peer {
				f.aside = false
			}
		}
	}
}

// first reports whether none that could begin, but for the bounds of all, goes
// before p, which has not joined.
func (m *model) first(p *walkedPlace) bool {
	for i, c := range m.classes {
		for _, f := range c.ring {
			if (i == 1 || !p.urgent) && !f.aside || f.peer == p.peer && (i == 1) == p.urgent {
				return false
			}
		}
	}
	return true
}

func (m *model) next() *walkedPlace {
	if p := m.classes[1].next(m.capped); p != nil {
		return p
	}
	return m.classes[0].next(m.capped)
}

func (m *model) advance() {
	for p := m.next(); p != nil && m.fits(p); p = m.next() {
		m.class(p).remove(p, true)
		p.phase = begun
		m.resume(p.peer)
	}
}

func (m *model) join(t *rapid.T, q *Queue, p *walkedPlace) {
	waits := m.waits(false)
	urgent := m.waits(true)
	waits.Places += urgent.Places
	waits.Bytes += urgent.Bytes
	var err error
	p.real, err = q.Join(life(p.peer), p.bytes, p.urgent)
	switch {
	case m.fits(p) && !m.capped(p) && m.first(p):
		p.phase = begun
	case waits.Places == m.o.Waiting || waits.Places > 0 && waits.Bytes+p.bytes > m.o.WaitingBytes:
		if !errors.Is(err, ErrQueueFull) || p.real != nil {
			t.Fatalf("Join beside %+v = %v, %v, want ErrQueueFull", waits, p.real, err)
		}
		return
	default:
		m.class(p).add(p)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.places = append(m.places, p)
}

func (m *model) leave(p *walkedPlace) {
	p.real.Leave()
	if p.phase == waiting {
		m.class(p).remove(p, false)
	}
	if p.phase != left {
		m.resume(p.peer)
	}
	p.phase = left
}

func (m *model) urge(p *walkedPlace) {
	p.real.Urge()
	if p.phase == waiting && !p.urgent {
		m.class(p).remove(p, false)
		m.resume(p.peer)
		p.urgent = true
		m.class(p).add(p)
	}
}

func (m *model) check(t *rapid.T, q *Queue) {
	for i, p := range m.places {
		told := false
		select {
		case <-p.real.turn:
			told = true
		default:
		}
		if p.real.phase != p.phase || told != (p.phase != waiting) {
			t.Fatalf("place %d, %+v, is in phase %v; told %v", i, p, p.real.phase, told)
		}
	}
	s := q.Stats()
	s.Oldest = 0
	if want := (QueueStats{UnderWay: m.underway(), Urgent: m.waits(true), Other: m.waits(false)}); s != want {
		t.Fatalf("Stats = %+v, want %+v", s, want)
	}
	if s.UnderWay.Places > m.o.Places || s.UnderWay.Bytes > m.o.Bytes && s.UnderWay.Places > 1 {
		t.Fatalf("%+v under way, bounds %+v", s.UnderWay, m.o)
	}
	if s.UnderWay.Places == 0 && s.Urgent.Places+s.Other.Places > 0 {
		t.Fatal("nothing is under way, and some wait")
	}
	kept := make(map[id.Life]bool)
	for _, p := range m.places {
		if p.phase != left {
			kept[life(p.peer)] = true
		}
		l := m.load(func(other *walkedPlace) bool { return other.peer == p.peer && other.phase == begun })
		if l.Places > m.o.PeerPlaces || l.Bytes > m.o.PeerBytes && l.Places > 1 {
			t.Fatalf("%+v of peer %d under way, bounds %+v", l, p.peer, m.o)
		}
	}
	if len(q.peers) != len(kept) {
		t.Fatalf("%d peers are kept, of %d something waits or is under way", len(q.peers), len(kept))
	}
}

func TestQueueIsADeficitRoundRobin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		steps := rapid.IntRange(1, 400).Draw(t, "steps")
		o := QueueOptions{
			Bytes:        (1 + r.Int64N(40)) * mib,
			Places:       1 + r.IntN(5),
			Waiting:      1 + r.IntN(60),
			WaitingBytes: (10 + r.Int64N(1000)) * mib,
		}
		o.PeerPlaces, o.PeerBytes = 1+r.IntN(o.Places), 1+r.Int64N(o.Bytes)
		peers, most := 1+r.IntN(6), 1+r.Int64N(60*mib)
		q, m := NewQueue(o), &model{o: o}
		for range steps {
			var alive []*walkedPlace
			for _, p := range m.places {
				if p.phase != left || r.IntN(50) == 0 {
					alive = append(alive, p)
				}
			}
			switch n := r.IntN(20); {
			case n < 11 || len(alive) == 0:
				m.join(t, q, &walkedPlace{peer: r.IntN(peers), bytes: 1 + r.Int64N(1+r.Int64N(most)), urgent: r.IntN(4) == 0})
			case n < 18:
				m.leave(alive[r.IntN(len(alive))])
			default:
				m.urge(alive[r.IntN(len(alive))])
			}
			m.advance()
			m.check(t, q)
		}
		for _, p := range m.places {
			p.real.Leave()
		}
		empty(t, q)
	})
}

// empty checks that a queue that all have left keeps nothing.
func empty(t interface{ Errorf(string, ...any) }, q *Queue) {
	if s := q.Stats(); s != (QueueStats{}) {
		t.Errorf("all have left, and Stats = %+v", s)
	}
	for _, c := range q.classes {
		if len(q.peers) != 0 || len(c.due) != 0 || q.arrivals.Len() != 0 {
			t.Errorf("all have left, and %d peers, %d flows, %d places are kept", len(q.peers), len(c.due), q.arrivals.Len())
		}
	}
}

// Two peers that always have something waiting are given the same in any span of
// time in which neither is at its cap, but for a quantum and the largest place at
// either end of it, whatever a third does; a peer that is new, or was at its cap,
// waits for up to a round before.
func TestQueueSharesTheBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const largest = 30 * mib
		o := QueueOptions{Bytes: rapid.Int64Range(1, 100).Draw(t, "bytes") * mib, Places: rapid.IntRange(1, 8).Draw(t, "places")}
		o.PeerBytes = rapid.Int64Range(1, o.Bytes).Draw(t, "bytes of a peer")
		o.PeerPlaces = rapid.IntRange(1, o.Places).Draw(t, "places of a peer")
		q := NewQueue(o)
		urgent := rapid.Bool().Draw(t, "urgent")
		sizes := [3]int64{}
		for i := range sizes {
			sizes[i] = rapid.Int64Range(1, largest).Draw(t, "up to")
		}
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		capped := false // one of the two was, since it was last asked
		look := func() {
			for peer := range 2 {
				if known := q.peers[life(peer)]; known != nil {
					for _, f := range known.flows {
						capped = capped || f != nil && f.index == aside
					}
				}
			}
		}
		add := func(peer int) *Place {
			p, err := q.Join(life(peer), 1+r.Int64N(sizes[peer]), urgent)
			if err != nil {
				t.Fatal(err)
			}
			look()
			return p
		}
		first, err := q.Join(life(9), 1<<40, true) // all others wait for it
		if err != nil {
			t.Fatal(err)
		}
		var waits, runs []*Place
		for range 9 { // more than begin at once
			waits = append(waits, add(0), add(1), add(2))
		}
		first.Leave()
		look()
		var given, from [3]int64 // from: what was, when the span began
		var ahead, behind int64  // the most that the first peer was since both are served
		served := false
		var start int64
		for range 300 {
			for i := 0; i < len(waits); i++ {
				if p := waits[i]; began(p) {
					for peer := range given {
						if p.peer.life == life(peer) {
							given[peer] += p.bytes
							if peer < 2 || r.IntN(3) == 0 {
								waits[i] = add(peer)
							} else {
								waits = slices.Delete(waits, i, i+1)
								i--
							}
							break
						}
					}
					runs = append(runs, p)
				}
			}
			if capped {
				capped, served, from = false, false, given
				ahead, behind = 0, 0
			}
			if !served && given[0] > from[0] && given[1] > from[1] {
				served, start = true, given[0]-given[1]
			}
			if served {
				ahead, behind = max(ahead, given[0]-given[1]-start), max(behind, start-given[0]+given[1])
			}
			if ahead+behind > quantum+2*max(sizes[0], sizes[1]) {
				t.Fatalf("of %d bytes the first peer was given up to %d more than the second, and up to %d less", given[0], ahead, behind)
			}
			i := r.IntN(len(runs))
			runs[i].Leave()
			look()
			runs = slices.Delete(runs, i, i+1)
			if r.IntN(2) == 0 {
				waits = append(waits, add(2))
			}
		}
	})
}

// A peer that answers nothing until its reads stall, and of which thousands are
// asked, holds up to its cap, and nobody else waits for a moment, however
// urgent the peer's reads are.
func TestQueueAStoppedPeerDelaysTheOthersByNothing(t *testing.T) {
	for name, size := range map[string]int64{"small places": 64 << 10, "large places": 30 * mib, "larger than its cap": 100 * mib} {
		for _, stoppedUrgent := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, urgent %v", name, stoppedUrgent), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					const stall, reads = 2 * time.Second, 3000
					q := NewQueue(QueueOptions{WaitingBytes: 1 << 50})
					ctx, cancel := context.WithCancel(t.Context())
					var readers sync.WaitGroup
					stalled := 0
					for range reads {
						p := join(t, q, 0, size, stoppedUrgent)
						readers.Go(func() {
							defer p.Leave()
							if p.Wait(ctx) != nil {
								return
							}
							time.Sleep(stall)
							q.mu.Lock()
							stalled++
							q.mu.Unlock()
						})
					}
					for n := range 12 {
						readers.Go(func() {
							for range 1000 {
								start := time.Now()
								p, err := q.Join(life(1+n/2), 8*mib, n%2 == 0)
								if err != nil {
									t.Error(err)
									return
								}
								if err := p.Wait(ctx); err != nil || time.Since(start) != 0 {
									t.Errorf("Wait = %v after %v, want nil at once", err, time.Since(start))
								}
								time.Sleep(time.Duration(5+n) * time.Millisecond)
								p.Leave()
							}
						})
					}
					time.Sleep(5*stall + time.Millisecond)
					q.mu.Lock()
					if want := 5 * min(8, max(1, int(64*mib/size))); stalled != want {
						t.Errorf("%d reads of the stopped peer have stalled after %v, want %d: its cap is not used", stalled, 5*stall, want)
					}
					q.mu.Unlock()
					time.Sleep(stall * 4)
					cancel()
					readers.Wait()
					empty(t, q)
				})
			})
		}
	}
}

func TestQueueCapsAPeer(t *testing.T) {
	t.Run("places", func(t *testing.T) {
		q := NewQueue(QueueOptions{}) // 8 of 64
		var places []*Place
		for range 10 {
			places = append(places, join(t, q, 0, 1, true))
		}
		if !began(places[7]) || began(places[8]) {
			t.Fatalf("the eighth began: %v, the ninth: %v; want the eighth alone", began(places[7]), began(places[8]))
		}
		places[3].Leave()
		if !began(places[8]) || began(places[9]) {
			t.Fatal("one has left, and not one begins")
		}
	})
	t.Run("bytes", func(t *testing.T) {
		q := NewQueue(QueueOptions{}) // 64 of 256 MiB
		join(t, q, 0, 60*mib, true)
		fits, exceeds := join(t, q, 0, 4*mib, true), join(t, q, 0, 1, true)
		if !began(fits) || began(exceeds) {
			t.Fatalf("what fits began: %v, what exceeds the cap: %v", began(fits), began(exceeds))
		}
		fits.Leave()
		if !began(exceeds) {
			t.Fatal("there is room again, and it does not begin")
		}
	})
	t.Run("one larger than its bytes runs as the peer's only one", func(t *testing.T) {
		q := NewQueue(QueueOptions{})
		small := join(t, q, 0, 1, false)
		large, later := join(t, q, 0, 100*mib, false), join(t, q, 0, 1, false)
		if other := join(t, q, 1, 1, false); !began(other) || began(large) || began(later) {
			t.Fatalf("another peer's began: %v, the large one: %v, one behind it: %v", began(other), began(large), began(later))
		}
		small.Leave()
		if !began(large) || began(later) {
			t.Fatalf("the large one began: %v, one behind it: %v", began(large), began(later))
		}
		large.Leave()
		if !began(later) {
			t.Fatal("the one behind it does not begin")
		}
	})
	t.Run("its own that is not urgent overtakes none that is", func(t *testing.T) {
		q := NewQueue(QueueOptions{})
		running := join(t, q, 0, 1, false)
		urgent, other, stranger := join(t, q, 0, 100*mib, true), join(t, q, 0, 1, false), join(t, q, 1, 1, false)
		if began(urgent) || began(other) || !began(stranger) {
			t.Fatalf("urgent began: %v, the other: %v, another peer's: %v", began(urgent), began(other), began(stranger))
		}
		urgent.Leave() // it is given up
		if !began(other) {
			t.Fatal("nothing urgent waits, and the other does not begin")
		}
		running.Leave()
	})
	t.Run("what held all back makes way when its peer is at the cap", func(t *testing.T) {
		q := NewQueue(QueueOptions{Bytes: 100, Places: 10, PeerBytes: 50, PeerPlaces: 1})
		join(t, q, 0, 60, false)
		holds, held := join(t, q, 1, 50, false), join(t, q, 2, 10, false)
		if began(holds) || began(held) {
			t.Fatal("one began that does not fit, or whose turn has not come")
		}
		if urgent := join(t, q, 1, 20, true); !began(urgent) || began(holds) || !began(held) {
			t.Fatalf("urgent began: %v, what held: %v, what was held: %v", began(urgent), began(holds), began(held))
		}
	})
}

// A peer that has been at its cap for long, while others were served, is given
// no more than its share once it is not.
func TestQueueSavesNothingWhileSetAside(t *testing.T) {
	q := NewQueue(QueueOptions{Places: 3, PeerPlaces: 2})
	slow := []*Place{join(t, q, 0, mib, false), join(t, q, 0, mib, false)}
	waits := []*Place{join(t, q, 0, 4*mib, false)}
	busy := join(t, q, 1, 4*mib, false)
	for range 1000 {
		next := join(t, q, 1, 4*mib, false)
		busy.Leave()
		if busy = next; !began(busy) || began(waits[0]) {
			t.Fatal("the second peer does not go on, or the first exceeds its cap")
		}
	}
	join(t, q, 2, 1, true)
	join(t, q, 2, 1, true) // for good: the first two have one place between them
	for range 20 {
		waits = append(waits, join(t, q, 0, 4*mib, false), join(t, q, 1, 4*mib, false))
	}
	slow[0].Leave()
	slow[1].Leave()
	running, ahead := busy, 0 // the first peer, of the second
	for range 40 {
		running.Leave()
		i := slices.IndexFunc(waits, began)
		if i < 0 {
			t.Fatal("none begins")
		}
		running = waits[i]
		waits = slices.Delete(waits, i, i+1)
		if running.peer.life == life(0) {
			ahead++
		} else {
			ahead--
		}
		if ahead < -2 || ahead > 2 {
			t.Fatalf("the first peer is %d places ahead of the second", ahead)
		}
	}
}

func TestQueueDoesNotLetMuchStarveLittle(t *testing.T) {
	q := NewQueue(QueueOptions{Bytes: 8 * mib, Places: 1})
	running := join(t, q, 0, mib, false)
	var many []*Place
	for range 100 {
		many = append(many, join(t, q, 0, 4*mib, false))
	}
	little := join(t, q, 1, mib, false)
	running.Leave()
	for i := 0; !began(little); i++ {
		if i == 2 {
			t.Fatal("the second peer waits for more than two places of the first")
		}
		many[i].Leave()
	}
}

// Small places always fit beside others; but once the turn of a large one has
// come, none overtakes it.
func TestQueueDoesNotStarveALargePlace(t *testing.T) {
	for name, size := range map[string]int64{"of the bound": 8 * mib, "larger than the bound": 100 * mib} {
		t.Run(name, func(t *testing.T) {
			q := NewQueue(QueueOptions{Bytes: 8 * mib, Places: 4, PeerBytes: 8 * mib, PeerPlaces: 4})
			small := []*Place{join(t, q, 0, mib, false), join(t, q, 0, mib, false)}
			large := join(t, q, 1, size, false)
			later := []*Place{join(t, q, 0, mib, false), join(t, q, 1, mib, false), join(t, q, 2, 1, false)}
			if began(large) || slices.ContainsFunc(later, began) {
				t.Fatal("a large place, or one after it, began beside others")
			}
			small[0].Leave()
			if began(large) || slices.ContainsFunc(later, began) {
				t.Fatal("a large place, or one after it, began beside another")
			}
			small[1].Leave()
			if !began(large) || slices.ContainsFunc(later, began) {
				t.Fatal("the large place does not run, or not alone")
			}
			large.Leave()
			if !began(later[0]) || !began(later[1]) || !began(later[2]) {
				t.Fatal("what came after the large place does not begin after it")
			}
		})
	}
}

func TestQueueUrgent(t *testing.T) {
	q := NewQueue(QueueOptions{Bytes: 8 * mib, Places: 1})
	running := join(t, q, 0, mib, false)
	large := join(t, q, 0, 100*mib, false)
	other := join(t, q, 1, mib, false)
	urgent := join(t, q, 2, 100*mib, true)
	next := func(leaves, begins *Place, others ...*Place) {
		t.Helper()
		leaves.Leave()
		if !began(begins) || slices.ContainsFunc(others, began) {
			t.Fatalf("another place than that of %v, %d bytes, begins", begins.peer.life, begins.bytes)
		}
	}
	next(running, urgent, large, other)
	other.Urge()
	other.Urge()
	late := join(t, q, 2, mib, true)
	urgent.Urge() // it has begun, and nothing happens
	if s := q.Stats(); s.Urgent != (Load{2, 2 * mib}) || s.Other != (Load{1, 100 * mib}) {
		t.Fatalf("Stats = %+v, want two urgent ones", s)
	}
	next(urgent, other, large, late)
	next(other, late, large)
	next(late, large)
	large.Leave()
	large.Urge() // it has left
	empty(t, q)
}

func TestQueueRefusesAtOnceWhatIsTooMuch(t *testing.T) {
	t.Run("places", func(t *testing.T) {
		q := NewQueue(QueueOptions{Places: 1, Waiting: 2})
		running := join(t, q, 0, 1, false)
		join(t, q, 0, 1, false)
		join(t, q, 0, 1, true)
		for _, urgent := range []bool{false, true} {
			_, err := q.Join(life(1), 7, urgent)
			if !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), "node-1.1") || !strings.Contains(err.Error(), "2 wait") || !strings.Contains(err.Error(), "transfer.limits.waiting") {
				t.Errorf("Join = %v, want ErrQueueFull, the peer, and what to do", err)
			}
		}
		running.Leave()
		join(t, q, 1, 7, false)
	})
	t.Run("bytes", func(t *testing.T) {
		q := NewQueue(QueueOptions{Places: 1, WaitingBytes: 100})
		join(t, q, 0, 1, false)
		large := join(t, q, 0, 1<<50, false) // alone
		if _, err := q.Join(life(1), 1, false); !errors.Is(err, ErrQueueFull) || !strings.Contains(err.Error(), "at most 100 bytes") {
			t.Errorf("Join = %v, want ErrQueueFull and the bound", err)
		}
		large.Leave()
		join(t, q, 0, 60, false)
		if _, err := q.Join(life(1), 41, false); !errors.Is(err, ErrQueueFull) {
			t.Errorf("Join = %v, want ErrQueueFull", err)
		}
		join(t, q, 0, 40, false)
	})
}

func TestQueueTakesAnyNumberOfBytes(t *testing.T) {
	q := NewQueue(QueueOptions{Places: 2})
	for _, bytes := range []int64{-1 << 63, -1, 0, 1<<63 - 1} {
		a, b := join(t, q, 0, bytes, false), join(t, q, 1, bytes, false)
		if !began(a) || began(b) != (bytes <= 0) {
			t.Errorf("%d bytes: began %v, %v", bytes, began(a), began(b))
		}
		a.Leave()
		if !began(b) {
			t.Errorf("%d bytes: the second does not begin", bytes)
		}
		b.Leave()
	}
	empty(t, q)
}

func TestPlaceWait(t *testing.T) {
	t.Run("ends at its turn", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := NewQueue(QueueOptions{Places: 1})
			running, p := join(t, q, 0, 1, false), join(t, q, 0, 1, false)
			if err := running.Wait(t.Context()); err != nil {
				t.Fatal(err)
			}
			go func() {
				time.Sleep(time.Minute)
				if s := q.Stats(); s.Oldest != time.Minute {
					t.Errorf("the oldest has waited %v, want 1m", s.Oldest)
				}
				running.Leave()
			}()
			start := time.Now()
			if err := p.Wait(t.Context()); err != nil || time.Since(start) != time.Minute {
				t.Errorf("Wait = %v after %v, want nil after 1m", err, time.Since(start))
			}
			p.Leave()
			empty(t, q)
		})
	})
	t.Run("ends with the context's cause and gives the place up", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := NewQueue(QueueOptions{Places: 1})
			running, p, behind := join(t, q, 0, 1, false), join(t, q, 0, 1, false), join(t, q, 0, 1, false)
			cause := errors.New("request was cancelled")
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(cause) })
			if err := p.Wait(ctx); !errors.Is(err, cause) || !strings.Contains(err.Error(), "node-0.1") {
				t.Errorf("Wait = %v, want the cause and the peer", err)
			}
			p.Leave()
			if s := q.Stats(); s.Other.Places != 1 {
				t.Errorf("%d places wait, want 1", s.Other.Places)
			}
			running.Leave()
			if !began(behind) {
				t.Error("the place behind the one that was given up does not begin")
			}
		})
	})
	t.Run("ends when another goroutine leaves", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := NewQueue(QueueOptions{Places: 1})
			running, p := join(t, q, 0, 1, false), join(t, q, 0, 1, false)
			time.AfterFunc(time.Second, p.Leave)
			if err := p.Wait(t.Context()); err == nil {
				t.Error("Wait = nil at a place that was given up")
			}
			running.Leave()
			if err := running.Wait(t.Context()); err == nil {
				t.Error("Wait = nil at a place that has left")
			}
			empty(t, q)
		})
	})
}

// Readers join, wait, urge, cancel, and leave at random, also at once: the
// bounds hold, no turn leaks, and all get through.
func TestQueueUnderContention(t *testing.T) {
	o := QueueOptions{Bytes: 100, Places: 5, PeerBytes: 70, PeerPlaces: 2, Waiting: 40}
	q := NewQueue(o)
	var places, bytes, began atomic.Int64
	var readers sync.WaitGroup
	for n := range 64 {
		readers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(n), 1))
			for range 300 {
				size := 1 + r.Int64N(60)
				p, err := q.Join(life(n%7), size, r.IntN(3) == 0)
				if err != nil {
					continue
				}
				ctx, cancel := context.WithCancel(context.Background())
				var others sync.WaitGroup
				switch r.IntN(4) {
				case 0:
					others.Go(cancel)
				case 1:
					others.Go(p.Urge)
				case 2:
					others.Go(p.Leave)
				}
				if p.Wait(ctx) == nil {
					others.Wait() // it may have left; then its turn is another's
					q.mu.Lock()
					mine := p.phase == begun
					q.mu.Unlock()
					if mine {
						began.Add(1)
						if now := places.Add(1); now > int64(o.Places) {
							t.Errorf("%d places under way", now)
						}
						if now := bytes.Add(size); now > o.Bytes {
							t.Errorf("%d bytes under way", now)
						}
						runtime.Gosched()
						places.Add(-1)
						bytes.Add(-size)
					}
				}
				p.Leave()
				others.Wait()
				cancel()
			}
		})
	}
	readers.Wait()
	empty(t, q)
	if began.Load() == 0 {
		t.Error("none began: the test is not what it says")
	}
}

func BenchmarkQueue(b *testing.B) {
	b.Run("nobody else", func(b *testing.B) {
		q := NewQueue(QueueOptions{})
		peer, ctx := life(1), b.Context()
		b.ReportAllocs()
		for b.Loop() {
			p, err := q.Join(peer, 64<<10, true)
			if err != nil || p.Wait(ctx) != nil {
				b.Fatal(err)
			}
			p.Leave()
		}
	})
	// Each begins after what stands in front: 4000 places of 400 peers, whose
	// large ones save for 256 rounds.
	b.Run("4000 wait", func(b *testing.B) {
		q := NewQueue(QueueOptions{Places: 1, WaitingBytes: 1 << 50})
		peers := make([]id.Life, 400)
		for i := range peers {
			peers[i] = life(i)
		}
		running := join(b, q, 0, 1, false)
		add := func(i int) {
			if _, err := q.Join(peers[i%len(peers)], int64(1+i%2*(1<<30)), false); err != nil {
				b.Fatal(err)
			}
		}
		for i := range 4000 {
			add(i)
		}
		b.ReportAllocs()
		for i := 0; b.Loop(); i++ {
			next := q.next()
			running.Leave()
			running = next
			add(i)
		}
		if s := q.Stats(); s.Other.Places != 4000 || s.UnderWay.Places != 1 {
			b.Errorf("Stats = %+v, want 4000 that wait", s)
		}
	})
}

func ExampleQueue() {
	q := NewQueue(QueueOptions{Places: 1})
	peer := id.Life{Node: "prefill-1", Incarnation: 17}
	for _, urgent := range []bool{false, true} {
		place, err := q.Join(peer, 64<<10, urgent)
		if err != nil {
			fmt.Println(err)
			return
		}
		defer place.Leave()
		fmt.Println(q.Stats().UnderWay, q.Stats().Urgent)
	}
	// Output:
	// {1 65536} {0 0}
	// {1 65536} {1 65536}
}
