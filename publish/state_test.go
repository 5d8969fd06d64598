package publish

import (
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// states is what one publication may go through: to the host and back while it
// is open and once more when it is final, each time back onto other pages.
func states() []manager.Publication {
	open, final := publication(1, "r1", 40, false), publication(1, "r1", 56, true)
	return []manager.Publication{
		open, in(manager.OnHost, open, 0), in(manager.Resident, open, 100),
		in(manager.OnHost, final, 0), in(manager.Resident, final, 200), in(manager.Offloading, final, 0),
		in(manager.OnHost, final, 0), in(manager.Resident, final, 300),
	}
}

// shows is what a board shows of one publication.
func shows(t testing.TB, e Entry) manager.Publication {
	t.Helper()
	p := e.Publication
	p.ID, p.Request = 1, "r1"
	p.Streams = slices.Clone(p.Streams)
	for i := range p.Streams {
		if s := &p.Streams[i]; s.State != manager.Resident {
			if !e.HasTable || s.Pages == nil || len(s.Pages) > 0 {
				t.Errorf("in state %d there are no pages, and that is known: %+v", s.State, e)
			}
			s.Pages = nil
		}
	}
	return p
}

// TestLogAnnouncesStates: the length is the same and the state another, also of a
// final publication: an announcement like any other.
func TestLogAnnouncesStates(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	for i, p := range states() {
		a := announce(t, l, t0, p, time.Minute)
		sequence := id.Sequence(i + 1)
		if a.Name.Sequence != 1 || a.Sequence != sequence || a.Seal != 0 {
			t.Errorf("step %d: announced %+v", i, a)
		}
		b := batch(t, a.items[0])
		if i > 0 && !slices.Equal(b.Releases, []id.Sequence{sequence - 1}) {
			t.Errorf("step %d: releases %v", i, b.Releases)
		}
		full, _, err := l.Find(t0, 1, "r1")
		if err != nil || !reflect.DeepEqual(batch(t, full).Announcements, b.Announcements) {
			t.Errorf("step %d: Find = %+v, %v, gossiped %+v", i, batch(t, full).Announcements, err, b.Announcements)
		}
		if c := l.Check(); c.Max != sequence || c.Live != 1 || c.Hash != wire.Mix(uint64(sequence)) {
			t.Errorf("step %d: %+v", i, c)
		}
	}
	if b := batch(t, release(t, l, t0, 1)[0]); b.Floor != id.Sequence(len(states())) || len(b.Releases) != 0 {
		t.Errorf("its end says %+v", b)
	}
}

// TestNewestStateShows: in whatever order the announcements of one publication
// arrive, with their pages or without, the newest that has come shows, a change
// wakes who watches, and what comes late does nothing.
func TestNewestStateShows(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	steps := states()
	items, bare := make([][]byte, len(steps)), make([][]byte, len(steps))
	for i, p := range steps {
		a := announce(t, l, t0, p, time.Minute)
		items[i] = a.items[0]
		g := batch(t, a.items[0])
		g.Announcements[0].Lists = nil
		bare[i] = encode(t, wire.Batches{g})
	}
	name := id.Publication{Owner: alpha, Sequence: 1}
	inOrder := func(order []int, items [][]byte, whole bool) {
		b := board(BoardOptions{})
		newest := -1
		for _, i := range order {
			i = []int{0, 1, 4, 3, 6, 7}[i]
			changed, cancel := b.Watch("r1")
			receive(t, b, t0, items[i])
			if woken(changed) != (i > newest) {
				t.Fatalf("order %v: after %d: woken %v", order, i, woken(changed))
			}
			cancel()
			newest = max(newest, i)
			e, err := b.ByName(t0, name)
			if err != nil || e.Sequence != id.Sequence(newest+1) || !whole && e.HasTable != (steps[newest].Streams[0].State != manager.Resident) {
				t.Fatalf("order %v: after %d: %+v, %v", order, i, e, err)
			}
			got, want := shows(t, e), steps[newest]
			if !whole {
				want.Streams = slices.Clone(want.Streams)
				want.Streams[0].Pages = nil
			}
			if !reflect.DeepEqual(got, want) {
				t.Fatalf("order %v: after %d:\n%+v, want\n%+v", order, i, got, want)
			}
			if by := b.ByRequest(t0, "r1"); len(by) != 1 || !reflect.DeepEqual(by[0], e) {
				t.Fatalf("order %v: after %d: ByRequest = %+v", order, i, by)
			}
		}
		if s := b.Stats(); s.Conflicts != 0 || s.Entries != 1 {
			t.Fatalf("order %v: %+v", order, s)
		}
	}
	permute(6, func(order []int) { inOrder(order, items, true) })
	permute(6, func(order []int) { inOrder(order, bare, false) })
}

// TestFinalStaysFinal: once a publication is final nothing but states and pages
// changes; its owner can't announce it, and nobody believes it.
func TestFinalStaysFinal(t *testing.T) {
	final := publication(1, "r1", 96, true)
	final.Streams[0].Prefix, final.Streams[0].Start, final.Streams[0].Pages = 16, 48, final.Streams[0].Pages[:4]
	with := func(change func(p *manager.Publication, s *manager.Stream)) manager.Publication {
		p := final
		p.Streams = slices.Clone(p.Streams)
		change(&p, &p.Streams[0])
		return p
	}
	for name, tt := range map[string]struct {
		next manager.Publication
		ok   bool
	}{
		"the same":     {next: final, ok: true},
		"on the host":  {next: with(func(_ *manager.Publication, s *manager.Stream) { s.State, s.Pages = manager.OnHost, nil }), ok: true},
		"other pages":  {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Pages = []page.Index{9, 8, 7, 6} }), ok: true},
		"open again":   {next: with(func(p *manager.Publication, _ *manager.Stream) { p.Final = false })},
		"longer":       {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Tokens++ })},
		"shorter":      {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Tokens-- })},
		"more kept":    {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Prefix = 32 })},
		"less kept":    {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Prefix = 0 })},
		"released":     {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Start = 64 })},
		"not released": {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Prefix, s.Start = 0, 0 })},
		"a rank less":  {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Ranks = s.Ranks[:1] })},
		"a rank more":  {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Ranks = []id.Rank{0, 1, 2} })},
		"a label more": {next: with(func(p *manager.Publication, s *manager.Stream) {
			p.Streams = append(p.Streams, *s)
			p.Streams[1].Label = "other"
		})},
		"another label":         {next: with(func(_ *manager.Publication, s *manager.Stream) { s.Label = "other" })},
		"another content epoch": {next: with(func(p *manager.Publication, _ *manager.Stream) { p.ContentEpoch++ })},
		"another request":       {next: with(func(p *manager.Publication, _ *manager.Stream) { p.Request = "r2" })},
	} {
		t.Run(name, func(t *testing.T) {
			l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
			receive(t, b, t0, announce(t, l, t0, final, time.Minute).items...)
			before, _ := b.ByName(t0, id.Publication{Owner: alpha, Sequence: 1})
			checked := l.Check()

			next, err := toWire(tt.next)
			if err != nil {
				t.Fatal(err)
			}
			next.Publication, next.Sequence, next.TTLMillis = 1, 2, 60_000
			g := wire.Batch{Owner: alpha.Node.Hash(), Incarnation: alpha.Incarnation, Announcements: []wire.Announcement{next}, Releases: []id.Sequence{1}}
			receive(t, b, t0, encode(t, wire.Batches{g}))
			e, err := b.ByName(t0, before.Name)
			if err != nil || (e.Sequence == 2) != tt.ok || !tt.ok && !reflect.DeepEqual(e, before) || (b.Stats().Conflicts == 0) != tt.ok {
				t.Errorf("board: %+v, %v, %+v", e, err, b.Stats())
			}
			if !e.Publication.Final {
				t.Error("board: it is final no more")
			}

			_, err = l.Announce(t0, tt.next, time.Minute)
			if tt.ok != (err == nil) || !tt.ok && !errors.Is(err, ErrConflict) {
				t.Errorf("log: %v", err)
			}
			if !tt.ok && l.Check() != checked {
				t.Errorf("log: %+v became %+v", checked, l.Check())
			}
			// Whatever was believed, the owner has the last word.
			b.Tick(t0.Add(time.Second))
			if err := b.Sync(t0, alpha, l.Live(t0)); err != nil {
				t.Fatal(err)
			}
			verify(t, b, t0)
			h := l.held[1]
			if why := b.views[alpha.Node.Hash()].named(1).differs(&h.entry); why != "" {
				t.Errorf("after a snapshot: %s", why)
			}
		})
	}
}

