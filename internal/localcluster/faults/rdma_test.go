package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// Devices of a fabric.
const left, right = "double0", "double1"

// newFabric makes two devices that the nodes of one test share: what is wrong with
// them is wrong with no other test's. Where there can be none the test is skipped.
func newFabric(t *testing.T) *rdmatest.World {
	t.Helper()
	library, err := rdmatest.Build()
	if err == nil {
		err = rdma.Load(library) // the nodes do, if they are built as this test is
	}
	if err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp(built.dir, "w")
	if err != nil {
		t.Fatal(err)
	}
	w, err := rdmatest.NewWorld(dir, rdmatest.DeviceSpec{Name: left}, rdmatest.DeviceSpec{Name: right})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() }) // of nothing that could fail
	return w
}

// fabricOf is the environment of nodes that read by a transport, and the fabric
// that they need for it, or nil.
func fabricOf(t *testing.T, transport string) (*rdmatest.World, []string) {
	t.Helper()
	if transport != rdmaread.Name {
		return nil, nil
	}
	w := newFabric(t)
	return w, w.Env()
}

// startIn runs an agent that has the devices of a fabric.
func startIn(t *testing.T, w *rdmatest.World, c *config.Config) *agent {
	t.Helper()
	return startBelow(t, append([]string{"env"}, w.Env()...), c)
}

// awaitQueuePairs waits until a fabric has no more than so many.
func awaitQueuePairs(t *testing.T, w *rdmatest.World, most int) {
	t.Helper()
	await(t, "queue pairs to be destroyed", patience, func(context.Context) error {
		if c := w.Counts(); c.QPs > most {
			return fmt.Errorf("%d are left, want %d at most: %+v", c.QPs, most, c.Processes)
		}
		return nil
	})
}

// TestReplayByRDMA replays the demo on nodes that have one device each. Every byte
// is verified, and all have come by RDMA, though one of them could do otherwise.
func TestReplayByRDMA(t *testing.T) {
	t.Parallel()
	w := newFabric(t)
	c := start(t, localcluster.Options{
		Prefill: 1, Decode: 1, Env: w.Env(),
		Set:        []string{"arena.pages=1024", "arena.page_size=128", "arena.head_dim=64"},
		SetPrefill: []string{"transfer.transports=rdma", "transfer.rdma.devices=" + left},
		SetDecode:  []string{"transfer.transports=rdma,tcp", "transfer.rdma.devices=" + right + ":1"},
	})
	run := begin(t, testLimit, "", "replay", "../../../configs/traces/demo.jsonl", "--limit", "24", "--prefill", c.Sockets("prefill")[0], "--decode", c.Sockets("decode")[0], "-o", "json")
	code := run.code(t)
	r := reportOf(t, run)
	t.Logf("%d requests, %d bytes in %.1f s: %v", r.Requests, r.VerifiedBytes, r.ElapsedSeconds, r.BytesByTransport)
	if code != 0 || !r.OK || r.Ready != r.Requests || r.Requests == 0 || r.VerifiedBytes != r.ReadyBytes || r.WrongBytes != 0 || r.Early != 0 {
		t.Errorf("exit code %d\n%s%s", code, run.stdout.String(), run.stderr.String())
	}
	by := r.BytesByTransport
	if len(by) != 1 || by[rdmaread.Name] == 0 {
		t.Errorf("bytes by transport: %v, want all by rdma", by)
	}
	counts := w.Counts()
	if reader := counts.Devices[right]; int64(reader.ReadBytes) < by[rdmaread.Name] || counts.Devices[left].ReadBytes > 0 {
		t.Errorf("the devices have read %d and %d bytes, want nothing on the owner's and all of %v on the reader's", counts.Devices[left].ReadBytes, reader.ReadBytes, by)
	}
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
}

