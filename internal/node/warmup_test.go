package node_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// startGroup runs nodes of one engine, a "RANKS/WORLD" each.
func startGroup(t *testing.T, set [][2]string, parts ...string) (nodes []*member) {
	t.Helper()
	for i, part := range parts {
		var seed *member
		if i > 0 {
			seed = nodes[0]
		}
		ranks, world, _ := strings.Cut(part, "/")
		own := append([][2]string{{"node.group", "engine"}, {"arena.ranks", ranks}, {"arena.world_size", world}}, set...)
		nodes = append(nodes, startNode(t, fmt.Sprintf("node-%d", i), seed, own...))
	}
	awaitPeers(t, nodes...)
	return nodes
}

func validate(e *engine) (*kvferrypb.ValidateWarmupResponse, error) {
	return e.ValidateWarmup(e.ctx(), &kvferrypb.ValidateWarmupRequest{})
}

// unequal asks for a refusal that names all of these.
func unequal(t *testing.T, e *engine, names ...string) {
	t.Helper()
	res, err := validate(e)
	if client.CodeOf(err) != kvferrypb.Failure_UNEQUAL {
		t.Fatalf("%v, %v, want UNEQUAL", res, err)
	}
	f := failureOf(t, err)
	for _, name := range names {
		if !strings.Contains(f.GetMessage(), name) {
			t.Errorf("%q does not say %q", f.GetMessage(), name)
		}
	}
	if f.GetRemedy() == "" {
		t.Error("no remedy")
	}
}

// TestWarmup: after warm-up all ranks of an engine are equal, wherever they
// are, or it is said which are not, and why that may be.
func TestWarmup(t *testing.T) {
	nodes := startGroup(t, nil, "0/4", "1,2/4", "3/4")
	stranger := startNode(t, "stranger", nodes[0], [2]string{"arena.world_size", "4"}) // of a group of its own
	awaitPeers(t, append(nodes, stranger)...)
	var engines []*engine
	for _, n := range nodes {
		engines = append(engines, openEngine(t, n))
	}
	for i, e := range engines {
		res, err := validate(e)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, r := range res.GetRanks() {
			got = append(got, fmt.Sprintf("%d %s %d/%d", r.GetRank(), r.GetNode(), r.GetFreePages(), r.GetTotalPages()))
		}
		if want := "[0 node-0 63/64 1 node-1 63/64 2 node-1 63/64 3 node-2 63/64]"; fmt.Sprint(got) != want {
			t.Errorf("node %d: %v, want %s", i, got, want)
		}
	}
	engines[1].ingest("r")
	engines[1].write("r", 20)
	for i, e := range engines {
		unequal(t, e, "rank 0 at node-0: 63 of 64", "rank 1 at node-1: 60 of 64", "rank 2 at node-1: 60 of 64", "rank 3 at node-2: 63 of 64",
			"still holds requests", fmt.Sprintf("at node-%d, are %d requests", i, i%2))
	}
	engines[1].remove("r")
	if _, err := validate(engines[2]); err != nil {
		t.Error(err)
	}
	unequal(t, openEngine(t, stranger), "group stranger", "rank 1 is missing", "rank 3 is missing", "node.group")

	// A rank that is gone: refused at once, or when gossip has noticed.
	nodes[2].close()
	await(t, "the node to be missed", func(context.Context) error {
		_, err := validate(engines[0])
		if client.CodeOf(err) != kvferrypb.Failure_UNEQUAL {
			t.Fatalf("%v, want UNEQUAL", err)
		}
		if f := failureOf(t, err); !strings.Contains(f.GetMessage(), "rank 3 is missing") {
			return err
		}
		return nil
	})
}

func TestWarmupOfAMisledGroup(t *testing.T) {
	for name, tt := range map[string]struct {
		parts []string
		set   [2]string // of the last one
		says  []string
	}{
		"a rank is missing":     {[]string{"0/3", "1/3"}, [2]string{}, []string{"rank 2 is missing", "down"}},
		"a rank is there twice": {[]string{"0/2", "1/2", "1/2"}, [2]string{}, []string{"rank 1 is there 2 times", "node-1 and node-2", "arena.ranks"}},
		"world sizes differ":    {[]string{"0/2", "1/3"}, [2]string{}, []string{"node-0 says 2", "node-1 says 3", "arena.world_size"}},
		"arenas differ":         {[]string{"0/2"}, [2]string{"arena.pages", "32"}, []string{"63 of 64", "31 of 32", "arena.pages"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nodes := startGroup(t, nil, tt.parts...)
			if tt.set[0] != "" {
				last := startNode(t, "last", nodes[0], [2]string{"node.group", "engine"}, [2]string{"arena.ranks", "1"}, [2]string{"arena.world_size", "2"}, tt.set)
				nodes = append(nodes, last)
				awaitPeers(t, nodes...)
			}
			for _, n := range nodes {
				unequal(t, openEngine(t, n), tt.says...)
			}
		})
	}
}

// TestWarmupAlone: an engine of one rank asks nobody.
func TestWarmupAlone(t *testing.T) {
	a := startNode(t, "a", nil, [2]string{"node.group", "g"})
	b := startNode(t, "b", a, [2]string{"node.group", "g"})
	awaitPeers(t, a, b)
	e := openEngine(t, a)
	e.ingest("r")
	e.write("r", 1)
	res, err := validate(e)
	if err != nil || len(res.GetRanks()) != 1 || res.GetRanks()[0].GetFreePages() != 62 {
		t.Errorf("%v, %v", res, err)
	}
}

// TestWarmupOfStrangers: only the group is answered, and only for this life.
func TestWarmupOfStrangers(t *testing.T) {
	n := startNode(t, "a", nil, [2]string{"node.group", "g"})
	c := callPeer(t, n)
	ask := func(incarnation uint64, group string) error {
		ctx, cancel := context.WithTimeout(t.Context(), deadline)
		defer cancel()
		_, err := c.Warmup(ctx, &kvferrypb.WarmupRequest{Incarnation: incarnation, Group: group}, grpc.WaitForReady(true))
		return err
	}
	life := uint64(n.Life().Incarnation)
	if err := ask(life, "g"); err != nil {
		t.Error(err)
	}
	if got := status.Code(ask(life+1, "g")); got != codes.Aborted {
		t.Errorf("another life is answered %v", got)
	}
	for _, group := range []string{"", "h", strings.Repeat("x", 10_000)} {
		if got := status.Code(ask(life, group)); got != codes.InvalidArgument {
			t.Errorf("group %.10q is answered %v", group, got)
		}
	}
}