// TestLogRefusesPagesOffTheDevice: whoever read them would read nothing.
func TestLogRefusesPagesOffTheDevice(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	for _, state := range []manager.State{manager.Offloading, manager.OnHost} {
		p := publication(1, "r1", 40, true)
		p.Streams[0].State = state
		if _, _, _, err := l.Reserve(p.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := l.Announce(t0, p, time.Minute); !errors.Is(err, wire.ErrMessage) {
			t.Errorf("state %d: %v", state, err)
		}
	}
	if s := l.Stats(); s.Announced != 0 || s.Waiting != 0 {
		t.Errorf("%+v", s)
	}
}

// TestNoPagesNeedNoLookup: what is not on the device has a table, however little
// of it was gossiped; it is given up for no other, and costs nothing.
func TestNoPagesNeedNoLookup(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{Tables: 10 * 4 * pageBytes})
	away := in(manager.OnHost, publication(1, "r1", 4096, true), 0)
	half := in(manager.OnHost, publication(2, "r2", 64, true), 0)
	half.Streams = append(half.Streams, publication(2, "r2", 64, true).Streams[0])
	half.Streams[0].Label = "draft"
	var names []id.Publication
	for _, p := range []manager.Publication{away, half} {
		a := announce(t, l, t0, p, time.Minute)
		names = append(names, a.Name)
		receive(t, b, t0, digestOnly(t, a.Full))
	}
	check := func(when string) {
		t.Helper()
		if e, err := b.ByName(t0, names[0]); err != nil || !e.HasTable || e.Publication.Streams[0].Tokens != 4096 || len(e.Publication.Streams[0].Pages) != 0 {
			t.Errorf("%s: on the host: %+v, %v", when, e, err)
		}
		if e, err := b.ByName(t0, names[1]); err != nil || e.HasTable {
			t.Errorf("%s: one of two streams: %+v, %v", when, e, err)
		}
		if s := b.Stats(); s.TableBytes > 10*4*pageBytes {
			t.Errorf("%s: %+v", when, s)
		}
	}
	check("at first")
	if s := b.Stats(); s.TableBytes != 0 {
		t.Errorf("%+v", s)
	}
	for i := range manager.PublicationID(15) {
		receive(t, b, t0, announce(t, l, t0, publication(i+3, "r", 64, true), time.Minute).items...)
	}
	check("with all room taken")
	// Its owner says the same, with its empty list; then it is back, and away again.
	full, _, err := l.Find(t0, names[0].Sequence, "r1")
	if err != nil {
		t.Fatal(err)
	}
	if e, err := b.Learn(t0, alpha, full, "r1"); err != nil || !e.HasTable || e.Publication.Request != "r1" {
		t.Errorf("Learn = %+v, %v", e, err)
	}
	back := announce(t, l, t0, in(manager.Resident, publication(1, "r1", 4096, true), 7), time.Minute)
	receive(t, b, t0, digestOnly(t, back.Full))
	if e, err := b.ByName(t0, names[0]); err != nil || e.HasTable || e.Publication.Request != "r1" {
		t.Errorf("back: %+v, %v", e, err)
	}
	receive(t, b, t0, digestOnly(t, announce(t, l, t0, away, time.Minute).Full))
	check("away again")
	receive(t, b, t0, release(t, l, t0, 1)...)
}

