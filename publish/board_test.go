package publish

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

func encode(t testing.TB, m wire.Message) []byte {
	t.Helper()
	b, err := wire.Encode(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// woken says whether a watch was closed, without waiting.
func woken(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func TestBoardShowsWhatIsAnnounced(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	p := publication(1, "r1", 40, true)
	a := announce(t, l, t0, p, 30*time.Second)
	out := receive(t, b, t0, a.items...)
	if !reflect.DeepEqual(out.Broadcast, a.items) {
		t.Errorf("news are passed on as %x", out.Broadcast)
	}
	if out := receive(t, b, t0, a.items...); out.Broadcast != nil {
		t.Errorf("known things are passed on: %x", out.Broadcast)
	}
	want := p
	want.ID, want.Request = 0, ""
	entry := Entry{
		Name: a.Name, Sequence: 1, Request: p.Request.Hash(), Seal: a.Seal, HasTable: true, Expires: t0.Add(30 * time.Second),
		Digest: batch(t, a.Full).Announcements[0].Digest, Publication: want,
	}
	if got := b.ByRequest(t0, "r1"); len(got) != 1 || !reflect.DeepEqual(got[0], entry) {
		t.Errorf("ByRequest = %+v, want %+v", got, entry)
	}
	if got, err := b.ByName(t0, a.Name); err != nil || !reflect.DeepEqual(got, entry) {
		t.Errorf("ByName = %+v, %v", got, err)
	}
	if got := b.ByRequest(t0, "r2"); got != nil {
		t.Errorf("another request: %+v", got)
	}
	// With the owner's word comes the request's id.
	entry.Publication.Request = "r1"
	if got, err := b.Learn(t0, alpha, a.Full, "r1"); err != nil || !reflect.DeepEqual(got, entry) {
		t.Errorf("Learn = %+v, %v", got, err)
	}
	if out := receive(t, b, t0, release(t, l, t0, 1)...); len(out.Broadcast) != 1 {
		t.Errorf("an end is not passed on")
	}
	if got := b.ByRequest(t0, "r1"); got != nil {
		t.Errorf("after its end: %+v", got)
	}
	if _, err := b.ByName(t0, a.Name); !errors.Is(err, ErrEnded) {
		t.Errorf("after its end: %v", err)
	}
}

// TestReleaseBeforeAnnounce: whatever the order in which a batch arrives, what
// it ends never shows.
func TestReleaseBeforeAnnounce(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	var items [][]byte
	for i := range manager.PublicationID(20) {
		items = append(items, announce(t, l, t0, publication(i+1, "r1", 16, false), time.Minute).items...)
	}
	for i := range manager.PublicationID(20) {
		if i%3 == 0 {
			items = append(items, announce(t, l, t0, publication(i+1, "r1", 32, false), time.Minute).items...)
		}
	}
	keep := manager.PublicationID(7) // so that the floor does not do all the work
	for i := range manager.PublicationID(20) {
		if i+1 != keep {
			items = append(items, release(t, l, t0, i+1)...)
		}
	}
	slices.Reverse(items) // memberlist delivers a burst last in, first out
	b := board(BoardOptions{})
	for range 2 { // and again
		for _, item := range items {
			receive(t, b, t0, item)
			for _, e := range b.ByRequest(t0, "r1") {
				if e.Name.Sequence != id.Sequence(keep) {
					t.Fatalf("%v shows", e.Name)
				}
			}
		}
	}
	if got := shown(b, t0); !slices.Equal(got, []string{"alpha.1001/7@27"}) && !slices.Equal(got, []string{"alpha.1001/7@23"}) {
		t.Errorf("%v shows", got)
	}
	if b.Stats().Old != 0 || b.Stats().Gaps != 0 {
		t.Errorf("%+v", b.Stats())
	}
}

// TestRestart: the owner comes back at once under the same name and numbers its
// publications from 1 again.
func TestRestart(t *testing.T) {
	second := id.Life{Node: alpha.Node, Incarnation: alpha.Incarnation + 1}
	first, again := NewLog(LogOptions{Life: alpha}), NewLog(LogOptions{Life: second})
	var old, fresh [][]byte
	for i := range manager.PublicationID(3) {
		old = append(old, announce(t, first, t0, publication(i+1, "r1", 16, true), time.Minute).items...)
	}
	old = append(old, first.Tick(t0).Broadcast...)
	fresh = append(fresh, announce(t, again, t0, publication(1, "r1", 64, true), time.Minute).items...)
	fresh = append(fresh, again.Tick(t0).Broadcast...)

	onlyNew := func(t *testing.T, b *Board) {
		t.Helper()
		for _, e := range b.ByRequest(t0, "r1") {
			if e.Name.Owner != second {
				t.Fatalf("%v shows after %v was heard of", e.Name, second)
			}
		}
		if _, err := b.ByName(t0, id.Publication{Owner: alpha, Sequence: 1}); !errors.Is(err, ErrEnded) {
			t.Errorf("ByName of the old life: %v", err)
		}
	}
	for name, tell := range map[string]func(b *Board){
		"by its members":     func(b *Board) { b.Member(t0, second, true) },
		"by an announcement": func(b *Board) { receive(t, b, t0, fresh[0]) },
		"by a checkpoint":    func(b *Board) { receive(t, b, t0, fresh[1]) },
		"by push/pull":       func(b *Board) { _, _ = b.Merge(t0, wire.EncodeChecks([]wire.Check{again.Check()})) },
		"by a farewell": func(b *Board) {
			receive(t, b, t0, encode(t, &wire.Bye{Owner: second.Node.Hash(), Incarnation: second.Incarnation}))
		},
		"by its being gone":   func(b *Board) { b.Member(t0, second, false) },
		"by its pushing here": func(b *Board) { _, _ = b.Learn(t0, second, mustFind(t, again, 1), "r1") },
	} {
		t.Run(name, func(t *testing.T) {
			b := board(BoardOptions{})
			receive(t, b, t0, old...)
			changed, cancel := b.Watch("r1")
			defer cancel()
			if len(b.ByRequest(t0, "r1")) != 3 {
				t.Fatal("the old life does not show")
			}
			tell(b)
			verify(t, b, t0)
			onlyNew(t, b)
			if !woken(changed) {
				t.Error("nobody was told that the old life's entries went")
			}
			receive(t, b, t0, old...)
			onlyNew(t, b)
			b.Member(t0, alpha, true) // late news of the old life
			onlyNew(t, b)
			if name == "by a farewell" || name == "by its being gone" {
				return
			}
			b.Member(t0, second, true)
			receive(t, b, t0, fresh...)
			receive(t, b, t0, old...)
			b.Member(t0, alpha, false)
			onlyNew(t, b)
			if got := b.ByRequest(t0, "r1"); len(got) != 1 || got[0].Publication.Streams[0].Tokens != 64 {
				t.Errorf("the new life shows as %+v", got)
			}
		})
	}
}

func mustFind(t testing.TB, l *Log, s id.Sequence) []byte {
	t.Helper()
	full, _, err := l.Find(t0, s, "")
	if err != nil {
		t.Fatal(err)
	}
	return full
}

func TestItemsWaitForTheirMember(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	a := announce(t, l, t0, publication(1, "r1", 16, true), time.Minute)
	gone := announce(t, l, t0, publication(2, "r2", 16, true), time.Minute)
	items := slices.Concat(a.items, release(t, l, t0, 2), gone.items, l.Tick(t0).Broadcast)
	b := NewBoard(BoardOptions{Life: beta})
	changed, cancel := b.Watch("r1")
	defer cancel()
	if out := receive(t, b, t0, items...); len(out.Broadcast) != 3 {
		t.Errorf("%d of 3 news are passed on", len(out.Broadcast))
	}
	if got := shown(b, t0); got != nil || woken(changed) {
		t.Errorf("%v shows of no member", got)
	}
	if _, err := b.ByName(t0, a.Name); !errors.Is(err, ErrUnknown) {
		t.Errorf("ByName: %v", err)
	}
	if out := b.Tick(t0.Add(time.Second)); out.Send != nil || out.Resync != nil {
		t.Errorf("no member is asked: %+v", out)
	}
	b.Member(t0.Add(2*time.Second-ms), alpha, true)
	verify(t, b, t0)
	if got := shown(b, t0); !slices.Equal(got, []string{"alpha.1001/1@1"}) || !woken(changed) {
		t.Errorf("%v shows, woken %v", got, woken(changed))
	}

	// In vain.
	b = NewBoard(BoardOptions{Life: beta})
	receive(t, b, t0, items...)
	b.Tick(t0.Add(2 * time.Second))
	verify(t, b, t0)
	if s := b.Stats(); s.Owners != 0 || s.Entries != 0 || s.Unparked == 0 {
		t.Errorf("after two seconds: %+v", s)
	}
	// What is replayed after that is not believed, until the owner itself says so.
	b.Member(t0.Add(3*time.Second), alpha, true)
	receive(t, b, t0.Add(3*time.Second), items[0], items[2])
	if got := shown(b, t0.Add(3*time.Second)); got != nil {
		t.Errorf("%v shows", got)
	}
	if out := b.Tick(t0.Add(3 * time.Second)); !slices.Equal(out.Resync, []id.Life{alpha}) {
		t.Errorf("%+v", out)
	}
	if err := b.Sync(t0.Add(3*time.Second), alpha, l.Live(t0)); err != nil {
		t.Fatal(err)
	}
	if got := shown(b, t0.Add(3*time.Second)); !slices.Equal(got, []string{"alpha.1001/1@1"}) {
		t.Errorf("%v shows", got)
	}
}

func TestWaitingItemsAreBounded(t *testing.T) {
	b := board(BoardOptions{})
	l := NewLog(LogOptions{Life: alpha})
	receive(t, b, t0, announce(t, l, t0, publication(1, "r1", 16, true), time.Minute).items...)
	stranger := func(i int) id.Life {
		return id.Life{Node: id.Node(fmt.Sprintf("stranger-%d", i)), Incarnation: 5}
	}
	for i := range 2 * maxParked {
		other := NewLog(LogOptions{Life: stranger(i % 2 * i), Words: 4}) // half of the items are of stranger-0
		item := announce(t, other, t0, publication(1, "x", 16, true), time.Minute).items[0]
		if _, _, err := b.Receive(t0, item); err != nil {
			t.Fatal(err)
		}
	}
	verify(t, b, t0)
	if s := b.Stats(); s.Owners > maxParked+1 || s.Unparked == 0 {
		t.Errorf("%+v", s)
	}
	// A newer life of a member voids the older one even if there's no room for it.
	newer := NewLog(LogOptions{Life: id.Life{Node: alpha.Node, Incarnation: alpha.Incarnation + 1}})
	receive(t, b, t0, announce(t, newer, t0, publication(1, "r1", 16, true), time.Minute).items...)
	if got := shown(b, t0); got != nil {
		t.Errorf("%v shows", got)
	}
	b.Member(t0, alpha, true)
	if got := b.Stats(); got.Owners > maxParked {
		t.Errorf("the old life is back: %+v", got)
	}
	// Members find room.
	b.Member(t0, gamma, true)
	other := NewLog(LogOptions{Life: gamma})
	receive(t, b, t0, announce(t, other, t0, publication(1, "r3", 16, true), time.Minute).items...)
	if got := shown(b, t0); !slices.Equal(got, []string{"gamma.3001/1@1"}) {
		t.Errorf("%v shows", got)
	}
	b.Tick(t0.Add(2 * time.Second))
	verify(t, b, t0)
	if s := b.Stats(); s.Owners != 1 {
		t.Errorf("after two seconds: %+v", s)
	}
}

func TestDeathHidesAndTheGraceDrops(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	a := announce(t, l, t0, publication(1, "r1", 16, true), time.Hour)
	ended := announce(t, l, t0, publication(2, "r2", 16, true), time.Hour)
	receive(t, b, t0, slices.Concat(a.items, ended.items, release(t, l, t0, 2))...)
	steps := []struct {
		up   bool
		at   time.Duration
		want int
	}{{false, time.Second, 0}, {true, 30 * time.Second, 1}, {false, 31 * time.Second, 0}}
	for _, s := range steps {
		changed, cancel := b.Watch("r1")
		b.Member(t0.Add(s.at), alpha, s.up)
		if !woken(changed) {
			t.Errorf("up %v: nobody was woken", s.up)
		}
		cancel()
		b.Tick(t0.Add(s.at + 29*time.Second))
		if got := b.ByRequest(t0.Add(s.at), "r1"); len(got) != s.want {
			t.Errorf("up %v: %+v", s.up, got)
		}
		if b.Stats().Entries != 1 {
			t.Errorf("up %v: dropped within the grace", s.up)
		}
	}
	if _, err := b.ByName(t0.Add(40*time.Second), a.Name); !errors.Is(err, ErrUnknown) {
		t.Errorf("hidden: %v", err)
	}
	end := t0.Add(61 * time.Second)
	b.Tick(end)
	verify(t, b, end)
	if s := b.Stats(); s.Entries != 0 || s.Owners != 0 || s.Dropped != 1 || s.TableBytes != 0 {
		t.Errorf("after the grace: %+v", s)
	}
	// Late packets of that life, and of older ones, change nothing.
	receive(t, b, end, slices.Concat(ended.items, a.items)...)
	b.Member(end, id.Life{Node: alpha.Node, Incarnation: alpha.Incarnation - 1}, true)
	if got := shown(b, end); got != nil {
		t.Errorf("%v shows", got)
	}
	// Taken for dead all that time, it comes back.
	b.Member(end, alpha, true)
	receive(t, b, end, ended.items...)
	if got := shown(b, end); got != nil {
		t.Errorf("%v shows", got)
	}
	fresh := announce(t, l, end, publication(3, "r3", 16, true), time.Hour)
	receive(t, b, end, fresh.items...)
	if got := shown(b, end); !slices.Equal(got, []string{"alpha.1001/3@3"}) {
		t.Errorf("%v shows", got)
	}
	if out := b.Tick(end); !slices.Equal(out.Resync, []id.Life{alpha}) {
		t.Errorf("%+v", out)
	}
	if err := b.Sync(end, alpha, l.Live(end)); err != nil {
		t.Fatal(err)
	}
	verify(t, b, end)
	if got := shown(b, end); !slices.Equal(got, []string{"alpha.1001/1@1", "alpha.1001/3@3"}) {
		t.Errorf("%v shows", got)
	}
	if out := b.Tick(end.Add(time.Hour)); out.Resync != nil {
		t.Errorf("%+v", out)
	}
}

func TestByeEndsALife(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	a := announce(t, l, t0, publication(1, "r1", 16, true), time.Hour)
	receive(t, b, t0, a.items...)
	changed, cancel := b.Watch("r1")
	defer cancel()
	bye := l.Bye().Broadcast
	if out := receive(t, b, t0, bye...); len(out.Broadcast) != 1 || !woken(changed) {
		t.Errorf("farewell passed on: %v, woken: %v", out.Broadcast, woken(changed))
	}
	if out := receive(t, b, t0, bye...); out.Broadcast != nil {
		t.Error("farewell is passed on twice")
	}
	late := announce(t, l, t0, publication(2, "r2", 16, true), time.Hour)
	receive(t, b, t0, slices.Concat(a.items, late.items, l.Tick(t0).Broadcast)...)
	b.Member(t0, alpha, true)
	if got := shown(b, t0); got != nil {
		t.Errorf("%v shows", got)
	}
	if _, err := b.ByName(t0, a.Name); !errors.Is(err, ErrEnded) {
		t.Errorf("ByName: %v", err)
	}
	if _, err := b.Learn(t0, alpha, late.Full, "r2"); !errors.Is(err, ErrEnded) {
		t.Errorf("Learn: %v", err)
	}
	b.Member(t0, alpha, false)
	b.Tick(t0.Add(30 * time.Second))
	verify(t, b, t0)
	if s := b.Stats(); s.Owners != 0 {
		t.Errorf("%+v", s)
	}
}

func TestExpiry(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	a := announce(t, l, t0, publication(1, "r1", 16, true), 10*time.Second)
	receive(t, b, t0, a.items...)
	changed, cancel := b.Watch("r1")
	defer cancel()
	b.Tick(t0.Add(10*time.Second - ms))
	if got := b.ByRequest(t0.Add(10*time.Second-ms), "r1"); len(got) != 1 || woken(changed) {
		t.Errorf("before its end: %+v, woken %v", got, woken(changed))
	}
	end := t0.Add(10 * time.Second)
	if got := b.ByRequest(end, "r1"); got != nil {
		t.Errorf("after its end, before a tick: %+v", got)
	}
	b.Tick(end)
	if !woken(changed) {
		t.Error("nobody was woken when it expired")
	}
	// A replay brings nothing back, and its end is the owner's to say.
	receive(t, b, end, a.items...)
	if got := shown(b, end); got != nil || b.Stats().Entries != 1 || b.Stats().Expired != 1 {
		t.Errorf("%v shows, %+v", got, b.Stats())
	}
	if _, err := b.ByName(end, a.Name); !errors.Is(err, ErrUnknown) {
		t.Errorf("ByName: %v", err)
	}
	receive(t, b, end, l.Tick(end).Broadcast...)
	if out := b.Tick(end.Add(time.Second)); out.Resync != nil {
		t.Errorf("an expired entry is no mismatch: %+v", out)
	}
	// The owner has extended its hold.
	if err := l.Extend(1, end.Add(5*time.Second)); err != nil {
		t.Fatal(err)
	}
	again, cancel := b.Watch("r1")
	defer cancel()
	full, _, err := l.Find(end, 1, "r1")
	if err != nil {
		t.Fatal(err)
	}
	if e, err := b.Learn(end, alpha, full, "r1"); err != nil || e.Expires != end.Add(5*time.Second) || !woken(again) {
		t.Errorf("Learn = %+v, %v, woken %v", e, err, woken(again))
	}
	verify(t, b, end)
	if got := b.ByRequest(end, "r1"); len(got) != 1 {
		t.Errorf("%+v", got)
	}
	b.Tick(end.Add(5 * time.Second))
	verify(t, b, end.Add(5*time.Second))
	end = end.Add(6 * time.Second)
	// A hold that has run out on the way shows nowhere, but is known.
	late := announce(t, l, end, publication(2, "r2", 16, true), 0)
	receive(t, b, end, late.items...)
	if got := b.ByRequest(end, "r2"); got != nil {
		t.Errorf("%+v", got)
	}
	if e, err := b.Learn(end, alpha, late.Full, "r2"); err != nil || !e.HasTable {
		t.Errorf("Learn = %+v, %v", e, err)
	}
	receive(t, b, end, release(t, l, end, 1)...)
	receive(t, b, end, release(t, l, end, 2)...)
	if s := b.Stats(); s.Entries != 0 {
		t.Errorf("%+v", s)
	}
}

func TestGrowthIsOneEntry(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	var items [][]byte
	for i := range 4 {
		items = append(items, announce(t, l, t0, publication(1, "r1", 16*(i+1), i == 3), time.Minute).items...)
	}
	orders := [][]int{{0, 1, 2, 3}, {3, 2, 1, 0}, {1, 3, 0, 2}, {2, 0, 3, 1}, {0, 3}, {3}}
	for _, order := range orders {
		b := board(BoardOptions{})
		longest := 0
		for _, i := range order {
			changed, cancel := b.Watch("r1")
			receive(t, b, t0, items[i])
			longer := 16*(i+1) > longest
			longest = max(longest, 16*(i+1))
			got := b.ByRequest(t0, "r1")
			if len(got) != 1 || got[0].Publication.Streams[0].Tokens != longest || got[0].Name.Sequence != 1 {
				t.Errorf("order %v: after %d: %+v", order, i, got)
			}
			if woken(changed) != longer {
				t.Errorf("order %v: after %d: woken %v", order, i, woken(changed))
			}
			cancel()
			if e, err := b.ByName(t0, id.Publication{Owner: alpha, Sequence: 1}); err != nil || e.Sequence != got[0].Sequence {
				t.Errorf("ByName = %+v, %v", e, err)
			}
		}
	}
	// Whoever has missed all but the first is told of the end, too.
	b := board(BoardOptions{})
	receive(t, b, t0, items[0], release(t, l, t0, 1)[0], items[2], items[3], items[1])
	if got := shown(b, t0); got != nil {
		t.Errorf("%v shows", got)
	}
}

// TestContradiction: of two announcements of one publication that can't both be
// right, the first stays until the owner itself says which is.
func TestContradiction(t *testing.T) {
	base := publication(1, "r1", 32, false)
	for name, other := range map[string]manager.Publication{
		"another request":       publication(1, "r2", 48, false),
		"another content epoch": {ID: 1, Request: "r1", ContentEpoch: 8, Streams: base.Streams},
		"shorter":               publication(1, "r1", 31, false),
		"without a rank": {ID: 1, Request: "r1", ContentEpoch: 7, Streams: []manager.Stream{
			{Label: id.Main, Ranks: []id.Rank{0}, Tokens: 64, Pages: base.Streams[0].Pages},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			truth, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
			items := announce(t, truth, t0, base, time.Minute).items
			forged, err := toWire(other)
			if err != nil {
				t.Fatal(err)
			}
			forged.Publication, forged.Sequence, forged.TTLMillis = 1, 2, 1000
			receive(t, b, t0, items...)
			receive(t, b, t0, encode(t, wire.Batches{{
				Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Announcements: []wire.Announcement{forged}, Releases: []id.Sequence{1},
			}}))
			if got := b.ByRequest(t0, "r1"); len(got) != 1 || got[0].Publication.Streams[0].Tokens != 32 || b.Stats().Conflicts != 1 {
				t.Errorf("%+v, %+v", got, b.Stats())
			}
			announce(t, truth, t0, publication(1, "r1", 64, true), time.Minute)
			if out := b.Tick(t0.Add(time.Second)); !slices.Equal(out.Resync, []id.Life{alpha}) {
				t.Fatalf("%+v", out)
			}
			if err := b.Sync(t0, alpha, truth.Live(t0)); err != nil {
				t.Fatal(err)
			}
			verify(t, b, t0)
			if got := b.ByRequest(t0, "r1"); len(got) != 1 || got[0].Publication.Streams[0].Tokens != 64 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// digestOnly is the batch without its page lists.
func digestOnly(t testing.TB, full []byte) []byte {
	t.Helper()
	g := batch(t, full)
	g.Announcements[0].Lists = nil
	return encode(t, wire.Batches{g})
}

func TestLearnBringsTheTable(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	p := publication(1, "r1", 40, false)
	a := announce(t, l, t0, p, time.Minute)
	receive(t, b, t0, digestOnly(t, a.Full))
	e, err := b.ByName(t0, a.Name)
	if err != nil || e.HasTable || e.Publication.Streams[0].Pages != nil || e.Publication.Streams[0].Tokens != 40 {
		t.Fatalf("by digest: %+v, %v", e, err)
	}
	changed, cancel := b.Watch("r1")
	defer cancel()
	e, err = b.Learn(t0, alpha, a.Full, "r1")
	verify(t, b, t0)
	if err != nil || !e.HasTable || !slices.Equal(e.Publication.Streams[0].Pages, p.Streams[0].Pages) || e.Publication.Request != "r1" || !woken(changed) {
		t.Errorf("Learn = %+v, %v, woken %v", e, err, woken(changed))
	}
	quiet, cancel := b.Watch("r1")
	defer cancel()
	if _, err := b.Learn(t0, alpha, a.Full, "r1"); err != nil || woken(quiet) {
		t.Errorf("again: %v, woken %v", err, woken(quiet))
	}
	// It has grown, and that is known by digest only; a late answer still helps
	// whoever asked.
	grown := announce(t, l, t0, publication(1, "r1", 80, true), time.Minute)
	receive(t, b, t0, digestOnly(t, grown.Full))
	if e, err := b.Learn(t0, alpha, a.Full, "r1"); err != nil || !e.HasTable || e.Sequence != 1 || len(e.Publication.Streams[0].Pages) != 3 {
		t.Errorf("late answer: %+v, %v", e, err)
	}
	if e, err := b.ByName(t0, a.Name); err != nil || e.HasTable || e.Sequence != 2 || e.Publication.Request != "r1" {
		t.Errorf("board: %+v, %v", e, err)
	}
	if e, err := b.Learn(t0, alpha, grown.Full, "r1"); err != nil || !e.HasTable || e.Sequence != 2 {
		t.Errorf("%+v, %v", e, err)
	}
	if e, err := b.Learn(t0, alpha, a.Full, "r1"); err != nil || !e.HasTable || e.Sequence != 2 {
		t.Errorf("late answer, newer table known: %+v, %v", e, err)
	}
	receive(t, b, t0, release(t, l, t0, 1)...)
	if _, err := b.Learn(t0, alpha, grown.Full, "r1"); !errors.Is(err, ErrEnded) {
		t.Errorf("after its end: %v", err)
	}
	// Of an owner that is no member yet.
	other := NewLog(LogOptions{Life: gamma})
	if e, err := b.Learn(t0, gamma, announce(t, other, t0, p, time.Minute).Full, "r1"); err != nil || !e.HasTable || e.Name.Owner != gamma {
		t.Errorf("no member: %+v, %v", e, err)
	}
	if got := shown(b, t0); got != nil {
		t.Errorf("%v shows", got)
	}
}

func TestLearnRefuses(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	p := publication(1, "r1", 40, false)
	a := announce(t, l, t0, p, time.Minute)
	two := batch(t, a.Full)
	two.Announcements = append(two.Announcements, two.Announcements[0])
	moved := batch(t, a.Full)
	moved.Announcements[0].Lists = [][]page.Index{{9, 8, 7}}
	moved.Announcements[0].Digest = wire.Digest(moved.Announcements[0].Refs, moved.Announcements[0].Lists)
	older := id.Life{Node: alpha.Node, Incarnation: alpha.Incarnation - 1}
	for name, tt := range map[string]struct {
		owner   id.Life
		full    []byte
		request id.Request
		want    error
	}{
		"another request":     {alpha, a.Full, "r2", ErrConflict},
		"another owner":       {gamma, a.Full, "r1", ErrConflict},
		"another life":        {id.Life{Node: alpha.Node, Incarnation: 1002}, a.Full, "r1", ErrConflict},
		"this node":           {beta, announce(t, NewLog(LogOptions{Life: beta}), t0, p, time.Minute).Full, "r1", ErrConflict},
		"an older life":       {older, announce(t, NewLog(LogOptions{Life: older}), t0, p, time.Minute).Full, "r1", ErrEnded},
		"no table":            {alpha, digestOnly(t, a.Full), "r1", wire.ErrMessage},
		"two of them":         {alpha, encode(t, wire.Batches{two}), "r1", wire.ErrMessage},
		"two owners":          {alpha, encode(t, wire.Batches{batch(t, a.Full), batch(t, a.Full)}), "r1", wire.ErrMessage},
		"a checkpoint":        {alpha, l.Live(t0)[1], "r1", wire.ErrMessage},
		"junk":                {alpha, []byte("junk"), "r1", wire.ErrMessage},
		"a newer format":      {alpha, []byte{0x4B, 2, 1}, "r1", wire.ErrVersion},
		"other pages than it": {alpha, encode(t, wire.Batches{moved}), "r1", ErrConflict},
	} {
		t.Run(name, func(t *testing.T) {
			b := board(BoardOptions{})
			receive(t, b, t0, a.items...)
			before := b.List(t0, 0)
			if e, err := b.Learn(t0, tt.owner, tt.full, tt.request); !errors.Is(err, tt.want) {
				t.Errorf("Learn = %+v, %v, want %v", e, err, tt.want)
			}
			verify(t, b, t0)
			if after := b.List(t0, 0); !reflect.DeepEqual(before, after) {
				t.Errorf("%+v became %+v", before, after)
			}
		})
	}
}

func TestGapsAreAskedFor(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	var items [][]byte
	for i := range manager.PublicationID(10) {
		items = append(items, announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute).items...)
	}
	asked := func(at time.Duration) []id.Sequence {
		t.Helper()
		out := b.Tick(t0.Add(at))
		if len(out.Send) == 0 {
			return nil
		}
		n := decode(t, out.Send[0].Item).(*wire.Nack)
		if out.Send[0].To != alpha.Node || n.From != beta.Node.Hash() || n.Owner != alpha.Node.Hash() || n.Incarnation != alpha.Incarnation {
			t.Errorf("asked %+v of %q", n, out.Send[0].To)
		}
		return n.Missing
	}
	b.Tick(t0.Add(60 * ms))
	receive(t, b, t0.Add(70*ms), items[0], items[3], items[9])
	if got := asked(80 * ms); got != nil {
		t.Errorf("asked for %v at once", got)
	}
	if got := asked(120 * ms); got != nil {
		t.Errorf("asked for %v too early", got)
	}
	receive(t, b, t0.Add(150*ms), items[1])
	if got := asked(180 * ms); !slices.Equal(got, []id.Sequence{3, 5, 6, 7, 8, 9}) {
		t.Errorf("asked for %v", got)
	}
	// Not answered: ask again, but less and less often.
	var times []time.Duration
	for at := 180 * ms; at < 8*time.Second; at += 10 * ms {
		if got := asked(at); got != nil {
			times = append(times, at)
		}
	}
	for i := range times {
		last := 180 * ms
		if i > 0 {
			last = times[i-1]
		}
		if wait, least := times[i]-last, min(100*ms<<i, time.Second); wait < least || wait > least+60*ms {
			t.Errorf("asked after %v: %v, want %v", last, wait, least)
		}
	}
	if len(times) < 8 || len(times) > 12 {
		t.Errorf("asked at %v", times)
	}
	receive(t, b, t0.Add(8*time.Second), items...)
	if got := asked(10 * time.Second); got != nil {
		t.Errorf("asked for %v", got)
	}
}

func TestMuchMissingIsReadAtOnce(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{Window: 64})
	for i := range manager.PublicationID(500) {
		announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute)
		if i%2 == 0 {
			release(t, l, t0, i+1)
		}
	}
	receive(t, b, t0, l.Tick(t0).Broadcast...)
	b.Tick(t0.Add(60 * ms))
	out := b.Tick(t0.Add(120 * ms))
	if len(out.Send) != 1 || !slices.Equal(out.Resync, []id.Life{alpha}) {
		t.Fatalf("%+v", out)
	}
	if n := decode(t, out.Send[0].Item).(*wire.Nack); len(n.Missing) != wire.MaxMissing {
		t.Errorf("asked for %d", len(n.Missing))
	}
	for at := 130 * ms; at < 1100*ms; at += 10 * ms {
		if out := b.Tick(t0.Add(at)); out.Resync != nil {
			t.Fatalf("wished again after %v", at)
		}
	}
	if out := b.Tick(t0.Add(1180 * ms)); out.Resync == nil {
		t.Error("never wished again")
	}
	if err := b.Sync(t0, alpha, l.Live(t0)); err != nil {
		t.Fatal(err)
	}
	verify(t, b, t0)
	if got := b.Stats().Entries; got != 250 {
		t.Errorf("%d entries", got)
	}
	b.Tick(t0.Add(time.Hour))
	if out := b.Tick(t0.Add(2 * time.Hour)); out.Resync != nil || out.Send != nil {
		t.Errorf("asked again: %+v", out)
	}
}

// TestMissedRelease is found by the checkpoint's hash.
func TestMissedRelease(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	for i := range manager.PublicationID(5) {
		receive(t, b, t0, announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute).items...)
	}
	receive(t, b, t0, l.Tick(t0).Broadcast...)
	if out := b.Tick(t0.Add(time.Second)); out.Resync != nil || out.Send != nil {
		t.Fatalf("nothing was missed: %+v", out)
	}
	lost := release(t, l, t0, 3)
	check := l.Tick(t0.Add(time.Second)).Broadcast[0]
	// On its way still: no need to ask.
	receive(t, b, t0.Add(time.Second), check)
	if out := b.Tick(t0.Add(time.Second + 20*ms)); out.Resync != nil {
		t.Errorf("asked at once: %+v", out)
	}
	receive(t, b, t0.Add(time.Second+30*ms), lost...)
	if out := b.Tick(t0.Add(2 * time.Second)); out.Resync != nil {
		t.Errorf("it came: %+v", out)
	}
	// Lost for good, and another one came.
	release(t, l, t0, 2)
	late := release(t, l, t0, 4)
	receive(t, b, t0.Add(3*time.Second), append(late, l.Tick(t0.Add(3*time.Second)).Broadcast...)...)
	if out := b.Tick(t0.Add(3*time.Second + 50*ms)); !slices.Equal(out.Resync, []id.Life{alpha}) {
		t.Fatalf("%+v", out)
	}
	if err := b.Sync(t0.Add(4*time.Second), alpha, l.Live(t0.Add(4*time.Second))); err != nil {
		t.Fatal(err)
	}
	verify(t, b, t0)
	if got := shown(b, t0); !slices.Equal(got, []string{"alpha.1001/1@1", "alpha.1001/5@5"}) {
		t.Errorf("%v shows", got)
	}
}

// TestLateCheckpointsAreNoMismatch: under steady load a checkpoint is older than
// the releases beside it, which is no reason to read the whole log.
func TestLateCheckpointsAreNoMismatch(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	next := manager.PublicationID(1)
	round := func(at time.Time) []byte {
		t.Helper()
		for range 4 {
			receive(t, b, at, announce(t, l, at, publication(next, "r", 16, false), time.Minute).items...)
			next++
		}
		check := l.Tick(at).Broadcast[0]
		receive(t, b, at, release(t, l, at, next-2)...)
		return check
	}
	for i := range maxStrikes - 1 {
		at := t0.Add(time.Duration(i) * time.Second)
		receive(t, b, at, round(at))
		if out := b.Tick(at.Add(500 * ms)); out.Resync != nil {
			t.Fatalf("after %d late checkpoints: %+v", i+1, out)
		}
	}
	at := t0.Add(maxStrikes * time.Second)
	receive(t, b, at, round(at))
	if out := b.Tick(at.Add(500 * ms)); out.Resync == nil {
		t.Errorf("after %d late checkpoints nobody asks", maxStrikes)
	}
}

func TestSyncRefuses(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	for i := range manager.PublicationID(3) {
		announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute)
	}
	release(t, l, t0, 2)
	good := l.Live(t0)
	other := announce(t, NewLog(LogOptions{Life: gamma}), t0, publication(1, "r", 16, false), time.Minute).Full
	foreign := l.Check()
	foreign.Owner++
	under := batch(t, good[0])
	check := decode(t, good[2]).(*wire.Check)
	above := *check
	above.Floor, above.Live = 1, 1
	with := func(i int, item []byte) [][]byte {
		items := slices.Clone(good)
		items[i] = item
		return items
	}
	for name, tt := range map[string]struct {
		items [][]byte
		want  error
	}{
		"nothing":              {nil, wire.ErrMessage},
		"cut":                  {good[:2], wire.ErrMessage},
		"junk":                 {with(1, []byte("junk")), wire.ErrMessage},
		"junk at the end":      {with(2, []byte("junk")), wire.ErrMessage},
		"a digest":             {with(0, digestOnly(t, good[0])), wire.ErrMessage},
		"of another owner":     {with(0, other), ErrConflict},
		"checked by another":   {with(2, encode(t, &foreign)), ErrConflict},
		"under its floor":      {[][]byte{encode(t, wire.Batches{under}), encode(t, &above)}, wire.ErrMessage},
		"more than seal words": {append(slices.Repeat(good[:1], maxLive+1), good[2]), wire.ErrMessage},
	} {
		t.Run(name, func(t *testing.T) {
			b := board(BoardOptions{})
			if err := b.Sync(t0, alpha, tt.items); !errors.Is(err, tt.want) {
				t.Errorf("Sync = %v, want %v", err, tt.want)
			}
			if s := b.Stats(); s.Entries != 0 {
				t.Errorf("%+v", s)
			}
		})
	}
	b := board(BoardOptions{})
	b.Member(t0, id.Life{Node: alpha.Node, Incarnation: alpha.Incarnation + 1}, true)
	if err := b.Sync(t0, alpha, good); !errors.Is(err, ErrEnded) {
		t.Errorf("of an old life: %v", err)
	}
}

// TestStaleSync: a snapshot that was long on its way brings nothing back.
func TestStaleSync(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	var items [][]byte
	for i := range manager.PublicationID(4) {
		items = append(items, announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute).items...)
	}
	stale := l.Live(t0)
	receive(t, b, t0, items...)
	receive(t, b, t0, release(t, l, t0, 2)...)
	receive(t, b, t0, announce(t, l, t0, publication(3, "r", 32, true), time.Minute).items...)
	receive(t, b, t0, announce(t, l, t0, publication(9, "r", 32, true), time.Minute).items...)
	want := []string{"alpha.1001/1@1", "alpha.1001/4@4", "alpha.1001/3@5", "alpha.1001/6@6"}
	if err := b.Sync(t0, alpha, stale); err != nil {
		t.Fatal(err)
	}
	verify(t, b, t0)
	if got := shown(b, t0); !slices.Equal(got, want) {
		t.Errorf("%v shows, want %v", got, want)
	}
}

func TestPushPull(t *testing.T) {
	l, g := NewLog(LogOptions{Life: alpha}), NewLog(LogOptions{Life: gamma})
	a, b := board(BoardOptions{}), board(BoardOptions{Life: gamma})
	for i := range manager.PublicationID(3) {
		announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute)
	}
	receive(t, b, t0, l.Tick(t0).Broadcast...)
	announce(t, g, t0, publication(1, "r", 16, false), time.Minute)
	g.Tick(t0)
	state := b.State(g.Check())
	checks, err := wire.DecodeChecks(state)
	if err != nil || len(checks) != 2 || checks[0] != g.Check() || checks[1] != l.Check() {
		t.Fatalf("State = %+v, %v", checks, err)
	}
	a.Member(t0, gamma, true)
	if out, err := a.Merge(t0, state); err != nil || out.Broadcast != nil {
		t.Fatalf("Merge = %+v, %v", out, err)
	}
	verify(t, a, t0)
	a.Tick(t0.Add(60 * ms))
	out := a.Tick(t0.Add(120 * ms))
	asked := map[id.Node]int{}
	for _, d := range out.Send {
		asked[d.To] += len(decode(t, d.Item).(*wire.Nack).Missing)
	}
	if !reflect.DeepEqual(asked, map[id.Node]int{"alpha": 3, "gamma": 1}) {
		t.Errorf("asked for %v", asked)
	}
	// What comes by gossip after that is no news.
	check := l.Check()
	if out := receive(t, a, t0, encode(t, &check)); out.Broadcast != nil {
		t.Error("a checkpoint that is known is passed on")
	}
	// Owners that are down, and those that said nothing, are not spoken of.
	b.Member(t0, alpha, false)
	if checks, err := wire.DecodeChecks(b.State(g.Check())); err != nil || len(checks) != 1 {
		t.Errorf("State = %+v, %v", checks, err)
	}
	for _, junk := range [][]byte{nil, []byte("junk"), encode(t, &check), state[:len(state)-1]} {
		if _, err := a.Merge(t0, junk); err == nil {
			t.Errorf("merged %x", junk)
		}
	}
	if a.Stats().Malformed != 4 {
		t.Errorf("%+v", a.Stats())
	}
}

