package node

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/cuda"
	"github.com/kvferry/kvferry/internal/config"
	"github.com/kvferry/kvferry/rdma"
)

// files are a machine's: pairs of a path and a content.
func files(pairs ...string) fstest.MapFS {
	m := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		m[pairs[i]] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return m
}

// with adds files to others.
func with(parts ...fstest.MapFS) fstest.MapFS {
	all := fstest.MapFS{}
	for _, p := range parts {
		maps.Copy(all, p)
	}
	return all
}

// card is an RDMA device with one port, its node, and its address table, each
// entry "INDEX ADDRESS TYPE NETDEV".
func card(name, uverbs, state, link string, gids ...string) fstest.MapFS {
	port := "sys/class/infiniband/" + name + "/ports/1/"
	m := files(
		port+"state", state+"\n", port+"link_layer", link+"\n", port+"rate", "400 Gb/sec (4X NDR)\n", port+"lid", "0x3\n",
		"sys/class/infiniband_verbs/"+uverbs+"/ibdev", name+"\n", "dev/infiniband/"+uverbs, "",
	)
	m[port+"gids"] = &fstest.MapFile{Mode: fs.ModeDir}
	for _, g := range gids {
		f := strings.Split(g, "|")
		m[port+"gids/"+f[0]] = &fstest.MapFile{Data: []byte(f[1] + "\n")}
		if f[2] != "" {
			m[port+"gid_attrs/types/"+f[0]] = &fstest.MapFile{Data: []byte(f[2] + "\n")}
		}
		m[port+"gid_attrs/ndevs/"+f[0]] = &fstest.MapFile{Data: []byte(f[3] + "\n")}
	}
	return m
}

const (
	v1v4    = "2|0000:0000:0000:0000:0000:ffff:0a00:0001|IB/RoCE v1|eth2"
	v2v4    = "3|0000:0000:0000:0000:0000:ffff:0a00:0001|RoCE v2|eth2"
	v2local = "1|fe80:0000:0000:0000:0000:0000:0000:0001|RoCE v2|eth2"
	unused  = "4|0000:0000:0000:0000:0000:0000:0000:0000||"
	subnet  = "0|fe80:0000:0000:0000:0000:0000:0000:0003||"
)

// verbsLibrary is where the loader finds a library with, or without, dma-buf.
func verbsLibrary(functions string) fstest.MapFS {
	return files("etc/ld.so.cache", "x\x00/opt/lib/libibverbs.so.1\x00y", "opt/lib/libibverbs.so.1", "\x7fELF\x00ibv_open_device\x00"+functions)
}

// gpus are a driver with one device.
var gpus = files("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.1.2  Tue\n",
	"proc/driver/nvidia/gpus/0000:3b:00.0/information", "Model: NVIDIA H200\nDevice Minor: 0\n", "dev/nvidia0", "", "lib64/libcuda.so.1", "")

// paper is a machine of files alone, on which everything else is as it should be.
func paper(f fstest.MapFS) machine {
	return machine{
		files: f, uid: 1000,
		rlimit:  func(int) (uint64, error) { return 65536, nil },
		memlock: func(uint64) error { return nil },
		open: func(path string) error {
			_, err := fs.Stat(f, rooted(path))
			return err
		},
		load: func(string) error { return nil },
		gpus: func(string) ([]gpu, error) {
			return []gpu{{
				GPU: cuda.GPU{UUID: cuda.UUID{0x8f}, Name: "NVIDIA H200", Bus: "0000:3b:00.0", Bytes: 141 << 30, NUMANode: 1},
				can: cuda.Capabilities{Driver: 12090, Batch: true, DMABuf: true},
			}}, nil
		},
		synced: func() (bool, error) { return true, nil },
	}
}

func lockable(bytes uint64) func(uint64) error {
	return func(need uint64) error {
		if need > bytes {
			return &rdma.MemlockError{Need: need, Allowed: bytes, Limit: bytes}
		}
		return nil
	}
}

