package cluster

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"pgregory.net/rapid"

	"github.com/kvferry/kvferry/internal/id"
)

// table is a roster with a clock of its own and the callbacks' way to it.
type table struct {
	*roster
	t   rapid.TB
	now time.Time
}

func newTable(t rapid.TB) *table {
	r := newRoster(id.Life{Node: "self", Incarnation: 100}, localhost, make(chan struct{}, 1), &counters{})
	return &table{&r, t, time.Unix(1e9, 0)}
}

var localhost = mustAddr("127.0.0.1:1").Addr()

func listed(l id.Life) *memberlist.Node {
	return &memberlist.Node{Name: listName(l), Addr: net.IP{127, 0, 0, 1}, Port: uint16(l.Incarnation), Meta: Meta{Role: "both"}.encode()}
}

func (b *table) join(node id.Node, i id.Incarnation) error {
	n := listed(id.Life{Node: node, Incarnation: i})
	err := b.admit(n)
	if err == nil {
		b.heard(n)
	}
	return err
}

func (b *table) die(node id.Node, i id.Incarnation) {
	b.died(listed(id.Life{Node: node, Incarnation: i}), b.now)
}

func (b *table) settled() string {
	var all []string
	for _, c := range b.settle(b.now, 30*time.Second) {
		switch {
		case c.joined:
			all = append(all, "+"+c.member.Life.String())
		case c.updated:
			all = append(all, "="+c.member.Life.String())
		case c.graceful:
			all = append(all, "~"+c.member.Life.String())
		default:
			all = append(all, "-"+c.member.Life.String())
		}
	}
	return strings.Join(all, " ")
}

func (b *table) want(want string) {
	b.t.Helper()
	if got := b.settled(); got != want {
		b.t.Fatalf("changes %q, want %q", got, want)
	}
}

func TestNewerLifeReplacesOlder(t *testing.T) {
	t.Run("join of the new before the death of the old", func(t *testing.T) {
		b := newTable(t)
		b.join("a", 1)
		b.want("+a.1")
		b.join("a", 2)
		b.want("-a.1 +a.2")
		b.die("a", 1)
		b.want("")
		if _, ok := b.peer("a"); !ok {
			t.Error("the late death of the old life removed the new one")
		}
	})
	t.Run("all between two looks", func(t *testing.T) {
		b := newTable(t)
		b.join("a", 1)
		b.want("+a.1")
		b.join("a", 2)
		b.die("a", 1)
		b.die("a", 2)
		b.join("a", 3)
		b.want("-a.1 +a.3")
	})
	t.Run("an old life does not come back", func(t *testing.T) {
		b := newTable(t)
		b.join("a", 1)
		b.join("a", 2)
		b.want("+a.2")
		b.die("a", 2)
		b.want("-a.2") // though memberlist still believes in a.1
		if err := b.join("a", 1); !errors.Is(err, errRefused) {
			t.Errorf("an older life was admitted: %v", err)
		}
		b.want("")
		if b.count.refused.Load() != 1 {
			t.Errorf("%d refusals were counted", b.count.refused.Load())
		}
		b.join("a", 2)
		b.want("+a.2") // a false death
	})
}

func TestGoodbye(t *testing.T) {
	b := newTable(t)
	b.join("a", 1)
	b.want("+a.1")
	b.bye(id.Life{Node: "a", Incarnation: 7}, b.now) // of a life that nobody knows
	b.want("")
	b.bye(id.Life{Node: "a", Incarnation: 1}, b.now)
	b.want("~a.1")
	b.die("a", 1)
	b.want("")
	if lost := b.lostSince(time.Time{}); lost != nil {
		t.Errorf("one that left is called back at %v", lost)
	}
	b.join("b", 1)
	b.want("+b.1")
	b.bye(id.Life{Node: "b", Incarnation: 1}, b.now) // forged: b lives on
	b.want("~b.1")
	b.now = b.now.Add(time.Minute)
	b.reconcile([]string{"b.1"}, b.now)
	b.want("+b.1")
	b.die("b", 1)
	b.want("-b.1")
	if lost := b.lostSince(time.Time{}); !slices.Equal(lost, []addrPort{mustAddr("127.0.0.1:1")}) {
		t.Errorf("lost is %v", lost)
	}
}

