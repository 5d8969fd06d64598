// The verbs: devices, protection domains, regions, queue pairs, and posting.
#define _GNU_SOURCE
#include "double.h"

#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct shared_device *shared(const struct device *d) { return &d->w->control->device[d->index]; }

// ---- devices ---------------------------------------------------------------

static pthread_mutex_t devices_lock = PTHREAD_MUTEX_INITIALIZER; // guards uses of devices

static void device_release(struct device *d)
{
	pthread_mutex_lock(&devices_lock);
	int uses = --d->uses;
	pthread_mutex_unlock(&devices_lock);
	if (uses)
		return;
	world_release(d->w);
	free(d);
}

struct ibv_device **ibv_get_device_list(int *n)
{
	struct world *w = world_open();
	uint32_t devices = w ? w->control->devices : 0;
	if (n)
		*n = 0;
	if (!w && errno != ENODEV)
		return NULL;
	struct ibv_device **list = calloc(devices + 1, sizeof *list);
	for (uint32_t i = 0; list && i < devices; i++) {
		struct device *d = calloc(1, sizeof *d);
		struct world *again = d ? world_open() : NULL;
		if (!again || again != w) {
			if (again)
				world_release(again);
			free(d);
			ibv_free_device_list(list);
			list = NULL;
			errno = ENOMEM;
			break;
		}
		d->w = w;
		d->index = i;
		d->uses = 1;
		d->v.node_type = IBV_NODE_CA;
		d->v.transport_type = IBV_TRANSPORT_IB;
		memcpy(d->v.name, w->control->device[i].name, sizeof d->v.name);
		snprintf(d->v.dev_name, sizeof d->v.dev_name, "uverbs%u", i);
		snprintf(d->v.dev_path, sizeof d->v.dev_path, "%.200s/sys/class/infiniband_verbs/uverbs%u", w->dir, i);
		snprintf(d->v.ibdev_path, sizeof d->v.ibdev_path, "%.150s/sys/class/infiniband/%.63s", w->dir, d->v.name);
		list[i] = &d->v;
	}
	if (w)
		world_release(w);
	if (list && n)
		*n = (int)devices;
	return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
	for (int i = 0; list[i]; i++)
		device_release((struct device *)list[i]);
	free(list);
}

const char *ibv_get_device_name(struct ibv_device *d) { return d->name; }

struct ibv_context *ibv_open_device(struct ibv_device *v)
{
	struct device *d = (struct device *)v;
	struct context *c = calloc(1, sizeof *c);
	if (!c)
		return NULL;
	if (get(shared(d)->fatal)) {
		errno = EIO;
		goto fail;
	}
	c->v.async_fd = semaphore();
	if (c->v.async_fd < 0)
		goto fail;
	c->s = context_slot(d->w, d->index, &c->slot);
	if (!c->s) {
		close(c->v.async_fd);
		goto fail;
	}
	c->life = c->s->generation;
	c->d = d;
	c->w = d->w;
	c->random = 1;
	c->events_seen = get(shared(d)->events);
	c->v.device = v;
	c->v.cmd_fd = -1;
	c->v.num_comp_vectors = 1;
	c->v.ops.post_send = post_send;
	c->v.ops.poll_cq = poll_cq;
	c->v.ops.req_notify_cq = req_notify_cq;
	pthread_mutex_init(&c->v.mutex, NULL);
	pthread_mutex_init(&c->leave, NULL);
	pthread_cond_init(&c->left, NULL);
	pthread_mutex_init(&c->qps_lock, NULL);
	pthread_mutex_init(&c->events, NULL);
	pthread_cond_init(&c->events_acked, NULL);
	pthread_rwlockattr_t writers_first;
	pthread_rwlockattr_init(&writers_first);
	pthread_rwlockattr_setkind_np(&writers_first, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
	pthread_rwlock_init(&c->landing, &writers_first);
	pthread_mutex_lock(&devices_lock);
	d->uses++;
	pthread_mutex_unlock(&devices_lock);
	// The thread takes no signal: they are the program's.
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old);
	int e = pthread_create(&c->engine, NULL, engine, c);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (e) {
		world_lock(c->w);
		context_free(c->w, c->slot);
		world_unlock(c->w);
		close(c->v.async_fd);
		device_release(d);
		errno = e;
		goto fail;
	}
	return &c->v;
fail:
	free(c);
	return NULL;
}

