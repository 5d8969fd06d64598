package bench

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// Report is what a Run measured. Its JSON form has the keys of the tags; they
// are stable.
type Report struct {
	Machine Machine `json:"machine"`
	// How the pulls were made.
	Rounds      int     `json:"rounds"`
	ArenaBytes  int64   `json:"arena_bytes"`
	PullSeconds float64 `json:"pull_seconds"`

	Rows      []Row     `json:"rows"`
	Latencies []Latency `json:"latencies"`
	Costs     []Cost    `json:"costs"`
	Gossip    *Gossip   `json:"gossip,omitempty"` // nil: not measured
	// Figures are the numbers that have a floor or a ceiling.
	Figures []Figure `json:"figures"`
	Missing []string `json:"missing"` // what was not measured, and why
}

// Row is the throughput of one transport for chunks of one size.
type Row struct {
	Transport   string  `json:"transport"`
	ChunkBytes  int64   `json:"chunk_bytes"`
	Contiguity  float64 `json:"contiguity"`  // share of the chunks that follow their neighbour on both sides
	Concurrency int     `json:"concurrency"` // reads at once
	// Lanes is how many share a read: connections of tcp, queue pairs of rdma,
	// copying threads of shm, which all reads share.
	Lanes          int     `json:"lanes"`
	BytesPerSecond float64 `json:"bytes_per_second"` // median over the rounds
	// Limit is what it is compared with, "" if with nothing. The ratio is the median
	// over the rounds of a run by the limit of the same round.
	Limit               string  `json:"limit"`
	LimitBytesPerSecond float64 `json:"limit_bytes_per_second"`
	Ratio               float64 `json:"ratio"`
	RatioMin            float64 `json:"ratio_min"`
	RatioMax            float64 `json:"ratio_max"`
	Rounds              int     `json:"rounds"`
	CPUSecondsPerGiB    float64 `json:"cpu_seconds_per_gib"` // both processes
	P50                 float64 `json:"p50_us"`              // of one Read of readBytes, of all rounds
	P99                 float64 `json:"p99_us"`
	// CrossingsPerChunk are calls into C to post and reap, of the round that had most
	// of them; rdma's alone.
	CrossingsPerChunk float64 `json:"crossings_per_chunk,omitempty"`
}

// Latency is how long something took.
type Latency struct {
	Name      string  `json:"name"`
	Transport string  `json:"transport"`
	Bytes     int64   `json:"bytes"` // that were moved
	P50       float64 `json:"p50_us"`
	P90       float64 `json:"p90_us"`
	P99       float64 `json:"p99_us"`
	Samples   int64   `json:"samples"`
}

// Cost is what each page of something costs, whatever it has of bytes.
type Cost struct {
	Name          string  `json:"name"`
	Transport     string  `json:"transport,omitempty"` // "": of no transport
	NanosPerPage  float64 `json:"ns_per_page"`         // median over the rounds
	AllocsPerPage float64 `json:"allocs_per_page"`
	Rounds        int     `json:"rounds"`
}

// Gossip is what was measured of gossip, and how.
type Gossip struct {
	Rounds        int         `json:"rounds"`
	IdleSeconds   float64     `json:"idle_seconds"`   // measured before each load
	LifeSeconds   float64     `json:"life_seconds"`   // of a publication, at most; half of it at least
	WindowSeconds float64     `json:"window_seconds"` // measured, of each run
	SettleSeconds float64     `json:"settle_seconds"` // that all have to know all
	Rows          []GossipRow `json:"rows"`
}

// GossipRow is one load on a cluster of one size: medians over its rounds.
type GossipRow struct {
	Nodes int `json:"nodes"`
	// AnnouncementsPerSecond of all nodes together that were asked for, and those
	// that were made.
	AnnouncementsPerSecond float64 `json:"announcements_per_second"`
	Made                   float64 `json:"made_per_second"`
	Rounds                 int     `json:"rounds"`
	// RoundsHeld are those in which the rate was reached, every node knew all
	// announcements in time and none that had ended, and took no other for dead.
	RoundsHeld int     `json:"rounds_held"`
	Complete   float64 `json:"complete"` // least share of what a node is to know that it knew in time
	// From the call that announces until one other node, any, shows it, and until
	// all do.
	OneP50    float64 `json:"one_p50_us"`
	OneP99    float64 `json:"one_p99_us"`
	OneP99Min float64 `json:"one_p99_us_min"`
	OneP99Max float64 `json:"one_p99_us_max"`
	AllP50    float64 `json:"all_p50_us"`
	AllP99    float64 `json:"all_p99_us"`
	AllP99Min float64 `json:"all_p99_us_min"`
	AllP99Max float64 `json:"all_p99_us_max"`
	Samples   int64   `json:"samples"` // of all rounds
	Cores     float64 `json:"cores"`   // that all nodes together kept busy
	// Out and in, of one node; membership is in it, and all that an idle one has.
	BytesPerSecond       float64 `json:"bytes_per_second"`
	PacketsPerSecond     float64 `json:"packets_per_second"`
	IdleBytesPerSecond   float64 `json:"idle_bytes_per_second,omitempty"`
	IdlePacketsPerSecond float64 `json:"idle_packets_per_second,omitempty"`
}

