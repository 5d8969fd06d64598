package rendezvous

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"github.com/kvferry/kvferry/transfer"
)

// dial connects to an owner, says hello to exactly this life, and takes its
// welcome; files follow. All until Conn.Settle has the dial time, and ends with
// ctx. It wraps [transfer.ErrUnavailable] where the peer cannot be met in this
// directory, and [transfer.ErrIdentity] where another life answers.
func (s *Server) dial(ctx context.Context, peer transfer.Peer) (*Conn, error) {
	if err := peer.Life.Node.Validate(); err != nil {
		return nil, err
	}
	d, err := parseDescriptor(s.o.Protocol, peer.Descriptor)
	if err != nil {
		return nil, err
	}
	if d.host != s.host {
		return nil, fmt.Errorf("the peer is on another host, or the host has been started anew: %w", transfer.ErrUnavailable)
	}
	if ctx.Err() != nil {
		return nil, transfer.Reason(ctx)
	}
	bound := s.o.Limits.Dial
	dialling, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("the peer does not answer within %v: %w", bound, transfer.ErrStalled))
	address := s.dir.address(d.socket)
	conn, err := s.dir.dial(dialling, d.socket)
	if err != nil {
		err = unreached(dialling, address, err)
		cancel()
		return nil, err
	}
	stop := context.AfterFunc(dialling, func() { hurry(conn) })
	c := &Conn{p: s.o.Protocol, conn: conn, peer: peer.Life, self: s.o.Life, address: address, stall: s.o.Limits.Stall}
	// Also if it is just over: the connection has a deadline then.
	c.settle = func() error {
		if !stop() {
			return fmt.Errorf("shake hands at %s: %w", address, transfer.Reason(dialling))
		}
		return nil
	}
	c.over = func() error {
		if dialling.Err() == nil {
			return nil
		}
		return transfer.Reason(dialling)
	}
	c.release = func() { stop(); cancel() }
	if err := c.shake(); err != nil {
		if over := c.over(); over != nil {
			err = over
		}
		c.close()
		return nil, fmt.Errorf("shake hands at %s: %w", address, err)
	}
	return c, nil
}

// unreached says what a failure to connect means.
func unreached(ctx context.Context, address string, err error) error {
	switch {
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("there is no socket %s: the two nodes do not share a rendezvous directory (set transfer.rendezvous to the same one, and mount it into both containers), or the peer has ended: %w", address, transfer.ErrUnavailable)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		<-ctx.Done() // its deadline, which the dialer keeps by a clock of its own
	}
	if ctx.Err() != nil {
		err = transfer.Reason(ctx)
	}
	return fmt.Errorf("connect to %s: %w", address, err)
}

// dial connects to a socket of the directory.
func (d *directory) dial(ctx context.Context, name string) (*net.UnixConn, error) {
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", d.at(name))
	if err != nil {
		return nil, err
	}
	return c.(*net.UnixConn), nil
}

// shake says hello, and checks who answers.
func (c *Conn) shake() error {
	if err := checkUser(c.conn); err != nil {
		return fmt.Errorf("%w: %w", transfer.ErrUnavailable, err)
	}
	// An owner that refuses may have hung up before it has heard us: it says why.
	_, said := c.conn.Write(hello{owner: c.peer, reader: c.self}.encode(c.p))
	k, body, err := c.Receive(MaxBody)
	switch {
	case err != nil && said != nil:
		return said
	case err != nil:
		return err
	case k == kindRefusal:
		why, err := parseRefusal(body)
		if err == nil {
			err = why.err()
		}
		return err
	case k != kindWelcome:
		return fmt.Errorf("%v, want a welcome: %w", k, ErrGarbage)
	}
	owner, says, err := cutLife(body)
	switch {
	case err != nil:
		return fmt.Errorf("owner of a welcome: %w", err)
	case owner != c.peer:
		return fmt.Errorf("%s answers, want %s: %w", owner, c.peer, transfer.ErrIdentity)
	}
	c.says, c.room = says, nil // the room is the caller's now
	return nil
}
