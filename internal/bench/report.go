package bench

import (
	"fmt"
	"io"
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
	Rows        []Row   `json:"rows"`
	// Figures are the numbers that have a floor or a ceiling.
	Figures []Figure `json:"figures"`
	Missing []string `json:"missing"` // what was not measured, and why
}

// Row is one thing measured. What does not apply is absent.
type Row struct {
	Name                string  `json:"name"`
	Transport           string  `json:"transport,omitempty"`
	ChunkBytes          int64   `json:"chunk_bytes,omitempty"`
	Contiguity          float64 `json:"contiguity"` // share of the chunks that follow their neighbour
	Concurrency         int     `json:"concurrency,omitempty"`
	Lanes               int     `json:"lanes,omitempty"`
	BytesPerSecond      float64 `json:"bytes_per_second,omitempty"` // median over the rounds
	BytesPerSecondMin   float64 `json:"bytes_per_second_min,omitempty"`
	BytesPerSecondMax   float64 `json:"bytes_per_second_max,omitempty"`
	Limit               string  `json:"limit,omitempty"` // what it is compared with
	LimitBytesPerSecond float64 `json:"limit_bytes_per_second,omitempty"`
	// Ratio is the median over the rounds of run by limit of the same round.
	Ratio            float64 `json:"ratio,omitempty"`
	RatioMin         float64 `json:"ratio_min,omitempty"`
	RatioMax         float64 `json:"ratio_max,omitempty"`
	Rounds           int     `json:"rounds,omitempty"`
	CPUSecondsPerGiB float64 `json:"cpu_seconds_per_gib,omitempty"` // both processes
	P50              float64 `json:"p50_us,omitempty"`
	P90              float64 `json:"p90_us,omitempty"`
	P99              float64 `json:"p99_us,omitempty"`
	Samples          int64   `json:"samples,omitempty"`
	NanosPerPage     float64 `json:"ns_per_page,omitempty"`
	AllocsPerPage    float64 `json:"allocs_per_page,omitempty"`
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

// OK reports that every figure was measured and met its bound.
func (r *Report) OK() bool {
	for _, f := range r.Figures {
		if !f.Met {
			return false
		}
	}
	return len(r.Missing) == 0
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n\n", r.Machine)
	for _, t := range []table.Writer{r.figures(), r.pulls(), r.others()} {
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
	t := newTable("pull", "chunk", "at once", "GB/s", "range", "limit", "GB/s", "ratio", "range", "rounds", "CPU s/GiB")
	for _, row := range r.Rows {
		if row.BytesPerSecond == 0 {
			continue
		}
		cells := table.Row{
			row.Transport, bytesText(row.ChunkBytes), row.Concurrency,
			gigabytes(row.BytesPerSecond), gigabytes(row.BytesPerSecondMin) + " to " + gigabytes(row.BytesPerSecondMax),
		}
		if row.Limit == "" {
			cells = append(cells, "none", "", "", "")
		} else {
			cells = append(cells, row.Limit, gigabytes(row.LimitBytesPerSecond),
				fmt.Sprintf("%.2f", row.Ratio), fmt.Sprintf("%.2f to %.2f", row.RatioMin, row.RatioMax))
		}
		t.AppendRow(append(cells, row.Rounds, fmt.Sprintf("%.2f", row.CPUSecondsPerGiB)))
	}
	return t
}

func (r *Report) others() table.Writer {
	t := newTable("other", "result")
	for _, row := range r.Rows {
		switch {
		case row.Samples > 0:
			t.AppendRow(table.Row{
				fmt.Sprintf("%s (%s)", row.Name, row.Transport),
				fmt.Sprintf("p50 %.0f us, p90 %.0f us, p99 %.0f us of %d", row.P50, row.P90, row.P99, row.Samples),
			})
		case row.NanosPerPage > 0:
			t.AppendRow(table.Row{row.Name, fmt.Sprintf("%.1f ns and %.3g allocations a page, median of %d", row.NanosPerPage, row.AllocsPerPage, row.Rounds)})
		}
	}
	return t
}

// Markdown is the report as docs/benchmarks.md: numbers, machine, method.
func (r *Report) Markdown() string {
	var out strings.Builder
	out.WriteString("# Benchmarks\n\nMade by `make bench`, which writes this page; `kvferry bench -o json` has every number.\n\n")
	fmt.Fprintf(&out, "Machine: %s.\n\n## Promises\n\n%s\n\n", r.Machine, r.figures().RenderMarkdown())
	if t := r.pulls(); t.Length() > 0 {
		fmt.Fprintf(&out, "## Throughput\n\n%s\n\n", t.RenderMarkdown())
	}
	if t := r.others(); t.Length() > 0 {
		fmt.Fprintf(&out, "## Latency and planning\n\n%s\n\n", t.RenderMarkdown())
	}
	if len(r.Missing) > 0 {
		out.WriteString("## Not measured\n\n")
		for _, m := range r.Missing {
			fmt.Fprintf(&out, "* %s\n", m)
		}
		out.WriteString("\n")
	}
	fmt.Fprintf(&out, `## Method

* Throughput: two processes on loopback, each with an arena of %s that is populated before. One read moves
  up to %s of chunks that lie in no order in either arena; reads follow each other for at least %.3g s, every chunk moves
  at least once, and every byte is compared afterwards, outside of the time. GB is 1e9 bytes. CPU is that of both processes.
* The limit is `+"`iperf3`"+` over loopback with as many connections, cubic, and its default buffers, for one second. It sends one
  small buffer again and again, so it stays in the cache; a pull walks two arenas.
* Rounds: each of the %d rounds runs the limit and every chunk size once, the limit first in every other round. A ratio is
  that of a run and the limit of the same round. The tables give medians and ranges of all rounds; none is left out.
* Publish to ready: two nodes, each a process, and one engine session on each. The reader's call waits at its node; the time
  is from the call of Publish on the one to the answer on the other. One request at a time, after a warm-up; the page is compared.
* Planning: page lists in random order on both sides into a slice that is long enough.
`, bytesText(r.ArenaBytes), bytesText(readBytes), r.PullSeconds, r.Rounds)
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

func gigabytes(bytesPerSecond float64) string { return fmt.Sprintf("%.2f", bytesPerSecond/1e9) }

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
