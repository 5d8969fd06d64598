package cluster

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestJoinSeeds(t *testing.T) {
	t.Parallel()
	a := launch(t, options(t, "a", 1, anywhere()))
	o := options(t, "b", 1, anywhere())
	slowly(1, &o)
	b := launch(t, o)
	begin := time.Now()
	must(t, b.JoinSeeds(soon(t), []string{free(t), a.Gossip().String()}))
	t.Logf("joined after %v", time.Since(begin))
	if !sees(a, b.Life()) {
		t.Errorf("a sees %s", names(a))
	}
	must(t, b.JoinSeeds(soon(t), []string{a.Gossip().String()})) // it lists us already
	// They are called again when they are lost.
	addr := a.Gossip().String()
	b.joining.mu.Lock()
	known := len(b.joining.list)
	b.joining.mu.Unlock()
	if known != 2 {
		t.Errorf("%d seeds are known, want 2", known)
	}
	kill(t, a, b)
	again := launch(t, options(t, "c", 1, addr)) // another node, so it is not what was lost
	within(t, "who is at the seed is called", func() bool { return sees(again, b.Life()) && sees(b, again.Life()) })
}

// hears joins a seed in vain, waiting for longer each time, until the error says
// why. It is one line, which names the seed and why nobody waited longer.
func hears(t testing.TB, m member, seed string, why ...string) {
	t.Helper()
	for wait := moment; ; wait *= 2 {
		ctx, cancel := context.WithTimeoutCause(t.Context(), wait, errImpatient)
		err := m.JoinSeeds(ctx, []string{seed})
		cancel()
		for _, want := range []string{seed, "none of them lists us", errImpatient.Error()} {
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("in vain: %v, want %s", err, want)
			}
		}
		if !slices.ContainsFunc(why, func(w string) bool { return !strings.Contains(err.Error(), w) }) {
			return
		}
		if wait > patience {
			t.Fatalf("it hears only: %v, want %q", err, why)
		}
	}
}

func TestJoinSeedsRefuses(t *testing.T) {
	t.Parallel()
	p := feel(t)
	b := launch(t, options(t, "b", 1, anywhere()))
	nobody := free(t)
	hears(t, b, nobody, "connection refused")
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer mute.Close()
	begin := time.Now()
	if err := b.JoinSeeds(brief(t), []string{mute.Addr().String()}); err == nil {
		t.Error("a mute one lists us")
	}
	took := time.Since(begin)
	p.claim(t, took <= 2*time.Second, "it took %v", took)
	for name, tt := range map[string]struct {
		seeds []string
		want  string
	}{
		"none":            {nil, "no seeds"},
		"no port":         {[]string{"10.0.0.1"}, `"10.0.0.1"`},
		"itself":          {[]string{b.Gossip().String()}, "this node itself"},
		"another machine": {[]string{"192.0.2.1:7900"}, "on another machine"},
	} {
		if err := b.JoinSeeds(soon(t), tt.seeds); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %s", name, err, tt.want)
		}
	}
	var many []string
	for i := range maxSeeds {
		many = append(many, fmt.Sprintf("127.0.0.1:%d", i+1))
	}
	if err := b.JoinSeeds(soon(t), many); err == nil || !strings.Contains(err.Error(), "want at most 64") {
		t.Errorf("too many: %v", err)
	}
	must(t, b.Leave(soon(t)))
	if err := b.JoinSeeds(soon(t), []string{nobody}); !errors.Is(err, ErrClosed) {
		t.Errorf("after leaving: %v", err)
	}
	// Whoever waits hears of the end.
	c := launch(t, options(t, "c", 1, anywhere()))
	waits := make(chan error, 1)
	go func() { waits <- c.JoinSeeds(t.Context(), []string{nobody}) }()
	within(t, "it calls", func() bool {
		c.joining.mu.Lock()
		defer c.joining.mu.Unlock()
		return len(c.joining.callings) == 1
	})
	c.Close()
	select {
	case err := <-waits:
		if !errors.Is(err, ErrClosed) {
			t.Errorf("closed: %v", err)
		}
	case <-time.After(patience):
		t.Error("it waits on")
	}
}

// A wrong gossip key is what the error is about.
func TestJoinSeedsWithAnotherKey(t *testing.T) {
	t.Parallel()
	o := options(t, "a", 1, anywhere())
	o.Ring = ringOf(0, 1)
	a := launch(t, o)
	o = options(t, "b", 1, anywhere())
	o.Ring = ringOf(0, 2)
	b := launch(t, o)
	hears(t, b, a.Gossip().String(), "gossip keys may differ", IDOf(key(2)).String())
}
