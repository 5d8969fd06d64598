package cluster

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

func TestJoinSeeds(t *testing.T) {
	t.Parallel()
	a, b := launch(t, options("a", 1, free(t))), launch(t, options("b", 1, "127.0.0.1:0"))
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
	again := launch(t, options("c", 1, addr)) // another node, so it is not what was lost
	within(t, 10*time.Second, "who is at the seed is called", func() bool { return sees(again, b.Life()) && sees(b, again.Life()) })
}

func TestJoinSeedsRefuses(t *testing.T) {
	t.Parallel()
	b := launch(t, options("b", 1, "127.0.0.1:0"))
	nobody := free(t)
	within(t, 10*time.Second, "it says why nobody is there", func() bool {
		err := b.JoinSeeds(brief(t), []string{nobody})
		for _, want := range []string{nobody, "none of them lists us", "out of patience"} {
			if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
				t.Fatalf("nobody there: %v, want %s", err, want)
			}
		}
		return strings.Contains(err.Error(), "connection refused")
	})
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer mute.Close()
	begin := time.Now()
	if err := b.JoinSeeds(brief(t), []string{mute.Addr().String()}); err == nil {
		t.Error("a mute one lists us")
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("it took %v", took)
	}
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
	c := launch(t, options("c", 1, "127.0.0.1:0"))
	waits := make(chan error, 1)
	go func() { waits <- c.JoinSeeds(t.Context(), []string{nobody}) }()
	within(t, 5*time.Second, "it calls", func() bool {
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
	case <-time.After(5 * time.Second):
		t.Error("it waits on")
	}
}

// A wrong gossip key is what the error is about.
func TestJoinSeedsWithAnotherKey(t *testing.T) {
	t.Parallel()
	o := options("a", 1, "127.0.0.1:0")
	o.Ring = ringOf(0, 1)
	a := launch(t, o)
	o = options("b", 1, "127.0.0.1:0")
	o.Ring = ringOf(0, 2)
	b := launch(t, o)
	within(t, 10*time.Second, "it hears why", func() bool {
		err := b.JoinSeeds(brief(t), []string{a.Gossip().String()})
		if err == nil {
			t.Fatal("it joined with another key")
		}
		return strings.Contains(err.Error(), "gossip keys may differ") && strings.Contains(err.Error(), IDOf(key(2)).String())
	})
}
