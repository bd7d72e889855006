/* Walking directory trees of any depth and width.
 *
 * Owns how a walk stays inside a tree that changes meanwhile, in byte order, without recursion and with few
 * descriptors. Not here: what the visitor looks for.
 *
 * Only the innermost directories are held open. The way back up is "..", and it is accepted only if it leads to the
 * directory that the walk came from. Behind a symlink ".." leads elsewhere, so such a directory keeps its parent open.
 */
#define _GNU_SOURCE
#include "walk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { HELD_OPEN = 16, MAX_PATH_BYTES = 60000, READ_SIZE = 32 << 10 };

struct level {
    int fd;        /* -1: closed, to be found again through ".." */
    bool pinned;   /* must stay open: the level below was reached through a symlink */
    dev_t device;
    ino_t inode;
    char *names;   /* each: a byte of type, then the name and its NUL */
    char **sorted;
    size_t count, next;
    size_t path_size;
    void *mark;
};

struct state {
    struct walk *walk;
    struct level *levels;
    size_t depth, cap;
    char *path;
    size_t path_cap;
    char *buffer;
};

/* The kernel's layout (getdents64). */
struct raw_entry {
    uint64_t inode;
    int64_t offset;
    unsigned short size;
    unsigned char type;
    char name[];
};

unsigned char walk_type(mode_t mode)
{
    return (unsigned char)((mode & S_IFMT) >> 12);
}

static int compare(const void *left, const void *right)
{
    return strcmp(*(char *const *)left + 1, *(char *const *)right + 1);
}

static int index_names(struct level *level)
{
    level->sorted = malloc((level->count + 1) * sizeof *level->sorted);
    if (!level->sorted)
        return ENOMEM;
    char *at = level->names;
    for (size_t i = 0; i < level->count; i++) {
        level->sorted[i] = at;
        at += strlen(at + 1) + 2;
    }
    if (level->count)
        qsort(level->sorted, level->count, sizeof *level->sorted, compare);
    return 0;
}

static int read_names(struct level *level, char *buffer)
{
    size_t size = 0, cap = 0;
    for (;;) {
        long got = syscall(SYS_getdents64, level->fd, buffer, READ_SIZE);
        if (got < 0)
            return errno;
        if (got == 0)
            return index_names(level);
        for (long at = 0; at < got;) {
            const struct raw_entry *raw = (const void *)(buffer + at);
            at += raw->size;
            if (!strcmp(raw->name, ".") || !strcmp(raw->name, ".."))
                continue;
            size_t length = strlen(raw->name);
            if (cap - size < length + 2) {
                cap = cap ? cap * 2 : 4096;
                char *names = realloc(level->names, cap);
                if (!names)
                    return ENOMEM;
                level->names = names;
            }
            /* DT_UNKNOWN is stored, and resolved when the entry is visited. */
            level->names[size] = (char)raw->type;
            memcpy(level->names + size + 1, raw->name, length + 1);
            size += length + 2;
            level->count++;
        }
    }
}

static void free_level(struct level *level)
{
    if (level->fd >= 0)
        close(level->fd);
    free(level->names);
    free(level->sorted);
    free(level->mark);
}

/* Takes ownership of the descriptor. */
static int push(struct state *state, int fd, size_t path_size, const void *mark)
{
    if (state->depth == state->cap) {
        size_t cap = state->cap ? state->cap * 2 : 16;
        struct level *levels = realloc(state->levels, cap * sizeof *levels);
        if (!levels) {
            close(fd);
            return ENOMEM;
        }
        state->levels = levels;
        state->cap = cap;
    }
    struct level *level = &state->levels[state->depth];
    *level = (struct level){.fd = fd, .path_size = path_size};
    struct stat status;
    int error = fstat(fd, &status) < 0 ? errno : 0;
    if (!error && state->walk->mark_size) {
        if ((level->mark = malloc(state->walk->mark_size)))
            memcpy(level->mark, mark, state->walk->mark_size);
        else
            error = ENOMEM;
    }
    if (!error)
        error = read_names(level, state->buffer);
    if (error) {
        free_level(level);
        return error;
    }
    level->device = status.st_dev;
    level->inode = status.st_ino;
    state->depth++;
    if (state->depth > HELD_OPEN) {
        struct level *outer = &state->levels[state->depth - 1 - HELD_OPEN];
        if (!outer->pinned && outer->fd >= 0) {
            close(outer->fd);
            outer->fd = -1;
        }
    }
    return 0;
}

