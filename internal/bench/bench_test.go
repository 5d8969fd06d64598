package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/rdma/rdmatest"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

var update = flag.Bool("update", false, "write testdata")

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
	// Before a test has the machine's own library loaded: one a process is.
	if library, err := rdmatest.Build(); err == nil {
		_ = rdma.Load(library) // tests that need it skip, with the reason
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
	o.Parts = []string{"plan", "submit", "ready", "pull"}
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	missing := strings.Join(r.Missing, "\n")
	if !strings.Contains(missing, "publish to ready") || r.Check() == nil {
		t.Errorf("missing %q, want publish to ready: no nodes were named", r.Missing)
	}
	rows, figures := 0, 2 // of planning
	for _, name := range Transports() {
		if strings.Contains(missing, "pull by "+name+":") && name != tcp.Name {
			t.Logf("not measured: %s", missing)
			continue
		}
		rows, figures = rows+4, figures+2
		if !strings.Contains(missing, "limit of the pull by "+name) {
			figures += 2 // two sizes
		}
	}
	if len(r.Rows) != rows || len(r.Figures) != figures {
		t.Errorf("%d rows and %d figures, want %d and %d:\n%+v\n%+v\n%s", len(r.Rows), len(r.Figures), rows, figures, r.Rows, r.Figures, missing)
	}
	for _, row := range r.Rows {
		if row.Rounds != 2 || row.BytesPerSecond <= 0 || row.CPUSecondsPerGiB <= 0 || row.P50 <= 0 || row.P99 < row.P50 || row.Lanes < 1 || row.Concurrency != 1 {
			t.Errorf("row %+v", row)
		}
		if row.Limit != "" && (row.LimitBytesPerSecond <= 0 || row.RatioMin <= 0 || row.RatioMin > row.Ratio || row.Ratio > row.RatioMax) {
			t.Errorf("ratio of %+v", row)
		}
	}
	for _, c := range r.Costs {
		if c.Transport != "" && c.AllocsPerPage != 0 {
			t.Errorf("a read allocates more for more pages: %+v", c)
		}
		if c.NanosPerPage <= 0 || c.Rounds != 2 {
			t.Errorf("cost %+v", c)
		}
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	var table bytes.Buffer
	if err := r.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{table.String(), r.Markdown("")} {
		if !strings.Contains(text, "64 KiB") || !strings.Contains(text, r.Machine.Kernel) {
			t.Errorf("report says:\n%s", text)
		}
	}
}

// What is interrupted leaves no process, as goleak sees, and no file.
func TestInterrupted(t *testing.T) {
	o := small(t)
	o.Parts, o.Rounds, o.Duration = []string{"pull"}, MaxRounds, time.Second
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("terminated signal received")
	o.Progress = cancelAt{"round 1 of", func() { cancel(cause) }}
	if _, err := Run(ctx, o); !errors.Is(err, cause) || err.Error() != "bench: interrupted in pull: "+cause.Error() {
		t.Errorf("interrupted: %v", err)
	}
	if left, err := os.ReadDir(tmp); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

type cancelAt struct {
	text   string
	cancel func()
}

func (c cancelAt) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(c.text)) {
		c.cancel()
	}
	return len(b), nil
}

func TestPullChecksBytes(t *testing.T) {
	o, err := small(t).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p, err := newPuller(t.Context(), o, setup{ArenaBytes: o.ArenaBytes, Transports: o.Transports})
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	for name := range p.links {
		for _, contiguity := range []float64{0, 0.5, 1} {
			load := pullLoad{64 << 10, contiguity}
			copies := scatter(o.ArenaBytes, load, rand.New(rand.NewPCG(1, 2)))
			batches := batch(copies, load.chunkBytes, o.ArenaBytes, 3)
			clear(p.arena.Bytes())
			if _, err := p.pull(t.Context(), name, batches, 3, 0); err != nil {
				t.Fatal(err)
			}
			c := copies[len(copies)/2]
			p.arena.Bytes()[c.Local+c.Bytes-1] ^= 1
			if err := checkContent(p.arena, c); err == nil {
				t.Errorf("%s, %v: a flipped bit was not found", name, load)
			}
		}
		// What does not hold is no measurement.
		p.seals[0].Value++
		if _, err := p.pull(t.Context(), name, batch(scatter(o.ArenaBytes, pullLoad{64 << 10, 0}, rand.New(rand.NewPCG(1, 2))), 64<<10, o.ArenaBytes, 1), 1, 0); err == nil {
			t.Errorf("%s: a stale pull was measured", name)
		}
		p.seals[0].Value--
	}
}

