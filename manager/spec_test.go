package manager

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// TestSpec has the numbered cases of M*'s behaviour that requests, steps,
// publications and retrieves fall under. Every call is followed by a check of
// conservation.
func TestSpec(t *testing.T) {
	for _, c := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"001 the sink is nobody's", spec001},
		{"002 pages are handed out first freed first", spec002},
		{"003 first step", spec003},
		{"004 steps that fill a page and begin one", spec004},
		{"005 a step that can't fit", spec005},
		{"006 admitted twice", spec006},
		{"007 a refused step holds nothing", spec007},
		{"008 admitted again once it fits", spec008},
		{"009 the arena refuses what can't be", spec009},
		{"010 all or none", spec010},
		{"011 reserve after reset", spec011},
		{"012 discarded step", spec012},
		{"013 write addresses", spec013},
		{"014 zero span", spec014},
		{"015 zero span on an empty stream", spec015},
		{"016 zero span on a new label", spec016},
		{"017 combined labels", spec017},
		{"018 bad combined labels", spec018},
		{"019 decode slots are the last ones", spec019},
		{"020 a plan is staged for a captured graph", spec020},
		{"021 buffers only grow", spec021},
		{"022 two segments of one stream", spec022},
		{"023 commit after one request was removed", spec023},
		{"024 no commit to a claimed stream", spec024},
		{"025 fork before the segments", spec025},
		{"026 fork after the segments", spec026},
		{"027 fork of a label that the step makes", spec027},
		{"028 fork after a discarded step", spec028},
		{"029 a row that pads", spec029},
		{"030 a fork that can't fit", spec030},
		{"031 fork onto what has more pages", spec031},
		{"032 a fork moves the generation", spec032},
		{"033 fork and segment on its target", spec033},
		{"034 chain of forks", spec034},
		{"035 what a fork takes over", spec035},
		{"036 stage and drop", spec036},
		{"037 stage and promote", spec037},
		{"038 two staged", spec038},
		{"039 nothing staged", spec039},
		{"040 stage over what is there", spec040},
		{"041 another step than the staged one", spec041},
		{"042 abort", spec042},
		{"043 abort of one of two", spec043},
		{"044 to the host and back", spec044},
		{"045 position and released survive", spec045},
		{"046 two labels", spec046},
		{"047 no host", spec047},
		{"048 host with room for one label", spec048},
		{"049 host with room for none", spec049},
		{"050 no room on the device", spec050},
		{"051 removed on the host", spec051},
		{"052 admit during the copy", spec052},
		{"053 fork from a claimed stream", spec053},
		{"054 fork into a claimed stream", spec054},
		{"055 removed during the copy", spec055},
		{"056 a copy fails", spec056},
		{"057 others during the copy", spec057},
		{"058 step in flight", spec058},
		{"059 reserve stays off the host", spec059},
		{"060 reload during the copy", spec060},
		{"061 another life during the copy", spec061},
		{"062 reset on the host", spec062},
		{"063 zero span on the host", spec063},
		{"064 read into", spec064},
		{"065 ingest is idempotent", spec065},
		{"066 capture rows", spec066},
		{"067 a publication is a value", spec067},
		{"068 publish beside a committer", spec068},
		{"069 remove while read into", spec069},
		{"070 publish while read into", spec070},
		{"071 nothing published", spec071},
		{"072 another world size", spec072},
		{"073 what a retrieve reads", spec073},
		{"074 polls", spec074},
		{"075 only the difference", spec075},
		{"076 we are further", spec076},
		{"077 a failed read", spec077},
		{"078 our own publication", spec078},
		{"079 needed labels", spec079},
		{"080 too few pages", spec080},
		{"081 retrieve into a claimed stream", spec081},
		{"082 nothing to move", spec082},
		{"083 too few pages published", spec083},
		{"084 another geometry", spec084},
		{"085 another content epoch", spec085},
		{"086 all labels at once", spec086},
		{"087 pages of a range", spec087},
		{"095 ranks of another world", spec095},
		{"096 removed while published", spec096},
		{"097 publication ends before its request", spec097},
		{"098 a content epoch ends its publication", spec098},
		{"100 another life of the owner", spec100},
		{"101 eight drivers at once", spec101},
	} {
		t.Run(c.name, c.run)
	}
}

func spec001(t *testing.T) {
	b := newBed(t, 8, 8)
	b.same("counts", b.Counts(), Counts{Free: 7, Sink: 1})
	b.ingest("a")
	b.grow("a", "main", 7*8)
	b.pages("a", "main", 1, 2, 3, 4, 5, 6, 7)
	b.same("counts", b.Counts(), Counts{Owned: 7, Sink: 1, Requests: 1})
}

func spec002(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a", "b")
	b.grow("a", "main", 10)
	b.pages("a", "main", 1, 2)
	b.grow("b", "main", 8)
	b.pages("b", "main", 3)
	b.remove("a", false)
	b.freeList(4, 5, 6, 7, 1, 2)
	b.grow("b", "main", 33)
	b.pages("b", "main", 3, 4, 5, 6, 7, 1)
	b.freeList(2)
}

