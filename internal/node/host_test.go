package node_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/node"
)

// copier stops the copies of chosen requests.
type copier struct {
	mu    sync.Mutex
	stops map[id.Request]*stop
}

type stop struct {
	came chan struct{} // closed when a copy has come
	pass chan error    // fed or closed: let them through, or fail one
	once sync.Once
}

// stop makes the copies of a request wait, from the next one on.
func (c *copier) stop(r string) *stop {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := &stop{came: make(chan struct{}), pass: make(chan error)}
	c.stops[id.Request(r)] = s
	return s
}

func (c *copier) hook(ctx context.Context, r id.Request) error {
	c.mu.Lock()
	s := c.stops[r]
	c.mu.Unlock()
	if s == nil {
		return nil
	}
	s.once.Do(func() { close(s.came) })
	select {
	case err := <-s.pass:
		return err
	case <-ctx.Done():
		return nil // as a copy that has begun, which nobody can stop
	}
}

// startHosted runs a node with a host tier, whose copies can be stopped.
func startHosted(t testing.TB, name string, seed *member, set ...[2]string) (*member, *copier) {
	t.Helper()
	set = append([][2]string{{"arena.host_pages", "64"}, {"timers.backoff_min", "2ms"}, {"timers.backoff_max", "20ms"}}, set...)
	c := &copier{stops: make(map[id.Request]*stop)}
	return startOptions(t, node.Options{Config: configure(t, name, seed, set...), Logger: logger(t)}.Hooked(c.hook)), c
}

// startHostedPair runs an owner with a host tier, and a reader.
func startHostedPair(t testing.TB, set ...[2]string) (prefill, decode *member, c *copier) {
	t.Helper()
	prefill, c = startHosted(t, "prefill", nil, set...)
	decode = startNode(t, "decode", prefill)
	awaitPeers(t, prefill, decode)
	return prefill, decode, c
}

func (e *engine) offload(r string) (freed int) {
	e.t.Helper()
	res, err := e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: r})
	if err != nil {
		e.t.Fatal(err)
	}
	return int(res.GetFreed())
}

func (e *engine) reload(r string) (pages int) {
	e.t.Helper()
	res, err := e.Reload(e.ctx(), &kvferrypb.ReloadRequest{Request: r})
	if err != nil {
		e.t.Fatal(err)
	}
	return int(res.GetPages())
}

func (e *engine) offloaded(r string) bool {
	e.t.Helper()
	res, err := e.IsOffloaded(e.ctx(), &kvferrypb.IsOffloadedRequest{Request: r})
	if err != nil {
		e.t.Fatal(err)
	}
	return res.GetOffloaded()
}

func (e *engine) reclaimable(r string) int {
	e.t.Helper()
	res, err := e.Reclaimable(e.ctx(), &kvferrypb.ReclaimableRequest{Request: r})
	if err != nil {
		e.t.Fatal(err)
	}
	return int(res.GetPages())
}

// discard removes a request, and takes back what it has published.
func (e *engine) discard(r string) {
	e.t.Helper()
	if _, err := e.Remove(e.ctx(), &kvferrypb.RemoveRequest{Request: r, Discard: true}); err != nil {
		e.t.Error(err)
	}
}

// offloading begins an offload in the background.
func (e *engine) offloading(r string) chan error {
	done := make(chan error, 1)
	go func() {
		_, err := e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: r})
		done <- err
	}()
	return done
}

// reloading begins a reload in the background.
func (e *engine) reloading(r string) chan error {
	done := make(chan error, 1)
	go func() {
		_, err := e.Reload(e.ctx(), &kvferrypb.ReloadRequest{Request: r})
		done <- err
	}()
	return done
}

// awaitNothing waits until a node holds no page, in the arena and on the host.
func awaitNothing(t testing.TB, n *member) {
	t.Helper()
	awaitAllFree(t, n)
	await(t, fmt.Sprintf("the host pages of %s to be free", n.Life()), func(context.Context) error {
		if c := counts(t, n); c.GetHostFree() != c.GetHostTotal() {
			return fmt.Errorf("%v", c)
		}
		return nil
	})
}

