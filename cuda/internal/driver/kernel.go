//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

import (
	"errors"
	"unsafe"

	"gorgonia.org/cu"
)

// Kernel is a function of a loaded module.
type Kernel struct {
	m cu.Module
	f cu.Function
}

// LoadKernel has the driver compile a module from PTX, and finds the function.
func LoadKernel(ptx, name string) (Kernel, error) {
	m, err := cu.LoadData(ptx)
	if err != nil {
		return Kernel{}, wrap("cuModuleLoadData", err)
	}
	f, err := m.Function(name)
	if err != nil {
		return Kernel{}, errors.Join(wrap("cuModuleGetFunction", err), Kernel{m: m}.Unload())
	}
	return Kernel{m: m, f: f}, nil
}

// Unload ends it.
func (k Kernel) Unload() error { return wrap("cuModuleUnload", k.m.Unload()) }

// Launch starts it with an address and a number.
func (k Kernel) Launch(blocks, threads int, list Addr, n int, s Stream) error {
	// Eight bytes are read of each parameter, however many it has.
	count := uint64(n)
	params := []unsafe.Pointer{unsafe.Pointer(&list), unsafe.Pointer(&count)}
	return wrap("cuLaunchKernel", k.f.Launch(blocks, 1, 1, threads, 1, 1, 0, s.s, params))
}
