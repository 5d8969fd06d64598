package client

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// Session is an engine's session with its node, the engine service's client
// included. It is safe for concurrent use.
type Session struct {
	kvferrypb.EngineClient

	client   *Client
	life     id.Life
	geometry page.Geometry
	ranks    []id.Rank
	pages    []page.Run
	onEvent  func(*kvferrypb.Event)

	stop context.CancelFunc
	work sync.WaitGroup
	lost chan struct{}
}

// OpenOptions set up a Session. A zero field means its default.
type OpenOptions struct {
	Engine   string         // a name for the node's log
	Role     string         // "prefill", "decode", or "both"
	Geometry *page.Geometry // what the engine was built for; nil: take the node's
	Ranks    []id.Rank      // default: the node's
	// OnEvent is called for every event by one goroutine of the session, which
	// it may block; events are acknowledged when it returns, and Close waits for
	// it. Nil: ignored.
	OnEvent func(*kvferrypb.Event)
}

// Open begins a session and returns when its Events stream stands, so that
// the session lives until Close.
func (c *Client) Open(ctx context.Context, o OpenOptions) (*Session, error) {
	req := &kvferrypb.OpenRequest{Engine: o.Engine, Role: o.Role}
	if o.Geometry != nil {
		req.Geometry = kvferrypb.FromGeometry(*o.Geometry)
	}
	for _, r := range o.Ranks {
		req.Ranks = append(req.Ranks, uint32(r))
	}
	res, err := kvferrypb.NewEngineClient(c.conn).Open(ctx, req)
	if err != nil {
		return nil, err
	}
	g, err := kvferrypb.ToGeometry(res.GetGeometry())
	if err != nil {
		return nil, fmt.Errorf("open: node sent a geometry: %w", err)
	}
	s := &Session{
		EngineClient: kvferrypb.NewEngineClient(sessionConn{c.conn, res.GetSession()}),
		client:       c,
		life:         id.Life{Node: id.Node(res.GetNode()), Incarnation: id.Incarnation(res.GetIncarnation())},
		geometry:     g,
		onEvent:      o.OnEvent,
		lost:         make(chan struct{}),
	}
	for _, r := range res.GetRanks() {
		s.ranks = append(s.ranks, id.Rank(r))
	}
	for _, r := range res.GetPages() {
		s.pages = append(s.pages, page.Run{First: page.Index(r.GetFirst()), Count: r.GetCount()})
	}
	opened := make(chan error, 1) // one answer, also when nobody waits any more
	// The session outlives the call that opened it.
	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	s.stop = stop
	s.work.Go(func() { s.receiveEvents(run, opened) })
	select {
	case err = <-opened:
	case <-ctx.Done():
		err = fmt.Errorf("open: no events on %s: %w: %w (%s)", c.socket, ErrUnreachable, context.Cause(ctx), silentRemedy)
		if errors.Is(ctx.Err(), context.Canceled) {
			err = context.Cause(ctx) // the caller did not want it
		}
	}
	if err != nil {
		_ = s.Close() // at the node, too, which may let no other in beside it
		return nil, err
	}
	return s, nil
}

// Life is the node's life that the session belongs to.
func (s *Session) Life() id.Life { return s.life }

// Geometry is the node's.
func (s *Session) Geometry() page.Geometry { return s.geometry }

// Ranks are the node's local ranks that the session drives.
func (s *Session) Ranks() []id.Rank { return s.ranks }

// Pages are those that were the engine's when the session began, where it chooses
// them: it may use them, or give them. All others come back by events.
func (s *Session) Pages() []page.Run { return s.pages }

// Lost is closed when the node has ended the session or is gone.
func (s *Session) Lost() <-chan struct{} { return s.lost }

// Close ends the session at the node, at once, and waits for the session's
// goroutine. It may be called twice.
func (s *Session) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
	defer cancel()
	var err error
	select {
	case <-s.lost:
	default:
		_, err = s.EngineClient.Close(ctx, &kvferrypb.CloseRequest{})
	}
	s.stop()
	s.work.Wait()
	if CodeOf(err) == kvferrypb.Failure_NO_SESSION || errors.Is(err, ErrUnreachable) {
		return nil // it has ended, which is what was asked for
	}
	return err
}

// receiveEvents keeps the Events stream up: a broken one is resumed where it
// broke, until the node says that the session is gone.
func (s *Session) receiveEvents(ctx context.Context, opened chan<- error) {
	defer close(s.lost)
	var after uint64
	first := true
	for attempt := 0; ; attempt++ {
		err := s.receiveOnce(ctx, &after, func() {
			attempt = 0
			if first {
				first = false
				opened <- nil
			}
		})
		if ctx.Err() != nil {
			return
		}
		if first {
			opened <- err
			return
		}
		// A node that lives takes the stream again within its grace; one that
		// does not has lost the session with everything else.
		if CodeOf(err) == kvferrypb.Failure_NO_SESSION || s.client.unserved(ctx) || attempt >= 20 {
			return
		}
		t := time.NewTimer(250 * time.Millisecond)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return
		}
	}
}

func (s *Session) receiveOnce(ctx context.Context, after *uint64, opened func()) error {
	events, err := s.Events(ctx)
	if err != nil {
		return err
	}
	for {
		// An error of Send shows at Recv, with its reason.
		_ = events.Send(&kvferrypb.EventsRequest{After: *after})
		e, err := events.Recv()
		if err != nil {
			return err
		}
		if e.GetKind() == kvferrypb.Event_OPENED {
			opened()
			continue
		}
		if s.onEvent != nil {
			s.onEvent(e)
		}
		*after = e.GetSequence()
	}
}

// sessionConn adds the session to every call.
type sessionConn struct {
	conn    grpc.ClientConnInterface
	session string
}

func (c sessionConn) Invoke(ctx context.Context, method string, args, reply any, opts ...grpc.CallOption) error {
	return c.conn.Invoke(metadata.AppendToOutgoingContext(ctx, kvferrypb.SessionKey, c.session), method, args, reply, opts...)
}

func (c sessionConn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
	return c.conn.NewStream(metadata.AppendToOutgoingContext(ctx, kvferrypb.SessionKey, c.session), desc, method, opts...)
}
