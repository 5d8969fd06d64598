package memory

import "golang.org/x/sys/cpu"

// streamWays are the loops that this machine has, and copy.
func streamWays() []streamWay {
	var ways []streamWay
	if cpu.X86.HasAVX512F {
		ways = append(ways, streamWay{"avx512", copyLines512})
	}
	if cpu.X86.HasAVX2 {
		ways = append(ways, streamWay{"avx2", copyLines256})
	}
	return append(ways, streamWay{"copy", nil})
}
