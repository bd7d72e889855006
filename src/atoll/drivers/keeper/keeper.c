/* The keeper: one small process on the host per sandbox. It starts the sandbox's runtime, then owns the link to its
 * guest and shares it among clients, so that no program that uses a sandbox has to outlive another.
 *
 *   keeper start --dir D --active-layer L --cover C --listen FD --lock FD
 *                [--file NAME PATH]… [--scratch BYTES] [--uid I O N]… [--gid I O N]… [--rootless] [--ephemeral]
 *                [--foreground] [--confine ID] [--machine ID] [--freezer FILE FREEZE THAW FILE LINE] [--pause-after MS]
 *                [--expires-at MS] [--renewal MS] [--freeze-at-end] [--disk BYTES] [--epoch N] [--keeper-cgroup DIR]… [--cgroup DIR]… [--limit FILE VALUE]…
 *                [--overlay KEY TARGET COUNT (LAYER OWNER)…]…
 *                [--mount PATH ro|rw UIDS GIDS (DISK O N)… (DISK O N)…]… -- RUNTIME ARGUMENTS…
 *   keeper nsexec [--uid I O N]… [--gid I O N]… [--rootless] [--ephemeral] -- COMMAND ARGUMENTS…
 *   keeper copy [--uid I O N]… [--gid I O N]… [--rootless] -- FROM TO [EARLIER]
 *   keeper merge [--uid I O N]… [--gid I O N]… [--rootless] -- TO OWNER (LAYER OWNER)…
 *   keeper hostname --owner ID -- PID HOSTNAME
 *   keeper idmap -- PATH
 *
 * `start` returns at once; clients on the socket learn the outcome (keeper.h draws the handshake). `--lock` is a file
 * that the driver has locked: the keeper holds the lock as long as it lives, and writes its process id into the file.
 * `--keeper-cgroup`: where the keeper is, not in the cgroup of who starts it. A service manager such as systemd kills a
 * unit by its cgroup: sandboxes outlive the unit that has created them.
 * `--foreground`: the command, such as bwrap, does not leave the sandbox behind and exit, but stays as its parent. It
 * runs as root of the sandbox's user namespace, and is ended when the guest has spoken: the sandbox is then the keeper's
 * own child.
 * `nsexec` runs a command in the namespaces in which a runtime would run: a private mount namespace and, rootless, the
 * user namespace that owns the files; with `--ephemeral` it is killed when its parent ends. `copy` copies a layer there, `merge` merges several into one, the lowest first.
 * `hostname` sets the hostname of the sandbox that a process belongs to. `idmap` succeeds if the file system of a
 * directory can be id-mapped. The maps of a mount, UIDS for users and GIDS for groups, say which ids on disk are which
 * ids of the sandbox's range.
 *
 * This file owns the order of steps; each step is in launch.c, relay.c, timing.c, copy.c, quota.c, hostname.c or confine.c. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "keeper.h"

enum { RUNTIME_TIMEOUT_MS = 30000, LISTENER = 3, LOCK = 4, MAX_ATTEMPTS = 100 };

static void usage(const char *what) __attribute__((noreturn));
static void usage(const char *what)
{
    dprintf(STDERR_FILENO, "keeper: bad arguments near '%s'\n", what);
    _exit(2);
}

static unsigned number(const char *text)
{
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (errno || *end || end == text || value > 4294967295UL)
        usage(text);
    return (unsigned)value;
}

static void add_map(struct id_map *maps, int *count, char **values)
{
    if (*count == MAX_MAPS)
        usage("too many maps");
    maps[(*count)++] = (struct id_map){number(values[0]), number(values[1]), number(values[2])};
}

static int add_overlay(struct plan *plan, char **values, int left)
{
    if (left < 5 || plan->overlay_count == MAX_OVERLAYS)
        usage("--overlay");
    unsigned count = number(values[2]);
    if (count < 1 || count > MAX_LAYERS || 2 * (int)count > left - 3)
        usage(values[2]);
    for (unsigned i = 0; i < count; i++)
        if (strcmp(values[4 + 2 * i], "machine"))
            number(values[4 + 2 * i]);
    plan->overlays[plan->overlay_count++] = (struct overlay){
        .key = values[0], .target = values[1], .layers = values + 3, .layer_count = (int)count};
    return 3 + 2 * (int)count;
}

static int add_mount(struct plan *plan, char **values, int left)
{
    if (left < 4 || plan->mount_count == MAX_MOUNTS)
        usage("--mount");
    struct bind *mount = &plan->mounts[plan->mount_count++];
    mount->path = values[0];
    mount->read_only = strcmp(values[1], "rw");
    unsigned uids = number(values[2]), gids = number(values[3]);
    if (uids > MAX_MAPS || gids > MAX_MAPS || 3 * (int)(uids + gids) > left - 4)
        usage("--mount");
    for (unsigned i = 0; i < uids; i++)
        add_map(mount->uids, &mount->uid_count, values + 4 + 3 * i);
    for (unsigned i = uids; i < uids + gids; i++)
        add_map(mount->gids, &mount->gid_count, values + 4 + 3 * i);
    return 4 + 3 * (int)(uids + gids);
}

static struct plan parse(int argc, char **argv)
{
    struct plan plan = {.listener = -1, .lock = -1, .confine_id = -1};
    for (int i = 2; i < argc; i++) {
        const char *arg = argv[i];
        int left = argc - i - 1;
        if (!strcmp(arg, "--")) {
            plan.command = argv + i + 1;
            break;
        }
        if (!strcmp(arg, "--rootless"))
            plan.rootless = true;
        else if (!strcmp(arg, "--ephemeral"))
            plan.ephemeral = true;
        else if (!strcmp(arg, "--foreground"))
            plan.foreground = true;
        else if (!strcmp(arg, "--dir") && left)
            plan.dir = argv[++i];
        else if (!strcmp(arg, "--active-layer") && left)
            plan.active_layer = argv[++i];
        else if (!strcmp(arg, "--cover") && left)
            plan.cover = argv[++i];
        else if (!strcmp(arg, "--file") && left >= 2 && plan.file_count < MAX_FILES) {
            plan.files[plan.file_count].name = argv[++i];
            plan.files[plan.file_count++].path = argv[++i];
        } else if (!strcmp(arg, "--scratch") && left)
            plan.scratch_bytes = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(arg, "--listen") && left)
            plan.listener = (int)number(argv[++i]);
        else if (!strcmp(arg, "--lock") && left)
            plan.lock = (int)number(argv[++i]);
        else if (!strcmp(arg, "--epoch") && left)
            plan.epoch = atoll(argv[++i]);
        else if (!strcmp(arg, "--pause-after") && left)
            plan.pause_after_ms = number(argv[++i]);
        else if (!strcmp(arg, "--expires-at") && left)
            plan.expires_ms = atoll(argv[++i]);
        else if (!strcmp(arg, "--renewal") && left)
            plan.renewal_ms = atoll(argv[++i]);
        else if (!strcmp(arg, "--freeze-at-end"))
            plan.freezes_at_end = true;
        else if (!strcmp(arg, "--disk") && left)
            plan.disk_bytes = strtoull(argv[++i], NULL, 10);
        else if (!strcmp(arg, "--freezer") && left >= 5) {
            for (int k = 0; k < 5; k++)
                plan.freezer[k] = argv[++i];
        } else if (!strcmp(arg, "--oom") && left)
            plan.oom = argv[++i];
        else if (!strcmp(arg, "--machine") && left)
            plan.machine_base = number(argv[++i]);
        else if (!strcmp(arg, "--owner") && left)
            plan.owner = number(argv[++i]);
        else if (!strcmp(arg, "--confine") && left)
            plan.confine_id = (int)number(argv[++i]);
        else if (!strcmp(arg, "--keeper-cgroup") && left && plan.keeper_cgroup_count < MAX_KEEPER_CGROUPS)
            plan.keeper_cgroups[plan.keeper_cgroup_count++] = argv[++i];
        else if (!strcmp(arg, "--cgroup") && left && plan.cgroup_count < MAX_CGROUPS)
            plan.cgroups[plan.cgroup_count++] = argv[++i];
        else if (!strcmp(arg, "--limit") && left >= 2 && plan.limit_count < MAX_LIMITS) {
            plan.limits[plan.limit_count].file = argv[++i];
            plan.limits[plan.limit_count++].value = argv[++i];
        } else if (!strcmp(arg, "--uid") && left >= 3)
            add_map(plan.uids, &plan.uid_count, argv + i + 1), i += 3;
        else if (!strcmp(arg, "--gid") && left >= 3)
            add_map(plan.gids, &plan.gid_count, argv + i + 1), i += 3;
        else if (!strcmp(arg, "--overlay"))
            i += add_overlay(&plan, argv + i + 1, left);
        else if (!strcmp(arg, "--mount"))
            i += add_mount(&plan, argv + i + 1, left);
        else
            usage(arg);
    }
    if (!plan.command || !plan.command[0])
        usage("--");
    return plan;
}

static int open_in(const struct plan *plan, const char *name, int flags)
{
    char path[4352];
    snprintf(path, sizeof path, "%s/%s", plan->dir, name);
    int fd = open(path, flags | O_CLOEXEC, 0600);
    if (fd < 0)
        give_up(path);
    return fd;
}

static bool was_removed(int error)
{
    return error == ENOENT || error == ENODEV;
}

/* Forks a child into the cgroups of keepers: one of v2 at birth, those of v1 through this process, which exits. Another
 * process may remove a cgroup in the moment in which it is empty; then it is made again. */
