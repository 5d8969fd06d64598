package memory

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// machine is where the limits are read: the root of a file system with /proc
// and /sys, and the limits of this process.
type machine struct {
	files  fs.FS
	rlimit func(resource int) (soft uint64, err error)
}

func thisMachine() machine {
	return machine{
		files: os.DirFS("/"),
		rlimit: func(resource int) (uint64, error) {
			var r unix.Rlimit
			err := unix.Getrlimit(resource, &r)
			return r.Cur, err
		},
	}
}

// bound is what one limit leaves.
type bound struct {
	name   string
	free   int64
	remedy string
}

// check refuses a region that would not fit, before anything is allocated: a
// process that runs into the limit of its cgroup is killed, not told. What
// cannot be read does not bind.
func (m machine) check(size int64, huge bool) error {
	bounds := m.processBounds()
	if !huge { // huge pages come from a pool of their own
		bounds = append(bounds, m.memoryBounds()...)
	}
	return fit(size, bounds)
}

// Fits says whether size bytes of regions could be made now, by any number of
// processes; the error is that of New.
func Fits(size int64) error { return fit(size, thisMachine().memoryBounds()) }

func fit(size int64, bounds []bound) error {
	for _, b := range bounds {
		// A part more for page tables, and as air for the rest of the machine.
		if wanted := size + size/64; wanted > b.free || wanted < size {
			return fmt.Errorf("wanted %s (page tables included), available %s by %s; %s: %w", bytesText(wanted), bytesText(b.free), b.name, b.remedy, ErrLimit)
		}
	}
	return nil
}

func (m machine) processBounds() []bound {
	var list []bound
	if soft, err := m.rlimit(unix.RLIMIT_AS); err == nil && soft <= math.MaxInt64 {
		used := m.fields("proc/self/status")["VmSize"]
		list = append(list, bound{"RLIMIT_AS", max(0, int64(soft)-used), "raise ulimit -v or make the region smaller"})
	}
	if soft, err := m.rlimit(unix.RLIMIT_FSIZE); err == nil && soft <= math.MaxInt64 {
		list = append(list, bound{"RLIMIT_FSIZE", int64(soft), "raise ulimit -f or make the region smaller"})
	}
	return list
}

func (m machine) memoryBounds() []bound {
	var list []bound
	if free, ok := m.fields("proc/meminfo")["MemAvailable"]; ok {
		list = append(list, bound{"MemAvailable", free, "make the region smaller or free memory on this machine"})
	}
	return append(list, m.cgroupBounds()...)
}

// hugePages says how large the machine's huge pages are and how many bytes of
// them nobody has reserved.
func (m machine) hugePages() (size, free int64) {
	f := m.fields("proc/meminfo")
	return f["Hugepagesize"], max(0, f["HugePages_Free"]-f["HugePages_Rsvd"]) * f["Hugepagesize"]
}

// fields reads lines such as "MemFree: 12 kB", in bytes.
func (m machine) fields(name string) map[string]int64 {
	text, err := fs.ReadFile(m.files, name)
	if err != nil {
		return nil
	}
	fields := make(map[string]int64)
	for line := range strings.Lines(string(text)) {
		key, rest, _ := strings.Cut(line, ":")
		words := strings.Fields(rest)
		if len(words) == 0 {
			continue
		}
		n, err := strconv.ParseInt(words[0], 10, 64)
		if err != nil || n < 0 || n > math.MaxInt64/1024 {
			continue
		}
		if len(words) > 1 && words[1] == "kB" {
			n *= 1024
		}
		fields[key] = n
	}
	return fields
}

// hierarchy is one version of memory cgroups: the names of its files.
type hierarchy struct {
	fsType, controller    string
	limit, usage, relaxed string
}

