//go:build linux && cgo && rdma && (amd64 || arm64)

#define _GNU_SOURCE
#include "verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

// Only the control path lives in the library as symbols. The data path
// (ibv_post_send, ibv_poll_cq, ibv_req_notify_cq) is inline functions in the
// header that jump through the context's table of operations, so it costs the
// same as with a linked library.
static struct {
	struct ibv_device **(*get_device_list)(int *);
	void (*free_device_list)(struct ibv_device **);
	const char *(*get_device_name)(struct ibv_device *);
	struct ibv_context *(*open_device)(struct ibv_device *);
	int (*close_device)(struct ibv_context *);
	int (*query_device)(struct ibv_context *, struct ibv_device_attr *);
	int (*query_port)(struct ibv_context *, uint8_t, struct _compat_ibv_port_attr *);
	struct ibv_pd *(*alloc_pd)(struct ibv_context *);
	int (*dealloc_pd)(struct ibv_pd *);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
	struct ibv_mr *(*reg_mr_iova2)(struct ibv_pd *, void *, size_t, uint64_t, unsigned);
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *, uint64_t, size_t, uint64_t, int, int);
	int (*dereg_mr)(struct ibv_mr *);
	struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *);
	int (*destroy_comp_channel)(struct ibv_comp_channel *);
	struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
	int (*destroy_cq)(struct ibv_cq *);
	int (*get_cq_event)(struct ibv_comp_channel *, struct ibv_cq **, void **);
	void (*ack_cq_events)(struct ibv_cq *, unsigned);
	struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
	int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
	int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
	int (*destroy_qp)(struct ibv_qp *);
	int (*get_async_event)(struct ibv_context *, struct ibv_async_event *);
	void (*ack_async_event)(struct ibv_async_event *);
	const char *(*event_type_str)(enum ibv_event_type);
} lib;

// Most symbols exist twice: IBVERBS_1.0 is an old ABI with other structures,
// so the version is named.
static const struct {
	void *into;
	const char *name, *version;
	int optional;
} symbols[] = {
	{&lib.get_device_list, "ibv_get_device_list", "IBVERBS_1.1", 0},
	{&lib.free_device_list, "ibv_free_device_list", "IBVERBS_1.1", 0},
	{&lib.get_device_name, "ibv_get_device_name", "IBVERBS_1.1", 0},
	{&lib.open_device, "ibv_open_device", "IBVERBS_1.1", 0},
	{&lib.close_device, "ibv_close_device", "IBVERBS_1.1", 0},
	{&lib.query_device, "ibv_query_device", "IBVERBS_1.1", 0},
	{&lib.query_port, "ibv_query_port", "IBVERBS_1.1", 0},
	{&lib.alloc_pd, "ibv_alloc_pd", "IBVERBS_1.1", 0},
	{&lib.dealloc_pd, "ibv_dealloc_pd", "IBVERBS_1.1", 0},
	{&lib.reg_mr, "ibv_reg_mr", "IBVERBS_1.1", 0},
	{&lib.reg_mr_iova2, "ibv_reg_mr_iova2", "IBVERBS_1.8", 1},
	{&lib.reg_dmabuf_mr, "ibv_reg_dmabuf_mr", "IBVERBS_1.12", 1},
	{&lib.dereg_mr, "ibv_dereg_mr", "IBVERBS_1.1", 0},
	{&lib.create_comp_channel, "ibv_create_comp_channel", "IBVERBS_1.0", 0},
	{&lib.destroy_comp_channel, "ibv_destroy_comp_channel", "IBVERBS_1.0", 0},
	{&lib.create_cq, "ibv_create_cq", "IBVERBS_1.1", 0},
	{&lib.destroy_cq, "ibv_destroy_cq", "IBVERBS_1.1", 0},
	{&lib.get_cq_event, "ibv_get_cq_event", "IBVERBS_1.1", 0},
	{&lib.ack_cq_events, "ibv_ack_cq_events", "IBVERBS_1.1", 0},
	{&lib.create_qp, "ibv_create_qp", "IBVERBS_1.1", 0},
	{&lib.modify_qp, "ibv_modify_qp", "IBVERBS_1.1", 0},
	{&lib.query_qp, "ibv_query_qp", "IBVERBS_1.1", 0},
	{&lib.destroy_qp, "ibv_destroy_qp", "IBVERBS_1.1", 0},
	{&lib.get_async_event, "ibv_get_async_event", "IBVERBS_1.1", 0},
	{&lib.ack_async_event, "ibv_ack_async_event", "IBVERBS_1.1", 0},
	{&lib.event_type_str, "ibv_event_type_str", "IBVERBS_1.1", 0},
};

static char *textf(const char *format, const char *a, const char *b)
{
	char *s = NULL;
	return asprintf(&s, format, a, b) < 0 ? strdup("out of memory") : s;
}

char *rd_load(const char *path)
{
	const char *name = *path ? path : "libibverbs.so.1";
	void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!handle)
		return textf("%s%s", dlerror(), "");
	for (size_t i = 0; i < sizeof symbols / sizeof *symbols; i++) {
		void *f = dlvsym(handle, symbols[i].name, symbols[i].version);
		if (!f && !symbols[i].optional) {
			dlclose(handle);
			return textf("%s lacks %s", name, symbols[i].name);
		}
		memcpy(symbols[i].into, &f, sizeof f);
	}
	return NULL;
}

