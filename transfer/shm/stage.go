package shm

import (
	"cmp"
	"context"
	"fmt"
	"runtime/debug"

	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// stage is the work of one hand where pieces go through buffers. It fills one
// while our device empties the one before, and the owner fills those behind. All
// that it takes it has given back, and all that was started into our arenas is
// over, when it returns.
func (p *pull) stage(ctx context.Context) {
	var room [2][handBuffers]*slot
	taken, landing := room[0][:0], room[1][:0] // in the order in which they were
	for {
		for len(taken)+len(landing) < p.each {
			// Who has a buffer does not wait for another.
			s := p.take(ctx, len(taken)+len(landing) == 0)
			if s == nil {
				break
			}
			taken = append(taken, s)
		}
		if len(taken)+len(landing) == 0 {
			return
		}
		if len(taken) > 0 {
			s := taken[0]
			taken = append(taken[:0], taken[1:]...)
			if p.land(ctx, s) {
				landing = append(landing, s)
			}
		}
		if len(landing) > 1 || len(landing) == 1 && len(taken) == 0 {
			p.finish(landing[0])
			landing = append(landing[:0], landing[1:]...)
		}
	}
}

// take takes a buffer for the next piece, and asks the owner to fill it where that
// is who does. It is nil if there is none to be had, no piece, or no more sense.
func (p *pull) take(ctx context.Context, wait bool) *slot {
	if !p.wants() {
		return nil
	}
	var s *slot
	select {
	case s = <-p.buffers:
	default:
		if !wait {
			return nil
		}
		var err error
		if s, err = rendezvous.Await(ctx, &p.Read, p.buffers, errTaken); err != nil {
			p.landed(nil, err)
			return nil
		}
	}
	s.piece = p.next(s.piece[:0])
	if len(s.piece) == 0 {
		p.buffers <- s
		return nil
	}
	if err := p.Over(ctx); err != nil {
		p.give(s, err)
		return nil
	}
	if ring := p.l.ring; ring != nil {
		if err := ring.ask(s); err != nil {
			p.landed(s.piece, p.Broken(err))
			return nil
		}
	}
	return s
}

// land waits until a buffer is filled, or fills it, and begins to empty it. It is
// false if nothing is to be waited for, and the buffer given back.
func (p *pull) land(ctx context.Context, s *slot) bool {
	ring, own := p.l.ring, p.l.t.staging
	if ring != nil {
		err := cmp.Or(p.failure(), p.Over(ctx))
		if err == nil {
			_, err = rendezvous.Await(ctx, &p.Read, s.answer, errStall)
		}
		if err != nil {
			p.landed(s.piece, err)
			ring.drop(s)
			return false
		}
		if s.why != nil {
			p.give(s, s.why)
			return false
		}
	}
	var err error
	if ring == nil || own == nil { // one of the two copies is a processor's
		if err = p.Turn(ctx, p.l.t.workers); err == nil {
			if ring == nil {
				err = p.l.fill(s)
			} else {
				err = p.l.empty(s)
			}
			p.l.t.workers.Release()
		}
	}
	if err != nil || own == nil {
		p.give(s, err)
		return false
	}
	s.landing.Scatter(p.l.t.local.Arenas, transfer.Reader, s.piece, s.bytes)
	return true
}

// finish waits until our device has emptied a buffer, and gives it back.
func (p *pull) finish(s *slot) {
	err := s.landing.Wait()
	if err != nil {
		err = fmt.Errorf("copy to our device: %w", err)
	} else if p.l.ring == nil {
		p.l.t.staged.Add(uint64(transfer.Bytes(s.piece)))
	}
	p.give(s, err)
}

// give notes how the piece of a buffer ended, and gives the buffer back. Nothing of
// it may be looked at behind that.
func (p *pull) give(s *slot, err error) {
	p.landed(s.piece, err)
	p.buffers <- s
}

// wants reports whether there is a piece that nobody has, and sense in it.
func (p *pull) wants() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.more
}

// failure is that of the first hand that failed.
func (p *pull) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// fill copies a piece from the peer's arenas into its buffer.
func (l *link) fill(s *slot) (err error) {
	defer memory.Survive(debug.SetPanicOnFault(true), l.theirs, &err)
	at := int64(0)
	for i := range s.piece {
		c := &s.piece[i]
		copy(s.bytes[at:][:c.Bytes], l.source(s.piece, i))
		at += c.Bytes
	}
	return nil
}

// empty copies a piece from its buffer into our arenas.
func (l *link) empty(s *slot) (err error) {
	defer memory.Survive(debug.SetPanicOnFault(true), l.theirs, &err)
	rest := s.bytes
	for i := range s.piece {
		c := &s.piece[i]
		dst, src := l.arenas[c.Rank].local[c.Local:][:c.Bytes], rest[:c.Bytes]
		rest = rest[c.Bytes:]
		if l.t.cached {
			copy(dst, src)
		} else {
			memory.Stream(dst, src, rest[:min(len(rest), 64)])
		}
	}
	return nil
}
