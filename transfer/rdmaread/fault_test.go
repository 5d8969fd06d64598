package rdmaread

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
)

// scattered are n copies of at most that many bytes, each to a place of its own.
func scattered(rng *rand.Rand, size int64, n int, most int64) []transfer.Copy {
	slot := size / int64(n)
	remote, local := rng.Perm(n), rng.Perm(n)
	copies := make([]transfer.Copy, n)
	for i := range copies {
		length := 1 + rng.Int64N(min(most, slot))
		copies[i] = transfer.Copy{Remote: int64(remote[i]) * slot, Local: int64(local[i]) * slot, Bytes: length}
	}
	return copies
}

// over is an arena as it is to be after a read: b, and over it the copies.
func over(b, from []byte, copies []transfer.Copy) []byte {
	b = bytes.Clone(b)
	for _, c := range copies {
		copy(b[c.Local:][:c.Bytes], from[c.Remote:])
	}
	return b
}

// reads checks a read that must succeed.
func reads(t testing.TB, l *link, owner, reader *node, copies []transfer.Copy) {
	t.Helper()
	seal := owner.hold(5, 5)
	want := over(reader.arena(), owner.arena(), copies)
	if err := l.Read(short(t), []transfer.Seal{seal}, copies); err != nil {
		t.Fatalf("Read: %v", err)
	}
	if !bytes.Equal(reader.arena(), want) {
		t.Fatal("other bytes than the owner's")
	}
}

// fails checks a read that must not, and returns its error.
func fails(t testing.TB, l *link, owner *node, copies []transfer.Copy) *transfer.Error {
	t.Helper()
	err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies)
	e, ok := errors.AsType[*transfer.Error](err)
	if !ok {
		t.Fatalf("Read: %v (%T), want a *transfer.Error", err, err)
	}
	return e
}

// queues are the queue pairs of a link that are ready, ours.
func queues(l *link) (list []*queue) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, n := range l.lanes {
		if n.state == laneIdle || n.state == laneBusy {
			list = append(list, n.queue)
		}
	}
	return list
}

// A key that is good for nothing, as after the owner has given its memory up,
// fails the read at once, by name, and the link can be used for what is there.
func TestDeregisteredMemory(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 1<<20, Options{})
	l := open(t, reader, owner.peer())
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
	if err := w.Deregister(owner.t.devices[0].arenas[0].region.Keys()[0].R); err != nil {
		t.Fatal(err)
	}
	started := time.Now()
	e := fails(t, l, owner, []transfer.Copy{{Bytes: 1000}, {Remote: 5000, Local: 6000, Bytes: 1 << 16}})
	if took := time.Since(started); took > patience/4 {
		t.Errorf("it took %v", took)
	}
	f, ok := errors.AsType[*LaneError](e)
	if !ok {
		t.Fatalf("%v is by no LaneError", e)
	}
	c, ok := errors.AsType[*rdma.CompletionError](e)
	if !ok || c.Status != rdma.StatusRemAccessErr || f.Status != c.Status.String() || f.Copy != 0 || f.Device != "d0" || f.Peer != ownerLife {
		t.Errorf("%+v of %v", f, e)
	}
	for _, text := range []string{"d0", "10.77.0.1", ownerLife.String(), "remote access", "look at"} {
		if !strings.Contains(e.Error(), text) {
			t.Errorf("%q does not say %q", e, text)
		}
	}
	if e.Address != "d0 10.77.0.1 -> 10.77.0.1" {
		t.Errorf("address %q", e.Address)
	}
	if n := reader.t.Stats().Failovers; n != 0 {
		t.Errorf("%d windows were tried again, though every lane has the same key", n)
	}
	reads(t, l, owner, reader, nil) // the seal table is still there
}

// A queue pair that the owner's device has lost is replaced, and the read that
// found out ends well.
func TestResetQueuePairIsReplaced(t *testing.T) {
	for name, lanes := range map[string]int{"another lane takes over": 2, "a fresh queue pair takes over": 1} {
		t.Run(name, func(t *testing.T) {
			m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			owner, reader := newPair(t, m, 4<<20, Options{QueuePairs: lanes})
			w.Set(rdmatest.Faults{RetryWindow: 50 * time.Millisecond})
			l := open(t, reader, owner.peer())
			if err := w.ResetQP(queues(l)[0].theirs); err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(1, 1))
			reads(t, l, owner, reader, scattered(rng, 4<<20, 200, 20000))
			if s := reader.t.Stats(); s.Failovers == 0 || s.Errors != 0 {
				t.Errorf("%+v", s)
			}
			eventually(t, "the lane is not replaced", func() bool { return len(queues(l)) == lanes && reader.t.Stats().Replaced > 0 })
			reads(t, l, owner, reader, scattered(rng, 4<<20, 200, 20000))
		})
	}
}

