//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma

/*
#include "verbs.h"

#cgo nocallback rd_step
#cgo noescape rd_step
#cgo nocallback rd_drain
#cgo noescape rd_drain
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The layout of an op is known on both sides.
var _ = [1]struct{}{}[unsafe.Sizeof(Op{})-unsafe.Sizeof(C.struct_rd_op{})]

const (
	defaultStall = 2 * time.Second
	maxSpin      = 200 * time.Microsecond // in C, without a look at what else there is to run
	// How long a device has to give back what was posted, once the queue pair
	// is in the error state; it takes microseconds.
	drainTime = 2 * time.Second
	// How long to wait where nothing will wake us.
	pause = 100 * time.Microsecond
	// Time that is over is looked at once more after so long: a process that
	// stood still finds what has come meanwhile.
	grace = 10 * time.Millisecond
)

// Read carries out a batch. It returns nil when all of it has landed, and an
// error only when none of it can land any more: the queue pair is then put
// into the error state and emptied first. The exception wraps [ErrDrain]: the
// device may go on writing until [QP.Close] has returned nil.
//
// The error is a [*CompletionError] if a request failed, the first that did;
// it wraps [ErrStalled], [ErrFailed], or the cause of ctx. After an error the
// queue pair is of no further use. Reads take turns; a context ends the
// waiting for that too.
func (q *QP) Read(ctx context.Context, ops []Op, o ReadOptions) (st Stats, err error) {
	if err := checkOps(ops); err != nil || len(ops) == 0 {
		return st, err
	}
	if ctx.Err() != nil {
		return st, context.Cause(ctx)
	}
	select {
	case q.turn <- struct{}{}:
	case <-ctx.Done():
		return st, context.Cause(ctx)
	}
	defer func() { <-q.turn }()
	switch {
	case q.stop.Load()&stopFailed != 0:
		return st, fmt.Errorf("read on queue pair %d of %s: %w", q.num, q.pd.dev.name, ErrFailed)
	case q.c == nil:
		return st, fmt.Errorf("read on queue pair %d of %s: %w", q.num, q.pd.dev.name, os.ErrClosed)
	case !q.connected:
		return st, &OpError{Verb: "read", Device: q.pd.dev.name, Err: syscall.ENOTCONN}
	}
	if ctx.Done() != nil {
		// A cancellation that comes late would hit the next read: it is waited
		// for, and forgotten.
		canceled := make(chan struct{})
		stop := context.AfterFunc(ctx, func() { q.halt(stopCanceled); close(canceled) })
		defer func() {
			if !stop() {
				<-canceled
				q.stop.And(^uint32(stopCanceled))
			}
		}()
	}

	b := C.struct_rd_batch{n: C.uint32_t(len(ops))}
	if o.Single {
		b.single = 1
	}
	defer func() {
		st.Done, st.WRs, st.CQEs, st.Posts = int(b.done), int(b.wrs), int(b.cqes), int(b.posts)
	}()
	if err = q.carryOut(ctx, ops, &b, o, &st); err == nil {
		return st, nil
	}
	q.stop.Or(stopFailed)
	if left := q.drain(&b, &st); left != nil {
		err = fmt.Errorf("%w; %w: %w", err, ErrDrain, left)
	}
	return st, err
}

// checkOps refuses what no device would carry out.
func checkOps(ops []Op) error {
	if len(ops) > math.MaxInt32 {
		return &OpError{Verb: fmt.Sprintf("read %d ops", len(ops)), Err: syscall.E2BIG}
	}
	for i := range ops {
		if ops[i].Len == 0 {
			return &OpError{Verb: fmt.Sprintf("read op %d", i), Err: syscall.EINVAL, Hint: "it has no length"}
		}
	}
	return nil
}

// carryOut steps until all has landed, or something is wrong.
func (q *QP) carryOut(ctx context.Context, ops []Op, b *C.struct_rd_batch, o ReadOptions, st *Stats) error {
	list := (*C.struct_rd_op)(unsafe.Pointer(unsafe.SliceData(ops)))
	stop := (*C.uint32_t)(unsafe.Pointer(q.stop))
	spin := C.int64_t(min(o.Spin, maxSpin))
	if q.file == nil && spin <= 0 {
		spin = C.int64_t(maxSpin)
	}
	stall := o.Stall
	if stall <= 0 {
		stall = defaultStall
	}
	due := time.Now().Add(stall) // if nothing is seen to complete until then
	late := false                // it was over before this look
	for {
		seen := b.cqes
		st.Calls++
		result := C.rd_step(q.c, list, b, stop, spin)
		switch result {
		case C.RD_DONE:
			return nil
		case C.RD_FAILED, C.RD_STOP:
			failed := q.stop.Load()&stopFailed != 0
			if failed && (result == C.RD_STOP || Status(b.status) == StatusWRFlushErr) { // flushed by Fail, that is
				return fmt.Errorf("read on queue pair %d of %s: %w", q.num, q.pd.dev.name, ErrFailed)
			}
			if result == C.RD_FAILED {
				return q.failure(b)
			}
			return context.Cause(ctx)
		}
		now := time.Now()
		switch {
		case b.cqes != seen:
			due, late = now.Add(stall), false
		case now.Before(due):
		case !late:
			due, late = now.Add(grace), true
		default:
			err := fmt.Errorf("%w: nothing has completed on queue pair %d of %s for %v", ErrStalled, q.num, q.pd.dev.name, stall)
			if b.err != 0 {
				err = fmt.Errorf("%w; %w", err, q.failure(b))
			}
			return err
		}
		if result == C.RD_RETRY {
			st.Waits++
			time.Sleep(pause)
		} else if q.file == nil {
			runtime.Gosched()
		} else if err := q.wait(due, st, stopCanceled|stopFailed); err != nil {
			return err
		}
	}
}

// failure is the error that the C side has left in b.
func (q *QP) failure(b *C.struct_rd_batch) error {
	if b.status != 0 {
		return &CompletionError{Status: Status(b.status), Vendor: uint32(b.vendor), Op: int(b.bad_op), Device: q.pd.dev.name}
	}
	verb, hint := "read", ""
	switch b.verb {
	case C.RD_POST_SEND:
		verb = "post reads"
		switch syscall.Errno(b.err) {
		case syscall.ENOMEM:
			hint = "the provider has no room for them, and nothing is outstanding that would make some"
		case syscall.EINVAL:
			hint = "the queue pair is not in the state RTS, or an op is not one that it was made for"
		default:
		}
	case C.RD_POLL_CQ:
		verb = "poll completion queue"
	case C.RD_REQ_NOTIFY:
		verb = "request notification"
	case C.RD_GET_EVENT:
		verb = "get completion event"
	case C.RD_UNKNOWN_WR:
		verb, hint = "reap completions", "one came for a request that is not outstanding"
	}
	return verbError(verb, q.pd.dev.name, b.err, hint)
}

// wait sleeps until the channel has an event, until the time has come, or a
// bit of stop that is asked for is set.
func (q *QP) wait(until time.Time, st *Stats, bits uint32) error {
	st.Waits++
	if err := q.file.SetReadDeadline(until); err != nil {
		return &OpError{Verb: "wait for completions", Device: q.pd.dev.name, Err: err}
	}
	if q.stop.Load()&bits != 0 { // whoever sets one later ends the deadline after we have set it
		return nil
	}
	if err := q.raw.Read(readable); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return &OpError{Verb: "wait for completions", Device: q.pd.dev.name, Err: err}
	}
	return nil
}

// readable looks whether a descriptor has something, and leaves it there: the
// next step takes it, so that a wait costs one crossing into C.
func readable(fd uintptr) bool {
	n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
	return n != 0
}

// drain empties the queue pair; nil when nothing can land any more.
func (q *QP) drain(b *C.struct_rd_batch, st *Stats) error {
	end := time.Now().Add(drainTime)
	for late := false; ; {
		st.Calls++
		switch C.rd_drain(q.c, b) {
		case C.RD_DONE:
			return nil
		case C.RD_FAILED:
			return verbError("empty queue pair", q.pd.dev.name, b.err, "")
		}
		now := time.Now()
		if late {
			return fmt.Errorf("%d requests are outstanding on queue pair %d of %s after %v",
				uint64(q.c.head-q.c.tail), q.num, q.pd.dev.name, drainTime)
		}
		late = now.After(end)
		// Not for long: an event may be late, or lost with the device.
		if q.file == nil {
			time.Sleep(pause)
		} else if err := q.wait(now.Add(grace), st, 0); err != nil {
			return err
		}
	}
}
