package cudatest

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/kvferry/kvferry/internal/double"
)

const environment = "KVFERRY_CUDA_WORLD"

// Options are what a world is made of. A zero field means its default.
type Options struct {
	Devices   int      // at most 8; default 1, -1: none
	Memory    int64    // bytes of each device; default 1 GiB
	Version   int      // of the driver, such as 11080; default 12090
	Hide      []string // entry points that the driver lacks, as the header names them
	NoDMABuf  bool
	Peers     bool   // the devices reach each other's memory
	Unordered bool   // what cards write must be flushed
	Trace     string // path of a file: a line "PID CALL" for each call
	Faults    Faults // Delay and Strict of it hold whatever is set
}

// World is a set of devices and what has been made of them, in any number of
// processes. It is safe for concurrent use.
type World struct {
	options Options
	library string
	base    Faults
	control *double.Control[control]
}

// New makes a world. It lies in memory of this process, and ends with it and
// the last that uses it.
func New(o Options) (*World, error) {
	o = defaults(o)
	if o.Devices > maxDevices || o.Memory < 0 || len(o.Trace) >= len(control{}.trace) || len(calls()) >= maxCalls {
		return nil, fmt.Errorf("make a world: %d devices of %d bytes, a path of %d characters, %d calls: out of bounds", o.Devices, o.Memory, len(o.Trace), len(calls()))
	}
	library, err := build(o.Hide)
	if err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("kvferry-cuda-world", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a world: %w", err)
	}
	shared, err := double.Share[control](os.NewFile(uintptr(fd), "world"))
	if err != nil {
		return nil, fmt.Errorf("make a world: %w", err)
	}
	w := &World{options: o, library: library, base: o.Faults, control: shared}
	err = shared.Locked(func(c *control) error {
		c.magic, c.version, c.memory, c.driver, c.devices = controlMagic, controlVersion, uint64(o.Memory), uint32(o.Version), uint32(max(o.Devices, 0))
		c.dmabuf, c.peers, c.ordered = flag(!o.NoDMABuf), flag(o.Peers), flag(!o.Unordered)
		copy(c.trace[:], o.Trace)
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a world: %w", err), shared.Close())
	}
	w.Set(o.Faults)
	return w, nil
}

func defaults(o Options) Options {
	if o.Devices == 0 {
		o.Devices = 1
	}
	if o.Memory == 0 {
		o.Memory = 1 << 30
	}
	if o.Version == 0 {
		o.Version = 12090
	}
	return o
}

// Close lets go of the control file. Processes that use the world go on; no
// other can join them.
func (w *World) Close() error { return w.control.Close() }

// Library is the path of the libcuda.so.1 to be opened.
func (w *World) Library() string { return w.library }

// Options are what the world was made of.
func (w *World) Options() Options { return w.options }

// Env is what a child process needs, beside the rest of its environment and the
// path of the library, to be in this world.
func (w *World) Env() []string {
	return []string{environment + "=" + w.control.Path()}
}

// same says whether two worlds would be alike.
func (o Options) same(p Options) bool {
	return o.Devices == p.Devices && o.Memory == p.Memory && o.Version == p.Version && slices.Equal(o.Hide, p.Hide) && o.NoDMABuf == p.NoDMABuf &&
		o.Peers == p.Peers && o.Unordered == p.Unordered && o.Trace == p.Trace
}
