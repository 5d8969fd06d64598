package cudatest

import (
	"sync/atomic"

	"github.com/kvferry/kvferry/internal/double"
)

// Tally counts what there is, and what has been called.
type Tally struct {
	// Live objects. Those of processes that have died do not count.
	Contexts      int
	Allocations   int // of device memory, by cuMemAlloc
	Imports       int // by cuIpcOpenMemHandle, each memory once
	Registrations int // of host memory
	HostMemory    int // allocations by the driver
	Streams       int
	Events        int
	Modules       int
	Chunks        int // of virtual memory: made, or imported
	Reservations  int
	Mappings      int

	// DeviceBytes are taken of the devices: in all, those that some process
	// holds, though whoever made them has freed them or has died; of a process,
	// those that it has made and still holds.
	DeviceBytes int64

	Calls map[string]uint64 // by name, of dead processes too; without those that were never called
}

// Live is the number of all objects but contexts and modules, which a process
// keeps.
func (t Tally) Live() int {
	return t.Allocations + t.Imports + t.Registrations + t.HostMemory + t.Streams + t.Events + t.Chunks + t.Reservations + t.Mappings
}

// Counts are the counts of a world, in all and by process. Of a process that
// has ended the calls are kept until its place is needed again.
type Counts struct {
	Tally
	Processes map[int]Tally // by pid
}

// Counts returns what there is now.
func (w *World) Counts() Counts {
	n := Counts{Tally: Tally{Calls: make(map[string]uint64)}, Processes: make(map[int]Tally)}
	err := w.control.Locked(func(c *control) error {
		alive := [maxProcesses]bool{}
		for i := range c.process {
			p := &c.process[i]
			if p.owner == 0 {
				continue
			}
			t := Tally{Calls: make(map[string]uint64)}
			if double.Alive(atomic.LoadUint32(&p.pid), p.start) {
				alive[i] = true
				t.objects(p)
			}
			t.count(&p.calls)
			for j := range c.block {
				b := &c.block[j]
				if alive[i] && atomic.LoadUint64(&b.key) != 0 && b.owner == p.owner && b.holders[i/64]>>(i%64)&1 != 0 {
					t.DeviceBytes += int64(b.bytes)
				}
			}
			n.Processes[int(p.owner)] = t
			n.add(t)
		}
		n.DeviceBytes = 0
		for j := range c.block {
			if b := &c.block[j]; atomic.LoadUint64(&b.key) != 0 && b.held(&alive) {
				n.DeviceBytes += int64(b.bytes)
			}
		}
		n.count(&c.past)
		return nil
	})
	if err != nil {
		panic("cudatest: " + err.Error())
	}
	return n
}

func (b *block) held(alive *[maxProcesses]bool) bool {
	for i := range alive {
		if alive[i] && b.holders[i/64]>>(i%64)&1 != 0 {
			return true
		}
	}
	return false
}

func (t *Tally) fields() [kinds]*int {
	return [kinds]*int{
		liveContext: &t.Contexts, liveAllocation: &t.Allocations, liveImport: &t.Imports, liveRegistration: &t.Registrations, liveHost: &t.HostMemory,
		liveStream: &t.Streams, liveEvent: &t.Events, liveModule: &t.Modules, liveChunk: &t.Chunks, liveReservation: &t.Reservations, liveMapping: &t.Mappings,
	}
}

func (t *Tally) objects(p *process) {
	for kind, f := range t.fields() {
		*f = int(atomic.LoadInt64(&p.live[kind]))
	}
}

func (t *Tally) count(list *[maxCalls]uint64) {
	for i, name := range calls() {
		if n := atomic.LoadUint64(&list[i+1]); n > 0 {
			t.Calls[name] += n
		}
	}
}

func (t *Tally) add(o Tally) {
	from := o.fields()
	for kind, f := range t.fields() {
		*f += *from[kind]
	}
	for name, n := range o.Calls {
		t.Calls[name] += n
	}
}
