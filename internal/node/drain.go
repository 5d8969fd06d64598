package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// errLeft ends a node that has been told to leave the cluster.
var errLeft = fmt.Errorf("it has left the cluster: %w", errDraining)

const (
	drainTick = 10 * time.Millisecond  // between looks at what still runs
	tellTime  = 500 * time.Millisecond // for peers to hear what ends
	leaveTime = 2 * time.Second        // for the cluster to hear the goodbye
)

// leaving is how far the node is on its way out of the cluster.
type leaving struct {
	begun chan struct{} // closed when the node takes no new work
	left  chan struct{} // closed when it has said goodbye
	cut   unfinished    // what had not ended by itself; to be read once left is closed

	mu    sync.Mutex
	until time.Time // bound of what runs; zero: not begun
}

func newLeaving() leaving {
	return leaving{begun: make(chan struct{}), left: make(chan struct{})}
}

// begin says that the node leaves, within so long; false if it does already.
func (l *leaving) begin(within time.Duration) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.until.IsZero() {
		return false
	}
	l.until = time.Now().Add(within)
	close(l.begun)
	return true
}

// shorten brings the bound nearer.
func (l *leaving) shorten(within time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if at := time.Now().Add(within); at.Before(l.until) {
		l.until = at
	}
}

func (l *leaving) remaining() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return max(0, time.Until(l.until))
}

// isDraining says that the node takes no new work.
func (n *Node) isDraining() bool {
	select {
	case <-n.leaving.begun:
		return true
	case <-n.ctx.Done():
		return true
	default:
		return false
	}
}

// Drain takes the node out of the cluster. From now on it takes no new work;
// what runs has the timeout: publications of ours that readers may want, their
// leases, and what is brought in here. What is left of that is cut, and so is at
// once what no member could read; the node says goodbye, and its Done is closed.
// The bound of a drain that runs already comes nearer, and is never put off. The
// error is that ctx ended, which ends no drain.
func (n *Node) Drain(ctx context.Context, timeout time.Duration) error {
	n.leaveWithin(timeout)
	return n.awaitLeft(ctx)
}

// Leave is a drain that waits for nothing, nor does one that runs any longer.
func (n *Node) Leave(ctx context.Context) error {
	n.leaveWithin(0)
	return n.awaitLeft(ctx)
}

func (n *Node) awaitLeft(ctx context.Context) error {
	select {
	case <-n.leaving.left:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("leave the cluster: it goes on, but %w", context.Cause(ctx))
	}
}

// beginDrain returns at once, and does nothing if a drain runs.
func (n *Node) beginDrain(timeout time.Duration) {
	if n.leaving.begin(timeout) && !n.spawn(n.depart) {
		n.depart()
	}
}

// leaveWithin begins a drain, or shortens the one that runs.
func (n *Node) leaveWithin(timeout time.Duration) {
	n.beginDrain(timeout)
	n.leaving.shorten(timeout)
}

// depart is the whole of a drain.
func (n *Node) depart() {
	n.log.Info("draining", "within", n.leaving.remaining())
	if n.leaving.remaining() > 0 {
		n.spawn(n.tellDraining)
	}
	for n.ctx.Err() == nil && n.leaving.remaining() > 0 && !n.unfinished().none() {
		if !sleep(n.ctx, drainTick) {
			break
		}
	}
	rest := n.unfinished()
	rest.publications = n.owner.count() // also those that keep nobody waiting
	if !rest.none() {
		n.log.Warn("what still runs is cut", "publications", rest.publications, "leases", rest.leases, "retrievals", rest.retrievals,
			"readers", n.peers.mayRead(), "remaining", n.leaving.remaining())
	}
	n.leaving.cut = rest
	n.cut()
	n.awaitTold()
	n.send(n.plog.Bye())
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	if err := n.cluster.Leave(ctx); err != nil {
		n.log.Info("goodbye did not spread", "err", err)
	}
	n.log.Info("left the cluster")
	close(n.leaving.left)
	n.stop(errLeft)
}

// tellDraining tells the members, so that they push nothing here any more.
func (n *Node) tellDraining() {
	if err := n.cluster.SetDraining(); err != nil {
		n.log.Info("not all members know that this node drains", "err", err)
	}
}

// unfinished is what a drain waits for.
type unfinished struct {
	publications int // of ours that somebody may want to read
	leases       int // of readers, on them
	retrievals   int // that are brought in here
}

func (u unfinished) none() bool { return u == unfinished{} }

func (n *Node) unfinished() unfinished {
	u := unfinished{leases: n.owner.holds.leased(), retrievals: n.follows.wanted()}
	if n.peers.mayRead() {
		u.publications = n.owner.count()
	}
	return u
}

// cut ends what is left of it, with errors that say why, here and at the
// readers.
func (n *Node) cut() {
	n.announceEnds(n.owner.endAll(time.Now()))
	for _, f := range n.follows.active() {
		f.fail(errDraining)
		f.acknowledge(kvferrypb.CompleteItem_FAILED)
	}
}

// awaitTold returns when peers have heard what was to be told to them: the ends
// of publications, and of leases.
func (n *Node) awaitTold() {
	for end := time.Now().Add(tellTime); time.Now().Before(end) && n.peers.untold() > 0; {
		if !sleep(n.ctx, drainTick) {
			return
		}
	}
}

// count is how many publications are live.
func (o *owner) count() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.published)
}

// endAll ends every publication.
func (o *owner) endAll(now time.Time) []ending {
	o.mu.Lock()
	defer o.mu.Unlock()
	ids := make([]manager.PublicationID, 0, len(o.published))
	for i := range o.published {
		ids = append(ids, i)
	}
	return o.unsealLocked(now, ids, "revoked")
}

// Close drains for at most timers.drain, or as long as ctx, and then closes
// everything in reverse order of opening. It may be called twice.
func (n *Node) Close(ctx context.Context) error {
	n.once.Do(func() {
		n.leaveWithin(n.config.Timers.Drain)
		hurry := context.AfterFunc(ctx, func() { n.leaving.shorten(0) })
		<-n.leaving.left // what follows the bound has bounds of its own
		hurry()
		n.stop(transfer.ErrClosed)
		n.err = n.closeAll()
		n.log.Info("node closed", "err", n.err)
	})
	return n.err
}

// Err says why the node gave itself up; nil while it runs, and of one that was
// told to go.
func (n *Node) Err() error {
	err := context.Cause(n.ctx)
	if err == nil || errors.Is(err, errLeft) || errors.Is(err, transfer.ErrClosed) {
		return nil
	}
	return err
}

// wanted is how many publications are followed that have not ended for us.
func (fs *follows) wanted() int {
	wanted := 0
	for _, f := range fs.active() {
		if f.reading() != nil || f.failure() == nil {
			wanted++
		}
	}
	return wanted
}

// mayRead says whether anybody else could begin to read from here.
func (ps *peers) mayRead() bool {
	for _, p := range ps.all() {
		if p.alike() && !p.draining.Load() {
			return true
		}
	}
	return false
}

// untold is how much peers have yet to hear.
func (ps *peers) untold() (items int64) {
	for _, p := range ps.all() {
		items += p.untold.Load()
	}
	return items
}
