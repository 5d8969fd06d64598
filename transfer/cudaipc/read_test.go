package cudaipc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// shuffled is every page of an arena, from and to random places, no two of them
// neighbours on both sides.
func shuffled(size, page int64) []transfer.Copy {
	n := int(size / page)
	from, to := rand.Perm(n), rand.Perm(n)
	for i := range n { // neighbours are moved as one, which is not what is counted here
		if j := (i + 1) % n; from[j] == from[i]+1 && to[j] == to[i]+1 {
			return shuffled(size, page)
		}
	}
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Remote: int64(from[i]) * page, Local: int64(to[i]) * page, Bytes: page}
	}
	return copies
}

// deviceCalls are those that started copies from device to device.
func deviceCalls(r *cuda.Runtime) cuda.Copies { return r.Stats().Copies[cuda.DeviceToDevice] }

// The device is called once for many pages, and the driver once for each call.
func TestOneCallForManyPages(t *testing.T) {
	const page = 8 << 10
	w := emulated(t)
	owner, reader := newPair(t, 16<<20, Options{})
	if c, err := reader.r.Capabilities(deviceOf(t, reader.r, 0)); err != nil || !c.Batch {
		t.Skipf("the driver has no batch: %+v, %v", c, err)
	}
	l := open(t, reader, owner.peer())
	seals := []transfer.Seal{owner.hold(1, 1)}
	for name, tt := range map[string]struct {
		copies   []transfer.Copy
		most     uint64 // calls
		segments uint64
	}{
		"64 scattered pages":     {shuffled(64*page, page), 1, 64},
		"2048 scattered pages":   {shuffled(2048*page, page), 1, 2048},
		"3000 small pieces":      {shuffled(3000*512, 512), 2, 3000},
		"64 neighbours":          {pages(64*page, page), 1, 64},
		"one of the whole arena": {[]transfer.Copy{{Bytes: 16 << 20}}, 1, 1},
		"none":                   {nil, 0, 0},
	} {
		before, called := deviceCalls(reader.r), w.Counts().Calls
		if err := l.Read(short(t), seals, tt.copies); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		after, calls := deviceCalls(reader.r), w.Counts().Calls
		if n := after.Calls - before.Calls; n > tt.most || n == 0 && tt.most > 0 {
			t.Errorf("%s: %d calls, want %d at most", name, n, tt.most)
		}
		if n := after.Segments - before.Segments; n != tt.segments {
			t.Errorf("%s: %d segments, want %d", name, n, tt.segments)
		}
		copying := uint64(0)
		for call, n := range calls {
			if strings.HasPrefix(call, "cuMemcpy") {
				copying += n - called[call]
			}
		}
		if copying > tt.most {
			t.Errorf("%s: the driver was called %d times to copy, want %d at most", name, copying, tt.most)
		}
	}
}

// A read is over when its copies are, and its seal is looked at behind that: one
// that ends while the device copies is found.
func TestSealIsLookedAtBehindTheCopies(t *testing.T) {
	w := emulated(t)
	owner, reader := newPair(t, 1<<20, Options{})
	l := open(t, reader, owner.peer())
	seal := owner.hold(1, 1)
	w.Set(cudatest.Faults{Hold: true})
	done := make(chan error, 1)
	go func() { done <- l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: 1 << 20}}) }()
	eventually(t, "nothing is copied", func() bool { return reader.t.turns.Taken() == 1 })
	select {
	case err := <-done:
		t.Fatalf("Read returned while its copy ran: %v", err)
	case <-time.After(20 * time.Millisecond):
	}
	owner.local.Seals.Store(1, 0)
	w.Clear()
	err := <-done
	if e, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, transfer.ErrStale) || e.Done != 1<<20 {
		t.Errorf("Read: %v, want ErrStale behind all bytes", err)
	}
	if s := reader.t.Stats(); s.Stale != 1 || s.ReadBytes != 1<<20 || s.Reads+s.Errors != 0 {
		t.Errorf("stats %+v", s)
	}
}

// under runs a read of an arena over and over, which has as many batches under
// way as a read can have; nothing of it ends before the faults are set anew.
func under(ctx context.Context, t testing.TB, w *cudatest.World, reader *node, l *link, seal transfer.Seal) <-chan error {
	t.Helper()
	w.Set(cudatest.Faults{Hold: true})
	long := slices.Repeat([]transfer.Copy{{Bytes: reader.size}}, 10_000)
	done := make(chan error, 1)
	go func() { done <- l.Read(ctx, []transfer.Seal{seal}, long) }()
	eventually(t, "nothing is copied", func() bool { return reader.t.turns.Taken() == readBatches })
	return done
}

