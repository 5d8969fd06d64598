package cluster

import (
	"log"
	"time"

	"github.com/hashicorp/memberlist"
)

// suspicionMax is how many probes who is suspected has at most, where few others
// suspect him too.
const suspicionMax = 24

// timing are the durations that differ between a cluster and a test.
type timing struct {
	gossip, probe, probeTimeout time.Duration
	suspicion                   int // probes for which who is suspected may say that he lives, at least
	pushPull, dead, stream      time.Duration
	reconcile                   time.Duration
	rejoinMin, rejoinMax        time.Duration // between calls to those that are missing, once we are joined
	rejoinSoon, fresh           time.Duration // between those for so long after a loss, in a small cluster
	patience, remind            time.Duration // not joined after the one is said, and then every other
	joinMax                     time.Duration // between calls to seeds before that
	goodbye                     time.Duration // how long a goodbye is believed
	barrier                     time.Duration // what all members have to answer a step of a rotation
	hint                        time.Duration // from the first packet that cannot be read to a question about keys
	proof                       time.Duration // between tries to call a member by its name
}

func timings(fast bool) timing {
	if fast {
		// A tenth, except where a starved machine would take a live member for
		// a dead one, or give it up.
		return timing{
			gossip: 10 * time.Millisecond, probe: 250 * time.Millisecond, probeTimeout: 200 * time.Millisecond, suspicion: 12,
			pushPull: time.Second, dead: 3 * time.Second, stream: time.Second,
			reconcile: time.Second, rejoinMin: 500 * time.Millisecond, rejoinMax: time.Second,
			rejoinSoon: 100 * time.Millisecond, fresh: 3 * time.Second,
			patience: 500 * time.Millisecond, remind: 3 * time.Second,
			joinMax: 500 * time.Millisecond, goodbye: 3 * time.Second,
			barrier: 30 * time.Second, hint: 50 * time.Millisecond, proof: 100 * time.Millisecond,
		}
	}
	return timing{
		gossip: 20 * time.Millisecond, probe: 500 * time.Millisecond, probeTimeout: 250 * time.Millisecond, suspicion: 4,
		pushPull: 10 * time.Second, dead: 30 * time.Second, stream: 2 * time.Second,
		reconcile: 10 * time.Second, rejoinMin: 5 * time.Second, rejoinMax: 10 * time.Second,
		rejoinSoon: time.Second, fresh: 30 * time.Second,
		patience: 5 * time.Second, remind: 30 * time.Second,
		joinMax: 2 * time.Second, goodbye: 30 * time.Second,
		barrier: 10 * time.Second, hint: 500 * time.Millisecond, proof: time.Second,
	}
}

// config is memberlist's. Its metrics go nowhere unless somebody in the process
// installs a global sink.
func (c *Cluster) config(o Options) *memberlist.Config {
	m := memberlist.DefaultLANConfig()
	m.Name = listName(c.life)
	m.Label = o.Label
	m.Transport = c.transport
	m.BindAddr, m.BindPort = c.bound.Addr().String(), int(c.bound.Port())
	m.AdvertiseAddr, m.AdvertisePort = c.advertise.Addr().String(), int(c.advertise.Port())
	m.Delegate, m.Events, m.Alive, m.Conflict = c.calls, c.calls, c.calls, c.calls
	m.Logger = log.New(c.bridge, "", 0) //nolint:forbidigo // memberlist takes no other; the bridge leads to slog

	m.GossipInterval, m.GossipNodes = c.time.gossip, 3
	m.ProbeInterval, m.ProbeTimeout, m.IndirectChecks = c.time.probe, c.time.probeTimeout, 3
	m.SuspicionMult, m.SuspicionMaxTimeoutMult = c.time.suspicion, suspicionMax/c.time.suspicion
	m.RetransmitMult = 5 // of membership messages
	m.PushPullInterval = c.time.pushPull
	m.GossipToTheDeadTime = c.time.dead
	m.TCPTimeout = c.time.stream
	m.HandoffQueueDepth = inboxMessages
	m.UDPBufferSize = maxPacket - checksum // which it does not count
	m.EnableCompression = false            // costs more than a packet does

	m.GossipVerifyIncoming, m.GossipVerifyOutgoing = true, true
	m.Keyring = c.keys.list
	if o.tune != nil {
		o.tune(m)
	}
	return m
}

// offerBytes is the longest message that memberlist ever has room for in its
// own packets, where it counts two bytes for the packet and three for a message.
func offerBytes(o Options) int {
	n := maxPacket - checksum - labelHeader - len(o.Label) - 2 - 3
	if len(o.Ring.Keys) > 0 {
		n -= encryption
	}
	return n
}