int ibv_close_device(struct ibv_context *v)
{
	struct context *c = (struct context *)v;
	for (int i = LIVE_PD; i < (int)KINDS; i++)
		if (get(c->s->live[i])) {
			errno = EBUSY;
			return -1;
		}
	put(c->closing, true);
	doorbell(c->s);
	pthread_join(c->engine, NULL);
	for (int i = 0; i < (int)MAX_CONTEXTS; i++)
		if (c->peers[i].life && c->peers[i].pidfd >= 0)
			close(c->peers[i].pidfd);
	world_lock(c->w);
	context_free(c->w, c->slot);
	world_unlock(c->w);
	close(c->v.async_fd);
	pthread_rwlock_destroy(&c->landing);
	free(c->queue);
	device_release(c->d);
	free(c);
	return 0;
}

int ibv_query_device(struct ibv_context *v, struct ibv_device_attr *a)
{
	struct shared_device *d = shared(((struct context *)v)->d);
	*a = (struct ibv_device_attr){
		.fw_ver = "1.0.0", .node_guid = 1, .sys_image_guid = 1, .max_mr_size = d->max_mrsize, .page_size_cap = ~UINT64_C(0xfff),
		.max_qp = (int)MAX_QPS, .max_qp_wr = (int)d->max_wr, .max_sge = (int)d->max_sge, .max_sge_rd = (int)d->max_sge, .max_cq = 1 << 16,
		.max_cqe = (int)d->max_cqe, .max_mr = (int)MAX_REGIONS, .max_pd = 1 << 16, .max_qp_rd_atom = (int)d->max_reads,
		.max_res_rd_atom = (int)(d->max_reads * MAX_QPS), .max_qp_init_rd_atom = (int)d->max_reads, .max_pkeys = 1, .phys_port_cnt = 1,
	};
	return 0;
}

int ibv_query_port(struct ibv_context *v, uint8_t port, struct _compat_ibv_port_attr *p)
{
	struct shared_device *d = shared(((struct context *)v)->d);
	if (port != 1)
		return EINVAL;
	uint32_t state = get(d->port_state);
	// The caller's structure is the short one: what came later is not ours to write.
	struct ibv_port_attr a = {
		.state = (enum ibv_port_state)state, .max_mtu = IBV_MTU_4096, .active_mtu = (enum ibv_mtu)d->mtu, .gid_tbl_len = (int)MAX_GIDS,
		.max_msg_sz = (uint32_t)d->max_msg, .pkey_tbl_len = 1, .lid = (uint16_t)d->lid, .sm_lid = d->lid ? 1 : 0, .max_vl_num = 1,
		.active_width = (uint8_t)d->active_width, .active_speed = (uint8_t)d->active_speed, .phys_state = state == IBV_PORT_ACTIVE ? 5 : 3, .link_layer = (uint8_t)d->link,
	};
	memcpy(p, &a, offsetof(struct ibv_port_attr, port_cap_flags2));
	return 0;
}

// ---- protection domains and regions ------------------------------------------

struct ibv_pd *ibv_alloc_pd(struct ibv_context *v)
{
	struct context *c = (struct context *)v;
	if (world_inject(c->w, VERB_PD))
		return NULL;
	struct pd *pd = calloc(1, sizeof *pd);
	if (!pd)
		return NULL;
	pd->v.context = v;
	pd->c = c;
	pd->number = count(c->w->control->next_pd, 1) + 1;
	pd->v.handle = pd->number;
	count(c->s->live[LIVE_PD], 1);
	return &pd->v;
}

int ibv_dealloc_pd(struct ibv_pd *v)
{
	struct pd *pd = (struct pd *)v;
	if (get(pd->uses))
		return EBUSY;
	count(pd->c->s->live[LIVE_PD], -1);
	free(pd);
	return 0;
}

