package replay

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvferry/kvferry/api/client"
	"github.com/kvferry/kvferry/api/kvferrypb"
	"github.com/kvferry/kvferry/internal/page"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var smallLayout = page.Layout{Order: page.HND, DType: page.BF16, Layers: 2, Pages: 65, PageSize: 8, Heads: 2, HeadDim: 16}

func someRequests(n int) []Request {
	r := rand.New(rand.NewPCG(3, 4))
	requests := []Request{{Input: 1, Output: 1}, {Input: 2}, {Input: 3, Output: 1}, {Input: 200, Output: 50}}
	for len(requests) < n {
		requests = append(requests, Request{Input: 1 + r.IntN(120), Output: r.IntN(30)})
	}
	return requests[:n]
}

// testOptions are those of a run over fake nodes with these lies.
func testOptions(t *testing.T, l lies, prefill, decode, ranks int) (Options, *fakeCluster) {
	t.Helper()
	c := newFakeCluster(t, l)
	o := Options{Requests: someRequests(24), ChunkTokens: 16, Pause: time.Millisecond, Timeout: time.Minute}
	for i := range prefill {
		o.Prefill = append(o.Prefill, c.start(t, fmt.Sprintf("prefill-%d", i), smallLayout, ranks))
	}
	for i := range decode {
		layout := smallLayout
		layout.Pages += 7 // other addresses than the owner's
		o.Decode = append(o.Decode, c.start(t, fmt.Sprintf("decode-%d", i), layout, ranks))
	}
	return o, c
}

func TestReplay(t *testing.T) {
	for name, tt := range map[string]struct{ prefill, decode, labels, ranks int }{
		"one pair":                {1, 1, 1, 1},
		"two by two":              {2, 2, 1, 1},
		"three labels, two ranks": {1, 2, 3, 2},
	} {
		t.Run(name, func(t *testing.T) {
			o, c := testOptions(t, lies{}, tt.prefill, tt.decode, tt.ranks)
			o.Labels = tt.labels
			if tt.labels > 1 {
				o.Requests = slices.Delete(o.Requests, 3, 4) // too long for so many
			}
			r, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			tokens := 0
			for _, q := range o.Requests {
				tokens += q.Input
			}
			want := int64(tokens) * 2 * 2 * 2 * 16 * 2 * int64(tt.labels) * int64(tt.ranks)
			if !r.OK || r.Corrupt() || r.Ready != len(o.Requests) || r.Bytes != want || r.VerifiedBytes != want || r.BytesByTransport["memory"] != want {
				t.Errorf("want %d bytes of %d tokens verified, report: %+v", want, tokens, r)
			}
			if r.PublishToReady.Count != int64(len(o.Requests)) || r.Releases["acknowledged"] != len(o.Requests) || r.DecodedTokens == 0 {
				t.Errorf("report: %+v", r)
			}
			var ready int
			for _, n := range r.Nodes {
				if n.Requests == 0 || n.Bytes == 0 {
					t.Errorf("node had nothing to do: %+v", n)
				}
				ready += n.Ready
			}
			if ready != 2*len(o.Requests) {
				t.Errorf("nodes had %d requests ready, want each of %d on two", ready, len(o.Requests))
			}
			for _, n := range c.nodes {
				if len(n.free) != n.geometry.Layout.Pages-1 || len(n.requests) != 0 || len(n.steps) != 0 {
					t.Errorf("node %s has %d of %d pages free, %d requests, %d steps", n.name, len(n.free), n.geometry.Layout.Pages-1, len(n.requests), len(n.steps))
				}
			}
		})
	}
}