// A queue pair that our device declares broken is replaced without any read, one
// of the owner's when a read finds it.
func TestQueuePairEventReplacesIt(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 1<<20, Options{QueuePairs: 1})
	l := open(t, reader, owner.peer())
	if err := w.FailQP(queues(l)[0].qp.Num()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is not replaced", func() bool { return reader.t.Stats().Replaced == 1 && len(queues(l)) == 1 })
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
	if n := reader.t.Stats().Failovers; n != 0 {
		t.Errorf("%d windows were begun on a queue pair that was known to be broken", n)
	}
	// The owner's end: its reader finds out.
	w.Set(rdmatest.Faults{RetryWindow: 2 * time.Second}) // a machine that stands still for less loses no other
	if err := w.FailQP(queues(l)[0].theirs); err != nil {
		t.Fatal(err)
	}
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
	if n := reader.t.Stats().Failovers; n != 1 {
		t.Errorf("%d windows were begun again, want 1", n)
	}
}

// Whatever the devices have no memory for, what is opened fails with a reason or
// works, and nothing is left.
func TestNoMemoryForTheDevice(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	for name, f := range map[string]func(n int) rdmatest.Faults{
		"domain":  func(n int) rdmatest.Faults { return rdmatest.Faults{PDENOMEM: n} },
		"region":  func(n int) rdmatest.Faults { return rdmatest.Faults{RegionENOMEM: n} },
		"cq":      func(n int) rdmatest.Faults { return rdmatest.Faults{CQENOMEM: n} },
		"qp":      func(n int) rdmatest.Faults { return rdmatest.Faults{QPENOMEM: n} },
		"channel": func(n int) rdmatest.Faults { return rdmatest.Faults{ChannelENOMEM: n} },
	} {
		t.Run(name, func(t *testing.T) {
			for n := 1; n <= 6; n++ {
				before := w.Counts().Tally
				func() {
					owner, reader := newNode(t, ownerLife, 64<<10), newNode(t, readerLife, 64<<10)
					w.Set(f(n))
					defer w.Clear()
					var err error
					if owner.t, err = m.listen(Options{Local: owner.local}); err != nil {
						return
					}
					defer owner.t.Close()
					if reader.t, err = m.listen(Options{Local: reader.local}); err != nil {
						return
					}
					defer reader.t.Close()
					l, err := reader.t.Open(short(t), owner.peer())
					if err != nil {
						if errors.Is(err, transfer.ErrUnavailable) {
							t.Errorf("the %d. is refused: %v, which sounds as if it could not be", n, err)
						}
						return
					}
					reads(t, l.(*link), owner, reader, []transfer.Copy{{Bytes: 64 << 10}})
				}()
				if after := w.Counts().Tally; after.Contexts != before.Contexts || after.PDs != before.PDs || after.Regions != before.Regions ||
					after.CQs != before.CQs || after.QPs != before.QPs || after.Channels != before.Channels {
					t.Errorf("the %d. is refused: %+v is left, %+v before", n, after, before)
				}
			}
		})
	}
}

// A full send queue is no error.
func TestPostingIsRefusedNowAndThen(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 4<<20, Options{})
	l := open(t, reader, owner.peer())
	w.Set(rdmatest.Faults{PostENOMEM: 20})
	rng := rand.New(rand.NewPCG(2, 2))
	for range 10 {
		copies := scattered(rng, 4<<20, 1000, 4000)
		want := over(reader.arena(), owner.arena(), copies)
		if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies); err == nil && !bytes.Equal(reader.arena(), want) {
			t.Fatal("other bytes than the owner's")
		}
		copy(reader.arena(), want)
	}
}

// Whichever work request fails, a read ends right or with an error, never with a
// wrong byte, and what it leaves can be used.
func TestAnyWorkRequestFails(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newPair(t, m, 2<<20, Options{})
	l := open(t, reader, owner.peer())
	statuses := []rdma.Status{rdma.StatusRemOpErr, rdma.StatusRemAccessErr, rdma.StatusRetryExcErr, rdma.StatusRNRRetryExc, rdma.StatusLocProtErr, rdma.StatusFatalErr, rdma.StatusRemInvReqErr}
	var right, wrong int
	seeds := uint64(80)
	if *soak >= time.Minute {
		seeds = 1000
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 3))
		f := rdmatest.Faults{Seed: seed, FailStatus: int(statuses[rng.IntN(len(statuses))]), Reorder: seed%3 == 0}
		if seed%2 == 0 {
			f.FailNth = 1 + rng.Uint64N(300)
		} else {
			f.Fail = 1 + rng.IntN(10)
		}
		w.Set(f)
		copies := scattered(rng, 2<<20, 1+rng.IntN(300), 30000)
		want := over(reader.arena(), owner.arena(), copies)
		seal := owner.hold(5, id.Sequence(seed+1))
		err := l.Read(short(t), []transfer.Seal{seal}, copies)
		if err == nil {
			right++
			if !bytes.Equal(reader.arena(), want) {
				t.Fatalf("seed %d: a read that held delivered another byte", seed)
			}
			continue
		}
		wrong++
		e, ok := errors.AsType[*transfer.Error](err)
		if !ok || e.Done > e.Total || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, transfer.ErrStale) {
			t.Fatalf("seed %d: %v", seed, err)
		}
		copy(reader.arena(), want)
	}
	w.Clear()
	t.Logf("%d reads were right, %d failed: %+v", right, wrong, reader.t.Stats())
	if right == 0 || wrong == 0 || reader.t.Stats().Failovers == 0 {
		t.Error("not every end of a read was seen")
	}
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 2 << 20}})
}

