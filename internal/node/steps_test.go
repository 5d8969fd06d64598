package node_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// TestForkedStreamsTravel: a stream that was forked on the prefill node, before
// and after its steps, is on the decode node byte for byte, chunk by chunk.
func TestForkedStreamsTravel(t *testing.T) {
	for name, set := range map[string][][2]string{
		"NHD":            nil,
		"HND":            {{"arena.layout", "HND"}},
		"two ranks":      {{"arena.ranks", "0,1"}},
		"on devices":     {onDevice, {"arena.ranks", "0,1"}},
		"HND on devices": {onDevice, {"arena.layout", "HND"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			prefill, decode := startPair(t, set...)
			p, d := openEngine(t, prefill), openEngine(t, decode)
			p.ingest("r", "main", "cfg")
			d.ingest("r", "main", "cfg")
			b := make(book)
			for i, req := range []*kvferrypb.AdmitRequest{
				{Segments: []*kvferrypb.Segment{segment("r", "", 13)}, PostForks: forks("", "cfg")},
				{Segments: []*kvferrypb.Segment{segment("r", "", 9), segment("r", "cfg", 4)}, Combined: []*kvferrypb.Combined{{Sources: []string{"cfg", "main"}, Label: "both"}}},
				// Forked twice in one step, and written to in between.
				{PreForks: forks("cfg", "aside"), Segments: []*kvferrypb.Segment{segment("r", "aside", 3), segment("r", "cfg", 5)}, PostForks: forks("aside", "more")},
				{Segments: []*kvferrypb.Segment{segment("r", "", 1), segment("r", "cfg", 1)}},
			} {
				b.must(p, req)
				b.verify(p, "r", "main", "cfg")
				p.publish("r", false, to("decode"))
				least := min(len(b["r"]["main"]), len(b["r"]["cfg"]))
				if res, err := d.retrieve("r", "", least, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
					t.Fatalf("chunk %d: %v, %v", i, res, err)
				}
				b.verify(d, "r", "main", "cfg")
			}
			b.verify(p, "r", "aside", "more")
			// The pause: nobody is told to decode.
			final := d.retrieving("r", "", 0)
			awaitRetrieval(t, decode, "waiting")
			select {
			case got := <-final:
				t.Fatalf("before the final publish: %v, %v", got.res, got.err)
			default:
			}
			b.must(p, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 2), segment("r", "cfg", 2)}})
			p.publish("r", true, to("decode"))
			if got := <-final; got.err != nil || got.res.GetReadiness() != kvferrypb.Readiness_READY {
				t.Fatalf("%v, %v", got.res, got.err)
			}
			b.verify(d, "r", "main", "cfg")
			// What the reader does with it afterwards is its own.
			b.must(d, &kvferrypb.AdmitRequest{PreForks: forks("", "cfg"), Segments: []*kvferrypb.Segment{segment("r", "cfg", 7)}})
			b.verify(d, "r", "main", "cfg")
			p.remove("r")
			d.remove("r")
			awaitAllFree(t, prefill)
			awaitAllFree(t, decode)
		})
	}
}

// TestForkEndsWhatItReplaces: who was about to read a publication of which a
// fork has replaced a stream is refused, also if the pages are used again.
func TestForkEndsWhatItReplaces(t *testing.T) {
	g := newGate()
	prefill, decode := startGated(t, g.wrap)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	p.ingest("r", "main", "cfg")
	d.ingest("r", "main", "cfg")
	b := make(book)
	b.must(p, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 30), segment("r", "cfg", 21)}})
	ref := p.publish("r", false, to("decode")).GetReference()
	done := d.retrieving("r", ref, 1)
	<-g.came // it knows where to read, and has not begun
	b.must(p, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 3)}, PostForks: forks("", "cfg")})
	if ev := p.event(kvferrypb.Event_RELEASED); ev.GetOutcome() != "revoked" || ev.GetReference() != ref {
		t.Errorf("%v", ev)
	}
	if c := counts(t, prefill); c.GetLimbo() != 0 {
		t.Errorf("the replaced pages are not free when Commit has answered: %v", c)
	}
	p.ingest("other")
	b.must(p, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("other", "", (63-5-5)*8)}}) // all others
	close(g.pass)
	got := <-done
	if code := client.CodeOf(got.err); code != kvferrypb.Failure_REVOKED && code != kvferrypb.Failure_STALE {
		t.Errorf("%v, %v", got.res, got.err)
	}
	p.remove("other")
	// A publish of what is there now is another publication, from the beginning.
	p.publish("r", true, to("decode"))
	if res, err := d.retrieve("r", "", 0, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
		t.Fatalf("%v, %v", res, err)
	}
	b.verify(d, "r", "main", "cfg")
	p.remove("r")
	d.remove("r")
	awaitAllFree(t, prefill)
	awaitAllFree(t, decode)
}

