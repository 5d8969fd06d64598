package manager

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func choosing(o *Options) { o.Engine = true }

func grant(r id.Request, l id.Label, pages ...page.Index) Grant {
	return Grant{Request: r, Label: l, Pages: pages}
}

// receiver is a stream of a request.
type receiver struct {
	request id.Request
	label   id.Label
}

// given is what the streams were given and have not used.
func (b bed) given() map[receiver][]page.Index {
	all := make(map[receiver][]page.Index)
	for r, req := range b.requests {
		for _, p := range req.purses {
			if len(p.pages) > 0 {
				all[receiver{r, p.label}] = slices.Clone(p.pages)
			}
		}
	}
	return all
}

// returns expects the pages that have come back since the last look, in any order.
func (b bed) returns(want ...page.Index) {
	b.t.Helper()
	got := b.Returned()
	slices.Sort(got)
	b.same("returned", got, want)
	b.same("returned again", b.Returned(), []page.Index(nil))
}

func TestGivenPagesAreUsedInOrder(t *testing.T) {
	b := newBed(t, 16, 8, choosing)
	b.ingest("r")
	b.same("engine", b.Engine(), []page.Run{{First: 1, Count: 15}})
	b.ok(b.Give(grant("r", "main", 9, 3, 12)))
	b.same("counts", b.Counts(), Counts{Engine: 12, Owned: 3, Sink: 1, Requests: 1})
	b.same("slots", b.grow("r", "main", 10).Slots[7:9], slots(at(9, 7), at(3, 0)))
	b.pages("r", "main", 9, 3)
	b.grow("r", "main", 14)
	b.pages("r", "main", 9, 3, 12)
	_, err := b.Admit(Step{Segments: []Segment{{"r", "main", 9}}})
	short, ok := errors.AsType[*AllocationError](err)
	if !ok || *short != (AllocationError{Request: "r", Label: "main", Short: 2}) {
		t.Fatalf("%v", err)
	}
	b.ok(b.Give(grant("r", "main", 15), grant("r", "main", 1)))
	b.grow("r", "main", 9)
	b.pages("r", "main", 9, 3, 12, 15, 1)
	b.returns()
	b.remove("r", false)
	b.returns(1, 3, 9, 12, 15)
	b.same("counts", b.Counts(), Counts{Engine: 15, Sink: 1})
}

func TestGiveRefuses(t *testing.T) {
	b := newBed(t, 16, 8, choosing, func(o *Options) { o.Labels = 2 })
	b.ingest("r", "gone")
	b.ok(b.Give(grant("r", "main", 1, 2), grant("gone", "main", 7)))
	b.remove("gone", false)
	before := b.Counts()
	for name, c := range map[string]struct {
		grants []Grant
		want   error
		page   page.Index
	}{
		"the sink":           {[]Grant{grant("r", "main", 3, 0)}, ErrPage, 0},
		"out of range":       {[]Grant{grant("r", "main", 3, 16)}, ErrPage, 16},
		"far out of range":   {[]Grant{grant("r", "main", math.MaxUint32)}, ErrPage, math.MaxUint32},
		"given already":      {[]Grant{grant("r", "main", 3), grant("r", "cfg", 4, 2)}, ErrPage, 2},
		"twice in a grant":   {[]Grant{grant("r", "main", 3, 4, 3)}, ErrPage, 3},
		"twice in two":       {[]Grant{grant("r", "main", 3), grant("r", "cfg", 3)}, ErrPage, 3},
		"not told yet":       {[]Grant{grant("r", "main", 3, 7)}, ErrPage, 7},
		"unknown request":    {[]Grant{grant("r", "main", 3), grant("x", "main", 4)}, ErrUnknownRequest, 0},
		"bad label":          {[]Grant{grant("r", "main", 3), grant("r", "", 4)}, ErrInvalid, 0},
		"empty ones before":  {[]Grant{grant("r", "cfg", 5), grant("r", "cfg"), grant("r", "cfg", 6), grant("r", "cfg"), grant("r", "main", 99)}, ErrPage, 99},
		"empty and unknown":  {[]Grant{grant("r", "main", 3), grant("x", "main")}, ErrUnknownRequest, 0},
		"empty, bad label":   {[]Grant{grant("r", "main", 3), grant("r", "")}, ErrInvalid, 0},
		"more labels than 2": {[]Grant{grant("r", "main", 3), grant("r", "a", 4), grant("r", "b", 5)}, ErrFull, 0},
	} {
		err := b.Give(c.grants...)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", name, err, c.want)
		}
		if bad, ok := errors.AsType[*PageError](err); ok && bad.Page != c.page {
			t.Errorf("%s: %v, want page %d", name, err, c.page)
		}
		b.same(name, b.Counts(), before)
		b.same(name, b.given(), map[receiver][]page.Index{{"r", "main"}: {1, 2}})
	}
	b.ok(b.Give(grant("r", "a"), grant("r", "b"), grant("r", "c"))) // none of them has a label for it
	b.returns(7)
	b.ok(b.Give(grant("r", "main", 7, 3)))
	b.grow("r", "main", 32)
	b.pages("r", "main", 1, 2, 7, 3)

	node := newBed(t, 16, 8)
	node.ingest("r")
	node.fails(node.Give(grant("r", "main", 1)), ErrInvalid)
	if _, err := New(Options{Geometry: geometry(16, 8), Engine: true, Host: 1}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a host tier where the engine chooses: %v", err)
	}
}

