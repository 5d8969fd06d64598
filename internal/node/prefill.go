package node

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// owner is the prefill side: it publishes what the engine has committed, and
// lets go of it by the owner's rule.
//
// Everything that names or frees a published page goes through it, under one
// mutex, because the order is what makes a pull safe:
//
//	publish:  the manager holds the pages → the word is set → the log announces
//	end:      the word is cleared → the log releases → the manager frees
//
// Nothing in between waits: the log keeps what is to be gossiped, and flush hands
// it over afterwards.
type owner struct {
	manager *manager.Manager
	log     *publish.Log
	seals   *memory.SealTable
	holds   *holds
	keyring *keyring // signs references
	sums    *sums
	most    int // live publications

	mu        sync.Mutex
	published map[manager.PublicationID]*published
	bySeq     map[id.Sequence]*published
	ended     map[string]uint64 // by cause, for metrics
}

// published is one live publication of ours.
type published struct {
	id       manager.PublicationID
	name     id.Publication
	seal     uint32
	value    manager.Publication // as last published
	sequence id.Sequence         // of the newest announcement
	deferred bool                // which waits for room in gossip
	given    string              // reference, as given out last
	target   id.Node             // that is to read it; "": nobody in particular
	session  *session            // who is told when it ends; nil: nobody
	kept     id.Request          // what its request is called by, once that was removed and is kept for it
	created  time.Time
}

// handle is what the manager calls its request by.
func (p *published) handle() id.Request { return cmp.Or(p.kept, p.value.Request) }

// ending is a publication that has just ended.
type ending struct {
	*published
	cause   string
	readers []id.Life // who held a lease
}

// publishOptions are what Engine.Publish may choose. A zero field means its default.
type publishOptions struct {
	target  id.Node
	readers int
	hold    time.Duration
	final   bool
}

// newOwner takes a log and holds that have room for most publications.
func newOwner(m *manager.Manager, log *publish.Log, seals *memory.SealTable, h *holds, k *keyring, most int) *owner {
	return &owner{
		manager: m, log: log, seals: seals, holds: h, keyring: k, sums: newSums(), most: most,
		published: make(map[manager.PublicationID]*published),
		bySeq:     make(map[id.Sequence]*published),
		ended:     make(map[string]uint64),
	}
}

// offer is what came of a publish.
type offer struct {
	published
	full    []byte    // the announcement with all its pages
	readers []id.Life // who is told of it besides the target
	ends    []ending  // the publication itself, if it could not go on
}

// publish offers what is committed of a request. It returns the publication
// as it is now and, also with an error, what is to be told.
func (o *owner) publish(now time.Time, s *session, r id.Request, po publishOptions) (offer, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	// Asked for before the manager, which would end the request's publication
	// for good if it had to be given up again.
	if len(o.published) >= o.most && !o.publishes(r) {
		return offer{}, fmt.Errorf("publish %q: %d publications are live: %w", r, len(o.published), publish.ErrFull)
	}
	value, err := o.manager.Publish(r, po.final)
	if err != nil {
		return offer{}, err
	}
	// From here on the manager holds the pages: whatever fails must end the
	// publication again.
	p := o.published[value.ID]
	if p == nil {
		if p, err = o.openLocked(now, value.ID); err != nil {
			return offer{}, fmt.Errorf("publish %q: %w", r, err)
		}
		p.session = s
	}
	p.value, p.target = value, po.target
	// Held before it is announced, so that whoever hears of it gets its lease.
	if err := o.holds.publish(now, p.name.Sequence, holdOptions{readers: po.readers, hold: po.hold, final: po.final}); err != nil {
		return o.failLocked(now, p, fmt.Errorf("publish %q: %w", r, err))
	}
	// A final one is offered for its hold, an open one for as long as it may
	// grow: its pages are its request's anyway.
	ttl := po.hold
	if !po.final {
		ttl = o.holds.timers.maxHold
	}
	announced, err := o.log.Announce(now, value, ttl)
	if err != nil {
		return o.failLocked(now, p, fmt.Errorf("publish %q: %w", r, err))
	}
	p.sequence = announced.Sequence
	if p.given, err = p.reference(o.keyring.current()); err != nil {
		return o.failLocked(now, p, fmt.Errorf("publish %q: %w", r, err))
	}
	return offer{published: *p, full: announced.Full}, nil
}

// openLocked gives a publication of the manager its name and its seal word. If
// it can't, the publication has ended.
func (o *owner) openLocked(now time.Time, i manager.PublicationID) (*published, error) {
	name, seal, word, err := o.log.Reserve(i)
	if err != nil {
		o.manager.Unsealed(i)
		return nil, err
	}
	o.seals.Store(seal, word)
	p := &published{id: i, name: name, seal: seal, created: now}
	o.published[i], o.bySeq[name.Sequence] = p, p
	return p, nil
}

// publishes says that a live publication is the request's.
func (o *owner) publishes(r id.Request) bool {
	state, err := o.manager.Request(r)
	return err == nil && state.Published != 0
}

