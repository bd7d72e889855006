/* What the keeper's files share.
 *
 * A keeper is the process on the host that owns one sandbox: it starts the sandbox's runtime, relays between clients
 * and the guest, and reports the sandbox's end. containerd calls such a process a shim, Podman conmon.
 *
 * The start handshake. The FIFOs `in` and `out`, the socket `sock` and the lock are made by the driver beforehand.
 *
 *   driver, clients            keeper                       runtime (crun, runc, runsc) (1) guest (PID 1)
 *     |                          |                            |                               |
 *     |-- exec: keeper start --->|                            |                               |
 *     |<------- exit status 0 ---| fork into the cgroup of keepers, setsid                    |
 *     |                          | its pid into the lock      |                               |
 *     |-- connect: sock -------->| (waits in the backlog)     |                               |
 *     |                          |-- HELLO EPOCH=n into `in`, of a restored sandbox alone --->| (read on resuming)
 *     |                          |-- fork, mounts, exec ----->|                               |
 *     |                          |                            |-- create, start ------------->|
 *     |                          |<-- file `pid`, status 0 ---|                               |
 *     |                          | limits, freezer, pidfd, confine()                          |
 *     |                          |<-- HELLO from `out` ---------------------------------------|
 *     |<-- HELLO ----------------|                            |                               |
 *     |<-- frames -------------->|<-- frames, with the keeper's stream numbers -------------->|
 *     |                          |                            |                               |
 *     |<-- GONE -----------------| pidfd readable: the reason also goes into the file `ended`
 *
 * (1) A runtime that stays in the foreground (bwrap, `--foreground`) writes no file `pid` and does not exit: the keeper
 * waits for bytes from `out`, writes the pid of the runtime's child to the file, and kills the runtime.
 *
 * If the runtime fails or takes more than 30 s, a limit cannot be set, or the guest sends no HELLO within 20 s, the
 * clients are sent FAILED. If a step of the keeper's own fails, it exits with a line in keeper.log and the connections
 * end. The exit status of `keeper start` means only that a keeper was forked. */
#ifndef ATOLL_KEEPER_H
#define ATOLL_KEEPER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { MAX_MAPS = 4, MAX_OVERLAYS = 8, MAX_LAYERS = 128, MAX_CGROUPS = 8, MAX_LIMITS = 8, MAX_FILES = 8 };
enum { MAX_OWNERS = 130, MAX_KEEPER_CGROUPS = 4, MAX_MOUNTS = 16 };

struct id_map {
    unsigned inside, outside, count;
};

struct overlay {
    const char *key;    /* its directory below upper/ and work/ */
    const char *target; /* "/" or a directory below it */
    char **layers;      /* uppermost first; each a path and its owner: the id on disk of root's files, or "machine" */
    int layer_count;
};

/* A directory of the host that the runtime finds as COVER/mounts/NUMBER, without the mounts below it. */
struct bind {
    const char *path; /* absolute; a symlink in it is refused */
    bool read_only;
    struct id_map uids[MAX_MAPS], gids[MAX_MAPS]; /* `inside` is on disk, `outside` what the sandbox's namespace maps */
    int uid_count, gid_count; /* 0: not id-mapped */
};

