package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

var (
	errNoSession = errors.New("no such session")
	errForeign   = errors.New("request belongs to another session")
	errReplaced  = errors.New("another Events stream took the session over")
)

const (
	maxSessions = 1024
	maxEvents   = 65536 // of a session, not acknowledged
)

// sessions are the engines at work. A session lives as long as its Events
// stream, and the grace after it; at its end everything that it began ends,
// but for what it has published as final.
type sessions struct {
	node *Node

	plans sync.Pool // of *manager.Plans: the buffers that plans are made in

	told sync.Mutex // orders what the engine is told of its pages; taken before mu

	mu       sync.Mutex
	byToken  map[string]*session
	requests map[id.Request]*session
	lastLane manager.Lane
}

// session is one engine.
type session struct {
	token  string
	engine string
	lane   manager.Lane    // never used again
	most   int             // pages that its events name
	ctx    context.Context //nolint:containedctx // the session's own life, ended by stop
	stop   context.CancelCauseFunc
	calls  sync.WaitGroup // those that are at work; Add under mu, never when ended

	mu       sync.Mutex
	ended    bool
	steps    map[manager.Token]*step
	staged   *step              // of steps; nil: none
	events   []*kvferrypb.Event // not acknowledged; their sequences have no gap
	pages    int                // that they name
	sequence uint64             // of the newest event
	changed  chan struct{}      // closed at every event, then replaced
	heard    bool               // an Events stream has stood
	stream   chan struct{}      // the Events stream that stands, closed when another takes over; nil: none
	detached time.Time          // since when none does
}

func newSessions(n *Node) *sessions {
	return &sessions{
		node: n, byToken: make(map[string]*session), requests: make(map[id.Request]*session),
	}
}

func newSession(now time.Time, token, engine string) *session {
	s := &session{
		token: token, engine: engine,
		steps: make(map[manager.Token]*step), changed: make(chan struct{}), detached: now,
	}
	s.ctx, s.stop = context.WithCancelCause(context.Background())
	return s
}

func (ss *sessions) open(now time.Time, engine string) (*session, error) {
	s := newSession(now, rand.Text(), engine)
	s.most = ss.node.geometry.Layout.Pages
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if len(ss.byToken) >= maxSessions {
		return nil, fmt.Errorf("open a session: %d are open: %w", len(ss.byToken), errTooMany)
	}
	if len(ss.byToken) > 0 && ss.node.engineChooses() {
		return nil, fmt.Errorf("open a session: one is open, and there is one engine that chooses the pages (arena.allocate): %w", errTooMany)
	}
	ss.lastLane++
	s.lane = ss.lastLane
	ss.byToken[s.token] = s
	return s, nil
}

func (ss *sessions) get(token string) (*session, error) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if s := ss.byToken[token]; s != nil {
		return s, nil
	}
	return nil, errNoSession
}

func (ss *sessions) count() int {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	return len(ss.byToken)
}

// ingest begins a request and makes it the session's, unless it is another's.
func (ss *sessions) ingest(s *session, r id.Request, c manager.RequestConfig) error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if other := ss.requests[r]; other != nil && other != s {
		return fmt.Errorf("request %q is session %s's: %w", r, other.engine, errForeign)
	}
	if err := ss.node.manager.Ingest(r, c); err != nil {
		return err
	}
	ss.requests[r] = s
	return nil
}

// own checks that a request is the session's.
func (ss *sessions) own(s *session, r id.Request) error {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	switch ss.requests[r] {
	case s:
		return nil
	case nil:
		return fmt.Errorf("request %q: %w", r, manager.ErrUnknownRequest)
	default:
		return fmt.Errorf("request %q: %w", r, errForeign)
	}
}

// sweep ends the sessions whose Events stream has been gone for the grace.
func (ss *sessions) sweep(now time.Time, grace time.Duration) {
	ss.mu.Lock()
	var due []*session
	for _, s := range ss.byToken {
		if s.lost(now, grace) {
			due = append(due, s)
		}
	}
	ss.mu.Unlock()
	for _, s := range due {
		ss.end(s, "its Events stream was gone for the grace")
	}
}

// end ends everything that the session began, once its calls have ended.
func (ss *sessions) end(s *session, why string) {
	ss.mu.Lock()
	if ss.byToken[s.token] != s {
		ss.mu.Unlock()
		return
	}
	delete(ss.byToken, s.token)
	ss.mu.Unlock()
	steps := s.end()

	ss.mu.Lock()
	var requests []id.Request
	for r, owner := range ss.requests {
		if owner == s {
			requests = append(requests, r)
		}
	}
	ss.mu.Unlock()
	n := ss.node
	for _, t := range steps {
		if err := n.manager.Abort(t); err != nil {
			n.log.Error("step of an ended session stays", "step", uint64(t), "err", err)
		}
	}
	for _, r := range requests {
		if err := n.remove(r, false, kvferrypb.CompleteItem_FAILED); err != nil {
			n.log.Error("request of an ended session stays", "request", string(r), "err", err)
		}
	}
	n.owner.forget(s)
	n.log.Info("session ended", "engine", s.engine, "requests", len(requests), "steps", len(steps), "why", why)
}

