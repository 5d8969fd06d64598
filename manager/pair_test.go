package manager

import (
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// TestPair lets two nodes, each a manager with a memory of one tag a token
// slot and a host memory, compute, fork, stage, publish, pull from each other,
// and go to the host and back in random order. Engines write planned slots late,
// all copies are made slot by slot with anything in between, given-up ones go on
// landing, seal words are cleared late, and Unsealed comes later still. What
// must be where is told by a model that knows positions and tags, not pages. It
// claims, after every operation, that
//
//   - every token that is held is where the stream says, on the device or on the
//     host, and a read that landed brought exactly the tags that its
//     publication named;
//   - ready means that all needed tags are there;
//   - no slot is written while the word of a publication that names it is set;
//   - no page is handed out while a read, a fork, or a move is at it;
//   - in the end every page is free.
func TestPair(t *testing.T) {
	seen := map[string]int{}
	events := []string{
		"landed", "landed from limbo", "stale", "failed", "late landing", "removed while read into", "reset while read into",
		"started over", "started over what was published", "ready", "diverged", "overtaken", "no pages", "ended by the node",
		"published again after reset", "ready on its owner", "landed on what was computed",

		"forked before", "forked after", "forked in a chain", "padded row", "forked and discarded", "forked with a position",
		"forked what was trimmed", "forked onto what was published", "lost while forked", "late copy of a fork", "in one step alone",
		"promoted", "promoted with forks", "staged step dropped for another", "stale staged step", "unstaged", "label taken back",
		"trimmed", "trimmed behind a prefix", "trimmed what was published", "landed without what was released",
		"started over a gap", "gap to what was computed",
		"offloaded", "reloaded", "offload abandoned", "reload abandoned", "offloaded what was published", "host is full",
		"offloaded what was trimmed", "removed while moved", "reset while moved", "late copy of a move", "refused on the host", "reset refused on the host",
		"published on the host", "published again with pages",

		"kept", "kept while moved", "kept while forked",
		"offloaded what is kept", "reloaded what is kept", "landed from what is kept",
		"kept to its end", "kept to its end while moved", "removed what is kept",
	}
	rare := func() (event string) {
		for _, e := range events {
			if seen[e] == 0 {
				return e
			}
		}
		return ""
	}
	checks := flag.Lookup("rapid.checks").Value.String()
	t.Cleanup(func() { _ = flag.Set("rapid.checks", checks) })
	_ = flag.Set("rapid.checks", "25") // a round, of which there are as many as it takes until all has happened
	deadline := time.Now().Add(*soak)
	for round := 0; !t.Failed() && (time.Now().Before(deadline) || rare() != "" && round < 80); round++ {
		rapid.Check(t, func(t *rapid.T) { runPair(t, seen) })
	}
	t.Log(seen)
	if e := rare(); e != "" && !t.Failed() {
		t.Errorf("never happened: %s", e)
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
		n.same("at the end", n.Counts(), Counts{Free: pairPages - 1, Sink: 1, HostFree: pairHost})
	}
}

const (
	pairPages = 22
	pairHost  = 7
	pairSize  = 4
)

var (
	pairRequests = []id.Request{"a", "b", "c"}
	pairLabels   = []id.Label{"main", "cfg", "x"}
	pairNeeds    = [][]id.Label{nil, {"main"}, {"main", "cfg"}}
	pairKeep     = []Retention{{}, {}, {Budget: 8}, {Budget: 6, Prefix: 3}, {Budget: 1}, {Budget: 1}}
)

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
	kept  func() bool
}

type node struct {
	bed
	w      *world
	life   id.Life
	memory [pairPages][pairSize]uint64
	host   [pairHost][pairSize]uint64
	live   map[id.Request]*life // those that are kept by their key
	steps  []*running
	staged [2]*running // by lane
	reads  []*read
	moves  []*moving
	// words are those that are set; named are the slots that publications name,
	// and how many of these have their word set.
	words map[PublicationID]bool
	names map[PublicationID]map[page.Slot]bool
	// ending publications: the word is cleared first, Unsealed comes later.
	ending []PublicationID
}

// life is what the engine believes of a request, from Ingest or Reset on.
type life struct {
	streams   map[id.Label]*content
	keep      map[id.Label]Retention
	reading   bool
	moving    *moving
	published PublicationID // live
	final     bool
	ended     bool
	wasReset  bool
	kept      bool // removed, and there for its publication alone
}

// content is one stream: the tags of all tokens, those that were let go
// included. held says which are still there.
type content struct {
	tags             []uint64
	released, prefix int
	position         int
	keep             Retention
	state            State
	origin           origin
	landed           int
	computed         bool // tokens before the first retrieve
	offered          int  // tokens that the live publication offers; -1: it does not know the stream
	offersWithout    int  // tokens that were released then
	bare             bool // it was announced without pages
}

// held lists the positions that are held, in the order in which they lie.
func (c *content) held() []int {
	var list []int
	for t := range c.tags {
		if t < c.prefix || t >= c.prefix+c.released {
			list = append(list, t)
		}
	}
	return list
}

// slot is where a token lies in a list of pages.
func (c *content) slot(pages []page.Index, token int) page.Slot {
	i := slices.Index(c.held(), token)
	return at(pages[i/pairSize], int32(i%pairSize))
}

// trim lets the oldest whole pages behind the prefix go, one at a time.
func (c *content) trim() (trimmed bool) {
	if c.keep.Budget == 0 {
		return false
	}
	for {
		prefix := c.prefix
		if c.released == 0 {
			for prefix = 0; prefix < c.keep.Prefix; {
				prefix += pairSize
			}
		}
		held := len(c.tags) - c.released
		if held-pairSize < c.keep.Budget || held-prefix <= pairSize {
			return trimmed
		}
		c.prefix, c.released = prefix, c.released+pairSize
		trimmed = true
	}
}

// fork is the content of another stream that was made of this one.
func (c *content) fork() *content {
	return &content{
		tags: slices.Clone(c.tags), released: c.released, prefix: c.prefix, position: c.position, keep: c.keep,
		computed: true, offered: -1,
	}
}

func (c *content) clone() *content {
	d := *c
	d.tags = slices.Clone(c.tags)
	return &d
}

// running is a step, from Admit or Stage to its end.
type running struct {
	step     Step
	token    Token
	segments []written
	forked   map[*life]bool
	created  []made
	// positions are those that forks before the segments have taken over.
	positions map[forkOf]int
	plans     []Plan // of Stage
	planned   bool
	copies    []tagCopy // of the forks before the segments, then those after
	done      int       // of copies
	posted    bool
}

type made struct {
	life  *life
	label id.Label
}

type forkOf struct {
	life *life
	i    int
}

type written struct {
	request          id.Request
	label            id.Label
	life             *life
	base             int
	released, prefix int
	forked           bool // into the pages of a fork
	slots            []page.Slot
	tags             []uint64
}

type tagCopy struct {
	request id.Request
	life    *life
	src, to page.Slot
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
	src, to page.Slot
	done    bool
}

// moving is an offload or a reload.
type moving struct {
	HostMove
	reload bool
	life   *life
	lost   bool
	copies []hostCopy
}

type hostCopy struct {
	device, host page.Slot
	done         bool
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
		names: map[PublicationID]map[page.Slot]bool{},
	}
	n.bed = newBed(w.T, pairPages, pairSize, func(o *Options) { o.Life = n.life; o.Host = pairHost })
	return n
}

