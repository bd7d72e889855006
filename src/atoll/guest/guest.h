/* What the guest as a whole offers to its parts: see main.c. */
#ifndef ATOLL_GUEST_H
#define ATOLL_GUEST_H

#include <stdbool.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "frame.h"

/* Begins the operation that an OPEN asks for. */
void operation_open(uint32_t id, struct fields fields);

/* A new epoch has begun: memory and supervisors that are only kept for reuse are released. */
void operation_epoch(void);

/* Ends everything that was started inside, and then the guest. */
_Noreturn void guest_end(int status);

/* Whether orphans come to the nearest subreaper above them. Where they do not, they come to the guest. */
bool guest_has_subreapers(void);

/* True for a child that the guest has a use for (a supervisor, a worker, an orphan of a tree that is
 * looked after) or did not make (in tests, where it is not
 * PID 1): one that must not be swept away as an orphan. */
bool guest_knows_child(pid_t pid);

/* Forks. In the child: only the named descriptors are left, 0 to 2 are /dev/null, signals are as usual, and the child
 * is named `name` and cannot be traced. -1 and errno as fork(). */
pid_t guest_fork(const char *name, const int *keep, int count);

/* The limit on open files that the guest was started with: what programs get, while the guest has more. */
const struct rlimit *guest_first_nofile(void);

/* What the two signals do that the C library keeps for itself, and lets nobody else set. */
void guest_set_reserved_signals(void (*handler)(int));

#endif
