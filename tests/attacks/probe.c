/* What attackers try that a shell cannot: one static program that runs in any image. The tests compile it, put it into
 * their sandboxes and read what it prints.
 *
 *   probe WHAT [ARGUMENTS]
 *
 * Attempts are lines `name errno`, 0 meaning that the attempt succeeded. No attempt harms a machine that grants it:
 * arguments are such that a kernel that lets a call through still finds them wrong or without effect. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/sched.h>
#include <mqueue.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static void tell(const char *name, long result)
{
    int error = result < 0 ? errno : 0;
    printf("%s %d\n", name, error);
    fflush(stdout);
}

/* In a process of its own: what kills the caller says so, as -signal. */
static void tell_call(const char *name, long number, long a, long b, long c, long d, long e)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        errno = 0;
        long result = syscall(number, a, b, c, d, e, 0);
        _exit(result < 0 && result >= -1 ? errno : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    printf("%s %d\n", name, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    fflush(stdout);
}

#define BAD ((long)-4096)
#define CALL(name, ...) tell_call(#name, SYS_##name, __VA_ARGS__)

static void system_calls(void)
{
    CALL(mount, (long)"none", (long)"/tmp", (long)"tmpfs", 0, 0);
    CALL(umount2, (long)"/proc", MNT_DETACH, 0, 0, 0);
    CALL(pivot_root, (long)"/tmp", (long)"/tmp", 0, 0, 0);
    CALL(fsopen, (long)"tmpfs", 0, 0, 0, 0);
    CALL(fspick, AT_FDCWD, (long)"/", 0, 0, 0);
    CALL(fsconfig, -1, 0, 0, 0, 0);
    CALL(fsmount, -1, 0, 0, 0, 0);
    CALL(open_tree, AT_FDCWD, (long)"/", 1, 0, 0);
    CALL(move_mount, -1, (long)"", AT_FDCWD, (long)"/tmp", 4);
    CALL(mount_setattr, AT_FDCWD, (long)"/", 0, BAD, 32);
    CALL(setns, -1, 0, 0, 0, 0);
    CALL(bpf, 0, BAD, 0, 0, 0);
    CALL(perf_event_open, BAD, 0, -1, -1, 0);
    CALL(userfaultfd, 0, 0, 0, 0, 0);
    CALL(io_uring_setup, 1, BAD, 0, 0, 0);
    CALL(io_uring_enter, -1, 0, 0, 0, 0);
    CALL(io_uring_register, -1, 0, 0, 0, 0);
    CALL(io_setup, 1, BAD, 0, 0, 0);
    CALL(io_submit, 0, 1, BAD, 0, 0);
    CALL(io_getevents, 0, 1, 1, BAD, 0);
    CALL(io_pgetevents, 0, 1, 1, BAD, 0);
    CALL(io_cancel, 0, BAD, BAD, 0, 0);
    CALL(io_destroy, 0, 0, 0, 0, 0);
    CALL(add_key, (long)"user", (long)"atoll", (long)"x", 1, -3);
    CALL(request_key, (long)"user", (long)"atoll", 0, -3, 0);
    CALL(keyctl, 0, -3, 0, 0, 0);
    CALL(name_to_handle_at, AT_FDCWD, (long)"/", BAD, BAD, 0);
    CALL(open_by_handle_at, AT_FDCWD, BAD, 0, 0, 0);
    CALL(pidfd_getfd, -1, 0, 0, 0, 0);
    CALL(kcmp, 1, 1, 0, 0, 0);
    CALL(init_module, BAD, 0, (long)"", 0, 0);
    CALL(finit_module, -1, (long)"", 0, 0, 0);
    CALL(delete_module, (long)"atoll-no-such-module", 0, 0, 0, 0);
    CALL(kexec_load, 0, 0, BAD, -1, 0);
    CALL(kexec_file_load, -1, -1, 0, 0, 0);
    CALL(reboot, 0, 0, 0, 0, 0);
    CALL(swapon, (long)"/atoll-no-such-file", 0, 0, 0, 0);
    CALL(swapoff, (long)"/atoll-no-such-file", 0, 0, 0, 0);
    CALL(syslog, 3, BAD, 16, 0, 0);
    CALL(acct, (long)"/atoll-no-such-file", 0, 0, 0, 0);
    CALL(settimeofday, BAD, 0, 0, 0, 0);
    CALL(clock_settime, 0, BAD, 0, 0, 0);
    CALL(clock_adjtime, 0, BAD, 0, 0, 0);
    CALL(adjtimex, BAD, 0, 0, 0, 0);
    CALL(fanotify_init, 0, 0, 0, 0, 0);
    CALL(fanotify_mark, -1, 0, 0, 0, 0);
    CALL(quotactl, BAD, 0, 0, BAD, 0);
    CALL(vhangup, 0, 0, 0, 0, 0);
    CALL(move_pages, 1, 0, 0, 0, 0);
#ifdef SYS_lookup_dcookie
    CALL(lookup_dcookie, 0, BAD, 0, 0, 0);
#endif
#ifdef SYS_memfd_secret
    CALL(memfd_secret, 0, 0, 0, 0, 0);
#endif
#ifdef SYS_quotactl_fd
    CALL(quotactl_fd, -1, 0, 0, BAD, 0);
#endif
#ifdef __x86_64__
    CALL(iopl, 3, 0, 0, 0, 0);
    CALL(ioperm, 0, 1, 1, 0, 0);
    CALL(modify_ldt, 0, BAD, 0, 0, 0);
    CALL(uselib, (long)"/atoll-no-such-file", 0, 0, 0, 0);
    CALL(ustat, -1, BAD, 0, 0, 0);
    CALL(sysfs, 3, 0, 0, 0, 0);
#endif
    struct clone_args args = {.flags = CLONE_NEWUSER, .exit_signal = SIGCHLD};
    CALL(clone3, (long)&args, sizeof args, 0, 0, 0);
    CALL(personality, 0x0400000, 0, 0, 0, 0); /* READ_IMPLIES_EXEC */
    static const struct {
        const char *name;
        long flag;
    } namespaces[] = {{"user", CLONE_NEWUSER},
                      {"mnt", CLONE_NEWNS},
                      {"pid", CLONE_NEWPID},
                      {"net", CLONE_NEWNET},
                      {"ipc", CLONE_NEWIPC},
                      {"uts", CLONE_NEWUTS},
                      {"cgroup", CLONE_NEWCGROUP},
                      {"time", 0x80}};
    for (size_t i = 0; i < sizeof namespaces / sizeof *namespaces; i++) {
        char name[32];
        snprintf(name, sizeof name, "unshare:%s", namespaces[i].name);
        tell_call(name, SYS_unshare, namespaces[i].flag, 0, 0, 0, 0);
        if (namespaces[i].flag == 0x80)
            continue; /* for clone, the lowest byte is a signal */
        snprintf(name, sizeof name, "clone:%s", namespaces[i].name);
        fflush(stdout);
        long child = syscall(SYS_clone, namespaces[i].flag | SIGCHLD, 0, 0, 0, 0);
        if (child == 0)
            _exit(0);
        tell(name, child);
        if (child > 0)
            waitpid((pid_t)child, NULL, 0);
    }
}

static void sockets(void)
{
    static const struct {
        const char *name;
        int family, type, protocol;
    } kinds[] = {{"packet", 17, SOCK_RAW, 0x0300},  {"vsock", 40, SOCK_STREAM, 0}, {"alg", 38, SOCK_SEQPACKET, 0},
                 {"bluetooth", 31, SOCK_RAW, 1},    {"xdp", 44, SOCK_RAW, 0},      {"can", 29, SOCK_RAW, 1},
                 {"tipc", 30, SOCK_STREAM, 0},      {"rds", 21, SOCK_SEQPACKET, 0}, {"key", 15, SOCK_RAW, 2},
                 {"nfc", 39, SOCK_SEQPACKET, 0},    {"llc", 26, SOCK_DGRAM, 0},    {"smc", 43, SOCK_STREAM, 0},
                 {"raw4", AF_INET, SOCK_RAW, 1},    {"raw6", AF_INET6, SOCK_RAW, 58}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        int fd = socket(kinds[i].family, kinds[i].type, kinds[i].protocol);
        tell(kinds[i].name, fd);
        if (fd >= 0)
            close(fd);
    }
}

/* Pairs of sockets, of every family. */
static void socket_pairs(void)
{
    static const int types[] = {SOCK_STREAM, SOCK_DGRAM, SOCK_SEQPACKET, SOCK_RAW, SOCK_RDM};
    for (int family = 0; family < 64; family++)
        for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
            char name[32];
            int pair[2];
            snprintf(name, sizeof name, "%d:%d", family, types[i]);
            int result = socketpair(family, types[i], 0, pair);
            tell(name, result);
            if (result == 0) {
                close(pair[0]);
                close(pair[1]);
            }
        }
}

