package rdmaread

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	mrand "math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// Bounds of what a lane tries again.
const (
	firstPause = 50 * time.Millisecond // after the first attempt that failed, doubled after each
	maxPause   = 5 * time.Second
	firstRest  = 500 * time.Millisecond // of a path, after a fault of the wire, doubled after each
	maxRest    = 30 * time.Second
)

// Sizes of a lane's place for seal words. Each has a cache line of its own.
const (
	sealStride   = 64
	sealsAtOnce  = 16
	scratchBytes = sealsAtOnce * sealStride
)

var (
	errGone   = fmt.Errorf("the peer has hung up, since its transport was closed or its process has ended: link %w", transfer.ErrClosed)
	errHungUp = errors.New("the peer has ended this lane's call")
)

// path is a port of ours and one of the peer's.
type path struct {
	port   *port
	remote uint8      // the place of the peer's port in its descriptor
	gid    netip.Addr // of the peer's port, as the descriptor says
	name   string     // of the peer's device
	reads  int        // at once, on a queue pair
	key    uint32     // of the link's scratch, on our device

	// Guarded by the mutex of the link.
	rate  float64       // bytes a second of one lane in one window; 0: not known yet
	rest  time.Duration // how long the path rests after the next fault of the wire; 0: there was none lately
	until time.Time     // the end of its rest
}

// laneState is where a lane stands.
type laneState uint8

const (
	laneResting    laneState = iota // without a queue pair, and waits before it tries again
	laneConnecting                  // without one, and is getting one
	laneIdle
	laneBusy   // a read has it
	laneBroken // its queue pair is being destroyed
)

// become takes a lane to a state. The mutex of the link is held.
func (n *lane) become(s laneState) { n.state, n.since = s, time.Now() }

// lane is the place of one queue pair, which is replaced when it breaks. Its own
// goroutine connects and destroys; reads borrow what is connected.
type lane struct {
	l       *link
	path    *path
	scratch []byte        // of the link's: scratchBytes
	wake    chan struct{} // ends a rest; one is enough

	// Guarded by the mutex of the link.
	state    laneState // set by become
	since    time.Time
	queue    *queue    // that is connected, also while it is broken; nil: none
	why      error     // of the last failure
	failures int       // in a row
	failed   time.Time // the last
	count    int       // queue pairs so far
}

// queue is a connected queue pair of ours, and the call that keeps the peer's.
type queue struct {
	qp       *rdma.QP
	call     Call
	from, to netip.Addr
	theirs   uint32 // the number of the peer's queue pair
	remote   regions
	ways     *[id.MaxRanks]way // to read what there is there; nil: all of it directly
	asked    uint64            // gathers; of whoever has the queue
	broken   chan struct{}     // closed when it is of no further use
	back     chan struct{}     // whoever had it when it broke has given it back; one value

	// Guarded by the mutex of the link.
	why error // set before broken is closed
}

// tend keeps a queue pair in the lane until the link ends.
func (n *lane) tend() {
	for n.l.ctx.Err() == nil {
		var pause time.Duration
		q, err := n.connect()
		if err != nil {
			pause = n.l.unconnected(n, err)
		} else {
			n.l.ready(n, q)
			n.watch(q)
			pause = n.l.retire(n, q)
		}
		n.pause(pause)
	}
}

// watch waits for what ends a queue pair, and then ends a read on it. Nobody else
// does: a device that takes its time for that keeps nobody but the lane.
func (n *lane) watch(q *queue) {
	select {
	case <-q.broken:
	case <-q.call.Ended():
		n.l.hungUp(n, q)
	case <-n.l.ctx.Done():
		n.l.breakQueue(n, q, context.Cause(n.l.ctx))
	}
	_ = q.qp.Fail() // if it can't, its read ends by the stall time, and it is destroyed
}

// pause waits before the next attempt, or until somebody wants the lane.
func (n *lane) pause(d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-n.wake:
		timer.Reset(time.Until(n.l.failedAt(n).Add(firstPause))) // however much it is wanted
		select {
		case <-timer.C:
		case <-n.l.ctx.Done():
		}
	case <-n.l.ctx.Done():
	}
	n.l.trying(n)
}