// Nothing lands after Read has returned, however late a device is: canceled,
// stalled, or closed.
func TestNothingLandsLate(t *testing.T) {
	for name, f := range map[string]rdmatest.Faults{
		"late":             {Delay: 5 * time.Millisecond, LateDMA: 20 * time.Millisecond},
		"late, no flush":   {Delay: 5 * time.Millisecond, LateDMA: 20 * time.Millisecond, NoFlush: true},
		"stuck":            {Stuck: true},
		"stuck, no flush":  {Stuck: true, NoFlush: true},
		"stuck and late":   {Stuck: true, LateDMA: 20 * time.Millisecond},
		"reordered":        {Delay: time.Millisecond, Reorder: true},
		"nothing but slow": {Delay: 10 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			if f.Stuck && f.NoFlush && *soak < time.Minute {
				t.Skip("waiting for each queue pair, and then destroying it, is for long runs: -soak=1m")
			}
			m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
			owner, reader := newPair(t, m, 1<<20, Options{})
			l := open(t, reader, owner.peer())
			reader.stall(200 * time.Millisecond)
			rng := rand.New(rand.NewPCG(3, 3))
			rounds := 4
			if f.NoFlush {
				rounds = 1 // each waits for the flush that does not come
			}
			for round := range rounds {
				w.Set(f)
				copies := scattered(rng, 1<<20, 200, 4000)
				ctx, cancel := context.WithTimeout(context.Background(), time.Duration(1+rng.IntN(20))*time.Millisecond)
				if round == 0 && f.Stuck {
					cancel()
					ctx, cancel = context.WithTimeout(context.Background(), patience) // it stalls
				}
				err := l.Read(ctx, []transfer.Seal{owner.hold(5, 5)}, copies)
				cancel()
				pattern(reader.arena(), 99) // somebody else's
				want := bytes.Clone(reader.arena())
				if err != nil && !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, transfer.ErrStalled) {
					t.Errorf("%v", err)
				}
				if round == 0 && f.Stuck && !errors.Is(err, transfer.ErrStalled) {
					t.Errorf("a device that is stuck: %v, want ErrStalled", err)
				}
				w.Clear() // what is late lands now, if it could
				for end := time.Now().Add(60 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
					if !bytes.Equal(reader.arena(), want) {
						t.Fatalf("a byte landed after Read had returned with %v", err)
					}
				}
			}
			reader.stall(patience / 3)
			reads(t, l, owner, reader, scattered(rng, 1<<20, 200, 4000))
		})
	}
}

// Packets that are lost cost time.
func TestLostReads(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newPair(t, m, 1<<20, Options{})
	l := open(t, reader, owner.peer())
	w.Set(rdmatest.Faults{Lose: 2, RetryWindow: 5 * time.Millisecond})
	rng := rand.New(rand.NewPCG(4, 4))
	for range 30 {
		copies := scattered(rng, 1<<20, 100, 5000)
		want := over(reader.arena(), owner.arena(), copies)
		if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, copies); err != nil {
			if f, ok := errors.AsType[*LaneError](err); !ok || f.Status == "" {
				t.Errorf("%v", err)
			}
			copy(reader.arena(), want)
		} else if !bytes.Equal(reader.arena(), want) {
			t.Fatal("other bytes than the owner's")
		}
	}
}

// 240 links that are opened at once are all good for reading, though a queue
// pair that is not ready in time would be lost for ever.
func TestManyConnectAtOnce(t *testing.T) {
	const readers = 240
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newPair(t, m, 1<<20, Options{QueuePairs: 1, Devices: []string{"d0"}})
	w.Set(rdmatest.Faults{RetryWindow: 3 * time.Second})
	seal := owner.hold(5, 5)
	var work sync.WaitGroup
	var good atomic.Int32
	for i := range readers {
		work.Go(func() {
			l, err := reader.t.Open(short(t), owner.peer())
			if err != nil {
				t.Errorf("reader %d: %v", i, err)
				return
			}
			defer l.Close()
			if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Remote: int64(i) * 4096, Local: int64(i) * 4096, Bytes: 4096}}); err != nil {
				t.Errorf("reader %d: %v", i, err)
				return
			}
			good.Add(1)
		})
	}
	work.Wait()
	if s := reader.t.Stats(); good.Load() != readers || s.Failovers != 0 || s.Replaced != 0 {
		t.Errorf("%d of %d were good: %+v", good.Load(), readers, s)
	}
	if !bytes.Equal(reader.arena()[:readers*4096], owner.arena()[:readers*4096]) {
		t.Error("other bytes than the owner's")
	}
}

