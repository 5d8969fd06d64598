package manager

import "github.com/kvferry/kvferry/internal/page"

// fifo is a queue of pages with room for a fixed number: those that are free,
// first freed first.
type fifo struct {
	ring []page.Index
	head int
	n    int // in it, from head on
}

// newFIFO holds pages from first on, and has room for no more.
func newFIFO(first page.Index, pages int) fifo {
	f := fifo{ring: make([]page.Index, pages), n: pages}
	for i := range f.ring {
		f.ring[i] = first + page.Index(i)
	}
	return f
}

// pop takes the first; there is one.
func (f *fifo) pop() page.Index {
	x := f.ring[f.head]
	if f.head++; f.head == len(f.ring) {
		f.head = 0
	}
	f.n--
	return x
}

// push appends one; there is room.
func (f *fifo) push(x page.Index) {
	f.ring[f.index(f.n)] = x
	f.n++
}

// at returns the i-th of those in it.
func (f *fifo) at(i int) page.Index { return f.ring[f.index(i)] }

func (f *fifo) index(i int) int {
	if i += f.head; i >= len(f.ring) {
		i -= len(f.ring)
	}
	return i
}
