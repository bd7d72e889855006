/* Assembles the file system of a sandbox and starts its runtime.
 *
 * Owns namespaces, id-mapped mounts, overlays and the workaround for hybrid cgroups. Not here: the OCI configuration
 * (the driver writes it) and the protocol (relay.c).
 *
 * Everything is mounted in the launcher's own mount namespace, below a tmpfs that covers one directory there. The
 * runtime copies the mounts it needs into the container's namespace; the launcher's namespace ends with the launcher.
 * So no mount is ever visible on the host, none can leak, and no directory above the state directory needs to be
 * accessible to the sandbox's user ids. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "keeper.h"

#ifndef OPEN_TREE_CLONE
#define OPEN_TREE_CLONE 1
#endif
#ifndef OPEN_TREE_CLOEXEC
#define OPEN_TREE_CLOEXEC O_CLOEXEC
#endif
#ifndef AT_RECURSIVE
#define AT_RECURSIVE 0x8000
#endif
enum { CGROUP2_MAGIC_NUMBER = 0x63677270 };

void give_up(const char *what)
{
    dprintf(STDERR_FILENO, "keeper: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static void give_up_f(const char *format, ...)
{
    char what[4352];
    int saved = errno;
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    errno = saved;
    give_up(what);
}

static void write_file(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
        give_up_f("writing %s", path);
    close(fd);
}

static void run_map_tool(const char *tool, pid_t pid, const struct id_map *maps, int count)
{
    char numbers[1 + MAX_MAPS * 3][16];
    char *argv[3 + MAX_MAPS * 3 + 1];
    int n = 0, a = 0;
    argv[a++] = (char *)tool;
    snprintf(numbers[n], sizeof numbers[n], "%d", (int)pid);
    argv[a++] = numbers[n++];
    for (int i = 0; i < count; i++) {
        unsigned values[3] = {maps[i].inside, maps[i].outside, maps[i].count};
        for (int v = 0; v < 3; v++) {
            snprintf(numbers[n], sizeof numbers[n], "%u", values[v]);
            argv[a++] = numbers[n++];
        }
    }
    argv[a] = NULL;
    pid_t child = fork();
    if (child < 0)
        give_up("fork");
    if (child == 0) {
        execvp(tool, argv);
        give_up_f("%s (package uidmap)", tool);
    }
    int status;
    if (waitpid(child, &status, 0) < 0 || status != 0) {
        errno = EPERM;
        give_up_f("%s failed; /etc/subuid and /etc/subgid must give this user the ids", tool);
    }
}

static void write_map(pid_t pid, const char *file, const struct id_map *maps, int count)
{
    char path[64], text[MAX_MAPS * 48];
    int used = 0;
    for (int i = 0; i < count; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%u %u %u\n", maps[i].inside, maps[i].outside,
                         maps[i].count);
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    write_file(path, text);
}

static void write_maps(const struct plan *plan, pid_t pid)
{
    /* Without privilege, the kernel accepts one line that maps the own id; more need the set-uid tools. */
    if (plan->rootless && (plan->uid_count > 1 || plan->gid_count > 1)) {
        run_map_tool("newuidmap", pid, plan->uids, plan->uid_count);
        run_map_tool("newgidmap", pid, plan->gids, plan->gid_count);
        return;
    }
    if (plan->rootless) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/setgroups", (int)pid);
        write_file(path, "deny");
    }
    write_map(pid, "uid_map", plan->uids, plan->uid_count);
    write_map(pid, "gid_map", plan->gids, plan->gid_count);
}

/* Forks a process into a new user namespace that `owner` owns (-1: the current user). It exits when its socket to the
 * parent is closed, and so also when the parent dies; PR_SET_PDEATHSIG would be reset by the change of user. */
static pid_t hold_user_namespace(long owner, int *end)
{
    int line[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, line) < 0)
        give_up("socketpair");
    pid_t child = fork();
    if (child < 0)
        give_up("fork");
    char error = EIO;
    if (child == 0) {
        close(line[0]);
        uid_t uid = (uid_t)owner;
        bool done = (owner < 0 || setresuid(uid, uid, uid) == 0) && unshare(CLONE_NEWUSER) == 0;
        error = done ? 0 : (char)errno;
        if (write(line[1], &error, 1) == 1 && done)
            (void)!read(line[1], &error, 1);
        _exit(1);
    }
    close(line[1]);
    if (read(line[0], &error, 1) != 1 || error != 0) {
        waitpid(child, NULL, 0);
        errno = error;
        give_up("making a user namespace");
    }
    *end = line[0];
    return child;
}