// endUnheard ends sessions that no Events stream has reached yet: the answer to
// their Open was lost.
func (ss *sessions) endUnheard() {
	ss.mu.Lock()
	var all []*session
	for _, s := range ss.byToken {
		s.mu.Lock()
		if !s.heard {
			all = append(all, s)
		}
		s.mu.Unlock()
	}
	ss.mu.Unlock()
	for _, s := range all {
		ss.end(s, "another was opened, and it had no Events stream")
	}
}

func (ss *sessions) endAll(why string) {
	ss.mu.Lock()
	all := make([]*session, 0, len(ss.byToken))
	for _, s := range ss.byToken {
		all = append(all, s)
	}
	ss.mu.Unlock()
	for _, s := range all {
		ss.end(s, why)
	}
}

// emitAll tells every session; each gets an event of its own.
func (ss *sessions) emitAll(e func() *kvferrypb.Event) {
	ss.mu.Lock()
	all := make([]*session, 0, len(ss.byToken))
	for _, s := range ss.byToken {
		all = append(all, s)
	}
	ss.mu.Unlock()
	for _, s := range all {
		s.emit(e())
	}
}

// enter begins a call of the session's; leave ends it.
func (s *session) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return errNoSession
	}
	s.calls.Add(1)
	return nil
}

func (s *session) leave() { s.calls.Done() }

// within is ctx, which also ends with the session.
func (s *session) within(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// end ends the session's calls, waits for them, and returns the steps that it
// leaves. Nothing of the session begins any more.
func (s *session) end() (steps []manager.Token) {
	s.mu.Lock()
	s.ended = true
	s.forget(len(s.events))
	s.mu.Unlock()
	s.stop(errNoSession)
	s.calls.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	for t := range s.steps {
		steps = append(steps, t)
	}
	clear(s.steps)
	s.staged = nil
	return steps
}

// emit queues an event; the session owns it. Over a bound the oldest is lost,
// which its missing sequence tells. So is none that the engine has not heard of for
// the pages that are named: one that is named twice was given in between, by an
// engine that had heard of the first event, and so of the oldest.
func (s *session) emit(e *kvferrypb.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return
	}
	s.sequence++
	e.Sequence = s.sequence
	s.pages += len(e.GetPages())
	for len(s.events) >= maxEvents || len(s.events) > 0 && s.pages > s.most {
		s.forget(1)
	}
	s.events = append(s.events, e)
	close(s.changed)
	s.changed = make(chan struct{})
}

// attach makes a stream the session's. The one before it is over: its client
// has lost it, and may not have noticed yet.
func (s *session) attach() (replaced <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stream != nil {
		close(s.stream)
	}
	s.stream, s.heard = make(chan struct{}), true
	return s.stream
}

// detach ends the stream that attach returned.
func (s *session) detach(now time.Time, stream <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stream == stream {
		s.stream, s.detached = nil, now
	}
}

// lost says that no stream has stood for the grace.
func (s *session) lost(now time.Time, grace time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stream == nil && now.Sub(s.detached) > grace
}

// acknowledge forgets the events up to after.
func (s *session) acknowledge(after uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forget(s.upTo(after))
}

// forget drops the oldest events. s.mu is held.
func (s *session) forget(count int) {
	for _, e := range s.events[:count] {
		s.pages -= len(e.GetPages())
	}
	clear(s.events[:count])
	s.events = s.events[count:]
}

// upTo is how many of the events have a sequence of at most after. s.mu is held.
func (s *session) upTo(after uint64) int {
	if len(s.events) == 0 || after < s.events[0].GetSequence() {
		return 0
	}
	return int(min(after-s.events[0].GetSequence()+1, uint64(len(s.events))))
}

// since returns the events after a sequence, and what is closed when there are
// more.
func (s *session) since(after uint64) (events []*kvferrypb.Event, more <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.events[s.upTo(after):]), s.changed
}

func releasedEvent(r id.Request, reference, cause string) *kvferrypb.Event {
	return &kvferrypb.Event{Kind: kvferrypb.Event_RELEASED, Request: string(r), Reference: reference, Outcome: cause}
}

func retrievedEvent(r id.Request, owner id.Life) *kvferrypb.Event {
	return &kvferrypb.Event{Kind: kvferrypb.Event_RETRIEVED, Request: string(r), Outcome: "landed", Peer: owner.String()}
}

func failedEvent(r id.Request, err error) *kvferrypb.Event {
	f, _ := failureOf(err)
	return &kvferrypb.Event{Kind: kvferrypb.Event_FAILED, Request: string(r), Outcome: "failed", Failure: f}
}
