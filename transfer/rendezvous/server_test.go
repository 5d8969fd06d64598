package rendezvous

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// script is an owner that does as play says with every connection, once the
// hello has come. It ends with the test.
func script(t testing.TB, dir string, play func(c *net.UnixConn)) transfer.Peer {
	t.Helper()
	d, err := openDirectory(dir, testProtocol.Name)
	if err != nil {
		t.Fatal(err)
	}
	name := d.newName()
	l, err := d.listen(name)
	if err != nil {
		t.Fatal(err)
	}
	var work sync.WaitGroup
	work.Go(func() {
		for {
			c, err := l.AcceptUnix()
			if err != nil {
				return
			}
			work.Go(func() {
				_ = c.SetDeadline(time.Now().Add(patience))
				if _, _, err := testProtocol.receive(c, maxHelloBody, nil); err == nil {
					play(c)
				}
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		work.Wait()
		_ = d.remove(name)
		_ = d.close()
	})
	host, err := bootID()
	if err != nil {
		t.Fatal(err)
	}
	return transfer.Peer{Life: ownerLife, Descriptor: descriptor{host: host, socket: name}.encode(testProtocol)}
}

// A hostile owner gets an error, and nothing of it is left here.
func TestHostileOwner(t *testing.T) {
	dir := closedDir(t)
	reader := listen(t, options(dir, readerLife))
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	greeting := testProtocol.Welcome(ownerLife, nil)
	say := func(frames ...[]byte) func(c *net.UnixConn) {
		return func(c *net.UnixConn) { _, _ = c.Write(slices.Concat(frames...)) }
	}
	refuse := func(why byte) func(c *net.UnixConn) { return say(testProtocol.Frame(kindRefusal, []byte{why})) }
	for name, tt := range map[string]struct {
		play func(c *net.UnixConn)
		is   error
		says string
	}{
		"hangs up":              {say(), io.EOF, ""},
		"http":                  {say([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")), ErrGarbage, ""},
		"says hello too":        {say(testHello()), ErrGarbage, ""},
		"half a welcome":        {say(greeting[:12]), io.ErrUnexpectedEOF, ""},
		"a welcome of nobody":   {say(testProtocol.Frame(kindWelcome, nil)), ErrGarbage, ""},
		"another life":          {say(testProtocol.Welcome(readerLife, nil)), transfer.ErrIdentity, readerLife.String()},
		"refuses the life":      {refuse(1), transfer.ErrIdentity, ""},
		"refuses the user":      {refuse(2), transfer.ErrUnavailable, "one user"},
		"is full":               {refuse(3), nil, "readers are connected"},
		"is busy":               {refuse(4), transfer.ErrUnavailable, "busy"},
		"refuses for no reason": {refuse(9), ErrGarbage, ""},
		"gives no file":         {say(greeting), io.EOF, ""},
		"frame without a file":  {say(greeting, testProtocol.File(7)), nil, "no descriptor"},
		"another file": {func(c *net.UnixConn) {
			_, _ = c.Write(greeting)
			_ = memory.SendFile(c, testProtocol.File(8), file)
		}, ErrGarbage, ""},
	} {
		peer := script(t, dir, tt.play)
		files := openFiles(t)
		let := make(chan struct{})
		h, err := reader.Open(short(t), peer, plain{let: let, attach: func(_ context.Context, c *Conn) error {
			f, err := c.ReceiveFile(7)
			if err != nil {
				return err
			}
			return errors.Join(c.Settle(), f.Close())
		}})
		if err == nil {
			h.Close()
		}
		if err == nil || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("an owner that %s: %v, want %v %s", name, err, tt.is, tt.says)
		}
		<-let
		eventually(t, name+": files are left open", func() bool { return openFiles(t) <= files })
	}
	if s := reader.Stats(); s.Holds != 0 {
		t.Errorf("stats %+v", s)
	}

	// One that says something afterwards loses its reader.
	h := open(t, reader, script(t, dir, func(c *net.UnixConn) {
		_, _ = c.Write(append(bytes.Clone(greeting), 'x'))
		_, _ = io.Copy(io.Discard, c)
	}))
	<-h.Ended()
	if err := h.Begin(); !errors.Is(err, ErrGarbage) || !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("an owner that talks: %v, want that it has and that the link is closed", err)
	}
}

// An owner that accepts and says nothing costs the dial time.
func TestMuteOwner(t *testing.T) {
	dir := closedDir(t)
	o := options(dir, readerLife)
	const bound = 100 * time.Millisecond
	o.Limits.Dial = bound
	hasty := listen(t, o)
	o.Limits.Dial = time.Hour
	patient := listen(t, o)
	peer := script(t, dir, func(c *net.UnixConn) { _, _ = io.Copy(io.Discard, c) })
	started := time.Now()
	_, err := hasty.Open(short(t), peer, plain{})
	if took := time.Since(started); !errors.Is(err, transfer.ErrStalled) || !strings.Contains(err.Error(), fmt.Sprintf("within %v", bound)) || took < bound*8/10 || took > bound+20*time.Second {
		t.Errorf("Open: %v after %v, want ErrStalled after %v", err, took, bound)
	}
	done := make(chan error, 1)
	go func() { _, err := patient.Open(short(t), peer, plain{}); done <- err }()
	eventually(t, "no link is being opened", func() bool { return patient.Stats().Holds == 1 })
	if err := patient.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Open while the server closes: %v", err)
	}
	if _, err := patient.Open(short(t), peer, plain{}); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Open of a server that is closed: %v", err)
	}
}

// The deadline of the handshake is that of the files too, and Settle ends it.
func TestSettleEndsTheHandshake(t *testing.T) {
	dir := closedDir(t)
	o := options(dir, readerLife)
	o.Limits.Dial = 50 * time.Millisecond
	hasty := listen(t, o)
	o.Limits.Dial = 3 * time.Second // in which a busy machine shakes hands
	reader := listen(t, o)
	mute := script(t, dir, func(c *net.UnixConn) {
		_, _ = c.Write(testProtocol.Welcome(ownerLife, nil))
		_, _ = io.Copy(io.Discard, c)
	})
	_, err := hasty.Open(short(t), mute, plain{attach: func(_ context.Context, c *Conn) error {
		_, err := c.ReceiveFile(1)
		return err
	}})
	if !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("an owner that gives no file: %v, want ErrStalled", err)
	}
	_, err = hasty.Open(short(t), mute, plain{attach: func(_ context.Context, c *Conn) error {
		eventually(t, "the handshake is not over", func() bool { return c.over() != nil })
		return c.Settle()
	}})
	if !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("Settle behind the deadline: %v, want ErrStalled", err)
	}
	ctx, cancel := context.WithCancel(short(t))
	_, err = reader.Open(ctx, mute, plain{attach: func(_ context.Context, c *Conn) error { cancel(); return c.Settle() }})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("Settle behind the context: %v, want Canceled", err)
	}
	h := open(t, reader, mute)
	eventually(t, "the handshake is not over", func() bool { return h.conn.over() != nil })
	if err := h.Reason(); err != nil {
		t.Errorf("a hold ended with the handshake's deadline: %v", err)
	}
}

