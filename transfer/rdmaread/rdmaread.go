// Package rdmaread is a transport over RDMA: the reader's device reads the
// owner's memory by itself. No processor of the owner takes part once a queue
// pair is there.
//
// # Meeting
//
// A transport registers its arenas and its seal table with every device that it
// uses. Its descriptor tells the ports of these devices, and the addresses by
// which they may be reached. Open pairs each port of ours with one of the
// peer's: a path. A path has several lanes. A lane is one reliable queue pair on
// each side, with a completion queue, a place for seal words, and one [Call].
//
// For each lane the reader says hello and the owner answers, once; then the Call
// carries nothing, unless the owner's memory is staged. Numbers are big endian, addresses
// are 16 bytes (IPv4 mapped), a life is a byte of length, the node's name, and 8
// bytes of incarnation. A message begins with "kvr", the version (1), and its
// kind (1):
//
//	1 descriptor  life; ports (1), each: name of the device (1 and bytes), link
//	              layer (1: 1 InfiniBand, 2 Ethernet), reads served at once of a
//	              queue pair (1), LID (2), addresses (1 and 16 each)
//	2 hello       generation (8), owner's life, reader's life, place in the
//	              descriptor of the port asked for (1), end
//	3 answer      generation (8), owner's life, end, seal table: region; arenas
//	              (1), each by rank in ascending order: rank (1), region. Where an
//	              arena is staged: ring: region; its buffers (1); staged arenas
//	              (1), each by rank in ascending order: rank (1), bytes (8)
//	4 refusal     generation (8), reason (1)
//	5 gather      number (8); stretches (2), each: rank (1), offset (8), bytes (4)
//	6 gathered    number (8); why not (1 and bytes; none: it is there)
//
//	end           queue pair number (4), first packet number (4), address (16),
//	              LID (2), link layer (1), MTU (1: 1 is 256 bytes, 5 is 4096),
//	              reads at once (1)
//	region        address (8), bytes (8), bytes of a slice (8), a key (4) for
//	              each slice
//
// The generation grows by one an attempt of the reader's transport. An answer of
// another generation, or of another life, programs no queue pair.
//
// The owner's queue pair lives as long as the Call, and serves reads alone.
//
// # Reading
//
// A read is cut into windows, which the lanes take as they are free, each window
// a batch of the package rdma. When every lane has returned, and so every byte
// has landed, one lane reads the seal words anew. A lane belongs to one read for
// a window, then to whoever has waited longest. Of all links together so many
// windows begin on a port, in the order of asking; one that takes long counts no
// more after a moment, nor does one of a path that has failed, so that peers that
// answer nothing take no turns from others.
//
// What goes wrong on a lane breaks its queue pair: nothing can land through it
// any more once it has been drained or destroyed, and only then is it given up.
// What it had not landed goes to other lanes, or to a fresh queue pair. A read
// that is canceled, or stalls, breaks the lanes that carry its windows at that
// moment, and no others.
//
// # Memory of devices
//
// An arena in the memory of a device is registered by a dma-buf, else by its
// address where the kernel has nvidia_peermem, and is then read and written like
// any other: it is flushed between the last completion and the seal words. Where
// neither works it is staged, by the side whose arena it is:
//
// A reader that stages lets windows land in pinned buffers of a pool, which are
// scattered into the arena while others are read. A hand of a read takes its first
// buffer before it takes a lane, and further ones only if they are free, so that
// nobody who has a lane or a buffer waits for another buffer.
//
// An owner that stages gives each lane a ring of pinned buffers, and the reader
// asks for stretches over the Call: the owner gathers them into the next buffer,
// and answers; the reader reads the buffer by the lane. Several are under way. A
// ring is its lane's alone until the lane's queue pair has been destroyed and
// every gather has ended; where there is no room for one there is no lane.
package rdmaread

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// Name is [Transport.Name].
const Name = "rdma"

// Bounds of what a transport holds.
const (
	maxAccepted      = 8192 // queue pairs of peers
	maxLanesOfReader = 256  // of one of them
	maxLanes         = 64   // of a link
	maxAdmitting     = 16   // handshakes that an owner works on at once; others wait
)

// Call is a conversation with the same transport of a peer: one hello and its
// answer, and, where that one stages, a question at times, of at most 16 KiB, and
// its answer. There is one for each lane, and its life is that of both queue pairs.
type Call interface {
	// Send asks the peer's Serve something. It does not wait for the peer while
	// at most 16 questions have no answer; the end of ctx ends the call. It is
	// called by one goroutine at a time, and may keep nothing of the message.
	Send(ctx context.Context, question []byte) error
	// Answers are those to the questions, in order. It need not be closed.
	Answers() <-chan []byte
	Ended() <-chan struct{} // closed when the peer has ended it, or is gone
	Close() error           // ends it; the peer's Serve is told
}

