package tcp

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

func newDevice(t testing.TB, o transfertest.DeviceOptions) *transfertest.Device {
	d := transfertest.NewDevice(o)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// newDeviceNode is a node whose arena, of random bytes, is on a device.
func newDeviceNode(t testing.TB, life id.Life, size int64, d *transfertest.Device) (n *node, content []byte) {
	t.Helper()
	n = newNode(t, life, 4096)
	a, err := d.Alloc(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	n.local.Arenas = map[id.Rank]memory.Arena{0: a}
	content = make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(content)
	transfertest.Poke(a, 0, content)
	return n, content
}

// While the wire takes nothing the device copies on, as far ahead as there are
// buffers; and while the device copies nothing the wire takes what it has copied.
func TestGatherOverlapsTheWire(t *testing.T) {
	const size = 4 << 20
	for name, bytesOf := range map[string]int64{"4 MiB": size, "1 MiB": 1 << 20} {
		t.Run(name, func(t *testing.T) {
			d := newDevice(t, transfertest.DeviceOptions{})
			defer d.Release()
			owner, content := newDeviceNode(t, ownerLife, size, d)
			owner.listen(t, Options{})
			seal := owner.hold(1, 1)
			c := greeted(t, owner)
			// The sockets hold less than a piece.
			if err := errors.Join(c.(interface{ SetReadBuffer(int) error }).SetReadBuffer(32<<10), shrink(owner.t)); err != nil {
				t.Fatal(err)
			}
			ask(t, c, 1, seal, transfer.Copy{Bytes: bytesOf})
			eventually(t, "the device does not copy on while the wire takes nothing", func() bool {
				n := d.Counts()
				return n.Calls[transfertest.ToHost] == stagedAhead && n.Live == 0
			})
			d.Hold(transfertest.ToHost)
			got := make([]byte, headerBytes+bytesOf+headerBytes)
			for at, piece := 0, 1; at < len(got); piece++ {
				if piece > stagedAhead {
					d.Let(transfertest.ToHost, 1)
				}
				end := headerBytes + piece*stagedBytes
				if end+headerBytes == len(got) {
					end = len(got)
				}
				if _, err := io.ReadFull(c, got[at:end]); err != nil {
					t.Fatalf("piece %d, while the device does not copy the next: %v", piece, err)
				}
				at = end
			}
			if !bytes.Equal(got[headerBytes:headerBytes+bytesOf], content[:bytesOf]) {
				t.Error("other bytes")
			}
			if n, want := d.Counts().Calls[transfertest.ToHost], int(bytesOf/stagedBytes); n != want {
				t.Errorf("the device got %d calls, want one a buffer, %d", n, want)
			}
		})
	}
}

// shrink gives the connections of a server small buffers.
func shrink(t *Transport) error {
	t.server.mu.Lock()
	defer t.server.mu.Unlock()
	var err error
	for c := range t.server.conns {
		err = errors.Join(err, c.tcp.SetWriteBuffer(32<<10))
	}
	return err
}

// The same of a read: while the reader's device copies nothing the wire brings
// more, and while the owner's copies nothing the reader's copies what has come.
func TestScatterOverlapsTheWire(t *testing.T) {
	const size = 4 << 20
	d, e := newDevice(t, transfertest.DeviceOptions{}), newDevice(t, transfertest.DeviceOptions{})
	defer d.Release()
	defer e.Release()
	owner, content := newDeviceNode(t, ownerLife, size, d)
	reader, _ := newDeviceNode(t, readerLife, size, e)
	owner.listen(t, Options{})
	reader.listen(t, Options{Lanes: 1})
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	read := func() <-chan error {
		done := make(chan error, 1)
		go func() { done <- link.Read(short(t), seals, []transfer.Copy{{Bytes: size}}) }()
		return done
	}
	e.Hold(transfertest.FromHost)
	done := read()
	eventually(t, "nothing more comes while the reader's device does not copy", func() bool {
		n := e.Counts()
		return n.Calls[transfertest.FromHost] == stagedAhead && n.Live == stagedAhead
	})
	e.Release()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	got := make([]byte, size)
	transfertest.Peek(reader.local.Arenas[0], 0, got)
	if !bytes.Equal(got, content) {
		t.Error("other bytes")
	}

	before := e.Counts().Calls[transfertest.FromHost]
	d.Hold(transfertest.ToHost)
	done = read()
	for piece := range size / stagedBytes {
		d.Let(transfertest.ToHost, 1)
		eventually(t, "the reader's device does not copy what has come while the owner's does not copy the next", func() bool {
			n := e.Counts()
			return n.Calls[transfertest.FromHost]-before == piece+1 && n.Live == 0
		})
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A read of many pages costs each device one call a buffer, and every buffer is
// pinned.
func TestStagedCalls(t *testing.T) { bothWays(t, testStagedCalls) }

func testStagedCalls(t *testing.T, o, r Options) {
	const page = 4 << 10
	d, e := newDevice(t, transfertest.DeviceOptions{}), newDevice(t, transfertest.DeviceOptions{})
	owner, content := newDeviceNode(t, ownerLife, 8<<20, d)
	reader, _ := newDeviceNode(t, readerLife, 8<<20, e)
	owner.listen(t, o)
	reader.listen(t, r)
	seals := []transfer.Seal{owner.hold(1, 1)}
	link := open(t, reader, owner.peer())
	for _, tt := range []struct{ pages, calls int }{{1, 1}, {64, 1}, {65, 2}, {256, 4}} {
		remote, local := rand.Perm(2048)[:tt.pages], rand.Perm(2048)[:tt.pages]
		copies := make([]transfer.Copy, tt.pages)
		for i := range copies {
			copies[i] = transfer.Copy{Remote: int64(remote[i]) * page, Local: int64(local[i]) * page, Bytes: page}
		}
		was, have := [2]transfertest.Counts{d.Counts(), e.Counts()}, [2]Stats{owner.t.Stats(), reader.t.Stats()}
		if err := link.Read(short(t), seals, copies); err != nil {
			t.Fatal(err)
		}
		for _, c := range copies {
			got := make([]byte, page)
			transfertest.Peek(reader.local.Arenas[0], c.Local, got)
			if !bytes.Equal(got, content[c.Remote:c.Remote+page]) {
				t.Fatalf("other bytes at %d", c.Local)
			}
		}
		now, has := [2]transfertest.Counts{d.Counts(), e.Counts()}, [2]Stats{owner.t.Stats(), reader.t.Stats()}
		out, in := now[0].Calls[transfertest.ToHost]-was[0].Calls[transfertest.ToHost], now[1].Calls[transfertest.FromHost]-was[1].Calls[transfertest.FromHost]
		if out != tt.calls || in != tt.calls {
			t.Errorf("%d pages cost %d and %d calls, want %d", tt.pages, out, in, tt.calls)
		}
		if now[0].Slow+now[1].Slow > 0 {
			t.Errorf("buffers are not pinned: %+v", now)
		}
		if n := uint64(tt.pages * page); has[0].Gathered-have[0].Gathered != n || has[1].Scattered-have[1].Scattered != n || has[1].ReadBytes-have[1].ReadBytes != n {
			t.Errorf("%d pages: stats %+v, then %+v", tt.pages, have, has)
		}
	}
	idle(t, owner.t)
	idle(t, reader.t)
}

// idle wants every buffer back in its pool.
func idle(t testing.TB, of *Transport) {
	t.Helper()
	eventually(t, "buffers are in use", func() bool { return of.staging.out.Lent()+of.staging.in.Lent() == 0 })
}

// Host memory needs no pool; memory that cannot be pinned is no failure, and is
// told.
func TestStagingPool(t *testing.T) {
	host := newNode(t, ownerLife, 4096)
	if s := host.listen(t, Options{}).Stats(); s.Staging != 0 || s.Pinned {
		t.Errorf("host memory: %+v", s)
	}
	for _, tt := range []struct {
		staging, want int64
		refuse        error
	}{{0, transfer.DefaultStaging, nil}, {8 << 20, 8 << 20, nil}, {1, 1 << 20, nil}, {0, transfer.DefaultStaging, errors.New("memory lock limit")}} {
		d := newDevice(t, transfertest.DeviceOptions{Pin: tt.refuse})
		n, _ := newDeviceNode(t, ownerLife, 4096, d)
		tr := n.listen(t, Options{Staging: tt.staging})
		if s := tr.Stats(); s.Staging != tt.want || s.Pinned != (tt.refuse == nil) {
			t.Errorf("%+v: %d bytes, pinned %v", tt, s.Staging, s.Pinned)
		}
		for range 2 {
			if err := tr.Close(); err != nil {
				t.Error(err)
			}
		}
		if p := d.Counts().Pinned; p != 0 {
			t.Errorf("%d bytes are pinned after Close", p)
		}
	}
}

// An owner whose device fails says so, whatever it has sent before, and the
// connection goes on.
func TestOwnersDeviceFails(t *testing.T) { bothWays(t, testOwnersDeviceFails) }

func testOwnersDeviceFails(t *testing.T, o, r Options) {
	const size = 4 << 20
	for _, passed := range []int{0, 1, 7, size/stagedBytes - 1} {
		d := newDevice(t, transfertest.DeviceOptions{})
		owner, content := newDeviceNode(t, ownerLife, size, d)
		owner.listen(t, o)
		reader := newNode(t, readerLife, size)
		r.Lanes = 1
		reader.listen(t, r)
		seals := []transfer.Seal{owner.hold(1, 1)}
		link := open(t, reader, owner.peer())
		d.Hold(transfertest.ToHost)
		done := make(chan error, 1)
		go func() { done <- link.Read(short(t), seals, []transfer.Copy{{Bytes: size}}) }()
		d.Let(transfertest.ToHost, passed)
		eventually(t, "copies have not passed", func() bool {
			n := d.Counts()
			return n.Calls[transfertest.ToHost]-n.Live >= passed && n.Live > 0
		})
		d.Fail(errors.New("an illegal address"))
		d.Release(transfertest.ToHost)
		err := <-done
		if !errors.Is(err, errDevice) || !strings.Contains(err.Error(), "refused by the owner: device memory cannot be read") {
			t.Errorf("after %d copies: Read: %v, want what the owner says", passed, err)
		}
		if passed > 0 && !bytes.Equal(reader.arena()[:passed*stagedBytes], content[:passed*stagedBytes]) {
			t.Errorf("other bytes")
		}
		if rest := reader.arena()[passed*stagedBytes : size]; !bytes.Equal(rest, make([]byte, len(rest))) {
			t.Error("bytes came that the device did not give")
		}
		d.Fail(nil)
		if err := link.Read(short(t), seals, []transfer.Copy{{Bytes: size}}); err != nil || !bytes.Equal(reader.arena()[:size], content) {
			t.Errorf("the next read: %v", err)
		}
		if s := reader.t.Stats(); s.Dialled != 1 {
			t.Errorf("%d connections, want the first", s.Dialled)
		}
		idle(t, owner.t)
	}
}

// The verdict is of the moment when the last copy of the device is over; bytes
// of one piece are not given at all if it is stale.
func TestStagedVerdict(t *testing.T) {
	const size = 1 << 20
	for _, tt := range []struct {
		bytes  int64
		pieces int
	}{{1, 1}, {stagedBytes, 1}, {stagedBytes + 1, 2}, {size, 4}} {
		d := newDevice(t, transfertest.DeviceOptions{})
		owner, _ := newDeviceNode(t, ownerLife, size, d)
		owner.listen(t, Options{})
		seal := owner.hold(1, 1)
		c := greeted(t, owner)
		d.Hold(transfertest.ToHost)
		d.Let(transfertest.ToHost, tt.pieces-1)
		ask(t, c, 1, seal, transfer.Copy{Bytes: tt.bytes})
		eventually(t, "the device is not asked for all", func() bool { return d.Counts().Calls[transfertest.ToHost] >= tt.pieces })
		owner.local.Seals.Store(1, 0)
		d.Release(transfertest.ToHost)
		if tt.pieces > 1 {
			wantFrame(t, c, dataOf(1, uint32(tt.bytes)))
		}
		wantFrame(t, c, verdictOf(1, verdictStale))
		if s := owner.t.Stats(); s.ServedStale != 1 {
			t.Errorf("stats %+v", s)
		}
	}
}

// A reader that takes nothing loses its connection, and then the buffers come
// back: others are served.
func TestReaderThatTakesNothingGivesBuffersBack(t *testing.T) {
	const size = 16 << 20
	d := newDevice(t, transfertest.DeviceOptions{})
	owner, _ := newDeviceNode(t, ownerLife, size, d)
	owner.listen(t, Options{Staging: 1, Limits: transfer.Limits{Stall: 3 * time.Second}}) // which a good reader never takes
	seal := owner.hold(1, 1)
	for i := range uint64(2) {
		ask(t, greeted(t, owner), i+1, seal, transfer.Copy{Bytes: size})
	}
	reader := newNode(t, readerLife, size)
	reader.listen(t, Options{Bind: netip.MustParseAddrPort("127.0.0.1:0")})
	link := open(t, reader, owner.peer())
	if err := link.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: size}}); err != nil {
		t.Error(err)
	}
	idle(t, owner.t)
}

// Readers that take nothing, as those of a process that is stopped, hold some of the
// buffers, and not those that others need.
func TestReadersThatTakeNothingLeaveBuffersToOthers(t *testing.T) {
	const size, stopped = 16 << 20, 8
	d := newDevice(t, transfertest.DeviceOptions{})
	owner, _ := newDeviceNode(t, ownerLife, size, d)
	owner.listen(t, Options{Staging: 2 * stopped * stagedAhead * stagedBytes, Limits: transfer.Limits{Stall: patience}})
	seal, pool := owner.hold(1, 1), owner.t.staging.out
	for i := range uint64(stopped) {
		before := pool.Lent()
		ask(t, greeted(t, owner), i+1, seal, transfer.Copy{Bytes: size})
		eventually(t, "a reader holds no buffer", func() bool { return pool.Lent() > before })
	}
	eventually(t, "the readers hold less than half of the buffers", func() bool { return 2*pool.Lent() >= stopped*stagedAhead })
	reader := newNode(t, readerLife, size)
	reader.listen(t, Options{Bind: netip.MustParseAddrPort("127.0.0.1:0"), Limits: transfer.Limits{Stall: patience / 4}})
	link := open(t, reader, owner.peer())
	for range 3 {
		if err := link.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: size}}); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSoakStaged(t *testing.T) {
	d := newDevice(t, transfertest.DeviceOptions{Delay: 20 * time.Microsecond})
	f := factory("127.0.0.1:0")
	f.Owner, f.Reader = d.Alloc, d.Alloc
	transfertest.Soak(t, f, *soak)
}
