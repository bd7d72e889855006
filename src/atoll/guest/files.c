/* Operations on files: read, write, stat, list, make, remove, rename, link, chmod, chown. They run in workers.
 *
 * Owns what PROTOCOL.md promises of each. Not here: users (the worker has changed to the right one), streams, and how
 * trees are walked (walk.c).
 */
#define _GNU_SOURCE
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "users.h"
#include "walk.h"
#include "xattrs.h"

enum { CHUNK = 256 << 10, WIDE_FROM = 64 << 10, MAX_LINKS = 40, TEMPORARY_TRIES = 16 };

static char chunk[CHUNK]; /* not allocated: a worker that is used again would map and unmap it each time */

int files_kind(mode_t mode)
{
    switch (mode & S_IFMT) {
    case S_IFREG: return KIND_FILE;
    case S_IFDIR: return KIND_DIRECTORY;
    case S_IFLNK: return KIND_SYMLINK;
    case S_IFIFO: return KIND_FIFO;
    case S_IFSOCK: return KIND_SOCKET;
    case S_IFCHR: return KIND_CHAR_DEVICE;
    default: return KIND_BLOCK_DEVICE;
    }
}

static int64_t mtime_ns(const struct stat *status)
{
    return (int64_t)status->st_mtim.tv_sec * 1000000000 + status->st_mtim.tv_nsec;
}

void files_pack_stat(struct pack *pack, int directory, const char *name, const struct stat *status)
{
    pack_int(pack, TAG_KIND, files_kind(status->st_mode));
    pack_int(pack, TAG_SIZE, status->st_size);
    pack_int(pack, TAG_MODE, status->st_mode & 07777);
    pack_int(pack, TAG_UID, status->st_uid);
    pack_int(pack, TAG_GID, status->st_gid);
    pack_int(pack, TAG_MTIME_NS, mtime_ns(status));
    if (S_ISLNK(status->st_mode)) {
        char target[PATH_MAX];
        ssize_t size = readlinkat(directory, name, target, sizeof target);
        if (size >= 0)
            pack_bytes(pack, TAG_TARGET, target, (size_t)size);
    }
}

/* ---- opening ---- */

static int refuse_kind(const struct stat *status)
{
    return S_ISREG(status->st_mode) ? 0 : S_ISDIR(status->st_mode) ? EISDIR : EINVAL;
}

/* stat() before the open, because opening a device may have effects; and again after it, because the file may have been
 * replaced. O_NONBLOCK keeps a pipe from blocking in between. */
