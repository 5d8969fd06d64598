package manager

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Source is a publication of another node, as its reader knows it.
type Source struct {
	Name        id.Publication
	Geometry    page.Geometry // the owner's
	Publication Publication
	// Rest are what the other nodes of the owner's group have published of the
	// request, when its ranks are spread over several: one publication a node,
	// of other ranks than the others'. They have no Rest.
	Rest []Source
}

// Final says that nothing of it grows any more.
func (s *Source) Final() bool {
	for i := range s.Rest {
		if !s.Rest[i].Publication.Final {
			return false
		}
	}
	return s.Publication.Final
}

// origin is the same whichever of the publications has the others as its Rest.
func (s *Source) origin() origin {
	o := origin{name: s.Name, epoch: s.Publication.ContentEpoch}
	if len(s.Rest) == 0 {
		return o
	}
	names := []id.Publication{s.Name}
	for i := range s.Rest {
		names = append(names, s.Rest[i].Name)
	}
	slices.SortFunc(names, func(a, b id.Publication) int { return strings.Compare(a.String(), b.String()) })
	o.name = names[0]
	for _, name := range names[1:] {
		o.rest += name.String() + " "
	}
	return o
}

// inspect checks all that a reader relies on; of an own publication, which is
// not read, only its name. It needs no lock.
func (m *Manager) inspect(s *Source, own bool) error {
	if err := m.inspectOne(s, own); err != nil || own {
		return err
	}
	if len(s.Rest) >= id.MaxRanks {
		return &MalformedError{"rest", fmt.Sprintf("%d publications", len(s.Rest))}
	}
	ranks := s.ranks()
	for i := range s.Rest {
		r := &s.Rest[i]
		if err := m.inspectOne(r, false); err != nil {
			return fmt.Errorf("%s: %w", r.Name, err)
		}
		if len(r.Rest) > 0 {
			return &MalformedError{"rest", "it has a rest of its own"}
		}
		if r.Publication.ContentEpoch != s.Publication.ContentEpoch {
			return fmt.Errorf("%s has content epoch %d, %s has %d: %w", s.Name, s.Publication.ContentEpoch, r.Name, r.Publication.ContentEpoch, ErrMixed)
		}
		theirs := r.ranks()
		if twice := ranks & theirs; twice != 0 {
			return &MalformedError{"ranks", fmt.Sprintf("%s of %s are another node's too", rankText(twice), r.Name)}
		}
		ranks |= theirs
	}
	return nil
}

// ranks are those of its own streams. It has been inspected.
func (s *Source) ranks() (mask uint64) {
	for _, t := range s.Publication.Streams {
		m, _ := rankMask(t.Ranks, id.MaxRanks)
		mask |= m
	}
	return mask
}

func (m *Manager) inspectOne(s *Source, own bool) error {
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

// offered is what a source has of one label for all local ranks: as much of it
// as each of them has.
type offered struct {
	parts    []offer
	start    int // tokens; of the one that has released most
	prefix   int
	tokens   int
	uneven   bool // some have more than that
	resident bool
}

// offer is one owner's stream.
type offer struct {
	owner  int // 0: the source itself, i: Rest[i-1]
	stream *Stream
	ranks  []id.Rank // local ones that it has
}

// find returns what there is of a label for the local ranks; nil if one of them
// is not published. The source has been inspected.
func (m *Manager) find(s *Source, l id.Label) (*offered, error) {
	var out offered
	missing := m.rankMask
	for owner := range len(s.Rest) + 1 {
		p := &s.Publication
		if owner > 0 {
			p = &s.Rest[owner-1].Publication
		}
		i, _ := slices.BinarySearchFunc(p.Streams, l, func(s Stream, l id.Label) int {
			return strings.Compare(string(s.Label), string(l))
		})
		for ; i < len(p.Streams) && p.Streams[i].Label == l; i++ {
			t := &p.Streams[i]
			mask, _ := rankMask(t.Ranks, id.MaxRanks)
			if mask &= m.rankMask; mask == 0 {
				continue
			}
			missing &^= mask
			if len(out.parts) == 0 {
				out.start, out.prefix, out.tokens, out.resident = t.Start, t.Prefix, t.Tokens, true
			}
			if t.Start > 0 && out.start > 0 && t.Prefix != out.prefix {
				return nil, &IncompatibleError{Fields: []page.Difference{{
					Field: "prefix", Ours: strconv.Itoa(out.prefix), Theirs: strconv.Itoa(t.Prefix),
				}}}
			}
			if t.Start > out.start {
				out.start, out.prefix = t.Start, t.Prefix
			}
			out.uneven = out.uneven || t.Tokens != out.tokens
			out.tokens = min(out.tokens, t.Tokens)
			out.resident = out.resident && t.State == Resident
			out.parts = append(out.parts, offer{owner: owner, stream: t, ranks: m.ranksOf(mask)})
		}
	}
	if missing != 0 || len(out.parts) == 0 || out.start > 0 && out.tokens <= out.start {
		return nil, nil //nolint:nilnil // not offered yet
	}
	return &out, nil
}

// ranksOf lists the local ranks in a mask.
func (m *Manager) ranksOf(mask uint64) []id.Rank {
	if mask == m.rankMask {
		return slices.Clone(m.ranks)
	}
	var list []id.Rank
	for _, r := range m.ranks {
		if mask&(1<<r) != 0 {
			list = append(list, r)
		}
	}
	return list
}
