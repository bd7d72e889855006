/* The sitter of a spawned process: see sitter.c. */
#ifndef ATOLL_SITTER_H
#define ATOLL_SITTER_H

#include <stdint.h>

#include "frame.h"

/* What a sitter sits on: the request, and the process's ends of everything. -1: there is none. */
struct sitting {
    struct fields fields;
    int link; /* to the guest, one message at a time: see below */
    int in, out, err;
    int terminal; /* the master, of which the sitter opens the other side */
    int extras[MAX_CHANNELS];
    int extra_count;
    int brand; /* see tree.h */
};

enum { MOST_ENDS = 4 + MAX_CHANNELS, LARGEST_JOB = 32 << 10 };

/* What the guest sends. The end of it means that the guest is gone, or needs the sitter no more. */
struct order {
    int32_t signal; /* or ORDER_JOB */
    int32_t tree;
    uint32_t sequence;
    /* A job: the request follows, at most LARGEST_JOB bytes, and descriptors come along: those of which `ends` has a
     * bit, in the order of struct sitting. */
    int32_t brand;
    uint32_t ends;
};

enum { ORDER_JOB = -1 };

enum report_kind {
    REPORT_STARTED = 1, /* value: pid, number: uid */
    REPORT_REFUSED,     /* value: errno, text: about what */
    REPORT_ENDED,       /* value: wait status, number: duration in µs */
    REPORT_OBEYED,      /* value: 0 or errno, number: the order's sequence */
    REPORT_EMPTY,       /* nothing is left of the tree; the sitter waits for its next job */
};

struct report {
    int32_t kind;
    int32_t value;
    int64_t number;
    char text[112];
};

_Noreturn void sitter_run(const struct sitting *first);

#endif