struct plan {
    const char *dir; /* the sandbox's own directory, absolute */
    const char *active_layer; /* the sandbox's writable layer, which holds upper/ and work/ */
    const char *cover; /* the directory on which the mounts are assembled, in a private mount namespace */
    struct {
        const char *name, *path;
    } files[MAX_FILES]; /* files and directories of the host that the runtime finds, read-only, as COVER/NAME */
    int file_count;
    struct bind mounts[MAX_MOUNTS];
    int mount_count;
    uint64_t scratch_bytes; /* the size of /dev, /run and /sys, made here; 0: the runtime makes its own */
    struct id_map uids[MAX_MAPS], gids[MAX_MAPS];
    int uid_count, gid_count;
    bool rootless;
    bool ephemeral;
    bool foreground; /* the command stays, and its child is the sandbox's first process */
    struct overlay overlays[MAX_OVERLAYS];
    int overlay_count;
    const char *keeper_cgroups[MAX_KEEPER_CGROUPS]; /* the cgroups of all keepers, one per hierarchy; may be missing */
    int keeper_cgroup_count;
    const char *cgroups[MAX_CGROUPS]; /* the cgroups that the runtime is started in */
    int cgroup_count;
    struct {
        const char *file, *value;
    } limits[MAX_LIMITS]; /* cgroup settings, written after the runtime has exited */
    int limit_count;
    const char *freezer[5]; /* file to write, value to freeze, value to thaw, file to read, its line when frozen */
    const char *oom; /* the cgroup's file with a line "oom_kill N", if such a kill ends the sandbox; NULL: none */
    uint64_t disk_bytes; /* the quota of the active layer; 0: none */
    unsigned pause_after_ms;
    int64_t expires_ms; /* by the clock of the day: when the sandbox's lifetime is over; 0: never */
    int64_t renewal_ms; /* at least so long after each use; 0: use does not renew it */
    bool freezes_at_end; /* its processes are to be saved then: it is not ended, but frozen */
    int64_t epoch;
    unsigned machine_base; /* ids for files of the machine's own layers: no sandbox maps them */
    int confine_id; /* the user and group that the keeper changes to once all files are open; -1: no change */
    unsigned owner; /* verb hostname: the user id that owns the sandbox's namespaces */
    int listener, lock;
    char **command; /* the runtime and its arguments */
};

/* launch.c */
bool is_v2(const char *cgroup);
/* Forks into a v2 cgroup: moving the child there afterwards would wait for an RCU grace period. */
pid_t fork_into(const char *cgroup);
/* Moves the calling thread, which in v1 does not wait for a grace period. 0, or -1 and errno. */
int join_v1(const char *cgroup);
pid_t launch_runtime(const struct plan *plan);
void enter_namespaces(const struct plan *plan);
/* Whether the file system of a directory can be id-mapped: 0, or -1 and errno. */
int try_id_mapping(const char *path);
void give_up(const char *what) __attribute__((noreturn));

/* relay.c */
struct relay_ends {
    int from_guest, to_guest, listener, pidfd, exit_file;
    pid_t pid;
    bool ephemeral;
    int freezer, frozen; /* the cgroup's files, to write and to read; -1: no freezer */
    int oom;             /* the cgroup's file that counts out-of-memory kills; -1: none */
    const char *freeze, *thaw, *is_frozen; /* the values to write, and the line to look for */
    int pause_after_ms;  /* idle time before the keeper freezes the sandbox; 0: never */
    int64_t expires_ms, renewal_ms; /* as in `struct plan` */
    bool freezes_at_end;
    int activity;        /* the file that holds the time of the last use */
    int64_t epoch;       /* of a restored guest: the EPOCH of its HELLO; 0: a new guest */
};
void relay_run(const struct relay_ends *ends) __attribute__((noreturn));
/* Sends a restored guest the HELLO of its new epoch. It must be in the FIFO before the guest resumes: gVisor wakes a
 * restored process for data that is already there, and for later data only once the process polls again. */
void relay_announce(const struct relay_ends *ends);
void relay_fail(int listener, int error, const char *message);

/* copy.c */
/* Copies a layer into an empty one. `earlier` is a previous copy of the same layer, or NULL. */
void copy_layer(const char *source, const char *target, const char *earlier);
/* Merges several layers, given as path and owner, the lowest first, into an empty one. */
void merge_layers(const char *target, unsigned owner, char **layers, int count, bool rootless);

/* quota.c: 0, or -1 and errno. */
int set_quota(int layer, uint64_t bytes);

/* hostname.c */
void set_hostname(unsigned owner, const char *pid, const char *hostname);

/* confine.c: 0, or -1 and errno. */
int confine(int id);

#endif
