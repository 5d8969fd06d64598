package transfer

import (
	"context"
	"errors"
	"fmt"
	"unsafe"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// InHost returns the host memory of an arena; ok is false for device memory.
func InHost(a memory.Arena) (bytes []byte, ok bool) {
	r, ok := a.(*memory.Region)
	if !ok {
		return nil, false
	}
	return r.Bytes(), true
}

// Staged says whether one of the arenas is in device memory, so that its bytes
// go through a [Pool].
func Staged(arenas map[id.Rank]memory.Arena) bool {
	for _, a := range arenas {
		if _, ok := InHost(a); !ok {
			return true
		}
	}
	return false
}

// End is one of the two ends of a [Copy].
type End int

// At the owner the offset of a copy is Remote, at the reader it is Local.
const (
	Owner End = iota
	Reader
)

// Staging is what Gather or Scatter has started: copies between device memory
// and one dense buffer. The zero value is nothing that runs. It is used again and
// again, and then costs no allocation of its own; by one goroutine at a time.
type Staging struct {
	tickets  []memory.Ticket
	segments []memory.Segment
	err      error
}

// Wait returns when nothing of it reads or writes memory any more: nil if all of
// it was copied.
func (s *Staging) Wait() error {
	err := s.err
	for _, t := range s.tickets {
		if e := t.Wait(); e != nil {
			err = errors.Join(err, e)
		}
	}
	clear(s.tickets)
	s.tickets, s.segments, s.err = s.tickets[:0], s.segments[:0], nil
	return err
}

// Gather starts to copy what copies name at one end into buf, one behind the
// other. The copies have been checked; buf has at least their bytes. Until Wait
// has returned, buf is lent.
//
// Each rank costs its device one call, however the copies are mixed. Host memory
// has been copied when Gather returns.
func (s *Staging) Gather(buf []byte, arenas map[id.Rank]memory.Arena, end End, copies []Copy) {
	s.start(buf, arenas, end, copies, true)
}

// Scatter is Gather the other way round.
func (s *Staging) Scatter(arenas map[id.Rank]memory.Arena, end End, copies []Copy, buf []byte) {
	s.start(buf, arenas, end, copies, false)
}

// start starts the copies of one rank after the other, from the least up.
func (s *Staging) start(buf []byte, arenas map[id.Rank]memory.Arena, end End, copies []Copy, gather bool) {
	// Tickets hold on to their segments, so that the list must not move.
	if cap(s.segments)-len(s.segments) < len(copies) {
		s.segments = make([]memory.Segment, 0, len(copies))
	}
	for rank, ok := above(copies, -1); ok; rank, ok = above(copies, rank) {
		first, at := len(s.segments), int64(0)
		for i := range copies {
			c := &copies[i]
			if c.Rank == rank {
				offset := c.Remote
				if end == Reader {
					offset = c.Local
				}
				s.segments = append(s.segments, memory.Segment{Arena: offset, Other: at, Bytes: c.Bytes})
			}
			at += c.Bytes
		}
		s.one(buf, arenas[rank], s.segments[first:], gather)
	}
}

// above is the least rank of copies that is greater than one.
func above(copies []Copy, one id.Rank) (least id.Rank, ok bool) {
	for i := range copies {
		if r := copies[i].Rank; r > one && (!ok || r < least) {
			least, ok = r, true
		}
	}
	return least, ok
}

func (s *Staging) one(buf []byte, arena memory.Arena, segments []memory.Segment, gather bool) {
	if host, ok := InHost(arena); ok {
		for _, g := range segments {
			if gather {
				copy(buf[g.Other:][:g.Bytes], host[g.Arena:][:g.Bytes])
			} else {
				copy(host[g.Arena:][:g.Bytes], buf[g.Other:][:g.Bytes])
			}
		}
		return
	}
	stager, ok := arena.(memory.Stager)
	switch {
	case !ok:
		s.err = errors.Join(s.err, fmt.Errorf("an arena of kind %T can't be copied", arena))
	case gather:
		s.tickets = append(s.tickets, stager.ReadInto(buf, segments))
	default:
		s.tickets = append(s.tickets, stager.WriteFrom(buf, segments))
	}
}

// Pool is host memory that the devices of some arenas have pinned, in buffers
// of one size, through which bytes of device memory go. It is safe for
// concurrent use.
//
// Three rules keep those who share buffers from waiting for each other. Who holds
// a buffer that no device is copying never waits for another one, here or at a
// peer: TryGet is for that. Who keeps buffers for as long as a peer likes takes no
// further one from a pool that is [Pool.Crowded]. And what serves peers and what reads from them have
// pools of their own: else the readers of two nodes hold what the owners of both
// need to answer them.
type Pool struct {
	region *memory.Region
	size   int
	free   chan []byte
	count  int
	unpin  func() error
}

// DefaultStaging is the bytes of pinned memory that a transport takes for staging
// where its options say nothing.
const DefaultStaging = 64 << 20

// StagedCopies is how many copies go through one buffer at most, which bounds what
// is kept for it: as many as devices take in one call, so that a buffer costs one.
const StagedCopies = 4096

// Pin lets the devices of arenas pin host memory, which is mapped until unpin has
// returned. Those that cannot copy it slowly; refused is why, nil if all could.
// Unpin is to be called in both cases.
func Pin(arenas map[id.Rank]memory.Arena, host []byte) (unpin func() error, refused error) {
	var pinned []func() error
	for _, a := range arenas {
		stager, ok := a.(memory.Stager)
		if !ok {
			continue
		}
		one, err := stager.Pin(host)
		if err != nil {
			refused = errors.Join(refused, err)
			continue
		}
		pinned = append(pinned, one)
	}
	return func() error {
		var errs []error
		for _, one := range pinned {
			errs = append(errs, one())
		}
		return errors.Join(errs...)
	}, refused
}

// NewPool makes a pool of count buffers of size bytes, both at least 1, pinned as
// [Pin] does.
func NewPool(name string, arenas map[id.Rank]memory.Arena, size, count int) (p *Pool, refused, err error) {
	region, err := memory.New(name, int64(size)*int64(count))
	if err != nil {
		return nil, nil, fmt.Errorf("make a pool for staging: %w", err)
	}
	p = &Pool{region: region, size: size, free: make(chan []byte, count), count: count}
	for i := range count {
		at := i * size
		p.free <- region.Bytes()[at : at+size : at+size]
	}
	p.unpin, refused = Pin(arenas, region.Bytes())
	return p, refused, nil
}

// Size is that of each buffer, in bytes.
func (p *Pool) Size() int { return p.size }

// Region is the memory of the buffers; it stays the pool's.
func (p *Pool) Region() *memory.Region { return p.region }

// Offset is where a buffer begins in the region.
func (p *Pool) Offset(buf []byte) int64 {
	first := unsafe.Pointer(unsafe.SliceData(p.region.Bytes()))
	return int64(uintptr(unsafe.Pointer(unsafe.SliceData(buf))) - uintptr(first))
}

// Get takes a buffer, and waits for one as long as ctx; who waits longest is the
// first to get one.
func (p *Pool) Get(ctx context.Context) ([]byte, error) {
	select {
	case b := <-p.free:
		return b, nil
	default:
	}
	select {
	case b := <-p.free:
		return b, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for a staging buffer: %w", Reason(ctx))
	}
}

// TryGet takes a buffer if one is free.
func (p *Pool) TryGet() ([]byte, bool) {
	select {
	case b := <-p.free:
		return b, true
	default:
		return nil, false
	}
}

// Put gives a buffer back that nothing reads or writes any more.
func (p *Pool) Put(b []byte) {
	select {
	case p.free <- b[:p.size]:
	default:
		panic("transfer: a staging buffer was given back twice")
	}
}

// Lent is how many buffers are in use.
func (p *Pool) Lent() int { return p.count - len(p.free) }

// Crowded reports whether more than half of the buffers are in use. The rest is for
// those who have none.
func (p *Pool) Crowded() bool { return 2*p.Lent() > p.count }

// Close frees the memory. All buffers must have been given back.
func (p *Pool) Close() error {
	if lent := p.Lent(); lent > 0 {
		return fmt.Errorf("close a pool for staging: %d of %d buffers are in use", lent, p.count)
	}
	return errors.Join(p.unpin(), p.region.Close())
}
