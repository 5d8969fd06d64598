package publish

import (
	"cmp"
	"container/list"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
)

// Bounds of a log.
const (
	defaultWords = 16384   // seal words of a node
	maxSteps     = 200     // sequences of one growing publication that are remembered
	maxAnswer    = 64      // items that answer one nack
	answerRate   = 4 << 20 // bytes a second that answer nacks
	answerBurst  = 1 << 20
	maxEnded     = 16384 // requests whose publication is known to have ended
)

// LogOptions set up a Log. A zero field means its default.
type LogOptions struct {
	Life  id.Life // required
	Words int     // seal words: their indices are 0 to Words-1; default 16,384
	Live  int     // bound of live publications; default Words - 1
	Fast  bool    // checkpoints and beacons ten times as often, for tests
}

// Log is this node's own publications. One writer: this node.
type Log struct {
	life          id.Life
	hash          id.NodeHash
	live          int
	changed, idle time.Duration // between checkpoints

	mu       sync.Mutex
	next     id.Sequence // not used yet
	floor    id.Sequence // everything up to it has ended
	max      id.Sequence // the greatest that was announced or has ended
	sum      uint64      // of Mix(newest) over all that are announced
	open     int         // how many they are
	version  uint64
	held     map[manager.PublicationID]*held
	names    map[id.Sequence]*held
	steps    map[id.Sequence]*held // by any sequence of a live publication
	requests map[id.Request][]*held
	order    []id.Sequence // names, ascending; those that have ended go when they come to the front
	pending  []id.Sequence // names that are reserved, ascending
	words    fifo
	ended    endedRequests
	out      outgoing
	answers  budget
	coverage coverage
	stats    LogStats

	checkedAt time.Time
	checked   wire.Check // the last that was sent
	again     bool       // it said something new, and will be sent once more
}

// held is one publication, from Reserve to Release.
type held struct {
	id       manager.PublicationID
	name     id.Sequence
	seal     uint32
	steps    []id.Sequence // of its announcements, the newest last; none yet: reserved
	deadline time.Time
	value    manager.Publication
	entry    wire.Announcement // the newest, its TTL apart
	bytes    int               // with all its lists

	waits  *list.Element // nil: its newest announcement is not outgoing
	since  time.Time     // when it began to wait
	said   id.Sequence   // the newest step that was handed over for gossip; 0: none
	pushed id.Sequence   // the newest step that its target has
}

// Announced is what Announce returns.
type Announced struct {
	Name     id.Publication // named by the sequence of its first announcement
	Sequence id.Sequence    // of this announcement
	Seal     uint32         // index of its seal word
	Value    uint64         // what the word must hold
	// Full is the announcement with all its page lists, whatever their size, as
	// Push and Lookup carry it: a batch of one owner with this one announcement.
	Full []byte
}

// NewLog returns the empty log of a life.
func NewLog(o LogOptions) *Log {
	o.Words = cmp.Or(o.Words, defaultWords)
	o.Live = cmp.Or(o.Live, o.Words-1)
	l := &Log{
		life: o.Life, hash: o.Life.Node.Hash(), live: o.Live,
		changed: time.Second, idle: 10 * time.Second,
		next:     1,
		held:     make(map[manager.PublicationID]*held),
		names:    make(map[id.Sequence]*held),
		steps:    make(map[id.Sequence]*held),
		requests: make(map[id.Request][]*held),
		words:    newFIFO(o.Words),
		ended:    endedRequests{at: make(map[id.RequestHash]int)},
		answers:  budget{rate: answerRate, burst: answerBurst},
		coverage: newCoverage(o.Fast),
		checked:  wire.Check{Owner: o.Life.Node.Hash(), Incarnation: o.Life.Incarnation},
	}
	if o.Fast {
		l.changed, l.idle = l.changed/10, l.idle/10
	}
	return l
}

// Reserve names a publication and takes a seal word for it, before the word is
// stored and anything is sent. Of a publication that has a name it returns the
// same again. The error wraps [ErrFull]. A reservation ends by [Log.Release],
// announced or not.
func (l *Log) Reserve(p manager.PublicationID) (name id.Publication, seal uint32, value uint64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.held[p]
	if h == nil {
		if len(l.held) >= l.live {
			return name, 0, 0, fmt.Errorf("reserve a publication: %d are live: %w", len(l.held), ErrFull)
		}
		seal, ok := l.words.take()
		if !ok {
			return name, 0, 0, fmt.Errorf("reserve a publication: all %d seal words are taken: %w", l.words.size(), ErrFull)
		}
		// The one sequence whose word would say "not held" names nothing.
		if _, ok := id.SealValue(l.life.Incarnation, l.next); !ok {
			l.next++
		}
		h = &held{id: p, name: l.next, seal: seal}
		l.next++
		l.held[p], l.names[h.name] = h, h
		l.order = append(l.order, h.name)
		l.pending = append(l.pending, h.name)
	}
	value, _ = id.SealValue(l.life.Incarnation, h.name)
	return l.publication(h), h.seal, value, nil
}