// dial connects to an owner as anybody may.
func dial(t testing.TB, s *Server) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: s.dir.at(s.socket), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

func TestHostileReader(t *testing.T) {
	owner, reader := newPair(t, closedDir(t))
	h := open(t, reader, peerOf(owner))
	good := testHello()
	set := func(at int, to ...byte) []byte {
		b := slices.Clone(good)
		copy(b[at:], to)
		return b
	}
	for name, b := range map[string][]byte{
		"http":                   []byte("GET / HTTP/1.1\r\n\r\n"),
		"zeros":                  make([]byte, 100),
		"a welcome":              testProtocol.Welcome(ownerLife, nil),
		"hello of 64 KiB":        set(6, 0xff, 0xff),
		"hello of a longer name": set(headerBytes, 0xff),
		"hello of a bad name":    set(headerBytes+1, 0xff),
		"another version":        set(3, 9),
		"hello, hello":           slices.Concat(good, good),
	} {
		before := owner.Stats().Garbage
		c := dial(t, owner)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" is not counted", func() bool { return owner.Stats().Garbage == before+1 })
		eventually(t, name+" is still connected", func() bool { return owner.Stats().Accepted == 1 })
		if err := h.Reason(); err != nil {
			t.Fatalf("after %s, a good reader: %v", name, err)
		}
	}
	c := dial(t, owner)
	if _, err := c.Write(hello{owner: readerLife, reader: readerLife}.encode(testProtocol)); err != nil {
		t.Fatal(err)
	}
	if k, b, err := testProtocol.receive(c, MaxBody, nil); k != kindRefusal || err != nil || b[0] != byte(refusedLife) {
		t.Errorf("a hello for another life is answered by %v %x, %v", k, b, err)
	}
	eventually(t, "a hello for another life is not counted", func() bool { s := owner.Stats(); return s.Strangers == 1 && s.Served == 2 })
}

