package faults

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// readerCodes are how a retrieve may end when its owner may die at any time.
var readerCodes = []kvferrypb.Failure_Code{
	kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_STALE, kvferrypb.Failure_REVOKED, kvferrypb.Failure_EXPIRED,
	kvferrypb.Failure_TRANSPORT, kvferrypb.Failure_NOT_FOUND, kvferrypb.Failure_DEADLINE,
}

// readerWait is each retrieve's deadline in the chaos test.
const readerWait = 4 * time.Second

// tally is how the requests of the chaos test ended.
type tally struct {
	mu      sync.Mutex
	ready   int
	cut     int // the publisher's node died under it
	givenUp int // the reader did not wait for its end
	typed   map[kvferrypb.Failure_Code]int
	strange []error
}

func (y *tally) count(f func()) { y.mu.Lock(); defer y.mu.Unlock(); f() }

func (y *tally) wasReady() bool { y.mu.Lock(); defer y.mu.Unlock(); return y.ready > 0 }

// TestChaos kills and restarts prefill nodes at random while requests run, over
// shared memory and TCP at once, or by RDMA, over a fabric that loses, delays, and
// refuses. Some of the readers give up, and some of the publishers revoke, at any
// moment. There are few pages more than are in use at once, so that what was
// released is soon written again.
func TestChaos(t *testing.T) {
	for name, transports := range map[string][]string{"shm and tcp": {shm.Name, tcp.Name}, "rdma": {rdmaread.Name}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			chaos(t, transports)
		})
	}
}

func chaos(t *testing.T, transports []string) {
	w, env := fabricOf(t, transports[0])
	c := start(t, localcluster.Options{Prefill: 3, Decode: 2, Env: env, Set: []string{
		"arena.pages=140", "arena.layers=4", "arena.heads=4", "arena.head_dim=64", // 4 KiB a token
		"timers.lease=2s", "timers.lease_renew=500ms", "timers.hold=3s", "timers.session_grace=1s", "timers.stall=1s", // they may run out
		"transfer.transports=" + strings.Join(transports, ","),
	}})
	prefill := []string{"prefill-0", "prefill-1", "prefill-2"}
	if w == nil {
		c.tcpOnly("prefill-1")
	}
	decode := []*engine{c.engine("decode-0"), c.engine("decode-1")}
	for _, p := range prefill {
		for _, d := range decode {
			if err := move(t.Context(), newRequest("warm "+p+d.node(), 60), c.engine(p), d, true, patience); err != nil {
				t.Fatal(err)
			}
		}
	}
	before, warm := make(map[string]usage), make(map[string]float64)
	for _, d := range decode {
		n := c.must(d.node())
		u, err := usageOf(t.Context(), n.PID, n.HTTP.String())
		if err != nil {
			t.Fatal(err)
		}
		before[n.Node] = u
		for _, transport := range transports {
			read, err := readBytes(t.Context(), n.HTTP.String(), transport)
			if err != nil {
				t.Fatal(err)
			}
			warm[transport] += read
		}
	}

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	y := &tally{typed: make(map[kvferrypb.Failure_Code]int)}
	var work sync.WaitGroup
	for worker := range 4 {
		work.Go(func() {
			chaosWorker(ctx, c, y, worker, prefill, decode[worker%2], rand.New(rand.NewPCG(seed, uint64(worker))))
		})
	}
	if w != nil {
		work.Go(func() { storms(ctx, w, rand.New(rand.NewPCG(seed, 100))) })
	}
	// sum is what the decode nodes have counted together.
	sum := func(name string, labels ...string) (sum float64) {
		t.Helper()
		for _, d := range decode {
			n, err := metric(t.Context(), c.must(d.node()).HTTP.String(), name, labels...)
			if err != nil {
				t.Fatal(err)
			}
			sum += n
		}
		return sum
	}
	const lanes = "kvferry_rdma_lane_failures_total"
	kills := 0
	// enough says that something of everything has happened.
	enough := func() bool {
		some := kills > 0 && y.wasReady() && (w == nil || sum(lanes) > 0)
		for _, transport := range transports {
			some = some && sum(readMetric, labelOf(transport)) > warm[transport]
		}
		return some
	}
	rnd := rand.New(rand.NewPCG(seed, 99))
	// The soak, and as long as a slow machine takes for the least of it.
	for begin := time.Now(); time.Since(begin) < *soak || !enough() && time.Since(begin) < *soak+2*patience; {
		pause(ctx, time.Duration(200+rnd.IntN(600))*time.Millisecond)
		if err := c.Restart(c.ctx, prefill[rnd.IntN(len(prefill))], rnd.IntN(2) == 0); err != nil {
			t.Errorf("restart: %v", err)
			break
		}
		kills++
	}
	cancel()
	work.Wait()
	t.Logf("%d kills; %d requests ready, %d given up, %d whose publisher died, failures %v", kills, y.ready, y.givenUp, y.cut, y.typed)
	for _, err := range y.strange {
		t.Errorf("request ended strangely: %v", err)
	}
	if kills == 0 || y.ready == 0 {
		t.Error("nothing happened")
	}
	for _, transport := range transports {
		read := sum(readMetric, labelOf(transport)) - warm[transport]
		if t.Logf("%.0f bytes over %s", read, transport); read == 0 {
			t.Errorf("nothing went over %s", transport)
		}
	}
	if w != nil {
		broken := sum(lanes)
		if t.Logf("lanes were replaced and windows moved %.0f times", broken); broken == 0 {
			t.Error("nothing was wrong with the fabric")
		}
	}

	if err := c.Meet(c.ctx); err != nil {
		t.Fatal(err)
	}
	for _, p := range prefill {
		for _, d := range decode {
			if err := move(t.Context(), newRequest("after "+p+d.node(), 60), c.engine(p), d, true, patience); err != nil {
				t.Errorf("after all: %v", err)
			}
		}
	}
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
	for _, d := range decode {
		n := c.must(d.node())
		awaitUsage(t, n.Node, n.PID, n.HTTP.String(), before[n.Node], 15)
	}
}

