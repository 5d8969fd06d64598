// Package node is one running node: it puts the parts together, and owns every
// goroutine and every side effect.
//
// The two stories of a request are told in prefill.go (publish, and let go by
// the owner's rule) and decode.go (find, and admit), with follow.go (the reader's
// hold on a publication), pull.go (read, and settle), errand.go (in slices, each in
// its turn), group.go (owners of several ranks), and verify.go (checksums) behind
// it. Around them: steps.go the step cycle, kv.go KV through calls, host.go the
// host tier, peers.go this node's hold on the others, route.go by which transport
// they are read, link.go the calls by which transports open links, session.go the
// engines at work, lease.go who still reads what, sweep.go everything that happens
// because time passes, gossip.go what the cluster tells, security.go who others
// prove to be, keyring.go the gossip keys, warmup.go the check after warm-up,
// drain.go the way out, doctor.go what the machine has for it, probe.go by what a
// peer can be read, and engine.go, peer.go, admin.go and page.go (look), operate.go
// (change) the three services, thin.
//
// Locks are taken in this order, and none is held across I/O or a wait:
//
//	sessions → session, owner → follows → follow → peers → peer → tier → (manager, log, board, holds, sums, queue, route, reads)
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rdmaread"
)

// ErrFenced is wrapped by Err of a node that gave itself up because a newer
// life of its name is at work.
var ErrFenced = errors.New("a newer life of this node is at work")

const (
	joinTime = time.Second     // for others to say what they remember of us
	meetTime = 2 * time.Second // that a reference may be ahead of the news of its owner
)

// maxPublications are live at once: a seal word each, and the last one is for probes.
const maxPublications = probeWord

// Options set up a Node. A zero field means its default.
type Options struct {
	Config  *config.Config // validated; required
	Logger  *slog.Logger   // default: silent
	Version string         // shown by status

	// For tests: what is put in front of every transport, what is called before a
	// stream of a request is copied to or from the host, and what opens arenas in
	// device memory instead of the driver.
	wrap    func(transfer.Transport) transfer.Transport
	hook    func(context.Context, id.Request) error
	devices func(*Node) error
}

// Addresses are where a node is reached: what it advertises.
type Addresses struct {
	Gossip netip.AddrPort `json:"gossip"`
	Peer   netip.AddrPort `json:"peer"`
	Data   netip.AddrPort `json:"data"` // zero without tcp
	HTTP   netip.AddrPort `json:"http"`
	Engine string         `json:"engine"` // path of the socket
}

// LogValue leaves out what is not open.
func (a Addresses) LogValue() slog.Value {
	values := []slog.Attr{slog.Any("gossip", a.Gossip), slog.Any("peer", a.Peer)}
	if a.Data.IsValid() {
		values = append(values, slog.Any("data", a.Data))
	}
	return slog.GroupValue(append(values, slog.Any("http", a.HTTP), slog.String("engine", a.Engine))...)
}

// Node is one running node. It is safe for concurrent use.
type Node struct {
	config   *config.Config
	log      *slog.Logger
	version  string
	life     id.Life
	group    id.Group
	geometry page.Geometry
	ranks    []id.Rank
	started  time.Time

	arenas     map[id.Rank]memory.Arena
	tier       *tier
	seals      *memory.SealTable
	manager    *manager.Manager
	plog       *publish.Log
	board      *publish.Board
	owner      *owner
	peers      *peers
	follows    *follows
	sessions   *sessions
	transports []transfer.Transport  // in order of preference
	counting   []counting            // what each of them counts
	refused    []refusal             // those that are not used, and why
	linking    map[string]linkServer // those that open links by a call, by name
	links      links                 // that peers have opened so
	rdma       *rdmaread.Transport   // nil: not open
	cuda       *cuda.Runtime         // nil: no arena is in device memory
	staging    *transfer.Pool        // nil: the same
	reads      *transfer.Queue
	cluster    *cluster.Cluster
	keyring    *keyring
	identity   *identity.Identity // nil: nobody has to prove who it is
	handover   *handover
	addresses  Addresses
	metrics    *metrics

	ctx      context.Context //nolint:containedctx // the node's own life, ended by stop
	stop     context.CancelCauseFunc
	leaving  leaving
	joined   atomic.Bool
	kick     chan struct{} // one wish is as good as many
	flushing sync.Mutex    // one flush at a time
	probing  chan struct{} // one probe at a time: all write the sink
	swept    atomic.Int64  // unix nanoseconds of the last sweep

	mu      sync.Mutex
	closing bool
	work    sync.WaitGroup // Add under mu, never when closing

	begin   []func()       // what serves, once everything is open
	closers []func() error // in order of opening
	once    sync.Once
	err     error
}

