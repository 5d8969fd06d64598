//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

// blocks are what this process has told to others, and has of others. A driver
// counts by process: it opens no handle of its own, and each of another's once.
//
//nolint:gochecknoglobals // for that reason
var blocks = registry{
	word: rand.Uint64(), told: make(map[[64]byte][]*block), imported: make(map[importKey]*block), busy: make(map[importKey]chan struct{}),
}

type registry struct {
	word uint64 // of this process, as others have allocations of the same numbers

	mu       sync.Mutex
	told     map[[64]byte][]*block // an allocation that was wrapped twice has two
	imported map[importKey]*block
	busy     map[importKey]chan struct{} // being opened, or closed, until that is closed
}

// importKey is what an import is known by.
type importKey struct {
	u   UUID
	ipc [64]byte
}

// drop takes a reference of a block away. With the last it calls free, and who
// opens the same meanwhile waits.
func (r *registry) drop(b *block, free func() error) error {
	r.mu.Lock()
	if b.refs--; b.refs > 0 {
		r.mu.Unlock()
		return nil
	}
	if b.handle {
		if r.told[b.told] = slices.DeleteFunc(r.told[b.told], func(other *block) bool { return other == b }); len(r.told[b.told]) == 0 {
			delete(r.told, b.told)
		}
	}
	closing := make(chan struct{})
	if b.key != (importKey{}) {
		delete(r.imported, b.key)
		r.busy[b.key] = closing
	}
	r.mu.Unlock()
	err := free()
	if b.key != (importKey{}) {
		r.mu.Lock()
		delete(r.busy, b.key)
		r.mu.Unlock()
		close(closing)
	}
	return err
}

// tell remembers by which handle a block was told.
func (r *registry) tell(b *block, ipc [64]byte, word uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !b.handle {
		b.handle, b.told, b.word = true, ipc, word
		r.told[ipc] = append(r.told[ipc], b)
	}
}

// own is a reference to the block that this process has told by a handle, nil
// if it has told none.
func (r *registry) own(h Handle) *block {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, b := range r.told[h.IPC] {
		if b.d.gpu.UUID == h.UUID && b.word == h.Word {
			b.refs++
			return b
		}
	}
	return nil
}

// open is a reference to the block of another's handle, which f opens if this
// process has not. While it has, the driver would open the same memory again by
// the same bytes, whatever they are of now.
func (r *registry) open(h Handle, f func() (*block, error)) (*block, error) {
	key := importKey{h.UUID, h.IPC}
	for {
		r.mu.Lock()
		if b := r.imported[key]; b != nil && b.word != h.Word {
			r.mu.Unlock()
			return nil, errors.New("the driver has given its handle before, of memory that is still imported here and was freed there: close that first")
		} else if b != nil {
			b.refs++
			r.mu.Unlock()
			return b, nil
		}
		wait, busy := r.busy[key]
		if !busy {
			wait = make(chan struct{})
			r.busy[key] = wait
		}
		r.mu.Unlock()
		if busy {
			<-wait
			continue
		}
		b, err := f()
		r.mu.Lock()
		delete(r.busy, key)
		if err == nil {
			b.key, b.word = key, h.Word
			r.imported[key] = b
		}
		r.mu.Unlock()
		close(wait)
		return b, err
	}
}

// Export tells another process of this host how to import the arena: files are
// for SCM_RIGHTS and become the caller's. Of imported memory it is what it was
// imported by, and good as long as who made it lives. The error wraps
// [ErrNotShareable] where the memory is of a kind that can't be told.
func (a *Arena) Export() (Handle, []*os.File, error) {
	h, files, err := a.export()
	if err != nil {
		closeAll(files)
		return Handle{}, nil, fmt.Errorf("export an arena: %w", err)
	}
	return h, files, nil
}

