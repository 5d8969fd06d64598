//go:build linux && cgo && rdma && (amd64 || arm64)

package rdmatest_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

const window = 30 * time.Millisecond

// Ten reads well, one that is bad, ten behind it: the tenth and all before it
// have landed, nothing behind it does.
func TestBadReads(t *testing.T) {
	for name, tt := range map[string]struct {
		owner   rdma.Access // of the owner's memory; default RemoteRead
		reader  rdma.Access // default LocalWrite
		path    rdma.Access // what the owner's queue pair permits; default RemoteRead
		spoil   func(t *testing.T, w *rdmatest.World, p *pair, op *rdma.Op)
		want    rdma.Status
		done    int
		refused bool // by the owner, whose queue pair then is broken too
	}{
		"wrong key": {want: rdma.StatusRemAccessErr, done: 10, refused: true, spoil: func(_ *testing.T, _ *rdmatest.World, _ *pair, op *rdma.Op) { op.RKey += 8192 }},
		"no key":    {want: rdma.StatusRemAccessErr, done: 10, refused: true, spoil: func(_ *testing.T, _ *rdmatest.World, _ *pair, op *rdma.Op) { op.RKey = 0 }},
		"one byte beyond": {want: rdma.StatusRemAccessErr, done: 10, refused: true, spoil: func(_ *testing.T, _ *rdmatest.World, p *pair, op *rdma.Op) {
			op.Remote = p.remoteAddr + size - uint64(op.Len) + 1
		}},
		"one byte before": {want: rdma.StatusRemAccessErr, done: 10, refused: true, spoil: func(_ *testing.T, _ *rdmatest.World, p *pair, op *rdma.Op) { op.Remote = p.remoteAddr - 1 }},
		"address wraps":   {want: rdma.StatusRemAccessErr, done: 10, refused: true, spoil: func(_ *testing.T, _ *rdmatest.World, _ *pair, op *rdma.Op) { op.Remote = ^uint64(0) - 10 }},
		"region may not be read": {
			want: rdma.StatusRemAccessErr, refused: true, owner: rdma.LocalWrite,
			spoil: func(*testing.T, *rdmatest.World, *pair, *rdma.Op) {},
		},
		"queue pair serves nobody": {want: rdma.StatusRemInvReqErr, refused: true, path: rdma.LocalWrite, spoil: func(*testing.T, *rdmatest.World, *pair, *rdma.Op) {}},
		"deregistered": {want: rdma.StatusRemAccessErr, done: 0, refused: true, spoil: func(t *testing.T, w *rdmatest.World, p *pair, _ *rdma.Op) {
			if err := w.Deregister(p.remoteKey); err != nil {
				t.Error(err)
			}
		}},
		"a region of another domain": {want: rdma.StatusRemAccessErr, done: 10, refused: true, spoil: func(t *testing.T, _ *rdmatest.World, _ *pair, op *rdma.Op) {
			other := open(t, "double0", 1<<20, rdma.RemoteRead)
			op.Remote, op.RKey = other.region.Addr(), other.region.Keys()[0].R
		}},
		"wrong local key": {want: rdma.StatusLocProtErr, done: 10, spoil: func(_ *testing.T, _ *rdmatest.World, _ *pair, op *rdma.Op) { op.LKey += 8192 }},
		"local key of the owner": {want: rdma.StatusLocProtErr, done: 10, spoil: func(_ *testing.T, _ *rdmatest.World, p *pair, op *rdma.Op) {
			op.LKey, op.Local = p.owner.region.Keys()[0].L, p.owner.region.Addr()
		}},
		"beyond local memory": {want: rdma.StatusLocProtErr, done: 10, spoil: func(_ *testing.T, _ *rdmatest.World, p *pair, op *rdma.Op) {
			op.Local = p.reader.region.Addr() + size - 5
		}},
		"local memory is not for writing": {
			want: rdma.StatusLocProtErr, reader: rdma.RemoteRead,
			spoil: func(*testing.T, *rdmatest.World, *pair, *rdma.Op) {},
		},
		"remote memory is gone": {want: rdma.StatusRemOpErr, done: 10, refused: true, spoil: func(t *testing.T, _ *rdmatest.World, p *pair, op *rdma.Op) {
			hole(t, p.owner.memory[6<<20:7<<20])
			op.Remote = p.remoteAddr + 6<<20 - 100
		}},
		"local memory is gone": {want: rdma.StatusLocProtErr, done: 10, spoil: func(t *testing.T, _ *rdmatest.World, p *pair, op *rdma.Op) {
			hole(t, p.reader.memory[6<<20:7<<20])
			op.Local = p.reader.region.Addr() + 6<<20 - 100
		}},
		"queue pair was reset":     {want: rdma.StatusRetryExcErr, spoil: func(t *testing.T, w *rdmatest.World, p *pair, _ *rdma.Op) { noError(t, w.ResetQP(p.ownerQP.Num())) }},
		"queue pair has failed":    {want: rdma.StatusRetryExcErr, spoil: func(t *testing.T, w *rdmatest.World, p *pair, _ *rdma.Op) { noError(t, w.FailQP(p.ownerQP.Num())) }},
		"queue pair was destroyed": {want: rdma.StatusRetryExcErr, spoil: func(t *testing.T, _ *rdmatest.World, p *pair, _ *rdma.Op) { noError(t, p.ownerQP.Close()) }},
		"owner's port is down": {want: rdma.StatusRetryExcErr, spoil: func(t *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) {
			noError(t, w.Event("double0", rdmatest.PortError))
		}},
		"own port is down": {want: rdma.StatusRetryExcErr, spoil: func(t *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) {
			noError(t, w.Event("double1", rdmatest.PortError))
		}},
		"owner's address is gone": {want: rdma.StatusRetryExcErr, spoil: func(t *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) {
			noError(t, w.SetGIDs("double0", netip.MustParseAddr("10.78.0.1").As16()))
		}},
		"nothing is answered": {want: rdma.StatusRetryExcErr, spoil: func(_ *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) {
			w.Set(rdmatest.Faults{Lose: 1000, RetryWindow: window})
		}},
		"the eleventh fails": {want: rdma.StatusRemOpErr, done: 10, spoil: func(_ *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) { w.Set(rdmatest.Faults{FailNth: 11}) }},
		"the third fails otherwise": {want: rdma.StatusRNRRetryExc, done: 2, spoil: func(_ *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) {
			w.Set(rdmatest.Faults{FailNth: 3, FailStatus: 13, Reorder: true, Delay: time.Millisecond})
		}},
		"all fail": {want: rdma.StatusRemAccessErr, spoil: func(_ *testing.T, w *rdmatest.World, _ *pair, _ *rdma.Op) {
			w.Set(rdmatest.Faults{Fail: 1000, FailStatus: 10})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			w := rdmatest.Use(t)
			w.Set(rdmatest.Faults{RetryWindow: window})
			or := func(a, b rdma.Access) rdma.Access {
				if a != 0 {
					return a
				}
				return b
			}
			p := &pair{owner: open(t, "double0", size, or(tt.owner, rdma.RemoteRead)), reader: open(t, "double1", size, or(tt.reader, rdma.LocalWrite))}
			for i := range p.owner.memory[:32*4096] {
				p.owner.memory[i] = byte(i*7+i>>12) | 1
			}
			p.remoteAddr, p.remoteKey = p.owner.region.Addr(), p.owner.region.Keys()[0].R
			p.connect(t, func(_, owner *rdma.Path) { owner.Access = or(tt.path, rdma.RemoteRead) })
			ops := p.pages(21, 4096)
			tt.spoil(t, w, p, &ops[10])
			began := time.Now()
			st, err := p.read(ops)
			took := time.Since(began)
			if c := wantStatus(t, err, tt.want); c.Op != tt.done || st.Done != tt.done {
				t.Errorf("op %d, %d done, want %d", c.Op, st.Done, tt.done)
			}
			if tt.want == rdma.StatusRetryExcErr && took < window {
				t.Errorf("it took %v", took)
			}
			if !bytes.Equal(p.reader.memory[:tt.done*4096], p.owner.memory[:tt.done*4096]) {
				t.Error("wrong bytes")
			}
			if behind := p.reader.memory[11*4096 : 21*4096]; tt.want != rdma.StatusRNRRetryExc && !bytes.Equal(behind, make([]byte, len(behind))) {
				t.Error("bytes behind the bad read have landed")
			}
			if s, err := p.readerQP.State(); s != rdma.StateErr {
				t.Errorf("reader in state %v, %v", s, err)
			}
			if tt.refused {
				if s, err := p.ownerQP.State(); s != rdma.StateErr {
					t.Errorf("owner in state %v, %v", s, err)
				}
			}
			if _, err := p.read(ops); err == nil {
				t.Error("a broken queue pair reads")
			}
		})
	}
}

