/* WATCH: reports changes in a file, a directory or a tree. It runs in a worker until the host sends RESET.
 *
 * Owns inotify, and how a tree is followed while it grows and moves. Not here: how trees are walked (walk.c).
 *
 * Entries may be created in a new directory before it is watched. So each new directory is watched first and read then,
 * and the entries found are reported as created. Entries created after the watch are found twice, by reading and by the
 * kernel; the second is suppressed, until the kernel's queue has been empty once: from then on every event is new.
 */
#define _GNU_SOURCE
#include "watch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "files.h"
#include "walk.h"

enum {
    INTEREST = IN_CREATE | IN_MODIFY | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB |
               IN_DELETE_SELF | IN_MOVE_SELF,
    EVENTS_SIZE = 64 << 10,
    FIRST_SLOTS = 64,
};

/* A hash table of texts by text, or by number: watched directories, and entries already reported. */
struct slot {
    bool used;
    int number;
    char *text;
};

struct table {
    struct slot *slots;
    size_t count, cap;
};

struct watching {
    struct job *job;
    const char *root;
    bool recursive;
    int inotify;
    int root_number;
    struct table directories; /* by watch descriptor: the path below the root, "" for the root */
    struct table reported;    /* paths that were reported as created by reading a directory */
    int error;
    int last_number, last_change;
    char last_name[NAME_MAX + 1];
};

/* ---- the table ---- */

static uint64_t hash(int number, const char *text)
{
    uint64_t value = 1469598103934665603ULL ^ (unsigned)number;
    for (; text && *text; text++)
        value = (value ^ (unsigned char)*text) * 1099511628211ULL;
    return value * 0x9e3779b97f4a7c15ULL >> 20;
}

/* Directories are found by number alone, reported entries by number and text. */
static struct slot *lookup(struct table *table, int number, const char *text)
{
    for (size_t i = hash(number, text);; i++) {
        struct slot *slot = &table->slots[i & (table->cap - 1)];
        if (!slot->used || (slot->number == number && (!text || !strcmp(slot->text, text))))
            return slot;
    }
}

static bool make_room(struct table *table, bool by_text)
{
    if (table->count * 2 < table->cap)
        return true;
    struct table bigger = {.cap = table->cap ? table->cap * 2 : FIRST_SLOTS, .count = table->count};
    bigger.slots = calloc(bigger.cap, sizeof *bigger.slots);
    if (!bigger.slots)
        return false;
    for (size_t i = 0; i < table->cap; i++)
        if (table->slots[i].used)
            *lookup(&bigger, table->slots[i].number, by_text ? table->slots[i].text : NULL) = table->slots[i];
    free(table->slots);
    *table = bigger;
    return true;
}

/* Takes ownership of the text. */
static void store(struct table *table, int number, char *text, bool by_text)
{
    if (!text || !make_room(table, by_text)) {
        free(text);
        return;
    }
    struct slot *slot = lookup(table, number, by_text ? text : NULL);
    if (slot->used)
        free(slot->text);
    else
        table->count++;
    *slot = (struct slot){true, number, text};
}

static const char *find_directory(struct watching *watching, int number)
{
    if (!watching->directories.cap)
        return NULL;
    struct slot *slot = lookup(&watching->directories, number, NULL);
    return slot->used ? slot->text : NULL;
}

static void clear(struct table *table)
{
    for (size_t i = 0; i < table->cap; i++)
        if (table->slots[i].used)
            free(table->slots[i].text);
    free(table->slots);
    *table = (struct table){0};
}

/* Removes the entries at or below a path (of directories; NULL: the entry of that number). The table is rebuilt,
 * because linear probing forbids holes; this is rare. */
static void forget(struct watching *watching, const char *path, int number)
{
    struct table old = watching->directories, kept = {0};
    size_t size = path ? strlen(path) : 0;
    for (size_t i = 0; i < old.cap; i++) {
        struct slot *slot = &old.slots[i];
        if (!slot->used)
            continue;
        bool gone = path ? !strncmp(slot->text, path, size) && (!slot->text[size] || slot->text[size] == '/')
                         : slot->number == number;
        if (gone && path)
            inotify_rm_watch(watching->inotify, slot->number);
        if (gone)
            free(slot->text);
        else
            store(&kept, slot->number, slot->text, false);
    }
    free(old.slots);
    watching->directories = kept;
}

