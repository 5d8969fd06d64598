package client

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
)

// ErrRefused is wrapped where a node does not take an engine's memory; the text
// says why.
var ErrRefused = errors.New("node does not take the memory")

const (
	adoptInterval = 100 * time.Millisecond // between attempts
	letGoTimeout  = 30 * time.Second       // for which Close waits
)

// Adoption is memory of an engine that one life of its node uses, from [Adopt] to
// Ended. It is safe for concurrent use.
type Adoption struct {
	life  id.Life
	seals *memory.SealTable
	conn  *net.UnixConn
	ended chan struct{}
}

// Adopt lends the memory of every local rank of the node at an engine socket,
// whose arena.memory is engine, and the seal table that guards it, all of which
// stay the engine's. It waits, as long as ctx, for a node that wants them, and
// returns when that one serves: now sessions can be opened.
//
// Arenas are [*memory.Region] or [*cuda.Arena] of the engine's own making, and
// have the bytes of the node's arena, and none that another rank has; else the error
// wraps ErrRefused. They must stay as they are until Ended is closed. With an error
// nobody has been given a page of the memory: a node that was about to take it lets
// go by itself, and until then it may change words of the table.
//
// Memory is lent to the next life only when Ended of the former adoption is closed:
// before that its Clear would end the new life's words.
func Adopt(ctx context.Context, socket string, arenas map[id.Rank]memory.Arena, seals *memory.SealTable) (*Adoption, error) {
	for {
		a, err := lend(ctx, socket+kvferrypb.ArenaSuffix, arenas, seals)
		switch {
		case err == nil:
			return a, nil
		case errors.Is(err, ErrRefused):
			return nil, fmt.Errorf("lend the arena: %w", err)
		}
		t := time.NewTimer(adoptInterval)
		select {
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil, fmt.Errorf("lend the arena: %w: %w (%w)", ErrUnreachable, context.Cause(ctx), err)
		}
	}
}

// offer is what is said of the arenas, and the files that go with it.
type offer struct {
	lend   kvferrypb.Lend
	files  []*os.File
	closed []*os.File // those of files that are ours
}

func newOffer(arenas map[id.Rank]memory.Arena, seals *memory.SealTable) (*offer, error) {
	o := &offer{lend: kvferrypb.Lend{Version: kvferrypb.LendVersion}}
	for _, r := range slices.Sorted(maps.Keys(arenas)) {
		m := &kvferrypb.Lend_Arena{Rank: uint32(r), Bytes: uint64(arenas[r].Size()), Files: 1}
		switch a := arenas[r].(type) {
		case *memory.Region:
			o.files = append(o.files, a.File())
		case *cuda.Arena:
			if other, ok := sharing(arenas, r, a); ok {
				o.close()
				return nil, fmt.Errorf("%w: ranks %d and %d lie in the same memory of a device", ErrRefused, other, r)
			}
			handle, files, err := a.Export()
			if err != nil {
				o.close()
				if errors.Is(err, cuda.ErrNotShareable) {
					err = fmt.Errorf("%w (%s)", err, kvferrypb.ShareRemedy)
				}
				return nil, fmt.Errorf("%w: rank %d: %w", ErrRefused, r, err)
			}
			m.Cuda, m.Files = handle.Append(nil), uint32(len(files))
			o.files, o.closed = append(o.files, files...), append(o.closed, files...)
		default:
			o.close()
			return nil, fmt.Errorf("%w: rank %d: an arena of kind %T can't be lent", ErrRefused, r, a)
		}
		o.lend.Arenas = append(o.lend.Arenas, m)
	}
	o.files = append(o.files, seals.Region().File())
	return o, nil
}

// sharing finds a rank before r whose memory is a's, in part. Only who has their
// addresses can tell that of memory with files; no two devices share any.
func sharing(arenas map[id.Rank]memory.Arena, r id.Rank, a *cuda.Arena) (other id.Rank, found bool) {
	for other, b := range arenas {
		b, ok := b.(*cuda.Arena)
		if ok && other < r && b.Address() < a.Address()+memory.DeviceAddr(a.Size()) && a.Address() < b.Address()+memory.DeviceAddr(b.Size()) {
			return other, true
		}
	}
	return 0, false
}

func (o *offer) close() {
	for _, f := range o.closed {
		_ = f.Close()
	}
}

// lend is one attempt.
func lend(ctx context.Context, path string, arenas map[id.Rank]memory.Arena, seals *memory.SealTable) (_ *Adoption, err error) {
	o, err := newOffer(arenas, seals)
	if err != nil {
		return nil, err
	}
	defer o.close()
	frame, err := kvferrypb.FrameOf(&o.lend)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRefused, err)
	}
	c, err := dialUnix(ctx, path)
	if err != nil {
		return nil, err
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("%s is not a unix socket", path), c.Close())
	}
	over := context.AfterFunc(ctx, func() { _ = conn.Close() })
	var lent kvferrypb.Lent
	sent := o.send(conn, frame)
	// A node that refuses may have answered before it was told everything.
	err = errors.Join(kvferrypb.ReadFrame(conn, &lent), sent)
	switch {
	case lent.GetRefused() != "":
		err = fmt.Errorf("%w: %s", ErrRefused, lent.GetRefused())
	case err == nil && !over():
		err = context.Cause(ctx)
	}
	if err != nil {
		over()
		_ = conn.Close()
		return nil, err
	}
	a := &Adoption{
		life:  id.Life{Node: id.Node(lent.GetNode()), Incarnation: id.Incarnation(lent.GetIncarnation())},
		seals: seals, conn: conn, ended: make(chan struct{}),
	}
	go a.await() // ends with the connection, at Close at the latest, which waits for it
	return a, nil
}

func (o *offer) send(conn *net.UnixConn, frame []byte) error {
	if _, err := conn.Write(frame); err != nil {
		return err
	}
	for _, f := range o.files {
		if err := memory.SendFile(conn, []byte{1}, f); err != nil {
			return err
		}
	}
	return nil
}

// await clears the words as soon as nobody else guards the pages.
func (a *Adoption) await() {
	var b [1]byte
	_, _ = a.conn.Read(b[:]) // nothing is said any more
	_ = a.conn.Close()
	a.Clear()
	close(a.ended)
}

// Life is the node's life that uses the memory.
func (a *Adoption) Life() id.Life { return a.life }

// Ended is closed when that life uses the memory no more: it has let go, or it
// has died. Every word of the seal table has been cleared then. Until a next
// Adopt has returned the engine writes no pages but those of the step that it was
// given, and no others before that one has ended.
func (a *Adoption) Ended() <-chan struct{} { return a.ended }

// Clear ends every publication of the node: it changes every word of the seal
// table, and returns when all readers see it.
func (a *Adoption) Clear() {
	for i := range uint32(memory.Words) {
		a.seals.Store(i, 0)
	}
}

// Close asks for the memory back and waits until the node has let go of it. With
// an error the node may still use it. It may be called twice.
func (a *Adoption) Close() error {
	_ = a.conn.CloseWrite() // closed, if it has ended
	t := time.NewTimer(letGoTimeout)
	defer t.Stop()
	select {
	case <-a.ended:
		return nil
	case <-t.C:
		_ = a.conn.Close()
		<-a.ended
		return fmt.Errorf("%s has not let go of the arena within %v: end its process before the memory is used for something else", a.life, letGoTimeout)
	}
}
