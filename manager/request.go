package manager

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// request is one life of a request id: from Ingest to Remove.
type request struct {
	id      id.Request
	needs   Needs
	streams []*stream // in the order they were made
	byLabel map[id.Label]*stream
	// epoch is the content epoch: it moves when tokens that were there are
	// there no more (Reset, Remove, a retrieve that starts over), never when
	// tokens are added. Each request counts for itself, so that the nodes of
	// one rank group, which see the same calls, agree on it.
	epoch       uint32
	inFlight    int          // segments of steps in flight, of this epoch
	reading     *retrieval   // running or draining; nil: none
	publication *publication // live, and of this epoch; nil: none
	ended       bool         // the publication of this epoch was ended
	missing     Token        // scratch of Commit
}

// stream is the tokens of one (request, label).
//
// pages may be longer than the tokens need: what was reserved stays.
type stream struct {
	label    id.Label
	pages    []page.Index
	stored   int    // committed tokens; what lies below is never written again
	mutation uint64 // moves with every change of pages or stored
	named    int    // of pages, how many request.publication names
	origin   origin // what was retrieved; zero: nothing
	landed   int    // tokens of origin; stored is beyond once a step was committed
	// Segments in flight that write tokens. Two steps may have been admitted
	// at the same length; when one is committed, the other one's slots lie
	// below stored: it has been overtaken and can't be committed any more.
	writing, overtaken int
	seen               Token // scratch of Admit
}

// origin is the publication that a stream was retrieved from.
type origin struct {
	name  id.Publication
	epoch uint32
}

// diverged reports whether a step was committed on what was retrieved.
func (s *stream) diverged() bool { return s.origin != origin{} && s.stored > s.landed }

// add makes a stream that does not exist.
func (r *request) add(l id.Label) *stream {
	s := &stream{label: l}
	r.streams = append(r.streams, s)
	r.byLabel[l] = s
	return s
}

// drop takes the stream back that was added last.
func (r *request) drop(s *stream) {
	delete(r.byLabel, s.label)
	r.streams = r.streams[:len(r.streams)-1]
}

// disown lets the publication live, or end, without its request.
func (r *request) disown() {
	r.publication.request = nil
	r.publication = nil
	for _, s := range r.streams {
		s.named = 0
	}
}

// Stored returns the committed length of a stream, in tokens. Tokens that are
// being read or computed are not in it.
func (m *Manager) Stored(r id.Request, l id.Label) (tokens int, err error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	if req == nil {
		return 0, fmt.Errorf("stored of %q: %w", r, ErrUnknownRequest)
	}
	s := req.byLabel[l]
	if s == nil {
		return 0, fmt.Errorf("stored of %q label %q: %w", r, l, ErrUnknownLabel)
	}
	return s.stored, nil
}

// RequestState is one request for people to look at.
type RequestState struct {
	Request   id.Request
	Streams   []StreamState // in the order they were made
	InFlight  bool          // a step is
	Reading   bool          // a retrieval runs or drains
	Published PublicationID // 0: none live
	Final     bool          // it is SEALED
}

// StreamState is one stream for people to look at.
type StreamState struct {
	Label  id.Label
	Tokens int // committed
	Pages  int // reserve included
}

// Request returns one live request.
func (m *Manager) Request(r id.Request) (RequestState, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	if req == nil {
		return RequestState{}, fmt.Errorf("request %q: %w", r, ErrUnknownRequest)
	}
	return req.state(), nil
}

// Requests lists the live requests, sorted, at most limit (0: all).
func (m *Manager) Requests(limit int) []RequestState {
	m.mu.Lock()
	defer m.unlock()
	all := make([]*request, 0, len(m.requests))
	for _, r := range m.requests {
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b *request) int { return strings.Compare(string(a.id), string(b.id)) })
	if limit > 0 && limit < len(all) {
		all = all[:limit]
	}
	list := make([]RequestState, len(all))
	for i, r := range all {
		list[i] = r.state()
	}
	return list
}

func (r *request) state() RequestState {
	s := RequestState{Request: r.id, InFlight: r.inFlight > 0, Reading: r.reading != nil}
	if p := r.publication; p != nil {
		s.Published, s.Final = p.id, p.final
	}
	for _, t := range r.streams {
		s.Streams = append(s.Streams, StreamState{Label: t.label, Tokens: t.stored, Pages: len(t.pages)})
	}
	return s
}
