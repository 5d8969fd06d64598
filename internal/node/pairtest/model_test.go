package pairtest

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// token names the bytes of one token: which step of which life computed it, for
// which stream and position. No two are equal in a whole run of the test, so old
// bytes show.
type token uint64

var (
	names  = []id.Request{"a", "b", "pad"}
	labels = []id.Label{id.Main, "cfg", "alt"}
)

func newToken(writer uint32, r id.Request, l id.Label, position int) token {
	return token(writer)<<32 | token(slices.Index(names, r))<<28 | token(slices.Index(labels, l))<<24 | token(position)
}

func (k token) String() string {
	return fmt.Sprintf("step %d: request %s label %s position %d", k>>32, names[k>>28&15], labels[k>>24&15], k&(1<<24-1))
}

func (k token) writer() uint32 { return uint32(k >> 32) }

// bytes are those of one piece.
func (k token) bytes(r id.Rank, x piece) uint64 {
	v := uint64(k)*0x9e3779b97f4a7c15 + uint64(r)<<6 + uint64(x.layer)<<4 + uint64(x.kv)<<2 + uint64(x.head)
	v = (v ^ v>>29) * 0xbf58476d1ce4e5b9
	return v ^ v>>32
}

// model is what a side must be like, whatever its manager does.
type model struct {
	requests     map[id.Request]*request
	kept         map[id.Request]*request // removed, and there for their publications, by key
	steps        []*step
	moves        []*hostMove
	pulls        []*pull
	publications map[manager.PublicationID]*publication
	ending       []manager.PublicationID // their word is to be cleared
	ended        []manager.PublicationID // it was cleared; Unsealed is to be called
}

func newModel() model {
	return model{requests: make(map[id.Request]*request), kept: make(map[id.Request]*request), publications: make(map[manager.PublicationID]*publication)}
}

// request is one life of a request id.
type request struct {
	id        id.Request
	key       id.Request // of one that is kept
	resets    int
	needs     []id.Label
	retention map[id.Label]manager.Retention
	streams   map[id.Label]*stream
	pull      *pull
	move      *hostMove
	published manager.PublicationID // live, of these tokens; 0: none
	final     bool
	revoked   bool // its publication was ended by the node
}

// stream is the tokens of one (request, label).
type stream struct {
	tokens           []token // by position, what was released included
	released, prefix int
	position         int
	retention        manager.Retention
	state            manager.State
	pages            []page.Index // that hold tokens, on the device
	host             []page.Index
	origin           origin
	landed           int // tokens of origin
	computed         int // tokens in front of what was retrieved that were computed here
	before           look
}

// look is what a stream was like after the operation before.
type look struct {
	generation uint64
	tokens     int
	pages      []page.Index
}

type origin struct {
	name  id.Publication
	epoch uint32
}

func (r *request) stream(l id.Label) *stream {
	s := r.streams[l]
	if s == nil {
		s = &stream{retention: r.retention[l]}
		r.streams[l] = s
	}
	return s
}

func (r *request) length(l id.Label) int {
	if s := r.streams[l]; s != nil {
		return len(s.tokens)
	}
	return 0
}

// held are the tokens that were not released, in the order of the pages.
func (s *stream) held() []token {
	if s.released == 0 {
		return s.tokens
	}
	return slices.Concat(s.tokens[:s.prefix], s.tokens[s.prefix+s.released:])
}

// start is the first token behind what was released; 0 if nothing was.
func (s *stream) start() int {
	if s.released == 0 {
		return 0
	}
	return s.prefix + s.released
}

func count(tokens int) int { return (tokens + pageSize - 1) / pageSize }

// empty is what Reset and a retrieve that starts over leave.
func (r *request) empty(l id.Label) {
	*r.streams[l] = stream{retention: r.retention[l], before: r.streams[l].before}
}

// trim lets go of the oldest page behind the prefix as long as a whole page is
// too much.
func (s *stream) trim() (trimmed bool) {
	for s.retention.Budget > 0 {
		front := s.prefix
		if s.released == 0 {
			front = count(s.retention.Prefix) * pageSize
		}
		held := len(s.tokens) - s.released
		if held-pageSize < s.retention.Budget || front+pageSize >= held {
			break
		}
		s.pages = slices.Delete(slices.Clone(s.pages), front/pageSize, front/pageSize+1)
		s.prefix = front
		s.released += pageSize
		trimmed = true
	}
	return trimmed
}

func (s *stream) clone() *stream {
	c := *s
	c.tokens, c.pages, c.host = slices.Clone(s.tokens), slices.Clone(s.pages), slices.Clone(s.host)
	return &c
}

