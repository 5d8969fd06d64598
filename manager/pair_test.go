package manager

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
)

// TestPair lets two nodes, each a manager with a memory of one tag a token
// slot, compute, publish and pull from each other in random order. Engines
// write planned slots late, reads copy slot by slot in random order, given-up
// reads go on landing, seal words are cleared late, and Unsealed comes later
// still. It claims that
//
//   - committed tokens never change, and a read that landed brought exactly the
//     tags that its publication named;
//   - ready means that all needed tags are there;
//   - no slot is written while the word of a publication that names it is set;
//   - no page is handed out while a read may still write it;
//   - in the end every page is free.
func TestPair(t *testing.T) {
	seen := map[string]int{}
	events := []string{
		"landed", "landed from limbo", "stale", "failed", "late landing", "removed while read into", "reset while read into",
		"started over", "started over what was published", "ready", "diverged", "overtaken", "no pages", "ended by the node",
		"published again after reset", "ready on its owner", "landed on what was computed",
	}
	rare := func() (event string) {
		for _, e := range events {
			if seen[e] < 5 {
				return e
			}
		}
		return ""
	}
	deadline := time.Now().Add(*soak)
	for round := 0; !t.Failed() && (time.Now().Before(deadline) || rare() != "" && round < 20); round++ {
		rapid.Check(t, func(t *rapid.T) { runPair(t, seen) })
	}
	t.Log(seen)
	if e := rare(); e != "" && !t.Failed() {
		t.Errorf("hardly ever happened: %s", e)
	}
}

func runPair(t *rapid.T, seen map[string]int) {
	w := &world{T: t, seen: seen}
	for i := range w.nodes {
		w.nodes[i] = newNode(w, fmt.Sprint("node", i))
	}
	for range 10 + below(500).Draw(t, "operations") {
		w.nodes[below(2).Draw(t, "node")].operate()
		w.check()
	}
	for _, n := range w.nodes {
		n.wind()
	}
	w.check()
	for _, n := range w.nodes {
		n.same("at the end", n.Counts(), Counts{Free: pairPages - 1, Sink: 1})
	}
}

const (
	pairPages = 14
	pairSize  = 4
)

var pairRequests = []id.Request{"a", "b", "c"}

type world struct {
	*rapid.T
	nodes [2]*node
	board []*announced // all that was ever published
	tags  uint64
	seen  map[string]int
}

// announced is a publication as it went over the wire, and what it named.
type announced struct {
	owner *node
	src   *Source
	tags  map[id.Label][]uint64
	limbo func() bool
}

type node struct {
	bed
	w      *world
	life   id.Life
	memory [pairPages][pairSize]uint64
	live   map[id.Request]*life
	steps  []*running
	reads  []*read
	// words are those that are set; named are the slots that publications name,
	// and how many of these have their word set.
	words map[PublicationID]bool
	names map[PublicationID]map[Slot]bool
	// ending publications: the word is cleared first, Unsealed comes later.
	ending []PublicationID
}

// life is what the engine believes of a request, from Ingest or Reset on.
type life struct {
	streams   map[id.Label]*content
	reading   bool
	published PublicationID
	wasReset  bool
}

type content struct {
	tags     []uint64
	origin   origin
	landed   int
	computed bool // tokens before the first retrieve
}

type running struct {
	token    Token
	segments []written
	planned  bool
	discard  bool
}

type written struct {
	request id.Request
	label   id.Label
	life    *life
	base    int
	slots   []Slot
	tags    []uint64
}

type read struct {
	*Retrieval
	from    *announced
	life    *life
	copies  []copying
	givenUp bool
}

type copying struct {
	label   id.Label
	token   int
	src, to Slot
	done    bool
}

// below draws evenly. The numbers of rapid itself prefer the small ones, which
// leaves little but empty steps.
func below(n int) *rapid.Generator[int] {
	return rapid.Custom(func(t *rapid.T) int {
		x := 0
		for range bits.Len(uint(n-1)) + 2 {
			x *= 2
			if rapid.Bool().Draw(t, "bit") {
				x++
			}
		}
		return x % n
	})
}

