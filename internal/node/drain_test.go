package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
)

// long is a drain that no test waits for.
var long = [2]string{"timers.drain", "1h"}

// drains begins a drain by the admin call.
func drains(t testing.TB, n *member, timeout time.Duration) grpc.ServerStreamingClient[kvferrypb.DrainResponse] {
	t.Helper()
	stream, err := n.admin.Drain(t.Context(), &kvferrypb.DrainRequest{Timeout: durationpb.New(timeout)})
	if err != nil {
		t.Fatal(err)
	}
	if first, err := stream.Recv(); err != nil {
		t.Fatalf("%v, %v", first, err)
	}
	return stream
}

// left is how a drain ends, and what was cut by it.
func left(t testing.TB, n *member, stream grpc.ServerStreamingClient[kvferrypb.DrainResponse]) (cut *kvferrypb.DrainResponse_Cut) {
	t.Helper()
	for {
		m, err := stream.Recv()
		if err != nil {
			t.Fatalf("a drain that has not left: %v", err)
		}
		if m.GetLeft() {
			cut = m.GetCut()
			break
		}
	}
	gone(t, n)
	return cut
}

// gone waits until a node has ended by its own will, and closes it as its agent
// would.
func gone(t testing.TB, n *member) {
	t.Helper()
	select {
	case <-n.Done():
	case <-time.After(deadline):
		t.Fatalf("%s goes on", n.Life())
	}
	if err := n.Err(); err != nil {
		t.Errorf("%s ends with %v, want nothing", n.Life(), err)
	}
	n.close()
}

