package replay

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/id"
	"github.com/kvferry/kvferry/internal/page"
)

// hostOptions are those of a run of two labels over one pair of nodes whose
// arenas hold one request and a half.
func hostOptions(t *testing.T, l lies, host int) (Options, *fakeCluster) {
	t.Helper()
	c := newFakeCluster(t, l)
	c.host = host
	layout := smallLayout
	layout.Pages = 13
	o := Options{
		Prefill: []string{c.start(t, "prefill", layout, 1)}, Decode: []string{c.start(t, "decode", layout, 1)},
		Labels: 2, Concurrency: 6, ChunkTokens: 16, DecodeSteps: 4,
		Pause: time.Millisecond, StepPause: 10 * time.Millisecond, Timeout: time.Minute,
	}
	for range 12 {
		o.Requests = append(o.Requests, Request{Input: 27, Output: 4}) // 8 pages with both labels
	}
	return o, c
}

// More requests run than the arena holds: they go to the host and come back, and
// every byte is as it was.
func TestReplayThroughTheHost(t *testing.T) {
	o, c := hostOptions(t, lies{}, 40)
	r, err := Run(t.Context(), o)
	if err != nil || !r.OK {
		t.Fatalf("%v: %+v", err, r)
	}
	decode := c.node("decode")
	if r.Offloading == 0 || r.Reloads == 0 || r.Nodes[1].Reloads == 0 || decode.offloads == 0 {
		t.Errorf("%d offloads on the decode node, want some, and reloads: %+v", decode.offloads, r)
	}
	if r.Offloading != r.Nodes[0].Offloading+r.Nodes[1].Offloading || r.Reloads != r.Nodes[0].Reloads+r.Nodes[1].Reloads {
		t.Errorf("the whole is not the sum of its nodes: %+v", r)
	}
	for _, n := range c.nodes {
		if n.host != c.host || len(n.free) != n.geometry.Layout.Pages-1 {
			t.Errorf("node %s has %d host pages and %d pages free at the end", n.name, n.host, len(n.free))
		}
	}
}

// What comes back from the host is looked at.
func TestReplayFindsWhatTheHostSpoils(t *testing.T) {
	o, _ := hostOptions(t, lies{spoil: true}, 40)
	r, err := Run(t.Context(), o)
	if err != nil || !r.Corrupt() || r.WrongBytes == 0 {
		t.Errorf("%v, want wrong bytes: %+v", err, r)
	}
}

// A node that makes no room refuses for as long as there is none, and then the
// request has failed with what it said.
func TestReplayEndsTypedWithoutRoom(t *testing.T) {
	o, c := hostOptions(t, lies{}, 40)
	c.keep, c.hold = true, 50*time.Millisecond
	o.Timeout = 300 * time.Millisecond
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if r.Corrupt() || r.Ready+r.Failed != r.Requests || r.Reloads != 0 {
		t.Errorf("report: %+v", r)
	}
	typed := []string{kvferrypb.Failure_RESOURCE_EXHAUSTED.String(), kvferrypb.Failure_REVOKED.String(), kvferrypb.Failure_EXPIRED.String(), CodeTimeout, CodeNotReleased}
	for _, f := range r.Failures {
		if !slices.Contains(typed, f.Code) {
			t.Errorf("failure %+v, want one of %v", f, typed)
		}
	}
}

// What went to the owner's host while it was read is retrieved again, if the
// owner has one.
func TestReplayRetrievesAgain(t *testing.T) {
	for host, ready := range map[int]int{40: 12, 0: 9} {
		o, c := hostOptions(t, lies{moved: 3}, host)
		c.hold = 500 * time.Millisecond // of what nobody reads
		r, err := Run(t.Context(), o)
		if err != nil || r.Ready != ready || r.Ready+r.Failed != 12 || r.Failed > 0 && r.Failures[0].Code != kvferrypb.Failure_STALE.String() {
			t.Errorf("%d host pages: %v, want %d ready: %+v", host, err, ready, r)
		}
	}
}

// With a host tier a request is removed when it has been read, and not before:
// what is on the host would go with it.
func TestReplayKeepsWhatIsNotRead(t *testing.T) {
	o, c := hostOptions(t, lies{}, 40)
	var removed, early atomic.Int64
	c.hook = func(_ context.Context, call fakeCall) error {
		if call.after || call.method != "Remove" || call.node.name != "prefill" {
			return nil
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if removed.Add(1); c.offers[call.request].ended == "" {
			early.Add(1)
		}
		return nil
	}
	if r, err := Run(t.Context(), o); err != nil || !r.OK || removed.Load() != 12 || early.Load() > 0 {
		t.Errorf("%v, %d requests removed, %d of them before they were read: %+v", err, removed.Load(), early.Load(), r)
	}
}

func TestReplayFindsAForkWithoutItsBytes(t *testing.T) {
	o, _ := testOptions(t, lies{unforked: true}, 1, 1, 1)
	o.Requests, o.Labels = []Request{{Input: 48}, {Input: 48}}, 2 // one of them is forked
	r, err := Run(t.Context(), o)
	if err != nil || r.Ready != 1 || r.Failures[0].Code != CodeWrongBytes {
		t.Errorf("%v, want one with wrong bytes: %+v", err, r)
	}
}

// Every second label begins as a fork at the end of a chunk, one after another
// at every one of them, the rest is written from the first token on.
func TestStreamsOf(t *testing.T) {
	labels := labelNames(4)
	at := make(map[int]bool)
	for n := range 12 {
		streams := streamsOf(n, labels, 100, 25)
		if streams[0] != (stream{label: id.Main}) {
			t.Errorf("request %d: main is %+v", n, streams[0])
		}
		forks := 0
		for i, s := range streams {
			if s.label != labels[i] || s.forked%25 != 0 || s.forked >= 100 {
				t.Errorf("request %d: stream %d is %+v", n, i, s)
			}
			if s.forked > 0 {
				forks++
				at[s.forked] = true
			}
		}
		if forks == 0 || forks == 3 {
			t.Errorf("request %d has %d forks of 3 streams: %+v", n, forks, streams)
		}
	}
	if len(at) != 3 {
		t.Errorf("forks at %v, want all 3 ends of chunks", at)
	}
	for _, s := range streamsOf(1, labels, 1, 1) {
		if s.forked != 0 {
			t.Errorf("one chunk has nothing to fork: %+v", s)
		}
	}
}

// A stream is main's up to where it was forked, and its own from there on.
func TestCheckKnowsForks(t *testing.T) {
	l := testLayouts()["HND bf16"]
	a := mustArena(t, l)
	pages, places := scattered(l, 30, 5)
	a.write(newPattern("r", id.Main, 0), 0, places[:13])
	a.write(newPattern("r", "cfg", 0), 13, places[13:])
	for forked, want := range map[int]bool{12: false, 13: true, 14: false, 0: false} {
		_, wrong, first := a.check("r", stream{"cfg", forked}, 0, pages, len(places))
		if (wrong == 0) != want {
			t.Errorf("forked at %d: %d wrong bytes: %v", forked, wrong, first)
		}
	}
	if _, wrong, first := a.check("r", stream{"cfg", 20}, 0, pages[:page.Count(13, l.PageSize)], 13); wrong != 0 {
		t.Errorf("before the fork all is main's: %v", first)
	}
}
