package manager

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// A stream's tokens are in one of four states:
//
//	Resident → (Offload) Offloading → (Offloaded) OnHost → (Reload) Reloading → (Reloaded) Resident
//
// and Abandon goes back from the second and the fourth. Only a resident one can
// be planned, forked, published with pages, or read into.

// MoveID names one offload or reload of this manager, from 1, never reused.
type MoveID uint64

// HostMove is work to be done on every local rank: copy the tokens of every
// stream between the device and the host, then call Offloaded or Reloaded once,
// or Abandon once when nothing is copied any more. Until then nobody else
// writes or is given the pages of either side. ID 0: there is nothing to do.
type HostMove struct {
	ID      MoveID
	Request id.Request // as it was asked for; see Moving
	Streams []HostStream
	Freed   int // pages that were the request's reserve: they are free already
}

// HostStream is one stream of a HostMove.
type HostStream struct {
	Label        id.Label
	Tokens       int          // slots that hold one, from the first page's first
	Device, Host []page.Index // as many as the tokens need
}

// Offloaded is what came of an offload.
type Offloaded struct {
	Freed int // pages that have left the device's streams
	// Unseal are publications that name pages which have left: clear their seal
	// words, then call Unsealed. They may be published again, to say where the
	// tokens are.
	Unseal []PublicationID
}

// hostMove is one that runs.
type hostMove struct {
	id      MoveID
	request *request // nil once it was removed or reset
	reload  bool
	parts   []hostPart
	// Pages, in quarantine, and host pages that a request has left behind while
	// they were being copied from.
	drain     []page.Index
	hostDrain []page.Index
}

type hostPart struct {
	stream *stream
	to     []page.Index // host pages of an offload, device pages of a reload; the move's own
}

// Offload claims the resident streams of a request, or of a kept one by its key,
// for their way to the host: those that hold tokens, in the order in which they
// were made, as far as there are host pages. The others stay. Reserve pages become
// free at once.
//
// It refuses a request with a step in flight (ErrStepInFlight), one that is
// being read into (ErrReading) or moved (ErrOffloading), a manager without host
// pages (ErrNoHost), and a request of which no stream fits there
// ([*HostError]).
func (m *Manager) Offload(r id.Request) (HostMove, error) {
	m.mu.Lock()
	defer m.unlock()
	req, err := m.movable(r)
	if err != nil {
		return HostMove{}, fmt.Errorf("offload %q: %w", r, err)
	}
	out := HostMove{Request: r}
	var parts []hostPart
	short := 0
	for _, s := range req.streams {
		if s.state != Resident {
			continue
		}
		n := page.Count(s.stored-s.released, m.size)
		if spare := s.pages[n:]; len(spare) > 0 {
			m.release(spare)
			out.Freed += len(spare)
			s.pages = s.pages[:n]
			s.mutation++
		}
		if n == 0 {
			continue
		}
		host, ok := m.host.take(n)
		if !ok {
			short = max(short, n-m.host.free())
			continue
		}
		parts = append(parts, hostPart{s, host})
		out.Streams = append(out.Streams, HostStream{
			Label: s.label, Tokens: s.stored - s.released, Device: slices.Clone(s.pages), Host: slices.Clone(host),
		})
	}
	if len(parts) == 0 {
		if short > 0 {
			return out, fmt.Errorf("offload %q: %w", r, &HostError{Short: short, Free: m.host.free()})
		}
		return out, nil
	}
	for _, p := range parts {
		p.stream.state = Offloading
	}
	out.ID = m.move(req, false, parts)
	return out, nil
}

// movable returns a request whose streams may change sides.
func (m *Manager) movable(r id.Request) (*request, error) {
	if m.host.pages() == 0 {
		return nil, ErrNoHost
	}
	req := m.byHandle(r)
	switch {
	case req == nil:
		return nil, ErrUnknownRequest
	case req.moving != nil:
		return nil, ErrOffloading
	case req.reading != nil:
		return nil, ErrReading
	case req.busy():
		return nil, ErrStepInFlight
	default:
		return req, nil
	}
}

