//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// These tests need faults that no device makes on demand.

func newFaultyPair(tb testing.TB, size int, devices ...rdmatest.DeviceSpec) *pair {
	tb.Helper()
	if len(rdmatest.Hardware()) > 0 {
		rdmatest.Use(tb) // skips
	}
	return newPair(tb, size, devices...)
}

// live is what there is of every kind.
func live(w *rdmatest.World) [6]int {
	c := w.Counts()
	return [6]int{c.Contexts, c.PDs, c.Regions, c.CQs, c.QPs, c.Channels}
}

// Whichever verb has no memory, what was made before it is given back, and the
// error says which it was.
func TestCreationRollsBack(t *testing.T) {
	p := newFaultyPair(t, 1<<20)
	w := p.fabric.world
	register := func() (func() error, error) {
		r, err := p.owner.pd.Register(p.owner.mem, rdma.RemoteRead)
		return r.Close, err
	}
	queue := func() (func() error, error) {
		q, err := p.owner.pd.NewQP(rdma.QPOptions{Events: true})
		return q.Close, err
	}
	for verb, tt := range map[string]struct {
		faults rdmatest.Faults
		create func() (func() error, error)
	}{
		"allocate protection domain":       {rdmatest.Faults{PDENOMEM: 1}, func() (func() error, error) { pd, err := p.owner.dev.NewPD(); return pd.Close, err }},
		"register 1048576 bytes of memory": {rdmatest.Faults{RegionENOMEM: 1}, register},
		"create completion channel":        {rdmatest.Faults{ChannelENOMEM: 1}, queue},
		"create completion queue":          {rdmatest.Faults{CQENOMEM: 1}, queue},
		"create queue pair":                {rdmatest.Faults{QPENOMEM: 1}, queue},
	} {
		t.Run(verb, func(t *testing.T) {
			before, files := live(w), openFiles(t)
			w.Set(tt.faults)
			_, err := tt.create()
			if e, ok := errors.AsType[*rdma.OpError](err); !ok || !errors.Is(err, syscall.ENOMEM) || e.Verb != verb || e.Device != "double0" {
				t.Errorf("error %v", err)
			}
			if after := live(w); after != before || openFiles(t) != files {
				t.Errorf("left %v, before %v; %d files, before %d", after, before, openFiles(t), files)
			}
			close, err := tt.create() // the next one is let pass
			if err != nil {
				t.Fatal(err)
			}
			if err := close(); err != nil {
				t.Error(err)
			}
			if after := live(w); after != before {
				t.Errorf("left %v after closing, before %v", after, before)
			}
		})
	}
}

// A device that takes little at once has a region in slices, each with its
// keys; all of them are there, or none.
func TestRegionsAreSliced(t *testing.T) {
	const slice = 1 << 20
	small := rdmatest.DeviceSpec{Name: "double0", MaxMRSize: slice + 100}
	p := newFaultyPair(t, 5*slice+4096, small, rdmatest.DeviceSpec{Name: "double1"})
	r := p.owner.region
	if len(r.Keys()) != 6 || r.SliceBytes() != slice || r.Len() != 5*slice+4096 {
		t.Fatalf("%d bytes, slices of %d, keys %v", r.Len(), r.SliceBytes(), r.Keys())
	}
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	pages := p.scatter(1, 8, 8)
	pages = pages[:0]
	for i := range 6 {
		pages = append(pages, page{local: i * slice, remote: i * slice, bytes: min(slice, len(p.owner.mem)-i*slice)})
	}
	ops := p.ops(pages)
	for i := range ops {
		ops[i].RKey = r.Keys()[i].R
	}
	p.wipe()
	if _, err := q.Read(t.Context(), ops, patient); err != nil {
		t.Fatal(err)
	}
	p.verify(t, pages)

	before := live(p.fabric.world)
	for nth := 1; nth <= 6; nth++ {
		p.fabric.world.Set(rdmatest.Faults{RegionENOMEM: nth})
		_, err := p.owner.pd.Register(p.owner.mem, rdma.RemoteRead)
		if want := "slice " + string(rune('0'+nth)) + " of 6"; !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want one of %s", err, want)
		}
		if after := live(p.fabric.world); after != before {
			t.Errorf("slice %d failed: left %v, before %v", nth, after, before)
		}
	}
}

