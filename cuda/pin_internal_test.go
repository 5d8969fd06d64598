//go:build linux && cgo && cuda && (amd64 || arm64)

package cuda

import (
	"errors"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
)

// pinning is a runtime, an arena of it, and host memory that is not pinned.
func pinning(t *testing.T) (*Runtime, *Arena, []byte, *cudatest.World) {
	t.Helper()
	w := cudatest.Use(t, cudatest.Options{})
	r, err := Open(Options{Library: w.Library(), Scatter: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	a, err := r.Alloc(r.GPUs()[0].UUID, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	region, err := memory.NewPlain("host", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := region.Close(); err != nil {
			t.Error(err)
		}
	})
	return r, a, region.Bytes(), w
}

// references are those to the memory.
func references(host []byte) int {
	pins.mu.Lock()
	defer pins.mu.Unlock()
	if p := pins.find(host); p != nil {
		return p.refs
	}
	return 0
}

func await(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); !f(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// Who pins what another is just pinning waits for that, and fails as it does.
func TestPinWaitsForAnother(t *testing.T) {
	for name, fails := range map[string]bool{"it works": false, "it fails": true} {
		t.Run(name, func(t *testing.T) {
			r, a, host, w := pinning(t)
			if fails {
				w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemHostRegister", Code: cudatest.OutOfMemory}}})
			}
			r.turn <- struct{}{} // so that the first one registers nothing yet
			type result struct {
				unpin  func() error
				err    error
				pinned int64
			}
			results := make(chan result, 2)
			for i := range 2 {
				go func() {
					unpin, err := a.Pin(host)
					results <- result{unpin, err, r.Stats().Pinned}
				}()
				await(t, "it is wanted", func() bool { return references(host) == i+1 })
			}
			select {
			case got := <-results:
				t.Errorf("it is over before anything is registered: %+v", got)
				results <- got
			case <-time.After(20 * time.Millisecond):
			}
			<-r.turn
			for range 2 {
				got := <-results
				if e, ok := errors.AsType[*Error](got.err); fails != ok || fails && e.Code != cudatest.OutOfMemory {
					t.Errorf("%v", got.err)
				}
				if !fails && got.pinned != int64(len(host)) {
					t.Errorf("%d bytes are pinned when it returns", got.pinned)
				}
				if got.unpin != nil {
					defer got.unpin()
				}
			}
			if n := references(host); fails && n != 0 || !fails && n != 2 {
				t.Errorf("%d references", n)
			}
		})
	}
}

// Close waits for what somebody else is unpinning: the context is there as long.
func TestCloseWaitsForUnpin(t *testing.T) {
	r, a, host, w := pinning(t)
	unpin, err := a.Pin(host)
	if err != nil {
		t.Fatal(err)
	}
	user := pins.use(host) // as a copy of another runtime
	ended := make(chan error, 2)
	go func() { ended <- unpin() }()
	await(t, "it is being unpinned", func() bool { return references(host) == 0 })
	go func() { ended <- r.Close() }()
	await(t, "the runtime is being closed", func() bool { _, err := a.Pin(host); return errors.Is(err, ErrClosed) })
	select {
	case err := <-ended:
		t.Errorf("it did not wait: %v", err)
		ended <- err
	case <-time.After(20 * time.Millisecond):
	}
	user.users.Done()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if n := r.Stats().Pinned; n != 0 {
		t.Errorf("%d bytes are pinned", n)
	}
	w.Clear()
}
