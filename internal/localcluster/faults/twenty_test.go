package faults

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
)

// TestOwnerRestartsTwentyTimes kills and restarts one owner twenty times, on the
// same ports and on others, while requests of its own and of others run. After
// each time it is of use at once, and nothing of an earlier life is.
func TestOwnerRestartsTwentyTimes(t *testing.T) {
	t.Parallel()
	c := up(t, 2, 2, "timers.lease=5s", "timers.lease_renew=1s", "timers.stall=3s", "timers.hold=10s", "timers.session_grace=1s")
	const owner = "prefill-1"
	to := c.engine("decode-0")
	others := []string{"prefill-0", "decode-0", "decode-1"}
	var watchers []*watcher
	for _, n := range others {
		watchers = append(watchers, watch(t, n, owner, dial(t, c.must(n).Engine)))
	}
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 60)
	if err := move(c.ctx, newRequest("first life", 80), c.engine(owner), to, false, patience); err != nil {
		t.Fatal(err)
	}
	before, err := usageOf(c.ctx, to.pid(c), c.must("decode-0").HTTP.String())
	if err != nil {
		t.Fatal(err)
	}

	// Requests of the owner itself, which its death may hit at any moment.
	ctx, stop := context.WithCancel(c.ctx)
	defer stop()
	var own sync.WaitGroup
	var mu sync.Mutex
	ready, typed := 0, 0
	own.Go(func() {
		for life := 0; ctx.Err() == nil; life++ {
			n, _ := c.Node(owner)
			from, err := openEngine(c.ctx, n.Engine, "prefill")
			if err != nil { // it is down just now
				pause(ctx, 10*time.Millisecond)
				continue
			}
			for i := 0; ctx.Err() == nil; i++ {
				err := move(c.ctx, newRequest(fmt.Sprintf("own/%d/%d", life, i), 60), from, to, i%2 == 0, readerWait)
				mu.Lock()
				switch {
				case err == nil:
					ready++
				case died(errors.Unwrap(err)), slices.Contains(readerCodes, client.CodeOf(err)):
					typed++
				default:
					t.Errorf("request of the owner ends with %v", err)
				}
				mu.Unlock()
				if err != nil {
					break
				}
			}
			_ = from.close() // its node may be gone
		}
	})

	slowest := time.Duration(0)
	for i := range 20 {
		samePorts := i%2 == 0
		old := c.must(owner)
		if err := c.Restart(c.ctx, owner, samePorts); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		life := c.must(owner)
		if life.Incarnation <= old.Incarnation || (life.Data == old.Data) != samePorts {
			t.Errorf("life %d at %v after %d at %v", life.Incarnation, life.Data, old.Incarnation, old.Data)
		}
		if err := move(c.ctx, newRequest(fmt.Sprint("life ", i), 80), c.engine(owner), to, true, patience); err != nil {
			t.Errorf("life %d: %v", i, err)
		}
		took := time.Since(begin)
		slowest = max(slowest, took)
		if took > hangLimit {
			t.Errorf("life %d is of use after %v, want %v at most", i, took, hangLimit)
		}
		l.more(1)
	}
	stop()
	own.Wait()
	l.end()
	for _, w := range watchers {
		w.report(t)
	}
	t.Logf("of use %v after the ready line at worst; of its own requests %d went well and %d ended with it", slowest.Round(time.Millisecond), ready, typed)
	if ready == 0 || typed == 0 {
		t.Error("its own requests were not there")
	}
	for _, n := range others {
		awaitFree(t, n, dial(t, c.must(n).Engine), patience)
	}
	awaitUsage(t, "decode-0", to.pid(c), c.must("decode-0").HTTP.String(), before, 12)
}

// pid is the process of the engine's node.
func (e *engine) pid(c *cluster) int { return c.must(e.node()).PID }
