package node_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// three chunks that begin and end within pages.
func chunks() []int { return []int{13, 3, 20} }

func TestOneRequestTwoNodes(t *testing.T) {
	for name, tt := range map[string]struct {
		bring
		both, decode [][2]string
	}{
		"pushed":         {bring: bring{target: "decode"}},
		"gossip only":    {},
		"unknown target": {bring: bring{target: "nowhere"}},
		"by reference":   {bring: bring{target: "decode", reference: true}},
		"reference only": {bring: bring{reference: true}},
		"polled":         {bring: bring{target: "decode", poll: true}},
		"labels":         {bring: bring{labels: []string{"draft", "main", "vision"}, target: "decode"}},
		"two ranks":      {both: [][2]string{{"arena.ranks", "0,1"}}},
		"HND":            {both: [][2]string{{"arena.layout", "HND"}}},
		"fp32 of HND":    {both: [][2]string{{"arena.layout", "HND"}, {"arena.dtype", "fp32"}, {"arena.ranks", "0,1"}}},
		"fewer pages":    {decode: [][2]string{{"arena.pages", "7"}}},
		"more pages":     {decode: [][2]string{{"arena.pages", "100"}}},
		"keyring":        {bring: bring{reference: true}, both: [][2]string{{"cluster.keyring", testKey}}},
		"required":       {both: [][2]string{{"transfer.require", "tcp"}, {"arena.huge_pages", "never"}}},
		"over tcp":       {bring: bring{target: "decode", labels: []string{"draft", "main"}}, both: [][2]string{overTCP, {"arena.ranks", "0,1"}}},
		"HND over tcp":   {both: [][2]string{overTCP, {"arena.layout", "HND"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill := startNode(t, "prefill", nil, tt.both...)
			decode := startNode(t, "decode", prefill, append(tt.both, tt.decode...)...)
			awaitPeers(t, prefill, decode)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			tt.chunks = chunks()
			carry(t, "r1", tt.bring, p, d)
			p.remove("r1")
			for _, l := range append(tt.labels, "main") {
				d.write("r1", 1, l)
			}
			if got := d.verify("r1", "main"); got < 37 {
				t.Errorf("%d tokens after a decode step, want 37", got)
			}
			d.remove("r1")
			awaitAllFree(t, prefill)
			awaitAllFree(t, decode)
		})
	}
}

const testKey = "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="

func TestThreeReaders(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	nodes := []*member{prefill}
	var readers []*engine
	for i := range 3 {
		nodes = append(nodes, startNode(t, fmt.Sprintf("decode-%d", i), prefill))
	}
	awaitPeers(t, nodes...)
	for _, n := range nodes[1:] {
		readers = append(readers, openEngine(t, n))
	}
	p := openEngine(t, prefill)
	carry(t, "r1", bring{chunks: chunks()}, p, readers...)
	p.remove("r1")
	// All three have acknowledged, so the hold of 30 s does not matter.
	awaitAllFree(t, prefill)
	for i, r := range readers {
		r.remove("r1")
		awaitAllFree(t, nodes[i+1])
	}
}

// TestPublishThenRemove: what is published as final is read by whoever comes,
// also when the request is gone in the same moment.
func TestPublishThenRemove(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	for i, chunk := range chunks() {
		p.write("r1", chunk)
		p.publish("r1", i == 2)
	}
	p.remove("r1")
	p.ingest("r1") // at once, and with other bytes in other pages
	p.write("r1", 8)
	if c := counts(t, prefill); c.GetLimbo() != 5 {
		t.Errorf("%d pages in limbo, want the 5 of the published: %v", c.GetLimbo(), c)
	}
	d.ingest("r1")
	if _, err := d.retrieve("r1", "", 0, deadline); err != nil {
		t.Fatal(err)
	}
	if got := d.verify("r1", "main"); got != 36 {
		t.Errorf("%d tokens, want 36", got)
	}
	p.remove("r1")
	awaitAllFree(t, prefill)
}

func TestDecodePublishesOnward(t *testing.T) {
	first := startNode(t, "first", nil)
	second, third := startNode(t, "second", first), startNode(t, "third", first)
	awaitPeers(t, first, second, third)
	a, b, c := openEngine(t, first), openEngine(t, second), openEngine(t, third)
	carry(t, "r1", bring{chunks: chunks(), target: "second"}, a, b)
	a.remove("r1")
	awaitAllFree(t, first)
	b.write("r1", 5) // what it has decoded
	c.ingest("r1")
	b.publish("r1", false, to("third"))
	if _, err := c.retrieve("r1", "", 41, deadline); err != nil {
		t.Fatal(err)
	}
	b.write("r1", 1)
	b.publish("r1", true, to("third"))
	res, err := c.retrieve("r1", "", 0, deadline)
	if err != nil || res.GetOwner() != "second" {
		t.Fatalf("%v, %v, want it from second", res, err)
	}
	if got := c.verify("r1", "main"); got != 42 {
		t.Errorf("%d tokens, want 42", got)
	}
}

// TestTableByLookup: page lists that do not fit into gossip are looked up at
// the owner.
func TestTableByLookup(t *testing.T) {
	prefill, decode := startPair(t, [2]string{"arena.pages", "4000"}, [2]string{"arena.page_size", "1"})
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("other")
	p.ingest("r1")
	d.ingest("r1")
	tokens := 0
	for i := range 3 {
		for range 250 { // in turns, so that no more than two pages are neighbours
			step, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{segment("r1", "", 2), segment("other", "", 1)}})
			if err != nil {
				t.Fatal(err)
			}
			p.fill("r1", step.GetPlans()) // nobody looks at the other one
			if _, err := p.Commit(p.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
				t.Fatal(err)
			}
		}
		tokens += 500
		ref := p.publish("r1", i == 2).GetReference()
		if i == 0 {
			ref = ""
		}
		if res, err := d.retrieve("r1", ref, tokens, deadline); err != nil {
			t.Fatalf("chunk %d: %v, %v", i, res, err)
		}
		if res, err := d.retrieve("r1", ref, 0, 0); err != nil || (res.GetReadiness() == kvferrypb.Readiness_READY) != (i == 2) {
			t.Fatalf("chunk %d: %v, %v", i, res, err)
		}
	}
	if got := d.verify("r1", "main"); got != tokens {
		t.Errorf("%d tokens, want %d", got, tokens)
	}
}

