package cudaipc

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// link is the memory of one life of one peer, imported.
type link struct {
	t    *Transport
	peer transfer.Peer
	hold *rendezvous.Hold

	// Set by Attach, before there can be a read; taken back by Release, when there
	// is none any more.
	seals  *memory.SealTable
	arenas [id.MaxRanks]stretch
}

// stretch is what both sides have of one rank.
type stretch struct {
	remote *cuda.Arena // imported; nil: the rank can't be read
	bytes  int64       // of it, as the peer has said in Hello
	local  *cuda.Arena
}

// Close is [transfer.Link.Close].
func (l *link) Close() error {
	l.hold.Close()
	return nil
}

// Watch is [rendezvous.Holder.Watch].
func (l *link) Watch(c *rendezvous.Conn) error { return c.Stand() }

// Release is [rendezvous.Holder.Release].
func (l *link) Release() {
	for i := range l.arenas {
		if a := l.arenas[i].remote; a != nil {
			l.drop(a.Close())
			l.t.imported.Add(-1)
			l.arenas[i] = stretch{}
		}
	}
	if l.seals != nil {
		l.drop(l.seals.Close())
	}
}

func (l *link) drop(err error) {
	if err != nil {
		l.t.log.Error("let go of the memory of a peer", "peer", l.peer.Life.String(), "err", err)
	}
}

// Attach is [rendezvous.Holder.Attach].
func (l *link) Attach(ctx context.Context, c *rendezvous.Conn) error {
	o, err := l.receive(c)
	defer o.close()
	if ended := c.Settle(); ended != nil {
		return ended // which err tells of too
	}
	if err != nil {
		return fmt.Errorf("shake hands at %s: %w", c.Address(), err)
	}
	if err := l.attach(ctx, &o); err != nil {
		return fmt.Errorf("import the memory that %s offers: %w", c.Address(), err)
	}
	return nil
}

// offer is what a handshake has brought.
type offer struct {
	welcome
	seals  *os.File
	arenas map[id.Rank]*offered
}

// offered is one rank of an offer.
type offered struct {
	handle cuda.Handle
	files  []*os.File
}

// take gives the files of a rank away.
func (o *offered) take() []*os.File {
	files := o.files
	o.files = nil
	return files
}

func (o *offer) close() {
	if o.seals != nil {
		_ = o.seals.Close() // nobody has used it
	}
	for _, a := range o.arenas {
		for _, f := range a.files {
			_ = f.Close()
		}
	}
}

// receive takes what follows the welcome, and returns what it has got with an
// error too.
func (l *link) receive(c *rendezvous.Conn) (o offer, err error) {
	o.arenas = map[id.Rank]*offered{}
	if o.welcome, err = parseWelcome(c.Says()); err != nil {
		return o, err
	}
	if o.seals, err = c.ReceiveFile(sealTable); err != nil {
		return o, err
	}
	last := id.Rank(-1)
	for range o.welcome.arenas {
		k, body, err := c.Receive(rendezvous.MaxBody)
		if err != nil {
			return o, err
		}
		if k != kindArena {
			return o, fmt.Errorf("%v, want an arena: %w", k, rendezvous.ErrGarbage)
		}
		a, err := parseArena(body)
		if err != nil {
			return o, err
		}
		if a.rank <= last {
			return o, fmt.Errorf("arena of rank %d behind that of rank %d: %w", int(a.rank), int(last), rendezvous.ErrGarbage)
		}
		last = a.rank
		one := &offered{handle: a.handle}
		o.arenas[a.rank] = one
		for range a.handle.Chunks {
			f, err := c.ReceiveFile(uint16(a.rank))
			if err != nil {
				return o, err
			}
			one.files = append(one.files, f)
		}
	}
	return o, nil
}

// attach maps the seal table and imports the arenas of the ranks that both sides
// have.
func (l *link) attach(ctx context.Context, o *offer) error {
	file := o.seals
	o.seals = nil
	var err error
	if l.seals, err = memory.MapSealTable(file, false); err != nil {
		return err
	}
	for rank, want := range l.peer.ArenaBytes {
		local := l.t.arenas[rank]
		if local == nil {
			continue
		}
		if ctx.Err() != nil {
			return transfer.Reason(ctx)
		}
		a := o.arenas[rank]
		if a == nil {
			return fmt.Errorf("rank %d is not there, the peer said before that it has %d bytes: %w", int(rank), want, rendezvous.ErrGarbage)
		}
		if want <= 0 || a.handle.Bytes < want {
			return fmt.Errorf("rank %d has %d bytes there, the peer said %d before: %w", int(rank), a.handle.Bytes, want, rendezvous.ErrGarbage)
		}
		remote, err := l.t.imports(a, o.pidns, local)
		if err != nil {
			return fmt.Errorf("rank %d: %w", int(rank), err)
		}
		l.arenas[rank] = stretch{remote: remote, bytes: want, local: local}
		l.t.imported.Add(1)
		if have := remote.Size(); have < want {
			return fmt.Errorf("rank %d has %d bytes, the peer said %d before: %w", int(rank), have, want, rendezvous.ErrGarbage)
		}
	}
	return nil
}

// imports imports one arena of a peer, to be copied from into local.
func (t *Transport) imports(a *offered, pidns uint64, local *cuda.Arena) (*cuda.Arena, error) {
	theirs := a.handle.UUID
	if _, err := t.runtime.Find(theirs.String()); err != nil {
		return nil, unavailable(err, fmt.Sprintf("the peer's memory is on %v, which this process does not see; let both nodes see both devices (CUDA_VISIBLE_DEVICES, or --gpus of a container)", theirs))
	}
	if err := t.runtime.Reach(local.GPU().UUID, theirs); err != nil {
		return nil, unavailable(err, fmt.Sprintf("the peer's memory is on %v, which our device does not reach", theirs))
	}
	if a.handle.Kind == cuda.Legacy && pidns != t.pidns {
		return nil, fmt.Errorf("the peer runs in another PID namespace, where a handle of CUDA means another process; run both in one (docker: --pid=container:NAME or --pid=host; Kubernetes: shareProcessNamespace or hostPID): %w", transfer.ErrUnavailable)
	}
	remote, err := t.runtime.Import(a.handle, a.take())
	if _, said := errors.AsType[*cuda.Error](err); said && !errors.Is(err, cuda.ErrNoMemory) {
		return nil, unavailable(err, "the driver does not import the peer's memory; unless the peer has just ended, run both nodes in one container, or in containers with the same devices, PID namespace, and IPC namespace")
	}
	return remote, err
}

// unavailable says why a peer cannot be read by this transport. A device that has
// died is another matter, which another transport must not hide.
func unavailable(err error, why string) error {
	if errors.Is(err, cuda.ErrDead) {
		return err
	}
	return fmt.Errorf("%s: %w: %w", why, transfer.ErrUnavailable, err)
}

var (
	_ transfer.Link     = (*link)(nil)
	_ rendezvous.Holder = (*link)(nil)
	_ rendezvous.Source = (*link)(nil)
)
