package manager

import (
	"iter"

	"github.com/kvferry/kvferry/internal/page"
)

// fifo is a queue of pages, each of which can leave it from anywhere: those
// that are free, first freed first.
type fifo struct {
	// links is by page; a page that is not in the queue is its own neighbour. The
	// last one is no page but both ends: behind it is the first, before it the last.
	links []link
	n     int
}

type link struct{ before, behind page.Index }

// newFIFO has room for the pages below the given number, and holds those from
// first on.
func newFIFO(first, pages page.Index) fifo {
	f := fifo{links: make([]link, pages+1)}
	for p := range f.links {
		f.links[p] = link{page.Index(p), page.Index(p)}
	}
	for p := first; p < pages; p++ {
		f.push(p)
	}
	return f
}

// room is how many pages there are, in it or not.
func (f *fifo) room() int { return len(f.links) - 1 }

func (f *fifo) has(p page.Index) bool { return f.links[p].behind != p }

// first of them; there is one.
func (f *fifo) first() page.Index { return f.links[f.room()].behind }

// push makes the page the last one; it is not in the queue.
func (f *fifo) push(p page.Index) {
	end := page.Index(f.room())
	last := f.links[end].before
	f.links[p] = link{last, end}
	f.links[last].behind = p
	f.links[end].before = p
	f.n++
}

// remove takes a page out; it is in the queue.
func (f *fifo) remove(p page.Index) {
	l := f.links[p]
	f.links[l.before].behind = l.behind
	f.links[l.behind].before = l.before
	f.links[p] = link{p, p}
	f.n--
}

// pop takes the first one out; there is one.
func (f *fifo) pop() page.Index {
	p := f.first()
	f.remove(p)
	return p
}

// all yields them, first freed first. The queue must not change meanwhile.
func (f *fifo) all() iter.Seq[page.Index] {
	return func(yield func(page.Index) bool) {
		end := page.Index(f.room())
		for p := f.links[end].behind; p != end && yield(p); p = f.links[p].behind {
		}
	}
}
