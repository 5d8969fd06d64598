package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
)

const (
	stagedBytes = 256 << 10 // of one buffer: small, so that the device and the wire take turns even in one request
	stagedAhead = 4         // buffers that one connection has at most
	stagedLeast = 2         // buffers of a pool
)

// staging is the host memory through which the bytes of arenas on a device go:
// half of it for what peers read from us, half for what we read from them, for
// the reason that [transfer.Pool] gives.
type staging struct {
	out, in *transfer.Pool
	pinned  bool
}

func newStaging(arenas map[id.Rank]memory.Arena, bytes int64, log *slog.Logger) (*staging, error) {
	count := max(stagedLeast, int(bytes/2/stagedBytes))
	out, slowOut, err := transfer.NewPool("kvferry tcp out", arenas, stagedBytes, count)
	if err != nil {
		return nil, err
	}
	in, slowIn, err := transfer.NewPool("kvferry tcp in", arenas, stagedBytes, count)
	if err != nil {
		return nil, errors.Join(err, out.Close())
	}
	refused := errors.Join(slowOut, slowIn)
	log.Info("device memory is staged through host memory", "bytes", 2*count*stagedBytes, "pinned", refused == nil)
	if refused != nil {
		log.Warn("the memory for staging is not pinned, copies are slow", "err", refused)
	}
	return &staging{out: out, in: in, pinned: refused == nil}, nil
}

func (s *staging) bytes() int64 { return s.out.Region().Size() + s.in.Region().Size() }

// close frees the memory when nothing of the transport runs any more.
func (s *staging) close() error {
	if s == nil {
		return nil
	}
	return errors.Join(s.out.Close(), s.in.Close())
}

// gathering copies the bytes of an answer out of device memory, piece by piece,
// as far ahead of the wire as there are buffers. It serves one connection.
type gathering struct {
	pool   *transfer.Pool
	arenas map[id.Rank]memory.Arena

	cut   transfer.Cutter // what is not asked of the device yet
	more  bool
	held  int       // pieces with a buffer
	ahead []*gather // copies that run, in their order
	idle  []*gather // with a buffer, but nothing to do
	empty []*gather // without a buffer
}

// gather is one piece.
type gather struct {
	buf    []byte
	copies []transfer.Copy
	copy   transfer.Staging
}

func newGathering(pool *transfer.Pool, arenas map[id.Rank]memory.Arena) *gathering {
	g := &gathering{pool: pool, arenas: arenas}
	for range stagedAhead {
		g.empty = append(g.empty, &gather{})
	}
	return g
}

// begin starts to copy the first pieces of copies, and waits for a buffer if
// there is none.
func (g *gathering) begin(ctx context.Context, copies []transfer.Copy) error {
	g.cut, g.more = transfer.Cut(copies, int64(g.pool.Size()), maxCopies), true
	return g.run(ctx)
}

// run lets the device copy on. It waits for a buffer only if it holds none.
func (g *gathering) run(ctx context.Context) error {
	for g.more {
		p, err := g.take(ctx)
		if p == nil {
			return err
		}
		p.copies, g.more = g.cut.Next(p.copies[:0])
		p.copy.Gather(p.buf, g.arenas, transfer.Owner, p.copies)
		g.ahead = append(g.ahead, p)
	}
	return nil
}

// take is a piece with a buffer, nil if there is none to be had now.
func (g *gathering) take(ctx context.Context) (*gather, error) {
	if n := len(g.idle); n > 0 {
		p := g.idle[n-1]
		g.idle = g.idle[:n-1]
		return p, nil
	}
	n := len(g.empty)
	if n == 0 {
		return nil, nil
	}
	if g.held > 0 && g.pool.Crowded() { // a reader that takes nothing keeps them for the stall time
		return nil, nil
	}
	buf, ok := g.pool.TryGet()
	if !ok {
		if g.held > 0 {
			return nil, nil
		}
		var err error
		if buf, err = g.pool.Get(ctx); err != nil {
			return nil, err
		}
	}
	p := g.empty[n-1]
	g.empty = g.empty[:n-1]
	p.buf = buf
	g.held++
	return p, nil
}

