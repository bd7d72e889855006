/* How a program is started, as a user with exactly the descriptors, environment and limits that it should have.
 *
 * Owns what a job or `sudo` (sudo.c) asks for on the way to execve(), and where a program is looked up. Not here: what
 * becomes of it (supervisor.c).
 *
 * The program is started with vfork(): the supervisor waits until exec() or failure, and learns of a failure through
 * the memory that they share until then. A hostile file system that makes chdir() or exec() hang makes the supervisor
 * hang too; the guest then kills the supervisor and sweeps up its orphans (proc.c).
 */
#define _GNU_SOURCE
#include "program.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "guest.h"

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif

enum {
    PARKED_FROM = 3 + MAX_CHANNELS, /* descriptors are moved up here while those below are put in place */
};

const char program_path[] = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

const char program_too_few_descriptors[] = "its descriptors do not fit into the limit on open files of the sandbox's guest";

/* ---- preparing ---- */

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

int program_prepare(struct program *program, const struct spawn_job *job, const char **about)
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
    program->file = program->argv[0];
    program->path = find_env(program->env, "PATH");
    if (!program->path)
        program->path = program_path;
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

void program_close(const int *ends, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (ends[i] >= 0)
            close(ends[i]);
}

void program_forget(struct program *program)
{
    const struct spawn_job *job = program->job;
    program_close((const int[]){job->in, job->terminal, program->terminal}, 3);
    program_close(job->extras, (size_t)job->extra_count);
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
            give_up(program, errno == EINVAL ? EMFILE : errno, program_too_few_descriptors);
    for (int i = 0; i < count; i++)
        if (from[i] >= 0 && dup2(from[i], i) < 0) /* 0 stays /dev/null when there is no input */
            give_up(program, errno == EBADF ? EMFILE : errno, program_too_few_descriptors);
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
        give_up(program, errno, program_too_few_descriptors);
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

/* As execvp(): what `sudo` is given may be a script that does not name its shell. */
static void execute(const struct program *program, const char *path)
{
    execve(path, program->argv, program->env);
    if (errno != ENOEXEC || !program->inherited)
        return;
    program->argv[-1] = "sh";
    program->argv[0] = (char *)path;
    execve("/bin/sh", program->argv - 1, program->env);
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
            execute(program, candidate);
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
    execute(program, name);
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

static void inherit(const struct inherited *inherited)
{
    for (int signal = 1; signal < 32; signal++)
        if (inherited->ignored >> (signal - 1) & 1 && signal != SIGKILL && signal != SIGSTOP && signal != SIGCHLD)
            sigaction(signal, &(struct sigaction){.sa_handler = SIG_IGN}, NULL);
    umask(inherited->mask);
}

static _Noreturn void become_program(struct program *program)
{
    const struct inherited *inherited = program->inherited;
    setsid();
    if (inherited)
        inherit(inherited);
    reset_signals();
    place_descriptors(program);
    if (program->terminal >= 0 || (inherited && inherited->terminal))
        ioctl(0, TIOCSCTTY, 0);
    set_marker(program, program->job->marker);
    setrlimit(RLIMIT_NOFILE, &program->nofile);
    /* As root: who asks is there already, and the user that the program runs as need not be able to go there. */
    if (inherited && inherited->directory >= 0 && fchdir(inherited->directory) < 0)
        give_up(program, errno, "its working directory");
    int error = users_become(&program->account);
    if (error)
        give_up(program, error, "becoming the user");
    if (!inherited || inherited->directory < 0)
        enter_directory(program);
    if (!inherited)
        complain(program, program->line ? try_shells(program) : try_program(program, program->file));
    give_up(program, try_program(program, program->file), program->file);
}

pid_t program_start(struct program *program, int *error, const char **about)
{
    pid_t pid = vfork();
    if (pid == 0)
        become_program(program);
    *error = pid < 0 ? errno : program->error;
    *about = pid < 0 ? "fork" : program->about;
    prctl(PR_SET_DUMPABLE, 0); /* the child's change of user may have changed it in the memory that we share */
    if (pid > 0 && *error)
        waitpid(pid, NULL, 0);
    return *error ? 0 : pid;
}
