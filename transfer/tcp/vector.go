package tcp

import (
	"io"
	"unsafe"

	"golang.org/x/sys/unix"
)

// vector is a list of stretches of memory that one call after the other works
// off. It is used again for every frame, so that a page costs no allocation.
// net.Buffers would do for writing, but there is no such thing for reading into
// many places, and it hides progress.
type vector struct {
	iov   []unix.Iovec
	next  int   // first one that is not worked off
	left  int64 // bytes
	moved int64 // bytes
}

// maxVectors is IOV_MAX of Linux.
const maxVectors = 1024

func (v *vector) reset() { v.iov, v.next, v.left, v.moved = v.iov[:0], 0, 0, 0 }

// add appends b, which stays the caller's and must outlive the work.
func (v *vector) add(b []byte) {
	if len(b) == 0 {
		return
	}
	e := unix.Iovec{Base: &b[0]}
	e.SetLen(len(b))
	v.iov = append(v.iov, e)
	v.left += int64(len(b))
}

// window is what the next system call gets.
func (v *vector) window() []unix.Iovec {
	return v.iov[v.next:min(len(v.iov), v.next+maxVectors)]
}

// first is what is left of the first stretch; v must not be worked off.
func (v *vector) first() []byte {
	e := &v.iov[v.next]
	return unsafe.Slice(e.Base, int(e.Len))
}

// gather copies what comes next into b, and returns how many bytes that is.
func (v *vector) gather(b []byte) (n int) {
	for i := v.next; i < len(v.iov) && n < len(b); i++ {
		n += copy(b[n:], unsafe.Slice(v.iov[i].Base, int(v.iov[i].Len)))
	}
	return n
}

// advance drops the n bytes that were moved.
func (v *vector) advance(n int) {
	v.left -= int64(n)
	v.moved += int64(n)
	for n > 0 {
		e := &v.iov[v.next]
		if n < int(e.Len) {
			e.Base = (*byte)(unsafe.Add(unsafe.Pointer(e.Base), n))
			e.SetLen(int(e.Len) - n)
			return
		}
		n -= int(e.Len)
		v.next++
	}
}

// mover moves bytes between a vector and a connection, in one direction.
type mover interface {
	// move moves at least a byte of v, which is not worked off, and says how
	// many; none without an error is the end of the stream. When it has
	// returned it touches no stretch any more.
	move(v *vector) (int, error)
}

// half is one direction of a connection: it moves whole vectors. It serves one
// goroutine at a time.
type half struct {
	v  vector
	by mover
}

// one moves b alone.
func (h *half) one(b []byte) error {
	h.v.reset()
	h.v.add(b)
	return h.all()
}

// all moves the whole vector. It returns only when nothing is on its way any
// more, so nothing lands after it. The end of the stream is
// [io.ErrUnexpectedEOF].
func (h *half) all() error {
	for h.v.left > 0 {
		n, err := h.by.move(&h.v)
		h.v.advance(n)
		if err != nil {
			return err
		}
		if n == 0 {
			return io.ErrUnexpectedEOF
		}
	}
	return nil
}