// next waits for the next piece; last: it is the last one. Its buffer may be read
// until run or end. More pieces are on their way then, if there are buffers.
func (g *gathering) next(ctx context.Context) (p *gather, last bool, err error) {
	p = g.ahead[0]
	g.ahead = append(g.ahead[:0], g.ahead[1:]...)
	err = p.copy.Wait()
	if err == nil {
		err = g.run(ctx)
	}
	g.idle = append(g.idle, p)
	return p, !g.more && len(g.ahead) == 0, err
}

// end waits for what still runs, and gives every buffer back.
func (g *gathering) end() {
	for _, p := range g.ahead {
		_ = p.copy.Wait() // nobody wants the bytes any more
	}
	g.idle = append(g.idle, g.ahead...)
	for _, p := range g.idle {
		g.pool.Put(p.buf)
		p.buf = nil
	}
	g.empty = append(g.empty, g.idle...)
	g.idle, g.ahead, g.held, g.more = g.idle[:0], g.ahead[:0], 0, false
}

// sendStaged copies the bytes out by the device, and writes a piece while the
// next is copied. The seal words are looked at when the last copy is over: the
// verdict goes with the last piece, or alone if it is the first.
func (s *server) sendStaged(c *served) error {
	if c.gathering == nil {
		c.gathering = newGathering(s.t.staging.out, s.t.local.Arenas)
	}
	g, r := c.gathering, &c.request
	ctx, cancel := context.WithDeadline(s.ctx, c.limit)
	defer cancel()
	defer g.end()
	if err := g.begin(ctx, r.copies); err != nil {
		return err
	}
	n := r.bytes()
	for left := n; left > 0; {
		p, last, err := g.next(ctx)
		if err != nil {
			return s.sendFailed(c, p, left, err)
		}
		verdict := verdictHeld
		if last {
			verdict = s.verdict(r, n)
		}
		if left == n && verdict != verdictHeld { // then nobody needs to see them
			return s.refuse(c, r.id, verdict)
		}
		v := c.answer(s, left)
		bytes := transfer.Bytes(p.copies)
		v.add(p.buf[:bytes])
		if left -= bytes; last {
			v.add(c.verdict(s, verdict))
		}
		s.t.stats.gathered.Add(uint64(bytes))
		c.extend(s.t.limits.Stall) // the reader is not to blame for the device's time
		if err := c.wire.out.all(); err != nil {
			return err
		}
		if err := g.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

// sendFailed ends an answer of which left bytes are to come, and cannot: it is
// zeros, since their number has been announced, and a verdict that says so. p is
// free.
func (s *server) sendFailed(c *served, p *gather, left int64, err error) error {
	s.t.log.Warn("an answer could not be copied out of the device", "peer", c.from, "err", err)
	if left == c.request.bytes() {
		return s.refuse(c, c.request.id, verdictMemory)
	}
	v := c.answer(s, left)
	clear(p.buf)
	for left > 0 {
		zeros := p.buf[:min(left, int64(len(p.buf)))]
		v.add(zeros)
		left -= int64(len(zeros))
	}
	v.add(c.verdict(s, verdictMemory))
	c.extend(s.t.limits.Stall)
	return c.wire.out.all()
}

// answer begins what is written next: with the header of the data, if all of it
// is to come.
func (c *served) answer(s *server, left int64) *vector {
	v := &c.wire.out.v
	v.reset()
	if c.out = c.out[:0]; left == c.request.bytes() {
		c.out = appendHeader(c.out, s.data(c.request.id, left))
		v.add(c.out)
	}
	return v
}

// verdict is the header of a verdict behind what answer has begun.
func (c *served) verdict(s *server, v verdict) []byte {
	at := len(c.out)
	c.out = appendHeader(c.out, header{kind: kindVerdict, owner: s.t.local.Life.Incarnation, request: c.request.id, aux: uint32(v)})
	return c.out[at:]
}

// landing copies answers into device memory behind the wire: a piece is received
// into a buffer, and copied on while the next is received. It serves one
// connection, and one read of it at a time.
//
// The receiver takes a buffer only when the bytes for it are on their way, and
// gives it to the device at once, so that it never holds one while it waits for
// the owner to have room.
type landing struct {
	pool   *transfer.Pool
	arenas map[id.Rank]memory.Arena
	spare  chan *scatter

	ctx    context.Context //nolint:containedctx // of the read that runs
	under  chan *scatter   // copies that run, in their order
	landed int64           // bytes; land's, as the next
	failed error           // of the first copy that failed; it ends the connection
}

// scatter is one piece.
type scatter struct {
	buf    []byte
	copies []transfer.Copy
	copy   transfer.Staging
}

func newLanding(pool *transfer.Pool, arenas map[id.Rank]memory.Arena) *landing {
	l := &landing{pool: pool, arenas: arenas, spare: make(chan *scatter, stagedAhead)}
	for range stagedAhead {
		l.spare <- &scatter{}
	}
	return l
}

// receive receives the bytes of copies and the verdict behind them.
func (l *landing) receive(in *half, copies []transfer.Copy, tail []byte) error {
	if len(copies) == 0 {
		return in.one(tail)
	}
	cut := transfer.Cut(copies, int64(l.pool.Size()), maxCopies)
	for more := true; more; {
		p, err := l.take()
		if err != nil {
			return err
		}
		p.copies, more = cut.Next(p.copies[:0])
		in.v.reset()
		in.v.add(p.buf[:transfer.Bytes(p.copies)])
		if !more {
			in.v.add(tail)
		}
		if err := in.all(); err != nil {
			l.give(p)
			return err
		}
		p.copy.Scatter(l.arenas, transfer.Reader, p.copies, p.buf)
		l.under <- p // has room for all
	}
	return nil
}

// take waits for a piece, of which a device is copying, and for a buffer.
func (l *landing) take() (*scatter, error) {
	var p *scatter
	select {
	case p = <-l.spare:
	case <-l.ctx.Done():
		return nil, fmt.Errorf("wait for the device: %w", transfer.Reason(l.ctx))
	}
	buf, err := l.pool.Get(l.ctx)
	if err != nil {
		l.spare <- p
		return nil, err
	}
	p.buf = buf
	return p, nil
}

func (l *landing) give(p *scatter) {
	l.pool.Put(p.buf)
	p.buf = nil
	l.spare <- p
}

// land waits for the copies until under is closed. moved is told when bytes have
// landed.
func (l *landing) land(w *wire, moved func()) {
	for p := range l.under {
		if err := p.copy.Wait(); err == nil {
			l.landed += transfer.Bytes(p.copies)
			moved()
		} else if l.failed == nil {
			l.failed = fmt.Errorf("copy into the device: %w", err)
			w.abort() // the receiver may wait for bytes that have no use
		}
		l.give(p)
	}
}

// runStaged is run for arenas on a device. It returns when no copy of the device
// runs.
func (x *exchange) runStaged(ctx context.Context, w *wire, s *scratch, t *Transport) (whole bool, err error) {
	if s.landing == nil {
		s.landing = newLanding(t.staging.in, t.local.Arenas)
	}
	l := s.landing
	l.ctx, l.landed, l.failed, l.under = ctx, 0, nil, make(chan *scatter, stagedAhead)
	x.landing = l
	var work sync.WaitGroup
	work.Go(func() { l.land(w, w.recv.moved) })
	whole, err = x.run(ctx, w, s, t.local.Arenas)
	close(l.under)
	work.Wait()
	l.ctx = nil
	x.landed = l.landed
	t.stats.scattered.Add(uint64(l.landed))
	if l.failed != nil {
		return false, l.failed
	}
	return whole, err
}
