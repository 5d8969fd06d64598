package rendezvous

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"sync"
	"time"

	"github.com/kvferry/kvferry/transfer"
)

const (
	// maxConns bounds the connections by peers; half of them may be strangers,
	// who have not said hello.
	maxConns = 512
	// acceptPause is how long accepting waits after an error such as too many
	// open files.
	acceptPause = 100 * time.Millisecond
)

// served is one accepted connection.
type served struct {
	*net.UnixConn
	since    time.Time
	stranger bool // has not said hello; Server.mu guards it
}

// start begins to serve: one goroutine accepts, one a connection shakes hands and
// serves it, and one looks whether the socket can still be found.
func (s *Server) start() {
	l := s.listener
	s.work.Go(func() { s.accept(l) })
	s.work.Go(s.keep)
}

// keep looks after the socket: who cleans up old files, or removes the directory,
// must not cut readers off for the rest of this life.
func (s *Server) keep() {
	ours, err := s.dir.found(s.socket)
	look := time.NewTicker(s.o.lookEvery)
	defer look.Stop()
	for told := ""; ; {
		select {
		case <-s.closing:
			return
		case <-look.C:
		}
		if now, gone := s.dir.found(s.socket); err == nil && gone == nil && now == ours {
			continue
		}
		ours, err = s.bindAgain()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err == nil:
			told = ""
			s.o.Logger.Warn("the socket was removed, and is there again", "path", s.dir.address(s.socket))
		case told != err.Error():
			told = err.Error()
			s.o.Logger.Warn("the socket was removed, and new readers do not find it", "path", s.dir.address(s.socket), "err", err)
		}
	}
}

// bindAgain serves a new socket under the name of that which was removed. The
// connections that there are stand. It wraps net.ErrClosed if the server has closed.
func (s *Server) bindAgain() (inode, error) {
	if err := s.dir.reopen(); err != nil {
		return inode{}, err
	}
	l, err := s.dir.listen(s.socket)
	if err != nil {
		return inode{}, err
	}
	ours, err := s.dir.found(s.socket)
	s.mu.Lock()
	old, closed := s.listener, s.closed
	if !closed {
		s.listener = l
		s.work.Go(func() { s.accept(l) })
	}
	s.mu.Unlock()
	if closed { // and has looked for the socket before it was there
		return inode{}, errors.Join(net.ErrClosed, l.Close(), s.dir.remove(s.socket))
	}
	_ = old.Close() // ends its accept; nobody finds it
	return ours, err
}

func (s *Server) accept(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err == nil {
			s.admit(conn)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		s.o.Logger.Warn("accept", "err", err)
		select {
		case <-s.closing:
			return
		case <-time.After(acceptPause):
		}
	}
}

// admit starts serving conn, if there is room.
func (s *Server) admit(conn *net.UnixConn) {
	c := &served{UnixConn: conn, since: time.Now(), stranger: true}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.makeRoomLocked() {
		s.stats.refused.Add(1)
		s.work.Go(func() { s.turnAway(c) })
		return
	}
	s.conns[c] = struct{}{}
	s.strangers++
	s.work.Go(func() { s.serve(c) })
}

// makeRoomLocked reports whether there is room for one more. Where half of all
// are strangers the oldest of these makes room, so that strangers are in the way
// of strangers alone. Who has said hello is a link that may read at any moment.
func (s *Server) makeRoomLocked() bool {
	if len(s.conns) >= s.max && s.strangers == 0 {
		return false
	}
	if len(s.conns) < s.max && s.strangers < (s.max+1)/2 {
		return true
	}
	var oldest *served
	for c := range s.conns {
		if c.stranger && (oldest == nil || c.since.Before(oldest.since)) {
			oldest = c
		}
	}
	s.removeLocked(oldest)
	_ = oldest.Close() // it has said nothing yet
	s.stats.evicted.Add(1)
	return true
}

// removeLocked drops c, which may have made room before.
func (s *Server) removeLocked(c *served) {
	delete(s.conns, c)
	s.knowLocked(c)
}

// knowLocked counts c among the strangers no more.
func (s *Server) knowLocked(c *served) {
	if c.stranger {
		c.stranger = false
		s.strangers--
	}
}

// turnAway tells a reader that it is one too many.
func (s *Server) turnAway(c *served) {
	s.refuse(c, refusedFull)
	_ = c.Close() // all is said
}

