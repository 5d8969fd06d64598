// Copies and fills.
#include "double.h"

enum side { EITHER, HOST_SIDE, DEVICE_SIDE };

struct place {
	char *bytes;
	bool pinned;
	int device; // -1: host memory
};

// Where a stretch lies. What begins or ends outside of the memory that it
// touches is refused.
static CUresult resolve(uint64_t address, size_t n, enum side side, struct place *p)
{
	struct range r;
	char *bytes = range_bytes(address, n, &r);
	if (bytes) {
		*p = (struct place){bytes, true, is_host(&r) ? -1 : r.device};
		return CUDA_SUCCESS;
	}
	pthread_mutex_lock(&table_lock);
	bool touched = range_overlaps(address, n);
	pthread_mutex_unlock(&table_lock);
	if (side == DEVICE_SIDE || touched || !address)
		return CUDA_ERROR_INVALID_VALUE;
	*p = (struct place){(char *)address, false, -1};
	return CUDA_SUCCESS;
}

static int wire(const struct place *dst, const struct place *src)
{
	if (dst->device < 0)
		return src->device < 0 ? -1 : src->device * WIRES + WIRE_TO_HOST;
	return dst->device * WIRES + (src->device < 0 ? WIRE_TO_DEVICE : WIRE_WITHIN);
}

// Starts a copy of n pieces, or carries it out: with memory that is not pinned
// the call itself waits.
static CUresult start(struct op *o, CUstream s, bool pinned, bool async)
{
	CUresult r = stream_of(&s);
	if (!r && async && !pinned && get(control->faults.strict))
		r = CUDA_ERROR_INVALID_VALUE;
	if (r) {
		free(o->snapshot);
		free(o);
		return r;
	}
	stream_push(s, o);
	if (async && pinned)
		return CUDA_SUCCESS;
	stream_drain(s);
	return get(CURRENT->sticky);
}

static CUresult copy(uint64_t to, enum side ts, uint64_t from, enum side fs, size_t n, CUstream s, bool async)
{
	struct place dst, src;
	if (!n)
		return CUDA_SUCCESS;
	CUresult r = resolve(to, n, ts, &dst);
	if (!r)
		r = resolve(from, n, fs, &src);
	if (r)
		return r;
	struct op *o = op_new(COPY, 1);
	o->piece[0] = (struct piece){dst.bytes, src.bytes, n};
	o->wire = wire(&dst, &src);
	return start(o, s, dst.pinned && src.pinned, async);
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr dst, const void *src, size_t n)
{
	ENTER(true);
	return copy(dst, DEVICE_SIDE, (uint64_t)src, HOST_SIDE, n, NULL, false);
}

CUresult cuMemcpyDtoH_v2(void *dst, CUdeviceptr src, size_t n)
{
	ENTER(true);
	return copy((uint64_t)dst, HOST_SIDE, src, DEVICE_SIDE, n, NULL, false);
}

CUresult cuMemcpyDtoD_v2(CUdeviceptr dst, CUdeviceptr src, size_t n)
{
	ENTER(true);
	return copy(dst, DEVICE_SIDE, src, DEVICE_SIDE, n, NULL, false);
}

CUresult cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t n)
{
	ENTER(true);
	return copy(dst, EITHER, src, EITHER, n, NULL, false);
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void *src, size_t n, CUstream s)
{
	ENTER(true);
	return copy(dst, DEVICE_SIDE, (uint64_t)src, HOST_SIDE, n, s, true);
}

CUresult cuMemcpyDtoHAsync_v2(void *dst, CUdeviceptr src, size_t n, CUstream s)
{
	ENTER(true);
	return copy((uint64_t)dst, HOST_SIDE, src, DEVICE_SIDE, n, s, true);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
	ENTER(true);
	return copy(dst, DEVICE_SIDE, src, DEVICE_SIDE, n, s, true);
}

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t n, CUstream s)
{
	ENTER(true);
	return copy(dst, EITHER, src, EITHER, n, s, true);
}

