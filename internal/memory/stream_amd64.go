package memory

import "golang.org/x/sys/cpu"

// widest is the best loop that processor and system allow, nil for none.
func widest() copyLines {
	switch {
	case race:
		return nil
	case cpu.X86.HasAVX512F:
		return copyLines512
	case cpu.X86.HasAVX2:
		return copyLines256
	}
	return nil
}

//go:noescape
func copyLines512(dst, src *byte, ahead uintptr, n int)

//go:noescape
func copyLines256(dst, src *byte, ahead uintptr, n int)

// storeFence orders non-temporal stores before all later stores.
func storeFence()
