package faults

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

// TestStartUp starts eight nodes at once, and then what must not start.
func TestStartUp(t *testing.T) {
	t.Parallel()
	c := up(t, 4, 4) // up returns when all see all
	from, to := c.engine("prefill-1"), c.engine("decode-1")
	l := startLoad(t, from, to, 60)
	l.more(2)

	t.Run("a port is taken", func(t *testing.T) {
		n := c.must("prefill-0")
		for key, port := range map[string]uint16{
			"ports.gossip": n.Gossip.Port(), "ports.peer": n.Peer.Port(), "ports.data": n.Data.Port(), "ports.http": n.HTTP.Port(),
		} {
			t.Run(key, func(t *testing.T) {
				conf := another(t, n, "second")
				if err := conf.Set(key, fmt.Sprint(port)); err != nil {
					t.Fatal(err)
				}
				refused(t, conf, fmt.Sprint(port), key)
			})
		}
	})

	t.Run("the socket is taken", func(t *testing.T) {
		n := c.must("prefill-0")
		conf := another(t, n, "second")
		conf.Node.Socket = n.Engine
		a, _ := launch(t, conf)
		if code, log := a.awaitExit(t); code != 1 || !strings.Contains(log, n.Engine) {
			t.Errorf("exit code %d, want 1 and the socket named:\n%s", code, log)
		}
		if _, err := dial(t, n.Engine).Status(t.Context(), &kvferrypb.StatusRequest{}); err != nil {
			t.Errorf("the first one does not answer any more: %v", err)
		}
	})

	t.Run("arena larger than memory", func(t *testing.T) {
		conf := another(t, c.must("prefill-0"), "huge")
		conf.Arena.Pages, conf.Arena.PageSize, conf.Arena.HeadDim = config.Pages{Count: 1 << 20}, 1024, 128
		refused(t, conf, "wanted", "available", "arena.pages")
	})

	t.Run("one name twice", func(t *testing.T) {
		elder := startAgent(t, another(t, c.must("decode-0"), "twin"))
		younger := startAgent(t, another(t, c.must("prefill-0"), "twin"))
		if younger.Incarnation <= elder.Incarnation {
			t.Errorf("incarnations %d, then %d", elder.Incarnation, younger.Incarnation)
		}
		code, log := elder.awaitExit(t)
		if code != 1 || !strings.Contains(log, "a newer life of this node is at work") {
			t.Errorf("the elder ended with exit code %d, want 1 for a newer life:\n%s", code, log)
		}
		admin := dial(t, c.must("decode-3").Engine)
		await(t, "the younger to be the only one", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, admin)
			if err == nil && seen["twin"] != younger.Incarnation {
				err = fmt.Errorf("incarnation %d, want %d", seen["twin"], younger.Incarnation)
			}
			return err
		})
		if err := move(t.Context(), newRequest("of the younger", 60), attach(t, younger.Engine), c.engine("decode-2"), true, patience); err != nil {
			t.Error(err)
		}
	})
	l.end()
}

// refused starts an agent that must end with exit code 1, say the words, and leave
// nothing behind.
func refused(t *testing.T, conf *config.Config, words ...string) {
	t.Helper()
	a, _ := launch(t, conf)
	code, log := a.awaitExit(t)
	refusedWith(t, conf, code, log, words...)
}

// refusedWith looks at what an agent that must not start has left and said.
func refusedWith(t *testing.T, conf *config.Config, code int, log string, words ...string) {
	t.Helper()
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	for _, w := range words {
		if !strings.Contains(log, w) {
			t.Errorf("it does not say %q:\n%s", w, log)
		}
	}
	dir := filepath.Dir(conf.Node.Socket)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		// The number of the life that did not come about stays used.
		if err == nil && !e.IsDir() && path != filepath.Join(conf.Node.StateDir, "incarnation") {
			t.Errorf("it left %s behind", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
