package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/identity"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
	"github.com/kvferry/kvferry/transfer"
)

var (
	errCancelled = errors.New("retrieval was cancelled")
	errRemoved   = errors.New("request was removed or reset")
	errExpired   = errors.New("publication has expired")
	errRevoked   = errors.New("publication was revoked")
	errNobody    = errors.New("nobody has published the request")
	errTooLate   = errors.New("wait is over")
	errDraining  = errors.New("node is draining")
	errTooMany   = errors.New("too many at once")
	errOver      = errors.New("nothing is followed any more") // of what only resumes
)

// maxFollows bounds the publications that are followed, and the calls that wait.
const maxFollows = 65536

// query is what an engine asks of AdmitRetrieve.
type query struct {
	request   id.Request
	at        manager.At
	reference *wire.Reference // nil: whoever published the request
	minTokens int
	wait      time.Duration // 0: look once
	meet      time.Time     // until then the owner may be unknown: its reference can be faster than gossip
	of        uint32        // the attempt that it goes on with, and nothing else; 0: any
}

// answer is what it gets.
type answer struct {
	readiness manager.Readiness
	source    id.Publication // zero: none yet
	transport string
	bytes     int64
}

// sight is an answer and what may change it.
type sight struct {
	answer
	follow  *follow         // nil: nothing is followed
	changed <-chan struct{} // closed when the follow has changed; nil without one
	missing error           // why nobody offers it now; another member may change that
}

// follow is the reader's side of one publication that a request is brought in
// from: the lease that is kept for it, and the read that runs. It lives from
// the moment that the publication is accepted until it has failed or the
// request ends; once all of it has landed it only remembers that. Where another
// publication goes on for it, so does another follow, with the same lease.
type follow struct {
	node     *Node
	session  *session
	request  id.Request
	source   id.Publication
	seal     uint32 // index of its word
	attempt  uint32 // names our lease at the owner
	accepted time.Time
	names    []id.Publication // that it is known by; follows.mu guards it

	mu        sync.Mutex
	changed   chan struct{} // closed at every change, then replaced
	running   *reading
	err       error           // how it failed, until it is reported
	refused   error           // why an owner gives no lease
	leased    bool            // the lease was asked for
	until     time.Time       // it was granted; zero: it was not
	over      bool            // the lease was ended by us
	landed    *manager.Source // all of it has landed: what it was
	transport string
	bytes     int64
	query     query     // the last that looked
	moved     int       // how often another one has gone on since something landed
	rest      []*follow // leases at the other nodes of the owner's group
	lead      *follow   // whose rest it is in; nil: it leads itself
}

// reading is one retrieval at work.
type reading struct {
	id     manager.RetrievalID
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when it has drained and the manager knows
	state  string
}

// call is one AdmitRetrieve at work.
type call struct {
	cancel context.CancelCauseFunc
	done   chan struct{} // closed when it has left
}

// follows are the publications that this node follows, one a request, and the
// calls that wait for them.
type follows struct {
	mu        sync.Mutex
	byRequest map[id.Request]*follow
	bySource  map[id.Publication]*follow
	calls     map[id.Request][]*call
	waiting   int // calls
	attempts  uint32
}

func newFollows() *follows {
	return &follows{
		byRequest: make(map[id.Request]*follow), bySource: make(map[id.Publication]*follow), calls: make(map[id.Request][]*call),
	}
}

// enter begins a call for a request: its context ends when the request's
// retrieval is cancelled. leave ends it.
func (fs *follows) enter(ctx context.Context, r id.Request) (_ context.Context, leave func(), err error) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.waiting >= maxFollows {
		return nil, nil, fmt.Errorf("retrieve %q: %d calls wait: %w", r, fs.waiting, errTooMany)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	c := &call{cancel: cancel, done: make(chan struct{})}
	fs.calls[r] = append(fs.calls[r], c)
	fs.waiting++
	return ctx, func() {
		fs.mu.Lock()
		defer fs.mu.Unlock()
		fs.waiting--
		if fs.calls[r] = slices.DeleteFunc(fs.calls[r], func(o *call) bool { return o == c }); len(fs.calls[r]) == 0 {
			delete(fs.calls, r)
		}
		cancel(nil)
		close(c.done)
	}, nil
}

// get returns what a request follows, and what is closed when that changes.
func (fs *follows) get(r id.Request) (*follow, <-chan struct{}) {
	fs.mu.Lock()
	f := fs.byRequest[r]
	fs.mu.Unlock()
	if f == nil {
		return nil, nil
	}
	return f, f.watch()
}

func (fs *follows) from(p id.Publication) *follow {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return fs.bySource[p]
}

// attempt is a new name for a lease.
func (fs *follows) attempt() uint32 {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.attempts++
	return fs.attempts
}

// active are those whose lease has not been ended.
func (fs *follows) active() []*follow {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	active := make([]*follow, 0, len(fs.byRequest))
	for _, f := range fs.byRequest {
		if !f.isOver() {
			active = append(active, f)
		}
	}
	return active
}

// leases are the active ones, and those beside them.
func (fs *follows) leases() []*follow {
	var all []*follow
	for _, f := range fs.active() {
		all = append(all, f.all()...)
	}
	return all
}

