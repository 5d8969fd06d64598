package manager

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Source is a publication of another node, as its reader knows it.
type Source struct {
	Name        id.Publication
	Geometry    page.Geometry // the owner's
	Publication Publication
}

// inspect checks all that a reader relies on; of an own publication, which is
// not read, only its name. It needs no lock.
func (m *Manager) inspect(s *Source, own bool) error {
	if s.Name.Owner.Node == "" || s.Name.Sequence == 0 {
		return &MalformedError{"name", fmt.Sprintf("%q names no publication", s.Name)}
	}
	if own {
		return nil
	}
	if fields := m.geometry.Differences(s.Geometry); len(fields) > 0 {
		return &IncompatibleError{Fields: fields}
	}
	if err := s.Geometry.Validate(); err != nil {
		return &MalformedError{"geometry", err.Error()}
	}
	streams := s.Publication.Streams
	if len(streams) > id.MaxLabels*id.MaxRanks {
		return &MalformedError{"streams", fmt.Sprintf("%d of them", len(streams))}
	}
	var runs []page.Run // of all lists that we could read
	var seen uint64     // ranks of the label so far
	for i := range streams {
		t := &streams[i]
		bad := func(field, format string, args ...any) error {
			return &MalformedError{field, fmt.Sprintf("stream %q: ", t.Label) + fmt.Sprintf(format, args...)}
		}
		if err := t.Label.Validate(); err != nil {
			return bad("label", "%v", err)
		}
		mask, problem := rankMask(t.Ranks, s.Geometry.WorldSize)
		if problem != "" {
			return bad("ranks", "%s", problem)
		}
		if i > 0 {
			switch last := &streams[i-1]; {
			case t.Label < last.Label:
				return bad("streams", "it comes after %q", last.Label)
			case t.Label > last.Label:
				seen = 0
			case t.Ranks[0] < last.Ranks[0]:
				return bad("streams", "rank %d comes after rank %d", t.Ranks[0], last.Ranks[0])
			}
		}
		if twice := seen & mask; twice != 0 {
			return bad("ranks", "%s appear twice", rankText(twice))
		}
		seen |= mask
		if t.State > OnHost {
			return bad("state", "%d is unknown", t.State)
		}
		if t.Start < 0 || t.Start%m.size != 0 {
			return bad("start", "%d is not at a page of %d tokens", t.Start, m.size)
		}
		if t.Prefix < 0 || t.Prefix%m.size != 0 || t.Prefix > 0 && t.Prefix >= t.Start {
			return bad("prefix", "%d is not whole pages in front of %d", t.Prefix, t.Start)
		}
		if t.Tokens < t.Start || t.Tokens == t.Start && t.Start > 0 { // of the last page nothing is released
			return bad("tokens", "%d, and what is kept starts at %d", t.Tokens, t.Start)
		}
		if t.State != Resident {
			continue // it names no pages that could be read
		}
		if held := t.Tokens - t.Start + t.Prefix; len(t.Pages) < page.Count(held, m.size) {
			return bad("pages", "%d of them, %d tokens need %d", len(t.Pages), held, page.Count(held, m.size))
		}
		for _, x := range t.Pages {
			if x == page.Sink {
				return bad("pages", "page 0 is nobody's")
			}
			if int64(x) >= int64(s.Geometry.Layout.Pages) {
				return bad("pages", "page %d of an arena of %d", x, s.Geometry.Layout.Pages)
			}
		}
		if mask&m.rankMask != 0 {
			runs = slices.AppendSeq(runs, page.AllRuns(t.Pages))
		}
	}
	slices.SortFunc(runs, func(a, b page.Run) int { return cmp.Compare(a.First, b.First) })
	for i := 1; i < len(runs); i++ {
		if before := runs[i-1]; uint64(before.First)+uint64(before.Count) > uint64(runs[i].First) {
			return &MalformedError{"pages", fmt.Sprintf("page %d appears twice", runs[i].First)}
		}
	}
	return nil
}

// find returns the stream of a label that all local ranks can be read from;
// nil if one of them is not published. The source has been inspected.
func (m *Manager) find(p *Publication, l id.Label) (*Stream, error) {
	i, _ := slices.BinarySearchFunc(p.Streams, l, func(s Stream, l id.Label) int {
		return strings.Compare(string(s.Label), string(l))
	})
	var all uint64
	var parts []string
	for ; i < len(p.Streams) && p.Streams[i].Label == l; i++ {
		mask, _ := rankMask(p.Streams[i].Ranks, id.MaxRanks)
		if mask&m.rankMask == m.rankMask {
			return &p.Streams[i], nil
		}
		all |= mask
		parts = append(parts, rankText(mask))
	}
	if all&m.rankMask == m.rankMask {
		// Our ranks have one page list a stream, theirs have several: no Move
		// could say that.
		return nil, &IncompatibleError{Fields: []page.Difference{{
			Field: "ranks", Ours: rankText(m.rankMask), Theirs: strings.Join(parts, ", "),
		}}}
	}
	return nil, nil
}
