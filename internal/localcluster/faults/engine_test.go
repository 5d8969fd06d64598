package faults

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
)

const (
	callLimit = time.Minute // of a call that waits for nobody
	chunks    = 3           // in which a request is published
	// hangLimit is how much later than asked an answer may come.
	hangLimit = 20 * time.Second
)

var (
	errWrongBytes = errors.New("wrong bytes")
	errEarly      = errors.New("ready before the final publish")
	errHang       = errors.New("no answer in time")
)

// engine is the simulated engine of one node.
type engine struct {
	client  *client.Client
	session *client.Session
	region  *memory.Region
	layout  page.Layout
}

func openEngine(ctx context.Context, socket, role string) (*engine, error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	c, err := client.Dial(socket)
	if err != nil {
		return nil, err
	}
	e := &engine{client: c}
	if e.session, err = c.Open(ctx, client.OpenOptions{Engine: "faults", Role: role}); err != nil {
		return nil, errors.Join(err, e.close())
	}
	e.layout = e.session.Geometry().Layout
	if e.region, err = e.session.Arena(ctx, 0); err != nil {
		return nil, errors.Join(err, e.close())
	}
	return e, nil
}

func (e *engine) close() error {
	var errs []error
	if e.session != nil {
		errs = append(errs, e.session.Close())
	}
	if e.region != nil {
		errs = append(errs, e.region.Close())
	}
	return errors.Join(append(errs, e.client.Close())...)
}

func (e *engine) node() string { return string(e.session.Life().Node) }

// vector is where the elements of one head of one token lie.
func (e *engine) vector(layer, side, head int, p uint32, slot int) []byte {
	l := e.layout
	n := l.HeadDim * int(l.DType.Bytes())
	at := ((((layer*l.Pages+int(p))*2+side)*l.PageSize+slot)*l.Heads + head) * n // NHD
	return e.region.Bytes()[at : at+n]
}

// vectors visits all vectors of a token, each with what it has to be.
func (e *engine) vectors(seed uint64, token int, p uint32, visit func(v, want []byte)) {
	want := make([]byte, e.layout.HeadDim*int(e.layout.DType.Bytes()))
	for layer := range e.layout.Layers {
		for side := range 2 {
			for head := range e.layout.Heads {
				kv(want, seed, uint64((layer*2+side)*e.layout.Heads+head), token)
				visit(e.vector(layer, side, head, p, token%e.layout.PageSize), want)
			}
		}
	}
}

// kv makes a vector, whose every word is a function of all that names it. It
// makes tens of megabytes of them, in memory that its caller alone has.
//
//go:norace
func kv(v []byte, seed, place uint64, token int) {
	x := mix(seed ^ mix(place<<40|uint64(token)))
	for i := 0; i < len(v)/8; i++ {
		x += 0x9e3779b97f4a7c15
		binary.LittleEndian.PutUint64(v[i*8:], mix(x))
	}
}

func mix(x uint64) uint64 {
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func seedOf(request string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(request))
	return mix(h.Sum64())
}

// request is one request on its way.
type request struct {
	name   string
	tokens int
	target string        // pushed to; "": gossip alone
	hold   time.Duration // 0: the node's
	pause  time.Duration // before the final publish
	keep   bool          // do not remove it at the publisher

	begun     chan struct{} // closed with the first publish
	reference string        // valid after begun
	final     atomic.Int64  // when the final publish was called, unix nanoseconds
	ready     atomic.Int64  // when the reader was told that all of it is there
}

func newRequest(name string, tokens int) *request {
	return &request{name: name, tokens: tokens, pause: 20 * time.Millisecond, begun: make(chan struct{})}
}

// publish does what a prefill engine does.
func (e *engine) publish(ctx context.Context, r *request) (err error) {
	ctx, cancel := context.WithTimeout(ctx, callLimit)
	defer cancel()
	if _, err := e.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: r.name}); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			e.remove(r.name)
		}
	}()
	for i := range chunks {
		from, to := i*r.tokens/chunks, (i+1)*r.tokens/chunks
		if err := e.publishChunk(ctx, r, from, to); err != nil {
			return fmt.Errorf("publish %s, tokens %d to %d: %w", r.name, from, to, err)
		}
		if i == 0 {
			close(r.begun)
		}
	}
	if r.keep {
		return nil
	}
	_, err = e.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: r.name})
	return err
}

