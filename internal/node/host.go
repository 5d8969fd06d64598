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

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/kv"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/internal/page"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// errMoved: another publication goes on for this one, if its owner says so.
var errMoved = fmt.Errorf("%w: its pages went to the host", publish.ErrEnded)

// Bounds of the host tier.
const (
	maxMoves  = 2    // that copy at once; more wait
	maxWishes = 4096 // requests that are brought back for their readers; a renewed lease asks again
)

// restTime is for how long what has come to the device is no victim, unless
// intervals are divided by ten.
const restTime = 50 * time.Millisecond

// Why requests are offloaded by the node itself, for metrics.
const (
	forAdmit    = "admit"
	forRetrieve = "retrieve"
	forReload   = "reload"
)

// tier is the host tier: memory of the host besides the arena, and what moves
// between them. The manager says which pages; the tier copies, and chooses whom.
//
//	offload: manager.Offload → copied on every rank → manager.Offloaded → the owner's rule
//	reload:  manager.Reload  → copied on every rank → manager.Reloaded
//
// The last step is the owner's, under its mutex (offloaded, reloaded): what is
// published of the request is published again, so that readers know where its
// tokens are. A move that fails, or that the end of the node cuts, is abandoned:
// the tokens are where they were.
type tier struct {
	node   *Node
	layout page.Layout // of one rank; no pages: there is no tier
	evict  string      // of the configuration
	ranks  []hostCache
	places chan struct{} // a place for each move that may copy
	turn   chan struct{} // a place for who makes room, so that no two do at once
	hook   func(context.Context, id.Request) error

	mu     sync.Mutex
	moves  map[id.Request]*move
	wishes map[id.Request]struct{}
	// recent are requests that have just come to the device: whoever moves them
	// back at once has brought them for nothing.
	recent map[id.Request]time.Time
}

// hostCache is the tier's memory of one rank, besides its arena.
type hostCache struct {
	arena cache
	host  kv.Cache
}

// start begins to copy a stream, there or back. What it adds to a device's work is
// over when that says so; without a device it is over when it returns.
func (c hostCache) start(all tickets, s manager.HostStream, reload bool) (tickets, error) {
	if c.arena.device == nil {
		if reload {
			return all, kv.Copy(c.arena.host, s.Device, c.host, s.Host, s.Tokens)
		}
		return all, kv.Copy(c.host, s.Host, c.arena.host, s.Device, s.Tokens)
	}
	layout := c.arena.node.geometry.Layout
	if reload {
		moves, err := kv.Moves(nil, layout, s.Device, c.host.Layout, s.Host, s.Tokens)
		if err != nil {
			return all, err
		}
		return append(all, c.arena.device.WriteFrom(c.host.Bytes, appendSegments(nil, moves, true))), nil
	}
	moves, err := kv.Moves(nil, c.host.Layout, s.Host, layout, s.Device, s.Tokens)
	if err != nil {
		return all, err
	}
	return append(all, c.arena.device.ReadInto(c.host.Bytes, appendSegments(nil, moves, false))), nil
}

// move is an offload or a reload that runs.
type move struct {
	request id.Request // as it was asked for: an id, or the key of a kept request
	name    id.Request // for people
	reload  bool
	done    chan struct{} // closed when the manager has been told how it ended
	pages   int           // freed, or brought back; valid once done
	err     error         // valid once done
}

func (m *move) direction() string {
	if m.reload {
		return "reload"
	}
	return "offload"
}

