package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/localcluster"
)

// awaitMembers waits until an agent's node sees these lives and no others.
func awaitMembers(t *testing.T, a *agent, want ...*agent) {
	t.Helper()
	admin := dial(t, a.Engine)
	await(t, a.Node+" to see its members", patience, func(ctx context.Context) error {
		seen, err := lives(ctx, admin)
		for _, w := range want {
			if err == nil && seen[w.Node] != w.Incarnation {
				err = fmt.Errorf("of %s it sees life %d, want %d", w.Node, seen[w.Node], w.Incarnation)
			}
		}
		if err == nil && len(seen) != len(want) {
			err = fmt.Errorf("it sees %v", seen)
		}
		return err
	})
}

// portsOf makes a node come up on the ports of another.
func portsOf(r localcluster.Ready) config.Ports {
	return config.Ports{Gossip: int(r.Gossip.Port()), Peer: int(r.Peer.Port()), Data: int(r.Data.Port()), HTTP: int(r.HTTP.Port())}
}

// TestSeedRestartsEmpty restarts the seed with nothing that it knew, and nobody to
// join. Who joins through it soon sees all, and a read that is under way does not
// notice.
func TestSeedRestartsEmpty(t *testing.T) {
	t.Parallel()
	const pushPull = time.Second // of the preset
	c := up(t, 2, 2, thick()...)
	f, slow := behind(t, c, "slow", nil)
	l := startLoad(t, c.engine("prefill-1"), c.engine("decode-1"), 30)
	l.more(2)
	from, to := attach(t, slow.Engine), c.engine("decode-0")
	long := newRequest("long", bigTokens)
	if err := from.publish(t.Context(), long); err != nil {
		t.Fatal(err)
	}
	heal := toxic(t, f.data, "bandwidth", crawl)
	defer heal()
	read := make(chan error, 1)
	go func() { read <- to.retrieve(t.Context(), long, long.reference, patience) }()
	awaitLanded(t, to)

	seed := c.must("prefill-0")
	conf := configOf(t, seed)
	c.kill(seed.Node)
	l.more(2)
	if err := os.RemoveAll(conf.Node.StateDir); err != nil {
		t.Fatal(err)
	}
	conf.Cluster.Join, conf.Ports = nil, portsOf(seed.Ready)
	again := startAgent(t, conf)
	joins := another(t, seed, "late")
	joins.Cluster.Join = []string{again.Gossip.String()}
	begin := time.Now()
	late := startAgent(t, joins)
	admin := dial(t, late.Engine)
	want := map[string]uint64{seed.Node: again.Incarnation, late.Node: late.Incarnation, slow.Node: slow.Incarnation}
	for _, n := range c.Nodes()[1:] {
		want[n.Node] = n.Incarnation
	}
	await(t, "the late node to see all", patience, func(ctx context.Context) error {
		seen, err := lives(ctx, admin)
		for n, life := range want {
			if err == nil && seen[n] != life {
				err = fmt.Errorf("it sees %s in life %d, want %d: %v", n, seen[n], life, seen)
			}
		}
		return err
	})
	took := time.Since(begin)
	t.Logf("a node that joined through it sees all %v after its start", took.Round(time.Millisecond))
	if took > 2*pushPull+hangLimit { // and the time that a process takes to start on a busy machine
		t.Errorf("it took %v, want two intervals of push/pull, %v", took, 2*pushPull)
	}
	if err := errors.Join(
		move(t.Context(), newRequest("from the late one", 60), attach(t, late.Engine), c.engine("decode-1"), true, patience),
		move(t.Context(), newRequest("to the seed", 60), c.engine("prefill-1"), attach(t, again.Engine), false, patience),
	); err != nil {
		t.Error(err)
	}
	select {
	case err := <-read:
		t.Fatalf("the read ended before it was long: %v", err)
	default:
	}
	heal()
	if err := <-read; err != nil {
		t.Errorf("the read that was under way: %v", err)
	}
	l.more(2)
	l.end()
	awaitFree(t, slow.Node, dial(t, slow.Engine), patience)
}

