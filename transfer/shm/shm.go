// Package shm is a transport between nodes of one host: the reader maps the
// owner's arenas and seal table, and copies.
//
// # Meeting
//
// Nodes that may read from each other share a rendezvous directory. Each has a
// unix socket of a random name in it; the descriptor tells the host's boot id
// and that name. A reader of the same boot that finds the name in its own
// directory is on the same host and is meant to be here, whatever network, PID,
// or mount namespace either is in. The directory, and the users on both ends of
// the socket, are what access is decided by: the directory is closed to others,
// and both ends serve their own user and root alone. The descriptor holds for a
// life: where somebody has removed the socket, or the directory, its owner makes
// it anew within seconds, under the same name.
//
// # Handshake
//
// Numbers are big endian. A frame is a header of 8 bytes and a body:
//
//	0  3  "kvs"
//	3  1  protocol version, 1
//	4  1  kind
//	5  1  zero
//	6  2  bytes of the body
//
// The kinds, and what the body is:
//
//	1 hello    reader to owner, once: owner's node name, owner's incarnation,
//	           reader's node name, reader's incarnation. A name is a byte of
//	           length and the bytes, an incarnation 8 bytes.
//	2 welcome  owner to reader: owner's node name, incarnation, number of arenas
//	           (1), each by rank in ascending order: rank (2), bytes (8).
//	3 file     owner to reader, behind the welcome: the seal table first, then
//	           every arena in the order of the welcome; its body is the rank (2),
//	           0xffff for the seal table. The memfd goes with the frame
//	           (SCM_RIGHTS), open for reading alone.
//	4 refusal  owner to reader, instead of a welcome: why (1): 1 the hello was
//	           meant for another life, 2 the reader is another user's, 3 there are
//	           too many readers. The connection ends.
//
// Then neither says anything. The connection stands for as long as the reader
// may read: an owner that closes ends its side, and waits for the reader to end
// the other, which it does when nothing reads the mapping any more. Whatever
// does not follow the protocol ends the connection without an answer.
//
// # Reading
//
// A read looks at the seal words, copies straight from the peer's arena into
// ours, and looks at the words again behind the fences of [memory.SealTable.Load].
// A large one is copied by several goroutines, piece by piece; between two
// pieces everybody looks at what may end the read, and others get their turn.
// The peer's memory is sealed against shrinking and stays mapped until the last
// copy has returned, so that a peer that dies takes nobody with it.
package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/transfer"
)

// Name is [Transport.Name].
const Name = "shm"