// TestForkNeverMixes: while forks replace what is published again and again, a
// reader has one publication whole, or none.
func TestForkNeverMixes(t *testing.T) {
	prefill, decode := startGated(t, faulty(func(n int) transfertest.Fault { return transfertest.Fault{Reorder: n%2 == 0} }))
	p, d := openEngine(t, prefill), openEngine(t, decode)
	const rounds = 20
	var lib library
	var work sync.WaitGroup
	var over atomic.Bool
	b := make(book)
	work.Go(func() {
		defer over.Store(true)
		p.ingest("r", "main", "cfg")
		for i := range rounds {
			// cfg replaced by main, grown in the next step, then main by cfg.
			for _, req := range []*kvferrypb.AdmitRequest{
				{PreForks: forks("main", "cfg"), Segments: []*kvferrypb.Segment{segment("r", "", 1), segment("r", "cfg", 2)}},
				{Segments: []*kvferrypb.Segment{segment("r", "", 5)}, PostForks: forks("cfg", "main")},
			} {
				if err := b.run(p, req); err != nil {
					t.Error(err)
					return
				}
				lib.add("r", b["r"])
				if _, err := p.Publish(p.ctx(), &kvferrypb.PublishRequest{Request: "r", Target: "decode", Final: i == rounds-1 && req.PostForks != nil}); err != nil {
					t.Error(err)
					return
				}
			}
		}
	})
	d.ingest("r", "main", "cfg")
	ready := 0
	for last := false; !last && !t.Failed(); {
		last = over.Load()
		least := 1
		if last {
			least = 0
		}
		res, err := d.retrieve("r", "", least, deadline)
		if err != nil {
			if code := client.CodeOf(err); code != kvferrypb.Failure_REVOKED && code != kvferrypb.Failure_STALE && code != kvferrypb.Failure_EXPIRED {
				t.Error(err)
			}
			last = false
			continue
		}
		if res.GetReadiness() != kvferrypb.Readiness_READY {
			continue
		}
		ready++
		got, err := d.read("r", "main", "cfg")
		if err != nil {
			t.Fatal(err)
		}
		if why := lib.differs("r", got); why != "" {
			t.Errorf("after %d: %s", ready, why)
		}
	}
	work.Wait()
	b.verify(d, "r", "main", "cfg") // the last one, in the end
	t.Logf("ready %d times of %d", ready, 2*rounds)
	p.remove("r")
	d.remove("r")
	awaitAllFree(t, prefill)
	awaitAllFree(t, decode)
}

