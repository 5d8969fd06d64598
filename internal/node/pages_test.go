package node_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/page"
)

func grant(r string, pages ...uint32) *kvferrypb.Grant {
	return &kvferrypb.Grant{Request: r, Pages: pages}
}

// startChoosing starts a node whose engine brings the memory and chooses the pages.
func startChoosing(t testing.TB, name string, seed *member) (*member, *engine) {
	t.Helper()
	c := configure(t, name, seed, byEngine, [2]string{"arena.allocate", "engine"})
	l := newLender(t, c)
	n, _ := l.start(t, c)
	return n, openEngineAt(t, c.Node.Socket, l.arenas)
}

// writeInto is a step of one segment whose pages are given with it. It returns
// the pages of the whole stream.
func (e *engine) writeInto(r string, tokens int, pages ...uint32) []uint32 {
	e.t.Helper()
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{
		Segments: []*kvferrypb.Segment{segment(r, "", tokens)}, Grants: []*kvferrypb.Grant{grant(r, pages...)}, Plan: true,
	})
	if err != nil {
		e.t.Fatal(err)
	}
	e.fill(r, step.GetPlans())
	if _, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
		e.t.Fatal(err)
	}
	return numbers(step.GetPlans()[0].GetPagedKvIndices())
}

func numbers(list []int32) []uint32 {
	out := make([]uint32, len(list))
	for i, p := range list {
		out[i] = uint32(p)
	}
	return out
}

// returned are the next so many pages that events give back.
func (e *engine) returned(pages int) (got []uint32) {
	e.t.Helper()
	for len(got) < pages {
		got = append(got, e.event(kvferrypb.Event_PAGES).GetPages()...)
	}
	slices.Sort(got)
	return got
}

// TestEngineChoosesPages: the tokens lie in the pages that the engine has given,
// in that order, on both sides; each page is told once when it is the engine's
// again, and one that is published not before its word was changed.
func TestEngineChoosesPages(t *testing.T) {
	prefill, p := startChoosing(t, "prefill", nil)
	decode, d := startChoosing(t, "decode", prefill)
	awaitPeers(t, prefill, decode)
	all := []page.Run{{First: 1, Count: 63}}
	if got := p.Pages(); !slices.Equal(got, all) {
		t.Errorf("the engine has %v", got)
	}
	p.ingest("r")
	d.ingest("r")
	if got, want := p.writeInto("r", 20, 40, 7, 22), []uint32{40, 7, 22}; !slices.Equal(got, want) {
		t.Errorf("the tokens lie in %v, want %v", got, want)
	}
	two := func(r *kvferrypb.PublishRequest) { r.Target, r.Readers = "decode", 2 }
	ref := p.publish("r", false, two).GetReference()

	// Too few, told at once, also to who would wait.
	short, err := d.retrieve("r", ref, 20, deadline)
	if code := client.CodeOf(err); code != kvferrypb.Failure_RESOURCE_EXHAUSTED {
		t.Fatalf("%v, %v", short, err)
	}
	if e, ok := errors.AsType[*client.Error](err); !ok || e.Failure.GetPagesShort() != 3 {
		t.Errorf("%v does not say that 3 pages are short", err)
	}
	res, err := d.AdmitRetrieve(d.ctx(), &kvferrypb.AdmitRetrieveRequest{
		Request: "r", Reference: ref, MinTokens: 20, Wait: durationpb.New(deadline), Grants: []*kvferrypb.Grant{grant("r", 3, 60, 9, 11, 10)},
	})
	if err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	d.verify("r", "main")
	p.writeInto("r", 17, 1, 63)
	p.publish("r", true, two)
	if res, err := d.retrieve("r", ref, 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	if got := d.verify("r", "main"); got != 37 {
		t.Errorf("%d tokens have landed", got)
	}
	if got, want := numbers(d.pages("r")), []uint32{3, 60, 9, 11, 10}; !slices.Equal(got, want) {
		t.Errorf("they lie in %v, want %v", got, want)
	}
	d.remove("r")
	if got, want := d.returned(5), []uint32{3, 9, 10, 11, 60}; !slices.Equal(got, want) {
		t.Errorf("Remove gives %v back, want %v", got, want)
	}

	// The other reader has not come: the pages are published still.
	if _, err := p.Give(p.ctx(), &kvferrypb.GiveRequest{Grants: []*kvferrypb.Grant{grant("r", 50)}}); err != nil {
		t.Fatal(err)
	}
	p.remove("r")
	if got := p.returned(1); !slices.Equal(got, []uint32{50}) {
		t.Errorf("Remove gives %v back, want what was not used", got)
	}
	p.ingest("next")
	for name, g := range map[string][]*kvferrypb.Grant{
		"published": {grant("next", 2, 40)}, "the sink": {grant("next", 2, 0)}, "out of range": {grant("next", 2, 64)},
		"twice": {grant("next", 2), grant("next", 2)}, "of nobody": {grant("next", 2), grant("r", 5)},
	} {
		_, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Grants: g, Segments: []*kvferrypb.Segment{segment("next", "", 1)}})
		if code := client.CodeOf(err); code != kvferrypb.Failure_PAGES {
			t.Errorf("%s: %v", name, err)
		}
	}
	if c := counts(t, prefill); c.GetEngine() != 58 || c.GetLimbo() != 5 || c.GetFree() != 0 {
		t.Errorf("%v", c)
	}
	if _, err := prefill.admin.Revoke(t.Context(), &kvferrypb.RevokeRequest{Publication: publicationOf(t, prefill)}); err != nil {
		t.Fatal(err)
	}
	if got, want := p.returned(5), []uint32{1, 7, 22, 40, 63}; !slices.Equal(got, want) {
		t.Errorf("the event gives %v back, want %v", got, want)
	}
	if got := p.writeInto("next", 9, 40, 2); !slices.Equal(got, []uint32{40, 2}) {
		t.Errorf("the tokens lie in %v", got)
	}
	p.remove("next")
	if got := p.returned(2); !slices.Equal(got, []uint32{2, 40}) {
		t.Errorf("Remove gives %v back", got)
	}

	// There is one engine. Who has lost count opens anew.
	if s, err := dial(t, prefill).Open(t.Context(), client.OpenOptions{Engine: "another"}); client.CodeOf(err) != kvferrypb.Failure_RESOURCE_EXHAUSTED {
		t.Errorf("a second session: %v, %v", s, err)
	}
	p.ingest("left")
	p.writeInto("left", 9, 5, 6)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	s, err := dial(t, prefill).Open(t.Context(), client.OpenOptions{Engine: "again"})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if got := s.Pages(); !slices.Equal(got, all) {
		t.Errorf("the engine has %v", got)
	}
}

