package replay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// dying kills a node in the middle of the calls that when chooses, and starts its
// next life a moment later, once.
type dying struct {
	cluster *fakeCluster
	pause   time.Duration
	when    func(fakeCall) bool

	once sync.Once
	work sync.WaitGroup
	back atomic.Bool
	err  error // valid when work is done
}

func (d *dying) hook(ctx context.Context, call fakeCall) error {
	if !d.when(call) {
		return nil
	}
	d.once.Do(func() {
		d.work.Go(func() {
			call.node.kill()
			time.Sleep(d.pause) // a process takes its time to come up
			d.err = d.cluster.restart(call.node.name)
			d.back.Store(true)
		})
	})
	<-ctx.Done() // no answer ever comes
	return context.Cause(ctx)
}

// wait waits for the end of the restart.
func (d *dying) wait(t *testing.T) {
	t.Helper()
	d.work.Wait()
	if d.err != nil {
		t.Fatal(d.err)
	}
	if !d.back.Load() {
		t.Fatal("the node did not die")
	}
}

// checkLives checks what is true of every run in which nodes died, whatever
// they died of.
func checkLives(t *testing.T, c *fakeCluster, r *Report) {
	t.Helper()
	if r.WrongBytes != 0 || r.Early != 0 || r.VerifiedBytes != r.ReadyBytes {
		t.Errorf("bytes: %+v", r)
	}
	if r.Ready+r.Failed != r.Requests || r.Ready == 0 {
		t.Errorf("%d ready and %d failed of %d requests", r.Ready, r.Failed, r.Requests)
	}
	if err := r.Unexplained(); err != nil || !r.Explained {
		t.Errorf("unexplained: %v; failures %v", err, r.Failures)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.mapped) > 0 {
		t.Errorf("still mapped when the next life was opened: %v", c.mapped)
	}
	for _, n := range c.nodes {
		if n.dead {
			continue
		}
		if len(n.free) != n.geometry.Layout.Pages-1 || len(n.requests) != 0 || len(n.steps) != 0 {
			t.Errorf("node %s has %d of %d pages free, %d requests, %d steps", n.name, len(n.free), n.geometry.Layout.Pages-1, len(n.requests), len(n.steps))
		}
		for ; n.former != nil; n = n.former {
			for i, r := range n.former.regions {
				if i >= len(n.atOpen) {
					t.Errorf("life %d of %s was not opened", n.incarnation, n.name)
				} else if !bytes.Equal(r.Bytes(), n.atOpen[i]) {
					t.Errorf("rank %d of the dead life %d of %s was written to after life %d was opened", i, n.former.incarnation, n.name, n.incarnation)
				}
			}
		}
	}
}

func node(t *testing.T, r *Report, name string) NodeReport {
	t.Helper()
	i := slices.IndexFunc(r.Nodes, func(n NodeReport) bool { return n.Node == name })
	if i < 0 {
		t.Fatalf("no node %s in %+v", name, r.Nodes)
	}
	return r.Nodes[i]
}

