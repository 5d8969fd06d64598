package shm

import (
	"fmt"
	"sync"

	"github.com/kvferry/kvferry/transfer"
)

const (
	// A buffer is what a device copies in some tens of microseconds, so that what
	// starting a copy costs does not show, but not so much of the memory for staging
	// that fewer than 16 readers could have a ring.
	maxStagedBytes = 1 << 20
	minStagedBytes = 64 << 10
	stagedParts    = 2 * 16 * ringBuffers
	// ringBuffers of a connection: one is emptied, one is filled, and the same
	// again, so that neither side waits for a message.
	ringBuffers = 4
)

// staging is what a node has whose arenas are in the memory of a device. Nil is
// that of one whose arenas are not.
type staging struct {
	pool *transfer.Pool
	free chan *slot    // those of the pool that no read uses
	room chan struct{} // one a ring that a reader has
	size int           // bytes of a buffer

	once   sync.Once
	closed error
}

// slot is a buffer, and what is done with it by the read that has it.
type slot struct {
	bytes   []byte
	piece   []transfer.Copy
	landing transfer.Staging

	// Of a ring alone.
	index  int
	answer chan struct{} // to one ask
	why    error         // of the answer: the buffer is not filled
	state  state         // ring.mu guards it
	ask    []byte
}

func newStaging(o Options) (*staging, error) {
	size := min(max(o.Staging/stagedParts, minStagedBytes), maxStagedBytes) &^ 4095
	count, rings := max(2, o.Staging/2/size), max(1, o.Staging/2/(ringBuffers*size))
	pool, refused, err := transfer.NewPool("kvferry-shm-staging", o.Local.Arenas, int(size), int(count))
	if err != nil {
		return nil, err
	}
	if refused != nil {
		o.Logger.Warn("memory for staging is not pinned, and what goes through it is slow", "err", refused)
	}
	s := &staging{pool: pool, free: make(chan *slot, count), room: make(chan struct{}, rings), size: int(size)}
	for b, ok := pool.TryGet(); ok; b, ok = pool.TryGet() {
		s.free <- &slot{bytes: b}
	}
	return s, nil
}

// takeRoom reports whether there is room for one ring more, and takes it.
func (s *staging) takeRoom() bool {
	select {
	case s.room <- struct{}{}:
		return true
	default:
		return false
	}
}

func (s *staging) giveRoom() { <-s.room }

func (s *staging) rings() int {
	if s == nil {
		return 0
	}
	return len(s.room)
}

// close frees the memory. No read runs. It may be called twice.
func (s *staging) close() error {
	if s == nil {
		return nil
	}
	s.once.Do(func() {
		for range cap(s.free) {
			s.pool.Put((<-s.free).bytes)
		}
		if err := s.pool.Close(); err != nil {
			s.closed = fmt.Errorf("close the memory for staging: %w", err)
		}
	})
	return s.closed
}
