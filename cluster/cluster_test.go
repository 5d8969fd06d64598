package cluster

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/hashicorp/memberlist"
	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/internal/id"
)

func TestMain(m *testing.M) {
	code := m.Run()
	// A probe of memberlist's may outlive its cluster by its longest interval.
	var err error
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if err = goleak.Find(); err == nil {
			break
		}
	}
	if err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// patience is how long what must happen may take a starved machine: what takes
// longer hangs. Claims about time are pulse's.
const patience = 2 * time.Minute

// within polls until ok, and fails when patience is over.
func within(t testing.TB, what string, ok func() bool) time.Duration {
	t.Helper()
	begin := time.Now()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Since(begin) > patience {
			t.Fatalf("not within %v: %s", patience, what)
		}
		<-tick.C
	}
	return time.Since(begin)
}

// recorder is a Handler that remembers.
type recorder struct {
	onItems func(items [][]byte)

	mu     sync.Mutex
	events []string
	items  [][]byte
	states [][]byte
}

func (r *recorder) Items(items [][]byte) {
	if r.onItems != nil {
		r.onItems(items)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.items = append(r.items, items...)
}

func (r *recorder) Joined(m Member) { r.event("joined " + m.Life.String()) }

func (r *recorder) Left(m Member, graceful bool) {
	r.event(fmt.Sprintf("left %s graceful=%v", m.Life, graceful))
}

func (r *recorder) Updated(m Member) {
	r.event(fmt.Sprintf("updated %s draining=%v", m.Life, m.Meta.Draining))
}

func (r *recorder) event(e string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
}

func (r *recorder) MergeState(state []byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.states = append(r.states, state)
}

// about returns the events that name a node.
func (r *recorder) about(node id.Node) []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var all []string
	for _, e := range r.events {
		if strings.Contains(e, " "+string(node)+".") {
			all = append(all, e)
		}
	}
	return all
}

func (r *recorder) has(item string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.items, func(b []byte) bool { return string(b) == item })
}

func (r *recorder) merged(state string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(r.states, func(b []byte) bool { return string(b) == state })
}

type member struct {
	*Cluster
	heard *recorder
}

func (m member) about(node id.Node) []string { return m.heard.about(node) }
func (m member) has(item string) bool        { return m.heard.has(item) }
func (m member) merged(state string) bool    { return m.heard.merged(state) }

// options have the test's own label: where a member has died, one of another
// test may listen, and be called. Such a member finds nobody dead, unless a test
// is about that: a starved machine would let it find live ones dead.
func options(t testing.TB, node id.Node, incarnation id.Incarnation, bind string, seeds ...string) Options {
	return Options{
		Life: id.Life{Node: node, Incarnation: incarnation}, Label: label(t),
		Meta: Meta{Role: "both", Group: id.Group(node), Fingerprint: 7},
		Bind: netip.MustParseAddrPort(bind), Join: seeds, Fast: true, tune: trusting,
	}
}

func label(t testing.TB) string { return fmt.Sprintf("%x", id.Node(t.Name()).Hash()) }

func trusting(m *memberlist.Config) { m.ProbeInterval = 0 }

// probing has a member find the dead, in a second or two, and on a starved
// machine perhaps live ones; slowly gives those some seconds more to say so.
func probing(_ int, o *Options) { o.tune = hasty }

func hasty(m *memberlist.Config) { m.SuspicionMult, m.SuspicionMaxTimeoutMult = 4, 6 }

func slowly(_ int, o *Options) { o.tune = nil }

