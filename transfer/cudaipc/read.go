package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
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

var errTotal = fmt.Errorf("the read took longer than its total time: %w", transfer.ErrStalled)

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
	p := pull{l: l, deadline: deadline(started, l.t.limits.Total(total))}
	if err := p.run(ctx, copies); err != nil {
		return p.done, total, err
	}
	// The devices have said that every copy is over. What follows reads the words
	// anew, behind a load fence.
	return p.done, total, l.held(seals)
}

// deadline does not overflow.
func deadline(from time.Time, d time.Duration) time.Time {
	const century = 100 * 365 * 24 * time.Hour
	return from.Add(min(d, century))
}

// sizes are those of a rank's arenas there and here.
func (l *link) sizes(rank id.Rank) (remote, local int64, ok bool) {
	if rank < 0 || rank >= id.MaxRanks || l.arenas[rank].remote == nil {
		return 0, 0, false
	}
	return l.arenas[rank].bytes, l.arenas[rank].local.Size(), true
}

// pull is the copying of one read, by the goroutine that reads.
type pull struct {
	l        *link
	deadline time.Time
	underway [readBatches]*batch // the oldest first
	n        int                 // of them
	done     int64
}

// run copies everything, and returns when nothing is under way any more.
func (p *pull) run(ctx context.Context, copies []transfer.Copy) (err error) {
	cutter := transfer.Cut(copies, p.l.t.batchBytes, p.l.t.batchCopies)
	for more := len(copies) > 0; more && err == nil; {
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
		if err := p.over(ctx); err != nil {
			return err
		}
		if p.n < readBatches && p.l.t.turns.tryTake() {
			return nil
		}
		if p.n == 0 {
			return p.turn(ctx)
		}
		if err := p.finish(); err != nil {
			return err
		}
	}
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

// turn waits behind those who wait already. It fails if the read is to end.
func (p *pull) turn(ctx context.Context) error {
	timer := time.NewTimer(time.Until(p.deadline))
	defer timer.Stop()
	select {
	case p.l.t.turns <- struct{}{}:
		return nil
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-p.l.hold.Ended():
		return p.l.hold.Reason()
	case <-timer.C:
		return errTotal
	}
}

// finish waits for the oldest batch, gives its turn to others, and says whether
// all of it has landed.
func (p *pull) finish() error {
	b := p.underway[0]
	copy(p.underway[:], p.underway[1:p.n])
	p.n--
	err := b.wait()
	p.l.t.turns.release()
	if err == nil {
		p.done += b.bytes
	}
	b.reset()
	p.l.t.batches.Put(b)
	return err
}

// turns bounds the batches that are under way, of all links together: one place
// a batch. Whoever waits for one gets it in order.
type turns chan struct{}

func (t turns) tryTake() bool {
	select {
	case t <- struct{}{}:
		return true
	default:
		return false
	}
}

func (t turns) release() { <-t }

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
