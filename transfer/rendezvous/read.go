package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

// Source is the memory of a peer that a [Hold] reads from.
type Source interface {
	// Seals is the peer's seal table.
	Seals() *memory.SealTable
	// Sizes are those of a rank's arenas there and here, in bytes; not ok: one side
	// has none.
	Sizes(rank id.Rank) (remote, local int64, ok bool)
	// Copy performs copies that have been checked, of total bytes, until r is over.
	// It returns when nothing is written any more; done are the bytes that landed.
	Copy(ctx context.Context, r Read, total int64, copies []transfer.Copy) (done int64, err error)
}

// Read is [transfer.Link.Read] of a link to this peer: it looks at the seal words,
// lets from copy, and looks at the words again. The words are the peer's memory, a
// page of which the machine can lose: that is an error.
func (h *Hold) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy, from Source) error {
	started := time.Now()
	done, total, err := h.read(ctx, started, seals, copies, from)
	h.s.stats.count(done, err)
	if err == nil {
		return nil
	}
	return &transfer.Error{
		Transport: h.s.o.Protocol.Name, Peer: h.life, Address: h.address,
		Done: done, Total: total, Took: time.Since(started), Err: err,
	}
}

func (h *Hold) read(ctx context.Context, started time.Time, seals []transfer.Seal, copies []transfer.Copy, from Source) (done, total int64, err error) {
	if err := h.Begin(); err != nil {
		return 0, max(0, transfer.Bytes(copies)), err
	}
	defer h.Done()
	if total, err = transfer.Check(seals, copies, from.Sizes); err != nil {
		return 0, total, err
	}
	if ctx.Err() != nil {
		return 0, total, transfer.Reason(ctx)
	}
	if err := held(from.Seals(), seals); err != nil { // saves the work
		return 0, total, err
	}
	r := Read{hold: h, Deadline: started.Add(h.s.o.Limits.Total(total))}
	if len(copies) > 0 {
		if done, err = from.Copy(ctx, r, total, copies); err != nil {
			return done, total, err
		}
	}
	// Everything has landed, and what wrote it has been waited for: what follows
	// reads the words anew, behind a load fence.
	return done, total, held(from.Seals(), seals)
}

// held looks at a peer's seal words.
func held(words *memory.SealTable, seals []transfer.Seal) (err error) {
	defer memory.Survive(debug.SetPanicOnFault(true), words.Region().Holds, &err)
	if !transfer.Held(words, seals) {
		return transfer.ErrStale
	}
	return nil
}

// Read is one read of a link, and what ends it beside its context.
type Read struct {
	Deadline time.Time // its total time is over
	hold     *Hold
}

// Over says why the read is to end, nil if it is not.
func (r *Read) Over(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-r.hold.Ended():
		return r.hold.Reason()
	default:
	}
	if time.Until(r.Deadline) <= 0 {
		return transfer.ErrTotal
	}
	return nil
}

// Broken says why a frame could not be sent, which has ended the connection, and
// with it the hold.
func (r *Read) Broken(err error) error {
	<-r.hold.Ended()
	return fmt.Errorf("%w: %w", r.hold.Reason(), err)
}

// Turn takes a turn, behind those who wait for one already. It fails if the read
// is to end.
func (r *Read) Turn(ctx context.Context, t *Turns) error {
	if t.Try() {
		return nil
	}
	timer := time.NewTimer(time.Until(r.Deadline))
	defer timer.Stop()
	t.waiting.Add(1)
	defer t.waiting.Add(-1)
	select {
	case t.slots <- struct{}{}:
		return nil
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-r.hold.Ended():
		return r.hold.Reason()
	case <-timer.C:
		return transfer.ErrTotal
	}
}

// Await receives from c. It fails if the read is to end, and with late if nothing
// comes for the stall time.
func Await[T any](ctx context.Context, r *Read, c <-chan T, late error) (v T, err error) {
	select {
	case v = <-c:
		return v, nil
	default:
	}
	left, stall := time.Until(r.Deadline), r.hold.s.o.Limits.Stall
	timer := time.NewTimer(min(left, stall))
	defer timer.Stop()
	select {
	case v = <-c:
		return v, nil
	case <-ctx.Done():
		return v, transfer.Reason(ctx)
	case <-r.hold.Ended():
		return v, r.hold.Reason()
	case <-timer.C:
		if left <= stall {
			return v, transfer.ErrTotal
		}
		return v, late
	}
}

// Turns bound what runs at once, of all reads of a transport together. Whoever
// waits gets its turn in order. They are safe for concurrent use.
type Turns struct {
	slots   chan struct{} // one a turn that is taken
	waiting atomic.Int64
}

// NewTurns makes n turns.
func NewTurns(n int) *Turns { return &Turns{slots: make(chan struct{}, n)} }

// Try takes a turn if one is free.
func (t *Turns) Try() bool {
	select {
	case t.slots <- struct{}{}:
		return true
	default:
		return false
	}
}

// Release gives a turn back.
func (t *Turns) Release() { <-t.slots }

// Wanted reports whether somebody waits.
func (t *Turns) Wanted() bool { return t.waiting.Load() > 0 }

// Taken is how many turns are taken.
func (t *Turns) Taken() int { return len(t.slots) }

// All is how many turns there are.
func (t *Turns) All() int { return cap(t.slots) }

// reads counts those of all links of a server.
type reads struct{ held, bytes, stale, failed atomic.Uint64 }

func (c *reads) count(done int64, err error) {
	c.bytes.Add(uint64(done))
	switch {
	case err == nil:
		c.held.Add(1)
	case errors.Is(err, transfer.ErrStale):
		c.stale.Add(1)
	default:
		c.failed.Add(1)
	}
}