func launch(t testing.TB, o Options) member {
	t.Helper()
	r, ok := o.Handler.(*recorder)
	if !ok {
		r = &recorder{}
		o.Handler = r
	}
	c, err := Start(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return member{c, r}
}

// group starts n members n0, n1, ... that know each other. The first one is
// the seed.
func group(t testing.TB, n int, change func(i int, o *Options)) []member {
	t.Helper()
	var all []member
	for i := range n {
		o := options(t, id.Node(fmt.Sprint("n", i)), 1, anywhere())
		if i > 0 {
			o.Join = []string{all[0].Gossip().String()}
		}
		if change != nil {
			change(i, &o)
		}
		all = append(all, launch(t, o))
	}
	for _, m := range all {
		joined(t, m)
		within(t, "all see all", func() bool { return len(m.Members()) == n })
	}
	return all
}

func joined(t testing.TB, m member) {
	t.Helper()
	must(t, m.Joined(soon(t)))
}

var places atomic.Uint32

// anywhere is any port of a loopback address that nobody else has, so that who
// comes back to the port finds it free.
func anywhere() string {
	n := places.Add(1)
	return fmt.Sprintf("127.62.%d.%d:0", n>>8&0xff, n&0xff)
}

// free returns an address that nobody listens on.
func free(t testing.TB) string {
	t.Helper()
	tcp, udp, err := listen(mustAddr(anywhere()))
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	defer udp.Close()
	return tcp.Addr().String()
}

func sees(m member, l id.Life) bool {
	return slices.ContainsFunc(m.Members(), func(o Member) bool { return o.Life == l })
}

func names(m member) string {
	var all []string
	for _, o := range m.Members() {
		all = append(all, o.Life.String())
	}
	return strings.Join(all, " ")
}

func TestMembersKnowEachOther(t *testing.T) {
	t.Parallel()
	all := group(t, 3, nil)
	for i, m := range all {
		if got := names(m); got != "n0.1 n1.1 n2.1" {
			t.Errorf("members of n%d: %s", i, got)
		}
		for _, o := range m.Members() {
			if o.Self != (o.Life == m.Life()) {
				t.Errorf("members of n%d: %s has Self=%v", i, o.Life, o.Self)
			}
			if want := (Meta{Role: "both", Group: id.Group(o.Life.Node), Fingerprint: 7}); o.Meta != want {
				t.Errorf("meta of %s is %+v, want %+v", o.Life, o.Meta, want)
			}
			k := slices.IndexFunc(all, func(m member) bool { return m.Life() == o.Life })
			if o.Gossip != all[k].Gossip() {
				t.Errorf("%s is at %s, want %s", o.Life, o.Gossip, all[k].Gossip())
			}
		}
		if s := m.Stats(); s.Members != 3 {
			t.Errorf("stats of n%d: %d members", i, s.Members)
		}
	}
}

func TestAloneIsJoined(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := launch(t, options(t, "a", 1, anywhere())).Joined(ctx); err != nil {
		t.Errorf("without seeds: %v", err)
	}
	// The first of a cluster may find only itself among the seeds.
	addr := free(t)
	joined(t, launch(t, options(t, "a", 1, addr, addr)))
}

// The visible part of a publication without a target: an item is on one node
// that was chosen at random.
func TestItemsTravel(t *testing.T) {
	t.Parallel()
	const n, rate, count = 8, 500, 500
	p := feel(t)
	var mu sync.Mutex
	begin := make([]time.Time, count)
	chosen := make([]int, count)
	seen := make([]map[uint32]bool, n)
	var took []time.Duration
	self := make([]*Cluster, n)
	all := group(t, n, func(i int, o *Options) {
		seen[i] = map[uint32]bool{}
		o.Handler = &recorder{onItems: func(items [][]byte) {
			for _, item := range items {
				k := binary.BigEndian.Uint32(item)
				mu.Lock()
				first := !seen[i][k]
				seen[i][k] = true
				if first && chosen[k] == i {
					took = append(took, time.Since(begin[k]))
				}
				c := self[i]
				mu.Unlock()
				if first {
					// At first sight it travels on.
					if err := c.Broadcast(item); err != nil && !errors.Is(err, ErrClosed) {
						t.Error(err)
					}
				}
			}
		}}
	})
	for i, m := range all {
		self[i] = m.Cluster
	}
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	for k := range count {
		<-tick.C
		from := k % n
		mu.Lock()
		begin[k] = time.Now()
		chosen[k] = (from + 1 + rand.IntN(n-1)) % n
		seen[from][uint32(k)] = true
		mu.Unlock()
		must(t, all[from].Broadcast(numbered(uint32(k), 120)))
	}
	// Nothing promises all of them; the few that both push and ring missed are
	// repaired by their owner, which is this test.
	repaired, last := -1, time.Now()
	within(t, "all items are on the node that was chosen", func() bool {
		mu.Lock()
		var missing []int
		for k := range count {
			if !seen[chosen[k]][uint32(k)] {
				missing = append(missing, k)
			}
		}
		mu.Unlock()
		if len(missing) > 0 && time.Since(last) > time.Second {
			last = time.Now()
			if repaired < 0 {
				repaired = len(missing)
			}
			for _, k := range missing {
				must(t, all[k%n].Broadcast(numbered(uint32(k), 120)))
			}
		}
		return len(missing) == 0
	})
	p.claim(t, repaired <= count*3/100, "%d of %d items had to be repaired", repaired, count)
	mu.Lock()
	defer mu.Unlock()
	slices.Sort(took)
	p50, p99 := took[len(took)/2], took[len(took)*99/100]
	t.Logf("%d items at %d/s to %d members: %d on the chosen one, p50 %v, p99 %v", count, rate, n, len(took), p50, p99)
	p.claim(t, p50 <= 250*time.Millisecond, "p50 %v", p50)
}

func TestRingReachesMembers(t *testing.T) {
	t.Parallel()
	all := group(t, 3, nil)
	all[0].calls.ring.add([][]byte{[]byte("again")}, 20)
	within(t, "both others have what only the ring offers", func() bool {
		return all[1].has("again") && all[2].has("again")
	})
	within(t, "the ring is empty", func() bool { return all[0].Stats().Ring == 0 })
}

func TestSend(t *testing.T) {
	t.Parallel()
	all := group(t, 3, nil)
	var items [][]byte
	for i := range 10 {
		items = append(items, bytes.Repeat([]byte{byte('a' + i)}, 700))
	}
	if err := all[0].Send("n1", items...); err != nil {
		t.Fatal(err)
	}
	within(t, "all items are there", func() bool {
		return !slices.ContainsFunc(items, func(b []byte) bool { return !all[1].has(string(b)) })
	})
	if all[2].has(string(items[0])) {
		t.Error("n2 has what was sent to n1")
	}
	for name, tt := range map[string]struct {
		to   id.Node
		item []byte
		want error
	}{
		"nobody":   {"n9", []byte("x"), ErrUnknownMember},
		"ourself":  {"n0", []byte("x"), ErrUnknownMember},
		"too long": {"n1", make([]byte, MaxItem+1), ErrTooLong},
	} {
		if err := all[0].Send(tt.to, tt.item); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

func TestBroadcastRefuses(t *testing.T) {
	t.Parallel()
	c := launch(t, options(t, "a", 1, anywhere()))
	if err := c.Broadcast(make([]byte, MaxItem+1)); !errors.Is(err, ErrTooLong) {
		t.Errorf("too long: %v", err)
	}
	if err := c.Broadcast(nil); err == nil {
		t.Error("an empty item was taken")
	}
	if err := c.SetState(make([]byte, MaxState+1)); !errors.Is(err, ErrTooLong) {
		t.Errorf("state too long: %v", err)
	}
	if err := c.Broadcast(make([]byte, MaxItem)); err != nil {
		t.Errorf("longest: %v", err)
	}
	c.Close()
	if err := c.Broadcast([]byte("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	if err := c.Send("b", []byte("x")); !errors.Is(err, ErrClosed) {
		t.Errorf("send, closed: %v", err)
	}
	if err := c.Joined(t.Context()); err != nil {
		t.Errorf("joined, then closed: %v", err)
	}
	if err := c.Leave(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("leave, closed: %v", err)
	}
}

func TestLongestItemTravels(t *testing.T) {
	t.Parallel()
	keys := [][]byte{bytes.Repeat([]byte{1}, 32)}
	all := group(t, 2, func(_ int, o *Options) { o.Ring.Keys, o.Label = keys, strings.Repeat("l", MaxLabel) })
	pushed, again := strings.Repeat("p", MaxItem), strings.Repeat("a", all[0].calls.ring.most-4)
	if err := all[0].Broadcast([]byte(pushed)); err != nil {
		t.Fatal(err)
	}
	// What memberlist never has room for does not keep the rest waiting.
	all[0].calls.ring.add([][]byte{[]byte(pushed), []byte(again)}, 1)
	if n := all[0].Stats().RingDropped; n == 0 {
		t.Error("an item that is never offered was not counted")
	}
	within(t, "both long items", func() bool { return all[1].has(pushed) && all[1].has(again) })
	if room := offerBytes(Options{Label: "a label of the usual length", Ring: Ring{Keys: keys}}); room < 4+MaxItem {
		t.Errorf("room for %d bytes: the longest item is never offered again", room)
	}
}

// An overload is refused, not queued, and nobody is taken for dead.
func TestFlood(t *testing.T) {
	t.Parallel()
	p, start := feel(t), time.Now()
	all := group(t, 3, probing)
	item := make([]byte, MaxItem)
	full, most, slow := 0, 0, 0
	for end := time.Now().Add(time.Second); time.Now().Before(end) || full == 0 && time.Since(start) < patience; {
		begin := time.Now()
		err := all[0].Broadcast(item)
		if time.Since(begin) > 100*time.Millisecond {
			slow++
		}
		switch {
		case errors.Is(err, ErrFull):
			full++
			runtime.Gosched()
		case err != nil:
			t.Fatal(err)
		}
		most = max(most, all[0].Stats().Outbox)
	}
	p.claim(t, slow <= 3, "broadcast blocked %d times", slow)
	s := all[0].Stats()
	if full == 0 || s.ItemsDropped != uint64(full) {
		t.Errorf("%d items refused, %d counted", full, s.ItemsDropped)
	}
	if most*MaxItem > outboxBytes || s.Ring > ringItems {
		t.Errorf("outbox held %d items, ring %d", most, s.Ring)
	}
	took := time.Since(start)
	if limit := uint64(3 * (pushRate*max(1, took.Seconds()) + pushBurst)); s.BytesOut > limit {
		t.Errorf("%d bytes out in %v, want at most %d", s.BytesOut, took, limit)
	}
	within(t, "the outbox is empty", func() bool { return all[0].Stats().Outbox == 0 })
	for _, m := range all {
		lost := losses(m)
		p.claim(t, lost == nil, "%s lost members: %v", m.Life(), lost)
	}
}

func TestStateIsMerged(t *testing.T) {
	t.Parallel()
	a := launch(t, options(t, "a", 1, anywhere()))
	first := []byte("state of a")
	if err := a.SetState(first); err != nil {
		t.Fatal(err)
	}
	first[0] = 'X' // it was copied
	b := launch(t, options(t, "b", 1, anywhere(), a.Gossip().String()))
	joined(t, b)
	within(t, "a's state at b, at join", func() bool { return b.merged("state of a") })
	if err := b.SetState([]byte("state of b")); err != nil {
		t.Fatal(err)
	}
	within(t, "b's state at a, later", func() bool { return a.merged("state of b") })
}

func TestKilledMemberIsHidden(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 4, probing)
	victim := all[3]
	victim.Close()
	took := within(t, "it is gone everywhere", func() bool {
		return !slices.ContainsFunc(all[:3], func(m member) bool { return sees(m, victim.Life()) })
	})
	t.Logf("hidden everywhere after %v", took)
	for i, m := range all[:3] {
		p.told(t, m, "n3", "joined n3.1", "left n3.1 graceful=false")
		if err := m.Send("n3", []byte("x")); !errors.Is(err, ErrUnknownMember) {
			t.Errorf("n%d: send to the dead: %v", i, err)
		}
	}
}

func TestLeaveIsGraceful(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 4, nil)
	leaver := all[3]
	if err := leaver.Broadcast([]byte("last words")); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	p.leave(t, leaver)
	for _, m := range all[:3] {
		within(t, "it is gone", func() bool { return !sees(m, leaver.Life()) })
		within(t, "its last item is there", func() bool { return m.has("last words") })
	}
	t.Logf("hidden everywhere after %v", time.Since(begin))
	if err := leaver.Leave(t.Context()); err != nil {
		t.Errorf("leave again: %v", err)
	}
	leaver.Close()
	for _, m := range all[:3] {
		p.told(t, m, "n3", "joined n3.1", "left n3.1 graceful=true")
	}
}

func TestRestartOnTheSameAddress(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 3, probing)
	last := all[2]
	var slowest time.Duration
	want := []string{"joined n2.1"}
	for i := id.Incarnation(2); i <= 21; i++ {
		last.Close()
		o := options(t, "n2", i, last.Gossip().String(), all[0].Gossip().String())
		last = launch(t, o)
		took := within(t, "the new life is everywhere", func() bool {
			return sees(all[0], last.Life()) && sees(all[1], last.Life())
		})
		slowest = max(slowest, took)
		want = append(want, fmt.Sprintf("left n2.%d graceful=false", i-1), fmt.Sprintf("joined n2.%d", i))
	}
	t.Logf("slowest of 20 restarts: %v", slowest)
	for _, m := range all[:2] {
		// A probe may have found a life dead before the next one began, which
		// makes no difference to what the handler is told.
		p.told(t, m, "n2", want...)
		if got := names(m); got != "n0.1 n1.1 n2.21" {
			t.Errorf("members: %s", got)
		}
	}
	joined(t, last)
	// memberlist now finds the former lives dead, one by one; none of that is heard.
	within(t, "memberlist has buried one", func() bool { return all[0].list.NumMembers() < 23 })
	p.told(t, all[0], "n2", want...)
}

func TestRestartOnAnotherAddress(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 4, nil)
	all[3].Close()
	again := launch(t, options(t, "n3", 2, anywhere(), all[1].Gossip().String()))
	took := within(t, "the new life is everywhere", func() bool {
		return !slices.ContainsFunc(all[:3], func(m member) bool { return !sees(m, again.Life()) })
	})
	t.Logf("visible everywhere after %v", took)
	for _, m := range all[:3] {
		p.told(t, m, "n3", "joined n3.1", "left n3.1 graceful=false", "joined n3.2")
		if err := m.Send("n3", []byte("hello")); err != nil {
			t.Error(err)
		}
	}
	within(t, "it is reached at the new address", func() bool { return again.has("hello") })
}

