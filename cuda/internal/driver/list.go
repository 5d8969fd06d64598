//go:build linux && cgo && cuda && (amd64 || arm64)

package driver

/*
#include <cuda.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
	CUdeviceptr *dst, *src;
	size_t *bytes, *zeros; // zeros: what some drivers read as one index a copy, others as one an attribute
	size_t *end;           // of each batch, in copies
	CUresult *result;      // of each batch
	size_t batches, calls;
	size_t whole;          // how many batches, the first ones, went by one call each
	int form;
} copy_list;

static CUresult one_by_one(copy_list *l, size_t first, size_t end, int direction, CUstream s) {
	for (size_t i = first; i < end; i++) {
		CUresult r;
		l->calls++;
		switch (direction) {
		case 0: r = cuMemcpyHtoDAsync(l->dst[i], (const void *)(uintptr_t)l->src[i], l->bytes[i], s); break;
		case 1: r = cuMemcpyDtoHAsync((void *)(uintptr_t)l->dst[i], l->src[i], l->bytes[i], s); break;
		default: r = cuMemcpyAsync(l->dst[i], l->src[i], l->bytes[i], s);
		}
		if (r)
			return r;
	}
	return CUDA_SUCCESS;
}

static CUresult batch(copy_list *l, size_t first, size_t end, int direction, CUstream s) {
	CUmemcpyAttributes a;
	size_t failed;
	memset(&a, 0, sizeof a);
	// Host memory that is copied from is complete; memory of a device may be
	// written by what stands before in the stream.
	a.srcAccessOrder = direction == 0 ? CU_MEMCPY_SRC_ACCESS_ORDER_ANY : CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
	l->calls++;
	if (l->form == 1)
		return cuMemcpyBatchAsync(l->dst + first, l->src + first, l->bytes + first, end - first, &a, l->zeros, 1, &failed, s);
	return cuMemcpyBatchAsync_v2(l->dst + first, l->src + first, l->bytes + first, end - first, &a, l->zeros, 1, s);
}

// submit starts all batches, in their order. A driver that has no batches after
// all is not asked again.
static void submit(copy_list *l, int direction, CUstream s) {
	size_t first = 0;
	l->calls = l->whole = 0;
	for (size_t b = 0; b < l->batches; b++) {
		size_t end = l->end[b];
		CUresult r = CUDA_ERROR_NOT_SUPPORTED;
		if (l->form) {
			r = batch(l, first, end, direction, s);
			if (r == CUDA_ERROR_NOT_SUPPORTED)
				l->form = 0;
		}
		if (l->form)
			l->whole = b + 1;
		else
			r = one_by_one(l, first, end, direction, s);
		l->result[b] = r;
		first = end;
	}
}

static copy_list *new_list(size_t n) {
	char *p = calloc(1, sizeof(copy_list) + n * (2 * sizeof(CUdeviceptr) + 3 * sizeof(size_t) + sizeof(CUresult)));
	copy_list *l = (copy_list *)p;
	if (!p)
		return NULL;
	l->dst = (CUdeviceptr *)(p + sizeof *l);
	l->src = l->dst + n;
	l->bytes = (size_t *)(l->src + n);
	l->zeros = l->bytes + n;
	l->end = l->zeros + n;
	l->result = (CUresult *)(l->end + n);
	return l;
}
*/
import "C"

import (
	"errors"
	"unsafe"
)

// Most is how many copies one call of the driver takes: more have crashed drivers.
const Most = 4096

// Form is how a driver takes many copies.
type Form int

// The forms.
const (
	OneByOne Form = iota
	Batch         // cuMemcpyBatchAsync, of 12.8
	BatchV2       // of 13.0
)

// Forms is the best that the driver has.
func Forms() Form {
	switch {
	case Has("cuMemcpyBatchAsync"):
		return Batch
	case Has("cuMemcpyBatchAsync_v2"):
		return BatchV2
	}
	return OneByOne
}

// List is copies to be started by one call into C, in memory of C. Each batch
// of it runs behind those before; within a batch there is no order.
type List struct {
	c               *C.copy_list
	dst, src, bytes []uint64
	end             []uint64
	result          []uint32
	copies, batches int
	most            int
	direction       int // of Submit
}

// NewList makes an empty one, for so many copies.
func NewList(most int) (*List, error) {
	c := C.new_list(C.size_t(most))
	if c == nil {
		return nil, errors.New("no memory for a list of copies")
	}
	return &List{
		c:      c,
		most:   most,
		dst:    unsafe.Slice((*uint64)(unsafe.Pointer(c.dst)), most),
		src:    unsafe.Slice((*uint64)(unsafe.Pointer(c.src)), most),
		bytes:  unsafe.Slice((*uint64)(unsafe.Pointer(c.bytes)), most),
		end:    unsafe.Slice((*uint64)(unsafe.Pointer(c.end)), most),
		result: unsafe.Slice((*uint32)(unsafe.Pointer(c.result)), most),
	}, nil
}

// Free frees it.
func (l *List) Free() { C.free(unsafe.Pointer(l.c)) }

// Room is how many copies it still takes.
func (l *List) Room() int { return l.most - l.copies }

// Empty says whether there are none.
func (l *List) Empty() bool { return l.copies == 0 }

// Add adds a copy to the batch that has not ended.
func (l *List) Add(dst, src Addr, bytes int64) {
	l.dst[l.copies], l.src[l.copies], l.bytes[l.copies] = dst, src, uint64(bytes)
	l.copies++
}

// End ends a batch, if it has copies, and says which it is; -1: none.
func (l *List) End() int {
	if l.copies == 0 || (l.batches > 0 && l.end[l.batches-1] == uint64(l.copies)) {
		return -1
	}
	l.end[l.batches] = uint64(l.copies)
	l.batches++
	return l.batches - 1
}

// Submit starts the batches in a stream of the current context. It returns how
// many calls of the driver that took, and the form to go on with. Result says
// what became of each, until Reset.
func (l *List) Submit(direction int, form Form, s Stream) (calls int, next Form) {
	l.direction = direction
	l.c.batches, l.c.form = C.size_t(l.batches), C.int(form)
	C.submit(l.c, C.int(direction), C.CUstream(unsafe.Pointer(s.s.C())))
	return int(l.c.calls), Form(l.c.form)
}

// Result is the error of a batch: part of it may have been started.
func (l *List) Result(batch int) error {
	call := "cuMemcpyBatchAsync"
	if batch >= int(l.c.whole) {
		call = [...]string{"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyAsync"}[l.direction]
	}
	return check(call, C.CUresult(l.result[batch]))
}

// Reset empties it.
func (l *List) Reset() { l.copies, l.batches = 0, 0 }