// busy says whether a step is in flight, or may still copy from it.
func (r *request) busy() bool { return r.inFlight > 0 || r.forking != nil }

func (m *Manager) move(req *request, reload bool, parts []hostPart) MoveID {
	m.lastMove++
	w := &hostMove{id: m.lastMove, request: req, reload: reload, parts: parts}
	m.moves[w.id] = w
	req.moving = w
	return w.id
}

// Offloaded ends an offload: everything has been copied on every local rank.
// The device pages are free, or in limbo if a publication names them. If the
// request was removed or reset meanwhile nothing is freed but what it left.
func (m *Manager) Offloaded(i MoveID) (Offloaded, error) {
	m.mu.Lock()
	defer m.unlock()
	w := m.moves[i]
	if w == nil || w.reload {
		return Offloaded{}, fmt.Errorf("end offload %d: %w", i, ErrUnknownMove)
	}
	var out Offloaded
	if req := w.request; req != nil {
		for _, p := range w.parts {
			s := p.stream
			if s.named > 0 && req.publication != nil {
				out.Unseal = append(out.Unseal, req.publication.id)
				req.disown()
			}
			m.release(s.pages)
			out.Freed += len(s.pages)
			s.pages, s.host, s.state = nil, p.to, OnHost
			s.mutation++
		}
		w.parts = nil
	}
	m.endMove(w)
	return out, nil
}

// Reload takes device pages for all streams of a request that are on the host.
// It refuses what Offload refuses but for the host pages, and too few free
// pages ([*AllocationError]).
func (m *Manager) Reload(r id.Request) (HostMove, error) {
	m.mu.Lock()
	defer m.unlock()
	req, err := m.movable(r)
	if err != nil {
		return HostMove{}, fmt.Errorf("reload %q: %w", r, err)
	}
	out := HostMove{Request: r}
	need := 0
	b := m.budget()
	for _, s := range req.streams {
		need += len(s.host)
		b.spend(len(s.host), req, s.label)
	}
	if err := b.err(); err != nil {
		return HostMove{}, fmt.Errorf("reload: %w", err)
	}
	if need == 0 {
		return out, nil
	}
	var parts []hostPart
	for _, s := range req.streams {
		if s.state != OnHost {
			continue
		}
		device := m.take(nil, len(s.host), req, s.label)
		parts = append(parts, hostPart{s, device})
		s.state = Reloading
		out.Streams = append(out.Streams, HostStream{
			Label: s.label, Tokens: s.stored - s.released, Device: slices.Clone(device), Host: slices.Clone(s.host),
		})
	}
	out.ID = m.move(req, true, parts)
	return out, nil
}

// Reloaded ends a reload: everything has been copied on every local rank. It
// fails with ErrUnknownMove if the request was removed or reset meanwhile; then
// Abandon must follow.
func (m *Manager) Reloaded(i MoveID) error {
	m.mu.Lock()
	defer m.unlock()
	w := m.moves[i]
	if w == nil || !w.reload || w.request == nil {
		return fmt.Errorf("end reload %d: %w", i, ErrUnknownMove)
	}
	for _, p := range w.parts {
		s := p.stream
		m.fault(m.host.release(s.host))
		s.pages, s.host, s.state = p.to, nil, Resident
		s.mutation++
	}
	w.request.active = m.tick()
	w.parts = nil
	m.endMove(w)
	return nil
}

// Abandon ends an offload or a reload of which nothing counts: the streams are
// where they were. Nothing is copied any more.
func (m *Manager) Abandon(i MoveID) error {
	m.mu.Lock()
	defer m.unlock()
	w := m.moves[i]
	if w == nil {
		return fmt.Errorf("abandon move %d: %w", i, ErrUnknownMove)
	}
	if w.request != nil {
		for _, p := range w.parts {
			if p.stream.state = Resident; w.reload {
				p.stream.state = OnHost
			}
		}
	}
	m.endMove(w)
	return nil
}