// refuse says why. A new connection takes so few bytes at once; that it is gone
// is as good.
func (s *Server) refuse(c *served, why refusal) {
	_ = c.SetWriteDeadline(time.Now().Add(s.o.Limits.Dial))
	_, _ = c.Write(s.o.Protocol.Frame(kindRefusal, []byte{byte(why)}))
}

// serve is the life of one connection.
func (s *Server) serve(c *served) {
	defer func() {
		_ = c.Close() // all is said
		s.mu.Lock()
		s.removeLocked(c)
		s.mu.Unlock()
	}()
	conn, err := s.greet(c)
	if err == nil {
		err = s.o.Serve(conn)
	}
	switch log := s.o.Logger; {
	case errors.Is(err, ErrGarbage):
		s.stats.garbage.Add(1)
		log.Warn("end a connection that sent garbage", "err", err)
	case errors.Is(err, errUser):
		s.stats.strangers.Add(1)
		log.Warn("end a connection of another user", "err", err)
	case errors.Is(err, transfer.ErrIdentity):
		s.stats.strangers.Add(1)
		log.Info("end a connection meant for another life", "err", err)
	case errors.Is(err, ErrBusy):
		s.stats.refused.Add(1)
		s.refuse(c, refusedBusy)
		log.Info("refuse a reader", "err", err)
	default:
		log.Debug("connection ended", "err", err)
	}
}

// greet hears who it is, and lets in who means us.
func (s *Server) greet(c *served) (*Conn, error) {
	if err := c.SetDeadline(time.Now().Add(s.o.Limits.Dial)); err != nil {
		return nil, err
	}
	if err := checkUser(c.UnixConn); err != nil {
		s.refuse(c, refusedUser)
		return nil, err
	}
	k, body, err := s.o.Protocol.receive(c, maxHelloBody, nil)
	if err != nil {
		return nil, err
	}
	if k != kindHello {
		return nil, fmt.Errorf("%v, want a hello: %w", k, ErrGarbage)
	}
	h, err := parseHello(body)
	if err != nil {
		return nil, err
	}
	if h.owner != s.o.Life {
		s.refuse(c, refusedLife)
		return nil, fmt.Errorf("%s asks for %s: %w", h.reader, h.owner, transfer.ErrIdentity)
	}
	s.mu.Lock()
	s.knowLocked(c)
	s.mu.Unlock()
	return &Conn{
		p: s.o.Protocol, conn: c.UnixConn, peer: h.reader, self: s.o.Life, address: s.Address(), stall: s.o.Limits.Stall,
		settle: func() error { return s.settle(c) }, over: func() error { return nil }, release: func() {},
	}, nil
}

// settle takes the handshake's deadline from a connection, but not that by which
// a server that closes bounds the wait for its reader.
func (s *Server) settle(c *served) error {
	s.stats.served.Add(1)
	s.mu.Lock() // so that it does not undo the deadline of end
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	return c.SetDeadline(time.Time{})
}

// Close ends what was opened and what was accepted, and returns when every Hold
// is given up and every Serve has returned: when no reader that keeps to the
// protocol, and is not stopped, reads our memory. It gives readers the stall time
// to let go. It may be called twice.
func (s *Server) Close() error {
	var work sync.WaitGroup
	s.end(&work)
	work.Wait()
	s.work.Wait()
	return s.dir.close()
}

// end lets nothing more begin, and ends what there is; work are those holds.
func (s *Server) end(work *sync.WaitGroup) {
	s.mu.Lock()
	for h := range s.holds {
		work.Go(h.Close)
	}
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	listener := s.listener
	conns := make(map[*served]bool, len(s.conns)) // is it a stranger
	for c := range s.conns {
		conns[c] = c.stranger
	}
	s.mu.Unlock()
	close(s.closing)
	if err := s.dir.remove(s.socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.o.Logger.Warn("remove the socket", "path", s.dir.address(s.socket), "err", err)
	}
	_ = listener.Close() // what it could say nobody can use
	for c, stranger := range conns {
		if stranger {
			_ = c.Close() // it has been told nothing
			continue
		}
		_ = c.SetDeadline(time.Now().Add(s.o.Limits.Stall))
		_ = c.CloseWrite() // it may be gone already
	}
}
