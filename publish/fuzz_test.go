package publish

import (
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// script reads a fuzzer's bytes; at their end it reads zeros.
type script struct{ b []byte }

func (s *script) next() uint64 {
	if len(s.b) == 0 {
		return 0
	}
	v := s.b[0]
	s.b = s.b[1:]
	if v == 255 { // something great
		return 1<<64 - 1 - s.next()
	}
	return uint64(v)
}

func (s *script) take(n uint64) []byte {
	n = min(n, uint64(len(s.b)))
	b := s.b[:n]
	s.b = s.b[n:]
	return b
}

func (s *script) life() id.Life {
	v := s.next()
	return id.Life{Node: []id.Node{"alpha", "beta", "gamma", "delta"}[v%4], Incarnation: id.Incarnation(v / 4 % 4)}
}

func (s *script) batch() wire.Batch {
	l := s.life()
	b := wire.Batch{Owner: l.Node.Hash(), Incarnation: l.Incarnation, Floor: id.Sequence(s.next())}
	for range s.next() % 4 {
		p := b.Floor + id.Sequence(s.next()%16)
		a := wire.Announcement{
			Publication: p, Sequence: p + id.Sequence(s.next()%4), Request: id.Request([]byte{'r', byte(s.next() % 3)}).Hash(),
			TTLMillis: uint32(s.next()), Final: s.next()%4 == 0, ContentEpoch: uint32(s.next() % 8 / 7),
		}
		ranks, tokens := s.next(), s.next()
		r := wire.Ref{Label: id.Main, RankMask: 1 + ranks%3, Tokens: int(tokens % 100), State: uint8(ranks / 64 % 3)}
		if tokens >= 100 {
			r.Start = r.Tokens / 2
		}
		if tokens >= 200 {
			r.Prefix = r.Start / 2
		}
		a.Refs = []wire.Ref{r}
		if n := int(s.next() % 8); n > 0 {
			if r.State != uint8(manager.Resident) {
				n = 0
			}
			a.Lists, a.Pages = [][]page.Index{make([]page.Index, n)}, uint32(n)
			a.Digest = wire.Digest(a.Refs, a.Lists)
		}
		b.Announcements = append(b.Announcements, a)
	}
	last := b.Floor
	for range s.next() % 4 {
		last += id.Sequence(s.next() % 8)
		b.Releases = append(b.Releases, last)
	}
	return b
}

func (s *script) check() wire.Check {
	l := s.life()
	return wire.Check{
		Owner: l.Node.Hash(), Incarnation: l.Incarnation, Floor: id.Sequence(s.next()), Max: id.Sequence(s.next()),
		Hash: s.next(), Live: uint32(s.next() % 4), Version: s.next(),
	}
}

// FuzzBoardReceive runs a script of hostile calls on a board with small bounds.
func FuzzBoardReceive(f *testing.F) {
	l := NewLog(LogOptions{Life: id.Life{Node: "alpha", Incarnation: 1}})
	for _, item := range [][]byte{
		announce(f, l, t0, publication(1, "r", 16, true), time.Second).Full,
		release(f, l, t0, 1)[0],
		l.Tick(t0).Broadcast[0],
		l.Bye().Broadcast[0],
		wire.EncodeChecks([]wire.Check{l.Check()}),
		mustEncode(&wire.Beacon{Owner: id.Node("alpha").Hash(), Incarnation: 1, Number: 1, Modulus: 1}),
		mustEncode(&wire.Echo{From: id.Node("alpha").Hash(), Owner: id.Node("beta").Hash(), Incarnation: 2, Number: 1}),
	} {
		for op := range byte(3) {
			f.Add(append([]byte{3, 4, 1, op, byte(len(item))}, item...))
		}
	}
	// A final publication that goes to the host and comes back, in order and late.
	moves := NewLog(LogOptions{Life: id.Life{Node: "alpha", Incarnation: 1}})
	p := publication(1, "r", 40, true)
	p.Streams[0].Prefix, p.Streams[0].Start, p.Streams[0].Tokens = 16, 32, 56
	var steps [][]byte
	for _, next := range []manager.Publication{p, in(manager.OnHost, p, 0), p} {
		steps = append(steps, announce(f, moves, t0, next, time.Second).items[0])
	}
	for _, order := range [][]int{{0, 1, 2}, {1, 0, 2}, {2, 1, 0}} {
		seed := []byte{3, 4, 1}
		for _, i := range order {
			seed = append(append(seed, 0, byte(len(steps[i]))), steps[i]...)
		}
		f.Add(seed)
	}
	f.Add([]byte{3, 4, 1, 4, 4, 0, 2, 1, 0, 1, 200, 0, 0, 2, 20, 3, 3, 1, 1, 200, 0, 0, 2, 30, 0, 2, 1, 2, 7, 60, 5, 4, 0, 9, 1, 1, 3, 7, 255})
	f.Fuzz(func(t *testing.T, b []byte) {
		s := &script{b}
		board := NewBoard(BoardOptions{Life: id.Life{Node: "beta", Incarnation: 2}, Entries: 12, Window: 4, Tables: 40, Pages: 64, Fast: true})
		now := t0
		var cancels []func()
		for len(s.b) > 0 {
			switch s.next() % 10 {
			case 0:
				_, _, err := board.Receive(now, s.take(s.next()))
				typed(t, err)
			case 1:
				_, err := board.Merge(now, s.take(s.next()))
				typed(t, err)
			case 2:
				_, err := board.Learn(now, s.life(), s.take(s.next()), "r")
				typed(t, err)
			case 3:
				board.Member(now, s.life(), s.next()%2 == 1)
			case 4:
				if item, err := wire.Encode(wire.Batches{s.batch()}); err == nil {
					_, _, err := board.Receive(now, item)
					typed(t, err)
				}
			case 5:
				c := s.check()
				_, _, err := board.Receive(now, mustEncode(&c))
				typed(t, err)
			case 6:
				g := s.batch()
				if item, err := wire.Encode(wire.Batches{g}); err == nil {
					_, err := board.Learn(now, s.life(), item, "")
					typed(t, err)
				}
			case 7:
				now = now.Add(time.Duration(s.next()%256) * ms)
				for _, d := range board.Tick(now).Send {
					if len(d.Item) > wire.ItemBytes || d.To == "" {
						t.Fatalf("%d bytes to %q", len(d.Item), d.To)
					}
				}
			case 8:
				var items [][]byte
				for range s.next() % 4 {
					if item, err := wire.Encode(wire.Batches{s.batch()}); err == nil {
						items = append(items, item)
					}
				}
				c := s.check()
				typed(t, board.Sync(now, s.life(), append(items, mustEncode(&c))))
			case 9:
				switch l := s.life(); s.next() % 3 {
				case 0:
					board.Forget(id.Publication{Owner: l, Sequence: id.Sequence(s.next())})
				case 1:
					_, cancel := board.Watch("r\x00")
					cancels = append(cancels, cancel)
				case 2:
					_, _, err := board.Receive(now, mustEncode(&wire.Bye{Owner: l.Node.Hash(), Incarnation: l.Incarnation, Max: id.Sequence(s.next())}))
					typed(t, err)
				}
			}
			verify(t, board, now)
			for _, e := range board.List(now, 0) {
				if e.Name.Owner.Node == "" || e.Name.Owner.Node == "beta" {
					t.Fatalf("%+v shows", e)
				}
			}
			if n := board.Stats().Entries; n > 12 {
				t.Fatalf("%d entries", n)
			}
		}
		for _, cancel := range cancels {
			cancel()
		}
		if n := board.Stats().Watched; n != 0 {
			t.Fatalf("%d watches are left", n)
		}
	})
}

func typed(t *testing.T, err error) {
	t.Helper()
	for _, known := range []error{nil, wire.ErrMessage, wire.ErrVersion, ErrConflict, ErrEnded, ErrFull} {
		if errors.Is(err, known) {
			return
		}
	}
	t.Fatalf("untyped error %v", err)
}
