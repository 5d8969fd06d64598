package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// Bounds of the median for a machine that is busy with other tests; the log has the
// figures.
const (
	targetedBound = 2 * time.Second
	gossipedBound = 4 * time.Second
)

// TestVisible measures from the call of the final publish until another process
// has all of it: pushed to a known target, and by gossip alone, with page lists
// that fit into an announcement and with such that do not.
func TestVisible(t *testing.T) {
	// A token a page, 32 bytes each.
	c := up(t, 2, 3, "arena.pages=4600", "arena.page_size=1", "arena.layers=1", "arena.heads=1")
	from := c.engine("prefill-0")
	var readers []*engine
	for _, n := range c.Nodes()[1:] {
		e := attach(t, n.Engine)
		readers = append(readers, e)
		if err := move(t.Context(), newRequest("warm "+n.Node, 60), from, e, true, patience); err != nil {
			t.Fatal(err)
		}
	}
	owner := dial(t, c.Nodes()[0].Engine)
	rnd := rand.New(rand.NewPCG(1, 2))
	measure := func(name string, samples, tokens int, targeted bool, bound time.Duration) {
		t.Run(name, func(t *testing.T) {
			var took []time.Duration
			for i := range samples {
				// The acknowledgement of the one before is on its way, and there
				// may be no room for two.
				awaitFree(t, from.node(), owner, patience)
				to := readers[rnd.IntN(len(readers))]
				r := newRequest(fmt.Sprintf("%s %d", name, i), tokens)
				r.pause = 2 * time.Millisecond
				if targeted {
					r.target = to.node()
				}
				if err := move(t.Context(), r, from, to, false, patience); err != nil {
					t.Fatal(err)
				}
				took = append(took, time.Duration(r.ready.Load()-r.final.Load()))
			}
			slices.Sort(took)
			p50, p99 := took[samples/2], took[samples*99/100]
			t.Logf("ready after p50 %v, p99 %v", p50.Round(time.Microsecond), p99.Round(time.Microsecond))
			if p50 > bound || p99 > hangLimit {
				t.Errorf("p50 is %v and p99 %v, want at most %v and %v", p50, p99, bound, hangLimit)
			}
		})
	}
	measure("3 pages, targeted", 20, 3, true, targetedBound)
	measure("16 pages, targeted", 20, 16, true, targetedBound)
	measure("4096 pages in a row, targeted", 3, 4096, true, 2*targetedBound)
	measure("3 pages, by gossip", 20, 3, false, gossipedBound)
	measure("16 pages, by gossip", 20, 16, false, gossipedBound)
	shuffle(t, from, rnd)
	measure("4096 pages at random, targeted", 3, 4096, true, 2*targetedBound)
	measure("4096 pages at random, by gossip", 3, 4096, false, 2*gossipedBound)

	t.Run("on all", func(t *testing.T) {
		r := newRequest("on all", 60)
		r.keep = true
		admins := make(map[string]kvferrypb.AdminClient)
		for _, n := range c.Nodes()[1:] {
			admins[n.Node] = dial(t, n.Engine)
		}
		if err := from.publish(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		for node, a := range admins {
			await(t, node+" to show it", hangLimit, func(ctx context.Context) error {
				return shown(ctx, a, from.node(), uint64(from.session.Life().Incarnation), r, true)
			})
		}
		t.Logf("seen by %d nodes after %v", len(admins), time.Since(begin).Round(time.Millisecond))
		from.remove(r.name)
		for node, a := range admins {
			await(t, node+" to forget it", hangLimit, func(ctx context.Context) error {
				return shown(ctx, a, from.node(), uint64(from.session.Life().Incarnation), r, false)
			})
		}
	})
	for _, n := range c.Nodes() {
		awaitFree(t, n.Node, dial(t, n.Engine), patience)
	}
}

// shuffle makes the free pages of a node lie in disorder: one-page requests
// that fill it end in another order than they began.
func shuffle(t *testing.T, e *engine, rnd *rand.Rand) {
	t.Helper()
	const batch = 500
	var names []string
	for i := range 9 {
		var step kvferrypb.AdmitRequest
		for j := range batch {
			name := fmt.Sprintf("shuffle %d %d", i, j)
			names = append(names, name)
			step.Segments = append(step.Segments, &kvferrypb.Segment{Request: name, Span: 1})
			if _, err := e.session.Ingest(t.Context(), &kvferrypb.IngestRequest{Request: name}); err != nil {
				t.Fatal(err)
			}
		}
		res, err := e.session.Admit(t.Context(), &step)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := e.session.Commit(t.Context(), &kvferrypb.CommitRequest{Step: res.GetStep()}); err != nil {
			t.Fatal(err)
		}
	}
	rnd.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
	ends, ctx := errgroup.WithContext(t.Context())
	ends.SetLimit(16)
	for _, n := range names {
		ends.Go(func() error {
			_, err := e.session.Remove(ctx, &kvferrypb.RemoveRequest{Request: n})
			return err
		})
	}
	if err := ends.Wait(); err != nil {
		t.Fatal(err)
	}
}
