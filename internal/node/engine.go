package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// engineService checks what an engine says and passes it on.
type engineService struct {
	kvferrypb.UnimplementedEngineServer
	node *Node
}

const (
	maxWait       = time.Hour // of one AdmitRetrieve
	maxEngineName = 256       // bytes
)

// session is the one that the call names. The call is the session's until leave.
func (e engineService) session(ctx context.Context) (s *session, leave func(), err error) {
	md, _ := metadata.FromIncomingContext(ctx)
	token := md.Get(kvferrypb.SessionKey)
	if len(token) != 1 {
		return nil, nil, fmt.Errorf("metadata %s: %w", kvferrypb.SessionKey, errNoSession)
	}
	if s, err = e.node.sessions.get(token[0]); err != nil {
		return nil, nil, err
	}
	if err := s.enter(); err != nil {
		return nil, nil, err
	}
	return s, s.leave, nil
}

// request is the session, and the request if it is the session's.
func (e engineService) request(ctx context.Context, name string) (s *session, r id.Request, leave func(), err error) {
	if s, leave, err = e.session(ctx); err != nil {
		return nil, "", nil, err
	}
	if r, err = e.owned(s, name); err != nil {
		leave()
		return nil, "", nil, err
	}
	return s, r, leave, nil
}

// owned is a request of the session's.
func (e engineService) owned(s *session, name string) (id.Request, error) {
	r := id.Request(name)
	if err := r.Validate(); err != nil {
		return "", err
	}
	return r, e.node.sessions.own(s, r)
}

func (e engineService) Open(ctx context.Context, req *kvferrypb.OpenRequest) (*kvferrypb.OpenResponse, error) {
	n := e.node
	if n.isDraining() {
		return nil, errDraining
	}
	if len(req.GetEngine()) > maxEngineName || len(req.GetRole()) > maxEngineName {
		return nil, fmt.Errorf("open: engine or role has more than %d bytes: %w", maxEngineName, manager.ErrInvalid)
	}
	if req.GetGeometry() != nil {
		g, err := kvferrypb.ToGeometry(req.GetGeometry())
		if err != nil {
			return nil, err
		}
		if d := n.geometry.Differences(g); len(d) > 0 {
			return nil, &geometryError{d}
		}
	}
	for _, r := range req.GetRanks() {
		if r >= id.MaxRanks || !slices.Contains(n.ranks, id.Rank(r)) {
			return nil, fmt.Errorf("rank %d is not local, %v are: %w", r, n.ranks, id.ErrInvalid)
		}
	}
	s, pages, err := n.sessions.openCounted(ctx, req.GetEngine())
	if err != nil {
		return nil, err
	}
	n.log.Info("session opened", "engine", req.GetEngine(), "role", req.GetRole())
	res := &kvferrypb.OpenResponse{
		Session: s.token, Node: string(n.life.Node), Incarnation: uint64(n.life.Incarnation),
		Geometry: kvferrypb.FromGeometry(n.geometry),
		Ranks:    req.GetRanks(), Pages: pages,
	}
	if len(res.GetRanks()) == 0 {
		for _, r := range n.ranks {
			res.Ranks = append(res.Ranks, uint32(r))
		}
	}
	return res, nil
}

func (e engineService) OpenArena(ctx context.Context, req *kvferrypb.OpenArenaRequest) (*kvferrypb.OpenArenaResponse, error) {
	_, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	r := id.Rank(req.GetRank())
	a := e.node.arenas[r]
	if a == nil {
		return nil, fmt.Errorf("rank %d is not local, %v are: %w", r, e.node.ranks, id.ErrInvalid)
	}
	token, err := e.node.handover.token(r)
	if err != nil {
		return nil, err
	}
	return &kvferrypb.OpenArenaResponse{Token: token, FdSocket: e.node.addresses.Engine + ".fd", Bytes: uint64(e.node.geometry.Layout.Bytes()), Memory: e.node.memoryOf(r)}, nil
}

func (e engineService) Close(ctx context.Context, _ *kvferrypb.CloseRequest) (*kvferrypb.CloseResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	leave() // the end of the session waits for its calls
	e.node.sessions.end(s, "the engine closed it")
	return &kvferrypb.CloseResponse{}, nil
}

func (e engineService) Ingest(ctx context.Context, req *kvferrypb.IngestRequest) (*kvferrypb.IngestResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	r := id.Request(req.GetRequest())
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if e.node.isDraining() && e.node.sessions.own(s, r) != nil {
		return nil, fmt.Errorf("ingest %q: %w", r, errDraining)
	}
	c := manager.RequestConfig{Needs: needsOf(req)}
	if c.Retention, err = retentionOf(req); err != nil {
		return nil, fmt.Errorf("ingest %q: %w", r, err)
	}
	if err := e.node.sessions.ingest(s, r, c); err != nil {
		return nil, err
	}
	return &kvferrypb.IngestResponse{}, nil
}

