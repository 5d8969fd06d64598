package cluster

import "sync/atomic"

// counters are what all parts count; see [Stats].
type counters struct {
	itemsOut, itemsIn, itemsDropped, ringDropped atomic.Uint64
	pushesFailed                                 atomic.Uint64
	bytesOut, bytesIn, packetsOut, packetsIn     atomic.Uint64
	badMessages, queueDrops, handoffDrops        atomic.Uint64
	refused, collisions, conflicts, diverged     atomic.Uint64
	streams, strangers                           atomic.Uint64
	unreadable, keyPackets, keySaves             atomic.Uint64
}

func (c *counters) stats() Stats {
	return Stats{
		ItemsOut: c.itemsOut.Load(), ItemsIn: c.itemsIn.Load(),
		ItemsDropped: c.itemsDropped.Load(), RingDropped: c.ringDropped.Load(),
		PushesFailed: c.pushesFailed.Load(),
		BytesOut:     c.bytesOut.Load(), BytesIn: c.bytesIn.Load(),
		PacketsOut: c.packetsOut.Load(), PacketsIn: c.packetsIn.Load(),
		BadMessages: c.badMessages.Load(), QueueDrops: c.queueDrops.Load(), HandoffDrops: c.handoffDrops.Load(),
		Refused: c.refused.Load(), Collisions: c.collisions.Load(),
		Conflicts: c.conflicts.Load(), Diverged: c.diverged.Load(),
		StreamsCut: c.streams.Load(), Strangers: c.strangers.Load(),
		Unreadable: c.unreadable.Load(), KeyPackets: c.keyPackets.Load(), KeySaves: c.keySaves.Load(),
	}
}
