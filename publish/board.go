package publish

import (
	"cmp"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// Bounds of a board that are no options.
const (
	maxParked  = 1024  // items of owners that are no members (yet), over all of them
	maxOwners  = 16384 // lives whose log is replicated
	maxPast    = 4096  // lives that were dropped and are remembered
	maxLive    = 16384 // live publications of one owner: as many as it has seal words
	maxStrikes = 8     // checkpoints that may be late in a row
	maxAsks    = 3     // nacks in a row that may be lost
	pageBytes  = 4     // of memory, for a page in a table

	maxCandidates = 1024 // entries that ByRequest returns

	pastAge = 10 * time.Minute // of lives that were dropped
)

// BoardOptions set up a Board. A zero field means its default.
type BoardOptions struct {
	Life    id.Life       // of this node; required
	Grace   time.Duration // a dead owner's entries are dropped after it; default 30 s
	GapAge  time.Duration // a gap is asked for when it is so old; default 50 ms
	Entries int           // bound over all owners; default 262,144
	// Window bounds the separate ranges of known sequences that are kept of one
	// owner, which are its gaps and one; default 4,096.
	Window int
	Tables int64 // bytes of page tables that are kept; default 64 MiB
	Pages  int   // of one message; default wire.MaxPages
	Fast   bool  // every duration divided by ten, for tests
}

// BoardStats are counters since the start, and gauges.
type BoardStats struct {
	Items      uint64 // gossiped messages
	Passed     uint64 // of them, those that were news, to be passed on
	Malformed  uint64 // of them
	Unknown    uint64 // of them, a version or kind that this node does not know
	News       uint64 // announcements that became entries, or took the place of one
	Duplicates uint64 // announcements that were known, live or ended
	Old        uint64 // messages of a life that a newer one has replaced, or that has said goodbye
	Released   uint64 // entries that their owner has ended
	Expired    uint64 // entries whose hold has run out; they end when the owner says so
	Dropped    uint64 // entries of lives that have gone
	Unparked   uint64 // items that waited for a member in vain, or found no room to wait
	Evicted    uint64 // entries given up for lack of room
	Refused    uint64 // announcements refused for lack of room
	Gaps       uint64 // announcements and releases refused since the owner's window was full
	NoTable    uint64 // page tables given up for lack of room
	Conflicts  uint64 // announcements that contradict an earlier one
	Collisions uint64 // members refused since another has the same hash of its name
	Nacks      uint64 // sent
	Asked      uint64 // sequences that they asked for
	Repaired   uint64 // sequences that came after they had been asked for
	Mismatches uint64 // checkpoints that show that a release was missed
	Resyncs    uint64 // snapshots that were wished
	Synced     uint64 // snapshots that were applied
	Beacons    uint64 // of others
	OldBeacons uint64 // seen before, or too many
	Echoes     uint64 // sent

	Owners, Entries, Watched int
	Parked                   int       // items of owners that are no members (yet)
	TableBytes               int64     // of page tables, unfolded
	OldestGap                time.Time // since when something has been missing of some member; 0: nothing is
}

// Board is the replicas of all other owners' logs.
type Board struct {
	o       BoardOptions
	hash    id.NodeHash
	park    time.Duration // how long items wait for a member
	askMost time.Duration // between two nacks to one owner
	syncMin time.Duration // between two wishes for one owner's snapshot; ten times as much at most
	// beaconMin is the least between two beacons of one owner.
	beaconMin time.Duration

	mu       sync.Mutex
	epoch    time.Time // the first call; entries count from it
	views    map[id.NodeHash]*view
	past     map[id.NodeHash]past
	requests byRequest
	entries  int
	parked   int
	due      dueHeap
	tables   tables
	watches  watches
	stats    BoardStats
}

// past is what is left of a dropped life: what came to it late does no harm.
type past struct {
	incarnation id.Incarnation
	max         id.Sequence
	at          time.Time
}

// NewBoard returns an empty board.
func NewBoard(o BoardOptions) *Board {
	scale := time.Duration(1)
	if o.Fast {
		scale = 10
	}
	o.Grace = cmp.Or(o.Grace, 30*time.Second/scale)
	o.GapAge = cmp.Or(o.GapAge, 50*time.Millisecond/scale)
	o.Entries = cmp.Or(o.Entries, 262144)
	o.Window = cmp.Or(o.Window, 4096)
	o.Tables = cmp.Or(o.Tables, 64<<20)
	o.Pages = cmp.Or(o.Pages, wire.MaxPages)
	return &Board{
		o: o, hash: o.Life.Node.Hash(),
		park: 2 * time.Second / scale, askMost: time.Second / scale, syncMin: time.Second / scale,
		beaconMin: time.Second / scale,
		views:     make(map[id.NodeHash]*view),
		past:      make(map[id.NodeHash]past),
		requests:  make(byRequest),
		watches:   watches{by: make(map[id.RequestHash]*watch)},
	}
}

// since is the time since the epoch.
func (b *Board) since(now time.Time) time.Duration {
	if b.epoch.IsZero() {
		b.epoch = now
	}
	return now.Sub(b.epoch)
}

// Member says that a life of a node is there, or has gone. What the gone one
// owns is hidden at once and dropped after the grace; if the same life comes
// back before, it shows again. A newer life ends an older one at once, and an
// older one than is known changes nothing. Of two names with one hash the
// second is refused and counted. This node itself is no member here.
func (b *Board) Member(now time.Time, life id.Life, isUp bool) Output {
	b.mu.Lock()
	defer b.mu.Unlock()
	hash := life.Node.Hash()
	if life.Node == b.o.Life.Node {
		return b.newer(life.Incarnation)
	}
	if hash == b.hash {
		b.stats.Collisions++
		return Output{}
	}
	v, fresh := b.replica(now, hash, life.Incarnation, true)
	if v == nil || !b.name(v, life.Node) {
		return Output{}
	}
	want := down
	if isUp {
		want = up
	}
	if v.presence == want || v.presence == gone {
		return Output{}
	}
	if fresh && !isUp {
		b.drop(now, v) // nothing to hide, only something to remember
		return Output{}
	}
	b.unpark(v)
	shown := v.presence == up || isUp
	v.presence, v.since = want, now
	v.mark, v.markAt = v.max, now
	if shown {
		b.wakeAll(v)
	}
	return Output{}
}

// newer reports a newer life of this very node.
func (b *Board) newer(i id.Incarnation) Output {
	if i <= b.o.Life.Incarnation {
		return Output{}
	}
	return Output{Newer: i}
}

// name gives a view its name; false: it has another.
func (b *Board) name(v *view, n id.Node) bool {
	if v.node != "" && v.node != n {
		b.stats.Collisions++
		return false
	}
	v.node = n
	return true
}

// replica returns the view of a life; a newer one than is known replaces it, an
// older one has none. A fresh view is parked, for which there must be room
// unless its life is a member.
func (b *Board) replica(now time.Time, hash id.NodeHash, i id.Incarnation, member bool) (v *view, fresh bool) {
	var node id.Node
	if v := b.views[hash]; v != nil {
		switch {
		case i == v.incarnation:
			return v, false
		case i < v.incarnation:
			b.stats.Old++
			return nil, false
		}
		node = v.node
		b.drop(now, v)
	}
	p := b.past[hash]
	if i < p.incarnation {
		b.stats.Old++
		return nil, false
	}
	forgotten := id.Sequence(0)
	if i == p.incarnation {
		forgotten = p.max
	}
	if len(b.views) >= maxOwners || !member && b.parked >= maxParked {
		b.stats.Unparked++
		b.remember(now, hash, i, forgotten)
		return nil, false
	}
	delete(b.past, hash)
	v = newView(now, hash, i, forgotten)
	v.node = node
	b.views[hash] = v
	return v, true
}

// drop forgets a view, but for the highest sequence of its life.
func (b *Board) drop(now time.Time, v *view) {
	for _, e := range v.live {
		b.remove(e)
		b.stats.Dropped++
	}
	b.stats.Unparked += uint64(v.parked)
	b.unpark(v)
	delete(b.views, v.hash)
	b.remember(now, v.hash, v.incarnation, v.max)
}

func (b *Board) remember(now time.Time, hash id.NodeHash, i id.Incarnation, highest id.Sequence) {
	if _, ok := b.past[hash]; !ok && len(b.past) >= maxPast {
		var oldest id.NodeHash
		at := now
		for h, p := range b.past {
			if !p.at.After(at) {
				oldest, at = h, p.at
			}
		}
		delete(b.past, oldest)
	}
	b.past[hash] = past{i, highest, now}
}

func (b *Board) unpark(v *view) {
	b.parked -= v.parked
	v.parked = 0
}

// admit counts an item of a life that is no member yet; false: no room for it.
func (b *Board) admit(v *view) bool {
	if v.presence == gone {
		b.stats.Old++
		return false
	}
	if v.presence != parked {
		return true
	}
	if b.parked >= maxParked {
		b.stats.Unparked++
		return false
	}
	b.parked++
	v.parked++
	return true
}

// ByRequest returns the visible entries of a request: first those of the owner
// that was heard of last, of each owner the newest publication first. Of more
// than 1,024 it returns some 1,024.
func (b *Board) ByRequest(now time.Time, r id.Request) []Entry {
	hash := r.Hash()
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.since(now)
	var visible []*entry
	heard := make(map[*view]time.Duration, 1)
	for e := b.requests[hash]; e != nil && len(visible) < maxCandidates; e = e.sameAfter {
		if e.visible(at) {
			visible = append(visible, e)
			heard[e.view] = max(heard[e.view], e.heard)
		}
	}
	slices.SortFunc(visible, func(x, y *entry) int {
		return cmp.Or(
			cmp.Compare(heard[y.view], heard[x.view]),
			cmp.Compare(x.view.node, y.view.node),
			cmp.Compare(y.sequence, x.sequence),
		)
	})
	return b.export(visible)
}

func (b *Board) export(visible []*entry) []Entry {
	if len(visible) == 0 {
		return nil
	}
	entries := make([]Entry, len(visible))
	for i, e := range visible {
		entries[i] = e.export(b.epoch)
	}
	return entries
}

// ByName returns a visible entry. The error wraps [ErrEnded] if it is known to
// have ended; else [ErrUnknown]: ask the owner.
func (b *Board) ByName(now time.Time, p id.Publication) (Entry, error) {
	hash := p.Owner.Node.Hash()
	b.mu.Lock()
	defer b.mu.Unlock()
	v := b.views[hash]
	if v == nil || v.node != p.Owner.Node || v.incarnation < p.Owner.Incarnation {
		if v == nil && b.past[hash].incarnation > p.Owner.Incarnation {
			return Entry{}, fmt.Errorf("%s: a newer life was there: %w", p, ErrEnded)
		}
		return Entry{}, fmt.Errorf("%s: %w", p, ErrUnknown)
	}
	if v.incarnation > p.Owner.Incarnation {
		return Entry{}, fmt.Errorf("%s: a newer life is there: %w", p, ErrEnded)
	}
	if e := v.named(p.Sequence); e != nil {
		if !e.visible(b.since(now)) {
			return Entry{}, fmt.Errorf("%s: not visible: %w", p, ErrUnknown)
		}
		return e.export(b.epoch), nil
	}
	if _, ok := v.ended[p.Sequence]; ok || p.Sequence <= v.floor || v.presence == gone {
		return Entry{}, fmt.Errorf("%s: %w", p, ErrEnded)
	}
	return Entry{}, fmt.Errorf("%s: %w", p, ErrUnknown)
}

// Watch returns a channel that is closed at the next change to what ByRequest
// returns for this request; call it before ByRequest. cancel gives it up; call
// it always, as often as you like. When very many requests are watched, a
// channel may be closed for the sake of another request.
func (b *Board) Watch(r id.Request) (changed <-chan struct{}, cancel func()) {
	hash := r.Hash()
	b.mu.Lock()
	defer b.mu.Unlock()
	w := b.watches.add(hash)
	canceled := false
	return w.changed, func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		if !canceled {
			canceled = true
			b.watches.remove(hash, w)
		}
	}
}

