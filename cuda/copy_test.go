package cuda_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
)

func TestMain(m *testing.M) {
	if kind := os.Getenv(childEnv); kind != "" {
		child(kind)
		return
	}
	goleak.VerifyTestMain(m)
}

// open opens a runtime on the emulated driver, which has no fault now, and sees
// that nothing is left of it afterwards.
func open(tb testing.TB, o cuda.Options) (*cuda.Runtime, *cudatest.World) {
	tb.Helper()
	w := world(tb)
	o.Library = w.Library()
	switch o.Scatter {
	case 0:
		o.Scatter = -1
	case measured:
		o.Scatter = 0
	}
	r, err := cuda.Open(o)
	if err != nil {
		tb.Fatal(err)
	}
	before := mine(w)
	tb.Cleanup(func() {
		w.Clear()
		if err := r.Close(); err != nil {
			tb.Errorf("close: %v", err)
		}
		if now := mine(w); now.Live() > before.Live() {
			tb.Errorf("objects of the driver are left: before %+v, now %+v", before, now)
		}
	})
	return r, w
}

// measured lets the device measure what small pieces are.
const measured = 1 << 40

// defaultDriver skips what another driver does by other calls.
func defaultDriver(t *testing.T) {
	t.Helper()
	if v := os.Getenv("KVFERRY_CUDA_VARIANT"); v != "" {
		t.Skipf("the calls are those of the default driver, and KVFERRY_CUDA_VARIANT is %s", v)
	}
}

// mine is what this process has of the driver.
func mine(w *cudatest.World) cudatest.Tally { return w.Counts().Processes[os.Getpid()] }

func alloc(tb testing.TB, r *cuda.Runtime, bytes int64) *cuda.Arena {
	tb.Helper()
	a, err := r.Alloc(r.GPUs()[0].UUID, bytes)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { a.Close() })
	return a
}

// pinned is host memory that is mapped, and pinned.
func pinned(tb testing.TB, a *cuda.Arena, bytes int64) []byte {
	tb.Helper()
	b := mapped(tb, bytes)
	unpin, err := a.Pin(b)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := unpin(); err != nil {
			tb.Errorf("unpin: %v", err)
		}
	})
	return b
}

func mapped(tb testing.TB, bytes int64) []byte {
	tb.Helper()
	region, err := memory.NewPlain("host", bytes)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { region.Close() })
	return region.Bytes()
}

// fill fills b with what the seed says. Others see one write.
func fill(b []byte, seed uint64) {
	words := make([]byte, (len(b)+7)/8*8)
	draw(words, seed)
	copy(b, words)
}

// draw is for memory that nobody else knows: the race detector looks at it for a
// long time.
//
//go:norace
func draw(b []byte, x uint64) {
	for i := 0; i < len(b); i += 8 {
		x += 0x9e3779b97f4a7c15
		w := (x ^ x>>30) * 0xbf58476d1ce4e5b9
		w = (w ^ w>>27) * 0x94d049bb133111eb
		binary.LittleEndian.PutUint64(b[i:], w^w>>31)
	}
}

// only says whether all bytes are c.
func only(b []byte, c byte) bool { return bytes.Count(b, []byte{c}) == len(b) }

func wait(tb testing.TB, t memory.Ticket) {
	tb.Helper()
	if err := t.Wait(); err != nil {
		tb.Fatal(err)
	}
}

func whole(n int) []memory.Segment { return []memory.Segment{{Bytes: int64(n)}} }

// content is all of an arena.
func content(tb testing.TB, a *cuda.Arena) []byte {
	tb.Helper()
	b := make([]byte, a.Size())
	wait(tb, a.ReadInto(b, whole(len(b))))
	return b
}

func TestArenaIsOfZeros(t *testing.T) {
	r, _ := open(t, cuda.Options{})
	a := alloc(t, r, 3<<20+1)
	if a.Size() != 3<<20+1 || a.GPU() != r.GPUs()[0] || a.Address() == 0 {
		t.Errorf("size %d, %+v at %#x", a.Size(), a.GPU(), a.Address())
	}
	if !only(content(t, a), 0) {
		t.Error("it is not of zeros")
	}
}

