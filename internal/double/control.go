package double

import (
	"errors"
	"fmt"
	"math"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Control is a file that holds one T, which has no pointers, and that all processes
// of a test map. It is safe for concurrent use. Libraries take the same lock,
// flock(2) of the file, which a dead process cannot hold.
type Control[T any] struct {
	mu      sync.Mutex
	file    *os.File
	mapping []byte // nil: closed
}

var errClosed = errors.New("the world is closed")

// Share makes an empty file one that holds a zero T, and takes it over, also with
// an error.
func Share[T any](f *os.File) (*Control[T], error) {
	size := unsafe.Sizeof(*new(T))
	if err := f.Truncate(int64(size)); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	mapping, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("map %s: %w", f.Name(), err), f.Close())
	}
	return &Control[T]{file: f, mapping: mapping}, nil
}

// Path names the file as long as this process lives and the control is not closed.
func (c *Control[T]) Path() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), c.file.Fd()) }

// Locked runs f under the lock of all processes. It fails once closed.
func (c *Control[T]) Locked(f func(*T) error) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mapping == nil {
		return errClosed
	}
	fd := int(c.file.Fd())
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
	return f((*T)(unsafe.Pointer(unsafe.SliceData(c.mapping))))
}

// Close lets go of the file. Processes that use it go on. It may be called twice.
func (c *Control[T]) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.mapping == nil {
		return nil
	}
	err := errors.Join(unix.Munmap(c.mapping), c.file.Close())
	c.mapping = nil
	return err
}

// Wake changes a word of a control, and wakes all threads of all processes that wait
// for that (futex(2)).
func Wake(word *uint32) {
	atomic.AddUint32(word, 1)
	const wake = 1
	unix.Syscall6(unix.SYS_FUTEX, uintptr(unsafe.Pointer(word)), wake, math.MaxInt32, 0, 0, 0) //nolint:errcheck // nobody waits, or is woken
}