func TestMetaChangesWithinALife(t *testing.T) {
	b := newTable(t)
	b.join("a", 1)
	b.want("+a.1")
	n := listed(id.Life{Node: "a", Incarnation: 1})
	n.Meta = Meta{Role: "both", Draining: true}.encode()
	b.heard(n)
	b.heard(n)
	b.want("=a.1")
	b.want("")
	if p, _ := b.peer("a"); !p.Meta.Draining {
		t.Errorf("it is listed as %+v", p.Member)
	}
	// It died meanwhile: then it has left, and comes back as it is now.
	b.die("a", 1)
	b.want("-a.1")
	b.heard(n)
	b.want("+a.1")
	b.heard(listed(id.Life{Node: "a", Incarnation: 1}))
	b.join("a", 2)
	b.want("-a.1 +a.2")
}

// Where names are proved nobody is a member before.
func TestUnprovedIsNoMember(t *testing.T) {
	b := newTable(t)
	b.proves = make(chan struct{}, 1)
	next := func() (peer, bool, time.Duration) { return b.unproved(b.now) }
	b.join("a", 1)
	b.want("")
	<-b.proves
	p, ok, _ := next()
	if !ok || p.Life.Node != "a" {
		t.Fatalf("to be called is %v, %v", p.Life, ok)
	}
	if _, ok, wait := next(); ok || wait != time.Hour {
		t.Errorf("it is called twice, or in %v", wait)
	}
	b.proved(p, false, b.now.Add(time.Minute))
	b.want("")
	if _, ok, wait := next(); ok || wait != time.Minute {
		t.Errorf("it is called again in %v", wait)
	}
	b.now = b.now.Add(time.Minute)
	if p, ok, _ = next(); !ok {
		t.Fatal("it is not called again")
	}
	b.proved(p, true, b.now)
	b.want("+a.1")
	b.die("a", 1)
	b.want("-a.1")
	if len(b.lostRings(b.now)) != 1 {
		t.Error("it is not lost")
	}
	b.join("a", 1)
	b.want("+a.1")
	// A new life proves itself anew, and hides the old one until then.
	b.join("a", 2)
	b.want("-a.1")
	p, ok, _ = next()
	if !ok || p.Life.Incarnation != 2 {
		t.Fatalf("to be called is %v, %v", p.Life, ok)
	}
	b.die("a", 2) // while it is called
	b.proved(p, true, b.now)
	b.want("")
	b.join("ghost", 1)
	b.die("ghost", 1)
	b.want("")
	if lost := b.lostRings(b.now); len(lost) != 1 || b.names[b.hash("ghost")].lost != (time.Time{}) {
		t.Errorf("who was never a member is lost: %v", lost)
	}
}

func TestLostRings(t *testing.T) {
	b := newTable(t)
	for _, node := range []id.Node{"a", "b", "c"} {
		b.join(node, 1)
	}
	b.settled()
	ids := ringOf(0, 1).IDs()
	b.hasRing("a", ids)
	b.hasRing("nobody", ids)
	b.bye(id.Life{Node: "c", Incarnation: 1}, b.now)
	for _, node := range []id.Node{"a", "b", "c"} {
		b.die(node, 1)
	}
	b.settled()
	if lost := b.lostRings(b.now); len(lost) != 2 || !slices.Equal(lost["a"], ids) || lost["b"] != nil {
		t.Errorf("lost: %v", lost)
	}
	b.join("b", 2)
	b.settled()
	b.now = b.now.Add(remember + time.Second)
	if lost := b.lostRings(b.now); len(lost) != 0 {
		t.Errorf("after a day: %v", lost)
	}
}

func TestHashCollision(t *testing.T) {
	b := newTable(t)
	b.hash = func(n id.Node) id.NodeHash { return id.NodeHash(n[0]) }
	if err := b.join("alpha", 1); err != nil {
		t.Fatal(err)
	}
	for _, second := range []id.Node{"aleph", "sam"} { // one like another member, one like ourselves
		if err := b.join(second, 1); !errors.Is(err, errRefused) {
			t.Errorf("%s was admitted: %v", second, err)
		}
	}
	b.want("+alpha.1")
	if n := b.count.collisions.Load(); n != 2 {
		t.Errorf("%d collisions were counted", n)
	}
}

