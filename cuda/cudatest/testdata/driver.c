// Uses the emulated driver as a program would. Without arguments it goes through
// all that one process can see, and ends with status 0 and no output. The other
// roles are parts of tests between processes: what they say is a line, and they
// wait for a line before they go on.
#define _GNU_SOURCE
#include <cuda.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define WANT(code, call)                                                       \
	do {                                                                   \
		int got_ = (int)(call);                                        \
		if (got_ != (code)) {                                          \
			fprintf(stderr, "line %d: %s is %d, want %d\n", __LINE__, #call, got_, (int)(code)); \
			exit(1);                                               \
		}                                                              \
	} while (0)
#define OK(call) WANT(CUDA_SUCCESS, call)
#define CHECK(ok) WANT(true, !!(ok))

enum { MIB = 1 << 20, BIG = 4 * MIB };

static CUcontext context(int device)
{
	CUcontext c;
	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&c, device));
	OK(cuCtxSetCurrent(c));
	return c;
}

static void *mapped(size_t n)
{
	void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(p != MAP_FAILED);
	return p;
}

static bool holds(CUdeviceptr p, int byte, size_t n)
{
	unsigned char *b = malloc(n);
	OK(cuMemcpyDtoH(b, p, n));
	bool ok = true;
	for (size_t i = 0; i < n; i++)
		ok = ok && b[i] == (unsigned char)byte;
	free(b);
	return ok;
}

// ---- one process

static sigjmp_buf fault;
static void faulted(int n)
{
	(void)n;
	siglongjmp(fault, 1);
}

static void addresses(void)
{
	CUdeviceptr p, base;
	size_t n;
	OK(cuMemAlloc(&p, 3 * MIB + 5));
	CHECK(p % (2 * MIB) == 0);
	OK(cuMemGetAddressRange(&base, &n, p + 77));
	CHECK(base == p && n == 3 * MIB + 5);
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&p, 0));
	p = base;
	// Whoever follows an address faults.
	struct sigaction old, act = {.sa_handler = faulted};
	sigaction(SIGSEGV, &act, &old);
	volatile bool read = false;
	if (!sigsetjmp(fault, 1)) {
		(void)*(volatile char *)p;
		read = true;
	}
	sigaction(SIGSEGV, &old, NULL);
	CHECK(!read);
	char *host = mapped(BIG);
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(p + 3 * MIB, host, 6));
	OK(cuMemcpyHtoD(p + 3 * MIB, host, 5));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, p - 1, 2));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD((CUdeviceptr)host, host + 100, 6));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(p + 3 * MIB, 1, 6));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p + 2 * MIB));
	size_t left, total;
	OK(cuMemGetInfo(&left, &total));
	CHECK(total == 64 * MIB && left == 60 * MIB);
	CUdeviceptr q;
	WANT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&q, 61 * MIB));
	WANT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&q, SIZE_MAX - 5));
	OK(cuMemAlloc(&q, 60 * MIB));
	OK(cuMemFree(q));
	OK(cuMemFree(p));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH(host, p, 1));
	munmap(host, BIG);
}

static void *elsewhere(void *arg)
{
	CUdeviceptr p;
	CUcontext c = arg, got;
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc(&p, 5));
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
	OK(cuCtxPushCurrent(c));
	OK(cuMemAlloc(&p, 5));
	OK(cuMemFree(p));
	OK(cuCtxPopCurrent(&got));
	CHECK(got == c);
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuCtxPopCurrent(&got));
	return NULL;
}

static void contexts(CUcontext c)
{
	CUcontext own, got;
	CUstream s;
	CUdevice d;
	pthread_t t;
	pthread_create(&t, NULL, elsewhere, c);
	pthread_join(t, NULL);
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuCtxDestroy(c)); // it is primary
	OK(cuCtxCreate(&own, 0, 0));
	OK(cuCtxGetCurrent(&got));
	CHECK(got == own);
	WANT(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(s)); // of another context
	OK(cuCtxDestroy(own));
	OK(cuCtxGetCurrent(&got));
	CHECK(got == c);
	OK(cuCtxGetDevice(&d));
	CHECK(d == 0);
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent(own));
	OK(cuStreamDestroy(s));
	WANT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&d, 7));
	const char *name;
	OK(cuGetErrorName(CUDA_ERROR_ILLEGAL_ADDRESS, &name));
	CHECK(!strcmp(name, "CUDA_ERROR_ILLEGAL_ADDRESS"));
	WANT(CUDA_ERROR_INVALID_VALUE, cuGetErrorName(12345, &name));
	CUgraph g;
	WANT(CUDA_ERROR_NOT_SUPPORTED, cuGraphCreate(&g, 0));
}