func needsOf(req *kvferrypb.IngestRequest) manager.Needs {
	var needs manager.Needs
	if req.GetNeeded() != nil {
		needs.Labels = labels(req.GetNeeded())
	}
	if len(req.GetByNode()) > 0 {
		needs.ByNode = make(map[id.GraphNode][]id.Label)
	}
	for _, b := range req.GetByNode() {
		needs.ByNode[id.GraphNode(b.GetGraphNode())] = labels(b.GetLabels())
	}
	if len(req.GetByWalk()) > 0 {
		needs.ByWalk = make(map[manager.At][]id.Label)
	}
	for _, b := range req.GetByWalk() {
		needs.ByWalk[manager.At{Node: id.GraphNode(b.GetGraphNode()), Walk: id.Walk(b.GetWalk())}] = labels(b.GetLabels())
	}
	return needs
}

// retentionOf is what the request keeps, by label; the manager checks the numbers.
func retentionOf(req *kvferrypb.IngestRequest) (map[id.Label]manager.Retention, error) {
	if len(req.GetRetention()) == 0 {
		return nil, nil
	}
	keep := make(map[id.Label]manager.Retention)
	for _, k := range req.GetRetention() {
		l := labelOf(k.GetLabel())
		if err := l.Validate(); err != nil {
			return nil, fmt.Errorf("retention: %w", err)
		}
		if _, twice := keep[l]; twice {
			return nil, fmt.Errorf("label %q has two retentions: %w", l, manager.ErrInvalid)
		}
		keep[l] = manager.Retention{Budget: int(k.GetBudget()), Prefix: int(k.GetPrefix())}
	}
	return keep, nil
}

// labels is the list, never nil: a list that is there counts also when empty.
func labels(l *kvferrypb.Labels) []id.Label {
	out := make([]id.Label, 0, len(l.GetLabels()))
	for _, s := range l.GetLabels() {
		out = append(out, id.Label(s))
	}
	return out
}

func (e engineService) Reset(ctx context.Context, req *kvferrypb.ResetRequest) (*kvferrypb.ResetResponse, error) {
	_, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	return &kvferrypb.ResetResponse{}, e.node.reset(r, req.GetFree())
}

func (e engineService) Remove(ctx context.Context, req *kvferrypb.RemoveRequest) (*kvferrypb.RemoveResponse, error) {
	_, r, leave, err := e.request(ctx, req.GetRequest())
	if errors.Is(err, manager.ErrUnknownRequest) {
		return &kvferrypb.RemoveResponse{}, nil // it is gone, which is what was asked for
	}
	if err != nil {
		return nil, err
	}
	defer leave()
	return &kvferrypb.RemoveResponse{}, e.node.remove(r, req.GetDiscard(), kvferrypb.CompleteItem_DECLINED)
}

func (e engineService) Give(ctx context.Context, req *kvferrypb.GiveRequest) (*kvferrypb.GiveResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	return &kvferrypb.GiveResponse{}, e.node.sessions.give(s, req.GetGrants())
}

func labelOf(s string) id.Label {
	if s == "" {
		return id.Main
	}
	return id.Label(s)
}

func (e engineService) Publish(ctx context.Context, req *kvferrypb.PublishRequest) (*kvferrypb.PublishResponse, error) {
	s, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	if req.GetReaders() > kvferrypb.MaxReaders {
		return nil, fmt.Errorf("publish %q: %d readers, at most %d: %w", r, req.GetReaders(), kvferrypb.MaxReaders, manager.ErrInvalid)
	}
	if d := req.GetHold(); d != nil && (d.CheckValid() != nil || d.AsDuration() < 0) {
		return nil, fmt.Errorf("publish %q: hold %v: %w", r, d, manager.ErrInvalid)
	}
	p, err := e.node.publish(s, r, publishOptions{
		target: id.Node(req.GetTarget()), readers: int(req.GetReaders()), hold: req.GetHold().AsDuration(), final: req.GetFinal(),
	})
	if err != nil {
		return nil, err
	}
	res := &kvferrypb.PublishResponse{
		Reference: p.given, Sequence: uint64(p.sequence), Publication: uint64(p.name.Sequence), GossipDeferred: p.deferred,
	}
	for _, st := range p.value.Streams {
		res.Lengths = append(res.Lengths, &kvferrypb.PublishResponse_Length{Label: string(st.Label), Tokens: uint32(st.Tokens), Pages: uint32(len(st.Pages))})
	}
	return res, nil
}

