// Package cudatest is an emulated CUDA driver, for machines without a GPU: what
// package cuda does on hardware it does here, through the very same loading, the
// very same table of functions, and the very same header.
//
// A [World] is a control file that every process of a test maps. A process is in
// the world that its environment names ([World.Env]) when it first calls the
// driver; without one it has a device of its own. Memory of a device is a memfd.
// The address that the driver gives for it is reserved and unreadable, so that
// Go code that follows it faults, as on a machine with a GPU; the library reads
// and writes it by a mapping of its own. A stream is a thread with a queue:
// copies are really late. A call without a current context, a stream of another
// context, a stretch that leaves its allocation, or a default stream where none
// is allowed is refused as the driver does, and where hardware differs the
// stricter way was taken. Memory that another process has imported lives on until
// it is closed there, though its owner has freed it or has been killed; a handle
// of memory that was freed, or of a process that has ended, opens nothing.
//
// Faults are set from Go at any time, for all processes of the world
// ([World.Set]).
//
// It is no model of how fast a device is. Delay and bandwidth are there for tests
// of what waits for what. Kernels are carried out by name, in C: their parameters
// are tested by it, their arithmetic is not. A dma-buf is a descriptor of the
// memfd, which begins where the allocation does. It has no memory pools, arrays,
// graphs, textures, or copies in two dimensions: those answer "not supported".
package cudatest

import (
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// variants are drivers other than the one that tests ask for, which they can be
// made to use by KVFERRY_CUDA_VARIANT.
func variants() map[string]Options {
	return map[string]Options{
		"11.8":      {Version: 11080, Hide: []string{"cuMemcpyBatchAsync", "cuMemcpyBatchAsync_v2"}},
		"13.0":      {Version: 13000, Hide: []string{"cuMemcpyBatchAsync"}},
		"no-dmabuf": {NoDMABuf: true},
		"unordered": {Unordered: true},
		"strict":    {Faults: Faults{Strict: true}},
		"slow":      {Faults: Faults{Delay: 200 * time.Microsecond}},
	}
}

// shared is the world of this process.
//
//nolint:gochecknoglobals // a process binds one driver
var shared struct {
	mu    sync.Mutex
	world *World
}

// Use returns the world of this process, which is made by the first call: a
// process binds one driver, and one world, for good. A test that
// wants another is skipped. Faults are cleared before and after the test, so that
// tests that set some cannot be parallel.
//
// The test is skipped, with the reason, where the driver cannot be built, where
// this binary was built without CUDA, and where KVFERRY_CUDA_GPU asks for a real
// one. KVFERRY_CUDA_VARIANT names a driver that differs from what is asked for.
func Use(tb testing.TB, o Options) *World {
	tb.Helper()
	if os.Getenv("KVFERRY_CUDA_GPU") != "" {
		tb.Skip("only the emulated driver can do this, and KVFERRY_CUDA_GPU asks for a real one")
	}
	if !builtIn {
		tb.Skip("built without CUDA: go test -tags cuda, with the environment of scripts/cuda-env.sh")
	}
	wanted, err := choose(os.Getenv("KVFERRY_CUDA_VARIANT"), o)
	if err != nil {
		tb.Fatal(err)
	}
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.world == nil {
		w, err := New(wanted)
		if err != nil {
			tb.Skip(err)
		}
		// For good: the library reads it when it is called first.
		if err := os.Setenv(environment, w.control.Path()); err != nil { //nolint:usetesting // see above
			tb.Fatal(err)
		}
		shared.world = w
	}
	w := shared.world
	if !w.options.same(defaults(wanted)) {
		tb.Skipf("this process has another driver already: %+v", w.options)
	}
	w.Clear()
	tb.Cleanup(w.Clear)
	return w
}

// choose is what a test gets that wants o.
func choose(variant string, o Options) (Options, error) {
	if variant == "" {
		return o, nil
	}
	v, ok := variants()[variant]
	if !ok {
		return Options{}, fmt.Errorf("KVFERRY_CUDA_VARIANT is %q, and there are %s", variant, strings.Join(slices.Sorted(maps.Keys(variants())), ", "))
	}
	if v.Version != 0 {
		o.Version, o.Hide = v.Version, v.Hide
	}
	o.NoDMABuf = o.NoDMABuf || v.NoDMABuf
	o.Unordered = o.Unordered || v.Unordered
	o.Faults.Strict = o.Faults.Strict || v.Faults.Strict
	o.Faults.Delay = max(o.Faults.Delay, v.Faults.Delay)
	return o, nil
}