// Counts bytes as locked; false, and ENOMEM, if the process may not lock so many.
bool lock_memory(struct context *c, uint64_t bytes)
{
	struct shared_control *m = c->w->control;
	uint64_t most = get(m->faults.memlock), have = 0;
	world_lock(c->w);
	for (uint32_t i = 0; most && i < MAX_CONTEXTS; i++)
		if (m->context[i].pid == c->s->pid)
			have += m->context[i].locked;
	bool fits = !most || have + bytes <= most;
	if (fits)
		c->s->locked += bytes;
	world_unlock(c->w);
	if (!fits)
		errno = ENOMEM;
	return fits;
}

void unlock_memory(struct context *c, uint64_t bytes)
{
	world_lock(c->w);
	c->s->locked -= bytes;
	world_unlock(c->w);
}

static struct shared_region *region_slot(struct context *c, struct shared_region r)
{
	struct shared_control *m = c->w->control;
	world_lock(c->w);
	for (int round = 0; round < 2; round++) {
		for (uint32_t k = 0; k < MAX_REGIONS; k++) {
			uint32_t i = (m->next_region + k) % MAX_REGIONS;
			struct shared_region *s = &m->region[i];
			if (s->key)
				continue;
			m->next_region = (i + 1) % MAX_REGIONS;
			r.generation = s->generation + 1;
			*s = r;
			// A key comes back only after half a million lives of its slot.
			put(s->key, i + MAX_REGIONS * (r.generation % (UINT32_MAX / MAX_REGIONS - 1) + 1));
			world_unlock(c->w);
			return s;
		}
		reclaim(c->w);
	}
	world_unlock(c->w);
	errno = ENOMEM;
	return NULL;
}

// Makes a region, of which so many bytes were locked; NULL if there is no room.
static struct ibv_mr *region_new(struct pd *pd, struct shared_region r, uint64_t locked)
{
	struct context *c = pd->c;
	struct mr *mr = calloc(1, sizeof *mr);
	r.context = c->slot;
	r.context_life = c->life;
	r.pd = pd->number;
	struct shared_region *s = mr ? region_slot(c, r) : NULL;
	if (!s) {
		free(mr);
		return NULL;
	}
	mr->v = (struct ibv_mr){.context = pd->v.context, .pd = &pd->v, .addr = (void *)(uintptr_t)r.iova, .length = r.length, .handle = s->key, .lkey = s->key, .rkey = s->key};
	mr->c = c;
	mr->s = s;
	mr->locked = locked;
	count(pd->uses, 1);
	count(c->s->live[LIVE_REGION], 1);
	return &mr->v;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *v, void *addr, size_t length, uint64_t iova, unsigned access)
{
	struct pd *pd = (struct pd *)v;
	struct context *c = pd->c;
	const unsigned known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_OPTIONAL_RANGE;
	if (length == 0 || length > shared(c->d)->max_mrsize || (access & ~known) || (uintptr_t)addr + length < (uintptr_t)addr || iova + length < iova ||
	    ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(access & IBV_ACCESS_LOCAL_WRITE))) {
		errno = EINVAL;
		return NULL;
	}
	uint64_t first = (uintptr_t)addr / 4096, last = ((uintptr_t)addr + length - 1) / 4096, bytes = (last - first + 1) * 4096;
	if (world_inject(c->w, VERB_REGION) || !lock_memory(c, bytes))
		return NULL;
	struct ibv_mr *mr = region_new(pd, (struct shared_region){.access = access, .addr = (uintptr_t)addr, .iova = iova, .length = length}, bytes);
	if (!mr) {
		unlock_memory(c, bytes);
		errno = ENOMEM;
		return NULL;
	}
	mr->addr = addr;
	return mr;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, (unsigned)access);
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *v, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
	struct pd *pd = (struct pd *)v;
	struct context *c = pd->c;
	const uint64_t within = 4095;
	const int known = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | (int)IBV_ACCESS_OPTIONAL_RANGE;
	struct stat st;
	if (get(c->w->control->faults.no_dmabuf)) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
		errno = EBADF; // no dma-buf
		return NULL;
	}
	if (length == 0 || length > shared(c->d)->max_mrsize || (access & ~known) || ((offset ^ iova) & within) || iova + length < iova ||
	    offset > (uint64_t)st.st_size || length > (uint64_t)st.st_size - offset ||
	    ((access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) && !(access & IBV_ACCESS_LOCAL_WRITE))) {
		errno = EINVAL;
		return NULL;
	}
	if (world_inject(c->w, VERB_REGION))
		return NULL;
	// Its pages are this process's as long as the region lives, whatever becomes
	// of the descriptor. They are the exporter's, and count against no limit.
	uint64_t skip = offset & within;
	char *pages = mmap(NULL, length + skip, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(offset - skip));
	if (pages == MAP_FAILED)
		return NULL;
	struct ibv_mr *mr = region_new(pd, (struct shared_region){.access = (uint32_t)access, .addr = (uintptr_t)pages + skip, .iova = iova, .length = length}, 0);
	if (!mr) {
		munmap(pages, length + skip);
		errno = ENOMEM;
		return NULL;
	}
	((struct mr *)mr)->pages = pages;
	((struct mr *)mr)->mapped = length + skip;
	return mr;
}

