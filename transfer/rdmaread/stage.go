package rdmaread

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// way is how bytes get from an arena there to one here, by one lane.
type way uint8

// direct is by a read alone; the others are a set.
const (
	direct   way = 0
	gathers  way = 1 << 0 // the owner copies them into the lane's ring before
	scatters way = 1 << 1 // we copy them out of a buffer afterwards
)

// waysOf are the ways of all ranks; nil if all are direct.
func waysOf(here, there *[id.MaxRanks]region) (ways *[id.MaxRanks]way) {
	for rank := range here {
		w := direct
		if there[rank].staged() {
			w |= gathers
		}
		if here[rank].staged() {
			w |= scatters
		}
		if w == direct {
			continue
		}
		if ways == nil {
			ways = new([id.MaxRanks]way)
		}
		ways[rank] = w
	}
	return ways
}

// landings are the buffers that a hand has at most.
const landings = 3

// landing is a buffer of ours that is read into, and scattered.
type landing struct {
	buf     []byte
	scatter transfer.Staging
	runs    bool // scatter has been started, and not been waited for
}

// piece is what a buffer takes of a window.
type piece struct {
	copies []transfer.Copy
	bytes  int64
}

// stage is what a hand moves windows through that are not direct. Its memory is
// used again.
type stage struct {
	pool    *transfer.Pool
	all     [landings]landing
	held    []*landing         // those that have a buffer, the one to be free first in front
	pieces  [ringBuffers]piece // that are under way
	message []byte
	timer   *time.Timer
}

// tryBegin says whether there is a buffer to read into; it takes the first one if
// one is free.
func (s *stage) tryBegin(pool *transfer.Pool) bool {
	if len(s.held) > 0 {
		return true
	}
	buf, ok := pool.TryGet()
	if ok {
		s.first(pool, buf)
	}
	return ok
}

// begin waits for the first buffer. Its hand has no lane.
func (s *stage) begin(waiting context.Context, pool *transfer.Pool) error {
	buf, err := pool.Get(waiting)
	if err == nil {
		s.first(pool, buf)
	}
	return err
}

func (s *stage) first(pool *transfer.Pool, buf []byte) {
	s.pool = pool
	s.all[0].buf = buf
	s.held = append(s.held[:0], &s.all[0])
}

// end waits for what is scattered, and gives the buffers back.
func (s *stage) end() (err error) {
	for _, l := range s.held {
		if e := l.wait(); err == nil {
			err = e
		}
		s.pool.Put(l.buf)
		l.buf = nil
	}
	s.held = s.held[:0]
	return err
}

// wait returns when nothing reads the buffer any more.
func (l *landing) wait() error {
	if !l.runs {
		return nil
	}
	l.runs = false
	if err := l.scatter.Wait(); err != nil {
		return fmt.Errorf("copy what was read into the memory of its device: %w", err)
	}
	return nil
}

// room returns a buffer that nothing reads or writes: a further one where that
// of the oldest scatter is in use.
func (s *stage) room() (*landing, error) {
	oldest := s.held[0]
	if oldest.runs && len(s.held) < landings {
		if buf, ok := s.pool.TryGet(); ok {
			l := &s.all[len(s.held)]
			l.buf = buf
			s.held = append(s.held, l)
			return l, nil
		}
	}
	return oldest, oldest.wait()
}

// scatter starts to copy a piece out of its buffer.
func (s *stage) scatter(l *landing, t *Transport, p *piece) {
	l.scatter.Scatter(t.o.Local.Arenas, transfer.Reader, p.copies, l.buf)
	l.runs = true
	t.stats.stagedBytes.Add(uint64(p.bytes))
	i := slices.Index(s.held, l)
	s.held = append(slices.Delete(s.held, i, i+1), l)
}

// cutter cuts a window into pieces.
type cutter struct {
	copies []transfer.Copy // that are left
	cut    int64           // bytes of the first that are not
	room   int64           // bytes of a piece
}

// next fills p; false: nothing is left. A page that is small beside a piece stays
// whole.
func (c *cutter) next(p *piece) bool {
	p.copies, p.bytes = p.copies[:0], 0
	for len(c.copies) > 0 && p.bytes < c.room && len(p.copies) < maxStretches {
		s := c.copies[0]
		s.Remote += c.cut
		s.Local += c.cut
		s.Bytes -= c.cut
		if room := c.room - p.bytes; s.Bytes > room {
			if p.bytes > 0 && s.Bytes <= c.room/4 {
				break
			}
			s.Bytes = room
			c.cut += room
		} else {
			c.copies, c.cut = c.copies[1:], 0
		}
		p.copies = append(p.copies, s)
		p.bytes += s.Bytes
	}
	return p.bytes > 0
}

