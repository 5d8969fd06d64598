package cluster

import (
	"encoding/binary"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// A handler that is too slow for what comes in loses items, which are counted,
// and not members: they come and go as before. What comes after the load
// arrives.
func TestSlowHandlerLosesItemsNotMembers(t *testing.T) {
	t.Parallel()
	const n = 4
	p := feel(t)
	var slow atomic.Bool
	slow.Store(true)
	var mu sync.Mutex
	seen := map[uint32]bool{}
	all := group(t, n, func(i int, o *Options) {
		slowly(i, o)
		if i > 0 {
			return
		}
		o.Handler = &recorder{onItems: func(items [][]byte) {
			if slow.Load() {
				<-time.After(5 * time.Millisecond)
			}
			mu.Lock()
			defer mu.Unlock()
			for _, item := range items {
				seen[binary.BigEndian.Uint32(item)] = true
			}
		}}
	})
	victim := all[0]
	stopped := make(chan struct{})
	var wg sync.WaitGroup
	stop := sync.OnceFunc(func() { close(stopped); wg.Wait() })
	t.Cleanup(stop)
	for _, m := range all[1:] {
		wg.Go(func() {
			tick := time.NewTicker(time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-stopped:
					return
				case <-tick.C:
				}
				for range 5 {
					if err := m.Send("n0", numbered(0, 8)); err != nil && !errors.Is(err, ErrUnknownMember) {
						t.Error(err)
						return
					}
				}
			}
		})
	}
	took := within(t, "items are dropped", func() bool { return victim.Stats().QueueDrops > 1000 })
	t.Logf("items were dropped after %v", took)
	late := launch(t, options(t, "late", 1, anywhere(), all[1].Gossip().String()))
	took = p.within(t, 5*time.Second, "a new member is told of", func() bool { return victim.about("late") != nil })
	t.Logf("a new member was told of after %v", took)
	took = p.within(t, 5*time.Second, "it is answered", func() bool { return len(late.joining.silent(late.calls.roster.alive())) == 0 })
	t.Logf("it was answered %v later", took)
	p.leave(t, late)
	late.Close()
	took = p.within(t, 5*time.Second, "it is gone", func() bool { return !sees(victim, late.Life()) })
	t.Logf("it was gone after %v", took)
	stop()
	s := victim.Stats()
	t.Logf("%d items delivered, %d packets in, %d dropped", s.ItemsIn, s.PacketsIn, s.QueueDrops)
	if s.ItemsIn+s.QueueDrops > s.PacketsIn {
		t.Errorf("more was delivered and dropped than came in")
	}
	slow.Store(false)
	within(t, "the backlog is dealt with", func() bool {
		victim.calls.inbox.mu.Lock()
		defer victim.calls.inbox.mu.Unlock()
		return len(victim.calls.inbox.messages) == 0
	})
	const after = 200
	for k := uint32(1); k <= after; k++ {
		within(t, "it can be sent", func() bool { return all[1+k%(n-1)].Send("n0", numbered(k, 120)) == nil })
	}
	within(t, "all that came later is there", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(seen) == 1+after
	})
	for _, m := range all {
		for _, e := range losses(m) {
			p.claim(t, e == "left late.1 graceful=true", "%s: %s", m.Life(), e)
		}
	}
}