// cgroupBounds walks from the cgroup of this process up to the root of its
// mount, since every level may set a limit, in both versions of cgroups.
func (m machine) cgroupBounds() []bound {
	var list []bound
	for _, h := range [...]hierarchy{
		{"cgroup2", "", "memory.max", "memory.current", "inactive_file"},
		{"cgroup", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"},
	} {
		group, ok := m.cgroup(h.controller)
		if !ok {
			continue
		}
		root, mount, ok := m.cgroupMount(h)
		if !ok {
			continue
		}
		// Inside of a container the mount shows only what is below its root, and
		// the group may lie above it ("/../x"): then its root is what binds.
		below, _ := strings.CutPrefix(group, root)
		for dir := path.Join(mount, path.Clean("/"+below)); ; dir = path.Dir(dir) {
			limit, limited := m.number(path.Join(dir, h.limit))
			usage, known := m.number(path.Join(dir, h.usage))
			if limited && known {
				// The kernel gives up cached files before it kills.
				free := limit - max(0, usage-m.stat(path.Join(dir, "memory.stat"), h.relaxed))
				list = append(list, bound{"cgroup limit /" + path.Join(dir, h.limit), max(0, free), "raise it (the memory limit of the container or unit) or make the region smaller"})
			}
			if dir == mount || dir == "." {
				break
			}
		}
	}
	return list
}

// cgroup is the path of this process in a hierarchy; controller "" is version 2.
func (m machine) cgroup(controller string) (string, bool) {
	text, err := fs.ReadFile(m.files, "proc/self/cgroup")
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(text)) {
		part := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(part) != 3 {
			continue
		}
		for name := range strings.SplitSeq(part[1], ",") {
			if name == controller {
				return part[2], true
			}
		}
	}
	return "", false
}

// cgroupMount finds where a hierarchy is mounted, as a path of m.files, and
// which cgroup is the root of that mount.
func (m machine) cgroupMount(h hierarchy) (root, mount string, ok bool) {
	text, err := fs.ReadFile(m.files, "proc/self/mountinfo")
	if err != nil {
		return "", "", false
	}
	scanner := bufio.NewScanner(bytes.NewReader(text))
	for scanner.Scan() {
		// ID PARENT MAJOR:MINOR ROOT MOUNT OPTIONS... - TYPE SOURCE SUPER
		head, tail, _ := strings.Cut(scanner.Text(), " - ")
		words, kind := strings.Fields(head), strings.Fields(tail)
		if len(words) < 5 || len(kind) < 3 || kind[0] != h.fsType {
			continue
		}
		if h.controller != "" && !strings.Contains(","+kind[2]+",", ","+h.controller+",") {
			continue
		}
		return strings.TrimSuffix(words[3], "/"), path.Join(".", words[4]), true
	}
	return "", "", false
}

// number reads a file of one number; "max" and a missing file are none.
func (m machine) number(name string) (int64, bool) {
	text, err := fs.ReadFile(m.files, name)
	if err != nil {
		return 0, false
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64)
	return n, err == nil && n >= 0
}

// stat reads one line of memory.stat, 0 if there is none.
func (m machine) stat(name, key string) int64 {
	text, err := fs.ReadFile(m.files, name)
	if err != nil {
		return 0
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) == 2 && words[0] == key {
			n, err := strconv.ParseInt(words[1], 10, 64)
			if err != nil || n < 0 {
				return 0
			}
			return n
		}
	}
	return 0
}

// limit makes an errno that means "no more of it" wrap [ErrLimit] too, with
// what to set.
func limit(err error, set string) error {
	for _, e := range [...]unix.Errno{unix.ENOMEM, unix.ENOSPC, unix.EFBIG, unix.EMFILE, unix.ENFILE, unix.EFAULT} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w; look at %s: %w", err, set, ErrLimit)
		}
	}
	return err
}

// bytesText is a size for people.
func bytesText(n int64) string {
	switch {
	case n >= 1<<40:
		return fmt.Sprintf("%.1f TiB", float64(n)/(1<<40))
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%d bytes", n)
}