int ibv_dereg_mr(struct ibv_mr *v)
{
	struct mr *mr = (struct mr *)v;
	struct context *c = mr->c;
	pthread_rwlock_wrlock(&c->landing);
	world_lock(c->w);
	if (mr->s->key == v->lkey) // unless it was taken away from outside
		put(mr->s->key, 0);
	world_unlock(c->w);
	pthread_rwlock_unlock(&c->landing);
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	if (mr->pages)
		munmap(mr->pages, mr->mapped);
	unlock_memory(c, mr->locked);
	count(c->s->live[LIVE_REGION], -1);
	count(((struct pd *)v->pd)->uses, -1);
	free(mr);
	return 0;
}

// ---- queue pairs ---------------------------------------------------------------

static struct shared_queue_pair *qp_slot(struct context *c, uint32_t pd)
{
	struct shared_control *m = c->w->control;
	world_lock(c->w);
	for (int round = 0; round < 2; round++) {
		for (uint32_t k = 0; k < MAX_QPS; k++) {
			uint32_t i = (m->next_qp + k) % MAX_QPS;
			struct shared_queue_pair *s = &m->qp[i];
			if (s->num)
				continue;
			m->next_qp = (i + 1) % MAX_QPS;
			*s = (struct shared_queue_pair){.generation = s->generation + 1, .context = c->slot, .context_life = c->life, .pd = pd, .state = IBV_QPS_RESET};
			put(s->num, i + MAX_QPS * (s->generation % ((1u << 24) / MAX_QPS - 1) + 1)); // 24 bits
			world_unlock(c->w);
			return s;
		}
		reclaim(c->w);
	}
	world_unlock(c->w);
	errno = ENOMEM;
	return NULL;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *v, struct ibv_qp_init_attr *a)
{
	struct pd *pd = (struct pd *)v;
	struct context *c = pd->c;
	struct shared_device *d = shared(c->d);
	if (a->qp_type != IBV_QPT_RC || a->srq || !a->send_cq || !a->recv_cq || a->send_cq->context != v->context || a->recv_cq->context != v->context ||
	    !a->cap.max_send_wr || a->cap.max_send_wr > d->max_wr || a->cap.max_recv_wr > d->max_wr || a->cap.max_send_sge > d->max_sge || a->cap.max_recv_sge > d->max_sge) {
		errno = EINVAL;
		return NULL;
	}
	if (get(d->fatal)) {
		errno = EIO;
		return NULL;
	}
	if (world_inject(c->w, VERB_QP))
		return NULL;
	struct qp *q = calloc(1, sizeof *q);
	if (!q)
		return NULL;
	q->c = c;
	q->depth = a->cap.max_send_wr;
	q->max_sge = a->cap.max_send_sge ? a->cap.max_send_sge : 1;
	q->sq = calloc(q->depth, sizeof *q->sq);
	q->sge = calloc((size_t)q->depth * q->max_sge, sizeof *q->sge);
	if (!q->sq || !q->sge || !(q->s = qp_slot(c, pd->number))) {
		free(q->sq);
		free(q->sge);
		free(q);
		errno = ENOMEM;
		return NULL;
	}
	q->sq_sig_all = a->sq_sig_all;
	q->window = NEVER;
	pthread_mutex_init(&q->post, NULL);
	q->v.context = v->context;
	q->v.qp_context = a->qp_context;
	q->v.pd = v;
	q->v.send_cq = a->send_cq;
	q->v.recv_cq = a->recv_cq;
	q->v.qp_num = q->v.handle = q->s->num;
	q->v.state = IBV_QPS_RESET;
	q->v.qp_type = IBV_QPT_RC;
	count(((struct cq *)a->send_cq)->uses, 1);
	count(((struct cq *)a->recv_cq)->uses, 1);
	count(pd->uses, 1);
	count(c->s->live[LIVE_QP], 1);
	pthread_mutex_lock(&c->qps_lock);
	c->qps[q->v.qp_num % MAX_QPS] = q;
	pthread_mutex_unlock(&c->qps_lock);
	return &q->v;
}

