/* The guest's side of its sitters: who sits on what, who waits for a job.
 *
 * Knows: how a sitter is forked, spoken to, and kept for the next process. Refuses to know: what a sitter does
 * (sitter.c) and what its reports mean for a process (proc.c).
 *
 * A sitter whose tree is empty has nothing left to remember, and a fork with its end costs a short command as much as
 * the command itself. So it waits for the next one. While it waits it does nothing that is asked of it but a job: an
 * order that crossed its report was for those who are gone.
 */
#define _GNU_SOURCE
#include "seats.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest.h"

enum {
    MOST_WAITING = 8,
    WAITING_WHEN_IDLE = 1,
    IDLE_AFTER_MS = 1000,
};

static struct seat *seats;
static struct timer idle_timer;

static void drop(struct seat *seat)
{
    struct seat **at = &seats;
    while (*at != seat)
        at = &(*at)->next;
    *at = seat->next;
    loop_remove(&seat->source);
    loop_free(seat);
}

/* Lets those go who wait, but for so many. */
static void dismiss_waiting(int keep)
{
    for (struct seat *seat = seats, *next; seat; seat = next) {
        next = seat->next;
        if (!seat->proc && --keep < 0)
            drop(seat);
    }
}

void seats_renew(void)
{
    dismiss_waiting(0);
}

static void on_idle(struct timer *timer)
{
    (void)timer;
    dismiss_waiting(WAITING_WHEN_IDLE);
}

static void take_report(struct seat *seat, struct report *report)
{
    struct proc *proc = seat->proc;
    if (!proc)
        return;
    if (report->kind != REPORT_EMPTY) {
        proc_report(proc, report);
        return;
    }
    seat->proc = NULL;
    proc_left(proc);
    dismiss_waiting(MOST_WAITING);
    timer_set(&idle_timer, IDLE_AFTER_MS, on_idle);
}

static void on_report(struct source *source)
{
    struct seat *seat = container_of(source, struct seat, source);
    while (source->readable && source->fd >= 0) {
        struct report report;
        ssize_t size = recv(source->fd, &report, sizeof report, 0);
        if (size == (ssize_t)sizeof report) {
            take_report(seat, &report);
        } else if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
            source->readable = errno == EINTR;
        } else {
            struct proc *proc = seat->proc;
            drop(seat);
            if (proc)
                proc_lost(proc);
        }
    }
}

/* ---- jobs ---- */

static int list_ends(const struct sitting *sitting, int *ends)
{
    const int first[] = {sitting->in, sitting->out, sitting->err, sitting->terminal};
    memcpy(ends, first, sizeof first);
    memcpy(ends + 4, sitting->extras, (size_t)sitting->extra_count * sizeof *ends);
    return 4 + sitting->extra_count;
}

static int send_job(struct seat *seat, const struct sitting *sitting)
{
    int ends[MOST_ENDS], sent[MOST_ENDS], count = list_ends(sitting, ends), sent_count = 0;
    struct order order = {.signal = ORDER_JOB, .brand = sitting->brand};
    for (int i = 0; i < count; i++)
        if (ends[i] >= 0) {
            order.ends |= 1U << i;
            sent[sent_count++] = ends[i];
        }
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof sent)];
    } control = {0};
    struct iovec parts[] = {{&order, sizeof order}, {(void *)sitting->fields.at, sitting->fields.size}};
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
    if (sendmsg(seat->source.fd, &message, MSG_NOSIGNAL) < 0)
        return errno;
    /* Somebody inside may have stopped it while it waited. */
    if (seat->pid)
        kill(seat->pid, SIGCONT);
    return 0;
}

static struct seat *find_waiting(const struct sitting *sitting)
{
    struct seat *seat = seats;
    while (seat && seat->proc)
        seat = seat->next;
    if (!seat || sitting->fields.size > LARGEST_JOB)
        return NULL;
    return send_job(seat, sitting) ? NULL : seat;
}

static int fork_sitter(struct seat *seat, struct sitting *sitting)
{
    int link[2], ends[1 + MOST_ENDS];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) < 0)
        return errno;
    /* A copy, because children do not inherit the buffer that the frame lies in. */
    uint8_t *copy = malloc(sitting->fields.size + 1);
    int error = copy ? 0 : ENOMEM;
    if (!error) {
        memcpy(copy, sitting->fields.at, sitting->fields.size);
        sitting->fields.at = copy;
        sitting->link = ends[0] = link[1];
        seat->pid = guest_fork("atoll-sitter", ends, 1 + list_ends(sitting, ends + 1));
        if (seat->pid == 0)
            sitter_run(sitting);
        error = seat->pid < 0 ? errno : 0;
    }
    free(copy);
    close(link[1]);
    if (!error)
        error = loop_add(&seat->source, link[0], on_report);
    if (error)
        close(link[0]); /* a sitter that was forked all the same sees the end of its link */
    return error;
}

int seat_take(struct seat **taken, struct proc *proc, struct sitting sitting)
{
    struct seat *seat = find_waiting(&sitting);
    if (!seat) {
        seat = calloc(1, sizeof *seat);
        int error = seat ? fork_sitter(seat, &sitting) : ENOMEM;
        if (error) {
            free(seat);
            return error;
        }
        seat->next = seats;
        seats = seat;
    }
    seat->proc = proc;
    *taken = seat;
    return 0;
}

int seat_order(struct seat *seat, struct order order)
{
    if (send(seat->source.fd, &order, sizeof order, MSG_NOSIGNAL) < 0)
        return errno == EPIPE || errno == ECONNRESET ? ESRCH : errno;
    /* Somebody inside may have stopped the sitter. */
    if (seat->pid)
        kill(seat->pid, SIGCONT);
    return 0;
}

void seat_kill(struct seat *seat)
{
    if (seat->pid)
        kill(seat->pid, SIGKILL);
}

static struct seat *find_seat(pid_t pid)
{
    struct seat *seat = seats;
    while (seat && seat->pid != pid)
        seat = seat->next;
    return seat;
}

bool seats_know(pid_t pid)
{
    return find_seat(pid) != NULL;
}

void seats_child_ended(pid_t pid)
{
    struct seat *seat = find_seat(pid);
    if (seat)
        seat->pid = 0;
}
