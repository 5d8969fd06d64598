package rdma

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
)

// Info is one RDMA device as the kernel lists it.
type Info struct {
	Name     string     // such as "mlx5_0"
	NUMANode int        // -1: unknown
	Ports    []PortInfo // by number
}

// PortInfo is one port of a device.
type PortInfo struct {
	Number    int
	State     string // such as "ACTIVE" or "DOWN"
	LinkLayer string // "InfiniBand" or "Ethernet"
	Rate      string // such as "400 Gb/sec (4X NDR)"
}

const (
	library = "libibverbs.so.1"
	class   = "sys/class/infiniband"
)

// Probe lists the devices of the machine whose root directory is given, by
// name. libraryPath is LD_LIBRARY_PATH. The error wraps [ErrUnavailable] if
// there is no device, no library, or no active port; the devices that there
// are are returned all the same.
func Probe(root fs.FS, libraryPath string) ([]Info, error) {
	devices, err := devices(root)
	switch {
	case err != nil:
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	case len(devices) == 0:
		return nil, fmt.Errorf("%w: no device in /%s (a card's driver makes one; for a software device: rdma link add rxe0 type rxe netdev NAME)", ErrUnavailable, class)
	}
	if Library(root, libraryPath) == "" {
		return devices, fmt.Errorf("%w: the loader knows no %s (on Debian: apt-get install libibverbs1 ibverbs-providers)", ErrUnavailable, library)
	}
	var states []string
	for _, d := range devices {
		for _, p := range d.Ports {
			if p.State == "ACTIVE" {
				return devices, nil
			}
			states = append(states, fmt.Sprintf("%s port %d is %s", d.Name, p.Number, p.State))
		}
	}
	return devices, fmt.Errorf("%w: no active port: %s", ErrUnavailable, strings.Join(states, ", "))
}

func devices(root fs.FS) ([]Info, error) {
	entries, err := fs.ReadDir(root, class)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []Info
	for _, e := range entries {
		d := Info{Name: e.Name(), NUMANode: numaNode(root, path.Join(class, e.Name()))}
		ports, err := fs.ReadDir(root, path.Join(class, d.Name, "ports"))
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // it may just have been unplugged
			return nil, err
		}
		for _, p := range ports {
			number, err := strconv.Atoi(p.Name())
			if err != nil {
				continue
			}
			at := path.Join(class, d.Name, "ports", p.Name())
			state := attribute(root, at, "state") // "4: ACTIVE"
			if _, word, ok := strings.Cut(state, ": "); ok {
				state = word
			}
			d.Ports = append(d.Ports, PortInfo{Number: number, State: state, LinkLayer: attribute(root, at, "link_layer"), Rate: attribute(root, at, "rate")})
		}
		slices.SortFunc(d.Ports, func(a, b PortInfo) int { return a.Number - b.Number })
		list = append(list, d)
	}
	return list, nil
}

// attribute reads one file of sysfs; "unknown" if it cannot be read.
func attribute(root fs.FS, dir, name string) string {
	b, err := fs.ReadFile(root, path.Join(dir, name))
	if err != nil {
		return "unknown"
	}
	return string(bytes.TrimSpace(b))
}

// numaNode is the NUMA node that a device is attached to, of its directory in
// sysfs; -1 if there is none, or it is not known.
func numaNode(root fs.FS, dir string) int {
	n, err := strconv.Atoi(attribute(root, path.Join(dir, "device"), "numa_node"))
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// Library is where the loader would find the verbs library on the machine whose
// root directory is given: by its path (libraryPath is LD_LIBRARY_PATH), its
// cache, or in the folders that it always looks into. It is a name in root; ""
// if it is nowhere.
func Library(root fs.FS, libraryPath string) string {
	inside := func(dir string) string { return path.Join(strings.TrimLeft(path.Clean(dir), "/"), library) }
	for dir := range strings.SplitSeq(libraryPath, ":") {
		if _, err := fs.Stat(root, inside(dir)); dir != "" && err == nil {
			return inside(dir)
		}
	}
	if cache, err := fs.ReadFile(root, "etc/ld.so.cache"); err == nil {
		if before, _, found := bytes.Cut(cache, []byte("/"+library+"\x00")); found {
			return inside(string(before[bytes.LastIndexByte(before, 0)+1:]))
		}
	}
	for _, dir := range []string{"lib", "lib64", "usr/lib", "usr/lib64", "lib/*-linux-gnu", "usr/lib/*-linux-gnu"} {
		if found, err := fs.Glob(root, path.Join(dir, library)); err == nil && len(found) > 0 {
			return found[0]
		}
	}
	return ""
}