func spec003(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	p := b.grow("a", "main", 10)
	b.stored("a", "main", 10)
	b.same("indptrs", p.Indptrs, Indptrs{
		QO: []int32{0, 10}, Pages: []int32{0, 2}, Indices: []int32{1, 2}, LastPageLen: []int32{2},
	})
	b.same("views", p.Views, []View{{"a", "main", []page.Index{1, 2}, 10, 0, 0, 10, 1}})
	b.same("slots", p.Slots, slots(
		at(1, 0), at(1, 1), at(1, 2), at(1, 3), at(1, 4), at(1, 5), at(1, 6), at(1, 7), at(2, 0), at(2, 1)))
	b.generation("a", "main", 2)
}

func spec004(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	b.grow("a", "main", 10)
	b.same("slots", b.grow("a", "main", 1).Slots, slots(at(2, 2)))
	b.stored("a", "main", 11)
	b.pages("a", "main", 1, 2)
	b.generation("a", "main", 3)
	b.same("last page", b.grow("a", "main", 5).Indptrs.LastPageLen, []int32{8})
	b.stored("a", "main", 16)
	b.same("slots", b.grow("a", "main", 1).Slots, slots(at(3, 0)))
	b.stored("a", "main", 17)
	b.generation("a", "main", 6)
}

func spec005(t *testing.T) {
	b := newBed(t, 4, 8)
	b.ingest("a")
	for _, l := range []id.Label{"main", "cfg"} {
		_, err := b.Admit(Step{Segments: []Segment{{"a", l, 64}}})
		var short *AllocationError
		if !errors.As(err, &short) || !errors.Is(err, ErrNoPages) {
			t.Fatalf("error is %v", err)
		}
		b.same("shortage", *short, AllocationError{"a", l, 5, 3})
	}
	b.free(3)
	b.same("request", b.Requests(0), []RequestState{{Request: "a", Streams: []StreamState{{Label: "main"}}}})
}

func spec006(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	one := b.admit(Segment{"a", "main", 10})
	two := b.admit(Segment{"a", "main", 10})
	b.free(5)
	b.generation("a", "main", 1)

	// Both have the same slots: only one of them can become the stream's, and
	// nothing is offered while the other may still write.
	b.commit(one)
	b.fails(b.Plan(two, new(Plans)), ErrInvalid)
	_, err := b.Publish("a", false)
	b.fails(err, ErrStepInFlight)
	b.commit(two, "a")
	b.stored("a", "main", 10)
	b.publish("a", false)
}

func spec007(t *testing.T) {
	b := newBed(t, 6, 8)
	b.ingest("a", "b")
	_, err := b.Admit(Step{Segments: []Segment{{"a", "main", 16}, {"b", "main", 32}}})
	var short *AllocationError
	if !errors.As(err, &short) {
		t.Fatalf("error is %v", err)
	}
	b.same("shortage", *short, AllocationError{"b", "main", 1, 5})
	b.free(5)
	b.pages("a", "main")
	b.inFlight("a", false)
	b.inFlight("b", false)
}

func spec008(t *testing.T) {
	b := newBed(t, 7, 8)
	b.ingest("a", "b", "c")
	b.grow("c", "main", 8)
	_, err := b.Admit(Step{Segments: []Segment{{"a", "main", 16}, {"b", "main", 32}}})
	b.fails(err, ErrNoPages)
	b.remove("c", false)
	b.commit(b.admit(Segment{"a", "main", 16}, Segment{"b", "main", 32}))
	b.pages("a", "main", 2, 3)
	b.pages("b", "main", 4, 5, 6, 1)
}

func spec009(t *testing.T) {
	a := newArena(8, false)
	pages, _ := a.take(nil, 3)
	if err := a.release(3); err != nil {
		t.Fatal(err)
	}
	before := a.counts
	for name, err := range map[string]error{
		"double release":             a.release(3),
		"release of page 0":          a.release(0),
		"release out of range":       a.release(99),
		"release of one never taken": a.release(7),
		"quarantine of a free one":   a.quarantine(3),
		"quarantine of page 0":       a.quarantine(0),
		"hold of a free one":         a.hold(3),
		"hold out of range":          a.hold(8),
		"unhold of one not held":     a.unhold(1),
		"unhold out of range":        a.unhold(1 << 31),
	} {
		if !errors.Is(err, errArena) {
			t.Errorf("%s: error is %v", name, err)
		}
	}
	if a.counts != before || !slices.Equal(pages, []page.Index{1, 2, 3}) {
		t.Errorf("counts %v, want %v", a.counts, before)
	}
	// A manager that does not check itself counts what the arena refuses.
	b := newBed(t, 8, 8, func(o *Options) { o.Check = false })
	b.release([]page.Index{0})
	b.same("faults", b.Counts(), Counts{Free: 7, Sink: 1, Faults: 1})
}

