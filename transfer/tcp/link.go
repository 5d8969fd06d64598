package tcp

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/transfer"
)

var (
	errStall = fmt.Errorf("no byte landed for the stall time: %w", transfer.ErrStalled)
	errDial  = fmt.Errorf("no answer within the dial time: %w", transfer.ErrStalled)
)

// link holds a small pool of connections to one life of one peer. A read has a
// connection for itself, so that ending it (which is how a read is cancelled)
// disturbs no other.
type link struct {
	t         *Transport
	peer      transfer.Peer
	addresses []netip.AddrPort
	slots     chan struct{} // one a connection in use, Options.LinkConns

	mu     sync.Mutex
	closed bool
	idle   []*dialled
	reads  map[*running]struct{}
	work   sync.WaitGroup // reads
}

// running is one Read, waiting included; cancel ends it.
type running struct{ cancel context.CancelCauseFunc }

// reading is one attempt of a Read, which its lanes share.
type reading struct {
	seals  []transfer.Seal
	todo   *todo
	stall  *time.Timer
	cancel context.CancelCauseFunc

	mu     sync.Mutex
	landed int64
	failed outcome // of the first lane that did, but for landed
	again  bool    // it failed since its connection, which had been idle, was dead
}

// fail ends the attempt, with its first error.
func (a *reading) fail(of outcome, again bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.failed.err == nil {
		a.failed, a.again = of, again
		a.cancel(of.err)
	}
}

// dialled is a connection whose owner has proved its life.
type dialled struct {
	*wire
	address string
	bounds  bounds
	next    uint64 // id of the next request
	scratch scratch
}

// Read is [transfer.Link.Read].
func (l *link) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	started := time.Now()
	r := outcome{}
	r.total, r.err = l.check(seals, copies)
	if r.err == nil {
		l.read(ctx, seals, copies, &r)
	}
	l.t.count(&r)
	if r.err == nil {
		return nil
	}
	return &transfer.Error{
		Transport: Name, Peer: l.peer.Life, Address: r.address,
		Done: r.landed, Total: r.total, Took: time.Since(started), Err: r.err,
	}
}

// outcome is what is said of one read.
type outcome struct {
	address string
	landed  int64
	total   int64
	err     error
}

// check refuses what lies outside, and what no connection can ask for, before
// anything is sent.
func (l *link) check(seals []transfer.Seal, copies []transfer.Copy) (total int64, err error) {
	if total, err = transfer.Check(seals, copies, l.sizes); err != nil {
		return total, err
	}
	if len(seals) > maxSeals {
		return total, fmt.Errorf("read under %d seals, want 1 to %d", len(seals), maxSeals)
	}
	for _, s := range seals {
		if s.Value == 0 {
			return total, fmt.Errorf("seal word %d with the value 0, which is never held: %w", s.Index, transfer.ErrStale)
		}
	}
	return total, nil
}

// sizes are those of a rank's arenas there and here.
func (l *link) sizes(rank id.Rank) (remote, local int64, ok bool) {
	remote, known := l.peer.ArenaBytes[rank]
	here := l.t.local.Arenas[rank]
	if !known || here == nil {
		return 0, 0, false
	}
	return remote, here.Size(), true
}

// read waits for a connection and reads over it, and over more, its lanes, if it
// is large and they are free.
func (l *link) read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy, r *outcome) {
	ctx, end, err := l.begin(ctx)
	if err != nil {
		r.err = err
		return
	}
	defer end()
	lanes, err := l.acquire(ctx, r.total)
	if err != nil {
		r.err = err
		return
	}
	defer l.release(lanes)
	if l.attempt(ctx, seals, copies, lanes, r) {
		// The owner had ended an idle connection, and may have ended others.
		l.drop()
		l.attempt(ctx, seals, copies, lanes, r)
	}
}