// openHost maps and populates the host tier. Neither engines nor peers reach it.
func (n *Node) openHost(hook func(context.Context, id.Request) error) error {
	layout, ok := n.config.HostLayout()
	n.tier = &tier{
		node: n, layout: layout, evict: n.config.Arena.Evict, hook: hook,
		places: make(chan struct{}, maxMoves), turn: make(chan struct{}, 1),
		moves: make(map[id.Request]*move), wishes: make(map[id.Request]struct{}), recent: make(map[id.Request]time.Time),
	}
	if !ok {
		return nil
	}
	for _, r := range n.ranks {
		region, err := memory.NewPlain(fmt.Sprintf("kvferry-%s-host%d", n.life.Node, r), layout.Bytes())
		if err != nil {
			return fmt.Errorf("open the host tier of rank %d (%d pages of %d bytes; arena.host_pages sets its size): %w", r, layout.Pages, layout.PageBytes(), err)
		}
		n.closers = append(n.closers, region.Close)
		n.pin(r, "host tier", region)
		arena, err := n.cacheOf(r)
		if err != nil {
			return err
		}
		host, err := kv.NewCache(layout, region.Bytes())
		if err != nil {
			return err
		}
		n.tier.ranks = append(n.tier.ranks, hostCache{arena, host})
	}
	return nil
}

// offload moves a request to the host, as far as it fits there, and returns the
// device pages that are free for it. The move goes on if ctx ends first.
func (t *tier) offload(ctx context.Context, r id.Request) (freed int, err error) {
	return t.move(ctx, r, false)
}

// reload brings a request back, all of it or nothing. If pages are short it
// offloads others, once.
func (t *tier) reload(ctx context.Context, r id.Request) (pages int, err error) {
	err = t.node.withRoom(ctx, forReload, func() error {
		pages, err = t.move(ctx, r, true)
		return err
	}, r)
	return pages, err
}

// move begins a move and waits for it. Of one that runs it waits for the end, and
// looks again.
func (t *tier) move(ctx context.Context, r id.Request, reload bool) (pages int, err error) {
	for {
		m, mine, err := t.begin(r, reload)
		if err != nil {
			return 0, err
		}
		select {
		case <-m.done:
		case <-ctx.Done():
			return 0, fmt.Errorf("%s %q: it goes on: %w", m.direction(), r, context.Cause(ctx))
		}
		if mine {
			return m.pages, m.err
		}
	}
}

// begin starts a move, or returns the one of the request that runs: not mine.
func (t *tier) begin(r id.Request, reload bool) (_ *move, mine bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if m := t.moves[r]; m != nil {
		return m, false, nil
	}
	claim := t.node.manager.Offload
	if reload {
		claim = t.node.manager.Reload
	}
	claimed, err := claim(r)
	if err != nil {
		return nil, false, err
	}
	m := &move{request: r, name: t.node.nameOf(r), reload: reload, done: make(chan struct{}), pages: claimed.Freed}
	if claimed.ID == 0 {
		close(m.done)
		return m, true, nil
	}
	t.moves[r] = m
	if !t.node.spawn(func() { t.run(m, claimed) }) {
		// Not here: the caller of begin holds mu.
		delete(t.moves, r)
		_ = t.node.manager.Abandon(claimed.ID) // nothing of it was begun
		m.err = fmt.Errorf("%s %q: %w", m.direction(), r, errDraining)
		close(m.done)
	}
	return m, true, nil
}

// run owns a move until the manager has been told how it ended.
func (t *tier) run(m *move, claimed manager.HostMove) {
	n := t.node
	bytes, err := t.copy(n.ctx, m, claimed)
	pages := 0
	var said []news
	now := time.Now()
	switch {
	case err != nil:
		said = n.owner.abandoned(now, claimed.ID)
	case m.reload:
		var r id.Request
		if r, said, err = n.owner.reloaded(now, claimed.ID); err == nil {
			t.arrived(r)
		}
		for _, s := range claimed.Streams {
			pages += len(s.Device)
		}
	default:
		pages, said, err = n.owner.offloaded(now, claimed.ID)
	}
	t.mu.Lock()
	delete(t.moves, m.request)
	t.mu.Unlock()
	result := "ok"
	switch {
	case err == nil:
		m.pages += pages
		n.metrics.hostBytes.WithLabelValues(m.direction()).Add(float64(bytes))
	case errors.Is(err, errRemoved):
		result = "removed"
	case n.ctx.Err() != nil:
		result = "cut"
	default:
		result = "failed"
		n.log.Warn("move was abandoned", "direction", m.direction(), "request", string(m.name), "err", err)
	}
	n.metrics.offloads.WithLabelValues(m.direction(), result).Inc()
	n.tell(said)
	if err != nil {
		m.err = fmt.Errorf("%s %q: %w", m.direction(), m.name, err)
	}
	close(m.done)
}

