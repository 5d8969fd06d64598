package node

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/cluster"
	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/internal/kv"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
)

// failure is a sentinel, its code for engines, the gRPC code that goes with it,
// and what to do.
type failure struct {
	is     error
	code   kvferrypb.Failure_Code
	grpc   codes.Code
	remedy string
}

// failures are all that are expected. The first that matches wins, so the cause
// of a cause stands below it.
func failures() []failure {
	return []failure{
		{manager.ErrPage, kvferrypb.Failure_PAGES, codes.InvalidArgument, "none was given: give pages that the engine keeps, each once"},
		{errNoSession, kvferrypb.Failure_NO_SESSION, codes.Unauthenticated, "open a session and keep its Events stream"},
		{errStranger, kvferrypb.Failure_REFUSED, codes.PermissionDenied, "give the caller a certificate whose subject alternative name is its node.name, and let it in by security.peers"},
		{errNoLink, kvferrypb.Failure_TRANSPORT, codes.Unimplemented, "see kvferry status there"},
		{errNotMember, kvferrypb.Failure_TRANSPORT, codes.Unavailable, "try again: gossip may be late; see kvferry members there"},
		{errSeeds, kvferrypb.Failure_INVALID, codes.InvalidArgument, "give host:port of the gossip of running members; kvferry status shows it there"},
		{errNotListed, kvferrypb.Failure_DEADLINE, codes.DeadlineExceeded, "is a node there; are cluster.name, the keyring, and security the same; does the gossip port pass both ways, UDP and TCP"},
		{errBlocked, kvferrypb.Failure_BLOCKED, codes.FailedPrecondition, "start or mend the members that it names, then repeat it"},
		{cluster.ErrUnknownKey, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "see kvferry keyring"},
		{cluster.ErrOvertaken, kvferrypb.Failure_BUSY, codes.Aborted, "see kvferry keyring"},
		{errKeyring, kvferrypb.Failure_INVALID, codes.FailedPrecondition, "see kvferry keyring"},
		{errDraining, kvferrypb.Failure_DRAINING, codes.Unavailable, "use another node"},
		{errExpired, kvferrypb.Failure_EXPIRED, codes.Aborted, "raise Publish.hold or timers.hold, or retrieve earlier"},
		{errRevoked, kvferrypb.Failure_REVOKED, codes.Aborted, "the publisher took it back; prefill again"},
		{errCancelled, kvferrypb.Failure_CANCELLED, codes.Canceled, ""},
		{errRemoved, kvferrypb.Failure_CANCELLED, codes.Canceled, "the request was removed or reset while its pages were on their way"},
		{errOwnerLost, kvferrypb.Failure_OWNER_LOST, codes.Aborted, "prefill again on another node"},
		{transfer.ErrIdentity, kvferrypb.Failure_OWNER_LOST, codes.Aborted, "the owner restarted; prefill again"},
		{identity.ErrRefused, kvferrypb.Failure_TRANSPORT, codes.Unavailable, "check security.certificate, ca, and peers on both nodes; the log of the one that refused says why"},
		{errMoved, kvferrypb.Failure_STALE, codes.Aborted, "nothing of it was used; retrieve it again, or prefill again"},
		{errChecksum, kvferrypb.Failure_CHECKSUM, codes.DataLoss, "it was read twice: look at memory and network of both nodes"},
		{transfer.ErrStale, kvferrypb.Failure_STALE, codes.Aborted, "nothing of it was used; prefill again"},
		{manager.ErrDiverged, kvferrypb.Failure_DIVERGED, codes.FailedPrecondition, "reset the request to take a later publication"},
		{manager.ErrMixed, kvferrypb.Failure_STALE, codes.Aborted, "publish the same steps on all nodes of the group; prefill again"},
		{manager.ErrIncompatible, kvferrypb.Failure_INCOMPATIBLE, codes.FailedPrecondition, "give both nodes the same arena section"},
		{errGeometry, kvferrypb.Failure_INCOMPATIBLE, codes.FailedPrecondition, "change the engine, or the node's arena section"},
		{manager.ErrMalformed, kvferrypb.Failure_MALFORMED, codes.DataLoss, "update the publishing node"},
		{manager.ErrNoPages, kvferrypb.Failure_RESOURCE_EXHAUSTED, codes.ResourceExhausted, "free pages, then try again"},
		{manager.ErrFull, kvferrypb.Failure_RESOURCE_EXHAUSTED, codes.ResourceExhausted, "remove requests"},
		{publish.ErrFull, kvferrypb.Failure_RESOURCE_EXHAUSTED, codes.ResourceExhausted, "wait until readers have taken what is published"},
		{transfer.ErrQueueFull, kvferrypb.Failure_RESOURCE_EXHAUSTED, codes.ResourceExhausted, "try again later; raise transfer.limits.waiting to let more wait, and in_flight and bytes there if memory and network have room"},
		{errTooMany, kvferrypb.Failure_RESOURCE_EXHAUSTED, codes.ResourceExhausted, "try again later"},
		{manager.ErrFinal, kvferrypb.Failure_ALREADY_EXISTS, codes.AlreadyExists, "reset the request to publish it again"},
		{manager.ErrEnded, kvferrypb.Failure_EXPIRED, codes.FailedPrecondition, "reset the request to publish it again"},
		{errOwn, kvferrypb.Failure_INVALID, codes.InvalidArgument, "its readers release it; to take it back, remove the request with discard, or use kvferry revoke"},
		{errUnequal, kvferrypb.Failure_UNEQUAL, codes.FailedPrecondition, "mend what it names, then validate again"},
		{errForeign, kvferrypb.Failure_ALREADY_EXISTS, codes.AlreadyExists, "use another request id"},
		{errReplaced, kvferrypb.Failure_BUSY, codes.Aborted, "keep one Events stream a session"},
		{manager.ErrOffloading, kvferrypb.Failure_OFFLOADING, codes.Unavailable, "reload the request, or try again when its move has ended"},
		{manager.ErrNoHost, kvferrypb.Failure_INVALID, codes.FailedPrecondition, "set arena.host_pages on the node"},
		{errNoVictim, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "see kvferry arena; what is read, has a step in flight, or has just come to the device stays there for now"},
		{manager.ErrHostFull, kvferrypb.Failure_RESOURCE_EXHAUSTED, codes.ResourceExhausted, "raise arena.host_pages, or remove requests that are on the host"},
		{manager.ErrStaged, kvferrypb.Failure_BUSY, codes.FailedPrecondition, "admit the staged step, or unstage it"},
		{manager.ErrReading, kvferrypb.Failure_BUSY, codes.Unavailable, "try again when the read has ended"},
		{manager.ErrStepInFlight, kvferrypb.Failure_BUSY, codes.Unavailable, "commit or abort the step first"},
		{manager.ErrGone, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "retrieve it on another node, or keep the request until you need it no more"},
		{manager.ErrUnknownRequest, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "ingest the request first"},
		{manager.ErrUnknownLabel, kvferrypb.Failure_NOT_FOUND, codes.NotFound, ""},
		{manager.ErrUnknownToken, kvferrypb.Failure_NOT_FOUND, codes.NotFound, ""},
		{errNobody, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "check the request id, and the publisher with kvferry publications"},
		{errUnknownNode, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "see kvferry members"},
		{errUnknownService, kvferrypb.Failure_NOT_FOUND, codes.NotFound, ""},
		{publish.ErrEnded, kvferrypb.Failure_STALE, codes.Aborted, "prefill again"},
		{publish.ErrUnknown, kvferrypb.Failure_NOT_FOUND, codes.NotFound, "see kvferry publications"},
		{publish.ErrConflict, kvferrypb.Failure_MALFORMED, codes.DataLoss, "update the publishing node"},
		{wire.ErrMessage, kvferrypb.Failure_MALFORMED, codes.DataLoss, "update the publishing node"},
		{wire.ErrVersion, kvferrypb.Failure_MALFORMED, codes.DataLoss, "run one version of kvferry on both nodes"},
		{wire.ErrReference, kvferrypb.Failure_INVALID, codes.InvalidArgument, "pass the reference that Publish returned, unchanged; both nodes need one keyring"},
		{id.ErrInvalid, kvferrypb.Failure_INVALID, codes.InvalidArgument, ""},
		{manager.ErrInvalid, kvferrypb.Failure_INVALID, codes.InvalidArgument, ""},
		{kv.ErrInvalid, kvferrypb.Failure_INVALID, codes.InvalidArgument, ""},
		{kv.ErrRange, kvferrypb.Failure_INVALID, codes.InvalidArgument, ""},
		{page.ErrInvalid, kvferrypb.Failure_INVALID, codes.InvalidArgument, ""},
		{cuda.ErrDead, kvferrypb.Failure_INTERNAL, codes.Unavailable, "the node ends, since only a new process gets the GPU again; prefill again, look at nvidia-smi and the kernel's log for its Xid"},
		{errCopy, kvferrypb.Failure_INTERNAL, codes.Unavailable, "nothing of it was used; look at the node's log, nvidia-smi, and the kernel's log"},
		{errTooLate, kvferrypb.Failure_DEADLINE, codes.DeadlineExceeded, "wait longer, or look at the publisher"},
		{errTransport, kvferrypb.Failure_TRANSPORT, codes.Unavailable, "see kvferry peers on both nodes"},
		{errHello, kvferrypb.Failure_TRANSPORT, codes.Unavailable, "see the log of both nodes"},
		{transfer.ErrUnavailable, kvferrypb.Failure_TRANSPORT, codes.Unavailable, "see kvferry peers on both nodes"},
		{transfer.ErrStalled, kvferrypb.Failure_TRANSPORT, codes.Unavailable, "look at the network between the nodes"},
		{transfer.ErrRange, kvferrypb.Failure_MALFORMED, codes.DataLoss, "update the publishing node"},
		{context.DeadlineExceeded, kvferrypb.Failure_DEADLINE, codes.DeadlineExceeded, ""},
		{context.Canceled, kvferrypb.Failure_CANCELLED, codes.Canceled, ""},
	}
}

