//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

/*
#include <cuda.h>
#include <string.h>

static CUmemAllocationProp property(int device, int rdma) {
	CUmemAllocationProp p;
	memset(&p, 0, sizeof p);
	p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
	p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	p.location.id = device;
	p.allocFlags.gpuDirectRDMACapable = rdma;
	return p;
}

static CUresult granularity(size_t *n, int device) {
	CUmemAllocationProp p = property(device, 0);
	return cuMemGetAllocationGranularity(n, &p, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
}

static CUresult create(CUmemGenericAllocationHandle *h, size_t n, int device, int rdma) {
	CUmemAllocationProp p = property(device, rdma);
	return cuMemCreate(h, n, &p, 0);
}

static CUresult import_file(CUmemGenericAllocationHandle *h, int fd) {
	return cuMemImportFromShareableHandle(h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static CUresult retain(CUmemGenericAllocationHandle *h, CUdeviceptr p) {
	return cuMemRetainAllocationHandle(h, (void *)(uintptr_t)p);
}

static CUresult set_access(CUdeviceptr p, size_t n, int device) {
	CUmemAccessDesc d;
	memset(&d, 0, sizeof d);
	d.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	d.location.id = device;
	d.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	return cuMemSetAccess(p, n, &d, 1);
}
*/
import "C"

import "unsafe"

// Chunk is physical memory of a device that is mapped by addresses of its own.
type Chunk uint64

// Granularity is what the bytes of a chunk are a multiple of.
func Granularity(d Device) (int64, error) {
	var n C.size_t
	err := check("cuMemGetAllocationGranularity", C.granularity(&n, C.int(d)))
	return int64(n), err
}

// NewChunk makes one that files can tell, and other devices reach where asked.
func NewChunk(d Device, bytes int64, rdma bool) (Chunk, error) {
	var h C.CUmemGenericAllocationHandle
	var r C.int
	if rdma {
		r = 1
	}
	err := check("cuMemCreate", C.create(&h, C.size_t(bytes), C.int(d), r))
	return Chunk(h), err
}

// RetainChunk finds the one that is mapped at an address.
func RetainChunk(p Addr) (Chunk, error) {
	var h C.CUmemGenericAllocationHandle
	err := check("cuMemRetainAllocationHandle", C.retain(&h, C.CUdeviceptr(p)))
	return Chunk(h), err
}

// ImportChunk takes one from a descriptor, which stays the caller's.
func ImportChunk(fd int) (Chunk, error) {
	var h C.CUmemGenericAllocationHandle
	err := check("cuMemImportFromShareableHandle", C.import_file(&h, C.int(fd)))
	return Chunk(h), err
}

// Export tells it by a descriptor, which becomes the caller's.
func (c Chunk) Export() (int, error) {
	fd := C.int(-1)
	err := check("cuMemExportToShareableHandle", C.cuMemExportToShareableHandle(unsafe.Pointer(&fd), C.CUmemGenericAllocationHandle(c), C.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0))
	return int(fd), err
}

// Release gives the handle back; the memory lives as long as it is mapped.
func (c Chunk) Release() error {
	return check("cuMemRelease", C.cuMemRelease(C.CUmemGenericAllocationHandle(c)))
}

// Reserve takes addresses.
func Reserve(bytes int64) (Addr, error) {
	var p C.CUdeviceptr
	err := check("cuMemAddressReserve", C.cuMemAddressReserve(&p, C.size_t(bytes), 0, 0, 0))
	return Addr(p), err
}

// Unreserve gives them back.
func Unreserve(p Addr, bytes int64) error {
	return check("cuMemAddressFree", C.cuMemAddressFree(C.CUdeviceptr(p), C.size_t(bytes)))
}

// Map puts a whole chunk at an address.
func Map(p Addr, bytes int64, c Chunk) error {
	return check("cuMemMap", C.cuMemMap(C.CUdeviceptr(p), C.size_t(bytes), 0, C.CUmemGenericAllocationHandle(c), 0))
}

// Unmap undoes Map.
func Unmap(p Addr, bytes int64) error {
	return check("cuMemUnmap", C.cuMemUnmap(C.CUdeviceptr(p), C.size_t(bytes)))
}

// SetAccess lets a device read and write what is mapped there.
func SetAccess(p Addr, bytes int64, d Device) error {
	return check("cuMemSetAccess", C.set_access(C.CUdeviceptr(p), C.size_t(bytes), C.int(d)))
}
