package publish

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

func TestLogAnnounces(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	p := publication(1, "r1", 40, true)
	name, seal, value, err := l.Reserve(p.ID)
	if err != nil {
		t.Fatal(err)
	}
	if again, seal2, value2, err := l.Reserve(p.ID); again != name || seal2 != seal || value2 != value || err != nil {
		t.Errorf("reserved again: %v %d %#x %v", again, seal2, value2, err)
	}
	if want, _ := id.SealValue(alpha.Incarnation, 1); value != want || name != (id.Publication{Owner: alpha, Sequence: 1}) || seal != 0 {
		t.Errorf("reserved %v, word %d = %#x, want %#x", name, seal, value, want)
	}
	a, err := l.Announce(t0, p, 30*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if a.Name != name || a.Sequence != 1 || a.Seal != seal || a.Value != value {
		t.Errorf("announced %+v", a)
	}
	items := outgoingOf(l, t0)
	if len(items) != 1 {
		t.Fatalf("%d items", len(items))
	}
	for _, item := range [][]byte{a.Full, items[0]} {
		b := batch(t, item)
		got := b.Announcements[0]
		want := wire.Announcement{
			Sequence: 1, Publication: 1, Request: p.Request.Hash(), Seal: 0, ContentEpoch: 7, TTLMillis: 30000, Final: true, Pages: 3,
			Refs: []wire.Ref{{Label: id.Main, RankMask: 3, Tokens: 40}}, Lists: [][]page.Index{p.Streams[0].Pages},
		}
		want.Digest = wire.Digest(want.Refs, want.Lists)
		if b.Owner != alpha.Node.Hash() || b.Incarnation != alpha.Incarnation || b.Floor != 0 || b.Releases != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("announced %+v in %+v, want %+v", got, b, want)
		}
	}
	if m, ok := l.ByName(1); m != 1 || !ok {
		t.Errorf("ByName = %d, %v", m, ok)
	}
}

// TestLogSequencesHaveNoGap: whatever fails, every sequence is announced or
// released.
func TestLogSequencesHaveNoGap(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	seen := map[id.Sequence]bool{}
	note := func(items ...[]byte) {
		for _, item := range items {
			b := batch(t, item)
			for _, a := range b.Announcements {
				seen[a.Sequence] = true
			}
			for _, s := range b.Releases {
				seen[s] = true
			}
			for s := id.Sequence(1); s <= b.Floor; s++ {
				seen[s] = true
			}
		}
	}
	note(announce(t, l, t0, publication(1, "r1", 16, false), time.Second).items...)
	if _, err := l.Announce(t0, publication(1, "r1", 15, false), time.Second); !errors.Is(err, ErrConflict) {
		t.Fatalf("shrunk: %v", err)
	}
	if _, _, _, err := l.Reserve(2); err != nil {
		t.Fatal(err)
	}
	bad := publication(2, "r2", 16, false)
	bad.Streams[0].Ranks = []id.Rank{64}
	if _, err := l.Announce(t0, bad, time.Second); !errors.Is(err, id.ErrInvalid) {
		t.Fatalf("rank 64: %v", err)
	}
	note(release(t, l, t0, 2)...)
	note(announce(t, l, t0, publication(1, "r1", 32, true), time.Second).items...)
	note(announce(t, l, t0, publication(3, "r3", 32, true), time.Second).items...)
	if want := map[id.Sequence]bool{1: true, 2: true, 3: true, 4: true}; !reflect.DeepEqual(seen, want) {
		t.Errorf("spoken of %v, want %v", seen, want)
	}
	if c := l.Check(); c.Max != 4 || c.Live != 2 {
		t.Errorf("checkpoint %+v", c)
	}
}