// Reads that fail leave nothing behind.
func TestFailedReadsLeaveNothing(t *testing.T) {
	rounds := 200
	if *soak >= time.Minute {
		rounds = 10_000
	}
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 64<<10, Options{QueuePairs: 2})
	l := open(t, reader, owner.peer())
	eventually(t, "lanes", func() bool { return len(queues(l)) == 2 })
	before := w.Counts().Tally
	w.Set(rdmatest.Faults{Fail: 1000, FailStatus: int(rdma.StatusRemAccessErr)})
	for range rounds {
		fails(t, l, owner, []transfer.Copy{{Bytes: 10000}})
	}
	w.Clear()
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 64 << 10}})
	eventually(t, "something is left", func() bool {
		after := w.Counts().Tally
		return after.QPs == before.QPs && after.CQs == before.CQs && after.Channels == before.Channels && after.Regions == before.Regions && after.PDs == before.PDs &&
			reader.t.Stats().Lanes == 2
	})
	if s := reader.t.Stats(); s.Errors != uint64(rounds) {
		t.Errorf("%+v", s)
	}
}

// A port that goes down is left at once, the read goes on by another, and the
// port is used again when it is back.
func TestPortGoesDownAndComesBack(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newPair(t, m, 8<<20, Options{hold: 50 * time.Millisecond})
	w.Set(rdmatest.Faults{Bandwidth: 200 << 20, RetryWindow: 50 * time.Millisecond})
	l := open(t, reader, owner.peer())
	copies := scattered(rand.New(rand.NewPCG(5, 5)), 8<<20, 500, 16<<10)
	for range 3 {
		copies = append(copies, copies...)
	}
	down := make(chan error, 1)
	go func() {
		time.Sleep(10 * time.Millisecond) // of some hundred that the read takes
		down <- w.Event("d1", rdmatest.PortError)
	}()
	reads(t, l, owner, reader, copies)
	if err := <-down; err != nil {
		t.Fatal(err)
	}
	eventually(t, "the path is still there", func() bool {
		for _, p := range reader.t.Paths() {
			if p.Peer == ownerLife && p.Device == "d1" && (p.Lanes > 0 || !strings.Contains(p.State, "down")) {
				return false
			}
		}
		return true
	})
	reads(t, l, owner, reader, copies)
	if err := w.Event("d1", rdmatest.PortActive); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the path does not come back", func() bool {
		for _, p := range reader.t.Paths() {
			if p.Peer == ownerLife && p.Device == "d1" {
				return p.Lanes == p.Wanted && p.State == "active"
			}
		}
		return false
	})
	reads(t, l, owner, reader, copies)
}

// An address that comes back after its port did lets the port carry lanes again.
func TestAddressComesAfterThePort(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newNode(t, ownerLife, 1<<20), newNode(t, readerLife, 1<<20)
	owner.listen(t, m, Options{Devices: []string{"d0"}})
	reader.listen(t, m, Options{Devices: []string{"d1"}, hold: 1})
	l := open(t, reader, owner.peer())
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
	var gids [][16]byte
	for _, g := range reader.t.ports[0].gids {
		gids = append(gids, g.Addr.As16())
	}
	if err := w.Event("d1", rdmatest.PortError); err != nil {
		t.Fatal(err)
	}
	eventually(t, "lanes are left", func() bool { return len(queues(l)) == 0 })
	if err := w.SetGIDs("d1"); err != nil {
		t.Fatal(err)
	}
	if err := w.Event("d1", rdmatest.PortActive); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the port has been looked at", func() bool {
		s := reader.t.ports[0].status().State
		return s != "active" && !strings.Contains(s, "down")
	})
	if err := w.SetGIDs("d1", gids...); err != nil {
		t.Fatal(err)
	}
	eventually(t, "lanes come back", func() bool { return len(queues(l)) > 0 })
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
}