// TestAnotherClusterOnItsAddress brings up a node of another cluster, gossip of
// both plain, on the ports of one that has died. Those who miss the dead one call
// it again and again, and nothing crosses.
func TestAnotherClusterOnItsAddress(t *testing.T) {
	t.Parallel()
	c := up(t, 2, 1)
	const dead = "prefill-1"
	was := c.must(dead)
	lost := newRequest("of the dead", 40)
	if err := c.engine(dead).publish(t.Context(), lost); err != nil {
		t.Fatal(err)
	}
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-0"), 60)
	l.more(2)
	c.kill(dead)

	// The first of the other cluster even has the dead one's name.
	var others []*agent
	for _, name := range []string{dead, "other"} {
		conf := another(t, was, name)
		conf.Cluster.Name, conf.Cluster.Join = "another", nil
		if len(others) == 0 {
			conf.Ports = portsOf(was.Ready)
		} else {
			conf.Cluster.Join = []string{others[0].Gossip.String()}
		}
		others = append(others, startAgent(t, conf))
	}
	for _, a := range others {
		awaitMembers(t, a, others...)
	}
	from, to := attach(t, others[0].Engine), attach(t, others[1].Engine)
	ol := startLoad(t, from, to, 60)
	there := newRequest("there", 40)
	if err := from.publish(t.Context(), there); err != nil {
		t.Fatal(err)
	}
	here := newRequest("here", 40)
	if err := c.engine("prefill-0").publish(t.Context(), here); err != nil {
		t.Fatal(err)
	}

	ours := []string{"prefill-0", "decode-0"}
	looks := 0
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end) || looks < 10; looks++ { // some rounds of everything
		for _, n := range ours {
			admin := dial(t, c.must(n).Engine)
			seen, err := lives(t.Context(), admin)
			if err != nil || seen[dead] > was.Incarnation || seen["other"] != 0 {
				t.Fatalf("%s sees %v of another cluster: %v", n, seen, err)
			}
			wantOwners(t, n, admin, ours...)
		}
		for _, a := range others {
			admin := dial(t, a.Engine)
			seen, err := lives(t.Context(), admin)
			if err != nil || len(seen) != len(others) {
				t.Fatalf("%s sees %v of another cluster: %v", a.Node, seen, err)
			}
			wantOwners(t, a.Node, admin, dead, "other")
		}
		l.more(1)
		ol.more(1)
	}
	for _, n := range ours {
		admin := dial(t, c.must(n).Engine)
		await(t, n+" to bury the dead", patience, func(ctx context.Context) error {
			seen, err := lives(ctx, admin)
			if err == nil && seen[dead] != 0 {
				err = errors.New("it is a member")
			}
			return err
		})
	}
	for what, err := range map[string]error{
		"what the dead had":       c.engine("decode-0").retrieve(t.Context(), lost, lost.reference, time.Second),
		"what is there, by here":  c.engine("decode-0").retrieve(t.Context(), there, there.reference, time.Second),
		"what is here, by there":  to.retrieve(t.Context(), here, here.reference, time.Second),
		"the same, without words": to.retrieve(t.Context(), here, "", time.Second),
	} {
		if code := client.CodeOf(err); code != kvferrypb.Failure_OWNER_LOST && code != kvferrypb.Failure_NOT_FOUND {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := errors.Join(
		c.engine("decode-0").retrieve(t.Context(), here, here.reference, patience),
		to.retrieve(t.Context(), there, there.reference, patience),
	); err != nil {
		t.Error(err)
	}
	l.end()
	ol.end()
}

// wantOwners checks that a node shows publications of these owners alone.
func wantOwners(t *testing.T, node string, a kvferrypb.AdminClient, owners ...string) {
	t.Helper()
	res, err := a.Publications(t.Context(), &kvferrypb.PublicationsRequest{Remote: true, Limit: 100_000})
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range res.GetItems() {
		if !slices.Contains(owners, i.GetOwner()) {
			t.Fatalf("%s shows %v of another cluster", node, i)
		}
	}
}

// TestJoinByCommand makes one cluster of two by the command line, whose nodes all
// serve meanwhile, and refuses what cannot be joined.
func TestJoinByCommand(t *testing.T) {
	t.Parallel()
	c := up(t, 1, 1)
	seed := c.must("prefill-0")
	l := startLoad(t, c.engine("prefill-0"), c.engine("decode-0"), 60)
	first := another(t, seed, "first")
	first.Cluster.Join = nil
	apart := []*agent{startAgent(t, first)}
	second := another(t, seed, "second")
	second.Cluster.Join = []string{apart[0].Gossip.String()}
	apart = append(apart, startAgent(t, second))
	for _, a := range apart {
		awaitMembers(t, a, apart...)
	}
	from, to := attach(t, apart[0].Engine), attach(t, apart[1].Engine)
	al := startLoad(t, from, to, 60)
	al.more(2)

	strange := another(t, seed, "strange")
	strange.Cluster.Name, strange.Cluster.Join = "strange", nil
	stranger := startAgent(t, strange)
	await(t, "the reason why a stranger is not joined", patience, func(context.Context) error {
		code, said := kvferry(t, apart[0].Engine, "", "join", "--timeout", "4s", stranger.Gossip.String())
		if code != 1 {
			t.Errorf("join of a stranger: exit code %d, want 1\n%s", code, said)
		}
		if !strings.Contains(said, "cluster.name") { // a node that is late says no reason
			return errors.New(said)
		}
		return nil
	})
	wantRefused(t, apart[0].Engine, []string{"that is this node itself"}, "join", "--timeout", "20s", apart[0].Gossip.String())

	if said := wantDone(t, apart[1].Engine, "", "join", seed.Gossip.String()); !strings.Contains(said, "joined, ") {
		t.Errorf("join says %q", said)
	}
	all := append([]*agent{{Ready: seed.Ready}, {Ready: c.must("decode-0").Ready}}, apart...)
	for _, a := range all {
		awaitMembers(t, a, all...)
	}
	awaitMembers(t, stranger, stranger)
	l.more(2)
	al.more(2)
	if err := errors.Join(
		move(t.Context(), newRequest("across", 60), from, c.engine("decode-0"), true, patience),
		move(t.Context(), newRequest("and back", 60), c.engine("prefill-0"), to, false, patience),
	); err != nil {
		t.Error(err)
	}
	l.end()
	al.end()
}
