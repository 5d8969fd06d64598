package transfer

import (
	"fmt"
	"math"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Side is one end of a pull: how its arena lies, and the pages of the stream.
type Side struct {
	Layout page.Layout
	Base   int64 // offset of the arena in its region, bytes
	Start  int   // stream position of the first token of Pages[0]; whole pages
	Pages  []page.Index
}

// Copies appends to dst the fewest contiguous copies that move the tokens
// [from,to) of all layers, K and V, from remote to local, cut at token
// borders. Pages that are neighbours in both lists and in both arenas, in
// either direction, are moved as one; the lists are not sorted for it. Each
// side's addresses come from its own layout and lie within Base and
// Layout.Bytes(). The copies are ordered by layer, then by stream position.
//
// It allocates only to grow dst, and returns dst as it was with an error. The
// layouts must agree in all but Pages, else the error wraps
// [page.ErrInvalid]; it wraps [ErrRange] if a side does not have the tokens,
// or names the sink or a page beyond its arena.
func Copies(dst []Copy, rank id.Rank, remote, local Side, from, to int) ([]Copy, error) {
	if err := agree(rank, remote, local, from, to); err != nil {
		return dst, fmt.Errorf("plan copies of rank %d, tokens %d to %d: %w", int(rank), from, to, err)
	}
	if from == to {
		return dst, nil
	}

	// All layers look alike, so the first one is planned and then repeated. No
	// copy reaches from one layer into the next: the sink lies between them.
	layout := local.Layout
	size, bytes := layout.PageSize, layout.LayerPageBytes()
	remotes := remote.Pages[(from-remote.Start)/size : page.Count(to-remote.Start, size)]
	locals := local.Pages[(from-local.Start)/size : page.Count(to-local.Start, size)]
	first := len(dst)
	open := Copy{Rank: rank} // the latest copy, which may still grow
	for i, r := range remotes {
		l := locals[i]
		if r == page.Sink || l == page.Sink || int64(r) >= int64(remote.Layout.Pages) || int64(l) >= int64(layout.Pages) {
			return dst[:first], outside(rank, remote, local, r, l)
		}
		chunks := page.Chunks{Bytes: bytes, Count: 1}
		if i == 0 || i == len(remotes)-1 {
			t0, t1 := 0, size
			if i == 0 {
				t0 = from % size
			}
			if i == len(remotes)-1 {
				t1 = (to-1)%size + 1
			}
			chunks = layout.Chunks(0, 0, t0, t1)
		}
		for c := range chunks.Count {
			next := Copy{
				Rank:   rank,
				Remote: remote.Base + int64(r)*bytes + chunks.At(c),
				Local:  local.Base + int64(l)*bytes + chunks.At(c),
				Bytes:  chunks.Bytes,
			}
			switch {
			case open.Remote+open.Bytes == next.Remote && open.Local+open.Bytes == next.Local:
				open.Bytes += next.Bytes
			case next.Remote+next.Bytes == open.Remote && next.Local+next.Bytes == open.Local:
				next.Bytes += open.Bytes
				open = next
			default:
				if open.Bytes > 0 {
					dst = append(dst, open)
				}
				open = next
			}
		}
	}
	dst = append(dst, open)

	layer := dst[first:]
	dst = slices.Grow(dst, len(layer)*(layout.Layers-1))
	far, near := remote.Layout.LayerBytes(), layout.LayerBytes()
	for n := int64(1); n < int64(layout.Layers); n++ {
		for _, c := range layer {
			c.Remote += n * far
			c.Local += n * near
			dst = append(dst, c)
		}
	}
	return dst, nil
}

// agree checks all that does not depend on a single page.
func agree(rank id.Rank, remote, local Side, from, to int) error {
	if err := rank.Validate(); err != nil {
		return err
	}
	if from > to {
		return fmt.Errorf("the range ends before it starts: %w", ErrRange)
	}
	if err := remote.holds("remote", from, to); err != nil {
		return err
	}
	if err := local.holds("local", from, to); err != nil {
		return err
	}
	theirs := remote.Layout
	theirs.Pages = local.Layout.Pages
	if theirs != local.Layout {
		return fmt.Errorf("layouts differ, %v: %w", page.Geometry{Layout: local.Layout}.Differences(page.Geometry{Layout: theirs}), page.ErrInvalid)
	}
	return nil
}

// holds checks that the side's list reaches over the tokens [from,to), and
// that no address of its arena leaves 63 bits.
func (s *Side) holds(name string, from, to int) error {
	if err := s.Layout.Validate(); err != nil {
		return fmt.Errorf("%s layout: %w", name, err)
	}
	if s.Base < 0 || s.Base > math.MaxInt64-s.Layout.Bytes() {
		return fmt.Errorf("%s arena of %d bytes at offset %d: %w", name, s.Layout.Bytes(), s.Base, ErrRange)
	}
	if s.Start < 0 || s.Start%s.Layout.PageSize != 0 || from < s.Start {
		return fmt.Errorf("%s pages start at token %d, want a multiple of %d in 0..%d: %w", name, s.Start, s.Layout.PageSize, from, ErrRange)
	}
	if want := page.Count(to-s.Start, s.Layout.PageSize); want > len(s.Pages) && from < to {
		return fmt.Errorf("%s has %d pages, want %d: %w", name, len(s.Pages), want, ErrRange)
	}
	return nil
}

// outside is apart from the loop, whose every instruction is paid per page.
func outside(rank id.Rank, remote, local Side, r, l page.Index) error {
	return fmt.Errorf("plan copies of rank %d: remote page %d of %d to local page %d of %d, want pages from 1 up: %w", int(rank), r, remote.Layout.Pages, l, local.Layout.Pages, ErrRange)
}
