package shm

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// under runs a long read, and returns when its first byte has landed.
func under(ctx context.Context, t testing.TB, owner, reader *node, l *link, seal transfer.Seal) <-chan error {
	t.Helper()
	owner.arena()[0], reader.arena()[0] = 77, 0
	long := slices.Repeat([]transfer.Copy{{Bytes: int64(len(owner.arena()))}}, 40_000)
	done := make(chan error, 1)
	go func() { done <- l.Read(ctx, []transfer.Seal{seal}, long) }()
	eventually(t, "no byte lands", func() bool { return reader.arena()[0] != 0 })
	return done
}

// A small read does not wait for the whole of a large one, even if one worker
// is for both.
func TestSmallReadsOvertake(t *testing.T) {
	owner, reader := newPair(t, 8<<20, Options{Workers: 1})
	seal := owner.hold(1, 1)
	l := open(t, reader, owner.peer())
	ctx, cancel := context.WithCancel(short(t))
	done := under(ctx, t, owner, reader, l, seal)
	other := open(t, reader, owner.peer()) // the bound is of all links together
	for n := range 100 {
		if err := []*link{l, other}[n%2].Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Remote: 4096, Local: 4096, Bytes: 4096}}); err != nil {
			t.Fatal(err)
		}
	}
	if len(done) > 0 {
		t.Errorf("the large read ended first: %v", <-done)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// Whatever ends a read that waits for a worker ends it at once.
func TestWaitingForAWorkerEnds(t *testing.T) {
	for name, tt := range map[string]struct {
		end   func(owner *node, l *link, cancel context.CancelFunc)
		want  error
		total time.Duration
	}{
		"context":   {func(_ *node, _ *link, cancel context.CancelFunc) { cancel() }, context.Canceled, patience},
		"link":      {func(_ *node, l *link, _ context.CancelFunc) { _ = l.Close() }, transfer.ErrClosed, patience},
		"too long":  {func(*node, *link, context.CancelFunc) {}, transfer.ErrStalled, 50 * time.Millisecond},
		"the owner": {func(owner *node, _ *link, _ context.CancelFunc) { _ = owner.t.Close() }, rendezvous.ErrGone, patience},
	} {
		owner, reader := newPair(t, 4096, Options{Workers: 1, Limits: transfer.Limits{Base: tt.total, Rate: 1 << 50}})
		seal := owner.hold(1, 1)
		reader.t.workers.Try() // somebody copies
		l := open(t, reader, owner.peer())
		ctx, cancel := context.WithCancel(short(t))
		done := make(chan error, 1)
		go func() { done <- l.Read(ctx, []transfer.Seal{seal}, []transfer.Copy{{Bytes: 4096}}) }()
		eventually(t, "the read does not wait", func() bool { return reader.t.workers.Wanted() || len(done) > 0 })
		tt.end(owner, l, cancel)
		err := <-done
		cancel()
		if e, ok := errors.AsType[*transfer.Error](err); !ok || !errors.Is(err, tt.want) || e.Done != 0 || e.Address != l.hold.Address() || e.Peer != ownerLife {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
		reader.t.workers.Release()
		if s := reader.t.Stats(); s.Errors != 1 || s.ReadBytes != 0 {
			t.Errorf("%s: stats %+v", name, s)
		}
	}
}

func TestTotalTimeEndsARead(t *testing.T) {
	long := slices.Repeat([]transfer.Copy{{Bytes: 8 << 20}}, 40_000)
	for total := 30 * time.Millisecond; ; total *= 4 { // longer, where this machine is too busy to copy a byte in time
		owner, reader := newPair(t, 8<<20, Options{Limits: transfer.Limits{Base: total, Rate: 1 << 50}})
		err := open(t, reader, owner.peer()).Read(short(t), []transfer.Seal{owner.hold(1, 1)}, long)
		e, ok := errors.AsType[*transfer.Error](err)
		if !ok || !errors.Is(err, transfer.ErrStalled) || e.Done == e.Total || e.Took < total || e.Took > total+20*time.Second {
			t.Fatalf("Read: %v, want its end after %v", err, total)
		}
		if e.Done > 0 {
			return
		}
		if total > 5*time.Second {
			t.Fatalf("not a byte landed: %v", err)
		}
	}
}

// Memory of the peer that the machine has lost ends the read, not the process;
// a fault in ours is our bug.
func TestLostMemoryEndsTheRead(t *testing.T) {
	owner, reader := newPair(t, 4<<20, Options{Workers: 2})
	seals := []transfer.Seal{owner.hold(1, 1)}
	l := open(t, reader, owner.peer())
	protect := func(b []byte, prot int) {
		if err := unix.Mprotect(b, prot); err != nil {
			t.Fatal(err)
		}
	}
	protect(l.arenas[0].remote[2<<20:][:4096], unix.PROT_NONE)
	for _, copies := range [][]transfer.Copy{{{Remote: 2<<20 + 100, Bytes: 10}}, {{Bytes: 4 << 20}}, {{Bytes: 1 << 20}, {Remote: 2<<20 - 64, Bytes: 8192}}} {
		err := l.Read(short(t), seals, copies)
		if _, ok := errors.AsType[*transfer.Error](err); !ok || !strings.Contains(err.Error(), "memory errors") {
			t.Errorf("Read of memory that is lost: %v", err)
		}
	}
	if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 2 << 20}}); err != nil {
		t.Errorf("Read of the rest: %v", err)
	}
	protect(l.seals.Region().Bytes(), unix.PROT_NONE)
	if err := l.Read(short(t), seals, []transfer.Copy{{Bytes: 1}}); err == nil || !strings.Contains(err.Error(), "memory errors") {
		t.Errorf("Read under a seal table that is lost: %v", err)
	}
	protect(l.seals.Region().Bytes(), unix.PROT_READ)

	protect(reader.arena()[:4096], unix.PROT_NONE)
	defer protect(reader.arena()[:4096], unix.PROT_READ|unix.PROT_WRITE)
	defer func() {
		if recover() == nil {
			t.Error("a fault in our own arena is told as an error of the peer's")
		}
	}()
	_ = l.Read(short(t), seals, []transfer.Copy{{Bytes: 100}})
}

