package manager

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

func TestSource(t *testing.T) {
	// Every one is refused before a page is taken, and names the field.
	for name, c := range map[string]struct {
		field  string
		change func(*Source)
	}{
		"page 0":              {"pages", func(s *Source) { s.Publication.Streams[0].Pages[1] = 0 }},
		"page out of range":   {"pages", func(s *Source) { s.Publication.Streams[0].Pages[1] = 4096 }},
		"page far out":        {"pages", func(s *Source) { s.Publication.Streams[0].Pages[1] = math.MaxUint32 }},
		"page twice":          {"pages", func(s *Source) { s.Publication.Streams[0].Pages[2] = 11 }},
		"page in two streams": {"pages", func(s *Source) { s.Publication.Streams[0].Pages[2] = 22 }},
		"too few pages":       {"pages", func(s *Source) { s.Publication.Streams[0].Tokens = 25 }},
		"huge length":         {"pages", func(s *Source) { s.Publication.Streams[0].Tokens = math.MaxInt }},
		"no pages":            {"pages", func(s *Source) { s.Publication.Streams[0].Pages = nil }},
		"start inside a page": {"start", func(s *Source) { s.Publication.Streams[0].Start = 4 }},
		"negative start":      {"start", func(s *Source) { s.Publication.Streams[0].Start = -8 }},
		"start after the end": {"tokens", func(s *Source) { s.Publication.Streams[0].Start = 24 }},
		"negative length":     {"tokens", func(s *Source) { s.Publication.Streams[0].Tokens = -1 }},
		"no ranks":            {"ranks", func(s *Source) { s.Publication.Streams[0].Ranks = []id.Rank{} }},
		"rank out of world":   {"ranks", func(s *Source) { s.Publication.Streams[0].Ranks = []id.Rank{0, 4} }},
		"negative rank":       {"ranks", func(s *Source) { s.Publication.Streams[0].Ranks = []id.Rank{-1} }},
		"rank twice":          {"ranks", func(s *Source) { s.Publication.Streams[0].Ranks = []id.Rank{0, 0} }},
		"ranks descending":    {"ranks", func(s *Source) { s.Publication.Streams[0].Ranks = []id.Rank{1, 0} }},
		"stream twice":        {"ranks", func(s *Source) { s.Publication.Streams[0].Label = "second" }},
		"streams descending":  {"streams", func(s *Source) { s.Publication.Streams[0].Label = "z" }},
		"rank after rank": {"streams", func(s *Source) {
			s.Publication.Streams[0] = Stream{Label: "second", Ranks: []id.Rank{3}}
		}},
		"no label":        {"label", func(s *Source) { s.Publication.Streams[0].Label = "" }},
		"long label":      {"label", func(s *Source) { s.Publication.Streams[0].Label = id.Label(strings.Repeat("x", 65)) }},
		"state":           {"state", func(s *Source) { s.Publication.Streams[0].State = 3 }},
		"many streams":    {"streams", func(s *Source) { s.Publication.Streams = make([]Stream, id.MaxLabels*id.MaxRanks+1) }},
		"no owner":        {"name", func(s *Source) { s.Name.Owner.Node = "" }},
		"no sequence":     {"name", func(s *Source) { s.Name.Sequence = 0 }},
		"no pages at all": {"geometry", func(s *Source) { s.Geometry.Layout.Pages = 0 }},
		"too many pages":  {"geometry", func(s *Source) { s.Geometry.Layout.Pages = page.MaxPages + 1 }},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, 16, 8, func(o *Options) { o.Geometry.WorldSize = 4 })
			b.ingest("r")
			src := peer(true, remote("main", 20, 11), remote("second", 20, 21))
			src.Geometry.WorldSize = 4
			c.change(src)
			err := b.refused("r", src, ErrMalformed)
			var bad *MalformedError
			if !errors.As(err, &bad) || bad.Field != c.field {
				t.Errorf("%v does not name the field %s", err, c.field)
			}
		})
	}
}

