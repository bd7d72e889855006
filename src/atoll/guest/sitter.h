/* The sitter of a spawned process: see sitter.c. */
#ifndef ATOLL_SITTER_H
#define ATOLL_SITTER_H

#include <stdint.h>

#include "frame.h"

/* What a sitter is given: the request, its two pipes, and the process's ends of everything. -1: there is none. */
struct sitting {
    struct fields fields;
    int orders;   /* struct order comes in; its end means that the guest is gone */
    int reports;  /* struct report goes out */
    int in, out, err;
    int terminal; /* the master, of which the sitter opens the other side */
    int extras[MAX_CHANNELS];
    int extra_count;
    int brand; /* see tree.h */
};

struct order {
    int32_t signal;
    int32_t tree;
    uint32_t sequence;
};

enum report_kind {
    REPORT_STARTED = 1, /* value: pid, number: uid */
    REPORT_REFUSED,     /* value: errno, text: about what */
    REPORT_ENDED,       /* value: wait status, number: duration in µs */
    REPORT_OBEYED,      /* value: 0 or errno, number: the order's sequence */
    REPORT_EMPTY,       /* nothing is left of the tree; the sitter goes */
};

struct report {
    int32_t kind;
    int32_t value;
    int64_t number;
    char text[112];
};

_Noreturn void sitter_run(const struct sitting *sitting);

#endif
