package replay

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
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
	streams  []stream // main first
	tokens   int      // of the prompt, in every stream
	steps    int      // tokens to decode
	chunk    int      // tokens of one, but of the last
	pages    int      // admitted on both nodes
	from, to *engine
	// The lives of both nodes that the request begins with. It ends with them.
	prefill, decode *life
	byReference     bool          // the decode side gets the reference, as through a router
	reference       chan string   // of size 1: of the first publish
	final           atomic.Int64  // nanoseconds of the run when the final publish was called, 0: not yet
	published       bool          // the final publication stands, and its end was not told
	leftPrefill     bool          // it has no pages on its prefill node any more
	released        <-chan string // how it ended
	verified        int64         // bytes that are ready and right
	begun           time.Time     // zero: it was not
}

// chunkTokens cuts a prompt into at least three chunks where it can.
func chunkTokens(tokens, longest int) int {
	return max(1, min(longest, tokens/3))
}

// streamsOf are the streams of the n-th request. Of those beside main, as
// classifier-free guidance has them, every other one begins as a fork of main at
// one of the chunks, the rest are written side by side with main from the first
// token on.
func streamsOf(n int, labels []id.Label, tokens, chunk int) []stream {
	streams := make([]stream, len(labels))
	chunks := (tokens + chunk - 1) / chunk
	for i, label := range labels {
		streams[i].label = label
		if i > 0 && (n+i)%2 == 1 && chunks > 1 {
			streams[i].forked = (1 + (n+i)/2%(chunks-1)) * chunk
		}
	}
	return streams
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
	var prefill, decode, unreleased error
	var sides sync.WaitGroup
	sides.Go(func() {
		prefill = j.side(wanted, "prefill", j.prefill, j.doPrefill)
		if prefill != nil {
			noPublisher(errOtherSide)
			return
		}
		if unreleased = j.awaitRelease(wanted); !j.published {
			j.releasePrefill()
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
		err = unreleased
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
	case errors.Is(prefill, errOtherSide), decode != nil && codeOf(prefill) == CodeNotReleased:
		return decode
	case decode == nil, errors.Is(decode, errOtherSide), prefill != nil && explanation(codeOf(prefill)) == "":
		return prefill
	default:
		return decode
	}
}

// awaitRelease waits until the owner says that the publication has ended. If
// one of its nodes is gone by then, that is no matter of the request's any more;
// nor is it if the reader has failed, which ends ctx.
func (j *job) awaitRelease(ctx context.Context) error {
	if !j.published {
		return nil
	}
	select {
	case outcome := <-j.released:
		j.noteRelease(outcome)
		return nil
	case <-j.prefill.ctx.Done():
		return nil
	case <-j.decode.ctx.Done():
		return nil // its acknowledgement may be lost with it
	case <-ctx.Done():
		if j.prefill.lost() || j.decode.lost() {
			return nil
		}
		return failf(CodeNotReleased, "prefill on %s: publication has not ended: %w", j.prefill.node(), context.Cause(ctx))
	}
}

func (j *job) noteRelease(outcome string) {
	j.published = false
	j.run.noteRelease(outcome)
}

// releasePrefill says, once, that the request has no pages on its prefill node.
func (j *job) releasePrefill() {
	if !j.leftPrefill {
		j.leftPrefill = true
		j.run.admission.release(j.prefill.pages, j.pages)
	}
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
	j.releasePrefill()
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

// again calls f until the node does not refuse it for the moment, or ctx ends;
// then the error is the last refusal. A request whose tokens the node has moved to
// its host is brought back first.
func again[T any](ctx context.Context, j *job, l *life, f func() (T, error)) (T, error) {
	wait := firstBackoff
	var refused error
	for {
		switch {
		case ctx.Err() == nil:
		case refused != nil:
			return *new(T), fmt.Errorf("%w: %w", context.Cause(ctx), refused)
		default:
			return *new(T), context.Cause(ctx)
		}
		answer, err := f()
		if client.CodeOf(err) == kvferrypb.Failure_OFFLOADING {
			l.moved.offloading.Add(1)
			if err = j.reload(ctx, l); err == nil {
				continue
			}
		}
		switch {
		case j.passes(err):
			refused = err
		case refused != nil && ctx.Err() != nil:
			continue
		default:
			return answer, err
		}
		j.run.retries.Add(1)
		_ = pause(ctx, wait/2+rand.N(wait/2)) // at random: others want the same pages
		wait = min(2*wait, lastBackoff)
	}
}

// passes reports whether a call that was refused may be made again.
func (j *job) passes(err error) bool {
	switch client.CodeOf(err) {
	case kvferrypb.Failure_RESOURCE_EXHAUSTED, kvferrypb.Failure_BUSY, kvferrypb.Failure_OFFLOADING:
		return true
	case kvferrypb.Failure_STALE: // its publisher's node has moved it to the host too often
		return j.prefill != nil && j.prefill.hostPages > 0
	default:
		return false
	}
}

// reload asks a node once to bring the request back from its host.
func (j *job) reload(ctx context.Context, l *life) error {
	answer, err := l.session.Reload(ctx, &kvferrypb.ReloadRequest{Request: string(j.request)})
	if err == nil && answer.GetPages() > 0 {
		l.moved.reloads.Add(1)
	}
	return err
}

// ingest begins the request on a node with all its labels.
func (j *job) ingest(ctx context.Context, l *life) error {
	needed := &kvferrypb.Labels{}
	for _, s := range j.streams {
		needed.Labels = append(needed.Labels, string(s.label))
	}
	ctx, stop := l.regardless(ctx) // nobody would remove what comes to be after it was given up
	defer stop()
	_, err := l.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: string(j.request), Needed: needed})
	return err
}

// step is an admitted step.
type step struct {
	life  *life
	token uint64
	views []view // in the order of the job's streams
	ended bool   // committed or aborted
}

// view is one stream as a step sees it.
type view struct {
	stream stream
	pages  []page.Index // of the whole stream
	places []place      // of the step's tokens
	length int          // with those
}

// combinedLabel is the plan label of steps that pack all streams together.
const combinedLabel = "all"

// admit reserves span new tokens, those from from on, of every stream that there
// is by then, makes the forks that are due, and takes the plan. The caller gives
// the step up when it is done with it.
func (j *job) admit(ctx context.Context, l *life, from, span int) (*step, error) {
	request := &kvferrypb.AdmitRequest{Plan: true}
	var streams []stream
	var labels []string
	for _, s := range j.streams {
		if s.forked > from {
			continue
		}
		if s.forked > 0 && s.forked == from {
			request.PreForks = append(request.PreForks, &kvferrypb.Fork{From: string(id.Main), To: string(s.label)})
		}
		request.Segments = append(request.Segments, &kvferrypb.Segment{Request: string(j.request), Label: string(s.label), Span: uint32(span)})
		streams, labels = append(streams, s), append(labels, string(s.label))
	}
	if len(labels) > 1 && span > 0 && (j.number+from/span)%2 == 0 {
		request.Combined = []*kvferrypb.Combined{{Sources: labels, Label: combinedLabel}}
	}
	answer, err := again(ctx, j, l, func() (*kvferrypb.AdmitResponse, error) {
		// Without its answer nobody could end the step.
		ctx, stop := l.regardless(ctx)
		defer stop()
		return l.session.Admit(ctx, request)
	})
	if err != nil {
		return nil, err
	}
	s := &step{life: l, token: answer.GetStep()}
	if s.views, err = l.views(j.request, streams, answer.GetPlans()); err == nil {
		for _, v := range s.views {
			if len(v.places) != span {
				err = failf(CodeWrongAnswer, "plan of label %s has places for %d tokens, want %d", v.stream.label, len(v.places), span)
			}
		}
	}
	if err != nil {
		s.giveUp(ctx)
		return nil, err
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

// write puts the tokens of a step where its plans say, on every rank.
func (j *job) write(s *step, from int) (written int64, err error) {
	for _, v := range s.views {
		for _, r := range s.life.ranks {
			n, err := r.write(newPattern(j.request, v.stream.label, r.id), from, v.places)
			if err != nil {
				return written, fmt.Errorf("write tokens %d to %d of label %s on rank %d of node %s: %w", from, from+len(v.places), v.stream.label, r.id, s.life.node(), err)
			}
			written += n
		}
	}
	return written, nil
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
