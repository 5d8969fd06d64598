// Package cluster keeps membership and gossips bytes that it does not
// understand. It is the only importer of memberlist.
//
// A member is one life of one node ([id.Life]); memberlist's own name for it,
// which is new for every life, never leaves this package. So a restarted node
// is a new member at once, on the old address or another, and its former life
// is gone in the same moment, long before memberlist has found it dead. See
// roster.go.
//
// [Cluster.Broadcast] pushes an item at first sight to a few random members
// and offers it again through memberlist's gossip from a ring of ours; nothing
// promises that it arrives. A receiver that wants an item to travel on
// broadcasts it itself. Whoever owns the items repairs what was lost.
//
//	Broadcast → outbox → push → members              (outbox.go)
//	                       ↘ ring → memberlist        (ring.go)
//	memberlist → callbacks → inbox, roster → serve → Handler
//
// memberlist's callbacks copy and enqueue and do nothing else, since some of
// them run under its locks (callbacks.go). [Handler] is called by one goroutine
// of the cluster, serve.
//
// # Who gets in
//
// There are two locks. A gossip key opens packets and streams: without one
// nobody becomes a member, reads or forges a byte, or makes us hold more than a
// few MiB (stream.go). A certificate ([Options.Identity]) proves a name: with it
// streams are TLS, and whoever has not been called by its name and proved it is
// no member for us, gossip key or not (prove.go).
//
// What a gossip key alone can do: read and forge items, forge goodbyes, deaths,
// and newer lives, so have a member leave or a node fenced, and be gossiped to by
// memberlist; without certificates also get all other keys, and change them. With
// them keys travel over TLS only, between members that prove their names
// (fetch.go). Nothing that items say may therefore be
// believed further than as a hint. Packets can be recorded and sent again:
// membership and rings only ever move forward, items are their owner's business.
// A stranger can occupy the few streams that push/pull needs, and delay what is
// said about keys, so keep the port behind a firewall. A cluster without keys
// trusts everyone who reaches its port.
//
// Gossip keys are changed while all run, in three steps with a barrier each:
// add, use, remove ([Cluster.AddKey], rotate.go). A ring has a generation, and
// the newest one that a member hears of is the one that it uses; members that
// were away ask for it before they call, under whatever key they still share
// (envelope.go, tend.go). Packets are encrypted under random nonces, so of those
// under one key there should not be more than 2^32 in the whole cluster
// ([Stats].KeyPackets). Without certificates a new key travels under an old one:
// rotation is then no cure for one that was stolen.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
)

var (
	// ErrPort: the gossip port is taken; the text names it.
	ErrPort = errors.New("port is taken")
	// ErrTooLong: an item is over MaxItem, or a state over MaxState.
	ErrTooLong = errors.New("too long")
	// ErrUnknownMember: no other live member of that name.
	ErrUnknownMember = errors.New("unknown member")
	// ErrFull: the outbox is full; the item was dropped and counted.
	ErrFull = errors.New("outbox is full")
	// ErrFenced: another member lives under our name with a higher incarnation.
	ErrFenced = errors.New("a newer life of this node is in the cluster")
	ErrClosed = errors.New("cluster is closed")
	// ErrUntold: it may be a while until all know.
	ErrUntold = errors.New("may not have been heard yet")
)

// updateMax is how long a change of our metadata may take to reach a member.
const updateMax = time.Second

const (
	// MaxItem is the longest item in bytes.
	MaxItem = 1300
	// MaxState is the longest state in bytes.
	MaxState = 1 << 20
	// MaxLabel is the longest label in bytes. With it the longest items are pushed,
	// and not offered again.
	MaxLabel = id.MaxNode
)

// Member is a live member.
type Member struct {
	Life   id.Life
	Gossip netip.AddrPort
	Meta   Meta
	Self   bool
}

