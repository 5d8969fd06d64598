// Package shm is a transport between nodes of one host: the reader maps memory of
// the owner and copies. How the two meet, and what access is decided by, is
// [rendezvous]'s.
//
// # Handshake
//
// It is that of [rendezvous], with magic "kvs" and version 2. The welcome goes on
// with
//
//	0  1  buffers of the ring; 0: there is none
//	1  4  bytes of each buffer
//	5  1  number of arenas, then each by rank in ascending order:
//	      rank (2), bytes (8)
//
// Files follow, labelled 0xffff for the seal table, which comes first, and then
// by how the arenas lie: without a ring every arena in the order of the welcome,
// labelled by its rank; with a ring, that of the ring, labelled 0xfffe. Seal table
// and arenas are open for reading alone. Numbers are big endian.
//
// # Reading host memory
//
// Behind the handshake neither says anything. A read looks at the seal words,
// copies straight from the peer's arena into ours, and looks at the words again
// behind the fences of [memory.SealTable.Load]. A large one is copied by several
// goroutines, piece by piece; between two pieces everybody looks at what may end
// the read, and others get their turn. The peer's memory is sealed against
// shrinking and stays mapped until the last copy has returned, so that a peer that
// dies takes nobody with it.
//
// # Reading device memory
//
// An owner whose arenas are in the memory of a device gives a ring instead: a few
// pinned buffers in a file of their own, for this connection alone. It has room for
// so many rings, and refuses more of them as busy. The reader says which buffer is
// to be filled with what, and the owner when it is:
//
//	16 ask     reader to owner: buffer (1), then 1 to 4096 copies, each
//	           rank (2), offset in the arena (8), bytes (4). All of them together
//	           fit into the buffer, in which they lie one behind the other.
//	17 filled  owner to reader: buffer (1), then nothing, or the reason (text)
//	           why it is not filled.
//
// A buffer is the reader's until it asks, and again when the owner has answered;
// to ask with one that the owner has, or for what is not there, is garbage, which
// ends the connection. An answer is given when the device has said that its copies
// are over; the reader looks at the seal words when all has landed. So the words
// prove what they prove where the reader copies by itself. Several buffers are
// under way: while one is filled, another is emptied.
//
// A ring's memory is never another connection's, so that it does not matter how
// long its reader maps it. The owner frees its part when the copies that it has
// started into it are over.
//
// # A reader's device
//
// Where the reader's arenas are in the memory of a device, its processors fill
// pinned buffers from the owner's arena, and the device empties one while they fill
// the next. Buffers of an owner's ring are pinned and emptied by the device itself.
package shm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"sync/atomic"

	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// Name is [Transport.Name].
const Name = "shm"

func protocol() rendezvous.Protocol {
	return rendezvous.Protocol{Name: Name, Magic: "kvs", Version: 2}
}

// Options set up a Transport. A zero field means its default.
type Options struct {
	Local   transfer.Local  // required; the arenas must outlive the transport
	Dir     string          // required: the rendezvous directory, which peers of this host share; made if it is missing
	Workers int             // copies by processors that run at once, of all reads together; default half of the processors, 1 to 4
	Cached  bool            // what lands is read by this process at once: copy through the caches
	Staging int64           // bytes of pinned memory, where the arenas are in the memory of a device: half for what we read, half for the rings of readers; default [transfer.DefaultStaging]
	Limits  transfer.Limits // of the handshake and of reading; Stall is how long Close waits for readers
	Logger  *slog.Logger    // default: silence
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	if o.Workers <= 0 {
		o.Workers = max(1, min(4, runtime.GOMAXPROCS(0)/2))
	}
	if o.Staging <= 0 {
		o.Staging = transfer.DefaultStaging
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Transport is [transfer.Transport] over shared memory.
type Transport struct {
	local   transfer.Local
	limits  transfer.Limits
	cached  bool
	log     *slog.Logger
	workers *rendezvous.Turns // of copies by processors
	staging *staging          // nil: our arenas are in host memory
	server  *rendezvous.Server
	staged  atomic.Uint64 // Stats.StagedBytes
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
	if o.Local.Seals == nil {
		return nil, errors.New("no seal table")
	}
	for r, a := range o.Local.Arenas {
		if err := r.Validate(); err != nil || a == nil {
			return nil, fmt.Errorf("arena of rank %d: %w", int(r), cmp.Or(err, errors.New("none")))
		}
	}
	o.Local.Arenas = maps.Clone(o.Local.Arenas)
	t := &Transport{
		local: o.Local, limits: o.Limits, cached: o.Cached, log: o.Logger,
		workers: rendezvous.NewTurns(o.Workers),
	}
	if transfer.Staged(o.Local.Arenas) {
		s, err := newStaging(o)
		if err != nil {
			return nil, err
		}
		t.staging = s
	}
	s, err := rendezvous.Listen(rendezvous.Options{
		Protocol: protocol(), Dir: o.Dir, Life: o.Local.Life, Limits: o.Limits, Logger: o.Logger, Serve: t.serve,
	})
	if err != nil {
		return nil, errors.Join(err, t.staging.close())
	}
	t.server = s
	return t, nil
}

// Name is [transfer.Transport.Name].
func (t *Transport) Name() string { return Name }

// Descriptor is [transfer.Transport.Descriptor].
func (t *Transport) Descriptor() []byte { return t.server.Descriptor() }

// Open is [transfer.Transport.Open]. The handshake has the dial time;
// mapping what it brought takes about a tenth of a second a GiB on small pages, and
// ends early with ctx only between two arenas.
func (t *Transport) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	l := &link{t: t, peer: peer}
	h, err := t.server.Open(ctx, peer, l)
	if err != nil {
		return nil, fmt.Errorf("open a shm link to %s: %w", peer.Life, err)
	}
	l.hold = h
	return l, nil
}

// Close is [transfer.Transport.Close]: it gives readers the stall time to let go
// of what they map, and waits for every copy of a device.
func (t *Transport) Close() error {
	return errors.Join(t.server.Close(), t.staging.close())
}

// Stats is a snapshot of what a transport has done since Listen.
type Stats struct {
	Reads       uint64 // reads of our links that held
	ReadBytes   uint64 // bytes that landed, of failed reads too
	StagedBytes uint64 // those of both sides that went through a pinned buffer of ours
	Stale       uint64 // reads that ended stale
	Errors      uint64 // reads that failed otherwise

	Served    uint64 // links that peers have opened to us
	Garbage   uint64 // connections ended because of what they sent
	Strangers uint64 // connections ended because they meant another life, or are another user's
	Evicted   uint64 // connections ended before they had said who they are, to make room
	Refused   uint64 // connections refused because there are too many links, or rings

	Links    int // open now, of ours
	Accepted int // connections open now, by peers
	Rings    int // of those
}

// Stats may be called at any time.
func (t *Transport) Stats() Stats {
	r := t.server.Stats()
	return Stats{
		Reads: r.Reads, ReadBytes: r.ReadBytes, StagedBytes: t.staged.Load(), Stale: r.Stale, Errors: r.Errors,
		Served: r.Served, Garbage: r.Garbage, Strangers: r.Strangers, Evicted: r.Evicted, Refused: r.Refused,
		Links: r.Holds, Accepted: r.Accepted, Rings: t.staging.rings(),
	}
}

var _ transfer.Transport = (*Transport)(nil)