func TestANewerLifeOfThisNodeIsReported(t *testing.T) {
	b := board(BoardOptions{})
	for name, tt := range map[string]struct {
		i    id.Incarnation
		want id.Incarnation
	}{
		"older": {i: beta.Incarnation - 1},
		"this":  {i: beta.Incarnation},
		"newer": {i: beta.Incarnation + 1, want: beta.Incarnation + 1},
	} {
		life := id.Life{Node: beta.Node, Incarnation: tt.i}
		l := NewLog(LogOptions{Life: life})
		item := announce(t, l, t0, publication(1, "r1", 16, true), time.Minute).items[0]
		check := l.Check()
		merged, err := b.Merge(t0, wire.EncodeChecks([]wire.Check{check}))
		if err != nil {
			t.Fatal(err)
		}
		for by, out := range map[string]Output{
			"batch":      receive(t, b, t0, item),
			"checkpoint": receive(t, b, t0, encode(t, &check)),
			"push/pull":  merged,
			"member":     b.Member(t0, life, true),
		} {
			if out.Newer != tt.want || out.Broadcast != nil {
				t.Errorf("%s by %s: %+v", name, by, out)
			}
		}
	}
	receive(t, b, t0, NewLog(LogOptions{Life: beta}).Bye().Broadcast...)
	if s := b.Stats(); s.Entries != 0 || s.Owners != 1 {
		t.Errorf("%+v", s)
	}
}

