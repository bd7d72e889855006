/* Process trees in /proc: finding the processes below a root, signalling them, killing them, listing them.
 *
 * Owns /proc/PID/stat, ppid chains and how a fork bomb is ended. Used by supervisor.c, proc.c and main.c, and for PS.
 *
 * A fork bomb forks faster than it can be killed one by one: each kill frees a pid for the next child. So all processes
 * are stopped first. A stopped process keeps its pid and does not fork, each pass finds fewer, and when a pass finds
 * none that runs, all are killed. A signal goes through a descriptor of /proc/PID where the kernel allows it: that
 * refers to this process, not to a later one with the same pid.
 */
#define _GNU_SOURCE
#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { FREEZE_PASSES = 50, KILL_ALL_MS = 5000, RETRY_MS = 5 };

enum relation { UNKNOWN, BELOW, ELSEWHERE };

struct process {
    pid_t pid, parent, group;
    char state;
    bool reached; /* by the current signal, through its group */
    enum relation relation;
    uint64_t started; /* clock ticks after boot */
    uint64_t cpu_ticks;
    uint64_t rss_pages;
    char name[20];
};

struct census {
    struct process *at;
    int count, cap;
};

/* Numbers are counted from the last ')', because a process may have any name. */
static bool parse_stat(char *text, struct process *process)
{
    char *open = strchr(text, '('), *close = strrchr(text, ')');
    if (!open || !close || close < open || close[1] != ' ')
        return false;
    size_t length = (size_t)(close - open - 1);
    if (length >= sizeof process->name)
        length = sizeof process->name - 1;
    memcpy(process->name, open + 1, length);
    process->name[length] = 0;
    process->pid = (pid_t)atoi(text);
    process->state = close[2];
    uint64_t numbers[22] = {0}; /* field 4 (ppid) is the first */
    char *at = close + 3;
    for (int i = 0; i < 22; i++) {
        char *end;
        numbers[i] = strtoull(at, &end, 10);
        if (end == at)
            break;
        at = end;
    }
    process->parent = (pid_t)numbers[0];
    process->group = (pid_t)numbers[1];
    process->cpu_ticks = numbers[10] + numbers[11];
    process->started = numbers[18];
    process->rss_pages = numbers[20];
    return true;
}