// add makes a row of the runs of each size and rate.
func (g *Gossip) add(runs []gossiped) {
	type load struct {
		nodes int
		rate  float64
	}
	of := make(map[load][]gossiped)
	for _, run := range runs {
		l := load{run.nodes, run.rate}
		of[l] = append(of[l], run)
	}
	for l, runs := range of {
		g.Rows = append(g.Rows, gossipRow(l.nodes, l.rate, runs))
	}
	slices.SortFunc(g.Rows, func(a, b GossipRow) int {
		return cmp.Or(cmp.Compare(a.Nodes, b.Nodes), cmp.Compare(a.AnnouncementsPerSecond, b.AnnouncementsPerSecond))
	})
}

func gossipRow(nodes int, rate float64, runs []gossiped) GossipRow {
	of := func(value func(gossiped) float64) spread {
		values := make([]float64, len(runs))
		for i, run := range runs {
			values[i] = value(run)
		}
		return spreadOf(values)
	}
	one, all := of(func(g gossiped) float64 { return g.one.p99 }), of(func(g gossiped) float64 { return g.all.p99 })
	row := GossipRow{
		Nodes: nodes, AnnouncementsPerSecond: rate, Rounds: len(runs),
		Made:     of(func(g gossiped) float64 { return g.made }).median,
		Complete: of(func(g gossiped) float64 { return g.complete }).min,
		OneP50:   of(func(g gossiped) float64 { return g.one.p50 }).median, OneP99: one.median, OneP99Min: one.min, OneP99Max: one.max,
		AllP50: of(func(g gossiped) float64 { return g.all.p50 }).median, AllP99: all.median, AllP99Min: all.min, AllP99Max: all.max,
		Cores:                of(func(g gossiped) float64 { return g.cores }).median,
		BytesPerSecond:       of(func(g gossiped) float64 { return g.traffic.bytes }).median,
		PacketsPerSecond:     of(func(g gossiped) float64 { return g.traffic.packets }).median,
		IdleBytesPerSecond:   of(func(g gossiped) float64 { return g.idle.bytes }).median,
		IdlePacketsPerSecond: of(func(g gossiped) float64 { return g.idle.packets }).median,
	}
	for _, run := range runs {
		row.Samples += run.one.samples
		if run.holds(rate) {
			row.RoundsHeld++
		}
	}
	return row
}

// Figure is a promise: a value against its bound. A missed one is reported as
// missed.
type Figure struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
	Unit  string  `json:"unit"`
	Bound float64 `json:"bound"`
	// AtLeast: the bound is a floor; else a ceiling.
	AtLeast bool `json:"at_least"`
	Met     bool `json:"met"`
}

func floor(name string, value float64, unit string, bound float64) Figure {
	return Figure{Name: name, Value: value, Unit: unit, Bound: bound, AtLeast: true, Met: value >= bound}
}

func ceiling(name string, value float64, unit string, bound float64) Figure {
	return Figure{Name: name, Value: value, Unit: unit, Bound: bound, Met: value <= bound}
}

func (f Figure) promise() string {
	if f.AtLeast {
		return fmt.Sprintf("at least %.4g", f.Bound)
	}
	return fmt.Sprintf("at most %.4g", f.Bound)
}

func (f Figure) verdict() string {
	if f.Met {
		return "met"
	}
	return "MISSED"
}

