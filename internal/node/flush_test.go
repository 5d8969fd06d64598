package node_test

import (
	"context"
	"fmt"
	"sync"
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
		ctx, stop := context.WithCancel(t.Context())
		var filling sync.WaitGroup
		prefill.FillOutbox()
		filling.Go(func() { // it is emptied every few milliseconds
			for ctx.Err() == nil {
				prefill.FillOutbox()
				<-time.After(100 * time.Microsecond)
			}
		})
		start := time.Now()
		deferred := p.publish(r, true).GetGossipDeferred()
		took := time.Since(start)
		stop()
		filling.Wait()
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