func newNode(w *world, name string) *node {
	n := &node{
		w:     w,
		life:  id.Life{Node: id.Node(name), Incarnation: 1},
		live:  map[id.Request]*life{},
		words: map[PublicationID]bool{},
		names: map[PublicationID]map[Slot]bool{},
	}
	n.bed = newBed(w.T, pairPages, pairSize, func(o *Options) { o.Life = n.life; o.Check = pairCheck })
	return n
}

// pairCheck lets a broken manager be found by what it does alone.
const pairCheck = true

func (n *node) operate() {
	ops := []func(*node){
		(*node).ingest1, (*node).ingest1, (*node).ingest1, (*node).admit1, (*node).admit1, (*node).admit1, (*node).write1, (*node).commit1, (*node).commit1, (*node).commit1,
		(*node).abort1, (*node).publish1, (*node).publish1, (*node).publish1, (*node).remove1, (*node).reset1,
		(*node).retrieve1, (*node).retrieve1, (*node).retrieve1, (*node).retrieve1, (*node).copy1, (*node).copy1, (*node).copy1, (*node).finish1, (*node).finish1,
		(*node).cancel1, (*node).expire1, (*node).clear1, (*node).unsealed1,
	}
	ops[n.number("operation", 0, len(ops)-1)](n)
}

func (n *node) request() id.Request { return pairRequests[n.number("request", 0, len(pairRequests)-1)] }

func (n *node) number(what string, from, to int) int {
	return from + below(to-from+1).Draw(n.w.T, what)
}
func (n *node) coin(what string) bool { return rapid.Bool().Draw(n.w.T, what) }

var pairNeeds = [][]id.Label{nil, {"main"}, {"main", "cfg"}}

func (n *node) ingest1() {
	r := n.request()
	n.ok(n.Ingest(r, Needs{Labels: pairNeeds[n.number("needs", 0, len(pairNeeds)-1)]}))
	if n.live[r] == nil {
		n.live[r] = &life{streams: map[id.Label]*content{"main": {}}}
	}
}

func (n *node) admit1() {
	var s Step
	run := &running{discard: n.number("discard", 0, 5) == 0}
	s.Discard = run.discard
	known, reading := true, false
	for range n.number("segments", 1, 3) {
		g := Segment{n.request(), []id.Label{"main", "main", "cfg"}[n.number("label", 0, 2)], n.number("span", 0, 6)}
		if slices.ContainsFunc(s.Segments, func(o Segment) bool { return o.Request == g.Request && o.Label == g.Label }) {
			continue
		}
		s.Segments = append(s.Segments, g)
		l := n.live[g.Request]
		if l == nil {
			known = false
			continue
		}
		reading = reading || l.reading
		w := written{request: g.Request, label: g.Label, life: l}
		if c := l.streams[g.Label]; c != nil {
			w.base = len(c.tags)
		}
		for range g.Span {
			n.w.tags++
			w.tags = append(w.tags, n.w.tags)
		}
		run.segments = append(run.segments, w)
	}
	tok, err := n.Admit(s)
	switch {
	case !known || reading:
		if !errors.Is(err, ErrUnknownRequest) && !errors.Is(err, ErrReading) {
			n.t.Fatalf("admit of unknown %v or reading %v: %v", !known, reading, err)
		}
	case errors.Is(err, ErrNoPages):
		n.w.seen["no pages"]++
	default:
		n.ok(err)
		run.token = tok
		for _, g := range run.segments {
			if g.life.streams[g.label] == nil {
				g.life.streams[g.label] = &content{}
			}
		}
		n.steps = append(n.steps, run)
		if n.coin("plan at once") {
			n.plan1(run)
		}
	}
}

func (n *node) alive(g *written) bool { return n.live[g.request] == g.life }
func (n *node) overtaken(g *written) bool {
	return len(g.tags) > 0 && g.base != len(g.life.streams[g.label].tags)
}

