package transfer

import (
	"container/heap"
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// ErrQueueFull: as many reads wait as may.
var ErrQueueFull = errors.New("too many reads wait")

// errLeft is for who waits at a place that another goroutine has given up.
var errLeft = errors.New("the place was given up")

// quantum is what a peer may begin in one round of its class, bytes.
const quantum = 4 << 20

// QueueOptions bound a Queue. A zero field means its default.
type QueueOptions struct {
	Bytes        int64 // under way at once; default 256 MiB
	Places       int   // under way at once; default 64
	PeerBytes    int64 // under way at once from one peer; default a quarter of Bytes
	PeerPlaces   int   // under way at once from one peer; default an eighth of Places, at least 1
	Waiting      int   // places that may wait; default 4096
	WaitingBytes int64 // of those that wait; default 64 GiB
}

func (o QueueOptions) withDefaults() QueueOptions {
	if o.Bytes <= 0 {
		o.Bytes = 256 << 20
	}
	if o.Places <= 0 {
		o.Places = 64
	}
	if o.PeerBytes <= 0 {
		o.PeerBytes = o.Bytes / 4
	}
	if o.PeerPlaces <= 0 {
		o.PeerPlaces = max(1, o.Places/8)
	}
	if o.Waiting <= 0 {
		o.Waiting = 4096
	}
	if o.WaitingBytes <= 0 {
		o.WaitingBytes = 64 << 30
	}
	return o
}

// Queue lets reads begin: urgent ones before others, and among these every
// peer its share of the bytes by deficit round robin. What one peer is asked
// for begins in the order in which it was asked. Safe for concurrent use; it
// starts no goroutine.
//
// A place that is larger than [QueueOptions.Bytes] runs alone, and one that is
// larger than WaitingBytes waits if nothing else does. A place whose turn has
// come, but which does not fit in beside what is under way, holds back all that
// come after it, so that small ones cannot keep it waiting; an urgent one holds
// back those that are not urgent too. Urgent ones go before what is not urgent
// even then.
//
// A peer that answers slowly, or not at all, holds nobody else back: when the
// turn of its place has come, but the peer is at its cap, PeerPlaces or
// PeerBytes, then what it is asked for in that class is set aside until one of
// its places leaves, and the others go on, also those that are not urgent if all
// that is urgent is set aside. It keeps what it could pay with, and gathers no
// more. A place that is larger than PeerBytes runs as the only one of its peer,
// and none of the peer's overtakes it but an urgent one.
type Queue struct {
	o   QueueOptions
	now chan struct{} // closed: the turn of who need not wait

	mu       sync.Mutex
	underway Load
	peers    map[id.Life]*peer // those of which something waits or is under way
	classes  [2]class          // others, urgent
	arrivals list.List         // of *Place: all that wait, as they joined
}

// Load is a number of places and the sum of their bytes.
type Load struct {
	Places int
	Bytes  int64
}

func (l *Load) add(p *Place) { l.Places++; l.Bytes += p.bytes }
func (l *Load) sub(p *Place) { l.Places--; l.Bytes -= p.bytes }

// admits reports whether p may be under way beside l, of which so much may be.
func (l *Load) admits(p *Place, places int, bytes int64) bool {
	return l.Places == 0 || l.Places < places && p.bytes <= bytes-l.Bytes
}

// peer is what is asked of one peer.
type peer struct {
	life     id.Life
	underway Load
	flows    [2]*flow // others, urgent; nil if none waits
}

// class is what waits and is equally urgent.
//
// It is a deficit round robin that visits nobody in vain: a flow knows the
// round in which its first place can be paid for, and the next flow to be
// served is the top of a heap. So a large place, which saves for many rounds,
// costs no more than a small one.
type class struct {
	load  Load
	due   flows // all but those that are set aside
	round int64 // the latest whose turn has come: this round,
	order int64 // and this flow in it
	last  int64 // order given to a flow
}

// flow is what waits in a class for one peer. Each visit of a round gives it a
// quantum if it lacks one for its first place.
type flow struct {
	places list.List // of *Place, never empty
	order  int64     // of flows in a round
	credit int64     // bytes that it might begin once visited in round seen
	seen   int64
	lacks  int64 // quanta that it lacked then for its first place
	due    int64 // round of its turn, in which it can pay for its first place
	index  int   // in the heap; aside if it is not there
}

// aside is the index of a flow whose turn had come when its peer was at its cap.
const aside = -1

// Place is a read's place in the queue: it waits, then it is under way, then it
// has left. Safe for concurrent use.
type Place struct {
	q     *Queue
	peer  *peer
	bytes int64
	turn  chan struct{} // closed when it has begun or left

	// guarded by q.mu
	phase   phase
	urgent  bool
	joined  time.Time
	inFlow  *list.Element // of its peer's flow, while it waits
	arrival *list.Element
}

type phase int

const (
	waiting phase = iota
	begun
	left
)

// NewQueue returns an empty queue.
func NewQueue(o QueueOptions) *Queue {
	q := &Queue{o: o.withDefaults(), now: make(chan struct{}), peers: make(map[id.Life]*peer)}
	close(q.now)
	return q
}

// Join takes a place for a read of so many bytes from the peer. Whoever has it
// calls Wait before it reads and Leave at the end, whatever happened. If too
// much waits already the error wraps [ErrQueueFull].
func (q *Queue) Join(life id.Life, bytes int64, urgent bool) (*Place, error) {
	p := &Place{q: q, bytes: max(bytes, 0), urgent: urgent}
	q.mu.Lock()
	defer q.mu.Unlock()
	p.peer = q.peers[life]
	if p.peer == nil {
		p.peer = &peer{life: life}
	}
	if q.first(p) && !q.capped(p) && q.fits(p) {
		p.turn = q.now
		q.begin(p)
		q.peers[life] = p.peer
		q.advance() // what held others back may be at its peer's cap now
		return p, nil
	}
	if err := q.full(p); err != nil {
		return nil, fmt.Errorf("queue a read of %d bytes from %s: %w", bytes, life, err)
	}
	p.turn = make(chan struct{})
	p.joined = time.Now()
	p.arrival = q.arrivals.PushBack(p)
	q.add(p)
	q.peers[life] = p.peer
	q.advance() // p does not begin, but its turn may have come, or it sets another aside
	return p, nil
}

// full says which bound keeps p from waiting.
func (q *Queue) full(p *Place) error {
	load := q.classes[0].load
	load.Places += q.classes[1].load.Places
	load.Bytes += q.classes[1].load.Bytes
	switch {
	case load.Places >= q.o.Waiting:
		return fmt.Errorf("%w: %d wait, at most %d may: send less at once, or raise transfer.limits.waiting", ErrQueueFull, load.Places, q.o.Waiting)
	case load.Places > 0 && p.bytes > q.o.WaitingBytes-load.Bytes:
		return fmt.Errorf("%w: %d of %d bytes wait, at most %d bytes may: send less at once", ErrQueueFull, load.Places, load.Bytes, q.o.WaitingBytes)
	}
	return nil
}

// Wait returns nil at the place's turn. If ctx ends first the place is given up
// and the error wraps the cause.
func (p *Place) Wait(ctx context.Context) error {
	select {
	case <-p.turn:
	default:
		select {
		case <-p.turn:
		case <-ctx.Done():
			p.Leave()
			return fmt.Errorf("wait to read from %s: %w", p.peer.life, context.Cause(ctx))
		}
	}
	p.q.mu.Lock()
	defer p.q.mu.Unlock()
	if p.phase == left {
		return fmt.Errorf("wait to read from %s: %w", p.peer.life, errLeft)
	}
	return nil
}

// Urge makes the place urgent from now on, the last of its peer's. It does
// nothing once the read has begun.
func (p *Place) Urge() {
	q := p.q
	q.mu.Lock()
	defer q.mu.Unlock()
	if p.phase != waiting || p.urgent {
		return
	}
	q.remove(p)
	p.urgent = true
	q.add(p)
	q.advance()
}

// Leave gives the place up, whether it waits or is under way. Only the first
// call counts.
func (p *Place) Leave() {
	q := p.q
	q.mu.Lock()
	defer q.mu.Unlock()
	switch p.phase {
	case waiting:
		q.remove(p)
		q.arrivals.Remove(p.arrival)
		close(p.turn) // another goroutine may wait for it
	case begun:
		q.underway.sub(p)
		p.peer.underway.sub(p)
		q.resume(p.peer)
	case left:
		return
	}
	p.phase = left
	if p.peer.underway.Places == 0 && p.peer.flows == [2]*flow{} {
		delete(q.peers, p.peer.life)
	}
	q.advance()
}

// QueueStats is a snapshot of a queue.
type QueueStats struct {
	UnderWay Load
	Urgent   Load          // that wait
	Other    Load          // that wait
	Oldest   time.Duration // how long the longest has waited so far, 0 if none does
}

// Stats may be called at any time.
func (q *Queue) Stats() QueueStats {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := QueueStats{UnderWay: q.underway, Urgent: q.classes[1].load, Other: q.classes[0].load}
	if first := q.arrivals.Front(); first != nil {
		s.Oldest = time.Since(first.Value.(*Place).joined)
	}
	return s
}

// class is the index of the class that p is in.
func (p *Place) class() int {
	if p.urgent {
		return 1
	}
	return 0
}

// first reports whether no turn comes before that of p, which has not joined.
func (q *Queue) first(p *Place) bool {
	return p.peer.flows[p.class()] == nil && len(q.classes[1].due) == 0 && (p.urgent || len(q.classes[0].due) == 0)
}

// fits reports whether p may be under way beside all that is.
func (q *Queue) fits(p *Place) bool {
	return q.underway.admits(p, q.o.Places, q.o.Bytes)
}

// capped reports whether p has to wait for others of its peer to leave.
func (q *Queue) capped(p *Place) bool {
	return !p.urgent && p.peer.flows[1] != nil || !p.peer.underway.admits(p, q.o.PeerPlaces, q.o.PeerBytes)
}

func (q *Queue) begin(p *Place) {
	p.phase = begun
	q.underway.add(p)
	p.peer.underway.add(p)
}

// advance lets begin whatever may now.
func (q *Queue) advance() {
	for {
		p := q.next()
		if p == nil || !q.fits(p) {
			return
		}
		p.peer.flows[p.class()].credit -= p.cost() // next has caught up
		q.remove(p)
		q.arrivals.Remove(p.arrival)
		q.begin(p)
		close(p.turn)
	}
}

// next is the place whose turn it is, nil if none waits that is not set aside.
// It sets aside what is at its cap before. What joins later comes later.
func (q *Queue) next() *Place {
	for i := range q.classes {
		c := &q.classes[len(q.classes)-1-i]
		for len(c.due) > 0 {
			f := c.due[0]
			c.round, c.order = f.due, f.order
			f.catchUp(c)
			p := f.first()
			if !q.capped(p) {
				return p
			}
			heap.Pop(&c.due)
		}
	}
	return nil
}

// resume ends that flows of the peer are set aside. If one still has to wait,
// it is set aside again at its next turn.
func (q *Queue) resume(of *peer) {
	for i, f := range of.flows {
		if f != nil && f.index == aside {
			c := &q.classes[i]
			f.catchUp(c)
			f.settle(c)
			heap.Push(&c.due, f)
		}
	}
}

// add puts p at the end of its peer's flow. A new flow is first visited in the
// next round: else a peer with one place at a time were in each round often.
func (q *Queue) add(p *Place) {
	i := p.class()
	c, f := &q.classes[i], p.peer.flows[i]
	c.load.add(p)
	if f != nil {
		p.inFlow = f.places.PushBack(p)
		return
	}
	c.last++
	f = &flow{order: c.last, seen: c.round}
	p.peer.flows[i] = f
	p.inFlow = f.places.PushBack(p)
	f.settle(c)
	heap.Push(&c.due, f)
}

// remove takes p out of what waits. Its peer's flows resume: the first place of
// this one may be another now, and the other may have waited for it.
func (q *Queue) remove(p *Place) {
	i := p.class()
	c, f := &q.classes[i], p.peer.flows[i]
	c.load.sub(p)
	f.catchUp(c)
	f.places.Remove(p.inFlow)
	switch {
	case f.places.Len() == 0: // what it has saved is lost: who does not ask saves nothing
		if f.index != aside {
			heap.Remove(&c.due, f.index)
		}
		p.peer.flows[i] = nil
	case f.index != aside:
		f.settle(c)
		heap.Fix(&c.due, f.index)
	}
	q.resume(p.peer)
}

// cost is what a place counts for; none is free, so that a round has an end.
func (p *Place) cost() int64 { return max(p.bytes, 1) }

func (f *flow) first() *Place { return f.places.Front().Value.(*Place) }

// catchUp gives f what the visits since it was seen have given it. It lacks
// nothing from its turn on, so that it gathers nothing while it is set aside.
func (f *flow) catchUp(c *class) {
	visited := c.round
	if f.order > c.order {
		visited-- // its turn in this round is to come
	}
	if visited > f.seen {
		given := min(visited-f.seen, f.lacks)
		f.credit += given * quantum
		f.lacks -= given
		f.seen = visited
	}
}

// settle finds the turn of f, which has caught up.
func (f *flow) settle(c *class) {
	f.lacks = 0
	if lacks := f.first().cost() - f.credit; lacks > 0 {
		f.lacks = (lacks-1)/quantum + 1
	}
	f.due = f.seen + f.lacks
	if f.lacks == 0 && f.order != c.order {
		f.due++ // it is visited again before
	}
}

// flows is a heap of the flows by their turns.
type flows []*flow

func (h flows) Len() int { return len(h) }
func (h flows) Less(i, j int) bool {
	return h[i].due < h[j].due || h[i].due == h[j].due && h[i].order < h[j].order
}

func (h flows) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *flows) Push(x any) {
	f := x.(*flow)
	f.index = len(*h)
	*h = append(*h, f)
}

func (h *flows) Pop() any {
	last := len(*h) - 1
	f := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	f.index = aside
	return f
}
