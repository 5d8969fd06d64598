package faults

import (
	"context"
	"encoding/binary"
	"fmt"
	"runtime"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/transfer/shm"
)

// Of a copy that takes long enough for its reader to be stopped in it: 50 MiB of
// 16 KiB a token, of an arena that does not hold two of them.
const (
	vastTokens = 3200
	vastPages  = 480
)

// TestFaultsInMidCopy does over shared memory what TestFaultsInMidTransfer does
// over the network: whatever befalls an owner or a reader while bytes are copied,
// another pair notices nothing. A copy is over in milliseconds, so that the
// reader is stopped in the middle of it first.
func TestFaultsInMidCopy(t *testing.T) {
	t.Parallel()
	const lease = 5 * time.Second // a machine that stands still for two seconds ends none
	c := up(t, 1, 2, "timers.lease="+lease.String(), "timers.lease_renew=1s", "timers.session_grace=1s",
		fmt.Sprint("arena.pages=", vastPages), "arena.layers=4", "arena.heads=8", "arena.head_dim=128")
	owner := startAgent(t, another(t, c.must("prefill-0"), "owner"))
	from, to := attach(t, owner.Engine), c.engine("decode-0")
	reader := c.must("decode-0")
	ownerAdmin, readerAdmin := dial(t, owner.Engine), dial(t, reader.Engine)
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 30)
	l.more(2)
	for _, n := range c.Nodes() {
		awaitPeer(t, n.Node, dial(t, n.Engine), "owner")
	}
	if err := move(t.Context(), newRequest("warm", 50), from, to, true, patience); err != nil {
		t.Fatal(err)
	}
	awaitFree(t, "owner", ownerAdmin, patience)
	whole := func(r *request) error { return to.retrieve(t.Context(), r, r.reference, patience) }
	ended := []kvferrypb.Failure_Code{kvferrypb.Failure_REVOKED, kvferrypb.Failure_STALE}

	t.Run("pages are reused under the copy", func(t *testing.T) {
		s := stopInCopy(t, "its pages are reused", 0, from, to, reader.PID, whole)
		revoke(t, ownerAdmin)
		// Most of what is still to be copied is another request's now.
		usurper := newRequest("the usurper", vastTokens)
		usurper.keep = true
		if err := from.publish(t.Context(), usurper); err != nil {
			t.Fatal(err)
		}
		s.resume(t)
		wantFailure(t, <-s.read, "owner", owner.Incarnation, ended...)
		wantFailure(t, whole(s.request), "owner", owner.Incarnation, ended...)
		if err := whole(usurper); err != nil {
			t.Errorf("who has the pages now: %v", err)
		}
		from.remove(usurper.name)
		l.more(2)
		awaitFree(t, "owner", ownerAdmin, patience)
		awaitFree(t, reader.Node, readerAdmin, patience)
	})

	t.Run("owner is stopped", func(t *testing.T) {
		s := stopInCopy(t, "its owner is stopped", 0, from, to, reader.PID, whole)
		standstill(t, "owner", owner.pid)
		begin := time.Now()
		s.resume(t)
		// All of it is there, and held: a stopped owner ends no publication.
		err := <-s.read
		took := time.Since(begin)
		if err := syscall.Kill(owner.pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if t.Logf("read to its end in %v", took.Round(time.Millisecond)); err != nil || took > hangLimit {
			t.Errorf("read from a stopped owner after %v: %v", took, err)
		}
		l.more(2)
		awaitFree(t, "owner", ownerAdmin, patience) // the acknowledgement was heard at last
		awaitFree(t, reader.Node, readerAdmin, patience)
	})

	t.Run("engine is killed", func(t *testing.T) {
		kill := func() {}
		s := stopInCopy(t, "its engine is killed", 0, from, to, reader.PID, func(r *request) error {
			kill()
			kill = startEngine(t, reader.Engine, r.name, r.reference)
			return nil
		})
		if err := <-s.read; err != nil { // it has been started
			t.Fatal(err)
		}
		kill()
		s.resume(t)
		awaitFree(t, reader.Node, readerAdmin, patience)
		awaitFree(t, "owner", ownerAdmin, patience)
		l.more(2)
	})

	t.Run("reader is killed", func(t *testing.T) {
		victim := startAgent(t, another(t, c.must("prefill-0"), "doomed"))
		awaitPeer(t, "doomed", dial(t, victim.Engine), "owner")
		e := attach(t, victim.Engine)
		// It is held no longer than a lease would.
		s := stopInCopy(t, "its reader is killed", lease, from, e, victim.pid, func(r *request) error {
			return e.retrieve(t.Context(), r, r.reference, patience)
		})
		if used, err := conserved(t.Context(), ownerAdmin); err != nil || used == 0 {
			t.Errorf("owner holds %d pages while they are read: %v", used, err)
		}
		begin := time.Now()
		victim.kill(t)
		awaitFree(t, "owner", ownerAdmin, lease+patience/3)
		t.Logf("pages are back %v after the reader's death, its lease is %v", time.Since(begin).Round(time.Millisecond), lease)
		if err := <-s.read; err == nil {
			t.Error("it was read by a node that was killed")
		}
		l.more(2)
	})

	t.Run("owner is killed", func(t *testing.T) {
		before, err := mapsOf(reader.PID)
		if err != nil {
			t.Fatal(err)
		}
		// The next life is of the same name and memory.
		for round := range 3 {
			s := stopInCopy(t, fmt.Sprintf("its owner is killed %d", round), 0, from, to, reader.PID, whole)
			life := owner.Incarnation
			owner.kill(t)
			begin := time.Now()
			s.resume(t)
			err := <-s.read
			took := time.Since(begin)
			// The dead end no publication, and what they had stays mapped until the
			// reader has seen their end: it may have been faster.
			if err != nil {
				wantFailure(t, err, "owner", life, kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_TRANSPORT)
			}
			if t.Logf("reader has an answer after %v: %v", took.Round(time.Millisecond), err); took > hangLimit {
				t.Errorf("it took %v", took)
			}
			l.more(2)
			awaitFree(t, reader.Node, readerAdmin, patience)
			owner = startAgent(t, another(t, c.must("prefill-0"), "owner"))
			from = attach(t, owner.Engine)
			if err := move(t.Context(), newRequest(fmt.Sprint("next life ", round), 50), from, to, true, patience); err != nil {
				t.Errorf("of the next life: %v", err)
			}
		}
		// The memory of the dead is not kept.
		await(t, "the memory of the dead to be unmapped", patience, func(context.Context) error {
			now, err := mapsOf(reader.PID)
			if is, was := memoryFiles(now), memoryFiles(before); err == nil && is > was {
				err = fmt.Errorf("%d memory files are mapped, before %d", is, was)
			}
			return err
		})
	})
	l.end()
	for _, name := range []string{"decode-0", "decode-1"} {
		if n, err := readBytes(t.Context(), c.must(name).HTTP.String(), shm.Name); err != nil || n == 0 {
			t.Errorf("%s has read %v bytes over shared memory: %v", name, n, err)
		}
	}
}