func TestLogSkipsTheSequenceWhoseWordIsZero(t *testing.T) {
	// mix64 is a bijection, so some incarnation gives 2; it is found by its
	// inverse: here by the inverse steps of splitmix64's finaliser.
	x := uint64(2)
	x ^= x>>31 ^ x>>62
	x *= 0x319642b2d24d8ec3
	x ^= x>>27 ^ x>>54
	x *= 0x96de1b173f119089
	x ^= x>>30 ^ x>>60
	life := id.Life{Node: "alpha", Incarnation: id.Incarnation(x)}
	if _, ok := id.SealValue(life.Incarnation, 2); ok {
		t.Fatal("the incarnation of the test is wrong")
	}
	l := NewLog(LogOptions{Life: life})
	for i, want := range []id.Sequence{1, 3, 4} {
		name, _, value, err := l.Reserve(manager.PublicationID(i + 1))
		if err != nil || name.Sequence != want || value == 0 {
			t.Errorf("reserved %v, %#x, %v, want sequence %d", name, value, err, want)
		}
		if _, err := l.Announce(t0, publication(manager.PublicationID(i+1), "r", 16, true), time.Second); err != nil {
			t.Fatal(err)
		}
	}
	// Whoever misses it is told that it has ended.
	out := l.Nack(t0, &wire.Nack{From: 1, Owner: life.Node.Hash(), Incarnation: life.Incarnation, Missing: []id.Sequence{2}, Asker: "beta"})
	if len(out.Send) != 1 || !slices.Equal(batch(t, out.Send[0].Item).Releases, []id.Sequence{2}) {
		t.Errorf("answer %+v", out)
	}
}

func TestLogGrows(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	announce(t, l, t0, publication(1, "r1", 16, false), time.Second)
	announce(t, l, t0, publication(2, "r2", 16, false), time.Second)
	a := announce(t, l, t0, publication(1, "r1", 32, false), time.Second)
	if a.Name.Sequence != 1 || a.Sequence != 3 || a.Seal != 0 {
		t.Errorf("grown to %+v", a)
	}
	if b := batch(t, a.items[0]); !slices.Equal(b.Releases, []id.Sequence{1}) || b.Announcements[0].Publication != 1 || b.Floor != 0 {
		t.Errorf("growth says %+v", b)
	}
	announce(t, l, t0, publication(1, "r1", 33, true), time.Second)
	if _, err := l.Announce(t0, publication(1, "r1", 50, true), time.Second); !errors.Is(err, ErrConflict) {
		t.Errorf("after final: %v", err)
	}
	other := publication(2, "r2", 20, false)
	other.ContentEpoch++
	for name, p := range map[string]manager.Publication{
		"other request":       publication(2, "r3", 20, false),
		"other content epoch": other,
		"shorter":             publication(2, "r2", 15, false),
		"stream missing":      {ID: 2, Request: "r2", ContentEpoch: 7},
	} {
		if _, err := l.Announce(t0, p, time.Second); !errors.Is(err, ErrConflict) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := l.Announce(t0, publication(9, "r", 1, true), time.Second); !errors.Is(err, ErrUnknown) {
		t.Errorf("not reserved: %v", err)
	}
	// Its end is said of every step above the floor, which is under publication 1.
	b := batch(t, release(t, l, t0, 1)[0])
	if b.Floor != 1 || !slices.Equal(b.Releases, []id.Sequence{3, 4}) {
		t.Errorf("end says floor %d, releases %v", b.Floor, b.Releases)
	}
	if b := batch(t, release(t, l, t0, 2)[0]); b.Floor != 4 || len(b.Releases) != 0 {
		t.Errorf("end of all says floor %d, releases %v", b.Floor, b.Releases)
	}
	if err := l.Release(t0, 2); !errors.Is(err, ErrUnknown) {
		t.Errorf("released twice: %v", err)
	}
}

func TestLogReusesWordsLastOfAll(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha, Words: 4})
	take := func(p manager.PublicationID) uint32 {
		t.Helper()
		_, seal, _, err := l.Reserve(p)
		if err != nil {
			t.Fatal(err)
		}
		return seal
	}
	for p := range manager.PublicationID(3) {
		if seal := take(p + 1); seal != uint32(p) {
			t.Errorf("publication %d has word %d", p+1, seal)
		}
	}
	if _, _, _, err := l.Reserve(9); !errors.Is(err, ErrFull) {
		t.Errorf("a fourth of four words: %v", err)
	}
	release(t, l, t0, 2)
	if seal := take(4); seal != 3 {
		t.Errorf("word %d was taken before word 3", seal)
	}
	release(t, l, t0, 1)
	if seal := take(5); seal != 1 {
		t.Errorf("word %d, want 1, which was free first", seal)
	}
	if s := l.Stats(); s.Reserved != 3 || s.Live != 0 || s.Words != 1 {
		t.Errorf("stats %+v", s)
	}
}

