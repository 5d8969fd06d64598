package manager

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// PublicationID names a publication of this manager, from 1, never reused. The
// node maps it to (sequence, seal word).
type PublicationID uint64

// State of a published stream.
type State uint8

// States; the numbers are those of the wire.
const (
	Resident   State = 0
	Offloading State = 1
	OnHost     State = 2
)

// Stream is one stream of a publication. All Ranks have the same page list.
// Pages[0] holds token Start; there are enough pages for the tokens
// [Start, Tokens).
type Stream struct {
	Label  id.Label
	Ranks  []id.Rank // ascending
	Start  int       // tokens released in front, whole pages
	Tokens int       // length of the stream, Start included
	State  State
	Pages  []page.Index
}

// Publication is a stream set offered to others. It is a value: growing the
// request does not change it.
type Publication struct {
	ID           PublicationID // 0 in a publication of another node
	Request      id.Request    // "" while a reader knows only its hash
	ContentEpoch uint32
	Final        bool
	Streams      []Stream // by label, then first rank
}

// publication is a live one: from Publish to Unsealed.
type publication struct {
	id      PublicationID
	request *request // nil once it lives without one
	final   bool
	pages   []page.Index // held
}

// Publish offers the request's streams: all of them, as far as they are
// committed or have landed. The first call makes a publication, later ones of
// the same request return it with greater lengths, until final. From now on
// what lies below these lengths is not written, whatever happens to the
// request, until [Manager.Unsealed].
//
// The caller has made sure that the tokens' bytes are visible to readers.
//
// It refuses a request with nothing stored (ErrInvalid), one that was published
// with final (ErrFinal) or whose publication was ended (ErrEnded) since the last
// Reset, and one in which a step that was overtaken may still write what would
// be published (ErrStepInFlight).
func (m *Manager) Publish(r id.Request, final bool) (Publication, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.requests[r]
	switch {
	case req == nil:
		return Publication{}, fmt.Errorf("publish %q: %w", r, ErrUnknownRequest)
	case req.ended:
		return Publication{}, fmt.Errorf("publish %q: %w", r, ErrEnded)
	case req.publication != nil && req.publication.final:
		return Publication{}, fmt.Errorf("publish %q: %w", r, ErrFinal)
	}
	var stored bool
	for _, s := range req.streams {
		if s.overtaken > 0 {
			return Publication{}, fmt.Errorf("publish %q label %q: %w", r, s.label, ErrStepInFlight)
		}
		stored = stored || s.stored > 0
	}
	if !stored {
		return Publication{}, fmt.Errorf("publish %q: %w: nothing is stored", r, ErrInvalid)
	}
	p := req.publication
	if p == nil {
		m.lastPublication++
		p = &publication{id: m.lastPublication, request: req}
		m.publications[p.id] = p
		req.publication = p
	}
	p.final = final

	out := Publication{
		ID:           p.id,
		Request:      r,
		ContentEpoch: req.epoch,
		Final:        final,
		Streams:      make([]Stream, len(req.streams)),
	}
	ranks := slices.Clone(m.ranks)
	for i, s := range req.streams {
		pages := s.pages[:page.Count(s.stored, m.size)]
		for _, x := range pages[s.named:] {
			m.fault(m.arena.hold(x))
		}
		p.pages = append(p.pages, pages[s.named:]...)
		s.named = len(pages)
		out.Streams[i] = Stream{Label: s.label, Ranks: ranks, Tokens: s.stored, Pages: slices.Clone(pages)}
	}
	slices.SortFunc(out.Streams, func(a, b Stream) int { return strings.Compare(string(a.Label), string(b.Label)) })
	return out, nil
}

// Unsealed says that the seal words of these publications have been changed,
// and that every reader sees it: they have ended. Their limbo pages that no
// other live publication names become free. Unknown ids are ignored.
//
// A node that ends a publication by itself (its hold ran out, every reader has
// acknowledged, it was revoked) changes the word and calls Unsealed; while the
// request lives its pages stay its own, and Publish answers ErrEnded.
func (m *Manager) Unsealed(ids ...PublicationID) {
	m.mu.Lock()
	defer m.unlock()
	for _, i := range ids {
		p := m.publications[i]
		if p == nil {
			continue
		}
		delete(m.publications, i)
		if req := p.request; req != nil {
			req.disown()
			req.ended = true
		}
		for _, x := range p.pages {
			m.fault(m.arena.unhold(x))
		}
	}
}
