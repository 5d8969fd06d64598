// Package tcp is the transport that every machine has: it reads from a peer's
// arenas over TCP.
//
// A [Transport] serves this node's arenas and opens links to peers. A link is a
// small pool of connections to one life of one peer, and every read has a
// connection for itself, a large one several, its lanes: to cancel a read is to
// close its connections, and Read returns after the last of the receiving calls
// has returned. So nothing lands later, and no other read is disturbed. Each lane
// asks for the next piece when it may, and its owner gives a verdict on every
// piece; the read holds if all do, and ends with the first lane that fails. The
// bytes go from the owner's arena by writev and into the reader's by readv;
// never by sendfile, splice or zero copy, which would read the pages after the
// seal words were looked at.
//
// Arenas in the memory of a device, on either side, go through pinned buffers
// ([Options.Staging]): the owner's device copies the next piece of an answer while
// one is on the wire, the reader's one while the next is received. The seal words
// are looked at when the owner's last copy is over, and Read returns when the
// reader's are. On the wire nothing tells where an arena lies.
//
// With [Options.Identity] the frames go inside of TLS 1.3, and each side proves
// with its certificate that it is the node that it says it is, before a byte is
// given. The owner's bytes are encrypted from where they are and the reader's
// decrypted by the call that copies them to their place, so all that is said
// above holds. A connection outlives the certificates that it began with.
//
// # Frames
//
// Numbers are big endian. Every frame begins with a header of 32 bytes, in both
// directions with the incarnation of the owner, that is, of the side that
// accepted the connection:
//
//	 0  3  magic "kvf"
//	 3  1  protocol version, 1
//	 4  1  kind
//	 5  3  zero
//	 8  8  incarnation of the owner
//	16  8  request id; 0 in hello and welcome
//	24  4  length: bytes that follow the header
//	28  4  read: number of copies; verdict: the verdict; else 0
//
// The kinds, by number, and what follows the header:
//
//	1 hello    reader to owner, first: owner's node name, reader's node name,
//	           reader's incarnation (8). A name is its length (1) and its bytes.
//	2 welcome  owner to reader, the answer: owner's node name, then the owner's
//	           bounds of one request, 4 bytes each and none 0: bytes, copies,
//	           seals, requests that may be under way on the connection.
//	3 read     reader to owner: number of seals (4); each seal: index (4),
//	           value (8); each copy: rank (4), bytes (4), offset in the rank's
//	           arena (8). At least one seal; no copy of 0 bytes; without a copy
//	           it asks for the verdict alone.
//	4 data     owner to reader: the bytes of the copies, in their order, nothing
//	           between them.
//	5 verdict  owner to reader: nothing follows.
//
// The verdicts: 1 held, 2 stale, 3 range, 4 identity, 5 unproven, 6 memory (the
// owner could not read its own, and what it has sent of it is void). A read is answered by one
// data frame and one verdict, or, if not a byte is given, by a verdict alone,
// which then is not "held". Answers come in the order of the reads. The owner
// looks at the seal words before the first byte (stale: not a byte is given),
// and again after the last byte was copied out of its memory, for the verdict
// that ends the answer. A read holds if every verdict says held. A word that is
// 0 is held by nobody, whatever the seal.
//
// An owner that is not the life that hello or read asks for answers with the
// verdict identity and closes the connection; its header then tells who it is.
// One that speaks TLS answers a hello for a node that the reader's certificate
// does not name, or that is not allowed, with the verdict unproven, and closes
// the connection. Whatever else does not follow the protocol ends the
// connection without an answer.
//
// # The descriptor
//
// Text, the words separated by one space: the protocol version; "tls", if the
// data port speaks that, else nothing; a word that is equal for two nodes that
// share a loopback network, "-" if unknown; then up to 8 addresses HOST:PORT,
// IPv6 in brackets, the first that the reader has a route to is dialled. A
// loopback address is for readers with the same word only.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/transfer"
)

// Name is [Transport.Name].
const Name = "tcp"

// DefaultLanes is what a machine of two cores was best with over loopback.
const DefaultLanes = 2

// ErrPort: the port that was asked for cannot be had.
var ErrPort = errors.New("port not available")