// What is published is not told before its word has been changed, and then once.
func TestPublishedPagesComeBackAfterUnsealed(t *testing.T) {
	b := newBed(t, 16, 8, choosing)
	b.ingest("r")
	b.ok(b.Give(grant("r", "main", 5, 6, 7)))
	b.grow("r", "main", 16)
	p := b.publish("r", true)
	out := b.remove("r", false)
	b.same("lives", out.Lives, []PublicationID{p.ID})
	b.returns(7) // which it had not used
	b.same("limbo", b.Counts().Limbo, 2)
	b.ingest("r")
	b.fails(b.Give(grant("r", "main", 5)), ErrPage)
	b.Unsealed(p.ID)
	b.fails(b.Give(grant("r", "main", 5)), ErrPage)
	b.returns(5, 6)
	b.Unsealed(p.ID)
	b.returns()
	b.ok(b.Give(grant("r", "main", 5)))
}

func TestForksUseWhatTheirTargetWasGiven(t *testing.T) {
	b := newBed(t, 16, 8, choosing)
	b.ingest("r")
	b.ok(b.Give(grant("r", "main", 1, 2), grant("r", "cfg", 3, 4, 5)))
	b.grow("r", "main", 12)
	tok := b.step(Step{Segments: []Segment{{"r", "cfg", 5}}, PreForks: []Fork{{"main", "cfg"}}})
	b.same("copies", b.plans(tok).Copies, []Copy{{Request: "r", From: "main", To: "cfg", Source: []page.Index{1, 2}, Target: []page.Index{3, 4}, Tokens: 12}})
	b.commit(tok)
	b.pages("r", "cfg", 3, 4, 5)
	b.returns()
	// What comes to nothing leaves to the stream what it was given.
	b.ok(b.Give(grant("r", "more", 9, 8, 7)))
	for range 2 {
		tok = b.step(Step{Segments: []Segment{{"r", "main", 0}}, PostForks: []Fork{{"main", "more"}}})
		b.same("copies", b.posts(tok)[0].Target, []page.Index{9, 8})
		b.ok(b.Abort(tok))
		b.stage(Step{Segments: []Segment{{"r", "more", 3}}})
		b.Unstage(0)
		b.returns()
	}
	// A fork that replaces the tokens of its target gives their pages back.
	b.ok(b.Give(grant("r", "cfg", 15, 14)))
	tok = b.step(Step{Segments: []Segment{{"r", "main", 0}}, PostForks: []Fork{{"main", "cfg"}}})
	b.commit(tok)
	b.pages("r", "cfg", 15, 14)
	b.returns(3, 4, 5)
}

