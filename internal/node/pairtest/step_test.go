package pairtest

import (
	"errors"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// step is one that was admitted or staged, and how far its engine has come.
type step struct {
	value    manager.Step
	token    manager.Token
	writer   uint32
	staged   bool
	segments []*segment
	forks    []*fork
	created  []created // labels that it made
	phase    phase
	written  bool
}

// phase is what the engine has done.
type phase int

const (
	admitted phase = iota
	planned
	copied
	written
	postPlanned
	postCopied
)

type created struct {
	life
	label id.Label
}

// segment is what one row of one label writes.
type segment struct {
	life
	label            id.Label
	base, span       int
	released, prefix int
	fork             *fork // whose pages it writes; nil: the stream's own
	tokens           []token
	pages            []page.Index // of all tokens then
	slots            []page.Slot
}

// fork is one copy for one request.
type fork struct {
	life
	from, to       id.Label
	pre            bool
	tokens         []token // held by the source then
	position       int
	walked         bool
	source, target []page.Index // nil: not told yet
	done           bool
}

// draft is the streams as a step makes them, and whose pages hold them: nil,
// the stream's own.
type draft struct {
	after map[*request]map[id.Label]*stream
	by    map[*stream]*fork
}

func newDraft() *draft {
	return &draft{after: make(map[*request]map[id.Label]*stream), by: make(map[*stream]*fork)}
}

// stream returns the draft of a stream; nil: there is none.
func (d *draft) stream(r *request, l id.Label) *stream {
	if d.after[r] == nil {
		d.after[r] = make(map[id.Label]*stream)
	}
	if d.after[r][l] == nil && r.streams[l] != nil {
		d.after[r][l] = r.streams[l].clone()
	}
	return d.after[r][l]
}

func (d *draft) fork(f *fork) {
	from := d.stream(f.request, f.from)
	to := from.clone()
	to.pages, to.host, to.origin, to.landed, to.computed, to.state = nil, nil, origin{}, 0, 0, manager.Resident
	if old := d.stream(f.request, f.to); old != nil {
		to.before = old.before
	} else {
		to.before = look{}
	}
	d.after[f.request][f.to] = to
	d.by[to] = f
	if f.pre && f.walked { // it is what it was when the step was admitted
		to.position = f.position
	}
	f.tokens, f.position, f.walked = slices.Clone(from.held()), to.position, true
}

func (d *draft) write(g *segment, discard bool) {
	to := d.stream(g.request, g.label)
	if to == nil {
		to = &stream{retention: g.retention[g.label]}
		d.after[g.request][g.label] = to
	}
	g.base, g.released, g.prefix, g.fork = len(to.tokens), to.released, to.prefix, d.by[to]
	if !discard {
		to.tokens = append(to.tokens, g.tokens...)
	}
}

// walk does the step in its order: forks, segments, forks.
func (s *step) walk(m *model) *draft {
	d := newDraft()
	rows := s.value.Rows
	if rows == nil {
		for _, g := range s.value.Segments {
			if !slices.Contains(rows, g.Request) {
				rows = append(rows, g.Request)
			}
		}
	}
	forks := func(list []manager.Fork, pre bool) {
		for _, f := range list {
			for _, row := range rows {
				r := m.requests[row]
				if d.stream(r, f.From) == nil {
					continue // a row that pads
				}
				one := &fork{life: r.life(), from: f.From, to: f.To, pre: pre}
				d.fork(one)
				s.forks = append(s.forks, one)
			}
		}
	}
	forks(s.value.PreForks, true)
	for _, g := range s.value.Segments {
		r := m.requests[g.Request]
		one := &segment{life: r.life(), label: g.Label, span: g.Span}
		base := 0
		if to := d.stream(r, g.Label); to != nil {
			base = len(to.tokens)
		}
		for i := range g.Span {
			one.tokens = append(one.tokens, newToken(s.writer, g.Request, g.Label, base+i))
		}
		d.write(one, s.value.Discard)
		s.segments = append(s.segments, one)
	}
	forks(s.value.PostForks, false)
	return d
}

// replay does again what was walked, now that it becomes true, without some
// requests.
func (s *step) replay(without []id.Request) *draft {
	d := newDraft()
	forks := func(pre bool) {
		for _, f := range s.forks {
			if f.pre == pre && !slices.Contains(without, f.id) {
				d.fork(f)
			}
		}
	}
	forks(true)
	for _, g := range s.segments {
		if !slices.Contains(without, g.id) {
			d.write(g, s.value.Discard)
		}
	}
	forks(false)
	return d
}

// touches says whether the manager counts the step on this life of the request.
func (s *step) touches(m *model, r *request) bool {
	for _, g := range s.segments {
		if g.request == r && m.live(g.life) {
			return true
		}
	}
	for _, f := range s.forks {
		if f.request == r && m.live(f.life) {
			return true
		}
	}
	return false
}

// fromStream says whether the fork copies from a stream, not from what an
// earlier fork of the step has made.
func (f *fork) fromStream(s *step) bool {
	for _, o := range s.forks {
		if o != f && o.target != nil && slices.Contains(o.target, f.source[0]) {
			return false
		}
	}
	return true
}

// overtaken: another step was committed where this one would write.
func (g *segment) overtaken() bool {
	return g.span > 0 && g.fork == nil && g.base != len(g.stream(g.label).tokens)
}

// own says whether the step may still write the segment.
func (g *segment) own(m *model) bool { return m.live(g.life) && !g.overtaken() }

// draw makes up a step.
func (s *side) draw() (v manager.Step) {
	v.Lane = manager.Lane(s.below(2, "lane"))
	v.Discard = s.below(8, "discard") == 0
	rows := [][]id.Request{{"a"}, {"b"}, {"a", "b"}, {"b", "a"}}[s.below(4, "rows")]
	forks := s.below(3, "forks") == 0
	spans := []int{0, 1, 1, 1, 2, 3, 5, 8}
	for _, r := range rows {
		which := labels[:1]
		switch s.below(4, "labels") {
		case 0:
			which = labels[:2]
		case 1:
			which = labels[1:2]
		}
		for _, l := range which {
			v.Segments = append(v.Segments, manager.Segment{Request: r, Label: l, Span: spans[s.below(len(spans), "span")]})
		}
	}
	if forks {
		all := [][]manager.Fork{
			nil,
			{{From: id.Main, To: "cfg"}},
			{{From: "cfg", To: id.Main}},
			{{From: id.Main, To: "alt"}},
			{{From: id.Main, To: "cfg"}, {From: "cfg", To: "alt"}},
			{{From: "alt", To: "cfg"}, {From: "cfg", To: id.Main}},
		}
		v.PreForks, v.PostForks = all[s.below(len(all), "before")], all[s.below(len(all), "after")]
		switch s.below(3, "padded") {
		case 0:
			v.Rows = append(slices.Clone(rows), "pad")
		case 1:
			v.Rows = []id.Request{"a", "b"}
		}
	}
	if s.below(3, "combined") == 0 && s.has(v, id.Main) && s.has(v, "cfg") {
		v.Combined = []manager.Combined{{Sources: []id.Label{"cfg", id.Main}, Label: "both"}}
	}
	if s.below(4, "leased") == 0 {
		v.Lease = manager.Lease{Slot: 1, Tokens: s.below(24, "graph")}
	}
	return v
}

func (s *side) has(v manager.Step, l id.Label) bool {
	return slices.ContainsFunc(v.Segments, func(g manager.Segment) bool { return g.Label == l })
}

// refused checks that the model knows the reason.
func (s *side) refused(what string, v manager.Step, err error) {
	var rows []*request
	unknown := false
	for _, r := range slices.Concat(v.Rows, s.segmentsOf(v)) {
		if s.requests[r] == nil {
			unknown = true
		} else {
			rows = append(rows, s.requests[r])
		}
	}
	holds := func(why func(*request) bool) bool { return slices.ContainsFunc(rows, why) }
	ok := false
	switch {
	case errors.Is(err, manager.ErrUnknownRequest):
		ok = unknown
	case errors.Is(err, manager.ErrReading):
		ok = holds(func(r *request) bool { return r.pull != nil })
	case errors.Is(err, manager.ErrOffloading):
		ok = holds((*request).away)
	case errors.Is(err, manager.ErrStepInFlight):
		ok = holds(s.inFlight)
		s.saw("fork refused")
	case errors.Is(err, manager.ErrNoPages):
		short, is := errors.AsType[*manager.AllocationError](err)
		ok = is && short.Short > 0 && short.Free == s.m.Counts().Free
		s.saw("no pages")
	}
	if !ok {
		s.Fatalf("%s: %s %+v: %v", s.life.Node, what, v, err)
	}
}

func (s *side) segmentsOf(v manager.Step) (list []id.Request) {
	for _, g := range v.Segments {
		list = append(list, g.Request)
	}
	return list
}

// admitStep admits a step that is made up.
func (s *side) admitStep() {
	if len(s.steps) < 4 {
		s.ingestAll()
		s.admit(s.draw())
	}
}

// promote asks for a staged step.
func (s *side) promote() {
	for _, a := range s.steps {
		if a.staged {
			s.admit(a.value)
			return
		}
	}
}

func (s *side) admit(v manager.Step) {
	old := s.staged(v.Lane)
	current := old != nil && old.current(&s.model)
	t, err := s.m.Admit(v)
	s.Logf("%s: admit %+v: step %d, %v", s.life.Node, v, t, err)
	if old != nil {
		if err == nil && t == old.token {
			if !current {
				s.Fatalf("%s: staged step %+v was promoted, and has lost what it stands on", s.life.Node, v)
			}
			old.staged, old.phase = false, admitted // its copies are not known yet
			for _, f := range old.forks {
				f.walked = false
			}
			old.replay(nil)
			s.saw("promoted")
			return
		}
		if current && same(old.value, v) {
			s.Fatalf("%s: staged step %+v was not promoted: %v", s.life.Node, v, err)
		}
		s.saw("mismatch")
		s.drop(old)
	}
	if err != nil {
		s.refused("admit", v, err)
		return
	}
	s.begun(t, v)
	s.saw("admit")
}

// same compares what the test makes up.
func same(a, b manager.Step) bool {
	return a.Lane == b.Lane && a.Discard == b.Discard && a.Lease == b.Lease && len(a.Combined) == len(b.Combined) &&
		slices.Equal(a.Segments, b.Segments) && slices.Equal(a.PreForks, b.PreForks) && slices.Equal(a.PostForks, b.PostForks) && slices.Equal(a.Rows, b.Rows)
}

// begun puts an admitted step into the model.
func (s *side) begun(t manager.Token, v manager.Step) *step {
	a := &step{value: v, token: t, writer: s.next()}
	for r, streams := range a.walk(&s.model).after {
		for l := range streams {
			if r.streams[l] == nil {
				r.stream(l)
				a.created = append(a.created, created{r.life(), l})
			}
		}
	}
	if len(a.forks) > 0 {
		s.saw("fork")
		if slices.ContainsFunc(a.forks, func(f *fork) bool { return f.id == "pad" }) {
			s.saw("fork of a padded row")
		}
		for _, f := range a.forks {
			if to := f.streams[f.to]; len(to.tokens) > 0 {
				s.saw("fork onto tokens")
			}
		}
	}
	if len(s.steps) > 1 {
		s.saw("several steps in flight")
	}
	s.steps = append(s.steps, a)
	return a
}

func (s *side) staged(l manager.Lane) *step {
	for _, a := range s.steps {
		if a.staged && a.value.Lane == l {
			return a
		}
	}
	return nil
}

// current: all that the staged step stands on is as it was.
func (s *step) current(m *model) bool {
	for _, g := range s.segments {
		if !m.live(g.life) || g.fork == nil && g.base != len(g.stream(g.label).tokens) {
			return false
		}
	}
	for _, f := range s.forks {
		if !m.live(f.life) {
			return false
		}
	}
	return true
}

func (s *side) stage() {
	s.ingestAll()
	v := s.draw()
	t, err := s.m.Stage(v)
	s.Logf("%s: stage %+v: step %d, %v", s.life.Node, v, t, err)
	if s.staged(v.Lane) != nil {
		if !errors.Is(err, manager.ErrStaged) {
			s.Fatalf("%s: second staged step of a lane: %v", s.life.Node, err)
		}
		return
	}
	if err != nil {
		s.refused("stage", v, err)
		return
	}
	s.begun(t, v).staged = true
	s.saw("stage")
	if _, err := s.m.Commit(t); !errors.Is(err, manager.ErrStaged) {
		s.Fatalf("%s: commit of a staged step: %v", s.life.Node, err)
	}
}

func (s *side) unstage() {
	lane := manager.Lane(s.below(2, "lane"))
	s.m.Unstage(lane)
	s.Logf("%s: unstage lane %d", s.life.Node, lane)
	if a := s.staged(lane); a != nil {
		s.drop(a)
		s.saw("unstage")
	}
}

// over takes a step off the side.
func (s *side) over(a *step) {
	s.steps = slices.DeleteFunc(s.steps, func(o *step) bool { return o == a })
}

// drop ends a step that did not run without a trace.
func (s *side) drop(a *step) {
	s.over(a)
	s.uncreate(a)
}

// uncreate takes back the labels that a step has made and put nothing into.
func (s *side) uncreate(a *step) {
	for _, c := range a.created {
		if st := c.streams[c.label]; s.live(c.life) && st != nil && len(st.tokens) == 0 && !s.inFlight(c.request) && !s.offered(c.request, c.label) {
			delete(c.streams, c.label)
		}
	}
}

// offered says whether the request's publication has a label, empty or not.
func (s *side) offered(r *request, l id.Label) bool {
	return r.published != 0 && s.publications[r.published].last.stream(l) != nil
}

func (s *side) pickStep() *step {
	if len(s.steps) == 0 {
		return nil
	}
	return s.steps[s.below(len(s.steps), "step")]
}

func (s *side) abort() {
	if a := s.pickStep(); a != nil {
		s.abortStep(a)
		s.saw("abort")
	}
}

func (s *side) abortStep(a *step) {
	s.Logf("%s: abort step %d", s.life.Node, a.token)
	if err := s.m.Abort(a.token); err != nil {
		s.Fatal(err)
	}
	s.drop(a)
}

// advance lets the engine of one step work for a while.
func (s *side) advance() {
	a := s.pickStep()
	if a == nil || a.copies() && s.below(2, "wait") == 0 {
		return
	}
	for range 1 + s.below(7, "phases") {
		if !s.work(a) || a.copies() && s.below(2, "stop") == 0 {
			return // the copier takes its time
		}
	}
}

// copies says whether there is something to be copied now.
func (s *step) copies() bool {
	return slices.ContainsFunc(s.forks, func(f *fork) bool { return f.source != nil && !f.done })
}

// work does what comes next; false: the step is over, or stands.
func (s *side) work(a *step) bool {
	switch {
	case a.staged:
		if a.phase == admitted {
			s.plan(a)
		}
		return false
	case a.phase == admitted:
		return s.plan(a)
	case a.phase == planned:
		s.copy(a, true)
		a.phase = copied
	case a.phase == copied:
		s.write(a)
		a.phase = written
	case a.phase == written:
		s.planForks(a)
		a.phase = postPlanned
	case a.phase == postPlanned:
		s.copy(a, false)
		a.phase = postCopied
	default:
		s.commit(a)
		return false
	}
	return true
}

// plan fetches the step's addresses and checks all of them.
func (s *side) plan(a *step) bool {
	dead, overtaken := false, false
	for _, g := range a.segments {
		dead = dead || !s.live(g.life)
		overtaken = overtaken || s.live(g.life) && g.overtaken()
	}
	err := s.m.Plan(a.token, &s.plans)
	s.Logf("%s: plan step %d: %+v, %v", s.life.Node, a.token, s.plans.Copies, err)
	if dead || overtaken {
		if known := dead && errors.Is(err, manager.ErrUnknownRequest) || overtaken && errors.Is(err, manager.ErrInvalid); !known {
			s.Fatalf("%s: plan of a step that lost a request (%v) or was overtaken (%v): %v", s.life.Node, dead, overtaken, err)
		}
		s.saw("plan refused")
		s.abortStep(a)
		return false
	}
	if err != nil {
		s.Fatal(err)
	}
	s.learn(a, s.plans.Copies, true)
	seen := 0
	for i := range s.plans.Plans {
		p := &s.plans.Plans[i]
		if p.Total > len(p.Slots) || len(p.Slots) != max(p.Total, a.value.Lease.Tokens) {
			s.Fatalf("%s: plan %q has %d slots, %d of them tokens, of a lease of %d", s.life.Node, p.Label, len(p.Slots), p.Total, a.value.Lease.Tokens)
		}
		for _, pad := range p.Slots[p.Total:] {
			if pad.Page != page.Sink {
				s.Fatalf("%s: padding goes to page %d", s.life.Node, pad.Page)
			}
			s.saw("padding")
		}
		for j, v := range p.Views {
			s.view(a, p, v, p.Slots[p.Indptrs.QO[j]:p.Indptrs.QO[j+1]])
			seen++
		}
	}
	if seen != len(a.segments) {
		s.Fatalf("%s: plan of %d views, %d segments", s.life.Node, seen, len(a.segments))
	}
	a.phase = planned
	return true
}

// view checks one row's pages and slots.
func (s *side) view(a *step, p *manager.Plan, v manager.View, slots []page.Slot) {
	i := slices.IndexFunc(a.segments, func(g *segment) bool { return g.id == v.Request && g.label == v.Label })
	g := a.segments[i]
	want := g.label
	for _, c := range a.value.Combined {
		if slices.Contains(c.Sources, g.label) {
			want = c.Label
		}
	}
	if p.Label != want || v.Length != g.base+g.span || v.Compute != g.span || v.Released != g.released || v.Prefix != g.prefix ||
		len(v.Pages) != count(v.Length-v.Released) || len(slots) != g.span {
		s.Fatalf("%s: view %+v in plan %q with %d slots, want %+v in %q", s.life.Node, v, p.Label, len(slots), g, want)
	}
	before := g.stream(g.label).pages
	if g.fork != nil {
		before = g.fork.target
	}
	before = before[:min(len(before), count(g.base-g.released))]
	if !slices.Equal(v.Pages[:len(before)], before) {
		s.Fatalf("%s: view of request %s label %s has pages %v, its tokens are in %v", s.life.Node, g.id, g.label, v.Pages, before)
	}
	for j, slot := range slots {
		at := at(v.Pages, g.base-g.released+j)
		if slot.Page != at.page || int(slot.Slot) != at.slot || slot.Page == page.Sink {
			s.Fatalf("%s: token %d of request %s label %s goes to %+v, want %+v", s.life.Node, g.base+j, g.id, g.label, slot, at)
		}
	}
	if g.pages != nil && !slices.Equal(g.pages, v.Pages) {
		s.Fatalf("%s: promoted step writes %v, it was planned to write %v", s.life.Node, v.Pages, g.pages)
	}
	g.pages, g.slots = slices.Clone(v.Pages), slices.Clone(slots)
	if len(a.value.Combined) > 0 {
		s.saw("combined")
	}
}

// learn pairs the manager's copies with the forks that are to be made.
func (s *side) learn(a *step, copies []manager.Copy, pre bool) {
	for _, f := range a.forks {
		if f.pre != pre || len(f.tokens) == 0 || !s.live(f.life) || a.staged {
			continue
		}
		if len(copies) == 0 {
			s.Fatalf("%s: fork %+v has no copy", s.life.Node, f)
		}
		c := copies[0]
		copies = copies[1:]
		if c.Request != f.id || c.From != f.from || c.To != f.to || c.Tokens != len(f.tokens) ||
			len(c.Source) != count(c.Tokens) || len(c.Target) != count(c.Tokens) {
			s.Fatalf("%s: copy %+v, want %d tokens of %s from %s to %s", s.life.Node, c, len(f.tokens), f.id, f.from, f.to)
		}
		f.source, f.target = slices.Clone(c.Source), slices.Clone(c.Target)
	}
	if len(copies) > 0 {
		s.Fatalf("%s: copies %+v without a fork", s.life.Node, copies)
	}
}

func (s *side) planForks(a *step) {
	copies, err := s.m.PostForks(a.token)
	s.Logf("%s: forks after step %d: %+v, %v", s.life.Node, a.token, copies, err)
	if err != nil {
		s.Fatal(err)
	}
	s.learn(a, copies, false)
}

// copy makes the copies that are known, also those of requests that are gone:
// nobody has told the copier.
func (s *side) copy(a *step, pre bool) {
	for _, f := range a.forks {
		if f.pre != pre || f.source == nil {
			continue
		}
		s.wantAll(f.tokens, func(i int) place { return at(f.source, i) }, "fork of %s from %s to %s, before its copy:", f.id, f.from, f.to)
		for i := range f.tokens {
			s.move(at(f.source, i), at(f.target, i))
		}
		s.Logf("%s: copy of step %d: %s from %s %v to %s %v", s.life.Node, a.token, f.id, f.from, f.source, f.to, f.target)
		f.done = true
		if s.saw("copy of a fork"); !s.live(f.life) {
			s.saw("copy of a fork of a request that is gone")
		}
	}
}

// write puts the step's tokens where its plan says, and the padding.
func (s *side) write(a *step) {
	s.Logf("%s: write step %d", s.life.Node, a.token)
	for _, g := range a.segments {
		if !s.own(g) {
			continue
		}
		for i, slot := range g.slots {
			s.put(place{page: slot.Page, slot: int(slot.Slot)}, g.tokens[i])
		}
		// Steps that were admitted at the same length share the slots: their
		// engine has to write them again.
		for _, o := range s.steps {
			if o != a && slices.ContainsFunc(o.segments, func(h *segment) bool { return h.request == g.request && h.label == g.label }) {
				o.written = false
			}
		}
	}
	if a.value.Lease.Tokens > 0 {
		for i := range pageSize {
			s.put(place{page: page.Sink, slot: i}, newToken(a.writer, "pad", "alt", i))
		}
	}
	a.written = true
}

func (s *side) own(g *segment) bool { return g.own(&s.model) }

// verify: what was copied and written stays, what is to be copied is there.
func (s *step) verify(side *side) {
	made := true // so far, in their order
	for _, f := range s.forks {
		made = made && (f.source == nil || f.done)
		switch {
		case f.source == nil || !made && !f.fromStream(s):
		case f.done:
			side.wantAll(f.tokens, func(i int) place { return at(f.target, i) }, "fork of %s from %s to %s, made:", f.id, f.from, f.to)
		default:
			side.wantAll(f.tokens, func(i int) place { return at(f.source, i) }, "fork of %s from %s to %s, to be made:", f.id, f.from, f.to)
		}
	}
	if !s.written {
		return
	}
	for _, g := range s.segments {
		if side.own(g) {
			side.wantAll(g.tokens, func(i int) place { return place{page: g.slots[i].Page, slot: int(g.slots[i].Slot)} }, "step of %s label %s, written:", g.id, g.label)
		}
	}
}

// commit ends a step, and its tokens and forks become the streams'.
func (s *side) commit(a *step) {
	if !a.written {
		s.write(a)
	}
	var missing []id.Request
	lose := func(r id.Request) {
		if !slices.Contains(missing, r) {
			missing = append(missing, r)
		}
	}
	for _, g := range a.segments {
		if !s.live(g.life) || !a.value.Discard && g.overtaken() {
			if lose(g.id); s.live(g.life) {
				s.saw("overtaken")
			}
		}
	}
	for _, f := range a.forks {
		if !s.live(f.life) {
			lose(f.id)
		}
	}
	out, err := s.m.Commit(a.token)
	s.Logf("%s: commit step %d: %+v, %v", s.life.Node, a.token, out, err)
	if err != nil {
		s.Fatal(err)
	}
	if !slices.Equal(out.Missing, missing) {
		s.Fatalf("%s: commit lost %v, want %v", s.life.Node, out.Missing, missing)
	}
	s.over(a)
	d := a.replay(missing)
	for r, streams := range d.after {
		for l, n := range streams {
			i := slices.IndexFunc(a.segments, func(g *segment) bool { return g.request == r && g.label == l })
			switch f := d.by[n]; {
			case f != nil:
				pages := f.target
				if i >= 0 && a.segments[i].fork == f {
					pages = a.segments[i].pages
				}
				n.pages = slices.Clone(pages[:count(len(n.tokens)-n.released)])
				if old := r.streams[l]; r.published != 0 && s.publications[r.published].names(l) {
					s.saw("fork over published")
					if slices.Contains(out.Unseal, r.published) {
						s.disown(r)
					} else if len(old.tokens) > 0 {
						s.Fatalf("%s: fork onto %s label %s, whose publication %d names other tokens, and it goes on", s.life.Node, r.id, l, r.published)
					}
				}
			case i >= 0 && a.segments[i].span > 0 && !a.value.Discard:
				n.pages = slices.Clone(a.segments[i].pages[:count(len(n.tokens)-n.released)])
			}
			r.streams[l] = n
		}
	}
	s.end(out.Unseal)
	for r, streams := range d.after {
		for l := range streams {
			s.trim(a, r, l)
		}
	}
	if s.saw("commit"); a.value.Discard {
		s.saw("discard")
	}
	if a.value.Discard {
		s.uncreate(a)
	}
}

// trim lets go of what retention does not keep, unless another step counts
// from it.
func (s *side) trim(a *step, r *request, l id.Label) {
	touched := slices.ContainsFunc(a.segments, func(g *segment) bool { return g.request == r && g.label == l }) ||
		slices.ContainsFunc(a.forks, func(f *fork) bool { return f.request == r && f.to == l })
	if st := r.streams[l]; touched && !s.inFlight(r) && st.trim() {
		if s.saw("trimmed"); st.prefix > 0 {
			s.saw("trimmed behind a prefix")
		}
		if r.published != 0 {
			s.saw("trimmed what is published")
		}
	}
}