// failureOf is an error as engines see it.
func failureOf(err error) (*kvferrypb.Failure, codes.Code) {
	f, code := &kvferrypb.Failure{Code: kvferrypb.Failure_INTERNAL, Message: err.Error(), Remedy: "this is a bug of kvferry: please report it with the node's log"}, codes.Internal
	known := false
	if moved, ok := errors.AsType[*transfer.Error](err); ok { // whatever broke on the wire
		f.Code, f.Remedy, code = kvferrypb.Failure_TRANSPORT, "look at the network between the nodes and at the peer's log", codes.Unavailable
		f.Peer, f.PeerIncarnation = string(moved.Peer.Node), uint64(moved.Peer.Incarnation)
		f.Transport, f.BytesDone, f.BytesTotal = moved.Transport, uint64(moved.Done), uint64(moved.Total)
		known = true
	}
	for _, row := range failures() {
		if errors.Is(err, row.is) {
			f.Code, f.Remedy, code, known = row.code, row.remedy, row.grpc, true
			break
		}
	}
	if st, ok := status.FromError(err); ok && !known { // the end of a stream, most likely
		f.Code, f.Remedy, code = kvferrypb.Failure_TRANSPORT, "", st.Code()
	}
	if retrieve, ok := errors.AsType[*retrieveError](err); ok {
		f.Request = string(retrieve.request)
		f.Peer, f.PeerIncarnation = string(retrieve.source.Owner.Node), uint64(retrieve.source.Owner.Incarnation)
		if f.Transport == "" {
			f.Transport = retrieve.transport
		}
	}
	if short, ok := errors.AsType[*manager.AllocationError](err); ok {
		f.Request, f.Label, f.PagesShort = string(short.Request), string(short.Label), uint32(short.Short)
	}
	if other, ok := errors.AsType[*manager.IncompatibleError](err); ok {
		f.Differences = differenceMessages(other.Fields)
	}
	if geometry, ok := errors.AsType[*geometryError](err); ok {
		f.Differences = differenceMessages(geometry.fields)
	}
	if bad, ok := errors.AsType[*manager.MalformedError](err); ok {
		f.Field = bad.Field
	}
	return f, code
}

