package shm

import (
	"bytes"
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

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// script is an owner that does as play says with every connection, once the
// hello has come. It ends with the test.
func script(t testing.TB, dir string, play func(c *net.UnixConn)) transfer.Peer {
	t.Helper()
	d, err := openDirectory(dir)
	if err != nil {
		t.Fatal(err)
	}
	name := newName()
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
				if _, _, err := receive(c, maxHelloBody); err == nil {
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
	return transfer.Peer{Life: ownerLife, Descriptor: descriptor{host: host, socket: name}.encode(), ArenaBytes: map[id.Rank]int64{0: 64 << 10}}
}

// file is a memfd with these seals, or an ordinary file.
func file(t testing.TB, size int64, seals int) *os.File {
	t.Helper()
	fd, err := unix.MemfdCreate("lie", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "lie")
	t.Cleanup(func() { _ = f.Close() })
	if size > 0 {
		if err := unix.Fallocate(fd, 0, 0, size); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := unix.FcntlInt(f.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return f
}

// A hostile owner gets an error, and nothing of it is left here.
func TestHostileOwner(t *testing.T) {
	const shrink, table = unix.F_SEAL_SHRINK, memory.Words * 8
	dir := rendezvous(t)
	reader := newReader(t, dir, 64<<10)
	seals, arena := file(t, table, shrink), file(t, 64<<10, shrink)
	ordinary, err := os.Create(filepath.Join(t.TempDir(), "ordinary"))
	if err != nil {
		t.Fatal(err)
	}
	defer ordinary.Close()
	if err := ordinary.Truncate(64 << 10); err != nil {
		t.Fatal(err)
	}
	sparse := file(t, 0, 0)
	if err := sparse.Truncate(64 << 10); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(sparse.Fd(), unix.F_ADD_SEALS, shrink); err != nil {
		t.Fatal(err)
	}
	greeting := welcome{owner: ownerLife, arenas: map[id.Rank]int64{0: 64 << 10}}
	say := func(frames ...[]byte) func(c *net.UnixConn) {
		return func(c *net.UnixConn) { _, _ = c.Write(slices.Concat(frames...)) }
	}
	// give greets and hands files over; nil is a frame without one.
	give := func(files ...*os.File) func(c *net.UnixConn) {
		return func(c *net.UnixConn) {
			_, _ = c.Write(greeting.encode())
			for i, f := range files {
				frame := fileFrame([]int{sealTable, 0}[i%2])
				if f == nil {
					_, _ = c.Write(frame)
				} else if memory.SendFile(c, frame, f) != nil {
					return
				}
			}
			_, _ = io.Copy(io.Discard, c)
		}
	}
	for name, tt := range map[string]struct {
		play func(c *net.UnixConn)
		is   error
		says string
	}{
		"hangs up":              {say(), io.EOF, ""},
		"http":                  {say([]byte("HTTP/1.1 400 Bad Request\r\n\r\n")), errGarbage, ""},
		"says hello too":        {say(hello{owner: ownerLife, reader: readerLife}.encode()), errGarbage, ""},
		"welcome of 64 KiB":     {say([]byte("kvs\x01\x02\x00\xff\xff")), errGarbage, ""},
		"half a welcome":        {say(greeting.encode()[:20]), io.ErrUnexpectedEOF, ""},
		"another life":          {say(welcome{owner: readerLife}.encode()), transfer.ErrIdentity, readerLife.String()},
		"refuses the life":      {say(frame(kindRefusal, []byte{1})), transfer.ErrIdentity, ""},
		"refuses the user":      {say(frame(kindRefusal, []byte{2})), transfer.ErrUnavailable, "one user"},
		"is full":               {say(frame(kindRefusal, []byte{3})), nil, "readers are connected"},
		"refuses for no reason": {say(frame(kindRefusal, []byte{9})), errGarbage, ""},
		"gives no files":        {say(greeting.encode()), io.EOF, ""},
		"frame without a file":  {give(nil), nil, "no descriptor"},
		"arena before the table": {func(c *net.UnixConn) {
			_, _ = c.Write(greeting.encode())
			_ = memory.SendFile(c, fileFrame(0), arena)
		}, errGarbage, ""},
		"less than it said":      {func(c *net.UnixConn) { lie(c, map[id.Rank]int64{0: 4096}, seals, arena) }, errGarbage, "said 65536"},
		"without the rank":       {func(c *net.UnixConn) { lie(c, nil, seals) }, errGarbage, ""},
		"table not sealed":       {give(file(t, table, 0), arena), nil, "sealed against shrinking"},
		"arena not sealed":       {give(seals, file(t, 64<<10, unix.F_SEAL_GROW)), nil, "sealed against shrinking"},
		"table too short":        {give(file(t, table-1, shrink), arena), nil, "want"},
		"arena too short":        {give(seals, file(t, 64<<10-1, shrink)), nil, "want"},
		"arena without memory":   {give(seals, sparse), nil, "lacks the memory"},
		"arena an ordinary file": {give(seals, ordinary), nil, "not a memfd"},
	} {
		peer := script(t, dir, tt.play)
		files, maps := openFiles(t), mappings(t)
		l, err := reader.t.Open(short(t), peer)
		if err == nil {
			_ = l.Close()
		}
		if err == nil || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), ownerLife.String()) {
			t.Errorf("an owner that %s: %v, want %v %s", name, err, tt.is, tt.says)
		}
		eventually(t, name+": files are left open", func() bool { return openFiles(t) <= files })
		if got := mappings(t); got > maps {
			t.Errorf("%s: %d mappings, %d before", name, got, maps)
		}
	}
	if s := reader.t.Stats(); s.Links != 0 {
		t.Errorf("stats %+v", s)
	}

	// One that says something afterwards loses its link.
	peer := script(t, dir, func(c *net.UnixConn) {
		lie(c, greeting.arenas, seals, arena)
		_, _ = c.Write([]byte("x"))
		_, _ = io.Copy(io.Discard, c)
	})
	l, err := reader.t.Open(short(t), peer)
	if err == nil {
		eventually(t, "the link of an owner that talks is open", func() bool { return reader.t.Stats().Links == 0 })
		err = l.Read(short(t), []transfer.Seal{{Value: 1}}, nil)
	}
	if !errors.Is(err, errGarbage) || !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("an owner that talks: %v, want that it has and that the link is closed", err)
	}
}

// A link whose connection has ended says that it is closed, since it never reads
// again, and another one can be opened.
func TestLinkEndsWithItsConnection(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	owner.t.server.mu.Lock()
	for c := range owner.t.server.conns {
		_ = c.CloseWrite()
	}
	owner.t.server.mu.Unlock()
	eventually(t, "the link stands", func() bool { return reader.t.Stats().Links == 0 })
	err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 10}})
	if !errors.Is(err, transfer.ErrClosed) || !strings.Contains(err.Error(), "the peer has hung up") {
		t.Errorf("Read: %v, want ErrClosed and why", err)
	}
	if err := open(t, reader, owner.peer()).Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 10}}); err != nil {
		t.Errorf("Read on another link: %v", err)
	}
}

