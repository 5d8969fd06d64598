package replay

import (
	"errors"
	"fmt"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// explanation says how a request may come to fail with a code because a node
// died, drained, or came back while it ran; "" if that explains nothing.
func explanation(code string) string {
	switch code {
	case CodeNodeLost:
		return "the process of one of its nodes ended"
	case kvferrypb.Failure_NO_SESSION.String():
		return "another life of its node answered"
	case kvferrypb.Failure_DRAINING.String():
		return "its node was told to stop"
	case kvferrypb.Failure_OWNER_LOST.String():
		return "its publisher's node died before the reader had everything"
	case kvferrypb.Failure_TRANSPORT.String():
		return "the read broke with its publisher's node, or one of the two does not know the other's new life yet"
	case kvferrypb.Failure_STALE.String():
		return "its publication ended while it was read: the publisher's node stopped"
	case kvferrypb.Failure_REVOKED.String():
		return "its publisher gave it up: its session ended, or could not go on"
	case kvferrypb.Failure_EXPIRED.String():
		return "its hold ran out while one of its nodes was away"
	case kvferrypb.Failure_NOT_FOUND.String():
		return "a node that has just come back knows nothing of it or of its publisher yet"
	case kvferrypb.Failure_DEADLINE.String():
		return "the news of it died with its publisher's node"
	default:
		return ""
	}
}

// Unexplained says what of a run cannot be the work of nodes that died or
// drained while it ran: wrong bytes, other codes than such a node explains,
// failures while no node was lost, requests that have no end, a run that got
// nothing done, and what was left on a node that was up at the end. It is nil
// for a run that is [Report.OK].
func (r *Report) Unexplained() error {
	var errs []error
	losses := 0
	for _, n := range r.Nodes {
		losses += n.Losses
		for _, what := range n.Left {
			errs = append(errs, fmt.Errorf("left on node %s: %s", n.Node, what))
		}
	}
	if r.Corrupt() {
		errs = append(errs, fmt.Errorf("%d of %d bytes of the ready requests verified, %d wrong, %d requests ready too early", r.VerifiedBytes, r.ReadyBytes, r.WrongBytes, r.Early))
	}
	for _, f := range r.Failures {
		switch {
		case f.Explained == "":
			errs = append(errs, fmt.Errorf("%d requests failed with %s, which no dying node explains", f.Count, f.Code))
		case losses == 0:
			errs = append(errs, fmt.Errorf("%d requests failed with %s, and no node was lost", f.Count, f.Code))
		}
	}
	if open := r.Requests - r.Ready - r.Failed; open > 0 {
		errs = append(errs, fmt.Errorf("%d requests were not started", open))
	}
	if r.Ready == 0 {
		errs = append(errs, errors.New("no request was ready"))
	}
	return errors.Join(errs...)
}
