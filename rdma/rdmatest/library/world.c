// The control file: mapping it, its lock, and its slots.
#define _GNU_SOURCE
#include "double.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t worlds_lock = PTHREAD_MUTEX_INITIALIZER;
static struct world *worlds;

// Whoever reads from this process's memory is a process of the same test.
__attribute__((constructor)) static void loaded(void)
{
	if (getenv("KVFERRY_VERBS_DOUBLE"))
		prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

// The world that the environment names now, or NULL with errno.
struct world *world_open(void)
{
	const char *dir = getenv("KVFERRY_VERBS_DOUBLE");
	struct world *w;
	if (!dir || !*dir) {
		errno = ENODEV;
		return NULL;
	}
	if (strlen(dir) + sizeof "/sys/class/infiniband/" + IBV_SYSFS_NAME_MAX > sizeof w->dir) {
		errno = ENAMETOOLONG;
		return NULL;
	}
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	pthread_mutex_lock(&worlds_lock);
	for (w = worlds; w; w = w->next)
		if (!strcmp(w->dir, dir)) {
			w->uses++;
			pthread_mutex_unlock(&worlds_lock);
			return w;
		}
	int e = ENOMEM, fd = -1;
	w = calloc(1, sizeof *w);
	if (!w)
		goto fail;
	strcpy(w->dir, dir);
	char path[sizeof w->dir + sizeof "/control"];
	snprintf(path, sizeof path, "%s/control", dir);
	struct stat st;
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 || fstat(fd, &st) < 0) {
		e = errno;
		goto fail;
	}
	if (st.st_size != (off_t)sizeof *w->control) {
		e = EPROTO;
		goto fail;
	}
	w->control = mmap(NULL, sizeof *w->control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (w->control == MAP_FAILED) {
		e = errno;
		goto fail;
	}
	if (w->control->magic != CONTROL_MAGIC || w->control->version != CONTROL_VERSION || w->control->devices > MAX_DEVICES) {
		munmap(w->control, sizeof *w->control);
		e = EPROTO;
		goto fail;
	}
	w->fd = fd;
	w->uses = 1;
	pthread_mutex_init(&w->lock, NULL);
	w->next = worlds;
	worlds = w;
	pthread_mutex_unlock(&worlds_lock);
	return w;
fail:
	pthread_mutex_unlock(&worlds_lock);
	if (fd >= 0)
		close(fd);
	free(w);
	errno = e;
	return NULL;
}

void world_release(struct world *w)
{
	pthread_mutex_lock(&worlds_lock);
	if (--w->uses == 0) {
		struct world **p = &worlds;
		while (*p != w)
			p = &(*p)->next;
		*p = w->next;
		munmap(w->control, sizeof *w->control);
		close(w->fd);
		pthread_mutex_destroy(&w->lock);
		free(w);
	}
	pthread_mutex_unlock(&worlds_lock);
}

// flock belongs to the open file, which the threads of a process share.
void world_lock(struct world *w)
{
	pthread_mutex_lock(&w->lock);
	while (flock(w->fd, LOCK_EX) < 0 && errno == EINTR)
		;
}

void world_unlock(struct world *w)
{
	flock(w->fd, LOCK_UN);
	pthread_mutex_unlock(&w->lock);
}

// Counts a call of a verb; true, and errno, if it is the one that must fail.
bool world_inject(struct world *w, int verb)
{
	struct shared_faults *f = &w->control->faults;
	uint32_t call = count(f->calls[verb], 1) + 1;
	if (get(f->enomem[verb]) != call)
		return false;
	errno = ENOMEM;
	return true;
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

bool alive(const struct shared_context_slot *s)
{
	uint32_t pid = get(s->pid);
	return pid && process_start(pid) == s->start;
}

struct shared_region *region_of(struct world *w, uint32_t key)
{
	struct shared_region *r = &w->control->region[key % MAX_REGIONS];
	return key && get(r->key) == key ? r : NULL;
}

struct shared_queue_pair *qp_of(struct world *w, uint32_t num)
{
	struct shared_queue_pair *q = &w->control->qp[num % MAX_QPS];
	return num && get(q->num) == num ? q : NULL;
}

// Gives a context's slot back, with all that is still made on it. Under the lock.
void context_free(struct world *w, uint32_t slot)
{
	struct shared_control *m = w->control;
	struct shared_context_slot *s = &m->context[slot];
	for (uint32_t i = 0; i < MAX_QPS; i++)
		if (m->qp[i].context == slot && m->qp[i].context_life == s->generation)
			put(m->qp[i].num, 0);
	for (uint32_t i = 0; i < MAX_REGIONS; i++)
		if (m->region[i].context == slot && m->region[i].context_life == s->generation)
			put(m->region[i].key, 0);
	memset(s->live, 0, sizeof s->live);
	s->locked = 0;
	put(s->pid, 0);
}

// Gives back what dead processes held. Under the lock.
void reclaim(struct world *w)
{
	for (uint32_t i = 0; i < MAX_CONTEXTS; i++) {
		struct shared_context_slot *s = &w->control->context[i];
		if (get(s->pid) && !alive(s))
			context_free(w, i);
	}
}

struct shared_context_slot *context_slot(struct world *w, uint32_t device, uint32_t *slot)
{
	struct shared_control *m = w->control;
	world_lock(w);
	reclaim(w);
	for (uint32_t k = 0; k < MAX_CONTEXTS; k++) {
		uint32_t i = (m->next_context + k) % MAX_CONTEXTS;
		struct shared_context_slot *s = &m->context[i];
		if (get(s->pid))
			continue;
		m->next_context = (i + 1) % MAX_CONTEXTS;
		s->generation++;
		s->device = device;
		s->start = process_start(getpid());
		s->locked = 0;
		memset(s->live, 0, sizeof s->live);
		s->live[LIVE_CONTEXT] = 1;
		memcpy(s->base, s->total, sizeof s->base);
		s->owner = (uint32_t)getpid();
		put(s->pid, s->owner);
		*slot = i;
		world_unlock(w);
		return s;
	}
	world_unlock(w);
	errno = ENOMEM;
	return NULL;
}
