package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
)

var (
	// errOwnerLost: the life that owns a publication is gone.
	errOwnerLost = errors.New("owner is gone")
	// errUnknownNode: no member of that name.
	errUnknownNode = errors.New("no such node in the cluster")
)

// Bounds of what waits for one peer. What does not fit is dropped: a push
// is repeated by gossip, a lease by its renewal, and a lost acknowledgement
// costs one lease.
const (
	maxPeers    = 4096
	maxPushes   = 4096
	maxReceipts = 65536
	callTimeout = 2 * time.Second
	pushTimeout = 5 * time.Second

	probeInterval = 500 * time.Millisecond // of a life that is fenced here

	maxTransports = 16   // that a peer says it has
	maxDescriptor = 4096 // bytes of one
	maxLost       = 4 * maxPeers
)

// peers are the other members, each life an own [peer].
type peers struct {
	node *Node

	mu      sync.Mutex
	byName  map[id.Node]*peer
	lost    lives         // that were here and have gone
	changed chan struct{} // closed when a life is met, has said hello, or has gone, then replaced
	closed  bool
}

// peer is this node's hold on one life of another node: its control
// connection, what its Hello said, and the route by which its pages are read. It
// owns three goroutines: one warms up and settles leases, one pushes, and one
// looks whether a better transport can be used again.
type peer struct {
	node   *Node
	life   id.Life
	member cluster.Member
	conn   *grpc.ClientConn
	rpc    kvferrypb.PeerClient
	ctx    context.Context //nolint:containedctx // the peer's own life, ended by stop
	stop   context.CancelCauseFunc
	work   sync.WaitGroup

	greeted  chan struct{} // closed when hello has succeeded
	receipts *queue[receipt]
	pushes   *queue[pushItem]
	snapshot chan struct{} // one wish is as good as many
	untold   atomic.Int64  // receipts and pushes that the peer has not answered
	draining atomic.Bool   // it takes nothing new

	rerouted chan struct{} // one wish to look at the route is as good as many

	mu      sync.Mutex
	hello   hello           // valid once greeted is closed, and so is route
	route   *transfer.Route // how its pages are read
	by      string          // the transport that was chosen last; "": none yet
	lastErr error
	suspect bool // fenced here, until a probe succeeds
}

// hello is what a peer said of itself.
type hello struct {
	geometry    page.Geometry
	arenas      map[id.Rank]int64
	descriptors map[string][]byte
}

// pushItem is an announcement or the end of a publication.
type pushItem struct {
	announcement []byte
	sequence     id.Sequence // of the announcement
	request      id.Request
	ended        id.Sequence
	cause        string
}

// receipt asks for, renews, or ends a lease of ours at the peer.
type receipt struct {
	sequence id.Sequence
	attempt  uint32
	outcome  kvferrypb.CompleteItem_Outcome // unspecified: grant or renew
	follow   *follow                        // who is told of the answer; nil of one that ends
}

func newPeers(n *Node) *peers {
	return &peers{node: n, byName: make(map[id.Node]*peer), lost: newLives(maxLost), changed: make(chan struct{})}
}

// add meets a life; an older one of the same node is dropped first.
func (ps *peers) add(m cluster.Member) {
	conn, err := grpc.NewClient("passthrough:///"+m.Meta.Peer.String(),
		grpc.WithTransportCredentials(ps.node.peerDialCredentials(m.Life.Node)),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: time.Second,
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second, PermitWithoutStream: true}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(kvferrypb.MaxMessage), grpc.MaxCallSendMsgSize(kvferrypb.MaxMessage)),
		grpc.WithMaxHeaderListSize(64<<10), // an error comes in a header
	)
	if err != nil {
		ps.node.log.Error("peer address is unusable", "peer", m.Life.String(), "address", m.Meta.Peer.String(), "err", err)
		return
	}
	ctx, stop := context.WithCancelCause(context.Background())
	p := &peer{
		node: ps.node, life: m.Life, member: m, conn: conn, rpc: kvferrypb.NewPeerClient(conn),
		ctx: ctx, stop: stop,
		greeted:  make(chan struct{}),
		receipts: newQueue[receipt](maxReceipts),
		pushes:   newQueue[pushItem](maxPushes),
		snapshot: make(chan struct{}, 1),
		rerouted: make(chan struct{}, 1),
	}
	p.draining.Store(m.Meta.Draining)
	ps.mu.Lock()
	old := ps.byName[m.Life.Node]
	full := old == nil && len(ps.byName) >= maxPeers
	if ps.closed || full {
		ps.mu.Unlock()
		stop(transfer.ErrClosed)
		_ = conn.Close()
		if full {
			ps.node.log.Warn("too many members, one is not used", "node", m.Life.String(), "most", maxPeers)
		}
		return
	}
	ps.byName[m.Life.Node] = p
	if old != nil {
		ps.lost.add(old.life)
	}
	// Started under the mutex, so that nobody closes a peer that has yet to start.
	p.work.Go(p.settle)
	p.work.Go(p.pushAll)
	p.work.Go(p.seekBetter)
	ps.mu.Unlock()
	if old != nil {
		old.close(fmt.Errorf("%s was replaced by %s: %w", old.life, p.life, errOwnerLost))
	}
	p.show()
	ps.wake()
}