func noError(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

// hole takes memory away below a registration.
func hole(tb testing.TB, m []byte) {
	tb.Helper()
	noError(tb, unix.Mprotect(m, unix.PROT_NONE))
}

// Queue pairs that do not fit together hear nothing from each other.
func TestPathsMustMatch(t *testing.T) {
	for name, spoil := range map[string]func(reader, owner *rdma.Path){
		"packet number":   func(r, _ *rdma.Path) { r.SendPSN++ },
		"number":          func(_, o *rdma.Path) { o.DestQPN++ },
		"owner's address": func(r, _ *rdma.Path) { r.DestGID[15] = 99 },
		"our address":     func(_, o *rdma.Path) { o.DestGID[15] = 99 },
	} {
		t.Run(name, func(t *testing.T) {
			w := rdmatest.Use(t)
			w.Set(rdmatest.Faults{RetryWindow: window})
			p := newPair(t)
			p.connect(t, spoil)
			_, err := p.read(p.pages(1, 100))
			wantStatus(t, err, rdma.StatusRetryExcErr)
		})
	}
	t.Run("reads served", func(t *testing.T) {
		rdmatest.Use(t)
		p := newPair(t)
		p.connect(t, func(_, o *rdma.Path) { o.ReadsServed = 4 })
		_, err := p.read(p.pages(16, 4096))
		wantStatus(t, err, rdma.StatusRemInvReqErr)
	})
	for name, spoil := range map[string]func(*rdma.Path){
		"GID index": func(p *rdma.Path) { p.GIDIndex = 3 },
		"no GID":    func(p *rdma.Path) { p.Global = false },
		"MTU":       func(p *rdma.Path) { p.MTU = 6 },
		"initiated": func(p *rdma.Path) { p.ReadsInitiated = 17 },
		"served":    func(p *rdma.Path) { p.ReadsServed = 17 },
		"port":      func(p *rdma.Path) { p.Port = 2 },
	} {
		t.Run(name, func(t *testing.T) {
			rdmatest.Use(t)
			p := newPair(t)
			path := p.reader.path(p.ownerQP.Num(), p.owner.gid.Addr, 0)
			spoil(&path)
			if err := p.reader.qp(t, rdma.QPOptions{}).Connect(path); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("error %v, want EINVAL", err)
			}
		})
	}
}

