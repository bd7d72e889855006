/* The event loop: see loop.c. */
#ifndef ATOLL_LOOP_H
#define ATOLL_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define container_of(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))

/* A watched descriptor, edge-triggered: the three flags hold what the kernel last reported; code that gets EAGAIN
 * clears the flag it relied on. */
struct source {
    int fd;
    bool readable;
    bool writable;
    bool hangup;
    bool reads_only; /* events of writing are not asked for: each would be a wake-up for nothing */
    uint32_t place;  /* its index in the loop's table; 0: none */
    void (*wake)(struct source *source);
};

/* Work to run later in this round or in the next, after all other sources had a turn. */
struct task {
    void (*run)(struct task *task);
    struct task *next;
    bool queued;
};

struct timer {
    int64_t at_ms;
    void (*fire)(struct timer *timer);
    struct timer *next;
    bool set;
};

int64_t now_us(void);      /* a monotonic clock */
int64_t unix_time_us(void);

void loop_start(void);

/* Takes ownership of the descriptor and makes it non-blocking; loop_remove() closes it. 0 or an errno. */
int loop_add(struct source *source, int fd, void (*wake)(struct source *source));

/* The same for a pipe or a socket that is only read through this source. */
int loop_add_reader(struct source *source, int fd, void (*wake)(struct source *source));
void loop_remove(struct source *source);

/* Watches it again: after a restore from disk gVisor does not report events of host descriptors watched before. */
void loop_renew(struct source *source);

void loop_soon(struct task *task);
void loop_not_soon(struct task *task);
void timer_set(struct timer *timer, int after_ms, void (*fire)(struct timer *timer));
void timer_cancel(struct timer *timer);

/* free(), deferred until no event of this round can refer to the memory. */
void loop_free(void *memory);

/* One round: waits unless `busy`, calls ready sources, and `child_ended` for each reaped child. */
void loop_round(bool busy, void (*child_ended)(pid_t pid, int status));

/* In children of the guest: restores ordinary signal handling, watches nothing. */
void loop_forget_after_fork(void);

/* Memory of whole pages that children do not inherit, so that no supervisor keeps pages that the guest has freed. */
void *pages_alloc(size_t size);
void pages_free(void *pages, size_t size);

#endif
