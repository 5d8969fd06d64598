package replay

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

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
	CodeUnreachable = "UNREACHABLE"  // a node's daemon does not answer
	CodeOther       = "OTHER"
)

// Waits between two tries of a call that the node refuses for the moment.
const (
	firstBackoff = time.Millisecond
	lastBackoff  = 100 * time.Millisecond
	cleanTimeout = 10 * time.Second
)

var errTimeout = errors.New("timeout of the request is over")

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
		return CodeUnreachable
	case errors.Is(err, context.Canceled):
		return kvferrypb.Failure_CANCELLED.String()
	}
	return CodeOther
}

// job is one request on its way.
type job struct {
	run             *run
	request         id.Request
	tokens          int
	steps           int // tokens to decode
	chunk           int // tokens of one, but of the last
	pages           int // admitted on both nodes
	prefill, decode *engine
	byReference     bool         // the decode side gets the reference, as through a router
	reference       chan string  // of size 1: of the first publish
	final           atomic.Int64 // nanoseconds of the run when the final publish was called, 0: not yet
}

// chunkTokens cuts a prompt into at least three chunks where it can.
func chunkTokens(tokens, longest int) int {
	return max(1, min(longest, tokens/3))
}

// do runs both sides of the request and waits for them. Whatever happens, it
// leaves nothing of the request on a node that answers.
func (j *job) do(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, j.run.o.Timeout, errTimeout)
	defer cancel()
	released := j.prefill.expectRelease(j.request)
	defer j.prefill.forgetRelease(j.request)
	// The decode side gives its share of the admission back when its request
	// is removed, the prefill side when the pages have come back that the
	// publication holds beyond that.
	defer j.run.admission.release(j.prefill.index, j.pages)
	both, running := errgroup.WithContext(ctx)
	both.Go(func() error { return on("prefill", j.prefill, j.doPrefill(running)) })
	both.Go(func() error {
		defer j.run.admission.release(j.decode.index, j.pages)
		err := j.doDecode(running)
		if err != nil {
			j.clean(ctx, j.decode)
		}
		return on("decode", j.decode, err)
	})
	err := both.Wait()
	if err == nil {
		err = on("prefill", j.prefill, j.awaitRelease(ctx, released))
	}
	if err != nil {
		j.clean(ctx, j.prefill)
	}
	if err != nil && ctx.Err() != nil && client.CodeOf(err) == kvferrypb.Failure_UNSPECIFIED {
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	if err != nil {
		return fmt.Errorf("request %s: %w", j.request, err)
	}
	return nil
}

// on says on which node it went wrong.
func on(side string, e *engine, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s on %s: %w", side, e.node(), err)
}

// awaitRelease waits until the owner says that the publication has ended.
func (j *job) awaitRelease(ctx context.Context, released <-chan string) error {
	select {
	case outcome := <-released:
		j.run.noteRelease(outcome)
		return nil
	case <-ctx.Done():
		return failf(CodeNotReleased, "publication has not ended: %w", context.Cause(ctx))
	}
}

// clean removes what may be left of a request that has failed. A node that
// does not answer has lost it anyway, or ends it with the session.
func (j *job) clean(ctx context.Context, e *engine) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	_, _ = e.session.Cancel(ctx, &kvferrypb.CancelRequest{Request: string(j.request)})
	if _, err := e.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: string(j.request), Discard: true}); err != nil {
		j.run.log.Warn("request was not removed", "request", string(j.request), "node", string(e.node()), "err", err)
	}
}

// again calls f until it is not refused for the moment, or ctx ends.
func again[T any](ctx context.Context, j *job, f func() (T, error)) (T, error) {
	wait := firstBackoff
	for {
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
			return answer, err
		}
		wait = min(2*wait, lastBackoff)
	}
}

// ingest begins the request on a node with all its labels.
func (j *job) ingest(ctx context.Context, e *engine) error {
	needed := &kvferrypb.Labels{}
	for _, l := range j.run.labels {
		needed.Labels = append(needed.Labels, string(l))
	}
	_, err := e.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: string(j.request), Needed: needed})
	return err
}