func TestNacksForThisLogAreReturned(t *testing.T) {
	b := board(BoardOptions{})
	n := wire.Nack{From: alpha.Node.Hash(), Owner: beta.Node.Hash(), Incarnation: beta.Incarnation, Missing: []id.Sequence{4, 5}}
	out, got, err := b.Receive(t0, encode(t, &n))
	n.Asker = alpha.Node
	if err != nil || got == nil || !reflect.DeepEqual(got, &n) || out.Broadcast != nil {
		t.Errorf("Receive = %+v, %+v, %v", out, got, err)
	}
	for name, n := range map[string]wire.Nack{
		"another owner": {From: alpha.Node.Hash(), Owner: gamma.Node.Hash(), Incarnation: beta.Incarnation, Missing: []id.Sequence{4}},
		"another life":  {From: alpha.Node.Hash(), Owner: beta.Node.Hash(), Incarnation: 1, Missing: []id.Sequence{4}},
		"a stranger":    {From: gamma.Node.Hash(), Owner: beta.Node.Hash(), Incarnation: beta.Incarnation, Missing: []id.Sequence{4}},
	} {
		if out, got, err := b.Receive(t0, encode(t, &n)); got != nil || err != nil || out.Broadcast != nil {
			t.Errorf("%s: %+v, %+v, %v", name, out, got, err)
		}
	}
}

