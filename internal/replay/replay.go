// Package replay is an engine simulator: it drives prefill and decode nodes
// from a request trace, as inference engines would, and checks every byte that
// crosses.
//
// A request goes to one prefill and one decode node. The prefill side admits
// its prompt in chunks, writes each token's KV through the mapped arena, and
// publishes after every chunk, the last time as final. The decode side takes
// what has been published as it appears, checks it, decodes a few tokens,
// checks again, and removes the request:
//
//	prefill:  Ingest → (Admit → write → Commit and publish)… → Remove
//	decode:   Ingest → AdmitRetrieve… → check → (Admit → write → Commit)… → check → Remove
//
// Nothing that is checked comes from what was moved: a byte of KV is a
// function of request, label, rank, token, layer, K or V, head, and element
// (pattern.go), its place is computed by an arithmetic of this package's own
// (arena.go), and how many bytes there must be follows from the trace alone
// ([Expected]).
//
// A request starts when the pages of its input and output fit beside those of
// all started ones on both of its nodes (admission.go), in the order of the
// trace; until then it holds nothing anywhere. Its decode side asks for it at
// once, and so holds its lease at the owner while it waits for the rest.
package replay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"

	"github.com/kvferry/kvferry/internal/id"
)

// Options set up a Run. A zero field means its default.
type Options struct {
	// Requests are what to replay, see [ReadTrace]; required.
	Requests []Request
	// Prefill and Decode are paths of engine sockets, at least one each, none
	// twice. Requests are dealt out over all pairs in turn.
	Prefill, Decode []string
	// TimeScale stretches the timestamps of the trace: a request starts no
	// earlier than TimeScale times its timestamp. 1 is real time, 0, the
	// default, as fast as the nodes take them; at most [MaxTimeScale].
	TimeScale float64
	// Concurrency bounds the started requests; default 4 for every node of the
	// side that has more. What fits in the arenas is the other bound, always.
	Concurrency int
	// Labels is how many streams a request has, of equal length: main, cfg,
	// cfg2 and so on; default 1, at most [MaxReplayLabels].
	Labels int
	// ChunkTokens is the longest prefill chunk in tokens; default 512. A
	// prompt of three tokens and more has at least three chunks.
	ChunkTokens int
	// DecodeSteps is how many tokens are decoded after the prompt, output_length
	// of the request at most; default 8, negative: none.
	DecodeSteps int
	// Pause lies before the final publish: time for a reader to start too
	// early, if it could. Default 10 ms, negative: none.
	Pause time.Duration
	// Timeout of one request from its start to its end; default 120 s.
	Timeout time.Duration
	// Progress gets a bar if it is a terminal, else a line now and then; nil:
	// nothing.
	Progress io.Writer
	// Logger; nil: silent.
	Logger *slog.Logger
}

// Bounds of Options. A stretched [MaxTimestamp] is still a time.
const (
	MaxReplayLabels = 8
	MaxTimeScale    = 100
)

// Run replays the requests and waits for all of them. Failures of requests are
// in the report, see [Report.OK]; the error says why the run as a whole could
// not be made (wrong options, a node that is not reachable or differs from the
// others) or was ended (ctx), then with the report of what was done until
// then. Run leaves no request and no session on a node that can be reached.
func Run(ctx context.Context, o Options) (*Report, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	engines, err := openEngines(ctx, o.Prefill, o.Decode)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	r := newRun(o, engines)
	show := startProgress(o.Progress, r)
	err = r.replay(ctx)
	show.close()
	report := r.report()
	if closed := closeEngines(engines); closed != nil {
		r.log.Warn("sessions were not closed", "err", closed)
	}
	if err != nil {
		return report, fmt.Errorf("replay: %w", err)
	}
	return report, nil
}

