// The table of addresses that the driver knows.
#define _GNU_SOURCE
#include "double.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static struct range **table; // by base
static size_t count, room;
static uint64_t ids;

size_t rounded(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

bool is_host(const struct range *r) { return r->kind == ALLOCATED || r->kind == REGISTERED; }

// How many ranges begin at the address or before it.
static size_t before(uint64_t address)
{
	size_t lo = 0, hi = count;
	while (lo < hi) {
		size_t m = (lo + hi) / 2;
		if (table[m]->base <= address)
			lo = m + 1;
		else
			hi = m;
	}
	return lo;
}

struct range *range_at(uint64_t address, size_t n)
{
	size_t i = before(address);
	if (!i)
		return NULL;
	struct range *r = table[i - 1];
	uint64_t at = address - r->base;
	return at < r->size && n <= r->size - at ? r : NULL;
}

struct range *range_from(uint64_t base)
{
	struct range *r = range_at(base, 0);
	return r && r->base == base ? r : NULL;
}

bool range_overlaps(uint64_t address, size_t n)
{
	size_t i = before(address + (n ? n - 1 : 0));
	return i && table[i - 1]->base + table[i - 1]->size > address;
}

void range_insert(struct range *r)
{
	if (count == room) {
		room = room ? 2 * room : 64;
		table = realloc(table, room * sizeof(struct range *));
		if (!table)
			abort();
	}
	size_t i = before(r->base);
	memmove(table + i + 1, table + i, (count - i) * sizeof(struct range *));
	table[i] = r;
	r->id = ++ids;
	count++;
}

void range_remove(struct range *r)
{
	size_t i = before(r->base) - 1;
	memmove(table + i, table + i + 1, (count - i - 1) * sizeof(struct range *));
	count--;
}

struct range *range_imported(uint64_t key)
{
	for (size_t i = 0; i < count; i++)
		if (table[i]->kind == IMPORTED && table[i]->key == key)
			return table[i];
	return NULL;
}

// One that ends with a context; NULL if there is none.
struct range *range_in(struct CUctx_st *c)
{
	for (size_t i = 0; i < count; i++)
		if (table[i]->ctx == c)
			return table[i];
	return NULL;
}

// Where this library reads and writes n bytes, and what is there; NULL if they
// do not lie in one range, or in chunks that are mapped side by side.
char *range_bytes(uint64_t address, size_t n, struct range *first)
{
	char *bytes = NULL;
	pthread_mutex_lock(&table_lock);
	struct range *r = range_at(address, 0);
	if (r) {
		uint64_t end = r->base + r->size;
		bool ok = r->kind != CHUNK || r->access;
		for (size_t i = before(address); ok && end - address < n; i++) {
			ok = i < count && r->kind == CHUNK && table[i]->kind == CHUNK && table[i]->in == r->in && table[i]->base == end && table[i]->access;
			if (ok)
				end += table[i]->size;
		}
		if (ok)
			bytes = r->alias + (address - r->base);
		*first = *r;
	}
	pthread_mutex_unlock(&table_lock);
	return bytes;
}

// What lies at an address; NULL if nothing does.
struct range *range_of(uint64_t address, struct range *copy)
{
	pthread_mutex_lock(&table_lock);
	struct range *r = range_at(address, 0);
	if (r)
		*copy = *r;
	pthread_mutex_unlock(&table_lock);
	return r ? copy : NULL;
}

// The name of a memfd says what it is, to whoever gets its descriptor.
int memory_file(uint64_t key, int device, size_t n)
{
	char name[64];
	snprintf(name, sizeof name, "kvferry-cuda-%d-%016llx", device, (unsigned long long)key);
	int fd = memfd_create(name, MFD_CLOEXEC);
	if (fd >= 0 && ftruncate(fd, (off_t)n)) {
		close(fd);
		return -1;
	}
	return fd;
}

// Whether a link of /proc/PID/fd is to memory of a device, and what its name says.
bool memory_is(const char *path, uint64_t *key, int *device)
{
	char link[128];
	ssize_t n = readlink(path, link, sizeof link - 1);
	if (n < 0)
		return false;
	link[n] = 0;
	unsigned long long k;
	if (sscanf(link, "/memfd:kvferry-cuda-%d-%16llx", device, &k) != 2 || *device < 0 || *device >= (int)control->devices)
		return false;
	*key = k;
	return true;
}

// Opens what another process has at a descriptor, if it still is that memory.
int file_of(int pid, int fd, uint64_t key)
{
	char path[64];
	uint64_t found;
	int device;
	snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
	if (!memory_is(path, &found, &device) || found != key)
		return -1;
	int mine = open(path, O_RDWR | O_CLOEXEC);
	snprintf(path, sizeof path, "/proc/self/fd/%d", mine);
	if (mine >= 0 && (!memory_is(path, &found, &device) || found != key)) { // closed meanwhile
		close(mine);
		return -1;
	}
	return mine;
}
