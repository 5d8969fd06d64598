package transfertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvferry/kvferry/transfer"
)

// errPlanned is what planned failures wrap.
var errPlanned = errors.New("planned failure")

// faults is what must hold when reads fail.
func faults() []testCase {
	return []testCase{
		{name: "delayed and reordered", run: testReordered},
		{name: "every third read fails", run: testFailing},
		{name: "lost", run: testLost},
		{name: "lost, with a deadline", run: testLostDeadline},
		{name: "lost, then closed", run: testLostClosed},
		{name: "cancelled half way", run: testHalfWay},
		{name: "late landing", run: testLate},
		{name: "late landing after Close", run: testLateClosed},
	}
}

// faulty puts a plan into the reader's side of the factory's transports.
func (f Factory) faulty(limits transfer.Limits, plan func(read int) Fault) Factory {
	start := f.Start
	f.Start = func(local transfer.Local, own transfer.Limits) (transfer.Transport, error) {
		t, err := start(local, own)
		if err != nil {
			return nil, err
		}
		return NewFaulty(t, limits, plan), nil
	}
	return f
}

func always(fault Fault) func(int) Fault { return func(int) Fault { return fault } }

func testReordered(t testing.TB, f Factory) {
	rng := rand.New(rand.NewPCG(rand.Uint64(), 7))
	p := newPair(t, f.faulty(Calm(transfer.Limits{}), always(Fault{Delay: time.Millisecond, Reorder: true})), 2, 512*kib)
	for _, n := range []int{1, 100, 2000} {
		copies := append(scattered(rng, 0, 512*kib, n, 5*kib), scattered(rng, 1, 512*kib, n, 5*kib)...)
		want := p.before().apply(p, copies)
		if err := p.read(copies); err != nil {
			t.Fatal(err)
		}
		want.compare(t, p)
	}
	p.owner.local.Seals.Store(sealIndex, 0)
	if err := p.read(one(0, 0, 100)); !errors.Is(err, transfer.ErrStale) {
		t.Errorf("Read under a seal that is gone: %v, want ErrStale", err)
	}
}

func testFailing(t testing.TB, f Factory) {
	plan := func(read int) Fault {
		if read%3 == 2 {
			return Fault{Err: errPlanned}
		}
		return Fault{}
	}
	p := newPair(t, f.faulty(Calm(transfer.Limits{}), plan), 1, 256*kib)
	rng := rand.New(rand.NewPCG(rand.Uint64(), 8))
	for read := range 12 {
		copies := scattered(rng, 0, 256*kib, 20, 8*kib)
		want := p.before().apply(p, copies)
		err := p.read(copies)
		if read%3 != 2 {
			if err != nil {
				t.Fatalf("read %d: %v", read, err)
			}
			want.compare(t, p)
			continue
		}
		if !errors.Is(err, errPlanned) {
			t.Fatalf("read %d: %v, want the planned failure", read, err)
		}
		wholeError(t, f, p, err, transfer.Bytes(copies))
		if e, ok := errors.AsType[*transfer.Error](err); ok && e.Done == 0 {
			t.Errorf("read %d failed half way and says that nothing landed", read)
		}
	}
}

func testLost(t testing.TB, f Factory) {
	limits := Calm(transfer.Limits{})
	limits.Stall = 50 * time.Millisecond
	p := newPair(t, f.faulty(limits, always(Fault{Lose: true})), 1, 64*kib)
	before := p.before()
	started := time.Now()
	err := p.read(one(0, 0, 1000))
	if !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("a lost read: %v, want ErrStalled", err)
	}
	if took := time.Since(started); took < limits.Stall {
		t.Errorf("a lost read stalled after %v, before the stall time", took)
	}
	wholeError(t, f, p, err, 1000)
	before.compare(t, p)
}

func testLostDeadline(t testing.TB, f Factory) {
	limits := Calm(transfer.Limits{})
	limits.Stall = time.Hour
	p := newPair(t, f.faulty(limits, always(Fault{Lose: true})), 1, 4*kib)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
	defer cancel()
	if err := p.link.Read(ctx, p.seals, one(0, 0, 1000)); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a lost read with a deadline: %v, want context.DeadlineExceeded", err)
	}
}

func testLostClosed(t testing.TB, f Factory) {
	limits := Calm(transfer.Limits{})
	limits.Stall = time.Hour
	began := make(chan struct{}, 1)
	p := newPair(t, f.faulty(limits, func(int) Fault { began <- struct{}{}; return Fault{Lose: true} }), 1, 4*kib)
	done := make(chan error, 1)
	go func() { done <- p.link.Read(context.Background(), p.seals, one(0, 0, 10)) }()
	wait(t, "Read", began)
	shut(t, p.link.Close)
	if err := wait(t, "Read after Close", done); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("a lost read that was closed: %v, want ErrClosed", err)
	}
}

func testHalfWay(t testing.TB, f Factory) {
	p := newPair(t, f.faulty(Calm(transfer.Limits{}), always(Fault{Cancel: true})), 1, 256*kib)
	rng := rand.New(rand.NewPCG(rand.Uint64(), 9))
	given := p.before() // what the next owner of the pages wrote
	for range 10 {
		copies := scattered(rng, 0, 256*kib, 10, 50*kib)
		err := p.read(copies)
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("a read that was cancelled half way: %v, want context.Canceled", err)
		}
		wholeError(t, f, p, err, transfer.Bytes(copies))
		seed := rng.Uint64()
		p.reader.fill(0, seed)
		fill(given[0], seed)
	}
	shut(t, p.link.Close)
	given.compare(t, p)
}

// testLate: the bytes land after the context has ended and before Read returns.
// Whoever waits for Read is safe.
func testLate(t testing.TB, f Factory) {
	p := newPair(t, f.faulty(Calm(transfer.Limits{}), always(Fault{Late: 5 * time.Millisecond})), 1, 256*kib)
	copies := one(0, 0, 256*kib)
	var after image
	for round := range uint64(5) {
		p.owner.fill(0, round+1)
		p.reader.fill(0, round+100)
		want := p.before().apply(p, copies)
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error, 1)
		go func() { done <- p.link.Read(ctx, p.seals, copies) }()
		cancel()
		err := wait(t, "Read", done)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Read: %v, want context.Canceled", err)
		}
		want.compare(t, p) // all of it had landed when Read returned
		p.reader.fill(0, round+200)
		after = p.before()
	}
	shut(t, p.link.Close) // nothing can be on its way any more
	after.compare(t, p)
}

func testLateClosed(t testing.TB, f Factory) {
	limits := Calm(transfer.Limits{})
	limits.Stall = time.Hour
	began := make(chan struct{}, 1)
	plan := func(int) Fault { began <- struct{}{}; return Fault{Late: 5 * time.Millisecond} }
	p := newPair(t, f.faulty(limits, plan), 1, 256*kib)
	copies := one(0, 0, 256*kib)
	want := p.before().apply(p, copies)
	done := make(chan error, 1)
	go func() { done <- p.link.Read(context.Background(), p.seals, copies) }()
	wait(t, "Read", began)
	shut(t, p.reader.transport.Close)
	want.compare(t, p) // they landed before Close returned
	p.reader.fill(0, 300)
	after := p.before()
	if err := wait(t, "Read after Close", done); !errors.Is(err, transfer.ErrClosed) {
		t.Errorf("Read: %v, want ErrClosed", err)
	}
	after.compare(t, p)
}