// TestOldStatesStayOld: an owner's late answer, a snapshot from before, and
// gossip after the end bring neither an old state nor old pages back.
func TestOldStatesStayOld(t *testing.T) {
	l := NewLog(LogOptions{Life: alpha})
	p := publication(1, "r1", 40, true)
	first := announce(t, l, t0, p, time.Minute)
	snapshot := l.Live(t0)
	away := announce(t, l, t0, in(manager.OnHost, p, 0), time.Minute)
	back := announce(t, l, t0, in(manager.Resident, p, 50), time.Minute)
	for name, late := range map[string]func(b *Board) error{
		"gossip": func(b *Board) error {
			_, _, err := b.Receive(t0, first.items[0])
			return err
		},
		"an answer": func(b *Board) error {
			_, err := b.Learn(t0, alpha, first.Full, "r1")
			return err
		},
		"a snapshot": func(b *Board) error { return b.Sync(t0, alpha, snapshot) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, newest := range []announcement{away, back} {
				b := board(BoardOptions{})
				receive(t, b, t0, newest.Full) // and nothing of the steps before
				before, err := b.ByName(t0, newest.Name)
				if err != nil {
					t.Fatal(err)
				}
				quiet, cancel := b.Watch("r1")
				if err := late(b); err != nil {
					t.Fatal(err)
				}
				verify(t, b, t0)
				if after, err := b.ByName(t0, newest.Name); err != nil || !reflect.DeepEqual(before, after) || woken(quiet) {
					t.Errorf("%+v became %+v, %v, woken %v", before, after, err, woken(quiet))
				}
				cancel()

				b = board(BoardOptions{})
				receive(t, b, t0, newest.Full)
				b.Forget(newest.Name) // its owner has told this node that it ended
				if err := late(b); err != nil && !errors.Is(err, ErrEnded) {
					t.Fatal(err)
				}
				verify(t, b, t0)
				if e, err := b.ByName(t0, newest.Name); !errors.Is(err, ErrEnded) {
					t.Errorf("after its end: %+v, %v", e, err)
				}
			}
		})
	}
}