// configured is a small node, with lines of the section transfer.
func configured(t *testing.T, transfer string) *config.Config {
	t.Helper()
	c, err := config.Parse("test", []byte("node: {name: n, socket: /run/k/n.sock}\narena: {model: m, pages: 1GiB, page_size: 16, layers: 4, heads: 2, head_dim: 64}\ntransfer: {"+transfer+"}\n"))
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// want is what a check must say, in part.
type want struct{ check, state, found, remedy string }

func TestExamine(t *testing.T) {
	roce := with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v2local, v1v4, v2v4, unused), verbsLibrary("ibv_reg_dmabuf_mr\x00"))
	two := with(roce, card("mlx5_1", "uverbs1", "4: ACTIVE", "Ethernet", v2v4))
	const none = "-" // no configuration
	for name, tt := range map[string]struct {
		files    fstest.MapFS
		transfer string
		memory   string // arena.memory; "": host
		change   func(*machine)
		want     []want
		fails    []string // exactly these
	}{
		"a laptop without anything": {
			transfer: none,
			want: []want{
				{"memory lock", StateOK, "not limited", ""},
				{"huge pages", StateAbsent, "this kernel has none", ""},
				{"/dev/shm", StateAbsent, "not needed", ""},
				{"rendezvous", StateOK, "the agent makes it", ""},
				{"rdma", StateAbsent, "no device in /sys/class/infiniband", ""},
				{"gpu", StateAbsent, "no driver", ""},
				{"nvidia-peermem", StateAbsent, "not loaded", ""},
				{"dma-buf", StateAbsent, "no libibverbs", ""},
				{"port data", StateOK, "127.0.0.1:7902 is free", ""},
			},
		},
		"a laptop with a little limit": {
			transfer: none, change: func(m *machine) { m.memlock = lockable(64 << 10) },
			want: []want{{"memory lock", StateOK, "64KiB may be locked; only rdma locks memory, and is not used here", ""}},
		},
		"a RoCE host, one of two ports is down": {
			files: with(roce, card("mlx5_1", "uverbs1", "1: DOWN", "Ethernet")),
			want: []want{
				{"rdma", StateOK, "mlx5_0, mlx5_1", ""},
				{"verbs library", StateOK, "/opt/lib/libibverbs.so.1", ""},
				{"rdma mlx5_0", StateOK, "/dev/infiniband/uverbs0 can be opened", ""},
				{"rdma mlx5_0:1", StateOK, "ACTIVE, Ethernet, 400 Gb/sec (4X NDR)", ""},
				{"GIDs mlx5_0:1", StateOK, "[1] fe80::1 RoCE v2 eth2, [2] 10.0.0.1 IB/RoCE v1 eth2, [3] 10.0.0.1 RoCE v2 eth2 (chosen)", ""},
				{"rdma mlx5_1:1", StateWarn, "DOWN", "cable"},
				{"dma-buf", StateAbsent, "libibverbs has ibv_reg_dmabuf_mr", ""},
			},
		},
		"InfiniBand": {
			files: with(card("mlx5_0", "uverbs0", "4: ACTIVE", "InfiniBand", subnet), verbsLibrary("")),
			want: []want{
				{"rdma mlx5_0:1", StateOK, "ACTIVE, InfiniBand, 400 Gb/sec (4X NDR), LID 0x3", ""},
				{"GIDs mlx5_0:1", StateOK, "[0] fe80::3 unknown type (chosen)", ""},
				{"dma-buf", StateAbsent, "libibverbs has no ibv_reg_dmabuf_mr", ""},
			},
		},
		"InfiniBand without a subnet manager": {
			files: with(card("mlx5_0", "uverbs0", "2: INIT", "InfiniBand", subnet), verbsLibrary("")),
			want: []want{
				{"rdma", StateWarn, "no active port: mlx5_0 port 1 is INIT", ""},
				{"rdma mlx5_0:1", StateWarn, "INIT", "subnet manager"},
			},
		},
		"a container without its device nodes": {
			files:  with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v2v4), verbsLibrary("")),
			change: func(m *machine) { delete(m.files.(fstest.MapFS), "dev/infiniband/uverbs0") },
			want:   []want{{"rdma mlx5_0", StateWarn, "/dev/infiniband/uverbs0 is not here", "--device /dev/infiniband"}},
		},
		"the same, where rdma is required": {
			files: with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v2v4), verbsLibrary("")), transfer: "require: rdma",
			change: func(m *machine) { delete(m.files.(fstest.MapFS), "dev/infiniband/uverbs0") },
			want:   []want{{"rdma mlx5_0", StateFail, "", "--device /dev/infiniband"}},
			fails:  []string{"rdma mlx5_0"},
		},
		"device nodes of somebody else": {
			files: roce, change: func(m *machine) {
				m.open = func(p string) error { return &fs.PathError{Op: "open", Path: p, Err: syscall.EACCES} }
			},
			want: []want{{"rdma mlx5_0", StateWarn, "open /dev/infiniband/uverbs0: permission denied", "let the agent's user open it"}},
		},
		"a device without a node": {
			files: with(roce, files("sys/class/infiniband_verbs/uverbs0/ibdev", "another")),
			want:  []want{{"rdma mlx5_0", StateWarn, "no uverbs node", "modprobe ib_uverbs"}},
		},
		"an address table that is empty": {
			files: with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", unused), verbsLibrary("")), transfer: "require: rdma",
			want:  []want{{"GIDs mlx5_0:1", StateFail, "GID table is empty", "give the port's network device an address"}},
			fails: []string{"GIDs mlx5_0:1"},
		},
		"link-local addresses alone": {
			files: with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v2local), verbsLibrary("")),
			want:  []want{{"GIDs mlx5_0:1", StateWarn, "(chosen)", "routable address"}},
		},
		"RoCE v1 alone": {
			files: with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v1v4), verbsLibrary("")),
			want:  []want{{"GIDs mlx5_0:1", StateWarn, "[2] 10.0.0.1 IB/RoCE v1 eth2 (chosen)", "RoCE v1 ends at the next router"}},
		},
		"an address by its index": {
			files: roce, transfer: "rdma: {gid_index: 3}",
			want: []want{{"GIDs mlx5_0:1", StateOK, "[3] 10.0.0.1 RoCE v2 eth2 (transfer.rdma.gid_index)", ""}},
		},
		"an index that is empty": {
			files: roce, transfer: "rdma: {gid_index: 4}",
			want:  []want{{"GIDs mlx5_0:1", StateFail, "entry 4 of transfer.rdma.gid_index is empty; [1]", "-1"}},
			fails: []string{"GIDs mlx5_0:1"},
		},
		"many addresses": {
			files: with(card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", manyGIDs(20)...), verbsLibrary("")),
			want:  []want{{"GIDs mlx5_0:1", StateOK, "and 4 more", ""}},
		},
		"a device that is named and not there": {
			files: roce, transfer: "rdma: {devices: [mlx5_9]}",
			want:  []want{{"rdma", StateFail, "transfer.rdma.devices names mlx5_9, and there is mlx5_0", "mend"}},
			fails: []string{"rdma"},
		},
		"a port that is named and down": {
			files: with(roce, card("mlx5_1", "uverbs1", "1: DOWN", "Ethernet")), transfer: `rdma: {devices: ["mlx5_1:1"]}`,
			want:  []want{{"rdma mlx5_1:1", StateFail, "DOWN", "cable"}},
			fails: []string{"rdma mlx5_1:1"},
		},
		"ports that are named and not there": {
			files: two, transfer: `rdma: {devices: ["mlx5_0:1", "mlx5_0:7", "mlx5_2:1"]}`,
			want:  []want{{"rdma", StateFail, "names mlx5_0:7, and the ports of mlx5_0 are 1; mlx5_2:1, and there is mlx5_0, mlx5_1", "mend"}},
			fails: []string{"rdma"},
		},
		"a device that is named and down, beside another one": {
			files: with(roce, card("mlx5_1", "uverbs1", "1: DOWN", "Ethernet")), transfer: "rdma: {devices: [mlx5_0, mlx5_1]}",
			want:  []want{{"rdma mlx5_0:1", StateOK, "ACTIVE", ""}, {"rdma mlx5_1:1", StateFail, "DOWN", "cable"}},
			fails: []string{"rdma mlx5_1:1"},
		},
		"required, and no device": {
			transfer: "require: rdma",
			want:     []want{{"rdma", StateFail, "no device", ""}},
			fails:    []string{"rdma"},
		},
		"not wanted": {
			files: roce, transfer: "transports: [tcp]", change: func(m *machine) { m.memlock = lockable(0) },
			want: []want{
				{"rdma", StateAbsent, "not wanted", ""},
				{"memory lock", StateOK, "is not used here", ""},
				{"rendezvous", StateAbsent, "neither shm nor cudaipc is used", ""},
			},
		},
		"cudaipc, and an arena in host memory": {
			transfer: "transports: [cudaipc, tcp]",
			want:     []want{{"rendezvous", StateAbsent, "neither shm nor cudaipc is used", ""}},
		},
		"cudaipc, and an arena on a GPU": {
			files: gpus, transfer: "transports: [cudaipc, tcp], rendezvous: /run/k", memory: "cuda:0",
			change: func(m *machine) {
				m.files = with(m.files.(fstest.MapFS), fstest.MapFS{"run/k": {Mode: fs.ModeDir | 0o777, Sys: &syscall.Stat_t{Uid: 1000}}})
			},
			want: []want{{"rendezvous", StateWarn, "writable by others", "chmod 0700"}},
		},
		"cudaipc alone, and an arena on a GPU": {
			files: gpus, transfer: "transports: [cudaipc, tcp], require: cudaipc, rendezvous: /run/k", memory: "cuda:0",
			change: func(m *machine) {
				m.files = with(m.files.(fstest.MapFS), fstest.MapFS{"run/k": {Mode: fs.ModeDir | 0o777, Sys: &syscall.Stat_t{Uid: 1000}}})
			},
			want:  []want{{"rendezvous", StateFail, "writable by others", "chmod 0700"}},
			fails: []string{"rendezvous"},
		},
		"an engine's arena, and no GPU": {
			files: roce, memory: "engine", change: func(m *machine) {
				m.memlock, m.gpus = lockable(64<<20), func(string) ([]gpu, error) { return nil, errors.New("no libcuda.so.1") }
			},
			want: []want{
				{"gpu", StateWarn, "no driver", "if the engine lends memory of a GPU"},
				{"cuda library", StateWarn, "no libcuda.so.1", "arena.cuda_library"},
				{"memory lock", StateWarn, "the arena that the engine lends, if it is in host memory", "ulimit -l"},
				{"huge pages", StateOK, "not needed: the arena is the engine's", ""},
			},
		},
		"an engine's arena, in host memory, of a node that runs": {
			memory: "engine", change: func(m *machine) {
				m.running, m.arenaPage, m.gpus = true, 4096, func(string) ([]gpu, error) { return nil, errNoGPU }
				m.rlimit = func(int) (uint64, error) { return fewFiles, nil }
			},
			want: []want{
				{"gpu", StateAbsent, "no driver", ""},
				{"open files", StateOK, "a peer takes up to ten", ""},
				{"huge pages", StateOK, "not needed: the arena is the engine's", ""},
			},
		},
		"an engine's arena, and a GPU": {
			files: gpus, memory: "engine",
			want: []want{{"gpu", StateOK, "NVIDIA H200", ""}, {"gpu 0", StateOK, "NVIDIA H200", ""}},
		},
		"files for the chunks of an engine's arena": {
			files: gpus, memory: "engine", change: func(m *machine) {
				m.rlimit = func(int) (uint64, error) { return fewFiles + 2*512 - 1, nil } // of 1 GiB by 2 MiB, and once more
			},
			want: []want{{"open files", StateWarn, "in chunks (expandable segments) up to 1024", "ulimit -n 65536"}},
		},
		"enough of them": {
			files: gpus, memory: "engine", change: func(m *machine) {
				m.rlimit = func(int) (uint64, error) { return fewFiles + 2*512, nil }
			},
			want: []want{{"open files", StateOK, "up to 1024", ""}},
		},
		"no library": {
			files: card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v2v4), transfer: none,
			change: func(m *machine) { m.load = func(string) error { return errors.New("no such file") } },
			want: []want{
				{"rdma", StateWarn, "the loader knows no libibverbs.so.1", ""},
				{"verbs library", StateWarn, "no such file", "libibverbs1"},
			},
		},
		"a library of one's own": {
			files: card("mlx5_0", "uverbs0", "4: ACTIVE", "Ethernet", v2v4), transfer: "rdma: {library: /opt/mine.so}",
			want: []want{{"rdma", StateOK, "mlx5_0", ""}, {"verbs library", StateOK, "/opt/mine.so", ""}},
		},
		"a library that is named and not there": {
			files: roce, transfer: "rdma: {library: /nosuch.so}",
			change: func(m *machine) { m.load = func(string) error { return errors.New("no such file") } },
			want:   []want{{"verbs library", StateFail, "no such file", "libibverbs1"}},
			fails:  []string{"verbs library"},
		},
		"a library that is named and not there, and no device": {
			transfer: "rdma: {library: /nosuch.so}",
			change:   func(m *machine) { m.load = func(string) error { return errors.New("no such file") } },
			want:     []want{{"rdma", StateAbsent, "no device", ""}, {"verbs library", StateFail, "no such file", "libibverbs1"}},
			fails:    []string{"verbs library"},
		},
		"a library that is named, and a node that runs without rdma": {
			transfer: "rdma: {library: /opt/mine.so}",
			change: func(m *machine) {
				m.running, m.load = true, func(string) error { return errNotOpen }
			},
			want: []want{{"rdma", StateAbsent, "no device", ""}, {"verbs library", StateAbsent, "has not opened rdma", ""}},
		},
		"64 KiB may be locked": {
			files: roce, change: func(m *machine) { m.memlock = lockable(64 << 10) },
			want:  []want{{"memory lock", StateFail, "64KiB may be locked, rdma locks 1041MiB", "ulimit -l unlimited"}},
			fails: []string{"memory lock"},
		},
		"enough for one device of two": {
			files: two, change: func(m *machine) { m.memlock = lockable(1500 << 20) },
			want:  []want{{"memory lock", StateFail, "1500MiB may be locked, rdma locks 2081MiB: the arena, the seal table, and queues, for each of 2 devices", "ulimit -l unlimited"}},
			fails: []string{"memory lock"},
		},
		"enough for the device that is named": {
			files: two, transfer: "rdma: {devices: [mlx5_0]}", change: func(m *machine) { m.memlock = lockable(1500 << 20) },
			want: []want{{"memory lock", StateOK, "rdma locks 1041MiB", ""}},
		},
		"enough for the device that is not down": {
			files: with(roce, card("mlx5_1", "uverbs1", "1: DOWN", "Ethernet")), change: func(m *machine) { m.memlock = lockable(1500 << 20) },
			want: []want{{"memory lock", StateOK, "rdma locks 1041MiB", ""}},
		},
		"64 KiB, and the arena is not known": {
			files: roce, transfer: none, change: func(m *machine) { m.memlock = lockable(64 << 10) },
			want: []want{{"memory lock", StateWarn, "64KiB may be locked; rdma locks the whole arena", "LimitMEMLOCK"}},
		},
		"enough may be locked": {
			files: roce, change: func(m *machine) { m.memlock = lockable(2 << 30) },
			want: []want{{"memory lock", StateOK, "2GiB may be locked, rdma locks 1041MiB", ""}},
		},
		"64 KiB, and no library": {
			files: roce, change: func(m *machine) {
				m.memlock, m.load = lockable(64<<10), func(string) error { return errors.New("not built") }
			},
			want: []want{{"memory lock", StateOK, "is not used here", ""}, {"verbs library", StateWarn, "not built", "tag rdma"}},
		},
		"a GPU and a card, without a way between them": {
			files: with(roce, gpus, files("proc/sys/kernel/osrelease", "5.4.0-1-generic\n")),
			want: []want{
				{"gpu", StateOK, "driver 580.1.2: NVIDIA H200", ""},
				{"cuda library", StateOK, "found by the loader", ""},
				{"gpu 0", StateOK, "NVIDIA H200, GPU-8f000000-0000-0000-0000-000000000000, 0000:3b:00.0, 141GiB, near NUMA node 1; CUDA 12.9, copies in batches, dma-buf, no peermem", ""},
				{"dma-buf", StateWarn, "kernel 5.4.0-1-generic, libibverbs has", "5.12"},
			},
		},
		"a GPU whose driver does not load": {
			files: gpus, change: func(m *machine) { m.gpus = func(string) ([]gpu, error) { return nil, errors.New("version mismatch") } },
			want: []want{{"gpu", StateOK, "NVIDIA H200", ""}, {"cuda library", StateWarn, "version mismatch", "tag cuda"}},
		},
		"an arena on a GPU": {
			files: gpus, memory: "cuda:0", change: func(m *machine) { m.memlock = lockable(64 << 20) },
			want: []want{
				{"gpu", StateOK, "NVIDIA H200", ""},
				{"gpu 0", StateOK, "NVIDIA H200", ""},
				{"huge pages", StateOK, "not needed: the arena is in the memory of a GPU", ""},
			},
		},
		"an arena on a GPU, and a card": {
			files: with(roce, gpus), memory: "cuda:GPU-8F000000-0000-0000-0000-000000000000", change: func(m *machine) { m.memlock = lockable(128 << 20) },
			want: []want{{"memory lock", StateOK, "rdma locks 81MiB: memory for staging, the seal table, and queues", ""}},
		},
		"an arena on a GPU that is not there": {
			files: gpus, memory: "cuda:1", fails: []string{"arena on cuda:1"},
			want: []want{{"gpu 0", StateOK, "NVIDIA H200", ""}, {"arena on cuda:1", StateFail, "does not show it", "CUDA_VISIBLE_DEVICES"}},
		},
		"an arena on a GPU, and none here": {
			memory: "cuda:0", fails: []string{"gpu", "cuda library"},
			change: func(m *machine) { m.gpus = func(string) ([]gpu, error) { return nil, errors.New("no libcuda.so.1") } },
			want:   []want{{"gpu", StateFail, "no driver", "arena.memory: host"}, {"cuda library", StateFail, "no libcuda.so.1", "arena.cuda_library"}},
		},
		"a GPU that has fallen off the bus": {
			files: gpus, memory: "cuda:0", fails: []string{"gpu 0"},
			change: func(m *machine) {
				m.gpus = func(string) ([]gpu, error) {
					return []gpu{{GPU: cuda.GPU{Name: "NVIDIA H200", NUMANode: -1}, err: cuda.ErrDead}}, nil
				}
			},
			want: []want{{"gpu 0", StateFail, "device is dead", "nvidia-smi"}},
		},
		"the same with peermem": {
			files: with(roce, gpus, files("proc/sys/kernel/osrelease", "5.4.0\n", "sys/module/nvidia_peermem/refcnt", "0")),
			want:  []want{{"nvidia-peermem", StateOK, "loaded", ""}, {"dma-buf", StateAbsent, "kernel 5.4.0", ""}},
		},
		"a GPU and a card, with dma-buf": {
			files: with(roce, gpus, files("proc/sys/kernel/osrelease", "6.1.0-57-amd64\n")),
			want:  []want{{"dma-buf", StateOK, "kernel 6.1.0-57-amd64, libibverbs has ibv_reg_dmabuf_mr", ""}},
		},
		"huge pages for all": {
			files: files("proc/meminfo", "HugePages_Free: 600\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"),
			want:  []want{{"huge pages", StateOK, "600 of 2MiB are free; the arena takes 512", ""}},
		},
		"huge pages for some": {
			files: files("proc/meminfo", "HugePages_Free: 600\nHugePages_Rsvd: 200\nHugepagesize: 2048 kB\n"),
			want:  []want{{"huge pages", StateWarn, "400 of 2MiB are free", "vm.nr_hugepages=512"}},
		},
		"no huge pages reserved": {
			files: files("proc/meminfo", "HugePages_Free: 0\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"),
			want:  []want{{"huge pages", StateAbsent, "none are free: small pages are used; the arena takes 512", "vm.nr_hugepages=512"}},
		},
		"a node that runs on huge pages": {
			files:  files("proc/meminfo", "HugePages_Free: 0\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"),
			change: func(m *machine) { m.running, m.arenaPage = true, 2<<20 },
			want:   []want{{"huge pages", StateOK, "on pages of 2MiB", ""}, {"port data", StateAbsent, "not opened", ""}},
		},
		"small limits": {
			files:    files("proc/sys/net/core/rmem_max", "212992\n"),
			transfer: none, change: func(m *machine) { m.rlimit = func(int) (uint64, error) { return 1024, nil } },
			want: []want{
				{"open files", StateWarn, "1024", "ulimit -n"},
				{"receive buffer", StateWarn, "212992", "rmem_max=4194304"},
			},
		},
		"great limits": {
			files:    files("proc/sys/net/core/rmem_max", "4194304\n"),
			transfer: none, change: func(m *machine) { m.rlimit = func(int) (uint64, error) { return math.MaxUint64, nil } },
			want: []want{{"open files", StateOK, "not limited", ""}, {"receive buffer", StateOK, "4194304", ""}},
		},
		"a clock that nobody tells of": {
			transfer: none, change: func(m *machine) { m.synced = func() (bool, error) { return false, syscall.EPERM } },
			want: []want{{"clock", StateAbsent, "operation not permitted", ""}},
		},
		"a clock of its own": {
			transfer: none, change: func(m *machine) { m.synced = func() (bool, error) { return false, nil } },
			want: []want{{"clock", StateOK, "not synchronised", ""}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := paper(with(tt.files))
			if tt.change != nil {
				tt.change(&m)
			}
			var e Examination
			if tt.transfer != none {
				e.Config = configured(t, tt.transfer)
				if tt.memory != "" {
					if err := e.Config.Set("arena.memory", tt.memory); err != nil {
						t.Fatal(err)
					}
				}
			}
			checks := m.examine(e)
			for _, w := range tt.want {
				i := slices.IndexFunc(checks, func(c Check) bool { return c.Name == w.check })
				if i < 0 {
					t.Errorf("nothing is said of %s", w.check)
					continue
				}
				if c := checks[i]; c.State != w.state || !strings.Contains(c.Found, w.found) || !strings.Contains(c.Remedy, w.remedy) || (w.remedy == "" && c.Remedy != "" && c.State == StateOK) {
					t.Errorf("%+v\nwant %+v", c, w)
				}
			}
			var fails []string
			names := make(map[string]bool)
			for _, c := range checks {
				if c.State == StateFail {
					fails = append(fails, c.Name)
				}
				if c.Found == "" || (c.State == StateFail || c.State == StateWarn) && c.Remedy == "" {
					t.Errorf("%+v does not say what was found and what to do", c)
				}
				if names[c.Name] {
					t.Errorf("two checks are called %s", c.Name)
				}
				names[c.Name] = true
			}
			if !slices.Equal(fails, tt.fails) {
				t.Errorf("these fail: %v, want %v", fails, tt.fails)
			}
		})
	}
}