func spec010(t *testing.T) {
	a := newArena(8, false)
	for _, n := range []int{8, -1} {
		if got, ok := a.take(nil, n); ok || len(got) > 0 {
			t.Errorf("take(%d) = %v, %v", n, got, ok)
		}
	}
	if got, ok := a.take(nil, 0); !ok || len(got) > 0 {
		t.Errorf("take(0) = %v, %v", got, ok)
	}
	if a.counts[free] != 7 {
		t.Errorf("%d free", a.counts[free])
	}
	if got, ok := a.take(nil, 7); !ok || !slices.Equal(got, upFrom(1, 7)) {
		t.Errorf("take(7) = %v, %v", got, ok)
	}
}

func spec011(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	b.grow("a", "main", 20)
	b.same("removed", b.reset("a", false), Removed{})
	b.pages("a", "main", 1, 2, 3)
	p := b.grow("a", "main", 5)
	b.same("pages", p.Views[0].Pages, []page.Index{1})
	b.same("length", p.Views[0].Length, 5)
	b.same("slots", p.Slots, slots(at(1, 0), at(1, 1), at(1, 2), at(1, 3), at(1, 4)))
	b.pages("a", "main", 1, 2, 3)
}

func spec012(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	b.grow("a", "main", 8)
	tok, err := b.Admit(Step{Segments: []Segment{{"a", "main", 9}}, Discard: true})
	b.ok(err)
	p := b.plan(tok)
	b.same("first", p.Slots[0], at(2, 0))
	b.same("last", p.Slots[8], at(3, 0))
	b.commit(tok)
	b.stored("a", "main", 8)
	b.pages("a", "main", 1, 2, 3)
	b.inFlight("a", false)
	b.same("slots", b.grow("a", "main", 2).Slots, slots(at(2, 0), at(2, 1)))
}

func spec013(t *testing.T) {
	b := newBed(t, 16, 4)
	b.ingest("other", "r")
	b.grow("other", "main", 16)
	b.grow("r", "main", 6)
	p := b.grow("r", "main", 3)
	b.same("pages", p.Views[0].Pages, []page.Index{5, 6, 7})
	b.same("slots", p.Slots, slots(at(6, 2), at(6, 3), at(7, 0)))
	b.same("last page", p.Indptrs.LastPageLen, []int32{1})
}

func spec014(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	b.grow("a", "main", 10)
	p := b.grow("a", "main", 0)
	b.same("views", p.Views, []View{{"a", "main", []page.Index{1, 2}, 10, 0, 0, 0, 2}})
	b.same("slots", p.Slots, slots())
	b.stored("a", "main", 10)
	b.generation("a", "main", 2)
}

func spec015(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	p := b.grow("a", "main", 0)
	b.same("views", p.Views, []View{{"a", "main", nil, 0, 0, 0, 0, 0}})
	b.same("indptrs", p.Indptrs, Indptrs{QO: []int32{0, 0}, Pages: []int32{0, 0}, LastPageLen: []int32{8}})
	b.same("slots", p.Slots, slots())
}

func spec016(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	p := b.grow("a", "cfg", 0)
	b.same("length", p.Views[0].Length, 0)
	b.stored("a", "cfg", 0)
}

func spec017(t *testing.T) {
	b := newBed(t, 16, 4)
	b.ingest("a", "b")
	tok, err := b.Admit(Step{
		Segments: []Segment{{"a", "main", 3}, {"a", "cfg", 3}, {"b", "main", 2}, {"b", "cfg", 2}, {"b", "x", 1}},
		Combined: []Combined{{[]id.Label{"main", "cfg"}, "batched"}},
	})
	b.ok(err)
	plans := b.plans(tok).Plans
	b.same("plans", len(plans), 2)
	p := plans[0]
	b.same("label", p.Label, id.Label("batched"))
	var order []string
	for _, v := range p.Views {
		order = append(order, fmt.Sprintf("%s/%s", v.Request, v.Label))
	}
	b.same("order", order, []string{"a/main", "b/main", "a/cfg", "b/cfg"})
	b.same("indptrs", p.Indptrs, Indptrs{
		QO: []int32{0, 3, 5, 8, 10}, Pages: []int32{0, 1, 2, 3, 4}, Indices: []int32{1, 3, 2, 4}, LastPageLen: []int32{3, 2, 3, 2},
	})
	b.same("label", plans[1].Label, id.Label("x"))
	b.same("slots", plans[1].Slots, slots(at(5, 0)))
	b.commit(tok)
	b.stored("b", "cfg", 2)
}