// Join is retried until somebody is there, and one that is mute harms nobody.
func TestSeedThatIsLate(t *testing.T) {
	t.Parallel()
	p := feel(t)
	late := free(t)
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	b := launch(t, options(t, "b", 1, anywhere(), late, mute.Addr().String()))
	if err := b.Joined(brief(t)); !errors.Is(err, errImpatient) || !strings.Contains(err.Error(), late) {
		t.Errorf("nobody there: %v, want an error that names the seed", err)
	}
	a := launch(t, options(t, "a", 1, late))
	joined(t, b)
	if !sees(a, b.Life()) {
		t.Errorf("a does not list b: %s", names(a))
	}
	begin := time.Now()
	b.Close() // in the midst of a call to the mute one
	took := time.Since(begin)
	p.claim(t, took <= 3*time.Second, "close took %v", took)
}

// A member that missed our announcement is called, long before memberlist's
// next exchange of states.
func TestDeafMemberIsCalled(t *testing.T) {
	t.Parallel()
	p := feel(t)
	slow := func(_ int, o *Options) { o.Fast = false }
	all := group(t, 2, slow)
	limit := func(n int) {
		all[1].calls.roster.mu.Lock()
		defer all[1].calls.roster.mu.Unlock()
		all[1].calls.roster.maxNodes = n
	}
	limit(0)
	o := options(t, "late", 1, anywhere(), all[0].Gossip().String())
	slow(0, &o)
	late := launch(t, o)
	joined(t, late)
	// More often than memberlist repeats itself: it is called again and again.
	within(t, "it was refused", func() bool { return all[1].Stats().Refused > 12 })
	if sees(all[1], late.Life()) {
		t.Fatal("it was not refused")
	}
	limit(maxNodes)
	took := p.within(t, 8*time.Second, "all see it", func() bool { return sees(all[1], late.Life()) })
	t.Logf("called after %v", took)
}