// awaitCode waits for a call in the background.
func awaitCode(t testing.TB, what string, done <-chan error, want kvferrypb.Failure_Code) {
	t.Helper()
	select {
	case err := <-done:
		if got := client.CodeOf(err); got != want {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	case <-time.After(deadline):
		t.Fatalf("%s hangs", what)
	}
}

// TestOffloadAndReload: what comes back is what went, on every rank and in both
// layouts, whatever was written over its pages meanwhile.
func TestOffloadAndReload(t *testing.T) {
	for name, set := range map[string][][2]string{
		"NHD": nil, "HND": {{"arena.layout", "HND"}}, "NHD on a device": {onDevice}, "HND on a device": {onDevice, {"arena.layout", "HND"}},
	} {
		t.Run(name, func(t *testing.T) {
			n, _ := startHosted(t, "n", nil, append(set, [2]string{"arena.ranks", "0,1"})...)
			e := openEngine(t, n)
			e.ingest("r1", "main", "cfg")
			e.ingest("r2")
			e.write("r1", 21, "main", "cfg") // three pages each
			e.write("r1", 9, "cfg")
			if got := e.reclaimable("r1"); got != 7 {
				t.Errorf("%d pages can be reclaimed", got)
			}
			if e.offloaded("r1") {
				t.Error("it is on the host")
			}
			if got := e.offload("r1"); got != 7 {
				t.Errorf("%d pages are freed", got)
			}
			if !e.offloaded("r1") || e.reclaimable("r1") != 0 || e.offload("r1") != 0 {
				t.Error("it is not on the host")
			}
			c := counts(t, n)
			if c.GetHostTotal()-c.GetHostFree() != 7 || c.GetFree() != 63 {
				t.Errorf("%v", c)
			}
			code(t, "a step", e.tryWrite("r1", 1), kvferrypb.Failure_OFFLOADING)
			_, err := e.Reset(e.ctx(), &kvferrypb.ResetRequest{Request: "r1"})
			code(t, "a reset that keeps pages", err, kvferrypb.Failure_OFFLOADING)
			e.write("r2", 63*8) // everything is written over
			e.remove("r2")
			if got := e.reload("r1"); got != 7 {
				t.Errorf("%d pages are back", got)
			}
			if e.offloaded("r1") || e.reload("r1") != 0 {
				t.Error("it is still on the host")
			}
			e.write("r1", 5, "main", "cfg")
			if m, c := e.verify("r1", "main"), e.verify("r1", "cfg"); m != 26 || c != 35 {
				t.Errorf("%d and %d tokens are back", m, c)
			}
			e.offload("r1")
			e.remove("r1")
			awaitNothing(t, n)
		})
	}
}

// TestHostTierSaysWhatItCannot: every refusal has its type.
func TestHostTierSaysWhatItCannot(t *testing.T) {
	bare := openEngine(t, startNode(t, "bare", nil))
	bare.ingest("r1")
	bare.write("r1", 8)
	_, err := bare.Offload(bare.ctx(), &kvferrypb.OffloadRequest{Request: "r1"})
	code(t, "no host tier", err, kvferrypb.Failure_INVALID)
	_, err = bare.client.Admin().Offload(bare.ctx(), &kvferrypb.AdminOffloadRequest{})
	code(t, "no host tier to choose for", err, kvferrypb.Failure_INVALID)

	n, _ := startHosted(t, "n", nil, [2]string{"arena.host_pages", "2"})
	e := openEngine(t, n)
	_, err = e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: "r1"})
	code(t, "no such request", err, kvferrypb.Failure_NOT_FOUND)
	_, err = n.admin.Offload(e.ctx(), &kvferrypb.AdminOffloadRequest{})
	if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_NOT_FOUND || !strings.Contains(f.GetRemedy(), "kvferry arena") {
		t.Errorf("no victim: %v", f)
	}
	e.ingest("r1", "main", "cfg")
	e.write("r1", 16, "main")
	e.write("r1", 17, "cfg")
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r1", "main", 1)}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: "r1"})
	code(t, "a step in flight", err, kvferrypb.Failure_BUSY)
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		t.Fatal(err)
	}
	// Two of the three pages of main hold tokens; cfg needs three.
	if freed := e.offload("r1"); freed != 3 {
		t.Errorf("%d pages are freed", freed)
	}
	_, err = e.Offload(e.ctx(), &kvferrypb.OffloadRequest{Request: "r1"})
	code(t, "the host is full", err, kvferrypb.Failure_RESOURCE_EXHAUSTED)
	e.write("r1", 3, "cfg")
	e.verify("r1", "cfg")
	code(t, "the label that moved", e.tryWrite("r1", 1, "main"), kvferrypb.Failure_OFFLOADING)
	e.reload("r1")
	if m, c := e.verify("r1", "main"), e.verify("r1", "cfg"); m != 16 || c != 20 {
		t.Errorf("%d and %d tokens are back", m, c)
	}
	e.remove("r1")
	awaitNothing(t, n)
}

// TestMovesAreWaitedFor: who comes while a request moves waits for that, and
// looks again.
func TestMovesAreWaitedFor(t *testing.T) {
	n, c := startHosted(t, "n", nil)
	e := openEngine(t, n)
	e.ingest("r1")
	e.ingest("r2")
	e.write("r1", 20)
	s := c.stop("r1")
	first := e.offloading("r1")
	<-s.came
	second, third := e.offloading("r1"), e.reloading("r1")
	if !e.offloaded("r1") {
		t.Error("what moves is not on the device")
	}
	code(t, "a step", e.tryWrite("r1", 1), kvferrypb.Failure_OFFLOADING)
	e.write("r2", 20) // others are not held up
	ctx, cancel := context.WithTimeout(e.ctx(), 10*time.Millisecond)
	defer cancel()
	if _, err := e.Reload(ctx, &kvferrypb.ReloadRequest{Request: "r1"}); status.Code(err) != codes.DeadlineExceeded {
		t.Errorf("%v", err)
	}
	close(s.pass)
	for what, done := range map[string]chan error{"first": first, "second": second, "third": third} {
		awaitCode(t, what, done, kvferrypb.Failure_UNSPECIFIED)
	}
	e.reload("r1")
	if got := e.verify("r1", "main"); got != 20 {
		t.Errorf("%d tokens", got)
	}
}

