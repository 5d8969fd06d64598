package node

import (
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/transfer"
)

// Wrapped puts wrap in front of every transport of the node.
func (o Options) Wrapped(wrap func(transfer.Transport) transfer.Transport) Options {
	o.wrap = wrap
	return o
}

// FillOutbox gossips noise until the cluster takes no more.
func (n *Node) FillOutbox() {
	noise := make([]byte, cluster.MaxItem)
	for n.cluster.Broadcast(noise) == nil {
	}
}
