//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"

	"github.com/kvferry/kvferry/cuda/internal/driver"
	"github.com/kvferry/kvferry/internal/memory"
)

// Arena is memory of a device: ours, or imported. It is safe for concurrent use.
type Arena struct {
	d        *device
	block    *block
	base     driver.Addr
	bytes    int64
	imported bool
	handle   Handle        // what it was imported by
	files    []*os.File    // likewise
	quiet    chan struct{} // closed when it has been closed and nothing runs
	freed    sync.Once
	freeErr  error

	mu     sync.Mutex
	closed bool
	users  int // jobs, and calls
}

var (
	_ memory.Stager         = (*Arena)(nil)
	_ memory.DMABufExporter = (*Arena)(nil)
)

// newArena makes an arena of a block, of which it has a reference.
func newArena(d *device, b *block, offset, bytes int64) *Arena {
	return &Arena{d: d, block: b, base: b.base + uint64(offset), bytes: bytes, quiet: make(chan struct{})}
}

// granule is what allocations are rounded up to: the driver's own pages, so
// that whole pages of the machine can be told as a dma-buf.
const granule = hugePage

func rounded(bytes, to int64) int64 { return (bytes + to - 1) / to * to }

// Alloc makes an arena of bytes, filled with zeros, in memory of the device that
// is rounded up to 2 MiB. The error wraps [ErrNoMemory] where there is too little.
func (r *Runtime) Alloc(u UUID, bytes int64) (*Arena, error) {
	return r.allocate(u, bytes, func(d *device) (*block, error) {
		b := &block{d: d, bytes: rounded(bytes, granule), refs: 1, free: func(b *block) error { return driver.Free(b.base) }}
		var err error
		if b.base, err = driver.Alloc(b.bytes); err != nil {
			return nil, err
		}
		return b, nil
	})
}

// AllocChunks is Alloc of memory that is told by files, in chunks of some bytes
// (rounded up as the device wants it; 0: one chunk). It can be imported from
// other containers, whose processes do not see this one.
func (r *Runtime) AllocChunks(u UUID, bytes, chunk int64) (*Arena, error) {
	return r.allocate(u, bytes, func(d *device) (*block, error) { return newChunks(d, bytes, chunk) })
}

func (r *Runtime) allocate(u UUID, bytes int64, of func(*device) (*block, error)) (*Arena, error) {
	a, err := func() (*Arena, error) {
		if err := r.enter(); err != nil {
			return nil, err
		}
		defer r.calls.Done()
		if bytes <= 0 || bytes > math.MaxInt64-granule {
			return nil, errors.New("want at least 1 byte, and less than there are")
		}
		d, err := r.opened(u)
		if err != nil {
			return nil, err
		}
		var b *block
		err = d.do(func() error {
			var err error
			if b, err = of(d); err != nil {
				return err
			}
			err = driver.Zero(b.base, b.bytes, d.aside)
			return errors.Join(err, d.aside.Synchronize())
		})
		if err != nil {
			if b != nil {
				err = errors.Join(err, b.release())
			}
			return nil, err
		}
		b.syncMemops()
		return r.add(newArena(d, b, 0, bytes)), nil
	}()
	if err != nil {
		return nil, fmt.Errorf("allocate %d bytes of %s: %w", bytes, u, full(err))
	}
	return a, nil
}

// full adds [ErrNoMemory] where that is what the driver says.
func full(err error) error {
	if e, ok := errors.AsType[*Error](err); ok && e.Code == driver.OutOfMemory {
		return fmt.Errorf("%w: %w", ErrNoMemory, err)
	}
	return err
}

// Wrap makes an arena of memory that somebody else of this process has
// allocated, by either way, and frees after the arena has been closed.
func (r *Runtime) Wrap(u UUID, at memory.DeviceAddr, bytes int64) (*Arena, error) {
	a, err := func() (*Arena, error) {
		if err := r.enter(); err != nil {
			return nil, err
		}
		defer r.calls.Done()
		if bytes <= 0 || uint64(bytes) > math.MaxUint64-uint64(at) {
			return nil, errors.New("want at least 1 byte, and less than there are")
		}
		d, err := r.opened(u)
		if err != nil {
			return nil, err
		}
		var b *block
		var offset int64
		if err := d.do(func() (err error) { b, offset, err = found(d, driver.Addr(at), bytes); return err }); err != nil {
			return nil, err
		}
		b.syncMemops()
		return r.add(newArena(d, b, offset, bytes)), nil
	}()
	if err != nil {
		return nil, fmt.Errorf("take %d bytes at %#x of %s for an arena: %w", bytes, uint64(at), u, err)
	}
	return a, nil
}

// GPU is the device that the memory is on.
func (a *Arena) GPU() GPU { return a.d.gpu }

// Size is [memory.Arena.Size].
func (a *Arena) Size() int64 { return a.bytes }

// Address is [memory.DMABufExporter.Address].
func (a *Arena) Address() memory.DeviceAddr { return memory.DeviceAddr(a.base) }

// chunkRest is how many bytes from an offset on are of one chunk.
func (a *Arena) chunkRest(offset int64) int64 {
	return a.block.chunkRest(int64(a.base-a.block.base) + offset)
}