// Whatever ends a read, it returns when what the device has been given is over,
// not before, and not much later.
func TestReadEndsWithItsBatches(t *testing.T) {
	const size = 1 << 20
	w := emulated(t)
	for name, tt := range map[string]struct {
		end    func(owner *node, l *link, cancel context.CancelFunc)
		limits transfer.Limits
		want   error
	}{
		"context":       {func(_ *node, _ *link, cancel context.CancelFunc) { cancel() }, transfer.Limits{}, context.Canceled},
		"link":          {func(_ *node, l *link, _ context.CancelFunc) { _ = l.Close() }, transfer.Limits{}, transfer.ErrClosed},
		"too long":      {func(*node, *link, context.CancelFunc) {}, transfer.Limits{Base: 3 * time.Second, Rate: 1 << 50}, transfer.ErrStalled},
		"the owner":     {func(owner *node, _ *link, _ context.CancelFunc) { _ = owner.t.Close() }, transfer.Limits{}, transfer.ErrClosed},
		"the transport": {func(_ *node, l *link, _ context.CancelFunc) { _ = l.t.Close() }, transfer.Limits{}, transfer.ErrClosed},
	} {
		t.Run(name, func(t *testing.T) {
			owner, reader := newPair(t, size, Options{Limits: tt.limits})
			l := open(t, reader, owner.peer())
			ctx, cancel := context.WithCancel(short(t))
			defer cancel()
			done := under(ctx, t, w, reader, l, owner.hold(1, 1))
			ended := make(chan struct{})
			go func() { tt.end(owner, l, cancel); close(ended) }()
			select {
			case err := <-done:
				t.Fatalf("Read returned while its copies ran: %v", err)
			case <-time.After(tt.limits.Base + 50*time.Millisecond):
			}
			w.Clear()
			err := <-done
			e, ok := errors.AsType[*transfer.Error](err)
			if !ok || !errors.Is(err, tt.want) || e.Done == 0 || e.Done > (readBatches+1)*batchBytes || e.Peer != ownerLife || e.Address != owner.t.server.Address() {
				t.Errorf("Read: %v, want %v", err, tt.want)
			}
			given := reader.fill(0, 9) // the pages have another owner now
			<-ended
			_ = l.Close()
			differ(t, "after the read", reader.peek(0), given)
			if n := reader.t.turns.Taken(); n != 0 {
				t.Errorf("%d turns are taken", n)
			}
			if s := reader.t.Stats(); s.Imported != 0 || s.Links != 0 {
				t.Errorf("stats %+v", s)
			}
		})
	}
}

// A small read does not wait for the whole of a large one, nor for all of several.
func TestSmallReadsOvertake(t *testing.T) {
	const size = 1 << 20
	w := emulated(t)
	owner, reader := newPair(t, size, Options{})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	ctx, cancel := context.WithCancel(short(t))
	defer cancel()
	const large = allBatches // more than have room
	done := make(chan error, large)
	long := slices.Repeat([]transfer.Copy{{Bytes: size}}, 100_000)
	w.Set(cudatest.Faults{Bandwidth: 16 << 30})
	for range large {
		go func() { done <- l.Read(ctx, []transfer.Seal{seal}, long) }()
	}
	eventually(t, "the large reads do not take all turns", func() bool { return reader.t.turns.Taken() == allBatches })
	other := open(t, reader, owner.peer()) // the bound is of all links together
	for n := range 4 {
		if err := []*link{l, other}[n%2].Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Remote: 4096, Local: 4096, Bytes: 4096}}); err != nil {
			t.Fatal(err)
		}
	}
	if len(done) > 0 {
		t.Errorf("a large read ended first: %v", <-done)
	}
	cancel()
	for range large {
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	}
}

