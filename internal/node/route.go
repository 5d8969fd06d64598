package node

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/transfer"
)

// Why another transport is used than before, as a metric says it.
const (
	whyUnavailable = "unavailable" // the one before cannot reach the peer
	whyFailed      = "failed"      // the one before is broken
	whyRecovered   = "recovered"   // a better one can be used again
)

// When a better transport is tried again.
const (
	retryMin = 5 * time.Second
	retryMax = 60 * time.Second
)

// route is how a life that has said hello is read.
func (n *Node) route(life id.Life, h hello) *transfer.Route {
	o := transfer.RouteOptions{
		RetryMin: retryMin, RetryMax: retryMax,
		Exempt: func(err error) bool { return errors.Is(err, identity.ErrRefused) },
	}
	if n.fast() {
		o.RetryMin, o.RetryMax = retryMin/10, retryMax/10
	}
	return transfer.NewRoute(n.transports, transfer.Peer{Life: life, ArenaBytes: h.arenas}, h.descriptors, o)
}

// reader returns a link to the peer's memory, opened at the first call. It is given
// back by ended, once.
func (p *peer) reader(ctx context.Context) (transfer.Transport, transfer.Link, error) {
	if _, err := p.known(ctx); err != nil {
		return nil, nil, err
	}
	by, link, err := p.route.Link(ctx)
	if err != nil && p.ctx.Err() != nil {
		err = context.Cause(p.ctx)
	}
	if ctx.Err() == nil { // else it says nothing of the peer
		p.mu.Lock()
		p.lastErr = err
		p.mu.Unlock()
	}
	if err != nil {
		p.reroute()
		return nil, nil, err
	}
	p.notice()
	return by, link, nil
}

// ended gives a link back, and tells the route how its reads ended.
func (p *peer) ended(link transfer.Link, err error) {
	p.route.Ended(link, err)
	if err != nil {
		p.reroute()
	}
}

// reroute makes seekBetter look: something may be due sooner than it thinks.
func (p *peer) reroute() {
	select {
	case p.rerouted <- struct{}{}:
	default:
	}
}

// seekBetter goes back to better transports as soon as they can be used again.
func (p *peer) seekBetter() {
	select {
	case <-p.greeted:
	case <-p.ctx.Done():
		return
	}
	due := time.NewTimer(0)
	due.Stop()
	defer due.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.rerouted:
		case <-due.C:
		}
		next := p.route.Probe(p.ctx) // transports bound how long they try
		p.notice()
		if due.Stop(); next > 0 {
			due.Reset(next)
		}
	}
}

// notice looks which transport is used, and tells of it if it is another one than
// before.
func (p *peer) notice() {
	p.mu.Lock()
	states := p.route.State()
	at := slices.IndexFunc(states, func(s transfer.RouteState) bool { return s.InUse })
	if at < 0 || states[at].Name == p.by {
		p.mu.Unlock()
		return
	}
	was, by, better := p.by, states[at].Name, states[:at]
	p.by = by
	p.mu.Unlock()
	p.reroute()
	count := func(from, why string) { p.node.metrics.fallbacks.WithLabelValues(from, by, why).Inc() }
	worse := func(from transfer.RouteState) {
		if from.Broken {
			count(from.Name, whyFailed)
		} else {
			count(from.Name, whyUnavailable)
		}
	}
	log := p.node.log.With("node", p.life.String(), "transport", by)
	if was == "" {
		for _, s := range better {
			worse(s)
			level := slog.LevelDebug // that nodes of two hosts share no memory is as it should be
			if s.Broken {
				level = slog.LevelWarn
			}
			log.Log(p.ctx, level, "better transport is not used", "refused", s.Name, "err", s.Reason)
		}
		return
	}
	for _, s := range better {
		if s.Name == was {
			worse(s)
			log.Warn("better transport is not used any more", "before", was, "err", s.Reason)
			return
		}
	}
	count(was, whyRecovered)
	log.Info("better transport is used again", "before", was)
}

// next is the transport by which a link is opened next, "" if that is not known.
func (p *peer) next() string {
	if !p.isKnown() {
		return ""
	}
	for _, s := range p.route.State() {
		if s.Reason == "" {
			return s.Name
		}
	}
	return ""
}

// transports are the transport that the peer is read by, "" if no link to it is
// open, and the better ones, which are refused.
func (p *peer) transports() (by string, refused []*kvferrypb.PeerItem_Refusal) {
	if !p.isKnown() {
		return "", nil
	}
	for _, s := range p.route.State() {
		if s.InUse {
			return s.Name, refused
		}
		if s.Reason == "" {
			continue
		}
		r := &kvferrypb.PeerItem_Refusal{Transport: s.Name, Reason: s.Reason}
		if s.RetryIn > 0 {
			r.RetryIn = durationpb.New(s.RetryIn)
		}
		refused = append(refused, r)
	}
	return "", refused
}
