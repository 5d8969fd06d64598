// Streams and events. A stream is a thread with a queue: what was started is
// under way until it has been waited for.
#define _GNU_SOURCE
#include "double.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *streams;

enum { LOOK = 50000000 }; // ns until who waits looks again

struct op *op_new(int kind, size_t pieces)
{
	struct op *o = calloc(1, sizeof *o + pieces * sizeof *o->piece);
	if (!o)
		abort();
	o->kind = kind;
	o->n = pieces;
	o->wire = -1;
	o->piece = (struct piece *)(o + 1);
	return o;
}

static void event_put(struct CUevent_st *e)
{
	if (__atomic_sub_fetch(&e->refs, 1, __ATOMIC_ACQ_REL))
		return;
	if (e->fd >= 0) {
		munmap(e->state, SMALL);
		close(e->fd);
	} else
		free(e->state);
	free(e);
}

static void poison(struct CUctx_st *c, CUresult r)
{
	CUresult none = CUDA_SUCCESS;
	__atomic_compare_exchange_n(&c->sticky, &none, r, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

// When a wire has carried so many bytes.
static int64_t carried(int wire, size_t bytes, uint64_t bandwidth)
{
	int64_t *at = &control->wire[wire], now = now_ns(), free = get(*at), end;
	do
		end = (free > now ? free : now) + (int64_t)((double)bytes * 1e9 / (double)bandwidth);
	while (!__atomic_compare_exchange_n(at, &free, end, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
	return end;
}

static size_t bytes_of(const struct op *o)
{
	size_t n = 0;
	for (size_t i = 0; i < o->n; i++)
		n += o->piece[i].n;
	return n;
}

// Makes the byte that FlipByte names a wrong one, if it is among these.
static void flip(const struct op *o, size_t bytes)
{
	struct shared_faults *f = &control->faults;
	uint64_t at = get(f->flip_byte), first = add(f->copied, bytes);
	if (!at || at <= first || at > first + bytes)
		return;
	size_t off = at - first - 1;
	for (size_t i = 0; i < o->n; off -= o->piece[i++].n)
		if (off < o->piece[i].n) {
			o->piece[i].dst[off] ^= 1;
			return;
		}
}

// Waits as faults want it, and says whether the operation may run.
static bool paced(struct CUctx_st *c, const struct op *o, size_t bytes)
{
	struct shared_faults *f = &control->faults;
	uint64_t delay = get(f->delay), bandwidth = get(f->bandwidth);
	if (delay)
		sleep_until(now_ns() + (int64_t)delay);
	if (bandwidth && bytes && o->wire >= 0)
		sleep_until(carried(o->wire, bytes, bandwidth));
	for (uint32_t bell = get(control->bell); get(f->hold); bell = get(control->bell))
		futex_wait(&control->bell, bell, LOOK);
	uint64_t nth = add(f->started, 1) + 1;
	if (get(f->poison) && nth == get(f->poison_nth))
		poison(c, (CUresult)f->poison);
	return !get(c->sticky);
}

static void perform(struct CUctx_st *c, const struct op *o)
{
	size_t bytes = bytes_of(o);
	if (!paced(c, o, bytes))
		return;
	CUresult r;
	switch ((int)o->kind) {
	case COPY:
		for (size_t i = 0; i < o->n; i++)
			memmove(o->piece[i].dst, o->piece[i].src, o->piece[i].n);
		flip(o, bytes);
		break;
	case FILL:
		memcpy(o->piece[0].dst, &o->value, o->unit);
		for (size_t i = o->unit; i < bytes; i *= 2)
			memcpy(o->piece[0].dst + i, o->piece[0].dst, i < bytes - i ? i : bytes - i);
		break;
	case KERNEL:
		r = kernel_run(c, o->kernel, o->parameter);
		if (r)
			poison(c, r);
		break;
	}
}

static void run(struct CUstream_st *s, const struct op *o)
{
	struct event_state *e = o->event ? o->event->state : NULL;
	switch (o->kind) {
	case COPY:
	case FILL:
	case KERNEL:
		if (!get(s->ctx->sticky))
			perform(s->ctx, o);
		break;
	case RECORD: // also behind an error, which whoever waits is told then
		e->at = now_ns();
		for (uint32_t done = get(e->done); (int32_t)(o->ticket - done) > 0;)
			if (__atomic_compare_exchange_n(&e->done, &done, o->ticket, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
				break;
		futex_wake(&e->done);
		break;
	case WAIT:
		for (uint32_t done = get(e->done); (int32_t)(o->ticket - done) > 0; done = get(e->done))
			futex_wait(&e->done, done, LOOK);
		break;
	case HOST:
		if (!get(s->ctx->sticky))
			o->fn(o->arg);
		break;
	case STOP:
		break;
	}
}

static void stream_put(struct CUstream_st *s)
{
	pthread_mutex_lock(&streams_lock);
	bool last = --s->refs == 0;
	pthread_mutex_unlock(&streams_lock);
	if (last) {
		pthread_mutex_destroy(&s->lock);
		free(s);
	}
}

static void *worker(void *arg)
{
	struct CUstream_st *s = arg;
	prctl(PR_SET_NAME, "cuda-stream", 0, 0, 0);
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
	for (bool stop = false; !stop;) {
		pthread_mutex_lock(&s->lock);
		while (!s->head)
			pthread_cond_wait(&s->more, &s->lock);
		struct op *o = s->head;
		s->head = o->next;
		if (!s->head)
			s->tail = NULL;
		pthread_mutex_unlock(&s->lock);
		run(s, o);
		stop = o->kind == STOP;
		if (o->event)
			event_put(o->event);
		free(o->snapshot);
		free(o);
		pthread_mutex_lock(&s->lock);
		s->done++;
		pthread_cond_broadcast(&s->less);
		pthread_mutex_unlock(&s->lock);
	}
	pthread_mutex_lock(&streams_lock);
	struct CUstream_st **p = &streams;
	while (*p != s)
		p = &(*p)->next;
	*p = s->next;
	pthread_mutex_unlock(&streams_lock);
	stream_put(s);
	return NULL;
}

struct CUstream_st *stream_new(struct CUctx_st *c, unsigned flags, int priority)
{
	struct CUstream_st *s = calloc(1, sizeof *s);
	if (!s)
		abort();
	s->magic = STREAM;
	s->ctx = c;
	s->flags = flags;
	s->priority = priority;
	s->refs = 1;
	pthread_mutex_init(&s->lock, NULL);
	pthread_cond_init(&s->more, NULL);
	pthread_cond_init(&s->less, NULL);
	pthread_mutex_lock(&streams_lock);
	s->next = streams;
	streams = s;
	pthread_mutex_unlock(&streams_lock);
	pthread_t thread;
	if (pthread_create(&thread, NULL, worker, s))
		abort();
	pthread_detach(thread);
	return s;
}

// Returns at once: what was started goes on, and then the stream ends.
void stream_end(struct CUstream_st *s)
{
	s->magic = 0;
	stream_push(s, op_new(STOP, 0));
}

// The same for all that were made in a context.
void streams_end(struct CUctx_st *c)
{
	for (bool more = true; more;) {
		more = false;
		pthread_mutex_lock(&streams_lock);
		struct CUstream_st *s = streams;
		while (s && !(s->ctx == c && s != c->null && s->magic))
			s = s->next;
		if (s) {
			s->magic = 0;
			s->refs++;
			more = true;
		}
		pthread_mutex_unlock(&streams_lock);
		if (s) {
			stream_push(s, op_new(STOP, 0));
			stream_put(s);
			add(self->live[LIVE_STREAM], -1);
		}
	}
}

void stream_push(struct CUstream_st *s, struct op *o)
{
	pthread_mutex_lock(&s->lock);
	if (s->tail)
		s->tail->next = o;
	else
		s->head = o;
	s->tail = o;
	s->pushed++;
	pthread_cond_signal(&s->more);
	pthread_mutex_unlock(&s->lock);
}

// Returns when all that was started before has ended.
void stream_drain(struct CUstream_st *s)
{
	pthread_mutex_lock(&s->lock);
	uint64_t until = s->pushed;
	while (s->done < until) {
		// Of several that wait the libc of before 2.41 may wake too few.
		struct timespec t;
		clock_gettime(CLOCK_REALTIME, &t);
		t.tv_nsec += LOOK;
		if (t.tv_nsec >= 1000000000) {
			t.tv_sec++;
			t.tv_nsec -= 1000000000;
		}
		pthread_cond_timedwait(&s->less, &s->lock, &t);
	}
	pthread_mutex_unlock(&s->lock);
}

// The same for all streams of a context, or of all contexts; blocking: for those
// alone that wait for the default stream.
void drain(struct CUctx_st *c, bool blocking)
{
	size_t n = 0;
	pthread_mutex_lock(&streams_lock);
	for (struct CUstream_st *s = streams; s; s = s->next)
		n++;
	struct CUstream_st **list = calloc(n + 1, sizeof(struct CUstream_st *));
	if (!list)
		abort();
	n = 0;
	for (struct CUstream_st *s = streams; s; s = s->next)
		if ((!c || s->ctx == c) && !(blocking && s->flags & CU_STREAM_NON_BLOCKING)) {
			s->refs++;
			list[n++] = s;
		}
	pthread_mutex_unlock(&streams_lock);
	for (size_t i = 0; i < n; i++) {
		stream_drain(list[i]);
		stream_put(list[i]);
	}
	free(list);
}

// Checks a stream's handle. The default stream and those that are not
// non-blocking wait for each other.
CUresult stream_of(struct CUstream_st **s)
{
	if (!*s || *s == CU_STREAM_LEGACY) {
		drain(CURRENT, true);
		*s = CURRENT->null;
		return CUDA_SUCCESS;
	}
	if (*s == CU_STREAM_PER_THREAD)
		return CUDA_ERROR_NOT_SUPPORTED;
	if ((*s)->magic != STREAM || (*s)->ctx != CURRENT)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!((*s)->flags & CU_STREAM_NON_BLOCKING))
		stream_drain(CURRENT->null);
	return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *s, unsigned int flags)
{
	ENTER(true);
	*s = stream_new(CURRENT, flags, 0);
	add(self->live[LIVE_STREAM], 1);
	return CUDA_SUCCESS;
}

CUresult cuStreamCreateWithPriority(CUstream *s, unsigned int flags, int priority)
{
	ENTER(true);
	*s = stream_new(CURRENT, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority);
	add(self->live[LIVE_STREAM], 1);
	return CUDA_SUCCESS;
}

CUresult cuStreamDestroy_v2(CUstream s)
{
	ENTER(true);
	if (!s || s->magic != STREAM || s == CURRENT->null)
		return CUDA_ERROR_INVALID_HANDLE;
	stream_end(s);
	add(self->live[LIVE_STREAM], -1);
	return CUDA_SUCCESS;
}

CUresult cuStreamGetPriority(CUstream s, int *priority)
{
	ENTER(true);
	CUresult r = stream_of(&s);
	if (!r)
		*priority = s->priority;
	return r;
}

CUresult cuStreamGetFlags(CUstream s, unsigned int *flags)
{
	ENTER(true);
	CUresult r = stream_of(&s);
	if (!r)
		*flags = s->flags;
	return r;
}

CUresult cuStreamQuery(CUstream s)
{
	ENTER(true);
	CUresult r = stream_of(&s);
	if (r)
		return r;
	pthread_mutex_lock(&s->lock);
	bool busy = s->done < s->pushed;
	pthread_mutex_unlock(&s->lock);
	if (get(CURRENT->sticky))
		return CURRENT->sticky;
	return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream s)
{
	ENTER(true);
	CUresult r = stream_of(&s);
	if (r)
		return r;
	stream_drain(s);
	return get(CURRENT->sticky);
}

CUresult cuLaunchHostFunc(CUstream s, CUhostFn fn, void *arg)
{
	ENTER(true);
	CUresult r = stream_of(&s);
	if (r)
		return r;
	struct op *o = op_new(HOST, 0);
	o->fn = fn;
	o->arg = arg;
	stream_push(s, o);
	return CUDA_SUCCESS;
}

// ---- events

static struct CUevent_st *event_of(unsigned flags, int fd, uint64_t key)
{
	struct CUevent_st *e = calloc(1, sizeof *e);
	if (!e)
		abort();
	e->magic = EVENT;
	e->flags = flags;
	e->refs = 1;
	e->ctx = CURRENT;
	add(e->ctx->events, 1);
	e->fd = fd;
	e->key = key;
	e->state = fd < 0 ? calloc(1, sizeof *e->state) : mmap(NULL, SMALL, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (!e->state || e->state == MAP_FAILED)
		abort();
	add(self->live[LIVE_EVENT], 1);
	return e;
}

#define EVENT_OF(e)                                                           \
	do {                                                                  \
		if (!(e) || (e)->magic != EVENT || (e)->ctx->magic != CONTEXT) \
			return CUDA_ERROR_INVALID_HANDLE;                     \
	} while (0)

CUresult cuEventCreate(CUevent *e, unsigned int flags)
{
	ENTER(true);
	int fd = -1;
	uint64_t key = random_key();
	if (flags & CU_EVENT_INTERPROCESS) {
		if (!(flags & CU_EVENT_DISABLE_TIMING))
			return CUDA_ERROR_INVALID_VALUE;
		fd = memory_file(key, CURRENT->device, SMALL);
		if (fd < 0)
			return CUDA_ERROR_OPERATING_SYSTEM;
	}
	*e = event_of(flags, fd, key);
	return CUDA_SUCCESS;
}

CUresult cuEventDestroy_v2(CUevent e)
{
	ENTER(true);
	EVENT_OF(e);
	e->magic = 0;
	add(e->ctx->events, -1);
	add(self->live[LIVE_EVENT], -1);
	event_put(e);
	return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent e, CUstream s)
{
	ENTER(true);
	EVENT_OF(e);
	CUresult r = stream_of(&s);
	if (r)
		return r;
	struct op *o = op_new(RECORD, 0);
	add(e->refs, 1);
	o->event = e;
	o->ticket = add(e->state->wanted, 1) + 1;
	stream_push(s, o);
	return CUDA_SUCCESS;
}

CUresult cuEventQuery(CUevent e)
{
	ENTER(true);
	EVENT_OF(e);
	bool busy = get(e->state->done) != get(e->state->wanted);
	if (get(CURRENT->sticky))
		return CURRENT->sticky;
	return busy ? CUDA_ERROR_NOT_READY : CUDA_SUCCESS;
}

CUresult cuEventSynchronize(CUevent e)
{
	ENTER(true);
	EVENT_OF(e);
	uint32_t wanted = get(e->state->wanted);
	for (uint32_t done = get(e->state->done); (int32_t)(wanted - done) > 0; done = get(e->state->done))
		futex_wait(&e->state->done, done, LOOK);
	return get(CURRENT->sticky);
}

CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b)
{
	ENTER(true);
	EVENT_OF(a);
	EVENT_OF(b);
	if ((a->flags | b->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	if (get(a->state->done) != get(a->state->wanted) || get(b->state->done) != get(b->state->wanted))
		return CUDA_ERROR_NOT_READY;
	*ms = (float)(b->state->at - a->state->at) / 1e6f;
	return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int flags)
{
	ENTER(true);
	(void)flags;
	EVENT_OF(e);
	CUresult r = stream_of(&s);
	if (r)
		return r;
	struct op *o = op_new(WAIT, 0);
	add(e->refs, 1);
	o->event = e;
	o->ticket = get(e->state->wanted);
	stream_push(s, o);
	return CUDA_SUCCESS;
}

// ---- events of other processes

struct event_handle {
	uint32_t magic;
	int32_t pid, fd;
	uint64_t key;
};
_Static_assert(sizeof(struct event_handle) <= sizeof(CUipcEventHandle), "too large for a handle");

CUresult cuIpcGetEventHandle(CUipcEventHandle *h, CUevent e)
{
	ENTER(true);
	EVENT_OF(e);
	if (e->fd < 0)
		return CUDA_ERROR_INVALID_HANDLE;
	struct event_handle x = {.magic = EVENT, .pid = getpid(), .fd = e->fd, .key = e->key};
	memset(h, 0, sizeof *h);
	memcpy(h, &x, sizeof x);
	return CUDA_SUCCESS;
}

CUresult cuIpcOpenEventHandle(CUevent *e, CUipcEventHandle h)
{
	ENTER(true);
	struct event_handle x;
	memcpy(&x, &h, sizeof x);
	if (x.magic != EVENT)
		return CUDA_ERROR_INVALID_VALUE;
	if (x.pid == getpid())
		return CUDA_ERROR_INVALID_CONTEXT;
	int fd = file_of(x.pid, x.fd, x.key);
	if (fd < 0)
		return CUDA_ERROR_INVALID_VALUE;
	*e = event_of(CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS, fd, x.key);
	return CUDA_SUCCESS;
}