func TestLogFinds(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	announce(t, l, t0, publication(1, "r1", 16, true), time.Second)
	announce(t, l, t0, publication(2, "r1", 32, false), time.Second) // used again
	announce(t, l, t0, publication(2, "r1", 48, true), time.Second)
	announce(t, l, t0, publication(3, "r3", 16, true), time.Second)
	release(t, l, t0, 3)
	if _, _, _, err := l.Reserve(4); err != nil { // sequence 5
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		sequence id.Sequence
		request  id.Request
		want     id.Sequence
		tokens   int
		err      error
	}{
		"by name":                 {sequence: 1, want: 1, tokens: 16},
		"by name, grown":          {sequence: 2, want: 2, tokens: 48},
		"by name and request":     {sequence: 1, request: "r1", want: 1, tokens: 16},
		"name of another request": {sequence: 1, request: "r3", err: ErrUnknown},
		"by request, the newest":  {request: "r1", want: 2, tokens: 48},
		"a step is no name":       {sequence: 3, err: ErrEnded},
		"ended":                   {sequence: 4, err: ErrEnded},
		"reserved only":           {sequence: 5, err: ErrUnknown},
		"not yet":                 {sequence: 6, err: ErrUnknown},
		"ended request":           {request: "r3", err: ErrEnded},
		"unknown request":         {request: "r9", err: ErrUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			full, got, err := l.Find(t0.Add(400*ms), tt.sequence, tt.request)
			if !errors.Is(err, tt.err) || (tt.err == nil) != (err == nil) {
				t.Fatalf("Find = %v, %v, want %v", got, err, tt.err)
			}
			if err != nil {
				return
			}
			a := batch(t, full).Announcements[0]
			if got.Sequence != tt.want || got.Owner != alpha || a.Publication != tt.want || a.Refs[0].Tokens != tt.tokens || a.TTLMillis != 600 || a.Lists == nil {
				t.Errorf("Find = %v, %+v", got, a)
			}
		})
	}
	if err := l.Extend(1, t0.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	full, _, err := l.Find(t0.Add(time.Hour), 1, "")
	if err != nil || batch(t, full).Announcements[0].TTLMillis != 0 {
		t.Errorf("after its hold: %v", err)
	}
	if full, _, _ := l.Find(t0, 1, ""); batch(t, full).Announcements[0].TTLMillis != 60000 {
		t.Errorf("extended: %+v", batch(t, full).Announcements[0])
	}
	if err := l.Extend(4, t0); !errors.Is(err, ErrUnknown) {
		t.Errorf("extend a reservation: %v", err)
	}
	announce(t, l, t0, publication(5, "r3", 16, true), time.Second)
	if _, _, err := l.Find(t0, 0, "r3"); err != nil {
		t.Errorf("used again: %v", err)
	}
}

// scattered is n pages in no order.
func scattered(n int) []page.Index {
	p := make([]page.Index, n)
	for i := range p {
		p[i] = page.Index(i*7919%100003 + 1)
	}
	return p
}