func TestCommitPublishes(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	for i, chunk := range chunks() {
		step, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: "r1", Span: uint32(chunk)}}})
		if err != nil {
			t.Fatal(err)
		}
		p.fill("r1", step.GetPlans())
		res, err := p.Commit(p.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep(), Publish: []*kvferrypb.PublishRequest{
			{Request: "r1", Target: "decode", Final: i == 2}, {Request: "nobody"},
		}})
		if err != nil {
			t.Fatal(err)
		}
		if r := res.GetPublished(); len(r) != 2 || r[0].GetResponse().GetReference() == "" || r[1].GetFailure().GetCode() != kvferrypb.Failure_NOT_FOUND {
			t.Fatalf("%v", res)
		}
	}
	if _, err := d.retrieve("r1", "", 0, deadline); err != nil {
		t.Fatal(err)
	}
	if got := d.verify("r1", "main"); got != 36 {
		t.Errorf("%d tokens, want 36", got)
	}
}

// TestReleaseFreesTheOwner: a reference that will not be read costs no hold.
func TestReleaseFreesTheOwner(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	p.write("r1", 20)
	ref := p.publish("r1", true).GetReference()
	p.remove("r1")
	if _, err := d.Release(d.ctx(), &kvferrypb.ReleaseRequest{Reference: ref}); err != nil {
		t.Fatal(err)
	}
	awaitAllFree(t, prefill)
	if e := p.event(kvferrypb.Event_RELEASED); e.GetOutcome() != "released" || e.GetReference() != ref {
		t.Errorf("%v", e)
	}
	d.ingest("r1")
	if _, err := d.retrieve("r1", ref, 0, deadline); client.CodeOf(err) != kvferrypb.Failure_STALE || !strings.Contains(err.Error(), "has ended: all its readers have taken it") {
		t.Errorf("retrieve what was released: %v, want STALE", err)
	}
	if _, err := d.Release(d.ctx(), &kvferrypb.ReleaseRequest{Reference: ref}); err != nil {
		t.Errorf("release it again: %v", err)
	}
	d.remove("r1")
	awaitAllFree(t, decode)
}