func (e *engine) publishChunk(ctx context.Context, r *request, from, to int) error {
	step, err := e.admit(ctx, r.name, to-from)
	if err != nil {
		return err
	}
	plan := step.GetPlans()[0]
	if len(plan.GetTokenToPage()) != to-from {
		return fmt.Errorf("plan has %d places", len(plan.GetTokenToPage()))
	}
	seed := seedOf(r.name)
	for i, p := range plan.GetTokenToPage() {
		if slot := int(plan.GetTokenToSlot()[i]); slot != (from+i)%e.layout.PageSize {
			return fmt.Errorf("token %d is to be at slot %d of its page", from+i, slot)
		}
		e.vectors(seed, from+i, p, func(v, want []byte) { copy(v, want) })
	}
	final := to == r.tokens
	if final {
		pause(ctx, r.pause) // the last step takes its time
		r.final.Store(time.Now().UnixNano())
	}
	offer := &kvferrypb.PublishRequest{Request: r.name, Target: r.target, Final: final}
	if r.hold > 0 {
		offer.Hold = durationpb.New(r.hold)
	}
	res, err := e.session.Commit(ctx, &kvferrypb.CommitRequest{Step: step.GetStep(), Publish: []*kvferrypb.PublishRequest{offer}})
	if err != nil {
		return err
	}
	if len(res.GetPublished()) != 1 || res.GetPublished()[0].GetFailure() != nil {
		return fmt.Errorf("commit: %v", res.GetPublished())
	}
	published := res.GetPublished()[0].GetResponse()
	if n := published.GetLengths(); len(n) != 1 || int(n[0].GetTokens()) != to {
		return fmt.Errorf("published lengths %v, want %d tokens", n, to)
	}
	if from == 0 {
		r.reference = published.GetReference()
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	<-ctx.Done()
}

func (e *engine) admit(ctx context.Context, name string, span int) (*kvferrypb.AdmitResponse, error) {
	var res *kvferrypb.AdmitResponse
	var err error
	busy := localcluster.WaitFor(ctx, time.Millisecond, func() error {
		res, err = e.session.Admit(ctx, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{{Request: name, Span: uint32(span)}}, Plan: true})
		if client.CodeOf(err) == kvferrypb.Failure_BUSY {
			return err // more of it is being read
		}
		return nil
	})
	if err = errors.Join(busy, err); err == nil && (len(res.GetPlans()) != 1 || len(res.GetPlans()[0].GetViews()) != 1) {
		err = fmt.Errorf("admit %s: %v instead of one plan with one view", name, res.GetPlans())
	}
	return res, err
}

// remove gives up a request; its node may be gone.
func (e *engine) remove(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	_, _ = e.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: name, Discard: true})
}

// retrieve does what a decode engine does, checks every byte, and ends within
// wait: the error is the node's, or one of ours.
func (e *engine) retrieve(ctx context.Context, r *request, reference string, wait time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, wait+callLimit)
	defer cancel()
	if _, err := e.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: r.name}); err != nil {
		return err
	}
	defer e.remove(r.name)
	end := time.Now().Add(wait)
	least := r.tokens / chunks
	for _, tokens := range []int{least, 0} {
		res, err := e.await(ctx, r.name, reference, tokens, time.Until(end))
		ready := time.Now().UnixNano()
		if err != nil {
			return err
		}
		if tokens == 0 {
			tokens = r.tokens
			r.ready.Store(ready)
			if final := r.final.Load(); final == 0 || ready < final {
				return fmt.Errorf("%s: %w", r.name, errEarly)
			}
		}
		if n := res.GetLengths(); len(n) != 1 || int(n[0].GetTokens()) < tokens || int(n[0].GetTokens()) > r.tokens {
			return fmt.Errorf("%s: ready with %v, want %d tokens: %w", r.name, n, tokens, errEarly)
		}
		if err := e.check(ctx, r.name, tokens); err != nil {
			return err
		}
	}
	_, err := e.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: r.name})
	return err
}

// await is AdmitRetrieve until it is ready or has failed, no longer than wait.
func (e *engine) await(ctx context.Context, name, reference string, least int, wait time.Duration) (*kvferrypb.AdmitRetrieveResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, wait+2*hangLimit)
	defer cancel()
	begin := time.Now()
	res, err := e.session.AdmitRetrieve(ctx, &kvferrypb.AdmitRetrieveRequest{
		Request: name, Reference: reference, MinTokens: uint32(least), Wait: durationpb.New(max(wait, time.Millisecond)),
	})
	if took := time.Since(begin); took > wait+hangLimit {
		return res, fmt.Errorf("retrieve %s: answer after %v instead of %v: %w: %w", name, took, wait, errHang, err)
	}
	if err == nil && res.GetReadiness() != kvferrypb.Readiness_READY {
		err = fmt.Errorf("retrieve %s: %v of a call that waits", name, res)
	}
	return res, err
}