// Options set up a Transport. A zero field means its default.
type Options struct {
	Local transfer.Local // required; the arenas must outlive the transport
	// Call is required. It says hello to exactly this life of a peer, whose node
	// gives it to [Transport.Serve], and returns what that answered; with an
	// error nothing of the conversation is left. The error wraps
	// [transfer.ErrIdentity] if another life was reached. It returns soon after
	// ctx has ended.
	Call func(ctx context.Context, peer transfer.Peer, hello []byte) (answer []byte, call Call, err error)

	Devices      []string // "mlx5_0" for its active ports, or "mlx5_0:1" for one; default: every active port, 16 at most
	GIDIndex     *int     // in the address table of each port; default: chosen by the peer's address
	TrafficClass uint8    // of the packets: the DSCP, shifted left by two
	ServiceLevel uint8    // of InfiniBand, 0 to 15
	Timeout      uint8    // 4.096 us * 2^Timeout until a packet is sent again, 1 to 31; default 14
	RetryCount   uint8    // 1 to 6 times; default 6. 7 would be for ever on Soft-RoCE.
	MTU          int      // bytes of a packet at most: 256, 512, 1024, 2048, or 4096; default: what both ports have
	Reads        int      // reads under way at once on a queue pair, 1 to 128; default 16, and what both devices can
	QueuePairs   int      // lanes of a path, 1 to 64; default: as many as make 32 reads at once, 2 to 8
	Library      string   // path of libibverbs.so.1; default: as the loader finds it
	Staging      int64    // bytes of host memory to stage device memory in, half for rings, half for reads: at least 4 MiB where something is staged; default [transfer.DefaultStaging]
	Limits       transfer.Limits
	Logger       *slog.Logger // default: silence

	hold time.Duration // from a port's return until it is used again; default 1 s
	root fs.FS         // of the machine; default "/"
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	o.Timeout = cmp.Or(o.Timeout, 14)
	o.RetryCount = cmp.Or(o.RetryCount, 6)
	o.Reads = cmp.Or(o.Reads, 16)
	o.hold = cmp.Or(o.hold, time.Second)
	o.Staging = cmp.Or(o.Staging, transfer.DefaultStaging)
	if o.root == nil {
		o.root = os.DirFS("/")
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

func (o *Options) check() error {
	switch {
	case o.Local.Seals == nil:
		return errors.New("no seal table")
	case o.Call == nil:
		return errors.New("no way to call peers")
	case o.ServiceLevel > 15:
		return fmt.Errorf("service level %d, want 0 to 15", o.ServiceLevel)
	case o.Timeout > 31:
		return fmt.Errorf("timeout %d, want 1 to 31", o.Timeout)
	case o.RetryCount > 6:
		return fmt.Errorf("retry count %d, want 1 to 6 (7 is for ever on Soft-RoCE)", o.RetryCount)
	case o.Reads < 1 || o.Reads > maxReads:
		return fmt.Errorf("%d reads at once, want 1 to %d", o.Reads, maxReads)
	case o.QueuePairs < 0 || o.QueuePairs > maxLanes:
		return fmt.Errorf("%d queue pairs, want 1 to %d", o.QueuePairs, maxLanes)
	case o.GIDIndex != nil && (*o.GIDIndex < 0 || *o.GIDIndex > 255):
		return fmt.Errorf("GID index %d, want 0 to 255", *o.GIDIndex)
	case o.MTU != 0 && mtuOf(o.MTU) == 0:
		return fmt.Errorf("MTU of %d bytes, want 256, 512, 1024, 2048, or 4096", o.MTU)
	}
	if err := o.Local.Life.Node.Validate(); err != nil {
		return err
	}
	for r, a := range o.Local.Arenas {
		if err := r.Validate(); err != nil || a == nil {
			return fmt.Errorf("arena of rank %d: %w", int(r), cmp.Or(err, errors.New("none")))
		}
	}
	return nil
}

// mtuOf is 0 for a size that there is not.
func mtuOf(bytes int) rdma.MTU {
	for m := minMTU; m <= maxMTU; m++ {
		if m.Bytes() == bytes {
			return m
		}
	}
	return 0
}

// Transport is [transfer.Transport] over RDMA.
type Transport struct {
	o          Options
	devices    []*device
	ports      []*port // in the order of the descriptor
	descriptor []byte
	generation atomic.Uint64 // of the last attempt
	opened     atomic.Uint64 // links
	told       atomic.Int64  // when speaks was true last, in Unix nanoseconds
	stats      counters
	windows    sync.Pool                         // of *window
	flushed    map[id.Rank]memory.DMABufExporter // arenas of devices that are registered
	rings      *transfer.Pool                    // a ring for each lane of peers, where arenas are staged
	landing    *transfer.Pool                    // buffers for reads, where they are
	admitting  chan struct{}                     // one a handshake that is worked on; whoever waits gets its turn in order
	ending     chan struct{}                     // closed by Close

	mu       sync.Mutex
	closed   bool
	links    map[*link]struct{}
	accepted map[*served]struct{}
	readers  map[id.Life]int
	serving  sync.WaitGroup // Add under mu, while not closed
	saying   sync.WaitGroup // what tells readers that a gather has ended; Add while serving
	shut     sync.Once
	shutErr  error
}

// Listen registers the memory of local with the devices, and is ready for Serve
// and Open until Close. It wraps [transfer.ErrUnavailable] where the machine has
// nothing to read with. A limit that is too low, and a device that was named and
// does not work, is another error.
func Listen(o Options) (*Transport, error) {
	t, err := listen(o.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("listen rdma: %w", err)
	}
	return t, nil
}

func listen(o Options) (*Transport, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	o.Local.Arenas = maps.Clone(o.Local.Arenas)
	t := &Transport{
		o: o, admitting: make(chan struct{}, maxAdmitting), ending: make(chan struct{}),
		links: map[*link]struct{}{}, accepted: map[*served]struct{}{}, readers: map[id.Life]int{},
		flushed: map[id.Rank]memory.DMABufExporter{},
	}
	t.windows.New = newWindow
	if err := t.openDevices(); err != nil {
		_ = t.closeDevices() // the first error tells
		if errors.Is(err, rdma.ErrUnavailable) {
			err = fmt.Errorf("%w: %w", transfer.ErrUnavailable, err)
		}
		return nil, err
	}
	d := descriptor{owner: o.Local.Life}
	for _, p := range t.ports {
		d.ports = append(d.ports, p.describe())
	}
	t.descriptor = d.encode()
	for _, d := range t.devices {
		d.watch()
	}
	return t, nil
}

// Name is [transfer.Transport.Name].
func (t *Transport) Name() string { return Name }

// Descriptor is [transfer.Transport.Descriptor].
func (t *Transport) Descriptor() []byte { return slices.Clone(t.descriptor) }

// Open is [transfer.Transport.Open]: every lane makes one attempt, all at once,
// and one that succeeds is enough.
func (t *Transport) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	l, err := t.open(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("open an RDMA link to %s: %w", peer.Life, err)
	}
	return l, nil
}

func (t *Transport) open(ctx context.Context, peer transfer.Peer) (*link, error) {
	if ctx.Err() != nil {
		return nil, transfer.Reason(ctx)
	}
	if err := peer.Life.Node.Validate(); err != nil {
		return nil, err
	}
	d, err := parseDescriptor(peer.Descriptor)
	if err != nil {
		return nil, err
	}
	if d.owner != peer.Life {
		return nil, fmt.Errorf("the descriptor is that of %s: %w", d.owner, transfer.ErrIdentity)
	}
	pairs, err := pair(t.describe(), d.ports)
	if err != nil {
		return nil, err
	}
	l := t.newLink(peer, d, pairs)
	// A transport that closes ends what is being opened too.
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil, fmt.Errorf("transport: %w", transfer.ErrClosed)
	}
	t.links[l] = struct{}{}
	t.mu.Unlock()
	if err := l.start(ctx); err != nil {
		return nil, err
	}
	return l, nil
}