// Announce appends an entry: the publication, new, grown, or in another state
// and with other pages, which must have been reserved and whose seal word the
// caller has stored. It is outgoing from now on. hold is how long others may
// take it for held; see [Log.Extend]. The log keeps p, and its pages must not
// change.
//
// The error wraps [ErrUnknown] if it was not reserved, [ErrConflict] if it is
// another request or content epoch than before, has shrunk, or was final and
// differs in more than the states and pages of its streams, [wire.ErrMessage] if
// its streams are not what [wire.Ref] says, and [ErrFull] if it has more than
// [wire.MaxPages] pages; then nothing has changed.
func (l *Log) Announce(now time.Time, p manager.Publication, hold time.Duration) (Announced, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.held[p.ID]
	if h == nil {
		return Announced{}, fmt.Errorf("announce publication %d: not reserved: %w", p.ID, ErrUnknown)
	}
	if err := h.follows(p); err != nil {
		return Announced{}, fmt.Errorf("announce %s: %w", l.publication(h), err)
	}
	a, err := toWire(p)
	if err != nil {
		return Announced{}, fmt.Errorf("announce %s: %w", l.publication(h), err)
	}
	a.Publication, a.Sequence, a.Seal = h.name, h.name, h.seal
	first := len(h.steps) == 0
	if !first {
		a.Sequence = l.next
	}
	deadline := now.Add(hold)
	full, err := l.encode(now, deadline, a)
	if err != nil {
		return Announced{}, fmt.Errorf("announce %s: %w", l.publication(h), err)
	}

	// Nothing fails from here on.
	if first {
		l.open++
		l.settle(h.name)
		l.requests[p.Request] = append(l.requests[p.Request], h)
		l.ended.remove(p.Request.Hash())
	} else {
		l.next++
		l.sum ^= wire.Mix(uint64(h.newest()))
		if len(h.steps) == maxSteps {
			delete(l.steps, h.steps[0])
			h.steps = slices.Delete(h.steps, 0, 1)
		}
		l.overtaken(h)
	}
	h.steps = append(h.steps, a.Sequence)
	l.steps[a.Sequence] = h
	l.sum ^= wire.Mix(uint64(a.Sequence))
	l.max = max(l.max, a.Sequence)
	l.version++
	h.deadline, h.value, h.entry, h.bytes = deadline, p, a, len(full)
	l.out.announce(now, h)
	l.stats.Announced++
	value, _ := id.SealValue(l.life.Incarnation, h.name)
	return Announced{Name: l.publication(h), Sequence: a.Sequence, Seal: h.seal, Value: value, Full: full}, nil
}

// overtaken counts an announcement that was never gossiped and never will be.
func (l *Log) overtaken(h *held) {
	if h.waits != nil {
		l.stats.Overtaken++
	}
}

// follows reports why p can't be the next entry of h.
func (h *held) follows(p manager.Publication) error {
	switch {
	case len(h.steps) == 0:
		return nil
	case p.Request != h.value.Request || p.ContentEpoch != h.value.ContentEpoch:
		return fmt.Errorf("request %q at content epoch %d was %q at %d: %w",
			string(p.Request), p.ContentEpoch, string(h.value.Request), h.value.ContentEpoch, ErrConflict)
	case h.value.Final && !p.Final:
		return fmt.Errorf("it was final: %w", ErrConflict)
	}
	label, rank, ok := departs(h.value.Streams, p.Streams, h.value.Final)
	switch {
	case ok && h.value.Final:
		return fmt.Errorf("it was final, and label %q of rank %d is another: %w", string(label), rank, ErrConflict)
	case ok:
		return fmt.Errorf("label %q of rank %d has shrunk: %w", string(label), rank, ErrConflict)
	}
	return nil
}

func (h *held) newest() id.Sequence { return h.steps[len(h.steps)-1] }