// A node may die in every phase of a request, before or after it has done what
// it was asked for: that request ends typed and in time, the engine is opened
// anew, and later requests are given to the new life.
func TestNodeDiesInEveryPhase(t *testing.T) {
	calls := map[string][]struct {
		method string
		nth    int
	}{
		// Of two requests at a time, with three chunks each.
		"prefill-0": {{"Ingest", 1}, {"Admit", 1}, {"Commit", 0}, {"Commit", 2}, {"Commit", 5}, {"Remove", 1}},
		"decode-0": {
			{"Ingest", 1},
			{"AdmitRetrieve", 1}, // part of it
			{"AdmitRetrieve", 3}, // all of it
			{"Admit", 1},
			{"Abort", 1}, // it is looked at
			{"Commit", 1},
			{"Remove", 1}, // decoded, done
			{"AdmitRetrieve", 0},
			{"Ingest", 0}, // nothing was ready yet
		},
	}
	for name, all := range calls {
		for _, call := range all {
			for _, after := range []bool{false, true} {
				when := "before"
				if after {
					when = "after"
				}
				t.Run(fmt.Sprintf("%s/%s %s %d", name, when, call.method, call.nth), func(t *testing.T) {
					t.Parallel()
					o, c := testOptions(t, lies{}, 1, 1, 1)
					o.Requests = slices.Repeat([]Request{{Input: 60, Output: 3}}, 6)
					o.Concurrency, o.NodeWait, o.Settle = 2, time.Minute, time.Minute
					c.hold = 500 * time.Millisecond // of what its reader has left
					d := &dying{cluster: c, pause: 10 * time.Millisecond, when: func(f fakeCall) bool {
						return f.node.name == name && f.node.incarnation == 1 && f.method == call.method && f.nth == call.nth && f.after == after
					}}
					c.hook = d.hook
					r, err := Run(t.Context(), o)
					if err != nil {
						t.Fatal(err)
					}
					d.wait(t)
					checkLives(t, c, r)
					if r.Elapsed() > o.Timeout/2 {
						t.Errorf("it took %v: somebody waited for a dead node", r.Elapsed())
					}
					if n := node(t, r, name); n.Lives != 2 || n.Losses != 1 {
						t.Errorf("%+v, want two lives and one loss", n)
					}
					// Two at a time were hit at most.
					if r.Failed > 2 || len(c.node(name).ingested) == 0 {
						t.Errorf("%d requests failed, %d were given to the new life: %+v", r.Failed, len(c.node(name).ingested), r.Failures)
					}
				})
			}
		}
	}
}

// Whoever has everything by the time that the publisher dies is ready.
func TestReaderIsReadyThoughItsPublisherDied(t *testing.T) {
	o, c := testOptions(t, lies{}, 1, 1, 1)
	o.Requests = slices.Repeat([]Request{{Input: 60, Output: 3}}, 3)
	o.Concurrency = 1
	read := make(chan struct{})
	d := &dying{cluster: c}
	c.hook = func(ctx context.Context, call fakeCall) error {
		if call.node.name == "decode-0" && call.method == "Remove" && call.after && call.nth == 0 {
			close(read)
		}
		return d.hook(ctx, call)
	}
	d.when = func(call fakeCall) bool {
		if call.node.name != "prefill-0" || call.node.incarnation != 1 || call.method != "Remove" {
			return false
		}
		<-read
		return true
	}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	d.wait(t)
	checkLives(t, c, r)
	if !r.OK || r.Lost != 0 || node(t, r, "prefill-0").Losses != 1 {
		t.Errorf("want all ready and one loss: %+v", r)
	}
}

// A publisher may die when it has published everything and nobody has heard of
// it: its reader does not wait for what cannot come.
func TestNobodyWaitsForWhatDiedUnheard(t *testing.T) {
	o, c := testOptions(t, lies{}, 1, 1, 1)
	o.Requests = slices.Repeat([]Request{{Input: 60, Output: 3}}, 3)
	o.Concurrency, o.NodeWait = 1, time.Minute // and the first one has no reference
	removed := make(chan struct{})
	d := &dying{cluster: c, pause: 100 * time.Millisecond}
	c.hook = func(ctx context.Context, call fakeCall) error {
		first := call.nth == 0 && call.node.incarnation == 1
		switch {
		case first && call.node.name == "prefill-0" && call.method == "Remove" && call.after:
			close(removed)
		case first && call.node.name == "decode-0" && call.method == "AdmitRetrieve" && !call.after:
			<-removed
			d.work.Go(func() {
				// The answer to Remove is on its way: the publisher is to have it first.
				time.Sleep(d.pause)
				c.node("prefill-0").kill()
				d.err = c.restart("prefill-0")
				d.back.Store(true)
			})
			<-ctx.Done() // it hears nothing
			return context.Cause(ctx)
		}
		return nil
	}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	d.wait(t)
	checkLives(t, c, r)
	if r.Ready != 2 || r.Lost != 1 || r.Elapsed() > o.Timeout/2 {
		t.Errorf("want one lost at once and two ready: %v, %+v", r.Elapsed(), r)
	}
}

