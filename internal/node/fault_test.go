package node_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/node"
	"github.com/kvferry/kvferry/transfer"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// gate is a transport whose reads wait until they are let through.
type gate struct {
	transfer.Transport
	came chan struct{} // a word for each read that waits
	pass chan struct{} // closed or fed: let it through
}

func newGate() *gate { return &gate{came: make(chan struct{}, 64), pass: make(chan struct{})} }

func (g *gate) wrap(t transfer.Transport) transfer.Transport {
	g.Transport = t
	return g
}

func (g *gate) Open(ctx context.Context, p transfer.Peer) (transfer.Link, error) {
	l, err := g.Transport.Open(ctx, p)
	return &gatedLink{l, g}, err
}

type gatedLink struct {
	transfer.Link
	gate *gate
}

func (l *gatedLink) Read(ctx context.Context, seals []transfer.Seal, copies []transfer.Copy) error {
	l.gate.came <- struct{}{}
	select {
	case <-l.gate.pass:
	case <-ctx.Done():
	}
	return l.Link.Read(ctx, seals, copies)
}

// faulty is a wrapper whose reads fail as planned. What is lost, or late, is so
// until somebody cancels it.
func faulty(plan func(read int) transfertest.Fault) func(transfer.Transport) transfer.Transport {
	return faultyWithin(time.Hour, plan)
}

// faultyWithin is faulty with a stall time.
func faultyWithin(stall time.Duration, plan func(read int) transfertest.Fault) func(transfer.Transport) transfer.Transport {
	return func(t transfer.Transport) transfer.Transport {
		return transfertest.NewFaulty(t, transfer.Limits{Stall: stall}, plan)
	}
}

// startGated runs a pair whose reader's reads wait at the gate.
func startGated(t testing.TB, wrap func(transfer.Transport) transfer.Transport, set ...[2]string) (prefill, decode *member) {
	t.Helper()
	prefill = startNode(t, "prefill", nil, set...)
	decode = startWith(t, configure(t, "decode", prefill, set...), wrap)
	awaitPeers(t, prefill, decode)
	return prefill, decode
}

type result struct {
	res *kvferrypb.AdmitRetrieveResponse
	err error
}

// retrieving waits for a request in the background.
func (e *engine) retrieving(r, reference string, minTokens int) chan result {
	done := make(chan result, 1)
	go func() {
		res, err := e.retrieve(r, reference, minTokens, deadline)
		done <- result{res, err}
	}()
	return done
}

// TestReusedPagesAreNeverReady: the pages of a publication get another owner
// between the announcement and the read. The reader must not take them.
func TestReusedPagesAreNeverReady(t *testing.T) { overAll(t, reusedPagesAreNeverReady) }

func reusedPagesAreNeverReady(t *testing.T, by [2]string) {
	t.Helper()
	g := newGate()
	prefill, decode := startGated(t, g.wrap, by)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	for i, chunk := range chunks() {
		p.write("r1", chunk)
		p.publish("r1", i == 2, to("decode"))
	}
	published := p.pages("r1")
	done := d.retrieving("r1", "", 0)
	<-g.came // the read knows where to read, and has not begun
	if _, err := p.Remove(p.ctx(), &kvferrypb.RemoveRequest{Request: "r1", Discard: true}); err != nil {
		t.Fatal(err)
	}
	p.ingest("r2")
	p.write("r2", 63*8) // all pages that there are
	reused := make(map[int32]bool)
	for _, x := range p.pages("r2") {
		reused[x] = true
	}
	for _, x := range published {
		if !reused[x] {
			t.Fatalf("page %d was not used again: the test shows nothing", x)
		}
	}
	close(g.pass)
	got := <-done
	if client.CodeOf(got.err) != kvferrypb.Failure_REVOKED {
		t.Errorf("retrieve = %v, %v, want REVOKED", got.res, got.err)
	}
	if n := d.verify("r1", "main"); n != 0 {
		t.Errorf("%d tokens are said to have landed", n)
	}
	if e := d.event(kvferrypb.Event_FAILED); e.GetFailure().GetCode() != kvferrypb.Failure_REVOKED || e.GetFailure().GetPeer() != "prefill" || e.GetFailure().GetPeerIncarnation() != uint64(prefill.Life().Incarnation) {
		t.Errorf("%v", e)
	}
	d.remove("r1")
	awaitAllFree(t, decode)
}

