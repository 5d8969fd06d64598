package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/manager"
	"github.com/kvferry/kvferry/publish"
)

const (
	landed   = kvferrypb.CompleteItem_LANDED
	failed   = kvferrypb.CompleteItem_FAILED
	declined = kvferrypb.CompleteItem_DECLINED
)

// ledger drives holds by seconds since its start.
type ledger struct {
	t *testing.T
	h *holds
	t0,
	now time.Time
}

func newLedger(t *testing.T, timers holdTimers) *ledger {
	t0 := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	return &ledger{t: t, h: newHolds(timers), t0: t0, now: t0}
}

func (l *ledger) at(second float64) { l.now = l.t0.Add(time.Duration(second * float64(time.Second))) }

func (l *ledger) publish(seq id.Sequence, o holdOptions) {
	l.t.Helper()
	if err := l.h.publish(l.now, seq, o); err != nil {
		l.t.Fatal(err)
	}
}

func (l *ledger) lease(seq id.Sequence, r reader) {
	l.t.Helper()
	if lasts, err := l.h.lease(l.now, seq, r); err != nil || lasts <= 0 {
		l.t.Fatalf("lease for %v, %v", lasts, err)
	}
}

func (l *ledger) ack(seq id.Sequence, r reader, o kvferrypb.CompleteItem_Outcome, want ackResult) {
	l.t.Helper()
	if got := l.h.acknowledge(l.now, seq, r, o); got != want {
		l.t.Errorf("acknowledge %d by %v, %v: %v, want %v", seq, r, o, got, want)
	}
}

// due checks what ends now: "" for nothing, else the cause of publication 1.
func (l *ledger) due(want string) {
	l.t.Helper()
	got := ""
	for _, e := range l.h.due(l.now) {
		if e.seq == 1 {
			got = e.cause
		}
	}
	if got != want {
		l.t.Fatalf("after %v it ended as %q, want %q", l.now.Sub(l.t0), got, want)
	}
}

// succeed makes next go on for a publication whose seal word was 7.
func (l *ledger) succeed(seq, next id.Sequence, readers ...id.Node) {
	l.t.Helper()
	lives, ok := l.h.succeed(l.now, seq, next, 7)
	var nodes []id.Node
	for _, life := range lives {
		nodes = append(nodes, life.Node)
	}
	if !ok || !slices.Equal(nodes, readers) {
		l.t.Errorf("%d goes on for %d: %v, and it was leased by %v, want %v", next, seq, ok, nodes, readers)
	}
}

// ends checks how a publication ends now; "" for not.
func (l *ledger) ends(seq id.Sequence, want string) {
	l.t.Helper()
	got := ""
	for _, e := range l.h.due(l.now) {
		if e.seq == seq {
			got = e.cause
		}
	}
	if got != want {
		l.t.Fatalf("after %v %d ended as %q, want %q", l.now.Sub(l.t0), seq, got, want)
	}
}

// reads is the first attempt of the first life of a node.
func reads(node id.Node) reader {
	return reader{life: id.Life{Node: node, Incarnation: 1}, attempt: 1}
}