// Whatever ends a read that waits for its turn ends it at once.
func TestWaitingForATurnEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end   func(l *link, cancel context.CancelFunc)
		want  error
		total time.Duration
	}{
		"context":  {func(_ *link, cancel context.CancelFunc) { cancel() }, context.Canceled, patience},
		"link":     {func(l *link, _ context.CancelFunc) { _ = l.Close() }, transfer.ErrClosed, patience},
		"too long": {func(*link, context.CancelFunc) {}, transfer.ErrStalled, 50 * time.Millisecond},
	} {
		owner, reader := newPair(t, 4096, Options{Limits: transfer.Limits{Base: tt.total, Rate: 1 << 50}})
		seal := owner.hold(1, 1)
		for range allBatches {
			reader.t.turns.Try() // others copy
		}
		l := open(t, reader, owner.peer())
		ctx, cancel := context.WithCancel(short(t))
		done := make(chan error, 1)
		go func() { done <- l.Read(ctx, []transfer.Seal{seal}, []transfer.Copy{{Bytes: 4096}}) }()
		tt.end(l, cancel)
		err := <-done
		cancel()
		if e, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, tt.want) || e.Done != 0 || e.Peer != ownerLife {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		for range allBatches {
			reader.t.turns.Release()
		}
		if s := reader.t.Stats(); s.Errors != 1 || s.ReadBytes != 0 {
			t.Errorf("%s: stats %+v", name, s)
		}
	}
}

// A seal table that the machine has lost ends the read, not the process.
func TestLostSealsEndTheRead(t *testing.T) {
	owner, reader := newPair(t, 4096, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	protect := func(prot int) {
		if err := unix.Mprotect(l.seals.Region().Bytes(), prot); err != nil {
			t.Fatal(err)
		}
	}
	protect(unix.PROT_NONE)
	err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 1}})
	protect(unix.PROT_READ)
	if _, ok := errors.AsType[*transfer.Error](err); !ok || !strings.Contains(err.Error(), "memory errors") {
		t.Errorf("Read under a seal table that is lost: %v", err)
	}
	if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 1}}); err != nil {
		t.Errorf("Read afterwards: %v", err)
	}
}

// Bytes of one rank never land in another, nor beside their destination, from
// whichever device they come; what is around them stays.
func TestRanksOnTwoDevices(t *testing.T) {
	const size, page = 1 << 20, 4 << 10
	r := gpu(t)
	dir := rendezvousDir(t)
	last := second(r)
	owner, reader := newNode(t, r, ownerLife, size, 0, last, 0, last), newNode(t, r, readerLife, size, 0, 0, last, last)
	owner.listen(t, Options{Dir: dir})
	reader.listen(t, Options{Dir: dir})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	if s := reader.t.Stats(); s.Imported != 4 {
		t.Errorf("stats %+v, want four arenas", s)
	}
	var copies []transfer.Copy
	want := map[id.Rank][]byte{}
	for rank := range id.Rank(4) {
		from := owner.fill(rank, int(rank))
		want[rank] = reader.fill(rank, 10+int(rank)) // canaries
		for _, c := range shuffled(size, page)[:100] {
			c.Rank, c.Bytes = rank, 1+rand.Int64N(page) // pages are between canaries
			copies = append(copies, c)
			copy(want[rank][c.Local:][:c.Bytes], from[c.Remote:][:c.Bytes])
		}
	}
	rand.Shuffle(len(copies), func(i, j int) { copies[i], copies[j] = copies[j], copies[i] })
	if err := l.Read(short(t), []transfer.Seal{seal}, copies); err != nil {
		t.Fatal(err)
	}
	for rank := range want {
		differ(t, fmt.Sprintf("rank %d", int(rank)), reader.peek(rank), want[rank])
	}
}

// Only the ranks that both sides have are imported.
func TestOnlySharedRanksAreImported(t *testing.T) {
	const size = 1 << 20
	r := gpu(t)
	dir := rendezvousDir(t)
	owner, reader := newNode(t, r, ownerLife, size, 0, 0, 0), newNode(t, r, readerLife, size, 0)
	owner.listen(t, Options{Dir: dir})
	reader.listen(t, Options{Dir: dir})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	if s := reader.t.Stats(); s.Imported != 1 {
		t.Errorf("stats %+v, want one arena", s)
	}
	if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Rank: 1, Bytes: 1}}); !errors.Is(err, transfer.ErrRange) {
		t.Errorf("Read of a rank that we do not have: %v, want ErrRange", err)
	}
	if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Bytes: size}}); err != nil {
		t.Error(err)
	}
}

// What a read allocates does not depend on how many copies it has.
func TestReadAllocates(t *testing.T) {
	const size = 4 << 20
	owner, reader := newPair(t, size, Options{})
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	ctx := t.Context()
	allocs := func(copies []transfer.Copy) float64 {
		return testing.AllocsPerRun(20, func() {
			if err := l.Read(ctx, seals, copies); err != nil {
				t.Fatal(err)
			}
		})
	}
	few, many := allocs(shuffled(size, 1<<20)), allocs(shuffled(size, 2048))
	t.Logf("a read of 4 copies allocates %v times, of 2048 copies %v times", few, many)
	if many > few+8 || few > 40 { // those of package cuda are among them
		t.Errorf("a read of 4 copies allocates %v times, of 2048 copies %v times", few, many)
	}
}

