package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/internal/id"
)

// Two halves that were apart for longer than memberlist remembers the dead
// find each other by themselves, and what happened on one side meanwhile
// reaches the other.
func TestPartitionHeals(t *testing.T) {
	t.Parallel()
	const n = 6
	p := feel(t)
	var w weather
	all := group(t, n, func(_ int, o *Options) { w.over(o) })
	left, right := all[:n/2], all[n/2:]
	side := map[netip.AddrPort]bool{}
	for _, m := range left {
		side[m.Gossip()] = true
	}
	begin := time.Now()
	w.split(func(from, to netip.AddrPort) bool { return side[from] != side[to] })
	took := within(t, "each side has lost the other", func() bool {
		return everybody(left, "n0.1 n1.1 n2.1") && everybody(right, "n3.1 n4.1 n5.1")
	})
	t.Logf("each side had lost the other after %v", took)
	talk(t, left, "left")
	talk(t, right, "right")
	apart := 3 * timings(true).dead
	within(t, "the partition is over", func() bool { return time.Since(begin) >= apart })
	for _, l := range left {
		for _, r := range right {
			if sees(l, r.Life()) || sees(r, l.Life()) || l.has("right: 0") || r.has("left: 0") {
				t.Fatalf("the cut leaks: %s, %s", names(l), names(r))
			}
		}
	}
	// What each owner has to tell has changed meanwhile. A member passes on
	// what it was told of others, as whoever keeps replicas does.
	known := make([]map[string]bool, n)
	for i, m := range all {
		known[i] = map[string]bool{fmt.Sprintf("state of n%d in the dark", i): true}
		publish(t, m, known[i])
	}
	refused := refusals(all)

	w.split(nil)
	took = p.within(t, 15*time.Second, "all see all", func() bool { return everybody(all, "n0.1 n1.1 n2.1 n3.1 n4.1 n5.1") })
	t.Logf("all saw all %v after healing", took)
	talk(t, all, "together")
	took = p.within(t, 15*time.Second, "all states are everywhere", func() bool {
		whole := true
		for i, m := range all {
			before := len(known[i])
			m.heard.mu.Lock()
			for _, state := range m.heard.states {
				for line := range strings.Lines(string(state)) {
					known[i][strings.TrimSpace(line)] = true
				}
			}
			m.heard.mu.Unlock()
			if len(known[i]) > before {
				publish(t, m, known[i])
			}
			whole = whole && len(known[i]) == n
		}
		return whole
	})
	t.Logf("all states were everywhere %v later", took)
	cameBack(t, left, right)
	if now := refusals(all); now != refused {
		t.Errorf("%d announcements were refused after healing", now-refused)
	}
}

// Cuts around the time in which memberlist finds a member dead, and before it
// forgets it: all come back as the lives that they were, and nothing that was
// said of them in the dark is held against them.
func TestCutsLeaveNoScar(t *testing.T) {
	t.Parallel()
	const n = 6
	const whole = "n0.1 n1.1 n2.1 n3.1 n4.1 n5.1"
	p := feel(t)
	cuts := []time.Duration{time.Second, 2 * time.Second, 3 * time.Second}
	var w weather
	var groups [][]member
	where := map[netip.AddrPort]int{}
	for g := range cuts {
		all := group(t, n, func(_ int, o *Options) { w.over(o) })
		for i, m := range all {
			where[m.Gossip()] = 2*g + 2*i/n
		}
		groups = append(groups, all)
	}
	begin := time.Now()
	w.split(func(from, to netip.AddrPort) bool {
		return where[from] != where[to] && time.Since(begin) < cuts[where[from]/2]
	})
	for g, all := range groups {
		within(t, "the cut is over", func() bool { return time.Since(begin) >= cuts[g] })
		lost, refused := 0, refusals(all)
		for _, m := range all {
			lost += n - len(m.Members())
		}
		took := p.within(t, 15*time.Second, "all see all", func() bool { return everybody(all, whole) })
		t.Logf("cut of %v: %d of %d had been lost, all saw all %v after healing", cuts[g], lost, n*n/2, took)
		talk(t, all, fmt.Sprintf("after %v", cuts[g]))
		if now := refusals(all); now != refused {
			t.Errorf("cut of %v: %d announcements were refused after healing", cuts[g], now-refused)
		}
	}
	// A suspicion that began in the dark may end in the light, and is refuted.
	within(t, "all see all at last", func() bool {
		return !slices.ContainsFunc(groups, func(all []member) bool { return !everybody(all, whole) })
	})
	for _, all := range groups {
		cameBack(t, all[:n/2], all[n/2:])
	}
}

func publish(t *testing.T, m member, lines map[string]bool) {
	t.Helper()
	var all []string
	for line := range lines {
		all = append(all, line)
	}
	if err := m.SetState([]byte(strings.Join(all, "\n"))); err != nil {
		t.Fatal(err)
	}
}

func refusals(all []member) (sum uint64) {
	for _, m := range all {
		sum += m.Stats().Refused
	}
	return sum
}

// cameBack checks what each side was told of the other: every one of them
// joined, and came back as the same life as often as it was lost.
func cameBack(t *testing.T, left, right []member) {
	t.Helper()
	check := func(m member, node id.Node) {
		joined, left := fmt.Sprintf("joined %s.1", node), fmt.Sprintf("left %s.1 graceful=false", node)
		within(t, "the handler was told", func() bool {
			told := m.about(node)
			return len(told)%2 == 1 && told[len(told)-1] == joined
		})
		for i, e := range m.about(node) {
			if want := []string{joined, left}[i%2]; e != want {
				t.Errorf("%s: event %d about %s is %q, want %q", m.Life(), i, node, e, want)
			}
		}
	}
	for _, l := range left {
		for _, r := range right {
			check(l, r.Life().Node)
			check(r, l.Life().Node)
		}
	}
}
