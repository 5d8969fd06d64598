package faults

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
)

// gossipKey is a key, as text, and what it is called.
type gossipKey struct {
	config.Key
	text, id string
}

func newGossipKey(t *testing.T) gossipKey {
	t.Helper()
	k := make(config.Key, config.KeyBytes)
	_, _ = rand.Read(k) // it never fails
	text, err := k.MarshalText()
	if err != nil {
		t.Fatal(err)
	}
	return gossipKey{k, string(text), k.ID()}
}

// awaitRing waits until a node and all others that it knows have these keys, the
// first one encrypting.
func awaitRing(t *testing.T, node string, a kvferrypb.AdminClient, members int, keys ...gossipKey) {
	t.Helper()
	await(t, "the ring of "+node, patience, func(ctx context.Context) error {
		res, err := a.Keyring(ctx, &kvferrypb.KeyringRequest{})
		if err != nil {
			return err
		}
		var have, want []string
		for _, k := range res.GetKeys() {
			have = append(have, k.GetId())
		}
		for _, k := range keys {
			want = append(want, k.id)
		}
		if strings.Join(have, " ") != strings.Join(want, " ") || !res.GetKeys()[0].GetPrimary() || len(res.GetMembers()) != members-1 {
			return fmt.Errorf("keys %v, want %v; members %v", have, want, res.GetMembers())
		}
		for _, m := range res.GetMembers() {
			if !m.GetSame() {
				return fmt.Errorf("member %v", m)
			}
		}
		return nil
	})
}