// revoke ends the one publication that an owner has.
func revoke(t *testing.T, owner kvferrypb.AdminClient) {
	t.Helper()
	own, err := owner.Publications(t.Context(), &kvferrypb.PublicationsRequest{})
	if err != nil || len(own.GetItems()) != 1 {
		t.Fatalf("publications of the owner: %v %v", own.GetItems(), err)
	}
	if _, err := owner.Revoke(t.Context(), &kvferrypb.RevokeRequest{Publication: own.GetItems()[0].GetPublication()}); err != nil {
		t.Fatal(err)
	}
}

// stopped is a read whose reader has been stopped in the middle of the copy.
type stopped struct {
	request *request
	read    chan error // gets the end of the read
	pid     int
}

// resume lets the reader go on.
func (s *stopped) resume(t *testing.T) {
	t.Helper()
	if err := syscall.Kill(s.pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
}

// stopInCopy publishes a request for so long, has it read, and stops the process
// of the reader when some of it has landed, and not all. If all has, that must
// have been right, and it tries again with another request. Nothing else may be
// read by that node, and no page of it be in use.
func stopInCopy(t *testing.T, name string, hold time.Duration, from, to *engine, pid int, read func(*request) error) *stopped {
	t.Helper()
	owner := from.client.Admin()
	t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGCONT) }) // it may be gone
	for try := range 50 {
		clear(to.region.Bytes())
		r := newRequest(fmt.Sprintf("%s, try %d", name, try), vastTokens)
		r.hold = hold
		s := &stopped{request: r, read: make(chan error, 1), pid: pid}
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		go func() { s.read <- read(r) }()
		for end := time.Now().Add(patience); to.share(vastTokens) == 0; runtime.Gosched() { // a poll that sleeps comes too late
			if time.Now().After(end) {
				t.Fatalf("%s: nothing lands", r.name)
			}
		}
		standstill(t, to.node(), pid)
		if share := to.share(vastTokens); share < 0.95 {
			t.Logf("stopped with %.0f%% copied, at try %d", 100*share, try)
			return s
		}
		s.resume(t)
		if err := <-s.read; err != nil {
			t.Fatal(err)
		}
		awaitFree(t, from.node(), owner, patience)
	}
	t.Fatal("every copy was over before its reader was stopped")
	return nil
}

// share is which part of a request of so many tokens has landed in an arena that
// was clear, as the first word of each page and layer shows.
func (e *engine) share(tokens int) float64 {
	landed := 0
	for layer := range e.layout.Layers {
		for p := range e.layout.Pages {
			if binary.LittleEndian.Uint64(e.vector(layer, 0, 0, uint32(p), 0)) != 0 {
				landed++
			}
		}
	}
	return float64(landed*e.layout.PageSize) / float64(tokens*e.layout.Layers)
}