// TestMoveThatFails: nothing of it counts, in both directions, and the next one does.
func TestMoveThatFails(t *testing.T) {
	n, c := startHosted(t, "n", nil)
	e := openEngine(t, n)
	e.ingest("r1")
	e.write("r1", 20)
	fails := func(done chan error) {
		t.Helper()
		s := c.stops["r1"]
		<-s.came
		s.pass <- errors.New("the copier is broken")
		select {
		case err := <-done:
			if err == nil || !strings.Contains(err.Error(), "the copier is broken") {
				t.Errorf("%v", err)
			}
		case <-time.After(deadline):
			t.Fatal("it hangs")
		}
	}
	c.stop("r1")
	fails(e.offloading("r1"))
	if e.offloaded("r1") || e.verify("r1", "main") != 20 {
		t.Error("it moved")
	}
	s := c.stop("r1")
	close(s.pass)
	e.offload("r1")
	c.stop("r1")
	fails(e.reloading("r1"))
	if got := counts(t, n); !e.offloaded("r1") || got.GetFree() != 63 {
		t.Errorf("%v", got)
	}
	close(c.stop("r1").pass)
	e.reload("r1")
	if e.verify("r1", "main") != 20 {
		t.Error("it is not back")
	}
}

// TestWhatEndsWhileItMoves: in every window of a move its request, session, or
// node may end, and nothing is left or given out twice.
func TestWhatEndsWhileItMoves(t *testing.T) {
	for _, direction := range []string{"offload", "reload"} {
		for what, end := range map[string]func(n *member, e *engine){
			"discard": func(_ *member, e *engine) { e.discard("r1") },
			"remove":  func(_ *member, e *engine) { e.remove("r1") },
			"reset": func(_ *member, e *engine) {
				if _, err := e.Reset(e.ctx(), &kvferrypb.ResetRequest{Request: "r1", Free: true}); err != nil {
					e.t.Error(err)
				}
				e.write("r1", 30)
			},
			"remove and again": func(_ *member, e *engine) {
				e.remove("r1")
				e.ingest("r1")
				e.write("r1", 30)
			},
			"session": func(_ *member, e *engine) { e.Close() },
			"close":   func(n *member, _ *engine) { n.closeWithin(time.Millisecond) },
			"drain":   func(n *member, _ *engine) { _ = n.Drain(context.Background(), time.Millisecond) },
		} {
			t.Run(direction+" "+what, func(t *testing.T) {
				n, c := startHosted(t, "n", nil)
				e := openEngine(t, n)
				e.ingest("r1")
				e.write("r1", 20)
				e.publish("r1", true)
				begin := e.offloading
				if direction == "reload" {
					e.offload("r1")
					begin = e.reloading
				}
				s := c.stop("r1")
				done := begin("r1")
				<-s.came
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					end(n, e)
				}()
				select {
				case <-ended:
				case <-time.After(deadline):
					t.Fatal("it hangs")
				}
				close(s.pass)
				select {
				case <-done: // whatever it says: the client may be gone
				case <-time.After(deadline):
					t.Fatal("the move hangs")
				}
				if what == "close" || what == "drain" {
					return
				}
				if strings.HasSuffix(what, "again") || what == "reset" {
					if got := e.verify("r1", "main"); got != 30 {
						t.Errorf("%d tokens of the next life", got)
					}
					e.remove("r1")
				}
				for _, p := range n.publications(t) {
					if _, err := n.admin.Revoke(t.Context(), &kvferrypb.RevokeRequest{Publication: p.GetPublication()}); err != nil {
						t.Error(err)
					}
				}
				awaitNothing(t, n)
			})
		}
	}
}

