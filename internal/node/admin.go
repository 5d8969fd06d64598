package node

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

// adminService shows people what is there.
type adminService struct {
	kvferrypb.UnimplementedAdminServer
	node *Node
}

const defaultLimit = 1000

func limitOf(l uint32) int { return int(min(cmp.Or(l, defaultLimit), 100_000)) }

func (a adminService) Status(context.Context, *kvferrypb.StatusRequest) (*kvferrypb.StatusResponse, error) {
	n := a.node
	notReady := n.notReady()
	c := n.manager.Counts()
	res := &kvferrypb.StatusResponse{
		Node: string(n.life.Node), Incarnation: uint64(n.life.Incarnation), Role: n.config.Node.Role, Group: string(n.group),
		Version: n.version, Uptime: durationpb.New(time.Since(n.started)),
		Ready: len(notReady) == 0, NotReady: notReady,
		Geometry: kvferrypb.FromGeometry(n.geometry),
		Pages:    n.pageCounts(c),
		Requests: uint32(c.Requests), Sessions: uint32(n.sessions.count()), Publications: uint32(c.Publications), Retrievals: uint32(c.Retrievals),
		Members:    uint32(len(n.cluster.Members())),
		Transports: n.transportStatus(),
		Draining:   n.isDraining(), Security: n.security(),
		Memory: n.memories(), Devices: n.devices(),
	}
	for _, r := range n.ranks {
		res.Ranks = append(res.Ranks, uint32(r))
	}
	for _, ad := range []struct{ name, address string }{
		{"gossip", n.addresses.Gossip.String()},
		{"peer", n.addresses.Peer.String()},
		{"data", dataAddress(n.addresses.Data)},
		{"http", n.addresses.HTTP.String()},
		{"engine", n.addresses.Engine},
	} {
		if ad.address != "" {
			res.Addresses = append(res.Addresses, &kvferrypb.StatusResponse_Address{Name: ad.name, Address: ad.address})
		}
	}
	return res, nil
}

// dataAddress is "" without tcp.
func dataAddress(at netip.AddrPort) string {
	if !at.IsValid() {
		return ""
	}
	return at.String()
}

func (n *Node) pageCounts(c manager.Counts) *kvferrypb.PageCounts {
	return &kvferrypb.PageCounts{
		Total: uint32(n.geometry.Layout.Pages), Free: uint32(c.Free), Owned: uint32(c.Owned), Limbo: uint32(c.Limbo),
		Quarantine: uint32(c.Quarantine), Sink: uint32(c.Sink), Published: uint32(c.Published),
		Engine: uint32(c.Engine), HostTotal: uint32(c.HostFree + c.HostUsed), HostFree: uint32(c.HostFree),
	}
}

func (a adminService) Members(context.Context, *kvferrypb.MembersRequest) (*kvferrypb.MembersResponse, error) {
	res := &kvferrypb.MembersResponse{}
	for _, m := range a.node.cluster.Members() {
		res.Items = append(res.Items, &kvferrypb.Member{
			Node: string(m.Life.Node), Incarnation: uint64(m.Life.Incarnation), Role: m.Meta.Role, Group: string(m.Meta.Group),
			Gossip: m.Gossip.String(), Peer: m.Meta.Peer.String(), Self: m.Self,
			Compatible: m.Meta.Fingerprint == a.node.geometry.Fingerprint(), Draining: m.Meta.Draining,
		})
	}
	return res, nil
}

func (a adminService) Publications(_ context.Context, req *kvferrypb.PublicationsRequest) (*kvferrypb.PublicationsResponse, error) {
	n, now := a.node, time.Now()
	res := &kvferrypb.PublicationsResponse{}
	if req.GetRemote() {
		for _, e := range n.board.List(now, limitOf(req.GetLimit())) {
			i := publicationItem(e.Name, e.Sequence, e.Publication)
			i.RequestHash, i.State = hex.EncodeToString(e.Request[:]), "known"
			i.ExpiresIn = durationpb.New(e.Expires.Sub(now))
			res.Items = append(res.Items, i)
		}
		return res, nil
	}
	all := n.owner.live()
	for _, p := range all[:min(len(all), limitOf(req.GetLimit()))] {
		i := publicationItem(p.name, p.sequence, p.value)
		hash := p.value.Request.Hash()
		i.RequestHash = hex.EncodeToString(hash[:])
		reference, err := p.reference(n.keyring.current())
		if err != nil {
			return nil, err
		}
		i.Reference = reference
		if v, ok := n.owner.holds.look(now, p.name.Sequence); ok {
			i.State = "open"
			if v.final {
				i.State = "sealed"
			}
			if len(v.leases) > 0 {
				i.State = "leased"
			}
			i.Leases, i.Acknowledged, i.Readers = uint32(len(v.leases)), uint32(v.done), uint32(v.readers)
			i.Age, i.ExpiresIn = durationpb.New(v.age), durationpb.New(v.ends)
		}
		res.Items = append(res.Items, i)
	}
	return res, nil
}