func manyGIDs(n int) []string {
	var list []string
	for i := range n {
		list = append(list, fmt.Sprintf("%d|2001:db8::%d|RoCE v2|eth2", i, i+1))
	}
	return list
}

func TestExamineRendezvous(t *testing.T) {
	dir := func(mode fs.FileMode, uid uint32) fstest.MapFS {
		return fstest.MapFS{"run/k": {Mode: mode, Sys: &syscall.Stat_t{Uid: uid}}}
	}
	for name, tt := range map[string]struct {
		files    fstest.MapFS
		transfer string
		want     want
	}{
		"usable":            {dir(fs.ModeDir|0o700, 1000), "", want{"", StateOK, "/run/k can be used", ""}},
		"another":           {fstest.MapFS{"x/y": {Mode: fs.ModeDir | 0o755, Sys: &syscall.Stat_t{Uid: 1000}}}, "rendezvous: /x/y", want{"", StateOK, "/x/y can be used", ""}},
		"of another user":   {dir(fs.ModeDir|0o700, 0), "", want{"", StateWarn, "belongs to user 0, this is user 1000", "chown 1000 /run/k"}},
		"open to others":    {dir(fs.ModeDir|0o777, 1000), "", want{"", StateWarn, "writable by others (mode 0777)", "chmod 0700 /run/k"}},
		"open to its group": {dir(fs.ModeDir|0o770, 1000), "require: shm", want{"", StateFail, "writable by others", "chmod"}},
		"a file":            {dir(0o600, 1000), "", want{"", StateWarn, "is no directory", "remove it"}},
		"not there":         {fstest.MapFS{}, "require: shm", want{"", StateOK, "/run/k is not there; the agent makes it", ""}},
	} {
		t.Run(name, func(t *testing.T) {
			c := paper(tt.files).rendezvous(configured(t, tt.transfer))
			if w := tt.want; c.State != w.state || !strings.Contains(c.Found, w.found) || !strings.Contains(c.Remedy, w.remedy) {
				t.Errorf("%+v, want %+v", c, w)
			}
		})
	}
}