// pages are the pages of a request's stream main.
func (e *engine) pages(r string) []int32 {
	e.t.Helper()
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: r}}})
	if err != nil {
		e.t.Fatal(err)
	}
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		e.t.Fatal(err)
	}
	return step.GetPlans()[0].GetPagedKvIndices()
}

// TestCancelInAnyPhase: when Cancel has returned the request can be used at
// once, and nothing of the cancelled read lands in it.
func TestCancelInAnyPhase(t *testing.T) { overAll(t, cancelInAnyPhase) }

func cancelInAnyPhase(t *testing.T, by [2]string) {
	t.Helper()
	for name, fault := range map[string]transfertest.Fault{
		"while it reads":    {Delay: time.Hour},
		"half landed":       {Cancel: true},
		"bytes land late":   {Late: 20 * time.Millisecond},
		"lost on the way":   {Lose: true},
		"when it is landed": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var calm atomic.Bool
			prefill, decode := startGated(t, faulty(func(int) transfertest.Fault {
				if calm.Load() {
					return transfertest.Fault{}
				}
				return fault
			}), [2]string{"timers.attempts", "1"}, by)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1")
			for i, chunk := range chunks() {
				p.write("r1", chunk)
				p.publish("r1", i == 2, to("decode"), func(r *kvferrypb.PublishRequest) { r.Readers = 2 })
			}
			done := d.retrieving("r1", "", 0)
			switch name {
			case "when it is landed", "half landed": // it ends by itself
				got := <-done
				done <- got
			default:
				awaitRetrieval(t, decode, "reading")
			}
			if _, err := d.Cancel(d.ctx(), &kvferrypb.CancelRequest{Request: "r1"}); err != nil {
				t.Fatal(err)
			}
			if name != "when it is landed" {
				if got := <-done; client.CodeOf(got.err) != kvferrypb.Failure_CANCELLED {
					t.Errorf("retrieve = %v, %v, want CANCELLED", got.res, got.err)
				}
			}
			if _, err := d.Reset(d.ctx(), &kvferrypb.ResetRequest{Request: "r1", Free: true}); err != nil {
				t.Fatal(err)
			}
			d.write("r1", 63*8) // all pages, at once
			if got := d.verify("r1", "main"); got != 63*8 {
				t.Errorf("%d tokens, want %d", got, 63*8)
			}
			if _, err := d.Reset(d.ctx(), &kvferrypb.ResetRequest{Request: "r1", Free: true}); err != nil {
				t.Fatal(err)
			}
			calm.Store(true)
			if res, err := d.retrieve("r1", "", 0, deadline); err != nil {
				t.Fatalf("after all that: %v, %v", res, err)
			}
			if got := d.verify("r1", "main"); got != 36 {
				t.Errorf("%d tokens, want 36", got)
			}
			d.remove("r1")
			awaitAllFree(t, decode)
		})
	}
}