// Whichever call of the driver fails, once or for ever, is told as an error or
// does not matter: nothing hangs, nothing wrong is taken for right, nothing is
// left, and the next attempt works.
func TestEveryCallMayFail(t *testing.T) {
	const size, closing = 1 << 20, "cuIpcCloseMemHandle"
	w := emulated(t)
	dir := rendezvousDir(t)
	reader := newReader(t, Options{Dir: dir}, size, 0)
	owner := start(t, childSpec{Life: ownerLife, Dir: dir, Bytes: size, Devices: []int{0}, Seed: 3})
	want := make([]byte, size)
	pattern(want, 3)
	cycle := func() error {
		l, err := reader.t.Open(short(t), owner.peer)
		if err != nil {
			return err
		}
		err = l.Read(short(t), []transfer.Seal{owner.seal}, pages(size, 4096))
		_ = l.Close()
		if _, ok := errors.AsType[*transfer.Error](err); err != nil && !ok {
			t.Errorf("%v (%T) is no *transfer.Error", err, err)
		}
		return err
	}
	if err := cycle(); err != nil {
		t.Fatal(err)
	}
	before := w.Counts().Calls
	if err := cycle(); err != nil {
		t.Fatal(err)
	}
	var calls []string
	for name, n := range w.Counts().Calls {
		if n > before[name] {
			calls = append(calls, name)
		}
	}
	slices.SortFunc(calls, func(a, b string) int { // what is not closed stays open, so that comes last
		return cmp.Or(strings.Compare(fmt.Sprint(a == closing), fmt.Sprint(b == closing)), strings.Compare(a, b))
	})
	if len(calls) < 4 || calls[len(calls)-1] != closing {
		t.Errorf("a read calls %v alone", calls)
	}
	files, held := openFiles(t), live()
	failed := map[string]bool{}
	for _, call := range calls {
		for _, code := range []int{1, cudatest.OutOfMemory, cudatest.NotSupported} {
			reader.fill(0, 77)
			w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: call, Code: code, Count: 1}}})
			err := cycle()
			w.Clear()
			if err != nil {
				failed[call] = true
				if errors.Is(err, transfer.ErrStale) {
					t.Errorf("%s answers %d: %v, and nothing was stale", call, code, err)
				}
			} else {
				differ(t, fmt.Sprintf("%s answers %d", call, code), reader.peek(0), want)
			}
			if s := reader.t.Stats(); s.Links != 0 || s.Imported != 0 || reader.t.turns.Taken() != 0 {
				t.Errorf("%s answers %d: stats %+v", call, code, s)
			}
			if now := live(); call != closing && (now != held || openFiles(t) > files) {
				t.Errorf("%s answers %d: the driver has %s, %s before, %d files are open, %d before", call, code, now, held, openFiles(t), files)
			}
			reader.fill(0, 78)
			if err := cycle(); err != nil {
				t.Fatalf("after %s has answered %d: %v", call, code, err)
			}
			differ(t, "after "+call, reader.peek(0), want)
			if t.Failed() {
				return
			}
		}
	}
	t.Logf("these fail a read: %v, of %v", slices.Sorted(maps.Keys(failed)), calls)
	owner.end(t)
}

// BenchmarkRead reads 32 MiB of an arena in another one, in pages. The driver is
// the emulated one: what counts is what is spent beside its copies.
func BenchmarkRead(b *testing.B) {
	const arena, read = 64 << 20, 32 << 20
	owner, reader := newPair(b, arena, Options{})
	l := open(b, reader, owner.peer())
	seals := []transfer.Seal{owner.hold(1, 1)}
	for _, page := range []int64{64, 4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		each := int64(read)
		if page == 64 { // what a page costs beside its bytes
			each = 2048 * page
		}
		copies := shuffled(arena, page)[:each/page]
		b.Run(fmt.Sprintf("page=%d", page), func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(each)
			for b.Loop() {
				if err := l.Read(b.Context(), seals, copies); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(int64(b.N)*each/page), "ns/page")
		})
	}
}

// BenchmarkOpen opens a link, imports an arena, and closes it.
func BenchmarkOpen(b *testing.B) {
	owner, reader := newPair(b, 64<<20, Options{})
	peer := owner.peer()
	for b.Loop() {
		l, err := reader.t.Open(b.Context(), peer)
		if err != nil {
			b.Fatal(err)
		}
		_ = l.Close()
	}
}
