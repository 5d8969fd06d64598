// Memory: of devices, of the host, and virtual addresses.
#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct reservation *reservations; // under table_lock
static struct physical *physicals[8192]; // under table_lock

// Addresses that nobody can read, on a border of 2 MiB; 0 if there are none.
static uint64_t reserve(size_t n)
{
	char *p = mmap(NULL, n + LARGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return 0;
	char *at = (char *)rounded((uintptr_t)p, LARGE);
	if (at > p)
		munmap(p, (size_t)(at - p));
	munmap(at + n, (size_t)(p + LARGE - at));
	return (uint64_t)at;
}

// New memory holds what others have left in it.
static void soil(char *p, size_t n)
{
	enum { SOILED = 64 << 10 };
	size_t k = n < SOILED ? n : SOILED;
	memset(p, 0xa5, k);
	memset(p + n - k, 0xa5, k);
}

// Ends what is in no table any more.
void range_free(struct range *r)
{
	static const int kinds[] = {[DEVICE] = LIVE_ALLOCATION, [MANAGED] = LIVE_ALLOCATION, [IMPORTED] = LIVE_IMPORT, [ALLOCATED] = LIVE_HOST, [REGISTERED] = LIVE_REGISTRATION};
	add(self->live[kinds[r->kind]], -1);
	if (r->key)
		block_drop(r->key);
	if (r->kind != REGISTERED) { // that is the caller's
		munmap(r->alias, r->mapped);
		if ((uint64_t)r->alias != r->base)
			munmap((void *)r->base, r->mapped);
	}
	if (r->fd >= 0)
		close(r->fd);
	free(r);
}

// Ends all memory that was made, opened, or registered in a context.
void memory_end(struct CUctx_st *c)
{
	for (struct range *r = NULL;;) {
		pthread_mutex_lock(&table_lock);
		r = range_in(c);
		if (r)
			range_remove(r);
		pthread_mutex_unlock(&table_lock);
		if (!r)
			return;
		range_free(r);
	}
}

static CUresult allocate(CUdeviceptr *p, size_t n, int kind)
{
	if (!n || !p)
		return CUDA_ERROR_INVALID_VALUE;
	int device = CURRENT->device;
	struct range *r = calloc(1, sizeof *r);
	if (!r || n > control->memory)
		goto full;
	r->size = n;
	r->mapped = rounded(n, LARGE);
	r->kind = kind;
	r->device = device;
	r->ctx = CURRENT;
	r->key = random_key();
	if (!block_new(r->key, r->mapped, device))
		goto full;
	r->fd = memory_file(r->key, device, r->mapped);
	r->alias = r->fd < 0 ? MAP_FAILED : mmap(NULL, r->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, r->fd, 0);
	r->base = r->alias == MAP_FAILED ? 0 : kind == MANAGED ? (uint64_t)r->alias : reserve(r->mapped);
	if (!r->base) {
		block_drop(r->key);
		if (r->alias != MAP_FAILED)
			munmap(r->alias, r->mapped);
		if (r->fd >= 0)
			close(r->fd);
		goto full;
	}
	soil(r->alias, n);
	pthread_mutex_lock(&table_lock);
	range_insert(r);
	*p = r->base;
	pthread_mutex_unlock(&table_lock);
	add(self->live[LIVE_ALLOCATION], 1);
	return CUDA_SUCCESS;
full:
	free(r);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAlloc_v2(CUdeviceptr *p, size_t n)
{
	ENTER(true);
	return allocate(p, n, DEVICE);
}

CUresult cuMemAllocManaged(CUdeviceptr *p, size_t n, unsigned int flags)
{
	ENTER(true);
	(void)flags;
	return allocate(p, n, MANAGED);
}

// Takes a range out of the table, once nothing runs any more.
static struct range *take(uint64_t base, unsigned kinds)
{
	drain(NULL, false);
	pthread_mutex_lock(&table_lock);
	struct range *r = range_from(base);
	if (r && kinds & 1u << r->kind)
		range_remove(r);
	else
		r = NULL;
	pthread_mutex_unlock(&table_lock);
	return r;
}

CUresult cuMemFree_v2(CUdeviceptr p)
{
	ENTER(true);
	if (!p)
		return CUDA_SUCCESS;
	struct range *r = take(p, 1u << DEVICE | 1u << MANAGED);
	if (!r)
		return CUDA_ERROR_INVALID_VALUE;
	range_free(r);
	return CUDA_SUCCESS;
}

CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
	ENTER(true);
	size_t n = memory_used(CURRENT->device);
	*total = control->memory;
	*free = n < control->memory ? control->memory - n : 0;
	return CUDA_SUCCESS;
}

// Of virtual memory it is the chunk that the address lies in.
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *n, CUdeviceptr p)
{
	ENTER(true);
	struct range r;
	if (!range_of(p, &r) || r.kind == REGISTERED)
		return CUDA_ERROR_NOT_FOUND;
	if (base)
		*base = r.base;
	if (n)
		*n = r.size;
	return CUDA_SUCCESS;
}

