package replay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// Bounds of looking for what a run has left.
const (
	leftPeriod  = 50 * time.Millisecond
	lookTimeout = 5 * time.Second // of one look
	maxLeft     = 10              // things of one node that are told
	lookLimit   = 100_000         // things of one kind that a node is asked for
)

// lookForLeft notes what of this run is left on the nodes that are up when it
// should have settled.
func (r *run) lookForLeft(ctx context.Context) {
	var until time.Time
	r.note(func(s *stats) { until = r.start.Add(s.took + r.o.Settle) })
	for _, e := range r.engines() {
		l := e.take()
		if l == nil { // with its node everything is gone
			continue
		}
		left := l.left(ctx, r.name)
		for len(left) > 0 && time.Now().Before(until) && pause(ctx, leftPeriod) == nil {
			left = l.left(ctx, r.name)
		}
		if n := len(left); n > maxLeft {
			left = append(left[:maxLeft], fmt.Sprintf("and %d more", n-maxLeft))
		}
		if !l.lost() {
			e.note(func(n *NodeReport) { n.Left = append(n.Left, left...) })
		}
		l.giveBack()
	}
}

// left is what requests whose names begin with a prefix have on the node, and
// pages that nothing has.
func (l *life) left(ctx context.Context, prefix string) (left []string) {
	ctx, cancel := context.WithTimeout(ctx, lookTimeout)
	defer cancel()
	admin := l.client.Admin()
	arena, err := admin.Arena(ctx, &kvferrypb.ArenaRequest{Limit: lookLimit})
	if err != nil {
		return []string{err.Error()}
	}
	for _, s := range arena.GetItems() {
		if strings.HasPrefix(s.GetRequest(), prefix) {
			left = append(left, fmt.Sprintf("request %s: %d pages of label %s, and %d on the host, %s", s.GetRequest(), s.GetPages(), s.GetLabel(), s.GetHostPages(), s.GetState()))
		}
	}
	publications, err := admin.Publications(ctx, &kvferrypb.PublicationsRequest{Limit: lookLimit})
	if err != nil {
		return append(left, err.Error())
	}
	for _, p := range publications.GetItems() {
		if strings.HasPrefix(p.GetRequest(), prefix) {
			left = append(left, fmt.Sprintf("publication of request %s: %d pages, %s, %d leases, expires in %v", p.GetRequest(), p.GetPages(), p.GetState(), p.GetLeases(), p.GetExpiresIn().AsDuration()))
		}
	}
	retrievals, err := admin.Retrievals(ctx, &kvferrypb.RetrievalsRequest{Limit: lookLimit})
	if err != nil {
		return append(left, err.Error())
	}
	for _, f := range retrievals.GetItems() {
		if strings.HasPrefix(f.GetRequest(), prefix) {
			left = append(left, fmt.Sprintf("retrieval of request %s: %s", f.GetRequest(), f.GetState()))
		}
	}
	// Of pages nobody can say whose they were, unless nobody has any.
	status, err := admin.Status(ctx, &kvferrypb.StatusRequest{})
	if err != nil {
		return append(left, err.Error())
	}
	pages := status.GetPages()
	if status.GetRequests()+status.GetPublications()+status.GetRetrievals() > 0 {
		return left
	}
	if lost := int(pages.GetTotal()) - int(pages.GetFree()) - int(pages.GetSink()); lost > 0 {
		left = append(left, fmt.Sprintf("%d pages that no request has: %d owned, %d in limbo, %d in quarantine", lost, pages.GetOwned(), pages.GetLimbo(), pages.GetQuarantine()))
	}
	if lost := int(pages.GetHostTotal()) - int(pages.GetHostFree()); lost > 0 {
		left = append(left, fmt.Sprintf("%d host pages that no request has", lost))
	}
	return left
}