// Without any port left a read says which went, and works again when one is back.
func TestTheOnlyPortGoesDown(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newNode(t, ownerLife, 1<<20), newNode(t, readerLife, 1<<20)
	owner.listen(t, m, Options{Devices: []string{"d0"}})
	reader.listen(t, m, Options{Devices: []string{"d1:1"}, hold: time.Millisecond})
	l := open(t, reader, owner.peer())
	if err := w.Event("d1", rdmatest.PortError); err != nil {
		t.Fatal(err)
	}
	eventually(t, "lanes are left", func() bool { return len(queues(l)) == 0 })
	e := fails(t, l, owner, []transfer.Copy{{Bytes: 100}})
	if !strings.Contains(e.Error(), "d1") || !strings.Contains(e.Error(), "down") || errors.Is(e, transfer.ErrClosed) {
		t.Errorf("%v", e)
	}
	if _, err := reader.t.Open(short(t), owner.peer()); err == nil || errors.Is(err, transfer.ErrUnavailable) {
		t.Errorf("Open over a port that is down: %v", err)
	}
	if err := w.Event("d1", rdmatest.PortActive); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no lane comes back", func() bool { return len(queues(l)) > 0 })
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
}

// A device that fails takes its lanes with it, on both sides.
func TestDeviceFails(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	owner, reader := newPair(t, m, 1<<20, Options{})
	l := open(t, reader, owner.peer())
	if err := w.Event("d0", rdmatest.DeviceFatal); err != nil {
		t.Fatal(err)
	}
	for range 5 {
		reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
	}
	failed := func(what string) {
		for _, p := range reader.t.Paths() {
			if p.Device == "d0" && p.Peer == (id.Life{}) && !strings.Contains(p.State, "d0 has failed") {
				t.Errorf("%s: %+v", what, p)
			}
		}
	}
	failed("fatal")
	// Whatever comes of it afterwards, it stays so.
	port := reader.t.ports[slices.IndexFunc(reader.t.ports, func(p *port) bool { return p.d.dev.Name() == "d0" })]
	for _, kind := range []rdma.EventKind{rdma.PortError, rdma.PortActive, rdma.GIDChange} {
		port.d.happened(rdma.Event{Kind: kind, Text: "a port event", Element: 1})
		failed(fmt.Sprintf("event %v", kind))
	}
}

