//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

// Runtime is the driver, opened. It is safe for concurrent use.
type Runtime struct {
	log     *slog.Logger
	scatter int64 // Options.Scatter
	chunk   int64 // Options.PinChunk
	devices []*device
	work    sync.WaitGroup // what pins in the background
	turn    chan struct{}  // to pin: the driver has locks for that which all of its users want
	dead    chan struct{}
	counts  counts
	shut    sync.Once
	shutErr error

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup // what needs a device and has no arena yet; Add under mu, while not closed
	reason error          // of the first device that died
	arenas map[*Arena]struct{}
	pins   map[*pinned]struct{}
}

// counts are what Stats tells.
type counts struct {
	copies  [3]struct{ calls, segments, bytes, slow atomic.Uint64 }
	kernels atomic.Uint64
	pinned  atomic.Int64
	pinning atomic.Int64
}

// Open binds the driver, once a process, and looks at its devices. The error
// wraps [ErrUnavailable] where this machine has none. No device is touched
// before it is used.
func Open(o Options) (*Runtime, error) {
	r := &Runtime{
		log: o.Logger, scatter: o.Scatter, chunk: rounded(o.PinChunk, hugePage),
		turn: make(chan struct{}, 1), dead: make(chan struct{}),
		arenas: make(map[*Arena]struct{}), pins: make(map[*pinned]struct{}),
	}
	if r.log == nil {
		r.log = slog.New(slog.DiscardHandler)
	}
	if r.chunk <= 0 {
		r.chunk = 1 << 30
	}
	if err := driver.Bind(o.Library); err != nil {
		return nil, fmt.Errorf("%w: no library of the driver: %w", ErrUnavailable, err)
	}
	if err := driver.Init(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	n, err := driver.Count()
	if err == nil && n == 0 {
		err = errors.New("the driver shows no device")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnavailable, err)
	}
	for i := range n {
		gpu, err := look(driver.Device(i))
		if err != nil {
			return nil, fmt.Errorf("%w: look at device %d: %w", ErrUnavailable, i, err)
		}
		r.devices = append(r.devices, newDevice(r, gpu))
	}
	return r, nil
}

// look asks what a device is; it makes no context.
func look(d driver.Device) (GPU, error) {
	g := GPU{Ordinal: int(d), NUMANode: -1}
	var err error
	if g.UUID, err = d.UUID(); err != nil {
		return g, err
	}
	if g.Name, err = d.Name(); err != nil {
		return g, err
	}
	if g.Bytes, err = d.Bytes(); err != nil {
		return g, err
	}
	if g.Bus, err = d.Bus(); err != nil {
		return g, err
	}
	if b, err := os.ReadFile(filepath.Join("/sys/bus/pci/devices", filepath.Base(g.Bus), "numa_node")); err == nil {
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			g.NUMANode = n
		}
	}
	return g, nil
}

// GPUs are the devices, by ordinal.
func (r *Runtime) GPUs() []GPU {
	list := make([]GPU, len(r.devices))
	for i, d := range r.devices {
		list[i] = d.gpu
	}
	return list
}

// Find returns the device that a text names: an ordinal, or "GPU-" and a UUID.
// The error wraps [ErrUnavailable], and names those that there are.
func (r *Runtime) Find(text string) (GPU, error) {
	if n, err := strconv.Atoi(text); err == nil {
		if n >= 0 && n < len(r.devices) {
			return r.devices[n].gpu, nil
		}
		return GPU{}, fmt.Errorf("%w: there is no device %d, only 0 to %d", ErrUnavailable, n, len(r.devices)-1)
	}
	u, err := ParseUUID(text)
	if err != nil {
		return GPU{}, err
	}
	d, err := r.device(u)
	if err != nil {
		return GPU{}, err
	}
	return d.gpu, nil
}

func (r *Runtime) device(u UUID) (*device, error) {
	for _, d := range r.devices {
		if d.gpu.UUID == u {
			return d, nil
		}
	}
	have := make([]string, len(r.devices))
	for i, d := range r.devices {
		have[i] = d.gpu.UUID.String()
	}
	return nil, fmt.Errorf("%w: this process sees no device %s, only %s (CUDA_VISIBLE_DEVICES?)", ErrUnavailable, u, strings.Join(have, ", "))
}

