package rdma

import (
	"errors"
	"testing"
	"testing/fstest"
)

const (
	wholeMap = "         0          0 4294967295\n"
	noCaps   = "0000000000000000"
	ipcLock  = "0000000000004000"
)

// process is a directory of /proc.
func process(limit, caps, pinned, uidMap string) fstest.MapFS {
	return fstest.MapFS{
		"limits": file("Limit                     Soft Limit           Hard Limit           Units     \n" +
			"Max cpu time              unlimited            unlimited            seconds   \n" +
			"Max locked memory         " + limit + "              unlimited              bytes     \n"),
		"status":  file("Name:\tkvferry\nVmLck:\t  999999 kB\nVmPin:\t" + pinned + " kB\nCapPrm:\tffffffffffffffff\nCapEff:\t" + caps + "\n"),
		"uid_map": file(uidMap),
	}
}

func TestMemlockLimit(t *testing.T) {
	for name, tt := range map[string]struct {
		process fstest.MapFS
		need    uint64
		allowed int64 // -1: it passes
	}{
		"enough":                                 {process("8388608", noCaps, "       0", wholeMap), 8 << 20, -1},
		"one byte too many":                      {process("8388608", noCaps, "       0", wholeMap), 8<<20 + 1, 8 << 20},
		"what is pinned counts":                  {process("8388608", noCaps, "    4096", wholeMap), 4<<20 + 1, 4 << 20},
		"and what is left of it does not":        {process("8388608", noCaps, "    4096", wholeMap), 4 << 20, -1},
		"more pinned than the limit":             {process("65536", noCaps, "    4096", wholeMap), 1, 0},
		"unlimited":                              {process("unlimited", noCaps, "       0", wholeMap), 1 << 50, -1},
		"the capability":                         {process("65536", ipcLock, "       0", wholeMap), 1 << 40, -1},
		"the capability of a container's root":   {process("65536", ipcLock, "       0", "0 100000 65536\n"), 1 << 20, 65536},
		"the capability of a mapped root":        {process("65536", ipcLock, "       0", "0 0 1\n"), 1 << 20, 65536},
		"another capability":                     {process("65536", "0000000000002000", "       0", wholeMap), 1 << 20, 65536},
		"permitted is not effective":             {process("65536", noCaps, "       0", wholeMap), 1 << 20, 65536},
		"nothing known":                          {fstest.MapFS{}, 1 << 50, -1},
		"nothing needed":                         {process("65536", noCaps, "    4096", wholeMap), 0, -1},
		"a kernel that does not tell the pinned": {fstest.MapFS{"limits": file("Max locked memory 65536 65536 bytes\n")}, 65537, 65536},
	} {
		t.Run(name, func(t *testing.T) {
			err := checkMemlock(tt.process, tt.need)
			var e *MemlockError
			switch {
			case tt.allowed < 0 && err != nil:
				t.Error(err)
			case tt.allowed >= 0 && !errors.As(err, &e):
				t.Errorf("error %v", err)
			case tt.allowed >= 0 && (e.Need != tt.need || e.Allowed != uint64(tt.allowed)):
				t.Errorf("need %d, allowed %d; want %d, %d", e.Need, e.Allowed, tt.need, tt.allowed)
			}
		})
	}
	const want = "memory lock limit: 5000000 bytes are needed, 4194304 are allowed (RLIMIT_MEMLOCK is 8388608, 4194304 are locked already): raise it for whoever starts this process (shell: ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1; login: memlock in /etc/security/limits.conf), or grant it the capability IPC_LOCK"
	if err := checkMemlock(process("8388608", noCaps, "    4096", wholeMap), 5_000_000); err == nil || err.Error() != want {
		t.Errorf("text %q", err)
	}
	if err := CheckMemlock(0); err != nil {
		t.Errorf("nothing more than this process has: %v", err)
	}
}