func (m *member) publications(t testing.TB) []*kvferrypb.PublicationItem {
	t.Helper()
	res, err := m.admin.Publications(t.Context(), &kvferrypb.PublicationsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	return res.GetItems()
}

// TestOffloadBetweenChunks: what is published goes to the host and comes back
// again and again while readers follow it, by reference and by request, with and
// without a wait. Every reader gets every byte.
func TestOffloadBetweenChunks(t *testing.T) {
	for _, b := range []bring{
		{target: "decode", reference: true}, {reference: true, poll: true}, {target: "decode"}, {poll: true},
	} {
		t.Run(fmt.Sprintf("reference %v poll %v", b.reference, b.poll), func(t *testing.T) {
			prefill, decode, _ := startHostedPair(t)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1")
			tokens, reference := 0, ""
			for i, chunk := range chunks() {
				p.write("r1", chunk)
				tokens += chunk
				final := i == len(chunks())-1
				given := p.publish("r1", final, to(b.target)).GetReference()
				if b.reference && (reference == "" || i == 1) { // of the last one the reader has an old name
					reference = given
				}
				p.offload("r1")
				least := tokens
				if final {
					least = 0
				}
				if b.poll {
					d.awaitReady("r1", reference, least)
				} else if res, err := d.retrieve("r1", reference, least, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
					t.Fatalf("chunk %d: %v, %v", i, res, err)
				}
				if got := d.verify("r1", "main"); got != tokens {
					t.Fatalf("chunk %d: %d tokens have landed, want %d", i, got, tokens)
				}
				if final {
					continue
				}
				if res, err := d.retrieve("r1", reference, 0, 0); err != nil || res.GetReadiness() == kvferrypb.Readiness_READY {
					t.Fatalf("after chunk %d, which is not final: %v, %v", i, res, err)
				}
				await(t, "it to be back", func(context.Context) error {
					if p.offloaded("r1") {
						return errors.New("it is on the host")
					}
					return nil
				})
			}
			d.event(kvferrypb.Event_RETRIEVED)
			p.event(kvferrypb.Event_RELEASED) // once, though it had several names
			p.remove("r1")
			d.remove("r1")
			awaitNothing(t, prefill)
			awaitAllFree(t, decode)
		})
	}
}

// TestOffloadWhileRead: the pages go to the host after the read knows where to
// read. It ends stale, the reader goes on with what goes on for it, and nobody
// sees a failure: neither who waits, nor who waits for the event alone.
func TestOffloadWhileRead(t *testing.T) {
	for _, waits := range []bool{true, false} {
		for _, named := range []bool{true, false} {
			t.Run(fmt.Sprintf("waits %v by reference %v", waits, named), func(t *testing.T) {
				g := newGate()
				prefill, _ := startHosted(t, "prefill", nil)
				decode := startWith(t, configure(t, "decode", prefill), g.wrap)
				awaitPeers(t, prefill, decode)
				p, d := openEngine(t, prefill), openEngine(t, decode)
				for _, e := range []*engine{p, d} {
					e.ingest("r1")
				}
				p.ingest("r2")
				reference := ""
				for i, chunk := range chunks() {
					p.write("r1", chunk)
					res := p.publish("r1", i == 2, to("decode"))
					if named {
						reference = res.GetReference()
					}
				}
				var done chan result
				if waits {
					done = d.retrieving("r1", reference, 0)
				} else {
					await(t, "the read to begin", func(context.Context) error {
						res, err := d.retrieve("r1", reference, 0, 0)
						if err != nil {
							t.Fatal(err)
						}
						if res.GetReadiness() != kvferrypb.Readiness_READING {
							return fmt.Errorf("%v", res)
						}
						return nil
					})
				}
				<-g.came
				p.offload("r1")
				p.write("r2", 63*8) // other tokens lie there now
				p.remove("r2")
				close(g.pass)
				if waits {
					select {
					case got := <-done:
						if got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
							t.Fatalf("%v, %v", got.res, got.err)
						}
					case <-time.After(deadline):
						t.Fatal("it hangs")
					}
				}
				d.event(kvferrypb.Event_RETRIEVED)
				if got := d.verify("r1", "main"); got != 36 {
					t.Errorf("%d tokens", got)
				}
				for _, s := range []string{reference, ""} { // by its old name, too
					if res, err := d.retrieve("r1", s, 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
						t.Errorf("asked again: %v, %v", res, err)
					}
				}
				p.remove("r1")
				awaitNothing(t, prefill)
			})
		}
	}
}

// TestPublishedOnTheHost: what is published from the host is brought back for the
// reader that takes a lease on it, and never read in the meantime. Its reader
// waits for room, too: the owner makes some as soon as it may.
func TestPublishedOnTheHost(t *testing.T) {
	prefill, decode, _ := startHostedPair(t, [2]string{"arena.pages", "8"})
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	p.ingest("r2")
	d.ingest("r1")
	p.write("r1", 36)
	p.offload("r1")
	p.write("r2", 40)
	step, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r2", "", 1)}})
	if err != nil {
		t.Fatal(err)
	}
	p.publish("r1", true, to("decode"))
	done := d.retrieving("r1", "", 0)
	await(t, "the lease", func(context.Context) error {
		for _, i := range prefill.publications(t) {
			if i.GetLeases() > 0 {
				return nil
			}
		}
		return errors.New("nobody has one")
	})
	if res, err := d.retrieve("r1", "", 0, 0); err != nil || res.GetReadiness() != kvferrypb.Readiness_WAITING {
		t.Errorf("before there is room: %v, %v", res, err)
	}
	_, err = d.retrieve("r1", "", 0, 20*time.Millisecond)
	code(t, "a wait that is over before there is room", err, kvferrypb.Failure_DEADLINE)
	if _, err := p.Abort(p.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		t.Fatal(err)
	}
	select { // r2 rests now, and goes to the host
	case got := <-done:
		if got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
			t.Fatalf("%v, %v", got.res, got.err)
		}
	case <-time.After(deadline):
		t.Fatal("it hangs")
	}
	d.verify("r1", "main")
	if !p.offloaded("r2") {
		t.Error("nobody has made room")
	}
	if v := metric(t, prefill, `kvferry_evictions_total{cause="reload"}`); v != 1 {
		t.Errorf("%v evictions", v)
	}
	p.remove("r1")
	p.reload("r2")
	if got := p.verify("r2", "main"); got != 40 {
		t.Errorf("%d tokens of the victim", got)
	}
	p.remove("r2")
	awaitNothing(t, prefill)
}

