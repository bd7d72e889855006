/* TAR_OUT: a tree as a pax archive. It runs in a worker.
 *
 * Owns which entries go into an archive and in which order. Not here: the bytes of a header (tarhead.c) and how trees
 * are walked (walk.c).
 *
 * The tree may change meanwhile. Entries that are gone are left out; a file has as many bytes as its header says,
 * truncated or filled with zeros.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "match.h"
#include "tar.h"
#include "tarhead.h"
#include "walk.h"

enum { MAX_NAME_BYTES = 65536, PAX_ROOM = 2 * MAX_NAME_BYTES + 512, FIRST_BUCKETS = 256, MAX_EXCLUDES = 256 };

/* What is left out. */
struct exclude {
    struct glob glob;
    bool by_path;   /* it has a slash, and is matched against the path; else against each name */
    size_t set_at; /* by_path: where its set is in a mark of the walk */
};

/* A file with several names, and the first of them. */
struct linked {
    struct linked *next;
    dev_t device;
    ino_t inode;
    char name[];
};

struct packing {
    struct job *job;
    const char *prefix; /* put before every path; "" or a name and a slash */
    struct linked **buckets;
    size_t bucket_count, linked_count;
    char *name;
    char *pax;
    int error;
    struct exclude *excludes;
    size_t exclude_count, mark_size;
    uint8_t *unused;
    int64_t excluded;
};

/* ---- bytes ---- */

static void put(struct packing *packing, const void *bytes, size_t size)
{
    struct job *job = packing->job;
    /* Through the buffer for records, so that small entries do not cost a system call each. */
    if (job->buffered + size > 2 * MAX_RECORD)
        job_flush(job);
    if (size > 2 * MAX_RECORD) {
        job_write(job, bytes, size);
        return;
    }
    memcpy(job->buffer + job->buffered, bytes, size);
    job->buffered += size;
}

static void put_padding(struct packing *packing, int64_t size)
{
    static const uint8_t zeros[TAR_BLOCK];
    if (size % TAR_BLOCK)
        put(packing, zeros, (size_t)(TAR_BLOCK - size % TAR_BLOCK));
}

static void put_zeros(struct packing *packing, int64_t size)
{
    static const uint8_t zeros[4096];
    for (; size > 0; size -= (int64_t)sizeof zeros)
        put(packing, zeros, size < (int64_t)sizeof zeros ? (size_t)size : sizeof zeros);
}

/* ---- headers ---- */

static size_t collect_pax(struct packing *packing, const struct tar_header *header, const char *name,
                          const char *target)
{
    char number[48];
    size_t size = 0;
    if (strlen(name) > 100)
        size = tar_put_pax(packing->pax, size, PAX_ROOM, "path", name, strlen(name));
    if (strlen(target) > 100)
        size = tar_put_pax(packing->pax, size, PAX_ROOM, "linkpath", target, strlen(target));
    if (header->size >= INT64_C(1) << 33)
        size = tar_put_pax(packing->pax, size, PAX_ROOM, "size", number,
                           (size_t)snprintf(number, sizeof number, "%lld", (long long)header->size));
    if (header->mtime_ns || header->mtime_s < 0 || header->mtime_s >= INT64_C(1) << 33)
        size = tar_put_pax(packing->pax, size, PAX_ROOM, "mtime", number,
                           (size_t)snprintf(number, sizeof number, "%lld.%09lld", (long long)header->mtime_s,
                                            (long long)header->mtime_ns));
    return size;
}

static void put_header(struct packing *packing, const struct tar_header *header, const char *name, const char *target,
                       const struct stat *status)
{
    uint8_t block[TAR_BLOCK], extension[TAR_BLOCK];
    if (!tar_format(block, header, name, target, status->st_uid, status->st_gid)) {
        size_t size = collect_pax(packing, header, name, target);
        struct tar_header pax = {.type = 'x', .size = (int64_t)size, .mode = 0644};
        tar_format(extension, &pax, "pax", "", 0, 0);
        put(packing, extension, sizeof extension);
        put(packing, packing->pax, size);
        put_padding(packing, (int64_t)size);
    }
    put(packing, block, sizeof block);
}

/* ---- files with several names ---- */

static size_t bucket_of(const struct packing *packing, dev_t device, ino_t inode)
{
    return (size_t)((inode * 0x9e3779b97f4a7c15ULL) ^ device) % packing->bucket_count;
}

static void grow_buckets(struct packing *packing)
{
    size_t old_count = packing->bucket_count;
    struct linked **old = packing->buckets;
    struct linked **grown = calloc(old_count ? old_count * 4 : FIRST_BUCKETS, sizeof *grown);
    if (!grown)
        return;
    packing->bucket_count = old_count ? old_count * 4 : FIRST_BUCKETS;
    packing->buckets = grown;
    for (size_t i = 0; i < old_count; i++)
        for (struct linked *at = old[i], *next; at; at = next) {
            next = at->next;
            size_t bucket = bucket_of(packing, at->device, at->inode);
            at->next = grown[bucket];
            grown[bucket] = at;
        }
    free(old);
}