// Check returns nil if everything was measured and every figure met its bound; else an
// error that names what was not, and did not.
func (r *Report) Check() error {
	var errs []error
	for _, f := range r.Figures {
		if !f.Met {
			errs = append(errs, fmt.Errorf("missed its bound: %s: %.4g %s, promised is %s", f.Name, f.Value, f.Unit, f.promise()))
		}
	}
	for _, m := range r.Missing {
		errs = append(errs, fmt.Errorf("not measured: %s", m))
	}
	return errors.Join(errs...)
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n\n", r.Machine)
	for _, t := range []table.Writer{r.figures(), r.pulls(), r.latencies(), r.costs(), r.gossips(), r.gossipTraffic()} {
		if t.Length() > 0 {
			out.WriteString(t.Render() + "\n\n")
		}
	}
	for _, m := range r.Missing {
		fmt.Fprintf(&out, "not measured: %s\n", m)
	}
	_, err := io.WriteString(w, out.String())
	return err
}

func (m Machine) String() string {
	return fmt.Sprintf("%s, %d cores, %d GiB; %s, Linux %s (%s), default congestion control %s; %s; %s",
		m.CPU, m.Cores, m.MemoryGiB, m.OS, m.Kernel, m.Arch, m.TCP, m.Go, m.Date)
}

func (r *Report) figures() table.Writer {
	t := newTable("figure", "measured", "unit", "promised", "")
	for _, f := range r.Figures {
		t.AppendRow(table.Row{f.Name, fmt.Sprintf("%.4g", f.Value), f.Unit, f.promise(), f.verdict()})
	}
	return t
}

func (r *Report) pulls() table.Writer {
	t := newTable("pull", "chunk", "contiguous", "at once", "lanes", "GB/s", "limit", "GB/s", "ratio", "range", "rounds", "CPU s/GiB", "p50 ms", "p99 ms")
	for _, row := range r.Rows {
		cells := table.Row{
			row.Transport, bytesText(row.ChunkBytes), fmt.Sprintf("%.0f %%", 100*row.Contiguity), row.Concurrency, row.Lanes, gigabytes(row.BytesPerSecond),
		}
		if row.Limit == "" {
			cells = append(cells, "none", "", "", "")
		} else {
			cells = append(cells, row.Limit, gigabytes(row.LimitBytesPerSecond),
				fmt.Sprintf("%.2f", row.Ratio), fmt.Sprintf("%.2f to %.2f", row.RatioMin, row.RatioMax))
		}
		t.AppendRow(append(cells, row.Rounds, fmt.Sprintf("%.2f", row.CPUSecondsPerGiB), millis(row.P50), millis(row.P99)))
	}
	return t
}

func (r *Report) latencies() table.Writer {
	t := newTable("latency", "transport", "bytes", "p50 ms", "p90 ms", "p99 ms", "samples")
	for _, l := range r.Latencies {
		t.AppendRow(table.Row{l.Name, l.Transport, bytesText(l.Bytes), fmt.Sprintf("%.3f", l.P50/1000), fmt.Sprintf("%.3f", l.P90/1000), fmt.Sprintf("%.3f", l.P99/1000), l.Samples})
	}
	return t
}

func (r *Report) costs() table.Writer {
	t := newTable("cost", "transport", "ns a page", "allocations a page", "rounds")
	for _, c := range r.Costs {
		t.AppendRow(table.Row{c.Name, c.Transport, fmt.Sprintf("%.1f", c.NanosPerPage), fmt.Sprintf("%.3g", c.AllocsPerPage), c.Rounds})
	}
	return t
}

// gossips says how fast and how completely gossip arrives.
func (r *Report) gossips() table.Writer {
	t := newTable("gossip", "announcements/s", "held in", "complete", "on any other, ms", "range of p99", "on all, ms", "range of p99", "cores")
	if r.Gossip == nil {
		return t
	}
	for _, row := range r.Gossip.Rows {
		t.AppendRow(table.Row{
			fmt.Sprintf("%d nodes", row.Nodes), fmt.Sprintf("%.0f of %.0f", row.Made, row.AnnouncementsPerSecond),
			fmt.Sprintf("%d of %d rounds", row.RoundsHeld, row.Rounds), fmt.Sprintf("%.4g %%", 100*row.Complete),
			delays(row.OneP50, row.OneP99), millis(row.OneP99Min) + " to " + millis(row.OneP99Max),
			delays(row.AllP50, row.AllP99), millis(row.AllP99Min) + " to " + millis(row.AllP99Max),
			fmt.Sprintf("%.2f", row.Cores),
		})
	}
	return t
}

