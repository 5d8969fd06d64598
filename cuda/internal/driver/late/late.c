/* An archive named libcuda.a, which satisfies -lcuda when a program is linked,
 * and finds the driver when the program asks. Until then every entry point
 * answers CUDA_ERROR_NOT_INITIALIZED, but for cuInit, which answers success and
 * touches nothing: gorgonia.org/cu calls it before main and ends the process on
 * any other answer. So one binary runs everywhere, and says what is missing. */
#define _GNU_SOURCE
#include "late.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define X(name) extern void *late_slot_##name;
#include "names.def"
#undef X

static const struct {
	const char *name;
	void **slot;
} entries[] = {
#define X(name) {#name, &late_slot_##name},
#include "names.def"
#undef X
};
#define ENTRIES (sizeof entries / sizeof *entries)

/* Where drivers lie that the loader does not look for: containers, and Linux
 * under Windows. */
static const char *const places[] = {
	"libcuda.so.1",
	"/usr/local/nvidia/lib64/libcuda.so.1",
	"/usr/lib/wsl/lib/libcuda.so.1",
};

int late_unbound(void) { return 3; }          /* CUDA_ERROR_NOT_INITIALIZED */
static int late_missing(void) { return 801; } /* CUDA_ERROR_NOT_SUPPORTED */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char bound[4096]; /* the path that was asked for */
static int (*init)(unsigned int);

int cuInit(unsigned int flags) {
	(void)flags;
	return 0;
}

/* open_library leaves the first text in why: that of the usual place. */
static void *open_library(const char *path, char *why, size_t n) {
	const char *const *place = *path ? &path : places;
	size_t count = *path ? 1 : sizeof places / sizeof *places;
	for (size_t i = 0; i < count; i++) {
		void *library = dlopen(place[i], RTLD_NOW | RTLD_LOCAL);
		if (library)
			return library;
		const char *text = dlerror();
		/* A library that lies there and cannot be loaded says more. */
		if (i == 0 || access(place[i], F_OK) == 0)
			snprintf(why, n, "%s", text ? text : place[i]);
	}
	return NULL;
}

static int bind_once(const char *path, char *why, size_t n) {
	if (init) {
		if (strcmp(path, bound) == 0)
			return 0;
		snprintf(why, n, "this process uses %s already", *bound ? bound : places[0]);
		return -1;
	}
	if (strlen(path) >= sizeof bound) {
		snprintf(why, n, "a path of %zu bytes", strlen(path));
		return -1;
	}
	void *library = open_library(path, why, n);
	if (!library)
		return -1;
	int (*found)(unsigned int) = (int (*)(unsigned int))dlsym(library, "cuInit");
	if (!found) {
		snprintf(why, n, "%s has no cuInit", *path ? path : places[0]);
		dlclose(library);
		return -1;
	}
	for (size_t i = 0; i < ENTRIES; i++) {
		void *entry = dlsym(library, entries[i].name);
		__atomic_store_n(entries[i].slot, entry ? entry : (void *)late_missing, __ATOMIC_RELEASE);
	}
	strcpy(bound, path);
	init = found;
	return 0;
}

int late_bind(const char *path, char *why, size_t n) {
	pthread_mutex_lock(&lock);
	int result = bind_once(path, why, n);
	pthread_mutex_unlock(&lock);
	return result;
}

int late_init(void) { return init ? init(0) : late_unbound(); }

int late_has(const char *name) {
	for (size_t i = 0; i < ENTRIES; i++)
		if (strcmp(entries[i].name, name) == 0) {
			void *entry = __atomic_load_n(entries[i].slot, __ATOMIC_ACQUIRE);
			return entry != (void *)late_missing && entry != (void *)late_unbound;
		}
	return 0;
}
