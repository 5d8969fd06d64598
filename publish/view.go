package publish

import (
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// view is the replica of one life of one owner's log. What it knows of a
// sequence is one of three: not known (a gap, if it is up to max), live, or
// known and not live, which is final.
type view struct {
	hash        id.NodeHash
	incarnation id.Incarnation
	node        id.Node // "" until a member, or the owner itself, has said the name
	presence    presence
	since       time.Time // of presence
	parked      int       // items that wait for the owner to be a member

	floor id.Sequence // the owner's word
	max   id.Sequence // the greatest that the owner has spoken of
	known sequences   // all up to floor, and what was announced or released
	live  map[id.Sequence]*entry
	grown map[id.Sequence]*entry      // those of them that are not the first of their publication, by what names it
	ended map[id.Sequence]id.Sequence // names above floor that have ended, and with which step
	sum   uint64                      // of Mix(sequence) over live
	// doubt is empty, unless this life was dropped and has come back: then, until
	// Sync, it is what was known before. Gossip about it may be old; only the
	// owner itself can make it live again.
	doubt sequences

	// The newest checkpoint of the owner, compared with the view when it
	// comes, and again a gap age later if it did not fit.
	check    wire.Check
	checkAt  time.Time
	settled  bool // nothing to compare
	strikes  int  // checkpoints in a row that did not fit, but may have been late
	mismatch bool // a release was missed

	// What is unknown up to mark was so at markAt already.
	mark          id.Sequence
	markAt        time.Time
	gapAt         time.Time   // since when something has been missing all the time; 0: nothing is
	askedFrom     id.Sequence // the least that was asked for
	askedTo       id.Sequence // the greatest
	asks          int         // in a row that were not answered
	askAt, syncAt time.Time   // not before
	askWait       time.Duration
	syncWait      time.Duration

	beacon   uint64 // the greatest number
	beaconAt time.Time
}

type presence uint8

const (
	parked presence = iota // nobody has said yet that this life is a member
	up
	down
	gone // it has said goodbye
)

func newView(now time.Time, hash id.NodeHash, i id.Incarnation, forgotten id.Sequence) *view {
	v := &view{
		hash: hash, incarnation: i, since: now, settled: true, markAt: now,
		live:  make(map[id.Sequence]*entry),
		grown: make(map[id.Sequence]*entry),
		ended: make(map[id.Sequence]id.Sequence),
	}
	v.know(1, forgotten)
	v.doubt.add(1, forgotten)
	return v
}

func (v *view) life() id.Life { return id.Life{Node: v.node, Incarnation: v.incarnation} }

// named returns the entry of the publication of this name, or nil.
func (v *view) named(name id.Sequence) *entry {
	if e := v.live[name]; e != nil && e.name == name {
		return e
	}
	return v.grown[name]
}

func (v *view) put(e *entry) {
	v.live[e.sequence] = e
	if e.name != e.sequence {
		v.grown[e.name] = e
	}
	v.sum ^= wire.Mix(uint64(e.sequence))
}

func (v *view) take(e *entry) {
	delete(v.live, e.sequence)
	delete(v.grown, e.name)
	v.sum ^= wire.Mix(uint64(e.sequence))
}

func (v *view) know(first, last id.Sequence) {
	v.known.add(first, last)
	v.max = max(v.max, v.known.max())
}

// compare says whether the view holds what the checkpoint says. late: the
// view may be ahead of it, since it holds less than the owner held then.
func (v *view) compare() (fits, late bool) {
	live, sum := uint64(len(v.live)), v.sum
	take := func(s id.Sequence) {
		live--
		sum ^= wire.Mix(uint64(s))
	}
	if v.max <= v.check.Max {
		// nothing is beyond the checkpoint
	} else if beyond := uint64(v.max - v.check.Max); beyond <= uint64(len(v.live)) {
		for i := range beyond {
			if s := v.check.Max + 1 + id.Sequence(i); v.live[s] != nil {
				take(s)
			}
		}
	} else {
		for s := range v.live {
			if s > v.check.Max {
				take(s)
			}
		}
	}
	fits = live == uint64(v.check.Live) && sum == v.check.Hash
	return fits, live < uint64(v.check.Live)
}

// complete says whether nothing up to s is unknown.
func (v *view) complete(s id.Sequence) bool {
	return s == 0 || len(v.known.ranges) > 0 && v.known.ranges[0].first == 1 && v.known.ranges[0].last >= s
}