func (e engineService) AdmitRetrieve(ctx context.Context, req *kvferrypb.AdmitRetrieveRequest) (*kvferrypb.AdmitRetrieveResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if err := e.node.sessions.give(s, req.GetGrants()); err != nil {
		return nil, err
	}
	r, err := e.owned(s, req.GetRequest())
	if err != nil {
		return nil, err
	}
	q := query{
		request:   r,
		at:        manager.At{Node: id.GraphNode(req.GetGraphNode()), Walk: id.Walk(req.GetWalk())},
		minTokens: int(min(req.GetMinTokens(), math.MaxInt32)),
		wait:      min(req.GetWait().AsDuration(), maxWait),
		prefetch:  req.GetPrefetch(),
	}
	if req.GetReference() != "" {
		ref, err := e.node.keyring.current().Decode(req.GetReference())
		if err != nil {
			return nil, err
		}
		q.reference = &ref
	}
	ctx, stop := s.within(ctx)
	defer stop()
	a, err := e.node.retrieve(ctx, s, q)
	if err != nil {
		return nil, err
	}
	res := &kvferrypb.AdmitRetrieveResponse{
		Readiness: kvferrypb.Readiness(a.readiness),
		Owner:     string(a.source.Owner.Node), OwnerIncarnation: uint64(a.source.Owner.Incarnation),
		Transport: a.transport, Bytes: uint64(a.bytes),
	}
	state, err := e.node.manager.Request(r)
	if err != nil {
		return nil, err
	}
	for _, st := range state.Streams {
		res.Lengths = append(res.Lengths, &kvferrypb.AdmitRetrieveResponse_Length{Label: string(st.Label), Tokens: uint32(st.Tokens)})
	}
	return res, nil
}

func (e engineService) Cancel(ctx context.Context, req *kvferrypb.CancelRequest) (*kvferrypb.CancelResponse, error) {
	s, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, stop := s.within(ctx)
	defer stop()
	return &kvferrypb.CancelResponse{}, e.node.cancelRetrieval(ctx, r, errCancelled)
}

func (e engineService) Release(ctx context.Context, req *kvferrypb.ReleaseRequest) (*kvferrypb.ReleaseResponse, error) {
	s, leave, err := e.session(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	ref, err := e.node.keyring.current().Decode(req.GetReference())
	if err != nil {
		return nil, err
	}
	ctx, stop := s.within(ctx)
	defer stop()
	return &kvferrypb.ReleaseResponse{}, e.node.decline(ctx, ref)
}

// decline tells a publication's owner that it will not be read here, once it is
// sure that the reference says the truth of it. One that has ended needs nothing.
func (n *Node) decline(ctx context.Context, ref wire.Reference) error {
	if ref.Publication.Owner == n.life {
		if _, err := n.owner.own(ref.Publication.Sequence, &ref); errors.Is(err, wire.ErrReference) {
			return fmt.Errorf("release %s: %w", ref.Publication, err)
		}
		return fmt.Errorf("release %s: %w", ref.Publication, errOwn)
	}
	if f := n.follows.from(ref.Publication); f != nil && !f.isOver() {
		return fmt.Errorf("release %q: it is being read, cancel it first: %w", ref.Request, manager.ErrReading)
	}
	p, err := n.peers.owner(ref.Publication.Owner)
	if err != nil {
		return fmt.Errorf("release %s: %w", ref.Publication, err)
	}
	e, err := n.board.ByName(time.Now(), ref.Publication)
	if err != nil {
		e, err = n.lookup(ctx, p, ref.Publication, ref.Request)
	}
	if err == nil {
		err = matches(&ref, e.Name, e.Request, e.Seal)
	}
	switch {
	case errors.Is(err, publish.ErrEnded) || errors.Is(err, errExpired) || errors.Is(err, errRevoked):
		return nil
	case err != nil:
		return fmt.Errorf("release %s: %w", ref.Publication, err)
	}
	p.tell(receipt{sequence: ref.Publication.Sequence, attempt: n.follows.attempt(), outcome: kvferrypb.CompleteItem_DECLINED})
	return nil
}

// Events is no call of the session's: it lasts as long as the session does.
func (e engineService) Events(stream grpc.BidiStreamingServer[kvferrypb.EventsRequest, kvferrypb.Event]) error {
	s, leave, err := e.session(stream.Context())
	if err != nil {
		return err
	}
	leave()
	replaced := s.attach()
	defer func() { s.detach(time.Now(), replaced) }()
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	after := first.GetAfter()
	s.acknowledge(after)
	if err := stream.Send(&kvferrypb.Event{Kind: kvferrypb.Event_OPENED}); err != nil {
		return err
	}
	gone := make(chan error, 1) // one answer, also when nobody waits any more
	go func() {                 // ends with the stream, which gRPC waits for
		for {
			ack, err := stream.Recv()
			if err != nil {
				gone <- err
				return
			}
			s.acknowledge(ack.GetAfter())
		}
	}()
	for {
		events, more := s.since(after)
		for _, ev := range events {
			if err := stream.Send(ev); err != nil {
				return err
			}
			after = ev.GetSequence()
		}
		select {
		case <-more:
		case err := <-gone:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-replaced:
			return errReplaced
		case <-s.ctx.Done():
			return context.Cause(s.ctx)
		case <-e.node.ctx.Done():
			return errDraining
		}
	}
}
