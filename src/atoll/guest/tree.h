/* Process trees: see tree.c. */
#ifndef ATOLL_TREE_H
#define ATOLL_TREE_H

#include <stdbool.h>
#include <sys/types.h>

#include "worker.h"

/* Which processes are meant: those below `root`, without the subtrees of its children that `spare` (may be NULL)
 * names. Where orphans do not come to their subreaper (gVisor until 2023), the tree has a brand, and all that carry it
 * are meant as well; 0: it has none. */
struct tree {
    pid_t root;
    bool (*spare)(pid_t child);
    int brand;
};

/* A brand is an oom_score_adj, which children inherit: the usual one, or one that no other tree has. A process may
 * change its own: a brand finds what strayed, not what flees. */
enum { TREE_USUAL_BRAND = 500, TREE_LAST_BRAND = 1000 };
int tree_brand_of(pid_t pid);

/* Sends a signal to all of them. How many there were. */
int tree_signal(const struct tree *tree, int signal);

/* True when none of them lives any more. */
bool tree_is_empty(const struct tree *tree);

/* One sweep of a kill: stops all of them until nothing new turns up, then kills them. How many were killed. To be
 * repeated, with waitpid() in between, until nothing is left. */
int tree_kill_sweep(const struct tree *tree);

/* Sweeps and reaps until nothing is left; gives up after some seconds on what not even SIGKILL ends. */
void tree_kill_all(const struct tree *tree);

int tree_children(pid_t root, pid_t *children, int most);

extern const struct operation operation_ps;

#endif
