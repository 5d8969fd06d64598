package manager

import (
	"fmt"
	"strconv"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Removed is what Remove and Reset leave to be done.
type Removed struct {
	// Unseal lists the publications that have ended: clear their seal words, then
	// call Unsealed.
	Unseal []PublicationID
	// Lives lists those that live on without their request (sealed, not discarded).
	Lives []PublicationID
	// Kept is set if the request's final publication offers tokens that are on the
	// host, or on their way: then it lives on, and the request is kept for it under
	// this key, which no engine can name. Steps and reads have lost it, and its id
	// is free, but for Offload, Reload, Publish, Republish, and the looks at it the
	// key stands for it, and a move that runs goes on. It ends with its publication
	// (Unsealed), or with Remove of the key.
	//
	// When an offload ends its publication (Offloaded), it waits for the next: the
	// caller must publish it again, or remove it.
	Kept id.Request
	// Cancel lists the retrievals that still read into the request's pages:
	// the caller ends the reads and calls Failed for each.
	Cancel []RetrievalID
}

// Remove ends the request. Its pages go to the free list, to limbo if a live
// publication names them, or to quarantine while a retrieval may still write
// them. A final publication lives on unless discard, or unless retention has let
// go of tokens that it offers and that are not on the device: then it ends. An
// unknown request: zero Removed and nil. Steps in flight lose the request and
// report it at Commit; the caller promises that they write none of its slots any
// more.
func (m *Manager) Remove(r id.Request, discard bool) (Removed, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.byHandle(r)
	if req == nil {
		return Removed{}, nil
	}
	var out Removed
	if p := req.publication; p != nil {
		away, bare := req.offersAway()
		switch {
		case !p.final || discard || req.key != "" || bare && !req.intact():
			out.Unseal = append(out.Unseal, p.id)
		case away && req.intact():
			return m.keep(req), nil
		default:
			out.Lives = append(out.Lives, p.id)
		}
		req.disown()
	}
	out.Cancel = m.clear(req)
	return out, nil
}

// offersAway says whether the publication offers tokens that it, as it was
// announced last, names no pages of: bare; or that have none, or soon: away.
func (r *request) offersAway() (away, bare bool) {
	for _, s := range r.streams {
		if s.listed && s.offered > 0 {
			away = away || s.bare || s.state != Resident
			bare = bare || s.bare
		}
	}
	return away, bare
}

// keep takes a request from its engine, and leaves it to its publication.
func (m *Manager) keep(req *request) Removed {
	p := req.publication
	out := Removed{Lives: []PublicationID{p.id}}
	delete(m.requests, req.id)
	req.key = id.Request("\x00" + strconv.FormatUint(uint64(p.id), 10)) // which Validate refuses
	m.kept[req.key] = req
	out.Kept = req.key
	req.inFlight = 0
	if t := req.reading; t != nil {
		m.giveUp(t)
		out.Cancel = append(out.Cancel, t.id)
	}
	runs := req.reading != nil || req.forking != nil // on pages that could be let go
	streams := req.streams[:0]
	for _, s := range req.streams {
		s.writing, s.overtaken = 0, 0
		if s.state == Resident && !runs {
			m.cut(s)
		}
		if len(s.pages) > 0 || s.state != Resident || s.listed {
			streams = append(streams, s)
		}
	}
	clear(req.streams[len(streams):])
	req.streams = streams
	return out
}

// cut lets go of what a stream has beyond what the publication offers.
func (m *Manager) cut(s *stream) {
	n := 0
	if s.listed {
		n = page.Count(s.offered-s.released, m.size)
	}
	m.release(s.pages[n:])
	s.pages = s.pages[:n]
	s.stored, s.landed = s.offered, min(s.landed, s.offered)
	if !s.listed {
		s.released, s.prefix = 0, 0
	}
	s.mutation++
}

// clear ends a request: of its pages it keeps none.
func (m *Manager) clear(req *request) (cancel []RetrievalID) {
	cancel = m.abandon(req)
	for _, s := range req.streams {
		m.rewind(req, s, true)
	}
	m.empty(req)
	m.leave(req)
	req.epoch++ // steps in flight know the request by it
	if req.key != "" {
		delete(m.kept, req.key)
	} else {
		delete(m.requests, req.id)
	}
	return cancel
}

// Reset empties the request's streams; free gives the pages back. Its
// publications end, final or not. Published pages are never kept for reuse: with
// free=false they are replaced as needed by fresh ones. Labels and needs stay.
// Steps in flight lose the request, as at Remove. An unknown request: zero
// Removed and nil. What is on the host is dropped with free, and without it
// refused ([*OffloadingError]): there are no pages to keep.
func (m *Manager) Reset(r id.Request, free bool) (Removed, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	if req == nil {
		return Removed{}, nil
	}
	if s := req.away(); s != nil && !free {
		return Removed{}, fmt.Errorf("reset: %w", &OffloadingError{r, s.label})
	}
	var out Removed
	if p := req.publication; p != nil {
		out.Unseal = append(out.Unseal, p.id)
		req.disown()
	}
	out.Cancel = m.abandon(req)
	for _, s := range req.streams {
		m.rewind(req, s, free)
	}
	if free {
		m.empty(req)
	}
	m.leave(req)
	req.epoch++
	req.ended = false
	return out, nil
}

// leave takes a request that has been emptied off what still runs on it.
func (m *Manager) leave(req *request) {
	if w := req.moving; w != nil {
		w.request, req.moving = nil, nil
	}
	req.forking = nil
	req.inFlight = 0
}

// rewind empties a stream. Pages that a copy may still read go to quarantine,
// those that a publication names to limbo, the others stay as reserve unless all
// are to be let go.
func (m *Manager) rewind(req *request, s *stream, all bool) {
	m.unhost(req, s)
	reserve := s.pages[:0]
	for _, x := range s.pages {
		switch {
		case req.forking != nil:
			m.fault(m.arena.quarantine(x))
			req.forking.drain = append(req.forking.drain, x)
		case all || m.arena.held(x):
			m.fault(m.arena.release(x))
		default:
			reserve = append(reserve, x)
		}
	}
	s.pages = reserve
	s.stored, s.landed = 0, 0
	s.released, s.prefix, s.position = 0, 0, 0
	s.retention = req.retention[s.label] // a fork may have brought another
	s.writing, s.overtaken = 0, 0
	s.origin = origin{}
	s.mutation++
}
