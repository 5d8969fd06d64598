package node_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer"
)

// ranked is the configuration of a node with ranks of an engine of two.
func ranked(group, ranks string, set ...[2]string) [][2]string {
	return append([][2]string{
		{"node.group", group},
		{"arena.ranks", ranks},
		{"arena.world_size", "2"},
		{"timers.backoff_min", "2ms"},
		{"timers.backoff_max", "20ms"},
	}, set...)
}

// trio is two owners, a rank each of one engine, and a reader of both.
type trio struct {
	t       testing.TB
	a, b, c *member // a has rank 0
	x, y, d *engine // theirs
	hold    *copier // of both owners
}

// startTrio runs them, wrap in front of the reader's transports.
func startTrio(t testing.TB, wrap func(transfer.Transport) transfer.Transport, set ...[2]string) *trio {
	t.Helper()
	return startTrioOf(t, ranked("decode", "0,1", set...), wrap, set...)
}

func startTrioOf(t testing.TB, reader [][2]string, wrap func(transfer.Transport) transfer.Transport, set ...[2]string) *trio {
	t.Helper()
	hold := &copier{stops: make(map[id.Request]*stop)}
	hosted := append([][2]string{{"arena.host_pages", "64"}}, set...)
	owner := func(name, rank string, seed *member) *member {
		return startOptions(t, node.Options{Config: configure(t, name, seed, ranked("g", rank, hosted...)...)}.Hooked(hold.hook))
	}
	g := &trio{t: t, hold: hold}
	g.a = owner("a", "0", nil)
	g.b = owner("b", "1", g.a)
	g.c = startWith(t, configure(t, "c", g.a, reader...), wrap)
	awaitPeers(t, g.a, g.b, g.c)
	g.x, g.y, g.d = openEngine(t, g.a), openEngine(t, g.b), openEngine(t, g.c)
	return g
}

// ingest makes the request known to all three.
func (g *trio) ingest(r string) {
	g.t.Helper()
	for _, e := range []*engine{g.x, g.y, g.d} {
		e.ingest(r)
	}
}

// grow publishes so many tokens more of the owners' requests.
func grow(r string, tokens int, final bool, owners ...*engine) (references []string) {
	for _, e := range owners {
		e.t.Helper()
		e.write(r, tokens)
		references = append(references, e.publish(r, final, to("c")).GetReference())
	}
	return references
}

// ready retrieves, and compares every byte.
func (g *trio) ready(r, reference string, tokens int, final bool) *kvferrypb.AdmitRetrieveResponse {
	g.t.Helper()
	least := tokens
	if final {
		least = 0
	}
	res, err := g.d.retrieve(r, reference, least, deadline)
	if err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		g.t.Fatalf("%v, %v, want READY", res, err)
	}
	if got := g.d.verify(r, "main"); got != tokens {
		g.t.Fatalf("%d tokens, want %d", got, tokens)
	}
	return res
}

// done waits until the publications of all owners have been released by their
// readers, and then until nobody holds a page.
func (g *trio) done(r string) {
	g.t.Helper()
	g.d.event(kvferrypb.Event_RETRIEVED)
	for _, e := range []*engine{g.x, g.y} {
		if ev := e.event(kvferrypb.Event_RELEASED); ev.GetOutcome() != "released" {
			g.t.Errorf("%v", ev)
		}
	}
	g.clean(r)
}

// clean removes the request everywhere: no page, lease, or follow is left.
func (g *trio) clean(r string) {
	g.t.Helper()
	for _, e := range []*engine{g.x, g.y, g.d} {
		if _, err := e.Remove(e.ctx(), &kvferrypb.RemoveRequest{Request: r, Discard: true}); err != nil && client.CodeOf(err) != kvferrypb.Failure_NOT_FOUND {
			g.t.Error(err)
		}
	}
	for _, n := range []*member{g.a, g.b} {
		awaitNothing(g.t, n)
		g.leases(n, 0)
	}
	awaitAllFree(g.t, g.c)
	g.retrievals(0)
}

// retrievals waits until the reader follows so many.
func (g *trio) retrievals(want int) {
	g.t.Helper()
	await(g.t, fmt.Sprint(want, " retrievals"), func(ctx context.Context) error {
		res, err := g.c.admin.Retrievals(ctx, &kvferrypb.RetrievalsRequest{})
		if err != nil || len(res.GetItems()) != want {
			return fmt.Errorf("%v, %w", res, err)
		}
		return nil
	})
	states := 0.0
	for _, s := range []string{"waiting", "queued", "reading", "backoff"} {
		states += metric(g.t, g.c, fmt.Sprintf("kvferry_retrievals_inflight{state=%q}", s))
	}
	if states != float64(want) {
		g.t.Errorf("%v retrievals are counted, want %d", states, want)
	}
}

