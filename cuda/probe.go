package cuda

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
)

// Device is one GPU that the driver shows to this process.
type Device struct {
	Name  string // such as "NVIDIA H200"; "" where the driver does not say
	Bus   string // such as "0000:3b:00.0"; "" where the driver does not say
	Minor int    // N of /dev/nvidiaN
}

// Machine is what there is.
type Machine struct {
	Driver  string // version of the kernel's driver, such as "580.159.04"; "" for none
	Devices []Device
}

const (
	library = "libcuda.so.1"
	proc    = "proc/driver/nvidia"
)

// Probe looks at the machine whose root directory is given. libraryPath is
// LD_LIBRARY_PATH. The error wraps [ErrUnavailable] if there is no driver, no
// device, or no library; what there is is returned all the same.
func Probe(root fs.FS, libraryPath string) (Machine, error) {
	m := Machine{Driver: driverVersion(root)}
	var err error
	if m.Devices, err = devices(root); err != nil {
		return m, fmt.Errorf("list CUDA devices: %w", err)
	}
	switch {
	case m.Driver == "" && len(m.Devices) == 0:
		return m, fmt.Errorf("%w: no driver: there is no /%s/version", ErrUnavailable, proc)
	case len(m.Devices) == 0:
		return m, fmt.Errorf("%w: driver %s shows no device (in a container: start it with a GPU, such as --gpus all)", ErrUnavailable, m.Driver)
	case !loadable(root, libraryPath):
		return m, fmt.Errorf("%w: the loader knows no %s (in a container: let it have the driver's libraries, NVIDIA_DRIVER_CAPABILITIES=compute)", ErrUnavailable, library)
	}
	return m, nil
}

// driverVersion reads it out of a line such as
// "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue ...".
func driverVersion(root fs.FS) string {
	b, err := fs.ReadFile(root, path.Join(proc, "version"))
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	for word := range strings.FieldsSeq(line) {
		if strings.Contains(word, ".") && strings.Trim(word, "0123456789.") == "" {
			return word
		}
	}
	return "of unknown version"
}

// devices lists the device nodes of this process, with what the driver tells
// of them: a container sees all GPUs in /proc and only its own in /dev.
func devices(root fs.FS) ([]Device, error) {
	nodes, err := fs.Glob(root, "dev/nvidia[0-9]*")
	if err != nil {
		return nil, err
	}
	known := make(map[int]Device)
	files, err := fs.Glob(root, proc+"/gpus/*/information")
	if err != nil {
		return nil, err
	}
	for _, f := range files {
		if b, err := fs.ReadFile(root, f); err == nil {
			if d := information(b); d.Minor >= 0 {
				known[d.Minor] = d
			}
		}
	}
	var list []Device
	for _, node := range nodes {
		var minor int
		if n, err := fmt.Sscanf(path.Base(node), "nvidia%d", &minor); n != 1 || err != nil {
			continue
		}
		d, ok := known[minor]
		if !ok {
			d = Device{Minor: minor}
		}
		list = append(list, d)
	}
	slices.SortFunc(list, func(a, b Device) int { return a.Minor - b.Minor })
	return list, nil
}

// information reads the lines "Model:", "Bus Location:", and "Device Minor:".
func information(b []byte) Device {
	d := Device{Minor: -1}
	for line := range bytes.Lines(b) {
		key, value, _ := strings.Cut(string(line), ":")
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "Model":
			d.Name = value
		case "Bus Location":
			d.Bus = value
		case "Device Minor":
			if n, err := fmt.Sscan(value, &d.Minor); n != 1 || err != nil {
				d.Minor = -1
			}
		}
	}
	return d
}

// loadable tells whether the loader would find the library: by its path, its
// cache, or in the folders that it always looks into.
func loadable(root fs.FS, libraryPath string) bool {
	for dir := range strings.SplitSeq(libraryPath, ":") {
		if _, err := fs.Stat(root, path.Join(strings.TrimPrefix(dir, "/"), library)); dir != "" && err == nil {
			return true
		}
	}
	if cache, err := fs.ReadFile(root, "etc/ld.so.cache"); err == nil && bytes.Contains(cache, []byte("/"+library+"\x00")) {
		return true
	}
	for _, dir := range []string{"lib", "lib64", "usr/lib", "usr/lib64", "lib/*-linux-gnu", "usr/lib/*-linux-gnu"} {
		if found, err := fs.Glob(root, path.Join(dir, library)); err == nil && len(found) > 0 {
			return true
		}
	}
	return false
}
