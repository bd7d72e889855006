/* Workers: see worker.c. */
#ifndef ATOLL_WORKER_H
#define ATOLL_WORKER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"

/* What an operation sees of the world while it runs in its worker. It may block, allocate without freeing, and die. */
struct job {
    struct fields fields;
    int in;              /* channel 0, blocking; ends with the host's EOF; -1 when the operation takes none */
    int out;             /* channel 1, blocking; -1 when the operation gives none */
    struct pack result;  /* goes into END when the operation succeeds */
    const char *about;   /* what a failure was about; may stay NULL */
    struct pack record;  /* the one being made */
    uint8_t *buffer;     /* records wait here */
    size_t buffered;
};

struct operation {
    int (*run)(struct job *job); /* 0 or an errno */
    bool takes_input;
    bool gives_output;
    bool as_root;      /* USER means nothing to it */
    size_t memory_mb;  /* what it may allocate; 0: the usual */
};

/* Guest's side. */
void worker_open(uint32_t id, struct fields fields, const struct operation *operation);
void worker_child_ended(pid_t pid);
bool worker_has_child(pid_t pid);

/* Worker's side. */
const char *job_path(struct job *job, uint16_t tag); /* a copy; never NULL, "" when missing */
int job_fail(struct job *job, int error, const char *about);
void job_write(struct job *job, const void *bytes, size_t size);
void job_widen(int pipe);

/* A record: begin, pack into job->record, end. One that does not fit is left out. */
void job_begin_record(struct job *job);
void job_end_record(struct job *job);
void job_flush(struct job *job);

/* A file that is to be removed when the host abandons the operation; NULL: none (any more). */
void job_set_leftover(const char *path);
void job_hold_abandon(bool hold); /* not now */

#endif
