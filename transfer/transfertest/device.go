package transfertest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/memory"
)

// Direction is one of the three in which a [Device] copies.
type Direction int

// The directions, by the calls of [memory.Stager].
const (
	ToHost   Direction = iota // ReadInto
	FromHost                  // WriteFrom
	Within                    // Move
)

const directions = 3

// DeviceOptions set up a [Device]. The zero value copies as soon as it can.
type DeviceOptions struct {
	Delay  time.Duration // that every copy waits before it copies
	Rate   int64         // bytes a second of each direction; 0: no bound
	Pin    error         // what Pin says; nil: it pins
	DMABuf bool          // the arenas are a [memory.DMABufExporter] too
}

// Device is an emulated device: its memory is no memory of the process by its
// address, and its copies run late, in the order of the calls of one direction
// and in none between two. What goes wrong with a device goes wrong with this one
// when a test says so. It is safe for concurrent use, and needs no hardware.
type Device struct {
	o    DeviceOptions
	work sync.WaitGroup // a goroutine for each direction that has something to copy

	mu      sync.Mutex
	changed sync.Cond // of mu: something is held, let go, or dead
	queues  [directions]queue
	fault   error
	dead    error
	pinned  []span
	counts  Counts
}

// queue is what a direction has to copy.
type queue struct {
	tickets []*ticket
	running bool
	held    bool
	let     int // that pass all the same
}

// span is a stretch of host memory by its addresses.
type span struct{ from, to uintptr }

// Counts are those of a [Device] since it was made, and what there is of it now.
type Counts struct {
	Calls    [directions]int   // of each [Direction]
	Segments [directions]int   // of all calls
	Bytes    [directions]int64 // of all calls
	Slow     int               // calls with host memory that was not pinned
	Live     int               // tickets whose copies are not over now
	Unwaited int               // tickets that nobody has waited for yet
	Arenas   int               // open now
	Pinned   int64             // bytes now; what is pinned twice counts twice
}

// NewDevice makes a device. It is closed when its arenas are.
func NewDevice(o DeviceOptions) *Device {
	d := &Device{o: o}
	d.changed.L = &d.mu
	return d
}

// Alloc makes an arena of size bytes, filled with zeros: a [memory.Stager], and
// a [memory.DMABufExporter] where that was asked for. It is a [Place].
func (d *Device) Alloc(size int64) (memory.Arena, error) {
	a, err := d.alloc(size)
	if err != nil {
		return nil, fmt.Errorf("allocate %d bytes of an emulated device: %w", size, err)
	}
	d.mu.Lock()
	d.counts.Arenas++
	d.mu.Unlock()
	if d.o.DMABuf {
		return sharedArena{a}, nil
	}
	return a, nil
}

