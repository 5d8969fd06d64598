// Package cuda holds KV in the memory of GPUs: arenas that are allocated here,
// or taken from another process of the host, and the copies from, to, and
// within them.
//
// A [Runtime] is the driver, opened; the library is found when the program runs,
// so that one binary is for every machine. It works in the primary context of a
// device, which it retains and never destroys. Devices are named by UUID, since
// ordinals differ between processes.
//
// Every device has a lane for each direction: a stream, one goroutine that
// starts copies, and one that sees them end. Who wants a copy hands it to the
// lane and gets a ticket. The lane takes all that waits, makes one stretch of
// neighbours, and starts them by one call into C; small pieces go to the device
// as one stretch, and a kernel puts them where they belong. Host memory that is
// not pinned goes through two pinned buffers of the lane, so that nothing of
// Go's heap is known to the driver.
//
// Offsets are checked before an address is made of them. A device whose context
// has broken is dead: what runs fails with [ErrDead] and the driver's words, and
// so does all that comes later, until the process is another.
//
// The package knows no page and no transport. Without the build tag cuda, or
// without cgo, [Open] says so, and [Probe] looks at the machine all the same.
package cuda

import (
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"strings"

	"github.com/kvferry/kvferry/cuda/internal/driver"
)

// ErrUnavailable is wrapped when this machine, or this binary, cannot do CUDA;
// the text says what is missing.
var ErrUnavailable = errors.New("CUDA is not available")

// ErrDead is wrapped by every call on a device whose context is broken: an
// error that sticks. Only a new process gets the device again.
var ErrDead = errors.New("device is dead")

// ErrNotShareable is wrapped where memory cannot be told to another process.
var ErrNotShareable = errors.New("device memory cannot be shared")

// ErrNoMemory is wrapped where a device has not enough memory left.
var ErrNoMemory = errors.New("not enough device memory")

// ErrClosed is wrapped by what is asked of an arena, or of a runtime, that has
// been closed.
var ErrClosed = errors.New("closed")

// Error is what the driver answered, in its own words.
type Error = driver.Error

// UUID names a device, the same in every process; ordinals are not.
type UUID [16]byte

// String is such as "GPU-5a1b2c3d-0000-1111-2222-333344445555".
func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return "GPU-" + h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// ParseUUID reads what String writes, in either case.
func ParseUUID(text string) (UUID, error) {
	var u UUID
	const prefix = "GPU-"
	if len(text) != len(u.String()) || !strings.EqualFold(text[:len(prefix)], prefix) {
		return UUID{}, fmt.Errorf("%.60q is not the UUID of a device, such as %s", text, u)
	}
	digits := strings.ReplaceAll(text[len(prefix):], "-", "")
	if b, err := hex.DecodeString(digits); err != nil || copy(u[:], b) != len(u) || !strings.EqualFold(u.String(), text) {
		return UUID{}, fmt.Errorf("%.60q is not the UUID of a device, such as %s", text, UUID{})
	}
	return u, nil
}

// GPU is a device as the driver shows it to this process.
type GPU struct {
	Ordinal  int
	UUID     UUID
	Name     string
	Bus      string // "0000:3b:00.0"
	Bytes    int64  // of its memory
	NUMANode int    // -1: unknown
}

// Options set up a Runtime. A zero field means its default.
type Options struct {
	Library string       // path of libcuda.so.1; "": where the loader, containers, and WSL have it
	Logger  *slog.Logger // default: silence
	// Scatter is up to how many bytes a piece on its way from host to device is
	// small: many small ones go as one stretch and a kernel. 0: measured when a
	// device is first used; negative: never.
	Scatter int64
	// PinChunk is how many bytes of host memory are pinned by one call, in whole
	// pages of 2 MiB. Default 1 GiB, which takes a tenth of a second: a driver
	// holds locks for so long that all of its users on the machine want.
	PinChunk int64
}

// Capabilities are what was found of a device.
type Capabilities struct {
	Driver       int   // such as 12090
	Batch        bool  // many copies in one call
	DMABuf       bool  // memory can be told as a dma-buf
	PeerMem      bool  // the kernel's nvidia_peermem
	OwnerOrdered bool  // what cards write needs no flush for the device's owner
	Scatter      int64 // pieces of fewer bytes go by the kernel; 0: none
}

// Stats count since Open.
type Stats struct {
	Copies   [3]Copies // by [Direction]
	Kernels  uint64    // launches of the scatter kernel
	Imported int       // arenas of others, open now
	Arenas   int       // of our own, open now
	Pinned   int64     // bytes of host memory
	Pinning  int64     // bytes of host memory that are still to be pinned
}

// Direction of a copy.
type Direction int

// The directions.
const (
	HostToDevice Direction = iota
	DeviceToHost
	DeviceToDevice
)

func (d Direction) String() string {
	return [...]string{"host to device", "device to host", "device to device"}[d]
}

// Copies of one direction.
type Copies struct {
	Calls    uint64 // of the driver that start copies
	Segments uint64 // asked for
	Bytes    uint64
	Slow     uint64 // bytes of them whose host memory was not pinned
}
