package manager

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func TestNew(t *testing.T) {
	for name, change := range map[string]func(*Options){
		"no geometry":           func(o *Options) { o.Geometry.Layout.Layers = 0 },
		"room for the sink":     func(o *Options) { o.Geometry.Layout.Pages = 1 },
		"rank beyond the world": func(o *Options) { o.Ranks = []id.Rank{0, 1} },
		"ranks descending":      func(o *Options) { o.Geometry.WorldSize = 4; o.Ranks = []id.Rank{2, 1} },
		"negative rank":         func(o *Options) { o.Ranks = []id.Rank{-1} },
		"negative bound":        func(o *Options) { o.Requests = -1 },
		"too many labels":       func(o *Options) { o.Labels = id.MaxLabels + 1 },
	} {
		o := Options{Geometry: geometry(8, 8)}
		change(&o)
		if m, err := New(o); !errors.Is(err, ErrInvalid) || m != nil {
			t.Errorf("%s: %v, %v", name, m, err)
		}
	}
}

func TestBounds(t *testing.T) {
	b := newBed(t, 32, 8, func(o *Options) { o.Requests, o.Labels, o.Steps = 2, 2, 2 })
	full := func(err error, table string, limit int) {
		t.Helper()
		var f *FullError
		if !errors.As(err, &f) || !errors.Is(err, ErrFull) {
			t.Fatalf("error is %v", err)
		}
		b.same("full", *f, FullError{table, limit})
	}
	b.ingest("a", "b")
	full(b.Ingest("c", RequestConfig{}), "live requests", 2)
	b.ingest("a")

	_, err := b.Admit(Step{Segments: []Segment{{"a", "x", 8}, {"a", "y", 8}}})
	full(err, "labels a request", 2)
	b.same("streams", len(b.requests["a"].streams), 1)
	b.free(31)

	b.remove("b", false)
	b.ok(b.Ingest("b", RequestConfig{Needs: Needs{Labels: []id.Label{"x", "y"}}}))
	before := b.Counts()
	_, err = b.AdmitRetrieve("b", At{}, peer(true, remote("x", 8, 11), remote("y", 8, 12)), 0)
	full(err, "labels a request", 2)
	b.same("counts", b.Counts(), before)

	one := b.admit(Segment{"a", "main", 1})
	b.admit(Segment{"a", "x", 1})
	_, err = b.Admit(Step{})
	full(err, "steps in flight", 2)
	b.commit(one)
	b.admit()

	b.remove("b", false)
	many := Needs{ByNode: map[id.GraphNode][]id.Label{}}
	for i := range maxNeeds + 1 {
		many.ByNode[id.GraphNode(fmt.Sprint(i))] = nil
	}
	full(b.Ingest("b", RequestConfig{Needs: many}), "needs by node", maxNeeds)
	full(b.Ingest("b", RequestConfig{Needs: Needs{Labels: []id.Label{"x", "y", "z"}}}), "labels a request", 2)
}

func TestBadNames(t *testing.T) {
	b := newBed(t, 8, 8)
	long := strings.Repeat("x", 300)
	for _, r := range []id.Request{"", id.Request(long), "\xff"} {
		b.fails(b.Ingest(r, RequestConfig{}), ErrInvalid)
	}
	for _, n := range []Needs{
		{Labels: []id.Label{""}},
		{ByNode: map[id.GraphNode][]id.Label{"n": {id.Label(long)}}},
		{ByWalk: map[At][]id.Label{{}: {"\xff"}}},
	} {
		b.fails(b.Ingest("r", RequestConfig{Needs: n}), ErrInvalid)
	}
	b.ingest("r")
	for _, g := range []Segment{{"r", "", 1}, {"r", id.Label(long), 1}, {"r", "main", -1}, {"r", "main", math.MaxInt}, {"r", "main", math.MaxInt32 + 1}} {
		_, err := b.Admit(Step{Segments: []Segment{{"r", "new", 1}, g}})
		b.fails(err, ErrInvalid)
	}
	_, err := b.Admit(Step{Segments: []Segment{{"r", "new", 1}, {"nosuch", "main", 1}}})
	b.fails(err, ErrUnknownRequest)
	b.same("counts", b.Counts(), Counts{Free: 7, Sink: 1, Requests: 1})
	b.same("streams", len(b.requests["r"].streams), 1)

	_, err = b.Stored("nosuch", "main")
	b.fails(err, ErrUnknownRequest)
	_, err = b.Stored("r", "nosuch")
	b.fails(err, ErrUnknownLabel)
	b.same("reset", b.reset("nosuch", true), Removed{})
	for _, err := range []error{b.Landed(1), b.Failed(1), b.Cancel(1)} {
		b.fails(err, ErrUnknownRetrieval)
	}
}

