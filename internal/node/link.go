package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/transfer"
)

var (
	// errNoLink: this node has no link of the transport to give to who asks.
	errNoLink = errors.New("no link to give")
	// errNotMember: who asks is not a member here, or not yet: gossip may be late.
	errNotMember = errors.New("not a member here")
	// errHello: the transport does not take the hello, or could not answer it.
	errHello = errors.New("link failed")
)

// Bounds of what peers open by Link.
const (
	maxHello     = 64 << 10 // bytes of a hello, and of an answer
	maxLinks     = 16384    // that stand at once, of all peers
	maxPeerLinks = 512      // of one
	maxAsked     = 16       // questions of a link that have no answer yet
)

// linkServer is a transport whose links are opened by a call of the peer service.
type linkServer interface {
	// Serve answers a hello of a life that has been proven to be it, at most
	// once, then each question, and returns when nothing is left of what the
	// hello has asked for: at the latest after ctx has ended.
	Serve(ctx context.Context, reader id.Life, hello []byte, asked <-chan []byte, answer func([]byte) error) error
}

// links counts what peers have opened.
type links struct {
	mu      sync.Mutex
	all     int
	by      map[id.Life]int
	refused uint64 // for lack of room
}

// enter finds room for one more link of a life; leave gives it back.
func (l *links) enter(life id.Life) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.all >= maxLinks || l.by[life] >= maxPeerLinks {
		l.refused++
		return fmt.Errorf("%d links of %s stand, at most %d, and %d in all, at most %d: %w", l.by[life], life, maxPeerLinks, l.all, maxLinks, errTooMany)
	}
	if l.by == nil {
		l.by = make(map[id.Life]int)
	}
	l.all++
	l.by[life]++
	return nil
}

func (l *links) leave(life id.Life) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all--
	if l.by[life]--; l.by[life] == 0 {
		delete(l.by, life)
	}
}

func (l *links) refusals() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.refused
}

// Link lets a member open one link of a transport, which stands as long as the
// stream does, the member is one, and this node serves.
func (s peerService) Link(stream grpc.BidiStreamingServer[kvferrypb.LinkRequest, kvferrypb.LinkResponse]) error {
	n := s.node
	req, err := stream.Recv()
	if err != nil {
		return err
	}
	reader, server, err := s.linked(stream.Context(), req)
	if err != nil {
		n.metrics.badMessages.WithLabelValues("link").Inc()
		return err
	}
	member, err := n.peers.await(stream.Context(), reader)
	if err != nil {
		return fmt.Errorf("%w: %w", errNotMember, err)
	}
	if err := n.links.enter(reader); err != nil {
		return err
	}
	defer n.links.leave(reader)
	ctx, stop := context.WithCancelCause(stream.Context())
	defer stop(nil)
	for _, other := range []context.Context{member.ctx, n.ctx} {
		defer context.AfterFunc(other, func() { stop(context.Cause(other)) })()
	}
	asked := make(chan []byte) // a transport takes each as it comes
	if !n.spawn(func() { stop(n.hear(ctx, stream, asked)) }) {
		return transfer.ErrClosed
	}
	life := lifeMessage(n.life) // told once
	err = server.Serve(ctx, reader, req.GetHello(), asked, func(answer []byte) error {
		res := &kvferrypb.LinkResponse{Life: life, Answer: answer}
		life = nil
		return stream.Send(res)
	})
	switch {
	case err == nil:
		return nil
	case errors.Is(err, transfer.ErrUnavailable):
		return fmt.Errorf("%w: %w", errNoLink, err)
	default:
		return fmt.Errorf("%w: %w", errHello, err)
	}
}

// hear gives on what a reader asks. It returns when the stream has ended, which is
// soon after Link has returned, or when the reader breaks the rules. A reader
// that says only that it will ask no more has not ended the link.
func (n *Node) hear(ctx context.Context, stream grpc.BidiStreamingServer[kvferrypb.LinkRequest, kvferrypb.LinkResponse], asked chan<- []byte) error {
	for {
		req, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			<-ctx.Done()
			return nil
		case err != nil:
			return err
		case len(req.GetAsk()) == 0 || len(req.GetAsk()) > maxHello:
			n.metrics.badMessages.WithLabelValues("link").Inc()
			return fmt.Errorf("%w: a question of %d bytes, want 1 to %d", errHello, len(req.GetAsk()), maxHello)
		}
		select {
		case asked <- req.GetAsk():
		case <-ctx.Done():
			return nil
		}
	}
}

// linked checks all of a request that is not the transport's to check.
func (s peerService) linked(ctx context.Context, req *kvferrypb.LinkRequest) (reader id.Life, server linkServer, err error) {
	n := s.node
	if id.Node(req.GetTo()) != n.life.Node {
		return reader, nil, fmt.Errorf("link is for %.80q, this is %s: %w", req.GetTo(), n.life, transfer.ErrIdentity)
	}
	if err := s.meant(req.GetToIncarnation()); err != nil {
		return reader, nil, err
	}
	if reader, err = s.claimed(ctx, req.GetFrom()); err != nil {
		return reader, nil, err
	}
	if len(req.GetHello()) > maxHello {
		return reader, nil, fmt.Errorf("hello of a link has %d bytes, at most %d: %w", len(req.GetHello()), maxHello, manager.ErrInvalid)
	}
	server, ok := n.linking[req.GetTransport()]
	if !ok {
		return reader, nil, fmt.Errorf("%.80q serves none: %w", req.GetTransport(), errNoLink)
	}
	return reader, server, nil
}

