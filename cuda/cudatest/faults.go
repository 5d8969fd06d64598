package cudatest

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvferry/kvferry/internal/double"
)

// Codes of the driver that faults are made of: CUresult.
const (
	OutOfMemory      = 2
	ECCUncorrectable = 214
	NotReady         = 600
	IllegalAddress   = 700
	LaunchFailed     = 719
	NotSupported     = 801
	Unknown          = 999
)

// Faults are what goes wrong, and how slow it is, in all processes of a world.
// A zero field means that this does not.
type Faults struct {
	Delay     time.Duration // every operation that a call starts takes at least so long
	Bandwidth uint64        // bytes/s of a device: to it, from it, and within it
	Fail      []Fail        // at most 16

	// Poison is the code with which the operation PoisonNth fails, counted from
	// 1 at Set (default 1): it is not carried out, and its context is broken for
	// ever, as the device is for its process.
	Poison    int
	PoisonNth uint64

	Strict   bool   // a copy that is to run behind the call is refused with memory that is not pinned
	Hold     bool   // no operation ends until the faults are set anew
	FlipByte uint64 // of the bytes that are copied, counted from 1 at Set, the one that is wrong
}

// Fail makes a call fail by itself.
type Fail struct {
	Call  string // as the header has it, such as "cuMemAlloc_v2"; "cuMemAlloc" is all of its versions
	Code  int
	First int // the first call that fails, counted from 1 at Set; default 1
	Count int // how many do; 0: all from there on
}

// Set makes f what goes wrong from now on, in place of what was set before,
// and begins to count anew. It panics on a call that does not exist.
func (w *World) Set(f Faults) {
	if f.Delay == 0 {
		f.Delay = w.base.Delay
	}
	f.Strict = f.Strict || w.base.Strict
	fails := w.fails(f.Fail)
	err := w.control.Locked(func(c *control) error {
		s := &c.faults
		atomic.StoreUint32(&s.fails, 0)
		atomic.StoreUint32(&s.poison, 0)
		atomic.StoreUint64(&s.flipByte, 0)
		atomic.StoreUint64(&s.started, 0)
		atomic.StoreUint64(&s.copied, 0)
		atomic.StoreUint64(&s.delay, uint64(f.Delay))
		atomic.StoreUint64(&s.bandwidth, f.Bandwidth)
		atomic.StoreUint64(&s.poisonNth, max(f.PoisonNth, 1))
		atomic.StoreUint64(&s.flipByte, f.FlipByte)
		atomic.StoreUint32(&s.poison, uint32(f.Poison))
		atomic.StoreUint32(&s.strict, flag(f.Strict))
		atomic.StoreUint32(&s.hold, flag(f.Hold))
		copy(s.fail[:], fails)
		atomic.StoreUint32(&s.fails, uint32(len(fails)))
		double.Wake(&c.bell)
		return nil
	})
	if err != nil {
		panic("cudatest: " + err.Error())
	}
}

// Clear lets all be well.
func (w *World) Clear() { w.Set(Faults{}) }

func flag(b bool) uint32 {
	if b {
		return 1
	}
	return 0
}

func (w *World) fails(list []Fail) []fail {
	var all []fail
	for _, f := range list {
		found := false
		for v := range 5 {
			name := f.Call
			if v > 0 {
				name = fmt.Sprintf("%s_v%d", f.Call, v)
			}
			if i := slices.Index(calls(), name); i >= 0 {
				found = true
				all = append(all, fail{call: uint32(i + 1), code: uint32(f.Code), first: uint32(max(f.First, 1)), count: uint32(f.Count)})
			}
		}
		if !found {
			panic("cudatest: no call " + f.Call)
		}
	}
	if len(all) > maxFails {
		panic("cudatest: too many calls that are to fail")
	}
	return all
}
