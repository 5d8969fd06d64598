package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// maxReason bounds the reason that is kept of a refusal, bytes.
const maxReason = 500

// RouteOptions set up a Route. A zero field means its default.
type RouteOptions struct {
	RetryMin time.Duration // from a refusal until the transport is tried again, doubled at each; default 5 s
	RetryMax time.Duration // at most; default 60 s

	// Exempt says of an error that it is not the transport's fault, beside
	// those of this package that are not; default: of none.
	Exempt func(error) bool
}

func (o RouteOptions) withDefaults() RouteOptions {
	if o.RetryMin <= 0 {
		o.RetryMin = 5 * time.Second
	}
	if o.RetryMax <= 0 {
		o.RetryMax = 60 * time.Second
	}
	o.RetryMax = max(o.RetryMin, o.RetryMax)
	if o.Exempt == nil {
		o.Exempt = func(error) bool { return false }
	}
	return o
}

// Route is how one life of a peer is read: the transports that both sides have,
// in our order of preference, and why each better one than that in use is
// refused. Safe for concurrent use. It starts a goroutine only for an attempt to
// open, so that whoever waits for it may give up; Close ends and awaits that.
//
// A transport is refused while it rests: from the moment that it says
// [ErrUnavailable], or fails twice in a row by its own fault, until it is tried
// again. The next one is taken meanwhile, and what rests is passed over only as
// long as another can be used. A single failure is the caller's to see: a
// broken transport must not be hidden by a slower one.
//
// At most one link is in use. One that has been replaced serves the reads that
// run on it, and the last of them closes it.
type Route struct {
	peer Peer
	o    RouteOptions
	ctx  context.Context //nolint:containedctx // the route's own life, which attempts to open belong to
	stop context.CancelCauseFunc
	work sync.WaitGroup // attempts, and links that are being closed

	mu      sync.Mutex
	closed  bool
	ways    []*way // ours, best first
	current *opened
	links   map[*opened]struct{} // current, and what is drained
	attempt *attempt             // that runs, or nil
}

// way is one of our transports.
type way struct {
	Transport
	descriptor []byte
	absent     bool // at the peer, for all its life

	refused  string        // why, or ""
	broken   bool          // if refused: by an error other than ErrUnavailable
	retryAt  time.Time     // if refused and not absent
	delay    time.Duration // of the latest refusal since all was well
	failures int           // in a row, by its own fault
	faults   uint64        // all of them
}

// opened is a link that is open.
type opened struct {
	link    Link
	way     *way
	reads   int // that run
	retired bool
}

// use is an opened link in the hands of one caller.
type use struct {
	r *Route

	// guarded by r.mu
	opened *opened
	faults uint64 // of its way, when it was taken
}

// Read is [Link.Read]. If the link was replaced and closed since it was taken,
// that which replaced it is read.
func (u *use) Read(ctx context.Context, seals []Seal, copies []Copy) error {
	o := u.r.enter(u)
	defer u.r.leave(o)
	return o.link.Read(ctx, seals, copies)
}

// Close does nothing: the link is the route's.
func (*use) Close() error { return nil }

// attempt is one try to open something, which all that need it wait for.
type attempt struct {
	done chan struct{}
	err  error // valid once done is closed
}

// NewRoute returns a route on which nothing is open yet. descriptors are the
// peer's, by transport name; peer.Descriptor is set from them. All of these
// must not be changed later.
func NewRoute(ours []Transport, peer Peer, descriptors map[string][]byte, o RouteOptions) *Route {
	r := &Route{peer: peer, o: o.withDefaults(), links: make(map[*opened]struct{})}
	r.ctx, r.stop = context.WithCancelCause(context.Background())
	for _, t := range ours {
		w := &way{Transport: t}
		var ok bool
		if w.descriptor, ok = descriptors[t.Name()]; !ok {
			w.absent, w.refused = true, "the peer does not have it"
		}
		r.ways = append(r.ways, w)
	}
	return r
}

