package rdmatest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/kvferry/kvferry/internal/double"
)

const environment = "KVFERRY_VERBS_DOUBLE"

// DeviceSpec describes a device. A zero field means its default.
type DeviceSpec struct {
	Name       string       // required
	InfiniBand bool         // default: Ethernet, that is RoCE v2
	GIDs       []netip.Addr // at most 8; default: one, of the Nth device 10.77.0.N+1, on InfiniBand fe80::N+1
	NUMANode   int          // what sysfs says; -1: unknown
	Rate       uint64       // bits/s: 10, 20, 25, 40, 50, 56, 100, 200, or 400 Gb/s; default 100 Gb/s. It slows nothing: see Faults.Bandwidth
	MTU        int          // bytes; default 4096
	MaxReads   int          // under way for a queue pair, at most 255; default 16
	MaxMRSize  uint64       // bytes of a region; default: no bound
	MaxMsg     uint64       // bytes of a read; default 1 GiB, at most 2 GiB
	MaxWR      int          // default 16,384
	MaxSGE     int          // at most 64; default 30
	MaxCQE     int          // default 1<<20
	Down       bool         // its port is down at first
}

// World is a set of devices and what has been made of them, in any number of
// processes. It is safe for concurrent use.
type World struct {
	dir     string
	library string
	control *double.Control[control]
}

// NewWorld makes a world in dir, which must exist and must not hold one.
func NewWorld(dir string, devices ...DeviceSpec) (*World, error) {
	if len(devices) > maxDevices {
		return nil, fmt.Errorf("make a world: %d devices, at most %d", len(devices), maxDevices)
	}
	library, err := Build()
	if err != nil {
		return nil, err
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("make a world: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(dir, "control"), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a world: %w", err)
	}
	shared, err := double.Share[control](file)
	if err != nil {
		return nil, fmt.Errorf("make a world: %w", err)
	}
	w := &World{dir: dir, library: library, control: shared}
	if err := shared.Locked(func(c *control) error { return w.fill(c, devices) }); err != nil {
		return nil, errors.Join(fmt.Errorf("make a world: %w", err), shared.Close())
	}
	return w, nil
}

// fill makes a control file that of a world.
func (w *World) fill(c *control, devices []DeviceSpec) error {
	for i, spec := range devices {
		if err := w.add(c, i, spec); err != nil {
			return fmt.Errorf("device %d %q: %w", i, spec.Name, err)
		}
	}
	c.devices = uint32(len(devices))
	c.version = controlVersion
	atomic.StoreUint64(&c.magic, controlMagic)
	return nil
}

// Close lets go of the control file. Processes that use the world go on.
func (w *World) Close() error { return w.control.Close() }

// Dir is the directory of the world. Below it is the tree that looks like
// sysfs: sys/class/infiniband.
func (w *World) Dir() string { return w.dir }

// Env is what a child process needs, beside the rest of its environment, to
// load the double and to be in this world.
func (w *World) Env() []string {
	path := filepath.Dir(w.library)
	if old := os.Getenv("LD_LIBRARY_PATH"); old != "" {
		path += ":" + old
	}
	return []string{"LD_LIBRARY_PATH=" + path, environment + "=" + w.dir}
}

// portRate is what the attributes of a port with so many bits a second are.
func portRate(bits uint64) (width, speed uint32, text string) {
	switch bits {
	case 10e9:
		return 2, 1, "4X SDR"
	case 20e9:
		return 2, 2, "4X DDR"
	case 25e9:
		return 1, 32, "1X EDR"
	case 40e9:
		return 2, 4, "4X QDR"
	case 50e9:
		return 1, 64, "1X HDR"
	case 56e9:
		return 2, 16, "4X FDR"
	case 100e9:
		return 2, 32, "4X EDR"
	case 200e9:
		return 2, 64, "4X HDR"
	case 400e9:
		return 2, 128, "4X NDR"
	}
	return 0, 0, ""
}

