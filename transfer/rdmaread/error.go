package rdmaread

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/rdma"
	"github.com/kvferry/kvferry/transfer"
)

// LaneError is what a read failed by on one lane: where, and as far as it is known,
// why, and what to look at. It is within the [transfer.Error].
type LaneError struct {
	Device   string // ours
	Port     int
	From, To netip.Addr // GIDs: ours, and the peer's
	Remote   string     // the peer's device
	Peer     id.Life
	Status   string // of the work completion, in words; "" if none came
	Copy     int    // index of the copy that it was in; -1: it was a seal word
	Done     int64  // bytes of the read that had landed
	Err      error
}

func (f *LaneError) Error() string {
	what := fmt.Sprintf("copy %d", f.Copy)
	if f.Copy < 0 {
		what = "a seal word"
	}
	s := fmt.Sprintf("%s of %s, device %s port %d, %s to %s (%s), after %d bytes: %v",
		what, f.Peer, f.Device, f.Port, f.From.Unmap(), f.To.Unmap(), f.Remote, f.Done, f.Err)
	if look := lookAt(f.Err); look != "" {
		s += "; look at " + look
	}
	return s
}

func (f *LaneError) Unwrap() error { return f.Err }

// says reports whether another error would tell nothing new.
func (f *LaneError) says(err error) bool {
	if c, ok := errors.AsType[*rdma.CompletionError](err); ok && c.Status.String() == f.Status {
		return true
	}
	return strings.Contains(f.Error(), err.Error())
}

// lookAt is where the cause of a completion is to be looked for, by both ends
// of a link of this transport. Package rdma says what the status means.
func lookAt(err error) string {
	c, ok := errors.AsType[*rdma.CompletionError](err)
	switch {
	case ok:
	case errors.Is(err, rdma.ErrStalled):
		return "packets that are lost on the way (hw_counters of both ports), the peer's port, and kvferry doctor PEER"
	default:
		return ""
	}
	switch c.Status {
	case rdma.StatusRetryExcErr:
		return "the peer's process and its port, the way between the two addresses (kvferry doctor PEER), and transfer.rdma.timeout if the network is slow or loaded"
	case rdma.StatusRNRRetryExc, rdma.StatusRemOpErr:
		return "the peer's log, and its kernel's"
	case rdma.StatusRemAccessErr, rdma.StatusRemInvReqErr:
		return "the peer's log: it has given up its memory, or restarted; another link has new keys"
	case rdma.StatusLocProtErr:
		return "the log of this node: its memory is no longer registered"
	case rdma.StatusWRFlushErr, rdma.StatusFatalErr:
		return "the kernel's log of this machine"
	default:
		return "the statistics of the device (/sys/class/infiniband/" + c.Device + "/ports)"
	}
}

// final reports whether a lane failed by something that would happen on every
// other lane too: what was asked for is wrong, on our side or on the peer's.
func final(err error) bool {
	if _, ok := errors.AsType[*gatherError](err); ok {
		return true
	}
	c, ok := errors.AsType[*rdma.CompletionError](err)
	if !ok {
		return false
	}
	switch c.Status {
	case rdma.StatusRemAccessErr, rdma.StatusRemInvReqErr, rdma.StatusLocProtErr,
		rdma.StatusLocLenErr, rdma.StatusLocQPOpErr, rdma.StatusLocAccessErr:
		return true
	default:
		return false
	}
}

// stalled turns what rdma says about time into what transfer does.
func stalled(err error) error {
	if errors.Is(err, rdma.ErrStalled) {
		return fmt.Errorf("%w: %w", transfer.ErrStalled, err)
	}
	return err
}
