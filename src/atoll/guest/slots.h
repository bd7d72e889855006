/* Supervisor slots, the guest's handles on its supervisors: see slots.c. */
#ifndef ATOLL_SLOTS_H
#define ATOLL_SLOTS_H

#include <stdbool.h>
#include <sys/types.h>

#include "loop.h"
#include "supervisor.h"

struct proc;

struct supervisor_slot {
    struct supervisor_slot *next; /* first: loop_free() overwrites it, while an event may still read the source */
    struct source source;
    pid_t pid;         /* 0 once reaped: the kernel may then reuse the number */
    struct proc *proc; /* the process that it supervises; NULL while it is idle */
};

/* Gives the job to an idle supervisor, or to a new one. 0 or an errno. `job` needs no link. */
int slot_assign(struct supervisor_slot **slot, struct proc *proc, struct spawn_job job);

/* 0, or ESRCH when the supervisor is gone, or another errno. */
int slot_send(struct supervisor_slot *slot, struct supervisor_command command);
void slot_kill(struct supervisor_slot *slot);

/* Dismisses all idle supervisors. */
void slots_dismiss_idle(void);

/* Whether the process is a supervisor. */
bool slots_own(pid_t pid);
void slots_child_ended(pid_t pid);

#endif
