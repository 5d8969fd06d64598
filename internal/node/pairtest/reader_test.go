package pairtest

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
)

// pull is a retrieval that was begun and has not been settled.
type pull struct {
	life
	owner     *side
	start     manager.Retrieval
	labels    []id.Label // that it brings on
	offer     *offer
	seals     []transfer.Seal
	copies    []transfer.Copy // left to be read
	cancelled bool
}

// position is one token of a request.
type position struct {
	label id.Label
	token int
}

// retrieve begins a pull of a request with whatever the board knows, old or new.
func (s *side) retrieve() {
	name := names[s.below(2, "request")]
	entries := s.board.ByRequest(s.now, name)
	entries = slices.DeleteFunc(entries, func(e publish.Entry) bool { return !e.HasTable })
	if len(entries) == 0 {
		return
	}
	e := entries[s.below(len(entries), "entry")]
	s.ingest(name)
	r := s.requests[name]
	owner := s.sides[slices.IndexFunc(s.sides, func(o *side) bool { return o.life == e.Name.Owner })]
	o := s.offers[announcement{e.Name, e.Sequence}]
	source := manager.Source{Name: e.Name, Geometry: owner.geometry(), Publication: e.Publication}
	least := 0
	if s.below(2, "least") == 0 {
		least = 1 + s.below(12, "tokens")
	}
	out, err := s.m.AdmitRetrieve(name, manager.At{}, &source, least)
	s.Logf("%s: retrieve %s, at least %d, from %+v: %+v %+v, %v", s.life.Node, name, least, source, out, out.Start, err)
	if err != nil {
		s.retrieveRefused(r, o, err)
		return
	}
	for _, l := range r.needs {
		if t := o.stream(l); t != nil && t.State != manager.Resident && t.Tokens > 0 {
			s.saw("reader met a stream on the host")
		}
	}
	if r.pull != nil {
		if out.Readiness != manager.Reading || out.Start != nil {
			s.Fatalf("%s: retrieve %s while it is read into: %+v", s.life.Node, name, out)
		}
		return
	}
	s.startedOver(r, o, source, out)
	switch {
	case out.Start != nil:
		s.pull(r, owner, o, e.Seal, *out.Start, least)
	case out.Readiness == manager.Ready:
		s.ready(r, o, source, least)
	default:
		s.saw("waiting")
	}
}

func (s *side) retrieveRefused(r *request, o *offer, err error) {
	ok := false
	switch {
	case errors.Is(err, manager.ErrStepInFlight):
		ok = s.inFlight(r)
	case errors.Is(err, manager.ErrOffloading):
		ok = r.away()
		s.saw("retrieve refused: offloaded")
	case errors.Is(err, manager.ErrNoPages):
		ok = true
		s.saw("retrieve refused: no pages")
	case errors.Is(err, manager.ErrDiverged):
		for _, st := range r.streams {
			ok = ok || st.origin != origin{} && len(st.tokens) > st.landed
		}
		s.saw("diverged")
	case errors.Is(err, manager.ErrIncompatible): // a gap behind what was computed here
		for _, l := range r.needs {
			t, st := o.stream(l), r.streams[l]
			ok = ok || t != nil && st != nil && st.origin == origin{} && 0 < len(st.tokens) && len(st.tokens) < t.Start
		}
		s.saw("gap behind what was computed")
	}
	if !ok {
		s.Fatalf("%s: retrieve %+v: %v", s.life.Node, r, err)
	}
}

// startedOver finds the streams that were emptied, and checks why.
func (s *side) startedOver(r *request, o *offer, source manager.Source, out manager.Outcome) {
	from := origin{source.Name, source.Publication.ContentEpoch}
	got, err := s.m.Request(r.id)
	if err != nil {
		s.Fatal(err)
	}
	emptied := false
	for _, g := range got.Streams {
		st := r.streams[g.Label]
		if g.Tokens != 0 || len(st.tokens) == 0 {
			continue
		}
		t := o.stream(g.Label)
		gap := t != nil && st.landed < t.Start
		if st.origin == (origin{}) || len(st.tokens) > st.landed || st.origin == from && !gap {
			s.Fatalf("%s: retrieve %s emptied label %s: %+v, for %+v", s.life.Node, r.id, g.Label, st, o.value)
		}
		if s.saw("started over"); st.origin == from {
			s.saw("gap taken over")
		}
		r.empty(g.Label)
		emptied = true
	}
	var unseal []manager.PublicationID
	if emptied && r.published != 0 {
		unseal = append(unseal, r.published)
		s.saw("started over what is published")
	}
	if !slices.Equal(out.Unseal, unseal) {
		s.Fatalf("%s: retrieve %s unseals %v, want %v", s.life.Node, r.id, out.Unseal, unseal)
	}
	if emptied {
		s.end(unseal)
		s.disown(r)
		r.revoked = false
	}
}