// plan1 reports whether the step may run.
func (n *node) plan1(run *running) bool {
	if run.planned {
		return true
	}
	var want error
	for i := range run.segments {
		g := &run.segments[i]
		if !n.alive(g) {
			want = ErrUnknownRequest
		} else if want == nil && n.overtaken(g) {
			want = ErrInvalid
		}
	}
	plans, err := n.Plan(run.token)
	if want != nil {
		if !errors.Is(err, ErrUnknownRequest) && !errors.Is(err, ErrInvalid) {
			n.t.Fatalf("plan: %v, want %v", err, want)
		}
		return false
	}
	n.ok(err)
	run.planned = true
	for _, p := range plans {
		next := 0
		for _, v := range p.Views {
			i := slices.IndexFunc(run.segments, func(g written) bool { return g.request == v.Request && g.label == v.Label })
			g := &run.segments[i]
			g.slots = p.Slots[next : next+v.Compute]
			next += v.Compute
			n.same("length", v.Length, g.base+len(g.tags))
			n.handedOut(g.slots, nil)
			for j, s := range g.slots { // the slots are those of the view's tail
				n.same("slot", s, Slot{v.Pages[(g.base+j)/pairSize], int32((g.base + j) % pairSize)})
			}
		}
	}
	return true
}

// handedOut claims that nobody else has the slots.
func (n *node) handedOut(slots []Slot, by *read) {
	n.t.Helper()
	for _, s := range slots {
		n.unnamed(s)
		for _, r := range n.reads {
			if r == by {
				continue
			}
			for _, c := range r.copies {
				if c.to == s {
					n.t.Fatalf("%v is handed out while retrieval %d may write it", s, r.ID)
				}
			}
		}
	}
}

// unnamed claims that the slot is not what a set word stands for.
func (n *node) unnamed(s Slot) {
	n.t.Helper()
	for p, set := range n.words {
		if set && n.names[p][s] {
			n.t.Fatalf("%v is to be written while the word of publication %d is set", s, p)
		}
	}
}

func (n *node) put(s Slot, tag uint64) {
	n.t.Helper()
	n.unnamed(s)
	n.memory[s.Page][s.Slot] = tag
}

// write1 is the engine that writes some slots of a step.
func (n *node) write1() {
	if run := n.step(); run != nil && run.planned {
		for i := range run.segments {
			g := &run.segments[i]
			if !n.alive(g) || n.overtaken(g) {
				continue // it has promised not to
			}
			for j, s := range g.slots {
				if n.coin("write") {
					n.put(s, g.tags[j])
				}
			}
		}
	}
}

func (n *node) step() *running {
	if len(n.steps) == 0 {
		return nil
	}
	return n.steps[n.number("step", 0, len(n.steps)-1)]
}

func (n *node) end(run *running) {
	n.steps = slices.DeleteFunc(n.steps, func(o *running) bool { return o == run })
}

func (n *node) commit1() {
	run := n.step()
	if run == nil {
		return
	}
	if !n.plan1(run) {
		n.ok(n.Abort(run.token))
		n.end(run)
		return
	}
	missing := map[id.Request]bool{}
	for i := range run.segments {
		g := &run.segments[i]
		switch {
		case !n.alive(g):
			missing[g.request] = true
		case n.overtaken(g):
			n.w.seen["overtaken"]++
			missing[g.request] = missing[g.request] || !run.discard
		default:
			for j, s := range g.slots { // again, for another step may have the same ones
				n.put(s, g.tags[j])
			}
		}
	}
	got, err := n.Commit(run.token)
	n.ok(err)
	for _, r := range got {
		if !missing[r] {
			n.t.Fatalf("commit reports %q", r)
		}
		delete(missing, r)
	}
	for r, lost := range missing {
		if lost {
			n.t.Fatalf("commit does not report %q", r)
		}
	}
	for i := range run.segments {
		g := &run.segments[i]
		if run.discard || len(g.tags) == 0 || slices.Contains(got, g.request) {
			continue
		}
		c := g.life.streams[g.label]
		c.tags = append(c.tags, g.tags...)
		c.computed = c.computed || c.origin == origin{}
	}
	n.end(run)
}

func (n *node) abort1() {
	if run := n.step(); run != nil {
		n.ok(n.Abort(run.token))
		n.end(run)
	}
}

