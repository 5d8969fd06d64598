//go:build !(linux && cgo && rdma && (amd64 || arm64))

package rdmatest_test

import (
	"testing"

	"github.com/kvferry/kvferry/rdma/rdmatest"
)

// Where package rdma is not built in, tests that need a world are skipped.
func TestUseSkips(t *testing.T) {
	var skipped bool
	t.Run("use", func(t *testing.T) {
		defer func() { skipped = t.Skipped() }()
		rdmatest.Use(t)
	})
	if !skipped {
		t.Error("not skipped")
	}
}