func TestHolds(t *testing.T) {
	sealed := holdOptions{final: true}
	for name, script := range map[string]func(l *ledger){
		"an unread one ends when its hold has run out": func(l *ledger) {
			l.publish(1, sealed)
			l.at(29.9)
			l.due("")
			l.at(30)
			l.due("expired")
			l.due("")
		},
		"a hold of its own": func(l *ledger) {
			l.publish(1, holdOptions{final: true, hold: 2 * time.Second})
			l.at(2)
			l.due("expired")
		},
		"no hold is longer than the greatest age": func(l *ledger) {
			l.publish(1, holdOptions{final: true, hold: time.Hour})
			l.at(899)
			l.due("")
			l.at(900)
			l.due("expired")
		},
		"it ends when its reader has it": func(l *ledger) {
			l.publish(1, sealed)
			l.lease(1, reads("d"))
			l.at(1)
			l.ack(1, reads("d"), landed, ackCounted)
			l.due("released")
			l.ack(1, reads("d"), landed, ackLate)
		},
		"declined counts as read": func(l *ledger) {
			l.publish(1, sealed)
			l.ack(1, reads("d"), declined, ackCounted)
			l.due("released")
		},
		"an acknowledgement without a lease counts": func(l *ledger) {
			l.publish(1, sealed)
			l.ack(1, reads("d"), landed, ackCounted)
			l.due("released")
		},
		"failed ends the lease only": func(l *ledger) {
			l.publish(1, sealed)
			l.lease(1, reads("d"))
			l.ack(1, reads("d"), failed, ackCounted)
			l.ack(1, reads("d"), failed, ackDuplicate)
			l.at(29)
			l.due("")
			l.at(30)
			l.due("expired")
		},
		"an outcome that is none ends the lease only": func(l *ledger) {
			l.publish(1, sealed)
			l.lease(1, reads("d"))
			l.ack(1, reads("d"), 99, ackCounted)
			l.due("")
		},
		"two readers are two nodes": func(l *ledger) {
			l.publish(1, holdOptions{final: true, readers: 2})
			again := reads("d")
			again.attempt = 2
			nextLife := reads("d")
			nextLife.life.Incarnation = 2
			l.ack(1, reads("d"), landed, ackCounted)
			l.ack(1, reads("d"), landed, ackDuplicate)
			l.ack(1, again, landed, ackDuplicate)
			l.ack(1, nextLife, landed, ackDuplicate)
			l.due("")
			l.ack(1, reads("e"), landed, ackCounted)
			l.due("released")
		},
		"an acknowledgement ends only the lease of its attempt and life": func(l *ledger) {
			l.publish(1, sealed)
			second, nextLife := reads("d"), reads("d")
			second.attempt = 2
			nextLife.life.Incarnation = 2
			l.lease(1, second)
			l.lease(1, nextLife)
			l.ack(1, reads("d"), landed, ackCounted) // it is done with it, and yet two of its attempts read
			l.due("")
			l.ack(1, second, failed, ackCounted)
			l.due("")
			l.ack(1, nextLife, failed, ackCounted)
			l.due("released")
		},
		"a lease outlives the hold, and no longer": func(l *ledger) {
			l.publish(1, sealed)
			l.at(25)
			l.lease(1, reads("d"))
			l.at(44.9)
			l.due("")
			l.at(45)
			l.due("expired")
		},
		"another reader's lease outlives the last acknowledgement": func(l *ledger) {
			l.publish(1, sealed)
			l.lease(1, reads("e"))
			l.at(1)
			l.ack(1, reads("d"), landed, ackCounted)
			l.due("")
			l.at(20)
			l.due("released")
		},
		"what goes on has the same hold": func(l *ledger) {
			l.publish(1, sealed)
			l.at(20)
			l.succeed(1, 2)
			l.at(29.9)
			l.ends(2, "")
			l.due("")
			l.at(30)
			l.ends(2, "expired")
		},
		"what goes on has the same leases": func(l *ledger) {
			l.publish(1, sealed)
			l.at(25)
			l.lease(1, reads("d"))
			l.succeed(1, 2, "d")
			l.at(40)
			l.ends(2, "")
			if _, err := l.h.lease(l.now, 1, reads("d")); !errors.Is(err, publish.ErrEnded) {
				l.t.Errorf("the old one is leased: %v", err)
			}
			l.lease(2, reads("d"))
			l.at(59)
			l.ends(2, "")
			l.at(60)
			l.ends(2, "expired")
			if n := l.h.leased(); n != 0 {
				l.t.Errorf("%d leases are left", n)
			}
		},
		"what goes on counts no reader twice": func(l *ledger) {
			l.publish(1, holdOptions{final: true, readers: 2})
			l.ack(1, reads("d"), landed, ackCounted)
			l.succeed(1, 2)
			l.ack(2, reads("d"), landed, ackDuplicate)
			l.ends(2, "")
			l.succeed(2, 3)
			l.ack(3, reads("e"), landed, ackCounted)
			l.ends(3, "released")
		},
		"an acknowledgement of what has ended counts for what goes on": func(l *ledger) {
			l.publish(1, sealed)
			l.lease(1, reads("d"))
			l.succeed(1, 2, "d")
			l.succeed(2, 3, "d")
			l.ack(1, reads("d"), landed, ackCounted)
			l.ends(3, "released")
		},
		"what has landed of an open one is not all of what goes on": func(l *ledger) {
			l.publish(1, holdOptions{})
			l.lease(1, reads("d"))
			l.succeed(1, 2, "d")
			l.publish(2, sealed)
			l.ack(1, reads("d"), landed, ackCounted) // the lease
			l.ends(2, "")
			l.ack(1, reads("e"), declined, ackCounted)
			l.ends(2, "released")
		},
		"what has ended has no heir": func(l *ledger) {
			l.publish(1, sealed)
			l.h.end(l.now, 1, "revoked")
			if _, ok := l.h.succeed(l.now, 1, 2, 7); ok || l.h.live[2] != nil {
				l.t.Error("it has")
			}
			if _, _, ok := l.h.successor(1); ok {
				l.t.Error("it has")
			}
		},
		"what has gone on is forgotten like all": func(l *ledger) {
			l.publish(1, sealed)
			l.succeed(1, 2)
			if next, seal, ok := l.h.successor(1); !ok || next != 2 || seal != 7 {
				l.t.Errorf("%d, %d, %v", next, seal, ok)
			}
			l.at(601)
			l.ends(2, "expired")
			if next, _, ok := l.h.successor(1); ok {
				l.t.Errorf("%d is remembered", next)
			}
		},
		"renewals end with the greatest age": func(l *ledger) {
			l.publish(1, sealed)
			for second := 0.0; second < 900; second += 5 {
				l.at(second)
				l.due("")
				l.lease(1, reads("d"))
			}
			l.at(899.9)
			if lasts, err := l.h.lease(l.now, 1, reads("d")); err != nil || lasts > 100*time.Millisecond {
				l.t.Errorf("a lease for %v, %v", lasts, err)
			}
			l.at(900)
			l.due("expired")
		},
		"an open one has no hold": func(l *ledger) {
			l.publish(1, holdOptions{})
			l.at(899)
			l.due("")
			l.publish(1, holdOptions{}) // it grows
			l.at(1798)
			l.due("")
			l.at(1799)
			l.due("expired")
		},
		"what has landed of an open one is not all of it": func(l *ledger) {
			l.publish(1, holdOptions{})
			l.lease(1, reads("d"))
			l.ack(1, reads("d"), landed, ackCounted) // its lease
			l.publish(1, sealed)
			l.due("")
			l.ack(1, reads("d"), landed, ackCounted)
			l.due("released")
		},
		"a reader may decline an open one": func(l *ledger) {
			l.publish(1, holdOptions{})
			l.ack(1, reads("d"), declined, ackCounted)
			l.due("")
			l.publish(1, sealed)
			l.due("released")
		},
		"nothing is published after the final one": func(l *ledger) {
			l.publish(1, sealed)
			if err := l.h.publish(l.now, 1, sealed); !errors.Is(err, manager.ErrFinal) {
				l.t.Errorf("got %v", err)
			}
		},
		"ended by the owner, it ends once and for good": func(l *ledger) {
			l.publish(1, sealed)
			l.lease(1, reads("e"))
			l.lease(1, reads("d"))
			readers := l.h.end(l.now, 1, "revoked")
			if !slices.Equal(readers, []id.Life{reads("d").life, reads("e").life}) {
				l.t.Errorf("readers %v", readers)
			}
			if again := l.h.end(l.now, 1, "released"); again != nil {
				l.t.Errorf("ended twice, with %v", again)
			}
			if got := l.h.cause(l.now, 1); got != "revoked" {
				l.t.Errorf("cause %q", got)
			}
			if _, err := l.h.lease(l.now, 1, reads("d")); !errors.Is(err, publish.ErrEnded) {
				l.t.Errorf("lease after the end: %v", err)
			}
			if err := l.h.publish(l.now, 1, sealed); !errors.Is(err, publish.ErrEnded) {
				l.t.Errorf("publish after the end: %v", err)
			}
			l.ack(1, reads("d"), landed, ackLate)
			l.at(1000)
			l.due("")
		},
		"nothing changes it between its end and its sweep": func(l *ledger) {
			l.publish(1, sealed)
			l.at(29)
			if got := l.h.cause(l.now, 1); got != "" {
				l.t.Errorf("cause before the end: %q", got)
			}
			l.at(30)
			// Whoever looks it up is told what whoever wants a lease is told.
			if got := l.h.cause(l.now, 1); got != "expired" {
				l.t.Errorf("cause %q", got)
			}
			if _, err := l.h.lease(l.now, 1, reads("d")); !errors.Is(err, publish.ErrEnded) {
				l.t.Errorf("lease after the end: %v", err)
			}
			l.ack(1, reads("d"), landed, ackLate)
			l.due("expired")
		},
		"a tombstone stands its time": func(l *ledger) {
			l.publish(1, sealed)
			l.at(30)
			l.due("expired")
			l.at(629)
			l.ack(1, reads("d"), landed, ackLate)
			l.at(630)
			l.due("")
			l.ack(1, reads("d"), landed, ackUnknown)
			if s := l.h.stats(l.now); s.tombstones != 0 {
				l.t.Errorf("%d tombstones", s.tombstones)
			}
		},
		"unknown": func(l *ledger) {
			if _, err := l.h.lease(l.now, 1, reads("d")); !errors.Is(err, publish.ErrUnknown) {
				l.t.Errorf("got %v", err)
			}
			l.ack(1, reads("d"), landed, ackUnknown)
			if readers, cause := l.h.end(l.now, 1, "revoked"), l.h.cause(l.now, 1); readers != nil || cause != "" {
				l.t.Errorf("got %v, %q", readers, cause)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLedger(t, holdTimers{})
			script(l)
			if s := l.h.stats(l.now); s.open+s.sealed+s.leased == 0 && s.leases != 0 {
				t.Errorf("%d leases on nothing", s.leases)
			}
		})
	}
}

