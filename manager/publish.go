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

// State says where a stream's tokens are.
type State uint8

// States; the first three are those of the wire, where one that is being
// reloaded is still on the host.
const (
	Resident State = iota
	Offloading
	OnHost
	Reloading
)

func (s State) String() string {
	return [...]string{"resident", "offloading", "on host", "reloading", "unknown"}[min(s, 4)]
}

// Stream is one stream of a publication. All Ranks have the same page list. It
// offers the tokens [0, Prefix) and [Start, Tokens), in this order in Pages, and
// both begin with a page. What is not Resident has no pages.
type Stream struct {
	Label  id.Label
	Ranks  []id.Rank // ascending
	Prefix int       // tokens kept in front of what was released; 0 if Start is
	Start  int       // whole pages; Start-Prefix tokens were released
	Tokens int       // length of the stream, all that is released included
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
// A kept request (see [Removed]) is published by its key, always as final.
//
// It refuses a request with nothing stored (ErrInvalid), one that was published
// with final (ErrFinal) or whose publication was ended (ErrEnded) since the last
// Reset, and one in which a step that was overtaken may still write what would
// be published (ErrStepInFlight).
func (m *Manager) Publish(r id.Request, final bool) (Publication, error) {
	m.mu.Lock()
	defer m.unlock()
	req := m.byHandle(r)
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
	p.final = final || req.key != ""
	for _, s := range req.streams {
		s.listed, s.offered, s.offersAt = true, s.stored, s.start()
	}
	req.active = m.tick()
	return m.offer(req, p), nil
}

// Republish returns the request's live publication with where its tokens are
// now: pages that were reloaded are named again, what has left the device is no
// more. A kept request is called by its key. Lengths are those of the last
// Publish, and streams made since are not in it. ok is false if none is live, or
// if retention has since let go of tokens that it offers: what is left would not
// be what was published.
func (m *Manager) Republish(r id.Request) (_ Publication, ok bool) {
	m.mu.Lock()
	defer m.unlock()
	req := m.byHandle(r)
	if req == nil || req.publication == nil || !req.intact() {
		return Publication{}, false
	}
	return m.offer(req, req.publication), true
}

// offer names the request's pages by the publication, and returns its value.
func (m *Manager) offer(req *request, p *publication) Publication {
	out := Publication{
		ID:           p.id,
		Request:      req.id,
		ContentEpoch: req.epoch,
		Final:        p.final,
		Streams:      make([]Stream, 0, len(req.streams)),
	}
	ranks := slices.Clone(m.ranks)
	for _, s := range req.streams {
		if !s.listed {
			continue
		}
		t := Stream{Label: s.label, Ranks: ranks, Start: s.start(), Tokens: s.offered, State: min(s.state, OnHost)}
		if s.released > 0 {
			t.Prefix = s.prefix
		}
		if s.bare = s.state != Resident && s.offered > 0; s.state == Resident {
			pages := s.pages[:page.Count(s.offered-s.released, m.size)]
			for _, x := range pages[s.named:] {
				m.fault(m.arena.hold(x))
			}
			p.pages = append(p.pages, pages[s.named:]...)
			s.named = len(pages)
			t.Pages = slices.Clone(pages)
		}
		out.Streams = append(out.Streams, t)
	}
	slices.SortFunc(out.Streams, func(a, b Stream) int { return strings.Compare(string(a.Label), string(b.Label)) })
	return out
}

// Unsealed says that the seal words of these publications have been changed,
// and that every reader sees it: they have ended. Their limbo pages that no
// other live publication names become free. Unknown ids are ignored.
//
// A node that ends a publication by itself (its hold ran out, every reader has
// acknowledged, it was revoked) changes the word and calls Unsealed; while the
// request lives its pages stay its own, and Publish answers ErrEnded. A kept
// request ends with its publication.
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
			if req.key != "" {
				m.clear(req)
			}
		}
		for _, x := range p.pages {
			m.fault(m.arena.unhold(x))
		}
	}
}
