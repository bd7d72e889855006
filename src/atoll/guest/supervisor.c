/* The supervisor: a process of the guest's own that is the parent of each spawned process, and the subreaper of its
 * tree.
 *
 * Owns how a program is started as a user with exactly the descriptors, environment and limits that it should have, and
 * how its tree is reaped, signalled and killed. Not here: output, streams, the host (proc.c, attach.c). The messages to
 * and from the guest are drawn in supervisor.h.
 *
 * When nothing is left of a process, the supervisor releases all that it held for it and takes the next job.
 *
 * The program is started with vfork(): the supervisor waits until exec() or failure, and learns of a failure through
 * the memory that they share until then. A hostile file system that makes chdir() or exec() hang makes the supervisor
 * hang too; the guest then kills the supervisor and sweeps up its orphans (proc.c).
 */
#define _GNU_SOURCE
#include "supervisor.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "guest.h"
#include "loop.h"
#include "tree.h"
#include "users.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

enum {
    EXIT_NOT_FOUND = 127,
    EXIT_CANNOT_RUN = 126,
    PARKED_FROM = 3 + MAX_CHANNELS, /* descriptors are moved up here while those below are put in place */
    SWEEP_PAUSE_MS = 2,
    QUICK_SWEEPS = 8,
    HOLD_MS = 300, /* how long zombies are left unreaped to fill the process limit, against processes that fork */
    COMMAND_TIMEOUT_MS = 4000,
    ORPHAN_POLL_MS = 500,
    HOLD_REPORT_MS = 3, /* STARTED of a QUIET process is sent together with ENDED if that comes within this time */
};

