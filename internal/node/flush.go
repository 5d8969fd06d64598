package node

import (
	"time"

	"github.com/kvferry/kvferry/cluster"
)

const (
	// outboxShare is how much room the cluster's outbox must have, in bytes,
	// that other owners' items are passed on: half of it. The other half is for
	// what this node alone can say.
	outboxShare = cluster.MaxRoom / 2
	// outboxSpare is what flush leaves of it for checkpoints and beacons.
	outboxSpare = 16 << 10
	// maxDefer is how long a publish waits for its announcement to be handed
	// over for gossip.
	maxDefer = 2 * time.Millisecond
)

// flush hands what the log has to say to the cluster, as much as that has room
// for. The rest waits in the log, which is bounded, and nothing is dropped. It is
// called after everything that the log is told, and by the sweeper.
func (n *Node) flush() {
	n.flushing.Lock() // the room that one sees must not be taken by another
	defer n.flushing.Unlock()
	for _, item := range n.plog.Outgoing(time.Now(), n.cluster.Room()-outboxSpare) {
		_ = n.cluster.Broadcast(item) // it fails only when this life is over
	}
}

// flushOwn hands over an announcement of ours, and says whether it still waits:
// then whoever publishes has been held up a little, so that the cluster catches up.
func (n *Node) flushOwn(p published) (deferred bool) {
	n.flush()
	if !n.plog.Waits(p.sequence) {
		return false
	}
	sleep(n.ctx, maxDefer)
	n.flush()
	return n.plog.Waits(p.sequence)
}