func TestHoldsAreBounded(t *testing.T) {
	l := newLedger(t, holdTimers{live: 3, readers: 2, leases: 3, tombstones: 2})
	for seq := id.Sequence(1); seq <= 3; seq++ {
		l.publish(seq, holdOptions{final: true, readers: 100})
	}
	if err := l.h.publish(l.now, 4, holdOptions{}); !errors.Is(err, publish.ErrFull) {
		t.Errorf("a fourth publication: %v", err)
	}
	l.lease(1, reads("a"))
	l.lease(1, reads("b"))
	if _, err := l.h.lease(l.now, 1, reads("c")); !errors.Is(err, publish.ErrFull) {
		t.Errorf("a third lease on one: %v", err)
	}
	l.lease(2, reads("a"))
	if _, err := l.h.lease(l.now, 3, reads("a")); !errors.Is(err, publish.ErrFull) {
		t.Errorf("a fourth lease in all: %v", err)
	}
	l.lease(1, reads("a")) // renewal needs no room
	l.at(20)
	l.lease(1, reads("c")) // the others have run out
	if s := l.h.stats(l.now); s.leases != 2 || s.refused != 2 || s.granted != 4 || s.renewed != 1 || s.ranOut != 2 {
		t.Errorf("stats %+v", s)
	}
	// Readers beyond the bound are not waited for.
	l.ack(3, reads("a"), landed, ackCounted)
	l.ack(3, reads("b"), landed, ackCounted)
	l.ack(3, reads("c"), landed, ackLate)
	l.at(50)
	l.h.due(l.now)
	if s := l.h.stats(l.now); s.open+s.sealed+s.leased != 0 || s.leases != 0 || s.tombstones != 2 {
		t.Errorf("stats %+v", s)
	}
}

