// Package rendezvous is how nodes of one host meet: what the transports share
// that hand files over a unix socket and then read each other's memory.
//
// # Meeting
//
// Nodes that may read from each other share a rendezvous directory. Each of
// their transports has a unix socket of a random name in it, which begins with
// the protocol's; the descriptor tells the host's boot id and that name. A reader
// of the same boot that finds the name in its own directory is on the same host
// and is meant to be here, whatever network, PID, or mount namespace either is
// in. The directory, and the users on both ends of the socket, are what access is
// decided by: the directory is closed to others, and both ends serve their own
// user and root alone. The descriptor holds for a life: where somebody has
// removed the socket, or the directory, its owner makes it anew within seconds,
// under the same name.
//
// # Handshake
//
// Numbers are big endian. A frame is a header of 8 bytes and a body:
//
//	0  3  magic of the protocol
//	3  1  its version
//	4  1  kind
//	5  1  zero
//	6  2  bytes of the body
//
// The kinds, and what the body is:
//
//	1 hello    reader to owner, once: owner's node name, owner's incarnation,
//	           reader's node name, reader's incarnation. A name is a byte of
//	           length and the bytes, an incarnation 8 bytes.
//	2 welcome  owner to reader: owner's node name, incarnation, and what the
//	           protocol says besides.
//	3 file     owner to reader, behind the welcome: its body is a label (2) that
//	           the protocol gives. A descriptor goes with the frame (SCM_RIGHTS).
//	4 refusal  owner to reader, instead of a welcome: why (1): 1 the hello was
//	           meant for another life, 2 the reader is another user's, 3 there are
//	           too many readers, 4 the owner is busy. The connection ends.
//
// Kinds from [Own] on are the protocol's. Whatever does not follow it ends the
// connection without an answer. A connection stands for as long as the reader may
// read: an owner that closes ends its side, and waits for the reader to end the
// other, which it does when nothing reads the owner's memory any more.
//
// # Who owns what
//
// A [Server] owns its socket, the goroutines that accept and serve, and the
// connections that were accepted, which it closes behind Options.Serve. A [Hold]
// owns the connection that it has opened, waits for the reads that its link has
// told it of, and closes it behind Holder.Release. Files that were received are the
// receiver's, files that were sent stay the sender's.
//
// # Reading
//
// [Hold.Read] is what reads of these transports have in common: what ends one, the
// seal words before and behind it, what is counted. What is in a welcome, which files
// there are, and how bytes are copied ([Source]) is the protocol's.
package rendezvous

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

var (
	// ErrGarbage: what came does not follow the protocol.
	ErrGarbage = errors.New("not a frame of this protocol")
	// ErrBusy: the owner has no room for a reader of this kind now. Options.Serve
	// returns it instead of a welcome; the reader's error wraps
	// [transfer.ErrUnavailable].
	ErrBusy = errors.New("the owner is busy")
)

// Protocol tells the users of one directory, and their versions, apart.
type Protocol struct {
	Name    string // of the transport, in small letters; the names of its sockets begin with it
	Magic   string // 3 bytes
	Version uint8  // of the frames; both sides must have the same
}

// Options set up a Server. A zero field means its default.
type Options struct {
	Protocol Protocol        // required
	Dir      string          // required: the rendezvous directory, made if it is missing
	Life     id.Life         // required: of this node
	Limits   transfer.Limits // Dial bounds a handshake; Stall a frame on its way, and how long Close waits for readers
	Logger   *slog.Logger    // default: silence
	// Serve is required: it is the owner's side of each connection whose reader
	// has said hello, on a goroutine of its own. It calls Conn.Welcome, SendFile
	// for every file, then Settle, and returns when the reader has hung up
	// ([Conn.Stand]), or with what ended the connection: an error that wraps
	// ErrGarbage is counted as such, ErrBusy before the welcome refuses.
	Serve func(*Conn) error

	lookEvery time.Duration // from one look at our socket in the directory to the next; default 5 s
}

// Server is a node's socket in the directory: it serves readers, and finds the
// sockets of others. It is safe for concurrent use.
type Server struct {
	o          Options
	host       string // the boot id
	dir        *directory
	socket     string // name of ours
	descriptor []byte
	max        int // connections
	stats      counters
	closing    chan struct{} // closed by end

	mu        sync.Mutex
	closed    bool
	listener  *net.UnixListener // another one after the socket was removed
	conns     map[*served]struct{}
	strangers int // those of conns
	holds     map[*Hold]struct{}
	work      sync.WaitGroup // keep, accept, and every served
}

// Listen opens the directory, removes the sockets of this protocol that ended
// processes left in it, and serves until Close. It wraps
// [transfer.ErrUnavailable] where the machine or the directory will not do.
func Listen(o Options) (*Server, error) {
	switch {
	case o.Dir == "":
		return nil, errors.New("no rendezvous directory")
	case o.Serve == nil || len(o.Protocol.Magic) != magicBytes || o.Protocol.Name == "":
		return nil, fmt.Errorf("protocol %q with magic %q is not whole", o.Protocol.Name, o.Protocol.Magic)
	}
	if err := o.Life.Node.Validate(); err != nil {
		return nil, err
	}
	o.Limits = o.Limits.WithDefaults()
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.lookEvery <= 0 {
		o.lookEvery = 5 * time.Second
	}
	host, err := bootID()
	if err != nil {
		return nil, err
	}
	dir, err := openDirectory(o.Dir, o.Protocol.Name)
	if err != nil {
		return nil, err
	}
	dir.sweep(o.Logger)
	socket := dir.newName()
	listener, err := dir.listen(socket)
	if err != nil {
		return nil, errors.Join(err, dir.close())
	}
	s := &Server{
		o: o, host: host, dir: dir, socket: socket,
		descriptor: descriptor{host: host, socket: socket}.encode(o.Protocol),
		max:        maxConns, closing: make(chan struct{}), listener: listener, conns: map[*served]struct{}{}, holds: map[*Hold]struct{}{},
	}
	s.start()
	return s, nil
}

// Descriptor is what a peer's Dial needs: the [transfer.Transport.Descriptor].
func (s *Server) Descriptor() []byte { return slices.Clone(s.descriptor) }

// Address is the path of our socket.
func (s *Server) Address() string { return s.dir.address(s.socket) }

// Stats is a snapshot of what a server has done since Listen.
type Stats struct {
	Reads     uint64 // reads of our holds that held
	ReadBytes uint64 // bytes that landed, of failed reads too
	Stale     uint64 // reads that ended stale
	Errors    uint64 // reads that failed otherwise

	Served    uint64 // connections that were settled
	Garbage   uint64 // connections ended because of what they sent
	Strangers uint64 // connections ended because they meant another life, or are another user's
	Evicted   uint64 // connections ended before they had said who they are, to make room
	Refused   uint64 // connections refused because there are too many, or the owner is busy
	Accepted  int    // connections open now, by peers
	Holds     int    // connections open now, of ours
}

type counters struct {
	reads
	served, garbage, strangers, evicted, refused atomic.Uint64
}

// Stats may be called at any time.
func (s *Server) Stats() Stats {
	c := &s.stats
	s.mu.Lock()
	defer s.mu.Unlock()
	return Stats{
		Reads: c.held.Load(), ReadBytes: c.bytes.Load(), Stale: c.stale.Load(), Errors: c.failed.Load(),
		Served: c.served.Load(), Garbage: c.garbage.Load(), Strangers: c.strangers.Load(),
		Evicted: c.evicted.Load(), Refused: c.refused.Load(), Accepted: len(s.conns), Holds: len(s.holds),
	}
}
