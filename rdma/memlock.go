package rdma

import (
	"fmt"
	"io/fs"
	"math"
	"os"
	"strconv"
	"strings"
)

// MemlockError says that this process may not lock as much memory as devices
// would have to.
type MemlockError struct {
	Need    uint64 // bytes that were to be locked
	Allowed uint64 // bytes that still may be
	Limit   uint64 // the limit, in bytes; what lies between it and Allowed is locked already
}

func (e *MemlockError) Error() string {
	return fmt.Sprintf("memory lock limit: %d bytes are needed, %d are allowed (RLIMIT_MEMLOCK is %d, %d are locked already): %s",
		e.Need, e.Allowed, e.Limit, e.Limit-e.Allowed, MemlockAdvice)
}

// MemlockAdvice is how to raise the limit.
const MemlockAdvice = "raise it for whoever starts this process (shell: ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; login: memlock in /etc/security/limits.conf), or grant it the capability IPC_LOCK"

// CheckMemlock tells whether this process may have need more bytes pinned for
// devices. The error is a [*MemlockError]. What the kernel does not tell is
// let pass: registering fails then.
func CheckMemlock(need uint64) error { return checkMemlock(os.DirFS("/proc/self"), need) }

// checkMemlock does so of a process's directory in /proc. The kernel counts
// what is pinned for devices (VmPin) against the limit, and apart from what
// was locked with mlock (VmLck); and it asks for the capability in the first
// user namespace, so that the root of a container without it is bound too.
func checkMemlock(process fs.FS, need uint64) error {
	limit, ok := memlockLimit(process)
	if !ok {
		return nil
	}
	status := fields(process, "status")
	const capIPCLock = 14
	caps, err := strconv.ParseUint(status["CapEff"], 16, 64)
	if err == nil && caps&(1<<capIPCLock) != 0 && firstUserNamespace(process) {
		return nil
	}
	allowed := limit
	if kb, err := strconv.ParseUint(strings.TrimSuffix(status["VmPin"], " kB"), 10, 64); err == nil {
		allowed -= min(kb<<10, limit)
	}
	if need <= allowed {
		return nil
	}
	return &MemlockError{Need: need, Allowed: allowed, Limit: limit}
}

// memlockLimit is the soft limit in bytes; not ok if it is not known, or
// there is none.
func memlockLimit(process fs.FS) (limit uint64, ok bool) {
	limits, _ := fs.ReadFile(process, "limits")
	for line := range strings.Lines(string(limits)) {
		rest, found := strings.CutPrefix(line, "Max locked memory")
		if soft := strings.Fields(rest); found && len(soft) > 0 {
			limit, err := strconv.ParseUint(soft[0], 10, 64) // "unlimited" otherwise
			return limit, err == nil
		}
	}
	return math.MaxUint64, false
}

// fields reads a file of lines "Name:\tvalue".
func fields(root fs.FS, name string) map[string]string {
	b, _ := fs.ReadFile(root, name)
	m := map[string]string{}
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok {
			m[k] = strings.TrimSpace(v)
		}
	}
	return m
}

// firstUserNamespace tells whether a process lives in the user namespace that
// the machine began with: there every id means itself.
func firstUserNamespace(process fs.FS) bool {
	b, err := fs.ReadFile(process, "uid_map")
	if err != nil {
		return true // a kernel without user namespaces
	}
	f := strings.Fields(string(b))
	return len(f) == 3 && f[0] == "0" && f[1] == "0" && f[2] == "4294967295"
}
