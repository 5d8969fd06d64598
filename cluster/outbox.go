package cluster

import (
	"bytes"
	"context"
	"sync"
	"time"
)

const (
	// MaxRoom is the room in an empty outbox, in bytes.
	MaxRoom = 1 << 20

	outboxItems = 8192
	outboxBytes = MaxRoom
	// pushRate and pushBurst bound what the push puts on the wire, in bytes,
	// all targets together; what is over waits in the outbox.
	pushRate  = 4 << 20
	pushBurst = 256 << 10
)

// outbox holds the items that were not pushed yet.
type outbox struct {
	wake chan struct{} // one token: there is something to do

	mu      sync.Mutex
	items   [][]byte
	added   []time.Time // of each item
	bytes   int
	waiters []chan struct{} // closed when the outbox is next found empty
}

// add copies an item; false: full.
func (o *outbox) add(item []byte) bool {
	o.mu.Lock()
	if len(o.items) >= outboxItems || o.bytes+len(item) > outboxBytes {
		o.mu.Unlock()
		return false
	}
	o.items, o.added = append(o.items, bytes.Clone(item)), append(o.added, time.Now())
	o.bytes += len(item)
	o.mu.Unlock()
	poke(o.wake)
	return true
}

// next removes what fits into one message; none: empty, and all that was added
// before has been dealt with.
func (o *outbox) next() [][]byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	n := fitting(o.items, packBytes)
	if n == 0 {
		o.items, o.added = nil, nil
		for _, w := range o.waiters {
			close(w)
		}
		o.waiters = nil
		return nil
	}
	items := o.items[:n:n]
	o.items, o.added = o.items[n:], o.added[n:]
	for _, item := range items {
		o.bytes -= len(item)
	}
	return items
}

// state is how many items wait, and for how long the oldest has.
func (o *outbox) state(now time.Time) (items int, age time.Duration) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.items) > 0 {
		age = now.Sub(o.added[0])
	}
	return len(o.items), age
}

// room is how many bytes are left, if items are of average length; see
// [Cluster.Room].
func (o *outbox) room() int {
	o.mu.Lock()
	defer o.mu.Unlock()
	return max(0, min(outboxBytes-o.bytes, (outboxItems-len(o.items))*(outboxBytes/outboxItems)))
}

// flush waits until what is in the outbox now was pushed, ctx ends, or the
// cluster is closed.
func (o *outbox) flush(ctx context.Context, closed <-chan struct{}) {
	w := make(chan struct{})
	o.mu.Lock()
	o.waiters = append(o.waiters, w)
	o.mu.Unlock()
	poke(o.wake)
	select {
	case <-w:
	case <-ctx.Done():
	case <-closed:
	}
}

// push sends what is in the outbox to random members, chosen anew for every
// packet, and hands it to the ring. It ends with the cluster.
func (c *Cluster) push() {
	rate := bucket{rate: pushRate, burst: pushBurst}
	for {
		select {
		case <-c.done:
			return
		case <-c.outbox.wake:
		}
		if !c.wait(c.linger) {
			return
		}
		for items := c.outbox.next(); items != nil; items = c.outbox.next() {
			message := encodeItems(items)
			targets := c.calls.roster.pick(c.fanout)
			if !c.wait(rate.take(len(message)*len(targets), time.Now())) {
				return
			}
			for _, p := range targets {
				if err := c.tell(p, message); err != nil {
					c.counters.pushesFailed.Add(1)
					c.log.Debug("push items", "node", p.Life.Node, "err", err)
				}
			}
			c.calls.ring.add(items, c.again)
		}
	}
}

// wait reports false if the cluster was closed meanwhile.
func (c *Cluster) wait(d time.Duration) bool {
	if d <= 0 {
		return !c.over()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-c.done:
		return false
	}
}

// bucket lets through rate bytes a second, and burst bytes at once.
type bucket struct {
	rate, burst int
	debt        float64 // bytes taken beyond what has flowed in
	last        time.Time
}

// take takes n bytes and says how long to wait before they are sent.
func (b *bucket) take(n int, now time.Time) time.Duration {
	if !b.last.IsZero() {
		b.debt = max(0, b.debt-now.Sub(b.last).Seconds()*float64(b.rate))
	}
	b.last = now
	b.debt += float64(n)
	over := b.debt - float64(b.burst)
	if over <= 0 {
		return 0
	}
	return time.Duration(over / float64(b.rate) * float64(time.Second))
}

// allow takes one if it needs not wait.
func (b *bucket) allow(now time.Time) bool {
	if b.take(1, now) > 0 {
		b.debt--
		return false
	}
	return true
}

// poke leaves a token in a channel of one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