func spec018(t *testing.T) {
	b := newBed(t, 16, 4)
	b.ingest("a")
	before := b.Counts()
	for name, combined := range map[string][]Combined{
		"no segment":           {{[]id.Label{"main", "nosuch"}, "batched"}},
		"a plan of that name":  {{[]id.Label{"main"}, "cfg"}},
		"two of that name":     {{[]id.Label{"main"}, "x"}, {[]id.Label{"cfg"}, "x"}},
		"source twice":         {{[]id.Label{"main", "main"}, "x"}},
		"source in two":        {{[]id.Label{"main"}, "x"}, {[]id.Label{"main"}, "y"}},
		"no sources":           {{nil, "x"}},
		"no name":              {{[]id.Label{"main"}, ""}},
		"name of another plan": {{[]id.Label{"main"}, "new"}},
	} {
		_, err := b.Admit(Step{Segments: []Segment{{"a", "main", 3}, {"a", "cfg", 3}, {"a", "new", 1}}, Combined: combined})
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: error is %v", name, err)
		}
		b.same("counts", b.Counts(), before)
		b.same("streams", len(b.requests["a"].streams), 1)
	}
	// A label that is consumed by the combined one may lend it its name.
	tok, err := b.Admit(Step{Segments: []Segment{{"a", "main", 3}, {"a", "cfg", 3}}, Combined: []Combined{{[]id.Label{"cfg", "main"}, "main"}}})
	b.ok(err)
	b.same("first", b.plan(tok).Views[0].Label, id.Label("cfg"))
}

func spec019(t *testing.T) {
	const size = 8
	b := newBed(t, 2048, size)
	for batch := range 100 {
		var segments []Segment
		for i := range rand.IntN(20) + 1 {
			r := id.Request(fmt.Sprint(batch, "-", i))
			b.ingest(r)
			if n := rand.IntN(3 * size); n > 0 {
				b.grow(r, "main", n)
			}
			segments = append(segments, Segment{r, "main", 1})
		}
		tok := b.admit(segments...)
		p := b.plan(tok)
		for i, v := range p.Views {
			fast := at(v.Pages[len(v.Pages)-1], p.Indptrs.LastPageLen[i]-1)
			b.same("slot", p.Slots[i], fast)
		}
		b.commit(tok)
		for _, s := range segments {
			b.remove(s.Request, false)
		}
	}
}

func spec022(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	for _, l := range []id.Label{"main", "new"} {
		_, err := b.Admit(Step{Segments: []Segment{{"a", l, 8}, {"a", l, 8}}})
		b.fails(err, ErrInvalid)
	}
	b.free(7)
	b.same("streams", len(b.requests["a"].streams), 1)
}

func spec023(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a", "b")
	tok := b.admit(Segment{"a", "main", 3}, Segment{"a", "cfg", 3}, Segment{"b", "main", 4})
	b.remove("a", false)
	b.ingest("a") // the same name is another request
	b.commit(tok, "a")
	b.stored("a", "main", 0)
	b.stored("b", "main", 4)
	b.inFlight("b", false)
	b.pages("a", "main")
}

func spec042(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	tok := b.admit(Segment{"a", "main", 10})
	b.inFlight("a", true)
	b.ok(b.Abort(tok))
	b.inFlight("a", false)
	b.stored("a", "main", 0)
	b.pages("a", "main", 1, 2)
	b.fails(b.Abort(tok), ErrUnknownToken)
	_, err := b.Commit(tok)
	b.fails(err, ErrUnknownToken)
	b.fails(b.Plan(tok, new(Plans)), ErrUnknownToken)
}

func spec043(t *testing.T) {
	b := newBed(t, 4, 8)
	b.ingest("a", "b")
	tok := b.admit(Segment{"a", "main", 16})
	_, err := b.Admit(Step{Segments: []Segment{{"b", "main", 16}}})
	b.fails(err, ErrNoPages)
	b.inFlight("a", true)
	b.ok(b.Abort(tok))
	b.inFlight("a", false)
	b.reset("a", true)
	b.grow("b", "main", 16)
}

func spec065(t *testing.T) {
	b := newBed(t, 32, 8)
	b.ok(b.Ingest("a", RequestConfig{Needs: Needs{Labels: []id.Label{"x"}}}))
	b.grow("a", "main", 100)
	b.ok(b.Ingest("a", RequestConfig{Needs: Needs{Labels: []id.Label{"y"}}}))
	b.stored("a", "main", 100)
	b.pages("a", "main", upFrom(1, 13)...)
	b.same("needs", b.requests["a"].needs.Labels, []id.Label{"x"})
	b.free(18)
	b.remove("a", false)
	b.same("removed", b.remove("a", false), Removed{})
	b.ingest("a")
	b.stored("a", "main", 0)
	b.free(31)
}

func spec066(t *testing.T) {
	b := newBed(t, 64, 16)
	b.ingest("d0", "d1")
	b.commit(b.admit(Segment{"d0", "main", 512}, Segment{"d1", "main", 256}))
	b.free(63 - 48)
	b.reset("d0", true)
	b.reset("d1", true)
	b.free(63)
	b.stored("d0", "main", 0)
}

