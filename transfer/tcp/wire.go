package tcp

import (
	"errors"
	"net"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// wire is a TCP connection with both halves.
type wire struct {
	tcp        *net.TCPConn
	raw        syscall.RawConn
	look       func(fd uintptr) // sets queued; once, not a closure a call
	queued     int
	recv, send *direction // of the socket
	in, out    half       // straight over the socket, or by TLS
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
	w := &wire{tcp: c, raw: raw, recv: newDirection(unix.SYS_READV, raw.Read), send: newDirection(unix.SYS_WRITEV, raw.Write)}
	w.in.by, w.out.by = w.recv, w.send
	w.look = func(fd uintptr) {
		if n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err == nil {
			w.queued = n
		}
	}
	return w, nil
}

// abort ends both halves. Calls that run return at once.
func (w *wire) abort() { _ = w.tcp.Close() } // nothing is lost that was not given up

// unacknowledged is how many bytes the kernel holds that the other side has not
// taken; 0 if it does not say. It serves one goroutine at a time.
func (w *wire) unacknowledged() int {
	w.queued = 0
	_ = w.raw.Control(w.look) // fails on a closed connection
	return w.queued
}

// direction is one of the two of a socket: it moves bytes by system calls, many
// stretches with each.
type direction struct {
	trap  uintptr                               // SYS_READV or SYS_WRITEV
	wait  func(try func(fd uintptr) bool) error // of syscall.RawConn
	try   func(fd uintptr) bool                 // the method once, not a closure a call
	moved func()                                // told after every call that moved a byte; may be nil
	late  func() bool                           // asked when the deadline has passed; true: there is a new one; may be nil
	v     *vector
	n     int
	err   error
}

func newDirection(trap uintptr, wait func(func(uintptr) bool) error) *direction {
	d := &direction{trap: trap, wait: wait}
	d.try = d.once
	return d
}

// once tries one system call, and reports false if the socket is not ready.
func (d *direction) once(fd uintptr) bool {
	w := d.v.window()
	for {
		n, _, errno := unix.Syscall(d.trap, fd, uintptr(unsafe.Pointer(&w[0])), uintptr(len(w)))
		switch errno {
		case 0:
			d.n, d.err = int(n), nil
			return true
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			d.n, d.err = 0, errno
			return true
		}
	}
}

// move makes one system call.
func (d *direction) move(v *vector) (int, error) {
	d.v = v
	for {
		err := d.wait(d.try)
		if err == nil {
			break
		}
		if d.late == nil || !errors.Is(err, os.ErrDeadlineExceeded) || !d.late() {
			return 0, err
		}
	}
	if d.n > 0 && d.moved != nil {
		d.moved()
	}
	return d.n, d.err
}