// A full provider is waited for, if something is outstanding that will make
// room; all is right in the end.
func TestProviderWithoutRoom(t *testing.T) {
	p := newFaultyPair(t, 32<<20)
	pages := p.scatter(2000, 8, 8<<10)
	for _, o := range []rdma.QPOptions{{Events: true}, {}, {Events: true, Depth: 8}, {Events: true, Depth: 1}} {
		for _, perMille := range []int{1, 50, 500} {
			q, _ := p.connect(t, o)
			p.fabric.world.Set(rdmatest.Faults{PostENOMEM: perMille, Seed: uint64(perMille)})
			p.wipe()
			st, err := q.Read(t.Context(), p.ops(pages), patient)
			if o.Depth == 1 && errors.Is(err, syscall.ENOMEM) {
				continue // nothing was outstanding
			}
			if err != nil {
				// Only when all that had been posted was done.
				if !errors.Is(err, syscall.ENOMEM) || st.Done != st.WRs {
					t.Fatalf("%+v, %d: %v, %+v", o, perMille, err, st)
				}
				p.landed(t, pages, st.Done)
				continue
			}
			p.verify(t, pages)
			p.fabric.world.Clear()
		}
	}
}

// One without any room, and nothing outstanding, is an error at once.
func TestProviderWithoutAnyRoom(t *testing.T) {
	p := newFaultyPair(t, 1<<20)
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	p.fabric.world.Set(rdmatest.Faults{PostENOMEM: 1000})
	begin := time.Now()
	st, err := q.Read(t.Context(), p.ops(p.scatter(8, 4096, 4096)), patient)
	if !errors.Is(err, syscall.ENOMEM) || st.Done != 0 || time.Since(begin) > 15*time.Second {
		t.Errorf("after %v: %v, %+v", time.Since(begin), err, st)
	}
}

// A chain that was taken in part is drained all the same: by the marker, not
// by counting, since what was taken may end without a completion.
func TestDrainAfterPartOfAChain(t *testing.T) {
	p := newFaultyPair(t, 8<<20)
	pages := p.scatter(200, 4096, 8192)
	for seed := range uint64(50) {
		q, _ := p.connect(t, rdma.QPOptions{Events: seed%2 == 0, Depth: 255, SignalEvery: 63})
		p.fabric.world.Set(rdmatest.Faults{PostENOMEM: 20, Seed: seed, Delay: time.Millisecond})
		p.wipe()
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(seed)*100*time.Microsecond)
		st, err := q.Read(ctx, p.ops(pages), patient)
		after := bytes.Clone(p.reader.mem)
		cancel()
		p.fabric.world.Clear()
		if errors.Is(err, rdma.ErrDrain) && !errors.Is(err, syscall.ENOMEM) {
			t.Fatal(err)
		}
		p.landed(t, pages, st.Done)
		if err := q.Close(); err != nil {
			t.Error(err)
		}
		if !bytes.Equal(after, p.reader.mem) {
			t.Fatal("something landed after the read had returned")
		}
	}
}

// What is still under way lands late, but before Read returns.
func TestLateDMALandsBeforeReadReturns(t *testing.T) {
	p := newFaultyPair(t, 4<<20)
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	const late = 300 * time.Millisecond
	p.fabric.world.Set(rdmatest.Faults{Delay: time.Minute, LateDMA: late})
	p.wipe()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var begin time.Time // of the draining
	var all sync.WaitGroup
	all.Go(func() {
		eventually(t, "reads under way", func() bool { return p.fabric.world.Counts().WRs > 0 })
		begin = time.Now()
		cancel()
	})
	st, err := q.Read(ctx, p.ops(p.scatter(64, 4096, 8192)), patient)
	after := bytes.Clone(p.reader.mem)
	all.Wait()
	if !errors.Is(err, context.Canceled) || errors.Is(err, rdma.ErrDrain) || time.Since(begin) < late {
		t.Errorf("after %v: %v, %+v", time.Since(begin), err, st)
	}
	time.Sleep(late)
	if !bytes.Equal(after, p.reader.mem) {
		t.Error("something landed after the read had returned")
	}
}

// A device that gives nothing back is said to, and destroying the queue pair
// ends it.
func TestDrainThatDoesNotEnd(t *testing.T) {
	p := newFaultyPair(t, 4<<20)
	for _, o := range []rdma.QPOptions{{Events: true}, {}} {
		q, _ := p.connect(t, o)
		p.fabric.world.Set(rdmatest.Faults{Stuck: true, NoFlush: true})
		begin := time.Now()
		st, err := q.Read(t.Context(), p.ops(p.scatter(64, 4096, 8192)), rdma.ReadOptions{Stall: 50 * time.Millisecond})
		if took := time.Since(begin); !errors.Is(err, rdma.ErrDrain) || !errors.Is(err, rdma.ErrStalled) || took > 15*time.Second {
			t.Errorf("after %v: %v, %+v", took, err, st)
		}
		if _, err := q.Read(t.Context(), p.ops(p.scatter(1, 8, 8)), patient); !errors.Is(err, rdma.ErrFailed) {
			t.Errorf("again: %v", err)
		}
		if err := q.Close(); err != nil {
			t.Fatal(err)
		}
		after := bytes.Clone(p.reader.mem)
		p.fabric.world.Clear()
		time.Sleep(10 * time.Millisecond)
		if !bytes.Equal(after, p.reader.mem) {
			t.Error("something landed after the queue pair was destroyed")
		}
	}
}