// TestASnapshotBringsBackWhatWasForgedToBeOver: a step that its owner never made
// has ended, but the owner says that the publication lives.
func TestASnapshotBringsBackWhatWasForgedToBeOver(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	a := announce(t, l, t0, publication(1, "r1", 40, true), time.Minute)
	for i := range manager.PublicationID(5) {
		announce(t, l, t0, publication(i+2, "r", 16, true), time.Minute)
	}
	g := batch(t, a.Full)
	g.Announcements[0].Sequence = 4
	receive(t, b, t0, encode(t, wire.Batches{g}))
	g.Announcements, g.Releases = nil, []id.Sequence{4}
	receive(t, b, t0, encode(t, wire.Batches{g}))
	if e, err := b.ByName(t0, a.Name); !errors.Is(err, ErrEnded) {
		t.Fatalf("%+v, %v", e, err)
	}
	if err := b.Sync(t0, alpha, l.Live(t0)); err != nil {
		t.Fatal(err)
	}
	verify(t, b, t0)
	if e, err := b.ByName(t0, a.Name); err != nil || e.Sequence != 1 {
		t.Errorf("%+v, %v", e, err)
	}
}

// TestALateAnswerIsOfUse: what the owner said when it was asked can still be
// read, for the pages that it named are held until the seal word changes; the
// board has the newer word.
func TestALateAnswerIsOfUse(t *testing.T) {
	l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
	p := publication(1, "r1", 40, true)
	first := announce(t, l, t0, p, time.Minute)
	announce(t, l, t0, in(manager.OnHost, p, 0), time.Minute)
	back := announce(t, l, t0, in(manager.Resident, p, 50), time.Minute)
	receive(t, b, t0, digestOnly(t, back.Full))
	if e, err := b.Learn(t0, alpha, first.Full, "r1"); err != nil || e.Sequence != 1 || !slices.Equal(e.Publication.Streams[0].Pages, p.Streams[0].Pages) {
		t.Errorf("Learn = %+v, %v", e, err)
	}
	if e, err := b.ByName(t0, back.Name); err != nil || e.Sequence != 3 || e.HasTable {
		t.Errorf("board: %+v, %v", e, err)
	}
}