// TestPagesOfACallThatWasGivenUp: whoever gave up waiting for Remove hears of its
// pages all the same.
func TestPagesOfACallThatWasGivenUp(t *testing.T) {
	_, p := startChoosing(t, "prefill", nil)
	for round := range 100 {
		r := fmt.Sprintf("r%d", round)
		p.ingest(r)
		if _, err := p.Give(p.ctx(), &kvferrypb.GiveRequest{Grants: []*kvferrypb.Grant{grant(r, 5, 6, 7)}}); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(100+rand.IntN(600))*time.Microsecond)
		_, err := p.Remove(ctx, &kvferrypb.RemoveRequest{Request: r})
		cancel()
		if err != nil {
			p.remove(r)
		}
		if got := p.returned(3); !slices.Equal(got, []uint32{5, 6, 7}) {
			t.Fatalf("round %d: %v came back", round, got)
		}
	}
}

// toldPages are those that an engine knows to be its own, and how often it was
// told of each.
type toldPages struct {
	mu   sync.Mutex
	told map[uint32]int
}

func (o *toldPages) add(pages ...uint32) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.told == nil {
		o.told = make(map[uint32]int)
	}
	for _, p := range pages {
		o.told[p]++
	}
}

// check is nil when each page of an arena of 64 has been told once.
func (o *toldPages) check() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	for p, n := range o.told {
		if n != 1 {
			return fmt.Errorf("page %d was told %d times", p, n)
		}
	}
	if len(o.told) != 63 {
		return fmt.Errorf("%d pages of 63 were told", len(o.told))
	}
	return nil
}

// TestPagesOfASessionThatEnds: a session that is opened while calls of the one
// before it let pages go hears of each page once.
func TestPagesOfASessionThatEnds(t *testing.T) {
	prefill, p := startChoosing(t, "prefill", nil)
	old := p.Session
	for round := range 10 {
		var grants []*kvferrypb.Grant
		for i := range uint32(30) {
			r := fmt.Sprintf("r%d-%d", round, i)
			if _, err := old.Ingest(p.ctx(), &kvferrypb.IngestRequest{Request: r}); err != nil {
				t.Fatal(err)
			}
			grants = append(grants, grant(r, 1+2*i, 2+2*i))
		}
		if _, err := old.Give(p.ctx(), &kvferrypb.GiveRequest{Grants: grants}); err != nil {
			t.Fatal(err)
		}
		var calls sync.WaitGroup
		for _, g := range grants {
			calls.Go(func() { _, _ = old.Remove(p.ctx(), &kvferrypb.RemoveRequest{Request: g.GetRequest()}) })
		}
		calls.Go(func() { _ = old.Close() }) // among them
		var own toldPages
		next := opened(t, prefill, client.OpenOptions{OnEvent: func(ev *kvferrypb.Event) { own.add(ev.GetPages()...) }})
		for _, r := range next.Pages() {
			for i := range r.Count {
				own.add(uint32(r.First) + i)
			}
		}
		calls.Wait()
		await(t, "the new session to know all pages", func(context.Context) error { return own.check() })
		old = next
	}
}

// opened opens a session as soon as the node takes one.
func opened(t *testing.T, n *member, o client.OpenOptions) (s *client.Session) {
	t.Helper()
	c := dial(t, n)
	await(t, "the node to take a session", func(ctx context.Context) (err error) {
		s, err = c.Open(ctx, o)
		return err
	})
	t.Cleanup(func() { s.Close() })
	return s
}

// TestOpenThatNobodyHears: an Open whose answer was lost keeps no other one out,
// though there is one engine.
func TestOpenThatNobodyHears(t *testing.T) {
	n, p := startChoosing(t, "prefill", nil)
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix:"+n.Addresses().Engine, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for name, open := range map[string]func(ctx context.Context) error{
		"given up": func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Duration(100+rand.IntN(2000))*time.Microsecond)
			defer cancel()
			s, err := dial(t, n).Open(ctx, client.OpenOptions{})
			if err != nil {
				return nil // as it should be
			}
			return s.Close()
		},
		"without a stream": func(ctx context.Context) error {
			_, err := kvferrypb.NewEngineClient(conn).Open(ctx, &kvferrypb.OpenRequest{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				if err := open(t.Context()); err != nil {
					t.Fatal(err)
				}
				s, err := dial(t, n).Open(t.Context(), client.OpenOptions{})
				if err != nil {
					t.Fatal(err)
				}
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// publicationOf is the sequence of the only live publication of a node.
func publicationOf(t testing.TB, n *member) uint64 {
	t.Helper()
	res, err := n.admin.Publications(t.Context(), &kvferrypb.PublicationsRequest{})
	if err != nil || len(res.GetItems()) != 1 {
		t.Fatalf("%v, %v", res, err)
	}
	return res.GetItems()[0].GetPublication()
}