// lie greets with these arenas and hands these files over.
func lie(c *net.UnixConn, arenas map[id.Rank]int64, files ...*os.File) {
	_, _ = c.Write(welcome{owner: ownerLife, arenas: arenas}.encode())
	for i, f := range files {
		if memory.SendFile(c, fileFrame([]int{sealTable, 0}[i]), f) != nil {
			return
		}
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}

// mappings is how many stretches of shared memory are mapped.
func mappings(t testing.TB) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(b, []byte("memfd:"))
}

// An owner that accepts and says nothing costs the dial time.
func TestMuteOwner(t *testing.T) {
	dir := rendezvous(t)
	n := newNode(t, readerLife, 4096)
	n.listen(t, Options{Dir: dir, Limits: transfer.Limits{Dial: 100 * time.Millisecond}})
	peer := script(t, dir, func(c *net.UnixConn) { _, _ = io.Copy(io.Discard, c) })
	started := time.Now()
	_, err := n.t.Open(short(t), peer)
	if took := time.Since(started); !errors.Is(err, transfer.ErrStalled) || took < 80*time.Millisecond || took > 5*time.Second {
		t.Errorf("Open: %v after %v, want ErrStalled after the dial time", err, took)
	}
	patient := newNode(t, readerLife, 4096)
	patient.listen(t, Options{Dir: dir, Limits: transfer.Limits{Dial: time.Hour}})
	started = time.Now()
	_, err = patient.t.Open(short(t), peer)
	if took := time.Since(started); !errors.Is(err, transfer.ErrStalled) || !strings.Contains(err.Error(), "within 2s") || took < maxHandshake {
		t.Errorf("Open with a long dial time: %v after %v, want ErrStalled after %v", err, took, maxHandshake)
	}
	done := make(chan error, 1)
	go func() { _, err := patient.t.Open(short(t), peer); done <- err }()
	eventually(t, "no link is being opened", func() bool { return patient.t.Stats().Links == 1 })
	if err := patient.t.Close(); err != nil {
		t.Error(err)
	}
	if err := <-done; !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Open while the transport closes: %v", err)
	}
}