static volatile int order;
static volatile bool gate = true; // what is first passes while it is open
static void first(void *arg)
{
	while (!gate)
		usleep(1000);
	usleep(20000);
	*(int *)arg = ++order;
}
static void next(void *arg) { *(int *)arg = ++order; }

static void streams(void)
{
	CUstream a, b, blocking;
	CUevent e, f;
	CUdeviceptr p;
	int x = 0, y = 0;
	float ms;
	OK(cuStreamCreate(&a, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreateWithPriority(&b, CU_STREAM_NON_BLOCKING, -9));
	OK(cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
	OK(cuEventCreate(&e, 0));
	OK(cuEventCreate(&f, 0));
	OK(cuEventQuery(e)); // never recorded: reached
	gate = false;
	OK(cuLaunchHostFunc(a, first, &x));
	OK(cuEventRecord(e, a));
	OK(cuStreamWaitEvent(b, e, 0));
	OK(cuLaunchHostFunc(b, next, &y));
	OK(cuEventRecord(f, b));
	WANT(CUDA_ERROR_NOT_READY, cuStreamQuery(b));
	WANT(CUDA_ERROR_NOT_READY, cuEventQuery(f));
	gate = true;
	OK(cuEventSynchronize(f));
	CHECK(x == 1 && y == 2);
	OK(cuEventElapsedTime(&ms, e, f));
	CHECK(ms >= 0);
	int priority;
	OK(cuStreamGetPriority(b, &priority));
	CHECK(priority == -5);
	// The default stream waits for a blocking stream.
	x = order = 0;
	OK(cuMemAlloc(&p, 64));
	OK(cuLaunchHostFunc(blocking, first, &x));
	OK(cuMemsetD8(p, 1, 64));
	CHECK(x == 1);
	// What was started ends behind the end of its stream and of its event.
	x = order = 0;
	gate = false;
	OK(cuLaunchHostFunc(a, first, &x));
	OK(cuEventRecord(e, a));
	OK(cuEventDestroy(e));
	OK(cuStreamDestroy(a));
	CHECK(x == 0);
	WANT(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy(NULL));
	gate = true;
	OK(cuMemFree(p)); // waits for all
	CHECK(x == 1);
	OK(cuEventDestroy(f));
	OK(cuStreamDestroy(b));
	OK(cuStreamDestroy(blocking));
}

static void host_memory(void)
{
	char *a = mapped(BIG), *h;
	unsigned flags;
	CUdeviceptr p, d;
	CUstream s;
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	OK(cuMemAlloc(&d, BIG));
	OK(cuMemHostRegister(a, 2 * MIB, 0));
	WANT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(a, 2 * MIB, 0));
	WANT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(a + MIB, 2 * MIB, 0));
	OK(cuMemHostRegister(a + 2 * MIB, 2 * MIB, 0));
	OK(cuMemHostGetDevicePointer(&p, a + 5, 0));
	CHECK(p == (CUdeviceptr)a + 5);
	OK(cuMemHostGetFlags(&flags, a));
	// No copy spans two registrations, or one and what is not.
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoDAsync(d, a + MIB, 2 * MIB, s));
	OK(cuMemHostUnregister(a + 2 * MIB));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoDAsync(d, a + MIB, 2 * MIB, s));
	WANT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(a + 2 * MIB));
	OK(cuMemHostUnregister(a));
	// Memory that is not pinned is copied within the call.
	memset(a, 7, BIG);
	OK(cuMemcpyHtoDAsync(d, a, BIG, s));
	memset(a, 8, BIG);
	CHECK(holds(d, 7, BIG));
	OK(cuMemHostAlloc((void **)&h, MIB, 0));
	memset(h, 9, MIB);
	OK(cuMemcpyHtoDAsync(d, h, MIB, s));
	OK(cuStreamSynchronize(s));
	CHECK(holds(d, 9, MIB) && holds(d + MIB, 7, MIB));
	OK(cuMemFreeHost(h));
	munmap(a, BIG);
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemHostRegister(a, BIG, 0)); // it is not mapped
	OK(cuMemFree(d));
	OK(cuStreamDestroy(s));
}

