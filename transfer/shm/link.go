package shm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

var (
	errTotal = fmt.Errorf("the read took longer than its total time: %w", transfer.ErrStalled)
	errGone  = fmt.Errorf("the peer has hung up, since its transport was closed or its process has ended: link %w", transfer.ErrClosed)
)

// maxHandshake bounds the handshake beside the dial time: it crosses no network.
const maxHandshake = 2 * time.Second

// link is the memory of one life of one peer, mapped, and the connection that
// says that it lives.
type link struct {
	t       *Transport
	peer    transfer.Peer
	address string
	ended   chan struct{} // closed when nothing may be read any more; why says why
	gone    chan struct{} // closed when nothing is mapped any more

	// Set before the link is handed out; unmapped once ended is closed and no
	// read runs.
	conn   *net.UnixConn
	arenas [id.MaxRanks]stretch
	seals  *memory.SealTable

	mu    sync.Mutex
	why   error
	reads sync.WaitGroup // Add under mu, and only while why is nil
}

// stretch is what both sides have of one rank: their bytes, and ours.
type stretch struct {
	mapped        *memory.Region // nil: the rank can't be read
	remote, local []byte
}

// open connects, maps, and starts to watch the connection. With an error
// nothing of the link is left.
func (l *link) open(ctx context.Context, socket string) error {
	err := l.connect(ctx, socket)
	if why := l.reason(); why != nil {
		err = why // closed meanwhile
	}
	if err != nil {
		l.end(err)
		l.unmap()
		return err
	}
	go l.watch()
	return nil
}

// end lets no further read begin, and tells those that run.
func (l *link) end(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why == nil {
		l.why = why
		close(l.ended)
	}
}

// begin registers a read, or says why there can be none.
func (l *link) begin() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.why == nil {
		l.reads.Add(1)
	}
	return l.why
}

// reason is why the link has ended.
func (l *link) reason() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.why
}

// watch waits for the end of the connection, and then for the reads. Only then
// is the connection closed, by which the owner knows that nobody reads.
func (l *link) watch() {
	var one [1]byte
	switch n, err := l.conn.Read(one[:]); {
	case n > 0:
		l.end(fmt.Errorf("the peer has sent something behind its files: %w: link %w", errGarbage, transfer.ErrClosed))
	case errors.Is(err, io.EOF):
		l.end(errGone)
	default: // Close has ended the wait, or the connection has broken
		l.end(fmt.Errorf("%w: %w", errGone, err))
	}
	l.reads.Wait()
	l.unmap()
}

// unmap drops all that the link holds.
func (l *link) unmap() {
	for i := range l.arenas {
		if m := l.arenas[i].mapped; m != nil {
			l.close(m.Close)
			l.arenas[i] = stretch{}
		}
	}
	if l.seals != nil {
		l.close(l.seals.Close)
	}
	if l.conn != nil {
		_ = l.conn.Close() // nothing is lost with it
	}
	l.t.forget(l)
	close(l.gone)
}

func (l *link) close(what func() error) {
	if err := what(); err != nil {
		l.t.log.Error("unmap the memory of a peer", "peer", l.peer.Life.String(), "err", err)
	}
}

// Close is [transfer.Link.Close].
func (l *link) Close() error {
	l.end(fmt.Errorf("link: %w", transfer.ErrClosed))
	l.mu.Lock()
	if l.conn != nil {
		hurry(l.conn)
	}
	l.mu.Unlock()
	<-l.gone
	return nil
}

// connect shakes hands and maps what it brings.
func (l *link) connect(ctx context.Context, socket string) error {
	if ctx.Err() != nil {
		return transfer.Reason(ctx)
	}
	bound := min(l.t.limits.Dial, maxHandshake)
	dialling, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("the peer does not answer within %v: %w", bound, transfer.ErrStalled))
	defer cancel()
	conn, err := l.t.dir.dial(dialling, socket)
	if err != nil {
		return l.unreached(dialling, err)
	}
	l.mu.Lock()
	l.conn = conn
	l.mu.Unlock()
	if why := l.reason(); why != nil {
		return why // Close may not have seen the connection
	}
	stop := context.AfterFunc(dialling, func() { hurry(conn) })
	w, files, err := l.shake(conn)
	defer files.close()
	if !stop() { // also if it is just over: the connection has a deadline now
		err = transfer.Reason(dialling)
	}
	if err != nil {
		return fmt.Errorf("shake hands at %s: %w", l.address, err)
	}
	if err := l.attach(ctx, w, files); err != nil {
		return fmt.Errorf("map the memory that %s gave: %w", l.address, err)
	}
	return nil
}

