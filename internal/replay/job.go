package replay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Codes of failures that this package finds itself.
const (
	CodeDoesNotFit  = "DOES_NOT_FIT" // more pages than a node has
	CodeEarly       = "READY_EARLY"  // ready before the final publish, or with less than it
	CodeWrongBytes  = "WRONG_BYTES"  // landed bytes are not those published
	CodeWrongAnswer = "WRONG_ANSWER" // a node's answer contradicts what was asked
	CodeNotReleased = "NOT_RELEASED" // the owner did not tell the end of the publication
	CodeTimeout     = "TIMEOUT"      // Options.Timeout is over
	CodeNodeLost    = "NODE_LOST"    // the process of a node that the request was given to is gone
	CodeNoNode      = "NO_NODE"      // no node of a role takes requests
	CodeOther       = "OTHER"
)

// Waits between two tries of a call that the node refuses for the moment.
const (
	firstBackoff = time.Millisecond
	lastBackoff  = 100 * time.Millisecond
	cleanTimeout = 10 * time.Second
)

var (
	errTimeout   = errors.New("timeout of the request is over")
	errOtherSide = errors.New("the other side of the request has failed")
)

// failure gives an error of this package its code.
type failure struct {
	code string
	err  error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

func failf(code, format string, args ...any) error {
	return &failure{code, fmt.Errorf(format, args...)}
}

// codeOf names the kind of a failure for the report.
func codeOf(err error) string {
	var f *failure
	switch {
	case errors.As(err, &f):
		return f.code
	case client.CodeOf(err) != kvferrypb.Failure_UNSPECIFIED:
		return client.CodeOf(err).String()
	case errors.Is(err, errTimeout), errors.Is(err, context.DeadlineExceeded):
		return CodeTimeout
	case errors.Is(err, client.ErrUnreachable):
		return CodeNodeLost
	case errors.Is(err, context.Canceled):
		return kvferrypb.Failure_CANCELLED.String()
	}
	return CodeOther
}

// because says why a call failed if it was the end of its context.
func because(ctx context.Context, err error) error {
	if _, ours := errors.AsType[*failure](err); err == nil || ours || ctx.Err() == nil || client.CodeOf(err) != kvferrypb.Failure_UNSPECIFIED {
		return err
	}
	return fmt.Errorf("%w: %w", context.Cause(ctx), err)
}

// job is one request on its way.
type job struct {
	run      *run
	number   int
	request  id.Request
	tokens   int
	steps    int // tokens to decode
	chunk    int // tokens of one, but of the last
	pages    int // admitted on both nodes
	from, to *engine
	// The lives of both nodes that the request begins with. It ends with them.
	prefill, decode *life
	byReference     bool          // the decode side gets the reference, as through a router
	reference       chan string   // of size 1: of the first publish
	final           atomic.Int64  // nanoseconds of the run when the final publish was called, 0: not yet
	published       bool          // the final publication stands, and its end was not told
	released        <-chan string // how it ended
	verified        int64         // bytes that are ready and right
	begun           time.Time     // zero: it was not
}

// chunkTokens cuts a prompt into at least three chunks where it can.
func chunkTokens(tokens, longest int) int {
	return max(1, min(longest, tokens/3))
}

// do runs both sides of the request and waits for them: it is ready if the
// error is nil. Whatever happens, nothing of the request is left on a node that
// answers, but for the final publication; see settle.
//
// A publisher whose reader has failed stops. A reader whose publisher has
// failed does not, once it knows of a publication: then its node has to say what
// became of it, and may have all of it.
func (j *job) do(ctx context.Context) error {
	j.begun = time.Now()
	ctx, cancel := context.WithTimeoutCause(ctx, j.run.o.Timeout, errTimeout)
	defer cancel()
	wanted, noReader := context.WithCancelCause(ctx)
	defer noReader(nil)
	offered, noPublisher := context.WithCancelCause(ctx)
	defer noPublisher(nil)
	// Also one that has published all of it: if nobody has heard, it died with it.
	defer context.AfterFunc(j.prefill.ctx, func() { noPublisher(errOtherSide) })()
	j.released = j.prefill.expectRelease(j.request)
	var prefill, decode error
	var sides sync.WaitGroup
	sides.Go(func() {
		prefill = j.side(wanted, "prefill", j.prefill, j.doPrefill)
		if prefill != nil {
			noPublisher(errOtherSide)
		}
	})
	sides.Go(func() {
		decode = j.side(ctx, "decode", j.decode, func(ctx context.Context) error { return j.doDecode(ctx, offered) })
		if decode != nil {
			noReader(errOtherSide)
		}
		j.run.admission.release(j.decode.pages, j.pages)
		j.decode.giveBack()
	})
	sides.Wait()
	if prefill == nil && errors.Is(decode, errOtherSide) {
		prefill = context.Cause(j.prefill.ctx)
	}
	err := j.outcome(prefill, decode)
	if err == nil {
		err = j.awaitRelease(ctx)
	}
	if err != nil {
		return fmt.Errorf("request %s: %w", j.request, err)
	}
	return nil
}

// side runs one side of the request on its node, and cleans up when it fails.
func (j *job) side(ctx context.Context, name string, l *life, f func(context.Context) error) error {
	within, stop := l.within(ctx)
	defer stop()
	// A call may have noticed the end of the life before within has.
	err := because(l.ctx, because(within, f(within)))
	if err == nil {
		return nil
	}
	l.judge(err)
	j.clean(ctx, l)
	return fmt.Errorf("%s on %s: %w", name, l.node(), err)
}

// outcome is how the request ended, from how its sides did: what the reader was
// told, unless only the publisher's failure is a reason or a mistake.
func (j *job) outcome(prefill, decode error) error {
	switch {
	case decode == nil && (codeOf(prefill) == CodeNodeLost || codeOf(prefill) == kvferrypb.Failure_NO_SESSION.String()):
		return nil // the reader had everything before
	case errors.Is(prefill, errOtherSide):
		return decode
	case decode == nil, errors.Is(decode, errOtherSide), prefill != nil && explanation(codeOf(prefill)) == "":
		return prefill
	default:
		return decode
	}
}

// awaitRelease waits until the owner says that the publication has ended. If
// one of its nodes is gone by then, that is no matter of the request's any more.
func (j *job) awaitRelease(ctx context.Context) error {
	select {
	case outcome := <-j.released:
		j.noteRelease(outcome)
		return nil
	case <-j.prefill.ctx.Done():
		return nil
	case <-j.decode.ctx.Done():
		return nil // its acknowledgement may be lost with it
	case <-ctx.Done():
		return failf(CodeNotReleased, "prefill on %s: publication has not ended: %w", j.prefill.node(), context.Cause(ctx))
	}
}

func (j *job) noteRelease(outcome string) {
	j.published = false
	j.run.noteRelease(outcome)
}

// settle waits until what the request has published is over, for only then are
// its pages back at the owner. When ctx ends, or over is closed, they stay.
func (j *job) settle(ctx context.Context, over <-chan struct{}) {
	if j.published {
		select {
		case outcome := <-j.released:
			j.noteRelease(outcome)
		case <-j.prefill.ctx.Done():
			j.noteRelease(releasedLost)
		case <-over:
		case <-ctx.Done():
		}
	}
	j.prefill.forgetRelease(j.request)
	j.run.admission.release(j.prefill.pages, j.pages)
	j.prefill.giveBack()
}

// releasedLost is the end of a publication whose owner died first.
const releasedLost = "lost"

// regardless is for calls that would leave something behind if they were cut
// off, or that clean up: also when ctx has ended.
func (l *life) regardless(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	ctx, stop := l.within(ctx)
	return ctx, func() {
		stop()
		cancel()
	}
}

// clean removes what may be left of a request that has failed. A node that
// does not answer has lost it anyway, or ends it with the session.
func (j *job) clean(ctx context.Context, l *life) {
	if l.lost() {
		return
	}
	ctx, stop := l.regardless(ctx)
	defer stop()
	_, _ = l.session.Cancel(ctx, &kvferrypb.CancelRequest{Request: string(j.request)})
	if _, err := l.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: string(j.request), Discard: true}); err != nil {
		l.judge(err)
		j.run.log.Warn("request was not removed", "request", string(j.request), "node", string(l.node()), "err", err)
	}
}