// copy copies what a move is about on every rank, and returns when nothing is
// copied any more.
func (t *tier) copy(ctx context.Context, m *move, claimed manager.HostMove) (bytes int64, err error) {
	select {
	case t.places <- struct{}{}:
		defer func() { <-t.places }()
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
	var all tickets
	for _, s := range claimed.Streams {
		for _, r := range t.ranks {
			if ctx.Err() != nil {
				return 0, all.end(context.Cause(ctx))
			}
			if t.hook != nil {
				if err := t.hook(ctx, m.name); err != nil {
					return 0, all.end(err)
				}
			}
			if all, err = r.start(all, s, m.reload); err != nil {
				return 0, all.end(fmt.Errorf("label %q: %w", s.Label, err))
			}
			bytes += int64(s.Tokens) * t.layout.TokenBytes()
		}
	}
	if err := copied(m.direction(), all.end(nil)); err != nil {
		return 0, err
	}
	return bytes, nil
}

// restore brings a request back, and waits for pages as long as ctx.
func (t *tier) restore(ctx context.Context, r id.Request) error {
	wait := t.node.pauses()
	for {
		_, err := t.reload(ctx, r)
		if !mayPass(err) || t.node.isTooMuch(err) {
			return err
		}
		if cause := wait.pause(ctx); cause != nil {
			if errors.Is(cause, errTooLate) {
				return err
			}
			return cause
		}
	}
}

// mayPass says whether time may cure what a move was refused for.
func mayPass(err error) bool {
	return errors.Is(err, manager.ErrNoPages) || errors.Is(err, manager.ErrStepInFlight) || errors.Is(err, manager.ErrReading) ||
		errors.Is(err, manager.ErrOffloading) // it has begun when the request had another name
}

// bringFor brings back what readers have leases on, in the background.
func (t *tier) bringFor(leased []id.Sequence) {
	if t.layout.Pages == 0 {
		return
	}
	for _, r := range t.node.owner.away(leased) {
		t.wish(r)
	}
}

// wish brings a request back in the background, as long as readers wait for it.
func (t *tier) wish(r id.Request) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.wishes[r]; ok || len(t.wishes) >= maxWishes {
		return
	}
	work := func() {
		defer func() {
			t.mu.Lock()
			defer t.mu.Unlock()
			delete(t.wishes, r)
		}()
		wait := t.node.pauses()
		for t.node.owner.isAwaited(time.Now(), r) {
			if _, err := t.reload(t.node.ctx, r); !mayPass(err) || wait.pause(t.node.ctx) != nil {
				return
			}
		}
	}
	if t.node.spawn(work) {
		t.wishes[r] = struct{}{}
	}
}

// arrived notes that a request has just come to the device.
func (t *tier) arrived(r id.Request) {
	if t.layout.Pages == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	for r, at := range t.recent { // so that no more are kept than come in that time
		if now.Sub(at) > t.rest() {
			delete(t.recent, r)
		}
	}
	t.recent[r] = now
}

// rest is for how long what has come is no victim.
func (t *tier) rest() time.Duration {
	if t.node.fast() {
		return restTime / 10
	}
	return restTime
}

// rests are the requests that have just come.
func (t *tier) rests(now time.Time) map[id.Request]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make(map[id.Request]bool)
	for r, at := range t.recent {
		if now.Sub(at) <= t.rest() {
			list[r] = true
		}
	}
	return list
}

// victims are the requests that the node could offload, the first in front:
// none that has just come. Nor may it be one that readers have leases on (spares).
func (t *tier) victims(now time.Time) []manager.Victim {
	rests := t.rests(now)
	list := slices.DeleteFunc(t.node.manager.Victims(), func(v manager.Victim) bool { return rests[v.Request] })
	slices.SortFunc(list, t.compare)
	return list
}

