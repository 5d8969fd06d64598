package tcp

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// largeRead is enough for four lanes, in chunks that lie in other places on
// both sides.
const largeRead = 16 << 20

// large is a read of all of an arena of largeRead bytes.
func large() []transfer.Copy {
	const chunk = 64 << 10
	remote, local := rand.Perm(largeRead/chunk), rand.Perm(largeRead/chunk)
	copies := make([]transfer.Copy, len(remote))
	for i := range copies {
		copies[i] = transfer.Copy{Remote: int64(remote[i]) * chunk, Local: int64(local[i]) * chunk, Bytes: chunk}
	}
	return copies
}

// landed wants the bytes of the owner where the copies are.
func landed(t testing.TB, owner, reader *node, copies []transfer.Copy) {
	t.Helper()
	for _, c := range copies {
		if !bytes.Equal(reader.arena()[c.Local:c.Local+c.Bytes], owner.arena()[c.Remote:c.Remote+c.Bytes]) {
			t.Fatalf("other bytes at %d", c.Local)
		}
	}
}

// A large read has so many lanes as are wanted, free, and worth it; a small one
// has one.
func TestLanes(t *testing.T) { bothWays(t, testLanes) }

func testLanes(t *testing.T, o, r Options) {
	for _, tt := range []struct {
		lanes, conns, want int
		bytes              int64
	}{
		{lanes: 1, conns: 4, bytes: largeRead, want: 1},
		{lanes: 3, conns: 4, bytes: largeRead, want: 3},
		{lanes: 8, conns: 2, bytes: largeRead, want: 2},
		{lanes: 8, conns: 8, bytes: largeRead, want: 4},
		{lanes: 3, conns: 4, bytes: 2*laneBytes - 1, want: 1},
		{lanes: 3, conns: 4, bytes: 10, want: 1},
	} {
		r.Lanes, r.LinkConns = tt.lanes, tt.conns
		owner, reader := newPair(t, largeRead, o, r)
		seals := []transfer.Seal{owner.hold(1, 1)}
		l := open(t, reader, owner.peer()).(*link)
		for range tt.want - 1 {
			c, err := l.dial(short(t))
			if err != nil {
				t.Fatal(err)
			}
			l.push(c)
		}
		copies := large()
		if tt.bytes < largeRead {
			copies = []transfer.Copy{{Bytes: tt.bytes}}
		}
		for range 3 {
			clear(reader.arena())
			if err := l.Read(short(t), seals, copies); err != nil {
				t.Fatalf("%+v: %v", tt, err)
			}
			landed(t, owner, reader, copies)
		}
		if s := reader.t.Stats(); s.Dialled != tt.want || s.Reads != 3 || s.ReadBytes != uint64(3*tt.bytes) {
			t.Errorf("%+v: stats %+v", tt, s)
		}
	}
}

// Lanes whose owner announces unlike bounds share a read all the same.
func TestLanesOfUnlikeBounds(t *testing.T) {
	owner, reader := newPair(t, largeRead, Options{}, Options{Lanes: 3})
	seals := []transfer.Seal{owner.hold(1, 1), owner.hold(2, 2)}
	l := open(t, reader, owner.peer()).(*link)
	for _, offer := range []welcome{
		{bytes: 5000, copies: 3, seals: 2, inFlight: 1},
		{bytes: 100_000, copies: 1, seals: 2, inFlight: 2},
	} {
		offer.owner = ownerLife
		other := owner.listen(t, Options{})
		other.server.mu.Lock()
		other.server.offer = offer
		other.server.mu.Unlock()
		l.addresses = []netip.AddrPort{other.Bound()}
		c, err := l.dial(short(t))
		if err != nil {
			t.Fatal(err)
		}
		l.push(c)
	}
	for range 5 {
		copies := large()
		clear(reader.arena())
		if err := l.Read(short(t), seals, copies); err != nil {
			t.Fatal(err)
		}
		landed(t, owner, reader, copies)
	}
	if n := reader.t.Stats().Dialled; n != 3 {
		t.Errorf("%d connections, want 3", n)
	}
}

// When a lane dies in mid-read the read ends at once with its error, the other
// lanes with it, and nothing lands any more.
func TestLaneDies(t *testing.T) { bothWays(t, testLaneDies) }

