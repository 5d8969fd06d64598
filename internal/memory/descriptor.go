package memory

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// MaxPayload is how many bytes may travel with a descriptor.
const MaxPayload = 4096

// SendFile sends payload (1 to [MaxPayload] bytes) and a duplicate of f's
// descriptor over a unix socket (SCM_RIGHTS). It waits no longer than the
// write deadline of c; f stays the caller's.
func SendFile(c syscall.Conn, payload []byte, f *os.File) error {
	if err := sendFile(c, payload, f); err != nil {
		return fmt.Errorf("send file: %w", err)
	}
	return nil
}

func sendFile(c syscall.Conn, payload []byte, f *os.File) error {
	if len(payload) < 1 || len(payload) > MaxPayload {
		return fmt.Errorf("payload has %d bytes, want 1 to %d", len(payload), MaxPayload)
	}
	conn, err := c.SyscallConn()
	if err != nil {
		return err
	}
	file, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	send := func(fd uintptr) {
		rights := unix.UnixRights(int(fd))
		for sent := 0; sent < len(payload) && failed == nil; {
			var n int
			var err error
			if e := conn.Write(func(socket uintptr) bool {
				for err = unix.EINTR; errors.Is(err, unix.EINTR); {
					n, err = unix.SendmsgN(int(socket), payload[sent:], rights, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
				}
				return !errors.Is(err, unix.EAGAIN)
			}); e != nil {
				err = e
			}
			failed = err
			sent += n
			rights = nil // a stream may take the payload in parts, the file goes with the first
		}
	}
	if err := file.Control(send); err != nil {
		return err
	}
	return failed
}

// ReceiveFile receives what SendFile sent: n bytes of payload and the file,
// which becomes the caller's. A payload shorter than the sender's takes a part
// of it from a stream socket. More than one descriptor, or none, is an error
// and leaks nothing; the end of the stream is [io.EOF]. It waits no longer
// than the read deadline of c.
func ReceiveFile(c syscall.Conn, payload []byte) (n int, f *os.File, err error) {
	n, f, err = receiveFile(c, payload)
	if err != nil {
		return n, nil, fmt.Errorf("receive file: %w", err)
	}
	return n, f, nil
}

func receiveFile(c syscall.Conn, payload []byte) (int, *os.File, error) {
	if len(payload) == 0 {
		return 0, nil, errors.New("no room for the payload")
	}
	conn, err := c.SyscallConn()
	if err != nil {
		return 0, nil, err
	}
	// The kernel keeps what does not fit, closes it, and sets MSG_CTRUNC. So a
	// peer that sends hundreds of descriptors can't fill our table with them.
	control := make([]byte, unix.CmsgSpace(4))
	var n, controlled, flags int
	var failed error
	if err := conn.Read(func(socket uintptr) bool {
		for failed = unix.EINTR; failed == unix.EINTR; {
			n, controlled, flags, _, failed = unix.Recvmsg(int(socket), payload, control, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
		}
		return failed != unix.EAGAIN
	}); err != nil {
		return 0, nil, err
	}
	if failed != nil {
		return 0, nil, failed
	}
	fds, err := descriptors(control[:controlled])
	switch {
	case err != nil:
	case flags&unix.MSG_CTRUNC != 0:
		err = errors.New("more control data than one descriptor, or no descriptor free here (ulimit -n)")
	case len(fds) > 1:
		err = fmt.Errorf("%d descriptors, want 1", len(fds))
	case n == 0 && len(fds) == 0:
		err = io.EOF
	case len(fds) == 0:
		err = errors.New("no descriptor")
	case n == 0:
		err = errors.New("no payload")
	case flags&unix.MSG_TRUNC != 0:
		err = fmt.Errorf("payload has more than %d bytes", len(payload))
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return n, nil, err
	}
	return n, os.NewFile(uintptr(fds[0]), "received"), nil
}

// descriptors are those in the control data, also if it ends in an error.
func descriptors(control []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(control)
	var fds []int
	for _, m := range messages {
		if m.Header.Level != unix.SOL_SOCKET || m.Header.Type != unix.SCM_RIGHTS {
			err = fmt.Errorf("control message of level %d and type %d, want descriptors only", m.Header.Level, m.Header.Type)
			continue
		}
		list, e := unix.ParseUnixRights(&m)
		fds, err = append(fds, list...), errors.Join(err, e)
	}
	return fds, err
}