// check compares the first tokens of a request with what was published.
func (e *engine) check(ctx context.Context, name string, tokens int) error {
	step, err := e.admit(ctx, name, 0)
	if err != nil {
		return err
	}
	defer func() { _, _ = e.session.Abort(ctx, &kvferrypb.AbortRequest{Step: step.GetStep()}) }()
	plan := step.GetPlans()[0]
	if n := len(plan.GetPagedKvIndices()); n*e.layout.PageSize < tokens {
		return fmt.Errorf("check %s: %d pages cannot hold %d tokens", name, n, tokens)
	}
	seed, wrong, first := seedOf(name), 0, -1
	for token := range tokens {
		p := uint32(plan.GetPagedKvIndices()[token/e.layout.PageSize])
		if n := e.wrong(seed, token, p); n > 0 {
			if wrong += n; first < 0 {
				first = token
			}
		}
	}
	if wrong > 0 {
		return fmt.Errorf("%s at %s: %d vectors, the first of token %d: %w", name, e.node(), wrong, first, errWrongBytes)
	}
	return nil
}

// wrong counts the vectors of a token that are not what they should be if it is in
// the page.
func (e *engine) wrong(seed uint64, token int, p uint32) (wrong int) {
	e.vectors(seed, token, p, func(v, want []byte) {
		if !bytes.Equal(v, want) {
			wrong++
		}
	})
	return wrong
}

// holds says whether all tokens of a request are in the arena, wherever: of a node
// that cannot be asked any more.
func (e *engine) holds(name string, tokens int) error {
	seed := seedOf(name)
	for p, first := 0, 0; first < tokens; first += e.layout.PageSize {
		found := false
		for range e.layout.Pages { // most likely it is the next one
			p = (p + 1) % e.layout.Pages
			found = true
			for token := first; found && token < min(tokens, first+e.layout.PageSize); token++ {
				found = e.wrong(seed, token, uint32(p)) == 0
			}
			if found {
				break
			}
		}
		if !found {
			return fmt.Errorf("%s at %s: no page has the tokens from %d on: %w", name, e.node(), first, errWrongBytes)
		}
	}
	return nil
}

// landed estimates how many bytes of the arena are not zero, up to most.
func (e *engine) landed(most int) (n int) {
	const sample = 64
	all := e.region.Bytes()
	for i := 0; i < len(all) && n < most; i += sample {
		if all[i] != 0 {
			n += sample
		}
	}
	return n
}

// move publishes a request at one node and retrieves it at another, both at once.
func move(ctx context.Context, r *request, from, to *engine, byReference bool, wait time.Duration) error {
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() error {
		if err := from.publish(ctx, r); err != nil {
			return fmt.Errorf("at %s: %w", from.session.Life(), err)
		}
		return nil
	})
	both.Go(func() error {
		if byReference {
			select {
			case <-r.begun:
			case <-ctx.Done():
				return nil // the publisher says why
			}
		}
		if err := to.retrieve(ctx, r, r.given(byReference), wait); err != nil {
			return fmt.Errorf("at %s: %w", to.session.Life(), err)
		}
		return nil
	})
	return both.Wait()
}

// given is the reference, if it is to be used.
func (r *request) given(use bool) string {
	if use {
		return r.reference
	}
	return ""
}

// engineProcess is an engine that says "ready" in the middle of its work and
// never goes on: of a step, or of a retrieve by a reference.
func engineProcess(socket, request, reference string) int {
	ctx := context.Background()
	err := func() error {
		e, err := openEngine(ctx, socket, "both")
		if err != nil {
			return err
		}
		if _, err := e.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: request}); err != nil {
			return err
		}
		if reference == "-" {
			if _, err := e.admit(ctx, request, 3*e.layout.PageSize); err != nil {
				return err
			}
			fmt.Println("ready")
			select {}
		}
		fmt.Println("ready")
		_, err = e.await(ctx, request, reference, 0, time.Minute)
		return err
	}()
	fmt.Fprintln(os.Stderr, "engine:", err)
	return 1
}