// ---- memory of the host

static CUresult host(void **p, size_t n)
{
	if (!n)
		return CUDA_ERROR_INVALID_VALUE;
	struct range *r = calloc(1, sizeof *r);
	size_t mapped = rounded(n, SMALL);
	char *a = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!r || a == MAP_FAILED) {
		free(r);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*r = (struct range){.base = (uint64_t)a, .alias = a, .size = n, .mapped = mapped, .fd = -1, .kind = ALLOCATED, .ctx = CURRENT};
	pthread_mutex_lock(&table_lock);
	range_insert(r);
	pthread_mutex_unlock(&table_lock);
	add(self->live[LIVE_HOST], 1);
	*p = a;
	return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void **p, size_t n, unsigned int flags)
{
	ENTER(true);
	(void)flags;
	return host(p, n);
}

CUresult cuMemAllocHost_v2(void **p, size_t n)
{
	ENTER(true);
	return host(p, n);
}

CUresult cuMemFreeHost(void *p)
{
	ENTER(true);
	struct range *r = take((uint64_t)p, 1u << ALLOCATED);
	if (!r)
		return CUDA_ERROR_INVALID_VALUE;
	range_free(r);
	return CUDA_SUCCESS;
}

static bool is_mapped(uint64_t p, size_t n)
{
	enum { PAGES = 4096 };
	unsigned char present[PAGES];
	uint64_t at = p / SMALL * SMALL, end = rounded(p + n, SMALL);
	for (; at < end; at += (uint64_t)PAGES * SMALL) {
		size_t k = end - at < (uint64_t)PAGES * SMALL ? end - at : (uint64_t)PAGES * SMALL;
		if (mincore((void *)at, k, present))
			return false;
	}
	return true;
}

CUresult cuMemHostRegister_v2(void *p, size_t n, unsigned int flags)
{
	ENTER(true);
	(void)flags;
	if (!p || !n || !is_mapped((uint64_t)p, n))
		return CUDA_ERROR_INVALID_VALUE;
	struct range *r = calloc(1, sizeof *r);
	if (!r)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*r = (struct range){.base = (uint64_t)p, .alias = p, .size = n, .fd = -1, .kind = REGISTERED, .ctx = CURRENT};
	pthread_mutex_lock(&table_lock);
	bool twice = range_overlaps((uint64_t)p, n);
	if (!twice)
		range_insert(r);
	pthread_mutex_unlock(&table_lock);
	if (twice) {
		free(r);
		return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	}
	add(self->live[LIVE_REGISTRATION], 1);
	return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void *p)
{
	ENTER(true);
	struct range *r = take((uint64_t)p, 1u << REGISTERED);
	if (!r)
		return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	range_free(r);
	return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *d, void *p, unsigned int flags)
{
	ENTER(true);
	struct range r;
	if (flags || !range_of((uint64_t)p, &r) || !is_host(&r))
		return CUDA_ERROR_INVALID_VALUE;
	*d = (CUdeviceptr)p;
	return CUDA_SUCCESS;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *p)
{
	ENTER(true);
	struct range r;
	if (!range_of((uint64_t)p, &r) || !is_host(&r))
		return CUDA_ERROR_INVALID_VALUE;
	*flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
	return CUDA_SUCCESS;
}

// ---- virtual memory

CUresult cuMemGetAllocationGranularity(size_t *g, const CUmemAllocationProp *p, CUmemAllocationGranularity_flags f)
{
	ENTER(false);
	(void)f;
	if (!p)
		return CUDA_ERROR_INVALID_VALUE;
	NUMBER(p->location.id);
	*g = LARGE;
	return CUDA_SUCCESS;
}

static struct physical *physical_of(CUmemGenericAllocationHandle h) // under table_lock
{
	struct physical *p = (struct physical *)h;
	for (size_t i = 0; i < sizeof physicals / sizeof *physicals; i++)
		if (p && physicals[i] == p)
			return p;
	return NULL;
}

