package cudatest

import (
	"reflect"

	"github.com/kvferry/kvferry/internal/double"
)

const (
	controlMagic   = 0x6b766672_63756461
	controlVersion = 1
)

// The bounds of a world. What exceeds one is refused as out of memory.
const (
	maxDevices   = 8
	maxProcesses = 128
	maxBlocks    = 16384
	maxCalls     = 256
	maxFails     = 16
)

// control is the file that all processes of a world share. It is written down
// here alone: the library's header is made of these types ([double.Header]).
//
// Slots are given and taken under flock(2) of the file, which a dead process
// cannot hold. Of a slot one word says whether it is used (process.pid,
// block.key); it is stored last when a slot is filled and cleared first when it
// is given back, so that a process may die between any two stores.
//
//nolint:unused // the library reads what Go does not
type control struct {
	magic   uint64
	version uint32
	devices uint32
	memory  uint64 // bytes of each device
	driver  uint32 // version
	dmabuf  uint32
	peers   uint32 // devices reach each other's memory
	ordered uint32 // what cards write needs no flush
	bell    uint32 // futex: faults were set
	next    uint32 // slots of processes are looked for from here
	trace   [256]byte
	faults  faults
	wire    [maxDevices * wires]int64 // CLOCK_MONOTONIC ns at which it is free
	past    [maxCalls]uint64          // calls of processes whose slots were given again
	process [maxProcesses]process
	block   [maxBlocks]block
}

// process is one that uses the library. Of one that has ended the calls are
// kept until its slot is needed again.
type process struct {
	pid   uint32
	owner uint32 // the last pid, also when the slot is free again
	start uint64 // in clock ticks since boot: with pid its identity
	live  [kinds]int64
	calls [maxCalls]uint64 // by place in the header, from 1
}

// Live objects of a process.
const (
	liveContext = iota
	liveAllocation
	liveImport
	liveRegistration
	liveHost
	liveStream
	liveEvent
	liveModule
	liveChunk
	liveReservation
	liveMapping
	kinds
)

// block is memory of a device: one memfd. It is there while a living process
// holds it, whoever made it.
//
//nolint:unused // the library reads what Go does not
type block struct {
	key     uint64
	bytes   uint64
	device  uint32
	owner   uint32                    // pid
	holders [maxProcesses / 64]uint64 // bits
}

// Wires of a device.
const (
	wireToDevice = iota
	wireToHost
	wireWithin
	wires
)

// faults is [Faults] as the library reads it, and what has been counted since
// it was set.
type faults struct {
	delay     uint64 // ns
	bandwidth uint64 // bytes/s
	flipByte  uint64
	poisonNth uint64
	started   uint64 // operations
	copied    uint64 // bytes
	poison    uint32
	strict    uint32
	hold      uint32
	fails     uint32
	fail      [maxFails]fail
}

//nolint:unused // the library reads what Go does not
type fail struct {
	call  uint32
	code  uint32
	first uint32
	count uint32 // 0: no end
	seen  uint32
}

// header is the control file in C.
func header() string {
	return double.Header([]double.Constant{
		{Name: "CONTROL_MAGIC", Value: controlMagic},
		{Name: "CONTROL_VERSION", Value: controlVersion},
		{Name: "MAX_DEVICES", Value: maxDevices},
		{Name: "MAX_PROCESSES", Value: maxProcesses},
		{Name: "MAX_BLOCKS", Value: maxBlocks},
		{Name: "MAX_CALLS", Value: maxCalls},
		{Name: "MAX_FAILS", Value: maxFails},
		{Name: "LIVE_CONTEXT", Value: liveContext},
		{Name: "LIVE_ALLOCATION", Value: liveAllocation},
		{Name: "LIVE_IMPORT", Value: liveImport},
		{Name: "LIVE_REGISTRATION", Value: liveRegistration},
		{Name: "LIVE_HOST", Value: liveHost},
		{Name: "LIVE_STREAM", Value: liveStream},
		{Name: "LIVE_EVENT", Value: liveEvent},
		{Name: "LIVE_MODULE", Value: liveModule},
		{Name: "LIVE_CHUNK", Value: liveChunk},
		{Name: "LIVE_RESERVATION", Value: liveReservation},
		{Name: "LIVE_MAPPING", Value: liveMapping},
		{Name: "WIRE_TO_DEVICE", Value: wireToDevice},
		{Name: "WIRE_TO_HOST", Value: wireToHost},
		{Name: "WIRE_WITHIN", Value: wireWithin},
		{Name: "WIRES", Value: wires},
	}, reflect.TypeFor[fail](), reflect.TypeFor[faults](), reflect.TypeFor[process](), reflect.TypeFor[block](), reflect.TypeFor[control]())
}