// Close is [transfer.Transport.Close]: links first, then what is served, then
// the devices. A device that does not destroy a queue pair is waited for, and the
// log says so.
func (t *Transport) Close() error {
	slow := time.AfterFunc(slowClose, t.closing)
	defer slow.Stop()
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.ending)
	}
	links := slices.Collect(maps.Keys(t.links))
	t.mu.Unlock()
	var work sync.WaitGroup
	for _, l := range links {
		work.Go(func() { _ = l.Close() }) // returns nil
	}
	work.Wait()
	t.serving.Wait()
	t.saying.Wait()
	t.shut.Do(func() { t.shutErr = t.closeDevices() })
	return t.shutErr
}

// slowClose is how long Close takes before it says what it waits for.
const slowClose = 5 * time.Second

// closing logs what Close waits for.
func (t *Transport) closing() {
	t.mu.Lock()
	links, accepted := slices.Collect(maps.Keys(t.links)), len(t.accepted)
	t.mu.Unlock()
	t.o.Logger.Warn("RDMA is still being closed: no memory is given up before its queue pairs are destroyed and its device copies are over", "links", len(links), "accepted", accepted, "after", slowClose)
	for _, l := range links {
		t.o.Logger.Warn("an RDMA link is still being closed", "peer", l.peer.Life.String(), "lanes", l.doing())
	}
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

	Served    uint64 // lanes that peers have opened to us
	Garbage   uint64 // hellos and answers that do not follow the protocol
	Strangers uint64 // hellos that meant another life, or came from one
	Refused   uint64 // hellos refused for another reason
	Late      uint64 // answers to an earlier attempt, or of another life, which programmed nothing

	Failovers uint64 // windows that a lane had begun and another, or a fresh queue pair, ended
	Replaced  uint64 // lanes that were given a fresh queue pair
	Crossings uint64 // calls into C to post and reap

	RegisteredBytes uint64 // of arenas and seal table, on all devices together

	DMABufs, PeerMems, Staged int // arenas of devices by how they are reached, on all devices together

	StagedBytes uint64 // that went through host memory, gathered for peers and scattered here
	Gathers     uint64 // buffers that were gathered for peers
	Busy        uint64 // lanes that were refused for want of a ring, of those in Refused
	Rings       int    // of lanes of peers, now

	Links    int // open now, of ours
	Lanes    int // their lanes that are ready
	Accepted int // lanes of peers, now
}

