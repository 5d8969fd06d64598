package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// script is an owner that does as play says with every reader.
func script(t testing.TB, dir string, play func(c *rendezvous.Conn) error) transfer.Peer {
	t.Helper()
	s, err := rendezvous.Listen(rendezvous.Options{
		Protocol: protocol(), Dir: dir, Life: ownerLife, Serve: play,
		Limits: transfertest.Calm(transfer.Limits{Stall: 100 * time.Millisecond}),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return transfer.Peer{Life: ownerLife, Descriptor: s.Descriptor(), ArenaBytes: map[id.Rank]int64{0: 64 << 10}}
}

// said is an owner's part of a handshake, with room for a lie in each place.
type said struct {
	welcome []byte
	seals   *os.File // nil: no file
	arenas  []saidArena
	more    func(c *rendezvous.Conn) error // behind it
}

type saidArena struct {
	kind  rendezvous.Kind
	body  []byte
	label uint16
	files []*os.File
}

func (s said) play(c *rendezvous.Conn) error {
	if err := c.Welcome(s.welcome); err != nil {
		return err
	}
	if s.seals != nil {
		if err := c.SendFile(sealTable, s.seals); err != nil {
			return err
		}
	}
	for _, a := range s.arenas {
		if err := c.Send(a.kind, a.body); err != nil {
			return err
		}
		for _, f := range a.files {
			if err := c.SendFile(a.label, f); err != nil {
				return err
			}
		}
	}
	if s.more != nil {
		if err := s.more(c); err != nil {
			return err
		}
	}
	if err := c.Settle(); err != nil {
		return err
	}
	return c.Stand()
}

// memfd is one of so many bytes, with these seals.
func memfd(t testing.TB, size int64, seals int) *os.File {
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

// A hostile owner gets an error, and nothing of it is left here. What it may say
// of memory that is really there is said of another process's.
func TestHostileOwner(t *testing.T) {
	const size, table = 64 << 10, memory.Words * 8
	r := gpu(t)
	dir := rendezvousDir(t)
	reader := newReader(t, Options{Dir: dir}, size, 0)
	// An owner that does not lie, whose memory the others talk of.
	honest := start(t, childSpec{Life: id.Life{Node: "honest", Incarnation: 1}, Dir: dir, Bytes: size, Devices: []int{0}, Seed: 1})
	true0, _ := handleOf(t, reader, honest.peer)
	ours := reader.t.pidns
	seals := memfd(t, table, unix.F_SEAL_SHRINK)
	ordinary, err := os.Create(filepath.Join(t.TempDir(), "ordinary"))
	if err != nil {
		t.Fatal(err)
	}
	defer ordinary.Close()

	one := welcome{pidns: ours, arenas: 1}.encode()
	with := func(change func(h *cuda.Handle)) []saidArena {
		h := true0
		if change != nil {
			change(&h)
		}
		return []saidArena{{kind: kindArena, body: h.Append([]byte{0, 0})}}
	}
	files := func(chunks []int64, bytes int64, label uint16, files ...*os.File) []saidArena {
		h := cuda.Handle{Kind: cuda.Files, UUID: true0.UUID, Bytes: bytes, Chunks: chunks}
		return []saidArena{{kind: kindArena, body: h.Append([]byte{0, 0}), label: label, files: files}}
	}
	const mb2 = 2 << 20
	for name, tt := range map[string]struct {
		said said
		is   error
		says string
	}{
		"hangs up":                {said{welcome: one, more: func(*rendezvous.Conn) error { return io.ErrClosedPipe }}, io.EOF, ""},
		"welcomes with nothing":   {said{}, rendezvous.ErrGarbage, ""},
		"has 65 arenas":           {said{welcome: welcome{arenas: id.MaxRanks + 1}.encode()}, rendezvous.ErrGarbage, ""},
		"gives no seal table":     {said{welcome: one, arenas: with(nil)}, nil, "no descriptor"},
		"gives another table":     {said{welcome: one, seals: ordinary, arenas: with(nil)}, nil, "not a memfd"},
		"table not sealed":        {said{welcome: one, seals: memfd(t, table, 0), arenas: with(nil)}, nil, "sealed against shrinking"},
		"table too short":         {said{welcome: one, seals: memfd(t, table-1, unix.F_SEAL_SHRINK), arenas: with(nil)}, nil, "want"},
		"says another kind":       {said{welcome: one, seals: seals, arenas: []saidArena{{kind: kindArena + 1}}}, rendezvous.ErrGarbage, ""},
		"says nothing of it":      {said{welcome: one, seals: seals, arenas: []saidArena{{kind: kindArena}}}, rendezvous.ErrGarbage, ""},
		"says a rank twice":       {said{welcome: welcome{pidns: ours, arenas: 2}.encode(), seals: seals, arenas: append(with(nil), with(nil)...)}, rendezvous.ErrGarbage, "behind"},
		"has not the rank":        {said{welcome: welcome{pidns: ours}.encode(), seals: seals}, rendezvous.ErrGarbage, "said before"},
		"less than it said":       {said{welcome: one, seals: seals, arenas: with(func(h *cuda.Handle) { h.Bytes = size - 1 })}, rendezvous.ErrGarbage, "said 65536"},
		"a device of no machine":  {said{welcome: one, seals: seals, arenas: with(func(h *cuda.Handle) { h.UUID = testUUID() })}, transfer.ErrUnavailable, "does not see"},
		"another PID namespace":   {said{welcome: welcome{pidns: ours + 1, arenas: 1}.encode(), seals: seals, arenas: with(nil)}, transfer.ErrUnavailable, "hostPID"},
		"a handle of nothing":     {said{welcome: one, seals: seals, arenas: with(func(h *cuda.Handle) { h.IPC = [64]byte{1, 2, 3} })}, transfer.ErrUnavailable, "driver does not import"},
		"beyond the memory":       {said{welcome: one, seals: seals, arenas: with(func(h *cuda.Handle) { h.Offset = 1 << 30 })}, nil, ""},
		"more than the memory":    {said{welcome: one, seals: seals, arenas: with(func(h *cuda.Handle) { h.Bytes = 1 << 40 })}, nil, ""},
		"at the end of numbers":   {said{welcome: one, seals: seals, arenas: with(func(h *cuda.Handle) { h.Offset = 1<<63 - 1 })}, rendezvous.ErrGarbage, ""},
		"a file too few":          {said{welcome: one, seals: seals, arenas: files([]int64{mb2, mb2}, size, 0, memfd(t, mb2, 0)), more: func(c *rendezvous.Conn) error { return c.Send(kindArena, nil) }}, nil, ""},
		"a file of another rank":  {said{welcome: one, seals: seals, arenas: files([]int64{mb2}, size, 1, memfd(t, mb2, 0))}, rendezvous.ErrGarbage, ""},
		"an ordinary file":        {said{welcome: one, seals: seals, arenas: files([]int64{mb2}, size, 0, ordinary)}, nil, ""},
		"a file that is no chunk": {said{welcome: one, seals: seals, arenas: files([]int64{mb2}, size, 0, memfd(t, mb2, 0))}, nil, ""},
		"a file too short":        {said{welcome: one, seals: seals, arenas: files([]int64{1 << 40}, size, 0, memfd(t, mb2, 0))}, nil, ""},
	} {
		peer := script(t, dir, tt.said.play)
		fds, held := openFiles(t), live()
		l, err := reader.t.Open(short(t), peer)
		if err == nil {
			_ = l.Close()
		}
		if err == nil || tt.is != nil && !errors.Is(err, tt.is) || !strings.Contains(err.Error(), tt.says) || !strings.Contains(err.Error(), ownerLife.String()) {
			t.Errorf("an owner that %s: %v, want %v %s", name, err, tt.is, tt.says)
		}
		if errors.Is(err, transfer.ErrUnavailable) != errors.Is(tt.is, transfer.ErrUnavailable) && tt.is != nil {
			t.Errorf("an owner that %s: %v", name, err)
		}
		eventually(t, name+": files are left open", func() bool { return openFiles(t) <= fds })
		if now := live(); now != held {
			t.Errorf("an owner that %s: the driver has %s, %s before", name, now, held)
		}
		if s := reader.t.Stats(); s.Links != 0 || s.Imported != 0 {
			t.Errorf("an owner that %s: stats %+v", name, s)
		}
	}
	if r.Reason() != nil {
		t.Fatalf("a device has died: %v", r.Reason())
	}

	// One that says something afterwards loses its link.
	peer := script(t, dir, said{welcome: one, seals: seals, arenas: with(nil), more: func(c *rendezvous.Conn) error { return c.Send(kindArena, nil) }}.play)
	l, err := reader.t.Open(short(t), peer)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the link of an owner that talks is open", func() bool { s := reader.t.Stats(); return s.Links == 0 && s.Imported == 0 })
	err = l.Read(short(t), []transfer.Seal{{Value: 1}}, nil)
	if !errors.Is(err, rendezvous.ErrGarbage) || !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("an owner that talks: %v, want that it has and that the link is closed", err)
	}
}

// Whatever is wrong with a handle, it is refused, or means memory that is there:
// nothing is read beyond it, and nothing is left.
func TestHandlesWithWrongBits(t *testing.T) {
	const size = 64 << 10
	w := emulated(t)
	dir := rendezvousDir(t)
	reader := newReader(t, Options{Dir: dir}, size, 0)
	honest := start(t, childSpec{Life: id.Life{Node: "honest", Incarnation: 1}, Dir: dir, Bytes: size, Devices: []int{0}, Seed: 1})
	h, _ := handleOf(t, reader, honest.peer)
	good := h.Append([]byte{0, 0})
	table := memfd(t, memory.Words*8, unix.F_SEAL_SHRINK)
	var body atomic.Pointer[[]byte]
	peer := script(t, dir, func(c *rendezvous.Conn) error {
		return said{
			welcome: welcome{pidns: reader.t.pidns, arenas: 1}.encode(), seals: table,
			arenas: []saidArena{{kind: kindArena, body: *body.Load()}},
		}.play(c)
	})
	seed := rand.Uint64()
	rng := rand.New(rand.NewPCG(seed, 1))
	files, held := openFiles(t), live()
	opened := 0
	for round := range 300 {
		bad := slices.Clone(good)
		for range 1 + rng.IntN(3) {
			bad[rng.IntN(len(bad))] ^= 1 << rng.IntN(8)
		}
		if round%10 == 0 { // the handle as it is, so that it is known that it is one
			bad = good
		}
		body.Store(&bad)
		l, err := reader.t.Open(short(t), peer)
		if err == nil {
			opened++
			if a := l.(*link).arenas[0].remote; a.Size() < size || a.Size() > 2<<20 {
				t.Errorf("seed %d: %x opens %d bytes", seed, bad, a.Size())
			}
			if err := l.Read(short(t), []transfer.Seal{{Value: 1}}, []transfer.Copy{{Bytes: size}}); !errors.Is(err, transfer.ErrStale) {
				t.Errorf("seed %d: Read: %v", seed, err)
			}
			_ = l.Close()
		}
		if now := live(); now != held {
			t.Fatalf("seed %d: %x: the driver has %s, %s before", seed, bad, now, held)
		}
	}
	if opened < 30 {
		t.Errorf("seed %d: only %d handles could be opened", seed, opened)
	}
	t.Logf("%d of 300 handles could be opened, by %d calls", opened, w.Counts().Calls["cuIpcOpenMemHandle_v2"])
	eventually(t, "files are left open", func() bool { return openFiles(t) <= files })
	if reader.r.Reason() != nil {
		t.Errorf("a device has died: %v", reader.r.Reason())
	}
}

// Memory that the driver does not export is a reason.
func TestListenSaysWhyMemoryIsNotExported(t *testing.T) {
	w := emulated(t)
	n := newNode(t, gpu(t), ownerLife, 4096, 0)
	for code, unavailable := range map[int]bool{cudatest.NotSupported: true, cudatest.OutOfMemory: true} {
		w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuIpcGetMemHandle", Code: code}}})
		tr, err := Listen(Options{Local: n.local, Runtime: n.r, Dir: rendezvousDir(t)})
		if err == nil {
			_ = tr.Close()
		}
		if errors.Is(err, transfer.ErrUnavailable) != unavailable || !strings.Contains(err.Error(), "rank 0") || !strings.Contains(err.Error(), "CUDA_ERROR") {
			t.Errorf("the driver answers %d: %v", code, err)
		}
	}
}

// handleOf is what an owner says of its rank 0, and gives with it.
func handleOf(t testing.TB, from *node, peer transfer.Peer) (cuda.Handle, []*os.File) {
	t.Helper()
	l := &eavesdropper{link: link{t: from.t, peer: peer}}
	h, err := from.t.server.Open(short(t), peer, l)
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	return l.handle, l.files
}

// eavesdropper is a link that imports nothing.
type eavesdropper struct {
	link
	handle cuda.Handle
	files  []*os.File
}

func (e *eavesdropper) Attach(_ context.Context, c *rendezvous.Conn) error {
	o, err := e.receive(c)
	defer o.close()
	if err != nil {
		return err
	}
	e.handle, e.files = o.arenas[0].handle, o.arenas[0].take()
	return c.Settle()
}

// What a reader gets of the seal table can't be written.
func TestSealsAreForReading(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{})
	l := open(t, reader, owner.peer())
	f := l.seals.Region().File()
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil || flags&unix.O_ACCMODE != unix.O_RDONLY {
		t.Errorf("flags %#x, %v, want a file that is open for reading alone", flags, err)
	}
}

// Whatever will not do says so, and what to set.
func TestListenRefuses(t *testing.T) {
	r := gpu(t)
	good := newNode(t, r, ownerLife, 4096, 0)
	host, err := memory.New("host", 4096)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	dir := rendezvousDir(t)
	hosted := transfer.Local{Life: ownerLife, Seals: good.local.Seals, Arenas: map[id.Rank]memory.Arena{0: host}}
	shared := filepath.Join(dir, "shared")
	if err := os.Mkdir(shared, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(shared, 0o777); err != nil {
		t.Fatal(err)
	}
	files, held := openFiles(t), live()
	for name, tt := range map[string]struct {
		o           Options
		unavailable bool
		says        string
	}{
		"host memory":                     {Options{Local: hosted, Runtime: r, Dir: dir}, true, "arena.memory"},
		"host memory and no driver":       {Options{Local: hosted, Dir: dir}, true, "arena.memory"},
		"no driver":                       {Options{Local: good.local, Dir: dir}, false, "no CUDA runtime"},
		"no seal table":                   {Options{Local: transfer.Local{Life: ownerLife, Arenas: good.local.Arenas}, Runtime: r, Dir: dir}, false, "seal table"},
		"no directory":                    {Options{Local: good.local, Runtime: r}, false, "directory"},
		"a directory that is open to all": {Options{Local: good.local, Runtime: r, Dir: shared}, true, "chmod"},
		"an arena of a rank too high":     {Options{Local: transfer.Local{Life: ownerLife, Seals: good.local.Seals, Arenas: map[id.Rank]memory.Arena{id.MaxRanks: good.local.Arenas[0]}}, Runtime: r, Dir: dir}, false, "rank"},
		"no arena of a rank":              {Options{Local: transfer.Local{Life: ownerLife, Seals: good.local.Seals, Arenas: map[id.Rank]memory.Arena{0: nil}}, Runtime: r, Dir: dir}, false, "none"},
	} {
		tr, err := Listen(tt.o)
		if err == nil {
			_ = tr.Close()
		}
		if err == nil || errors.Is(err, transfer.ErrUnavailable) != tt.unavailable || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%s: %v, want %q, unavailable: %v", name, err, tt.says, tt.unavailable)
		}
	}
	if n := openFiles(t); n != files || live() != held {
		t.Errorf("%d files are open and the driver has %s, %d and %s before", n, live(), files, held)
	}
}

// Close of an owner returns when its readers have let go of its memory.
func TestOwnerWaitsForItsReaders(t *testing.T) {
	const size = 1 << 20
	w := emulated(t)
	owner, reader := newPair(t, size, Options{Limits: transfer.Limits{Stall: patience}})
	l := open(t, reader, owner.peer())
	done := under(short(t), t, w, reader, l, owner.hold(1, 1))
	closed := make(chan error, 1)
	go func() { closed <- owner.t.Close() }()
	select {
	case err := <-closed:
		t.Fatalf("Close returned while a reader's copies ran: %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	w.Clear()
	if err := <-closed; err != nil {
		t.Error(err)
	}
	if s := reader.t.Stats(); s.Imported != 0 {
		t.Errorf("the owner has closed, and a reader has its memory: %+v", s)
	}
	if err := <-done; !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read: %v", err)
	}
}

// Whatever way peers come and go, nothing of them is left.
func TestPeerRestartsLeaveNothing(t *testing.T) {
	const size = 64 << 10
	r := gpu(t)
	dir := rendezvousDir(t)
	reader := newReader(t, Options{Dir: dir}, size, 0)
	round := func(n int) {
		owner := newNode(t, r, id.Life{Node: "owner", Incarnation: id.Incarnation(n + 1)}, size, 0)
		o, err := Listen(Options{Local: owner.local, Runtime: r, Dir: dir})
		if err != nil {
			t.Fatal(err)
		}
		owner.t = o
		seal := owner.hold(1, 1)
		l, err := reader.t.Open(short(t), owner.peer())
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: size}}); err != nil {
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
		if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 1}}); !errors.Is(err, transfer.ErrClosed) {
			t.Fatalf("Read of a life that has ended: %v", err)
		}
		owner.drop(t)
	}
	round(0)
	count := func() [3]int { // of what could be left
		return [3]int{runtime.NumGoroutine(), openFiles(t), len(sockets(t, dir))}
	}
	var before [3]int
	eventually(t, "it does not settle", func() bool { last := before; before = count(); return last == before })
	held := live()
	for n := range 50 {
		round(n + 1)
	}
	eventually(t, fmt.Sprintf("%d goroutines, files, sockets and %s before 50 restarts, more after them", before, held), func() bool {
		for i, now := range count() {
			if now > before[i] {
				return false
			}
		}
		return live() == held
	})
}

// A transport that reads nothing and one that serves nothing may be closed twice,
// by several.
func TestCloseAtOnce(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{})
	open(t, reader, owner.peer())
	done := make(chan error, 6)
	for range 3 {
		go func() { done <- owner.t.Close() }()
		go func() { done <- reader.t.Close() }()
	}
	for range 6 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}
