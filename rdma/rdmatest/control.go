package rdmatest

import (
	"reflect"

	"github.com/kvferry/kvferry/internal/double"
)

const (
	controlMagic   = 0x6b766672_64626c31
	controlVersion = 1
)

// The bounds of a world. What exceeds one is refused with ENOMEM.
const (
	maxDevices  = 8
	maxContexts = 1024
	maxPairs    = 8192
	maxRegions  = 8192
	maxGIDs     = 8
	eventRing   = 64
)

// control is the file that all processes of a world share. It is written down
// here alone: the library's header is made of these types ([double.Header]).
//
// Slots are given and taken under flock(2) of the file, which a dead process
// cannot hold. Of a slot one word says whether it is used (context.pid,
// queuePair.num, region.key); it is stored last when a slot is filled and
// cleared first when it is given back, so that a process may die between any
// two stores.
//
//nolint:unused // the library reads what Go does not
type control struct {
	magic, pad0 uint64
	version     uint32
	devices     uint32
	nextContext uint32 // slots are looked for from here, so that none is used again at once
	nextQP      uint32
	nextRegion  uint32
	nextPD      uint32 // protection domains are numbers, unique in the world
	faults      faults
	device      [maxDevices]device
	context     [maxContexts]contextSlot
	qp          [maxPairs]queuePair
	region      [maxRegions]region
}

//nolint:unused // the library reads what Go does not
type device struct {
	name        [64]byte
	gid         [maxGIDs][16]byte // zero: no entry
	maxMRSize   uint64
	maxMsg      uint64
	inFree      int64 // CLOCK_MONOTONIC ns at which the wire is free, by direction
	outFree     int64
	event       [eventRing]uint64 // kind<<32 | element
	events      uint64            // how many there have been
	link        uint32            // enum of the link layer
	portState   uint32            // enum ibv_port_state
	fatal       uint32
	lid         uint32
	mtu         uint32
	maxReads    uint32
	maxWR       uint32
	maxSGE      uint32
	maxCQE      uint32
	activeWidth uint32
	activeSpeed uint32
	pad0        uint32
}

// contextSlot is one opened device of one process. Totals only grow, over all
// lives of the slot: base is what they were when this life began.
//
//nolint:unused // the library reads what Go does not
type contextSlot struct {
	pid        uint32
	device     uint32
	generation uint32
	doorbell   uint32 // futex, and reason to look around
	start      uint64 // of the process, in clock ticks since boot: with pid its identity
	locked     uint64 // bytes that count against Faults.Memlock
	live       [kinds]uint32
	owner      uint32 // the last pid, also when the slot is free again
	pad0       uint32
	base       [totals]uint64
	total      [totals]uint64
	pad1       [4]uint64
}

// Live objects of a context.
const (
	liveContext = iota
	livePD
	liveRegion
	liveCQ
	liveQP
	liveChannel
	kinds
)

// Totals of a context.
const (
	totalPosts = iota
	totalWRs
	totalCQEs
	totalReads
	totalReadBytes
	totalServedReads
	totalServedBytes
	totalErrors
	totals
)

//nolint:unused // the library reads what Go does not
type queuePair struct {
	num            uint32
	context        uint32
	contextLife    uint32 // its generation
	generation     uint32
	pd             uint32
	state          uint32 // enum ibv_qp_state
	access         uint32
	destQPN        uint32
	sendPSN        uint32
	recvPSN        uint32
	readsInitiated uint32
	readsServed    uint32
	destLID        uint32
	global         uint32
	gidIndex       uint32
	pad0           uint32
	destGID        [16]byte
}

//nolint:unused // the library reads what Go does not
type region struct {
	key         uint32
	context     uint32
	contextLife uint32
	generation  uint32
	pd          uint32
	access      uint32
	addr        uint64
	iova        uint64
	length      uint64
}

// Verbs that can be made to say ENOMEM.
const (
	verbPD = iota
	verbRegion
	verbCQ
	verbQP
	verbChannel
	verbs
)

// faults is [Faults] as the library reads it, and what has been counted since
// it was set.
//
//nolint:unused // the library reads what Go does not
type faults struct {
	set         uint64 // how often faults were set
	seed        uint64
	delay       uint64 // ns
	jitter      uint64
	bandwidth   uint64 // bytes/s
	retryWindow uint64
	lateDMA     uint64
	memlock     uint64
	failNth     uint64
	flipByte    uint64
	maxReads    uint32
	lose        uint32
	fail        uint32
	failStatus  uint32
	postENOMEM  uint32
	reorder     uint32
	stuck       uint32
	noFlush     uint32
	noDMABuf    uint32
	pad0        uint32
	enomem      [verbs]uint32 // the call that fails, from 1
	calls       [verbs]uint32
	begun       uint64 // work requests
	landed      uint64 // bytes
}

// header is the control file in C.
func header() string {
	return double.Header([]double.Constant{
		{Name: "CONTROL_MAGIC", Value: controlMagic},
		{Name: "CONTROL_VERSION", Value: controlVersion},
		{Name: "MAX_DEVICES", Value: maxDevices},
		{Name: "MAX_CONTEXTS", Value: maxContexts},
		{Name: "MAX_QPS", Value: maxPairs},
		{Name: "MAX_REGIONS", Value: maxRegions},
		{Name: "MAX_GIDS", Value: maxGIDs},
		{Name: "EVENT_RING", Value: eventRing},
		{Name: "LIVE_CONTEXT", Value: liveContext},
		{Name: "LIVE_PD", Value: livePD},
		{Name: "LIVE_REGION", Value: liveRegion},
		{Name: "LIVE_CQ", Value: liveCQ},
		{Name: "LIVE_QP", Value: liveQP},
		{Name: "LIVE_CHANNEL", Value: liveChannel},
		{Name: "KINDS", Value: kinds},
		{Name: "TOTAL_POSTS", Value: totalPosts},
		{Name: "TOTAL_WRS", Value: totalWRs},
		{Name: "TOTAL_CQES", Value: totalCQEs},
		{Name: "TOTAL_READS", Value: totalReads},
		{Name: "TOTAL_READ_BYTES", Value: totalReadBytes},
		{Name: "TOTAL_SERVED_READS", Value: totalServedReads},
		{Name: "TOTAL_SERVED_BYTES", Value: totalServedBytes},
		{Name: "TOTAL_ERRORS", Value: totalErrors},
		{Name: "TOTALS", Value: totals},
		{Name: "VERB_PD", Value: verbPD},
		{Name: "VERB_REGION", Value: verbRegion},
		{Name: "VERB_CQ", Value: verbCQ},
		{Name: "VERB_QP", Value: verbQP},
		{Name: "VERB_CHANNEL", Value: verbChannel},
	}, reflect.TypeFor[faults](), reflect.TypeFor[device](), reflect.TypeFor[contextSlot](), reflect.TypeFor[queuePair](), reflect.TypeFor[region](), reflect.TypeFor[control]())
}
