package cuda_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
)

// everything does once what a runtime can. Its error is the first.
func everything(w *cudatest.World, host []byte) (err error) {
	r, err := cuda.Open(cuda.Options{Library: w.Library(), Scatter: 8 << 10, PinChunk: 2 << 20})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.Close()) }()
	u := r.GPUs()[0].UUID
	a, err := r.Alloc(u, 1<<20)
	if err != nil {
		return err
	}
	chunks, err := r.AllocChunks(u, 6<<20, 2<<20)
	if err != nil {
		return err
	}
	unpin, err := a.Pin(host[:1<<20])
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unpin()) }()
	const pieces = 64 * 4096
	for i, b := range [][]byte{host[:pieces], bytes.Clone(host[:pieces])} {
		fill(b, uint64(i))
		list := make([]memory.Segment, 64)
		for i := range list {
			list[i] = memory.Segment{Arena: int64(63-i) * 16384, Other: int64(i) * 4096, Bytes: 4096}
		}
		got := make([]byte, len(b))
		for _, step := range []func() memory.Ticket{
			func() memory.Ticket { return a.WriteFrom(b, list) },
			func() memory.Ticket { return r.Pull(chunks, a, list) },
			func() memory.Ticket { return chunks.Move([]memory.Segment{{Arena: 4 << 20, Bytes: 1 << 20}}) },
			func() memory.Ticket { return a.ReadInto(got, list) },
		} {
			if err := step().Wait(); err != nil {
				return err
			}
		}
		if !bytes.Equal(got, b) {
			return fmt.Errorf("round %d: %w", i, errWrongBytes)
		}
	}
	for _, x := range []*cuda.Arena{a, chunks} {
		h, files, err := x.Export()
		if err != nil {
			return err
		}
		in, err := r.Import(h, files)
		if err != nil {
			return err
		}
		f, _, err := x.DMABuf(0, 65536)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Close(), in.Flush(), in.Close()); err != nil {
			return err
		}
	}
	part, err := r.Wrap(u, chunks.Address()+2<<20, 4<<20)
	if err != nil {
		return err
	}
	return errors.Join(part.Close(), chunks.Close(), a.Close())
}

var errWrongBytes = errors.New("wrong bytes, and nobody says so")

// Whatever call of the driver fails, and however: nothing hangs, no byte is
// wrong, the error is the driver's, and nothing is left.
func TestEveryCallFails(t *testing.T) {
	if !alone(t) {
		return
	}
	w := cudatest.Use(t, cudatest.Options{Unordered: true})
	host := mapped(t, 64<<20)
	if err := everything(w, host); err != nil {
		t.Fatal(err)
	}
	made := mine(w).Calls
	if len(made) < 40 {
		t.Errorf("only %d kinds of calls were made: %v", len(made), made)
	}
	type fault struct{ code, first int }
	faults := []fault{{1, 1}, {cudatest.NotSupported, 2}, {cudatest.IllegalAddress, 1}}
	if *soak > 0 {
		for _, code := range []int{1, cudatest.OutOfMemory, cudatest.NotSupported, cudatest.IllegalAddress, cudatest.ECCUncorrectable, cudatest.Unknown} {
			for _, first := range []int{1, 2, 3, 5, 9} {
				faults = append(faults, fault{code, first})
			}
		}
	}
	for call := range made {
		for _, f := range faults {
			files, before := openFiles(t), mine(w)
			w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: call, Code: f.code, First: f.first, Count: 1}}})
			err := everything(w, host)
			w.Clear()
			what := fmt.Sprintf("%s, call %d answers %d", call, f.first, f.code)
			e, ok := errors.AsType[*cuda.Error](err)
			sticky := f.code >= 200 && f.code < 801 || f.code == cudatest.Unknown
			switch {
			case errors.Is(err, errWrongBytes):
				t.Errorf("%s: %v", what, err)
			case err != nil && !ok && !errors.Is(err, cuda.ErrUnavailable) && !errors.Is(err, cuda.ErrNotShareable) && !errors.Is(err, memory.ErrNoDMABuf):
				t.Errorf("%s: %v", what, err)
			case ok && e.Code != f.code:
				t.Errorf("%s: the error is of another: %v", what, err)
			case errors.Is(err, cuda.ErrDead) && !sticky:
				t.Errorf("%s: the device is taken for dead: %v", what, err)
			}
			now := mine(w)
			if gives(call) {
				// What could not be given back is left, for this process.
				if now.Registrations > before.Registrations {
					host = host[1<<20:]
				}
				continue
			}
			if now.Live() > before.Live() || openFiles(t) > files {
				t.Errorf("%s: before %+v and %d files, now %+v and %d (%v)", what, before, files, now, openFiles(t), err)
			}
		}
	}
}

