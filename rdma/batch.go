package rdma

import (
	"fmt"
	"time"
)

// Access is a set of the IBV_ACCESS_* bits.
type Access uint32

// What a region, or a queue pair, permits. RelaxedOrdering lets a device
// write out of order within a read, which is faster; it is left out where the
// kernel does not know it.
const (
	LocalWrite      Access = 1 << 0
	RemoteWrite     Access = 1 << 1
	RemoteRead      Access = 1 << 2
	RelaxedOrdering Access = 1 << 20
)

// Key is what the device calls one slice of a [Region]: L in ops of this side,
// R in those of peers.
type Key struct{ L, R uint32 }

// sliceBytes is how much of a region one registration covers, of pages of so
// many bytes, on a device that takes limit bytes (0: any number). 1 GiB stays
// clear of drivers that count in 31 bits, and whole huge pages keep a device's
// tables small.
func sliceBytes(limit, page uint64) uint64 {
	const most, huge = 1 << 30, 2 << 20
	n := uint64(most)
	if limit > 0 {
		n = min(n, limit)
	}
	if n >= huge {
		return n - n%huge
	}
	return max(n-n%page, page)
}

// QPState is enum ibv_qp_state.
type QPState int

// The states of a queue pair.
const (
	StateReset QPState = iota
	StateInit
	StateRTR
	StateRTS
	StateSQD
	StateSQE
	StateErr
)

func (s QPState) String() string {
	names := [...]string{"RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("state %d", int(s))
	}
	return names[s]
}

// QPOptions are the sizes of a queue pair. A zero field means its default, and
// whatever the device cannot do is made smaller.
type QPOptions struct {
	Depth       int  // work requests outstanding at most; default 1023
	SGE         int  // pieces of local memory a request; default 1
	SignalEvery int  // one completion per this many requests, or per 8 MiB of them; default 256, at most a quarter of Depth
	Chain       int  // requests per call of ibv_post_send; default 64, at most a quarter of Depth
	MaxMsg      int  // bytes of a request: neighbours are merged up to it, a longer op is cut; default 1 MiB
	Events      bool // with a completion channel, so that waiting costs no processor
}

// fit fills in what is not set and cuts it down to what the device can do.
// One entry of the send queue, and one more of the completion queue, are kept
// for the marker that drains them.
func (o QPOptions) fit(l Limits) QPOptions {
	def := func(p *int, v int) {
		if *p <= 0 {
			*p = v
		}
	}
	def(&o.Depth, 1023)
	def(&o.SGE, 1)
	def(&o.SignalEvery, 256)
	def(&o.Chain, 64)
	def(&o.MaxMsg, 1<<20)
	sge := l.MaxSGE
	if l.MaxSGERead > 0 {
		sge = min(sge, l.MaxSGERead)
	}
	o.SGE = max(min(o.SGE, sge, 64), 1)
	o.Depth = max(min(o.Depth, l.MaxQPWR-1, l.MaxCQE-2, 1<<16), 1)
	// A full queue then always holds a request that will say that it is done,
	// and is filled again long before it runs dry.
	o.SignalEvery = min(o.SignalEvery, max(o.Depth/4, 1))
	o.Chain = min(o.Chain, max(o.Depth/4, 1))
	o.MaxMsg = min(o.MaxMsg, 1<<30)
	return o
}

// Path is all that one queue pair needs to know to talk to another.
type Path struct {
	Port, GIDIndex, HopLimit, TrafficClass, SL uint8
	Global                                     bool // addressed by DestGID: always on Ethernet, on InfiniBand across subnets
	MTU                                        MTU
	Timeout                                    uint8 // 4.096 us * 2^Timeout before a packet is sent again; 0: never
	RetryCount                                 uint8 // Soft-RoCE takes 7 for "for ever"
	RNRRetry, MinRNRTimer                      uint8
	ReadsInitiated, ReadsServed                uint8 // reads in flight, of ours and of the peer's
	DLID, PKeyIndex                            uint16
	DestQPN, RecvPSN, SendPSN, FlowLabel       uint32
	Access                                     Access // what the peer may do: RemoteRead, or nothing
	DestGID                                    [16]byte
}

// Op is one stretch of memory to read. The addresses are numbers, so that
// neither the garbage collector nor cgo looks at them; the layout is that of
// the C side.
type Op struct {
	Local, Remote uint64
	Len           uint32 // bytes, not 0
	LKey, RKey    uint32
	_             uint32
}

// ReadOptions are about how a batch is carried out.
type ReadOptions struct {
	Spin   time.Duration // how long to poll after a completion before sleeping; at most 200 us
	Stall  time.Duration // how long without any completion until the batch is given up; default 2 s
	Single bool          // one request an op: neighbours are not merged
}

// Stats tells how a batch was carried out.
type Stats struct {
	Done  int // ops that have landed, all before this index; the op after it may be there in part
	WRs   int // work requests posted for them
	CQEs  int // completions seen
	Posts int // calls of ibv_post_send
	Calls int // crossings into C, every one
	Waits int // times that the goroutine slept
}
