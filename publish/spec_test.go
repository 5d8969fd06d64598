package publish

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// TestSpec has the numbered case of M*'s behaviour that is about merging what
// ranks have published.
func TestSpec(t *testing.T) {
	t.Run("094 merge", func(t *testing.T) {
		// Rank 0 and rank 1 are published by a node each; rank 0 twice.
		first, second := publication(1, "r", 40, false), publication(1, "r", 56, false)
		first.Streams[0].Ranks, second.Streams[0].Ranks = []id.Rank{0}, []id.Rank{0}
		other := publication(1, "r", 40, false)
		other.Streams[0].Ranks = []id.Rank{1}
		la, lb := NewLog(LogOptions{Life: alpha}), NewLog(LogOptions{Life: gamma})
		one, two, three := announce(t, la, t0, first, time.Minute), announce(t, la, t0, second, time.Minute), announce(t, lb, t0, other, time.Minute)
		items := slices.Concat(one.items, two.items, three.items)
		shown := func(order []int) map[id.Life]Entry {
			b := board(BoardOptions{})
			b.Member(t0, gamma, true)
			for _, i := range order {
				receive(t, b, t0, items[i])
			}
			all := make(map[id.Life]Entry)
			for _, e := range b.ByRequest(t0, "r") {
				all[e.Name.Owner] = e
			}
			return all
		}
		want := shown([]int{0, 1, 2})
		if len(want) != 2 || want[alpha].Sequence != 2 || want[alpha].Publication.Streams[0].Tokens != 56 || !slices.Equal(want[gamma].Publication.Streams[0].Ranks, []id.Rank{1}) {
			t.Fatalf("%+v, want both ranks, of the first the newer", want)
		}
		for range 200 { // any order, any repetition
			order := append(rand.Perm(3), rand.IntN(3), rand.IntN(3), rand.IntN(3))
			rand.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			if got := shown(order); !reflect.DeepEqual(got, want) {
				t.Fatalf("in the order %v: %+v, want %+v", order, got, want)
			}
		}
	})
}
