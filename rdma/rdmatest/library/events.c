// Completion queues, completion channels, and asynchronous events.
#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

// Whoever destroys an object waits for its events to be acknowledged, for ever
// on real hardware. Here a test fails instead.
#ifndef ACK_SECONDS
#define ACK_SECONDS 10
#endif

// What nobody takes is lost from here on.
enum { MAX_EVENTS = 4096 };

int semaphore(void) { return eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC); }

static void raise_fd(int fd)
{
	uint64_t one = 1;
	while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
		;
}

// Takes one count, as the descriptor's flags have it: 0, or -1 and errno.
static int lower_fd(int fd)
{
	uint64_t one;
	ssize_t n;
	while ((n = read(fd, &one, sizeof one)) < 0 && errno == EINTR)
		;
	return n < 0 ? -1 : 0;
}

static void wait_acked(pthread_cond_t *cond, pthread_mutex_t *lock, const char *what)
{
	struct timespec end;
	clock_gettime(CLOCK_REALTIME, &end);
	end.tv_sec += ACK_SECONDS;
	if (pthread_cond_timedwait(cond, lock, &end) != ETIMEDOUT)
		return;
	fprintf(stderr, "verbs double: %s waits for events that were taken and never acknowledged\n", what);
	abort();
}

static void *grown(void *p, size_t *cap, size_t n, size_t size)
{
	if (n < *cap)
		return p;
	*cap = *cap ? *cap * 2 : 16;
	p = realloc(p, *cap * size);
	if (!p)
		abort();
	return p;
}

// ---- asynchronous events ---------------------------------------------------

static int *given(struct ibv_async_event *e, int **taken)
{
	switch (e->event_type) {
	case IBV_EVENT_CQ_ERR: {
		struct cq *q = (struct cq *)e->element.cq;
		*taken = &q->events_taken;
		return &q->events_out;
	}
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR: {
		struct qp *q = (struct qp *)e->element.qp;
		*taken = &q->events_taken;
		return &q->events_out;
	}
	default:
		return NULL;
	}
}

void async_event(struct context *c, struct ibv_async_event e)
{
	pthread_mutex_lock(&c->events);
	bool room = c->n < MAX_EVENTS;
	if (room) {
		c->queue = grown(c->queue, &c->cap, c->n, sizeof *c->queue);
		c->queue[c->n++] = e;
	}
	pthread_mutex_unlock(&c->events);
	if (room)
		raise_fd(c->v.async_fd);
}

// Tells all processes that have opened a device.
void world_event(struct world *w, uint32_t device, uint32_t kind, uint32_t element)
{
	struct shared_device *d = &w->control->device[device];
	world_lock(w);
	put(d->event[d->events % EVENT_RING], (uint64_t)kind << 32 | element);
	put(d->events, d->events + 1);
	world_unlock(w);
	for (uint32_t i = 0; i < MAX_CONTEXTS; i++)
		if (get(w->control->context[i].pid) && w->control->context[i].device == device)
			doorbell(&w->control->context[i]);
}

// Queues what is new for our device, and is ours.
void deliver(struct context *c)
{
	struct shared_device *d = &c->w->control->device[c->d->index];
	uint64_t events = get(d->events);
	if (events - c->events_seen > EVENT_RING)
		c->events_seen = events - EVENT_RING;
	for (; c->events_seen < events; c->events_seen++) {
		uint64_t word = get(d->event[c->events_seen % EVENT_RING]);
		uint32_t element = (uint32_t)word;
		struct ibv_async_event e = {.event_type = (enum ibv_event_type)(word >> 32)};
		switch (e.event_type) {
		case IBV_EVENT_QP_FATAL:
		case IBV_EVENT_QP_REQ_ERR:
		case IBV_EVENT_QP_ACCESS_ERR: {
			pthread_mutex_lock(&c->qps_lock);
			struct qp *q = c->qps[element % MAX_QPS];
			if (q && q->v.qp_num == element) {
				e.element.qp = &q->v;
				async_event(c, e);
			}
			pthread_mutex_unlock(&c->qps_lock);
			break;
		}
		default:
			e.element.port_num = (int)element;
			async_event(c, e);
		}
	}
}

