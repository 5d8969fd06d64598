package replay

import (
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/internal/page"
)

// pagesOf is what a request may come to hold on one node: the whole pages of
// input and output of every stream.
func pagesOf(r Request, labels, pageSize int) int {
	return labels * page.Count(r.Input+r.Output, pageSize)
}

// widest is the most pages that one stream of a trace may come to hold.
func widest(requests []Request, pageSize int) (pages int) {
	for _, r := range requests {
		pages = max(pages, pagesOf(r, 1, pageSize))
	}
	return pages
}

// budget is the pages of one life of a node that started requests may come to
// hold: the next life has all of them again.
type budget struct {
	arena, host int
	taken       int // under the mutex of the admission
}

func newBudget(arena, host int) *budget { return &budget{arena: arena, host: host} }

// fits reports whether n pages can ever be had: a step needs all of its request
// in the arena.
func (b *budget) fits(n int) bool { return n <= b.arena }

// admission deals out the pages of budgets. It has one waiter at a time, the
// one who starts requests in order. The zero value is not useful; see
// newAdmission.
type admission struct {
	widest  int           // pages of a stream, at most
	changed chan struct{} // of size 1: something was released, or a node came or went

	mu sync.Mutex // over what is taken of all budgets
}

func newAdmission(widest int) *admission {
	return &admission{widest: widest, changed: make(chan struct{}, 1)}
}

// take takes n pages of both, or none.
func (a *admission) take(first, second *budget, n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.has(first, n) || !a.has(second, n) {
		return false
	}
	first.taken += n
	second.taken += n
	return true
}

// has reports whether n pages are left. Streams go to the host whole: as long as
// there is room for one more than what does not fit in the arena, any request
// can be brought in beside all others.
func (a *admission) has(b *budget, n int) bool {
	return b.taken+n <= b.arena+max(0, b.host-a.widest)
}

// release gives n pages back.
func (a *admission) release(b *budget, n int) {
	a.mu.Lock()
	b.taken -= n
	over := b.taken < 0
	a.mu.Unlock()
	if over {
		panic(fmt.Sprintf("replay: a node was given back %d pages more than were taken", n))
	}
	a.wake()
}

// wake lets the waiter look again.
func (a *admission) wake() {
	select {
	case a.changed <- struct{}{}:
	default:
	}
}
