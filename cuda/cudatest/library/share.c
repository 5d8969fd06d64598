// What is told to other processes and to other devices, and what an address is.
#define _GNU_SOURCE
#include "double.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

// What the 64 bytes hold: where the memory is to be found, while the process
// that exported it lives and has not freed it.
struct handle {
	uint32_t magic;
	int32_t pid, fd, device;
	uint64_t size, key;
};
_Static_assert(sizeof(struct handle) <= sizeof(CUipcMemHandle), "too large for a handle");
enum { HANDLE = 0x4b564950 };

CUresult cuIpcGetMemHandle(CUipcMemHandle *h, CUdeviceptr p)
{
	ENTER(true);
	struct range r;
	if (!range_of(p, &r) || r.kind != DEVICE) // of virtual, managed, and imported memory there is none
		return CUDA_ERROR_INVALID_VALUE;
	struct handle x = {HANDLE, getpid(), r.fd, r.device, r.size, r.key};
	memset(h, 0, sizeof *h);
	memcpy(h, &x, sizeof x);
	return CUDA_SUCCESS;
}

static bool again(uint64_t key, CUdeviceptr *p)
{
	pthread_mutex_lock(&table_lock);
	struct range *r = range_imported(key);
	if (r) {
		r->refs++;
		*p = r->base;
	}
	pthread_mutex_unlock(&table_lock);
	return r != NULL;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *p, CUipcMemHandle h, unsigned int flags)
{
	ENTER(true);
	static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
	struct handle x;
	memcpy(&x, &h, sizeof x);
	if (x.magic != HANDLE || x.device < 0 || x.device >= (int)control->devices || !x.size)
		return CUDA_ERROR_INVALID_VALUE;
	if (x.pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	if (x.device != CURRENT->device && (!control->peers || !(flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)))
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	CUresult result = CUDA_ERROR_INVALID_VALUE; // freed, or its process has ended
	pthread_mutex_lock(&opening);
	int fd = -1;
	size_t mapped = rounded(x.size, LARGE);
	struct range *r = NULL;
	if (again(x.key, p)) {
		result = CUDA_SUCCESS;
		goto out;
	}
	fd = file_of(x.pid, x.fd, x.key);
	if (fd < 0 || lseek(fd, 0, SEEK_END) != (off_t)mapped)
		goto out;
	result = CUDA_ERROR_MAP_FAILED;
	if (!block_hold(x.key, mapped, x.device))
		goto out;
	r = calloc(1, sizeof *r);
	char *alias = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	char *base = mmap(NULL, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (!r || alias == MAP_FAILED || base == MAP_FAILED)
		abort();
	*r = (struct range){.base = (uint64_t)base, .size = x.size, .mapped = mapped, .alias = alias, .fd = fd, .kind = IMPORTED, .device = x.device, .refs = 1, .ctx = CURRENT, .key = x.key};
	fd = -1;
	pthread_mutex_lock(&table_lock);
	range_insert(r);
	pthread_mutex_unlock(&table_lock);
	add(self->live[LIVE_IMPORT], 1);
	*p = r->base;
	result = CUDA_SUCCESS;
out:
	pthread_mutex_unlock(&opening);
	if (fd >= 0)
		close(fd);
	return result;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr p)
{
	ENTER(true);
	drain(NULL, false);
	pthread_mutex_lock(&table_lock);
	struct range *r = range_from(p);
	CUresult result = r && r->kind == IMPORTED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	bool last = !result && --r->refs == 0;
	if (last)
		range_remove(r);
	pthread_mutex_unlock(&table_lock);
	if (last)
		range_free(r);
	return result;
}

// A memfd has no window: only what begins where the allocation does is told.
CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr p, size_t n, CUmemRangeHandleType t, unsigned long long flags)
{
	ENTER(true);
	struct range r;
	if (!control->dmabuf || flags)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (t != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || p % SMALL || n % SMALL || !n || !range_of(p, &r))
		return CUDA_ERROR_INVALID_VALUE;
	if ((r.kind != DEVICE && r.kind != CHUNK) || r.base != p || n > r.mapped)
		return CUDA_ERROR_INVALID_VALUE;
	int fd = fcntl(r.fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0)
		return CUDA_ERROR_OPERATING_SYSTEM;
	*(int *)out = fd;
	return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget t, CUflushGPUDirectRDMAWritesScope s)
{
	ENTER(true);
	(void)t;
	(void)s;
	return CUDA_SUCCESS;
}

// ---- what an address is

static CUresult attribute(void *v, CUpointer_attribute a, CUdeviceptr p)
{
	struct range r;
	if (!v || !range_of(p, &r))
		return CUDA_ERROR_INVALID_VALUE;
	switch ((int)a) {
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned *)v = is_host(&r) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*(CUdeviceptr *)v = p;
		break;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!is_host(&r))
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)v = (void *)p;
		break;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
		*(unsigned *)v = r.sync;
		break;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
		*(uint64_t *)v = r.id;
		break;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*(unsigned *)v = r.kind == MANAGED;
		break;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*(int *)v = r.device;
		break;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
		*(bool *)v = r.kind == DEVICE;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		*(CUdeviceptr *)v = r.base;
		break;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		*(size_t *)v = r.size;
		break;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*(bool *)v = true;
		break;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
		*(uint64_t *)v = r.kind == CHUNK ? r.handles : 0;
		break;
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
		*(bool *)v = !is_host(&r) && r.kind != MANAGED;
		break;
	default:
		return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *v, CUpointer_attribute a, CUdeviceptr p)
{
	ENTER(false);
	return attribute(v, a, p);
}

CUresult cuPointerGetAttributes(unsigned int n, CUpointer_attribute *a, void **v, CUdeviceptr p)
{
	ENTER(false);
	for (unsigned i = 0; i < n; i++) {
		CUresult r = attribute(v[i], a[i], p);
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void *v, CUpointer_attribute a, CUdeviceptr p)
{
	ENTER(false);
	CUresult result = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table_lock);
	struct range *r = range_at(p, 0);
	if (v && r && !is_host(r) && a == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS) {
		r->sync = *(const unsigned *)v != 0;
		result = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table_lock);
	return result;
}