int ibv_get_async_event(struct ibv_context *v, struct ibv_async_event *e)
{
	struct context *c = (struct context *)v;
	for (;;) {
		if (lower_fd(c->v.async_fd))
			return -1;
		pthread_mutex_lock(&c->events);
		if (!c->n) { // it went with its object
			pthread_mutex_unlock(&c->events);
			continue;
		}
		*e = c->queue[0];
		memmove(c->queue, c->queue + 1, --c->n * sizeof *c->queue);
		int *taken, *out = given(e, &taken);
		if (out)
			++*out;
		pthread_mutex_unlock(&c->events);
		return 0;
	}
}

void ibv_ack_async_event(struct ibv_async_event *e)
{
	int *taken, *out = given(e, &taken);
	if (!out)
		return;
	struct context *c = (struct context *)(e->event_type == IBV_EVENT_CQ_ERR ? e->element.cq->context : e->element.qp->context);
	pthread_mutex_lock(&c->events);
	++*taken;
	pthread_cond_broadcast(&c->events_acked);
	pthread_mutex_unlock(&c->events);
}

// Drops an object's events that nobody has taken, and waits until those that
// were taken are acknowledged.
void forget_events(struct context *c, int *out, int *taken, const char *what)
{
	pthread_mutex_lock(&c->events);
	size_t n = 0;
	for (size_t i = 0; i < c->n; i++) {
		int *t, *o = given(&c->queue[i], &t);
		if (o != out)
			c->queue[n++] = c->queue[i];
	}
	c->n = n;
	while (*taken < *out)
		wait_acked(&c->events_acked, &c->events, what);
	pthread_mutex_unlock(&c->events);
}

// ---- completions -----------------------------------------------------------

static void notify(struct cq *q)
{
	struct channel *ch = q->ch;
	pthread_mutex_lock(&ch->lock);
	ch->queue = grown(ch->queue, &ch->cap, ch->n, sizeof *ch->queue);
	ch->queue[ch->n++] = q;
	pthread_mutex_unlock(&ch->lock);
	raise_fd(ch->v.fd);
}

void cq_push(struct cq *q, const struct cqe *e)
{
	bool lost = false;
	pthread_mutex_lock(&q->lock);
	if (q->held == q->size || q->overrun) {
		lost = !q->overrun;
		q->overrun = true;
	} else {
		q->ring[(q->head + q->held) % q->size] = *e;
		put(q->held, q->held + 1);
		if (q->armed == ARMED || (q->armed == ARMED_SOLICITED && e->wc.status != IBV_WC_SUCCESS)) {
			q->armed = IDLE;
			notify(q);
		}
	}
	pthread_mutex_unlock(&q->lock);
	if (lost) {
		put(e->qp->s->state, IBV_QPS_ERR);
		async_event(q->c, (struct ibv_async_event){.event_type = IBV_EVENT_CQ_ERR, .element.cq = &q->v});
	}
}

// Removes what a queue pair that goes has left in the queue.
void cq_clean(struct cq *q, const struct qp *gone)
{
	pthread_mutex_lock(&q->lock);
	uint32_t n = 0;
	for (uint32_t i = 0; i < q->held; i++) {
		struct cqe e = q->ring[(q->head + i) % q->size];
		if (e.qp != gone)
			q->ring[(q->head + n++) % q->size] = e;
	}
	put(q->held, n);
	pthread_mutex_unlock(&q->lock);
}

int poll_cq(struct ibv_cq *v, int n, struct ibv_wc *wc)
{
	struct cq *q = (struct cq *)v;
	int k = 0;
	if (!get(q->held))
		return get(q->overrun) ? -1 : 0;
	pthread_mutex_lock(&q->lock);
	for (; k < n && q->held; k++) {
		struct cqe *e = &q->ring[q->head];
		wc[k] = e->wc;
		put(e->qp->freed, e->seq + 1);
		q->head = q->head + 1 == q->size ? 0 : q->head + 1;
		put(q->held, q->held - 1);
	}
	pthread_mutex_unlock(&q->lock);
	return k;
}