// Every way in which a node can be wrong has to be seen.
func TestReplayFinds(t *testing.T) {
	for name, tt := range map[string]struct {
		lies    lies
		code    string
		corrupt bool
	}{
		"ready before final":            {lies{early: true}, CodeEarly, true},
		"one wrong bit":                 {lies{flip: true}, CodeWrongBytes, true},
		"what never landed":             {lies{stale: true}, CodeWrongBytes, true},
		"a page twice in a stream":      {lies{double: true}, CodeWrongAnswer, false},
		"a prompt changed by decoding":  {lies{trample: true}, CodeWrongBytes, true},
		"another length":                {lies{short: true}, CodeWrongAnswer, false},
		"a place outside of the arena":  {lies{unplanned: true}, CodeWrongAnswer, false},
		"index vectors that do not fit": {lies{ragged: true}, CodeWrongAnswer, false},
		"a typed failure":               {lies{fail: kvferrypb.Failure_DIVERGED}, "DIVERGED", false},
		"a publication without end":     {lies{forget: true}, CodeNotReleased, false},
		"a retrieve without end":        {lies{mute: true}, CodeTimeout, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, c := testOptions(t, tt.lies, 1, 1, 1)
			o.Requests = []Request{{Input: 50, Output: 1}, {Input: 50, Output: 1}} // in four chunks each
			o.Concurrency = 1
			if tt.lies.early {
				c.hook = lastChunkWaits()
			}
			if tt.lies.mute || tt.lies.forget {
				o.Timeout, o.Concurrency = 8*time.Second, 2 // it is over, and all else happens before
				o.Settle, c.hold = time.Millisecond, 0      // what is published does not end
			}
			if tt.lies.fail != 0 {
				c.hold = 100 * time.Millisecond // nobody reads it
			}
			r, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if r.OK || r.Failed != 2 || len(r.Failures) != 1 || r.Failures[0].Code != tt.code || r.Failures[0].Count != 2 {
				t.Errorf("want two of %s, report: %+v", tt.code, r)
			}
			if r.Corrupt() != tt.corrupt {
				t.Errorf("Corrupt() = %v: %+v", r.Corrupt(), r)
			}
			for _, n := range c.nodes {
				if len(n.requests) != 0 {
					t.Errorf("node %s is left with %d requests", n.name, len(n.requests))
				}
			}
			if err := r.Unexplained(); err == nil || r.Explained || !strings.Contains(err.Error(), tt.code) && !tt.corrupt {
				t.Errorf("Unexplained() = %v, want %s", err, tt.code)
			}
			var out bytes.Buffer
			if err := r.WriteTable(&out); err != nil || !strings.Contains(out.String(), tt.code) {
				t.Errorf("table (%v) does not tell %s:\n%s", err, tt.code, out.String())
			}
		})
	}
}

// lastChunkWaits holds back the last of four chunks of every request until its
// reader has been told the second time that it is ready.
func lastChunkWaits() func(context.Context, fakeCall) error {
	told := make(chan struct{}, 1)
	return func(ctx context.Context, call fakeCall) error {
		switch {
		case call.method == "AdmitRetrieve" && call.after && call.nth%2 == 1:
			told <- struct{}{}
		case call.method == "Admit" && call.node.name == "prefill-0" && !call.after && call.nth%4 == 3:
			select {
			case <-told:
			case <-ctx.Done():
			}
		}
		return nil
	}
}

func TestReplayTriesAgain(t *testing.T) {
	o, _ := testOptions(t, lies{refuse: 7}, 1, 1, 1)
	r, err := Run(t.Context(), o)
	if err != nil || !r.OK || r.Retries != 7 {
		t.Errorf("%v, want 7 retries: %+v", err, r)
	}
}

func TestReplayOfWhatDoesNotFit(t *testing.T) {
	o, _ := testOptions(t, lies{}, 1, 1, 1)
	o.Requests = []Request{{Input: 500, Output: 13}, {Input: 10}} // 65 pages of 64
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	if r.Ready != 1 || r.Failed != 1 || r.Failures[0].Code != CodeDoesNotFit || !strings.Contains(r.Failures[0].Examples[0], "65 pages") {
		t.Errorf("report: %+v", r)
	}
	if r.OK || r.Corrupt() {
		t.Errorf("OK %v, corrupt %v", r.OK, r.Corrupt())
	}
}

// The one who ends a run gets what was done, and nothing is left behind.
func TestReplayInterrupted(t *testing.T) {
	o, c := testOptions(t, lies{mute: true}, 1, 1, 1)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	c.muted = func() { cancel(errors.New("interrupted")) }
	r, err := Run(ctx, o)
	if err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("Run = %v, want the cause", err)
	}
	if r == nil || r.OK || r.Failed == 0 || r.Failed == r.Requests {
		t.Errorf("want some started and some not, report: %+v", r)
	}
	for _, n := range c.nodes {
		if len(n.requests) != 0 {
			t.Errorf("node %s is left with %d requests", n.name, len(n.requests))
		}
	}
}