// What a read allocates does not depend on how many copies it has.
func TestReadAllocates(t *testing.T) {
	const size = 8 << 20
	owner, reader := newPair(t, size, Options{Workers: 2})
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
	if n := allocs(shuffled(size, 64)[:4096]); n > 2 {
		t.Errorf("a small read of 4096 copies allocates %v times", n)
	}
	few, many := allocs(shuffled(size, 1<<20)), allocs(shuffled(size, 64))
	t.Logf("a large read of 8 copies allocates %v times, of %d copies %v times", few, size/64, many)
	if many > few+4 || few > 20 {
		t.Errorf("a large read of 8 copies allocates %v times, of %d copies %v times", few, size/64, many)
	}
}

// shuffled is every chunk of an arena, from and to random places.
func shuffled(size, chunk int) []transfer.Copy {
	n := size / chunk
	from, to := rand.Perm(n), rand.Perm(n)
	copies := make([]transfer.Copy, n)
	for i := range copies {
		copies[i] = transfer.Copy{Remote: int64(from[i] * chunk), Local: int64(to[i] * chunk), Bytes: int64(chunk)}
	}
	return copies
}

// BenchmarkRead reads 32 MiB in scattered chunks of arenas of 512 MiB, by one
// worker and by two, past the caches and through them.
func BenchmarkRead(b *testing.B) {
	const arena, read = 512 << 20, 32 << 20
	for _, workers := range []int{1, 2} {
		for _, cached := range []bool{false, true} {
			owner, reader := newPair(b, arena, Options{Workers: workers, Cached: cached})
			l := open(b, reader, owner.peer())
			seals := []transfer.Seal{owner.hold(1, 1)}
			for _, chunk := range []int{64, 4 << 10, 16 << 10, 64 << 10, 1 << 20} {
				copies := shuffled(arena, chunk)
				each := read / chunk
				if chunk == 64 { // what a page costs beside its bytes
					each = 4096
				}
				b.Run(fmt.Sprintf("workers=%d/cached=%v/chunk=%d", workers, cached, chunk), func(b *testing.B) {
					b.ReportAllocs()
					b.SetBytes(int64(each * chunk))
					at := 0
					for b.Loop() {
						if at+each > len(copies) {
							at = 0
						}
						if err := l.Read(b.Context(), seals, copies[at:at+each]); err != nil {
							b.Fatal(err)
						}
						at += each
					}
					b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*each), "ns/chunk")
				})
			}
			_ = l.Close()
			_ = reader.t.Close()
			_ = owner.t.Close()
			reader.drop(b)
			owner.drop(b)
		}
	}
}