// Handler is called by one goroutine, in order, perhaps before Start has
// returned and never after Close has. It must not block for long, nor call
// Close or Leave; it owns the slices.
type Handler interface {
	// Items delivers the items of one message.
	Items(items [][]byte)
	// Joined: this life of the member is there. Of one node a newer life
	// replaces the older one, whose Left comes first.
	Joined(m Member)
	// Left: this life is gone: hide what it owns. It may come back, if it was
	// only out of reach. graceful says that it said goodbye.
	Left(m Member, graceful bool)
	// Updated: what the member tells of itself has changed, in the same life.
	Updated(m Member)
	// MergeState delivers what another member gave to SetState, at join and
	// from time to time.
	MergeState(state []byte)
}

// Options set up a Cluster. A zero field means its default.
type Options struct {
	Life      id.Life // required
	Meta      Meta
	Label     string         // of the cluster, at most MaxLabel bytes; nodes with another are strangers; default "kvferry"
	Bind      netip.AddrPort // required; port 0: any (the same for tcp and udp)
	Advertise netip.AddrPort // port 0: the bound one; default: the bound address, or the one from which the first seed is reached if that is unspecified
	Join      []string       // host:port of seeds; none: alone
	Ring      Ring           // gossip keys; none: plain
	// SaveRing keeps a ring before it is used; an error refuses it. It is called
	// by one goroutine at a time, of the cluster or of who changes the keys. nil:
	// rings are not kept.
	SaveRing func(Ring) error
	Identity *identity.Identity // who we are to others, and they to us, on streams; nil: nobody proves a name
	Fast     bool               // shorter durations, for tests
	Fanout   int                // members that an item is pushed to at first sight; default 4
	Again    int                // times it is offered after that; default 1, negative: never
	Linger   time.Duration      // how long an item waits for company in its packet; default 0
	Handler  Handler            // required
	Logger   *slog.Logger       // default: silent

	tune func(*memberlist.Config) // of tests: the network between members
}

// Stats are counters since the start, and gauges.
type Stats struct {
	ItemsOut     uint64 // given to Broadcast and Send, and accepted
	ItemsIn      uint64 // delivered to the Handler
	ItemsDropped uint64 // refused since the outbox was full
	RingDropped  uint64 // not offered again since the ring was full, or memberlist has never room for so long an item
	PushesFailed uint64 // packets of items that could not be sent to a member
	BytesOut     uint64 // on the wire, packets and streams
	BytesIn      uint64
	PacketsOut   uint64
	PacketsIn    uint64
	BadMessages  uint64 // could not be decoded, or came from a stranger: another key, none, or another label
	QueueDrops   uint64 // packets, messages, and states that found a queue full
	HandoffDrops uint64 // of them those in memberlist's own queue
	Refused      uint64 // announcements of members: stale, malformed, out of reach, or too many
	Collisions   uint64 // two names with one hash: the second was refused
	Conflicts    uint64 // one life at two addresses
	Diverged     uint64 // times our table had to be mended from memberlist's
	StreamsCut   uint64 // streams that were cut for being too long, or too slow to prove a name
	Strangers    uint64 // streams that were refused: no certificate, another's, or TLS on one side only
	Unreadable   uint64 // packets and streams that one side had no gossip key for

	Outbox, Ring int           // items that wait to be pushed, and to be offered again
	OutboxAge    time.Duration // of the oldest that waits to be pushed
	Members      int           // live ones, ourselves included

	// Keys are those on the ring. Of the packets under one key there should be no
	// more than 2^32 in the whole cluster, since nonces are random: KeyPackets are
	// ours since we use this one, at most. KeySaves are rings that SaveRing has
	// refused.
	Keys          int
	KeyGeneration uint64
	KeyPackets    uint64
	KeySaves      uint64
}

