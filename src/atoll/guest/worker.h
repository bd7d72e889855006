/* Workers: see worker.c. */
#ifndef ATOLL_WORKER_H
#define ATOLL_WORKER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"

/* The environment of an operation in its worker. It may block, allocate without freeing, and die. */
struct job {
    struct fields fields;
    int in;              /* channel 0, blocking; ends with the host's EOF; -1 when the operation takes none */
    int out;             /* channel 1, blocking; -1 when the operation gives none */
    struct pack result;  /* goes into END when the operation succeeds */
    const char *about;   /* the subject of a failure; may stay NULL */
    struct pack record;  /* the record being packed */
    uint8_t *buffer;     /* queued records */
    size_t buffered;
};

struct operation {
    int (*run)(struct job *job); /* 0 or an errno */
    bool takes_input;
    bool gives_output;
    bool as_root;      /* USER is ignored */
    size_t memory_mb;  /* limit on its memory; 0: the default */
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

/* A record: begin, pack into job->record, end. A record that does not fit is left out. */
void job_begin_record(struct job *job);
void job_end_record(struct job *job);
void job_flush(struct job *job);

/* The file to remove when the host abandons the operation; NULL: none. */
void job_set_leftover(const char *path);
void job_hold_abandon(bool hold); /* defers that removal and exit */

#endif