func TestReceiveCountsWhatItDrops(t *testing.T) {
	b := board(BoardOptions{})
	long := announce(t, NewLog(LogOptions{Life: alpha}), t0, publication(1, "r1", 16, true), time.Minute).Full
	for _, tt := range []struct {
		item []byte
		want error
	}{
		{nil, wire.ErrMessage},
		{[]byte("junk"), wire.ErrMessage},
		{bytes.Repeat(long, 20), wire.ErrMessage},
		{append(slices.Clone(long), 0), wire.ErrMessage},
		{[]byte{0x4B, 9, 1}, wire.ErrVersion},
		{wire.EncodeChecks(nil), wire.ErrVersion},
	} {
		if _, _, err := b.Receive(t0, tt.item); !errors.Is(err, tt.want) {
			t.Errorf("%.20x: %v, want %v", tt.item, err, tt.want)
		}
	}
	if s := b.Stats(); s.Items != 6 || s.Malformed != 4 || s.Unknown != 2 {
		t.Errorf("%+v", s)
	}
}

func TestHashCollisionsAreRefused(t *testing.T) {
	b := board(BoardOptions{})
	// No two names with one hash are known: the board is told of one.
	b.views[alpha.Node.Hash()].node = "other"
	b.Member(t0, alpha, false)
	if b.views[alpha.Node.Hash()].presence != up {
		t.Error("another node's death hides this one")
	}
	if _, err := b.Learn(t0, alpha, announce(t, NewLog(LogOptions{Life: alpha}), t0, publication(1, "r1", 16, true), time.Minute).Full, "r1"); !errors.Is(err, ErrConflict) {
		t.Errorf("Learn: %v", err)
	}
	b.hash = gamma.Node.Hash()
	b.Member(t0, gamma, true)
	if s := b.Stats(); s.Collisions != 3 || s.Owners != 1 {
		t.Errorf("%+v", s)
	}
}