// gossipTraffic says what gossip costs on the wire.
func (r *Report) gossipTraffic() table.Writer {
	t := newTable("traffic of a node, out and in", "announcements/s", "kB/s", "packets/s", "idle kB/s", "idle packets/s")
	if r.Gossip == nil {
		return t
	}
	for _, row := range r.Gossip.Rows {
		cells := table.Row{
			fmt.Sprintf("%d nodes", row.Nodes), fmt.Sprintf("%.0f", row.Made),
			fmt.Sprintf("%.1f", row.BytesPerSecond/1000), fmt.Sprintf("%.0f", row.PacketsPerSecond),
		}
		if row.IdlePacketsPerSecond > 0 {
			cells = append(cells, fmt.Sprintf("%.1f", row.IdleBytesPerSecond/1000), fmt.Sprintf("%.0f", row.IdlePacketsPerSecond))
		}
		t.AppendRow(cells)
	}
	return t
}

func delays(p50, p99 float64) string { return fmt.Sprintf("p50 %s, p99 %s", millis(p50), millis(p99)) }

func millis(us float64) string { return fmt.Sprintf("%.1f", us/1000) }

// Markdown is the report as docs/benchmarks.md: numbers, machine, method. plot is
// where its plot lies beside it; "": there is none.
func (r *Report) Markdown(plot string) string {
	var out strings.Builder
	out.WriteString("# Benchmarks\n\nMade by `make bench`, which writes this page; `kvferry bench -o json` has every number.\n\n")
	fmt.Fprintf(&out, "Machine: %s.\n\n## Promises\n\n%s\n\n", r.Machine, r.figures().RenderMarkdown())
	if t := r.pulls(); t.Length() > 0 {
		fmt.Fprintf(&out, "## Throughput\n\n%s\n\n", t.RenderMarkdown())
		if plot != "" {
			fmt.Fprintf(&out, "![Throughput of scattered chunks by their size](%s)\n\n", plot)
		}
	}
	if t := r.latencies(); t.Length() > 0 {
		fmt.Fprintf(&out, "## Latency\n\n%s\n\n", t.RenderMarkdown())
	}
	if t := r.costs(); t.Length() > 0 {
		fmt.Fprintf(&out, "## Costs of a page\n\n%s\n\n", t.RenderMarkdown())
	}
	if t := r.gossips(); t.Length() > 0 {
		fmt.Fprintf(&out, "## Gossip\n\n%s\n\n%s\n\n", t.RenderMarkdown(), r.gossipTraffic().RenderMarkdown())
	}
	if len(r.Missing) > 0 {
		out.WriteString("## Not measured\n\n")
		for _, m := range r.Missing {
			fmt.Fprintf(&out, "* %s\n", m)
		}
		out.WriteString("\n")
	}
	fmt.Fprintf(&out, `## Method

* Throughput: two processes, each with an arena of %[1]s that is populated before. One read moves up to %[2]s; reads
  follow each other for at least %.3[3]g s, every chunk moves at least once, and every byte is compared afterwards, outside of
  the time. GB is 1e9 bytes. CPU is that of both processes. p50 and p99 are of single reads.
* Chunks lie in no order in either arena but as far as they are contiguous: of the borders between the chunks of the one side
  so many, drawn at random, are those of neighbours on the other side too. Neighbours are one copy, as the node plans it: half
  of the borders make copies of two chunks on average, all of them one copy of a whole arena, which reads cut. A limit of
  memory moves the same copies.
* Lanes are connections that share a read of tcp, queue pairs that share one of rdma, and threads that copy for shm, which all
  reads of the process share.
* The limit of shm is `+"`memcpy`"+` of the C library (cc -O2), as many threads in a process of their own, which copy the same list
  of copies between two more arenas of the same size, as long; what they copied is compared too.
* The limit of tcp is `+"`iperf3`"+` over loopback with as many connections, cubic, and its default buffers, for one second. It sends
  one small buffer again and again, so it stays in the cache; a pull walks two arenas.
* The limit of rdma is `+"`ib_read_bw`"+` between the same two ports with as many queue pairs and %[9]d reads under way on each, for
  one second with messages of %[10]s: those that are fastest by the median, and those of the chunks' own size. It reads one small buffer again and
  again. Crossings are calls into C to post and reap.
* Rounds: each of the %[4]d rounds runs everything once, limits beside what they are of (iperf3 once for all rows of tcp, ib_read_bw
  for those of rdma), every other round backwards. A ratio is that of a run and the limit of the same round. The tables give medians of all rounds
  and the range of the ratios; none is left out.
* Publish to ready of one page: two nodes, each a process, and one engine session on each. The reader's call waits at its node;
  the time is from the call of Publish on the one to the answer on the other, so the calls and the read of one page are in it: it
  is an upper bound of publish to visible. One request at a time, after a warm-up; the page is compared. Every other publication
  names the reader, who is told over its stream too; the rest reaches it by gossip alone. The transport is the one that the nodes
  choose.
* Publish to ready of %[5]s: the same, with one publication, final, of pages that were written and committed before; no engine
  writes in the time that counts. It is compared with the transport alone: in the same round the two processes of a pull read as
  many bytes in one read of the very copies that the nodes' pages made, just after the owner has written them. So the ratio
  is the time by that of the bytes at the transport's own rate. The transports of both are set up by their defaults. Besides the
  read, which the node may cut into several, there is in the time: the call of Publish; the seal; the announcement, with its page lists
  over the reader's stream, and by gossip, there without them if it has more than 1,000 bytes: a reader who hears of it there first
  looks them up at the owner; the pages that the reader's node reserves, the plan, and the wait for the read's turn; and the
  answers of both nodes. The lease is asked for at the same time, and nothing waits for it; the reader's acknowledgement comes
  after the answer.
* Planning: page lists in random order on both sides into a slice that is long enough.
* Submit: %[6]d pages of %[7]d bytes, in random order on both sides and so few bytes that they stay in the cache, planned and read
  by one read, again and again. Counted is the CPU time of the reader's process, in user and kernel. Its allocations are
  those of a read of %[6]d pages less those of a read of %[8]d, by the pages between: both take tcp several requests, and neither is
  so long that more lanes share it, so what is counted is what grows with pages, not what a read allocates whatever it has of them.
`, bytesText(r.ArenaBytes), bytesText(readBytes), r.PullSeconds, r.Rounds, bytesText(manyBytes), submitPages, submitLayout().PageBytes(), fewPages, rdmaReads, readBWSizes())
	if g := r.Gossip; g != nil {
		fmt.Fprintf(&out, `* Gossip: as many members as the table says, all in one process: each has the membership, the log, and the board of a node, joined
  as a node joins them, and nothing else. They gossip over UDP of loopback, under a key, by the timings of a real cluster. There is
  no wire and no loss but that of full buffers, and the cores of this machine are shared by all of them.
* All members in turn announce at a fixed rate, late or not: each time another request of %d tokens, one rank, %d pages in %d runs,
  with its page list, which is released after a random time of %.3g to %.3g s. Measured are %.3g s from when as many end as begin;
  every run has a cluster of its own, and there are %d rounds of all runs. A row gives medians of its rounds.
* A rate is held if it was reached, if every member knew every announcement before it ended and at most %.3g s after the last one,
  if so long after the last release none knew one that had ended, and if nobody took another for dead. What is promised is the
  highest rate held among those that were tried.
* Publish to visible: %d announcements a second at most are watched on all other boards, as a node waits for a request. The time is
  from before the announcement until the board of one other member, drawn before, wakes who waits there and shows it; and until all do.
* Traffic: bytes and packets, out and in, of membership, announcements, releases, checkpoints, and repair, without IP and UDP
  headers. Compared is what the load adds to the idle traffic of the same cluster, measured for %.3g s just before. Each node sends an
  announcement as often whatever the size; the busier the cores, the better packets are filled, hence less than 1 is no merit.
`, loadTokens, loadTokens/loadPageSize, loadTokens/loadPageSize/loadRun, g.LifeSeconds/2, g.LifeSeconds, g.WindowSeconds, g.Rounds,
			g.SettleSeconds, sightings, g.IdleSeconds)
	}
	return out.String()
}

func newTable(header ...any) table.Writer {
	t := table.NewWriter()
	style := table.StyleLight
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format.Header = text.FormatDefault
	t.SetStyle(style)
	t.AppendHeader(header)
	return t
}

func gigabytes(bytesPerSecond float64) string {
	if bytesPerSecond < 1e9 {
		return fmt.Sprintf("%.3f", bytesPerSecond/1e9)
	}
	return fmt.Sprintf("%.2f", bytesPerSecond/1e9)
}

// bytesText is a size for people.
func bytesText(n int64) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", n>>20)
	case n >= 1<<10 && n%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", n>>10)
	}
	return fmt.Sprintf("%d B", n)
}