// event waits for the next event of a kind.
func (e *engine) event(kind kvferrypb.Event_Kind) *kvferrypb.Event {
	e.t.Helper()
	timeout := time.After(deadline)
	for {
		select {
		case ev := <-e.events:
			if ev.GetKind() == kind {
				return ev
			}
		case <-timeout:
			e.t.Fatalf("waited %v for an event %v", deadline, kind)
			return nil
		}
	}
}

// TestOwnRequestIsGone: ready means that the bytes are there, on the owner, too.
func TestOwnRequestIsGone(t *testing.T) {
	n := startNode(t, "alone", nil)
	e := openEngine(t, n)
	for name, labels := range map[string][]string{"one label": {"main"}, "two labels": {"main", "cfg"}} {
		r := "r-" + name
		e.ingest(r, labels...)
		e.write(r, 20, labels...)
		ref := e.publish(r, true).GetReference()
		for _, by := range []string{ref, ""} {
			if res, err := e.retrieve(r, by, 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY || len(res.GetLengths()) != len(labels) {
				t.Errorf("%s by %q: %v, %v, want READY", name, by, res, err)
			}
		}
		e.remove(r)
		e.ingest(r, labels...)
		for _, by := range []string{ref, ""} {
			res, err := e.retrieve(r, by, 0, deadline)
			if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_NOT_FOUND || !strings.Contains(f.GetMessage(), "published by this node") || f.GetRemedy() == "" {
				t.Errorf("%s by %q when the request is gone: %v, %v, want NOT_FOUND", name, by, res, f)
			}
		}
		// What it computes and publishes anew is its own again.
		e.write(r, 12, labels...)
		ref2 := e.publish(r, true).GetReference()
		if res, err := e.retrieve(r, ref2, 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
			t.Errorf("%s anew: %v, %v, want READY", name, res, err)
		}
		if res, err := e.retrieve(r, ref, 0, 0); client.CodeOf(err) != kvferrypb.Failure_NOT_FOUND {
			t.Errorf("%s, the former one: %v, %v, want NOT_FOUND", name, res, err)
		}
	}
}

// TestHoldExpires: an unread publication gives its pages back, and says why.
func TestHoldExpires(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	p.write("r1", 20)
	ref := p.publish("r1", true, func(r *kvferrypb.PublishRequest) { r.Hold = durationpb.New(50 * time.Millisecond) }).GetReference()
	if e := p.event(kvferrypb.Event_RELEASED); e.GetOutcome() != "expired" {
		t.Errorf("%v", e)
	}
	p.remove("r1")
	awaitAllFree(t, prefill)
	d.ingest("r1")
	if _, err := d.retrieve("r1", ref, 0, deadline); client.CodeOf(err) != kvferrypb.Failure_EXPIRED {
		t.Errorf("retrieve what has expired: %v, want EXPIRED", err)
	}
}

func TestRevoke(t *testing.T) {
	for name, revoke := range map[string]func(p *engine, n *member, publication uint64) error{
		"by an operator": func(p *engine, n *member, publication uint64) error {
			_, err := n.admin.Revoke(p.ctx(), &kvferrypb.RevokeRequest{Publication: publication})
			return err
		},
		"by discarding": func(p *engine, _ *member, _ uint64) error {
			_, err := p.Remove(p.ctx(), &kvferrypb.RemoveRequest{Request: "r1", Discard: true})
			return err
		},
		"by reset": func(p *engine, _ *member, _ uint64) error {
			_, err := p.Reset(p.ctx(), &kvferrypb.ResetRequest{Request: "r1", Free: true})
			return err
		},
		"by the end of the session": func(p *engine, _ *member, _ uint64) error { return p.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := startPair(t)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1")
			p.write("r1", 20)
			pub := p.publish("r1", false, to("decode"))
			if _, err := d.retrieve("r1", pub.GetReference(), 20, deadline); err != nil {
				t.Fatal(err)
			}
			waits := make(chan error, 1)
			go func() {
				_, err := d.retrieve("r1", pub.GetReference(), 0, deadline)
				waits <- err
			}()
			awaitRetrieval(t, decode, "waiting")
			if err := revoke(p, prefill, pub.GetPublication()); err != nil {
				t.Fatal(err)
			}
			if err := <-waits; client.CodeOf(err) != kvferrypb.Failure_REVOKED {
				t.Errorf("retrieve that waited: %v, want REVOKED", err)
			}
			d.remove("r1")
			p.remove2("r1")
			awaitAllFree(t, prefill)
			awaitAllFree(t, decode)
		})
	}
}

