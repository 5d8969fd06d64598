package node_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// oneAtATime lets one slice be read at once; small cuts what is large.
func oneAtATime() [2]string { return [2]string{"transfer.limits.in_flight", "1"} }

func small() [][2]string {
	return [][2]string{{"arena.pages", "512"}, {"transfer.limits.slice", "64KiB"}}
}

// large is a request that takes so many slices of 64 KiB; a token is 128 bytes.
const (
	sliceTokens = 512
	slices5     = 4*sliceTokens + 100
)

// offer publishes a request as final, and has it ingested by the reader.
func offer(t testing.TB, r string, tokens int, p, d *engine) {
	t.Helper()
	p.ingest(r)
	d.ingest(r)
	p.write(r, tokens)
	p.publish(r, true, to("decode"))
}

// begin asks for a request and does not wait for it.
func (e *engine) begin(r string, prefetch bool, minTokens int) {
	e.t.Helper()
	await(e.t, r+" to begin", func(context.Context) error {
		res, err := e.AdmitRetrieve(e.ctx(), &kvferrypb.AdmitRetrieveRequest{Request: r, Prefetch: prefetch, MinTokens: uint32(minTokens)})
		if err != nil {
			e.t.Fatal(err)
		}
		if res.GetReadiness() != kvferrypb.Readiness_READING {
			return fmt.Errorf("%v", res)
		}
		return nil
	})
}

// states are the states of a node's retrievals, by request.
func states(t testing.TB, n *member) map[string]string {
	t.Helper()
	res, err := n.admin.Retrievals(t.Context(), &kvferrypb.RetrievalsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]string)
	for _, i := range res.GetItems() {
		all[i.GetRequest()] = i.GetState()
		if reads := i.GetState() == "reading"; reads && (i.GetAttempt() != 1 || i.GetTransport() == "") || i.GetState() == "waiting" && i.GetAttempt() != 0 {
			t.Errorf("%v: want the first attempt of a read, and by what; of one that waits neither", i)
		}
	}
	return all
}

// awaitQueue waits until so many slices wait.
func awaitQueue(t testing.TB, n *member, urgent, other float64) {
	t.Helper()
	await(t, fmt.Sprintf("%v urgent and %v other slices to wait", urgent, other), func(context.Context) error {
		_, _, samples := scrape(t, n)
		u, o := samples[`kvferry_read_slices{state="urgent"}`].value, samples[`kvferry_read_slices{state="other"}`].value
		if u != urgent || o != other {
			return fmt.Errorf("%v urgent, %v other", u, o)
		}
		return nil
	})
}

// TestUrgentOvertakesPrefetch: what somebody waits for is read before what nobody
// waits for yet, and that too once somebody does.
func TestUrgentOvertakesPrefetch(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap, oneAtATime())
	p, d := openEngine(t, prefill), openEngine(t, decode)
	requests := []string{"first", "prefetched", "wanted later", "urgent", "grows"}
	for _, r := range requests[:4] {
		offer(t, r, 8, p, d)
	}
	p.ingest("grows")
	d.ingest("grows")
	p.write("grows", 16)
	p.publish("grows", false, to("decode"))

	d.begin("first", true, 0)
	<-g.came
	d.begin("prefetched", true, 0)
	d.begin("wanted later", true, 0)
	d.begin("grows", false, 0) // it can make nobody ready
	awaitQueue(t, decode, 0, 3)
	d.begin("urgent", false, 0)
	awaitQueue(t, decode, 1, 3)
	d.begin("wanted later", true, 0) // still nobody waits
	awaitQueue(t, decode, 1, 3)
	d.begin("wanted later", false, 0)
	d.begin("grows", true, 10) // enough, and nobody waits
	awaitQueue(t, decode, 2, 2)
	d.begin("grows", false, 10)
	awaitQueue(t, decode, 3, 1)
	if s := states(t, decode); s["first"] != "reading" || s["urgent"] != "queued" || s["prefetched"] != "queued" {
		t.Errorf("%v", s)
	}
	if _, _, samples := scrape(t, decode); samples[`kvferry_read_slice_bytes{state="reading"}`].value != 1024 || samples[`kvferry_read_slice_bytes{state="urgent"}`].value != 4096 ||
		samples[`kvferry_oldest_seconds{kind="slice"}`].value <= 0 {
		t.Errorf("%v", samples)
	}
	passed := map[string]bool{"first": true} // may not have been told yet
	for _, want := range []string{"urgent", "wanted later", "grows", "prefetched"} {
		g.pass <- struct{}{}
		<-g.came
		for r, state := range states(t, decode) {
			if (r == want) != (state == "reading") && state != "waiting" && !passed[r] {
				t.Errorf("%s is %s, while it is the turn of %s", r, state, want)
			}
		}
		passed[want] = true
	}
	close(g.pass)
	for _, r := range requests[:4] {
		d.awaitReady(r, "", 0)
		if got := d.verify(r, "main"); got != 8 {
			t.Errorf("%s has %d tokens, want 8", r, got)
		}
	}
}

