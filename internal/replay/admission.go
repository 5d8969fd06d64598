package replay

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/internal/page"
)

// pagesOf is what a request may come to hold on one node: the whole pages of
// input and output of every stream.
func pagesOf(r Request, labels, pageSize int) int {
	return labels * page.Count(r.Input+r.Output, pageSize)
}

// admission is the pages that the started requests may come to hold, by node.
// It has one waiter at a time, the one who starts requests in order. The zero
// value is not useful; see newAdmission.
type admission struct {
	mu      sync.Mutex
	free    []int
	total   []int
	changed chan struct{} // of size 1: that something was released
}

// newAdmission takes the usable pages of every node.
func newAdmission(pages []int) *admission {
	return &admission{
		free:    append([]int(nil), pages...),
		total:   append([]int(nil), pages...),
		changed: make(chan struct{}, 1),
	}
}

// fits reports whether n pages can ever be had on a node.
func (a *admission) fits(node, n int) bool { return n <= a.total[node] }

// wait takes n pages on both nodes, or none while it waits for them.
func (a *admission) wait(ctx context.Context, first, second, n int) error {
	for !a.take(first, second, n) {
		select {
		case <-a.changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (a *admission) take(first, second, n int) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.free[first] < n || a.free[second] < n {
		return false
	}
	a.free[first] -= n
	a.free[second] -= n
	return true
}

// release gives n pages of one node back.
func (a *admission) release(node, n int) {
	a.mu.Lock()
	a.free[node] += n
	over := a.free[node] > a.total[node]
	a.mu.Unlock()
	if over {
		panic(fmt.Sprintf("replay: node %d was given back more pages than it has", node))
	}
	select {
	case a.changed <- struct{}{}:
	default:
	}
}
