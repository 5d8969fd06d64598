// Package transfer says what it means to pull: a [Transport] opens a [Link] to
// one life of one peer, and Link.Read moves copies and then proves that what
// was moved was still held by its owner.
//
// It also turns page lists into copies ([Copies]) and cuts these ([Cut]),
// chooses between the transports to a peer ([Route]), and says which read is
// next ([Queue]). It knows no request and no publication: a read is right if
// everything has landed and then every seal word still held its value
// (docs/decisions/0002).
package transfer

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

var (
	// ErrStale: at least one seal word no longer held its value; nothing that
	// was read may be used.
	ErrStale = errors.New("publication ended during the read")
	// ErrUnavailable: this machine or this peer cannot use the transport. It
	// is the only error that lets a [Route] pass to the next one at once.
	ErrUnavailable = errors.New("transport not available")
	// ErrStalled: no byte landed for the stall time, or the attempt ran out of
	// its total time.
	ErrStalled = errors.New("no progress")
	// ErrTotal: a read was not done within [Limits.Total].
	ErrTotal = fmt.Errorf("the read took longer than its total time: %w", ErrStalled)
	// ErrIdentity: who answered is not the life of the peer that the link was
	// opened for.
	ErrIdentity = errors.New("peer is another life")
	// ErrRange: a copy or a seal lies outside of its region.
	ErrRange = errors.New("outside of the region")
	// ErrClosed: the link or the transport was closed, or the link's connection
	// has ended, and it never reads again.
	ErrClosed = errors.New("closed")
)

// Seal names a seal word of the owner and the value it must hold.
type Seal struct {
	Index uint32
	Value uint64
}

// Copy is one contiguous stretch. Remote and Local are offsets in bytes from
// the start of the rank's region on the owner's and on our side.
type Copy struct {
	Rank   id.Rank
	Remote int64
	Local  int64
	Bytes  int64
}

// Local is the memory of this node, as a transport sees it: the arenas of its
// ranks, and its seal table. It is set once, before a transport starts.
type Local struct {
	Life   id.Life
	Arenas map[id.Rank]memory.Arena
	Seals  *memory.SealTable
}

// Peer is what a link is opened to: one life of a node, what its transport of
// the same name told us in Hello, and the size in bytes of the region of each
// of its arenas.
type Peer struct {
	Life       id.Life
	Descriptor []byte
	ArenaBytes map[id.Rank]int64
}

// Transport is one way to move bytes. It serves this node's memory to peers
// and opens links to theirs. It is safe for concurrent use.
type Transport interface {
	// Name is a word such as "tcp"; both sides must have it.
	Name() string
	// Descriptor is what a peer's Open needs: opaque, at most 4 KiB, constant
	// in a life. A peer that gets none cannot use the transport.
	Descriptor() []byte
	// Open returns a link to exactly this life. It makes at most one
	// connection attempt, which has a deadline of its own, and wraps
	// ErrUnavailable if the transport cannot reach peers of this kind.
	Open(ctx context.Context, peer Peer) (Link, error)
	// Close ends every link and returns when nothing of the transport runs
	// and nothing can land any more. It may be called twice.
	Close() error
}

// Link reads from one life of one peer. It is safe for concurrent use.
type Link interface {
	// Read performs every copy, then checks that every seal still holds.
	//
	// It returns only once nothing can write to any destination any more, even
	// if ctx ends first. It returns nil only if everything has landed and then
	// every seal held; the error wraps [ErrStale] if not, and is an [*Error].
	// It needs at least one seal. It acknowledges nothing.
	Read(ctx context.Context, seals []Seal, copies []Copy) error
	// Close ends reads that run and returns when they have returned.
	Close() error
}

// Error is the failure of one read.
type Error struct {
	Transport string
	Peer      id.Life
	Address   string // as dialled, "" if not by address
	Done      int64  // bytes that had landed
	Total     int64  // bytes asked for
	Took      time.Duration
	Err       error
}

func (e *Error) Error() string {
	at := ""
	if e.Address != "" {
		at = " at " + e.Address
	}
	return fmt.Sprintf("read by %s from %s%s: %d of %d bytes after %v: %v", e.Transport, e.Peer, at, e.Done, e.Total, e.Took.Round(time.Millisecond), e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// Limits bound one attempt. A zero field means its default.
type Limits struct {
	Dial  time.Duration // to connect and be answered; default 5 s
	Stall time.Duration // without a byte; default 2 s
	Base  time.Duration // part of the total time, see Total; default 60 s
	Rate  int64         // bytes a second, the rest of it; default 10 MB/s
}

// Total is the longest that a read of so many bytes may take: Base + bytes/Rate, and
// at most a century, so that a time with it added is one.
func (l Limits) Total(bytes int64) time.Duration {
	const century = 100 * 365 * 24 * time.Hour
	l = l.WithDefaults()
	seconds := float64(bytes) / float64(l.Rate)
	if l.Base > century || seconds > century.Seconds() {
		return century
	}
	return min(century, l.Base+time.Duration(seconds*float64(time.Second)))
}

// WithDefaults fills the zero fields.
func (l Limits) WithDefaults() Limits {
	if l.Dial <= 0 {
		l.Dial = 5 * time.Second
	}
	if l.Stall <= 0 {
		l.Stall = 2 * time.Second
	}
	if l.Base <= 0 {
		l.Base = 60 * time.Second
	}
	if l.Rate <= 0 {
		l.Rate = 10_000_000
	}
	return l
}

// Reason is the error of a read or an attempt whose context has ended: the cause
// alone where it is an end of this package, else with the context's own error.
func Reason(ctx context.Context) error {
	err, cause := ctx.Err(), context.Cause(ctx)
	switch {
	case errors.Is(cause, err), errors.Is(cause, ErrStalled), errors.Is(cause, ErrClosed):
		return cause
	default:
		return fmt.Errorf("%w: %w", err, cause)
	}
}