static CUresult peers(CUcontext a, CUcontext b)
{
	return a && b && a->magic == CONTEXT && b->magic == CONTEXT ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuMemcpyPeer(CUdeviceptr dst, CUcontext dc, CUdeviceptr src, CUcontext sc, size_t n)
{
	ENTER(true);
	CUresult r = peers(dc, sc);
	return r ? r : copy(dst, DEVICE_SIDE, src, DEVICE_SIDE, n, NULL, false);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dc, CUdeviceptr src, CUcontext sc, size_t n, CUstream s)
{
	ENTER(true);
	CUresult r = peers(dc, sc);
	return r ? r : copy(dst, DEVICE_SIDE, src, DEVICE_SIDE, n, s, true);
}

// ---- many at once

struct batch {
	CUdeviceptr *dst, *src;
	size_t *size, count;
	CUmemcpyAttributes *attribute;
	size_t *from, attributes; // attribute i is of the copies from[i] to from[i+1]-1
	size_t *failed;
};

static CUresult check(const struct batch *b, CUstream s)
{
	if (!s || s == CU_STREAM_LEGACY) // the default stream is refused
		return CUDA_ERROR_INVALID_VALUE;
	if (!b->count || !b->attributes || b->attributes > b->count || b->from[0] != 0)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < b->attributes; i++) {
		CUmemcpySrcAccessOrder order = b->attribute[i].srcAccessOrder;
		if (order < CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || order > CU_MEMCPY_SRC_ACCESS_ORDER_ANY)
			return CUDA_ERROR_INVALID_VALUE;
		if (i && (b->from[i] <= b->from[i - 1] || b->from[i] >= b->count))
			return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

// A source on a device that may be read in any order is read now, before what
// was started earlier.
static CUresult batch(const struct batch *b, CUstream s)
{
	CUresult r = check(b, s);
	if (b->failed)
		*b->failed = SIZE_MAX;
	if (r)
		return r;
	struct op *o = op_new(COPY, b->count);
	bool pinned = true;
	size_t early = 0, a = 0;
	for (int pass = 0; pass < 2; pass++) {
		size_t at = 0;
		a = 0;
		for (size_t i = 0; i < b->count; i++) {
			struct place dst, src;
			while (a + 1 < b->attributes && b->from[a + 1] <= i)
				a++;
			r = b->size[i] ? resolve(b->dst[i], b->size[i], EITHER, &dst) : CUDA_ERROR_INVALID_VALUE;
			if (!r)
				r = resolve(b->src[i], b->size[i], EITHER, &src);
			if (r) {
				if (b->failed)
					*b->failed = i;
				free(o->snapshot);
				free(o);
				return r;
			}
			bool any = src.device >= 0 && b->attribute[a].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
			if (!pass) {
				pinned = pinned && dst.pinned && src.pinned;
				early += any ? b->size[i] : 0;
				o->wire = wire(&dst, &src);
				o->piece[i] = (struct piece){dst.bytes, src.bytes, b->size[i]};
			} else if (any) {
				o->piece[i].src = memcpy((char *)o->snapshot + at, src.bytes, b->size[i]);
				at += b->size[i];
			}
		}
		if (!early)
			break;
		if (!pass && !(o->snapshot = malloc(early)))
			abort();
	}
	return start(o, s, pinned, true);
}

CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream s)
{
	ENTER(true);
	return batch(&(struct batch){dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, failIdx}, s);
}

CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream s)
{
	ENTER(true);
	return batch(&(struct batch){dsts, srcs, sizes, count, attrs, attrsIdxs, numAttrs, NULL}, s);
}

// ---- fills

static CUresult fill(CUdeviceptr p, unsigned value, size_t n, size_t unit, CUstream s, bool async)
{
	struct place dst;
	if (!n)
		return CUDA_SUCCESS;
	if (n > SIZE_MAX / unit || p % unit)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult r = resolve(p, n * unit, DEVICE_SIDE, &dst);
	if (r)
		return r;
	struct op *o = op_new(FILL, 1);
	o->piece[0] = (struct piece){dst.bytes, NULL, n * unit};
	o->unit = unit;
	o->value = value;
	return start(o, s, true, async);
}

CUresult cuMemsetD8_v2(CUdeviceptr p, unsigned char v, size_t n)
{
	ENTER(true);
	return fill(p, v, n, 1, NULL, false);
}

CUresult cuMemsetD16_v2(CUdeviceptr p, unsigned short v, size_t n)
{
	ENTER(true);
	return fill(p, v, n, 2, NULL, false);
}

CUresult cuMemsetD32_v2(CUdeviceptr p, unsigned int v, size_t n)
{
	ENTER(true);
	return fill(p, v, n, 4, NULL, false);
}

CUresult cuMemsetD8Async(CUdeviceptr p, unsigned char v, size_t n, CUstream s)
{
	ENTER(true);
	return fill(p, v, n, 1, s, true);
}

CUresult cuMemsetD16Async(CUdeviceptr p, unsigned short v, size_t n, CUstream s)
{
	ENTER(true);
	return fill(p, v, n, 2, s, true);
}

CUresult cuMemsetD32Async(CUdeviceptr p, unsigned int v, size_t n, CUstream s)
{
	ENTER(true);
	return fill(p, v, n, 4, s, true);
}

CUresult cuStreamWriteValue32_v2(CUstream s, CUdeviceptr p, cuuint32_t v, unsigned int flags)
{
	ENTER(true);
	(void)flags;
	return fill(p, v, 1, 4, s, true);
}
