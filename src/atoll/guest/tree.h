/* Process trees: see tree.c. */
#ifndef ATOLL_TREE_H
#define ATOLL_TREE_H

#include <stdbool.h>
#include <sys/types.h>

#include "worker.h"

/* Sends a signal to everything below `root`. How many there were. */
int tree_signal(pid_t root, int signal);

/* One sweep of a kill: stops everything below `root` until nothing new turns up, then kills it. Subtrees of those
 * children of `root` that `spare` (may be NULL) names are left alone. How many were killed. To be repeated, with
 * waitpid() in between, until nothing is left. */
int tree_kill_sweep(pid_t root, bool (*spare)(pid_t child));

/* Sweeps and reaps until the caller, which must be `root`, has no other child than spared ones; gives up after some
 * seconds on what not even SIGKILL ends. */
void tree_kill_all(pid_t root, bool (*spare)(pid_t child));

int tree_children(pid_t root, pid_t *children, int most);

extern const struct operation operation_ps;

#endif