// accept makes a follow of the publication, unless the request follows one
// already. made says which; a call that has been ended makes none.
func (n *Node) accept(ctx context.Context, s *session, r id.Request, source id.Publication, seal uint32) (f *follow, changed <-chan struct{}, made bool, err error) {
	fs := n.follows
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if ctx.Err() != nil {
		return nil, nil, false, context.Cause(ctx)
	}
	if f := fs.byRequest[r]; f != nil {
		return f, f.watch(), false, nil
	}
	if len(fs.byRequest) >= maxFollows {
		return nil, nil, false, fmt.Errorf("retrieve %q: %d run: %w", r, len(fs.byRequest), errTooMany)
	}
	fs.attempts++
	f = &follow{
		node: n, session: s, request: r, source: source, seal: seal, attempt: fs.attempts,
		accepted: time.Now(), changed: make(chan struct{}),
	}
	fs.byRequest[r] = f
	fs.call(f, source)
	return f, f.changed, true, nil
}

// maxNames bounds the names of one follow, the oldest of which are forgotten: a
// publication gets another one whenever its pages go to the host.
const maxNames = 16

// call gives a follow one more name. fs.mu is held.
func (fs *follows) call(f *follow, name id.Publication) {
	if slices.Contains(f.names, name) {
		return
	}
	if len(f.names) == maxNames {
		if oldest := f.names[0]; fs.bySource[oldest] == f {
			delete(fs.bySource, oldest)
		}
		f.names = f.names[1:]
	}
	f.names = append(f.names, name)
	fs.bySource[name] = f
}

// alias notes that what is followed is named otherwise, too.
func (fs *follows) alias(f *follow, name id.Publication) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if fs.byRequest[f.request] == f.leader() {
		fs.call(f, name)
	}
}

// called says whether a follow is known by this name.
func (fs *follows) called(f *follow, name id.Publication) bool {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	return slices.Contains(f.names, name)
}

// succeed makes the follow of what goes on for another one's publication. The
// lease is the same: the owner has taken it along. It returns what the request
// follows now, which somebody else may have changed.
func (n *Node) succeed(ctx context.Context, f *follow, e publish.Entry) (*follow, <-chan struct{}, error) {
	fs := n.follows
	fs.mu.Lock()
	defer fs.mu.Unlock()
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	if now := fs.byRequest[f.request]; now != f {
		if now == nil { // another call has given up
			return nil, nil, errMoved
		}
		return now, now.watch(), nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.running != nil || f.landed != nil {
		return f, f.changed, nil
	}
	next := &follow{
		node: n, session: f.session, request: f.request, source: e.Name, seal: e.Seal, attempt: f.attempt, accepted: f.accepted,
		changed: make(chan struct{}), query: f.query, moved: f.moved + 1, transport: f.transport, bytes: f.bytes,
	}
	names := f.names
	fs.forget(f)
	fs.byRequest[f.request] = next
	next.rest, f.rest = f.rest, nil
	for _, c := range next.rest {
		c.join(next)
	}
	for _, name := range append(names, e.Name) {
		fs.call(next, name)
	}
	f.over = true
	f.wakeLocked()
	return next, next.changed, nil
}

// detach ends the calls that wait for a request, and returns what it followed:
// the caller ends that, too.
func (fs *follows) detach(r id.Request, cause error) (*follow, []*call) {
	fs.mu.Lock()
	defer fs.mu.Unlock()
	// Under the mutex, so that none of them accepts anything after this.
	calls := slices.Clone(fs.calls[r])
	for _, c := range calls {
		c.cancel(cause)
	}
	f := fs.byRequest[r]
	fs.drop(f)
	return f, calls
}

// drop forgets a follow. fs.mu is held.
func (fs *follows) drop(f *follow) {
	if f == nil || fs.byRequest[f.request] != f {
		return
	}
	delete(fs.byRequest, f.request)
	fs.forget(f)
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.rest {
		fs.forget(c)
	}
}

// forget makes a follow found by none of its names. fs.mu is held.
func (fs *follows) forget(f *follow) {
	for _, name := range f.names {
		if fs.bySource[name] == f {
			delete(fs.bySource, name)
		}
	}
}

// finish stops following.
func (n *Node) finish(f *follow, outcome kvferrypb.CompleteItem_Outcome) {
	f.acknowledge(outcome)
	n.follows.mu.Lock()
	defer n.follows.mu.Unlock()
	n.follows.drop(f)
}

// lose stops following what has failed. A query that only resumes leaves that to
// the engine's next call, which reports it.
func (n *Node) lose(q query, f *follow, err error) {
	if q.of == 0 {
		n.finish(f, kvferrypb.CompleteItem_FAILED)
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
	f.wakeLocked()
}

// lost ends what follows a life that has gone.
func (fs *follows) lost(life id.Life, cause error) {
	for _, f := range fs.leases() {
		if f.source.Owner == life {
			f.fail(cause)
		}
	}
}

func (f *follow) isOver() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.over
}

// keep asks for the lease, once. Nothing waits for the answer.
func (f *follow) keep() {
	f.mu.Lock()
	ask := !f.leased && !f.over
	f.leased = true
	f.mu.Unlock()
	if ask {
		f.tell(kvferrypb.CompleteItem_OUTCOME_UNSPECIFIED)
	}
}

// acknowledge ends the lease with the outcome, once. What has landed stays to be
// told to the engine; nothing that happens to the owner changes it.
func (f *follow) acknowledge(outcome kvferrypb.CompleteItem_Outcome) {
	f.mu.Lock()
	tell := f.leased && !f.over
	f.over = true
	rest := f.rest
	f.wakeLocked()
	f.mu.Unlock()
	if tell {
		f.tell(outcome)
	}
	for _, c := range rest {
		c.acknowledge(outcome)
	}
}

// tell queues a word on our lease for the owner.
func (f *follow) tell(outcome kvferrypb.CompleteItem_Outcome) {
	if p := f.node.peers.byLife(f.source.Owner); p != nil {
		p.tell(receipt{sequence: f.source.Sequence, attempt: f.attempt, outcome: outcome, follow: f})
	}
}

// fail records a cause and ends the read that runs, if any.
func (f *follow) fail(cause error) {
	if lead := f.leader(); lead != f {
		if !f.isOver() {
			lead.fail(&partError{f.source, cause})
		}
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.over {
		return
	}
	if f.err == nil {
		f.err = cause
	}
	if f.running != nil {
		f.running.cancel(cause)
	}
	f.wakeLocked()
}

// abandon ends a follow whose request has lost its pages. Nobody waits for the
// read that runs: they are in quarantine until it has ended. f may be nil.
func (f *follow) abandon(outcome kvferrypb.CompleteItem_Outcome) {
	if f == nil {
		return
	}
	f.fail(errRemoved)
	f.acknowledge(outcome)
}

// granted notes until when the owner has granted the lease, and says how much of
// the time before was left; not ok: it is the first.
func (f *follow) granted(now, until time.Time) (slack time.Duration, ok bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	slack, ok = f.until.Sub(now), !f.until.IsZero()
	f.until = until
	return slack, ok
}

// refuse notes that the owner gives no lease. A read that runs goes on: its
// seal decides. One that waits must not wait for ever.
func (f *follow) refuse(why string) {
	err := endedError(why)
	if lead := f.leader(); lead != f {
		if f.isOver() {
			return
		}
		f, err = lead, &partError{f.source, err}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.over {
		f.refused = err
		f.wakeLocked()
	}
}

func (f *follow) wakeLocked() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// watch returns what is closed at the next change.
func (f *follow) watch() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.changed
}

// reading returns the read that runs or drains, or nil.
func (f *follow) reading() *reading {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.running
}

// failure returns how it failed, when nothing drains any more.
func (f *follow) failure() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.running != nil:
		return nil
	case f.err != nil:
		return f.err
	default:
		return f.refused
	}
}

