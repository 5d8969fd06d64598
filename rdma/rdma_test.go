package rdma

import (
	"errors"
	"io/fs"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

func file(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s)} }

// tree is a machine: the pairs are paths and contents.
func tree(pairs ...string) fs.FS {
	m := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = file(pairs[i+1])
	}
	return m
}

const linked = "ld.so-1.7.0\x00libibverbs.so.1\x00/lib/x86_64-linux-gnu/libibverbs.so.1\x00"

func port(device, number, state string) []string {
	at := "sys/class/infiniband/" + device + "/ports/" + number + "/"
	return []string{at + "state", state + "\n", at + "link_layer", "Ethernet\n", at + "rate", "100 Gb/sec (4X EDR)\n"}
}

func TestProbe(t *testing.T) {
	active := PortInfo{Number: 1, State: "ACTIVE", LinkLayer: "Ethernet", Rate: "100 Gb/sec (4X EDR)"}
	down := PortInfo{Number: 2, State: "DOWN", LinkLayer: "Ethernet", Rate: "100 Gb/sec (4X EDR)"}
	lib := []string{"etc/ld.so.cache", linked}
	for name, tt := range map[string]struct {
		root        fs.FS
		libraryPath string
		want        []Info
		err         string
	}{
		"nothing": {root: tree(), err: "RDMA is not available: no device in /sys/class/infiniband (a card's driver makes one; for a software device: rdma link add rxe0 type rxe netdev NAME)"},
		"a class without a device": {
			root: fstest.MapFS{"sys/class/infiniband": {Mode: fs.ModeDir}},
			err:  "RDMA is not available: no device in /sys/class/infiniband (a card's driver makes one; for a software device: rdma link add rxe0 type rxe netdev NAME)",
		},
		"no library": {
			root: tree(port("mlx5_0", "1", "4: ACTIVE")...),
			want: []Info{{"mlx5_0", -1, []PortInfo{active}}},
			err:  "RDMA is not available: the loader knows no libibverbs.so.1 (on Debian: apt-get install libibverbs1 ibverbs-providers)",
		},
		"another library of like name": {
			root: tree(append(port("mlx5_0", "1", "4: ACTIVE"), "etc/ld.so.cache", "/lib/xlibibverbs.so.1\x00/lib/libibverbs.so.15\x00")...),
			want: []Info{{"mlx5_0", -1, []PortInfo{active}}},
			err:  "RDMA is not available: the loader knows no libibverbs.so.1 (on Debian: apt-get install libibverbs1 ibverbs-providers)",
		},
		"library outside of the cache": {
			root: tree(append(port("mlx5_0", "1", "4: ACTIVE"), "usr/lib/x86_64-linux-gnu/libibverbs.so.1", "")...),
			want: []Info{{"mlx5_0", -1, []PortInfo{active}}},
		},
		"library on the path": {
			root:        tree(append(port("mlx5_0", "1", "4: ACTIVE"), "opt/verbs/libibverbs.so.1", "")...),
			libraryPath: ":/nowhere:/opt/verbs/",
			want:        []Info{{"mlx5_0", -1, []PortInfo{active}}},
		},
		"ports by number": {
			root: tree(append(append(port("mlx5_0", "10", "4: ACTIVE"), port("mlx5_0", "2", "1: DOWN")...), lib...)...),
			want: []Info{{"mlx5_0", -1, []PortInfo{down, {Number: 10, State: "ACTIVE", LinkLayer: active.LinkLayer, Rate: active.Rate}}}},
		},
		"no active port": {
			root: tree(append(port("mlx5_0", "2", "1: DOWN"), lib...)...),
			want: []Info{{"mlx5_0", -1, []PortInfo{down}}},
			err:  "RDMA is not available: no active port: mlx5_0 port 2 is DOWN",
		},
		"two devices, one of them down": {
			root: tree(append(append(port("mlx5_1", "1", "4: ACTIVE"), port("mlx5_0", "2", "1: DOWN")...), lib...)...),
			want: []Info{{"mlx5_0", -1, []PortInfo{down}}, {"mlx5_1", -1, []PortInfo{active}}},
		},
		"beside a NUMA node": {
			root: tree(append(append(port("mlx5_0", "1", "4: ACTIVE"), lib...), "sys/class/infiniband/mlx5_0/device/numa_node", "1\n")...),
			want: []Info{{"mlx5_0", 1, []PortInfo{active}}},
		},
		"beside none": {
			root: tree(append(append(port("mlx5_0", "1", "4: ACTIVE"), lib...), "sys/class/infiniband/mlx5_0/device/numa_node", "-1\n")...),
			want: []Info{{"mlx5_0", -1, []PortInfo{active}}},
		},
		"attributes that cannot be read": {
			root: tree(append(lib, "sys/class/infiniband/mlx5_0/ports/1/gids/0", "")...),
			want: []Info{{"mlx5_0", -1, []PortInfo{{Number: 1, State: "unknown", LinkLayer: "unknown", Rate: "unknown"}}}},
			err:  "RDMA is not available: no active port: mlx5_0 port 1 is unknown",
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

// Of this very machine the answer is devices or a reason. Where devices must
// be, KVFERRY_RDMA_DEVICE names them.
func TestThisMachine(t *testing.T) {
	devices, err := Probe(os.DirFS("/"), os.Getenv("LD_LIBRARY_PATH"))
	if err != nil && !errors.Is(err, ErrUnavailable) {
		t.Fatal(err)
	}
	t.Logf("devices %+v, reason %v", devices, err)
	names := os.Getenv("KVFERRY_RDMA_DEVICE")
	if names == "" {
		return
	}
	if err != nil {
		t.Error(err)
	}
	for want := range strings.SplitSeq(names, ",") {
		if !slices.ContainsFunc(devices, func(d Info) bool {
			return d.Name == want && len(d.Ports) > 0 && d.Ports[0].State == "ACTIVE"
		}) {
			t.Errorf("no active %s", want)
		}
	}
}
