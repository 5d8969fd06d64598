// What package rdma does not let a test do: one process that uses the verbs
// directly. It is compiled with the library and the sanitizers into one
// program, and says which line fails. "bench" measures posting instead.
#include <infiniband/verbs.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#undef ibv_reg_mr

#define CHECK(ok)                                                              \
	do {                                                                   \
		if (!(ok)) {                                                   \
			fprintf(stderr, "line %d: %s (errno %d)\n", __LINE__, #ok, errno); \
			exit(1);                                               \
		}                                                              \
	} while (0)

enum { SIZE = 4 << 20 };

struct end {
	struct ibv_context *c;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_comp_channel *ch;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	uint32_t key;
	char *memory;
};

static void open_end(struct end *e, int device, int cqe, unsigned depth)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	CHECK(list && n == 2);
	e->c = ibv_open_device(list[device]);
	CHECK(e->c);
	ibv_free_device_list(list);
	e->pd = ibv_alloc_pd(e->c);
	CHECK(e->pd);
	e->memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	e->mr = ibv_reg_mr(e->pd, e->memory, SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	CHECK(e->mr);
	e->key = e->mr->lkey;
	e->ch = ibv_create_comp_channel(e->c);
	CHECK(e->ch && fcntl(e->ch->fd, F_SETFL, O_NONBLOCK) == 0 && fcntl(e->c->async_fd, F_SETFL, O_NONBLOCK) == 0);
	e->cq = ibv_create_cq(e->c, cqe, e, e->ch, 0);
	CHECK(e->cq);
	struct ibv_qp_init_attr a = {.send_cq = e->cq, .recv_cq = e->cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = depth, .max_send_sge = 4, .max_recv_wr = 1, .max_recv_sge = 1}};
	e->qp = ibv_create_qp(e->pd, &a);
	CHECK(e->qp);
}

static void close_end(struct end *e)
{
	if (e->qp)
		CHECK(ibv_destroy_qp(e->qp) == 0);
	CHECK(ibv_destroy_cq(e->cq) == 0);
	CHECK(ibv_destroy_comp_channel(e->ch) == 0);
	CHECK(ibv_dereg_mr(e->mr) == 0);
	CHECK(ibv_dealloc_pd(e->pd) == 0);
	CHECK(ibv_close_device(e->c) == 0);
	munmap(e->memory, SIZE);
}

static int modify(struct ibv_qp *q, enum ibv_qp_state to, uint32_t dest, const uint8_t *gid)
{
	struct ibv_qp_attr a = {.qp_state = to, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_READ, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest,
				.max_dest_rd_atomic = 16, .max_rd_atomic = 16, .min_rnr_timer = 12, .timeout = 14, .retry_cnt = 6, .rnr_retry = 6,
				.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.hop_limit = 64}}};
	int mask = IBV_QP_STATE;
	if (gid)
		memcpy(a.ah_attr.grh.dgid.raw, gid, 16);
	if (to == IBV_QPS_INIT)
		mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	else if (to == IBV_QPS_RTR)
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	else if (to == IBV_QPS_RTS)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
	return ibv_modify_qp(q, &a, mask);
}

static const uint8_t gids[2][16] = {{[10] = 0xff, 0xff, 10, 77, 0, 1}, {[10] = 0xff, 0xff, 10, 77, 0, 2}};

static void connect_ends(struct end *r, struct end *o)
{
	struct end *ends[2] = {o, r};
	for (int i = 0; i < 2; i++) {
		struct ibv_qp *q = ends[i]->qp, *other = ends[!i]->qp;
		CHECK(modify(q, IBV_QPS_RTR, other->qp_num, gids[!i]) == EINVAL); // not yet
		CHECK(modify(q, IBV_QPS_RTS, other->qp_num, gids[!i]) == EINVAL);
		CHECK(modify(q, IBV_QPS_INIT, 0, NULL) == 0);
		CHECK(modify(q, IBV_QPS_RTR, other->qp_num, gids[!i]) == 0);
		CHECK(modify(q, IBV_QPS_RTS, 0, NULL) == 0);
	}
}