static void batches(void)
{
	enum { N = 64, SIZE = 16 << 10 };
	CUdeviceptr d, dst[N], src[N];
	size_t sizes[N], from[N] = {0}, failed;
	CUstream s;
	char *h;
	CUmemcpyAttributes a[2] = {{.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM}, {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_ANY}};
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	OK(cuMemAlloc(&d, N * SIZE));
	OK(cuMemHostAlloc((void **)&h, N * SIZE, 0));
	for (int i = 0; i < N; i++) {
		memset(h + i * SIZE, i, SIZE);
		dst[i] = d + (size_t)(N - 1 - i) * SIZE;
		src[i] = (CUdeviceptr)h + (size_t)i * SIZE;
		sizes[i] = SIZE;
	}
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyBatchAsync(dst, src, sizes, N, a, from, 1, &failed, NULL));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyBatchAsync(dst, src, sizes, N, a, from, 2, &failed, s)); // from is not rising
	OK(cuMemcpyBatchAsync(dst, src, sizes, N, a, from, 1, &failed, s));
	OK(cuStreamSynchronize(s));
	for (int i = 0; i < N; i++)
		CHECK(holds(dst[i], i, SIZE));
	// One that is refused is named, and nothing was copied.
	memset(h, 77, N * SIZE);
	src[9] = (CUdeviceptr)h + N * SIZE - 5;
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemcpyBatchAsync(dst, src, sizes, N, a, from, 1, &failed, s));
	CHECK(failed == 9);
	OK(cuStreamSynchronize(s));
	CHECK(holds(dst[3], 3, SIZE));
	// A device's bytes that may be read in any order are read too early.
	int x;
	dst[0] = (CUdeviceptr)h;
	src[0] = d;
	gate = false;
	OK(cuLaunchHostFunc(s, first, &x));
	OK(cuMemsetD8Async(d, 5, SIZE, s));
	OK(cuMemcpyBatchAsync_v2(dst, src, sizes, 1, a + 1, from, 1, s));
	gate = true;
	OK(cuStreamSynchronize(s));
	CHECK(h[0] == N - 1 && h[SIZE - 1] == N - 1 && holds(d, 5, SIZE));
	OK(cuMemcpyBatchAsync_v2(dst, src, sizes, 1, a, from, 1, s));
	OK(cuStreamSynchronize(s));
	CHECK(h[0] == 5);
	OK(cuMemFreeHost(h));
	OK(cuMemFree(d));
	OK(cuStreamDestroy(s));
}