// again calls f until it is not refused for the moment, or ctx ends.
func again[T any](ctx context.Context, j *job, f func() (T, error)) (T, error) {
	wait := firstBackoff
	for {
		if ctx.Err() != nil {
			return *new(T), context.Cause(ctx)
		}
		answer, err := f()
		switch client.CodeOf(err) {
		case kvferrypb.Failure_RESOURCE_EXHAUSTED, kvferrypb.Failure_BUSY:
		default:
			return answer, err
		}
		j.run.retries.Add(1)
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return answer, fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		wait = min(2*wait, lastBackoff)
	}
}

// ingest begins the request on a node with all its labels.
func (j *job) ingest(ctx context.Context, l *life) error {
	needed := &kvferrypb.Labels{}
	for _, label := range j.run.labels {
		needed.Labels = append(needed.Labels, string(label))
	}
	ctx, stop := l.regardless(ctx) // nobody would remove what comes to be after it was given up
	defer stop()
	_, err := l.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: string(j.request), Needed: needed})
	return err
}

// step is an admitted step and its plans in the order of the labels.
type step struct {
	life  *life
	token uint64
	plans []*kvferrypb.PlanOutput
	ended bool // committed or aborted
}

// admit reserves span new tokens of every label and takes the plan. The caller
// gives the step up when it is done with it.
func (j *job) admit(ctx context.Context, l *life, span int) (*step, error) {
	request := &kvferrypb.AdmitRequest{Plan: true}
	for _, label := range j.run.labels {
		request.Segments = append(request.Segments, &kvferrypb.Segment{Request: string(j.request), Label: string(label), Span: uint32(span)})
	}
	answer, err := again(ctx, j, func() (*kvferrypb.AdmitResponse, error) {
		// Without its answer nobody could end the step.
		ctx, stop := l.regardless(ctx)
		defer stop()
		return l.session.Admit(ctx, request)
	})
	if err != nil {
		return nil, err
	}
	s := &step{life: l, token: answer.GetStep()}
	for _, label := range j.run.labels {
		var found *kvferrypb.PlanOutput
		for _, p := range answer.GetPlans() {
			if p.GetLabel() == string(label) {
				found = p
			}
		}
		if found == nil || len(found.GetViews()) != 1 {
			s.giveUp(ctx)
			return nil, failf(CodeWrongAnswer, "plan of label %s has %d views, want 1", label, len(found.GetViews()))
		}
		s.plans = append(s.plans, found)
	}
	return s, nil
}