static int release_user_namespace(pid_t holder, int line)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/ns/user", (int)holder);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        give_up("opening the user namespace");
    close(line);
    waitpid(holder, NULL, 0);
    return fd;
}

/* The sandbox's user namespace. The sandbox's root owns it, not the host's: the kernel counts inotify instances,
 * message queues and the like against the owner, and one sandbox must not exhaust another's limits. */
static int make_user_namespace(const struct plan *plan)
{
    int line;
    pid_t holder = hold_user_namespace(plan->rootless ? -1 : (long)plan->uids[0].outside, &line);
    write_maps(plan, holder);
    return release_user_namespace(holder, line);
}

/* A user namespace that serves as the id mapping of mounts: `inside` is on disk. */
static int make_mapping(const struct id_map *uids, int uid_count, const struct id_map *gids, int gid_count)
{
    int line;
    pid_t holder = hold_user_namespace(-1, &line);
    write_map(holder, "uid_map", uids, uid_count);
    write_map(holder, "gid_map", gids, gid_count);
    return release_user_namespace(holder, line);
}

/* The id mapping of layers that belong to another owner than the sandbox. One for all layers of one owner. */
static int layer_mapping(const struct plan *plan, const char *owner, int user_fd)
{
    static struct {
        const char *owner;
        int fd;
    } known[MAX_OWNERS];
    static int known_count;
    if (plan->rootless)
        return -1;
    if (!strcmp(owner, "0"))
        return user_fd;
    for (int i = 0; i < known_count; i++)
        if (!strcmp(known[i].owner, owner))
            return known[i].fd;
    if (known_count == MAX_OWNERS) {
        errno = E2BIG;
        give_up("too many owners of layers");
    }
    /* Files of the machine get ids that no sandbox has. Files of another sandbox's layer become this sandbox's. */
    struct id_map map = {0, plan->machine_base, 65536};
    if (strcmp(owner, "machine"))
        map = (struct id_map){(unsigned)strtoul(owner, NULL, 10), plan->uids[0].outside, plan->uids[0].count};
    known[known_count].owner = owner;
    return known[known_count++].fd = make_mapping(&map, 1, &map, 1);
}

bool is_v2(const char *cgroup)
{
    struct statfs fs;
    return statfs(cgroup, &fs) == 0 && fs.f_type == CGROUP2_MAGIC_NUMBER;
}

/* crun refuses hybrid cgroups; without the `unified` mount, which is hidden in this namespace alone, it sees plain v1.
 * In a user namespace the mount is locked, and is covered instead. */
static void hide_unified_cgroup(void)
{
    const char *unified = "/sys/fs/cgroup/unified";
    if (is_v2(unified) && umount2(unified, MNT_DETACH) < 0 && mount("none", unified, "tmpfs", MS_RDONLY, NULL) < 0)
        give_up("hiding the unified cgroup hierarchy");
}

static void become_root_of(int user_fd)
{
    if (setns(user_fd, CLONE_NEWUSER) < 0)
        give_up("entering the user namespace");
    if (setresgid(0, 0, 0) < 0 || setresuid(0, 0, 0) < 0)
        give_up("becoming root in the user namespace");
}

/* Enters a new mount namespace and, without privilege, the user namespace that owns it. Returns the latter's fd. */
static int private_namespaces(const struct plan *plan)
{
    int user_fd = plan->uid_count ? make_user_namespace(plan) : -1;
    if (plan->rootless)
        become_root_of(user_fd);
    if (unshare(CLONE_NEWNS) < 0)
        give_up("making a mount namespace");
    if (mount(NULL, "/", NULL, MS_SLAVE | MS_REC, NULL) < 0)
        give_up("separating the mount namespace");
    hide_unified_cgroup();
    return user_fd;
}

void enter_namespaces(const struct plan *plan)
{
    int fd = private_namespaces(plan);
    if (fd >= 0)
        close(fd);
}

/* A detached clone of the mount at `fd`, without the mounts below it, without set-uid programs and with `attributes`;
 * id-mapped if `user_fd` >= 0. Private: what the host mounts below it later does not appear in it. */