func TestAdmitRefuses(t *testing.T) {
	good := listed(id.Life{Node: "a", Incarnation: 1})
	for name, change := range map[string]func(n *memberlist.Node){
		"no incarnation":       func(n *memberlist.Node) { n.Name = "a" },
		"incarnation 0":        func(n *memberlist.Node) { n.Name = "a.0" },
		"leading zero":         func(n *memberlist.Node) { n.Name = "a.01" },
		"upper case":           func(n *memberlist.Node) { n.Name = "a.A" },
		"too large":            func(n *memberlist.Node) { n.Name = "a." + strings.Repeat("v", 13) },
		"bad letters":          func(n *memberlist.Node) { n.Name = "a\n.1" },
		"long name":            func(n *memberlist.Node) { n.Name = strings.Repeat("a", 65) + ".1" },
		"no address":           func(n *memberlist.Node) { n.Addr = nil },
		"address of 5 bytes":   func(n *memberlist.Node) { n.Addr = make(net.IP, 5) },
		"unspecified":          func(n *memberlist.Node) { n.Addr = net.IPv4zero },
		"not loopback like us": func(n *memberlist.Node) { n.Addr = net.IP{192, 0, 2, 1} },
		"port 0":               func(n *memberlist.Node) { n.Port = 0 },
		"no metadata":          func(n *memberlist.Node) { n.Meta = nil },
		"our name":             func(n *memberlist.Node) { n.Name = "self.1" },
	} {
		b := newTable(t)
		n := *good
		change(&n)
		if b.admit(&n) == nil {
			t.Errorf("%s: admitted", name)
		}
		if len(b.lives)+len(b.names) != 0 || b.count.refused.Load() != 1 {
			t.Errorf("%s: left %d lives and %d names behind", name, len(b.lives), len(b.names))
		}
	}
	if err := newTable(t).admit(good); err != nil {
		t.Error(err)
	}
}

func TestRosterIsBounded(t *testing.T) {
	b := newTable(t)
	b.maxNodes, b.maxLives = 100, 200
	for i := range b.maxNodes {
		if err := b.join(id.Node(fmt.Sprint("n", i)), 1); err != nil {
			t.Fatal(err)
		}
	}
	b.settled()
	if err := b.join("late", 1); !errors.Is(err, errRefused) {
		t.Errorf("one too many: %v", err)
	}
	b.die("n7", 1)
	b.want("-n7.1")
	b.now = b.now.Add(time.Second)
	b.die("n8", 1)
	b.want("-n8.1")
	if err := b.join("late", 1); err != nil {
		t.Errorf("after a death: %v", err)
	}
	b.want("+late.1")
	if _, newest := b.lists(id.Life{Node: "n7", Incarnation: 1}); newest != 0 {
		t.Error("the one that was lost first is still remembered")
	}
	if _, newest := b.lists(id.Life{Node: "n8", Incarnation: 1}); newest != 1 {
		t.Error("the one that was lost last is forgotten")
	}
	// A node that restarts without end fills the lives, until reconciling forgets the dead.
	var err error
	for i := id.Incarnation(2); err == nil && int(i) < 2*b.maxLives; i++ {
		if err = b.join("n1", i); err == nil {
			b.die("n1", i)
		}
	}
	if !errors.Is(err, errRefused) || len(b.lives) > b.maxLives {
		t.Errorf("%d lives, then %v", len(b.lives), err)
	}
	for range 4 {
		b.reconcile(nil, b.now)
	}
	if len(b.lives) != 0 {
		t.Errorf("%d lives are left", len(b.lives))
	}
	b.settled()
	b.now = b.now.Add(remember + time.Hour)
	b.reconcile(nil, b.now)
	if len(b.names) != 0 {
		t.Errorf("%d names are left", len(b.names))
	}
}

func TestReconcile(t *testing.T) {
	b := newTable(t)
	b.join("a", 1)
	b.join("b", 1)
	b.want("+a.1 +b.1")
	b.reconcile([]string{"a.1"}, b.now) // may be a matter of time
	b.want("")
	b.reconcile([]string{"a.1", "b.1"}, b.now)
	b.reconcile([]string{"a.1"}, b.now)
	b.want("")
	b.reconcile([]string{"a.1"}, b.now)
	b.want("-b.1")
	if b.count.diverged.Load() != 1 {
		t.Errorf("%d divergences were counted", b.count.diverged.Load())
	}
	b.reconcile([]string{"a.1", "b.1"}, b.now)
	b.reconcile([]string{"a.1", "b.1"}, b.now)
	b.want("+b.1")
}