// Who says nothing loses its connection, and makes room before.
func TestStrangersMakeRoom(t *testing.T) {
	// The owner starts last: a start looks for old sockets, and is a stranger to
	// those that are served.
	dir := closedDir(t)
	o, r := options(dir, ownerLife), options(dir, readerLife)
	o.Limits.Dial, r.Limits.Dial = time.Hour, time.Hour
	reader, owner := listen(t, r), listen(t, o)
	owner.mu.Lock()
	owner.max = 4
	owner.mu.Unlock()
	var strangers []*net.UnixConn
	for n := range 3 {
		strangers = append(strangers, dial(t, owner))
		eventually(t, "a stranger is not accepted", func() bool {
			return owner.Stats().Accepted == min(n+1, 2) && owner.Stats().Evicted == uint64(max(0, n-1))
		})
	}
	if _, err := strangers[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the oldest stranger: %v, want its end", err)
	}
	var holds []*Hold
	for range 4 {
		holds = append(holds, open(t, reader, peerOf(owner)))
	}
	eventually(t, "four links are not all there are", func() bool { s := owner.Stats(); return s.Accepted == 4 && s.Served == 4 })
	if _, err := reader.Open(short(t), peerOf(owner), plain{}); err == nil || !strings.Contains(err.Error(), "readers are connected") {
		t.Errorf("one link too many: %v", err)
	}
	holds[0].Close()
	eventually(t, "a link that was closed counts", func() bool { return owner.Stats().Accepted == 3 })
	open(t, reader, peerOf(owner))

	o.Dir, o.Limits.Dial = closedDir(t), 50*time.Millisecond
	if _, err := dial(t, listen(t, o)).Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a stranger that says nothing: %v, want the end of its connection", err)
	}
}

// An owner that is busy says so to its reader, which may take another way.
func TestBusyOwner(t *testing.T) {
	dir := closedDir(t)
	o := options(dir, ownerLife)
	o.Serve = func(*Conn) error { return fmt.Errorf("no ring is left: %w", ErrBusy) }
	owner, reader := listen(t, o), listen(t, options(dir, readerLife))
	if _, err := reader.Open(short(t), peerOf(owner), plain{}); !errors.Is(err, ErrBusy) || !errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("Open: %v, want that the owner is busy", err)
	}
	eventually(t, "not counted", func() bool { s := owner.Stats(); return s.Refused == 1 && s.Accepted == 0 && s.Served == 0 })
}

func TestUsersAllowed(t *testing.T) {
	for _, tt := range []struct {
		theirs, ours, unmapped int
		ok                     bool
	}{
		{1000, 1000, -1, true},
		{0, 1000, -1, true},
		{0, 0, -1, true},
		{65534, 65534, -1, true},
		{1001, 1000, -1, false},
		{1000, 0, -1, false},
		{65534, 0, -1, false},
		{65534, 65534, 65534, false},
		{65534, 0, 65534, false},
		{1000, 1000, 65534, true},
	} {
		if err := allowed(tt.theirs, tt.ours, tt.unmapped); (err == nil) != tt.ok || err != nil && !errors.Is(err, errUser) {
			t.Errorf("user %d at user %d, where %d is unmapped: %v", tt.theirs, tt.ours, tt.unmapped, err)
		}
	}
}

