/* TAR_IN: unpacking an archive that may be hostile. It runs in a worker.
 *
 * Owns the guarantee that nothing is written outside one directory. Not here: the bytes of a header (tarhead.c).
 *
 * Each name is walked component by component from the directory's descriptor, without following symlinks, and every
 * entry is created relative to the descriptor so reached: no name, no symlink of the archive's own, and no concurrent
 * change leads outside. An existing entry in the place of a file is unlinked, never written through.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "tar.h"
#include "tarhead.h"
#include "walk.h"

enum { CHUNK = 256 << 10, MAX_NAME_BYTES = 65536 };

/* A directory's mode and time are set last: a read-only one could not be filled, and filling it changes its time. */
struct late {
    struct late *next;
    mode_t mode;
    struct timespec mtime;
    char name[];
};

struct unpacking {
    struct job *job;
    int root;
    char *chunk;
    size_t start, size; /* the part of the chunk that was read and not consumed */
    bool wide;
    int64_t written, count;
    struct tar_override override;
    struct late *late;
};

/* ---- input ---- */

/* Bytes of the archive, at most `want`; NULL and *got = 0 at its end. */
static const char *take(struct unpacking *unpacking, size_t want, size_t *got)
{
    while (!unpacking->size) {
        ssize_t count = job_read(unpacking->job, unpacking->chunk, CHUNK);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0) {
            *got = 0;
            return NULL;
        }
        if (count >= 65536 && !unpacking->wide) {
            unpacking->wide = true;
            job_widen(unpacking->job->in);
        }
        unpacking->start = 0;
        unpacking->size = (size_t)count;
    }
    const char *at = unpacking->chunk + unpacking->start;
    *got = want < unpacking->size ? want : unpacking->size;
    unpacking->start += *got;
    unpacking->size -= *got;
    return at;
}

/* How many of `size` bytes there were. */
static size_t take_all(struct unpacking *unpacking, void *into, size_t size)
{
    size_t done = 0, got;
    const char *at;
    while (done < size && (at = take(unpacking, size - done, &got))) {
        if (into)
            memcpy((char *)into + done, at, got);
        done += got;
    }
    return done;
}

static int truncated(struct unpacking *unpacking)
{
    return job_fail(unpacking->job, EINVAL, "the archive is cut short");
}

static int skip(struct unpacking *unpacking, int64_t size)
{
    size_t got;
    for (; size > 0; size -= (int64_t)got)
        if (!take(unpacking, size < CHUNK ? (size_t)size : CHUNK, &got))
            return truncated(unpacking);
    return 0;
}

static int64_t padding(int64_t size)
{
    return (TAR_BLOCK - size % TAR_BLOCK) % TAR_BLOCK;
}

/* ---- places ---- */

static int refuse_name(struct unpacking *unpacking, const char *name)
{
    char *copy = strndup(name, 300);
    return job_fail(unpacking->job, EXDEV, copy);
}

/* The errno for a component that could not be entered: EXDEV for a symlink, which could lead outside. */
static int explain_blocked(struct unpacking *unpacking, int directory, const char *component, const char *name)
{
    int error = errno;
    struct stat status;
    if (fstatat(directory, component, &status, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(status.st_mode))
        return refuse_name(unpacking, name);
    return job_fail(unpacking->job, error, strdup(name));
}

/* Opens the parent directory of `name`, creating missing ones, and finds the last component. 0 or an errno. */
static int open_parent(struct unpacking *unpacking, const char *name, bool make, int *parent, char last[NAME_MAX + 1])
{
    if (!tar_name_is_safe(name))
        return refuse_name(unpacking, name);
    int directory = openat(unpacking->root, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0)
        return errno;
    last[0] = 0;
    for (const char *at = name; *at;) {
        size_t size = strcspn(at, "/");
        bool skipped = size == 0 || (size == 1 && *at == '.');
        if (size > NAME_MAX) {
            close(directory);
            return job_fail(unpacking->job, ENAMETOOLONG, NULL);
        }
        if (!skipped) {
            if (last[0]) {
                int inner = walk_open(directory, last);
                if (inner < 0 && errno == ENOENT && make && mkdirat(directory, last, 0755) == 0)
                    inner = walk_open(directory, last);
                if (inner < 0) {
                    int error = explain_blocked(unpacking, directory, last, name);
                    close(directory);
                    return error;
                }
                close(directory);
                directory = inner;
            }
            memcpy(last, at, size);
            last[size] = 0;
        }
        at += size;
        at += *at == '/';
    }
    *parent = directory;
    return 0;
}

/* Removes an existing entry that is not a directory. */
static int clear_place(int parent, const char *last)
{
    return unlinkat(parent, last, 0) < 0 && errno != ENOENT ? errno : 0;
}

/* Only root may set setuid and setgid. */
static mode_t mode_of(const struct tar_header *header)
{
    return (mode_t)(header->mode & (geteuid() == 0 ? 07777 : 0777));
}

static void set_time(int parent, const char *last, const struct tar_header *header)
{
    struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = header->mtime_s, .tv_nsec = header->mtime_ns}};
    utimensat(parent, last, times, AT_SYMLINK_NOFOLLOW);
}