// TestLargeIsReadInSlices: so something urgent waits for one of them and not for
// all, one is under way at a time, and nothing is missing in the end.
func TestLargeIsReadInSlices(t *testing.T) {
	overAll(t, func(t *testing.T, by [2]string) {
		t.Helper()
		s := &sizes{}
		prefill, decode := startGated(t, s.wrap, append(small(), by)...)
		p, d := openEngine(t, prefill), openEngine(t, decode)
		offer(t, "large", slices5, p, d)
		if res, err := d.retrieve("large", "", 0, deadline); err != nil || res.GetBytes() != slices5*128 {
			t.Fatalf("%v, %v, want %d bytes", res, err, slices5*128)
		}
		if got := d.verify("large", "main"); got != slices5 {
			t.Errorf("%d tokens, want %d", got, slices5)
		}
		if read, most := s.seen(); len(read) != 5 || most > 1 {
			t.Errorf("read in %v, %d at once, want 5 of at most 64 KiB, one at a time", read, most)
		}
	})
	t.Run("behind an urgent one", func(t *testing.T) {
		t.Parallel()
		g := newGate()
		s := &sizes{}
		prefill, decode := startGated(t, func(tr transfer.Transport) transfer.Transport { return g.wrap(s.wrap(tr)) }, append(small(), oneAtATime(), overTCP)...)
		p, d := openEngine(t, prefill), openEngine(t, decode)
		offer(t, "large", slices5, p, d)
		offer(t, "urgent", 8, p, d)
		d.begin("large", true, 0)
		<-g.came
		d.begin("urgent", false, 0)
		awaitQueue(t, decode, 1, 0)
		close(g.pass)
		d.awaitReady("urgent", "", 0)
		d.awaitReady("large", "", 0)
		if read, _ := s.seen(); len(read) != 6 || read[1] != 8*128 {
			t.Errorf("read in %v, want the urgent one second", read)
		}
		if got := d.verify("large", "main"); got != slices5 {
			t.Errorf("%d tokens, want %d", got, slices5)
		}
	})
}

// sizes notes what is read.
type sizes struct {
	mu          sync.Mutex
	read        []int64
	under, most int
}

func (s *sizes) seen() (read []int64, most int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.read, s.most
}

func (s *sizes) wrap(t transfer.Transport) transfer.Transport { return &sizing{t, s} }

type sizing struct {
	transfer.Transport
	sizes *sizes
}

func (t *sizing) Open(ctx context.Context, p transfer.Peer) (transfer.Link, error) {
	l, err := t.Transport.Open(ctx, p)
	if err != nil {
		return nil, err
	}
	return &sizingLink{l, t.sizes}, nil
}

type sizingLink struct {
	transfer.Link
	sizes *sizes
}

func (l *sizingLink) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	s := l.sizes
	s.mu.Lock()
	s.read = append(s.read, transfer.Bytes(copies))
	s.under++
	s.most = max(s.most, s.under)
	s.mu.Unlock()
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.under--
	}()
	return l.Link.Read(ctx, seals, copies)
}

