package faults

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/localcluster"
	"github.com/kvferry/kvferry/transfer/tcp"
)

// TestOwnerIsStopped stops an owner for longer than the others suspect it, and
// lets it go on. Over the network it does not answer. Its memory can be read all
// the same: what it has published holds, since nobody can end it, and a reader
// that knows of it and has mapped the memory gets it. Once gossip has found that
// the owner is silent, it is nobody's owner either way.
func TestOwnerIsStopped(t *testing.T) {
	for _, transport := range hostTransports() {
		t.Run(transport, func(t *testing.T) {
			t.Parallel()
			ownerIsStopped(t, transport)
		})
	}
}

func ownerIsStopped(t *testing.T, transport string) {
	_, env := fabricOf(t, transport)
	c := start(t, localcluster.Options{Prefill: 2, Decode: 2, Env: env, Set: []string{
		"transfer.transports=" + transport, "timers.stall=3s", "timers.hold=5m",
	}})
	oneSided := transport != tcp.Name
	const owner = "prefill-1"
	from, to := c.engine(owner), c.engine("decode-0")
	life := c.must(owner).Incarnation
	others := []string{"prefill-0", "decode-0", "decode-1"}
	admins := make(map[string]kvferrypb.AdminClient)
	for _, n := range others {
		admins[n] = dial(t, c.must(n).Engine)
	}
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 100)

	warm, kept := newRequest("before", 60), newRequest("kept", 60)
	if err := move(c.ctx, warm, from, to, true, patience); err != nil {
		t.Fatal(err)
	}
	early := kept
	if oneSided {
		early = newRequest("read early", 60)
		early.keep = true
		if err := from.publish(c.ctx, early); err != nil {
			t.Fatal(err)
		}
	}
	if err := from.publish(c.ctx, kept); err != nil {
		t.Fatal(err)
	}
	for _, n := range others {
		await(t, n+" to know of the publication", patience, func(ctx context.Context) error {
			return shown(ctx, admins[n], owner, life, kept, true)
		})
	}

	c.freeze(owner)
	begin := time.Now()
	// At once, while it is a member like any other.
	err := to.retrieve(c.ctx, early, early.reference, patience)
	took := time.Since(begin)
	if oneSided {
		if err != nil || took > hangLimit {
			t.Errorf("the memory of a stopped owner was read after %v: %v", took, err)
		}
	} else {
		wantFailure(t, err, owner, life, kvferrypb.Failure_TRANSPORT, kvferrypb.Failure_OWNER_LOST)
		if took > patience {
			t.Errorf("a stopped owner was waited for %v", took)
		}
	}
	for _, n := range others {
		await(t, n+" to hide the stopped owner", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, admins[n])
			if err == nil && seen[owner] != 0 {
				err = errors.New("it is a member")
			}
			return errors.Join(err, shown(ctx, admins[n], owner, life, kept, false))
		})
	}
	t.Logf("hidden by all after %v", time.Since(begin).Round(time.Millisecond))
	l.more(2)
	wait := time.Now()
	err = to.retrieve(c.ctx, kept, kept.reference, time.Second)
	if code := client.CodeOf(err); code != kvferrypb.Failure_OWNER_LOST && code != kvferrypb.Failure_NOT_FOUND {
		t.Errorf("retrieve from a hidden owner ends with %v: %v", code, err)
	}
	if took := time.Since(wait); took > hangLimit {
		t.Errorf("it took %v", took)
	}

	if err := c.Kill(owner, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	begin = time.Now()
	for _, n := range others {
		await(t, n+" to show the owner again", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, admins[n])
			if err == nil && seen[owner] != life {
				err = fmt.Errorf("incarnation %d, want %d", seen[owner], life)
			}
			return errors.Join(err, shown(ctx, admins[n], owner, life, kept, true))
		})
	}
	t.Logf("back after %v", time.Since(begin).Round(time.Millisecond))
	if err := to.retrieve(c.ctx, kept, kept.reference, patience); err != nil {
		t.Errorf("what was published before: %v", err)
	}
	if err := move(c.ctx, newRequest("after", 60), from, to, false, patience); err != nil {
		t.Errorf("after it went on: %v", err)
	}
	l.end()
	if oneSided { // the owner was buried before it could be told that this was read
		from.remove(early.name)
	}
	awaitFree(t, owner, dial(t, c.must(owner).Engine), patience)
	awaitFree(t, "decode-0", admins["decode-0"], patience)
}

