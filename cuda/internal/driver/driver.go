// Package driver is the CUDA driver as Go calls: those of gorgonia.org/cu, whose
// errors are made the driver's own, and by cgo those that it lacks or does badly.
//
// The library is found when [Bind] is called, not when the program starts: late/
// has the archive that stands in for it until then, include/ the declarations,
// and scripts/cuda-env.sh makes both known to the compiler.
//
// Nearly every call works on the context that is current on its thread:
// [Context.Do] makes one so. Nothing here knows an arena, or checks an address.
package driver

import "fmt"

// Error is what the driver answered, in its own words.
type Error struct {
	Call string // such as "cuMemAlloc"
	Code int    // CUresult
	Name string // such as "CUDA_ERROR_OUT_OF_MEMORY"
	Text string // such as "out of memory"
}

func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d): %s", e.Call, e.Name, e.Code, e.Text) }

// Results that are told apart.
const (
	OutOfMemory  = 2
	NotFound     = 500
	NotReady     = 600
	PeerAlready  = 704
	NotSupported = 801
)

// Sticky says whether the context is broken for good: every later call on it
// gets the same answer, and only a new process a new context. These are the
// results of which NVIDIA's header says so, or that memory has errors; a context
// that somebody has destroyed; and what the driver has no word for.
// scripts/cuda-headers.sh compares.
func (e *Error) Sticky() bool {
	switch e.Code {
	case 214, 220, // uncorrectable errors of memory, and of a link between devices
		226, // an exception that the device has contained
		700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721,
		810, // the server of MPS has ended this client
		911, // a device outside of CUDA
		999:
		return true
	}
	return false
}