// failLocked gives a publication up that could not be made, or could not grow.
// If it had run out, it says so.
func (o *owner) failLocked(now time.Time, p *published, err error) (offer, error) {
	cause := o.holds.cause(now, p.name.Sequence)
	if cause == "" {
		cause = "failed"
	}
	return offer{ends: o.unsealLocked(now, []manager.PublicationID{p.id}, cause)}, err
}

// remove ends a request; see [manager.Manager.Remove]. kept is its key if it is
// kept for its readers.
func (o *owner) remove(now time.Time, r id.Request, discard bool) (ends []ending, kept id.Request, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	removed, err := o.manager.Remove(r, discard)
	for _, i := range removed.Lives {
		if p := o.published[i]; p != nil {
			p.kept = removed.Kept
		}
	}
	return o.unsealLocked(now, removed.Unseal, "revoked"), removed.Kept, err
}

// reset empties a request; see [manager.Manager.Reset].
func (o *owner) reset(now time.Time, r id.Request, free bool) ([]ending, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	removed, err := o.manager.Reset(r, free)
	return o.unsealLocked(now, removed.Unseal, "revoked"), err
}

// commit ends a step; see [manager.Manager.Commit]. As one, so that no publish
// goes on with what a fork has replaced.
func (o *owner) commit(now time.Time, t manager.Token) (manager.Committed, []ending, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	committed, err := o.manager.Commit(t)
	return committed, o.unsealLocked(now, committed.Unseal, "revoked"), err
}

// unseal ends publications whose pages the manager has taken from a request.
func (o *owner) unseal(now time.Time, ids []manager.PublicationID) []ending {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.unsealLocked(now, ids, "revoked")
}

// revoke ends one publication.
func (o *owner) revoke(now time.Time, s id.Sequence) ([]ending, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if next, _, ok := o.holds.successor(s); ok {
		s = next
	}
	p := o.bySeq[s]
	if p == nil {
		return nil, publish.ErrUnknown
	}
	return o.unsealLocked(now, []manager.PublicationID{p.id}, "revoked"), nil
}

// sweep ends every publication that is due.
func (o *owner) sweep(now time.Time) []ending {
	o.mu.Lock()
	defer o.mu.Unlock()
	var ends []ending
	for _, due := range o.holds.due(now) {
		if p := o.bySeq[due.seq]; p != nil {
			ends = append(ends, o.freeLocked(now, p, due))
		}
	}
	return ends
}

func (o *owner) unsealLocked(now time.Time, ids []manager.PublicationID, cause string) []ending {
	var ends []ending
	for _, i := range ids {
		p := o.published[i]
		if p == nil { // the manager held it, but it was never announced
			o.manager.Unsealed(i)
			continue
		}
		end := heldEnd{seq: p.name.Sequence, cause: cause, readers: o.holds.end(now, p.name.Sequence, cause)}
		ends = append(ends, o.freeLocked(now, p, end))
	}
	return ends
}

// freeLocked ends a publication.
func (o *owner) freeLocked(now time.Time, p *published, end heldEnd) ending {
	o.letGoLocked(now, p)
	o.ended[end.cause]++
	return ending{p, end.cause, end.readers}
}

// letGoLocked is the owner's rule: the word first, everything else after.
func (o *owner) letGoLocked(now time.Time, p *published) {
	o.seals.Store(p.seal, 0)
	if err := o.log.Release(now, p.id); err != nil && !errors.Is(err, publish.ErrUnknown) {
		panic(fmt.Sprintf("release %s: %v", p.name, err)) // we hold it, so the log does
	}
	o.manager.Unsealed(p.id)
	delete(o.published, p.id)
	delete(o.bySeq, p.name.Sequence)
	o.sums.drop(p.name.Sequence)
}

// find returns a live publication of ours for a peer, with all its pages, or the
// one that goes on for it: then continues. The error wraps [wire.ErrReference]
// if it is of another request than r; "" is any.
func (o *owner) find(now time.Time, s id.Sequence, r id.Request) (full []byte, request id.Request, continues bool, err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	asked := s
	if s != 0 {
		p, err := o.liveLocked(s)
		if err != nil {
			return nil, "", false, err
		}
		if r != "" && r != p.value.Request {
			return nil, "", false, fmt.Errorf("%s is not of request %q: %w", p.name, r, wire.ErrReference)
		}
		s = p.name.Sequence
	}
	full, name, err := o.log.Find(now, s, r)
	if cause := o.holds.cause(now, s); err != nil && cause != "" {
		err = endedError(cause)
	}
	if err != nil {
		return nil, "", false, err
	}
	p, err := o.liveLocked(name.Sequence)
	if err != nil {
		return nil, "", false, err
	}
	return full, p.value.Request, s != asked, nil
}

// own returns a live publication of ours. The error wraps [wire.ErrReference]
// if a reference to it says what it is not.
func (o *owner) own(s id.Sequence, ref *wire.Reference) (published, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	p, err := o.liveLocked(s)
	if err != nil {
		return published{}, err
	}
	named, seal := p.name, p.seal
	if _, old, ok := o.holds.successor(s); ok {
		named.Sequence, seal = s, old
	}
	return *p, matches(ref, named, p.value.Request.Hash(), seal)
}