// A peer that is ready within the window is read.
func TestLatePeerIsRead(t *testing.T) {
	rdmatest.Use(t)
	p := newPair(t)
	p.readerQP, p.ownerQP = p.reader.qp(t, rdma.QPOptions{Events: true}), p.owner.qp(t, rdma.QPOptions{})
	path := p.reader.path(p.ownerQP.Num(), p.owner.gid.Addr, 0)
	path.Timeout = 20 // with retry 6: 30 s
	noError(t, p.readerQP.Connect(path))
	done := make(chan error, 1)
	go func() { _, err := p.read(p.pages(4, 4096)); done <- err }()
	select {
	case err := <-done:
		t.Fatal("read before the peer was ready", err)
	case <-time.After(50 * time.Millisecond):
	}
	noError(t, p.ownerQP.Connect(p.owner.path(p.readerQP.Num(), p.reader.gid.Addr, 0)))
	noError(t, <-done)
}

// The default window is what timeout and retry count come to.
func TestRetryWindowOfTheQueuePair(t *testing.T) {
	rdmatest.Use(t)
	p := newPair(t)
	p.connect(t, func(r, _ *rdma.Path) { r.Timeout, r.RetryCount, r.SendPSN = 12, 3, 1 })
	began := time.Now()
	_, err := p.read(p.pages(1, 100))
	wantStatus(t, err, rdma.StatusRetryExcErr)
	if took := time.Since(began); took < 67*time.Millisecond || took > 10*time.Second { // 4.096 us * 2^12 * 4
		t.Errorf("it took %v", took)
	}
}

