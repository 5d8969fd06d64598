//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/rdma"
)

// Whatever the sizes of the queue and however it waits: every page is right,
// and no byte beside them is written.
func TestScatteredReads(t *testing.T) {
	p := newPair(t, 32<<20)
	pages := p.scatter(2000, 8, 16<<10)
	for name, o := range map[string]struct {
		qp   rdma.QPOptions
		read rdma.ReadOptions
	}{
		"events":               {qp: rdma.QPOptions{Events: true}},
		"events after a spin":  {qp: rdma.QPOptions{Events: true}, read: rdma.ReadOptions{Spin: 50 * time.Microsecond}},
		"polled":               {},
		"a queue of one":       {qp: rdma.QPOptions{Events: true, Depth: 1}},
		"a queue of eight":     {qp: rdma.QPOptions{Events: true, Depth: 8}},
		"every one signals":    {qp: rdma.QPOptions{Events: true, SignalEvery: 1, SGE: 4}},
		"cut into small reads": {qp: rdma.QPOptions{Events: true, MaxMsg: 4096}},
	} {
		t.Run(name, func(t *testing.T) {
			q, _ := p.connect(t, o.qp)
			p.wipe()
			o.read.Stall = patient.Stall
			begin := time.Now()
			st, err := q.Read(t.Context(), p.ops(pages), o.read)
			if err != nil {
				t.Fatalf("%v, %+v", err, st)
			}
			t.Logf("%v, %+v", time.Since(begin).Round(time.Millisecond), st)
			if st.Done != len(pages) {
				t.Errorf("%d done, want %d", st.Done, len(pages))
			}
			p.verify(t, pages)
		})
	}
}

// Neighbours are merged as far as they are neighbours on the owner's side, up
// to what a request may be, in as many pieces as a request may have.
func TestNeighboursAreMerged(t *testing.T) {
	p := newPair(t, 4<<20)
	for name, tt := range map[string]struct {
		qp     rdma.QPOptions
		single bool
		at     func(i int) (local, remote int)
		wrs    int
	}{
		"on both sides":            {rdma.QPOptions{}, false, func(i int) (int, int) { return 8192 + i*4096, 4096 + i*4096 }, 1},
		"no longer than a message": {rdma.QPOptions{MaxMsg: 16384}, false, func(i int) (int, int) { return i * 4096, i * 4096 }, 16},
		"not if they are not to":   {rdma.QPOptions{}, true, func(i int) (int, int) { return i * 4096, i * 4096 }, 64},
		"pairs here, four pieces":  {rdma.QPOptions{SGE: 4}, false, func(i int) (int, int) { return i/2*40960 + i%2*4096, i * 4096 }, 8},
		"pairs here, one piece":    {rdma.QPOptions{}, false, func(i int) (int, int) { return i/2*40960 + i%2*4096, i * 4096 }, 32},
		"not on the owner's side":  {rdma.QPOptions{SGE: 4}, false, func(i int) (int, int) { return i * 4096, i * 8192 }, 64},
		"backwards":                {rdma.QPOptions{SGE: 4}, false, func(i int) (int, int) { return i * 4096, (63 - i) * 4096 }, 64},
	} {
		t.Run(name, func(t *testing.T) {
			tt.qp.Events = true
			q, _ := p.connect(t, tt.qp)
			pages := make([]page, 64)
			for i := range pages {
				pages[i].local, pages[i].remote = tt.at(i)
				pages[i].bytes = 4096
			}
			p.wipe()
			st, err := q.Read(t.Context(), p.ops(pages), rdma.ReadOptions{Single: tt.single, Stall: patient.Stall})
			if err != nil || st.WRs != tt.wrs {
				t.Errorf("%v, %+v; want %d requests", err, st, tt.wrs)
			}
			p.verify(t, pages)
		})
	}
}

// An op that is longer than a message is cut.
func TestLongOpsAreCut(t *testing.T) {
	p := newPair(t, 8<<20)
	q, _ := p.connect(t, rdma.QPOptions{Events: true, MaxMsg: 65536})
	pages := []page{{local: 64, remote: 8, bytes: 3<<20 + 8}, {local: 4 << 20, remote: 4 << 20, bytes: 65536}, {local: 5 << 20, remote: 0, bytes: 65536 + 8}}
	p.wipe()
	st, err := q.Read(t.Context(), p.ops(pages), patient)
	if err != nil || st.WRs != 49+1+2 || st.Done != 3 {
		t.Errorf("%v, %+v; want 52 requests", err, st)
	}
	p.verify(t, pages)
}