static const char default_path[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

static const char too_few_descriptors[] = "its descriptors do not fit into the limit on open files of the sandbox's guest";

/* The program to start, prepared before the fork so that the child only makes system calls. */
struct program {
    const struct spawn_job *job;
    struct account account;
    char **argv;
    char **env;
    char *line; /* the shell's command line; NULL: no shell */
    const char *path; /* "PATH=…" */
    char *cwd;
    int terminal; /* the slave side */
    bool merge; /* stderr is stdout */
    struct rlimit nofile;
    volatile int error; /* an errno of the child before execve() */
    const char *volatile about;
};

struct supervisor {
    const struct spawn_job *job;
    struct tree tree;
    pid_t main;      /* 0 once it has been reaped */
    int64_t started;
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

/* ---- preparing the program ---- */

static void free_list(char **list)
{
    for (char **at = list; at && *at; at++)
        free(*at);
    free(list);
}

static char **collect(struct fields fields, uint16_t wanted, size_t spare)
{
    char **list = calloc(fields_count(fields, wanted) + spare + 1, sizeof *list);
    uint16_t tag;
    const uint8_t *value;
    uint32_t size;
    size_t count = 0;
    while (list && fields_next(&fields, &tag, &value, &size)) {
        if (tag != wanted)
            continue;
        if (!(list[count] = malloc(size + 1))) {
            free_list(list);
            return NULL;
        }
        memcpy(list[count], value, size);
        list[count++][size] = 0;
    }
    return list;
}

static const char *find_env(char **env, const char *name)
{
    size_t length = strlen(name);
    for (; *env; env++)
        if (!strncmp(*env, name, length) && (*env)[length] == '=')
            return *env;
    return NULL;
}

static void add_env(char **env, const char *name, const char *value)
{
    if (find_env(env, name))
        return;
    size_t size = strlen(name) + strlen(value) + 2;
    char *entry = malloc(size);
    if (!entry)
        return;
    snprintf(entry, size, "%s=%s", name, value);
    while (*env)
        env++;
    *env = entry;
}

static char **make_env(struct fields fields, const struct account *account)
{
    char **env = collect(fields, TAG_ENV, 4);
    char number[16];
    if (!env)
        return NULL;
    snprintf(number, sizeof number, "%u", account->uid);
    const char *name = account->name ? account->name : number;
    add_env(env, "HOME", account->home);
    add_env(env, "USER", name);
    add_env(env, "LOGNAME", name);
    add_env(env, "SHELL", account->shell);
    return env;
}

static char **make_argv(struct fields fields, char *line)
{
    if (!line)
        return collect(fields, TAG_ARGV, 0);
    char **argv = calloc(4, sizeof *argv);
    if (argv) {
        argv[0] = "bash";
        argv[1] = "-c";
        argv[2] = line;
    }
    return argv;
}

static int open_terminal(const struct spawn_job *job, const struct account *account)
{
    int fd = ioctl(job->terminal, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC), number;
    if (fd < 0 && ioctl(job->terminal, TIOCGPTN, &number) == 0) {
        /* gVisor and old kernels can open it by its path only. */
        char path[32];
        snprintf(path, sizeof path, "/dev/pts/%d", number);
        fd = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    }
    if (fd >= 0) {
        (void)!fchown(fd, account->uid, account->gid);
        fchmod(fd, 0620);
    }
    return fd;
}

/* 0, or an errno and its subject. */
static int prepare(struct program *program, const struct spawn_job *job, const char **about)
{
    struct fields fields = job->fields;
    *program = (struct program){.job = job, .nofile = *guest_first_nofile(), .terminal = -1};
    char *user = fields_string(fields, TAG_USER);
    int error = users_find(user, &program->account);
    free(user);
    *about = error == ENOENT ? "no such user" : "user";
    if (error)
        return error;
    program->line = fields_string(fields, TAG_SHELL);
    program->argv = make_argv(fields, program->line);
    program->env = make_env(fields, &program->account);
    program->cwd = fields_string(fields, TAG_CWD);
    program->merge = fields_int(fields, TAG_MERGE, 0) == 1;
    *about = NULL;
    if (!program->argv || !program->env)
        return ENOMEM;
    program->path = find_env(program->env, "PATH");
    if (!program->path)
        program->path = default_path;
    /* A program that writes to /dev/stdout opens the pipe again, as its own user. */
    const int ends[] = {job->in, job->out, job->err};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ends[i] >= 0 && program->account.uid != 0)
            (void)!fchown(ends[i], program->account.uid, program->account.gid);
    *about = "terminal";
    if (job->terminal >= 0 && (program->terminal = open_terminal(job, &program->account)) < 0)
        return errno;
    return 0;
}

static void close_all(const int *ends, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (ends[i] >= 0)
            close(ends[i]);
}

/* The program's ends of stdout and stderr stay open here until it has ended: else the guest would be woken for the end
 * of each, just before it is woken for the end of the program. */
static void close_outputs(const struct spawn_job *job)
{
    close_all((const int[]){job->out, job->err}, 2);
}

/* Releases what prepare() allocated, and the program's ends of all channels but stdout and stderr. */
static void forget(struct program *program)
{
    const struct spawn_job *job = program->job;
    close_all((const int[]){job->in, job->terminal, program->terminal}, 3);
    close_all(job->extras, (size_t)job->extra_count);
    if (program->line)
        free(program->argv); /* which holds only the line and string literals */
    else
        free_list(program->argv);
    free(program->line);
    free_list(program->env);
    free(program->cwd);
    users_forget(&program->account);
}

/* ---- in the child, which shares the supervisor's memory until execve() ---- */

static _Noreturn void give_up(struct program *program, int error, const char *about)
{
    program->about = about;
    program->error = error;
    _exit(EXIT_CANNOT_RUN);
}

/* All or none: output of a program that runs without one of its descriptors would be lost without a word. */
static void place_descriptors(struct program *program)
{
    const struct spawn_job *job = program->job;
    int from[3 + MAX_CHANNELS] = {job->in, job->out, job->err};
    if (program->merge)
        from[2] = job->out;
    if (program->terminal >= 0)
        from[0] = from[1] = from[2] = program->terminal;
    for (int i = 0; i < job->extra_count; i++)
        from[3 + i] = job->extras[i];
    int count = 3 + job->extra_count;
    for (int i = 0; i < count; i++) /* only what is in the way: with gVisor each call takes 30 µs */
        if (from[i] >= 0 && from[i] < count && (from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, PARKED_FROM)) < 0)
            give_up(program, errno == EINVAL ? EMFILE : errno, too_few_descriptors);
    for (int i = 0; i < count; i++)
        if (from[i] >= 0 && dup2(from[i], i) < 0) /* 0 stays /dev/null when there is no input */
            give_up(program, errno == EBADF ? EMFILE : errno, too_few_descriptors);
}

/* The supervisor has made all others default. These two it cannot block, and so ignores as the guest does. */
static void reset_signals(void)
{
    guest_set_reserved_signals(SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* The marker is an oom_score_adj above the guest's: when memory runs out, the program is killed first. */
static void set_marker(struct program *program, int marker)
{
    char text[8];
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE))
        give_up(program, errno, too_few_descriptors);
    if (fd >= 0) {
        (void)!write(fd, text, (size_t)snprintf(text, sizeof text, "%d", marker));
        close(fd);
    }
}

static void enter_directory(struct program *program)
{
    if (chdir(program->account.home) < 0 && chdir("/") < 0)
        give_up(program, errno, "/");
    if (program->cwd && chdir(program->cwd) < 0)
        give_up(program, errno, program->cwd);
}