static bool physical_add(struct physical *p) // under table_lock
{
	for (size_t i = 0; i < sizeof physicals / sizeof *physicals; i++)
		if (!physicals[i]) {
			physicals[i] = p;
			add(self->live[LIVE_CHUNK], 1);
			return true;
		}
	return false;
}

static void physical_put(struct physical *p) // under table_lock
{
	if (--p->refs)
		return;
	for (size_t i = 0; i < sizeof physicals / sizeof *physicals; i++)
		if (physicals[i] == p)
			physicals[i] = NULL;
	close(p->fd);
	block_drop(p->key);
	free(p);
	add(self->live[LIVE_CHUNK], -1);
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *h, size_t n, const CUmemAllocationProp *prop, unsigned long long flags)
{
	ENTER(false);
	if (flags || !n || n % LARGE || !prop || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	NUMBER(prop->location.id);
	struct physical *p = calloc(1, sizeof *p);
	if (!p)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*p = (struct physical){.fd = -1, .refs = 1, .handles = 1, .size = n, .key = random_key(), .prop = *prop};
	if (block_new(p->key, n, prop->location.id)) {
		p->fd = memory_file(p->key, prop->location.id, n);
		pthread_mutex_lock(&table_lock);
		bool ok = p->fd >= 0 && physical_add(p);
		pthread_mutex_unlock(&table_lock);
		if (ok) {
			*h = (CUmemGenericAllocationHandle)p;
			return CUDA_SUCCESS;
		}
		if (p->fd >= 0)
			close(p->fd);
		block_drop(p->key);
	}
	free(p);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle h)
{
	ENTER(false);
	CUresult r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table_lock);
	struct physical *p = physical_of(h);
	if (p && p->handles) {
		p->handles--;
		physical_put(p);
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table_lock);
	return r;
}

CUresult cuMemAddressReserve(CUdeviceptr *p, size_t n, size_t align, CUdeviceptr hint, unsigned long long flags)
{
	ENTER(false);
	(void)hint;
	if (flags || !n || n % LARGE || align & (align - 1) || align > LARGE)
		return CUDA_ERROR_INVALID_VALUE;
	struct reservation *v = calloc(1, sizeof *v);
	uint64_t base = reserve(n), alias = reserve(n);
	if (!v || !base || !alias) {
		if (base)
			munmap((void *)base, n);
		if (alias)
			munmap((void *)alias, n);
		free(v);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&table_lock);
	*v = (struct reservation){.base = base, .size = n, .alias = (char *)alias, .next = reservations};
	reservations = v;
	pthread_mutex_unlock(&table_lock);
	add(self->live[LIVE_RESERVATION], 1);
	*p = base;
	return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr p, size_t n)
{
	ENTER(false);
	pthread_mutex_lock(&table_lock);
	struct reservation **at = &reservations, *v = NULL;
	while (*at && (*at)->base != p)
		at = &(*at)->next;
	if (*at && (*at)->size == n && !(*at)->mappings) {
		v = *at;
		*at = v->next;
	}
	pthread_mutex_unlock(&table_lock);
	if (!v)
		return CUDA_ERROR_INVALID_VALUE;
	munmap((void *)v->base, n);
	munmap(v->alias, n);
	free(v);
	add(self->live[LIVE_RESERVATION], -1);
	return CUDA_SUCCESS;
}

