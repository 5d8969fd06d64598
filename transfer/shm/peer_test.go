package shm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// script is an owner that does as play says with every connection. It ends with
// the test.
func script(t testing.TB, dir string, play func(c *rendezvous.Conn) error) transfer.Peer {
	t.Helper()
	s, err := rendezvous.Listen(rendezvous.Options{Protocol: protocol(), Dir: dir, Life: ownerLife, Serve: play})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return transfer.Peer{Life: ownerLife, Descriptor: s.Descriptor(), ArenaBytes: map[id.Rank]int64{0: 64 << 10}}
}

// give greets, hands files over as they are labelled, and says what follows.
func give(w welcome, files []labelled, then func(c *rendezvous.Conn) error) func(c *rendezvous.Conn) error {
	return func(c *rendezvous.Conn) error {
		if err := c.Welcome(w.encode()); err != nil {
			return err
		}
		for _, f := range files {
			if err := c.SendFile(f.label, f.file); err != nil {
				return err
			}
		}
		if err := c.Settle(); err != nil {
			return err
		}
		if then == nil {
			return c.Stand()
		}
		return then(c)
	}
}

type labelled struct {
	label uint16
	file  *os.File
}

// file is a memfd with these seals.
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
	const shrink, table, ringBytes = unix.F_SEAL_SHRINK, memory.Words * 8, 2 * 4096
	dir := meeting(t)
	reader := newReader(t, dir, 64<<10)
	seals, arena, ring := file(t, table, shrink), file(t, 64<<10, shrink), file(t, ringBytes, shrink)
	ordinary, err := os.Create(filepath.Join(t.TempDir(), "ordinary"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ordinary.Close() }()
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
	host := welcome{arenas: map[id.Rank]int64{0: 64 << 10}}
	device := welcome{buffers: 2, bytes: 4096, arenas: host.arenas}
	both := func(table, arena *os.File) []labelled { return []labelled{{sealLabel, table}, {0, arena}} }
	ringed := func(ring *os.File) []labelled { return []labelled{{sealLabel, seals}, {ringLabel, ring}} }
	garbage := rendezvous.ErrGarbage
	for name, tt := range map[string]struct {
		play func(c *rendezvous.Conn) error
		is   error
		says string
	}{
		"says nothing of arenas": {func(c *rendezvous.Conn) error { return c.Welcome(nil) }, garbage, ""},
		"gives no files":         {func(c *rendezvous.Conn) error { return c.Welcome(host.encode()) }, io.EOF, ""},
		"arena before the table": {give(host, []labelled{{0, arena}}, nil), garbage, ""},
		"less than it said":      {give(welcome{arenas: map[id.Rank]int64{0: 4096}}, both(seals, arena), nil), garbage, "said 65536"},
		"without the rank":       {give(welcome{}, both(seals, arena)[:1], nil), garbage, ""},
		"table not sealed":       {give(host, both(file(t, table, 0), arena), nil), nil, "sealed against shrinking"},
		"arena not sealed":       {give(host, both(seals, file(t, 64<<10, unix.F_SEAL_GROW)), nil), nil, "sealed against shrinking"},
		"table too short":        {give(host, both(file(t, table-1, shrink), arena), nil), nil, "want"},
		"arena too short":        {give(host, both(seals, file(t, 64<<10-1, shrink)), nil), nil, "want"},
		"arena without memory":   {give(host, both(seals, sparse), nil), nil, "lacks the memory"},
		"arena an ordinary file": {give(host, both(seals, ordinary), nil), nil, "not a memfd"},
		"arena for a ring":       {give(device, both(seals, arena), nil), garbage, ""},
		"ring for an arena":      {give(host, ringed(ring), nil), garbage, ""},
		"ring not sealed":        {give(device, ringed(file(t, ringBytes, 0)), nil), nil, "sealed against shrinking"},
		"ring too short":         {give(device, ringed(file(t, ringBytes-1, shrink)), nil), nil, "want"},
		"ring without memory":    {give(device, ringed(sparse), nil), nil, "lacks the memory"},
		"ring of a lesser arena": {give(welcome{buffers: 2, bytes: 4096, arenas: map[id.Rank]int64{0: 4096}}, ringed(ring), nil), garbage, "said 65536"},
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
		eventually(t, name+": files or mappings are left", func() bool { return openFiles(t) <= files && mappings(t) <= maps })
	}
	if s := reader.t.Stats(); s.Links != 0 {
		t.Errorf("stats %+v", s)
	}

	// One that says something that it may not loses its link.
	say := func(k rendezvous.Kind, body []byte) func(c *rendezvous.Conn) error {
		return func(c *rendezvous.Conn) error { return errors.Join(c.Send(k, body), c.Stand()) }
	}
	for name, play := range map[string]func(c *rendezvous.Conn) error{
		"talks":                            give(host, both(seals, arena), say(kindFilled, filledBody(0, nil))),
		"asks":                             give(device, ringed(ring), say(kindAsk, appendAsk(nil, 0, testAsk))),
		"answers what nobody has asked":    give(device, ringed(ring), say(kindFilled, filledBody(1, nil))),
		"answers for what is not there":    give(device, ringed(ring), say(kindFilled, filledBody(2, nil))),
		"answers without saying for which": give(device, ringed(ring), say(kindFilled, nil)),
		"talks without end":                give(device, ringed(ring), say(kindFilled, make([]byte, 60000))),
	} {
		l, err := reader.t.Open(short(t), script(t, dir, play))
		if err == nil {
			eventually(t, "the link of an owner that "+name+" is open", func() bool { return reader.t.Stats().Links == 0 })
			err = l.Read(short(t), []transfer.Seal{{Value: 1}}, nil)
		}
		if !errors.Is(err, garbage) || !errors.Is(err, transfer.ErrClosed) {
			t.Errorf("an owner that %s: %v, want that it has and that the link is closed", name, err)
		}
	}
}

