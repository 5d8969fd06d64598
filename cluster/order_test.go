package cluster

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
)

// A node leaves, or dies, and joins again. In whatever order its lives' ends
// and beginnings are heard, and however often the handler is told in between,
// the newest life is the member at the end, nobody calls the node back, and the
// handler was told a story that makes sense.
func TestEveryOrderEndsWithTheNewestLife(t *testing.T) {
	events := map[string]func(b *table){
		"join 1": func(b *table) { b.join("a", 1) },
		"bye 1":  func(b *table) { b.bye(id.Life{Node: "a", Incarnation: 1}, b.now) },
		"die 1":  func(b *table) { b.die("a", 1) },
		"join 2": func(b *table) { b.join("a", 2) },
		"die 2":  func(b *table) { b.die("a", 2) },
		"join 3": func(b *table) { b.join("a", 3) },
	}
	cases := 0
	for order := range orders(slices.Sorted(maps.Keys(events))) {
		for looks := range 1 << (len(order) - 1) { // a bit for each pause: the handler is told there
			b := newTable(t)
			live := ""
			settle := func() {
				for c := range strings.FieldsSeq(b.settled()) {
					if c[0] == '+' && live != "" || c[0] != '+' && live != c[1:] {
						t.Fatalf("order %v, looks %b: told %s while %q is there", order, looks, c, live)
					}
					live = ""
					if c[0] == '+' {
						live = c[1:]
					}
				}
			}
			for i, e := range order {
				events[e](b)
				if looks>>i&1 == 1 {
					settle()
				}
			}
			settle()
			p, ok := b.peer("a")
			if !ok || p.Life.Incarnation != 3 || live != "a.3" || b.len() != 1 {
				t.Fatalf("order %v, looks %b: ends with %v, the handler was told of %q", order, looks, p.Life, live)
			}
			if lost := b.lostSince(time.Time{}); lost != nil {
				t.Fatalf("order %v, looks %b: it lives, and is called at %v", order, looks, lost)
			}
			cases++
		}
	}
	t.Logf("%d orders", cases)
}

// orders yields all permutations.
func orders(of []string) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		var step func(k int) bool
		step = func(k int) bool {
			if k == len(of) {
				return yield(of)
			}
			for i := k; i < len(of); i++ {
				of[k], of[i] = of[i], of[k]
				if !step(k + 1) {
					return false
				}
				of[k], of[i] = of[i], of[k]
			}
			return true
		}
		step(0)
	}
}

// Whatever memberlist says in whatever order, the members are at the end
// exactly those that it believes to be alive, of each node the newest life that
// was ever admitted, but for one that has just said goodbye.
func TestTableEndsAsMemberlistSays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newTable(t)
		const goodbye = 30 * time.Second
		alive := map[id.Life]bool{} // memberlist's own view
		newest := map[id.Node]id.Incarnation{}
		bye := map[id.Life]time.Time{}
		life := func(t *rapid.T) id.Life {
			return id.Life{
				Node:        rapid.SampledFrom([]id.Node{"a", "b", "c.d"}).Draw(t, "node"),
				Incarnation: id.Incarnation(rapid.Uint64Range(1, 5).Draw(t, "incarnation")),
			}
		}
		check := func() {
			b.settle(b.now, goodbye)
			var want, got []string
			for l := range alive {
				said, ok := bye[l]
				if newest[l.Node] == l.Incarnation && (!ok || b.now.Sub(said) >= goodbye) {
					want = append(want, l.String())
				}
			}
			for _, m := range b.list(Member{Life: b.self, Self: true}) {
				if !m.Self {
					got = append(got, m.Life.String())
				}
			}
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Fatalf("members are %v, want %v", got, want)
			}
		}
		listed := func() (all []string) {
			for l := range alive {
				all = append(all, listName(l))
			}
			return all
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				l := life(t)
				if err := b.join(l.Node, l.Incarnation); err == nil {
					alive[l] = true
					newest[l.Node] = max(newest[l.Node], l.Incarnation)
				} else if l.Incarnation >= newest[l.Node] {
					t.Fatalf("%s was refused: %v", l, err)
				}
			},
			"die": func(t *rapid.T) {
				l := life(t)
				b.die(l.Node, l.Incarnation)
				delete(alive, l)
			},
			"bye": func(t *rapid.T) {
				l := life(t)
				b.bye(l, b.now)
				if b.lives[listName(l)] != nil { // else nobody knows whose it is
					bye[l] = b.now
				}
			},
			"reconcile": func(*rapid.T) {
				b.now = b.now.Add(10 * time.Second)
				b.reconcile(listed(), b.now)
				for l := range bye {
					if b.lives[listName(l)] == nil {
						delete(bye, l)
					}
				}
				for node := range newest {
					if n := b.names[node.Hash()]; n == nil {
						delete(newest, node)
					}
				}
			},
			"look": func(*rapid.T) { check() },
		})
		b.now = b.now.Add(time.Minute)
		b.reconcile(listed(), b.now)
		check()
	})
}