// spares says whether readers have leases on a victim.
func (t *tier) spares(now time.Time, v manager.Victim) bool {
	return v.Published != 0 && t.node.owner.isLeased(now, v.Published)
}

// victim is the request that the node would offload next.
func (t *tier) victim() (_ id.Request, err error) {
	if t.layout.Pages == 0 {
		return "", manager.ErrNoHost
	}
	now := time.Now()
	for _, v := range t.victims(now) {
		if !t.spares(now, v) {
			return v.Request, nil
		}
	}
	return "", errNoVictim
}

// compare orders victims: what is not published first, then as arena.evict says.
func (t *tier) compare(a, b manager.Victim) int {
	published := func(v manager.Victim) int {
		if v.Published != 0 {
			return 1
		}
		return 0
	}
	active, pages := cmp.Compare(a.Active, b.Active), cmp.Compare(b.Pages, a.Pages)
	first, second := active, pages
	if t.evict == "pages" {
		first, second = pages, active
	}
	return cmp.Or(cmp.Compare(published(a), published(b)), first, second, cmp.Compare(a.Request, b.Request))
}

// withRoom does what needs pages, and once more if they were too few and
// offloading others, but for these requests, has freed enough.
func (n *Node) withRoom(ctx context.Context, why string, do func() error, except ...id.Request) error {
	err := do()
	if short, ok := errors.AsType[*manager.AllocationError](err); !ok || !n.makeRoom(ctx, why, short.Short+short.Free, except...) {
		return err
	}
	return do()
}

// requestsOf are those of a step, some of them more than once.
func requestsOf(s manager.Step) []id.Request {
	list := slices.Clone(s.Rows)
	for _, g := range s.Segments {
		list = append(list, g.Request)
	}
	return list
}

// isTooMuch says that time brings no pages: the arena could not hold what was
// wanted if it were empty, or nobody but the engine makes pages free.
func (n *Node) isTooMuch(err error) bool {
	short, ok := errors.AsType[*manager.AllocationError](err)
	return ok && (short.Short+short.Free >= n.geometry.Layout.Pages || // the sink is nobody's
		n.config.Arena.Allocate == config.EngineAllocates)
}

// makeRoom offloads requests until so many pages are free, and says whether they
// are. None of except is touched.
func (n *Node) makeRoom(ctx context.Context, why string, need int, except ...id.Request) bool {
	t := n.tier
	if t.layout.Pages == 0 || t.evict == "never" || need >= n.geometry.Layout.Pages { // of which one is the sink
		return false
	}
	select {
	case t.turn <- struct{}{}:
		defer func() { <-t.turn }()
	case <-ctx.Done():
		return false
	}
	enough := func() bool { return n.manager.Counts().Free >= need }
	if enough() { // somebody has made room meanwhile
		return true
	}
	victims := slices.DeleteFunc(t.victims(time.Now()), func(v manager.Victim) bool {
		return slices.Contains(except, v.Request) || t.spares(time.Now(), v)
	})
	room := n.manager.Counts().Free
	for _, v := range victims {
		room += v.Pages
	}
	if room < need {
		return false // nobody is moved for nothing
	}
	for _, v := range victims {
		if t.spares(time.Now(), v) {
			continue // it has got a reader meanwhile
		}
		name := n.nameOf(v.Request)
		freed, err := t.offload(ctx, v.Request)
		switch {
		case ctx.Err() != nil:
			return false
		case err != nil:
			n.log.Debug("victim stays", "request", string(name), "err", err)
		case freed > 0:
			n.metrics.evictions.WithLabelValues(why).Inc()
			n.log.Info("offloaded to make room", "request", string(name), "pages", freed, "for", why)
		}
		if enough() {
			return true
		}
	}
	return false
}

