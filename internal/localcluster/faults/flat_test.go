package faults

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// peerRestarts is how often a peer is started again: 200 times with a soak of 67 s.
func peerRestarts() int { return int(min(200, 3*soak.Seconds())) }

// footprint is what a process uses.
type footprint struct {
	usage
	threads  int
	mappings int // of addresses, all
	memory   int // mappings of memory files: arenas, seal tables
}

func footprintOf(ctx context.Context, pid int, http string) (f footprint, err error) {
	if f.usage, err = usageOf(ctx, pid, http); err != nil {
		return f, err
	}
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return f, err
	}
	f.threads = len(threads)
	maps, err := mapsOf(pid)
	f.mappings, f.memory = len(maps), memoryFiles(maps)
	return f, err
}

// mapsOf are the mappings of a process, a line each.
func mapsOf(pid int) ([]string, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	return strings.Split(strings.TrimSpace(string(maps)), "\n"), err
}

// memoryFiles are how many of the mappings are of memory files.
func memoryFiles(maps []string) (n int) {
	for _, line := range maps {
		if strings.Contains(line, "/memfd:") {
			n++
		}
	}
	return n
}

// TestPeerRestartsLeaveNothing starts a peer again and again, after SIGKILL and
// after SIGTERM, on the same ports and on others, and reads from each life. The
// reader uses nothing more for it: no file, goroutine, thread, mapping, or queue
// pair.
func TestPeerRestartsLeaveNothing(t *testing.T) {
	for _, transport := range hostTransports() {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			peerRestartsLeaveNothing(t, transport)
		})
	}
}

func peerRestartsLeaveNothing(t *testing.T, transport string) {
	const (
		peer   = "prefill-1"
		warmup = 4 // of every kind one
	)
	w, env := fabricOf(t, transport)
	c := start(t, localcluster.Options{Prefill: 2, Decode: 1, Env: env, Set: []string{
		"transfer.transports=" + transport, "timers.lease=5s", "timers.lease_renew=1s", "timers.hold=5s", "timers.stall=3s",
	}})
	to, reader := c.engine("decode-0"), c.must("decode-0")
	restarts := peerRestarts()
	// What the runtime may have more at one time than at another: far less than
	// one of each a restart. A thread has four mappings, and the race detector
	// its own of what it has seen.
	spare := footprint{usage: usage{files: 3, goroutines: 3}, threads: 4, mappings: 12 + restarts/8}
	begin := time.Now()
	var before footprint
	var devices rdmatest.Tally
	for i := range warmup + restarts {
		if i == warmup {
			before = settled(t, reader.PID, reader.HTTP.String())
			devices = openOf(w)
		}
		if i%4 < 2 {
			if err := c.Kill(peer, syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := c.must(peer).Wait(c.ctx); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Restart(c.ctx, peer, i%2 == 0); err != nil {
			t.Fatal(err)
		}
		from, err := openEngine(c.ctx, c.must(peer).Engine, "both")
		if err != nil {
			t.Fatal(err)
		}
		err = move(c.ctx, newRequest(fmt.Sprint("life ", i), 60), from, to, true, patience)
		if _ = from.close(); err != nil { // its node is gone soon
			t.Fatalf("life %d: %v", i, err)
		}
	}
	t.Logf("%d restarts in %v; before %+v", restarts, time.Since(begin).Round(time.Second), before)
	var now footprint
	await(t, "the reader to use no more than before", patience, func(ctx context.Context) (err error) {
		now, err = footprintOf(ctx, reader.PID, reader.HTTP.String())
		if err == nil && (now.files > before.files+spare.files || now.goroutines > before.goroutines+spare.goroutines ||
			now.threads > before.threads+spare.threads || now.mappings > before.mappings+spare.mappings || now.memory > before.memory) {
			err = fmt.Errorf("%+v", now)
		}
		if open := openOf(w); err == nil && open != devices {
			err = fmt.Errorf("of the devices is open %+v, before %+v", open, devices)
		}
		return err
	})
	t.Logf("after them %+v", now)
	n, err := readBytes(c.ctx, reader.HTTP.String(), transport)
	if err != nil || n < float64(restarts*60*128) {
		t.Errorf("%v bytes were read over %s: %v", n, transport, err)
	}
	awaitFree(t, reader.Node, dial(t, reader.Engine), patience)
}

// openOf is what is open of a fabric's devices; nothing, if there is none.
func openOf(w *rdmatest.World) (t rdmatest.Tally) {
	if w != nil {
		c := w.Counts()
		t = rdmatest.Tally{Contexts: c.Contexts, PDs: c.PDs, Regions: c.Regions, CQs: c.CQs, QPs: c.QPs, Channels: c.Channels}
	}
	return t
}

// settled is what a process uses once two looks in a row have found the same.
func settled(t *testing.T, pid int, http string) (f footprint) {
	t.Helper()
	await(t, "a process to settle", patience, func(ctx context.Context) error {
		was := f
		var err error
		if f, err = footprintOf(ctx, pid, http); err == nil && f != was {
			err = fmt.Errorf("%+v, then %+v", was, f)
		}
		return err
	})
	return f
}