func (n *node) publish1() {
	r, final := n.request(), n.coin("final")
	l := n.live[r]
	p, err := n.Publish(r, final)
	if l == nil {
		n.fails(err, ErrUnknownRequest)
		return
	}
	mayWrite := slices.ContainsFunc(n.steps, func(s *running) bool {
		return slices.ContainsFunc(s.segments, func(g written) bool { return g.life == l && n.overtaken(&g) })
	})
	if err != nil {
		switch {
		case errors.Is(err, ErrFinal) || errors.Is(err, ErrEnded):
			if l.published == 0 {
				n.t.Fatalf("publish of what was not: %v", err)
			}
		case errors.Is(err, ErrInvalid):
			for _, c := range l.streams {
				n.same("stored", len(c.tags), 0)
			}
		case errors.Is(err, ErrStepInFlight) && mayWrite:
		default:
			n.t.Fatalf("publish: %v", err)
		}
		return
	}
	if mayWrite {
		n.t.Fatalf("publication %d of what a step that was overtaken may write", p.ID)
	}
	if l.published != 0 && l.published != p.ID {
		n.t.Fatalf("publication %d became %d", l.published, p.ID)
	}
	if l.published == 0 && l.wasReset {
		n.w.seen["published again after reset"]++
	}
	l.published = p.ID
	if slices.Contains(n.ending, p.ID) {
		return // the node has begun to end it, and announces it no more
	}
	a := &announced{
		owner: n,
		src:   &Source{Name: id.Publication{Owner: n.life, Sequence: id.Sequence(p.ID)}, Geometry: n.geometry, Publication: p},
		tags:  map[id.Label][]uint64{},
		limbo: func() bool { return n.live[r] != l },
	}
	n.words[p.ID] = true
	n.names[p.ID] = map[Slot]bool{}
	for _, s := range p.Streams {
		c := l.streams[s.Label]
		n.same("published", s.Tokens, len(c.tags))
		a.tags[s.Label] = slices.Clone(c.tags)
		for t, tag := range c.tags {
			slot := Slot{s.Pages[t/pairSize], int32(t % pairSize)}
			n.names[p.ID][slot] = true
			n.same("tag", n.memory[slot.Page][slot.Slot], tag)
		}
	}
	n.w.board = append(n.w.board, a)
}

func (n *node) remove1() {
	if n.coin("spare") {
		return
	}
	r, discard := n.request(), n.coin("discard")
	out := n.remove(r, discard)
	l := n.live[r]
	if l == nil {
		n.same("removed", out, Removed{})
		return
	}
	if len(out.Cancel) > 0 {
		n.w.seen["removed while read into"]++
	}
	n.let(l, out)
	delete(n.live, r)
}

func (n *node) reset1() {
	if n.coin("spare") {
		return
	}
	r := n.request()
	out := n.reset(r, n.coin("free"))
	l := n.live[r]
	if l == nil {
		n.same("removed", out, Removed{})
		return
	}
	if len(out.Cancel) > 0 {
		n.w.seen["reset while read into"]++
	}
	n.same("lives", len(out.Lives), 0)
	n.let(l, out)
	fresh := &life{streams: map[id.Label]*content{}, wasReset: true}
	for label := range l.streams {
		fresh.streams[label] = &content{}
	}
	n.live[r] = fresh
}

// let takes what Remove and Reset leave to be done.
func (n *node) let(l *life, out Removed) {
	n.ending = append(n.ending, out.Unseal...)
	n.same("cancel", len(out.Cancel) > 0, l.reading)
	for _, r := range n.reads {
		if slices.Contains(out.Cancel, r.ID) {
			r.givenUp = true
		}
	}
}

// retrieveOwn: it is ready only for the life that published, which has it all.
func (n *node) retrieveOwn(l *life, a *announced, out Outcome, err error) {
	p := a.src.Publication.ID
	switch {
	case n.publications[p] == nil:
		n.fails(err, ErrEnded)
	case l.published != p:
		n.fails(err, ErrGone)
	default:
		n.ok(err)
		n.same("outcome", out, Outcome{Readiness: Ready})
		for label, tags := range a.tags {
			has := l.streams[label].tags
			n.same("tokens of "+string(label), has[:min(len(tags), len(has))], tags)
		}
		n.w.seen["ready on its owner"]++
	}
}

