/* The supervisor of a spawned process tree: see supervisor.c.
 *
 * Guest and supervisor exchange messages on a socket pair (SOCK_SEQPACKET, one message per send):
 *
 *   guest (slots.c, proc.c)                supervisor (supervisor.c)             main process
 *     |                                      |                                     |
 *     |-- fork, with the first spawn_job --->|                                     |
 *     |                                      |-- vfork ... execve ---------------->|
 *     |<-- STARTED pid, uid -----------------|  (QUIET: held for a moment)         |
 *     |       or REFUSED errno, subject -----|  (then EMPTY, below)                |
 *     |                                      |                                     |
 *     |-- command: signal, tree, sequence -->|-- kill() or tree_signal() --------->|
 *     |<-- DONE errno, sequence -------------|                                     |
 *     |                                      |<-- SIGCHLD -------------------------| exits
 *     |<-- ENDED wait status, duration ------|                                       (its orphans may live on)
 *     |<-- EMPTY ----------------------------|  nothing of the tree is left: idle
 *     |                                      |
 *     |-- COMMAND_JOB, request, SCM_RIGHTS ->|-- vfork ... execve: the next process
 *     |                                      |
 *     |-- close ---------------------------->|  not needed, or the guest is gone: kills its tree and exits
 *
 * A command that crosses EMPTY was meant for processes that are gone: an idle supervisor ignores all but COMMAND_JOB. A
 * supervisor that dies closes the socket; the guest then sweeps up its orphans (proc.c). */
#ifndef ATOLL_SUPERVISOR_H
#define ATOLL_SUPERVISOR_H

#include <stdint.h>

#include "frame.h"

/* One process to start: the request, and the process's ends of all its channels. -1: there is none. */
struct spawn_job {
    struct fields fields;
    int link; /* the socket to the guest */
    int in, out, err;
    int terminal; /* the master, of which the supervisor opens the other side */
    int extras[MAX_CHANNELS];
    int extra_count;
    int marker; /* see tree.h */
};

enum { MAX_ENDS = 4 + MAX_CHANNELS, MAX_JOB_BYTES = 32 << 10 };

/* From the guest. */
struct supervisor_command {
    int32_t signal; /* or COMMAND_JOB */
    int32_t tree;   /* 1: the signal is for the whole tree */
    uint32_t sequence;
    /* With COMMAND_JOB the request follows, at most MAX_JOB_BYTES, and descriptors come along: those that have a bit in
     * `ends`, in the order of struct spawn_job. */
    int32_t marker;
    uint32_t ends;
};

enum { COMMAND_JOB = -1 };

/* To the guest. */
enum report_kind {
    REPORT_STARTED = 1, /* value: pid, number: uid */
    REPORT_REFUSED,     /* value: errno, text: its subject */
    REPORT_ENDED,       /* value: wait status, number: duration in µs */
    REPORT_DONE,        /* value: 0 or errno, number: the command's sequence */
    REPORT_EMPTY,       /* nothing is left of the tree; the supervisor is idle */
};

struct report {
    int32_t kind;
    int32_t value;
    int64_t number;
    char text[112];
};

enum { MAX_REPORTS = 4 }; /* in one message */

_Noreturn void supervisor_run(const struct spawn_job *first);

#endif
