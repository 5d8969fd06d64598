// What the parts of the emulated libibverbs share. control.h, the layout of
// the file that processes share, is made from Go when the library is built.
#ifndef DOUBLE_H
#define DOUBLE_H

#include "control.h"

#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

// Calls that verbs.h keeps for old programs are served too.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

#define NEVER INT64_MAX

#define get(p) __atomic_load_n(&(p), __ATOMIC_ACQUIRE)
#define put(p, v) __atomic_store_n(&(p), (v), __ATOMIC_RELEASE)
#define count(p, n) __atomic_fetch_add(&(p), (n), __ATOMIC_RELAXED)

// A world is a control file that this process has mapped. It lives while a
// device list or an open device uses it.
struct world {
	char dir[IBV_SYSFS_PATH_MAX];
	int fd;
	int uses;
	struct shared_control *control;
	pthread_mutex_t lock; // and flock(fd): world_lock takes both
	struct world *next;
};

struct device {
	struct ibv_device v;
	struct world *w;
	uint32_t index;
	int uses;
};

// One work request in a send queue.
struct wqe {
	uint64_t wr_id, raddr, length;
	int64_t due;     // when it may land
	uint32_t rkey;
	uint16_t nsge;
	bool signaled;
	bool landed;     // status says how
	bool lost;       // no answer will ever come
	uint8_t forced;  // a status that a fault chose
	uint8_t status;
};

struct qp {
	struct ibv_qp v;
	struct context *c;
	struct shared_queue_pair *s;
	uint32_t depth, max_sge;
	bool sq_sig_all;
	struct wqe *sq;       // a ring of depth
	struct ibv_sge *sge;  // max_sge for each of them
	struct ibv_qp_attr attr;
	pthread_mutex_t post; // held by whoever posts
	uint64_t dice;        // of whoever posts
	uint64_t posted;      // sequence numbers: handed over by post_send,
	uint64_t begun;       // begun by the engine,
	uint64_t done;        // completed, in order;
	uint64_t freed;       // a polled completion has given the place back
	int64_t window;       // ns without an answer until RETRY_EXC; NEVER
	int64_t silent_since; // 0: the peer answers
	int64_t failed_at;    // 0: not seen in the error state
	uint32_t served, served_life; // the context that answered last
	uint32_t queued;      // in the engine's list, or on the way into it
	bool leaving;         // destroy_qp waits for the engine to let go
	struct qp *next;
	int events_out, events_taken; // async events: given out, acknowledged; under c->events
};

struct cqe {
	struct ibv_wc wc;
	struct qp *qp;
	uint64_t seq;
};

struct cq {
	struct ibv_cq v;
	struct context *c;
	struct channel *ch;
	pthread_mutex_t lock;
	pthread_cond_t acked;
	struct cqe *ring;
	uint32_t size, head; // head: the oldest
	uint32_t held;
	enum { IDLE, ARMED, ARMED_SOLICITED } armed;
	bool overrun;
	uint64_t locked;     // bytes
	int uses;            // queue pairs
	unsigned taken, acks;           // completion events
	int events_out, events_taken;   // async events; under c->events
};

struct channel {
	struct ibv_comp_channel v;
	struct context *c;
	pthread_mutex_t lock;
	struct cq **queue; // events that nobody has taken
	size_t n, cap;
};

struct pd {
	struct ibv_pd v;
	struct context *c;
	uint32_t number;
	int uses;
};

struct mr {
	struct ibv_mr v;
	struct context *c;
	struct shared_region *s;
	uint64_t locked;
	void *pages; // of a dma-buf, mapped by us; NULL: the program's memory
	size_t mapped;
};

// A peer that reads were served by: known to be the process that it was.
struct peer {
	uint32_t life;
	int pidfd; // -1: dead, -2: this process
};

struct context {
	struct ibv_context v;
	struct device *d;
	struct world *w;
	struct shared_context_slot *s;
	uint32_t slot, life;
	pthread_t engine;
	bool closing;

	uint32_t sleeping;     // the engine waits on s->doorbell
	struct qp *incoming;   // a stack of queue pairs with work
	struct qp *run;        // the engine's own list
	pthread_rwlock_t landing; // read while bytes land, written to take a region away
	pthread_mutex_t leave; // with left: destroy_qp waits here
	pthread_cond_t left;
	struct peer peers[MAX_CONTEXTS]; // the engine's
	uint64_t random, faults_set;
	uint64_t events_seen;

	pthread_mutex_t qps_lock;
	struct qp *qps[MAX_QPS]; // ours, by slot

	pthread_mutex_t events; // guards what follows, and who waits for acknowledgement
	pthread_cond_t events_acked;
	struct ibv_async_event *queue;
	size_t n, cap;
};

// world.c
struct world *world_open(void);
void world_release(struct world *w);
void world_lock(struct world *w);
void world_unlock(struct world *w);
bool world_inject(struct world *w, int verb);
struct shared_context_slot *context_slot(struct world *w, uint32_t device, uint32_t *slot);
void context_free(struct world *w, uint32_t slot);
void reclaim(struct world *w);
uint64_t process_start(uint32_t pid);
bool alive(const struct shared_context_slot *s);
struct shared_region *region_of(struct world *w, uint32_t key);
struct shared_queue_pair *qp_of(struct world *w, uint32_t num);

// engine.c
int64_t now_ns(void);
void doorbell(struct shared_context_slot *s);
void *engine(void *context);
void engine_wake(struct context *c);
void engine_queue(struct qp *q);
void engine_drop(struct qp *q);

// events.c
int semaphore(void);
void async_event(struct context *c, struct ibv_async_event e);
void world_event(struct world *w, uint32_t device, uint32_t kind, uint32_t element);
void deliver(struct context *c);
void forget_events(struct context *c, int *out, int *taken, const char *what);
void cq_push(struct cq *q, const struct cqe *e);
void cq_clean(struct cq *q, const struct qp *gone);
int poll_cq(struct ibv_cq *v, int n, struct ibv_wc *wc);
int req_notify_cq(struct ibv_cq *v, int solicited_only);

// verbs.c
bool lock_memory(struct context *c, uint64_t bytes);
void unlock_memory(struct context *c, uint64_t bytes);
int post_send(struct ibv_qp *v, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
#endif