// Cluster is one member. It is safe for concurrent use.
type Cluster struct {
	life      id.Life
	bound     netip.AddrPort
	advertise netip.AddrPort
	fanout    int
	again     int
	linger    time.Duration
	time      timing
	handler   Handler
	log       *slog.Logger

	counters  *counters
	list      *memberlist.Memberlist
	transport *transport
	bridge    *bridge
	calls     *callbacks
	keys      *keyring
	outbox    outbox
	joining   joining
	leaving   leaving

	rotating    chan struct{} // a token: who holds it changes the gossip keys of all
	errands     chan errand   // rings to be fetched; nil: they come in packets
	ringTrouble hush

	done <-chan struct{} // closed by Close
	stop context.CancelFunc
	end  func() error // shutdown, once

	mu     sync.Mutex // guards what follows, and that nothing is added to work after closed
	meta   Meta
	closed bool
	left   bool
	work   sync.WaitGroup
}

// Start binds, and begins to join the seeds in the background, for ever. The
// error wraps [ErrPort] if the port is taken.
func Start(o Options) (*Cluster, error) {
	if err := o.check(); err != nil {
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	c, err := start(o)
	if err != nil {
		return nil, fmt.Errorf("start cluster: %w", err)
	}
	return c, nil
}

func start(o Options) (*Cluster, error) {
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	count := &counters{}
	tcp, udp, err := listen(o.Bind)
	if err != nil {
		return nil, err
	}
	t := newTransport(tcp, udp, o, count, log)
	advertise, err := advertised(o, t.bound)
	if err != nil {
		return nil, errors.Join(err, t.Shutdown())
	}
	t.advertise = advertise

	c := &Cluster{
		life: o.Life, meta: o.Meta, bound: t.bound, advertise: advertise,
		fanout: o.Fanout, again: max(o.Again, 0), linger: o.Linger, time: timings(o.Fast),
		handler: o.Handler, log: log, counters: count, transport: t,
		keys: newKeyring(o, count), rotating: make(chan struct{}, 1),
	}
	ctx, stop := context.WithCancel(context.Background())
	c.done, c.stop = ctx.Done(), stop
	c.end = sync.OnceValue(c.shutdown)
	c.outbox.wake = make(chan struct{}, 1)
	c.joining.init(o.Join)
	c.joining.check("", 0)
	c.leaving.init()
	c.calls = newCallbacks(o.Life, o.Meta, advertise.Addr(), count)
	c.calls.ring.most = offerBytes(o)
	if o.Identity != nil {
		c.calls.roster.proves = make(chan struct{}, 1)
		c.errands = make(chan errand, fetchQueue)
		t.reply = c.answerKeys
	}
	c.bridge = &bridge{log: log, roster: &c.calls.roster, count: count, keys: c.keys.hint}
	c.list, err = memberlist.Create(c.config(o))
	if err != nil {
		c.stop()
		return nil, errors.Join(err, t.Shutdown())
	}
	c.work.Go(c.serve)
	c.work.Go(c.push)
	c.work.Go(func() { c.join(ctx) })
	if !c.keys.plain() {
		c.work.Go(func() { c.tend(ctx) })
		if c.errands != nil {
			for range fetchers {
				c.work.Go(func() { c.fetch(ctx) })
			}
		}
	}
	if o.Identity != nil {
		for range provers {
			c.work.Go(c.prove)
		}
	}
	return c, nil
}

// Life is the one that was given to Start.
func (c *Cluster) Life() id.Life { return c.life }

// Gossip is the address that is advertised.
func (c *Cluster) Gossip() netip.AddrPort { return c.advertise }

// Broadcast sends an item to all, eventually. It copies it and does not block.
// The error wraps [ErrFull] if it was dropped, [ErrTooLong] if it is over
// [MaxItem], and [ErrFenced] once we are.
func (c *Cluster) Broadcast(item []byte) error {
	if err := checkItem(item); err != nil {
		return fmt.Errorf("broadcast: %w", err)
	}
	select {
	case <-c.done:
		return fmt.Errorf("broadcast: %w", ErrClosed)
	case <-c.Fenced():
		return fmt.Errorf("broadcast: %w", ErrFenced)
	default:
	}
	if !c.outbox.add(item) {
		c.counters.itemsDropped.Add(1)
		return fmt.Errorf("broadcast %d bytes: %w", len(item), ErrFull)
	}
	c.counters.itemsOut.Add(1)
	return nil
}

// Send sends items to one member now, by best effort. Nothing is sent if it
// returns an error about an item.
func (c *Cluster) Send(to id.Node, items ...[]byte) error {
	for _, item := range items {
		if err := checkItem(item); err != nil {
			return fmt.Errorf("send to %s: %w", to, err)
		}
	}
	if c.over() {
		return fmt.Errorf("send to %s: %w", to, ErrClosed)
	}
	p, ok := c.calls.roster.peer(to)
	if !ok {
		return fmt.Errorf("send to %s: %w", to, ErrUnknownMember)
	}
	for rest := items; len(rest) > 0; {
		var message []byte
		message, rest = pack(rest)
		if err := c.tell(p, message); err != nil {
			return fmt.Errorf("send to %s: %w", to, err)
		}
	}
	c.counters.itemsOut.Add(uint64(len(items)))
	return nil
}

// tell sends a message to a member, by best effort. Where packets are encrypted
// memberlist's checksum would prove nothing, and make the longest too long.
func (c *Cluster) tell(p peer, message []byte) error {
	if !c.keys.plain() {
		p.to.PMax = 0
	}
	return c.list.SendBestEffort(&p.to, message)
}

// Room is how many bytes the outbox takes now, [MaxRoom] if it is empty; many
// short items fill it sooner. The upper half is for all, the lower for what the
// owner has to say itself: whoever passes on items of others does so only while
// there is more than half of MaxRoom. They have others who pass them on.
func (c *Cluster) Room() int { return c.outbox.room() }

// SetState replaces what we tell others of our owner's state by push/pull, at
// join and from time to time; at most [MaxState] bytes. It copies.
func (c *Cluster) SetState(state []byte) error {
	if len(state) > MaxState {
		return fmt.Errorf("set state of %d bytes, want at most %d: %w", len(state), MaxState, ErrTooLong)
	}
	c.calls.setState(state)
	return nil
}

// Fenced is closed when another member lives under our name with a higher
// incarnation: this life is over, and its owner stops, or starts again with an
// incarnation over [Cluster.Newest].
func (c *Cluster) Fenced() <-chan struct{} { return c.calls.roster.fenced }

// Newest is the highest incarnation of our name that we have heard of, ours
// included. Members answer it at join from what they remember.
func (c *Cluster) Newest() id.Incarnation { return c.calls.roster.newestOwn() }

// SetDraining tells all members that we take nothing new and will leave. Once is
// enough. If the error wraps [ErrUntold] it was not seen to reach one in time, and
// will be told with what members exchange from time to time.
func (c *Cluster) SetDraining() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return fmt.Errorf("set draining: %w", ErrClosed)
	}
	if c.meta.Draining {
		c.mu.Unlock()
		return nil
	}
	c.meta.Draining = true
	c.calls.setMeta(c.meta)
	c.mu.Unlock()
	// A duration of 0 would wait for ever.
	if err := c.list.UpdateNode(updateMax); err != nil {
		return fmt.Errorf("set draining: %w: %w", ErrUntold, err)
	}
	return nil
}

