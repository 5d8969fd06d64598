package rdmaread

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// peerArena is memory of a device that is known by its address alone: it is no
// dma-buf, and the kernel knows what the address means.
type peerArena struct {
	memory.DMABufExporter
	mapped []byte
}

// newPeerArena makes the memory of an arena reachable by its address.
func newPeerArena(inner memory.Arena) (memory.Arena, error) {
	x := inner.(memory.DMABufExporter)
	f, _, err := x.DMABuf(0, x.Size())
	if err != nil {
		return nil, err
	}
	defer f.Close()
	mapped, err := unix.Mmap(int(f.Fd()), 0, int(x.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return &peerArena{x, mapped}, nil
}

func (a *peerArena) Address() memory.DeviceAddr {
	return memory.DeviceAddr(uintptr(unsafe.Pointer(unsafe.SliceData(a.mapped))))
}

func (a *peerArena) DMABuf(int64, int64) (*os.File, int64, error) {
	return nil, 0, memory.ErrNoDMABuf
}

func (a *peerArena) Close() error {
	return errors.Join(a.DMABufExporter.Close(), unix.Munmap(a.mapped))
}

// lentChunks is memory that no card may reach, though one could.
type lentChunks struct{ peerArena }

func (*lentChunks) DMABuf(int64, int64) (*os.File, int64, error) {
	return nil, 0, fmt.Errorf("%w: %w: lend no chunks", memory.ErrNoDMABuf, memory.ErrOutOfReach)
}

// blind is memory whose device cannot be made to see what cards have written.
type blind struct{ memory.DMABufExporter }

func (blind) Flush() error { return errors.New("no means to flush") }

// withPeerMem is a machine whose kernel has the module.
var withPeerMem fs.FS = fstest.MapFS{"sys/module/nvidia_peermem/initstate": {}}

// places are where a side's memory may lie, by how it is reached.
func places(d *transfertest.Device) map[Reach]transfertest.Place {
	return map[Reach]transfertest.Place{
		InHost:   transfertest.Host,
		ByDMABuf: d.Alloc,
		ByPeerMem: func(size int64) (memory.Arena, error) {
			a, err := d.Alloc(size)
			if err != nil {
				return nil, err
			}
			return newPeerArena(a)
		},
		Staged: func(size int64) (memory.Arena, error) { // what is no DMABufExporter
			a, err := d.Alloc(size)
			if err != nil {
				return nil, err
			}
			return struct{ memory.Stager }{a.(memory.Stager)}, nil
		},
	}
}

// newDevice is one whose memory others can reach; it must be closed behind all
// that uses it, and then nothing of it is left.
func newDevice(t testing.TB, o transfertest.DeviceOptions) *transfertest.Device {
	t.Helper()
	o.DMABuf = true
	d := transfertest.NewDevice(o)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// on puts the memory of a suite's two sides where it is reached in these ways,
// and checks that it is.
func (m *meeting) on(t *testing.T, owner, reader Reach) transfertest.Factory {
	t.Helper()
	device := newDevice(t, transfertest.DeviceOptions{})
	f := m.factory()
	f.Owner, f.Reader = places(device)[owner], places(device)[reader]
	start := f.Start
	f.Start = func(local transfer.Local, limits transfer.Limits) (transfer.Transport, error) {
		tr, err := start(local, limits)
		side := slices.Index([]id.Node{"owner", "reader"}, local.Life.Node) // or a third, in the host
		if err == nil && side >= 0 {
			want := []Reach{owner, reader}[side]
			for _, p := range tr.(*Transport).Paths() {
				if p.Memory != want {
					t.Errorf("%s reaches the memory of %s by %v (%s), want %v", p.Device, local.Life.Node, p.Memory, p.Why, want)
				}
			}
		}
		return tr, err
	}
	return f
}

// The suite for each pair of ways; one that mixes them always, the others in long
// runs. What is staged on one side, or both, is RunStaged's, and some suites with
// other devices have other memory too.
func TestSuiteOfDevices(t *testing.T) {
	pairs := [][2]Reach{{Staged, ByDMABuf}}
	if *soak >= time.Minute {
		pairs = nil
		for owner := InHost; owner <= Staged; owner++ {
			for reader := InHost; reader <= Staged; reader++ {
				pairs = append(pairs, [2]Reach{owner, reader})
			}
		}
	}
	for _, pair := range pairs {
		t.Run(pair[0].String()+" to "+pair[1].String(), func(t *testing.T) {
			m, _ := newMeeting(t, Options{Staging: 8 * leastStaging, root: withPeerMem}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1", MaxMRSize: 160 << 10})
			transfertest.Run(t, m.on(t, pair[0], pair[1]))
		})
	}
}

// deviceNode is a node whose arenas, of ranks from 0 on, lie there.
func deviceNode(t testing.TB, life id.Life, place transfertest.Place, size int64, ranks int) *node {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{local: transfer.Local{Life: life, Arenas: map[id.Rank]memory.Arena{}, Seals: seals}}
	t.Cleanup(func() { n.drop(t) })
	for r := range id.Rank(ranks) {
		if n.local.Arenas[r], err = place(size); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// bytes are those of rank 0, put writes them.
func (n *node) bytes() []byte {
	b := make([]byte, n.local.Arenas[0].Size())
	transfertest.Peek(n.local.Arenas[0], 0, b)
	return b
}

func (n *node) put(b []byte) { transfertest.Poke(n.local.Arenas[0], 0, b) }

// devicePair is an owner and a reader whose memory lies there, both listening.
func devicePair(t testing.TB, m *meeting, owner, reader transfertest.Place, size int64, o Options) (own, read *node) {
	t.Helper()
	own, read = deviceNode(t, ownerLife, owner, size, 1), deviceNode(t, readerLife, reader, size, 1)
	b := make([]byte, size)
	pattern(b, 1)
	own.put(b)
	pattern(b, 2)
	read.put(b)
	if o.Staging == 0 {
		o.Staging = 4 * leastStaging
	}
	own.listen(t, m, o)
	read.listen(t, m, o)
	return own, read
}

// holds checks a read that must succeed.
func holds(t testing.TB, l *link, owner, reader *node, copies []transfer.Copy) {
	t.Helper()
	want := over(reader.bytes(), owner.bytes(), copies)
	if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies); err != nil {
		t.Fatalf("Read: %v", err)
	}
	if !bytes.Equal(reader.bytes(), want) {
		t.Fatal("other bytes than the owner's")
	}
}

// records are the lines that a transport has logged.
type records struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (r *records) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(b)
}

func (r *records) lines(with string) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for line := range strings.Lines(r.text.String()) {
		if strings.Contains(line, with) {
			n++
		}
	}
	return n
}

// Each device takes the best way there is to each arena, says which once, and why
// it is no better.
func TestMemoryIsReachedInTheBestWay(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	device := newDevice(t, transfertest.DeviceOptions{})
	place := places(device)
	without := fstest.MapFS{}
	lent := func(size int64) (memory.Arena, error) {
		a, err := place[ByPeerMem](size)
		if err != nil {
			return nil, err
		}
		return &lentChunks{*a.(*peerArena)}, nil
	}
	unseen := func(size int64) (memory.Arena, error) {
		a, err := device.Alloc(size)
		if err != nil {
			return nil, err
		}
		return blind{a.(memory.DMABufExporter)}, nil
	}
	for name, tt := range map[string]struct {
		place  transfertest.Place
		root   fs.FS
		faults rdmatest.Faults
		want   Reach
		why    []string
		logged string
	}{
		"host":                       {place[InHost], without, rdmatest.Faults{}, InHost, nil, ""},
		"a dma-buf":                  {place[ByDMABuf], withPeerMem, rdmatest.Faults{}, ByDMABuf, nil, "by=dma-buf"},
		"none, but its address":      {place[ByPeerMem], withPeerMem, rdmatest.Faults{}, ByPeerMem, []string{memory.ErrNoDMABuf.Error()}, "by=peermem"},
		"neither":                    {place[ByPeerMem], without, rdmatest.Faults{}, Staged, []string{memory.ErrNoDMABuf.Error(), "modprobe nvidia_peermem"}, "copied through the host"},
		"a card without dma-buf":     {place[ByDMABuf], without, rdmatest.Faults{NoDMABuf: true}, Staged, []string{"Linux 5.12", "modprobe nvidia_peermem"}, "copied through the host"},
		"a device that tells nobody": {place[Staged], withPeerMem, rdmatest.Faults{}, Staged, []string{"tells nobody"}, "copied through the host"},
		"lent in chunks":             {lent, withPeerMem, rdmatest.Faults{}, Staged, []string{memory.ErrOutOfReach.Error(), "lend no chunks"}, "copied through the host"},
		"a device that sees nothing": {unseen, withPeerMem, rdmatest.Faults{}, Staged, []string{"no means to flush"}, "copied through the host"},
	} {
		t.Run(name, func(t *testing.T) {
			w.Set(tt.faults)
			defer w.Clear()
			n := deviceNode(t, ownerLife, tt.place, 1<<20, 2)
			var log records
			tr := n.listen(t, m, Options{root: tt.root, Staging: leastStaging, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			for _, p := range tr.Paths() {
				if p.Memory != tt.want {
					t.Errorf("%s: %v, want %v", p.Device, p.Memory, tt.want)
				}
				if (p.Why == "") != (len(tt.why) == 0) {
					t.Errorf("%s: why %q", p.Device, p.Why)
				}
				for _, why := range tt.why {
					if !strings.Contains(p.Why, why) {
						t.Errorf("%s: %q does not say %q", p.Device, p.Why, why)
					}
				}
			}
			if n := log.lines(tt.logged); tt.logged != "" && n != 4 { // two arenas, two devices
				t.Errorf("%d lines say %q, want one for each arena and device:\n%s", n, tt.logged, log.text.String())
			}
			s := tr.Stats()
			if got := map[Reach]int{ByDMABuf: s.DMABufs, ByPeerMem: s.PeerMems, Staged: s.Staged}; tt.want != InHost && got[tt.want] != 4 || s.DMABufs+s.PeerMems+s.Staged > 4 {
				t.Errorf("counted %v", got)
			}
			arenas := uint64(2 * 2 << 20) // two of 1 MiB, with two devices
			if tt.want == Staged {
				arenas = 0
			}
			if want := arenas + 2*uint64(n.local.Seals.Region().Size()); s.RegisteredBytes != want {
				t.Errorf("%d bytes are registered, want %d", s.RegisteredBytes, want)
			}
			pinned := int64(0)
			if tt.want == Staged {
				pinned = 2 * leastStaging // for each arena, as the pool pins by arena
			}
			if got := device.Counts().Pinned; got != pinned {
				t.Errorf("%d bytes are pinned, want %d", got, pinned)
			}
		})
	}
}

// An owner that is registered takes no part in a read, and a reader that is has
// nothing to copy: the devices do it by themselves.
func TestRegisteredMemoryIsCopiedByNobody(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0", MaxMRSize: 1 << 20})
	device := newDevice(t, transfertest.DeviceOptions{})
	owner, reader := devicePair(t, m, device.Alloc, device.Alloc, 4<<20, Options{})
	l := open(t, reader, owner.peer())
	holds(t, l, owner, reader, scattered(rand.New(rand.NewPCG(1, 1)), 4<<20, 300, 12000))
	if c := device.Counts(); c.Calls != [3]int{} {
		t.Errorf("copies by the device: %+v", c)
	}
	// What has landed is flushed before anybody says that it is there.
	broken := errors.New("flush failed")
	device.Fail(broken)
	if e := fails(t, l, owner, []transfer.Copy{{Bytes: 4096}}); !errors.Is(e, broken) {
		t.Errorf("a flush that fails: %v", e)
	}
	device.Fail(nil)
	holds(t, l, owner, reader, []transfer.Copy{{Bytes: 4096}})
}

// flushing is an arena that notes when it is flushed.
type flushing struct {
	memory.DMABufExporter
	flushed func()
}

func (a *flushing) Flush() error {
	a.flushed()
	return a.DMABufExporter.Flush()
}

// The flush comes after the last byte, and before the words: what the owner lets
// go in between is found out.
func TestFlushComesBeforeTheSealWords(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	device := newDevice(t, transfertest.DeviceOptions{})
	var owner, reader *node
	var landed bool
	want := make([]byte, 2<<20)
	pattern(want, 1)
	owner, reader = devicePair(t, m, transfertest.Host, func(size int64) (memory.Arena, error) {
		a, err := device.Alloc(size)
		if err != nil {
			return nil, err
		}
		return &flushing{a.(memory.DMABufExporter), func() {
			if owner == nil { // it listens
				return
			}
			got := make([]byte, len(want))
			transfertest.Peek(a, 0, got)
			landed = bytes.Equal(got, want)
			owner.local.Seals.Store(5, 0)
		}}, nil
	}, 2<<20, Options{})
	l := open(t, reader, owner.peer())
	if e := fails(t, l, owner, []transfer.Copy{{Bytes: 2 << 20}}); !errors.Is(e, transfer.ErrStale) || !landed {
		t.Errorf("%v; all had landed: %v", e, landed)
	}
}

// Each buffer costs one copy of each device, however many pages it has, and the
// processor crosses into C as seldom as it does without one.
func TestOneCopyABuffer(t *testing.T) {
	const size, page = 16 << 20, 16 << 10
	for _, pair := range [][2]Reach{{Staged, InHost}, {InHost, Staged}, {Staged, Staged}} {
		t.Run(pair[0].String()+" to "+pair[1].String(), func(t *testing.T) {
			m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			theirs, ours := newDevice(t, transfertest.DeviceOptions{}), newDevice(t, transfertest.DeviceOptions{})
			owner, reader := devicePair(t, m, places(theirs)[pair[0]], places(ours)[pair[1]], size, Options{})
			l := open(t, reader, owner.peer())
			eventually(t, "lanes", func() bool { return len(queues(l)) == len(l.lanes) })
			before := reader.t.Stats().Crossings
			first := [2]transfertest.Counts{theirs.Counts(), ours.Counts()}
			copies := pages(size/page, page, size)
			if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies); err != nil {
				t.Fatal(err)
			}
			crossings := int(reader.t.Stats().Crossings - before)
			buffers := 2 * size / bufferBytes // each window may end with one that is not full, and a slow machine has many windows
			gathers := theirs.Counts().Calls[transfertest.ToHost] - first[0].Calls[transfertest.ToHost]
			scatters := ours.Counts().Calls[transfertest.FromHost] - first[1].Calls[transfertest.FromHost]
			t.Logf("%d pages: %d crossings, %d gathers, %d scatters", len(copies), crossings, gathers, scatters)
			if most := len(copies)/16 + 8; crossings > 2*most { // a few of each buffer
				t.Errorf("%d crossings for %d pages", crossings, len(copies))
			}
			for i, side := range []struct {
				copies int
				node   *node
				device *transfertest.Device
			}{{gathers, owner, theirs}, {scatters, reader, ours}} {
				want := uint64(0)
				if pair[i] == Staged {
					want = size
				}
				if least := int(want / bufferBytes); side.copies < least || side.copies > buffers || want == 0 && side.copies > 0 {
					t.Errorf("%s: %d copies of %d buffers", side.node.local.Life.Node, side.copies, buffers)
				}
				if n := side.node.t.Stats().StagedBytes; n != want {
					t.Errorf("%s: %d bytes were staged, want %d", side.node.local.Life.Node, n, want)
				}
				if n := side.device.Counts().Slow - first[i].Slow; n > 0 {
					t.Errorf("%s: %d copies with memory that is not pinned", side.node.local.Life.Node, n)
				}
			}
		})
	}
}

// While one buffer is on the wire the next is gathered and the last scattered: a
// read takes about as long as the slowest of the three, not as all together.
func TestGatherWireAndScatterOverlap(t *testing.T) {
	timed(t)
	const size, rate = 16 << 20, 200 << 20
	m, w := newMeeting(t, Options{QueuePairs: 1}, rdmatest.DeviceSpec{Name: "d0"})
	device := newDevice(t, transfertest.DeviceOptions{Rate: rate})
	owner, reader := devicePair(t, m, places(device)[Staged], places(device)[Staged], size, Options{QueuePairs: 1})
	l := open(t, reader, owner.peer())
	w.Set(rdmatest.Faults{Bandwidth: rate})
	alone := time.Duration(float64(size) / rate * float64(time.Second))
	took := time.Hour
	for range 4 { // this machine may be busy
		if took = min(took, fastest(t, l, owner.hold(5, 5), []transfer.Copy{{Bytes: size}}, 1)); took < alone*17/10 {
			t.Logf("%v, each of the three alone takes %v", took, alone)
			return
		}
	}
	t.Errorf("%v, each of the three alone takes %v", took, alone)
}

// Lanes for which there is no ring are refused, the link does with those that
// there are, and without any the transport passes on to the next; what was given
// back can be had again.
func TestRingsAreBounded(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	device := newDevice(t, transfertest.DeviceOptions{})
	owner, reader := devicePair(t, m, places(device)[Staged], transfertest.Host, 2<<20, Options{Staging: 3 * leastStaging, QueuePairs: 2})
	first := open(t, reader, owner.peer())
	eventually(t, "two lanes", func() bool { return len(queues(first)) == 2 })
	second, err := reader.t.Open(short(t), owner.peer())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(queues(second.(*link))); n != 1 {
		t.Errorf("%d lanes, with room for one", n)
	}
	holds(t, second.(*link), owner, reader, []transfer.Copy{{Bytes: 2 << 20}})
	_, err = reader.t.Open(short(t), owner.peer())
	if !errors.Is(err, transfer.ErrUnavailable) || !strings.Contains(err.Error(), "transfer.staging") {
		t.Errorf("without a ring: %v", err)
	}
	if s := owner.t.Stats(); s.Rings != 3 || s.Busy < 3 {
		t.Errorf("%+v", s)
	}
	before := w.Counts().Regions
	if err := second.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the ring is given back", func() bool { return owner.t.Stats().Rings == 2 && w.Counts().Regions < before })
	third := open(t, reader, owner.peer())
	holds(t, third, owner, reader, []transfer.Copy{{Bytes: 2 << 20}})
}

// Too little for staging is an error where something is staged, and nowhere else.
func TestStagingIsAskedForWhereItIsUsed(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	place := places(newDevice(t, transfertest.DeviceOptions{}))
	for _, reach := range []Reach{InHost, ByDMABuf} {
		deviceNode(t, ownerLife, place[reach], 1<<20, 1).listen(t, m, Options{Staging: 1})
	}
	n := deviceNode(t, readerLife, place[Staged], 1<<20, 1)
	tr, err := m.listen(Options{Local: n.local, Staging: leastStaging - 1})
	if err == nil || !strings.Contains(err.Error(), "want at least 4194304") {
		t.Errorf("%v", err)
	}
	if err == nil {
		tr.Close()
	}
}

// halfReached is memory that every other card of those that ask gets a dma-buf of.
type halfReached struct {
	memory.DMABufExporter
	asked int
}

func (a *halfReached) DMABuf(offset, n int64) (*os.File, int64, error) {
	if a.asked++; a.asked%2 == 1 {
		return nil, 0, memory.ErrNoDMABuf
	}
	return a.DMABufExporter.DMABuf(offset, n)
}

// A lane whose card reaches our memory by itself needs no buffer, and waits for none.
func TestDirectLaneTakesNoBuffer(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	device := newDevice(t, transfertest.DeviceOptions{})
	owner, reader := devicePair(t, m, transfertest.Host, func(size int64) (memory.Arena, error) {
		a, err := device.Alloc(size)
		if err != nil {
			return nil, err
		}
		return &halfReached{DMABufExporter: a.(memory.DMABufExporter)}, nil
	}, 2<<20, Options{root: fstest.MapFS{}})
	l := open(t, reader, owner.peer())
	holds(t, l, owner, reader, []transfer.Copy{{Bytes: 2 << 20}})
	pool := reader.t.landing
	var held [][]byte
	for buf, ok := pool.TryGet(); ok; buf, ok = pool.TryGet() {
		held = append(held, buf)
	}
	staged := reader.t.ports[0]
	if staged.d.arenas[0].reach != Staged || reader.t.ports[1].d.arenas[0].reach != ByDMABuf {
		t.Fatalf("%+v", reader.t.Paths())
	}
	staged.fail(errors.New("pulled out"))
	holds(t, l, owner, reader, []transfer.Copy{{Bytes: 2 << 20}})
	staged.returned()
	for _, buf := range held {
		pool.Put(buf)
	}
}

// A reader that asks and hears nothing keeps an answer, and nothing else: its lane
// ends, and the transport closes, all the same.
func TestReaderHearsNothing(t *testing.T) {
	part := []transfer.Copy{{Bytes: 4096}}
	for name, stop := range map[string]func(owner *Transport, asked chan<- []byte, hangUp func()){
		"it hangs up":             func(_ *Transport, _ chan<- []byte, hangUp func()) { hangUp() },
		"it asks what is none":    func(_ *Transport, asked chan<- []byte, _ func()) { asked <- []byte("garbage") },
		"its card fails":          func(owner *Transport, _ chan<- []byte, _ func()) { owner.dropServed(owner.ports[0]) },
		"the transport is closed": func(owner *Transport, _ chan<- []byte, _ func()) { go owner.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			owner := deviceNode(t, ownerLife, places(newDevice(t, transfertest.DeviceOptions{}))[Staged], 1<<20, 1)
			owner.listen(t, m, Options{Staging: leastStaging})
			h := hello{generation: 1, owner: ownerLife, reader: readerLife, end: end{qpn: 99, gid: addr("10.77.0.1"), link: rdma.LinkEthernet, mtu: 3, reads: 4}}
			ctx, hangUp := context.WithCancel(t.Context())
			asked, first, full := make(chan []byte), make(chan struct{}, 1), make(chan struct{}, 1)
			returned := make(chan struct{}) // which ends the stream
			said := 0
			go func() {
				defer close(returned)
				_ = owner.t.Serve(ctx, readerLife, h.encode(), asked, func([]byte) error { // why it ends differs
					if said++; said == 1 {
						first <- struct{}{}
						return nil
					}
					full <- struct{}{}
					<-returned
					return errors.New("the stream has ended")
				})
			}()
			<-first
			for i := range uint64(1 + ringBuffers) { // one is being said, the others wait
				asked <- appendGather(nil, i, part)
				if i == 0 {
					<-full
				}
			}
			stop(owner.t, asked, hangUp)
			select {
			case <-returned:
			case <-time.After(patience):
				t.Fatal("the lane hangs")
			}
			hangUp()
			if s := owner.t.Stats(); s.Rings != 0 || s.Accepted != 0 || w.Counts().QPs != 0 {
				t.Errorf("left: %+v", s)
			}
			if err := owner.t.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A lane that fails in the middle of what is staged loses nothing: what it had not
// landed is gathered anew for another.
func TestStagedWindowFailsOver(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	device := newDevice(t, transfertest.DeviceOptions{Delay: 50 * time.Microsecond})
	owner, reader := devicePair(t, m, places(device)[Staged], places(device)[Staged], 8<<20, Options{Staging: 16 * leastStaging})
	l := open(t, reader, owner.peer())
	var failovers uint64
	for seed := range uint64(15) {
		rng := rand.New(rand.NewPCG(seed, 9))
		w.Set(rdmatest.Faults{Seed: seed, FailNth: 1 + rng.Uint64N(16), FailStatus: int(rdma.StatusRetryExcErr)})
		copies := scattered(rng, 8<<20, 1+rng.IntN(200), 1<<20)
		want := over(reader.bytes(), owner.bytes(), copies)
		if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if !bytes.Equal(reader.bytes(), want) {
			t.Fatalf("seed %d: other bytes than the owner's", seed)
		}
		failovers = reader.t.Stats().Failovers
	}
	if failovers == 0 {
		t.Error("no window was moved to another lane")
	}
	w.Clear()
	eventually(t, "rings of broken lanes are given back", func() bool { return owner.t.Stats().Rings == owner.t.Stats().Accepted })
	for _, p := range []*transfer.Pool{reader.t.landing} {
		if n := p.Lent(); n != 0 {
			t.Errorf("%d buffers are in use, and no read runs", n)
		}
	}
}

// A gather that does not end keeps its ring, not its reader: that one stalls, and
// the ring is nobody else's until the device is done with it.
func TestGatherThatDoesNotEnd(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	device := newDevice(t, transfertest.DeviceOptions{})
	owner, reader := devicePair(t, m, places(device)[Staged], transfertest.Host, 4<<20,
		Options{QueuePairs: 1, Staging: leastStaging})
	l := open(t, reader, owner.peer())
	reader.stall(150 * time.Millisecond)
	device.Hold()
	started := time.Now()
	e := fails(t, l, owner, []transfer.Copy{{Bytes: 4 << 20}})
	if took := time.Since(started); !errors.Is(e, transfer.ErrStalled) && !errors.Is(e, transfer.ErrUnavailable) || took > 20*time.Second {
		t.Errorf("%v after %v", e, took)
	}
	// Its queue pair is gone, and the one ring is not: no lane can have it.
	eventually(t, "the lane's queue pair is destroyed", func() bool { return w.Counts().QPs == 0 })
	if n := owner.t.Stats().Rings; n != 1 {
		t.Errorf("%d rings", n)
	}
	if _, err := reader.t.Open(short(t), owner.peer()); !errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("a ring that a device writes to is given away: %v", err)
	}
	device.Release()
	eventually(t, "the lane is back", func() bool { return len(queues(l)) == 1 })
	reader.stall(patience / 3)
	holds(t, l, owner, reader, []transfer.Copy{{Bytes: 4 << 20}})
}

// A scatter that does not end keeps the read, canceled or not, since the device may
// still write.
func TestScatterThatDoesNotEnd(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	device := newDevice(t, transfertest.DeviceOptions{})
	owner, reader := devicePair(t, m, transfertest.Host, places(device)[Staged], 4<<20, Options{})
	l := open(t, reader, owner.peer())
	device.Hold()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	seal := owner.hold(5, 5)
	go func() { ended <- l.Read(ctx, []transfer.Seal{seal}, []transfer.Copy{{Bytes: 4 << 20}}) }()
	eventually(t, "a scatter runs", func() bool { return device.Counts().Live > 0 })
	cancel()
	select {
	case err := <-ended:
		t.Fatalf("Read has returned while its device writes: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	device.Release()
	select {
	case err := <-ended:
		if !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	case <-time.After(patience):
		t.Fatal("Read hangs")
	}
	holds(t, l, owner, reader, []transfer.Copy{{Bytes: 4 << 20}})
}

// A device that dies ends what needs it at once, by its text, on either side.
func TestDeadDevices(t *testing.T) {
	dead := errors.New("device is dead: fell off the bus")
	for side := range 2 {
		t.Run([]string{"of the owner", "of the reader"}[side], func(t *testing.T) {
			m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			devices := []*transfertest.Device{newDevice(t, transfertest.DeviceOptions{}), newDevice(t, transfertest.DeviceOptions{})}
			owner, reader := devicePair(t, m, places(devices[0])[Staged], places(devices[1])[Staged], 4<<20, Options{})
			l := open(t, reader, owner.peer())
			devices[side].Hold()
			ended := make(chan error, 1)
			seal := owner.hold(5, 5)
			go func() { ended <- l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 4 << 20}}) }()
			eventually(t, "a copy runs", func() bool { return devices[side].Counts().Live > 0 })
			killed := time.Now()
			devices[side].Kill(dead)
			err := <-ended
			if took := time.Since(killed); err == nil || !strings.Contains(err.Error(), "fell off the bus") || took > patience/4 {
				t.Errorf("%v after %v", err, took)
			}
			if f, ok := errors.AsType[*LaneError](err); side == 0 && (!ok || f.Peer != ownerLife) {
				t.Errorf("%v does not say whose", err)
			}
		})
	}
}

// Questions are believed nothing: each that is wrong ends its lane, copies nothing,
// and leaves nothing.
func TestHostileGathers(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	device := newDevice(t, transfertest.DeviceOptions{})
	const size = 1 << 20
	owner := deviceNode(t, ownerLife, places(device)[Staged], size, 1)
	owner.listen(t, m, Options{Staging: leastStaging})
	part := func(remote, bytes int64) []transfer.Copy { return []transfer.Copy{{Remote: remote, Bytes: bytes}} }
	good := appendGather(nil, 0, part(0, 4096))
	for name, questions := range map[string][][]byte{
		"nothing":            {{}},
		"garbage":            {[]byte("kvr\x01\x05garbage")},
		"another message":    {encodeGathered(0, nil)},
		"a number ahead":     {appendGather(nil, 1, part(0, 1))},
		"a number again":     {good, good},
		"no stretch":         {appendGather(nil, 0, nil)},
		"beyond the arena":   {appendGather(nil, 0, part(size-10, 11))},
		"far beyond":         {appendGather(nil, 0, part(1<<40, 1))},
		"before the arena":   {appendGather(nil, 0, part(-1, 1))},
		"no bytes":           {appendGather(nil, 0, part(0, 0))},
		"of another rank":    {appendGather(nil, 0, []transfer.Copy{{Rank: 1, Bytes: 1}})},
		"of no rank":         {appendGather(nil, 0, []transfer.Copy{{Rank: 200, Bytes: 1}})},
		"more than a buffer": {appendGather(nil, 0, part(0, bufferBytes+1))},
		"together more":      {appendGather(nil, 0, []transfer.Copy{{Bytes: bufferBytes}, {Bytes: 1}})},
		"too many stretches": {appendGather(nil, 0, make([]transfer.Copy, maxStretches+1))},
		"more than may be asked": {
			appendGather(nil, 0, part(0, 1)), appendGather(nil, 1, part(0, 1)), appendGather(nil, 2, part(0, 1)),
			appendGather(nil, 3, part(0, 1)), appendGather(nil, 4, part(0, 1)),
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := owner.t.Stats().Garbage
			device.Hold()
			h := hello{generation: 1, owner: ownerLife, reader: readerLife, end: end{qpn: 99, gid: addr("10.77.0.1"), link: rdma.LinkEthernet, mtu: 3, reads: 4}}
			b, c, err := talkTo(short(t), owner.t, readerLife, h.encode())
			if err != nil {
				t.Fatal(err)
			}
			if a, why, err := parseAnswer(b); err != nil || why != 0 || a.regions.buffers != ringBuffers || !a.regions.arenas[0].staged() {
				t.Fatalf("%+v, %v, %v", a, why, err)
			}
			for _, q := range questions {
				if err := c.Send(short(t), q); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, "the owner has found out", func() bool { return owner.t.Stats().Garbage > before })
			device.Release() // the lane ends when its copies have
			select {
			case <-c.Ended():
			case <-time.After(patience):
				t.Fatal("the lane stands")
			}
			if n := owner.t.Stats().Garbage; n != before+1 {
				t.Errorf("%d pieces of garbage, want one", n-before)
			}
			if s := owner.t.Stats(); s.Rings != 0 || s.Accepted != 0 || w.Counts().QPs != 0 {
				t.Errorf("left: %+v", s)
			}
		})
	}
	// One where nothing is staged.
	m2 := &meeting{nodes: map[string]*Transport{}}
	plain := newNode(t, ownerLife, size)
	plain.listen(t, m2, Options{})
	h := hello{generation: 1, owner: ownerLife, reader: readerLife, end: end{qpn: 99, gid: addr("10.77.0.1"), link: rdma.LinkEthernet, mtu: 3, reads: 4}}
	_, c, err := talkTo(short(t), plain.t, readerLife, h.encode())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Send(short(t), good); err != nil {
		t.Fatal(err)
	}
	select {
	case <-c.Ended():
	case <-time.After(patience):
		t.Error("the lane stands")
	}
}

// saying is a Call whose answers are changed on their way.
type saying struct {
	Call
	change  func([]byte) []byte
	answers chan []byte
}

func (s *saying) Answers() <-chan []byte { return s.answers }

func (s *saying) pass() {
	for {
		select {
		case b := <-s.Call.Answers():
			if b = s.change(b); b != nil {
				s.answers <- b
			}
		case <-s.Ended():
			return
		}
	}
}

// What an owner answers is believed nothing: a read ends with an error that says
// so, or right.
func TestHostileGathered(t *testing.T) {
	for name, tt := range map[string]struct {
		change func([]byte) []byte
		want   error
		says   string
	}{
		"garbage":           {func([]byte) []byte { return []byte("hello") }, errGarbage, ""},
		"another number":    {func(b []byte) []byte { return hurt(b, headerBytes+7, 99) }, errGarbage, "not to"},
		"control":           {func(b []byte) []byte { return append(hurt(b, len(b)-1, 1), '\n') }, errGarbage, ""},
		"a reason":          {func(b []byte) []byte { return append(hurt(b, len(b)-1, 4), "none"...) }, nil, "could not copy it out of its device, whose log says more: none"},
		"nothing, for ever": {func([]byte) []byte { return nil }, transfer.ErrStalled, "gathered nothing"},
	} {
		t.Run(name, func(t *testing.T) {
			m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			device := newDevice(t, transfertest.DeviceOptions{})
			m.between = func(_ context.Context, hello []byte, call func([]byte) ([]byte, Call, error)) ([]byte, Call, error) {
				b, c, err := call(hello)
				if err != nil {
					return nil, nil, err
				}
				s := &saying{c, tt.change, make(chan []byte, 16)}
				go s.pass()
				return b, s, nil
			}
			owner, reader := devicePair(t, m, places(device)[Staged], transfertest.Host, 1<<20,
				Options{QueuePairs: 1})
			l := open(t, reader, owner.peer())
			if errors.Is(tt.want, transfer.ErrStalled) {
				reader.stall(100 * time.Millisecond)
			}
			e := fails(t, l, owner, []transfer.Copy{{Bytes: 1 << 20}})
			if tt.want != nil && !errors.Is(e, tt.want) || !strings.Contains(e.Error(), tt.says) {
				t.Errorf("%v", e)
			}
		})
	}
}

// A window whose copies go several ways is cut into such that go one, and no byte
// is lost or moved twice.
func TestWindowsGoOneWay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var copies []transfer.Copy
		for range rapid.IntRange(1, 40).Draw(t, "copies") {
			copies = append(copies, transfer.Copy{Rank: id.Rank(rapid.IntRange(0, 3).Draw(t, "rank")), Remote: int64(len(copies)) << 20, Bytes: rapid.Int64Range(1, 1<<20).Draw(t, "bytes")})
		}
		total := transfer.Bytes(copies)
		p := pull{copies: slices.Clone(copies), left: total, total: total, workers: 1, hands: 1}
		w := &window{}
		moved := map[int64]int64{} // bytes by the copy's place
		for {
			ways := new([id.MaxRanks]way) // another lane each time
			for i := range 4 {
				ways[i] = way(rapid.IntRange(0, 3).Draw(t, "way"))
			}
			if !p.take(w, rates{even: true}, ways) {
				break
			}
			for _, c := range w.copies {
				if ways[c.Rank] != w.way {
					t.Fatalf("a copy of rank %d in a window that goes %d", c.Rank, w.way)
				}
				moved[c.Remote>>20<<20] += c.Bytes
			}
			// As relay does, piece by piece.
			cut := cutter{copies: w.copies, room: rapid.Int64Range(4<<10, bufferBytes).Draw(t, "room")}
			var sum int64
			for next := (piece{}); cut.next(&next); {
				if next.bytes > cut.room || next.bytes != transfer.Bytes(next.copies) || len(next.copies) > maxStretches {
					t.Fatalf("a piece of %d bytes", next.bytes)
				}
				sum += next.bytes
			}
			if sum != transfer.Bytes(w.copies) {
				t.Fatalf("pieces of %d bytes, of a window of %d", sum, transfer.Bytes(w.copies))
			}
		}
		for _, c := range copies {
			if moved[c.Remote] != c.Bytes {
				t.Fatalf("%d bytes of %d were moved", moved[c.Remote], c.Bytes)
			}
		}
		if p.left != 0 {
			t.Fatalf("%d bytes are left", p.left)
		}
	})
}