func TestByRequestOrder(t *testing.T) {
	a, g := NewLog(LogOptions{Life: alpha}), NewLog(LogOptions{Life: gamma})
	b := board(BoardOptions{})
	b.Member(t0, gamma, true)
	one := announce(t, a, t0, publication(1, "r1", 16, true), time.Minute)
	two := announce(t, a, t0, publication(2, "r1", 16, true), time.Minute)
	three := announce(t, g, t0, publication(1, "r1", 16, true), time.Minute)
	receive(t, b, t0, two.items...)
	receive(t, b, t0.Add(ms), three.items...)
	receive(t, b, t0.Add(2*ms), one.items...) // late, but of alpha
	var got []id.Publication
	for _, e := range b.ByRequest(t0, "r1") {
		got = append(got, e.Name)
	}
	if want := []id.Publication{two.Name, one.Name, three.Name}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got := b.List(t0, 2); len(got) != 2 || got[0].Name != one.Name {
		t.Errorf("List = %+v", got)
	}
}

func TestByNameOfNothing(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	for i := range manager.PublicationID(3) {
		receive(t, b, t0, announce(t, l, t0, publication(i+1, "r", 16, false), time.Minute).items...)
	}
	receive(t, b, t0, release(t, l, t0, 1)...)
	receive(t, b, t0, release(t, l, t0, 3)...)
	receive(t, b, t0, announce(t, l, t0, publication(2, "r", 20, false), time.Minute).items...)
	for name, tt := range map[string]struct {
		p    id.Publication
		want error
	}{
		"under the floor":  {id.Publication{Owner: alpha, Sequence: 1}, ErrEnded},
		"released":         {id.Publication{Owner: alpha, Sequence: 3}, ErrEnded},
		"a step":           {id.Publication{Owner: alpha, Sequence: 4}, ErrUnknown},
		"not heard of yet": {id.Publication{Owner: alpha, Sequence: 5}, ErrUnknown},
		"older life":       {id.Publication{Owner: id.Life{Node: "alpha", Incarnation: 1}, Sequence: 2}, ErrEnded},
		"newer life":       {id.Publication{Owner: id.Life{Node: "alpha", Incarnation: 9999}, Sequence: 2}, ErrUnknown},
		"unknown node":     {id.Publication{Owner: gamma, Sequence: 1}, ErrUnknown},
	} {
		if e, err := b.ByName(t0, tt.p); !errors.Is(err, tt.want) {
			t.Errorf("%s: %+v, %v, want %v", name, e, err, tt.want)
		}
	}
	b.Member(t0, alpha, false)
	b.Tick(t0.Add(time.Minute))
	if _, err := b.ByName(t0, id.Publication{Owner: id.Life{Node: "alpha", Incarnation: 1}, Sequence: 2}); !errors.Is(err, ErrEnded) {
		t.Errorf("older life than a dropped one: %v", err)
	}
}