// Link returns the link of the best transport that is not refused. It is asked
// for anew for each attempt, which costs nothing while one is open, and the
// link stays the route's: its Close does nothing. How reads end is told to
// [Route.Ended].
//
// If none is open Link opens one, and concurrent callers wait for the same
// attempt. An attempt is bounded by the transports, which bound their dial
// time; the end of ctx ends the waiting and not the attempt. If all are
// refused, those that the peer has are tried again at once. If none is left the
// error wraps [ErrUnavailable] and repeats every refusal.
func (r *Route) Link(ctx context.Context) (Transport, Link, error) {
	for {
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			return nil, nil, r.failed(errRoute)
		}
		if o := r.current; o != nil {
			u := &use{r: r, opened: o, faults: o.way.faults}
			r.mu.Unlock()
			return o.way.Transport, u, nil
		}
		if ctx.Err() != nil {
			r.mu.Unlock()
			return nil, nil, r.failed(context.Cause(ctx))
		}
		a := r.attempt
		if a == nil {
			a = r.tryLocked(r.open)
		}
		r.mu.Unlock()
		select {
		case <-a.done:
		case <-ctx.Done():
			return nil, nil, r.failed(context.Cause(ctx))
		}
		if a.err != nil {
			return nil, nil, r.failed(a.err)
		}
	}
}

// errRoute is what ends all that is under way in Close.
var errRoute = fmt.Errorf("route: %w", ErrClosed)

func (r *Route) failed(err error) error {
	return fmt.Errorf("open a link to %s: %w", r.peer.Life, err)
}

// enter finds what u reads, and keeps it open meanwhile.
func (r *Route) enter(u *use) *opened {
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, open := r.links[u.opened]; !open && r.current != nil {
		u.opened, u.faults = r.current, r.current.way.faults
	}
	u.opened.reads++
	return u.opened
}

func (r *Route) leave(o *opened) {
	r.mu.Lock()
	o.reads--
	var idle []*opened
	if o.retired {
		idle = r.retireLocked(o)
	}
	r.mu.Unlock()
	r.closeAll(idle)
}

// Ended tells how one or several reads of link ended: nil if well.
//
// [ErrIdentity] and [ErrClosed] drop the link: the next caller opens another.
// All errors count as the transport's fault, but for [ErrStale], [ErrRange],
// [ErrIdentity], the end of a context, and what [RouteOptions.Exempt] names.
// Links that were taken before a fault was known and end by one count as that
// one: a peer that stops once ends all of its reads.
func (r *Route) Ended(link Link, err error) {
	u, ok := link.(*use)
	if !ok || u.r != r {
		return
	}
	r.mu.Lock()
	var idle []*opened
	w := u.opened.way
	switch {
	case err == nil:
		if w.refused == "" {
			w.failures, w.delay = 0, 0
		}
	case errors.Is(err, ErrIdentity):
		idle = r.retireLocked(u.opened)
	case isAny(err, ErrStale, ErrRange, context.Canceled, context.DeadlineExceeded) || r.o.Exempt(err):
	default:
		news := u.faults == w.faults && w.refused == ""
		if errors.Is(err, ErrClosed) { // by what happened to it, unless we had given it up
			news = news && !u.opened.retired
			idle = r.retireLocked(u.opened)
		}
		if news && r.faultLocked(w, err, time.Now()) && r.current != nil && r.current.way == w {
			idle = append(idle, r.retireLocked(r.current)...)
		}
	}
	r.mu.Unlock()
	r.closeAll(idle)
}

func isAny(err error, of ...error) bool {
	return slices.ContainsFunc(of, func(one error) bool { return errors.Is(err, one) })
}

// faultLocked counts a fault of w, and reports whether it rests now.
func (r *Route) faultLocked(w *way, err error, now time.Time) bool {
	w.faults++
	w.failures++
	if w.failures < 2 && !errors.Is(err, ErrUnavailable) {
		return false
	}
	r.restLocked(w, err, now)
	return true
}

