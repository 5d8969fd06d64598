// memcpy BYTES
//
// How fast the C library's memcpy copies from descriptor 3 to descriptor 4, each a
// file of BYTES bytes in memory, which are mapped and populated before "ready" is
// printed. What the source holds is for others to write, and what has arrived in
// the target for others to check.
//
// An order on stdin is a struct order and as many struct copy; the threads take the
// copies in their order, a handful at once, each of them at least once, and from
// the first again until the time is over. The answer is a line, "ok BYTES
// NANOSECONDS", or "error" and why, with which the process ends, as it does with the
// end of stdin.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { max_threads = 256 };

struct order {
	uint64_t copies, handful, threads, nanoseconds;
};

struct copy {
	uint64_t from, to, bytes;
};

struct work {
	struct order order;
	const struct copy *copies;
	const char *source;
	char *target;
	uint64_t end; // when the time is over
	pthread_barrier_t begin;
	atomic_uint_fast64_t next, bytes;
};

static _Noreturn void die(const char *format, ...) {
	va_list args;
	va_start(args, format);
	fputs("error ", stdout);
	vprintf(format, args);
	putchar('\n');
	va_end(args);
	exit(1);
}

static uint64_t now(void) {
	struct timespec t;
	if (clock_gettime(CLOCK_MONOTONIC, &t) != 0) die("clock_gettime: %s", strerror(errno));
	return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

static char *map(int fd, uint64_t bytes, int protection) {
	struct stat s;
	if (fstat(fd, &s) != 0) die("stat descriptor %d: %s", fd, strerror(errno));
	if ((uint64_t)s.st_size < bytes) die("descriptor %d has %lld bytes, want %llu", fd, (long long)s.st_size, (unsigned long long)bytes);
	void *at = mmap(NULL, bytes, protection, MAP_SHARED | MAP_POPULATE, fd, 0);
	if (at == MAP_FAILED) die("map descriptor %d: %s", fd, strerror(errno));
	return at;
}

static void *run(void *arg) {
	struct work *w = arg;
	const struct order o = w->order;
	uint64_t handfuls = (o.copies + o.handful - 1) / o.handful, bytes = 0;
	pthread_barrier_wait(&w->begin);
	for (;;) {
		uint64_t n = atomic_fetch_add(&w->next, 1);
		if (n >= handfuls && now() >= w->end) break;
		uint64_t i = n % handfuls * o.handful, last = i + o.handful;
		if (last > o.copies) last = o.copies;
		for (; i < last; i++) {
			struct copy c = w->copies[i];
			memcpy(w->target + c.to, w->source + c.from, c.bytes);
			bytes += c.bytes;
		}
	}
	atomic_fetch_add(&w->bytes, bytes);
	return NULL;
}

int main(int argc, char **argv) {
	char *rest;
	errno = 0;
	uint64_t bytes = argc == 2 ? strtoull(argv[1], &rest, 10) : 0;
	if (bytes == 0 || errno != 0 || *rest != 0) die("usage: memcpy BYTES");
	static struct work w;
	w.source = map(3, bytes, PROT_READ);
	w.target = map(4, bytes, PROT_READ | PROT_WRITE);
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (fread(&w.order, sizeof w.order, 1, stdin) == 1) {
		const struct order o = w.order;
		if (o.copies < 1 || o.copies > bytes || o.handful < 1 || o.handful > o.copies || o.threads < 1 || o.threads > max_threads) die("order out of bounds");
		struct copy *copies = calloc(o.copies, sizeof *copies);
		if (copies == NULL) die("no memory for %llu copies", (unsigned long long)o.copies);
		if (fread(copies, sizeof *copies, o.copies, stdin) != o.copies) die("order cut short");
		for (uint64_t i = 0; i < o.copies; i++) {
			struct copy c = copies[i];
			if (c.bytes > bytes || c.from > bytes - c.bytes || c.to > bytes - c.bytes) die("copy %llu out of bounds", (unsigned long long)i);
		}
		w.copies = copies;
		atomic_store(&w.next, 0);
		atomic_store(&w.bytes, 0);
		pthread_t threads[max_threads];
		pthread_barrier_init(&w.begin, NULL, (unsigned)o.threads + 1);
		for (uint64_t i = 0; i < o.threads; i++) {
			int failed = pthread_create(&threads[i], NULL, run, &w);
			if (failed != 0) die("start a thread: %s", strerror(failed));
		}
		uint64_t start = now();
		w.end = start + o.nanoseconds;
		pthread_barrier_wait(&w.begin);
		for (uint64_t i = 0; i < o.threads; i++) pthread_join(threads[i], NULL);
		uint64_t took = now() - start;
		pthread_barrier_destroy(&w.begin);
		free(copies);
		printf("ok %llu %llu\n", (unsigned long long)atomic_load(&w.bytes), (unsigned long long)took);
	}
	return 0;
}