// step is an admitted step and its plans in the order of the labels.
type step struct {
	token uint64
	plans []*kvferrypb.PlanOutput
}

// admit reserves span new tokens of every label and takes the plan.
func (j *job) admit(ctx context.Context, e *engine, span int) (step, error) {
	request := &kvferrypb.AdmitRequest{Plan: true}
	for _, l := range j.run.labels {
		request.Segments = append(request.Segments, &kvferrypb.Segment{Request: string(j.request), Label: string(l), Span: uint32(span)})
	}
	answer, err := again(ctx, j, func() (*kvferrypb.AdmitResponse, error) { return e.session.Admit(ctx, request) })
	if err != nil {
		return step{}, err
	}
	s := step{token: answer.GetStep()}
	for _, l := range j.run.labels {
		var found *kvferrypb.PlanOutput
		for _, p := range answer.GetPlans() {
			if p.GetLabel() == string(l) {
				found = p
			}
		}
		if found == nil || len(found.GetViews()) != 1 {
			return s, failf(CodeWrongAnswer, "plan of label %s has %d views, want 1", l, len(found.GetViews()))
		}
		s.plans = append(s.plans, found)
	}
	return s, nil
}

// places are the write addresses of the new tokens of a plan.
func (j *job) places(e *engine, p *kvferrypb.PlanOutput, span int) ([]place, error) {
	pages, slots := p.GetTokenToPage(), p.GetTokenToSlot()
	if len(pages) != span || len(slots) != span {
		return nil, failf(CodeWrongAnswer, "plan of label %s has %d pages and %d slots for %d tokens", p.GetLabel(), len(pages), len(slots), span)
	}
	places := make([]place, span)
	for i := range places {
		places[i] = place{page.Index(pages[i]), int(slots[i])}
		if err := e.ranks[0].arena.usable(places[i]); err != nil {
			return nil, failf(CodeWrongAnswer, "plan of label %s: token %d: %w", p.GetLabel(), i, err)
		}
	}
	return places, nil
}

// streamPages are the pages of the whole stream, from a plan.
func (j *job) streamPages(e *engine, p *kvferrypb.PlanOutput, tokens int) ([]page.Index, error) {
	if n := int(p.GetViews()[0].GetLength()); n != tokens {
		return nil, failf(CodeWrongAnswer, "stream of label %s has %d tokens, want %d", p.GetLabel(), n, tokens)
	}
	indices := p.GetPagedKvIndices()
	if want := page.Count(tokens, e.layout().PageSize); len(indices) != want {
		return nil, failf(CodeWrongAnswer, "stream of label %s has %d pages for %d tokens, want %d", p.GetLabel(), len(indices), tokens, want)
	}
	pages := make([]page.Index, len(indices))
	seen := make(map[page.Index]bool, len(indices))
	for i, n := range indices {
		pages[i] = page.Index(n)
		if err := e.ranks[0].arena.usable(place{page: pages[i]}); n < 0 || err != nil {
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
func (j *job) write(e *engine, s step, from, span int) (int64, error) {
	var n int64
	for i, l := range j.run.labels {
		places, err := j.places(e, s.plans[i], span)
		if err != nil {
			return n, err
		}
		for _, r := range e.ranks {
			n += r.arena.write(newPattern(j.request, l, r.id), from, places)
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

func (f failures) add(err error) {
	code := codeOf(err)
	if f[code] == nil {
		f[code] = &Failure{Code: code}
	}
	f[code].Count++
	if text := strings.ToValidUTF8(err.Error(), "?"); len(f[code].Examples) < maxExamples {
		if len(text) > maxExampleText {
			text = strings.ToValidUTF8(text[:maxExampleText], "") + "..."
		}
		f[code].Examples = append(f[code].Examples, text)
	}
}