// Start opens memory, transports, services, and the cluster, and returns when
// the node serves; it goes on joining in the background. What cannot be opened
// ends the start with nothing left open, before anybody has heard of this life.
func Start(ctx context.Context, o Options) (*Node, error) {
	store, err := openIncarnations(o.Config.Node.StateDir)
	if err != nil {
		return nil, err
	}
	n, err := start(ctx, o, store)
	for tries := 0; err == nil && tries < 3; tries++ {
		// Peers may know a later life than this clock can tell.
		higher, again := n.outlivedAtJoin(ctx)
		if !again {
			return n, nil
		}
		if err := n.Close(ctx); err != nil {
			return nil, err
		}
		store.atLeast = higher + 1
		n, err = start(ctx, o, store)
	}
	return n, err
}

func start(ctx context.Context, o Options, store *incarnations) (*Node, error) {
	c := o.Config
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	incarnation, err := store.next(time.Now())
	if err != nil {
		return nil, err
	}
	life := id.Life{Node: id.Node(c.Node.Name), Incarnation: incarnation}
	n := &Node{
		config: c, version: o.Version, life: life, group: id.Group(c.Node.Group), started: time.Now(),
		log:      o.Logger.With("self", life.String()),
		geometry: c.Geometry(),
		arenas:   make(map[id.Rank]memory.Arena),
		follows:  newFollows(),
		reads:    newReads(c.Transfer.Limits),
		kick:     make(chan struct{}, 1),
		probing:  make(chan struct{}, 1),
		leaving:  newLeaving(),
	}
	n.swept.Store(n.started.UnixNano())
	for _, r := range c.Arena.Ranks {
		n.ranks = append(n.ranks, id.Rank(r))
	}
	n.metrics = newMetrics(n)
	n.peers = newPeers(n)
	n.sessions = newSessions(n)
	// The node outlives the call that starts it.
	n.ctx, n.stop = context.WithCancelCause(context.WithoutCancel(ctx))
	openMemory := func(ctx context.Context) error { return n.openMemory(ctx, o.devices) }
	openHost := func(context.Context) error { return n.openHost(o.hook) }
	openTransports := func(context.Context) error { return n.openTransports(o.wrap) }
	for _, open := range []func(context.Context) error{
		n.openIdentity, n.openKeyring, openMemory, openHost, n.openManager, openTransports, n.openPeerService, n.openEngineService, n.openHTTP, n.openCluster,
	} {
		if err := open(ctx); err != nil {
			n.stop(err)
			return nil, errors.Join(err, n.closeAll())
		}
	}
	for _, begin := range n.begin {
		begin()
	}
	n.spawn(n.sweep)
	n.spawn(n.awaitJoined)
	if n.identity != nil {
		n.spawn(n.watchIdentity)
	}
	n.log.Info("node serves", "addresses", n.addresses)
	return n, nil
}

// Addresses are where the node is reached.
func (n *Node) Addresses() Addresses { return n.addresses }

// Life is this life of the node.
func (n *Node) Life() id.Life { return n.life }

// Done is closed when the node has given itself up or has left; see Err.
func (n *Node) Done() <-chan struct{} { return n.ctx.Done() }

// closeAll closes in reverse order of opening and waits for every goroutine.
func (n *Node) closeAll() error {
	var errs []error
	for _, c := range slices.Backward(n.closers) {
		errs = append(errs, c())
	}
	n.closers = nil
	return errors.Join(errs...)
}