// At most one crossing into C for 16 scattered ops, waiting included.
func TestCrossings(t *testing.T) {
	p := newPair(t, 32<<20)
	size := 4 << 10
	if p.fabric.real() {
		size = 64 // of 100,000 ops, an emulated machine moves no more
	}
	for _, single := range []bool{false, true} {
		q, _ := p.connect(t, rdma.QPOptions{Events: true})
		for _, n := range []int{1, 16, 2000, 100_000} {
			pages := make([]page, n)
			for i := range pages { // neighbours at times
				at := (i * 7 / 2) % (len(p.reader.mem) / size / 2) * 2
				pages[i] = page{local: at * size, remote: (at + i%2) * size, bytes: size}
			}
			begin := time.Now()
			st, err := q.Read(t.Context(), p.ops(pages), rdma.ReadOptions{Single: single, Stall: patient.Stall})
			if err != nil {
				t.Fatalf("%d ops: %v", n, err)
			}
			t.Logf("%d ops in %v: %+v", n, time.Since(begin).Round(time.Microsecond), st)
			if most := n/16 + 4; st.Calls > most {
				t.Errorf("%d crossings for %d ops, want at most %d", st.Calls, n, most)
			}
			if st.Done != n || (single && st.WRs != n) {
				t.Errorf("%d ops: %+v", n, st)
			}
		}
	}
}