static pid_t fork_keeper(const struct plan *plan)
{
    const char *unified = NULL;
    for (int i = 0, attempts = 0; i < plan->keeper_cgroup_count; i++) {
        const char *cgroup = plan->keeper_cgroups[i];
        if (mkdir(cgroup, 0755) < 0 && errno != EEXIST)
            give_up(cgroup);
        if (is_v2(cgroup))
            unified = cgroup;
        else if (join_v1(cgroup) < 0) {
            if (!was_removed(errno) || ++attempts > MAX_ATTEMPTS)
                give_up(cgroup);
            i--;
        }
    }
    if (!unified)
        return fork();
    pid_t pid = fork_into(unified);
    for (int attempts = 0; pid < 0 && was_removed(errno) && attempts < MAX_ATTEMPTS; attempts++) {
        mkdir(unified, 0755);
        pid = fork_into(unified);
    }
    return pid;
}

/* Leaves the driver's session, and closes all its descriptors except the listener and the lock. */
static void detach(const struct plan *plan)
{
    pid_t pid = fork_keeper(plan);
    if (pid < 0)
        give_up("starting the keeper");
    if (pid > 0)
        _exit(0);
    setsid();
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    int log = open_in(plan, "keeper.log", O_WRONLY | O_CREAT | O_APPEND);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(log, 2) < 0)
        give_up("redirecting");
    int listener = fcntl(plan->listener, F_DUPFD_CLOEXEC, 16), lock = fcntl(plan->lock, F_DUPFD_CLOEXEC, 16);
    if (listener < 0 || lock < 0 || dup3(listener, LISTENER, O_CLOEXEC) < 0 || dup3(lock, LOCK, O_CLOEXEC) < 0)
        give_up("moving the listener and the lock");
    syscall(SYS_close_range, LOCK + 1, ~0U, 0);
    fcntl(LISTENER, F_SETFL, O_NONBLOCK);
    if (ftruncate(LOCK, 0) < 0 || dprintf(LOCK, "%d\n", (int)getpid()) < 0)
        give_up("writing the lock");
    if (chdir("/") < 0)
        give_up("chdir");
}