func TestScatterMovesEverythingOnce(t *testing.T) {
	const size, n = 64, 200
	for _, contiguity := range []float64{0, 0.25, 0.5, 1} {
		copies := scatter(n*size+30, pullLoad{size, contiguity}, rand.New(rand.NewPCG(1, 2)))
		if want := n - int(contiguity*(n-1)+0.5); len(copies) != want {
			t.Errorf("%v contiguous: %d copies, want %d", contiguity, len(copies), want)
		}
		// The same chunks as pages, of which the first one is no page.
		layout := page.Layout{Order: page.NHD, DType: page.BF16, Layers: 1, Pages: n + 1, PageSize: 1, Heads: 1, HeadDim: 16}
		remote, local := transfer.Side{Layout: layout}, transfer.Side{Layout: layout}
		seen, neighbours := make(map[int]int), 0
		var last transfer.Copy
		for _, c := range copies {
			if c.Bytes%size != 0 || c.Remote%size != 0 || c.Local%size != 0 {
				t.Fatalf("copy %+v", c)
			}
			if c.Remote == last.Remote+last.Bytes && c.Local == last.Local+last.Bytes && last.Bytes > 0 ||
				last.Remote == c.Remote+c.Bytes && last.Local == c.Local+c.Bytes {
				neighbours++ // by chance
			}
			last = c
			for at := int64(0); at < c.Bytes; at += size {
				r, l := page.Index((c.Remote+at)/size+1), page.Index((c.Local+at)/size+1)
				remote.Pages, local.Pages = append(remote.Pages, r), append(local.Pages, l)
				seen[int(r)]++
				seen[-int(l)]++
			}
		}
		if len(remote.Pages) != n || len(seen) != 2*n {
			t.Errorf("%v contiguous: %d chunks at %d places, want %d and %d", contiguity, len(remote.Pages), len(seen), n, 2*n)
		}
		merged, err := transfer.Copies(nil, benchRank, remote, local, 0, n)
		if err != nil || len(merged) != len(copies)-neighbours {
			t.Errorf("%v contiguous: pages make %d copies, %v, want %d", contiguity, len(merged), err, len(copies)-neighbours)
		}
	}
}

func TestBatchesHaveAllAtOnce(t *testing.T) {
	const arena = 8 << 20
	for _, concurrency := range []int{1, 4, 64} {
		for _, contiguity := range []float64{0, 1} {
			copies := scatter(arena, pullLoad{64 << 10, contiguity}, rand.New(rand.NewPCG(3, 4)))
			batches := batch(copies, 64<<10, arena, concurrency)
			if len(batches) < concurrency {
				t.Errorf("%d batches for %d reads at once", len(batches), concurrency)
			}
			if n := transfer.Bytes(slices.Concat(batches...)); n != arena {
				t.Errorf("batches have %d bytes, want %d", n, arena)
			}
		}
	}
}

func TestOwnerThatDies(t *testing.T) {
	o, err := small(t).withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	o.Owner = []string{"/bin/sh", "-c", "exit 3"}
	if _, err := newPuller(t.Context(), o, setup{ArenaBytes: o.ArenaBytes, Transports: o.Transports}); err == nil {
		t.Error("a puller without an owner")
	}
	o.Owner = []string{"/nonexistent"}
	if _, err := newPuller(t.Context(), o, setup{ArenaBytes: o.ArenaBytes, Transports: o.Transports}); err == nil {
		t.Error("a puller without an owner")
	}
}

func TestOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"unknown part":      {Parts: []string{"speed"}},
		"one node":          {Prefill: "/a"},
		"twice the same":    {Prefill: "/a", Decode: "/a"},
		"odd chunk":         {ChunkBytes: []int64{100}},
		"chunk of 0":        {ChunkBytes: []int64{0}},
		"huge chunk":        {ChunkBytes: []int64{1 << 40}},
		"tiny arena":        {ArenaBytes: 64 << 10},
		"huge arena":        {ArenaBytes: 1 << 50},
		"no concurrency":    {Concurrency: -1},
		"many at once":      {Concurrency: MaxConcurrency + 1},
		"many connections":  {Concurrency: MaxConcurrency, Lanes: 3},
		"negative lanes":    {Lanes: -1},
		"many lanes":        {Lanes: MaxLanes + 1},
		"many workers":      {Workers: MaxWorkers + 1},
		"unknown transport": {Transports: []string{"pigeon"}},
		"contiguity of 2":   {Contiguity: []float64{2}},
		"no contiguity":     {Contiguity: []float64{math.NaN()}},
		"negative rounds":   {Rounds: -1},
		"negative time":     {Duration: -1},
		"endless time":      {Duration: MaxDuration + 1},
		"many samples":      {Samples: MaxSamples + 1},
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
	if r.Figures[0].Met || !r.Figures[1].Met {
		t.Errorf("figures %+v", r.Figures)
	}
	if text := r.Markdown(""); !strings.Contains(text, "MISSED") {
		t.Errorf("a missed floor is not reported as missed:\n%s", text)
	}
}

// TestCheckSaysWhatIsWrong: what was missed is told from what was not measured.
func TestCheckSaysWhatIsWrong(t *testing.T) {
	met, missed := ceiling("time", 2, "ms", 2), floor("speed", 0.59, "of the limit", 0.6)
	for name, tt := range map[string]struct {
		r    Report
		want string // "": nil
	}{
		"all well":     {Report{Figures: []Figure{met}}, ""},
		"missed":       {Report{Figures: []Figure{met, missed}}, "missed its bound: speed: 0.59 of the limit, promised is at least 0.6"},
		"not measured": {Report{Figures: []Figure{met}, Missing: []string{"pull: no iperf3"}}, "not measured: pull: no iperf3"},
		"both":         {Report{Figures: []Figure{missed}, Missing: []string{"x"}}, "missed its bound: speed: 0.59 of the limit, promised is at least 0.6\nnot measured: x"},
	} {
		have := ""
		if err := tt.r.Check(); err != nil {
			have = err.Error()
		}
		if have != tt.want {
			t.Errorf("%s: %q, want %q", name, have, tt.want)
		}
	}
}

func TestPullFigures(t *testing.T) {
	const gib = 1 << 30
	run := func(rates ...float64) (runs []pulled) {
		for _, rate := range rates {
			runs = append(runs, pulled{rate, 1, 1e-6, []time.Duration{time.Millisecond, 3 * time.Millisecond}})
		}
		return runs
	}
	for name, tt := range map[string]struct {
		of      pulls
		bound   float64 // 0: no figure
		met     bool
		ratio   spread
		limited bool
	}{
		"shm at the floor":  {pulls{shm.Name, pullLoad{64 << 10, 0}, 1, run(1.2*gib, gib, 3*gib), "C memcpy", []float64{gib, gib, gib}, nil}, 1.2, true, spread{1.2, 1, 3}, true},
		"shm below":         {pulls{shm.Name, pullLoad{16 << 10, 0}, 1, run(1.19*gib, gib, 3*gib), "C memcpy", []float64{gib, gib, gib}, nil}, 1.2, false, spread{1.19, 1, 3}, true},
		"of the same round": {pulls{shm.Name, pullLoad{4 << 10, 0}, 1, run(1*gib, 2*gib), "C memcpy", []float64{gib, 2 * gib}, nil}, 1, true, spread{1, 1, 1}, true},
		"tcp":               {pulls{tcp.Name, pullLoad{16 << 10, 0}, 2, run(0.89 * gib), "iperf3 -P 2", []float64{gib}, nil}, 0.9, false, spread{0.89, 0.89, 0.89}, true},
		"contiguous":        {pulls{tcp.Name, pullLoad{64 << 10, 0.5}, 2, run(gib), "iperf3 -P 2", []float64{gib}, nil}, 0, false, spread{1, 1, 1}, true},
		"other size":        {pulls{tcp.Name, pullLoad{256 << 10, 0}, 2, run(gib), "iperf3 -P 2", []float64{gib}, nil}, 0, false, spread{1, 1, 1}, true},
		"no limit":          {pulls{tcp.Name, pullLoad{64 << 10, 0}, 2, run(gib), "", nil, nil}, 0, false, spread{}, false},
	} {
		r := &Report{}
		r.addPulls([]*pulls{&tt.of}, 1)
		row := r.Rows[0]
		near := func(a, b float64) bool { return math.Abs(a-b) < 1e-9 }
		if !near(row.Ratio, tt.ratio.median) || !near(row.RatioMin, tt.ratio.min) || !near(row.RatioMax, tt.ratio.max) || (row.Limit != "") != tt.limited || row.P50 != 1000 || row.P99 != 3000 {
			t.Errorf("%s: row %+v", name, row)
		}
		if (len(r.Figures) == 1) != (tt.bound > 0) || tt.bound > 0 && (r.Figures[0].Bound != tt.bound || r.Figures[0].Met != tt.met) {
			t.Errorf("%s: figures %+v, want bound %v, met %v", name, r.Figures, tt.bound, tt.met)
		}
	}
}