func spec067(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("a")
	b.grow("a", "main", 10)
	b.grow("a", "cfg", 1)
	p := b.publish("a", false)
	want := Publication{ID: 1, Request: "a", Streams: []Stream{
		{Label: "cfg", Ranks: []id.Rank{0}, Tokens: 1, Pages: []page.Index{3}},
		{Label: "main", Ranks: []id.Rank{0}, Tokens: 10, Pages: []page.Index{1, 2}},
	}}
	b.same("publication", p, want)
	b.grow("a", "main", 30)
	b.same("publication", p, want)
	p = b.publish("a", true)
	b.same("id", p.ID, PublicationID(1))
	b.same("final", p.Final, true)
	b.same("grown", p.Streams[1], Stream{Label: "main", Ranks: []id.Rank{0}, Tokens: 40, Pages: []page.Index{1, 2, 4, 5, 6}})

	_, err := b.Publish("nosuch", false)
	b.fails(err, ErrUnknownRequest)
	_, err = b.Publish("a", true)
	b.fails(err, ErrFinal)
	_, err = b.Publish("a", false)
	b.fails(err, ErrFinal)
	b.same("published", b.Counts().Published, 6)
}

func spec068(t *testing.T) {
	b := newBed(t, 512, 16, func(o *Options) { o.Check = false })
	b.ingest("a")
	b.grow("a", "main", 16)
	var work sync.WaitGroup
	work.Go(func() {
		for range 300 {
			tok, err := b.Admit(Step{Segments: []Segment{{"a", "main", 16}}})
			if err == nil {
				_, err = b.Commit(tok)
			}
			if err != nil {
				t.Error(err)
			}
		}
	})
	length := 0
	for range 300 {
		s := b.publish("a", false).Streams[0]
		if s.Tokens > 16*len(s.Pages) || s.Tokens < length {
			t.Fatalf("%d tokens in %d pages after %d tokens", s.Tokens, len(s.Pages), length)
		}
		length = s.Tokens
	}
	work.Wait()
	b.ok(b.verify())
}

func spec069(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.grow("r", "main", 13)
	got := b.retrieve("r", peer(true, remote("main", 30, 11)), 0, Reading)
	b.same("local", got.Moves[0].Local, []page.Index{2, 3, 4})
	b.same("removed", b.remove("r", false), Removed{Cancel: []RetrievalID{got.ID}})
	// Page 1 lies below what the read writes; page 2 has both.
	b.freeList(append(upFrom(5, 11), 1)...)
	b.same("quarantine", b.Counts().Quarantine, 3)
	b.fails(b.Landed(got.ID), ErrUnknownRetrieval)
	b.same("quarantine", b.Counts().Quarantine, 3)
	b.ok(b.Failed(got.ID))
	b.free(15)
	b.fails(b.Failed(got.ID), ErrUnknownRetrieval)
}

func spec070(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	got := b.retrieve("r", peer(false, remote("main", 20, 11)), 0, Reading)
	_, err := b.Publish("r", false)
	b.fails(err, ErrInvalid)
	b.ok(b.Landed(got.ID))
	got = b.retrieve("r", peer(false, remote("main", 40, 11)), 0, Reading)
	b.same("offered", b.publish("r", false).Streams[0].Tokens, 20)
	b.ok(b.Landed(got.ID))
	b.same("offered", b.publish("r", false).Streams[0].Tokens, 40)
}

func spec071(t *testing.T) {
	b := newBed(t, 16, 8, func(o *Options) { o.Geometry.WorldSize = 2 })
	b.ingest("r")
	b.retrieve("r", nil, 0, Ready)
	src := peer(true, remote("main", 20, 11))
	src.Geometry.WorldSize = 2
	src.Publication.Streams[0].Ranks = []id.Rank{1}
	b.retrieve("r", src, 0, Waiting)
	b.free(15)
}

func spec072(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	src := peer(true, remote("main", 20, 11))
	src.Geometry.WorldSize = 2
	err := b.refused("r", src, ErrIncompatible)
	if text := err.Error(); !strings.Contains(text, "world_size") || !strings.Contains(text, `ours "1", theirs "2"`) {
		t.Errorf("%q does not name both sizes", text)
	}
}

func spec073(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.grow("r", "main", 5)
	src := peer(true, remote("main", 20, 11))
	got := b.retrieve("r", src, 0, Reading)
	b.same("retrieval", *got, Retrieval{ID: 1, Request: "r", Source: src.Name, Moves: []Move{{
		Label: "main", From: 5, To: 20,
		RemoteStart: 0, Remote: []page.Index{11, 12, 13},
		LocalStart: 0, Local: []page.Index{1, 2, 3}, Ranks: []id.Rank{0},
	}}})
	b.stored("r", "main", 5)
	_, err := b.Admit(Step{Segments: []Segment{{"r", "main", 1}}})
	b.fails(err, ErrReading)
	b.ok(b.Landed(got.ID))
	b.pages("r", "main", 1, 2, 3)
	b.stored("r", "main", 20)
}

func spec074(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	src := peer(true, remote("main", 20, 11))
	got := b.retrieve("r", src, 0, Reading)
	out, err := b.AdmitRetrieve("r", At{}, src, 0)
	b.ok(err)
	b.same("outcome", out, Outcome{Readiness: Reading})
	b.ok(b.Landed(got.ID))
	b.retrieve("r", src, 0, Ready)
	b.retrieve("r", src, 0, Ready)
	b.fails(b.Landed(got.ID), ErrUnknownRetrieval)
	b.fails(b.Failed(got.ID), ErrUnknownRetrieval)
	b.fails(b.Cancel(got.ID), ErrUnknownRetrieval)
}