int ibv_destroy_qp(struct ibv_qp *v)
{
	struct qp *q = (struct qp *)v;
	struct context *c = q->c;
	__atomic_store_n(&q->s->state, IBV_QPS_RESET, __ATOMIC_SEQ_CST); // from here on it answers nobody
	engine_drop(q);
	world_lock(c->w);
	put(q->s->num, 0); // and only now may its place be another's
	world_unlock(c->w);
	cq_clean((struct cq *)v->send_cq, q);
	pthread_mutex_lock(&c->qps_lock);
	if (c->qps[v->qp_num % MAX_QPS] == q)
		c->qps[v->qp_num % MAX_QPS] = NULL;
	pthread_mutex_unlock(&c->qps_lock);
	forget_events(c, &q->events_out, &q->events_taken, "destroy_qp");
	count(((struct cq *)v->send_cq)->uses, -1);
	count(((struct cq *)v->recv_cq)->uses, -1);
	count(((struct pd *)v->pd)->uses, -1);
	count(c->s->live[LIVE_QP], -1);
	pthread_mutex_destroy(&q->post);
	free(q->sq);
	free(q->sge);
	free(q);
	return 0;
}

static int to_init(struct qp *q, const struct ibv_qp_attr *a, int mask)
{
	const int need = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	if ((mask & need) != need || a->port_num != 1 || a->pkey_index != 0)
		return EINVAL;
	q->s->access = a->qp_access_flags;
	return 0;
}

static int to_rtr(struct qp *q, const struct ibv_qp_attr *a, int mask)
{
	const int need = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	static const uint8_t none[16];
	struct shared_device *d = shared(q->c->d);
	const struct ibv_ah_attr *ah = &a->ah_attr;
	if ((mask & need) != need || a->path_mtu < IBV_MTU_256 || a->path_mtu > d->mtu || a->dest_qp_num >> 24 || a->rq_psn >> 24 || a->max_dest_rd_atomic > d->max_reads ||
	    a->min_rnr_timer > 31 || ah->port_num != 1 || ah->sl > 15)
		return EINVAL;
	if (ah->is_global) {
		if (ah->grh.sgid_index >= MAX_GIDS || !memcmp(d->gid[ah->grh.sgid_index], none, 16) || !memcmp(ah->grh.dgid.raw, none, 16))
			return EINVAL;
	} else if (d->link != IBV_LINK_LAYER_INFINIBAND || !ah->dlid)
		return EINVAL; // Ethernet knows no LID
	q->s->dest_qpn = a->dest_qp_num;
	q->s->recv_psn = a->rq_psn;
	q->s->reads_served = a->max_dest_rd_atomic;
	q->s->global = ah->is_global;
	q->s->dest_lid = ah->dlid;
	q->s->gid_index = ah->grh.sgid_index;
	memcpy(q->s->dest_gid, ah->grh.dgid.raw, 16);
	return 0;
}