func (n *node) operate() {
	ops := []struct {
		weight int
		run    func(*node)
	}{
		{4, (*node).ingest1},
		{4, (*node).admit1},
		{4, (*node).fork1},
		{3, (*node).stage1},
		{3, (*node).promote1},
		{1, (*node).unstage1},
		{2, (*node).copyFork1},
		{1, (*node).write1},
		{2, (*node).post1},
		{6, (*node).commit1},
		{2, (*node).outrun1},
		{1, (*node).abort1},
		{1, (*node).position1},
		{4, (*node).publish1},
		{2, (*node).republish1},
		{1, (*node).remove1},
		{2, (*node).reset1},
		{5, (*node).retrieve1},
		{3, (*node).pull1},
		{3, (*node).copy1},
		{3, (*node).finish1},
		{1, (*node).cancel1},
		{2, (*node).offload1},
		{2, (*node).reload1},
		{3, (*node).copyMove1},
		{3, (*node).endMove1},
		{2, (*node).rest1},
		{1, (*node).expire1},
		{1, (*node).clear1},
		{1, (*node).unsealed1},
		{1, (*node).forget1},
	}
	total := 0
	for _, o := range ops {
		total += o.weight
	}
	at := n.number("operation", 0, total-1)
	for _, o := range ops {
		if at -= o.weight; at < 0 {
			o.run(n)
			return
		}
	}
}

func (n *node) request() id.Request { return pairRequests[n.number("request", 0, len(pairRequests)-1)] }

// handle is a request, or one that is kept.
func (n *node) handle() id.Request {
	var keys []id.Request
	for r, l := range n.live {
		if l.kept {
			keys = append(keys, r)
		}
	}
	if len(keys) == 0 || n.coin("an engine's") {
		return n.request()
	}
	slices.Sort(keys)
	return keys[n.number("kept", 0, len(keys)-1)]
}

func (n *node) label() id.Label { return pairLabels[n.number("label", 0, len(pairLabels)-1)] }

func (n *node) number(what string, from, to int) int {
	return from + below(to-from+1).Draw(n.w.T, what)
}
func (n *node) coin(what string) bool { return rapid.Bool().Draw(n.w.T, what) }

func (n *node) ingest1() { n.ingest(n.request()) }

func (n *node) ingest(r id.Request) {
	c := RequestConfig{Needs: Needs{Labels: pairNeeds[n.number("needs", 0, len(pairNeeds)-1)]}, Retention: map[id.Label]Retention{}}
	for _, l := range pairLabels[:2] {
		if k := pairKeep[n.number("retention", 0, len(pairKeep)-1)]; k.Budget > 0 {
			c.Retention[l] = k
		}
	}
	n.ok(n.Ingest(r, c))
	if n.live[r] == nil {
		n.live[r] = &life{streams: map[id.Label]*content{}, keep: c.Retention}
		n.live[r].add("main")
	}
}

func (l *life) add(label id.Label) *content {
	c := &content{keep: l.keep[label], offered: -1}
	l.streams[label] = c
	return c
}

func (n *node) position1() {
	r, label, position := n.request(), n.label(), n.number("position", 0, 1000)
	err := n.SetPosition(r, label, position)
	switch l := n.live[r]; {
	case l == nil:
		n.fails(err, ErrUnknownRequest)
	case l.streams[label] == nil:
		n.fails(err, ErrUnknownLabel)
	default:
		n.ok(err)
		l.streams[label].position = position
	}
}

// draw makes up a step.
func (n *node) draw(forks bool) Step {
	s := Step{Discard: n.number("discard", 0, 5) == 0, Lane: Lane(n.number("lane", 0, 1)), Walk: "w"}
	for range n.number("segments", 1, 3) {
		g := Segment{n.request(), pairLabels[n.number("label", 0, 5)/2%len(pairLabels)], n.number("span", 0, 6)}
		if !slices.ContainsFunc(s.Segments, func(o Segment) bool { return o.Request == g.Request && o.Label == g.Label }) {
			s.Segments = append(s.Segments, g)
		}
		if forks && n.coin("one request") {
			break
		}
	}
	if !forks {
		return s
	}
	for _, list := range []*[]Fork{&s.PreForks, &s.PostForks} {
		for range n.number("forks", 0, 2) {
			i := n.number("from", 0, 2)
			*list = append(*list, Fork{pairLabels[i], pairLabels[(i+n.number("to", 1, 2))%3]})
		}
	}
	if n.number("rows", 0, 3) == 0 {
		s.Rows = []id.Request{n.request()}
		if r := n.request(); n.coin("two rows") {
			s.Rows = append(s.Rows, r) // may be the same
		}
	}
	return s
}

// touches reports whether a step that has not ended is on the request.
func (n *node) touches(l *life, but *running, forking bool) bool {
	on := func(r *running) bool {
		return r != nil && r != but && (r.forked[l] ||
			!forking && slices.ContainsFunc(r.segments, func(g written) bool { return g.life == l }))
	}
	return slices.ContainsFunc(n.steps, on) || slices.ContainsFunc(n.staged[:], on)
}

// foresee tells what a step will be, and all that it may be refused for.
func (n *node) foresee(s Step) (run *running, refusals []error) {
	run = &running{step: s, forked: map[*life]bool{}, positions: map[forkOf]int{}}
	var lives []*life
	know := func(r id.Request, fork bool) {
		l := n.live[r]
		switch {
		case l == nil:
			refusals = append(refusals, ErrUnknownRequest)
			return
		case l.reading:
			refusals = append(refusals, ErrReading)
		case n.touches(l, nil, !fork):
			refusals = append(refusals, ErrStepInFlight)
		}
		if !slices.Contains(lives, l) {
			lives = append(lives, l)
		}
	}
	if len(s.PreForks)+len(s.PostForks) > 0 {
		for _, l := range n.rows(s) {
			know(l, true)
		}
	}
	for _, g := range s.Segments {
		know(g.Request, false)
		w := written{request: g.Request, label: g.Label, life: n.live[g.Request]}
		for range g.Span {
			n.w.tags++
			w.tags = append(w.tags, n.w.tags)
		}
		run.segments = append(run.segments, w)
	}
	for _, l := range lives {
		before := maps.Clone(l.streams)
		_, touched := n.walk(run, l)
		for label := range touched {
			if before[label] == nil {
				run.created = append(run.created, made{l, label})
			} else if before[label].state != Resident {
				refusals = append(refusals, ErrOffloading)
			}
		}
	}
	return run, refusals
}

func (n *node) rows(s Step) []id.Request {
	if s.Rows != nil {
		return s.Rows
	}
	var rows []id.Request
	for _, g := range s.Segments {
		rows = append(rows, g.Request)
	}
	return rows
}

