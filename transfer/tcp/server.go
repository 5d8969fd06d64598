package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/transfer"
)

// smallAnswer is up to where an answer is copied together with its verdict and
// sent by one call; many tiny copies would cost more as vectors than as bytes.
const smallAnswer = 32 << 10

// acceptPause is how long accepting waits after an error such as too many open
// files.
const acceptPause = 100 * time.Millisecond

// server gives this node's memory to readers: one goroutine accepts, one a
// connection serves one request after the other.
type server struct {
	t        *Transport
	listener *net.TCPListener
	tls      *tls.Config // nil: none
	offer    welcome
	idle     time.Duration
	max      int             // connections
	ctx      context.Context //nolint:containedctx // the server's own: ended by close
	end      context.CancelFunc

	mu        sync.Mutex
	closed    bool
	conns     map[*served]struct{}
	strangers int            // those of conns
	work      sync.WaitGroup // accept and every served
}

// served is one accepted connection.
type served struct {
	*wire
	from     string
	stranger bool         // has not said who it is; server.mu guards it
	waiting  atomic.Int64 // since when it waits for a request, unix ns; 0 while it works
	limit    time.Time    // end of the answer that is being sent
	untaken  int          // bytes that the reader had not taken when that was looked at last
	head     [headerBytes]byte
	body     []byte
	out      []byte // headers of an answer, or the whole of a small one
	request  request

	gathering *gathering // nil until an answer is staged
}

func newServed(w *wire, stall time.Duration) *served {
	c := &served{wire: w, from: w.tcp.RemoteAddr().String(), stranger: true}
	c.waiting.Store(time.Now().UnixNano())
	c.out = make([]byte, 0, 2*headerBytes)
	c.send.moved = func() { c.extend(stall) }
	c.send.late = func() bool { return c.takes(stall) }
	return c
}

func (s *server) accept() {
	defer s.work.Done()
	for {
		conn, err := s.listener.AcceptTCP()
		if err == nil {
			s.admit(conn)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		s.t.log.Warn("accept", "err", err)
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(acceptPause):
		}
	}
}

// admit starts serving conn, if there is room.
func (s *server) admit(conn *net.TCPConn) {
	w, err := newWire(conn)
	if err != nil {
		_ = conn.Close() // it is gone already
		return
	}
	c := newServed(w, s.t.limits.Stall)

	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.makeRoomLocked() {
		s.t.stats.refused.Add(1)
		w.abort()
		return
	}
	s.conns[c] = struct{}{}
	s.strangers++
	s.work.Add(1)
	go s.serve(c)
}

// makeRoomLocked reports whether there is room for one more. Where half of all are
// strangers, the oldest of these makes room, so that strangers are in the way
// of strangers alone, and a reader that does shake hands gets its turn. Where
// there are too many of all, it is the one that has waited longest for a
// request: its reader connects again when it needs to.
func (s *server) makeRoomLocked() bool {
	crowd := s.strangers >= (s.max+1)/2
	if !crowd && len(s.conns) < s.max {
		return true
	}
	oldest := s.longestWaitingLocked(crowd)
	if oldest == nil {
		return false
	}
	s.removeLocked(oldest)
	oldest.abort()
	s.t.stats.evicted.Add(1)
	return true
}

// longestWaitingLocked is nil if every connection is at work.
func (s *server) longestWaitingLocked(strangers bool) (oldest *served) {
	var since int64
	for c := range s.conns {
		if strangers && !c.stranger {
			continue
		}
		if w := c.waiting.Load(); w != 0 && (oldest == nil || w < since) {
			oldest, since = c, w
		}
	}
	return oldest
}

// removeLocked drops c, which may have made room before.
func (s *server) removeLocked(c *served) {
	delete(s.conns, c)
	s.knowLocked(c)
}

// knowLocked counts c among the strangers no more.
func (s *server) knowLocked(c *served) {
	if c.stranger {
		c.stranger = false
		s.strangers--
	}
}