func (d *Device) alloc(size int64) (*deviceArena, error) {
	fd, err := unix.MemfdCreate("transfertest-device", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, err
	}
	a := &deviceArena{d: d, size: size, file: os.NewFile(uintptr(fd), "memfd:transfertest-device")}
	err = unix.Ftruncate(fd, size)
	if err == nil {
		_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW)
	}
	if err == nil {
		a.memory, err = unix.Mmap(fd, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err == nil {
		a.address, err = unix.Mmap(fd, 0, int(size), unix.PROT_NONE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, errors.Join(err, a.free())
	}
	return a, nil
}

// Hold keeps every copy of the directions, all if none is named, from now on
// until Release: it neither copies nor ends.
func (d *Device) Hold(of ...Direction) { d.hold(true, of) }

// Release ends Hold.
func (d *Device) Release(of ...Direction) { d.hold(false, of) }

func (d *Device) hold(held bool, of []Direction) {
	if len(of) == 0 {
		of = []Direction{ToHost, FromHost, Within}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, dir := range of {
		d.queues[dir].held, d.queues[dir].let = held, 0
	}
	d.changed.Broadcast()
}

// Let lets n copies more of a direction that is held pass.
func (d *Device) Let(of Direction, n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.queues[of].let += n
	d.changed.Broadcast()
}

// Fail lets every copy that begins from now on end with err, and copy nothing;
// nil ends that.
func (d *Device) Fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fault = err
}

// Kill ends the device: every copy that has not begun ends with err and copies
// nothing, now and for ever, whatever is held.
func (d *Device) Kill(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.dead = err
	d.changed.Broadcast()
}

// Counts is a snapshot.
func (d *Device) Counts() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

// Close returns when every copy has ended. It is an error if an arena is open,
// if a ticket was never waited for, or if host memory is pinned.
func (d *Device) Close() error {
	d.work.Wait()
	if c := d.Counts(); c.Arenas > 0 || c.Unwaited > 0 || c.Pinned > 0 {
		return fmt.Errorf("close an emulated device: %d arenas are open, %d copies were never waited for, %d bytes are pinned", c.Arenas, c.Unwaited, c.Pinned)
	}
	return nil
}

// ticket is one call of [memory.Stager].
type ticket struct {
	d     *Device
	move  func() // copies all of it
	over  func() // tells the arena
	bytes int64
	done  chan struct{} // closed when it is over
	err   error
	first sync.Once
}

// Wait is [memory.Ticket.Wait].
func (t *ticket) Wait() error {
	<-t.done
	t.first.Do(func() {
		t.d.mu.Lock()
		t.d.counts.Unwaited--
		t.d.mu.Unlock()
	})
	return t.err
}

// start starts a copy; err is why there is nothing to copy.
func (d *Device) start(of Direction, a *deviceArena, host []byte, segments []memory.Segment, err error, move func()) memory.Ticket {
	t := &ticket{d: d, move: move, done: make(chan struct{})}
	for _, s := range segments {
		t.bytes += s.Bytes
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counts.Calls[of]++
	d.counts.Segments[of] += len(segments)
	d.counts.Unwaited++
	if err == nil && a.closed {
		err = errors.New("the arena is closed")
	}
	if err != nil {
		t.err = err
		close(t.done)
		return t
	}
	if len(host) > 0 && !d.isPinnedLocked(host) {
		d.counts.Slow++
	}
	d.counts.Bytes[of] += t.bytes
	d.counts.Live++
	a.copies.Add(1)
	t.over = a.copies.Done
	q := &d.queues[of]
	q.tickets = append(q.tickets, t)
	if !q.running {
		q.running = true
		d.work.Add(1)
		go d.run(q)
	}
	return t
}

// run copies until a direction has nothing left.
func (d *Device) run(q *queue) {
	defer d.work.Done()
	for {
		t, end := d.next(q)
		if t == nil {
			return
		}
		if end == nil {
			if late := d.o.Delay + d.takes(t.bytes); late > 0 {
				pause(late)
			}
			end = d.end()
		}
		d.finish(t, end)
	}
}

// takes is how long the device copies so many bytes.
func (d *Device) takes(bytes int64) time.Duration {
	if d.o.Rate <= 0 {
		return 0
	}
	return time.Duration(float64(bytes) / float64(d.o.Rate) * float64(time.Second))
}

// next waits until the first of a queue may pass. No ticket: there is none. An
// error: it ends with that at once.
func (d *Device) next(q *queue) (*ticket, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(q.tickets) == 0 {
		q.running = false
		return nil, nil
	}
	t := q.tickets[0]
	q.tickets = q.tickets[1:]
	for d.dead == nil && q.held && q.let == 0 {
		d.changed.Wait()
	}
	if q.held {
		q.let = max(0, q.let-1)
	}
	return t, d.dead
}

// end is what a copy that begins now ends with.
func (d *Device) end() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.dead != nil {
		return d.dead
	}
	return d.fault
}

func (d *Device) finish(t *ticket, end error) {
	if t.err = end; end == nil {
		t.move()
	}
	d.mu.Lock()
	d.counts.Live--
	d.mu.Unlock()
	close(t.done)
	t.over()
}

// span of b.
func spanOf(b []byte) span {
	from := uintptr(unsafe.Pointer(unsafe.SliceData(b)))
	return span{from, from + uintptr(len(b))}
}

func (d *Device) isPinnedLocked(host []byte) bool {
	s := spanOf(host)
	return slices.ContainsFunc(d.pinned, func(p span) bool { return p.from <= s.from && s.to <= p.to })
}

// deviceArena is memory of a Device.
type deviceArena struct {
	d       *Device
	size    int64
	memory  []byte // what the device reads and writes
	address []byte // what others know, and nobody can touch
	file    *os.File

	closed bool // guarded by d.mu
	copies sync.WaitGroup
}

// Size is [memory.Arena.Size].
func (a *deviceArena) Size() int64 { return a.size }

// inside refuses segments that lie outside of the arena, or of n other bytes.
func (a *deviceArena) inside(segments []memory.Segment, n int64) error {
	for i, s := range segments {
		if s.Bytes < 0 || s.Arena < 0 || s.Other < 0 || s.Bytes > a.size-s.Arena || s.Bytes > n-s.Other {
			return fmt.Errorf("segment %d of an emulated device, %+v, lies outside of its %d bytes or of the other %d", i, s, a.size, n)
		}
	}
	return nil
}

// ReadInto is [memory.Stager.ReadInto].
func (a *deviceArena) ReadInto(host []byte, segments []memory.Segment) memory.Ticket {
	return a.d.start(ToHost, a, host, segments, a.inside(segments, int64(len(host))), func() {
		for _, s := range segments {
			copy(host[s.Other:s.Other+s.Bytes], a.memory[s.Arena:])
		}
	})
}

// WriteFrom is [memory.Stager.WriteFrom].
func (a *deviceArena) WriteFrom(host []byte, segments []memory.Segment) memory.Ticket {
	return a.d.start(FromHost, a, host, segments, a.inside(segments, int64(len(host))), func() {
		for _, s := range segments {
			copy(a.memory[s.Arena:s.Arena+s.Bytes], host[s.Other:])
		}
	})
}

// Move is [memory.Stager.Move].
func (a *deviceArena) Move(segments []memory.Segment) memory.Ticket {
	return a.d.start(Within, a, nil, segments, a.inside(segments, a.size), func() {
		for _, s := range segments {
			copy(a.memory[s.Arena:s.Arena+s.Bytes], a.memory[s.Other:])
		}
	})
}

// Pin is [memory.Stager.Pin].
func (a *deviceArena) Pin(host []byte) (unpin func() error, err error) {
	d := a.d
	if d.o.Pin != nil {
		return nil, d.o.Pin
	}
	s := spanOf(host)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pinned = append(d.pinned, s)
	d.counts.Pinned += int64(len(host))
	return func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		i := slices.Index(d.pinned, s)
		if i < 0 {
			return errors.New("unpin what is not pinned")
		}
		d.pinned = slices.Delete(d.pinned, i, i+1)
		d.counts.Pinned -= int64(s.to - s.from)
		return nil
	}, nil
}

// Close waits for the copies that touch the arena.
func (a *deviceArena) Close() error {
	a.d.mu.Lock()
	closed := a.closed
	a.closed = true
	a.d.mu.Unlock()
	a.copies.Wait()
	if closed {
		return nil
	}
	a.d.mu.Lock()
	a.d.counts.Arenas--
	a.d.mu.Unlock()
	return a.free()
}

func (a *deviceArena) free() error {
	err := a.file.Close()
	for _, m := range [][]byte{a.memory, a.address} {
		if m != nil {
			err = errors.Join(err, unix.Munmap(m))
		}
	}
	return err
}

// sharedArena is a deviceArena that other devices can reach.
type sharedArena struct{ *deviceArena }

// Address is [memory.DMABufExporter.Address].
func (a sharedArena) Address() memory.DeviceAddr {
	return memory.DeviceAddr(uintptr(unsafe.Pointer(unsafe.SliceData(a.address))))
}

// DMABuf is [memory.DMABufExporter.DMABuf].
func (a sharedArena) DMABuf(offset, n int64) (*os.File, int64, error) {
	if n <= 0 || offset < 0 || n > a.size-offset {
		return nil, 0, fmt.Errorf("%d bytes at %d of %d: %w", n, offset, a.size, memory.ErrNoDMABuf)
	}
	fd, err := unix.FcntlInt(a.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("%w: %w", memory.ErrNoDMABuf, err)
	}
	return os.NewFile(uintptr(fd), "dma-buf"), offset, nil
}

// Flush is [memory.DMABufExporter.Flush].
func (a sharedArena) Flush() error { return a.d.end() }

var (
	_ memory.Stager         = (*deviceArena)(nil)
	_ memory.DMABufExporter = sharedArena{}
)