// Extend moves the end of a publication's hold as others see it. Those that
// have heard of it already don't learn it, but whoever asks from now on does.
// The error wraps [ErrUnknown].
func (l *Log) Extend(p manager.PublicationID, until time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.held[p]
	if h == nil || len(h.steps) == 0 {
		return fmt.Errorf("extend publication %d: %w", p, ErrUnknown)
	}
	h.deadline = until
	return nil
}

// Release ends a publication, or gives a reservation back: its seal word has
// been cleared. The word's slot may be used again. Its end is outgoing from now
// on, and its announcement is not, if it still was. The error wraps
// [ErrUnknown].
func (l *Log) Release(now time.Time, p manager.PublicationID) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.held[p]
	if h == nil {
		return fmt.Errorf("release publication %d: %w", p, ErrUnknown)
	}
	over := h.steps
	if len(over) == 0 {
		over = []id.Sequence{h.name} // somebody may miss it
		l.settle(h.name)
	} else {
		l.open--
		l.sum ^= wire.Mix(uint64(h.newest()))
		l.forgetRequest(h)
		l.overtaken(h)
		l.out.done(h)
		l.stats.Released++
	}
	for _, s := range h.steps {
		delete(l.steps, s)
	}
	delete(l.held, p)
	delete(l.names, h.name)
	l.words.give(h.seal)
	l.version++
	l.raise()
	l.max = max(l.max, l.floor, over[len(over)-1])
	l.out.end(now, over, l.floor)
	return nil
}

// settle takes a name off the pending ones.
func (l *Log) settle(name id.Sequence) {
	if i, ok := slices.BinarySearch(l.pending, name); ok {
		l.pending = slices.Delete(l.pending, i, i+1)
	}
}

func (l *Log) forgetRequest(h *held) {
	r := h.value.Request
	all := slices.DeleteFunc(l.requests[r], func(other *held) bool { return other == h })
	if len(all) > 0 {
		l.requests[r] = all
		return
	}
	delete(l.requests, r)
	l.ended.add(h.entry.Request)
}

// raise moves the floor under the oldest publication. It stays under that
// one's name, however far it has grown: what is at or under the floor has
// ended, whole publications.
func (l *Log) raise() {
	ended := func(s id.Sequence) bool { return l.names[s] == nil }
	for len(l.order) > 0 && ended(l.order[0]) {
		l.order = l.order[1:]
	}
	if len(l.order) > 2*len(l.names)+64 {
		l.order = slices.DeleteFunc(slices.Clone(l.order), ended)
	}
	l.floor = l.next - 1
	if len(l.order) > 0 {
		l.floor = l.order[0] - 1
	}
}

// Find returns a live publication as Push and Lookup carry it: by the sequence
// that names it, or the newest of a request with sequence 0. With both, both
// must fit. The error wraps [ErrEnded] if it is known to have ended, else
// [ErrUnknown].
func (l *Log) Find(now time.Time, sequence id.Sequence, request id.Request) (full []byte, name id.Publication, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var h *held
	if sequence == 0 {
		all := l.requests[request]
		if len(all) == 0 {
			if l.ended.has(request.Hash()) {
				return nil, name, fmt.Errorf("find request %q: %w", string(request), ErrEnded)
			}
			return nil, name, fmt.Errorf("find request %q: %w", string(request), ErrUnknown)
		}
		h = all[len(all)-1]
	} else {
		name = id.Publication{Owner: l.life, Sequence: sequence}
		h = l.names[sequence]
		switch {
		case h == nil && sequence < l.next:
			return nil, name, fmt.Errorf("find %s: %w", name, ErrEnded)
		case h == nil || len(h.steps) == 0:
			return nil, name, fmt.Errorf("find %s: %w", name, ErrUnknown)
		case request != "" && request != h.value.Request:
			return nil, name, fmt.Errorf("find %s: it is not of request %q: %w", name, string(request), ErrUnknown)
		}
	}
	full, err = l.full(now, h)
	return full, l.publication(h), err
}

// ByName maps a sequence that names a publication, or a reservation, to the
// manager's id.
func (l *Log) ByName(sequence id.Sequence) (manager.PublicationID, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	h := l.names[sequence]
	if h == nil {
		return 0, false
	}
	return h.id, true
}

// Live is the whole log for Snapshot: the full announcements of all live
// publications in the order of their sequences and, as the last item, the
// checkpoint that goes with them. [Board.Sync] takes it.
func (l *Log) Live(now time.Time) [][]byte {
	live, batch, check := l.snapshot(now)
	items := make([][]byte, 0, len(live)+1)
	for i := range live {
		batch.Announcements = live[i : i+1]
		items = append(items, mustEncode(wire.Batches{batch}))
	}
	return append(items, mustEncode(&check))
}