// After a partition longer than memberlist remembers, only the call to a lost
// member brings the two sides together.
func TestLostMemberIsCalledBack(t *testing.T) {
	t.Parallel()
	all := group(t, 2, probing)
	addr := all[1].Gossip().String()
	all[1].Close()
	within(t, "it is lost", func() bool { return len(all[0].Members()) == 1 })
	again := launch(t, options(t, "n1", 2, addr)) // without seeds: it calls nobody
	within(t, "they found each other", func() bool {
		return sees(all[0], again.Life()) && sees(again, all[0].Life())
	})
}

// Who restarts without seeds calls nobody, so it is called soon after its loss,
// not only when the next call is due after seconds.
func TestLostMemberIsCalledSoon(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 2, func(_ int, o *Options) { o.Fast, o.tune = false, hasty })
	addr := all[1].Gossip().String()
	all[1].Close()
	within(t, "it is lost", func() bool { return len(all[0].Members()) == 1 })
	if wait, ok := all[0].soon(); !ok || wait > time.Second {
		t.Errorf("the next call is after %v, %v, want 1s at most", wait, ok)
	}
	o := options(t, "n1", 2, addr)
	o.Fast = false
	again := launch(t, o)
	took := p.within(t, 4*time.Second, "they found each other", func() bool {
		return sees(all[0], again.Life()) && sees(again, all[0].Life())
	})
	t.Logf("found after %v", took)
	within(t, "nobody is missed any more", func() bool { _, ok := all[0].soon(); return !ok })
}