// A lease that is renewed for ever does not hide others that have run out.
func TestEveryDueEntryIsVisited(t *testing.T) {
	l := newLedger(t, holdTimers{})
	const n = 2000
	for seq := id.Sequence(1); seq <= n; seq++ {
		l.publish(seq, holdOptions{final: true, hold: time.Duration(n-seq+1) * time.Millisecond})
		l.lease(seq, reads("gone"))
	}
	for second := 0.0; second < 20; second++ {
		l.at(second)
		l.lease(1, reads("lives"))
		l.lease(n/2, reads("lives"))
		if ended := l.h.due(l.now); len(ended) != 0 {
			t.Fatalf("%d ended after %v s", len(ended), second)
		}
	}
	l.at(20)
	if ended := l.h.due(l.now); len(ended) != n-2 {
		t.Errorf("%d of %d ended", len(ended), n-2)
	}
	if s := l.h.stats(l.now); s.leases != 2 || s.leased != 2 || s.oldest != 20*time.Second {
		t.Errorf("stats %+v", s)
	}
	if v, ok := l.h.look(l.now, 1); !ok || !slices.Equal(v.leases, []id.Life{reads("lives").life}) || v.ends != 19*time.Second {
		t.Errorf("look: %+v, %v", v, ok)
	}
}