// TestKeyringIsRotated changes the gossip keys by the command line while requests
// move, with members that are stopped, killed, and left behind meanwhile.
func TestKeyringIsRotated(t *testing.T) {
	t.Parallel()
	first, second, third, fourth := newGossipKey(t), newGossipKey(t), newGossipKey(t), newGossipKey(t)
	c := up(t, 2, 2, "cluster.keyring="+first.text, "timers.hold=5m")
	loads := []*load{startLoad(t, c.engine("prefill-0"), c.engine("decode-0"), 60), startLoad(t, c.engine("prefill-1"), c.engine("decode-1"), 60)}
	more := func() {
		t.Helper()
		for _, l := range loads {
			l.more(2)
		}
	}
	keeping, forgetting := another(t, c.must("prefill-0"), "keeps"), another(t, c.must("prefill-0"), "forgets")
	forgetting.Node.StateDir = ""
	keeps, forgets := startAgent(t, keeping), startAgent(t, forgetting)
	all := 6
	some, other := c.must("prefill-0"), c.must("decode-1")
	ring := func(members int, keys ...gossipKey) {
		t.Helper()
		awaitRing(t, some.Node, dial(t, some.Engine), members, keys...)
	}
	from, to := c.engine("prefill-0"), c.engine("decode-1")
	publish := func(name string) *request {
		t.Helper()
		r := newRequest(name, 60)
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		return r
	}
	// awaitDone repeats a command that is refused for good reason until it is done.
	awaitDone := func(socket, stdin string, refused func(code int, said string) bool, args ...string) {
		t.Helper()
		await(t, strings.Join(args, " "), patience, func(context.Context) error {
			code, said := kvferry(t, socket, stdin, args...)
			if code == 0 {
				return nil
			}
			if !refused(code, said) {
				t.Errorf("%s: exit code %d\n%s", strings.Join(args, " "), code, said)
			}
			return errors.New(said)
		})
	}
	ring(all, first)
	of1st, alsoOf1st := publish("signed with the first"), publish("also signed with the first")
	more()

	// By whatever member, and by the beginning of an id.
	if said := wantDone(t, some.Engine, second.text+"\n", "keyring", "add", "-"); !strings.Contains(said, second.id) {
		t.Errorf("add says %q", said)
	}
	more()
	wantDone(t, other.Engine, "", "keyring", "use", second.id[:6])
	ring(all, second, first)
	of2nd := publish("signed with the second")
	more()

	// A member is stopped. As long as it is one, it stands in the way.
	if err := syscall.Kill(keeps.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	awaitDone(other.Engine, third.text, func(code int, said string) bool { return code == 1 && strings.Contains(said, "keeps (no answer") }, "keyring", "add", "-")
	wantRefused(t, some.Engine, []string{"gone without a goodbye", "keeps"}, "keyring", "use", third.id)
	ring(all-1, second, first, third)
	if err := syscall.Kill(keeps.pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	awaitDone(some.Engine, "", func(code int, said string) bool { return code == 1 && strings.Contains(said, "keeps") }, "keyring", "use", third.id)
	ring(all, third, second, first)
	more()

	// Members are down: who left them behind may find them again, as long as they
	// have any key of the ring.
	keeps.kill(t)
	forgets.kill(t)
	blocked := func(code int, said string) bool {
		return code == 1 && (strings.Contains(said, "keeps") || strings.Contains(said, "forgets"))
	}
	awaitDone(some.Engine, fourth.text, blocked, "keyring", "add", "-")
	wantRefused(t, some.Engine, []string{"gone without a goodbye", "forgets, keeps"}, "keyring", "use", fourth.id)
	wantDone(t, other.Engine, "", "keyring", "use", fourth.id, "--force")
	ring(all-2, fourth, third, second, first)
	more()
	keeps, forgets = startAgent(t, keeping), startAgent(t, forgetting)
	for _, a := range []*agent{keeps, forgets} {
		awaitRing(t, a.Node, dial(t, a.Engine), all, fourth, third, second, first)
		if err := move(t.Context(), newRequest("from "+a.Node, 60), attach(t, a.Engine), to, true, patience); err != nil {
			t.Error(err)
		}
	}
	more()
	if err := to.retrieve(t.Context(), of1st, of1st.reference, patience); err != nil {
		t.Errorf("with a reference that the first key has signed: %v", err)
	}

	// A key is removed, and with it what it has signed.
	forgets.leave(t)
	wantRefused(t, some.Engine, []string{"it encrypts", "use another first"}, "keyring", "remove", fourth.id)
	wantDone(t, some.Engine, "", "keyring", "remove", first.id)
	ring(all-1, fourth, third, second)
	more()
	if err := to.retrieve(t.Context(), alsoOf1st, alsoOf1st.reference, patience); client.CodeOf(err) != kvferrypb.Failure_INVALID {
		t.Errorf("a reference that a removed key has signed ends with %v", err)
	}
	if err := to.retrieve(t.Context(), alsoOf1st, "", patience); err != nil {
		t.Errorf("the same without a reference: %v", err)
	}
	if err := to.retrieve(t.Context(), of2nd, of2nd.reference, patience); err != nil {
		t.Errorf("with a reference that the second key has signed: %v", err)
	}

	// Who has that key alone stays out, until its operator gives it another.
	forgets = startAgent(t, forgetting)
	await(t, "its reason not to be ready", patience, func(ctx context.Context) error {
		why, err := notReady(ctx, forgets.HTTP.String())
		for _, w := range []string{"not joined", "cluster.keyring", first.id} {
			if err == nil && !strings.Contains(why, w) {
				err = fmt.Errorf("it does not say %q: %q", w, why)
			}
		}
		return err
	})
	more()
	for _, n := range c.Nodes() {
		if seen, err := lives(t.Context(), dial(t, n.Engine)); err != nil || seen["forgets"] != 0 {
			t.Errorf("%s sees who has a removed key: %v, %v", n.Node, seen, err)
		}
	}
	forgets.leave(t)
	forgetting.Cluster.Keyring = []config.Key{second.Key}
	forgets = startAgent(t, forgetting)
	awaitRing(t, forgets.Node, dial(t, forgets.Engine), all, fourth, third, second)

	more()
	for _, l := range loads {
		l.end()
	}
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
}