func (a *Arena) export() (h Handle, files []*os.File, err error) {
	if err := a.enter(); err != nil {
		return h, nil, err
	}
	defer a.leave()
	if a.imported {
		h, h.Chunks = a.handle, slices.Clone(a.handle.Chunks)
		files, err := duplicates(a.files)
		return h, files, err
	}
	b := a.block
	h = Handle{Kind: Legacy, UUID: a.d.gpu.UUID, Offset: int64(a.base - b.base), Bytes: a.bytes}
	if b.chunks == nil {
		err := a.d.do(func() error {
			legacy, err := driver.Legacy(b.base)
			if err == nil && !legacy {
				err = fmt.Errorf("%w: it was allocated with neither a handle nor files (an engine with expandable segments: they need file descriptors)", ErrNotShareable)
			}
			if err == nil {
				h.IPC, err = driver.IPCHandle(b.base)
			}
			if err == nil {
				h.Word, err = driver.BufferID(b.base)
			}
			return err
		})
		if err == nil {
			h.Word += blocks.word
			blocks.tell(b, h.IPC, h.Word)
		}
		return h, nil, err
	}
	h.Kind, h.Chunks = Files, slices.Clone(b.chunks)
	err = a.d.do(func() error {
		at := b.base
		for _, n := range b.chunks {
			c, err := driver.RetainChunk(at)
			if err != nil {
				return err
			}
			fd, err := c.Export()
			if err == nil {
				files = append(files, os.NewFile(uintptr(fd), "chunk"))
			}
			if again := c.Release(); err != nil || again != nil {
				return errors.Join(err, again)
			}
			at += uint64(n)
		}
		return nil
	})
	return h, files, err
}

func duplicates(files []*os.File) (list []*os.File, err error) {
	for _, f := range files {
		conn, err := f.SyscallConn()
		if err != nil {
			return list, err
		}
		var failed error
		err = conn.Control(func(fd uintptr) {
			var n int
			if n, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0); failed == nil {
				list = append(list, os.NewFile(uintptr(n), f.Name()))
			}
		})
		if err := errors.Join(err, failed); err != nil {
			return list, err
		}
	}
	return list, nil
}

// Import opens what another process has exported, and takes the files over,
// also with an error. The device is named by the handle. What this process has
// exported itself is the same memory again. The error wraps [ErrNoMemory] where
// the device, or this process, has no room left for it.
func (r *Runtime) Import(h Handle, files []*os.File) (*Arena, error) {
	a, err := r.imports(h, files)
	if err != nil {
		closeAll(files)
		return nil, fmt.Errorf("import an arena: %w", full(err))
	}
	return a, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

func (r *Runtime) imports(h Handle, files []*os.File) (*Arena, error) {
	if err := r.enter(); err != nil {
		return nil, err
	}
	defer r.calls.Done()
	if err := h.check(); err != nil {
		return nil, err
	}
	if len(files) != len(h.Chunks) {
		return nil, fmt.Errorf("%d files of %d chunks", len(files), len(h.Chunks))
	}
	d, err := r.opened(h.UUID)
	if err != nil {
		return nil, err
	}
	var b *block
	if h.Kind == Files {
		err = d.do(func() (err error) { b, err = importChunks(d, h, files); return err })
	} else {
		b, err = importLegacy(d, h)
	}
	if err != nil {
		return nil, err
	}
	if h.Offset+h.Bytes > b.bytes {
		return nil, errors.Join(fmt.Errorf("the handle tells %d bytes at %d of an allocation of %d", h.Bytes, h.Offset, b.bytes), b.release())
	}
	a := newArena(d, b, h.Offset, h.Bytes)
	h.Chunks = slices.Clone(h.Chunks)
	a.imported, a.handle, a.files = true, h, files
	return r.add(a), nil
}

func importLegacy(d *device, h Handle) (*block, error) {
	if b := blocks.own(h); b != nil {
		return b, nil
	}
	return blocks.open(h, func() (*block, error) {
		b := &block{d: d, refs: 1, free: func(b *block) error { return driver.IPCClose(b.base) }}
		err := d.do(func() error {
			at, err := driver.IPCOpen(h.IPC)
			if err != nil {
				return err
			}
			var on driver.Device
			if b.base, b.bytes, err = driver.Range(at); err == nil {
				on, err = driver.Ordinal(at)
			}
			if err == nil && (b.base != at || int(on) != d.gpu.Ordinal) {
				err = fmt.Errorf("the driver opened memory of device %d, the handle tells device %d", on, d.gpu.Ordinal)
			}
			if err != nil {
				return errors.Join(err, driver.IPCClose(at))
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
		b.syncMemops()
		return b, nil
	})
}

// importChunks maps what the files tell. The context is current.
func importChunks(d *device, h Handle, files []*os.File) (*block, error) {
	return mapChunks(d, h.Chunks, func(i int) (driver.Chunk, error) {
		conn, err := files[i].SyscallConn()
		if err != nil {
			return 0, err
		}
		var c driver.Chunk
		var failed error
		err = conn.Control(func(fd uintptr) { c, failed = driver.ImportChunk(int(fd)) })
		return c, errors.Join(err, failed)
	})
}