// ledgerModel is the rule, said plainly.
type ledgerModel struct {
	final     bool
	last      time.Time
	holdUntil time.Time
	readers   int
	done      map[id.Node]bool
	leases    map[reader]time.Time
	ended     bool
	endedAt   time.Time
}

func (m *ledgerModel) over(now time.Time, t holdTimers) bool {
	if !m.last.Add(t.maxHold).After(now) {
		return true
	}
	for _, until := range m.leases {
		if until.After(now) {
			return false
		}
	}
	return m.final && (len(m.done) >= m.readers || !m.holdUntil.After(now))
}

// Whatever happens: a publication ends exactly once, when the rule says and at
// the latest with its greatest age, and then takes no lease and no growth.
func TestHoldsFollowTheRule(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		timers := holdTimers{hold: 3 * time.Second, lease: 2 * time.Second, maxHold: 9 * time.Second, tombstone: 20 * time.Second, live: 1000}
		h := newHolds(timers)
		t0 := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		now := t0
		all := map[id.Sequence]*ledgerModel{}
		// find returns the model of a publication that is not forgotten.
		find := func(seq id.Sequence) *ledgerModel {
			if m := all[seq]; m != nil && m.ended && now.Sub(m.endedAt) >= timers.tombstone {
				delete(all, seq)
			}
			return all[seq]
		}
		seqs := rapid.Custom(func(t *rapid.T) id.Sequence { return id.Sequence(rapid.IntRange(1, 6).Draw(t, "seq")) })
		readers := rapid.Custom(func(t *rapid.T) reader {
			return reader{
				life:    id.Life{Node: id.Node(rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "node")), Incarnation: id.Incarnation(rapid.IntRange(1, 2).Draw(t, "life"))},
				attempt: uint32(rapid.IntRange(1, 2).Draw(t, "attempt")),
			}
		})
		t.Repeat(map[string]func(*rapid.T){
			"publish": func(t *rapid.T) {
				seq := seqs.Draw(t, "seq")
				m := find(seq)
				o := holdOptions{
					readers: rapid.IntRange(0, 2).Draw(t, "readers"), final: rapid.Bool().Draw(t, "final"),
					hold: time.Duration(rapid.IntRange(0, 12).Draw(t, "hold")) * time.Second,
				}
				err := h.publish(now, seq, o)
				switch {
				case m != nil && (m.ended || m.over(now, timers)):
					if !errors.Is(err, publish.ErrEnded) {
						t.Fatalf("publish %d after its end: %v", seq, err)
					}
					return
				case m != nil && m.final:
					if !errors.Is(err, manager.ErrFinal) {
						t.Fatalf("publish %d after its final: %v", seq, err)
					}
					return
				case err != nil:
					t.Fatal(err)
				case m == nil:
					m = &ledgerModel{done: map[id.Node]bool{}, leases: map[reader]time.Time{}}
					all[seq] = m
				}
				if o.hold == 0 {
					o.hold = timers.hold
				}
				m.last, m.final, m.readers, m.holdUntil = now, o.final, max(1, o.readers), now.Add(min(o.hold, timers.maxHold))
			},
			"lease": func(t *rapid.T) {
				seq, r := seqs.Draw(t, "seq"), readers.Draw(t, "reader")
				m := find(seq)
				lasts, err := h.lease(now, seq, r)
				switch {
				case m == nil:
					if !errors.Is(err, publish.ErrUnknown) {
						t.Fatalf("lease of the unknown %d: %v", seq, err)
					}
				case m.ended || m.over(now, timers):
					if !errors.Is(err, publish.ErrEnded) {
						t.Fatalf("lease of %d after its end: %v", seq, err)
					}
				case err != nil || lasts <= 0 || lasts > timers.lease:
					t.Fatalf("lease of %d for %v: %v", seq, lasts, err)
				default:
					m.leases[r] = now.Add(lasts)
				}
			},
			"acknowledge": func(t *rapid.T) {
				seq, r := seqs.Draw(t, "seq"), readers.Draw(t, "reader")
				outcome := rapid.SampledFrom([]kvferrypb.CompleteItem_Outcome{landed, failed, declined}).Draw(t, "outcome")
				m := find(seq)
				got := h.acknowledge(now, seq, r, outcome)
				if m == nil || m.ended || m.over(now, timers) {
					if m == nil && got != ackUnknown || m != nil && got != ackLate {
						t.Fatalf("acknowledge %d: %v", seq, got)
					}
					return
				}
				want := ackDuplicate
				if m.leases[r].After(now) {
					want = ackCounted
				}
				delete(m.leases, r)
				if outcome == declined || outcome == landed && m.final {
					if !m.done[r.life.Node] && len(m.done) < m.readers {
						want = ackCounted
						m.done[r.life.Node] = true
					}
				}
				if got != want {
					t.Fatalf("acknowledge %d by %v, %v: %v, want %v", seq, r, outcome, got, want)
				}
			},
			"end": func(t *rapid.T) {
				seq := seqs.Draw(t, "seq")
				h.end(now, seq, "revoked")
				if m := find(seq); m != nil && !m.ended {
					m.ended, m.endedAt = true, now
				}
				if _, live := h.look(now, seq); live {
					t.Fatalf("%d lives after its end", seq)
				}
			},
			"time passes": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.IntRange(1, 3000).Draw(t, "ms")) * time.Millisecond)
			},
			"sweep": func(t *rapid.T) {
				// As a sweeper does: at each time that next names, up to now.
				for steps := 0; ; steps++ {
					at, ok := h.next()
					if !ok || at.After(now) {
						break
					}
					if steps > 1000 {
						t.Fatal("due leaves what is due")
					}
					for _, e := range h.due(now) {
						m := find(e.seq)
						switch {
						case m == nil || m.ended:
							t.Fatalf("%d ended twice", e.seq)
						case !m.over(now, timers):
							t.Fatalf("%d ended too early: %+v at %v", e.seq, m, now.Sub(t0))
						case e.cause == holdReleased && (!m.final || len(m.done) < m.readers):
							t.Fatalf("%d was released with %d of %d readers", e.seq, len(m.done), m.readers)
						}
						m.ended, m.endedAt = true, now
					}
				}
				for seq, m := range all {
					if !m.ended && m.over(now, timers) {
						t.Fatalf("%d should have ended: %+v at %v", seq, m, now.Sub(t0))
					}
				}
			},
			"": func(t *rapid.T) {
				s := h.stats(now)
				if s.open+s.sealed+s.leased != len(h.heap) || len(h.live) != len(h.heap) || len(h.tombs) != len(h.order) {
					t.Fatalf("tables disagree: %+v", s)
				}
				leases := 0
				for _, p := range h.live {
					leases += len(p.leases)
				}
				if leases != s.leases {
					t.Fatalf("%d leases are counted, %d are there", s.leases, leases)
				}
			},
		})
	})
}

