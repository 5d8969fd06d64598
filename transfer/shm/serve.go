package shm

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/rendezvous"
)

// serve is the owner's side of one connection.
func (t *Transport) serve(c *rendezvous.Conn) error {
	w := welcome{arenas: make(map[id.Rank]int64, len(t.local.Arenas))}
	for r, a := range t.local.Arenas {
		w.arenas[r] = a.Size()
	}
	if t.staging == nil {
		return t.serveArenas(c, w)
	}
	w.buffers, w.bytes = ringBuffers, t.staging.size
	return t.serveRing(c, w)
}

// serveArenas hands our memory over, and waits for the reader's end.
func (t *Transport) serveArenas(c *rendezvous.Conn, w welcome) error {
	err := t.greet(c, w)
	for _, r := range w.ranks() {
		if err == nil {
			err = c.SendForReading(uint16(r), t.local.Arenas[r].(*memory.Region).File())
		}
	}
	if err == nil {
		err = c.Settle()
	}
	if err != nil {
		return err
	}
	return c.Stand()
}

func (t *Transport) greet(c *rendezvous.Conn, w welcome) error {
	if err := c.Welcome(w.encode()); err != nil {
		return err
	}
	return c.SendForReading(sealLabel, t.local.Seals.Region().File())
}

// serveRing fills buffers for one reader until it hangs up, and until the device
// has ended what was started.
func (t *Transport) serveRing(c *rendezvous.Conn, w welcome) (err error) {
	if !t.staging.takeRoom() {
		return fmt.Errorf("%d readers have a ring, and the memory for staging has room for no more: %w", cap(t.staging.room), rendezvous.ErrBusy)
	}
	defer t.staging.giveRoom()
	region, err := memory.New("kvferry-shm-ring", int64(w.buffers)*int64(w.bytes))
	if err != nil {
		return fmt.Errorf("ring: %w: %w", rendezvous.ErrBusy, err)
	}
	unpin, refused := transfer.Pin(t.local.Arenas, region.Bytes())
	defer func() { err = errors.Join(err, unpin(), region.Close()) }()
	if refused != nil {
		t.log.Warn("the ring of a reader is not pinned, and filled slowly", "reader", c.Peer().String(), "err", refused)
	}
	if err := t.greet(c, w); err != nil {
		return err
	}
	// The reader's device may have to pin it, which takes writable memory. It is
	// the reader's alone, which can harm nobody but itself.
	if err := c.SendFile(ringLabel, region.File()); err != nil {
		return err
	}
	if err := c.Settle(); err != nil {
		return err
	}
	f := filling{t: t, c: c, w: &w, buffers: make([]filled, w.buffers), started: make(chan int, w.buffers)}
	for i := range f.buffers {
		f.buffers[i].bytes = region.Bytes()[i*w.bytes:][:w.bytes:w.bytes]
	}
	var work sync.WaitGroup
	work.Go(f.answer)
	defer work.Wait()
	defer close(f.started)
	return f.hear()
}

// filling is the owner's work on one ring: one goroutine hears the reader and
// starts copies, another waits for them and answers.
type filling struct {
	t       *Transport
	c       *rendezvous.Conn
	w       *welcome
	buffers []filled
	started chan int // the buffers whose copies have been started, in that order; each is in it once
}

type filled struct {
	bytes  []byte
	copies []transfer.Copy
	gather transfer.Staging
	busy   atomic.Bool // from the ask to the answer
}

// hear returns when the connection ends, or must end.
func (f *filling) hear() error {
	var room []transfer.Copy
	for {
		k, body, err := f.c.Receive(maxAskBody)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case k != kindAsk:
			return fmt.Errorf("%v, want an ask: %w", k, rendezvous.ErrGarbage)
		}
		i, copies, err := parseAsk(room[:0], body, f.w)
		if err != nil {
			return err
		}
		b := &f.buffers[i]
		if !b.busy.CompareAndSwap(false, true) {
			return fmt.Errorf("ask for buffer %d, which is being filled: %w", i, rendezvous.ErrGarbage)
		}
		b.copies, room = copies, b.copies
		b.gather.Gather(b.bytes, f.t.local.Arenas, transfer.Owner, b.copies)
		f.started <- i
	}
}

// answer waits for every copy, also when there is nobody to tell.
func (f *filling) answer() {
	for i := range f.started {
		b := &f.buffers[i]
		err := b.gather.Wait()
		if err == nil {
			f.t.staged.Add(uint64(transfer.Bytes(b.copies)))
		}
		b.busy.Store(false)                          // the reader may ask as soon as it hears
		_ = f.c.Send(kindFilled, filledBody(i, err)) // if it fails the connection ends
	}
}
