package cudaipc

import (
	"context"
	"fmt"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// A batch is what a device is given in one call, and what is copied between two
// looks at what may end a read: some tens of microseconds of work on one device,
// some milliseconds between two. While one is copied the next one waits in the
// device's queue, so that it never stands still; more than these two would only
// keep others waiting.
const (
	batchBytes  = 64 << 20
	batchCopies = 2048
	readBatches = 2 // under way at once, of one read
	allBatches  = 6 // of all reads together
)

// Read is [transfer.Link.Read].
func (l *link) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	return l.hold.Read(ctx, seals, copies, l)
}

// Seals is [rendezvous.Source.Seals].
func (l *link) Seals() *memory.SealTable { return l.seals }

// Sizes is [rendezvous.Source.Sizes].
func (l *link) Sizes(rank id.Rank) (remote, local int64, ok bool) {
	if rank < 0 || rank >= id.MaxRanks || l.arenas[rank].remote == nil {
		return 0, 0, false
	}
	return l.arenas[rank].bytes, l.arenas[rank].local.Size(), true
}

// Copy is [rendezvous.Source.Copy]. The devices have said, when it returns, that
// every copy is over.
func (l *link) Copy(ctx context.Context, r rendezvous.Read, _ int64, copies []transfer.Copy) (done int64, err error) {
	p := pull{Read: r, l: l}
	err = p.run(ctx, copies)
	return p.done, err
}

// pull is the copying of one read, by the goroutine that reads.
type pull struct {
	rendezvous.Read
	l        *link
	underway [readBatches]*batch // the oldest first
	n        int                 // of them
	done     int64
}

// run copies everything, and returns when nothing is under way any more.
func (p *pull) run(ctx context.Context, copies []transfer.Copy) (err error) {
	cutter := transfer.Cut(copies, p.l.t.batchBytes, p.l.t.batchCopies)
	for more := true; more && err == nil; {
		if err = p.room(ctx); err != nil {
			break
		}
		b, _ := p.l.t.batches.Get().(*batch)
		more = b.fill(&cutter)
		b.start(p.l)
		p.underway[p.n] = b
		p.n++
	}
	for p.n > 0 {
		if e := p.finish(); err == nil {
			err = e
		}
	}
	return err
}

// room waits until one more batch may be under way, and takes its turn. Who has a
// turn never waits for another one, but for the end of its own.
func (p *pull) room(ctx context.Context) error {
	for {
		if err := p.Over(ctx); err != nil {
			return err
		}
		if p.n < readBatches && p.l.t.turns.Try() {
			return nil
		}
		if p.n == 0 {
			return p.Turn(ctx, p.l.t.turns)
		}
		if err := p.finish(); err != nil {
			return err
		}
	}
}

// finish waits for the oldest batch, gives its turn to others, and says whether
// all of it has landed.
func (p *pull) finish() error {
	b := p.underway[0]
	copy(p.underway[:], p.underway[1:p.n])
	p.n--
	err := b.wait()
	p.l.t.turns.Release()
	if err == nil {
		p.done += b.bytes
	}
	b.reset()
	p.l.t.batches.Put(b)
	return err
}

// batch is some copies under way, with room that is used again.
type batch struct {
	bytes    int64
	copies   []transfer.Copy
	segments []memory.Segment // lent to the devices until wait has returned
	tickets  []memory.Ticket
}

func newBatch() any {
	return &batch{copies: make([]transfer.Copy, 0, batchCopies), segments: make([]memory.Segment, 0, batchCopies)}
}

// fill takes the next copies, and reports whether there are more behind them.
func (b *batch) fill(cutter *transfer.Cutter) (more bool) {
	b.copies, more = cutter.Next(b.copies)
	b.bytes = transfer.Bytes(b.copies)
	return more
}

// start starts one copy for each run of copies of one rank. They have been checked.
func (b *batch) start(l *link) {
	for i := 0; i < len(b.copies); {
		rank, first := b.copies[i].Rank, len(b.segments)
		for ; i < len(b.copies) && b.copies[i].Rank == rank; i++ {
			c := &b.copies[i]
			b.segments = append(b.segments, memory.Segment{Arena: c.Local, Other: c.Remote, Bytes: c.Bytes})
		}
		s := &l.arenas[rank]
		b.tickets = append(b.tickets, l.t.runtime.Pull(s.local, s.remote, b.segments[first:]))
	}
}

// wait returns when nothing of the batch is copied any more.
func (b *batch) wait() error {
	var first error
	for _, t := range b.tickets {
		if err := t.Wait(); err != nil && first == nil {
			first = fmt.Errorf("copy on the device: %w", err)
		}
	}
	return first
}

func (b *batch) reset() {
	clear(b.tickets)
	b.bytes, b.copies, b.segments, b.tickets = 0, b.copies[:0], b.segments[:0], b.tickets[:0]
}