/* Everything by which one process gets at another. */
static void reach(pid_t pid)
{
    char path[64], buffer[64] = {0};
    long got = ptrace(PTRACE_ATTACH, pid, 0, 0);
    tell("ptrace-attach", got);
    if (got == 0)
        ptrace(PTRACE_DETACH, pid, 0, 0);
    tell("ptrace-seize", ptrace(PTRACE_SEIZE, pid, 0, 0));
    struct iovec mine = {buffer, 1}, theirs = {(void *)0x400000, 1};
    tell("process_vm_readv", process_vm_readv(pid, &mine, 1, &theirs, 1, 0));
    tell("process_vm_writev", process_vm_writev(pid, &mine, 1, &theirs, 1, 0));
    static const char *const files[] = {"mem", "maps", "environ", "auxv", "io", "stack", "syscall", "pagemap"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, files[i]);
        int fd = open(path, O_RDONLY);
        /* Some are opened by anyone and refuse to be read. What is empty has told nothing. */
        ssize_t n = fd < 0 ? -1 : read(fd, buffer, sizeof buffer);
        if (n == 0)
            n = -1, errno = ENODATA;
        tell(files[i], n);
        if (fd >= 0)
            close(fd);
    }
    static const char *const links[] = {"exe", "cwd", "root"};
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, links[i]);
        tell(links[i], open(path, O_RDONLY));
    }
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *list = opendir(path);
    tell("fd", list ? 0 : -1);
    int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
    for (int fd = 0; fd < 1200; fd++) {
        snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
        for (int way = 0; way < 3; way++) {
            int opened = open(path, (way == 0 ? O_RDONLY : way == 1 ? O_WRONLY : O_RDWR) | O_NONBLOCK);
            if (opened >= 0) {
                printf("fd/%d 0\n", fd);
                close(opened);
            }
        }
        if (pidfd >= 0 && syscall(SYS_pidfd_getfd, pidfd, fd, 0) >= 0)
            printf("pidfd_getfd/%d 0\n", fd);
    }
    printf("end -1\n");
}