static int clone_tree(int fd, uint64_t attributes, int user_fd)
{
    int tree = (int)syscall(SYS_open_tree, fd, "", AT_EMPTY_PATH | OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC);
    if (tree < 0)
        return -1;
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_NOSUID | attributes, .propagation = MS_PRIVATE};
    if (user_fd >= 0) {
        attr.attr_set |= MOUNT_ATTR_IDMAP;
        attr.userns_fd = (uint64_t)user_fd;
    }
    if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0) {
        int saved = errno;
        close(tree);
        errno = saved;
        return -1;
    }
    return tree;
}

static void attach(int tree, const char *at)
{
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, at, MOVE_MOUNT_F_EMPTY_PATH) < 0)
        give_up_f("attaching %s", at);
    close(tree);
}

/* Binds the file or directory at `fd`, which is closed, on `at`, which is made. No file of a directory is a program. */
static void bind_new(int fd, const char *at, uint64_t attributes)
{
    struct stat seen;
    if (fstat(fd, &seen) < 0)
        give_up(at);
    int tree = clone_tree(fd, attributes | (S_ISDIR(seen.st_mode) ? MOUNT_ATTR_NOEXEC : 0), -1);
    if (tree < 0)
        give_up_f("binding %s", at);
    if (S_ISDIR(seen.st_mode) ? mkdir(at, 0555) < 0 : mknod(at, S_IFREG | 0555, 0) < 0)
        give_up_f("making %s", at);
    attach(tree, at);
    close(fd);
}

static uid_t sandbox_root(const struct plan *plan)
{
    return plan->rootless ? 0 : plan->uids[0].outside;
}

/* A directory that belongs to root inside. It may exist. */
static void make_directory(const struct plan *plan, const char *path, mode_t mode)
{
    uid_t id = sandbox_root(plan);
    if ((mkdir(path, mode) < 0 && errno != EEXIST) || chmod(path, mode) < 0 || chown(path, id, id) < 0)
        give_up_f("making %s", path);
}

static void make_parents(const struct plan *plan, const char *path)
{
    char parent[256];
    for (const char *slash = strchr(path, '/'); slash; slash = strchr(slash + 1, '/')) {
        snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
        make_directory(plan, parent, 0755);
    }
}

/* Mounts `name`, a directory of the cover with all that is mounted in it, on the directory of that name in the root.
 * The image may have made that a link: it is resolved as a process inside would, and never leads out of the root. */
static void mount_in_root(const struct plan *plan, const char *name, uint64_t attributes)
{
    int root = open("root", O_PATH | O_DIRECTORY | O_CLOEXEC);
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_IN_ROOT};
    int at = (int)syscall(SYS_openat2, root, name, &how, sizeof how);
    if (at < 0 && errno == ENOENT) {
        uid_t id = sandbox_root(plan);
        if (mkdirat(root, name, 0755) == 0 && fchownat(root, name, id, id, AT_SYMLINK_NOFOLLOW) == 0)
            at = (int)syscall(SYS_openat2, root, name, &how, sizeof how);
    }
    if (at < 0)
        give_up_f("opening /%s, which must be a directory of the image", name);
    int tree = (int)syscall(SYS_open_tree, AT_FDCWD, name, OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE);
    struct mount_attr attr = {.attr_set = MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV | attributes};
    if (tree < 0 || syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH, &attr, sizeof attr) < 0 ||
        syscall(SYS_move_mount, tree, "", at, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH) < 0)
        give_up_f("mounting /%s", name);
    close(tree);
    close(at);
    close(root);
}

/* The sandbox's /dev, /run and /sys. `empty` is for the runtime, which masks other directories with it.
 *
 * They are directories of one file system, that of the cover, since each file system costs kernel memory in every
 * memory cgroup of the machine (docs/design/0017-many-sandboxes.md). The size of that one bounds them together. */