// Copies in every way, pinned and not, small and large, in arenas of both kinds,
// do what a copy of bytes does.
func TestCopiesAreAsOfBytes(t *testing.T) {
	for name, scatter := range map[string]int64{"engine": -1, "kernel": 8 << 10} {
		t.Run(name, func(t *testing.T) {
			r, _ := open(t, cuda.Options{Scatter: scatter, PinChunk: 2 << 20})
			gpus := r.GPUs()
			chunks, err := r.AllocChunks(gpus[0].UUID, 4<<20, 2<<20)
			if err != nil {
				t.Fatal(err)
			}
			other, err := r.Alloc(gpus[len(gpus)-1].UUID, 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			s := &space{r: r, arenas: []*cuda.Arena{alloc(t, r, 1<<20), chunks, other}, spare: make([]byte, chunks.Size())}
			fast := pinned(t, chunks, 2<<20+512<<10) // in two chunks too
			s.hosts = [][]byte{fast, make([]byte, 1<<20), fast[1<<20+12345:]}
			for _, a := range s.arenas {
				s.model = append(s.model, make([]byte, a.Size()))
			}
			rapid.Check(t, s.steps)
		})
	}
}

// space is what random copies go round in.
type space struct {
	r      *cuda.Runtime
	arenas []*cuda.Arena
	model  [][]byte // what is in them
	hosts  [][]byte
	spare  []byte // for what is read, or compared
}

func (s *space) steps(t *rapid.T) {
	for range rapid.IntRange(1, 5).Draw(t, "steps") {
		i := rapid.IntRange(0, len(s.arenas)-1).Draw(t, "arena")
		s.step(t, i, s.model)
		if !bytes.Equal(s.content(t, i), s.model[i]) {
			t.Fatalf("arena %d has other bytes than the model", i)
		}
	}
}

func (s *space) content(t *rapid.T, i int) []byte {
	b := s.spare[:s.arenas[i].Size()]
	if err := s.arenas[i].ReadInto(b, whole(len(b))).Wait(); err != nil {
		t.Fatal(err)
	}
	return b
}

func (s *space) step(t *rapid.T, i int, model [][]byte) {
	a, m := s.arenas[i], model[i]
	host := s.hosts[rapid.IntRange(0, len(s.hosts)-1).Draw(t, "host")]
	var ticket memory.Ticket
	switch rapid.IntRange(0, 3).Draw(t, "kind") {
	case 0:
		seed := rapid.Uint64().Draw(t, "seed")
		list := disjoint(t, a.Size(), int64(len(host)))
		for i, g := range list {
			fill(host[g.Other:][:g.Bytes], seed+uint64(i))
			copy(m[g.Arena:][:g.Bytes], host[g.Other:])
		}
		ticket = a.WriteFrom(host, list)
	case 1:
		list := disjoint(t, a.Size(), int64(len(host)))
		want := s.spare[:copy(s.spare, host)]
		for _, g := range list {
			copy(want[g.Other:][:g.Bytes], m[g.Arena:])
		}
		if err := a.ReadInto(host, list).Wait(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(host, want) {
			t.Fatalf("a read of arena %d, %d segments: other bytes", i, len(list))
		}
		return
	case 2: // from the second half into the first
		half := a.Size() / 2
		list := disjoint(t, half, half)
		for k := range list {
			list[k].Other += half
			g := list[k]
			copy(m[g.Arena:][:g.Bytes], m[g.Other:])
		}
		ticket = a.Move(list)
	case 3:
		k := (i + rapid.IntRange(1, len(model)-1).Draw(t, "source")) % len(model)
		list := disjoint(t, a.Size(), s.arenas[k].Size())
		ticket = s.r.Pull(a, s.arenas[k], list)
		for _, g := range list {
			copy(m[g.Arena:][:g.Bytes], model[k][g.Other:])
		}
	}
	if err := ticket.Wait(); err != nil {
		t.Fatal(err)
	}
}

// disjoint draws segments that overlap on no side: pieces of one size, often a
// multiple of 16, some of them neighbours.
func disjoint(rt *rapid.T, arena, other int64) []memory.Segment {
	size := rapid.SampledFrom([]int64{16, 64, 100, 1024, 4096, 8192, 8200, 65536}).Draw(rt, "bytes")
	slots := int(min(arena, other) / size)
	n := min(rapid.IntRange(0, 200).Draw(rt, "pieces"), slots)
	rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "order"), 3))
	some := func() []int { // of a stretch in which some are neighbours
		stretch := min(slots, 1024)
		first, list := rng.IntN(slots-stretch+1), rng.Perm(stretch)[:n]
		for i := range list {
			list[i] += first
		}
		return list
	}
	to, from := some(), some()
	if rapid.Bool().Draw(rt, "dense") { // as a page is: host memory one behind the other
		slices.Sort(from)
		for i := range from {
			from[i] = i
		}
	}
	if rapid.Bool().Draw(rt, "sorted") {
		slices.Sort(to)
	}
	list := make([]memory.Segment, n)
	for i := range list {
		list[i] = memory.Segment{Arena: int64(to[i]) * size, Other: int64(from[i]) * size, Bytes: size - int64(rng.IntN(2))*(size/2)}
	}
	return list
}