// readyz is what it answers.
func readyz(t testing.TB, n *member) (status int, body string) {
	t.Helper()
	res, err := http.Get("http://" + n.Addresses().HTTP.String() + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// TestDrain: a node that drains takes nothing new, whoever told it to; what runs
// goes on to its end, what is offered is read, and then it leaves by itself.
func TestDrain(t *testing.T) {
	for name, drain := range map[string]func(n *member) (end func()){
		"by the admin call": func(n *member) func() {
			stream := drains(n.t, n, 0)
			return func() {
				if cut := left(n.t, n, stream); cut == nil || cut.GetPublications()+cut.GetLeases()+cut.GetRetrievals() > 0 {
					n.t.Errorf("cut: %v, want nothing", cut)
				}
			}
		},
		"by a signal": func(n *member) func() {
			closed := make(chan error, 1)
			go func() { closed <- n.Close(context.Background()) }()
			return func() {
				if err := <-closed; err != nil {
					n.t.Error(err)
				}
				gone(n.t, n)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := newGate()
			prefill, decode := startGated(t, g.wrap, long)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			for _, r := range []string{"r1", "unread", "idle"} {
				p.ingest(r)
				d.ingest(r)
				p.write(r, 13)
			}
			unread := p.publish("unread", true)
			p.publish("r1", false, to("decode"))
			reads := d.retrieving("r1", "", 0)
			<-g.came
			end := drain(prefill)
			await(t, "prefill to drain", func(context.Context) error {
				if code, body := readyz(t, prefill); code != http.StatusServiceUnavailable || !strings.Contains(body, "draining") {
					return fmt.Errorf("%d %q", code, body)
				}
				return nil
			})
			if s, err := prefill.admin.Status(t.Context(), &kvferrypb.StatusRequest{}); err != nil || !s.GetDraining() || s.GetReady() {
				t.Errorf("status: %v, %v, want draining", s, err)
			}
			for what, call := range map[string]func() error{
				"a session":     func() error { _, err := p.client.Open(p.ctx(), client.OpenOptions{}); return err },
				"a request":     func() error { _, err := p.Ingest(p.ctx(), &kvferrypb.IngestRequest{Request: "new"}); return err },
				"a publication": func() error { _, err := p.Publish(p.ctx(), &kvferrypb.PublishRequest{Request: "idle"}); return err },
				"a retrieval": func() error {
					_, err := p.retrieve("idle", "", 0, deadline)
					return err
				},
				"a poll": func() error { _, err := p.retrieve("idle", "", 0, 0); return err },
			} {
				if err := call(); client.CodeOf(err) != kvferrypb.Failure_DRAINING {
					t.Errorf("%s that is new: %v, want DRAINING", what, err)
				}
			}
			// What has begun goes on.
			p.ingest("r1")
			p.write("r1", 3)
			p.publish("r1", false, to("decode"))
			p.write("r1", 20)
			p.publish("r1", true, to("decode"))
			close(g.pass)
			if got := <-reads; got.err != nil {
				t.Error(got.err)
			}
			// And what was offered before is leased and read now.
			lease := &kvferrypb.LeaseRequest{
				Incarnation: uint64(prefill.Life().Incarnation), Reader: &kvferrypb.Life{Node: "another", Incarnation: 1},
				Items: []*kvferrypb.LeaseItem{{Sequence: unread.GetPublication(), Attempt: 1}},
			}
			if res, err := callPeer(t, prefill).Lease(d.ctx(), lease); err != nil || res.GetResults()[0].GetRefused() != "" {
				t.Errorf("a lease on what was offered: %v, %v", res, err)
			}
			if _, err := callPeer(t, prefill).Complete(d.ctx(), &kvferrypb.CompleteRequest{
				Incarnation: lease.GetIncarnation(), Reader: lease.GetReader(),
				Items: []*kvferrypb.CompleteItem{{Sequence: unread.GetPublication(), Attempt: 1, Outcome: kvferrypb.CompleteItem_FAILED}},
			}); err != nil {
				t.Error(err)
			}
			if _, err := d.retrieve("unread", unread.GetReference(), 0, deadline); err != nil {
				t.Errorf("what was unread: %v", err)
			}
			for r, want := range map[string]int{"r1": 36, "unread": 13} {
				if got := d.verify(r, "main"); got != want {
					t.Errorf("%d tokens of %s, want %d", got, r, want)
				}
			}
			end()
			await(t, "decode to see it gone", func(ctx context.Context) error {
				res, err := decode.admin.Members(ctx, &kvferrypb.MembersRequest{})
				if err != nil || len(res.GetItems()) != 1 {
					return fmt.Errorf("%v, %w", res, err)
				}
				return nil
			})
		})
	}
}

// TestDrainOfReader: who drains brings in what it has begun to, and nothing else.
func TestDrainOfReader(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap, long)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	for _, r := range []string{"r1", "r2", "r3"} {
		p.ingest(r)
		d.ingest(r)
		p.write(r, 13)
	}
	p.publish("r1", false, to("decode"))
	reads, nothing := d.retrieving("r1", "", 0), d.retrieving("r2", "", 0)
	<-g.came
	stream := drains(t, decode, 0)
	if got := <-nothing; client.CodeOf(got.err) != kvferrypb.Failure_DRAINING {
		t.Errorf("a retrieve that waits for nothing: %v, want DRAINING", got.err)
	}
	p.publish("r3", true)
	if _, err := d.retrieve("r3", "", 0, deadline); client.CodeOf(err) != kvferrypb.Failure_DRAINING {
		t.Errorf("a retrieve of what is offered: %v, want DRAINING", err)
	}
	for i, chunk := range []int{3, 20} {
		p.write("r1", chunk)
		p.publish("r1", i == 1, to("decode"))
	}
	close(g.pass)
	if got := <-reads; got.err != nil {
		t.Error(got.err)
	}
	if got := d.verify("r1", "main"); got != 36 {
		t.Errorf("%d tokens, want 36", got)
	}
	left(t, decode, stream)
}

// TestDrainIsBounded: what does not end by itself is cut at the bound, and who
// reads it hears of it.
func TestDrainIsBounded(t *testing.T) {
	prefill, decode := startPair(t, long)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("open")
	d.ingest("open")
	p.write("open", 13)
	p.publish("open", false, to("decode"))
	waits := d.retrieving("open", "", 0)
	awaitLanded(d, "open", 13)
	const bound = time.Second // so that it is told of more than once
	start := time.Now()
	stream := drains(t, prefill, bound)
	told := 0
	for {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if m.GetLeft() {
			if m.GetCut().GetPublications() != 1 {
				t.Errorf("cut: %v, want 1 publication", m.GetCut())
			}
			break
		}
		if told++; m.GetPublications() != 1 && m.GetRemaining().AsDuration() > 0 || m.GetRemaining().AsDuration() > bound {
			t.Errorf("%v", m)
		}
	}
	if took := time.Since(start); took < bound || took > bound+deadline/2 || told == 0 {
		t.Errorf("it took %v, and told %d times, want %v", took, told, bound)
	}
	if got := <-waits; client.CodeOf(got.err) != kvferrypb.Failure_REVOKED {
		t.Errorf("its reader: %v, want REVOKED", got.err)
	}
	if e := p.event(kvferrypb.Event_RELEASED); e.GetOutcome() != "revoked" {
		t.Errorf("%v", e)
	}
	gone(t, prefill)
}

// TestLeave: who leaves cuts what runs, on both sides, with errors that say so.
func TestLeave(t *testing.T) {
	t.Run("the owner", func(t *testing.T) {
		t.Parallel()
		g := newGate()
		prefill, decode := startGated(t, g.wrap, long)
		p, d := openEngine(t, prefill), openEngine(t, decode)
		p.ingest("r1")
		d.ingest("r1")
		p.write("r1", 13)
		p.publish("r1", true, to("decode"))
		reads := d.retrieving("r1", "", 0)
		<-g.came
		leaves(t, prefill)
		close(g.pass)
		if got := <-reads; client.CodeOf(got.err) != kvferrypb.Failure_OWNER_LOST && client.CodeOf(got.err) != kvferrypb.Failure_REVOKED {
			t.Errorf("%v, %v, want OWNER_LOST or REVOKED", got.res, got.err)
		}
		d.remove("r1")
		awaitAllFree(t, decode)
	})
	t.Run("the reader", func(t *testing.T) {
		t.Parallel()
		g := newGate()
		prefill, decode := startGated(t, g.wrap, long)
		p, d := openEngine(t, prefill), openEngine(t, decode)
		p.ingest("r1")
		d.ingest("r1")
		d.ingest("r2")
		p.write("r1", 13)
		p.publish("r1", true, to("decode"))
		reads, waits := d.retrieving("r1", "", 0), d.retrieving("r2", "", 0)
		<-g.came
		leaves(t, decode)
		for what, got := range map[string]result{"reading": <-reads, "waiting": <-waits} {
			if client.CodeOf(got.err) != kvferrypb.Failure_DRAINING {
				t.Errorf("%s: %v, %v, want DRAINING", what, got.res, got.err)
			}
		}
		// It has given its lease back.
		await(t, "the lease to end", func(ctx context.Context) error {
			res, err := prefill.admin.Publications(ctx, &kvferrypb.PublicationsRequest{})
			if err != nil || len(res.GetItems()) != 1 || res.GetItems()[0].GetLeases() != 0 {
				return fmt.Errorf("%v, %w", res, err)
			}
			return nil
		})
	})
}

func leaves(t testing.TB, n *member) {
	t.Helper()
	start := time.Now()
	if _, err := n.admin.Leave(t.Context(), &kvferrypb.LeaveRequest{}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(start); took > deadline/2 {
		t.Errorf("it took %v", took)
	}
	gone(t, n)
}

// TestDrainGoesOn: a drain is one, however often it is asked for. Who asked may
// go; a second one joins it, and never puts it off; who is in more of a hurry
// ends it.
func TestDrainGoesOn(t *testing.T) {
	for name, hurry := range map[string]func(n *member) error{
		"a shorter drain": func(n *member) error {
			_, err := n.admin.Drain(n.t.Context(), &kvferrypb.DrainRequest{Timeout: durationpb.New(50 * time.Millisecond)})
			return err
		},
		"leave": func(n *member) error { _, err := n.admin.Leave(n.t.Context(), &kvferrypb.LeaveRequest{}); return err },
		"a signal": func(n *member) error {
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			defer cancel()
			return n.Close(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, _ := startPair(t, long)
			p := openEngine(t, prefill)
			p.ingest("r1")
			p.write("r1", 13)
			p.publish("r1", true)
			ctx, cancel := context.WithCancel(t.Context())
			stream, err := prefill.admin.Drain(ctx, &kvferrypb.DrainRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			drains(t, prefill, 2*time.Hour) // which is not its bound
			second := drains(t, prefill, 0)
			for range 2 {
				m, err := second.Recv()
				if remaining := m.GetRemaining().AsDuration(); err != nil || m.GetLeft() || m.GetPublications() != 1 || remaining < 30*time.Minute || remaining > time.Hour {
					t.Fatalf("%v, %v, want that the first goes on", m, err)
				}
			}
			if err := hurry(prefill); err != nil {
				t.Error(err)
			}
			for {
				if m, err := second.Recv(); err != nil {
					t.Fatalf("who has joined hears %v", err)
				} else if m.GetLeft() {
					break
				}
			}
			gone(t, prefill)
		})
	}
	t.Run("a bad timeout", func(t *testing.T) {
		n := startNode(t, "alone", nil)
		stream, err := n.admin.Drain(t.Context(), &kvferrypb.DrainRequest{Timeout: durationpb.New(-1)})
		if err == nil {
			_, err = stream.Recv()
		}
		if client.CodeOf(err) != kvferrypb.Failure_INVALID {
			t.Errorf("%v, want INVALID", err)
		}
		if s, err := n.admin.Status(t.Context(), &kvferrypb.StatusRequest{}); err != nil || s.GetDraining() {
			t.Errorf("%v, %v", s, err)
		}
	})
}

// TestDrainWaitsForNobody: what nobody can read keeps nobody.
func TestDrainWaitsForNobody(t *testing.T) {
	n := startNode(t, "alone", nil, long)
	other := startNode(t, "other-kv", n, [2]string{"arena.layers", "3"})
	awaitPeers(t, n, other)
	e := openEngine(t, n)
	e.ingest("r1")
	e.write("r1", 13)
	e.publish("r1", true)
	start := time.Now()
	// What is lost by that is told.
	if cut := left(t, n, drains(t, n, time.Hour)); cut.GetPublications() != 1 {
		t.Errorf("cut: %v, want 1 publication", cut)
	}
	if err := errors.Join(n.Drain(t.Context(), time.Hour), n.Drain(t.Context(), time.Hour)); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took > deadline/2 {
		t.Errorf("it took %v", took)
	}
	gone(t, n)
}