func (w *World) add(c *control, i int, s DeviceSpec) error {
	def := func(p *int, v, most int) error {
		if *p == 0 {
			*p = v
		}
		if *p < 1 || *p > most {
			return fmt.Errorf("%d is not within 1 and %d", *p, most)
		}
		return nil
	}
	if err := errors.Join(def(&s.MTU, 4096, 4096), def(&s.MaxReads, 16, 255), def(&s.MaxWR, 16384, 1<<20), def(&s.MaxSGE, 30, 64), def(&s.MaxCQE, 1<<20, 1<<24)); err != nil {
		return err
	}
	mtu, ok := map[int]uint32{256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}[s.MTU]
	if !ok {
		return fmt.Errorf("MTU %d", s.MTU)
	}
	if s.Rate == 0 {
		s.Rate = 100e9
	}
	width, speed, rate := portRate(s.Rate)
	if rate == "" {
		return fmt.Errorf("no port has a rate of %d bits/s", s.Rate)
	}
	if s.MaxMRSize == 0 {
		s.MaxMRSize = 1 << 63
	}
	if s.MaxMsg == 0 {
		s.MaxMsg = 1 << 30
	}
	if s.MaxMsg > 1<<31 || s.Name == "" || len(s.Name) > 63 || strings.ContainsAny(s.Name, "/\x00") || len(s.GIDs) > maxGIDs {
		return fmt.Errorf("bad name, %d GIDs, or %d bytes of a message", len(s.GIDs), s.MaxMsg)
	}
	if s.GIDs == nil {
		s.GIDs = []netip.Addr{netip.AddrFrom4([4]byte{10, 77, 0, byte(i + 1)})}
		if s.InfiniBand {
			s.GIDs = []netip.Addr{netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: byte(i + 1)})}
		}
	}
	d := &c.device[i]
	copy(d.name[:], s.Name)
	d.maxMRSize, d.maxMsg = s.MaxMRSize, s.MaxMsg
	d.mtu, d.maxReads, d.maxWR, d.maxSGE, d.maxCQE = mtu, uint32(s.MaxReads), uint32(s.MaxWR), uint32(s.MaxSGE), uint32(s.MaxCQE)
	d.activeWidth, d.activeSpeed = width, speed
	d.link, d.portState = 2, portActive
	link, kind := "Ethernet", "RoCE v2"
	if s.InfiniBand {
		d.link, d.lid = 1, uint32(i+1)
		link, kind = "InfiniBand", "IB/RoCE v1"
	}
	if s.Down {
		d.portState = portDown
	}
	port := filepath.Join(w.sysfs(s.Name), "ports", "1")
	files := map[string]string{
		filepath.Join(w.sysfs(s.Name), "device", "numa_node"): strconv.Itoa(s.NUMANode),
		filepath.Join(port, "state"):                          stateText(d.portState),
		filepath.Join(port, "link_layer"):                     link,
		filepath.Join(port, "rate"):                           fmt.Sprintf("%d Gb/sec (%s)", s.Rate/1e9, rate),
		filepath.Join(port, "lid"):                            fmt.Sprintf("%#x", d.lid),
	}
	for n := range maxGIDs {
		var gid [16]byte
		if n < len(s.GIDs) {
			gid = s.GIDs[n].As16()
			files[filepath.Join(port, "gid_attrs", "types", strconv.Itoa(n))] = kind
			if !s.InfiniBand {
				files[filepath.Join(port, "gid_attrs", "ndevs", strconv.Itoa(n))] = fmt.Sprintf("eth%d", i)
			}
		}
		d.gid[n] = gid
		files[filepath.Join(port, "gids", strconv.Itoa(n))] = gidText(gid)
	}
	for path, text := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (w *World) sysfs(device string) string {
	return filepath.Join(w.dir, "sys", "class", "infiniband", device)
}

// gidText is how sysfs writes a GID: all of its digits.
func gidText(gid [16]byte) string {
	var parts []string
	for i := 0; i < len(gid); i += 2 {
		parts = append(parts, fmt.Sprintf("%02x%02x", gid[i], gid[i+1]))
	}
	return strings.Join(parts, ":")
}

func stateText(state uint32) string {
	if state == portActive {
		return "4: ACTIVE"
	}
	return "1: DOWN"
}

func addressOf(p *byte) uintptr { defer runtime.KeepAlive(p); return uintptr(unsafe.Pointer(p)) }
