package manager

import (
	"errors"
	"fmt"
	"slices"

	"github.com/kvferry/kvferry/internal/page"
)

// place is the one place that a page is in.
type place uint8

const (
	free       place = iota
	owned            // by a stream, or by a retrieval, a step, or a reload that runs
	limbo            // by nobody, but named by a live publication
	quarantine       // may still be written by a read that was given up, or copied from
	sink             // takes the padding of captured steps
	engine           // kept by the engine, where it chooses the pages
	places
)

func (p place) String() string {
	return [...]string{"free", "owned", "limbo", "quarantine", "sink", "engine", "nowhere"}[min(p, places)]
}

var errArena = errors.New("page is not where it should be")

// arena knows the place of every page and hands out free ones: first freed
// first, or such as are neighbours where others are. Where the engine chooses, no
// page is ever free: what would be is the engine's, once that was told so. Whatever
// contradicts that is refused and changes nothing.
type arena struct {
	pages     []pageState
	queue     fifo      // the free pages: counts[free] of them
	free      bitmap    // the same ones
	found     stretches // of the free pages, while takeLike looks for some
	counts    [places]int
	published int          // pages with holds
	chosen    bool         // the engine chooses
	returned  []page.Index // the engine's, which has not been told yet
}

type pageState struct {
	place  place
	untold bool   // it is in returned
	holds  uint32 // live publications that name the page
}

func newArena(pages int, chosen bool) arena {
	first, to := page.Sink+1, free
	if chosen {
		first, to = page.Index(pages), engine
	}
	a := arena{pages: make([]pageState, pages), queue: newFIFO(first, page.Index(pages)), free: newBitmap(pages), chosen: chosen}
	for p := range a.queue.all() {
		a.free.set(p)
	}
	for p := range a.pages {
		a.pages[p].place = to
	}
	a.pages[page.Sink].place = sink
	a.counts[sink] = 1
	a.counts[to] = pages - 1
	return a
}

// take appends n free pages to dst, which are owned from now on. It does so
// for all or for none, and reports which.
func (a *arena) take(dst []page.Index, n int) ([]page.Index, bool) {
	if n < 0 || n > a.counts[free] {
		return dst, false
	}
	dst = slices.Grow(dst, n)
	for range n {
		p := a.queue.pop()
		a.free.clear(p)
		a.pages[p].place = owned
		dst = append(dst, p)
	}
	a.counts[free] -= n
	a.counts[owned] += n
	return dst, true
}

// looks is how far takeLike looks for neighbours: at so many stretches of free
// pages and words of their bitmap, and at one more for every page that it takes.
const looks = 1024

// takeLike is take of as many pages as like has. Neighbours of like get
// neighbours: for every run it takes as many from the shortest stretch of free
// pages that has them, else all of the longest one, and so on; from next on, if
// that page is free, for the first run. In a large and worn arena it does
// not look at all there is, and takes the first freed when what it has seen is
// used up.
func (a *arena) takeLike(dst, like []page.Index, next page.Index) ([]page.Index, bool) {
	if len(like) > a.counts[free] {
		return dst, false
	}
	dst = slices.Grow(dst, len(like))
	looked := false
	for r := range page.AllRuns(like) {
		for r.Count > 0 {
			got := page.Run{First: next, Count: a.free.ahead(next, r.Count)} // none once it is taken
			if got.Count == 0 && len(like) > 1 {
				if !looked {
					a.found.gather(a.free, a.free.start(a.queue.first()), looks+len(like))
					looked = true
				}
				got = a.found.take(r.Count)
			}
			if got.Count == 0 {
				got.First = a.queue.first()
				got.Count = a.free.ahead(got.First, r.Count)
			}
			dst = a.own(dst, got)
			r.Count -= got.Count
		}
	}
	return dst, true
}

// own appends free neighbours to dst, which are owned from now on.
func (a *arena) own(dst []page.Index, r page.Run) []page.Index {
	for p := r.First; p < r.First+page.Index(r.Count); p++ {
		a.queue.remove(p)
		a.pages[p].place = owned
		dst = append(dst, p)
	}
	a.free.clearRun(r)
	a.counts[free] -= int(r.Count)
	a.counts[owned] += int(r.Count)
	return dst
}

// release ends what owned or quarantined the page: to limbo if a publication
// names it, else it is free.
func (a *arena) release(p page.Index) error {
	if err := a.want(p, owned, quarantine); err != nil {
		return fmt.Errorf("release %w", err)
	}
	if a.pages[p].holds > 0 {
		a.move(p, limbo)
	} else {
		a.give(p)
	}
	return nil
}

// quarantine takes the page from what owned it.
func (a *arena) quarantine(p page.Index) error {
	if err := a.want(p, owned, owned); err != nil {
		return fmt.Errorf("quarantine %w", err)
	}
	a.move(p, quarantine)
	return nil
}

// hold says that one more live publication names the page.
func (a *arena) hold(p page.Index) error {
	if err := a.want(p, owned, owned); err != nil {
		return fmt.Errorf("hold %w", err)
	}
	if a.pages[p].holds++; a.pages[p].holds == 1 {
		a.published++
	}
	return nil
}

// unhold says that one less does. The last one frees a page in limbo.
func (a *arena) unhold(p page.Index) error {
	if int64(p) >= int64(len(a.pages)) || a.pages[p].holds == 0 {
		return fmt.Errorf("unhold page %d: not held: %w", p, errArena)
	}
	if a.pages[p].holds--; a.pages[p].holds == 0 {
		a.published--
		if a.pages[p].place == limbo {
			a.give(p)
		}
	}
	return nil
}

// held reports whether a live publication names the page.
func (a *arena) held(p page.Index) bool { return a.pages[p].holds > 0 }

func (a *arena) want(p page.Index, one, other place) error {
	if int64(p) >= int64(len(a.pages)) {
		return fmt.Errorf("page %d: the arena has %d: %w", p, len(a.pages), errArena)
	}
	if is := a.pages[p].place; is != one && is != other {
		return fmt.Errorf("page %d: it is %v: %w", p, is, errArena)
	}
	return nil
}

// give makes the page free, or the engine's.
func (a *arena) give(p page.Index) {
	if a.chosen {
		a.move(p, engine)
		a.pages[p].untold = true
		a.returned = append(a.returned, p)
		return
	}
	a.queue.push(p)
	a.free.set(p)
	a.move(p, free)
}

func (a *arena) move(p page.Index, to place) {
	a.counts[a.pages[p].place]--
	a.counts[to]++
	a.pages[p].place = to
}
