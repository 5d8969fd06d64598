package publish

import (
	"container/heap"
	"fmt"
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

// check applies a checkpoint; news if it is the newest one of its life.
func (b *Board) check(now time.Time, c *wire.Check) (out Output, news bool) {
	if c.Owner == b.hash {
		return b.newer(c.Incarnation), false
	}
	if c.Version == 0 { // it has said nothing yet
		return Output{}, false
	}
	v, _ := b.replica(now, c.Owner, c.Incarnation, false)
	if v == nil || v.check.Version >= c.Version || !b.admit(v) {
		return Output{}, false
	}
	b.raise(v, c.Floor)
	v.max = max(v.max, c.Max)
	v.check, v.checkAt, v.settled = *c, now, false
	if v.complete(c.Max) {
		if fits, _ := v.compare(); fits {
			v.fits()
		}
	}
	return Output{}, true
}

// fits: the view holds what its owner holds.
func (v *view) fits() {
	v.settled, v.mismatch, v.strikes, v.syncWait = true, false, 0, 0
}

// settle compares a checkpoint that did not fit when it came, now that what
// was sent before it has had its time. A view that holds less than the
// checkpoint says is ahead of it, most likely; if that goes on, it is not.
func (b *Board) settle(v *view) {
	if v.settled || !v.complete(v.check.Max) {
		return
	}
	v.settled = true
	fits, late := v.compare()
	if fits {
		v.fits()
		return
	}
	if late {
		if v.strikes++; v.strikes < maxStrikes {
			return
		}
	}
	v.mismatch = true
	b.stats.Mismatches++
}

// Tick drops what has waited or was hidden for too long, and asks owners for
// what is missing. Call it several times in a [BoardOptions.GapAge].
func (b *Board) Tick(now time.Time) Output {
	b.mu.Lock()
	defer b.mu.Unlock()
	at := b.since(now)
	for len(b.due) > 0 && at >= b.due[0].expires {
		e := heap.Pop(&b.due).(*entry)
		b.stats.Expired++
		if e.view.presence == up {
			b.watches.wake(e.request)
		}
	}
	for hash, p := range b.past {
		if now.Sub(p.at) >= pastAge {
			delete(b.past, hash)
		}
	}
	var out Output
	for _, v := range b.views {
		age := now.Sub(v.since)
		switch {
		case v.presence == parked && age >= b.park, v.presence != parked && v.presence != up && age >= b.o.Grace:
			b.drop(now, v)
		case v.presence == up:
			b.repair(now, v, &out)
		}
	}
	return out
}

// repair asks the owner of v for what has been missing for a gap age.
func (b *Board) repair(now time.Time, v *view, out *Output) {
	var missing []id.Sequence
	var count uint64
	if now.Sub(v.markAt) >= b.o.GapAge {
		missing, count = v.known.missing(v.mark, wire.MaxMissing)
		switch {
		case count == 0:
			v.askWait, v.asks, v.gapAt = 0, 0, time.Time{}
		case v.gapAt.IsZero():
			v.gapAt = v.markAt
		}
		v.mark, v.markAt = v.max, now
	}
	if now.Sub(v.checkAt) >= b.o.GapAge {
		b.settle(v)
	}
	// Without room for it there's no use in asking for more.
	if len(missing) > 0 && !now.Before(v.askAt) && b.entries < b.o.Entries {
		if missing[0] > v.askedFrom { // it was answered
			v.askWait, v.asks = 0, 0
		}
		v.asks++
		v.askWait = min(max(2*v.askWait, 2*b.o.GapAge), b.askMost)
		v.askAt = now.Add(v.askWait)
		v.askedFrom, v.askedTo = missing[0], missing[len(missing)-1]
		b.stats.Nacks++
		b.stats.Asked += uint64(len(missing))
		out.Send = append(out.Send, Directed{To: v.node, Item: mustEncode(&wire.Nack{
			From: b.hash, Owner: v.hash, Incarnation: v.incarnation, Missing: missing,
		})})
	}
	lost := v.mismatch || v.doubt.count > 0 || v.asks > maxAsks || count > uint64(b.o.Window)/4
	if lost && !now.Before(v.syncAt) && b.entries < b.o.Entries {
		v.syncWait = min(max(2*v.syncWait, b.syncMin), 10*b.syncMin)
		v.syncAt = now.Add(v.syncWait)
		b.stats.Resyncs++
		out.Resync = append(out.Resync, v.life())
	}
}

// State is what this node gives to another in push/pull: the checkpoints of
// all members that are known here and this node's own, never entries.
func (b *Board) State(own wire.Check) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	checks := append(make([]wire.Check, 0, len(b.views)+1), own)
	for _, v := range b.views {
		if v.presence == up && v.check.Version > 0 {
			checks = append(checks, v.check)
		}
	}
	return wire.EncodeChecks(checks)
}

// Merge applies what another node gave. Nothing is passed on. The error wraps
// [wire.ErrMessage] or [wire.ErrVersion], and nothing was applied.
func (b *Board) Merge(now time.Time, state []byte) (Output, error) {
	checks, err := wire.DecodeChecks(state)
	b.mu.Lock()
	defer b.mu.Unlock()
	if err != nil {
		b.stats.Malformed++
		return Output{}, fmt.Errorf("merge state: %w", err)
	}
	var out Output
	for i := range checks {
		one, _ := b.check(now, &checks[i])
		out.Newer = max(out.Newer, one.Newer)
	}
	return out, nil
}