/* ---- reporting ---- */

static char *join(const char *base, const char *name)
{
    char *joined = NULL;
    if (!*base || !*name)
        return strdup(*base ? base : name);
    return asprintf(&joined, "%s/%s", base, name) < 0 ? NULL : joined;
}

static char *full_path(const struct watching *watching, const char *path)
{
    char *joined = NULL;
    if (!*path)
        return strdup(watching->root);
    return asprintf(&joined, "%s/%s", watching->root, path) < 0 ? NULL : joined;
}

static void report(struct watching *watching, int change, const char *path, int kind)
{
    struct job *job = watching->job;
    job_begin_record(job);
    pack_int(&job->record, TAG_CHANGE, change);
    pack_string(&job->record, TAG_NAME, path);
    if (kind)
        pack_int(&job->record, TAG_KIND, kind);
    job_end_record(job);
}

static int kind_now(const struct watching *watching, const char *path, bool is_directory)
{
    struct stat status;
    char *full = full_path(watching, path);
    int kind = is_directory ? KIND_DIRECTORY : KIND_FILE;
    if (full && lstat(full, &status) == 0)
        kind = files_kind(status.st_mode);
    free(full);
    return kind;
}

/* ---- watching ---- */

/* The watch descriptor, or -1 and errno. */
static int watch_directory(struct watching *watching, const char *path)
{
    char *full = full_path(watching, path);
    if (!full)
        return -1;
    int number = inotify_add_watch(watching->inotify, full, INTEREST | (*path ? IN_DONT_FOLLOW | IN_ONLYDIR : 0));
    int error = errno;
    free(full);
    if (number >= 0)
        store(&watching->directories, number, strdup(path), false);
    errno = error;
    return number;
}

/* Reading a directory that is watched from now on. */
struct reading {
    struct watching *watching;
    const char *base;
    bool quiet; /* its entries existed before: not reported */
};

static enum walk_answer found(struct walk *walk, const struct walk_entry *entry)
{
    struct reading *reading = walk->data;
    struct watching *watching = reading->watching;
    char *path = join(reading->base, entry->path);
    if (!path)
        return WALK_STOP;
    if (!reading->quiet) {
        static const unsigned char kinds[] = {
            [DT_REG] = KIND_FILE,  [DT_DIR] = KIND_DIRECTORY, [DT_LNK] = KIND_SYMLINK,
            [DT_FIFO] = KIND_FIFO, [DT_SOCK] = KIND_SOCKET,   [DT_CHR] = KIND_CHAR_DEVICE,
            [DT_BLK] = KIND_BLOCK_DEVICE,
        };
        report(watching, CHANGE_CREATED, path, entry->type < sizeof kinds ? kinds[entry->type] : KIND_FILE);
        store(&watching->reported, 0, strdup(path), true);
    }
    enum walk_answer answer = WALK_ON;
    if (entry->type == DT_DIR && watching->recursive) {
        /* Watched before it is read: the walk opens it after this returns. */
        if (watch_directory(watching, path) < 0 && errno == ENOSPC)
            watching->error = ENOSPC;
        answer = watching->error ? WALK_STOP : WALK_INTO;
    }
    free(path);
    return answer;
}

