package double

import (
	"bytes"
	"os"
	"strconv"
)

// Alive reports whether the process pid is the one that started at start, in clock
// ticks since boot, and has not ended. Nothing is alive by a pid of 0.
func Alive(pid uint32, start uint64) bool { return pid != 0 && start != 0 && started(pid) == start }

// started is when a process started; 0 if it is none, or has ended.
func started(pid uint32) uint64 {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(int(pid)) + "/stat")
	if err != nil {
		return 0
	}
	fields := bytes.Fields(stat[bytes.LastIndexByte(stat, ')')+1:])
	const state, start = 0, 19
	if len(fields) <= start || fields[state][0] == 'Z' || fields[state][0] == 'X' {
		return 0
	}
	n, err := strconv.ParseUint(string(fields[start]), 10, 64)
	if err != nil {
		return 0
	}
	return n
}