// hurry wakes whoever waits for the connection.
func hurry(c *net.UnixConn) { _ = c.SetDeadline(time.Unix(1, 0)) }

// unreached says what a failure to connect means.
func (l *link) unreached(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("there is no socket %s: the two nodes do not share a rendezvous directory (set transfer.rendezvous to the same one, and mount it into both containers), or the peer has ended: %w", l.address, transfer.ErrUnavailable)
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		<-ctx.Done() // its deadline, which the dialer keeps by a clock of its own
	}
	if ctx.Err() != nil {
		err = transfer.Reason(ctx)
	}
	return fmt.Errorf("connect to %s: %w", l.address, err)
}

// received are the files of a handshake, by rank.
type received map[int]*os.File

// take gives a file away.
func (r received) take(rank int) *os.File {
	f := r[rank]
	delete(r, rank)
	return f
}

func (r received) close() {
	for _, f := range r {
		_ = f.Close() // nobody has used it
	}
}

// shake says hello, checks who answers, and receives the files.
func (l *link) shake(conn *net.UnixConn) (welcome, received, error) {
	files := received{}
	if err := checkUser(conn); err != nil {
		return welcome{}, files, fmt.Errorf("%w: %w", transfer.ErrUnavailable, err)
	}
	// An owner that refuses may have hung up before it has heard us: it says why.
	_, said := conn.Write(hello{owner: l.peer.Life, reader: l.t.local.Life}.encode())
	k, body, err := receive(conn, maxAnswerBody)
	switch {
	case err != nil:
		if said != nil {
			err = said
		}
		return welcome{}, files, err
	case k == kindRefusal:
		why, err := parseRefusal(body)
		if err == nil {
			err = why.err()
		}
		return welcome{}, files, err
	case k != kindWelcome:
		return welcome{}, files, fmt.Errorf("%v, want a welcome: %w", k, errGarbage)
	}
	w, err := parseWelcome(body)
	if err != nil {
		return welcome{}, files, err
	}
	if w.owner != l.peer.Life {
		return welcome{}, files, fmt.Errorf("%s answers, want %s: %w", w.owner, l.peer.Life, transfer.ErrIdentity)
	}
	order := []int{sealTable}
	for _, r := range w.ranks() {
		order = append(order, int(r))
	}
	for _, rank := range order {
		var payload [fileBytes]byte
		n, f, err := memory.ReceiveFile(conn, payload[:])
		if err != nil {
			return welcome{}, files, err
		}
		files[rank] = f
		if err := parseFile(payload[:n], rank); err != nil {
			return welcome{}, files, err
		}
	}
	return w, files, nil
}

// attach maps the seal table and the arenas of the ranks that both sides have.
func (l *link) attach(ctx context.Context, w welcome, files received) error {
	var err error
	if l.seals, err = memory.MapSealTable(files.take(sealTable), false); err != nil {
		return err
	}
	for rank, want := range l.peer.ArenaBytes {
		local := l.t.local.Arenas[rank]
		ours, _ := transfer.InHost(local)
		if local == nil {
			continue
		}
		if ctx.Err() != nil {
			return transfer.Reason(ctx)
		}
		if have := w.arenas[rank]; have < want {
			return fmt.Errorf("rank %d has %d bytes there, the peer said %d before: %w", int(rank), have, want, errGarbage)
		}
		region, err := memory.Map(files.take(int(rank)), want, false)
		if err != nil {
			return fmt.Errorf("rank %d: %w", int(rank), err)
		}
		l.arenas[rank] = stretch{mapped: region, remote: region.Bytes(), local: ours}
	}
	return nil
}

var _ transfer.Link = (*link)(nil)
