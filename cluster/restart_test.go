package cluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/kvferry/kvferry/internal/id"
)

// One node begins again and again, on the address that it had or on another,
// after it was killed or has left. Every observer sees the newest life soon,
// though memberlist loses some of its own messages and no exchange of states
// comes to the rescue; and what the new life says at once is heard.
func TestEveryRestartIsSeenByAll(t *testing.T) {
	for name, moves := range map[string]bool{"same address": false, "another address": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const n = 8
			p := feel(t)
			alone := func(o *Options) {
				o.tune = func(m *memberlist.Config) {
					hasty(m)
					m.PushPullInterval = time.Hour
				}
			}
			all := group(t, n, func(_ int, o *Options) { alone(o) })
			others, last := all[:n-1], all[n-1]
			node := last.Life().Node
			want := []string{"joined " + last.Life().String()}
			var took []time.Duration
			for i := id.Incarnation(2); int(i) < 2+much(8, 200); i++ {
				leaves := i%2 == 0
				if leaves {
					p.leave(t, last)
				}
				last.Close()
				bind := anywhere()
				if !moves {
					bind = last.Gossip().String()
				}
				o := options(t, node, i, bind, others[rand.IntN(n-1)].Gossip().String())
				alone(&o)
				last = launch(t, o)
				took = append(took, p.within(t, 5*time.Second, "the new life is everywhere", func() bool {
					return !slices.ContainsFunc(others, func(m member) bool { return !sees(m, last.Life()) })
				}))
				want = append(want, fmt.Sprintf("left %s.%d graceful=%v", node, i-1, leaves), fmt.Sprintf("joined %s.%d", node, i))
				joined(t, last)
				talk(t, []member{last, others[rand.IntN(n-1)]}, last.Life().String())
			}
			_, p99, most := quantiles(took)
			t.Logf("%d restarts: visible everywhere after %v (p99), %v at most", len(took), p99, most)
			for i, m := range others {
				p.told(t, m, node, want...)
				for _, e := range losses(m) {
					p.claim(t, strings.Contains(e, " "+string(node)+"."), "n%d: %s", i, e)
				}
			}
		})
	}
}

// A whole cluster starts at once, is killed and started again at once, and
// again, each of its members at a time of its own.
func TestAllAtOnce(t *testing.T) {
	t.Parallel()
	n := much(16, 32)
	p := feel(t)
	seeds := []string{free(t), free(t), free(t)}
	bind := make([]string, n)
	for i := range bind {
		bind[i] = anywhere()
		if i < len(seeds) {
			bind[i] = seeds[i]
		}
	}
	all := make([]member, n)
	start := func(i int, life id.Incarnation) {
		o := options(t, id.Node(fmt.Sprintf("n%02d", i)), life, bind[i], seeds...)
		o.Fast, o.tune = false, hasty
		r := &recorder{}
		o.Handler = r
		c, err := Start(o)
		for try := 0; errors.Is(err, ErrPort) && try < 100; try++ { // somebody passing by had it
			<-time.After(10 * time.Millisecond)
			c, err = Start(o)
		}
		if err != nil {
			t.Error(err)
			return
		}
		all[i] = member{c, r}
		bind[i] = c.Gossip().String()
	}
	t.Cleanup(func() {
		for _, m := range all {
			if m.Cluster != nil {
				m.Close()
			}
		}
	})
	atOnce := func(do func(i int)) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { do(i) })
		}
		wg.Wait()
		if t.Failed() {
			t.FailNow()
		}
	}
	check := func(what string, life id.Incarnation, begin time.Time) {
		var want []string
		for i := range n {
			want = append(want, fmt.Sprintf("n%02d.%d", i, life))
		}
		p.within(t, 15*time.Second, what+": all see all", func() bool { return everybody(all, strings.Join(want, " ")) })
		t.Logf("%s: all saw all after %v", what, time.Since(begin))
		for _, m := range all {
			joined(t, m)
			if fenced(m) {
				t.Errorf("%s: %s is fenced", what, m.Life())
			}
		}
	}
	begin := time.Now()
	atOnce(func(i int) { start(i, 1) })
	check("started at once", 1, begin)
	life := id.Incarnation(1)
	for range much(1, 20) {
		begin = time.Now()
		life++
		atOnce(func(i int) { all[i].Close() })
		atOnce(func(i int) { start(i, life) })
		if took := time.Since(begin); took > 2*time.Second {
			t.Logf("the restart itself took %v", took)
		}
		check("killed at once, then started at once", life, begin)

		life++
		atOnce(func(i int) {
			<-time.After(rand.N(2 * time.Second))
			all[i].Close()
			start(i, life)
		})
		check("each killed and started within two seconds", life, time.Now())
	}
}

// The seed begins again and knows nobody, since it has no seed itself. Who
// joins through it then finds all others all the same.
func TestSeedThatForgot(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 4, probing)
	for _, m := range all {
		within(t, "all have answered", func() bool { return len(m.joining.silent(m.calls.roster.alive())) == 0 })
	}
	seed := all[0].Gossip().String()
	all[0].Close()
	all[0] = launch(t, options(t, "n0", 2, seed))
	late := launch(t, options(t, "late", 1, anywhere(), seed))
	joined(t, late)
	all = append(all, late)
	took := p.within(t, 15*time.Second, "all see all", func() bool { return everybody(all, "late.1 n0.2 n1.1 n2.1 n3.1") })
	t.Logf("all saw all after %v", took)
	talk(t, all, "after the seed's restart")
}

