/* Supervisor slots: which supervisor runs which process, and which are idle.
 *
 * Owns how a supervisor is forked, commanded, and kept for the next process. Not here: what a supervisor does
 * (supervisor.c) and what its reports mean for a process (proc.c). Used by proc.c.
 *
 * A supervisor whose tree is empty has no state left, and forking and ending one costs as much as a short command
 * itself. So it stays idle until the next job. An idle supervisor ignores everything but a job: a command that crossed
 * its report was meant for processes that are gone.
 */
#define _GNU_SOURCE
#include "slots.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest.h"
#include "proc.h"

enum {
    MAX_IDLE = 8,
    KEPT_AFTER_IDLE = 1,
    IDLE_AFTER_MS = 1000,
};

static struct supervisor_slot *slots;
static struct timer idle_timer;

static void drop(struct supervisor_slot *slot)
{
    struct supervisor_slot **at = &slots;
    while (*at != slot)
        at = &(*at)->next;
    *at = slot->next;
    loop_remove(&slot->source);
    loop_free(slot);
}

/* Dismisses idle supervisors, except `keep` of them. */
static void dismiss_idle(int keep)
{
    for (struct supervisor_slot *slot = slots, *next; slot; slot = next) {
        next = slot->next;
        if (!slot->proc && --keep < 0)
            drop(slot);
    }
}

void slots_dismiss_idle(void)
{
    dismiss_idle(0);
}

static void on_idle(struct timer *timer)
{
    (void)timer;
    dismiss_idle(KEPT_AFTER_IDLE);
}

static void take_report(struct supervisor_slot *slot, struct report *report)
{
    struct proc *proc = slot->proc;
    if (!proc)
        return;
    if (report->kind != REPORT_EMPTY) {
        proc_report(proc, report);
        return;
    }
    slot->proc = NULL;
    proc_left(proc);
    dismiss_idle(MAX_IDLE);
    timer_set(&idle_timer, IDLE_AFTER_MS, on_idle);
}

static void on_report(struct source *source)
{
    struct supervisor_slot *slot = container_of(source, struct supervisor_slot, source);
    while (source->readable && source->fd >= 0) {
        struct report reports[MAX_REPORTS];
        ssize_t size = recv(source->fd, reports, sizeof reports, 0);
        if (size > 0) {
            for (size_t i = 0; i < (size_t)size / sizeof *reports; i++)
                take_report(slot, &reports[i]);
        } else if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
            source->readable = errno == EINTR;
        } else {
            struct proc *proc = slot->proc;
            drop(slot);
            if (proc)
                proc_lost(proc);
        }
    }
}

/* ---- jobs ---- */

static int list_ends(const struct spawn_job *job, int *ends)
{
    const int first[] = {job->in, job->out, job->err, job->terminal};
    memcpy(ends, first, sizeof first);
    memcpy(ends + 4, job->extras, (size_t)job->extra_count * sizeof *ends);
    return 4 + job->extra_count;
}

static int send_job(struct supervisor_slot *slot, const struct spawn_job *job)
{
    int ends[MAX_ENDS], sent[MAX_ENDS], count = list_ends(job, ends), sent_count = 0;
    struct supervisor_command command = {.signal = COMMAND_JOB, .marker = job->marker};
    for (int i = 0; i < count; i++)
        if (ends[i] >= 0) {
            command.ends |= 1U << i;
            sent[sent_count++] = ends[i];
        }
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof sent)];
    } control = {0};
    struct iovec parts[] = {{&command, sizeof command}, {(void *)job->fields.at, job->fields.size}};
    struct msghdr message = {
        .msg_iov = parts,
        .msg_iovlen = 2,
        .msg_control = &control,
        .msg_controllen = CMSG_SPACE((size_t)sent_count * sizeof *sent),
    };
    control.header = (struct cmsghdr){
        .cmsg_level = SOL_SOCKET,
        .cmsg_type = SCM_RIGHTS,
        .cmsg_len = CMSG_LEN((size_t)sent_count * sizeof *sent),
    };
    memcpy(CMSG_DATA(&control.header), sent, (size_t)sent_count * sizeof *sent);
    if (sendmsg(slot->source.fd, &message, MSG_NOSIGNAL) < 0)
        return errno;
    /* A process inside may have stopped it while it was idle. */
    if (slot->pid)
        kill(slot->pid, SIGCONT);
    return 0;
}

static struct supervisor_slot *find_idle(const struct spawn_job *job)
{
    struct supervisor_slot *slot = slots;
    while (slot && slot->proc)
        slot = slot->next;
    if (!slot || job->fields.size > MAX_JOB_BYTES)
        return NULL;
    return send_job(slot, job) ? NULL : slot;
}

static int fork_supervisor(struct supervisor_slot *slot, struct spawn_job *job)
{
    int link[2], ends[1 + MAX_ENDS];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) < 0)
        return errno;
    /* A copy, because children do not inherit the buffer that holds the frame. */
    uint8_t *copy = malloc(job->fields.size + 1);
    int error = copy ? 0 : ENOMEM;
    if (!error) {
        memcpy(copy, job->fields.at, job->fields.size);
        job->fields.at = copy;
        job->link = ends[0] = link[1];
        slot->pid = guest_fork("atoll-supervise", ends, 1 + list_ends(job, ends + 1));
        if (slot->pid == 0)
            supervisor_run(job);
        error = slot->pid < 0 ? errno : 0;
    }
    free(copy);
    close(link[1]);
    if (!error)
        error = loop_add_reader(&slot->source, link[0], on_report);
    if (error)
        close(link[0]); /* a supervisor that was forked nevertheless sees the end of its link */
    return error;
}

int slot_assign(struct supervisor_slot **taken, struct proc *proc, struct spawn_job job)
{
    struct supervisor_slot *slot = find_idle(&job);
    if (!slot) {
        slot = calloc(1, sizeof *slot);
        int error = slot ? fork_supervisor(slot, &job) : ENOMEM;
        if (error) {
            free(slot);
            return error;
        }
        slot->next = slots;
        slots = slot;
    }
    slot->proc = proc;
    *taken = slot;
    return 0;
}

int slot_send(struct supervisor_slot *slot, struct supervisor_command command)
{
    if (send(slot->source.fd, &command, sizeof command, MSG_NOSIGNAL) < 0)
        return errno == EPIPE || errno == ECONNRESET ? ESRCH : errno;
    /* A process inside may have stopped the supervisor. */
    if (slot->pid)
        kill(slot->pid, SIGCONT);
    return 0;
}

void slot_kill(struct supervisor_slot *slot)
{
    if (slot->pid)
        kill(slot->pid, SIGKILL);
}

static struct supervisor_slot *find_slot(pid_t pid)
{
    struct supervisor_slot *slot = slots;
    while (slot && slot->pid != pid)
        slot = slot->next;
    return slot;
}

bool slots_own(pid_t pid)
{
    return find_slot(pid) != NULL;
}

void slots_child_ended(pid_t pid)
{
    struct supervisor_slot *slot = find_slot(pid);
    if (slot)
        slot->pid = 0;
}