// Members are the live members, ourselves included, by name.
func (c *Cluster) Members() []Member {
	c.mu.Lock()
	self := Member{Life: c.life, Gossip: c.advertise, Meta: c.meta, Self: true}
	c.mu.Unlock()
	return c.calls.roster.list(self)
}

// Stats returns the counters.
func (c *Cluster) Stats() Stats {
	s := c.counters.stats()
	s.Outbox, s.OutboxAge = c.outbox.state(time.Now())
	s.Ring = c.calls.ring.len()
	_, own := c.keys.now()
	s.Keys, s.KeyGeneration = len(own.ids), own.generation
	s.Members = 1 + c.calls.roster.len()
	return s
}

// Close ends everything and waits. It says no goodbye. It may be called twice.
func (c *Cluster) Close() error { return c.end() }

func (c *Cluster) shutdown() error {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.stop()
	c.transport.interrupt()
	c.work.Wait()
	// memberlist waits for none of its goroutines. Those that serve a stream
	// are waited for by the transport; a probe may linger for a second, and
	// finds callbacks and log closed.
	c.calls.close()
	c.bridge.closed.Store(true)
	return c.list.Shutdown()
}

func (c *Cluster) over() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// serve alone calls the Handler.
func (c *Cluster) serve() {
	tick := time.NewTicker(c.time.reconcile)
	defer tick.Stop()
	fenced := c.Fenced()
	for {
		select {
		case <-fenced:
			fenced = nil
			c.log.Error("a newer life of this node is in the cluster", "node", c.life.Node, "incarnation", uint64(c.life.Incarnation), "newest", uint64(c.Newest()))
		case <-c.done:
			return
		case <-c.calls.wake:
		case <-tick.C:
			c.reconcile()
		}
		c.attend()
		states, messages := c.calls.inbox.take()
		for _, s := range states {
			if c.over() {
				return
			}
			c.handler.MergeState(s)
		}
		for i, b := range messages {
			if c.over() {
				return
			}
			if i%64 == 63 { // a flood of items must not delay a death
				c.attend()
			}
			c.receive(b)
		}
	}
}

