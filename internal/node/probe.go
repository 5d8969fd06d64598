package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/cudaipc"
	"github.com/kvferry/kvferry/transfer/rdmaread"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// The probe's word is the last one of the seal table. It is held for as long as
// the node lives, by the sequence that no publication has, so that a node can be
// read where nothing is published. What is read under it is the sink, whose bytes
// mean nothing: of any other page it says nothing.
const (
	probeWord     = memory.Words - 1
	probeSequence = id.Sequence(0)
)

// probeSeal is how a life holds the probe's word.
func probeSeal(l id.Life) transfer.Seal {
	value, _ := id.SealValue(l.Incarnation, probeSequence)
	return transfer.Seal{Index: probeWord, Value: value}
}

// errProbeTime: the transport had not done it in limits.dial and timers.stall.
var errProbeTime = fmt.Errorf("not over in transfer.limits.dial and timers.stall: %w", transfer.ErrStalled)

// helloRemedy is for a peer that does not answer its peer service.
const helloRemedy = "is its process alive, and not stopped; does its peer port pass from here; kvferry peers"

// Probe reads the sink of a peer by each transport, over links of its own: the
// routes, and what is being read by them, are left alone.
func (a adminService) Probe(ctx context.Context, req *kvferrypb.ProbeRequest) (*kvferrypb.ProbeResponse, error) {
	n := a.node
	p, err := n.probed(id.Node(req.GetNode()))
	if err != nil {
		return nil, err
	}
	if end, ok := ctx.Deadline(); ok {
		left := time.Until(end)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, max(left-answerTime, left/2), fmt.Errorf("no time left for it: %w", errTooLate))
		defer cancel()
	}
	select {
	case n.probing <- struct{}{}:
		defer func() { <-n.probing }()
	case <-ctx.Done():
		return nil, fmt.Errorf("another probe runs: %w", context.Cause(ctx))
	}
	start := time.Now()
	h, err := p.sayHello()
	res := &kvferrypb.ProbeResponse{Node: string(p.life.Node), Incarnation: uint64(p.life.Incarnation), Address: p.member.Meta.Peer.String()}
	known := err == nil
	if known {
		res.Hello = durationpb.New(time.Since(start))
	} else {
		res.HelloError = err.Error()
		h, known = p.said() // what it said is good for its whole life
	}
	if known {
		res.Differences = differenceMessages(n.geometry.Differences(h.geometry))
	}
	by, _ := p.transports()
	for _, name := range n.probes(h) {
		i := &kvferrypb.ProbeResponse_Item{Transport: name, State: StateAbsent, InUse: name == by}
		descriptor, theirs := h.descriptors[name]
		ours := slices.IndexFunc(n.transports, func(t transfer.Transport) bool { return t.Name() == name })
		switch {
		case ours < 0:
			i.Reason, i.Remedy = n.lacks(name), "kvferry doctor shows what this machine has; kvferry config show, what it may use"
		case !known:
			i.State, i.Reason, i.Remedy = StateFail, "the peer has never answered a hello, so how it is read is not known", helloRemedy
		case !theirs:
			i.Reason, i.Remedy = "the peer does not have it", "kvferry status there says why"
		default:
			peer := transfer.Peer{Life: p.life, Descriptor: descriptor, ArenaBytes: h.arenas}
			n.probe(ctx, n.transports[ours], peer, h.geometry.Layout, i)
			if i.State == StateFail && res.Hello == nil {
				i.Remedy = helloRemedy // all else may follow from it
			}
		}
		res.Items = append(res.Items, i)
	}
	return res, nil
}

// probed finds a peer by its name; the error names those that there are.
func (n *Node) probed(name id.Node) (*peer, error) {
	if name == n.life.Node {
		return nil, fmt.Errorf("%s is this node itself, want another one, or another node to look from (--node): %w", name, manager.ErrInvalid)
	}
	if p := n.peers.byNode(name); p != nil {
		return p, nil
	}
	var others []string
	for _, p := range n.peers.all() {
		others = append(others, string(p.life.Node))
	}
	slices.Sort(others)
	text := cmp.Or(strings.Join(others, ", "), "none")
	if n.peers.gone(name) {
		return nil, fmt.Errorf("%.80q has left the cluster, or was lost: %w now; the others are: %s", name, errUnknownNode, text)
	}
	return nil, fmt.Errorf("%.80q: %w; the others are: %s", name, errUnknownNode, text)
}

