/* cuda.h of 12.9 or 13 for code of ours and of others that was written for another
 * version: both forms of the batch, and the older entry points of the calls whose
 * signature changed in 13, which drivers go on exporting. As cuda.h, before the
 * other one in the include path (scripts/cuda-headers.sh). */
#ifndef KVFERRY_COMPAT_H
#define KVFERRY_COMPAT_H
#include_next <cuda.h>
#undef cuMemcpyBatchAsync
CUresult cuMemcpyBatchAsync(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, CUstream s);
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs, size_t *attrsIdxs, size_t numAttrs, CUstream s);
#if CUDA_VERSION >= 13000
#undef cuCtxCreate
#undef cuMemAdvise
#undef cuMemPrefetchAsync
#undef cuGraphAddDependencies
#undef cuGraphGetEdges
CUresult cuCtxCreate_v2(CUcontext *c, unsigned int flags, CUdevice d);
CUresult cuMemAdvise(CUdeviceptr p, size_t n, CUmem_advise a, CUdevice d);
CUresult cuMemPrefetchAsync(CUdeviceptr p, size_t n, CUdevice d, CUstream s);
CUresult cuGraphAddDependencies(CUgraph g, const CUgraphNode *from, const CUgraphNode *to, size_t n);
CUresult cuGraphGetEdges(CUgraph g, CUgraphNode *from, CUgraphNode *to, size_t *n);
#define cuCtxCreate cuCtxCreate_v2
#endif
#endif