func TestForget(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	a := announce(t, l, t0, publication(1, "r1", 16, false), time.Minute)
	receive(t, b, t0, a.items...)
	changed, cancel := b.Watch("r1")
	defer cancel()
	b.Forget(id.Publication{Owner: gamma, Sequence: 1})
	b.Forget(id.Publication{Owner: id.Life{Node: "alpha", Incarnation: 1}, Sequence: 1})
	b.Forget(id.Publication{Owner: alpha, Sequence: 2})
	if woken(changed) || len(shown(b, t0)) != 1 {
		t.Error("another publication was forgotten")
	}
	b.Forget(a.Name)
	verify(t, b, t0)
	receive(t, b, t0, a.items...)
	if _, err := b.ByName(t0, a.Name); !errors.Is(err, ErrEnded) || !woken(changed) || shown(b, t0) != nil {
		t.Errorf("forgotten: %v, woken %v, %v shows", err, woken(changed), shown(b, t0))
	}
}

// TestWatch: a watch is closed by a change to its request and by no other.
func TestWatch(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	mine, cancelMine := b.Watch("r1")
	too, cancelToo := b.Watch("r1")
	other, cancelOther := b.Watch("r2")
	a := announce(t, l, t0, publication(1, "r1", 16, true), time.Minute)
	receive(t, b, t0, a.items...)
	if !woken(mine) || !woken(too) || woken(other) {
		t.Errorf("woken %v, %v, other %v", woken(mine), woken(too), woken(other))
	}
	again, cancelAgain := b.Watch("r1")
	receive(t, b, t0, a.items...)
	b.Member(t0, alpha, true)
	b.Tick(t0.Add(time.Second))
	if woken(again) {
		t.Error("woken by nothing")
	}
	cancelMine() // was woken: the newer watch stays
	cancelMine()
	if s := b.Stats(); s.Watched != 2 {
		t.Errorf("%+v", s)
	}
	receive(t, b, t0, release(t, l, t0, 1)...)
	if !woken(again) {
		t.Error("not woken by its end")
	}
	cancelToo()
	cancelAgain()
	cancelOther()
	cancelOther()
	if s := b.Stats(); s.Watched != 0 {
		t.Errorf("%d watches are left", s.Watched)
	}
	first, cancelFirst := b.Watch("r3")
	_, cancelSecond := b.Watch("r3")
	cancelSecond()
	receive(t, b, t0, announce(t, l, t0, publication(3, "r3", 16, true), time.Minute).items...)
	if !woken(first) {
		t.Error("one waiter's cancel has taken the other's watch")
	}
	cancelFirst()
}

