package shm

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// ring is the reader's side of an owner's ring.
type ring struct {
	conn   *rendezvous.Conn
	region *memory.Region
	size   int // bytes of a buffer
	slots  []*slot
	free   chan *slot // those that no read uses, and the owner has not
	unpin  func() error

	mu sync.Mutex // guards the state of each slot
}

// state of a buffer of a ring, as its reader knows it.
type state uint8

const (
	idle    state = iota // the reader's
	asked                // the owner's, and a read waits for it
	dropped              // the owner's, and no read waits any more
)

// openRing maps a ring, and takes f over, also with an error. Where our arenas are
// in the memory of a device it is pinned for that.
func (l *link) openRing(c *rendezvous.Conn, w welcome, f *os.File) (*ring, error) {
	region, err := memory.Map(f, int64(w.buffers)*int64(w.bytes), l.t.staging != nil)
	if err != nil {
		return nil, err
	}
	r := &ring{conn: c, region: region, size: w.bytes, free: make(chan *slot, w.buffers)}
	for i := range w.buffers {
		s := &slot{index: i, bytes: region.Bytes()[i*w.bytes:][:w.bytes:w.bytes], answer: make(chan struct{}, 1)}
		r.slots = append(r.slots, s)
		r.free <- s
	}
	unpin, refused := transfer.Pin(l.t.local.Arenas, region.Bytes())
	if refused != nil {
		l.t.log.Warn("the ring of a peer is not pinned, and emptied slowly", "peer", l.peer.Life.String(), "err", refused)
	}
	r.unpin = unpin
	return r, nil
}

// close unmaps the ring. What the owner still writes into it, it writes into
// memory that is this connection's.
func (r *ring) close() error {
	return errors.Join(r.unpin(), r.region.Close())
}

// ask lets the owner fill a slot with its piece. With an error the connection
// ends, and the slot is nobody's.
func (r *ring) ask(s *slot) error {
	r.mu.Lock()
	s.state = asked
	r.mu.Unlock()
	s.ask = appendAsk(s.ask[:0], s.index, s.piece)
	if err := r.conn.Send(kindAsk, s.ask); err != nil {
		return fmt.Errorf("ask the peer: %w", err)
	}
	return nil
}

// drop is for a slot that was asked for and whose answer nobody waits for any more.
func (r *ring) drop(s *slot) {
	r.mu.Lock()
	answered := s.state == idle
	if !answered {
		s.state = dropped
	}
	r.mu.Unlock()
	if answered {
		<-s.answer
		r.free <- s
	}
}

// hear takes answers until the connection ends.
func (r *ring) hear() error {
	for {
		k, body, err := r.conn.Receive(maxFilledBody)
		if err != nil {
			return err
		}
		if k != kindFilled {
			return fmt.Errorf("%v, want an answer: %w", k, rendezvous.ErrGarbage)
		}
		i, why, err := parseFilled(body, len(r.slots))
		if err != nil {
			return err
		}
		s := r.slots[i]
		r.mu.Lock()
		was := s.state
		s.state = idle
		r.mu.Unlock()
		switch was {
		case asked:
			s.why = why
			s.answer <- struct{}{}
		case dropped:
			r.free <- s
		default:
			return fmt.Errorf("answer for buffer %d, which nobody has asked for: %w", i, rendezvous.ErrGarbage)
		}
	}
}