// shown says whether a node offers a publication, as wanted.
func shown(ctx context.Context, a kvferrypb.AdminClient, owner string, life uint64, r *request, want bool) error {
	items, err := known(ctx, a, owner)
	if err != nil {
		return err
	}
	found := false
	for _, i := range items {
		if i.GetIncarnation() != life {
			return fmt.Errorf("it shows %v of another life", i)
		}
		found = found || i.GetFinal() && int(i.GetTokens()) == r.tokens
	}
	if found != want {
		return fmt.Errorf("it shows %v", items)
	}
	return nil
}

// TestEngineDies kills engines, processes too, in the middle of a step and of
// a retrieve.
func TestEngineDies(t *testing.T) {
	t.Parallel()
	// A read of a stopped owner's memory does not wait; TestFaultsInMidCopy kills
	// the engine in one.
	c := up(t, 1, 2, overTCP, "timers.session_grace=1s", "timers.stall=3s", "timers.lease=5s", "timers.lease_renew=1s")
	from, to := c.engine("prefill-0"), c.engine("decode-0")
	l := startLoad(t, from, to, 60)
	victim := c.must("decode-1")
	admin := dial(t, victim.Engine)

	t.Run("in a step", func(t *testing.T) {
		kill := startEngine(t, victim.Engine, "in a step", "-")
		if used, err := conserved(t.Context(), admin); err != nil || used != 3 {
			t.Errorf("the step has %d pages: %v", used, err)
		}
		kill()
		awaitFree(t, victim.Node, admin, patience)
	})

	t.Run("in a retrieve that waits", func(t *testing.T) {
		r := newRequest("in a retrieve that waits", 60)
		r.hold = time.Millisecond // only the lease holds it
		// The publisher does not come to its end until the reader is dead.
		if _, err := from.session.Ingest(t.Context(), &kvferrypb.IngestRequest{Request: r.name}); err != nil {
			t.Fatal(err)
		}
		defer from.remove(r.name)
		if err := from.publishChunk(t.Context(), r, 0, 20); err != nil {
			t.Fatal(err)
		}
		kill := startEngine(t, victim.Engine, r.name, r.reference)
		await(t, "the first chunk", patience, func(ctx context.Context) error {
			used, err := conserved(ctx, admin)
			if err == nil && used < 3 {
				err = fmt.Errorf("%d pages are used", used)
			}
			return err
		})
		kill()
		awaitFree(t, victim.Node, admin, patience)
	})

	t.Run("in a read", func(t *testing.T) {
		// A stopped owner never answers, so the read is under way for certain.
		owner := c.must("prefill-0")
		r := newRequest("in a read", 60)
		r.keep = true
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		l.end()
		c.freeze(owner.Node)
		defer func() { _ = c.Kill(owner.Node, syscall.SIGCONT) }()
		kill := startEngine(t, victim.Engine, r.name, r.reference)
		await(t, "the read", patience, func(ctx context.Context) error {
			res, err := admin.Retrievals(ctx, &kvferrypb.RetrievalsRequest{})
			if err == nil && (len(res.GetItems()) != 1 || res.GetItems()[0].GetState() != "reading") {
				err = fmt.Errorf("retrievals %v", res.GetItems())
			}
			return err
		})
		kill()
		awaitFree(t, victim.Node, admin, patience)
		if err := c.Kill(owner.Node, syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
		from.remove(r.name)
	})
	await(t, "sessions of the dead to end", patience, func(ctx context.Context) error {
		res, err := admin.Status(ctx, &kvferrypb.StatusRequest{})
		if err == nil && res.GetSessions() > 0 {
			err = fmt.Errorf("%d are open", res.GetSessions())
		}
		return err
	})
	if err := move(t.Context(), newRequest("after all", 60), from, c.engine(victim.Node), true, patience); err != nil {
		t.Errorf("after all: %v", err)
	}
	awaitFree(t, "prefill-0", dial(t, c.must("prefill-0").Engine), patience)
}

// startEngine starts an engine process and returns when it is where it was to
// get; kill ends it.
func startEngine(t *testing.T, socket, request, reference string) (kill func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, engineCommand, socket, request, reference)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	stop := time.AfterFunc(patience, func() { _ = cmd.Process.Kill() })
	defer stop.Stop()
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "ready\n" {
		kill()
		t.Fatalf("engine said %q: %v\n%s", line, err, stderr.String())
	}
	return kill
}