// A link whose connection has ended says that it is closed, since it never reads
// again, and another one can be opened.
func TestLinkEndsWithItsConnection(t *testing.T) {
	dir := meeting(t)
	reader := newReader(t, dir, 64<<10)
	seals, arena := file(t, memory.Words*8, unix.F_SEAL_SHRINK), file(t, 64<<10, unix.F_SEAL_SHRINK)
	hangUp := make(chan struct{})
	play := give(welcome{arenas: map[id.Rank]int64{0: 64 << 10}}, []labelled{{sealLabel, seals}, {0, arena}}, func(*rendezvous.Conn) error {
		<-hangUp
		return nil
	})
	peer := script(t, dir, play)
	l := open(t, reader, peer)
	close(hangUp)
	eventually(t, "the link stands", func() bool { return reader.t.Stats().Links == 0 })
	err := l.Read(short(t), []transfer.Seal{{Value: 1}}, []transfer.Copy{{Bytes: 10}})
	if !errors.Is(err, transfer.ErrClosed) || !strings.Contains(err.Error(), "the peer has hung up") {
		t.Errorf("Read: %v, want ErrClosed and why", err)
	}
	owner := newNode(t, ownerLife, 64<<10)
	owner.listen(t, Options{Dir: dir})
	seal := owner.hold(1, 1)
	if err := open(t, reader, owner.peer()).Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 10}}); err != nil {
		t.Errorf("Read on another link: %v", err)
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

// acting is a reader that does as a test says.
type acting struct {
	attach func(c *rendezvous.Conn) error
	watch  func(c *rendezvous.Conn) error
}

func (a acting) Attach(_ context.Context, c *rendezvous.Conn) error { return a.attach(c) }
func (a acting) Watch(c *rendezvous.Conn) error                     { return a.watch(c) }
func (acting) Release()                                             {}

// meets is a reader in a directory that has no transport.
func meets(t testing.TB, dir string) *rendezvous.Server {
	t.Helper()
	s, err := rendezvous.Listen(rendezvous.Options{Protocol: protocol(), Dir: dir, Life: readerLife, Serve: (*rendezvous.Conn).Stand})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// The files of seals and arenas that a reader gets can't be written.
func TestFilesAreForReading(t *testing.T) {
	dir := meeting(t)
	owner := newNode(t, ownerLife, 4096)
	owner.listen(t, Options{Dir: dir})
	_, err := meets(t, dir).Open(short(t), owner.peer(), acting{attach: func(c *rendezvous.Conn) error {
		for _, label := range []uint16{sealLabel, 0} {
			f, err := c.ReceiveFile(label)
			if err != nil {
				return err
			}
			if r, err := memory.Map(f, 4096, true); err == nil {
				_ = r.Close()
				t.Errorf("a reader can map the owner's memory of label %d for writing", label)
			}
		}
		return io.EOF
	}})
	if !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}

// Close of an owner returns when its readers have let go.
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
	if err := <-done; !errors.Is(err, rendezvous.ErrGone) {
		t.Errorf("Read: %v", err)
	}
}

// Whatever way peers come and go, nothing of them is left.
func TestPeerRestartsLeaveNothing(t *testing.T) {
	for name, device := range map[string]bool{"host": false, "device": true} {
		t.Run(name, func(t *testing.T) { testRestarts(t, device) })
	}
}

func testRestarts(t *testing.T, device bool) {
	dir := meeting(t)
	made := newNode
	if device {
		made = newDeviceNode
	}
	reader := made(t, readerLife, 64<<10)
	reader.listen(t, Options{Dir: dir})
	round := func(n int) {
		owner := made(t, id.Life{Node: "owner", Incarnation: id.Incarnation(n + 1)}, 64<<10)
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
	count := func() [4]int { // of what could be left
		return [4]int{runtime.NumGoroutine(), openFiles(t), mappings(t), len(sockets(t, dir))}
	}
	var before [4]int
	eventually(t, "it does not settle", func() bool { last := before; before = count(); return last == before })
	for n := range 40 {
		round(n + 1)
	}
	eventually(t, fmt.Sprintf("%d goroutines, files, mappings, sockets before 40 restarts, more after them", before), func() bool {
		for i, now := range count() {
			if now > before[i] {
				return false
			}
		}
		return true
	})
}
