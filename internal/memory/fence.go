//go:build amd64 || arm64

package memory

// fences says that this processor has the two barriers below.
const fences = true

// fenceStore follows the swap of a seal word: no later store of this thread
// becomes visible, on any coherent reader, before the swap.
func fenceStore()

// fenceLoad precedes the load of a seal word: every load of this thread before
// it is done, and every store, non-temporal ones included, is ordered before
// the stores after it.
func fenceLoad()