func TestRetrievesUseWhatWasGiven(t *testing.T) {
	b := newBed(t, 32, 8, choosing)
	b.ingest("r")
	src := peer(false, remote("main", 20, 11))
	short, ok := errors.AsType[*AllocationError](b.refused("r", src, ErrNoPages))
	if !ok || short.Short != 3 {
		t.Fatalf("%v", short)
	}
	b.ok(b.Give(grant("r", "main", 31, 4, 30, 2)))
	t1 := b.retrieve("r", src, 0, Reading)
	b.same("local", t1.Moves[0].Local, []page.Index{31, 4, 30})
	b.ok(b.Landed(t1.ID))
	// A read that fails leaves what it was given to the next.
	grown := peer(false, remote("main", 40, 11))
	b.ok(b.Give(grant("r", "main", 20)))
	for range 2 {
		t2 := b.retrieve("r", grown, 0, Reading)
		b.same("local", t2.Moves[0].Local, []page.Index{30, 2, 20})
		b.ok(b.Cancel(t2.ID))
		b.ok(b.Failed(t2.ID))
		b.returns()
	}
	// It grows, and is given up while it may still be written.
	t2 := b.retrieve("r", grown, 0, Reading)
	b.same("local", t2.Moves[0].Local, []page.Index{30, 2, 20})
	b.remove("r", false)
	b.returns(4, 31)
	b.ok(b.Failed(t2.ID))
	b.returns(2, 20, 30)
}

func TestRetentionGivesPagesBack(t *testing.T) {
	b := newBed(t, 16, 8, choosing)
	b.ok(b.Ingest("r", RequestConfig{Retention: map[id.Label]Retention{"main": {Budget: 16}}}))
	b.ok(b.Give(grant("r", "main", 1, 2, 3, 4)))
	b.grow("r", "main", 16)
	p := b.publish("r", false)
	b.grow("r", "main", 16)
	b.returns() // published
	b.Unsealed(p.ID)
	b.returns(1, 2)
}

func TestResetKeepsOrReturns(t *testing.T) {
	b := newBed(t, 16, 8, choosing)
	b.ingest("r")
	b.ok(b.Give(grant("r", "main", 1, 2, 3)))
	b.grow("r", "main", 9)
	b.reset("r", false)
	b.returns()
	b.grow("r", "main", 24)
	b.pages("r", "main", 1, 2, 3)
	b.reset("r", true)
	b.returns(1, 2, 3)
}

func TestReturnsWakes(t *testing.T) {
	b := newBed(t, 16, 8, choosing)
	b.ingest("r")
	b.ok(b.Give(grant("r", "main", 1)))
	select {
	case <-b.Returns():
		t.Error("nothing has come back")
	default:
	}
	b.remove("r", false)
	<-b.Returns()
	b.same("engine", b.Engine(), []page.Run{{First: 1, Count: 15}})
	b.returns() // that has told it
}

// TestChosenPagesHaveOnePlace: whatever is done in whatever order, a page is in
// one place, is the engine's or was given, comes back once, and not while a live
// publication names it or a step, a read, or a stream may use it.
func TestChosenPagesHaveOnePlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &choice{bed: newBed(t, 24, 4, choosing), t: t, live: make(map[PublicationID][]page.Index)}
		for p := page.Index(1); p < 24; p++ {
			w.hand = append(w.hand, p)
		}
		w.ingest("a", "b")
		often := []func(*rapid.T){w.give, w.give, w.stepWhole, w.stepWhole, w.publishOne, w.publishOne, w.retrieveOne, w.endOne, w.commitOne, w.unsealOne}
		seldom := []func(*rapid.T){
			func(*rapid.T) { w.ingest(w.request()) },
			func(t *rapid.T) { w.admit(t, w.Admit) },
			func(t *rapid.T) { w.admit(t, w.Stage) },
			func(*rapid.T) { w.Unstage(0); w.forget() },
			w.abortOne, w.removeOne, w.resetOne,
		}
		for range rapid.IntRange(20, 120).Draw(t, "calls") {
			list := often
			if rapid.IntRange(0, 3).Draw(t, "seldom") == 0 {
				list = seldom
			}
			rapid.SampledFrom(list).Draw(t, "call")(t)
			w.look()
		}
		w.end()
	})
}

// choice is an engine that chooses pages, and what it knows.
type choice struct {
	bed

	t     *rapid.T
	hand  []page.Index // that it may use or give
	steps []Token
	reads []RetrievalID
	live  map[PublicationID][]page.Index
	round int
}

func (w *choice) request() id.Request {
	return rapid.SampledFrom([]id.Request{"a", "b"}).Draw(w.t, "request")
}

func (w *choice) label() id.Label {
	return rapid.SampledFrom([]id.Label{"main", "cfg"}).Draw(w.t, "label")
}

