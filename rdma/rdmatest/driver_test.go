package rdmatest_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// newWorld is a world for programs of its own: it needs no package rdma.
func newWorld(tb testing.TB) *rdmatest.World {
	tb.Helper()
	if _, err := rdmatest.Build(); err != nil {
		tb.Skip(err)
	}
	w, err := rdmatest.NewWorld(tb.TempDir(), rdmatest.DeviceSpec{Name: "double0"}, rdmatest.DeviceSpec{Name: "double1"})
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { w.Close() })
	return w
}

func driver(tb testing.TB, w *rdmatest.World, program string, args ...string) (string, error) {
	cmd := exec.CommandContext(tb.Context(), program, args...)
	cmd.Env = append(os.Environ(), w.Env()...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// Queues, arming, acknowledgement, and what is refused, by a program in C
// under the sanitizers of address and of undefined behaviour.
func TestVerbsUnderSanitizers(t *testing.T) {
	w := newWorld(t)
	program := rdmatest.Driver(t, "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
	if out, err := driver(t, w, program); err != nil || out != "" {
		t.Errorf("%v\n%s", err, out)
	}
	if n := w.Counts(); n.Contexts+n.QPs+n.Regions+n.CQs+n.Channels+n.PDs != 0 || n.Reads == 0 {
		t.Errorf("left: %+v", n.Tally)
	}
}

// Whoever destroys a queue without acknowledging its events waits for ever on
// hardware; here the process ends.
func TestUnacknowledgedEventsEndTheProcess(t *testing.T) {
	w := newWorld(t)
	out, err := driver(t, w, rdmatest.Driver(t, "-O2", "-DACK_SECONDS=1"), "unacknowledged")
	if err == nil || !strings.Contains(out, "never acknowledged") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestBuild(t *testing.T) {
	path, err := rdmatest.Build()
	if err != nil {
		t.Skip(err)
	}
	t.Logf("built: %s", path)
	if again, err := rdmatest.Build(); again != path || err != nil {
		t.Error(again, err)
	}
}

func TestNewWorldRefuses(t *testing.T) {
	newWorld(t)
	for name, devices := range map[string][]rdmatest.DeviceSpec{
		"nine devices":   make([]rdmatest.DeviceSpec, 9),
		"no name":        {{}},
		"a path":         {{Name: "a/b"}},
		"MTU":            {{Name: "a", MTU: 1500}},
		"rate":           {{Name: "a", Rate: 11}},
		"reads":          {{Name: "a", MaxReads: 256}},
		"message":        {{Name: "a", MaxMsg: 1 << 40}},
		"several pieces": {{Name: "a", MaxSGE: 65}},
	} {
		if w, err := rdmatest.NewWorld(t.TempDir(), devices...); err == nil {
			t.Errorf("%s: made", name)
			w.Close()
		}
	}
	dir := t.TempDir()
	w, err := rdmatest.NewWorld(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := rdmatest.NewWorld(dir); err == nil {
		t.Error("a second world in one directory")
	}
}
