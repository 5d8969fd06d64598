package faults

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

// crawl lets a big transfer last far longer than a test waits for it.
const crawl = `{"rate": 500}` // KB/s

// drainTime is what a drain has that needs far less.
const drainTime = 2 * time.Minute

// TestDrain drains nodes by the command line and by SIGTERM in the middle of
// their work: what runs ends well, what is new is refused, and they leave, with
// exit code 0 and no later than they were told to.
func TestDrain(t *testing.T) {
	t.Parallel()
	c := up(t, 1, 2, thick()...)
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-1"), 30)
	l.more(2)
	t.Run("an owner by command", func(t *testing.T) {
		drainOwner(t, c, func(a *agent) *command {
			return begin(t, testLimit, "", "--socket", a.Engine, "drain", "--timeout", drainTime.String())
		})
	})
	t.Run("an owner by SIGTERM", func(t *testing.T) {
		drainOwner(t, c, func(a *agent) *command {
			if err := syscall.Kill(a.pid, syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			return nil
		})
	})
	t.Run("a reader", func(t *testing.T) { drainReader(t, c) })
	t.Run("whom nobody reads", func(t *testing.T) { drainUnread(t, c) })
	l.more(2)
	l.end()
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
}

// awaitDraining waits until a node says that it drains, and the others know.
func awaitDraining(t *testing.T, c *cluster, a *agent) {
	t.Helper()
	await(t, "it to say so", patience, func(ctx context.Context) error {
		why, err := notReady(ctx, a.HTTP.String())
		if err == nil && !strings.Contains(why, "draining") {
			err = fmt.Errorf("it says %q", why)
		}
		return err
	})
	for _, n := range c.Nodes() {
		admin := dial(t, n.Engine)
		await(t, n.Node+" to know", patience, func(ctx context.Context) error {
			res, err := admin.Members(ctx, &kvferrypb.MembersRequest{})
			for _, m := range res.GetItems() {
				if m.GetNode() == a.Node && m.GetDraining() {
					return nil
				}
			}
			return errors.Join(err, fmt.Errorf("members %v", res.GetItems()))
		})
	}
}

// awaitGone waits until an agent has ended, and well, and nobody lists it.
func awaitGone(t *testing.T, c *cluster, a *agent) {
	t.Helper()
	if code, log := a.awaitExit(t); code != 0 {
		t.Errorf("%s ended with exit code %d:\n%s", a.Node, code, log)
	}
	begin := time.Now()
	for _, n := range c.Nodes() {
		admin := dial(t, n.Engine)
		await(t, n.Node+" to know that it has left", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, admin)
			if err == nil && seen[a.Node] != 0 {
				err = errors.New("it is a member")
			}
			return err
		})
	}
	t.Logf("known to have left by all %v after its end", time.Since(begin).Round(time.Millisecond))
}

