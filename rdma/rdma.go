// Package rdma reads the memory of other machines over a fabric, one-sidedly,
// through libibverbs: the kernel's devices and their ports, memory that a
// device may read or write, reliable queue pairs, and batches of reads.
//
// It holds verbs only. It knows no page, no transport and no peer; it retries
// nothing and decides nothing. The life of its objects, each of which is
// closed before the one that made it:
//
//	Open -> Device -> NewPD -> PD -> Register -> Region
//	                            PD -> NewQP -> QP -> Connect, Read, Read, ...
//
// The library is bound at run time ([Load]), so one binary runs on machines
// with and without it; [Probe] tells what there is without it. Built without
// the tag rdma, without cgo, or for another system, the same names are there,
// and every call that would need the library wraps [ErrUnavailable].
//
// A batch of reads is carried out by repeated steps in C, each of which posts
// and reaps a whole window; in between its goroutine sleeps in Go's poller.
// There is no thread of C, no call from C into Go, and nothing of Go's memory
// is kept in C. Memory that a device touches is mapped, never on Go's heap.
package rdma

import (
	"errors"
	"fmt"
)

var (
	// ErrUnavailable is wrapped when this machine, or this build, cannot do
	// RDMA; the text says what is missing.
	ErrUnavailable = errors.New("RDMA is not available")
	// ErrStalled is wrapped by [QP.Read] if nothing completed for
	// ReadOptions.Stall.
	ErrStalled = errors.New("RDMA read stalled")
	// ErrFailed is wrapped by [QP.Read] on a queue pair that [QP.Fail], or an
	// error of an earlier read, has put into the error state.
	ErrFailed = errors.New("queue pair has failed")
	// ErrDrain is wrapped if a device did not give back what was posted: it
	// may still write to the memory of the batch. Only [QP.Close] ends that.
	ErrDrain = errors.New("outstanding RDMA reads could not be flushed")
)

// OpError is a verb that failed.
type OpError struct {
	Verb   string // what was tried, of what, such as "register 4096 bytes"
	Device string // such as "mlx5_0"; "" if none was involved
	Err    error  // a syscall.Errno, where the verb gave one
	Hint   string // what usually is behind it, and what to do; may be empty
}

func (e *OpError) Error() string {
	s := e.Verb
	if e.Device != "" {
		s += " on " + e.Device
	}
	s = fmt.Sprintf("%s: %v", s, e.Err)
	if e.Hint != "" {
		s += " (" + e.Hint + ")"
	}
	return s
}

func (e *OpError) Unwrap() error { return e.Err }