int files_open_regular(int directory, const char *path, int flags, mode_t mode, struct stat *status)
{
    int follow = flags & O_NOFOLLOW ? AT_SYMLINK_NOFOLLOW : 0, error = 0;
    if (fstatat(directory, path, status, follow) == 0)
        error = flags & O_EXCL ? EEXIST : refuse_kind(status);
    if (error) {
        errno = error;
        return -1;
    }
    int fd = openat(directory, path, flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, mode);
    if (fd < 0)
        return -1;
    error = fstat(fd, status) < 0 ? errno : refuse_kind(status);
    if (error) {
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static int fail_open(struct job *job, int error, const char *path)
{
    return job_fail(job, error, error == EINVAL ? "not a regular file" : path);
}

/* ---- READ ---- */

static int64_t send_by_copying(struct job *job, int fd, int64_t offset, int64_t limit)
{
    int64_t sent = 0;
    while (sent < limit) {
        size_t want = limit - sent < CHUNK ? (size_t)(limit - sent) : CHUNK;
        ssize_t count = pread(fd, chunk, want, offset + sent);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0)
            return -1;
        if (count == 0)
            break;
        job_write(job, chunk, (size_t)count);
        sent += count;
    }
    return sent;
}

/* Through splice() the file's pages go into the pipe without being copied; files of /proc, and gVisor, cannot. */
int64_t files_send(struct job *job, int fd, int64_t offset, int64_t limit)
{
    int64_t sent = 0;
    job_flush(job);
    while (limit - sent >= WIDE_FROM) {
        job_open_output(job);
        off_t at = offset + sent;
        size_t want = limit - sent < (1 << 20) ? (size_t)(limit - sent) : (1 << 20);
        ssize_t count = splice(fd, &at, job->out, NULL, want, 0);
        if (count == 0)
            return sent;
        if (count < 0 && errno == EPIPE)
            _exit(1);
        if (count < 0)
            break;
        sent += count;
    }
    int64_t rest = send_by_copying(job, fd, offset + sent, limit - sent);
    return rest < 0 ? -1 : sent + rest;
}

static int run_read(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    int64_t offset = fields_int(job->fields, TAG_OFFSET, 0), limit = fields_int(job->fields, TAG_LIMIT, INT64_MAX);
    struct stat status;
    if (offset < 0 || limit < 0)
        return job_fail(job, EINVAL, "OFFSET or LIMIT");
    int fd = files_open_regular(AT_FDCWD, path, O_RDONLY, 0, &status);
    if (fd < 0)
        return fail_open(job, errno, path);
    if (limit > INT64_MAX - offset)
        limit = INT64_MAX - offset;
    int64_t expected = status.st_size - offset, sent;
    if (expected > WIDE_FROM && limit > WIDE_FROM) {
        job_open_output(job);
        job_widen(job->out);
        sent = files_send(job, fd, offset, limit);
    } else if (status.st_size) { /* small: copying is faster than splicing */
        sent = send_by_copying(job, fd, offset, limit < expected ? limit : expected);
    } else {
        sent = files_send(job, fd, offset, limit);
    }
    int error = errno;
    close(fd);
    if (sent < 0)
        return job_fail(job, error, path);
    int64_t seen = offset + sent; /* files of /proc report a size of 0 */
    pack_int(&job->result, TAG_SIZE, sent && seen > status.st_size ? seen : status.st_size);
    pack_int(&job->result, TAG_MODE, status.st_mode & 07777);
    pack_int(&job->result, TAG_MTIME_NS, mtime_ns(&status));
    return 0;
}

const struct operation operation_read = {.run = run_read, .reusable = true, .gives_output = true};

/* ---- WRITE ---- */

int files_make_directories(const char *path, mode_t mode)
{
    char *copy = strdup(path);
    struct stat status;
    if (!copy)
        return ENOMEM;
    for (char *slash = copy + (*copy == '/'); (slash = strchr(slash, '/')); slash++) {
        *slash = 0;
        if (*copy && mkdir(copy, 0777) < 0 && errno != EEXIST && errno != EISDIR && errno != EROFS) {
            int error = errno;
            free(copy);
            return error;
        }
        *slash = '/';
    }
    free(copy);
    if (mkdir(path, mode) == 0)
        return 0;
    if (errno != EEXIST)
        return errno;
    return stat(path, &status) < 0 ? errno : S_ISDIR(status.st_mode) ? 0 : ENOTDIR;
}

/* The directory part of a path: a copy. */
static char *parent_of(const char *path)
{
    const char *slash = strrchr(path, '/');
    if (!slash)
        return strdup(".");
    return slash == path ? strdup("/") : strndup(path, (size_t)(slash - path));
}

static int make_parents(const char *path)
{
    char *parent = parent_of(path);
    int error = parent ? files_make_directories(parent, 0777) : ENOMEM;
    free(parent);
    return error;
}

/* Resolves a chain of symlinks, so that an atomic write replaces the file and not the link to it. */
static char *resolve_links(const char *path)
{
    char *at = strdup(path), target[PATH_MAX];
    for (int i = 0; at && i < MAX_LINKS; i++) {
        ssize_t size = readlink(at, target, sizeof target - 1);
        if (size < 0)
            return at;
        target[size] = 0;
        char *parent = parent_of(at), *next = NULL;
        if (target[0] == '/')
            next = strdup(target);
        else if (parent && asprintf(&next, "%s/%s", parent, target) < 0)
            next = NULL;
        free(parent);
        free(at);
        at = next;
    }
    errno = at ? ELOOP : ENOMEM;
    return NULL;
}

/* Copies channel 0 into the file until the host sends EOF. 0 or an errno. */
static int receive(struct job *job, int fd)
{
    bool wide = false;
    for (;;) {
        ssize_t count = job_read(job, chunk, CHUNK);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return count < 0 ? errno : 0;
        if (count >= WIDE_FROM && !wide) {
            wide = true;
            job_widen(job->in);
        }
        for (ssize_t done = 0; done < count;) {
            ssize_t written = write(fd, chunk + done, (size_t)(count - done));
            if (written < 0 && errno != EINTR)
                return errno;
            if (written > 0)
                done += written;
        }
    }
}

static int pack_size(struct job *job, int fd)
{
    struct stat status;
    if (fstat(fd, &status) < 0)
        return errno;
    pack_int(&job->result, TAG_SIZE, status.st_size);
    return 0;
}

static int write_in_place(struct job *job, const char *path, int64_t mode, bool append, bool exclusive)
{
    struct stat status;
    int flags = O_WRONLY | O_CREAT | (append ? O_APPEND : 0) | (exclusive ? O_EXCL : 0);
    bool is_new = (mode < 0 || xattrs_are_wanted(job->fields)) && access(path, F_OK) < 0;
    if (mode < 0 && is_new)
        mode = 0644; /* of a new file, whatever the umask */
    int fd = files_open_regular(AT_FDCWD, path, flags, mode < 0 ? 0644 : (mode_t)mode, &status);
    if (fd < 0)
        return fail_open(job, errno, path);
    int error = xattrs_replace(job, fd); /* first: what it refuses leaves everything as it was */
    if (error && is_new)
        unlink(path);
    if (!error && !append && status.st_size && ftruncate(fd, 0) < 0)
        error = errno;
    if (!error && mode >= 0 && fchmod(fd, (mode_t)mode) < 0)
        error = errno;
    if (!error)
        error = receive(job, fd);
    if (!error)
        error = pack_size(job, fd);
    if (close(fd) < 0 && !error)
        error = errno;
    return job_fail(job, error, path);
}

static int open_temporary(const char *path, char **name)
{
    char *parent = parent_of(path);
    struct timespec now;
    int fd = -1;
    if (!parent)
        return -1;
    job_hold_abandon(true); /* until the file is registered for removal */
    for (int i = 0; i < TEMPORARY_TRIES; i++) {
        clock_gettime(CLOCK_REALTIME, &now);
        if (asprintf(name, "%s/.atoll-%d-%lx", parent, getpid(), (unsigned long)now.tv_nsec) < 0)
            break;
        fd = open(*name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
        if (fd >= 0)
            break;
        int error = errno;
        free(*name);
        errno = error;
        if (error != EEXIST)
            break;
    }
    int error = errno;
    if (fd >= 0)
        job_set_leftover(*name);
    job_hold_abandon(false);
    free(parent);
    errno = error;
    return fd;
}

/* The new file gets the old one's owner where permitted, and its mode unless MODE is given. */
static int dress_like(int fd, const struct stat *old, int64_t mode)
{
    struct stat new;
    if (old && fstat(fd, &new) == 0 && (new.st_uid != old->st_uid || new.st_gid != old->st_gid))
        (void)!fchown(fd, old->st_uid, old->st_gid);
    if (mode < 0)
        mode = old ? old->st_mode & 07777 : 0644;
    return fchmod(fd, (mode_t)mode) < 0 ? errno : 0;
}

static int put_in_place(const char *temporary, const char *path, bool exclusive)
{
    if (!exclusive)
        return rename(temporary, path) < 0 ? errno : 0;
    if (link(temporary, path) < 0)
        return errno;
    unlink(temporary);
    return 0;
}

/* Writes a file beside `path`, which is no symlink any more, and renames it. */
static int replace(struct job *job, const char *path, const char *given, int64_t mode, bool exclusive)
{
    struct stat old;
    char *temporary = NULL;
    bool exists = stat(path, &old) == 0;
    int error = !exists ? 0 : exclusive ? EEXIST : refuse_kind(&old);
    if (error)
        return fail_open(job, error, given);
    if (exists && access(path, W_OK) < 0)
        return job_fail(job, errno, given); /* a file without write permission may not be replaced either */
    int fd = open_temporary(path, &temporary);
    if (fd < 0)
        return job_fail(job, errno, given);
    error = xattrs_replace(job, fd);
    if (!error)
        error = receive(job, fd);
    if (!error)
        error = dress_like(fd, exists ? &old : NULL, mode);
    if (!error && fsync(fd) < 0)
        error = errno;
    if (!error)
        error = pack_size(job, fd);
    if (close(fd) < 0 && !error)
        error = errno;
    if (!error)
        error = put_in_place(temporary, path, exclusive);
    if (error)
        unlink(temporary);
    job_set_leftover(NULL);
    free(temporary);
    return job_fail(job, error, given);
}

static int write_atomically(struct job *job, const char *given, int64_t mode, bool exclusive)
{
    char *path = resolve_links(given);
    int error = path ? replace(job, path, given, mode, exclusive) : job_fail(job, errno, given);
    free(path);
    return error;
}

static int run_write(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    int64_t mode = fields_int(job->fields, TAG_MODE, -1);
    bool append = fields_int(job->fields, TAG_APPEND, 0) == 1, atomic = fields_int(job->fields, TAG_ATOMIC, 0) == 1;
    bool exclusive = fields_int(job->fields, TAG_EXCLUSIVE, 0) == 1;
    if (!xattrs_are_valid(job->fields))
        return job_fail(job, EINVAL, "XATTR_PREFIX or XATTRS");
    if (mode < -1 || mode > 07777 || (append && atomic))
        return job_fail(job, EINVAL, mode > 07777 ? "MODE" : "APPEND and ATOMIC");
    if (fields_int(job->fields, TAG_PARENTS, 0) == 1) {
        int error = make_parents(path);
        if (error)
            return job_fail(job, error, path);
    }
    return atomic ? write_atomically(job, path, mode, exclusive) : write_in_place(job, path, mode, append, exclusive);
}

const struct operation operation_write = {.run = run_write, .reusable = true, .takes_input = true};

/* ---- STAT, LIST ---- */

static int run_stat(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    int flags = fields_int(job->fields, TAG_FOLLOW, 1) ? 0 : AT_SYMLINK_NOFOLLOW;
    struct stat status;
    if (!xattrs_are_valid(job->fields))
        return job_fail(job, EINVAL, "XATTR_PREFIX");
    if (fstatat(AT_FDCWD, path, &status, flags) < 0)
        return job_fail(job, errno, path);
    files_pack_stat(&job->result, AT_FDCWD, path, &status);
    xattrs_pack(&job->result, job->fields, path, flags == 0);
    return 0;
}

const struct operation operation_stat = {.run = run_stat, .reusable = true};

static enum walk_answer list_entry(struct walk *walk, const struct walk_entry *entry)
{
    struct job *job = walk->data;
    struct stat status;
    if (fstatat(entry->directory, entry->name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return WALK_ON; /* removed meanwhile */
    job_begin_record(job);
    pack_string(&job->record, TAG_NAME, entry->name);
    files_pack_stat(&job->record, entry->directory, entry->name, &status);
    xattrs_pack(&job->record, job->fields, entry->name, false);
    job_end_record(job);
    return WALK_ON;
}

static int run_list(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    struct walk walk = {.visit = list_entry, .data = job};
    if (!xattrs_are_valid(job->fields))
        return job_fail(job, EINVAL, "XATTR_PREFIX");
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return job_fail(job, errno, path);
    /* Extended attributes have no call that takes a directory and a name: names are relative to it from here on. */
    int error = xattrs_are_wanted(job->fields) && fchdir(fd) < 0 ? errno : walk_tree(&walk, fd);
    close(fd);
    return job_fail(job, error, path);
}

const struct operation operation_list = {.run = run_list, .reusable = true, .gives_output = true};

/* ---- MKDIR, REMOVE, RENAME, SYMLINK, CHMOD ---- */

static int run_mkdir(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    int64_t mode = fields_int(job->fields, TAG_MODE, 0755);
    bool parents = fields_int(job->fields, TAG_PARENTS, 0) == 1;
    struct stat status;
    if (mode < 0 || mode > 07777)
        return job_fail(job, EINVAL, "MODE");
    bool existed = parents && stat(path, &status) == 0;
    int error = parents ? files_make_directories(path, (mode_t)mode) : mkdir(path, (mode_t)mode) < 0 ? errno : 0;
    if (!error && !existed && (mode & ~0755) && chmod(path, (mode_t)mode) < 0)
        error = errno; /* restores bits that the umask cleared */
    return job_fail(job, error, path);
}

const struct operation operation_mkdir = {.run = run_mkdir, .reusable = true};

static enum walk_answer remove_entry(struct walk *walk, const struct walk_entry *entry)
{
    if (entry->type == DT_DIR)
        return WALK_INTO;
    if (unlinkat(entry->directory, entry->name, 0) < 0 && errno != ENOENT) {
        *(int *)walk->data = errno;
        return WALK_STOP;
    }
    return WALK_ON;
}

static int remove_left(struct walk *walk, int directory, const char *name)
{
    (void)walk;
    return unlinkat(directory, name, AT_REMOVEDIR) < 0 && errno != ENOENT ? errno : 0;
}

static int remove_blocked(struct walk *walk, const struct walk_entry *entry, int error)
{
    (void)walk;
    /* A directory that cannot be read may still be empty. */
    return unlinkat(entry->directory, entry->name, AT_REMOVEDIR) == 0 ? 0 : error;
}

static int remove_tree(const char *path)
{
    int stopped = 0;
    struct walk walk = {.visit = remove_entry, .leave = remove_left, .blocked = remove_blocked, .data = &stopped};
    int fd = walk_open(AT_FDCWD, path);
    if (fd < 0)
        return rmdir(path) == 0 ? 0 : errno;
    int error = walk_tree(&walk, fd);
    close(fd);
    if (!error)
        error = stopped;
    return error ? error : rmdir(path) < 0 ? errno : 0;
}

static bool is_root_directory(const char *path)
{
    struct stat status, root;
    return lstat(path, &status) == 0 && stat("/", &root) == 0 && status.st_dev == root.st_dev &&
           status.st_ino == root.st_ino;
}

static int run_remove(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    bool recursive = fields_int(job->fields, TAG_RECURSIVE, 0) == 1;
    struct stat status;
    int error;
    if (lstat(path, &status) < 0)
        error = errno;
    else if (is_root_directory(path))
        error = EBUSY;
    else if (!S_ISDIR(status.st_mode))
        error = unlink(path) < 0 ? errno : 0;
    else if (recursive)
        error = remove_tree(path);
    else
        error = rmdir(path) < 0 ? errno : 0;
    if (error == ENOENT && fields_int(job->fields, TAG_MISSING_OK, 0) == 1)
        error = 0;
    return job_fail(job, error, path);
}

const struct operation operation_remove = {.run = run_remove, .reusable = true};

static int run_rename(struct job *job)
{
    const char *path = job_path(job, TAG_PATH), *to = job_path(job, TAG_TO);
    int error = fields_int(job->fields, TAG_PARENTS, 0) == 1 ? make_parents(to) : 0;
    if (!error && rename(path, to) < 0)
        error = errno;
    return job_fail(job, error, path);
}

const struct operation operation_rename = {.run = run_rename, .reusable = true};

static int run_symlink(struct job *job)
{
    const char *path = job_path(job, TAG_PATH), *target = job_path(job, TAG_TARGET);
    return symlink(target, path) < 0 ? job_fail(job, errno, path) : 0;
}

const struct operation operation_symlink = {.run = run_symlink, .reusable = true};

static int run_chmod(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    int64_t mode = fields_int(job->fields, TAG_MODE, -1);
    if (mode < 0 || mode > 07777)
        return job_fail(job, EINVAL, "MODE");
    return chmod(path, (mode_t)mode) < 0 ? job_fail(job, errno, path) : 0;
}

const struct operation operation_chmod = {.run = run_chmod, .reusable = true};

struct owning {
    struct job *job;
    struct account owner;
    int error;
};

static enum walk_answer own_entry(struct walk *walk, const struct walk_entry *entry)
{
    struct owning *owning = walk->data;
    if (fchownat(entry->directory, entry->name, owning->owner.uid, owning->owner.gid, AT_SYMLINK_NOFOLLOW) < 0 &&
        errno != ENOENT) {
        owning->error = errno;
        owning->job->about = strdup(entry->path);
        return WALK_STOP;
    }
    return entry->type == DT_DIR ? WALK_INTO : WALK_ON;
}

static int own_blocked(struct walk *walk, const struct walk_entry *entry, int error)
{
    ((struct owning *)walk->data)->job->about = strdup(entry->path);
    return error;
}

static int own_tree(struct owning *owning, const char *path)
{
    struct walk walk = {.visit = own_entry, .blocked = own_blocked, .data = owning};
    int fd = walk_open(AT_FDCWD, path);
    if (fd < 0) /* not a directory: there is nothing below */
        return errno == ENOTDIR || errno == ELOOP ? 0 : errno;
    int error = walk_tree(&walk, fd);
    close(fd);
    return error ? error : owning->error;
}

static int run_chown(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    char *owner = fields_string(job->fields, TAG_OWNER);
    struct owning owning = {.job = job};
    if (!owner)
        return job_fail(job, EINVAL, "OWNER");
    int error = users_find(owner, &owning.owner);
    if (error)
        return job_fail(job, error, error == ENOENT ? "no such owner" : "owner");
    if (lchown(path, owning.owner.uid, owning.owner.gid) < 0)
        return job_fail(job, errno, path);
    return fields_int(job->fields, TAG_RECURSIVE, 0) == 1 ? own_tree(&owning, path) : 0;
}

const struct operation operation_chown = {.run = run_chown};
