package transfertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/transfer"
)

// Fault is what goes wrong with one read. The zero Fault is none. Delay and
// Reorder go with any other; of the rest, the first that is set counts.
type Fault struct {
	// Delay passes before the first byte.
	Delay time.Duration
	// Reorder cuts the copies and lands the pieces in another order.
	Reorder bool

	// Lose: not a byte lands, and the read ends with its context, with Close,
	// or, as every transport must, after the stall time.
	Lose bool
	// Err ends the read when about half of the copies have landed.
	Err error
	// Cancel ends the context of the read when about half of the copies have
	// landed, as if the caller had done it.
	Cancel bool
	// Late: the bytes land, all of them, this long after the context of the
	// read has ended (or after Close, or the stall time), and only then does the
	// read return, with an error. Whoever gives the destination away when the
	// context ends finds them in it.
	Late time.Duration
}

// Faulty is a transport whose reads fail as planned. It keeps the promises of
// [transfer.Link] if the transport below does; nothing that goes wrong here
// entitles a caller to less. It is safe for concurrent use.
type Faulty struct {
	transfer.Transport
	stall time.Duration
	plan  func(read int) Fault

	mu    sync.Mutex
	reads int
	links map[*faultyLink]struct{}
}

// NewFaulty wraps t. plan is asked once a read, with the number of the read
// from 0; it may be called from several goroutines. limits tell when a lost
// read stalls.
func NewFaulty(t transfer.Transport, limits transfer.Limits, plan func(read int) Fault) *Faulty {
	return &Faulty{Transport: t, stall: limits.WithDefaults().Stall, plan: plan, links: map[*faultyLink]struct{}{}}
}

// Open is [transfer.Transport.Open]; opening does not fail by plan.
func (f *Faulty) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	inner, err := f.Transport.Open(ctx, peer)
	if err != nil {
		return nil, err
	}
	l := &faultyLink{f: f, inner: inner, peer: peer, closing: make(chan struct{})}
	f.mu.Lock()
	f.links[l] = struct{}{}
	f.mu.Unlock()
	return l, nil
}

// Close is [transfer.Transport.Close].
func (f *Faulty) Close() error {
	f.mu.Lock()
	links := slices.Collect(maps.Keys(f.links))
	f.mu.Unlock()
	for _, l := range links {
		if err := l.Close(); err != nil {
			return err
		}
	}
	return f.Transport.Close()
}

func (f *Faulty) next() Fault {
	f.mu.Lock()
	n := f.reads
	f.reads++
	f.mu.Unlock()
	return f.plan(n)
}

type faultyLink struct {
	f       *Faulty
	inner   transfer.Link
	peer    transfer.Peer
	closing chan struct{}

	mu     sync.Mutex
	closed bool
	reads  sync.WaitGroup
}

func (l *faultyLink) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	started := time.Now()
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return l.inner.Read(ctx, seals, copies) // it is closed too and says so
	}
	l.reads.Add(1)
	l.mu.Unlock()
	defer l.reads.Done()

	done, err := l.read(ctx, l.f.next(), seals, copies)
	if err == nil {
		return nil
	}
	// One error of the read as a whole, whichever part failed.
	address := ""
	if e, ok := errors.AsType[*transfer.Error](err); ok {
		done, address, err = done+e.Done, e.Address, e.Err
	}
	return &transfer.Error{
		Transport: l.f.Name(), Peer: l.peer.Life, Address: address,
		Done: done, Total: transfer.Bytes(copies), Took: time.Since(started), Err: err,
	}
}

func (l *faultyLink) read(ctx context.Context, fault Fault, seals []transfer.Seal, copies []transfer.Copy) (done int64, err error) {
	if fault.Delay > 0 {
		if err := l.wait(ctx, fault.Delay); err != nil {
			return 0, err
		}
	}
	if fault.Reorder {
		copies = reorder(copies)
	}
	half := copies[:len(copies)/2]
	switch {
	case fault.Lose:
		if err := l.wait(ctx, l.f.stall); err != nil {
			return 0, err
		}
		return 0, fmt.Errorf("lost by plan: %w", transfer.ErrStalled)
	case fault.Err != nil:
		if err := l.inner.Read(ctx, seals, half); err != nil {
			return 0, err
		}
		return transfer.Bytes(half), fault.Err
	case fault.Cancel:
		if err := l.inner.Read(ctx, seals, half); err != nil {
			return 0, err
		}
		ctx, cancel := context.WithCancel(ctx)
		cancel()
		return transfer.Bytes(half), l.inner.Read(ctx, seals, copies[len(half):])
	case fault.Late > 0:
		ended := l.wait(ctx, l.f.stall)
		if ended == nil {
			ended = fmt.Errorf("late by plan: %w", transfer.ErrStalled)
		}
		pause(fault.Late)
		if err := l.inner.Read(context.WithoutCancel(ctx), seals, copies); err != nil {
			return 0, err
		}
		return transfer.Bytes(copies), ended
	}
	return 0, l.inner.Read(ctx, seals, copies)
}

// wait waits for d, and reports what ended it earlier.
func (l *faultyLink) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ctx.Err(), context.Cause(ctx))
	case <-l.closing:
		return fmt.Errorf("link: %w", transfer.ErrClosed)
	}
}

// pause waits for d, whatever happens.
func pause(d time.Duration) { <-time.After(d) }

// Close waits for late reads, whose bytes land before the link below closes.
func (l *faultyLink) Close() error {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		close(l.closing)
	}
	l.mu.Unlock()
	l.reads.Wait()
	l.f.mu.Lock()
	delete(l.f.links, l)
	l.f.mu.Unlock()
	return l.inner.Close()
}

// reorder cuts copies in two where they can be cut, and shuffles the pieces.
func reorder(copies []transfer.Copy) []transfer.Copy {
	pieces := make([]transfer.Copy, 0, 2*len(copies))
	for _, c := range copies {
		if c.Bytes < 2 {
			pieces = append(pieces, c) // also what the transport must refuse
			continue
		}
		first, second := c, c
		first.Bytes = c.Bytes / 3
		if first.Bytes == 0 {
			first.Bytes = 1
		}
		second.Bytes -= first.Bytes
		second.Remote += first.Bytes
		second.Local += first.Bytes
		pieces = append(pieces, first, second)
	}
	rand.Shuffle(len(pieces), func(i, j int) { pieces[i], pieces[j] = pieces[j], pieces[i] })
	return pieces
}

var (
	_ transfer.Transport = (*Faulty)(nil)
	_ transfer.Link      = (*faultyLink)(nil)
)