static int to_rts(struct qp *q, const struct ibv_qp_attr *a, int mask)
{
	const int need = IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;
	if ((mask & need) != need || a->timeout > 31 || a->retry_cnt > 7 || a->rnr_retry > 7 || a->sq_psn >> 24 || a->max_rd_atomic > shared(q->c->d)->max_reads)
		return EINVAL;
	q->s->send_psn = a->sq_psn;
	q->s->reads_initiated = a->max_rd_atomic;
	// 4.096 us * 2^timeout for the first try and each of the retries; some
	// devices take 7 for ever, and a timeout of 0 is for ever everywhere.
	q->window = a->timeout == 0 || a->retry_cnt == 7 ? NEVER : (INT64_C(4096) << a->timeout) * (a->retry_cnt + 1);
	return 0;
}

int ibv_modify_qp(struct ibv_qp *v, struct ibv_qp_attr *a, int mask)
{
	struct qp *q = (struct qp *)v;
	uint32_t from = get(q->s->state);
	if (!(mask & IBV_QP_STATE))
		return EINVAL;
	int e = 0;
	switch (a->qp_state) {
	case IBV_QPS_RESET:
		q->s->dest_qpn = 0;
		break;
	case IBV_QPS_INIT:
		e = from == IBV_QPS_RESET || from == IBV_QPS_INIT ? to_init(q, a, mask) : EINVAL;
		break;
	case IBV_QPS_RTR:
		e = from == IBV_QPS_INIT ? to_rtr(q, a, mask) : EINVAL;
		break;
	case IBV_QPS_RTS:
		e = from == IBV_QPS_RTR ? to_rts(q, a, mask) : EINVAL;
		break;
	case IBV_QPS_ERR:
		break;
	default:
		e = EINVAL;
	}
	if (e)
		return e;
	if (get(shared(q->c->d)->fatal) && a->qp_state != IBV_QPS_ERR && a->qp_state != IBV_QPS_RESET)
		return EIO;
	const struct ibv_qp_attr old = q->attr;
	q->attr = *a;
	if (a->qp_state == IBV_QPS_RTS) { // what came with RTR stays
		q->attr = old;
		q->attr.timeout = a->timeout;
		q->attr.retry_cnt = a->retry_cnt;
		q->attr.rnr_retry = a->rnr_retry;
		q->attr.sq_psn = a->sq_psn;
		q->attr.max_rd_atomic = a->max_rd_atomic;
	}
	v->state = a->qp_state;
	put(q->s->state, a->qp_state);
	if (a->qp_state == IBV_QPS_RESET) { // all that was under way is forgotten
		engine_drop(q);
		cq_clean((struct cq *)v->send_cq, q);
		q->done = q->begun = q->posted;
		put(q->freed, q->posted);
		q->silent_since = q->failed_at = 0;
		__atomic_store_n(&q->queued, 0, __ATOMIC_SEQ_CST);
		return 0;
	}
	engine_queue(q);
	return 0;
}

int ibv_query_qp(struct ibv_qp *v, struct ibv_qp_attr *a, int mask, struct ibv_qp_init_attr *init)
{
	struct qp *q = (struct qp *)v;
	(void)mask;
	*a = q->attr;
	a->qp_state = a->cur_qp_state = (enum ibv_qp_state)get(q->s->state);
	a->cap = (struct ibv_qp_cap){.max_send_wr = q->depth, .max_send_sge = q->max_sge};
	*init = (struct ibv_qp_init_attr){.send_cq = v->send_cq, .recv_cq = v->recv_cq, .qp_type = v->qp_type, .cap = a->cap, .sq_sig_all = q->sq_sig_all};
	v->state = a->qp_state;
	return 0;
}

// ---- the data path ---------------------------------------------------------------

