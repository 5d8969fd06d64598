//go:build !(linux && cgo && cuda && (amd64 || arm64))

package cuda_test

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/kvferry/kvferry/cuda"
)

func TestBinaryWithoutCUDASaysSo(t *testing.T) {
	_, err := cuda.Open(cuda.Options{})
	if !errors.Is(err, cuda.ErrUnavailable) || !strings.Contains(err.Error(), "built without") {
		t.Errorf("%v", err)
	}
	f, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	var r *cuda.Runtime
	if _, err := r.Import(cuda.Handle{}, []*os.File{f}); !errors.Is(err, cuda.ErrUnavailable) {
		t.Errorf("%v", err)
	}
	if err := f.Close(); !errors.Is(err, os.ErrClosed) {
		t.Error("the file was left open")
	}
}