// update notes what else a life tells of itself.
func (ps *peers) update(m cluster.Member) {
	if p := ps.byLife(m.Life); p != nil {
		p.draining.Store(m.Meta.Draining)
	}
}

// target is the peer that a publication is pushed to; one that drains would not
// read it. nil: nobody.
func (ps *peers) target(n id.Node) *peer {
	if p := ps.byNode(n); p != nil && !p.draining.Load() {
		return p
	}
	return nil
}

// wake wakes whoever waits for a change.
func (ps *peers) wake() {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	close(ps.changed)
	ps.changed = make(chan struct{})
}

// watch returns what is closed at the next change.
func (ps *peers) watch() <-chan struct{} {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.changed
}

// owner returns the peer of exactly this life; the error says what became of it.
func (ps *peers) owner(l id.Life) (*peer, error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	p := ps.byName[l.Node]
	self := ps.node.life
	switch {
	case p != nil && p.life == l:
		return p, nil
	case l.Node == self.Node && l.Incarnation < self.Incarnation:
		return nil, fmt.Errorf("%s was an earlier life of this node: %w", l, errOwnerLost)
	case p != nil && l.Incarnation < p.life.Incarnation:
		return nil, fmt.Errorf("%s lives now: %w", p.life, errOwnerLost)
	case ps.lost.has(l):
		return nil, fmt.Errorf("%s has left the cluster: %w", l, errOwnerLost)
	default:
		return nil, fmt.Errorf("%s: %w", l, errUnknownNode)
	}
}

// gone says whether a node was a member once, in any life.
func (ps *peers) gone(name id.Node) bool {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.lost.has(id.Life{Node: name})
}

// await returns the peer of a life that is a member, or becomes one while ctx
// lasts, a call's time at most: gossip may be later than what a member says itself.
func (ps *peers) await(ctx context.Context, l id.Life) (*peer, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	for {
		changed := ps.watch()
		p, err := ps.owner(l)
		if !errors.Is(err, errUnknownNode) {
			return p, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, err
		}
	}
}

// show tells the board whether what the peer owns can be read. It is the only
// one that does, so that the last word is the right one. Where names have to be
// proved, a member is nobody until its hello has done it.
func (p *peer) show() {
	if p.node.identity != nil && !p.isKnown() {
		return
	}
	p.mu.Lock()
	out := p.node.board.Member(time.Now(), p.life, !p.suspect && p.ctx.Err() == nil)
	p.mu.Unlock()
	p.node.send(out)
}

// remove drops a life that has gone.
func (ps *peers) remove(life id.Life) {
	ps.mu.Lock()
	p := ps.byName[life.Node]
	if p == nil || p.life != life {
		ps.mu.Unlock()
		return
	}
	delete(ps.byName, life.Node)
	ps.lost.add(life)
	ps.mu.Unlock()
	p.close(fmt.Errorf("%s left: %w", life, errOwnerLost))
	ps.wake()
}

// anyAlike says whether another member says that it holds the same kind of KV.
func (ps *peers) anyAlike() bool {
	for _, p := range ps.all() {
		if p.alike() {
			return true
		}
	}
	return false
}

// unlikely grades a life by how unlikely it is that it can be read: less is
// better.
func (ps *peers) unlikely(l id.Life) int {
	p := ps.byLife(l)
	grade := 0
	if p == nil || !p.alike() {
		grade += 2
	}
	if p == nil || !p.isKnown() {
		grade++
	}
	return grade
}

