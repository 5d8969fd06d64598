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
	OK        bool `json:"ok"`        // every request was ready, every byte was right, and nothing was left behind
	Explained bool `json:"explained"` // whatever failed, a node that died explains it; see Unexplained
	Requests  int  `json:"requests"`  // in the trace, and those begun of its repetitions
	Ready     int  `json:"ready"`     // retrieved, verified, decoded, removed
	Failed    int  `json:"failed"`    // ended otherwise; Requests-Ready-Failed were not started
	// Lost are the failed ones that ended because a node of theirs died, as their
	// engine (NODE_LOST) or the reader's node (OWNER_LOST) found.
	Lost int `json:"lost"`
	// Labels and Ranks are those of every request.
	Labels int `json:"labels"`
	Ranks  int `json:"ranks"`
	// Tokens are the prompts' of the requests; Bytes what they have to be on the
	// decode nodes, and ReadyBytes those of the ready ones, computed from the
	// trace alone.
	Tokens     int64 `json:"tokens"`
	TokenBytes int64 `json:"token_bytes"` // of one label on one rank
	Bytes      int64 `json:"bytes"`
	ReadyBytes int64 `json:"ready_bytes"`
	// VerifiedBytes of the ready requests were retrieved and right; each byte
	// counts once. WrongBytes were wrong whenever they were looked at.
	VerifiedBytes int64 `json:"verified_bytes"`
	WrongBytes    int64 `json:"wrong_bytes"`
	// Early are requests that were reported ready before their final publish.
	Early int `json:"early"`
	// DecodedTokens were appended on the decode side, all labels.
	DecodedTokens int64 `json:"decoded_tokens"`
	// Retries of calls that a node refused for the moment.
	Retries int64 `json:"retries"`
	// Offloading are the calls that found a request on a node's host, and Reloads
	// the calls that had one brought back. A node also does both by itself.
	Offloading int64 `json:"offloading"`
	Reloads    int64 `json:"reloads"`
	// PublishToReady is from just before the final publish to the answer that
	// the request is ready.
	PublishToReady   Quantiles        `json:"publish_to_ready"`
	BytesByTransport map[string]int64 `json:"bytes_by_transport"` // as the nodes say
	// Releases are the ends of the final publications by outcome, as the owners
	// say; "lost" are those whose owner died first.
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
	Code      string   `json:"code"`
	Count     int      `json:"count"`
	Explained string   `json:"explained"`       // how a node that dies or drains can be the reason; "": it cannot
	Longest   float64  `json:"longest_seconds"` // from the start of such a request to its end
	Examples  []string `json:"examples"`        // the first few
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
	Lives    int    `json:"lives"`  // of the node, that were seen: one more than it was restarted
	Losses   int    `json:"losses"` // how often it died, drained, or ended the session during the run
	// Offloading and Reloads are as in the Report.
	Offloading int64 `json:"offloading"`
	Reloads    int64 `json:"reloads"`
	// Left is what the run has left on the node at its end, if it was up then.
	Left []string `json:"left"`
}

// Elapsed is ElapsedSeconds as a duration.
func (r *Report) Elapsed() time.Duration {
	return time.Duration(r.ElapsedSeconds * float64(time.Second))
}

// Corrupt reports that verification failed, rather than a request: bytes were
// wrong or too few, or a request was ready too early.
func (r *Report) Corrupt() bool {
	return r.WrongBytes > 0 || r.Early > 0 || r.VerifiedBytes != r.ReadyBytes
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	t := newTable()
	t.AppendRows([]table.Row{
		{"requests", fmt.Sprintf("%d ready, %d failed of %d, %d of them because a node died", r.Ready, r.Failed, r.Requests, r.Lost)},
		{"tokens", fmt.Sprintf("%d prompt, %d decoded", r.Tokens, r.DecodedTokens)},
		{"bytes", fmt.Sprintf("%d (%d tokens x %d bytes x %d labels x %d ranks)", r.Bytes, r.Tokens, r.TokenBytes, r.Labels, r.Ranks)},
		{"verified bytes", fmt.Sprintf("%d (%.6g %%), the ready requests have %d", r.VerifiedBytes, 100*float64(r.VerifiedBytes)/float64(max(1, r.Bytes)), r.ReadyBytes)},
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
	t.AppendRow(table.Row{"found on the host", fmt.Sprintf("%d times, %d reloads", r.Offloading, r.Reloads)})
	t.AppendRow(table.Row{"elapsed", fmt.Sprintf("%.2f s, %s/s verified", r.ElapsedSeconds, bytesText(int64(r.BytesPerSecond)))})

	nodes := newTable()
	nodes.AppendHeader(table.Row{"node", "role", "requests", "ready", "failed", "tokens", "bytes", "lives", "losses", "found on the host", "reloads"})
	for _, n := range r.Nodes {
		nodes.AppendRow(table.Row{n.Node, n.Role, n.Requests, n.Ready, n.Failed, n.Tokens, n.Bytes, n.Lives, n.Losses, n.Offloading, n.Reloads})
	}
	var out strings.Builder
	fmt.Fprintf(&out, "%s\n\n%s\n", t.Render(), nodes.Render())
	for _, n := range r.Nodes {
		for _, what := range n.Left {
			fmt.Fprintf(&out, "\nleft on node %s: %s\n", n.Node, what)
		}
	}
	for _, f := range r.Failures {
		fmt.Fprintf(&out, "\n%s: %d, the longest after %.2f s\n", f.Code, f.Count, f.Longest)
		if f.Explained != "" {
			fmt.Fprintf(&out, "  (%s)\n", f.Explained)
		}
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
