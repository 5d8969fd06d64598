package publish

import (
	"iter"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
)

// sequences is a set of sequences as ranges. An owner uses its sequences one
// after the other, so a replica's set has one range more than gaps, however
// many sequences it has seen.
type sequences struct {
	ranges []span // ascending, neither overlapping nor touching
	count  uint64
}

// span is first to last, both in it.
type span struct{ first, last id.Sequence }

// at returns the index of the first range that ends at s or after it.
func (q *sequences) at(s id.Sequence) int {
	// Most questions are about the end.
	if n := len(q.ranges); n == 0 || q.ranges[n-1].last < s {
		return n
	}
	i, _ := slices.BinarySearchFunc(q.ranges, s, func(r span, s id.Sequence) int {
		switch {
		case r.last < s:
			return -1
		case r.last > s:
			return 1
		}
		return 0
	})
	return i
}

func (q *sequences) has(s id.Sequence) bool {
	i := q.at(s)
	return i < len(q.ranges) && q.ranges[i].first <= s
}

// max is the greatest of the set, 0 if it is empty.
func (q *sequences) max() id.Sequence {
	if len(q.ranges) == 0 {
		return 0
	}
	return q.ranges[len(q.ranges)-1].last
}

// splits says whether adding s would make a range more.
func (q *sequences) splits(s id.Sequence) bool {
	i := q.at(s)
	if i < len(q.ranges) && (q.ranges[i].first <= s || q.ranges[i].first == s+1) {
		return false
	}
	return i == 0 || q.ranges[i-1].last+1 != s
}

// parts says whether removing s would make a range more.
func (q *sequences) parts(s id.Sequence) bool {
	i := q.at(s)
	return i < len(q.ranges) && q.ranges[i].first < s && s < q.ranges[i].last
}

// add puts first to last in, which may be partly in.
func (q *sequences) add(first, last id.Sequence) {
	if first > last || first == 0 {
		return
	}
	i := q.at(first - 1) // also the range that first touches
	j := i
	in := span{first, last}
	for ; j < len(q.ranges) && (q.ranges[j].first <= last || q.ranges[j].first-1 == last); j++ {
		r := q.ranges[j]
		in = span{min(in.first, r.first), max(in.last, r.last)}
		q.count -= r.size()
	}
	q.count += in.size()
	q.ranges = slices.Replace(q.ranges, i, j, in)
}

// remove takes s out.
func (q *sequences) remove(s id.Sequence) {
	i := q.at(s)
	if i == len(q.ranges) || q.ranges[i].first > s {
		return
	}
	r := q.ranges[i]
	var left []span
	if r.first < s {
		left = append(left, span{r.first, s - 1})
	}
	if s < r.last {
		left = append(left, span{s + 1, r.last})
	}
	q.ranges = slices.Replace(q.ranges, i, i+1, left...)
	q.count--
}

// cut takes everything up to s out.
func (q *sequences) cut(s id.Sequence) {
	i := q.at(s)
	for _, r := range q.ranges[:i] {
		q.count -= r.size()
	}
	q.ranges = slices.Delete(q.ranges, 0, i)
	if len(q.ranges) == 0 || q.ranges[0].first > s {
		return
	}
	r := &q.ranges[0]
	q.count -= span{r.first, s}.size()
	if r.first = s + 1; s == r.last {
		q.ranges = slices.Delete(q.ranges, 0, 1)
	}
}

// all goes through the set upwards; it must not change meanwhile.
func (q *sequences) all() iter.Seq[id.Sequence] {
	return func(yield func(id.Sequence) bool) {
		for _, r := range q.ranges {
			for i := range r.size() {
				if !yield(r.first + id.Sequence(i)) {
					return
				}
			}
		}
	}
}

// gaps returns what of 1 to upTo is not in.
func (q *sequences) gaps(upTo id.Sequence) (gaps []span) {
	next := id.Sequence(1)
	for _, r := range q.ranges {
		if r.first > upTo {
			break
		}
		if next < r.first {
			gaps = append(gaps, span{next, r.first - 1})
		}
		if next = r.last + 1; next == 0 { // it was the last there is
			return gaps
		}
	}
	if next <= upTo {
		gaps = append(gaps, span{next, upTo})
	}
	return gaps
}

// missing returns how many of 1 to upTo are not in, and the first of them, at
// most limit.
func (q *sequences) missing(upTo id.Sequence, limit int) (first []id.Sequence, count uint64) {
	for _, g := range q.gaps(upTo) {
		count += g.size()
		for i := uint64(0); i < g.size() && len(first) < limit; i++ {
			first = append(first, g.first+id.Sequence(i))
		}
	}
	return first, count
}

func (s span) size() uint64 { return uint64(s.last-s.first) + 1 }