// endedError is the error for an owner's word of how a publication ended.
func endedError(cause string) error {
	switch cause {
	case "expired":
		return errExpired
	case "revoked":
		return errRevoked
	case "unknown":
		return fmt.Errorf("owner does not know it: %w", publish.ErrUnknown)
	case holdOffloaded:
		return errMoved
	case holdReleased:
		return fmt.Errorf("%w: all its readers have taken it", publish.ErrEnded)
	default:
		return fmt.Errorf("%w: owner says %.40q", publish.ErrEnded, cause)
	}
}

// retrieve brings a request in: it looks once, or until it is ready, has
// failed, or the wait is over. A wait that is over ends no read: whoever gives
// up cancels.
//
// If pages are short, others are offloaded; with a wait it tries until that is
// over. If the request's own tokens are on the host they are brought back: with a
// wait it goes on when they are there, without one that begins and the error is
// [manager.ErrOffloading] until then.
func (n *Node) retrieve(ctx context.Context, s *session, q query) (answer, error) {
	ctx, leave, err := n.follows.enter(ctx, q.request)
	if err != nil {
		return answer{}, err
	}
	defer leave()
	if q.reference != nil && q.reference.Request != q.request {
		return answer{}, fmt.Errorf("retrieve %q: reference names request %q: %w", q.request, q.reference.Request, wire.ErrReference)
	}
	if q.wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, q.wait, errTooLate)
		defer cancel()
		q.meet = time.Now().Add(min(q.wait, n.meetTime()))
	}
	wait := n.pauses()
	for {
		// Watched before it is looked at, so that no change is missed.
		board, unwatch := n.board.Watch(q.request)
		members := n.peers.watch()
		var seen sight
		err := n.withRoom(ctx, forRetrieve, func() (err error) {
			seen, err = n.look(ctx, s, q)
			return err
		}, q.request)
		switch {
		case err == nil && (seen.readiness == manager.Ready || q.wait <= 0 || q.of != 0 && seen.readiness == manager.Reading):
			unwatch()
			return seen.answer, nil
		case err == nil:
			err = n.await(ctx, q, seen, board, members)
		case errors.Is(err, manager.ErrOffloading):
			err = n.bringBack(ctx, q, err)
		case q.wait > 0 && errors.Is(err, manager.ErrNoPages) && !n.isTooMuch(err): // nobody tells when pages become free
			if cause := wait.pause(ctx); errors.Is(cause, errTooLate) {
				err = fmt.Errorf("waited %v: %w", q.wait, err)
			} else if err = cause; cause != nil {
				err = fmt.Errorf("retrieve %q: %w", q.request, cause)
			}
		}
		unwatch()
		if err != nil {
			return seen.answer, err
		}
	}
}

// bringBack reloads what the request itself has on the host, for a query that
// was refused for that.
func (n *Node) bringBack(ctx context.Context, q query, refused error) error {
	if q.wait > 0 {
		return n.tier.restore(ctx, q.request)
	}
	err := n.withRoom(ctx, forReload, func() error {
		_, _, err := n.tier.begin(q.request, true)
		return err
	}, q.request)
	if err != nil && !errors.Is(err, manager.ErrOffloading) {
		return err
	}
	return refused
}

// resume goes on with what the engine was told is being read, when another
// publication goes on for it, until that is read: the engine may wait for the
// event alone.
func (n *Node) resume(f *follow) {
	f.mu.Lock()
	q := f.query
	f.mu.Unlock()
	q.wait, q.of = n.config.Timers.MaxHold, f.attempt
	n.spawn(func() {
		if _, err := n.retrieve(n.ctx, f.session, q); err != nil && !errors.Is(err, errOver) {
			f.session.emit(failedEvent(f.request, err))
		}
	})
}

