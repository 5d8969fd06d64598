//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"math"
	"sort"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

// block is a stretch of a device's addresses that arenas share, and which is
// given back with the last of them.
type block struct {
	d      *device
	base   driver.Addr
	bytes  int64
	chunks []int64            // bytes of each; nil: it is one allocation
	ends   []int64            // of each chunk, from the base
	free   func(*block) error // nil: it is another's

	refs   int  // guarded by blocks.mu, as are
	handle bool // whether blocks.told has it
	told   [64]byte
	key    importKey // of blocks.imported; zero: none
	word   uint64    // of the handle by which it was told, or imported
}

// release gives a reference back.
func (b *block) release() error {
	return blocks.drop(b, func() error {
		if b.free == nil {
			return nil
		}
		return b.d.free(func() error { return b.free(b) })
	})
}

func (b *block) setChunks(chunks []int64) {
	b.chunks, b.ends = chunks, make([]int64, len(chunks))
	b.bytes = 0
	for i, n := range chunks {
		b.bytes += n
		b.ends[i] = b.bytes
	}
}

// chunkRest is how many bytes from an offset on are of one chunk.
func (b *block) chunkRest(offset int64) int64 {
	if b.chunks == nil {
		return math.MaxInt64
	}
	i := sort.Search(len(b.ends), func(i int) bool { return b.ends[i] > offset })
	return b.ends[i] - offset
}

// exported is what the driver is asked for a dma-buf of n bytes: all of an
// allocation, or, of chunks, whole pages round them.
func (b *block) exported(at driver.Addr, n int64) (from driver.Addr, bytes int64) {
	const page = 64 << 10 // that of every machine that has these devices
	if b.chunks == nil {
		return b.base, rounded(b.bytes, page)
	}
	from = at / page * page
	return from, rounded(int64(at-from)+n, page)
}

// syncMemops is for memory that other devices read and write. It matters for
// synchronous calls alone, of which we have none: the engine may.
func (b *block) syncMemops() {
	err := b.d.do(func() error {
		at := b.base
		for i := 0; i == 0 || i < len(b.chunks); i++ {
			if err := driver.SyncMemops(at); err != nil {
				return err
			}
			if b.chunks != nil {
				at += uint64(b.chunks[i])
			}
		}
		return nil
	})
	if err != nil {
		b.d.r.log.Debug("memory has no synchronous calls for other devices", "err", err)
	}
}

// newChunks allocates chunks and maps them one behind the other. The context is
// current.
func newChunks(d *device, bytes, chunk int64) (*block, error) {
	dev := driver.Device(d.gpu.Ordinal)
	if dev.Attribute(driver.VMM) == 0 || dev.Attribute(driver.VMMFiles) == 0 {
		return nil, fmt.Errorf("%w: %s has no memory that files tell", ErrNotShareable, d.gpu.Name)
	}
	g, err := driver.Granularity(dev)
	if err != nil {
		return nil, err
	}
	bytes = rounded(bytes, max(g, granule))
	if chunk <= 0 || chunk > bytes {
		chunk = bytes
	}
	chunk = rounded(chunk, max(g, granule))
	n := (bytes + chunk - 1) / chunk
	if n > MaxChunks {
		return nil, fmt.Errorf("%d bytes are more than %d chunks of %d", bytes, MaxChunks, chunk)
	}
	sizes := make([]int64, n)
	for i := range sizes {
		sizes[i] = min(chunk, bytes-int64(i)*chunk)
	}
	rdma := dev.Attribute(driver.VMMWithRDMA) != 0
	return mapChunks(d, sizes, func(i int) (driver.Chunk, error) { return driver.NewChunk(dev, sizes[i], rdma) })
}

// mapChunks maps chunks of some sizes one behind the other. The context is current.
func mapChunks(d *device, sizes []int64, chunk func(int) (driver.Chunk, error)) (*block, error) {
	b := &block{d: d, refs: 1, free: unmapChunks}
	b.setChunks(sizes)
	var err error
	if b.base, err = driver.Reserve(b.bytes); err != nil {
		return nil, err
	}
	mapped := 0
	err = func() error {
		for i, at := 0, b.base; i < len(sizes); i++ {
			c, err := chunk(i)
			if err != nil {
				return err
			}
			err = driver.Map(at, sizes[i], c)
			// What is mapped lives on without its handle.
			if again := c.Release(); err != nil || again != nil {
				return errors.Join(err, again)
			}
			mapped++
			at += uint64(sizes[i])
		}
		return driver.SetAccess(b.base, b.bytes, driver.Device(d.gpu.Ordinal))
	}()
	if err != nil {
		return nil, errors.Join(err, unmap(b, mapped))
	}
	return b, nil
}

func unmapChunks(b *block) error { return unmap(b, len(b.chunks)) }

// unmap unmaps the first n chunks and gives all addresses back.
func unmap(b *block, n int) error {
	var errs []error
	at := b.base
	for _, bytes := range b.chunks[:n] {
		errs = append(errs, driver.Unmap(at, bytes))
		at += uint64(bytes)
	}
	return errors.Join(append(errs, driver.Unreserve(b.base, b.bytes))...)
}

// found looks at memory that others have allocated: what allocation, or which
// chunks, some bytes of it lie in. The context is current.
func found(d *device, at driver.Addr, bytes int64) (*block, int64, error) {
	on, err := driver.Ordinal(at)
	if err != nil {
		return nil, 0, err
	}
	if int(on) != d.gpu.Ordinal {
		return nil, 0, fmt.Errorf("it is memory of device %d, this is device %d", on, d.gpu.Ordinal)
	}
	base, n, err := driver.Range(at)
	if err != nil {
		return nil, 0, err
	}
	b := &block{d: d, base: base, bytes: n, refs: 1}
	legacy, err := driver.Legacy(at)
	if err != nil {
		return nil, 0, err
	}
	offset := int64(at - base)
	if !legacy {
		files, err := driver.ByFiles(at)
		if err != nil {
			return nil, 0, err
		}
		if files {
			// Each range that the driver tells is one chunk.
			sizes := []int64{n}
			for end := base + uint64(n); end < at+uint64(bytes); end += uint64(n) {
				if _, n, err = driver.Range(end); err != nil {
					return nil, 0, fmt.Errorf("%d of %d bytes are mapped: %w", end-at, bytes, err)
				}
				if sizes = append(sizes, n); len(sizes) > MaxChunks {
					return nil, 0, fmt.Errorf("it has more than %d chunks", MaxChunks)
				}
			}
			b.setChunks(sizes)
		} else if bytes > b.bytes-offset {
			return nil, 0, fmt.Errorf("%w: it is of several pieces, which no files tell (an engine with expandable segments, whose pieces need file descriptors: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False)", ErrNotShareable)
		}
	}
	if bytes > b.bytes-offset {
		return nil, 0, fmt.Errorf("its allocation has %d bytes from there", b.bytes-offset)
	}
	return b, offset, nil
}