// TestReportKeys keeps the JSON form; -update writes it.
func TestReportKeys(t *testing.T) {
	have, err := json.MarshalIndent(Report{
		Rows: []Row{{CrossingsPerChunk: 1}}, Latencies: []Latency{{}}, Costs: []Cost{{Transport: "shm"}}, Gossip: &Gossip{Rows: []GossipRow{{IdleBytesPerSecond: 1, IdlePacketsPerSecond: 1}}},
		Figures: []Figure{{}}, Missing: []string{""},
	}, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	const path = "testdata/report.golden"
	if *update {
		if err := os.WriteFile(path, have, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if want, err := os.ReadFile(path); err != nil || !bytes.Equal(have, want) {
		t.Errorf("report is not %s: %v\n%s", path, err, have)
	}
}

func TestPlot(t *testing.T) {
	r := &Report{}
	if err := r.Plot(io.Discard, "svg"); err == nil {
		t.Error("nothing was plotted")
	}
	for _, name := range Transports() {
		for _, size := range ChunkSizes() {
			for _, contiguity := range []float64{0, 1} {
				r.Rows = append(r.Rows, Row{
					Transport: name, ChunkBytes: size, Contiguity: contiguity, BytesPerSecond: 1e9 * float64(len(name)),
					Limit: "limit of " + name, LimitBytesPerSecond: 2e9,
				})
			}
		}
	}
	for name, rows := range map[string][]Row{"all": r.Rows, "one size": r.Rows[:1], "one transport": r.Rows[:8]} {
		var svg bytes.Buffer
		if err := (&Report{Rows: rows}).Plot(&svg, "svg"); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		texts := make(map[string]bool)
		for in := xml.NewDecoder(&svg); ; {
			token, err := in.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if text, ok := token.(xml.CharData); ok {
				texts[strings.TrimSpace(string(text))] = true
			}
		}
		for _, row := range rows {
			if row.Contiguity == 0 && (!texts[row.Transport] || !texts[row.Limit] || !texts[bytesText(row.ChunkBytes)]) {
				t.Errorf("%s: plot lacks something of %+v: %v", name, row, texts)
			}
		}
	}
	for format, magic := range map[string]string{"svg": "<?xml", "png": "\x89PNG", "pdf": "%PDF"} {
		var out bytes.Buffer
		if err := r.Plot(&out, format); err != nil || !strings.HasPrefix(out.String(), magic) {
			t.Errorf("plot as %s begins with %.8q, %v", format, out.String(), err)
		}
	}
	for _, bad := range []string{"", "gif", "eps"} {
		if err := r.Plot(io.Discard, bad); err == nil {
			t.Errorf("plotted as %q", bad)
		}
	}
	if text := r.Markdown("plot.svg"); !strings.Contains(text, "](plot.svg)") {
		t.Errorf("page does not show the plot:\n%s", text)
	}
}

func TestQuantile(t *testing.T) {
	s := []float64{1, 2, 3, 4}
	for q, want := range map[float64]float64{0.01: 1, 0.5: 2, 0.51: 3, 0.99: 4, 1: 4} {
		if got := quantile(s, q); got != want {
			t.Errorf("quantile %v is %v, want %v", q, got, want)
		}
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