// walk tells what the streams of a request are after the step, which of them
// it is about, and whether they are targets of forks.
func (n *node) walk(run *running, l *life) (after map[id.Label]*content, touched map[id.Label]bool) {
	after, touched = map[id.Label]*content{}, map[id.Label]bool{}
	for label, c := range l.streams {
		if !slices.Contains(run.created, made{l, label}) { // it comes to be in the step
			after[label] = c.clone()
		}
	}
	touch := func(label id.Label) {
		if _, is := touched[label]; !is {
			touched[label] = false // true if it is a target
		}
	}
	isRow := slices.ContainsFunc(n.rows(run.step), func(r id.Request) bool { return n.live[r] == l })
	fork := func(f Fork) bool {
		if !isRow || after[f.From] == nil {
			return false
		}
		after[f.To] = after[f.From].fork()
		touch(f.From)
		touched[f.To], run.forked[l] = true, true
		return true
	}
	targets := map[id.Label]bool{}
	for i, f := range run.step.PreForks {
		if !fork(f) {
			continue
		}
		targets[f.To] = true
		if p, again := run.positions[forkOf{l, i}]; again {
			after[f.To].position = p
		}
		run.positions[forkOf{l, i}] = after[f.To].position
	}
	for i := range run.segments {
		g := &run.segments[i]
		if g.life != l {
			continue
		}
		c := after[g.label]
		if c == nil {
			c = &content{keep: l.keep[g.label], offered: -1}
			if made := l.streams[g.label]; made != nil {
				c = made.clone()
			}
			after[g.label] = c
		}
		touch(g.label)
		g.base, g.released, g.prefix, g.forked = len(c.tags), c.released, c.prefix, targets[g.label]
		if !run.step.Discard && len(g.tags) > 0 {
			c.tags = append(c.tags, g.tags...)
			c.computed = c.computed || c.origin == origin{}
		}
	}
	for _, f := range run.step.PostForks {
		fork(f)
	}
	return after, touched
}

func (n *node) admit1() { n.enter(n.draw(false)) }
func (n *node) fork1()  { n.enter(n.draw(true)) }

// enter admits a step that is not the lane's staged one.
func (n *node) enter(s Step) {
	if old := n.staged[s.Lane]; old != nil && !old.step.equal(&s) {
		n.w.seen["staged step dropped for another"]++
		n.dropped(s.Lane)
	}
	if n.staged[s.Lane] != nil {
		return // by chance the same
	}
	run, refusals := n.foresee(s)
	tok, err := n.Admit(s)
	if n.admitted(run, refusals, err) {
		run.token = tok
		n.steps = append(n.steps, run)
		if n.coin("plan at once") {
			n.plan1(run)
		}
	}
}

// admitted compares what came of Admit or Stage with what was foreseen.
func (n *node) admitted(run *running, refusals []error, err error) bool {
	n.t.Helper()
	if len(refusals) > 0 {
		if !slices.ContainsFunc(refusals, func(want error) bool { return errors.Is(err, want) }) {
			n.t.Fatalf("step %+v: %v, want one of %v", run.step, err, refusals)
		}
		switch {
		case errors.Is(err, ErrOffloading):
			n.w.seen["refused on the host"]++
		case errors.Is(err, ErrStepInFlight):
			n.w.seen["in one step alone"]++
		}
		return false
	}
	if errors.Is(err, ErrNoPages) {
		n.w.seen["no pages"]++
		return false
	}
	n.ok(err)
	for _, c := range run.created {
		c.life.add(c.label)
	}
	return true
}

func (n *node) stage1() {
	s := n.draw(n.coin("forks"))
	if n.staged[s.Lane] != nil {
		_, err := n.Stage(s)
		n.fails(err, ErrStaged)
		return
	}
	run, refusals := n.foresee(s)
	tok, err := n.Stage(s)
	if !n.admitted(run, refusals, err) {
		return
	}
	run.token = tok
	n.staged[s.Lane] = run
	if n.coin("plan at once") {
		p := n.plans(tok)
		n.same("copies of a staged step", len(p.Copies), 0)
		run.plans = p.Plans
	}
	_, err = n.Commit(tok)
	n.fails(err, ErrStaged)
}

// promote1 admits the very step that is staged.
func (n *node) promote1() {
	lane := n.number("lane", 0, 1)
	run := n.staged[lane]
	if run == nil {
		return
	}
	current := true
	for i := range run.segments {
		g := &run.segments[i]
		current = current && n.alive(g.life) && (g.forked || g.base == len(g.life.streams[g.label].tags))
	}
	for l := range run.forked {
		current = current && n.alive(l)
	}
	if !current {
		n.w.seen["stale staged step"]++
		n.dropped(Lane(lane))
		again, refusals := n.foresee(run.step)
		tok, err := n.Admit(run.step)
		if n.admitted(again, refusals, err) {
			again.token = tok
			n.steps = append(n.steps, again)
		}
		return
	}
	before := n.Counts()
	tok, err := n.Admit(run.step)
	n.ok(err)
	n.same("token", tok, run.token)
	n.same("counts", n.Counts(), before)
	n.staged[lane] = nil
	n.steps = append(n.steps, run)
	n.w.seen["promoted"]++
	if len(run.forked) > 0 {
		n.w.seen["promoted with forks"]++
		clear(run.positions) // taken over now
		for l := range run.forked {
			n.walk(run, l)
		}
	}
	if run.plans != nil {
		n.plan1(run)
		now := n.plans(tok).Plans
		for _, plans := range [][]Plan{now, run.plans} {
			for i := range plans {
				for j := range plans[i].Views {
					plans[i].Views[j].Generation = 0 // another step may have taken pages
				}
			}
		}
		n.same("plans", now, run.plans)
	}
}

func (n *node) unstage1() {
	lane := Lane(n.number("lane", 0, 1))
	run := n.staged[lane]
	switch {
	case run == nil:
		n.Unstage(lane)
		return
	case n.coin("by its token"):
		n.ok(n.Abort(run.token))
	default:
		n.Unstage(lane)
	}
	n.dropped(lane)
	n.w.seen["unstaged"]++
}

// dropped takes back what a staged step has made.
func (n *node) dropped(lane Lane) {
	run := n.staged[lane]
	n.staged[lane] = nil
	n.uncreate(run)
}

// uncreate takes back the labels that a step has made and put nothing into.
func (n *node) uncreate(run *running) {
	for _, c := range run.created {
		if st := c.life.streams[c.label]; n.alive(c.life) && len(st.tags) == 0 && st.offered < 0 && !n.touches(c.life, nil, false) {
			delete(c.life.streams, c.label)
			n.w.seen["label taken back"]++
		}
	}
}

func (n *node) alive(l *life) bool {
	for _, o := range n.live {
		if o == l {
			return !l.kept
		}
	}
	return false
}

func (n *node) overtaken(g *written) bool {
	return !g.forked && len(g.tags) > 0 && g.base != len(g.life.streams[g.label].tags)
}

// plan1 reports whether the step may run.
func (n *node) plan1(run *running) bool {
	if run.planned {
		return true
	}
	may := true
	for i := range run.segments {
		g := &run.segments[i]
		may = may && n.alive(g.life) && !n.overtaken(g)
	}
	var plans Plans
	err := n.Plan(run.token, &plans)
	if !may {
		if !errors.Is(err, ErrUnknownRequest) && !errors.Is(err, ErrInvalid) {
			n.t.Fatalf("plan: %v", err)
		}
		return false
	}
	n.ok(err)
	run.planned = true
	n.copiesOf(run, plans.Copies)
	for _, p := range plans.Plans {
		next := 0
		for _, v := range p.Views {
			i := slices.IndexFunc(run.segments, func(g written) bool { return g.request == v.Request && g.label == v.Label })
			g := &run.segments[i]
			g.slots = p.Slots[next : next+v.Compute]
			next += v.Compute
			n.same("view", []int{v.Length, v.Released, v.Prefix}, []int{g.base + len(g.tags), g.released, g.prefix})
			n.handedOut(g.slots, run)
			c := content{tags: make([]uint64, v.Length), released: g.released, prefix: g.prefix}
			n.same("pages", len(v.Pages), page.Count(len(c.held()), pairSize))
			for j, s := range g.slots { // the slots are those of the view's tail
				n.same("slot", s, c.slot(v.Pages, g.base+j))
			}
		}
	}
	return true
}

