package memory_test

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/memory"
)

// connected is a pair of unix sockets of a type such as SOCK_STREAM.
func connected(t *testing.T, kind int) (a, b *net.UnixConn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*net.UnixConn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "socket")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = c.(*net.UnixConn)
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
	}
	return ends[0], ends[1]
}

func TestSendFile(t *testing.T) {
	for name, kind := range map[string]int{"stream": unix.SOCK_STREAM, "packets": unix.SOCK_SEQPACKET} {
		t.Run(name, func(t *testing.T) {
			checkDescriptors(t)
			a, b := connected(t, kind)
			ours := newRegion(t, 1<<20)
			for _, n := range []int{1, 100, memory.MaxPayload} {
				payload := bytes.Repeat([]byte("x"), n)
				if err := memory.SendFile(a, payload, ours.File()); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, memory.MaxPayload)
				m, f, err := memory.ReceiveFile(b, got)
				if err != nil || !bytes.Equal(got[:m], payload) {
					t.Fatalf("ReceiveFile = %d bytes, %v, want %d", m, err, n)
				}
				if flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
					t.Errorf("the descriptor would be inherited: %#x, %v", flags, err)
				}
				theirs, err := memory.Map(f, ours.Size(), true)
				if err != nil {
					t.Fatal(err)
				}
				theirs.Bytes()[n] = 7
				if ours.Bytes()[n] != 7 {
					t.Error("the file is another one")
				}
				if err := theirs.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestSendFileRefuses(t *testing.T) {
	checkDescriptors(t)
	a, _ := connected(t, unix.SOCK_STREAM)
	r := newRegion(t, 1)
	for _, n := range []int{0, memory.MaxPayload + 1} {
		if err := memory.SendFile(a, make([]byte, n), r.File()); err == nil {
			t.Errorf("a payload of %d bytes is sent", n)
		}
	}
	closed := newRegion(t, 1)
	f := closed.File()
	closed.Close()
	if err := memory.SendFile(a, []byte("x"), f); err == nil {
		t.Error("a closed file is sent")
	}
	a.Close()
	if err := memory.SendFile(a, []byte("x"), r.File()); !errors.Is(err, net.ErrClosed) {
		t.Errorf("sending by a closed socket = %v, want ErrClosed", err)
	}
}

func TestSendFileToNobody(t *testing.T) {
	a, b := connected(t, unix.SOCK_STREAM)
	b.Close()
	if err := memory.SendFile(a, []byte("x"), newRegion(t, 1).File()); !errors.Is(err, unix.EPIPE) {
		t.Errorf("SendFile = %v, want EPIPE", err)
	}
}

// hostile sends payload and any control data.
func hostile(t *testing.T, c *net.UnixConn, payload string, control []byte) {
	t.Helper()
	if _, _, err := c.WriteMsgUnix([]byte(payload), control, nil); err != nil {
		t.Fatal(err)
	}
}

func TestReceiveFileFromHostilePeer(t *testing.T) {
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	files := func(n int) []byte {
		var fds []int
		for range n {
			fds = append(fds, int(null.Fd()))
		}
		return unix.UnixRights(fds...)
	}
	for name, tt := range map[string]struct {
		kind    int
		payload string
		control []byte
		room    int
		text    string
	}{
		"no descriptor":             {unix.SOCK_STREAM, "x", nil, 16, "no descriptor"},
		"two descriptors":           {unix.SOCK_STREAM, "x", files(2), 16, "2 descriptors, want 1"},
		"three descriptors":         {unix.SOCK_STREAM, "x", files(3), 16, "more control data than one descriptor"},
		"as many as one can send":   {unix.SOCK_STREAM, "x", files(253), 16, "more control data than one descriptor"},
		"credentials":               {unix.SOCK_STREAM, "x", unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}), 16, "control"},
		"credentials and one":       {unix.SOCK_STREAM, "x", append(unix.UnixCredentials(&unix.Ucred{Pid: int32(os.Getpid()), Uid: uint32(os.Getuid()), Gid: uint32(os.Getgid())}), files(1)...), 16, "control"},
		"no payload":                {unix.SOCK_DGRAM, "", files(1), 16, "no payload"},
		"more payload than is room": {unix.SOCK_SEQPACKET, "0123456789", files(1), 5, "payload has more than 5 bytes"},
		"no room at all":            {unix.SOCK_STREAM, "x", files(1), 0, "no room"},
	} {
		t.Run(name, func(t *testing.T) {
			checkDescriptors(t)
			a, b := connected(t, tt.kind)
			if strings.HasPrefix(name, "credentials") {
				raw, err := b.SyscallConn()
				if err != nil {
					t.Fatal(err)
				}
				if err := raw.Control(func(fd uintptr) {
					if err := unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
						t.Error(err)
					}
				}); err != nil {
					t.Fatal(err)
				}
			}
			hostile(t, a, tt.payload, tt.control)
			before := openFiles(t)
			_, f, err := memory.ReceiveFile(b, make([]byte, tt.room))
			if err == nil || f != nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("ReceiveFile = %v, %v, want %q", f, err, tt.text)
			}
			if after := openFiles(t); after != before {
				t.Errorf("%d files are open, %d were before", after, before)
			}
		})
	}
}