// probes are the transports that either side has or wants, ours first, best first.
func (n *Node) probes(h hello) []string {
	names := slices.Clone(n.config.Transfer.Transports)
	for _, name := range slices.Sorted(maps.Keys(h.descriptors)) {
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// lacks says why this node does not have a transport.
func (n *Node) lacks(name string) string {
	for _, r := range n.refused {
		if r.transport == name {
			return "not on this node: " + r.reason
		}
	}
	return "this node does not know it"
}

// probe opens a link of its own, reads the sink twice, and closes it again. What
// it finds goes into i. It returns when nothing of it can land any more.
func (n *Node) probe(ctx context.Context, t transfer.Transport, peer transfer.Peer, theirs page.Layout, i *kvferrypb.ProbeResponse_Item) {
	ctx, cancel := context.WithTimeoutCause(ctx, n.config.Transfer.Limits.Dial+n.config.Timers.Stall, errProbeTime)
	defer cancel()
	err := func() error {
		start := time.Now()
		link, err := t.Open(ctx, peer)
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		defer link.Close()
		i.Open = durationpb.New(time.Since(start))
		i.Path = n.path(t.Name(), peer)
		var copies []transfer.Copy // none: the word alone is read
		if rank := slices.IndexFunc(n.ranks, func(r id.Rank) bool { return peer.ArenaBytes[r] > 0 }); rank >= 0 {
			copies = sinkCopies(n.ranks[rank], theirs, n.geometry.Layout)
		} else {
			i.Reason = "no rank in common: nothing but the seal word was read"
		}
		for _, took := range []**durationpb.Duration{&i.First, &i.Second} {
			start := time.Now()
			if err := link.Read(ctx, []transfer.Seal{probeSeal(peer.Life)}, copies); err != nil {
				return err
			}
			*took = durationpb.New(time.Since(start))
		}
		i.Bytes = uint64(transfer.Bytes(copies))
		return nil
	}()
	if err == nil {
		i.State = StateOK
		return
	}
	i.State, i.Reason, i.Remedy = StateFail, err.Error(), probeRemedy(t.Name(), err)
	if errors.Is(err, transfer.ErrUnavailable) {
		i.State = StateAbsent
	}
}

// path says for people where a peer is read by a transport that has opened a link
// to it.
func (n *Node) path(name string, peer transfer.Peer) string {
	var parts []string
	switch name {
	case shm.Name, cudaipc.Name:
		return n.config.Transfer.Rendezvous
	case tcp.Name: // the first that has a route; docs/wire.md has the form
		for word := range strings.FieldsSeq(string(peer.Descriptor)) {
			if _, err := netip.ParseAddrPort(word); err == nil {
				parts = append(parts, word)
			}
		}
		return strings.Join(parts, " or ")
	case rdmaread.Name:
		if n.rdma == nil {
			return ""
		}
		lanes := make(map[string]*[2]int) // that are ready, and wanted, of all links to it
		for _, p := range n.rdma.Paths() {
			if p.Peer != peer.Life {
				continue
			}
			text := fmt.Sprintf("%s:%d %s to %s", p.Device, p.Port, p.GID, p.Remote)
			if p.State != portActive {
				text += " (" + p.State + ")"
			}
			if lanes[text] == nil {
				lanes[text] = new([2]int)
				parts = append(parts, text)
			}
			lanes[text][0] += p.Lanes
			lanes[text][1] += p.Wanted
		}
		for i, text := range parts {
			parts[i] += fmt.Sprintf(", %d of %d lanes", lanes[text][0], lanes[text][1])
		}
	}
	return strings.Join(parts, "; ")
}

// sinkCopies brings the owner's sink into ours, a stretch a layer, as far as both
// have one.
func sinkCopies(rank id.Rank, remote, local page.Layout) []transfer.Copy {
	copies := make([]transfer.Copy, min(remote.Layers, local.Layers))
	for layer := range copies {
		copies[layer] = transfer.Copy{
			Rank:   rank,
			Remote: int64(layer)*remote.LayerBytes() + int64(page.Sink)*remote.LayerPageBytes(),
			Local:  int64(layer)*local.LayerBytes() + int64(page.Sink)*local.LayerPageBytes(),
			Bytes:  min(remote.LayerPageBytes(), local.LayerPageBytes()),
		}
	}
	return copies
}

// probeRemedy is what to do about a transport that did not read.
func probeRemedy(name string, err error) string {
	absent := errors.Is(err, transfer.ErrUnavailable)
	switch {
	case errors.Is(err, transfer.ErrStale):
		return "run one version of kvferry on both nodes: the peer does not hold the seal word of probes"
	case errors.Is(err, transfer.ErrIdentity):
		return "the peer has restarted: again, once kvferry members shows its new life"
	case name == cudaipc.Name && absent:
		return "nothing, if they are on two hosts; on one, show both nodes the same GPUs, and give them one user, one transfer.rendezvous, and one PID namespace"
	case name == shm.Name && absent:
		return "nothing, if they are on two hosts; on one, give both nodes one user and one transfer.rendezvous"
	case name == shm.Name, name == cudaipc.Name:
		return "is the peer's process alive; its log"
	case name == rdmaread.Name:
		return "kvferry doctor on both nodes; between them: link, GIDs of one family, MTU, UDP port 4791 of RoCE"
	case name == tcp.Name && absent:
		return "node.advertise there; security.* on both nodes or on neither"
	}
	if f, _ := failureOf(err); f.GetCode() != kvferrypb.Failure_INTERNAL {
		return f.GetRemedy()
	}
	return "is the peer's process alive; do its ports pass from here (kvferry status there has them); its log"
}
