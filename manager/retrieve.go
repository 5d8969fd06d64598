package manager

import (
	"fmt"
	"slices"
	"strconv"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// RetrievalID names one retrieval of this manager, from 1, never reused.
type RetrievalID uint64

// Move is what is to be read of one label, on each of Ranks: the
// tokens [From, To). Remote and Local name the pages that these tokens lie in,
// and no others. A label of which tokens were released has two: before and
// behind them; so has one whose ranks have several page lists at their owners.
type Move struct {
	Label       id.Label
	From, To    int
	RemoteStart int          // stream position of Remote[0]
	Remote      []page.Index // owner's pages
	LocalStart  int          // stream position of Local[0]
	Local       []page.Index // our pages
	Ranks       []id.Rank    // local ones, for which it is to be made
	Owner       int          // whose pages: of the source 0 itself, i its Rest[i-1]
	Same        bool         // what lies in front of From is of this source, too
}

// Retrieval is work to be done: read every Move on every local rank, then call
// Landed once, or Failed once when nothing can land any more. Its pages are
// the request's from Landed on; until then they belong to nobody else.
type Retrieval struct {
	ID      RetrievalID
	Request id.Request
	Source  id.Publication // and its Rest
	Moves   []Move         // in the order of the needed labels
}

// Readiness of a request for the engine.
type Readiness uint8

const (
	// Waiting: a needed label or rank is not published (far enough) yet.
	Waiting Readiness = iota
	// Reading: a retrieval runs, or was given up and may still write.
	Reading
	// Ready: every needed label of every local rank has landed and is final,
	// or has landed up to the tokens asked for.
	Ready
)

func (r Readiness) String() string {
	return [...]string{"waiting", "reading", "ready", "unknown"}[min(r, 3)]
}

// Outcome of AdmitRetrieve. Start is set if the caller must read now; then
// Readiness is Reading.
type Outcome struct {
	Readiness Readiness
	Start     *Retrieval
	// Lacks is the first needed label that the source does not have for all local
	// ranks; "" if it has all.
	Lacks id.Label
	// Unseal are our own publications of tokens that the retrieve has dropped
	// to start over: clear their seal words, then call Unsealed.
	Unseal []PublicationID
}

// retrieval is one that runs or drains.
type retrieval struct {
	id       RetrievalID
	request  *request // nil once it was removed or reset
	origin   origin
	parts    []part
	draining bool
	// drain are the pages, in quarantine, of a request that is gone.
	drain []page.Index
}

// part is the share of one label.
type part struct {
	label    id.Label
	stream   *stream // nil: to be made when it lands
	from, to int
	over     bool         // the tokens in the stream are of no use, it begins anew
	released int          // tokens that the stream will be without
	prefix   int          // tokens in front of those
	reserved []page.Index // for this attempt, beyond the stream's
}

// spans are the tokens to be moved that follow one another; the second one may
// be empty.
func (p *part) spans(t *offered) [2]span {
	if p.from == 0 && t.start > 0 {
		return [2]span{{0, t.prefix}, {t.start, p.to}}
	}
	return [2]span{{p.from, p.to}}
}

type span struct{ from, to int } // tokens

// pages is where in the list of a stream the tokens lie.
func (s span) pages(t *Stream, size int) (first, end int) {
	skip := 0 // tokens that the list is without in front of these
	if s.from >= t.Start {
		skip = t.Start - t.Prefix
	}
	return (s.from - skip) / size, page.Count(s.to-skip, size)
}

// first is the index, in the stream's pages, of the first one that the read writes.
func (p *part) first(size int) int {
	if p.from == 0 {
		return 0
	}
	return (p.from - p.released) / size
}

// AdmitRetrieve compares the source with what the request has, and returns how
// ready the request is and, if there is something to move and no retrieval
// runs, the retrieval to start. minTokens 0 asks for a final publication; once
// every needed label has landed up to minTokens nothing more is started.
//
// A source of another owner, publication, or content epoch than the stream's
// starts over from 0. A nil source is ready (nothing to bring in), and so is
// one of this very life if the request is the one that published it, which has
// all its tokens; only its Publication.ID counts. While a retrieval runs the
// answer is Reading, whatever the source.
//
// It refuses, and changes nothing then: a source that does not fit
// ([*IncompatibleError]) or contradicts itself ([*MalformedError]), more tokens
// for a stream on which a step was committed since it landed (ErrDiverged), a
// request with a step in flight (ErrStepInFlight), a needed stream that is not on
// the device ([*OffloadingError]), publications of one group that do not go
// together (ErrMixed), too few free pages ([*AllocationError]), and an own source
// that has ended (ErrEnded) or that another life of the request published (ErrGone).
func (m *Manager) AdmitRetrieve(r id.Request, at At, src *Source, minTokens int) (Outcome, error) {
	if minTokens < 0 {
		return Outcome{}, fmt.Errorf("retrieve %q: %w: %d tokens", r, ErrInvalid, minTokens)
	}
	own := true
	if src != nil {
		own = src.Name.Owner == m.life
		if err := m.inspect(src, own); err != nil {
			return Outcome{}, fmt.Errorf("retrieve %q: %w", r, err)
		}
	}
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	switch {
	case req == nil:
		return Outcome{}, fmt.Errorf("retrieve %q: %w", r, ErrUnknownRequest)
	case req.reading != nil:
		return Outcome{Readiness: Reading}, nil
	}
	needed := req.needs.at(at)
	for _, l := range needed {
		if s := req.stream(l); s != nil && s.state != Resident {
			return Outcome{}, fmt.Errorf("retrieve: %w", &OffloadingError{r, l})
		}
	}
	switch {
	case src == nil:
		return Outcome{Readiness: Ready}, nil
	case own:
		if err := m.holdsAll(req, src.Publication.ID); err != nil {
			return Outcome{}, fmt.Errorf("retrieve %q: %w", r, err)
		}
		return Outcome{Readiness: Ready}, nil
	}
	from := src.origin()
	ready, parts, remote, err := m.compare(req, needed, src, from, minTokens)
	if err != nil {
		return Outcome{}, fmt.Errorf("retrieve %q: %w", r, err)
	}
	out := Outcome{Readiness: Waiting}
	if ready {
		out.Readiness = Ready
	} else {
		out.Lacks = m.lacking(src, needed)
	}
	if len(parts) == 0 {
		return out, nil
	}
	if req.inFlight > 0 {
		return Outcome{}, fmt.Errorf("retrieve %q: %w", r, ErrStepInFlight)
	}
	if err := m.fits(req, parts); err != nil {
		return Outcome{}, fmt.Errorf("retrieve %q: %w", r, err)
	}
	out.Unseal = m.startOver(req, parts)
	if out.Start = m.begin(req, from, parts, remote); out.Start != nil {
		out.Start.Source, out.Readiness = src.Name, Reading
	}
	return out, nil
}

// holdsAll checks that a live publication of ours is the request's own: what is
// published stays in the streams for as long as it is.
func (m *Manager) holdsAll(req *request, i PublicationID) error {
	switch p := m.publications[i]; {
	case p == nil:
		return fmt.Errorf("own publication: %w", ErrEnded)
	case p.request != req:
		return ErrGone
	default:
		return nil
	}
}

// compare returns what has to happen before the request is ready, or as ready
// as the source allows: tokens to move, streams to empty. remote are the
// source's streams of the parts.
func (m *Manager) compare(req *request, needed []id.Label, src *Source, from origin, minTokens int) (ready bool, parts []part, remote []*offered, err error) {
	ready = true
	final := src.Final()
	over := false // a stream has to be emptied, however much is asked for
	for _, l := range needed {
		t, err := m.find(src, l)
		if err != nil {
			return false, nil, nil, err
		}
		if t == nil {
			ready = false
			continue
		}
		if final && t.uneven {
			return false, nil, nil, fmt.Errorf("label %q is final, and not equally long on all ranks: %w", l, ErrMixed)
		}
		p := part{label: l, stream: req.stream(l)}
		if s := p.stream; s != nil {
			p.released, p.prefix = s.released, s.prefix
			switch s.origin {
			case origin{}:
				p.from = s.stored // computed here, as far as it goes
			case from:
				p.from = s.landed
			default:
				p.over = true
			}
		}
		done := final && p.from >= t.tokens || minTokens > 0 && p.from >= minTokens
		gap := t.tokens > p.from && 0 < p.from && p.from < t.start
		if gap && !done && p.stream.origin == from { // what is between is there no more
			p.over, p.from = true, 0
		}
		if s := p.stream; s != nil && s.diverged() && (p.over || t.tokens > p.from) {
			return false, nil, nil, fmt.Errorf("label %q: %w", l, ErrDiverged)
		}
		ready = ready && done
		p.to = max(p.from, t.tokens)
		if p.to == p.from && !p.over || gap && done {
			continue
		}
		if !t.resident {
			ready = ready && !p.over
			continue // there is nothing to read yet
		}
		if gap && !p.over {
			return false, nil, nil, &IncompatibleError{Fields: []page.Difference{{
				Field: "start", Ours: strconv.Itoa(p.from), Theirs: strconv.Itoa(t.start),
			}}}
		}
		if p.from == 0 {
			p.released, p.prefix = t.start-t.prefix, t.prefix
		}
		over = over || p.over
		parts = append(parts, p)
		remote = append(remote, t)
	}
	if ready && !over {
		return true, nil, nil, nil // minTokens may have been reached: no wait for more
	}
	return ready, parts, remote, nil
}

// lacking returns the first needed label that the source does not have; "" if
// there is none.
func (m *Manager) lacking(src *Source, needed []id.Label) id.Label {
	for _, l := range needed {
		if t, err := m.find(src, l); err == nil && t == nil {
			return l
		}
	}
	return ""
}

// fits checks that labels and pages suffice for all parts.
func (m *Manager) fits(req *request, parts []part) error {
	added := 0
	b := m.budget()
	for i := range parts {
		p := &parts[i]
		if p.stream == nil {
			if added++; len(req.streams)+added > m.limits.labels {
				return &FullError{"labels a request", m.limits.labels}
			}
		}
		b.spend(m.lacks(p), req, p.label)
	}
	return b.err()
}

// lacks returns how many pages the part needs beyond those of its stream.
func (m *Manager) lacks(p *part) int {
	has := 0
	if p.stream != nil {
		has = len(p.stream.pages)
		if p.over {
			for _, x := range p.stream.pages {
				if m.arena.held(x) {
					has-- // it will go to limbo
				}
			}
		}
	}
	return max(0, page.Count(p.to-p.released, m.size)-has)
}

// startOver empties the streams whose tokens are of another origin. What was
// published of them is so no more.
func (m *Manager) startOver(req *request, parts []part) (unseal []PublicationID) {
	over := false
	for i := range parts {
		if parts[i].over {
			m.rewind(req, parts[i].stream, false)
			over = true
		}
	}
	if !over {
		return nil
	}
	req.epoch++
	req.ended = false
	if p := req.publication; p != nil {
		req.disown()
		unseal = append(unseal, p.id)
	}
	return unseal
}

// begin reserves pages, which have been counted, and puts the retrieval together,
// but for the name of its source; nil if there is nothing to move. New pages are
// neighbours where those of the source are, so that fewer copies move them; where
// local ranks have several lists at their owners, those of the first one.
func (m *Manager) begin(req *request, from origin, parts []part, remote []*offered) *Retrieval {
	var moves []Move
	var kept []part
	for i, p := range parts {
		if p.to == p.from {
			continue
		}
		var local []page.Index // from the first page that is written on
		last := page.Sink      // the one in front of the next new page
		if s := p.stream; s != nil {
			there := s.pages[:min(page.Count(p.to-p.released, m.size), len(s.pages))]
			local = slices.Clone(there[min(p.first(m.size), len(there)):])
			if len(there) > 0 {
				last = there[len(there)-1]
			}
		}
		old, done := len(local), 0
		t := remote[i]
		same := p.from == 0 || p.stream.origin == from
		for _, s := range p.spans(t) {
			if s.from >= s.to {
				continue
			}
			model := t.parts[0].stream
			first, end := s.pages(model, m.size)
			n := end - first
			if have := len(local) - done; have < n {
				first += have
				next := page.Sink
				if last != page.Sink && first > 0 && model.Pages[first-1]+1 == model.Pages[first] {
					next = last + 1
				}
				local = m.takeLike(local, model.Pages[first:end], next, req, p.label)
				last = local[len(local)-1]
			}
			for _, o := range t.parts {
				first, end := s.pages(o.stream, m.size)
				start := s.from / m.size * m.size
				moves = append(moves, Move{
					Label: p.label, From: s.from, To: s.to, Ranks: o.ranks, Owner: o.owner, Same: same,
					RemoteStart: start, Remote: slices.Clone(o.stream.Pages[first:end]),
					LocalStart: start, Local: local[done : done+n : done+n],
				})
			}
			done += n
		}
		p.reserved = slices.Clone(local[old:])
		kept = append(kept, p)
	}
	if len(moves) == 0 {
		return nil
	}
	m.lastRetrieval++
	req.active = m.tick()
	t := &retrieval{id: m.lastRetrieval, request: req, origin: from, parts: kept}
	m.retrievals[t.id] = t
	req.reading = t
	return &Retrieval{ID: t.id, Request: req.id, Moves: moves}
}

// Landed makes the tokens of a retrieval part of the streams: everything has
// landed on every local rank, and then every seal held. It fails with
// ErrUnknownRetrieval if the request was removed or reset meanwhile or the
// retrieval was cancelled; then Failed must follow.
func (m *Manager) Landed(i RetrievalID) error {
	m.mu.Lock()
	defer m.unlock()
	t := m.retrievals[i]
	if t == nil || t.draining || t.request == nil {
		return fmt.Errorf("land retrieval %d: %w", i, ErrUnknownRetrieval)
	}
	for _, p := range t.parts {
		s := p.stream
		if s == nil {
			s = t.request.add(p.label)
		}
		s.pages = append(s.pages, p.reserved...)
		s.stored, s.landed = p.to, p.to
		s.released, s.prefix = p.released, p.prefix
		s.origin = t.origin
		s.mutation++
	}
	t.request.active = m.tick()
	t.request.reading = nil
	delete(m.retrievals, i)
	return nil
}

// Cancel marks a retrieval as draining: only Failed ends it. Its pages stay in
// quarantine until then, and the request is being read into.
func (m *Manager) Cancel(i RetrievalID) error {
	m.mu.Lock()
	defer m.unlock()
	t := m.retrievals[i]
	if t == nil {
		return fmt.Errorf("cancel retrieval %d: %w", i, ErrUnknownRetrieval)
	}
	m.giveUp(t)
	return nil
}

// giveUp puts what the attempt reserved into quarantine.
func (m *Manager) giveUp(t *retrieval) {
	if t.draining {
		return
	}
	t.draining = true
	for _, p := range t.parts {
		m.quarantine(p.reserved)
	}
}

// abandon takes a read that runs off a request that is about to lose its
// pages: those that it may still write go to quarantine.
func (m *Manager) abandon(req *request) (cancel []RetrievalID) {
	t := req.reading
	if t == nil {
		return nil
	}
	m.giveUp(t)
	for _, p := range t.parts {
		t.drain = append(t.drain, p.reserved...)
		s := p.stream
		if s == nil {
			continue
		}
		first, end := p.first(m.size), min(len(s.pages), page.Count(p.to-p.released, m.size))
		if first < end {
			m.quarantine(s.pages[first:end])
			t.drain = append(t.drain, s.pages[first:end]...)
			s.pages = slices.Delete(s.pages, first, end)
		}
	}
	t.request, t.parts = nil, nil
	req.reading = nil
	return []RetrievalID{t.id}
}

// Failed ends a retrieval of which nothing can land any more. The pages it
// reserved become free, tokens below stored stay.
func (m *Manager) Failed(i RetrievalID) error {
	m.mu.Lock()
	defer m.unlock()
	t := m.retrievals[i]
	if t == nil {
		return fmt.Errorf("end retrieval %d: %w", i, ErrUnknownRetrieval)
	}
	for _, p := range t.parts {
		m.unspend(p.reserved, t.request, p.label)
	}
	m.release(t.drain)
	if t.request != nil {
		t.request.reading = nil
	}
	delete(m.retrievals, i)
	return nil
}