// Reads under way times page is what fits into a delay.
func TestDelayAndDepth(t *testing.T) {
	const delay = 4 * time.Millisecond
	took := func(most int) time.Duration {
		w := rdmatest.Use(t)
		w.Set(rdmatest.Faults{Delay: delay, MaxReads: most})
		p := newPair(t)
		began := time.Now()
		if _, err := p.read(p.pages(64, 4096)); err != nil {
			t.Fatal(err)
		}
		return time.Since(began)
	}
	for most, rounds := range map[int]time.Duration{1: 64, 4: 16, 0: 4} { // 16 were agreed on
		d, enough := took(most), 3*rounds*delay+100*time.Millisecond
		for try := 0; try < 20 && d > enough; try++ { // the machine is busy
			d = took(most)
		}
		if d < rounds*delay || d > enough {
			t.Errorf("at most %d under way: %v, want some %v", most, d, rounds*delay)
		}
	}
}

func TestBandwidthIsShared(t *testing.T) {
	w := rdmatest.Use(t)
	w.Set(rdmatest.Faults{Bandwidth: 64 << 20})
	p := newPair(t)
	first := p.readerQP
	p.connect(t, nil)
	began := time.Now()
	var both sync.WaitGroup
	for _, q := range []*rdma.QP{first, p.readerQP} {
		both.Go(func() {
			if _, err := q.Read(t.Context(), p.pages(64, 64<<10), rdma.ReadOptions{Single: true}); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	if took := time.Since(began); took < 124*time.Millisecond || took > 10*time.Second { // 8 MiB
		t.Errorf("it took %v", took)
	}
}

func TestStuckReadsStall(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	w.Set(rdmatest.Faults{Stuck: true})
	_, err := p.readerQP.Read(t.Context(), p.pages(4, 4096), rdma.ReadOptions{Stall: 30 * time.Millisecond})
	if !errors.Is(err, rdma.ErrStalled) || errors.Is(err, rdma.ErrDrain) {
		t.Error(err)
	}
	w.Clear()
	p.connect(t, nil)
	if _, err := p.read(p.pages(4, 4096)); err != nil {
		t.Error(err)
	}
}

// Where nothing is flushed, destroying the queue pair ends all the same.
func TestNoFlush(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	w.Set(rdmatest.Faults{Stuck: true, NoFlush: true})
	_, err := p.readerQP.Read(t.Context(), p.pages(4, 4096), rdma.ReadOptions{Stall: 30 * time.Millisecond})
	if !errors.Is(err, rdma.ErrDrain) {
		t.Fatal(err)
	}
	noError(t, p.readerQP.Close())
	w.Clear()
	if !bytes.Equal(p.reader.memory, make([]byte, size)) {
		t.Error("something has landed")
	}
	if n := w.Counts(); n.QPs != 1 || n.CQs != 1 {
		t.Errorf("%+v", n)
	}
}

// What was under way lands late, and Read waits for it.
func TestLateDMA(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	const late = 80 * time.Millisecond
	w.Set(rdmatest.Faults{Delay: time.Minute, LateDMA: late})
	const under = 16 // way, at a time
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := p.readerQP.Read(ctx, p.pages(2*under, 4096), rdma.ReadOptions{Single: true, Stall: time.Minute})
		ended <- err
	}()
	waitFor(t, "reads under way", func() bool { return w.Counts().WRs == under })
	began := time.Now()
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || errors.Is(err, rdma.ErrDrain) {
		t.Fatal(err)
	}
	if took := time.Since(began); took < late {
		t.Errorf("Read returned after %v, before what was under way landed", took)
	}
	landed := under * 4096
	if !bytes.Equal(p.reader.memory[:landed], p.owner.memory[:landed]) || !bytes.Equal(p.reader.memory[landed:], make([]byte, size-landed)) {
		t.Error("not what was under way has landed, or more")
	}
}

// Destroying a queue pair is a fence, for late bytes too.
func TestDestroyIsAFence(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	w.Set(rdmatest.Faults{Delay: time.Minute, LateDMA: time.Minute})
	_, err := p.readerQP.Read(t.Context(), p.pages(32, 4096), rdma.ReadOptions{Single: true, Stall: 10 * time.Millisecond})
	if !errors.Is(err, rdma.ErrDrain) {
		t.Fatal(err)
	}
	noError(t, p.readerQP.Close())
	w.Set(rdmatest.Faults{LateDMA: 1})
	p.connect(t, nil)
	if _, err := p.read([]rdma.Op{p.op(7<<20, 0, 100)}); err != nil {
		t.Error(err)
	}
	if !bytes.Equal(p.reader.memory[:1<<20], make([]byte, 1<<20)) {
		t.Error("something has landed")
	}
}

// A later read lands before an earlier one, and completes after it.
func TestReorder(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	for i := range p.owner.memory[:16*4096] {
		p.owner.memory[i] = 1
	}
	w.Set(rdmatest.Faults{Reorder: true, Delay: 10 * time.Millisecond, Jitter: 60 * time.Millisecond, Seed: 5})
	swapped := func() (seen bool) {
		clear(p.reader.memory)
		done := make(chan error, 1)
		go func() { _, err := p.read(p.pages(16, 4096)); done <- err }()
		for {
			later := false
			for i := 15; i >= 0; i-- {
				there := p.reader.memory[i*4096+4095] == 1
				seen = seen || (later && !there)
				later = later || there
			}
			select {
			case err := <-done:
				noError(t, err)
				return seen
			case <-time.After(time.Millisecond):
			}
		}
	}
	waitFor(t, "later read landed first", swapped) // who looks too late sees all of it there
}

func TestFlipByte(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	const at = 70_001
	w.Set(rdmatest.Faults{FlipByte: at + 1})
	if _, err := p.read(p.pages(64, 4096)); err != nil {
		t.Fatal(err)
	}
	for i := range 64 * 4096 {
		if (p.reader.memory[i] != p.owner.memory[i]) != (i == at) {
			t.Fatalf("byte %d is %d, was %d", i, p.reader.memory[i], p.owner.memory[i])
		}
	}
}

func TestENOMEM(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	memory := mapped(t, 1<<20)
	register := func() error {
		r, err := p.reader.pd.Register(memory, rdma.LocalWrite)
		if err == nil {
			closed(t, r)
		}
		return err
	}
	makeQP := func() error {
		q, err := p.reader.pd.NewQP(rdma.QPOptions{Events: true, Depth: 60})
		if err == nil {
			closed(t, q)
		}
		return err
	}
	makePD := func() error {
		pd, err := p.reader.device.NewPD()
		if err == nil {
			closed(t, pd)
		}
		return err
	}
	for name, tt := range map[string]struct {
		f     rdmatest.Faults
		call  func() error
		fails int // which call
	}{
		"region":     {rdmatest.Faults{RegionENOMEM: 2}, register, 2},
		"domain":     {rdmatest.Faults{PDENOMEM: 1}, makePD, 1},
		"queue pair": {rdmatest.Faults{QPENOMEM: 3}, makeQP, 3},
		"queue":      {rdmatest.Faults{CQENOMEM: 1}, makeQP, 1},
		"channel":    {rdmatest.Faults{ChannelENOMEM: 2}, makeQP, 2},
	} {
		t.Run(name, func(t *testing.T) {
			w.Set(tt.f)
			before := w.Counts()
			for call := 1; call <= tt.fails+1; call++ {
				if err := tt.call(); errors.Is(err, syscall.ENOMEM) != (call == tt.fails) || (err != nil) != (call == tt.fails) {
					t.Errorf("call %d: %v", call, err)
				}
			}
			if after := w.Counts(); after.Tally != before.Tally {
				t.Errorf("left: %+v, before %+v", after.Tally, before.Tally)
			}
		})
	}
	t.Run("memory lock", func(t *testing.T) {
		// Two memories, and two queues of the default depth, each entry of 64 bytes.
		const have = 2*size + 2*(((1023+2)*64+4095)/4096*4096)
		w.Set(rdmatest.Faults{Memlock: have + 1<<20 - 4096})
		if err := register(); !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("register: %v", err)
		}
		w.Set(rdmatest.Faults{Memlock: have + 1<<20 + 8192})
		noError(t, register())
		noError(t, makeQP())
		w.Set(rdmatest.Faults{Memlock: 4096})
		if err := makeQP(); !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("create completion queue: %v", err)
		}
	})
	t.Run("post", func(t *testing.T) {
		w.Set(rdmatest.Faults{PostENOMEM: 50, Seed: 9})
		if _, err := p.read(p.pages(2048, 4096)); err != nil && !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("read: %v", err)
		}
		w.Set(rdmatest.Faults{PostENOMEM: 1000})
		p.connect(t, nil)
		if _, err := p.readerQP.Read(t.Context(), p.pages(20, 4096), rdma.ReadOptions{Stall: 50 * time.Millisecond}); !errors.Is(err, syscall.ENOMEM) {
			t.Errorf("read: %v", err)
		}
	})
}