// alike says whether the member says that it holds the same kind of KV; it may
// lie.
func (p *peer) alike() bool { return p.member.Meta.Fingerprint == p.node.geometry.Fingerprint() }

func (ps *peers) byNode(n id.Node) *peer {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return ps.byName[n]
}

func (ps *peers) byLife(l id.Life) *peer {
	if p := ps.byNode(l.Node); p != nil && p.life == l {
		return p
	}
	return nil
}

// groupOf is the group that a life says it is of; "" of one that is not here.
func (ps *peers) groupOf(l id.Life) id.Group {
	if p := ps.byLife(l); p != nil {
		return p.member.Meta.Group
	}
	return ""
}

func (ps *peers) all() []*peer {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	all := make([]*peer, 0, len(ps.byName))
	for _, p := range ps.byName {
		all = append(all, p)
	}
	return all
}

func (ps *peers) close() {
	ps.mu.Lock()
	ps.closed = true
	ps.mu.Unlock()
	for _, p := range ps.all() {
		ps.remove(p.life)
	}
}

// close hides this life, ends what uses it, and does not wait for reads, which
// drain in their own time.
func (p *peer) close(cause error) {
	p.stop(cause)
	p.show()
	_ = p.conn.Close()
	p.node.follows.lost(p.life, cause)
	rest := func() {
		p.work.Wait() // nobody says hello any more
		if p.isKnown() {
			_ = p.route.Close()
		}
	}
	if !p.node.spawn(rest) {
		rest()
	}
}

// settle warms the peer up, then grants, renews, and ends leases in the order
// in which they were asked for, as many in one call as wait.
func (p *peer) settle() {
	if !p.greet() {
		return
	}
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.snapshot:
			p.fetchSnapshot()
		case <-p.receipts.wake:
		}
		for batch := p.receipts.take(1024); len(batch) > 0; batch = p.receipts.take(1024) {
			p.settleBatch(batch)
			p.untold.Add(-int64(len(batch)))
		}
	}
}

// greet says hello until it is answered; false if the peer ended first.
func (p *peer) greet() bool {
	wait := 20 * time.Millisecond
	for {
		start := time.Now()
		h, err := p.sayHello()
		p.node.metrics.handshake(time.Since(start), err)
		p.mu.Lock()
		p.hello, p.lastErr = h, err
		if err == nil {
			p.route = p.node.route(p.life, h)
		}
		p.mu.Unlock()
		if err == nil {
			for _, d := range p.node.geometry.Differences(h.geometry) {
				p.node.metrics.incompatible(d.Field)
				p.node.log.Warn("peer holds other KV", "node", p.life.String(), "field", d.Field, "ours", d.Ours, "theirs", d.Theirs)
			}
			close(p.greeted)
			p.show()
			p.node.peers.wake()
			return true
		}
		p.node.log.Debug("hello failed", "node", p.life.String(), "err", err)
		if !sleep(p.ctx, wait) {
			return false
		}
		wait = min(2*wait, time.Second)
	}
}

// sayHello asks the peer what it is. It is constant in a life.
func (p *peer) sayHello() (hello, error) {
	ctx, cancel := context.WithTimeout(p.ctx, callTimeout)
	defer cancel()
	req := p.node.helloRequest()
	req.To, req.ToIncarnation = string(p.life.Node), uint64(p.life.Incarnation)
	res, err := p.rpc.Hello(ctx, req)
	if err == nil {
		if got := lifeOf(res.GetLife()); got != p.life {
			err = fmt.Errorf("%s answered: %w", got, transfer.ErrIdentity)
		}
	}
	var h hello
	if err == nil {
		h, err = checkHello(res)
	}
	if err != nil {
		return hello{}, fmt.Errorf("hello to %s at %s: %w", p.life, p.member.Meta.Peer, plainly(err))
	}
	return h, nil
}