// nameOf is what an engine called a request, or one that is kept.
func (n *Node) nameOf(r id.Request) id.Request {
	state, err := n.manager.Request(r)
	if err != nil {
		return r
	}
	return state.Request
}

// handleOf is what the manager calls a request that a person names: a kept one by
// its key, if there is no live one.
func (n *Node) handleOf(name id.Request) id.Request {
	if _, err := n.manager.Request(name); err == nil {
		return name
	}
	for _, state := range n.manager.Requests(0) {
		if state.Kept != "" && state.Request == name {
			return state.Kept
		}
	}
	return name
}

// pauses are those between attempts, each longer than the one before.
type pauses struct {
	node *Node
	next time.Duration
}

func (n *Node) pauses() pauses { return pauses{n, n.config.Timers.BackoffMin} }

// pause waits, or returns the cause if ctx or the node ends first.
func (b *pauses) pause(ctx context.Context) error {
	d := b.next/2 + rand.N(b.next/2+1) // jitter
	b.next = min(2*b.next, b.node.config.Timers.BackoffMax)
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-b.node.ctx.Done():
		return errDraining
	}
}

// news is what is to be told when the owner has let go of its mutex.
type news struct {
	offer *offer // nil: nothing is offered
	ends  []ending
}

// tell announces, and then tells what has ended: who follows that finds what goes
// on for it.
func (n *Node) tell(all []news) {
	for _, s := range all {
		if s.offer != nil {
			n.push(*s.offer)
		}
		n.announceEnds(s.ends)
	}
	if len(all) > 0 {
		n.kickSweep()
	}
}

// offloaded ends an offload by the owner's rule: see [manager.Manager.Offloaded].
// A publication whose pages have left ends, and another one goes on for it.
func (o *owner) offloaded(now time.Time, i manager.MoveID) (freed int, said []news, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.manager.Moving(i)
	out, err := o.manager.Offloaded(i)
	if err != nil {
		return 0, nil, err
	}
	for _, i := range out.Unseal {
		if p := o.published[i]; p != nil {
			said = append(said, o.goOnLocked(now, p))
		} else {
			o.manager.Unsealed(i)
		}
	}
	return out.Freed, append(said, o.renewLocked(now, r)...), nil
}

// reloaded ends a reload of r. If the request is gone the move is abandoned, and
// the error wraps errRemoved.
func (o *owner) reloaded(now time.Time, i manager.MoveID) (r id.Request, said []news, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r = o.manager.Moving(i)
	if err := o.manager.Reloaded(i); err != nil {
		return "", nil, errors.Join(errRemoved, o.manager.Abandon(i))
	}
	return r, o.renewLocked(now, r), nil
}

// abandoned ends a move of which nothing counts.
func (o *owner) abandoned(now time.Time, i manager.MoveID) (said []news) {
	o.mu.Lock()
	defer o.mu.Unlock()
	r := o.manager.Moving(i)
	_ = o.manager.Abandon(i) // it is known: nobody else ends moves
	return o.renewLocked(now, r)
}

// goOnLocked ends a publication whose pages are about to go, by the owner's rule,
// and publishes the same tokens again under another name: where they are, for the
// same readers, until the same time. The engine keeps the reference that it has.
func (o *owner) goOnLocked(now time.Time, p *published) news {
	o.letGoLocked(now, p)
	value, next := o.againLocked(now, p)
	if next == nil {
		_, _ = o.manager.Remove(p.kept, true) // if it is: nobody else would
		const cause = "revoked"
		o.ended[cause]++
		return news{ends: []ending{{p, cause, o.holds.end(now, p.name.Sequence, cause)}}}
	}
	o.ended[holdOffloaded]++
	next.target, next.session, next.given, next.created, next.kept = p.target, p.session, p.given, p.created, p.kept
	next.value = within(value, p.value)
	readers, _ := o.holds.succeed(now, p.name.Sequence, next.name.Sequence, p.seal)
	p.session = nil // it is told when the other one ends
	end := ending{p, holdOffloaded, readers}
	left, _ := o.holds.look(now, next.name.Sequence)
	announced, err := o.log.Announce(now, next.value, left.ends)
	if err != nil {
		return news{ends: append(o.unsealLocked(now, []manager.PublicationID{next.id}, "failed"), end)}
	}
	next.sequence = announced.Sequence
	return news{&offer{published: *next, full: announced.Full, readers: readers}, []ending{end}}
}