// leases waits until a node's publications have so many.
func (g *trio) leases(n *member, want uint32) {
	g.t.Helper()
	await(g.t, fmt.Sprintf("%d leases at %s", want, n.Life()), func(context.Context) error {
		var leases uint32
		items := n.publications(g.t)
		for _, p := range items {
			leases += p.GetLeases()
		}
		if leases != want {
			return fmt.Errorf("%v", items)
		}
		return nil
	})
}

// goodbye is what who waits hears of an owner that goes: it says so before, as far
// as there is time for that.
func goodbye() []kvferrypb.Failure_Code {
	return []kvferrypb.Failure_Code{kvferrypb.Failure_REVOKED, kvferrypb.Failure_OWNER_LOST}
}

// ended waits for a retrieve that fails, for the named owner's fault.
func (g *trio) ended(what string, done <-chan result, of *member, want ...kvferrypb.Failure_Code) {
	g.t.Helper()
	var got result
	select {
	case got = <-done:
	case <-time.After(deadline):
		g.t.Fatalf("%s hangs", what)
	}
	f := failureOf(g.t, got.err)
	if !slices.Contains(want, f.GetCode()) {
		g.t.Fatalf("%s: %v, %v, want %v", what, got.res, f, want)
	}
	if of != nil && (f.GetPeer() != string(of.Life().Node) || f.GetPeerIncarnation() != uint64(of.Life().Incarnation)) {
		g.t.Errorf("%s: %v, want it of %s", what, f, of.Life())
	}
}

// await returns what a retrieve in the background says.
func (r result) ok(t testing.TB) {
	t.Helper()
	if r.err != nil || r.res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v, want READY", r.res, r.err)
	}
}

func within(t testing.TB, done <-chan result) result {
	t.Helper()
	select {
	case got := <-done:
		return got
	case <-time.After(deadline):
		t.Fatal("it hangs")
		return result{}
	}
}

// TestGroupIsReadAsOne: ranks that two nodes have published come over as one
// request, as far as the one that has least, whichever of them is named, and in
// both layouts.
func TestGroupIsReadAsOne(t *testing.T) {
	for name, tt := range map[string]struct {
		layout string
		poll   bool
		ahead  int // which owner is
		name   func(chunk int, refs []string) string
		reader string // its group
	}{
		"by request":                {name: func(int, []string) string { return "" }},
		"by request, polled, HND":   {layout: "HND", poll: true, ahead: 1, name: func(int, []string) string { return "" }},
		"by the first's reference":  {layout: "HND", name: func(_ int, refs []string) string { return refs[0] }},
		"by the second's reference": {ahead: 1, name: func(_ int, refs []string) string { return refs[1] }},
		"by this and that": {ahead: 1, name: func(chunk int, refs []string) string {
			return []string{refs[0], refs[1], ""}[chunk]
		}},
		"in the owners' own group": {reader: "g", name: func(int, []string) string { return "" }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			layout := [2]string{"arena.layout", "NHD"}
			if tt.layout != "" {
				layout[1] = tt.layout
			}
			group := tt.reader
			if group == "" {
				group = "decode"
			}
			g := startTrioOf(t, ranked(group, "0,1", layout), nil, layout)
			g.ingest("r1")
			owners := []*engine{g.x, g.y}
			refs := make([]string, 2)
			tokens := 0
			var bytes uint64
			for i, chunk := range chunks() {
				final := i == 2
				ahead, behind := tt.ahead, 1-tt.ahead
				refs[ahead] = grow("r1", chunk, final, owners[ahead])[0]
				named := tt.name(i, refs) // "" as long as it is not published
				least := tokens + chunk
				if final {
					least = 0
				}
				if res, err := g.d.retrieve("r1", named, least, 0); err != nil || res.GetReadiness() == kvferrypb.Readiness_READY {
					t.Fatalf("chunk %d, while one is behind: %v, %v", i, res, err)
				}
				if got := g.d.verify("r1", "main"); got != tokens {
					t.Fatalf("chunk %d, while one is behind: %d tokens, want %d", i, got, tokens)
				}
				tokens += chunk
				refs[behind] = grow("r1", chunk, final, owners[behind])[0]
				if named = tt.name(i, refs); tt.poll {
					g.d.awaitReady("r1", named, least)
				}
				bytes = g.ready("r1", named, tokens, final).GetBytes()
			}
			if want := uint64(tokens * 2 * 2 * 2 * 2 * 8 * 2); bytes != want {
				t.Errorf("%d bytes were moved, want %d: each once", bytes, want)
			}
			for _, ref := range []string{refs[0], refs[1], ""} { // it is here
				g.ready("r1", ref, tokens, true)
			}
			g.done("r1")
		})
	}
}

