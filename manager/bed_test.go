package manager

import (
	"errors"
	"reflect"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// tb is what testing.TB and rapid.T have in common.
type tb interface {
	Helper()
	Fatalf(format string, args ...any)
}

// bed is a manager that checks itself after every call.
type bed struct {
	*Manager
	t tb
}

func geometry(pages, size int) page.Geometry {
	return page.Geometry{Model: "m", Revision: "r", WorldSize: 1, Layout: page.Layout{
		Order: page.NHD, DType: page.BF16, Layers: 2, Pages: pages, PageSize: size, Heads: 2, HeadDim: 4,
	}}
}

func newBed(t tb, pages, size int, change ...func(*Options)) bed {
	t.Helper()
	o := Options{Life: id.Life{Node: "local", Incarnation: 7}, Geometry: geometry(pages, size), Check: true}
	for _, c := range change {
		c(&o)
	}
	m, err := New(o)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	return bed{m, t}
}

func (b bed) ingest(rs ...id.Request) {
	b.t.Helper()
	for _, r := range rs {
		b.ok(b.Ingest(r, RequestConfig{}))
	}
}

func (b bed) ok(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatalf("unexpected: %v", err)
	}
}

func (b bed) fails(err, want error) {
	b.t.Helper()
	if !errors.Is(err, want) {
		b.t.Fatalf("error is %v, want %v", err, want)
	}
}

func (b bed) admit(s ...Segment) Token {
	b.t.Helper()
	t, err := b.Admit(Step{Segments: s})
	b.ok(err)
	return t
}

// grow is admit, plan, commit of one segment.
func (b bed) grow(r id.Request, l id.Label, span int) Plan {
	b.t.Helper()
	t := b.admit(Segment{r, l, span})
	p := b.plan(t)
	b.commit(t)
	return p
}

// plan is for steps of one plan label.
func (b bed) plan(t Token) Plan {
	b.t.Helper()
	p := b.plans(t).Plans
	if len(p) != 1 {
		b.t.Fatalf("%d plans, want 1", len(p))
	}
	return p[0]
}

func (b bed) plans(t Token) Plans {
	b.t.Helper()
	var p Plans
	b.ok(b.Plan(t, &p))
	return p
}

func (b bed) step(s Step) Token {
	b.t.Helper()
	t, err := b.Admit(s)
	b.ok(err)
	return t
}

func (b bed) stage(s Step) Token {
	b.t.Helper()
	t, err := b.Stage(s)
	b.ok(err)
	return t
}

// posts returns the copies of the forks after the segments.
func (b bed) posts(t Token) []Copy {
	b.t.Helper()
	c, err := b.PostForks(t)
	b.ok(err)
	return c
}

// away takes a request to the host; wanted is how many pages leave the device.
func (b bed) away(r id.Request, freed int) HostMove {
	b.t.Helper()
	w, err := b.Offload(r)
	b.ok(err)
	out, err := b.Offloaded(w.ID)
	b.ok(err)
	b.same("freed", w.Freed+out.Freed, freed)
	b.same("unseal", out.Unseal, []PublicationID(nil))
	return w
}

func (b bed) back(r id.Request) HostMove {
	b.t.Helper()
	w, err := b.Reload(r)
	b.ok(err)
	b.ok(b.Reloaded(w.ID))
	return w
}

// offloading expects a refusal that names the stream.
func (b bed) offloading(err error, r id.Request, l id.Label) {
	b.t.Helper()
	b.fails(err, ErrOffloading)
	e, ok := errors.AsType[*OffloadingError](err)
	if !ok {
		b.t.Fatalf("%v names no stream", err)
	}
	b.same("refused", *e, OffloadingError{r, l})
}

func (b bed) commit(t Token, missing ...id.Request) {
	b.t.Helper()
	got, err := b.Commit(t)
	b.ok(err)
	b.same("missing", got.Missing, missing)
	b.same("unseal", got.Unseal, []PublicationID(nil))
}

// state looks a stream up.
func (b bed) state(r id.Request, l id.Label) StreamState {
	b.t.Helper()
	s, err := b.Request(r)
	b.ok(err)
	for _, t := range s.Streams {
		if t.Label == l {
			return t
		}
	}
	b.t.Fatalf("%q has no label %q", r, l)
	return StreamState{}
}

