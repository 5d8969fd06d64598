package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/identity"
)

const (
	// What memberlist may read from one stream, and from all together, if nobody
	// proves a name: it collects the whole ciphertext before it can tell friend
	// from stranger, and takes up to three times as much memory for it.
	streamBytes  = 2 << 20
	streamsBytes = 3 << 20
	// What a caller may take to prove its name, and send when it has.
	shakeBytes  = 64 << 10
	shakeMax    = time.Second
	provenBytes = 16 << 20
	// readBytes is what is read at once: as much as a TLS record.
	readBytes = 16 << 10
	// cutPause is how long a stream that is too long keeps its place: a flood of
	// them would leave garbage faster than it is collected.
	cutPause = 200 * time.Millisecond

	// What a stream begins with that one side takes for TLS and the other does
	// not. memberlist's begin with a label or a small number.
	tlsAlert, tlsHandshake = 0x15, 0x16
)

var (
	errStreamTooLong = errors.New("stream is too long")
	// errStranger is written by memberlist to its log for every stream that was
	// refused here; the bridge leaves out the line.
	errStranger = errors.New("stream of a stranger")
)

// stream is a connection that is counted and bounded. With TLS the handshake of
// an accepted one is made by the first read, on memberlist's goroutine for it.
type stream struct {
	net.Conn          // TLS over what is counted, or that
	raw      net.Conn // the connection itself
	t        *transport
	tls      *tls.Conn // nil: plain
	inbound  bool
	begun    bool // something was read by memberlist, whose reads of one stream come from one goroutine
	read     atomic.Int64
	shaken   atomic.Bool // or there is no TLS
	closed   atomic.Bool
}

// meter is the connection under a stream.
type meter struct {
	net.Conn
	s *stream
}

// track makes a stream of a connection, over TLS if there is a configuration.
func (t *transport) track(conn net.Conn, config *tls.Config, inbound bool) (*stream, error) {
	s := &stream{raw: conn, t: t, inbound: inbound}
	s.Conn = meter{conn, s}
	switch {
	case config == nil:
		s.shaken.Store(true)
	case inbound:
		s.tls = tls.Server(s.Conn, config)
		s.Conn = s.tls
	default:
		s.tls = tls.Client(s.Conn, config)
		s.Conn = s.tls
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.done.Err() != nil {
		conn.Close()
		return nil, net.ErrClosed
	}
	t.open[s] = struct{}{}
	if inbound {
		t.inbound.Add(1)
	}
	return s, nil
}

// shake makes the handshake. The error says what is behind it.
func (s *stream) shake(ctx context.Context) error {
	err := s.tls.HandshakeContext(ctx)
	if err == nil {
		s.shaken.Store(true)
		return nil
	}
	if s.t.done.Err() != nil || s.read.Load() == 0 { // we close, or a probe of the port, or nobody there
		return identity.Explain(err)
	}
	if slow, ok := errors.AsType[net.Error](err); ok && slow.Timeout() {
		s.t.count.streams.Add(1)
		return err
	}
	if _, plain := errors.AsType[tls.RecordHeaderError](err); plain && s.inbound {
		_, _ = s.raw.Write([]byte{tlsAlert, 3, 1, 0, 2, 2, 70}) // so that the other side can tell, too: a fatal alert about the version
	}
	err = identity.Explain(err)
	s.refuse(err)
	return err
}

// refuse counts a stranger, and tells of some of them.
func (s *stream) refuse(why error) {
	s.t.count.strangers.Add(1)
	hidden, ok := s.t.strangers.pass(time.Now(), 1, troubleEvery)
	switch {
	case !ok:
	case s.inbound:
		s.t.log.Warn("refused who called the gossip port", "address", s.RemoteAddr(), "hidden", hidden, "err", why)
	default:
		s.t.log.Warn("gossip port that was called is not a member's", "address", s.RemoteAddr(), "hidden", hidden, "err", why)
	}
}

func (s *stream) Read(b []byte) (int, error) {
	if !s.shaken.Load() {
		ctx, cancel := context.WithTimeout(s.t.done, shakeMax)
		err := s.shake(ctx)
		cancel()
		if err != nil {
			return 0, errStranger
		}
	}
	n, err := s.Conn.Read(b)
	if s.begun {
		return n, err
	}
	if n > 0 {
		s.begun = true
	}
	switch {
	case s.tls != nil && s.inbound && isAboutKeys(b[:n]) && s.t.reply != nil:
		if reply := s.t.reply(b[:n]); reply != nil {
			_, _ = s.Conn.Write(reply) // who does not get it asks again
		}
		return 0, errKeys
	case s.tls != nil && !s.inbound && err != nil: // the other side may have refused our certificate
		err = identity.Explain(err)
	case s.tls == nil && s.inbound && n > 0 && b[0] == tlsHandshake:
		s.refuse(errors.New("it speaks TLS: set security.certificate, key, and ca on all nodes or on none"))
		return 0, errStranger
	case s.tls == nil && !s.inbound && n > 0 && b[0] == tlsAlert:
		return 0, errors.New("the other side speaks TLS: set security.certificate, key, and ca on all nodes or on none")
	}
	return n, err
}

func (s *stream) Write(b []byte) (int, error) {
	n, err := s.Conn.Write(b)
	if s.t.encrypts { // the label too, but we need no more than a bound
		s.t.count.keyPackets.Add(1)
	}
	if err != nil && s.tls != nil && !s.inbound && !s.begun {
		// Who dials with TLS 1.3 hears last that it was refused, and why.
		if _, cause := s.Read(make([]byte, 1)); cause != nil && !errors.Is(cause, io.EOF) {
			err = fmt.Errorf("%w: %w", err, cause)
		}
	}
	if err != nil && !s.inbound {
		s.Close() // memberlist does not, if it cannot write the label
	}
	return n, err
}

// Read reads a little at a time, and no more than may be held: the buffers that
// memberlist offers grow with what it has.
func (m meter) Read(b []byte) (int, error) {
	s := m.s
	b = b[:min(len(b), readBytes)]
	plain := s.tls == nil
	most := int64(streamBytes)
	switch {
	case plain:
	case s.shaken.Load():
		most = provenBytes
	default:
		most = shakeBytes
	}
	if s.read.Load() >= most || plain && !s.t.hold(len(b)) {
		s.t.count.streams.Add(1)
		s.t.pause(cutPause)
		return 0, errStreamTooLong
	}
	n, err := m.Conn.Read(b)
	s.t.count.bytesIn.Add(uint64(n))
	s.read.Add(int64(n))
	if plain {
		s.t.held.Add(int64(n - len(b)))
	}
	return n, err
}

// hold says whether plain streams may hold so many bytes more; then they do.
func (t *transport) hold(n int) bool {
	if t.held.Add(int64(n)) <= streamsBytes {
		return true
	}
	t.held.Add(-int64(n))
	return false
}

func (m meter) Write(b []byte) (int, error) {
	n, err := m.Conn.Write(b)
	m.s.t.count.bytesOut.Add(uint64(n))
	return n, err
}

// Close says goodbye first if there is TLS, which it waits for some seconds at
// most.
func (s *stream) Close() error {
	if s.closed.Swap(true) {
		return nil
	}
	err := s.Conn.Close()
	s.t.mu.Lock()
	delete(s.t.open, s)
	s.t.mu.Unlock()
	if s.tls == nil {
		s.t.held.Add(-s.read.Load())
	}
	if s.inbound {
		<-s.t.slots
		s.t.inbound.Done()
	}
	return err
}