// copiesOf takes what is to be copied for the forks of a step.
func (n *node) copiesOf(run *running, copies []Copy) {
	for _, c := range copies {
		n.same("pages", []int{len(c.Source), len(c.Target)}, []int{page.Count(c.Tokens, pairSize), page.Count(c.Tokens, pairSize)})
		for i := range c.Tokens {
			t := tagCopy{
				request: c.Request, life: n.live[c.Request],
				src: at(c.Source[i/pairSize], int32(i%pairSize)), to: at(c.Target[i/pairSize], int32(i%pairSize)),
			}
			n.handedOut([]page.Slot{t.to}, run)
			run.copies = append(run.copies, t)
		}
	}
}

// copyForks makes the next count copies, and sometimes one of them again.
func (n *node) copyForks(run *running, count int) {
	first := 0 // of this kind: those before the segments are over once it has run
	if run.posted {
		first = run.done
	}
	for range min(count, len(run.copies)-run.done) {
		c := run.copies[run.done]
		if !n.alive(c.life) {
			n.w.seen["late copy of a fork"]++
		}
		n.put(c.to, n.memory[c.src.Page][c.src.Slot])
		run.done++
		if n.number("again", 0, 7) == 0 {
			c := run.copies[n.number("which", first, run.done-1)]
			n.put(c.to, n.memory[c.src.Page][c.src.Slot])
		}
	}
}

func (n *node) copyFork1() {
	if run := n.step(); run != nil && n.plan1(run) {
		n.copyForks(run, n.number("copies", 1, 8))
	}
}

// handedOut claims that nobody else has the slots, or is copying them.
func (n *node) handedOut(slots []page.Slot, by *running) {
	n.t.Helper()
	for _, s := range slots {
		n.unnamed(s)
		for _, r := range n.reads {
			for _, c := range r.copies {
				if c.to == s {
					n.t.Fatalf("%v is handed out while retrieval %d may write it", s, r.ID)
				}
			}
		}
		for _, r := range n.steps {
			for _, c := range r.copies {
				if r != by && (c.src.Page == s.Page && !n.alive(c.life) || c.to.Page == s.Page || c.src == s) {
					n.t.Fatalf("%v is handed out while step %d copies it", s, r.token)
				}
			}
		}
		for _, w := range n.moves {
			for _, c := range w.copies {
				if c.device.Page == s.Page {
					n.t.Fatalf("%v is handed out while move %d is at it", s, w.ID)
				}
			}
		}
	}
}

// unnamed claims that the slot is not what a set word stands for.
func (n *node) unnamed(s page.Slot) {
	n.t.Helper()
	for p, set := range n.words {
		if set && n.names[p][s] {
			n.t.Fatalf("%v is to be written while the word of publication %d is set", s, p)
		}
	}
}

func (n *node) put(s page.Slot, tag uint64) {
	n.t.Helper()
	n.unnamed(s)
	n.memory[s.Page][s.Slot] = tag
}

// write1 is the engine that writes some slots of a step.
func (n *node) write1() {
	if run := n.step(); run != nil && run.planned && !run.posted {
		n.copyForks(run, len(run.copies))
		n.write(run, false)
	}
}

func (n *node) write(run *running, all bool) {
	for i := range run.segments {
		g := &run.segments[i]
		if !n.alive(g.life) || n.overtaken(g) {
			continue // it has promised not to
		}
		for j, s := range g.slots {
			if all || n.coin("write") {
				n.put(s, g.tags[j])
			}
		}
	}
}

// post1 is a step that has run, and the beginning of its copies.
func (n *node) post1() {
	if run := n.step(); run != nil && n.plan1(run) {
		n.post(run)
		n.copyForks(run, n.number("copies", 0, 8))
	}
}

func (n *node) post(run *running) {
	if run.posted {
		return
	}
	n.copyForks(run, len(run.copies))
	n.write(run, true)
	run.posted = true
	posts, err := n.PostForks(run.token)
	n.ok(err)
	n.copiesOf(run, posts)
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
	if run := n.step(); run != nil {
		n.commitStep(run)
	}
}

// outrun1 is a request that is published and read, and goes on until its reader
// is far behind.
func (n *node) outrun1() {
	r := n.request()
	l := n.live[r]
	if l == nil || l.final || l.reading || l.away() || n.touches(l, nil, false) || n.staged[0] != nil {
		return
	}
	n.publish(r, l, false)
	reader := n.w.nodes[0]
	if reader == n {
		reader = n.w.nodes[1]
	}
	reader.pull1()
	for range n.number("steps", 1, 3) {
		before := len(n.steps)
		n.enter(Step{Segments: []Segment{{r, "main", 6}}})
		if len(n.steps) > before {
			n.commitStep(n.steps[before])
		}
	}
	n.publish(r, l, n.coin("final"))
	if n.coin("pull") {
		reader.pull1()
	}
}

func (n *node) commitStep(run *running) {
	if !n.plan1(run) {
		n.ok(n.Abort(run.token))
		n.end(run)
		n.uncreate(run)
		return
	}
	n.post(run)
	n.copyForks(run, len(run.copies))
	n.write(run, true) // again, for another step may have the same slots
	missing := map[id.Request]bool{}
	lives := map[*life]bool{}
	for i := range run.segments {
		g := &run.segments[i]
		switch {
		case !n.alive(g.life):
			missing[g.request] = true
		case n.overtaken(g):
			n.w.seen["overtaken"]++
			missing[g.request] = missing[g.request] || !run.step.Discard
		}
		lives[g.life] = true
	}
	for l := range run.forked {
		lives[l] = true
		if !n.alive(l) {
			n.w.seen["lost while forked"]++
		}
	}
	for _, c := range run.copies {
		if !n.alive(c.life) {
			missing[c.request] = true
		}
	}
	got, err := n.Commit(run.token)
	n.ok(err)
	n.end(run)
	for _, r := range got.Missing {
		if _, told := missing[r]; !told && !run.lost(n, r) {
			n.t.Fatalf("commit reports %q", r)
		}
		delete(missing, r)
	}
	for r, lost := range missing {
		if lost {
			n.t.Fatalf("commit does not report %q", r)
		}
	}
	unseal := map[PublicationID]bool{}
	for _, p := range got.Unseal {
		unseal[p] = true
	}
	n.ending = append(n.ending, got.Unseal...)
	for r, l := range n.live {
		if lives[l] && !l.kept && !slices.Contains(got.Missing, r) {
			n.committed(run, l, unseal)
		}
	}
	n.same("ended for nothing", len(unseal), 0)
	if run.step.Discard {
		n.uncreate(run)
	}
}

// lost reports whether a request of the step's rows is gone.
func (r *running) lost(n *node, name id.Request) bool {
	return len(r.forked) > 0 && slices.Contains(n.rows(r.step), name)
}