func TestEvents(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan rdma.Event, 16)
	done := make(chan error, 1)
	go func() { done <- p.owner.device.Watch(ctx, func(e rdma.Event) { events <- e }) }()
	next := func(kind rdma.EventKind, element uint32) {
		t.Helper()
		select {
		case e := <-events:
			if e.Kind != kind || e.Element != element {
				t.Errorf("%+v, want kind %v of %d", e, kind, element)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("no event of kind %v", kind)
		}
	}
	active := func() bool {
		port, err := p.owner.device.Port(1)
		noError(t, err)
		return port.Active
	}
	noError(t, w.Event("double1", rdmatest.PortError)) // another's
	noError(t, w.Event("double0", rdmatest.PortError))
	next(rdma.PortError, 1)
	if active() {
		t.Error("the port is active")
	}
	noError(t, w.Event("double1", rdmatest.PortActive))
	noError(t, w.Event("double0", rdmatest.PortActive))
	next(rdma.PortActive, 1)
	if !active() {
		t.Error("the port is not active")
	}
	gid := netip.MustParseAddr("10.99.0.1")
	noError(t, w.SetGIDs("double0", gid.As16()))
	next(rdma.GIDChange, 1)
	if gids, err := p.owner.device.GIDs(1); err != nil || len(gids) != 1 || gids[0].Addr.Unmap() != gid {
		t.Errorf("%v, %v", gids, err)
	}
	noError(t, w.FailQP(p.ownerQP.Num()))
	next(rdma.QPFatal, p.ownerQP.Num())
	noError(t, w.Event("double0", rdmatest.DeviceFatal))
	next(rdma.DeviceFatal, 0)
	if _, err := rdma.Open("double0"); err == nil {
		t.Error("a dead device was opened")
	}
	cancel()
	<-done
	if w.Event("none", rdmatest.PortError) == nil || w.Event("double0", 99) == nil || w.ResetQP(0) == nil || w.FailQP(1<<23) == nil || w.Deregister(0) == nil {
		t.Error("something is done to what is not there")
	}
}