// TestReadIsTriedAgain: what may help is tried, what cannot is not.
func TestReadIsTriedAgain(t *testing.T) {
	prefill, decode := startGated(t, faulty(func(read int) transfertest.Fault {
		if read < 2 {
			return transfertest.Fault{Err: errors.New("a cable was pulled")}
		}
		return transfertest.Fault{Reorder: true}
	}), [2]string{"timers.backoff_min", "1ms"}, overTCP)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	carry(t, "r1", bring{chunks: chunks(), target: "decode"}, p, d)

	prefill, decode = startGated(t, faulty(func(int) transfertest.Fault { return transfertest.Fault{Err: errors.New("a cable was pulled")} }), [2]string{"timers.backoff_min", "1ms"}, overTCP)
	p, d = openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 20)
	ref := p.publish("r1", true).GetReference()
	_, err := d.retrieve("r1", ref, 0, deadline)
	e, ok := errors.AsType[*client.Error](err)
	if !ok || e.Failure.GetCode() != kvferrypb.Failure_TRANSPORT {
		t.Fatalf("%v, want TRANSPORT", err)
	}
	f := e.Failure
	if f.GetRequest() != "r1" || f.GetPeer() != "prefill" || f.GetPeerIncarnation() == 0 || f.GetTransport() != "tcp" || f.GetBytesTotal() == 0 || !strings.Contains(f.GetMessage(), "a cable was pulled") {
		t.Errorf("the failure does not say all: %v", f)
	}
	d.remove("r1")
	awaitAllFree(t, decode)
}

// callPeer calls a node as another node would.
func callPeer(t testing.TB, n *member) kvferrypb.PeerClient {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+n.Addresses().Peer.String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return kvferrypb.NewPeerClient(conn)
}

// TestVanishedReaderCostsOneLease: a reader that says nothing more, or whose
// acknowledgement is lost, keeps the owner's pages for one lease.
func TestVanishedReaderCostsOneLease(t *testing.T) {
	const lease = 300 * time.Millisecond
	prefill := startNode(t, "prefill", nil, [2]string{"timers.lease", lease.String()}, [2]string{"timers.lease_renew", "100ms"}, [2]string{"timers.hold", "50ms"})
	p, reader := openEngine(t, prefill), callPeer(t, prefill)
	p.ingest("r1")
	p.write("r1", 20)
	pub := p.publish("r1", false)
	ask := &kvferrypb.LeaseRequest{
		Incarnation: uint64(prefill.Life().Incarnation), Reader: &kvferrypb.Life{Node: "gone", Incarnation: 7},
		Items: []*kvferrypb.LeaseItem{{Sequence: pub.GetPublication(), Attempt: 1}},
	}
	last := time.Now() // before the last renewal
	if res, err := reader.Lease(p.ctx(), ask); err != nil || res.GetResults()[0].GetRefused() != "" {
		t.Fatalf("%v, %v", res, err)
	}
	p.publish("r1", true) // the hold begins
	for range 4 {
		before := time.Now()
		res, err := reader.Lease(p.ctx(), ask)
		if err != nil {
			t.Fatal(err)
		}
		if late := time.Since(last) >= lease; res.GetResults()[0].GetRefused() != "" && late {
			break // this machine has slept over it
		} else if res.GetResults()[0].GetRefused() != "" || res.GetResults()[0].GetMillis() == 0 && !late {
			t.Fatalf("%v", res)
		}
		last = before
		<-time.After(lease / 3)
	}
	p.remove("r1")
	if e := p.event(kvferrypb.Event_RELEASED); e.GetOutcome() != "expired" {
		t.Errorf("%v", e)
	}
	if took := time.Since(last); took < lease || took > lease+deadline/2 {
		t.Errorf("the pages came back %v after the last renewal, want %v", took, lease)
	}
	awaitAllFree(t, prefill)
	if res, err := reader.Lease(p.ctx(), ask); err != nil || res.GetResults()[0].GetRefused() != "expired" {
		t.Errorf("a lease after the end: %v, %v", res, err)
	}
	done, err := reader.Complete(p.ctx(), &kvferrypb.CompleteRequest{
		Incarnation: ask.GetIncarnation(), Reader: ask.GetReader(),
		Items: []*kvferrypb.CompleteItem{{Sequence: pub.GetPublication(), Attempt: 1, Outcome: kvferrypb.CompleteItem_LANDED}},
	})
	if err != nil || done.GetResults()[0] != "late" {
		t.Errorf("a late acknowledgement: %v, %v", done, err)
	}
}