// TestLogInline: what does not fit travels by digest, and what does not fit
// even then without its streams.
func TestLogInline(t *testing.T) {
	many := manager.Publication{ID: 3, Request: "r3"}
	for i := range 200 {
		many.Streams = append(many.Streams, manager.Stream{
			Label: id.Label(fmt.Sprintf("%0*d", id.MaxLabel, i)), Ranks: []id.Rank{0}, Tokens: 16, Pages: []page.Index{page.Index(i + 1)},
		})
	}
	big := publication(2, "r2", 16*1000, true)
	big.Streams[0].Pages = scattered(1000)
	l := NewLog(LogOptions{Life: alpha})
	for name, tt := range map[string]struct {
		p           manager.Publication
		lists, refs bool
	}{
		"inline":      {p: publication(1, "r1", 16*8192, true), lists: true, refs: true},
		"by digest":   {p: big, refs: true},
		"by its name": {p: many},
	} {
		t.Run(name, func(t *testing.T) {
			a := announce(t, l, t0, tt.p, time.Second)
			item := a.items[0]
			if len(item) > wire.ItemBytes {
				t.Errorf("item has %d bytes", len(item))
			}
			got, full := batch(t, item).Announcements[0], batch(t, a.Full).Announcements[0]
			if (got.Lists != nil) != tt.lists || (got.Refs != nil) != tt.refs || full.Lists == nil || len(full.Refs) != len(tt.p.Streams) {
				t.Errorf("gossip has lists %v, refs %v", got.Lists != nil, got.Refs != nil)
			}
			if got.Digest != full.Digest || got.Pages != full.Pages {
				t.Errorf("gossip is of %d pages %#x, full of %d %#x", got.Pages, got.Digest, full.Pages, full.Digest)
			}
		})
	}
	huge := publication(4, "r4", 1, true)
	huge.Streams[0].Pages = make([]page.Index, wire.MaxPages+1)
	if _, _, _, err := l.Reserve(4); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Announce(t0, huge, time.Second); !errors.Is(err, ErrFull) {
		t.Errorf("too many pages: %v", err)
	}
	label := publication(4, "r4", 1, true)
	label.Streams[0].Label = id.Label(strings.Repeat("x", id.MaxLabel+1))
	if _, err := l.Announce(t0, label, time.Second); !errors.Is(err, wire.ErrMessage) {
		t.Errorf("long label: %v", err)
	}
	request := publication(4, "", 1, true)
	if _, err := l.Announce(t0, request, time.Second); !errors.Is(err, id.ErrInvalid) {
		t.Errorf("no request: %v", err)
	}
}

func TestLogStoresEqualListsOnce(t *testing.T) {
	p := publication(1, "r1", 40, true)
	again := p.Streams[0]
	again.Label, again.Pages = "draft", slices.Clone(again.Pages)
	p.Streams = append([]manager.Stream{again}, p.Streams...)
	a := batch(t, announce(t, NewLog(LogOptions{Life: alpha}), t0, p, time.Second).Full).Announcements[0]
	if len(a.Lists) != 1 || a.Pages != 3 || len(a.Refs) != 2 {
		t.Errorf("%+v", a)
	}
}

func TestLogCheckpoints(t *testing.T) {
	for name, tt := range map[string]struct {
		fast          bool
		changed, idle time.Duration
	}{
		"as it is": {changed: time.Second, idle: 10 * time.Second},
		"fast":     {fast: true, changed: 100 * ms, idle: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLog(LogOptions{Life: alpha, Fast: tt.fast})
			due := func(at time.Duration) *wire.Check {
				t.Helper()
				out := l.Tick(t0.Add(at))
				if len(out.Broadcast) == 0 {
					return nil
				}
				return decode(t, out.Broadcast[0]).(*wire.Check)
			}
			if c := due(0); c == nil || c.Max != 0 {
				t.Fatalf("the first one: %+v", c)
			}
			announce(t, l, t0, publication(1, "r1", 16, true), time.Second)
			announce(t, l, t0, publication(2, "r2", 16, true), time.Second)
			if c := due(tt.changed - ms); c != nil {
				t.Errorf("too early: %+v", c)
			}
			c := due(tt.changed)
			if c == nil || c.Max != 2 || c.Live != 2 || c.Hash != wire.Mix(1)^wire.Mix(2) || *c != l.Check() {
				t.Fatalf("after a change: %+v, now %+v", c, l.Check())
			}
			if once := due(2 * tt.changed); once == nil || once.Version <= c.Version || once.Hash != c.Hash {
				t.Errorf("once more: %+v after %+v", once, c)
			}
			if c := due(2*tt.changed + tt.idle - ms); c != nil {
				t.Errorf("nothing has changed: %+v", c)
			}
			again := due(2*tt.changed + tt.idle)
			if again == nil || again.Version <= c.Version {
				t.Errorf("idle: %+v after %+v", again, c)
			}
			if c := due(3*tt.changed + tt.idle); c != nil {
				t.Errorf("nothing has changed: %+v", c)
			}
			release(t, l, t0, 1)
			if c := due(4*tt.changed + tt.idle); c == nil || c.Floor != 1 || c.Live != 1 || c.Version <= again.Version {
				t.Errorf("after a release: %+v", c)
			}
		})
	}
}