static void kernels(void)
{
	const char *ptx = ".version 7.0\n.target sm_80\n.visible .entry kv_copy_list(.param .u64 l, .param .u32 n) { ret; }\n.visible .entry other() { ret; }\n";
	CUmodule m;
	CUfunction f, g;
	CUdeviceptr p, q;
	WANT(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&m, "no module"));
	OK(cuModuleLoadData(&m, ptx));
	WANT(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&f, m, "none"));
	OK(cuModuleGetFunction(&f, m, "kv_copy_list"));
	OK(cuModuleGetFunction(&g, m, "other"));
	OK(cuMemAlloc(&p, MIB));
	OK(cuMemAlloc(&q, MIB));
	OK(cuMemsetD8(p, 3, MIB));
	OK(cuMemsetD8(q, 4, MIB));
	uint64_t list[6] = {p, q, 4096, p + 8192, q + 8192, 16};
	OK(cuMemcpyHtoD(p + 65536, list, sizeof list));
	CUdeviceptr at = p + 65536;
	unsigned n = 2;
	void *params[2] = {&at, &n};
	WANT(CUDA_ERROR_INVALID_VALUE, cuLaunchKernel(f, 1, 1, 1, 2048, 1, 1, 0, NULL, params, NULL));
	WANT(CUDA_ERROR_NOT_SUPPORTED, cuLaunchKernel(g, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
	OK(cuLaunchKernel(f, 8, 1, 1, 512, 1, 1, 0, NULL, params, NULL));
	OK(cuCtxSynchronize());
	CHECK(holds(q, 3, 4096) && holds(q + 4096, 4, 4096) && holds(q + 8192, 3, 16) && holds(q + 8208, 4, 100));
	OK(cuModuleUnload(m));
	OK(cuMemFree(p));
	OK(cuMemFree(q));
}

static void attributes(void)
{
	CUdeviceptr p;
	CUpointer_attribute which[2] = {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_RANGE_SIZE};
	CUdeviceptr base;
	size_t size;
	void *values[2] = {&base, &size};
	uint64_t types = 9;
	unsigned sync = 1, type;
	bool legacy = false;
	int v;
	OK(cuMemAlloc(&p, MIB));
	OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, p + 9));
	CHECK(type == CU_MEMORYTYPE_DEVICE);
	OK(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
	OK(cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, p));
	CHECK(legacy && types == 0);
	OK(cuPointerGetAttributes(2, which, values, p + 5));
	CHECK(base == p && size == MIB);
	OK(cuPointerSetAttribute(&sync, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
	sync = 0;
	OK(cuPointerGetAttribute(&sync, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, p));
	CHECK(sync == 1);
	OK(cuDeviceGetAttribute(&v, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, 0));
	CHECK(v == CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER);
	OK(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
	WANT(CUDA_ERROR_INVALID_VALUE, cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4096));
	// A dma-buf is the allocation, from its base.
	int fd = -1;
	OK(cuDeviceGetAttribute(&v, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 0));
	CHECK(v == 1);
	OK(cuMemGetHandleForAddressRange(&fd, p, MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&v, p + 4096, 4096, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemGetHandleForAddressRange(&v, p, 100, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	WANT(CUDA_ERROR_NOT_SUPPORTED, cuMemGetHandleForAddressRange(&v, p, MIB, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE));
	char *b = mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	CHECK(b != MAP_FAILED);
	memset(b, 11, MIB);
	CHECK(holds(p, 11, MIB));
	munmap(b, MIB);
	close(fd);
	// This process's own handle opens nothing in it.
	CUipcMemHandle h;
	CUdeviceptr q;
	OK(cuIpcGetMemHandle(&h, p + 100));
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuIpcOpenMemHandle(&q, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	memset(&h, 0, sizeof h);
	WANT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle(&q, h, 0));
	OK(cuMemFree(p));
}

static void virtual_memory(void)
{
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
	CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
	CUmemGenericAllocationHandle h[2], again;
	CUdeviceptr p;
	size_t g;
	uint64_t types;
	OK(cuMemGetAllocationGranularity(&g, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	CHECK(g == 2 * MIB);
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&again, g + 4096, &prop, 0));
	OK(cuMemAddressReserve(&p, 3 * g, 0, 0, 0));
	for (int i = 0; i < 2; i++) {
		OK(cuMemCreate(&h[i], g, &prop, 0));
		OK(cuMemMap(p + i * g, g, 0, h[i], 0));
	}
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemMap(p, g, 0, h[1], 0));         // something is there
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemMap(p + 3 * g, g, 0, h[1], 0)); // nothing was reserved
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(p, 1, 10));               // nobody may yet
	OK(cuMemSetAccess(p, 2 * g, &access, 1));
	// Chunks side by side are one stretch for copies, and one each for a handle.
	OK(cuMemsetD8(p, 6, 2 * g));
	CHECK(holds(p + g - 100, 6, 200));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(p, 6, 2 * g + 1));
	CUdeviceptr base;
	OK(cuMemGetAddressRange(&base, &g, p + g + 7));
	CHECK(base == p + g && g == 2 * MIB);
	CUipcMemHandle legacy;
	WANT(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&legacy, p));
	OK(cuPointerGetAttribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, p));
	CHECK(types == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
	// The descriptor brings the same bytes, here too.
	int fd;
	OK(cuMemRetainAllocationHandle(&again, (void *)(p + g + 5)));
	OK(cuMemExportToShareableHandle(&fd, again, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
	OK(cuMemRelease(again));
	OK(cuMemImportFromShareableHandle(&again, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	close(fd);
	OK(cuMemMap(p + 2 * g, g, 0, again, 0));
	OK(cuMemSetAccess(p + 2 * g, g, &access, 1));
	OK(cuMemsetD8(p + 2 * g, 5, g));
	CHECK(holds(p + g, 5, g) && holds(p, 6, g));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemImportFromShareableHandle(&again, (void *)(intptr_t)0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
	OK(cuMemRelease(again));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(p, 3 * g)); // it is mapped
	OK(cuMemUnmap(p, 3 * g));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(p, g));
	for (int i = 0; i < 2; i++)
		OK(cuMemRelease(h[i]));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemRelease(h[0]));
	OK(cuMemAddressFree(p, 3 * g));
}

static void all(void)
{
	CUdevice d;
	WANT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGet(&d, 0));
	WANT(CUDA_ERROR_INVALID_VALUE, cuInit(1));
	CUcontext c = context(0);
	addresses();
	contexts(c);
	streams();
	host_memory();
	batches();
	kernels();
	attributes();
	virtual_memory();
	CUdeviceptr p;
	CUstream s;
	CUevent e;
	CUmodule m;
	OK(cuMemAlloc(&p, MIB)); // which nobody frees
	OK(cuStreamCreate(&s, 0));
	OK(cuEventCreate(&e, 0));
	OK(cuModuleLoadData(&m, ".version 7.0\n.target sm_80\n"));
	OK(cuMemHostRegister(mapped(MIB), MIB, 0));
	OK(cuMemHostAlloc((void **)&p, MIB, 0));
	OK(cuDevicePrimaryCtxRelease(0));
	WANT(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuCtxSynchronize());
	WANT(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(0));
}

// ---- two processes

static void say(const char *what)
{
	printf("%s\n", what);
	fflush(stdout);
}

static void listen_for(const char *what)
{
	char line[256];
	CHECK(fgets(line, sizeof line, stdin) != NULL);
	line[strcspn(line, "\n")] = 0;
	CHECK(!strcmp(line, what));
}

static void print_hex(const void *p, size_t n)
{
	for (size_t i = 0; i < n; i++)
		printf("%02x", ((const unsigned char *)p)[i]);
	printf("\n");
	fflush(stdout);
}

static void read_hex(void *p, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		unsigned x;
		CHECK(scanf("%2x", &x) == 1);
		((unsigned char *)p)[i] = (unsigned char)x;
	}
	getchar();
}

