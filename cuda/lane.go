//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"
	"unsafe"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

const (
	maxWaiting  = 256     // jobs of a lane that wait; who comes then waits too
	maxFlights  = 16      // of a lane, until one of them is over
	bufferBytes = 1 << 20 // of a buffer for what is not pinned: some 20 us of a link, more than a call costs
	maxBuffers  = 2       // of them: one is filled while the other is copied

	// A wait asks a few times in the first moments, when copies of a page end,
	// then now and then, and then it sleeps until the device wakes it.
	spinFor = 20 * time.Microsecond // no pause is longer that is not slept
	pollFor = 200 * time.Microsecond
)

// lane is a device's stream of one direction: a goroutine that starts the jobs
// of all arenas in the order in which they come, and one that sees them end.
type lane struct {
	d         *device
	direction Direction
	stream    driver.Stream
	jobs      chan *job
	flights   chan *flight // those under way, in order
	idle      chan *flight
	all       []*flight
	buffers   chan []byte // those that are free
	slots     chan *slot  // likewise
	work      sync.WaitGroup

	// These are of the goroutine that starts jobs.
	list       *driver.List
	cur        *flight // that which is filled
	open       *slot   // likewise; it is not of cur yet
	allBuffers [][]byte
	allSlots   []*slot
}

// flight is what one call into C has started, with one event behind it.
type flight struct {
	event   driver.Event
	jobs    []*job // that have part in it
	ends    int    // how many of them end with it
	batches []*job // whose each batch is
	buffer  []byte // for what is not pinned; nil: none
	filled  int
	outs    []out
	slot    *slot // whose kernel runs behind the batches
	started bool  // something of it may run
	marked  bool  // the event stands behind it
}

// out is a stretch of a buffer that goes to host memory once it is there.
type out struct {
	j        *job
	to, from []byte
}

// newLane makes a lane; the context is current. free undoes it, as far as it came.
func newLane(d *device, direction Direction) (*lane, error) {
	l := &lane{
		d: d, direction: direction,
		jobs: make(chan *job, maxWaiting), flights: make(chan *flight, maxFlights), idle: make(chan *flight, maxFlights),
		buffers: make(chan []byte, maxBuffers), slots: make(chan *slot, maxSlots),
	}
	var err error
	if l.list, err = driver.NewList(driver.Most); err != nil {
		return nil, err
	}
	if l.stream, err = driver.NewStream(); err != nil {
		l.list.Free()
		return nil, err
	}
	for range maxFlights {
		e, err := driver.NewEvent()
		if err != nil {
			return nil, errors.Join(err, l.free())
		}
		f := &flight{event: e}
		l.all = append(l.all, f)
		l.idle <- f
	}
	return l, nil
}

// free gives back what the lane has; the context is current, nothing runs.
func (l *lane) free() error {
	var errs []error
	errs = append(errs, l.freeSlots())
	for _, b := range l.allBuffers {
		errs = append(errs, driver.HostFree(b))
	}
	for _, f := range l.all {
		errs = append(errs, f.event.Destroy())
	}
	errs = append(errs, l.stream.Destroy())
	l.list.Free()
	return errors.Join(errs...)
}

func (l *lane) start() {
	l.work.Go(l.submit)
	l.work.Go(l.complete)
}

// stop waits for both goroutines. No arena is open any more, so nobody hands
// jobs in.
func (l *lane) stop() {
	close(l.jobs)
	l.work.Wait()
}

// submit starts jobs, all that wait at a time.
func (l *lane) submit() {
	defer close(l.flights)
	for j := range l.jobs {
		l.begin(j)
		for more := true; more; {
			select {
			case next, ok := <-l.jobs:
				if more = ok; ok {
					l.begin(next)
				}
			default:
				more = false
			}
		}
		l.fly()
	}
}