// gives says whether a call gives something back, which is left if it fails.
func gives(call string) bool {
	return slices.ContainsFunc([]string{"Free", "Destroy", "Unregister", "Close", "Release", "Unmap", "Unload"}, func(s string) bool { return strings.Contains(call, s) })
}

var soak = flag.Duration("soak", 0, "how long random tests go on; more than 0: all faults")

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, f := range list {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", f.Name())); err == nil && !strings.Contains(to, "anon_inode") {
			n++
		}
	}
	return n
}

// A device that breaks fails what runs and what comes, in the driver's words,
// and is let go without a hang.
func TestDeadDevice(t *testing.T) {
	if !alone(t) {
		return
	}
	w := world(t)
	r, err := cuda.Open(cuda.Options{Library: w.Library(), Scatter: -1})
	if err != nil {
		t.Fatal(err)
	}
	a, b := alloc(t, r, 1<<20), alloc(t, r, 1<<20)
	host := pinned(t, a, 1<<20)
	w.Set(cudatest.Faults{Hold: true})
	tickets := []memory.Ticket{a.WriteFrom(host, whole(4096)), a.Move([]memory.Segment{{Arena: 8192, Bytes: 10}}), b.ReadInto(make([]byte, 10), whole(10))}
	w.Set(cudatest.Faults{Poison: cudatest.IllegalAddress})
	tickets = append(tickets, a.ReadInto(host, whole(1<<20)))
	failed := 0
	for _, ticket := range tickets {
		if err := ticket.Wait(); err != nil {
			failed++
			if e, ok := errors.AsType[*cuda.Error](err); !ok || e.Code != cudatest.IllegalAddress || !errors.Is(err, cuda.ErrDead) || !strings.Contains(err.Error(), "CUDA_ERROR_ILLEGAL_ADDRESS") {
				t.Errorf("%v", err)
			}
		}
	}
	if failed == 0 {
		t.Error("nothing has failed")
	}
	<-r.Dead()
	if err := r.Reason(); !errors.Is(err, cuda.ErrDead) {
		t.Errorf("reason: %v", err)
	}
	_, err = r.Alloc(a.GPU().UUID, 1)
	_, _, exportErr := a.Export()
	_, pinErr := a.Pin(mapped(t, 4096))
	for what, err := range map[string]error{
		"alloc": err, "export": exportErr, "pin": pinErr,
		"write": a.WriteFrom(host, whole(10)).Wait(), "read": b.ReadInto(host, whole(10)).Wait(), "pull": r.Pull(a, b, whole(10)).Wait(),
	} {
		if !errors.Is(err, cuda.ErrDead) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, x := range []*cuda.Arena{a, b} {
		if err := x.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	if err := r.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

func TestNoMemory(t *testing.T) {
	r, _ := open(t, cuda.Options{})
	g := r.GPUs()[0]
	for name, alloc := range map[string]func() (*cuda.Arena, error){
		"one":    func() (*cuda.Arena, error) { return r.Alloc(g.UUID, g.Bytes+1) },
		"chunks": func() (*cuda.Arena, error) { return r.AllocChunks(g.UUID, g.Bytes+1, 64<<20) },
	} {
		if _, err := alloc(); !errors.Is(err, cuda.ErrNoMemory) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, n := range []int64{0, -1, 1<<63 - 1} {
		if _, err := r.Alloc(g.UUID, n); err == nil {
			t.Errorf("%d bytes were allocated", n)
		}
	}
	if r.Reason() != nil {
		t.Error(r.Reason())
	}
}

func TestNoDevice(t *testing.T) {
	if !alone(t) {
		return
	}
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, library := range []string{filepath.Join(t.TempDir(), "libcuda.so.1"), "/dev/null", pipe, ""} {
		_, err := cuda.Open(cuda.Options{Library: library})
		if !errors.Is(err, cuda.ErrUnavailable) || !strings.Contains(err.Error(), "library") || len(err.Error()) < 60 {
			t.Errorf("%q: %v", library, err)
		}
	}
	w := cudatest.Use(t, cudatest.Options{Devices: -1})
	_, err := cuda.Open(cuda.Options{Library: w.Library()})
	if e, ok := errors.AsType[*cuda.Error](err); !ok || !errors.Is(err, cuda.ErrUnavailable) || e.Call != "cuInit" || e.Name != "CUDA_ERROR_NO_DEVICE" {
		t.Errorf("%v", err)
	}
	if _, err := cuda.Open(cuda.Options{Library: "/another"}); !errors.Is(err, cuda.ErrUnavailable) || !strings.Contains(err.Error(), w.Library()) {
		t.Errorf("another library: %v", err)
	}
}

func TestNoDMABuf(t *testing.T) {
	if !alone(t, "KVFERRY_CUDA_VARIANT=no-dmabuf") {
		return
	}
	r, _ := open(t, cuda.Options{})
	a := alloc(t, r, 1<<20)
	if c, err := r.Capabilities(a.GPU().UUID); err != nil || c.DMABuf {
		t.Errorf("%+v, %v", c, err)
	}
	if _, _, err := a.DMABuf(0, 4096); !errors.Is(err, memory.ErrNoDMABuf) {
		t.Errorf("%v", err)
	}
}

func TestFlushWhereTheDeviceWantsIt(t *testing.T) {
	if !alone(t, "KVFERRY_CUDA_VARIANT=unordered") {
		return
	}
	r, w := open(t, cuda.Options{})
	a := alloc(t, r, 1<<20)
	if c, err := r.Capabilities(a.GPU().UUID); err != nil || c.OwnerOrdered {
		t.Errorf("%+v, %v", c, err)
	}
	if err := a.Flush(); err != nil {
		t.Error(err)
	}
	if n := mine(w).Calls["cuFlushGPUDirectRDMAWrites"]; n != 1 {
		t.Errorf("%d flushes", n)
	}
}

// What only a new process gets over is found out at the first call that says so,
// also where it starts a copy.
func TestStickyErrorKillsTheDevice(t *testing.T) {
	defaultDriver(t)
	for name, code := range map[string]int{"assert": 710, "link between devices": 220, "contained": 226, "tensor memory": 721} {
		t.Run(name, func(t *testing.T) {
			r, w := open(t, cuda.Options{})
			a := alloc(t, r, 1<<20)
			w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemcpyBatchAsync", Code: code, Count: 1}}})
			for range 2 {
				err := a.WriteFrom(make([]byte, 4096), whole(4096)).Wait()
				if e, ok := errors.AsType[*cuda.Error](err); !ok || e.Code != code || !errors.Is(err, cuda.ErrDead) {
					t.Errorf("%v", err)
				}
			}
			<-r.Dead()
		})
	}
}

// The error names the call that has failed, also where the driver takes no batches.
func TestErrorNamesTheCall(t *testing.T) {
	defaultDriver(t)
	r, w := open(t, cuda.Options{})
	a := alloc(t, r, 1<<20)
	host := make([]byte, 4096)
	copies := map[string]func() memory.Ticket{
		"cuMemcpyHtoDAsync": func() memory.Ticket { return a.WriteFrom(host, whole(4096)) },
		"cuMemcpyDtoHAsync": func() memory.Ticket { return a.ReadInto(host, whole(4096)) },
		"cuMemcpyAsync":     func() memory.Ticket { return a.Move([]memory.Segment{{Arena: 8192, Bytes: 4096}}) },
	}
	named := func(want string, f func() memory.Ticket, code int) {
		t.Helper()
		err := f().Wait()
		if e, ok := errors.AsType[*cuda.Error](err); !ok || e.Call != want || e.Code != code {
			t.Errorf("%v, want one of %s", err, want)
		}
	}
	for _, f := range copies {
		w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemcpyBatchAsync", Code: 1, Count: 1}}})
		named("cuMemcpyBatchAsync", f, 1)
	}
	for call, f := range copies {
		w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemcpyBatchAsync", Code: cudatest.NotSupported}, {Call: call, Code: 1}}})
		named(call, f, 1)
	}
}

// A copy from a dead device to one that lives fails before it starts, and tells
// whose death it is; so does a look at each.
func TestPullFromADeadDevice(t *testing.T) {
	if !alone(t, devicesEnv+"=peers") {
		return
	}
	r, w := open(t, cuda.Options{})
	gpus := r.GPUs()
	a := alloc(t, r, 1<<20)
	b, err := r.Alloc(gpus[1].UUID, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	wait(t, r.Pull(a, b, whole(4096)))
	w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemcpyBatchAsync", Code: cudatest.IllegalAddress, Count: 1}}})
	if err := b.Move([]memory.Segment{{Arena: 8192, Bytes: 10}}).Wait(); !errors.Is(err, cuda.ErrDead) {
		t.Fatal(err)
	}
	before := mine(w).Calls["cuMemcpyBatchAsync"]
	if err := r.Pull(a, b, whole(4096)).Wait(); !errors.Is(err, cuda.ErrDead) || !strings.Contains(fmt.Sprint(err), gpus[1].UUID.String()) {
		t.Errorf("%v", err)
	}
	if n := mine(w).Calls["cuMemcpyBatchAsync"]; n != before {
		t.Errorf("%d calls, and %d before", n, before)
	}
	wait(t, a.Move([]memory.Segment{{Arena: 8192, Bytes: 10}})) // it lives
	if c, err := r.Look(gpus[0].UUID); err != nil || !c.Batch {
		t.Errorf("%+v, %v", c, err)
	}
	if c, err := r.Look(gpus[1].UUID); !errors.Is(err, cuda.ErrDead) || !strings.Contains(fmt.Sprint(err), gpus[1].UUID.String()) || c.Driver == 0 {
		t.Errorf("%+v, %v", c, err)
	}
}

// A look makes no context and takes nothing, and knows what an open device says.
func TestLook(t *testing.T) {
	r, w := open(t, cuda.Options{Scatter: measured})
	u := r.GPUs()[0].UUID
	before := mine(w)
	c, err := r.Look(u)
	if err != nil {
		t.Fatal(err)
	}
	now := mine(w)
	for call, n := range now.Calls {
		if n != before.Calls[call] && call != "cuDeviceGetAttribute" && call != "cuDriverGetVersion" {
			t.Errorf("%d calls of %s", n-before.Calls[call], call)
		}
	}
	if now.Live() != before.Live() || now.DeviceBytes != before.DeviceBytes {
		t.Errorf("before %+v, now %+v", before, now)
	}
	opened, err := r.Capabilities(u)
	if opened.Scatter = 0; err != nil || opened != c || c.Driver == 0 {
		t.Errorf("%+v, and opened %+v, %v", c, opened, err)
	}
	if c, err := r.Look(cuda.UUID{}); !errors.Is(err, cuda.ErrUnavailable) || c != (cuda.Capabilities{}) {
		t.Errorf("%+v, %v", c, err)
	}
}

// Close waits for what is just being made, and a second Close for the first: the
// context is there as long.
func TestCloseWaitsForCalls(t *testing.T) {
	r, w := open(t, cuda.Options{})
	u := r.GPUs()[0].UUID
	if _, err := r.Capabilities(u); err != nil {
		t.Fatal(err)
	}
	before := mine(w)
	w.Set(cudatest.Faults{Hold: true})
	ended := make(chan error, 3)
	go func() {
		a, err := r.Alloc(u, 1<<20)
		if err == nil {
			err = a.Close()
		}
		ended <- err
	}()
	until(t, "it is being filled", func() bool { return mine(w).Calls["cuMemsetD8Async"] > before.Calls["cuMemsetD8Async"] })
	closed := func() bool { return errors.Is(r.Reach(u, u), cuda.ErrClosed) }
	go func() { ended <- r.Close() }()
	until(t, "the runtime is being closed", closed)
	go func() { ended <- r.Close() }()
	select {
	case err := <-ended:
		t.Errorf("one did not wait: %v", err)
		ended <- err
	case <-time.After(20 * time.Millisecond):
	}
	w.Clear()
	for range 3 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	if now := mine(w); now.Live() >= before.Live() {
		t.Errorf("before %+v, now %+v", before, now)
	}
	for name, err := range map[string]error{
		"alloc":        func() error { _, err := r.Alloc(u, 1); return err }(),
		"wrap":         func() error { _, err := r.Wrap(u, 1<<20, 1); return err }(),
		"import":       func() error { _, err := r.Import(cuda.Handle{Kind: cuda.Legacy, UUID: u, Bytes: 1}, nil); return err }(),
		"capabilities": func() error { _, err := r.Capabilities(u); return err }(),
	} {
		if !errors.Is(err, cuda.ErrClosed) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever runs beside Close either works or says that it is closed, and leaves
// nothing.
func TestCallsBesideClose(t *testing.T) {
	w := world(t)
	defer w.Clear()
	before := mine(w)
	for n := range 12 {
		r, err := cuda.Open(cuda.Options{Library: w.Library(), Scatter: -1})
		if err != nil {
			t.Fatal(err)
		}
		u, host := r.GPUs()[0].UUID, mapped(t, 1<<20)
		w.Set(cudatest.Faults{Delay: 2 * time.Millisecond})
		var work sync.WaitGroup
		rounds := make(chan struct{}, 1000)
		for range 4 {
			work.Go(func() {
				for beside(r, u, host) == nil {
					select {
					case rounds <- struct{}{}:
					default:
					}
				}
			})
		}
		for range n {
			<-rounds
		}
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		work.Wait()
		if r.Reason() != nil {
			t.Errorf("dead: %v", r.Reason())
		}
		if now := mine(w); now.Live() != before.Live() {
			t.Fatalf("before %+v, now %+v", before, now)
		}
	}
}

// beside does some of all until the runtime is closed.
func beside(r *cuda.Runtime, u cuda.UUID, host []byte) error {
	a, err := r.Alloc(u, 1<<20)
	if err != nil {
		return err
	}
	if unpin, err := a.Pin(host); err == nil {
		err = errors.Join(a.WriteFrom(host, whole(4096)).Wait(), r.Pull(a, a, whole(1)).Wait(), unpin())
		if err != nil {
			return errors.Join(err, a.Close())
		}
	}
	if h, files, err := a.Export(); err == nil {
		if b, err := r.Import(h, files); err == nil {
			b.Close()
		}
	}
	return a.Close()
}

// What an event says is told, though all that stands before it has ended well.
func TestEventFails(t *testing.T) {
	r, w := open(t, cuda.Options{})
	a := alloc(t, r, 1<<20)
	w.Set(cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuEventQuery", Code: 1, Count: 1}}})
	err := a.WriteFrom(make([]byte, 4096), whole(4096)).Wait()
	if e, ok := errors.AsType[*cuda.Error](err); !ok || e.Call != "cuEventQuery" || errors.Is(err, cuda.ErrDead) {
		t.Errorf("%v", err)
	}
	wait(t, a.WriteFrom(make([]byte, 4096), whole(4096)))
}
