package rdmaread

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// grace is how long Open waits for lanes once one is ready.
const grace = 200 * time.Millisecond

// link is a hold on one life of one peer: paths, and their lanes.
type link struct {
	t       *Transport
	peer    transfer.Peer
	number  uint64 // of all links of the transport
	paths   []*path
	lanes   []*lane
	scratch []byte          // where seal words land, sliced by lane
	pinned  []*rdma.Region  // it, on each device
	ctx     context.Context //nolint:containedctx // the link's own life; its cause is why nothing may be read any more
	stop    context.CancelCauseFunc
	work    sync.WaitGroup // a goroutine a lane
	gone    chan struct{}  // closed when nothing of the link is left

	mu      sync.Mutex
	address string    // of the lane that was ready last
	carried time.Time // when a lane last came back whole
	waiting []*waiter
	reads   sync.WaitGroup // Add under mu, and only while ctx has not ended
	first   int            // lanes whose first attempt has ended
	one     chan struct{}  // closed when one of them has succeeded
	all     chan struct{}  // closed when all have ended
}

// newLink plans a link; start begins it.
func (t *Transport) newLink(peer transfer.Peer, d descriptor, pairs []pairing) *link {
	ctx, stop := context.WithCancelCause(context.Background())
	l := &link{
		t: t, peer: peer, number: t.opened.Add(1), ctx: ctx, stop: stop,
		gone: make(chan struct{}), one: make(chan struct{}), all: make(chan struct{}),
	}
	for _, c := range pairs {
		p := &path{port: t.ports[c.local], remote: uint8(c.remote), gid: c.gid, name: d.ports[c.remote].name}
		p.reads = max(1, min(t.o.Reads, p.port.d.dev.Limits().MaxReadsInitiated, int(d.ports[c.remote].reads)))
		l.paths = append(l.paths, p)
		for range t.lanesOf(p, len(pairs)) {
			l.lanes = append(l.lanes, &lane{l: l, path: p, wake: make(chan struct{}, 1), state: laneConnecting, since: time.Now()})
		}
	}
	return l
}

// lanesOf is how many lanes a path has.
func (t *Transport) lanesOf(p *path, paths int) int {
	const reads, least, most = 32, 2, 8
	n := cmp.Or(t.o.QueuePairs, min(max((reads+p.reads-1)/p.reads, least), most))
	return max(1, min(n, maxLanes/paths))
}

// pin maps the place for seal words and registers it with each device.
func (l *link) pin() error {
	scratch, err := unix.Mmap(-1, 0, len(l.lanes)*scratchBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("map %d bytes for seal words: %w", len(l.lanes)*scratchBytes, err)
	}
	l.scratch = scratch
	for i, n := range l.lanes {
		n.scratch = scratch[i*scratchBytes:][:scratchBytes:scratchBytes]
	}
	keys := map[*device]uint32{}
	for _, p := range l.paths {
		if _, done := keys[p.port.d]; !done {
			r, err := p.port.d.pd.Register(scratch, rdma.LocalWrite)
			if err != nil {
				return fmt.Errorf("register the place of seal words: %w", err)
			}
			l.pinned = append(l.pinned, r)
			if len(r.Keys()) != 1 {
				return fmt.Errorf("%s takes no region of %d bytes", p.port.d.dev.Name(), len(scratch))
			}
			keys[p.port.d] = r.Keys()[0].L
		}
		p.key = keys[p.port.d]
	}
	return nil
}

// discard drops what pin made.
func (l *link) discard() error {
	var errs []error
	for _, r := range l.pinned {
		errs = append(errs, r.Close())
	}
	if l.scratch != nil {
		errs = append(errs, unix.Munmap(l.scratch))
	}
	l.pinned, l.scratch = nil, nil
	return errors.Join(errs...)
}

// start lets every lane connect, and returns when enough have. With an error
// nothing of the link is left.
func (l *link) start(ctx context.Context) error {
	err := l.pin()
	if err == nil {
		for _, n := range l.lanes {
			l.work.Go(n.tend)
		}
	}
	go l.watch()
	if err == nil {
		err = l.opened(ctx)
	}
	if err != nil {
		l.end(err)
		<-l.gone
		return context.Cause(l.ctx) // closed meanwhile, or that
	}
	return nil
}

// opened waits for all lanes, or, once one is ready, for a moment.
func (l *link) opened(ctx context.Context) error {
	select {
	case <-l.one:
	case <-l.all:
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-l.ctx.Done():
		return context.Cause(l.ctx)
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-l.all:
	case <-timer.C:
	case <-ctx.Done():
		return transfer.Reason(ctx)
	case <-l.ctx.Done():
		return context.Cause(l.ctx)
	}
	return l.refusals()
}