static int post(struct end *r, struct end *o, uint64_t id, unsigned n, unsigned flags)
{
	struct ibv_sge s = {.addr = (uintptr_t)r->memory, .length = n, .lkey = r->key};
	struct ibv_send_wr *bad, w = {.wr_id = id, .sg_list = &s, .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .send_flags = flags,
				      .wr.rdma = {.remote_addr = (uintptr_t)o->memory, .rkey = o->key}};
	return ibv_post_send(r->qp, &w, &bad);
}

static struct ibv_wc wait_one(struct end *e)
{
	struct ibv_wc wc;
	for (int i = 0; i < 1000000; i++) {
		int n = ibv_poll_cq(e->cq, 1, &wc);
		CHECK(n >= 0);
		if (n)
			return wc;
		usleep(10);
	}
	CHECK(!"a completion");
	return wc;
}

static int readable(int fd, int ms) { return poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, ms); }

// A place in the send queue is free when a completion behind it was polled.
static void send_queue(void)
{
	struct end r = {0}, o = {0};
	open_end(&o, 0, 8, 4);
	open_end(&r, 1, 8, 4);
	CHECK(post(&r, &o, 0, 8, IBV_SEND_SIGNALED) == EINVAL); // not connected
	connect_ends(&r, &o);
	for (int round = 0; round < 100; round++) {
		for (int i = 0; i < 4; i++)
			CHECK(post(&r, &o, (uint64_t)i, 4096, i == 1 || i == 3 ? IBV_SEND_SIGNALED : 0) == 0);
		CHECK(post(&r, &o, 9, 8, IBV_SEND_SIGNALED) == ENOMEM);
		CHECK(wait_one(&r).wr_id == 1);
		CHECK(post(&r, &o, 4, 8, 0) == 0 && post(&r, &o, 5, 8, IBV_SEND_SIGNALED) == 0);
		CHECK(post(&r, &o, 9, 8, IBV_SEND_SIGNALED) == ENOMEM);
		CHECK(wait_one(&r).wr_id == 3 && wait_one(&r).wr_id == 5);
	}
	// A chain is taken up to the one that is bad.
	struct ibv_send_wr *bad, w[3] = {{.opcode = IBV_WR_RDMA_READ, .next = &w[1], .send_flags = IBV_SEND_SIGNALED}, {.opcode = IBV_WR_SEND, .next = &w[2]}, {.opcode = IBV_WR_RDMA_READ}};
	CHECK(ibv_post_send(r.qp, w, &bad) == EINVAL && bad == &w[1] && wait_one(&r).status == IBV_WC_SUCCESS);
	// Unsignalled reads complete in silence, and all are flushed.
	CHECK(post(&r, &o, 1, 64, 0) == 0 && post(&r, &o, 2, 64, IBV_SEND_SIGNALED) == 0 && wait_one(&r).wr_id == 2);
	CHECK(modify(r.qp, IBV_QPS_ERR, 0, NULL) == 0);
	CHECK(post(&r, &o, 1, 64, 0) == 0 && post(&r, &o, 2, 64, 0) == 0);
	for (uint64_t id = 1; id <= 2; id++) {
		struct ibv_wc wc = wait_one(&r);
		CHECK(wc.wr_id == id && wc.status == IBV_WC_WR_FLUSH_ERR && wc.qp_num == r.qp->qp_num);
	}
	// Reset and connected again it works.
	CHECK(modify(r.qp, IBV_QPS_RESET, 0, NULL) == 0 && modify(o.qp, IBV_QPS_RESET, 0, NULL) == 0);
	connect_ends(&r, &o);
	CHECK(post(&r, &o, 3, 64, IBV_SEND_SIGNALED) == 0 && wait_one(&r).status == IBV_WC_SUCCESS);
	// What is used cannot be closed.
	CHECK(ibv_destroy_cq(r.cq) == EBUSY && ibv_destroy_comp_channel(r.ch) == EBUSY && ibv_dealloc_pd(r.pd) == EBUSY && ibv_close_device(r.c) != 0);
	// A queue pair takes its completions with it.
	CHECK(post(&r, &o, 3, 64, IBV_SEND_SIGNALED) == 0);
	usleep(20000);
	CHECK(ibv_destroy_qp(r.qp) == 0);
	r.qp = NULL;
	struct ibv_wc wc;
	CHECK(ibv_poll_cq(r.cq, 1, &wc) == 0);
	close_end(&r);
	close_end(&o);
}

