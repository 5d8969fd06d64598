package rdmatest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/double"
)

// Faults are what goes wrong, and how slow it is, in all processes of a world.
// A zero field means that this does not.
type Faults struct {
	Seed uint64 // of all that is random: a process rolls its dice from here on anew at every Set

	Delay     time.Duration // every read takes at least so long
	Jitter    time.Duration // and at random up to so much more
	Bandwidth uint64        // bytes/s of a device, in each direction, for all of its queue pairs together
	MaxReads  int           // reads under way for a queue pair, however many were agreed on

	// RetryWindow is how long a peer that does not answer is tried again until
	// the read ends with RETRY_EXC. Default: what the queue pair's timeout and
	// retry count come to.
	RetryWindow time.Duration
	Lose        int // per mille of the reads that are never answered

	FailNth    uint64 // the read that fails, counted from 1 at Set
	Fail       int    // per mille of the reads that fail
	FailStatus int    // enum ibv_wc_status of those that fail; default REM_OP_ERR

	Stuck    bool          // nothing lands or completes but by the error state
	LateDMA  time.Duration // what is under way when a queue pair goes to the error state lands so much later, and only then is flushed
	NoFlush  bool          // the error state flushes nothing: only destroying the queue pair ends what was posted
	Reorder  bool          // reads under way land in any order; completions stay in order
	FlipByte uint64        // of the bytes that land, counted from 1 at Set, the one that is wrong

	PostENOMEM    int    // per mille of the work requests that post_send refuses
	PDENOMEM      int    // the call of alloc_pd that is refused, counted from 1 at Set
	RegionENOMEM  int    // of reg_mr
	CQENOMEM      int    // of create_cq
	QPENOMEM      int    // of create_qp
	ChannelENOMEM int    // of create_comp_channel
	Memlock       uint64 // bytes that a process may lock by regions and completion queues
	NoDMABuf      bool   // reg_dmabuf_mr says EOPNOTSUPP, as Soft-RoCE and old drivers do
}

const statusRemOpErr = 11

// Set makes f what goes wrong from now on, in place of what was set before,
// and begins to count anew.
func (w *World) Set(f Faults) {
	if f.FailStatus == 0 {
		f.FailStatus = statusRemOpErr
	}
	flag := func(b bool) uint32 {
		if b {
			return 1
		}
		return 0
	}
	err := w.control.Locked(func(c *control) error {
		s := &c.faults
		for p, v := range map[*uint64]uint64{
			&s.seed: f.Seed, &s.delay: uint64(f.Delay), &s.jitter: uint64(f.Jitter), &s.bandwidth: f.Bandwidth, &s.retryWindow: uint64(f.RetryWindow),
			&s.lateDMA: uint64(f.LateDMA), &s.memlock: f.Memlock, &s.failNth: f.FailNth, &s.flipByte: f.FlipByte, &s.begun: 0, &s.landed: 0,
		} {
			atomic.StoreUint64(p, v)
		}
		for p, v := range map[*uint32]uint32{
			&s.maxReads: uint32(f.MaxReads), &s.lose: uint32(f.Lose), &s.fail: uint32(f.Fail), &s.failStatus: uint32(f.FailStatus), &s.postENOMEM: uint32(f.PostENOMEM),
			&s.reorder: flag(f.Reorder), &s.stuck: flag(f.Stuck), &s.noFlush: flag(f.NoFlush), &s.noDMABuf: flag(f.NoDMABuf),
		} {
			atomic.StoreUint32(p, v)
		}
		for verb, nth := range [verbs]int{verbPD: f.PDENOMEM, verbRegion: f.RegionENOMEM, verbCQ: f.CQENOMEM, verbQP: f.QPENOMEM, verbChannel: f.ChannelENOMEM} {
			atomic.StoreUint32(&s.calls[verb], 0)
			atomic.StoreUint32(&s.enomem[verb], uint32(nth))
		}
		atomic.AddUint64(&s.set, 1)
		for i := range c.context {
			ring(&c.context[i])
		}
		return nil
	})
	if err != nil {
		panic("rdmatest: " + err.Error())
	}
}

// Clear lets all be well.
func (w *World) Clear() { w.Set(Faults{}) }

const (
	portDown   = 1
	portActive = 4
)

// EventKind is something that happens to a device: enum ibv_event_type.
type EventKind uint32

// What [World.Event] can make happen.
const (
	DeviceFatal EventKind = 8 // all of its queue pairs fail; it can be closed, and not be opened again
	PortActive  EventKind = 9
	PortError   EventKind = 10 // the port goes down: nothing answers by it until PortActive
	GIDChange   EventKind = 18
)

