package node

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
)

// gossip is what the cluster tells this node. It is called by one goroutine,
// which waits until the node has the cluster that it answers through.
type gossip struct {
	node  *Node
	ready chan struct{}
}

// Items brings messages of other owners' logs, and questions about ours.
func (g gossip) Items(items [][]byte) {
	<-g.ready
	now := time.Now()
	for _, item := range items {
		out, forLog, err := g.node.board.Receive(now, item)
		if err != nil {
			g.node.metrics.badMessages.WithLabelValues("gossip").Inc()
			g.node.log.Debug("gossip refused", "bytes", len(item), "err", err)
			continue
		}
		if len(out.Broadcast) > 0 && g.node.cluster.Room() < outboxShare {
			g.node.metrics.notPassed.Add(float64(len(out.Broadcast)))
			out.Broadcast = nil // its owner repairs it
		}
		g.node.send(out)
		switch m := forLog.(type) {
		case *wire.Nack:
			g.node.send(g.node.plog.Nack(now, m))
		case *wire.Echo:
			if took, ok := g.node.plog.Echo(now, m); ok {
				g.node.metrics.beaconSeconds.Observe(took.Seconds())
			}
		}
	}
}

// Joined meets a life.
func (g gossip) Joined(m cluster.Member) {
	<-g.ready
	g.node.peers.add(m)
	g.node.sessions.emitAll(func() *kvferrypb.Event { return peerEvent(m.Life, "up") })
}

// Left hides what a life owns and ends what reads from it.
func (g gossip) Left(m cluster.Member, _ bool) {
	<-g.ready
	g.node.peers.remove(m.Life)
	g.node.sessions.emitAll(func() *kvferrypb.Event { return peerEvent(m.Life, "down") })
}

// Updated hears what else a life tells of itself.
func (g gossip) Updated(m cluster.Member) {
	<-g.ready
	g.node.peers.update(m)
}

// MergeState takes other members' checkpoints.
func (g gossip) MergeState(state []byte) {
	<-g.ready
	out, err := g.node.board.Merge(time.Now(), state)
	if err != nil {
		g.node.metrics.badMessages.WithLabelValues("push_pull").Inc()
		g.node.log.Debug("state refused", "bytes", len(state), "err", err)
		return
	}
	g.node.send(out)
}

func peerEvent(l id.Life, outcome string) *kvferrypb.Event {
	return &kvferrypb.Event{Kind: kvferrypb.Event_PEER, Peer: l.String(), Outcome: outcome}
}

// openCluster binds the gossip port and begins to join.
func (n *Node) openCluster(context.Context) error {
	c := n.config
	var advertise netip.AddrPort
	if c.Node.Advertise.IsValid() {
		advertise = netip.AddrPortFrom(c.Node.Advertise, 0)
	}
	bind := n.bind(c.Ports.Gossip)
	ready := make(chan struct{})
	defer close(ready)
	cl, err := cluster.Start(cluster.Options{
		Life:      n.life,
		Meta:      cluster.Meta{Role: c.Node.Role, Group: n.group, Peer: n.addresses.Peer, Fingerprint: n.geometry.Fingerprint()},
		Label:     c.Cluster.Name,
		Bind:      bind,
		Advertise: advertise,
		Join:      c.Cluster.Join,
		Ring:      n.keyring.first,
		SaveRing:  n.keyring.save,
		Identity:  n.identity,
		Fast:      n.fast(),
		Handler:   gossip{n, ready},
		Logger:    n.log,
	})
	if err != nil {
		return fmt.Errorf("gossip port (ports.gossip): %w", err)
	}
	n.cluster = cl
	n.closers = append(n.closers, cl.Close)
	n.addresses.Gossip = cl.Gossip()
	return nil
}
