// Package cudaipc is a transport between nodes of one host whose arenas are in
// the memory of CUDA devices: the reader imports the owner's arenas, and its own
// driver copies from them, from device to device. No byte passes host memory, and
// no processor of the owner takes part.
//
// # Meeting
//
// Nodes meet as the package rendezvous says; the magic is "kvc", the version 1. A
// welcome adds the number of the owner's PID namespace (8), and how many arenas
// follow (1). The owner then sends the file of the seal table, labelled 0xffff,
// which is open for reading alone, and for each arena, by rank in ascending order,
// a frame of kind 16 and its files, labelled with the rank:
//
//	16 arena   owner to reader: rank (2), and the handle as [cuda.Handle.Append]
//	           writes it
//
// How many files there are, none or one for each piece of the arena, is in the
// handle. Then neither says anything; the connection stands for as long as the
// reader may read.
//
// The reader imports an arena if it sees the device that the handle names, and if
// its own reaches that. A handle without files is looked up by the driver under
// the number of the owner's process, which means another process in another PID
// namespace: of a peer in another one it is not imported.
//
// # Reading
//
// A read looks at the seal words, which the owner's processor keeps in host
// memory, and lets the driver copy, a batch at a time: while one is copied the
// next one waits behind it, and between two of them everybody looks at what may
// end the read, and others get their turn. When the devices have said that every
// copy is over, and not before, it looks at the words again. What has been given
// to a device cannot be taken back, so that a read that is canceled ends with its
// batches: a device that does not answer keeps it until the driver gives it up.
//
// # Ends
//
// A link imports each rank once, and lets go of it when it ends and the last of
// its reads has returned. An import keeps the memory of a process that has died,
// so a connection that breaks ends the link at once.
//
// An owner that closes waits for its readers to let go, as long as the stall time.
// One that does not, since it is stopped, still has the import: it may go on to
// read, and gets whatever is there by then, or an error of its device. It cannot
// take that for what was published, if the owner has changed the seal words before
// it closed, as its rule says; the driver calls the rest undefined. No memory of
// the owner can be written by a reader that keeps to the protocol.
package cudaipc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// Name is [Transport.Name].
const Name = "cudaipc"

// Options set up a Transport. A zero field means its default.
type Options struct {
	Local   transfer.Local  // required; the arenas are [cuda.Arena]s of Runtime, and must outlive the transport
	Runtime *cuda.Runtime   // required where the arenas are in device memory; must outlive the transport
	Dir     string          // required: the rendezvous directory, which peers of this host share; made if it is missing
	Limits  transfer.Limits // of the handshake and of reading; Stall is how long Close waits for readers
	Logger  *slog.Logger    // default: silence

	batchBytes  int64 // of a batch at most; default batchBytes
	batchCopies int   // likewise
}

func (o Options) withDefaults() Options {
	o.Limits = o.Limits.WithDefaults()
	o.batchBytes = cmp.Or(o.batchBytes, batchBytes)
	o.batchCopies = cmp.Or(o.batchCopies, batchCopies)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}

// Transport is [transfer.Transport] over CUDA IPC.
type Transport struct {
	local    transfer.Local
	arenas   map[id.Rank]*cuda.Arena // those of local
	runtime  *cuda.Runtime
	limits   transfer.Limits
	log      *slog.Logger
	pidns    uint64
	exports  []export // by rank
	server   *rendezvous.Server
	turns    *rendezvous.Turns // of batches that are under way
	batches  sync.Pool         // of *batch
	imported atomic.Int64      // Stats.Imported

	batchBytes  int64 // at most
	batchCopies int   // likewise

	shut sync.Once
	err  error // of Close
}

// export is what readers are told of one arena.
type export struct {
	rank  id.Rank
	says  []byte // the body of its frame
	files []*os.File
}

// Listen exports the arenas, opens the rendezvous directory, and serves local
// until Close. It wraps [transfer.ErrUnavailable] where the arenas are in host
// memory or cannot be exported, and where the machine or the directory will not do.
func Listen(o Options) (*Transport, error) {
	t, err := listen(o.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("listen %s: %w", Name, err)
	}
	return t, nil
}