// Exports memory and an event, changes it when it is told to, and frees it.
static void owner(void)
{
	CUdeviceptr p;
	CUipcMemHandle h;
	CUipcEventHandle eh;
	CUevent e;
	context(0);
	OK(cuMemAlloc(&p, BIG));
	OK(cuMemsetD8(p, 1, BIG));
	OK(cuEventCreate(&e, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
	OK(cuIpcGetMemHandle(&h, p));
	OK(cuIpcGetEventHandle(&eh, e));
	print_hex(&h, sizeof h);
	print_hex(&eh, sizeof eh);
	listen_for("change");
	CUstream s;
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	int x;
	OK(cuLaunchHostFunc(s, first, &x));
	OK(cuMemsetD8Async(p, 2, BIG, s));
	OK(cuEventRecord(e, s));
	say("changed");
	listen_for("free");
	OK(cuMemFree(p));
	say("freed");
	listen_for("end");
}

// Imports what the owner has exported.
static void importer(void)
{
	CUdeviceptr p, q;
	CUipcMemHandle h;
	CUipcEventHandle eh;
	CUevent e;
	context(0);
	read_hex(&h, sizeof h);
	read_hex(&eh, sizeof eh);
	OK(cuIpcOpenMemHandle(&p, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuIpcOpenMemHandle(&q, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	CHECK(p == q);
	OK(cuIpcOpenEventHandle(&e, eh));
	CHECK(holds(p, 1, BIG));
	bool legacy = true;
	OK(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, p));
	CHECK(!legacy);
	CUipcMemHandle own;
	WANT(CUDA_ERROR_INVALID_VALUE, cuIpcGetMemHandle(&own, p));
	WANT(CUDA_ERROR_INVALID_VALUE, cuMemFree(p));
	say("opened");
	listen_for("wait"); // the owner has recorded the event
	OK(cuEventSynchronize(e));
	CHECK(holds(p, 2, BIG));
	say("waited");
	listen_for("hold"); // the owner has freed it, or is dead
	CHECK(holds(p, 2, BIG));
	OK(cuIpcCloseMemHandle(p));
	CHECK(holds(p, 2, BIG)); // it was opened twice
	say("held");
	listen_for("close");
	OK(cuIpcCloseMemHandle(p));
	WANT(CUDA_ERROR_INVALID_VALUE, cuIpcCloseMemHandle(p));
	WANT(CUDA_ERROR_INVALID_VALUE, cuIpcOpenMemHandle(&q, h, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuEventDestroy(e));
	say("closed");
	listen_for("end");
}

// Takes as much of everything as it can, and stays.
static void heap(void)
{
	context(0);
	for (int i = 0; i < 10; i++) {
		CUdeviceptr p;
		CUstream s;
		CUevent e;
		OK(cuMemAlloc(&p, MIB));
		OK(cuStreamCreate(&s, 0));
		OK(cuEventCreate(&e, 0));
		OK(cuMemHostRegister(mapped(MIB), MIB, 0));
	}
	say("ready");
	listen_for("end");
}

// Asks another device for what it may.
static void peers(void)
{
	CUcontext a = context(0), b;
	CUdeviceptr p, q;
	CUstream s;
	int can;
	OK(cuDevicePrimaryCtxRetain(&b, 1));
	OK(cuDeviceCanAccessPeer(&can, 0, 1));
	printf("%d ", can);
	printf("%d ", (int)cuCtxEnablePeerAccess(b, 0));
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	OK(cuMemAlloc(&p, MIB));
	OK(cuMemsetD8(p, 1, MIB));
	OK(cuCtxSetCurrent(b));
	OK(cuMemAlloc(&q, MIB));
	WANT(CUDA_ERROR_INVALID_HANDLE, cuMemcpyPeerAsync(q, b, p, a, MIB, s)); // of the other context
	OK(cuCtxSetCurrent(a));
	OK(cuMemcpyPeerAsync(q, b, p, a, MIB, s));
	OK(cuStreamSynchronize(s));
	CHECK(holds(q, 1, MIB));
	// A kernel reaches it only as a peer.
	CUmodule m;
	CUfunction f;
	OK(cuModuleLoadData(&m, ".version 7.0 .target sm_80 .visible .entry kv_copy_list(.param .u64 l, .param .u32 n)"));
	OK(cuModuleGetFunction(&f, m, "kv_copy_list"));
	uint64_t list[3] = {q, p, 4096};
	unsigned n = 1;
	OK(cuMemcpyHtoD(p + 65536, list, sizeof list));
	CUdeviceptr at = p + 65536;
	void *params[2] = {&at, &n};
	OK(cuLaunchKernel(f, 1, 1, 1, 32, 1, 1, 0, s, params, NULL));
	printf("%d\n", (int)cuStreamSynchronize(s));
}

// Copies in a loop, and says what becomes of it.
static void copies(int rounds)
{
	CUstream s;
	CUdeviceptr p;
	char *h;
	CUresult r = CUDA_SUCCESS;
	context(0);
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	OK(cuMemAlloc(&p, MIB));
	OK(cuMemHostAlloc((void **)&h, MIB, 0));
	memset(h, 0, MIB);
	say("ready");
	listen_for("go");
	int wrong = 0, i = 0;
	for (; i < rounds && !r; i++) {
		memset(h, i, MIB);
		r = cuMemcpyHtoDAsync(p, h, MIB, s);
		if (!r)
			r = cuStreamSynchronize(s);
		memset(h, 0, MIB);
		if (!r)
			r = cuMemcpyDtoHAsync(h, p, MIB, s);
		if (!r)
			r = cuStreamSynchronize(s);
		for (int k = 0; !r && k < MIB; k++)
			wrong += h[k] != (char)i;
	}
	printf("%d rounds, %d bytes wrong, result %d, %d\n", i, wrong, (int)r, (int)cuMemAlloc(&p, MIB));
	fflush(stdout);
}

int main(int argc, char **argv)
{
	const char *role = argc > 1 ? argv[1] : "";
	if (!*role)
		all();
	else if (!strcmp(role, "owner"))
		owner();
	else if (!strcmp(role, "importer"))
		importer();
	else if (!strcmp(role, "heap"))
		heap();
	else if (!strcmp(role, "peers"))
		peers();
	else if (!strcmp(role, "copies"))
		copies(argc > 2 ? atoi(argv[2]) : 4);
	else if (!strcmp(role, "init")) {
		int version = 0;
		int r = (int)cuInit(0);
		OK(cuDriverGetVersion(&version));
		printf("%d %d\n", r, version);
	} else
		return 2;
	return 0;
}