func TestRanks(t *testing.T) {
	two := func(o *Options) {
		o.Geometry.WorldSize = 4
		o.Ranks = []id.Rank{1, 2}
	}
	source := func(ranks ...[]id.Rank) *Source {
		var streams []Stream
		for i, r := range ranks {
			s := remote("main", 20, page.Index(10*i+11))
			s.Ranks = r
			streams = append(streams, s)
		}
		src := peer(true, streams...)
		src.Geometry.WorldSize = 4
		return src
	}
	t.Run("published with all local ranks", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		b.grow("r", "main", 3)
		b.same("ranks", b.publish("r", true).Streams[0].Ranks, []id.Rank{1, 2})
	})
	t.Run("one is missing", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		b.retrieve("r", source([]id.Rank{0, 1}), 0, Waiting)
		b.retrieve("r", source([]id.Rank{0, 1}, []id.Rank{3}), 0, Waiting)
		b.free(15)
	})
	t.Run("more than ours", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		got := b.retrieve("r", source([]id.Rank{0}, []id.Rank{1, 2, 3}), 0, Reading)
		b.same("remote", got.Moves[0].Remote, []page.Index{21, 22, 23})
	})
	t.Run("one list for each", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		got := b.retrieve("r", source([]id.Rank{1}, []id.Rank{2}), 0, Reading)
		b.same("moves", got.Moves, []Move{
			{"main", 0, 20, 0, []page.Index{11, 12, 13}, 0, []page.Index{1, 2, 3}, []id.Rank{1}, 0, true},
			{"main", 0, 20, 0, []page.Index{21, 22, 23}, 0, []page.Index{1, 2, 3}, []id.Rank{2}, 0, true},
		})
	})
}