// committed makes the model what it must be now.
func (n *node) committed(run *running, l *life, unseal map[PublicationID]bool) {
	seen := n.w.seen
	var targets map[id.Label]bool
	if !run.forked[l] { // other steps may have advanced other streams
		for i := range run.segments {
			if g := &run.segments[i]; g.life == l && !run.step.Discard && len(g.tags) > 0 {
				c := l.streams[g.label]
				c.tags = append(c.tags, g.tags...)
				c.computed = c.computed || c.origin == origin{}
			}
		}
	} else {
		before := l.streams
		l.streams, targets = n.walk(run, l)
		n.sawFork(run, l, targets)
		replaced, offered := false, false
		for label, is := range targets {
			if c := before[label]; c != nil && is {
				l.streams[label].offered = c.offered // of the empty one, if the publication goes on
				replaced = replaced || len(c.tags) > 0 || slices.ContainsFunc(run.segments, func(g written) bool {
					return g.life == l && g.label == label && !g.forked && !run.step.Discard && len(g.tags) > 0
				})
				offered = offered || c.offered > 0
			}
		}
		if offered && l.published != 0 {
			seen["forked onto what was published"]++
			n.same("ended by the fork", unseal[l.published], true)
			delete(unseal, l.published)
			l.unpublish()
		}
		if replaced && l.published == 0 {
			l.ended = false
		}
	}
	if n.touches(l, nil, false) {
		return
	}
	for label, c := range l.streams {
		segment := slices.ContainsFunc(run.segments, func(g written) bool { return g.life == l && g.label == label })
		if (segment || targets[label]) && c.trim() {
			seen["trimmed"]++
			if c.prefix > 0 {
				seen["trimmed behind a prefix"]++
			}
			if c.offered > 0 {
				seen["trimmed what was published"]++
			}
		}
	}
}

func (n *node) sawFork(run *running, l *life, targets map[id.Label]bool) {
	seen := n.w.seen
	if run.step.Discard {
		seen["forked and discarded"]++
	}
	if len(n.rows(run.step)) > len(run.step.Segments) {
		seen["padded row"]++
	}
	for _, f := range run.step.PreForks {
		if targets[f.To] {
			seen["forked before"]++
		}
	}
	for _, f := range run.step.PostForks {
		if targets[f.To] {
			seen["forked after"]++
		}
		if targets[f.From] {
			seen["forked in a chain"]++
		}
	}
	for label, is := range targets {
		if is && l.streams[label].position > 0 {
			seen["forked with a position"]++
		}
		if is && l.streams[label].released > 0 {
			seen["forked what was trimmed"]++
		}
	}
}

func (l *life) unpublish() {
	l.published, l.final = 0, false
	for _, c := range l.streams {
		c.offered = -1
	}
}

func (n *node) abort1() {
	if run := n.step(); run != nil {
		n.ok(n.Abort(run.token))
		n.end(run)
		n.uncreate(run)
	}
}

func (n *node) publish1() {
	r := n.request()
	n.publish(r, n.live[r], n.coin("final"))
}

func (n *node) publish(r id.Request, l *life, final bool) {
	p, err := n.Publish(r, final)
	if l == nil {
		n.fails(err, ErrUnknownRequest)
		return
	}
	mayWrite := slices.ContainsFunc(n.steps, func(s *running) bool {
		return slices.ContainsFunc(s.segments, func(g written) bool { return g.life == l && n.overtaken(&g) })
	})
	empty := true
	for _, c := range l.streams {
		empty = empty && len(c.tags) == 0
	}
	switch {
	case l.ended:
		n.fails(err, ErrEnded)
	case l.final:
		n.fails(err, ErrFinal)
	case mayWrite:
		n.fails(err, ErrStepInFlight)
	case empty:
		n.fails(err, ErrInvalid)
	default:
		n.ok(err)
		if l.published != 0 && l.published != p.ID {
			n.t.Fatalf("publication %d became %d", l.published, p.ID)
		}
		if l.published == 0 && l.wasReset {
			n.w.seen["published again after reset"]++
		}
		l.published, l.final = p.ID, final
		n.same("labels", len(p.Streams), len(l.streams))
		l.offer()
		n.announce(r, l, p)
	}
}

// offer notes what the publication offers from now on.
func (l *life) offer() {
	for _, c := range l.streams {
		c.offered, c.offersWithout = len(c.tags), c.released
	}
}

// intact says that nothing that is offered was let go.
func (l *life) intact() bool {
	for _, c := range l.streams {
		if c.offered >= 0 && c.offersWithout != c.released {
			return false
		}
	}
	return true
}

func (n *node) republish1() { n.republish(n.handle()) }

func (n *node) republish(r id.Request) {
	l := n.live[r]
	before := n.Counts().Published
	p, ok := n.Republish(r)
	n.same("live", ok, l != nil && l.published != 0 && l.intact())
	if !ok {
		return
	}
	n.same("id", p.ID, l.published)
	n.same("final", p.Final, l.final)
	if n.Counts().Published > before {
		n.w.seen["published again with pages"]++
	}
	for label, c := range l.streams {
		known := slices.ContainsFunc(p.Streams, func(s Stream) bool { return s.Label == label })
		n.same("known", known, c.offered >= 0)
	}
	n.announce(r, l, p)
}

// announce compares a publication with the model, and offers it.
func (n *node) announce(r id.Request, l *life, p Publication) {
	n.t.Helper()
	n.same("content epoch", p.ContentEpoch, n.byHandle(r).epoch)
	for _, c := range l.streams {
		c.bare = c.offered > 0 && c.state != Resident
	}
	if slices.Contains(n.ending, p.ID) {
		return // the node has begun to end it, and announces it no more
	}
	a := &announced{
		owner: n,
		src:   &Source{Name: id.Publication{Owner: n.life, Sequence: id.Sequence(p.ID)}, Geometry: n.geometry, Publication: p},
		tags:  map[id.Label][]uint64{},
		limbo: func() bool { return n.live[r] != l && !l.kept },
		kept:  func() bool { return l.kept },
	}
	n.ok(n.inspect(a.src, false))
	n.words[p.ID] = true
	if n.names[p.ID] == nil {
		n.names[p.ID] = map[page.Slot]bool{} // an earlier announcement may be read for as long as the word is set
	}
	for _, s := range p.Streams {
		c := l.streams[s.Label]
		n.same("published", s.Tokens, c.offered)
		n.same("state", s.State, min(c.state, OnHost))
		start := 0
		if c.released > 0 {
			start = c.prefix + c.released
		}
		n.same("start", []int{s.Start, s.Prefix}, []int{start, c.prefix})
		a.tags[s.Label] = slices.Clone(c.tags[:s.Tokens])
		if s.State != Resident {
			n.same("pages", len(s.Pages), 0)
			if s.Tokens > 0 {
				n.w.seen["published on the host"]++
			}
			continue
		}
		for _, t := range c.held() {
			if t < s.Tokens {
				slot := c.slot(s.Pages, t)
				n.names[p.ID][slot] = true
				n.same("tag", n.memory[slot.Page][slot.Slot], c.tags[t])
			}
		}
	}
	n.w.board = append(n.w.board, a)
}

func (n *node) remove1() {
	if n.coin("spare") {
		return
	}
	n.removeOne(n.handle(), n.coin("discard"))
}

func (n *node) removeOne(r id.Request, discard bool) {
	l := n.live[r]
	out := n.remove(r, discard)
	if l == nil {
		n.same("removed", out, Removed{})
		return
	}
	away, bare := false, false
	for _, c := range l.streams {
		if c.offered > 0 {
			away, bare = away || c.bare || c.state != Resident, bare || c.bare
		}
	}
	lives := l.published != 0 && l.final && !discard && !l.kept
	n.same("kept", out.Kept != "", lives && away && l.intact())
	if out.Kept != "" {
		n.keep(r, l, out)
		return
	}
	n.same("lives", len(out.Lives) > 0, lives && (!bare || l.intact()))
	if lives && bare {
		n.w.seen["removed what is not whole"]++
	}
	if l.kept {
		n.w.seen["removed what is kept"]++
	}
	if len(out.Cancel) > 0 {
		n.w.seen["removed while read into"]++
	}
	if l.moving != nil {
		n.w.seen["removed while moved"]++
	}
	n.let(l, out)
	delete(n.live, r)
}