// await returns when it is worth to look again, or the error of one that is not.
func (n *Node) await(ctx context.Context, q query, seen sight, board, members <-chan struct{}) error {
	var draining <-chan struct{}
	if seen.follow == nil { // nothing has begun
		draining = n.leaving.begun
	}
	if seen.missing == nil {
		members = nil
	}
	if errors.Is(seen.missing, errUnknownNode) {
		var cancel context.CancelFunc
		ctx, cancel = context.WithDeadlineCause(ctx, q.meet, errTooLate)
		defer cancel()
	}
	select {
	case <-board:
		return nil
	case <-seen.changed:
		return nil
	case <-members:
		return nil
	case <-draining:
		return fmt.Errorf("retrieve %q: %w", q.request, errDraining)
	case <-n.ctx.Done():
		return fmt.Errorf("retrieve %q: %w", q.request, errDraining)
	case <-ctx.Done():
		return n.tooLate(context.Cause(ctx), q, seen)
	}
}

func (n *Node) meetTime() time.Duration {
	if n.fast() {
		return meetTime / 10
	}
	return meetTime
}

// tooLate says what was waited for in vain.
func (n *Node) tooLate(cause error, q query, seen sight) error {
	unmet, isUnmet := errors.AsType[*unmetError](seen.missing)
	switch {
	case seen.follow != nil:
	case isUnmet:
		return &retrieveError{request: q.request, source: unmet.source, err: unmet.peer.unanswered(cause)}
	case seen.missing != nil && errors.Is(cause, errTooLate):
		return seen.missing
	case errors.Is(cause, errTooLate):
		return fmt.Errorf("retrieve %q: waited %v: %w", q.request, q.wait, errNobody)
	default:
		return fmt.Errorf("retrieve %q: %w", q.request, cause)
	}
	what := "more of it to be published"
	if seen.readiness == manager.Reading {
		what = "its pages to land"
	} else if seen.missing != nil {
		what = fmt.Sprintf("the other nodes of its group (%v)", seen.missing)
	}
	return n.failed(seen.follow, fmt.Errorf("waited for %s: %w", what, cause))
}

// look is one pass: find the source, ask the manager, start what it wants.
func (n *Node) look(ctx context.Context, s *session, q query) (sight, error) {
	f, changed := n.follows.get(q.request)
	if q.of != 0 && (f == nil || f.attempt != q.of) {
		return sight{}, errOver
	}
	meant := f != nil
	if f != nil && q.reference != nil {
		named := n.named(ctx, q, f)
		if meant = named != nil; meant {
			// What follows it goes on, whatever somebody else is told of it.
			if err := matches(q.reference, named.source, q.request.Hash(), named.seal); err != nil {
				return sight{}, n.failed(f, err)
			}
		}
	}
	if f != nil {
		switch landed := f.allLanded(); {
		case landed != nil && meant:
			if seen, ok, err := n.again(q, f, changed, landed); ok {
				return seen, err
			}
			f = nil
		case landed != nil: // another one is wanted now
			n.finish(f, kvferrypb.CompleteItem_LANDED)
			f = nil
		case !meant:
			return sight{answer: f.answer(manager.Waiting)}, fmt.Errorf("retrieve %q: already reads %s: %w", q.request, f.source, manager.ErrReading)
		case f.reading() != nil:
			return sight{answer: f.answer(manager.Reading), follow: f, changed: changed}, nil
		default:
			if err := f.failure(); err != nil && !f.mayGoOn() {
				n.lose(q, f, err)
				return sight{answer: f.answer(manager.Waiting)}, n.failed(f, err)
			}
		}
	}
	if f == nil {
		return n.choose(ctx, s, q)
	}
	e, source, err := n.fetch(ctx, q, f.source)
	var w whole
	if err == nil {
		w, err = n.gather(ctx, q, part{source: source, seal: e.Seal}, f.all())
	}
	if err != nil && ctx.Err() != nil { // the call is over, not what is followed
		return sight{answer: f.answer(manager.Waiting)}, n.failed(f, err)
	}
	if err != nil {
		now, _ := n.follows.get(q.request)
		if now != nil && now != f || f.allLanded() != nil || f.reading() != nil { // meanwhile, by another call
			return n.look(ctx, s, q)
		}
		if f.failure() != nil && !f.mayGoOn() || errors.Is(err, errUnknownNode) { // its owner has just gone
			err = cmp.Or(f.failure(), error(&partError{blamed(err, f.source), errOwnerLost}))
		}
		n.lose(q, f, err)
		return sight{answer: f.answer(manager.Waiting)}, n.failed(f, err)
	}
	if e.Name != f.source || w.moved() {
		next, nextChanged, err := n.succeed(ctx, f, e)
		switch {
		case err != nil:
			return sight{}, fmt.Errorf("retrieve %q: %w", q.request, err)
		case next.source != e.Name || next == f: // somebody was faster, or it reads again
			return n.look(ctx, s, q)
		}
		f, changed = next, nextChanged
	} else if err := f.failure(); err != nil { // its owner says both that it has moved and that it has not
		n.lose(q, f, err)
		return sight{answer: f.answer(manager.Waiting)}, n.failed(f, err)
	}
	return n.admit(q, f, changed, false, w)
}

// mayGoOn says whether the follow has failed so that what goes on for its
// publication is to be looked for.
func (f *follow) mayGoOn() bool {
	err := f.failure()
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Is(err, errMoved) && f.moved < f.node.config.Timers.Attempts
}

