package publish

import (
	"math"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
)

// TestSequences compares the set of ranges with a plain one.
func TestSequences(t *testing.T) {
	const most = 40
	rapid.Check(t, func(t *rapid.T) {
		var q sequences
		var plain [most + 2]bool
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				first := rapid.IntRange(1, most).Draw(t, "first")
				last := rapid.IntRange(first, min(most, first+5)).Draw(t, "last")
				if first == last {
					if before := len(q.ranges); q.splits(id.Sequence(first)) != func() bool {
						c := sequences{ranges: slices.Clone(q.ranges), count: q.count}
						c.add(id.Sequence(first), id.Sequence(first))
						return len(c.ranges) > before
					}() {
						t.Fatalf("%v: splits(%d) is wrong", q.ranges, first)
					}
				}
				q.add(id.Sequence(first), id.Sequence(last))
				for s := first; s <= last; s++ {
					plain[s] = true
				}
			},
			"remove": func(t *rapid.T) {
				s := rapid.IntRange(1, most).Draw(t, "s")
				before, parts := len(q.ranges), q.parts(id.Sequence(s))
				q.remove(id.Sequence(s))
				plain[s] = false
				if parts != (len(q.ranges) > before) {
					t.Fatalf("%v: parts(%d) was %v", q.ranges, s, parts)
				}
			},
			"cut": func(t *rapid.T) {
				s := rapid.IntRange(0, most).Draw(t, "s")
				q.cut(id.Sequence(s))
				clear(plain[:s+1])
			},
			"": func(t *rapid.T) {
				count, greatest := uint64(0), id.Sequence(0)
				var missing []id.Sequence
				for s := 1; s <= most; s++ {
					if plain[s] {
						count++
						greatest = id.Sequence(s)
					} else {
						missing = append(missing, id.Sequence(s))
					}
					if q.has(id.Sequence(s)) != plain[s] {
						t.Fatalf("%v: has(%d) = %v", q.ranges, s, !plain[s])
					}
				}
				if q.count != count || q.max() != greatest {
					t.Fatalf("%v: count %d, max %d, want %d and %d", q.ranges, q.count, q.max(), count, greatest)
				}
				for i, r := range q.ranges {
					if r.first > r.last || i > 0 && r.first <= q.ranges[i-1].last+1 {
						t.Fatalf("%v: not in order", q.ranges)
					}
				}
				limit := rapid.IntRange(0, most).Draw(t, "limit")
				if got, n := q.missing(most, limit); n != uint64(len(missing)) || !slices.Equal(got, missing[:min(limit, len(missing))]) {
					t.Fatalf("%v: missing = %v, %d, want %v", q.ranges, got, n, missing)
				}
			},
		})
	})
}

func TestSequencesAtTheEnds(t *testing.T) {
	const last = id.Sequence(math.MaxUint64)
	var q sequences
	q.add(1, 0)
	q.add(0, 5)
	if len(q.ranges) != 0 {
		t.Errorf("%v: empty ranges were added", q.ranges)
	}
	q.add(last, last)
	q.add(1, 1)
	if got, n := q.missing(last, 2); n != uint64(last)-2 || !slices.Equal(got, []id.Sequence{2, 3}) {
		t.Errorf("missing = %v, %d", got, n)
	}
	q.add(2, last-2)
	if got, n := q.missing(last, 300); n != 1 || !slices.Equal(got, []id.Sequence{last - 1}) {
		t.Errorf("missing = %v, %d", got, n)
	}
	q.add(2, last-1)
	q.remove(last)
	if got, n := q.missing(last, 300); n != 1 || !slices.Equal(got, []id.Sequence{last}) {
		t.Errorf("missing = %v, %d", got, n)
	}
	q.add(last, last)
	if len(q.ranges) != 1 || q.count != uint64(last) {
		t.Errorf("%v: count %d", q.ranges, q.count)
	}
	if got, n := q.missing(last, 2); n != 0 || got != nil {
		t.Errorf("missing = %v, %d", got, n)
	}
}
