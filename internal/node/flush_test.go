package node_test

import (
	"fmt"
	"testing"
	"time"
)

// TestPublishWhenGossipIsFull: the announcement waits for its turn, the publish
// hardly does, and nothing is lost.
func TestPublishWhenGossipIsFull(t *testing.T) {
	prefill, decode := startPair(t)
	p, d := openEngine(t, prefill), openEngine(t, decode)
	for i := range 50 { // the outbox may run empty before the publish gets its turn
		r := fmt.Sprint("r", i)
		p.ingest(r)
		p.write(r, 8)
		prefill.FillOutbox()
		start := time.Now()
		deferred := p.publish(r, true).GetGossipDeferred()
		took := time.Since(start)
		if !deferred {
			continue
		}
		t.Logf("try %d: it took %v", i, took)
		d.ingest(r)
		if _, err := d.retrieve(r, "", 0, deadline); err != nil {
			t.Fatal(err)
		}
		if got := d.verify(r, "main"); got != 8 {
			t.Errorf("%d tokens, want 8", got)
		}
		return
	}
	t.Error("no publish was deferred")
}
