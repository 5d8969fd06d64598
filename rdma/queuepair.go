//go:build linux && cgo && rdma && (amd64 || arm64)

package rdma

// #include "verbs.h"
import "C"

import (
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// QP is a reliable queue pair with its own completion queue. Connect and Read
// take turns; State and Fail may be called at any time.
type QP struct {
	pd   *PD
	num  uint32
	file *os.File        // of the completion channel, for Go's poller; nil without events
	raw  syscall.RawConn // of file

	// turn is held, by having put a token in, by who uses c.
	turn chan struct{}
	// stop is read by C as it steps: the bits below. Reads end soon when one
	// is set and the file's deadline is over.
	stop *atomic.Uint32

	// mu guards c against Close for those who do not hold the turn, and is
	// held by them across a verb, which does not wait.
	mu        sync.Mutex
	c         *C.struct_rd_qp // nil when destroyed
	connected bool
}

const (
	stopCanceled = 1 << iota // the context of the read in progress has ended
	stopFailed               // the queue pair is of no further use
)

// NewQP makes a queue pair, which must be connected.
func (p *PD) NewQP(o QPOptions) (*QP, error) {
	if err := p.enter(); err != nil {
		return nil, &OpError{Verb: "create queue pair", Device: p.dev.name, Err: err}
	}
	o = o.fit(p.dev.limits)
	co := C.struct_rd_options{
		depth: C.uint32_t(o.Depth), max_sge: C.uint32_t(o.SGE), signal_every: C.uint32_t(o.SignalEvery),
		chain: C.uint32_t(o.Chain), max_msg: C.uint32_t(o.MaxMsg),
	}
	if o.Events {
		co.events = 1
	}
	var e C.int
	var what *C.char
	c := C.rd_qp_new(p.c, &co, &e, &what)
	if c == nil {
		p.leave()
		hint := ""
		if errno := syscall.Errno(e); errno == syscall.ENOMEM {
			hint = memoryHint(errno, uint64(os.Getpagesize()))
		}
		return nil, verbError(C.GoString(what), p.dev.name, e, hint)
	}
	q := &QP{pd: p, num: uint32(c.qp.qp_num), c: c, turn: make(chan struct{}, 1), stop: new(atomic.Uint32)}
	if o.Events {
		var err error
		if q.file, err = pollable(int(C.rd_qp_fd(c)), "rdma completions"); err == nil {
			q.raw, err = q.file.SyscallConn()
		}
		if err != nil {
			q.Close()
			return nil, &OpError{Verb: "wait on completion channel", Device: p.dev.name, Err: err}
		}
	}
	return q, nil
}

// Num is the number that peers address the queue pair by.
func (q *QP) Num() uint32 { return q.num }

// State asks the device.
func (q *QP) State() (QPState, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil || q.c.qp == nil {
		return 0, &OpError{Verb: "query queue pair", Device: q.pd.dev.name, Err: os.ErrClosed}
	}
	s := C.rd_qp_state(q.c)
	if s < 0 {
		return 0, verbError("query queue pair", q.pd.dev.name, -s, "")
	}
	return QPState(s), nil
}

// Connect takes a new queue pair to the state in which it reads, and serves
// reads as far as Path.Access permits. It waits for the kernel to resolve the
// peer's address, at most.
func (q *QP) Connect(p Path) error {
	q.turn <- struct{}{}
	defer func() { <-q.turn }()
	dev := q.pd.dev.name
	if q.c == nil {
		return &OpError{Verb: "connect queue pair", Device: dev, Err: os.ErrClosed}
	}
	port, err := q.pd.dev.Port(int(p.Port))
	if err != nil {
		return err
	}
	if port.MaxMsg > 0 {
		q.c.o.max_msg = min(q.c.o.max_msg, C.uint32_t(port.MaxMsg))
	}
	path := C.struct_rd_path{
		port: C.uint8_t(p.Port), gid_index: C.uint8_t(p.GIDIndex), hop_limit: C.uint8_t(p.HopLimit),
		traffic_class: C.uint8_t(p.TrafficClass), sl: C.uint8_t(p.SL), mtu: C.uint8_t(p.MTU), timeout: C.uint8_t(p.Timeout),
		retry_cnt: C.uint8_t(p.RetryCount), rnr_retry: C.uint8_t(p.RNRRetry), min_rnr_timer: C.uint8_t(p.MinRNRTimer),
		rd_atomic: C.uint8_t(p.ReadsInitiated), dest_rd_atomic: C.uint8_t(p.ReadsServed),
		dlid: C.uint16_t(p.DLID), pkey_index: C.uint16_t(p.PKeyIndex),
		dest_qpn: C.uint32_t(p.DestQPN), rq_psn: C.uint32_t(p.RecvPSN), sq_psn: C.uint32_t(p.SendPSN),
		flow_label: C.uint32_t(p.FlowLabel), access: C.uint32_t(p.Access),
	}
	if p.Global {
		path.is_global = 1
	}
	for i, b := range p.DestGID {
		path.dgid[i] = C.uint8_t(b)
	}
	var what *C.char
	if e := C.rd_qp_connect(q.c, &path, &what); e != 0 {
		return verbError(C.GoString(what), dev, e, connectHint(syscall.Errno(e), p))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.connected = true
	if q.stop.Load()&stopFailed != 0 { // meanwhile
		C.rd_qp_fail(q.c)
		return &OpError{Verb: "connect queue pair", Device: dev, Err: ErrFailed}
	}
	return nil
}

func connectHint(e syscall.Errno, p Path) string {
	switch e {
	case syscall.EINVAL:
		return fmt.Sprintf("one of these is not what the port has, or can do: GID index %d, MTU %d, %d reads initiated, %d served; or the queue pair was connected before",
			p.GIDIndex, p.MTU.Bytes(), p.ReadsInitiated, p.ReadsServed)
	case syscall.ETIMEDOUT, syscall.ENETUNREACH, syscall.EHOSTUNREACH, syscall.ENODEV, syscall.ENOENT:
		return fmt.Sprintf("the peer's address was not resolved from GID index %d: is there a route between the two, in this address family?", p.GIDIndex)
	default:
		return ""
	}
}

// Fail puts the queue pair into the error state: the device serves no more
// reads on it, and a Read in progress, or a later one, ends with [ErrFailed].
// Any goroutine may call it at any time, also again.
func (q *QP) Fail() error {
	q.halt(stopFailed)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.c == nil || !q.connected {
		return nil
	}
	return verbError("queue pair to ERR", q.pd.dev.name, C.rd_qp_fail(q.c), "")
}

// halt makes the read in progress look at stop.
func (q *QP) halt(bit uint32) {
	q.stop.Or(bit)
	if q.file != nil {
		q.file.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // it is closed: nobody waits
	}
}

// Close destroys the queue pair, waiting for a Read in progress ([QP.Fail]
// ends it). It returns nil only when all is destroyed, and the device writes
// to no memory on its behalf any more; after an error it may be tried again.
func (q *QP) Close() error {
	q.turn <- struct{}{}
	defer func() { <-q.turn }()
	q.mu.Lock()
	c := q.c
	q.c = nil
	q.mu.Unlock()
	if c == nil {
		return nil
	}
	if q.file != nil {
		q.file.Close() // our duplicate
	}
	var what *C.char
	if e := C.rd_qp_free(c, &what); e != 0 {
		q.mu.Lock()
		q.c = c
		q.connected = false // it may be gone, and what is left is not for use
		q.mu.Unlock()
		q.stop.Or(stopFailed)
		return verbError(C.GoString(what), q.pd.dev.name, e, "")
	}
	q.pd.leave()
	return nil
}
