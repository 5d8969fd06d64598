package tcp

import (
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// ask sends a read of rank 0.
func ask(t testing.TB, c net.Conn, number uint64, seal transfer.Seal, copies ...transfer.Copy) {
	t.Helper()
	if _, err := c.Write(appendRequest(nil, ownerLife.Incarnation, request{id: number, seals: []transfer.Seal{seal}, copies: copies})); err != nil {
		t.Fatal(err)
	}
}

// wantFrame receives one frame.
func wantFrame(t testing.TB, c net.Conn, want header) []byte {
	t.Helper()
	h, body, err := receiveFrame(c)
	if err != nil {
		t.Fatalf("receive a frame: %v, want %+v", err, want)
	}
	if h != want {
		t.Fatalf("frame %+v, want %+v", h, want)
	}
	return body
}

func verdictOf(number uint64, v verdict) header {
	return header{kind: kindVerdict, owner: ownerLife.Incarnation, request: number, aux: uint32(v)}
}

func dataOf(number uint64, n uint32) header {
	return header{kind: kindData, owner: ownerLife.Incarnation, request: number, length: n}
}

// wantEnd wants the connection ended without another byte.
func wantEnd(t testing.TB, c net.Conn) {
	t.Helper()
	n, err := io.Copy(io.Discard, c)
	if n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("%d more bytes, then %v, want the end", n, err)
	}
}

// The seal ends while the answer is on its way: the verdict after the bytes is
// stale, since it is of the moment when the last byte was copied out.
func TestVerdictIsOfTheEnd(t *testing.T) { bothWays(t, testVerdictIsOfTheEnd) }

func testVerdictIsOfTheEnd(t *testing.T, o, r Options) {
	const size = 16 << 20 // more than the socket buffers of both sides
	owner, _ := newPair(t, size, o, r)
	seal := owner.hold(1, 1)
	c := greetedBy(t, owner, r.Identity)
	ask(t, c, 1, seal, transfer.Copy{Bytes: size})
	h := make([]byte, headerBytes)
	if _, err := io.ReadFull(c, h); err != nil {
		t.Fatal(err)
	}
	owner.local.Seals.Store(1, 0)
	if _, err := io.CopyN(io.Discard, c, size); err != nil {
		t.Fatal(err)
	}
	wantFrame(t, c, verdictOf(1, verdictStale))
	if s := owner.t.Stats(); s.ServedStale != 1 || s.ServedBytes != size {
		t.Errorf("stats %+v", s)
	}
}

// Not a byte of a publication that is over is given.
func TestNotHeldGetsNoByte(t *testing.T) {
	owner, _ := newPair(t, 1<<20, Options{}, Options{})
	c := greeted(t, owner)
	for i, n := range []int64{0, 1, smallAnswer, smallAnswer + 1, 1 << 20} {
		number := uint64(i)
		var copies []transfer.Copy
		if n > 0 {
			copies = []transfer.Copy{{Bytes: n}}
		}
		ask(t, c, number, transfer.Seal{Index: 1, Value: 77}, copies...)
		wantFrame(t, c, verdictOf(number, verdictStale))
		ask(t, c, number+100, transfer.Seal{Index: 1, Value: 0}, copies...)
		wantFrame(t, c, verdictOf(number+100, verdictStale))
	}
	if s := owner.t.Stats(); s.ServedBytes != 0 || s.ServedStale != 10 {
		t.Errorf("stats %+v", s)
	}
}

// Requests that are sent ahead are answered in order, small ones and large.
func TestRequestsAhead(t *testing.T) { bothWays(t, testRequestsAhead) }

func testRequestsAhead(t *testing.T, o, r Options) {
	owner, _ := newPair(t, 1<<20, o, r)
	seal := owner.hold(1, 1)
	c := greetedBy(t, owner, r.Identity)
	sizes := []int64{1, smallAnswer, smallAnswer + 1, 300_000, 5}
	for i, n := range sizes {
		ask(t, c, uint64(i), seal, transfer.Copy{Remote: int64(i), Bytes: n - n/2}, transfer.Copy{Remote: 1000, Bytes: max(1, n/2)})
	}
	for i, n := range sizes {
		want := slices.Concat(owner.arena()[i:i+int(n-n/2)], owner.arena()[1000:1000+max(1, n/2)])
		if got := wantFrame(t, c, dataOf(uint64(i), uint32(len(want)))); !slices.Equal(got, want) {
			t.Errorf("answer %d has other bytes", i)
		}
		wantFrame(t, c, verdictOf(uint64(i), verdictHeld))
	}
}