// backoff is how long to wait after so many failures in a row.
func backoff(first, most time.Duration, failures int) time.Duration {
	if failures <= 0 {
		return 0
	}
	d := min(first<<min(failures-1, 20), most)
	return d - time.Duration(mrand.Int64N(int64(d)/4+1))
}

// connect makes a queue pair and shakes hands for it, once. With an error
// nothing of either is left.
func (n *lane) connect() (*queue, error) {
	t := n.l.t
	bound := t.o.Limits.Dial
	ctx, cancel := context.WithTimeoutCause(n.l.ctx, bound, fmt.Errorf("the peer does not answer within %v: %w", bound, transfer.ErrStalled))
	defer cancel()
	info, gids, err := n.path.port.works()
	if err != nil {
		return nil, err
	}
	gid, err := rdma.ChooseGID(gids, info.Link, n.path.gid)
	if err != nil {
		return nil, err
	}
	qp, err := n.path.port.d.pd.NewQP(rdma.QPOptions{Events: true, MaxMsg: int(min(info.MaxMsg, 1<<20))})
	if err != nil {
		return nil, fmt.Errorf("make a queue pair: %w", err)
	}
	q := &queue{qp: qp, from: gid.Addr, to: n.path.gid, broken: make(chan struct{}), back: make(chan struct{}, 1)}
	if err := n.shake(ctx, q, info, gid); err != nil {
		n.destroy(q)
		return nil, fmt.Errorf("shake hands for %s: %w", n.path.address(q.from, q.to), err)
	}
	return q, nil
}

// shake says hello and lets the answer, if it is to this very hello, program the
// queue pair.
func (n *lane) shake(ctx context.Context, q *queue, info rdma.Port, gid rdma.GID) error {
	t := n.l.t
	h := hello{
		generation: t.generation.Add(1), owner: n.l.peer.Life, reader: t.o.Local.Life, port: n.path.remote,
		end: n.path.port.self(info, gid.Addr, q.qp, n.path.reads),
	}
	b, call, err := t.o.Call(ctx, n.l.peer, h.encode())
	if err != nil {
		if ctx.Err() != nil && !errors.Is(err, transfer.ErrIdentity) {
			err = transfer.Reason(ctx)
		}
		return err
	}
	q.call = call
	if ctx.Err() != nil {
		return transfer.Reason(ctx)
	}
	a, err := t.accept(h, b)
	if err != nil {
		return err
	}
	if err := n.l.fits(&a.regions); err != nil {
		t.stats.garbage.Add(1)
		return err
	}
	to, err := n.path.port.route(gid, h.end, a.end)
	if err != nil {
		return err
	}
	to.ReadsInitiated = min(h.end.reads, a.end.reads)
	if err := q.qp.Connect(to); err != nil {
		return err
	}
	q.to, q.theirs, q.remote = a.end.gid, a.end.qpn, a.regions
	q.ways = waysOf(&n.path.port.d.local, &q.remote.arenas)
	return nil
}

// accept takes an answer if it is the one to this hello.
func (t *Transport) accept(h hello, b []byte) (answer, error) {
	a, why, err := parseAnswer(b)
	switch {
	case err != nil:
		t.stats.garbage.Add(1)
		return a, err
	case a.generation != h.generation:
		t.stats.late.Add(1)
		return a, fmt.Errorf("the answer is that to attempt %d, not to attempt %d: %w", a.generation, h.generation, errGarbage)
	case why != 0:
		return a, why.err()
	case a.owner != h.owner:
		t.stats.late.Add(1)
		return a, fmt.Errorf("%s answers: %w", a.owner, transfer.ErrIdentity)
	case a.end.mtu > h.end.mtu || a.end.reads > h.end.reads:
		t.stats.garbage.Add(1)
		return a, fmt.Errorf("MTU %d and %d reads, which are more than were asked for: %w", a.end.mtu, a.end.reads, errGarbage)
	}
	return a, nil
}