// againLocked publishes anew what p, which has been let go of, has offered; nil if
// it can't: retention has let go of some of it, for example.
func (o *owner) againLocked(now time.Time, p *published) (value manager.Publication, next *published) {
	if state, err := o.manager.Request(p.handle()); err != nil || !holdsAll(state, p.value) {
		return value, nil
	}
	value, err := o.manager.Publish(p.handle(), p.value.Final)
	if err != nil {
		return value, nil
	}
	if next, err = o.openLocked(now, value.ID); err != nil {
		return value, nil
	}
	return value, next
}

// holdsAll says whether a request still has all that was published of it.
func holdsAll(r manager.RequestState, p manager.Publication) bool {
	return !slices.ContainsFunc(p.Streams, func(s manager.Stream) bool {
		i := slices.IndexFunc(r.Streams, func(t manager.StreamState) bool { return t.Label == s.Label })
		if i < 0 {
			return true
		}
		start, prefix := 0, 0
		if t := r.Streams[i]; t.Released > 0 {
			start, prefix = t.Prefix+t.Released, t.Prefix
		}
		return start != s.Start || prefix != s.Prefix || r.Streams[i].Tokens < s.Tokens
	})
}

// renewLocked announces a request's publication again if its tokens are elsewhere
// than was said. A final one that readers wait for, and that can't be given to
// them any more, ends.
func (o *owner) renewLocked(now time.Time, r id.Request) []news {
	state, err := o.manager.Request(r)
	if err != nil {
		return nil
	}
	p := o.published[state.Published]
	if p == nil {
		return nil
	}
	value, ok := o.manager.Republish(r)
	switch {
	case !ok && state.Final && away(p.value):
		return []news{{ends: o.unsealLocked(now, []manager.PublicationID{p.id}, "revoked")}}
	case !ok:
		return nil // what is on the device stays there for its readers, or the engine publishes again
	}
	if value = within(value, p.value); same(value, p.value) {
		return nil
	}
	view, _ := o.holds.look(now, p.name.Sequence)
	announced, err := o.log.Announce(now, value, view.ends)
	if err != nil {
		return []news{{ends: o.unsealLocked(now, []manager.PublicationID{p.id}, "failed")}}
	}
	p.value, p.sequence = value, announced.Sequence
	return []news{{offer: &offer{published: *p, full: announced.Full, readers: view.leases}}}
}

// within cuts a publication to the streams and lengths that were published
// before: what was committed since is the engine's until it publishes that.
func within(p, before manager.Publication) manager.Publication {
	streams := make([]manager.Stream, 0, len(before.Streams))
	for _, s := range p.Streams {
		i := slices.IndexFunc(before.Streams, func(b manager.Stream) bool { return b.Label == s.Label })
		if i < 0 {
			continue
		}
		s.Tokens = min(s.Tokens, before.Streams[i].Tokens)
		streams = append(streams, s)
	}
	p.Streams = streams
	return p
}

// same says that two publications of the same lengths are in the same place.
func same(a, b manager.Publication) bool {
	return slices.EqualFunc(a.Streams, b.Streams, func(x, y manager.Stream) bool {
		return x.Label == y.Label && x.State == y.State && slices.Equal(x.Pages, y.Pages)
	})
}

// away says whether a stream of a publication has no pages.
func away(p manager.Publication) bool {
	return slices.ContainsFunc(p.Streams, func(s manager.Stream) bool { return s.State != manager.Resident })
}

