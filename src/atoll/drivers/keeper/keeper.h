/* What the keeper's files share. */
#ifndef ATOLL_KEEPER_H
#define ATOLL_KEEPER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_MAPS = 4, MAX_OVERLAYS = 8, MAX_LAYERS = 128, MAX_CGROUPS = 8, MAX_LIMITS = 8, MAX_FILES = 4 };

struct id_map {
    unsigned inside, outside, count;
};

struct overlay {
    const char *key;    /* its directory below upper/ and work/ */
    const char *target; /* "/" or a directory below it */
    char **layers;      /* top first */
    int layer_count;
    int machine_count;  /* of them, from the bottom, are the machine's own: nobody's inside */
};

struct plan {
    const char *dir; /* the sandbox's own directory, absolute */
    const char *cover; /* where the mounts are assembled, in a private mount namespace */
    struct {
        const char *name, *path;
    } files[MAX_FILES]; /* of the host, found by the runtime as COVER/NAME */
    int file_count;
    struct id_map uids[MAX_MAPS], gids[MAX_MAPS];
    int uid_count, gid_count;
    bool rootless;
    bool ephemeral;
    struct overlay overlays[MAX_OVERLAYS];
    int overlay_count;
    const char *cgroups[MAX_CGROUPS]; /* the runtime begins in these */
    int cgroup_count;
    struct {
        const char *file, *value;
    } limits[MAX_LIMITS]; /* set when the runtime is done */
    int limit_count;
    unsigned machine_base; /* where the ids of the machine's own layers are: in no sandbox */
    int confine_id; /* the keeper's own user and group once everything is open; -1: stay who we are */
    int listener, lock;
    char **command; /* the runtime and its arguments */
};

/* launch.c */
pid_t launch_runtime(const struct plan *plan);
void enter_namespaces(const struct plan *plan);
void give_up(const char *what) __attribute__((noreturn));

/* relay.c */
struct relay_ends {
    int from_guest, to_guest, listener, pidfd, exit_file;
    pid_t pid;
    bool ephemeral;
};
void relay_run(const struct relay_ends *ends) __attribute__((noreturn));
void relay_fail(int listener, int error, const char *message);

/* confine.c */
int confine(int id);

#endif
