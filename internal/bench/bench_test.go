package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/transfer"
)

// ownerMark makes the test binary the other process of a pull.
const ownerMark = "KVFERRY_TEST_BENCH_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerMark) != "" {
		if err := ServeOwner(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// small measures quickly, and nothing that could be relied upon.
func small(t *testing.T) Options {
	t.Helper()
	t.Setenv(ownerMark, "1")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return Options{
		Owner: []string{self}, ChunkBytes: []int64{4 << 10, 64 << 10}, Rounds: 2,
		ArenaBytes: 8 << 20, Duration: time.Millisecond,
	}
}

func TestRun(t *testing.T) {
	o := small(t)
	o.Parts = []string{"plan", "ready", "pull"}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	pulls := 0
	for _, row := range r.Rows {
		if row.BytesPerSecond > 0 {
			pulls++
			if row.Rounds != 2 || row.BytesPerSecondMin > row.BytesPerSecond || row.BytesPerSecond > row.BytesPerSecondMax {
				t.Errorf("row %+v", row)
			}
			if row.Limit != "" && (row.Ratio <= 0 || row.RatioMin > row.Ratio || row.Ratio > row.RatioMax) {
				t.Errorf("ratio of %+v", row)
			}
		}
	}
	if pulls != 2 {
		t.Errorf("%d rows of pulls, want 2", pulls)
	}
	if _, err := findIperf(); err == nil {
		if len(r.Missing) != 1 || !strings.Contains(r.Missing[0], "publish to ready") {
			t.Errorf("missing %q, want publish to ready alone: no nodes were named", r.Missing)
		}
		if len(r.Figures) != 3 {
			t.Errorf("figures %+v, want the pull and two of planning", r.Figures)
		}
	}
	if r.OK() {
		t.Error("a report with something missing is OK")
	}
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{table.String(), r.Markdown()} {
		if !strings.Contains(text, "64 KiB") || !strings.Contains(text, r.Machine.Kernel) {
			t.Errorf("report says:\n%s", text)
		}
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var back Report
	if err := json.Unmarshal(text, &back); err != nil || len(back.Rows) != len(r.Rows) {
		t.Errorf("JSON gives %d of %d rows back, %v", len(back.Rows), len(r.Rows), err)
	}
}

func TestPullChecksBytes(t *testing.T) {
	o, err := small(t).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPuller(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	if _, err := p.pull(t.Context(), o, 64<<10, 1); err != nil {
		t.Fatal(err)
	}
	c := scatter(o.ArenaBytes, 64<<10, rand.New(rand.NewPCG(1, 64<<10)))[7]
	if err := checkContent(p.memory.arena, c); err != nil {
		t.Fatal(err)
	}
	p.memory.arena.Bytes()[c.Local+c.Bytes-1] ^= 1
	if err := checkContent(p.memory.arena, c); err == nil {
		t.Error("a flipped bit was not found")
	}
	// What does not hold is no measurement.
	p.seals[0].Value++
	if _, err := p.pull(t.Context(), o, 64<<10, 2); err == nil {
		t.Error("a stale pull was measured")
	}
}

func TestScatterMovesEverythingOnce(t *testing.T) {
	const size, n = 4 << 10, 64
	remote, local := make(map[int64]bool), make(map[int64]bool)
	follow := 0
	var last transfer.Copy
	for _, c := range scatter(n*size+100, size, rand.New(rand.NewPCG(1, 2))) {
		if c.Bytes != size || c.Remote%size != 0 || c.Local%size != 0 || c.Remote > (n-1)*size || c.Local > (n-1)*size {
			t.Fatalf("copy %+v", c)
		}
		remote[c.Remote], local[c.Local] = true, true
		if c.Remote == last.Remote+size {
			follow++
		}
		last = c
	}
	if len(remote) != n || len(local) != n {
		t.Errorf("%d chunks go to %d places, want %d", len(remote), len(local), n)
	}
	if follow > 8 {
		t.Errorf("%d of %d chunks follow their neighbour", follow, n)
	}
}

func TestOwnerThatDies(t *testing.T) {
	o, err := small(t).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	o.Owner = []string{"/bin/sh", "-c", "exit 3"}
	if _, err := newPuller(t.Context(), o); err == nil {
		t.Error("a puller without an owner")
	}
	o.Owner = []string{"/nonexistent"}
	if _, err := newPuller(t.Context(), o); err == nil {
		t.Error("a puller without an owner")
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"unknown part":    {Parts: []string{"speed"}},
		"one node":        {Prefill: "/a"},
		"twice the same":  {Prefill: "/a", Decode: "/a"},
		"odd chunk":       {ChunkBytes: []int64{100}},
		"chunk of 0":      {ChunkBytes: []int64{0}},
		"huge chunk":      {ChunkBytes: []int64{1 << 40}},
		"tiny arena":      {ArenaBytes: 64 << 10},
		"huge arena":      {ArenaBytes: 1 << 50},
		"no concurrency":  {Concurrency: -1},
		"many at once":    {Concurrency: MaxConcurrency + 1},
		"negative rounds": {Rounds: -1},
		"negative time":   {Duration: -1},
		"endless time":    {Duration: MaxDuration + 1},
		"many samples":    {Samples: MaxSamples + 1},
	} {
		if _, err := Run(t.Context(), o); err == nil {
			t.Errorf("%s: measured", name)
		}
	}
}

func TestParseIperf(t *testing.T) {
	rate, err := parseIperf([]byte(`{"end":{"sum_received":{"bits_per_second":16e9}}}`))
	if err != nil || rate != 2e9 {
		t.Errorf("rate = %v, %v", rate, err)
	}
	for _, bad := range []string{"", "iperf3: error", `{"error":"unable to connect to server"}`, `{"end":{"sum_received":{"bits_per_second":0}}}`, `{}`} {
		if _, err := parseIperf([]byte(bad)); err == nil {
			t.Errorf("parsed %q", bad)
		}
	}
}

func TestFigures(t *testing.T) {
	r := &Report{Figures: []Figure{floor("speed", 0.59, "of the limit", 0.6), ceiling("time", 2, "ms", 2)}}
	if r.OK() || r.Figures[0].Met || !r.Figures[1].Met {
		t.Errorf("figures %+v", r.Figures)
	}
	if text := r.Markdown(); !strings.Contains(text, "MISSED") {
		t.Errorf("a missed floor is not reported as missed:\n%s", text)
	}
}

func TestSpread(t *testing.T) {
	if s := spreadOf([]float64{3, 1, 2}); s != (spread{2, 1, 3}) {
		t.Errorf("odd: %+v", s)
	}
	if s := spreadOf([]float64{4, 1, 2, 3}); s != (spread{2.5, 1, 4}) {
		t.Errorf("even: %+v", s)
	}
}

func TestNoWarmup(t *testing.T) {
	for given, want := range map[int]int{0: 50, -1: 0, 7: 7} {
		if o, err := (Options{Warmup: given}).withDefaults(); err != nil || o.Warmup != want {
			t.Errorf("warmup %d is %d, %v, want %d", given, o.Warmup, err, want)
		}
	}
}