// TestRows: forks are made for the rows that have the source, and a plan is
// padded up to what the captured graph writes.
func TestRows(t *testing.T) {
	n := startNode(t, "one", nil)
	e := openEngine(t, n)
	b := make(book)
	for _, r := range []string{"a", "b", "pad"} {
		e.ingest(r)
	}
	b.must(e, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("a", "cfg", 11), segment("b", "cfg", 8), segment("a", "", 1)}})
	req := &kvferrypb.AdmitRequest{
		Segments: []*kvferrypb.Segment{segment("a", "cfg", 1)}, PreForks: forks("cfg", "early"), PostForks: forks("cfg", "late"),
		Rows: &kvferrypb.AdmitRequest_Rows{Requests: []string{"pad", "a", "b", "a"}}, Lease: &kvferrypb.AdmitRequest_Lease{Slot: 3, Tokens: 5}, Plan: true,
	}
	step, err := e.Admit(e.ctx(), req)
	if err != nil {
		t.Fatal(err)
	}
	plan := step.GetPlans()[0]
	if plan.GetTotalTokens() != 1 || len(plan.GetTokenToPage()) != 5 || len(plan.GetTokenToSlot()) != 5 {
		t.Errorf("%v", plan)
	}
	for i := 1; i < len(plan.GetTokenToPage()); i++ {
		if plan.GetTokenToPage()[i] != 0 || plan.GetTokenToSlot()[i] != 0 {
			t.Errorf("padding %d is written to page %d", i, plan.GetTokenToPage()[i])
		}
	}
	if err := b.finish(e, req, step); err != nil {
		t.Fatal(err)
	}
	for _, r := range []string{"a", "b", "pad"} {
		b.verify(e, r, "early", "late", "cfg", "main")
	}
	if got := len(b["b"]["late"]); got != 8 {
		t.Errorf("b has %d tokens in late, want 8: the test shows nothing", got)
	}
	if got := b["pad"]["late"]; got != nil {
		t.Errorf("pad has %v: the test shows nothing", got)
	}
	// A step of forks alone, that nobody plans and that writes nothing.
	b.must(e, &kvferrypb.AdmitRequest{Rows: req.GetRows(), PreForks: forks("cfg", "again"), Discard: true})
	plain := &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("b", "", 0)}, PreForks: forks("cfg", "plain")}
	step, err = e.Admit(e.ctx(), plain)
	if err == nil {
		_, err = e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()})
	}
	if err != nil {
		t.Fatal(err)
	}
	b["b"] = b.step(plain, 0)["b"]
	b.verify(e, "a", "again")
	b.verify(e, "b", "again", "plain")
}

// TestDiscard: the tokens of a step with discard are nobody's, its forks are made.
func TestDiscard(t *testing.T) {
	n := startNode(t, "one", nil)
	e := openEngine(t, n)
	b := make(book)
	e.ingest("r")
	b.must(e, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 12)}})
	b.must(e, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 30)}, PostForks: forks("", "cfg"), Discard: true})
	b.verify(e, "r", "main", "cfg")
	if got := len(b["r"]["cfg"]); got != 12 {
		t.Errorf("%d tokens in cfg, want 12", got)
	}
	b.must(e, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 7), segment("r", "cfg", 1)}})
	b.verify(e, "r", "main", "cfg")
}

// code is of an error that must be.
func code(t testing.TB, what string, err error, want kvferrypb.Failure_Code) {
	t.Helper()
	if got := client.CodeOf(err); err == nil || got != want {
		t.Errorf("%s = %v, want %v", what, err, want)
	}
}