static void read_directory(struct watching *watching, const char *path, bool quiet)
{
    struct reading reading = {.watching = watching, .base = path, .quiet = quiet};
    struct walk walk = {.visit = found, .data = &reading};
    char *full = full_path(watching, path);
    int fd = !full ? -1 : *path ? walk_open(AT_FDCWD, full) : open(full, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    free(full);
    if (fd < 0)
        return;
    walk_tree(&walk, fd);
    close(fd);
}

static void follow(struct watching *watching, const char *path)
{
    if (watch_directory(watching, path) >= 0)
        read_directory(watching, path, false);
    else if (errno == ENOSPC)
        watching->error = ENOSPC;
}

/* The queue overflowed or watches ran out: it is unknown what was missed. */
static void lost(struct watching *watching)
{
    watching->error = 0;
    if (watching->recursive)
        read_directory(watching, "", true);
    watching->error = 0;
    report(watching, CHANGE_LOST, "", 0);
}

/* ---- events ---- */

static int change_of(uint32_t mask)
{
    if (mask & IN_CREATE)
        return CHANGE_CREATED;
    if (mask & (IN_MODIFY | IN_CLOSE_WRITE))
        return CHANGE_MODIFIED;
    if (mask & (IN_DELETE | IN_DELETE_SELF))
        return CHANGE_DELETED;
    if (mask & (IN_MOVED_FROM | IN_MOVE_SELF))
        return CHANGE_MOVED_FROM;
    if (mask & IN_MOVED_TO)
        return CHANGE_MOVED_TO;
    return CHANGE_ATTRIBUTES;
}

static bool was_reported(struct watching *watching, const char *path)
{
    return watching->reported.cap && lookup(&watching->reported, 0, path)->used;
}

/* Consecutive writes are reported as one modification. */
static bool is_repetition(struct watching *watching, const struct inotify_event *event, int change)
{
    const char *name = event->len ? event->name : "";
    bool same = change == CHANGE_MODIFIED && watching->last_change == change && watching->last_number == event->wd &&
                !strcmp(watching->last_name, name) && !(event->mask & IN_CLOSE_WRITE);
    watching->last_change = change;
    watching->last_number = event->wd;
    snprintf(watching->last_name, sizeof watching->last_name, "%s", name);
    return same;
}

static void take_named(struct watching *watching, const struct inotify_event *event, const char *path)
{
    int change = change_of(event->mask);
    bool is_directory = event->mask & IN_ISDIR;
    if (is_repetition(watching, event, change))
        return;
    if (change == CHANGE_CREATED && was_reported(watching, path))
        return;
    bool is_gone = change == CHANGE_DELETED || change == CHANGE_MOVED_FROM;
    int kind = is_directory ? KIND_DIRECTORY : is_gone ? KIND_FILE : kind_now(watching, path, false);
    report(watching, change, path, kind);
    if (!is_directory || !watching->recursive)
        return;
    if (change == CHANGE_MOVED_FROM)
        forget(watching, path, 0);
    else if (change == CHANGE_CREATED || change == CHANGE_MOVED_TO)
        follow(watching, path);
}

static void take_event(struct watching *watching, const struct inotify_event *event)
{
    if (event->mask & IN_Q_OVERFLOW) {
        lost(watching);
        return;
    }
    if (event->mask & IN_IGNORED) {
        forget(watching, NULL, event->wd);
        return;
    }
    const char *base = find_directory(watching, event->wd);
    bool about_itself = event->mask & (IN_DELETE_SELF | IN_MOVE_SELF) || !event->len;
    if (!base || (about_itself && event->wd != watching->root_number))
        return; /* moved away meanwhile, or reported by the directory above it */
    char *path = join(base, event->len ? event->name : "");
    if (path)
        take_named(watching, event, path);
    free(path);
    if (watching->error)
        lost(watching);
}

static int take_events(struct watching *watching)
{
    static char buffer[EVENTS_SIZE] __attribute__((aligned(__alignof__(struct inotify_event))));
    ssize_t size = read(watching->inotify, buffer, sizeof buffer);
    if (size < 0 && errno == EAGAIN) {
        clear(&watching->reported);
        job_flush(watching->job);
        poll(&(struct pollfd){.fd = watching->inotify, .events = POLLIN}, 1, -1);
        return 0;
    }
    if (size < 0)
        return errno == EINTR ? 0 : errno;
    watching->last_change = -1;
    for (ssize_t at = 0; at < size;) {
        const struct inotify_event *event = (const void *)(buffer + at);
        at += (ssize_t)(sizeof *event + event->len);
        take_event(watching, event);
    }
    return 0;
}

static int run_watch(struct job *job)
{
    struct watching *watching = calloc(1, sizeof *watching);
    if (!watching)
        return ENOMEM;
    watching->job = job;
    watching->root = job_path(job, TAG_PATH);
    watching->recursive = fields_int(job->fields, TAG_RECURSIVE, 0) == 1;
    watching->inotify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    if (watching->inotify < 0)
        return job_fail(job, errno, "inotify");
    watching->root_number = watch_directory(watching, "");
    if (watching->root_number < 0)
        return job_fail(job, errno, watching->root);
    if (watching->recursive)
        read_directory(watching, "", true);
    if (watching->error)
        return job_fail(job, watching->error, "too many directories to watch");
    report(watching, CHANGE_READY, "", 0);
    for (;;) {
        int error = take_events(watching);
        if (error)
            return error;
    }
}

const struct operation operation_watch = {.run = run_watch, .gives_output = true};