// Ranks that are spread over the nodes of a group are brought in as one.
func TestGroup(t *testing.T) {
	two := func(o *Options) {
		o.Geometry.WorldSize = 2
		o.Ranks = []id.Rank{0, 1}
	}
	// one is what a node of rank r has published, its pages from first on.
	one := func(node id.Node, r id.Rank, tokens, start, prefix int, first page.Index) Source {
		s := remote("main", tokens-start+prefix, first)
		s.Ranks, s.Tokens, s.Start, s.Prefix = []id.Rank{r}, tokens, start, prefix
		src := *peer(true, s)
		src.Name.Owner.Node = node
		src.Geometry.WorldSize = 2
		return src
	}
	group := func(a Source, rest ...Source) *Source {
		a.Rest = rest
		return &a
	}
	t.Run("as far as both are, then the rest", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		behind := one("b", 1, 12, 0, 0, 51)
		behind.Publication.Final = false
		got := b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), behind), 0, Reading)
		b.same("moves", got.Moves, []Move{
			{"main", 0, 12, 0, []page.Index{11, 12}, 0, []page.Index{1, 2}, []id.Rank{0}, 0, true},
			{"main", 0, 12, 0, []page.Index{51, 52}, 0, []page.Index{1, 2}, []id.Rank{1}, 1, true},
		})
		b.ok(b.Landed(got.ID))
		b.stored("r", "main", 12)
		got = b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), one("b", 1, 20, 0, 0, 51)), 0, Reading)
		b.same("moves", got.Moves, []Move{
			{"main", 12, 20, 8, []page.Index{12, 13}, 8, []page.Index{2, 3}, []id.Rank{0}, 0, true},
			{"main", 12, 20, 8, []page.Index{52, 53}, 8, []page.Index{2, 3}, []id.Rank{1}, 1, true},
		})
		b.ok(b.Landed(got.ID))
		b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), one("b", 1, 20, 0, 0, 51)), 0, Ready)
	})
	t.Run("another publication of one of them starts over", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		b.ok(b.Landed(b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), one("b", 1, 20, 0, 0, 51)), 0, Reading).ID))
		again := one("b", 1, 20, 0, 0, 61)
		again.Name.Sequence++
		got := b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), again), 0, Reading)
		b.same("from", got.Moves[0].From, 0)
		b.same("remote", got.Moves[1].Remote, []page.Index{61, 62, 63})
	})
	t.Run("retention let different parts go", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		got := b.retrieve("r", group(one("a", 0, 40, 16, 8, 11), one("b", 1, 40, 24, 8, 51)), 0, Reading)
		b.same("moves", got.Moves, []Move{
			{"main", 0, 8, 0, []page.Index{11}, 0, []page.Index{1}, []id.Rank{0}, 0, true},
			{"main", 0, 8, 0, []page.Index{51}, 0, []page.Index{1}, []id.Rank{1}, 1, true},
			{"main", 24, 40, 24, []page.Index{13, 14}, 24, []page.Index{2, 3}, []id.Rank{0}, 0, true},
			{"main", 24, 40, 24, []page.Index{52, 53}, 24, []page.Index{2, 3}, []id.Rank{1}, 1, true},
		})
	})
	t.Run("whichever is named first", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		open := func(node id.Node, r id.Rank, tokens int, first page.Index) Source {
			s := one(node, r, tokens, 0, 0, first)
			s.Publication.Final = false
			return s
		}
		got := b.retrieve("r", group(open("a", 0, 12, 11), open("b", 1, 12, 51)), 0, Reading)
		b.same("source", got.Source.Owner.Node, id.Node("a"))
		b.ok(b.Landed(got.ID))
		got = b.retrieve("r", group(one("b", 1, 20, 0, 0, 51), one("a", 0, 20, 0, 0, 11)), 0, Reading)
		b.same("source", got.Source.Owner.Node, id.Node("b"))
		b.same("moves", got.Moves, []Move{
			{"main", 12, 20, 8, []page.Index{52, 53}, 8, []page.Index{2, 3}, []id.Rank{1}, 0, true},
			{"main", 12, 20, 8, []page.Index{12, 13}, 8, []page.Index{2, 3}, []id.Rank{0}, 1, true},
		})
		b.ok(b.Landed(got.ID))
		b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), one("b", 1, 20, 0, 0, 51)), 0, Ready)
	})
	t.Run("one is not as far as another one has kept", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		behind := func(tokens int) *Source {
			s := one("b", 1, tokens, 0, 0, 51)
			s.Publication.Final = false
			return group(one("a", 0, 40, 24, 8, 11), s)
		}
		for _, tokens := range []int{23, 24} {
			b.retrieve("r", behind(tokens), 0, Waiting)
		}
		b.free(15)
		got := b.retrieve("r", behind(25), 0, Reading)
		b.ok(b.Landed(got.ID))
		b.stored("r", "main", 25)
	})
	t.Run("one is missing, or on the host", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		b.retrieve("r", group(one("a", 0, 20, 0, 0, 11)), 0, Waiting)
		away := one("b", 1, 20, 0, 0, 51)
		away.Publication.Streams[0].State, away.Publication.Streams[0].Pages = OnHost, nil
		b.retrieve("r", group(one("a", 0, 20, 0, 0, 11), away), 0, Waiting)
		b.free(15)
	})
	t.Run("what does not go together", func(t *testing.T) {
		b := newBed(t, 16, 8, two)
		b.ingest("r")
		mixed := one("b", 1, 20, 0, 0, 51)
		mixed.Publication.ContentEpoch++
		b.refused("r", group(one("a", 0, 20, 0, 0, 11), mixed), ErrMixed)
		b.refused("r", group(one("a", 0, 20, 0, 0, 11), one("b", 1, 12, 0, 0, 51)), ErrMixed) // both are final
		b.refused("r", group(one("a", 0, 20, 0, 0, 11), one("b", 0, 20, 0, 0, 51)), ErrMalformed)
		b.refused("r", group(one("a", 0, 20, 0, 0, 11), *group(one("b", 1, 20, 0, 0, 51), one("c", 1, 20, 0, 0, 51))), ErrMalformed)
		b.refused("r", group(one("a", 0, 40, 16, 8, 11), one("b", 1, 40, 24, 0, 51)), ErrIncompatible)
		b.free(15)
	})
}