func differenceMessages(ds []page.Difference) []*kvferrypb.Failure_Difference {
	out := make([]*kvferrypb.Failure_Difference, len(ds))
	for i, d := range ds {
		out[i] = &kvferrypb.Failure_Difference{Field: d.Field, Ours: d.Ours, Theirs: d.Theirs}
	}
	return out
}

// statusOf is an error as gRPC carries it. nil stays nil.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	f, code := failureOf(err)
	st, detailErr := status.New(code, f.GetMessage()).WithDetails(f)
	if detailErr != nil {
		return status.Error(code, f.GetMessage())
	}
	return st.Err()
}

// refusalOf reads how a publication ended from its owner's answer.
func refusalOf(err error) (cause string, ok bool) {
	switch codeOf(err) {
	case kvferrypb.Failure_EXPIRED:
		return "expired", true
	case kvferrypb.Failure_REVOKED:
		return "revoked", true
	case kvferrypb.Failure_STALE:
		return holdReleased, true
	case kvferrypb.Failure_NOT_FOUND:
		return "unknown", true
	default:
		return "", false
	}
}

// codeOf is the code of the failure in a peer's answer; unspecified if it has none.
func codeOf(err error) kvferrypb.Failure_Code {
	st, ok := status.FromError(err)
	if !ok {
		return kvferrypb.Failure_UNSPECIFIED
	}
	for _, d := range st.Details() {
		if f, ok := d.(*kvferrypb.Failure); ok {
			return f.GetCode()
		}
	}
	return kvferrypb.Failure_UNSPECIFIED
}

// errOwn: whoever published does not read it.
var errOwn = errors.New("published by this node, which never reads it from itself")

// errGeometry: an engine was built for another geometry than the node's.
var errGeometry = errors.New("engine and node differ")

// geometryError names every field in which an engine differs. It wraps errGeometry.
type geometryError struct{ fields []page.Difference }

func (e *geometryError) Error() string { return fmt.Sprintf("%v: %v", errGeometry, e.fields) }
func (e *geometryError) Unwrap() error { return errGeometry }
