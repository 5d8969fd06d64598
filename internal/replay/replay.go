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
// A request may have several streams, as classifier-free guidance has: main, and
// others that are forks of it from one of the chunks on, or are written beside
// it from the first token on ([Options].Labels).
//
// Nothing that is checked comes from what was moved: a byte of KV is a
// function of request, label, rank, token, layer, K or V, head, and element
// (pattern.go), its place is computed by an arithmetic of this package's own
// (arena.go), and how many bytes there must be follows from the trace alone
// ([Expected]).
//
// A request starts when the pages of its input and output fit beside those of
// all started ones on both of its nodes (admission.go), in the order of the
// trace; until then it holds nothing anywhere. Where a node has a host tier, what
// is there counts, too: then more requests run than the arena holds, the node
// moves those that are idle to its host, and whoever finds a request there has it
// brought back (job.go, again). Its decode side asks for it at
// once, and so holds its lease at the owner while it waits for the rest.
//
// Nodes may die and come back meanwhile. A request belongs to one life of each
// of its nodes (life.go): with the life it ends, typed, and the engine looks for
// the next life of its node (engine.go), to which other requests are given. What
// such a node explains, and what nothing explains, is told apart (explained.go).
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

	"github.com/kvferry/kvferry/api/kvferrypb"
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
	// side that has more. What fits in the arenas, and on the hosts of decode
	// nodes, is the other bound, always.
	Concurrency int
	// Labels is how many streams a request has, of equal length: main, cfg,
	// cfg2 and so on, some of them forks of main; default 1, at most
	// [MaxReplayLabels].
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
	// StepPause lies behind every token that is decoded: an engine that serves
	// others meanwhile. Default none.
	StepPause time.Duration
	// Timeout of one request from its start to its end; default 120 s.
	Timeout time.Duration
	// Loop replays the requests again and again, under new names, until it is
	// over; the first time whole. Default 0: once.
	Loop time.Duration
	// NodeWait is how long a request waits for a node of either role to be up.
	// Then it fails with [CodeNoNode], and so does the rest of the trace, of that
	// time through it. Default 30 s.
	NodeWait time.Duration
	// Settle is how long, after the last request, the publications of failed
	// ones may take to run out: the hold and the lease of the nodes, and some
	// more. Default 60 s.
	Settle time.Duration
	// CUDALibrary is the path of libcuda, for arenas in the memory of a device;
	// default: where the loader finds it.
	CUDALibrary string
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
// in the report, see [Report.OK] and [Report.Unexplained]; the error says why
// the run as a whole could not be made (wrong options, a node that is not
// reachable at the start, or differs from the others or from its former life)
// or was ended (ctx), then with the report of what was done until then. Run
// leaves no request and no session on a node that can be reached.
func Run(ctx context.Context, o Options) (*Report, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	engines, k, err := openEngines(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	r := newRun(o, engines, k, stop)
	letGo := r.keepEngines(ctx)
	show := startProgress(o.Progress, r)
	err = r.replay(ctx)
	show.close()
	if err == nil {
		r.lookForLeft(ctx)
	}
	letGo()
	report := r.report() // with every loss
	if err != nil {
		return report, fmt.Errorf("replay: %w", err)
	}
	return report, nil
}

// keepEngines lets every engine hold on to its node, until the function that it
// returns is called.
func (r *run) keepEngines(ctx context.Context) (letGo func()) {
	// The end of a run ends its requests first.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var kept sync.WaitGroup
	for _, e := range r.engines() {
		kept.Go(func() { e.keep(ctx, r) })
	}
	return func() {
		cancel()
		kept.Wait()
	}
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
	case o.Concurrency < 0 || o.ChunkTokens < 0 || o.Timeout < 0 || o.StepPause < 0:
		return o, fmt.Errorf("concurrency %d, chunk %d, timeout %v, or pause of a step %v is negative", o.Concurrency, o.ChunkTokens, o.Timeout, o.StepPause)
	case o.Loop < 0 || o.NodeWait < 0 || o.Settle < 0:
		return o, fmt.Errorf("loop %v, wait for nodes %v or time to settle %v is negative", o.Loop, o.NodeWait, o.Settle)
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
	o.NodeWait = cmp.Or(o.NodeWait, 30*time.Second)
	o.Settle = cmp.Or(o.Settle, 60*time.Second)
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
	name      string                  // in front of every request's name, so that no two runs meet
	stop      context.CancelCauseFunc // ends it
	start     time.Time
	prefill   []*engine
	decode    []*engine
	kind      kind // of all nodes
	labels    []id.Label
	admission *admission
	retries   atomic.Int64

	mu    sync.Mutex
	stats stats
}

// stats is what has happened so far.
type stats struct {
	requests                int   // of the trace, and those begun of its repetitions
	tokens, readyTokens     int64 // of their prompts
	ready, failed, early    int
	verified, wrong, decode int64
	latency                 *hdrhistogram.Histogram // microseconds
	byTransport             map[string]int64
	releases                map[string]int
	failures                failures
	took                    time.Duration // until the last request ended
}

func newRun(o Options, engines []*engine, k kind, stop context.CancelCauseFunc) *run {
	r := &run{
		o: o, log: o.Logger, name: fmt.Sprintf("replay-%08x", rand.Uint32()), stop: stop, start: time.Now(),
		prefill: engines[:len(o.Prefill)], decode: engines[len(o.Prefill):], kind: k,
		labels: labelNames(o.Labels), admission: newAdmission(widest(o.Requests, k.geometry.Layout.PageSize)),
		stats: stats{
			latency:     hdrhistogram.New(1, int64(time.Hour/time.Microsecond), 3),
			byTransport: make(map[string]int64), releases: make(map[string]int), failures: make(failures),
		},
	}
	r.stats.requests = len(o.Requests)
	r.stats.tokens, _ = Expected(o.Requests, 0, 0, 0)
	return r
}

func (r *run) engines() []*engine { return slices.Concat(r.prefill, r.decode) }

// bytes are what so many tokens of prompts have on the decode nodes.
func (r *run) bytes(tokens int64) int64 {
	return tokens * r.kind.geometry.Layout.TokenBytes() * int64(len(r.labels)) * int64(len(r.kind.ranks))
}

// replay goes through the trace once, or until Loop is over, and waits for
// everything that it has started.
func (r *run) replay(ctx context.Context) error {
	w := &work{places: make(chan struct{}, r.o.Concurrency), over: make(chan struct{})}
	giveUp := sync.OnceFunc(func() { close(w.over) })
	var err error
	for round := 0; err == nil; round++ {
		var started int
		started, err = r.replayOnce(ctx, w, round)
		if r.loopIsOver() || started == 0 { // with nothing to start it would only spin
			break
		}
	}
	w.running.Wait()
	r.note(func(s *stats) { s.took = time.Since(r.start) })
	defer time.AfterFunc(r.o.Settle, giveUp).Stop()
	w.jobs.Wait()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return err
}

func (r *run) loopIsOver() bool { return time.Since(r.start) >= r.o.Loop }

// work is what a run has started.
type work struct {
	places  chan struct{}  // of those that run
	running sync.WaitGroup // until their requests have ended
	jobs    sync.WaitGroup // until they have settled
	over    chan struct{}  // closed when they may not settle any longer
}

// replayOnce starts the requests in the order of the trace and returns how many.
func (r *run) replayOnce(ctx context.Context, w *work, round int) (started int, err error) {
	begin := time.Now()
	var nobody error // why the rest cannot start
	for i, request := range r.o.Requests {
		if round > 0 {
			if r.loopIsOver() {
				return started, nil
			}
			r.note(func(s *stats) { s.requests++; s.tokens += int64(request.Input) })
		}
		j := r.newJob(round*len(r.o.Requests)+i, request)
		if nobody != nil {
			r.finish(j, nobody)
			continue
		}
		due := time.Duration(r.o.TimeScale * float64(request.Timestamp))
		if err := pause(ctx, time.Until(begin.Add(due))); err != nil {
			return started, err
		}
		select {
		case w.places <- struct{}{}:
		case <-ctx.Done():
			return started, context.Cause(ctx)
		}
		err := r.assign(ctx, j)
		if err == nil {
			started++
			r.begin(ctx, w, j)
			continue
		}
		if ctx.Err() != nil {
			return started, err
		}
		if codeOf(err) == CodeNoNode {
			nobody = err
		}
		<-w.places
		r.finish(j, err)
	}
	return started, nil
}

// begin starts a request that has its nodes and their pages.
func (r *run) begin(ctx context.Context, w *work, j *job) {
	w.running.Add(1)
	w.jobs.Go(func() {
		r.finish(j, j.do(ctx))
		<-w.places
		w.running.Done()
		j.settle(ctx, w.over)
	})
}

// newJob is the n-th request of the run.
func (r *run) newJob(n int, request Request) *job {
	chunk := chunkTokens(request.Input, r.o.ChunkTokens)
	return &job{
		run: r, number: n, request: id.Request(fmt.Sprintf("%s-%d", r.name, n)),
		tokens: request.Input, chunk: chunk, streams: streamsOf(n, r.labels, request.Input, chunk),
		steps:       max(0, min(r.o.DecodeSteps, request.Output)),
		pages:       pagesOf(request, len(r.labels), r.kind.geometry.Layout.PageSize),
		byReference: n%2 == 1, reference: make(chan string, 1),
	}
}

// assign gives a job two nodes and its pages on them. The nodes are dealt out
// over all pairs, in turn; for one that takes no requests the next one of its
// role steps in. While one role has none it waits up to NodeWait.
func (r *run) assign(ctx context.Context, j *job) error {
	patience := time.NewTimer(r.o.NodeWait)
	defer patience.Stop()
	for {
		missing := r.pick(j)
		if missing == nil {
			patience.Reset(r.o.NodeWait)
			if err := r.doesNotFit(j); err != nil {
				j.putBack()
				return err
			}
			if r.admission.take(j.prefill.pages, j.decode.pages, j.pages) {
				return nil
			}
			j.putBack()
		}
		select {
		case <-r.admission.changed:
		case <-patience.C:
			if missing != nil {
				return failf(CodeNoNode, "request %s: no %s node takes requests for %v: %w", j.request, missing[0].role, r.o.NodeWait, missing[0].state())
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// pick takes a life of a node of each role for a job, or returns the nodes of
// the role that has none.
func (r *run) pick(j *job) (missing []*engine) {
	from, to := pair(j.number, len(r.prefill), len(r.decode))
	if j.from, j.prefill = takeNext(r.prefill, from); j.prefill == nil {
		return r.prefill
	}
	if j.to, j.decode = takeNext(r.decode, to); j.decode == nil {
		j.prefill.giveBack()
		j.from, j.prefill = nil, nil
		return r.decode
	}
	return nil
}

// takeNext takes the life of the i-th engine, or of the next one that has any.
func takeNext(engines []*engine, i int) (*engine, *life) {
	for n := range engines {
		e := engines[(i+n)%len(engines)]
		if l := e.take(); l != nil {
			return e, l
		}
	}
	return nil, nil
}

// putBack undoes pick.
func (j *job) putBack() {
	j.prefill.giveBack()
	j.decode.giveBack()
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
	for _, l := range []*life{j.prefill, j.decode} {
		if !l.pages.fits(j.pages) {
			return failf(CodeDoesNotFit, "request %s: input and output need %d pages of %d tokens for %d labels, node %s has %d (give it more pages: arena.pages)",
				j.request, j.pages, l.layout().PageSize, len(r.labels), l.node(), l.layout().Pages-1)
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

func (r *run) noteWrong(n int64)     { r.note(func(s *stats) { s.wrong += n }) }
func (r *run) noteDecoded(n int64)   { r.note(func(s *stats) { s.decode += n }) }
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
	var took time.Duration
	if !j.begun.IsZero() {
		took = time.Since(j.begun)
	}
	for _, e := range []*engine{j.from, j.to} {
		if e == nil { // it was given to no node
			continue
		}
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
			s.failures.add(err, took)
		} else {
			s.ready++
			s.readyTokens += int64(j.tokens)
			s.verified += j.verified
		}
	})
}

func (r *run) report() *Report {
	out := &Report{
		Labels: len(r.labels), Ranks: len(r.kind.ranks),
		TokenBytes: r.kind.geometry.Layout.TokenBytes(), Retries: r.retries.Load(),
		Failures: []Failure{},
	}
	r.note(func(s *stats) {
		out.Requests, out.Ready, out.Failed, out.Early = s.requests, s.ready, s.failed, s.early
		out.Tokens, out.Bytes, out.ReadyBytes = s.tokens, r.bytes(s.tokens), r.bytes(s.readyTokens)
		out.VerifiedBytes, out.WrongBytes, out.DecodedTokens = s.verified, s.wrong, s.decode
		out.BytesByTransport, out.Releases = maps.Clone(s.byTransport), maps.Clone(s.releases)
		for _, code := range slices.Sorted(maps.Keys(s.failures)) {
			out.Failures = append(out.Failures, *s.failures[code])
			if code == CodeNodeLost || code == kvferrypb.Failure_OWNER_LOST.String() {
				out.Lost += s.failures[code].Count
			}
		}
		out.PublishToReady = Quantiles{
			Count: s.latency.TotalCount(),
			P50:   float64(s.latency.ValueAtQuantile(50)), P90: float64(s.latency.ValueAtQuantile(90)),
			P99: float64(s.latency.ValueAtQuantile(99)), Max: float64(s.latency.Max()),
		}
		out.ElapsedSeconds = s.took.Seconds()
		out.BytesPerSecond = float64(out.VerifiedBytes) / out.ElapsedSeconds
	})
	left := 0
	for _, e := range r.engines() {
		e.note(func(n *NodeReport) { out.Nodes = append(out.Nodes, *n) })
	}
	for _, n := range out.Nodes {
		left += len(n.Left)
		out.Offloading += n.Offloading
		out.Reloads += n.Reloads
	}
	out.OK = out.Ready == out.Requests && !out.Corrupt() && left == 0
	out.Explained = out.Unexplained() == nil
	return out
}