// TestGroupIsWaitedFor: who waits gets it when the last of the group has
// published, and hears what is missing if that is never.
func TestGroupIsWaitedFor(t *testing.T) {
	for _, named := range []bool{false, true} {
		t.Run(fmt.Sprint("by reference ", named), func(t *testing.T) {
			t.Parallel()
			g := startTrio(t, nil)
			g.ingest("r1")
			reference := grow("r1", 36, true, g.x)[0]
			if !named {
				reference = ""
			}
			awaitOffers(t, g.c, 1)
			_, err := g.d.retrieve("r1", reference, 0, 50*time.Millisecond)
			if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_DEADLINE || f.GetPeer() != "a" || !strings.Contains(f.GetMessage(), "other nodes of its group") {
				t.Errorf("in vain: %v, want DEADLINE with a and its group", f)
			}
			done := g.d.retrieving("r1", reference, 0)
			if named {
				g.leases(g.a, 1) // from now on
			}
			g.y.write("r1", 36)
			g.y.publish("r1", true)
			within(t, done).ok(t)
			g.d.verify("r1", "main")
			g.done("r1")
		})
	}
}

// TestGroupLeases: while it is read both owners know, it is one retrieval for
// people, and each of them is told of the end.
func TestGroupLeases(t *testing.T) {
	gate := newGate()
	g := startTrio(t, gate.wrap)
	g.ingest("r1")
	grow("r1", 36, true, g.x, g.y)
	done := g.d.retrieving("r1", "", 0)
	for range 2 { // a read each
		<-gate.came
	}
	g.leases(g.a, 1)
	g.leases(g.b, 1)
	g.retrievals(1)
	for _, e := range []*engine{g.x, g.y} {
		_, err := g.d.Release(g.d.ctx(), &kvferrypb.ReleaseRequest{Reference: e.referenceOf("r1")})
		code(t, "release while it is read", err, kvferrypb.Failure_BUSY)
	}
	close(gate.pass)
	within(t, done).ok(t)
	g.d.verify("r1", "main")
	g.done("r1")
}

// referenceOf is the reference of what a request has published.
func (e *engine) referenceOf(r string) string {
	e.t.Helper()
	res, err := e.client.Admin().Publications(e.ctx(), &kvferrypb.PublicationsRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	at := slices.IndexFunc(res.GetItems(), func(p *kvferrypb.PublicationItem) bool { return p.GetRequest() == r })
	if at < 0 {
		e.t.Fatalf("%s is not published", r)
	}
	return res.GetItems()[at].GetReference()
}

// TestGroupEndsInTheMiddle: whatever ends while the group is read, or waited
// for, is told with its name, and leaves nothing anywhere.
func TestGroupEndsInTheMiddle(t *testing.T) {
	for name, tt := range map[string]struct {
		end  func(g *trio)
		want kvferrypb.Failure_Code
		of   func(g *trio) *member
	}{
		"one dies": {
			func(g *trio) { g.b.closeWithin(time.Millisecond) },
			kvferrypb.Failure_OWNER_LOST, func(g *trio) *member { return g.b },
		},
		"the other dies": {
			func(g *trio) { g.a.closeWithin(time.Millisecond) },
			kvferrypb.Failure_OWNER_LOST, func(g *trio) *member { return g.a },
		},
		"one revokes": {
			func(g *trio) {
				p := g.b.publications(g.t)[0].GetPublication()
				if _, err := g.b.admin.Revoke(g.y.ctx(), &kvferrypb.RevokeRequest{Publication: p}); err != nil {
					g.t.Error(err)
				}
			},
			kvferrypb.Failure_REVOKED, func(g *trio) *member { return g.b },
		},
		"one resets": {
			func(g *trio) {
				if _, err := g.y.Reset(g.y.ctx(), &kvferrypb.ResetRequest{Request: "r1", Free: true}); err != nil {
					g.t.Error(err)
				}
			},
			kvferrypb.Failure_REVOKED, func(g *trio) *member { return g.b },
		},
		"the other discards": {
			func(g *trio) { g.x.discard("r1") },
			kvferrypb.Failure_REVOKED, func(g *trio) *member { return g.a },
		},
		"the reader cancels": {
			func(g *trio) {
				if _, err := g.d.Cancel(g.d.ctx(), &kvferrypb.CancelRequest{Request: "r1"}); err != nil {
					g.t.Error(err)
				}
			},
			kvferrypb.Failure_CANCELLED, nil,
		},
		"the reader removes":           {func(g *trio) { g.d.remove("r1") }, kvferrypb.Failure_CANCELLED, nil},
		"the reader resets":            {func(g *trio) { g.d.resetFree("r1") }, kvferrypb.Failure_CANCELLED, nil},
		"the reader's node is drained": {func(g *trio) { _ = g.c.Drain(context.Background(), time.Millisecond) }, kvferrypb.Failure_DRAINING, nil},
	} {
		for _, reads := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, reads %v", name, reads), func(t *testing.T) {
				t.Parallel()
				gate := newGate()
				g := startTrio(t, gate.wrap)
				g.ingest("r1")
				grow("r1", 20, reads, g.x, g.y)
				done := g.d.retrieving("r1", "", 0)
				if reads {
					<-gate.came
				} else {
					close(gate.pass)
					awaitLanded(g.d, "r1", 20)
				}
				for _, n := range []*member{g.a, g.b} {
					g.leases(n, 1)
				}
				var of *member
				if tt.of != nil {
					of = tt.of(g)
				}
				tt.end(g)
				if reads {
					close(gate.pass)
				}
				if tt.want == kvferrypb.Failure_DRAINING {
					if got := within(t, done); got.err == nil {
						t.Errorf("%v, want that it drains", got.res)
					}
					for _, n := range []*member{g.a, g.b} {
						g.leases(n, 0)
					}
					return
				}
				want := []kvferrypb.Failure_Code{tt.want}
				if tt.want == kvferrypb.Failure_OWNER_LOST && !reads {
					want = goodbye()
				}
				g.ended(name, done, of, want...)
				for _, n := range []*member{g.a, g.b} {
					if of != nil && of == n && tt.want == kvferrypb.Failure_OWNER_LOST {
						continue
					}
					g.leases(n, 0)
				}
				g.retrievals(0)
				if tt.want == kvferrypb.Failure_OWNER_LOST {
					g.d.remove("r1")
					awaitAllFree(t, g.c)
					return
				}
				g.clean("r1")
			})
		}
	}
}