// storms changes what is wrong with a fabric, and leaves it in order.
func storms(ctx context.Context, w *rdmatest.World, rnd *rand.Rand) {
	defer w.Clear()
	for ctx.Err() == nil {
		w.Set(storm(rnd.IntN))
		pause(ctx, time.Duration(50+rnd.IntN(200))*time.Millisecond)
	}
}

// chaosWorker moves requests from a random prefill node of the moment.
func chaosWorker(ctx context.Context, c *cluster, y *tally, worker int, prefill []string, to *engine, rnd *rand.Rand) {
	for i := 0; ctx.Err() == nil; i++ {
		n, _ := c.Node(prefill[rnd.IntN(len(prefill))])
		from, err := openEngine(c.ctx, n.Engine, "prefill")
		if err != nil { // it is down just now
			pause(ctx, 20*time.Millisecond)
			continue
		}
		chaosRequests(ctx, c, y, fmt.Sprintf("chaos/%d/%d", worker, i), from, to, rnd)
		_ = from.close() // its node may be gone
	}
}

// chaosRequests goes on until the publisher fails.
func chaosRequests(ctx context.Context, c *cluster, y *tally, name string, from, to *engine, rnd *rand.Rand) {
	for i := 0; ctx.Err() == nil; i++ {
		r := newRequest(fmt.Sprintf("%s/%d", name, i), 20+rnd.IntN(200))
		if rnd.IntN(2) == 0 {
			r.target = to.node()
		}
		readCtx, giveUp := context.WithCancel(c.ctx)
		var revoked time.Duration // after the publish
		switch rnd.IntN(8) {
		case 0:
			time.AfterFunc(time.Duration(rnd.IntN(60))*time.Millisecond, giveUp)
			r.hold = 200 * time.Millisecond // it may stay unread
		case 1:
			r.keep = true
			revoked = time.Duration(rnd.IntN(20)) * time.Millisecond
		}
		published := make(chan error, 1)
		go func() {
			err := from.publish(c.ctx, r)
			if err == nil && r.keep {
				pause(c.ctx, revoked)
				from.remove(r.name)
			}
			published <- err
		}()
		byReference := rnd.IntN(2) == 0
		var publishErr error
		if byReference {
			select {
			case <-r.begun:
			case publishErr = <-published:
				published <- publishErr
			}
		}
		var readErr error
		if publishErr == nil {
			readErr = to.retrieve(readCtx, r, r.given(byReference), readerWait)
		}
		gaveUp := readCtx.Err() != nil
		giveUp()
		publishErr = <-published
		y.count(func() {
			code := client.CodeOf(readErr)
			switch {
			case publishErr != nil && !died(publishErr):
				y.strange = append(y.strange, fmt.Errorf("publish: %w", publishErr))
			case readErr != nil && gaveUp && !errors.Is(readErr, errWrongBytes) && !errors.Is(readErr, errEarly):
				y.givenUp++
			case readErr != nil && !slices.Contains(readerCodes, code):
				y.strange = append(y.strange, fmt.Errorf("retrieve: %w", readErr))
			case readErr != nil:
				y.typed[code]++
			case publishErr == nil:
				y.ready++
			}
			if publishErr != nil {
				y.cut++
			}
		})
		if publishErr != nil {
			return
		}
	}
}

// died says whether a call failed as it does when the node dies under it.
func died(err error) bool {
	return errors.Is(err, client.ErrUnreachable) || client.CodeOf(err) == kvferrypb.Failure_NO_SESSION || status.Code(errors.Unwrap(err)) == codes.Unavailable
}
