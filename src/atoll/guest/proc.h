/* Spawned processes and their attachments: see proc.c and attach.c. */
#ifndef ATOLL_PROC_H
#define ATOLL_PROC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "loop.h"
#include "ring.h"
#include "sink.h"
#include "stream.h"

enum { MAX_OUTPUTS = 2 + MAX_CHANNELS };

struct proc;
struct attachment;
struct report;
struct supervisor_slot;

/* One channel from the process: the output that was read, and whether more may come. */
struct output {
    struct proc *proc;
    int channel;
    struct source source; /* both ways for a terminal and for extra channels */
    struct sink sink;     /* extra channels only */
    struct ring ring;
    struct task fill_task;
    bool open;            /* more may come */
    bool settled;         /* the main process has ended, and what it wrote until then was read */
    size_t to_settle;     /* how much of that may still be in the pipe */
    uint64_t at_end;      /* the total when it settled */
    uint64_t sent;        /* extra channels: the offset up to which output was sent; it is not sent again */
};

enum proc_state { PROC_STARTING, PROC_RUNNING, PROC_ENDED };

struct proc {
    struct proc *next;
    int64_t id;
    pid_t pid;
    uid_t uid;
    enum proc_state state; /* of the main process */
    bool lost;             /* it ended with an unknown status: its supervisor was killed */
    bool keep, terminal;
    int marker; /* see tree.h */
    bool tree_kill_asked, ended_after_kill;
    uint64_t signals_asked; /* bit n - 1: the host asked for signal n */
    int wait_status;
    int64_t duration_us, started_us, ended_us;
    char *command;
    struct supervisor_slot *slot; /* of the supervisor of its tree; NULL when the tree is empty */
    uint32_t sequence;
    struct waiter *waiters;
    struct timer kill_timer;
    struct source input; /* stdin when it is not a terminal */
    struct sink input_sink;
    struct attachment *attachments;
    struct attachment *writer; /* the attachment that owns stdin and the extra channels */
    int output_count;
    struct output outputs[];
};

/* Operations, and calls from main.c. */
void proc_open_spawn(uint32_t id, struct fields fields);
void proc_open_attach(uint32_t id, struct fields fields);
void proc_open_signal(uint32_t id, struct fields fields);
void proc_open_list(uint32_t id, struct fields fields);
bool proc_claims_orphan(pid_t pid); /* belongs to a tree whose supervisor is alive (only without subreapers) */

/* Called by slots.c. After proc_left() and proc_lost() the slot no longer belongs to the process. */
void proc_report(struct proc *proc, struct report *report); /* the supervisor sent a report */
void proc_left(struct proc *proc);                          /* the tree is empty, and the supervisor idle again */
void proc_lost(struct proc *proc);                          /* the supervisor has died */

/* Between proc.c and attach.c. */
struct proc *proc_find(int64_t id);
void proc_kill(struct proc *proc);
void proc_control(struct proc *proc, struct fields fields);
void proc_fill(struct output *output); /* reads what is available, as far as there is room */
void proc_trim(void);                  /* drops the oldest ended records above the limit */

struct attachment *attach_spawner(struct proc *proc, uint32_t id, struct fields fields);
void attach_started(struct proc *proc);
void attach_refused(struct proc *proc, int error, const char *about);
void attach_output(struct output *output);  /* there is more to send, or the end was reached */
void attach_settled(struct output *output); /* END waits for no more than the output read so far */
void attach_ended(struct proc *proc);       /* the main process has ended */

/* How many bytes may be read without losing what a lossless attachment has not sent yet. */
size_t attach_room(const struct output *output);

#endif