// Options set up a Transport. A zero field means its default.
type Options struct {
	Local     transfer.Local  // required; the regions must outlive the transport
	Bind      netip.AddrPort  // required; port 0 takes a free one
	Advertise netip.AddrPort  // what peers dial; default: the bound address, or the routable one of this machine; port 0 means the bound port
	Limits    transfer.Limits // of dialling and reading; its Stall and total time also bound how slowly a reader may take an answer

	MaxInFlight int           // requests under way on one connection, as reader and as owner; default 4, at most 1024
	MaxConns    int           // accepted connections, half of which may be strangers that shake hands; default 512
	LinkConns   int           // connections of one link, which is how many of its reads run at once; default 4, or two reads of Lanes
	Lanes       int           // connections of those that share one large read, if they are free; default [DefaultLanes]
	Idle        time.Duration // how long an accepted connection may wait for a request; default 10 min

	Staging int64 // bytes of pinned host memory, half for serving and half for reading, where arenas are device memory; default [transfer.DefaultStaging], at least 1 MiB

	Identity *identity.Identity // with it the data port speaks TLS and nothing else, here and at every peer; default: no TLS

	Logger *slog.Logger // default: silence
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	if o.MaxInFlight <= 0 {
		o.MaxInFlight = 4
	}
	o.MaxInFlight = min(o.MaxInFlight, maxInFlight)
	if o.Lanes <= 0 {
		o.Lanes = DefaultLanes
	}
	if o.MaxConns <= 0 {
		o.MaxConns = 512
	}
	if o.LinkConns <= 0 {
		o.LinkConns = max(4, 2*o.Lanes)
	}
	if o.Staging <= 0 {
		o.Staging = transfer.DefaultStaging
	}
	if o.Idle <= 0 {
		o.Idle = 10 * time.Minute
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Transport is [transfer.Transport] over TCP.
type Transport struct {
	local      transfer.Local
	limits     transfer.Limits
	inFlight   int
	linkConns  int
	lanes      int
	identity   *identity.Identity
	log        *slog.Logger
	machine    string
	bound      netip.AddrPort
	advertised []netip.AddrPort
	server     *server
	staging    *staging // nil: arenas are host memory
	free       func() error
	stats      counters

	mu     sync.Mutex
	closed bool
	links  map[*link]struct{}
}

// Listen binds, and serves local until Close. A port that is taken is an error
// that names it and wraps [ErrPort].
func Listen(o Options) (*Transport, error) {
	o = o.withDefaults()
	switch {
	case o.Local.Seals == nil:
		return nil, errors.New("listen tcp: no seal table")
	case !o.Bind.IsValid():
		return nil, errors.New("listen tcp: no address to bind")
	}
	if err := o.Local.Life.Node.Validate(); err != nil {
		return nil, fmt.Errorf("listen tcp: %w", err)
	}
	network := "tcp"
	if o.Bind.Addr().Unmap().Is4() {
		network = "tcp4" // else 0.0.0.0 would be IPv6 too
	}
	listener, err := net.ListenTCP(network, net.TCPAddrFromAddrPort(o.Bind))
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EACCES) {
			err = fmt.Errorf("%w: %w", ErrPort, err)
		}
		return nil, fmt.Errorf("listen on port %d: %w", o.Bind.Port(), err)
	}
	t, err := serve(listener, o)
	if err != nil {
		_ = listener.Close() // the first error tells
		return nil, fmt.Errorf("listen tcp: %w", err)
	}
	return t, nil
}

// serve starts a transport on a listener that is open.
func serve(listener *net.TCPListener, o Options) (*Transport, error) {
	bound, err := netip.ParseAddrPort(listener.Addr().String())
	if err != nil {
		return nil, err
	}
	bound = netip.AddrPortFrom(bound.Addr().Unmap(), bound.Port())
	addresses, err := advertised(o.Advertise, bound)
	if err != nil {
		return nil, err
	}
	o.Local.Arenas = maps.Clone(o.Local.Arenas)
	var staged *staging
	if transfer.Staged(o.Local.Arenas) {
		if staged, err = newStaging(o.Local.Arenas, o.Staging, o.Logger); err != nil {
			return nil, err
		}
	}
	t := &Transport{
		local: o.Local, limits: o.Limits, inFlight: o.MaxInFlight, linkConns: o.LinkConns, lanes: o.Lanes, identity: o.Identity, log: o.Logger,
		machine: machine(), bound: bound, advertised: addresses, links: map[*link]struct{}{},
		staging: staged, free: sync.OnceValue(staged.close),
	}
	t.server = &server{
		t: t, listener: listener, idle: o.Idle, max: o.MaxConns, conns: map[*served]struct{}{},
		offer: welcome{owner: o.Local.Life, bytes: maxFrameBytes, copies: maxCopies, seals: maxSeals, inFlight: uint32(o.MaxInFlight)},
	}
	t.server.ctx, t.server.end = context.WithCancel(context.Background())
	if o.Identity != nil {
		t.server.tls = largeRecords(o.Identity.Server(identity.Data))
	}
	t.server.work.Add(1)
	go t.server.accept()
	return t, nil
}

// Name is [transfer.Transport.Name].
func (t *Transport) Name() string { return Name }

// Descriptor is [transfer.Transport.Descriptor].
func (t *Transport) Descriptor() []byte {
	return descriptor(t.identity != nil, t.machine, t.advertised)
}