// serve is the life of one connection.
func (s *server) serve(c *served) {
	defer s.work.Done()
	defer func() {
		c.abort()
		s.mu.Lock()
		s.removeLocked(c)
		s.mu.Unlock()
	}()
	err := s.welcome(c)
	for err == nil {
		err = s.answer(c)
	}
	switch {
	case errors.Is(err, identity.ErrRefused):
		s.t.stats.strangers.Add(1)
		s.t.stats.unproven.Add(1)
		s.t.log.Warn("end a connection that has not proved who it is", "peer", c.from, "err", err)
	case errors.Is(err, errGarbage):
		s.t.stats.garbage.Add(1)
		s.t.log.Warn("end a connection that sent garbage", "peer", c.from, "err", err)
	case errors.Is(err, transfer.ErrIdentity):
		s.t.stats.strangers.Add(1)
		s.t.log.Info("end a connection meant for another life", "peer", c.from, "err", err)
	default:
		s.t.log.Debug("connection ended", "peer", c.from, "err", err)
	}
}

// welcome shakes hands.
func (s *server) welcome(c *served) error {
	if err := c.tcp.SetDeadline(time.Now().Add(s.t.limits.Dial)); err != nil {
		return err
	}
	var peer tls.ConnectionState
	if s.tls != nil {
		var err error
		if peer, err = c.secure(tls.Server, s.tls); err != nil {
			return fmt.Errorf("check the reader's certificate: %w", err)
		}
	}
	head, err := s.header(c)
	if err != nil {
		return err
	}
	if head.kind != kindHello || head.length > maxHelloBody {
		return fmt.Errorf("%v of %d bytes, want a hello: %w", head.kind, head.length, errGarbage)
	}
	if err := s.readBody(c, head.length); err != nil {
		return err
	}
	h, err := parseHello(head, c.body)
	if err != nil {
		return err
	}
	if s.tls != nil {
		if err := s.t.identity.Check(peer, h.reader.Node); err != nil {
			return errors.Join(s.refuse(c, 0, verdictUnproven), fmt.Errorf("%s says hello: %w", h.reader, err))
		}
	}
	if h.owner != s.t.local.Life {
		return errors.Join(s.refuse(c, 0, verdictIdentity), fmt.Errorf("%s asks for %s: %w", h.reader, h.owner, transfer.ErrIdentity))
	}
	s.mu.Lock()
	s.knowLocked(c)
	s.mu.Unlock()
	c.out = appendWelcome(c.out[:0], s.offer)
	return c.write(c.out)
}

// answer waits for one request and answers it.
func (s *server) answer(c *served) error {
	c.waiting.Store(time.Now().UnixNano())
	if err := c.tcp.SetReadDeadline(time.Now().Add(s.idle)); err != nil {
		return err
	}
	head, err := s.header(c)
	if err != nil {
		return err
	}
	c.waiting.Store(0)
	// The rest of a request follows its header at once.
	if err := c.tcp.SetReadDeadline(time.Now().Add(s.t.limits.Stall)); err != nil {
		return err
	}
	if head.kind != kindRead || head.length > maxRequestBody {
		return fmt.Errorf("%v of %d bytes, want a read: %w", head.kind, head.length, errGarbage)
	}
	if err := s.readBody(c, head.length); err != nil {
		return err
	}
	if err := c.request.parse(head, c.body); err != nil {
		return err
	}

	r := &c.request
	c.begin(s.t.limits, r.bytes())
	switch {
	case head.owner != s.t.local.Life.Incarnation:
		return errors.Join(s.refuse(c, r.id, verdictIdentity), fmt.Errorf("read for incarnation %d: %w", head.owner, transfer.ErrIdentity))
	case !r.within(s.t.local.Arenas):
		s.t.stats.outside.Add(1)
		return s.refuse(c, r.id, verdictRange)
	case !transfer.Held(s.t.local.Seals, r.seals):
		s.t.stats.servedStale.Add(1)
		return s.refuse(c, r.id, verdictStale)
	}
	if s.t.staging != nil && len(r.copies) > 0 {
		return s.sendStaged(c)
	}
	if r.bytes() <= smallAnswer {
		return s.sendSmall(c)
	}
	return s.send(c)
}