func (n *node) retrieve1() {
	if len(n.w.board) == 0 {
		return
	}
	// Mostly a recent one, and sometimes one that ended long ago.
	a := n.w.board[max(0, len(n.w.board)-1-n.number("age", 0, min(5, len(n.w.board)-1)))]
	r := n.request()
	if n.coin("the same request") {
		r = a.src.Publication.Request
	}
	minTokens := n.number("min", 0, 8)
	l := n.live[r]
	out, err := n.AdmitRetrieve(r, At{}, a.src, minTokens)
	switch {
	case l == nil:
		n.fails(err, ErrUnknownRequest)
		return
	case errors.Is(err, ErrNoPages):
		n.w.seen["no pages"]++
		return
	case errors.Is(err, ErrDiverged):
		n.w.seen["diverged"]++
		return
	case errors.Is(err, ErrStepInFlight):
		return
	}
	if l.reading {
		n.ok(err)
		n.same("outcome", out, Outcome{Readiness: Reading})
		return
	}
	if a.owner == n {
		n.retrieveOwn(l, a, out, err)
		return
	}
	n.ok(err)
	from := origin{a.src.Name, a.src.Publication.ContentEpoch}
	needed := n.requests[r].needs.at(At{})
	for _, label := range needed {
		c := l.streams[label]
		if _, ok := a.tags[label]; ok && c != nil && c.origin != (origin{}) && c.origin != from {
			n.w.seen["started over"]++
			*c = content{}
			if len(out.Unseal) > 0 {
				n.w.seen["started over what was published"]++
			}
			l.published = 0
		}
	}
	n.ending = append(n.ending, out.Unseal...)
	if out.Readiness == Ready {
		n.w.seen["ready"]++
		for _, label := range needed {
			tags, ok := a.tags[label]
			if !ok {
				n.t.Fatalf("ready without %q", label)
			}
			has := 0
			if c := l.streams[label]; c != nil {
				has = len(c.tags)
				if c.origin != (origin{}) {
					has = c.landed
				}
				if upTo := min(has, len(tags)); !c.computed {
					n.same("tags of "+string(label), c.tags[:upTo], tags[:upTo])
				}
			}
			if final, enough := a.src.Publication.Final && has >= len(tags), minTokens > 0 && has >= minTokens; !final && !enough {
				n.t.Fatalf("ready with %d of %d tokens, final %v, min %d", has, len(tags), a.src.Publication.Final, minTokens)
			}
		}
	}
	if out.Start == nil {
		return
	}
	run := &read{Retrieval: out.Start, from: a, life: l}
	for _, m := range out.Start.Moves {
		start := 0
		if c := l.streams[m.Label]; c != nil {
			start = len(c.tags)
		}
		n.same("from", m.From, start)
		for t := m.From; t < m.To; t++ {
			run.copies = append(run.copies, copying{
				label: m.Label, token: t,
				src: Slot{m.Remote[(t-m.RemoteStart)/pairSize], int32(t % pairSize)},
				to:  Slot{m.Local[(t-m.LocalStart)/pairSize], int32(t % pairSize)},
			})
		}
	}
	var to []Slot
	for _, c := range run.copies {
		to = append(to, c.to)
	}
	n.handedOut(to, nil)
	l.reading = true
	n.reads = append(n.reads, run)
}

func (n *node) reading() *read {
	if len(n.reads) == 0 {
		return nil
	}
	return n.reads[n.number("read", 0, len(n.reads)-1)]
}

func (n *node) copySlot(r *read, i int) {
	c := &r.copies[i]
	if r.givenUp {
		n.w.seen["late landing"]++
	}
	n.put(c.to, r.from.owner.memory[c.src.Page][c.src.Slot])
	c.done = true
}

func (n *node) copy1() {
	if r := n.reading(); r != nil {
		for i := range r.copies {
			if !r.copies[i].done && n.coin("copy") {
				n.copySlot(r, i)
			}
		}
	}
}

// finish1 ends a read: of one that was given up nothing lands any more; of
// another all lands, and then the word is read.
func (n *node) finish1() {
	r := n.reading()
	if r == nil {
		return
	}
	if !r.givenUp {
		for i := range r.copies {
			if !r.copies[i].done {
				n.copySlot(r, i)
			}
		}
	}
	n.over(r)
}