/* ---- entries ---- */

static int copy_data(struct unpacking *unpacking, int fd, int64_t size)
{
    size_t got;
    while (size > 0) {
        const char *at = take(unpacking, size < CHUNK ? (size_t)size : CHUNK, &got);
        if (!at)
            return truncated(unpacking);
        for (size_t done = 0; done < got;) {
            ssize_t count = write(fd, at + done, got - done);
            if (count < 0 && errno != EINTR)
                return errno;
            done += count > 0 ? (size_t)count : 0;
        }
        size -= (int64_t)got;
        unpacking->written += (int64_t)got;
    }
    return 0;
}

static int make_file(struct unpacking *unpacking, int parent, const char *last, const struct tar_header *header)
{
    int error = clear_place(parent, last);
    if (error)
        return error;
    int fd = openat(parent, last, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno;
    error = copy_data(unpacking, fd, header->size);
    if (!error && fchmod(fd, mode_of(header)) < 0)
        error = errno;
    struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, {.tv_sec = header->mtime_s, .tv_nsec = header->mtime_ns}};
    futimens(fd, times);
    if (close(fd) < 0 && !error)
        error = errno;
    return error ? error : skip(unpacking, padding(header->size));
}

static int make_directory(struct unpacking *unpacking, int parent, const char *last, const struct tar_header *header,
                          const char *name)
{
    struct stat status;
    if (mkdirat(parent, last, 0700) < 0) {
        if (errno != EEXIST)
            return errno;
        if (fstatat(parent, last, &status, AT_SYMLINK_NOFOLLOW) < 0)
            return errno;
        if (S_ISLNK(status.st_mode))
            return refuse_name(unpacking, name);
        if (!S_ISDIR(status.st_mode))
            return ENOTDIR;
    }
    size_t size = strlen(name) + 1;
    struct late *late = malloc(sizeof *late + size);
    if (!late)
        return ENOMEM;
    late->mode = mode_of(header);
    late->mtime = (struct timespec){header->mtime_s, header->mtime_ns};
    memcpy(late->name, name, size);
    late->next = unpacking->late;
    unpacking->late = late;
    return 0;
}

static int make_symlink(int parent, const char *last, const struct tar_header *header, const char *target)
{
    int error = clear_place(parent, last);
    if (!error && symlinkat(target, parent, last) < 0)
        error = errno;
    if (!error)
        set_time(parent, last, header);
    return error;
}

static int make_hard_link(struct unpacking *unpacking, int parent, const char *last, const char *target)
{
    int other;
    char other_last[NAME_MAX + 1];
    int error = open_parent(unpacking, target, false, &other, other_last);
    if (error)
        return error;
    struct stat here, there;
    bool same = fstatat(parent, last, &here, AT_SYMLINK_NOFOLLOW) == 0 &&
                fstatat(other, other_last, &there, AT_SYMLINK_NOFOLLOW) == 0 && here.st_dev == there.st_dev &&
                here.st_ino == there.st_ino;
    /* Without AT_SYMLINK_FOLLOW: a hard link to a symlink is that symlink. */
    if (!same && !(error = clear_place(parent, last)) && linkat(other, other_last, parent, last, 0) < 0)
        error = errno;
    close(other);
    return error;
}

static int make_entry(struct unpacking *unpacking, const struct tar_header *header, const char *name,
                      const char *target)
{
    int parent;
    char last[NAME_MAX + 1];
    int error = open_parent(unpacking, name, true, &parent, last);
    if (error)
        return error;
    size_t length = strlen(name);
    bool is_directory = header->type == '5' || (header->type != '1' && header->type != '2' && name[length - 1] == '/');
    if (!last[0]) {
        error = skip(unpacking, header->size + padding(header->size)); /* "./": the directory itself is unchanged */
    } else {
        unpacking->count++;
        if (is_directory)
            error = make_directory(unpacking, parent, last, header, name);
        else if (header->type == '2')
            error = make_symlink(parent, last, header, target);
        else if (header->type == '1')
            error = make_hard_link(unpacking, parent, last, target);
        else
            error = make_file(unpacking, parent, last, header);
        if (!error && (is_directory || header->type == '1' || header->type == '2'))
            error = skip(unpacking, header->size + padding(header->size));
    }
    close(parent);
    if (error && !unpacking->job->about)
        job_fail(unpacking->job, error, strdup(name));
    return error;
}

/* ---- the archive ---- */

