package publish

import (
	"container/heap"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// Learn applies a full announcement that the owner itself sent (Push, Lookup),
// with the request's whole id, or "" if the caller did not learn it. Nothing is
// passed on. The entry that is returned is the newest of that publication
// whose pages are known; it is of use also if it shows nowhere, because its hold
// has run out or its owner is no member (yet).
//
// The error wraps [wire.ErrMessage] or [wire.ErrVersion] if full is not what
// [Log.Find] returns, [ErrConflict] if it is of another owner or request or
// contradicts what is known, [ErrEnded] if it is known to have ended, and
// [ErrFull] if there is no room to keep it.
func (b *Board) Learn(now time.Time, owner id.Life, full []byte, request id.Request) (Entry, error) {
	a, err := b.single(owner, full)
	if err != nil {
		return Entry{}, fmt.Errorf("learn from %s: %w", owner, err)
	}
	if request != "" && request.Hash() != a.Request {
		return Entry{}, fmt.Errorf("learn from %s: publication %d is not of request %q: %w", owner, a.Publication, string(request), ErrConflict)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	v, err := b.direct(now, owner)
	if err != nil {
		return Entry{}, fmt.Errorf("learn from %s: %w", owner, err)
	}
	e, err := b.learn(now, v, a, request)
	if err != nil {
		return Entry{}, fmt.Errorf("learn from %s: publication %d: %w", owner, a.Publication, err)
	}
	if !e.hasTable {
		// It has grown or changed its state since, or its table found no room: the
		// caller gets it all the same. While the seal word holds, all pages hold
		// that the publication ever named.
		e = newEntry(b.since(now), v, a)
		e.requestID = request
		e.keep(a.Refs, a.Lists)
	}
	return e.export(b.epoch), nil
}

// single decodes a batch of this owner with one announcement and its lists.
func (b *Board) single(owner id.Life, full []byte) (*wire.Announcement, error) {
	m, err := wire.Decode(full, b.o.Pages)
	if err != nil {
		return nil, err
	}
	batches, ok := m.(wire.Batches)
	if !ok || len(batches) != 1 || len(batches[0].Announcements) != 1 || batches[0].Announcements[0].Lists == nil {
		return nil, fmt.Errorf("not one whole announcement: %w", wire.ErrMessage)
	}
	if batches[0].Owner != owner.Node.Hash() || batches[0].Incarnation != owner.Incarnation {
		return nil, fmt.Errorf("it is of owner %#x.%d: %w", uint64(batches[0].Owner), uint64(batches[0].Incarnation), ErrConflict)
	}
	return &batches[0].Announcements[0], nil
}

// direct returns the view of a life that speaks to us itself.
func (b *Board) direct(now time.Time, owner id.Life) (*view, error) {
	hash := owner.Node.Hash()
	if hash == b.hash {
		return nil, fmt.Errorf("it is this node: %w", ErrConflict)
	}
	v, _ := b.replica(now, hash, owner.Incarnation, false)
	switch {
	case v == nil && b.past[hash].incarnation == owner.Incarnation:
		return nil, fmt.Errorf("%d owners, %d items wait for members: %w", len(b.views), b.parked, ErrFull)
	case v == nil || v.presence == gone:
		return nil, fmt.Errorf("that life is over: %w", ErrEnded)
	case !b.name(v, owner.Node):
		return nil, fmt.Errorf("another node has the same hash: %w", ErrConflict)
	case !b.admit(v):
		return nil, fmt.Errorf("%d items wait for members: %w", maxParked, ErrFull)
	}
	return v, nil
}

func (b *Board) learn(now time.Time, v *view, a *wire.Announcement, request id.Request) (*entry, error) {
	switch b.announce(now, v, a, true) {
	case noRoom:
		return nil, ErrFull
	case conflict:
		return nil, ErrConflict
	case isNews, isLive, isOver:
	}
	e := v.named(a.Publication)
	if e == nil {
		return nil, ErrEnded
	}
	if e.sequence != a.Sequence { // the newer one stays
		return e, nil
	}
	if e.digest != a.Digest {
		b.stats.Conflicts++
		return nil, fmt.Errorf("digest %#x, announced %#x: %w", a.Digest, e.digest, ErrConflict)
	}
	at := b.since(now)
	was, had := e.visible(at), e.hasTable
	if request != "" {
		e.requestID = request
	}
	if !had {
		e.keep(a.Refs, a.Lists)
		b.keepTable(e)
	}
	// The owner may have extended the hold. Gossip can't say so: it may be late.
	if end := at + time.Duration(a.TTLMillis)*time.Millisecond; end > e.expires {
		e.expires = end
		if e.due >= 0 {
			heap.Fix(&b.due, int(e.due))
		} else if at < end {
			heap.Push(&b.due, e)
		}
	}
	if is := e.visible(at); is && (!was || !had) {
		b.watches.wake(e.request)
	}
	return e, nil
}

// Sync replaces what is known of an owner's log by what the owner itself says:
// the items of [Log.Live], the whole of them, in order. Nothing changes if one
// of them is wrong, or the last one, which is the checkpoint, is missing. What
// has happened since the owner made them stays as it is. Errors are those of
// Learn.
func (b *Board) Sync(now time.Time, owner id.Life, items [][]byte) error {
	if len(items) == 0 {
		return fmt.Errorf("sync with %s: no checkpoint: %w", owner, wire.ErrMessage)
	}
	m, err := wire.Decode(items[len(items)-1], 0)
	if err != nil {
		return fmt.Errorf("sync with %s: %w", owner, err)
	}
	c, ok := m.(*wire.Check)
	if !ok || len(items)-1 > maxLive {
		return fmt.Errorf("sync with %s: %d items without a checkpoint: %w", owner, len(items), wire.ErrMessage)
	}
	if c.Owner != owner.Node.Hash() || c.Incarnation != owner.Incarnation {
		return fmt.Errorf("sync with %s: checkpoint of owner %#x.%d: %w", owner, uint64(c.Owner), uint64(c.Incarnation), ErrConflict)
	}
	live := make(map[id.Sequence]*wire.Announcement, len(items)-1)
	for _, item := range items[:len(items)-1] {
		a, err := b.single(owner, item)
		if err != nil {
			return fmt.Errorf("sync with %s: %w", owner, err)
		}
		if a.Publication <= c.Floor {
			return fmt.Errorf("sync with %s: publication %d is under floor %d: %w", owner, a.Publication, c.Floor, wire.ErrMessage)
		}
		live[a.Sequence] = a
	}

	b.mu.Lock()
	defer b.mu.Unlock()
	v, err := b.direct(now, owner)
	if err != nil {
		return fmt.Errorf("sync with %s: %w", owner, err)
	}
	b.sync(now, v, c, live)
	return nil
}

func (b *Board) sync(now time.Time, v *view, c *wire.Check, live map[id.Sequence]*wire.Announcement) {
	b.raise(v, c.Floor)
	// All up to here is known from now on; what was not, the owner may make live.
	for _, gap := range v.known.gaps(c.Max) {
		v.doubt.add(gap.first, gap.last)
	}
	v.know(1, c.Max)
	var noRoom []id.Sequence
	names := make(map[id.Sequence]bool, len(live))
	for s, a := range live {
		names[a.Publication] = true
		if v.ended[a.Publication] <= c.Max { // the owner knows better
			delete(v.ended, a.Publication)
		}
		_, err := b.learn(now, v, a, "")
		if old := v.named(a.Publication); errors.Is(err, ErrConflict) && old != nil { // the owner is right
			b.remove(old)
			v.doubt.add(old.sequence, old.sequence)
			_, err = b.learn(now, v, a, "")
		}
		if errors.Is(err, ErrFull) && s <= c.Max {
			noRoom = append(noRoom, s)
		}
	}
	for s, e := range v.live {
		if s <= c.Max && !names[e.name] { // a step that found no room leaves the one before
			b.end(e)
		}
	}
	v.doubt.cut(c.Max)
	for _, s := range noRoom { // to be read again when there is
		v.doubt.add(s, s)
	}
	// What only checkpoints have spoken of is void; the next one says it again.
	v.max = max(c.Max, v.known.max())
	v.check, v.checkAt = *c, now
	v.settled, v.mismatch, v.strikes = true, false, 0
	b.stats.Synced++
}
