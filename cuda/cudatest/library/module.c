// Modules. The text of one is searched for its entry points; those whose names
// are known here are carried out in C, others load and cannot be launched.
#include "double.h"

#include <stdio.h>

CUresult cuModuleLoadData(CUmodule *m, const void *image)
{
	ENTER(true);
	if (!image || !strstr(image, ".version") || !strstr(image, ".target"))
		return CUDA_ERROR_INVALID_IMAGE;
	struct CUmod_st *x = calloc(1, sizeof *x);
	if (!x || !(x->text = strdup(image)))
		abort();
	x->magic = MODULE;
	x->ctx = CURRENT;
	add(x->ctx->modules, 1);
	*m = x;
	add(self->live[LIVE_MODULE], 1);
	return CUDA_SUCCESS;
}

CUresult cuModuleLoadDataEx(CUmodule *m, const void *image, unsigned int n, CUjit_option *o, void **v)
{
	ENTER(true);
	(void)n;
	(void)o;
	(void)v;
	return cuModuleLoadData(m, image);
}

CUresult cuModuleUnload(CUmodule m)
{
	ENTER(true);
	if (!m || m->magic != MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	drain(CURRENT, false);
	m->magic = 0;
	add(m->ctx->modules, -1);
	free(m->text);
	free(m);
	add(self->live[LIVE_MODULE], -1);
	return CUDA_SUCCESS;
}

// ---- what is known

// The bytes that a kernel of a context may touch; NULL if it may not.
static char *reach(struct CUctx_st *c, uint64_t address, size_t n)
{
	struct range r;
	char *p = range_bytes(address, n, &r);
	return p && (is_host(&r) || r.device == c->device || get(c->peers) & 1u << r.device) ? p : NULL;
}

// kv_copy_list(struct { u64 src, dst, bytes; } *list, u32 n), in words of 16 bytes.
static CUresult copy_list(struct CUctx_st *c, const uint64_t *parameter)
{
	uint32_t n = (uint32_t)parameter[1];
	const uint64_t *list = (const uint64_t *)(const void *)reach(c, parameter[0], 24 * (size_t)n);
	for (uint32_t i = 0; list && i < n; i++, list += 3) {
		if ((list[0] | list[1] | list[2]) % 16)
			return CUDA_ERROR_MISALIGNED_ADDRESS;
		char *src = reach(c, list[0], list[2]), *dst = reach(c, list[1], list[2]);
		if (!src || !dst)
			return CUDA_ERROR_ILLEGAL_ADDRESS;
		memmove(dst, src, list[2]);
	}
	return list || !n ? CUDA_SUCCESS : CUDA_ERROR_ILLEGAL_ADDRESS;
}

static const struct {
	const char *name;
	int parameters;
	size_t size[4]; // of each, in bytes
	CUresult (*run)(struct CUctx_st *c, const uint64_t *parameter);
} known[] = {
	{"kv_copy_list", 2, {8, 4}, copy_list},
};

CUresult kernel_run(struct CUctx_st *c, int kernel, const uint64_t *parameter) { return known[kernel].run(c, parameter); }

CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *name)
{
	ENTER(true);
	if (!m || m->magic != MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	char entry[160];
	snprintf(entry, sizeof entry, ".entry %s(", name);
	if (!strstr(m->text, entry))
		return CUDA_ERROR_NOT_FOUND;
	if (m->functions == FUNCTIONS)
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct CUfunc_st *x = &m->function[m->functions++];
	x->kernel = -1;
	snprintf(x->name, sizeof x->name, "%s", name);
	for (int i = 0; i < (int)(sizeof known / sizeof *known); i++)
		if (!strcmp(name, known[i].name))
			x->kernel = i;
	*f = x;
	return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz, unsigned int smem, CUstream s, void **params, void **extra)
{
	ENTER(true);
	(void)smem;
	if (!f || !params || extra)
		return CUDA_ERROR_INVALID_VALUE;
	if (!gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024)
		return CUDA_ERROR_INVALID_VALUE;
	if (f->kernel < 0)
		return CUDA_ERROR_NOT_SUPPORTED;
	CUresult r = stream_of(&s);
	if (r)
		return r;
	struct op *o = op_new(KERNEL, 0);
	o->kernel = f->kernel;
	for (int i = 0; i < known[f->kernel].parameters; i++)
		memcpy(&o->parameter[i], params[i], known[f->kernel].size[i]);
	stream_push(s, o);
	return CUDA_SUCCESS;
}
