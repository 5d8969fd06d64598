package transfertest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/transfer"
)

// MemoryName is the name of the in-memory transport.
const MemoryName = "memory"

// memoryPiece and memoryCopies are how much is copied, at most, between two looks
// at the context.
const (
	memoryPiece  = 64 << 10
	memoryCopies = 1024
)

// Network joins the [Memory] transports of one process: they reach each other
// and nobody else. The zero value is ready. It is safe for concurrent use.
type Network struct {
	mu    sync.Mutex
	last  uint64
	nodes map[uint64]*Memory
}

// Listen starts a transport that serves local, whose regions must outlive it.
func (n *Network) Listen(local transfer.Local) *Memory {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last++
	m := &Memory{network: n, number: n.last, local: local, closing: make(chan struct{}), links: map[*memoryLink]struct{}{}}
	if n.nodes == nil {
		n.nodes = map[uint64]*Memory{}
	}
	n.nodes[m.number] = m
	return m
}

func (n *Network) find(descriptor []byte) (*Memory, error) {
	if len(descriptor) != 8 {
		return nil, fmt.Errorf("descriptor of %d bytes: %w", len(descriptor), transfer.ErrUnavailable)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	m := n.nodes[binary.BigEndian.Uint64(descriptor)]
	if m == nil {
		return nil, errors.New("nobody listens")
	}
	return m, nil
}

// Memory is a transport between nodes of one process: a read copies in the
// goroutine that calls it, by way of a buffer if an arena is on a device. It has no goroutine of its own, no clock and no
// descriptor of the kernel, so it fits a synctest bubble.
type Memory struct {
	network *Network
	number  uint64
	local   transfer.Local
	closing chan struct{} // closed by Close; readers of this memory look at it

	mu      sync.Mutex
	closed  bool
	links   map[*memoryLink]struct{}
	readers sync.WaitGroup // reads from this memory
}

// Name is [transfer.Transport.Name].
func (m *Memory) Name() string { return MemoryName }

// Descriptor is [transfer.Transport.Descriptor].
func (m *Memory) Descriptor() []byte { return binary.BigEndian.AppendUint64(nil, m.number) }

// Open is [transfer.Transport.Open].
func (m *Memory) Open(ctx context.Context, peer transfer.Peer) (transfer.Link, error) {
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("open a link to %s: %w", peer.Life, err)
	}
	owner, err := m.network.find(peer.Descriptor)
	if err != nil {
		return nil, fmt.Errorf("open a link to %s: %w", peer.Life, err)
	}
	if owner.local.Life != peer.Life {
		return nil, fmt.Errorf("open a link to %s, %s answers: %w", peer.Life, owner.local.Life, transfer.ErrIdentity)
	}
	l := &memoryLink{reader: m, owner: owner, peer: peer, closing: make(chan struct{})}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, fmt.Errorf("open a link to %s: %w", peer.Life, transfer.ErrClosed)
	}
	m.links[l] = struct{}{}
	return l, nil
}

// Close is [transfer.Transport.Close].
func (m *Memory) Close() error {
	m.mu.Lock()
	if !m.closed {
		m.closed = true
		close(m.closing)
	}
	links := m.links
	m.links = map[*memoryLink]struct{}{}
	m.mu.Unlock()
	m.network.mu.Lock()
	delete(m.network.nodes, m.number)
	m.network.mu.Unlock()
	for l := range links {
		_ = l.Close() // returns nil
	}
	m.readers.Wait()
	return nil
}

// enter lets one read use this memory until leave.
func (m *Memory) enter() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return errors.New("the peer is gone")
	}
	m.readers.Add(1)
	return nil
}

func (m *Memory) leave() { m.readers.Done() }

type memoryLink struct {
	reader, owner *Memory
	peer          transfer.Peer
	closing       chan struct{}

	mu     sync.Mutex
	closed bool
	reads  sync.WaitGroup
}

func (l *memoryLink) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	started := time.Now()
	total, err := transfer.Check(seals, copies, l.sizes)
	var done int64
	if err == nil {
		done, err = l.read(ctx, seals, copies)
	}
	if err == nil {
		return nil
	}
	return &transfer.Error{Transport: MemoryName, Peer: l.peer.Life, Done: done, Total: total, Took: time.Since(started), Err: err}
}

// sizes are those of a rank's arenas there and here.
func (l *memoryLink) sizes(rank id.Rank) (remote, local int64, ok bool) {
	remote, known := l.peer.ArenaBytes[rank]
	here := l.reader.local.Arenas[rank]
	if !known || here == nil {
		return 0, 0, false
	}
	return remote, here.Size(), true
}

func (l *memoryLink) read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) (done int64, err error) {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return 0, fmt.Errorf("link: %w", transfer.ErrClosed)
	}
	l.reads.Add(1)
	l.mu.Unlock()
	defer l.reads.Done()
	if err := l.owner.enter(); err != nil {
		return 0, err
	}
	defer l.owner.leave()

	for _, c := range copies { // the peer may have less than it said
		if a := l.owner.local.Arenas[c.Rank]; a == nil || !transfer.Inside(c.Remote, c.Bytes, a.Size()) {
			return 0, fmt.Errorf("copy %+v, refused by the owner: %w", c, transfer.ErrRange)
		}
	}
	if err := l.over(ctx); err != nil {
		return 0, err
	}
	if !transfer.Held(l.owner.local.Seals, seals) {
		return 0, transfer.ErrStale
	}
	from, to := l.owner.local.Arenas, l.reader.local.Arenas
	var piece []transfer.Copy
	var staging transfer.Staging
	var buf []byte
	if transfer.Staged(from) || transfer.Staged(to) {
		buf = make([]byte, memoryPiece)
	}
	cut := transfer.Cut(copies, memoryPiece, memoryCopies)
	for more := true; more; {
		if err := l.over(ctx); err != nil {
			return done, err
		}
		piece, more = cut.Next(piece[:0])
		if buf == nil {
			for _, c := range piece {
				theirs, _ := transfer.InHost(from[c.Rank])
				ours, _ := transfer.InHost(to[c.Rank])
				copy(ours[c.Local:c.Local+c.Bytes], theirs[c.Remote:])
			}
			done += transfer.Bytes(piece)
			continue
		}
		staging.Gather(buf, from, transfer.Owner, piece)
		if err := staging.Wait(); err != nil {
			return done, err
		}
		staging.Scatter(to, transfer.Reader, piece, buf)
		if err := staging.Wait(); err != nil {
			return done, err
		}
		done += transfer.Bytes(piece)
	}
	if !transfer.Held(l.owner.local.Seals, seals) {
		return done, transfer.ErrStale
	}
	return done, nil
}

// over says why the read must end now, nil if it need not.
func (l *memoryLink) over(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return fmt.Errorf("%w: %w", ctx.Err(), context.Cause(ctx))
	case <-l.closing:
		return fmt.Errorf("link: %w", transfer.ErrClosed)
	case <-l.owner.closing:
		return errors.New("the peer is gone")
	default:
		return nil
	}
}

func (l *memoryLink) Close() error {
	l.mu.Lock()
	if !l.closed {
		l.closed = true
		close(l.closing)
	}
	l.mu.Unlock()
	l.reads.Wait()
	l.reader.mu.Lock()
	delete(l.reader.links, l)
	l.reader.mu.Unlock()
	return nil
}

var (
	_ transfer.Transport = (*Memory)(nil)
	_ transfer.Link      = (*memoryLink)(nil)
)
