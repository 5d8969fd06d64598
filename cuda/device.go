//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"github.com/kvferry/kvferry/cuda/internal/driver"
	"github.com/kvferry/kvferry/cuda/internal/ptx"
)

// device is one device of a runtime: nothing but a name until it is opened.
type device struct {
	r    *Runtime
	gpu  GPU
	form atomic.Int32 // driver.Form

	turn   chan struct{} // of who opens or closes it
	ready  bool          // these are set, from open to close
	ctx    driver.Context
	aside  driver.Stream // for what is not copied
	kernel *driver.Kernel
	lanes  [3]*lane
	caps   Capabilities
	gone   bool // it was closed

	mu     sync.Mutex
	reason error          // why it is dead
	peers  map[UUID]error // whose memory its batches can read, or why not
}

func newDevice(r *Runtime, gpu GPU) *device {
	d := &device{r: r, gpu: gpu, turn: make(chan struct{}, 1), peers: make(map[UUID]error)}
	d.form.Store(int32(driver.Forms()))
	return d
}

// open makes the device ready, once.
func (d *device) open() error {
	d.turn <- struct{}{}
	defer func() { <-d.turn }()
	switch {
	case d.ready:
		return d.alive()
	case d.gone:
		return fmt.Errorf("runtime: %w", ErrClosed)
	}
	ctx, err := driver.Retain(driver.Device(d.gpu.Ordinal))
	if err != nil {
		return d.judge(err)
	}
	d.ctx = ctx
	d.caps = d.look()
	if err := d.do(d.make); err != nil {
		return errors.Join(err, d.unmake())
	}
	for _, l := range d.lanes {
		l.start()
	}
	d.ready = true
	d.r.log.Info("device opened", "device", d.gpu.UUID.String(), "name", d.gpu.Name, "driver", d.caps.Driver,
		"batch", d.caps.Batch, "dma_buf", d.caps.DMABuf, "peermem", d.caps.PeerMem, "scatter_below", d.caps.Scatter)
	return nil
}

// look finds out what the device can, without a context.
func (d *device) look() Capabilities {
	dev := driver.Device(d.gpu.Ordinal)
	_, err := os.Stat("/sys/module/nvidia_peermem")
	return Capabilities{
		Driver:       driver.Version(),
		Batch:        driver.Form(d.form.Load()) != driver.OneByOne,
		DMABuf:       dev.Attribute(driver.DMABufs) != 0,
		PeerMem:      err == nil,
		OwnerOrdered: dev.Attribute(driver.WritesOrdering) >= ownerOrdered,
	}
}

// make makes all that the device has; the context is current.
func (d *device) make() error {
	var err error
	if d.aside, err = driver.NewStream(); err != nil {
		return err
	}
	for i := range d.lanes {
		if d.lanes[i], err = newLane(d, Direction(i)); err != nil {
			return err
		}
	}
	if d.r.scatter < 0 {
		return nil
	}
	k, err := driver.LoadKernel(ptx.CopyList, ptx.Name)
	if err != nil {
		d.r.log.Warn("no kernel on this device, small pieces go one by one", "device", d.gpu.UUID.String(), "err", err)
		return nil
	}
	d.kernel = &k
	l := d.lanes[HostToDevice]
	if err := l.makeSlots(); err != nil {
		return err
	}
	if d.caps.Scatter = min(d.r.scatter, maxScatter); d.caps.Scatter != 0 {
		return nil
	}
	if d.caps.Scatter, err = l.calibrate(); err != nil {
		return fmt.Errorf("measure small copies: %w", err)
	}
	if d.caps.Scatter == 0 {
		return l.freeSlots()
	}
	return nil
}

// unmake undoes what open has done, as far as it came.
func (d *device) unmake() error {
	err := d.ctx.Do(func() error {
		var errs []error
		for i, l := range d.lanes {
			if l != nil {
				errs = append(errs, l.free())
				d.lanes[i] = nil
			}
		}
		if d.kernel != nil {
			errs = append(errs, d.kernel.Unload())
			d.kernel = nil
		}
		if d.aside != (driver.Stream{}) {
			errs = append(errs, d.aside.Destroy())
			d.aside = driver.Stream{}
		}
		return errors.Join(errs...)
	})
	return errors.Join(err, d.ctx.Release())
}

// close ends the lanes, for which nothing is left, and gives the context back.
// What a dead device answers is no news.
func (d *device) close() error {
	d.turn <- struct{}{}
	defer func() { <-d.turn }()
	d.gone = true
	if !d.ready {
		return nil
	}
	d.ready = false
	for _, l := range d.lanes {
		l.stop()
	}
	err := d.unmake()
	if d.alive() != nil {
		err = nil
	}
	return err
}

// do calls f on a thread that has the device's context, and looks at its error.
func (d *device) do(f func() error) error {
	if err := d.alive(); err != nil {
		return err
	}
	return d.judge(d.ctx.Do(f))
}

// free is do for what gives something back: it is tried on a dead device too,
// whose answer is no news.
func (d *device) free(f func() error) error {
	err := d.judge(d.ctx.Do(f))
	if errors.Is(err, ErrDead) || d.alive() != nil {
		err = nil
	}
	return err
}

// alive is the reason why the device is dead, or nil.
func (d *device) alive() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.reason
}

// judge returns err, and takes the device for dead if it is of that kind.
func (d *device) judge(err error) error {
	e, ok := errors.AsType[*driver.Error](err)
	switch {
	case !ok || errors.Is(err, ErrDead):
		return err
	case e.Sticky():
		return d.die(err)
	}
	return err
}

// die takes the device for dead, and returns the first reason for it.
func (d *device) die(err error) error {
	d.mu.Lock()
	first := d.reason == nil
	if first {
		d.reason = fmt.Errorf("%w: %s: %w", ErrDead, d.gpu.UUID, err)
	}
	err = d.reason
	d.mu.Unlock()
	if first {
		d.r.died(err)
	}
	return err
}

// reach lets batches of this device read the memory of a peer; nil: they can.
func (d *device) reach(peer *device) error {
	if d.gpu.Ordinal == peer.gpu.Ordinal {
		return nil
	}
	d.mu.Lock()
	err, known := d.peers[peer.gpu.UUID]
	d.mu.Unlock()
	if known {
		return err
	}
	if driver.Device(d.gpu.Ordinal).Reaches(driver.Device(peer.gpu.Ordinal)) {
		err = d.do(func() error { return driver.Reach(peer.ctx) })
		if e, ok := errors.AsType[*driver.Error](err); ok && e.Code == driver.PeerAlready {
			err = nil
		}
	} else {
		err = errors.New("the machine has no way between them but by the host")
	}
	if err != nil {
		err = fmt.Errorf("%s can't read the memory of %s: %w", d.gpu.UUID, peer.gpu.UUID, err)
		d.r.log.Info("copies between two devices go by the host", "device", d.gpu.UUID.String(), "peer", peer.gpu.UUID.String(), "err", err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.peers[peer.gpu.UUID] = err
	return err
}