// Bound is where the server listens.
func (t *Transport) Bound() netip.AddrPort { return t.bound }

// Advertised is what peers are told to dial.
func (t *Transport) Advertised() []netip.AddrPort { return slices.Clone(t.advertised) }

// Open is [transfer.Transport.Open]. The connection that it makes is kept for
// the first read.
func (t *Transport) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	l, err := t.open(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("open a tcp link to %s: %w", peer.Life, err)
	}
	return l, nil
}

func (t *Transport) open(ctx context.Context, peer transfer.Peer) (*link, error) {
	if err := peer.Life.Node.Validate(); err != nil {
		return nil, err
	}
	addresses, err := parseDescriptor(peer.Descriptor, t.identity != nil, t.machine)
	if err != nil {
		return nil, err
	}
	l := newLink(t, peer, addresses)
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, fmt.Errorf("transport: %w", transfer.ErrClosed)
	}
	t.links[l] = struct{}{}
	t.mu.Unlock()
	if err := l.warm(ctx); err != nil {
		_ = l.Close() // returns nil
		return nil, err
	}
	return l, nil
}

// Close is [transfer.Transport.Close]: links first, then the server, then the
// memory that both stage through.
func (t *Transport) Close() error {
	t.mu.Lock()
	t.closed = true
	links := slices.Collect(maps.Keys(t.links))
	t.mu.Unlock()
	var work sync.WaitGroup
	for _, l := range links {
		work.Go(func() { _ = l.Close() }) // returns nil
	}
	t.server.close()
	work.Wait()
	return t.free()
}

func (t *Transport) forget(l *link) {
	t.mu.Lock()
	delete(t.links, l)
	t.mu.Unlock()
}

func (t *Transport) hangUp(c *dialled) {
	c.abort()
	t.stats.dialled.Add(-1)
}

// Stats is a snapshot of what a transport has done since Listen.
type Stats struct {
	Reads     uint64 // reads of our links that held
	ReadBytes uint64 // bytes that landed, of failed reads too
	Stale     uint64 // reads that ended stale
	Errors    uint64 // reads that failed otherwise

	Served      uint64 // answers with bytes given to peers; a read is one or several
	ServedBytes uint64
	ServedStale uint64 // requests refused or voided because a seal did not hold
	OutOfRange  uint64 // requests refused because they lie outside of a region
	Garbage     uint64 // connections ended because of what they sent
	Strangers   uint64 // connections ended because they meant another life, or for who they are
	Unproven    uint64 // those of them that have no certificate, or one that is refused
	Evicted     uint64 // waiting connections closed to make room
	Refused     uint64 // connections refused because all others were at work

	Gathered  uint64 // bytes copied from device memory, to be served
	Scattered uint64 // bytes copied to device memory, that were read
	Staging   int64  // bytes of host memory that they go through; 0: arenas are host memory
	Pinned    bool   // that the devices could pin it

	Accepted int // connections open now, by peers
	Dialled  int // connections open now, by our links
}

type counters struct {
	reads, readBytes, stale, errors       atomic.Uint64
	served, servedBytes, servedStale      atomic.Uint64
	outside, garbage, strangers, unproven atomic.Uint64
	evicted, refused                      atomic.Uint64
	gathered, scattered                   atomic.Uint64
	dialled                               atomic.Int64
}

// Stats may be called at any time.
func (t *Transport) Stats() Stats {
	s := &t.stats
	t.server.mu.Lock()
	accepted := len(t.server.conns)
	t.server.mu.Unlock()
	all := Stats{
		Reads: s.reads.Load(), ReadBytes: s.readBytes.Load(), Stale: s.stale.Load(), Errors: s.errors.Load(),
		Served: s.served.Load(), ServedBytes: s.servedBytes.Load(), ServedStale: s.servedStale.Load(),
		OutOfRange: s.outside.Load(), Garbage: s.garbage.Load(), Strangers: s.strangers.Load(), Unproven: s.unproven.Load(),
		Evicted: s.evicted.Load(), Refused: s.refused.Load(),
		Gathered: s.gathered.Load(), Scattered: s.scattered.Load(),
		Accepted: accepted, Dialled: int(s.dialled.Load()),
	}
	if t.staging != nil {
		all.Staging, all.Pinned = t.staging.bytes(), t.staging.pinned
	}
	return all
}

// count counts one read of a link.
func (t *Transport) count(r *outcome) {
	t.stats.readBytes.Add(uint64(r.landed))
	switch {
	case r.err == nil:
		t.stats.reads.Add(1)
	case errors.Is(r.err, transfer.ErrStale):
		t.stats.stale.Add(1)
	default:
		t.stats.errors.Add(1)
	}
}

var _ transfer.Transport = (*Transport)(nil)