// ---- verbs whose errno becomes a value, read on the thread that it is of ----

static int failed(void) { return errno > 0 ? errno : EIO; }

// made is for verbs that return an object: *err is 0, or why there is none.
#define MADE(object)               \
	({                         \
		errno = 0;         \
		__auto_type made = (object); \
		*err = made ? 0 : failed();  \
		made;              \
	})

// code is for verbs that return an errno, or -1 and set it.
static int code(int r) { return r < 0 ? failed() : r; }

static int nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);
	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? failed() : 0;
}

struct ibv_device **rd_device_list(int *n, int *err) { return MADE(lib.get_device_list(n)); }
void rd_free_device_list(struct ibv_device **l) { lib.free_device_list(l); }
const char *rd_device_name(struct ibv_device *d) { return lib.get_device_name(d); }

struct ibv_context *rd_open(struct ibv_device *d, int *err)
{
	struct ibv_context *c = MADE(lib.open_device(d));
	if (c && (*err = nonblocking(c->async_fd))) {
		lib.close_device(c);
		return NULL;
	}
	return c;
}

int rd_close(struct ibv_context *c) { return code(lib.close_device(c)); }
int rd_query_device(struct ibv_context *c, struct ibv_device_attr *a) { return code(lib.query_device(c, a)); }

int rd_query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *a)
{
	// The exported symbol fills in only the old, shorter structure; the
	// context's own operation, where there is one, all of it.
	struct verbs_context *v = verbs_get_ctx_op(c, query_port);
	memset(a, 0, sizeof *a);
	return code(v ? v->query_port(c, port, a, sizeof *a) : lib.query_port(c, port, (struct _compat_ibv_port_attr *)a));
}

const char *rd_event_str(int type) { return lib.event_type_str(type); }

int rd_async_event(struct ibv_context *c, int *type, uint32_t *elem)
{
	struct ibv_async_event ev;
	errno = 0;
	if (lib.get_async_event(c, &ev))
		return errno == EAGAIN ? 0 : -failed();
	*type = ev.event_type;
	*elem = 0;
	switch (ev.event_type) {
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		*elem = ev.element.qp->qp_num;
		break;
	case IBV_EVENT_PORT_ACTIVE:
	case IBV_EVENT_PORT_ERR:
	case IBV_EVENT_LID_CHANGE:
	case IBV_EVENT_PKEY_CHANGE:
	case IBV_EVENT_GID_CHANGE:
	case IBV_EVENT_SM_CHANGE:
	case IBV_EVENT_CLIENT_REREGISTER:
		*elem = ev.element.port_num;
		break;
	default:
		break;
	}
	lib.ack_async_event(&ev); // a queue pair with events that are not cannot be destroyed
	return 1;
}

struct ibv_pd *rd_alloc_pd(struct ibv_context *c, int *err) { return MADE(lib.alloc_pd(c)); }
int rd_dealloc_pd(struct ibv_pd *pd) { return code(lib.dealloc_pd(pd)); }

struct ibv_mr *rd_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t len, unsigned access, int *err)
{
	void *p = (void *)(uintptr_t)addr;
	if (lib.reg_mr_iova2) // leaves out optional bits that the kernel does not know
		return MADE(lib.reg_mr_iova2(pd, p, len, addr, access));
	return MADE(lib.reg_mr(pd, p, len, access & ~IBV_ACCESS_OPTIONAL_RANGE));
}

struct ibv_mr *rd_reg_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, size_t len, uint64_t iova, unsigned access, int *err)
{
	if (!lib.reg_dmabuf_mr) {
		*err = EOPNOTSUPP;
		return NULL;
	}
	return MADE(lib.reg_dmabuf_mr(pd, offset, len, iova, fd, access));
}

int rd_dereg_mr(struct ibv_mr *mr) { return code(lib.dereg_mr(mr)); }

struct ibv_comp_channel *rd_create_channel(struct ibv_context *c, int *err)
{
	struct ibv_comp_channel *ch = MADE(lib.create_comp_channel(c));
	if (ch && (*err = nonblocking(ch->fd))) {
		lib.destroy_comp_channel(ch);
		return NULL;
	}
	return ch;
}

int rd_destroy_channel(struct ibv_comp_channel *ch) { return code(lib.destroy_comp_channel(ch)); }

struct ibv_cq *rd_create_cq(struct ibv_context *c, int entries, struct ibv_comp_channel *ch, int *err)
{
	return MADE(lib.create_cq(c, entries, NULL, ch, 0));
}

int rd_destroy_cq(struct ibv_cq *cq) { return code(lib.destroy_cq(cq)); }

int rd_take_cq_event(struct ibv_comp_channel *ch)
{
	struct ibv_cq *cq;
	void *context;
	errno = 0;
	if (lib.get_cq_event(ch, &cq, &context))
		return errno == EAGAIN ? 0 : -failed();
	return 1;
}

void rd_ack_cq_events(struct ibv_cq *cq, unsigned n) { lib.ack_cq_events(cq, n); }

struct ibv_qp *rd_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a, int *err) { return MADE(lib.create_qp(pd, a)); }
int rd_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask) { return code(lib.modify_qp(qp, a, mask)); }

int rd_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask)
{
	struct ibv_qp_init_attr init;
	return code(lib.query_qp(qp, a, mask, &init));
}

int rd_destroy_qp(struct ibv_qp *qp) { return code(lib.destroy_qp(qp)); }