// TestMaxHold: renewals do not pin pages for ever.
func TestMaxHold(t *testing.T) {
	const most = "400ms" // and each lease alone would last as long
	prefill := startNode(t, "prefill", nil, [2]string{"timers.max_hold", most}, [2]string{"timers.hold", most},
		[2]string{"timers.lease", most}, [2]string{"timers.lease_renew", "50ms"})
	p, reader := openEngine(t, prefill), callPeer(t, prefill)
	p.ingest("r1")
	p.write("r1", 20)
	start := time.Now()
	pub := p.publish("r1", true)
	p.remove("r1")
	refused := ""
	for refused == "" && time.Since(start) < deadline {
		res, err := reader.Lease(p.ctx(), &kvferrypb.LeaseRequest{
			Incarnation: uint64(prefill.Life().Incarnation), Reader: &kvferrypb.Life{Node: "greedy", Incarnation: 7},
			Items: []*kvferrypb.LeaseItem{{Sequence: pub.GetPublication(), Attempt: 1}},
		})
		if err != nil {
			t.Fatal(err)
		}
		refused = res.GetResults()[0].GetRefused()
	}
	if took := time.Since(start); refused != "expired" || took < 400*time.Millisecond || took > deadline/2 {
		t.Errorf("refused %q after %v, want expired after 400ms", refused, took)
	}
	awaitAllFree(t, prefill)
}

// TestOwnerLost: whoever reads from a node that goes is told, with its name and
// life; all others go on.
func TestOwnerLost(t *testing.T) { overAll(t, ownerLost) }

func ownerLost(t *testing.T, by [2]string) {
	t.Helper()
	g := newGate()
	gone := startNode(t, "gone", nil, by)
	stays := startNode(t, "stays", gone, by)
	decode := startWith(t, configure(t, "decode", gone, by), g.wrap)
	awaitPeers(t, gone, stays, decode)
	a, b, d := openEngine(t, gone), openEngine(t, stays), openEngine(t, decode)
	life := gone.Life()
	for r, owner := range map[string]*engine{"r1": a, "r2": b, "waits": a} {
		owner.ingest(r)
		d.ingest(r)
		for i, chunk := range chunks() {
			owner.write(r, chunk)
			owner.publish(r, i == 2 && r != "waits", to("decode"))
		}
	}
	reads, other, waits := d.retrieving("r1", "", 0), d.retrieving("r2", "", 0), d.retrieving("waits", "", 0)
	for range 3 {
		<-g.came
	}
	start := time.Now()
	gone.closeWithin(100 * time.Millisecond)
	for name, c := range map[string]<-chan result{"reading": reads, "waiting": waits} {
		got := <-c
		e, ok := errors.AsType[*client.Error](got.err)
		if !ok || e.Failure.GetCode() != kvferrypb.Failure_OWNER_LOST || e.Failure.GetPeer() != "gone" || e.Failure.GetPeerIncarnation() != uint64(life.Incarnation) {
			t.Errorf("%s: %v, %v, want OWNER_LOST of %s", name, got.res, got.err, life)
		}
	}
	if took := time.Since(start); took > deadline/2 {
		t.Errorf("they were told after %v", took)
	}
	close(g.pass)
	if got := <-other; got.err != nil {
		t.Errorf("a read from another node: %v", got.err)
	}
	if got := d.verify("r2", "main"); got != 36 {
		t.Errorf("%d tokens, want 36", got)
	}
	for _, r := range []string{"r1", "r2", "waits"} {
		d.remove(r)
	}
	awaitAllFree(t, decode)
}

// TestOwnerRestarts: the owner comes back three times under its name and on its
// ports while requests run.
func TestOwnerRestarts(t *testing.T) { overAll(t, ownerRestarts) }