// give gives what it has, in some grants, of which some are empty, or of the same
// stream. Some of them are wrong somewhere: that gives nothing.
func (w *choice) give(t *rapid.T) {
	hand := w.hand
	if len(hand) > 0 {
		hand = rapid.Permutation(hand).Draw(t, "hand")
	}
	grants := make([]Grant, rapid.IntRange(1, 4).Draw(t, "grants"))
	rest := hand
	for i := range grants {
		n := rapid.IntRange(0, min(4, len(rest))).Draw(t, "pages")
		grants[i] = grant(w.request(), w.label(), slices.Clone(rest[:n])...)
		rest = rest[n:]
	}
	g := &grants[rapid.IntRange(0, len(grants)-1).Draw(t, "at")]
	switch rapid.IntRange(0, 11).Draw(t, "wrong") {
	case 0: // what it does not have
		p := page.Index(rapid.Uint32Range(0, 30).Draw(t, "page"))
		if slices.Contains(w.hand, p) {
			p = page.Sink
		}
		g.Pages = slices.Insert(g.Pages, rapid.IntRange(0, len(g.Pages)).Draw(t, "where"), p)
	case 1: // what it has given already
		all := slices.Concat(hand[:len(hand)-len(rest)], []page.Index{page.Sink})
		g.Pages = append(g.Pages, all[rapid.IntRange(0, len(all)-1).Draw(t, "again")])
	case 2:
		g.Request = "nobody"
	case 3:
		g.Label = ""
	}
	before, bad := w.given(), w.wrong(grants)
	switch err := w.Give(grants...); {
	case bad == nil && err == nil:
		w.hand = slices.Clone(rest)
		for _, g := range grants {
			if len(g.Pages) > 0 {
				s := receiver{g.Request, g.Label}
				before[s] = append(before[s], g.Pages...)
			}
		}
	case bad == nil || !errors.Is(err, bad):
		t.Fatalf("give %v: %v, want %v", grants, err, bad)
	}
	w.same("given", w.given(), before)
}

// wrong is what the first bad grant is refused for, nil if there is none.
func (w *choice) wrong(grants []Grant) error {
	have := slices.Clone(w.hand)
	for _, g := range grants {
		switch {
		case w.requests[g.Request] == nil:
			return ErrUnknownRequest
		case g.Label == "":
			return ErrInvalid
		}
		for _, p := range g.Pages {
			i := slices.Index(have, p)
			if i < 0 {
				return ErrPage
			}
			have = slices.Delete(have, i, i+1)
		}
	}
	return nil
}

func (w *choice) admit(t *rapid.T, do func(Step) (Token, error)) {
	s := Step{Discard: rapid.Bool().Draw(t, "discard"), Segments: []Segment{{w.request(), w.label(), rapid.IntRange(0, 9).Draw(t, "span")}}}
	if rapid.Bool().Draw(t, "fork") {
		s.PreForks = []Fork{{"main", "cfg"}}
	}
	if rapid.Bool().Draw(t, "post") {
		s.PostForks = []Fork{{"cfg", "main"}}
	}
	tok, err := do(s)
	if err == nil && !slices.Contains(w.steps, tok) {
		w.steps = append(w.steps, tok)
	}
	w.forget()
}

// stepWhole is a step from its beginning to its end.
func (w *choice) stepWhole(t *rapid.T) {
	if tok, err := w.Admit(Step{Segments: []Segment{{w.request(), w.label(), rapid.IntRange(1, 9).Draw(t, "span")}}}); err == nil {
		_, err := w.Commit(tok)
		w.ok(err)
	}
	w.forget()
}

// forget drops the steps that are no more.
func (w *choice) forget() {
	w.steps = slices.DeleteFunc(w.steps, func(t Token) bool { return w.bed.steps[t] == nil })
}

func (w *choice) some(n int) int {
	if n == 0 {
		return -1
	}
	return rapid.IntRange(0, n-1).Draw(w.t, "which")
}

func (w *choice) commitOne(*rapid.T) {
	if i := w.some(len(w.steps)); i >= 0 {
		out, err := w.Commit(w.steps[i])
		if err == nil {
			w.unseal(out.Unseal)
		}
		w.forget()
	}
}

func (w *choice) abortOne(*rapid.T) {
	if i := w.some(len(w.steps)); i >= 0 {
		w.ok(w.Abort(w.steps[i]))
		w.forget()
	}
}

