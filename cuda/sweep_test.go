//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/memory"
)

// How fast pieces of all sizes go to a device, from it, and within it, beside one
// copy of as many bytes. Every byte that went to the device and back is compared.
func TestGPUSweep(t *testing.T) {
	engine, g := gpu(t, cuda.Options{Scatter: -1})
	kernel, _ := gpu(t, cuda.Options{Scatter: 128 << 10})
	most := min(int64(512<<20), g.Bytes/8)
	fmt.Printf("| %-7s %5s | %38s | %38s | %38s |\n", "", "", "to the device (GB/s)", "from the device", "within")
	fmt.Printf("| %-7s %5s |%9s %9s %9s %9s |%9s %9s %19s |%9s %9s %19s |\n", "bytes", "n", "one copy", "pieces", "kernel", "one by 1", "one copy", "pieces", "", "one copy", "pieces", "")
	s := sweep{tb: t}
	s.engine.open(t, engine, g, most)
	s.kernel.open(t, kernel, g, most)
	for _, size := range []int64{4 << 10, 8 << 10, 16 << 10, 28 << 10, 32 << 10, 64 << 10, 2 << 20} {
		for _, n := range []int64{16, 256, 4096} {
			if size*n > most {
				continue
			}
			s.line(size, n)
		}
	}
}

// side is a runtime with an arena of twice the bytes that are copied, so that no
// piece has a neighbour.
type side struct {
	arena *cuda.Arena
	host  []byte
}

func (s *side) open(tb testing.TB, r *cuda.Runtime, g cuda.GPU, bytes int64) {
	tb.Helper()
	s.arena = onGPU(tb, r, g, 2*bytes)
	s.host = pinned(tb, s.arena, bytes)
}

type sweep struct {
	tb             testing.TB
	engine, kernel side
}

func (s *sweep) line(size, n int64) {
	s.tb.Helper()
	bytes := size * n
	scattered, within := make([]memory.Segment, n), make([]memory.Segment, n)
	for to, from := range rand.New(rand.NewPCG(uint64(size), uint64(n))).Perm(int(n)) {
		scattered[to] = memory.Segment{Arena: 2 * int64(from) * size, Other: int64(to) * size, Bytes: size}
		within[to] = memory.Segment{Arena: (2*int64(to) + 1) * size, Other: 2 * int64(from) * size, Bytes: size}
	}
	one := []memory.Segment{{Bytes: bytes}}
	a, host := s.engine.arena, s.engine.host
	for i := range host[:bytes] {
		host[i] = byte(i>>8) ^ byte(i) ^ byte(size>>12)
	}
	in := s.speed(bytes, func() memory.Ticket { return a.WriteFrom(host, one) })
	pieces := s.speed(bytes, func() memory.Ticket { return a.WriteFrom(host, scattered) })
	apart := s.speed(bytes, func() memory.Ticket {
		var all tickets
		for i := range scattered {
			all = append(all, a.WriteFrom(host, scattered[i:i+1]))
		}
		return all
	})
	copy(s.kernel.host, host[:bytes])
	byKernel := s.speed(bytes, func() memory.Ticket { return s.kernel.arena.WriteFrom(s.kernel.host, scattered) })
	clear(s.kernel.host[:bytes])
	wait(s.tb, s.kernel.arena.ReadInto(s.kernel.host, scattered))
	s.same(s.kernel.host[:bytes], size)

	out := s.speed(bytes, func() memory.Ticket { return a.ReadInto(host, one) })
	clear(host[:bytes])
	back := s.speed(bytes, func() memory.Ticket { return a.ReadInto(host, scattered) })
	s.same(host[:bytes], size)

	whole := s.speed(bytes, func() memory.Ticket { return a.Move([]memory.Segment{{Arena: bytes, Other: 0, Bytes: bytes}}) })
	moved := s.speed(bytes, func() memory.Ticket { return a.Move(within) })
	fmt.Printf("| %-7d %5d |%9.2f %9.2f %9.2f %9.2f |%9.2f %9.2f %19s |%9.2f %9.2f %19s |\n", size, n, in, pieces, byKernel, apart, out, back, "", whole, moved, "")
}

func (s *sweep) same(got []byte, size int64) {
	s.tb.Helper()
	for i := range got {
		if want := byte(i>>8) ^ byte(i) ^ byte(size>>12); got[i] != want {
			s.tb.Fatalf("byte %d of pieces of %d is %#x, want %#x", i, size, got[i], want)
		}
	}
}

// speed is the best of some rounds, in GB/s.
func (s *sweep) speed(bytes int64, start func() memory.Ticket) float64 {
	s.tb.Helper()
	const least, budget = 3, 40 * time.Millisecond
	best := time.Duration(1 << 62)
	for round, began := 0, time.Now(); round < least || time.Since(began) < budget; round++ {
		begin := time.Now()
		wait(s.tb, start())
		best = min(best, time.Since(begin))
	}
	return float64(bytes) / best.Seconds() / 1e9
}

// tickets are over when all of them are.
type tickets []memory.Ticket

func (t tickets) Wait() error {
	for _, one := range t {
		if err := one.Wait(); err != nil {
			return err
		}
	}
	return nil
}