// dial connects to an owner as anybody may.
func dial(t testing.TB, n *node) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: n.t.dir.at(n.t.server.socket), Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c
}

func TestHostileReader(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	good := hello{owner: ownerLife, reader: readerLife}.encode()
	set := func(at int, to ...byte) []byte {
		b := slices.Clone(good)
		copy(b[at:], to)
		return b
	}
	for name, b := range map[string][]byte{
		"http":                   []byte("GET / HTTP/1.1\r\n\r\n"),
		"zeros":                  make([]byte, 100),
		"a welcome":              testWelcome.encode(),
		"hello of 64 KiB":        set(6, 0xff, 0xff),
		"hello of a longer name": set(headerBytes, 0xff),
		"hello of a bad name":    set(headerBytes+1, 0xff),
		"another version":        set(3, 9),
		"hello, hello":           slices.Concat(good, good),
	} {
		before := owner.t.Stats().Garbage
		c := dial(t, owner)
		if _, err := c.Write(b); err != nil {
			t.Fatal(err)
		}
		eventually(t, name+" is not counted", func() bool { return owner.t.Stats().Garbage == before+1 })
		eventually(t, name+" is still connected", func() bool { return owner.t.Stats().Accepted == 1 })
		if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 10}}); err != nil {
			t.Fatalf("after %s, a good read: %v", name, err)
		}
	}
	c := dial(t, owner)
	if _, err := c.Write(hello{owner: readerLife, reader: readerLife}.encode()); err != nil {
		t.Fatal(err)
	}
	if k, b, err := receive(c, maxAnswerBody); k != kindRefusal || err != nil || b[0] != byte(refusedLife) {
		t.Errorf("a hello for another life is answered by %v %x, %v", k, b, err)
	}
	eventually(t, "a hello for another life is not counted", func() bool { s := owner.t.Stats(); return s.Strangers == 1 && s.Served == 2 })
}

// Who says nothing loses its connection, and makes room before.
func TestStrangersMakeRoom(t *testing.T) {
	// The owner starts last: a start looks for old sockets, and is a stranger to
	// those that are served.
	o := Options{Dir: rendezvous(t), Limits: transfer.Limits{Dial: time.Hour}}
	reader, owner := newNode(t, readerLife, 4096), newNode(t, ownerLife, 4096)
	reader.listen(t, o)
	owner.listen(t, o)
	owner.t.server.mu.Lock()
	owner.t.server.max = 4
	owner.t.server.mu.Unlock()
	var strangers []*net.UnixConn
	for n := range 3 {
		strangers = append(strangers, dial(t, owner))
		eventually(t, "a stranger is not accepted", func() bool {
			return owner.t.Stats().Accepted == min(n+1, 2) && owner.t.Stats().Evicted == uint64(max(0, n-1))
		})
	}
	if _, err := strangers[0].Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("the oldest stranger: %v, want its end", err)
	}
	var links []*link
	for range 4 {
		links = append(links, open(t, reader, owner.peer()))
	}
	eventually(t, "four links are not all there are", func() bool { s := owner.t.Stats(); return s.Accepted == 4 && s.Served == 4 })
	if _, err := reader.t.Open(short(t), owner.peer()); err == nil || !strings.Contains(err.Error(), "readers are connected") {
		t.Errorf("one link too many: %v", err)
	}
	_ = links[0].Close()
	eventually(t, "a link that was closed counts", func() bool { return owner.t.Stats().Accepted == 3 })
	open(t, reader, owner.peer())

	impatient := newNode(t, ownerLife, 4096)
	impatient.listen(t, Options{Dir: rendezvous(t), Limits: transfer.Limits{Dial: 50 * time.Millisecond}})
	if _, err := dial(t, impatient).Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("a stranger that says nothing: %v, want the end of its connection", err)
	}
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
	dir, err := os.MkdirTemp("/tmp", "shm") // t.TempDir is closed to others
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	owner := newNode(t, ownerLife, 4096)
	owner.listen(t, Options{Dir: dir})
	chmod(t, dir, 0o711)
	path := owner.t.dir.address(owner.t.server.socket)
	chmod(t, path, 0o777)
	type answer struct {
		kind kind
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
		defer f.Close()
		if a.err = unix.Connect(fd, &unix.SockaddrUnix{Name: path}); a.err == nil {
			a.kind, a.body, a.err = receive(f, maxAnswerBody)
		}
	}()
	a := <-done
	if a.err != nil || a.kind != kindRefusal || len(a.body) != 1 || a.body[0] != byte(refusedUser) {
		t.Errorf("another user is answered by %v %x, %v", a.kind, a.body, a.err)
	}
	eventually(t, "not counted", func() bool { return owner.t.Stats().Strangers == 1 })
}

