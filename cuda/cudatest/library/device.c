// Start, errors, devices, and contexts.
#define _GNU_SOURCE
#include "double.h"

#include <dlfcn.h>
#include <stdio.h>

static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER; // guards primary
static struct CUctx_st *primary[MAX_DEVICES];

CUresult cuInit(unsigned int flags)
{
	ENTER(false);
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!control->devices)
		return CUDA_ERROR_NO_DEVICE;
	put(initialized, true);
	return CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *v)
{
	ENTER(false);
	*v = (int)control->driver;
	return CUDA_SUCCESS;
}

static const struct {
	CUresult code;
	const char *name, *text;
} errors[] = {
	{CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
	{CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
	{CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
	{CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
	{CUDA_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
	{CUDA_ERROR_ECC_UNCORRECTABLE, "CUDA_ERROR_ECC_UNCORRECTABLE", "uncorrectable ECC error encountered"},
	{CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"},
	{CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
	{CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
	{CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
	{CUDA_ERROR_LAUNCH_TIMEOUT, "CUDA_ERROR_LAUNCH_TIMEOUT", "the launch timed out and was terminated"},
	{CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
	{CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
	{CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
	{CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the requested memory range is already mapped"},
	{CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered memory region"},
	{CUDA_ERROR_HARDWARE_STACK_ERROR, "CUDA_ERROR_HARDWARE_STACK_ERROR", "hardware stack error"},
	{CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
	{CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
	{CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
	{CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
	{CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult e, const char **s, bool name)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].code == e) {
			*s = name ? errors[i].name : errors[i].text;
			return CUDA_SUCCESS;
		}
	*s = NULL;
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorName(CUresult e, const char **s) { return describe(e, s, true); }

CUresult cuGetErrorString(CUresult e, const char **s) { return describe(e, s, false); }

// A driver gives the newest form of a call that the asker's version knew: the
// forms here are older than any asker, but for the batch of 13.0.
CUresult cuGetProcAddress_v2(const char *symbol, void **fn, int version, cuuint64_t flags, int *status)
{
	ENTER(false);
	(void)flags;
	*fn = NULL;
	Dl_info here;
	if (dladdr((void *)cuInit, &here)) {
		void *library = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
		int newest = version < 13000 && !strcmp(symbol, "cuMemcpyBatchAsync") ? 1 : 4;
		for (int v = newest; library && v >= 1 && !*fn; v--) {
			char name[128];
			if (v > 1)
				snprintf(name, sizeof name, "%s_v%d", symbol, v);
			else
				snprintf(name, sizeof name, "%s", symbol);
			*fn = dlsym(library, name);
		}
		if (library)
			dlclose(library);
	}
	if (status)
		*status = *fn ? 0 : 1;
	return *fn ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// ---- devices

CUresult cuDeviceGet(CUdevice *d, int ordinal)
{
	ENTER(false);
	NUMBER(ordinal);
	*d = ordinal;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *n)
{
	ENTER(false);
	*n = (int)control->devices;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char *name, int n, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	snprintf(name, (size_t)n, "Emulated GPU %d", d);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *u, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	memset(u, 0, sizeof *u);
	memcpy(u->bytes, "kvferry", 7);
	u->bytes[15] = (char)(d + 1);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int n, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	snprintf(id, (size_t)n, "0000:%02X:00.0", 0xf0 + d);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetByPCIBusId(CUdevice *d, const char *id)
{
	ENTER(false);
	unsigned domain, bus;
	if (sscanf(id, "%x:%x:", &domain, &bus) != 2 || bus < 0xf0 || bus - 0xf0 >= control->devices)
		return CUDA_ERROR_INVALID_DEVICE;
	*d = (int)bus - 0xf0;
	return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem_v2(size_t *n, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	*n = control->memory;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	switch ((int)a) {
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*v = 9;
		break;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		*v = 4;
		break;
	case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
		*v = 32;
		break;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
		*v = 1024;
		break;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
		*v = 3;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		*v = 0xf0 + d;
		break;
	case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID:
		*v = -1;
		break;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
	case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM:
	case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
	case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS:
	case CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED:
		*v = 1;
		break;
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
		*v = (int)control->dmabuf;
		break;
	case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING:
		*v = control->ordered ? CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER : 0;
		break;
	default:
		*v = 0;
	}
	return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice d, CUdevice peer)
{
	ENTER(false);
	NUMBER(d);
	NUMBER(peer);
	*can = d != peer && control->peers;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetP2PAttribute(int *v, CUdevice_P2PAttribute a, CUdevice src, CUdevice dst)
{
	ENTER(false);
	NUMBER(src);
	NUMBER(dst);
	if (src == dst)
		return CUDA_ERROR_INVALID_DEVICE;
	*v = a == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED && control->peers;
	return CUDA_SUCCESS;
}

// ---- contexts

// What was a context stays allocated: whoever still uses it is told that it is
// gone.
struct CUctx_st *context_new(int device, unsigned flags)
{
	struct CUctx_st *c = calloc(1, sizeof *c);
	if (!c)
		abort();
	c->magic = CONTEXT;
	c->device = device;
	c->flags = flags;
	c->null = stream_new(c, CU_STREAM_DEFAULT, 0);
	add(self->live[LIVE_CONTEXT], 1);
	return c;
}

// With a context goes all that was made in it.
static void context_end(struct CUctx_st *c)
{
	drain(c, false);
	c->magic = 0;
	streams_end(c);
	stream_end(c->null);
	memory_end(c);
	add(self->live[LIVE_EVENT], -c->events);
	add(self->live[LIVE_MODULE], -c->modules);
	add(self->live[LIVE_CONTEXT], -1);
}

CUresult cuCtxCreate_v2(CUcontext *c, unsigned int flags, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	if (depth == DEPTH)
		return CUDA_ERROR_INVALID_VALUE;
	*c = context_new(d, flags);
	stack[depth++] = *c;
	return CUDA_SUCCESS;
}

CUresult cuCtxDestroy_v2(CUcontext c)
{
	ENTER(false);
	if (!c || c->magic != CONTEXT || c->primary) // a primary context is released
		return CUDA_ERROR_INVALID_CONTEXT;
	context_end(c);
	if (depth && CURRENT == c)
		depth--;
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	pthread_mutex_lock(&contexts_lock);
	if (!primary[d]) {
		primary[d] = context_new(d, 0);
		primary[d]->primary = true;
	}
	primary[d]->refs++;
	*c = primary[d];
	pthread_mutex_unlock(&contexts_lock);
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice d)
{
	ENTER(false);
	NUMBER(d);
	CUresult r = CUDA_SUCCESS;
	pthread_mutex_lock(&contexts_lock);
	struct CUctx_st *c = primary[d];
	if (!c)
		r = CUDA_ERROR_INVALID_CONTEXT;
	else if (--c->refs == 0) {
		context_end(c);
		primary[d] = NULL;
	}
	pthread_mutex_unlock(&contexts_lock);
	return r;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice d, unsigned int *flags, int *active)
{
	ENTER(false);
	NUMBER(d);
	pthread_mutex_lock(&contexts_lock);
	*flags = 0;
	*active = primary[d] != NULL;
	pthread_mutex_unlock(&contexts_lock);
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice d, unsigned int flags)
{
	ENTER(false);
	NUMBER(d);
	return flags & ~(unsigned)CU_CTX_FLAGS_MASK ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent_v2(CUcontext c)
{
	ENTER(false);
	if (!c || c->magic != CONTEXT)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth == DEPTH)
		return CUDA_ERROR_INVALID_VALUE;
	stack[depth++] = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent_v2(CUcontext *c)
{
	ENTER(false);
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (c)
		*c = stack[depth];
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext c)
{
	ENTER(false);
	if (!c) {
		if (depth)
			depth--;
		return CUDA_SUCCESS;
	}
	if (c->magic != CONTEXT)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!depth)
		depth++;
	CURRENT = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *c)
{
	ENTER(false);
	*c = depth ? CURRENT : NULL;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *d)
{
	ENTER(true);
	*d = CURRENT->device;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags)
{
	ENTER(true);
	*flags = CURRENT->flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext c, unsigned int *v)
{
	ENTER(false);
	(void)c;
	*v = 3020;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	ENTER(true);
	*least = 0;
	*greatest = -5;
	return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize(void)
{
	ENTER(true);
	drain(CURRENT, false);
	return get(CURRENT->sticky);
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	ENTER(true);
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!peer || peer->magic != CONTEXT || peer->device == CURRENT->device)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!control->peers)
		return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
	unsigned bit = 1u << peer->device;
	return __atomic_fetch_or(&CURRENT->peers, bit, __ATOMIC_SEQ_CST) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
	ENTER(true);
	if (!peer || peer->magic != CONTEXT)
		return CUDA_ERROR_INVALID_CONTEXT;
	unsigned bit = 1u << peer->device;
	return __atomic_fetch_and(&CURRENT->peers, ~bit, __ATOMIC_SEQ_CST) & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}