// Whatever goes wrong at random, and whenever a read is canceled: what is
// reported as landed has landed, and after Read has returned nothing does.
func TestRandomFaults(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	random := rand.New(rand.NewPCG(7, 8))
	const lanes, bytesOf, pages = 4, 4096, 64
	blank := bytes.Repeat([]byte{0xEE}, pages*bytesOf)
	ended := make(map[bool]int)
	var mu sync.Mutex
	for round := range 25 {
		w.Set(rdmatest.Faults{
			Seed: uint64(round), Delay: time.Duration(random.IntN(300)) * time.Microsecond, Jitter: time.Duration(random.IntN(500)) * time.Microsecond,
			Reorder: round%2 == 0, Lose: random.IntN(3), Fail: random.IntN(6), LateDMA: time.Duration(random.IntN(3)) * time.Millisecond,
			RetryWindow: 5 * time.Millisecond, PostENOMEM: random.IntN(20),
		})
		var all sync.WaitGroup
		for lane := range lanes {
			q := p.reader.qp(t, rdma.QPOptions{Events: true, Depth: 20})
			o := p.owner.qp(t, rdma.QPOptions{})
			noError(t, o.Connect(p.owner.path(q.Num(), p.reader.gid.Addr, 0)))
			noError(t, q.Connect(p.reader.path(o.Num(), p.owner.gid.Addr, 0)))
			deadline := time.Duration(random.IntN(6000)) * time.Microsecond
			if lane == 0 { // it has time
				deadline = 20 * time.Second
			}
			all.Go(func() {
				base := lane * pages * bytesOf
				mine := p.reader.memory[base : base+pages*bytesOf]
				clear(mine)
				ops := make([]rdma.Op, pages)
				for i := range ops {
					ops[i] = p.op(base+i*bytesOf, base+i*bytesOf, bytesOf)
				}
				ctx, cancel := context.WithTimeout(t.Context(), deadline)
				defer cancel()
				st, err := q.Read(ctx, ops, rdma.ReadOptions{Single: true})
				mu.Lock()
				ended[err == nil]++
				mu.Unlock()
				if errors.Is(err, rdma.ErrDrain) || (err == nil && st.Done != pages) {
					t.Error(st, err)
				}
				if !bytes.Equal(mine[:st.Done*bytesOf], p.owner.memory[base:base+st.Done*bytesOf]) {
					t.Errorf("%d pages have not landed: %v", st.Done, err)
				}
				copy(mine, blank)
				time.Sleep(3 * time.Millisecond)
				if !bytes.Equal(mine, blank) {
					t.Errorf("something landed after Read had returned %v", err)
				}
			})
		}
		all.Wait()
	}
	if ended[true] == 0 || ended[false] == 0 {
		t.Errorf("reads that succeeded: %v", ended)
	}
}

// Sleeping readers are woken, by every read.
func TestNoWakeUpIsLost(t *testing.T) {
	w := rdmatest.Use(t)
	p := newPair(t)
	waits := 0
	for i := range 3000 {
		if i%500 == 0 {
			w.Set(rdmatest.Faults{Delay: time.Duration(i/500) * 10 * time.Microsecond, Jitter: 30 * time.Microsecond, Seed: uint64(i)})
		}
		st, err := p.readerQP.Read(t.Context(), p.pages(1+i%40, 512), rdma.ReadOptions{Single: true, Stall: 10 * time.Second})
		if err != nil {
			t.Fatal(i, err)
		}
		waits += st.Waits
	}
	if waits < 1000 {
		t.Errorf("%d waits", waits)
	}
}