// Options set up a Transport. A zero field means its default.
type Options struct {
	Local   transfer.Local  // required; the regions must outlive the transport
	Dir     string          // required: the rendezvous directory, which peers of this host share; made if it is missing
	Workers int             // copies that run at once, of all reads together; default half of the processors, 1 to 4
	Cached  bool            // what lands is read by this process at once: copy through the caches
	Limits  transfer.Limits // of the handshake and of reading; Stall is how long Close waits for readers
	Logger  *slog.Logger    // default: silence

	lookEvery time.Duration // from one look at our socket in the directory to the next; default 5 s
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	if o.Workers <= 0 {
		o.Workers = max(1, min(4, runtime.GOMAXPROCS(0)/2))
	}
	if o.lookEvery <= 0 {
		o.lookEvery = 5 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Transport is [transfer.Transport] over shared memory.
type Transport struct {
	local      transfer.Local
	limits     transfer.Limits
	cached     bool
	log        *slog.Logger
	host       string // the boot id
	dir        *directory
	descriptor []byte
	workers    workers
	server     *server
	stats      counters

	mu     sync.Mutex
	closed bool
	links  map[*link]struct{}
}

// Listen opens the rendezvous directory, and serves local until Close. It wraps
// [transfer.ErrUnavailable] where the machine or the directory will not do.
func Listen(o Options) (*Transport, error) {
	o = o.withDefaults()
	t, err := listen(o)
	if err != nil {
		return nil, fmt.Errorf("listen shm: %w", err)
	}
	return t, nil
}

func listen(o Options) (*Transport, error) {
	switch {
	case o.Local.Seals == nil:
		return nil, errors.New("no seal table")
	case o.Dir == "":
		return nil, errors.New("no rendezvous directory")
	}
	if err := o.Local.Life.Node.Validate(); err != nil {
		return nil, err
	}
	for r, a := range o.Local.Arenas {
		if err := r.Validate(); err != nil || a == nil {
			return nil, fmt.Errorf("arena of rank %d: %w", int(r), cmp.Or(err, errors.New("none")))
		}
	}
	host, err := bootID()
	if err != nil {
		return nil, err
	}
	dir, err := openDirectory(o.Dir)
	if err != nil {
		return nil, err
	}
	dir.sweep(o.Logger)
	name := newName()
	listener, err := dir.listen(name)
	if err != nil {
		return nil, errors.Join(err, dir.close())
	}
	o.Local.Arenas = maps.Clone(o.Local.Arenas)
	t := &Transport{
		local: o.Local, limits: o.Limits, cached: o.Cached, log: o.Logger, host: host, dir: dir,
		descriptor: descriptor{host: host, socket: name}.encode(),
		workers:    workers{slots: make(chan struct{}, o.Workers)}, links: map[*link]struct{}{},
	}
	t.server = newServer(t, listener, name)
	t.server.start(o.lookEvery)
	return t, nil
}

// Name is [transfer.Transport.Name].
func (t *Transport) Name() string { return Name }

// Descriptor is [transfer.Transport.Descriptor].
func (t *Transport) Descriptor() []byte { return slices.Clone(t.descriptor) }

// Open is [transfer.Transport.Open]. The handshake has the dial time, 2 s at most;
// mapping what it brought takes about a tenth of a second a GiB on small pages, and
// ends early with ctx only between two arenas.
func (t *Transport) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	l, err := t.open(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("open a shm link to %s: %w", peer.Life, err)
	}
	return l, nil
}

func (t *Transport) open(ctx context.Context, peer transfer.Peer) (*link, error) {
	if err := peer.Life.Node.Validate(); err != nil {
		return nil, err
	}
	d, err := parseDescriptor(peer.Descriptor)
	if err != nil {
		return nil, err
	}
	if d.host != t.host {
		return nil, fmt.Errorf("the peer is on another host, or the host has been started anew: %w", transfer.ErrUnavailable)
	}
	l := &link{t: t, peer: peer, address: t.dir.address(d.socket), ended: make(chan struct{}), gone: make(chan struct{})}
	// A transport that closes ends what is being opened too.
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, fmt.Errorf("transport: %w", transfer.ErrClosed)
	}
	t.links[l] = struct{}{}
	t.mu.Unlock()
	if err := l.open(ctx, d.socket); err != nil {
		return nil, err
	}
	return l, nil
}

// Close is [transfer.Transport.Close]: links first, then the server, which
// gives readers the stall time to let go of what they map.
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
	return t.dir.close()
}

func (t *Transport) forget(l *link) {
	t.mu.Lock()
	delete(t.links, l)
	t.mu.Unlock()
}

// Stats is a snapshot of what a transport has done since Listen.
type Stats struct {
	Reads     uint64 // reads of our links that held
	ReadBytes uint64 // bytes that landed, of failed reads too
	Stale     uint64 // reads that ended stale
	Errors    uint64 // reads that failed otherwise

	Served    uint64 // links that peers have opened to us
	Garbage   uint64 // connections ended because of what they sent
	Strangers uint64 // connections ended because they meant another life, or are another user's
	Evicted   uint64 // connections ended before they had said who they are, to make room
	Refused   uint64 // connections refused because there are too many links

	Links    int // open now, of ours
	Accepted int // connections open now, by peers
}

type counters struct {
	reads, readBytes, stale, errors atomic.Uint64
	served, garbage, strangers      atomic.Uint64
	evicted, refused                atomic.Uint64
}

// Stats may be called at any time.
func (t *Transport) Stats() Stats {
	s := &t.stats
	t.mu.Lock()
	links := len(t.links)
	t.mu.Unlock()
	return Stats{
		Reads: s.reads.Load(), ReadBytes: s.readBytes.Load(), Stale: s.stale.Load(), Errors: s.errors.Load(),
		Served: s.served.Load(), Garbage: s.garbage.Load(), Strangers: s.strangers.Load(),
		Evicted: s.evicted.Load(), Refused: s.refused.Load(),
		Links: links, Accepted: t.server.accepted(),
	}
}

var _ transfer.Transport = (*Transport)(nil)
