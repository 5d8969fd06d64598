package rdmaread

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// Sizes of what is staged. A buffer takes as long on the wire as the way there
// and back does, several times over, so that a few of them fill it.
const (
	bufferBytes  = 512 << 10
	ringBuffers  = 4
	ringBytes    = ringBuffers * bufferBytes
	leastStaging = 2 * ringBytes // a ring, and as much for reads
)

// stage makes the pools where an arena is staged by one of the devices.
func (t *Transport) stage() (err error) {
	devices := uint64(0)
	for _, d := range t.devices {
		if d.staged {
			devices++
		}
	}
	if devices == 0 {
		return nil
	}
	if t.o.Staging < leastStaging {
		return fmt.Errorf("%d bytes for staging, want at least %d", t.o.Staging, int64(leastStaging))
	}
	half := t.o.Staging / 2
	// A ring is registered with one device, what is for reads with each.
	if err := rdma.CheckMemlock(uint64(half) * (1 + devices)); err != nil {
		return fmt.Errorf("register %d bytes for staging: %w", t.o.Staging, err)
	}
	if t.rings, err = t.pool("rdma rings", ringBytes, half); err != nil {
		return err
	}
	if t.landing, err = t.pool("rdma reads", bufferBytes, half); err != nil {
		return err
	}
	for _, d := range t.devices {
		if !d.staged {
			continue
		}
		r, err := d.pin(d.pd.Register(t.landing.Region().Bytes(), rdma.LocalWrite|rdma.RelaxedOrdering))
		if err != nil {
			return fmt.Errorf("register the buffers for staging with %s: %w", d.dev.Name(), err)
		}
		d.landing = localOf(r)
	}
	return nil
}

func (t *Transport) pool(name string, size, total int64) (*transfer.Pool, error) {
	p, refused, err := transfer.NewPool(name, t.o.Local.Arenas, int(size), int(total/size))
	if refused != nil {
		t.o.Logger.Warn("host memory for staging is not pinned by the device, which copies it slowly", "bytes", total, "err", refused)
	}
	return p, err
}

// ring is where an owner gathers what the reader of one lane asks for. It is made
// before the lane's queue pair, and dropped after that has been destroyed.
type ring struct {
	t         *Transport
	device    *device
	reader    id.Life
	mem       []byte // of the pool
	region    *rdma.Region
	next      uint64 // the number of the next gather
	gathering [ringBuffers]gathering
	ahead     atomic.Int32    // gathers without an answer
	started   chan *gathering // in order, with room for all of them
	answers   chan []byte     // likewise
	dropped   chan struct{}   // closed when no answer is wanted any more
	failed    chan error      // why no further one can be answered; one value
	work      sync.WaitGroup  // the goroutine that waits for gathers
}

// gathering is a gather that has begun, and room for the next that uses its buffer.
type gathering struct {
	gather
	staging transfer.Staging
}

// newRing takes a ring and registers it.
func (d *device) newRing(reader id.Life) (*ring, error) {
	t := d.t
	mem, ok := t.rings.TryGet()
	if !ok {
		t.stats.busy.Add(1)
		return nil, refuse(refusedRing, "a ring of %d bytes for each of %d lanes to stage device memory in is all there is; raise transfer.staging", ringBytes, t.stats.rings.Load())
	}
	region, err := d.pd.Register(mem, rdma.RemoteRead)
	if err != nil {
		t.rings.Put(mem)
		return nil, refuse(refusedVerb, "register a ring: %w", err)
	}
	t.stats.rings.Add(1)
	return &ring{
		t: t, device: d, reader: reader, mem: mem, region: region,
		started: make(chan *gathering, ringBuffers), answers: make(chan []byte, ringBuffers), dropped: make(chan struct{}), failed: make(chan error, 1),
	}, nil
}

// offer adds the ring to what an answer tells.
func (r *ring) offer(to *regions) { to.ring, to.buffers = remoteOf(r.region), ringBuffers }