// TestFaultsInMidRead does by RDMA what TestFaultsInMidTransfer does over the
// network: whatever befalls an owner, a reader, or the fabric while bytes are read,
// another pair notices nothing.
func TestFaultsInMidRead(t *testing.T) {
	t.Parallel()
	const lease = 5 * time.Second // a machine that stands still for two seconds ends none
	w := newFabric(t)
	slow := rdmatest.Faults{Bandwidth: 3_000_000}                                                // of each device: 24 MiB take 4 s by both
	c := up(t, 1, 1, "timers.lease="+lease.String(), "timers.lease_renew=1s", "timers.stall=4s", // what is posted shares the wire
		"arena.layers=4", "arena.heads=8", "arena.head_dim=128") // 16 KiB a token
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-0"), 30) // by shared memory
	conf := func(name string) *config.Config {
		conf := another(t, c.must("prefill-0"), name)
		conf.Transfer.Transports = []string{rdmaread.Name}
		return conf
	}
	owner, reader := startIn(t, w, conf("owner")), startIn(t, w, conf("reader"))
	from, to := attach(t, owner.Engine), attach(t, reader.Engine)
	ownerAdmin, readerAdmin := dial(t, owner.Engine), dial(t, reader.Engine)
	moved := func(name string) {
		t.Helper()
		if err := move(t.Context(), newRequest(name, 50), from, to, true, patience); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	// begun is a read that has begun, and the end of it.
	begun := func(t *testing.T, name string, e *engine, slow rdmatest.Faults) (*request, chan error) {
		t.Helper()
		clear(e.region.Bytes()) // nothing is read into it now
		r := newRequest(name, bigTokens)
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		w.Set(slow)
		t.Cleanup(w.Clear)
		read := make(chan error, 1)
		go func() { read <- e.retrieve(t.Context(), r, r.reference, patience) }()
		awaitLanded(t, e)
		return r, read
	}
	awaitPeer(t, "reader", readerAdmin, "owner")
	moved("warm")
	pairs := w.Counts().QPs // of both sides
	ended := []kvferrypb.Failure_Code{kvferrypb.Failure_REVOKED, kvferrypb.Failure_STALE}

	t.Run("nothing is answered", func(t *testing.T) {
		w.Set(rdmatest.Faults{Lose: 1000, RetryWindow: 50 * time.Millisecond})
		t.Cleanup(w.Clear)
		begin := time.Now()
		r := newRequest("lost", 50)
		r.hold = 2 * time.Second // it will not be read
		err := move(t.Context(), r, from, to, true, patience)
		if f := wantFailure(t, err, "owner", owner.Incarnation, kvferrypb.Failure_TRANSPORT); f.GetTransport() != rdmaread.Name {
			t.Errorf("failure names transport %q: %v", f.GetTransport(), err)
		}
		if took := time.Since(begin); took > patience {
			t.Errorf("it took %v", took)
		}
		w.Clear()
		moved("answered again")
		l.more(2)
		awaitFree(t, "owner", ownerAdmin, patience)
		awaitQueuePairs(t, w, pairs)
	})

	t.Run("pages are reused under the read", func(t *testing.T) {
		r, read := begun(t, "its pages are reused", to, slow)
		late := slow
		late.LateDMA, late.Reorder = 300*time.Millisecond, true
		w.Set(late)
		revoke(t, ownerAdmin)
		// There are not enough pages for this one without those of the other.
		usurper := newRequest("the usurper", bigTokens)
		usurper.keep = true
		if err := from.publish(t.Context(), usurper); err != nil {
			t.Fatal(err)
		}
		wantFailure(t, <-read, "owner", owner.Incarnation, ended...)
		w.Clear()
		// Into the pages that the other was read into.
		if err := to.retrieve(t.Context(), usurper, usurper.reference, patience); err != nil {
			t.Errorf("who has the pages now: %v", err)
		}
		wantFailure(t, to.retrieve(t.Context(), r, r.reference, patience), "owner", owner.Incarnation, ended...)
		from.remove(usurper.name)
		l.more(2)
		awaitFree(t, "owner", ownerAdmin, patience)
		awaitFree(t, "reader", readerAdmin, patience)
	})

	t.Run("a port goes down", func(t *testing.T) {
		_, read := begun(t, "its port goes down", to, slow)
		if err := w.Event(left, rdmatest.PortError); err != nil {
			t.Fatal(err)
		}
		if err := <-read; err != nil {
			t.Errorf("there is another one: %v", err)
		}
		if n, err := metric(t.Context(), reader.HTTP.String(), "kvferry_rdma_lane_failures_total", `what="failover"`); err != nil || n == 0 {
			t.Errorf("%v windows went to another lane: %v", n, err)
		}
		w.Clear()
		moved("without the port")
		if err := w.Event(left, rdmatest.PortActive); err != nil {
			t.Fatal(err)
		}
		before := w.Counts().Devices[left].ReadBytes
		await(t, "the port to be used again", patience, func(ctx context.Context) error {
			if err := move(ctx, newRequest(fmt.Sprint("by the port ", time.Now()), 50), from, to, true, patience); err != nil {
				return err
			}
			if w.Counts().Devices[left].ReadBytes == before {
				return errors.New("nothing is read by it")
			}
			return nil
		})
		l.more(2)
	})

	t.Run("owner is stopped", func(t *testing.T) {
		_, read := begun(t, "its owner is stopped", to, slow)
		standstill(t, "owner", owner.pid)
		if share := to.share(bigTokens); share > 0.9 {
			t.Errorf("%.0f%% had landed before the owner stood still: the test shows nothing", 100*share)
		}
		w.Clear() // it is to end before gossip gives the owner up
		begin := time.Now()
		err := <-read // no processor of the owner takes part, nor in the seal
		took := time.Since(begin)
		if err := syscall.Kill(owner.pid, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if t.Logf("read to its end in %v", took.Round(time.Millisecond)); err != nil {
			t.Errorf("read from a stopped owner: %v", err)
		}
		w.Clear()
		l.more(2)
		awaitFree(t, "owner", ownerAdmin, patience) // the acknowledgement was heard at last
		awaitFree(t, "reader", readerAdmin, patience)
	})

	t.Run("reader is killed", func(t *testing.T) {
		victim := startIn(t, w, conf("doomed"))
		awaitPeer(t, "doomed", dial(t, victim.Engine), "owner")
		e := attach(t, victim.Engine)
		r := newRequest("its reader is killed", bigTokens)
		r.hold = time.Millisecond // nothing but the lease holds it
		w.Set(slow)
		t.Cleanup(w.Clear)
		read, ctx := errgroup.WithContext(t.Context())
		read.Go(func() error { return from.publish(ctx, r) })
		read.Go(func() error {
			<-r.begun
			if err := e.retrieve(ctx, r, r.reference, patience); err == nil {
				return errors.New("it was read by a node that was killed")
			}
			return nil
		})
		awaitLanded(t, e)
		begin := time.Now()
		victim.kill(t)
		awaitFree(t, "owner", ownerAdmin, lease+patience/3)
		t.Logf("pages are back %v after the reader's death, its lease is %v", time.Since(begin).Round(time.Millisecond), lease)
		if err := read.Wait(); err != nil {
			t.Error(err)
		}
		w.Clear()
		awaitQueuePairs(t, w, pairs)
		l.more(2)
	})

	t.Run("owner is killed", func(t *testing.T) {
		_, read := begun(t, "its owner is killed", to, slow)
		life := owner.Incarnation
		begin := time.Now()
		owner.kill(t)
		err := <-read
		took := time.Since(begin)
		wantFailure(t, err, "owner", life, kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_TRANSPORT)
		if t.Logf("reader knows after %v: %v", took.Round(time.Millisecond), err); took > hangLimit {
			t.Errorf("it took %v", took)
		}
		w.Clear()
		awaitFree(t, "reader", readerAdmin, patience)
		awaitQueuePairs(t, w, 0)
		owner = startIn(t, w, conf("owner"))
		from = attach(t, owner.Engine)
		moved("of the next life")
		l.more(4)
	})
	l.end()
	if n, err := readBytes(t.Context(), reader.HTTP.String(), rdmaread.Name); err != nil || n == 0 {
		t.Errorf("the reader has read %v bytes by RDMA: %v", n, err)
	}
}

// TestMemoryLockIsTooSmall: a node that has devices and may not lock its memory
// does not start, and says what it needs, what it may, and what to set.
func TestMemoryLockIsTooSmall(t *testing.T) {
	t.Parallel()
	w := newFabric(t)
	conf := alone(t)
	below := append([]string{"env"}, w.Env()...)
	below = append(below, "prlimit", "--memlock=65536:65536")
	if os.Getuid() == 0 { // who may lock as much as it likes
		below = append(below, "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock")
	}
	a, _ := launch(t, conf, below...)
	code, log := a.awaitExit(t)
	if code == 127 {
		t.Skipf("no prlimit or setpriv: %s", log)
	}
	refusedWith(t, conf, code, log, "memory lock limit", "are needed", "65536 are allowed", "ulimit -l")
}

// alone is the configuration of a node of no cluster.
func alone(t *testing.T) *config.Config {
	t.Helper()
	dir, err := os.MkdirTemp(built.dir, "a")
	if err != nil {
		t.Fatal(err)
	}
	c := config.Default()
	for _, set := range small("node.name=alone", "node.bind="+loopback(), "node.socket="+filepath.Join(dir, "sock"), "node.state_dir="+filepath.Join(dir, "state"),
		"ports.gossip=0", "ports.peer=0", "ports.data=0", "ports.http=0") {
		key, value, _ := strings.Cut(set, "=")
		if err := c.Set(key, value); err != nil {
			t.Fatal(err)
		}
	}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	return c
}

// storm is what may be wrong with a fabric at once; roll gives less than n.
func storm(roll func(n int) int) rdmatest.Faults {
	var f rdmatest.Faults
	for _, bad := range []func(){
		func() { f.Lose, f.RetryWindow = 1+roll(100), 20*time.Millisecond },
		func() { f.LateDMA = time.Duration(1+roll(100)) * time.Millisecond },
		func() { f.Reorder = true },
		func() { f.Fail = 1 + roll(50) },
		func() { f.PostENOMEM = 1 + roll(200) },
		func() { f.Delay, f.Jitter = time.Millisecond, 5*time.Millisecond },
		func() { f.Bandwidth = 20_000_000 },
	} {
		if roll(3) == 0 {
			bad()
		}
	}
	return f
}
