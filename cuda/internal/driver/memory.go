//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

/*
#include <cuda.h>
#include <string.h>

static CUresult pointer_attribute(uint64_t *value, CUpointer_attribute a, CUdeviceptr p) {
	*value = 0; // the driver writes one, four, or eight bytes
	return cuPointerGetAttribute(value, a, p);
}

static CUresult ipc_open(CUdeviceptr *p, const void *handle) {
	CUipcMemHandle h;
	memcpy(&h, handle, sizeof h);
	return cuIpcOpenMemHandle(p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
}

static CUresult flush(void) {
	return cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
}
*/
import "C"

import (
	"unsafe"

	"gorgonia.org/cu"
)

// Addr is an address in the memory of a device.
type Addr = uint64

// Alloc is cuMemAlloc.
func Alloc(bytes int64) (Addr, error) {
	p, err := cu.MemAlloc(bytes)
	return Addr(p), wrap("cuMemAlloc", err)
}

// Free is cuMemFree.
func Free(p Addr) error { return wrap("cuMemFree", cu.MemFree(cu.DevicePtr(p))) }

// Zero fills memory, in the order of a stream.
func Zero(p Addr, bytes int64, s Stream) error {
	return wrap("cuMemsetD8Async", cu.MemsetD8Async(cu.DevicePtr(p), 0, bytes, s.s))
}

// Range is the allocation that an address lies in.
func Range(p Addr) (base Addr, bytes int64, err error) {
	n, b, err := cu.DevicePtr(p).AddressRange()
	return Addr(b), n, wrap("cuMemGetAddressRange", err)
}

// SyncMemops makes synchronous calls on the allocation synchronous for other
// devices too, as memory that these read and write must be.
func SyncMemops(p Addr) error {
	on := C.uint(1)
	return wrap("cuPointerSetAttribute", cu.DevicePtr(p).SetPtrAttribute(unsafe.Pointer(&on), cu.PointerAttribute(C.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)))
}

// Legacy says whether the memory has a handle of 64 bytes.
func Legacy(p Addr) (bool, error) {
	v, err := pointerAttribute(p, C.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
	return v != 0, err
}

// ByFiles says whether the memory can be told by file descriptors.
func ByFiles(p Addr) (bool, error) {
	v, err := pointerAttribute(p, C.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES)
	return v&C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0, err
}

// BufferID is the number of an allocation, which the driver gives once a process.
func BufferID(p Addr) (uint64, error) { return pointerAttribute(p, C.CU_POINTER_ATTRIBUTE_BUFFER_ID) }

// Ordinal is the device that the memory is on.
func Ordinal(p Addr) (Device, error) {
	v, err := pointerAttribute(p, C.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
	return Device(int32(v)), err
}

func pointerAttribute(p Addr, a C.CUpointer_attribute) (uint64, error) {
	var v C.uint64_t
	err := check("cuPointerGetAttribute", C.pointer_attribute(&v, a, C.CUdeviceptr(p)))
	return uint64(v), err
}

// IPCHandle tells a whole allocation to other processes.
func IPCHandle(base Addr) (h [64]byte, err error) {
	err = check("cuIpcGetMemHandle", C.cuIpcGetMemHandle((*C.CUipcMemHandle)(unsafe.Pointer(&h)), C.CUdeviceptr(base)))
	return h, err
}

// IPCOpen maps what another process has told.
func IPCOpen(h [64]byte) (Addr, error) {
	var p C.CUdeviceptr
	err := check("cuIpcOpenMemHandle", C.ipc_open(&p, unsafe.Pointer(&h)))
	return Addr(p), err
}

// IPCClose undoes one IPCOpen.
func IPCClose(base Addr) error {
	return check("cuIpcCloseMemHandle", C.cuIpcCloseMemHandle(C.CUdeviceptr(base)))
}

// DMABuf tells whole pages of device memory as a file descriptor.
func DMABuf(p Addr, bytes int64) (int, error) {
	fd := C.int(-1)
	err := check("cuMemGetHandleForAddressRange", C.cuMemGetHandleForAddressRange(unsafe.Pointer(&fd), C.CUdeviceptr(p), C.size_t(bytes), C.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0))
	return int(fd), err
}

// FlushWrites makes what other devices have written seen by the current context's.
func FlushWrites() error { return check("cuFlushGPUDirectRDMAWrites", C.flush()) }

// HostAlloc makes pinned host memory, outside of Go's heap.
func HostAlloc(bytes int) ([]byte, error) {
	var p unsafe.Pointer
	if err := check("cuMemHostAlloc", C.cuMemHostAlloc(&p, C.size_t(bytes), C.CU_MEMHOSTALLOC_PORTABLE)); err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), bytes), nil
}

// HostFree frees it.
func HostFree(b []byte) error {
	return wrap("cuMemFreeHost", cu.MemFreeHost(unsafe.Pointer(unsafe.SliceData(b))))
}

// Register pins host memory for all contexts.
func Register(b []byte) error {
	return check("cuMemHostRegister", C.cuMemHostRegister(unsafe.Pointer(unsafe.SliceData(b)), C.size_t(len(b)), C.CU_MEMHOSTREGISTER_PORTABLE))
}

// Unregister undoes Register of what begins there.
func Unregister(b []byte) error {
	return check("cuMemHostUnregister", C.cuMemHostUnregister(unsafe.Pointer(unsafe.SliceData(b))))
}