static void overrun(void)
{
	struct end r = {0}, o = {0};
	open_end(&o, 0, 8, 4);
	open_end(&r, 1, 2, 16);
	connect_ends(&r, &o);
	struct ibv_async_event e;
	CHECK(ibv_get_async_event(r.c, &e) == -1 && errno == EAGAIN);
	for (uint64_t i = 0; i < 3; i++)
		CHECK(post(&r, &o, i, 64, IBV_SEND_SIGNALED) == 0);
	CHECK(readable(r.c->async_fd, 10000) == 1);
	CHECK(ibv_get_async_event(r.c, &e) == 0 && e.event_type == IBV_EVENT_CQ_ERR && e.element.cq == r.cq);
	CHECK(ibv_get_async_event(r.c, &e) == -1 && errno == EAGAIN);
	ibv_ack_async_event(&(struct ibv_async_event){.event_type = IBV_EVENT_CQ_ERR, .element.cq = r.cq});
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr ia;
	CHECK(ibv_query_qp(r.qp, &a, IBV_QP_STATE, &ia) == 0 && a.qp_state == IBV_QPS_ERR);
	close_end(&r);
	close_end(&o);
}

static void *ack_late(void *cq)
{
	usleep(100000);
	ibv_ack_cq_events(cq, 1);
	return NULL;
}

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// One event an arming, none for what is there already.
static void arming(void)
{
	struct end r = {0}, o = {0};
	struct ibv_cq *cq;
	void *context;
	open_end(&o, 0, 8, 4);
	open_end(&r, 1, 8, 4);
	connect_ends(&r, &o);
	CHECK(post(&r, &o, 1, 64, IBV_SEND_SIGNALED) == 0 && readable(r.ch->fd, 30) == 0); // not armed
	CHECK(ibv_req_notify_cq(r.cq, 0) == 0 && readable(r.ch->fd, 30) == 0);             // it came before
	CHECK(ibv_get_cq_event(r.ch, &cq, &context) == -1 && errno == EAGAIN);
	CHECK(post(&r, &o, 2, 64, 0) == 0 && readable(r.ch->fd, 30) == 0); // not signalled
	CHECK(post(&r, &o, 3, 64, IBV_SEND_SIGNALED) == 0 && post(&r, &o, 4, 64, IBV_SEND_SIGNALED) == 0);
	CHECK(wait_one(&r).wr_id == 1 && wait_one(&r).wr_id == 3 && wait_one(&r).wr_id == 4);
	CHECK(readable(r.ch->fd, 10000) == 1 && ibv_get_cq_event(r.ch, &cq, &context) == 0 && cq == r.cq && context == &r);
	CHECK(ibv_get_cq_event(r.ch, &cq, &context) == -1); // one for both
	ibv_ack_cq_events(r.cq, 1);
	CHECK(ibv_req_notify_cq(r.cq, 1) == 0); // errors alone are solicited here
	CHECK(post(&r, &o, 5, 64, IBV_SEND_SIGNALED) == 0 && wait_one(&r).wr_id == 5 && readable(r.ch->fd, 30) == 0);
	CHECK(modify(r.qp, IBV_QPS_ERR, 0, NULL) == 0 && post(&r, &o, 6, 64, 0) == 0);
	CHECK(readable(r.ch->fd, 10000) == 1 && ibv_get_cq_event(r.ch, &cq, &context) == 0);
	// destroy_cq waits for the acknowledgement.
	CHECK(ibv_destroy_qp(r.qp) == 0);
	r.qp = NULL;
	pthread_t t;
	int64_t began = now_ns();
	CHECK(pthread_create(&t, NULL, ack_late, r.cq) == 0);
	CHECK(ibv_destroy_cq(r.cq) == 0 && now_ns() - began > 90000000);
	pthread_join(t, NULL);
	r.cq = ibv_create_cq(r.c, 1, NULL, r.ch, 0);
	CHECK(r.cq);
	close_end(&r);
	close_end(&o);
}

// Registered memory that another thread takes away while reads land in it.
static void *read_on(void *ends)
{
	struct end *r = ((struct end **)ends)[0], *o = ((struct end **)ends)[1];
	for (uint64_t i = 0;; i++) {
		CHECK(post(r, o, i, SIZE, IBV_SEND_SIGNALED) == 0);
		struct ibv_wc wc = wait_one(r);
		if (wc.status != IBV_WC_SUCCESS) {
			CHECK(wc.status == IBV_WC_LOC_PROT_ERR);
			return NULL;
		}
	}
}