func TestWatchesAreBounded(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	var cancels []func()
	for i := range maxWatched {
		_, cancel := b.Watch(id.Request(fmt.Sprint(i)))
		cancels = append(cancels, cancel)
	}
	one, cancelOne := b.Watch("one too many")
	two, cancelTwo := b.Watch("two too many")
	if s := b.Stats(); s.Watched != maxWatched+1 {
		t.Errorf("%d watches", s.Watched)
	}
	receive(t, b, t0, announce(t, l, t0, publication(1, "two too many", 16, true), time.Minute).items...)
	if !woken(one) || !woken(two) {
		t.Error("not woken")
	}
	cancelOne()
	cancelTwo()
	_, cancelThree := b.Watch("one too many")
	cancelThree()
	for _, cancel := range cancels {
		cancel()
	}
	if s := b.Stats(); s.Watched != 0 {
		t.Errorf("%d watches are left", s.Watched)
	}
}

func TestEntriesAreBounded(t *testing.T) {
	b := board(BoardOptions{Entries: 100})
	b.Member(t0, gamma, true)
	a, g := NewLog(LogOptions{Life: alpha}), NewLog(LogOptions{Life: gamma})
	for i := range manager.PublicationID(150) {
		receive(t, b, t0, announce(t, a, t0, publication(i+1, "r", 16, true), time.Minute).items...)
	}
	if s := b.Stats(); s.Entries != 100 || s.Refused != 50 {
		t.Fatalf("%+v", s)
	}
	// The one with less takes from the one with more.
	for i := range manager.PublicationID(80) {
		receive(t, b, t0, announce(t, g, t0, publication(i+1, "r", 16, true), time.Minute).items...)
	}
	share := map[id.Life]int{}
	for _, e := range b.List(t0, 0) {
		share[e.Name.Owner]++
	}
	if share[alpha] != 50 || share[gamma] != 50 {
		t.Errorf("%v", share)
	}
	// Nobody is asked for what there's no room for; once there is, all comes back.
	receive(t, b, t0, slices.Concat(a.Tick(t0).Broadcast, g.Tick(t0).Broadcast)...)
	b.Tick(t0.Add(60 * ms))
	if out := b.Tick(t0.Add(120 * ms)); out.Send != nil || out.Resync != nil {
		t.Errorf("%d nacks, %d resyncs", len(out.Send), len(out.Resync))
	}
	for i := range manager.PublicationID(140) {
		receive(t, b, t0, release(t, a, t0, i+1)...)
	}
	for i := range 20 {
		at := t0.Add(time.Duration(i) * time.Second)
		out := b.Tick(at)
		for _, d := range out.Send {
			n := decode(t, d.Item).(*wire.Nack)
			l := a
			if d.To == gamma.Node {
				l = g
			}
			for _, answer := range l.Nack(t0, n).Send {
				receive(t, b, t0, answer.Item)
			}
		}
	}
	if s := b.Stats(); s.Entries != 90 {
		t.Errorf("%+v", s)
	}
}

// TestWindowIsBounded: an owner of which every second announcement is lost
// costs a bounded memory, and is repaired.
func TestWindowIsBounded(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{Window: 16})
	for i := range manager.PublicationID(200) {
		items := announce(t, l, t0, publication(i+1, "r", 16, true), time.Minute).items
		if i%2 == 1 {
			receive(t, b, t0, items...)
		}
	}
	if s := b.Stats(); s.Gaps == 0 || s.Entries != 16 {
		t.Errorf("%+v", s)
	}
	b.Tick(t0.Add(60 * ms))
	out := b.Tick(t0.Add(120 * ms))
	if !slices.Equal(out.Resync, []id.Life{alpha}) || len(out.Send) != 1 {
		t.Fatalf("%+v", out)
	}
	if err := b.Sync(t0, alpha, l.Live(t0)); err != nil {
		t.Fatal(err)
	}
	verify(t, b, t0)
	if s := b.Stats(); s.Entries != 200 {
		t.Errorf("%+v", s)
	}
}

// TestRefusedStepEndsNothing: the release beside an announcement that found no
// room says nothing of the publication's end, now or later, in whatever order
// the steps come.
func TestRefusedStepEndsNothing(t *testing.T) {
	item := func(name, sequence id.Sequence, tokens int, releases ...id.Sequence) []byte {
		a, err := toWire(publication(manager.PublicationID(name), id.Request(fmt.Sprint("r", name)), tokens, false))
		if err != nil {
			t.Fatal(err)
		}
		a.Publication, a.Sequence, a.TTLMillis = name, sequence, 60_000
		return encode(t, wire.Batches{{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Announcements: []wire.Announcement{a}, Releases: releases}})
	}
	grown := [][]byte{item(3, 11, 32, 3), item(3, 13, 48, 11), item(3, 15, 64, 3, 11, 13)}
	for _, order := range [][]int{{0, 1}, {1, 0}, {1, 1, 0}, {1, 2, 0}, {2, 1, 0}, {2, 0, 1}, {1, 0, 2}} {
		b := board(BoardOptions{Window: 4})
		receive(t, b, t0, item(3, 3, 16), item(5, 5, 16), item(7, 7, 16), item(10, 10, 16)) // the window is full
		for _, i := range order {
			receive(t, b, t0, grown[i])
			if _, err := b.ByName(t0, id.Publication{Owner: alpha, Sequence: 3}); err != nil {
				t.Errorf("order %v: after %d: %v", order, i, err)
			}
		}
		// The end is one all the same: it releases all steps.
		receive(t, b, t0, encode(t, wire.Batches{{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Releases: []id.Sequence{3, 11, 13, 15}}}))
		if _, err := b.ByName(t0, id.Publication{Owner: alpha, Sequence: 3}); !errors.Is(err, ErrEnded) {
			t.Errorf("order %v: after the end: %v", order, err)
		}
	}
}

