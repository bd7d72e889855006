/* The event loop: see loop.c. */
#ifndef ATOLL_LOOP_H
#define ATOLL_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define container_of(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))

/* A descriptor that is watched, edge-triggered: the three flags say what the kernel last told; whoever meets EAGAIN
 * clears the one it tried. */
struct source {
    int fd;
    bool readable;
    bool writable;
    bool hangup;
    uint32_t place; /* where the loop has it; 0: nowhere */
    void (*wake)(struct source *source);
};

/* Something to do once more in this or the next round, after everybody else had a turn. */
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

int64_t now_us(void);      /* a clock that only goes forward */
int64_t unix_time_us(void);

void loop_start(void);

/* Takes the descriptor over (it is made non-blocking): loop_remove() closes it. 0 or an errno. */
int loop_add(struct source *source, int fd, void (*wake)(struct source *source));
void loop_remove(struct source *source);

/* Watches it anew: gVisor that was restored from disk does not tell of descriptors of the host that it watched before. */
void loop_renew(struct source *source);

void loop_soon(struct task *task);
void loop_not_soon(struct task *task);
void timer_set(struct timer *timer, int after_ms, void (*fire)(struct timer *timer));
void timer_cancel(struct timer *timer);

/* free(), but only when no event of this round can still name the memory. */
void loop_free(void *memory);

/* One round: waits unless `busy`, wakes sources, calls `child_ended` for each reaped child. */
void loop_round(bool busy, void (*child_ended)(pid_t pid, int status));

/* For children of the guest: the signal handling of an ordinary process, nothing watched. */
void loop_forget_after_fork(void);

/* Memory of whole pages that children do not inherit, so that no supervisor pins what the guest once held. */
void *pages_alloc(size_t size);
void pages_free(void *pages, size_t size);

#endif
