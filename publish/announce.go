package publish

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
)

// toWire is the part of an announcement that comes from the publication. Page
// lists that are equal go in once.
func toWire(p manager.Publication) (wire.Announcement, error) {
	a := wire.Announcement{
		Request: p.Request.Hash(), ContentEpoch: p.ContentEpoch, Final: p.Final,
		Refs: make([]wire.Ref, 0, len(p.Streams)), Lists: make([][]page.Index, 0, 1),
	}
	if err := p.Request.Validate(); err != nil {
		return a, err
	}
	pages := 0
	for _, s := range p.Streams {
		r := wire.Ref{Label: s.Label, Prefix: s.Prefix, Start: s.Start, Tokens: s.Tokens, State: uint8(s.State), List: -1}
		for _, rank := range s.Ranks {
			if err := rank.Validate(); err != nil {
				return a, fmt.Errorf("label %q: %w", string(s.Label), err)
			}
			r.RankMask |= 1 << rank
		}
		r.List = slices.IndexFunc(a.Lists, func(l []page.Index) bool { return slices.Equal(l, s.Pages) })
		if r.List < 0 {
			r.List = len(a.Lists)
			a.Lists = append(a.Lists, s.Pages)
			pages += len(s.Pages)
		}
		a.Refs = append(a.Refs, r)
	}
	if pages > wire.MaxPages {
		return a, fmt.Errorf("%d pages, at most %d: %w", pages, wire.MaxPages, ErrFull)
	}
	a.Pages = uint32(pages)
	a.Digest = wire.Digest(a.Refs, a.Lists)
	return a, nil
}

// fromWire is the streams of an announcement; their pages are nil if the lists
// did not come along.
func fromWire(refs []wire.Ref, lists [][]page.Index) []manager.Stream {
	streams := make([]manager.Stream, len(refs))
	for i := range refs {
		r := &refs[i]
		s := manager.Stream{
			Label: r.Label, Ranks: make([]id.Rank, 0, bits.OnesCount64(r.RankMask)),
			Prefix: r.Prefix, Start: r.Start, Tokens: r.Tokens, State: manager.State(r.State),
		}
		for m := r.RankMask; m != 0; m &= m - 1 {
			s.Ranks = append(s.Ranks, id.Rank(bits.TrailingZeros64(m)))
		}
		if lists != nil {
			s.Pages = lists[r.List]
		}
		streams[i] = s
	}
	slices.SortFunc(streams, func(a, b manager.Stream) int {
		return cmp.Or(cmp.Compare(a.Label, b.Label), cmp.Compare(a.Ranks[0], b.Ranks[0]))
	})
	return streams
}

// departs names a stream in which next can't be what old has become: old has it,
// and next lacks it or has less tokens of it. Where old was final, nothing but
// state and pages may be another.
func departs(old, next []manager.Stream, final bool) (label id.Label, rank id.Rank, ok bool) {
	type key struct {
		label id.Label
		rank  id.Rank
	}
	left := make(map[key]*manager.Stream, len(next))
	for i := range next {
		for _, r := range next[i].Ranks {
			left[key{next[i].Label, r}] = &next[i]
		}
	}
	for i := range old {
		o := &old[i]
		for _, r := range o.Ranks {
			k := key{o.Label, r}
			n := left[k]
			if n == nil || n.Tokens < o.Tokens || final && (n.Tokens != o.Tokens || n.Prefix != o.Prefix || n.Start != o.Start) {
				return o.Label, r, true
			}
			delete(left, k)
		}
	}
	if final {
		for k := range left { // a stream more
			return k.label, k.rank, true
		}
	}
	return "", 0, false
}

// ttl is what is left until end, in milliseconds, rounded up.
func ttl(now, end time.Time) uint32 {
	left := end.Sub(now)
	if left <= 0 {
		return 0
	}
	return uint32(min(int64((left+time.Millisecond-1)/time.Millisecond), math.MaxUint32))
}
