package shm

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// A piece is what is copied between two looks at what may end a read: about a
// tenth of a millisecond of work. A hand keeps its worker for some pieces while
// others wait: to wake one of these can take as long as half a piece.
const (
	pieceBytes  = 1 << 20
	pieceCopies = 256 // 8 KiB of them, on the stack of each hand
	turnBytes   = 4 << 20

	// handBuffers is how many a hand uses at most.
	handBuffers = 8
)

var (
	errTotal = fmt.Errorf("the read took longer than its total time: %w", transfer.ErrStalled)
	errStall = fmt.Errorf("no buffer was filled, or emptied, for the stall time; look at the devices of both nodes: %w", transfer.ErrStalled)
)

// Read is [transfer.Link.Read].
func (l *link) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	started := time.Now()
	done, total, err := l.read(ctx, started, seals, copies)
	l.t.count(done, err)
	if err == nil {
		return nil
	}
	return &transfer.Error{
		Transport: Name, Peer: l.peer.Life, Address: l.hold.Address(),
		Done: done, Total: total, Took: time.Since(started), Err: err,
	}
}

func (t *Transport) count(done int64, err error) {
	t.stats.readBytes.Add(uint64(done))
	switch {
	case err == nil:
		t.stats.reads.Add(1)
	case errors.Is(err, transfer.ErrStale):
		t.stats.stale.Add(1)
	default:
		t.stats.errors.Add(1)
	}
}

func (l *link) read(ctx context.Context, started time.Time, seals []transfer.Seal, copies []transfer.Copy) (done, total int64, err error) {
	if err := l.hold.Begin(); err != nil {
		return 0, max(0, transfer.Bytes(copies)), err
	}
	defer l.hold.Done()
	if total, err = transfer.Check(seals, copies, l.sizes); err != nil {
		return 0, total, err
	}
	if ctx.Err() != nil {
		return 0, total, transfer.Reason(ctx)
	}
	if err := l.held(seals); err != nil { // saves the work
		return 0, total, err
	}
	p := pull{l: l, deadline: deadline(started, l.t.limits.Total(total)), more: len(copies) > 0}
	p.run(ctx, total, copies)
	if p.err != nil {
		return p.done, total, p.err
	}
	// Every hand has returned, and its stores are fenced: what follows reads the
	// words anew, behind a load fence.
	return p.done, total, l.held(seals)
}

// sizes are those of a rank's arenas there and here.
func (l *link) sizes(rank id.Rank) (remote, local int64, ok bool) {
	if rank < 0 || rank >= id.MaxRanks || l.arenas[rank].there == 0 {
		return 0, 0, false
	}
	return l.arenas[rank].there, l.arenas[rank].here, true
}

// held looks at the peer's seal words.
func (l *link) held(seals []transfer.Seal) (err error) {
	defer l.survive(debug.SetPanicOnFault(true), &err)
	if !transfer.Held(l.seals, seals) {
		return transfer.ErrStale
	}
	return nil
}

// pull is the copying of one read, by one hand or several.
type pull struct {
	l        *link
	deadline time.Time
	buffers  chan *slot // of whatever the pieces go through; nil: nothing
	each     int        // how many of them a hand uses at a time

	mu     sync.Mutex
	cutter transfer.Cutter
	more   bool // false too once err is set
	done   int64
	err    error // of the first hand that failed
}

// run moves all copies, by as many hands as there are workers and work for.
func (p *pull) run(ctx context.Context, total int64, copies []transfer.Copy) {
	workers := int64(cap(p.l.t.workers.slots))
	switch ring, own := p.l.ring, p.l.t.staging; {
	case ring != nil:
		// A device empties buffers by itself, so that one hand does.
		hands := min(workers, int64(len(ring.slots)+1)/2)
		if own != nil {
			hands = 1
		}
		p.buffers = ring.free
		p.each = min(handBuffers, max(1, len(ring.slots)/int(hands)))
		p.together(ctx, total, copies, hands, int64(ring.size), maxCopies, (*pull).stage)
	case own != nil:
		p.buffers, p.each = own.free, 2
		p.together(ctx, total, copies, workers, int64(own.size), maxCopies, (*pull).stage)
	default:
		p.together(ctx, total, copies, workers, pieceBytes, pieceCopies, (*pull).work)
		return
	}
	p.landed(nil, p.over(ctx)) // a device may have been waited for long after the read was to end
}

// together lets hands of them work on pieces of so many bytes and copies, fewer
// if there are fewer pieces, and returns when all have ended.
func (p *pull) together(ctx context.Context, total int64, copies []transfer.Copy, hands, bytes int64, count int, hand func(*pull, context.Context)) {
	p.cutter = transfer.Cut(copies, bytes, count)
	if hands = min(hands, (total+bytes-1)/bytes); hands <= 1 {
		hand(p, ctx)
		return
	}
	var work sync.WaitGroup
	for range hands - 1 {
		work.Go(func() { hand(p, ctx) })
	}
	hand(p, ctx)
	work.Wait()
}

