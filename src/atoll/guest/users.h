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
    char *text; /* the memory of the strings */
};

/* `--user NAME:UID:GID:HOME`: a user without an entry in /etc/passwd. False when malformed. */
bool users_add(const char *definition);

/* `--home UID:GID:PATH`: makes that directory and its parents, owned by that user. False when malformed. */
bool users_make_home(const char *definition);

/* Finds a user by name or uid, `:group` with a name or gid after it (NULL: root), with home, shell and groups. 0 or an
 * errno. Reads files of the sandbox, which may be slow or hostile: only for supervisors and workers. */
int users_find(const char *spec, struct account *account);
void users_forget(struct account *account);

/* Changes to that user for good, with system calls only, so that it may run in a vfork()ed child. 0 or an errno. */
int users_become(const struct account *account);

#endif
