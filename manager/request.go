package manager

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// request is one life of a request id: from Ingest to Remove, or, if it is kept,
// to the end of its publication.
type request struct {
	id        id.Request
	key       id.Request // of Manager.kept, once it was removed and is kept; "" before
	needs     Needs
	retention map[id.Label]Retention
	streams   []*stream // in the order they were made; few
	// epoch is the content epoch: it moves when tokens that were there are
	// there no more (Reset, Remove, a fork onto them, a retrieve that starts
	// over), never when tokens are added or retention lets some go. Each request
	// counts for itself, so that the nodes of one rank group, which see the same
	// calls, agree on it.
	epoch       uint32
	active      uint64       // tick of the last call that used it
	inFlight    int          // segments and forks of steps in flight, of this epoch
	forking     *step        // the step that forks and has not ended; while the request lives it is the only one
	reading     *retrieval   // running or draining; nil: none
	moving      *hostMove    // to or from the host; nil: none
	publication *publication // live, and of this epoch; nil: none
	ended       bool         // the publication of this epoch was ended
	purses      []purse      // what the engine has given and no stream has used; few
	missing     Token        // scratch of Commit
	row         Token        // scratch of Admit
}

// stream is the tokens of one (request, label). Token t lies in
// pages[t/size] if it is in front of what was released, else in
// pages[(t-released)/size], at slot t%size.
//
// pages may be longer than the tokens need: what was reserved stays.
type stream struct {
	label     id.Label
	pages     []page.Index
	stored    int    // committed tokens; what lies below is never written again
	released  int    // tokens that retention let go, whole pages
	prefix    int    // tokens kept in front of those, whole pages
	position  int    // kept for others; see SetPosition
	mutation  uint64 // moves with every change of pages or stored
	named     int    // of pages, how many request.publication names
	listed    bool   // it offers the stream
	offered   int    // tokens that it offers
	offersAt  int    // start at that time
	bare      bool   // it offered them without pages, when it was announced last
	retention Retention
	state     State
	host      []page.Index // while OnHost or Reloading
	origin    origin       // what was retrieved; zero: nothing
	landed    int          // tokens of origin; stored is beyond once a step was committed
	// Segments in flight that write tokens. Two steps may have been admitted
	// at the same length; when one is committed, the other one's slots lie
	// below stored: it has been overtaken and can't be committed any more.
	writing, overtaken int
	reach              reach // scratch of Admit
}

// origin is the publication that a stream was retrieved from.
type origin struct {
	name  id.Publication
	rest  string // names of the other nodes', for a comparison
	epoch uint32
}

// diverged reports whether a step was committed on what was retrieved.
func (s *stream) diverged() bool { return s.origin != origin{} && s.stored > s.landed }

// stream returns nil if there is none.
func (r *request) stream(l id.Label) *stream {
	for _, s := range r.streams {
		if s.label == l {
			return s
		}
	}
	return nil
}

// add makes a stream that does not exist.
func (r *request) add(l id.Label) *stream {
	s := &stream{label: l, retention: r.retention[l]}
	r.streams = append(r.streams, s)
	return s
}

// drop takes a stream back.
func (r *request) drop(s *stream) {
	r.streams = slices.DeleteFunc(r.streams, func(o *stream) bool { return o == s })
}

// disown lets the publication live, or end, without its request.
func (r *request) disown() {
	r.publication.request = nil
	r.publication = nil
	for _, s := range r.streams {
		s.named, s.listed, s.offered, s.offersAt, s.bare = 0, false, 0, 0, false
	}
}

// intact reports whether all that the publication offers is in the streams:
// retention has let go of none of it.
func (r *request) intact() bool {
	for _, s := range r.streams {
		if s.listed && s.start() != s.offersAt {
			return false
		}
	}
	return true
}

// handle is what a request is called by in moves: its id, or the key of a kept one.
func (r *request) handle() id.Request { return cmp.Or(r.key, r.id) }

// byHandle returns a live request, or a kept one; nil if there is none.
func (m *Manager) byHandle(r id.Request) *request {
	if req := m.requests[r]; req != nil {
		return req
	}
	return m.kept[r]
}

// all visits the live requests and the kept ones, in no order.
func (m *Manager) all(yield func(*request) bool) {
	for _, list := range []map[id.Request]*request{m.requests, m.kept} {
		for _, r := range list {
			if !yield(r) {
				return
			}
		}
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
	s := req.stream(l)
	if s == nil {
		return 0, fmt.Errorf("stored of %q label %q: %w", r, l, ErrUnknownLabel)
	}
	return s.stored, nil
}

// SetPosition sets a stream's position: a count that other resources of the
// engine keep with it (M*'s position). The manager only carries it: a fork
// copies it (before the segments as it is at Admit, after them as it is at
// Commit), the host keeps it, Reset zeroes it.
func (m *Manager) SetPosition(r id.Request, l id.Label, position int) error {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	if req == nil {
		return fmt.Errorf("position of %q: %w", r, ErrUnknownRequest)
	}
	s := req.stream(l)
	if s == nil {
		return fmt.Errorf("position of %q label %q: %w", r, l, ErrUnknownLabel)
	}
	s.position = position
	return nil
}

// RequestState is one request for people to look at.
type RequestState struct {
	Request      id.Request
	Kept         id.Request    // the key of a kept one (see Removed); "" of a live one
	Streams      []StreamState // in the order they were made
	ContentEpoch uint32
	InFlight     bool          // a step is
	Reading      bool          // a retrieval runs or drains
	Moving       bool          // to or from the host
	Published    PublicationID // 0: none live
	Final        bool          // it is SEALED
}

// StreamState is one stream for people to look at.
type StreamState struct {
	Label      id.Label
	State      State
	Tokens     int // committed, Released included
	Released   int // tokens
	Prefix     int // tokens in front of the released
	Position   int
	Pages      int // on the device, reserve included
	HostPages  int
	Generation uint64 // mutation epoch
}

// Request returns one live request, or a kept one by its key.
func (m *Manager) Request(r id.Request) (RequestState, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.byHandle(r)
	if req == nil {
		return RequestState{}, fmt.Errorf("request %q: %w", r, ErrUnknownRequest)
	}
	return req.state(), nil
}

// Requests lists the live requests and the kept ones, sorted, at most limit (0: all).
func (m *Manager) Requests(limit int) []RequestState {
	m.mu.Lock()
	defer m.unlock()
	all := slices.AppendSeq(make([]*request, 0, len(m.requests)+len(m.kept)), m.all)
	slices.SortFunc(all, func(a, b *request) int { return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.key, b.key)) })
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
	s := RequestState{
		Request: r.id, Kept: r.key, ContentEpoch: r.epoch, InFlight: r.inFlight > 0, Reading: r.reading != nil, Moving: r.moving != nil,
	}
	if p := r.publication; p != nil {
		s.Published, s.Final = p.id, p.final
	}
	for _, t := range r.streams {
		s.Streams = append(s.Streams, StreamState{
			Label: t.label, State: t.state, Tokens: t.stored, Released: t.released, Prefix: t.prefix, Position: t.position,
			Pages: len(t.pages), HostPages: len(t.host), Generation: t.mutation,
		})
	}
	return s
}
