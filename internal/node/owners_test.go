package node_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/manager"
)

// awaitOffers waits until a node knows so many publications of others.
func awaitOffers(t testing.TB, n *member, want int) {
	t.Helper()
	await(t, fmt.Sprintf("%s to know %d publications", n.Life(), want), func(ctx context.Context) error {
		res, err := n.admin.Publications(ctx, &kvferrypb.PublicationsRequest{Remote: true})
		if err != nil || len(res.GetItems()) != want {
			return fmt.Errorf("%v, %w", res, err)
		}
		return nil
	})
}

// TestSeveralOwners: of all that offer a request, the reader takes the one that
// it can use, whichever it heard of first or last.
func TestSeveralOwners(t *testing.T) {
	model := [2]string{"arena.model", "other"}
	rank := func(r string) [][2]string { return [][2]string{{"arena.ranks", r}, {"arena.world_size", "2"}} }
	for name, tt := range map[string]struct {
		fits, other [][2]string // owners; the reader is as the one that fits
		code        kvferrypb.Failure_Code
	}{
		"another model":   {other: [][2]string{model}, code: kvferrypb.Failure_INCOMPATIBLE},
		"the other rank":  {fits: rank("1"), other: rank("0"), code: kvferrypb.Failure_DEADLINE}, // another node of its group may have it
		"one rank of two": {fits: [][2]string{{"arena.ranks", "0,1"}}, other: rank("0"), code: kvferrypb.Failure_DEADLINE},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fits := startNode(t, "fits", nil, tt.fits...)
			other := startNode(t, "other", fits, tt.other...)
			reader := startNode(t, "reader", fits, tt.fits...)
			awaitPeers(t, fits, other, reader)
			a, b, d := openEngine(t, fits), openEngine(t, other), openEngine(t, reader)

			// The one that does not fit is the first, and for a while the only one.
			a.ingest("late")
			b.ingest("late")
			d.ingest("late")
			b.write("late", 16)
			b.publish("late", true, to("reader"))
			awaitOffers(t, reader, 1)
			if res, err := d.retrieve("late", "", 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_WAITING {
				t.Errorf("a poll with nobody that fits yet: %v, %v", res, err)
			}
			_, err := d.retrieve("late", "", 0, 100*time.Millisecond)
			if f := failureOf(t, err); f.GetCode() != tt.code || f.GetPeer() != "other" || (f.GetCode() == kvferrypb.Failure_INCOMPATIBLE) != (len(f.GetDifferences()) == 1) {
				t.Errorf("a wait in vain: %v, want %v with other", f, tt.code)
			}
			waits := d.retrieving("late", "", 0)
			for i, chunk := range chunks() {
				a.write("late", chunk)
				a.publish("late", i == 2)
			}
			if got := <-waits; got.err != nil || got.res.GetOwner() != "fits" {
				t.Errorf("%v, %v, want it from fits", got.res, got.err)
			}
			// The one that does not fit is the last.
			a.ingest("early")
			b.ingest("early")
			d.ingest("early")
			for i, chunk := range chunks() {
				a.write("early", chunk)
				a.publish("early", i == 2)
			}
			awaitOffers(t, reader, 2) // what was read is no more
			b.write("early", 16)
			b.publish("early", true, to("reader"))
			awaitOffers(t, reader, 3)
			if res, err := d.retrieve("early", "", 0, deadline); err != nil || res.GetOwner() != "fits" {
				t.Errorf("%v, %v, want it from fits", res, err)
			}
			for _, r := range []string{"late", "early"} {
				if got := d.verify(r, "main"); got != 36 {
					t.Errorf("%d tokens of %s, want 36", got, r)
				}
			}
		})
	}
}

// TestLyingOwnerIsPassedOver: one that offers nonsense, or refuses to talk of
// it, keeps nobody from another's copy.
func TestLyingOwnerIsPassedOver(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*manager.Publication)
		hello  func(context.Context, *kvferrypb.HelloResponse)
	}{
		"a page beyond": {change: func(p *manager.Publication) { p.Streams[0].Pages[1] = 1 << 20 }},
		"no pages":      {change: func(p *manager.Publication) { p.Streams[0].Pages = nil }},
		"no hello":      {hello: func(ctx context.Context, _ *kvferrypb.HelloResponse) { <-ctx.Done() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := startPair(t)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			imp := startImpostor(t, decode, tt.hello)
			p.ingest("r1")
			d.ingest("r1")
			for i, chunk := range chunks() {
				p.write("r1", chunk)
				p.publish("r1", i == 2)
			}
			awaitOffers(t, decode, 1)
			lie := honest("r1")
			if tt.change != nil {
				tt.change(&lie)
			}
			imp.announce(t, lie)
			imp.gossip(t)
			awaitOffers(t, decode, 2) // and this one was heard of last
			if res, err := d.retrieve("r1", "", 0, deadline); err != nil || res.GetOwner() != "prefill" {
				t.Errorf("%v, %v, want it from prefill", res, err)
			}
			if got := d.verify("r1", "main"); got != 36 {
				t.Errorf("%d tokens, want 36", got)
			}
		})
	}
}

// TestOwnerThatHasLeft: a life that was here once, and has gone with no new one,
// is lost; one that nobody here has met is unknown.
func TestOwnerThatHasLeft(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 20)
	ref := p.publish("r1", true).GetReference()
	prefill.close()
	await(t, "decode to see it gone", func(ctx context.Context) error {
		res, err := decode.admin.Peers(ctx, &kvferrypb.PeersRequest{})
		if err != nil || len(res.GetItems()) != 0 {
			return fmt.Errorf("%v, %w", res, err)
		}
		return nil
	})
	for _, wait := range []time.Duration{0, deadline} {
		start := time.Now()
		_, err := d.retrieve("r1", ref, 0, wait)
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_OWNER_LOST || f.GetPeer() != "prefill" || f.GetPeerIncarnation() != uint64(prefill.Life().Incarnation) {
			t.Errorf("waiting %v: %v, want OWNER_LOST of %s", wait, f, prefill.Life())
		}
		if took := time.Since(start); took > deadline/2 {
			t.Errorf("it was told after %v", took)
		}
	}
	if _, err := d.Release(d.ctx(), &kvferrypb.ReleaseRequest{Reference: ref}); client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST {
		t.Errorf("release: %v, want OWNER_LOST", err)
	}
}