/* Reports FAILED with the end of the runtime's log. */
static void fail_with_log(const struct plan *plan, int error, const char *what)
{
    static char message[4096];
    int used = snprintf(message, sizeof message, "%s", what);
    int log = open_in(plan, "runtime.log", O_RDONLY | O_CREAT);
    off_t size = lseek(log, 0, SEEK_END), from = size > 3000 ? size - 3000 : 0;
    if (size > 0) {
        used += snprintf(message + used, sizeof message - (size_t)used, ": ");
        ssize_t n = pread(log, message + used, sizeof message - (size_t)used - 1, from);
        message[used + (n > 0 ? n : 0)] = 0;
    }
    relay_fail(LISTENER, error, message);
    _exit(1);
}

static pid_t runtime; /* 0 unless it is running */

/* SIGTERM before the sandbox is up. Processes that the runtime has started are reparented to the keeper when it dies,
 * and are killed too: without a cgroup nothing else could find them. */
static void abandon(int signal)
{
    (void)signal;
    if (runtime > 0)
        kill(runtime, SIGKILL);
    for (;;) {
        char path[64], text[4096];
        snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        ssize_t size = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
        if (fd >= 0)
            close(fd);
        text[size > 0 ? size : 0] = 0;
        for (char *at = text; *at; at += strspn(at, " ")) {
            pid_t child = (pid_t)strtol(at, &at, 10);
            if (child <= 1)
                break;
            kill(child, SIGKILL);
        }
        if (waitpid(-1, NULL, 0) < 0 && errno == ECHILD)
            _exit(1);
    }
}

