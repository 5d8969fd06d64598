package node

import "github.com/kvferry/kvferry/internal/id"

// lives remembers the newest life of nodes that have gone, of so many nodes: of
// more, those that came first are forgotten. Its owner guards it.
type lives struct {
	most   int
	newest map[id.Node]id.Incarnation
	order  []id.Node
}

func newLives(most int) lives { return lives{most: most, newest: make(map[id.Node]id.Incarnation)} }

func (l *lives) add(gone id.Life) {
	before, known := l.newest[gone.Node]
	if !known {
		if len(l.order) >= l.most {
			delete(l.newest, l.order[0])
			l.order = l.order[1:]
		}
		l.order = append(l.order, gone.Node)
	}
	l.newest[gone.Node] = max(before, gone.Incarnation)
}

// has says that this life has gone, or was before one that has.
func (l *lives) has(life id.Life) bool {
	newest, known := l.newest[life.Node]
	return known && life.Incarnation <= newest
}
