package shm

import (
	"context"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
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
	errTaken = fmt.Errorf("other reads had all buffers for the stall time; look at the devices of both nodes: %w", transfer.ErrStalled)
	errStall = fmt.Errorf("the peer filled no buffer for the stall time; look at its device: %w", transfer.ErrStalled)
)

// Read is [transfer.Link.Read].
func (l *link) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	return l.hold.Read(ctx, seals, copies, l)
}

// Seals is [rendezvous.Source.Seals].
func (l *link) Seals() *memory.SealTable { return l.seals }

// Sizes is [rendezvous.Source.Sizes].
func (l *link) Sizes(rank id.Rank) (remote, local int64, ok bool) {
	if rank < 0 || rank >= id.MaxRanks || l.arenas[rank].there == 0 {
		return 0, 0, false
	}
	return l.arenas[rank].there, l.arenas[rank].here, true
}

// Copy is [rendezvous.Source.Copy]. Every hand has returned with it, and its stores
// are fenced.
func (l *link) Copy(ctx context.Context, r rendezvous.Read, total int64, copies []transfer.Copy) (done int64, err error) {
	p := pull{Read: r, l: l, more: true}
	p.run(ctx, total, copies)
	return p.done, p.err
}

// pull is the copying of one read, by one hand or several.
type pull struct {
	rendezvous.Read
	l       *link
	buffers chan *slot // of whatever the pieces go through; nil: nothing
	each    int        // how many of them a hand uses at a time

	mu     sync.Mutex
	cutter transfer.Cutter
	more   bool // false too once err is set
	done   int64
	err    error // of the first hand that failed
}

// run moves all copies, by as many hands as there are workers and work for.
func (p *pull) run(ctx context.Context, total int64, copies []transfer.Copy) {
	workers := int64(p.l.t.workers.All())
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
		p.together(ctx, total, copies, workers, int64(own.size), transfer.StagedCopies, (*pull).stage)
	default:
		p.together(ctx, total, copies, workers, pieceBytes, pieceCopies, (*pull).work)
		return
	}
	p.landed(nil, p.Over(ctx)) // a device may have been waited for long after the read was to end
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
	w := p.l.t.workers
	var since int64 // bytes of this turn
	held := false
	defer func() {
		if held {
			w.Release()
		}
	}()
	for {
		piece := p.next(room[:0])
		if len(piece) == 0 {
			return
		}
		if held && since >= turnBytes && w.Wanted() {
			w.Release()
			held = false
		}
		err := p.Over(ctx)
		if err == nil && !held {
			err = p.Turn(ctx, w)
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

// copy copies a piece that has been checked. When it returns its stores are
// ordered before all later ones.
func (l *link) copy(piece []transfer.Copy) (err error) {
	defer memory.Survive(debug.SetPanicOnFault(true), l.theirs, &err)
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

// theirs reports whether an address is in what the peer gave.
func (l *link) theirs(at uintptr) bool {
	if l.ring != nil && l.ring.region.Holds(at) {
		return true
	}
	for i := range l.arenas {
		if m := l.arenas[i].mapped; m != nil && m.Holds(at) {
			return true
		}
	}
	return false
}