func TestFence(t *testing.T) {
	b := newTable(t)
	b.join("self", 99)
	b.fence(100)
	if b.newestOwn() != 100 {
		t.Errorf("newest is %d", b.newestOwn())
	}
	select {
	case <-b.fenced:
		t.Fatal("fenced by an older life")
	default:
	}
	b.join("self", 101)
	b.join("self", 105)
	b.join("self", 103)
	<-b.fenced
	if b.newestOwn() != 105 {
		t.Errorf("newest is %d", b.newestOwn())
	}
	b.want("")
}

func TestPick(t *testing.T) {
	b := newTable(t)
	for i := range 10 {
		b.join(id.Node(fmt.Sprint("n", i)), 1)
	}
	b.settled()
	seen := map[id.Node]int{}
	for range 1000 {
		picked := b.pick(4)
		if len(picked) != 4 {
			t.Fatalf("picked %d", len(picked))
		}
		once := map[id.Node]bool{}
		for _, p := range picked {
			once[p.Life.Node] = true
			seen[p.Life.Node]++
		}
		if len(once) != 4 {
			t.Fatal("picked one twice")
		}
	}
	for n, k := range seen {
		if k < 200 {
			t.Errorf("%s was picked %d times of 4000", n, k)
		}
	}
	if len(seen) != 10 || len(b.pick(20)) != 10 {
		t.Errorf("picked among %d", len(seen))
	}
}

// Whatever memberlist says in whatever order, the handler hears a story that
// makes sense, and what it has heard is what Members lists.
func TestStoryMakesSense(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := newTable(t)
		live := map[id.Node]id.Incarnation{}
		highest := map[id.Node]id.Incarnation{}
		alive := map[string]bool{} // memberlist's own view
		node := rapid.SampledFrom([]id.Node{"a", "b", "c.d"})
		incarnation := rapid.Uint64Range(1, 5)
		settle := func() {
			for _, c := range b.settle(b.now, 30*time.Second) {
				n, i := c.member.Life.Node, c.member.Life.Incarnation
				switch {
				case c.joined && live[n] != 0:
					t.Fatalf("%v joined before %d left", c.member.Life, live[n])
				case c.joined && i < highest[n]:
					t.Fatalf("%v joined after %d was heard of", c.member.Life, highest[n])
				case c.joined:
					live[n], highest[n] = i, i
				case c.updated && live[n] != i:
					t.Fatalf("%v was updated, but %d is there", c.member.Life, live[n])
				case c.updated:
				case live[n] != i:
					t.Fatalf("%v left, but %d was there", c.member.Life, live[n])
				default:
					delete(live, n)
				}
			}
			for _, m := range b.list(Member{Life: b.self, Self: true}) {
				if !m.Self && live[m.Life.Node] != m.Life.Incarnation {
					t.Fatalf("%v is listed, the handler knows of %d", m.Life, live[m.Life.Node])
				}
			}
			if b.len() != len(live) {
				t.Fatalf("%d are listed, the handler knows of %d", b.len(), len(live))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"join": func(t *rapid.T) {
				l := id.Life{Node: node.Draw(t, "node"), Incarnation: id.Incarnation(incarnation.Draw(t, "incarnation"))}
				if b.join(l.Node, l.Incarnation) == nil {
					alive[listName(l)] = true
				}
			},
			"update": func(t *rapid.T) {
				l := id.Life{Node: node.Draw(t, "node"), Incarnation: id.Incarnation(incarnation.Draw(t, "incarnation"))}
				if n := listed(l); alive[n.Name] {
					n.Meta = Meta{Draining: rapid.Bool().Draw(t, "draining")}.encode()
					b.heard(n)
				}
			},
			"die": func(t *rapid.T) {
				l := id.Life{Node: node.Draw(t, "node"), Incarnation: id.Incarnation(incarnation.Draw(t, "incarnation"))}
				b.die(l.Node, l.Incarnation)
				delete(alive, listName(l))
			},
			"bye": func(t *rapid.T) {
				b.bye(id.Life{Node: node.Draw(t, "node"), Incarnation: id.Incarnation(incarnation.Draw(t, "incarnation"))}, b.now)
			},
			"reconcile": func(t *rapid.T) {
				b.now = b.now.Add(10 * time.Second)
				var all []string
				for n := range alive {
					all = append(all, n)
				}
				b.reconcile(all, b.now)
				if b.count.diverged.Load() != 0 {
					t.Fatal("diverged")
				}
			},
			"settle": func(*rapid.T) { settle() },
		})
		settle()
	})
}