/* The payload of an extension header, NUL-terminated. */
static int take_extension(struct unpacking *unpacking, int64_t size, int64_t max_bytes, char **text)
{
    if (size < 0 || size > max_bytes)
        return job_fail(unpacking->job, EINVAL, "an extension header is too long");
    *text = malloc((size_t)size + 1);
    if (!*text)
        return ENOMEM;
    (*text)[size] = 0;
    if (take_all(unpacking, *text, (size_t)size) != (size_t)size)
        return truncated(unpacking);
    return skip(unpacking, padding(size));
}

static int take_pax(struct unpacking *unpacking, const struct tar_header *header)
{
    char *text = NULL;
    int error = take_extension(unpacking, header->size, TAR_MAX_EXTENSION_BYTES, &text);
    const char *wrong = error ? NULL : tar_parse_pax(text, (size_t)header->size, &unpacking->override);
    free(text);
    return wrong ? job_fail(unpacking->job, EINVAL, wrong) : error;
}

static int take_long_name(struct unpacking *unpacking, const struct tar_header *header, char **into)
{
    free(*into);
    *into = NULL;
    return take_extension(unpacking, header->size, MAX_NAME_BYTES, into);
}

static int take_entry(struct unpacking *unpacking, struct tar_header *header)
{
    struct tar_override *override = &unpacking->override;
    const char *name = override->name ? override->name : header->name;
    const char *target = override->target ? override->target : header->target;
    if (header->sparse || override->sparse)
        return job_fail(unpacking->job, EOPNOTSUPP, "sparse file");
    if (header->type && strchr("346", header->type))
        return job_fail(unpacking->job, EPERM, "device or pipe");
    if (header->type && !strchr("01257", header->type))
        return job_fail(unpacking->job, EINVAL, "unknown type of entry");
    if (override->has_size)
        header->size = override->size;
    if (override->has_mtime) {
        header->mtime_s = override->mtime_s;
        header->mtime_ns = override->mtime_ns;
    }
    if (header->size < 0 || header->size > INT64_MAX - TAR_BLOCK)
        return job_fail(unpacking->job, EINVAL, "size in a tar header");
    if (header->type == '1' || header->type == '2')
        header->size = 0; /* some writers store the target's size, without its bytes */
    int error = make_entry(unpacking, header, name, target);
    if (!error)
        tar_override_clear(override);
    return error;
}

static int take_block(struct unpacking *unpacking, const uint8_t *block)
{
    struct tar_header header;
    const char *wrong = tar_parse(block, &header);
    if (wrong)
        return job_fail(unpacking->job, EINVAL, wrong);
    switch (header.type) {
    case 'x':
        return take_pax(unpacking, &header);
    case 'g':
        return skip(unpacking, header.size + padding(header.size)); /* global headers, as git writes them */
    case 'L':
        return take_long_name(unpacking, &header, &unpacking->override.name);
    case 'K':
        return take_long_name(unpacking, &header, &unpacking->override.target);
    default:
        return take_entry(unpacking, &header);
    }
}

static int take_archive(struct unpacking *unpacking)
{
    uint8_t block[TAR_BLOCK];
    for (;;) {
        size_t got = take_all(unpacking, block, sizeof block);
        if (got == 0)
            return 0;
        if (got < sizeof block)
            return truncated(unpacking);
        if (tar_is_zero(block)) {
            take_all(unpacking, NULL, SIZE_MAX); /* the end marker; the rest is ignored */
            return 0;
        }
        int error = take_block(unpacking, block);
        if (error)
            return error;
    }
}

/* Innermost first, as they were created outermost first. Each path is walked again, with the same checks. */
static void dress_directories(struct unpacking *unpacking)
{
    const char *about = unpacking->job->about;
    for (struct late *late = unpacking->late; late; late = late->next) {
        int parent;
        char last[NAME_MAX + 1];
        if (open_parent(unpacking, late->name, false, &parent, last))
            continue;
        int fd = walk_open(parent, last);
        if (fd >= 0) {
            struct timespec times[2] = {{.tv_nsec = UTIME_NOW}, late->mtime};
            futimens(fd, times);
            fchmod(fd, late->mode);
            close(fd);
        }
        close(parent);
    }
    unpacking->job->about = about;
}

static int run_tar_in(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    struct unpacking unpacking = {.job = job, .chunk = malloc(CHUNK)};
    if (!unpacking.chunk)
        return ENOMEM;
    int error = files_make_directories(path, 0755);
    if (error)
        return job_fail(job, error, path);
    unpacking.root = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (unpacking.root < 0)
        return job_fail(job, errno, path);
    error = take_archive(&unpacking);
    dress_directories(&unpacking);
    pack_int(&job->result, TAG_SIZE, unpacking.written);
    pack_int(&job->result, TAG_COUNT, unpacking.count);
    return error;
}

const struct operation operation_tar_in = {.run = run_tar_in, .takes_input = true};