func testLaneDies(t *testing.T, o, r Options) {
	r.Lanes = 3
	owner, reader := newPair(t, largeRead, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	p := newProxy(t, owner.t.Bound())
	for i := range 6 {
		// The others fall silent, or they may have read all before it dies.
		p.set(cut{up: -1, down: 100_000, mute: true})
		l := open(t, reader, at(owner.peer(), p.address)).(*link)
		c, err := l.dial(short(t))
		if err != nil {
			t.Fatal(err)
		}
		l.push(c)
		p.set(cut{up: -1, down: 20_000 + i*150_000})
		if c, err = l.dial(short(t)); err != nil {
			t.Fatal(err)
		}
		l.push(c) // what is pushed last is popped first
		p.set(cut{up: -1, down: -1})
		copies := large()
		err = l.Read(short(t), seals, copies)
		fill(reader.arena(), []byte{0xcc})
		if !broken(err) {
			t.Fatalf("Read: %v, want a broken connection", err)
		}
		if e, ok := errors.AsType[*transfer.Error](err); !ok || e.Address != p.address.String() || e.Done <= 0 || e.Done >= e.Total {
			t.Errorf("Read: %+v", err)
		}
		untouched(t, reader)
		if err := l.Read(short(t), seals, copies); err != nil {
			t.Errorf("the next read: %v", err)
		}
		landed(t, owner, reader, copies)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		fill(reader.arena(), []byte{0xcc})
	}
}

// fakeOwner answers every request with zeros, and the verdict of the n-th connection,
// from 0, once both of two have been asked.
func fakeOwner(t testing.TB, of func(n int) verdict) net.Addr {
	var conns, asked atomic.Int32
	both := make(chan struct{})
	return script(t, func(c net.Conn) {
		v := of(int(conns.Add(1) - 1))
		if greet(c) != nil {
			return
		}
		for first := true; ; first = false {
			h, body, err := receiveFrame(c)
			var r request
			if err != nil || r.parse(h, body) != nil {
				return
			}
			if first && asked.Add(1) == 2 {
				close(both)
			}
			select {
			case <-both:
			case <-t.Context().Done():
				return
			}
			b := appendHeader(nil, dataOf(h.request, uint32(r.bytes())))
			b = append(b, make([]byte, r.bytes())...)
			if _, err := c.Write(appendHeader(b, verdictOf(h.request, v))); err != nil {
				return
			}
		}
	})
}

// A read holds if every lane's verdicts do: one that is stale is enough.
func TestLaneIsStale(t *testing.T) {
	for _, tt := range []struct {
		second verdict
		want   error
	}{{verdictHeld, nil}, {verdictStale, transfer.ErrStale}} {
		address := fakeOwner(t, func(n int) verdict {
			if n == 1 {
				return tt.second
			}
			return verdictHeld
		})
		reader := newNode(t, readerLife, largeRead)
		reader.listen(t, Options{Lanes: 2})
		peer := at(transfer.Peer{Life: ownerLife, ArenaBytes: map[id.Rank]int64{0: largeRead}}, address)
		l := open(t, reader, peer).(*link)
		c, err := l.dial(short(t))
		if err != nil {
			t.Fatal(err)
		}
		l.push(c)
		if err := l.Read(short(t), []transfer.Seal{{Value: 1}}, large()); !errors.Is(err, tt.want) {
			t.Errorf("the second lane's verdict is %d: Read: %v, want %v", tt.second, err, tt.want)
		}
		s := reader.t.Stats()
		if (s.Stale == 1) != (tt.want != nil) || (s.Reads == 1) != (tt.want == nil) {
			t.Errorf("stats %+v", s)
		}
	}
}

// Whenever a read with lanes is cancelled: once it has returned nothing lands.
func TestCancelWithLanes(t *testing.T) { bothWays(t, testCancelWithLanes) }

func testCancelWithLanes(t *testing.T, o, r Options) {
	r.Lanes = 3
	owner, reader := newPair(t, largeRead, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	rounds := 10
	if *soak >= time.Minute {
		rounds = 200
	}
	cancelled := 0
	for n := 0; n < rounds || cancelled == 0 && n < 20*rounds; n++ {
		ctx, cancel := context.WithTimeout(t.Context(), rand.N(10*time.Millisecond))
		err := l.Read(ctx, seals, large())
		cancel()
		fill(reader.arena(), []byte{0xcc})
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("Read: %v", err)
		}
		if err != nil {
			cancelled++
		}
		untouched(t, reader)
	}
	if cancelled == 0 {
		t.Error("no read was cancelled")
	}
	copies := large()
	if err := l.Read(short(t), seals, copies); err != nil {
		t.Fatal(err)
	}
	landed(t, owner, reader, copies)
}

// An owner that takes one connection, and hangs up on others or never answers
// them, is read over that one, and the read waits for no other.
func TestLanesAreNoCondition(t *testing.T) {
	for name, other := range map[string]func(net.Conn){
		"hangs up":  func(net.Conn) {},
		"is silent": func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
	} {
		owner, reader := newPair(t, largeRead, Options{}, Options{Lanes: 3, Limits: transfer.Limits{Dial: 30 * time.Second}})
		seals := []transfer.Seal{owner.hold(1, 1)}
		var conns atomic.Int32
		address := script(t, func(c net.Conn) {
			if conns.Add(1) > 1 {
				other(c)
				return
			}
			to, err := dial(owner.t.Bound())
			if err != nil {
				return
			}
			defer func() { _ = to.Close() }()
			done := make(chan struct{})
			go func() {
				defer close(done)
				_, _ = io.Copy(to, c)
				_ = to.Close()
			}()
			_, _ = io.Copy(c, to)
			_ = c.Close()
			<-done
		})
		l := open(t, reader, at(owner.peer(), address))
		for range 3 {
			copies := large()
			started := time.Now()
			if err := l.Read(short(t), seals, copies); err != nil {
				t.Fatalf("the owner %s: %v", name, err)
			}
			if took := time.Since(started); took > 20*time.Second {
				t.Errorf("the owner %s: Read took %v", name, took)
			}
			landed(t, owner, reader, copies)
		}
		if s := reader.t.Stats(); s.Dialled != 1 {
			t.Errorf("the owner %s: stats %+v", name, s)
		}
	}
}

// Lanes over connections that have died while they were idle cost new ones, not
// an error.
func TestIdleLanesEnd(t *testing.T) { bothWays(t, testIdleLanesEnd) }

func testIdleLanesEnd(t *testing.T, o, r Options) {
	r.Lanes = 3
	owner, reader := newPair(t, largeRead, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	for range 3 {
		copies := large()
		if err := l.Read(short(t), seals, copies); err != nil {
			t.Fatal(err)
		}
		landed(t, owner, reader, copies)
		owner.t.server.mu.Lock()
		for c := range owner.t.server.conns {
			if err := c.tcp.Close(); err != nil {
				t.Error(err)
			}
		}
		owner.t.server.mu.Unlock()
		eventually(t, "dead connections stay", func() bool { return owner.t.Stats().Accepted == 0 })
	}
}

// A life after the other, with reads that end well and reads that the end of
// the owner ends: neither descriptors nor goroutines are left of them.
func TestRestartsLeaveNothing(t *testing.T) {
	reader := newNode(t, readerLife, largeRead)
	reader.listen(t, Options{Lanes: 3})
	owner := newNode(t, ownerLife, largeRead)
	seals := []transfer.Seal{owner.hold(1, 1)}
	copies := large()
	life := func() {
		tr, err := Listen(Options{Local: owner.local, Bind: netip.MustParseAddrPort("127.0.0.1:0")})
		if err != nil {
			t.Fatal(err)
		}
		owner.t = tr
		l, err := reader.t.Open(short(t), owner.peer())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Read(short(t), seals, copies[:len(copies)/2]); err != nil {
			t.Error(err)
		}
		done := make(chan error, 1)
		go func() { done <- l.Read(short(t), seals, copies) }()
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
		<-done // well or not
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	open := func() int {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(fds)
	}
	for range 5 {
		life()
	}
	fds, goroutines, lives := open(), runtime.NumGoroutine(), 30
	if *soak >= time.Minute {
		lives = 200
	}
	for range lives {
		life()
	}
	eventually(t, "descriptors are left", func() bool { return open() <= fds })
	eventually(t, "goroutines are left", func() bool { return runtime.NumGoroutine() <= goroutines })
}