/* The name under which this file is already in the archive, or NULL: then this name is recorded. */
static const char *first_name(struct packing *packing, const struct stat *status, const char *name)
{
    if (packing->linked_count >= packing->bucket_count)
        grow_buckets(packing);
    if (!packing->bucket_count)
        return NULL;
    size_t bucket = bucket_of(packing, status->st_dev, status->st_ino), size = strlen(name) + 1;
    for (struct linked *at = packing->buckets[bucket]; at; at = at->next)
        if (at->device == status->st_dev && at->inode == status->st_ino)
            return at->name;
    struct linked *linked = malloc(sizeof *linked + size);
    if (linked) {
        linked->device = status->st_dev;
        linked->inode = status->st_ino;
        memcpy(linked->name, name, size);
        linked->next = packing->buckets[bucket];
        packing->buckets[bucket] = linked;
        packing->linked_count++;
    }
    return NULL;
}

/* ---- entries ---- */

static struct tar_header header_of(char type, const struct stat *status, int64_t size)
{
    return (struct tar_header){
        .type = type,
        .size = size,
        .mode = status->st_mode & 07777,
        .mtime_s = status->st_mtim.tv_sec,
        .mtime_ns = status->st_mtim.tv_nsec,
    };
}

static int put_file(struct packing *packing, int directory, const char *file, const char *name)
{
    struct stat status;
    int fd = files_open_regular(directory, file, O_RDONLY | O_NOFOLLOW, 0, &status);
    if (fd < 0)
        return errno == ENOENT || errno == EINVAL || errno == EISDIR || errno == ELOOP ? 0 : errno;
    const char *first = status.st_nlink > 1 ? first_name(packing, &status, name) : NULL;
    struct tar_header header = header_of(first ? '1' : '0', &status, first ? 0 : status.st_size);
    put_header(packing, &header, name, first ? first : "", &status);
    int error = 0;
    if (!first && status.st_size) {
        int64_t sent = files_send(packing->job, fd, 0, status.st_size);
        if (sent < 0)
            error = errno;
        put_zeros(packing, status.st_size - (sent < 0 ? 0 : sent));
        put_padding(packing, status.st_size);
    }
    close(fd);
    return error;
}