// liveLocked returns a live publication of ours, or the one that goes on for it,
// or says how it ended.
func (o *owner) liveLocked(s id.Sequence) (*published, error) {
	if next, _, ok := o.holds.successor(s); ok {
		s = next
	}
	// Also of one that is over, and has only not been swept: no lease is granted on it.
	if cause := o.holds.cause(time.Now(), s); cause != "" {
		return nil, endedError(cause)
	}
	if p := o.bySeq[s]; p != nil {
		return p, nil
	}
	_, _, err := o.log.Find(time.Now(), s, "") // it knows which have been
	return nil, cmp.Or(err, publish.ErrEnded)
}

// matches checks what a reference says of a publication against what its owner
// says. Without a keyring anybody can write one. ref may be nil, and may name one
// that this one goes on for: its seal word was another.
func matches(ref *wire.Reference, name id.Publication, r id.RequestHash, seal uint32) error {
	switch {
	case ref == nil:
		return nil
	case ref.Request.Hash() != r:
		return fmt.Errorf("%s is not of request %q: %w", name, ref.Request, wire.ErrReference)
	case ref.Publication == name && ref.Seal != seal:
		return fmt.Errorf("%s has seal word %d, not %d: %w", name, seal, ref.Seal, wire.ErrReference)
	default:
		return nil
	}
}

// live lists all publications of ours for people and for Snapshot, oldest first.
func (o *owner) live() []published {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := make([]published, 0, len(o.published))
	for _, p := range o.published {
		all = append(all, *p)
	}
	slices.SortFunc(all, func(a, b published) int { return cmp.Compare(a.id, b.id) })
	return all
}

// forget makes sure that a session that has ended is told nothing more.
func (o *owner) forget(s *session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, p := range o.published {
		if p.session == s {
			p.session = nil
		}
	}
}

// endings returns how many publications have ended, by cause.
func (o *owner) endings() map[string]uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return maps.Clone(o.ended)
}

// reference names the publication for routers and readers.
func (p published) reference(keys wire.Keys) (string, error) {
	return keys.Encode(wire.Reference{Publication: p.name, Request: p.value.Request, Seal: p.seal})
}

// publish is one publish of an engine: held, sealed, announced, and pushed to
// the node that is to read it. If gossip is under more load than it takes, it
// takes 2 ms, and the announcement may be deferred.
func (n *Node) publish(s *session, r id.Request, po publishOptions) (published, error) {
	// What has begun may go on, so that its readers come to an end.
	if n.isDraining() && !n.owner.publishes(r) {
		return published{}, fmt.Errorf("publish %q: %w", r, errDraining)
	}
	po.hold = min(cmp.Or(po.hold, n.config.Timers.Hold), n.config.Timers.MaxHold)
	o, err := n.owner.publish(time.Now(), s, r, po)
	if err != nil {
		n.announceEnds(o.ends)
		return published{}, err
	}
	n.push(o)
	o.deferred = n.flushOwn(o.published)
	n.kickSweep() // its hold may be the next to run out
	return o.published, nil
}

// push is the fast way of an announcement to who is to read it, once the
// checksums are made; gossip reaches everybody else, and them too if the push is
// lost.
func (n *Node) push(o offer) {
	n.sum(o.published)
	item := pushItem{announcement: o.full, sequence: o.sequence, request: o.value.Request}
	target := n.peers.target(o.target)
	if target != nil {
		target.push(item)
	}
	for _, reader := range o.readers {
		if peer := n.peers.byLife(reader); peer != nil && peer != target {
			peer.push(item)
		}
	}
}

// announceEnds tells readers and engines what has ended.
func (n *Node) announceEnds(ends []ending) {
	n.flush()
	for _, e := range ends {
		for _, reader := range e.readers {
			if peer := n.peers.byLife(reader); peer != nil {
				peer.push(pushItem{ended: e.name.Sequence, cause: e.cause})
			}
		}
		if e.session != nil {
			e.session.emit(releasedEvent(e.value.Request, e.given, e.cause))
		}
		n.metrics.holdSeconds.Observe(time.Since(e.created).Seconds())
	}
}

// send hands to the cluster what the board says, and what the log says from time
// to time. It does not block: what is dropped there is counted there, and said
// again or repaired by its owner.
func (n *Node) send(out publish.Output) {
	for _, item := range out.Broadcast {
		_ = n.cluster.Broadcast(item)
	}
	for _, d := range out.Send {
		_ = n.cluster.Send(d.To, d.Item)
	}
	if out.Newer > n.life.Incarnation {
		n.stop(fmt.Errorf("%s: incarnation %d publishes: %w", n.life, out.Newer, ErrFenced))
	}
	for _, life := range out.Resync {
		if peer := n.peers.byLife(life); peer != nil {
			peer.wantSnapshot()
		}
	}
}
