package rdmaread

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
)

// pages are n copies of whole pages in a random order, of arenas of that size,
// which may be smaller than all of them.
func pages(n int, page, size int64) []transfer.Copy {
	rng := rand.New(rand.NewPCG(7, 7))
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Remote: rng.Int64N(size/page) * page, Local: int64(i) * page % size, Bytes: page}
	}
	return copies
}

// timed skips a test of what a model says where the race detector slows it.
func timed(t *testing.T) {
	t.Helper()
	if race {
		t.Skip("the race detector is slower than the model")
	}
}

// fastest is how long the fastest of some reads takes.
func fastest(t *testing.T, l *link, seal transfer.Seal, copies []transfer.Copy, times int) time.Duration {
	t.Helper()
	best := time.Hour
	for range times {
		started := time.Now()
		if err := l.Read(short(t), []transfer.Seal{seal}, copies); err != nil {
			t.Fatal(err)
		}
		best = min(best, time.Since(started))
	}
	return best
}

// Where a queue pair has few reads under way, there are as many as fill the way:
// the default reaches what all of them together can.
func TestReadDepthIsMadeUpFor(t *testing.T) {
	timed(t)
	const size, page, delay = 8 << 20, 16 << 10, 10 * time.Millisecond // so long that this machine's own time is of no account
	for depth, lanes := range map[int]int{4: 8, 16: 2} {
		m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0", MaxReads: depth})
		owner, reader := newPair(t, m, size, Options{})
		l := open(t, reader, owner.peer())
		if len(l.lanes) != lanes || l.paths[0].reads != depth {
			t.Fatalf("%d lanes of %d reads, want %d of %d", len(l.lanes), l.paths[0].reads, lanes, depth)
		}
		eventually(t, "lanes", func() bool { return len(queues(l)) == lanes })
		copies := pages(2*size/page, page, size)
		w.Set(rdmatest.Faults{Delay: delay})
		bound := time.Duration(len(copies)/32) * delay
		took := time.Hour
		for range 10 { // this machine may be busy
			if took = min(took, fastest(t, l, owner.hold(5, 5), copies, 1)); float64(bound) >= 0.9*float64(took) {
				break
			}
		}
		t.Logf("depth %d: %v, the model says %v: %.2f of the bound", depth, took, bound, bound.Seconds()/took.Seconds())
		if float64(bound) < 0.9*float64(took) {
			t.Errorf("depth %d: %v, want at most %v", depth, took, time.Duration(float64(bound)/0.9))
		}
	}
}

// speed is the time of a read between nodes that have these devices.
func speed(t *testing.T, specs []rdmatest.DeviceSpec, f rdmatest.Faults, names ...string) time.Duration {
	t.Helper()
	const size, page = 16 << 20, 16 << 10
	m, w := newMeeting(t, Options{}, specs...)
	owner, reader := newPair(t, m, size, Options{Devices: names})
	l := open(t, reader, owner.peer())
	eventually(t, "lanes", func() bool { return len(queues(l)) == len(l.lanes) })
	w.Set(f)
	return fastest(t, l, owner.hold(5, 5), pages(2*size/page, page, size), 3)
}

// compare measures a read by one device and by two until it is as it should be, or
// a few times have shown that it is not: this machine may be busy.
func compare(t *testing.T, specs []rdmatest.DeviceSpec, f rdmatest.Faults, good func(one, two time.Duration) bool) {
	t.Helper()
	timed(t)
	one, two := time.Hour, time.Hour
	for range 4 {
		one = min(one, speed(t, specs, f, specs[0].Name))
		two = min(two, speed(t, specs, f, specs[0].Name, specs[1].Name))
		if good(one, two) {
			t.Logf("%v by one device, %v by two: %.2f times as fast", one, two, one.Seconds()/two.Seconds())
			return
		}
	}
	t.Errorf("%v by one device, %v by two: %.2f times as fast", one, two, one.Seconds()/two.Seconds())
}

// A second device adds its whole share.
func TestSecondDeviceAdds(t *testing.T) {
	compare(t, []rdmatest.DeviceSpec{{Name: "d0"}, {Name: "d1"}}, rdmatest.Faults{Bandwidth: 150 << 20},
		func(one, two time.Duration) bool { return one.Seconds() >= 1.9*two.Seconds() })
}

