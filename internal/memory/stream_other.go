//go:build !amd64

package memory

// widest: no loop is known to be faster here than copy.
func widest() copyLines { return nil }

func storeFence() {}