// Capabilities are what a device and its driver can. It opens the device, which
// costs memory of it, and time: [Runtime.Look] does not.
func (r *Runtime) Capabilities(u UUID) (Capabilities, error) {
	if err := r.enter(); err != nil {
		return Capabilities{}, err
	}
	defer r.calls.Done()
	d, err := r.opened(u)
	if err != nil {
		return Capabilities{}, err
	}
	c := d.look()
	c.Scatter = d.caps.Scatter
	return c, nil
}

// Look is Capabilities of a device as it is, opened or not: it makes no context
// and takes no memory. Scatter, which is measured, is 0. Of a device that is dead
// it returns what that could do, and an error that wraps [ErrDead].
func (r *Runtime) Look(u UUID) (Capabilities, error) {
	d, err := r.device(u)
	if err != nil {
		return Capabilities{}, err
	}
	return d.look(), d.alive()
}

// enter keeps the runtime open until calls.Done.
func (r *Runtime) enter() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return fmt.Errorf("runtime: %w", ErrClosed)
	}
	r.calls.Add(1)
	return nil
}

// opened is a device that is ready for copies. Who asks has entered.
func (r *Runtime) opened(u UUID) (*device, error) {
	d, err := r.device(u)
	if err != nil {
		return nil, err
	}
	if err := d.open(); err != nil {
		return nil, fmt.Errorf("open %s: %w", d.gpu.UUID, err)
	}
	return d, nil
}

// Reach says whether a device can read the memory of another by itself, and makes
// it so; nil if they are one. The error says why not: copies go by the host then.
func (r *Runtime) Reach(dst, src UUID) error {
	if err := r.enter(); err != nil {
		return err
	}
	defer r.calls.Done()
	d, err := r.opened(dst)
	if err != nil {
		return err
	}
	s, err := r.opened(src)
	if err != nil {
		return err
	}
	return d.reach(s)
}

// Dead is closed when a device of the runtime has died; Reason says why.
func (r *Runtime) Dead() <-chan struct{} { return r.dead }

// Reason is the error of the first device that died, nil if none has.
func (r *Runtime) Reason() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.reason
}

func (r *Runtime) died(err error) {
	r.mu.Lock()
	first := r.reason == nil
	if first {
		r.reason = err
	}
	r.mu.Unlock()
	if first {
		r.log.Error("device is dead", "err", err)
		close(r.dead)
	}
}

// Stats may be called at any time.
func (r *Runtime) Stats() Stats {
	var s Stats
	for i := range s.Copies {
		c := &r.counts.copies[i]
		s.Copies[i] = Copies{Calls: c.calls.Load(), Segments: c.segments.Load(), Bytes: c.bytes.Load(), Slow: c.slow.Load()}
	}
	s.Kernels, s.Pinned, s.Pinning = r.counts.kernels.Load(), r.counts.pinned.Load(), r.counts.pinning.Load()
	r.mu.Lock()
	defer r.mu.Unlock()
	for a := range r.arenas {
		if a.imported {
			s.Imported++
		} else {
			s.Arenas++
		}
	}
	return s
}

// add takes an arena in. Who makes it has entered: Close finds it.
func (r *Runtime) add(a *Arena) *Arena {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.arenas[a] = struct{}{}
	return a
}

func (r *Runtime) remove(a *Arena) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.arenas, a)
}

// Close waits for every call and every copy, and frees what is left: arenas that
// are open are closed. It may be called twice, and returns when all is over.
func (r *Runtime) Close() error {
	r.shut.Do(func() { r.shutErr = r.close() })
	return r.shutErr
}

func (r *Runtime) close() error {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	r.calls.Wait()
	r.mu.Lock()
	arenas := make([]*Arena, 0, len(r.arenas))
	for a := range r.arenas {
		arenas = append(arenas, a)
	}
	pins := make([]*pinned, 0, len(r.pins))
	for p := range r.pins {
		pins = append(pins, p)
	}
	r.mu.Unlock()

	var errs []error
	for _, a := range arenas {
		errs = append(errs, a.Close())
	}
	for _, p := range pins {
		errs = append(errs, p.drop(true))
	}
	r.work.Wait()
	for _, d := range slices.Backward(r.devices) {
		errs = append(errs, d.close())
	}
	return errors.Join(errs...)
}