// begin puts a job into flights. Each job has batches of its own, since it runs
// behind those before it and the copies of a batch are in no order.
func (l *lane) begin(j *job) {
	if j.far {
		l.fly()
	}
	if l.direction == HostToDevice && l.scatters(j) {
		l.fillScattered(j)
	} else {
		l.fill(j)
	}
	l.join(j)
	l.endBatch(j)
	l.cur.ends = len(l.cur.jobs)
	if j.far || l.cur.slot != nil {
		l.fly() // what comes next has another form, or runs behind the kernel
	}
}

// fill adds all pieces of a job to the list.
func (l *lane) fill(j *job) {
	for p := range merged(j.segments) {
		for p.Bytes > 0 {
			n, pinned := j.piece(p.Arena, p.Other, p.Bytes)
			l.copy(j, p.Arena, p.Other, n, pinned)
			p.Arena, p.Other, p.Bytes = p.Arena+n, p.Other+n, p.Bytes-n
		}
	}
}

// piece is how many of some bytes are of one chunk on both sides, and whether
// the driver can copy them as they are.
func (j *job) piece(arena, other, bytes int64) (n int64, pinned bool) {
	n = min(bytes, j.arena.chunkRest(arena))
	switch {
	case j.from != nil:
		return min(n, j.from.chunkRest(other)), true
	case j.pinned == nil:
		return n, false
	}
	rest, pinned := j.pinned.chunkRest(j.host, other)
	return min(n, rest), pinned
}

// copy adds a copy to the list.
func (l *lane) copy(j *job, arena, other, n int64, pinned bool) {
	dev := j.arena.base + uint64(arena)
	if !pinned {
		l.copyBuffered(j, dev, j.host[other:other+n])
		return
	}
	l.need(j)
	switch {
	case j.from != nil:
		l.list.Add(dev, j.from.base+uint64(other), n)
	case l.direction == HostToDevice:
		l.list.Add(dev, address(j.host)+uint64(other), n)
	default:
		l.list.Add(address(j.host)+uint64(other), dev, n)
	}
}

// copyBuffered adds copies by way of buffers.
func (l *lane) copyBuffered(j *job, dev driver.Addr, host []byte) {
	l.d.r.counts.copies[l.direction].slow.Add(uint64(len(host)))
	for len(host) > 0 {
		l.need(j)
		if err := l.needBuffer(j); err != nil {
			j.fail(fmt.Errorf("make a pinned buffer: %w", err))
			return
		}
		f := l.cur
		b := f.buffer[f.filled:]
		b = b[:min(len(b), len(host))]
		if l.direction == HostToDevice {
			copy(b, host)
			l.list.Add(dev, address(b), int64(len(b)))
		} else {
			l.list.Add(address(b), dev, int64(len(b)))
			f.outs = append(f.outs, out{j: j, to: host[:len(b)], from: b})
		}
		f.filled += len(b)
		dev, host = dev+uint64(len(b)), host[len(b):]
	}
}

// need makes room for a copy of the job.
func (l *lane) need(j *job) {
	if l.list.Room() == 0 {
		l.endBatch(j)
		l.fly()
	}
	l.join(j)
}

// needBuffer makes room in a buffer of the flight, which it may change.
func (l *lane) needBuffer(j *job) error {
	if l.cur.buffer != nil && l.cur.filled < len(l.cur.buffer) {
		return nil
	}
	if l.cur.buffer != nil {
		l.endBatch(j)
		l.fly()
		l.join(j)
	}
	select {
	case l.cur.buffer = <-l.buffers:
		return nil
	default:
	}
	if len(l.allBuffers) == maxBuffers {
		l.cur.buffer = <-l.buffers
		return nil
	}
	return l.d.do(func() error {
		b, err := driver.HostAlloc(bufferBytes)
		if err == nil {
			l.allBuffers = append(l.allBuffers, b)
			l.cur.buffer = b
		}
		return err
	})
}

// join makes the job part of the flight that is filled.
func (l *lane) join(j *job) {
	if l.cur == nil {
		l.cur = <-l.idle
	}
	if f := l.cur; len(f.jobs) == 0 || f.jobs[len(f.jobs)-1] != j {
		f.jobs = append(f.jobs, j)
	}
}

