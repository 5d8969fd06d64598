package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// maxFollows bounds the publications that are followed, and the calls that wait.
const maxFollows = 65536

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
	p := f.node.peers.byLife(f.source.Owner)
	switch {
	case p != nil:
		p.tell(receipt{sequence: f.source.Sequence, attempt: f.attempt, outcome: outcome, follow: f})
	case outcome != kvferrypb.CompleteItem_OUTCOME_UNSPECIFIED: // it has gone, or seems to have
		f.node.metrics.acks.WithLabelValues("dropped").Inc()
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

func (f *follow) wake() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.wakeLocked()
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

// mayGoOn says whether the follow has failed so that what goes on for its
// publication is to be looked for.
func (f *follow) mayGoOn() bool {
	err := f.failure()
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.Is(err, errMoved) && f.moved < f.node.config.Timers.Attempts
}

// asks notes the query that is answered last.
func (f *follow) asks(q query) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.query = q
	f.urgeLocked(q)
}

func (f *follow) answer(r manager.Readiness) answer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return answer{readiness: r, source: f.source, transport: f.transport, bytes: f.bytes}
}

func (f *follow) state(run *reading, s string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	run.state = s
}

// backOff notes that another attempt comes after a failed one.
func (f *follow) backOff(run *reading, failed error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	run.state, run.failed = "backoff", failed
	run.bad++
}

// reads notes whom a read is at: by which transport, "" while no link is open.
func (f *follow) reads(run *reading, from *peer, by string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	run.state, run.from, run.by = "reading", from, by
}

// at says what a read is at, to who has waited for it in vain.
func (f *follow) at(run *reading) string {
	f.mu.Lock()
	text, from, by, failed := run.state, run.from, run.by, run.failed
	f.mu.Unlock()
	switch {
	case text != "reading" || from == nil:
	case by != "":
		text = fmt.Sprintf("reading from %s by %s", from.life, by)
	default:
		text = fmt.Sprintf("reading from %s, no link is open", from.life)
		if next := from.next(); next != "" {
			text += " by " + next
		}
	}
	if failed != nil {
		text += "; the attempt before failed: " + failed.Error()
	}
	return text
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
	by := f.transport
	if f.running != nil {
		by = cmp.Or(f.running.by, by)
	}
	return &retrieveError{request: f.request, source: blamed(err, f.source), transport: by, done: f.bytes, err: err}
}

// renew asks owners to keep what is followed here.
func (n *Node) renew() {
	for _, f := range n.follows.leases() {
		f.tell(kvferrypb.CompleteItem_OUTCOME_UNSPECIFIED)
	}
}