// restLocked refuses w until some time from now. If it was tried before its time,
// since there was nothing else, that stays as it is.
func (r *Route) restLocked(w *way, err error, now time.Time) {
	early := w.refused != "" && w.retryAt.After(now)
	w.failures = 0
	w.broken = !errors.Is(err, ErrUnavailable)
	w.refused = cmp.Or(err.Error(), "no reason given")
	if len(w.refused) > maxReason {
		w.refused = strings.ToValidUTF8(w.refused[:maxReason], "") + "..."
	}
	if early {
		return
	}
	w.delay = min(max(2*w.delay, r.o.RetryMin), r.o.RetryMax)
	w.retryAt = now.Add(w.delay)
}

// retireLocked takes o out of use. What it returns is to be closed: nothing, if
// reads run on it.
func (r *Route) retireLocked(o *opened) []*opened {
	o.retired = true
	if r.current == o {
		r.current = nil
	}
	if o.reads > 0 {
		return nil
	}
	return r.takeLocked(o)
}

// takeLocked lets exactly one caller close each of links, and Close wait for it.
func (r *Route) takeLocked(links ...*opened) (taken []*opened) {
	for _, o := range links {
		if _, ok := r.links[o]; ok {
			delete(r.links, o)
			r.work.Add(1)
			taken = append(taken, o)
		}
	}
	return taken
}

func (r *Route) closeAll(taken []*opened) {
	for _, o := range taken {
		_ = o.link.Close() // what it could say helps nobody: its reads have ended
		r.work.Done()
	}
}

// tryLocked starts an attempt, which is the only one until it is done.
func (r *Route) tryLocked(try func() error) *attempt {
	a := &attempt{done: make(chan struct{})}
	r.attempt = a
	r.work.Go(func() { r.run(a, try) })
	return a
}

func (r *Route) run(a *attempt, try func() error) {
	a.err = try()
	r.mu.Lock()
	r.attempt = nil
	r.mu.Unlock()
	close(a.done)
}

// open opens a link by the best way that is not refused, or else by the one
// whose rest is over first.
func (r *Route) open() error {
	tried := make(map[*way]bool)
	var broken error
	for {
		w := r.candidate(tried)
		if w == nil {
			return r.none(broken)
		}
		tried[w] = true
		err := r.openBy(w)
		if err == nil {
			return nil
		}
		if errors.Is(err, ErrUnavailable) {
			continue
		}
		broken = fmt.Errorf("%s: %w", w.Name(), err)
		r.mu.Lock()
		rests := w.refused != ""
		r.mu.Unlock()
		if !rests || r.ctx.Err() != nil {
			return broken
		}
	}
}

func (r *Route) candidate(tried map[*way]bool) (best *way) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.ways {
		switch {
		case w.absent || tried[w]:
		case w.refused == "":
			return w
		case best == nil || w.retryAt.Before(best.retryAt):
			best = w
		}
	}
	return best
}

// none is the error of an attempt that has run out of transports. broken is the
// latest error of one that is there but does not work, or nil.
func (r *Route) none(broken error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.ways) == 0 {
		return fmt.Errorf("no transport is configured here: %w", ErrUnavailable)
	}
	var text []string
	for _, w := range r.ways {
		if why := w.Name() + ": " + w.refused; broken == nil || why != broken.Error() { // which says it already
			text = append(text, why)
		}
	}
	refusals := strings.Join(text, "; ")
	switch {
	case broken == nil:
		return fmt.Errorf("%w: %s", ErrUnavailable, refusals)
	case refusals == "":
		return broken
	default:
		return fmt.Errorf("%w (%s)", broken, refusals)
	}
}

