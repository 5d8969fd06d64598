/* The driver, bound when it is asked for: see late.c. */
#ifndef KVFERRY_LATE_H
#define KVFERRY_LATE_H
#include <stddef.h>

/* late_bind loads the library and binds every entry point, once a process; a
 * path of "" is where drivers lie. 0, or -1 and a text in why. */
int late_bind(const char *path, char *why, size_t n);

/* late_init is the driver's own cuInit. */
int late_init(void);

/* late_has says whether the bound driver has the entry point. */
int late_has(const char *name);

#endif
