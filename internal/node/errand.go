package node

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// errand is what is read of one owner for one rank. It is read in slices, one
// after the other, each with a place of its own in the queue of reads: so nothing
// that is urgent waits for the whole of what is not, and no peer for the whole of
// what another one gives.
type errand struct {
	follow *follow
	run    *reading
	part   int // of the retrieval
	peer   *peer
	source id.Publication
	seals  []transfer.Seal
	copies []transfer.Copy
	bytes  int64 // of all copies

	cut   transfer.Cutter
	left  int64 // bytes that no slice has had
	slice []transfer.Copy
	place *transfer.Place // for the slice

	link transfer.Link // nil: not its turn yet
	by   string        // the transport of the link
	err  error         // of the read that failed
}

// errands are what a retrieval reads, made before any of it is read: an error
// leaves nothing behind.
func (n *Node) errands(f *follow, run *reading, parts []part, r manager.Retrieval) (errands []*errand, total int64, err error) {
	for owner, p := range parts {
		name := p.source.Name
		peer := n.peers.byLife(name.Owner)
		if peer == nil {
			return nil, 0, &partError{name, fmt.Errorf("%s: %w", name.Owner, errOwnerLost)}
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
					return nil, 0, &partError{name, err}
				}
			}
			if len(copies) == 0 {
				continue
			}
			n.metrics.chunks(copies)
			bytes := transfer.Bytes(copies)
			total += bytes
			errands = append(errands, &errand{
				follow: f, run: run, part: owner, peer: peer, source: name, seals: seals, copies: copies, bytes: bytes,
				cut: transfer.Cut(copies, n.slice(), math.MaxInt), left: bytes,
			})
		}
	}
	return errands, total, nil
}

func (n *Node) slice() int64 { return int64(n.config.Transfer.Limits.Slice) }

// pullOnce is one attempt. It returns when nothing of it can land any more.
func (n *Node) pullOnce(ctx context.Context, f *follow, run *reading, parts []part, r manager.Retrieval) (total int64, by string, err error) {
	errands, total, err := n.errands(f, run, parts, r)
	if err != nil {
		return 0, "", err
	}
	defer func() {
		for _, e := range errands {
			e.leave()
		}
	}()
	for _, e := range errands {
		if _, err := e.take(); err != nil { // nothing has begun
			return 0, "", &partError{e.source, err}
		}
	}
	// All have returned, whichever failed. Then nothing new is begun, and what is
	// under way ends as it does.
	reads, begin := errgroup.WithContext(ctx)
	for _, e := range errands {
		reads.Go(func() error {
			if err := e.read(ctx, begin); err != nil {
				return &partError{e.source, err}
			}
			return nil
		})
	}
	err = reads.Wait()
	for _, e := range errands {
		by = cmp.Or(by, e.by)
	}
	giveBack(ctx, errands)
	if err != nil {
		return 0, by, err
	}
	return total, by, nil
}

// giveBack gives the links back, those that served well first: one failure is not
// made good by what another errand has read in the same attempt.
func giveBack(ctx context.Context, errands []*errand) {
	for _, well := range []bool{true, false} {
		for _, e := range errands {
			if e.link == nil || (e.err == nil) != well {
				continue
			}
			err := e.err
			if err != nil && ctx.Err() != nil {
				err = ctx.Err() // it was cut off
			}
			e.peer.ended(e.link, err)
		}
	}
}

// read reads slices until none is left. begin ends the waiting for a turn, ctx
// the reading.
func (e *errand) read(ctx, begin context.Context) error {
	defer e.leave()
	for {
		if err := e.place.Wait(begin); err != nil {
			return err
		}
		if begin.Err() != nil { // its turn came too late
			return context.Cause(begin)
		}
		e.follow.reads(e.run, e.peer, e.by)
		if e.link == nil {
			transport, link, err := e.peer.reader(ctx)
			if err != nil {
				return e.peer.unreachable(err)
			}
			e.link, e.by = link, transport.Name()
			e.follow.reads(e.run, e.peer, e.by)
		}
		if e.err = e.link.Read(ctx, e.seals, e.slice); e.err != nil {
			return e.err
		}
		if more, err := e.take(); err != nil || !more {
			return err
		}
	}
}

// take takes the next slice, and a place for it: false if none is left. The error
// wraps [transfer.ErrQueueFull]. Who has a place already gives it up for the new
// one; if the queue is full it goes on at the old one: what has begun is not
// refused.
func (e *errand) take() (bool, error) {
	if e.left == 0 {
		return false, nil
	}
	bytes := min(e.left, e.follow.node.slice())
	place, err := e.follow.queue(e.run, e.source.Owner, bytes)
	switch {
	case err == nil:
		e.leave()
		e.place = place
	case e.place == nil:
		return false, err
	}
	e.left -= bytes
	if bytes == e.bytes {
		e.slice = e.copies // nothing is cut
	} else {
		e.slice, _ = e.cut.Next(e.slice[:0])
	}
	return true, nil
}

// leave gives the place up, in any phase and as often as one likes.
func (e *errand) leave() {
	if e.place != nil {
		e.follow.unqueue(e.run, e.place)
	}
}

// queue takes a place in the queue of reads, which is urgent if the read is, or
// becomes so.
func (f *follow) queue(run *reading, of id.Life, bytes int64) (*transfer.Place, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	p, err := f.node.reads.Join(of, bytes, run.urgent)
	if err != nil {
		return nil, err
	}
	run.places[p] = struct{}{}
	return p, nil
}

func (f *follow) unqueue(run *reading, p *transfer.Place) {
	p.Leave()
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(run.places, p)
}

// urge makes what is read urgent, if it is what the query waits for.
func (f *follow) urge(q query) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.urgeLocked(q)
}

func (f *follow) urgeLocked(q query) {
	f.query.prefetch = f.query.prefetch && q.prefetch
	if run := f.running; run != nil && !run.urgent && run.serves(q) {
		run.urgent = true
		for p := range run.places {
			p.Urge()
		}
	}
}