// The stall time runs from the last completion, not from the beginning.
func TestStallRunsFromTheLastCompletion(t *testing.T) {
	p := newFaultyPair(t, 1<<20)
	const gap, stall = 250 * time.Millisecond, 2500 * time.Millisecond
	pages := p.scatter(int(stall/gap)+2, 4096, 4096)
	p.fabric.world.Set(rdmatest.Faults{Delay: gap})
	p.wipe()
	var both sync.WaitGroup
	for _, o := range []rdma.QPOptions{{Events: true, Depth: 1}, {Depth: 1}} {
		q, _ := p.connect(t, o)
		both.Go(func() {
			if st, err := q.Read(t.Context(), p.ops(pages), rdma.ReadOptions{Stall: stall}); err != nil {
				t.Errorf("%v, %+v", err, st)
			}
		})
	}
	both.Wait()
	p.verify(t, pages)
}

// What fails in the middle is named, and what was before it has landed,
// whatever way the device took.
func TestFaultsInTheMiddle(t *testing.T) {
	p := newFaultyPair(t, 8<<20)
	pages := p.scatter(300, 4096, 8192)
	const nth = 123
	for name, tt := range map[string]struct {
		faults rdmatest.Faults
		want   rdma.Status
	}{
		"a request that fails":        {rdmatest.Faults{FailNth: nth + 1}, rdma.StatusRemOpErr},
		"out of order, one fails":     {rdmatest.Faults{FailNth: nth + 1, Reorder: true, Jitter: 100 * time.Microsecond}, rdma.StatusRemOpErr},
		"a status of its own":         {rdmatest.Faults{FailNth: nth + 1, FailStatus: 21}, 21},
		"the device flushes it alone": {rdmatest.Faults{FailNth: nth + 1, FailStatus: int(rdma.StatusWRFlushErr)}, rdma.StatusWRFlushErr},
	} {
		t.Run(name, func(t *testing.T) {
			for _, o := range []rdma.QPOptions{{Events: true}, {}} {
				q, _ := p.connect(t, o)
				p.fabric.world.Set(tt.faults)
				p.wipe()
				st, err := q.Read(t.Context(), p.ops(pages), rdma.ReadOptions{Single: true, Stall: patient.Stall})
				p.fabric.world.Clear()
				if e := status(t, err, tt.want); e.Op != nth || st.Done != nth {
					t.Errorf("op %d, %d done; want %d: %v", e.Op, st.Done, nth, err)
				}
				p.landed(t, pages, st.Done)
			}
		})
	}
	t.Run("out of order", func(t *testing.T) {
		q, _ := p.connect(t, rdma.QPOptions{Events: true})
		p.fabric.world.Set(rdmatest.Faults{Reorder: true, Jitter: 200 * time.Microsecond})
		p.wipe()
		if _, err := q.Read(t.Context(), p.ops(pages), patient); err != nil {
			t.Error(err)
		}
		p.verify(t, pages)
		p.fabric.world.Clear()
	})
	for name, do := range map[string]func(reader, owner *rdma.QP) error{
		"the owner's queue pair is reset":   func(_, owner *rdma.QP) error { return p.fabric.world.ResetQP(owner.Num()) },
		"the owner fails its queue pair":    func(_, owner *rdma.QP) error { return owner.Fail() },
		"the owner closes its queue pair":   func(_, owner *rdma.QP) error { return owner.Close() },
		"the reader's device has failed it": func(reader, _ *rdma.QP) error { return p.fabric.world.FailQP(reader.Num()) },
		"nothing is answered any more": func(_, _ *rdma.QP) error {
			p.fabric.world.Set(rdmatest.Faults{Lose: 1000, RetryWindow: 50 * time.Millisecond})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			reader, owner := p.connect(t, rdma.QPOptions{Events: true})
			p.fabric.world.Set(rdmatest.Faults{Delay: 400 * time.Millisecond, RetryWindow: 50 * time.Millisecond}) // 8 s in all
			p.wipe()
			ended := make(chan error, 1)
			var st rdma.Stats
			begin, before := time.Now(), p.fabric.world.Counts().WRs
			go func() {
				var err error
				st, err = reader.Read(t.Context(), p.ops(pages), patient)
				ended <- err
			}()
			eventually(t, "reads under way", func() bool { return p.fabric.world.Counts().WRs > before })
			if err := do(reader, owner); err != nil {
				t.Error(err)
			}
			err := <-ended
			e := status(t, err, rdma.StatusRetryExcErr, rdma.StatusWRFlushErr)
			if e.Op < st.Done || time.Since(begin) > 15*time.Second {
				t.Errorf("after %v: %v, %+v", time.Since(begin), err, st)
			}
			p.fabric.world.Clear()
			p.landed(t, pages, st.Done)
		})
	}
	t.Run("the owner's region is deregistered", func(t *testing.T) {
		r, err := p.owner.pd.Register(p.owner.mem, rdma.RemoteRead)
		if err != nil {
			t.Fatal(err)
		}
		q, _ := p.connect(t, rdma.QPOptions{Events: true})
		ops := p.ops(pages)
		for i := range ops {
			ops[i].RKey = r.Keys()[0].R
		}
		p.fabric.world.Set(rdmatest.Faults{Delay: 400 * time.Millisecond})
		defer p.fabric.world.Clear()
		ended := make(chan error, 1)
		go func() { _, err := q.Read(t.Context(), ops, patient); ended <- err }()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
		status(t, <-ended, rdma.StatusRemAccessErr)
	})
}