static void mount_scratch(const struct plan *plan)
{
    static const char *const directories[] = {"dev", "dev/mqueue", "dev/pts", "run"};
    for (size_t i = 0; i < sizeof directories / sizeof directories[0]; i++)
        make_directory(plan, directories[i], 0755);
    make_directory(plan, "sys", 0555);
    make_directory(plan, "empty", 0555);
    make_directory(plan, "shm", 01777);
    int shm = open("shm", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (shm < 0)
        give_up("opening shm");
    bind_new(shm, "dev/shm", MOUNT_ATTR_NODEV);
    mount_in_root(plan, "dev", 0);
    mount_in_root(plan, "run", 0);
    mount_in_root(plan, "sys", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOEXEC);
}

static void mount_overlay(const struct plan *plan, int index, const int *layer_fds, int user_fd)
{
    const struct overlay *o = &plan->overlays[index];
    char options[64 + MAX_LAYERS * 16 + 512], name[32], target[4200];
    int used = snprintf(options, sizeof options, "lowerdir=");
    for (int i = 0; i < o->layer_count; i++) {
        snprintf(name, sizeof name, "l%d.%d", index, i);
        int tree = clone_tree(layer_fds[i], MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV,
                              layer_mapping(plan, o->layers[2 * i + 1], user_fd));
        if (tree < 0)
            give_up_f("id-mapping the layer %s (its file system may not support it)", o->layers[2 * i]);
        if (mkdir(name, 0755) < 0)
            give_up("mkdir");
        attach(tree, name);
        used += snprintf(options + used, sizeof options - used, "%s%s", i ? ":" : "", name);
    }
    snprintf(options + used, sizeof options - used,
             ",upperdir=active/upper/%s,workdir=active/work/%s,index=off,%s", o->key, o->key,
             plan->rootless ? "userxattr" : "redirect_dir=off,metacopy=off");
    /* No redirects or metacopies: an upper directory must be complete in itself, to serve as a layer elsewhere.
     * userxattr implies that. */
    snprintf(target, sizeof target, "root%s", strcmp(o->target, "/") ? o->target : "");
    if (mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, options) < 0)
        give_up_f("mounting the overlay of %s (%s)", o->target, options);
}

/* Opens a directory that a path without symlinks leads to: the path was resolved when the sandbox was created, and who
 * may write to a directory of it since must not be able to lead elsewhere. */
static int open_pinned(const char *path)
{
    struct open_how how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS};
    return (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
}

int try_id_mapping(const char *path)
{
    struct id_map map = {0, 0, 1};
    int fd = open_pinned(path);
    return fd < 0 ? -1 : clone_tree(fd, 0, make_mapping(&map, 1, &map, 1));
}

/* Mounts the directory at `fd` on mounts/NUMBER, from where the runtime takes it. One whose file system cannot be
 * id-mapped can be mounted read-only: its owners do not exist inside then. */
static void mount_bind(const struct bind *mount, int fd, int number)
{
    uint64_t attributes = MOUNT_ATTR_NODEV | (mount->read_only ? MOUNT_ATTR_RDONLY : 0);
    int mapping = -1;
    if (mount->uid_count)
        mapping = make_mapping(mount->uids, mount->uid_count, mount->gids, mount->gid_count);
    int tree = clone_tree(fd, attributes, mapping);
    if (tree < 0 && errno == EINVAL && mapping >= 0 && mount->read_only)
        tree = clone_tree(fd, attributes, -1);
    if (tree < 0 && mapping >= 0)
        give_up_f("mounting %s (its file system may not support id mapping; mount it read-only)", mount->path);
    if (tree < 0)
        give_up_f("mounting %s (without root, it must have no other mounts below it)", mount->path);
    char at[32];
    snprintf(at, sizeof at, "mounts/%d", number);
    if (mkdir(at, 0755) < 0)
        give_up_f("making %s", at);
    attach(tree, at);
    if (mapping >= 0)
        close(mapping);
    close(fd);
}

