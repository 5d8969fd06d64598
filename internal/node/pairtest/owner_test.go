package pairtest

import (
	"errors"
	"slices"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// publication is one that was announced, until Unsealed.
type publication struct {
	name  id.Publication
	seal  uint32
	word  uint64
	named map[slot]token // all that readers may read
	last  *offer         // of the manager
}

type slot struct {
	page page.Index
	slot int
}

// announcement is one entry of an owner's log.
type announcement struct {
	name     id.Publication
	sequence id.Sequence
}

// offer is what one announcement offered: the tokens of each label by position.
type offer struct {
	value  manager.Publication
	tokens map[id.Label][]token
}

func (o *offer) stream(l id.Label) *manager.Stream {
	i := slices.IndexFunc(o.value.Streams, func(s manager.Stream) bool { return s.Label == l })
	if i < 0 {
		return nil
	}
	return &o.value.Streams[i]
}

// offers says whether the stream offers a position.
func offers(t *manager.Stream, position int) bool {
	return position < t.Prefix || t.Start <= position && position < t.Tokens
}

// index is where a position is in the pages of an offer.
func index(t *manager.Stream, position int) int {
	if position >= t.Start {
		position -= t.Start - t.Prefix
	}
	return position
}

// names says whether tokens of a label were offered.
func (p *publication) names(l id.Label) bool {
	t := p.last.stream(l)
	return t != nil && t.Tokens > 0
}

// verify is the promise: as long as the word is set, what it seals is there.
func (p *publication) verify(s *side) {
	if word, _ := s.seals.Load(p.seal); word != p.word {
		return
	}
	for at, k := range p.named {
		s.want(place{page: at.page, slot: at.slot}, k, func() string { return "publication " + p.name.String() })
	}
}

// ingestAll begins the requests that are not there.
func (s *side) ingestAll() {
	for _, r := range names {
		s.ingest(r)
	}
}

func (s *side) ingest(r id.Request) {
	if s.requests[r] != nil {
		return
	}
	c := manager.RequestConfig{
		Needs: manager.Needs{Labels: [][]id.Label{{id.Main}, {id.Main, "cfg"}, {id.Main, "cfg", "alt"}}[s.below(3, "needs")]},
		Retention: []map[id.Label]manager.Retention{
			nil, nil,
			{id.Main: {Budget: 5}},
			{id.Main: {Budget: 9, Prefix: 3}, "cfg": {Budget: 4}},
		}[s.below(4, "retention")],
	}
	s.Logf("%s: ingest %s: %+v", s.life.Node, r, c)
	if err := s.m.Ingest(r, c); err != nil {
		s.Fatal(err)
	}
	q := &request{id: r, needs: c.Labels, retention: c.Retention, streams: make(map[id.Label]*stream)}
	q.stream(id.Main)
	s.requests[r] = q
}

func (s *side) setPosition() {
	r := s.requests[names[s.below(2, "request")]]
	if r == nil {
		return
	}
	for l, st := range r.streams {
		if len(st.tokens) > 0 {
			st.position = int(s.next())
			if err := s.m.SetPosition(r.id, l, st.position); err != nil {
				s.Fatal(err)
			}
		}
	}
}

// publish offers a request by the owner's rule: word, log; the manager did so
// first. Its end is the other way round.
func (s *side) publish() {
	r := s.requests[names[s.below(2, "request")]]
	if r == nil || s.ends(r.published) {
		return
	}
	s.publishRequest(r, s.below(4, "final") == 0)
}

func (s *side) publishRequest(r *request, final bool) {
	value, err := s.m.Publish(r.handle(), final)
	s.Logf("%s: publish %s: %+v, %v", s.life.Node, r.id, value, err)
	if err != nil {
		s.publishRefused(r, err)
		return
	}
	if s.overtaken(r) {
		s.Fatalf("%s: %s is published, and a step that was overtaken may still write it", s.life.Node, r.id)
	}
	r.final = final
	s.announce(r, value, false)
	if s.saw("publish"); final {
		s.saw("publish final")
	}
}

// chunk is a piece of a prefill from its first to its last call.
func (s *side) chunk() {
	s.ingestAll()
	r := s.requests[names[s.below(2, "request")]]
	var v manager.Step
	for _, l := range labels[:1+s.below(2, "labels")] {
		v.Segments = append(v.Segments, manager.Segment{Request: r.id, Label: l, Span: 3 + s.below(8, "span")})
	}
	if s.inFlight(r) || s.ends(r.published) {
		return
	}
	s.admit(v)
	if n := len(s.steps); n > 0 && s.inFlight(r) {
		for a := s.steps[n-1]; s.work(a); {
		}
		s.publishRequest(r, s.below(8, "final") == 0)
	}
}

func (s *side) publishRefused(r *request, err error) {
	ok := false
	switch {
	case errors.Is(err, manager.ErrInvalid):
		ok = true
		for _, st := range r.streams {
			ok = ok && len(st.tokens) == 0
		}
	case errors.Is(err, manager.ErrFinal):
		ok = r.published != 0 && r.final
	case errors.Is(err, manager.ErrEnded):
		ok = r.revoked
	case errors.Is(err, manager.ErrStepInFlight):
		ok = s.overtaken(r)
		s.saw("publish refused: overtaken")
	}
	if !ok {
		s.Fatalf("%s: publish %+v: %v", s.life.Node, r, err)
	}
}

// overtaken says whether a step that was overtaken may still write what is stored.
func (s *side) overtaken(r *request) bool {
	for _, a := range s.steps {
		for _, g := range a.segments {
			if !a.staged && g.request == r && s.live(g.life) && g.overtaken() {
				return true
			}
		}
	}
	return false
}

// announce checks a publication's value, sets the word and tells the others.
func (s *side) announce(r *request, value manager.Publication, again bool) {
	o := &offer{value: value, tokens: make(map[id.Label][]token)}
	if !again && len(value.Streams) != len(r.streams) || value.Request != r.id || r.published != 0 && value.ID != r.published {
		s.Fatalf("%s: publication %+v of %+v", s.life.Node, value, r)
	}
	name, seal, word, err := s.log.Reserve(value.ID)
	if err != nil {
		s.Fatal(err)
	}
	p := s.publications[value.ID]
	if p == nil {
		p = &publication{name: name, seal: seal, word: word, named: make(map[slot]token)}
		s.publications[value.ID] = p
	}
	r.published = value.ID
	for i := range value.Streams {
		t := &value.Streams[i]
		st := r.streams[t.Label]
		tokens, state := len(st.tokens), min(st.state, manager.OnHost)
		if again { // what was offered
			tokens = len(p.last.tokens[t.Label])
		}
		if t.Start != st.start() || t.Prefix != st.prefix || t.Tokens != tokens || t.State != state || !slices.Equal(t.Ranks, s.ranks) {
			s.Fatalf("%s: publication %s of %s offers %+v, want %d tokens of %+v", s.life.Node, name, r.id, t, tokens, st)
		}
		o.tokens[t.Label] = slices.Clone(st.tokens[:tokens])
		s.extends(p, t, o)
		if st.state != manager.Resident {
			s.saw("published as " + state.String())
			if len(t.Pages) > 0 {
				s.Fatalf("%s: publication %s names pages of %+v", s.life.Node, name, st)
			}
			continue
		}
		if !slices.Equal(t.Pages, st.pages[:count(tokens-st.released)]) {
			s.Fatalf("%s: publication %s of %s label %s names pages %v, its tokens are in %v", s.life.Node, name, r.id, t.Label, t.Pages, st.pages)
		}
		for i, k := range st.held()[:tokens-st.released] {
			x := at(t.Pages, i)
			p.named[slot{x.page, x.slot}] = k
		}
	}
	p.last = o
	s.seals.Store(seal, word)
	announced, err := s.log.Announce(s.now, value, time.Minute)
	if err != nil {
		s.Fatalf("%s: announce %+v: %v", s.life.Node, value, err)
	}
	s.offers[announcement{name, announced.Sequence}] = o
	s.gossip()
	for _, other := range s.sides {
		if other != s && s.below(2, "push") == 0 {
			if _, err := other.board.Learn(s.now, s.life, announced.Full, r.id); err != nil && !errors.Is(err, publish.ErrEnded) {
				s.Fatal(err)
			}
		}
	}
}

// extends: one name never stands for other tokens than before.
func (s *side) extends(p *publication, t *manager.Stream, o *offer) {
	if p.last == nil {
		return
	}
	old := p.last.tokens[t.Label]
	if len(old) > t.Tokens || p.last.value.ContentEpoch != o.value.ContentEpoch || !slices.Equal(old, o.tokens[t.Label][:len(old)]) {
		s.Fatalf("%s: publication %s of label %s offered %v at epoch %d, now it offers %v at epoch %d",
			s.life.Node, p.name, t.Label, old, p.last.value.ContentEpoch, o.tokens[t.Label], o.value.ContentEpoch)
	}
}

// republish says anew where the tokens of a publication are.
func (s *side) republish(r *request) {
	if s.ends(r.published) {
		return
	}
	value, ok := s.m.Republish(r.handle())
	s.Logf("%s: republish %s: %+v, %v", s.life.Node, r.id, value, ok)
	can := r.published != 0
	if can {
		for _, t := range s.publications[r.published].last.value.Streams {
			st := r.streams[t.Label]
			can = can && st != nil && st.start() == t.Start
		}
	}
	if ok != can {
		s.Fatalf("%s: republish %s: %v, its publication is %d of %+v", s.life.Node, r.id, ok, r.published, r)
	}
	if !ok {
		return
	}
	s.announce(r, value, true)
	s.saw("republish")
}

func (s *side) republishOne() {
	if r := s.requests[names[s.below(2, "request")]]; r != nil {
		s.republish(r)
	}
}

// gossip delivers at random: what is lost is lost.
func (s *side) gossip() {
	for _, item := range s.log.Outgoing(s.now, 1<<20) {
		for _, other := range s.sides {
			if other == s {
				continue
			}
			if s.below(4, "lose") == 0 {
				s.saw("gossip lost")
				continue
			}
			if _, _, err := other.board.Receive(s.now, item); err != nil {
				s.Fatal(err)
			}
		}
	}
}

// disown: the publication goes on, or ends, without its request.
func (s *side) disown(r *request) { r.published, r.final = 0, false }

// endOne ends a publication by the node's own will: its hold has run out.
func (s *side) endOne() {
	var live []manager.PublicationID
	for i := range s.publications {
		if !s.ends(i) {
			live = append(live, i)
		}
	}
	if len(live) == 0 {
		return
	}
	slices.Sort(live)
	s.ending = append(s.ending, live[s.below(len(live), "publication")])
	s.saw("hold ran out")
}

// clearWords is the first half of the owner's rule.
func (s *side) clearWords() {
	s.Logf("%s: clears the words of %v", s.life.Node, s.ending)
	for _, i := range s.ending {
		s.seals.Store(s.publications[i].seal, 0)
		if err := s.log.Release(s.now, i); err != nil {
			s.Fatal(err)
		}
		s.ended = append(s.ended, i)
	}
	if len(s.ending) > 0 {
		s.gossip()
	}
	s.ending = nil
}

// unsealed is the second half.
func (s *side) unsealed() {
	if len(s.ended) == 0 {
		return
	}
	s.Logf("%s: unsealed %v", s.life.Node, s.ended)
	s.m.Unsealed(s.ended...)
	for _, i := range s.ended {
		delete(s.publications, i)
		for _, r := range s.all() {
			if r.published != i {
				continue
			}
			s.disown(r)
			r.revoked = true
			if r.key != "" {
				if s.saw("kept to its end"); r.move != nil || r.pull != nil || s.forked(r) {
					s.saw("kept to its end while in use")
				}
				delete(s.kept, r.key)
				r.pull, r.move = nil, nil
			}
		}
	}
	s.ended = nil
	s.saw("unsealed")
}

// letGo puts what Remove or Reset returned into the model.
func (s *side) letGo(r *request, out manager.Removed, lives bool) {
	var unseal, lived []manager.PublicationID
	if r.published != 0 {
		if lives {
			lived = append(lived, r.published)
			s.saw("publication lives without its request")
		} else {
			unseal = append(unseal, r.published)
		}
	}
	var cancel []manager.RetrievalID
	if r.pull != nil {
		cancel = append(cancel, r.pull.start.ID)
		s.saw("removed while read into")
	}
	if !slices.Equal(out.Unseal, unseal) || !slices.Equal(out.Lives, lived) || !slices.Equal(out.Cancel, cancel) {
		s.Fatalf("%s: %s lets go of %+v, want %v to unseal, %v to live on, %v to cancel", s.life.Node, r.id, out, unseal, lived, cancel)
	}
	s.end(unseal)
	if s.inFlight(r) {
		s.saw("removed in a step")
	}
	if r.move != nil {
		s.saw("removed in a move")
	}
	r.pull, r.move = nil, nil
	s.disown(r)
}

// ends says whether the node is about to end a publication. Nobody publishes
// it again then.
func (s *side) ends(i manager.PublicationID) bool {
	return slices.Contains(s.ending, i) || slices.Contains(s.ended, i)
}

// end asks for the end of publications; some may be about to end already.
func (s *side) end(list []manager.PublicationID) {
	for _, i := range list {
		if !s.ends(i) {
			s.ending = append(s.ending, i)
		}
	}
}

// picked is a request that is to end: as likely as not one that is read into,
// or of which something is being copied, or to be copied.
func (s *side) picked() *request {
	r := s.requests[names[s.below(3, "request")]]
	if s.below(2, "busy") > 0 {
		return r
	}
	for _, p := range s.pulls {
		if s.live(p.life) {
			r = p.request
		}
	}
	for _, w := range s.moves {
		if s.live(w.life) {
			r = w.request
		}
	}
	for _, a := range s.steps {
		for _, f := range a.forks {
			if f.source != nil && !f.done && s.live(f.life) {
				r = f.request
			}
		}
	}
	return r
}

func (s *side) remove() {
	r := s.picked()
	for _, name := range names { // what is then kept is rare
		if o := s.requests[name]; o != nil && o.final && o.away() {
			r = o
		}
	}
	if r != nil {
		s.removeRequest(r, s.below(2, "discard") == 0)
		s.saw("remove")
	}
}

func (s *side) removeRequest(r *request, discard bool) {
	out, err := s.m.Remove(r.id, discard)
	s.Logf("%s: remove %s: %+v, %v", s.life.Node, r.id, out, err)
	if err != nil {
		s.Fatal(err)
	}
	away, bare, whole := s.promises(r)
	lives := r.final && !discard
	delete(s.requests, r.id)
	if (out.Kept != "") != (lives && away && whole) {
		s.Fatalf("%s: remove %+v: %+v, its publication is away %v, bare %v, whole %v", s.life.Node, r, out, away, bare, whole)
	}
	if out.Kept != "" {
		s.keep(r, out)
		return
	}
	s.letGo(r, out, lives && (!bare || whole))
}

// promises says whether the publication of a request offers tokens that it names
// no pages of (bare), or that are not on the device (away), and whether all that
// it offers is still there.
func (s *side) promises(r *request) (away, bare, whole bool) {
	whole = true
	if r.published == 0 {
		return false, false, whole
	}
	for _, t := range s.publications[r.published].last.value.Streams {
		st := r.streams[t.Label]
		whole = whole && st.start() == t.Start
		if t.Tokens > 0 {
			bare = bare || t.State != manager.Resident
			away = away || t.State != manager.Resident || st.state != manager.Resident
		}
	}
	return away, bare, whole
}

// keep leaves a request that was removed to its publication. What that does not
// offer goes, as far as nothing is at it.
func (s *side) keep(r *request, out manager.Removed) {
	var cancel []manager.RetrievalID
	if r.pull != nil {
		cancel = append(cancel, r.pull.start.ID)
		r.pull.cancelled = true
		s.saw("kept while read into")
	}
	if len(out.Unseal) > 0 || !slices.Equal(out.Lives, []manager.PublicationID{r.published}) || !slices.Equal(out.Cancel, cancel) {
		s.Fatalf("%s: %s is kept: %+v, want %d to live on, %v to cancel", s.life.Node, r.id, out, r.published, cancel)
	}
	if s.saw("kept"); r.move != nil {
		s.saw("kept in a move")
	}
	inUse := r.pull != nil || s.forked(r)
	r.key = out.Kept
	s.kept[r.key] = r
	got, err := s.m.Request(r.key)
	if err != nil {
		s.Fatal(err)
	}
	offered := s.publications[r.published].last
	for l, st := range r.streams {
		t := offered.stream(l)
		switch {
		case st.state != manager.Resident:
		case t != nil && !inUse:
			st.tokens, st.landed = slices.Clone(st.tokens[:t.Tokens]), min(st.landed, t.Tokens)
			st.pages = slices.Clone(st.pages[:count(t.Tokens-st.released)])
		case t == nil && (!inUse || len(st.tokens) == 0 && !slices.ContainsFunc(got.Streams, func(g manager.StreamState) bool { return g.Label == l })):
			delete(r.streams, l)
		}
	}
}

func (s *side) reset() {
	r := s.picked()
	if r == nil {
		return
	}
	free := s.below(2, "free") == 0
	out, err := s.m.Reset(r.id, free)
	s.Logf("%s: reset %s, free %v: %+v, %v", s.life.Node, r.id, free, out, err)
	if err != nil {
		if !errors.Is(err, manager.ErrOffloading) || free || !r.away() {
			s.Fatalf("%s: reset %+v: %v", s.life.Node, r, err)
		}
		return
	}
	s.letGo(r, out, false)
	r.resets++
	r.revoked = false
	for l := range r.streams {
		r.empty(l)
	}
	s.saw("reset")
}
