package cudatest_test

import (
	"bytes"
	"os"
	"os/exec"
	"sync"
	"testing"

	"github.com/kvferry/kvferry/cuda/cudatest"
)

func TestBuild(t *testing.T) {
	path, err := cudatest.Build()
	if err != nil {
		t.Skip(err)
	}
	t.Logf("built: %s", path)
	if again, err := cudatest.Build(); again != path || err != nil {
		t.Error(again, err)
	}
}

// Any number of processes may build at once.
func TestBuildAtOnce(t *testing.T) {
	if _, err := cudatest.Build(); err != nil {
		t.Skip(err)
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	var all sync.WaitGroup
	var paths [3][]byte
	for i := range paths {
		all.Go(func() {
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBuild$", "-test.v")
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			_, paths[i], _ = bytes.Cut(out, []byte("built: "))
			paths[i], _, _ = bytes.Cut(paths[i], []byte("\n"))
		})
	}
	all.Wait()
	for _, p := range paths {
		if !bytes.Equal(p, paths[0]) || !bytes.HasPrefix(p, []byte(os.Getenv("XDG_CACHE_HOME"))) {
			t.Errorf("built %q and %q", p, paths[0])
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for name, o := range map[string]cudatest.Options{
		"nine devices":    {Devices: 9},
		"negative memory": {Memory: -1},
		"a long path":     {Trace: "/" + string(bytes.Repeat([]byte("x"), 256))},
		"no such call":    {Hide: []string{"cuNothing"}},
	} {
		if w, err := cudatest.New(o); err == nil {
			t.Errorf("%s: made", name)
			w.Close()
		}
	}
}