func (e *engine) resetFree(r string) {
	e.t.Helper()
	if _, err := e.Reset(e.ctx(), &kvferrypb.ResetRequest{Request: r, Free: true}); err != nil {
		e.t.Error(err)
	}
}

// TestGroupNodeRestarts: one of the owners comes back with a new life while the
// other goes on. What it publishes then is brought in with the other's.
func TestGroupNodeRestarts(t *testing.T) {
	g := startTrio(t, nil)
	g.ingest("r1")
	grow("r1", 20, false, g.x, g.y)
	done := g.d.retrieving("r1", "", 0)
	awaitLanded(g.d, "r1", 20)
	was := g.b
	g.b.closeWithin(time.Millisecond)
	g.ended("its former life", done, was, goodbye()...)
	g.leases(g.a, 0)
	g.b = startNode(t, "b", g.a, ranked("g", "1")...)
	awaitPeers(t, g.a, g.b, g.c)
	g.y = openEngine(t, g.b)
	g.y.ingest("r1")
	grow("r1", 20, false, g.y)
	grow("r1", 16, true, g.x, g.y)
	g.ready("r1", "", 36, true)
	g.done("r1")
}

// TestGroupOfTwoMinds: nodes that have published different content are not read
// together. Who names one of them is told; who does not waits until they agree,
// or takes another group's.
func TestGroupOfTwoMinds(t *testing.T) {
	begin := func(t *testing.T) *trio {
		g := startTrio(t, nil)
		g.ingest("r1")
		g.x.write("r1", 5)
		g.x.resetFree("r1") // its second content
		grow("r1", 20, true, g.x, g.y)
		awaitOffers(t, g.c, 2)
		return g
	}
	t.Run("by reference", func(t *testing.T) {
		t.Parallel()
		g := begin(t)
		for _, e := range []*engine{g.x, g.y} {
			_, err := g.d.retrieve("r1", e.referenceOf("r1"), 0, deadline)
			code(t, "different content", err, kvferrypb.Failure_STALE)
		}
		g.leases(g.a, 0)
		g.clean("r1")
	})
	t.Run("until they agree", func(t *testing.T) {
		t.Parallel()
		g := begin(t)
		_, err := g.d.retrieve("r1", "", 0, 50*time.Millisecond)
		code(t, "different content", err, kvferrypb.Failure_STALE)
		done := g.d.retrieving("r1", "", 0)
		g.y.resetFree("r1")
		g.y.event(kvferrypb.Event_RELEASED)
		grow("r1", 20, true, g.y)
		got := within(t, done)
		if client.CodeOf(got.err) == kvferrypb.Failure_REVOKED { // it was looking at what is taken back
			got = within(t, g.d.retrieving("r1", "", 0))
		}
		got.ok(t)
		g.d.verify("r1", "main")
		g.done("r1")
	})
	t.Run("another group", func(t *testing.T) {
		t.Parallel()
		g := begin(t)
		e := openEngine(t, startOther(t, g))
		e.ingest("r1")
		grow("r1", 20, true, e)
		awaitOffers(t, g.c, 3)
		if res := g.ready("r1", "", 20, true); res.GetOwner() != "other" {
			t.Errorf("%v, want it from the other group", res)
		}
		e.remove("r1")
		g.clean("r1")
	})
}

