package cudatest_test

import (
	"bufio"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/double"
)

// newWorld is a world for programs of its own: it needs no package cuda.
func newWorld(tb testing.TB, o cudatest.Options) *cudatest.World {
	tb.Helper()
	w, err := cudatest.New(o)
	if errors.Is(err, double.ErrUnavailable) {
		tb.Skip(err)
	}
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { w.Close() })
	return w
}

// plain is the driver program without sanitizers, built once.
var plain struct {
	once sync.Once
	dir  string
	path string
}

func TestMain(m *testing.M) {
	code := m.Run()
	os.RemoveAll(plain.dir)
	os.Exit(code)
}

func program(tb testing.TB) string {
	tb.Helper()
	plain.once.Do(func() {
		var err error
		if plain.dir, err = os.MkdirTemp("", "kvferry-cuda-driver-"); err != nil {
			tb.Fatal(err)
		}
		plain.path = cudatest.Driver(tb, plain.dir, "-O2")
	})
	if plain.path == "" {
		tb.Skip("the driver program was not built")
	}
	return plain.path
}

// child is a driver program in a role, with which one talks by lines.
type child struct {
	tb    testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
}

func start(tb testing.TB, w *cudatest.World, args ...string) *child {
	tb.Helper()
	c := &child{tb: tb, cmd: exec.CommandContext(tb.Context(), program(tb), args...)}
	c.cmd.Env = append(os.Environ(), w.Env()...)
	c.cmd.Stderr = os.Stderr
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		tb.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	c.lines = bufio.NewScanner(out)
	if err := c.cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { c.kill() })
	return c
}

func (c *child) kill() {
	c.cmd.Process.Kill()
	c.cmd.Wait()
}

// line is what it says next.
func (c *child) line() string {
	c.tb.Helper()
	hangs := time.AfterFunc(2*time.Minute, func() { c.cmd.Process.Kill() })
	defer hangs.Stop()
	if !c.lines.Scan() {
		c.tb.Fatalf("%v has ended: %v", c.cmd.Args[1:], c.cmd.Wait())
	}
	return c.lines.Text()
}

func (c *child) tell(line string) { fmt.Fprintln(c.in, line) }

// ask tells it a line, and wants another.
func (c *child) ask(line, want string) {
	c.tb.Helper()
	c.tell(line)
	if got := c.line(); got != want {
		c.tb.Fatalf("%q to %q, want %q", got, line, want)
	}
}

func (c *child) pid() int { return c.cmd.Process.Pid }

// What one process sees, by a program in C under the sanitizers of addresses and
// of undefined behaviour: it leaves nothing behind.
func TestDriverUnderSanitizers(t *testing.T) {
	w := newWorld(t, cudatest.Options{Memory: 64 << 20})
	cmd := exec.CommandContext(t.Context(), cudatest.Driver(t, t.TempDir(), "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
	// The bytes of a device are read through a reservation: no gap for shadows.
	cmd.Env = append(append(os.Environ(), w.Env()...), "ASAN_OPTIONS=handle_segv=0:allow_user_segv_handler=1:detect_leaks=0")
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v\n%s", err, out)
	}
	n := w.Counts()
	if n.Live() != 0 || n.Contexts != 0 || n.Modules != 0 || n.DeviceBytes != 0 {
		t.Errorf("left: %+v", n.Tally)
	}
	for call, want := range map[string]uint64{"cuMemcpyBatchAsync": 4, "cuModuleLoadData": 3, "cuLaunchKernel": 3, "cuMemGetInfo_v2": 1, "cuGraphCreate": 1, "cuArrayCreate_v2": 0} {
		if n.Calls[call] != want {
			t.Errorf("%d calls of %s, want %d", n.Calls[call], call, want)
		}
	}
}

// Memory and events go from one process to another; what was freed is gone only
// when nobody has it open.
func TestImport(t *testing.T) {
	for name, gone := range map[string]func(t *testing.T, c *child){
		"freed by its owner": func(_ *testing.T, c *child) { c.ask("free", "freed") },
		"its owner is dead":  func(_ *testing.T, c *child) { c.kill() },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, cudatest.Options{})
			owner, importer := start(t, w, "owner"), start(t, w, "importer")
			memory, event := owner.line(), owner.line()
			importer.tell(memory)
			importer.ask(event, "opened")
			n := w.Counts()
			if n.Imports != 1 || n.Allocations != 1 || n.DeviceBytes != 4<<20 || n.Processes[importer.pid()].Imports != 1 || n.Processes[importer.pid()].DeviceBytes != 0 ||
				n.Processes[owner.pid()].DeviceBytes != 4<<20 {
				t.Errorf("%+v", n)
			}
			owner.ask("change", "changed")
			importer.ask("wait", "waited")
			gone(t, owner)
			if n := w.Counts(); n.Imports != 1 || n.DeviceBytes != 4<<20 || n.Allocations != 0 {
				t.Errorf("held by the importer alone: %+v", n.Tally)
			}
			importer.ask("hold", "held")
			importer.ask("close", "closed")
			if n := w.Counts(); n.Imports != 0 || n.DeviceBytes != 0 {
				t.Errorf("closed: %+v", n.Tally)
			}
		})
	}
}

