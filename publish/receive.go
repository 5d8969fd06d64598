package publish

import (
	"container/heap"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// Receive applies one gossiped item, of which it keeps nothing. If anything in
// it is new, the item is returned to be passed on as it is: the time to live in
// it stays true if that happens at once. What is meant for this node's log is
// returned: a [*wire.Nack], its Asker filled in, for [Log.Nack], or a
// [*wire.Echo] for [Log.Echo]; else nil. The error, which wraps
// [wire.ErrMessage] or [wire.ErrVersion], means that the item was dropped; it is
// counted.
func (b *Board) Receive(now time.Time, item []byte) (out Output, forLog wire.Message, err error) {
	m, err := b.decode(item)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stats.Items++
	if err != nil {
		if errors.Is(err, wire.ErrVersion) {
			b.stats.Unknown++
		} else {
			b.stats.Malformed++
		}
		return Output{}, nil, err
	}
	news := false
	switch m := m.(type) {
	case wire.Batches:
		for i := range m {
			if m[i].Owner == b.hash {
				out.Newer = max(out.Newer, b.newer(m[i].Incarnation).Newer)
			} else if v, _ := b.replica(now, m[i].Owner, m[i].Incarnation, false); v != nil {
				news = b.apply(now, v, &m[i]) || news
			}
		}
	case *wire.Check:
		out, news = b.check(now, m)
	case *wire.Bye:
		news = b.bye(now, m)
	case *wire.Beacon:
		out, news = b.beacon(now, m)
	case *wire.Nack:
		if v := b.fromMember(m.From, m.Owner, m.Incarnation); v != nil {
			m.Asker = v.node
			forLog = m
		}
	case *wire.Echo:
		if b.fromMember(m.From, m.Owner, m.Incarnation) != nil {
			forLog = m
		}
	}
	if news {
		b.stats.Passed++
		out.Broadcast = [][]byte{item}
	}
	return out, forLog, nil
}

func (b *Board) decode(item []byte) (wire.Message, error) {
	if len(item) > wire.ItemBytes {
		return nil, fmt.Errorf("gossiped message has %d bytes, at most %d: %w", len(item), wire.ItemBytes, wire.ErrMessage)
	}
	return wire.Decode(item, b.o.Pages)
}

// fromMember returns who says something to this node's log, nil if that is no
// member, or another life is meant.
func (b *Board) fromMember(from, to id.NodeHash, i id.Incarnation) *view {
	v := b.views[from]
	if to != b.hash || i != b.o.Life.Incarnation || v == nil || v.presence != up {
		b.stats.Old++
		return nil
	}
	return v
}

// bye ends a life that said so.
func (b *Board) bye(now time.Time, m *wire.Bye) (news bool) {
	if m.Owner == b.hash {
		return false
	}
	v, _ := b.replica(now, m.Owner, m.Incarnation, false)
	if v == nil || !b.admit(v) {
		return false
	}
	for _, e := range v.live {
		b.remove(e)
		b.stats.Dropped++
	}
	b.unpark(v)
	v.presence, v.since = gone, now
	v.max = max(v.max, m.Max)
	return true
}

// apply applies what an owner's log says; true if any of it was new.
func (b *Board) apply(now time.Time, v *view, g *wire.Batch) (news bool) {
	if !b.admit(v) {
		return false
	}
	if g.Floor > v.floor {
		b.raise(v, g.Floor)
		news = true
	}
	var refused []*wire.Announcement
	for i := range g.Announcements {
		switch a := &g.Announcements[i]; b.announce(now, v, a, false) {
		case isNews:
			news = true
		case noRoom, conflict:
			refused = append(refused, a)
		case isLive, isOver:
		}
	}
	for _, s := range g.Releases {
		if slices.ContainsFunc(refused, func(a *wire.Announcement) bool { return v.replaces(a, s) }) {
			continue
		}
		news = b.release(v, s) || news
	}
	return news
}

// replaces says whether the release of s may only say that a took its place.
// Where a was refused it would read as the publication's end: at once if s is
// live, else when the step that s has replaced is released.
func (v *view) replaces(a *wire.Announcement, s id.Sequence) bool {
	if e := v.live[s]; e != nil {
		return e.name == a.Publication
	}
	return a.Publication <= s && s < a.Sequence
}

// raise applies the owner's floor.
func (b *Board) raise(v *view, floor id.Sequence) {
	if floor <= v.floor {
		return
	}
	if rise := uint64(floor - v.floor); rise <= uint64(len(v.live)+len(v.ended)) {
		for i := range rise {
			s := v.floor + 1 + id.Sequence(i)
			if e := v.named(s); e != nil {
				b.end(e)
			}
			delete(v.ended, s)
		}
	} else {
		for _, e := range v.live {
			if e.name <= floor {
				b.end(e)
			}
		}
		for s := range v.ended {
			if s <= floor {
				delete(v.ended, s)
			}
		}
	}
	v.floor = floor
	v.know(1, floor)
}

// release applies the release of one sequence; true if it was new.
func (b *Board) release(v *view, s id.Sequence) (news bool) {
	if s <= v.floor {
		return false
	}
	if e := v.live[s]; e != nil {
		b.end(e)
		return true
	}
	if v.known.has(s) {
		if len(v.doubt.ranges) < b.o.Window || !v.doubt.parts(s) {
			v.doubt.remove(s)
		} else {
			b.stats.Gaps++ // a snapshot, which doubt asks for, says it again
		}
		return false
	}
	if !b.room(v, s) {
		return false
	}
	b.know(v, s)
	return true
}

// know notes a sequence that was not known.
func (b *Board) know(v *view, s id.Sequence) {
	if s <= v.askedTo {
		b.stats.Repaired++
	}
	v.know(s, s)
}

// room says whether the owner's window has room for s.
func (b *Board) room(v *view, s id.Sequence) bool {
	if len(v.known.ranges) >= b.o.Window && v.known.splits(s) {
		b.stats.Gaps++
		v.max = max(v.max, s) // the gap below is known of, and will be asked for
		return false
	}
	return true
}

// end removes an entry that its owner has ended.
func (b *Board) end(e *entry) {
	b.remove(e)
	b.stats.Released++
	if e.name > e.view.floor && len(e.view.ended) < b.o.Window {
		e.view.ended[e.name] = e.sequence
	}
}

// outcome of an announcement.
type outcome uint8

const (
	isNews   outcome = iota // an entry, or what takes the place of one
	isLive                  // known, and live
	isOver                  // known, and ended or replaced since
	noRoom                  // refused, as if it had not come
	conflict                // refused: it contradicts the entry that there is
)

// announce applies an announcement. direct: the owner itself said it to us.
func (b *Board) announce(now time.Time, v *view, a *wire.Announcement, direct bool) outcome {
	if v.live[a.Sequence] != nil {
		b.stats.Duplicates++
		return isLive
	}
	revives := direct && v.doubt.has(a.Sequence)
	if v.known.has(a.Sequence) && !revives || a.Publication <= v.floor {
		b.stats.Duplicates++
		if !v.known.has(a.Sequence) && b.room(v, a.Sequence) {
			v.know(a.Sequence, a.Sequence)
		}
		return isOver
	}
	if !b.room(v, a.Sequence) {
		return noRoom
	}
	old := v.named(a.Publication)
	if old != nil && old.sequence > a.Sequence || v.ended[a.Publication] > a.Sequence {
		b.stats.Duplicates++
		v.know(a.Sequence, a.Sequence)
		return isOver
	}
	e := newEntry(b.since(now), v, a)
	if old != nil {
		if contradicts(old, a) {
			b.stats.Conflicts++
			v.max = max(v.max, a.Sequence)
			v.mismatch = true // only the owner can say which one is right
			return conflict
		}
		e.requestID = old.requestID
		b.remove(old)
	} else if !b.makeRoom(v) {
		v.max = max(v.max, a.Sequence)
		return noRoom
	}
	delete(v.ended, a.Publication)
	if !v.known.has(a.Sequence) {
		b.know(v, a.Sequence)
	}
	e.keep(a.Refs, a.Lists)
	b.insert(now, e)
	b.stats.News++
	return isNews
}

// contradicts says whether a can't be what old has become.
func contradicts(old *entry, a *wire.Announcement) bool {
	if old.request != a.Request || old.seal != a.Seal || old.epoch != a.ContentEpoch || old.final && !a.Final {
		return true
	}
	if len(a.Refs) == 0 { // too many to be gossiped
		return false
	}
	refs, _ := old.streams()
	if len(refs) == 0 { // they were
		return false
	}
	_, _, departed := departs(fromWire(refs, nil), fromWire(a.Refs, nil), old.final)
	return departed
}

// makeRoom says whether an entry more of v may be kept. The owner with the most
// entries gives way.
func (b *Board) makeRoom(v *view) bool {
	if len(v.live) >= maxLive {
		b.stats.Refused++
		return false
	}
	if b.entries < b.o.Entries {
		return true
	}
	largest := v
	for _, other := range b.views {
		if len(other.live) > len(largest.live) {
			largest = other
		}
	}
	if largest == v {
		b.stats.Refused++
		return false
	}
	b.stats.Evicted++
	for _, e := range largest.live {
		// It becomes a gap again, which is asked for when there is room.
		if largest.known.remove(e.sequence); len(largest.known.ranges) > b.o.Window {
			largest.known.add(e.sequence, e.sequence)
		}
		b.remove(e)
		break
	}
	return true
}

func (b *Board) insert(now time.Time, e *entry) {
	v, at := e.view, b.since(now)
	v.put(e)
	b.entries++
	b.requests.put(e)
	if at < e.expires {
		heap.Push(&b.due, e)
	}
	b.keepTable(e)
	if e.visible(at) {
		b.watches.wake(e.request)
	}
}

// remove takes an entry out of every table; its sequence stays known.
func (b *Board) remove(e *entry) {
	v := e.view
	if v.presence == up && e.due >= 0 { // it shows, or nobody was woken yet when it ceased to
		b.watches.wake(e.request)
	}
	v.take(e)
	b.entries--
	b.requests.take(e)
	if e.due >= 0 {
		heap.Remove(&b.due, int(e.due))
	}
	if e.pages > 0 {
		b.tables.take(e)
	}
}

// keepTable counts the pages of e, and gives up the oldest tables if they are
// too many. A table without pages costs nothing, and stays.
func (b *Board) keepTable(e *entry) {
	if e.pages == 0 {
		return
	}
	b.tables.put(e)
	for b.tables.bytes > b.o.Tables {
		oldest := b.tables.oldest
		b.tables.take(oldest)
		refs, _ := oldest.streams()
		oldest.keep(refs, nil)
		b.stats.NoTable++
	}
}