// A buffer smaller than the payload takes the beginning of it, and the file.
func TestReceiveFileInParts(t *testing.T) {
	checkDescriptors(t)
	a, b := connected(t, unix.SOCK_STREAM)
	if err := memory.SendFile(a, []byte("0123456789"), newRegion(t, 1).File()); err != nil {
		t.Fatal(err)
	}
	part := make([]byte, 4)
	n, f, err := memory.ReceiveFile(b, part)
	if err != nil || string(part[:n]) != "0123" {
		t.Fatalf("ReceiveFile = %q, %v", part[:n], err)
	}
	f.Close()
	if n, f, err := memory.ReceiveFile(b, part); err == nil {
		f.Close()
		t.Errorf("the rest, %q, came with a file", part[:n])
	}
}

func TestReceiveFileAtTheEnd(t *testing.T) {
	a, b := connected(t, unix.SOCK_STREAM)
	a.Close()
	if _, _, err := memory.ReceiveFile(b, make([]byte, 16)); !errors.Is(err, io.EOF) {
		t.Errorf("ReceiveFile = %v, want EOF", err)
	}
	b.Close()
	if _, _, err := memory.ReceiveFile(b, make([]byte, 16)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("ReceiveFile = %v, want ErrClosed", err)
	}
}

func TestDeadlines(t *testing.T) {
	a, b := connected(t, unix.SOCK_STREAM)
	soon := time.Now().Add(20 * time.Millisecond)
	if err := errors.Join(a.SetDeadline(soon), b.SetDeadline(soon)); err != nil {
		t.Fatal(err)
	}
	if _, _, err := memory.ReceiveFile(b, make([]byte, 16)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("ReceiveFile from a mute peer = %v, want the deadline", err)
	}
	if err := errors.Join(a.SetDeadline(time.Now().Add(100*time.Millisecond)), a.SetWriteBuffer(4096)); err != nil {
		t.Fatal(err)
	}
	r := newRegion(t, 1)
	var err error
	for range 1000 { // until the buffers of a peer that does not read are full
		if err = memory.SendFile(a, make([]byte, memory.MaxPayload), r.File()); err != nil {
			break
		}
	}
	if !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("SendFile to a peer that does not read = %v, want the deadline", err)
	}
}

// A process without a free descriptor is told so, and loses none.
func TestReceiveFileWithoutDescriptors(t *testing.T) {
	checkDescriptors(t)
	a, b := connected(t, unix.SOCK_STREAM)
	if err := memory.SendFile(a, []byte("x"), newRegion(t, 1).File()); err != nil {
		t.Fatal(err)
	}
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 128, Max: old.Max}); err != nil {
		t.Fatal(err)
	}
	var fillers []*os.File
	for len(fillers) < 200 {
		f, err := os.Open("/dev/null")
		if err != nil {
			break
		}
		fillers = append(fillers, f)
	}
	_, f, err := memory.ReceiveFile(b, make([]byte, 16))
	for _, filler := range fillers {
		filler.Close()
	}
	if e := unix.Setrlimit(unix.RLIMIT_NOFILE, &old); e != nil {
		t.Fatal(e)
	}
	if err == nil || f != nil || !strings.Contains(err.Error(), "ulimit -n") {
		t.Errorf("ReceiveFile = %v, %v, want one that names ulimit -n", f, err)
	}
}