// work copies pieces until there are none.
func (p *pull) work(ctx context.Context) {
	var room [pieceCopies]transfer.Copy
	w := &p.l.t.workers
	var since int64 // bytes of this turn
	held := false
	defer func() {
		if held {
			w.release()
		}
	}()
	for {
		piece := p.next(room[:0])
		if len(piece) == 0 {
			return
		}
		if held && since >= turnBytes && w.wanted() {
			w.release()
			held = false
		}
		err := p.over(ctx)
		if err == nil && !held {
			err = p.turn(ctx)
			held, since = err == nil, 0
		}
		if err == nil {
			err = p.l.copy(piece)
		}
		since += p.landed(piece, err)
	}
}

// next is the next piece, without a copy if there is none.
func (p *pull) next(room []transfer.Copy) (piece []transfer.Copy) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.more {
		piece, p.more = p.cutter.Next(room)
	}
	return piece
}

// landed notes how a piece ended, and returns its bytes.
func (p *pull) landed(piece []transfer.Copy, err error) int64 {
	bytes := transfer.Bytes(piece)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		p.done += bytes
		return bytes
	}
	p.more = false
	if p.err == nil {
		p.err = err
	}
	return bytes
}

// over says why the read is to end, nil if it is not.
func (p *pull) over(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-p.l.hold.Ended():
		return p.l.hold.Reason()
	default:
	}
	if time.Until(p.deadline) <= 0 {
		return errTotal
	}
	return nil
}

// turn waits for a worker that is free, behind those who wait already, and takes
// it. It fails if the read is to end.
func (p *pull) turn(ctx context.Context) error {
	w := &p.l.t.workers
	if w.tryTake() {
		return nil
	}
	timer := time.NewTimer(time.Until(p.deadline))
	defer timer.Stop()
	w.waiting.Add(1)
	defer w.waiting.Add(-1)
	select {
	case w.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-p.l.hold.Ended():
		return p.l.hold.Reason()
	case <-timer.C:
		return errTotal
	}
}

// workers bounds the copies that run at once, of all links together.
type workers struct {
	slots   chan struct{} // one a worker; whoever waits gets its turn in order
	waiting atomic.Int64
}

func (w *workers) tryTake() bool {
	select {
	case w.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

func (w *workers) release() { <-w.slots }

// wanted reports whether somebody waits for a worker.
func (w *workers) wanted() bool { return w.waiting.Load() > 0 }

// copy copies a piece that has been checked. When it returns its stores are
// ordered before all later ones.
func (l *link) copy(piece []transfer.Copy) (err error) {
	defer l.survive(debug.SetPanicOnFault(true), &err)
	src := l.source(piece, 0)
	for i := range piece {
		c := &piece[i]
		dst := l.arenas[c.Rank].local[c.Local:][:c.Bytes]
		next := l.source(piece, i+1)
		if l.t.cached {
			copy(dst, src)
		} else {
			memory.Stream(dst, src, next)
		}
		src = next
	}
	return nil
}

// source is where a copy of a piece reads, nil behind the last.
func (l *link) source(piece []transfer.Copy, i int) []byte {
	if i >= len(piece) {
		return nil
	}
	c := &piece[i]
	return l.arenas[c.Rank].remote[c.Remote:][:c.Bytes]
}

// survive is deferred around what touches the peer's memory, which cannot go
// away, but can break: a page that the machine has lost ends the read, and not
// the process. before is how faults were treated.
func (l *link) survive(before bool, err *error) {
	debug.SetPanicOnFault(before)
	fault := recover()
	if fault == nil {
		return
	}
	at, ok := fault.(interface{ Addr() uintptr })
	if !ok || !l.theirs(at.Addr()) {
		panic(fault) // our own bug
	}
	*err = fmt.Errorf("the peer's memory can't be read; look for memory errors in the kernel's log: %v", fault)
}

// theirs reports whether an address is in what the peer gave.
func (l *link) theirs(at uintptr) bool {
	if within(at, l.seals.Region().Bytes()) {
		return true
	}
	if l.ring != nil && within(at, l.ring.region.Bytes()) {
		return true
	}
	for i := range l.arenas {
		if within(at, l.arenas[i].remote) {
			return true
		}
	}
	return false
}

func within(at uintptr, b []byte) bool {
	return len(b) > 0 && at-uintptr(unsafe.Pointer(&b[0])) < uintptr(len(b))
}