func spec075(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.ok(b.Landed(b.retrieve("r", peer(false, remote("main", 20, 11)), 0, Reading).ID))
	b.retrieve("r", peer(false, remote("main", 20, 11)), 0, Waiting)
	got := b.retrieve("r", peer(true, remote("main", 24, 11)), 0, Reading)
	b.same("moves", got.Moves, []Move{{"main", 20, 24, 16, []page.Index{13}, 16, []page.Index{3}, []id.Rank{0}, 0, true}})
	b.ok(b.Landed(got.ID))
	b.retrieve("r", peer(true, remote("main", 24, 11)), 0, Ready)
}

func spec076(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("computed", "decoded")
	b.grow("computed", "main", 25)
	b.retrieve("computed", peer(true, remote("main", 20, 11)), 0, Ready)

	b.ok(b.Landed(b.retrieve("decoded", peer(false, remote("main", 20, 11)), 20, Reading).ID))
	b.retrieve("decoded", peer(false, remote("main", 20, 11)), 20, Ready)
	b.grow("decoded", "main", 5)
	b.retrieve("decoded", peer(false, remote("main", 20, 11)), 20, Ready)
	b.retrieve("decoded", peer(true, remote("main", 20, 11)), 0, Ready)
	b.refused("decoded", peer(true, remote("main", 24, 11)), ErrDiverged)
	b.refused("decoded", peer(true, remote("main", 40, 11)), ErrDiverged)
	other := peer(true, remote("main", 4, 11))
	other.Name.Owner.Node = "other"
	b.refused("decoded", other, ErrDiverged)
	b.stored("decoded", "main", 25)
}

func spec077(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.grow("r", "main", 5)
	src := peer(true, remote("main", 20, 11))
	for range 3 {
		got := b.retrieve("r", src, 0, Reading)
		b.ok(b.Failed(got.ID))
		b.stored("r", "main", 5)
		b.pages("r", "main", 1)
		b.free(14)
		b.fails(b.Landed(got.ID), ErrUnknownRetrieval)
	}
	b.ok(b.Landed(b.retrieve("r", src, 0, Reading).ID))
	b.stored("r", "main", 20)
}

func spec078(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.grow("r", "main", 20)
	own := peer(true, remote("main", 100, 11)) // only its name and id count
	own.Name.Owner = id.Life{Node: "local", Incarnation: 7}
	own.Publication.ID = b.publish("r", true).ID
	b.retrieve("r", own, 0, Ready)
	b.free(12)

	// Another life of the request has none of the tokens.
	b.remove("r", false)
	b.ingest("r")
	b.refused("r", own, ErrGone)
	b.Unsealed(own.Publication.ID)
	b.refused("r", own, ErrEnded)
	b.free(15)
	src := peer(true, remote("main", 100, 11))

	// Neither a name alone nor the lack of one is an identity.
	src.Name.Owner = id.Life{}
	b.refused("r", src, ErrMalformed)
	src.Name.Owner = id.Life{Node: "local", Incarnation: 6}
	b.retrieve("r", src, 0, Reading)
}

func spec079(t *testing.T) {
	b := newBed(t, 16, 8)
	needs := Needs{
		Labels: []id.Label{"general", "general"},
		ByNode: map[id.GraphNode][]id.Label{"n": {"bynode"}, "none": {}},
		ByWalk: map[At][]id.Label{{"n", "w"}: {"bywalk"}},
	}
	src := peer(true, remote("bynode", 8, 1), remote("bywalk", 8, 2), remote("cfg", 8, 3), remote("general", 8, 4), remote("main", 8, 5))
	for name, c := range map[string]struct {
		needs Needs
		at    At
		want  id.Label
	}{
		"walk":      {needs, At{"n", "w"}, "bywalk"},
		"node":      {needs, At{"n", "other"}, "bynode"},
		"general":   {needs, At{"other", "w"}, "general"},
		"main":      {Needs{}, At{"n", "w"}, "main"},
		"empty":     {needs, At{"none", "w"}, ""},
		"all empty": {Needs{Labels: []id.Label{}}, At{}, ""},
	} {
		b.ok(b.Ingest("r", RequestConfig{Needs: c.needs}))
		out, err := b.AdmitRetrieve("r", c.at, src, 0)
		b.ok(err)
		if c.want == "" {
			b.same(name, out, Outcome{Readiness: Ready})
		} else {
			b.same(name, len(out.Start.Moves), 1)
			b.same(name, out.Start.Moves[0].Label, c.want)
			b.ok(b.Landed(out.Start.ID))
			_, err = b.Stored("r", "cfg")
			b.fails(err, ErrUnknownLabel)
		}
		b.remove("r", false)
	}
}