type counters struct {
	reads, readBytes, stale, errors     atomic.Uint64
	served, garbage, strangers, refused atomic.Uint64
	late                                atomic.Uint64
	failovers, replaced, crossings      atomic.Uint64
	stagedBytes, gathers, busy          atomic.Uint64
	rings                               atomic.Int64
}

// Stats may be called at any time.
func (t *Transport) Stats() Stats {
	s := &t.stats
	t.mu.Lock()
	links := slices.Collect(maps.Keys(t.links))
	accepted := len(t.accepted)
	t.mu.Unlock()
	now := Stats{
		Reads: s.reads.Load(), ReadBytes: s.readBytes.Load(), Stale: s.stale.Load(), Errors: s.errors.Load(),
		Served: s.served.Load(), Garbage: s.garbage.Load(), Strangers: s.strangers.Load(), Refused: s.refused.Load(), Late: s.late.Load(),
		Failovers: s.failovers.Load(), Replaced: s.replaced.Load(), Crossings: s.crossings.Load(),
		StagedBytes: s.stagedBytes.Load(), Gathers: s.gathers.Load(), Busy: s.busy.Load(),
		Links: len(links), Accepted: accepted, Rings: int(s.rings.Load()),
	}
	for _, l := range links {
		for _, p := range l.states() {
			now.Lanes += p.Lanes
		}
	}
	for _, d := range t.devices {
		now.RegisteredBytes += d.registered
		for _, a := range d.arenas {
			switch a.reach {
			case InHost:
			case ByDMABuf:
				now.DMABufs++
			case ByPeerMem:
				now.PeerMems++
			case Staged:
				now.Staged++
			}
		}
	}
	return now
}

// Path is what stands between this node and a peer, or, without a peer, a port
// of ours.
type Path struct {
	Peer   id.Life // of a link of ours; the zero Life: the port itself
	Device string
	Port   int
	Link   string // "Ethernet" or "InfiniBand"
	GID    string // that we send from; of a port, that we would
	Remote string // the peer's device and address; "" of a port
	Lanes  int    // ready now: ours; of a port, those of peers too
	Wanted int    // that a path should have; 0 of a port
	State  string // "active", or why it is not used
	Memory Reach  // of a port: how its device reaches our arenas, the worst of them
	Why    string // it reaches them no better
}

// Paths lists the ports of this node, then the paths of its links.
func (t *Transport) Paths() []Path {
	t.mu.Lock()
	links := slices.Collect(maps.Keys(t.links))
	lanes := make(map[*port]int, len(t.ports))
	for s := range t.accepted {
		lanes[s.port]++
	}
	t.mu.Unlock()
	slices.SortFunc(links, func(a, b *link) int {
		return cmp.Or(cmp.Compare(a.peer.Life.Node, b.peer.Life.Node), cmp.Compare(a.number, b.number))
	})
	var paths []Path
	for _, l := range links {
		paths = append(paths, l.states()...)
	}
	var list []Path
	for _, p := range t.ports {
		s := p.status()
		s.Lanes = lanes[p]
		for i := range paths {
			if paths[i].Device == s.Device && paths[i].Port == s.Port {
				s.Lanes += paths[i].Lanes
			}
		}
		list = append(list, s)
	}
	return append(list, paths...)
}

var _ transfer.Transport = (*Transport)(nil)
