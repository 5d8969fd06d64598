//go:build linux && cgo && rdma && (amd64 || arm64)

#include "verbs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- life ----

struct rd_qp *rd_qp_new(struct ibv_pd *pd, const struct rd_options *o, int *err, const char **what)
{
	const char *left;
	struct rd_qp *q = calloc(1, sizeof *q);
	*what = "allocate queue pair";
	*err = ENOMEM;
	if (!q)
		return NULL;
	q->o = *o;
	q->wr = calloc(o->chain, sizeof *q->wr);
	q->sge = calloc((size_t)o->chain * o->max_sge, sizeof *q->sge);
	q->covers = calloc(o->depth, sizeof *q->covers);
	if (!q->wr || !q->sge || !q->covers)
		goto fail;
	if (o->events) {
		*what = "create completion channel";
		if (!(q->ch = rd_create_channel(pd->context, err)))
			goto fail;
	}
	// A flush completes every outstanding request, whether it was to report
	// itself or not: the completion queue holds as many as the send queue, and
	// both of them the marker of rd_drain.
	*what = "create completion queue";
	if (!(q->cq = rd_create_cq(pd->context, (int)o->depth + 2, q->ch, err)))
		goto fail;
	*what = "create queue pair";
	struct ibv_qp_init_attr a = {
		.send_cq = q->cq,
		.recv_cq = q->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = o->depth + 1, .max_recv_wr = 1, .max_send_sge = o->max_sge, .max_recv_sge = 1},
	};
	if (!(q->qp = rd_create_qp(pd, &a, err)))
		goto fail;
	return q;
fail:
	rd_qp_free(q, &left);
	return NULL;
}

int rd_qp_free(struct rd_qp *q, const char **what)
{
	int e;
	*what = "destroy queue pair";
	if (q->qp && (e = rd_destroy_qp(q->qp)))
		return e;
	q->qp = NULL;
	*what = "destroy completion queue";
	if (q->cq) {
		if (q->unacked) // it would be waited for, for ever
			rd_ack_cq_events(q->cq, q->unacked);
		q->unacked = 0;
		if ((e = rd_destroy_cq(q->cq)))
			return e;
		q->cq = NULL;
	}
	*what = "destroy completion channel";
	if (q->ch && (e = rd_destroy_channel(q->ch)))
		return e;
	free(q->wr);
	free(q->sge);
	free(q->covers);
	free(q);
	return 0;
}

int rd_qp_fd(struct rd_qp *q) { return q->ch ? q->ch->fd : -1; }

int rd_qp_state(struct rd_qp *q)
{
	struct ibv_qp_attr a;
	int e = rd_query_qp(q->qp, &a, IBV_QP_STATE);
	return e ? -e : (int)a.qp_state;
}

int rd_qp_fail(struct rd_qp *q)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_ERR};
	return rd_modify_qp(q->qp, &a, IBV_QP_STATE);
}

int rd_qp_connect(struct rd_qp *q, const struct rd_path *p, const char **what)
{
	struct ibv_qp_attr init = {
		.qp_state = IBV_QPS_INIT,
		.pkey_index = p->pkey_index,
		.port_num = p->port,
		.qp_access_flags = p->access,
	};
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = p->mtu,
		.dest_qp_num = p->dest_qpn,
		.rq_psn = p->rq_psn,
		.max_dest_rd_atomic = p->dest_rd_atomic,
		.min_rnr_timer = p->min_rnr_timer,
		.ah_attr = {
			.dlid = p->dlid,
			.sl = p->sl,
			.port_num = p->port,
			.is_global = p->is_global,
			.grh = {.sgid_index = p->gid_index, .hop_limit = p->hop_limit, .traffic_class = p->traffic_class, .flow_label = p->flow_label},
		},
	};
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.timeout = p->timeout,
		.retry_cnt = p->retry_cnt,
		.rnr_retry = p->rnr_retry,
		.sq_psn = p->sq_psn,
		.max_rd_atomic = p->rd_atomic,
	};
	memcpy(rtr.ah_attr.grh.dgid.raw, p->dgid, sizeof p->dgid);
	int e;
	*what = "queue pair to INIT";
	if ((e = rd_modify_qp(q->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)))
		return e;
	*what = "queue pair to RTR";
	if ((e = rd_modify_qp(q->qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)))
		return e;
	*what = "queue pair to RTS";
	return rd_modify_qp(q->qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
}

// ---- batches ----

#define MARKER UINT64_MAX
// So much is read at most without a completion: progress shows on slow links.
#define SIGNAL_BYTES (8u << 20)