// quiesce ends the node's own goroutines. It runs between the services, which
// start them, and the memory that they use.
func (n *Node) quiesce() error {
	n.peers.close()
	n.mu.Lock()
	n.closing = true
	n.mu.Unlock()
	n.work.Wait()
	return nil
}

// spawn runs f in a goroutine of the node's; false if the node is closing.
func (n *Node) spawn(f func()) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closing {
		return false
	}
	n.work.Go(f)
	return true
}

func (n *Node) openManager(context.Context) error {
	m, err := manager.New(manager.Options{
		Tokens: n.config.Arena.MaxSeqLen, Life: n.life, Geometry: n.geometry, Ranks: n.ranks, Host: n.tier.layout.Pages,
		Engine: n.config.Arena.Allocate == config.EngineAllocates,
	})
	if err != nil {
		return err
	}
	t := n.config.Timers
	n.manager = m
	n.plog = publish.NewLog(publish.LogOptions{Life: n.life, Words: maxPublications, Live: maxPublications, Fast: n.fast()})
	n.board = publish.NewBoard(publish.BoardOptions{Life: n.life, Grace: t.Grace, Fast: n.fast()})
	n.owner = newOwner(m, n.plog, n.seals, newHolds(holdTimers{
		hold: t.Hold, lease: t.Lease, maxHold: t.MaxHold, tombstone: t.Tombstone, live: maxPublications, readers: kvferrypb.MaxReaders,
	}), n.keyring, maxPublications)
	return nil
}

// fast says that intervals between nodes are divided by ten.
func (n *Node) fast() bool { return n.config.Cluster.Preset == "fast" }

// outlivedAtJoin waits a little for the cluster to list us, and says whether it
// remembers a later life of this name. That one is dead, or ends now.
func (n *Node) outlivedAtJoin(ctx context.Context) (id.Incarnation, bool) {
	ctx, cancel := context.WithTimeout(ctx, joinTime)
	defer cancel()
	_ = n.cluster.Joined(ctx) // with nobody there, nobody knows better
	newest := n.cluster.Newest()
	return newest, newest > n.life.Incarnation
}

// awaitJoined notes when the cluster lists us, and gives the node up when a
// newer life of it appears.
func (n *Node) awaitJoined() {
	if err := n.cluster.Joined(n.ctx); err == nil {
		n.joined.Store(true)
		n.log.Info("joined", "members", len(n.cluster.Members()))
	}
	select {
	case <-n.cluster.Fenced():
		n.stop(fmt.Errorf("%s: incarnation %d is in the cluster: %w", n.life, n.cluster.Newest(), ErrFenced))
	case <-n.ctx.Done():
	}
}

// remove ends a request on both sides: what it published ends by the owner's
// rule, what it reads stops, and that publication's owner is told the outcome:
// declined if nobody here will ever read it.
func (n *Node) remove(r id.Request, discard bool, outcome kvferrypb.CompleteItem_Outcome) error {
	// As one, so that nothing of the next life of the id is ended.
	n.sessions.mu.Lock()
	ends, kept, err := n.owner.remove(time.Now(), r, discard)
	delete(n.sessions.requests, r)
	f, _ := n.follows.detach(r, errRemoved)
	n.sessions.mu.Unlock()
	f.abandon(outcome)
	n.announceEnds(ends)
	if kept != "" {
		n.tier.wish(kept) // its readers may be waiting already
	}
	return err
}

// reset empties a request.
func (n *Node) reset(r id.Request, free bool) error {
	n.sessions.mu.Lock()
	ends, err := n.owner.reset(time.Now(), r, free)
	if err != nil { // it is as it was
		n.sessions.mu.Unlock()
		return err
	}
	f, _ := n.follows.detach(r, errRemoved)
	n.sessions.mu.Unlock()
	f.abandon(kvferrypb.CompleteItem_FAILED)
	n.announceEnds(ends)
	return nil
}
