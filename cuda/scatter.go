//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"encoding/binary"
	"errors"
	"math"
	"time"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

const (
	slotBytes   = 4 << 20 // of pieces that go together
	slotPieces  = 4096
	slotWord    = 16 // what the kernel copies at once: addresses and sizes are multiples of it
	slotEntry   = 24 // bytes of an entry of its list: from, to, bytes
	maxSlots    = 2  // one is filled by the link while the kernel empties the other
	maxScatter  = 128 << 10
	minPieces   = 32 // fewer small ones are no burden to a copy engine
	minOneByRun = 4  // small ones for each stretch of host memory

	// Few blocks: the kernel works at the speed of the device's memory, and all
	// others belong to the engine.
	kernelBlocks  = 8
	kernelThreads = 512
)

// slot is memory of a device where small pieces arrive as they lie in the host,
// and from where the kernel takes them to their places.
type slot struct {
	host []byte      // the kernel's list as it is made here, pinned
	list driver.Addr // and there
	ring driver.Addr
	runs []run
	used int64
	n    int // pieces
}

// run is a stretch of host memory that goes to the slot as one.
type run struct {
	host  driver.Addr
	at    int64 // in the ring
	bytes int64
}

// newSlot makes one; the context is current.
func newSlot() (*slot, error) {
	s := &slot{}
	var err error
	if s.ring, err = driver.Alloc(slotBytes); err != nil {
		return nil, err
	}
	if s.list, err = driver.Alloc(slotPieces * slotEntry); err == nil {
		s.host, err = driver.HostAlloc(slotPieces * slotEntry)
	}
	if err != nil {
		return nil, errors.Join(err, s.free())
	}
	return s, nil
}

func (s *slot) free() error {
	var errs []error
	if s.host != nil {
		errs = append(errs, driver.HostFree(s.host))
	}
	if s.list != 0 {
		errs = append(errs, driver.Free(s.list))
	}
	return errors.Join(append(errs, driver.Free(s.ring))...)
}

func (s *slot) reset() { s.runs, s.used, s.n = s.runs[:0], 0, 0 }

// add adds a piece, unless the slot is full. One that is the first of a chunk of
// host memory begins a run.
func (s *slot) add(to, host driver.Addr, bytes int64, first bool) bool {
	if s.n == slotPieces || s.used+bytes > slotBytes || len(s.runs) == slotPieces-1 {
		return false
	}
	if k := len(s.runs) - 1; k >= 0 && !first && s.runs[k].host+uint64(s.runs[k].bytes) == host {
		s.runs[k].bytes += bytes
	} else {
		s.runs = append(s.runs, run{host: host, at: s.used, bytes: bytes})
	}
	e := s.host[s.n*slotEntry:]
	binary.NativeEndian.PutUint64(e, s.ring+uint64(s.used))
	binary.NativeEndian.PutUint64(e[8:], to)
	binary.NativeEndian.PutUint64(e[16:], uint64(bytes))
	s.used += bytes
	s.n++
	return true
}

// launch starts the kernel behind what is in the stream.
func (s *slot) launch(l *lane) error {
	l.d.r.counts.kernels.Add(1)
	return l.d.kernel.Launch(min(kernelBlocks, s.n), kernelThreads, s.list, s.n, l.stream)
}

// isSmall says whether a piece is one for the kernel.
func (l *lane) isSmall(j *job, arena, n int64) bool {
	return n < l.d.caps.Scatter && n%slotWord == 0 && (j.arena.base+uint64(arena))%slotWord == 0
}

// scatters says whether a job has many small pieces that lie together in pinned
// host memory.
func (l *lane) scatters(j *job) bool {
	if l.d.caps.Scatter == 0 || j.pinned == nil || len(j.segments) < minPieces {
		return false
	}
	small, runs, end := 0, 0, int64(-1)
	for p := range merged(j.segments) {
		if !l.isSmall(j, p.Arena, p.Bytes) {
			continue
		}
		small++
		if p.Other != end {
			runs++
		}
		end = p.Other + p.Bytes
	}
	return small >= minPieces && runs*minOneByRun <= small
}

// fillScattered is fill, with small pieces by slots.
func (l *lane) fillScattered(j *job) {
	for p := range merged(j.segments) {
		for p.Bytes > 0 {
			n, pinned := j.piece(p.Arena, p.Other, p.Bytes)
			if pinned && l.isSmall(j, p.Arena, n) {
				l.copyScattered(j, p.Arena, p.Other, n)
			} else {
				l.copy(j, p.Arena, p.Other, n, pinned)
			}
			p.Arena, p.Other, p.Bytes = p.Arena+n, p.Other+n, p.Bytes-n
		}
	}
	l.closeSlot(j)
}