int req_notify_cq(struct ibv_cq *v, int solicited_only)
{
	struct cq *q = (struct cq *)v;
	if (!q->ch)
		return EINVAL;
	pthread_mutex_lock(&q->lock);
	if (q->armed != ARMED) // what was asked for stays asked for
		q->armed = solicited_only ? ARMED_SOLICITED : ARMED;
	pthread_mutex_unlock(&q->lock);
	return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *v, struct ibv_cq **cq, void **context)
{
	struct channel *ch = (struct channel *)v;
	for (;;) {
		if (lower_fd(ch->v.fd))
			return -1;
		pthread_mutex_lock(&ch->lock);
		if (!ch->n) { // it went with its queue
			pthread_mutex_unlock(&ch->lock);
			continue;
		}
		struct cq *q = ch->queue[0];
		memmove(ch->queue, ch->queue + 1, --ch->n * sizeof *ch->queue);
		count(q->taken, 1); // under the channel's lock: destroy_cq looks there first
		*cq = &q->v;
		*context = q->v.cq_context;
		pthread_mutex_unlock(&ch->lock);
		return 0;
	}
}

void ibv_ack_cq_events(struct ibv_cq *v, unsigned n)
{
	struct cq *q = (struct cq *)v;
	pthread_mutex_lock(&q->lock);
	q->acks += n;
	pthread_cond_broadcast(&q->acked);
	pthread_mutex_unlock(&q->lock);
}

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *v)
{
	struct context *c = (struct context *)v;
	if (world_inject(c->w, VERB_CHANNEL))
		return NULL;
	struct channel *ch = calloc(1, sizeof *ch);
	if (!ch)
		return NULL;
	ch->v.fd = semaphore();
	if (ch->v.fd < 0) {
		free(ch);
		return NULL;
	}
	ch->v.context = v;
	ch->c = c;
	pthread_mutex_init(&ch->lock, NULL);
	count(c->s->live[LIVE_CHANNEL], 1);
	return &ch->v;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *v)
{
	struct channel *ch = (struct channel *)v;
	if (get(ch->v.refcnt))
		return EBUSY;
	count(ch->c->s->live[LIVE_CHANNEL], -1);
	close(ch->v.fd);
	pthread_mutex_destroy(&ch->lock);
	free(ch->queue);
	free(ch);
	return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *v, int cqe, void *cq_context, struct ibv_comp_channel *channel, int vector)
{
	struct context *c = (struct context *)v;
	struct shared_control *m = c->w->control;
	if (cqe < 1 || (uint32_t)cqe > m->device[c->d->index].max_cqe || vector < 0 || vector >= v->num_comp_vectors) {
		errno = EINVAL;
		return NULL;
	}
	uint64_t bytes = ((uint64_t)cqe * 64 + 4095) / 4096 * 4096;
	if (world_inject(c->w, VERB_CQ) || !lock_memory(c, bytes))
		return NULL;
	struct cq *q = calloc(1, sizeof *q);
	if (!q || !(q->ring = calloc((size_t)cqe, sizeof *q->ring))) {
		free(q);
		unlock_memory(c, bytes);
		errno = ENOMEM;
		return NULL;
	}
	q->v.context = v;
	q->v.channel = channel;
	q->v.cq_context = cq_context;
	q->v.cqe = cqe;
	q->c = c;
	q->ch = (struct channel *)channel;
	q->size = (uint32_t)cqe;
	q->locked = bytes;
	pthread_mutex_init(&q->lock, NULL);
	pthread_cond_init(&q->acked, NULL);
	if (channel)
		count(channel->refcnt, 1);
	count(c->s->live[LIVE_CQ], 1);
	return &q->v;
}

int ibv_destroy_cq(struct ibv_cq *v)
{
	struct cq *q = (struct cq *)v;
	struct context *c = q->c;
	if (get(q->uses))
		return EBUSY;
	if (q->ch) {
		pthread_mutex_lock(&q->ch->lock);
		size_t n = 0;
		for (size_t i = 0; i < q->ch->n; i++)
			if (q->ch->queue[i] != q)
				q->ch->queue[n++] = q->ch->queue[i];
		q->ch->n = n;
		pthread_mutex_unlock(&q->ch->lock);
		pthread_mutex_lock(&q->lock);
		while (q->acks < get(q->taken))
			wait_acked(&q->acked, &q->lock, "destroy_cq");
		pthread_mutex_unlock(&q->lock);
		count(q->ch->v.refcnt, -1);
	}
	forget_events(c, &q->events_out, &q->events_taken, "destroy_cq");
	count(c->s->live[LIVE_CQ], -1);
	unlock_memory(c, q->locked);
	pthread_mutex_destroy(&q->lock);
	pthread_cond_destroy(&q->acked);
	free(q->ring);
	free(q);
	return 0;
}