// drop gives the ring back, once no gather writes to it any more. The lane's queue
// pair has been destroyed. A reader who hears no answer is not waited for.
func (r *ring) drop() {
	close(r.dropped)
	close(r.started)
	r.work.Wait()
	insist(r.region.Close, func(tries int, err error) {
		r.t.o.Logger.Error("host memory for staging can't be deregistered; it is kept until it is", "peer", r.reader.String(), "tries", tries, "err", err)
	})
	r.t.rings.Put(r.mem)
	r.t.stats.rings.Add(-1)
}

// take begins one gather. An error is the reader's fault.
func (r *ring) take(question []byte) error {
	if r.ahead.Load() >= ringBuffers {
		return fmt.Errorf("more than %d gathers at once: %w", ringBuffers, errGarbage)
	}
	i := r.next % ringBuffers
	g := &r.gathering[i] // whatever used it last has been answered
	asked, err := parseGather(question, g.copies[:0])
	if err != nil {
		return err
	}
	if asked.number != r.next {
		return fmt.Errorf("gather %d, want %d: %w", asked.number, r.next, errGarbage)
	}
	var bytes int64
	for i := range asked.copies {
		c := &asked.copies[i]
		if a := &r.device.local[c.Rank]; !a.staged() || !transfer.Inside(c.Remote, c.Bytes, int64(a.bytes)) {
			return fmt.Errorf("gather %d bytes at %d of rank %d: %w", c.Bytes, c.Remote, int(c.Rank), transfer.ErrRange)
		}
		if bytes += c.Bytes; bytes > bufferBytes {
			return fmt.Errorf("gather of more than %d bytes: %w", bufferBytes, errGarbage)
		}
	}
	g.gather = asked
	r.next++
	r.ahead.Add(1)
	g.staging.Gather(r.mem[i*bufferBytes:][:bytes:bytes], r.t.o.Local.Arenas, transfer.Owner, g.copies)
	r.t.stats.gathers.Add(1)
	r.t.stats.stagedBytes.Add(uint64(bytes))
	r.started <- g // has room
	return nil
}

// answer waits for the gathers in their order, and makes an answer to each. It
// returns when all of them have ended.
func (r *ring) answer() {
	for g := range r.started {
		why := g.staging.Wait()
		if why != nil && r.t.speaks() {
			r.t.o.Logger.Warn("device memory could not be copied for a peer", "reader", r.reader.String(), "err", why)
		}
		r.answers <- encodeGathered(g.number, why) // has room: it still counts as ahead
	}
}

// say sends answers, until one can't be sent, or the ring has been dropped: a
// reader who hears none keeps the last of them until Serve has returned.
func (r *ring) say(send func([]byte) error) {
	for {
		select {
		case <-r.dropped:
			return
		case b := <-r.answers:
			r.ahead.Add(-1) // before the reader may know
			if err := send(b); err != nil {
				r.failed <- err // has room
				return
			}
		}
	}
}

// stand keeps a lane, and gathers what its reader asks for, until ctx, the
// transport, or the lane ends.
func (t *Transport) stand(ctx context.Context, s *served, asked <-chan []byte, send func([]byte) error) error {
	var failed <-chan error
	if s.ring != nil {
		failed = s.ring.failed
		s.ring.work.Go(s.ring.answer)
		t.saying.Go(func() { s.ring.say(send) })
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.broken:
			return fmt.Errorf("device %s has failed", s.port.name())
		case <-t.ending:
			return fmt.Errorf("transport: %w", transfer.ErrClosed)
		case err := <-failed:
			return fmt.Errorf("answer a gather: %w", err)
		case question := <-asked:
			err := fmt.Errorf("a question, where nothing is staged: %w", errGarbage)
			if s.ring != nil {
				err = s.ring.take(question)
			}
			if err != nil {
				t.stats.garbage.Add(1)
				return err
			}
		}
	}
}