func TestOutOfBoundsCopiesNothing(t *testing.T) {
	r, _ := open(t, cuda.Options{})
	a, b := alloc(t, r, 1<<20), alloc(t, r, 1<<20)
	host := make([]byte, 1<<20)
	fill(host, 1)
	const most = 1<<63 - 1
	for _, bad := range []memory.Segment{
		{Arena: -1, Bytes: 1},
		{Other: -1, Bytes: 1},
		{Bytes: -1},
		{Arena: 1 << 20, Bytes: 1},
		{Other: 1 << 20, Bytes: 1},
		{Bytes: 1<<20 + 1},
		{Arena: most, Bytes: 2},
		{Other: most, Bytes: most},
		{Arena: 1, Bytes: most},
	} {
		list := []memory.Segment{{Bytes: 4096}, bad}
		for name, ticket := range map[string]memory.Ticket{"write": a.WriteFrom(host, list), "read": a.ReadInto(host, list), "move": a.Move(list), "pull": r.Pull(a, b, list)} {
			if err := ticket.Wait(); err == nil {
				t.Errorf("%s of %+v was done", name, bad)
			}
		}
	}
	if !only(content(t, a), 0) {
		t.Error("something was copied")
	}
}

// Many pages are one call of the driver, neighbours one descriptor.
func TestSegmentsAreOneCall(t *testing.T) {
	defaultDriver(t)
	r, w := open(t, cuda.Options{})
	a := alloc(t, r, 64<<20)
	host := pinned(t, a, 64<<20)
	apart := func(n int) []memory.Segment {
		list := make([]memory.Segment, n)
		for i := range list {
			list[i] = memory.Segment{Arena: int64(i) * 8192, Other: int64(i) * 4096, Bytes: 4096}
		}
		return list
	}
	neighbours := make([]memory.Segment, 1000)
	for i := range neighbours {
		neighbours[i] = memory.Segment{Arena: int64(i) * 4096, Other: int64(i) * 4096, Bytes: 4096}
	}
	for name, tt := range map[string]struct {
		segments []memory.Segment
		want     uint64
	}{
		"64 apart":          {apart(64), 1},
		"1000 neighbours":   {neighbours, 1},
		"as many as a call": {apart(4096), 1},
		"one more":          {apart(4097), 2},
		"none":              {nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			for direction, start := range map[cuda.Direction]func() memory.Ticket{
				cuda.HostToDevice: func() memory.Ticket { return a.WriteFrom(host, tt.segments) },
				cuda.DeviceToHost: func() memory.Ticket { return a.ReadInto(host, tt.segments) },
			} {
				before, stats := batches(w), r.Stats().Copies[direction]
				wait(t, start())
				if got := batches(w) - before; got != tt.want {
					t.Errorf("%s: %d batches, want %d", direction, got, tt.want)
				}
				now := r.Stats().Copies[direction]
				if now.Calls-stats.Calls != tt.want || now.Segments-stats.Segments != uint64(len(tt.segments)) || now.Bytes-stats.Bytes != uint64(len(tt.segments))*4096 || now.Slow != 0 {
					t.Errorf("%s: stats went from %+v to %+v", direction, stats, now)
				}
			}
		})
	}
}