// acquire takes a slot, for which it waits, and those of more lanes that are free.
func (l *link) acquire(ctx context.Context, bytes int64) (lanes int, err error) {
	select {
	case l.slots <- struct{}{}:
	case <-ctx.Done():
		return 0, fmt.Errorf("wait for a connection: %w", transfer.Reason(ctx))
	}
	want := min(int64(l.t.lanes), bytes/laneBytes)
	for lanes = 1; int64(lanes) < want; lanes++ {
		select {
		case l.slots <- struct{}{}:
		default:
			return lanes, nil
		}
	}
	return lanes, nil
}

func (l *link) release(lanes int) {
	for range lanes {
		<-l.slots
	}
}

// attempt reads once, and reports true if it has failed for a connection that
// had been idle and was dead.
func (l *link) attempt(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy, lanes int, r *outcome) (again bool) {
	limits := l.t.limits
	// Whatever ends the read closes its connections, and with them the receiving
	// calls: one way out for stall, total time, Close, a lane that fails, and the
	// caller.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	whole := time.AfterFunc(limits.Total(r.total), func() { cancel(transfer.ErrTotal) })
	defer whole.Stop()
	// A byte of any lane is progress.
	stall := time.AfterFunc(limits.Stall, func() { cancel(errStall) })
	defer stall.Stop()
	a := &reading{seals: seals, todo: newTodo(copies, r.total, lanes), stall: stall, cancel: cancel}

	// More lanes are no condition: one that isn't there yet when all is asked for
	// is not waited for. What is there already is for the first one.
	dialling, enough := context.WithCancel(ctx)
	defer enough()
	c := l.pop()
	var more sync.WaitGroup
	for range lanes - 1 {
		more.Go(func() { l.join(ctx, dialling, a) })
	}
	l.lead(ctx, c, a)
	enough()
	more.Wait()
	r.landed, r.address, r.err = a.landed, a.failed.address, a.failed.err
	return a.again
}

// lead is the first lane, over c, or a new connection if that is nil.
func (l *link) lead(ctx context.Context, c *dialled, a *reading) {
	idle := c != nil
	if !idle {
		var err error
		if c, err = l.dial(ctx); err != nil {
			a.fail(outcome{err: err}, false)
			return
		}
	}
	l.over(ctx, c, idle, a)
}

// join is one lane more, if it has a connection before dialling ends.
func (l *link) join(ctx, dialling context.Context, a *reading) {
	c := l.pop()
	idle := c != nil
	if !idle {
		var err error
		if c, err = l.dial(dialling); err != nil {
			return // the others do without
		}
	}
	l.over(ctx, c, idle, a)
}

// over is one lane: it reads over c until nothing is left to ask for, and puts c
// back if it is good for another read.
func (l *link) over(ctx context.Context, c *dialled, idle bool, a *reading) {
	stopAbort := context.AfterFunc(ctx, c.abort)
	c.recv.moved = func() { a.stall.Reset(l.t.limits.Stall) }
	x := exchange{owner: l.peer.Life.Incarnation, bounds: c.bounds, seals: a.seals, todo: a.todo, first: c.next}
	good, err := false, error(nil)
	switch {
	case len(a.seals) > c.bounds.seals:
		good, err = true, fmt.Errorf("read under %d seals, the peer takes %d", len(a.seals), c.bounds.seals)
	case l.t.staging != nil:
		good, err = x.runStaged(ctx, c.wire, &c.scratch, l.t)
	default:
		good, err = x.run(ctx, c.wire, &c.scratch, l.t.local.Arenas)
	}
	c.next += x.asked
	if !stopAbort() {
		good = false
		if err != nil {
			err = transfer.Reason(ctx)
		}
	}
	if err != nil {
		a.fail(outcome{address: c.address, err: err}, idle && !x.answered && broken(err))
	}
	a.mu.Lock()
	a.landed += x.landed
	a.mu.Unlock()
	if good && l.push(c) {
		return
	}
	l.t.hangUp(c)
	if broken(err) || errors.Is(err, transfer.ErrStalled) {
		l.drop() // what killed this one may have killed the idle ones: the next read dials
	}
}

