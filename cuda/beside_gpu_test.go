//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/memory"
)

// matmul names scripts/gpu/torch_matmul.py.
const matmul = "KVFERRY_CUDA_MATMUL"

// What our copies and our kernel take away from another process on the device:
// products of matrices by PyTorch where there is one, else copies within it.
func TestGPUBeside(t *testing.T) {
	engine, g := gpu(t, cuda.Options{Scatter: -1})
	kernel, _ := gpu(t, cuda.Options{Scatter: 128 << 10})
	copies := newWrites(t, onGPU(t, engine, g, 64<<20), 8<<10, 4096)
	scattered := newWrites(t, onGPU(t, kernel, g, 64<<20), 8<<10, 4096)
	o, what := neighbour(t)
	row("another process", what)
	alone := o.rate(t, nil)
	row("its rounds a second alone", fmt.Sprintf("%.1f", alone))
	for _, load := range []struct {
		name  string
		begin func()
		bytes int64
	}{
		{"copies to the device", func() { copies.once(t) }, copies.bytes()},
		{"copies from the device", func() { wait(t, copies.arena.ReadInto(copies.host, copies.list)) }, copies.bytes()},
		{"the kernel", func() { scattered.once(t) }, scattered.bytes()},
	} {
		rounds, began := 0, time.Now()
		rate := o.rate(t, func() { load.begin(); rounds++ })
		row("beside "+load.name, fmt.Sprintf("%.1f, %.0f %%; ours %s", rate, 100*rate/alone, perSecond(int64(rounds)*load.bytes, time.Since(began))))
	}
	row("alone again", fmt.Sprintf("%.0f %%", 100*o.rate(t, nil)/alone))
	if kernel.Stats().Kernels == 0 {
		t.Error("no kernel was launched")
	}
	if err := o.end(); err != nil {
		t.Error(err)
	}
}

// neighbour is the other process, and what it does.
func neighbour(t *testing.T) (*other, string) {
	t.Helper()
	why := matmul + " is not set"
	if script := os.Getenv(matmul); script != "" {
		o := spawn(t, "busy", exec.CommandContext(t.Context(), "python3", script))
		said, ok := o.next()
		if ok {
			return o, said
		}
		why = said
	}
	o := spawn(t, "busy", ourselves(t, "TestGPUOther", role+"=busy"))
	said, ok := o.next()
	if !ok {
		t.Fatal(said)
	}
	return o, said + " (no products of matrices: " + why + ")"
}

// rate has it work for a while, beside what is done over and over.
func (o *other) rate(t *testing.T, beside func()) float64 {
	t.Helper()
	o.tell("go")
	said := make(chan string, 1)
	go func() {
		line, _ := o.next()
		said <- line
	}()
	for beside != nil && len(said) == 0 {
		beside()
	}
	line := <-said
	n, err := strconv.ParseFloat(line, 64)
	if err != nil {
		t.Fatal(line)
	}
	return n
}

// writes are pieces of pinned host memory on their way to places without order.
type writes struct {
	arena *cuda.Arena
	host  []byte
	list  []memory.Segment
}

func newWrites(t *testing.T, a *cuda.Arena, size int64, n int) *writes {
	t.Helper()
	w := &writes{arena: a, host: pinned(t, a, int64(n)*size), list: make([]memory.Segment, n)}
	for from, to := range rand.New(rand.NewPCG(uint64(size), uint64(n))).Perm(n) {
		w.list[from] = memory.Segment{Arena: 2 * int64(to) * size, Other: int64(from) * size, Bytes: size}
	}
	return w
}

func (w *writes) bytes() int64 { return int64(len(w.host)) }

func (w *writes) once(t *testing.T) {
	t.Helper()
	wait(t, w.arena.WriteFrom(w.host, w.list))
}
