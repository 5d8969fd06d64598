package bench

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/page"
)

const (
	openTimeout   = 30 * time.Second
	sampleTimeout = 20 * time.Second
	// The reader's call is to wait at its node before anything is published.
	settle = 2 * time.Millisecond
)

// benchReady measures the time from the call of Publish to the answer that the
// request is ready on the other node: everything warm, one request at a time, the
// pages checked; of one page, and of many.
func benchReady(ctx context.Context, o Options, r *Report) error {
	if o.Prefill == "" {
		r.Missing = append(r.Missing, "publish to ready: no pair of nodes was named (kvferry local up)")
		return nil
	}
	prefill, err := openEngine(ctx, o.Prefill, "prefill")
	if err != nil {
		return err
	}
	defer prefill.close()
	decode, err := openEngine(ctx, o.Decode, "decode")
	if err != nil {
		return err
	}
	defer decode.close()
	if d := prefill.layout.Pages; d < 2 || decode.layout.Pages < 2 {
		return errors.New("publish to ready: a node has no page")
	}
	q := &pair{prefill: prefill, decode: decode, name: fmt.Sprintf("bench-%08x", rand.Uint32())}
	if err := q.onePage(ctx, o, r); err != nil {
		return err
	}
	return q.manyPages(ctx, o, r)
}

// pair are two engines, one of which publishes what the other waits for.
type pair struct {
	prefill, decode *engine
	name            string // how requests begin
	requests        int
}

// onePage measures one page. Every other publication names the node that waits; of
// the rest it hears by gossip alone.
func (q *pair) onePage(ctx context.Context, o Options, r *Report) error {
	ways := []struct {
		name    string
		target  string
		latency *hdrhistogram.Histogram
	}{
		{name: "the reader named", target: q.reader()},
		{name: "by gossip alone"},
	}
	for i := range ways {
		ways[i].latency = hdrhistogram.New(1, sampleTimeout.Microseconds(), 3)
	}
	transport := ""
	for i := range o.Warmup + o.Samples {
		for _, way := range ways {
			s, err := q.publish(ctx, 1, way.target)
			if err != nil {
				return fmt.Errorf("publish to ready, %s: sample %d: %w", way.name, i, err)
			}
			if i >= o.Warmup {
				transport = s.transport
				_ = way.latency.RecordValue(min(max(1, s.took.Microseconds()), sampleTimeout.Microseconds()))
			}
		}
	}
	for _, way := range ways {
		row := Latency{
			Name: "publish to ready, one page, " + way.name, Transport: transport, Bytes: q.prefill.layout.PageBytes(),
			P50: float64(way.latency.ValueAtQuantile(50)), P90: float64(way.latency.ValueAtQuantile(90)), P99: float64(way.latency.ValueAtQuantile(99)),
			Samples: way.latency.TotalCount(),
		}
		fmt.Fprintf(o.Progress, "publish to ready of one page by %s, %s: p50 %.0f us, p99 %.0f us\n", transport, way.name, row.P50, row.P99)
		r.Latencies = append(r.Latencies, row)
		if way.target != "" {
			r.Figures = append(r.Figures, ceiling(fmt.Sprintf("publish to ready of one page on a warm pair by %s, p50", transport), row.P50/1000, "ms", 1))
		}
	}
	return nil
}

// reader is the name of the node that waits.
func (q *pair) reader() string { return string(q.decode.session.Life().Node) }

// engine is a session and the first rank's arena.
type engine struct {
	client  *client.Client
	session *client.Session
	region  io.Closer
	bytes   []byte
	layout  page.Layout
}

func openEngine(ctx context.Context, socket, role string) (*engine, error) {
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	c, err := client.Dial(socket)
	if err != nil {
		return nil, err
	}
	e := &engine{client: c}
	if e.session, err = c.Open(ctx, client.OpenOptions{Engine: "bench", Role: role}); err != nil {
		e.close()
		return nil, fmt.Errorf("node at %s: %w", socket, err)
	}
	e.layout = e.session.Geometry().Layout
	region, err := e.session.Arena(ctx, e.session.Ranks()[0])
	if err != nil {
		e.close()
		return nil, fmt.Errorf("node at %s: %w", socket, err)
	}
	e.region, e.bytes = region, region.Bytes()
	if int64(len(e.bytes)) < e.layout.Bytes() {
		e.close()
		return nil, fmt.Errorf("node at %s: arena has %d bytes, its geometry needs %d", socket, len(e.bytes), e.layout.Bytes())
	}
	return e, nil
}

func (e *engine) close() {
	if e.session != nil {
		_ = e.session.Close() // what it holds ends with its grace anyway
	}
	if e.region != nil {
		_ = e.region.Close()
	}
	_ = e.client.Close()
}

// published is one sample: how long it took, by which transport, and the pages on
// both sides.
type published struct {
	took          time.Duration
	transport     string
	remote, local []page.Index
}

