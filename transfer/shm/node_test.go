package shm

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// patience is how long a test waits for what must come.
const patience = time.Minute

var (
	ownerLife  = id.Life{Node: "owner", Incarnation: 0x1122334455667788}
	readerLife = id.Life{Node: "reader", Incarnation: 0x99}
)

// node is one side of a test.
type node struct {
	local  transfer.Local
	t      *Transport
	dir    string               // where it listens
	device *transfertest.Device // of the arena; nil: it is host memory
}

func newNode(t testing.TB, life id.Life, size int64) *node {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	arena, err := memory.New("shm test", size)
	if err != nil {
		t.Fatal(err)
	}
	n := &node{local: transfer.Local{Life: life, Arenas: map[id.Rank]memory.Arena{0: arena}, Seals: seals}}
	t.Cleanup(func() { n.drop(t) })
	return n
}

// newDeviceNode is newNode with the arena on an emulated device of its own.
func newDeviceNode(t testing.TB, life id.Life, size int64) *node {
	t.Helper()
	device := transfertest.NewDevice(transfertest.DeviceOptions{})
	arena, err := device.Alloc(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	n := newNode(t, life, 4096)
	if err := n.local.Arenas[0].Close(); err != nil {
		t.Fatal(err)
	}
	n.local.Arenas[0], n.device = arena, device
	return n
}

// drop gives the memory up; it may be called twice.
func (n *node) drop(t testing.TB) {
	if err := n.local.Seals.Close(); err != nil {
		t.Error(err)
	}
	for _, a := range n.local.Arenas {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

func (n *node) arena() []byte { return host(n.local.Arenas[0]) }

// listen starts the transport; o adds to what a test needs.
func (n *node) listen(t testing.TB, o Options) *Transport {
	t.Helper()
	o.Local, o.Limits = n.local, transfertest.Calm(o.Limits)
	tr, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	n.t, n.dir = tr, o.Dir
	return tr
}

func (n *node) peer() transfer.Peer {
	return transfer.Peer{Life: n.local.Life, Descriptor: n.t.Descriptor(), ArenaBytes: map[id.Rank]int64{0: n.local.Arenas[0].Size()}}
}

// hold holds a seal.
func (n *node) hold(index uint32, seq id.Sequence) transfer.Seal {
	v, _ := id.SealValue(n.local.Life.Incarnation, seq)
	n.local.Seals.Store(index, v)
	return transfer.Seal{Index: index, Value: v}
}

func open(t testing.TB, from *node, peer transfer.Peer) *link {
	t.Helper()
	l, err := from.t.Open(short(t), peer)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l.(*link)
}

// short is a context that only a hang meets.
func short(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// meeting is a directory that will do.
func meeting(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	chmod(t, dir, 0o700)
	return dir
}

func chmod(t testing.TB, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// newPair is an owner and a reader, both listening, with arenas that differ.
func newPair(t testing.TB, size int64, o Options) (owner, reader *node) {
	t.Helper()
	owner, reader = newNode(t, ownerLife, size), newNode(t, readerLife, size)
	pattern(owner.arena(), 1)
	pattern(reader.arena(), 2)
	if o.Dir == "" {
		o.Dir = meeting(t)
	}
	owner.listen(t, o)
	reader.listen(t, o)
	return owner, reader
}

// pattern fills b with bytes that tell the seed and their place.
func pattern(b []byte, seed int) {
	n := min(len(b), 1<<16)
	for i := range n {
		b[i] = byte(i*7 + i>>8 + seed*31)
	}
	for ; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// eventually polls until done, and fails with what after patience.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !done(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: still not after %v", what, patience)
		}
	}
}

// host is the memory of an arena of the host.
func host(a memory.Arena) []byte {
	b, _ := transfer.InHost(a)
	return b
}
