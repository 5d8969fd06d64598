package node

import (
	"cmp"
	"container/heap"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

// How a publication ends by itself; whoever ends one says another word.
const (
	holdReleased = "released" // every reader that it was for has acknowledged
	holdExpired  = "expired"  // its hold or its greatest age ran out
	// Its pages went to the host, and it is published again under another name.
	holdOffloaded = "offloaded"
)

// ackResult is what became of an acknowledgement.
type ackResult string

func (r ackResult) String() string { return string(r) }

const (
	ackCounted   ackResult = "counted"   // it ended a lease, or was the first final word of its reader
	ackDuplicate ackResult = "duplicate" // it changed nothing
	ackLate      ackResult = "late"      // the publication had ended
	ackUnknown   ackResult = "unknown"   // there is no such publication, or it ended long ago
)

// holdTimers are the owner's timers and bounds. A zero field means its default.
type holdTimers struct {
	hold      time.Duration // an unread publication keeps its pages; default 30 s
	lease     time.Duration // from each grant or renewal; default 20 s
	maxHold   time.Duration // since the last publish; default 900 s
	tombstone time.Duration // how long an ended publication is remembered; default 600 s

	live       int // publications; default 16,383
	readers    int // that one publication may wait for, and leases on it; default 256
	leases     int // on all publications; default 65,536
	tombstones int // default 65,536
}

func (t holdTimers) withDefaults() holdTimers {
	t.hold = cmp.Or(t.hold, 30*time.Second)
	t.lease = cmp.Or(t.lease, 20*time.Second)
	t.maxHold = cmp.Or(t.maxHold, 900*time.Second)
	t.tombstone = cmp.Or(t.tombstone, 600*time.Second)
	t.live = cmp.Or(t.live, 16_383)
	t.readers = cmp.Or(t.readers, 256)
	t.leases = cmp.Or(t.leases, 65_536)
	t.tombstones = cmp.Or(t.tombstones, 65_536)
	return t
}

// holdOptions are what a publish asks for.
type holdOptions struct {
	readers int           // reader nodes that must acknowledge; 0: 1
	hold    time.Duration // 0: the node's; at most maxHold
	final   bool          // nothing will be published after it
}

// reader names one lease on a publication: one attempt of one life of a node.
type reader struct {
	life    id.Life
	attempt uint32
}

// holds is the owner's table of publications that keep their pages, and of the
// leases on them.
//
// A publication is OPEN until its final publish, SEALED from then on, and ends
// exactly once:
//
//   - OPEN or SEALED, when maxHold has passed since its last publish;
//   - SEALED, while no lease is live, when as many reader nodes as it is for
//     have acknowledged, or when its hold has run out;
//   - when [holds.end] is called.
//
// Whoever was told so, by end or by [holds.due], changes its seal word and then
// lets its pages go. From its end on no lease is granted.
//
// The type takes the time from its callers and starts nothing. It is safe for
// concurrent use.
type holds struct {
	timers holdTimers

	mu       sync.Mutex
	live     map[id.Sequence]*held
	heap     heldHeap // of live, by check
	count    int      // of leases, those included that ran out since they were looked at
	tombs    map[id.Sequence]tomb
	order    []id.Sequence // of tombs, oldest first
	counters holdCounters
}

// held is one live publication.
type held struct {
	seq       id.Sequence
	first     time.Time // publish
	last      time.Time // publish
	holdUntil time.Time // counts once it is final
	final     bool
	readers   int
	done      map[id.Node]bool // reader nodes that have said their final word
	leases    map[reader]time.Time

	check time.Time // when to look at it: the end of it or of a lease
	index int       // in the heap
}

type tomb struct {
	cause string
	at    time.Time
	final bool        // it was SEALED
	next  id.Sequence // what goes on for it; 0: nothing
	seal  uint32      // of one that has a next: the word that references to it name
}

// heldEnd is a publication that has ended.
type heldEnd struct {
	seq     id.Sequence
	cause   string
	readers []id.Life // who held a lease to the end
}

func newHolds(t holdTimers) *holds {
	return &holds{
		timers: t.withDefaults(), live: make(map[id.Sequence]*held), tombs: make(map[id.Sequence]tomb),
		counters: holdCounters{acks: make(map[ackResult]uint64)},
	}
}

// publish holds a publication, or notes that it has grown. The error wraps
// [publish.ErrEnded], [manager.ErrFinal], or [publish.ErrFull].
func (h *holds) publish(now time.Time, seq id.Sequence, o holdOptions) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, err := h.find(now, seq)
	switch {
	case p != nil && p.final:
		err = manager.ErrFinal
	case p == nil && err == nil && len(h.live) >= h.timers.live:
		err = fmt.Errorf("%d are held: %w", len(h.live), publish.ErrFull)
	}
	if err != nil {
		return fmt.Errorf("hold publication %d: %w", seq, err)
	}
	if p == nil {
		h.forget(now, h.timers.tombstones)
		p = &held{seq: seq, first: now, done: make(map[id.Node]bool), leases: make(map[reader]time.Time)}
		h.live[seq] = p
		heap.Push(&h.heap, p)
	}
	p.last, p.final = now, o.final
	p.readers = min(max(1, o.readers), h.timers.readers)
	p.holdUntil = now.Add(min(cmp.Or(max(0, o.hold), h.timers.hold), h.timers.maxHold))
	h.fix(p, now)
	return nil
}