// relay moves a window that is not direct by a lane, piece by piece: while one is
// read, the owner gathers the next, and the last is scattered. It returns the
// bytes that have landed, all from the start on. lost is what the lane has failed
// by, err what ends the read.
func (p *pull) relay(ctx context.Context, b borrowed, w *window) (landed int64, lost, err error) {
	q, s, t := b.queue, &w.stage, p.l.t
	c := cutter{copies: w.copies, room: bufferBytes}
	ahead := uint64(1)
	if w.way&gathers != 0 {
		ahead = min(uint64(q.remote.buffers), ringBuffers)
		c.room = min(c.room, int64(q.remote.buffer()))
	}
	var cut, read uint64 // pieces
	for more := true; ; read++ {
		for ; more && cut-read < ahead; cut++ {
			next := &s.pieces[cut%ringBuffers]
			if more = c.next(next); !more {
				break
			}
			if w.way&gathers == 0 {
				continue
			}
			if lost := s.ask(ctx, q, next); lost != nil {
				return landed, lost, nil
			}
		}
		if read == cut {
			return landed, nil, nil
		}
		now := &s.pieces[read%ringBuffers]
		from, to := source{piece: now}, target{}
		if w.way&gathers != 0 {
			number := q.asked - (cut - read)
			if lost := p.await(ctx, b, s, number); lost != nil {
				return landed, lost, nil
			}
			from.ring, from.at = &q.remote.ring, number%uint64(q.remote.buffers)*q.remote.buffer()
		}
		var l *landing
		if w.way&scatters != 0 {
			if l, err = s.room(); err != nil {
				if w.way&gathers != 0 && cut-read > 1 { // what was asked for is not waited for
					p.l.breakQueue(b.lane, q, err)
				}
				return landed, nil, err
			}
			to.landing, to.at = &b.lane.path.port.d.landing, uint64(s.pool.Offset(l.buf))
		}
		w.ops = from.ops(to, &b.lane.path.port.d.local, &q.remote.arenas, w.ops[:0])
		if _, lost := p.post(ctx, b, w.ops, false); lost != nil {
			return landed, lost, nil
		}
		landed += now.bytes
		if l != nil {
			s.scatter(l, t, now)
		}
	}
}

// ask lets the owner gather a piece.
func (s *stage) ask(ctx context.Context, q *queue, p *piece) error {
	s.message = appendGather(s.message[:0], q.asked, p.copies)
	if err := q.call.Send(ctx, s.message); err != nil {
		return fmt.Errorf("ask the owner to gather: %w", err)
	}
	q.asked++
	return nil
}

// await returns when the owner has gathered the piece of a number, which is the
// next.
func (p *pull) await(ctx context.Context, b borrowed, s *stage, number uint64) error {
	q, stall := b.queue, p.l.t.o.Limits.Stall
	if s.timer == nil {
		s.timer = time.NewTimer(stall)
	} else {
		s.timer.Reset(stall)
	}
	defer s.timer.Stop()
	var answer []byte
	select {
	case answer = <-q.call.Answers():
	case <-q.broken:
		select {
		case answer = <-q.call.Answers(): // which may say why
		default:
			return p.l.whyBroken(q)
		}
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-s.timer.C:
		return fmt.Errorf("the owner has gathered nothing for %v: %w", stall, transfer.ErrStalled)
	}
	got, why, err := parseGathered(answer)
	switch {
	case err != nil:
		p.l.t.stats.garbage.Add(1)
		return err
	case got != number:
		p.l.t.stats.garbage.Add(1)
		return fmt.Errorf("the answer is that to gather %d, not to %d: %w", got, number, errGarbage)
	case why != "":
		return &gatherError{why}
	}
	return nil
}

// gatherError is an owner that can't copy out of its device.
type gatherError struct{ why string }

func (e *gatherError) Error() string {
	return "the owner could not copy it out of its device, whose log says more: " + e.why
}

// source is where a piece is read from: its places in the arenas there, or, where
// it has been gathered, a buffer of the ring.
type source struct {
	*piece
	ring *region
	at   uint64
}

// target is where a piece lands: its places in the arenas here, or a buffer.
type target struct {
	landing *region
	at      uint64
}

// ops appends the ops of a piece.
func (f source) ops(to target, here, there *[id.MaxRanks]region, ops []rdma.Op) []rdma.Op {
	if f.ring != nil && to.landing != nil {
		return stretch(ops, f.ring, f.at, to.landing, to.at, uint64(f.bytes))
	}
	at := uint64(0)
	for i := range f.copies {
		c := &f.copies[i]
		from, remote := f.ring, f.at+at
		if from == nil {
			from, remote = &there[c.Rank], uint64(c.Remote)
		}
		into, local := to.landing, to.at+at
		if into == nil {
			into, local = &here[c.Rank], uint64(c.Local)
		}
		ops = stretch(ops, from, remote, into, local, uint64(c.Bytes))
		at += uint64(c.Bytes)
	}
	return ops
}

// stretch appends the ops of one stretch: one, but where it crosses the border of
// a slice on either side.
func stretch(ops []rdma.Op, from *region, remote uint64, to *region, local, bytes uint64) []rdma.Op {
	for bytes > 0 {
		rkey, rroom := from.at(remote)
		lkey, lroom := to.at(local)
		n := min(bytes, rroom, lroom)
		ops = append(ops, rdma.Op{Local: to.addr + local, Remote: from.addr + remote, Len: uint32(n), LKey: lkey, RKey: rkey})
		remote, local, bytes = remote+n, local+n, bytes-n
	}
	return ops
}
