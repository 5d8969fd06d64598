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
	places
)

func (p place) String() string {
	return [...]string{"free", "owned", "limbo", "quarantine", "sink", "nowhere"}[min(p, places)]
}

var errArena = errors.New("page is not where it should be")

// arena knows the place of every page and hands out free ones, first freed
// first. Whatever contradicts that is refused and changes nothing.
type arena struct {
	pages     []pageState
	queue     fifo // the free pages: counts[free] of them
	counts    [places]int
	published int // pages with holds
}

type pageState struct {
	place place
	holds uint32 // live publications that name the page
}

func newArena(pages int) arena {
	a := arena{pages: make([]pageState, pages), queue: newFIFO(page.Sink+1, pages-1)}
	a.pages[page.Sink].place = sink
	a.counts[sink] = 1
	a.counts[free] = pages - 1
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
		a.pages[p].place = owned
		dst = append(dst, p)
	}
	a.counts[free] -= n
	a.counts[owned] += n
	return dst, true
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
		a.free(p)
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
			a.free(p)
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

func (a *arena) free(p page.Index) {
	a.queue.push(p)
	a.move(p, free)
}

func (a *arena) move(p page.Index, to place) {
	a.counts[a.pages[p].place]--
	a.counts[to]++
	a.pages[p].place = to
}