func ownerRestarts(t *testing.T, by [2]string) {
	t.Helper()
	// On an address of its own, where nobody else is given the ports meanwhile.
	c := configure(t, "prefill", nil, by, [2]string{"node.bind", ownAddress()})
	prefill := startWith(t, c, nil)
	a := prefill.Addresses()
	for key, port := range map[string]uint16{"gossip": a.Gossip.Port(), "peer": a.Peer.Port(), "data": a.Data.Port(), "http": a.HTTP.Port()} {
		if port == 0 { // there is no tcp
			continue
		}
		if err := c.Set("ports."+key, strconv.Itoa(int(port))); err != nil {
			t.Fatal(err)
		}
	}
	decode := startNode(t, "decode", prefill, by)
	if err := c.Set("cluster.join", decode.Addresses().Gossip.String()); err != nil {
		t.Fatal(err)
	}
	awaitPeers(t, prefill, decode)
	d := openEngine(t, decode)
	for life := range 4 {
		p := openEngine(t, prefill)
		old := ""
		for i := range 3 {
			old = carry(t, fmt.Sprintf("r%d-%d", life, i), bring{chunks: chunks(), target: "decode"}, p, d)
		}
		// One is under way when the owner ends.
		open := fmt.Sprintf("open-%d", life)
		p.ingest(open)
		d.ingest(open)
		p.write(open, 20)
		p.publish(open, false, to("decode"))
		under := d.retrieving(open, "", 0)
		awaitLanded(d, open, 20)
		if life == 3 {
			break
		}
		prefill.closeWithin(100 * time.Millisecond) // it can't wait for what is open
		start := time.Now()
		prefill = startWith(t, c, nil)
		next := openEngine(t, prefill)
		carry(t, fmt.Sprintf("first-%d", life), bring{chunks: chunks(), reference: true}, next, d)
		if took := time.Since(start); took > deadline/2 {
			t.Errorf("life %d serves after %v", life, took)
		}
		if got := <-under; client.CodeOf(got.err) != kvferrypb.Failure_OWNER_LOST && client.CodeOf(got.err) != kvferrypb.Failure_REVOKED {
			t.Errorf("retrieve from the former life: %v, %v, want OWNER_LOST", got.res, got.err)
		}
		d.ingest("late")
		r := fmt.Sprintf("r%d-2", life)
		d.remove(r)
		d.ingest(r)
		if _, err := d.retrieve(r, old, 0, deadline); client.CodeOf(err) != kvferrypb.Failure_OWNER_LOST {
			t.Errorf("a reference of a former life: %v, want OWNER_LOST", err)
		}
		for i := range 2 {
			d.remove(fmt.Sprintf("r%d-%d", life, i))
		}
		for _, r := range []string{r, open, fmt.Sprintf("first-%d", life)} {
			d.remove(r)
		}
	}
}

// awaitLanded waits until so many tokens of a request have landed.
func awaitLanded(e *engine, r string, tokens uint32) {
	e.t.Helper()
	await(e.t, r+" to land", func(context.Context) error {
		res, err := e.retrieve(r, "", 0, 0)
		if err != nil {
			return err
		}
		for _, l := range res.GetLengths() {
			if l.GetTokens() == tokens {
				return nil
			}
		}
		return fmt.Errorf("%v", res)
	})
}

// TestTwoOfOneName: the older life of a name gives itself up.
func TestTwoOfOneName(t *testing.T) {
	seed := startNode(t, "seed", nil)
	older := startNode(t, "twin", seed)
	awaitPeers(t, seed, older)
	newer := startNode(t, "twin", seed)
	select {
	case <-older.Done():
	case <-time.After(deadline):
		t.Fatal("the older one goes on")
	}
	if err := older.Err(); !errors.Is(err, node.ErrFenced) {
		t.Errorf("Err = %v, want ErrFenced", err)
	}
	p := dial(t, older)
	if _, err := p.Open(t.Context(), client.OpenOptions{}); client.CodeOf(err) != kvferrypb.Failure_DRAINING {
		t.Errorf("Open at the older one: %v, want DRAINING", err)
	}
	awaitPeers(t, seed, newer)
	if newer.Err() != nil || newer.Life().Incarnation <= older.Life().Incarnation {
		t.Errorf("the newer one, %v: %v", newer.Life(), newer.Err())
	}
}