// A read that gets no lane says what the lanes are doing, after the stall time
// and not after its total time.
func TestNoLaneForTheStallTime(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	limits := transfer.Limits{Dial: patience, Stall: 200 * time.Millisecond}
	owner, reader := newPair(t, m, 1<<20, Options{Limits: limits, QueuePairs: 1})
	l := open(t, reader, owner.peer())
	m.mu.Lock()
	m.between = func(ctx context.Context, _ []byte, _ func([]byte) ([]byte, Call, error)) ([]byte, Call, error) {
		<-ctx.Done() // the owner answers no second hello
		return nil, nil, ctx.Err()
	}
	m.mu.Unlock()
	if err := w.FailQP(queues(l)[0].qp.Num()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the lane is left", func() bool { return len(queues(l)) == 0 })
	started := time.Now()
	e := fails(t, l, owner, []transfer.Copy{{Bytes: 1000}})
	if took := time.Since(started); took < limits.Stall || took > limits.Stall+20*time.Second {
		t.Errorf("it took %v", took)
	}
	if !errors.Is(e, transfer.ErrStalled) || !strings.Contains(e.Error(), "1 connecting for") || !strings.Contains(e.Error(), "queue pair") {
		t.Errorf("%v", e)
	}
}

// Whoever waits for a Close that does not end finds in the log what it waits for.
func TestCloseSaysWhatItWaitsFor(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	var log bytes.Buffer
	owner, reader := newPair(t, m, 64<<10, Options{QueuePairs: 1, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	open(t, reader, owner.peer())
	log.Reset()
	reader.t.closing()
	for _, text := range []string{"links=1", ownerLife.String(), "1 ready for"} {
		if !strings.Contains(log.String(), text) {
			t.Errorf("%s does not say %q", &log, text)
		}
	}
}

// Peers that answer nothing, more than a port has places, take no time from one
// that does.
func TestDeadPeersSlowNobody(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"}, rdmatest.DeviceSpec{Name: "d1"})
	node := func(name, device string) *node {
		n := newNode(t, id.Life{Node: id.Node(name), Incarnation: 5}, 1<<20)
		n.listen(t, m, Options{Devices: []string{device}, Limits: transfer.Limits{Dial: patience, Stall: patience}})
		return n
	}
	reader, well := node("reader", "d0"), node("well", "d1")
	good := open(t, reader, well.peer())
	const retries = 40 * time.Second
	w.Set(rdmatest.Faults{RetryWindow: retries})
	ctx, stop := context.WithCancel(t.Context())
	var work sync.WaitGroup
	defer work.Wait()
	defer stop()
	// Opening them all may take longer than the first read's retries: so first
	// all of them are open, and then all of them are read.
	var reads []func() error
	for i := range maxWindows + 2 {
		owner := node(fmt.Sprintf("dead-%d", i), "d1")
		l := open(t, reader, owner.peer())
		seal := owner.hold(1, 1)
		for _, q := range queues(l) {
			if err := w.ResetQP(q.theirs); err != nil {
				t.Fatal(err)
			}
		}
		reads = append(reads, func() error {
			return l.Read(ctx, []transfer.Seal{seal}, []transfer.Copy{{Bytes: 1 << 20}})
		})
	}
	for _, read := range reads {
		work.Go(func() { _ = read() }) // it is dead
	}
	eventually(t, "the places are taken", func() bool { return len(reader.t.ports[0].windows) == maxWindows })
	started := time.Now()
	if err := good.Read(short(t), []transfer.Seal{well.hold(1, 1)}, []transfer.Copy{{Bytes: 4096}}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(started); took > retries/2 {
		t.Errorf("4 KiB of a peer that is well took %v", took)
	}
}

// Memory in more slices than an answer can tell is refused at the beginning.
func TestAnswerFitsIntoACall(t *testing.T) {
	r := regions{seals: region{bytes: 8, slice: 4096, keys: []uint32{1}}}
	sized := func(keys int) int {
		r.arenas[0] = region{bytes: uint64(keys) * 4096, slice: 4096, keys: make([]uint32, keys)}
		a := answer{owner: ownerLife, regions: r, end: end{gid: addr("10.77.0.1")}}
		return len(a.encode())
	}
	most := 1
	most += (maxAnswer - sized(most)) / 4
	if n := sized(most); n > maxAnswer || n+4 <= maxAnswer {
		t.Fatalf("an answer of %d bytes", n)
	}
	if err := tellable(ownerLife, r); err != nil {
		t.Error(err)
	}
	sized(most + 1)
	if err := tellable(ownerLife, r); err == nil || !strings.Contains(err.Error(), "smaller arenas") {
		t.Errorf("one key more: %v", err)
	}
}

// An answer to an earlier hello, that comes while a newer attempt is made,
// programs nothing, and is counted.
func TestLateAnswerProgramsNothing(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 1<<20, Options{QueuePairs: 1})
	first, giveUp := context.WithCancel(short(t))
	var attempts atomic.Int32
	late := make(chan []byte, 1)
	m.between = func(ctx context.Context, hello []byte, call func([]byte) ([]byte, Call, error)) ([]byte, Call, error) {
		b, c, err := call(hello)
		switch attempts.Add(1) {
		case 1: // the first answer is on its way while the reader tries again
			late <- b
			giveUp()
			<-ctx.Done()
			if err == nil {
				c.Close()
			}
			return nil, nil, ctx.Err()
		case 2: // and comes as the answer to that
			return <-late, c, err
		default:
			return b, c, err
		}
	}
	if _, err := reader.t.Open(first, owner.peer()); !errors.Is(err, context.Canceled) {
		t.Fatalf("Open without an answer: %v, want Canceled", err)
	}
	if _, err := reader.t.Open(short(t), owner.peer()); !errors.Is(err, errGarbage) {
		t.Fatalf("Open with the answer to another: %v", err)
	}
	if n := reader.t.Stats().Late; n != 1 {
		t.Errorf("%d answers were late, want 1", n)
	}
	l := open(t, reader, owner.peer())
	reads(t, l, owner, reader, []transfer.Copy{{Bytes: 1 << 20}})
}

// An owner that answers nothing costs the dial time.
func TestOwnerAnswersNothing(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 1<<20, Options{Limits: transfer.Limits{Dial: 100 * time.Millisecond}})
	m.between = func(ctx context.Context, _ []byte, _ func([]byte) ([]byte, Call, error)) ([]byte, Call, error) {
		<-ctx.Done()
		return nil, nil, ctx.Err()
	}
	if _, err := reader.t.Open(short(t), owner.peer()); !errors.Is(err, transfer.ErrStalled) {
		t.Errorf("Open: %v, want ErrStalled", err)
	}
}

// Whatever an owner answers, a link is refused, or reads what it should.
func TestHostileAnswers(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 1<<20, Options{QueuePairs: 1})
	var change func(a *answer)
	m.between = func(_ context.Context, hello []byte, call func([]byte) ([]byte, Call, error)) ([]byte, Call, error) {
		b, c, err := call(hello)
		if err != nil {
			return nil, nil, err
		}
		a, _, err := parseAnswer(b)
		if err != nil {
			return nil, nil, err
		}
		change(&a)
		return a.encode(), c, nil
	}
	for name, tt := range map[string]struct {
		change func(a *answer)
		want   error
	}{
		"another life":         {func(a *answer) { a.owner.Incarnation++ }, transfer.ErrIdentity},
		"another generation":   {func(a *answer) { a.generation-- }, errGarbage},
		"a greater MTU":        {func(a *answer) { a.end.mtu = 5 }, nil},
		"more reads":           {func(a *answer) { a.end.reads = 100 }, errGarbage},
		"another link layer":   {func(a *answer) { a.end.link = rdma.LinkInfiniBand }, transfer.ErrUnavailable},
		"another family":       {func(a *answer) { a.end.gid = addr("2001:db8::1") }, transfer.ErrUnavailable},
		"less than it said":    {func(a *answer) { a.regions.arenas[0].bytes-- }, errGarbage},
		"none of the rank":     {func(a *answer) { a.regions.arenas[0] = region{} }, errGarbage},
		"a wrong key":          {func(a *answer) { a.regions.arenas[0].keys = []uint32{1 << 30} }, nil},
		"a wrong address":      {func(a *answer) { a.regions.arenas[0].addr = 8 }, nil},
		"the seals' wrong key": {func(a *answer) { a.regions.seals.keys = []uint32{1 << 30} }, nil},
	} {
		change = tt.change
		before := bytes.Clone(reader.arena())
		l, err := reader.t.Open(short(t), owner.peer())
		if tt.want != nil {
			if !errors.Is(err, tt.want) {
				t.Errorf("%s: %v, want %v", name, err, tt.want)
			}
		} else if err != nil {
			t.Errorf("%s: %v", name, err)
		} else if err := l.Read(short(t), []transfer.Seal{owner.hold(5, 5)}, []transfer.Copy{{Bytes: 100}}); err == nil && name != "a greater MTU" {
			t.Errorf("%s: it was read", name)
		}
		if l != nil {
			l.Close()
		}
		if name != "the seals' wrong key" && name != "a greater MTU" && !bytes.Equal(before, reader.arena()) {
			t.Errorf("%s: something has landed", name)
		}
	}
}

// Whatever a reader says, it is refused with a reason, or served.
func TestHostileHellos(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, _ := newPair(t, m, 64<<10, Options{})
	good := hello{generation: 1, owner: ownerLife, reader: readerLife, end: end{qpn: 99, gid: addr("10.77.0.1"), link: rdma.LinkEthernet, mtu: 3, reads: 4}}
	before := w.Counts().QPs
	for name, tt := range map[string]struct {
		change func(h *hello)
		want   refusal
	}{
		"meant for another life": {func(h *hello) { h.owner.Incarnation++ }, refusedLife},
		"meant for another node": {func(h *hello) { h.owner.Node = "other" }, refusedLife},
		"from another reader":    {func(h *hello) { h.reader.Incarnation++ }, refusedStranger},
		"for a port beyond":      {func(h *hello) { h.port = 7 }, refusedPort},
		"of another family":      {func(h *hello) { h.end.gid = addr("2001:db8::1") }, refusedPath},
		"of another link layer":  {func(h *hello) { h.end.link = rdma.LinkInfiniBand }, refusedPath},
		"good":                   {func(*hello) {}, 0},
		"good, with many reads":  {func(h *hello) { h.end.reads = 128 }, 0},
		"good, with a great MTU": {func(h *hello) { h.end.mtu = 5 }, 0},
	} {
		h := good
		tt.change(&h)
		ctx, cancel := context.WithCancel(context.Background())
		var got []byte
		err := owner.t.Serve(ctx, readerLife, h.encode(), nil, func(b []byte) error { got = b; cancel(); return nil })
		cancel()
		a, why, parsed := parseAnswer(got)
		if parsed != nil || why != tt.want || a.generation != 1 || (err == nil) != (tt.want == 0) {
			t.Errorf("%s: %v, answer %v, %v", name, err, why, parsed)
		}
		if why == 0 && (a.end.reads > h.end.reads || a.end.mtu > h.end.mtu) {
			t.Errorf("%s: answer %+v to %+v", name, a.end, h.end)
		}
	}
	if err := owner.t.Serve(short(t), readerLife, []byte("kvr?"), nil, func([]byte) error { t.Error("garbage is answered"); return nil }); !errors.Is(err, errGarbage) {
		t.Errorf("garbage: %v", err)
	}
	broken := errors.New("the connection is gone")
	if err := owner.t.Serve(short(t), readerLife, good.encode(), nil, func([]byte) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("an answer that can't be sent: %v", err)
	}
	if s := owner.t.Stats(); s.Garbage != 1 || s.Strangers != 3 || s.Refused != 3 || s.Served != 3 || s.Accepted != 0 {
		t.Errorf("%+v", s)
	}
	if after := w.Counts().QPs; after != before {
		t.Errorf("%d queue pairs, %d before", after, before)
	}
}

// One reader gets so many lanes, and no more, whatever others have.
func TestOneReaderIsBounded(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, _ := newPair(t, m, 64<<10, Options{})
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	serve := func(reader id.Life) (refusal, error) {
		h := hello{generation: 1, owner: ownerLife, reader: reader, end: end{qpn: 99, gid: addr("10.77.0.1"), link: rdma.LinkEthernet, mtu: 3, reads: 4}}
		answers := make(chan []byte, 1)
		work.Go(func() {
			_ = owner.t.Serve(ctx, reader, h.encode(), nil, func(b []byte) error { answers <- b; return nil }) // told by the answer
		})
		_, why, err := parseAnswer(<-answers)
		return why, err
	}
	for n := range maxLanesOfReader + 1 {
		why, err := serve(readerLife)
		want := refusal(0)
		if n == maxLanesOfReader {
			want = refusedReader
		}
		if err != nil || why != want {
			t.Fatalf("lane %d: %v, %v", n, why, err)
		}
	}
	if why, err := serve(id.Life{Node: "other", Incarnation: 1}); err != nil || why != 0 {
		t.Errorf("another reader: %v, %v", why, err)
	}
	if n := owner.t.Stats().Accepted; n != maxLanesOfReader+1 {
		t.Errorf("%d lanes", n)
	}
}

// Canceling a read breaks what it uses and nothing else: reads beside it go on.
func TestCancelHurtsNobodyElse(t *testing.T) {
	m, w := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	owner, reader := newPair(t, m, 4<<20, Options{})
	w.Set(rdmatest.Faults{Delay: 200 * time.Microsecond})
	l := open(t, reader, owner.peer())
	seal := owner.hold(5, 5)
	stop := make(chan struct{})
	var work sync.WaitGroup
	var reads atomic.Int32
	for n := range int64(2) {
		work.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := l.Read(short(t), []transfer.Seal{seal}, []transfer.Copy{{Local: n << 20, Bytes: 1 << 20}}); err != nil {
					t.Errorf("a read beside: %v", err)
					return
				}
				reads.Add(1)
			}
		})
	}
	rng := rand.New(rand.NewPCG(6, 6))
	for n := 0; n < 50 || reader.t.Stats().Replaced == 0 && n < 5000; n++ {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(rng.IntN(3000))*time.Microsecond)
		err := l.Read(ctx, []transfer.Seal{seal}, []transfer.Copy{{Local: 2 << 20, Bytes: 2 << 20}})
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("canceled: %v", err)
		}
	}
	close(stop)
	work.Wait()
	if reads.Load() == 0 {
		t.Error("nothing was read beside")
	}
	if s := reader.t.Stats(); s.Replaced == 0 {
		t.Errorf("%+v", s)
	}
}

