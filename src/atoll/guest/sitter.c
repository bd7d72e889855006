/* The sitter: a process of the guest's own above each spawned process.
 *
 * Knows: how a program is started as a user with exactly what it should have, and that everything it leaves behind
 * comes to its subreaper. Refuses to know: output, streams, the host.
 *
 * When nothing is left of a process it takes the next one: what it holds of one is given back before that.
 *
 * The program is started with vfork(): the sitter waits until exec() or failure, and learns of a failure through the
 * memory they share until then. A hostile file system that makes chdir() or exec() hang makes the sitter hang too;
 * the guest then ends the sitter and sweeps up (proc.c).
 */
#define _GNU_SOURCE
#include "sitter.h"

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
    ABOVE_ALL = 100,       /* descriptors are parked from here on while 0 to 10 are put in place */
    SWEEP_AGAIN_MS = 2,
    HURRIED_SWEEPS = 8,
    HOLD_MS = 300,         /* how long the dead are left to fill the process limit, against what forks and exits */
    OBEY_WITHIN_MS = 4000,
    LOOK_EVERY_MS = 500,
};

static const char usual_path[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/* What the program is to be, prepared before the fork so that the child only makes system calls. */
struct program {
    const struct sitting *sitting;
    struct account account;
    char **argv;
    char **env;
    char *line; /* for the shell; NULL: there is none */
    const char *path; /* "PATH=…" */
    char *cwd;
    int terminal; /* the program's side */
    struct rlimit nofile;
    volatile int error; /* why it could not even try to run the program */
    const char *volatile about;
};

struct sitter {
    const struct sitting *sitting;
    struct tree tree;
    pid_t main;      /* 0 once it has been reaped */
    int64_t started;
};

static void report(const struct sitting *sitting, enum report_kind kind, int value, int64_t number, const char *text)
{
    struct report message = {.kind = (int32_t)kind, .value = value, .number = number};
    if (text)
        memcpy(message.text, text, strnlen(text, sizeof message.text - 1));
    /* When nobody takes it the guest is gone, and the next order says so. */
    (void)!send(sitting->link, &message, sizeof message, MSG_NOSIGNAL);
}

/* ---- what the program is to be ---- */

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

static int open_terminal(const struct sitting *sitting, const struct account *account)
{
    int fd = ioctl(sitting->terminal, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC), number;
    if (fd < 0 && ioctl(sitting->terminal, TIOCGPTN, &number) == 0) {
        /* gVisor and old kernels have no other way than the path. */
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

/* 0, or an errno and what it is about. */
static int prepare(struct program *program, const struct sitting *sitting, const char **about)
{
    struct fields fields = sitting->fields;
    *program = (struct program){.sitting = sitting, .nofile = *guest_first_nofile(), .terminal = -1};
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
    *about = NULL;
    if (!program->argv || !program->env)
        return ENOMEM;
    program->path = find_env(program->env, "PATH");
    if (!program->path)
        program->path = usual_path;
    /* Whoever writes to /dev/stdout opens the pipe once more, as himself. */
    const int ends[] = {sitting->in, sitting->out, sitting->err};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ends[i] >= 0 && program->account.uid != 0)
            (void)!fchown(ends[i], program->account.uid, program->account.gid);
    *about = "terminal";
    if (sitting->terminal >= 0 && (program->terminal = open_terminal(sitting, &program->account)) < 0)
        return errno;
    return 0;
}

/* Gives back what prepare() took, and the program's ends of everything. */
static void forget(struct program *program)
{
    const struct sitting *sitting = program->sitting;
    const int ends[] = {sitting->in, sitting->out, sitting->err, sitting->terminal, program->terminal};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (ends[i] >= 0)
            close(ends[i]);
    for (int i = 0; i < sitting->extra_count; i++)
        close(sitting->extras[i]);
    if (program->line)
        free(program->argv); /* which holds nothing but the line and words of ours */
    else
        free_list(program->argv);
    free(program->line);
    free_list(program->env);
    free(program->cwd);
    users_forget(&program->account);
}

/* ---- in the child, which shares our memory until it runs the program ---- */

static _Noreturn void give_up(struct program *program, int error, const char *about)
{
    program->about = about;
    program->error = error;
    _exit(EXIT_CANNOT_RUN);
}

static void place_descriptors(const struct program *program)
{
    const struct sitting *sitting = program->sitting;
    int from[3 + MAX_CHANNELS] = {sitting->in, sitting->out, sitting->err};
    if (program->terminal >= 0)
        from[0] = from[1] = from[2] = program->terminal;
    for (int i = 0; i < sitting->extra_count; i++)
        from[3 + i] = sitting->extras[i];
    int count = 3 + sitting->extra_count;
    for (int i = 0; i < count; i++)
        if (from[i] >= 0)
            from[i] = fcntl(from[i], F_DUPFD_CLOEXEC, ABOVE_ALL);
    for (int i = 0; i < count; i++)
        if (from[i] >= 0)
            dup2(from[i], i); /* 0 stays /dev/null when there is no input */
}

static void usual_signals(void)
{
    /* exec() resets handlers by itself, but keeps what is ignored. */
    struct sigaction usual = {.sa_handler = SIG_DFL};
    for (int signal = 1; signal < 65; signal++)
        if (signal != SIGKILL && signal != SIGSTOP)
            sigaction(signal, &usual, NULL);
    guest_set_reserved_signals(SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

/* The program goes before the guest when memory runs out. */
static void take_brand(int brand)
{
    char text[8];
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void)!write(fd, text, (size_t)snprintf(text, sizeof text, "%d", brand));
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
    usual_signals();
    place_descriptors(program);
    if (program->terminal >= 0)
        ioctl(0, TIOCSCTTY, 0);
    take_brand(program->sitting->brand);
    umask(022);
    setrlimit(RLIMIT_NOFILE, &program->nofile);
    int error = users_become(&program->account);
    if (error)
        give_up(program, error, "becoming the user");
    enter_directory(program);
    complain(program, program->line ? try_shells(program) : try_program(program, program->argv[0]));
}

/* ---- sitting ---- */

/* The main process's pid; 0 when it could not be started, which it has said then. */
static pid_t start_main(struct program *program, const struct sitting *sitting)
{
    const char *about;
    int error = prepare(program, sitting, &about);
    pid_t pid = 0;
    if (!error) {
        pid = vfork();
        if (pid == 0)
            become_program(program);
        error = pid < 0 ? errno : program->error;
        about = pid < 0 ? "fork" : program->about;
        prctl(PR_SET_DUMPABLE, 0); /* the child's change of user may have touched what we share */
    }
    if (error) {
        if (pid > 0)
            waitpid(pid, NULL, 0);
        report(sitting, REPORT_REFUSED, error, 0, about);
        pid = 0;
    } else {
        report(sitting, REPORT_STARTED, pid, program->account.uid, NULL);
    }
    forget(program);
    return pid;
}

/* Takes in the dead; true when no child is left. */
static bool reap_children(struct sitter *sitter)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, WNOHANG);
        if (pid == 0)
            return false;
        if (pid < 0)
            return errno == ECHILD;
        if (pid == sitter->main) {
            sitter->main = 0;
            report(sitter->sitting, REPORT_ENDED, status, now_us() - sitter->started, NULL);
        }
    }
}