func TestReadiness(t *testing.T) {
	both := RequestConfig{Needs: Needs{Labels: []id.Label{"main", "cfg"}}}
	t.Run("a needed label is missing", func(t *testing.T) {
		b := newBed(t, 16, 8)
		b.ok(b.Ingest("r", both))
		src := peer(true, remote("main", 20, 11))
		b.ok(b.Landed(b.retrieve("r", src, 0, Reading).ID))
		b.retrieve("r", src, 0, Waiting)
		b.retrieve("r", src, 20, Waiting)
		src = peer(true, remote("cfg", 4, 21), remote("main", 20, 11))
		b.ok(b.Landed(b.retrieve("r", src, 0, Reading).ID))
		b.retrieve("r", src, 0, Ready)
	})
	t.Run("min tokens", func(t *testing.T) {
		b := newBed(t, 32, 8)
		b.ok(b.Ingest("r", both))
		src := peer(false, remote("cfg", 8, 21), remote("main", 20, 11))
		b.ok(b.Landed(b.retrieve("r", src, 8, Reading).ID))
		b.retrieve("r", src, 8, Ready)
		b.retrieve("r", src, 9, Waiting) // cfg
		b.retrieve("r", src, 0, Waiting) // not final
		src = peer(false, remote("cfg", 16, 21), remote("main", 40, 11))
		b.retrieve("r", src, 8, Ready) // and nothing is started
		b.ok(b.Landed(b.retrieve("r", src, 9, Reading).ID))
		b.stored("r", "main", 40)
		_, err := b.AdmitRetrieve("r", At{}, src, -1)
		b.fails(err, ErrInvalid)
	})
	t.Run("final is enough below min tokens", func(t *testing.T) {
		b := newBed(t, 32, 8)
		b.ingest("r")
		src := peer(true, remote("main", 20, 11))
		b.ok(b.Landed(b.retrieve("r", src, 100, Reading).ID))
		b.retrieve("r", src, 100, Ready)
	})
	t.Run("not on the device", func(t *testing.T) {
		for _, s := range []State{Offloading, OnHost} {
			b := newBed(t, 16, 8)
			b.ingest("r")
			src := peer(true, Stream{Label: "main", Tokens: 20, State: s})
			b.retrieve("r", src, 0, Waiting)
			b.ok(b.Landed(b.retrieve("r", peer(true, remote("main", 20, 11)), 0, Reading).ID))
			b.retrieve("r", src, 0, Ready)
			src = peer(false, Stream{Label: "main", Tokens: 40, State: s})
			b.retrieve("r", src, 20, Ready)
			b.retrieve("r", src, 21, Waiting)
			// Not even an empty one is ours while we have another owner's tokens.
			src = peer(true, Stream{Label: "main", State: s})
			src.Name.Owner.Incarnation++
			b.retrieve("r", src, 0, Waiting)
			b.stored("r", "main", 20)
		}
	})
	t.Run("released in front", func(t *testing.T) {
		src := func(prefix, start, tokens int) *Source {
			return peer(true, Stream{Label: "main", Prefix: prefix, Start: start, Tokens: tokens, Pages: upFrom(11, page.Count(tokens-start+prefix, 8))})
		}
		landed := func(b bed, got *Retrieval, want StreamState) {
			b.t.Helper()
			b.ok(b.Landed(got.ID))
			s := b.state("r", "main")
			s.Generation = 0
			want.Label = "main"
			b.same("stream", s, want)
		}
		b := newBed(t, 16, 8)
		b.ingest("r")
		got := b.retrieve("r", src(0, 16, 30), 0, Reading)
		b.same("moves", got.Moves, []Move{{"main", 16, 30, 16, []page.Index{11, 12}, 16, []page.Index{1, 2}, []id.Rank{0}, 0, true}})
		landed(b, got, StreamState{Tokens: 30, Released: 16, Pages: 2})
		b.retrieve("r", src(0, 16, 30), 0, Ready)
		// What follows is found behind it: 32 is still in the source.
		got = b.retrieve("r", src(0, 24, 40), 0, Reading)
		b.same("moves", got.Moves, []Move{{"main", 30, 40, 24, []page.Index{11, 12}, 24, []page.Index{2, 3}, []id.Rank{0}, 0, true}})
		landed(b, got, StreamState{Tokens: 40, Released: 16, Pages: 3})
		// Between 40 and 48 there is a gap: the stream starts over, prefix first.
		got = b.retrieve("r", src(8, 48, 60), 0, Reading)
		b.same("moves", got.Moves, []Move{
			{"main", 0, 8, 0, []page.Index{11}, 0, []page.Index{1}, []id.Rank{0}, 0, true},
			{"main", 48, 60, 48, []page.Index{12, 13}, 48, []page.Index{2, 3}, []id.Rank{0}, 0, true},
		})
		landed(b, got, StreamState{Tokens: 60, Released: 40, Prefix: 8, Pages: 3})
		p := b.grow("r", "main", 5)
		b.same("slots", p.Slots, slots(at(3, 4), at(3, 5), at(3, 6), at(3, 7), at(4, 0)))
		b.same("view", p.Views, []View{{"r", "main", []page.Index{1, 2, 3, 4}, 65, 40, 8, 5, p.Views[0].Generation}})
		b.refused("r", src(8, 72, 80), ErrDiverged)

		// Tokens that were computed here are no origin to start over from.
		b = newBed(t, 16, 8)
		b.ingest("r")
		b.grow("r", "main", 10)
		err := b.refused("r", src(0, 16, 30), ErrIncompatible)
		if !strings.Contains(err.Error(), "start") {
			t.Errorf("%v does not name the field", err)
		}
		// One that ends where it starts has nothing to be read.
		b = newBed(t, 16, 8)
		b.ingest("r")
		for _, s := range []*Source{src(0, 16, 16), src(8, 16, 16)} {
			b.refused("r", s, ErrMalformed)
		}
	})
	t.Run("unknown request", func(t *testing.T) {
		b := newBed(t, 16, 8)
		b.refused("r", nil, ErrUnknownRequest)
		b.refused("r", peer(true, remote("main", 20, 11)), ErrUnknownRequest)
	})
	t.Run("step in flight", func(t *testing.T) {
		b := newBed(t, 16, 8)
		b.ingest("r")
		tok := b.admit(Segment{"r", "main", 1})
		src := peer(true, remote("main", 20, 11))
		b.refused("r", src, ErrStepInFlight)
		b.ok(b.Abort(tok))
		b.retrieve("r", src, 0, Reading)
	})
	t.Run("one label diverged", func(t *testing.T) {
		b := newBed(t, 32, 8)
		b.ok(b.Ingest("r", both))
		b.ok(b.Landed(b.retrieve("r", peer(false, remote("cfg", 8, 21), remote("main", 20, 11)), 0, Reading).ID))
		b.grow("r", "cfg", 1)
		b.refused("r", peer(false, remote("cfg", 9, 21), remote("main", 30, 11)), ErrDiverged)
		// A step that is discarded, or only reads, is none.
		tok, err := b.Admit(Step{Segments: []Segment{{"r", "main", 3}}, Discard: true})
		b.ok(err)
		b.commit(tok)
		b.grow("r", "main", 0)
		b.retrieve("r", peer(false, remote("cfg", 8, 21), remote("main", 30, 11)), 0, Reading)
	})
}