// life is a request as somebody met it: void once it was removed or reset.
type life struct {
	*request
	reset int
}

func (r *request) life() life { return life{r, r.resets} }

func (m *model) live(l life) bool { return m.requests[l.id] == l.request && l.resets == l.reset }

// there says whether the tokens of a life are still there, for its engine or for
// its publication alone.
func (m *model) there(l life) bool { return m.live(l) || l.key != "" && m.kept[l.key] == l.request }

// handle is what the manager calls a request by.
func (r *request) handle() id.Request { return cmp.Or(r.key, r.id) }

// all are the requests of either kind, in order.
func (m *model) all() []*request {
	list := slices.AppendSeq(slices.Collect(maps.Values(m.requests)), maps.Values(m.kept))
	slices.SortFunc(list, func(a, b *request) int { return cmp.Or(cmp.Compare(a.id, b.id), cmp.Compare(a.key, b.key)) })
	return list
}

// forked says whether a step may still copy from a request.
func (m *model) forked(r *request) bool {
	return slices.ContainsFunc(m.steps, func(s *step) bool {
		return slices.ContainsFunc(s.forks, func(f *fork) bool { return f.request == r && f.reset == r.resets })
	})
}

// inFlight says whether a step is on the request.
func (m *model) inFlight(r *request) bool {
	return slices.ContainsFunc(m.steps, func(s *step) bool { return s.touches(m, r) })
}

// away returns whether a stream is not on the device.
func (r *request) away() bool {
	for _, s := range r.streams {
		if s.state != manager.Resident {
			return true
		}
	}
	return false
}

// verify compares the manager's tables, and every byte, with the model.
func (s *side) verify() {
	all := s.all()
	if n := len(s.m.Requests(0)); n != len(all) {
		s.Fatalf("%s: %d requests, want %d", s.life.Node, n, len(all))
	}
	for _, r := range all {
		s.verifyRequest(r)
	}
	for _, a := range s.steps {
		a.verify(s)
	}
	for _, w := range s.moves {
		w.verify(s)
	}
	for _, p := range s.publications {
		p.verify(s)
	}
	c := s.m.Counts()
	if c.Faults != 0 || c.Steps != len(s.steps) || c.Moves != len(s.moves) || c.Retrievals != len(s.pulls) || c.Publications != len(s.publications) {
		s.Fatalf("%s: counts %+v, want %d steps, %d moves, %d retrievals, %d publications",
			s.life.Node, c, len(s.steps), len(s.moves), len(s.pulls), len(s.publications))
	}
}

func (s *side) verifyRequest(r *request) {
	got, err := s.m.Request(r.handle())
	if err != nil {
		s.Fatal(err)
	}
	if got.Request != r.id || got.Kept != r.key {
		s.Fatalf("%s: %+v, want %s, kept as %q", s.life.Node, got, r.id, r.key)
	}
	if got.InFlight != s.inFlight(r) || got.Reading != (r.pull != nil) || got.Moving != (r.move != nil) || got.Published != r.published {
		s.Fatalf("%s: %+v, want in flight %v, reading %v, moving %v, published %d",
			s.life.Node, got, s.inFlight(r), r.pull != nil, r.move != nil, r.published)
	}
	if len(got.Streams) != len(r.streams) {
		s.Fatalf("%s: request %s has streams %+v, want %d", s.life.Node, r.id, got.Streams, len(r.streams))
	}
	for _, g := range got.Streams {
		k := r.streams[g.Label]
		if k == nil || g.State != k.state || g.Tokens != len(k.tokens) || g.Released != k.released || g.Prefix != k.prefix || g.Position != k.position {
			s.Fatalf("%s: request %s: %+v, want %+v", s.life.Node, r.id, g, k)
		}
		changed := len(k.tokens) != k.before.tokens || !slices.Equal(k.pages, k.before.pages)
		if g.Generation < k.before.generation || changed && g.Generation == k.before.generation {
			s.Fatalf("%s: request %s: %+v was at generation %d, and has changed: %v", s.life.Node, r.id, g, k.before.generation, changed)
		}
		k.before = look{g.Generation, len(k.tokens), slices.Clone(k.pages)}
		held := k.held()
		switch k.state {
		case manager.Resident, manager.Offloading:
			s.wantAll(held, func(i int) place { return at(k.pages, i) }, "request %s label %s, %v:", r.id, g.Label, k.state)
		default:
			s.wantAll(held, func(i int) place { return onHost(at(k.host, i)) }, "request %s label %s, %v:", r.id, g.Label, k.state)
		}
	}
}
