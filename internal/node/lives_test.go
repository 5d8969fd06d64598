package node

import (
	"fmt"
	"testing"

	"github.com/kvferry/kvferry/internal/id"
)

// TestLives: of so many nodes the newest life that has gone is remembered.
func TestLives(t *testing.T) {
	l := newLives(3)
	life := func(n int, i id.Incarnation) id.Life {
		return id.Life{Node: id.Node(fmt.Sprintf("n%d", n)), Incarnation: i}
	}
	for _, gone := range []id.Life{life(0, 5), life(1, 5), life(0, 9), life(0, 7), life(2, 5)} {
		l.add(gone)
	}
	for want, is := range map[bool][]id.Life{
		true:  {life(0, 9), life(0, 8), life(0, 5), life(0, 1), life(1, 5), life(2, 5)},
		false: {life(0, 10), life(1, 6), life(3, 1)},
	} {
		for _, x := range is {
			if l.has(x) != want {
				t.Errorf("%s has gone: %v, want %v", x, !want, want)
			}
		}
	}
	for i := range 100 {
		l.add(life(i, 50))
	}
	if len(l.newest) != 3 || len(l.order) != 3 || l.has(life(96, 1)) || !l.has(life(97, 50)) || !l.has(life(99, 50)) {
		t.Errorf("of many: %v, %v", l.newest, l.order)
	}
}