// A process of another user is refused, even if the directory were open.
func TestAnotherUserIsRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can be another user")
	}
	dir, err := os.MkdirTemp("/tmp", "rendezvous") // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	owner := listen(t, options(dir, ownerLife))
	chmod(t, dir, 0o711)
	path := owner.Address()
	chmod(t, path, 0o777)
	type answer struct {
		kind Kind
		body []byte
		err  error
	}
	done := make(chan answer, 1)
	go func() { // the thread has another user for the rest of its life
		runtime.LockOSThread()
		a := answer{}
		defer func() { done <- a }()
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, 4242, 4242, 4242); e != 0 {
			a.err = e
			return
		}
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			a.err = err
			return
		}
		f := os.NewFile(uintptr(fd), "socket")
		defer func() { _ = f.Close() }()
		if a.err = unix.Connect(fd, &unix.SockaddrUnix{Name: path}); a.err == nil {
			a.kind, a.body, a.err = testProtocol.receive(f, MaxBody, nil)
		}
	}()
	a := <-done
	if a.err != nil || a.kind != kindRefusal || len(a.body) != 1 || a.body[0] != byte(refusedUser) {
		t.Errorf("another user is answered by %v %x, %v", a.kind, a.body, a.err)
	}
	eventually(t, "not counted", func() bool { return owner.Stats().Strangers == 1 })
}

// A hold that ends lets reads end, then what they read, and only then does the
// owner hear of it.
func TestHoldEndsInOrder(t *testing.T) {
	owner, reader := newPair(t, closedDir(t))
	let := make(chan struct{})
	h, err := reader.Open(short(t), peerOf(owner), plain{let: let})
	if err != nil {
		t.Fatal(err)
	}
	if err := h.Begin(); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- owner.Close() }()
	<-h.Ended()
	if err := h.Begin(); !errors.Is(err, ErrGone) || !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Begin behind the end: %v, want ErrGone", err)
	}
	select {
	case <-let:
		t.Error("what is read was given up below a read")
	case err := <-closed:
		t.Errorf("the owner closed below a read: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	h.Done()
	<-let
	if err := <-closed; err != nil {
		t.Error(err)
	}
	h.Close()
	h.Close()
}

// An owner gives a reader that does not let go the stall time.
func TestStubbornReader(t *testing.T) {
	o := options(closedDir(t), ownerLife)
	o.Limits.Stall = 50 * time.Millisecond
	owner := listen(t, o)
	c := dial(t, owner)
	if _, err := c.Write(testHello()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "not served", func() bool { return owner.Stats().Served == 1 })
	started := time.Now()
	if err := owner.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(started); took < 40*time.Millisecond || took > 20*time.Second {
		t.Errorf("Close took %v with a reader that does not let go, want the stall time", took)
	}
}

// The frames of a protocol's own, both ways, of any size.
func TestOwnFrames(t *testing.T) {
	dir := closedDir(t)
	o := options(dir, ownerLife)
	o.Serve = func(c *Conn) error { // says again what it hears
		if err := errors.Join(c.Welcome(nil), c.Settle()); err != nil {
			return err
		}
		for {
			k, body, err := c.Receive(MaxBody)
			if err != nil {
				return err
			}
			if err := c.Send(k, body); err != nil {
				return err
			}
		}
	}
	owner, reader := listen(t, o), listen(t, options(dir, readerLife))
	h, err := reader.Open(short(t), peerOf(owner), echo{})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	<-h.Ended()
	if err := h.Reason(); !errors.Is(err, errEcho) {
		t.Errorf("the reader ended with %v", err)
	}
}

var errEcho = errors.New("heard")

// echo is a reader that ends with what it hears.
type echo struct{ plain }

func (echo) Watch(c *Conn) error {
	if err := c.Send(Own, make([]byte, MaxBody+1)); err == nil {
		return errors.New("a frame without end was sent")
	}
	for size := 1; size <= MaxBody; size = size*4 + 3 {
		want := bytes.Repeat([]byte{byte(size)}, size)
		if err := c.Send(Own, want); err != nil {
			return err
		}
		if k, body, err := c.Receive(MaxBody); err != nil || k != Own || !bytes.Equal(body, want) {
			return fmt.Errorf("%v of %d bytes, want those %d: %w", k, len(body), size, err)
		}
	}
	return errEcho
}
