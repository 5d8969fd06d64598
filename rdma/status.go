package rdma

import "fmt"

// Status is how a work request ended, as enum ibv_wc_status.
type Status int32

// The statuses that a reader may act on.
const (
	StatusSuccess      Status = 0
	StatusLocLenErr    Status = 1
	StatusLocQPOpErr   Status = 2
	StatusLocProtErr   Status = 4
	StatusWRFlushErr   Status = 5
	StatusBadRespErr   Status = 7
	StatusLocAccessErr Status = 8
	StatusRemInvReqErr Status = 9
	StatusRemAccessErr Status = 10
	StatusRemOpErr     Status = 11
	StatusRetryExcErr  Status = 12
	StatusRNRRetryExc  Status = 13
	StatusFatalErr     Status = 19
	StatusGeneralErr   Status = 21
)

func (s Status) String() string {
	names := [...]string{
		"success", "local length error", "local queue pair operation error", "local EE context operation error",
		"local protection error", "flushed", "memory window bind error", "bad response", "local access error",
		"remote invalid request", "remote access error", "remote operation error", "transport retries exceeded",
		"receiver-not-ready retries exceeded", "local RDD violation", "remote invalid RD request", "remote aborted",
		"invalid EE context number", "invalid EE context state", "fatal error", "response timeout", "general error",
		"tag matching error", "tag matching rendezvous incomplete",
	}
	if s < 0 || int(s) >= len(names) {
		return fmt.Sprintf("status %d", int32(s))
	}
	return names[s]
}

// hint says what a status usually means for someone who only reads.
func (s Status) hint() string {
	switch s {
	case StatusLocLenErr:
		return "the read is longer than the port or the queue pair allows"
	case StatusLocQPOpErr:
		return "the device could not carry out the request: more pieces, or more reads in flight, than the queue pair was made for"
	case StatusLocProtErr, StatusLocAccessErr:
		return "local memory is outside its region, its key is wrong, or it was deregistered"
	case StatusWRFlushErr:
		return "the queue pair was already in the error state: the device's events say why"
	case StatusBadRespErr:
		return "the peer's answer made no sense: compare MTU and read depth of both sides"
	case StatusRemInvReqErr:
		return "the peer refuses reads: its queue pair lacks remote read, or serves fewer reads at once than were asked for"
	case StatusRemAccessErr:
		return "the peer refused: wrong or revoked rkey, an address outside its region, or a region without remote read"
	case StatusRemOpErr:
		return "the peer's device could not complete the request: look at its kernel log"
	case StatusRetryExcErr:
		return "the peer stopped answering: process or host gone, link down, wrong GID, MTU or service level, UDP 4791 not let through, or packets lost"
	case StatusRNRRetryExc:
		return "the peer was not ready for too long"
	case StatusFatalErr, StatusGeneralErr:
		return "the device itself failed: look at the kernel log"
	default:
		return ""
	}
}

// CompletionError is a work request that failed. The queue pair is in the
// error state.
type CompletionError struct {
	Status Status
	Vendor uint32 // the device's own code, of use with its vendor's tables
	Op     int    // index of the first op that the request covered; all before it have landed
	Device string
}

func (e *CompletionError) Error() string {
	s := fmt.Sprintf("read op %d on %s: %s (status %d, vendor code %#x)", e.Op, e.Device, e.Status, int32(e.Status), e.Vendor)
	if h := e.Status.hint(); h != "" {
		s += ": " + h
	}
	return s
}