func TestOutOfRangeIsRefused(t *testing.T) {
	const size = 1 << 20
	owner, _ := newPair(t, size, Options{}, Options{})
	seal := owner.hold(1, 1)
	c := greeted(t, owner)
	for i, bad := range []transfer.Copy{
		{Remote: size, Bytes: 1},
		{Remote: size - 1, Bytes: 2},
		{Remote: -1, Bytes: 1},       // 2^64-1 on the wire
		{Remote: -1 << 63, Bytes: 1}, // 2^63
		{Remote: 1<<63 - 1, Bytes: 1 << 20},
		{Remote: 1 << 32, Bytes: 1},
		{Rank: 1, Bytes: 1},
		{Rank: 63, Bytes: 1},
	} {
		ask(t, c, uint64(i), seal, transfer.Copy{Bytes: 10}, bad)
		wantFrame(t, c, verdictOf(uint64(i), verdictRange))
	}
	ask(t, c, 50, transfer.Seal{Index: 1 << 30, Value: 1})
	wantFrame(t, c, verdictOf(50, verdictRange))
	ask(t, c, 51, seal, transfer.Copy{Bytes: 10}) // the connection is good
	wantFrame(t, c, dataOf(51, 10))
	if s := owner.t.Stats(); s.OutOfRange != 9 || s.Garbage != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestGarbageEndsTheConnection(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{}, Options{})
	seal := owner.hold(1, 1)
	link := open(t, reader, owner.peer())
	good := hello{owner: ownerLife, reader: readerLife}.encode()
	read := appendRequest(nil, ownerLife.Incarnation, request{seals: []transfer.Seal{seal}, copies: []transfer.Copy{{Bytes: 1}}})
	change := func(b []byte, at int, to ...byte) []byte {
		b = slices.Clone(b)
		copy(b[at:], to)
		return b
	}
	random := make([]byte, 4096)
	for i := range random {
		random[i] = byte(rand.Uint32())
	}
	random[0] = 'x'
	for name, b := range map[string][]byte{
		"http":                      []byte("GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n"),
		"random":                    random,
		"zeros":                     make([]byte, 100),
		"hello of 4 GiB":            change(good, 24, 0xff, 0xff, 0xff, 0xff),
		"hello of a longer name":    change(good, headerBytes, 255),
		"hello of a bad name":       change(good, headerBytes+1, 0xff),
		"hello too short":           change(good, 27, byte(len(good)-headerBytes-1)),
		"hello of another version":  change(good, 3, 9),
		"a read first":              read,
		"a welcome first":           appendWelcome(nil, welcome{owner: ownerLife, bytes: 1, copies: 1, seals: 1, inFlight: 1}),
		"hello, hello":              slices.Concat(good, good),
		"hello, random":             slices.Concat(good, random),
		"hello, read of 4 GiB":      slices.Concat(good, change(read, 24, 0xff, 0xff, 0xff, 0xff)),
		"hello, read without seals": slices.Concat(good, change(read, headerBytes, 0, 0, 0, 0)),
		"hello, read, random":       slices.Concat(good, read, random),
	} {
		before := owner.t.Stats().Garbage
		c, err := dial(owner.t.Bound())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" is not counted", func() bool { return owner.t.Stats().Garbage == before+1 })
		eventually(t, name+" is still connected", func() bool { return owner.t.Stats().Accepted == 1 })
		_ = c.Close()
		if err := link.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 10}}); err != nil {
			t.Fatalf("after %s, a good read: %v", name, err)
		}
	}
}