static bool read_stat(int directory, const char *path, struct process *process)
{
    char text[1024];
    int fd = openat(directory, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t size = read(fd, text, sizeof text - 1);
    close(fd);
    if (size <= 0)
        return false;
    text[size] = 0;
    return parse_stat(text, process);
}

static int by_pid(const void *left, const void *right)
{
    pid_t a = ((const struct process *)left)->pid, b = ((const struct process *)right)->pid;
    return a < b ? -1 : a > b;
}

static struct process *find(struct census *census, pid_t pid)
{
    struct process key = {.pid = pid};
    return bsearch(&key, census->at, (size_t)census->count, sizeof key, by_pid);
}

static bool take_census(struct census *census)
{
    DIR *list = opendir("/proc");
    struct dirent *entry;
    if (!list)
        return false;
    census->count = 0;
    while ((entry = readdir(list))) {
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
            continue;
        if (census->count == census->cap) {
            int cap = census->cap ? census->cap * 2 : 64;
            struct process *grown = realloc(census->at, (size_t)cap * sizeof *grown);
            if (!grown)
                break;
            census->at = grown;
            census->cap = cap;
        }
        char path[32];
        size_t length = strnlen(entry->d_name, 20);
        memcpy(path, entry->d_name, length);
        memcpy(path + length, "/stat", 6);
        struct process *process = &census->at[census->count];
        *process = (struct process){0};
        /* gVisor reports pid 0 for a process that was just reaped, which is also the parent of the first process: with
         * it in the census, every process would be below the parent of the reaped one. */
        if (read_stat(dirfd(list), path, process) && process->pid == atoi(entry->d_name))
            census->count++;
    }
    closedir(list);
    qsort(census->at, (size_t)census->count, sizeof *census->at, by_pid);
    return true;
}

int tree_marker_of(pid_t pid)
{
    char path[40], text[16];
    snprintf(path, sizeof path, "/proc/%d/oom_score_adj", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[size > 0 ? size : 0] = 0;
    return atoi(text);
}

/* Walks up from a process to the root or to a known relation, then stores the answer for all processes on the way. */
static void relate(struct census *census, struct process *process, const struct tree *tree)
{
    pid_t root = tree->root;
    enum relation answer = ELSEWHERE;
    struct process *at = process;
    for (int steps = 0; at && steps <= census->count; steps++) {
        if (at->relation != UNKNOWN) {
            answer = at->relation;
            break;
        }
        if (at->pid == root)
            break;
        if (at->parent == root) {
            answer = tree->spare && tree->spare(at->pid) ? ELSEWHERE : BELOW;
            at->relation = answer;
            break;
        }
        at = find(census, at->parent);
    }
    for (at = process; at && at->relation == UNKNOWN && at->pid != root; at = find(census, at->parent))
        at->relation = answer;
    if (at && at->pid == root)
        at->relation = ELSEWHERE;
}

static bool find_below(struct census *census, const struct tree *tree)
{
    if (!take_census(census))
        return false;
    for (int i = 0; i < census->count; i++)
        relate(census, &census->at[i], tree);
    for (int i = 0; i < census->count && tree->marker; i++)
        if (census->at[i].relation == ELSEWHERE && tree_marker_of(census->at[i].pid) == tree->marker)
            census->at[i].relation = BELOW;
    return true;
}

static void send_signal(const struct process *process, int signal)
{
    char path[32];
    snprintf(path, sizeof path, "/proc/%d", process->pid);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return;
    struct process now;
    if (read_stat(fd, "stat", &now) && now.started == process->started) {
        long sent = -1;
        errno = ENOSYS;
#ifdef SYS_pidfd_send_signal
        sent = syscall(SYS_pidfd_send_signal, fd, signal, NULL, 0);
#endif
        if (sent < 0 && errno != ESRCH && errno != EPERM)
            kill(process->pid, signal);
    }
    close(fd);
}

/* A signal to a group reaches all its members at once, also those forked since the census. It cannot reach other trees:
 * every spawned process starts a session, and groups do not cross sessions. Only the guest's own group is left out,
 * which supervisors and workers share. */
static void send_to_group(struct census *census, const struct process *member, int signal)
{
    if (member->group <= 1 || member->group == getpgrp() || kill(-member->group, signal) < 0)
        return;
    for (int i = 0; i < census->count; i++)
        if (census->at[i].group == member->group)
            census->at[i].reached = true;
}

static int send_to_all(struct census *census, int signal, bool (*wanted)(const struct process *process))
{
    int count = 0;
    for (int i = 0; i < census->count; i++)
        census->at[i].reached = false;
    for (int i = 0; i < census->count; i++) {
        struct process *process = &census->at[i];
        if (!wanted(process))
            continue;
        if (!process->reached)
            send_to_group(census, process, signal);
        if (!process->reached)
            send_signal(process, signal);
        count++;
    }
    return count;
}

static bool is_below(const struct process *process)
{
    return process->relation == BELOW;
}

static bool may_still_fork(const struct process *process)
{
    return process->relation == BELOW && !strchr("TtZX", process->state);
}

int tree_signal(const struct tree *tree, int signal)
{
    struct census census = {0};
    int count = find_below(&census, tree) ? send_to_all(&census, signal, is_below) : 0;
    free(census.at);
    return count;
}

pid_t tree_parent(pid_t pid)
{
    char path[32];
    struct process process;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    return read_stat(AT_FDCWD, path, &process) && process.pid == pid ? process.parent : 0;
}

bool tree_contains(const struct tree *tree, pid_t pid, int depth)
{
    pid_t at = pid;
    while (at > 1 && depth-- > 0)
        if ((at = tree_parent(at)) == tree->root)
            return true;
    return tree->marker && tree_marker_of(pid) == tree->marker;
}

bool tree_is_empty(const struct tree *tree)
{
    struct census census = {0};
    int living = 0;
    if (find_below(&census, tree))
        for (int i = 0; i < census.count; i++)
            living += census.at[i].relation == BELOW && !strchr("ZX", census.at[i].state);
    free(census.at);
    return living == 0;
}

int tree_kill_sweep(const struct tree *tree)
{
    struct census census = {0};
    for (int pass = 0; pass < FREEZE_PASSES; pass++) {
        int running = 0;
        if (!find_below(&census, tree))
            break;
        /* A single process is killed without stopping it first, and most trees are one process. */
        for (int i = 0; i < census.count; i++)
            running += may_still_fork(&census.at[i]);
        if (running <= 1)
            break;
        send_to_all(&census, SIGSTOP, may_still_fork);
    }
    /* Zombies too: a process whose first thread has ended may still have others. */
    int killed = send_to_all(&census, SIGKILL, is_below);
    free(census.at);
    return killed;
}

static void pause_ms(int ms)
{
    nanosleep(&(struct timespec){.tv_nsec = ms * 1000000L}, NULL);
}

void tree_kill_all(const struct tree *tree)
{
    for (int waited = 0; waited < KILL_ALL_MS; waited += RETRY_MS) {
        int killed = tree_kill_sweep(tree);
        while (waitpid(-1, NULL, WNOHANG) > 0) {
        }
        if (!killed)
            return;
        pause_ms(RETRY_MS);
    }
}

int tree_children(pid_t root, pid_t *children, int most)
{
    struct census census = {0};
    int count = 0;
    if (take_census(&census))
        for (int i = 0; i < census.count && count < most; i++)
            if (census.at[i].parent == root)
                children[count++] = census.at[i].pid;
    free(census.at);
    return count;
}

/* ---- the list of all processes ---- */

static int64_t boot_time_us(void)
{
    struct timespec now, up;
    clock_gettime(CLOCK_REALTIME, &now);
    clock_gettime(CLOCK_BOOTTIME, &up);
    return ((int64_t)now.tv_sec - up.tv_sec) * 1000000 + (now.tv_nsec - up.tv_nsec) / 1000;
}

static void pack_command(struct pack *record, const struct process *process)
{
    char path[40], command[4096];
    snprintf(path, sizeof path, "/proc/%d/cmdline", process->pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, command, sizeof command);
    if (fd >= 0)
        close(fd);
    while (size > 0 && !command[size - 1])
        size--;
    for (ssize_t i = 0; i < size; i++)
        if (!command[i])
            command[i] = ' ';
    if (size <= 0)
        size = snprintf(command, sizeof command, "[%s]", process->name);
    pack_bytes(record, TAG_COMMAND, command, (size_t)size);
}

/* The inodes of all TCP sockets. */
struct sockets {
    uint64_t *at;
    size_t count;
};

/* A line of the table: its tenth word is an inode, except in the heading. */
static void take_socket(const char *line, struct sockets *sockets)
{
    for (int word = 1; word < 10; word++) {
        line += strspn(line, " ");
        line += strcspn(line, " ");
    }
    char *end;
    uint64_t inode = strtoull(line, &end, 10);
    uint64_t *grown = end == line ? NULL : realloc(sockets->at, (sockets->count + 1) * sizeof *grown);
    if (!grown)
        return;
    sockets->at = grown;
    sockets->at[sockets->count++] = inode;
}

static void read_sockets(const char *path, struct sockets *sockets)
{
    char text[4096];
    size_t held = 0;
    ssize_t size;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && (size = read(fd, text + held, sizeof text - 1 - held)) > 0) {
        held += (size_t)size;
        text[held] = 0;
        char *line = text, *end;
        for (; (end = strchr(line, '\n')); line = end + 1) {
            *end = 0;
            take_socket(line, sockets);
        }
        held = strlen(line);
        memmove(text, line, held);
    }
    if (fd >= 0)
        close(fd);
}

static bool is_among(const struct sockets *sockets, uint64_t inode)
{
    for (size_t i = 0; i < sockets->count; i++)
        if (sockets->at[i] == inode)
            return true;
    return false;
}

/* Whether a process has one of the sockets and an epoll descriptor to wait for it with. */
static bool may_wait(pid_t pid, const struct sockets *sockets)
{
    char path[40];
    bool polls = false, has_socket = false;
    snprintf(path, sizeof path, "/proc/%d/fd", pid);
    DIR *list = opendir(path);
    struct dirent *entry;
    while (list && !(polls && has_socket) && (entry = readdir(list))) {
        char target[64] = "";
        if (readlinkat(dirfd(list), entry->d_name, target, sizeof target - 1) <= 0)
            continue;
        polls |= !strcmp(target, "anon_inode:[eventpoll]");
        has_socket |= !strncmp(target, "socket:[", 8) && is_among(sockets, strtoull(target + 8, NULL, 10));
    }
    if (list)
        closedir(list);
    return polls && has_socket;
}

static int run_ps(struct job *job)
{
    bool waiting = fields_int(job->fields, TAG_WAITING, 0) == 1;
    struct sockets sockets = {0};
    if (waiting) {
        read_sockets("/proc/net/tcp", &sockets);
        read_sockets("/proc/net/tcp6", &sockets);
    }
    struct census census = {0};
    int64_t boot = boot_time_us(), tick_us = 1000000 / sysconf(_SC_CLK_TCK), page = sysconf(_SC_PAGESIZE);
    if (!take_census(&census))
        return job_fail(job, errno, "/proc");
    for (int i = 0; i < census.count; i++) {
        const struct process *process = &census.at[i];
        char path[32];
        struct stat status;
        snprintf(path, sizeof path, "/proc/%d", process->pid);
        if (process->pid == getpid() || stat(path, &status) < 0)
            continue;
        if (waiting && (process->pid == 1 || !may_wait(process->pid, &sockets)))
            continue;
        job_begin_record(job);
        pack_int(&job->record, TAG_PID, process->pid);
        pack_int(&job->record, TAG_PPID, process->parent);
        pack_int(&job->record, TAG_UID, status.st_uid);
        pack_bytes(&job->record, TAG_STATE, &process->state, 1);
        pack_command(&job->record, process);
        pack_int(&job->record, TAG_RSS_BYTES, (int64_t)process->rss_pages * page);
        pack_int(&job->record, TAG_CPU_US, (int64_t)process->cpu_ticks * tick_us);
        pack_int(&job->record, TAG_STARTED_US, boot + (int64_t)process->started * tick_us);
        job_end_record(job);
    }
    return 0;
}

const struct operation operation_ps = {.run = run_ps, .gives_output = true, .as_root = true};