// TestReadersOfWhatGoesOn: who has read what has gone to the host is not waited
// for again, and who declines it may do so by its old name.
func TestReadersOfWhatGoesOn(t *testing.T) {
	for name, last := range map[string]func(e *engine, reference string){
		"reads": func(e *engine, reference string) {
			if res, err := e.retrieve("r1", reference, 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
				e.t.Fatalf("%v, %v", res, err)
			}
			e.verify("r1", "main")
		},
		"declines": func(e *engine, reference string) {
			if _, err := e.Release(e.ctx(), &kvferrypb.ReleaseRequest{Reference: reference}); err != nil {
				e.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			owner, first, _ := startHostedPair(t)
			second := startNode(t, "second", owner)
			awaitPeers(t, owner, first, second)
			p, d, e := openEngine(t, owner), openEngine(t, first), openEngine(t, second)
			for _, x := range []*engine{p, d, e} {
				x.ingest("r1")
			}
			p.write("r1", 36)
			reference := p.publish("r1", true, func(r *kvferrypb.PublishRequest) { r.Readers = 2 }).GetReference()
			if res, err := d.retrieve("r1", reference, 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Fatalf("%v, %v", res, err)
			}
			await(t, "the first reader to have said so", func(context.Context) error {
				if i := owner.publications(t)[0]; i.GetAcknowledged() != 1 || i.GetLeases() != 0 {
					return fmt.Errorf("%v", i)
				}
				return nil
			})
			p.offload("r1")
			last(e, reference)
			if ev := p.event(kvferrypb.Event_RELEASED); ev.GetReference() != reference || ev.GetOutcome() != "released" {
				t.Errorf("%v", ev)
			}
			p.remove("r1")
			awaitNothing(t, owner)
		})
	}
}

// TestRemovedOnTheHost: what was published as final is kept for its readers when
// its request is removed on the host, whether there is room for it or not and
// whatever becomes of the id, and is brought back for who reads it. Where it is
// taken back they hear that.
func TestRemovedOnTheHost(t *testing.T) {
	full := func(p *engine) (step uint64) {
		p.ingest("r2")
		res, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r2", "", 7*8)}})
		if err != nil {
			p.t.Fatal(err)
		}
		return res.GetStep()
	}
	for name, tt := range map[string]struct {
		end   func(p *engine) (then func())
		after func(p *engine)
		want  kvferrypb.Failure_Code
	}{
		"removed": {end: func(p *engine) func() {
			p.remove("r1")
			return nil
		}},
		"its session has ended": {end: func(p *engine) func() {
			p.Close()
			return nil
		}},
		"discarded": {want: kvferrypb.Failure_REVOKED, end: func(p *engine) func() {
			p.discard("r1")
			return nil
		}},
		"without room": {end: func(p *engine) func() {
			step := full(p)
			p.remove("r1")
			return func() {
				if _, err := p.Abort(p.ctx(), &kvferrypb.AbortRequest{Step: step}); err != nil {
					p.t.Error(err)
				}
			}
		}, after: func(p *engine) { p.remove("r2") }},
		"with another life of its id": {end: func(p *engine) func() {
			p.remove("r1")
			p.ingest("r1")
			p.write("r1", 7*8) // and no room
			return nil
		}, after: func(p *engine) {
			// It has made room, which it gets back when the reader's word has come.
			await(p.t, "what was read to be let go", func(context.Context) error {
				_, err := p.Reload(p.ctx(), &kvferrypb.ReloadRequest{Request: "r1"})
				return err
			})
			if got := p.verify("r1", "main"); got != 56 {
				p.t.Errorf("%d tokens of the next life", got)
			}
			p.remove("r1")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			prefill, decode, _ := startHostedPair(t, [2]string{"arena.pages", "8"})
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1")
			p.write("r1", 36)
			p.offload("r1")
			reference := p.publish("r1", true, to("decode")).GetReference()
			then := tt.end(p)
			done := d.retrieving("r1", reference, 0)
			if then != nil {
				await(t, "the lease", func(context.Context) error {
					if i := prefill.publications(t)[0]; i.GetLeases() == 0 {
						return fmt.Errorf("%v", i)
					}
					return nil
				})
				then()
			}
			select {
			case got := <-done:
				if client.CodeOf(got.err) != tt.want || got.err == nil && got.res.GetReadiness() != kvferrypb.Readiness_READY {
					t.Fatalf("%v, %v, want %v", got.res, got.err, tt.want)
				} else if got.err == nil && d.verify("r1", "main") != 36 {
					t.Error("it has not all come")
				}
			case <-time.After(deadline):
				t.Fatal("it hangs")
			}
			if tt.after != nil {
				tt.after(p)
			}
			awaitNothing(t, prefill)
		})
	}
}

// TestPeopleSeeWhatIsKept: a request that was removed, and why it is still there.
func TestPeopleSeeWhatIsKept(t *testing.T) {
	n, _ := startHosted(t, "n", nil)
	e := openEngine(t, n)
	e.ingest("r1")
	e.write("r1", 12)
	e.offload("r1")
	name := e.publish("r1", true).GetPublication()
	e.remove("r1")
	state := func() string {
		res, err := n.admin.Arena(t.Context(), &kvferrypb.ArenaRequest{})
		if err != nil || len(res.GetItems()) != 1 {
			t.Fatalf("%v, %v", res, err)
		}
		return res.GetItems()[0].GetRequest() + ": " + res.GetItems()[0].GetState()
	}
	if got, want := state(), fmt.Sprintf("r1: on host (removed, kept for publication %d)", name); got != want {
		t.Errorf("%q, want %q", got, want)
	}
	if _, err := n.admin.Revoke(t.Context(), &kvferrypb.RevokeRequest{Publication: name}); err != nil {
		t.Error(err)
	}
	awaitNothing(t, n)

	e.ingest("r1")
	e.write("r1", 12)
	e.publish("r1", true)
	e.offload("r1")
	e.remove("r1")
	publications := n.publications(t)
	d := openEngine(t, startNode(t, "decode", n))
	d.ingest("r1")
	if res, err := d.retrieve("r1", publications[0].GetReference(), 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Errorf("%v, %v", res, err)
	}
	awaitNothing(t, n)
}