// endBatch ends the batch of the job, if there is one.
func (l *lane) endBatch(j *job) {
	if l.list.End() >= 0 {
		l.cur.batches = append(l.cur.batches, j)
	}
}

// fly starts what was filled.
func (l *lane) fly() {
	f := l.cur
	if f == nil {
		return
	}
	l.cur = nil
	err := l.d.do(func() error {
		f.started = true
		if l.launch(f) {
			return f.event.Record(l.stream)
		}
		f.started = false
		return nil
	})
	f.marked = f.started && err == nil
	if err != nil && !f.started {
		for _, j := range f.jobs {
			j.fail(err)
		}
	}
	l.list.Reset()
	l.flights <- f
}

// launch starts the batches, and the kernel behind them, and tells errors to
// those whose they are. It says whether something may run.
func (l *lane) launch(f *flight) bool {
	if l.list.Empty() {
		return false
	}
	form := driver.Form(l.d.form.Load())
	if f.jobs[0].far {
		form = driver.OneByOne
	}
	calls, next := l.list.Submit(int(l.direction), form, l.stream)
	if next != form {
		l.d.form.Store(int32(next))
		l.d.r.log.Info("the driver takes no batches after all", "device", l.d.gpu.UUID.String())
	}
	l.d.r.counts.copies[l.direction].calls.Add(uint64(calls))
	var last error
	for i, j := range f.batches {
		if last = l.d.judge(l.list.Result(i)); last != nil {
			j.fail(fmt.Errorf("start copies from %s: %w", l.direction, last))
		}
	}
	// The last batch has what the kernel goes by.
	if f.slot != nil && last == nil {
		if err := l.d.judge(f.slot.launch(l)); err != nil {
			f.jobs[len(f.jobs)-1].fail(fmt.Errorf("start the kernel: %w", err))
		}
	}
	return true
}

// complete sees flights end, in their order.
func (l *lane) complete() {
	for f := range l.flights {
		if f.started {
			if err := l.wait(f); err != nil {
				for _, j := range f.jobs {
					j.fail(fmt.Errorf("copy from %s: %w", l.direction, err))
				}
			}
		}
		for _, o := range f.outs {
			if o.j.failed() == nil {
				copy(o.to, o.from)
			}
		}
		if f.buffer != nil {
			l.buffers <- f.buffer
		}
		if f.slot != nil {
			l.slots <- f.slot
		}
		for _, j := range f.jobs[:f.ends] {
			j.finish()
		}
		clear(f.jobs)
		clear(f.batches)
		clear(f.outs)
		*f = flight{event: f.event, jobs: f.jobs[:0], batches: f.batches[:0], outs: f.outs[:0]}
		l.idle <- f
	}
}

// wait returns when nothing of a flight runs any more. A device that cannot say
// so is dead: nobody knows what it still writes.
func (l *lane) wait(f *flight) error {
	var err error
	if f.marked {
		if err = l.passed(f.event); err == nil || errors.Is(err, ErrDead) {
			return err
		}
	}
	if again := l.d.judge(l.d.ctx.Do(l.stream.Synchronize)); again != nil {
		if errors.Is(again, ErrDead) {
			return again
		}
		return l.d.die(errors.Join(err, again))
	}
	return err
}

// passed returns when the stream has come by an event. Each time that it has not,
// the next question comes after twice the pause.
func (l *lane) passed(e driver.Event) error {
	begin := time.Now()
	for pause := time.Microsecond; ; pause *= 2 {
		var ok bool
		err := l.d.judge(l.d.ctx.Do(func() (err error) { ok, err = e.Passed(); return err }))
		if ok || err != nil {
			return err
		}
		if time.Since(begin) > pollFor {
			return l.d.judge(l.d.ctx.Do(e.Synchronize))
		}
		if pause > spinFor {
			time.Sleep(pause)
			continue
		}
		for until := time.Now().Add(pause); time.Now().Before(until); {
			runtime.Gosched()
		}
	}
}

// address is that of host memory, as the driver takes it.
func address(b []byte) driver.Addr {
	return driver.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
}
