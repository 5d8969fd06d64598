//go:build !(linux && cgo && cuda && (amd64 || arm64))

package cuda

import (
	"fmt"
	"os"

	"github.com/kvferry/kvferry/internal/memory"
)

// Runtime is the driver, opened. This binary was built without it.
type Runtime struct{}

// Open returns [ErrUnavailable].
func Open(Options) (*Runtime, error) {
	return nil, fmt.Errorf("%w: this binary was built without the tag cuda, or without cgo", ErrUnavailable)
}

// GPUs are none.
func (*Runtime) GPUs() []GPU { return nil }

// Find returns [ErrUnavailable].
func (*Runtime) Find(string) (GPU, error) { return GPU{}, ErrUnavailable }

// Alloc returns [ErrUnavailable].
func (*Runtime) Alloc(UUID, int64) (*Arena, error) { return nil, ErrUnavailable }

// AllocChunks returns [ErrUnavailable].
func (*Runtime) AllocChunks(UUID, int64, int64) (*Arena, error) { return nil, ErrUnavailable }

// Wrap returns [ErrUnavailable].
func (*Runtime) Wrap(UUID, memory.DeviceAddr, int64) (*Arena, error) { return nil, ErrUnavailable }

// Import closes the files and returns [ErrUnavailable].
func (*Runtime) Import(_ Handle, files []*os.File) (*Arena, error) {
	for _, f := range files {
		f.Close()
	}
	return nil, ErrUnavailable
}

// Reach returns [ErrUnavailable].
func (*Runtime) Reach(UUID, UUID) error { return ErrUnavailable }

// Pull returns a ticket that says [ErrUnavailable].
func (*Runtime) Pull(_, _ *Arena, _ []memory.Segment) memory.Ticket { return unavailable{} }

// Dead is never closed.
func (*Runtime) Dead() <-chan struct{} { return nil }

// Reason is nil.
func (*Runtime) Reason() error { return nil }

// Stats are zero.
func (*Runtime) Stats() Stats { return Stats{} }

// Capabilities returns [ErrUnavailable].
func (*Runtime) Capabilities(UUID) (Capabilities, error) { return Capabilities{}, ErrUnavailable }

// Look returns [ErrUnavailable].
func (*Runtime) Look(UUID) (Capabilities, error) { return Capabilities{}, ErrUnavailable }

// Close does nothing.
func (*Runtime) Close() error { return nil }

// Arena is memory of a device. This binary has none.
type Arena struct{}

var (
	_ memory.Stager         = (*Arena)(nil)
	_ memory.DMABufExporter = (*Arena)(nil)
)

// GPU is none.
func (*Arena) GPU() GPU { return GPU{} }

// Export returns [ErrUnavailable].
func (*Arena) Export() (Handle, []*os.File, error) { return Handle{}, nil, ErrUnavailable }

// Size is 0.
func (*Arena) Size() int64 { return 0 }

// ReadInto returns a ticket that says [ErrUnavailable].
func (*Arena) ReadInto([]byte, []memory.Segment) memory.Ticket { return unavailable{} }

// WriteFrom returns a ticket that says [ErrUnavailable].
func (*Arena) WriteFrom([]byte, []memory.Segment) memory.Ticket { return unavailable{} }

// Move returns a ticket that says [ErrUnavailable].
func (*Arena) Move([]memory.Segment) memory.Ticket { return unavailable{} }

// Pin returns [ErrUnavailable].
func (*Arena) Pin([]byte) (func() error, error) { return nil, ErrUnavailable }

// Address is 0.
func (*Arena) Address() memory.DeviceAddr { return 0 }

// DMABuf returns [memory.ErrNoDMABuf].
func (*Arena) DMABuf(int64, int64) (*os.File, int64, error) { return nil, 0, memory.ErrNoDMABuf }

// Flush returns [ErrUnavailable].
func (*Arena) Flush() error { return ErrUnavailable }

// Close does nothing.
func (*Arena) Close() error { return nil }

type unavailable struct{}

func (unavailable) Wait() error { return ErrUnavailable }