// named is what a query's reference is of: the follow, or one beside it. It is
// known by one of its names, or by one of what it goes on for, or of what goes on
// for it, as the owner says; of what is not all here yet also by another node of
// the owner's group. nil: it is of something else.
func (n *Node) named(ctx context.Context, q query, f *follow) *follow {
	name := q.reference.Publication
	all := f.all()
	if at := slices.IndexFunc(all, func(c *follow) bool { return n.follows.called(c, name) }); at >= 0 {
		return all[at]
	}
	at := slices.IndexFunc(all, func(c *follow) bool { return c.source.Owner == name.Owner })
	group := n.peers.groupOf(name.Owner)
	if at < 0 && (group == "" || group != n.peers.groupOf(f.source.Owner) || f.allLanded() != nil) {
		return nil
	}
	e, _, err := n.fetch(ctx, q, name)
	switch {
	case err != nil:
		return nil
	case at < 0:
		return f
	}
	f = all[at]
	if e.Name != f.source {
		p, err := n.peers.owner(f.source.Owner)
		if err != nil {
			return nil
		}
		if now, err := n.lookup(ctx, p, f.source, q.request); err != nil || now.Name != e.Name {
			return nil
		}
	}
	n.follows.alias(f, name)
	return f
}

// maxCandidates bounds the publications that one look tries.
const maxCandidates = 16

// choose finds a publication to follow: the one that the reference names, or the
// first that can be brought in of all that are offered of the request.
func (n *Node) choose(ctx context.Context, s *session, q query) (sight, error) {
	candidates := n.candidates(q)
	if len(candidates) == 0 {
		if _, err := n.manager.AdmitRetrieve(q.request, q.at, nil, q.minTokens); err != nil {
			return sight{}, err
		}
		if n.isDraining() {
			return sight{}, fmt.Errorf("retrieve %q: %w", q.request, errDraining)
		}
		return sight{}, nil
	}
	var failed error // of the best candidate
	var unmet *unmetError
	short := make(map[id.Group]bool) // whichever of their nodes is tried
	tried := 0
	for _, name := range candidates {
		group := n.peers.groupOf(name.Owner)
		if name.Owner != n.life && (short[group] || tried >= maxCandidates) {
			continue
		}
		tried++
		seen, next, err := n.try(ctx, s, q, name)
		if !next {
			return seen, err
		}
		if isShort(err) {
			short[group] = true
		}
		if u, ok := errors.AsType[*unmetError](err); ok {
			unmet = cmp.Or(unmet, u)
		} else if failed == nil {
			failed = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	if unmet != nil {
		err := unmet.peer.failure()
		if q.wait > 0 || err == nil { // whoever polls comes back
			return sight{missing: unmet}, nil
		}
		failed = cmp.Or(failed, error(&retrieveError{request: q.request, source: unmet.source, err: unmet.peer.unreachable(err)}))
	}
	switch {
	case errors.Is(failed, errUnknownNode) && time.Now().Before(q.meet):
		return sight{missing: failed}, nil
	case (isShort(failed) || q.reference == nil && isUnfit(failed)) && n.peers.anyAlike():
		return sight{missing: failed}, nil // who fits may publish it yet
	default:
		return sight{}, failed
	}
}

// try begins to follow a publication. If it cannot be, next says whether
// another one might, and err why not this one.
func (n *Node) try(ctx context.Context, s *session, q query, name id.Publication) (_ sight, next bool, err error) {
	if name.Owner == n.life {
		return n.ownPublication(q, name)
	}
	if n.isDraining() {
		return sight{}, false, fmt.Errorf("retrieve %q: %w", q.request, errDraining)
	}
	var w whole
	e, source, err := n.fetch(ctx, q, name)
	if err == nil {
		w, err = n.gather(ctx, q, part{source: source, seal: e.Seal}, nil)
	}
	if err == nil && (q.reference == nil || len(w.parts) == 0) {
		err = w.short // another one may have all
	}
	if err != nil {
		return sight{}, true, &retrieveError{request: q.request, source: name, err: err}
	}
	source = w.source()
	f, changed, made, err := n.accept(ctx, s, q.request, source.Name, w.parts[0].seal)
	if err != nil {
		return sight{}, false, fmt.Errorf("retrieve %q: %w", q.request, err)
	}
	if f.source != source.Name { // another call was faster, with another one
		seen, err := n.look(ctx, s, q)
		return seen, false, err
	}
	n.follows.alias(f, name)
	seen, err := n.admit(q, f, changed, made, w)
	return seen, made && isUnfit(err), err
}

// isUnfit says that the failure is of what one owner, or one group, has
// published, and not ours.
func isUnfit(err error) bool {
	return errors.Is(err, manager.ErrIncompatible) || errors.Is(err, manager.ErrMalformed) || errors.Is(err, manager.ErrMixed)
}

// ownPublication answers for one of ours: there is nothing to bring in.
func (n *Node) ownPublication(q query, name id.Publication) (_ sight, next bool, err error) {
	p, err := n.owner.own(name.Sequence, q.reference)
	var out manager.Outcome
	if err == nil {
		out, err = n.manager.AdmitRetrieve(q.request, q.at, &manager.Source{Name: name, Geometry: n.geometry, Publication: p.value}, q.minTokens)
	}
	if err != nil {
		return sight{}, true, &retrieveError{request: q.request, source: name, err: err}
	}
	return sight{answer: answer{readiness: out.Readiness, source: name}}, false, nil
}

// admit asks the manager what is to be brought in of a publication that is
// followed, and starts that. made: the follow was made for it.
func (n *Node) admit(q query, f *follow, changed <-chan struct{}, made bool, w whole) (sight, error) {
	source := w.source()
	f.asks(q)
	out, err := n.manager.AdmitRetrieve(q.request, q.at, source, q.minTokens)
	switch {
	case err != nil:
		room := errors.Is(err, manager.ErrNoPages) || errors.Is(err, manager.ErrOffloading)
		if made && (q.wait <= 0 || !room) || !room && !errors.Is(err, manager.ErrStepInFlight) {
			n.lose(q, f, err)
		} else {
			n.beside(f, w.parts[1:])
			f.keep() // the owner's pages are needed when ours are there
		}
		return sight{}, n.failed(f, err)
	case made && out.Readiness == manager.Ready && out.Start == nil: // it has been here before
		n.finish(f, kvferrypb.CompleteItem_LANDED)
		return sight{answer: answer{readiness: manager.Ready, source: source.Name}}, nil
	}
	if out.Start != nil || out.Readiness != manager.Reading { // else another call has chosen what is read
		n.beside(f, w.parts[1:])
	}
	f.keep()
	if len(out.Unseal) > 0 {
		n.announceEnds(n.owner.unseal(time.Now(), out.Unseal))
	}
	if out.Start != nil {
		n.read(f, w.parts, *out.Start)
	}
	return sight{answer: f.answer(out.Readiness), follow: f, changed: changed, missing: w.short}, nil
}

// again answers for what has landed before. The owner is not asked any more: it
// may have let go by now. Not ok: more labels are wanted than were read.
func (n *Node) again(q query, f *follow, changed <-chan struct{}, landed *manager.Source) (_ sight, ok bool, _ error) {
	out, err := n.manager.AdmitRetrieve(q.request, q.at, landed, q.minTokens)
	if err != nil {
		return sight{answer: f.answer(manager.Waiting)}, true, n.failed(f, err)
	}
	if out.Start == nil {
		return sight{answer: f.answer(out.Readiness), follow: f, changed: changed}, true, nil
	}
	_ = n.manager.Failed(out.Start.ID) // nothing of it was begun
	n.finish(f, kvferrypb.CompleteItem_LANDED)
	return sight{}, false, nil
}

// asks notes the query that is answered last.
func (f *follow) asks(q query) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.query = q
}

func (f *follow) answer(r manager.Readiness) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return answer{readiness: r, source: f.source, transport: f.transport, bytes: f.bytes}
}

