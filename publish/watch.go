package publish

import "github.com/kvferry/kvferry/internal/id"

// maxWatched bounds the requests that are watched one by one.
const maxWatched = 65536

// watches are who waits for a change, by request. Waiters of one request share
// a channel; those that came when the table was full share one for all
// requests, and are woken too often.
type watches struct {
	by      map[id.RequestHash]*watch
	overrun *watch // nil: nobody
}

type watch struct {
	changed chan struct{}
	waiters int
}

func newWatch() *watch { return &watch{changed: make(chan struct{})} }

func (w *watches) add(r id.RequestHash) *watch {
	one := w.by[r]
	switch {
	case one != nil:
	case len(w.by) < maxWatched:
		one = newWatch()
		w.by[r] = one
	case w.overrun != nil:
		one = w.overrun
	default:
		one = newWatch()
		w.overrun = one
	}
	one.waiters++
	return one
}

// remove gives up one wait; the watch may have been woken.
func (w *watches) remove(r id.RequestHash, one *watch) {
	if one.waiters--; one.waiters > 0 {
		return
	}
	if w.by[r] == one {
		delete(w.by, r)
	}
	if w.overrun == one {
		w.overrun = nil
	}
}

func (w *watches) wake(r id.RequestHash) {
	if one := w.by[r]; one != nil {
		close(one.changed)
		delete(w.by, r)
	}
	if w.overrun != nil {
		close(w.overrun.changed)
		w.overrun = nil
	}
}

func (w *watches) len() int {
	n := len(w.by)
	if w.overrun != nil {
		n++
	}
	return n
}