// lease grants a reader its lease or renews it, and returns how long it lasts
// from now. The error wraps [publish.ErrEnded], [publish.ErrUnknown], or
// [publish.ErrFull]: the reader may read all the same, and ends stale at worst.
func (h *holds) lease(now time.Time, seq id.Sequence, r reader) (time.Duration, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, err := h.find(now, seq)
	renewed := false
	switch {
	case err != nil:
	case p == nil:
		err = publish.ErrUnknown
	default:
		_, renewed = p.leases[r]
		if !renewed && (len(p.leases) >= h.timers.readers || h.count >= h.timers.leases) {
			err = fmt.Errorf("%d leases on it and %d in all: %w", len(p.leases), h.count, publish.ErrFull)
		}
	}
	if err != nil {
		h.counters.refused++
		return 0, fmt.Errorf("lease publication %d: %w", seq, err)
	}
	if renewed {
		h.counters.renewed++
	} else {
		h.counters.granted++
		h.count++
	}
	lasts := min(h.timers.lease, p.last.Add(h.timers.maxHold).Sub(now))
	p.leases[r] = now.Add(lasts)
	h.fix(p, now)
	return lasts, nil
}

// acknowledge ends this reader's lease and no other. LANDED of a SEALED
// publication, and DECLINED, also count the reader's node, once. If that was
// the last one that the publication is for, due returns it from now on.
func (h *holds) acknowledge(now time.Time, seq id.Sequence, r reader, outcome kvferrypb.CompleteItem_Outcome) ackResult {
	h.mu.Lock()
	defer h.mu.Unlock()
	// What was said of the one that has ended counts for the one that goes on.
	sealed := true
	if t, ok := h.tombs[seq]; ok && t.next != 0 {
		sealed = t.final
		seq, _ = h.newest(seq)
	}
	p, err := h.find(now, seq)
	result := ackDuplicate
	switch {
	case err != nil:
		result = ackLate
	case p == nil:
		result = ackUnknown
	default:
		if _, ok := p.leases[r]; ok {
			delete(p.leases, r)
			h.count--
			result = ackCounted
		}
		// What has landed of an OPEN one is not all of it yet.
		last := outcome == kvferrypb.CompleteItem_DECLINED || outcome == kvferrypb.CompleteItem_LANDED && p.final && sealed
		if last && !p.done[r.life.Node] && len(p.done) < p.readers {
			p.done[r.life.Node] = true
			result = ackCounted
		}
		h.fix(p, now)
	}
	h.counters.acks[result]++
	return result
}

// end ends a publication now, whatever its leases, and returns who held one.
// Of one that has ended, or never was, it returns nobody and changes nothing.
func (h *holds) end(now time.Time, seq id.Sequence, cause string) []id.Life {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.live[seq]
	if p == nil {
		return nil
	}
	h.drop(p, now)
	return h.bury(p, now, cause).readers
}