// candidates are the publications that the query may mean, those that most
// likely can be brought in first: of owners that hold the same kind of KV, of
// these the ones that have said hello, of these the one heard of last.
func (n *Node) candidates(q query) []id.Publication {
	if q.reference != nil {
		return []id.Publication{q.reference.Publication}
	}
	now := time.Now()
	var names []id.Publication
	for _, e := range n.board.ByRequest(now, q.request) {
		names = append(names, e.Name)
	}
	order := make(map[id.Life]int, len(names))
	for _, name := range names {
		order[name.Owner] = n.peers.unlikely(name.Owner)
	}
	slices.SortStableFunc(names, func(a, b id.Publication) int { return cmp.Compare(order[a.Owner], order[b.Owner]) })
	// Our own is the last choice: there is nothing to bring in from it.
	if _, own, err := n.plog.Find(now, 0, q.request); err == nil {
		names = append(names, own)
	}
	return names
}

// unmetError: the owner is a member, and has not said hello yet.
type unmetError struct {
	source id.Publication
	peer   *peer
}

func (e *unmetError) Error() string { return e.peer.life.String() + " has not said hello yet" }

// fetch brings what the owner has said of a publication, and asks it if that is
// not enough. It may be the one that goes on for it.
func (n *Node) fetch(ctx context.Context, q query, name id.Publication) (publish.Entry, *manager.Source, error) {
	p, err := n.peers.owner(name.Owner)
	if err != nil {
		return publish.Entry{}, nil, err
	}
	h, ok := p.said()
	if !ok {
		return publish.Entry{}, nil, &unmetError{name, p}
	}
	e, err := n.board.ByName(time.Now(), name)
	if err != nil || !e.HasTable {
		// Gossip is a hint; the owner knows.
		if e, err = n.lookup(ctx, p, name, q.request); err != nil {
			return publish.Entry{}, nil, err
		}
	}
	if e.Request != q.request.Hash() {
		return publish.Entry{}, nil, fmt.Errorf("%s is not of this request: %w", name, wire.ErrReference)
	}
	if err := matches(q.reference, e.Name, e.Request, e.Seal); err != nil {
		return publish.Entry{}, nil, err
	}
	return e, &manager.Source{Name: e.Name, Geometry: h.geometry, Publication: e.Publication}, nil
}

// lookup asks the owner for a publication, or the one that goes on for it, and
// gives its refusal a type.
func (n *Node) lookup(ctx context.Context, p *peer, name id.Publication, r id.Request) (publish.Entry, error) {
	e, err := n.lookupOnce(ctx, p, name, r)
	for range 2 {
		if !errors.Is(err, publish.ErrEnded) || !errors.Is(err, errOwnerLost) {
			break
		}
		// What it says has ended by now: so has its whole life, or it says what goes on.
		e, err = n.lookupOnce(ctx, p, name, r)
	}
	return e, err
}

