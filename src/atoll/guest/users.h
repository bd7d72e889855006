/* Users of the sandbox: see users.c. */
#ifndef ATOLL_USERS_H
#define ATOLL_USERS_H

#include <stdbool.h>
#include <sys/types.h>

struct account {
    uid_t uid;
    gid_t gid;
    char *name;
    char *home;
    char *shell;
    gid_t *groups;
    int group_count;
    char *text; /* what the strings lie in */
};

/* `--user NAME:UID:GID:HOME`: one that is known although /etc/passwd has no such entry. False when malformed. */
bool users_add(const char *definition);

/* `--home UID:GID:PATH`: makes that directory and its parents, and gives it to that user. False when malformed. */
bool users_make_home(const char *definition);

/* Finds a NAME, `uid` or `uid:gid` (NULL: root) with home, shell and groups. 0 or an errno. Reads files of the
 * sandbox, which may be slow or hostile: only for supervisors and workers. */
int users_find(const char *spec, struct account *account);
void users_forget(struct account *account);

/* Becomes that user for good, with bare system calls only, so that it may run in a vfork()ed child. 0 or an errno. */
int users_become(const struct account *account);

#endif
