package manager

import (
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
)

// packing is the scratch memory that pack works in.
type packing struct {
	index  map[id.Label]int32 // label to group
	groups []group
	of     []int32 // a segment's group
	order  []int32 // groups in pack order
}

// group is the segments of one label.
type group struct {
	label    id.Label
	segments int32
	combined bool
	next     int32 // where its next segment goes in pack order
}

// pack sorts the segments by plan label: first the combined ones, then each
// label that is in none under its own name.
func (k *packing) pack(a *step, s *Step) error {
	k.group(s.Segments)
	k.order = k.order[:0]
	planned := 0 // segments
	plan := func(l id.Label, groups []int32) {
		from := planned
		for _, g := range groups {
			k.groups[g].next = int32(planned)
			planned += int(k.groups[g].segments)
		}
		a.plans = append(a.plans, packed{l, from, planned})
	}
	for _, c := range s.Combined {
		if err := c.Label.Validate(); err != nil {
			return fmt.Errorf("%w: combined label: %w", ErrInvalid, err)
		}
		if len(c.Sources) == 0 {
			return fmt.Errorf("%w: combined label %q has no sources", ErrInvalid, c.Label)
		}
		from := len(k.order)
		for _, l := range c.Sources {
			g, ok := k.index[l]
			if !ok {
				return fmt.Errorf("%w: combined label %q: source %q has no segment", ErrInvalid, c.Label, l)
			}
			if k.groups[g].combined {
				return fmt.Errorf("%w: combined label %q: source %q is used twice", ErrInvalid, c.Label, l)
			}
			k.groups[g].combined = true
			k.order = append(k.order, g)
		}
		plan(c.Label, k.order[from:])
	}
	for g := range k.groups {
		if !k.groups[g].combined {
			k.order = append(k.order, int32(g))
			plan(k.groups[g].label, k.order[len(k.order)-1:])
		}
	}
	if len(s.Combined) > 0 {
		clear(k.index)
		for i, p := range a.plans {
			if _, ok := k.index[p.label]; ok {
				return fmt.Errorf("%w: combined label %q is also another plan's", ErrInvalid, p.label)
			}
			k.index[p.label] = int32(i)
		}
	}
	if len(k.groups) < 2 {
		return nil
	}
	a.order = slices.Grow(a.order[:0], len(a.segments))[:len(a.segments)]
	for i := range a.segments {
		g := &k.groups[k.of[i]]
		a.order[g.next] = int32(i)
		g.next++
	}
	return nil
}

// group numbers the labels in the order in which they appear.
func (k *packing) group(segments []Segment) {
	if k.index == nil {
		k.index = make(map[id.Label]int32)
	}
	clear(k.index)
	clear(k.groups) // they hold strings
	k.groups = k.groups[:0]
	k.of = k.of[:0]
	var last int32
	for i, g := range segments {
		if i == 0 || g.Label != segments[i-1].Label {
			n, ok := k.index[g.Label]
			if !ok {
				n = int32(len(k.groups))
				k.index[g.Label] = n
				k.groups = append(k.groups, group{label: g.Label})
			}
			last = n
		}
		k.groups[last].segments++
		k.of = append(k.of, last)
	}
}