static void all_signals(pid_t pid, const char *which)
{
    for (int signal = 1; signal <= 64; signal++) {
        if (!strcmp(which, "most") && (signal == SIGKILL || signal == SIGSTOP))
            continue;
        kill(pid, signal);
        int pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
        if (pidfd >= 0) {
            syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0);
            close(pidfd);
        }
        syscall(SYS_tkill, pid, signal);
    }
    printf("sent\n");
}

/* Forks as fast as it may until it is killed: every child does the same. */
static void fork_bomb(void)
{
    printf("lit\n");
    fflush(stdout);
    signal(SIGTERM, SIG_IGN);
    for (;;)
        if (fork() < 0)
            sched_yield();
}

static void memory_bomb(void)
{
    for (size_t total = 0;; total += 1 << 20) {
        char *piece = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (piece == MAP_FAILED)
            _exit(9);
        memset(piece, 1, 1 << 20);
    }
}

/* Takes up to `most` of something that the kernel counts per user or for all of the machine, says how many it got, and holds them. */
static void hoard(const char *what, int most)
{
    int count = 0;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    for (; count < most; count++) {
        if (!strcmp(what, "inotify")) {
            if (inotify_init1(0) < 0)
                break;
        } else if (!strcmp(what, "watches")) {
            static int fd = -1;
            char name[64];
            if (fd < 0)
                fd = inotify_init1(0);
            snprintf(name, sizeof name, "/tmp/w%d", count);
            mkdir(name, 0700);
            if (inotify_add_watch(fd, name, IN_CREATE) < 0)
                break;
        } else if (!strcmp(what, "mqueue")) {
            char name[64];
            snprintf(name, sizeof name, "/q%d", count);
            struct mq_attr attr = {.mq_maxmsg = 10, .mq_msgsize = 8192};
            if (mq_open(name, O_CREAT | O_RDWR, 0600, &attr) < 0)
                break;
        } else if (!strcmp(what, "signals")) {
            sigset_t all;
            sigfillset(&all);
            sigprocmask(SIG_BLOCK, &all, NULL);
            if (sigqueue(getpid(), SIGRTMIN, (union sigval){0}) < 0)
                break;
        } else if (!strcmp(what, "timers")) {
            timer_t timer;
            struct sigevent event = {.sigev_notify = SIGEV_NONE};
            if (timer_create(CLOCK_MONOTONIC, &event, &timer) < 0)
                break;
        } else if (!strcmp(what, "locked")) {
            void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (page == MAP_FAILED || mlock(page, 4096) < 0)
                break;
        } else if (!strcmp(what, "pipes")) {
            int ends[2];
            static char page[1 << 16];
            if (pipe2(ends, O_NONBLOCK) < 0 || fcntl(ends[1], F_SETPIPE_SZ, 1 << 16) < 0 ||
                write(ends[1], page, sizeof page) < 0)
                break;
        } else if (!strcmp(what, "files")) {
            if (open("/dev/null", O_RDONLY) < 0)
                break;
        } else if (!strcmp(what, "terminals")) {
            if (open("/dev/ptmx", O_RDWR | O_NOCTTY) < 0)
                break;
        }
    }
    printf("%d %d\n", count, count < most ? errno : 0);
    fflush(stdout);
    pause();
}