func spec080(t *testing.T) {
	b := newBed(t, 4, 8)
	b.ingest("r")
	src := peer(true, remote("main", 40, 11))
	err := b.refused("r", src, ErrNoPages)
	var short *AllocationError
	errors.As(err, &short)
	b.same("shortage", *short, AllocationError{"r", "main", 2, 3})
	b.stored("r", "main", 0)
	b.free(3)

	b = newBed(t, 8, 8)
	b.ingest("r", "other")
	b.grow("other", "main", 24)
	b.refused("r", src, ErrNoPages)
	b.remove("other", false)
	b.retrieve("r", src, 0, Reading)
}

func spec082(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.retrieve("r", peer(true, remote("main", 0, 11)), 0, Ready)
	b.retrieve("r", peer(false, remote("main", 0, 11)), 0, Waiting)
}

func spec083(t *testing.T) {
	b := newBed(t, 64, 16)
	b.ingest("r")
	src := peer(true, Stream{Label: "main", Tokens: 100, Pages: upFrom(1, 3)})
	src.Geometry = geometry(64, 16)
	var bad *MalformedError
	if err := b.refused("r", src, ErrMalformed); !errors.As(err, &bad) {
		t.Fatalf("error is %v", err)
	}
	b.same("field", bad.Field, "pages")
}

func spec084(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	for field, change := range map[string]func(*page.Geometry){
		"model":      func(g *page.Geometry) { g.Model = "other" },
		"revision":   func(g *page.Geometry) { g.Revision = "other" },
		"world_size": func(g *page.Geometry) { g.WorldSize = 2 },
		"order":      func(g *page.Geometry) { g.Layout.Order = page.HND },
		"dtype":      func(g *page.Geometry) { g.Layout.DType = page.FP16 },
		"layers":     func(g *page.Geometry) { g.Layout.Layers++ },
		"page_size":  func(g *page.Geometry) { g.Layout.PageSize++ },
		"heads":      func(g *page.Geometry) { g.Layout.Heads++ },
		"head_dim":   func(g *page.Geometry) { g.Layout.HeadDim++ },
	} {
		src := peer(true, remote("main", 20, 11))
		change(&src.Geometry)
		var differ *IncompatibleError
		if err := b.refused("r", src, ErrIncompatible); !errors.As(err, &differ) {
			t.Fatalf("error is %v", err)
		}
		b.same("fields", len(differ.Fields), 1)
		b.same("field", differ.Fields[0].Field, field)
	}
	src := peer(true, remote("main", 20, 11))
	src.Geometry.Layout.Pages = 14
	b.retrieve("r", src, 0, Reading)
}

func spec085(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	b.ok(b.Landed(b.retrieve("r", peer(true, remote("main", 20, 11)), 0, Reading).ID))
	src := peer(true, remote("main", 20, 31))
	src.Publication.ContentEpoch = 1
	got := b.retrieve("r", src, 0, Reading)
	b.stored("r", "main", 0)
	b.same("moves", got.Moves, []Move{{"main", 0, 20, 0, []page.Index{31, 32, 33}, 0, []page.Index{1, 2, 3}, []id.Rank{0}, 0, true}})
	b.ok(b.Landed(got.ID))
	b.retrieve("r", src, 0, Ready)

	// An empty one of another epoch empties ours, too.
	src = peer(true, remote("main", 0, 31))
	src.Publication.ContentEpoch = 2
	b.retrieve("r", src, 0, Ready)
	b.stored("r", "main", 0)
}

func spec086(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ok(b.Ingest("r", RequestConfig{Needs: Needs{Labels: []id.Label{"main", "cfg"}}}))
	got := b.retrieve("r", peer(true, remote("cfg", 9, 21), remote("main", 20, 11)), 0, Reading)
	b.same("moves", got.Moves, []Move{
		{"main", 0, 20, 0, []page.Index{11, 12, 13}, 0, []page.Index{1, 2, 3}, []id.Rank{0}, 0, true},
		{"cfg", 0, 9, 0, []page.Index{21, 22}, 0, []page.Index{4, 5}, []id.Rank{0}, 0, true},
	})
	b.ok(b.Landed(got.ID))
	b.stored("r", "cfg", 9)
}

func spec087(t *testing.T) {
	for _, c := range []struct{ from, to, first, last int }{
		{5, 20, 0, 2}, {2, 5, 0, 0}, {2, 8, 0, 0}, {8, 16, 1, 1}, {7, 9, 0, 1}, {0, 17, 0, 2}, {16, 16, 0, -1},
	} {
		b := newBed(t, 16, 8)
		b.ingest("r")
		if c.from > 0 {
			b.grow("r", "main", c.from)
		}
		src := peer(true, remote("main", c.to, 11))
		if c.from == c.to {
			b.retrieve("r", src, 0, Ready)
			continue
		}
		got := b.retrieve("r", src, 0, Reading).Moves[0]
		n := c.last - c.first + 1
		b.same("move", got, Move{
			"main", c.from, c.to,
			c.first * 8, upFrom(page.Index(11+c.first), n),
			c.first * 8, upFrom(page.Index(1+c.first), n),
			[]id.Rank{0},
			0, c.from == 0,
		})
	}
}

