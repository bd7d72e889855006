/* PID 1 of a sandbox: the start, the loop, the table of operations, the end.
 *
 * Owns the guest's own environment (signals, limits, descriptors, /etc/hosts) and the table of which file serves which
 * operation.
 * Not here: how an operation works, and anything about the host beyond the byte stream.
 *
 * In tests it runs as an ordinary child. It is then the subreaper of what it starts, and leaves other processes alone.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <malloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "files.h"
#include "guest.h"
#include "link.h"
#include "loop.h"
#include "net.h"
#include "proc.h"
#include "refuse.h"
#include "search.h"
#include "slots.h"
#include "stream.h"
#include "sudo.h"
#include "tar.h"
#include "tree.h"
#include "unsavable.h"
#include "users.h"
#include "watch.h"
#include "worker.h"

enum { FIRST_OWN_DESCRIPTOR = 10, MAX_FOREIGN_CHILDREN = 64 };

static struct rlimit first_nofile;
static bool is_init, has_subreapers;
static pid_t foreign_children[MAX_FOREIGN_CHILDREN]; /* children from before exec(), only when this is not PID 1 */
static int foreign_count;

const struct rlimit *guest_first_nofile(void)
{
    return &first_nofile;
}

static bool is_foreign_child(pid_t pid)
{
    for (int i = 0; i < foreign_count; i++)
        if (foreign_children[i] == pid)
            return true;
    return false;
}

bool guest_has_subreapers(void)
{
    return has_subreapers;
}

bool guest_knows_child(pid_t pid)
{
    return is_foreign_child(pid) || slots_own(pid) || worker_has_child(pid) || proc_claims_orphan(pid);
}

_Noreturn void guest_end(int status)
{
    if (is_init)
        kill(-1, SIGKILL); /* the kernel kills the rest when its init exits */
    else
        tree_kill_all(&(struct tree){.root = getpid(), .spare = is_foreign_child});
    _exit(status);
}

/* ---- forking ---- */

static bool close_span(unsigned first, unsigned last)
{
#ifdef SYS_close_range
    return syscall(SYS_close_range, first, last, 0) == 0;
#else
    (void)first, (void)last;
    return false;
#endif
}

static bool closes_spans(void)
{
    static int answer = -1;
    if (answer < 0)
        answer = close_span(~0U, ~0U);
    return answer;
}

static int *listed; /* descriptors that are open */
static int listed_count, listed_cap;

static void list_descriptor(int fd)
{
    if (listed_count == listed_cap) {
        int cap = listed_cap ? listed_cap * 2 : 64;
        int *grown = realloc(listed, (size_t)cap * sizeof *grown);
        if (!grown)
            _exit(71); /* an unlisted descriptor would stay open in a child */
        listed = grown;
        listed_cap = cap;
    }
    listed[listed_count++] = fd;
}

/* For kernels without close_range(), and gVisor. The parent lists before the fork, not the child after it: gVisor keeps
 * a process that has read /proc long after its end, and saves it to disk with the others. */
static void list_descriptors(void)
{
    enum { MAX_GUESSED_FD = 4096 };
    listed_count = 0;
    DIR *list = opendir("/proc/self/fd");
    struct dirent *entry;
    for (int fd = 3; !list && fd < MAX_GUESSED_FD; fd++)
        list_descriptor(fd);
    while (list && (entry = readdir(list)))
        if (entry->d_name[0] != '.' && atoi(entry->d_name) >= 3 && atoi(entry->d_name) != dirfd(list))
            list_descriptor(atoi(entry->d_name));
    if (list)
        closedir(list);
}

static bool is_among(int fd, const int *some, int count)
{
    for (int i = 0; i < count; i++)
        if (some[i] == fd)
            return true;
    return false;
}

/* Without close_range(), closes the listed descriptors. */
static void close_all_but(const int *keep, int count)
{
    if (!closes_spans()) {
        for (int i = 0; i < listed_count; i++)
            if (!is_among(listed[i], keep, count))
                close(listed[i]);
        return;
    }
    unsigned from = 3;
    for (;;) {
        unsigned next = ~0U;
        for (int i = 0; i < count; i++)
            if (keep[i] >= (int)from && (unsigned)keep[i] < next)
                next = (unsigned)keep[i];
        if (from < next)
            close_span(from, next - 1);
        if (next == ~0U)
            return;
        from = next + 1;
    }
}

pid_t guest_fork(const char *name, const int *keep, int count)
{
    if (!closes_spans())
        list_descriptors();
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    dup2(0, 2);
    close_all_but(keep, count);
    loop_forget_after_fork();
    prctl(PR_SET_NAME, name);
    return 0;
}

/* ---- the hostname ---- */