// The pages of a read belong to it until nothing can land any more.
func TestLateLanding(t *testing.T) {
	start := func(t *testing.T) (bed, *Retrieval) {
		b := newBed(t, 10, 8)
		b.ingest("r", "next")
		b.grow("r", "main", 13)
		return b, b.retrieve("r", peer(true, remote("main", 30, 11)), 0, Reading) // 1, [2, 3, 4)
	}
	// taken claims that the next request gets exactly these pages.
	taken := func(b bed, want ...page.Index) {
		b.t.Helper()
		b.grow("next", "main", 8*len(want))
		b.pages("next", "main", want...)
		_, err := b.Admit(Step{Segments: []Segment{{"next", "main", 1}}})
		b.fails(err, ErrNoPages)
	}
	t.Run("cancel", func(t *testing.T) {
		b, r := start(t)
		b.ok(b.Cancel(r.ID))
		b.ok(b.Cancel(r.ID))
		b.fails(b.Landed(r.ID), ErrUnknownRetrieval)
		b.stored("r", "main", 13)
		taken(b, 5, 6, 7, 8, 9)
		// The page of token 13 is written by the read, so no step may have it.
		_, err := b.Admit(Step{Segments: []Segment{{"r", "main", 1}}})
		b.fails(err, ErrReading)
		b.retrieve("next", nil, 0, Ready)
		out, err := b.AdmitRetrieve("r", At{}, nil, 0)
		b.ok(err)
		b.same("readiness", out.Readiness, Reading)
		b.ok(b.Failed(r.ID))
		b.grow("r", "main", 3)
		b.pages("r", "main", 1, 2)
		b.free(2)
	})
	t.Run("cancel and remove", func(t *testing.T) {
		b, r := start(t)
		b.ok(b.Cancel(r.ID))
		b.same("removed", b.remove("r", false), Removed{Cancel: []RetrievalID{r.ID}})
		b.ok(b.Cancel(r.ID))
		taken(b, 5, 6, 7, 8, 9, 1)
		b.ok(b.Failed(r.ID))
		b.freeList(3, 4, 2)
	})
	t.Run("remove and ingest again", func(t *testing.T) {
		b, r := start(t)
		b.remove("r", false)
		b.ingest("r")
		again := b.retrieve("r", peer(true, remote("main", 20, 11)), 0, Reading)
		b.same("local", again.Moves[0].Local, []page.Index{5, 6, 7})
		// An old answer does not meet the new request.
		b.fails(b.Landed(r.ID), ErrUnknownRetrieval)
		b.stored("r", "main", 0)
		b.ok(b.Failed(r.ID))
		b.ok(b.Landed(again.ID))
		b.stored("r", "main", 20)
	})
	t.Run("reset", func(t *testing.T) {
		b, r := start(t)
		b.same("removed", b.reset("r", false), Removed{Cancel: []RetrievalID{r.ID}})
		b.pages("r", "main", 1)
		b.grow("r", "main", 9)
		b.pages("r", "main", 1, 5)
		b.fails(b.Landed(r.ID), ErrUnknownRetrieval)
		taken(b, 6, 7, 8, 9)
		b.ok(b.Failed(r.ID))
		b.freeList(3, 4, 2)
	})
	t.Run("published tail", func(t *testing.T) {
		b := newBed(t, 10, 8)
		b.ingest("r")
		b.grow("r", "main", 13)
		p := b.publish("r", true)
		r := b.retrieve("r", peer(true, remote("main", 30, 11)), 0, Reading)
		b.same("removed", b.remove("r", false), Removed{Lives: []PublicationID{p.ID}, Cancel: []RetrievalID{r.ID}})
		b.same("counts", b.Counts(), Counts{Free: 5, Limbo: 1, Quarantine: 3, Sink: 1, Published: 2, Publications: 1, Retrievals: 1})
		b.ok(b.Failed(r.ID))
		b.same("counts", b.Counts(), Counts{Free: 7, Limbo: 2, Sink: 1, Published: 2, Publications: 1})
		b.Unsealed(p.ID)
		b.free(9)
	})
	t.Run("published tail, unsealed first", func(t *testing.T) {
		b := newBed(t, 10, 8)
		b.ingest("r")
		b.grow("r", "main", 13)
		p := b.publish("r", false)
		r := b.retrieve("r", peer(true, remote("main", 30, 11)), 0, Reading)
		b.same("removed", b.remove("r", false), Removed{Unseal: []PublicationID{p.ID}, Cancel: []RetrievalID{r.ID}})
		b.Unsealed(p.ID)
		b.same("counts", b.Counts(), Counts{Free: 6, Quarantine: 3, Sink: 1, Retrievals: 1})
		b.ok(b.Failed(r.ID))
		b.free(9)
	})
}

