package publish

import (
	"container/list"
	"slices"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

const (
	maxEndedRanges = 16384 // of sequences that have ended and are outgoing

	// The pressure, in announcements that wait, under which they go out shorter
	// and those that their target knows go last.
	somePressure = 1024
	highPressure = 4096

	shortInline = 256 // an announcement up to this carries its pages under some pressure; under high pressure none does
)

// outgoing is what the log has to say and has not handed over for gossip: the
// newest announcement of each publication, and what has ended. An announcement
// whose publication ends meanwhile is never handed over. So it holds at most one
// announcement a live publication, and a bounded number of ranges of sequences.
type outgoing struct {
	announced list.List // of *held, the oldest first
	later     list.List // of *held that were passed over: their target knows them
	ended     sequences // above the floor
	endedAt   time.Time // when the first of them, or the floor, began to wait; 0: none does
}

// announce makes h wait, if it does not.
func (o *outgoing) announce(now time.Time, h *held) {
	if h.waits == nil {
		h.waits, h.since = o.announced.PushBack(h), now
	}
}

// done takes h out.
func (o *outgoing) done(h *held) {
	if h.waits != nil {
		o.announced.Remove(h.waits) // it is in one of them
		o.later.Remove(h.waits)
		h.waits = nil
	}
}

// end makes sequences wait that have ended, and the floor with them. What is
// too much is not said: boards find it by the floor, or by a checkpoint.
func (o *outgoing) end(now time.Time, over []id.Sequence, floor id.Sequence) {
	if o.endedAt.IsZero() {
		o.endedAt = now
	}
	for _, s := range over {
		o.ended.add(s, s)
	}
	if n := len(o.ended.ranges) - maxEndedRanges; n > 0 {
		floor = max(floor, o.ended.ranges[n-1].last)
	}
	o.ended.cut(floor)
}

// next returns the announcement whose turn it is, nil if none waits.
func (o *outgoing) next() *held {
	for e := o.announced.Front(); e != nil; e = o.announced.Front() {
		h := e.Value.(*held)
		if h.pushed != h.newest() || o.waiting() <= somePressure {
			return h
		}
		o.announced.Remove(e)
		h.waits = o.later.PushBack(h)
	}
	if e := o.later.Front(); e != nil {
		return e.Value.(*held)
	}
	return nil
}

// waiting is how many announcements wait.
func (o *outgoing) waiting() int { return o.announced.Len() + o.later.Len() }

func (o *outgoing) isEmpty() bool { return o.waiting() == 0 && o.endedAt.IsZero() }

// inline is the length up to which an announcement carries its pages.
func (o *outgoing) inline() int {
	switch n := o.waiting(); {
	case n > highPressure:
		return 0
	case n > somePressure:
		return shortInline
	default:
		return wire.InlineBytes
	}
}

// Outgoing hands over what is to be gossiped to all: items worth at most so many
// bytes together, what has ended first, then announcements, the oldest first.
// What it returns is the caller's to send. The rest waits: at most one
// announcement for each live publication, and 16,384 ranges of sequences that
// have ended. Call it after every Announce and Release, and from time to time.
func (l *Log) Outgoing(now time.Time, bytes int) (items [][]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for !l.out.isEmpty() {
		item := l.nextItem(now, min(bytes, wire.ItemBytes))
		if item == nil {
			break
		}
		items = append(items, item)
		bytes -= len(item)
		l.stats.Items++
		l.stats.ItemBytes += uint64(len(item))
	}
	return items
}

// nextItem takes what fits into one item of so many bytes; nil: nothing does.
func (l *Log) nextItem(now time.Time, most int) []byte {
	p := l.packer(most)
	if p.Len() > most {
		return nil
	}
	said := id.Sequence(0)
	for s := range l.out.ended.all() {
		if !took(p.Release(s)) {
			break
		}
		said = s
	}
	l.out.ended.cut(said)
	if len(l.out.ended.ranges) > 0 {
		if p.Empty() {
			return nil
		}
		return p.Message()
	}
	floor := !l.out.endedAt.IsZero() // which every item says
	l.out.endedAt = time.Time{}
	for h := l.out.next(); h != nil; h = l.out.next() {
		if !l.put(p, now, h, h.unsaid(), l.out.inline(), p.Empty() && most == wire.ItemBytes) {
			break
		}
		h.said = h.newest()
		l.out.done(h)
	}
	if p.Empty() && !floor {
		return nil
	}
	return p.Message()
}

// unsaid is the steps that the newest one takes the place of, as far as gossip
// was told of them.
func (h *held) unsaid() []id.Sequence {
	i, _ := slices.BinarySearch(h.steps, h.said)
	return h.steps[i : len(h.steps)-1]
}

// put adds the newest announcement of h to an item, and with it the steps that
// it takes the place of: with its pages if it has at most inline bytes with
// them. False: it does not fit. alone: it is cut until it does; without pages
// its table is to be looked up, without streams these too, and steps are asked
// for.
func (l *Log) put(p *wire.Packer, now time.Time, h *held, steps []id.Sequence, inline int, alone bool) bool {
	a := h.entry
	a.TTLMillis = ttl(now, h.deadline)
	if h.bytes > inline {
		a.Lists = nil
	}
	for !took(p.Announce(&a, steps...)) {
		switch {
		case !alone:
			return false
		case a.Lists != nil:
			a.Lists = nil
		case a.Refs != nil:
			a.Refs = nil
		default:
			steps = steps[:len(steps)/2]
		}
	}
	if a.Lists == nil && h.bytes <= wire.InlineBytes {
		l.stats.Shortened++
	}
	return true
}

// packer begins an item.
func (l *Log) packer(most int) *wire.Packer { return wire.NewPacker(l.batch(nil), most) }

// took is for what was encoded before, above a lower floor.
func took(took bool, err error) bool {
	if err != nil {
		panic(err)
	}
	return took
}

// Told says that the one for whom the announcement of this sequence is meant
// has it: under pressure it is gossiped after those that nobody has.
func (l *Log) Told(sequence id.Sequence) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := l.steps[sequence]; h != nil {
		h.pushed = max(h.pushed, sequence)
	}
}

// Waits says whether the announcement of this sequence is still outgoing.
func (l *Log) Waits(sequence id.Sequence) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.steps[sequence]
	return h != nil && h.waits != nil && h.said < sequence
}

// Backlog is how many sequences are outgoing, and since when the oldest is.
func (l *Log) Backlog() (sequences int, oldest time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.backlog()
}

func (l *Log) backlog() (n int, oldest time.Time) {
	o := &l.out
	if n, oldest = int(o.ended.count), o.endedAt; n == 0 && !oldest.IsZero() {
		n = 1 // the floor has passed it
	}
	for _, waiting := range []*list.List{&o.announced, &o.later} {
		n += waiting.Len()
		if e := waiting.Front(); e != nil {
			if since := e.Value.(*held).since; oldest.IsZero() || since.Before(oldest) {
				oldest = since
			}
		}
	}
	return n, oldest
}
