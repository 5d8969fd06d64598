package memory

import (
	"errors"
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"
)

const gib = 1 << 30

// paper is a machine made of files, by name and text.
func paper(files map[string]string, rlimits map[int]uint64) machine {
	m := machine{files: fstest.MapFS{}, rlimit: func(resource int) (uint64, error) {
		if soft, ok := rlimits[resource]; ok {
			return soft, nil
		}
		return unix.RLIM_INFINITY, nil
	}}
	for name, text := range files {
		m.files.(fstest.MapFS)[name] = &fstest.MapFile{Data: []byte(text)}
	}
	return m
}

func TestCheck(t *testing.T) {
	const (
		meminfo   = "proc/meminfo"
		group     = "proc/self/cgroup"
		mountinfo = "proc/self/mountinfo"
		v2Mount   = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
		v1Mount   = "33 23 0:29 / /sys/fs/cgroup/cpu rw shared:5 - cgroup cgroup rw,cpu\n34 23 0:30 / /sys/fs/cgroup/memory rw shared:6 - cgroup cgroup rw,memory\n"
		plenty    = "MemTotal: 1 kB\nMemAvailable:   1073741824 kB\nHugepagesize: 2048 kB\n"
	)
	for name, tt := range map[string]struct {
		files   map[string]string
		rlimits map[int]uint64
		size    int64
		huge    bool
		refusal string // "" if it fits
	}{
		"nothing is known":           {size: gib},
		"enough memory":              {files: map[string]string{meminfo: plenty}, size: gib},
		"too little memory":          {files: map[string]string{meminfo: "MemAvailable: 1048576 kB\n"}, size: 2 * gib, refusal: "available 1.0 GiB by MemAvailable"},
		"no room for page tables":    {files: map[string]string{meminfo: "MemAvailable: 1048576 kB\n"}, size: gib, refusal: "wanted 1.0 GiB (page tables included)"},
		"huge pages need no memory":  {files: map[string]string{meminfo: "MemAvailable: 0 kB\n"}, size: gib, huge: true},
		"garbage does not bind":      {files: map[string]string{meminfo: "MemAvailable: many kB\nMemAvailable\n:\n"}, size: gib},
		"address space":              {files: map[string]string{"proc/self/status": "Name: x\nVmSize:\t 1048576 kB\n"}, rlimits: map[int]uint64{unix.RLIMIT_AS: 3 * gib}, size: 2 * gib, refusal: "available 2.0 GiB by RLIMIT_AS; raise ulimit -v"},
		"address space all used":     {files: map[string]string{"proc/self/status": "VmSize:\t 4194304 kB\n"}, rlimits: map[int]uint64{unix.RLIMIT_AS: 3 * gib}, size: 1, refusal: "available 0 bytes by RLIMIT_AS"},
		"address space of huge ones": {rlimits: map[int]uint64{unix.RLIMIT_AS: gib}, size: 2 * gib, huge: true, refusal: "RLIMIT_AS"},
		"file size":                  {rlimits: map[int]uint64{unix.RLIMIT_FSIZE: gib}, size: 2 * gib, refusal: "available 1.0 GiB by RLIMIT_FSIZE; raise ulimit -f"},
		"cgroup 2": {
			files: map[string]string{
				meminfo: plenty, group: "0::/system.slice/kvferry.service\n", mountinfo: v2Mount,
				"sys/fs/cgroup/system.slice/kvferry.service/memory.max":     "2147483648\n",
				"sys/fs/cgroup/system.slice/kvferry.service/memory.current": "1610612736\n",
				"sys/fs/cgroup/system.slice/kvferry.service/memory.stat":    "anon 5\ninactive_file 536870912\nactive_file 1\n",
			},
			size: 2 * gib, refusal: "available 1.0 GiB by cgroup limit /sys/fs/cgroup/system.slice/kvferry.service/memory.max; raise it",
		},
		"cgroup 2, what fits": {
			files: map[string]string{
				meminfo: plenty, group: "0::/a\n", mountinfo: v2Mount,
				"sys/fs/cgroup/a/memory.max": "2147483648\n", "sys/fs/cgroup/a/memory.current": "0\n",
			},
			size: gib,
		},
		"cgroup 2, a level above": {
			files: map[string]string{
				group: "0::/a/b/c\n", mountinfo: v2Mount,
				"sys/fs/cgroup/a/memory.max": "1073741824\n", "sys/fs/cgroup/a/memory.current": "0\n",
				"sys/fs/cgroup/a/b/memory.max": "max\n", "sys/fs/cgroup/a/b/memory.current": "0\n",
			},
			size: 2 * gib, refusal: "/sys/fs/cgroup/a/memory.max",
		},
		"cgroup 2, more used than allowed": {
			files: map[string]string{
				group: "0::/\n", mountinfo: v2Mount,
				"sys/fs/cgroup/memory.max": "1073741824\n", "sys/fs/cgroup/memory.current": "2073741824\n",
			},
			size: 1, refusal: "available 0 bytes by cgroup limit /sys/fs/cgroup/memory.max",
		},
		"cgroup 2, of a namespace above": {
			files: map[string]string{
				group: "0::/../../pod\n", mountinfo: v2Mount,
				"sys/fs/cgroup/memory.max": "1073741824\n", "sys/fs/cgroup/memory.current": "0\n",
			},
			size: 2 * gib, refusal: "/sys/fs/cgroup/memory.max",
		},
		"cgroup 1": {
			files: map[string]string{
				meminfo: plenty, group: "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n", mountinfo: v1Mount,
				"sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": "1073741824\n",
				"sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "1073741824\n",
				"sys/fs/cgroup/memory/docker/abc/memory.stat":           "inactive_file 7\ntotal_inactive_file 536870912\n",
			},
			size: gib, refusal: "available 512.0 MiB by cgroup limit /sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes",
		},
		"cgroup 1 inside of a container": {
			files: map[string]string{
				group: "4:memory:/docker/abc/sub\n", mountinfo: "34 23 0:30 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
				"sys/fs/cgroup/memory/memory.limit_in_bytes": "1073741824\n",
				"sys/fs/cgroup/memory/memory.usage_in_bytes": "0\n",
			},
			size: 2 * gib, refusal: "/sys/fs/cgroup/memory/memory.limit_in_bytes",
		},
		"cgroup mounted at the root": {
			files: map[string]string{
				group: "0::/a\n", mountinfo: "29 23 0:26 / / rw - cgroup2 cgroup2 rw\n",
				"a/memory.max": "1073741824\n", "a/memory.current": "0\n",
			},
			size: 2 * gib, refusal: "cgroup limit /a/memory.max",
		},
		"cgroup without a mount": {files: map[string]string{group: "0::/a\n4:memory:/a\n", mountinfo: "garbage\n1 2 3\n - cgroup2\n"}, size: gib},
	} {
		t.Run(name, func(t *testing.T) {
			err := paper(tt.files, tt.rlimits).check(tt.size, tt.huge)
			if tt.refusal == "" {
				if err != nil {
					t.Errorf("check(%d) = %v, want it to fit", tt.size, err)
				}
				return
			}
			if !errors.Is(err, ErrLimit) || !strings.Contains(err.Error(), tt.refusal) || !strings.Contains(err.Error(), "wanted") {
				t.Errorf("check(%d) = %v, want %q", tt.size, err, tt.refusal)
			}
		})
	}
}

