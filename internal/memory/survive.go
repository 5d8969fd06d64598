package memory

import (
	"fmt"
	"runtime/debug"
	"unsafe"
)

// Survive is deferred around what touches memory that another process gave, as
//
//	defer memory.Survive(debug.SetPanicOnFault(true), region.Holds, &err)
//
// That memory cannot go away, but it can break: a page that the machine has lost
// becomes err, and does not end the process. theirs says which addresses those are:
// a fault elsewhere is our own bug, and panics on.
func Survive(before bool, theirs func(at uintptr) bool, err *error) {
	debug.SetPanicOnFault(before)
	fault := recover()
	if fault == nil {
		return
	}
	at, ok := fault.(interface{ Addr() uintptr })
	if !ok || !theirs(at.Addr()) {
		panic(fault)
	}
	*err = fmt.Errorf("the peer's memory can't be read; look for memory errors in the kernel's log: %v", fault)
}

// Holds reports whether an address lies in the region.
func (r *Region) Holds(at uintptr) bool {
	return len(r.bytes) > 0 && at-uintptr(unsafe.Pointer(&r.bytes[0])) < uintptr(len(r.bytes))
}