// Under q->post: the engine's dice are the engine's.
static bool refuse(struct qp *q, uint32_t per_mille)
{
	uint64_t x = q->dice ? q->dice : (get(q->c->w->control->faults.seed) + q->v.qp_num) * 0x9e3779b97f4a7c15ull | 1;
	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	q->dice = x;
	return x % 1000 < per_mille;
}

int post_send(struct ibv_qp *v, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct qp *q = (struct qp *)v;
	int e = 0;
	uint32_t state = get(q->s->state), nomem = get(q->c->w->control->faults.post_enomem);
	pthread_mutex_lock(&q->post);
	uint64_t posted = q->posted, room = get(q->freed) + q->depth;
	for (; wr; wr = wr->next) {
		if ((state != IBV_QPS_RTS && state != IBV_QPS_ERR) || wr->opcode != IBV_WR_RDMA_READ || wr->num_sge < 0 || (uint32_t)wr->num_sge > q->max_sge) {
			e = EINVAL;
			break;
		}
		if (posted >= room || (nomem && refuse(q, nomem))) {
			e = ENOMEM;
			break;
		}
		uint32_t slot = (uint32_t)(posted % q->depth);
		struct wqe *w = &q->sq[slot];
		struct ibv_sge *sge = &q->sge[(size_t)slot * q->max_sge];
		w->wr_id = wr->wr_id;
		w->raddr = wr->wr.rdma.remote_addr;
		w->rkey = wr->wr.rdma.rkey;
		w->nsge = (uint16_t)wr->num_sge;
		w->signaled = q->sq_sig_all || (wr->send_flags & IBV_SEND_SIGNALED);
		w->landed = false;
		w->length = 0;
		for (int i = 0; i < wr->num_sge; i++) {
			sge[i] = wr->sg_list[i];
			w->length += sge[i].length;
		}
		posted++;
	}
	if (e)
		*bad = wr;
	__atomic_store_n(&q->posted, posted, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&q->post);
	count(q->c->s->total[TOTAL_POSTS], 1);
	engine_queue(q);
	return e;
}

// ---- words ---------------------------------------------------------------------

const char *ibv_wc_status_str(enum ibv_wc_status s)
{
	static const char *const words[] = {
		[IBV_WC_SUCCESS] = "success", [IBV_WC_LOC_LEN_ERR] = "local length error", [IBV_WC_LOC_QP_OP_ERR] = "local queue pair operation error",
		[IBV_WC_LOC_PROT_ERR] = "local protection error", [IBV_WC_WR_FLUSH_ERR] = "work request flushed", [IBV_WC_LOC_ACCESS_ERR] = "local access error",
		[IBV_WC_REM_INV_REQ_ERR] = "remote invalid request error", [IBV_WC_REM_ACCESS_ERR] = "remote access error", [IBV_WC_REM_OP_ERR] = "remote operation error",
		[IBV_WC_RETRY_EXC_ERR] = "transport retry counter exceeded", [IBV_WC_RNR_RETRY_EXC_ERR] = "receiver-not-ready retry counter exceeded",
		[IBV_WC_FATAL_ERR] = "fatal error", [IBV_WC_GENERAL_ERR] = "general error",
	};
	return (unsigned)s < sizeof words / sizeof *words && words[s] ? words[s] : "unknown";
}

const char *ibv_event_type_str(enum ibv_event_type t)
{
	static const char *const words[] = {
		[IBV_EVENT_CQ_ERR] = "completion queue error", [IBV_EVENT_QP_FATAL] = "queue pair fatal error", [IBV_EVENT_QP_REQ_ERR] = "queue pair request error",
		[IBV_EVENT_QP_ACCESS_ERR] = "queue pair access violation", [IBV_EVENT_DEVICE_FATAL] = "device fatal error", [IBV_EVENT_PORT_ACTIVE] = "port active",
		[IBV_EVENT_PORT_ERR] = "port error", [IBV_EVENT_GID_CHANGE] = "GID table change",
	};
	return (unsigned)t < sizeof words / sizeof *words && words[t] ? words[t] : "unknown";
}
