package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
)

// peerService answers other nodes. What they say is hostile until checked; a
// message for another life than this one is refused.
type peerService struct {
	kvferrypb.UnimplementedPeerServer
	node *Node
}

const (
	maxItems    = 4096   // of one Lease or Complete
	refusedFull = "full" // no room for a lease; the publication lives
)

// meant checks that a message is for this life.
func (s peerService) meant(incarnation uint64) error {
	if id.Incarnation(incarnation) != s.node.life.Incarnation {
		return fmt.Errorf("message is for incarnation %d, this is %s: %w", incarnation, s.node.life, transfer.ErrIdentity)
	}
	return nil
}

// helloRequest is what this node says of itself.
func (n *Node) helloRequest() *kvferrypb.HelloRequest {
	req := &kvferrypb.HelloRequest{From: lifeMessage(n.life), Group: string(n.group), Geometry: kvferrypb.FromGeometry(n.geometry)}
	for _, r := range n.ranks {
		req.Arenas = append(req.Arenas, &kvferrypb.Arena{Rank: uint32(r), Bytes: uint64(n.geometry.Layout.Bytes())})
	}
	for _, t := range n.transports {
		req.Transports = append(req.Transports, &kvferrypb.Transport{Name: t.Name(), Address: t.Descriptor()})
	}
	return req
}

// claimed is the life that a caller says it is, and proves to be if names have
// to be proved.
func (s peerService) claimed(ctx context.Context, m *kvferrypb.Life) (id.Life, error) {
	life := lifeOf(m)
	if err := life.Node.Validate(); err != nil {
		return life, err
	}
	return life, s.node.proven(ctx, life.Node)
}

func (s peerService) Hello(ctx context.Context, req *kvferrypb.HelloRequest) (*kvferrypb.HelloResponse, error) {
	n := s.node
	if id.Node(req.GetTo()) != n.life.Node {
		return nil, fmt.Errorf("hello is for %q, this is %s: %w", req.GetTo(), n.life, transfer.ErrIdentity)
	}
	if want := req.GetToIncarnation(); want != 0 {
		if err := s.meant(want); err != nil {
			return nil, err
		}
	}
	if _, err := s.claimed(ctx, req.GetFrom()); err != nil {
		return nil, err
	}
	own := n.helloRequest()
	res := &kvferrypb.HelloResponse{
		Life: own.GetFrom(), Group: own.GetGroup(), Geometry: own.GetGeometry(), Arenas: own.GetArenas(), Transports: own.GetTransports(),
	}
	return res, nil
}

// Push takes announcements for this node. The stream's break is how the death
// of a process is noticed at once.
func (s peerService) Push(stream grpc.BidiStreamingServer[kvferrypb.PushRequest, kvferrypb.PushResponse]) error {
	n := s.node
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	from, err := s.claimed(stream.Context(), first.GetFrom())
	if err != nil {
		return err
	}
	defer func() {
		if n.ctx.Err() == nil { // else it is us who end it
			n.fence(from)
		}
	}()
	for req := first; ; {
		now := time.Now()
		switch {
		case req.GetAnnouncement() != nil:
			a := req.GetAnnouncement()
			if _, err := n.board.Learn(now, from, a.GetMessage(), id.Request(a.GetRequest())); err != nil {
				n.metrics.badMessages.WithLabelValues("push").Inc()
				n.log.Warn("pushed announcement refused", "node", from.String(), "request", a.GetRequest(), "err", err)
			}
		case req.GetEnded() != nil:
			name := id.Publication{Owner: from, Sequence: id.Sequence(req.GetEnded().GetSequence())}
			n.board.Forget(name)
			if f := n.follows.from(name); f != nil && f.source == name {
				f.refuse(req.GetEnded().GetCause())
			}
		}
		if err := stream.Send(&kvferrypb.PushResponse{}); err != nil {
			return err
		}
		if req, err = stream.Recv(); err != nil {
			return err
		}
		if lifeOf(req.GetFrom()) != from {
			return fmt.Errorf("push stream of %s speaks for %s: %w", from, lifeOf(req.GetFrom()), transfer.ErrIdentity)
		}
	}
}

func (s peerService) Lookup(_ context.Context, req *kvferrypb.LookupRequest) (*kvferrypb.LookupResponse, error) {
	if err := s.meant(req.GetIncarnation()); err != nil {
		return nil, err
	}
	full, r, continues, err := s.node.owner.find(time.Now(), id.Sequence(req.GetSequence()), id.Request(req.GetRequest()))
	if err != nil {
		return nil, fmt.Errorf("publication %d: %w", req.GetSequence(), err)
	}
	return &kvferrypb.LookupResponse{Announcement: &kvferrypb.Announcement{Message: full, Request: string(r)}, Continues: continues}, nil
}

func (s peerService) Snapshot(req *kvferrypb.SnapshotRequest, stream grpc.ServerStreamingServer[kvferrypb.SnapshotItem]) error {
	if err := s.meant(req.GetIncarnation()); err != nil {
		return err
	}
	for _, item := range s.node.plog.Live(time.Now()) {
		if err := stream.Send(&kvferrypb.SnapshotItem{Message: item}); err != nil {
			return err
		}
	}
	return nil
}

// caller is the reader that a batch is of.
func (s peerService) caller(ctx context.Context, m *kvferrypb.Life, items int) (id.Life, error) {
	life, err := s.claimed(ctx, m)
	if err != nil {
		return life, err
	}
	if items > maxItems {
		return life, fmt.Errorf("%d items, at most %d: %w", items, maxItems, manager.ErrInvalid)
	}
	return life, nil
}

func (s peerService) Lease(ctx context.Context, req *kvferrypb.LeaseRequest) (*kvferrypb.LeaseResponse, error) {
	if err := s.meant(req.GetIncarnation()); err != nil {
		return nil, err
	}
	life, err := s.caller(ctx, req.GetReader(), len(req.GetItems()))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	res := &kvferrypb.LeaseResponse{}
	var granted []id.Sequence
	for _, i := range req.GetItems() {
		lasts, err := s.node.owner.holds.lease(now, id.Sequence(i.GetSequence()), reader{life: life, attempt: i.GetAttempt()})
		r := &kvferrypb.LeaseResponse_Result{Millis: uint32(lasts.Milliseconds())}
		ended, isEnded := errors.AsType[*holdEndedError](err)
		switch {
		case err == nil:
			granted = append(granted, id.Sequence(i.GetSequence()))
		case isEnded:
			r.Refused = ended.cause
		case errors.Is(err, publish.ErrFull):
			r.Refused = refusedFull
		default:
			r.Refused = "unknown"
		}
		res.Results = append(res.Results, r)
	}
	s.node.kickSweep()
	s.node.tier.bringFor(granted)
	return res, nil
}

func (s peerService) Complete(ctx context.Context, req *kvferrypb.CompleteRequest) (*kvferrypb.CompleteResponse, error) {
	if err := s.meant(req.GetIncarnation()); err != nil {
		return nil, err
	}
	life, err := s.caller(ctx, req.GetReader(), len(req.GetItems()))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	res := &kvferrypb.CompleteResponse{}
	for _, i := range req.GetItems() {
		r := s.node.owner.holds.acknowledge(now, id.Sequence(i.GetSequence()), reader{life: life, attempt: i.GetAttempt()}, i.GetOutcome())
		res.Results = append(res.Results, string(r))
	}
	s.node.kickSweep()
	return res, nil
}