// TestRemovedWhileItIsBroughtBack: nobody waits for the copy, and the reader has it.
func TestRemovedWhileItIsBroughtBack(t *testing.T) {
	prefill, decode, c := startHostedPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	d.ingest("r1")
	p.write("r1", 36)
	p.offload("r1")
	s := c.stop("r1")
	p.publish("r1", true, to("decode"))
	done := d.retrieving("r1", "", 0)
	<-s.came // for the reader
	p.remove("r1")
	res, err := prefill.admin.Page(t.Context(), &kvferrypb.PageRequest{Page: 6})
	if want := "it was removed, kept for publication "; err != nil || !strings.Contains(res.GetWhy(), want) || res.GetRequest() != "r1" {
		t.Errorf("%v, %v", res, err)
	}
	close(s.pass)
	select {
	case got := <-done:
		if got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
			t.Fatalf("%v, %v", got.res, got.err)
		}
	case <-time.After(deadline):
		t.Fatal("it hangs")
	}
	d.verify("r1", "main")
	awaitNothing(t, prefill)
}

// TestRemovedWhileItWaitsForRoom: its reader has a lease that need not be renewed
// for it to come back when there is room.
func TestRemovedWhileItWaitsForRoom(t *testing.T) {
	long := [][2]string{{"timers.lease", "2h"}, {"timers.max_hold", "3h"}, {"timers.lease_renew", "1h"}}
	prefill, _ := startHosted(t, "prefill", nil, append(long, [2]string{"arena.pages", "8"})...)
	decode := startNode(t, "decode", prefill, long...)
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r1")
	p.ingest("r2")
	d.ingest("r1")
	p.write("r1", 36)
	p.offload("r1")
	step, err := p.Admit(p.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r2", "", 7*8)}})
	if err != nil {
		t.Fatal(err)
	}
	p.publish("r1", true, to("decode"))
	done := d.retrieving("r1", "", 0)
	await(t, "the lease", func(context.Context) error {
		if i := prefill.publications(t)[0]; i.GetLeases() == 0 {
			return fmt.Errorf("%v", i)
		}
		return nil
	})
	p.remove("r1")
	if _, err := p.Abort(p.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-done:
		if got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
			t.Fatalf("%v, %v", got.res, got.err)
		}
	case <-time.After(deadline):
		t.Fatal("it hangs")
	}
	d.verify("r1", "main")
	p.remove("r2")
	awaitNothing(t, prefill)
}

// TestOnlyWhatWasPublished: tokens that were committed after the last publish do
// not travel, however often the request moves, and readers end with as many as
// were published.
func TestOnlyWhatWasPublished(t *testing.T) {
	for _, final := range []bool{false, true} {
		t.Run(fmt.Sprint("final ", final), func(t *testing.T) {
			prefill, decode, _ := startHostedPair(t)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r1")
			d.ingest("r1", "main")
			p.write("r1", 13)
			p.publish("r1", final, to("decode"))
			p.write("r1", 10)
			p.write("r1", 5, "cfg")
			p.offload("r1")
			p.reload("r1")
			p.write("r1", 1)
			p.offload("r1")
			least := 0
			if !final {
				least = 13
			}
			res, err := d.retrieve("r1", "", least, deadline)
			if err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Fatalf("%v, %v", res, err)
			}
			if got := d.verify("r1", "main"); got != 13 {
				t.Errorf("%d tokens", got)
			}
			if final {
				d.event(kvferrypb.Event_RETRIEVED)
				return
			}
			p.publish("r1", true, to("decode"))
			if res, err = d.retrieve("r1", "", 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Fatalf("%v, %v", res, err)
			}
			if got := d.verify("r1", "main"); got != 24 {
				t.Errorf("%d tokens at the end", got)
			}
		})
	}
}