// What a request does wrong is said with its status and its op, soon, and all
// before it has landed.
func TestWrongRequests(t *testing.T) {
	p := newPair(t, 4<<20)
	closed, err := p.owner.pd.Register(p.owner.mem, rdma.RemoteRead)
	if err != nil {
		t.Fatal(err)
	}
	revoked := closed.Keys()[0].R
	if err := closed.Close(); err != nil {
		t.Fatal(err)
	}
	private, err := p.owner.pd.Register(p.owner.mem, rdma.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	closeAtEnd(t, "region", private.Close)
	const bad = 40
	remote := []rdma.Status{rdma.StatusRemAccessErr}
	local := []rdma.Status{rdma.StatusLocProtErr}
	for name, tt := range map[string]struct {
		spoil func(*rdma.Op)
		want  []rdma.Status
	}{
		"a wrong rkey":                    {func(o *rdma.Op) { o.RKey ^= 0x5a5a00 }, remote},
		"a revoked rkey":                  {func(o *rdma.Op) { o.RKey = revoked }, remote},
		"a region without remote read":    {func(o *rdma.Op) { o.RKey = private.Keys()[0].R }, remote},
		"beyond the owner's region":       {func(o *rdma.Op) { o.Remote = p.owner.region.Addr() + p.owner.region.Len() - 8 }, remote},
		"below the owner's region":        {func(o *rdma.Op) { o.Remote = p.owner.region.Addr() - 8 }, remote},
		"beyond the end of all addresses": {func(o *rdma.Op) { o.Remote = ^uint64(7) }, remote},
		"a wrong lkey":                    {func(o *rdma.Op) { o.LKey ^= 0x5a5a00 }, local},
		"beyond our region":               {func(o *rdma.Op) { o.Local = p.reader.region.Addr() + p.reader.region.Len() - 8 }, local},
	} {
		t.Run(name, func(t *testing.T) {
			q, _ := p.connect(t, rdma.QPOptions{Events: true})
			pages := p.scatter(80, 4096, 8192)
			ops := p.ops(pages)
			tt.spoil(&ops[bad])
			p.wipe()
			begin := time.Now()
			st, err := q.Read(t.Context(), ops, patient)
			took := time.Since(begin)
			t.Logf("%v: %v, %+v", took.Round(time.Millisecond), err, st)
			if e := status(t, err, tt.want...); e.Op != bad || st.Done != bad {
				t.Errorf("op %d, %d done; want %d", e.Op, st.Done, bad)
			}
			if took > 15*time.Second {
				t.Errorf("took %v", took)
			}
			p.landed(t, pages, st.Done)
			if s, err := q.State(); err != nil || s != rdma.StateErr {
				t.Errorf("state %v, %v", s, err)
			}
			if _, err := q.Read(t.Context(), p.ops(pages), patient); !errors.Is(err, rdma.ErrFailed) {
				t.Errorf("again: %v", err)
			}
		})
	}
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	pages := p.scatter(80, 4096, 8192)
	p.wipe()
	if _, err := q.Read(t.Context(), p.ops(pages), patient); err != nil {
		t.Errorf("on another queue pair: %v", err)
	}
	p.verify(t, pages)
}

// landed checks that the first so many pages are right.
func (p *pair) landed(tb testing.TB, pages []page, done int) {
	tb.Helper()
	for i, g := range pages[:done] {
		if !bytes.Equal(p.reader.mem[g.local:g.local+g.bytes], p.owner.mem[g.remote:g.remote+g.bytes]) {
			tb.Fatalf("page %d of %d that are done is wrong", i, done)
		}
	}
}

// What no device would carry out is refused before anything is posted.
func TestOpsAreChecked(t *testing.T) {
	p := newPair(t, 1<<20)
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	pages := p.scatter(3, 4096, 4096)
	ops := p.ops(pages)
	ops[2].Len = 0
	if st, err := q.Read(t.Context(), ops, patient); err == nil || st != (rdma.Stats{}) {
		t.Errorf("an op without length: %v, %+v", err, st)
	}
	if st, err := q.Read(t.Context(), nil, patient); err != nil || st != (rdma.Stats{}) {
		t.Errorf("no ops: %v, %+v", err, st)
	}
	p.wipe()
	if _, err := q.Read(t.Context(), p.ops(pages), patient); err != nil {
		t.Error(err)
	}
	p.verify(t, pages)
}

// A read that was cancelled at any time has left alone, when it returns, all
// that it had not read: nothing lands afterwards, and what it says has landed
// has.
func TestNothingLandsAfterCancel(t *testing.T) {
	p := newPair(t, 8<<20)
	pages := p.scatter(400, 8<<10, 16<<10)
	whole := 300 * time.Millisecond // of the batch, about
	if !p.fabric.real() {
		whole = 3 * time.Millisecond
	}
	r := rand.New(rand.NewPCG(7, 7))
	trials, early := 12, 0
	if !p.fabric.real() {
		trials = 50
	}
	for range trials {
		q, _ := p.connect(t, rdma.QPOptions{Events: r.IntN(3) > 0})
		p.wipe()
		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Duration(r.Int64N(int64(whole))), cause)
		st, err := q.Read(ctx, p.ops(pages), patient)
		after := bytes.Clone(p.reader.mem)
		cancel()
		switch {
		case err == nil:
			p.verify(t, pages)
			continue
		case !errors.Is(err, cause):
			t.Fatalf("error %v", err)
		case errors.Is(err, rdma.ErrDrain):
			t.Fatalf("not drained: %v", err)
		}
		early++
		p.landed(t, pages, st.Done)
		if p.fabric.real() {
			time.Sleep(20 * time.Millisecond) // what would land late
		}
		if !bytes.Equal(after, p.reader.mem) {
			t.Fatal("something landed after the read had returned")
		}
	}
	if early == 0 {
		t.Error("no read was cancelled before it had ended")
	}
}

// A peer that does not answer ends a read by the stall time, long before the
// device gives up, whichever way it is waited for.
func TestStall(t *testing.T) {
	p := newPair(t, 1<<20)
	for name, o := range map[string]rdma.QPOptions{"events": {Events: true}, "polled": {}} {
		t.Run(name, func(t *testing.T) {
			q, silent := newQP(t, p.reader.pd, o), newQP(t, p.owner.pd, rdma.QPOptions{})
			path := p.reader.path(p.owner, silent.Num())
			path.Timeout = 20 // 4 s
			if err := q.Connect(path); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			st, err := q.Read(t.Context(), p.ops(p.scatter(8, 4096, 4096)), rdma.ReadOptions{Stall: 200 * time.Millisecond})
			if took := time.Since(begin); !errors.Is(err, rdma.ErrStalled) || errors.Is(err, rdma.ErrDrain) || took < 200*time.Millisecond || took > 15*time.Second {
				t.Errorf("after %v: %v, %+v", took, err, st)
			}
			if st.Done != 0 {
				t.Errorf("%d done", st.Done)
			}
		})
	}
}

