package node_test

import (
	"fmt"
	"slices"
	"sync"
)

// library keeps what was published of each request, so that readers in the same
// process can tell whether they have one publish whole.
type library struct {
	mu        sync.Mutex
	byRequest map[string][]tale // oldest first, at most maxTales
}

// maxTales are more than are published while anybody may still read one.
const maxTales = 4096

// add notes what is about to be published.
func (l *library) add(r string, t tale) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.byRequest == nil {
		l.byRequest = make(map[string][]tale)
	}
	all := append(l.byRequest[r], t.clone())
	l.byRequest[r] = all[max(0, len(all)-maxTales):]
}

// differs says that what was read is not of one publish; "" if it is.
func (l *library) differs(r string, got tale) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.byRequest[r]
	why := "it was never published"
	for i, t := range slices.Backward(all) {
		d := t.differs(got)
		if d == "" {
			return ""
		}
		if i == len(all)-1 {
			why = d
		}
	}
	return fmt.Sprintf("%v is of none of %d publishes of %s; of the last one, %s", got, len(all), r, why)
}