// TestFullQueueRefuses: what finds no room is told so at once, and what to set;
// what has begun goes on.
func TestFullQueueRefuses(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap, append(small(), oneAtATime(), [2]string{"transfer.limits.waiting", "1"})...)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	offer(t, "large", slices5, p, d)
	offer(t, "waits", 8, p, d)
	offer(t, "refused", 8, p, d)
	large := d.retrieving("large", "", 0)
	<-g.came
	waits := d.retrieving("waits", "", 0)
	awaitQueue(t, decode, 1, 0)
	begin := time.Now()
	_, err := d.retrieve("refused", "", 0, deadline)
	f := failureOf(t, err)
	if f.GetCode() != kvferrypb.Failure_RESOURCE_EXHAUSTED || !strings.Contains(f.GetMessage()+f.GetRemedy(), "transfer.limits.waiting") || f.GetPeer() != "prefill" {
		t.Errorf("%v, want RESOURCE_EXHAUSTED and what to set", f)
	}
	if took := time.Since(begin); took > deadline/4 {
		t.Errorf("it was told after %v", took)
	}
	close(g.pass)
	if got := <-large; got.err != nil {
		t.Errorf("what had begun: %v", got.err)
	}
	if got := <-waits; got.err != nil {
		t.Errorf("what had found room: %v", got.err)
	}
	if got := d.verify("large", "main"); got != slices5 {
		t.Errorf("%d tokens, want %d", got, slices5)
	}
	if _, err := d.retrieve("refused", "", 0, deadline); err != nil {
		t.Errorf("with room again: %v", err)
	}
	for _, r := range []string{"large", "waits", "refused"} {
		p.remove(r)
		d.remove(r)
	}
	awaitAllFree(t, prefill)
	awaitAllFree(t, decode)
}

// TestCancelInTheQueue: who waits for its turn can be cancelled at once, waits no
// longer than its caller says, and leaves nothing in the queue.
func TestCancelInTheQueue(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap, append(small(), oneAtATime(), [2]string{"timers.stall", "500ms"}, [2]string{"timers.attempts", "9"})...)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	offer(t, "first", 8, p, d)
	offer(t, "large", slices5, p, d)
	first := d.retrieving("first", "", 0)
	<-g.came
	d.begin("large", false, 0)
	awaitQueue(t, decode, 1, 0)
	res, err := d.AdmitRetrieve(d.ctx(), &kvferrypb.AdmitRetrieveRequest{Request: "large", Wait: durationpb.New(time.Second)})
	if client.CodeOf(err) != kvferrypb.Failure_DEADLINE { // twice the stall time
		t.Errorf("%v, %v, want DEADLINE", res, err)
	}
	if s := states(t, decode); s["large"] != "queued" {
		t.Errorf("%v, want that it still waits for its turn", s)
	}
	awaitQueue(t, decode, 1, 0)
	begin := time.Now()
	if _, err := d.Cancel(d.ctx(), &kvferrypb.CancelRequest{Request: "large"}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > deadline/4 {
		t.Errorf("cancelled after %v", took)
	}
	awaitQueue(t, decode, 0, 0)
	if c := counts(t, decode); c.GetQuarantine() != 0 {
		t.Errorf("%v, want nothing in quarantine: nothing was read", c)
	}
	close(g.pass)
	if got := <-first; got.err != nil {
		t.Error(got.err)
	}
	if _, err := d.retrieve("large", "", 0, deadline); err != nil {
		t.Errorf("again: %v", err)
	}
}

// TestCancelBetweenSlices: nothing of a large read lands once Cancel has returned,
// whichever of its slices were under way.
func TestCancelBetweenSlices(t *testing.T) {
	for name, fault := range map[string]transfertest.Fault{
		"while they are read": {Delay: time.Hour},
		"bytes land late":     {Late: 20 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			overAll(t, func(t *testing.T, by [2]string) {
				t.Helper()
				prefill, decode := startGated(t, faulty(func(read int) transfertest.Fault {
					if read == 2 {
						return fault
					}
					return transfertest.Fault{}
				}), append(small(), by, [2]string{"timers.attempts", "1"}, [2]string{"timers.stall", "20s"})...)
				p, d := openEngine(t, prefill), openEngine(t, decode)
				offer(t, "large", slices5, p, d)
				d.begin("large", false, 0)
				await(t, "two slices to have landed", func(context.Context) error {
					if v := metric(t, decode, fmt.Sprintf("kvferry_reads_total{result=%q,transport=%q}", "held", by[1])); v < 2 {
						return fmt.Errorf("%v", v)
					}
					return nil
				})
				if _, err := d.Cancel(d.ctx(), &kvferrypb.CancelRequest{Request: "large"}); err != nil {
					t.Fatal(err)
				}
				if _, err := d.Reset(d.ctx(), &kvferrypb.ResetRequest{Request: "large", Free: true}); err != nil {
					t.Fatal(err)
				}
				d.write("large", 511*8) // all pages, at once
				if got := d.verify("large", "main"); got != 511*8 {
					t.Errorf("%d tokens, want %d", got, 511*8)
				}
				d.remove("large")
				awaitAllFree(t, decode)
			})
		})
	}
}