// remove2 removes a request of a session that may have ended.
func (e *engine) remove2(r string) {
	if _, err := e.Remove(e.ctx(), &kvferrypb.RemoveRequest{Request: r}); err != nil && client.CodeOf(err) != kvferrypb.Failure_NO_SESSION {
		e.t.Error(err)
	}
}

// awaitRetrieval waits until the one retrieval of a node is in a state.
func awaitRetrieval(t testing.TB, n *member, state string) {
	t.Helper()
	admin := n.admin
	await(t, "a retrieval to be "+state, func(ctx context.Context) error {
		res, err := admin.Retrievals(ctx, &kvferrypb.RetrievalsRequest{})
		if err != nil {
			return err
		}
		if len(res.GetItems()) != 1 || res.GetItems()[0].GetState() != state {
			return fmt.Errorf("%v", res.GetItems())
		}
		return nil
	})
}

// TestRemoveEndsWhoWaits: nobody waits for a request that is gone.
func TestRemoveEndsWhoWaits(t *testing.T) {
	_, decode := startPair(t)
	for name, end := range map[string]func(d *engine) error{
		"cancel": func(d *engine) error {
			_, err := d.Cancel(d.ctx(), &kvferrypb.CancelRequest{Request: "r1"})
			return err
		},
		"remove": func(d *engine) error {
			_, err := d.Remove(d.ctx(), &kvferrypb.RemoveRequest{Request: "r1"})
			return err
		},
		"reset": func(d *engine) error {
			_, err := d.Reset(d.ctx(), &kvferrypb.ResetRequest{Request: "r1"})
			return err
		},
		"close": func(d *engine) error { return d.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			d := openEngine(t, decode)
			d.ingest("r1")
			waits := make(chan error, 1)
			go func() {
				_, err := d.retrieve("r1", "", 0, deadline)
				waits <- err
			}()
			await(t, "it to have come", func(context.Context) error {
				if decode.Calls() == 0 {
					return errors.New("nobody waits")
				}
				return nil
			})
			if err := end(d); err != nil {
				t.Fatal(err)
			}
			select {
			case err := <-waits:
				want := kvferrypb.Failure_CANCELLED
				if name == "close" {
					want = kvferrypb.Failure_NO_SESSION
				}
				late := name == "remove" && client.CodeOf(err) == kvferrypb.Failure_NOT_FOUND // it has looked after that
				if client.CodeOf(err) != want && !late {
					t.Errorf("retrieve that waited: %v, want %v", err, want)
				}
			case <-time.After(deadline / 2): // the half of its own
				t.Error("it still waits")
			}
			d.remove2("r1")
		})
	}
}

func TestCloseTwice(t *testing.T) {
	n := startNode(t, "alone", nil)
	if err := errors.Join(n.Close(t.Context()), n.Close(t.Context())); err != nil {
		t.Error(err)
	}
	if n.Err() != nil {
		t.Error(n.Err())
	}
}