static void wait_for_runtime(const struct plan *plan, pid_t pid)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0), status;
    struct pollfd p = {.fd = fd, .events = POLLIN};
    if (fd < 0)
        give_up("pidfd_open");
    if (poll(&p, 1, RUNTIME_TIMEOUT_MS) != 1) {
        kill(pid, SIGKILL);
        waitpid(pid, &status, 0);
        fail_with_log(plan, ETIMEDOUT, "the runtime did not finish within 30 s");
    }
    close(fd);
    if (waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        fail_with_log(plan, EIO, "the runtime failed");
}

/* For a runtime that stays in the foreground as the parent of the sandbox (bwrap): wait until the guest has written to
 * `out`, write the pid of the runtime's child, the guest, to the file `pid`, and kill the runtime. The guest is then a
 * child of this process. */
static void take_over_child(const struct plan *plan, pid_t pid, int from_guest)
{
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0), status;
    struct pollfd polls[] = {{.fd = from_guest, .events = POLLIN}, {.fd = pidfd, .events = POLLIN}};
    if (pidfd < 0)
        give_up("pidfd_open");
    int ready = poll(polls, 2, RUNTIME_TIMEOUT_MS);
    char path[64], text[32] = {0};
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)pid, (int)pid);
    int children = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = children < 0 ? -1 : read(children, text, sizeof text - 1);
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    if (ready <= 0)
        fail_with_log(plan, ETIMEDOUT, "the runtime did not finish in time");
    if (polls[1].revents || size <= 0)
        fail_with_log(plan, EIO, "the runtime failed");
    int file = open_in(plan, "pid", O_WRONLY | O_CREAT | O_TRUNC);
    if (dprintf(file, "%d\n", atoi(text)) < 0)
        give_up("writing the process id");
    close(file);
    close(children);
    close(pidfd);
}

static pid_t read_pid(const struct plan *plan)
{
    char text[32] = {0};
    int fd = open_in(plan, "pid", O_RDONLY | O_CREAT);
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    pid_t pid = n > 0 ? (pid_t)atoi(text) : 0;
    if (pid <= 1)
        fail_with_log(plan, EIO, "the runtime wrote no process id");
    return pid;
}

static void set_limits(const struct plan *plan)
{
    for (int i = 0; i < plan->limit_count; i++) {
        int fd = open(plan->limits[i].file, O_WRONLY | O_CLOEXEC);
        ssize_t size = (ssize_t)strlen(plan->limits[i].value);
        if (fd < 0 || write(fd, plan->limits[i].value, (size_t)size) != size) {
            int error = errno;
            char what[512];
            snprintf(what, sizeof what, "the limit %s = %s could not be set (%s)", plan->limits[i].file,
                     plan->limits[i].value, strerror(error));
            fail_with_log(plan, error, what);
        }
        close(fd);
    }
}

static void open_freezer(const struct plan *plan, struct relay_ends *ends)
{
    if (!plan->freezer[0])
        return;
    ends->freezer = open(plan->freezer[0], O_WRONLY | O_CLOEXEC);
    ends->frozen = open(plan->freezer[3], O_RDONLY | O_CLOEXEC);
    if (ends->freezer < 0 || ends->frozen < 0)
        fail_with_log(plan, errno, "the sandbox's freezer could not be opened");
    ends->freeze = plan->freezer[1];
    ends->thaw = plan->freezer[2];
    ends->is_frozen = plan->freezer[4];
}