// TestStage: a step that was staged is taken by an equal one, dropped by another
// one, and is nothing until then.
func TestStage(t *testing.T) {
	n := startNode(t, "one", nil)
	e, other := openEngine(t, n), openEngine(t, n)
	b := make(book)
	e.ingest("r")
	other.ingest("s")
	b.must(e, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 12)}})
	stage := func(e *engine, req *kvferrypb.AdmitRequest) *kvferrypb.AdmitResponse {
		t.Helper()
		req.Plan = true
		res, err := e.Stage(e.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		return res
	}
	commit := func(step uint64) error {
		_, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step})
		return err
	}
	next := func(span int) *kvferrypb.AdmitRequest {
		return &kvferrypb.AdmitRequest{
			Plan: true, Walk: "decode", PreForks: forks("", "cfg"), Segments: []*kvferrypb.Segment{segment("r", "cfg", span), segment("r", "", 1)},
		}
	}
	held := counts(t, n)

	// A lane is a session: the other one has its own.
	foreign := stage(other, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("s", "", 1)}})
	staged := stage(e, next(3))
	if len(staged.GetPlans()) != 2 || staged.GetPlans()[0].GetTotalTokens() != 3 {
		t.Errorf("%v", staged)
	}
	code(t, "commit of a staged step", commit(staged.GetStep()), kvferrypb.Failure_BUSY)
	_, err := e.WriteKV(e.ctx(), &kvferrypb.WriteKVRequest{Step: staged.GetStep()})
	code(t, "write of a staged step", err, kvferrypb.Failure_BUSY)
	_, err = e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: staged.GetStep()})
	code(t, "read of a staged step", err, kvferrypb.Failure_BUSY)
	_, err = e.Stage(e.ctx(), next(3))
	code(t, "a second staged step", err, kvferrypb.Failure_BUSY)
	_, err = e.Plan(e.ctx(), &kvferrypb.PlanRequest{Step: staged.GetStep()})
	if err != nil {
		t.Errorf("plan of a staged step: %v", err)
	}
	code(t, "commit of another session's step", commit(foreign.GetStep()), kvferrypb.Failure_NOT_FOUND)

	// Promoted: the copies of its forks are made now.
	req := next(3)
	step, err := e.Admit(e.ctx(), req)
	if err != nil || step.GetStep() != staged.GetStep() {
		t.Fatalf("%v, %v, want step %d", step, err, staged.GetStep())
	}
	if err := b.finish(e, req, step); err != nil {
		t.Fatal(err)
	}
	b.verify(e, "r", "main", "cfg")

	// Refused, or another one: it is gone either way.
	for _, req := range []*kvferrypb.AdmitRequest{next(4), {Segments: []*kvferrypb.Segment{segment("r", "", 10_000)}}} {
		staged = stage(e, next(3))
		if step, err := e.Admit(e.ctx(), req); err == nil {
			if step.GetStep() == staged.GetStep() {
				t.Errorf("step %d is the staged one", step.GetStep())
			}
			if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
				t.Fatal(err)
			}
		}
		code(t, "commit of a dropped step", commit(staged.GetStep()), kvferrypb.Failure_NOT_FOUND)
	}
	// Changed under its feet: an equal step is not the staged one.
	staged = stage(e, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 1)}})
	if _, err := e.Reset(e.ctx(), &kvferrypb.ResetRequest{Request: "r", Free: true}); err != nil {
		t.Fatal(err)
	}
	delete(b, "r")
	step, err = e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 1)}})
	if err != nil || step.GetStep() == staged.GetStep() {
		t.Errorf("%v, %v", step, err)
	}
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Reset(e.ctx(), &kvferrypb.ResetRequest{Request: "r", Free: true}); err != nil {
		t.Fatal(err)
	}

	// Abandoned, aborted, and left behind by a session that ends.
	staged = stage(e, next(3))
	if _, err := e.Unstage(e.ctx(), &kvferrypb.UnstageRequest{}); err != nil {
		t.Fatal(err)
	}
	code(t, "commit of an unstaged step", commit(staged.GetStep()), kvferrypb.Failure_NOT_FOUND)
	if _, err := e.Unstage(e.ctx(), &kvferrypb.UnstageRequest{}); err != nil {
		t.Errorf("unstage of nothing: %v", err)
	}
	staged = stage(e, next(3))
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: staged.GetStep()}); err != nil {
		t.Fatal(err)
	}
	if now := n.Counts(); now.Steps != 1 { // the other session's
		t.Errorf("%d steps are left", now.Steps)
	}
	stage(e, next(3))
	if held.GetOwned() == 0 {
		t.Error("nothing was held: the test shows nothing")
	}
	if err := errors.Join(e.Close(), other.Close()); err != nil {
		t.Fatal(err)
	}
	awaitAllFree(t, n)
	if now := n.Counts(); now.Steps != 0 || now.Requests != 0 {
		t.Errorf("%+v", now)
	}
}

// TestRetentionTravels: a reader takes over what was released, and every byte
// that is held is right on both sides.
func TestRetentionTravels(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	if _, err := p.Ingest(p.ctx(), &kvferrypb.IngestRequest{
		Request: "r", Retention: []*kvferrypb.IngestRequest_Retention{{Budget: 24, Prefix: 5}},
	}); err != nil {
		t.Fatal(err)
	}
	d.ingest("r")
	b := make(book)
	for i, chunk := range []int{20, 15, 30, 9, 1} {
		b.must(p, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", chunk)}})
		b.verify(p, "r", "main")
		final := i == 4
		p.publish("r", final, to("decode"))
		least := len(b["r"]["main"])
		if final {
			least = 0
		}
		if res, err := d.retrieve("r", "", least, deadline); err != nil || res.GetReadiness() != kvferrypb.Readiness_READY {
			t.Fatalf("chunk %d: %v, %v", i, res, err)
		}
		b.verify(d, "r", "main")
	}
	for _, e := range []*engine{p, d} {
		got, err := e.read("r", "main")
		if err != nil {
			t.Fatal(err)
		}
		gone := 0
		for _, m := range got["main"] {
			if m == released {
				gone++
			}
		}
		kept := len(got["main"]) - gone
		if e == p && kept >= 32 { // the reader keeps what it has, until there is a gap behind it
			t.Errorf("%d tokens are kept of a budget of 24", kept)
		}
		if kept < 24 || gone == 0 || gone%8 != 0 || slices.Contains(got["main"][:8], released) {
			t.Errorf("%d tokens are kept, %d released: %v", kept, gone, got["main"])
		}
	}
	// The reader goes on where the owner was.
	b.must(d, &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "", 12)}})
	b.verify(d, "r", "main")
	p.remove("r")
	d.remove("r")
	awaitAllFree(t, prefill)
	awaitAllFree(t, decode)
}