// A second device that is much slower than the first costs nothing: it has 8
// reads at once, the first has 32.
func TestSlowDeviceCostsNothing(t *testing.T) {
	compare(t, []rdmatest.DeviceSpec{{Name: "d0"}, {Name: "d1", MaxReads: 1}}, rdmatest.Faults{Delay: 2 * time.Millisecond},
		func(one, two time.Duration) bool { return two <= one+one/20 })
}

// The processor crosses into C once for 16 scattered pages at most, and a few
// times a read.
func TestCrossings(t *testing.T) {
	const size = 64 << 20
	for _, page := range []int64{16 << 10, 64 << 10} {
		m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
		owner, reader := newPair(t, m, size, Options{})
		l := open(t, reader, owner.peer())
		eventually(t, "lanes", func() bool { return len(queues(l)) == len(l.lanes) })
		seal := owner.hold(5, 5)
		for _, n := range []int{1, 1000, 100_000} {
			if page > 16<<10 && n > 1000 {
				n = 20_000
			}
			before := reader.t.Stats().Crossings
			if err := l.Read(context.Background(), []transfer.Seal{seal}, pages(n, page, size)); err != nil {
				t.Fatal(err)
			}
			crossings := int(reader.t.Stats().Crossings - before)
			t.Logf("%d pages of %d KiB: %d crossings", n, page>>10, crossings)
			if most := n/16 + 8; crossings > most {
				t.Errorf("%d pages of %d KiB: %d crossings, want at most %d", n, page>>10, crossings, most)
			}
		}
	}
}

// A read of more pages allocates no more.
func TestPagesAllocateNothing(t *testing.T) {
	if race {
		t.Skip("the race detector allocates")
	}
	const size, page = 16 << 20, 4 << 10
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, size, Options{})
	l := open(t, reader, owner.peer())
	eventually(t, "lanes", func() bool { return len(queues(l)) == len(l.lanes) })
	seals := []transfer.Seal{owner.hold(5, 5)}
	few, many := pages(2000, page, size), pages(40_000, page, size)
	allocs := func(copies []transfer.Copy) float64 {
		return testing.AllocsPerRun(10, func() {
			if err := l.Read(context.Background(), seals, copies); err != nil {
				t.Fatal(err)
			}
		})
	}
	allocs(many)
	a, b := allocs(few), allocs(many)
	t.Logf("%d pages: %.0f allocations, %d pages: %.0f", len(few), a, len(many), b)
	if b > a+10 { // of a pool that was emptied meanwhile
		t.Errorf("%.0f allocations for %d pages, %.0f for %d", b, len(many), a, len(few))
	}
}

// A small read of one peer ends within a few windows of what others read, and
// one of the same link does too.
func TestSmallReadWaitsForNoLargeOne(t *testing.T) {
	const size, rate = 8 << 20, 400 << 20
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, size, Options{})
	other := newNode(t, id.Life{Node: "other", Incarnation: 3}, size)
	other.listen(t, m, Options{})
	large, small := open(t, reader, owner.peer()), open(t, reader, other.peer())
	w.Set(rdmatest.Faults{Bandwidth: rate})
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	seal := owner.hold(5, 5)
	for range 4 {
		work.Go(func() {
			_ = large.Read(ctx, []transfer.Seal{seal}, pages(1<<16, 16<<10, size)) // until it is canceled
		})
	}
	eventually(t, "nothing is read", func() bool { return !bytes.Equal(reader.arena()[:4096], make([]byte, 4096)) && len(queues(large)) > 0 })
	few := 10 * time.Duration(float64(mostWindow)/rate*float64(time.Second)) // windows
	for name, read := range map[string]func() error{
		"another peer": func() error {
			return small.Read(short(t), []transfer.Seal{other.hold(5, 5)}, []transfer.Copy{{Bytes: 64 << 10}})
		},
		"the same link": func() error {
			return large.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 64 << 10}})
		},
	} {
		started := time.Now()
		if err := read(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		took := time.Since(started)
		t.Logf("%s: %v beside four large reads of one link, a window takes %v", name, took, few/10)
		if took > few && !race {
			t.Errorf("%s: %v, want at most %v", name, took, few)
		}
	}
	cancel()
	work.Wait()
}