// A stream that starts over leaves what it had published to limbo.
func TestStartOver(t *testing.T) {
	b := newBed(t, 12, 8)
	b.ok(b.Ingest("r", RequestConfig{Needs: Needs{Labels: []id.Label{"main", "cfg"}}}))
	first := peer(true, remote("cfg", 8, 21), remote("main", 20, 11))
	b.ok(b.Landed(b.retrieve("r", first, 0, Reading).ID)) // main 1 2 3, cfg 4
	p := b.publish("r", true)

	// Too large a one is refused and changes nothing: 7 free, 9 wanted of
	// which none is there.
	second := peer(true, remote("cfg", 8, 21), remote("main", 64, 31))
	second.Name.Sequence++
	b.refused("r", second, ErrNoPages)
	b.stored("r", "main", 20)
	_, err := b.Publish("r", false)
	b.fails(err, ErrFinal)

	second = peer(true, remote("main", 16, 31))
	second.Name.Sequence++
	out, err := b.AdmitRetrieve("r", At{}, second, 0)
	b.ok(err)
	b.same("unseal", out.Unseal, []PublicationID{p.ID})
	b.same("local", out.Start.Moves[0].Local, []page.Index{5, 6})
	b.same("counts", b.Counts(), Counts{
		Free: 5, Owned: 3, Limbo: 3, Sink: 1, Published: 4, Requests: 1, Publications: 1, Retrievals: 1,
	})
	// cfg was not dropped: two publications name its page now.
	again := b.publish("r", false)
	b.same("epoch", again.ContentEpoch, p.ContentEpoch+1)
	b.same("streams", again.Streams, []Stream{
		{Label: "cfg", Ranks: []id.Rank{0}, Tokens: 8, Pages: []page.Index{4}},
		{Label: "main", Ranks: []id.Rank{0}, Pages: []page.Index{}},
	})
	b.ok(b.Landed(out.Start.ID))
	b.same("removed", b.remove("r", false), Removed{Unseal: []PublicationID{again.ID}})
	b.same("limbo", b.Counts().Limbo, 4)
	b.Unsealed(p.ID)
	b.same("limbo", b.Counts().Limbo, 1)
	b.free(10)
	b.Unsealed(again.ID)
	b.free(11)
}