// keep makes the model what it must be when a removed request is kept.
func (n *node) keep(r id.Request, l *life, out Removed) {
	n.same("lives", out.Lives, []PublicationID{l.published})
	n.same("unseal", len(out.Unseal), 0)
	n.same("cancel", len(out.Cancel) > 0, l.reading)
	n.fails(out.Kept.Validate(), id.ErrInvalid)
	n.w.seen["kept"]++
	if l.moving != nil {
		n.w.seen["kept while moved"]++
	}
	forked := n.touches(l, nil, true)
	if forked {
		n.w.seen["kept while forked"]++
	}
	if l.reading {
		n.w.seen["kept while read into"]++
	}
	for _, read := range n.reads {
		if slices.Contains(out.Cancel, read.ID) {
			read.givenUp = true
		}
	}
	l.kept = true
	delete(n.live, r)
	n.live[out.Kept] = l
	for label, c := range l.streams { // what is not offered goes, as far as nothing is at it
		if c.state != Resident {
			continue
		}
		if !forked && !l.reading {
			upTo := max(0, c.offered)
			if c.tags = c.tags[:upTo]; c.offered < 0 {
				c.released, c.prefix = 0, 0
			}
			c.landed = min(c.landed, upTo)
		}
		if c.offered < 0 && len(n.byHandle(out.Kept).streamOr(label).pages) == 0 {
			n.same("tokens of what is let go", len(c.tags), 0)
			delete(l.streams, label)
		}
	}
}

// streamOr is a stream, or an empty one.
func (r *request) streamOr(l id.Label) *stream {
	if s := r.stream(l); s != nil {
		return s
	}
	return &stream{}
}

// key is what a life is called by.
func (n *node) key(l *life) id.Request {
	for r, o := range n.live {
		if o == l {
			return r
		}
	}
	n.t.Fatalf("a life that nobody knows")
	return ""
}

func (n *node) reset1() {
	if n.coin("spare") {
		return
	}
	r, all := n.request(), n.coin("free")
	l := n.live[r]
	out, err := n.Reset(r, all)
	if l == nil {
		n.ok(err)
		n.same("removed", out, Removed{})
		return
	}
	if !all && l.away() {
		n.fails(err, ErrOffloading)
		n.w.seen["reset refused on the host"]++
		return
	}
	n.ok(err)
	if len(out.Cancel) > 0 {
		n.w.seen["reset while read into"]++
	}
	if l.moving != nil {
		n.w.seen["reset while moved"]++
	}
	n.same("lives", len(out.Lives), 0)
	n.let(l, out)
	fresh := &life{streams: map[id.Label]*content{}, keep: l.keep, wasReset: true}
	for label := range l.streams {
		fresh.add(label)
	}
	n.live[r] = fresh
}

func (l *life) away() bool {
	for _, c := range l.streams {
		if c.state != Resident {
			return true
		}
	}
	return false
}

