package transfer_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// arenas are one for each rank, on a device or in host memory, filled with
// bytes, and what they hold.
func arenas(t testing.TB, d *transfertest.Device, ranks int, size int64) (map[id.Rank]memory.Arena, map[id.Rank][]byte) {
	t.Helper()
	all, content := map[id.Rank]memory.Arena{}, map[id.Rank][]byte{}
	for r := range id.Rank(ranks) {
		place := transfertest.Place(d.Alloc)
		if r%3 == 2 {
			place = transfertest.Host
		}
		a, err := place(size)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := a.Close(); err != nil {
				t.Error(err)
			}
		})
		all[r], content[r] = a, make([]byte, size)
		for i := range content[r] {
			content[r][i] = byte(rand.Uint32())
		}
		transfertest.Poke(a, 0, content[r])
	}
	return all, content
}

func newDevice(t testing.TB, o transfertest.DeviceOptions) *transfertest.Device {
	d := transfertest.NewDevice(o)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// stagedCopies draws copies of several ranks, mixed, whose destinations do not
// overlap.
func stagedCopies(t *rapid.T, ranks int, size int64) []transfer.Copy {
	n := rapid.IntRange(0, 40).Draw(t, "copies")
	slot := size / int64(max(n, 1))
	copies := make([]transfer.Copy, n)
	for i := range copies {
		bytes := rapid.Int64Range(1, slot).Draw(t, "bytes")
		copies[i] = transfer.Copy{
			Rank:   id.Rank(rapid.IntRange(0, ranks-1).Draw(t, "rank")),
			Remote: rapid.Int64Range(0, size-bytes).Draw(t, "remote"),
			Local:  int64(i) * slot,
			Bytes:  bytes,
		}
	}
	return copies
}

// What is gathered at one end and scattered at the other is what a naive copier
// moves, also for buffers that are used again, and each device gets one call a
// rank.
func TestStagingIsACopy(t *testing.T) {
	const ranks, size = 4, 4096
	d := newDevice(t, transfertest.DeviceOptions{})
	theirs, source := arenas(t, d, ranks, size)
	ours, want := arenas(t, d, ranks, size)
	var out, in transfer.Staging
	buf := make([]byte, size)
	rapid.Check(t, func(t *rapid.T) {
		copies := stagedCopies(t, ranks, size)
		before := d.Counts()
		clear(buf)
		out.Gather(buf, theirs, transfer.Owner, copies)
		if err := out.Wait(); err != nil {
			t.Fatal(err)
		}
		at := int64(0)
		onDevice := map[id.Rank]bool{}
		for _, c := range copies {
			if !bytes.Equal(buf[at:at+c.Bytes], source[c.Rank][c.Remote:c.Remote+c.Bytes]) {
				t.Fatalf("%+v was not gathered to %d", c, at)
			}
			at += c.Bytes
			copy(want[c.Rank][c.Local:], source[c.Rank][c.Remote:c.Remote+c.Bytes])
			if _, host := transfer.InHost(ours[c.Rank]); !host {
				onDevice[c.Rank] = true
			}
		}
		if slices.ContainsFunc(buf[at:], func(b byte) bool { return b != 0 }) {
			t.Fatalf("bytes behind the %d that were asked for were written", at)
		}
		in.Scatter(ours, transfer.Reader, copies, buf)
		if err := in.Wait(); err != nil {
			t.Fatal(err)
		}
		for r, a := range ours {
			got := make([]byte, size)
			transfertest.Peek(a, 0, got)
			if !bytes.Equal(got, want[r]) {
				t.Fatalf("rank %d has other bytes", r)
			}
		}
		c := d.Counts()
		for _, dir := range []transfertest.Direction{transfertest.ToHost, transfertest.FromHost} {
			if calls := c.Calls[dir] - before.Calls[dir]; calls != len(onDevice) {
				t.Fatalf("%d calls for %d ranks", calls, len(onDevice))
			}
		}
	})
}

// Wait returns with what went wrong when everything is over, and the staging is
// as new.
func TestStagingFails(t *testing.T) {
	d := newDevice(t, transfertest.DeviceOptions{})
	theirs, source := arenas(t, d, 2, 4096)
	copies := []transfer.Copy{{Rank: 1, Remote: 5, Bytes: 50}, {Rank: 0, Remote: 7, Bytes: 70}}
	broken := errors.New("broken")
	var s transfer.Staging
	buf := make([]byte, 4096)
	d.Fail(broken)
	s.Gather(buf, theirs, transfer.Owner, copies)
	if err := s.Wait(); !errors.Is(err, broken) {
		t.Errorf("Wait = %v, want the error of the copies", err)
	}
	d.Fail(nil)
	s.Gather(buf, map[id.Rank]memory.Arena{}, transfer.Owner, copies[:1])
	if err := s.Wait(); err == nil {
		t.Error("an arena that there is not was copied")
	}
	s.Gather(buf, theirs, transfer.Owner, copies)
	if err := s.Wait(); err != nil || !bytes.Equal(buf[:50], source[1][5:55]) || !bytes.Equal(buf[50:120], source[0][7:77]) {
		t.Errorf("afterwards: %v", err)
	}
}

// A staging that is used again costs no allocation but what the device makes.
func TestStagingAllocatesNothing(t *testing.T) {
	host, _ := arenas(t, newDevice(t, transfertest.DeviceOptions{}), 3, 4096)
	copies := make([]transfer.Copy, 100)
	for i := range copies {
		copies[i] = transfer.Copy{Rank: 2, Remote: int64(i) * 40, Bytes: 40}
	}
	var s transfer.Staging
	buf := make([]byte, 4096)
	if n := testing.AllocsPerRun(100, func() {
		s.Gather(buf, host, transfer.Owner, copies)
		if err := s.Wait(); err != nil {
			t.Error(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func newPool(t testing.TB, of map[id.Rank]memory.Arena, size, count int) *transfer.Pool {
	t.Helper()
	p, refused, err := transfer.NewPool("test", of, size, count)
	if err != nil || refused != nil {
		t.Fatal(err, refused)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// No buffer has two users, whoever takes, waits, gives up, and gives back.
func TestPoolLendsOnce(t *testing.T) {
	const size, count, users = 4096, 3, 12
	d := newDevice(t, transfertest.DeviceOptions{})
	of, _ := arenas(t, d, 2, 4096)
	p := newPool(t, of, size, count)
	if c := d.Counts(); c.Pinned < 2*size*count {
		t.Errorf("%d bytes are pinned, want all of the pool, for each arena", c.Pinned)
	}
	var work sync.WaitGroup
	for user := range users {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(user), 1))
			mine := bytes.Repeat([]byte{byte(user + 1)}, size)
			for range 300 {
				b, ok := p.TryGet()
				if !ok {
					ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rng.IntN(300))*time.Microsecond)
					var err error
					b, err = p.Get(ctx)
					cancel()
					if err != nil {
						if !errors.Is(err, context.DeadlineExceeded) {
							t.Errorf("Get = %v", err)
						}
						continue
					}
				}
				if len(b) != size || cap(b) != size || p.Offset(b)%size != 0 || p.Offset(b) >= size*count {
					t.Errorf("a buffer of %d bytes, of %d at most, at %d", len(b), cap(b), p.Offset(b))
				}
				copy(b, mine)
				if rng.IntN(4) == 0 {
					runtime.Gosched()
				}
				if !bytes.Equal(b, mine) {
					t.Error("a buffer has two users")
				}
				p.Put(b[:rng.IntN(size)])
			}
		})
	}
	work.Wait()
	if n := p.Lent(); n != 0 {
		t.Errorf("%d buffers are in use", n)
	}
}

// Who waits longest is served first.
func TestPoolIsFair(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := newPool(t, nil, 64, 1)
		held, err := p.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		const waiters = 5
		order := make(chan int, waiters)
		for i := range waiters {
			go func() {
				b, err := p.Get(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				order <- i
				p.Put(b)
			}()
			synctest.Wait() // until it waits
		}
		p.Put(held)
		for i := range waiters {
			if got := <-order; got != i {
				t.Errorf("waiter %d was served as number %d", got, i)
			}
		}
	})
}

func TestPoolIsCrowded(t *testing.T) {
	p := newPool(t, nil, 64, 4)
	for lent := range 4 {
		if got, want := p.Crowded(), lent == 3; got != want {
			t.Errorf("%d of 4 buffers are lent: crowded %v", lent, got)
		}
		b, ok := p.TryGet()
		if !ok {
			t.Fatal("no buffer")
		}
		defer p.Put(b)
	}
}

func TestPoolRefusesToClose(t *testing.T) {
	d := newDevice(t, transfertest.DeviceOptions{})
	of, _ := arenas(t, d, 1, 4096)
	p, refused, err := transfer.NewPool("test", of, 4096, 2)
	if err != nil || refused != nil {
		t.Fatal(err, refused)
	}
	b, _ := p.TryGet()
	if err := p.Close(); err == nil || d.Counts().Pinned == 0 {
		t.Errorf("Close of a pool that is in use: %v, and %d bytes are pinned", err, d.Counts().Pinned)
	}
	p.Put(b)
	if err := p.Close(); err != nil || d.Counts().Pinned != 0 {
		t.Errorf("Close: %v, and %d bytes are pinned", err, d.Counts().Pinned)
	}
}

// A device that cannot pin is a reason, and no failure.
func TestPoolUnpinned(t *testing.T) {
	limit := errors.New("memory lock limit")
	d := newDevice(t, transfertest.DeviceOptions{Pin: limit})
	of, _ := arenas(t, d, 1, 4096)
	p, refused, err := transfer.NewPool("test", of, 4096, 2)
	if err != nil || !errors.Is(refused, limit) {
		t.Fatalf("NewPool = %v, %v, want the reason of the device", refused, err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

func TestStaged(t *testing.T) {
	d := newDevice(t, transfertest.DeviceOptions{})
	all, _ := arenas(t, d, 3, 4096)
	if !transfer.Staged(all) || transfer.Staged(nil) || transfer.Staged(map[id.Rank]memory.Arena{2: all[2]}) {
		t.Error("Staged does not tell host memory from a device's")
	}
	if _, ok := transfer.InHost(all[0]); ok {
		t.Error("memory of a device is given as host memory")
	}
	if b, ok := transfer.InHost(all[2]); !ok || len(b) < 4096 {
		t.Error("host memory is not given")
	}
}
