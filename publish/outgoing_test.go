package publish

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// begin announces without gossiping.
func begin(t testing.TB, l *Log, now time.Time, p manager.Publication) Announced {
	t.Helper()
	if _, _, _, err := l.Reserve(p.ID); err != nil {
		t.Fatal(err)
	}
	a, err := l.Announce(now, p, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func end(t testing.TB, l *Log, now time.Time, p manager.PublicationID) {
	t.Helper()
	if err := l.Release(now, p); err != nil {
		t.Fatal(err)
	}
}

// saidBy is what items announce and release, in order.
func saidBy(t testing.TB, items [][]byte) (announced, released []id.Sequence) {
	t.Helper()
	for _, item := range items {
		b := batch(t, item)
		for _, a := range b.Announcements {
			announced = append(announced, a.Sequence)
		}
		released = append(released, b.Releases...)
	}
	return announced, released
}

// TestOutgoingIsPacked: what waits together shares items, the oldest first, and
// is handed over once.
func TestOutgoingIsPacked(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	var want []id.Sequence
	for i := range manager.PublicationID(200) {
		p := publication(i+1, "r", 1024, true)
		if a := begin(t, l, t0.Add(time.Duration(i)*ms), p); !l.Waits(a.Sequence) {
			t.Fatalf("%d is not outgoing", a.Sequence)
		}
		want = append(want, id.Sequence(i+1))
	}
	if n, oldest := l.Backlog(); n != 200 || !oldest.Equal(t0) {
		t.Errorf("backlog %d since %v", n, oldest)
	}
	items := outgoingOf(l, t0)
	announced, released := saidBy(t, items)
	if !slices.Equal(announced, want) || released != nil {
		t.Errorf("announced %v, released %v", announced, released)
	}
	bytes := 0
	for _, item := range items {
		bytes += len(item)
		if len(item) > wire.ItemBytes {
			t.Errorf("item has %d bytes", len(item))
		}
	}
	t.Logf("%d bytes an announcement of 1k tokens", bytes/200)
	if bytes/200 > 70 {
		t.Errorf("%d bytes an announcement", bytes/200)
	}
	if n, oldest := l.Backlog(); n != 0 || !oldest.IsZero() || l.Waits(200) || outgoingOf(l, t0) != nil {
		t.Errorf("backlog %d since %v after that", n, oldest)
	}
	if s := l.Stats(); s.Announced != 200 || s.Items != uint64(len(items)) || s.ItemBytes != uint64(bytes) || s.Overtaken != 0 || s.Shortened != 0 {
		t.Errorf("%+v", s)
	}
}

// TestOutgoingKeepsToItsRoom: it never hands over more bytes than there is room
// for, and what does not fit waits.
func TestOutgoingKeepsToItsRoom(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	for i := range manager.PublicationID(100) {
		begin(t, l, t0, publication(i+1, "r", 1024, true))
	}
	for i := range manager.PublicationID(10) { // the first one keeps the floor down
		end(t, l, t0, i*10+2)
	}
	announced, released := []id.Sequence(nil), []id.Sequence(nil)
	for room := 0; ; room++ {
		items := l.Outgoing(t0, room)
		bytes := 0
		for _, item := range items {
			bytes += len(item)
		}
		if bytes > room {
			t.Fatalf("%d bytes for %d", bytes, room)
		}
		a, r := saidBy(t, items)
		announced, released = append(announced, a...), append(released, r...)
		if n, _ := l.Backlog(); n == 0 {
			break
		}
		if room > 5000 {
			t.Fatal("it never ends")
		}
	}
	if len(announced) != 90 || len(released) != 10 {
		t.Errorf("announced %v, released %v", announced, released)
	}
	if out := l.Outgoing(t0, -5); out != nil {
		t.Errorf("%d items for less than nothing", len(out))
	}
}

// TestAnnouncementAndEndAnnihilate: what has ended before it was gossiped is
// never announced; a byte says that it has ended, or the floor does.
func TestAnnouncementAndEndAnnihilate(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	begin(t, l, t0, publication(1, "keeps the floor", 16, false))
	if announced, _ := saidBy(t, outgoingOf(l, t0)); !slices.Equal(announced, []id.Sequence{1}) {
		t.Fatalf("announced %v", announced)
	}
	for i := range manager.PublicationID(1000) {
		begin(t, l, t0, publication(i+2, "r", 1024, false))
		begin(t, l, t0, publication(i+2, "r", 2048, true))
		end(t, l, t0, i+2)
	}
	if n, _ := l.Backlog(); n != 2000 {
		t.Errorf("backlog %d", n)
	}
	items := outgoingOf(l, t0)
	announced, released := saidBy(t, items)
	if announced != nil || len(released) != 2000 || len(items) > 2 {
		t.Errorf("%d announced, %d released in %d items", len(announced), len(released), len(items))
	}
	begin(t, l, t0, publication(5000, "r", 16, true))
	end(t, l, t0, 5000)
	end(t, l, t0, 1) // now the floor says it all
	if n, oldest := l.Backlog(); n != 1 || !oldest.Equal(t0) {
		t.Errorf("backlog %d since %v", n, oldest)
	}
	items = outgoingOf(l, t0)
	if b := batch(t, items[0]); len(items) != 1 || b.Floor != 2002 || len(b.Releases) != 0 || len(b.Announcements) != 0 {
		t.Errorf("%d items, the first says %+v", len(items), b)
	}
	if s := l.Stats(); s.Overtaken != 2001 || s.Released != 1002 || s.Announced != 2002 {
		t.Errorf("%+v", s)
	}
	// A reservation that is given back is a gap otherwise.
	begin(t, l, t0, publication(6000, "r", 16, true))
	if _, _, _, err := l.Reserve(6001); err != nil {
		t.Fatal(err)
	}
	end(t, l, t0, 6001)
	if announced, released := saidBy(t, outgoingOf(l, t0)); !slices.Equal(announced, []id.Sequence{2003}) || !slices.Equal(released, []id.Sequence{2004}) {
		t.Errorf("announced %v, released %v", announced, released)
	}
}

// TestGrowthOvertakes: of a publication that grows while it waits the newest
// announcement goes out, with the steps that it takes the place of.
func TestGrowthOvertakes(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	receive(t, b, t0, announce(t, l, t0, publication(1, "r1", 16, false), time.Minute).items...)
	for i := range 20 {
		begin(t, l, t0, publication(1, "r1", 32+i, false))
		begin(t, l, t0, publication(2, "r2", 32+i, false))
	}
	items := outgoingOf(l, t0)
	announced, released := saidBy(t, items)
	slices.Sort(announced)
	if !slices.Equal(announced, []id.Sequence{40, 41}) || len(released) != 39 || len(items) != 1 {
		t.Errorf("announced %v, released %v in %d items", announced, released, len(items))
	}
	receive(t, b, t0, items...)
	if got := shown(b, t0); !slices.Equal(got, []string{"alpha.1001/1@40", "alpha.1001/3@41"}) {
		t.Errorf("%v shows", got)
	}
	b.Tick(t0.Add(60 * ms))
	if out := b.Tick(t0.Add(120 * ms)); out.Send != nil {
		t.Error("something is missing")
	}
	// With too many steps for one item the rest is asked for.
	for i := range maxSteps {
		begin(t, l, t0, publication(3, "r3", 16*1000+i, false))
		for range 70 {
			p := manager.PublicationID(1000 + l.Stats().Announced)
			begin(t, l, t0, publication(p, "x", 16, true))
			end(t, l, t0, p)
		}
	}
	for _, item := range outgoingOf(l, t0) {
		if len(item) > wire.ItemBytes {
			t.Errorf("item has %d bytes", len(item))
		}
		receive(t, b, t0, item)
	}
	if got := b.ByRequest(t0, "r3"); len(got) != 1 || got[0].Publication.Streams[0].Tokens != 16*1000+maxSteps-1 {
		t.Errorf("%+v", got)
	}
}

// TestPressure: a long backlog goes out shorter, and what its target has goes last.
func TestPressure(t *testing.T) {
	for name, tt := range map[string]struct {
		waiting       int
		small, middle bool // carry their pages
	}{
		"none": {waiting: somePressure, small: true, middle: true},
		"some": {waiting: somePressure + 1, small: true},
		"high": {waiting: highPressure + 100},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLog(LogOptions{Life: alpha})
			for i := range tt.waiting {
				p := publication(manager.PublicationID(i+1), "r", 1024, true)
				if i == 1 {
					p.Streams[0].Tokens, p.Streams[0].Pages = 16*300, scattered(300) // some 700 bytes
				}
				a := begin(t, l, t0, p)
				if i == 0 {
					l.Told(a.Sequence)
				}
			}
			l.Told(1 << 40) // nobody's
			items := outgoingOf(l, t0)
			announced, _ := saidBy(t, items)
			if len(announced) != tt.waiting {
				t.Fatalf("%d of %d announced", len(announced), tt.waiting)
			}
			if last := announced[len(announced)-1]; (last == 1) != (tt.waiting > somePressure) {
				t.Errorf("the last one is %d", last)
			}
			first := make(map[id.Sequence]wire.Announcement)
			for _, item := range items[:2] {
				for _, a := range batch(t, item).Announcements {
					first[a.Sequence] = a
				}
			}
			if got := first[2].Lists != nil; got != tt.middle {
				t.Errorf("pages beside 700 bytes: %v", got)
			}
			if got := first[3].Lists != nil; got != tt.small {
				t.Errorf("pages beside 90 bytes: %v", got)
			}
			if s := l.Stats(); (s.Shortened == 0) != tt.middle {
				t.Errorf("%+v", s)
			}
		})
	}
}