// attend answers calls, and tells the Handler what has changed in the roster.
func (c *Cluster) attend() {
	for _, b := range c.calls.inbox.takeCalls() {
		if c.over() {
			return
		}
		c.receive(b)
	}
	c.settle()
}

// settle tells the Handler what has changed in the roster.
func (c *Cluster) settle() {
	for _, ch := range c.calls.roster.settle(time.Now(), c.time.goodbye) {
		switch {
		case ch.joined:
			c.log.Info("member joined", "node", ch.member.Life.Node, "incarnation", uint64(ch.member.Life.Incarnation), "address", ch.member.Gossip)
			c.askRing(c.keys.idle, ch.member.Gossip)
			c.handler.Joined(ch.member)
		case ch.updated:
			c.log.Info("member updated", "node", ch.member.Life.Node, "incarnation", uint64(ch.member.Life.Incarnation), "draining", ch.member.Meta.Draining)
			c.handler.Updated(ch.member)
		default:
			c.log.Info("member left", "node", ch.member.Life.Node, "incarnation", uint64(ch.member.Life.Incarnation), "graceful", ch.graceful)
			c.handler.Left(ch.member, ch.graceful)
			if !ch.graceful {
				poke(c.joining.loss)
			}
		}
	}
}

// reconcile compares the roster, which lives on callbacks, with memberlist's
// own list, and cleans it.
func (c *Cluster) reconcile() {
	members := c.list.Members()
	names := make([]string, len(members))
	for i, m := range members {
		names[i] = m.Name // the one field that memberlist never writes again
	}
	c.calls.roster.reconcile(names, time.Now())
}

// receive handles one message of another member.
func (c *Cluster) receive(b []byte) {
	m, err := decodeMessage(b)
	if err != nil {
		c.counters.badMessages.Add(1)
		return
	}
	switch m.kind {
	case kindItems:
		c.counters.itemsIn.Add(uint64(len(m.items)))
		c.handler.Items(m.items)
	case kindRingAsk, kindRingAnswer: // only in envelopes
		c.counters.badMessages.Add(1)
	case kindAsk:
		c.answer(m)
	case kindAnswer:
		c.answered(m)
	case kindBye:
		c.calls.roster.bye(m.life, time.Now())
		c.settle()
		c.answer(m)
	}
}