// A queue pair that the device has failed is heard of, and can be destroyed
// while that is watched.
func TestFailedQueuePairIsHeardOf(t *testing.T) {
	p := newFaultyPair(t, 1<<20)
	ctx, cancel := context.WithCancel(t.Context())
	events, ended := make(chan rdma.Event, 64), make(chan error, 1)
	go func() { ended <- p.owner.dev.Watch(ctx, func(e rdma.Event) { events <- e }) }()
	for range 20 {
		_, owner := p.connect(t, rdma.QPOptions{})
		if err := p.fabric.world.FailQP(owner.Num()); err != nil {
			t.Fatal(err)
		}
		if e := <-events; e.Kind != rdma.QPFatal || e.Element != owner.Num() {
			t.Errorf("event %+v of queue pair %d", e, owner.Num())
		}
		if err := owner.Close(); err != nil {
			t.Error(err)
		}
	}
	// Many at once are all told: the poller speaks once.
	for range 10 {
		if err := errors.Join(p.fabric.world.Event("double0", rdmatest.PortError), p.fabric.world.Event("double0", rdmatest.PortActive)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 20 {
		want := []rdma.EventKind{rdma.PortError, rdma.PortActive}[i%2]
		if e := <-events; e.Kind != want || e.Element != 1 {
			t.Errorf("event %d: %+v", i, e)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
}

// What a limit of locked memory refuses says so, of regions and of queues.
func TestMemlockIsNamed(t *testing.T) {
	p := newFaultyPair(t, 1<<20)
	before := live(p.fabric.world)
	p.fabric.world.Set(rdmatest.Faults{Memlock: 1 << 20})
	if _, err := p.owner.pd.Register(p.owner.mem, rdma.RemoteRead); !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "register 1048576 bytes of memory on double0") {
		t.Errorf("error %v", err)
	}
	if _, err := p.owner.pd.NewQP(rdma.QPOptions{}); !errors.Is(err, syscall.ENOMEM) || !strings.Contains(err.Error(), "create completion queue on double0") {
		t.Errorf("error %v", err)
	}
	if after := live(p.fabric.world); after != before {
		t.Errorf("left %v, before %v", after, before)
	}
}

// A device that fails as a whole ends what runs on it, and can be closed.
func TestDeviceThatFails(t *testing.T) {
	p := newFaultyPair(t, 4<<20)
	q, _ := p.connect(t, rdma.QPOptions{Events: true})
	p.fabric.world.Set(rdmatest.Faults{Delay: time.Minute})
	ended := make(chan error, 1)
	go func() { _, err := q.Read(t.Context(), p.ops(p.scatter(64, 4096, 8192)), patient); ended <- err }()
	eventually(t, "reads", func() bool { return p.fabric.world.Counts().WRs > 0 })
	if err := p.fabric.world.Event("double1", rdmatest.DeviceFatal); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-ended:
		t.Log(err)
		if err == nil {
			t.Error("all was read")
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the read did not end")
	}
}