func (o Options) withDefaults() (Options, error) {
	switch {
	case len(o.Requests) == 0:
		return o, errors.New("no request to replay")
	case len(o.Prefill) == 0 || len(o.Decode) == 0:
		return o, fmt.Errorf("%d prefill and %d decode nodes, want at least one each", len(o.Prefill), len(o.Decode))
	case o.Labels < 0 || o.Labels > MaxReplayLabels:
		return o, fmt.Errorf("%d labels are not in 1..%d", o.Labels, MaxReplayLabels)
	case o.TimeScale < 0 || o.TimeScale > MaxTimeScale || math.IsNaN(o.TimeScale):
		return o, fmt.Errorf("time scale %v is not in 0..%d", o.TimeScale, MaxTimeScale)
	case o.Concurrency < 0 || o.ChunkTokens < 0 || o.Timeout < 0:
		return o, fmt.Errorf("concurrency %d, chunk %d or timeout %v is negative", o.Concurrency, o.ChunkTokens, o.Timeout)
	}
	seen := make(map[string]bool)
	for _, socket := range slices.Concat(o.Prefill, o.Decode) {
		if seen[socket] {
			return o, fmt.Errorf("node at %s is named twice, an engine pulls from other nodes only", socket)
		}
		seen[socket] = true
	}
	o.Concurrency = cmp.Or(o.Concurrency, 4*max(len(o.Prefill), len(o.Decode)))
	o.Labels = cmp.Or(o.Labels, 1)
	o.ChunkTokens = cmp.Or(o.ChunkTokens, 512)
	o.DecodeSteps = cmp.Or(o.DecodeSteps, 8)
	o.Pause = cmp.Or(o.Pause, 10*time.Millisecond)
	o.Timeout = cmp.Or(o.Timeout, 120*time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o, nil
}

// Expected is how many bytes of KV the prompts of a trace have on the decode
// nodes, from the trace alone: tokens x bytes of a token x labels x ranks.
func Expected(requests []Request, tokenBytes int64, labels, ranks int) (tokens, bytes int64) {
	for _, r := range requests {
		tokens += int64(r.Input)
	}
	return tokens, tokens * tokenBytes * int64(labels) * int64(ranks)
}

// run is one Run at work.
type run struct {
	o         Options
	log       *slog.Logger
	name      string // in front of every request's name, so that no two runs meet
	start     time.Time
	prefill   []*engine
	decode    []*engine
	labels    []id.Label
	admission *admission
	retries   atomic.Int64

	mu    sync.Mutex
	stats stats
}

// stats is what has happened so far.
type stats struct {
	ready, failed, early     int
	verified, wrong, decoded int64
	latency                  *hdrhistogram.Histogram // microseconds
	byTransport              map[string]int64
	releases                 map[string]int
	failures                 failures
}

func newRun(o Options, engines []*engine) *run {
	var usable []int
	for _, e := range engines {
		usable = append(usable, e.layout().Pages-1) // but the sink
	}
	return &run{
		o: o, log: o.Logger, name: fmt.Sprintf("replay-%08x", rand.Uint32()), start: time.Now(),
		prefill: engines[:len(o.Prefill)], decode: engines[len(o.Prefill):],
		labels: labelNames(o.Labels), admission: newAdmission(usable),
		stats: stats{
			latency:     hdrhistogram.New(1, int64(time.Hour/time.Microsecond), 3),
			byTransport: make(map[string]int64), releases: make(map[string]int), failures: make(failures),
		},
	}
}

// replay starts the requests in the order of the trace and waits for all.
func (r *run) replay(ctx context.Context) error {
	var work sync.WaitGroup
	defer work.Wait()
	places := make(chan struct{}, r.o.Concurrency)
	for i := range r.o.Requests {
		j := r.newJob(i)
		if n := r.doesNotFit(j); n != nil {
			r.finish(j, n)
			continue
		}
		due := time.Duration(r.o.TimeScale * float64(r.o.Requests[i].Timestamp))
		if err := pause(ctx, time.Until(r.start.Add(due))); err != nil {
			return err
		}
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if err := r.admission.wait(ctx, j.prefill.index, j.decode.index, j.pages); err != nil {
			return err
		}
		work.Go(func() {
			defer func() { <-places }()
			r.finish(j, j.do(ctx))
		})
	}
	return nil
}

// newJob deals request i of the trace out: over all pairs of nodes, in turn.
func (r *run) newJob(i int) *job {
	request := r.o.Requests[i]
	prefill, decode := pair(i, len(r.prefill), len(r.decode))
	j := &job{
		run: r, request: id.Request(fmt.Sprintf("%s-%d", r.name, i)),
		tokens: request.Input, chunk: chunkTokens(request.Input, r.o.ChunkTokens),
		steps:   max(0, min(r.o.DecodeSteps, request.Output)),
		prefill: r.prefill[prefill], decode: r.decode[decode],
		byReference: i%2 == 1, reference: make(chan string, 1),
	}
	j.pages = pagesOf(request, len(r.labels), j.decode.layout().PageSize)
	return j
}

// pair is the i-th of all pairs, each node as often as the others.
func pair(i, prefill, decode int) (int, int) {
	round := prefill * decode / gcd(prefill, decode) // until the pairs would repeat
	return i % prefill, (i + i/round) % decode
}

func gcd(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func (r *run) doesNotFit(j *job) error {
	for _, e := range []*engine{j.prefill, j.decode} {
		if !r.admission.fits(e.index, j.pages) {
			return failf(CodeDoesNotFit, "request %s: input and output need %d pages of %d tokens for %d labels, node %s has %d (give it more pages: arena.pages)",
				j.request, j.pages, e.layout().PageSize, len(r.labels), e.node(), e.layout().Pages-1)
		}
	}
	return nil
}

// now is nanoseconds since the start, never 0.
func (r *run) now() int64 { return int64(time.Since(r.start)) + 1 }

func (r *run) note(f func(*stats)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.stats)
}

func (r *run) noteVerified(n int64)  { r.note(func(s *stats) { s.verified += n }) }
func (r *run) noteWrong(n int64)     { r.note(func(s *stats) { s.wrong += n }) }
func (r *run) noteDecoded(n int64)   { r.note(func(s *stats) { s.decoded += n }) }
func (r *run) noteEarly()            { r.note(func(s *stats) { s.early++ }) }
func (r *run) noteRelease(as string) { r.note(func(s *stats) { s.releases[as]++ }) }

func (r *run) noteReady(after time.Duration, transport string, bytes int64) {
	r.note(func(s *stats) {
		_ = s.latency.RecordValue(max(1, after.Microseconds())) // within its range: Timeout ends all before
		s.byTransport[transport] += bytes
	})
}

// finish counts a request that has ended.
func (r *run) finish(j *job, err error) {
	if err != nil {
		r.log.Warn("request failed", "request", string(j.request), "err", err)
	}
	for _, e := range []*engine{j.prefill, j.decode} {
		e.note(func(n *NodeReport) {
			n.Requests++
			n.Tokens += int64(j.tokens)
			if err != nil {
				n.Failed++
			} else {
				n.Ready++
			}
		})
	}
	r.note(func(s *stats) {
		if err != nil {
			s.failed++
			s.failures.add(err)
		} else {
			s.ready++
		}
	})
}

func (r *run) report() *Report {
	elapsed := time.Since(r.start)
	first := r.decode[0]
	out := &Report{
		Requests: len(r.o.Requests), Labels: len(r.labels), Ranks: len(first.ranks),
		TokenBytes: first.layout().TokenBytes(), Retries: r.retries.Load(),
		Failures: []Failure{}, ElapsedSeconds: elapsed.Seconds(),
	}
	out.Tokens, out.Bytes = Expected(r.o.Requests, out.TokenBytes, out.Labels, out.Ranks)
	r.note(func(s *stats) {
		out.Ready, out.Failed, out.Early = s.ready, s.failed, s.early
		out.VerifiedBytes, out.WrongBytes, out.DecodedTokens = s.verified, s.wrong, s.decoded
		out.BytesByTransport, out.Releases = maps.Clone(s.byTransport), maps.Clone(s.releases)
		for _, code := range slices.Sorted(maps.Keys(s.failures)) {
			out.Failures = append(out.Failures, *s.failures[code])
		}
		out.PublishToReady = Quantiles{
			Count: s.latency.TotalCount(),
			P50:   float64(s.latency.ValueAtQuantile(50)), P90: float64(s.latency.ValueAtQuantile(90)),
			P99: float64(s.latency.ValueAtQuantile(99)), Max: float64(s.latency.Max()),
		}
	})
	for _, e := range slices.Concat(r.prefill, r.decode) {
		e.note(func(n *NodeReport) { out.Nodes = append(out.Nodes, *n) })
	}
	out.BytesPerSecond = float64(out.VerifiedBytes) / elapsed.Seconds()
	out.OK = out.Ready == out.Requests && out.VerifiedBytes == out.Bytes && out.WrongBytes == 0 && out.Early == 0
	return out
}