// Who is told that a new life answers at a member's address calls it at once.
func TestCall(t *testing.T) {
	t.Parallel()
	p := feel(t)
	all := group(t, 2, func(_ int, o *Options) { o.Fast = false })
	addr := all[1].Gossip().String()
	all[1].Close()
	o := options(t, "n1", 2, addr)
	o.Fast = false
	again := launch(t, o)
	all[0].Call("n1")
	took := p.within(t, time.Second, "the new life is a member", func() bool { return sees(all[0], again.Life()) })
	t.Logf("a member after %v", took)
	all[0].Call("nobody")
	all[0].Close()
	all[0].Call("n1")
}

// lines is a log that tests look at.
type lines struct {
	mu  sync.Mutex
	out bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.out.Write(b)
}

func (l *lines) with(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	count := 0
	for line := range strings.Lines(l.out.String()) {
		if strings.Contains(line, text) {
			count++
		}
	}
	return count
}

// A joiner that nobody answers says so, with the reason, and not all the time.
func TestNotJoinedIsSaid(t *testing.T) {
	t.Parallel()
	seed := free(t)
	o := options(t, "b", 1, anywhere(), seed)
	var log lines
	o.Logger = slog.New(slog.NewTextHandler(&log, nil))
	begin := time.Now()
	b := launch(t, o)
	within(t, "it warns", func() bool { return log.with("not joined yet") > 0 })
	if log.with("level=WARN msg=\"not joined yet\"") == 0 || log.with("connection refused") == 0 {
		t.Errorf("the log says %s", log.out.String())
	}
	if err := b.NotJoined(); !errors.Is(err, errUnlisted) || !strings.Contains(err.Error(), seed) || strings.Contains(err.Error(), "\n") {
		t.Errorf("NotJoined is %v, want what failed last, in one line", err)
	}
	within(t, "it warns again", func() bool { return log.with("not joined yet") > 1 })
	launch(t, options(t, "a", 1, seed))
	joined(t, b)
	if err := b.NotJoined(); err != nil {
		t.Errorf("NotJoined is %v once it has", err)
	}
	if n, took := log.with("not joined yet"), time.Since(begin); n > 1+int(took/timings(true).remind) {
		t.Errorf("it was said %d times in %v", n, took)
	}
}