func spec095(t *testing.T) {
	b := newBed(t, 16, 8)
	b.ingest("r")
	src := peer(true, remote("main", 20, 11))
	src.Publication.Streams[0].Ranks = []id.Rank{0, 1} // of a world of one
	b.refused("r", src, ErrMalformed)
	src.Geometry.WorldSize = 2
	b.refused("r", src, ErrIncompatible)
	b.stored("r", "main", 0)
}

func spec096(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("open", "sealed", "discarded")
	for i, r := range []id.Request{"open", "sealed", "discarded"} {
		b.grow(r, "main", 12)
		b.same("id", b.publish(r, i > 0).ID, PublicationID(i+1))
	}
	b.same("removed", b.remove("open", false), Removed{Unseal: []PublicationID{1}})
	b.same("removed", b.remove("sealed", false), Removed{Lives: []PublicationID{2}})
	b.same("removed", b.remove("discarded", true), Removed{Unseal: []PublicationID{3}})
	b.same("counts", b.Counts(), Counts{Free: 1, Limbo: 6, Sink: 1, Published: 6, Publications: 3})
	b.Unsealed(1, 3, 99)
	b.freeList(7, 1, 2, 5, 6)
	b.Unsealed(2)
	b.Unsealed(2)
	b.free(7)
}

func spec097(t *testing.T) {
	b := newBed(t, 8, 8)
	b.ingest("a")
	b.grow("a", "main", 12)
	p := b.publish("a", false)
	b.Unsealed(p.ID)
	b.pages("a", "main", 1, 2)
	b.same("counts", b.Counts(), Counts{Free: 5, Owned: 2, Sink: 1, Requests: 1})
	_, err := b.Publish("a", true)
	b.fails(err, ErrEnded)
	b.grow("a", "main", 1)
	b.same("removed", b.reset("a", false), Removed{})
	b.grow("a", "main", 1)
	b.same("id", b.publish("a", true).ID, PublicationID(2))
	b.same("removed", b.remove("a", false), Removed{Lives: []PublicationID{2}})
}

// Whatever takes tokens away that were offered ends their publication, so that
// nobody is let in by its old name; what comes then has another name and epoch.
func spec098(t *testing.T) {
	for name, lose := range map[string]func(bed) []PublicationID{
		"reset": func(b bed) []PublicationID {
			defer b.grow("r", "main", 20)
			return b.reset("r", false).Unseal
		},
		"removed": func(b bed) []PublicationID {
			out := b.remove("r", true)
			b.ingest("r")
			b.grow("r", "main", 20)
			b.reset("r", false) // the epochs of another life begin anew
			b.grow("r", "main", 20)
			return out.Unseal
		},
		"forked over": func(b bed) []PublicationID {
			tok := b.step(Step{Segments: []Segment{{"r", "x", 20}}, PostForks: []Fork{{"x", "main"}}})
			out, err := b.Commit(tok)
			b.ok(err)
			return out.Unseal
		},
		"started over": func(b bed) []PublicationID {
			src := peer(true, remote("main", 20, 11))
			src.Name.Sequence++
			out, err := b.AdmitRetrieve("r", At{}, src, 0)
			b.ok(err)
			b.ok(b.Landed(out.Start.ID))
			return out.Unseal
		},
	} {
		b := newBed(t, 32, 8)
		b.ingest("r")
		b.ok(b.Landed(b.retrieve("r", peer(true, remote("main", 20, 11)), 0, Reading).ID))
		old := b.publish("r", true)
		b.same(name, lose(b), []PublicationID{old.ID})
		b.Unsealed(old.ID)
		now := b.publish("r", true)
		if now.ID == old.ID || now.ContentEpoch == old.ContentEpoch {
			t.Errorf("%s: publication %d at epoch %d after %d at %d", name, now.ID, now.ContentEpoch, old.ID, old.ContentEpoch)
		}
		own := peer(true)
		own.Name.Owner, own.Publication.ID = b.life, old.ID
		b.refused("r", own, ErrEnded)
	}
}

func spec100(t *testing.T) {
	for name, change := range map[string]func(*id.Publication){
		"life":        func(p *id.Publication) { p.Owner.Incarnation++ },
		"owner":       func(p *id.Publication) { p.Owner.Node = "other" },
		"publication": func(p *id.Publication) { p.Sequence++ },
	} {
		b := newBed(t, 16, 8)
		b.ingest("r")
		b.ok(b.Landed(b.retrieve("r", peer(true, remote("main", 20, 11)), 0, Reading).ID))
		src := peer(true, remote("main", 8, 31))
		change(&src.Name)
		got := b.retrieve("r", src, 0, Reading)
		b.same(name, got.Moves, []Move{{"main", 0, 8, 0, []page.Index{31}, 0, []page.Index{1}, []id.Rank{0}, 0, true}})
		b.ok(b.Failed(got.ID))
		b.stored("r", "main", 0)
		b.pages("r", "main", 1, 2, 3)
	}
}