// TestExaminePorts: who has a port is told from what the kernel shows.
func TestExaminePorts(t *testing.T) {
	line := func(local, state, uid, inode string) string {
		return "  0: " + local + " 00000000:0000 " + state + " 00000000:00000000 00:00000000 00000000  " + uid + "        0 " + inode + " 1 0 100 0 0 10 0\n"
	}
	const head = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
	process := files("proc/42/comm", "python3\n")
	process["proc/42/fd/3"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("socket:[777]")}
	process["proc/42/fd/4"] = &fstest.MapFile{Mode: fs.ModeSymlink, Data: []byte("/dev/null")}
	for name, tt := range map[string]struct {
		files   fstest.MapFS
		unknown bool // configuration
		serving map[string]string
		want    want
	}{
		"free": {files("proc/net/tcp", head), false, nil, want{"port data", StateOK, "127.0.0.1:7902 is free", ""}},
		"taken": {
			with(process, files("proc/net/tcp", head+line("0100007F:1EDE", "0A", "1000", "777"))), false, nil,
			want{"port data", StateFail, "127.0.0.1:7902 is taken by python3, process 42 (tcp)", "set ports.data"},
		},
		"a default one is taken": {
			with(process, files("proc/net/tcp", head+line("0100007F:1EDE", "0A", "1000", "777"))), true, nil,
			want{"port data", StateWarn, "taken by python3", ""},
		},
		"on all addresses, by another user": {
			files("proc/net/tcp", head+line("00000000:1EDE", "0A", "33", "5")), false, nil,
			want{"port data", StateFail, "taken by a process of user 33 (tcp)", ""},
		},
		"on all addresses of both kinds": {
			files("proc/net/tcp6", head+line("00000000000000000000000000000000:1EDE", "0A", "33", "5")), false, nil,
			want{"port data", StateFail, "taken by a process of user 33 (tcp)", ""},
		},
		"mapped": {
			files("proc/net/tcp6", head+line("0000000000000000FFFF00000100007F:1EDE", "0A", "33", "5")), false, nil,
			want{"port data", StateFail, "taken", ""},
		},
		"on another address": {
			files("proc/net/tcp", head+line("0100000A:1EDE", "0A", "33", "5")), false, nil,
			want{"port data", StateOK, "free", ""},
		},
		"a connection, not a listener": {
			files("proc/net/tcp", head+line("0100007F:1EDE", "01", "33", "5")), false, nil,
			want{"port data", StateOK, "free", ""},
		},
		"udp of gossip": {
			files("proc/net/udp", head+line("00000000:1EDC", "07", "33", "5")), false, nil,
			want{"port gossip", StateFail, "taken by a process of user 33 (udp)", "ports.gossip"},
		},
		"udp is nothing to the peer port": {
			files("proc/net/udp", head+line("00000000:1EDD", "07", "33", "5")), false, nil,
			want{"port peer", StateOK, "free", ""},
		},
		"the node's own": {
			files("proc/net/tcp", head+line("0100007F:1EDE", "0A", "1000", "777")), false,
			map[string]string{"data": "127.0.0.1:7902"},
			want{"port data", StateOK, "127.0.0.1:7902 is the node's", ""},
		},
		"another node's port is no excuse": {
			files("proc/net/tcp", head+line("0100007F:1EDE", "0A", "1000", "777")), false,
			map[string]string{"data": "127.0.0.1:17902"},
			want{"port data", StateFail, "taken", ""},
		},
		"garbage": {
			files("proc/net/tcp", "a\nb c d e f g h i j k l\n"+line("zz:1EDE", "0A", "1", "1")+line("0100007F", "0A", "1", "1")+line("01007F:1EDE", "0A", "1", "1")+line(":1EDE", "0A", "1", "1")),
			false, nil,
			want{"port data", StateOK, "free", ""},
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := Examination{Serving: tt.serving}
			if !tt.unknown {
				e.Config = configured(t, "")
			}
			checks := paper(tt.files).ports(e)
			i := slices.IndexFunc(checks, func(c Check) bool { return c.Name == tt.want.check })
			if c, w := checks[i], tt.want; c.State != w.state || !strings.Contains(c.Found, w.found) || !strings.Contains(c.Remedy, w.remedy) {
				t.Errorf("%+v, want %+v", c, w)
			}
		})
	}
}

// TestExamineThisMachine: whatever it is, a machine without a configuration has
// nothing that fails, and every check says what it found.
func TestExamineThisMachine(t *testing.T) {
	m := thisMachine()
	m.load = func(string) error { return nil } // other tests choose the library of this process
	for _, c := range m.examine(Examination{}) {
		t.Logf("%+v", c)
		if c.Name == "" || c.Found == "" || !slices.Contains([]string{StateOK, StateWarn, StateAbsent}, c.State) {
			t.Errorf("%+v", c)
		}
	}
}

// TestFilesOfLentMemory: memory in more pieces than this process may open files for
// is refused with what to set; what fits is not.
func TestFilesOfLentMemory(t *testing.T) {
	if err := roomForFiles(1); err != nil {
		t.Error(err)
	}
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil {
		t.Fatal(err)
	}
	if r.Cur > math.MaxInt32 {
		t.Skip("files are not limited")
	}
	most := int(r.Cur-spareFiles) / 2
	if err := roomForFiles(most); err != nil {
		t.Error(err)
	}
	err := roomForFiles(most + 1)
	if want := fmt.Sprintf("ulimit -n %d", 2*(most+1)+spareFiles); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "expandable_segments:False") {
		t.Errorf("%v, want %q", err, want)
	}
}