// let takes what Remove and Reset leave to be done.
func (n *node) let(l *life, out Removed) {
	n.ending = append(n.ending, out.Unseal...)
	n.same("published", len(out.Unseal)+len(out.Lives) > 0, l.published != 0)
	n.same("cancel", len(out.Cancel) > 0, l.reading)
	for _, r := range n.reads {
		if slices.Contains(out.Cancel, r.ID) {
			r.givenUp = true
		}
	}
	if l.moving != nil {
		l.moving.lost = true
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
			if len(tags) == 0 {
				continue // a label that a staged step made may have been taken back
			}
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
	if n.coin("follow") { // what has landed, with the newest that is known of it
		for i, b := range slices.Backward(n.w.board) {
			l := n.live[b.src.Publication.Request]
			if b.owner != n && l != nil && len(n.w.board)-i < 12 && l.follows(b.src.Name) {
				a, r = b, b.src.Publication.Request
				break
			}
		}
	}
	n.retrieveFrom(r, a, n.number("min", 0, 8))
}

// pull1 brings in what was published last, at once.
func (n *node) pull1() {
	for _, a := range slices.Backward(n.w.board) {
		if r := a.src.Publication.Request; a.owner != n && a.owner.words[a.src.Publication.ID] {
			if n.live[r] == nil {
				n.ingest(r)
			}
			before := len(n.reads)
			n.retrieveFrom(r, a, 0)
			if len(n.reads) > before {
				n.finish(n.reads[before])
			}
			return
		}
	}
}

func (n *node) retrieveFrom(r id.Request, a *announced, minTokens int) {
	l := n.live[r]
	out, err := n.AdmitRetrieve(r, At{}, a.src, minTokens)
	if l == nil {
		n.fails(err, ErrUnknownRequest)
		return
	}
	if l.reading {
		n.ok(err)
		n.same("outcome", out, Outcome{Readiness: Reading})
		return
	}
	needed := n.requests[r].needs.at(At{})
	for _, label := range needed {
		if c := l.streams[label]; c != nil && c.state != Resident {
			n.fails(err, ErrOffloading)
			return
		}
	}
	if a.owner == n {
		n.retrieveOwn(l, a, out, err)
		return
	}
	from := origin{name: a.src.Name, epoch: a.src.Publication.ContentEpoch}
	offer := func(label id.Label) Stream {
		for _, s := range a.src.Publication.Streams {
			if s.Label == label {
				return s
			}
		}
		return Stream{}
	}
	switch {
	case errors.Is(err, ErrNoPages):
		n.w.seen["no pages"]++
		return
	case errors.Is(err, ErrDiverged):
		n.w.seen["diverged"]++
		return
	case errors.Is(err, ErrStepInFlight) && n.touches(l, nil, false):
		return
	case errors.Is(err, ErrIncompatible):
		gap := false
		for _, label := range needed {
			c := l.streams[label]
			gap = gap || c != nil && c.origin == origin{} && len(c.tags) > 0 && len(c.tags) < offer(label).Start
		}
		n.same("gap", gap, true)
		n.w.seen["gap to what was computed"]++
		return
	}
	n.ok(err)
	over := false
	for _, label := range needed {
		c := l.streams[label]
		if c != nil && c.origin != n.requests[r].stream(label).origin { // it has forgotten where it came from
			s := offer(label)
			if c.origin == from && (c.landed >= s.Start || c.landed != len(c.tags)) || s.State != Resident {
				n.t.Fatalf("%q started over for nothing", label)
			}
			n.w.seen["started over"]++
			if c.origin == from {
				n.w.seen["started over a gap"]++
			}
			over = true
			*c = content{keep: l.keep[label], offered: -1}
		}
	}
	n.ending = append(n.ending, out.Unseal...)
	if over && l.published != 0 {
		n.same("unseal", out.Unseal, []PublicationID{l.published})
		n.w.seen["started over what was published"]++
		l.unpublish()
	} else {
		n.same("unseal", out.Unseal, []PublicationID(nil))
	}
	if !n.requests[r].ended {
		l.ended = false
	}
	if out.Readiness == Ready {
		n.ready(l, a, needed, minTokens)
	}
	if out.Start == nil {
		return
	}
	run := &read{Retrieval: out.Start, from: a, life: l}
	for _, m := range out.Start.Moves {
		for t := m.From; t < m.To; t++ {
			run.copies = append(run.copies, copying{
				label: m.Label, token: t,
				src: at(m.Remote[(t-m.RemoteStart)/pairSize], int32(t%pairSize)),
				to:  at(m.Local[(t-m.LocalStart)/pairSize], int32(t%pairSize)),
			})
		}
	}
	var to []page.Slot
	for _, c := range run.copies {
		to = append(to, c.to)
	}
	n.handedOut(to, nil)
	l.reading = true
	n.reads = append(n.reads, run)
}

func (l *life) follows(p id.Publication) bool {
	for _, c := range l.streams {
		if c.origin.name == p && c.landed == len(c.tags) {
			return true
		}
	}
	return false
}

// ready claims that what is needed is there.
func (n *node) ready(l *life, a *announced, needed []id.Label, minTokens int) {
	n.t.Helper()
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
	if r := n.reading(); r != nil {
		n.finish(r)
	}
}

func (n *node) finish(r *read) {
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
		if r.from.kept() {
			n.w.seen["landed from what is kept"]++
		}
		for _, m := range r.Moves {
			c := r.life.streams[m.Label]
			if c == nil {
				c = r.life.add(m.Label)
			}
			if c.computed && m.From > 0 && c.origin == (origin{}) {
				n.w.seen["landed on what was computed"]++
			}
			for t := len(c.tags); t < m.From; t++ { // what is between was released
				n.same("released at", t%pairSize+m.From%pairSize+len(c.tags)%pairSize, t%pairSize)
				if c.released == 0 {
					c.prefix = len(c.tags)
				}
				c.released++
			}
			if c.released > 0 {
				n.w.seen["landed without what was released"]++
			}
			c.tags = append(c.tags, r.from.tags[m.Label][len(c.tags):m.To]...)
			c.landed = m.To
			c.origin = origin{name: r.from.src.Name, epoch: r.from.src.Publication.ContentEpoch}
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
	if l := n.live[n.handle()]; l != nil && l.kept {
		p = l.published
	}
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
	n.unsealed(p)
}

func (n *node) unsealed(p PublicationID) {
	n.ending = slices.DeleteFunc(n.ending, func(o PublicationID) bool { return o == p })
	n.Unsealed(p)
	n.Unsealed(p)
	for r, l := range n.live {
		if l.published != p {
			continue
		}
		l.unpublish()
		l.ended = true
		if l.kept {
			n.w.seen["kept to its end"]++
			if l.moving != nil {
				n.w.seen["kept to its end while moved"]++
				l.moving.lost = true
			}
			delete(n.live, r)
		}
	}
}

// forget1 is the end of what is kept, at once.
func (n *node) forget1() {
	l := n.live[n.handle()]
	if l == nil || !l.kept || l.published == 0 {
		return
	}
	n.words[l.published] = false
	n.unsealed(l.published)
}

// outlives says that a step may still copy from one that is kept.
func (n *node) outlives(l *life) bool { return l.kept && !n.touches(l, nil, true) }

// rest1 is a request that is published as final, goes to the host in whole or in
// part, and is removed with whatever is at it then.
func (n *node) rest1() {
	r := n.request()
	l := n.live[r]
	if l == nil || l.ended {
		return
	}
	if !l.final {
		n.publish(r, l, true)
	}
	if l.moving == nil {
		n.offload(r)
	}
	if w := l.moving; w != nil && n.coin("moved") {
		n.copyHost(w, true)
		if w.reload {
			n.abandon1(w)
		} else {
			n.offloaded1(w)
		}
		if l.published == 0 && !l.ended {
			n.publish(r, l, true)
		}
	}
	switch n.number("then", 0, 4) {
	case 0:
		for _, a := range slices.Backward(n.w.board[max(0, len(n.w.board)-40):]) {
			if a.owner != n && a.owner.words[a.src.Publication.ID] && a.src.Publication.Request == r {
				n.retrieveFrom(r, a, 0)
				break
			}
		}
	case 1:
		label := pairLabels[n.number("label", 0, 1)]
		n.enter(Step{Segments: []Segment{{r, label, 1}}, PreForks: []Fork{{label, "x"}}, Lane: 1, Walk: "w"})
	case 2:
		n.reload(r)
	case 3:
		return
	}
	n.removeOne(r, false)
}

func (n *node) offload1() { n.offload(n.handle()) }
func (n *node) reload1()  { n.reload(n.handle()) }

func (n *node) offload(r id.Request) {
	l := n.live[r]
	var refusal error
	switch {
	case l == nil:
		refusal = ErrUnknownRequest
	case l.moving != nil:
		refusal = ErrOffloading
	case l.reading:
		refusal = ErrReading
	case !n.outlives(l) && n.touches(l, nil, false):
		refusal = ErrStepInFlight
	}
	victim := slices.ContainsFunc(n.Victims(), func(v Victim) bool { return v.Request == r })
	w, err := n.Offload(r)
	if refusal != nil {
		n.fails(err, refusal)
		n.same("victim", victim, false)
		return
	}
	left := n.Counts().HostFree
	for label, c := range l.streams {
		moves := slices.ContainsFunc(w.Streams, func(s HostStream) bool { return s.Label == label })
		may := c.state == Resident && len(c.held()) > 0
		if fits := page.Count(len(c.held()), pairSize) <= left; moves && !may || may && !moves && fits {
			n.t.Fatalf("label %q moves: %v", label, moves)
		}
		if may && !moves {
			n.w.seen["host is full"]++
		}
	}
	if len(w.Streams) == 0 {
		n.same("move", w.ID, MoveID(0))
		if err != nil {
			n.fails(err, ErrHostFull)
		}
		return
	}
	n.ok(err)
	n.same("victim", victim, true)
	n.move(l, w, false)
}

func (n *node) reload(r id.Request) {
	l := n.live[r]
	w, err := n.Reload(r)
	switch {
	case l == nil:
		n.fails(err, ErrUnknownRequest)
	case l.moving != nil:
		n.fails(err, ErrOffloading)
	case l.reading:
		n.fails(err, ErrReading)
	case !n.outlives(l) && n.touches(l, nil, false):
		n.fails(err, ErrStepInFlight)
	case errors.Is(err, ErrNoPages):
		n.w.seen["no pages"]++
	default:
		n.ok(err)
		for label, c := range l.streams {
			n.same("moves", slices.ContainsFunc(w.Streams, func(s HostStream) bool { return s.Label == label }), c.state == OnHost)
		}
		if w.ID != 0 {
			n.move(l, w, true)
		}
	}
}

// move begins one: nobody else has its pages.
func (n *node) move(l *life, w HostMove, reload bool) {
	run := &moving{HostMove: w, reload: reload, life: l}
	for _, s := range w.Streams {
		c := l.streams[s.Label]
		if c.state = Offloading; reload {
			c.state = Reloading
		}
		n.same("tokens", s.Tokens, len(c.held()))
		for i := range s.Tokens {
			run.copies = append(run.copies, hostCopy{
				device: at(s.Device[i/pairSize], int32(i%pairSize)), host: at(s.Host[i/pairSize], int32(i%pairSize)),
			})
		}
	}
	for _, c := range run.copies {
		if reload {
			n.handedOut([]page.Slot{c.device}, nil)
		}
		for _, o := range n.moves {
			if slices.ContainsFunc(o.copies, func(o hostCopy) bool { return o.host.Page == c.host.Page }) {
				n.t.Fatalf("host page %d is in two moves", c.host.Page)
			}
		}
	}
	l.moving = run
	n.moves = append(n.moves, run)
	n.same("moving", n.Moving(w.ID), n.key(l))
}

func (n *node) copyHost(w *moving, all bool) {
	for i := range w.copies {
		c := &w.copies[i]
		if c.done || !all && !n.coin("copy") {
			continue
		}
		if w.lost {
			n.w.seen["late copy of a move"]++
		}
		if w.reload {
			n.put(c.device, n.host[c.host.Page][c.host.Slot])
		} else {
			n.host[c.host.Page][c.host.Slot] = n.memory[c.device.Page][c.device.Slot]
		}
		c.done = true
	}
}

func (n *node) anyMove() *moving {
	if len(n.moves) == 0 {
		return nil
	}
	return n.moves[n.number("move", 0, len(n.moves)-1)]
}

func (n *node) copyMove1() {
	if w := n.anyMove(); w != nil {
		n.copyHost(w, false)
	}
}

func (n *node) endMove1() {
	w := n.anyMove()
	switch {
	case w == nil:
	case n.number("abandon", 0, 4) == 0:
		n.abandon1(w)
	case !w.reload:
		n.copyHost(w, !w.lost)
		n.offloaded1(w)
	default:
		n.copyHost(w, !w.lost)
		if err := n.Reloaded(w.ID); w.lost {
			n.fails(err, ErrUnknownMove)
			n.abandon1(w)
		} else {
			n.ok(err)
			n.w.seen["reloaded"]++
			n.settle(w, Resident)
			if w.life.kept {
				n.w.seen["reloaded what is kept"]++
			}
			n.republish(n.key(w.life))
		}
	}
}

func (n *node) abandon1(w *moving) {
	n.ok(n.Abandon(w.ID))
	n.fails(n.Abandon(w.ID), ErrUnknownMove)
	if w.reload {
		n.w.seen["reload abandoned"]++
		n.settle(w, OnHost)
	} else {
		n.w.seen["offload abandoned"]++
		n.settle(w, Resident)
	}
}

func (n *node) offloaded1(w *moving) {
	l := w.life
	named := false
	for _, c := range w.copies {
		named = named || l.published != 0 && n.names[l.published][c.device] && !w.lost
	}
	moving := n.Moving(w.ID)
	out, err := n.Offloaded(w.ID)
	n.ok(err)
	n.same("moving", n.Moving(w.ID), id.Request(""))
	if w.lost {
		n.same("moving", moving, id.Request(""))
		n.same("offloaded", out, Offloaded{})
		n.settle(w, OnHost)
		return
	}
	n.w.seen["offloaded"]++
	if named {
		n.w.seen["offloaded what was published"]++
		n.same("unseal", out.Unseal, []PublicationID{l.published})
		n.ending = append(n.ending, out.Unseal...)
		l.unpublish()
	} else if len(out.Unseal) > 0 { // it was not announced any more
		n.same("unseal", out.Unseal, []PublicationID{l.published})
		n.same("ending", slices.Contains(n.ending, l.published), true)
		l.unpublish()
	}
	n.settle(w, OnHost)
	if !l.kept {
		return
	}
	n.w.seen["offloaded what is kept"]++
	if l.published == 0 { // nobody else will
		r := n.key(l)
		n.same("moving", moving, r)
		if n.number("give it up", 0, 3) == 0 {
			n.removeOne(r, false)
			return
		}
		p, err := n.Publish(r, false)
		n.ok(err)
		n.same("final", p.Final, true)
		l.published, l.final = p.ID, true
		l.offer()
		n.announce(r, l, p)
	}
}

// settle ends a move in the model.
func (n *node) settle(w *moving, state State) {
	n.moves = slices.DeleteFunc(n.moves, func(o *moving) bool { return o == w })
	if w.lost {
		return
	}
	w.life.moving = nil
	for _, s := range w.Streams {
		c := w.life.streams[s.Label]
		c.state = state
		if c.released > 0 && state == OnHost {
			n.w.seen["offloaded what was trimmed"]++
		}
	}
}

// check compares memory and managers with what must be.
func (w *world) check() {
	w.Helper()
	for _, n := range w.nodes {
		n.same("requests", len(n.requests)+len(n.kept), len(n.live))
		for r, l := range n.live {
			n.same("kept", n.kept[r] != nil, l.kept)
			n.same("labels", len(n.byHandle(r).streams), len(l.streams))
			for label, c := range l.streams {
				n.compare(r, label, c)
			}
		}
		for p, set := range n.words {
			for s := range n.names[p] {
				if set && n.arena.pages[s.Page].place == free {
					w.Fatalf("%s: page %d is free while the word of publication %d is set", n.life, s.Page, p)
				}
			}
		}
		busy := func(s page.Slot, what string) {
			if n.arena.pages[s.Page].place == free {
				w.Fatalf("%s: page %d is free while %s", n.life, s.Page, what)
			}
		}
		for _, r := range n.reads {
			for _, c := range r.copies {
				busy(c.to, "a retrieval may write it")
			}
		}
		for _, r := range n.steps {
			for _, c := range r.copies {
				busy(c.src, "a fork may read it")
				busy(c.to, "a fork may write it")
			}
		}
		for _, m := range n.moves {
			for _, c := range m.copies {
				busy(c.device, "a move is at it")
				if n.bed.host.queue.has(c.host.Page) {
					w.Fatalf("%s: host page %d is free while a move is at it", n.life, c.host.Page)
				}
			}
		}
	}
}

// compare claims that a stream is what the model says, token by token.
func (n *node) compare(r id.Request, label id.Label, c *content) {
	got := n.state(r, label)
	want := StreamState{
		Label: label, State: c.state, Tokens: len(c.tags), Released: c.released, Prefix: c.prefix, Position: c.position,
		Pages: got.Pages, HostPages: got.HostPages, Generation: got.Generation,
	}
	n.same("stream", got, want)
	s := n.byHandle(r).stream(label)
	for i, t := range c.held() {
		var tag uint64
		if c.state == OnHost || c.state == Reloading {
			tag = n.host[s.host[i/pairSize]][i%pairSize]
		} else {
			tag = n.memory[s.pages[i/pairSize]][i%pairSize]
		}
		if tag != c.tags[t] {
			n.t.Fatalf("%s: %q label %q token %d, %v, is %d, want %d", n.life, r, label, t, c.state, tag, c.tags[t])
		}
	}
}

// wind ends everything.
func (n *node) wind() {
	for lane, run := range n.staged {
		if run != nil {
			n.Unstage(Lane(lane))
			n.dropped(Lane(lane))
		}
	}
	for _, run := range slices.Clone(n.steps) {
		n.ok(n.Abort(run.token))
		n.end(run)
		n.uncreate(run)
	}
	for _, r := range slices.Clone(n.reads) {
		n.ok(n.Cancel(r.ID))
		r.givenUp = true
		n.over(r)
	}
	for _, w := range slices.Clone(n.moves) {
		n.abandon1(w)
	}
	for r := range n.live {
		n.remove(r, true)
		delete(n.live, r)
	}
	for p := range n.words {
		n.words[p] = false
		n.Unsealed(p)
	}
	n.ending = nil
}
