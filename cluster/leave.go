package cluster

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

const (
	// leaveMax bounds a goodbye, byeMax how long it waits for the answers of
	// members, who are told again every byeAgain.
	leaveMax = 2 * time.Second
	byeMax   = 500 * time.Millisecond
	byeAgain = 50 * time.Millisecond
	// spreadMax is for memberlist's own goodbye when all have heard ours.
	spreadMax = 200 * time.Millisecond
)

// leaving is who has not yet heard our goodbye.
type leaving struct {
	nonce uint64
	done  chan struct{} // closed when all have

	mu      sync.Mutex
	waiting map[id.Node]peer // nil: we do not leave, or all have heard it
}

func (l *leaving) init() {
	l.nonce = rand.Uint64()
	l.done = make(chan struct{})
}

func (l *leaving) begin(members []peer) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = map[id.Node]peer{}
	for _, p := range members {
		l.waiting[p.Life.Node] = p
	}
	l.check()
}

func (l *leaving) heard(by id.Node) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.waiting, by)
	l.check()
}

// check closes done once; l.mu is held.
func (l *leaving) check() {
	if l.waiting != nil && len(l.waiting) == 0 {
		l.waiting = nil
		close(l.done)
	}
}

func (l *leaving) silent() []peer {
	l.mu.Lock()
	defer l.mu.Unlock()
	var rest []peer
	for _, p := range l.waiting {
		rest = append(rest, p)
	}
	return rest
}

// Leave says goodbye, and waits for it to spread at most as long as ctx and at
// most two seconds. It first sends what is in the outbox. Close comes after it.
func (c *Cluster) Leave(ctx context.Context) error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("leave: %w", ErrClosed)
	}
	if c.left {
		c.mu.Unlock()
		return nil
	}
	c.left = true
	done := make(chan error, 1)
	c.work.Go(func() { done <- c.goodbye(ctx) })
	c.mu.Unlock()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("leave: %w", err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("leave: %w", context.Cause(ctx))
	}
}

// goodbye tells every member itself, which is quick and says that we meant it,
// and only then leaves memberlist, which reaches those that the first did not,
// but cannot tell them whether we died or left.
func (c *Cluster) goodbye(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaveMax)
	defer cancel()
	c.joining.stop()
	c.outbox.flush(ctx, c.done)
	c.leaving.begin(c.calls.roster.pick(maxNodes))
	bye := encodeCall(kindBye, c.leaving.nonce, c.life, c.advertise)
	end := time.Now().Add(byeMax)
	again := time.NewTicker(byeAgain)
	defer again.Stop()
	for told := false; !told && time.Now().Before(end); {
		for _, p := range c.leaving.silent() {
			if err := c.tell(p, bye); err != nil {
				c.log.Debug("say goodbye", "node", p.Life.Node, "err", err)
			}
		}
		select {
		case <-again.C:
		case <-c.leaving.done:
			told = true
		case <-ctx.Done():
			told = true
		case <-c.done:
			told = true
		}
	}
	until, _ := ctx.Deadline()
	left := time.Until(until)
	select {
	case <-c.leaving.done:
		// All that we know of have heard it, or have gone themselves: then
		// memberlist would wait for nobody until its time is over.
		if c.list.Leave(min(max(left, time.Millisecond), spreadMax)) != nil {
			c.log.Debug("goodbye was heard by all, and did not spread")
		}
		return nil
	default:
	}
	// A duration of 0 would wait for ever.
	return c.list.Leave(max(left, time.Millisecond))
}