// wakeAll wakes who watches a request of v that has not expired.
func (b *Board) wakeAll(v *view) {
	wake := func(r id.RequestHash) {
		for e := b.requests[r]; e != nil; e = e.sameAfter {
			if e.view == v && e.due >= 0 {
				b.watches.wake(r)
				return
			}
		}
	}
	if b.watches.overrun != nil || len(v.live) < len(b.watches.by) {
		for _, e := range v.live {
			wake(e.request)
		}
		return
	}
	for r := range b.watches.by {
		wake(r)
	}
}

// Forget hides a publication that its owner said has ended.
func (b *Board) Forget(p id.Publication) {
	hash := p.Owner.Node.Hash()
	b.mu.Lock()
	defer b.mu.Unlock()
	v := b.views[hash]
	if v == nil || v.node != p.Owner.Node || v.incarnation != p.Owner.Incarnation {
		return
	}
	if e := v.named(p.Sequence); e != nil {
		b.end(e)
	}
}

// List returns visible entries for people, by owner and sequence, at most limit
// (0: all).
func (b *Board) List(now time.Time, limit int) []Entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.since(now)
	var visible []*entry
	for _, v := range b.views {
		for _, e := range v.live {
			if e.visible(at) {
				visible = append(visible, e)
			}
		}
	}
	slices.SortFunc(visible, func(x, y *entry) int {
		return cmp.Or(cmp.Compare(x.view.node, y.view.node), cmp.Compare(x.sequence, y.sequence))
	})
	if limit > 0 {
		visible = visible[:min(limit, len(visible))]
	}
	return b.export(visible)
}

// Stats returns the counters.
func (b *Board) Stats() BoardStats {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.stats
	s.Owners, s.Entries, s.Watched = len(b.views), b.entries, b.watches.len()
	s.Parked, s.TableBytes = b.parked, b.tables.bytes
	for _, v := range b.views {
		if v.presence == up && !v.gapAt.IsZero() && (s.OldestGap.IsZero() || v.gapAt.Before(s.OldestGap)) {
			s.OldestGap = v.gapAt
		}
	}
	return s
}
