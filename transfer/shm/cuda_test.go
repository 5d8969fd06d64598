package shm

import (
	"errors"
	"os"
	"testing"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/cuda/cudatest"
	"github.com/kvferry/kvferry/internal/memory"
	"github.com/kvferry/kvferry/transfer/transfertest"
)

// The suite with memory of a device as the driver has it: of a GPU where
// KVFERRY_CUDA_GPU asks for that, else of the emulated driver.
func TestSuiteCUDA(t *testing.T) {
	o := cuda.Options{}
	if os.Getenv("KVFERRY_CUDA_GPU") == "" {
		o.Library = cudatest.Use(t, cudatest.Options{}).Library()
	}
	r, err := cuda.Open(o)
	if errors.Is(err, cuda.ErrUnavailable) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	gpu, err := r.Find("0")
	if err != nil {
		t.Fatal(err)
	}
	device := func(size int64) (memory.Arena, error) { return r.Alloc(gpu.UUID, size) }
	f := factory(t, Options{Workers: 2, Staging: 16 << 20})
	f.Owner, f.Reader = device, device
	t.Run("suite", func(t *testing.T) { transfertest.Run(t, f) })
	if s := r.Stats(); s.Arenas != 0 || s.Pinned != 0 {
		t.Errorf("stats %+v, want that nothing is left", s)
	}
}