// checkHello believes nothing.
func checkHello(res *kvferrypb.HelloResponse) (hello, error) {
	g, err := kvferrypb.ToGeometry(res.GetGeometry())
	if err != nil {
		return hello{}, err
	}
	h := hello{geometry: g, arenas: make(map[id.Rank]int64), descriptors: make(map[string][]byte)}
	if len(res.GetArenas()) > id.MaxRanks || len(res.GetTransports()) > maxTransports {
		return hello{}, fmt.Errorf("%d arenas, %d transports: %w", len(res.GetArenas()), len(res.GetTransports()), page.ErrInvalid)
	}
	for _, a := range res.GetArenas() {
		if a.GetRank() >= id.MaxRanks || a.GetBytes() != uint64(g.Layout.Bytes()) {
			return hello{}, fmt.Errorf("arena of rank %d has %d bytes, its geometry %d: %w", a.GetRank(), a.GetBytes(), g.Layout.Bytes(), page.ErrInvalid)
		}
		h.arenas[id.Rank(a.GetRank())] = int64(a.GetBytes())
	}
	for _, t := range res.GetTransports() {
		if len(t.GetAddress()) > maxDescriptor {
			return hello{}, fmt.Errorf("descriptor of %.40q has %d bytes, at most %d: %w", t.GetName(), len(t.GetAddress()), maxDescriptor, page.ErrInvalid)
		}
		h.descriptors[t.GetName()] = t.GetAddress()
	}
	return h, nil
}

// known returns what hello said, waiting for it no longer than ctx.
func (p *peer) known(ctx context.Context) (hello, error) {
	select {
	case <-p.greeted:
	case <-p.ctx.Done():
		return hello{}, context.Cause(p.ctx)
	case <-ctx.Done():
		return hello{}, p.unanswered(context.Cause(ctx))
	}
	h, _ := p.said()
	return h, nil
}