func TestReplayKeepsTime(t *testing.T) {
	o, _ := testOptions(t, lies{}, 1, 1, 1)
	o.Requests = []Request{{Input: 5}, {Input: 5, Timestamp: 400 * time.Second}}
	o.TimeScale = 0.0005
	r, err := Run(t.Context(), o)
	if err != nil || !r.OK || r.Elapsed() < 200*time.Millisecond || r.Elapsed() > o.Timeout {
		t.Errorf("%v, want it done after 200 ms: %+v", err, r)
	}
}

func TestReplayRefuses(t *testing.T) {
	good, c := testOptions(t, lies{}, 1, 1, 1)
	other := smallLayout
	other.Heads = 4
	strange := c.start(t, "strange", other, 1)
	twoRanks := c.start(t, "two-ranks", smallLayout, 2)
	c.nodes["two-ranks"].geometry.WorldSize = 1
	for name, tt := range map[string]struct {
		change func(*Options)
		text   string
	}{
		"no requests":      {func(o *Options) { o.Requests = nil }, "no request"},
		"no decode node":   {func(o *Options) { o.Decode = nil }, "at least one"},
		"a node twice":     {func(o *Options) { o.Decode = o.Prefill }, "named twice"},
		"too many labels":  {func(o *Options) { o.Labels = MaxReplayLabels + 1 }, "labels"},
		"time that runs":   {func(o *Options) { o.TimeScale = -1 }, "time scale"},
		"time too long":    {func(o *Options) { o.TimeScale = 1e300 }, "time scale"},
		"no socket":        {func(o *Options) { o.Decode = []string{"/nonexistent"} }, "/nonexistent"},
		"another geometry": {func(o *Options) { o.Decode = []string{strange} }, "heads"},
		"other ranks":      {func(o *Options) { o.Decode = []string{twoRanks} }, "local ranks"},
		"a loop backwards": {func(o *Options) { o.Loop = -1 }, "loop"},
	} {
		o := good
		tt.change(&o)
		if r, err := Run(t.Context(), o); err == nil || r != nil || !strings.Contains(err.Error(), tt.text) {
			t.Errorf("%s: Run = %v, want it to name %q", name, err, tt.text)
		}
	}
	o := good
	o.Decode = []string{"/nonexistent"}
	if _, err := Run(t.Context(), o); !errors.Is(err, client.ErrUnreachable) {
		t.Errorf("Run = %v, want ErrUnreachable", err)
	}
}

// A script that reads the report may rely on its keys.
func TestReportKeys(t *testing.T) {
	o, _ := testOptions(t, lies{}, 1, 1, 1)
	o.Progress = &bytes.Buffer{}
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	var keys map[string]any
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{
		"ok", "explained", "requests", "ready", "failed", "lost", "labels", "ranks", "tokens", "token_bytes", "bytes", "ready_bytes", "verified_bytes", "wrong_bytes", "early",
		"decoded_tokens", "retries", "offloading", "reloads", "publish_to_ready", "bytes_by_transport", "releases", "failures", "nodes", "elapsed_seconds", "bytes_per_second",
	} {
		if _, ok := keys[key]; !ok {
			t.Errorf("%s is missing in %s", key, text)
		}
		delete(keys, key)
	}
	if len(keys) > 0 {
		t.Errorf("keys that nobody was told of: %v", keys)
	}
	if list, ok := r.Failures, r.Failures != nil; !ok || len(list) != 0 {
		t.Errorf("failures of a good run are %v, want an empty list", list)
	}
}

func TestPairsAreAllAndEven(t *testing.T) {
	for prefill := 1; prefill <= 6; prefill++ {
		for decode := 1; decode <= 6; decode++ {
			seen := make(map[[2]int]int)
			for i := range prefill * decode * 3 {
				p, d := pair(i, prefill, decode)
				seen[[2]int{p, d}]++
			}
			for p := range prefill {
				for d := range decode {
					if seen[[2]int{p, d}] != 3 {
						t.Errorf("%d by %d: pair %d, %d has %d of 3 requests", prefill, decode, p, d, seen[[2]int{p, d}])
					}
				}
			}
		}
	}
}

func TestChunks(t *testing.T) {
	for tokens := 1; tokens < 2000; tokens++ {
		chunk := chunkTokens(tokens, 512)
		n := (tokens + chunk - 1) / chunk
		if chunk < 1 || chunk > 512 || n < min(3, tokens) {
			t.Fatalf("%d tokens: %d chunks of %d", tokens, n, chunk)
		}
	}
}
