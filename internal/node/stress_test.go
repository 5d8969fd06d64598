package node_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// TestStress lets several engines on three nodes do at random whatever engines
// may do, over transports that fail. What is ready must have the right bytes,
// and at the end every page of every node is free.
func TestStress(t *testing.T) {
	set := [][2]string{
		{"timers.lease", "400ms"},
		{"timers.lease_renew", "100ms"},
		{"timers.hold", "300ms"},
		{"timers.stall", "200ms"},
		{"timers.backoff_min", "1ms"},
		{"timers.backoff_max", "10ms"},
		{"arena.pages", "48"},
	}
	var nodes []*member
	for i := range 3 {
		var seed *member
		if i > 0 {
			seed = nodes[0]
		}
		wrap := faulty(func(int) transfertest.Fault {
			switch rand.IntN(20) {
			case 0:
				return transfertest.Fault{Err: context.Canceled}
			case 1:
				return transfertest.Fault{Lose: true}
			case 2:
				return transfertest.Fault{Late: time.Millisecond}
			case 3:
				return transfertest.Fault{Delay: 5 * time.Millisecond, Reorder: true}
			default:
				return transfertest.Fault{}
			}
		})
		nodes = append(nodes, startWith(t, configure(t, fmt.Sprintf("node-%d", i), seed, set...), wrap))
	}
	awaitPeers(t, nodes...)
	end := time.Now().Add(*soak)
	var work sync.WaitGroup
	var ready, done [3]int
	for i, n := range nodes {
		for j := range 2 {
			e := openEngine(t, n)
			work.Go(func() {
				b := &baboon{engine: e, node: i, seat: j, rng: rand.New(rand.NewPCG(uint64(i), uint64(j)))}
				for time.Now().Before(end) && !t.Failed() {
					b.act()
				}
				if j == 0 {
					ready[i], done[i] = b.ready, b.done
				}
				if err := e.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	work.Wait()
	for _, n := range nodes {
		awaitAllFree(t, n)
	}
	t.Logf("ready %v of acts %v", ready, done)
	if ready[0]+ready[1]+ready[2] == 0 {
		t.Error("nothing was ever ready: the test shows nothing")
	}
}

// baboon is an engine without a plan. A request is its publisher's by name:
// "NODE-SEAT-N" is written by that node's seat, and read by all others.
type baboon struct {
	*engine
	node, seat  int
	rng         *rand.Rand
	ready, done int
}

// allowed are the failures that may meet who does everything at once.
var allowed = map[kvferrypb.Failure_Code]bool{
	kvferrypb.Failure_NOT_FOUND: true, kvferrypb.Failure_STALE: true, kvferrypb.Failure_EXPIRED: true, kvferrypb.Failure_REVOKED: true,
	kvferrypb.Failure_DIVERGED: true, kvferrypb.Failure_DEADLINE: true, kvferrypb.Failure_TRANSPORT: true, kvferrypb.Failure_CANCELLED: true,
	kvferrypb.Failure_RESOURCE_EXHAUSTED: true, kvferrypb.Failure_ALREADY_EXISTS: true, kvferrypb.Failure_BUSY: true, kvferrypb.Failure_INVALID: true,
}

func (b *baboon) check(what string, err error) bool {
	if err != nil && !allowed[client.CodeOf(err)] {
		b.t.Errorf("node %d seat %d: %s: %v", b.node, b.seat, what, err)
	}
	return err == nil
}

func (b *baboon) act() {
	b.done++
	mine := fmt.Sprintf("%d-%d-%d", b.node, b.seat, b.rng.IntN(3))
	theirs := fmt.Sprintf("%d-%d-%d", (b.node+1+b.rng.IntN(2))%3, b.seat, b.rng.IntN(3))
	any := []string{mine, theirs}[b.rng.IntN(2)]
	switch b.rng.IntN(12) {
	case 0, 1, 2:
		_, err := b.Ingest(b.ctx(), &kvferrypb.IngestRequest{Request: mine})
		b.check("ingest", err)
		b.check("write", b.tryWrite(mine, 1+b.rng.IntN(30)))
	case 3, 4:
		req := &kvferrypb.PublishRequest{Request: mine, Final: b.rng.IntN(2) == 0}
		if b.rng.IntN(2) == 0 {
			req.Target = fmt.Sprintf("node-%d", b.rng.IntN(3))
		}
		_, err := b.Publish(b.ctx(), req)
		b.check("publish", err)
	case 5, 6, 7, 8:
		_, err := b.Ingest(b.ctx(), &kvferrypb.IngestRequest{Request: theirs})
		b.check("ingest", err)
		var cancelled chan struct{}
		if b.rng.IntN(4) == 0 { // while it waits
			cancelled = make(chan struct{})
			go func() {
				defer close(cancelled)
				_, err := b.Cancel(b.ctx(), &kvferrypb.CancelRequest{Request: theirs})
				b.check("cancel", err)
			}()
		}
		res, err := b.AdmitRetrieve(b.ctx(), &kvferrypb.AdmitRetrieveRequest{
			Request: theirs, MinTokens: uint32(b.rng.IntN(2)), Wait: durationpb.New(time.Duration(b.rng.IntN(30)) * time.Millisecond),
		})
		if cancelled != nil {
			<-cancelled
		}
		if b.check("retrieve", err) && res.GetReadiness() == kvferrypb.Readiness_READY {
			b.ready++
			b.look(theirs)
		}
	case 9:
		_, err := b.Remove(b.ctx(), &kvferrypb.RemoveRequest{Request: any, Discard: b.rng.IntN(3) == 0})
		b.check("remove", err)
	case 10:
		_, err := b.Reset(b.ctx(), &kvferrypb.ResetRequest{Request: any, Free: b.rng.IntN(2) == 0})
		b.check("reset", err)
	case 11:
		step, err := b.Admit(b.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{{Request: any, Span: 3}}})
		if b.check("admit", err) && b.rng.IntN(2) == 0 {
			_, err = b.Abort(b.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
			b.check("abort", err)
		} else if err == nil { // without having written: never published, so nobody is fooled
			_, err = b.Abort(b.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
			b.check("abort", err)
			_, err = b.Reset(b.ctx(), &kvferrypb.ResetRequest{Request: any, Free: true})
			b.check("reset", err)
		}
	}
}

// look checks every byte that has landed, if the request can be looked at.
func (b *baboon) look(r string) {
	step, err := b.Admit(b.ctx(), &kvferrypb.AdmitRequest{Plan: true, Segments: []*kvferrypb.Segment{{Request: r}}})
	if !b.check("look", err) {
		return
	}
	b.compare(r, "main", step.GetPlans()[0])
	_, err = b.Abort(b.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
	b.check("abort", err)
}