static void open_oom(const struct plan *plan, struct relay_ends *ends)
{
    if (!plan->oom)
        return;
    ends->oom = open(plan->oom, O_RDONLY | O_CLOEXEC);
    if (ends->oom < 0)
        fail_with_log(plan, errno, "the sandbox's count of out-of-memory kills could not be opened");
}

static void start(const struct plan *plan)
{
    if (!plan->dir || !plan->active_layer || !plan->cover || !plan->overlay_count || plan->listener < 0 ||
        plan->lock < 0)
        usage("start");
    detach(plan);
    struct relay_ends ends = {
        .from_guest = open_in(plan, "out", O_RDWR | O_NONBLOCK),
        .to_guest = open_in(plan, "in", O_RDWR | O_NONBLOCK),
        .exit_file = open_in(plan, "ended", O_WRONLY | O_CREAT | O_TRUNC),
        .listener = LISTENER,
        .ephemeral = plan->ephemeral,
        .freezer = -1,
        .frozen = -1,
        .oom = -1,
        .pause_after_ms = (int)plan->pause_after_ms,
        .expires_ms = plan->expires_ms,
        .renewal_ms = plan->renewal_ms,
        .freezes_at_end = plan->freezes_at_end,
        .epoch = plan->epoch,
        .activity = open_in(plan, "activity", O_WRONLY | O_CREAT),
    };
    /* Larger pipes for bulk data. Refused when the user's pipe buffers are at their limit: then it is only slower. */
    fcntl(ends.from_guest, F_SETPIPE_SZ, 1 << 20);
    fcntl(ends.to_guest, F_SETPIPE_SZ, 1 << 18);
    if (plan->epoch)
        relay_announce(&ends);
    signal(SIGTERM, abandon);
    runtime = launch_runtime(plan);
    if (runtime < 0)
        give_up("fork");
    if (plan->foreground)
        take_over_child(plan, runtime, ends.from_guest);
    else
        wait_for_runtime(plan, runtime);
    runtime = 0;
    set_limits(plan);
    open_freezer(plan, &ends);
    open_oom(plan, &ends);
    ends.pid = read_pid(plan);
    ends.pidfd = (int)syscall(SYS_pidfd_open, ends.pid, 0);
    if (ends.pidfd < 0)
        fail_with_log(plan, errno, "the sandbox ended at once");
    signal(SIGTERM, SIG_DFL);
    if (confine(plan->confine_id) < 0)
        fail_with_log(plan, errno, "the keeper could not give up its privileges");
    relay_run(&ends);
}

int main(int argc, char **argv)
{
    if (argc < 2)
        usage("no command");
    struct plan plan = parse(argc, argv);
    if (!strcmp(argv[1], "start")) {
        start(&plan);
    } else if (!strcmp(argv[1], "nsexec")) {
        enter_namespaces(&plan);
        if (plan.ephemeral)
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* after enter_namespaces(): a change of user resets it */
        execvp(plan.command[0], plan.command);
        give_up(plan.command[0]);
    } else if (!strcmp(argv[1], "copy")) {
        int words = argc - (int)(plan.command - argv);
        if (words < 2 || words > 3)
            usage("copy");
        enter_namespaces(&plan);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        copy_layer(plan.command[0], plan.command[1], plan.command[2]);
        return 0;
    } else if (!strcmp(argv[1], "merge")) {
        int words = argc - (int)(plan.command - argv);
        if (words < 4 || words % 2)
            usage("merge");
        for (int i = 1; i < words; i += 2)
            number(plan.command[i]);
        enter_namespaces(&plan);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        merge_layers(plan.command[0], number(plan.command[1]), plan.command + 2, words / 2 - 1, plan.rootless);
        return 0;
    } else if (!strcmp(argv[1], "hostname")) {
        if (!plan.command[1] || plan.command[2] || !plan.owner)
            usage("hostname");
        number(plan.command[0]);
        set_hostname(plan.owner, plan.command[0], plan.command[1]);
        return 0;
    } else if (!strcmp(argv[1], "idmap")) {
        if (try_id_mapping(plan.command[0]) < 0)
            give_up(plan.command[0]);
        return 0;
    }
    usage(argv[1]);
}