// What a process that was killed held is nobody's.
func TestKilledHoldsNothing(t *testing.T) {
	w := newWorld(t, cudatest.Options{Memory: 256 << 20})
	heaps := []*child{start(t, w, "heap"), start(t, w, "heap"), start(t, w, "heap")}
	for _, c := range heaps {
		if got := c.line(); got != "ready" {
			t.Fatal(got)
		}
	}
	n := w.Counts()
	if n.Allocations != 30 || n.Streams != 30 || n.Events != 30 || n.Registrations != 30 || n.DeviceBytes != 60<<20 || n.Contexts != 3 || n.Processes[heaps[0].pid()].Streams != 10 {
		t.Errorf("%+v", n)
	}
	for _, c := range heaps {
		c.kill()
	}
	n = w.Counts()
	if n.Live() != 0 || n.DeviceBytes != 0 || n.Contexts != 0 {
		t.Errorf("%+v", n.Tally)
	}
	if n.Calls["cuMemAlloc_v2"] != 30 {
		t.Errorf("%d calls: those of the dead count", n.Calls["cuMemAlloc_v2"])
	}
}

// More processes than there is room for, one after the other.
func TestPlacesAreGivenAgain(t *testing.T) {
	w := newWorld(t, cudatest.Options{})
	const runs = 150
	for range runs {
		cmd := exec.CommandContext(t.Context(), program(t), "init")
		cmd.Env = append(os.Environ(), w.Env()...)
		if out, err := cmd.CombinedOutput(); err != nil || string(out) != "0 12090\n" {
			t.Fatalf("%v: %s", err, out)
		}
	}
	if n := w.Counts(); n.Calls["cuInit"] != runs {
		t.Errorf("%d calls", n.Calls["cuInit"])
	}
}

func TestDevices(t *testing.T) {
	for name, tt := range map[string]struct {
		options cudatest.Options
		role    string
		want    string
	}{
		"one":       {role: "init", want: "0 12090\n"},
		"none":      {options: cudatest.Options{Devices: -1}, role: "init", want: "100 12090\n"},
		"older":     {options: cudatest.Options{Version: 11080}, role: "init", want: "0 11080\n"},
		"no peers":  {options: cudatest.Options{Devices: 2}, role: "peers", want: "0 217 700\n"},
		"two peers": {options: cudatest.Options{Devices: 2, Peers: true}, role: "peers", want: "1 0 0\n"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, tt.options)
			cmd := exec.CommandContext(t.Context(), program(t), tt.role)
			cmd.Env = append(os.Environ(), w.Env()...)
			if out, err := cmd.CombinedOutput(); err != nil || string(out) != tt.want {
				t.Errorf("%v: %q, want %q", err, out, tt.want)
			}
		})
	}
}

// Without a world a process has a device of its own, and a file that is none is
// refused.
func TestWithoutWorld(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), program(t), "init")
	if out, err := cmd.CombinedOutput(); err != nil || string(out) != "0 12090\n" {
		t.Errorf("%v: %q", err, out)
	}
	file := filepath.Join(t.TempDir(), "none")
	if err := os.WriteFile(file, []byte("no world"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd = exec.CommandContext(t.Context(), program(t), "init")
	cmd.Env = append(os.Environ(), "KVFERRY_CUDA_WORLD="+file)
	if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), "is no world of this library") {
		t.Errorf("%v: %q", err, out)
	}
}