// TestLogCheckpointEndsBeforeReservations: nobody can say yet what becomes of them.
func TestLogCheckpointEndsBeforeReservations(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	announce(t, l, t0, publication(1, "r1", 16, false), time.Second)
	if _, _, _, err := l.Reserve(2); err != nil {
		t.Fatal(err)
	}
	announce(t, l, t0, publication(3, "r3", 16, true), time.Second)
	if c := l.Check(); c.Floor != 0 || c.Max != 1 || c.Live != 1 || c.Hash != wire.Mix(1) {
		t.Errorf("%+v", c)
	}
	out := l.Nack(t0, &wire.Nack{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Missing: []id.Sequence{2, 9}})
	if len(out.Send) != 1 || len(batch(t, out.Send[0].Item).Releases) != 0 {
		t.Errorf("a reservation was released: %+v", out)
	}
	release(t, l, t0, 2)
	if c := l.Check(); c.Max != 3 || c.Live != 2 {
		t.Errorf("%+v", c)
	}
}

func TestLogAnswersNacks(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	for i := range manager.PublicationID(6) {
		announce(t, l, t0, publication(i+1, "r", 16, false), time.Second)
	}
	announce(t, l, t0, publication(3, "r", 32, false), time.Second) // 3 -> 7
	release(t, l, t0, 1)
	release(t, l, t0, 5)
	nack := func(missing ...id.Sequence) (announced, released []id.Sequence) {
		t.Helper()
		for _, d := range l.Nack(t0, &wire.Nack{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Missing: missing, Asker: "beta"}).Send {
			if d.To != "beta" || len(d.Item) > wire.ItemBytes {
				t.Fatalf("%d bytes to %q", len(d.Item), d.To)
			}
			b := batch(t, d.Item)
			if b.Floor != 1 {
				t.Errorf("floor %d", b.Floor)
			}
			for _, a := range b.Announcements {
				announced = append(announced, a.Sequence)
			}
			released = append(released, b.Releases...)
		}
		return announced, released
	}
	for name, tt := range map[string]struct{ missing, announced, released []id.Sequence }{
		"live":             {missing: []id.Sequence{2, 4}, announced: []id.Sequence{2, 4}},
		"ended":            {missing: []id.Sequence{5}, released: []id.Sequence{5}},
		"under the floor":  {missing: []id.Sequence{1}},
		"not yet":          {missing: []id.Sequence{8, 1 << 60}},
		"grown":            {missing: []id.Sequence{3}, announced: []id.Sequence{7}, released: []id.Sequence{3}},
		"grown, both":      {missing: []id.Sequence{3, 7}, announced: []id.Sequence{7}, released: []id.Sequence{3}},
		"all, in disorder": {missing: []id.Sequence{7, 1, 6, 2, 2, 5, 4, 3}, announced: []id.Sequence{2, 7, 4, 6}, released: []id.Sequence{3, 5}},
	} {
		announced, released := nack(tt.missing...)
		if !slices.Equal(announced, tt.announced) || !slices.Equal(released, tt.released) {
			t.Errorf("%s: announced %v, released %v, want %v and %v", name, announced, released, tt.announced, tt.released)
		}
	}
	for _, n := range []*wire.Nack{
		{Owner: beta.Node.Hash(), Incarnation: alpha.Incarnation, Missing: []id.Sequence{2}},
		{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation - 1, Missing: []id.Sequence{2}},
	} {
		if out := l.Nack(t0, n); len(out.Send) != 0 {
			t.Errorf("answered %+v", n)
		}
	}
}

