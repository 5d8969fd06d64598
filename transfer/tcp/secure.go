package tcp

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"sync"

	"github.com/kvferry/kvferry/internal/identity"
)

const (
	recordBytes = 16 << 10               // the most that a TLS record carries
	aheadBytes  = 8 * (recordBytes + 22) // records that one system call sends, as they are on the wire
	shakeBytes  = 64 << 10               // what a peer may send before its certificate has been checked
)

// secure puts TLS between the halves of w and its socket; side is [tls.Client]
// or [tls.Server]. It shakes hands, and so returns only when both certificates
// have been checked, or when the connection is aborted or meets its deadline.
func (w *wire) secure(side func(net.Conn, *tls.Config) *tls.Conn, config *tls.Config) (tls.ConnectionState, error) {
	b := &base{Conn: w.tcp, recv: w.recv, allowed: shakeBytes, out: half{by: w.send}}
	conn := side(b, config)
	if err := conn.Handshake(); err != nil { //nolint:noctx // ends as every call on a wire does: with its abort or its deadline
		return tls.ConnectionState{}, handshakeError(err)
	}
	b.established()
	w.in.by, w.out.by = &opener{conn: conn}, &sealer{conn: conn, base: b, record: make([]byte, recordBytes)}
	return conn.ConnectionState(), nil
}

// largeRecords is c for moving pages: it has no small records at the start of a
// connection.
func largeRecords(c *tls.Config) *tls.Config {
	c = c.Clone()
	c.DynamicRecordSizingDisabled = true
	return c
}

// handshakeError is what the failure of a handshake says of the other side:
// that it is refused ([identity.ErrRefused]), that it speaks something else
// ([errGarbage]), or nothing, where the connection broke.
func handshakeError(err error) error {
	err = identity.Explain(err)
	begin, other := errors.AsType[tls.RecordHeaderError](err)
	op, isOp := errors.AsType[*net.OpError](err)
	switch {
	case errors.Is(err, identity.ErrRefused), errors.Is(err, errGarbage), broken(err):
		return err
	case errors.Is(err, io.EOF):
		return fmt.Errorf("%w: %w", err, io.ErrUnexpectedEOF)
	case other && string(begin.RecordHeader[:len(magic)]) == magic: // a reader without a certificate
		return fmt.Errorf("%w: %w", err, identity.ErrRefused)
	case other, isOp && op.Op == "local error": // the latter is an alert of ours: this is no TLS
		return fmt.Errorf("%w: %w", err, errGarbage)
	case isOp: // an alert of theirs, a deadline, or the abort
		return err
	default: // no certificate, an older TLS, or messages that lead nowhere
		return fmt.Errorf("%w: %w", err, identity.ErrRefused)
	}
}

// isAlert reports whether err is what the other side said before it hung up.
func isAlert(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && op.Op == "remote error"
}

// base is the socket below TLS, as crypto/tls sees it.
type base struct {
	net.Conn // for all but reading and writing

	recv    *direction
	in      vector
	allowed int64 // bytes that may still be read

	mu    sync.Mutex // a read writes, too, where the peer asks for new keys
	out   half
	ahead []byte // records that are not sent yet
	keeps bool   // records are kept until there are enough, or flush
}

// Read is [net.Conn.Read]. It makes one system call.
func (b *base) Read(p []byte) (int, error) {
	b.in.reset()
	b.in.add(p)
	n, err := b.recv.move(&b.in)
	if err != nil {
		return 0, err
	}
	if n == 0 {
		return 0, io.EOF
	}
	if b.allowed -= int64(n); b.allowed < 0 {
		return 0, fmt.Errorf("more than %d bytes before its certificate was checked: %w", shakeBytes, errGarbage)
	}
	return n, nil
}

// Write is [net.Conn.Write]. What it has taken is copied.
func (b *base) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.ahead)+len(p) > aheadBytes {
		if err := b.flushLocked(); err != nil {
			return 0, err
		}
	}
	b.ahead = append(b.ahead, p...)
	if !b.keeps {
		if err := b.flushLocked(); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

// flush sends what was kept.
func (b *base) flush() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.flushLocked()
}

func (b *base) flushLocked() error {
	err := b.out.one(b.ahead)
	b.ahead = b.ahead[:0]
	return err
}

// established: the handshake is over.
func (b *base) established() {
	b.allowed = math.MaxInt64
	b.mu.Lock()
	b.keeps = true
	b.mu.Unlock()
}

// opener receives by TLS: a record is decrypted in a buffer of crypto/tls and
// copied from there, by whoever calls move.
type opener struct{ conn *tls.Conn }

func (o *opener) move(v *vector) (int, error) {
	n, err := o.conn.Read(v.first())
	if n > 0 || errors.Is(err, io.EOF) { // an error that comes with bytes comes again
		return n, nil
	}
	return 0, err
}

// sealer sends by TLS. Large stretches are encrypted from where they are, small
// ones are gathered first, so that nearly every record is full.
type sealer struct {
	conn   *tls.Conn
	base   *base
	record []byte
}

func (s *sealer) move(v *vector) (int, error) {
	b := v.first()
	if whole := len(b) / recordBytes * recordBytes; whole > 0 {
		b = b[:whole]
	} else {
		b = s.record[:v.gather(s.record)]
	}
	n, err := s.conn.Write(b)
	if err == nil && int64(n) == v.left {
		err = s.base.flush()
	}
	return n, err
}
