package shm

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
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

// server gives this node's memory to readers: one goroutine accepts, one a
// connection shakes hands and then waits for its end, and one looks whether the
// socket can still be found.
type server struct {
	t       *Transport
	socket  string // the listener's name in the directory
	offer   welcome
	max     int
	closing chan struct{} // closed by close

	mu        sync.Mutex
	closed    bool
	listener  *net.UnixListener // another one after the socket was removed
	conns     map[*served]struct{}
	strangers int            // those of conns
	work      sync.WaitGroup // keep, accept, and every served
}

// served is one accepted connection.
type served struct {
	*net.UnixConn
	since    time.Time
	stranger bool // has not said hello; server.mu guards it
}

func newServer(t *Transport, l *net.UnixListener, socket string) *server {
	s := &server{
		t: t, listener: l, socket: socket, max: maxConns, closing: make(chan struct{}), conns: map[*served]struct{}{},
		offer: welcome{owner: t.local.Life, arenas: map[id.Rank]int64{}},
	}
	for r, a := range t.local.Arenas {
		s.offer.arenas[r] = a.Size()
	}
	return s
}

func (s *server) start(lookEvery time.Duration) {
	l := s.listener
	s.work.Go(func() { s.accept(l) })
	s.work.Go(func() { s.keep(lookEvery) })
}

// keep looks after the socket: who cleans up old files, or removes the directory,
// must not cut readers off for the rest of this life.
func (s *server) keep(lookEvery time.Duration) {
	ours, err := s.t.dir.found(s.socket)
	look := time.NewTicker(lookEvery)
	defer look.Stop()
	for told := ""; ; {
		select {
		case <-s.closing:
			return
		case <-look.C:
		}
		if now, gone := s.t.dir.found(s.socket); err == nil && gone == nil && now == ours {
			continue
		}
		ours, err = s.bindAgain()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err == nil:
			told = ""
			s.t.log.Warn("the socket was removed, and is there again", "path", s.t.dir.address(s.socket))
		case told != err.Error():
			told = err.Error()
			s.t.log.Warn("the socket was removed, and new readers do not find it", "path", s.t.dir.address(s.socket), "err", err)
		}
	}
}

// bindAgain serves a new socket under the name of that which was removed. The
// connections that there are stand. It wraps net.ErrClosed if the server has closed.
func (s *server) bindAgain() (inode, error) {
	if err := s.t.dir.reopen(); err != nil {
		return inode{}, err
	}
	l, err := s.t.dir.listen(s.socket)
	if err != nil {
		return inode{}, err
	}
	ours, err := s.t.dir.found(s.socket)
	s.mu.Lock()
	old, closed := s.listener, s.closed
	if !closed {
		s.listener = l
		s.work.Go(func() { s.accept(l) })
	}
	s.mu.Unlock()
	if closed { // and has looked for the socket before it was there
		return inode{}, errors.Join(net.ErrClosed, l.Close(), s.t.dir.remove(s.socket))
	}
	_ = old.Close() // ends its accept; nobody finds it
	return ours, err
}