const qpFatal = 1

// Event makes something happen to a device, and tells all who have opened it.
func (w *World) Event(device string, kind EventKind) error {
	return w.control.Locked(func(c *control) error {
		i, d := c.named(device)
		if d == nil {
			return fmt.Errorf("event: no device %q", device)
		}
		switch kind {
		case PortActive, PortError:
			state := uint32(portActive)
			if kind == PortError {
				state = portDown
			}
			atomic.StoreUint32(&d.portState, state)
			if err := os.WriteFile(filepath.Join(w.sysfs(device), "ports", "1", "state"), []byte(stateText(state)+"\n"), 0o644); err != nil {
				return fmt.Errorf("event: %w", err)
			}
		case DeviceFatal:
			atomic.StoreUint32(&d.fatal, 1)
			for q := range c.qp {
				if p := &c.qp[q]; atomic.LoadUint32(&p.num) != 0 && c.context[p.context].device == i {
					atomic.StoreUint32(&p.state, qpErr)
				}
			}
		case GIDChange:
		default:
			return fmt.Errorf("event: no kind %d", kind)
		}
		c.tell(i, uint32(kind), 1)
		return nil
	})
}

// SetGIDs changes the address table of a device's port, at most 8 entries, and
// tells all who have opened it. Queue pairs that use an address that is gone
// are no longer reached.
func (w *World) SetGIDs(device string, gids ...[16]byte) error {
	if len(gids) > maxGIDs {
		return fmt.Errorf("set GIDs: %d, at most %d", len(gids), maxGIDs)
	}
	return w.control.Locked(func(c *control) error {
		i, d := c.named(device)
		if d == nil {
			return fmt.Errorf("set GIDs: no device %q", device)
		}
		for n := range maxGIDs {
			var gid [16]byte
			if n < len(gids) {
				gid = gids[n]
			}
			d.gid[n] = gid
			if err := os.WriteFile(filepath.Join(w.sysfs(device), "ports", "1", "gids", fmt.Sprint(n)), []byte(gidText(gid)+"\n"), 0o644); err != nil {
				return fmt.Errorf("set GIDs: %w", err)
			}
		}
		c.tell(i, uint32(GIDChange), 1)
		return nil
	})
}

const (
	qpReset = 0
	qpErr   = 6
)

// ResetQP resets a queue pair from outside, without telling its process: it
// answers no more, and of what it had under way nothing is heard again.
func (w *World) ResetQP(num uint32) error {
	return w.control.Locked(func(c *control) error {
		p := &c.qp[num%maxPairs]
		if num == 0 || atomic.LoadUint32(&p.num) != num {
			return fmt.Errorf("reset: no queue pair %d", num)
		}
		atomic.StoreUint32(&p.state, qpReset)
		ring(&c.context[p.context])
		return nil
	})
}

// FailQP puts a queue pair into the error state, and tells its process that it
// has failed.
func (w *World) FailQP(num uint32) error {
	return w.control.Locked(func(c *control) error {
		p := &c.qp[num%maxPairs]
		if num == 0 || atomic.LoadUint32(&p.num) != num {
			return fmt.Errorf("fail: no queue pair %d", num)
		}
		atomic.StoreUint32(&p.state, qpErr)
		c.tell(c.context[p.context].device, qpFatal, num)
		return nil
	})
}

// Deregister takes a region away from outside: its key is good for nothing.
func (w *World) Deregister(rkey uint32) error {
	return w.control.Locked(func(c *control) error {
		r := &c.region[rkey%maxRegions]
		if rkey == 0 || atomic.LoadUint32(&r.key) != rkey {
			return fmt.Errorf("deregister: no region %#x", rkey)
		}
		atomic.StoreUint32(&r.key, 0)
		return nil
	})
}

func (c *control) named(device string) (uint32, *device) {
	for i := range c.devices {
		d := &c.device[i]
		if name, _, _ := bytes.Cut(d.name[:], []byte{0}); string(name) == device {
			return i, d
		}
	}
	return 0, nil
}

// tell appends an event to a device and wakes who has opened it. Under the lock.
func (c *control) tell(i, kind, element uint32) {
	d := &c.device[i]
	atomic.StoreUint64(&d.event[d.events%eventRing], uint64(kind)<<32|uint64(element))
	atomic.AddUint64(&d.events, 1)
	for n := range c.context {
		if x := &c.context[n]; x.device == i {
			ring(x)
		}
	}
}

// ring wakes the engine of a context.
func ring(x *contextSlot) {
	if atomic.LoadUint32(&x.pid) != 0 {
		double.Wake(&x.doorbell)
	}
}