// The files that a reader gets can't be written.
func TestFilesAreForReading(t *testing.T) {
	owner, _ := newPair(t, 4096, Options{})
	c := dial(t, owner)
	if _, err := c.Write(hello{owner: ownerLife, reader: readerLife}.encode()); err != nil {
		t.Fatal(err)
	}
	if k, _, err := receive(c, maxAnswerBody); k != kindWelcome || err != nil {
		t.Fatalf("%v, %v, want a welcome", k, err)
	}
	for range 2 {
		_, f, err := memory.ReceiveFile(c, make([]byte, fileBytes))
		if err != nil {
			t.Fatal(err)
		}
		if r, err := memory.Map(f, 4096, true); err == nil {
			_ = r.Close()
			t.Error("a reader can map the owner's memory for writing")
		}
	}
}

// Close of an owner returns when its readers have let go, or don't in time.
func TestOwnerWaitsForItsReaders(t *testing.T) {
	const size = 8 << 20
	owner, reader := newPair(t, size, Options{Workers: 2, Limits: transfer.Limits{Stall: patience}})
	seal := owner.hold(1, 1)
	before := mappings(t)
	l := open(t, reader, owner.peer())
	reader.arena()[5] = 0
	long := slices.Repeat([]transfer.Copy{{Bytes: size}}, 4000)
	done := make(chan error, 1)
	owner.arena()[5] = 77
	go func() { done <- l.Read(short(t), []transfer.Seal{seal}, long) }()
	eventually(t, "no byte lands", func() bool { return reader.arena()[5] != 0 })
	if err := owner.t.Close(); err != nil {
		t.Error(err)
	}
	if n := mappings(t); n != before {
		t.Errorf("the owner has closed, and a reader maps its memory: %d mappings, %d before", n, before)
	}
	if err := <-done; !errors.Is(err, errGone) {
		t.Errorf("Read: %v", err)
	}

	stubborn := newNode(t, ownerLife, 4096)
	stubborn.listen(t, Options{Dir: rendezvous(t), Limits: transfer.Limits{Stall: 50 * time.Millisecond}})
	c := dial(t, stubborn)
	if _, err := c.Write(hello{owner: ownerLife, reader: readerLife}.encode()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "not served", func() bool { return stubborn.t.Stats().Served == 1 })
	started := time.Now()
	if err := stubborn.t.Close(); err != nil {
		t.Error(err)
	}
	if took := time.Since(started); took < 40*time.Millisecond || took > 5*time.Second {
		t.Errorf("Close took %v with a reader that does not let go, want the stall time", took)
	}
}

// Whatever way peers come and go, nothing of them is left.
func TestPeerRestartsLeaveNothing(t *testing.T) {
	dir := rendezvous(t)
	reader := newReader(t, dir, 64<<10)
	round := func(n int) {
		owner := newNode(t, id.Life{Node: "owner", Incarnation: id.Incarnation(n + 1)}, 64<<10)
		o, err := Listen(Options{Local: owner.local, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		owner.t = o
		seal := owner.hold(1, 1)
		l, err := reader.t.Open(short(t), owner.peer())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 64 << 10}}); err != nil {
			t.Fatal(err)
		}
		if n%3 == 0 {
			_ = l.Close()
		}
		if err := o.Close(); err != nil {
			t.Fatal(err)
		}
		if n%3 == 1 {
			_ = l.Close() // of a peer that is gone; the third way is to forget it
		}
		if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 1}}); err == nil {
			t.Fatal("a life that has ended was read")
		}
		owner.drop(t)
	}
	round(0)
	count := func() string {
		return fmt.Sprintf("%d goroutines, %d files, %d mappings, %d sockets", runtime.NumGoroutine(), openFiles(t), mappings(t), len(sockets(t, dir)))
	}
	var before string
	eventually(t, "it does not settle", func() bool { last := before; before = count(); return last == before })
	for n := range 200 {
		round(n + 1)
	}
	eventually(t, before+" before 200 restarts, other numbers after them", func() bool { return count() == before })
}