// startOther runs a node of another group, which has both ranks.
func startOther(t testing.TB, g *trio) *member {
	t.Helper()
	n := startNode(t, "other", g.a, ranked("other", "0,1")...)
	awaitPeers(t, n, g.a, g.b, g.c)
	return n
}

// TestGroupThatIsComplete: one that has all ranks is taken, however much a group
// offers that lacks one.
func TestGroupThatIsComplete(t *testing.T) {
	g := startTrio(t, nil)
	set := ranked("second", "0")
	one := startNode(t, "one", g.a, set...)
	two := startNode(t, "two", g.a, ranked("second", "1")...)
	awaitPeers(t, g.a, g.b, g.c, one, two)
	x, y := openEngine(t, one), openEngine(t, two)
	for _, e := range []*engine{x, y, g.d} {
		e.ingest("r1")
	}
	grow("r1", 36, true, x, y)
	awaitOffers(t, g.c, 2)
	const many = 20 // more than are tried
	for range many {
		g.x.ingest("r1")
		g.x.write("r1", 8)
		g.x.publish("r1", true, func(p *kvferrypb.PublishRequest) { p.Hold = durationpb.New(time.Minute) })
		g.x.remove("r1")
	}
	awaitOffers(t, g.c, 2+many)
	if res := g.ready("r1", "", 36, true); res.GetOwner() != "one" && res.GetOwner() != "two" {
		t.Errorf("%v, want it from the second group", res)
	}
	for _, e := range []*engine{x, y} {
		e.event(kvferrypb.Event_RELEASED)
		e.remove("r1")
	}
	awaitAllFree(t, one)
	awaitAllFree(t, two)
	g.leases(g.a, 0)
	for _, p := range g.a.publications(t) {
		if p.GetAcknowledged() != 0 {
			t.Errorf("%v is acknowledged, and was not read", p)
		}
		if _, err := g.a.admin.Revoke(t.Context(), &kvferrypb.RevokeRequest{Publication: p.GetPublication()}); err != nil {
			t.Error(err)
		}
	}
	g.clean("r1")
}

// TestRankThatIsClaimedTwice: of two nodes that have the same rank one is read,
// and no other one as long as it goes on; one of other content is passed over.
func TestRankThatIsClaimedTwice(t *testing.T) {
	for _, differs := range []bool{false, true} {
		t.Run(fmt.Sprint("other content ", differs), func(t *testing.T) {
			t.Parallel()
			g := startTrio(t, nil)
			twin := startNode(t, "twin", g.a, ranked("g", "1")...)
			awaitPeers(t, g.a, g.b, g.c, twin)
			z := openEngine(t, twin)
			g.ingest("r1")
			z.ingest("r1")
			if differs {
				z.write("r1", 5)
				z.resetFree("r1")
			}
			tokens := 0
			var bytes uint64
			for i, chunk := range chunks() {
				owners := []*engine{g.x, g.y, z}
				if i%2 == 1 {
					slices.Reverse(owners)
				}
				grow("r1", chunk, i == 2, owners...)
				tokens += chunk
				bytes = g.ready("r1", "", tokens, i == 2).GetBytes()
			}
			if want := uint64(tokens * 2 * 2 * 2 * 2 * 8 * 2); bytes != want {
				t.Errorf("%d bytes were moved, want %d: each once", bytes, want)
			}
			g.d.event(kvferrypb.Event_RETRIEVED)
			for e, read := range map[*engine]bool{g.x: true, g.y: differs} {
				if read {
					e.event(kvferrypb.Event_RELEASED)
				}
			}
			z.discard("r1")
			awaitAllFree(t, twin)
			g.clean("r1")
		})
	}
}

