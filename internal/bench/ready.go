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
// request is ready on the other node: one page, everything warm, one request
// at a time, the page checked. Every other publication names that node; of the
// rest it hears by gossip alone.
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

	ways := []struct {
		name    string
		target  string
		latency *hdrhistogram.Histogram
	}{
		{name: "the reader named", target: string(decode.session.Life().Node)},
		{name: "by gossip alone"},
	}
	for i := range ways {
		ways[i].latency = hdrhistogram.New(1, sampleTimeout.Microseconds(), 3)
	}
	name := fmt.Sprintf("bench-%08x", rand.Uint32())
	transport := ""
	for i := range o.Warmup + o.Samples {
		for k, way := range ways {
			took, by, err := onePage(ctx, prefill, decode, fmt.Sprintf("%s-%d-%d", name, i, k), way.target)
			if err != nil {
				return fmt.Errorf("publish to ready, %s: sample %d: %w", way.name, i, err)
			}
			if i >= o.Warmup {
				transport = by
				_ = way.latency.RecordValue(min(max(1, took.Microseconds()), sampleTimeout.Microseconds()))
			}
		}
	}
	for _, way := range ways {
		row := Row{
			Name: "publish to ready, one page, " + way.name, Transport: transport, ChunkBytes: prefill.layout.LayerPageBytes(), Concurrency: 1,
			P50: float64(way.latency.ValueAtQuantile(50)), P90: float64(way.latency.ValueAtQuantile(90)), P99: float64(way.latency.ValueAtQuantile(99)),
			Samples: way.latency.TotalCount(),
		}
		fmt.Fprintf(o.Progress, "publish to ready of one page, %s: p50 %.0f us, p99 %.0f us\n", way.name, row.P50, row.P99)
		r.Rows = append(r.Rows, row)
		if way.target != "" {
			r.Figures = append(r.Figures, ceiling("publish to ready of one page on a warm pair, p50", row.P50/1000, "ms", 2))
		}
	}
	return nil
}

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

// onePage is one sample; target may be "". It leaves no request behind.
func onePage(ctx context.Context, prefill, decode *engine, request, target string) (took time.Duration, transport string, err error) {
	ctx, cancel := context.WithTimeout(ctx, sampleTimeout)
	defer cancel()
	defer func() {
		clean, done := context.WithTimeout(context.WithoutCancel(ctx), sampleTimeout)
		defer done()
		for _, e := range []*engine{prefill, decode} {
			if _, failed := e.session.Remove(clean, &kvferrypb.RemoveRequest{Request: request}); err == nil && failed != nil {
				err = failed
			}
		}
	}()
	for _, e := range []*engine{prefill, decode} {
		if _, err := e.session.Ingest(ctx, &kvferrypb.IngestRequest{Request: request}); err != nil {
			return 0, "", err
		}
	}
	step, pages, err := prefill.admit(ctx, request, prefill.layout.PageSize)
	if err != nil {
		return 0, "", err
	}
	seed := rand.Uint64()
	for layer := range prefill.layout.Layers {
		b := prefill.piece(layer, pages[0])
		for at := 0; at+8 <= len(b); at += 8 {
			binary.LittleEndian.PutUint64(b[at:], content(seed+uint64(layer)<<32+uint64(at)))
		}
	}
	if _, err := prefill.session.Commit(ctx, &kvferrypb.CommitRequest{Step: step}); err != nil {
		return 0, "", err
	}

	type answer struct {
		at       time.Time
		response *kvferrypb.AdmitRetrieveResponse
		err      error
	}
	answered := make(chan answer, 1)
	go func() { // ends with ctx at the latest, and before this function returns
		response, err := decode.session.AdmitRetrieve(ctx, &kvferrypb.AdmitRetrieveRequest{Request: request, Wait: durationpb.New(sampleTimeout)})
		answered <- answer{time.Now(), response, err}
	}()
	time.Sleep(settle)
	start := time.Now()
	_, published := prefill.session.Publish(ctx, &kvferrypb.PublishRequest{Request: request, Target: target, Final: true})
	if published != nil {
		cancel()
	}
	a := <-answered
	if err := errors.Join(published, a.err); err != nil {
		return 0, "", err
	}
	if a.response.GetReadiness() != kvferrypb.Readiness_READY {
		return 0, "", fmt.Errorf("node answers %v", a.response.GetReadiness())
	}

	step, pages, err = decode.admit(ctx, request, 0)
	if err != nil {
		return 0, "", err
	}
	if _, err := decode.session.Abort(ctx, &kvferrypb.AbortRequest{Step: step}); err != nil {
		return 0, "", err
	}
	for layer := range decode.layout.Layers {
		b := decode.piece(layer, pages[0])
		for at := 0; at+8 <= len(b); at += 8 {
			if want, have := content(seed+uint64(layer)<<32+uint64(at)), binary.LittleEndian.Uint64(b[at:]); have != want {
				return 0, "", fmt.Errorf("wrong byte: layer %d, word at %d is %#x, want %#x", layer, at, have, want)
			}
		}
	}
	return a.at.Sub(start), a.response.GetTransport(), nil
}

// admit reserves span tokens and returns the pages of the stream: one.
func (e *engine) admit(ctx context.Context, request string, span int) (step uint64, pages []page.Index, err error) {
	answer, err := e.session.Admit(ctx, &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: request, Span: uint32(span)}}})
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
	if len(pages) != 1 {
		return 0, nil, fmt.Errorf("plan has %d pages, want 1", len(pages))
	}
	return answer.GetStep(), pages, nil
}

// piece is the part of a page that lies in one layer.
func (e *engine) piece(layer int, p page.Index) []byte {
	c := e.layout.Chunks(layer, p, 0, e.layout.PageSize)
	return e.bytes[c.First : c.First+c.Bytes]
}
