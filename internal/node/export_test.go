package node

import (
	"context"

	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// Wrapped puts wrap in front of every transport of the node.
func (o Options) Wrapped(wrap func(transfer.Transport) transfer.Transport) Options {
	o.wrap = wrap
	return o
}

// Hooked calls hook before a stream of a request is copied to or from the host.
func (o Options) Hooked(hook func(context.Context, id.Request) error) Options {
	o.hook = hook
	return o
}

// FillOutbox gossips noise until the cluster takes no more.
func (n *Node) FillOutbox() {
	noise := make([]byte, cluster.MaxItem)
	for n.cluster.Broadcast(noise) == nil {
	}
}

// Counts are the manager's.
func (n *Node) Counts() manager.Counts { return n.manager.Counts() }