// commit makes the step's tokens part of the streams, and publishes.
func (s *step) commit(ctx context.Context, publish ...*kvferrypb.PublishRequest) (*kvferrypb.CommitResponse, error) {
	answer, err := s.life.session.Commit(ctx, &kvferrypb.CommitRequest{Step: s.token, Publish: publish})
	s.ended = err == nil
	return answer, err
}

func (s *step) abort(ctx context.Context) error {
	_, err := s.life.session.Abort(ctx, &kvferrypb.AbortRequest{Step: s.token})
	s.ended = err == nil
	return err
}

// giveUp aborts a step that has not ended, also when ctx has.
func (s *step) giveUp(ctx context.Context) {
	if s.ended || s.life.lost() {
		return
	}
	ctx, stop := s.life.regardless(ctx)
	defer stop()
	_ = s.abort(ctx) // a commit that was cut off may have ended it
}

// places are the write addresses of the new tokens of a plan.
func (l *life) places(p *kvferrypb.PlanOutput, span int) ([]place, error) {
	pages, slots := p.GetTokenToPage(), p.GetTokenToSlot()
	if len(pages) != span || len(slots) != span {
		return nil, failf(CodeWrongAnswer, "plan of label %s has %d pages and %d slots for %d tokens", p.GetLabel(), len(pages), len(slots), span)
	}
	places := make([]place, span)
	for i := range places {
		places[i] = place{page.Index(pages[i]), int(slots[i])}
		if err := l.ranks[0].arena.usable(places[i]); err != nil {
			return nil, failf(CodeWrongAnswer, "plan of label %s: token %d: %w", p.GetLabel(), i, err)
		}
	}
	return places, nil
}

// streamPages are the pages of the whole stream, from a plan.
func (l *life) streamPages(p *kvferrypb.PlanOutput, tokens int) ([]page.Index, error) {
	if n := int(p.GetViews()[0].GetLength()); n != tokens {
		return nil, failf(CodeWrongAnswer, "stream of label %s has %d tokens, want %d", p.GetLabel(), n, tokens)
	}
	indices := p.GetPagedKvIndices()
	if want := page.Count(tokens, l.layout().PageSize); len(indices) != want {
		return nil, failf(CodeWrongAnswer, "stream of label %s has %d pages for %d tokens, want %d", p.GetLabel(), len(indices), tokens, want)
	}
	pages := make([]page.Index, len(indices))
	seen := make(map[page.Index]bool, len(indices))
	for i, n := range indices {
		pages[i] = page.Index(n)
		if err := l.ranks[0].arena.usable(place{page: pages[i]}); n < 0 || err != nil {
			return nil, failf(CodeWrongAnswer, "stream of label %s: page %d of the list is %d, which is none", p.GetLabel(), i, n)
		}
		if seen[pages[i]] {
			return nil, failf(CodeWrongAnswer, "stream of label %s: page %d is in the list twice", p.GetLabel(), n)
		}
		seen[pages[i]] = true
	}
	return pages, nil
}

// write puts the tokens of a step where its plans say, on every rank.
func (j *job) write(s *step, from, span int) (int64, error) {
	var n int64
	for i, label := range j.run.labels {
		places, err := s.life.places(s.plans[i], span)
		if err != nil {
			return n, err
		}
		for _, r := range s.life.ranks {
			n += r.arena.write(newPattern(j.request, label, r.id), from, places)
		}
	}
	return n, nil
}

// labelNames are main, cfg, cfg2 and so on.
func labelNames(n int) []id.Label {
	labels := []id.Label{id.Main, "cfg"}
	for i := 2; i < n; i++ {
		labels = append(labels, id.Label(fmt.Sprintf("cfg%d", i)))
	}
	return labels[:n]
}

// failures collects failures by code.
type failures map[string]*Failure

const (
	maxExamples    = 3
	maxExampleText = 600
)

func (f failures) add(err error, took time.Duration) {
	code := codeOf(err)
	if f[code] == nil {
		f[code] = &Failure{Code: code, Explained: explanation(code)}
	}
	f[code].Count++
	f[code].Longest = max(f[code].Longest, took.Seconds())
	if text := strings.ToValidUTF8(err.Error(), "?"); len(f[code].Examples) < maxExamples {
		if len(text) > maxExampleText {
			text = strings.ToValidUTF8(text[:maxExampleText], "") + "..."
		}
		f[code].Examples = append(f[code].Examples, text)
	}
}
