package node

import (
	"time"
)

// Intervals of the sweeper, which runs on its own clock and never on traffic.
const (
	tickInterval    = 10 * time.Millisecond // gossip that waits, checkpoints, beacons, gaps
	stateInterval   = time.Second           // checkpoints for push/pull
	sessionInterval = 500 * time.Millisecond
	maxSweepAge     = 5 * time.Second // older than this, the node is not ready
)

// sweep does everything that happens because time passes.
func (n *Node) sweep() {
	tick := time.NewTicker(tickInterval)
	defer tick.Stop()
	state := time.NewTicker(stateInterval)
	defer state.Stop()
	session := time.NewTicker(sessionInterval)
	defer session.Stop()
	renew := time.NewTicker(n.config.Timers.LeaseRenew)
	defer renew.Stop()
	due := time.NewTimer(0)
	defer due.Stop()
	for {
		select {
		case <-n.ctx.Done():
			return
		case now := <-tick.C:
			n.swept.Store(now.UnixNano())
			n.flush()
			n.send(n.plog.Tick(now))
			n.send(n.plog.Beacon(now, n.board.Members))
			n.send(n.board.Tick(now))
			continue
		case <-state.C:
			if err := n.cluster.SetState(n.board.State(n.plog.Check())); err != nil {
				n.log.Error("state is not shared", "err", err)
			}
			continue
		case now := <-session.C:
			n.sessions.sweep(now, n.config.Timers.SessionGrace)
			continue
		case <-renew.C:
			n.renew()
			continue
		case <-due.C:
		case <-n.kick:
		}
		n.announceEnds(n.owner.sweep(time.Now()))
		if next, ok := n.owner.holds.next(); ok {
			due.Reset(max(0, time.Until(next)))
		}
	}
}

// kickSweep makes the sweeper look at the holds: something may be due sooner
// than it thinks.
func (n *Node) kickSweep() {
	select {
	case n.kick <- struct{}{}:
	default:
	}
}
