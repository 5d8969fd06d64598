package cudaipc

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
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

// driver is what this process has opened: it binds one for good. It is the
// emulated one, or, where onGPU says so, that of the machine.
var driver struct {
	mu      sync.Mutex
	world   *cudatest.World
	runtime *cuda.Runtime
}

func onGPU() bool { return os.Getenv("KVFERRY_CUDA_GPU") != "" }

// gpu is the driver, without a fault that another test has left.
func gpu(t testing.TB) *cuda.Runtime {
	t.Helper()
	driver.mu.Lock()
	defer driver.mu.Unlock()
	library := ""
	if !onGPU() {
		driver.world = cudatest.Use(t, worldOptions)
		library = driver.world.Library()
	}
	if driver.runtime == nil {
		r, err := cuda.Open(cuda.Options{Library: library})
		if err != nil {
			t.Fatal(err)
		}
		driver.runtime = r
	}
	return driver.runtime
}

// emulated is the emulated driver; who needs it is skipped on a real one.
func emulated(t testing.TB) *cudatest.World {
	t.Helper()
	if onGPU() {
		t.Skip("only the emulated driver can do this, and KVFERRY_CUDA_GPU asks for a real one")
	}
	gpu(t)
	return driver.world
}

// live is what the driver holds for all processes together, as far as that can be
// known.
func live() string {
	if driver.world == nil {
		return "what a real driver has"
	}
	c := driver.world.Counts()
	return fmt.Sprintf("%d allocations, %d imports, %d chunks, %d reservations, %d mappings, %d bytes", c.Allocations, c.Imports, c.Chunks, c.Reservations, c.Mappings, c.DeviceBytes)
}

// closeDriver is for the end of all tests.
func closeDriver() error {
	driver.mu.Lock()
	defer driver.mu.Unlock()
	if driver.runtime == nil {
		return nil
	}
	return driver.runtime.Close()
}

// deviceOf is a device by its number.
func deviceOf(t testing.TB, r *cuda.Runtime, number int) cuda.UUID {
	t.Helper()
	list := r.GPUs()
	if number >= len(list) {
		t.Skipf("there are %d devices, want %d", len(list), number+1)
	}
	return list[number].UUID
}

// second is the second device, or the only one.
func second(r *cuda.Runtime) int { return min(1, len(r.GPUs())-1) }

// alloc makes an arena of one allocation, or of chunks.
func alloc(r *cuda.Runtime, device cuda.UUID, size, chunk int64) (*cuda.Arena, error) {
	if chunk > 0 {
		return r.AllocChunks(device, size, chunk)
	}
	return r.Alloc(device, size)
}

// place is where the arenas of a suite lie.
func place(t testing.TB, device int) transfertest.Place {
	r := gpu(t)
	uuid := deviceOf(t, r, device)
	return func(size int64) (memory.Arena, error) { return r.Alloc(uuid, size) }
}

// node is one side of a test.
type node struct {
	local transfer.Local
	size  int64 // of each arena, as it was asked for
	r     *cuda.Runtime
	t     *Transport
}

// newNode has an arena of size bytes on each of the devices, by rank.
func newNode(t testing.TB, r *cuda.Runtime, life id.Life, size int64, devices ...int) *node {
	t.Helper()
	seals, err := memory.NewSealTable()
	if err != nil {
		t.Fatal(err)
	}
	n := &node{local: transfer.Local{Life: life, Arenas: map[id.Rank]memory.Arena{}, Seals: seals}, size: size, r: r}
	t.Cleanup(func() { n.drop(t) })
	for rank, d := range devices {
		a, err := r.Alloc(deviceOf(t, r, d), size)
		if err != nil {
			t.Fatal(err)
		}
		n.local.Arenas[id.Rank(rank)] = a
	}
	return n
}

// drop gives the memory up; it may be called twice.
func (n *node) drop(t testing.TB) {
	t.Helper()
	if err := n.local.Seals.Close(); err != nil {
		t.Error(err)
	}
	for _, a := range n.local.Arenas {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

func (n *node) peek(rank id.Rank) []byte {
	b := make([]byte, n.size)
	transfertest.Peek(n.local.Arenas[rank], 0, b)
	return b
}

func (n *node) poke(rank id.Rank, at int64, b []byte) {
	transfertest.Poke(n.local.Arenas[rank], at, b)
}

// fill fills an arena with a pattern, and returns it.
func (n *node) fill(rank id.Rank, seed int) []byte {
	b := make([]byte, n.size)
	pattern(b, seed)
	n.poke(rank, 0, b)
	return b
}

// listen starts the transport; o adds to what a test needs.
func (n *node) listen(t testing.TB, o Options) *Transport {
	t.Helper()
	o.Local, o.Runtime, o.Limits = n.local, n.r, transfertest.Calm(o.Limits)
	tr, err := Listen(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	n.t = tr
	return tr
}

func (n *node) peer() transfer.Peer {
	p := transfer.Peer{Life: n.local.Life, Descriptor: n.t.Descriptor(), ArenaBytes: map[id.Rank]int64{}}
	for r, a := range n.local.Arenas {
		p.ArenaBytes[r] = a.Size()
	}
	return p
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

// rendezvousDir is a directory that will do.
func rendezvousDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return dir
}

// newPair is an owner and a reader, both listening, with an arena each on device
// 0 that differ.
func newPair(t testing.TB, size int64, o Options) (owner, reader *node) {
	t.Helper()
	r := gpu(t)
	owner, reader = newNode(t, r, ownerLife, size, 0), newNode(t, r, readerLife, size, 0)
	owner.fill(0, 1)
	reader.fill(0, 2)
	if o.Dir == "" {
		o.Dir = rendezvousDir(t)
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

// differ fails at the first byte in which got is not what is wanted.
func differ(t testing.TB, what string, got, want []byte) {
	t.Helper()
	if len(got) != len(want) {
		t.Errorf("%s: %d bytes, want %d", what, len(got), len(want))
		return
	}
	if string(got) == string(want) {
		return
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%s: byte %d is %#x, want %#x", what, i, got[i], want[i])
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

func sockets(t testing.TB, dir string) (names []string) {
	t.Helper()
	list, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}
