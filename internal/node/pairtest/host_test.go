package pairtest

import (
	"errors"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// hostMove is an offload or a reload that somebody works at.
type hostMove struct {
	life
	id     manager.MoveID
	reload bool
	parts  []hostPart
	copied bool
}

type hostPart struct {
	label        id.Label
	tokens       []token
	device, host []page.Index
}

// verify: what is to be copied is there, what was copied stays, whatever has
// become of the request.
func (w *hostMove) verify(s *side) {
	for _, p := range w.parts {
		device := func(i int) place { return at(p.device, i) }
		host := func(i int) place { return onHost(at(p.host, i)) }
		from, to := device, host
		if w.reload {
			from, to = host, device
		}
		if w.copied {
			s.wantAll(p.tokens, to, "move of %s label %s, copied:", w.request.id, p.label)
		}
		if !w.copied || s.there(w.life) {
			s.wantAll(p.tokens, from, "move of %s label %s, from where it was:", w.request.id, p.label)
		}
	}
}

// movable returns a request that the test would move; nil: none.
func (s *side) movable() *request {
	if kept := s.all(); len(s.kept) > 0 && s.below(2, "kept") == 0 {
		return kept[s.below(len(kept), "which")]
	}
	return s.requests[names[s.below(2, "request")]]
}

// moveRefused checks that the model knows the reason.
func (s *side) moveRefused(what string, r *request, err error) {
	ok := false
	switch {
	case errors.Is(err, manager.ErrOffloading):
		ok = r.move != nil
	case errors.Is(err, manager.ErrReading):
		ok = r.pull != nil
	case errors.Is(err, manager.ErrStepInFlight):
		ok = s.inFlight(r) || s.forked(r)
	case errors.Is(err, manager.ErrHostFull):
		full, is := errors.AsType[*manager.HostError](err)
		ok = what == "offload" && is && full.Short > 0 && full.Free == s.m.Counts().HostFree
		s.saw("host full")
	case errors.Is(err, manager.ErrNoPages):
		ok = what == "reload"
		s.saw("no pages to reload")
	}
	if !ok {
		s.Fatalf("%s: %s of %s: %v", s.life.Node, what, r.id, err)
	}
}

func (s *side) offload() {
	r := s.movable()
	if r == nil {
		return
	}
	out, err := s.m.Offload(r.handle())
	s.Logf("%s: offload %s: %+v, %v", s.life.Node, r.id, out, err)
	if err != nil {
		s.moveRefused("offload", r, err)
		return
	}
	if out.ID == 0 {
		return
	}
	s.saw("offload")
	left := 0
	for _, st := range r.streams {
		if st.state == manager.Resident && len(st.tokens) > 0 {
			left++
		}
	}
	if len(out.Streams) < left {
		s.saw("host has room for a part")
	}
	s.moved(r, out, false)
}

func (s *side) reload() {
	var r *request
	for _, o := range s.all() { // there are few
		if o.away() && o.move == nil && (r == nil || o.key != "" || s.below(2, "this") == 0) {
			r = o // what is kept is rare
		}
	}
	if r == nil {
		return
	}
	out, err := s.m.Reload(r.handle())
	s.Logf("%s: reload %s: %+v, %v", s.life.Node, r.id, out, err)
	if err != nil {
		s.moveRefused("reload", r, err)
		return
	}
	s.moved(r, out, true)
	for _, st := range r.streams {
		if st.state == manager.OnHost {
			s.Fatalf("%s: reload of %s leaves a stream on the host", s.life.Node, r.id)
		}
	}
	s.saw("reload")
}

// moved puts a move that has begun into the model.
func (s *side) moved(r *request, out manager.HostMove, reload bool) {
	w := &hostMove{life: r.life(), id: out.ID, reload: reload}
	for _, p := range out.Streams {
		st := r.streams[p.Label]
		from, to, is := manager.Resident, manager.Offloading, p.Device
		was := st.pages
		if reload {
			from, to, is, was = manager.OnHost, manager.Reloading, p.Host, st.host
		}
		n := count(p.Tokens)
		if st.state != from || p.Tokens != len(st.held()) || !slices.Equal(is, was) || len(p.Host) != n || len(p.Device) != n {
			s.Fatalf("%s: move %+v of request %s, stream %+v", s.life.Node, p, r.id, st)
		}
		st.state = to
		w.parts = append(w.parts, hostPart{p.Label, slices.Clone(st.held()), slices.Clone(p.Device), slices.Clone(p.Host)})
	}
	s.moves = append(s.moves, w)
	r.move = w
}

// carry copies what one move is to copy, or ends it.
func (s *side) carry() {
	if len(s.moves) == 0 {
		return
	}
	w := s.moves[s.below(len(s.moves), "move")]
	switch {
	case s.below(14, "abandon") == 0:
		s.abandon(w)
	case w.copied:
		s.finish(w)
	default:
		for _, p := range w.parts {
			for i := range p.tokens {
				if w.reload {
					s.move(onHost(at(p.host, i)), at(p.device, i))
				} else {
					s.move(at(p.device, i), onHost(at(p.host, i)))
				}
			}
		}
		s.Logf("%s: copy of move %d", s.life.Node, w.id)
		if w.copied = true; !s.there(w.life) {
			s.saw("host copy of a request that is gone")
		}
	}
}

func (s *side) settled(w *hostMove) {
	s.moves = slices.DeleteFunc(s.moves, func(o *hostMove) bool { return o == w })
	if w.move == w {
		w.move = nil
	}
}

func (s *side) abandon(w *hostMove) {
	s.Logf("%s: abandon %d", s.life.Node, w.id)
	if err := s.m.Abandon(w.id); err != nil {
		s.Fatal(err)
	}
	s.settled(w)
	if s.there(w.life) {
		for _, p := range w.parts {
			if st := w.streams[p.label]; w.reload {
				st.state = manager.OnHost
			} else {
				st.state = manager.Resident
			}
		}
	}
	s.saw("abandon")
}

func (s *side) finish(w *hostMove) {
	if w.reload {
		s.reloaded(w)
		return
	}
	out, err := s.m.Offloaded(w.id)
	s.Logf("%s: offloaded %d: %+v, %v", s.life.Node, w.id, out, err)
	if err != nil {
		s.Fatal(err)
	}
	s.settled(w)
	if !s.there(w.life) {
		if len(out.Unseal) > 0 {
			s.Fatalf("%s: end of an offload of a request that is gone: %+v", s.life.Node, out)
		}
		return
	}
	for _, p := range w.parts {
		st := w.streams[p.label]
		st.state, st.pages, st.host = manager.OnHost, nil, p.host
	}
	if len(out.Unseal) > 0 {
		if len(out.Unseal) != 1 || out.Unseal[0] != w.published {
			s.Fatalf("%s: offload of %s unseals %v, its publication is %d", s.life.Node, w.request.id, out.Unseal, w.published)
		}
		s.stale[s.publications[w.published].name] = "stale: offloaded"
		s.disown(w.request)
		s.end(out.Unseal)
		s.saw("offloaded what is published")
		if w.key != "" { // nobody else would
			s.publishRequest(w.request, true)
			s.saw("offloaded what is kept")
		}
	}
	s.saw("offloaded")
}

func (s *side) reloaded(w *hostMove) {
	err := s.m.Reloaded(w.id)
	s.Logf("%s: reloaded %d: %v", s.life.Node, w.id, err)
	if !s.there(w.life) {
		if !errors.Is(err, manager.ErrUnknownMove) {
			s.Fatalf("%s: end of a reload of a request that is gone: %v", s.life.Node, err)
		}
		s.abandon(w)
		return
	}
	if err != nil {
		s.Fatal(err)
	}
	s.settled(w)
	for _, p := range w.parts {
		st := w.streams[p.label]
		st.state, st.pages, st.host = manager.Resident, p.device, nil
	}
	if s.saw("reloaded"); w.key != "" {
		s.saw("reloaded what is kept")
	}
	if w.published != 0 {
		s.republish(w.request)
	}
}
