package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"
)

// many is how many nodes start at once: what they cost grows with its square. It is
// 32 with a soak of 16 s and more.
func many() int { return int(min(32, 2*soak.Seconds())) }

// TestManyAtOnce starts many nodes at once, on whatever ports are free. Each sees
// all others, on ports that nobody else has; requests move between them; and
// half of them may be killed at once and started again.
func TestManyAtOnce(t *testing.T) {
	nodes := many()
	begin := time.Now()
	// With the intervals of the others, two cores under the race detector would do
	// nothing but gossip.
	c := up(t, nodes/2, nodes/2, "cluster.preset=default")
	t.Logf("%d nodes see each other after %v", nodes, time.Since(begin).Round(time.Millisecond))
	meet := func() {
		t.Helper()
		ports := make(map[string]string)
		for _, n := range c.Nodes() {
			for name, a := range map[string]string{
				"gossip": n.Gossip.String(), "peer": n.Peer.String(), "data": n.Data.String(), "http": n.HTTP.String(),
			} {
				if other, taken := ports[a]; taken {
					t.Errorf("%s of %s is also %s", name, n.Node, other)
				}
				ports[a] = n.Node + " " + name
			}
			admin := dial(t, n.Engine)
			await(t, n.Node+" to see all", patience, func(ctx context.Context) error {
				seen, err := lives(ctx, admin)
				if err != nil {
					return err
				}
				for _, other := range c.Nodes() {
					if seen[other.Node] != other.Incarnation {
						return fmt.Errorf("of %s it sees life %d, want %d", other.Node, seen[other.Node], other.Incarnation)
					}
				}
				if len(seen) != nodes {
					return fmt.Errorf("it sees %d members", len(seen))
				}
				return nil
			})
		}
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	moves := func(round string) {
		t.Helper()
		for i := range 8 {
			from := c.engine(fmt.Sprintf("prefill-%d", rnd.IntN(nodes/2)))
			to := c.engine(fmt.Sprintf("decode-%d", rnd.IntN(nodes/2)))
			if err := move(t.Context(), newRequest(fmt.Sprint(round, i), 60), from, to, i%2 == 0, patience); err != nil {
				t.Errorf("%s to %s: %v", from.node(), to.node(), err)
			}
		}
	}
	meet()
	moves("at first")

	// The seed among them: who comes back finds the others by what it is told.
	var again []string
	for i, n := range c.Nodes() {
		if i%2 == 0 {
			again = append(again, n.Node)
			if err := c.Kill(n.Node, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, name := range again {
		if err := c.Restart(c.ctx, name, true); err != nil {
			t.Fatal(err)
		}
	}
	begin = time.Now()
	meet()
	took := time.Since(begin)
	t.Logf("half of them killed and started again: all see all after %v", took.Round(time.Millisecond))
	if took > patience {
		t.Errorf("all see all after %v, want %v at most", took, patience)
	}
	moves("again")
}
