package faults

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// watchPause is between two looks: the machine has other things to do, too.
const watchPause = 10 * time.Millisecond

// watcher looks all the time whether a node shows anything of an earlier life
// of another after it has heard of a later one.
type watcher struct {
	stop context.CancelFunc
	work sync.WaitGroup

	mu     sync.Mutex
	looks  int
	ghosts []string
}

func watch(t *testing.T, node, owner string, a kvferrypb.AdminClient) *watcher {
	ctx, stop := context.WithCancel(t.Context())
	w := &watcher{stop: stop}
	w.work.Go(func() {
		for ; ctx.Err() == nil; pause(ctx, watchPause) {
			heard, err := lives(ctx, a) // before it is asked for the publications
			if err != nil {
				continue
			}
			items, err := known(ctx, a, owner)
			if err != nil {
				continue
			}
			w.mu.Lock()
			w.looks++
			for _, i := range items {
				if i.GetIncarnation() < heard[owner] {
					w.ghosts = append(w.ghosts, fmt.Sprintf("%s shows %v, though it has heard of incarnation %d", node, i, heard[owner]))
				}
			}
			w.mu.Unlock()
		}
	})
	t.Cleanup(w.end)
	return w
}

func (w *watcher) end() {
	w.stop()
	w.work.Wait()
}

func (w *watcher) report(t *testing.T) {
	t.Helper()
	w.end()
	if w.looks == 0 || len(w.ghosts) > 0 {
		t.Errorf("%d looks, %d ghosts: %.3v", w.looks, len(w.ghosts), w.ghosts)
	}
}

