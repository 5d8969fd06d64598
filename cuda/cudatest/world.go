package cudatest

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

const environment = "KVFERRY_CUDA_WORLD"

// Options are what a world is made of. A zero field means its default.
type Options struct {
	Devices   int      // at most 8; default 1, -1: none
	Memory    int64    // bytes of each device; default 1 GiB
	Version   int      // of the driver, such as 11080; default 12090
	Hide      []string // entry points that the driver lacks, as the header names them
	NoDMABuf  bool
	Peers     bool   // the devices reach each other's memory
	Unordered bool   // what cards write must be flushed
	Trace     string // path of a file: a line "PID CALL" for each call
	Faults    Faults // Delay and Strict of it hold whatever is set
}

// World is a set of devices and what has been made of them, in any number of
// processes. It is safe for concurrent use.
type World struct {
	options Options
	library string
	base    Faults

	mu      sync.Mutex
	file    *os.File
	mapping []byte // nil: closed
}

var errClosed = errors.New("the world is closed")

// New makes a world. It lies in memory of this process, and ends with it and
// the last that uses it.
func New(o Options) (*World, error) {
	o = defaults(o)
	c := &control{magic: controlMagic, version: controlVersion, memory: uint64(o.Memory), driver: uint32(o.Version), devices: uint32(max(o.Devices, 0))}
	c.dmabuf, c.peers, c.ordered = flag(!o.NoDMABuf), flag(o.Peers), flag(!o.Unordered)
	if o.Devices > maxDevices || o.Memory < 0 || len(o.Trace) >= len(c.trace) || len(calls()) >= maxCalls {
		return nil, fmt.Errorf("make a world: %d devices of %d bytes, a path of %d characters, %d calls: out of bounds", o.Devices, o.Memory, len(o.Trace), len(calls()))
	}
	copy(c.trace[:], o.Trace)
	library, err := build(o.Hide)
	if err != nil {
		return nil, err
	}
	size := int(unsafe.Sizeof(control{}))
	fd, err := unix.MemfdCreate("kvferry-cuda-world", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a world: %w", err)
	}
	w := &World{options: o, library: library, base: o.Faults, file: os.NewFile(uintptr(fd), "world")}
	if err := w.file.Truncate(int64(size)); err != nil {
		w.file.Close()
		return nil, fmt.Errorf("make a world: %w", err)
	}
	if w.mapping, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		w.file.Close()
		return nil, fmt.Errorf("make a world: map: %w", err)
	}
	*w.control() = *c
	w.Set(o.Faults)
	return w, nil
}

func defaults(o Options) Options {
	if o.Devices == 0 {
		o.Devices = 1
	}
	if o.Memory == 0 {
		o.Memory = 1 << 30
	}
	if o.Version == 0 {
		o.Version = 12090
	}
	return o
}

// Close lets go of the control file. Processes that use the world go on; no
// other can join them.
func (w *World) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mapping == nil {
		return nil
	}
	err := errors.Join(unix.Munmap(w.mapping), w.file.Close())
	w.mapping = nil
	return err
}

// Library is the path of the libcuda.so.1 to be opened.
func (w *World) Library() string { return w.library }

// Options are what the world was made of.
func (w *World) Options() Options { return w.options }

// Env is what a child process needs, beside the rest of its environment and the
// path of the library, to be in this world.
func (w *World) Env() []string {
	return []string{environment + "=" + w.path()}
}

// path names the control file as long as this process lives and the world is
// not closed.
func (w *World) path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), w.file.Fd()) }

func (w *World) control() *control { return (*control)(unsafe.Pointer(unsafe.SliceData(w.mapping))) }

// locked runs f under the lock of all processes.
func (w *World) locked(f func(c *control) error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.mapping == nil {
		return errClosed
	}
	fd := int(w.file.Fd())
	for {
		err := unix.Flock(fd, unix.LOCK_EX)
		if err == nil {
			break
		}
		if !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("lock the world: %w", err)
		}
	}
	defer unix.Flock(fd, unix.LOCK_UN) //nolint:errcheck // it is held
	return f(w.control())
}

// same says whether two worlds would be alike.
func (o Options) same(p Options) bool {
	return o.Devices == p.Devices && o.Memory == p.Memory && o.Version == p.Version && slices.Equal(o.Hide, p.Hide) && o.NoDMABuf == p.NoDMABuf &&
		o.Peers == p.Peers && o.Unordered == p.Unordered && o.Trace == p.Trace
}