// While half of the members restart without end, items between the others take
// as long as before: the announcements of members do not crowd them out.
func TestRestartsDoNotDelayItems(t *testing.T) {
	const n, stay, rate = 8, 4, 500
	p := feel(t)
	carriers := make([]*carrier, n)
	all := group(t, n, func(i int, o *Options) {
		probing(i, o)
		carriers[i] = &carrier{}
		o.Handler = carriers[i].handler()
	})
	for i, m := range all {
		carriers[i].self.Store(m.Cluster)
	}
	next := uint32(0)
	measure := func(d time.Duration) (p50, p99 time.Duration, missing float64) {
		begin, first := map[uint32]time.Time{}, next
		tick := time.NewTicker(time.Second / rate)
		defer tick.Stop()
		for end := time.Now().Add(d); time.Now().Before(end); next++ {
			<-tick.C
			begin[next] = time.Now()
			if err := all[next%stay].Broadcast(numbered(next, 120)); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(300 * time.Millisecond) // what is under way
		var took []time.Duration
		lost := 0
		for k := first; k < next; k++ {
			for i := range uint32(stay) {
				if at, ok := carriers[i].saw(k); ok {
					took = append(took, at.Sub(begin[k]))
				} else if i != k%stay {
					lost++
				}
			}
		}
		p50, p99, _ = quantiles(took)
		return p50, p99, float64(lost) / float64(int(next-first)*(stay-1))
	}
	quiet50, quiet99, quietMissing := measure(time.Second)

	stopped := make(chan struct{})
	var wg sync.WaitGroup
	stop := sync.OnceFunc(func() { close(stopped); wg.Wait() })
	t.Cleanup(stop)
	var mu sync.Mutex
	restarts := 0
	for i := stay; i < n; i++ {
		last := all[i]
		wg.Go(func() {
			for life := id.Incarnation(2); ; life++ {
				last.Close()
				o := options(t, last.Life().Node, life, last.Gossip().String(), all[0].Gossip().String())
				probing(i, &o)
				c := &carrier{}
				r := c.handler()
				o.Handler = r
				next, err := Start(o)
				if err != nil {
					t.Error(err)
					return
				}
				c.self.Store(next)
				last = member{next, r}
				mu.Lock()
				restarts++
				mu.Unlock()
				select {
				case <-time.After(between(100*time.Millisecond, 300*time.Millisecond)):
				case <-stopped:
					next.Close()
					return
				}
			}
		})
	}
	busy50, busy99, busyMissing := measure(max(2*time.Second, *soak))
	stop()
	t.Logf("quiet: p50 %v, p99 %v, %.2f %% missing; during %d restarts: p50 %v, p99 %v, %.2f %% missing",
		quiet50, quiet99, 100*quietMissing, restarts, busy50, busy99, 100*busyMissing)
	most := max(10*quiet99, 250*time.Millisecond)
	p.claim(t, busy99 <= most, "p99 is %v, want at most %v", busy99, most)
	p.claim(t, busyMissing < 0.05, "%.1f %% of the items are missing", 100*busyMissing)
	for _, m := range all[:stay] {
		for _, e := range losses(m) {
			for _, o := range all[:stay] {
				p.claim(t, !strings.Contains(e, " "+o.Life().String()+" "), "%s: %s", m.Life(), e)
			}
		}
	}
}

// A cluster that is closed in whatever it is doing leaves nothing behind.
func TestHundredLivesLeaveNothing(t *testing.T) {
	o := options(t, "seed", 1, anywhere())
	probing(0, &o)
	seed := launch(t, o)
	nobody := free(t)
	round := func(i int) {
		o := options(t, "x", id.Incarnation(i), anywhere(), seed.Gossip().String())
		probing(i, &o)
		switch i % 4 {
		case 0: // closed while it joins
			launch(t, o).Close()
		case 1: // closed while it calls in vain
			o.Join = []string{nobody}
			launch(t, o).Close()
		case 2: // closed while it talks
			c := launch(t, o)
			joined(t, c)
			for range 100 {
				_ = c.Broadcast(make([]byte, MaxItem))
			}
			c.Close()
		default: // closed after a goodbye
			c := launch(t, o)
			joined(t, c)
			c.Leave(t.Context())
			c.Close()
		}
	}
	rest := func() (int, int) {
		var goroutines, files int
		within(t, "all comes to rest", func() bool {
			g, f := count(t)
			same := g == goroutines && f == files
			goroutines, files = g, f
			<-time.After(50 * time.Millisecond)
			return same
		})
		return goroutines, files
	}
	for i := range 4 {
		round(i + 1)
	}
	goroutines, files := rest()
	for i := range 100 {
		round(i + 5)
	}
	within(t, "goroutines and files are as many as before", func() bool {
		g, f := count(t)
		return g <= goroutines && f <= files
	})
}