// What nobody reads any more is given back when its hold is over, and the run
// waits for that.
func TestWhatADeadReaderLeavesRunsOut(t *testing.T) {
	o, c := testOptions(t, lies{}, 1, 1, 1)
	o.Requests = slices.Repeat([]Request{{Input: 200, Output: 3}}, 3) // two fit beside each other
	c.hold = 200 * time.Millisecond
	removed := make(chan struct{})
	d := &dying{cluster: c}
	c.hook = func(ctx context.Context, call fakeCall) error {
		if call.node.name == "prefill-0" && call.method == "Remove" && call.after && call.nth == 0 {
			close(removed)
		}
		return d.hook(ctx, call)
	}
	d.when = func(call fakeCall) bool {
		if call.node.name != "decode-0" || call.node.incarnation != 1 || call.method != "AdmitRetrieve" {
			return false
		}
		<-removed
		return true
	}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	d.wait(t)
	checkLives(t, c, r)
	if r.Failed == 0 || r.Releases["expired"] == 0 {
		t.Errorf("want failed requests, and their publications expired: %+v", r)
	}
}

// What is left on a node is told, and is no success.
func TestWhatIsLeftIsTold(t *testing.T) {
	o, c := testOptions(t, lies{}, 1, 1, 1)
	o.Requests = []Request{{Input: 60}, {Input: 60}}
	o.Settle = 100 * time.Millisecond
	c.hook = func(_ context.Context, call fakeCall) error {
		if call.method == "Remove" && call.node.name == "decode-0" && !call.after && call.nth == 0 {
			unlock := call.node.lock()
			call.node.requests["replay-of-somebody-else"] = &fakeRequest{streams: map[string]*fakeStream{"main": {}}}
			call.node.requests[call.request+"-left"] = &fakeRequest{streams: map[string]*fakeStream{"main": {}}}
			unlock()
		}
		return nil
	}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	left := node(t, r, "decode-0").Left
	if r.Ready != 2 || r.OK || r.Explained || len(left) != 1 || !strings.Contains(left[0], "-left: 0 pages of label main") {
		t.Errorf("left %q: %+v", left, r)
	}
	var out bytes.Buffer
	if err := r.WriteTable(&out); err != nil || !strings.Contains(out.String(), "left on node decode-0") || !strings.Contains(fmt.Sprint(r.Unexplained()), "left on node decode-0") {
		t.Errorf("%v, %v:\n%s", err, r.Unexplained(), out.String())
	}
}

