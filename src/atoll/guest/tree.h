/* Process trees: see tree.c. */
#ifndef ATOLL_TREE_H
#define ATOLL_TREE_H

#include <stdbool.h>
#include <sys/types.h>

#include "worker.h"

/* The processes below `root`, except the subtrees of those of its children that `spare` (may be NULL) accepts. Where
 * orphans are not reparented to their subreaper (gVisor until 2023), the tree also has a marker, and includes every
 * process that carries it; 0: no marker. */
struct tree {
    pid_t root;
    bool (*spare)(pid_t child);
    int marker;
};

/* A marker is an oom_score_adj, which children inherit: the default one, or one that no other tree has. A process may
 * change its own: the marker finds daemons, not a process that resets it. */
enum { TREE_DEFAULT_MARKER = 500, TREE_LAST_MARKER = 1000 };
int tree_marker_of(pid_t pid);

/* Sends a signal to all of them. Returns how many there were. */
int tree_signal(const struct tree *tree, int signal);

/* True when a process is one of them, at most `depth` generations below the root. */
bool tree_contains(const struct tree *tree, pid_t pid, int depth);

/* True when none of them is alive. */
bool tree_is_empty(const struct tree *tree);

/* One sweep: stops all of them until a scan finds no new one, then kills them. Returns how many were killed. To be
 * repeated, with waitpid() in between, until nothing is left. */
int tree_kill_sweep(const struct tree *tree);

/* Sweeps and reaps until nothing is left; gives up after 5 s on processes that SIGKILL does not end. */
void tree_kill_all(const struct tree *tree);

/* The parent of a process; 0 when there is no such process. */
pid_t tree_parent(pid_t pid);

int tree_children(pid_t root, pid_t *children, int most);

extern const struct operation operation_ps;

#endif