// pull takes a retrieval into the model, and plans its copies the naive way.
func (s *side) pull(r *request, owner *side, o *offer, seal uint32, start manager.Retrieval, least int) {
	word, _ := id.SealValue(start.Source.Owner.Incarnation, start.Source.Sequence)
	p := &pull{life: r.life(), owner: owner, start: start, offer: o, seals: []transfer.Seal{{Index: seal, Value: word}}}
	for _, l := range r.needs {
		t, n := o.stream(l), r.length(l)
		switch {
		case t == nil || t.State != manager.Resident || t.Tokens <= n:
		case 0 < n && n < t.Start && least > 0 && n >= least: // enough, and there is a gap behind it
			s.saw("gap left alone")
		default:
			p.labels = append(p.labels, l)
		}
	}
	moved := make(map[position]bool)
	for _, m := range start.Moves {
		t, n := o.stream(m.Label), r.length(m.Label)
		for token := m.From; token < m.To; token++ {
			moved[position{m.Label, token}] = true
		}
		if !slices.Contains(p.labels, m.Label) || m.From < n {
			s.Fatalf("%s: retrieval moves %+v, there are %d tokens", s.life.Node, m, n)
		}
		for token := m.From; token < m.To; token++ {
			from, to := m.Remote[(token-m.RemoteStart)/pageSize], m.Local[(token-m.LocalStart)/pageSize]
			if !offers(t, token) || from != t.Pages[index(t, token)/pageSize] || to == page.Sink {
				s.Fatalf("%s: retrieval moves token %d from page %d to page %d: %+v of %+v", s.life.Node, token, from, to, m, t)
			}
			for _, rank := range s.ranks {
				for _, x := range s.pieces {
					p.copies = append(p.copies, transfer.Copy{
						Rank: rank, Remote: owner.offset(place{page: from, slot: token % pageSize}, x),
						Local: s.offset(place{page: to, slot: token % pageSize}, x), Bytes: headBytes,
					})
				}
			}
		}
		if m.From > 0 && m.From != t.Start {
			s.saw("retrieve of the difference")
		}
	}
	for _, l := range p.labels {
		for i := r.length(l); i < o.stream(l).Tokens; i++ {
			if offers(o.stream(l), i) && !moved[position{l, i}] {
				s.Fatalf("%s: retrieval %+v does not move token %d of label %s: %+v", s.life.Node, start, i, l, o.value)
			}
		}
	}
	s.pulls = append(s.pulls, p)
	r.pull = p
	s.saw("retrieve")
}

// ready: every needed label has what was asked for.
func (s *side) ready(r *request, o *offer, source manager.Source, least int) {
	for _, l := range r.needs {
		t, st := o.stream(l), r.streams[l]
		have := 0
		if st != nil {
			have = len(st.tokens)
		}
		enough := t != nil && o.value.Final && have >= t.Tokens || least > 0 && have >= least
		if t == nil || !enough {
			s.Fatalf("%s: request %s is ready for %d tokens of label %s: %+v of %+v, final %v", s.life.Node, r.id, least, l, st, t, o.value.Final)
		}
		if st != nil && st.origin == (origin{source.Name, source.Publication.ContentEpoch}) {
			s.fits(r, l, o)
		}
	}
	s.saw("ready")
}

// fits: what was retrieved is what was published, at every position that was
// offered and is still here.
func (s *side) fits(r *request, l id.Label, o *offer) {
	t, st := o.stream(l), r.streams[l]
	for i := st.computed; i < min(st.landed, t.Tokens); i++ {
		if offers(t, i) && st.tokens[i] != o.tokens[l][i] {
			s.Fatalf("%s: request %s label %s token %d is %v, published as %v", s.life.Node, r.id, l, i, st.tokens[i], o.tokens[l][i])
		}
	}
}

// read does some of the work of a pull, or all that is left, with a fault.
func (s *side) read() {
	if len(s.pulls) == 0 {
		return
	}
	p := s.pulls[s.below(len(s.pulls), "pull")]
	if !s.live(p.life) && s.below(3, "late") > 0 {
		return // its pages would be somebody else's by now
	}
	part := p.copies
	*s.fault = none
	if s.below(3, "part") == 0 && len(p.copies) > 8 {
		part = part[:len(part)/2]
	} else {
		*s.fault = s.below(len(faults), "fault")
		s.saw(faults[*s.fault].name)
	}
	s.readPart(p, part)
}