// TestGroupMovesToTheHost: what any of the owners has published goes to the host
// between chunks, and comes back for the reader.
func TestGroupMovesToTheHost(t *testing.T) {
	for who, moves := range map[string]func(g *trio) []*engine{
		"the first":  func(g *trio) []*engine { return []*engine{g.x} },
		"the second": func(g *trio) []*engine { return []*engine{g.y} },
		"both":       func(g *trio) []*engine { return []*engine{g.y, g.x} },
	} {
		for _, named := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, by reference %v", who, named), func(t *testing.T) {
				t.Parallel()
				g := startTrio(t, nil)
				g.ingest("r1")
				tokens, reference := 0, ""
				for i, chunk := range chunks() {
					refs := grow("r1", chunk, i == 2, g.x, g.y)
					if named && reference == "" { // from then on it is an old name
						reference = refs[1]
					}
					tokens += chunk
					for _, e := range moves(g) {
						e.offload("r1")
					}
					g.ready("r1", reference, tokens, i == 2)
					if i == 2 {
						continue
					}
					for _, e := range moves(g) {
						await(t, "it to be back", func(context.Context) error {
							if e.offloaded("r1") {
								return errors.New("it is on the host")
							}
							return nil
						})
					}
				}
				g.done("r1")
			})
		}
	}
}

// TestGroupMovesWhileRead: the pages of one owner go to the host after the read
// knows where to read. The reader goes on with what goes on for it, whether it
// waits or not, and nobody sees a failure.
func TestGroupMovesWhileRead(t *testing.T) {
	for i, who := range []string{"a", "b"} {
		for _, waits := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, waits %v", who, waits), func(t *testing.T) {
				t.Parallel()
				gate := newGate()
				g := startTrio(t, gate.wrap)
				g.ingest("r1")
				refs := grow("r1", 36, true, g.x, g.y)
				awaitOffers(t, g.c, 2)
				var done chan result
				if waits {
					done = g.d.retrieving("r1", refs[0], 0)
				} else if res, err := g.d.retrieve("r1", refs[0], 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_READING {
					t.Fatalf("%v, %v", res, err)
				}
				for range 2 {
					<-gate.came
				}
				e := []*engine{g.x, g.y}[i]
				e.ingest("r2")
				e.offload("r1")
				e.write("r2", 63*8) // other tokens lie there now
				e.remove("r2")
				close(gate.pass)
				if waits {
					within(t, done).ok(t)
				}
				g.d.event(kvferrypb.Event_RETRIEVED)
				for _, ref := range []string{refs[1], refs[0], ""} { // by old names, too
					g.ready("r1", ref, 36, true)
				}
				for _, o := range []*engine{g.x, g.y} { // once, though it had several names
					if ev := o.event(kvferrypb.Event_RELEASED); ev.GetOutcome() != "released" {
						t.Errorf("%v", ev)
					}
				}
				g.clean("r1")
			})
		}
	}
}

// TestMirroredGroups: where each reader has one rank it reads one owner, leases
// nothing of the other one, and counts as no reader there, whichever is named.
func TestMirroredGroups(t *testing.T) {
	for name, named := range map[string]func(refs []string) string{
		"by request":   func([]string) string { return "" },
		"by the first": func(refs []string) string { return refs[0] },
		"by the last":  func(refs []string) string { return refs[1] },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := startTrioOf(t, ranked("decode", "0"), nil)
			second := startNode(t, "second", g.a, ranked("decode", "1")...)
			awaitPeers(t, g.a, g.b, g.c, second)
			e := openEngine(t, second)
			g.ingest("r1")
			e.ingest("r1")
			tokens := 0
			for i, chunk := range chunks() {
				refs := grow("r1", chunk, i == 2, g.x, g.y)
				tokens += chunk
				least := tokens
				if i == 2 {
					least = 0
				}
				// The one that is named is read last: it ends then.
				readers := []*engine{g.d, e}
				if named(refs) == refs[0] {
					slices.Reverse(readers)
				}
				for _, d := range readers {
					owner := "a"
					if d == e {
						owner = "b"
					}
					res, err := d.retrieve("r1", named(refs), least, deadline)
					if err != nil || res.GetReadiness() != kvferrypb.Readiness_READY || res.GetOwner() != owner || res.GetBytes() != uint64(tokens*2*2*2*8*2) {
						t.Fatalf("chunk %d: %v, %v, want it from %s", i, res, err, owner)
					}
					if got := d.verify("r1", "main"); got != tokens {
						t.Fatalf("%d tokens, want %d", got, tokens)
					}
				}
				if i < 2 {
					g.leases(g.a, 1)
					g.leases(g.b, 1)
				}
			}
			e.event(kvferrypb.Event_RETRIEVED)
			e.remove("r1")
			awaitAllFree(t, second)
			g.done("r1")
		})
	}
}