// What memberlist drops unread is counted.
func TestStrangersAreCounted(t *testing.T) {
	t.Parallel()
	key, other := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	type side struct {
		keys  [][]byte
		label string
	}
	for name, tt := range map[string]struct{ seed, stranger side }{
		"wrong key":   {side{[][]byte{key}, "one"}, side{[][]byte{other}, "one"}},
		"no key":      {side{[][]byte{key}, "one"}, side{nil, "one"}},
		"only it has": {side{nil, "one"}, side{[][]byte{key}, "one"}},
		"wrong label": {side{nil, "one"}, side{nil, "two"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := options(t, "seed", 1, anywhere())
			o.Ring.Keys, o.Label = tt.seed.keys, tt.seed.label
			seed := launch(t, o)
			o = options(t, "stranger", 1, anywhere(), seed.Gossip().String())
			o.Ring.Keys, o.Label = tt.stranger.keys, tt.stranger.label
			stranger := launch(t, o)
			within(t, "its call is counted", func() bool { return seed.Stats().BadMessages > 0 })
			stranger.joining.stop() // from here on it says nothing by itself
			before := seed.Stats().BadMessages
			within(t, "a packet is counted", func() bool {
				stranger.list.SendToAddress(addressOf(seed), encodeItems([][]byte{[]byte("x")}))
				return seed.Stats().BadMessages > before+4
			})
		})
	}
}

