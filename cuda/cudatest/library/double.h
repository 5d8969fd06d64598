// What the parts of the emulated driver share. control.h, the layout of the
// file that processes share, and calls.h, the names of all entry points, are made
// from Go when the library is built.
#ifndef DOUBLE_H
#define DOUBLE_H

#include "control.h"

#include <cuda.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define get(p) __atomic_load_n(&(p), __ATOMIC_ACQUIRE)
#define put(p, v) __atomic_store_n(&(p), (v), __ATOMIC_RELEASE)
#define add(p, n) __atomic_fetch_add(&(p), (n), __ATOMIC_RELAXED)

enum {
	LARGE = 2 << 20,  // what device memory is made of
	SMALL = 4096,
	DEPTH = 32,       // contexts that a thread may push
	FUNCTIONS = 16,   // of a module
};

// A stretch of addresses that the driver knows. Device addresses are reserved
// and unreadable: whoever follows one faults, as on a machine with a GPU. The
// bytes are mapped once more, for this library alone: at alias.
struct range {
	uint64_t base;  // as the caller sees it
	size_t size;    // as asked for
	size_t mapped;  // as mapped
	char *alias;    // base itself for host memory
	int fd;         // the memfd behind it; -1
	enum { DEVICE, MANAGED, IMPORTED, CHUNK, ALLOCATED, REGISTERED } kind;
	int device;
	int refs;       // of an import: how often it was opened
	struct CUctx_st *ctx; // with which it ends; NULL for a chunk
	uint64_t id;
	uint64_t key;   // of the memfd, in all processes
	bool sync;      // SYNC_MEMOPS
	bool access;    // of a chunk: cuMemSetAccess was called
	unsigned handles; // of a chunk: what it may be exported as
	struct physical *physical; // of a chunk
	struct reservation *in;    // of a chunk
};

// Physical memory of cuMemCreate and cuMemImportFromShareableHandle. It lives
// while a handle or a mapping of it does.
struct physical {
	int fd, refs, handles;
	size_t size;
	uint64_t key;
	CUmemAllocationProp prop;
};

// Addresses of cuMemAddressReserve, and as many beside them for the aliases.
struct reservation {
	uint64_t base;
	size_t size;
	char *alias;
	int mappings;
	struct reservation *next;
};

struct CUctx_st {
	uint32_t magic;
	int device;
	bool primary;
	int refs;
	unsigned flags;
	unsigned peers;  // devices whose memory its kernels may touch
	CUresult sticky; // of the first operation that failed; it stays
	struct CUstream_st *null;
	int events, modules; // made in it
};

struct piece {
	char *dst;
	const char *src;
	size_t n;
};

struct op {
	enum { COPY, FILL, RECORD, WAIT, HOST, KERNEL, STOP } kind;
	struct op *next;
	int wire;            // whose bandwidth it takes; -1
	size_t n;            // pieces
	struct piece *piece;
	void *snapshot;      // what pieces were read into by the call itself
	size_t unit;         // of a FILL: bytes of value
	unsigned value;
	struct CUevent_st *event;
	uint32_t ticket;
	CUhostFn fn;
	void *arg;
	int kernel;
	uint64_t parameter[4];
};

struct CUstream_st {
	uint32_t magic;
	int priority;
	unsigned flags;
	struct CUctx_st *ctx;
	pthread_mutex_t lock; // guards what follows
	pthread_cond_t more, less;
	struct op *head, *tail;
	uint64_t pushed, done; // operations
	int refs;                 // its thread, and who drains it; with next, under streams_lock
	struct CUstream_st *next;
};

// The state of an event: in a memfd where other processes share it.
struct event_state {
	uint32_t wanted, done; // records: asked for, reached
	int64_t at;            // ns, of the last
};

struct CUevent_st {
	uint32_t magic;
	unsigned flags;
	int refs; // the caller's, and of operations
	struct event_state *state;
	struct CUctx_st *ctx;
	int fd; // -1: of this process alone
	uint64_t key;
};

struct CUfunc_st {
	int kernel; // -1: it cannot be launched here
	char name[128];
};

struct CUmod_st {
	uint32_t magic;
	struct CUctx_st *ctx;
	char *text;
	int functions;
	struct CUfunc_st function[FUNCTIONS];
};

enum { CONTEXT = 0x43545831, STREAM = 0x53545231, EVENT = 0x45564e31, MODULE = 0x4d4f4431 };

extern __thread struct CUctx_st *stack[DEPTH];
extern __thread int depth;
#define CURRENT (stack[depth - 1])

extern struct shared_control *control;
extern struct shared_process *self;
extern bool initialized;

// Every entry point begins with one of these.
#define ENTER(context)                                                        \
	do {                                                                  \
		static int call_;                                             \
		CUresult r_ = enter(&call_, __func__, context);               \
		if (r_)                                                       \
			return r_;                                            \
	} while (0)

#define NUMBER(d)                                                             \
	do {                                                                  \
		if ((d) < 0 || (d) >= (int)control->devices)                  \
			return CUDA_ERROR_INVALID_DEVICE;                     \
	} while (0)

// world.c
CUresult enter(int *call, const char *name, bool context);
void world_lock(void);
void world_unlock(void);
bool block_new(uint64_t key, size_t bytes, int device);
bool block_hold(uint64_t key, size_t bytes, int device);
void block_drop(uint64_t key);
size_t memory_used(int device);
int64_t now_ns(void);
void sleep_until(int64_t ns);
void futex_wait(uint32_t *word, uint32_t value, int64_t ns);
void futex_wake(uint32_t *word);
uint64_t random_key(void);
uint64_t process_start(uint32_t pid);

// range.c: of the address table, under table_lock where it says so.
extern pthread_mutex_t table_lock;
struct range *range_at(uint64_t address, size_t n);  // under table_lock
struct range *range_from(uint64_t base);             // under table_lock
bool range_overlaps(uint64_t address, size_t n);     // under table_lock
void range_insert(struct range *r);                  // under table_lock
void range_remove(struct range *r);                  // under table_lock
struct range *range_imported(uint64_t key);          // under table_lock
struct range *range_in(struct CUctx_st *c);          // under table_lock
char *range_bytes(uint64_t address, size_t n, struct range *first);
struct range *range_of(uint64_t address, struct range *copy);
bool is_host(const struct range *r);
size_t rounded(size_t n, size_t unit);
int memory_file(uint64_t key, int device, size_t n);
bool memory_is(const char *path, uint64_t *key, int *device);
int file_of(int pid, int fd, uint64_t key);

// memory.c
void memory_end(struct CUctx_st *c);
void range_free(struct range *r);

// device.c
struct CUctx_st *context_new(int device, unsigned flags);

// stream.c
struct CUstream_st *stream_new(struct CUctx_st *c, unsigned flags, int priority);
void stream_end(struct CUstream_st *s);
void streams_end(struct CUctx_st *c);
CUresult stream_of(struct CUstream_st **s);
void stream_push(struct CUstream_st *s, struct op *o);
void stream_drain(struct CUstream_st *s);
void drain(struct CUctx_st *c, bool blocking);
struct op *op_new(int kind, size_t pieces);

// module.c
CUresult kernel_run(struct CUctx_st *c, int kernel, const uint64_t *parameter);
#endif