// Offsets beyond 4 GiB are offsets, on both sides and in the keys of slices.
func TestOffsetsBeyondFourGiB(t *testing.T) {
	if *soak < time.Minute {
		t.Skip("5 GiB of memory are for long runs: -soak=1m")
	}
	const size = 5 << 30
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	arena, err := memory.New("five GiB", size)
	if errors.Is(err, memory.ErrLimit) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer arena.Close()
	// Both have the same memory: a read copies within it.
	owner, reader := newNode(t, ownerLife, 4096), newNode(t, readerLife, 4096)
	for _, n := range []*node{owner, reader} {
		n.local.Arenas = map[id.Rank]memory.Arena{0: arena}
	}
	for _, n := range []*node{owner, reader} {
		n.local.Life.Node += "-large"
		n.listen(t, m, Options{})
	}
	l := open(t, reader, owner.peer())
	if n := len(owner.t.devices[0].arenas[0].region.Keys()); n < 3 {
		t.Errorf("5 GiB are %d slices", n)
	}
	var copies []transfer.Copy
	for i, at := range []int64{0, 1<<31 - 5000, 1<<32 - 5000, 1<<32 + 123456, size - 10000} {
		copies = append(copies, transfer.Copy{Remote: at, Local: size/2 + 1<<20 - at/4 + int64(i), Bytes: 10000})
		pattern(arena.Bytes()[at:][:10000], i+1)
	}
	copies = append(copies, transfer.Copy{Remote: 0, Local: 1<<32 + 1<<20 - 3, Bytes: 10000})
	if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies); err != nil {
		t.Fatal(err)
	}
	for _, c := range copies {
		if !bytes.Equal(arena.Bytes()[c.Local:][:c.Bytes], arena.Bytes()[c.Remote:][:c.Bytes]) {
			t.Errorf("other bytes at %d than at %d", c.Local, c.Remote)
		}
	}
}

// Every byte of every copy is in one op, at its place, under the keys of the
// slices that it is in, in arenas of any size.
func TestOpsAreTheCopies(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func(name string) region {
			r := region{
				addr:  rapid.Uint64Range(1, 1<<46).Draw(t, name+" address"),
				slice: rapid.Uint64Range(1, 1<<22).Draw(t, name+" slice") * 4096,
			}
			n := rapid.IntRange(1, 20).Draw(t, name+" slices")
			r.bytes = r.slice*uint64(n-1) + rapid.Uint64Range(1, r.slice).Draw(t, name+" rest")
			for i := range n {
				r.keys = append(r.keys, uint32(i+1))
			}
			return r
		}
		var here, there [id.MaxRanks]region
		here[3], there[3] = draw("here"), draw("there")
		var w window
		for range rapid.IntRange(1, 5).Draw(t, "copies") {
			most := min(here[3].bytes, there[3].bytes, 1<<23)
			c := transfer.Copy{Rank: 3, Bytes: rapid.Int64Range(1, int64(most)).Draw(t, "bytes")}
			c.Local = rapid.Int64Range(0, int64(here[3].bytes)-c.Bytes).Draw(t, "local")
			c.Remote = rapid.Int64Range(0, int64(there[3].bytes)-c.Bytes).Draw(t, "remote")
			w.copies = append(w.copies, c)
		}
		w.fill(&here, &there)
		ops := w.ops
		for i, c := range w.copies {
			for done := int64(0); done < c.Bytes; ops = ops[1:] {
				if len(ops) == 0 {
					t.Fatalf("copy %d has no ops behind %d bytes", i, done)
				}
				o := ops[0]
				local, remote := uint64(c.Local+done), uint64(c.Remote+done)
				last := uint64(o.Len) - 1
				if o.Len == 0 || o.Local != here[3].addr+local || o.Remote != there[3].addr+remote ||
					o.LKey != here[3].keys[local/here[3].slice] || o.LKey != here[3].keys[(local+last)/here[3].slice] ||
					o.RKey != there[3].keys[remote/there[3].slice] || o.RKey != there[3].keys[(remote+last)/there[3].slice] {
					t.Fatalf("copy %d, %+v: op %+v at %d", i, c, o, done)
				}
				done += int64(o.Len)
			}
		}
		if len(ops) != 0 || w.landed(len(w.ops)) != transfer.Bytes(w.copies) {
			t.Fatalf("%d ops too many", len(ops))
		}
		// What is left behind some bytes is what is left.
		landed := rapid.Int64Range(0, transfer.Bytes(w.copies)).Draw(t, "landed")
		if rest := w.rest(landed); transfer.Bytes(rest.copies) != transfer.Bytes(w.copies)-landed {
			t.Fatalf("behind %d of %d bytes there are %d", landed, transfer.Bytes(w.copies), transfer.Bytes(rest.copies))
		}
	})
}