func TestTwoWithOneName(t *testing.T) {
	t.Parallel()
	all := group(t, 2, nil)
	seed := all[0].Gossip().String()
	low := launch(t, options(t, "twin", 5, anywhere(), seed))
	joined(t, low)
	high := launch(t, options(t, "twin", 9, anywhere(), seed))
	joined(t, high)
	within(t, "the lower one is fenced", func() bool { return fenced(low) })
	if err := low.Broadcast([]byte("x")); !errors.Is(err, ErrFenced) {
		t.Errorf("broadcast of the fenced: %v", err)
	}
	if err := low.Joined(t.Context()); !errors.Is(err, ErrFenced) {
		t.Errorf("joined of the fenced: %v", err)
	}
	if low.Newest() != 9 {
		t.Errorf("newest is %d, want 9", low.Newest())
	}
	for _, m := range all {
		within(t, "only the higher one is a member", func() bool { return sees(m, high.Life()) && !sees(m, low.Life()) })
	}
	if fenced(high) {
		t.Error("the higher one is fenced")
	}
	if len(high.Members()) != 3 {
		t.Errorf("members of the higher one: %s", names(high))
	}
}

func fenced(m member) bool {
	select {
	case <-m.Fenced():
		return true
	default:
		return false
	}
}

// A node whose clock was set back, and that has kept nothing, learns from the
// others which incarnation it had, even if they have found it dead.
func TestClockSetBack(t *testing.T) {
	t.Parallel()
	all := group(t, 2, probing)
	seed := all[0].Gossip().String()
	old := launch(t, options(t, "c", 1000, anywhere(), seed))
	joined(t, old)
	old.Close()
	within(t, "it is lost", func() bool { return !sees(all[0], old.Life()) })
	young := launch(t, options(t, "c", 500, anywhere(), seed))
	if err := young.Joined(t.Context()); !errors.Is(err, ErrFenced) {
		t.Fatalf("joined: %v, want fenced", err)
	}
	newest := young.Newest()
	if newest != 1000 {
		t.Fatalf("newest is %d, want 1000", newest)
	}
	young.Close()
	next := launch(t, options(t, "c", newest+1, anywhere(), seed))
	joined(t, next)
	within(t, "the next life is a member", func() bool { return sees(all[0], next.Life()) })
	if sees(all[0], young.Life()) {
		t.Errorf("members: %s", names(all[0]))
	}
}

func TestStrangersStayOutside(t *testing.T) {
	t.Parallel()
	key, other := bytes.Repeat([]byte{1}, 32), bytes.Repeat([]byte{2}, 32)
	all := group(t, 2, func(_ int, o *Options) { o.Ring.Keys, o.Label = [][]byte{key}, "one" })
	all[0].SetState([]byte("secret"))
	seed := all[0].Gossip().String()
	strangers := map[string]member{}
	for name, tt := range map[string]struct {
		keys  [][]byte
		label string
	}{
		"no-key":      {nil, "one"},
		"wrong-key":   {[][]byte{other}, "one"},
		"wrong-label": {[][]byte{key}, "two"},
		"no-label":    {[][]byte{key}, ""},
	} {
		o := options(t, id.Node(name), 1, anywhere(), seed)
		o.Ring.Keys, o.Label = tt.keys, tt.label
		strangers[name] = launch(t, o)
	}
	// One with the second key of a ring in rotation is no stranger.
	o := options(t, "friend", 1, anywhere(), seed)
	o.Ring.Keys, o.Label = [][]byte{key, other}, "one"
	joined(t, launch(t, o))
	for name, s := range strangers {
		within(t, name+" has tried", func() bool {
			s.joining.mu.Lock()
			defer s.joining.mu.Unlock()
			return s.joining.last != nil
		})
		if err := s.Joined(brief(t)); err == nil {
			t.Errorf("%s joined", name)
		}
		if len(s.Members()) != 1 || s.merged("secret") {
			t.Errorf("%s sees %s", name, names(s))
		}
		// Nor does it get a word in by packets to an address that it knows.
		s.list.SendToAddress(addressOf(all[0]), encodeItems([][]byte{[]byte("forged by " + name)}))
		s.list.SendToAddress(addressOf(all[0]), encodeCall(kindBye, 1, all[1].Life(), all[1].Gossip()))
	}
	for _, m := range all {
		within(t, "only friends are members", func() bool { return names(m) == "friend.1 n0.1 n1.1" })
		for name := range strangers {
			if m.has("forged by "+name) || m.about(id.Node(name)) != nil {
				t.Errorf("%s was heard", name)
			}
		}
	}
}