func (n *Node) lookupOnce(ctx context.Context, p *peer, name id.Publication, r id.Request) (publish.Entry, error) {
	res, err := p.lookup(ctx, name.Sequence, r)
	if err == nil {
		a := res.GetAnnouncement()
		e, err := n.board.Learn(time.Now(), p.life, a.GetMessage(), id.Request(a.GetRequest()))
		switch {
		case errors.Is(err, publish.ErrEnded): // the whole life has, it said goodbye
			err = fmt.Errorf("%w: %w", errOwnerLost, err)
		case err == nil && e.Name != name && (!res.GetContinues() || e.Name.Sequence < name.Sequence):
			err = fmt.Errorf("it answers with %s: %w", e.Name, publish.ErrConflict)
		}
		if err != nil {
			return publish.Entry{}, fmt.Errorf("look it up at its owner: %w", err)
		}
		return e, nil
	}
	if cause, ok := refusalOf(err); ok {
		n.board.Forget(name)
		return publish.Entry{}, endedError(cause)
	}
	if end, ok := ctx.Deadline(); ok && !time.Now().Before(end) {
		<-ctx.Done() // the call may have noticed first
	}
	switch {
	case codeOf(err) == kvferrypb.Failure_INVALID: // it lives, and is another's
		return publish.Entry{}, fmt.Errorf("%s is not of request %q: %w", name, r, wire.ErrReference)
	case errors.Is(err, errOwnerLost):
		return publish.Entry{}, err
	case ctx.Err() != nil:
		return publish.Entry{}, fmt.Errorf("look it up at %s: %w", p.member.Meta.Peer, context.Cause(ctx))
	default:
		return publish.Entry{}, fmt.Errorf("look it up at %s: %w", p.member.Meta.Peer, p.unreachable(err))
	}
}

// read starts one retrieval. It owns the retrieval until the manager has been
// told how it ended.
func (n *Node) read(f *follow, parts []part, r manager.Retrieval) {
	ctx, cancel := context.WithCancelCause(n.ctx)
	run := &reading{id: r.ID, cancel: cancel, done: make(chan struct{}), state: "queued"}
	f.mu.Lock()
	f.running = run
	if f.over || f.err != nil { // it ended since it was looked at
		cancel(cmp.Or(f.err, errRemoved))
	}
	f.mu.Unlock()
	start := time.Now()
	work := func() {
		defer cancel(nil)
		bytes, by, err := n.pull(ctx, f, run, parts, r)
		n.settle(ctx, f, run, parts, bytes, by, err, time.Since(start))
	}
	if !n.spawn(work) {
		n.settle(ctx, f, run, parts, 0, "", errDraining, 0)
	}
}

// pull moves a retrieval's bytes, with another attempt when that can help. It
// returns when nothing of it can land any more.
func (n *Node) pull(ctx context.Context, f *follow, run *reading, parts []part, r manager.Retrieval) (bytes int64, by string, err error) {
	// Those in front are bounded each, and the caller may give up and cancel.
	select {
	case n.reads <- struct{}{}:
		defer func() { <-n.reads }()
	case <-ctx.Done():
		return 0, "", context.Cause(ctx)
	}
	wait := n.config.Timers.BackoffMin
	attempts := n.config.Timers.Attempts
	bad := 0 // attempts of which bytes were others than published
	for attempt := 1; ; attempt++ {
		f.state(run, "reading")
		if bytes, by, err = n.pullOnce(ctx, parts, r); err == nil {
			err = n.verify(ctx, parts, r)
		}
		if errors.Is(err, errChecksum) {
			bad++
		}
		if err == nil || bad > 1 || attempt >= attempts || ctx.Err() != nil || !mayHelp(err) {
			if err != nil && ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			return bytes, by, err
		}
		n.log.Warn("read failed, trying again", "request", string(r.Request), "node", blamed(err, r.Source).Owner.String(), "attempt", attempt, "err", err)
		f.state(run, "backoff")
		if !sleep(ctx, wait/2+rand.N(wait/2+1)) { // jitter
			return bytes, by, context.Cause(ctx)
		}
		wait = min(2*wait, n.config.Timers.BackoffMax)
	}
}

// mayHelp says whether another attempt can end otherwise.
func mayHelp(err error) bool {
	for _, final := range []error{transfer.ErrStale, transfer.ErrIdentity, identity.ErrRefused, transfer.ErrRange, errOwnerLost} {
		if errors.Is(err, final) {
			return false
		}
	}
	return true
}

// errand is what is read of one owner for one rank.
type errand struct {
	peer   *peer
	source id.Publication
	link   transfer.Link
	seals  []transfer.Seal
	copies []transfer.Copy
}

func (n *Node) pullOnce(ctx context.Context, parts []part, r manager.Retrieval) (total int64, by string, err error) {
	// All are planned before the first is read, so that an error leaves none behind.
	var errands []errand
	for owner, p := range parts {
		planned, transport, err := n.errands(ctx, owner, p, r)
		by = cmp.Or(transport, by)
		if err != nil {
			return 0, by, &partError{p.source.Name, err}
		}
		errands = append(errands, planned...)
	}
	var reads errgroup.Group // all have returned, whichever failed
	for _, s := range errands {
		for _, c := range s.copies {
			total += c.Bytes
		}
		n.metrics.chunks(s.copies)
		reads.Go(func() error {
			err := s.link.Read(ctx, s.seals, s.copies)
			if errors.Is(err, transfer.ErrIdentity) || errors.Is(err, transfer.ErrClosed) {
				s.peer.drop(s.link)
			}
			if err != nil {
				return &partError{s.source, err}
			}
			return nil
		})
	}
	if err := reads.Wait(); err != nil {
		return 0, by, err
	}
	return total, by, nil
}