// said is what hello said, if it did.
func (p *peer) said() (hello, bool) {
	if !p.isKnown() {
		return hello{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.hello, true
}

// unanswered is why the peer was waited for in vain.
func (p *peer) unanswered(cause error) error {
	if err := p.failure(); err != nil && errors.Is(cause, errTooLate) {
		return p.unreachable(err)
	}
	return fmt.Errorf("hello to %s at %s is not answered yet: %w", p.life, p.member.Meta.Peer, cause)
}

// unreachable says what a failed call proves of the peer's life: that it is gone
// if another one answers in its place, or if nobody does after its stream broke.
// A process that is merely stopped lets the call run out, and may go on.
func (p *peer) unreachable(err error) error {
	p.mu.Lock()
	suspect := p.suspect
	p.mu.Unlock()
	if isOther(err) || suspect && status.Code(err) == codes.Unavailable {
		return fmt.Errorf("%w: %w", errOwnerLost, err)
	}
	return fmt.Errorf("%w: %w", errTransport, err)
}

// isOther says that another life answered.
func isOther(err error) bool {
	return errors.Is(err, transfer.ErrIdentity) || codeOf(err) == kvferrypb.Failure_OWNER_LOST
}

// failure is what went wrong last, nil if nothing did.
func (p *peer) failure() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lastErr
}

func (p *peer) isKnown() bool {
	select {
	case <-p.greeted:
		return true
	default:
		return false
	}
}

// tell queues a receipt. A full queue drops it: the lease then runs out.
func (p *peer) tell(r receipt) {
	p.untold.Add(1)
	if !p.receipts.add(r) {
		p.untold.Add(-1)
		p.node.metrics.acks.WithLabelValues("dropped").Inc()
	}
}

func (p *peer) settleBatch(batch []receipt) {
	for len(batch) > 0 {
		n := 1
		ends := batch[0].outcome != kvferrypb.CompleteItem_OUTCOME_UNSPECIFIED
		for n < len(batch) && (batch[n].outcome != kvferrypb.CompleteItem_OUTCOME_UNSPECIFIED) == ends {
			n++
		}
		var err error
		if ends {
			err = p.complete(batch[:n])
		} else {
			err = p.lease(batch[:n])
		}
		if err != nil {
			p.node.log.Debug("lease call failed", "node", p.life.String(), "err", err)
			// Once more for what ends a lease: it frees the owner's pages. A grant is renewed anyway.
			if ends && sleep(p.ctx, 50*time.Millisecond) {
				err = p.complete(batch[:n])
			}
			if err != nil && ends {
				p.node.metrics.acks.WithLabelValues("lost").Add(float64(n))
			}
		}
		batch = batch[n:]
	}
}

func (p *peer) lease(batch []receipt) error {
	req := &kvferrypb.LeaseRequest{Incarnation: uint64(p.life.Incarnation), Reader: lifeMessage(p.node.life)}
	for _, r := range batch {
		req.Items = append(req.Items, &kvferrypb.LeaseItem{Sequence: uint64(r.sequence), Attempt: r.attempt})
	}
	ctx, cancel := context.WithTimeout(p.ctx, callTimeout)
	defer cancel()
	asked := time.Now() // the lease runs from some time after it
	res, err := p.rpc.Lease(ctx, req)
	if err != nil {
		return err
	}
	now := time.Now()
	for i, r := range res.GetResults() {
		if i >= len(batch) {
			break
		}
		switch why := r.GetRefused(); why {
		case "":
			if slack, ok := batch[i].follow.granted(now, asked.Add(time.Duration(r.GetMillis())*time.Millisecond)); ok {
				p.node.metrics.leaseSlack.Observe(slack.Seconds())
			}
		case refusedFull:
		default:
			p.node.board.Forget(batch[i].follow.source) // gossip may be behind
			batch[i].follow.refuse(why)
		}
		p.node.metrics.renewal(r.GetRefused())
	}
	return nil
}

func (p *peer) complete(batch []receipt) error {
	req := &kvferrypb.CompleteRequest{Incarnation: uint64(p.life.Incarnation), Reader: lifeMessage(p.node.life)}
	for _, r := range batch {
		req.Items = append(req.Items, &kvferrypb.CompleteItem{Sequence: uint64(r.sequence), Attempt: r.attempt, Outcome: r.outcome})
	}
	ctx, cancel := context.WithTimeout(p.ctx, callTimeout)
	defer cancel()
	_, err := p.rpc.Complete(ctx, req)
	return err
}

// lookup asks the owner for one of its publications, or for the one that goes on
// for it.
func (p *peer) lookup(ctx context.Context, s id.Sequence, r id.Request) (*kvferrypb.LookupResponse, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	res, err := p.rpc.Lookup(ctx, &kvferrypb.LookupRequest{Incarnation: uint64(p.life.Incarnation), Sequence: uint64(s), Request: string(r)})
	if err != nil {
		if p.ctx.Err() != nil {
			err = context.Cause(p.ctx)
		}
		return nil, err
	}
	return res, nil
}

func (p *peer) wantSnapshot() {
	select {
	case p.snapshot <- struct{}{}:
	default:
	}
}

// maxSnapshot bounds the bytes of one snapshot.
const maxSnapshot = 256 << 20

// fetchSnapshot replaces what the board knows of the owner by what it says.
func (p *peer) fetchSnapshot() {
	ctx, cancel := context.WithTimeout(p.ctx, 10*time.Second)
	defer cancel()
	items, err := p.readSnapshot(ctx)
	if err == nil {
		err = p.node.board.Sync(time.Now(), p.life, items)
	}
	if err != nil && p.ctx.Err() == nil {
		p.node.log.Warn("snapshot failed", "node", p.life.String(), "err", err)
	}
}

func (p *peer) readSnapshot(ctx context.Context) (items [][]byte, err error) {
	stream, err := p.rpc.Snapshot(ctx, &kvferrypb.SnapshotRequest{Incarnation: uint64(p.life.Incarnation)})
	if err != nil {
		return nil, err
	}
	for bytes := 0; ; {
		i, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return items, nil
		}
		if err != nil {
			return nil, err
		}
		if bytes += len(i.GetMessage()); bytes > maxSnapshot {
			return nil, fmt.Errorf("snapshot is over %d bytes: %w", maxSnapshot, publish.ErrFull)
		}
		items = append(items, i.GetMessage())
	}
}

// push queues an item. A full queue drops it: gossip carries it, too.
func (p *peer) push(i pushItem) {
	p.untold.Add(1)
	if !p.pushes.add(i) {
		p.untold.Add(-1)
		p.node.metrics.pushDropped.Inc()
	}
}

// pushAll keeps a Push stream to the peer. The stream stands also when there is
// nothing to push: its break tells the peer at once that this process is gone.
func (p *peer) pushAll() {
	wait := 20 * time.Millisecond
	for p.ctx.Err() == nil {
		select {
		case <-p.greeted:
		case <-p.ctx.Done():
			return
		}
		start := time.Now()
		err := p.pushStream()
		if time.Since(start) > time.Second {
			wait = 20 * time.Millisecond
		}
		p.node.log.Debug("push stream ended", "node", p.life.String(), "err", err)
		if !sleep(p.ctx, wait) {
			return
		}
		wait = min(2*wait, time.Second)
	}
}

