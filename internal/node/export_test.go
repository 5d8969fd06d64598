package node

import (
	"context"

	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
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

// Allocating makes the arenas by alloc where arena.memory names devices, instead of
// the driver.
func (o Options) Allocating(alloc func(bytes int64) (memory.Arena, error)) Options {
	o.devices = func(n *Node) error {
		for _, r := range n.ranks {
			a, err := alloc(n.geometry.Layout.Bytes())
			if err != nil {
				return err
			}
			n.arenas[r] = a
			n.closers = append(n.closers, a.Close)
		}
		return nil
	}
	return o
}

// Calls are those of AdmitRetrieve that are at work.
func (n *Node) Calls() int {
	n.follows.mu.Lock()
	defer n.follows.mu.Unlock()
	return n.follows.waiting
}

// ArenaOf is a local rank's.
func (n *Node) ArenaOf(r id.Rank) memory.Arena { return n.arenas[r] }

// FillOutbox gossips noise until the cluster takes no more.
func (n *Node) FillOutbox() {
	noise := make([]byte, cluster.MaxItem)
	for n.cluster.Broadcast(noise) == nil {
	}
}

// Call is a link that stands.
type Call interface {
	Send(ctx context.Context, ask []byte) error
	Answers() <-chan []byte
	Ended() <-chan struct{}
	Close() error
}

// CallPeer opens a link of a transport, as that does.
func (n *Node) CallPeer(ctx context.Context, transport string, life id.Life, hello []byte) ([]byte, Call, error) {
	answer, c, err := n.callPeer(ctx, transport, life, hello)
	if err != nil {
		return nil, nil, err
	}
	return answer, c, nil
}

// ServeLinks lets links of a transport that the node does not have be opened.
func (n *Node) ServeLinks(transport string, serve func(ctx context.Context, reader id.Life, hello []byte, asked <-chan []byte, answer func([]byte) error) error) {
	n.linking[transport] = serveFunc(serve)
}

type serveFunc func(context.Context, id.Life, []byte, <-chan []byte, func([]byte) error) error

func (f serveFunc) Serve(ctx context.Context, reader id.Life, hello []byte, asked <-chan []byte, answer func([]byte) error) error {
	return f(ctx, reader, hello, asked, answer)
}

// Bounds of links.
const (
	MaxHello     = maxHello
	MaxPeerLinks = maxPeerLinks
	MaxAsked     = maxAsked
)

// CloserOfLent closes a seal table that an engine has lent.
func CloserOfLent(seals *memory.SealTable) func() error { return (&adoption{seals: seals}).close }

// Counts are the manager's.
func (n *Node) Counts() manager.Counts { return n.manager.Counts() }
