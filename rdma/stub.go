//go:build !(linux && cgo && rdma && (amd64 || arm64))

package rdma

import (
	"context"
	"fmt"
)

func unavailable() error {
	return fmt.Errorf("%w: not built into this binary (it needs Linux on amd64 or arm64, cgo, and the tag rdma)", ErrUnavailable)
}

// Load returns [ErrUnavailable].
func Load(string) error { return unavailable() }

// Devices returns [ErrUnavailable].
func Devices() ([]string, error) { return nil, unavailable() }

// Open returns [ErrUnavailable].
func Open(string) (*Device, error) { return nil, unavailable() }

// A Device of this build does not exist, nor does anything that one makes:
// their methods are there so that callers build.
type Device struct{}

// Name returns "".
func (*Device) Name() string { return "" }

// NUMANode returns -1.
func (*Device) NUMANode() int { return -1 }

// Limits returns nothing.
func (*Device) Limits() Limits { return Limits{} }

// Port returns [ErrUnavailable].
func (*Device) Port(int) (Port, error) { return Port{}, unavailable() }

// GIDs returns [ErrUnavailable].
func (*Device) GIDs(int) ([]GID, error) { return nil, unavailable() }

// Watch returns [ErrUnavailable].
func (*Device) Watch(context.Context, func(Event)) error { return unavailable() }

// NewPD returns [ErrUnavailable].
func (*Device) NewPD() (*PD, error) { return nil, unavailable() }

// Close does nothing.
func (*Device) Close() error { return nil }

// PD does not exist in this build.
type PD struct{}

// Register returns [ErrUnavailable].
func (*PD) Register([]byte, Access) (*Region, error) { return nil, unavailable() }

// RegisterRange returns [ErrUnavailable].
func (*PD) RegisterRange(_, _ uint64, _ Access) (*Region, error) { return nil, unavailable() }

// RegisterDMABuf returns [ErrUnavailable].
func (*PD) RegisterDMABuf(_ int, _, _, _ uint64, _ Access) (*Region, error) {
	return nil, unavailable()
}

// NewQP returns [ErrUnavailable].
func (*PD) NewQP(QPOptions) (*QP, error) { return nil, unavailable() }

// Close does nothing.
func (*PD) Close() error { return nil }

// Region does not exist in this build.
type Region struct{}

// Addr returns 0.
func (*Region) Addr() uint64 { return 0 }

// Len returns 0.
func (*Region) Len() uint64 { return 0 }

// SliceBytes returns 0.
func (*Region) SliceBytes() uint64 { return 0 }

// Keys returns nil.
func (*Region) Keys() []Key { return nil }

// Close does nothing.
func (*Region) Close() error { return nil }

// QP does not exist in this build.
type QP struct{}

// Num returns 0.
func (*QP) Num() uint32 { return 0 }

// State returns [ErrUnavailable].
func (*QP) State() (QPState, error) { return 0, unavailable() }

// Connect returns [ErrUnavailable].
func (*QP) Connect(Path) error { return unavailable() }

// Read returns [ErrUnavailable].
func (*QP) Read(context.Context, []Op, ReadOptions) (Stats, error) { return Stats{}, unavailable() }

// Fail returns [ErrUnavailable].
func (*QP) Fail() error { return unavailable() }

// Close does nothing.
func (*QP) Close() error { return nil }
