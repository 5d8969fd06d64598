package replay

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"
)

// Report says what a Run did. Its JSON form has the keys of the tags; they are
// stable.
type Report struct {
	OK       bool `json:"ok"`       // every request was ready and every byte was right
	Requests int  `json:"requests"` // in the trace
	Ready    int  `json:"ready"`    // retrieved, verified, decoded, removed
	Failed   int  `json:"failed"`   // ended otherwise; Requests-Ready-Failed were not started
	// Labels and Ranks are those of every request.
	Labels int `json:"labels"`
	Ranks  int `json:"ranks"`
	// Tokens are the prompts' of the trace; Bytes what they have to be on the
	// decode nodes, computed from the trace alone.
	Tokens     int64 `json:"tokens"`
	TokenBytes int64 `json:"token_bytes"` // of one label on one rank
	Bytes      int64 `json:"bytes"`
	// VerifiedBytes were retrieved and right; each byte counts once. WrongBytes
	// were wrong whenever they were looked at.
	VerifiedBytes int64 `json:"verified_bytes"`
	WrongBytes    int64 `json:"wrong_bytes"`
	// Early are requests that were reported ready before their final publish.
	Early int `json:"early"`
	// DecodedTokens were appended on the decode side, all labels.
	DecodedTokens int64 `json:"decoded_tokens"`
	// Retries of calls that a node refused for the moment.
	Retries int64 `json:"retries"`
	// PublishToReady is from just before the final publish to the answer that
	// the request is ready.
	PublishToReady   Quantiles        `json:"publish_to_ready"`
	BytesByTransport map[string]int64 `json:"bytes_by_transport"` // as the nodes say
	// Releases are the ends of the publications by outcome, as the owners say.
	Releases       map[string]int `json:"releases"`
	Failures       []Failure      `json:"failures"` // by code
	Nodes          []NodeReport   `json:"nodes"`
	ElapsedSeconds float64        `json:"elapsed_seconds"`
	BytesPerSecond float64        `json:"bytes_per_second"` // verified
}

// Quantiles of a duration, in microseconds.
type Quantiles struct {
	Count int64   `json:"count"`
	P50   float64 `json:"p50_us"`
	P90   float64 `json:"p90_us"`
	P99   float64 `json:"p99_us"`
	Max   float64 `json:"max_us"`
}

// Failure is one kind of failure: a name of kvferrypb.Failure_Code, or one of
// the codes of this package.
type Failure struct {
	Code     string   `json:"code"`
	Count    int      `json:"count"`
	Examples []string `json:"examples"` // the first few
}

// NodeReport is one node's part.
type NodeReport struct {
	Node     string `json:"node"`
	Role     string `json:"role"` // prefill or decode
	Requests int    `json:"requests"`
	Ready    int    `json:"ready"`
	Failed   int    `json:"failed"`
	Tokens   int64  `json:"tokens"` // of the requests that were started
	Bytes    int64  `json:"bytes"`  // written through the arena, or verified in it
}

// Elapsed is ElapsedSeconds as a duration.
func (r *Report) Elapsed() time.Duration {
	return time.Duration(r.ElapsedSeconds * float64(time.Second))
}

// Corrupt reports that verification failed, rather than a request: bytes were
// wrong or too few, or a request was ready too early.
func (r *Report) Corrupt() bool {
	return r.WrongBytes > 0 || r.Early > 0 || r.Failed == 0 && r.Ready == r.Requests && r.VerifiedBytes != r.Bytes
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	t := newTable()
	t.AppendRows([]table.Row{
		{"requests", fmt.Sprintf("%d ready, %d failed of %d", r.Ready, r.Failed, r.Requests)},
		{"tokens", fmt.Sprintf("%d prompt, %d decoded", r.Tokens, r.DecodedTokens)},
		{"bytes", fmt.Sprintf("%d (%d tokens x %d bytes x %d labels x %d ranks)", r.Bytes, r.Tokens, r.TokenBytes, r.Labels, r.Ranks)},
		{"verified bytes", fmt.Sprintf("%d (%.6g %%)", r.VerifiedBytes, 100*float64(r.VerifiedBytes)/float64(max(1, r.Bytes)))},
		{"wrong bytes", r.WrongBytes},
		{"ready too early", r.Early},
		{"publish to ready", fmt.Sprintf("p50 %s, p90 %s, p99 %s, max %s", millis(r.PublishToReady.P50), millis(r.PublishToReady.P90), millis(r.PublishToReady.P99), millis(r.PublishToReady.Max))},
	})
	for _, name := range slices.Sorted(maps.Keys(r.BytesByTransport)) {
		t.AppendRow(table.Row{"bytes by " + name, r.BytesByTransport[name]})
	}
	for _, outcome := range slices.Sorted(maps.Keys(r.Releases)) {
		t.AppendRow(table.Row{"released as " + outcome, r.Releases[outcome]})
	}
	t.AppendRow(table.Row{"retries", r.Retries})
	t.AppendRow(table.Row{"elapsed", fmt.Sprintf("%.2f s, %s/s verified", r.ElapsedSeconds, bytesText(int64(r.BytesPerSecond)))})

	nodes := newTable()
	nodes.AppendHeader(table.Row{"node", "role", "requests", "ready", "failed", "tokens", "bytes"})
	for _, n := range r.Nodes {
		nodes.AppendRow(table.Row{n.Node, n.Role, n.Requests, n.Ready, n.Failed, n.Tokens, n.Bytes})
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n\n%s\n", t.Render(), nodes.Render())
	for _, f := range r.Failures {
		fmt.Fprintf(&out, "\n%s: %d\n", f.Code, f.Count)
		for _, example := range f.Examples {
			fmt.Fprintf(&out, "  %s\n", example)
		}
	}
	_, err := io.WriteString(w, out.String())
	return err
}

func newTable() table.Writer {
	t := table.NewWriter()
	style := table.StyleLight
	style.Options = table.OptionsNoBordersAndSeparators
	style.Format.Header = text.FormatDefault
	t.SetStyle(style)
	return t
}

// millis is a number of microseconds for people.
func millis(us float64) string { return fmt.Sprintf("%.2f ms", us/1000) }