// TestOneCallAStep: of the calls that end one step one succeeds, and nothing is
// left of it.
func TestOneCallAStep(t *testing.T) {
	n := startNode(t, "one", nil)
	e := openEngine(t, n)
	e.ingest("r")
	for range 30 {
		req := &kvferrypb.AdmitRequest{Plan: true, PreForks: forks("", "a"), Segments: []*kvferrypb.Segment{segment("r", "", 9), segment("r", "a", 1)}, PostForks: forks("a", "b")}
		step, err := e.Admit(e.ctx(), req)
		if err != nil {
			t.Fatal(err)
		}
		calls := []func() error{
			func() error { _, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); return err },
			func() error { _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step.GetStep()}); return err },
			func() error { _, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); return err },
			func() error {
				_, err := e.ReadKV(e.ctx(), &kvferrypb.ReadKVRequest{Step: step.GetStep(), Label: "a"})
				return err
			},
			func() error { _, err := e.Plan(e.ctx(), &kvferrypb.PlanRequest{Step: step.GetStep()}); return err },
		}
		errs := make([]error, len(calls))
		var work sync.WaitGroup
		for i, call := range calls {
			work.Go(func() { errs[i] = call() })
		}
		work.Wait()
		ended := 0
		for i, err := range errs {
			switch {
			case err == nil && i < 3:
				ended++
			case err != nil:
				code(t, fmt.Sprintf("call %d", i), err, kvferrypb.Failure_NOT_FOUND)
			}
		}
		if ended != 1 {
			t.Fatalf("%d calls have ended the step: %v", ended, errs)
		}
		if c := n.Counts(); c.Steps != 0 {
			t.Fatalf("%d steps are left", c.Steps)
		}
		if _, err := e.Reset(e.ctx(), &kvferrypb.ResetRequest{Request: "r", Free: true}); err != nil {
			t.Fatal(err)
		}
	}
	e.remove("r")
	awaitAllFree(t, n)
}