static int try_path(const struct program *program, const char *name)
{
    char candidate[PATH_MAX];
    const char *at = program->path + 5;
    int result = ENOENT;
    size_t name_length = strlen(name);
    for (;;) {
        size_t length = strcspn(at, ":");
        if (length + name_length + 2 <= sizeof candidate) {
            memcpy(candidate, at, length);
            if (length)
                candidate[length] = '/';
            memcpy(candidate + length + (length != 0), name, name_length + 1);
            execve(candidate, program->argv, program->env);
            if (errno != ENOENT && errno != ENOTDIR)
                result = errno;
            if (errno != ENOENT && errno != ENOTDIR && errno != EACCES)
                return result;
        }
        if (!at[length])
            return result;
        at += length + 1;
    }
}

static int try_program(const struct program *program, const char *name)
{
    if (!*name)
        return ENOENT;
    if (!strchr(name, '/'))
        return try_path(program, name);
    execve(name, program->argv, program->env);
    return errno;
}

static int try_shells(struct program *program)
{
    static const char *const shells[][2] = {{"bash", "bash"}, {"bash", "/bin/bash"}, {"sh", "sh"}, {"sh", "/bin/sh"}};
    int error = ENOENT;
    for (size_t i = 0; i < sizeof shells / sizeof *shells && (error == ENOENT || error == EACCES); i++) {
        program->argv[0] = (char *)shells[i][0];
        error = try_program(program, shells[i][1]);
    }
    return error;
}

static _Noreturn void complain(const struct program *program, int error)
{
    const char *name = program->argv[0];
    const char *words = error == ENOENT && !strchr(name, '/') ? "command not found" : strerror(error);
    struct iovec parts[] = {
        {(char *)name, strlen(name)},
        {": ", 2},
        {(char *)words, strlen(words)},
        {"\n", 1},
    };
    (void)!writev(2, parts, 4);
    _exit(error == ENOENT || error == ENOTDIR ? EXIT_NOT_FOUND : EXIT_CANNOT_RUN);
}

static _Noreturn void become_program(struct program *program)
{
    setsid();
    reset_signals();
    place_descriptors(program);
    if (program->terminal >= 0)
        ioctl(0, TIOCSCTTY, 0);
    set_marker(program, program->job->marker);
    setrlimit(RLIMIT_NOFILE, &program->nofile);
    int error = users_become(&program->account);
    if (error)
        give_up(program, error, "becoming the user");
    enter_directory(program);
    complain(program, program->line ? try_shells(program) : try_program(program, program->argv[0]));
}

/* ---- supervising ---- */

/* The main process's pid; 0 when it could not be started, which has then been reported. */
static pid_t start_main(struct program *program, const struct spawn_job *job)
{
    const char *about;
    int error = prepare(program, job, &about);
    pid_t pid = 0;
    if (!error) {
        pid = vfork();
        if (pid == 0)
            become_program(program);
        error = pid < 0 ? errno : program->error;
        about = pid < 0 ? "fork" : program->about;
        prctl(PR_SET_DUMPABLE, 0); /* the child's change of user may have changed it in the memory that we share */
    }
    if (error) {
        if (pid > 0)
            waitpid(pid, NULL, 0);
        report(job, REPORT_REFUSED, error, 0, about);
        close_outputs(job);
        pid = 0;
    } else {
        hold_report(REPORT_STARTED, pid, program->account.uid, NULL);
        if (fields_int(job->fields, TAG_QUIET, 0) != 1)
            send_held(job);
    }
    forget(program);
    return pid;
}

/* Reaps; true when no child is left. */
static bool reap_children(struct supervisor *supervisor)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid == 0)
            return false;
        if (pid < 0)
            return errno == ECHILD;
        if (pid == supervisor->main) {
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

static void supervise(const struct spawn_job *job)
{
    static struct program program;
    struct supervisor supervisor = {.job = job, .started = now_us()};
    supervisor.tree = (struct tree){.root = getpid(), .marker = guest_has_subreapers() ? 0 : job->marker};
    supervisor.main = start_main(&program, job);
    sigset_t mask = all_but_child();
    struct pollfd commands = {.fd = job->link, .events = POLLIN};
    while (!(reap(&supervisor) && !supervisor.main)) {
        /* No signal reports the end of orphans that were reparented to the guest: they are polled for. */
        int ms = held_count ? HOLD_REPORT_MS : supervisor.tree.marker && !supervisor.main ? ORPHAN_POLL_MS : -1;
        const struct timespec interval = {.tv_nsec = ms * 1000000L};
        if (ppoll(&commands, 1, ms < 0 ? NULL : &interval, &mask) > 0)
            take_command(&supervisor);
        else if (!reap_children(&supervisor))
            send_held(job);
    }
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
            report(job, REPORT_REFUSED, EMFILE, 0, too_few_descriptors);
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
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP}, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    do
        supervise(&job);
    while (take_job(&job));
    _exit(0);
}
