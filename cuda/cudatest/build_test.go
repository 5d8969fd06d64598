package cudatest_test

import (
	"bytes"
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
