/* Workers: see worker.c. */
#ifndef ATOLL_WORKER_H
#define ATOLL_WORKER_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"

enum { JOB_PATHS = 2 };

/* The environment of an operation in its worker. It may block and die, and, if it is not reusable, allocate without
 * freeing. */
struct job {
    struct fields fields;
    struct fields input; /* the first bytes of channel 0, or all of them if `in` is -1: see job_read() */
    int in;              /* the rest, blocking; ends with the host's EOF */
    int link;            /* the socket to the guest */
    int out;             /* channel 1, blocking, once job_open_output() has been called; else -1 */
    struct pack result;  /* goes into END when the operation succeeds */
    const char *about;   /* the subject of a failure; may stay NULL */
    struct pack record;  /* the record being packed */
    uint8_t *buffer;     /* queued output */
    size_t buffered;
    char *paths[JOB_PATHS]; /* what job_path() returned */
};

struct operation {
    int (*run)(struct job *job); /* 0 or an errno */
    bool takes_input;
    bool gives_output;
    bool reusable;     /* it leaves nothing behind in its worker, which may then serve another call of the same user */
    bool as_root;      /* USER is ignored */
    size_t memory_mb;  /* limit on its memory; 0: the default */
};

/* Guest's side. */
void worker_open(uint32_t id, struct fields fields, const struct operation *operation);
void worker_child_ended(pid_t pid);
bool worker_has_child(pid_t pid);
void workers_dismiss_idle(void);

/* Worker's side. */
const char *job_path(struct job *job, uint16_t tag); /* a copy; never NULL, "" when missing */
int job_fail(struct job *job, int error, const char *about);
ssize_t job_read(struct job *job, void *bytes, size_t size); /* of the input, as read() */
void job_write(struct job *job, const void *bytes, size_t size);

/* Has the guest make a pipe for the output, `out`. Without one, little output goes along with the result. */
void job_open_output(struct job *job);
void job_widen(int pipe);

/* A record: begin, pack into job->record, end. A record that does not fit is left out. */
void job_begin_record(struct job *job);
void job_end_record(struct job *job);
void job_flush(struct job *job);

/* The file to remove when the host abandons the operation; NULL: none. */
void job_set_leftover(const char *path);
void job_hold_abandon(bool hold); /* defers that removal and exit */

#endif
