package faults

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/replay"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

const (
	// requestTimeout is how long a replayed request may take. Nothing here takes
	// that long, so one that does hangs.
	requestTimeout = 2 * time.Minute
	// settleTime is what the replay waits for at its end, more than hold and lease.
	settleTime = time.Minute
	// longestFailure is how late a request may fail whose node is gone.
	longestFailure = 60.0 // seconds
)

// TestReplayWhileNodesDie replays a trace with the command line on three prefill
// and three decode nodes, one of each without shared memory, while nodes are
// killed or told to end and started again at random, on the same ports and on
// others, and stopped for a while. No byte is wrong, and every request is ready or ends with
// a code that such a node explains. Afterwards all nodes meet, all pages are free,
// and a node that lived through it uses no more than before; in device memory
// nothing is left of any of them.
func TestReplayWhileNodesDie(t *testing.T) {
	for name, secure := range map[string]bool{"plain": false, "secure": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			replayWhileNodesDie(t, localcluster.Options{Secure: secure}, shm.Name)
		})
	}
	t.Run("on devices", func(t *testing.T) {
		t.Parallel()
		w := newGPUs(t)
		replayWhileNodesDie(t, localcluster.Options{Env: w.Env(), Set: onDevices(w)}, cudaipc.Name, "--cuda-library", w.Library())
	})
}

// replayWhileNodesDie reads by the transport named, and from and to one node each
// by TCP.
func replayWhileNodesDie(t *testing.T, o localcluster.Options, transport string, flags ...string) {
	o.Prefill, o.Decode = 3, 3
	o.Set = append(o.Set, "arena.pages=64", "arena.page_size=16",
		"timers.hold=5s", "timers.lease=5s", "timers.lease_renew=1s", "timers.session_grace=1s", "timers.stall=3s")
	c := start(t, o)
	c.tcpOnly("prefill-1", "decode-1")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	trace := filepath.Join(built.dir, "trace-"+filepath.Base(t.Name())+".jsonl")
	var lines strings.Builder
	for range 40 {
		fmt.Fprintf(&lines, `{"timestamp": 0, "input_length": %d, "output_length": %d, "hash_ids": []}`+"\n", 1+rnd.IntN(300), rnd.IntN(30))
	}
	if err := os.WriteFile(trace, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"replay", trace, "--concurrency", "6", "--timeout", requestTimeout.String(), "--settle", settleTime.String(), "-o", "json"}, flags...)
	for _, role := range []string{"prefill", "decode"} {
		for _, socket := range c.Sockets(role) {
			args = append(args, "--"+role, socket)
		}
	}

	// With nobody dying every request is ready. It also makes every connection
	// that there will be.
	calm := beginIn(t, o.Env, testLimit, "", args...)
	code := calm.code(t)
	if r := reportOf(t, calm); code != 0 || !r.OK || r.Ready != r.Requests || r.Requests != 40 {
		t.Fatalf("before anybody dies: exit code %d\n%s%s", code, calm.stdout.String(), calm.stderr.String())
	}
	// The seed is not spared.
	spared := []string{"prefill-2", "decode-2"}
	before := make(map[string]usage)
	for _, name := range spared {
		n := c.must(name)
		var err error
		if before[name], err = usageOf(c.ctx, n.PID, n.HTTP.String()); err != nil {
			t.Fatal(err)
		}
	}

	foul := beginIn(t, o.Env, *soak+testLimit, "", append(args, "--loop", soak.String(), "--expect-failures")...)
	await(t, "its engines at all nodes, which it wants at its start", patience, func(ctx context.Context) error {
		for _, s := range c.Status(ctx) {
			if s.Status.GetSessions() == 0 {
				return fmt.Errorf("node %s has none: %w", s.Node.Node, errors.Join(s.Err, errors.New("no session")))
			}
		}
		return nil
	})
	kills, stops, story := disturb(t, c, rnd, spared)
	code = foul.code(t)
	r := reportOf(t, foul)
	t.Logf("%d nodes killed, %d stopped; %d of %d requests ready, %d lost, %.1f s, bytes %v: %s", kills, stops, r.Ready, r.Requests, r.Lost, r.ElapsedSeconds, r.BytesByTransport, failuresText(r))
	if code != 0 {
		t.Errorf("exit code %d\n%s", code, foul.stderr.String())
	}
	if r.WrongBytes != 0 || r.Early != 0 || r.VerifiedBytes != r.ReadyBytes || r.Ready+r.Failed != r.Requests || r.Unexplained() != nil {
		t.Errorf("unexplained: %v\n%s", r.Unexplained(), foul.stdout.String())
	}
	for _, f := range r.Failures {
		if f.Longest > longestFailure {
			t.Errorf("a request ended with %s after %.1f s: %v", f.Code, f.Longest, f.Examples)
		}
	}
	for _, transport := range []string{transport, tcp.Name} {
		if r.BytesByTransport[transport] == 0 {
			t.Errorf("nothing went over %s", transport)
		}
	}
	if kills == 0 || r.Ready < 10 {
		t.Errorf("%d nodes killed, %d of %d requests ready: nothing happened", kills, r.Ready, r.Requests)
	}
	for _, n := range r.Nodes {
		if n.Lives > n.Losses+1 {
			t.Errorf("node %s has had %d lives and %d losses", n.Node, n.Lives, n.Losses)
		}
		if slices.Contains(spared, n.Node) && n.Lives != 1 {
			t.Errorf("node %s was killed by nobody and has had %d lives", n.Node, n.Lives)
		}
	}

	if t.Failed() {
		t.Logf("what was done to the nodes:\n%s", story)
	}
	if err := c.Meet(c.ctx); err != nil {
		t.Fatal(err)
	}
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
	for _, name := range spared {
		n := c.must(name)
		awaitUsage(t, name, n.PID, n.HTTP.String(), before[name], 15)
	}
}