// A life that is worked on is not closed, and the next one is opened when it is.
func TestOneLifeAtATime(t *testing.T) {
	o, c := testOptions(t, lies{}, 1, 1, 1)
	engines, k, err := openEngines(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	o, err = o.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	r := newRun(o, engines, k, func(err error) { t.Error(err) })
	letGo := r.keepEngines(t.Context())
	defer letGo()
	e := r.prefill[0]
	old, dead := e.take(), c.node("prefill-0")
	if old == nil {
		t.Fatal("no life")
	}
	if err := c.restart("prefill-0"); err != nil {
		t.Fatal(err)
	}
	<-old.ctx.Done()
	if code := codeOf(context.Cause(old.ctx)); code != CodeNodeLost {
		t.Errorf("lost with %s, want %s", code, CodeNodeLost)
	}
	<-r.admission.changed // it takes no requests
	if l := e.take(); l != nil {
		t.Fatalf("the engine gives %s away while %s is worked on", l.name(), old.name())
	}
	n := old.ranks[0].arena.write(newPattern("r", "main", 0), 0, []place{{1, 0}}) // it is mapped
	if n == 0 || mappings(dead) != 2 {
		t.Errorf("the old arena has %d mappings, want the node's and the engine's", mappings(dead))
	}
	old.giveBack()
	<-r.admission.changed
	l := e.take()
	if l == nil {
		t.Fatal("the next life was not opened")
	}
	defer l.giveBack()
	if l.name().Incarnation != 2 || mappings(dead) != 1 || l.pages.arena != smallLayout.Pages-1 || l.pages.taken != 0 {
		t.Errorf("life %s with %d of %d pages taken, %d mappings of the former one", l.name(), l.pages.taken, l.pages.arena, mappings(dead))
	}
}

// With no node of a role a request waits for one, but not for ever, and then
// neither does the rest.
func TestNoNode(t *testing.T) {
	o, c := testOptions(t, lies{}, 2, 1, 1)
	o.Requests = slices.Repeat([]Request{{Input: 60}}, 50)
	o.Concurrency, o.NodeWait, o.Loop = 1, 100*time.Millisecond, time.Hour
	var once sync.Once
	c.hook = func(_ context.Context, call fakeCall) error {
		if call.node.name == "decode-0" && call.nth == 3 {
			once.Do(call.node.kill)
		}
		return nil
	}
	begin := time.Now()
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(r.Failures, func(f Failure) bool { return f.Code == CodeNoNode })
	if i < 0 || r.Failures[i].Count != 2*len(o.Requests)-r.Ready-1 || r.Ready+r.Failed != r.Requests || r.Requests != 2*len(o.Requests) {
		t.Fatalf("want one request that is lost, and no node for the others, twice: %+v", r)
	}
	if took := time.Since(begin); took > o.Timeout {
		t.Errorf("it took %v", took)
	}
	if text := r.Failures[i].Examples[0]; !strings.Contains(text, "no decode node") || !strings.Contains(text, "decode-0") && !strings.Contains(text, o.Decode[0]) {
		t.Errorf("failure %q does not say which node", text)
	}
	if err := r.Unexplained(); err == nil || !strings.Contains(err.Error(), CodeNoNode) {
		t.Errorf("Unexplained() = %v", err)
	}
}

// A node that is down is passed over.
func TestOthersStepIn(t *testing.T) {
	o, c := testOptions(t, lies{}, 2, 2, 1)
	o.Concurrency = 2
	var once sync.Once
	c.hook = func(_ context.Context, call fakeCall) error {
		if call.node.name == "prefill-1" && call.method == "Ingest" && call.nth == 1 && !call.after {
			once.Do(call.node.kill)
		}
		return nil
	}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkLives(t, c, r)
	if n := node(t, r, "prefill-1"); r.Failed == 0 || r.Failed > 2 || n.Lives != 1 || n.Losses != 1 || node(t, r, "prefill-0").Requests < len(o.Requests)/2 {
		t.Errorf("want one or two failed requests, the rest on the other node: %+v", r)
	}
}

// A node that drains gets nothing new; what runs there goes on.
func TestNodeDrains(t *testing.T) {
	o, c := testOptions(t, lies{}, 1, 2, 1)
	o.Requests = slices.Repeat([]Request{{Input: 60, Output: 3}}, 12)
	o.Concurrency = 2
	var drains, open atomic.Bool
	c.hook = func(_ context.Context, call fakeCall) error {
		if call.node.name != "decode-1" || call.after {
			return nil
		}
		switch call.method {
		case "AdmitRetrieve":
			if call.nth == 3 { // of the second request here, which knows of its publication
				drains.Store(true)
			}
			if call.nth > 3 && drains.Load() {
				return refusal(kvferrypb.Failure_DRAINING, "drains")
			}
		case "Open":
			if drains.Load() {
				return refusal(kvferrypb.Failure_DRAINING, "drains")
			}
		case "Close":
			open.Store(true)
		}
		return nil
	}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkLives(t, c, r)
	if n := node(t, r, "decode-1"); n.Losses != 1 || n.Ready < 2 || r.Failed == 0 || r.Failed > 2 || r.Failures[0].Code != "DRAINING" || !open.Load() {
		t.Errorf("session closed %v; want one or two requests refused by a node that drains: %+v", open.Load(), r)
	}
}

// A loop goes through the trace again under new names: a fake node refuses one
// that it has seen.
func TestLoop(t *testing.T) {
	o, c := testOptions(t, lies{}, 2, 2, 1)
	// Long enough for a second time through it on a slow machine, and the pauses
	// leave it little to do.
	o.Requests, o.Loop, o.Pause = o.Requests[:3], 3*time.Second, 200*time.Millisecond
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	checkLives(t, c, r)
	if !r.OK || r.Requests <= len(o.Requests) || r.Ready != r.Requests || r.VerifiedBytes != r.Bytes || r.Elapsed() < o.Loop || r.Elapsed() > 20*o.Loop {
		t.Errorf("want more than %d requests within a moment after %v: %+v", len(o.Requests), o.Loop, r)
	}
	o.Requests = []Request{{Input: 5000}}
	o.Loop = time.Hour
	if r, err := Run(t.Context(), o); err != nil || r.Requests != 1 || r.Failures[0].Code != CodeDoesNotFit {
		t.Errorf("%v: a loop in which nothing can start: %+v", err, r)
	}
}

// A node that comes back as another one ends the run: nothing that it says
// could be compared.
func TestNodeComesBackAsAnother(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*fakeNode)
		text   string
	}{
		"another geometry":   {func(n *fakeNode) { n.geometry.Layout.HeadDim /= 2 }, "head"},
		"another name":       {func(n *fakeNode) { n.name = "somebody" }, "it was decode-0"},
		"an older life":      {func(n *fakeNode) { n.incarnation -= 2 }, "must grow"},
		"an arena too small": {func(n *fakeNode) { n.geometry.Layout.Pages *= 2 }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, c := testOptions(t, lies{}, 1, 1, 1)
			o.NodeWait, o.Settle = time.Minute, time.Millisecond
			if tt.text == "" { // it does not come back at all
				o.NodeWait = 300 * time.Millisecond
			}
			n := c.node("decode-0")
			n.incarnation = 2
			d := &dying{cluster: c, when: func(call fakeCall) bool {
				return call.node.name == "decode-0" && call.method == "Ingest" && call.nth == 2 && call.node.former == nil
			}}
			var once sync.Once
			c.hook = func(ctx context.Context, call fakeCall) error {
				if call.method == "Open" && call.node.former != nil && !call.after {
					once.Do(func() { tt.change(call.node) })
				}
				return d.hook(ctx, call)
			}
			r, err := Run(t.Context(), o)
			d.wait(t)
			if r == nil || r.OK || tt.text != "" && (err == nil || !strings.Contains(err.Error(), tt.text)) {
				t.Errorf("Run = %v, want it to name %q: %+v", err, tt.text, r)
			}
			if tt.text == "" && (err != nil || !slices.ContainsFunc(r.Failures, func(f Failure) bool { return f.Code == CodeNoNode })) {
				t.Errorf("Run = %v, want requests without a node: %+v", err, r.Failures)
			}
		})
	}
}

