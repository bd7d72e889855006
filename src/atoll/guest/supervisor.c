/* The supervisor: a process of the guest's own that is the parent of each spawned process, and the subreaper of its
 * tree.
 *
 * Owns how its tree is reaped, signalled and killed. Not here: how a program is started (program.c), what processes of
 * the tree may ask for (sudo.c), output, streams, the host (proc.c, attach.c). The messages to and from the guest are
 * drawn in supervisor.h.
 *
 * When nothing is left of a process, the supervisor releases all that it held for it and takes the next job.
 */
#define _GNU_SOURCE
#include "supervisor.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"
#include "loop.h"
#include "program.h"
#include "sudo.h"
#include "tree.h"

enum {
    SWEEP_PAUSE_MS = 2,
    QUICK_SWEEPS = 8,
    HOLD_MS = 300, /* how long zombies are left unreaped to fill the process limit, against processes that fork */
    COMMAND_TIMEOUT_MS = 4000,
    ORPHAN_POLL_MS = 500,
    HOLD_REPORT_MS = 3, /* STARTED of a QUIET process is sent together with ENDED if that comes within this time */
};

struct supervisor {
    const struct spawn_job *job;
    struct tree tree;
    pid_t main;      /* 0 once it has been reaped */
    int64_t started;
    bool has_sudo;
};

static struct report held[MAX_REPORTS]; /* to be sent with the next one */
static int held_count;

static void hold_report(enum report_kind kind, int value, int64_t number, const char *text)
{
    struct report *report = &held[held_count++];
    *report = (struct report){.kind = (int32_t)kind, .value = value, .number = number};
    if (text)
        memcpy(report->text, text, strnlen(text, sizeof report->text - 1));
}

static void send_held(const struct spawn_job *job)
{
    /* If this fails the guest is gone, which the next receive reports. */
    if (held_count)
        (void)!send(job->link, held, (size_t)held_count * sizeof *held, MSG_NOSIGNAL);
    held_count = 0;
}

static void report(const struct spawn_job *job, enum report_kind kind, int value, int64_t number, const char *text)
{
    hold_report(kind, value, number, text);
    send_held(job);
}

/* ---- supervising ---- */

/* The program's ends of stdout and stderr stay open here until it has ended: else the guest would be woken for the end
 * of each, just before it is woken for the end of the program. */
static void close_outputs(const struct spawn_job *job)
{
    program_close((const int[]){job->out, job->err}, 2);
}

/* The main process's pid; 0 when it could not be started, which has then been reported. */
static pid_t start_main(struct program *program, const struct spawn_job *job)
{
    const char *about;
    pid_t pid = 0;
    int error = program_prepare(program, job, &about);
    if (!error)
        pid = program_start(program, &error, &about);
    if (error) {
        report(job, REPORT_REFUSED, error, 0, about);
        close_outputs(job);
    } else {
        hold_report(REPORT_STARTED, pid, program->account.uid, NULL);
        if (fields_int(job->fields, TAG_QUIET, 0) != 1)
            send_held(job);
    }
    program_forget(program);
    return pid;
}

/* Reaps; true when no child is left. */
static bool reap_children(struct supervisor *supervisor)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, supervisor->has_sudo ? WNOHANG | WUNTRACED : WNOHANG);
        if (pid == 0)
            return false;
        if (pid < 0)
            return errno == ECHILD;
        if (supervisor->has_sudo)
            sudo_child(pid, status);
        if (pid == supervisor->main && !WIFSTOPPED(status)) {
            supervisor->main = 0;
            report(supervisor->job, REPORT_ENDED, status, now_us() - supervisor->started, NULL);
            close_outputs(supervisor->job);
        }
    }
}

/* True when the tree is empty, orphans that were reparented to the guest included: for them /proc is read twice,
 * because one pass takes a while and may miss a process that was forked behind it. */
static bool reap(struct supervisor *supervisor)
{
    const struct tree *tree = &supervisor->tree;
    return reap_children(supervisor) && (!tree->marker || (tree_is_empty(tree) && tree_is_empty(tree)));
}

/* SIGCHLD is the only blockable signal that is let in, and only while waiting: `kill -TERM -1` inside must not end
 * supervisors. */
static sigset_t all_but_child(void)
{
    sigset_t set;
    sigfillset(&set);
    sigdelset(&set, SIGCHLD);
    return set;
}

static void sleep_until_signal(int ms)
{
    sigset_t mask = all_but_child();
    ppoll(NULL, 0, &(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L}, &mask);
}

/* Kills until the tree is empty; false when a process survives for too long.
 *
 * A process that forks, exits and starts a session each time can outrun any scan of /proc. It cannot outrun the process
 * limit: when quick sweeps did not suffice, zombies are left unreaped for a while, until no fork succeeds any more. */
static bool kill_tree(struct supervisor *supervisor)
{
    int64_t until = now_us() + COMMAND_TIMEOUT_MS * 1000, hold_until = 0;
    for (int sweeps = 1;; sweeps++) {
        tree_kill_sweep(&supervisor->tree);
        int64_t now = now_us();
        if (now >= hold_until) {
            if (reap(supervisor))
                return true;
            if (sweeps > QUICK_SWEEPS && now - hold_until > HOLD_MS * 1000)
                hold_until = now + HOLD_MS * 1000;
        }
        if (now > until)
            return false;
        if (sweeps <= QUICK_SWEEPS)
            sleep_until_signal(SWEEP_PAUSE_MS);
    }
}

