/* What the keeper's files share. */
#ifndef ATOLL_KEEPER_H
#define ATOLL_KEEPER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_MAPS = 4, MAX_OVERLAYS = 8, MAX_LAYERS = 128, MAX_CGROUPS = 8, MAX_LIMITS = 8, MAX_FILES = 4, MAX_OWNERS = 130 };

struct id_map {
    unsigned inside, outside, count;
};

struct overlay {
    const char *key;    /* its directory below upper/ and scratch/ */
    const char *target; /* "/" or a directory below it */
    char **layers;      /* top first; each a path, then the id on disk of what root inside owns, or "machine" */
    int layer_count;
};

struct plan {
    const char *dir; /* the sandbox's own directory, absolute */
    const char *top; /* where upper/ and scratch/ are */
    const char *cover; /* where the mounts are assembled, in a private mount namespace */
    struct {
        const char *name, *path;
    } files[MAX_FILES]; /* of the host, found by the runtime as COVER/NAME */
    int file_count;
    struct id_map uids[MAX_MAPS], gids[MAX_MAPS];
    int uid_count, gid_count;
    bool rootless;
    bool ephemeral;
    bool foreground; /* the command stays, and its child is the sandbox's first process */
    struct overlay overlays[MAX_OVERLAYS];
    int overlay_count;
    const char *cgroups[MAX_CGROUPS]; /* the runtime begins in these */
    int cgroup_count;
    struct {
        const char *file, *value;
    } limits[MAX_LIMITS]; /* set when the runtime is done */
    int limit_count;
    const char *freezer[5]; /* the file to write to, what freezes, what thaws, the file that tells, and its line */
    uint64_t disk_bytes; /* that may be written to the top; 0: no limit */
    unsigned pause_after_ms;
    int64_t epoch;
    unsigned machine_base; /* where the ids of the machine's own layers are: in no sandbox */
    int confine_id; /* the keeper's own user and group once everything is open; -1: stay who we are */
    unsigned owner; /* whose the namespaces of the sandbox are that is to be named */
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
    int freezer, frozen; /* files of the cgroup: to write to, and to read; -1: there is none */
    const char *freeze, *thaw, *is_frozen; /* what to write, and the line that tells */
    int pause_after_ms;  /* 0: never by itself */
    int activity;        /* where the time of the last use is noted */
    int64_t epoch;       /* of a guest that goes on where it was: what its HELLO must say; 0: it is a new one */
};
void relay_run(const struct relay_ends *ends) __attribute__((noreturn));
/* Tells a guest that is about to go on that a new epoch has begun. It must be there before the guest is: gVisor wakes a
 * process that it restored for what it finds, not for what comes (until the process watches anew). */
void relay_announce(const struct relay_ends *ends);
void relay_fail(int listener, int error, const char *message);

/* copy.c */
/* Copies what is in a layer to an empty one. `earlier` is a copy that was made of the same layer before, or NULL. */
void copy_layer(const char *source, const char *target, const char *earlier);
/* Fills an empty layer with what is seen of several, given as path and owner, the lowest first. */
void merge_layers(const char *target, unsigned owner, char **layers, int count, bool rootless);

/* bound.c */
int bound(int layer, uint64_t bytes);

/* naming.c */
void name_sandbox(unsigned owner, const char *pid, const char *hostname);

/* confine.c */
int confine(int id);

#endif