// errands are what a retrieval reads of one owner: the parts' owner-th.
func (n *Node) errands(ctx context.Context, owner int, p part, r manager.Retrieval) (errands []errand, by string, err error) {
	name := p.source.Name
	peer := n.peers.byLife(name.Owner)
	if peer == nil {
		return nil, "", fmt.Errorf("%s: %w", name.Owner, errOwnerLost)
	}
	link, transport, err := peer.reader(ctx)
	if err != nil {
		return nil, "", fmt.Errorf("open a link to %s: %w", name.Owner, peer.unreachable(err))
	}
	value, _ := id.SealValue(name.Owner.Incarnation, name.Sequence)
	seals := []transfer.Seal{{Index: p.seal, Value: value}}
	for _, rank := range n.ranks {
		var copies []transfer.Copy
		for _, m := range r.Moves {
			if m.Owner != owner || !slices.Contains(m.Ranks, rank) {
				continue
			}
			remote := transfer.Side{Layout: p.source.Geometry.Layout, Start: m.RemoteStart, Pages: m.Remote}
			local := transfer.Side{Layout: n.geometry.Layout, Start: m.LocalStart, Pages: m.Local}
			if copies, err = transfer.Copies(copies, rank, remote, local, m.From, m.To); err != nil {
				return nil, transport.Name(), err
			}
		}
		if len(copies) > 0 {
			errands = append(errands, errand{peer, name, link, seals, copies})
		}
	}
	return errands, transport.Name(), nil
}

// settle tells the manager how a retrieval ended, once, then whoever waits.
func (n *Node) settle(ctx context.Context, f *follow, run *reading, parts []part, bytes int64, by string, err error, took time.Duration) {
	source := parts[0].source
	if err == nil {
		// Refused if the request was removed or reset while the bytes landed.
		if err = n.manager.Landed(run.id); err != nil {
			err = fmt.Errorf("%w: %w", errRemoved, err)
		} else {
			n.tier.arrived(f.request)
		}
	}
	if err != nil {
		_ = n.manager.Failed(run.id) // unknown only if it was told before
	}
	if errors.Is(err, transfer.ErrStale) {
		n.metrics.stale.WithLabelValues("reader").Inc()
		err = n.staleCause(ctx, blamed(err, source.Name), err)
	}
	n.metrics.retrieval(err, by, took)
	f.mu.Lock()
	if f.running == run { // else another call has begun the next one
		f.running = nil
	}
	if by != "" {
		f.transport = by
	}
	if err == nil {
		f.bytes += bytes
		f.moved = 0
		if source.Final() {
			f.landed, f.err, f.refused = source, nil, nil
		}
	} else if f.err == nil {
		f.err = err
	}
	f.wakeLocked()
	f.mu.Unlock()
	switch {
	case err != nil && f.mayGoOn():
		n.resume(f)
	case err != nil:
		f.session.emit(failedEvent(f.request, n.failed(f, err)))
	case source.Final():
		f.acknowledge(kvferrypb.CompleteItem_LANDED)
		f.session.emit(retrievedEvent(f.request, source.Name.Owner))
	}
	close(run.done)
}

// staleCause asks the owner how the publication ended, to say it.
func (n *Node) staleCause(ctx context.Context, name id.Publication, err error) error {
	n.board.Forget(name)
	p := n.peers.byLife(name.Owner)
	if p == nil {
		return err
	}
	res, asked := p.lookup(ctx, name.Sequence, "")
	if asked == nil && res.GetContinues() {
		return fmt.Errorf("%w: %w", errMoved, err)
	}
	if cause, ok := refusalOf(asked); ok {
		return fmt.Errorf("%w: %w", endedError(cause), err)
	}
	return err
}

func (f *follow) state(run *reading, s string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	run.state = s
}

func (f *follow) allLanded() *manager.Source {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.landed
}

// failed gives a follow's failure its names.
func (n *Node) failed(f *follow, err error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return &retrieveError{request: f.request, source: blamed(err, f.source), transport: f.transport, done: f.bytes, err: err}
}

// cancelRetrieval ends the retrieval of a request, and every call that waits for
// it, and returns when its pages are safe to reuse, or ctx ends; they stay in
// quarantine until they are.
func (n *Node) cancelRetrieval(ctx context.Context, r id.Request, cause error) error {
	f, calls := n.follows.detach(r, cause)
	if f != nil {
		f.fail(cause)
	}
	for _, c := range calls { // one of them may be about to read
		select {
		case <-c.done:
		case <-ctx.Done():
			return fmt.Errorf("cancel %q: %w", r, context.Cause(ctx))
		}
	}
	if f == nil {
		return nil
	}
	running := f.reading()
	if running != nil {
		_ = n.manager.Cancel(running.id) // unknown if it has just ended
	}
	f.acknowledge(kvferrypb.CompleteItem_FAILED)
	if running == nil {
		return nil
	}
	select {
	case <-running.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("cancel %q: a read still drains, its pages are in quarantine: %w", r, context.Cause(ctx))
	}
}

// renew asks owners to keep what is followed here.
func (n *Node) renew() {
	for _, f := range n.follows.leases() {
		f.tell(kvferrypb.CompleteItem_OUTCOME_UNSPECIFIED)
	}
}

// retrieveError is the failure of a retrieval; [failureOf] makes the message of it.
type retrieveError struct {
	request   id.Request
	source    id.Publication
	transport string
	done      int64
	err       error
}

func (e *retrieveError) Error() string {
	return fmt.Sprintf("retrieve %q from %s: %v", e.request, e.source, e.err)
}

func (e *retrieveError) Unwrap() error { return e.err }

var errTransport = errors.New("peer cannot be reached")
