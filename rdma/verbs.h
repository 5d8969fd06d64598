// The C side of package rdma. Everything here is called from Go through cgo;
// no function calls back into Go, and none keeps a pointer into Go's memory
// after it has returned. Functions that return int return 0 or an errno,
// unless they say otherwise.
#ifndef KVFERRY_RDMA_VERBS_H
#define KVFERRY_RDMA_VERBS_H

#include <infiniband/verbs.h>
#include <stddef.h>
#include <stdint.h>

// ---- verbs.c: the library, bound at run time, and its objects ----

// rd_load binds the library at path, or libibverbs.so.1 as the loader finds
// it if path is "". Its text, to be freed, says what is wrong; NULL: nothing.
// Not to be called twice at once, nor again after it has worked.
char *rd_load(const char *path);

struct ibv_device **rd_device_list(int *n, int *err);
void rd_free_device_list(struct ibv_device **l);
const char *rd_device_name(struct ibv_device *d);
struct ibv_context *rd_open(struct ibv_device *d, int *err); // its async_fd does not block
int rd_close(struct ibv_context *c);
int rd_query_device(struct ibv_context *c, struct ibv_device_attr *a);
int rd_query_port(struct ibv_context *c, uint8_t port, struct ibv_port_attr *a);
const char *rd_event_str(int type);
// One asynchronous event, without waiting, acknowledged: 1, or 0 when there is
// none, or -errno. elem is the number of the queue pair or port, or 0.
int rd_async_event(struct ibv_context *c, int *type, uint32_t *elem);

struct ibv_pd *rd_alloc_pd(struct ibv_context *c, int *err);
int rd_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *rd_reg_mr(struct ibv_pd *pd, uint64_t addr, size_t len, unsigned access, int *err);
struct ibv_mr *rd_reg_dmabuf(struct ibv_pd *pd, int fd, uint64_t offset, size_t len, uint64_t iova, unsigned access, int *err);
int rd_dereg_mr(struct ibv_mr *mr);

struct ibv_comp_channel *rd_create_channel(struct ibv_context *c, int *err); // its fd does not block
int rd_destroy_channel(struct ibv_comp_channel *ch);
struct ibv_cq *rd_create_cq(struct ibv_context *c, int entries, struct ibv_comp_channel *ch, int *err);
int rd_destroy_cq(struct ibv_cq *cq);
int rd_take_cq_event(struct ibv_comp_channel *ch); // 1, or 0 when there is none, or -errno
void rd_ack_cq_events(struct ibv_cq *cq, unsigned n);
struct ibv_qp *rd_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *a, int *err);
int rd_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask);
int rd_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *a, int mask);
int rd_destroy_qp(struct ibv_qp *qp);

// ---- queuepair.c: a queue pair and the batches of reads that it carries out ----

struct rd_options {
	uint32_t depth, max_sge, signal_every, chain, max_msg;
	int events;
};

// What a request covers: ops from first to before end, and rest bytes of end.
struct rd_covered {
	uint32_t first, end, rest;
};

// rd_qp is a reliable queue pair with its own completion queue (and channel),
// the work requests that batches are built in, and the account of what is
// outstanding. It belongs to one thread at a time, but for rd_qp_state and
// rd_qp_fail, which any may call until it is destroyed.
struct rd_qp {
	struct ibv_qp *qp;
	struct ibv_cq *cq;
	struct ibv_comp_channel *ch;
	struct ibv_send_wr *wr;             // chain entries, reused for every chain
	struct ibv_sge *sge;                // chain * max_sge entries
	struct rd_covered *covers;          // ring of depth entries: what each request out there covers
	struct rd_options o;
	uint64_t head, tail;  // sequence numbers: posted, retired
	uint64_t next_signal; // behind the last one posted that will report itself
	uint32_t since, since_bytes; // posted after it
	uint32_t unacked;     // events taken from the channel, and not acknowledged
	int armed;            // a notification was asked for, and its event not taken
	int short_of;         // memory, the provider: nothing is posted until something has completed
	int failing;          // in the error state, by us
	int marker;           // of draining: 0 not posted, 1 out there, 2 back
};

struct rd_qp *rd_qp_new(struct ibv_pd *pd, const struct rd_options *o, int *err, const char **what);
// Destroys all of it, in order. After an error what is left can be tried
// again: *what says what it is.
int rd_qp_free(struct rd_qp *q, const char **what);
int rd_qp_fd(struct rd_qp *q);    // of the channel; -1: none
int rd_qp_state(struct rd_qp *q); // enum ibv_qp_state, or -errno
int rd_qp_fail(struct rd_qp *q);  // to the error state

struct rd_path {
	uint8_t port, gid_index, hop_limit, traffic_class, sl, is_global, mtu, timeout;
	uint8_t retry_cnt, rnr_retry, min_rnr_timer, rd_atomic, dest_rd_atomic;
	uint16_t dlid, pkey_index;
	uint32_t dest_qpn, rq_psn, sq_psn, flow_label, access;
	uint8_t dgid[16];
};
// Takes a new queue pair to the state RTS; *what is the step that failed.
int rd_qp_connect(struct rd_qp *q, const struct rd_path *p, const char **what);

// One stretch of memory to read. The addresses are numbers, not pointers, so
// a Go slice of these may be handed over as it is.
struct rd_op {
	uint64_t local, remote;
	uint32_t len, lkey, rkey, reserved;
};

// A batch, and where it stands; kept by the caller between steps.
struct rd_batch {
	uint32_t n;       // ops
	uint32_t single;  // neighbours are not merged
	uint32_t posted;  // ops handed to the queue pair,
	uint32_t offset;  // and so many bytes of the next one
	uint32_t done;    // ops that have landed, all before this index
	uint32_t wrs, cqes, posts;
	int32_t status;   // enum ibv_wc_status of the first failure
	uint32_t vendor;  // and the device's own code for it
	uint32_t bad_op;  // the first op of the request that failed
	int32_t err;      // of a verb that failed,
	uint32_t verb;    // which is one of these
};
enum { RD_POST_SEND, RD_POLL_CQ, RD_REQ_NOTIFY, RD_GET_EVENT, RD_UNKNOWN_WR };

enum {
	RD_DONE,   // all has landed; of rd_drain: nothing can land any more
	RD_WAIT,   // nothing to do until the channel has an event (or, without one, for a while)
	RD_RETRY,  // the provider has no memory, and nothing out there will report itself: try again soon
	RD_STOP,   // *stop is set
	RD_FAILED, // status or err is set
};

// rd_step moves a batch forward: posts what fits, reaps, posts again, until
// there has been nothing to reap for spin_ns.
int rd_step(struct rd_qp *q, const struct rd_op *ops, struct rd_batch *b, const uint32_t *stop, int64_t spin_ns);

// rd_drain does one step of emptying a queue pair, whatever has been posted:
// first it goes to the error state. When it says RD_DONE the device writes no
// more to any batch's memory, and b->done is exact.
int rd_drain(struct rd_qp *q, struct rd_batch *b);
#endif