// TestReferenceOfAnotherRank: it says which group is meant. Who has none of its
// ranks waits for the node that has, and keeps nothing of the one that is named.
func TestReferenceOfAnotherRank(t *testing.T) {
	g := startTrioOf(t, ranked("decode", "0"), nil)
	g.ingest("r1")
	reference := grow("r1", 36, true, g.y)[0]
	_, err := g.d.retrieve("r1", reference, 0, 20*time.Millisecond)
	code(t, "in vain", err, kvferrypb.Failure_DEADLINE)
	if res, err := g.d.retrieve("r1", reference, 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_WAITING {
		t.Errorf("a poll: %v, %v, want WAITING", res, err)
	}
	done := g.d.retrieving("r1", reference, 0)
	grow("r1", 36, true, g.x)
	within(t, done).ok(t)
	g.ready("r1", reference, 36, true)
	if ev := g.x.event(kvferrypb.Event_RELEASED); ev.GetOutcome() != "released" {
		t.Errorf("%v", ev)
	}
	if p := g.b.publications(t); len(p) != 1 || p[0].GetAcknowledged() != 0 || p[0].GetLeases() != 0 {
		t.Errorf("%v, want that nobody has read it", p)
	}
	g.clean("r1")
}

// TestWideOwner: an owner that has all ranks is read alone, whatever else of its
// group there is.
func TestWideOwner(t *testing.T) {
	g := startTrio(t, nil)
	wide := startNode(t, "wide", g.a, ranked("g", "0,1")...)
	awaitPeers(t, wide, g.a, g.b, g.c)
	e := openEngine(t, wide)
	for _, d := range []*engine{e, g.x, g.d} {
		d.ingest("r1")
	}
	tokens := 0
	for i, chunk := range chunks() {
		grow("r1", chunk, i == 2, e, g.x)
		tokens += chunk
		if res := g.ready("r1", "", tokens, i == 2); res.GetOwner() != "wide" {
			t.Errorf("%v, want it from the one that has all", res)
		}
	}
	if got := metric(t, g.a, `kvferry_lease_renewals_total{result="granted"}`); got != 0 {
		t.Errorf("the other one has granted %v leases", got)
	}
	e.event(kvferrypb.Event_RELEASED)
	e.remove("r1")
	awaitAllFree(t, wide)
	g.clean("r1")
}

// TestReferenceOfTheOtherNode: what was begun by one reference goes on by the
// other one's.
func TestReferenceOfTheOtherNode(t *testing.T) {
	g := startTrio(t, nil)
	g.ingest("r1")
	first := grow("r1", 36, true, g.x)[0]
	if res, err := g.d.retrieve("r1", first, 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_WAITING {
		t.Fatalf("%v, %v, want WAITING", res, err)
	}
	g.leases(g.a, 1)
	g.ready("r1", grow("r1", 36, true, g.y)[0], 36, true)
	g.done("r1")
}

// TestGroupOfManyCalls: calls that name this one or that of a group at the same
// time are of one retrieval.
func TestGroupOfManyCalls(t *testing.T) {
	g := startTrio(t, nil)
	for round := range 5 {
		r := fmt.Sprint("r", round)
		g.ingest(r)
		refs := append(grow(r, 13, false, g.x, g.y), "")
		awaitOffers(t, g.c, 2)
		var calls []chan result
		for i := range 9 {
			calls = append(calls, g.d.retrieving(r, refs[i%3], 0))
		}
		grow(r, 23, true, g.x, g.y)
		for _, done := range calls {
			got := within(t, done)
			got.ok(t)
			if got.res.GetBytes() != 36*2*2*2*2*8*2 {
				t.Errorf("%v: it was not moved once", got.res)
			}
		}
		g.d.verify(r, "main")
		g.done(r)
	}
}

// TestGroupUnderStress: both owners write, publish, and move as they like, one
// behind the other, while the reader is told this reference or that, cancels, and
// starts over. Whatever is said to be ready is right, byte by byte; what nobody
// has ended comes in the end, and nothing is left.
func TestGroupUnderStress(t *testing.T) {
	small := [2]string{"arena.pages", "24"}
	g := startTrio(t, nil, small, [2]string{"transfer.limits.slice", "4KiB"})
	goesOn := until(t, *soak)
	var work sync.WaitGroup
	var ready, calm atomic.Int64
	for seat := range 3 {
		work.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(seat), 1))
			for i := 0; goesOn(calm.Load() > 0); i++ {
				if g.round(fmt.Sprintf("r%d-%d", seat, i), rng) {
					calm.Add(1)
				}
				ready.Add(1)
			}
		})
	}
	work.Wait()
	t.Logf("%d rounds, %d of them to the end", ready.Load(), calm.Load())
	if calm.Load() == 0 {
		t.Error("none has come to the end")
	}
	for _, n := range []*member{g.a, g.b} {
		awaitNothing(t, n)
		g.leases(n, 0)
	}
	awaitAllFree(t, g.c)
	g.retrievals(0)
}