func (n *node) over(r *read) {
	n.reads = slices.DeleteFunc(n.reads, func(o *read) bool { return o == r })
	r.life.reading = false
	sealed := r.from.owner.words[PublicationID(r.from.src.Name.Sequence)]
	switch {
	case r.givenUp:
		n.fails(n.Landed(r.ID), ErrUnknownRetrieval)
		n.w.seen["failed"]++
	case !sealed:
		n.w.seen["stale"]++
	default:
		n.ok(n.Landed(r.ID))
		n.w.seen["landed"]++
		if r.from.limbo() {
			n.w.seen["landed from limbo"]++
		}
		for _, m := range r.Moves {
			c := r.life.streams[m.Label]
			if c == nil {
				c = &content{}
				r.life.streams[m.Label] = c
			}
			if c.computed && m.From > 0 && c.origin == (origin{}) {
				n.w.seen["landed on what was computed"]++
			}
			c.tags = append(c.tags, r.from.tags[m.Label][m.From:m.To]...)
			c.landed = m.To
			c.origin = origin{r.from.src.Name, r.from.src.Publication.ContentEpoch}
		}
		n.fails(n.Failed(r.ID), ErrUnknownRetrieval)
		return
	}
	n.ok(n.Failed(r.ID))
	n.fails(n.Landed(r.ID), ErrUnknownRetrieval)
}

func (n *node) cancel1() {
	if r := n.reading(); r != nil {
		n.ok(n.Cancel(r.ID))
		r.givenUp = true
	}
}

// expire1 is the node that ends a publication by itself.
func (n *node) expire1() {
	if len(n.words) == 0 || n.number("expire", 0, 3) > 0 {
		return
	}
	p := PublicationID(n.number("publication", 1, int(n.lastPublication)))
	if n.words[p] && !slices.Contains(n.ending, p) {
		n.w.seen["ended by the node"]++
		n.ending = append(n.ending, p)
	}
}

func (n *node) clear1() {
	if len(n.ending) > 0 {
		n.words[n.ending[n.number("ending", 0, len(n.ending)-1)]] = false
	}
}

func (n *node) unsealed1() {
	if len(n.ending) == 0 {
		return
	}
	p := n.ending[n.number("ending", 0, len(n.ending)-1)]
	if n.words[p] {
		return
	}
	n.ending = slices.DeleteFunc(n.ending, func(o PublicationID) bool { return o == p })
	n.Unsealed(p)
	n.Unsealed(p)
}

// check compares memory and managers with what must be.
func (w *world) check() {
	w.Helper()
	for _, n := range w.nodes {
		for r, l := range n.live {
			for label, c := range l.streams {
				n.stored(r, label, len(c.tags))
				for t, tag := range c.tags {
					p := n.requests[r].byLabel[label].pages[t/pairSize]
					if got := n.memory[p][t%pairSize]; got != tag {
						w.Fatalf("%s: %q label %q token %d is %d, want %d", n.life, r, label, t, got, tag)
					}
				}
			}
		}
		for p, set := range n.words {
			for s := range n.names[p] {
				if set && n.arena.pages[s.Page].place == free {
					w.Fatalf("%s: page %d is free while the word of publication %d is set", n.life, s.Page, p)
				}
			}
		}
		for _, r := range n.reads {
			for _, c := range r.copies {
				if n.arena.pages[c.to.Page].place == free {
					w.Fatalf("%s: page %d is free while retrieval %d may write it", n.life, c.to.Page, r.ID)
				}
			}
		}
	}
}

// wind ends everything.
func (n *node) wind() {
	for _, run := range slices.Clone(n.steps) {
		n.ok(n.Abort(run.token))
	}
	n.steps = nil
	for _, r := range slices.Clone(n.reads) {
		n.ok(n.Cancel(r.ID))
		r.givenUp = true
		n.over(r)
	}
	for r := range n.live {
		n.remove(r, true)
		delete(n.live, r)
	}
	for p := range n.words {
		n.words[p] = false
		n.Unsealed(p)
	}
}
