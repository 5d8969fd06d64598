package publish

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

var soak = flag.Duration("soak", 0, "how long the random schedules run; 0: a few seconds")

// t0 is when every test begins.
var t0 = time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)

const ms = time.Millisecond

var (
	alpha = id.Life{Node: "alpha", Incarnation: 1001}
	beta  = id.Life{Node: "beta", Incarnation: 2001}
	gamma = id.Life{Node: "gamma", Incarnation: 3001}
)

// publication is one stream of tokens tokens on ranks 0 and 1, pages of 16.
func publication(i manager.PublicationID, r id.Request, tokens int, final bool) manager.Publication {
	pages := make([]page.Index, (tokens+15)/16)
	for n := range pages {
		pages[n] = page.Index(uint64(i)*1000 + uint64(n) + 1)
	}
	return manager.Publication{
		ID: i, Request: r, ContentEpoch: 7, Final: final,
		Streams: []manager.Stream{{Label: id.Main, Ranks: []id.Rank{0, 1}, Tokens: tokens, Pages: pages}},
	}
}

// in is p with its streams in another state, which only Resident has pages in:
// those of publication, so far moved.
func in(state manager.State, p manager.Publication, moved page.Index) manager.Publication {
	p.Streams = slices.Clone(p.Streams)
	for i := range p.Streams {
		s := &p.Streams[i]
		if s.State, s.Pages = state, nil; state == manager.Resident {
			s.Pages = slices.Clone(publication(p.ID, p.Request, s.Tokens, p.Final).Streams[0].Pages)
			for n := range s.Pages {
				s.Pages[n] += moved
			}
		}
	}
	return p
}

// after is a state that an owner may bring a stream into next.
func after(s manager.State, r *rand.Rand) manager.State {
	switch {
	case s == manager.OnHost:
		return manager.Resident
	case s == manager.Offloading && r.IntN(3) == 0: // given up
		return manager.Resident
	case s == manager.Resident && r.IntN(2) == 0:
		return manager.Offloading
	}
	return manager.OnHost
}

// announcement is what was announced, and what is gossiped of it.
type announcement struct {
	Announced
	items [][]byte
}

// announce reserves and announces, and takes all that is outgoing.
func announce(t testing.TB, l *Log, now time.Time, p manager.Publication, hold time.Duration) announcement {
	t.Helper()
	if _, _, _, err := l.Reserve(p.ID); err != nil {
		t.Fatal(err)
	}
	a, err := l.Announce(now, p, hold)
	if err != nil {
		t.Fatal(err)
	}
	return announcement{a, outgoingOf(l, now)}
}

// release ends a publication, and takes all that is outgoing.
func release(t testing.TB, l *Log, now time.Time, p manager.PublicationID) [][]byte {
	t.Helper()
	if err := l.Release(now, p); err != nil {
		t.Fatal(err)
	}
	return outgoingOf(l, now)
}

func outgoingOf(l *Log, now time.Time) [][]byte { return l.Outgoing(now, 1<<30) }

// receive gives items to a board and checks the board afterwards.
func receive(t testing.TB, b *Board, now time.Time, items ...[]byte) (out Output) {
	t.Helper()
	for _, item := range items {
		o, _, err := b.Receive(now, item)
		if err != nil {
			t.Fatal(err)
		}
		out.Broadcast = append(out.Broadcast, o.Broadcast...)
		out.Newer = max(out.Newer, o.Newer)
	}
	verify(t, b, now)
	return out
}

// board knows alpha as a member.
func board(o BoardOptions) *Board {
	if o.Life == (id.Life{}) {
		o.Life = beta
	}
	b := NewBoard(o)
	b.Member(t0, alpha, true)
	return b
}

// shown returns what List shows, as "node.incarnation/name@sequence".
func shown(b *Board, now time.Time) (names []string) {
	for _, e := range b.List(now, 0) {
		names = append(names, fmt.Sprintf("%s@%d", e.Name, e.Sequence))
	}
	return names
}