// TestSpec018RetrievalsTakeTurns: two requests that do not fit together are both
// brought in by who waits, one after the other, and neither starves the other.
func TestSpec018RetrievalsTakeTurns(t *testing.T) {
	prefill := startNode(t, "prefill", nil)
	decode, _ := startHosted(t, "decode", prefill, [2]string{"arena.pages", "8"})
	awaitPeers(t, prefill, decode)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	const requests = 4
	for i := range requests {
		r := fmt.Sprint("r", i)
		p.ingest(r)
		d.ingest(r)
		for j, chunk := range chunks() { // five pages
			p.write(r, chunk)
			p.publish(r, j == 2, to("decode"))
		}
	}
	var work sync.WaitGroup
	for i := range requests {
		work.Go(func() {
			r := fmt.Sprint("r", i)
			if res, err := d.retrieve(r, "", 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Errorf("%s: %v, %v", r, res, err)
			}
		})
	}
	work.Wait()
	for i := range requests {
		r := fmt.Sprint("r", i)
		if res, err := d.retrieve(r, "", 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY { // it may be on the host by now
			t.Errorf("%s: %v, %v", r, res, err)
		}
		if got := d.verify(r, "main"); got != 36 {
			t.Errorf("%d tokens", got)
		}
	}
	// Who does not wait is told what is missing.
	d.ingest("big")
	p.ingest("big")
	p.write("big", 8*8)
	p.publish("big", true)
	await(t, "big to be known", func(context.Context) error {
		_, err := d.retrieve("big", "", 0, deadline) // no wait makes it fit
		if f := failureOf(t, err); f.GetCode() != kvferrypb.Failure_RESOURCE_EXHAUSTED || f.GetPagesShort() == 0 {
			return err
		}
		return nil
	})
	for i := range requests {
		d.remove(fmt.Sprint("r", i))
	}
	d.remove("big")
	awaitNothing(t, decode)
}

// TestRetrieveBringsBack: a request whose own tokens are on the host is brought
// back by who asks for it, as M*'s check_ready does.
func TestRetrieveBringsBack(t *testing.T) {
	n, _ := startHosted(t, "n", nil)
	e := openEngine(t, n)
	e.ingest("r1")
	e.write("r1", 20)
	e.publish("r1", true)
	e.offload("r1")
	if res, err := e.retrieve("r1", "", 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Errorf("%v, %v", res, err)
	}
	if got := e.verify("r1", "main"); got != 20 {
		t.Errorf("%d tokens", got)
	}
	e.offload("r1")
	_, err := e.retrieve("r1", "", 0, 0)
	code(t, "without a wait", err, kvferrypb.Failure_OFFLOADING)
	await(t, "it to be back", func(context.Context) error {
		res, err := e.retrieve("r1", "", 0, 0)
		if err == nil && res.GetReadiness() != kvferrypb.Readiness_READY {
			err = fmt.Errorf("%v", res)
		}
		return err
	})
}

// TestVictims: who makes room is who should, and nobody else.
func TestVictims(t *testing.T) {
	for name, tt := range map[string]struct {
		evict   string
		prepare func(n *member, e, decode *engine)
		admit   string // nine pages, which lack three
		want    []string
		code    kvferrypb.Failure_Code
	}{
		"least recently active": {evict: "recent", want: []string{"a"}},
		"most pages":            {evict: "pages", want: []string{"c"}},
		"nobody":                {evict: "never", code: kvferrypb.Failure_RESOURCE_EXHAUSTED},
		"not the one that asks": {evict: "recent", admit: "a", want: []string{"b"}},
		"the published last": {evict: "recent", prepare: func(_ *member, e, _ *engine) {
			e.publish("a", true)
			e.publish("b", true)
		}, want: []string{"c"}},
		"the published, if there is nothing else": {evict: "recent", prepare: func(_ *member, e, _ *engine) {
			for _, r := range []string{"c", "b", "a"} {
				e.publish(r, true)
			}
		}, want: []string{"c"}},
		"not one that is read": {evict: "recent", prepare: func(n *member, e, d *engine) {
			e.publish("a", false, to("decode"))
			d.ingest("a")
			if _, err := d.retrieve("a", "", 24, deadline); err != nil {
				d.t.Fatal(err)
			}
			await(d.t, "the owner to know of it", func(context.Context) error { // nothing waits for a lease
				if n.publications(d.t)[0].GetLeases() == 0 {
					return errors.New("no lease")
				}
				return nil
			})
			e.publish("b", true)
			e.publish("c", true)
		}, want: []string{"b"}},
		"none for nothing": {evict: "recent", prepare: func(_ *member, e, _ *engine) {
			e.write("c", 2*8) // now five are lacking
			if _, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("b", "", 0), segment("c", "", 0)}}); err != nil {
				e.t.Fatal(err)
			}
		}, code: kvferrypb.Failure_RESOURCE_EXHAUSTED},
		"not one in flight": {evict: "recent", prepare: func(_ *member, e, _ *engine) {
			if _, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("a", "", 0)}}); err != nil {
				e.t.Fatal(err)
			}
		}, want: []string{"b"}},
	} {
		t.Run(name, func(t *testing.T) {
			n, decode, _ := startHostedPair(t, [2]string{"arena.evict", tt.evict}, [2]string{"arena.pages", "17"})
			e, d := openEngine(t, n), openEngine(t, decode)
			for _, r := range []string{"a", "b", "c", "new"} {
				e.ingest(r)
			}
			e.write("a", 3*8)
			e.write("b", 3*8)
			e.write("c", 4*8)
			if tt.prepare != nil {
				tt.prepare(n, e, d)
			}
			r := tt.admit
			if r == "" {
				r = "new"
			}
			if err := e.tryWrite(r, 9*8); client.CodeOf(err) != tt.code {
				t.Errorf("the step: %v, want %v", err, tt.code)
			}
			for _, r := range []string{"a", "b", "c"} {
				want := false
				for _, w := range tt.want {
					want = want || w == r
				}
				if got := e.offloaded(r); got != want {
					t.Errorf("%s is on the host: %v, want %v", r, got, want)
				}
			}
		})
	}
}

