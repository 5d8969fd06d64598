package publish

import (
	"cmp"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// anyStreams has some labels on some of 64 ranks, some of which share their
// pages, in the order that the manager gives.
func anyStreams(t *rapid.T) (streams []manager.Stream) {
	lists := make([][]page.Index, rapid.IntRange(1, 4).Draw(t, "lists"))
	for i := range lists {
		switch n := rapid.IntRange(0, 300).Draw(t, "pages"); rapid.IntRange(0, 2).Draw(t, "shape") {
		case 0:
			lists[i] = scattered(n)
		case 1:
			lists[i] = make([]page.Index, n)
			for j := range lists[i] {
				lists[i][j] = page.Index(5000*i + n - j)
			}
		default:
			lists[i] = make([]page.Index, n)
			for j := range lists[i] {
				lists[i][j] = page.Index(7000*i + j)
			}
		}
	}
	for _, label := range rapid.SliceOfNDistinct(rapid.SampledFrom([]id.Label{id.Main, "draft", "é", "cfg"}), 1, 4, rapid.ID).Draw(t, "labels") {
		left := rapid.Permutation(seq(id.MaxRanks)).Draw(t, "ranks")
		for len(left) > 0 && (len(streams) == 0 || rapid.Bool().Draw(t, "more")) {
			n := rapid.IntRange(1, len(left)).Draw(t, "n")
			ranks := slices.Sorted(slices.Values(left[:n]))
			left = left[n:]
			s := manager.Stream{
				Label: label, Ranks: ranks, Pages: rapid.SampledFrom(lists).Draw(t, "list"),
				Tokens: rapid.IntRange(0, 1<<31-1).Draw(t, "tokens"), State: manager.State(rapid.IntRange(0, 2).Draw(t, "state")),
			}
			if s.Start = rapid.IntRange(0, s.Tokens).Draw(t, "start"); s.Start > 0 {
				s.Prefix = rapid.IntRange(0, s.Start-1).Draw(t, "prefix")
			}
			if s.State != manager.Resident {
				s.Pages = []page.Index{}
			}
			streams = append(streams, s)
		}
	}
	slices.SortFunc(streams, func(a, b manager.Stream) int {
		return cmp.Or(cmp.Compare(a.Label, b.Label), cmp.Compare(a.Ranks[0], b.Ranks[0]))
	})
	return streams
}

func seq(n int) []id.Rank {
	ranks := make([]id.Rank, n)
	for i := range ranks {
		ranks[i] = id.Rank(i)
	}
	return ranks
}

// TestStreamsArriveAsTheyWere: whatever labels on whatever ranks with whatever
// pages: a board shows what was published, by gossip or, where it was too long
// for that, after a lookup.
func TestStreamsArriveAsTheyWere(t *testing.T) {
	test := t
	rapid.Check(t, func(t *rapid.T) {
		l, b := NewLog(LogOptions{Life: alpha}), board(BoardOptions{})
		want := manager.Publication{ID: 1, Request: "r", ContentEpoch: 9, Final: rapid.Bool().Draw(t, "final"), Streams: anyStreams(t)}
		a := announce(test, l, t0, want, time.Minute)
		receive(test, b, t0, a.items...)
		want.ID, want.Request = 0, ""
		e, err := b.ByName(t0, a.Name)
		if err != nil {
			t.Fatal(err)
		}
		pages := want
		if !e.HasTable {
			if len(a.Full) <= wire.InlineBytes {
				t.Fatalf("%d bytes came without their pages", len(a.Full))
			}
			isResident := func(s manager.Stream) bool { return s.State == manager.Resident }
			if len(e.Publication.Streams) > 0 && !slices.ContainsFunc(want.Streams, isResident) {
				t.Fatal("there are no pages, and they are missing")
			}
			pages.Streams = slices.Clone(want.Streams)
			for i := range pages.Streams {
				pages.Streams[i].Pages = nil
			}
			if len(e.Publication.Streams) == 0 {
				pages.Streams = []manager.Stream{}
			}
		}
		if !reflect.DeepEqual(e.Publication, pages) {
			t.Fatalf("gossip:\n%+v, want\n%+v", e.Publication, pages)
		}
		full, name, err := l.Find(t0, 0, "r")
		if err != nil || name != a.Name {
			t.Fatal(name, err)
		}
		want.Request = "r"
		if e, err := b.Learn(t0, alpha, full, "r"); err != nil || !e.HasTable || !reflect.DeepEqual(e.Publication, want) {
			t.Fatalf("lookup: %v\n%+v, want\n%+v", err, e.Publication, want)
		}
		if e, err := b.ByName(t0, a.Name); err != nil || !e.HasTable || !reflect.DeepEqual(e.Publication, want) {
			t.Fatalf("afterwards: %v\n%+v, want\n%+v", err, e.Publication, want)
		}
	})
}
