package cluster

import (
	"sync"
	"time"
)

// hush keeps a kind of log line from being written too often. The zero one is
// ready.
type hush struct {
	mu     sync.Mutex
	begin  time.Time
	lines  int
	hidden int
}

// pass says whether one more line may be written, of so many in each interval,
// and how many were not before.
func (h *hush) pass(now time.Time, most int, interval time.Duration) (hidden int, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if now.Sub(h.begin) >= interval {
		hidden = h.hidden
		h.begin, h.lines, h.hidden = now, 0, 0
	}
	if h.lines++; h.lines > most {
		h.hidden++
		return 0, false
	}
	return hidden, true
}
