package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// reading is one retrieval at work.
type reading struct {
	id     manager.RetrievalID
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when it has drained and the manager knows
	final  bool          // it brings in all that there will be
	reach  int           // tokens that a label has when it has landed, of what it reads

	// The follow's mutex guards these.
	state  string
	from   *peer  // that is read, the latest
	by     string // the transport, "" while no link to it is open
	failed error  // the attempt before
	bad    uint32 // attempts that have failed
	urgent bool
	places map[*transfer.Place]struct{} // in the queue of reads
}

// serves says whether somebody who asks so waits for it: it can make the request ready.
func (r *reading) serves(q query) bool {
	return !q.prefetch && (r.final || q.minTokens > 0 && r.reach >= q.minTokens)
}

// newReads is the queue of the slices that are read. One that waits has at most
// limits.Slice bytes, so their number bounds their bytes.
func newReads(limits config.Limits) *transfer.Queue {
	return transfer.NewQueue(transfer.QueueOptions{
		Bytes: int64(limits.Bytes), Places: limits.InFlight,
		Waiting: limits.Waiting, WaitingBytes: int64(limits.Waiting) * int64(limits.Slice),
	})
}

// resume goes on with what the engine was told is being read, when another
// publication goes on for it, until that is read: the engine may wait for the
// event alone.
func (n *Node) resume(f *follow) {
	f.mu.Lock()
	q := f.query
	f.mu.Unlock()
	q.wait, q.of = n.config.Timers.MaxHold, f.attempt
	n.spawn(func() {
		if _, err := n.retrieve(n.ctx, f.session, q); err != nil && !errors.Is(err, errOver) {
			f.session.emit(failedEvent(f.request, err))
		}
	})
}

// read starts one retrieval. It owns the retrieval until the manager has been
// told how it ended.
func (n *Node) read(f *follow, parts []part, r manager.Retrieval) {
	ctx, cancel := context.WithCancelCause(n.ctx)
	run := &reading{
		id: r.ID, cancel: cancel, done: make(chan struct{}), final: parts[0].source.Final(), reach: reach(r),
		state: "queued", places: make(map[*transfer.Place]struct{}),
	}
	f.mu.Lock()
	f.running = run
	run.urgent = run.serves(f.query)
	if f.over || f.err != nil { // it ended since it was looked at
		cancel(cmp.Or(f.err, errRemoved))
	}
	f.mu.Unlock()
	start := time.Now()
	work := func() {
		defer cancel(nil)
		bytes, by, err := n.pull(ctx, f, run, parts, r)
		n.settle(ctx, f, run, parts, bytes, by, err, time.Since(start))
	}
	if !n.spawn(work) {
		n.settle(ctx, f, run, parts, 0, "", errDraining, 0)
	}
}

// reach is how many tokens of what a retrieval reads there are when it has
// landed: of the label that has the fewest.
func reach(r manager.Retrieval) int {
	tokens := math.MaxInt
	for _, m := range r.Moves {
		tokens = min(tokens, m.To)
	}
	return tokens
}

// pull moves a retrieval's bytes, with another attempt when that can help. It
// returns when nothing of it can land any more. For its turn it waits as long as
// its context lasts: whoever is in front is bounded, and the caller may give up
// and cancel.
func (n *Node) pull(ctx context.Context, f *follow, run *reading, parts []part, r manager.Retrieval) (bytes int64, by string, err error) {
	wait := n.config.Timers.BackoffMin
	attempts := n.config.Timers.Attempts
	bad := 0 // attempts of which bytes were others than published
	for attempt := 1; ; attempt++ {
		f.state(run, "queued")
		if bytes, by, err = n.pullOnce(ctx, f, run, parts, r); err == nil {
			err = n.verify(ctx, parts, r)
		}
		if errors.Is(err, errChecksum) {
			bad++
		}
		if err == nil || bad > 1 || attempt >= attempts || ctx.Err() != nil || !mayHelp(err) {
			if err != nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return bytes, by, err
		}
		n.log.Warn("read failed, trying again", "request", string(r.Request), "node", blamed(err, r.Source).Owner.String(), "attempt", attempt, "err", err)
		f.backOff(run, err)
		if !sleep(ctx, wait/2+rand.N(wait/2+1)) { // jitter
			return bytes, by, context.Cause(ctx)
		}
		wait = min(2*wait, n.config.Timers.BackoffMax)
	}
}

// mayHelp says whether another attempt can end otherwise.
func mayHelp(err error) bool {
	for _, final := range []error{transfer.ErrStale, transfer.ErrIdentity, transfer.ErrQueueFull, identity.ErrRefused, transfer.ErrRange, errOwnerLost} {
		if errors.Is(err, final) {
			return false
		}
	}
	return true
}

// settle tells the manager how a retrieval ended, once, then whoever waits.
func (n *Node) settle(ctx context.Context, f *follow, run *reading, parts []part, bytes int64, by string, err error, took time.Duration) {
	source := parts[0].source
	if err == nil {
		// Refused if the request was removed or reset while the bytes landed.
		if err = n.manager.Landed(run.id); err != nil {
			err = fmt.Errorf("%w: %w", errRemoved, err)
		} else {
			n.tier.arrived(f.request)
		}
	}
	if err != nil {
		_ = n.manager.Failed(run.id) // unknown only if it was told before
	}
	if errors.Is(err, transfer.ErrStale) {
		n.metrics.stale.WithLabelValues("reader").Inc()
		err = n.staleCause(ctx, blamed(err, source.Name), err)
	}
	n.metrics.retrieval(err, by, took)
	f.mu.Lock()
	if f.running == run { // else another call has begun the next one
		f.running = nil
	}
	if by != "" {
		f.transport = by
	}
	if err == nil {
		f.bytes += bytes
		f.moved = 0
		if source.Final() {
			f.landed, f.err, f.refused = source, nil, nil
		}
	} else if f.err == nil {
		f.err = err
	}
	f.mu.Unlock()
	switch {
	case err != nil && f.mayGoOn():
		n.resume(f)
	case err != nil:
		f.session.emit(failedEvent(f.request, n.failed(f, err)))
	case source.Final():
		f.acknowledge(kvferrypb.CompleteItem_LANDED)
		f.session.emit(retrievedEvent(f.request, source.Name.Owner))
	}
	f.wake() // last: the scheduler runs first who was woken last, and this one's caller waits
	close(run.done)
}

// staleCause asks the owner how the publication ended, to say it.
func (n *Node) staleCause(ctx context.Context, name id.Publication, err error) error {
	n.board.Forget(name)
	p := n.peers.byLife(name.Owner)
	if p == nil {
		return err
	}
	res, asked := p.lookup(ctx, name.Sequence, "")
	if asked == nil && res.GetContinues() {
		return fmt.Errorf("%w: %w", errMoved, err)
	}
	if cause, ok := refusalOf(asked); ok {
		return fmt.Errorf("%w: %w", endedError(cause), err)
	}
	return err
}