/* Writes HOSTS, which /etc/hosts is a symlink to, if the hostname is another than at the last operation: a sandbox that
 * is claimed, forked or restored gets its name from outside, while this runs. What root writes there stays until then.
 * On a full /run the file stays as it was. */
static void follow_hostname(void)
{
    static const char path[] = "/run/hosts", draft[] = "/run/.hosts";
    static char known[65];
    char name[sizeof known] = "", text[256];
    if (!is_init || gethostname(name, sizeof name - 1) < 0 || !strcmp(name, known))
        return;
    memcpy(known, name, sizeof known);
    int length = snprintf(text, sizeof text,
                          "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.0.1\t%s\n", name);
    int fd = open(draft, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    bool whole = write(fd, text, (size_t)length) == length;
    close(fd);
    if (!whole || rename(draft, path) < 0)
        unlink(draft);
}

/* ---- operations ---- */

void operation_open(uint32_t id, struct fields fields)
{
    follow_hostname();
    switch (fields_int(fields, TAG_OP, 0)) {
    case OP_SPAWN: proc_open_spawn(id, fields); break;
    case OP_ATTACH: proc_open_attach(id, fields); break;
    case OP_SIGNAL: proc_open_signal(id, fields); break;
    case OP_PROCS: proc_open_list(id, fields); break;
    case OP_PS: worker_open(id, fields, &operation_ps); break;
    case OP_READ: worker_open(id, fields, &operation_read); break;
    case OP_WRITE: worker_open(id, fields, &operation_write); break;
    case OP_STAT: worker_open(id, fields, &operation_stat); break;
    case OP_LIST: worker_open(id, fields, &operation_list); break;
    case OP_MKDIR: worker_open(id, fields, &operation_mkdir); break;
    case OP_REMOVE: worker_open(id, fields, &operation_remove); break;
    case OP_RENAME: worker_open(id, fields, &operation_rename); break;
    case OP_SYMLINK: worker_open(id, fields, &operation_symlink); break;
    case OP_CHMOD: worker_open(id, fields, &operation_chmod); break;
    case OP_CHOWN: worker_open(id, fields, &operation_chown); break;
    case OP_TAR_OUT: worker_open(id, fields, &operation_tar_out); break;
    case OP_TAR_IN: worker_open(id, fields, &operation_tar_in); break;
    case OP_GLOB: worker_open(id, fields, &operation_glob); break;
    case OP_GREP: worker_open(id, fields, &operation_grep); break;
    case OP_WATCH: worker_open(id, fields, &operation_watch); break;
    case OP_DIAL: net_open_dial(id, fields); break;
    case OP_LISTEN: net_open_listen(id, fields); break;
    case OP_ACCEPT: net_open_accept(id, fields); break;
    default: stream_refuse(id, ENOSYS, "no such operation"); break;
    }
}

void operation_epoch(void)
{
    link_renew();
    slots_dismiss_idle();
    workers_dismiss_idle();
}

static void take(const struct frame *frame, const uint8_t *payload)
{
    if (frame->type == FRAME_SHUTDOWN)
        guest_end(0);
    streams_take(frame, payload);
}

static void child_ended(pid_t pid, int status)
{
    (void)status; /* supervisors and workers report outcomes over their sockets and pipes */
    slots_child_ended(pid);
    worker_child_ended(pid);
}

/* ---- the start ---- */

/* The two ends of the link move up and /dev/null takes their place, so that no mistake can pass them to a program. */
static void hide_link(int *in, int *out)
{
    *in = fcntl(0, F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR);
    *out = fcntl(1, F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR);
    if (*in < 0 || *out < 0)
        _exit(71);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null < 0) {
        /* An image without devices: a pipe without a writer is as empty. */
        int ends[2];
        if (pipe2(ends, O_CLOEXEC) < 0)
            _exit(71);
        close(ends[1]);
        null = ends[0];
    }
    dup2(null, 0);
    dup2(null, 1);
    if (fcntl(2, F_GETFD) < 0)
        dup2(null, 2);
    if (null > 2)
        close(null);
    if (!closes_spans())
        list_descriptors();
    close_all_but((const int[]){*in, *out}, 2);
}

static rlim_t open_files; /* RLIMIT_NOFILE of programs; 0: as inherited */

void guest_set_reserved_signals(void (*handler)(int))
{
    const struct {
        void (*handler)(int);
        unsigned long rest[4];
    } action = {.handler = handler};
    for (int signal = 32; signal < 34; signal++)
        syscall(SYS_rt_sigaction, signal, &action, NULL, 8);
}

/* SIGTERM stops a worker, even one that was just forked and has not set its own handler; the guest ignores it. */
static void on_terminate(int signal)
{
    (void)signal;
    if (getpid() != 1)
        _exit(1);
}