/* True when nobody is left at all, orphans that went to the guest included: for them two looks are taken, because one
 * takes a while and somebody may be born behind its back. */
static bool reap(struct sitter *sitter)
{
    const struct tree *tree = &sitter->tree;
    return reap_children(sitter) && (!tree->brand || (tree_is_empty(tree) && tree_is_empty(tree)));
}

/* Of all signals that can be kept out only this one is let in, and only in a wait: `kill -TERM -1` inside must not
 * take the sitters along. */
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

/* Kills until nothing is left, which it reports as true; false when something withstands for too long.
 *
 * What forks, exits and starts a session each time can outrun any look into /proc. It cannot outrun the process limit:
 * when sweeping in a hurry did not do, the dead are left unreaped for a while, until no fork succeeds any more. */
static bool kill_tree(struct sitter *sitter)
{
    int64_t until = now_us() + OBEY_WITHIN_MS * 1000, hold_until = 0;
    for (int sweeps = 1;; sweeps++) {
        tree_kill_sweep(&sitter->tree);
        int64_t now = now_us();
        if (now >= hold_until) {
            if (reap(sitter))
                return true;
            if (sweeps > HURRIED_SWEEPS && now - hold_until > HOLD_MS * 1000)
                hold_until = now + HOLD_MS * 1000;
        }
        if (now > until)
            return false;
        if (sweeps <= HURRIED_SWEEPS)
            sleep_until_signal(SWEEP_AGAIN_MS);
    }
}