// TestCheckpointsWaitForWhatIsOutgoing: nobody can have what they speak of.
func TestCheckpointsWaitForWhatIsOutgoing(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	if c := l.Check(); c.Version != 0 || c.Owner != alpha.Node.Hash() || c.Incarnation != alpha.Incarnation {
		t.Errorf("at first: %+v", c)
	}
	announce(t, l, t0, publication(1, "r", 16, true), time.Minute)
	first := decode(t, l.Tick(t0).Broadcast[0]).(*wire.Check)
	begin(t, l, t0, publication(2, "r", 16, true))
	if got := l.Check(); got != *first {
		t.Errorf("push/pull says %+v, said %+v", got, first)
	}
	for at := time.Second; at < 10*time.Second; at += time.Second {
		if out := l.Tick(t0.Add(at)); out.Broadcast != nil {
			t.Errorf("after %v: %d items", at, len(out.Broadcast))
		}
	}
	if out := l.Tick(t0.Add(10 * time.Second)); len(out.Broadcast) != 1 {
		t.Error("after ten seconds there's none")
	}
	announce(t, l, t0, publication(3, "r", 16, true), time.Minute)
	if c := decode(t, l.Tick(t0.Add(11 * time.Second)).Broadcast[0]).(*wire.Check); c.Max != 3 || *c != l.Check() {
		t.Errorf("%+v, push/pull says %+v", c, l.Check())
	}
	end(t, l, t0, 1)
	if out := l.Tick(t0.Add(12 * time.Second)); out.Broadcast != nil {
		t.Error("an end that waits does not hold it back")
	}
}