// TestHostileSteps: what is asked of steps is refused by name, and nothing is
// held then.
func TestHostileSteps(t *testing.T) {
	n := startNode(t, "one", nil)
	e, other := openEngine(t, n), openEngine(t, n)
	e.ingest("r")
	e.ingest("busy")
	other.ingest("theirs")
	e.write("r", 12)
	running, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("busy", "", 3)}})
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := other.Admit(other.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("theirs", "", 3)}})
	if err != nil {
		t.Fatal(err)
	}
	many := func(n int) (list []*kvferrypb.Fork) {
		for i := range n {
			list = append(list, &kvferrypb.Fork{To: fmt.Sprintf("l%d", i)})
		}
		return list
	}
	rows := func(names ...string) *kvferrypb.AdmitRequest_Rows {
		return &kvferrypb.AdmitRequest_Rows{Requests: names}
	}
	lease := func(slot, tokens uint32) *kvferrypb.AdmitRequest_Lease {
		return &kvferrypb.AdmitRequest_Lease{Slot: slot, Tokens: tokens}
	}
	one := []*kvferrypb.Segment{segment("r", "", 1)}
	before := n.Counts()
	const (
		invalid  = kvferrypb.Failure_INVALID
		notFound = kvferrypb.Failure_NOT_FOUND
		foreignC = kvferrypb.Failure_ALREADY_EXISTS
		full     = kvferrypb.Failure_RESOURCE_EXHAUSTED
	)
	for name, tt := range map[string]struct {
		req  *kvferrypb.AdmitRequest
		want kvferrypb.Failure_Code
		text string
	}{
		"a fork to nothing":           {&kvferrypb.AdmitRequest{Segments: one, PreForks: forks("", "")}, invalid, "label"},
		"a fork onto itself":          {&kvferrypb.AdmitRequest{Segments: one, PostForks: forks("", "main")}, invalid, "onto itself"},
		"a fork to a long label":      {&kvferrypb.AdmitRequest{Segments: one, PostForks: forks("", strings.Repeat("x", 300))}, invalid, "300 bytes"},
		"a fork to an escape":         {&kvferrypb.AdmitRequest{Segments: one, PreForks: forks("", "a\x1b[2J")}, invalid, "control"},
		"a fork of another's request": {&kvferrypb.AdmitRequest{Segments: one, PreForks: forks("", "cfg"), Rows: rows("r", "theirs")}, foreignC, "another session"},
		"a row of nobody":             {&kvferrypb.AdmitRequest{Segments: one, PreForks: forks("", "cfg"), Rows: rows("nobody")}, notFound, "nobody"},
		"a row without a name":        {&kvferrypb.AdmitRequest{Segments: one, Rows: rows("")}, notFound, `""`},
		"a fork of a busy request":    {&kvferrypb.AdmitRequest{Rows: rows("busy"), PreForks: forks("", "cfg")}, kvferrypb.Failure_BUSY, "in flight"},
		"five thousand forks":         {&kvferrypb.AdmitRequest{Segments: one, PostForks: many(5000)}, invalid, "5000 forks of 1 requests"},
		"forks times rows":            {&kvferrypb.AdmitRequest{Segments: one, PreForks: many(100), Rows: rows(slices.Repeat([]string{"r"}, 100)...)}, invalid, "100 forks of 100 requests"},
		"more labels than there are":  {&kvferrypb.AdmitRequest{Segments: one, PostForks: many(300)}, full, "labels"},
		"forks that do not fit":       {&kvferrypb.AdmitRequest{Segments: one, PostForks: many(60)}, full, "pages short"},
		"a slot beyond":               {&kvferrypb.AdmitRequest{Segments: one, Lease: lease(1<<16, 1)}, invalid, "slot 65536"},
		"a huge slot":                 {&kvferrypb.AdmitRequest{Segments: one, Lease: lease(1<<32-1, 1)}, invalid, "slot"},
		"a huge lease":                {&kvferrypb.AdmitRequest{Segments: one, Lease: lease(0, 1<<32-1)}, invalid, "lease of 4294967295"},
		"a lease for two labels":      {&kvferrypb.AdmitRequest{Segments: append(one, segment("r", "cfg", 1)), Lease: lease(0, 1<<20)}, invalid, "for 2 labels"},
		"a long walk":                 {&kvferrypb.AdmitRequest{Segments: one, Walk: strings.Repeat("x", 300)}, invalid, "walk"},
		"combined from nothing":       {&kvferrypb.AdmitRequest{Segments: one, Combined: []*kvferrypb.Combined{{Label: "c"}}}, invalid, "no sources"},
		"combined under nothing":      {&kvferrypb.AdmitRequest{Segments: one, Combined: []*kvferrypb.Combined{{Sources: []string{"main"}}}}, invalid, "combined label"},
		"combined twice":              {&kvferrypb.AdmitRequest{Segments: one, Combined: []*kvferrypb.Combined{{Label: "c", Sources: []string{"main", "main"}}}}, invalid, "used twice"},
		"another's segment":           {&kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("theirs", "", 1)}}, foreignC, "another session"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, plan := range []bool{false, true} {
				tt.req.Plan = plan
				_, admit := e.Admit(e.ctx(), tt.req)
				_, stage := e.Stage(e.ctx(), tt.req)
				for _, err := range []error{admit, stage} {
					if f := failureOf(t, err); f.GetCode() != tt.want || !strings.Contains(f.GetMessage(), tt.text) {
						t.Errorf("%v %q, want %v with %q", f.GetCode(), f.GetMessage(), tt.want, tt.text)
					}
				}
			}
		})
	}
	ingest := func(keep ...*kvferrypb.IngestRequest_Retention) error {
		_, err := e.Ingest(e.ctx(), &kvferrypb.IngestRequest{Request: "kept", Retention: keep})
		return err
	}
	code(t, "a prefix beyond the budget", ingest(&kvferrypb.IngestRequest_Retention{Budget: 3, Prefix: 4}), invalid)
	code(t, "a huge budget", ingest(&kvferrypb.IngestRequest_Retention{Budget: 1<<32 - 1}), invalid)
	code(t, "two retentions of one label", ingest(&kvferrypb.IngestRequest_Retention{Budget: 3}, &kvferrypb.IngestRequest_Retention{Budget: 3, Label: "main"}), invalid)
	code(t, "retention of a bad label", ingest(&kvferrypb.IngestRequest_Retention{Budget: 3, Label: "a\nb"}), invalid)
	for _, step := range []uint64{0, foreign.GetStep(), 1 << 63} {
		_, err := e.Plan(e.ctx(), &kvferrypb.PlanRequest{Step: step})
		code(t, "plan of another's step", err, notFound)
		_, err = e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step})
		code(t, "commit of another's step", err, notFound)
		_, err = e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: step})
		code(t, "abort of another's step", err, notFound)
	}
	if now := n.Counts(); now.Steps != before.Steps || now.Requests != before.Requests || now.Faults != 0 {
		t.Errorf("%+v, before %+v", now, before)
	}
	if _, err := e.Abort(e.ctx(), &kvferrypb.AbortRequest{Step: running.GetStep()}); err != nil {
		t.Error(err)
	}
	if err := errors.Join(e.Close(), other.Close()); err != nil {
		t.Fatal(err)
	}
	awaitAllFree(t, n)
}