// heap is what the last collection found in use.
func heap() uint64 {
	runtime.GC()
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(live)
	return live[0].Value.Uint64()
}

func TestCloseEndsEverything(t *testing.T) {
	o := options(t, "seed", 1, anywhere())
	probing(0, &o)
	seed := launch(t, o)
	run := func(i int) {
		o := options(t, "x", id.Incarnation(i), anywhere(), seed.Gossip().String())
		probing(i, &o)
		c := launch(t, o)
		joined(t, c)
		if i%2 == 0 {
			c.Leave(t.Context())
		}
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Error(err)
		}
	}
	run(1)
	quiet := 0
	within(t, "goroutines come to rest", func() bool {
		n := runtime.NumGoroutine()
		rest := n == quiet
		quiet = n
		return rest
	})
	for i := 2; i <= 21; i++ {
		run(i)
	}
	within(t, "goroutines are as many as before", func() bool { return runtime.NumGoroutine() <= quiet })
}

func TestPortTaken(t *testing.T) {
	t.Parallel()
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer tcp.Close()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	member := launch(t, options(t, "a", 1, anywhere()))
	for name, taken := range map[string]string{"tcp": tcp.Addr().String(), "udp": udp.LocalAddr().String(), "both": member.Gossip().String()} {
		o := options(t, "b", 1, taken)
		o.Handler = &recorder{}
		_, err := Start(o)
		port := fmt.Sprint(o.Bind.Port())
		if !errors.Is(err, ErrPort) || !strings.Contains(err.Error(), port) {
			t.Errorf("%s: %v, want an error that names port %s", name, err, port)
		}
	}
}

func TestManyOnAnyPort(t *testing.T) {
	t.Parallel()
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			tcp, udp, err := listen(netip.MustParseAddrPort("127.0.0.1:0"))
			if err != nil {
				t.Error(err)
				return
			}
			defer tcp.Close()
			defer udp.Close()
			if a, b := tcp.Addr().(*net.TCPAddr).Port, udp.LocalAddr().(*net.UDPAddr).Port; a != b {
				t.Errorf("tcp has port %d and udp %d", a, b)
			}
		})
	}
	wg.Wait()
}

func TestIPv6(t *testing.T) {
	t.Parallel()
	probe, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skipf("no IPv6 here: %v", err)
	}
	probe.Close()
	a := launch(t, options(t, "a", 1, "[::1]:0"))
	b := launch(t, options(t, "b", 1, "[::1]:0", a.Gossip().String()))
	joined(t, b)
	if err := b.Send("a", []byte("six")); err != nil {
		t.Fatal(err)
	}
	within(t, "an item over IPv6", func() bool { return a.has("six") })
	// One socket of both families.
	o := options(t, "a", 1, "[::]:0")
	o.Advertise = netip.MustParseAddrPort("127.0.0.1:0")
	both := launch(t, o)
	four := launch(t, options(t, "b", 1, anywhere(), both.Gossip().String()))
	joined(t, four)
	if err := both.Send("b", []byte("four")); err != nil {
		t.Fatal(err)
	}
	within(t, "an item over IPv4", func() bool { return four.has("four") })
}