static int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int failed(struct rd_batch *b, uint32_t verb, int err)
{
	b->verb = verb;
	b->err = err;
	return -1;
}

// silent: of what is outstanding nothing will report itself.
static int silent(const struct rd_qp *q) { return q->next_signal <= q->tail; }

// build makes request k of a chain of what comes next in the batch, at op *i
// and *offset bytes into it, and moves those on.
static uint32_t build(struct rd_qp *q, uint32_t k, const struct rd_op *ops, const struct rd_batch *b, uint32_t *i, uint32_t *offset)
{
	const struct rd_op *op = &ops[*i];
	struct ibv_send_wr *w = &q->wr[k];
	struct ibv_sge *s = &q->sge[k * q->o.max_sge];
	struct rd_covered *c = &q->covers[(q->head + k) % q->o.depth];
	uint32_t total = op->len - *offset, pieces = 1, max = q->o.max_msg;
	if (total > max)
		total = max;
	*s = (struct ibv_sge){.addr = op->local + *offset, .length = total, .lkey = op->lkey};
	*w = (struct ibv_send_wr){
		.wr_id = q->head + k,
		.sg_list = s,
		.opcode = IBV_WR_RDMA_READ,
		.wr.rdma = {.remote_addr = op->remote + *offset, .rkey = op->rkey},
	};
	c->first = *i;
	*offset += total;
	if (*offset == op->len) {
		*offset = 0;
		++*i;
		// What lies one after the other on the other side is one read; on
		// this side it may be one piece or several.
		for (; !b->single && *i < b->n; ++*i) {
			const struct rd_op *next = &ops[*i];
			if (next->rkey != op->rkey || next->remote != w->wr.rdma.remote_addr + total || next->len > max - total)
				break;
			if (s->lkey == next->lkey && s->addr + s->length == next->local)
				s->length += next->len;
			else if (pieces < q->o.max_sge) {
				*++s = (struct ibv_sge){.addr = next->local, .length = next->len, .lkey = next->lkey};
				pieces++;
			} else
				break;
			total += next->len;
		}
	}
	w->num_sge = (int)pieces;
	c->end = *i;
	c->rest = *offset;
	return total;
}

// post fills the send queue, a whole chain at a time. 0, or -1 with b->err.
static int post(struct rd_qp *q, const struct rd_op *ops, struct rd_batch *b)
{
	while (b->posted < b->n && q->head - q->tail + q->o.chain <= q->o.depth) {
		uint32_t i = b->posted, offset = b->offset, since = q->since, bytes = q->since_bytes, k = 0;
		for (; k < q->o.chain && i < b->n; k++) {
			struct ibv_send_wr *w = &q->wr[k];
			bytes += build(q, k, ops, b, &i, &offset);
			if (k)
				w[-1].next = w;
			if (++since >= q->o.signal_every || bytes >= SIGNAL_BYTES || i == b->n) {
				w->send_flags = IBV_SEND_SIGNALED;
				since = bytes = 0;
			}
		}
		struct ibv_send_wr *bad = NULL;
		int e = ibv_post_send(q->qp, q->wr, &bad);
		b->posts++;
		if (e) { // what lies before bad was taken
			k = bad > q->wr && bad < q->wr + k ? (uint32_t)(bad - q->wr) : 0;
			since = q->o.signal_every; // the next one reports itself
			bytes = 0;
		}
		for (uint32_t j = k; j-- > 0;)
			if (q->wr[j].send_flags & IBV_SEND_SIGNALED) {
				q->next_signal = q->head + j + 1;
				break;
			}
		if (k) {
			const struct rd_covered *last = &q->covers[(q->head + k - 1) % q->o.depth];
			b->posted = last->end;
			b->offset = last->rest;
		}
		q->head += k;
		q->since = since;
		q->since_bytes = bytes;
		b->wrs += k;
		if (e) {
			if (e < 0)
				e = errno;
			failed(b, RD_POST_SEND, e);
			if (e != ENOMEM || q->head == q->tail)
				return -1;
			q->short_of = 1; // of memory; what is outstanding holds some
			return 0;
		}
		b->err = 0;
	}
	return 0;
}