// broken reports whether err is the end of a connection and nothing worse.
func broken(err error) bool {
	var errno syscall.Errno
	return errors.Is(err, io.ErrUnexpectedEOF) || errors.As(err, &errno)
}

// begin registers a read, so that Close can end it and wait for it.
func (l *link) begin(ctx context.Context) (_ context.Context, end func(), err error) {
	if ctx.Err() != nil {
		return nil, nil, transfer.Reason(ctx)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	r := &running{cancel: cancel}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		cancel(nil)
		return nil, nil, fmt.Errorf("link: %w", transfer.ErrClosed)
	}
	l.reads[r] = struct{}{}
	l.work.Add(1)
	l.mu.Unlock()
	return ctx, func() {
		cancel(nil)
		l.mu.Lock()
		delete(l.reads, r)
		l.mu.Unlock()
		l.work.Done()
	}, nil
}

// pop takes the idle connection that was used last, nil if there is none.
func (l *link) pop() *dialled {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.idle) == 0 {
		return nil
	}
	c := l.idle[len(l.idle)-1]
	l.idle = l.idle[:len(l.idle)-1]
	return c
}

// push keeps c for the next read, and reports false if the link is closed.
func (l *link) push(c *dialled) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return false
	}
	l.idle = append(l.idle, c)
	return true
}

// drop closes what is idle.
func (l *link) drop() {
	l.mu.Lock()
	idle := l.idle
	l.idle = nil
	l.mu.Unlock()
	for _, c := range idle {
		l.t.hangUp(c)
	}
}

// Close is [transfer.Link.Close].
func (l *link) Close() error {
	l.mu.Lock()
	l.closed = true
	for r := range l.reads {
		r.cancel(fmt.Errorf("link: %w", transfer.ErrClosed))
	}
	l.mu.Unlock()
	l.work.Wait()
	l.drop()
	l.t.forget(l)
	return nil
}

// dial connects and lets the owner prove its life.
func (l *link) dial(ctx context.Context) (*dialled, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, l.t.limits.Dial, errDial)
	defer cancel()
	conn, err := connect(ctx, l.addresses)
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
			<-ctx.Done() // its deadline, which the dialer keeps by a clock of its own
		}
		if ctx.Err() != nil {
			err = transfer.Reason(ctx)
		}
		return nil, fmt.Errorf("dial %v: %w", l.addresses, err)
	}
	w, err := newWire(conn)
	if err != nil {
		_ = conn.Close() // the first error tells
		return nil, fmt.Errorf("set up the connection to %v: %w", conn.RemoteAddr(), err)
	}
	l.t.stats.dialled.Add(1)
	c := &dialled{wire: w, address: conn.RemoteAddr().String(), next: 1}
	stopAbort := context.AfterFunc(ctx, w.abort)
	err = l.shake(c)
	if !stopAbort() {
		err = transfer.Reason(ctx)
	}
	if err != nil {
		l.t.hangUp(c)
		return nil, fmt.Errorf("shake hands with %s: %w", c.address, err)
	}
	c.scratch.grow(c.bounds.inFlight)
	return c, nil
}

// connect dials the first address for which this machine has a route: one that
// has none fails at once and sends nothing.
func connect(ctx context.Context, addresses []netip.AddrPort) (*net.TCPConn, error) {
	var dialer net.Dialer
	var unroutable error
	for _, a := range addresses {
		conn, err := dialer.DialTCP(ctx, "tcp", netip.AddrPort{}, a)
		if err == nil {
			return conn, nil
		}
		if !errors.Is(err, syscall.ENETUNREACH) && !errors.Is(err, syscall.EADDRNOTAVAIL) && !errors.Is(err, syscall.EAFNOSUPPORT) {
			return nil, err
		}
		unroutable = err
	}
	return nil, fmt.Errorf("no route from here: %w: %w", transfer.ErrUnavailable, unroutable)
}

