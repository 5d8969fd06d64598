//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

const hugePage = 2 << 20

// pins are the host memory that this process has pinned, for all devices: a
// driver takes the same bytes once.
//
//nolint:gochecknoglobals // for that reason
var pins pinRegistry

type pinRegistry struct {
	mu   sync.Mutex
	list []*pinned // few: arenas, and pools
}

// pinned is host memory that is pinned, or on its way to be.
type pinned struct {
	d      *device // by whose context
	host   []byte
	bytes  int64         // of a chunk
	chunks []atomic.Bool // whether each is registered
	users  sync.WaitGroup
	stop   chan struct{}
	ended  chan struct{} // closed when the registering has
	err    error         // why nothing of it is registered; set before ended is closed
	gone   chan struct{} // closed when all has been undone

	refs int // guarded by pins.mu
}

// use finds what some memory is part of, nil if nothing, and keeps it pinned
// until users.Done.
func (r *pinRegistry) use(host []byte) *pinned {
	if len(host) == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.find(host)
	if p != nil {
		p.users.Add(1)
	}
	return p
}

func (r *pinRegistry) find(host []byte) *pinned {
	at, end := address(host), address(host)+uint64(len(host))
	for _, p := range r.list {
		if first := address(p.host); at >= first && end <= first+uint64(len(p.host)) {
			return p
		}
	}
	return nil
}

// take is a reference to what is pinned round some memory, or to a new one,
// which add makes.
func (r *pinRegistry) take(host []byte, add func() *pinned) (p *pinned, fresh bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.find(host); p != nil {
		p.refs++
		return p, false
	}
	p = add()
	r.list = append(r.list, p)
	return p, true
}

// drop gives a reference back, or all, and says whether it was the last, and
// whether the caller is to undo what was pinned, or somebody else already does.
// Nobody finds it after that.
func (r *pinRegistry) drop(p *pinned, all bool) (last, mine bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.refs--; p.refs > 0 && !all {
		return false, false
	}
	i := slices.Index(r.list, p)
	if i < 0 {
		return true, false
	}
	r.list = slices.Delete(r.list, i, i+1)
	return true, true
}

// chunkRest is how many bytes at an offset of host, which is part of p, are of
// one chunk, and whether that is pinned.
func (p *pinned) chunkRest(host []byte, offset int64) (int64, bool) {
	at := int64(address(host)-address(p.host)) + offset
	return p.bytes - at%p.bytes, p.chunks[at/p.bytes].Load()
}

// begins says whether a chunk begins there.
func (p *pinned) begins(host []byte, offset int64) bool {
	return (int64(address(host)-address(p.host))+offset)%p.bytes == 0
}

func (p *pinned) chunk(i int) []byte {
	at := int64(i) * p.bytes
	return p.host[at:min(at+p.bytes, int64(len(p.host)))]
}

// Pin is [memory.Stager.Pin]. Memory begins at a page of the machine. What fits
// into one chunk ([Options]) is pinned when it returns, and the error is the
// driver's. More is pinned in the background, a chunk at a time, and is used
// before that; a chunk that the driver refuses is logged, and stays slow. The same
// memory, or a part of it, may be pinned several times, by any device: that is one
// pinning, which goes on as the first has begun it, and ends with the last unpin.
// unpin waits for copies.
func (a *Arena) Pin(host []byte) (unpin func() error, err error) {
	if err := a.enter(); err != nil {
		return nil, err
	}
	defer a.leave()
	p, err := a.d.pin(host)
	if err != nil {
		return nil, fmt.Errorf("pin %d bytes of host memory: %w", len(host), err)
	}
	return sync.OnceValue(p.unpin), nil
}

func (d *device) pin(host []byte) (*pinned, error) {
	if len(host) == 0 || address(host)%uint64(os.Getpagesize()) != 0 {
		return nil, errors.New("it does not begin at a page")
	}
	p, fresh := pins.take(host, func() *pinned {
		return &pinned{
			d: d, host: host, refs: 1, stop: make(chan struct{}), ended: make(chan struct{}), gone: make(chan struct{}),
			bytes: d.r.chunk, chunks: make([]atomic.Bool, (int64(len(host))+d.r.chunk-1)/d.r.chunk),
		}
	})
	switch {
	case fresh:
		if p.err = d.r.addPin(p); p.err == nil {
			d.r.counts.pinning.Add(int64(len(host)))
			if len(p.chunks) > 1 {
				d.r.work.Go(p.registerSlowly)
				return p, nil
			}
			p.err = p.register(0)
		}
		close(p.ended)
	case len(p.chunks) > 1:
		return p, nil
	default:
		<-p.ended
	}
	if p.err != nil {
		return nil, errors.Join(p.err, p.unpin())
	}
	return p, nil
}

// registerSlowly registers the chunks, one after the other, unless it is stopped,
// and logs what becomes of them.
func (p *pinned) registerSlowly() {
	defer close(p.ended)
	log, begin := p.d.r.log, time.Now()
	log.Info("pinning host memory", "bytes", len(p.host))
	for i := range p.chunks {
		if err := p.register(i); err != nil {
			log.Warn("host memory stays unpinned, copies from and to it are slow", "bytes", len(p.chunk(i)), "chunk", i, "err", err)
			continue
		}
		log.Debug("pinning host memory", "chunk", i+1, "chunks", len(p.chunks))
	}
	log.Info("pinned host memory", "bytes", p.registered(), "took", time.Since(begin))
}

// register registers a chunk, unless it is stopped.
func (p *pinned) register(i int) error {
	r, b := p.d.r, p.chunk(i)
	defer r.counts.pinning.Add(-int64(len(b)))
	select {
	case <-p.stop:
		return nil
	case r.turn <- struct{}{}:
	}
	err := p.d.do(func() error { return driver.Register(b) })
	<-r.turn
	if err == nil {
		p.chunks[i].Store(true)
		r.counts.pinned.Add(int64(len(b)))
	}
	return err
}

// registered is how many bytes are pinned.
func (p *pinned) registered() int {
	n := 0
	for i := range p.chunks {
		if p.chunks[i].Load() {
			n += len(p.chunk(i))
		}
	}
	return n
}

// unpin gives one reference back; with the last it waits for the copies that
// use the memory, and for the registering, and undoes it.
func (p *pinned) unpin() error { return p.drop(false) }

// drop is unpin, of all references where asked.
func (p *pinned) drop(all bool) error {
	last, mine := pins.drop(p, all)
	switch {
	case !last:
		return nil
	case !mine:
		<-p.gone
		return nil
	}
	defer close(p.gone)
	close(p.stop)
	p.users.Wait()
	<-p.ended
	r := p.d.r
	defer r.removePin(p) // until then Close waits for it
	var errs []error
	for i := range p.chunks {
		if p.chunks[i].Load() {
			b := p.chunk(i)
			errs = append(errs, p.d.free(func() error { return driver.Unregister(b) }))
			r.counts.pinned.Add(-int64(len(b)))
		}
	}
	return errors.Join(errs...)
}

// addPin takes pinned memory in, unless the runtime has been closed.
func (r *Runtime) addPin(p *pinned) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("runtime: %w", ErrClosed)
	}
	r.pins[p] = struct{}{}
	return nil
}

func (r *Runtime) removePin(p *pinned) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pins, p)
}
