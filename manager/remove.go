package manager

import "github.com/kvferry/kvferry/internal/id"

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
		m.release(s.pages)
	}
	req.epoch++ // steps in flight know the request by it
	delete(m.requests, r)
	return out, nil
}

// Reset empties the request's streams; free gives the pages back. Its
// publications end, final or not. Published pages are never kept for reuse: with
// free=false they are replaced as needed by fresh ones. Labels and needs stay.
// Steps in flight lose the request, as at Remove. An unknown request: zero
// Removed and nil.
func (m *Manager) Reset(r id.Request, free bool) (Removed, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	if req == nil {
		return Removed{}, nil
	}
	var out Removed
	if p := req.publication; p != nil {
		out.Unseal = append(out.Unseal, p.id)
		req.disown()
	}
	out.Cancel = m.abandon(req)
	for _, s := range req.streams {
		m.rewind(s, free)
	}
	req.epoch++
	req.ended = false
	req.inFlight = 0
	return out, nil
}

// rewind empties a stream. Pages that a publication names go to limbo, the
// others stay as reserve unless all are to be let go.
func (m *Manager) rewind(s *stream, all bool) {
	reserve := s.pages[:0]
	for _, x := range s.pages {
		if all || m.arena.held(x) {
			m.fault(m.arena.release(x))
		} else {
			reserve = append(reserve, x)
		}
	}
	s.pages = reserve
	s.stored, s.landed, s.named = 0, 0, 0
	s.writing, s.overtaken = 0, 0
	s.origin = origin{}
	s.mutation++
}
