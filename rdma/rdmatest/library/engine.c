// The engine of an open device: one thread, which carries out its reads.
#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
	NEAR = 60000,          // ns: no use to sleep for that long
	LINGER = 20000,        // ns that the engine looks for more work before it sleeps
	AGAIN = 1000000,       // ns until a peer that does not answer is tried again
	PIECE = 1 << 20,       // bytes copied at a time
	PASS = 32,             // reads of a queue pair before the next has its turn
	UNREACHABLE = 255,     // no wc status
};

int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void doorbell(struct shared_context_slot *s)
{
	__atomic_fetch_add(&s->doorbell, 1, __ATOMIC_SEQ_CST);
	syscall(SYS_futex, &s->doorbell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void engine_wake(struct context *c)
{
	if (__atomic_load_n(&c->sleeping, __ATOMIC_SEQ_CST))
		doorbell(c->s);
}

// Puts a queue pair on its way into the engine's list.
void engine_queue(struct qp *q)
{
	struct context *c = q->c;
	if (!__atomic_exchange_n(&q->queued, 1, __ATOMIC_SEQ_CST)) {
		struct qp *first = get(c->incoming);
		do
			q->next = first;
		while (!__atomic_compare_exchange_n(&c->incoming, &first, q, false, __ATOMIC_SEQ_CST, __ATOMIC_ACQUIRE));
	}
	engine_wake(c);
}

// Returns when the engine will touch q no more: nothing of it lands after.
void engine_drop(struct qp *q)
{
	struct context *c = q->c;
	put(q->leaving, true);
	engine_queue(q);
	pthread_mutex_lock(&c->leave);
	while (get(q->leaving)) {
		// Of several that wait the libc of before 2.41 may wake too few.
		struct timespec t;
		clock_gettime(CLOCK_REALTIME, &t);
		t.tv_sec++;
		pthread_cond_timedwait(&c->left, &c->leave, &t);
	}
	pthread_mutex_unlock(&c->leave);
}

static uint64_t random64(struct context *c)
{
	uint64_t x = c->random;
	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return c->random = x;
}

static bool chance(struct context *c, uint32_t per_mille) { return per_mille && random64(c) % 1000 < per_mille; }

// ---- who answers ---------------------------------------------------------

static bool same(const void *a, const void *b) { return memcmp(a, b, 16) == 0; }

static bool has_gid(const struct shared_device *d, const uint8_t *gid)
{
	for (int i = 0; i < (int)MAX_GIDS; i++)
		if (same(d->gid[i], gid))
			return true;
	return false;
}

// Whether the process of a context still is who it was: it was when its
// descriptor was opened, and with look it has not ended since.
static bool here(struct context *c, uint32_t slot, uint32_t life, bool look)
{
	struct shared_context_slot *s = &c->w->control->context[slot];
	struct peer *p = &c->peers[slot];
	if (p->life != life) {
		if (p->life && p->pidfd >= 0)
			close(p->pidfd);
		p->life = life;
		uint32_t pid = get(s->pid);
		p->pidfd = -1;
		if (pid == (uint32_t)getpid())
			p->pidfd = -2;
		else if (pid && (p->pidfd = (int)syscall(SYS_pidfd_open, pid, 0)) >= 0 && process_start(pid) != s->start) {
			close(p->pidfd);
			p->pidfd = -1;
		}
	}
	if (p->pidfd == -1)
		return false;
	if (s->generation == life && get(s->pid)) {
		if (p->pidfd == -2 || !look)
			return true;
		struct pollfd f = {.fd = p->pidfd, .events = POLLIN};
		if (poll(&f, 1, 0) == 0)
			return true;
	}
	if (p->pidfd >= 0) // of a process, or a device of it, that has ended: nobody asks again
		close(p->pidfd);
	p->pidfd = -1;
	return false;
}

// Lets go of the processes that have ended.
static void forget(struct context *c)
{
	for (uint32_t i = 0; i < MAX_CONTEXTS; i++)
		if (c->peers[i].life && c->peers[i].pidfd >= 0)
			here(c, i, c->peers[i].life, true);
}

// The queue pair at the other end, if packets reach it and it takes them.
static struct shared_queue_pair *answering(struct qp *q, uint32_t *num)
{
	struct context *c = q->c;
	struct shared_control *m = c->w->control;
	struct shared_queue_pair *p = qp_of(c->w, *num = q->s->dest_qpn);
	if (!p || p->context >= MAX_CONTEXTS)
		return NULL;
	uint32_t state = get(p->state);
	struct shared_context_slot *owner = &m->context[p->context];
	struct shared_device *mine = &m->device[c->d->index], *theirs = &m->device[owner->device % MAX_DEVICES];
	if ((state != IBV_QPS_RTR && state != IBV_QPS_RTS) || p->dest_qpn != q->s->num || p->recv_psn != q->s->send_psn)
		return NULL;
	if (get(mine->port_state) != IBV_PORT_ACTIVE || get(theirs->port_state) != IBV_PORT_ACTIVE || get(theirs->fatal))
		return NULL;
	if (q->s->global) {
		if (!p->global || !has_gid(theirs, q->s->dest_gid) || !same(p->dest_gid, mine->gid[q->s->gid_index % MAX_GIDS]))
			return NULL;
	} else if (p->global || q->s->dest_lid != theirs->lid || p->dest_lid != mine->lid)
		return NULL;
	return owner->generation == p->context_life ? p : NULL;
}

// ---- moving bytes --------------------------------------------------------

static bool inside(const struct shared_region *r, uint64_t addr, uint64_t length)
{
	return addr >= r->iova && length <= r->length && addr - r->iova <= r->length - length;
}

static uint8_t copy(struct qp *q, const struct iovec *local, int n, uint32_t pid, uint64_t remote, uint64_t length)
{
	uint64_t done = 0, skip = 0;
	int i = 0;
	while (done < length) {
		if (get(q->leaving))
			return IBV_WC_WR_FLUSH_ERR;
		struct iovec to[64], from = {.iov_base = (void *)(uintptr_t)(remote + done)};
		uint64_t want = length - done < PIECE ? length - done : PIECE, sum = 0;
		int k = 0;
		for (int j = i; j < n && sum < want && k < 64; j++, k++) {
			uint64_t off = j == i ? skip : 0, len = local[j].iov_len - off;
			to[k] = (struct iovec){(char *)local[j].iov_base + off, len < want - sum ? len : want - sum};
			sum += to[k].iov_len;
		}
		from.iov_len = sum;
		ssize_t got = process_vm_readv((pid_t)pid, to, (unsigned long)k, &from, 1, 0);
		if (got <= 0) {
			if (got < 0 && errno == EINTR)
				continue;
			if (got < 0 && errno == ESRCH)
				return UNREACHABLE;
			// Whose memory was it?
			char byte;
			struct iovec probe = {&byte, 1}, at = {from.iov_base, 1};
			return process_vm_readv((pid_t)pid, &probe, 1, &at, 1, 0) == 1 ? IBV_WC_LOC_PROT_ERR : IBV_WC_REM_OP_ERR;
		}
		done += (uint64_t)got;
		skip += (uint64_t)got;
		while (i < n && skip >= local[i].iov_len)
			skip -= local[i++].iov_len;
	}
	return IBV_WC_SUCCESS;
}

// Makes the byte that FlipByte names a wrong one, if it is among these.
static void flip(struct context *c, const struct iovec *local, int n, uint64_t length)
{
	struct shared_faults *f = &c->w->control->faults;
	uint64_t at = get(f->flip_byte), before = count(f->landed, length);
	if (!at || at <= before || at > before + length)
		return;
	uint64_t off = at - before - 1;
	for (int i = 0; i < n; off -= local[i++].iov_len)
		if (off < local[i].iov_len) {
			char byte;
			struct iovec mine = {&byte, 1}, there = {(char *)local[i].iov_base + off, 1};
			if (process_vm_readv(getpid(), &mine, 1, &there, 1, 0) == 1) {
				byte ^= 1;
				process_vm_writev(getpid(), &mine, 1, &there, 1, 0);
			}
			return;
		}
}

// Carries out one read: its status, or UNREACHABLE. Both sides' rights are
// looked at before the copy and the serving side's once more after it: what
// was taken away meanwhile has given no answer.
static uint8_t land_locked(struct qp *q, struct wqe *w)
{
	struct context *c = q->c;
	struct shared_control *m = c->w->control;
	struct ibv_sge *sge = &q->sge[(size_t)(w - q->sq) * q->max_sge];
	struct iovec local[64];
	if (w->length > m->device[c->d->index].max_msg)
		return IBV_WC_LOC_LEN_ERR;
	for (int i = 0; i < w->nsge; i++) {
		struct shared_region *r = region_of(c->w, sge[i].lkey);
		if (!r || r->context != c->slot || r->context_life != c->life || r->pd != q->s->pd || !(r->access & IBV_ACCESS_LOCAL_WRITE) || !inside(r, sge[i].addr, sge[i].length))
			return IBV_WC_LOC_PROT_ERR;
		local[i] = (struct iovec){(void *)(uintptr_t)(r->addr + (sge[i].addr - r->iova)), sge[i].length};
	}
	uint32_t num;
	struct shared_queue_pair *p = w->lost ? NULL : answering(q, &num);
	if (!p)
		return UNREACHABLE;
	uint32_t slot = p->context, life = p->context_life;
	struct shared_context_slot *owner = &m->context[slot];
	uint32_t pid = get(owner->pid);
	if (!pid || !here(c, slot, life, false))
		return UNREACHABLE;
	q->served = slot;
	q->served_life = life;
	uint8_t status = IBV_WC_SUCCESS;
	struct shared_region *r = NULL;
	uint64_t at = 0;
	if (!(p->access & IBV_ACCESS_REMOTE_READ) || q->begun - q->done > p->reads_served)
		status = IBV_WC_REM_INV_REQ_ERR;
	else if (w->length) {
		r = region_of(c->w, w->rkey);
		if (!r || r->context != slot || r->context_life != life || r->pd != p->pd || !(r->access & IBV_ACCESS_REMOTE_READ) || !inside(r, w->raddr, w->length)) {
			status = IBV_WC_REM_ACCESS_ERR;
			r = NULL;
		} else {
			at = r->addr + (w->raddr - r->iova);
			status = copy(q, local, w->nsge, pid, at, w->length);
		}
	}
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (status == UNREACHABLE || get(p->num) != num)
		return UNREACHABLE;
	uint32_t state = get(p->state);
	if (state != IBV_QPS_RTR && state != IBV_QPS_RTS)
		return UNREACHABLE;
	if (r && get(r->key) != w->rkey)
		status = IBV_WC_REM_ACCESS_ERR;
	if (status == IBV_WC_REM_ACCESS_ERR || status == IBV_WC_REM_INV_REQ_ERR || status == IBV_WC_REM_OP_ERR) {
		// The responder says no, and is broken by it as well.
		put(p->state, IBV_QPS_ERR);
		world_event(c->w, owner->device % MAX_DEVICES, IBV_EVENT_QP_ACCESS_ERR, num);
	}
	if (status == IBV_WC_SUCCESS) {
		flip(c, local, w->nsge, w->length);
		count(c->s->total[TOTAL_READS], 1);
		count(c->s->total[TOTAL_READ_BYTES], w->length);
		count(owner->total[TOTAL_SERVED_READS], 1);
		count(owner->total[TOTAL_SERVED_BYTES], w->length);
	}
	return status;
}

// No region of this process goes while it is written to.
static uint8_t land(struct qp *q, struct wqe *w)
{
	pthread_rwlock_rdlock(&q->c->landing);
	uint8_t status = land_locked(q, w);
	pthread_rwlock_unlock(&q->c->landing);
	return status;
}

// ---- one queue pair --------------------------------------------------------

static struct wqe *at(struct qp *q, uint64_t seq) { return &q->sq[seq % q->depth]; }

static void complete(struct qp *q, uint8_t status)
{
	struct wqe *w = at(q, q->done);
	if (status != IBV_WC_SUCCESS)
		count(q->c->s->total[TOTAL_ERRORS], 1);
	if (w->signaled || status != IBV_WC_SUCCESS) {
		struct cqe e = {
			.wc = {.wr_id = w->wr_id, .status = status, .opcode = IBV_WC_RDMA_READ, .byte_len = (uint32_t)w->length, .qp_num = q->v.qp_num,
			       .vendor_err = status == IBV_WC_SUCCESS ? 0 : 0x80u + status},
			.qp = q,
			.seq = q->done,
		};
		count(q->c->s->total[TOTAL_CQES], 1);
		q->done++;
		cq_push((struct cq *)q->v.send_cq, &e);
		return;
	}
	q->done++;
}

// When the wire of both devices has carried so many bytes.
static int64_t wire(struct qp *q, int64_t now, uint64_t length, uint64_t bandwidth)
{
	struct shared_control *m = q->c->w->control;
	int64_t ns = (int64_t)((double)length * 1e9 / (double)bandwidth), last = now;
	struct shared_queue_pair *p = qp_of(q->c->w, q->s->dest_qpn);
	int64_t *wires[2] = {&m->device[q->c->d->index].in_free, NULL};
	if (p && p->context < MAX_CONTEXTS)
		wires[1] = &m->device[m->context[p->context].device % MAX_DEVICES].out_free;
	for (int i = 0; i < 2 && wires[i]; i++) {
		int64_t free = get(*wires[i]), end;
		do
			end = (free > now ? free : now) + ns;
		while (!__atomic_compare_exchange_n(wires[i], &free, end, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
		if (end > last)
			last = end;
	}
	return last;
}

static void begin(struct qp *q, int64_t now, const struct shared_faults *f)
{
	struct context *c = q->c;
	struct wqe *w = at(q, q->begun);
	uint64_t bandwidth = get(f->bandwidth), delay = get(f->delay), jitter = get(f->jitter), nth = get(f->fail_nth);
	uint64_t n = count(((struct shared_faults *)(uintptr_t)f)->begun, 1) + 1;
	w->due = now;
	if (bandwidth)
		w->due = wire(q, now, w->length, bandwidth);
	w->due += (int64_t)(delay + (jitter ? random64(c) % (jitter + 1) : 0));
	if (q->begun > q->done && !get(f->reorder) && at(q, q->begun - 1)->due > w->due)
		w->due = at(q, q->begun - 1)->due; // answers come in order
	w->landed = false;
	w->lost = chance(c, get(f->lose));
	w->forced = (nth && n == nth) || chance(c, get(f->fail)) ? (uint8_t)get(f->fail_status) : 0;
	count(c->s->total[TOTAL_WRS], 1);
	q->begun++;
}

static void fail(struct qp *q)
{
	uint32_t rts = IBV_QPS_RTS;
	__atomic_compare_exchange_n(&q->s->state, &rts, IBV_QPS_ERR, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// Ends what is left of a queue pair in the error state; when to come again.
static int64_t flush(struct qp *q, int64_t now, uint64_t posted, const struct shared_faults *f)
{
	int64_t late = (int64_t)get(f->late_dma);
	if (!q->failed_at)
		q->failed_at = now;
	if (late && q->begun > q->done) {
		if (now < q->failed_at + late)
			return q->failed_at + late;
		for (uint64_t s = q->done; s < q->begun; s++)
			if (!at(q, s)->landed)
				land(q, at(q, s));
		q->begun = q->done; // once
	}
	if (get(f->no_flush))
		return q->done < posted ? now + AGAIN : NEVER;
	while (q->done < posted)
		complete(q, IBV_WC_WR_FLUSH_ERR);
	q->begun = q->done;
	return NEVER;
}

// Moves a queue pair forward; when to come again.
static int64_t step(struct qp *q, int64_t now)
{
	struct context *c = q->c;
	struct shared_faults *f = &c->w->control->faults;
	uint64_t posted = get(q->posted);
	uint32_t state = get(c->w->control->device[c->d->index].fatal) ? IBV_QPS_ERR : get(q->s->state);
	if (state == IBV_QPS_ERR)
		return flush(q, now, posted, f);
	q->failed_at = 0;
	if (state != IBV_QPS_RTS) { // reset from outside: all of it is forgotten
		q->done = q->begun = posted;
		put(q->freed, posted);
		return NEVER;
	}
	uint32_t most = q->s->reads_initiated, cap = get(f->max_reads);
	if (cap && cap < most)
		most = cap;
	if (!most && q->done < posted) {
		fail(q);
		complete(q, IBV_WC_LOC_QP_OP_ERR);
		q->begun = q->done;
		return 0;
	}
	for (int pass = 0; pass < PASS;) {
		while (q->begun < posted && q->begun - q->done < most)
			begin(q, now, f);
		if (q->done == q->begun)
			return q->begun < posted ? 0 : NEVER;
		if (get(f->stuck))
			return now + AGAIN;
		uint64_t order[256];
		int n = 0;
		int64_t due = NEVER;
		for (uint64_t s = q->done; s < q->begun && n < 256; s++)
			if (!at(q, s)->landed)
				order[n++] = s;
		if (get(f->reorder))
			for (int i = n - 1; i > 0; i--) {
				int j = (int)(random64(c) % (uint64_t)(i + 1));
				uint64_t t = order[i];
				order[i] = order[j];
				order[j] = t;
			}
		int landed = 0;
		for (int i = 0; i < n; i++, pass++) {
			struct wqe *w = at(q, order[i]);
			if (w->due > now) {
				if (w->due < due)
					due = w->due;
				continue;
			}
			uint8_t status = w->forced ? w->forced : land(q, w);
			if (status == UNREACHABLE) {
				if (!q->silent_since)
					q->silent_since = now;
				uint64_t window = get(f->retry_window);
				int64_t wait = window ? (int64_t)window : q->window;
				if (wait == NEVER || now - q->silent_since < wait) {
					int64_t again = wait == NEVER || now + AGAIN < q->silent_since + wait ? now + AGAIN : q->silent_since + wait;
					if (again < due)
						due = again;
					break;
				}
				status = IBV_WC_RETRY_EXC_ERR;
			} else
				q->silent_since = 0;
			w->landed = true;
			w->status = status;
			landed++;
			if (status != IBV_WC_SUCCESS || get(q->leaving))
				break;
		}
		// Was it the same process all the while? A number may be given again.
		if (landed && q->served_life && !here(c, q->served, q->served_life, true))
			for (uint64_t s = q->done; s < q->begun; s++)
				if (at(q, s)->status == IBV_WC_SUCCESS)
					at(q, s)->landed = false;
		bool moved = false;
		while (q->done < q->begun && at(q, q->done)->landed && !get(q->leaving)) {
			uint8_t status = at(q, q->done)->status;
			if (status != IBV_WC_SUCCESS) {
				fail(q);
				complete(q, status);
				return 0;
			}
			complete(q, status);
			moved = true;
		}
		if (!moved)
			return due;
		posted = get(q->posted);
	}
	return 0;
}

// ---- the thread ----------------------------------------------------------------

static void look_around(struct context *c)
{
	struct shared_faults *f = &c->w->control->faults;
	if (c->faults_set != get(f->set)) {
		c->faults_set = get(f->set);
		c->random = (get(f->seed) + 1) * 0x9e3779b97f4a7c15ull ^ ((uint64_t)c->slot + 1) * 0xbf58476d1ce4e5b9ull;
		if (!c->random)
			c->random = 1;
	}
	if (c->events_seen != get(c->w->control->device[c->d->index].events))
		deliver(c);
}

// Takes what came in. The list is in no particular order.
static void take(struct context *c)
{
	struct qp *q = __atomic_exchange_n(&c->incoming, NULL, __ATOMIC_SEQ_CST), *next;
	for (; q; q = next) {
		next = q->next;
		q->next = c->run;
		c->run = q;
	}
}

void *engine(void *context)
{
	struct context *c = context;
	int64_t idle_since = 0;
	prctl(PR_SET_NAME, "verbs-engine", 0, 0, 0);
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	for (;;) {
		uint32_t bell = get(c->s->doorbell);
		int64_t now = now_ns(), when = NEVER;
		look_around(c);
		take(c);
		for (struct qp **at = &c->run; *at;) {
			struct qp *q = *at;
			int64_t again = get(q->leaving) ? NEVER : step(q, now);
			if (get(q->leaving)) {
				*at = q->next;
				pthread_mutex_lock(&c->leave);
				put(q->leaving, false);
				pthread_cond_broadcast(&c->left);
				pthread_mutex_unlock(&c->leave);
				forget(c);
				continue;
			}
			if (again < when)
				when = again;
			if (again == NEVER) {
				// What is posted from here on queues it again, and so does who
				// wants it to go.
				*at = q->next;
				__atomic_store_n(&q->queued, 0, __ATOMIC_SEQ_CST);
				if (__atomic_load_n(&q->posted, __ATOMIC_SEQ_CST) != q->done || __atomic_load_n(&q->leaving, __ATOMIC_SEQ_CST))
					engine_queue(q);
				continue;
			}
			at = &q->next;
		}
		if (get(c->closing))
			return NULL;
		if (when == 0 || get(c->incoming)) {
			idle_since = 0;
			continue;
		}
		now = now_ns();
		if (when != NEVER && when - now < NEAR) {
			if (when > now)
				sched_yield();
			continue;
		}
		if (when == NEVER) {
			if (!idle_since)
				idle_since = now;
			if (now - idle_since < LINGER) {
				sched_yield();
				continue;
			}
		}
		__atomic_store_n(&c->sleeping, 1, __ATOMIC_SEQ_CST);
		if (!__atomic_load_n(&c->incoming, __ATOMIC_SEQ_CST) && !get(c->closing)) {
			int64_t ns = when == NEVER ? 0 : when - now - NEAR / 2;
			struct timespec t = {ns / 1000000000, ns % 1000000000};
			syscall(SYS_futex, &c->s->doorbell, FUTEX_WAIT, bell, when == NEVER ? NULL : &t, NULL, 0);
		}
		__atomic_store_n(&c->sleeping, 0, __ATOMIC_SEQ_CST);
	}
}