// A frame that stops in the middle ends with a deadline.
func TestUnfinishedRequestEnds(t *testing.T) {
	owner, _ := newPair(t, 4096, Options{Limits: transfer.Limits{Dial: 50 * time.Millisecond, Stall: 50 * time.Millisecond}, Idle: 100 * time.Millisecond}, Options{})
	seal := owner.hold(1, 1)
	for name, b := range map[string][]byte{
		"nothing":      nil,
		"half a hello": hello{owner: ownerLife, reader: readerLife}.encode()[:40],
		"only a hello": hello{owner: ownerLife, reader: readerLife}.encode(),
		"half a read":  append(hello{owner: ownerLife, reader: readerLife}.encode(), appendRequest(nil, ownerLife.Incarnation, request{seals: []transfer.Seal{seal}})[:40]...),
	} {
		c, err := dial(owner.t.Bound())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s keeps the connection for ever", name)
		}
		_ = c.Close()
	}
	eventually(t, "connections are left", func() bool { return owner.t.Stats().Accepted == 0 })
	if s := owner.t.Stats(); s.Garbage != 0 {
		t.Errorf("a slow peer counts as garbage: %+v", s)
	}
}

// A reader that takes nothing loses its connection.
func TestMuteReaderEnds(t *testing.T) {
	bothWays(t, func(t *testing.T, o, r Options) {
		testSlowReader(t, o, r, transfer.Limits{Stall: 3 * time.Second}, 0)
	})
}

// So does one that takes some now and then, when its answer takes too long.
func TestSlowReaderEnds(t *testing.T) {
	bothWays(t, func(t *testing.T, o, r Options) {
		testSlowReader(t, o, r, transfer.Limits{Stall: time.Minute, Base: 3 * time.Second, Rate: 1 << 40}, 16<<10)
	})
}

// One that goes on taking some keeps its connection, though the kernel's buffer is
// full for longer than the stall time at a stretch; one that takes nothing loses it.
func TestSteadyReaderKeepsItsConnection(t *testing.T) {
	const stall = time.Hour // its end is made
	ends := make(chan net.Conn, 1)
	address := script(t, func(c net.Conn) {
		ends <- c
		<-t.Context().Done()
	})
	conn, err := dial(addrs(address.String())[0])
	if err != nil {
		t.Fatal(err)
	}
	w, err := newWire(conn.(*net.TCPConn))
	if err != nil {
		t.Fatal(err)
	}
	defer w.abort()
	c, reader := newServed(w, stall), <-ends
	c.begin(transfer.Limits{Stall: stall, Base: stall}, 0)
	fill := func() { // until the reader must take something, and the kernels are at rest
		b, same := make([]byte, 64<<10), 0
		eventually(t, "the buffers are not full", func() bool {
			for full := false; !full; {
				err := c.raw.Write(func(fd uintptr) bool {
					_, err := unix.Write(int(fd), b)
					full = errors.Is(err, unix.EAGAIN)
					return true
				})
				if err != nil {
					t.Fatal(err)
				}
			}
			if same++; c.unacknowledged() != c.untaken {
				c.extend(stall)
				same = 0
			}
			return same == 10
		})
	}
	for range 3 {
		fill()
		for c.unacknowledged() >= c.untaken { // the kernel tells of many bytes at a time
			if _, err := io.CopyN(io.Discard, reader, 16<<10); err != nil {
				t.Fatal(err)
			}
		}
		_ = c.tcp.SetWriteDeadline(time.Unix(1, 0))
		taken := make(chan error, 1)
		go func() {
			_, err := io.Copy(io.Discard, reader)
			taken <- err
		}()
		if err := c.write([]byte{1}); err != nil {
			t.Errorf("a reader that has taken some: %v", err)
		}
		_ = reader.SetReadDeadline(time.Unix(1, 0))
		if err := <-taken; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
		_ = reader.SetReadDeadline(time.Time{})
	}
	fill()
	_ = c.tcp.SetWriteDeadline(time.Unix(1, 0))
	if err := c.write([]byte{1}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a reader that has taken nothing: %v, want the deadline", err)
	}
}

// testSlowReader has limits that nobody else meets on a busy machine.
func testSlowReader(t *testing.T, o, r Options, limits transfer.Limits, sip int) {
	t.Parallel() // it takes its time, and nothing else
	const size = 16 << 20
	o.Limits = limits
	owner, reader := newPair(t, size, o, r)
	seal := owner.hold(1, 1)
	slow := greetedBy(t, owner, r.Identity)
	ask(t, slow, 1, seal, transfer.Copy{Bytes: size})
	var work sync.WaitGroup
	defer work.Wait()
	stop := make(chan struct{})
	defer close(stop)
	work.Go(func() {
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
				if _, err := slow.Read(make([]byte, sip)); err != nil {
					return
				}
			}
		}
	})
	// Meanwhile others are served.
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 100}}); err != nil {
		t.Error(err)
	}
	eventually(t, "the slow reader is still served", func() bool { return owner.t.Stats().Accepted == 1 })
	if s := owner.t.Stats(); s.ServedBytes != 100 {
		t.Errorf("stats %+v, want that the slow answer was never whole", s)
	}
}

