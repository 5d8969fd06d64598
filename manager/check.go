package manager

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/internal/page"
)

var errBroken = errors.New("manager broke its own rule")

// verify recounts everything from the tables. It takes time in proportion to
// the arena.
func (m *Manager) verify() error {
	where := make([]place, len(m.arena.pages))
	for i := range where {
		where[i] = places
	}
	put := func(p page.Index, to place, of any) error {
		if int(p) >= len(where) {
			return fmt.Errorf("%w: page %d in %v of %v: out of range", errBroken, p, to, of)
		}
		if where[p] != places {
			return fmt.Errorf("%w: page %d in %v of %v and %v too", errBroken, p, to, of, where[p])
		}
		where[p] = to
		return nil
	}
	putAll := func(pages []page.Index, to place, of any) error {
		for _, p := range pages {
			if err := put(p, to, of); err != nil {
				return err
			}
		}
		return nil
	}

	if err := put(page.Sink, sink, "arena"); err != nil {
		return err
	}
	for i := range m.arena.counts[free] {
		if err := put(m.arena.ring[(m.arena.head+i)%len(m.arena.ring)], free, "arena"); err != nil {
			return err
		}
	}
	for _, r := range m.requests {
		if err := m.verifyRequest(r); err != nil {
			return fmt.Errorf("request %q: %w", r.id, err)
		}
		for _, s := range r.streams {
			if err := putAll(s.pages, owned, r.id); err != nil {
				return err
			}
		}
	}
	for _, t := range m.retrievals {
		if (t.request == nil) != (t.parts == nil) || t.request != nil && (t.request.reading != t || m.requests[t.request.id] != t.request) {
			return fmt.Errorf("%w: retrieval %d and its request do not know each other", errBroken, t.id)
		}
		for _, p := range t.parts {
			to := owned
			if t.draining {
				to = quarantine
			}
			if err := putAll(p.reserved, to, t.id); err != nil {
				return err
			}
		}
		if err := putAll(t.drain, quarantine, t.id); err != nil {
			return err
		}
	}

	holds := make([]uint32, len(where))
	for i, p := range m.publications {
		if p.id != i || len(p.pages) == 0 || p.request != nil && (p.request.publication != p || m.requests[p.request.id] != p.request) {
			return fmt.Errorf("%w: publication %d and its request do not know each other", errBroken, i)
		}
		for _, x := range p.pages {
			if holds[x]++; where[x] == places {
				where[x] = limbo
			}
		}
	}
	var counts [places]int
	published := 0
	for i, s := range m.arena.pages {
		if where[i] != s.place {
			return fmt.Errorf("%w: page %d is %v, the tables say %v", errBroken, i, s.place, where[i])
		}
		if holds[i] != s.holds {
			return fmt.Errorf("%w: page %d has %d holds, the publications %d", errBroken, i, s.holds, holds[i])
		}
		if s.holds > 0 {
			published++
			if s.place == free || s.place == sink {
				return fmt.Errorf("%w: page %d is published and %v", errBroken, i, s.place)
			}
		}
		counts[s.place]++
	}
	if counts != m.arena.counts || published != m.arena.published {
		return fmt.Errorf("%w: counts %v and %d published, recounted %v and %d", errBroken, m.arena.counts, m.arena.published, counts, published)
	}
	return m.verifySteps()
}

func (m *Manager) verifyRequest(r *request) error {
	if m.requests[r.id] != r || len(r.streams) != len(r.byLabel) || len(r.streams) > m.limits.labels {
		return fmt.Errorf("%w: tables differ", errBroken)
	}
	if r.reading != nil && (r.reading.request != r || m.retrievals[r.reading.id] != r.reading) {
		return fmt.Errorf("%w: reads without a retrieval", errBroken)
	}
	if r.reading != nil && r.inFlight > 0 {
		return fmt.Errorf("%w: read and written at once", errBroken)
	}
	if p := r.publication; p != nil && (p.request != r || m.publications[p.id] != p || r.ended) {
		return fmt.Errorf("%w: publication is not live", errBroken)
	}
	for _, s := range r.streams {
		switch need := page.Count(s.stored, m.size); {
		case r.byLabel[s.label] != s:
			return fmt.Errorf("%w: label %q twice", errBroken, s.label)
		case len(s.pages) < need:
			return fmt.Errorf("%w: label %q: %d pages hold %d tokens", errBroken, s.label, len(s.pages), s.stored)
		case s.named > need || s.named > 0 && r.publication == nil:
			return fmt.Errorf("%w: label %q: %d pages named, %d needed", errBroken, s.label, s.named, need)
		case s.landed > s.stored || s.landed > 0 && s.origin == origin{}:
			return fmt.Errorf("%w: label %q: %d tokens landed, %d stored", errBroken, s.label, s.landed, s.stored)
		}
		for _, x := range s.pages[page.Count(s.stored, m.size):] {
			if m.arena.held(x) {
				return fmt.Errorf("%w: label %q: page %d is published and to be written", errBroken, s.label, x)
			}
		}
	}
	return nil
}

// verifySteps recounts the marks that steps have left.
func (m *Manager) verifySteps() error {
	inFlight := make(map[*request]int)
	writing, overtaken := make(map[*stream]int), make(map[*stream]int)
	for _, a := range m.steps {
		for i := range a.segments {
			g := &a.segments[i]
			if !g.live() {
				continue
			}
			inFlight[g.request]++
			switch {
			case g.span == 0:
			case g.overtaken():
				overtaken[g.stream]++
			default:
				writing[g.stream]++
			}
		}
	}
	for _, r := range m.requests {
		if r.inFlight != inFlight[r] {
			return fmt.Errorf("%w: request %q has %d segments in flight, the steps %d", errBroken, r.id, r.inFlight, inFlight[r])
		}
		for _, s := range r.streams {
			if s.writing != writing[s] || s.overtaken != overtaken[s] {
				return fmt.Errorf("%w: request %q label %q: %d writing and %d overtaken, the steps %d and %d",
					errBroken, r.id, s.label, s.writing, s.overtaken, writing[s], overtaken[s])
			}
		}
	}
	return nil
}