// BenchmarkFill is the Go side of a page: cutting windows and making ops.
func BenchmarkFill(b *testing.B) {
	const page, count = 16 << 10, 512
	for _, slices := range []int{1, 4} {
		b.Run(fmt.Sprintf("%d slices", slices), func(b *testing.B) {
			size := int64(count * page)
			var here, there [id.MaxRanks]region
			here[0] = region{addr: 1 << 40, bytes: uint64(size), slice: uint64(size) / uint64(slices), keys: make([]uint32, slices)}
			there[0] = here[0]
			copies := pages(count, page, size)
			w := &window{ops: make([]rdma.Op, 0, count)}
			w.copies = make([]transfer.Copy, 0, count)
			l := &link{lanes: []*lane{{}}}
			b.ReportAllocs()
			for b.Loop() {
				p := pull{l: l, copies: copies, left: size, total: size, workers: 1, hands: 1}
				if !p.take(w, rates{lane: 1e9, best: 1e9, all: 1e9, even: true}, nil) || len(w.copies) != count {
					b.Fatal(len(w.copies))
				}
				w.fill(&here, &there)
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/count, "ns/page")
		})
	}
}

// BenchmarkSubmit is what a scattered page costs the processor, from Link.Read to
// its return: cutting, posting, sleeping, waking, reaping. What the device does is
// not in it: of the double, the threads of its engines.
func BenchmarkSubmit(b *testing.B) {
	const count, size = 40_000, 64 << 20
	for _, page := range []int64{64, 4 << 10, 16 << 10, 64 << 10} {
		b.Run(fmt.Sprintf("%d B", page), func(b *testing.B) {
			m, _ := newMeeting(b, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			owner, reader := newPair(b, m, size, Options{})
			l := open(b, reader, owner.peer())
			eventually(b, "lanes", func() bool { return len(queues(l)) == len(l.lanes) })
			seals := []transfer.Seal{owner.hold(5, 5)}
			copies := pages(count, page, size)
			before := ownTime(b)
			for b.Loop() {
				if err := l.Read(b.Context(), seals, copies); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(ownTime(b)-before)/float64(b.N)/count, "cpu-ns/page")
		})
	}
}

// ownTime is the processor's time of this process without that of the engines.
func ownTime(b *testing.B) time.Duration {
	b.Helper()
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &t); err != nil {
		b.Fatal(err)
	}
	own := time.Duration(t.Nano())
	names, err := filepath.Glob("/proc/self/task/*/comm")
	if err != nil {
		b.Fatal(err)
	}
	engines := 0
	for _, name := range names {
		if comm, err := os.ReadFile(name); err != nil || string(comm) != "verbs-engine\n" {
			continue
		}
		times, err := os.ReadFile(filepath.Join(filepath.Dir(name), "schedstat")) // nanoseconds on a processor come first
		if err != nil {
			b.Fatal(err)
		}
		var n int64
		if _, err := fmt.Sscan(string(times), &n); err != nil {
			b.Fatal(err)
		}
		own -= time.Duration(n)
		engines++
	}
	if engines == 0 {
		b.Fatal("no engine of the double is to be seen")
	}
	return own
}