static CUresult map(CUdeviceptr at, size_t n, struct physical *p) // under table_lock
{
	struct reservation *v = reservations;
	while (v && !(at >= v->base && at - v->base <= v->size && n <= v->size - (at - v->base)))
		v = v->next;
	if (!v || !p || n != p->size || at % LARGE || range_overlaps(at, n))
		return CUDA_ERROR_INVALID_VALUE;
	struct range *r = calloc(1, sizeof *r);
	int fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 3);
	char *alias = v->alias + (at - v->base);
	if (!r || fd < 0 || mmap(alias, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
		if (fd >= 0)
			close(fd);
		free(r);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*r = (struct range){.base = at, .size = n, .mapped = n, .alias = alias, .fd = fd, .kind = CHUNK, .device = p->prop.location.id,
			    .key = p->key, .handles = (unsigned)p->prop.requestedHandleTypes, .physical = p, .in = v};
	range_insert(r);
	p->refs++;
	v->mappings++;
	add(self->live[LIVE_MAPPING], 1);
	return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr at, size_t n, size_t offset, CUmemGenericAllocationHandle h, unsigned long long flags)
{
	ENTER(false);
	if (offset || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table_lock);
	CUresult r = map(at, n, physical_of(h));
	pthread_mutex_unlock(&table_lock);
	return r;
}

// Whether chunks fill n bytes from at on, whole ones; with each, do is done.
static bool chunks(uint64_t at, size_t n, void (*each)(struct range *, CUmemAccess_flags), CUmemAccess_flags flags) // under table_lock
{
	for (int pass = 0; pass < 2; pass++)
		for (uint64_t p = at; p < at + n;) {
			struct range *r = range_from(p);
			if (!r || r->kind != CHUNK || r->size > at + n - p)
				return false;
			p += r->size;
			if (pass)
				each(r, flags);
		}
	return n > 0;
}

static void allow(struct range *r, CUmemAccess_flags flags) { r->access = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE; }

static void unmap(struct range *r, CUmemAccess_flags flags)
{
	(void)flags;
	range_remove(r);
	mmap(r->alias, r->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
	close(r->fd);
	r->in->mappings--;
	physical_put(r->physical);
	free(r);
	add(self->live[LIVE_MAPPING], -1);
}

CUresult cuMemSetAccess(CUdeviceptr p, size_t n, const CUmemAccessDesc *d, size_t count)
{
	ENTER(false);
	if (count != 1 || !d || d->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	NUMBER(d->location.id);
	pthread_mutex_lock(&table_lock);
	bool ok = chunks(p, n, allow, d->flags);
	pthread_mutex_unlock(&table_lock);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemUnmap(CUdeviceptr p, size_t n)
{
	ENTER(false);
	drain(NULL, false);
	pthread_mutex_lock(&table_lock);
	bool ok = chunks(p, n, unmap, 0);
	pthread_mutex_unlock(&table_lock);
	return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle h, CUmemAllocationHandleType t, unsigned long long flags)
{
	ENTER(false);
	CUresult r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table_lock);
	struct physical *p = physical_of(h);
	if (p && !flags && t == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR && p->prop.requestedHandleTypes & t) {
		int fd = fcntl(p->fd, F_DUPFD_CLOEXEC, 3);
		r = fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
		if (fd >= 0)
			*(int *)out = fd;
	}
	pthread_mutex_unlock(&table_lock);
	return r;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *h, void *os, CUmemAllocationHandleType t)
{
	ENTER(false);
	uint64_t key;
	int device;
	struct stat st;
	char path[64];
	snprintf(path, sizeof path, "/proc/self/fd/%d", (int)(intptr_t)os);
	if (t != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !memory_is(path, &key, &device))
		return CUDA_ERROR_INVALID_VALUE;
	int fd = fcntl((int)(intptr_t)os, F_DUPFD_CLOEXEC, 3);
	if (fd < 0 || fstat(fd, &st) || st.st_size % LARGE) {
		if (fd >= 0)
			close(fd);
		return CUDA_ERROR_INVALID_VALUE;
	}
	CUresult r = CUDA_SUCCESS;
	pthread_mutex_lock(&table_lock);
	struct physical *p = NULL;
	for (size_t i = 0; i < sizeof physicals / sizeof *physicals && !p; i++)
		if (physicals[i] && physicals[i]->key == key)
			p = physicals[i];
	if (p) { // made or imported here: one more handle of the same
		close(fd);
		p->refs++;
		p->handles++;
	} else {
		p = calloc(1, sizeof *p);
		if (!p)
			abort();
		*p = (struct physical){.fd = fd, .refs = 1, .handles = 1, .size = (size_t)st.st_size, .key = key};
		p->prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
		p->prop.requestedHandleTypes = t;
		p->prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, device};
		if (!block_hold(key, p->size, device) || !physical_add(p)) {
			close(fd);
			free(p);
			r = CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	if (!r)
		*h = (CUmemGenericAllocationHandle)p;
	pthread_mutex_unlock(&table_lock);
	return r;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *h, void *address)
{
	ENTER(false);
	CUresult r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table_lock);
	struct range *x = range_at((uint64_t)address, 0);
	if (x && x->kind == CHUNK) {
		x->physical->refs++;
		x->physical->handles++;
		*h = (CUmemGenericAllocationHandle)x->physical;
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table_lock);
	return r;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle h)
{
	ENTER(false);
	CUresult r = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&table_lock);
	struct physical *p = physical_of(h);
	if (p) {
		*prop = p->prop;
		r = CUDA_SUCCESS;
	}
	pthread_mutex_unlock(&table_lock);
	return r;
}