// Only a node that died explains failures, and only some of them.
func TestUnexplained(t *testing.T) {
	lost := []NodeReport{{Node: "n", Losses: 1}}
	failed := func(code string) []Failure {
		return []Failure{{Code: code, Count: 1, Explained: explanation(code)}}
	}
	for name, tt := range map[string]struct {
		report Report
		text   string
	}{
		"nothing failed":    {Report{Requests: 1, Ready: 1}, ""},
		"its owner died":    {Report{Requests: 2, Ready: 1, Failed: 1, Nodes: lost, Failures: failed("OWNER_LOST")}, ""},
		"nobody died":       {Report{Requests: 2, Ready: 1, Failed: 1, Nodes: []NodeReport{{Node: "n"}}, Failures: failed("OWNER_LOST")}, "no node was lost"},
		"a bug":             {Report{Requests: 2, Ready: 1, Failed: 1, Nodes: lost, Failures: failed("INTERNAL")}, "INTERNAL"},
		"a hang":            {Report{Requests: 2, Ready: 1, Failed: 1, Nodes: lost, Failures: failed(CodeTimeout)}, CodeTimeout},
		"a wrong answer":    {Report{Requests: 2, Ready: 1, Failed: 1, Nodes: lost, Failures: failed(CodeWrongAnswer)}, CodeWrongAnswer},
		"an unknown error":  {Report{Requests: 2, Ready: 1, Failed: 1, Nodes: lost, Failures: failed(CodeOther)}, CodeOther},
		"wrong bytes":       {Report{Requests: 1, Ready: 1, Nodes: lost, WrongBytes: 1}, "1 wrong"},
		"too few bytes":     {Report{Requests: 1, Ready: 1, Nodes: lost, ReadyBytes: 2, VerifiedBytes: 1}, "1 of 2 bytes"},
		"ready too early":   {Report{Requests: 1, Ready: 1, Nodes: lost, Early: 1}, "too early"},
		"one has no end":    {Report{Requests: 2, Ready: 1, Nodes: lost}, "not started"},
		"nothing was ready": {Report{Requests: 1, Failed: 1, Nodes: lost, Failures: failed("OWNER_LOST")}, "no request was ready"},
		"a leak":            {Report{Requests: 1, Ready: 1, Nodes: []NodeReport{{Node: "n", Losses: 1, Left: []string{"a page"}}}}, "a page"},
	} {
		err := tt.report.Unexplained()
		if (tt.text == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: Unexplained() = %v, want %q", name, err, tt.text)
		}
	}
	// Codes of the nodes that are none of a dying one's doing.
	for _, code := range []kvferrypb.Failure_Code{
		kvferrypb.Failure_UNSPECIFIED, kvferrypb.Failure_DIVERGED, kvferrypb.Failure_INCOMPATIBLE, kvferrypb.Failure_RESOURCE_EXHAUSTED,
		kvferrypb.Failure_ALREADY_EXISTS, kvferrypb.Failure_BUSY, kvferrypb.Failure_INVALID, kvferrypb.Failure_MALFORMED, kvferrypb.Failure_INTERNAL,
		kvferrypb.Failure_CANCELLED, kvferrypb.Failure_OFFLOADING,
	} {
		if why := explanation(code.String()); why != "" {
			t.Errorf("%s is explained: %s", code, why)
		}
	}
}

// Of two failures the one that nothing explains counts, and none is a mere
// consequence of the other.
func TestOutcome(t *testing.T) {
	lost, bug := failf(CodeNodeLost, "lost"), failf("INTERNAL", "bug")
	told := failf("OWNER_LOST", "told")
	stopped := fmt.Errorf("canceled: %w", errOtherSide)
	for name, tt := range map[string]struct{ prefill, decode, want error }{
		"both are well":                           {nil, nil, nil},
		"the publisher died after all was read":   {lost, nil, nil},
		"the publisher died, the reader was told": {lost, told, told},
		"the publisher died before it published":  {lost, stopped, lost},
		"the reader died":                         {stopped, lost, lost},
		"a bug of the publisher's":                {bug, told, bug},
		"a bug of the publisher's alone":          {bug, nil, bug},
		"a bug of the reader's":                   {lost, bug, bug},
		"what was not read was not released":      {failf(CodeNotReleased, "not released"), bug, bug},
	} {
		if got := (&job{}).outcome(tt.prefill, tt.decode); !errors.Is(got, tt.want) || (got == nil) != (tt.want == nil) {
			t.Errorf("%s: %v, want %v", name, got, tt.want)
		}
	}
}
