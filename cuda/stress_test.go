package cuda_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
)

// Many goroutines copy at once, each in its own stretch, while arenas and pinned
// memory come and go: each finds its own bytes.
func TestManyAtOnce(t *testing.T) {
	r, w := open(t, cuda.Options{Scatter: 4 << 10})
	w.Set(cudatest.Faults{Strict: true})
	const workers, size = 8, 256 << 10
	a := alloc(t, r, workers*size)
	host := pinned(t, a, workers*size)
	rounds := 60
	if *soak > 0 {
		rounds = 5000
	}
	var work sync.WaitGroup
	for i := range workers {
		work.Go(func() {
			if err := worker(r, a, host[i*size:][:size], int64(i*size), rounds); err != nil {
				t.Errorf("worker %d: %v", i, err)
			}
		})
	}
	work.Wait()
}

// worker copies in and out of the bytes of a from at on.
func worker(r *cuda.Runtime, a *cuda.Arena, host []byte, at int64, rounds int) error {
	rng := rand.New(rand.NewPCG(uint64(at), 1))
	want := make([]byte, len(host))
	for i := range rounds {
		const piece = 2048
		n := len(host) / piece
		order := rng.Perm(n)
		list, back := make([]memory.Segment, n), make([]memory.Segment, n)
		for k := range list {
			list[k] = memory.Segment{Arena: at + int64(order[k])*piece, Other: int64(k) * piece, Bytes: piece}
			back[k] = list[k]
		}
		fill(want, rng.Uint64())
		from, to := host, make([]byte, len(host))
		switch i % 3 {
		case 0:
			copy(host, want)
			if err := a.WriteFrom(from, list).Wait(); err != nil {
				return err
			}
			clear(host)
			to = host
		default:
			if err := a.WriteFrom(want, list).Wait(); err != nil {
				return err
			}
		}
		if err := a.ReadInto(to, back).Wait(); err != nil {
			return err
		}
		if !bytes.Equal(to, want) {
			return fmt.Errorf("round %d: other bytes", i)
		}
		if i%10 != 0 {
			continue
		}
		h, files, err := a.Export()
		if err != nil {
			return err
		}
		b, err := r.Import(h, files)
		if err != nil {
			return err
		}
		fresh, err := r.Alloc(a.GPU().UUID, int64(len(host)))
		if err != nil {
			return err
		}
		ticket := r.Pull(fresh, b, []memory.Segment{{Other: at, Bytes: int64(len(host))}})
		unpin, err := fresh.Pin(host[:0:0])
		if err == nil {
			return errors.Join(errors.New("nothing was pinned"), unpin())
		}
		if err := errors.Join(b.Close(), fresh.Close(), ticket.Wait()); err != nil {
			return err
		}
	}
	return nil
}

// What it costs to hand a copy in and see it end, by pieces; the emulated device
// takes its part of it.
func BenchmarkSubmit(b *testing.B) {
	for _, n := range []int{1, 64, 1024, 4096} {
		b.Run(fmt.Sprintf("pieces=%d", n), func(b *testing.B) {
			r, w := open(b, cuda.Options{})
			a := alloc(b, r, 8<<20)
			host := pinned(b, a, 8<<20)
			list := make([]memory.Segment, n)
			for i := range list {
				list[i] = memory.Segment{Arena: int64(i) * 128, Other: int64(i) * 64, Bytes: 64}
			}
			before := batches(w)
			b.ReportAllocs()
			for b.Loop() {
				wait(b, a.WriteFrom(host, list))
			}
			b.ReportMetric(float64(batches(w)-before)/float64(b.N), "calls/op")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/piece")
		})
	}
}
