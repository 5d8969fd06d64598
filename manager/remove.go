package manager

import (
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
)

// Removed is what Remove and Reset leave to be done: clear the seal words of
// Unseal, then call Unsealed(Unseal...). Lives lists the publications that live on
// (sealed, not discarded) without their request.
type Removed struct {
	Unseal []PublicationID
	Lives  []PublicationID
	// Cancel lists the retrievals that still read into the request's pages:
	// the caller ends the reads and calls Failed for each.
	Cancel []RetrievalID
}

// Remove ends the request. Its pages go to the free list, to limbo if a live
// publication names them, or to quarantine while a retrieval may still write
// them. A final publication lives on unless discard. An unknown request: zero
// Removed and nil. Steps in flight lose the request and report it at Commit;
// the caller promises that they write none of its slots any more.
func (m *Manager) Remove(r id.Request, discard bool) (Removed, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	if req == nil {
		return Removed{}, nil
	}
	var out Removed
	if p := req.publication; p != nil {
		if p.final && !discard {
			out.Lives = append(out.Lives, p.id)
		} else {
			out.Unseal = append(out.Unseal, p.id)
		}
		req.disown()
	}
	out.Cancel = m.abandon(req)
	for _, s := range req.streams {
		m.rewind(req, s, true)
	}
	m.leave(req)
	req.epoch++ // steps in flight know the request by it
	delete(m.requests, r)
	return out, nil
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
