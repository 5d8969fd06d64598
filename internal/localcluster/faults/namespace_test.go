package faults

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/transfer/shm"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// enclosed are the words below which a program is the first process of a PID
// namespace, as it is in a container. Where that is not permitted the test skips.
func enclosed(t *testing.T) []string {
	t.Helper()
	words := []string{"unshare", "--pid", "--fork", "--kill-child", "--mount-proc"}
	ctx, cancel := context.WithTimeout(t.Context(), callLimit)
	defer cancel()
	if said, err := exec.CommandContext(ctx, words[0], append(words[1:], "true")...).CombinedOutput(); err != nil {
		t.Skipf("PID namespaces cannot be had here: %v %s", err, said)
	}
	return words
}

// startBelow runs an agent below the words of a command until the end of the test.
func startBelow(t *testing.T, below []string, c *config.Config) *agent {
	t.Helper()
	a, ready := launch(t, c, below...)
	var line []byte
	select {
	case line = <-ready:
	case <-time.After(patience):
	}
	var err error
	if a.Ready, err = localcluster.ParseReady(line); err != nil {
		t.Fatalf("agent %s is not ready: %v\n%s", c.Node.Name, err, a.log(t))
	}
	return a
}

// TestNamespaces has agents in PID namespaces of their own. What decides whether
// two of them share memory is the folder where they meet, and an operator sees
// which transport it is, and why not the better one.
func TestNamespaces(t *testing.T) {
	t.Parallel()
	below := enclosed(t)
	c := up(t, 1, 0, "timers.hold=5s")
	seed := c.must("prefill-0")
	agentOf := func(name string, change func(*config.Transfer)) *agent {
		conf := another(t, seed, name)
		if change != nil {
			change(&conf.Transfer)
		}
		return startBelow(t, below, conf)
	}
	elsewhere := filepath.Join(t.TempDir(), "meet")
	owner := agentOf("owner", nil)
	near := agentOf("near", nil)
	far := agentOf("far", func(t *config.Transfer) { t.Rendezvous = elsewhere })
	strict := agentOf("strict", func(t *config.Transfer) { t.Rendezvous, t.Require = elsewhere, shm.Name })
	from := attach(t, owner.Engine)
	for _, a := range []*agent{near, far, strict} {
		awaitPeer(t, a.Node, dial(t, a.Engine), owner.Node)
	}

	for _, tt := range []struct {
		reader *agent
		by     string
		why    []string // not a better one
	}{
		{reader: near, by: shm.Name},
		{reader: far, by: tcp.Name, why: []string{"shm: ", "do not share a rendezvous directory", "transfer.rendezvous"}},
	} {
		t.Run(tt.reader.Node, func(t *testing.T) {
			to := attach(t, tt.reader.Engine)
			if err := move(t.Context(), newRequest("to "+tt.reader.Node, 90), from, to, true, patience); err != nil {
				t.Fatal(err)
			}
			if n, err := readBytes(t.Context(), tt.reader.HTTP.String(), tt.by); err != nil || n == 0 {
				t.Errorf("%v bytes were read over %s: %v", n, tt.by, err)
			}
			item := peerOf(t, tt.reader, owner)
			if item.GetTransport() != tt.by {
				t.Errorf("the peer is read by %q, want %q", item.GetTransport(), tt.by)
			}
			var refused []string
			for _, r := range item.GetRefused() {
				refused = append(refused, r.GetTransport()+": "+r.GetReason())
			}
			if (len(tt.why) == 0) != (len(refused) == 0) {
				t.Errorf("better transports refused: %q, want %q", refused, tt.why)
			}
			table := wantDone(t, tt.reader.Engine, "", "peers")
			if !strings.Contains(table, tt.by) {
				t.Errorf("kvferry peers does not say %s:\n%s", tt.by, table)
			}
			for _, w := range tt.why {
				words := strings.Fields(w) // which the table breaks into lines
				if !strings.Contains(strings.Join(refused, "\n"), w) || !strings.Contains(table, words[len(words)-1]) {
					t.Errorf("the refusal does not say %q: %q\n%s", w, refused, table)
				}
			}
		})
	}

	t.Run("required", func(t *testing.T) {
		r := newRequest("to the strict one", 90)
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		err := attach(t, strict.Engine).retrieve(t.Context(), r, r.reference, patience)
		failure := wantFailure(t, err, owner.Node, owner.Incarnation, kvferrypb.Failure_TRANSPORT)
		if why := failure.String(); !strings.Contains(why, "do not share a rendezvous directory") {
			t.Errorf("failure does not say why: %v", failure)
		}
		if n, err := readBytes(t.Context(), strict.HTTP.String(), tcp.Name); err != nil || n != 0 {
			t.Errorf("%v bytes were read over tcp: %v", n, err)
		}
		// Another reader gets it.
		if err := attach(t, near.Engine).retrieve(t.Context(), r, r.reference, patience); err != nil {
			t.Error(err)
		}
	})
	awaitFree(t, owner.Node, dial(t, owner.Engine), patience)
}

// peerOf is what a node says of another one.
func peerOf(t *testing.T, a, other *agent) (item *kvferrypb.PeerItem) {
	t.Helper()
	admin := dial(t, a.Engine)
	await(t, a.Node+" to say how it reads "+other.Node, patience, func(ctx context.Context) error {
		res, err := admin.Peers(ctx, &kvferrypb.PeersRequest{})
		for _, p := range res.GetItems() {
			if p.GetNode() == other.Node && p.GetTransport() != "" {
				item = p
				return nil
			}
		}
		return errors.Join(err, fmt.Errorf("peers %v", res.GetItems()))
	})
	return item
}