// snapshot is what Live encodes, which takes too long to be done under the mutex.
func (l *Log) snapshot(now time.Time) (live []wire.Announcement, batch wire.Batch, check wire.Check) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, h := range l.held {
		if len(h.steps) > 0 {
			a := h.entry
			a.TTLMillis = ttl(now, h.deadline)
			live = append(live, a)
		}
	}
	slices.SortFunc(live, func(a, b wire.Announcement) int { return cmp.Compare(a.Sequence, b.Sequence) })
	l.stats.Snapshots++
	return live, l.batch(nil), l.check()
}

// Nack answers a request for missing sequences: what is live is announced
// again, what has ended is released. What has not been announced yet is passed
// over. A long answer is cut, and when very much is asked for, there is none:
// it will be asked for again.
func (l *Log) Nack(now time.Time, n *wire.Nack) Output {
	l.mu.Lock()
	defer l.mu.Unlock()
	if n.Owner != l.hash || n.Incarnation != l.life.Incarnation {
		return Output{}
	}
	if !l.answers.has(now) {
		l.stats.NacksRefused++
		return Output{}
	}
	l.stats.Nacks++
	var out Output
	p := l.packer(wire.ItemBytes)
	send := func() {
		item := p.Message()
		l.answers.spend(len(item))
		out.Send = append(out.Send, Directed{To: n.Asker, Item: item})
		p = l.packer(wire.ItemBytes)
	}
	ended, live := l.missed(n.Missing)
	for _, s := range ended {
		if !took(p.Release(s)) {
			send()
			took(p.Release(s))
		}
		l.stats.Repairs++
	}
	for _, m := range live {
		if !l.put(p, now, m.held, m.steps, wire.InlineBytes, p.Empty()) {
			send()
			if len(out.Send) == maxAnswer {
				return out
			}
			l.put(p, now, m.held, m.steps, wire.InlineBytes, true)
		}
		l.stats.Repairs++
	}
	if !p.Empty() || len(out.Send) == 0 { // it says the floor
		send()
	}
	return out
}

// missed is one live publication of which somebody lacks something.
type missed struct {
	*held
	steps []id.Sequence // those that it lacks, but for the newest
}

// missed sorts the sequences that somebody lacks.
func (l *Log) missed(missing []id.Sequence) (ended []id.Sequence, live []missed) {
	missing = slices.Sorted(slices.Values(missing))
	missing = slices.Compact(missing[:min(len(missing), wire.MaxMissing)])
	at := make(map[*held]int)
	for _, s := range missing {
		switch h := l.steps[s]; {
		case s <= l.floor: // which every message says
		case s > l.max || slices.Contains(l.pending, s):
		case h == nil:
			ended = append(ended, s)
		default:
			// A step that has ended goes with the one that took its place,
			// so that nobody takes the publication for ended.
			i, ok := at[h]
			if !ok {
				i = len(live)
				at[h] = i
				live = append(live, missed{held: h})
			}
			if s != h.newest() {
				live[i].steps = append(live[i].steps, s)
			}
		}
	}
	return ended, live
}

// Tick returns the checkpoint when one is due: a second after the last one if
// something has changed, once more after another second, since it may be lost
// like what it tells of, else after ten. It waits for what is outgoing, but for
// no more than the ten: before that, nobody can have what it speaks of.
func (l *Log) Tick(now time.Time) Output {
	l.mu.Lock()
	defer l.mu.Unlock()
	since, isNew := now.Sub(l.checkedAt), l.version != l.checked.Version
	if since < l.changed || since < l.idle && (!isNew && !l.again || !l.out.isEmpty()) {
		return Output{}
	}
	l.again = isNew
	l.version++
	l.checkedAt, l.checked = now, l.check()
	return Output{Broadcast: [][]byte{mustEncode(&l.checked)}}
}

// Check is what others are told by push/pull: the current checkpoint, or, while
// anything is outgoing, the last that was sent.
func (l *Log) Check() wire.Check {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.out.isEmpty() {
		return l.check()
	}
	return l.checked
}