func (b bed) remove(r id.Request, discard bool) Removed {
	b.t.Helper()
	out, err := b.Remove(r, discard)
	b.ok(err)
	return out
}

func (b bed) reset(r id.Request, free bool) Removed {
	b.t.Helper()
	out, err := b.Reset(r, free)
	b.ok(err)
	return out
}

func (b bed) publish(r id.Request, final bool) Publication {
	b.t.Helper()
	p, err := b.Publish(r, final)
	b.ok(err)
	return p
}

// retrieve expects a readiness, and a retrieval if it is Reading.
func (b bed) retrieve(r id.Request, src *Source, minTokens int, want Readiness) *Retrieval {
	b.t.Helper()
	out, err := b.AdmitRetrieve(r, At{}, src, minTokens)
	b.ok(err)
	if out.Readiness != want || (out.Start != nil) != (want == Reading) {
		b.t.Fatalf("outcome %v start %+v, want %v", out.Readiness, out.Start, want)
	}
	return out.Start
}

// refused expects an error that changes nothing.
func (b bed) refused(r id.Request, src *Source, want error) error {
	b.t.Helper()
	before := b.Counts()
	out, err := b.AdmitRetrieve(r, At{}, src, 0)
	b.fails(err, want)
	b.same("outcome", []Outcome{out}, []Outcome{{}})
	b.same("counts", b.Counts(), before)
	return err
}

func (b bed) stored(r id.Request, l id.Label, want int) {
	b.t.Helper()
	n, err := b.Stored(r, l)
	b.ok(err)
	b.same("stored", n, want)
}

func (b bed) free(want int) {
	b.t.Helper()
	b.same("free", b.Counts().Free, want)
}

// pages expects the whole list of a stream, reserve included.
func (b bed) pages(r id.Request, l id.Label, want ...page.Index) {
	b.t.Helper()
	b.same("pages", slices.Clone(b.requests[r].stream(l).pages), want)
}

func (b bed) generation(r id.Request, l id.Label, want uint64) {
	b.t.Helper()
	b.same("generation", b.requests[r].stream(l).mutation, want)
}

func (b bed) inFlight(r id.Request, want bool) {
	b.t.Helper()
	b.same("in flight", b.requests[r].state().InFlight, want)
}

// freeList is the free pages in the order in which they will be taken.
func (b bed) freeList(want ...page.Index) {
	b.t.Helper()
	b.same("free list", slices.Collect(b.arena.queue.all()), want)
}

func (b bed) same(what string, got, want any) {
	b.t.Helper()
	if !equal(got, want) {
		b.t.Fatalf("%s: %+v, want %+v", what, got, want)
	}
}

func slots(s ...page.Slot) []page.Slot { return s }

func at(p page.Index, slot int32) page.Slot { return page.Slot{Page: p, Slot: slot} }

// peer is a publication of another node with one rank and an arena as large as
// need be.
func peer(final bool, streams ...Stream) *Source {
	for i := range streams {
		if streams[i].Ranks == nil {
			streams[i].Ranks = []id.Rank{0}
		}
	}
	return &Source{
		Name:        id.Publication{Owner: id.Life{Node: "peer", Incarnation: 3}, Sequence: 11},
		Geometry:    geometry(4096, 8),
		Publication: Publication{Request: "r", Final: final, Streams: streams},
	}
}

// remote is a stream with pages from first on, as many as it needs.
func remote(l id.Label, tokens int, first page.Index) Stream {
	return Stream{Label: l, Tokens: tokens, Pages: upFrom(first, page.Count(tokens, 8))}
}

func upFrom(first page.Index, n int) []page.Index {
	pages := make([]page.Index, n)
	for i := range pages {
		pages[i] = first + page.Index(i)
	}
	return pages
}

// equal is DeepEqual for which no elements are no elements, nil or not.
func equal(a, b any) bool {
	if v, w := reflect.ValueOf(a), reflect.ValueOf(b); v.Kind() == reflect.Slice && w.Kind() == reflect.Slice && v.Len() == 0 && w.Len() == 0 {
		return true
	}
	return reflect.DeepEqual(a, b)
}