func listen(o Options) (*Transport, error) {
	if o.Local.Seals == nil {
		return nil, errors.New("no seal table")
	}
	arenas := make(map[id.Rank]*cuda.Arena, len(o.Local.Arenas))
	for r, a := range o.Local.Arenas {
		if err := r.Validate(); err != nil || a == nil {
			return nil, fmt.Errorf("arena of rank %d: %w", int(r), cmp.Or(err, errors.New("none")))
		}
		var ok bool
		if arenas[r], ok = a.(*cuda.Arena); !ok {
			return nil, fmt.Errorf("the arena of rank %d is not in the memory of a CUDA device; set arena.memory to one, such as cuda:0: %w", int(r), transfer.ErrUnavailable)
		}
	}
	if o.Runtime == nil {
		return nil, errors.New("no CUDA runtime")
	}
	pidns, err := pidNamespace()
	if err != nil {
		return nil, err
	}
	t := &Transport{
		local: o.Local, arenas: arenas, runtime: o.Runtime, limits: o.Limits, log: o.Logger, pidns: pidns,
		turns: rendezvous.NewTurns(allBatches), batchBytes: o.batchBytes, batchCopies: o.batchCopies,
	}
	t.batches.New = newBatch
	for _, r := range slices.Sorted(maps.Keys(arenas)) {
		e, err := exportOf(r, arenas[r])
		if err != nil {
			return nil, errors.Join(err, t.closeExports())
		}
		t.exports = append(t.exports, e)
	}
	t.server, err = rendezvous.Listen(rendezvous.Options{
		Protocol: protocol(), Dir: o.Dir, Life: o.Local.Life, Limits: o.Limits, Logger: o.Logger, Serve: t.serve,
	})
	if err != nil {
		return nil, errors.Join(err, t.closeExports())
	}
	return t, nil
}

func exportOf(rank id.Rank, a *cuda.Arena) (export, error) {
	h, files, err := a.Export()
	if err != nil {
		if _, said := errors.AsType[*cuda.Error](err); said || errors.Is(err, cuda.ErrNotShareable) {
			err = unavailable(err, "it cannot be handed to other processes of this host")
		}
		return export{}, fmt.Errorf("arena of rank %d: %w", int(rank), err)
	}
	e := export{rank: rank, files: files}
	if e.says, err = (arena{rank, h}).encode(); err != nil {
		return export{}, errors.Join(fmt.Errorf("%w: %w", transfer.ErrUnavailable, err), e.close())
	}
	return e, nil
}

func (e export) close() error {
	var errs []error
	for _, f := range e.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

func (t *Transport) closeExports() error {
	var errs []error
	for _, e := range t.exports {
		errs = append(errs, e.close())
	}
	return errors.Join(errs...)
}

// pidNamespace is the number of this process's PID namespace, the same to all
// that look.
func pidNamespace() (uint64, error) {
	const link = "/proc/self/ns/pid" // "pid:[4026531836]"
	s, err := os.Readlink(link)
	if err != nil {
		return 0, fmt.Errorf("which PID namespace this is: %w: %w", transfer.ErrUnavailable, err)
	}
	n, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimPrefix(s, "pid:["), "]"), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s is %.80q: %w: %w", link, s, transfer.ErrUnavailable, err)
	}
	return n, nil
}

// Name is [transfer.Transport.Name].
func (t *Transport) Name() string { return Name }

// Descriptor is [transfer.Transport.Descriptor].
func (t *Transport) Descriptor() []byte { return t.server.Descriptor() }

// Open is [transfer.Transport.Open]. The handshake has the dial time;
// importing what it brought is up to the driver, and ends early with ctx only
// between two arenas.
func (t *Transport) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	l, err := t.open(ctx, peer)
	if err != nil {
		return nil, fmt.Errorf("open a %s link to %s: %w", Name, peer.Life, err)
	}
	return l, nil
}

func (t *Transport) open(ctx context.Context, peer transfer.Peer) (*link, error) {
	l := &link{t: t, peer: peer}
	var err error
	if l.hold, err = t.server.Open(ctx, peer, l); err != nil {
		return nil, err
	}
	return l, nil
}

// Close is [transfer.Transport.Close]: links first, then what peers have opened,
// who get the stall time to let go of what they have imported.
func (t *Transport) Close() error {
	t.shut.Do(func() { t.err = errors.Join(t.server.Close(), t.closeExports()) })
	return t.err
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
	Imported int // arenas of peers that these have imported
	Accepted int // connections open now, by peers
}

// Stats may be called at any time.
func (t *Transport) Stats() Stats {
	s := t.server.Stats()
	return Stats{
		Reads: s.Reads, ReadBytes: s.ReadBytes, Stale: s.Stale, Errors: s.Errors,
		Served: s.Served, Garbage: s.Garbage, Strangers: s.Strangers,
		Evicted: s.Evicted, Refused: s.Refused,
		Links: s.Holds, Imported: int(t.imported.Load()), Accepted: s.Accepted,
	}
}

var _ transfer.Transport = (*Transport)(nil)