func TestFaults(t *testing.T) {
	for name, tt := range map[string]struct {
		faults cudatest.Faults
		least  time.Duration // that four rounds take
		want   string
	}{
		"none":  {want: "4 rounds, 0 bytes wrong, result 0, 0"},
		"delay": {faults: cudatest.Faults{Delay: 5 * time.Millisecond}, least: 40 * time.Millisecond, want: "4 rounds, 0 bytes wrong, result 0, 0"},
		"bandwidth": {
			faults: cudatest.Faults{Bandwidth: 100 << 20}, least: 80 * time.Millisecond, want: "4 rounds, 0 bytes wrong, result 0, 0",
		},
		"a call": {
			faults: cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemcpyDtoHAsync", Code: cudatest.Unknown, First: 3, Count: 1}}},
			want:   "3 rounds, 0 bytes wrong, result 999, 0",
		},
		"no memory": {
			faults: cudatest.Faults{Fail: []cudatest.Fail{{Call: "cuMemAlloc", Code: cudatest.OutOfMemory}}},
			want:   "4 rounds, 0 bytes wrong, result 0, 2",
		},
		"a context that breaks": {
			faults: cudatest.Faults{Poison: cudatest.IllegalAddress, PoisonNth: 4}, want: "2 rounds, 0 bytes wrong, result 700, 700",
		},
		"a wrong byte": {faults: cudatest.Faults{FlipByte: 3<<20 + 17}, want: "4 rounds, 1 bytes wrong, result 0, 0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, cudatest.Options{})
			c := start(t, w, "copies")
			if got := c.line(); got != "ready" {
				t.Fatal(got)
			}
			w.Set(tt.faults)
			begin := time.Now()
			c.ask("go", tt.want)
			if took := time.Since(begin); took < tt.least {
				t.Errorf("it took %v, want %v", took, tt.least)
			}
		})
	}
}

// A copy that is held ends when it is let go, or with its process.
func TestHold(t *testing.T) {
	w := newWorld(t, cudatest.Options{})
	c, dead := start(t, w, "copies"), start(t, w, "copies")
	for _, c := range []*child{c, dead} {
		if got := c.line(); got != "ready" {
			t.Fatal(got)
		}
	}
	w.Set(cudatest.Faults{Hold: true})
	c.tell("go")
	dead.tell("go")
	waitFor(t, "copies", func() bool { return w.Counts().Calls["cuStreamSynchronize"] == 2 })
	dead.kill()
	if n := w.Counts(); n.Calls["cuMemcpyDtoHAsync_v2"] != 0 || n.Allocations != 1 {
		t.Errorf("%+v", n.Tally)
	}
	w.Clear()
	if got := c.line(); got != "4 rounds, 0 bytes wrong, result 0, 0" {
		t.Error(got)
	}
}

// waitFor polls until ok, for at most 20 s.
func waitFor(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(200 * time.Microsecond) {
		if time.Now().After(end) {
			tb.Fatalf("no %s", what)
		}
	}
}

// Every call is a line of the trace.
func TestTrace(t *testing.T) {
	trace := filepath.Join(t.TempDir(), "trace")
	w := newWorld(t, cudatest.Options{Trace: trace})
	c := start(t, w, "heap")
	if got := c.line(); got != "ready" {
		t.Fatal(got)
	}
	c.kill()
	b, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(b), fmt.Sprintf("%d cuMemAlloc_v2\n", c.pid())); got != 10 {
		t.Errorf("%d lines in\n%s", got, b)
	}
}

// A driver lacks what is hidden, and has all else that the header names.
func TestHide(t *testing.T) {
	exports := func(o cudatest.Options) []string {
		f, err := elf.Open(newWorld(t, o).Library())
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		symbols, err := f.DynamicSymbols()
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		for _, s := range symbols {
			if s.Section != elf.SHN_UNDEF {
				names = append(names, s.Name)
			}
		}
		slices.Sort(names)
		return names
	}
	all, some := exports(cudatest.Options{}), exports(cudatest.Options{Hide: []string{"cuMemcpyBatchAsync"}})
	i, found := slices.BinarySearch(all, "cuMemcpyBatchAsync")
	if !found || len(all) < 190 {
		t.Fatalf("%d exports", len(all))
	}
	if !slices.Equal(slices.Delete(all, i, i+1), some) {
		t.Errorf("%d exports, without one %d", len(all)+1, len(some))
	}
}