// TestOutgoingLosesNothing: whatever is published, grown, moved, and ended, with
// whatever room: who hears all that is handed over holds what the log holds,
// without asking for anything.
func TestOutgoingLosesNothing(t *testing.T) {
	test := t
	rapid.Check(t, func(t *rapid.T) {
		l, b := NewLog(LogOptions{Life: alpha, Words: 64}), board(BoardOptions{})
		next := manager.PublicationID(1)
		open := map[manager.PublicationID]int{} // tokens, 0: reserved
		pick := func(t *rapid.T) manager.PublicationID {
			if len(open) == 0 {
				t.Skip("nothing is open")
			}
			return rapid.SampledFrom(slices.Sorted(maps.Keys(open))).Draw(t, "publication")
		}
		take := func(room int) {
			for _, item := range l.Outgoing(t0, room) {
				if _, _, err := b.Receive(t0, item); err != nil {
					t.Fatal(err)
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"reserve": func(t *rapid.T) {
				if _, _, _, err := l.Reserve(next); err != nil {
					if !errors.Is(err, ErrFull) {
						t.Fatal(err)
					}
					return
				}
				open[next] = 0
				next++
			},
			"announce": func(t *rapid.T) {
				p := pick(t)
				if open[p] > 0 && l.held[p].value.Final {
					t.Skip("it is final")
				}
				tokens := open[p] + rapid.IntRange(1, 2000).Draw(t, "tokens")
				value := publication(p, id.Request(fmt.Sprint("r", p)), tokens, false)
				if rapid.Bool().Draw(t, "scattered") {
					value.Streams[0].Pages = scattered((tokens + 15) / 16)
				}
				a, err := l.Announce(t0, value, time.Hour)
				if err != nil {
					t.Fatal(err)
				}
				open[p] = tokens
				if rapid.Bool().Draw(t, "told") {
					l.Told(a.Sequence)
				}
			},
			"move": func(t *rapid.T) {
				p := pick(t)
				if open[p] == 0 {
					t.Skip("it is reserved")
				}
				value := l.held[p].value
				value.Final = value.Final || rapid.Bool().Draw(t, "final")
				if _, err := l.Announce(t0, in(manager.State(rapid.IntRange(0, 2).Draw(t, "state")), value, 7), time.Hour); err != nil {
					t.Fatal(err)
				}
			},
			"release": func(t *rapid.T) {
				p := pick(t)
				if err := l.Release(t0, p); err != nil {
					t.Fatal(err)
				}
				delete(open, p)
			},
			"outgoing": func(t *rapid.T) { take(rapid.IntRange(0, 3000).Draw(t, "room")) },
		})
		take(1 << 20)
		verify(test, b, t0)
		if n, oldest := l.Backlog(); n != 0 || !oldest.IsZero() {
			t.Fatalf("backlog %d since %v", n, oldest)
		}
		v := b.views[alpha.Node.Hash()]
		live := 0
		for _, h := range l.held {
			if len(h.steps) == 0 {
				continue
			}
			live++
			e := v.live[h.newest()]
			if e == nil {
				t.Fatalf("publication %d is not here as %+v", h.name, h.entry)
			}
			if why := e.differs(&h.entry); why != "" {
				t.Fatal(why)
			}
		}
		if live != len(v.live) {
			t.Fatalf("%d live here, %d there", len(v.live), live)
		}
		// All is known but what is reserved.
		missing, _ := v.known.missing(v.max, 1000)
		for _, s := range missing {
			if !slices.Contains(l.pending, s) {
				t.Fatalf("%d is missing", s)
			}
		}
	})
}

// TestOutgoingIsBounded: also of publications that begin and end for ever while
// nothing can be gossiped.
func TestOutgoingIsBounded(t *testing.T) {
	const live = 300
	r := rand.New(rand.NewPCG(1, 1))
	l := NewLog(LogOptions{Life: alpha, Words: live + 1})
	var open []manager.PublicationID
	for i := range manager.PublicationID(20000) {
		begin(t, l, t0, publication(i+1, "r", 16, true))
		if open = append(open, i+1); len(open) == live {
			j := 1 + r.IntN(live-1) // the first one keeps the floor down
			end(t, l, t0, open[j])
			open = slices.Delete(open, j, j+1)
		}
	}
	if n, _ := l.Backlog(); n != 20000 {
		t.Errorf("backlog %d", n)
	}
	if l.out.waiting() > live || len(l.out.ended.ranges) > live {
		t.Errorf("%d announcements, %d ranges", l.out.waiting(), len(l.out.ended.ranges))
	}
	// Nor has it more ranges than there's room for.
	var o outgoing
	for s := range id.Sequence(2 * maxEndedRanges) {
		o.end(t0, []id.Sequence{2*s + 1}, 0)
	}
	if len(o.ended.ranges) != maxEndedRanges || o.ended.max() != 4*maxEndedRanges-1 {
		t.Errorf("%d ranges up to %d", len(o.ended.ranges), o.ended.max())
	}
}
