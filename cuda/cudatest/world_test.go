package cudatest_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/double"
)

// One world a process: what comes second gets the first, with its faults cleared,
// or is skipped if it wants another.
func TestUse(t *testing.T) {
	if os.Getenv("KVFERRY_CUDA_VARIANT") != "" {
		t.Skip("it looks at the variants itself")
	}
	w := cudatest.Use(t, cudatest.Options{})
	w.Set(cudatest.Faults{Hold: true})
	t.Run("again", func(t *testing.T) {
		if again := cudatest.Use(t, cudatest.Options{}); again != w {
			t.Error("another world")
		}
	})
	var skipped bool
	t.Run("another", func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		cudatest.Use(t, cudatest.Options{Devices: 5})
	})
	if !skipped {
		t.Error("a second world in one process")
	}
	t.Run("a real GPU", func(t *testing.T) {
		t.Setenv("KVFERRY_CUDA_GPU", "1")
		defer func() { skipped = t.Skipped() }()
		skipped = false
		cudatest.Use(t, cudatest.Options{})
	})
	if !skipped {
		t.Error("not skipped where a real GPU is asked for")
	}
	if v := os.Getenv("KVFERRY_CUDA_WORLD"); !strings.HasPrefix(v, "/proc/") || w.Env()[0] != "KVFERRY_CUDA_WORLD="+v {
		t.Errorf("the environment names %q, and children are told %q", v, w.Env())
	}
}

// A driver that is older or stricter is chosen from outside.
func TestVariants(t *testing.T) {
	for name, o := range cudatest.Variants() {
		got, err := cudatest.Choose(name, cudatest.Options{Devices: 2})
		if err != nil || got.Devices != 2 || (o.Version != 0 && got.Version != o.Version) || len(got.Hide) != len(o.Hide) || got.NoDMABuf != o.NoDMABuf || got.Faults.Strict != o.Faults.Strict {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
		w, err := cudatest.New(got)
		if errors.Is(err, double.ErrUnavailable) {
			t.Skip(err)
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		w.Close()
	}
	if _, err := cudatest.Choose("none", cudatest.Options{}); err == nil {
		t.Error("a variant that there is not")
	}
}

func TestSetRefuses(t *testing.T) {
	w := newWorld(t, cudatest.Options{})
	for name, list := range map[string][]cudatest.Fail{
		"no such call": {{Call: "cuNothing", Code: 1}},
		"too many":     make([]cudatest.Fail, 17),
	} {
		if name == "too many" {
			for i := range list {
				list[i].Call = "cuInit"
			}
		}
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("it was taken")
				}
			}()
			w.Set(cudatest.Faults{Fail: list})
		})
	}
}