// drainOwner drains who has a publication that is being read, and one that is not
// yet. The drain ends when both have been read, long before its time is over.
func drainOwner(t *testing.T, c *cluster, drain func(*agent) *command) {
	f, owner := behind(t, c, "owner", func(c *config.Config) { c.Timers.Drain = drainTime })
	from, to := attach(t, owner.Engine), c.engine("decode-0")
	slow, unread := newRequest("slow "+t.Name(), bigTokens), newRequest("unread "+t.Name(), 60)
	for _, r := range []*request{slow, unread} {
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	// A request whose engine has come no further than to have computed it.
	late := newRequest("late publication", 60)
	if _, err := from.session.Ingest(t.Context(), &kvferrypb.IngestRequest{Request: late.name}); err != nil {
		t.Fatal(err)
	}
	step, err := from.admit(t.Context(), late.name, late.tokens)
	if err == nil {
		_, err = from.session.Commit(t.Context(), &kvferrypb.CommitRequest{Step: step.GetStep()})
	}
	if err != nil {
		t.Fatal(err)
	}
	clear(to.region.Bytes()) // nothing is read into it now
	heal := toxic(t, f.data, "bandwidth", crawl)
	read := make(chan error, 1)
	go func() { read <- to.retrieve(t.Context(), slow, slow.reference, patience) }()
	awaitLanded(t, to)

	begin := time.Now()
	told := drain(owner)
	awaitDraining(t, c, owner)
	for what, call := range map[string]func() error{
		"publication": func() error {
			_, err := from.session.Publish(t.Context(), &kvferrypb.PublishRequest{Request: late.name, Final: true})
			return err
		},
		"request": func() error { return from.publish(t.Context(), newRequest("late", 60)) },
	} {
		if err := call(); client.CodeOf(err) != kvferrypb.Failure_DRAINING {
			t.Errorf("new %s at a node that drains: %v", what, err)
		}
	}
	select {
	case err := <-read:
		t.Fatalf("the read ended before it was slow: %v", err)
	case <-owner.exited:
		t.Fatal("it has left while it is read")
	default:
	}
	heal()
	if err := <-read; err != nil {
		t.Errorf("what was read: %v", err)
	}
	if err := to.retrieve(t.Context(), unread, unread.reference, patience); err != nil {
		t.Errorf("what was not read yet: %v", err)
	}
	awaitGone(t, c, owner)
	if took := time.Since(begin); took > drainTime-patience/3 {
		t.Errorf("it left after %v, its time was %v", took, drainTime)
	}
	if told != nil {
		if code := told.code(t); code != 0 || !strings.Contains(told.stdout.String(), "owner has left the cluster") {
			t.Errorf("drain: exit code %d\n%s%s", code, told.stdout.String(), told.stderr.String())
		}
	}
	if err := to.retrieve(t.Context(), slow, slow.reference, time.Second); client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST {
		t.Errorf("from who has left: %v", err)
	}
}

// drainReader drains who is in the middle of a read: it finishes it.
func drainReader(t *testing.T, c *cluster) {
	f, owner := behind(t, c, "owner", nil)
	from := attach(t, owner.Engine)
	reader := startAgent(t, another(t, c.must("prefill-0"), "reader"))
	awaitPeer(t, "reader", dial(t, reader.Engine), "owner")
	to := attach(t, reader.Engine)
	r := newRequest("its reader drains", bigTokens)
	if err := from.publish(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	heal := toxic(t, f.data, "bandwidth", crawl)
	defer heal()
	if _, err := to.session.Ingest(t.Context(), &kvferrypb.IngestRequest{Request: r.name}); err != nil {
		t.Fatal(err)
	}
	read := make(chan error, 1)
	go func() {
		_, err := to.await(t.Context(), r.name, r.reference, 0, patience)
		read <- err
	}()
	awaitLanded(t, to)
	told := begin(t, testLimit, "", "--socket", reader.Engine, "drain", "--timeout", drainTime.String())
	awaitDraining(t, c, reader)
	select {
	case err := <-read:
		t.Fatalf("the read ended before it was slow: %v", err)
	default:
	}
	heal()
	if err := errors.Join(<-read, to.holds(r.name, r.tokens)); err != nil {
		t.Errorf("what it read: %v", err)
	}
	awaitGone(t, c, reader)
	if code := told.code(t); code != 0 {
		t.Errorf("drain: exit code %d\n%s%s", code, told.stdout.String(), told.stderr.String())
	}
	awaitFree(t, "owner", dial(t, owner.Engine), patience) // its acknowledgement was heard
}

// drainUnread drains who has what nobody reads, with a reader that holds on to it
// and never ends: it waits as long as it was told to, and then says so to both.
func drainUnread(t *testing.T, c *cluster) {
	const bound = 2 * time.Second
	f, owner := behind(t, c, "owner", nil)
	from, to := attach(t, owner.Engine), c.engine("decode-0")
	unread, endless := newRequest("never read", 60), newRequest("read for ever", bigTokens)
	for _, r := range []*request{unread, endless} {
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	clear(to.region.Bytes()) // nothing is read into it now
	heal := toxic(t, f.data, "bandwidth", crawl)
	defer heal()
	read := make(chan error, 1)
	go func() { read <- to.retrieve(t.Context(), endless, endless.reference, patience) }()
	awaitLanded(t, to)
	start := time.Now()
	told := begin(t, patience, "", "--socket", owner.Engine, "drain", "--timeout", bound.String())
	code, log := owner.awaitExit(t)
	took := time.Since(start)
	if code != 0 || !strings.Contains(log, "what still runs is cut") {
		t.Errorf("it ended with exit code %d, want 0 after it has cut what ran:\n%s", code, log)
	}
	t.Logf("left after %v of %v", took.Round(time.Millisecond), bound)
	if took < bound || took > bound+hangLimit {
		t.Errorf("it left after %v, its time was %v", took, bound)
	}
	wantFailure(t, <-read, "owner", owner.Incarnation, kvferrypb.Failure_REVOKED, kvferrypb.Failure_STALE, kvferrypb.Failure_OWNER_LOST)
	if code := told.code(t); code != 0 {
		t.Errorf("drain: exit code %d\n%s%s", code, told.stdout.String(), told.stderr.String())
	}
	err := to.retrieve(t.Context(), unread, unread.reference, time.Second)
	wantFailure(t, err, "owner", owner.Incarnation, kvferrypb.Failure_OWNER_LOST)
}
