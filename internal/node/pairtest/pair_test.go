package pairtest

import (
	"errors"
	"flag"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

const (
	rounds = 20
	stall  = time.Millisecond // of a read
)

var soak = flag.Duration("soak", 2*time.Second, "time of the random operations")

// floors is how often each thing must have happened at least, for the test to
// claim it.
var floors = map[string]int{
	"admit": 400, "commit": 400, "discard": 30, "abort": 30, "stage": 40, "promoted": 12, "mismatch": 15, "unstage": 3,
	"several steps in flight": 20, "plan refused": 15, "overtaken": 6, "combined": 100, "padding": 500, "no pages": 50,
	"trimmed": 100, "trimmed behind a prefix": 30, "trimmed what is published": 80,

	"fork": 70, "fork refused": 80, "fork of a padded row": 20, "fork onto tokens": 50, "fork over published": 10,
	"copy of a fork": 70, "copy of a fork of a request that is gone": 2,

	"offload": 50, "offloaded": 20, "reload": 10, "reloaded": 5, "abandon": 30, "host full": 4, "host has room for a part": 10,
	"no pages to reload": 2, "host copy of a request that is gone": 3, "offloaded what is published": 15,

	"publish": 400, "publish final": 80, "publish refused: overtaken": 3, "republish": 25, "published as offloading": 25,
	"published as on host": 25, "own publication": 30, "hold ran out": 20, "unsealed": 90, "gossip lost": 200, "remove": 60,
	"reset": 40, "removed in a step": 10, "removed in a move": 7, "removed while read into": 5,
	"publication lives without its request": 4,

	"kept": 4, "kept in a move": 2, "reloaded what is kept": 1, "offloaded what is kept": 1, "kept to its end": 2,

	"retrieve": 150, "retrieve of the difference": 30, "retrieve refused: no pages": 2, "retrieve refused: offloaded": 20,
	"waiting": 70, "ready": 40, "diverged": 10, "started over": 15, "started over what is published": 5, "gap taken over": 1,
	"gap behind what was computed": 10, "reader met a stream on the host": 50,

	"part of a read": 50, "read out of order": 16, "read that breaks": 8, "read that is cancelled": 8, "read that is lost": 8,
	"read that lands late": 8, "cancel": 8, "broken": 50, "stale": 30, "stale: offloaded": 3, "landed": 100, "landed too late": 4,
	"landed on what was computed": 10, "landed without what was released": 10, "landed by way of another reader": 4,
	"drained quarantine": 6,
}

var errBroken = errors.New("broken")

// faults of a read; none is the first.
var faults = []struct {
	name string
	transfertest.Fault
}{
	{"read", transfertest.Fault{}},
	{"read", transfertest.Fault{}},
	{"read", transfertest.Fault{}},
	{"read", transfertest.Fault{}},
	{"read out of order", transfertest.Fault{Reorder: true}},
	{"read out of order", transfertest.Fault{Reorder: true}},
	{"read that breaks", transfertest.Fault{Err: errBroken}},
	{"read that is cancelled", transfertest.Fault{Cancel: true}},
	{"read that is lost", transfertest.Fault{Lose: true}},
	{"read that lands late", transfertest.Fault{Late: stall / 4}},
}

const none = 0

// world is one run: three sides, and what all of them know.
type world struct {
	*rapid.T
	sides   []*side
	now     time.Time
	offers  map[announcement]*offer
	stale   map[id.Publication]string // why its readers find it stale, if that is worth a count
	fault   *int
	writers uint32
	seen    map[string]int
}

func (w *world) saw(what string) { w.seen[what]++ }

// below draws evenly: the numbers of rapid itself prefer the small ones.
func (w *world) below(n int, what string) int { return even(n).Draw(w.T, what) }

func even(n int) *rapid.Generator[int] {
	return rapid.Custom(func(t *rapid.T) int {
		x := 0
		for range bits.Len(uint(n-1)) + 2 {
			x *= 2
			if rapid.Bool().Draw(t, "bit") {
				x++
			}
		}
		return x % n
	})
}

// next numbers what is written; it is never reset.
func (s *side) next() uint32 {
	s.writers++
	s.wrote[s.writers] = true
	return s.writers
}

// operation is one thing that a side does, and how often among all.
type operation struct {
	weight int
	do     func(*side)
}

var (
	computes = []operation{
		{24, (*side).admitStep},
		{80, (*side).advance},
		{4, (*side).abort},
		{5, (*side).stage},
		{12, (*side).promote},
		{8, (*side).unstage},
		{2, (*side).setPosition},
		{30, (*side).publish},
		{3, (*side).republishOne},
		{2, (*side).endOne},
		{10, (*side).clearWords},
		{10, (*side).unsealed},
		{3, (*side).remove},
		{2, (*side).reset},
		{8, (*side).offload},
		{24, (*side).carry},
		{14, (*side).reload},
		{2, (*side).retrieveOwn},
	}
	prefills = []operation{{60, (*side).chunk}}
	pulls    = []operation{
		{70, (*side).retrieve},
		{110, (*side).read},
		{4, (*side).cancel},
		{2, (*side).remove},
		{1, (*side).reset},
	}
)

// spread repeats each operation as often as it weighs.
func spread(lists ...[]operation) (all []func(*side)) {
	for _, o := range slices.Concat(lists...) {
		all = append(all, slices.Repeat([]func(*side){o.do}, o.weight)...)
	}
	return all
}

// wind ends all that runs; then every page comes back.
func (s *side) wind() {
	for len(s.pulls) > 0 {
		*s.fault = none
		s.readPart(s.pulls[0], s.pulls[0].copies)
	}
	for len(s.moves) > 0 {
		s.abandon(s.moves[0])
	}
	for len(s.steps) > 0 {
		s.abortStep(s.steps[0])
	}
	for _, r := range names {
		if q := s.requests[r]; q != nil {
			s.removeRequest(q, true)
		}
	}
	for i := range s.publications {
		s.end([]manager.PublicationID{i})
	}
	s.clearWords()
	s.unsealed()
	s.verify()
	want := manager.Counts{Free: s.layout.Pages - 1, Sink: 1, HostFree: hostPages}
	if c := s.m.Counts(); c != want {
		s.Fatalf("%s: at the end %+v, want %+v", s.life.Node, c, want)
	}
}

// TestPair is the promise, over whole nodes but for processes and sockets.
func TestPair(t *testing.T) {
	for _, tt := range []struct {
		order page.Order
		ranks int
	}{{page.NHD, 1}, {page.HND, 2}} {
		t.Run(fmt.Sprintf("%v with %d ranks", tt.order, tt.ranks), func(t *testing.T) { testPair(t, tt.order, tt.ranks) })
	}
}

func testPair(t *testing.T, order page.Order, ranks int) {
	var net transfertest.Network
	sides := []*side{
		newSide(t, &net, "owner", order, ranks, 22),
		newSide(t, &net, "reader", order, ranks, 19),
		newSide(t, &net, "third", order, ranks, 17),
	}
	fault := none
	for _, s := range sides {
		for _, to := range sides {
			if to != s {
				s.open(t, to, func(int) transfertest.Fault { return faults[fault].Fault })
			}
		}
	}
	first, others := spread(computes, prefills), spread(computes, pulls)
	w := &world{sides: sides, now: time.Unix(1_800_000_000, 0), fault: &fault, seen: make(map[string]int)}
	run := func(t *rapid.T) {
		w.T = t
		w.offers, w.stale = make(map[announcement]*offer), make(map[id.Publication]string)
		for _, s := range sides {
			s.begin(w)
			for _, to := range sides {
				if to != s {
					s.board.Member(w.now, to.life, true)
				}
			}
		}
		for n := range 40 + w.below(360, "operations") {
			s, all := sides[0], first
			if i := w.below(5, "side"); i > 1 {
				s, all = sides[i/2], others
			}
			all[w.below(len(all), "operation")](s)
			s.verify()
			if n%16 == 0 { // the others have done nothing
				for _, s := range sides {
					s.verify()
				}
			}
		}
		for _, s := range sides {
			s.wind()
		}
	}
	seldom := func() (what []string) {
		for name, least := range floors {
			if n := w.seen[name]; n < least {
				what = append(what, fmt.Sprintf("%s (%d of %d)", name, n, least))
			}
		}
		slices.Sort(what)
		return what
	}
	// Sequences are random: as many as it takes until each thing was tried.
	start := time.Now()
	for round := 1; !t.Failed(); round++ {
		rapid.Check(t, run)
		if len(seldom()) == 0 && time.Since(start) > *soak/2 {
			break
		}
		if what := seldom(); round >= rounds && len(what) > 0 {
			t.Errorf("tried too seldom, the test claims more than it tries: %s", strings.Join(what, ", "))
		}
	}
	t.Log(w.seen)
}