func (s *server) accept(l *net.UnixListener) {
	for {
		conn, err := l.AcceptUnix()
		if err == nil {
			s.admit(conn)
			continue
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
		s.t.log.Warn("accept", "err", err)
		select {
		case <-s.closing:
			return
		case <-time.After(acceptPause):
		}
	}
}

// admit starts serving conn, if there is room.
func (s *server) admit(conn *net.UnixConn) {
	c := &served{UnixConn: conn, since: time.Now(), stranger: true}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || !s.makeRoomLocked() {
		s.t.stats.refused.Add(1)
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
func (s *server) makeRoomLocked() bool {
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
	s.t.stats.evicted.Add(1)
	return true
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

// turnAway tells a reader that it is one too many.
func (s *server) turnAway(c *served) {
	s.refuse(c, refusedFull)
	_ = c.Close() // all is said
}

// refuse says why. A new connection takes so few bytes at once; that it is gone
// is as good.
func (s *server) refuse(c *served, why refusal) {
	_ = c.SetWriteDeadline(time.Now().Add(s.t.limits.Dial))
	_, _ = c.Write(frame(kindRefusal, []byte{byte(why)}))
}

// serve is the life of one connection.
func (s *server) serve(c *served) {
	defer func() {
		_ = c.Close() // all is said
		s.mu.Lock()
		s.removeLocked(c)
		s.mu.Unlock()
	}()
	err := s.welcome(c)
	if err == nil {
		s.t.stats.served.Add(1)
		err = s.stand(c)
	}
	switch {
	case errors.Is(err, errGarbage):
		s.t.stats.garbage.Add(1)
		s.t.log.Warn("end a connection that sent garbage", "err", err)
	case errors.Is(err, errUser):
		s.t.stats.strangers.Add(1)
		s.t.log.Warn("end a connection of another user", "err", err)
	case errors.Is(err, transfer.ErrIdentity):
		s.t.stats.strangers.Add(1)
		s.t.log.Info("end a connection meant for another life", "err", err)
	default:
		s.t.log.Debug("connection ended", "err", err)
	}
}

// welcome shakes hands and hands over what may be read.
func (s *server) welcome(c *served) error {
	if err := c.SetDeadline(time.Now().Add(s.t.limits.Dial)); err != nil {
		return err
	}
	if err := checkUser(c.UnixConn); err != nil {
		s.refuse(c, refusedUser)
		return err
	}
	k, body, err := receive(c, maxHelloBody)
	if err != nil {
		return err
	}
	if k != kindHello {
		return fmt.Errorf("%v, want a hello: %w", k, errGarbage)
	}
	h, err := parseHello(body)
	if err != nil {
		return err
	}
	if h.owner != s.t.local.Life {
		s.refuse(c, refusedLife)
		return fmt.Errorf("%s asks for %s: %w", h.reader, h.owner, transfer.ErrIdentity)
	}
	s.mu.Lock()
	s.knowLocked(c)
	s.mu.Unlock()
	if _, err := c.Write(s.offer.encode()); err != nil {
		return err
	}
	if err := send(c, sealTable, s.t.local.Seals.Region()); err != nil {
		return err
	}
	for _, r := range s.offer.ranks() {
		region, ok := s.t.local.Arenas[r].(*memory.Region)
		if !ok {
			return fmt.Errorf("arena of rank %d is not in host memory", int(r))
		}
		if err := send(c, int(r), region); err != nil {
			return err
		}
	}
	return nil
}

// send hands a region over as a file that is open for reading alone: a reader's
// mistake must not write into our arena.
func send(c *served, rank int, r *memory.Region) error {
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", r.File().Fd()))
	if err != nil {
		return fmt.Errorf("open the memory of rank %d for reading: %w", rank, err)
	}
	err = memory.SendFile(c.UnixConn, fileFrame(rank), f)
	return errors.Join(err, f.Close())
}

// stand waits until the reader hangs up, which it does when it reads no more.
// A server that closes says so and bounds the wait.
func (s *server) stand(c *served) error {
	// Under the lock, so that it does not undo the deadline of close.
	s.mu.Lock()
	closed := s.closed
	if !closed {
		_ = c.SetDeadline(time.Time{}) // fails only on a closed connection, as the read will
	}
	s.mu.Unlock()
	if closed {
		return net.ErrClosed
	}
	var one [1]byte
	switch n, err := c.Read(one[:]); {
	case n > 0:
		return fmt.Errorf("%d bytes behind the hello: %w", n, errGarbage)
	case errors.Is(err, io.EOF):
		return nil
	default:
		return err
	}
}

func (s *server) accepted() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.conns)
}

// close ends every connection and returns when no reader that keeps to the
// protocol, and is not stopped, reads the arenas.
func (s *server) close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		s.work.Wait()
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
	if err := s.t.dir.remove(s.socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.t.log.Warn("remove the socket", "path", s.t.dir.address(s.socket), "err", err)
	}
	_ = listener.Close() // what it could say nobody can use
	for c, stranger := range conns {
		if stranger {
			_ = c.Close() // it has been told nothing
			continue
		}
		_ = c.SetDeadline(time.Now().Add(s.t.limits.Stall))
		_ = c.CloseWrite() // it may be gone already
	}
	s.work.Wait()
}
