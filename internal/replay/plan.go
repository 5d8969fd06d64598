package replay

import (
	"slices"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// views reads the plans of a step of one request: one view of each of the
// streams, in their order, and no other.
func (l *life) views(r id.Request, streams []stream, plans []*kvferrypb.PlanOutput) ([]view, error) {
	out := make([]view, len(streams))
	seen := make([]bool, len(streams))
	for _, p := range plans {
		tokens, err := ragged(p, "qo_indptr", p.GetQoIndptr(), len(p.GetTokenToPage()))
		if err != nil {
			return nil, err
		}
		pages, err := ragged(p, "paged_kv_indptr", p.GetPagedKvIndptr(), len(p.GetPagedKvIndices()))
		if err != nil {
			return nil, err
		}
		if len(p.GetTokenToSlot()) != len(p.GetTokenToPage()) {
			return nil, failf(CodeWrongAnswer, "plan of label %s has %d pages and %d slots for its tokens", p.GetLabel(), len(p.GetTokenToPage()), len(p.GetTokenToSlot()))
		}
		for n, v := range p.GetViews() {
			i := slices.IndexFunc(streams, func(s stream) bool { return string(s.label) == v.GetLabel() })
			if i < 0 || v.GetRequest() != string(r) || seen[i] {
				return nil, failf(CodeWrongAnswer, "plan of label %s has a view of request %s label %s, which was not asked for", p.GetLabel(), v.GetRequest(), v.GetLabel())
			}
			seen[i] = true
			out[i] = view{stream: streams[i], length: int(v.GetLength())}
			if out[i].pages, err = l.streamPages(streams[i], p.GetPagedKvIndices()[pages[n]:pages[n+1]]); err != nil {
				return nil, err
			}
			if out[i].places, err = l.places(streams[i], p.GetTokenToPage()[tokens[n]:tokens[n+1]], p.GetTokenToSlot()[tokens[n]:tokens[n+1]]); err != nil {
				return nil, err
			}
			if want := page.Count(out[i].length, l.layout().PageSize); len(out[i].pages) != want {
				return nil, failf(CodeWrongAnswer, "stream of label %s has %d pages for %d tokens, want %d", streams[i].label, len(out[i].pages), out[i].length, want)
			}
		}
	}
	if i := slices.Index(seen, false); i >= 0 {
		return nil, failf(CodeWrongAnswer, "no plan has a view of label %s", streams[i].label)
	}
	return out, nil
}

// ragged makes sure that an index vector cuts n things into as many parts as the
// plan has views.
func ragged(p *kvferrypb.PlanOutput, name string, indptr []int32, n int) ([]int32, error) {
	good := len(indptr) == len(p.GetViews())+1 && indptr[0] == 0 && int(indptr[len(indptr)-1]) == n && slices.IsSorted(indptr)
	if !good {
		return nil, failf(CodeWrongAnswer, "plan of label %s: %s does not cut %d into %d parts", p.GetLabel(), name, n, len(p.GetViews()))
	}
	return indptr, nil
}

// places are the write addresses of the new tokens of a stream.
func (l *life) places(s stream, pages, slots []uint32) ([]place, error) {
	places := make([]place, len(pages))
	for i := range places {
		places[i] = place{page.Index(pages[i]), int(slots[i])}
		if err := l.ranks[0].arena.usable(places[i]); err != nil {
			return nil, failf(CodeWrongAnswer, "plan of label %s: token %d: %w", s.label, i, err)
		}
	}
	return places, nil
}

// streamPages are the pages of a whole stream.
func (l *life) streamPages(s stream, indices []int32) ([]page.Index, error) {
	pages := make([]page.Index, len(indices))
	seen := make(map[page.Index]bool, len(indices))
	for i, n := range indices {
		pages[i] = page.Index(n)
		if err := l.ranks[0].arena.usable(place{page: pages[i]}); n < 0 || err != nil {
			return nil, failf(CodeWrongAnswer, "stream of label %s: page %d of the list is %d, which is none", s.label, i, n)
		}
		if seen[pages[i]] {
			return nil, failf(CodeWrongAnswer, "stream of label %s: page %d is in the list twice", s.label, n)
		}
		seen[pages[i]] = true
	}
	return pages, nil
}
