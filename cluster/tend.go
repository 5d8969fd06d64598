package cluster

import (
	"context"
	"net/netip"
	"time"
)

const (
	// letterQueue bounds the envelopes that wait, of 1.4 kB at most.
	letterQueue = 1024
	// opened bounds the envelopes that are tried in a second: strangers can send
	// as many as they like. answered bounds the answers, of which somebody who
	// has recorded our questions can have more than he sends.
	opened, openedAtOnce     = 1000, 2000
	answered, answeredAtOnce = 200, 400
	// learnMax is how long an answer is waited for before a call.
	learnMax = 200 * time.Millisecond
	// troubleEvery is for lines about what does not go away by itself.
	troubleEvery = 10 * time.Second
	// spread is how many members are asked at random when there is news, stray
	// when there only may be.
	spread, stray = 8, 3
)

// tend keeps our ring like that of the others: it answers what they ask, asks
// one of them from time to time, some when packets cannot be read and when our
// ring has changed, and takes the newest ring that it hears of. It ends with the
// cluster.
func (c *Cluster) tend(ctx context.Context) {
	open, answer := bucket{rate: opened, burst: openedAtOnce}, bucket{rate: answered, burst: answeredAtOnce}
	tick := time.NewTicker(c.time.reconcile)
	defer tick.Stop()
	var soon <-chan time.Time // hints are worth one round of questions in a while
	for {
		select {
		case <-c.done:
			return
		case l := <-c.transport.letters:
			if now := time.Now(); !open.allow(now) {
				c.counters.queueDrops.Add(1)
			} else if m, key, ok := c.keys.open(l.b); !ok {
				c.counters.badMessages.Add(1)
			} else if m.kind == kindRingAnswer {
				c.takeRing(ctx, m, l.from)
			} else if answer.allow(now) {
				c.giveRing(m, key, l.from)
			} else {
				c.counters.queueDrops.Add(1)
			}
		case <-c.keys.hint:
			if soon == nil {
				soon = time.After(c.time.hint)
			}
		case <-soon:
			soon = nil
			c.askSome(stray)
		case <-tick.C:
			c.askSome(1)
		}
	}
}

// giveRing answers a question, and asks in turn who has a newer ring. Where names
// are proved, a packet carries no key.
func (c *Cluster) giveRing(m message, key KeyID, from netip.AddrPort) {
	if reply := c.keys.reply(c.life, m, key, c.errands == nil); reply != nil {
		c.transport.post(reply, from)
	}
	if _, own := c.keys.now(); m.edition.newer(own) {
		c.askRing(c.keys.idle, from)
	}
}

// takeRing takes the ring of an answer if it is newer. Where names are proved, it
// is fetched.
func (c *Cluster) takeRing(ctx context.Context, m message, from netip.AddrPort) {
	if !c.keys.asked(m.nonce) || c.errands != nil && len(m.keys) > 0 {
		c.counters.badMessages.Add(1)
		return
	}
	if _, own := c.keys.now(); c.errands != nil && m.edition.newer(own) {
		c.assign(errand{m, from})
		return
	}
	c.adopt(ctx, m)
	c.keys.heard(m)
}

// adopt takes the ring of an answer if it is newer, and passes the news on.
func (c *Cluster) adopt(ctx context.Context, m message) {
	changed := false
	if len(m.keys) > 0 {
		var err error
		ring := Ring{Generation: m.edition.generation, Keys: m.keys}
		if changed, err = c.keys.replace(ctx, ring, nil); err != nil {
			if hidden, ok := c.ringTrouble.pass(time.Now(), 1, troubleEvery); ok {
				c.log.Warn("cannot take a newer ring of gossip keys: others may become unreadable", "from", m.life.Node, "ring", ring, "hidden", hidden, "err", err)
			}
		}
	}
	c.calls.roster.hasRing(m.life.Node, m.edition.ids)
	if changed {
		ring, _ := c.keys.now()
		c.log.Info("took a newer ring of gossip keys", "from", m.life.Node, "ring", ring)
		c.askSome(spread)
	}
}

func (c *Cluster) askSome(n int) {
	for _, p := range c.calls.roster.pick(n) {
		c.askRing(c.keys.idle, p.Gossip)
	}
}

// askRing asks who is at an address for its ring.
func (c *Cluster) askRing(nonce uint64, to ...netip.AddrPort) {
	if c.keys.plain() {
		return
	}
	envelope := c.keys.envelope(nonce)
	for _, a := range to {
		c.transport.post(envelope, a)
	}
}

// learn asks who is at the addresses for their ring, and waits a moment for their
// answers: who has been away while keys were changed cannot read what others
// send, nor they what it sends, until one has the ring of the other.
func (c *Cluster) learn(ctx context.Context, addrs []netip.AddrPort) {
	if c.keys.plain() || len(addrs) == 0 {
		return
	}
	q := c.keys.ask()
	if q == nil {
		return
	}
	defer c.keys.forget(q)
	c.askRing(q.nonce, addrs...)
	enough := time.NewTimer(learnMax)
	defer enough.Stop()
	for len(c.keys.said(q)) < len(addrs) {
		select {
		case <-q.news:
		case <-enough.C:
			return
		case <-ctx.Done():
			return
		case <-c.done:
			return
		}
	}
}