// check ends before the first reservation, which has not been announced and
// has not ended: nobody can be told yet which it will be.
func (l *Log) check() wire.Check {
	c := wire.Check{
		Owner: l.hash, Incarnation: l.life.Incarnation, Floor: l.floor, Max: l.max,
		Hash: l.sum, Live: uint32(l.open), Version: l.version,
	}
	if len(l.pending) > 0 && l.pending[0] <= l.max {
		c.Max = l.pending[0] - 1
		for s := l.pending[0]; s <= l.max; s++ {
			if h := l.steps[s]; h != nil && h.newest() == s {
				c.Hash ^= wire.Mix(uint64(s))
				c.Live--
			}
		}
	}
	return c
}

// Bye is the farewell of this life: send it before leaving the cluster. Boards
// drop what it published and hear nothing more of it.
func (l *Log) Bye() Output {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Output{Broadcast: [][]byte{mustEncode(&wire.Bye{Owner: l.hash, Incarnation: l.life.Incarnation, Max: l.max})}}
}

// LogStats are counters since the start, and gauges.
type LogStats struct {
	Announced    uint64 // announcements made
	Released     uint64 // publications that have ended
	Overtaken    uint64 // announcements that were not gossiped yet when the publication grew or ended
	Shortened    uint64 // announcements gossiped without their pages, to save room
	Items        uint64 // handed over by Outgoing
	ItemBytes    uint64
	Nacks        uint64 // answered
	NacksRefused uint64 // too much was asked for
	Repairs      uint64 // sequences that the answers spoke of
	Snapshots    uint64 // by Live

	Beacons        uint64 // sent
	EchoesExpected uint64 // answers to them
	EchoesHeard    uint64 // of them
	EchoesMissed   uint64 // of them, from members that are still there; the rest is on its way, or has left

	Live         int // announced
	Reserved     int // not announced yet
	Words        int // seal words that are free
	Floor        id.Sequence
	Max          id.Sequence
	Waiting      int       // sequences that are outgoing
	WaitingSince time.Time // the oldest of them; 0: none
}

// Stats returns the counters.
func (l *Log) Stats() LogStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.stats
	s.Live, s.Reserved, s.Words, s.Floor, s.Max = l.open, len(l.held)-l.open, l.words.size(), l.floor, l.max
	s.Waiting, s.WaitingSince = l.backlog()
	return s
}

func (l *Log) publication(h *held) id.Publication {
	return id.Publication{Owner: l.life, Sequence: h.name}
}

func (l *Log) full(now time.Time, h *held) ([]byte, error) {
	return l.encode(now, h.deadline, h.entry)
}

// encode returns a batch of a alone.
func (l *Log) encode(now, deadline time.Time, a wire.Announcement) ([]byte, error) {
	a.TTLMillis = ttl(now, deadline)
	return wire.Encode(wire.Batches{l.batch([]wire.Announcement{a})})
}

func (l *Log) batch(a []wire.Announcement) wire.Batch {
	return wire.Batch{Owner: l.hash, Incarnation: l.life.Incarnation, Floor: l.floor, Announcements: a}
}

// mustEncode is for messages whose parts this package has made.
func mustEncode(m wire.Message) []byte {
	b, err := wire.Encode(m)
	if err != nil {
		panic(err)
	}
	return b
}

// fifo hands out seal words, those that were given back last of all.
type fifo struct {
	ring    []uint32
	head, n int
}

func newFIFO(words int) fifo {
	f := fifo{ring: make([]uint32, words), n: words}
	for i := range f.ring {
		f.ring[i] = uint32(i)
	}
	return f
}

func (f *fifo) size() int { return f.n }

func (f *fifo) take() (word uint32, ok bool) {
	if f.n == 0 {
		return 0, false
	}
	word = f.ring[f.head]
	f.head = (f.head + 1) % len(f.ring)
	f.n--
	return word, true
}

func (f *fifo) give(word uint32) {
	f.ring[(f.head+f.n)%len(f.ring)] = word
	f.n++
}

// endedRequests remembers the last maxEnded of them.
type endedRequests struct {
	at   map[id.RequestHash]int // in ring
	ring []id.RequestHash
	next int
}

func (e *endedRequests) has(r id.RequestHash) bool {
	_, ok := e.at[r]
	return ok
}

func (e *endedRequests) add(r id.RequestHash) {
	if e.has(r) {
		return
	}
	if len(e.ring) < maxEnded {
		e.ring = append(e.ring, r)
		e.at[r] = len(e.ring) - 1
		return
	}
	if old := e.ring[e.next]; e.at[old] == e.next {
		delete(e.at, old)
	}
	e.ring[e.next], e.at[r] = r, e.next
	e.next = (e.next + 1) % maxEnded
}

func (e *endedRequests) remove(r id.RequestHash) { delete(e.at, r) }