// TestOwnerRestarts kills and restarts one owner in every way while another
// pair works, and ends with a stranger on its ports.
func TestOwnerRestarts(t *testing.T) {
	t.Parallel()
	c := up(t, 2, 2)
	const owner = "prefill-1"
	to := c.engine("decode-0")
	others := []string{"prefill-0", "decode-0", "decode-1"}
	var watchers []*watcher
	admins := make(map[string]kvferrypb.AdminClient)
	for _, n := range others {
		admins[n] = dial(t, c.must(n).Engine)
		watchers = append(watchers, watch(t, n, owner, admins[n]))
	}
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 100)
	if err := move(c.ctx, newRequest("first life", 80), c.engine(owner), to, false, patience); err != nil {
		t.Fatal(err)
	}
	before, err := usageOf(c.ctx, c.must("decode-0").PID, c.must("decode-0").HTTP.String())
	if err != nil {
		t.Fatal(err)
	}

	// again restarts the owner, with a publication of its old life known to
	// all, and returns how long until the new one is of use.
	again := func(t *testing.T, name string, samePorts bool) {
		t.Helper()
		old := c.must(owner)
		left := newRequest(name+", old life", 40)
		left.keep = true
		if err := c.engine(owner).publish(c.ctx, left); err != nil {
			t.Fatal(err)
		}
		for _, n := range others {
			await(t, n+" to know of the publication", patience, func(ctx context.Context) error {
				items, err := known(ctx, admins[n], owner)
				if err == nil && len(items) == 0 {
					err = errors.New("nothing is known")
				}
				return err
			})
		}
		if err := c.Restart(c.ctx, owner, samePorts); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		life := c.must(owner)
		if life.Incarnation <= old.Incarnation || (life.Data == old.Data) != samePorts {
			t.Errorf("life %d at %v after %d at %v", life.Incarnation, life.Data, old.Incarnation, old.Data)
		}
		if err := move(c.ctx, newRequest(name+", new life", 80), c.engine(owner), to, true, patience); err != nil {
			t.Errorf("request of the new life: %v", err)
		}
		took := time.Since(begin)
		for _, n := range others {
			await(t, n+" to see the new life", patience, func(ctx context.Context) error {
				seen, err := lives(ctx, admins[n])
				if err == nil && seen[owner] != life.Incarnation {
					err = fmt.Errorf("it sees %d, want %d", seen[owner], life.Incarnation)
				}
				return err
			})
		}
		seen := time.Since(begin)
		t.Logf("of use %v after its ready line, seen by all after %v", took.Round(time.Millisecond), seen.Round(time.Millisecond))
		if took > hangLimit || seen > hangLimit {
			t.Errorf("of use after %v and seen by all after %v, want %v at most", took, seen, hangLimit)
		}
		// The old life's reference, and its request without one.
		err := to.retrieve(c.ctx, left, left.reference, patience)
		wantFailure(t, err, owner, old.Incarnation, kvferrypb.Failure_OWNER_LOST)
		err = to.retrieve(c.ctx, left, "", 300*time.Millisecond)
		if code := client.CodeOf(err); code != kvferrypb.Failure_NOT_FOUND {
			t.Errorf("request of the old life ends with %v: %v", code, err)
		}
		l.more(2)
	}
	for i := range 3 {
		t.Run(fmt.Sprintf("same ports %d", i), func(t *testing.T) { again(t, fmt.Sprint("same ports ", i), true) })
	}
	t.Run("another address", func(t *testing.T) { again(t, "another address", false) })
	t.Run("clock set back", func(t *testing.T) {
		state := filepath.Join(c.must(owner).Dir, "state", "incarnation")
		future := uint64(time.Now().Add(time.Hour).UnixMicro())
		if err := os.WriteFile(state, []byte(strconv.FormatUint(future, 10)), 0o600); err != nil {
			t.Fatal(err)
		}
		again(t, "clock set back", true)
		if got := c.must(owner).Incarnation; got != future+1 {
			t.Errorf("incarnation %d, want %d", got, future+1)
		}
	})
	t.Run("clock set back and state lost", func(t *testing.T) {
		if err := os.RemoveAll(filepath.Join(c.must(owner).Dir, "state")); err != nil {
			t.Fatal(err)
		}
		again(t, "state lost", true) // it looks at the incarnation, which only peers know
	})
	for _, w := range watchers {
		w.report(t)
	}

	t.Run("owner stays away", func(t *testing.T) {
		old := c.must(owner)
		r := newRequest("of the dead", 40)
		r.keep = true
		if err := c.engine(owner).publish(c.ctx, r); err != nil {
			t.Fatal(err)
		}
		await(t, "the publication", patience, func(ctx context.Context) error {
			items, err := known(ctx, admins["decode-0"], owner)
			if err == nil && len(items) == 0 {
				err = errors.New("nothing is known")
			}
			return err
		})
		c.kill(owner)
		begin := time.Now()
		for _, n := range others {
			await(t, n+" to hide what the dead owned", hangLimit, func(ctx context.Context) error {
				items, err := known(ctx, admins[n], owner)
				if err == nil && len(items) > 0 {
					err = fmt.Errorf("%d are shown", len(items))
				}
				return err
			})
		}
		t.Logf("hidden by all after %v", time.Since(begin).Round(time.Millisecond))
		wantFailure(t, to.retrieve(c.ctx, r, r.reference, patience), owner, old.Incarnation,
			kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_TRANSPORT)
		m := newMute(t, old.Data, old.Peer)
		early := time.Now()
		wantFailure(t, to.retrieve(c.ctx, r, r.reference, patience), owner, old.Incarnation,
			kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_TRANSPORT)
		if took := time.Since(early); took > hangLimit {
			t.Errorf("a mute peer was waited for %v", took)
		}
		for _, n := range others {
			await(t, n+" to bury the dead", patience, func(ctx context.Context) error {
				seen, err := lives(ctx, admins[n])
				if err == nil && seen[owner] != 0 {
					err = errors.New("it is a member")
				}
				return err
			})
		}
		buried := time.Since(begin)
		t.Logf("no member any more after %v", buried.Round(time.Millisecond))
		dials := m.dials.Load()
		for i := range 5 {
			begin := time.Now()
			err := to.retrieve(c.ctx, r, r.reference, patience)
			if code := client.CodeOf(err); code != kvferrypb.Failure_OWNER_LOST && code != kvferrypb.Failure_NOT_FOUND {
				t.Errorf("retrieve %d from a stranger on its port ends with %v: %v", i, code, err)
			}
			if took := time.Since(begin); took > hangLimit {
				t.Errorf("it took %v", took)
			}
			l.more(2)
		}
		// Three nodes that probed it at two a second, and nobody after that.
		if n := m.dials.Load(); dials > 30+10*int64(buried.Seconds()) || n > dials+6 {
			t.Errorf("the stranger was dialled %d times until it was buried and %d times after", dials, n-dials)
		}
		t.Logf("the stranger on its ports was dialled %d times", m.dials.Load())
	})
	l.end()
	awaitUsage(t, "decode-0", c.must("decode-0").PID, c.must("decode-0").HTTP.String(), before, 12)
	awaitFree(t, "decode-0", admins["decode-0"], patience)
}

// mute accepts connections and never answers.
type mute struct {
	dials atomic.Int64

	mu    sync.Mutex
	conns []net.Conn
}

func newMute(t *testing.T, addresses ...netip.AddrPort) *mute {
	t.Helper()
	m := &mute{}
	var work sync.WaitGroup
	var listeners []net.Listener
	t.Cleanup(func() {
		for _, l := range listeners {
			_ = l.Close()
		}
		work.Wait()
		for _, c := range m.conns {
			_ = c.Close()
		}
	})
	for _, a := range addresses {
		l, err := net.Listen("tcp", a.String())
		if err != nil {
			t.Fatal(err)
		}
		listeners = append(listeners, l)
		work.Go(func() { m.accept(l) })
	}
	return m
}

func (m *mute) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		m.dials.Add(1)
		m.mu.Lock()
		m.conns = append(m.conns, c)
		m.mu.Unlock()
	}
}