// enter keeps the arena open until leave.
func (a *Arena) enter() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return fmt.Errorf("arena: %w", ErrClosed)
	}
	a.users++
	return nil
}

func (a *Arena) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.users--
	if a.closed && a.users == 0 {
		close(a.quiet)
	}
}

// Close waits for the copies that touch it, and frees it, or closes the import.
func (a *Arena) Close() error {
	a.mu.Lock()
	if !a.closed {
		a.closed = true
		if a.users == 0 {
			close(a.quiet)
		}
	}
	a.mu.Unlock()
	<-a.quiet
	a.freed.Do(func() {
		if a.freeErr = a.block.release(); a.freeErr != nil {
			a.freeErr = fmt.Errorf("free an arena: %w", a.freeErr)
		}
		closeAll(a.files)
		a.d.r.remove(a)
	})
	return a.freeErr
}

// ReadInto is [memory.Stager.ReadInto].
func (a *Arena) ReadInto(host []byte, segments []memory.Segment) memory.Ticket {
	return a.d.start(DeviceToHost, &job{arena: a, host: host, segments: segments}, int64(len(host)))
}

// WriteFrom is [memory.Stager.WriteFrom].
func (a *Arena) WriteFrom(host []byte, segments []memory.Segment) memory.Ticket {
	return a.d.start(HostToDevice, &job{arena: a, host: host, segments: segments}, int64(len(host)))
}

// Move is [memory.Stager.Move].
func (a *Arena) Move(segments []memory.Segment) memory.Ticket {
	return a.d.start(DeviceToDevice, &job{arena: a, from: a, segments: segments}, a.bytes)
}

// Pull copies from src to dst, which may be on different devices, as
// [memory.Stager]'s calls do: Arena is the offset in dst, Other that in src.
func (r *Runtime) Pull(dst, src *Arena, segments []memory.Segment) memory.Ticket {
	return dst.d.start(DeviceToDevice, &job{arena: dst, from: src, segments: segments}, src.bytes)
}

// start checks a job and hands it to its lane.
func (d *device) start(direction Direction, j *job, other int64) memory.Ticket {
	bytes, err := within(j.segments, j.arena.bytes, other)
	if err != nil {
		return over{fmt.Errorf("copy from %s: %w", direction, err)}
	}
	err = d.alive()
	if err == nil && j.from != nil {
		err = j.from.d.alive()
	}
	if err != nil || bytes == 0 {
		return over{err}
	}
	if err := j.arena.enter(); err != nil {
		return over{err}
	}
	if j.from != nil {
		if err := j.from.enter(); err != nil {
			j.arena.leave()
			return over{err}
		}
		j.far = d.reach(j.from.d) != nil
	}
	j.pinned = pins.use(j.host)
	j.done = make(chan struct{})
	c := &d.r.counts.copies[direction]
	c.segments.Add(uint64(len(j.segments)))
	c.bytes.Add(uint64(bytes))
	d.lanes[direction].jobs <- j
	return j
}

// DMABuf is [memory.DMABufExporter.DMABuf].
func (a *Arena) DMABuf(offset, n int64) (*os.File, int64, error) {
	if err := a.enter(); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", memory.ErrNoDMABuf, err)
	}
	defer a.leave()
	if offset < 0 || n <= 0 || n > a.bytes-offset {
		return nil, 0, fmt.Errorf("%w: %d bytes at %d of an arena of %d", memory.ErrNoDMABuf, n, offset, a.bytes)
	}
	if a.imported && a.block.chunks != nil {
		return nil, 0, fmt.Errorf("%w: %w: another process lent it in chunks (expandable segments), which are not given to cards: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False there", memory.ErrNoDMABuf, memory.ErrOutOfReach)
	}
	if !a.d.caps.DMABuf {
		return nil, 0, fmt.Errorf("%w: neither the driver nor the kernel has it for %s", memory.ErrNoDMABuf, a.d.gpu.Name)
	}
	from, bytes := a.block.exported(a.base+uint64(offset), n)
	var fd int
	if err := a.d.do(func() (err error) { fd, err = driver.DMABuf(from, bytes); return err }); err != nil {
		return nil, 0, fmt.Errorf("%w: %w", memory.ErrNoDMABuf, err)
	}
	return os.NewFile(uintptr(fd), "dma-buf"), int64(a.base-from) + offset, nil
}

const (
	ownerOrdered = 100 // CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
	flushByHost  = 1   // CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST
)

// Flush is [memory.DMABufExporter.Flush].
func (a *Arena) Flush() error {
	if a.d.caps.OwnerOrdered {
		return nil
	}
	if err := a.enter(); err != nil {
		return err
	}
	defer a.leave()
	if driver.Device(a.d.gpu.Ordinal).Attribute(driver.FlushOptions)&flushByHost == 0 {
		return fmt.Errorf("flush what cards have written: %s has no means for it", a.d.gpu.Name)
	}
	if err := a.d.do(driver.FlushWrites); err != nil {
		return fmt.Errorf("flush what cards have written: %w", err)
	}
	return nil
}
