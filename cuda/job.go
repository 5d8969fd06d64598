//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"sync"

	"github.com/kvferry/kvferry/internal/memory"
)

// job is a copy that was asked for, and its ticket. Its segments have been
// checked, and it holds on to all that they name until it is over.
type job struct {
	arena    *Arena  // what Segment.Arena counts in
	from     *Arena  // what Segment.Other counts in, or
	host     []byte  // this
	pinned   *pinned // what host lies in; nil: nothing
	segments []memory.Segment
	far      bool // from is on a device whose memory batches can't read
	done     chan struct{}

	mu  sync.Mutex
	err error
}

// Wait is [memory.Ticket.Wait].
func (j *job) Wait() error {
	<-j.done
	return j.failed()
}

func (j *job) failed() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.err
}

// fail keeps the first error.
func (j *job) fail(err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.err == nil {
		j.err = err
	}
}

// finish is called once nothing of the job runs any more.
func (j *job) finish() {
	if j.pinned != nil {
		j.pinned.users.Done()
	}
	if j.from != nil {
		j.from.leave()
	}
	j.arena.leave()
	close(j.done)
}

// over is the ticket of a copy that was never started.
type over struct{ err error }

func (o over) Wait() error { return o.err }
