package manager

import (
	"math"
	"math/bits"

	"github.com/kvferry/kvferry/internal/page"
)

// bitmap has a bit a page, so that neighbours are found many at a time.
type bitmap []uint64

func newBitmap(pages int) bitmap { return make(bitmap, (pages+63)/64) }

func (b bitmap) has(p page.Index) bool { return b[p/64]>>(p%64)&1 != 0 }

func (b bitmap) set(p page.Index) { b[p/64] |= 1 << (p % 64) }

func (b bitmap) clear(p page.Index) { b[p/64] &^= 1 << (p % 64) }

// clearRun clears the bits of neighbours.
func (b bitmap) clearRun(r page.Run) {
	for p, end := r.First, r.First+page.Index(r.Count); p < end; p = (p/64 + 1) * 64 {
		mask := ^uint64(0) << (p % 64)
		if end/64 == p/64 {
			mask &^= ^uint64(0) << (end % 64)
		}
		b[p/64] &^= mask
	}
}

// ahead counts the neighbours that are in it from p on, p included, and looks
// no further than at so many.
func (b bitmap) ahead(p page.Index, most uint32) (n uint32) {
	for w := int(p / 64); w < len(b) && n < most; w++ {
		ones := bits.TrailingZeros64(^(b[w] >> (p % 64)))
		n, p = n+uint32(ones), p+page.Index(ones)
		if ones == 0 || p%64 != 0 {
			break
		}
	}
	return min(n, most)
}

// start is the first of the neighbours that p, which is in it, belongs to.
func (b bitmap) start(p page.Index) page.Index {
	for {
		ones := bits.LeadingZeros64(^(b[p/64] << (63 - p%64)))
		before := p + 1 - page.Index(ones) // the first one of this word
		if before%64 != 0 || before == 0 || !b.has(before-1) {
			return before
		}
		p = before - 1
	}
}

// longest is the number of pages from which on one stretch is as good as any
// longer one: a copy of so many pages gains nothing from being longer.
const longest = 255

// stretches are free neighbours, sorted by their number.
type stretches struct {
	list  []stretch
	heads [longest + 1]int32         // by min(pages, longest): the one put in last, as an index in list plus 1
	any   [(longest + 1) / 64]uint64 // which heads there are
}

type stretch struct {
	page.Run
	next int32 // of as many pages, as heads
}

// gather replaces what there is by the stretches of the bitmap, from a page on
// that begins one, and once around. It begins no other one after so many words
// and stretches as effort says.
func (s *stretches) gather(b bitmap, from page.Index, effort int) {
	s.list, s.heads, s.any = s.list[:0], [len(s.heads)]int32{}, [len(s.any)]uint64{}
	for _, part := range [...]page.Run{{First: from, Count: uint32(len(b)*64) - uint32(from)}, {Count: uint32(from)}} {
		end := part.First + page.Index(part.Count)
		for p := part.First; p < end && effort > 0; effort-- {
			word := b[p/64] >> (p % 64)
			if word == 0 {
				p = (p/64 + 1) * 64
				continue
			}
			if p += page.Index(bits.TrailingZeros64(word)); p >= end {
				break // it is the very first one
			}
			n := b.ahead(p, math.MaxUint32)
			s.list = append(s.list, stretch{Run: page.Run{First: p, Count: n}})
			p += page.Index(n)
			effort -= int(n / 64)
		}
	}
	for i := len(s.list); i > 0; i-- { // the first one seen is put in last, and taken first
		s.put(i)
	}
}

// put sorts a stretch in, by its index in list plus 1.
func (s *stretches) put(i int) {
	e := &s.list[i-1]
	k := min(e.Count, longest)
	e.next = s.heads[k]
	s.heads[k] = int32(i)
	s.any[k/64] |= 1 << (k % 64)
}

// take returns at most so many neighbours, and removes them: from the shortest
// stretch that has as many, else all of the longest. None: nothing is left.
func (s *stretches) take(pages uint32) page.Run {
	k, ok := s.atLeast(min(pages, longest))
	if !ok {
		if k, ok = s.most(); !ok {
			return page.Run{}
		}
	}
	i := s.heads[k]
	e := &s.list[i-1]
	if s.heads[k] = e.next; e.next == 0 {
		s.any[k/64] &^= 1 << (k % 64)
	}
	got := page.Run{First: e.First, Count: min(pages, e.Count)}
	if e.Count > got.Count {
		e.First, e.Count = e.First+page.Index(got.Count), e.Count-got.Count
		s.put(int(i))
	}
	return got
}

func (s *stretches) atLeast(k uint32) (uint32, bool) {
	mask := ^uint64(0) << (k % 64)
	for w := k / 64; w < uint32(len(s.any)); w++ {
		if found := s.any[w] & mask; found != 0 {
			return w*64 + uint32(bits.TrailingZeros64(found)), true
		}
		mask = ^uint64(0)
	}
	return 0, false
}

func (s *stretches) most() (uint32, bool) {
	for w := len(s.any) - 1; w >= 0; w-- {
		if s.any[w] != 0 {
			return uint32(w*64 + bits.Len64(s.any[w]) - 1), true
		}
	}
	return 0, false
}
