package faults

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// Of a transfer that takes long enough to be hit in its middle: 24 MiB, far more
// than all buffers on its way take.
const (
	bigTokens = 1500
	slowRate  = `{"rate": 6000}` // KB/s
)

// TestFaultsInMidTransfer puts one owner behind proxies. While each fault hits
// those who talk to it, another pair must notice nothing. TestFaultsInMidCopy is
// its like without a network.
func TestFaultsInMidTransfer(t *testing.T) {
	t.Parallel()
	// A machine that stands still for two seconds ends no lease, and no read.
	const lease = 5 * time.Second
	c := up(t, 1, 2, overTCP, "timers.lease="+lease.String(), "timers.lease_renew=1s", "timers.stall=3s",
		"arena.layers=4", "arena.heads=8", "arena.head_dim=128") // 16 KiB a token
	f, owner := behind(t, c, "slow", nil)
	from, to := attach(t, owner.Engine), c.engine("decode-0")
	ownerAdmin := dial(t, owner.Engine)
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 30)
	l.more(2)
	moved := func(name string) error {
		return move(t.Context(), newRequest(name, 50), from, to, true, patience)
	}
	if err := moved("through the proxies"); err != nil {
		t.Fatal(err)
	}

	t.Run("data port is mute", func(t *testing.T) {
		heal := toxic(t, f.data, "timeout", `{"timeout": 0}`)
		defer heal()
		begin := time.Now()
		r := newRequest("mute", 50)
		r.hold = 3 * time.Second // it will not be read
		err := move(t.Context(), r, from, to, true, patience)
		failure := wantFailure(t, err, "slow", owner.Incarnation, kvferrypb.Failure_TRANSPORT)
		if failure.GetTransport() != "tcp" {
			t.Errorf("failure names transport %q: %v", failure.GetTransport(), err)
		}
		// Two attempts of three seconds, each on a connection of its own at worst.
		if took := time.Since(begin); took > patience {
			t.Errorf("it took %v", took)
		}
		heal()
		if err := moved("healed"); err != nil {
			t.Errorf("after the fault: %v", err)
		}
		l.more(2)
		awaitFree(t, "slow", ownerAdmin, patience)
	})

	t.Run("nothing reaches the owner", func(t *testing.T) {
		kept := newRequest("kept", 50)
		if err := from.publish(t.Context(), kept); err != nil {
			t.Fatal(err)
		}
		heal := f.cut(t)
		defer heal()
		begin := time.Now()
		err := to.retrieve(t.Context(), kept, kept.reference, patience)
		wantFailure(t, err, "slow", owner.Incarnation, kvferrypb.Failure_TRANSPORT, kvferrypb.Failure_OWNER_LOST)
		if took := time.Since(begin); took > patience {
			t.Errorf("it took %v", took)
		}
		l.more(2)
		heal()
		begin = time.Now()
		// Whether it was thought dead meanwhile or not: nobody has to do anything.
		admin := dial(t, c.must("decode-0").Engine)
		await(t, "the owner to be back", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, admin)
			if err == nil && seen["slow"] != owner.Incarnation {
				err = fmt.Errorf("incarnation %d, want %d", seen["slow"], owner.Incarnation)
			}
			return errors.Join(err, shown(ctx, admin, "slow", owner.Incarnation, kept, true))
		})
		if err := to.retrieve(t.Context(), kept, kept.reference, patience); err != nil {
			t.Errorf("what was published before the fault: %v", err)
		}
		if err := moved("after the cut"); err != nil {
			t.Errorf("after the fault: %v", err)
		}
		t.Logf("of use %v after the fault", time.Since(begin).Round(time.Millisecond))
		awaitFree(t, "slow", ownerAdmin, patience)
	})

	t.Run("pages are reused under the read", func(t *testing.T) {
		heal := toxic(t, f.data, "bandwidth", slowRate)
		defer heal()
		clear(to.region.Bytes()) // nothing is read into it now
		r := newRequest("its pages are reused", bigTokens)
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		failed := make(chan error, 1)
		go func() { failed <- to.retrieve(t.Context(), r, r.reference, patience) }()
		awaitLanded(t, to)
		revoke(t, ownerAdmin)
		// There are not enough pages for this one without those of the other.
		usurper := newRequest("the usurper", bigTokens)
		usurper.hold = time.Second // it will not be read
		if err := from.publish(t.Context(), usurper); err != nil {
			t.Fatal(err)
		}
		ended := []kvferrypb.Failure_Code{kvferrypb.Failure_REVOKED, kvferrypb.Failure_STALE}
		wantFailure(t, <-failed, "slow", owner.Incarnation, ended...)
		wantFailure(t, to.retrieve(t.Context(), r, r.reference, patience), "slow", owner.Incarnation, ended...)
		heal()
		l.more(2)
		awaitFree(t, "slow", ownerAdmin, patience)
	})

	t.Run("reader is killed", func(t *testing.T) {
		heal := toxic(t, f.data, "bandwidth", crawl)
		defer heal()
		reader := another(t, c.must("prefill-0"), "doomed")
		victim := startAgent(t, reader)
		e := attach(t, victim.Engine)
		r := newRequest("its reader is killed", bigTokens)
		r.hold = time.Millisecond // nothing but the lease holds it
		read, ctx := errgroup.WithContext(t.Context())
		read.Go(func() error { return from.publish(ctx, r) })
		read.Go(func() error {
			<-r.begun
			err := e.retrieve(ctx, r, r.reference, patience)
			if err == nil {
				return errors.New("it was read by a node that was killed")
			}
			return nil
		})
		awaitLanded(t, e)
		// The hold is over at the final publish; a lease shows only now.
		await(t, "final and leased", patience, func(ctx context.Context) error {
			res, err := ownerAdmin.Publications(ctx, &kvferrypb.PublicationsRequest{})
			if len(res.GetItems()) == 1 && res.GetItems()[0].GetFinal() && res.GetItems()[0].GetLeases() == 1 {
				return nil
			}
			return errors.Join(err, fmt.Errorf("publications %v", res.GetItems()))
		})
		if used, err := conserved(t.Context(), ownerAdmin); err != nil || used == 0 {
			t.Errorf("owner holds %d pages while they are read: %v", used, err)
		}
		begin := time.Now()
		if err := syscall.Kill(victim.pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		awaitFree(t, "slow", ownerAdmin, lease+patience/3)
		t.Logf("pages are back %v after the reader's death, its lease is %v", time.Since(begin).Round(time.Millisecond), lease)
		if err := read.Wait(); err != nil {
			t.Error(err)
		}
		l.more(2)
	})

	t.Run("owner is killed", func(t *testing.T) {
		toxic(t, f.data, "bandwidth", crawl)
		clear(to.region.Bytes()) // nothing is read into it now
		r := newRequest("its owner is killed", bigTokens)
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		failed := make(chan error, 1)
		go func() { failed <- to.retrieve(t.Context(), r, r.reference, patience) }()
		awaitLanded(t, to)
		begin := time.Now()
		if err := syscall.Kill(owner.pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		err := <-failed
		took := time.Since(begin)
		wantFailure(t, err, "slow", owner.Incarnation, kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_TRANSPORT)
		t.Logf("reader knows after %v: %v", took.Round(time.Millisecond), err)
		if took > hangLimit {
			t.Errorf("it took %v", took)
		}
		l.more(4)
		awaitFree(t, "decode-0", dial(t, c.must("decode-0").Engine), patience)
	})
	l.end()
}

// awaitLanded waits until an engine sees bytes of the transfer that runs.
func awaitLanded(t *testing.T, e *engine) {
	t.Helper()
	const some = 100 << 10
	await(t, "bytes to land", patience, func(context.Context) error {
		if n := e.landed(some); n < some {
			return fmt.Errorf("%d have", n)
		}
		return nil
	})
}