// shake says hello, and checks that who answers is the life that was asked for.
func (l *link) shake(c *dialled) error {
	want := l.peer.Life
	if l.t.identity != nil {
		if err := l.prove(c); err != nil {
			return err
		}
	}
	// An owner that refuses our certificate does so when the handshake is over
	// for us: it says why, and hangs up, which may be known here first.
	said := c.out.one(hello{owner: want, reader: l.t.local.Life}.encode())
	err := c.in.one(c.scratch.head[:])
	switch {
	case isAlert(err):
		return l.refused(err)
	case said != nil:
		return said
	case err != nil:
		return err
	}
	head, err := parseHeader(c.scratch.head[:])
	if err != nil {
		return err
	}
	if head.kind == kindVerdict && verdict(head.aux) == verdictUnproven {
		return verdictUnproven.err()
	}
	if head.owner != want.Incarnation {
		return fmt.Errorf("incarnation %d answers, want %s: %w", head.owner, want, transfer.ErrIdentity)
	}
	if head.kind == kindVerdict && verdict(head.aux) == verdictIdentity {
		return fmt.Errorf("a node of another name answers, want %s: %w", want, transfer.ErrIdentity)
	}
	if head.kind != kindWelcome || head.length > maxWelcomeBody {
		return fmt.Errorf("%v of %d bytes, want a welcome: %w", head.kind, head.length, errGarbage)
	}
	body := make([]byte, head.length)
	if err := c.in.one(body); err != nil {
		return err
	}
	wel, err := parseWelcome(head, body)
	if err != nil {
		return err
	}
	if wel.owner != want {
		return fmt.Errorf("%s answers, want %s: %w", wel.owner, want, transfer.ErrIdentity)
	}
	c.bounds = bounds{
		bytes:    min(frameBytes, int64(wel.bytes)),
		copies:   int(min(frameCopies, wel.copies)),
		seals:    int(min(maxSeals, wel.seals)),
		inFlight: int(min(uint32(l.t.inFlight), wel.inFlight)),
	}
	return nil
}

// prove shakes hands by TLS, and lets the owner prove its name.
func (l *link) prove(c *dialled) error {
	i := l.t.identity
	// Who answers where the peer was can be another node of the cluster: that is
	// told from one that is refused.
	state, err := c.secure(tls.Client, largeRecords(i.Client(identity.Data, "")))
	switch {
	case isAlert(err):
		return l.refused(err)
	case err != nil:
		return fmt.Errorf("check the owner's certificate: %w", err)
	}
	err = i.Check(state, l.peer.Life.Node)
	if err != nil && !slices.Contains(identity.Names(state), l.peer.Life.Node) {
		err = fmt.Errorf("%w: %w", transfer.ErrIdentity, err)
	}
	return err
}

// refused is the error of an owner that refuses our certificate by an alert. If
// we know of something that is wrong with it, that will be why.
func (l *link) refused(alert error) error {
	err := fmt.Errorf("%w: %w", identity.Explain(alert), identity.ErrRefused)
	if own := l.t.identity.Err(); own != nil {
		err = fmt.Errorf("%w: %w", own, err)
	}
	return err
}

func newLink(t *Transport, peer transfer.Peer, addresses []netip.AddrPort) *link {
	peer.ArenaBytes = maps.Clone(peer.ArenaBytes)
	return &link{
		t: t, peer: peer, addresses: addresses,
		slots: make(chan struct{}, t.linkConns), reads: map[*running]struct{}{},
	}
}

// warm makes the first connection, and keeps it for the first read.
func (l *link) warm(ctx context.Context) error {
	ctx, end, err := l.begin(ctx)
	if err != nil {
		return err
	}
	defer end()
	c, err := l.dial(ctx)
	if err != nil {
		return err
	}
	if !l.push(c) {
		l.t.hangUp(c)
		return fmt.Errorf("link: %w", transfer.ErrClosed)
	}
	return nil
}

var _ transfer.Link = (*link)(nil)
