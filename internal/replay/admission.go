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

// budget is the pages of one life of a node that started requests may come to
// hold: the next life has all of them again.
type budget struct {
	total int
	free  int // under the mutex of the admission
}

func newBudget(pages int) *budget { return &budget{total: pages, free: pages} }

// fits reports whether n pages can ever be had.
func (b *budget) fits(n int) bool { return n <= b.total }

// admission deals out the pages of budgets. It has one waiter at a time, the
// one who starts requests in order. The zero value is not useful; see
// newAdmission.
type admission struct {
	mu      sync.Mutex
	changed chan struct{} // of size 1: something was released, or a node came or went
}

func newAdmission() *admission {
	return &admission{changed: make(chan struct{}, 1)}
}

// take takes n pages of both, or none.
func (a *admission) take(first, second *budget, n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if first.free < n || second.free < n {
		return false
	}
	first.free -= n
	second.free -= n
	return true
}

// release gives n pages back.
func (a *admission) release(b *budget, n int) {
	a.mu.Lock()
	b.free += n
	over := b.free > b.total
	a.mu.Unlock()
	if over {
		panic(fmt.Sprintf("replay: a node was given back more pages than its %d", b.total))
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