func TestOptionsAreChecked(t *testing.T) {
	m, _ := newMeeting(t, Options{}, rdmatest.DeviceSpec{Name: "d0"})
	n := newNode(t, ownerLife, 4096)
	index := 300
	for name, change := range map[string]func(o *Options){
		"no seal table": func(o *Options) { o.Local.Seals = nil }, "no call": func(o *Options) { o.Call = nil },
		"service level": func(o *Options) { o.ServiceLevel = 16 }, "timeout": func(o *Options) { o.Timeout = 32 },
		"retry count": func(o *Options) { o.RetryCount = 7 }, "reads": func(o *Options) { o.Reads = 129 },
		"queue pairs": func(o *Options) { o.QueuePairs = 65 }, "MTU": func(o *Options) { o.MTU = 1500 },
		"GID index": func(o *Options) { o.GIDIndex = &index }, "no such device": func(o *Options) { o.Devices = []string{"d9"} },
		"no such port": func(o *Options) { o.Devices = []string{"d0:2"} }, "no device": func(o *Options) { o.Devices = []string{"../d0"} },
		"port 0": func(o *Options) { o.Devices = []string{"d0:0"} }, "one port of two": func(o *Options) { o.Devices = []string{"d0:1", "d0:2"} },
	} {
		o := Options{Local: n.local, Call: m.call(ownerLife)}
		change(&o)
		if tr, err := Listen(o); err == nil || errors.Is(err, transfer.ErrUnavailable) {
			t.Errorf("%s: %v, want an error that does not pass on", name, err)
			if tr != nil {
				tr.Close()
			}
		}
	}
}

func ExampleLaneError() {
	f := &LaneError{
		Device: "mlx5_0", Port: 1, From: addr("10.0.0.2"), To: addr("10.0.0.1"), Remote: "mlx5_3", Peer: id.Life{Node: "prefill-3", Incarnation: 17},
		Status: rdma.StatusRNRRetryExc.String(), Copy: 40, Done: 655360,
		Err: errors.New("read op 40 on mlx5_0: receiver-not-ready retries exceeded"),
	}
	fmt.Println(f)
	// Output: copy 40 of prefill-3.17, device mlx5_0 port 1, 10.0.0.2 to 10.0.0.1 (mlx5_3), after 655360 bytes: read op 40 on mlx5_0: receiver-not-ready retries exceeded
}
