package rendezvous

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// Conn is one connection between a reader and an owner that have named each
// other. Until Settle it has the deadline of the handshake. One goroutine at a
// time may receive; frames that several send do not mix.
type Conn struct {
	p       Protocol
	conn    *net.UnixConn
	peer    id.Life
	self    id.Life
	address string
	says    []byte
	stall   time.Duration
	settle  func() error // of the side that it is, as the next two
	over    func() error // why the handshake is, nil if it is not
	release func()       // what the handshake has
	room    []byte       // of the body that was received last
}

// Peer is the life at the other end, by its word; at a reader it is the one that
// was asked for.
func (c *Conn) Peer() id.Life { return c.peer }

// Address is the path of the owner's socket.
func (c *Conn) Address() string { return c.address }

// Says is what the protocol said in the welcome: a reader's alone.
func (c *Conn) Says() []byte { return c.says }

// Settle ends the handshake, and with it its deadline; it fails if that, or the
// context of Dial, has ended it.
func (c *Conn) Settle() error { return c.settle() }

// Send sends one frame. It waits no longer than the stall time. One that could not
// be sent whole ends the connection: Receive and Stand return.
func (c *Conn) Send(k Kind, body []byte) error {
	if len(body) > MaxBody {
		return fmt.Errorf("send %v of %d bytes, at most %d", k, len(body), MaxBody)
	}
	return c.write(c.p.Frame(k, body))
}

func (c *Conn) write(frame []byte) error {
	if err := c.conn.SetWriteDeadline(time.Now().Add(c.stall)); err != nil {
		return err
	}
	_, err := c.conn.Write(frame)
	if err != nil {
		hurry(c.conn)
	}
	return err
}

// Receive takes one frame of at most limit bytes of body, and nothing behind it.
// The body is valid until the next Receive. It wraps [ErrGarbage] where what came
// is no frame; the end of the other side is [io.EOF].
func (c *Conn) Receive(limit int) (Kind, []byte, error) {
	k, body, err := c.p.receive(c.conn, limit, c.room)
	c.room = body
	return k, body, err
}

// Welcome answers the hello; says is what the protocol adds.
func (c *Conn) Welcome(says []byte) error {
	if len(says) > MaxWelcome {
		return fmt.Errorf("welcome with %d bytes, at most %d", len(says), MaxWelcome)
	}
	_, err := c.conn.Write(c.p.Welcome(c.self, says))
	return err
}

// SendFile hands a duplicate of f's descriptor over.
func (c *Conn) SendFile(label uint16, f *os.File) error {
	return memory.SendFile(c.conn, c.p.File(label), f)
}

// SendForReading hands a file over that is open for reading alone, whatever f is: a
// reader's mistake must not write into it.
func (c *Conn) SendForReading(label uint16, f *os.File) error {
	r, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil {
		return fmt.Errorf("open the file of label %d for reading: %w", label, err)
	}
	return errors.Join(c.SendFile(label, r), r.Close())
}

// ReceiveFile receives the file of this label, which becomes the caller's.
func (c *Conn) ReceiveFile(label uint16) (*os.File, error) {
	var payload [fileBytes]byte
	n, f, err := memory.ReceiveFile(c.conn, payload[:])
	if err != nil {
		if over := c.over(); over != nil {
			err = over
		}
		return nil, fmt.Errorf("shake hands at %s: %w", c.address, err)
	}
	if err := c.p.parseFile(payload[:n], label); err != nil {
		return nil, errors.Join(fmt.Errorf("shake hands at %s: %w", c.address, err), f.Close())
	}
	return f, nil
}

// Stand waits until the other side has hung up, and returns nil then. Whatever it
// says before is garbage.
func (c *Conn) Stand() error {
	var one [1]byte
	switch n, err := c.conn.Read(one[:]); {
	case n > 0:
		return fmt.Errorf("something was said where nothing may be: %w", ErrGarbage)
	case errors.Is(err, io.EOF):
		return nil
	default:
		return err
	}
}

// hurry wakes whoever waits for the connection, for good.
func hurry(c *net.UnixConn) { _ = c.SetDeadline(time.Unix(1, 0)) } // fails only on a closed connection

// close ends the connection: the other side takes it as the end of reading.
func (c *Conn) close() {
	c.release()
	_ = c.conn.Close() // nothing is lost with it
}