func (l *lane) copyScattered(j *job, arena, other, n int64) {
	for {
		if l.open == nil {
			// All others are of flights that are under way, and come back.
			l.open = <-l.slots
			l.open.reset()
		}
		if l.open.add(j.arena.base+uint64(arena), address(j.host)+uint64(other), n, j.pinned.begins(j.host, other)) {
			return
		}
		l.closeSlot(j)
		l.fly()
	}
}

// closeSlot makes the open slot part of the flight.
func (l *lane) closeSlot(j *job) {
	s := l.open
	if s == nil {
		return
	}
	l.open = nil
	l.join(j)
	if l.cur.slot != nil || l.list.Room() < len(s.runs)+1 {
		l.endBatch(j)
		l.fly()
		l.join(j)
	}
	l.endBatch(j)
	l.addSlot(s)
	l.endBatch(j)
	l.cur.slot = s
}

// addSlot adds the copies that fill a slot, of which there are not more than pieces.
func (l *lane) addSlot(s *slot) {
	for _, r := range s.runs {
		l.list.Add(s.ring+uint64(r.at), r.host, r.bytes)
	}
	l.list.Add(s.list, address(s.host), int64(s.n*slotEntry))
}

// makeSlots makes the lane's; the context is current.
func (l *lane) makeSlots() error {
	for range maxSlots {
		s, err := newSlot()
		if err != nil {
			return err
		}
		l.allSlots = append(l.allSlots, s)
		l.slots <- s
	}
	return nil
}

// freeSlots frees them; none is in use.
func (l *lane) freeSlots() error {
	var errs []error
	for _, s := range l.allSlots {
		errs = append(errs, s.free())
	}
	l.allSlots, l.slots = nil, nil
	return errors.Join(errs...)
}

// calibrate measures up to which size pieces go faster by the kernel than one
// by one, before anything else runs in the lane; the context is current. It
// takes some milliseconds, a tenth of a second at most.
func (l *lane) calibrate() (below int64, err error) {
	const bytes, most, first = 2 << 20, 256, 4 << 10
	host, err := driver.HostAlloc(bytes)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, driver.HostFree(host)) }()
	to, err := driver.Alloc(bytes)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, driver.Free(to)) }()
	s, f := l.allSlots[0], l.all[0]
	deadline := time.Now().Add(100 * time.Millisecond)
	for size := int64(first); size < maxScatter && time.Now().Before(deadline); size *= 2 {
		n := min(most, bytes/size)
		engine, err := l.fastest(deadline, f.event, func() error {
			for i := range n {
				l.list.Add(to+uint64((n-1-i)*size), address(host)+uint64(i*size), size)
			}
			return l.submitNow()
		})
		if err != nil {
			return 0, err
		}
		kernel, err := l.fastest(deadline, f.event, func() error {
			s.reset()
			for i := range n {
				s.add(to+uint64((n-1-i)*size), address(host)+uint64(i*size), size, i == 0)
			}
			l.addSlot(s)
			if err := l.submitNow(); err != nil {
				return err
			}
			return l.d.kernel.Launch(min(kernelBlocks, s.n), kernelThreads, s.list, s.n, l.stream)
		})
		if err != nil {
			return 0, err
		}
		if kernel*10 > engine*9 { // not worth a kernel
			break
		}
		below = 2 * size
	}
	return below, nil
}

// submitNow submits the list as one batch.
func (l *lane) submitNow() error {
	b := l.list.End()
	_, next := l.list.Submit(int(l.direction), driver.Form(l.d.form.Load()), l.stream)
	l.d.form.Store(int32(next))
	err := l.list.Result(b)
	l.list.Reset()
	return err
}

// fastest is the shortest of a few runs of what f starts; the first is not counted.
func (l *lane) fastest(deadline time.Time, e driver.Event, f func() error) (time.Duration, error) {
	best := time.Duration(math.MaxInt64)
	for i := range 4 {
		begin := time.Now()
		if err := f(); err != nil {
			return 0, errors.Join(err, l.stream.Synchronize())
		}
		if err := e.Record(l.stream); err != nil {
			return 0, errors.Join(err, l.stream.Synchronize())
		}
		for {
			if ok, err := e.Passed(); err != nil {
				return 0, err
			} else if ok {
				break
			}
			if time.Now().After(deadline) {
				if err := l.stream.Synchronize(); err != nil {
					return 0, err
				}
			}
		}
		if i > 0 {
			best = min(best, time.Since(begin))
		}
	}
	return best, nil
}