static void obey(struct sitter *sitter, const struct order *order)
{
    int error = 0;
    if (order->tree && order->signal == SIGKILL)
        error = kill_tree(sitter) ? 0 : EBUSY;
    else if (order->tree)
        error = tree_signal(&sitter->tree, order->signal) ? 0 : ESRCH;
    else if (!sitter->main)
        error = ESRCH;
    else if (kill(sitter->main, order->signal) < 0)
        error = errno;
    report(sitter->sitting, REPORT_OBEYED, error, order->sequence, NULL);
}

/* An order, or the end of orders: then the guest is gone, and so must be everything it started. */
static void take_order(struct sitter *sitter)
{
    struct order order;
    ssize_t size = recv(sitter->sitting->link, &order, sizeof order, MSG_DONTWAIT);
    if (size == (ssize_t)sizeof order) {
        obey(sitter, &order);
    } else if (size >= 0 || (errno != EAGAIN && errno != EINTR)) {
        kill_tree(sitter);
        _exit(0);
    }
}

static void on_child(int signal)
{
    (void)signal; /* only there to interrupt a wait */
}

static void sit(const struct sitting *sitting)
{
    static struct program program;
    struct sitter sitter = {.sitting = sitting, .started = now_us()};
    sitter.tree = (struct tree){.root = getpid(), .brand = guest_has_subreapers() ? 0 : sitting->brand};
    sitter.main = start_main(&program, sitting);
    sigset_t mask = all_but_child();
    struct pollfd orders = {.fd = sitting->link, .events = POLLIN};
    /* Of orphans that went to the guest no signal tells: they are looked after. */
    const struct timespec look = {.tv_nsec = LOOK_EVERY_MS * 1000000L};
    while (!(reap(&sitter) && !sitter.main))
        if (ppoll(&orders, 1, sitter.tree.brand && !sitter.main ? &look : NULL, &mask) > 0)
            take_order(&sitter);
    report(sitting, REPORT_EMPTY, 0, 0, NULL);
}

/* ---- the next job ---- */

/* The descriptors of a job, each in its place. */
static void take_ends(struct sitting *sitting, uint32_t bits, const int *fds, int count)
{
    int *places[MOST_ENDS] = {&sitting->in, &sitting->out, &sitting->err, &sitting->terminal};
    for (int i = 0; i < MAX_CHANNELS; i++)
        places[4 + i] = &sitting->extras[i];
    sitting->extra_count = 0;
    for (int i = 0, next = 0; i < MOST_ENDS; i++) {
        *places[i] = bits >> i & 1 && next < count ? fds[next++] : -1;
        if (i >= 4 && *places[i] >= 0)
            sitting->extra_count++;
    }
}

/* Waits until the guest has one; false when it will not have any. */
static bool take_job(struct sitting *sitting)
{
    static uint8_t request[LARGEST_JOB];
    for (;;) {
        struct order order;
        union {
            struct cmsghdr header;
            char space[CMSG_SPACE(MOST_ENDS * sizeof(int))];
        } control;
        struct iovec parts[] = {{&order, sizeof order}, {request, sizeof request}};
        struct msghdr message = {
            .msg_iov = parts,
            .msg_iovlen = 2,
            .msg_control = &control,
            .msg_controllen = sizeof control,
        };
        ssize_t size = recvmsg(sitting->link, &message, MSG_CMSG_CLOEXEC);
        if (size < 0 && errno == EINTR)
            continue;
        if (size < (ssize_t)sizeof order)
            return false;
        if (order.signal != ORDER_JOB)
            continue; /* for those who are gone */
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        int fds[MOST_ENDS], count = header ? (int)((header->cmsg_len - CMSG_LEN(0)) / sizeof *fds) : 0;
        if (header)
            memcpy(fds, CMSG_DATA(header), (size_t)count * sizeof *fds);
        take_ends(sitting, order.ends, fds, count);
        sitting->fields = (struct fields){request, (size_t)size - sizeof order};
        sitting->brand = order.brand;
        return true;
    }
}

_Noreturn void sitter_run(const struct sitting *first)
{
    struct sitting sitting = *first;
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, NULL);
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = on_child, .sa_flags = SA_NOCLDSTOP}, NULL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    do
        sit(&sitting);
    while (take_job(&sitting));
    _exit(0);
}