// succeed ends a publication, which goes on as another one: with its readers and
// those of them that are done, with its leases, and until the same time. seal is
// the word that it had. It returns who held a lease; ok is false if it had ended.
func (h *holds) succeed(now time.Time, seq, next id.Sequence, seal uint32) (readers []id.Life, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.live[seq]
	if p == nil {
		return nil, false
	}
	h.drop(p, now)
	readers = h.bury(p, now, holdOffloaded).readers
	t := h.tombs[seq]
	t.next, t.seal = next, seal
	h.tombs[seq] = t
	heir := *p
	heir.seq = next
	h.count += len(heir.leases)
	h.live[next] = &heir
	heap.Push(&h.heap, &heir)
	h.fix(&heir, now)
	return readers, true
}

// successor is what goes on for a publication that has ended, and the seal word
// that it had itself; ok is false if there is none.
func (h *holds) successor(seq id.Sequence) (next id.Sequence, seal uint32, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	next, ok = h.newest(seq)
	return next, h.tombs[seq].seal, ok
}

// newest follows a publication to the last one that goes on for it.
func (h *holds) newest(seq id.Sequence) (_ id.Sequence, moved bool) {
	for h.tombs[seq].next != 0 {
		seq, moved = h.tombs[seq].next, true
	}
	return seq, moved
}

// due ends and returns every publication whose time has come, and drops every
// lease whose has. What it returns has ended already.
func (h *holds) due(now time.Time) []heldEnd {
	h.mu.Lock()
	defer h.mu.Unlock()
	var ended []heldEnd
	for len(h.heap) > 0 && !h.heap[0].check.After(now) {
		p := h.heap[0]
		h.drop(p, now)
		if cause := h.over(p, now); cause != "" {
			ended = append(ended, h.bury(p, now, cause))
		} else {
			h.fix(p, now)
		}
	}
	h.forget(now, h.timers.tombstones)
	return ended
}

// next is when due has work again. Every call of publish, lease, or
// acknowledge may bring it forward.
func (h *holds) next() (time.Time, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.heap) == 0 {
		return time.Time{}, false
	}
	return h.heap[0].check, true
}

// leased is how many leases are live.
func (h *holds) leased() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.count
}

// find returns a live publication, without the leases that have run out. The
// error is a [*holdEndedError] if it has ended; neither if it is unknown.
func (h *holds) find(now time.Time, seq id.Sequence) (*held, error) {
	if p := h.live[seq]; p != nil {
		h.drop(p, now)
		if cause := h.over(p, now); cause != "" {
			return nil, &holdEndedError{cause: cause}
		}
		return p, nil
	}
	if t, ok := h.tombs[seq]; ok && now.Sub(t.at) < h.timers.tombstone {
		return nil, &holdEndedError{cause: t.cause, ago: now.Sub(t.at)}
	}
	return nil, nil
}

// over returns the cause if the publication has ended by now, else "".
func (h *holds) over(p *held, now time.Time) string {
	switch {
	case p.end(h.timers.maxHold).After(now):
		return ""
	case p.final && len(p.done) >= p.readers:
		return holdReleased
	default:
		return holdExpired
	}
}

// end is when the publication ends if nothing more happens; the zero time is
// at once. Neither a hold nor a lease is granted beyond maxHold.
func (p *held) end(maxHold time.Duration) time.Time {
	if !p.final {
		return p.last.Add(maxHold)
	}
	var end time.Time
	if len(p.done) < p.readers {
		end = p.holdUntil
	}
	for _, until := range p.leases {
		if until.After(end) {
			end = until
		}
	}
	return end
}

// drop forgets the leases that have run out.
func (h *holds) drop(p *held, now time.Time) {
	for r, until := range p.leases {
		if !until.After(now) {
			delete(p.leases, r)
			h.count--
			h.counters.ranOut++
		}
	}
}

// fix files the publication under the time when it must be looked at next: the
// end of it, or of the first of its leases.
func (h *holds) fix(p *held, now time.Time) {
	p.check = p.end(h.timers.maxHold)
	for _, until := range p.leases {
		if until.Before(p.check) {
			p.check = until
		}
	}
	if p.check.Before(now) {
		p.check = now
	}
	heap.Fix(&h.heap, p.index)
}