// Where there are too many connections, the one that waited longest makes room,
// and its link connects again.
func TestTooManyConnections(t *testing.T) { bothWays(t, testTooManyConnections) }

func testTooManyConnections(t *testing.T, o, r Options) {
	o.MaxConns = 3
	owner, reader := newPair(t, 1<<20, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	oldest := greetedBy(t, owner, r.Identity)
	var links []transfer.Link
	for range 6 {
		links = append(links, open(t, reader, owner.peer()))
	}
	for round := range 3 {
		for i, l := range links {
			if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 1000}}); err != nil {
				t.Errorf("round %d, link %d: %v", round, i, err)
			}
		}
	}
	wantEnd(t, oldest)
	s := owner.t.Stats()
	if s.Accepted > 3 || s.Evicted == 0 || s.Refused != 0 {
		t.Errorf("stats %+v", s)
	}
}

// If all are at work, a new one is refused and nobody is disturbed.
func TestAllConnectionsAtWork(t *testing.T) {
	const size = 16 << 20
	owner, reader := newPair(t, size, Options{MaxConns: 2}, Options{})
	seal := owner.hold(1, 1)
	busy := []net.Conn{greeted(t, owner), greeted(t, owner)}
	for _, c := range busy {
		ask(t, c, 1, seal, transfer.Copy{Bytes: size})
		if _, err := io.ReadFull(c, make([]byte, headerBytes)); err != nil {
			t.Fatal(err)
		}
	}
	if l, err := reader.t.Open(short(t), owner.peer()); err == nil {
		t.Error("a connection beyond the bound is served")
		_ = l.Close()
	}
	for _, c := range busy {
		if _, err := io.CopyN(io.Discard, c, size); err != nil {
			t.Fatal(err)
		}
		wantFrame(t, c, verdictOf(1, verdictHeld))
	}
	if s := owner.t.Stats(); s.Refused != 1 || s.Evicted != 0 {
		t.Errorf("stats %+v", s)
	}
}

// A storm of first contacts is served.
func TestStorm(t *testing.T) { bothWays(t, testStorm) }

func testStorm(t *testing.T, o, r Options) {
	owner, reader := newPair(t, 1<<20, o, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	var work sync.WaitGroup
	for i := range 64 {
		work.Go(func() {
			l, err := reader.t.Open(short(t), owner.peer())
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = l.Close() }()
			if err := l.Read(short(t), seals, []transfer.Copy{{Local: int64(i) * 1000, Bytes: 1000}}); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
}

// Both directions carry the owner's incarnation; a request for another life
// that comes in the middle is refused, and the connection is over.
func TestAnotherLifeIsRefused(t *testing.T) {
	owner, _ := newPair(t, 4096, Options{}, Options{})
	seal := owner.hold(1, 1)
	later := ownerLife.Incarnation + 1

	c := greeted(t, owner)
	b := appendRequest(nil, later, request{id: 5, seals: []transfer.Seal{seal}, copies: []transfer.Copy{{Bytes: 10}}})
	if _, err := c.Write(b); err != nil {
		t.Fatal(err)
	}
	wantFrame(t, c, verdictOf(5, verdictIdentity))
	wantEnd(t, c)

	for _, life := range []id.Life{{Node: "owner", Incarnation: later}, {Node: "other", Incarnation: ownerLife.Incarnation}} {
		c, err := dial(owner.t.Bound())
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write(hello{owner: life, reader: readerLife}.encode()); err != nil {
			t.Fatal(err)
		}
		wantFrame(t, c, verdictOf(0, verdictIdentity))
		wantEnd(t, c)
		_ = c.Close()
	}
	if s := owner.t.Stats(); s.Strangers != 3 {
		t.Errorf("stats %+v", s)
	}
}