static void run_command(struct supervisor *supervisor, const struct supervisor_command *command)
{
    int error = 0;
    if (command->tree && command->signal == SIGKILL)
        error = kill_tree(supervisor) ? 0 : EBUSY;
    else if (command->tree)
        error = tree_signal(&supervisor->tree, command->signal) ? 0 : ESRCH;
    else if (!supervisor->main)
        error = ESRCH;
    else if (kill(supervisor->main, command->signal) < 0)
        error = errno;
    report(supervisor->job, REPORT_DONE, error, command->sequence, NULL);
}

/* A command, or the end of the link: then the guest is gone, and its processes must end too. */
static void take_command(struct supervisor *supervisor)
{
    struct supervisor_command command;
    ssize_t size = recv(supervisor->job->link, &command, sizeof command, MSG_DONTWAIT);
    if (size == (ssize_t)sizeof command) {
        run_command(supervisor, &command);
    } else if (size >= 0 || (errno != EAGAIN && errno != EINTR)) {
        kill_tree(supervisor);
        _exit(0);
    }
}

static void on_child(int signal)
{
    (void)signal; /* only interrupts a wait */
}

/* Who waits for a command of `sudo` is told that it was stopped; of nothing else it is of interest. */
static void notice_children(bool stops)
{
    static int noticed = -1;
    if (noticed == stops)
        return;
    noticed = stops;
    const struct sigaction action = {.sa_handler = on_child, .sa_flags = stops ? 0 : SA_NOCLDSTOP};
    sigaction(SIGCHLD, &action, NULL);
}

static int sooner(int ms, int other)
{
    return other >= 0 && (ms < 0 || other < ms) ? other : ms;
}

static void supervise(const struct spawn_job *job)
{
    static struct program program;
    struct supervisor supervisor = {.job = job, .started = now_us()};
    supervisor.tree = (struct tree){.root = getpid(), .marker = guest_has_subreapers() ? 0 : job->marker};
    supervisor.has_sudo = sudo_begin(job->fields, &supervisor.tree, job->marker);
    notice_children(supervisor.has_sudo);
    supervisor.main = start_main(&program, job);
    sigset_t mask = all_but_child();
    struct pollfd fds[1 + SUDO_POLLED];
    while (!(reap(&supervisor) && !supervisor.main)) {
        /* No signal reports the end of orphans that were reparented to the guest: they are polled for. */
        int ms = held_count ? HOLD_REPORT_MS : supervisor.tree.marker && !supervisor.main ? ORPHAN_POLL_MS : -1;
        ms = sooner(ms, sudo_timeout());
        const struct timespec interval = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
        fds[0] = (struct pollfd){.fd = job->link, .events = POLLIN};
        int asked = sudo_poll(fds + 1);
        if (ppoll(fds, 1 + (nfds_t)asked, ms < 0 ? NULL : &interval, &mask) > 0 && fds[0].revents)
            take_command(&supervisor);
        else if (!reap_children(&supervisor))
            send_held(job);
        if (asked)
            sudo_serve(fds + 1, asked);
    }
    sudo_end();
    report(job, REPORT_EMPTY, 0, 0, NULL);
}

/* ---- the next job ---- */

/* Puts each descriptor of a job in its place. */
static void take_ends(struct spawn_job *job, uint32_t bits, const int *fds, int count)
{
    int *places[MAX_ENDS] = {&job->in, &job->out, &job->err, &job->terminal};
    for (int i = 0; i < MAX_CHANNELS; i++)
        places[4 + i] = &job->extras[i];
    job->extra_count = 0;
    for (int i = 0, next = 0; i < MAX_ENDS; i++) {
        *places[i] = bits >> i & 1 && next < count ? fds[next++] : -1;
        if (i >= 4 && *places[i] >= 0)
            job->extra_count++;
    }
}

/* Waits for a job; false when the guest has closed the link. */
static bool take_job(struct spawn_job *job)
{
    static uint8_t request[MAX_JOB_BYTES];
    for (;;) {
        struct supervisor_command command;
        union {
            struct cmsghdr header;
            char space[CMSG_SPACE(MAX_ENDS * sizeof(int))];
        } control;
        struct iovec parts[] = {{&command, sizeof command}, {request, sizeof request}};
        struct msghdr message = {
            .msg_iov = parts,
            .msg_iovlen = 2,
            .msg_control = &control,
            .msg_controllen = sizeof control,
        };
        ssize_t size = recvmsg(job->link, &message, MSG_CMSG_CLOEXEC);
        if (size < 0 && errno == EINTR)
            continue;
        if (size < (ssize_t)sizeof command)
            return false;
        if (command.signal != COMMAND_JOB)
            continue; /* meant for processes that are gone */
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        int fds[MAX_ENDS], count = header ? (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof *fds) : 0;
        if (header)
            memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof *fds);
        if (count != __builtin_popcount(command.ends)) { /* the kernel leaves out those above the limit */
            while (count > 0)
                close(fds[--count]);
            report(job, REPORT_REFUSED, EMFILE, 0, program_too_few_descriptors);
            report(job, REPORT_EMPTY, 0, 0, NULL);
            continue;
        }
        take_ends(job, command.ends, fds, count);
        job->fields = (struct fields){request, (size_t)size - sizeof command};
        job->marker = command.marker;
        return true;
    }
}

_Noreturn void supervisor_run(const struct spawn_job *first)
{
    struct spawn_job job = *first;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    /* For the programs: exec() resets handlers, but keeps ignored signals ignored. */
    for (int signal = 1; signal < 65; signal++)
        if (signal != SIGKILL && signal != SIGSTOP)
            sigaction(signal, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    do
        supervise(&job);
    while (take_job(&job));
    sudo_stop();
    _exit(0);
}
