package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/api/kvferrypb"
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
	state  string
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
	run := &reading{id: r.ID, cancel: cancel, done: make(chan struct{}), state: "queued"}
	f.mu.Lock()
	f.running = run
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

// pull moves a retrieval's bytes, with another attempt when that can help. It
// returns when nothing of it can land any more.
func (n *Node) pull(ctx context.Context, f *follow, run *reading, parts []part, r manager.Retrieval) (bytes int64, by string, err error) {
	// Those in front are bounded each, and the caller may give up and cancel.
	select {
	case n.reads <- struct{}{}:
		defer func() { <-n.reads }()
	case <-ctx.Done():
		return 0, "", context.Cause(ctx)
	}
	wait := n.config.Timers.BackoffMin
	attempts := n.config.Timers.Attempts
	bad := 0 // attempts of which bytes were others than published
	for attempt := 1; ; attempt++ {
		f.state(run, "reading")
		if bytes, by, err = n.pullOnce(ctx, parts, r); err == nil {
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
		f.state(run, "backoff")
		if !sleep(ctx, wait/2+rand.N(wait/2+1)) { // jitter
			return bytes, by, context.Cause(ctx)
		}
		wait = min(2*wait, n.config.Timers.BackoffMax)
	}
}

// mayHelp says whether another attempt can end otherwise.
func mayHelp(err error) bool {
	for _, final := range []error{transfer.ErrStale, transfer.ErrIdentity, identity.ErrRefused, transfer.ErrRange, errOwnerLost} {
		if errors.Is(err, final) {
			return false
		}
	}
	return true
}

// errand is what is read of one owner for one rank.
type errand struct {
	peer   *peer
	source id.Publication
	link   transfer.Link
	seals  []transfer.Seal
	copies []transfer.Copy
}

func (n *Node) pullOnce(ctx context.Context, parts []part, r manager.Retrieval) (total int64, by string, err error) {
	// All are planned before the first is read, so that an error leaves none behind.
	var errands []errand
	for owner, p := range parts {
		planned, transport, err := n.errands(ctx, owner, p, r)
		by = cmp.Or(transport, by)
		if err != nil {
			return 0, by, &partError{p.source.Name, err}
		}
		errands = append(errands, planned...)
	}
	var reads errgroup.Group // all have returned, whichever failed
	for _, s := range errands {
		for _, c := range s.copies {
			total += c.Bytes
		}
		n.metrics.chunks(s.copies)
		reads.Go(func() error {
			err := s.link.Read(ctx, s.seals, s.copies)
			if errors.Is(err, transfer.ErrIdentity) || errors.Is(err, transfer.ErrClosed) {
				s.peer.drop(s.link)
			}
			if err != nil {
				return &partError{s.source, err}
			}
			return nil
		})
	}
	if err := reads.Wait(); err != nil {
		return 0, by, err
	}
	return total, by, nil
}

// errands are what a retrieval reads of one owner: the parts' owner-th.
func (n *Node) errands(ctx context.Context, owner int, p part, r manager.Retrieval) (errands []errand, by string, err error) {
	name := p.source.Name
	peer := n.peers.byLife(name.Owner)
	if peer == nil {
		return nil, "", fmt.Errorf("%s: %w", name.Owner, errOwnerLost)
	}
	link, transport, err := peer.reader(ctx)
	if err != nil {
		return nil, "", fmt.Errorf("open a link to %s: %w", name.Owner, peer.unreachable(err))
	}
	value, _ := id.SealValue(name.Owner.Incarnation, name.Sequence)
	seals := []transfer.Seal{{Index: p.seal, Value: value}}
	for _, rank := range n.ranks {
		var copies []transfer.Copy
		for _, m := range r.Moves {
			if m.Owner != owner || !slices.Contains(m.Ranks, rank) {
				continue
			}
			remote := transfer.Side{Layout: p.source.Geometry.Layout, Start: m.RemoteStart, Pages: m.Remote}
			local := transfer.Side{Layout: n.geometry.Layout, Start: m.LocalStart, Pages: m.Local}
			if copies, err = transfer.Copies(copies, rank, remote, local, m.From, m.To); err != nil {
				return nil, transport.Name(), err
			}
		}
		if len(copies) > 0 {
			errands = append(errands, errand{peer, name, link, seals, copies})
		}
	}
	return errands, transport.Name(), nil
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
	f.wakeLocked()
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