func TestHugePages(t *testing.T) {
	for name, tt := range map[string]struct {
		meminfo    string
		size, free int64
	}{
		"none":         {"HugePages_Free: 0\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n", 2 << 20, 0},
		"some":         {"HugePages_Free: 5\nHugePages_Rsvd: 2\nHugepagesize: 2048 kB\n", 2 << 20, 6 << 20},
		"all reserved": {"HugePages_Free: 5\nHugePages_Rsvd: 7\nHugepagesize: 2048 kB\n", 2 << 20, 0},
		"no support":   {"MemAvailable: 1 kB\n", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			size, free := paper(map[string]string{"proc/meminfo": tt.meminfo}, nil).hugePages()
			if size != tt.size || free != tt.free {
				t.Errorf("hugePages() = %d, %d, want %d, %d", size, free, tt.size, tt.free)
			}
		})
	}
}

// What the files promise, the kernel may break: the pages are then small ones.
func TestHugePagesThatAreGone(t *testing.T) {
	size, free := thisMachine().hugePages()
	if free >= 4<<20 {
		t.Skipf("this machine has %d bytes of huge pages", free)
	}
	if size == 0 {
		size = 2 << 20
	}
	lying := paper(map[string]string{"proc/meminfo": "HugePages_Free: 8\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"}, nil)
	r, err := create("test", 2*size, true, lying)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if pageBytes, err := pageOf(int(r.File().Fd())); err != nil || pageBytes != int64(os.Getpagesize()) {
		t.Errorf("pages of %d bytes, %v, want small ones", pageBytes, err)
	}
}

func TestNewPlainTakesNoHugePages(t *testing.T) {
	r, err := NewPlain("test", 16<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if pageBytes, err := pageOf(int(r.File().Fd())); err != nil || pageBytes != int64(os.Getpagesize()) {
		t.Errorf("pages of %d bytes, %v, want small ones", pageBytes, err)
	}
}

func TestHugePagesAreUsed(t *testing.T) {
	size, free := thisMachine().hugePages()
	if size == 0 || free < 9*size {
		t.Skipf("this machine has %d bytes of huge pages free, the test wants 9 pages", free)
	}
	r, err := New("test", 8*size+1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if pageBytes, err := pageOf(int(r.File().Fd())); err != nil || pageBytes != size || r.Size() != 9*size {
		t.Errorf("%d bytes in pages of %d, %v, want 9 of %d", r.Size(), pageBytes, err, size)
	}
	// A part of the file is mapped in whole huge pages, and unmapped so.
	fd, err := unix.FcntlInt(r.File().Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	part, err := Map(os.NewFile(uintptr(fd), "part"), 5000, true)
	if err != nil {
		t.Fatal(err)
	}
	part.Bytes()[4999] = 7
	if r.Bytes()[4999] != 7 {
		t.Error("a store through the part is not seen")
	}
	if err := errors.Join(part.Close(), r.Close()); err != nil {
		t.Error(err)
	}
}

// The files of the machine that runs this test are understood.
func TestThisMachine(t *testing.T) {
	bounds := thisMachine().memoryBounds()
	if len(bounds) == 0 || bounds[0].free <= 0 {
		t.Errorf("bounds = %v, want MemAvailable", bounds)
	}
	for _, b := range bounds {
		t.Logf("%s leaves %s", b.name, bytesText(b.free))
	}
}
