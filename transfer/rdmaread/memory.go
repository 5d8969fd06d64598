package rdmaread

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// Reach is how a device gets at the memory of an arena. The best that works is
// taken, by each device for each arena, and by each side for itself.
type Reach int

// The ways, the best first.
const (
	InHost    Reach = iota // host memory, that is registered
	ByDMABuf               // memory of another device, that is registered by a dma-buf
	ByPeerMem              // the same, by its address and the kernel's nvidia_peermem
	Staged                 // memory of another device, copied through the host
)

func (r Reach) String() string { return [...]string{"host", "dma-buf", "peermem", "staged"}[r] }

// arena is how a device of ours reaches one of our arenas.
type arena struct {
	region *rdma.Region // nil: it is staged
	reach  Reach
	why    error // why it is reached no better
}

const arenaAccess = rdma.LocalWrite | rdma.RemoteRead | rdma.RelaxedOrdering

// register gives arenas and seal table to every device.
func (t *Transport) register() error {
	need := uint64(t.o.Local.Seals.Region().Size())
	for _, a := range t.o.Local.Arenas {
		if mem, ok := transfer.InHost(a); ok {
			need += uint64(len(mem))
		}
	}
	if err := rdma.CheckMemlock((need + SpareBytes) * uint64(len(t.devices))); err != nil {
		return fmt.Errorf("register %d bytes with each of %d devices, and have %d for the queues of links: %w", need, len(t.devices), SpareBytes, err)
	}
	for _, d := range t.devices {
		if err := d.register(); err != nil {
			return fmt.Errorf("device %s: %w", d.dev.Name(), err)
		}
	}
	if err := t.stage(); err != nil {
		return err
	}
	for _, d := range t.devices {
		if err := tellable(t.o.Local.Life, d.offered); err != nil {
			return fmt.Errorf("device %s: %w", d.dev.Name(), err)
		}
	}
	return nil
}

func (d *device) register() (err error) {
	if d.pd, err = d.dev.NewPD(); err != nil {
		return err
	}
	// Seal words are read by their order: no relaxed ordering, on either side.
	seals, err := d.pin(d.pd.Register(d.t.o.Local.Seals.Region().Bytes(), rdma.RemoteRead))
	if err != nil {
		return fmt.Errorf("register the seal table: %w", err)
	}
	d.offered.seals = remoteOf(seals)
	d.registered = seals.Len()
	keys := len(d.offered.seals.keys)
	for _, rank := range slices.Sorted(maps.Keys(d.t.o.Local.Arenas)) {
		a, err := d.reach(d.t.o.Local.Arenas[rank])
		if err != nil {
			return fmt.Errorf("register the arena of rank %d: %w", int(rank), err)
		}
		d.arenas[rank] = a
		d.tell(rank, a)
		if a.region == nil {
			size := region{bytes: uint64(d.t.o.Local.Arenas[rank].Size())}
			d.local[rank], d.offered.arenas[rank], d.staged = size, size, true
			continue
		}
		d.local[rank], d.offered.arenas[rank] = localOf(a.region), remoteOf(a.region)
		d.registered += a.region.Len()
		if x, ok := d.t.o.Local.Arenas[rank].(memory.DMABufExporter); ok {
			d.t.flushed[rank] = x
		}
		if keys += len(a.region.Keys()); keys > maxKeys {
			return fmt.Errorf("the memory has more than %d slices of %d bytes", maxKeys, a.region.SliceBytes())
		}
	}
	return nil
}

// reach registers an arena in the best way that works. Host memory that cannot be
// registered is an error; memory of a device that cannot be is staged.
func (d *device) reach(a memory.Arena) (arena, error) {
	if mem, ok := transfer.InHost(a); ok {
		r, err := d.pin(d.pd.Register(mem, arenaAccess))
		return arena{region: r, reach: InHost}, err
	}
	x, ok := a.(memory.DMABufExporter)
	if !ok {
		return arena{reach: Staged, why: errors.New("its device tells nobody where its memory is")}, nil
	}
	if err := x.Flush(); err != nil { // as each read would fail
		return arena{reach: Staged, why: fmt.Errorf("its device would not see what has landed: %w", err)}, nil
	}
	r, err := d.byDMABuf(x)
	if err == nil {
		return arena{region: r, reach: ByDMABuf}, nil
	}
	why := fmt.Errorf("not by dma-buf: %w", err)
	if errors.Is(err, memory.ErrOutOfReach) {
		return arena{reach: Staged, why: why}, nil
	}
	if !peerMem(d.t.o.root) {
		return arena{reach: Staged, why: fmt.Errorf("%w; not by peermem: the kernel's module is not there (modprobe nvidia_peermem)", why)}, nil
	}
	r, err = d.pin(d.pd.RegisterRange(uint64(x.Address()), uint64(x.Size()), arenaAccess))
	if err == nil {
		return arena{region: r, reach: ByPeerMem, why: why}, nil
	}
	return arena{reach: Staged, why: fmt.Errorf("%w; not by peermem: %w", why, err)}, nil
}