func publicationItem(name id.Publication, sequence id.Sequence, p manager.Publication) *kvferrypb.PublicationItem {
	i := &kvferrypb.PublicationItem{
		Owner: string(name.Owner.Node), Incarnation: uint64(name.Owner.Incarnation),
		Publication: uint64(name.Sequence), Sequence: uint64(sequence), Request: string(p.Request), Final: p.Final,
	}
	for _, s := range p.Streams {
		i.Tokens = max(i.Tokens, uint32(s.Tokens))
		i.Pages += uint32(len(s.Pages))
		if !slices.Contains(i.Labels, string(s.Label)) {
			i.Labels = append(i.Labels, string(s.Label))
		}
	}
	return i
}

func (a adminService) Retrievals(_ context.Context, req *kvferrypb.RetrievalsRequest) (*kvferrypb.RetrievalsResponse, error) {
	res := &kvferrypb.RetrievalsResponse{}
	all := a.node.follows.active()
	slices.SortFunc(all, func(x, y *follow) int { return cmp.Compare(x.attempt, y.attempt) })
	for _, f := range all[:min(len(all), limitOf(req.GetLimit()))] {
		f.mu.Lock()
		i := &kvferrypb.RetrievalItem{
			Request: string(f.request), Owner: string(f.source.Owner.Node), Incarnation: uint64(f.source.Owner.Incarnation),
			Publication: uint64(f.source.Sequence), State: "waiting", Transport: f.transport,
			Bytes: uint64(f.bytes), Age: durationpb.New(time.Since(f.accepted)),
		}
		if f.running != nil {
			i.State, i.Attempt = f.running.state, f.running.bad+1
			i.Transport = cmp.Or(f.running.by, i.Transport)
		}
		f.mu.Unlock()
		res.Items = append(res.Items, i)
	}
	return res, nil
}

func (a adminService) Arena(_ context.Context, req *kvferrypb.ArenaRequest) (*kvferrypb.ArenaResponse, error) {
	n := a.node
	res := &kvferrypb.ArenaResponse{
		Pages: n.pageCounts(n.manager.Counts()), Geometry: kvferrypb.FromGeometry(n.geometry),
		BytesPerRank: uint64(n.geometry.Layout.Bytes()), Memory: n.memories(),
	}
	for _, r := range n.ranks {
		res.Ranks = append(res.Ranks, uint32(r))
	}
	for _, r := range n.manager.Requests(limitOf(req.GetLimit())) {
		state := "idle"
		switch {
		case r.Reading:
			state = "reading"
		case r.InFlight:
			state = "step in flight"
		case r.Published != 0 && r.Final:
			state = "published"
		case r.Published != 0:
			state = "publishing"
		}
		kept := n.keptFor(r.Kept)
		for _, s := range r.Streams {
			i := &kvferrypb.ArenaResponse_Stream{
				Request: string(r.Request), Label: string(s.Label), Tokens: uint32(s.Tokens), Pages: uint32(s.Pages), State: state,
				Released: uint32(s.Released), HostPages: uint32(s.HostPages),
			}
			if s.State != manager.Resident {
				i.State = s.State.String()
			}
			if kept != "" {
				i.State += " (" + kept + ")"
			}
			res.Items = append(res.Items, i)
		}
	}
	return res, nil
}

func (a adminService) Peers(context.Context, *kvferrypb.PeersRequest) (*kvferrypb.PeersResponse, error) {
	res := &kvferrypb.PeersResponse{}
	all := a.node.peers.all()
	slices.SortFunc(all, func(x, y *peer) int { return cmp.Compare(x.life.Node, y.life.Node) })
	for _, p := range all {
		state, err := p.state()
		transport, refused := p.transports()
		h, known := p.said()
		i := &kvferrypb.PeerItem{
			Node: string(p.life.Node), Incarnation: uint64(p.life.Incarnation), Address: p.member.Meta.Peer.String(), State: state, Transport: transport, Refused: refused,
		}
		if known {
			i.Geometry = kvferrypb.FromGeometry(h.geometry)
			i.Path = a.node.path(transport, transfer.Peer{Life: p.life, Descriptor: h.descriptors[transport]})
		}
		if err != nil {
			i.LastError = err.Error()
		}
		res.Items = append(res.Items, i)
	}
	return res, nil
}

func (a adminService) Revoke(_ context.Context, req *kvferrypb.RevokeRequest) (*kvferrypb.RevokeResponse, error) {
	ends, err := a.node.owner.revoke(time.Now(), id.Sequence(req.GetPublication()))
	if err != nil {
		return nil, fmt.Errorf("revoke publication %d: %w", req.GetPublication(), err)
	}
	a.node.announceEnds(ends)
	return &kvferrypb.RevokeResponse{}, nil
}