// TestLogAnswersAreBounded: an answer has so many items and no more, all
// answers together so many bytes a second, and small ones share an item.
func TestLogAnswersAreBounded(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	var missing []id.Sequence
	for i := range 2 * wire.MaxMissing {
		p := publication(manager.PublicationID(i+1), "r", 16, true)
		if i%2 == 1 {
			p.Streams[0].Tokens, p.Streams[0].Pages = 16*400, scattered(400) // 850 bytes
			missing = append(missing, id.Sequence(i+1))
		}
		announce(t, l, t0, p, time.Second)
	}
	n := &wire.Nack{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Missing: missing}
	small := *n
	small.Missing = nil
	for _, s := range missing {
		small.Missing = append(small.Missing, s-1)
	}
	announced := 0
	out := l.Nack(t0, &small)
	for _, d := range out.Send {
		announced += len(batch(t, d.Item).Announcements)
	}
	if announced != wire.MaxMissing || len(out.Send) > wire.MaxMissing/15 {
		t.Errorf("%d small ones in %d items", announced, len(out.Send))
	}
	answered, bytes := 0, 0
	for range 100 {
		out := l.Nack(t0, n)
		if len(out.Send) == 0 {
			break
		}
		if len(out.Send) != maxAnswer {
			t.Errorf("%d items", len(out.Send))
		}
		answered++
		for _, d := range out.Send {
			bytes += len(d.Item)
		}
	}
	if bytes > answerBurst+maxAnswer*wire.ItemBytes || answered < 10 {
		t.Errorf("%d bytes at once in %d answers", bytes, answered)
	}
	if s := l.Stats(); s.NacksRefused != 1 || s.Nacks != uint64(answered+1) || s.Repairs < uint64(announced) {
		t.Errorf("%+v", s)
	}
	later := t0.Add(100 * ms)
	if out := l.Nack(later, n); len(out.Send) != maxAnswer {
		t.Errorf("%d items after a while", len(out.Send))
	}
	for _, s := range missing {
		release(t, l, t0, manager.PublicationID(s))
	}
	released := 0
	for _, d := range l.Nack(later, n).Send {
		if len(d.Item) > wire.ItemBytes {
			t.Errorf("item has %d bytes", len(d.Item))
		}
		released += len(batch(t, d.Item).Releases)
	}
	if released != wire.MaxMissing {
		t.Errorf("%d of %d released", released, wire.MaxMissing)
	}
}

// TestLogManySteps: one publication that grows without end costs a bounded
// memory, and its end fits into an item.
func TestLogManySteps(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	const steps = 5 * maxSteps
	for i := range steps {
		announce(t, l, t0, publication(1, "r1", i+1, false), time.Second)
	}
	if len(l.steps) > maxSteps || len(l.order) > 100 {
		t.Errorf("%d steps, %d names in order", len(l.steps), len(l.order))
	}
	if out := l.Nack(t0, &wire.Nack{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Missing: []id.Sequence{2}}); len(out.Send) != 1 {
		t.Errorf("%+v", out)
	}
	item := release(t, l, t0, 1)[0]
	if b := batch(t, item); b.Floor != steps || len(item) > wire.ItemBytes {
		t.Errorf("%d bytes, floor %d", len(item), b.Floor)
	}
	// Names that have ended go, too, while an old one stays.
	announce(t, l, t0, publication(1, "r1", 1, false), time.Second)
	for i := range manager.PublicationID(1000) {
		announce(t, l, t0, publication(i+2, "r", 1, false), time.Second)
		release(t, l, t0, i+2)
	}
	if len(l.order) > 100 {
		t.Errorf("%d names are kept in order", len(l.order))
	}
}

func TestEndedRequestsAreBounded(t *testing.T) {
	e := endedRequests{at: make(map[id.RequestHash]int)}
	hash := func(i int) id.RequestHash { return id.Request(fmt.Sprint(i)).Hash() }
	for i := range 2*maxEnded + 100 {
		e.add(hash(i))
		if i%3 == 0 {
			e.remove(hash(i))
			e.add(hash(i))
		}
	}
	if len(e.at) > maxEnded || len(e.ring) > maxEnded {
		t.Errorf("%d remembered", len(e.at))
	}
	if e.has(hash(0)) || !e.has(hash(2*maxEnded+99)) {
		t.Error("not the newest are remembered")
	}
}

func TestLogLive(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	announce(t, l, t0, publication(1, "r1", 16, false), time.Second)
	announce(t, l, t0, publication(2, "r2", 16, false), time.Second)
	announce(t, l, t0, publication(1, "r1", 32, false), time.Second)
	items := l.Live(t0)
	if len(items) != 3 {
		t.Fatalf("%d items", len(items))
	}
	for i, want := range []id.Sequence{2, 3} {
		if a := batch(t, items[i]).Announcements[0]; a.Sequence != want || a.Lists == nil {
			t.Errorf("item %d is %+v", i, a)
		}
	}
	if c := decode(t, items[2]).(*wire.Check); *c != l.Check() {
		t.Errorf("the last item is %+v", c)
	}
	if c := decode(t, l.Bye().Broadcast[0]).(*wire.Bye); c.Max != 3 || c.Owner != alpha.Node.Hash() || c.Incarnation != alpha.Incarnation {
		t.Errorf("bye %+v", c)
	}
}