// round carries one request over, and says whether it has come to its end.
func (g *trio) round(r string, rng *rand.Rand) bool {
	g.ingest(r)
	wild := rng.IntN(2) == 0
	refs := make(chan string, 16)
	var owners sync.WaitGroup
	for _, e := range []*engine{g.x, g.y} {
		rng := rand.New(rand.NewPCG(rng.Uint64(), 2))
		owners.Go(func() { e.produce(r, rng, wild, refs) })
	}
	reference := "" // one that was never followed says nothing once it has been read
	if rng.IntN(2) == 0 {
		reference = <-refs
	}
	var res *kvferrypb.AdmitRetrieveResponse
	var err error
	for i := 0; ; i++ {
		if wild && rng.IntN(2) == 0 {
			select {
			case reference = <-refs:
			default:
				reference = ""
			}
		}
		if wild && rng.IntN(4) == 0 {
			_, err = g.d.Cancel(g.d.ctx(), &kvferrypb.CancelRequest{Request: r})
			g.harmless("cancel", err)
			_, err = g.d.Reset(g.d.ctx(), &kvferrypb.ResetRequest{Request: r, Free: true})
			g.harmless("reset", err)
		}
		least, wait := 1+rng.IntN(36), time.Duration(rng.IntN(20))*time.Millisecond
		res, err = g.d.retrieve(r, reference, least, wait)
		g.harmless("retrieve", err)
		if err == nil && res.GetReadiness() == kvferrypb.Readiness_READY {
			if got := g.d.verify(r, "main"); got < least {
				g.t.Errorf("%s: %d tokens, want %d at least", r, got, least)
			}
		}
		if i > 4 {
			break
		}
	}
	owners.Wait()
	patience := deadline / 2
	if wild {
		patience = 100 * time.Millisecond // it may have been taken back
	}
	if wild {
		reference = ""
	}
	if res, err = g.d.retrieve(r, reference, 0, patience); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		g.harmless("the last", err)
		if !wild {
			g.t.Errorf("%s, which nobody has ended: %v, %v", r, res, err)
		}
	} else if got := g.d.verify(r, "main"); got != 36 {
		g.t.Errorf("%s: %d tokens at the end", r, got)
	}
	for _, e := range []*engine{g.x, g.y, g.d} {
		e.discard(r)
	}
	return err == nil
}

// produce writes and publishes a request in three pieces, and moves it about.
func (e *engine) produce(r string, rng *rand.Rand, wild bool, refs chan<- string) {
	for i, chunk := range chunks() {
		for { // until it is on the device, and there is room
			err := e.tryWrite(r, chunk)
			if err == nil {
				break
			}
			if c := client.CodeOf(err); c != kvferrypb.Failure_OFFLOADING && c != kvferrypb.Failure_RESOURCE_EXHAUSTED {
				e.t.Errorf("write %s: %v", r, err)
				return
			}
			if _, err := e.Reload(e.ctx(), &kvferrypb.ReloadRequest{Request: r}); err != nil && client.CodeOf(err) != kvferrypb.Failure_RESOURCE_EXHAUSTED {
				e.t.Errorf("reload %s: %v", r, err)
				return
			}
		}
		res, err := e.Publish(e.ctx(), &kvferrypb.PublishRequest{Request: r, Final: i == 2, Target: "c"})
		if err != nil {
			e.t.Errorf("publish %s: %v", r, err)
			return
		}
		select {
		case refs <- res.GetReference():
		default:
		}
		if rng.IntN(2) == 0 {
			if _, err := e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: r}); err != nil && client.CodeOf(err) != kvferrypb.Failure_RESOURCE_EXHAUSTED {
				e.t.Errorf("offload %s: %v", r, err)
			}
		}
	}
	if wild && rng.IntN(3) == 0 {
		e.discard(r)
	}
}

// harmless complains of an error that nothing in the test can cause.
func (g *trio) harmless(what string, err error) {
	switch c := client.CodeOf(err); c {
	case kvferrypb.Failure_TRANSPORT:
		if !strings.Contains(err.Error(), context.DeadlineExceeded.Error()) { // a machine that is busy with something else can
			g.t.Errorf("%s: %v", what, err)
		}
	case kvferrypb.Failure_OWNER_LOST, kvferrypb.Failure_MALFORMED, kvferrypb.Failure_INTERNAL, kvferrypb.Failure_INVALID:
		g.t.Errorf("%s: %v", what, err)
	default:
	}
}