// TestSessionEndsWithForks: a session that is lost amid a step leaves nothing,
// whichever copies were made.
func TestSessionEndsWithForks(t *testing.T) {
	n := startNode(t, "one", nil, shortGrace)
	e := openEngine(t, n)
	e.ingest("r")
	e.write("r", 20)
	if _, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("r", "cfg", 9)}, PreForks: forks("", "cfg"), PostForks: forks("cfg", "late")}); err != nil {
		t.Fatal(err)
	}
	e.ingest("s")
	if _, err := e.Stage(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment("s", "", 9)}}); err != nil {
		t.Fatal(err)
	}
	if c := n.Counts(); c.Steps != 2 || c.Owned < 9 {
		t.Fatalf("%+v: the test shows nothing", c)
	}
	e.hangUp()
	await(t, "the session to end", func(context.Context) error {
		if c := n.Counts(); c.Steps != 0 || c.Requests != 0 || c.Owned != 0 || c.Faults != 0 {
			return fmt.Errorf("%+v", c)
		}
		return nil
	})
}

// BenchmarkEngineStep256 is what an engine waits for in one decode step of 256
// requests of 4,096 tokens: two calls, the plan in the first one's answer.
func BenchmarkEngineStep256(b *testing.B) {
	const requests, tokens = 256, 4096
	n := startNode(b, "one", nil, [2]string{"arena.pages", "70000"}, [2]string{"arena.page_size", "16"}, [2]string{"arena.layers", "1"}, [2]string{"arena.heads", "1"})
	e := openEngine(b, n)
	req := &kvferrypb.AdmitRequest{Plan: true}
	for i := range requests {
		r := fmt.Sprintf("request-%d", i)
		e.ingest(r)
		step, err := e.Admit(e.ctx(), &kvferrypb.AdmitRequest{Segments: []*kvferrypb.Segment{segment(r, "", tokens)}})
		if err != nil {
			b.Fatal(err)
		}
		if _, err := e.Commit(e.ctx(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
			b.Fatal(err)
		}
		req.Segments = append(req.Segments, segment(r, "", 1))
	}
	req.Discard = true // the streams stay as they are
	b.ReportAllocs()
	for b.Loop() {
		step, err := e.Admit(b.Context(), req)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := e.Commit(b.Context(), &kvferrypb.CommitRequest{Step: step.GetStep()}); err != nil {
			b.Fatal(err)
		}
	}
}

// A stream has at most arena.max_seq_len tokens.
func TestMaxSeqLen(t *testing.T) {
	n := startNode(t, "one", nil, [2]string{"arena.max_seq_len", "20"})
	e := openEngine(t, n)
	e.ingest("r")
	e.write("r", 20)
	if err := e.tryWrite("r", 1); client.CodeOf(err) != kvferrypb.Failure_RESOURCE_EXHAUSTED || !strings.Contains(err.Error(), "at most 20 tokens a stream") {
		t.Errorf("one more: %v", err)
	}
}
