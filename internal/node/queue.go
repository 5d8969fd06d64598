package node

import "sync"

// queue holds what waits for one goroutine, in order. Nobody waits to add: over
// the bound nothing is taken.
type queue[T any] struct {
	wake chan struct{} // one wish is as good as many
	most int

	mu    sync.Mutex
	items []T
}

func newQueue[T any](most int) *queue[T] {
	return &queue[T]{wake: make(chan struct{}, 1), most: most}
}

// add reports false if the queue is full.
func (q *queue[T]) add(item T) bool {
	q.mu.Lock()
	full := len(q.items) >= q.most
	if !full {
		q.items = append(q.items, item)
	}
	q.mu.Unlock()
	select {
	case q.wake <- struct{}{}:
	default:
	}
	return !full
}

// take returns the first ones, at most so many; none if it is empty.
func (q *queue[T]) take(most int) []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := min(most, len(q.items))
	taken := q.items[:n:n]
	if q.items = q.items[n:]; len(q.items) == 0 {
		q.items = nil // what was taken is the taker's
	}
	return taken
}