// reap retires up to 32 completions: how many, or -1 with b->err.
static int reap(struct rd_qp *q, struct rd_batch *b)
{
	struct ibv_wc wc[32];
	int n = ibv_poll_cq(q->cq, 32, wc);
	if (n < 0)
		return failed(b, RD_POLL_CQ, EIO);
	for (int i = 0; i < n; i++) {
		if (wc[i].wr_id == MARKER) {
			q->marker = 2;
			q->tail = q->head;
			continue;
		}
		if (wc[i].wr_id - q->tail >= q->head - q->tail) {
			if (q->failing)
				continue;
			return failed(b, RD_UNKNOWN_WR, EPROTO);
		}
		// Requests end in order: all before this one have ended well, or
		// would have reported that they did not.
		const struct rd_covered *c = &q->covers[wc[i].wr_id % q->o.depth];
		q->tail = wc[i].wr_id + 1;
		if (wc[i].status == IBV_WC_SUCCESS) {
			b->done = c->end;
			continue;
		}
		if (b->status == 0)
			b->done = c->first;
		if (b->status == 0 || (b->status == IBV_WC_WR_FLUSH_ERR && wc[i].status != IBV_WC_WR_FLUSH_ERR)) {
			b->status = wc[i].status;
			b->vendor = wc[i].vendor_err;
			b->bad_op = c->first;
		}
	}
	b->cqes += (uint32_t)n;
	if (n)
		q->short_of = 0;
	return n;
}

// take_event looks for the event of a notification that was asked for. 0, or
// -1 with b->err.
static int take_event(struct rd_qp *q, struct rd_batch *b)
{
	int r = q->armed ? rd_take_cq_event(q->ch) : 0;
	if (r < 0)
		return failed(b, RD_GET_EVENT, -r);
	if (r > 0) {
		q->armed = 0;
		// This takes a lock, so it is done for many at once.
		if (++q->unacked == 64) {
			rd_ack_cq_events(q->cq, q->unacked);
			q->unacked = 0;
		}
	}
	return 0;
}

static int arm(struct rd_qp *q, struct rd_batch *b)
{
	int e = ibv_req_notify_cq(q->cq, 0);
	if (e)
		return failed(b, RD_REQ_NOTIFY, e < 0 ? errno : e);
	q->armed = 1;
	return 0;
}

int rd_step(struct rd_qp *q, const struct rd_op *ops, struct rd_batch *b, const uint32_t *stop, int64_t spin_ns)
{
	int64_t until = 0;
	int reaped = 0; // since the event was looked for
	if (take_event(q, b))
		return RD_FAILED;
	if (silent(q))
		q->short_of = 0; // nothing would end it: it is tried again
	for (;;) {
		if (__atomic_load_n(stop, __ATOMIC_ACQUIRE))
			return RD_STOP;
		if (!q->short_of && post(q, ops, b))
			return RD_FAILED;
		int n = reap(q, b);
		if (n < 0 || b->status)
			return RD_FAILED;
		if (b->done == b->n && q->head == q->tail)
			return RD_DONE;
		if (n > 0) { // there may be room again
			until = 0;
			reaped = 1;
			continue;
		}
		if (q->short_of && silent(q))
			return RD_RETRY;
		if (spin_ns > 0) {
			int64_t now = now_ns();
			if (until == 0)
				until = now + spin_ns;
			if (now < until)
				continue;
		}
		if (!q->ch)
			return RD_WAIT;
		// An event of what was reaped meanwhile would only wake the caller
		// for nothing.
		if (reaped && take_event(q, b))
			return RD_FAILED;
		reaped = 0;
		if (q->armed)
			return RD_WAIT;
		if (arm(q, b)) // and look once more: it may have come in between
			return RD_FAILED;
	}
}

int rd_drain(struct rd_qp *q, struct rd_batch *b)
{
	int e;
	if (!q->failing) {
		if ((e = rd_qp_fail(q))) {
			failed(b, RD_POST_SEND, e);
			return RD_FAILED;
		}
		q->failing = 1;
	}
	if (take_event(q, b))
		return RD_FAILED;
	for (;;) {
		// Counting completions is not enough: of a chain that was taken in
		// part, requests that do not report themselves may have ended well.
		// Requests end in order, so one more, flushed at once, comes after
		// all others.
		if (q->marker == 0) {
			struct ibv_send_wr *bad, m = {.wr_id = MARKER, .opcode = IBV_WR_RDMA_READ, .send_flags = IBV_SEND_SIGNALED};
			q->marker = ibv_post_send(q->qp, &m, &bad) == 0;
		}
		int n = reap(q, b);
		if (n < 0)
			return RD_FAILED;
		if (q->marker != 1 && q->head == q->tail)
			return RD_DONE;
		if (n > 0)
			continue;
		if (q->marker == 0)
			return RD_RETRY;
		if (!q->ch || q->armed)
			return RD_WAIT;
		if (arm(q, b))
			return RD_FAILED;
	}
}