// Needs are the caller's again once Ingest has returned.
func TestIngestCopies(t *testing.T) {
	b := newBed(t, 8, 8)
	n := Needs{Labels: []id.Label{"x"}, ByNode: map[id.GraphNode][]id.Label{"n": {"y"}}}
	b.ok(b.Ingest("r", RequestConfig{Needs: n}))
	n.Labels[0], n.ByNode["n"][0] = "z", "z"
	needs := b.requests["r"].needs
	b.same("labels", needs.at(At{}), []id.Label{"x"})
	b.same("labels", needs.at(At{Node: "n"}), []id.Label{"y"})
}

// Published pages leave their stream by limbo, and are not written again.
func TestResetOfPublished(t *testing.T) {
	for _, all := range []bool{false, true} {
		b := newBed(t, 8, 8)
		b.ingest("r")
		tok := b.admit(Segment{"r", "main", 30}) // 1 2 3 4
		b.ok(b.Abort(tok))
		b.grow("r", "main", 12)
		p := b.publish("r", true)
		b.same("removed", b.reset("r", all), Removed{Unseal: []PublicationID{p.ID}})
		if all {
			b.pages("r", "main")
		} else {
			b.pages("r", "main", 3, 4)
		}
		b.same("limbo", b.Counts().Limbo, 2)
		b.grow("r", "main", 40)
		b.freeList()
		b.same("epoch", b.publish("r", false).ContentEpoch, p.ContentEpoch+1)
		b.Unsealed(p.ID)
		b.freeList(1, 2)
	}
}

// What the page of the last published token has room for is filled up.
func TestGrowInPublishedPage(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("r")
	b.grow("r", "main", 12)
	b.publish("r", false)
	b.same("slots", b.grow("r", "main", 2).Slots, slots(at(2, 4), at(2, 5)))
	tok, err := b.Admit(Step{Segments: []Segment{{"r", "main", 1}}, Discard: true})
	b.ok(err)
	b.same("slots", b.plan(tok).Slots, slots(at(2, 6)))
	b.same("pages", b.publish("r", false).Streams[0].Pages, []page.Index{1, 2})
	b.same("published", b.Counts().Published, 2)
}

// Steps know the request that they were admitted to, whatever its name.
func TestStaleSteps(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r", "s")
	for name, lose := range map[string]func(){
		"reset":  func() { b.reset("r", true) },
		"remove": func() { b.remove("r", false); b.ingest("r") },
	} {
		b.reset("s", true)
		tok := b.admit(Segment{"r", "main", 8}, Segment{"s", "main", 8})
		b.plan(tok)
		lose()
		b.grow("r", "main", 3)
		b.fails(b.Plan(tok, new(Plans)), ErrUnknownRequest)
		aborted := b.admit(Segment{"r", "main", 1})
		lose()
		b.ok(b.Abort(aborted))
		b.inFlight("r", false)
		b.commit(tok, "r")
		b.stored("r", "main", 0)
		b.stored("s", "main", 8)
		t.Log(name)
	}
}

// Of two steps at one length a request takes one, with all of its labels.
func TestOvertakenSteps(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r", "s")
	one := b.admit(Segment{"r", "main", 3}, Segment{"r", "cfg", 3}, Segment{"s", "main", 1})
	two := b.admit(Segment{"r", "cfg", 5})
	three, err := b.Admit(Step{Segments: []Segment{{"r", "cfg", 1}}, Discard: true})
	b.ok(err)
	look := b.admit(Segment{"r", "cfg", 0})
	b.commit(two)
	b.commit(one, "r")
	b.stored("r", "main", 0)
	b.stored("r", "cfg", 5)
	b.stored("s", "main", 1)
	_, err = b.Publish("r", false)
	b.fails(err, ErrStepInFlight)
	b.publish("s", false)
	b.commit(three)
	b.same("length", b.plan(look).Views[0].Length, 0)
	b.publish("r", false)
	b.commit(look)
}

func TestRequests(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("b", "a", "c")
	b.grow("a", "main", 9)
	b.grow("a", "cfg", 1)
	b.publish("a", true)
	b.admit(Segment{"b", "main", 1})
	b.retrieve("c", peer(true, remote("main", 8, 11)), 0, Reading)
	want := []RequestState{
		{Request: "a", Streams: []StreamState{{Label: "main", Tokens: 9, Pages: 2, Generation: 2}, {Label: "cfg", Tokens: 1, Pages: 1, Generation: 2}}, Published: 1, Final: true},
		{Request: "b", Streams: []StreamState{{Label: "main", Pages: 1, Generation: 1}}, InFlight: true},
		{Request: "c", Streams: []StreamState{{Label: "main"}}, Reading: true},
	}
	b.same("requests", b.Requests(0), want)
	b.same("requests", b.Requests(2), want[:2])
	b.same("requests", b.Requests(9), want)
	one, err := b.Request("b")
	b.ok(err)
	b.same("request", one, want[1])
	_, err = b.Request("nosuch")
	b.fails(err, ErrUnknownRequest)
}
