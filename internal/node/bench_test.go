package node_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/kvferry/kvferry/api/kvferrypb"
)

// BenchmarkPublishToReady is the time from Publish of one page to the answer of
// an AdmitRetrieve that waits for it, on a warm pair.
func BenchmarkPublishToReady(b *testing.B) {
	prefill, decode := startPair(b)
	p, d := openEngine(b, prefill), openEngine(b, decode)
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		r := fmt.Sprintf("r%d", i)
		p.ingest(r)
		d.ingest(r)
		p.write(r, 8)
		ready := make(chan error, 1)
		begun := make(chan struct{})
		go func() {
			close(begun)
			_, err := d.AdmitRetrieve(d.ctx(), &kvferrypb.AdmitRetrieveRequest{Request: r, Wait: durationpb.New(deadline)})
			ready <- err
		}()
		<-begun
		time.Sleep(500 * time.Microsecond) // so that it waits
		start := time.Now()
		p.publish(r, true, to("decode"))
		if err := <-ready; err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(start))
		p.remove(r)
		d.remove(r)
	}
	slices.Sort(took)
	for _, q := range []int{50, 90, 99} {
		b.ReportMetric(float64(took[len(took)*q/100].Microseconds()), fmt.Sprintf("µs-p%d", q))
	}
}