// endMove lets go of what is still the move's own.
func (m *Manager) endMove(w *hostMove) {
	for _, p := range w.parts {
		if w.reload {
			m.release(p.to)
		} else {
			m.fault(m.host.release(p.to))
		}
	}
	m.release(w.drain)
	m.fault(m.host.release(w.hostDrain))
	if w.request != nil {
		w.request.moving = nil
	}
	delete(m.moves, w.id)
}

// unhost takes a stream that is about to be emptied off the host, and off the
// move that is at it: what is being copied from stays where it is until that ends.
func (m *Manager) unhost(req *request, s *stream) {
	w := req.moving
	switch s.state {
	case Offloading:
		m.quarantine(s.pages)
		w.drain = append(w.drain, s.pages...)
		s.pages = nil
	case Reloading:
		w.hostDrain = append(w.hostDrain, s.host...)
	case OnHost:
		m.fault(m.host.release(s.host))
	case Resident:
	}
	s.host, s.state = nil, Resident
}

// Moving is the request that a move which runs is about: its key if it is kept,
// which Remove may have made of it meanwhile. "" if it has ended.
func (m *Manager) Moving(i MoveID) id.Request {
	m.mu.Lock()
	defer m.unlock()
	if w := m.moves[i]; w != nil && w.request != nil {
		return w.request.handle()
	}
	return ""
}

// OffloadedRequest reports whether a stream of the request is not resident (M*'s is_offloaded).
func (m *Manager) OffloadedRequest(r id.Request) bool {
	m.mu.Lock()
	defer m.unlock()
	req := m.byHandle(r)
	return req != nil && req.away() != nil
}

// away returns a stream that is not resident, if there is one.
func (r *request) away() *stream {
	for _, s := range r.streams {
		if s.state != Resident {
			return s
		}
	}
	return nil
}

// Reclaimable returns the pages that an offload of the request could free at
// most; 0 of an unknown one.
func (m *Manager) Reclaimable(r id.Request) int {
	m.mu.Lock()
	defer m.unlock()
	if req := m.byHandle(r); req != nil {
		return req.resident()
	}
	return 0
}

// resident counts the device pages of a request.
func (r *request) resident() (pages int) {
	for _, s := range r.streams {
		pages += len(s.pages)
	}
	return pages
}

// Victim is a request that could be offloaded now.
type Victim struct {
	Request   id.Request    // its key, if it is kept
	Pages     int           // on the device
	Active    uint64        // grows with what happened to requests: the least was active first
	Published PublicationID // live, and would end; 0: none
}

// Victims lists the requests that an offload would take now, in no order.
func (m *Manager) Victims() []Victim {
	m.mu.Lock()
	defer m.unlock()
	if m.host.pages() == 0 {
		return nil
	}
	var list []Victim
	for r := range m.all {
		if r.moving != nil || r.reading != nil || r.busy() {
			continue
		}
		v := Victim{Request: r.handle(), Pages: r.resident(), Active: r.active}
		if p := r.publication; p != nil && len(p.pages) > 0 {
			v.Published = p.id
		}
		if v.Pages > 0 {
			list = append(list, v)
		}
	}
	return list
}

// pool hands out host pages, first freed first.
type pool struct {
	queue fifo // the free ones
}

func newPool(pages int) pool {
	return pool{newFIFO(0, page.Index(pages))}
}

func (p *pool) pages() int { return p.queue.room() }

func (p *pool) free() int { return p.queue.n }

// take returns n pages or none.
func (p *pool) take(n int) ([]page.Index, bool) {
	if n > p.free() {
		return nil, false
	}
	list := make([]page.Index, n)
	for i := range list {
		list[i] = p.queue.pop()
	}
	return list, true
}

// release takes back what is taken; the first page that is not ends it.
func (p *pool) release(list []page.Index) error {
	for _, x := range list {
		if int64(x) >= int64(p.pages()) || p.queue.has(x) {
			return fmt.Errorf("release host page %d: %w", x, errArena)
		}
		p.queue.push(x)
	}
	return nil
}