func (w *choice) publishOne(t *rapid.T) {
	p, err := w.Publish(w.request(), rapid.Bool().Draw(t, "final"))
	if err != nil {
		return
	}
	for _, s := range p.Streams {
		w.live[p.ID] = append(w.live[p.ID], s.Pages...)
	}
}

// unseal ends publications after a look: until then nothing of them came back.
func (w *choice) unseal(ids []PublicationID) {
	w.look()
	for _, i := range ids {
		delete(w.live, i)
	}
	w.Unsealed(ids...)
}

func (w *choice) unsealOne(*rapid.T) {
	all := slices.Sorted(maps.Keys(w.live))
	if i := w.some(len(all)); i >= 0 {
		w.unseal(all[i : i+1])
	}
}

func (w *choice) removeOne(t *rapid.T) {
	out := w.remove(w.request(), rapid.Bool().Draw(t, "discard"))
	w.unseal(out.Unseal)
}

func (w *choice) resetOne(t *rapid.T) {
	out := w.reset(w.request(), rapid.Bool().Draw(t, "free"))
	w.unseal(out.Unseal)
}

func (w *choice) retrieveOne(t *rapid.T) {
	w.round++
	src := peer(rapid.Bool().Draw(t, "final"))
	src.Geometry = geometry(4096, 4)
	src.Name.Sequence = id.Sequence(rapid.IntRange(1, 2).Draw(t, "sequence"))
	tokens := rapid.IntRange(1, 30).Draw(t, "tokens")
	src.Publication.Streams = []Stream{{Label: "main", Ranks: []id.Rank{0}, Tokens: tokens, Pages: upFrom(11, page.Count(tokens, 4))}}
	out, err := w.AdmitRetrieve(w.request(), At{}, src, 0)
	if err != nil {
		return
	}
	w.unseal(out.Unseal)
	if out.Start != nil {
		w.reads = append(w.reads, out.Start.ID)
	}
}

func (w *choice) endOne(t *rapid.T) {
	i := w.some(len(w.reads))
	if i < 0 {
		return
	}
	r := w.reads[i]
	switch rapid.IntRange(0, 2).Draw(t, "how") {
	case 0:
		_ = w.Cancel(r)
		return
	case 1:
		if w.Landed(r) != nil {
			w.ok(w.Failed(r))
		}
	default:
		w.ok(w.Failed(r))
	}
	w.reads = slices.Delete(w.reads, i, i+1)
}

// look takes what has come back.
func (w *choice) look() {
	for _, p := range w.Returned() {
		switch {
		case slices.Contains(w.hand, p):
			w.t.Fatalf("page %d has come back twice", p)
		default:
			for i, pages := range w.live {
				if slices.Contains(pages, p) {
					w.t.Fatalf("page %d has come back, and publication %d names it", p, i)
				}
			}
		}
		w.hand = append(w.hand, p)
	}
	c := w.Counts()
	if len(w.hand) != c.Engine || c.Free != 0 || c.Engine+c.Owned+c.Limbo+c.Quarantine+c.Sink != 24 {
		w.t.Fatalf("the engine has %d pages, the manager says %+v", len(w.hand), c)
	}
}

// end ends everything: all pages come back.
func (w *choice) end() {
	w.Unstage(0)
	w.forget()
	for _, s := range w.steps {
		w.ok(w.Abort(s))
	}
	for _, r := range []id.Request{"a", "b"} {
		w.unseal(w.remove(r, true).Unseal)
	}
	for _, r := range w.reads {
		w.ok(w.Failed(r))
	}
	w.unseal(slices.Sorted(maps.Keys(w.live)))
	w.look()
	if len(w.hand) != 23 {
		w.t.Fatalf("%d pages have come back, of 23", len(w.hand))
	}
}

func ExampleManager_Give() {
	m, _ := New(Options{Life: id.Life{Node: "n", Incarnation: 1}, Geometry: geometry(16, 8), Engine: true})
	_ = m.Ingest("r", RequestConfig{})
	_ = m.Give(Grant{Request: "r", Label: id.Main, Pages: []page.Index{9, 3}})
	step, _ := m.Admit(Step{Segments: []Segment{{Request: "r", Label: id.Main, Span: 10}}})
	_, _ = m.Commit(step)
	_, _ = m.Remove("r", false)
	fmt.Println(m.Returned())
	// Output: [9 3]
}