static void assemble(const struct plan *plan, int user_fd)
{
    /* Open all descriptors first: the cover may hide the paths. */
    static int layer_fds[MAX_OVERLAYS][MAX_LAYERS];
    for (int i = 0; i < plan->overlay_count; i++)
        for (int j = 0; j < plan->overlays[i].layer_count; j++) {
            layer_fds[i][j] = open(plan->overlays[i].layers[2 * j], O_PATH | O_DIRECTORY | O_CLOEXEC);
            if (layer_fds[i][j] < 0)
                give_up_f("opening the layer %s", plan->overlays[i].layers[2 * j]);
        }
    int layer = open(plan->active_layer, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (layer < 0)
        give_up(plan->active_layer);
    int files[MAX_FILES];
    for (int i = 0; i < plan->file_count; i++) {
        files[i] = open(plan->files[i].path, O_PATH | O_CLOEXEC);
        if (files[i] < 0)
            give_up(plan->files[i].path);
    }
    int mounts[MAX_MOUNTS];
    for (int i = 0; i < plan->mount_count; i++) {
        mounts[i] = open_pinned(plan->mounts[i].path);
        if (mounts[i] < 0)
            give_up_f("opening the mount %s%s", plan->mounts[i].path,
                      errno == ELOOP ? " (it had no symlinks when the sandbox was created)" : "");
    }
    char options[64];
    snprintf(options, sizeof options, "mode=755,size=%llu",
             (unsigned long long)(plan->scratch_bytes ? plan->scratch_bytes : 1 << 20));
    if (mount("atoll", plan->cover, "tmpfs", MS_NOSUID | MS_NODEV, options) < 0)
        give_up_f("mounting a tmpfs on %s", plan->cover);
    if (chdir(plan->cover) < 0 || mkdir("active", 0700) < 0 || mkdir("root", 0755) < 0)
        give_up("preparing the mounts");
    int tree = clone_tree(layer, MOUNT_ATTR_NODEV, -1);
    if (tree < 0)
        give_up("cloning the active layer");
    attach(tree, "active");
    for (int i = 0; i < plan->overlay_count; i++)
        mount_overlay(plan, i, layer_fds[i], user_fd);
    if (plan->disk_bytes && set_quota(layer, plan->disk_bytes) < 0)
        give_up("setting the disk quota");
    close(layer);
    if (!plan->rootless) {
        /* The runtime joins the namespace through this path. */
        char source[64];
        snprintf(source, sizeof source, "/proc/self/fd/%d", user_fd);
        int file = open("userns", O_CREAT | O_WRONLY | O_CLOEXEC, 0444);
        if (file < 0 || mount(source, "userns", NULL, MS_BIND, NULL) < 0)
            give_up("mounting the user namespace");
        close(file);
    }
    for (int i = 0; i < plan->file_count; i++) {
        make_parents(plan, plan->files[i].name);
        bind_new(files[i], plan->files[i].name, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV);
    }
    if (plan->mount_count && mkdir("mounts", 0755) < 0)
        give_up("making mounts");
    for (int i = 0; i < plan->mount_count; i++)
        mount_bind(&plan->mounts[i], mounts[i], i);
    if (plan->scratch_bytes)
        mount_scratch(plan);
}

static int open_in(const char *dir, const char *name, int flags)
{
    char path[4352];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    int fd = open(path, flags | O_CLOEXEC, 0600);
    if (fd < 0)
        give_up_f("opening %s", path);
    return fd;
}

pid_t fork_into(const char *cgroup)
{
    int fd = open(cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    struct clone_args args = {.flags = CLONE_INTO_CGROUP, .exit_signal = SIGCHLD, .cgroup = (uint64_t)fd};
    pid_t pid = (pid_t)syscall(SYS_clone3, &args, sizeof args);
    if (pid != 0)
        close(fd);
    return pid;
}

int join_v1(const char *cgroup)
{
    char path[4352];
    snprintf(path, sizeof path, "%s/tasks", cgroup);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t written = write(fd, "0", 1);
    int saved = errno;
    close(fd);
    errno = saved;
    return written == 1 ? 0 : -1;
}

/* The caller is killed when its parent, the keeper, ends, also if it has ended already. */
static void end_with(pid_t keeper)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != keeper)
        _exit(1);
}

pid_t launch_runtime(const struct plan *plan)
{
    bool v2 = plan->cgroup_count == 1 && is_v2(plan->cgroups[0]);
    pid_t keeper = getpid(), pid = v2 ? fork_into(plan->cgroups[0]) : fork();
    if (pid != 0)
        return pid;
    end_with(keeper);
    signal(SIGTERM, SIG_DFL);
    /* The guest gets open file descriptions of its own: flags that it sets must not change the keeper's. */
    int in = open_in(plan->dir, "in", O_RDWR), out = open_in(plan->dir, "out", O_RDWR);
    int log = open_in(plan->dir, "runtime.log", O_WRONLY | O_CREAT | O_APPEND);
    if (dup2(log, STDERR_FILENO) < 0)
        give_up("dup2");
    for (int i = 0; i < plan->cgroup_count && !v2; i++)
        if (join_v1(plan->cgroups[i]) < 0)
            give_up_f("joining the cgroup %s", plan->cgroups[i]);
    int user_fd = private_namespaces(plan);
    assemble(plan, user_fd);
    if (plan->foreground && !plan->rootless) {
        if (setgroups(0, NULL) < 0)
            give_up("dropping groups");
        become_root_of(user_fd);
    }
    end_with(keeper); /* a change of user has reset it */
    if (chdir("/") < 0 || dup2(in, STDIN_FILENO) < 0 || dup2(out, STDOUT_FILENO) < 0)
        give_up("preparing the descriptors");
    syscall(SYS_close_range, 3, ~0U, 0);
    execvp(plan->command[0], plan->command);
    give_up(plan->command[0]);
}
