package node_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// TestStress lets eight engines on three nodes do at random whatever engines
// may do, over transports that fail, in arenas that are too small for all, so
// that requests also go to the host and come back. What a reader is told is ready
// must be one publish, whole, what an owner has written must be there, wherever it
// has been meanwhile, and at the end every page of every node is free, those of the
// hosts included, and nothing runs.
func TestStress(t *testing.T) {
	set := [][2]string{
		{"timers.lease", "400ms"},
		{"timers.lease_renew", "100ms"},
		{"timers.hold", "300ms"},
		{"timers.stall", "200ms"},
		{"timers.backoff_min", "1ms"},
		{"timers.backoff_max", "10ms"},
		{"transfer.limits.slice", "4KiB"},
		{"transfer.limits.in_flight", "5"},
		{"arena.pages", "28"},
		{"arena.host_pages", "40"},
	}
	var nodes []*member
	for i, evict := range []string{"recent", "pages", "never"} {
		var seed *member
		if i > 0 {
			seed = nodes[0]
		}
		wrap := faultyWithin(200*time.Millisecond, func(int) transfertest.Fault {
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
		nodes = append(nodes, startWith(t, configure(t, fmt.Sprintf("node-%d", i), seed, append(set, [2]string{"arena.evict", evict})...), wrap))
	}
	awaitPeers(t, nodes...)
	seats := [...]int{3, 3, 2}
	goesOn := until(t, *soak)
	var lib library
	var work sync.WaitGroup
	var shown deeds
	for i, n := range nodes {
		for j := range seats[i] {
			b := &baboon{engine: openEngine(t, n), node: i, seat: j, rng: rand.New(rand.NewPCG(uint64(i), uint64(j))), lib: &lib, book: make(book), deeds: &shown}
			work.Go(func() {
				for goesOn(shown.all()) {
					b.act()
				}
				if err := b.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	}
	work.Wait()
	for _, n := range nodes {
		awaitNothing(t, n)
		if c := n.Counts(); c.Requests+c.Kept+c.Steps+c.Publications+c.Retrievals+c.Moves+c.Published+c.HostUsed+c.Faults != 0 {
			t.Errorf("%s: %+v", n.Life(), c)
		}
	}
	t.Logf("of %d acts %d made something ready, %d forked, %d took what was staged, %d moved",
		shown.done.Load(), shown.ready.Load(), shown.forked.Load(), shown.staged.Load(), shown.moved.Load())
	if !shown.all() {
		t.Error("the test shows nothing")
	}
}

// until says whether to go on: for so long, and then until enough was seen, as long
// as nothing has failed.
func until(t testing.TB, soak time.Duration) func(enough bool) bool {
	begin := time.Now()
	return func(enough bool) bool {
		past := time.Since(begin)
		return !t.Failed() && (past < soak || !enough && past < soak+deadline)
	}
}

// deeds are what all engines together have done.
type deeds struct {
	done, ready    atomic.Int64
	moved          atomic.Int64 // to the host or back
	forked, staged atomic.Int64
}

// all says that there was something of each.
func (d *deeds) all() bool {
	return d.ready.Load() > 0 && d.moved.Load() > 0 && d.forked.Load() > 0 && d.staged.Load() > 0
}

// baboon is an engine without a plan. A request is its publisher's by name:
// "NODE-SEAT-N" is written by that seat of that node, and read by the others. N
// says what is in it: 0 has the label main alone, 1 has also cfg, 2 has both
// and a retention.
type baboon struct {
	*engine
	node, seat int
	rng        *rand.Rand
	lib        *library // of all
	book       book     // of what is written here
	*deeds              // of all
}

// allowed are the failures that may meet who does everything at once.
var allowed = map[kvferrypb.Failure_Code]bool{
	kvferrypb.Failure_NOT_FOUND: true, kvferrypb.Failure_STALE: true, kvferrypb.Failure_EXPIRED: true, kvferrypb.Failure_REVOKED: true,
	kvferrypb.Failure_DIVERGED: true, kvferrypb.Failure_DEADLINE: true, kvferrypb.Failure_TRANSPORT: true, kvferrypb.Failure_CANCELLED: true,
	kvferrypb.Failure_RESOURCE_EXHAUSTED: true, kvferrypb.Failure_ALREADY_EXISTS: true, kvferrypb.Failure_BUSY: true, kvferrypb.Failure_INVALID: true,
	kvferrypb.Failure_OFFLOADING: true,
}

func (b *baboon) check(what string, err error) bool {
	if err != nil && !allowed[client.CodeOf(err)] {
		b.t.Errorf("node %d seat %d: %s: %v", b.node, b.seat, what, err)
	}
	return err == nil
}

// one says yes once in n times.
func (b *baboon) one(n int) bool { return b.rng.IntN(n) == 0 }

func (b *baboon) act() {
	b.done.Add(1)
	n := b.rng.IntN(3)
	mine := fmt.Sprintf("%d-%d-%d", b.node, b.seat, n)
	theirs := fmt.Sprintf("%d-%d-%d", (b.node+1+b.rng.IntN(2))%3, b.seat, n)
	labels := []string{"main", "cfg"}[:min(n+1, 2)]
	any := []string{mine, theirs}[b.rng.IntN(2)]
	switch b.rng.IntN(17) {
	case 0, 1, 2:
		req := &kvferrypb.IngestRequest{Request: mine}
		if n == 2 {
			req.Retention = []*kvferrypb.IngestRequest_Retention{{Budget: 24, Prefix: 8}}
		}
		_, err := b.Ingest(b.ctx(), req)
		b.check("ingest", err)
		b.check("write", b.write(b.random(mine, labels)))
	case 3, 4:
		req := &kvferrypb.PublishRequest{Request: mine, Final: b.one(2)}
		if b.one(2) {
			req.Target = fmt.Sprintf("node-%d", b.rng.IntN(3))
		}
		b.lib.add(mine, b.book.of(mine))
		_, err := b.Publish(b.ctx(), req)
		b.check("publish", err)
	case 5, 6, 7, 8:
		b.bring(theirs, labels)
	case 9:
		_, err := b.Remove(b.ctx(), &kvferrypb.RemoveRequest{Request: any, Discard: b.one(3)})
		if b.check("remove", err) {
			delete(b.book, any)
		}
	case 10:
		b.reset(any, b.one(2))
	case 11: // without having written: never committed, so nobody is fooled
		step, err := b.Admit(b.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment(any, "", 3)}})
		if !b.check("admit", err) {
			return
		}
		_, err = b.Abort(b.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
		b.check("abort", err)
		if b.one(2) {
			b.reset(any, true)
		}
	case 12:
		if got, err := b.read(mine, labels...); b.check("look", err) {
			if d := b.book.of(mine).differs(got); d != "" {
				b.t.Errorf("node %d seat %d: of its own %s, %s", b.node, b.seat, mine, d)
			}
		}
	case 13:
		_, err := b.Unstage(b.ctx(), &kvferrypb.UnstageRequest{})
		b.check("unstage", err)
	case 14, 15:
		res, err := b.Offload(b.ctx(), &kvferrypb.OffloadRequest{Request: any})
		if b.check("offload", err) && res.GetFreed() > 0 {
			b.moved.Add(1)
		}
	case 16:
		res, err := b.Reload(b.ctx(), &kvferrypb.ReloadRequest{Request: any})
		if b.check("reload", err) && res.GetPages() > 0 {
			b.moved.Add(1)
		}
	}
}

// random is a step on a request of this seat's.
func (b *baboon) random(r string, labels []string) *kvferrypb.AdmitRequest {
	req := &kvferrypb.AdmitRequest{Plan: true, Discard: b.one(5)}
	for _, l := range labels {
		if !b.one(4) {
			req.Segments = append(req.Segments, segment(r, l, b.rng.IntN(15)))
		}
	}
	if len(req.GetSegments()) == 0 {
		req.Segments = []*kvferrypb.Segment{segment(r, "", 1)}
	}
	if len(req.GetSegments()) == 2 && b.one(3) {
		req.Combined = []*kvferrypb.Combined{{Sources: []string{"cfg", "main"}, Label: "both"}}
	}
	if b.one(4) {
		req.Lease = &kvferrypb.AdmitRequest_Lease{Slot: 1, Tokens: 20}
	}
	if len(labels) == 2 && b.one(2) {
		// Only from what is there: a stream that a step has made and an abort
		// has left is empty, and not in the book.
		from, to := "main", "cfg"
		if b.one(3) {
			from, to = to, from
		}
		if len(b.book.of(r)[from]) > 0 {
			if b.one(2) {
				req.PreForks = forks(from, to)
			} else {
				req.PostForks = forks(from, to)
			}
		}
	}
	return req
}

// write does a step: some are staged first, and some of those are never asked
// for; some are ended twice at once.
func (b *baboon) write(req *kvferrypb.AdmitRequest) error {
	var ahead uint64
	if b.one(3) {
		step, err := b.Stage(b.ctx(), req)
		b.check("stage", err)
		ahead = step.GetStep()
		if b.one(4) {
			return nil
		}
	}
	step, err := b.Admit(b.ctx(), req)
	if err != nil {
		return err
	}
	if ahead != 0 && step.GetStep() == ahead {
		b.staged.Add(1)
	}
	if b.one(6) {
		aborted := make(chan error, 1)
		go func() {
			_, err := b.Abort(b.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()})
			aborted <- err
		}()
		err := b.book.finish(b.engine, req, step)
		if abort := <-aborted; (err == nil) == (abort == nil) {
			b.t.Errorf("commit = %v, abort = %v of one step", err, abort)
		}
		return err
	}
	if err := b.book.finish(b.engine, req, step); err != nil {
		b.t.Errorf("commit: %v", err)
	}
	if len(req.GetPreForks())+len(req.GetPostForks()) > 0 {
		b.forked.Add(1)
	}
	return nil
}

func (b *baboon) reset(r string, free bool) {
	_, err := b.Reset(b.ctx(), &kvferrypb.ResetRequest{Request: r, Free: free})
	if b.check("reset", err) && b.book[r] != nil {
		for l := range b.book[r] {
			b.book[r][l] = nil
		}
	}
}

// bring retrieves a request of others, and looks at what has come.
func (b *baboon) bring(r string, labels []string) {
	_, err := b.Ingest(b.ctx(), &kvferrypb.IngestRequest{Request: r, Needed: &kvferrypb.Labels{Labels: labels}})
	b.check("ingest", err)
	var cancelled chan struct{}
	if b.one(4) { // while it waits
		cancelled = make(chan struct{})
		go func() {
			defer close(cancelled)
			_, err := b.Cancel(b.ctx(), &kvferrypb.CancelRequest{Request: r})
			b.check("cancel", err)
		}()
	}
	res, err := b.AdmitRetrieve(b.ctx(), &kvferrypb.AdmitRetrieveRequest{
		Request: r, MinTokens: uint32(b.rng.IntN(2)), Wait: durationpb.New(time.Duration(b.rng.IntN(30)) * time.Millisecond),
	})
	if cancelled != nil {
		<-cancelled
	}
	if !b.check("retrieve", err) || res.GetReadiness() != kvferrypb.Readiness_READY {
		return
	}
	b.ready.Add(1)
	if got, err := b.read(r, labels...); b.check("look", err) {
		if d := b.lib.differs(r, got); d != "" {
			b.t.Errorf("node %d seat %d: %s", b.node, b.seat, d)
		}
	}
}