// batches is how many calls took many copies, or one.
func batches(w *cudatest.World) uint64 {
	c := mine(w).Calls
	return c["cuMemcpyBatchAsync"] + c["cuMemcpyBatchAsync_v2"] + c["cuMemcpyHtoDAsync_v2"] + c["cuMemcpyDtoHAsync_v2"] + c["cuMemcpyAsync"]
}

// Small pieces that lie together in the host are one stretch and one kernel.
func TestSmallPiecesGoByTheKernel(t *testing.T) {
	defaultDriver(t)
	r, w := open(t, cuda.Options{Scatter: 8 << 10})
	a := alloc(t, r, 64<<20)
	host := pinned(t, a, 32<<20)
	fill(host, 5)
	const n = 3000
	list := make([]memory.Segment, n)
	for i := range list {
		list[i] = memory.Segment{Arena: int64(n-1-i) * 8192, Other: int64(i) * 4096, Bytes: 4096}
	}
	before := mine(w).Calls
	wait(t, a.WriteFrom(host, list))
	now := mine(w).Calls
	// 12 MB, of which 4 MiB fit into a slot.
	if got := now["cuLaunchKernel"] - before["cuLaunchKernel"]; got != 3 || r.Stats().Kernels != 3 {
		t.Errorf("%d launches, stats say %d, want 3", got, r.Stats().Kernels)
	}
	if got := now["cuMemcpyBatchAsync"] - before["cuMemcpyBatchAsync"]; got != 3 {
		t.Errorf("%d batches, want 3", got)
	}
	got := content(t, a)
	for i, s := range list {
		if !bytes.Equal(got[s.Arena:][:s.Bytes], host[s.Other:][:s.Bytes]) {
			t.Fatalf("piece %d has other bytes", i)
		}
	}
	if c, err := r.Capabilities(a.GPU().UUID); err != nil || c.Scatter != 8<<10 || !c.Batch || !c.DMABuf || c.Driver != 12090 {
		t.Errorf("%+v, %v", c, err)
	}
}

// A device that is first used measures what small pieces are, in a moment.
func TestDeviceMeasuresSmallPieces(t *testing.T) {
	r, w := open(t, cuda.Options{Scatter: measured})
	a := alloc(t, r, 1<<20)
	c, err := r.Capabilities(a.GPU().UUID)
	if err != nil || c.Scatter < 0 || c.Scatter > 128<<10 {
		t.Errorf("%+v, %v", c, err)
	}
	if n := mine(w).Calls["cuLaunchKernel"]; n == 0 || r.Stats() != (cuda.Stats{Arenas: 1}) {
		t.Errorf("%d launches, %+v", n, r.Stats())
	}
	host := pinned(t, a, 1<<20)
	fill(host, 1)
	list := make([]memory.Segment, 256)
	for i := range list {
		list[i] = memory.Segment{Arena: int64(255-i) * 4096, Other: int64(i) * 4096, Bytes: 4096}
	}
	wait(t, a.WriteFrom(host, list))
	got := make([]byte, 1<<20)
	wait(t, a.ReadInto(got, list))
	if !bytes.Equal(got, host) {
		t.Error("other bytes")
	}
}

// Copies run in the order in which they were asked for, also of the same bytes.
func TestCopiesRunInOrder(t *testing.T) {
	for _, scatter := range []int64{-1, 64 << 10} {
		t.Run(fmt.Sprint(scatter), func(t *testing.T) {
			r, _ := open(t, cuda.Options{Scatter: scatter})
			a := alloc(t, r, 1<<20)
			const rounds = 24 // more than are under way at a time
			host := pinned(t, a, rounds<<20)
			segments := make([]memory.Segment, 64)
			var last []memory.Ticket
			for i := range rounds {
				for k := range segments {
					segments[k] = memory.Segment{Arena: int64(63-k) * 16384, Other: int64(i)<<20 + int64(k)*16384, Bytes: 16384}
				}
				copy(host[i<<20:], bytes.Repeat([]byte{byte(i + 1)}, 1<<20))
				last = append(last, a.WriteFrom(host, slices.Clone(segments)))
			}
			for _, ticket := range last {
				wait(t, ticket)
			}
			if !only(content(t, a), rounds) {
				t.Error("an earlier copy ran behind the last")
			}
		})
	}
}