// bury moves a publication from live to the tombstones.
func (h *holds) bury(p *held, now time.Time, cause string) heldEnd {
	heap.Remove(&h.heap, p.index)
	delete(h.live, p.seq)
	h.count -= len(p.leases)
	h.forget(now, h.timers.tombstones-1)
	h.tombs[p.seq] = tomb{cause: cause, at: now, final: p.final}
	h.order = append(h.order, p.seq)
	e := heldEnd{seq: p.seq, cause: cause}
	for r := range p.leases {
		e.readers = append(e.readers, r.life)
	}
	slices.SortFunc(e.readers, compareLives)
	e.readers = slices.Compact(e.readers)
	return e
}

func compareLives(a, b id.Life) int {
	return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Incarnation, b.Incarnation))
}

// forget drops the tombstones that are too old, and the oldest beyond most.
func (h *holds) forget(now time.Time, most int) {
	for len(h.order) > 0 && (len(h.order) > most || now.Sub(h.tombs[h.order[0]].at) >= h.timers.tombstone) {
		delete(h.tombs, h.order[0])
		h.order = h.order[1:]
	}
}

// holdEndedError says how a publication ended. It wraps [publish.ErrEnded].
type holdEndedError struct {
	cause string
	ago   time.Duration
}

func (e *holdEndedError) Error() string {
	return fmt.Sprintf("%v: %s %v ago", publish.ErrEnded, e.cause, e.ago.Round(time.Millisecond))
}

func (e *holdEndedError) Unwrap() error { return publish.ErrEnded }

// cause says how a publication ended, as long as that is remembered, also before
// due has returned it; else "".
func (h *holds) cause(now time.Time, seq id.Sequence) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if p := h.live[seq]; p != nil {
		return h.over(p, now)
	}
	return h.tombs[seq].cause
}

// heldView is one live publication, for people.
type heldView struct {
	final   bool
	age     time.Duration // since the first publish
	ends    time.Duration // from now, if nothing more happens
	readers int           // that it is for
	done    int           // of them
	leases  []id.Life     // who holds one
}

// look describes a live publication.
func (h *holds) look(now time.Time, seq id.Sequence) (heldView, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.live[seq]
	if p == nil {
		return heldView{}, false
	}
	v := heldView{
		final: p.final, age: now.Sub(p.first), ends: max(0, p.end(h.timers.maxHold).Sub(now)),
		readers: p.readers, done: len(p.done),
	}
	for r, until := range p.leases {
		if until.After(now) {
			v.leases = append(v.leases, r.life)
		}
	}
	slices.SortFunc(v.leases, compareLives)
	return v, true
}

// holdCounters count since the start.
type holdCounters struct {
	granted, renewed, refused, ranOut uint64 // leases
	acks                              map[ackResult]uint64
}

// holdStats are gauges and counters.
type holdStats struct {
	holdCounters
	open, sealed, leased int // live publications; leased are those of either kind with a lease
	leases               int
	tombstones           int
	oldest               time.Duration // age of the oldest live publication
}

func (h *holds) stats(now time.Time) holdStats {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := holdStats{holdCounters: h.counters, leases: h.count, tombstones: len(h.tombs)}
	s.acks = maps.Clone(h.counters.acks)
	for _, p := range h.live {
		switch {
		case len(p.leases) > 0:
			s.leased++
		case p.final:
			s.sealed++
		default:
			s.open++
		}
		s.oldest = max(s.oldest, now.Sub(p.first))
	}
	return s
}

// heldHeap is a heap of publications, those to be looked at first in front.
type heldHeap []*held

func (h heldHeap) Len() int           { return len(h) }
func (h heldHeap) Less(i, j int) bool { return h[i].check.Before(h[j].check) }
func (h heldHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

// Push and Pop are for package heap alone.
func (h *heldHeap) Push(x any) {
	p := x.(*held)
	p.index = len(*h)
	*h = append(*h, p)
}

func (h *heldHeap) Pop() any {
	last := len(*h) - 1
	p := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	return p
}