// publish publishes so many pages, all committed before and final, and waits for
// them; target may be "". It leaves no request behind.
func (q *pair) publish(ctx context.Context, pages int, target string) (s published, err error) {
	ctx, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	q.requests++
	request := fmt.Sprintf("%s-%d", q.name, q.requests)
	defer func() {
		clean, done := context.WithTimeout(context.WithoutCancel(ctx), sampleTimeout)
		defer done()
		for _, e := range []*engine{q.prefill, q.decode} {
			if _, failed := e.session.Remove(clean, &kvferrypb.RemoveRequest{Request: request}); err == nil && failed != nil {
				err = failed
			}
		}
	}()
	for _, e := range []*engine{q.prefill, q.decode} {
		if _, err := e.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: request}); err != nil {
			return s, err
		}
	}
	var step uint64
	if step, s.remote, err = q.prefill.admit(ctx, request, pages, pages*q.prefill.layout.PageSize); err != nil {
		return s, err
	}
	seed := rand.Uint64()
	q.prefill.write(s.remote, seed)
	if _, err := q.prefill.session.Commit(ctx, &kvferrypb.CommitRequest{Step: step}); err != nil {
		return s, err
	}

	type answer struct {
		at       time.Time
		response *kvferrypb.AdmitRetrieveResponse
		err      error
	}
	answered := make(chan answer, 1)
	go func() { // ends with ctx at the latest, and before this function returns
		response, err := q.decode.session.AdmitRetrieve(ctx, &kvferrypb.AdmitRetrieveRequest{Request: request, Wait: durationpb.New(sampleTimeout)})
		answered <- answer{time.Now(), response, err}
	}()
	time.Sleep(settle)
	start := time.Now()
	_, failed := q.prefill.session.Publish(ctx, &kvferrypb.PublishRequest{Request: request, Target: target, Final: true})
	if failed != nil {
		cancel()
	}
	a := <-answered
	if err := errors.Join(failed, a.err); err != nil {
		return s, err
	}
	if a.response.GetReadiness() != kvferrypb.Readiness_READY {
		return s, fmt.Errorf("node answers %v", a.response.GetReadiness())
	}
	s.took, s.transport = a.at.Sub(start), a.response.GetTransport()

	if step, s.local, err = q.decode.admit(ctx, request, pages, 0); err != nil {
		return s, err
	}
	if _, err := q.decode.session.Abort(ctx, &kvferrypb.AbortRequest{Step: step}); err != nil {
		return s, err
	}
	return s, q.decode.check(s.local, seed)
}

// admit reserves span tokens and returns the pages of the stream, of which there
// have to be so many. It waits for those of the request before, which end when
// their reader's acknowledgement has come.
func (e *engine) admit(ctx context.Context, request string, want, span int) (step uint64, pages []page.Index, err error) {
	admit := &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: request, Span: uint32(span)}}}
	answer, err := e.session.Admit(ctx, admit)
	for client.CodeOf(err) == kvferrypb.Failure_RESOURCE_EXHAUSTED && ctx.Err() == nil {
		time.Sleep(settle)
		answer, err = e.session.Admit(ctx, admit)
	}
	if err != nil {
		return 0, nil, err
	}
	for _, p := range answer.GetPlans() {
		for _, i := range p.GetPagedKvIndices() {
			if i <= 0 || int(i) >= e.layout.Pages {
				return 0, nil, fmt.Errorf("plan names page %d of %d", i, e.layout.Pages)
			}
			pages = append(pages, page.Index(i))
		}
	}
	if len(pages) != want {
		return 0, nil, fmt.Errorf("plan has %d pages, want %d", len(pages), want)
	}
	return answer.GetStep(), pages, nil
}

// write fills the pages of a stream with what check expects.
func (e *engine) write(pages []page.Index, seed uint64) {
	for layer := range e.layout.Layers {
		for i, p := range pages {
			b, first := e.piece(layer, i, p, seed)
			for at := 0; at+8 <= len(b); at += 8 {
				binary.LittleEndian.PutUint64(b[at:], content(first+uint64(at)))
			}
		}
	}
}

func (e *engine) check(pages []page.Index, seed uint64) error {
	for layer := range e.layout.Layers {
		for i, p := range pages {
			b, first := e.piece(layer, i, p, seed)
			for at := 0; at+8 <= len(b); at += 8 {
				if want, have := content(first+uint64(at)), binary.LittleEndian.Uint64(b[at:]); have != want {
					return fmt.Errorf("%w: layer %d, page %d of the stream, word at %d is %#x, want %#x", errWrongByte, layer, i, at, have, want)
				}
			}
		}
	}
	return nil
}

// piece is the part of a page that lies in one layer, and the word of content that
// it begins with: the page is the stream's i-th.
func (e *engine) piece(layer, i int, p page.Index, seed uint64) (b []byte, first uint64) {
	c := e.layout.Chunks(layer, p, 0, e.layout.PageSize)
	return e.bytes[c.First : c.First+c.Bytes], seed + uint64(layer)<<40 + uint64(i)*uint64(c.Bytes)
}
