package shm

import (
	"context"
	"fmt"
	"os"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// link is the memory of one life of one peer, mapped.
type link struct {
	t    *Transport
	peer transfer.Peer
	hold *rendezvous.Hold

	// Set by Attach; unmapped once the hold has ended and no read runs.
	arenas [id.MaxRanks]stretch
	seals  *memory.SealTable
	ring   *ring // nil: the owner's arenas are mapped
}

// stretch is what both sides have of one rank.
type stretch struct {
	there, here int64          // bytes of both; 0: the rank can't be read
	mapped      *memory.Region // theirs, nil where there is a ring
	remote      []byte         // of mapped
	local       []byte         // ours; nil in the memory of a device
}

// received are the files of a handshake, by label.
type received map[uint16]*os.File

// take gives a file away.
func (r received) take(label uint16) *os.File {
	f := r[label]
	delete(r, label)
	return f
}

func (r received) close() {
	for _, f := range r {
		_ = f.Close() // nobody has used it
	}
}

// Attach is [rendezvous.Holder.Attach].
func (l *link) Attach(ctx context.Context, c *rendezvous.Conn) error {
	w, err := parseWelcome(c.Says())
	if err != nil {
		return fmt.Errorf("shake hands at %s: %w", c.Address(), err)
	}
	labels := []uint16{sealLabel}
	if w.buffers > 0 {
		labels = append(labels, ringLabel)
	} else {
		for _, r := range w.ranks() {
			labels = append(labels, uint16(r))
		}
	}
	files := received{}
	defer files.close()
	for _, label := range labels {
		f, err := c.ReceiveFile(label)
		if err != nil {
			return err
		}
		files[label] = f
	}
	if err := c.Settle(); err != nil {
		return err
	}
	if err := l.attach(ctx, c, w, files); err != nil {
		return fmt.Errorf("map the memory that %s gave: %w", c.Address(), err)
	}
	return nil
}

// attach maps the seal table, and the ring or the arenas of the ranks that both
// sides have.
func (l *link) attach(ctx context.Context, c *rendezvous.Conn, w welcome, files received) error {
	var err error
	if l.seals, err = memory.MapSealTable(files.take(sealLabel), false); err != nil {
		return err
	}
	if w.buffers > 0 {
		if l.ring, err = l.openRing(c, w, files.take(ringLabel)); err != nil {
			return fmt.Errorf("ring: %w", err)
		}
	}
	for rank, want := range l.peer.ArenaBytes {
		local := l.t.local.Arenas[rank]
		if local == nil {
			continue
		}
		if ctx.Err() != nil {
			return transfer.Reason(ctx)
		}
		if have := w.arenas[rank]; have < want {
			return fmt.Errorf("rank %d has %d bytes there, the peer said %d before: %w", int(rank), have, want, rendezvous.ErrGarbage)
		}
		a := stretch{there: want, here: local.Size()}
		a.local, _ = transfer.InHost(local)
		if l.ring == nil {
			if a.mapped, err = memory.Map(files.take(uint16(rank)), want, false); err != nil {
				return fmt.Errorf("rank %d: %w", int(rank), err)
			}
			a.remote = a.mapped.Bytes()
		}
		l.arenas[rank] = a
	}
	return nil
}

// Watch is [rendezvous.Holder.Watch].
func (l *link) Watch(c *rendezvous.Conn) error {
	if l.ring == nil {
		return c.Stand()
	}
	return l.ring.hear()
}

// Release is [rendezvous.Holder.Release].
func (l *link) Release() {
	for i := range l.arenas {
		if m := l.arenas[i].mapped; m != nil {
			l.close(m.Close)
		}
		l.arenas[i] = stretch{}
	}
	if l.ring != nil {
		l.close(l.ring.close)
	}
	if l.seals != nil {
		l.close(l.seals.Close)
	}
}

func (l *link) close(what func() error) {
	if err := what(); err != nil {
		l.t.log.Error("unmap the memory of a peer", "peer", l.peer.Life.String(), "err", err)
	}
}

// Close is [transfer.Link.Close].
func (l *link) Close() error {
	l.hold.Close()
	return nil
}

var (
	_ transfer.Link     = (*link)(nil)
	_ rendezvous.Holder = (*link)(nil)
	_ rendezvous.Source = (*link)(nil)
)