/* bwrap starts the guest with inheritable and ambient capabilities, which commands, those of `user` too, would inherit.
 * Root inside needs neither set: it has the bounding set after every execve(). */
static void pass_on_no_capabilities(void)
{
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct sets[_LINUX_CAPABILITY_U32S_3];
    if (syscall(SYS_capget, &header, sets) < 0)
        return;
    for (int i = 0; i < _LINUX_CAPABILITY_U32S_3; i++)
        sets[i].inheritable = 0;
    syscall(SYS_capset, &header, sets); /* what is not inheritable is not ambient either */
}

static void reset_signals(void)
{
    /* Linux keeps signals from inside away from PID 1, gVisor does not. A real fault still ends the guest. */
    struct sigaction standard = {.sa_handler = SIG_DFL}, ignored = {.sa_handler = SIG_IGN};
    for (int signal = 1; signal < 65; signal++)
        if (signal != SIGKILL && signal != SIGSTOP)
            sigaction(signal, is_init && signal != SIGCHLD ? &ignored : &standard, NULL);
    if (is_init)
        guest_set_reserved_signals(SIG_IGN);
    sigaction(SIGPIPE, &ignored, NULL);
    if (is_init)
        sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_terminate, .sa_flags = SA_RESTART}, NULL);
}

static void raise_nofile(void)
{
    getrlimit(RLIMIT_NOFILE, &first_nofile);
    if (open_files && open_files < first_nofile.rlim_max)
        first_nofile.rlim_max = open_files;
    if (open_files && open_files < first_nofile.rlim_cur)
        first_nofile.rlim_cur = open_files;
    struct rlimit more;
    getrlimit(RLIMIT_NOFILE, &more);
    more.rlim_cur = more.rlim_max;
    setrlimit(RLIMIT_NOFILE, &more);
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
}

static void remember_foreign_children(void)
{
    foreign_count = tree_children(getpid(), foreign_children, MAX_FOREIGN_CHILDREN);
}

static bool take_arguments(char **argv)
{
    for (argv++; *argv; argv += 2) {
        if (!argv[1])
            return false;
        if (!strcmp(argv[0], "--user") && users_add(argv[1]))
            continue;
        if (!strcmp(argv[0], "--home") && users_make_home(argv[1]))
            continue;
        if (!strcmp(argv[0], "--refuse") && refuse_set_port(argv[1]))
            continue;
        if (!strcmp(argv[0], "--open-files") && (open_files = strtoul(argv[1], NULL, 10)) > 0)
            continue;
        return false;
    }
    return true;
}

static void say_hello(void)
{
    uint8_t space[64];
    struct pack fields = PACK(space);
    pack_int(&fields, TAG_VERSION, PROTOCOL_VERSION);
    pack_int(&fields, TAG_EPOCH, 0);
    link_send(FRAME_HELLO, 0, 0, fields.at, fields.size);
    link_flush();
}

int main(int argc, char **argv)
{
    int in, out;
    if (is_sudo(argv[0]))
        return sudo_main(argv);
    prctl(PR_SET_DUMPABLE, 0);
    prctl(PR_SET_NAME, "atoll-guest");
    is_init = getpid() == 1;
    umask(022);
    pass_on_no_capabilities();
    if (argc == 3 && !strcmp(argv[1], "--hostname"))
        return sethostname(argv[2], strlen(argv[2])) < 0;
    if (argc >= 2 && !strcmp(argv[1], "--unsavable"))
        return list_unsavable(argc == 3 && !strcmp(argv[2], "queues"));
    if (!take_arguments(argv)) {
        static const char usage[] =
            "usage: atoll-guest [--user NAME:UID:GID:HOME] [--home UID:GID:PATH] [--open-files N] [--refuse PORT]\n"
            "       atoll-guest --hostname NAME\n"
            "       atoll-guest --unsavable [queues]\n";
        (void)!write(2, usage, sizeof usage - 1);
        return 64;
    }
#ifdef M_TRIM_THRESHOLD
    mallopt(M_TRIM_THRESHOLD, 64 << 10);
    mallopt(M_MMAP_THRESHOLD, 64 << 10);
#endif
    reset_signals();
    hide_link(&in, &out);
    raise_nofile();
    /* Probed with PR_GET: gVisor without subreapers accepts PR_SET from PID 1 nevertheless. */
    int is_subreaper;
    has_subreapers = prctl(PR_GET_CHILD_SUBREAPER, &is_subreaper) == 0;
    if (!is_init) {
        prctl(PR_SET_CHILD_SUBREAPER, 1);
        remember_foreign_children();
    }
    loop_start();
    link_start(in, out);
    say_hello();
    refuse_resume(0);
    for (bool busy = true;;) {
        loop_round(busy, child_ended);
        link_read(take);
        streams_pump();
        link_flush();
        busy = link_busy() || streams_busy();
    }
}
