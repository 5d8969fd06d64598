package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
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

// query is what an engine asks of AdmitRetrieve.
type query struct {
	request   id.Request
	at        manager.At
	reference *wire.Reference // nil: whoever published the request
	minTokens int
	wait      time.Duration // 0: look once
	meet      time.Time     // until then the owner may be unknown: its reference can be faster than gossip
	prefetch  bool          // nobody waits for it yet
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
	lacks   id.Label        // needed, and not in what is followed
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
	case isShort(seen.missing) && errors.Is(cause, errTooLate):
		late := &retrieveError{request: q.request, err: fmt.Errorf("waited %v for the other nodes of its group (%s): %w", q.wait, seen.missing.Error(), cause)}
		if of, ok := errors.AsType[*retrieveError](seen.missing); ok {
			late.source = of.source
		}
		return late
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
		if run := seen.follow.reading(); run != nil {
			what += " (" + seen.follow.at(run) + ")"
		}
	} else if seen.missing != nil {
		what = fmt.Sprintf("the other nodes of its group (%v)", seen.missing)
	} else if seen.lacks != "" {
		what = fmt.Sprintf("label %q, which is needed and not published", seen.lacks)
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
			f.urge(q)
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
	return sight{answer: f.answer(out.Readiness), follow: f, changed: changed, missing: w.short, lacks: out.Lacks}, nil
}

// again answers for what has landed before. The owner is not asked any more: it
// may have let go by now. Not ok: more labels are wanted than were read.
func (n *Node) again(q query, f *follow, changed <-chan struct{}, landed *manager.Source) (_ sight, ok bool, _ error) {
	out, err := n.manager.AdmitRetrieve(q.request, q.at, landed, q.minTokens)
	if err != nil {
		return sight{answer: f.answer(manager.Waiting)}, true, n.failed(f, err)
	}
	if out.Start == nil {
		return sight{answer: f.answer(out.Readiness), follow: f, changed: changed, lacks: out.Lacks}, true, nil
	}
	_ = n.manager.Failed(out.Start.ID) // nothing of it was begun
	n.finish(f, kvferrypb.CompleteItem_LANDED)
	return sight{}, false, nil
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
