package node

import "github.com/kvferry/kvferry/transfer"

// Wrapped puts wrap in front of every transport of the node.
func (o Options) Wrapped(wrap func(transfer.Transport) transfer.Transport) Options {
	o.wrap = wrap
	return o
}