static void deregister(void)
{
	struct end r = {0}, o = {0}, *ends[2] = {&r, &o};
	open_end(&o, 0, 8, 4);
	open_end(&r, 1, 8, 4);
	connect_ends(&r, &o);
	memset(o.memory, 1, SIZE);
	struct ibv_mr *other = ibv_reg_mr(r.pd, o.memory, 4096, 0);
	CHECK(other);
	pthread_t t;
	CHECK(pthread_create(&t, NULL, read_on, ends) == 0);
	usleep(50000);
	CHECK(ibv_dereg_mr(r.mr) == 0);
	memset(r.memory, 2, SIZE);
	usleep(50000);
	for (int i = 0; i < SIZE; i++)
		CHECK(r.memory[i] == 2);
	pthread_join(t, NULL);
	r.mr = other;
	close_end(&r);
	close_end(&o);
}

static int64_t thread_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void bench(unsigned bytes, int chain)
{
	enum { DEPTH = 256, ROUNDS = 400 };
	struct end r = {0}, o = {0};
	open_end(&o, 0, DEPTH, 8);
	open_end(&r, 1, DEPTH, DEPTH);
	connect_ends(&r, &o);
	memset(o.memory, 1, SIZE);
	memset(r.memory, 1, SIZE);
	struct ibv_sge s[DEPTH];
	struct ibv_send_wr w[DEPTH], *bad;
	int64_t posting = 0, began = now_ns();
	for (int round = 0; round < ROUNDS; round++) {
		for (int k = 0; k < DEPTH; k += chain) {
			for (int i = k; i < k + chain; i++) {
				uint64_t at = (uint64_t)i * bytes % (SIZE - bytes + 1);
				s[i] = (struct ibv_sge){(uintptr_t)r.memory + at, bytes, r.mr->lkey};
				w[i] = (struct ibv_send_wr){.wr_id = (uint64_t)i, .sg_list = &s[i], .num_sge = 1, .opcode = IBV_WR_RDMA_READ, .next = i + 1 < k + chain ? &w[i + 1] : NULL,
							    .send_flags = i + 1 == DEPTH ? IBV_SEND_SIGNALED : 0, .wr.rdma = {.remote_addr = (uintptr_t)o.memory + at, .rkey = o.mr->rkey}};
			}
			int64_t t = thread_ns();
			CHECK(ibv_post_send(r.qp, &w[k], &bad) == 0);
			posting += thread_ns() - t;
		}
		CHECK(wait_one(&r).status == IBV_WC_SUCCESS);
	}
	int64_t took = now_ns() - began, t = thread_ns();
	for (int i = 0; i < 10000; i++)
		thread_ns();
	int64_t clock = (thread_ns() - t) / 10000;
	double wrs = (double)DEPTH * ROUNDS;
	printf("%u bytes, chains of %d: %.0f ns a work request to post, %.2f GB/s\n", bytes, chain, ((double)posting - (double)clock * wrs / chain) / wrs, wrs * bytes / (double)took);
	close_end(&r);
	close_end(&o);
}

int main(int argc, char **argv)
{
	if (argc > 1 && !strcmp(argv[1], "bench")) {
		for (unsigned bytes = 4096; bytes <= 1 << 20; bytes *= 4)
			for (int chain = 1; chain <= 64; chain *= 8)
				bench(bytes, chain);
		return 0;
	}
	if (argc > 1 && !strcmp(argv[1], "unacknowledged")) {
		struct end r = {0}, o = {0};
		struct ibv_cq *cq;
		void *context;
		open_end(&o, 0, 8, 4);
		open_end(&r, 1, 8, 4);
		connect_ends(&r, &o);
		CHECK(ibv_req_notify_cq(r.cq, 0) == 0 && post(&r, &o, 1, 64, IBV_SEND_SIGNALED) == 0 && readable(r.ch->fd, 10000) == 1);
		CHECK(ibv_get_cq_event(r.ch, &cq, &context) == 0);
		close_end(&r); // does not return
		return 0;
	}
	send_queue();
	overrun();
	arming();
	deregister();
	CHECK(!ibv_wc_status_str(999) == 0);
	return 0;
}