static int put_link(struct packing *packing, int directory, const char *file, const char *name)
{
    struct stat status;
    char target[PATH_MAX];
    ssize_t size = readlinkat(directory, file, target, sizeof target - 1);
    if (size < 0 || fstatat(directory, file, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT || errno == EINVAL ? 0 : errno;
    target[size] = 0;
    struct tar_header header = header_of('2', &status, 0);
    put_header(packing, &header, name, target, &status);
    return 0;
}

static int put_directory(struct packing *packing, int directory, const char *file, char *name)
{
    struct stat status;
    if (fstatat(directory, file, &status, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? 0 : errno;
    struct tar_header header = header_of('5', &status, 0);
    strcat(name, "/");
    put_header(packing, &header, name, "", &status);
    return 0;
}

static int compile_excludes(struct packing *packing)
{
    struct job *job = packing->job;
    struct fields rest = job->fields;
    uint16_t tag;
    const uint8_t *value;
    uint32_t size;
    const char *reason;
    size_t count = fields_count(job->fields, TAG_EXCLUDE);
    if (!count)
        return 0;
    if (count > MAX_EXCLUDES)
        return job_fail(job, E2BIG, "EXCLUDE");
    if (!(packing->excludes = calloc(count, sizeof *packing->excludes)))
        return ENOMEM;
    while (fields_next(&rest, &tag, &value, &size)) {
        if (tag != TAG_EXCLUDE)
            continue;
        struct exclude *exclude = &packing->excludes[packing->exclude_count++];
        char *pattern = strndup((const char *)value, size);
        if (!pattern)
            return ENOMEM;
        int error = glob_compile(&exclude->glob, pattern, true, &reason);
        if (error)
            return job_fail(job, error, reason);
        exclude->by_path = strchr(pattern, '/') != NULL;
        exclude->set_at = packing->mark_size;
        packing->mark_size += exclude->by_path ? exclude->glob.set_size : 0;
    }
    packing->unused = malloc(packing->mark_size + 1);
    return packing->unused ? 0 : ENOMEM;
}

static bool matches_name(const struct glob *glob, const char *name)
{
    for (int i = 0; i < glob->count; i++)
        if (match_name(glob->components[i].pattern, glob->components[i].size, name))
            return true;
    return false;
}

static bool is_excluded(struct packing *packing, const struct walk_entry *entry)
{
    bool matched = false, is_directory = entry->type == DT_DIR;
    for (size_t i = 0; i < packing->exclude_count; i++) {
        struct exclude *exclude = &packing->excludes[i];
        if (exclude->by_path)
            matched |= glob_step(&exclude->glob, (uint8_t *)entry->mark + exclude->set_at, entry->name, is_directory,
                                 (uint8_t *)entry->child_mark + exclude->set_at, packing->unused);
        else
            matched |= matches_name(&exclude->glob, entry->name);
    }
    packing->excluded += matched;
    return matched;
}

static enum walk_answer put_entry(struct walk *walk, const struct walk_entry *entry)
{
    struct packing *packing = walk->data;
    if (is_excluded(packing, entry))
        return WALK_ON;
    if (strlen(packing->prefix) + entry->path_size + 2 > MAX_NAME_BYTES)
        packing->error = ENAMETOOLONG;
    else
        snprintf(packing->name, MAX_NAME_BYTES, "%s%s", packing->prefix, entry->path);
    if (!packing->error && entry->type == DT_DIR)
        packing->error = put_directory(packing, entry->directory, entry->name, packing->name);
    else if (!packing->error && entry->type == DT_REG)
        packing->error = put_file(packing, entry->directory, entry->name, packing->name);
    else if (!packing->error && entry->type == DT_LNK)
        packing->error = put_link(packing, entry->directory, entry->name, packing->name);
    if (packing->error) {
        packing->job->about = strdup(entry->path);
        return WALK_STOP;
    }
    return entry->type == DT_DIR ? WALK_INTO : WALK_ON;
}

static int stop_at(struct walk *walk, const struct walk_entry *entry, int error)
{
    ((struct packing *)walk->data)->job->about = strdup(entry->path);
    return error;
}

/* The last part of the path as a name in the archive; that of "/" or "." is ".". */
static const char *own_name(const char *path)
{
    char *copy = strdup(path);
    if (!copy)
        return ".";
    for (size_t size = strlen(copy); size > 1 && copy[size - 1] == '/'; size--)
        copy[size - 1] = 0;
    char *slash = strrchr(copy, '/');
    const char *name = slash ? slash + 1 : copy;
    return *name && strcmp(name, "..") ? name : ".";
}

static int pack_tree(struct packing *packing, const char *path, bool inside)
{
    struct walk walk = {.visit = put_entry, .blocked = stop_at, .data = packing};
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return job_fail(packing->job, errno, path);
    uint8_t *first = malloc(packing->mark_size + 1);
    if (!first)
        return ENOMEM;
    for (size_t i = 0; i < packing->exclude_count; i++)
        if (packing->excludes[i].by_path)
            glob_begin(&packing->excludes[i].glob, first + packing->excludes[i].set_at);
    walk.mark_size = packing->mark_size;
    walk.first_mark = first;
    packing->prefix = "";
    if (!inside) {
        char *prefix;
        strcpy(packing->name, own_name(path));
        int error = put_directory(packing, fd, ".", packing->name);
        if (error)
            return job_fail(packing->job, error, path);
        if (!(prefix = strdup(packing->name)))
            return ENOMEM;
        packing->prefix = prefix;
    }
    int error = walk_tree(&walk, fd);
    return error ? error : packing->error;
}

static int run_tar_out(struct job *job)
{
    const char *path = job_path(job, TAG_PATH);
    bool inside = fields_int(job->fields, TAG_INSIDE, 0) == 1;
    struct packing packing = {.job = job, .name = malloc(MAX_NAME_BYTES + 2), .pax = malloc(PAX_ROOM)};
    struct stat status;
    if (!packing.name || !packing.pax)
        return ENOMEM;
    int error = compile_excludes(&packing);
    if (error)
        return error;
    if (lstat(path, &status) < 0)
        return job_fail(job, errno, path);
    job_open_output(job);
    job_widen(job->out);
    /* With INSIDE, a symlink to a directory means that directory. */
    if (S_ISDIR(status.st_mode) || (inside && S_ISLNK(status.st_mode)))
        error = pack_tree(&packing, path, inside);
    else if (inside)
        error = job_fail(job, ENOTDIR, path);
    else if (S_ISREG(status.st_mode))
        error = job_fail(job, put_file(&packing, AT_FDCWD, path, own_name(path)), path);
    else if (S_ISLNK(status.st_mode))
        error = job_fail(job, put_link(&packing, AT_FDCWD, path, own_name(path)), path);
    else
        error = job_fail(job, EINVAL, "neither file, directory nor link");
    if (!error)
        put_zeros(&packing, 2 * TAR_BLOCK);
    if (!error && packing.exclude_count)
        pack_int(&job->result, TAG_COUNT, packing.excluded);
    return error;
}

const struct operation operation_tar_out = {.run = run_tar_out, .gives_output = true};