// destroy returns when nothing can land through a queue pair any more and its
// call has ended. It tries until it succeeds: whoever waits keeps the memory.
func (n *lane) destroy(q *queue) {
	n.l.t.destroy(q.qp, n.l.peer.Life)
	if q.call != nil {
		_ = q.call.Close() // its queue pair is gone; the peer finds out sooner or later
	}
}

// destroy closes a queue pair, however often it takes.
func (t *Transport) destroy(qp *rdma.QP, peer id.Life) {
	insist(qp.Close, func(tries int, err error) {
		t.o.Logger.Error("an RDMA queue pair can't be destroyed; what it may write to is kept until it is", "peer", peer.String(), "tries", tries, "err", err)
	})
}

// insist tries until something has worked, and now and then tells that it has not.
func insist(try func() error, tell func(tries int, err error)) {
	wait := time.Millisecond
	for tries := 1; ; tries++ {
		err := try()
		if err == nil {
			return
		}
		if tries == 1 || wait == time.Second && tries%60 == 0 {
			tell(tries, err)
		}
		pause(wait)
		wait = min(2*wait, time.Second)
	}
}

// pause waits for d, whatever happens.
func pause(d time.Duration) {
	t := time.NewTimer(d)
	<-t.C
}

// address is how a lane is named: our device and address, and the peer's.
func (p *path) address(from, to netip.Addr) string {
	return fmt.Sprintf("%s %s -> %s", p.port.name(), from.Unmap(), to.Unmap())
}

// newPSN is the number of a first packet, which nobody can guess from the last.
func newPSN() uint32 {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return binary.BigEndian.Uint32(b[:]) & 0xffffff
}

// borrowed is a lane that a read has, with the queue pair that it found there.
type borrowed struct {
	lane  *lane
	queue *queue
}

// waiter is a hand of a read that waits for a lane.
type waiter struct {
	read  *pull
	since time.Time
	given chan grant
}

type grant struct {
	borrowed
	err error
}

// acquire gives a read a lane, when those who wait and were served longer ago
// have theirs. It fails if the lanes have failed, all of them, since it was
// called, or if none has carried anything for the stall time.
func (l *link) acquire(ctx context.Context, p *pull) (borrowed, error) {
	l.mu.Lock()
	if l.ctx.Err() != nil {
		l.mu.Unlock()
		return borrowed{}, context.Cause(l.ctx)
	}
	if len(l.waiting) == 0 {
		if n := l.bestLocked(); n != nil {
			b := l.lendLocked(n, p)
			l.mu.Unlock()
			return b, nil
		}
	}
	w := &waiter{read: p, since: time.Now(), given: make(chan grant, 1)}
	l.waiting = append(l.waiting, w)
	if !l.upLocked() {
		l.wakeLocked()
	}
	l.mu.Unlock()
	stall := l.t.o.Limits.Stall
	timer := time.NewTimer(stall)
	defer timer.Stop()
	for {
		select {
		case g := <-w.given:
			return g.borrowed, g.err
		case <-timer.C:
			if left := stall - l.idle(w.since); left > 0 {
				timer.Reset(left)
				continue
			}
			if l.withdraw(w) {
				return borrowed{}, fmt.Errorf("no lane has carried anything for %v (%s): %w", stall, l.doing(), transfer.ErrStalled)
			}
		case <-ctx.Done():
			if !l.withdraw(w) {
				if g := <-w.given; g.err == nil {
					l.giveBack(g.borrowed)
				}
			}
			return borrowed{}, transfer.Reason(ctx)
		}
	}
}

// idle is how long no lane has carried anything, at most the time since.
func (l *link) idle(since time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.carried.After(since) {
		since = l.carried
	}
	return time.Since(since)
}