/* Exchanges two names as fast as it can, for ever. */
static void swap_names(const char *one, const char *other)
{
    printf("swapping\n");
    fflush(stdout);
    char spare[4096];
    snprintf(spare, sizeof spare, "%s.spare", one);
    for (;;) {
        if (syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, 2 /* RENAME_EXCHANGE */) == 0)
            continue;
        rename(one, spare);
        rename(other, one);
        rename(spare, other);
    }
}

/* The classic: chroot into a directory while standing outside of it, walk up as far as there is an up, chroot there. */
static void leave_by_chroot(void)
{
    mkdir("/tmp/jail", 0755);
    int outside = open("/", O_RDONLY | O_DIRECTORY);
    if (chroot("/tmp/jail") < 0) {
        tell("chroot", -1);
        return;
    }
    if (fchdir(outside) < 0)
        tell("fchdir", -1);
    for (int i = 0; i < 256; i++)
        if (chdir("..") < 0)
            break;
    if (chroot(".") < 0)
        tell("chroot", -1);
    DIR *list = opendir("/");
    struct dirent *entry;
    while (list && (entry = readdir(list)))
        if (entry->d_name[0] != '.')
            printf("%s\n", entry->d_name);
}

static void descriptors(void)
{
    /* Many with one call: with gVisor each call costs. */
    enum { MOST = 65536, AT_ONCE = 256 };
    for (int first = 0; first < MOST; first += AT_ONCE) {
        struct pollfd asked[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++)
            asked[i] = (struct pollfd){.fd = first + i};
        if (poll(asked, AT_ONCE, 0) < 0)
            exit(1);
        for (int i = 0; i < AT_ONCE; i++) {
            if (asked[i].revents & POLLNVAL)
                continue;
            char path[64], target[256] = "?";
            snprintf(path, sizeof path, "/proc/self/fd/%d", asked[i].fd);
            ssize_t n = readlink(path, target, sizeof target - 1);
            target[n > 0 ? n : 1] = 0;
            printf("%d %s\n", asked[i].fd, target);
        }
    }
}

static void foreign_abi(const char *which)
{
#ifdef __x86_64__
    long result;
    if (!strcmp(which, "int80"))
        __asm__ volatile("int $0x80" : "=a"(result) : "a"(20 /* getpid */) : "memory");
    else
        result = syscall(0x40000000 + SYS_getpid);
    printf("%ld\n", result);
#else
    (void)which;
    printf("-1\n");
#endif
}

static void devices(void)
{
    static const struct {
        const char *name;
        mode_t kind;
        unsigned major, minor;
    } nodes[] = {{"mem", S_IFCHR, 1, 1},   {"port", S_IFCHR, 1, 4},  {"kmsg", S_IFCHR, 1, 11},
                 {"sda", S_IFBLK, 8, 0},   {"vda", S_IFBLK, 254, 0}, {"vdb", S_IFBLK, 253, 0},
                 {"loop0", S_IFBLK, 7, 0}, {"kvm", S_IFCHR, 10, 232}, {"fuse", S_IFCHR, 10, 229},
                 {"tun", S_IFCHR, 10, 200}, {"null", S_IFCHR, 1, 3}, {"whiteout", S_IFCHR, 0, 0}};
    static const char *const places[] = {"/tmp", "/dev", "/dev/shm", "/run", "/"};
    for (size_t p = 0; p < sizeof places / sizeof *places; p++)
        for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
            char path[96], name[128];
            snprintf(path, sizeof path, "%s/node-%s", places[p], nodes[i].name);
            snprintf(name, sizeof name, "mknod:%s", path);
            int made = mknod(path, nodes[i].kind | 0666, makedev(nodes[i].major, nodes[i].minor));
            tell(name, made);
            if (made < 0)
                continue;
            snprintf(name, sizeof name, "open:%s", path);
            int fd = open(path, O_RDONLY | O_NONBLOCK);
            tell(name, fd);
            unlink(path);
        }
}

