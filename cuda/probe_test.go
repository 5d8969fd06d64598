package cuda

import (
	"errors"
	"os"
	"reflect"
	"testing"
	"testing/fstest"
)

const (
	version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder)  Tue Jan  6 12:00:00 UTC 2026\n" +
		"GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
	first = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 146\nGPU UUID: \t GPU-0\nVideo BIOS: \t 96.00\nBus Type: \t PCIe\nBus Location: \t 0000:3b:00.0\nDevice Minor: \t 0\n"
	third = "Model: \t\t NVIDIA H200\nBus Location: \t 0000:9a:00.0\nDevice Minor: \t 2\n"
)

// tree is a machine: the pairs are paths and contents.
func tree(pairs ...string) fstest.MapFS {
	m := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return m
}

func TestProbe(t *testing.T) {
	gpus := []string{
		"proc/driver/nvidia/version", version,
		"proc/driver/nvidia/gpus/0000:3b:00.0/information", first,
		"proc/driver/nvidia/gpus/0000:9a:00.0/information", third,
	}
	cache := []string{"etc/ld.so.cache", "libcuda.so.1\x00/usr/lib/x86_64-linux-gnu/libcuda.so.1\x00"}
	for name, tt := range map[string]struct {
		root        fstest.MapFS
		libraryPath string
		want        Machine
		err         string
	}{
		"nothing": {
			root: tree(),
			err:  "CUDA is not available: no driver: there is no /proc/driver/nvidia/version",
		},
		"a library without a driver": {
			root: tree(cache...),
			err:  "CUDA is not available: no driver: there is no /proc/driver/nvidia/version",
		},
		"a container without a GPU": {
			root: tree(append(gpus, "dev/nvidiactl", "")...),
			want: Machine{Driver: "580.159.04"},
			err:  "CUDA is not available: driver 580.159.04 shows no device (in a container: start it with a GPU, such as --gpus all)",
		},
		"no library": {
			root: tree(append(gpus, "dev/nvidia0", "")...),
			want: Machine{"580.159.04", []Device{{"NVIDIA H200", "0000:3b:00.0", 0}}},
			err:  "CUDA is not available: the loader knows no libcuda.so.1 (in a container: let it have the driver's libraries, NVIDIA_DRIVER_CAPABILITIES=compute)",
		},
		"one of two GPUs": {
			root: tree(append(append(gpus, "dev/nvidia2", "", "dev/nvidia-uvm", "", "dev/nvidiactl", ""), cache...)...),
			want: Machine{"580.159.04", []Device{{"NVIDIA H200", "0000:9a:00.0", 2}}},
		},
		"many": {
			root: tree(append(append(gpus, "dev/nvidia10", "", "dev/nvidia2", "", "dev/nvidia0", ""), cache...)...),
			want: Machine{"580.159.04", []Device{{"NVIDIA H200", "0000:3b:00.0", 0}, {"NVIDIA H200", "0000:9a:00.0", 2}, {Minor: 10}}},
		},
		"device nodes alone, library on the path": {
			root:        tree("dev/nvidia0", "", "usr/local/nvidia/lib64/libcuda.so.1", ""),
			libraryPath: "/usr/local/nvidia/lib:/usr/local/nvidia/lib64",
			want:        Machine{Devices: []Device{{Minor: 0}}},
		},
		"texts of another form": {
			root: tree("proc/driver/nvidia/version", "?", "proc/driver/nvidia/gpus/x/information", "Model\n:::\nDevice Minor: many\n",
				"dev/nvidia0", "", "lib/x86_64-linux-gnu/libcuda.so.1", ""),
			want: Machine{"of unknown version", []Device{{Minor: 0}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Probe(tt.root, tt.libraryPath)
			if !reflect.DeepEqual(got, tt.want) {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
			switch {
			case tt.err == "" && err != nil, tt.err != "" && (err == nil || err.Error() != tt.err):
				t.Errorf("error %v, want %q", err, tt.err)
			case err != nil && !errors.Is(err, ErrUnavailable):
				t.Errorf("%v does not wrap ErrUnavailable", err)
			}
		})
	}
}

// Of this very machine the answer is devices or a reason. Where a GPU must be,
// KVFERRY_CUDA_DEVICE is its name.
func TestThisMachine(t *testing.T) {
	m, err := Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH"))
	if err != nil && !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
	t.Logf("machine %+v, reason %v", m, err)
	want := os.Getenv("KVFERRY_CUDA_DEVICE")
	if want == "" {
		return
	}
	if err != nil {
		t.Error(err)
	}
	for _, d := range m.Devices {
		if d.Name == want {
			return
		}
	}
	t.Errorf("no %s", want)
}