// peerMem reports whether the kernel of a machine has the module.
func peerMem(root fs.FS) bool {
	_, err := fs.Stat(root, "sys/module/nvidia_peermem")
	return err == nil
}

func (d *device) byDMABuf(x memory.DMABufExporter) (*rdma.Region, error) {
	f, at, err := x.DMABuf(0, x.Size())
	if err != nil {
		return nil, err
	}
	defer f.Close() // what is registered does not need it
	return d.pin(d.pd.RegisterDMABuf(int(f.Fd()), uint64(at), uint64(x.Size()), uint64(x.Address()), arenaAccess))
}

// pin keeps what has been registered until the device is closed.
func (d *device) pin(r *rdma.Region, err error) (*rdma.Region, error) {
	if err != nil {
		return nil, err
	}
	d.open = append(d.open, r)
	return r, nil
}

// tell logs how the memory of another device is reached.
func (d *device) tell(rank id.Rank, a arena) {
	log := d.t.o.Logger.With("device", d.dev.Name(), "rank", int(rank))
	switch a.reach {
	case InHost:
	case Staged:
		log.Warn("RDMA does not reach device memory: it is copied through the host", "err", a.why)
	default:
		log.Info("RDMA reaches device memory", "by", a.reach.String(), "err", a.why)
	}
}

// reached is the worst way by which one of our arenas is reached, and why it is
// no better.
func (d *device) reached() (how Reach, why string) {
	for _, a := range d.arenas {
		if a.reach > how {
			how, why = a.reach, ""
			if a.why != nil {
				why = a.why.Error()
			}
		}
	}
	return how, why
}

// flush returns when what devices have written into the arenas of copies is seen
// by the devices whose memory that is.
func (t *Transport) flush(copies []transfer.Copy) error {
	if len(t.flushed) == 0 {
		return nil
	}
	last := id.Rank(-1)
	var done [id.MaxRanks]bool
	for i := range copies {
		rank := copies[i].Rank
		if rank == last || done[rank] {
			continue
		}
		last, done[rank] = rank, true
		x, ok := t.flushed[rank]
		if !ok {
			continue
		}
		if err := x.Flush(); err != nil {
			return fmt.Errorf("flush what has landed in the memory of rank %d: %w", int(rank), err)
		}
	}
	return nil
}

// tellable reports whether an answer with these regions can be sent.
func tellable(owner id.Life, r regions) error {
	a := answer{owner: owner, regions: r}
	a.end.gid = netip.IPv6Unspecified()
	if r.staged() {
		a.regions.ring, a.regions.buffers = region{slice: r.seals.slice, keys: make([]uint32, ringBytes/min(r.seals.slice, ringBytes)+1)}, ringBuffers
	}
	if n := len(a.encode()); n > maxAnswer {
		return fmt.Errorf("the keys of its memory make an answer of %d bytes to a peer, at most %d can be sent: use smaller arenas, or a device that registers more than %d bytes at once", n, maxAnswer, r.seals.slice)
	}
	return nil
}

// localOf is a region by the keys of this side, remoteOf by those for peers.
func localOf(r *rdma.Region) region {
	return regionOf(r, func(k rdma.Key) uint32 { return k.L })
}

func remoteOf(r *rdma.Region) region {
	return regionOf(r, func(k rdma.Key) uint32 { return k.R })
}

func regionOf(r *rdma.Region, key func(rdma.Key) uint32) region {
	out := region{addr: r.Addr(), bytes: r.Len(), slice: r.SliceBytes()}
	for _, k := range r.Keys() {
		out.keys = append(out.keys, key(k))
	}
	return out
}