func FuzzSource(f *testing.F) {
	f.Add([]byte("main\x00\x01\x00\x03\x01\x02\x03"), 20, 0, 100)
	f.Add([]byte{0, 0, 0, 0, 9, 9, 9}, 8, 8, 4)
	f.Add([]byte{255, 1, 2}, math.MaxInt, math.MinInt, -1)
	f.Fuzz(func(t *testing.T, data []byte, tokens, start, arena int) {
		b := newBed(t, 16, 8)
		b.ok(b.Ingest("r", RequestConfig{Needs: Needs{Labels: []id.Label{"main", "cfg"}}}))
		next := func() (x byte) {
			if len(data) > 0 {
				x, data = data[0], data[1:]
			}
			return x
		}
		src := peer(next()%2 == 0)
		src.Geometry.Layout.Pages = arena
		for range next() % 4 {
			s := Stream{
				Label:  []id.Label{"cfg", "main", "other", ""}[next()%4],
				Start:  start,
				Tokens: tokens + int(next()),
				State:  State(next() % 5),
			}
			for range next() % 4 {
				s.Ranks = append(s.Ranks, id.Rank(int8(next())))
			}
			for range next() % 32 {
				s.Pages = append(s.Pages, page.Index(next()))
			}
			src.Publication.Streams = append(src.Publication.Streams, s)
		}
		before := b.Counts()
		out, err := b.AdmitRetrieve("r", At{}, src, int(int8(next())))
		if err != nil {
			b.same("outcome", out, Outcome{})
			b.same("counts", b.Counts(), before)
			return
		}
		if out.Start == nil {
			return
		}
		for _, m := range out.Start.Moves {
			if n := page.Count(m.To, 8) - m.From/8; len(m.Local) != n || len(m.Remote) != n {
				t.Fatalf("%d remote and %d local pages for [%d, %d)", len(m.Remote), len(m.Local), m.From, m.To)
			}
			for _, x := range m.Remote {
				if x == page.Sink || int(x) >= arena {
					t.Fatalf("page %d of an arena of %d", x, arena)
				}
			}
		}
		b.ok(b.Landed(out.Start.ID))
	})
}
