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
	for p := range m.arena.queue.all() {
		if err := put(p, free, "arena"); err != nil {
			return err
		}
	}
	for r := range m.all {
		if err := m.verifyRequest(r); err != nil {
			return fmt.Errorf("request %q: %w", r.id, err)
		}
		for _, s := range r.streams {
			if err := putAll(s.pages, owned, r.id); err != nil {
				return err
			}
		}
		for i := range r.purses {
			if err := putAll(r.purses[i].pages, owned, r.id); err != nil {
				return err
			}
		}
	}
	for _, t := range m.retrievals {
		if (t.request == nil) != (t.parts == nil) || t.request != nil && (t.request.reading != t || m.byHandle(t.request.handle()) != t.request) {
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

	for t, a := range m.steps {
		for i := range a.forks {
			if err := putAll(a.forks[i].pages, owned, t); err != nil {
				return err
			}
		}
		if err := putAll(a.drain, quarantine, t); err != nil {
			return err
		}
	}
	for _, w := range m.moves {
		if w.reload {
			for _, p := range w.parts {
				if err := putAll(p.to, owned, w.id); err != nil {
					return err
				}
			}
		}
		if err := putAll(w.drain, quarantine, w.id); err != nil {
			return err
		}
	}

	holds := make([]uint32, len(where))
	for i, p := range m.publications {
		if p.id != i || p.request != nil && (p.request.publication != p || m.byHandle(p.request.handle()) != p.request) {
			return fmt.Errorf("%w: publication %d and its request do not know each other", errBroken, i)
		}
		for _, x := range p.pages {
			if holds[x]++; where[x] == places {
				where[x] = limbo
			}
		}
	}
	untold := 0
	for _, p := range m.arena.returned {
		if where[p] != places || !m.arena.pages[p].untold {
			return fmt.Errorf("%w: page %d is to be told, and in %v, or twice", errBroken, p, where[p])
		}
		where[p] = engine
	}
	var counts [places]int
	published := 0
	for i, s := range m.arena.pages {
		if s.place == engine && where[i] == places && m.arena.chosen { // in no table of ours
			where[i] = engine
		}
		if s.untold {
			untold++
		}
		if where[i] != s.place || m.arena.free.has(page.Index(i)) != (s.place == free) {
			return fmt.Errorf("%w: page %d is %v, the tables say %v", errBroken, i, s.place, where[i])
		}
		if holds[i] != s.holds {
			return fmt.Errorf("%w: page %d has %d holds, the publications %d", errBroken, i, s.holds, holds[i])
		}
		if s.holds > 0 {
			published++
			if s.place == free || s.place == sink || s.place == engine {
				return fmt.Errorf("%w: page %d is published and %v", errBroken, i, s.place)
			}
		}
		counts[s.place]++
	}
	if untold != len(m.arena.returned) || m.arena.chosen && counts[free] > 0 {
		return fmt.Errorf("%w: %d pages are to be told, %d are listed, %d are free", errBroken, untold, len(m.arena.returned), counts[free])
	}
	if counts != m.arena.counts || m.arena.queue.n != counts[free] || published != m.arena.published {
		return fmt.Errorf("%w: counts %v and %d published, recounted %v and %d", errBroken, m.arena.counts, m.arena.published, counts, published)
	}
	if err := m.verifyHost(); err != nil {
		return err
	}
	return m.verifySteps()
}

func (m *Manager) verifyRequest(r *request) error {
	if m.byHandle(r.handle()) != r || r.key != "" && r.inFlight > 0 || len(r.streams) > m.limits.labels {
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
	if w := r.moving; w != nil && (w.request != r || m.moves[w.id] != w) {
		return fmt.Errorf("%w: moves without a move", errBroken)
	}
	for _, s := range r.streams {
		held := s.stored - s.released
		need := page.Count(held, m.size)
		if s.state == OnHost || s.state == Reloading {
			if len(s.pages) > 0 || len(s.host) != need || s.named > 0 {
				return fmt.Errorf("%w: label %q is %v with %d pages, %d on the host, %d named", errBroken, s.label, s.state, len(s.pages), len(s.host), s.named)
			}
			need = 0
		}
		switch {
		case r.stream(s.label) != s:
			return fmt.Errorf("%w: label %q twice", errBroken, s.label)
		case held < 0 || s.released%m.size != 0 || s.prefix%m.size != 0 || s.released == 0 && s.prefix > 0 || s.start() > s.stored:
			return fmt.Errorf("%w: label %q: %d tokens, %d released behind %d", errBroken, s.label, s.stored, s.released, s.prefix)
		case len(s.pages) < need:
			return fmt.Errorf("%w: label %q: %d pages hold %d tokens", errBroken, s.label, len(s.pages), held)
		case s.named > need || s.named > 0 && r.publication == nil:
			return fmt.Errorf("%w: label %q: %d pages named, %d needed", errBroken, s.label, s.named, need)
		case s.offered > s.stored || s.named > 0 && s.offered == 0 || s.offered > 0 && !s.listed || s.listed && r.publication == nil:
			return fmt.Errorf("%w: label %q: %d tokens offered, %d stored, %d pages named", errBroken, s.label, s.offered, s.stored, s.named)
		case s.landed > s.stored || s.landed > 0 && s.origin == origin{}:
			return fmt.Errorf("%w: label %q: %d tokens landed, %d stored", errBroken, s.label, s.landed, s.stored)
		case (s.state == Offloading || s.state == Reloading) && r.moving == nil:
			return fmt.Errorf("%w: label %q is %v, and nothing moves it", errBroken, s.label, s.state)
		case s.state != Resident && s.writing+s.overtaken > 0:
			return fmt.Errorf("%w: label %q is %v and written", errBroken, s.label, s.state)
		}
		for _, x := range s.pages[need:] {
			if m.arena.held(x) {
				return fmt.Errorf("%w: label %q: page %d is published and to be written", errBroken, s.label, x)
			}
		}
	}
	return nil
}

// verifyHost recounts the host's pages.
func (m *Manager) verifyHost() error {
	where := make([]bool, m.host.pages())
	put := func(list []page.Index) error {
		for _, x := range list {
			if where[x] || m.host.queue.has(x) {
				return fmt.Errorf("%w: host page %d has two owners, or is free", errBroken, x)
			}
			where[x] = true
		}
		return nil
	}
	used := 0
	for r := range m.all {
		for _, s := range r.streams {
			used += len(s.host)
			if err := put(s.host); err != nil {
				return err
			}
		}
	}
	for i, w := range m.moves {
		if w.id != i || w.request != nil && (w.request.moving != w || m.byHandle(w.request.handle()) != w.request) {
			return fmt.Errorf("%w: move %d and its request do not know each other", errBroken, i)
		}
		used += len(w.hostDrain)
		if err := put(w.hostDrain); err != nil {
			return err
		}
		for _, p := range w.parts {
			if w.request != nil && p.stream.state != Offloading && p.stream.state != Reloading {
				return fmt.Errorf("%w: move %d of a stream that is %v", errBroken, i, p.stream.state)
			}
			if !w.reload {
				used += len(p.to)
				if err := put(p.to); err != nil {
					return err
				}
			}
		}
	}
	for x := range m.host.queue.all() {
		if where[x] {
			return fmt.Errorf("%w: host page %d is free and used, or twice", errBroken, x)
		}
		where[x] = true
	}
	if used+m.host.free() != m.host.pages() {
		return fmt.Errorf("%w: %d host pages used and %d free, of %d", errBroken, used, m.host.free(), m.host.pages())
	}
	return nil
}

// verifySteps recounts the marks that steps have left.
func (m *Manager) verifySteps() error {
	inFlight := make(map[*request]int)
	writing, overtaken := make(map[*stream]int), make(map[*stream]int)
	for t, a := range m.steps {
		if a.staged != nil && m.staged[a.staged.Lane] != t {
			return fmt.Errorf("%w: step %d is staged, and its lane has another", errBroken, t)
		}
		for i := range a.forks {
			if f := &a.forks[i]; f.live() {
				inFlight[f.request]++
				if f.request.forking != a {
					return fmt.Errorf("%w: step %d forks %q, which does not know", errBroken, t, f.request.id)
				}
			}
		}
		for i := range a.segments {
			g := &a.segments[i]
			if !g.live() {
				continue
			}
			inFlight[g.request]++
			switch {
			case !g.writes() || a.staged != nil:
			case g.overtaken():
				overtaken[g.stream]++
			default:
				writing[g.stream]++
			}
		}
	}
	for r := range m.all {
		if r.inFlight != inFlight[r] || r.forking != nil && r.inFlight == 0 && r.key == "" {
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
