package tcp

import (
	"io"
	"net"
	"unsafe"

	"golang.org/x/sys/unix"
)

// vector is a list of stretches of memory that one readv or writev after the
// other works off. It is used again for every frame, so that a page costs no
// allocation. net.Buffers would do for writing, but there is no such thing for
// reading into many places, and it hides progress.
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

// window is what the next call gets.
func (v *vector) window() []unix.Iovec {
	return v.iov[v.next:min(len(v.iov), v.next+maxVectors)]
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

// half is one direction of a connection: it moves whole vectors. It serves one
// goroutine at a time.
type half struct {
	v     vector
	trap  uintptr                               // SYS_READV or SYS_WRITEV
	wait  func(try func(fd uintptr) bool) error // of syscall.RawConn
	try   func(fd uintptr) bool                 // the method once, not a closure a call
	moved func()                                // told after every call that moved a byte; may be nil
	n     int
	err   error
}

func newHalf(trap uintptr, wait func(func(uintptr) bool) error) *half {
	h := &half{trap: trap, wait: wait}
	h.try = h.once
	return h
}

// once tries one system call, and reports false if the socket is not ready.
func (h *half) once(fd uintptr) bool {
	w := h.v.window()
	for {
		n, _, errno := unix.Syscall(h.trap, fd, uintptr(unsafe.Pointer(&w[0])), uintptr(len(w)))
		switch errno {
		case 0:
			h.n, h.err = int(n), nil
			return true
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			h.n, h.err = 0, errno
			return true
		}
	}
}

// all moves the whole vector. It returns only when no system call runs any
// more, so nothing lands after it. The end of the stream is
// [io.ErrUnexpectedEOF].
func (h *half) all() error {
	for h.v.left > 0 {
		if err := h.wait(h.try); err != nil {
			return err
		}
		if h.err != nil {
			return h.err
		}
		if h.n == 0 {
			return io.ErrUnexpectedEOF
		}
		h.v.advance(h.n)
		if h.moved != nil {
			h.moved()
		}
	}
	return nil
}

// wire is a TCP connection with both halves.
type wire struct {
	tcp     *net.TCPConn
	in, out *half
}

func newWire(c *net.TCPConn) (*wire, error) {
	if err := c.SetNoDelay(true); err != nil {
		return nil, err
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok && a.IP.IsLoopback() {
		// Within a machine there is no bottleneck to probe for, and pacing, as of
		// BBR, costs a quarter of the speed. What is refused costs nothing more.
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, "cubic")
		})
	}
	return &wire{tcp: c, in: newHalf(unix.SYS_READV, raw.Read), out: newHalf(unix.SYS_WRITEV, raw.Write)}, nil
}

// abort ends both halves. Calls that run return at once.
func (w *wire) abort() { _ = w.tcp.Close() } // nothing is lost that was not given up