// doing tells what the lanes do, for whoever waits for them.
func (l *link) doing() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var all []string
	for _, s := range []struct {
		state laneState
		text  string
	}{
		{laneBroken, "destroying"}, {laneConnecting, "connecting"}, {laneResting, "resting"}, {laneBusy, "reading"}, {laneIdle, "ready"},
	} {
		count, oldest, why := 0, time.Now(), error(nil)
		for _, n := range l.lanes {
			if n.state != s.state {
				continue
			}
			if count++; !n.since.After(oldest) {
				oldest, why = n.since, n.why
				if n.queue != nil {
					why = cmp.Or(n.queue.why, why)
				}
			}
		}
		if count == 0 {
			continue
		}
		text := fmt.Sprintf("%d %s for %v", count, s.text, time.Since(oldest).Round(time.Millisecond))
		if why != nil {
			text += ", because: " + why.Error()
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

// withdraw reports whether a waiter left without having been given anything.
func (l *link) withdraw(w *waiter) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.withdrawLocked(w)
}

func (l *link) withdrawLocked(w *waiter) bool {
	i := slices.Index(l.waiting, w)
	if i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
	}
	return i >= 0
}

// upLocked reports whether a lane is there to be waited for.
func (l *link) upLocked() bool {
	return slices.ContainsFunc(l.lanes, func(n *lane) bool { return n.state == laneIdle || n.state == laneBusy })
}

// wakeLocked ends the rest of all lanes.
func (l *link) wakeLocked() {
	for _, n := range l.lanes {
		if n.state != laneResting {
			continue
		}
		n.become(laneConnecting)
		select {
		case n.wake <- struct{}{}:
		default: // it has not slept yet
		}
	}
}

// bestLocked is the idle lane to use next, nil if it is better to wait: of a
// path that does not rest, the fastest first. A path that rests is used if
// nothing else can be.
func (l *link) bestLocked() (best *lane) {
	now := time.Now()
	var resting *lane
	others := false // there is a lane of a path that does not rest
	for _, n := range l.lanes {
		rests := now.Before(n.path.until)
		if !rests && n.state != laneResting {
			others = true
		}
		switch {
		case n.state != laneIdle:
		case rests:
			resting = n
		case best == nil || best.path.rate > 0 && (n.path.rate == 0 || n.path.rate > best.path.rate):
			best = n
		}
	}
	if best == nil && !others {
		return resting
	}
	return best
}

// lendLocked gives a read a lane that is idle.
func (l *link) lendLocked(n *lane, p *pull) borrowed {
	n.become(laneBusy)
	p.served = time.Now()
	return borrowed{n, n.queue}
}

// dispatchLocked gives idle lanes to those who wait: first to the read that was
// served longest ago, or has never been and began first, so that a read with
// many hands gets no more turns than one with few.
func (l *link) dispatchLocked() {
	for len(l.waiting) > 0 {
		n := l.bestLocked()
		if n == nil {
			return
		}
		w := slices.MinFunc(l.waiting, func(a, b *waiter) int { return a.read.served.Compare(b.read.served) })
		l.withdrawLocked(w)
		w.given <- grant{borrowed: l.lendLocked(n, w.read)} // has room
	}
}

// giveBack returns a lane. If its queue pair is broken, whoever destroys it has
// waited for that.
func (l *link) giveBack(b borrowed) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if b.queue.why != nil {
		b.lane.become(laneBroken)
		b.queue.back <- struct{}{} // has room
		return
	}
	b.lane.become(laneIdle)
	l.carried = b.lane.since
	l.dispatchLocked()
}

// landed notes how fast a lane was, and that its path works.
func (l *link) landed(n *lane, bytes int64, took time.Duration) {
	rate := float64(bytes) / max(took, time.Microsecond).Seconds()
	l.mu.Lock()
	defer l.mu.Unlock()
	n.failures = 0
	p := n.path
	p.rest = 0
	if p.rate == 0 {
		p.rate = rate
	} else {
		p.rate += (rate - p.rate) / 4
	}
}

// ready lets reads have a lane.
func (l *link) ready(n *lane, q *queue) {
	l.mu.Lock()
	n.queue, n.why = q, nil
	n.become(laneIdle)
	n.count++
	l.address = n.path.address(q.from, q.to)
	again := n.count > 1
	l.firstLocked(n)
	l.dispatchLocked()
	l.mu.Unlock()
	if again {
		l.t.stats.replaced.Add(1)
	}
}

