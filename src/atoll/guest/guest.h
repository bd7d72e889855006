/* What the guest as a whole offers to its parts: see main.c. */
#ifndef ATOLL_GUEST_H
#define ATOLL_GUEST_H

#include <stdbool.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "frame.h"

/* Begins the operation that an OPEN asks for. */
void operation_open(uint32_t id, struct fields fields);

/* A new epoch has begun: watches the link again and dismisses idle supervisors and workers. */
void operation_epoch(void);

/* Kills every process that was started inside, then exits. */
_Noreturn void guest_end(int status);

/* Whether orphans are reparented to the nearest subreaper. Where they are not, they are reparented to the guest. */
bool guest_has_subreapers(void);

/* True for a child that must not be swept as an orphan: a supervisor, a worker, an orphan of a tree with a live
 * supervisor, or a foreign child (in tests, where the guest is not PID 1). */
bool guest_knows_child(pid_t pid);

/* Forks. In the child only the descriptors `keep` stay open, 0 to 2 are /dev/null, signals have their default actions,
 * its name is `name`, and it cannot be traced. -1 and errno as fork(). */
pid_t guest_fork(const char *name, const int *keep, int count);

/* The limit on open files that the guest was started with: programs get it, the guest raises its own. */
const struct rlimit *guest_first_nofile(void);

/* Sets the action of the two signals that the C library reserves and does not let sigaction() change. */
void guest_set_reserved_signals(void (*handler)(int));

#endif