/* What a program that was started with more rights than its caller would show. */
static void rights(void)
{
    uint32_t header[2] = {0x20080522, 0}, data[6] = {0};
    syscall(SYS_capget, header, data);
    printf("ruid %d\neuid %d\nrgid %d\negid %d\n", (int)getuid(), (int)geteuid(), (int)getgid(), (int)getegid());
    printf("effective %x\npermitted %x\n", data[0], data[1]);
}

static void hold_abstract(const char *name)
{
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    size_t size = strlen(name);
    memcpy(at.sun_path + 1, name, size);
    tell("bind", bind(fd, (struct sockaddr *)&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size)));
    listen(fd, 1);
    pause();
}

static void join_abstract(const char *name)
{
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    size_t size = strlen(name);
    memcpy(at.sun_path + 1, name, size);
    tell("connect", connect(fd, (struct sockaddr *)&at, (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + size)));
}

/* Whatever another user of the machine might do with a path. */
static void stranger(char **paths)
{
    for (; *paths; paths++) {
        int reading = open(*paths, O_RDONLY | O_NONBLOCK), writing = open(*paths, O_WRONLY | O_NONBLOCK);
        struct stat status;
        struct sockaddr_un at = {.sun_family = AF_UNIX};
        strncpy(at.sun_path, *paths, sizeof at.sun_path - 1);
        int fd = socket(AF_UNIX, SOCK_STREAM, 0);
        if (reading >= 0)
            printf("read %s\n", *paths);
        if (writing >= 0)
            printf("write %s\n", *paths);
        if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0)
            printf("connect %s\n", *paths);
        if (access(*paths, X_OK) == 0 && stat(*paths, &status) == 0 && S_ISREG(status.st_mode))
            printf("execute %s\n", *paths);
    }
    printf("end\n");
}

static void schedule(void)
{
    struct sched_param param = {.sched_priority = 1};
    tell("fifo", sched_setscheduler(0, SCHED_FIFO, &param));
    tell("rr", sched_setscheduler(0, SCHED_RR, &param));
    tell("nice", setpriority(PRIO_PROCESS, 0, -20));
    tell("ioprio", syscall(SYS_ioprio_set, 1, 0, 1 << 13));
    struct rlimit more = {RLIM_INFINITY, RLIM_INFINITY};
    tell("rtprio", setrlimit(RLIMIT_RTPRIO, &more));
    tell("nproc", setrlimit(RLIMIT_NPROC, &(struct rlimit){1u << 30, 1u << 30}));
}

/* Makes many empty files, quickly. */
static void litter(const char *directory, int count)
{
    mkdir(directory, 0755);
    if (chdir(directory) < 0)
        _exit(1);
    for (int i = 0; i < count; i++) {
        char name[256];
        memset(name, 'n', 200);
        snprintf(name + 200, sizeof name - 200, "%d", i);
        int fd = open(name, O_CREAT | O_WRONLY, 0644);
        if (fd < 0)
            _exit(1);
        close(fd);
    }
    printf("littered\n");
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "", *first = argc > 2 ? argv[2] : "", *second = argc > 3 ? argv[3] : "";
    if (!strcmp(what, "system-calls"))
        system_calls();
    else if (!strcmp(what, "sockets"))
        sockets();
    else if (!strcmp(what, "socket-pairs"))
        socket_pairs();
    else if (!strcmp(what, "reach"))
        reach(atoi(first));
    else if (!strcmp(what, "signals"))
        all_signals(atoi(first), second);
    else if (!strcmp(what, "fork-bomb"))
        fork_bomb();
    else if (!strcmp(what, "memory-bomb"))
        memory_bomb();
    else if (!strcmp(what, "hoard"))
        hoard(first, atoi(second));
    else if (!strcmp(what, "swap"))
        swap_names(first, second);
    else if (!strcmp(what, "chroot"))
        leave_by_chroot();
    else if (!strcmp(what, "descriptors"))
        descriptors();
    else if (!strcmp(what, "abi"))
        foreign_abi(first);
    else if (!strcmp(what, "devices"))
        devices();
    else if (!strcmp(what, "rights"))
        rights();
    else if (!strcmp(what, "hold-abstract"))
        hold_abstract(first);
    else if (!strcmp(what, "join-abstract"))
        join_abstract(first);
    else if (!strcmp(what, "stranger"))
        stranger(argv + 2);
    else if (!strcmp(what, "schedule"))
        schedule();
    else if (!strcmp(what, "litter"))
        litter(first, atoi(second));
    else
        return 64;
    return 0;
}