// disturb kills nodes, but those that are spared, or tells them to end, and starts
// them again, one at a time, and stops any for a moment, as long as the soak.
func disturb(t *testing.T, c *cluster, rnd *rand.Rand, spared []string) (kills, stops int, story string) {
	t.Helper()
	note := func(what string) { story += time.Now().Format("15:04:05.000 ") + what + "\n" }
	ctx, cancel := context.WithTimeout(c.ctx, *soak)
	defer cancel()
	all := c.Nodes()
	mortal := slices.DeleteFunc(slices.Clone(all), func(n localcluster.Node) bool { return slices.Contains(spared, n.Node) })
	for ctx.Err() == nil {
		pause(ctx, time.Duration(20+rnd.IntN(100))*time.Millisecond)
		if kills == 0 || rnd.IntN(3) > 0 {
			kills++
			name := mortal[rnd.IntN(len(mortal))].Node
			if kills%4 == 2 {
				note("end " + name)
				if err := errors.Join(c.Kill(name, syscall.SIGTERM), c.must(name).Wait(c.ctx)); err != nil {
					t.Fatal(err)
				}
			} else {
				note("kill " + name)
			}
			if err := c.Restart(c.ctx, name, rnd.IntN(2) == 0); err != nil {
				t.Fatal(err)
			}
			note(name + " is back")
			continue
		}
		stops++
		name := all[rnd.IntN(len(all))].Node
		note("stop " + name)
		if err := c.Kill(name, syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		pause(c.ctx, time.Duration(200+rnd.IntN(1800))*time.Millisecond)
		if err := c.Kill(name, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		note(name + " goes on")
	}
	return kills, stops, story
}

// reportOf is what a replay has said.
func reportOf(t *testing.T, c *command) *replay.Report {
	t.Helper()
	var r replay.Report
	if err := json.Unmarshal(c.stdout.Bytes(), &r); err != nil {
		t.Fatalf("replay said no report: %v\n%s%s", err, c.stdout.String(), c.stderr.String())
	}
	return &r
}

func failuresText(r *replay.Report) string {
	var all []string
	for _, f := range r.Failures {
		all = append(all, fmt.Sprintf("%s %d in up to %.1f s", f.Code, f.Count, f.Longest))
	}
	return strings.Join(all, ", ")
}
