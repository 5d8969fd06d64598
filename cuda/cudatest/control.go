package cudatest

import (
	"fmt"
	"reflect"
	"strings"
	"unicode"
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
// here alone: the library's header is made of these types ([header]), so that
// the two sides cannot differ.
//
// Slots are given and taken under flock(2) of the file, which a dead process
// cannot hold. Of a slot one word says whether it is used (process.pid,
// block.key); it is stored last when a slot is filled and cleared first when it
// is given back, so that a process may die between any two stores.
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

type fail struct {
	call  uint32
	code  uint32
	first uint32
	count uint32 // 0: no end
	seen  uint32
}

// header writes the control file's types and constants as C.
func header() string {
	var b strings.Builder
	b.WriteString("#include <stddef.h>\n#include <stdint.h>\n")
	for _, c := range []struct {
		name  string
		value uint64
	}{
		{"CONTROL_MAGIC", controlMagic},
		{"CONTROL_VERSION", controlVersion},
		{"MAX_DEVICES", maxDevices},
		{"MAX_PROCESSES", maxProcesses},
		{"MAX_BLOCKS", maxBlocks},
		{"MAX_CALLS", maxCalls},
		{"MAX_FAILS", maxFails},
		{"LIVE_CONTEXT", liveContext},
		{"LIVE_ALLOCATION", liveAllocation},
		{"LIVE_IMPORT", liveImport},
		{"LIVE_REGISTRATION", liveRegistration},
		{"LIVE_HOST", liveHost},
		{"LIVE_STREAM", liveStream},
		{"LIVE_EVENT", liveEvent},
		{"LIVE_MODULE", liveModule},
		{"LIVE_CHUNK", liveChunk},
		{"LIVE_RESERVATION", liveReservation},
		{"LIVE_MAPPING", liveMapping},
		{"WIRE_TO_DEVICE", wireToDevice},
		{"WIRE_TO_HOST", wireToHost},
		{"WIRE_WITHIN", wireWithin},
		{"WIRES", wires},
	} {
		suffix := ""
		if c.value > 1<<31 {
			suffix = "ull"
		}
		fmt.Fprintf(&b, "#define %s %#x%s\n", c.name, c.value, suffix)
	}
	for _, t := range []reflect.Type{
		reflect.TypeFor[fail](), reflect.TypeFor[faults](), reflect.TypeFor[process](), reflect.TypeFor[block](), reflect.TypeFor[control](),
	} {
		name := "struct shared_" + snake(t.Name())
		fmt.Fprintf(&b, "%s {\n", name)
		for f := range t.Fields() {
			fmt.Fprintf(&b, "\t%s;\n", declare(f.Type, snake(f.Name)))
		}
		b.WriteString("};\n")
		fmt.Fprintf(&b, "_Static_assert(sizeof(%s) == %d, \"size\");\n", name, t.Size())
		for f := range t.Fields() {
			fmt.Fprintf(&b, "_Static_assert(offsetof(%s, %s) == %d, \"%s\");\n", name, snake(f.Name), f.Offset, f.Name)
		}
	}
	return b.String()
}

func declare(t reflect.Type, name string) string {
	switch t.Kind() {
	case reflect.Array:
		return declare(t.Elem(), fmt.Sprintf("%s[%d]", name, t.Len()))
	case reflect.Struct:
		return "struct shared_" + snake(t.Name()) + " " + name
	case reflect.Uint8, reflect.Uint32, reflect.Uint64, reflect.Int64:
		return t.String() + "_t " + name
	default:
		panic("no such type in C: " + t.String())
	}
}

// snake turns poisonNth into poison_nth.
func snake(s string) string {
	var b strings.Builder
	lower := false
	for _, r := range s {
		if unicode.IsUpper(r) && lower {
			b.WriteByte('_')
		}
		lower = !unicode.IsUpper(r)
		b.WriteRune(unicode.ToLower(r))
	}
	return b.String()
}