// unconnected notes that a lane got no queue pair, and says how long it rests.
func (l *link) unconnected(n *lane, err error) time.Duration {
	l.mu.Lock()
	n.failures++
	d := backoff(firstPause, maxPause, n.failures)
	l.restLocked(n, err)
	l.firstLocked(n)
	left, opened := false, false
	for _, other := range l.lanes {
		left = left || other.queue != nil
		opened = opened || other.count > 0
	}
	l.mu.Unlock()
	if opened && !left && (errors.Is(err, transfer.ErrIdentity) || errors.Is(err, errOwnerClosed)) {
		l.end(fmt.Errorf("%w: link %w", err, transfer.ErrClosed))
	}
	return d
}

// restLocked lets a lane rest. Who waits since before the last failure of every
// lane has waited for nothing.
func (l *link) restLocked(n *lane, err error) {
	n.become(laneResting)
	n.failed, n.why = n.since, err
	if l.upLocked() {
		l.dispatchLocked() // of a path that rests, for want of others
		return
	}
	for _, w := range slices.Clone(l.waiting) {
		if !slices.ContainsFunc(l.lanes, func(n *lane) bool { return !n.failed.After(w.since) }) {
			l.withdrawLocked(w)
			w.given <- grant{err: err} // has room
		}
	}
}

// breakQueue sees to it that nobody is given a queue pair any more, and that the
// lane ends a read on it. It waits for no device. The first reason counts.
func (l *link) breakQueue(n *lane, q *queue, why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if q.why == nil {
		q.why = why
		close(q.broken)
	}
	if n.queue == q && n.state == laneIdle {
		n.become(laneBroken)
	}
}

// whyBroken is the reason that was known before a queue pair failed, if any was.
func (l *link) whyBroken(q *queue) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return q.why
}

// hungUp takes the end of a call by the peer. The last one ends the link.
func (l *link) hungUp(n *lane, q *queue) {
	l.mu.Lock()
	left := 0
	for _, other := range l.lanes {
		if other.queue == nil {
			continue
		}
		select {
		case <-other.queue.call.Ended():
		default:
			left++
		}
	}
	if left > 0 {
		n.failures++ // a peer that only hangs up is not called without a pause
	}
	l.mu.Unlock()
	if left == 0 {
		l.end(errGone)
	}
	l.breakQueue(n, q, errHungUp)
}

// retire waits until nobody has a broken queue pair, destroys it, and says how
// long the lane rests.
func (l *link) retire(n *lane, q *queue) time.Duration {
	l.mu.Lock()
	busy := n.state == laneBusy
	l.mu.Unlock()
	if busy {
		<-q.back
	}
	n.destroy(q)
	l.mu.Lock()
	defer l.mu.Unlock()
	n.queue, n.why = nil, q.why
	d := backoff(firstPause, maxPause, n.failures-1)
	if d == 0 || l.ctx.Err() != nil {
		n.become(laneConnecting)
		return 0
	}
	l.restLocked(n, q.why)
	return d
}

// trying says that a rest is over.
func (l *link) trying(n *lane) {
	l.mu.Lock()
	n.become(laneConnecting)
	l.mu.Unlock()
}

func (l *link) failedAt(n *lane) time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return n.failed
}

// fault notes a fault of the wire on a lane: its path rests, a little longer each
// time, while others carry what there is.
func (l *link) fault(n *lane, err error) {
	if rest := l.restPath(n); rest > 0 {
		l.t.o.Logger.Warn("an RDMA path has failed and rests", "err", err, "rest", rest)
	}
}

// restPath lets the path of a lane rest, and says how long; 0: it did already,
// since one burst counts once.
func (l *link) restPath(n *lane) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	n.failures++
	p := n.path
	now := time.Now()
	if now.Before(p.until) {
		return 0
	}
	p.rest = min(max(firstRest, 2*p.rest), maxRest)
	p.until = now.Add(p.rest)
	return p.rest
}
