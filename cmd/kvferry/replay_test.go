package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/replay"
)

var soak = flag.Duration("soak", 5*time.Second, "how long nodes are killed while a trace is replayed")

// alarm is what no node's log may have.
var alarm = regexp.MustCompile(`DATA RACE|panic:|fatal error:`)

// TestReplaySurvivesNodesThatDie kills, stops, and restarts real nodes at random
// while `kvferry replay` runs: no byte is wrong, every request ends, and whatever
// fails is explained by a node that died.
func TestReplaySurvivesNodesThatDie(t *testing.T) {
	program, err := exec.LookPath("kvferry") // this binary; see TestMain
	if err != nil {
		t.Fatal(err)
	}
	root, err := os.MkdirTemp("", "kvf")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	ctx, cancel := context.WithTimeout(t.Context(), *soak+3*time.Minute)
	defer cancel()
	c, err := localcluster.Up(ctx, localcluster.Options{
		Prefill: 2, Decode: 2, Binary: program, Root: root, Timeout: time.Minute,
		Set: []string{
			"cluster.preset=fast", "arena.pages=64", "arena.page_size=16", "timers.hold=2s", "timers.lease=2s", "timers.lease_renew=500ms",
			"timers.session_grace=1s", "timers.stall=1s", "timers.backoff_max=200ms",
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		for _, n := range c.Nodes() {
			log, err := os.ReadFile(n.Log())
			if at := alarm.FindIndex(log); err != nil || at != nil {
				t.Errorf("log of %s: %v\n%s", n.Node, err, log[max(0, at[0]-500):min(len(log), at[0]+3000)])
			} else if t.Failed() {
				t.Logf("end of the log of %s:\n%s", n.Node, log[max(0, len(log)-2000):])
			}
		}
		if err := c.Down(context.Background()); err != nil {
			t.Error(err)
		}
	}()

	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	var trace bytes.Buffer
	for range 40 {
		fmt.Fprintf(&trace, `{"timestamp": 0, "input_length": %d, "output_length": %d, "hash_ids": []}`+"\n", 1+rnd.IntN(300), rnd.IntN(30))
	}
	file := filepath.Join(root, "trace.jsonl")
	if err := os.WriteFile(file, trace.Bytes(), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"replay", file, "--loop", soak.String(), "--timeout", "30s", "--settle", "30s", "--expect-failures", "-o", "json"}
	for _, role := range []string{"prefill", "decode"} {
		for _, socket := range c.Sockets(role) {
			args = append(args, "--"+role, socket)
		}
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	var work sync.WaitGroup
	work.Go(func() { ended <- cmd.Wait() })
	defer func() { cancel(); work.Wait() }()
	if err := opened(ctx, c); err != nil { // it wants all nodes up at its start
		t.Fatal(err)
	}
	losses, err := killAtRandom(ctx, c, rnd, *soak)
	if err != nil {
		t.Error(err)
	}
	err = <-ended
	var r replay.Report
	if jsonErr := json.Unmarshal(stdout.Bytes(), &r); err != nil || jsonErr != nil {
		t.Fatalf("replay: %v, %v\n%s\n%s", err, jsonErr, stderr.Bytes(), stdout.Bytes())
	}
	t.Logf("%d nodes died; %d of %d requests ready, %d lost, %.1f s: %s", losses, r.Ready, r.Requests, r.Lost, r.ElapsedSeconds, failuresText(&r))
	if r.WrongBytes != 0 || r.VerifiedBytes != r.ReadyBytes || r.Ready+r.Failed != r.Requests || !r.Explained || r.Unexplained() != nil {
		t.Errorf("unexplained: %v\n%s", r.Unexplained(), stdout.Bytes())
	}
	seen := 0
	for _, n := range r.Nodes {
		seen += n.Losses
		if n.Lives > n.Losses+1 {
			t.Errorf("node %s: %d lives, %d losses", n.Node, n.Lives, n.Losses)
		}
	}
	for _, f := range r.Failures {
		if f.Longest > 20 {
			t.Errorf("a request ended with %s after %.1f s: nobody told it before", f.Code, f.Longest)
		}
	}
	if losses == 0 || seen < losses/2 || r.Ready < r.Requests/2 {
		t.Errorf("%d nodes died, the engines saw %d of them; %d of %d requests ready", losses, seen, r.Ready, r.Requests)
	}
}

// opened waits until every node has a session.
func opened(ctx context.Context, c *localcluster.Cluster) error {
	return localcluster.WaitFor(ctx, 10*time.Millisecond, func() error {
		for _, s := range c.Status(ctx) {
			if s.Status.GetSessions() == 0 {
				return fmt.Errorf("nobody uses node %s", s.Node.Node)
			}
		}
		return nil
	})
}

// killAtRandom ends nodes, one at a time, by SIGKILL or SIGTERM, and starts each
// again, on the same or other ports. It returns how many.
func killAtRandom(ctx context.Context, c *localcluster.Cluster, rnd *rand.Rand, long time.Duration) (n int, err error) {
	for begin := time.Now(); ; n++ {
		pause, cancel := context.WithTimeout(ctx, time.Duration(100+rnd.IntN(500))*time.Millisecond)
		<-pause.Done()
		cancel()
		if time.Since(begin) > long {
			return n, nil
		}
		nodes := c.Nodes()
		node := nodes[rnd.IntN(len(nodes))]
		if rnd.IntN(4) == 0 {
			if err := errors.Join(c.Kill(node.Node, syscall.SIGTERM), node.Wait(ctx)); err != nil {
				return n, err
			}
		}
		if err := c.Restart(ctx, node.Node, rnd.IntN(2) == 0); err != nil {
			return n, err
		}
	}
}

func failuresText(r *replay.Report) string {
	var all []string
	for _, f := range r.Failures {
		all = append(all, fmt.Sprintf("%s %d in up to %.1f s", f.Code, f.Count, f.Longest))
	}
	return strings.Join(all, ", ")
}

// TestVerdict: wrong bytes are told whatever else there is, and only with
// --expect-failures may requests fail.
func TestVerdict(t *testing.T) {
	lost := []replay.NodeReport{{Node: "n", Losses: 1}}
	failed := []replay.Failure{{Code: replay.CodeNodeLost, Count: 1, Explained: "it died"}}
	interrupted := errors.New("interrupted")
	for name, tt := range map[string]struct {
		report         *replay.Report
		err            error
		code, expected int // without and with --expect-failures
	}{
		"all is well":              {&replay.Report{OK: true, Ready: 1, Requests: 1}, nil, 0, 0},
		"a node died":              {&replay.Report{Ready: 1, Failed: 1, Requests: 2, Nodes: lost, Failures: failed}, nil, 1, 0},
		"no node died":             {&replay.Report{Ready: 1, Failed: 1, Requests: 2, Failures: failed}, nil, 1, 1},
		"something is left":        {&replay.Report{Ready: 1, Requests: 1, Nodes: []replay.NodeReport{{Left: []string{"a page"}}}}, nil, 1, 1},
		"wrong bytes":              {&replay.Report{Ready: 1, Failed: 1, Requests: 2, Nodes: lost, Failures: failed, WrongBytes: 1}, nil, 4, 4},
		"wrong bytes, interrupted": {&replay.Report{Requests: 2, WrongBytes: 1}, interrupted, 4, 4},
		"interrupted":              {&replay.Report{Ready: 1, Requests: 2, Nodes: lost}, interrupted, 1, 1},
		"nobody there":             {nil, fmt.Errorf("dial: %w", client.ErrUnreachable), 3, 3},
	} {
		got := []int{exitCode(verdict(tt.report, tt.err, false)), exitCode(verdict(tt.report, tt.err, true))}
		if want := []int{tt.code, tt.expected}; !slices.Equal(got, want) {
			t.Errorf("%s: exit codes %v without and with --expect-failures, want %v", name, got, want)
		}
	}
}