// away lists the requests of those publications whose tokens are not on the
// device, those that are kept by their keys.
func (o *owner) away(names []id.Sequence) (requests []id.Request) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, s := range names {
		if p := o.bySeq[s]; p != nil && away(p.value) {
			requests = append(requests, p.handle())
		}
	}
	return requests
}

// sequence is what a publication is called by; 0 if it has ended.
func (o *owner) sequence(i manager.PublicationID) id.Sequence {
	o.mu.Lock()
	defer o.mu.Unlock()
	if p := o.published[i]; p != nil {
		return p.name.Sequence
	}
	return 0
}

// isAwaited says whether readers have leases on tokens of the request that are
// not on the device.
func (o *owner) isAwaited(now time.Time, r id.Request) bool {
	state, err := o.manager.Request(r)
	if err != nil || state.Published == 0 {
		return false
	}
	o.mu.Lock()
	p := o.published[state.Published]
	is := p != nil && away(p.value)
	o.mu.Unlock()
	return is && o.isLeased(now, state.Published)
}

// isLeased says whether a reader has a lease on a publication.
func (o *owner) isLeased(now time.Time, i manager.PublicationID) bool {
	o.mu.Lock()
	p := o.published[i]
	o.mu.Unlock()
	if p == nil {
		return false
	}
	view, ok := o.holds.look(now, p.name.Sequence)
	return ok && len(view.leases) > 0
}

func (e engineService) Offload(ctx context.Context, req *kvferrypb.OffloadRequest) (*kvferrypb.OffloadResponse, error) {
	s, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, stop := s.within(ctx)
	defer stop()
	freed, err := e.node.tier.offload(ctx, r)
	if err != nil {
		return nil, err
	}
	return &kvferrypb.OffloadResponse{Freed: uint32(freed), Request: string(r)}, nil
}

func (e engineService) Reload(ctx context.Context, req *kvferrypb.ReloadRequest) (*kvferrypb.ReloadResponse, error) {
	s, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	ctx, stop := s.within(ctx)
	defer stop()
	pages, err := e.node.tier.reload(ctx, r)
	if err != nil {
		return nil, err
	}
	return &kvferrypb.ReloadResponse{Pages: uint32(pages)}, nil
}

func (e engineService) IsOffloaded(ctx context.Context, req *kvferrypb.IsOffloadedRequest) (*kvferrypb.IsOffloadedResponse, error) {
	_, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	return &kvferrypb.IsOffloadedResponse{Offloaded: e.node.manager.OffloadedRequest(r)}, nil
}

func (e engineService) Reclaimable(ctx context.Context, req *kvferrypb.ReclaimableRequest) (*kvferrypb.ReclaimableResponse, error) {
	_, r, leave, err := e.request(ctx, req.GetRequest())
	if err != nil {
		return nil, err
	}
	defer leave()
	return &kvferrypb.ReclaimableResponse{Pages: uint32(e.node.manager.Reclaimable(r))}, nil
}

func (a adminService) Offload(ctx context.Context, req *kvferrypb.AdminOffloadRequest) (*kvferrypb.OffloadResponse, error) {
	r := id.Request(req.GetRequest())
	if r == "" {
		var err error
		if r, err = a.node.tier.victim(); err != nil {
			return nil, fmt.Errorf("offload: %w", err)
		}
	}
	r = a.node.handleOf(r)
	name := a.node.nameOf(r)
	freed, err := a.node.tier.offload(ctx, r)
	if err != nil {
		return nil, err
	}
	return &kvferrypb.OffloadResponse{Freed: uint32(freed), Request: string(name)}, nil
}

// errNoVictim: no request could be offloaded without taking it from somebody.
var errNoVictim = errors.New("no request has pages that it could do without")

func (a adminService) Reload(ctx context.Context, req *kvferrypb.AdminReloadRequest) (*kvferrypb.ReloadResponse, error) {
	pages, err := a.node.tier.reload(ctx, a.node.handleOf(id.Request(req.GetRequest())))
	if err != nil {
		return nil, err
	}
	return &kvferrypb.ReloadResponse{Pages: uint32(pages)}, nil
}
