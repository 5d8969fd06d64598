// The file that all processes of a world map: faults, counts, and the memory of
// the devices.
#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct shared_control *control;
struct shared_process *self;
bool initialized;
__thread struct CUctx_st *stack[DEPTH];
__thread int depth;

static uint32_t slot;
static int control_fd = -1, trace_fd = -1;
static pthread_mutex_t world_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static CUresult broken; // why there is no world
static const char *const names[] = {
	NULL,
#define CALL(name) #name,
#include "calls.h"
#undef CALL
};
_Static_assert(sizeof names / sizeof *names <= MAX_CALLS, "more entry points than places to count them");

int64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

void sleep_until(int64_t ns)
{
	struct timespec t = {ns / 1000000000, ns % 1000000000};
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
		;
}

// Waits until the word has another value, is woken, or ns have gone.
void futex_wait(uint32_t *word, uint32_t value, int64_t ns)
{
	struct timespec t = {ns / 1000000000, ns % 1000000000};
	syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

void futex_wake(uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

uint64_t random_key(void)
{
	uint64_t k = 0;
	while (!k)
		if (getrandom(&k, sizeof k, 0) != sizeof k)
			k = (uint64_t)now_ns() ^ (uint64_t)getpid() << 40;
	return k;
}

// The start of a process in clock ticks since boot; 0 if there is none, or it
// is dead and only waits for its parent.
uint64_t process_start(uint32_t pid)
{
	char path[64], text[1024];
	snprintf(path, sizeof path, "/proc/%u/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return 0;
	text[n] = 0;
	char *p = strrchr(text, ')'); // the name before it may hold anything
	char state;
	unsigned long long start;
	if (!p || sscanf(p + 1, " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %llu", &state, &start) != 2)
		return 0;
	return state == 'Z' || state == 'X' ? 0 : start;
}

// flock belongs to the open file, which the threads of a process share.
void world_lock(void)
{
	pthread_mutex_lock(&world_mutex);
	while (control_fd >= 0 && flock(control_fd, LOCK_EX) < 0 && errno == EINTR)
		;
}

void world_unlock(void)
{
	if (control_fd >= 0)
		flock(control_fd, LOCK_UN);
	pthread_mutex_unlock(&world_mutex);
}

static bool held(const struct shared_block *b)
{
	for (size_t i = 0; i < sizeof b->holders / sizeof *b->holders; i++)
		if (b->holders[i])
			return true;
	return false;
}

static void drop(struct shared_block *b, uint32_t i)
{
	b->holders[i / 64] &= ~(1ull << i % 64);
	if (!held(b))
		put(b->key, 0);
}

// Gives back what dead processes held. Under the lock.
static void reclaim(void)
{
	for (uint32_t i = 0; i < MAX_PROCESSES; i++) {
		struct shared_process *p = &control->process[i];
		uint32_t pid = get(p->pid);
		if (!pid || process_start(pid) == p->start)
			continue;
		for (uint32_t b = 0; b < MAX_BLOCKS; b++)
			if (control->block[b].key)
				drop(&control->block[b], i);
		memset(p->live, 0, sizeof p->live);
		put(p->pid, 0);
	}
}

// Takes a place among the processes: one that none has had, or the one whose
// owner has been dead the longest.
static void join(void)
{
	world_lock();
	reclaim();
	for (uint32_t k = 0; k < MAX_PROCESSES; k++) {
		uint32_t i = (control->next + k) % MAX_PROCESSES;
		struct shared_process *p = &control->process[i];
		if (get(p->pid))
			continue;
		control->next = (i + 1) % MAX_PROCESSES;
		for (int c = 0; c < (int)MAX_CALLS; c++) {
			control->past[c] += p->calls[c];
			p->calls[c] = 0;
		}
		memset(p->live, 0, sizeof p->live);
		p->start = process_start((uint32_t)getpid());
		p->owner = (uint32_t)getpid();
		put(p->pid, p->owner);
		slot = i;
		self = p;
		world_unlock();
		return;
	}
	world_unlock();
	broken = CUDA_ERROR_OUT_OF_MEMORY;
}

// Maps the world that the environment names. Without one, this process is in
// a world of its own.
static void setup(void)
{
	const char *path = getenv("KVFERRY_CUDA_WORLD");
	if (path && *path) {
		struct stat st;
		control_fd = open(path, O_RDWR | O_CLOEXEC);
		if (control_fd < 0 || fstat(control_fd, &st) < 0 || st.st_size != (off_t)sizeof *control) {
			fprintf(stderr, "emulated CUDA driver: %s is no world of this library\n", path);
			broken = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
			return;
		}
	}
	control = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, control_fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, control_fd, 0);
	if (control == MAP_FAILED) {
		broken = CUDA_ERROR_OUT_OF_MEMORY;
		return;
	}
	if (control_fd < 0) {
		control->magic = CONTROL_MAGIC;
		control->version = CONTROL_VERSION;
		control->devices = 1;
		control->memory = 1ull << 30;
		control->driver = 12090;
		control->dmabuf = 1;
		control->ordered = 1;
	}
	if (control->magic != CONTROL_MAGIC || control->version != CONTROL_VERSION || control->devices > MAX_DEVICES) {
		fprintf(stderr, "emulated CUDA driver: %s is no world of this library\n", path);
		broken = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
		return;
	}
	if (control->trace[0])
		trace_fd = open((const char *)control->trace, O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0644);
	join();
}

static int number(const char *name)
{
	for (int i = 1; i < (int)(sizeof names / sizeof *names); i++)
		if (!strcmp(names[i], name))
			return i;
	fprintf(stderr, "emulated CUDA driver: %s is not in the header\n", name);
	abort();
}

// What a fault says to this call.
static CUresult injected(int call)
{
	struct shared_faults *f = &control->faults;
	uint32_t n = get(f->fails);
	CUresult r = CUDA_SUCCESS;
	for (uint32_t i = 0; i < n && i < MAX_FAILS; i++) {
		struct shared_fail *x = &f->fail[i];
		if (x->call != (uint32_t)call)
			continue;
		uint32_t seen = add(x->seen, 1) + 1;
		if (seen >= x->first && (!x->count || seen - x->first < x->count))
			r = (CUresult)x->code;
	}
	return r;
}

CUresult enter(int *call, const char *name, bool context)
{
	pthread_once(&once, setup);
	if (broken)
		return broken;
	int i = __atomic_load_n(call, __ATOMIC_RELAXED);
	if (!i)
		__atomic_store_n(call, i = number(name), __ATOMIC_RELAXED);
	add(self->calls[i], 1);
	if (trace_fd >= 0) {
		char line[128];
		int n = snprintf(line, sizeof line, "%d %s\n", (int)getpid(), name);
		if (write(trace_fd, line, (size_t)n) < 0)
			trace_fd = -1;
	}
	CUresult r = injected(i);
	if (r)
		return r;
	if (!get(initialized) && strcmp(name, "cuInit") && strcmp(name, "cuDriverGetVersion"))
		return CUDA_ERROR_NOT_INITIALIZED;
	if (context) {
		if (!depth || !CURRENT)
			return CUDA_ERROR_INVALID_CONTEXT;
		if (CURRENT->magic != CONTEXT)
			return CUDA_ERROR_CONTEXT_IS_DESTROYED;
		if (get(CURRENT->sticky))
			return CURRENT->sticky;
	}
	return CUDA_SUCCESS;
}

// What is in the header and not here.
CUresult unsupported(int *call, const char *name)
{
	CUresult r = enter(call, name, false);
	return r ? r : CUDA_ERROR_NOT_SUPPORTED;
}

// ---- the memory of the devices: a block for each memfd, and who holds it

// Bytes of a device that some living process holds. Under the lock.
static size_t used(int device)
{
	size_t n = 0;
	for (uint32_t i = 0; i < MAX_BLOCKS; i++)
		if (control->block[i].key && control->block[i].device == (uint32_t)device)
			n += control->block[i].bytes;
	return n;
}

size_t memory_used(int device)
{
	world_lock();
	reclaim();
	size_t n = used(device);
	world_unlock();
	return n;
}

static bool block_add(uint64_t key, size_t bytes, int device)
{
	for (uint32_t i = 0; i < MAX_BLOCKS; i++) {
		struct shared_block *b = &control->block[i];
		if (b->key)
			continue;
		memset(b->holders, 0, sizeof b->holders);
		b->holders[slot / 64] = 1ull << slot % 64;
		b->bytes = bytes;
		b->device = (uint32_t)device;
		b->owner = (uint32_t)getpid();
		put(b->key, key);
		return true;
	}
	return false;
}

// Takes memory of a device; false if there is not so much.
bool block_new(uint64_t key, size_t bytes, int device)
{
	world_lock();
	bool ok = used(device) + bytes <= control->memory;
	if (!ok) {
		reclaim();
		ok = used(device) + bytes <= control->memory;
	}
	ok = ok && block_add(key, bytes, device);
	world_unlock();
	return ok;
}

// Holds a block that another process has made: it lives on while we do.
bool block_hold(uint64_t key, size_t bytes, int device)
{
	bool ok = false;
	world_lock();
	for (uint32_t i = 0; i < MAX_BLOCKS && !ok; i++)
		if (control->block[i].key == key) {
			control->block[i].holders[slot / 64] |= 1ull << slot % 64;
			ok = true;
		}
	ok = ok || block_add(key, bytes, device);
	world_unlock();
	return ok;
}

void block_drop(uint64_t key)
{
	world_lock();
	for (uint32_t i = 0; i < MAX_BLOCKS; i++)
		if (control->block[i].key == key)
			drop(&control->block[i], slot);
	world_unlock();
}