// linkCall is our side of a link that a peer's transport has answered.
type linkCall struct {
	stream  grpc.BidiStreamingClient[kvferrypb.LinkRequest, kvferrypb.LinkResponse]
	stop    context.CancelCauseFunc
	answers chan []byte
	open    atomic.Int32  // questions without an answer
	ended   chan struct{} // closed when the stream has ended
}

// Send asks the peer something. It may wait for the network, and the end of ctx
// ends the link then. One goroutine may call it at a time.
func (c *linkCall) Send(ctx context.Context, ask []byte) error {
	if c.open.Add(1) > maxAsked {
		return fmt.Errorf("%w: more than %d questions without an answer", errHello, maxAsked)
	}
	defer context.AfterFunc(ctx, func() { c.stop(context.Cause(ctx)) })()
	err := c.stream.Send(&kvferrypb.LinkRequest{Ask: ask})
	if errors.Is(err, io.EOF) { // why is the watcher's to find out
		return fmt.Errorf("link %w", transfer.ErrClosed)
	}
	return err
}

// Answers are those to what was asked, in order. It is not closed.
func (c *linkCall) Answers() <-chan []byte { return c.answers }

// Ended is closed when the peer has ended the link, or is gone.
func (c *linkCall) Ended() <-chan struct{} { return c.ended }

// Close ends the link and returns when the stream has ended. It may be called
// twice.
func (c *linkCall) Close() error {
	c.stop(transfer.ErrClosed)
	<-c.ended
	return nil
}

// watch takes answers, and returns when the peer has ended the stream, or says
// anything that nobody has asked.
func (c *linkCall) watch() {
	defer close(c.ended)
	defer c.stop(transfer.ErrClosed)
	for {
		res, err := c.stream.Recv()
		if err != nil || c.open.Add(-1) < 0 || len(res.GetAnswer()) > maxHello {
			return
		}
		select {
		case c.answers <- res.GetAnswer():
		default: // nobody takes them
			return
		}
	}
}

// callPeer opens a link of a transport to exactly this life: its answer, and what
// stands afterwards. The end of ctx ends an attempt, and nothing after it. What
// the error wraps says whose fault it is: [transfer.ErrIdentity] if that life is
// not there, [transfer.ErrUnavailable] if it has no such link to give, else the
// transport's.
func (n *Node) callPeer(ctx context.Context, transport string, life id.Life, hello []byte) ([]byte, *linkCall, error) {
	p, err := n.peers.owner(life)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", transfer.ErrIdentity, err)
	}
	standing, stop := context.WithCancelCause(p.ctx)
	inTime := context.AfterFunc(ctx, func() { stop(context.Cause(ctx)) })
	stream, answer, err := p.link(standing, transport, hello)
	c := &linkCall{stream: stream, stop: stop, answers: make(chan []byte, maxAsked), ended: make(chan struct{})}
	switch {
	case err != nil && standing.Err() != nil:
		err = transfer.Reason(standing)
	case err == nil && !inTime():
		err = transfer.Reason(ctx)
	case err == nil && !n.spawn(c.watch):
		err = transfer.ErrClosed
	}
	if err != nil {
		inTime()
		stop(err)
		return nil, nil, fmt.Errorf("link by %s to %s at %s: %w", transport, life, p.member.Meta.Peer, err)
	}
	return answer, c, nil
}

// link says a transport's hello and returns the answer.
func (p *peer) link(ctx context.Context, transport string, hello []byte) (grpc.BidiStreamingClient[kvferrypb.LinkRequest, kvferrypb.LinkResponse], []byte, error) {
	stream, err := p.rpc.Link(ctx)
	if err != nil {
		return nil, nil, linkError(err)
	}
	err = stream.Send(&kvferrypb.LinkRequest{
		From: lifeMessage(p.node.life), To: string(p.life.Node), ToIncarnation: uint64(p.life.Incarnation), Transport: transport, Hello: hello,
	})
	if err != nil && !errors.Is(err, io.EOF) { // Recv says why it has ended
		return nil, nil, linkError(err)
	}
	res, err := stream.Recv()
	if err != nil {
		return nil, nil, linkError(err)
	}
	if got := lifeOf(res.GetLife()); got != p.life {
		return nil, nil, fmt.Errorf("%s answered: %w", got, transfer.ErrIdentity)
	}
	if len(res.GetAnswer()) > maxHello {
		return nil, nil, fmt.Errorf("%w: the answer has %d bytes, at most %d", errHello, len(res.GetAnswer()), maxHello)
	}
	return stream, res.GetAnswer(), nil
}

// linkError says what a refusal means.
func linkError(err error) error {
	switch {
	case isOther(err):
		return fmt.Errorf("%w: %w", transfer.ErrIdentity, err)
	case status.Code(err) == codes.Unimplemented:
		return fmt.Errorf("%w: %w", transfer.ErrUnavailable, err)
	default:
		return err
	}
}