static int reopen_above(struct state *state)
{
    struct level *inner = &state->levels[state->depth - 1], *outer = inner - 1;
    struct stat status;
    if (outer->fd >= 0)
        return 0;
    int fd = openat(inner->fd, "..", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return errno;
    if (fstat(fd, &status) < 0 || status.st_dev != outer->device || status.st_ino != outer->inode) {
        close(fd);
        return ESTALE; /* the directory was moved while we were in it */
    }
    outer->fd = fd;
    return 0;
}

static int put_path(struct state *state, size_t base, const char *name, size_t *size)
{
    size_t length = strlen(name), slash = base > 0;
    *size = base + slash + length;
    if (*size > MAX_PATH_BYTES)
        return ENAMETOOLONG;
    if (*size + 1 > state->path_cap) {
        size_t cap = state->path_cap ? state->path_cap * 2 : 512;
        while (cap < *size + 1)
            cap *= 2;
        char *path = realloc(state->path, cap);
        if (!path)
            return ENOMEM;
        state->path = path;
        state->path_cap = cap;
    }
    if (slash)
        state->path[base] = '/';
    memcpy(state->path + base + slash, name, length + 1);
    return 0;
}

static int pop(struct state *state)
{
    struct walk *walk = state->walk;
    struct level *level = &state->levels[state->depth - 1];
    int error = 0;
    if (state->depth > 1) {
        error = reopen_above(state);
        level = &state->levels[state->depth - 1];
        if (!error && walk->leave) {
            struct level *outer = level - 1;
            error = walk->leave(walk, outer->fd, outer->sorted[outer->next - 1] + 1);
        }
    }
    free_level(level);
    state->depth--;
    if (state->depth)
        state->levels[state->depth - 1].pinned = false;
    return error;
}

/* gVisor of 2022 follows a link when O_DIRECTORY and O_NOFOLLOW are given together. */
static bool follows_links(void)
{
    static int answer = -1;
    if (answer < 0) {
        int fd = open("/proc/self", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        answer = fd >= 0;
        if (fd >= 0)
            close(fd);
    }
    return answer;
}

int walk_open(int at, const char *name)
{
    const int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK;
    if (!follows_links())
        return openat(at, name, flags | O_NOFOLLOW);
    int place = openat(at, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (place < 0)
        return -1;
    int fd = openat(place, ".", flags), error = errno;
    close(place);
    errno = error;
    return fd;
}

static int enter(struct state *state, const struct walk_entry *entry, bool through)
{
    struct walk *walk = state->walk;
    int fd = through ? openat(entry->directory, entry->name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK)
                     : walk_open(entry->directory, entry->name);
    int error = fd < 0 ? errno : 0;
    if (!error) {
        state->levels[state->depth - 1].pinned = through && entry->type == DT_LNK;
        error = push(state, fd, entry->path_size, entry->child_mark);
    }
    if (error == ENOMEM || !error)
        return error;
    /* A symlink, or no longer a directory: skipped. */
    if (error == ENOTDIR || error == ELOOP || error == ENOENT)
        return 0;
    return walk->blocked ? walk->blocked(walk, entry, error) : 0;
}

static int visit_next(struct state *state, void *child_mark, bool *stop)
{
    struct walk *walk = state->walk;
    struct level *level = &state->levels[state->depth - 1];
    char *item = level->sorted[level->next++];
    struct walk_entry entry = {
        .directory = level->fd,
        .name = item + 1,
        .type = (unsigned char)item[0],
        .mark = level->mark,
        .child_mark = child_mark,
    };
    struct stat status;
    if (entry.type == DT_UNKNOWN) {
        if (fstatat(level->fd, entry.name, &status, AT_SYMLINK_NOFOLLOW) < 0)
            return 0; /* removed meanwhile */
        entry.type = walk_type(status.st_mode);
    }
    int error = put_path(state, level->path_size, entry.name, &entry.path_size);
    entry.path = state->path;
    if (error)
        return error == ENAMETOOLONG && walk->blocked ? walk->blocked(walk, &entry, error) : error;
    switch (walk->visit(walk, &entry)) {
    case WALK_INTO:
        return entry.type == DT_DIR ? enter(state, &entry, false) : 0;
    case WALK_THROUGH:
        return entry.type == DT_DIR || entry.type == DT_LNK ? enter(state, &entry, true) : 0;
    case WALK_STOP:
        *stop = true;
        return 0;
    default:
        return 0;
    }
}

int walk_tree(struct walk *walk, int directory)
{
    struct state state = {.walk = walk};
    bool stop = false;
    void *child_mark = walk->mark_size ? malloc(walk->mark_size) : NULL;
    int fd = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC); /* with a read position of its own */
    state.buffer = malloc(READ_SIZE);
    int error = fd < 0 ? errno : !state.buffer || (walk->mark_size && !child_mark) ? ENOMEM : 0;
    if (!error)
        error = push(&state, fd, 0, walk->first_mark);
    while (!error && !stop && state.depth) {
        struct level *level = &state.levels[state.depth - 1];
        error = level->next < level->count ? visit_next(&state, child_mark, &stop) : pop(&state);
    }
    while (state.depth)
        free_level(&state.levels[--state.depth]);
    free(state.levels);
    free(state.buffer);
    free(child_mark);
    walk->stuck_at = error ? state.path : NULL; /* not freed: a worker rarely serves on after an error */
    if (!error)
        free(state.path);
    return error;
}
