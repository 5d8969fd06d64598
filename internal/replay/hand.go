package replay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// ErrWrongBytes is wrapped by Retrieve when bytes are not those of Publish.
var ErrWrongBytes = errors.New("wrong bytes")

// PublishOptions are one request to be published by hand. A zero field means
// its default.
type PublishOptions struct {
	Socket  string // of the prefill node; required
	Request id.Request
	Tokens  int // of the prompt; required
	Chunks  int // it is computed and published in so many; default 1
	Target  id.Node
	Readers int
	Hold    time.Duration
	// CUDALibrary is that of [Options].
	CUDALibrary string
}

// Published is what Publish did.
type Published struct {
	Owner       id.Node        `json:"owner"`
	Incarnation id.Incarnation `json:"incarnation,string"`
	Publication uint64         `json:"publication,string"` // its number at the owner
	Reference   string         `json:"reference"`
	Tokens      int            `json:"tokens"`
	Bytes       int64          `json:"bytes"` // written, on all ranks
}

// Publish does what the prefill side of a Run does with one request, and ends
// its session: the publication lives on by the owner's rule.
func Publish(ctx context.Context, o PublishOptions) (p Published, err error) {
	if o.Chunks == 0 {
		o.Chunks = 1
	}
	if o.Tokens < 1 || o.Tokens > MaxTokens || o.Chunks < 1 || o.Chunks > o.Tokens {
		return p, fmt.Errorf("publish %s: %d tokens in %d chunks: want 1 to %d tokens, and a token in each chunk", o.Request, o.Tokens, o.Chunks, MaxTokens)
	}
	n, err := openLife(ctx, o.Socket, "prefill", o.CUDALibrary)
	if err != nil {
		return p, err
	}
	// The end of the session removes what a failure left.
	defer func() { err = errors.Join(err, n.close()) }()
	if l := n.layout(); page.Count(o.Tokens, l.PageSize) >= l.Pages {
		return p, fmt.Errorf("publish %s: %d tokens need %d pages of %d, node %s has %d (give it more pages: arena.pages)",
			o.Request, o.Tokens, page.Count(o.Tokens, l.PageSize), l.PageSize, n.node(), l.Pages-1)
	}
	p.Owner, p.Incarnation = n.session.Life().Node, n.session.Life().Incarnation
	j := byHand(o.Request)
	if err := j.ingest(ctx, n); err != nil {
		return p, err
	}
	for i := range o.Chunks {
		from, to := i*o.Tokens/o.Chunks, (i+1)*o.Tokens/o.Chunks
		s, err := j.admit(ctx, n, from, to-from)
		if err != nil {
			return p, err
		}
		written, err := j.write(s, from)
		if err != nil {
			return p, errors.Join(err, s.abort(ctx))
		}
		p.Bytes += written
		offer := &kvferrypb.PublishRequest{Request: string(o.Request), Target: string(o.Target), Readers: uint32(o.Readers), Final: to == o.Tokens}
		if o.Hold > 0 {
			offer.Hold = durationpb.New(o.Hold)
		}
		if _, err := s.commit(ctx); err != nil {
			return p, err
		}
		answer, err := n.session.Publish(ctx, offer)
		if err != nil {
			return p, err
		}
		p.Tokens, p.Reference, p.Publication = to, answer.GetReference(), answer.GetPublication()
	}
	_, err = n.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: string(o.Request)})
	return p, err
}

// RetrieveOptions are one request to be retrieved by hand. A zero field means
// its default.
type RetrieveOptions struct {
	Socket    string // of the decode node; required
	Request   id.Request
	Reference string        // default: whoever published the request
	MinTokens int           // be content with so many; default: all, up to the final publication
	Wait      time.Duration // for them to be there; default: not at all
	Verify    bool          // against what Publish wrote
	// CUDALibrary is that of [Options].
	CUDALibrary string
}

// Retrieved is what Retrieve did.
type Retrieved struct {
	Owner       id.Node        `json:"owner"`
	Incarnation id.Incarnation `json:"incarnation,string"`
	Transport   string         `json:"transport"`
	Tokens      int            `json:"tokens"`
	Bytes       int64          `json:"bytes"`          // moved
	Verified    int64          `json:"verified_bytes"` // looked at and right
	Seconds     float64        `json:"elapsed_seconds"`
}

// Retrieve does what the decode side of a Run does with one request, and
// removes it. The error wraps ErrWrongBytes if they were not those of Publish.
func Retrieve(ctx context.Context, o RetrieveOptions) (r Retrieved, err error) {
	n, err := openLife(ctx, o.Socket, "decode", o.CUDALibrary)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	j := byHand(o.Request)
	j.decode = n
	if err := j.ingest(ctx, n); err != nil {
		return r, err
	}
	begin := time.Now()
	answer, err := n.session.AdmitRetrieve(ctx, &kvferrypb.AdmitRetrieveRequest{
		Request: string(o.Request), Reference: o.Reference, MinTokens: uint32(o.MinTokens), Wait: durationpb.New(o.Wait),
	})
	r.Seconds = time.Since(begin).Seconds()
	if err != nil {
		return r, err
	}
	r.Owner, r.Incarnation = id.Node(answer.GetOwner()), id.Incarnation(answer.GetOwnerIncarnation())
	r.Transport, r.Bytes = answer.GetTransport(), int64(answer.GetBytes())
	for _, l := range answer.GetLengths() {
		r.Tokens = int(l.GetTokens())
	}
	if answer.GetReadiness() != kvferrypb.Readiness_READY {
		return r, fmt.Errorf("request %s is not ready: %d tokens have landed (wait longer, or be content with fewer tokens)", o.Request, r.Tokens)
	}
	if o.Verify {
		r.Verified, err = j.check(ctx, j.lengths(r.Tokens), r.Tokens)
		if _, wrong := errors.AsType[*mistake](err); wrong {
			return r, fmt.Errorf("%w: %w", ErrWrongBytes, err)
		}
		if err != nil {
			return r, err
		}
	}
	_, err = n.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: string(o.Request)})
	return r, err
}

// byHand is a job outside of any trace.
func byHand(r id.Request) *job {
	return &job{run: &run{}, request: r, streams: []stream{{label: id.Main}}}
}