func (p *peer) pushStream() error {
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	stream, err := p.rpc.Push(ctx)
	if err != nil {
		return err
	}
	from := lifeMessage(p.node.life)
	if err := stream.Send(&kvferrypb.PushRequest{From: from}); err != nil {
		return err
	}
	broken := make(chan error, 1)              // one answer, also when nobody waits any more
	asked := make(chan id.Sequence, maxPushes) // what is announced by each item that is not answered; 0: nothing
	taken := 0                                 // items
	answered := -1                             // of them: the first answer is to who we are
	var receiver sync.WaitGroup
	receiver.Go(func() {
		for ; ; answered++ {
			if _, err := stream.Recv(); err != nil {
				broken <- err
				return
			}
			if answered < 0 {
				continue
			}
			p.untold.Add(-1)
			select {
			case s := <-asked:
				p.node.plog.Told(s)
			default: // it answers what nobody has asked
			}
		}
	})
	defer func() {
		cancel()
		receiver.Wait()
		p.untold.Add(-int64(taken - max(0, answered))) // lost with the stream; gossip carries them, too
	}()
	for {
		select {
		case err := <-broken:
			return err
		case <-ctx.Done():
			return context.Cause(p.ctx)
		case <-p.pushes.wake:
		}
		for items := p.pushes.take(64); len(items) > 0; items = p.pushes.take(64) {
			taken += len(items)
			for _, i := range items {
				// Send blocks while the peer's window is full: a peer that takes
				// nothing for so long loses the stream, not us.
				stalled := time.AfterFunc(pushTimeout, cancel)
				select {
				case asked <- i.sequence:
				case <-ctx.Done():
				}
				err := stream.Send(i.message(from))
				stalled.Stop()
				if err != nil {
					return err
				}
			}
		}
	}
}

func (i pushItem) message(from *kvferrypb.Life) *kvferrypb.PushRequest {
	req := &kvferrypb.PushRequest{From: from}
	if i.announcement != nil {
		req.What = &kvferrypb.PushRequest_Announcement{Announcement: &kvferrypb.Announcement{Message: i.announcement, Request: string(i.request)}}
	} else {
		req.What = &kvferrypb.PushRequest_Ended{Ended: &kvferrypb.Ended{Sequence: uint64(i.ended), Cause: i.cause}}
	}
	return req
}

// fence hides a life whose stream broke until a probe shows that it lives;
// gossip would take seconds to notice a killed process.
func (n *Node) fence(life id.Life) {
	p := n.peers.byLife(life)
	if p == nil {
		return
	}
	p.mu.Lock()
	again := p.suspect
	p.suspect = true
	p.mu.Unlock()
	if again {
		return
	}
	p.show()
	n.spawn(p.probe)
}

// probe says hello again until it succeeds or the life has gone.
func (p *peer) probe() {
	for {
		_, err := p.sayHello()
		if p.ctx.Err() != nil {
			return
		}
		if err == nil {
			p.mu.Lock()
			p.suspect = false
			p.mu.Unlock()
			p.show()
			return
		}
		if isOther(err) { // a new life, which knows nobody if it has no seeds
			p.node.cluster.Call(p.life.Node)
		}
		// A process that is merely stopped does not refuse; gossip decides on it.
		if status.Code(err) != codes.DeadlineExceeded {
			p.node.follows.lost(p.life, fmt.Errorf("%w: %w", errOwnerLost, err))
		}
		if !sleep(p.ctx, probeInterval) {
			return
		}
	}
}

// state is for people to look at.
func (p *peer) state() (state string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.suspect:
		state = "suspect"
	case p.isKnown():
		state = "connected"
	case p.lastErr != nil:
		state = "failed"
	default:
		state = "connecting"
	}
	return state, p.lastErr
}

func lifeMessage(l id.Life) *kvferrypb.Life {
	return &kvferrypb.Life{Node: string(l.Node), Incarnation: uint64(l.Incarnation)}
}

func lifeOf(m *kvferrypb.Life) id.Life {
	return id.Life{Node: id.Node(m.GetNode()), Incarnation: id.Incarnation(m.GetIncarnation())}
}

// sleep waits; false if ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
