/* Sitters as the guest sees them: see seats.c. */
#ifndef ATOLL_SEATS_H
#define ATOLL_SEATS_H

#include <stdbool.h>
#include <sys/types.h>

#include "loop.h"
#include "sitter.h"

struct proc;

struct seat {
    struct seat *next; /* first: loop_free() writes there, and an event of this round may still look at the source */
    struct source source;
    pid_t pid;         /* 0 once reaped: the number may then be somebody else's */
    struct proc *proc; /* what it sits on; NULL while it waits for a job */
};

/* Has somebody sit on `proc`: one who waits, or a new one. 0 or an errno. `sitting` needs no link. */
int seat_take(struct seat **seat, struct proc *proc, struct sitting sitting);

/* 0, or ESRCH when the sitter is gone, or another errno. */
int seat_order(struct seat *seat, struct order order);
void seat_kill(struct seat *seat);

/* Lets all go who wait for a job. */
void seats_renew(void);

bool seats_know(pid_t pid);
void seats_child_ended(pid_t pid);

/* What is told of a sitter, by proc.c. After either of the last two the seat is not the process's any more. */
void proc_report(struct proc *proc, struct report *report);
void proc_left(struct proc *proc); /* nothing of it is left, and the sitter has gone on */
void proc_lost(struct proc *proc); /* the sitter has died */

#endif
