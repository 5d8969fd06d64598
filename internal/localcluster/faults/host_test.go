package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/replay"
)

// replayTwoLabels replays requests of two labels on one pair of nodes whose
// arenas hold two of them, and disturbs that until it has ended. No byte is
// wrong, and nothing is left. It returns the report, and the moves of each node
// that have ended well, those to the host and those back.
func replayTwoLabels(t *testing.T, loop, timeout time.Duration, disturb func(context.Context, *cluster), set ...string) (r *replay.Report, moves map[string][2]float64) {
	t.Helper()
	c := start(t, localcluster.Options{Prefill: 1, Decode: 1, Set: append([]string{
		"arena.pages=65", "arena.host_pages=160",
	}, set...)})
	trace := filepath.Join(built.dir, "trace-"+filepath.Base(t.Name())+".jsonl")
	lines := strings.Repeat(`{"timestamp": 0, "input_length": 101, "output_length": 6, "hash_ids": []}`+"\n", 12) // 28 pages
	if err := os.WriteFile(trace, []byte(lines), 0o600); err != nil {
		t.Fatal(err)
	}
	run := begin(t, loop+testLimit, "", "replay", trace, "--prefill", c.Sockets("prefill")[0], "--decode", c.Sockets("decode")[0],
		"--labels", "2", "--concurrency", "6", "--chunk", "32", "--step-pause", "20ms", "--loop", loop.String(), "--timeout", timeout.String(), "-o", "json")
	ctx, stop := context.WithCancel(c.ctx)
	defer stop()
	if disturb != nil {
		done := make(chan struct{})
		go func() {
			defer close(done)
			disturb(ctx, c)
		}()
		<-run.ended
		stop()
		<-done
	}
	code := run.code(t)
	r = reportOf(t, run)
	t.Logf("%d of %d requests ready in %.1f s, found on the host %d times, %d reloads, %d retries: %s", r.Ready, r.Requests, r.ElapsedSeconds, r.Offloading, r.Reloads, r.Retries, failuresText(r))
	if r.Corrupt() || r.Ready+r.Failed != r.Requests || r.VerifiedBytes != int64(r.Ready)*101*128*2 || (code == 0) != r.OK {
		t.Errorf("exit code %d\n%s%s", code, run.stdout.String(), run.stderr.String())
	}
	for _, n := range r.Nodes {
		if len(n.Left) > 0 {
			t.Errorf("left on node %s: %v", n.Node, n.Left)
		}
	}
	moves = make(map[string][2]float64)
	for _, n := range c.Nodes() {
		var both [2]float64
		for i, direction := range []string{"offload", "reload"} {
			var err error
			if both[i], err = metric(c.ctx, n.HTTP.String(), "kvferry_offloads_total", `direction="`+direction+`"`, `result="ok"`); err != nil {
				t.Fatal(err)
			}
		}
		moves[n.Node] = both
		admin := dial(t, n.Engine)
		awaitFree(t, n.Node, admin, patience)
		await(t, "the host pages of "+n.Node, patience, func(ctx context.Context) error {
			s, err := admin.Status(ctx, &kvferrypb.StatusRequest{})
			if p := s.GetPages(); err == nil && p.GetHostFree() != p.GetHostTotal() {
				err = fmt.Errorf("%d of %d are free", p.GetHostFree(), p.GetHostTotal())
			}
			return err
		})
	}
	t.Logf("moves to the host and back: %v", moves)
	return r, moves
}

// wantReady makes sure that every request was ready.
func wantReady(t *testing.T, r *replay.Report) {
	t.Helper()
	if !r.OK {
		t.Errorf("%d of %d requests ready: %+v", r.Ready, r.Requests, r.Failures)
	}
}

// TestReplayThroughTheHost has more requests at work than the arena of the
// decode node holds.
func TestReplayThroughTheHost(t *testing.T) {
	t.Parallel()
	for _, evict := range []string{"recent", "pages"} {
		t.Run(evict, func(t *testing.T) {
			r, moves := replayTwoLabels(t, 0, requestTimeout, nil, "arena.evict="+evict)
			wantReady(t, r)
			if m := moves["decode-0"]; m[0] == 0 || m[1] == 0 || r.Reloads == 0 {
				t.Errorf("%v moves to the host and back on the decode node, %d for its engine, want some", m, r.Reloads)
			}
		})
	}
	// Where nothing makes room, they wait for each other, and are told so; one may
	// get its pages so late that it runs out of time with them. On a busy machine
	// that may be all of them.
	t.Run("never", func(t *testing.T) {
		r, moves := replayTwoLabels(t, 0, 3*time.Second, nil, "arena.evict=never")
		if moves["prefill-0"][0]+moves["decode-0"][0] > 0 || r.Ready+r.Failed != r.Requests {
			t.Errorf("moves %v, want none; %d ready and %d failed of %d", moves, r.Ready, r.Failed, r.Requests)
		}
		for _, f := range r.Failures {
			if f.Code != kvferrypb.Failure_RESOURCE_EXHAUSTED.String() && f.Code != replay.CodeTimeout {
				t.Errorf("failure %+v, want RESOURCE_EXHAUSTED", f)
			}
		}
	})
}

// TestReplayWhileEverythingIsOffloaded has an operator move to the host whatever
// there is, on both nodes: what is published and being read, too.
func TestReplayWhileEverythingIsOffloaded(t *testing.T) {
	t.Parallel()
	r, moves := replayTwoLabels(t, *soak/2, requestTimeout, offloadAll)
	wantReady(t, r)
	for name, m := range moves {
		if m[0] == 0 || m[1] == 0 {
			t.Errorf("%v moves to the host and back on %s, want some", m, name)
		}
	}
}

// offloadAll asks both nodes again and again to offload every request that they
// have. They may refuse.
func offloadAll(ctx context.Context, c *cluster) {
	var nodes []kvferrypb.AdminClient
	for _, n := range c.Nodes() {
		nodes = append(nodes, dial(c.t, n.Engine))
	}
	for ctx.Err() == nil {
		for _, admin := range nodes {
			arena, err := admin.Arena(ctx, &kvferrypb.ArenaRequest{})
			if err != nil {
				continue
			}
			for _, s := range arena.GetItems() {
				_, _ = admin.Offload(ctx, &kvferrypb.AdminOffloadRequest{Request: s.GetRequest()})
			}
		}
		pause(ctx, 20*time.Millisecond)
	}
}