// refusals is the error of the first path if no lane has ever been ready, and
// logs what was refused if one was.
func (l *link) refusals() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var why error
	lanes := 0
	for _, n := range l.lanes {
		switch {
		case n.count > 0:
			lanes++
		case why == nil || errors.Is(n.why, transfer.ErrIdentity) && !errors.Is(why, transfer.ErrIdentity):
			why = n.why
		}
	}
	if lanes == 0 {
		return why
	}
	if why != nil {
		l.t.o.Logger.Warn("an RDMA link has fewer lanes than it should", "peer", l.peer.Life.String(), "lanes", lanes, "want", len(l.lanes), "err", why)
	}
	return nil
}

// firstLocked notes the end of a lane's first attempt.
func (l *link) firstLocked(n *lane) {
	if n.count+n.failures != 1 {
		return
	}
	if l.first++; l.first == len(l.lanes) {
		close(l.all)
	}
	if n.count == 1 {
		select {
		case <-l.one:
		default:
			close(l.one)
		}
	}
}

// watch waits for the end of the link, and then for all that uses it.
func (l *link) watch() {
	<-l.ctx.Done()
	l.work.Wait()
	l.reads.Wait()
	if err := l.discard(); err != nil {
		l.t.o.Logger.Error("give up the place of seal words", "peer", l.peer.Life.String(), "err", err)
	}
	l.t.forget(l)
	close(l.gone)
}

// end lets no further read begin, and tells those that run. The first reason
// counts.
func (l *link) end(why error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stop(why)
}

// begin registers a read, or says why there can be none.
func (l *link) begin() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx.Err() != nil {
		return context.Cause(l.ctx)
	}
	l.reads.Add(1)
	return nil
}

// Close is [transfer.Link.Close].
func (l *link) Close() error {
	l.end(fmt.Errorf("link: %w", transfer.ErrClosed))
	<-l.gone
	return nil
}

// sizes are those of a rank's arenas there and here.
func (l *link) sizes(rank id.Rank) (remote, local int64, ok bool) {
	if rank < 0 || rank >= id.MaxRanks {
		return 0, 0, false
	}
	remote, known := l.peer.ArenaBytes[rank]
	here := l.t.o.Local.Arenas[rank]
	if !known || here == nil {
		return 0, 0, false
	}
	return remote, here.Size(), true
}

// fits checks the regions of an answer against what the peer said before.
func (l *link) fits(r *regions) error {
	for rank, want := range l.peer.ArenaBytes {
		if l.t.o.Local.Arenas[rank] == nil || rank.Validate() != nil {
			continue // never read
		}
		if have := r.arenas[rank].bytes; want < 0 || have < uint64(want) {
			return fmt.Errorf("rank %d has %d bytes there, the peer said %d before: %w", int(rank), have, want, errGarbage)
		}
	}
	return nil
}

// states tells the paths of the link.
func (l *link) states() []Path {
	l.mu.Lock()
	defer l.mu.Unlock()
	var list []Path
	for _, p := range l.paths {
		s := Path{
			Peer: l.peer.Life, Device: p.port.d.dev.Name(), Port: p.port.number, State: "active",
			Remote: p.name + " " + p.gid.Unmap().String(),
		}
		var why error
		for _, n := range l.lanes {
			if n.path != p {
				continue
			}
			s.Wanted++
			switch n.state {
			case laneIdle, laneBusy:
				s.Lanes++
				s.GID, s.Remote = n.queue.from.Unmap().String(), p.name+" "+n.queue.to.Unmap().String()
			default:
				why = cmp.Or(n.why, why)
			}
		}
		switch {
		case s.Lanes == 0 && why != nil:
			s.State = why.Error()
		case s.Lanes == 0:
			s.State = "connecting"
		case time.Now().Before(p.until):
			s.State = fmt.Sprintf("rests for %v after a fault", time.Until(p.until).Round(time.Millisecond))
		}
		list = append(list, s)
	}
	return list
}

// breakLanes breaks the lanes of all links that match tells.
func (t *Transport) breakLanes(match func(*lane) bool, why error) {
	t.mu.Lock()
	links := make([]*link, 0, len(t.links))
	for l := range t.links {
		links = append(links, l)
	}
	t.mu.Unlock()
	for _, l := range links {
		l.mu.Lock()
		var hit []borrowed
		for _, n := range l.lanes {
			if n.queue != nil && match(n) {
				hit = append(hit, borrowed{n, n.queue})
			}
		}
		l.mu.Unlock()
		for _, b := range hit {
			l.breakQueue(b.lane, b.queue, why)
		}
	}
}

var _ transfer.Link = (*link)(nil)