// TestPeopleSee the host tier: pages, states, and why.
func TestPeopleSee(t *testing.T) {
	n, c := startHosted(t, "n", nil)
	e := openEngine(t, n)
	e.ingest("r1", "main", "cfg")
	e.write("r1", 12, "main", "cfg")
	e.publish("r1", true)
	at := uint32(e.pages("r1")[0])
	page := func(p uint32) *kvferrypb.PageResponse {
		t.Helper()
		res, err := n.admin.Page(t.Context(), &kvferrypb.PageRequest{Page: p})
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	if p := page(0); p.GetPlace() != "sink" || p.GetWhy() == "" {
		t.Errorf("%v", p)
	}
	if p := page(60); p.GetPlace() != "free" || p.GetWhy() != "nobody holds it" {
		t.Errorf("%v", p)
	}
	p := page(at)
	if p.GetPlace() != "owned" || p.GetRequest() != "r1" || p.GetLabel() != "main" || p.GetTokens() != 8 || len(p.GetPublications()) != 1 ||
		p.GetWhy() != `request "r1" has tokens 0 to 7 of "main" in it; a live publication names it` {
		t.Errorf("%v", p)
	}
	if i := p.GetPublications()[0]; !i.GetFinal() || i.GetRequest() != "r1" || i.GetReference() == "" || i.GetExpiresIn().AsDuration() <= 0 {
		t.Errorf("%v", i)
	}
	_, err := n.admin.Page(t.Context(), &kvferrypb.PageRequest{Page: 64})
	code(t, "no such page", err, kvferrypb.Failure_INVALID)

	s := c.stop("r1")
	done := make(chan error, 1)
	go func() {
		res, err := n.admin.Offload(e.ctx(), &kvferrypb.AdminOffloadRequest{}) // there is only one
		if err == nil && (res.GetFreed() != 4 || res.GetRequest() != "r1") {
			err = fmt.Errorf("%v", res)
		}
		done <- err
	}()
	<-s.came
	if p := page(at); p.GetMove() == 0 || !strings.Contains(p.GetWhy(), "on its way") {
		t.Errorf("%v", p)
	}
	states := func() (all []string) {
		res, err := n.admin.Arena(t.Context(), &kvferrypb.ArenaRequest{})
		if err != nil {
			t.Fatal(err)
		}
		for _, i := range res.GetItems() {
			all = append(all, fmt.Sprintf("%s %s %d+%d", i.GetLabel(), i.GetState(), i.GetPages(), i.GetHostPages()))
		}
		return all
	}
	if got := strings.Join(states(), ", "); got != "main offloading 2+0, cfg offloading 2+0" {
		t.Error(got)
	}
	close(s.pass)
	awaitCode(t, "offload", done, kvferrypb.Failure_UNSPECIFIED)
	if got := strings.Join(states(), ", "); got != "main on host 0+2, cfg on host 0+2" {
		t.Error(got)
	}
	if res, err := n.admin.Reload(t.Context(), &kvferrypb.AdminReloadRequest{Request: "r1"}); err != nil || res.GetPages() != 4 {
		t.Errorf("%v, %v", res, err)
	}
	for what, want := range map[string]float64{
		`kvferry_offloads_total{direction="offload",result="ok"}`: 1, `kvferry_offloads_total{direction="reload",result="ok"}`: 1,
		`kvferry_host_bytes_total{direction="offload"}`: 2 * 12 * 2 * 2 * 2 * 8 * 2, `kvferry_pages{state="host_free"}`: 64, `kvferry_pages{state="host_used"}`: 0,
		`kvferry_publications_total{outcome="offloaded"}`: 1,
	} {
		if got := metric(t, n, what); got != want {
			t.Errorf("%s is %v, want %v", what, got, want)
		}
	}
}

// TestHostTierThatCannotBeHad: the start says which key asks for it.
func TestHostTierThatCannotBeHad(t *testing.T) {
	c := configure(t, "n", nil, [2]string{"arena.host_pages", "1"})
	c.Arena.HostPages = config.Pages{Count: 1 << 30}
	_, err := node.Start(t.Context(), node.Options{Config: c})
	if err == nil || !strings.Contains(err.Error(), "arena.host_pages") {
		t.Errorf("%v", err)
	}
}

// BenchmarkHostTier moves a request of 256 MiB to the host and back, beside a copy
// of as many bytes in one piece.
func BenchmarkHostTier(b *testing.B) {
	const pages, pageBytes = 128, 2 << 20
	n, _ := startHosted(b, "n", nil, [2]string{"arena.pages", fmt.Sprint(pages + 1)}, [2]string{"arena.host_pages", fmt.Sprint(pages)},
		[2]string{"arena.page_size", "16"}, [2]string{"arena.layers", "32"}, [2]string{"arena.heads", "8"}, [2]string{"arena.head_dim", "128"})
	e := openEngine(b, n)
	e.ingest("r1")
	step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r1", "", pages*16)}})
	if err != nil {
		b.Fatal(err)
	}
	if _, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
		b.Fatal(err)
	}
	e.offload("r1") // both sides have been touched
	e.reload("r1")
	for _, direction := range []string{"offload", "reload"} {
		b.Run(direction, func(b *testing.B) {
			b.SetBytes(pages * pageBytes)
			for b.Loop() {
				if direction == "offload" {
					e.offload("r1")
				}
				b.StopTimer()
				if direction == "reload" {
					e.offload("r1")
				} else {
					e.reload("r1")
				}
				b.StartTimer()
				if direction == "reload" {
					e.reload("r1")
				}
			}
		})
	}
	b.Run("memcpy", func(b *testing.B) {
		from, to := e.arenas[0].Bytes(), make([]byte, pages*pageBytes)
		copy(to, from)
		b.SetBytes(pages * pageBytes)
		for b.Loop() {
			copy(to, from)
		}
	})
}