// sweeper runs a table by the clock, the way a node does.
type sweeper struct {
	h    *holds
	wake chan struct{}
	done sync.WaitGroup

	mu    sync.Mutex
	ended map[id.Sequence]string // cause and age in seconds
	t0    time.Time
}

func startSweeper(ctx context.Context, h *holds) *sweeper {
	s := &sweeper{h: h, wake: make(chan struct{}, 1), ended: make(map[id.Sequence]string), t0: time.Now()}
	s.done.Go(func() { s.run(ctx) })
	return s
}

func (s *sweeper) run(ctx context.Context) {
	timer := time.NewTimer(time.Hour)
	for {
		for _, e := range s.h.due(time.Now()) {
			s.mu.Lock()
			s.ended[e.seq] += fmt.Sprintf("%s at %v", e.cause, time.Since(s.t0))
			s.mu.Unlock()
		}
		if at, ok := s.h.next(); ok {
			timer.Reset(time.Until(at))
		}
		select {
		case <-timer.C:
		case <-s.wake:
		case <-ctx.Done():
			return
		}
	}
}

// do calls the table and wakes the sweeper.
func (s *sweeper) do(t *testing.T, f func(now time.Time) error) {
	t.Helper()
	if err := f(time.Now()); err != nil {
		t.Error(err)
	}
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func TestSweeperEndsEverythingOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		h := newHolds(holdTimers{hold: 30 * time.Second, lease: 20 * time.Second, maxHold: 900 * time.Second})
		s := startSweeper(ctx, h)
		publishAll := func(seqs ...id.Sequence) {
			for _, seq := range seqs {
				s.do(t, func(now time.Time) error {
					return h.publish(now, seq, holdOptions{final: true})
				})
			}
		}
		const unread, acknowledged, lost, killed, endless, revoked = 1, 2, 3, 4, 5, 6
		publishAll(unread, acknowledged, lost, killed, endless, revoked)

		// renewing keeps a lease from now on, for so long.
		var readers sync.WaitGroup
		renewing := func(seq id.Sequence, lives time.Duration, outcome kvferrypb.CompleteItem_Outcome) {
			readers.Go(func() {
				r := reads("d")
				for end := time.Now().Add(lives); time.Now().Before(end); time.Sleep(5 * time.Second) {
					s.do(t, func(now time.Time) error {
						_, err := h.lease(now, seq, r)
						return err
					})
				}
				if outcome != 0 {
					s.do(t, func(now time.Time) error {
						h.acknowledge(now, seq, r, outcome)
						return nil
					})
				}
			})
		}
		renewing(acknowledged, 60*time.Second, landed)
		renewing(lost, 60*time.Second, 0)     // it has landed after 60 s, and its word is lost
		renewing(killed, 33*time.Second, 0)   // its last renewal is at 30 s
		renewing(endless, 895*time.Second, 0) // it hangs and renews
		readers.Go(func() {
			time.Sleep(12 * time.Second)
			h.end(time.Now(), revoked, "revoked")
		})
		readers.Wait()
		time.Sleep(100 * time.Second)
		stop()
		s.done.Wait()

		want := map[id.Sequence]string{
			unread:       "expired at 30s",
			acknowledged: "released at 1m0s",
			lost:         "expired at 1m15s", // one lease after its last renewal, at 55 s
			killed:       "expired at 50s",
			endless:      "expired at 15m0s",
		}
		for seq := id.Sequence(unread); seq <= revoked; seq++ {
			if s.ended[seq] != want[seq] {
				t.Errorf("publication %d %s, want %s", seq, s.ended[seq], want[seq])
			}
		}
		if s := h.stats(time.Now()); s.leases != 0 || s.open+s.sealed+s.leased != 0 {
			t.Errorf("left behind: %+v", s)
		}
	})
}

func BenchmarkRenew(b *testing.B) {
	h := newHolds(holdTimers{})
	now := time.Now()
	for seq := id.Sequence(1); seq <= 16_000; seq++ {
		if err := h.publish(now, seq, holdOptions{final: true}); err != nil {
			b.Fatal(err)
		}
	}
	seq := id.Sequence(0)
	for b.Loop() {
		seq = seq%16_000 + 1
		now = now.Add(time.Microsecond)
		if _, err := h.lease(now, seq, reads("d")); err != nil {
			b.Fatal(err)
		}
	}
}