// openBy makes one attempt, and puts its link in the place of the current one.
func (r *Route) openBy(w *way) error {
	peer := r.peer
	peer.Descriptor = w.descriptor
	link, err := w.Open(r.ctx, peer)
	r.mu.Lock()
	if err != nil {
		defer r.mu.Unlock()
		switch {
		case r.closed:
			return errRoute
		case errors.Is(err, ErrUnavailable), w.refused != "":
			w.faults++
			r.restLocked(w, err, time.Now())
		case !isAny(err, ErrIdentity, ErrClosed) && !r.o.Exempt(err):
			r.faultLocked(w, err, time.Now())
		}
		return err
	}
	o := &opened{link: link, way: w}
	r.links[o] = struct{}{}
	var idle []*opened
	if r.closed {
		idle, err = r.retireLocked(o), errRoute
	} else {
		w.refused, w.broken = "", false // failures stay until a read has held
		if r.current != nil {
			idle = r.retireLocked(r.current)
		}
		r.current = o
	}
	r.mu.Unlock()
	r.closeAll(idle)
	return err
}

// Probe tries again what is better than what is in use and has rested, the best
// first, and returns to the first that opens. It returns how long until another
// is due, 0 if nothing is: what is refused after that has to be asked for
// again. The end of ctx ends the waiting.
func (r *Route) Probe(ctx context.Context) (next time.Duration) {
	for i := 0; ; {
		r.mu.Lock()
		if r.closed {
			r.mu.Unlock()
			return 0
		}
		a := r.attempt
		if a == nil {
			better := r.betterLocked()
			for i < better && !r.ways[i].rested(time.Now()) {
				i++
			}
			if i >= better || ctx.Err() != nil {
				defer r.mu.Unlock()
				return r.nextLocked(time.Now())
			}
			w := r.ways[i]
			i++                                                           // each once
			a = r.tryLocked(func() error { _ = r.openBy(w); return nil }) // whoever waits goes on to see what there is
		}
		r.mu.Unlock()
		select {
		case <-a.done:
		case <-ctx.Done():
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.nextLocked(time.Now())
		}
	}
}

// rested reports whether w is refused and may be tried again.
func (w *way) rested(now time.Time) bool {
	return w.refused != "" && !w.absent && !w.retryAt.After(now)
}

// betterLocked is how many ways are better than that in use, or that would be.
func (r *Route) betterLocked() int {
	if r.current != nil {
		return slices.Index(r.ways, r.current.way)
	}
	if i := slices.IndexFunc(r.ways, func(w *way) bool { return w.refused == "" }); i >= 0 {
		return i
	}
	return len(r.ways)
}

func (r *Route) nextLocked(now time.Time) (next time.Duration) {
	for _, w := range r.ways[:r.betterLocked()] {
		if w.refused == "" || w.absent {
			continue
		}
		in := max(w.retryAt.Sub(now), time.Millisecond) // not 0, which is never
		next = min(cmp.Or(next, in), in)
	}
	return next
}

// RouteState is one of our transports on a route.
type RouteState struct {
	Name    string
	InUse   bool
	Reason  string        // why it is refused, else ""
	Broken  bool          // if refused: it should work and does not; else it cannot reach the peer
	RetryIn time.Duration // until it is tried again, 0 if it is due, not refused, or never is
}

// State returns every transport of ours, best first.
func (r *Route) State() []RouteState {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	var states []RouteState
	for _, w := range r.ways {
		s := RouteState{Name: w.Name(), InUse: r.current != nil && r.current.way == w, Reason: w.refused, Broken: w.broken}
		if w.refused != "" && !w.absent {
			s.RetryIn = max(w.retryAt.Sub(now), 0)
		}
		states = append(states, s)
	}
	return states
}

// Close ends attempts and reads, closes every link, and returns when all is
// quiet. It may be called twice.
func (r *Route) Close() error {
	r.mu.Lock()
	r.closed = true
	r.stop(errRoute)
	var all []*opened
	for o := range r.links {
		o.retired = true
		all = append(all, o)
	}
	r.current = nil
	all = r.takeLocked(all...)
	r.mu.Unlock()
	r.closeAll(all)
	r.work.Wait()
	return nil
}
