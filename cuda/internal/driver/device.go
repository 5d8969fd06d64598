//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

/*
#include <cuda.h>
*/
import "C"

import (
	"runtime"
	"strings"

	"gorgonia.org/cu"
)

// Device is the ordinal of one.
type Device int

// Count is the number of devices.
func Count() (int, error) {
	n, err := cu.NumDevices()
	return n, wrap("cuDeviceGetCount", err)
}

// Name is such as "NVIDIA H200".
func (d Device) Name() (string, error) {
	s, err := cu.Device(d).Name()
	return s, wrap("cuDeviceGetName", err)
}

// UUID is the same in every process.
func (d Device) UUID() ([16]byte, error) {
	u, err := cu.Device(d).UUID()
	return u, wrap("cuDeviceGetUuid", err)
}

// Bytes is the size of its memory.
func (d Device) Bytes() (int64, error) {
	n, err := cu.Device(d).TotalMem()
	return n, wrap("cuDeviceTotalMem", err)
}

// Bus is such as "0000:3b:00.0".
func (d Device) Bus() (string, error) {
	var s [32]C.char
	err := check("cuDeviceGetPCIBusId", C.cuDeviceGetPCIBusId(&s[0], C.int(len(s)), C.CUdevice(d)))
	return strings.ToLower(C.GoString(&s[0])), err
}

// Attribute of a device, by its number.
type Attribute int

// The attributes that are asked for.
const (
	FlushOptions   Attribute = C.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS
	WritesOrdering Attribute = C.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING
	DMABufs        Attribute = C.CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED
	VMM            Attribute = C.CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
	VMMFiles       Attribute = C.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
	VMMWithRDMA    Attribute = C.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
)

// Attribute asks for one; a driver too old to know it says 0.
func (d Device) Attribute(a Attribute) int {
	v, err := cu.Device(d).Attribute(cu.DeviceAttribute(a))
	if err != nil {
		return 0
	}
	return v
}

// Reaches says whether d can read the memory of a peer by itself.
func (d Device) Reaches(peer Device) bool {
	can, err := cu.Device(d).CanAccessPeer(cu.Device(peer))
	return err == nil && can != 0
}

// Context is the primary context of a device, retained.
type Context struct {
	device Device
	c      cu.CUContext
}

// Retain makes the context, or counts one more user of it.
func Retain(d Device) (Context, error) {
	c, err := cu.Device(d).RetainPrimaryCtx()
	return Context{device: d, c: c}, wrap("cuDevicePrimaryCtxRetain", err)
}

// Release gives it back. It is never destroyed: others of the process use it.
func (c Context) Release() error {
	return wrap("cuDevicePrimaryCtxRelease", cu.Device(c.device).ReleasePrimaryCtx())
}

// Do calls f on a thread on which the context is current.
func (c Context) Do(f func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := cu.SetCurrentContext(c.c); err != nil {
		return wrap("cuCtxSetCurrent", err)
	}
	return f()
}

// Reach lets the current context read the memory of a peer's.
func Reach(peer Context) error {
	return wrap("cuCtxEnablePeerAccess", peer.c.EnablePeerAccess(0))
}
