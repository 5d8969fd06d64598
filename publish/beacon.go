package publish

import (
	"time"

	"github.com/kvferry/kvferry/api/wire"
	"github.com/kvferry/kvferry/internal/id"
)

const wantEchoes = 16 // about so many members answer a beacon, all of them if there are few

// coverage is how far beacons get, of which one is out at a time.
type coverage struct {
	every, wait time.Duration
	at          time.Time // when the last one was sent, or would have been
	number      uint64
	open        map[id.NodeHash]bool // who is to answer it and has not
}

func newCoverage(fast bool) coverage {
	c := coverage{every: 10 * time.Second, wait: time.Second}
	if fast {
		c.every, c.wait = c.every/10, c.wait/10
	}
	return c
}

// Beacon returns a beacon when one is due, every ten seconds. Call it as often
// as Tick. members returns those that are there: it is asked when one is due,
// and a second after it, for whoever has left meanwhile is not missed. See
// [Log.Echo].
func (l *Log) Beacon(now time.Time, members func() []id.NodeHash) Output {
	due, over := l.beaconDue(now)
	if !due && !over {
		return Output{}
	}
	there := members()
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.coverage
	if over {
		for _, m := range there {
			if c.open[m] {
				l.stats.EchoesMissed++
			}
		}
		c.open = nil
	}
	if !due {
		return Output{}
	}
	c.at = now
	if len(there) == 0 {
		return Output{}
	}
	c.number++
	b := wire.Beacon{
		Owner: l.hash, Incarnation: l.life.Incarnation, Number: c.number,
		Modulus: uint32(max(1, len(there)/wantEchoes)),
	}
	c.open = make(map[id.NodeHash]bool)
	for _, m := range there {
		if b.Asks(m) {
			c.open[m] = true
		}
	}
	l.stats.Beacons++
	l.stats.EchoesExpected += uint64(len(c.open))
	return Output{Broadcast: [][]byte{mustEncode(&b)}}
}

// beaconDue says whether a beacon is due, and whether the last one's time is over.
func (l *Log) beaconDue(now time.Time) (due, over bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	since := now.Sub(l.coverage.at)
	return since >= l.coverage.every, l.coverage.open != nil && since >= l.coverage.wait
}

// Echo takes an answer to a beacon: how long it took from here to there and
// back. False: nobody waits for it (any more).
func (l *Log) Echo(now time.Time, e *wire.Echo) (took time.Duration, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c := &l.coverage
	if e.Owner != l.hash || e.Incarnation != l.life.Incarnation || e.Number != c.number || !c.open[e.From] || now.Sub(c.at) >= c.wait {
		return 0, false
	}
	delete(c.open, e.From)
	l.stats.EchoesHeard++
	return now.Sub(c.at), true
}

// Members are the owners that are live members, for [Log.Beacon].
func (b *Board) Members() []id.NodeHash {
	b.mu.Lock()
	defer b.mu.Unlock()
	members := make([]id.NodeHash, 0, len(b.views))
	for hash, v := range b.views {
		if v.presence == up {
			members = append(members, hash)
		}
	}
	return members
}

// beacon passes a beacon on once and answers it, if it asks. Whoever floods us
// with them is not heard: an owner sends one in ten seconds.
func (b *Board) beacon(now time.Time, m *wire.Beacon) (out Output, news bool) {
	if m.Owner == b.hash {
		return b.newer(m.Incarnation), false
	}
	v, _ := b.replica(now, m.Owner, m.Incarnation, false)
	if v == nil {
		return Output{}, false
	}
	if m.Number <= v.beacon || now.Sub(v.beaconAt) < b.beaconMin {
		b.stats.OldBeacons++
		return Output{}, false
	}
	if !b.admit(v) {
		return Output{}, false
	}
	v.beacon, v.beaconAt = m.Number, now
	b.stats.Beacons++
	if v.presence == up && m.Asks(b.hash) {
		b.stats.Echoes++
		out.Send = []Directed{{To: v.node, Item: mustEncode(&wire.Echo{
			From: b.hash, Owner: v.hash, Incarnation: v.incarnation, Number: m.Number,
		})}}
	}
	return out, true
}
