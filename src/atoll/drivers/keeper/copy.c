/* A copy of what a sandbox has written, while it stands still.
 *
 * Knows: every kind of file that can be in an upper directory of an overlay, whiteouts and opaque directories among
 * them. Refuses to know: layers, checkpoints, who may see the copy.
 *
 * What is copied is hostile: no link is followed, every name is taken relative to a directory that is held open, and
 * what is opened is what was looked at. Data is shared where the file system can (FICLONE), and holes stay holes. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "keeper.h"

enum { DEEPEST = 4000, BUCKETS = 4096, LARGEST_LIST = 65536, PIECE = 1 << 30 };

/* Files with several names: where the first copy is. */
struct twin {
    struct twin *next;
    ino_t inode;
    char path[];
};

static struct twin *twins[BUCKETS];
static int target_root;
static char path[PATH_MAX * 4]; /* of what is being copied, for messages and twins */
static size_t path_length;

static void fail(const char *what)
{
    static char message[sizeof path + 64];
    snprintf(message, sizeof message, "copying %s: %s", path_length ? path : ".", what);
    give_up(message);
}

static void copy_attributes(int source, int target)
{
    static char names[LARGEST_LIST], value[LARGEST_LIST];
    ssize_t size = flistxattr(source, names, sizeof names);
    if (size < 0 && errno != EOPNOTSUPP)
        fail("extended attributes");
    for (char *name = names; size > 0 && name < names + size; name += strlen(name) + 1) {
        ssize_t length = fgetxattr(source, name, value, sizeof value);
        if (length < 0 && errno == ENODATA)
            continue;
        if (length < 0 || fsetxattr(target, name, value, (size_t)length, 0) < 0)
            fail(name);
    }
}

static void finish(int source, int target, const struct stat *status)
{
    const struct timespec times[] = {status->st_atim, status->st_mtim};
    if (fchown(target, status->st_uid, status->st_gid) < 0)
        fail("owner");
    copy_attributes(source, target); /* after the owner, who takes capabilities away; before the mode, which may forbid it */
    if (fchmod(target, status->st_mode & 07777) < 0)
        fail("mode");
    if (futimens(target, times) < 0)
        fail("times");
}

static void copy_data(int source, int target, off_t size)
{
    if (ioctl(target, FICLONE, source) == 0)
        return;
    if (ftruncate(target, size) < 0)
        fail("size");
    for (off_t at = 0; at < size;) {
        off_t data = lseek(source, at, SEEK_DATA);
        if (data < 0 && errno == ENXIO)
            return; /* nothing but a hole */
        off_t end = data < 0 ? size : lseek(source, data, SEEK_HOLE);
        off_t from = data < 0 ? at : data, to = from;
        while (from < end) {
            ssize_t count = copy_file_range(source, &from, target, &to, end - from < PIECE ? (size_t)(end - from) : PIECE, 0);
            if (count < 0)
                fail("data");
            if (count == 0)
                return;
        }
        at = end;
    }
}

static struct twin **find_twin(ino_t inode)
{
    struct twin **at = &twins[inode % BUCKETS];
    while (*at && (*at)->inode != inode)
        at = &(*at)->next;
    return at;
}

static void copy_file(int from, int to, const char *name, const struct stat *seen)
{
    struct twin **twin = seen->st_nlink > 1 ? find_twin(seen->st_ino) : NULL;
    if (twin && *twin) {
        if (linkat(target_root, (*twin)->path, to, name, 0) < 0)
            fail("link");
        return;
    }
    struct stat status;
    int source = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOATIME | O_CLOEXEC);
    if (source < 0 && errno == EPERM)
        source = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (source < 0 || fstat(source, &status) < 0)
        fail("open");
    if (!S_ISREG(status.st_mode)) {
        errno = ESTALE;
        fail("it changed meanwhile");
    }
    int target = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (target < 0)
        fail("create");
    copy_data(source, target, status.st_size);
    finish(source, target, &status);
    close(source);
    close(target);
    if (twin && path_length < PATH_MAX) {
        *twin = malloc(sizeof **twin + path_length + 1);
        if (!*twin)
            fail("memory");
        **twin = (struct twin){.inode = seen->st_ino};
        memcpy((*twin)->path, path, path_length + 1);
    }
}

static void copy_link(int from, int to, const char *name, const struct stat *status)
{
    char target[PATH_MAX + 1];
    const struct timespec times[] = {status->st_atim, status->st_mtim};
    ssize_t size = readlinkat(from, name, target, sizeof target - 1);
    if (size < 0)
        fail("link");
    target[size] = 0;
    if (symlinkat(target, to, name) < 0 || fchownat(to, name, status->st_uid, status->st_gid, AT_SYMLINK_NOFOLLOW) < 0 ||
        utimensat(to, name, times, AT_SYMLINK_NOFOLLOW) < 0)
        fail("link");
}

static void copy_node(int from, int to, const char *name, const struct stat *status)
{
    (void)from;
    /* A device can only be a whiteout: nobody inside may make another. */
    if (S_ISBLK(status->st_mode) || (S_ISCHR(status->st_mode) && status->st_rdev != makedev(0, 0))) {
        errno = EPERM;
        fail("a device");
    }
    if (mknodat(to, name, status->st_mode & ~07777U, makedev(0, 0)) < 0 ||
        fchownat(to, name, status->st_uid, status->st_gid, AT_SYMLINK_NOFOLLOW) < 0)
        fail("node");
    if (!S_ISCHR(status->st_mode) && fchmodat(to, name, status->st_mode & 07777, 0) < 0)
        fail("mode");
}

static void copy_directory(int source, int target, int depth);

static void copy_entry(int from, int to, const char *name, int depth)
{
    struct stat status;
    if (fstatat(from, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        fail("stat");
    if (S_ISREG(status.st_mode)) {
        copy_file(from, to, name, &status);
    } else if (S_ISLNK(status.st_mode)) {
        copy_link(from, to, name, &status);
    } else if (!S_ISDIR(status.st_mode)) {
        copy_node(from, to, name, &status);
    } else {
        int source = openat(from, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (source < 0 || mkdirat(to, name, 0700) < 0)
            fail("directory");
        int target = openat(to, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (target < 0)
            fail("directory");
        copy_directory(source, target, depth + 1);
        close(target);
    }
}

/* Takes `source` over. */
static void copy_directory(int source, int target, int depth)
{
    struct stat status;
    struct dirent *entry;
    if (depth > DEEPEST) {
        errno = ELOOP;
        fail("too deep");
    }
    DIR *list = fstat(source, &status) == 0 ? fdopendir(source) : NULL;
    if (!list)
        fail("list");
    size_t length = path_length;
    while (errno = 0, (entry = readdir(list))) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (length + strlen(entry->d_name) + 2 > sizeof path) {
            errno = ENAMETOOLONG;
            fail(entry->d_name);
        }
        path_length = length + (size_t)sprintf(path + length, "%s%s", length ? "/" : "", entry->d_name);
        copy_entry(source, target, entry->d_name, depth);
        path_length = length;
        path[length] = 0;
    }
    if (errno)
        fail("list");
    finish(source, target, &status);
    closedir(list);
}

void copy_tree(const char *source, const char *target)
{
    /* Two descriptors for each level of directories. */
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    int from = open(source, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (from < 0)
        give_up(source);
    if (mkdir(target, 0700) < 0)
        give_up(target);
    target_root = open(target, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (target_root < 0)
        give_up(target);
    copy_directory(from, target_root, 0);
}
