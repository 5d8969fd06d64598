package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// ErrGone is wrapped by why a Hold has ended where the peer ended it.
var ErrGone = fmt.Errorf("the peer has hung up, since its transport was closed or its process has ended: link %w", transfer.ErrClosed)

// Holder is what a link does with the connection that it has opened. Its methods
// are called one after the other.
type Holder interface {
	// Attach takes what follows the welcome: the files, then Conn.Settle, then
	// whatever makes them memory that is read. The context is that of Open, and
	// ends with the Hold too.
	Attach(ctx context.Context, c *Conn) error
	// Watch returns as soon as the connection has ended: nil, or [io.EOF], where
	// the owner has hung up. Conn.Stand does where an owner says nothing more.
	Watch(c *Conn) error
	// Release gives up all that Attach has taken, also if that has failed. Nothing
	// reads any more, and the owner is told only when it has returned.
	Release()
}

// Hold is the hold of a link on one life of one peer: the connection, the reads
// that run, and why there can be no more. It is safe for concurrent use.
type Hold struct {
	s       *Server
	r       Holder
	life    id.Life // of the peer
	address string
	cancel  context.CancelCauseFunc // of what is being opened
	ended   chan struct{}           // closed when nothing may be read any more; why says why
	gone    chan struct{}           // closed when nothing is held any more

	mu    sync.Mutex
	conn  *Conn
	why   error
	reads sync.WaitGroup // Add under mu, and only while why is nil
}

// Open dials a peer, attaches what it gives, and watches the connection until it
// ends, or Close ends it. With an error nothing is held.
func (s *Server) Open(ctx context.Context, peer transfer.Peer, r Holder) (*Hold, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	h := &Hold{s: s, r: r, life: peer.Life, cancel: cancel, ended: make(chan struct{}), gone: make(chan struct{})}
	// A server that closes ends what is being opened too.
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, fmt.Errorf("transport: %w", transfer.ErrClosed)
	}
	s.holds[h] = struct{}{}
	s.mu.Unlock()
	err := h.open(ctx, peer)
	if why := h.Reason(); why != nil {
		err = why // closed meanwhile
	}
	if err != nil {
		h.end(err)
		h.release()
		return nil, err
	}
	go h.watch()
	return h, nil
}

func (h *Hold) open(ctx context.Context, peer transfer.Peer) error {
	c, err := h.s.dial(ctx, peer)
	if err != nil {
		return err
	}
	h.mu.Lock()
	h.conn, h.address = c, c.Address()
	h.mu.Unlock()
	if why := h.Reason(); why != nil {
		return why // Close may not have seen the connection
	}
	return h.r.Attach(ctx, c)
}

// Begin registers a read, until Done, or says why there can be none.
func (h *Hold) Begin() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.why == nil {
		h.reads.Add(1)
	}
	return h.why
}

// Done is the end of a read that Begin has registered: it reads nothing any more.
func (h *Hold) Done() { h.reads.Done() }

// Ended is closed when reads must end; Reason says why.
func (h *Hold) Ended() <-chan struct{} { return h.ended }

// Reason is why there can be no more reads, nil while there can.
func (h *Hold) Reason() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.why
}

// Address is the path of the owner's socket.
func (h *Hold) Address() string { return h.address }

// Close ends reads that run, and returns when all that the link held is given up.
func (h *Hold) Close() {
	h.end(fmt.Errorf("link: %w", transfer.ErrClosed))
	h.mu.Lock()
	if h.conn != nil {
		hurry(h.conn.conn)
	}
	h.mu.Unlock()
	<-h.gone
}

// end lets no further read begin, and tells those that run.
func (h *Hold) end(why error) {
	h.mu.Lock()
	if h.why == nil {
		h.why = why
		close(h.ended)
	}
	h.mu.Unlock()
	h.cancel(why)
}

// watch waits for the end of the connection, and then for the reads. Only then
// is the connection closed, by which the owner knows that nobody reads.
func (h *Hold) watch() {
	switch err := h.r.Watch(h.conn); {
	case errors.Is(err, ErrGarbage):
		h.end(fmt.Errorf("what the peer has sent: %w: link %w", err, transfer.ErrClosed))
	case err == nil, errors.Is(err, io.EOF):
		h.end(ErrGone)
	default: // Close has ended the wait, or the connection has broken
		h.end(fmt.Errorf("%w: %w", ErrGone, err))
	}
	h.reads.Wait()
	h.release()
}

func (h *Hold) release() {
	h.r.Release()
	if h.conn != nil {
		h.conn.close()
	}
	h.s.mu.Lock()
	delete(h.s.holds, h)
	h.s.mu.Unlock()
	close(h.gone)
}