// send writes the bytes straight from the arenas, then looks at the seal words.
func (s *server) send(c *served) error {
	r := &c.request
	n := r.bytes()
	v := &c.wire.out.v
	v.reset()
	c.out = appendHeader(c.out[:0], s.data(r.id, n))
	v.add(c.out)
	for _, cp := range r.copies {
		v.add(s.stretch(cp))
	}
	if err := c.wire.out.all(); err != nil {
		return err
	}
	// writev has returned: the kernel has copied every byte out.
	verdict := s.verdict(r, n)
	c.out = appendHeader(c.out[:0], header{kind: kindVerdict, owner: s.t.local.Life.Incarnation, request: r.id, aux: uint32(verdict)})
	return c.write(c.out)
}

// sendSmall copies the bytes out first, so that bytes and verdict are one write.
func (s *server) sendSmall(c *served) error {
	r := &c.request
	n := r.bytes()
	c.out = appendHeader(c.out[:0], s.data(r.id, n))
	for _, cp := range r.copies {
		c.out = append(c.out, s.stretch(cp)...)
	}
	verdict := s.verdict(r, n)
	if verdict != verdictHeld { // then nobody needs to see them
		return s.refuse(c, r.id, verdict)
	}
	c.out = appendHeader(c.out, header{kind: kindVerdict, owner: s.t.local.Life.Incarnation, request: r.id, aux: uint32(verdict)})
	return c.write(c.out)
}

// verdict looks at the seal words after the bytes were copied out.
func (s *server) verdict(r *request, n int64) verdict {
	s.t.stats.served.Add(1)
	s.t.stats.servedBytes.Add(uint64(n))
	if transfer.Held(s.t.local.Seals, r.seals) {
		return verdictHeld
	}
	s.t.stats.servedStale.Add(1)
	return verdictStale
}

func (s *server) stretch(c transfer.Copy) []byte {
	mem, _ := transfer.InHost(s.t.local.Arenas[c.Rank])
	return mem[c.Remote : c.Remote+c.Bytes]
}

func (s *server) data(request uint64, n int64) header {
	return header{kind: kindData, owner: s.t.local.Life.Incarnation, request: request, length: uint32(n)}
}

// refuse sends a verdict without bytes.
func (s *server) refuse(c *served, request uint64, v verdict) error {
	return c.write(appendHeader(c.out[:0], header{kind: kindVerdict, owner: s.t.local.Life.Incarnation, request: request, aux: uint32(v)}))
}

func (s *server) header(c *served) (header, error) {
	if err := c.in.one(c.head[:]); err != nil {
		return header{}, err
	}
	return parseHeader(c.head[:])
}

func (s *server) readBody(c *served, n uint32) error {
	if cap(c.body) < int(n) {
		c.body = make([]byte, n)
	}
	c.body = c.body[:n]
	return c.in.one(c.body)
}

// begin sets the limits of one answer: the reader must take a byte every stall
// time, and all within the total time, or it loses the connection.
func (c *served) begin(limits transfer.Limits, bytes int64) {
	c.limit = time.Now().Add(limits.Total(bytes))
	c.extend(limits.Stall)
}

func (c *served) extend(stall time.Duration) {
	if c.limit.IsZero() { // the handshake, which has its own
		return
	}
	at := time.Now().Add(stall)
	if at.After(c.limit) {
		at = c.limit
	}
	c.untaken = c.unacknowledged()
	_ = c.tcp.SetWriteDeadline(at) // fails only on a closed connection, as the write will
}

// takes reports whether the reader has taken a byte since that was looked at
// last, and gives it more time if so. A full buffer can be written to again only
// when a good part of it is free: what is taken slowly shows much earlier.
func (c *served) takes(stall time.Duration) bool {
	if c.unacknowledged() >= c.untaken || !time.Now().Before(c.limit) {
		return false
	}
	c.extend(stall)
	return true
}

func (c *served) write(b []byte) error { return c.wire.out.one(b) }

// close ends every connection and returns when nothing reads the arenas.
func (s *server) close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.work.Wait()
		return
	}
	s.closed = true
	s.end()
	_ = s.listener.Close() // what it could say nobody can use
	for c := range s.conns {
		c.abort()
	}
	s.mu.Unlock()
	s.work.Wait()
}
