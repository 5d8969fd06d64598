package cuda_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
)

// until waits for something that another goroutine brings about.
func until(t *testing.T, what string, f func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); !f(); <-tick.C {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// log is a buffer for several goroutines.
type log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// More than a chunk is pinned in the background. A chunk that the driver refuses
// is logged, and copies from and to it are right, and slow.
func TestPinGoesOnWithoutAChunk(t *testing.T) {
	var l log
	r, w := open(t, cuda.Options{PinChunk: 2 << 20, Logger: slog.New(slog.NewTextHandler(&l, nil))})
	a := alloc(t, r, 10<<20)
	host := mapped(t, 9<<20)
	w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemHostRegister", Code: cudatest.OutOfMemory, First: 2, Count: 1}}})
	unpin, err := a.Pin(host)
	if err != nil {
		t.Fatal(err)
	}
	// While it goes on, and when it is over.
	for range 2 {
		fill(host, 3)
		want := bytes.Clone(host)
		wait(t, a.WriteFrom(host, whole(len(host))))
		clear(host)
		wait(t, a.ReadInto(host, whole(len(host))))
		if !bytes.Equal(host, want) {
			t.Error("other bytes")
		}
		until(t, "all is pinned", func() bool { return r.Stats().Pinning == 0 })
	}
	if s := r.Stats(); s.Pinned != 7<<20 || s.Copies[cuda.HostToDevice].Slow < 2<<20 || mine(w).Registrations != 4 {
		t.Errorf("%+v, %d registrations", s, mine(w).Registrations)
	}
	if strings.Count(l.String(), "host memory stays unpinned") != 1 || strings.Count(l.String(), "CUDA_ERROR_OUT_OF_MEMORY") != 1 {
		t.Errorf("the log does not say it once: %s", l.String())
	}
	if err := unpin(); err != nil {
		t.Error(err)
	}
	if s := r.Stats(); s.Pinned != 0 || mine(w).Registrations != 0 {
		t.Errorf("%+v", s)
	}
}

func TestPinCounts(t *testing.T) {
	r, w := open(t, cuda.Options{})
	a, b := alloc(t, r, 1<<20), alloc(t, r, 1<<20)
	host := mapped(t, 4<<20)
	first, err := a.Pin(host)
	if err != nil {
		t.Fatal(err)
	}
	second, err := b.Pin(host[:1<<20])
	if err != nil {
		t.Fatal(err)
	}
	if n := mine(w).Registrations; n != 1 {
		t.Errorf("%d registrations", n)
	}
	for range 2 { // once
		if err := first(); err != nil {
			t.Error(err)
		}
	}
	wait(t, a.WriteFrom(host, whole(1<<20)))
	if s := r.Stats(); s.Pinned != 4<<20 || s.Copies[cuda.HostToDevice].Slow != 0 {
		t.Errorf("%+v", s)
	}
	if err := second(); err != nil {
		t.Error(err)
	}
	if n := mine(w).Registrations; n != 0 {
		t.Errorf("%d registrations", n)
	}
	wait(t, a.WriteFrom(host, whole(1<<20)))
	if s := r.Stats(); s.Copies[cuda.HostToDevice].Slow != 1<<20 {
		t.Errorf("%+v", s)
	}
	if _, err := a.Pin(host[1:]); err == nil {
		t.Error("memory that begins within a page was pinned")
	}
	if _, err := a.Pin(nil); err == nil {
		t.Error("nothing was pinned")
	}
	w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemHostRegister", Code: cudatest.OutOfMemory}}})
	if _, err := a.Pin(host); err == nil || r.Stats().Pinning != 0 {
		t.Errorf("%v, %+v", err, r.Stats())
	}
}

// What is lent to a copy stays until the copy is over.
func TestCloseAndUnpinWaitForCopies(t *testing.T) {
	r, w := open(t, cuda.Options{})
	a := alloc(t, r, 1<<20)
	host := mapped(t, 1<<20)
	unpin, err := a.Pin(host)
	if err != nil {
		t.Fatal(err)
	}
	want := make([]byte, 1<<20)
	fill(want, 1)
	wait(t, a.WriteFrom(want, whole(len(want))))
	w.Set(cudatest.Faults{Hold: true})
	ticket := a.ReadInto(host, whole(len(host)))
	var done sync.WaitGroup
	for _, f := range []func() error{a.Close, unpin, a.Close} {
		done.Go(func() {
			if err := f(); err != nil {
				t.Error(err)
			}
			if !bytes.Equal(host, want) {
				t.Error("it did not wait")
			}
		})
	}
	until(t, "the arena refuses", func() bool { _, _, err := a.Export(); return errors.Is(err, cuda.ErrClosed) })
	w.Clear()
	done.Wait()
	wait(t, ticket)
}