// TestClockSetBack: what state_dir remembers counts, and so does what others do.
func TestClockSetBack(t *testing.T) {
	future := uint64(time.Now().Add(10 * 365 * 24 * time.Hour).UnixMicro())
	c := configure(t, "prefill", nil)
	if err := os.MkdirAll(c.Node.StateDir, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(c.Node.StateDir, "incarnation")
	if err := os.WriteFile(file, []byte(strconv.FormatUint(future, 10)), 0o600); err != nil {
		t.Fatal(err)
	}
	prefill := startWith(t, c, nil)
	if got := uint64(prefill.Life().Incarnation); got != future+1 {
		t.Fatalf("incarnation %d, want %d", got, future+1)
	}
	decode := startNode(t, "decode", prefill)
	awaitPeers(t, prefill, decode)
	prefill.close()
	// Now the file is lost, too: only decode knows.
	if err := c.Set("node.state_dir", ""); err != nil {
		t.Fatal(err)
	}
	if err := c.Set("cluster.join", decode.Addresses().Gossip.String()); err != nil {
		t.Fatal(err)
	}
	again := startWith(t, c, nil)
	if got := uint64(again.Life().Incarnation); got <= future+1 {
		t.Errorf("incarnation %d after %d", got, future+1)
	}
	awaitPeers(t, again, decode)
	p, d := openEngine(t, again), openEngine(t, decode)
	carry(t, "r1", bring{chunks: chunks(), reference: true}, p, d)
}

// TestSessionIsLost: at the end of a session all that it began ends, but for
// what it has published as final.
func TestSessionIsLost(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap, shortGrace)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	for i, chunk := range chunks() {
		for _, r := range []string{"final", "open"} {
			if i == 0 {
				p.ingest(r)
				d.ingest(r)
			}
			p.write(r, chunk)
			p.publish(r, i == 2 && r == "final", to("decode"))
		}
	}
	for _, e := range []*engine{p, d} {
		e.ingest("step")
		if _, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{{Request: "step", Span: 30}}}); err != nil {
			t.Fatal(err)
		}
	}
	reads := d.retrieving("final", "", 0)
	<-g.came
	d.hangUp()
	p.hangUp()
	if got := <-reads; got.err == nil {
		t.Errorf("a retrieve whose session was lost: %v", got.res)
	}
	awaitAllFree(t, decode)
	await(t, "the session to end", func(context.Context) error {
		if c := counts(t, prefill); c.GetLimbo() != 5 || c.GetOwned() != 0 {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
	close(g.pass)
	d = openEngine(t, decode)
	d.ingest("final")
	if _, err := d.retrieve("final", "", 0, deadline); err != nil {
		t.Fatal(err)
	}
	if got := d.verify("final", "main"); got != 36 {
		t.Errorf("%d tokens, want 36", got)
	}
	awaitAllFree(t, prefill)
}

// shortGrace is for sessions whose engine hangs up, and long enough to open one.
var shortGrace = [2]string{"timers.session_grace", "3s"}

// hangUp breaks the engine's connection without a word.
func (e *engine) hangUp() {
	e.client.Close()
}

// TestAcknowledgementOfAGoneOwnerIsCounted: what nobody is there to hear is dropped,
// and shows.
func TestAcknowledgementOfAGoneOwnerIsCounted(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	decode := startNode(t, "decode", prefill)
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 8)
	p.publish("r1", false, to("decode"))
	if res, err := d.retrieve("r1", "", 8, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	const dropped = `kvferry_acks_sent_total{result="dropped"}`
	before := metric(t, decode, dropped)
	prefill.closeWithin(0)
	await(t, "the owner to be no peer any more", func(context.Context) error {
		res, err := decode.admin.Peers(t.Context(), &kvferrypb.PeersRequest{})
		if err == nil && len(res.GetItems()) > 0 {
			err = fmt.Errorf("%v", res.GetItems())
		}
		return err
	})
	d.remove("r1")
	if got := metric(t, decode, dropped); got != before+1 {
		t.Errorf("%v acknowledgements were dropped, want one", got-before)
	}
}