// TestReleaseInDoubtCounts: what was released of a life that was dropped and is
// back is not made live by a snapshot from before, though the window is full.
func TestReleaseInDoubtCounts(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{Window: 4})
	for i := range manager.PublicationID(18) {
		receive(t, b, t0, announce(t, l, t0, publication(i+1, "r", 16, false), time.Hour).items...)
	}
	before := l.Live(t0)
	b.Member(t0, alpha, false)
	later := t0.Add(time.Minute)
	b.Tick(later) // dropped
	b.Member(later, alpha, true)
	for _, p := range []manager.PublicationID{7, 9, 14, 18} { // the last one makes no range more
		receive(t, b, later, release(t, l, later, p)...)
	}
	if err := b.Sync(later, alpha, before); err != nil {
		t.Fatal(err)
	}
	verify(t, b, later)
	got := shown(b, later)
	if len(got) != 14 {
		t.Errorf("%d show: %v", len(got), got)
	}
	for _, ended := range []string{"/7@7", "/9@9", "/14@14", "/18@18"} {
		if slices.ContainsFunc(got, func(name string) bool { return strings.HasSuffix(name, ended) }) {
			t.Errorf("%s is back", ended)
		}
	}
}

func TestTablesAreBounded(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{Tables: 10 * 4 * pageBytes}) // ten of four pages
	var all []announcement
	for i := range manager.PublicationID(15) {
		all = append(all, announce(t, l, t0, publication(i+1, "r", 64, true), time.Minute))
		receive(t, b, t0, all[i].items...)
	}
	early, err := b.ByName(t0, all[0].Name)
	if err != nil || early.HasTable || early.Publication.Streams[0].Pages != nil || early.Publication.Streams[0].Tokens != 64 {
		t.Errorf("the oldest: %+v, %v", early, err)
	}
	if e, err := b.ByName(t0, all[14].Name); err != nil || !e.HasTable {
		t.Errorf("the newest: %+v, %v", e, err)
	}
	if s := b.Stats(); s.NoTable != 5 || s.TableBytes != 10*4*pageBytes || s.Entries != 15 {
		t.Errorf("%+v", s)
	}
	// One that never fits is of use to whoever asked for it.
	big := announce(t, l, t0, publication(99, "big", 16*100, true), time.Minute)
	if e, err := b.Learn(t0, alpha, big.Full, "big"); err != nil || !e.HasTable || len(e.Publication.Streams[0].Pages) != 100 || e.Publication.Request != "big" {
		t.Errorf("Learn = %+v, %v", e, err)
	}
	verify(t, b, t0)
}

func TestPastIsBounded(t *testing.T) {
	b := NewBoard(BoardOptions{Life: beta})
	for i := range maxPast + 100 {
		at := t0.Add(time.Duration(i) * ms)
		b.Member(at, id.Life{Node: id.Node(fmt.Sprintf("n-%d", i)), Incarnation: 5}, false)
	}
	verify(t, b, t0)
	if len(b.past) != maxPast {
		t.Errorf("%d lives are remembered", len(b.past))
	}
	// The newest are.
	b.Member(t0, id.Life{Node: id.Node(fmt.Sprintf("n-%d", maxPast+99)), Incarnation: 4}, true)
	if s := b.Stats(); s.Owners != 0 || s.Old != 1 {
		t.Errorf("%+v", s)
	}
	b.Tick(t0.Add(11 * time.Minute))
	if len(b.past) != 0 {
		t.Errorf("%d lives are remembered after ten minutes", len(b.past))
	}
}

// TestSequencesAtTheirEnd: an owner's numbers may be as great as they like.
func TestSequencesAtTheirEnd(t *testing.T) {
	const last = id.Sequence(1<<64 - 1)
	refs := []wire.Ref{{Label: id.Main, RankMask: 1, Tokens: 16}}
	entry := func(s id.Sequence) wire.Announcement {
		return wire.Announcement{Sequence: s, Publication: s, TTLMillis: 1000, Refs: refs}
	}
	says := func(floor id.Sequence, releases []id.Sequence, announced ...wire.Announcement) []byte {
		return encode(t, wire.Batches{{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Floor: floor, Announcements: announced, Releases: releases}})
	}
	checks := func(version uint64, floor, most id.Sequence, live uint32) []byte {
		return encode(t, &wire.Check{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Floor: floor, Max: most, Live: live, Version: version})
	}
	b := board(BoardOptions{})
	for i, item := range [][]byte{
		checks(1, 0, last, 0),
		says(last-4, nil, entry(last-3), entry(last)),
		checks(2, last-4, last-1, 1),
		says(last-4, []id.Sequence{last - 2, last - 1}),
		checks(3, last-4, last-1, 1),
		checks(4, last-4, last-2, 1),
		says(last-3, []id.Sequence{last}),
		says(last-1, nil, entry(last)),
		says(last, nil),
		checks(1<<64-1, last, last, 0),
	} {
		at := t0.Add(time.Duration(i) * time.Second)
		receive(t, b, at, item)
		for _, d := range b.Tick(at.Add(500 * ms)).Send {
			decode(t, d.Item)
		}
	}
	if s := b.Stats(); s.Entries != 0 || s.News != 2 {
		t.Errorf("%+v", s)
	}
}

func TestFastIsTenTimesAsFast(t *testing.T) {
	b := board(BoardOptions{Fast: true})
	stranger := NewLog(LogOptions{Life: gamma})
	receive(t, b, t0, announce(t, stranger, t0, publication(1, "r1", 16, true), time.Hour).items...)
	owners := func(at time.Duration) int {
		b.Tick(t0.Add(at))
		return b.Stats().Owners
	}
	if before, after := owners(199*ms), owners(200*ms); before != 2 || after != 1 {
		t.Errorf("items wait otherwise than 200 ms: %d, %d owners", before, after)
	}
	b.Member(t0, alpha, false)
	if before, after := owners(3*time.Second-ms), owners(3*time.Second); before != 1 || after != 0 {
		t.Errorf("the grace is otherwise than 3 s: %d, %d owners", before, after)
	}
}

// TestConcurrentUse is for the race detector, and for waiters: each of them is
// woken, since somebody else makes the change that it waits for.
func TestConcurrentUse(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	const requests = 200
	name := func(i int) id.Request { return id.Request(fmt.Sprintf("r-%d", i)) }
	var work sync.WaitGroup
	for reader := range 4 {
		work.Go(func() {
			for i := reader; i < requests; i += 4 {
				for {
					changed, cancel := b.Watch(name(i))
					if len(b.ByRequest(t0, name(i))) > 0 {
						cancel()
						break
					}
					<-changed
					cancel()
				}
				b.Forget(id.Publication{Owner: alpha, Sequence: id.Sequence(i + 1)})
			}
		})
	}
	work.Go(func() {
		for i := range requests {
			b.Tick(t0)
			b.List(t0, 10)
			b.State(l.Check())
			l.Tick(t0.Add(time.Duration(i) * time.Second))
			_, _, _ = l.Find(t0, id.Sequence(i+1), name(i))
			_, _ = b.ByName(t0, id.Publication{Owner: alpha, Sequence: id.Sequence(i + 1)})
		}
	})
	work.Go(func() {
		for i := range requests {
			p := publication(manager.PublicationID(i+1), name(i), 16, true)
			if _, _, _, err := l.Reserve(p.ID); err != nil {
				t.Error(err)
			}
			a, err := l.Announce(t0, p, time.Hour)
			if err != nil {
				t.Error(err)
			}
			items := outgoingOf(l, t0)
			if i%2 == 0 {
				_, err = b.Learn(t0, alpha, a.Full, name(i))
			} else {
				_, _, err = b.Receive(t0, items[0])
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
	work.Wait()
	verify(t, b, t0)
	if s := b.Stats(); s.Watched != 0 || s.Entries != 0 {
		t.Errorf("%+v", s)
	}
}