// The device's own retries end it too.
func TestSilentPeer(t *testing.T) {
	p := newPair(t, 1<<20)
	q, silent := newQP(t, p.reader.pd, rdma.QPOptions{Events: true}), newQP(t, p.owner.pd, rdma.QPOptions{})
	path := p.reader.path(p.owner, silent.Num())
	path.Timeout, path.RetryCount = 14, 1
	if err := q.Connect(path); err != nil {
		t.Fatal(err)
	}
	st, err := q.Read(t.Context(), p.ops(p.scatter(8, 4096, 4096)), patient)
	if e := status(t, err, rdma.StatusRetryExcErr); e.Op != 0 || st.Done != 0 {
		t.Errorf("%v, %+v", err, st)
	}
}

// Fail ends a read from outside, and what comes after it.
func TestFail(t *testing.T) {
	p := newPair(t, 1<<20)
	for name, o := range map[string]rdma.QPOptions{"events": {Events: true}, "polled": {}} {
		t.Run(name, func(t *testing.T) {
			q, silent := newQP(t, p.reader.pd, o), newQP(t, p.owner.pd, rdma.QPOptions{})
			path := p.reader.path(p.owner, silent.Num())
			path.Timeout = 20
			if err := q.Connect(path); err != nil {
				t.Fatal(err)
			}
			ops := p.ops(p.scatter(8, 4096, 4096))
			read := make(chan error, 2)
			for range 2 { // one of them waits for its turn
				go func() { _, err := q.Read(t.Context(), ops, patient); read <- err }()
			}
			time.Sleep(10 * time.Millisecond) // so that one may have begun; right if none has
			for range 3 {
				if err := q.Fail(); err != nil {
					t.Error(err)
				}
			}
			for range 2 {
				if err := <-read; !errors.Is(err, rdma.ErrFailed) || errors.Is(err, rdma.ErrDrain) {
					t.Errorf("error %v", err)
				}
			}
			if s, err := q.State(); err != nil || s != rdma.StateErr {
				t.Errorf("state %v, %v", s, err)
			}
		})
	}
	t.Run("before it is connected", func(t *testing.T) {
		q, other := newQP(t, p.reader.pd, rdma.QPOptions{}), newQP(t, p.owner.pd, rdma.QPOptions{})
		if err := q.Fail(); err != nil {
			t.Error(err)
		}
		if err := q.Connect(p.reader.path(p.owner, other.Num())); !errors.Is(err, rdma.ErrFailed) {
			t.Errorf("error %v", err)
		}
		if s, err := q.State(); err != nil || s != rdma.StateErr {
			t.Errorf("state %v, %v", s, err)
		}
	})
}

// Cancel, Fail, State and Close at once, in any order, leave nothing behind and
// nobody waiting.
func TestEverythingAtOnce(t *testing.T) {
	p := newPair(t, 1<<20)
	pages := p.scatter(40, 4096, 16384)
	trials := 20
	if !p.fabric.real() {
		trials = 200
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range trials {
		q, _ := p.connect(t, rdma.QPOptions{Events: r.IntN(2) == 0})
		ctx, cancel := context.WithCancel(t.Context())
		var all sync.WaitGroup
		for _, f := range []func(){
			func() {
				_, err := q.Read(ctx, p.ops(pages), patient)
				if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, rdma.ErrFailed) && !errors.Is(err, os.ErrClosed) {
					t.Error(err)
				}
				if errors.Is(err, rdma.ErrDrain) {
					t.Error(err)
				}
			},
			cancel,
			func() { q.Fail() },
			func() { q.State() },
			func() {
				if err := q.Close(); err != nil {
					t.Error(err)
				}
			},
		} {
			wait := time.Duration(r.IntN(3000)) * time.Microsecond
			all.Go(func() { time.Sleep(wait); f() })
		}
		all.Wait()
		if err := q.Close(); err != nil {
			t.Errorf("closed twice: %v", err)
		}
	}
}

// A context that ends as a read does, or after it, does not end the next.
func TestLateCancelIsHarmless(t *testing.T) {
	p := newPair(t, 1<<20)
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	ops := p.ops(p.scatter(1, 64, 64))
	for i := range 200 {
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		if _, err := q.Read(ctx, ops, patient); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			q, _ = p.connect(t, rdma.QPOptions{Events: true})
		}
		if _, err := q.Read(t.Context(), ops, patient); err != nil && !errors.Is(err, rdma.ErrFailed) {
			t.Fatalf("read %d after one that was cancelled: %v", i, err)
		}
	}
}
