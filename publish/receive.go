package publish

import (
	"container/heap"
	"errors"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// Receive applies one gossiped item. If anything in it is new, the item is
// returned to be passed on as it is: the time to live in it stays true if that
// happens at once. A nack that is meant for this node's log is returned, its
// Asker filled in, for [Log.Nack]. The error, which wraps [wire.ErrMessage] or
// [wire.ErrVersion], means that the item was dropped; it is counted.
func (b *Board) Receive(now time.Time, item []byte) (Output, *wire.Nack, error) {
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
	var out Output
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
	case *wire.Nack:
		return Output{}, b.nack(m), nil
	}
	if news {
		out.Broadcast = [][]byte{item}
	}
	return out, nil, nil
}

func (b *Board) decode(item []byte) (wire.Message, error) {
	if len(item) > wire.ItemBytes {
		return nil, fmt.Errorf("gossiped message has %d bytes, at most %d: %w", len(item), wire.ItemBytes, wire.ErrMessage)
	}
	return wire.Decode(item, b.o.Pages)
}

// nack returns n if it is for this life, from a member.
func (b *Board) nack(n *wire.Nack) *wire.Nack {
	v := b.views[n.From]
	if n.Owner != b.hash || n.Incarnation != b.o.Life.Incarnation || v == nil || v.presence != up {
		b.stats.Old++
		return nil
	}
	n.Asker = v.node
	return n
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
	refused := false
	for i := range g.Announcements {
		switch b.announce(now, v, &g.Announcements[i], false) {
		case isNews:
			news = true
		case noRoom, conflict:
			refused = true
		case isLive, isOver:
		}
	}
	if refused {
		// A release may say that the announcement beside it took a step's
		// place; without that one it would read as the publication's end.
		return news
	}
	for _, s := range g.Releases {
		news = b.release(v, s) || news
	}
	return news
}

// raise applies the owner's floor.
func (b *Board) raise(v *view, floor id.Sequence) {
	if floor <= v.floor {
		return
	}
	if rise := uint64(floor - v.floor); rise <= uint64(len(v.names)+len(v.ended)) {
		for i := range rise {
			s := v.floor + 1 + id.Sequence(i)
			if e := v.names[s]; e != nil {
				b.end(e)
			}
			delete(v.ended, s)
		}
	} else {
		for s, e := range v.names {
			if s <= floor {
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
		if v.doubt.has(s) && len(v.doubt.ranges) < b.o.Window {
			v.doubt.remove(s)
		}
		return false
	}
	if !b.room(v, s) {
		return false
	}
	v.know(s, s)
	return true
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
		e.view.ended[e.name] = struct{}{}
	}
}

// outcome of an announcement.
type outcome uint8

const (
	isNews   outcome = iota // an entry, or one that grew
	isLive                  // known, and live
	isOver                  // known, and ended or grown since
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
	e := newEntry(now, v, a)
	if old := v.names[a.Publication]; old != nil {
		if old.sequence > a.Sequence {
			b.stats.Duplicates++
			v.know(a.Sequence, a.Sequence)
			return isOver
		}
		if contradicts(old, e) {
			b.stats.Conflicts++
			v.max = max(v.max, a.Sequence)
			v.mismatch = true // only the owner can say which one is right
			return conflict
		}
		if e.publication.Request == "" {
			e.publication.Request = old.publication.Request
		}
		b.remove(old)
	} else if !b.makeRoom(v) {
		v.max = max(v.max, a.Sequence)
		return noRoom
	}
	delete(v.ended, a.Publication)
	v.know(a.Sequence, a.Sequence)
	b.insert(now, e, a.Lists != nil)
	b.stats.News++
	return isNews
}

// contradicts says whether grown can't be what old has grown to.
func contradicts(old, grown *entry) bool {
	p, q := &old.publication, &grown.publication
	if old.request != grown.request || old.seal != grown.seal || p.ContentEpoch != q.ContentEpoch || p.Final {
		return true
	}
	if len(q.Streams) == 0 { // too many to be gossiped
		return false
	}
	_, _, shrunk := shrinks(p.Streams, q.Streams)
	return shrunk
}

// makeRoom says whether an entry more of v may be kept. The owner with the most
// entries gives way.
func (b *Board) makeRoom(v *view) bool {
	if len(v.live) >= maxLive {
		b.stats.Evicted++
		return false
	}
	if b.entries < b.o.Entries {
		return true
	}
	b.stats.Evicted++
	largest := v
	for _, other := range b.views {
		if len(other.live) > len(largest.live) {
			largest = other
		}
	}
	if largest == v {
		return false
	}
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

func (b *Board) insert(now time.Time, e *entry, table bool) {
	v := e.view
	v.live[e.sequence] = e
	v.names[e.name] = e
	v.sum ^= wire.Mix(uint64(e.sequence))
	b.entries++
	e.at = len(b.requests[e.request])
	b.requests[e.request] = append(b.requests[e.request], e)
	if now.Before(e.expires) {
		heap.Push(&b.due, e)
	}
	if table {
		b.keepTable(e)
	}
	if e.visible(now) {
		b.watches.wake(e.request)
	}
}

// remove takes an entry out of every table; its sequence stays known.
func (b *Board) remove(e *entry) {
	v := e.view
	if v.presence == up && e.due >= 0 { // it shows, or nobody was woken yet when it ceased to
		b.watches.wake(e.request)
	}
	delete(v.live, e.sequence)
	delete(v.names, e.name)
	v.sum ^= wire.Mix(uint64(e.sequence))
	b.entries--
	all := b.requests[e.request]
	last := len(all) - 1
	all[e.at], all[last].at = all[last], e.at
	all[last] = nil
	if b.requests[e.request] = all[:last]; last == 0 {
		delete(b.requests, e.request)
	}
	if e.due >= 0 {
		heap.Remove(&b.due, e.due)
	}
	b.dropTable(e)
}

// keepTable counts the pages of e, and gives up the oldest tables if they are
// too many.
func (b *Board) keepTable(e *entry) {
	for _, s := range e.publication.Streams {
		e.pages += len(s.Pages)
	}
	e.table = b.tables.PushBack(e)
	b.stats.TableBytes += int64(e.pages) * pageBytes
	for b.stats.TableBytes > b.o.Tables {
		oldest := b.tables.Front().Value.(*entry)
		b.dropTable(oldest)
		oldest.publication.Streams = withoutPages(oldest.publication.Streams)
		b.stats.NoTable++
	}
}

func (b *Board) dropTable(e *entry) {
	if e.table == nil {
		return
	}
	b.tables.Remove(e.table)
	b.stats.TableBytes -= int64(e.pages) * pageBytes
	e.table, e.pages = nil, 0
}