func (s *side) readPart(p *pull, part []transfer.Copy) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	err := s.links[p.owner].Read(ctx, p.seals, part)
	s.Logf("%s: read of retrieval %d: %d of %d copies: %v", s.life.Node, p.start.ID, len(part), len(p.copies), err)
	word, _ := p.owner.seals.Load(p.seals[0].Index)
	if held := word == p.seals[0].Value; err == nil && !held || errors.Is(err, transfer.ErrStale) && held {
		s.Fatalf("%s: read of %s: %v, the seal holds: %v", s.life.Node, p.start.Source, err, held)
	}
	if p.copies = p.copies[len(part):]; err == nil && len(p.copies) > 0 {
		s.saw("part of a read")
		return
	}
	s.pulls = slices.DeleteFunc(s.pulls, func(o *pull) bool { return o == p })
	switch {
	case err == nil:
		s.landed(p)
		return
	case errors.Is(err, transfer.ErrStale):
		s.saw("stale")
		if why := s.stale[p.start.Source]; why != "" {
			s.saw(why)
		}
	default:
		s.saw("broken")
	}
	s.failed(p)
}

func (s *side) failed(p *pull) {
	s.Logf("%s: failed %d", s.life.Node, p.start.ID)
	if err := s.m.Failed(p.start.ID); err != nil {
		s.Fatal(err)
	}
	if p.pull == p {
		p.pull = nil
	}
	if !s.live(p.life) {
		s.saw("drained quarantine")
	}
}

// landed: the published tokens are the streams' own.
func (s *side) landed(p *pull) {
	err := s.m.Landed(p.start.ID)
	s.Logf("%s: landed %d: %v", s.life.Node, p.start.ID, err)
	if p.cancelled || !s.live(p.life) {
		if !errors.Is(err, manager.ErrUnknownRetrieval) {
			s.Fatalf("%s: landing of a retrieval that was given up: %v", s.life.Node, err)
		}
		s.saw("landed too late")
		s.failed(p)
		return
	}
	if err != nil {
		s.Fatal(err)
	}
	r := p.request
	r.pull = nil
	from := origin{p.start.Source, p.offer.value.ContentEpoch}
	for _, l := range p.labels {
		s.land(p, l, from)
	}
	for l, st := range r.streams {
		if st.origin == from {
			s.fits(r, l, p.offer)
		}
	}
	s.saw("landed")
	if p.owner != s.sides[0] && slices.ContainsFunc(p.offer.tokens[id.Main], func(k token) bool { return s.sides[0].wrote[k.writer()] }) {
		s.saw("landed by way of another reader")
	}
}

// land puts one label of a retrieval into the model.
func (s *side) land(p *pull, l id.Label, from origin) {
	t, st := p.offer.stream(l), p.stream(l)
	if len(st.tokens) == 0 { // from the front
		if t.Start > 0 {
			st.prefix, st.released = t.Prefix, t.Start-t.Prefix
			s.saw("landed without what was released")
		}
		st.computed = 0
	} else if st.origin == (origin{}) {
		st.computed = len(st.tokens)
		s.saw("landed on what was computed")
	}
	for _, m := range p.start.Moves {
		if m.Label != l {
			continue
		}
		for i := m.From; i < m.To; i++ {
			at := i
			if at >= st.prefix {
				at -= st.released
			}
			if at/pageSize == len(st.pages) {
				st.pages = append(st.pages, m.Local[(i-m.LocalStart)/pageSize])
			} else if st.pages[at/pageSize] != m.Local[(i-m.LocalStart)/pageSize] {
				s.Fatalf("%s: retrieval moved token %d to page %v, its stream has pages %v", s.life.Node, i, m, st.pages)
			}
		}
	}
	st.tokens = append(slices.Clone(st.tokens), p.offer.tokens[l][len(st.tokens):]...)
	st.origin, st.landed = from, t.Tokens
}

func (s *side) cancel() {
	if len(s.pulls) == 0 {
		return
	}
	p := s.pulls[s.below(len(s.pulls), "pull")]
	s.Logf("%s: cancel %d", s.life.Node, p.start.ID)
	if err := s.m.Cancel(p.start.ID); err != nil {
		s.Fatal(err)
	}
	p.cancelled = true
	s.saw("cancel")
}

// retrieveOwn asks for what this side has published itself.
func (s *side) retrieveOwn() {
	r := s.requests[names[s.below(2, "request")]]
	if r == nil || r.pull != nil || r.away() {
		return
	}
	for i, p := range s.publications {
		out, err := s.m.AdmitRetrieve(r.id, manager.At{}, &manager.Source{Name: p.name, Publication: manager.Publication{ID: i}}, 0)
		switch mine := r.published == i; {
		case mine && (err != nil || out.Readiness != manager.Ready || out.Start != nil):
			s.Fatalf("%s: retrieve of what %s published itself: %+v, %v", s.life.Node, r.id, out, err)
		case !mine && !errors.Is(err, manager.ErrGone):
			s.Fatalf("%s: retrieve of what another request than %s published here: %+v, %v", s.life.Node, r.id, out, err)
		}
		s.saw("own publication")
	}
}