func decode(t testing.TB, item []byte) wire.Message {
	t.Helper()
	m, err := wire.Decode(item, wire.MaxPages)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func batch(t testing.TB, item []byte) wire.Batch {
	t.Helper()
	m, ok := decode(t, item).(wire.Batches)
	if !ok || len(m) != 1 {
		t.Fatalf("%T is not one batch", m)
	}
	return m[0]
}

// verify checks what must hold of a board whatever happens to it.
func verify(t testing.TB, b *Board, now time.Time) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.since(now)
	entries, parkedItems, due, tables, tableBytes := 0, 0, 0, 0, int64(0)
	for hash, v := range b.views {
		if hash != v.hash || hash == b.hash {
			t.Fatalf("view of %#x under %#x", uint64(v.hash), uint64(hash))
		}
		if p, ok := b.past[hash]; ok {
			t.Fatalf("%s is remembered as past, too: %+v", v.life(), p)
		}
		if v.presence != parked && v.parked != 0 || v.presence == gone && len(v.live) != 0 {
			t.Fatalf("%s: presence %d with %d items parked, %d live", v.life(), v.presence, v.parked, len(v.live))
		}
		if len(v.known.ranges) > b.o.Window+1 { // one more for what is known from a checkpoint's floor
			t.Fatalf("%s: I7: %d ranges in a window of %d", v.life(), len(v.known.ranges), b.o.Window)
		}
		if v.floor > 0 && !v.complete(v.floor) || v.max < v.known.max() || v.max < v.floor {
			t.Fatalf("%s: floor %d, max %d, known %v", v.life(), v.floor, v.max, v.known)
		}
		parkedItems += v.parked
		sum, grown := uint64(0), 0
		for s, e := range v.live {
			entries++
			sum ^= wire.Mix(uint64(s))
			if e.sequence != s || e.view != v || v.named(e.name) != e {
				t.Fatalf("%s: entry %d is not in order", v.life(), s)
			}
			if s <= v.floor || e.name <= v.floor {
				t.Fatalf("%s: I1: publication %d, sequence %d live under floor %d", v.life(), e.name, s, v.floor)
			}
			if !v.known.has(s) {
				t.Fatalf("%s: sequence %d is live and not known", v.life(), s)
			}
			if _, ok := v.ended[e.name]; ok {
				t.Fatalf("%s: publication %d is live and has ended", v.life(), e.name)
			}
			if (e.due >= 0) != (e.due >= 0 && b.due[e.due] == e) {
				t.Fatalf("%s: sequence %d is lost in the heap", v.life(), s)
			}
			if e.due >= 0 {
				due++
			} else if at < e.expires {
				t.Fatalf("%s: sequence %d expires unseen", v.life(), s)
			}
			if e.name != e.sequence {
				grown++
			}
			refs, lists := e.streams()
			if e.hasTable != (lists != nil) || len(refs) == 0 && e.hasTable {
				t.Fatalf("%s: sequence %d has streams %v, lists %v", v.life(), s, refs, lists)
			}
			if len(refs) > 0 && !e.hasTable && !slices.ContainsFunc(refs, isResident) {
				t.Fatalf("%s: sequence %d has no table, and needs none: %v", v.life(), s, refs)
			}
			if e.pages > 0 {
				tables++
				tableBytes += int64(e.pages) * pageBytes
			}
		}
		if grown != len(v.grown) || sum != v.sum {
			t.Fatalf("%s: %d names for %d that have grown, sum %#x for %#x", v.life(), len(v.grown), grown, v.sum, sum)
		}
		for s := range v.ended {
			if s <= v.floor {
				t.Fatalf("%s: ended %d is kept under floor %d", v.life(), s, v.floor)
			}
		}
	}
	byRequest := 0
	for r, first := range b.requests {
		if first == nil || first.sameBefore != nil {
			t.Fatalf("request %x does not begin with its first", r)
		}
		for e := first; e != nil; e = e.sameAfter {
			byRequest++
			if e.request != r || e.view.live[e.sequence] != e || e.sameAfter != nil && e.sameAfter.sameBefore != e {
				t.Fatalf("request %x: sequence %d is not in order", r, e.sequence)
			}
		}
	}
	listed := 0
	for e := b.tables.oldest; e != nil; e = e.newer {
		listed++
		if !e.hasTable || e.pages == 0 || e.newer == nil && b.tables.newest != e || e.newer != nil && e.newer.older != e {
			t.Fatalf("table of %d is not in order", e.sequence)
		}
	}
	if entries != b.entries || entries != byRequest || due != len(b.due) || tables != listed || tableBytes != b.tables.bytes || parkedItems != b.parked {
		t.Fatalf("%d entries, %d counted, %d by request; %d of %d due; %d of %d tables, %d of %d bytes; %d of %d parked",
			entries, b.entries, byRequest, due, len(b.due), tables, listed, tableBytes, b.tables.bytes, parkedItems, b.parked)
	}
	if b.parked > maxParked || len(b.past) > maxPast || len(b.views) > maxOwners {
		t.Fatalf("%d parked, %d past, %d owners", b.parked, len(b.past), len(b.views))
	}
	if tableBytes > b.o.Tables || entries > b.o.Entries {
		t.Fatalf("%d bytes of tables, %d entries", tableBytes, entries)
	}
}

// differs says how e is another than what its owner has announced; "": it is not.
func (e *entry) differs(want *wire.Announcement) string {
	refs, lists := e.streams()
	same := func(l, want []page.Index) bool { return slices.Equal(l, want) }
	switch {
	case e.name != want.Publication || e.sequence != want.Sequence || e.final != want.Final || e.digest != want.Digest:
		return fmt.Sprintf("sequence %d is %+v, announced %+v", e.sequence, e, want)
	case len(refs) > 0 && !slices.Equal(refs, want.Refs):
		return fmt.Sprintf("sequence %d has streams %+v, announced %+v", e.sequence, refs, want.Refs)
	case lists != nil && !slices.EqualFunc(lists, want.Lists, same):
		return fmt.Sprintf("sequence %d has pages %v, announced %v", e.sequence, lists, want.Lists)
	}
	return ""
}
