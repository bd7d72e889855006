/* What gVisor cannot save: processes that hold a deleted file or directory, an io_uring, or a message queue.
 *
 * Owns what to look for in /proc, and where. Not here: processes that wait with epoll (tree.c). It is no operation of
 * PID 1 but a program of its own, `atoll-guest --unsavable`, which the driver starts from outside with CAP_SYS_PTRACE:
 * gVisor shows the working directory and the root of a process to no other process.
 *
 * Deleted files on a tmpfs, memfds and shared memory are saved. Those of the layers are not: gVisor opens files anew by
 * their paths when it resumes, and such a file has none. Its mounts of the layers have the type 9p.
 *
 * Each thread is looked at: it may have a table of descriptors and a working directory of its own (unshare).
 *
 * Output: per process a line PID, tab, what it holds, tab, its command; at most MAX_FOUND lines. */
#define _GNU_SOURCE
#include "unsavable.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

enum { MAX_FOUND = 4, MAX_SHOWN = 200, MAX_DEVICES = 64, MAX_PATH = 256 << 10 };

static const char DELETED[] = " (deleted)";
static dev_t devices[MAX_DEVICES]; /* of the mounts of layers */
static int device_count;
static dev_t namespaces; /* of descriptors of namespaces, which have no path either, and are saved */
static char target[MAX_PATH]; /* what was read last; a path may be longer than PATH_MAX */

/* The text after `count` words of a line, without the spaces before it. sscanf would add 100 kB to the guest. */
static char *after_words(char *line, int count)
{
    for (line += strspn(line, " "); count > 0; count--) {
        line += strcspn(line, " ");
        line += strspn(line, " ");
    }
    return line;
}

static dev_t parse_device(const char *text, int base)
{
    char *end;
    unsigned long high = strtoul(text, &end, base);
    return makedev(high, *end == ':' ? strtoul(end + 1, NULL, base) : 0);
}

static void read_devices(void)
{
    struct stat status;
    if (stat("/proc/self/ns/net", &status) == 0)
        namespaces = status.st_dev;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    static char line[8192];
    while (mounts && device_count < MAX_DEVICES && fgets(line, sizeof line, mounts))
        if (strstr(line, " - 9p "))
            devices[device_count++] = parse_device(after_words(line, 2), 10);
    if (mounts)
        fclose(mounts);
}

static bool is_layer(dev_t device)
{
    for (int i = 0; i < device_count; i++)
        if (devices[i] == device)
            return true;
    return false;
}

/* Whether `target` names a deleted file of a layer. A file that exists may have a name that ends in the same word. */
static bool is_deleted(dev_t device, ino_t inode)
{
    size_t size = strlen(target), suffix = sizeof DELETED - 1;
    struct stat there;
    if (size <= suffix || strcmp(target + size - suffix, DELETED) || !is_layer(device))
        return false;
    return stat(target, &there) < 0 || there.st_dev != device || there.st_ino != inode;
}

static const char *held_by_link(const char *path, bool queues)
{
    struct stat held = {0};
    ssize_t size = readlink(path, target, sizeof target - 1);
    if (size <= 0)
        return NULL;
    target[size] = 0;
    if (!strcmp(target, "anon_inode:[io_uring]"))
        return "an io_uring";
    bool deleted = (size_t)size >= sizeof DELETED && !strcmp(target + size - (sizeof DELETED - 1), DELETED);
    if (!deleted && strcmp(target, "/"))
        return NULL;
    if (stat(path, &held) < 0)
        return NULL;
    if (queues && !deleted && !S_ISDIR(held.st_mode) && held.st_dev != namespaces)
        return "a message queue";
    return deleted && is_deleted(held.st_dev, held.st_ino) ? target : NULL;
}

static const char *held_by_maps(pid_t pid)
{
    char path[40];
    snprintf(path, sizeof path, "/proc/%d/maps", pid);
    FILE *maps = fopen(path, "re");
    char *line = NULL;
    size_t cap = 0;
    const char *found = NULL;
    while (maps && !found && getline(&line, &cap, maps) > 0) {
        line[strcspn(line, "\n")] = 0;
        char *name = after_words(line, 5);
        snprintf(target, sizeof target, "%s", name);
        if (is_deleted(parse_device(after_words(line, 3), 16), (ino_t)strtoull(after_words(line, 4), NULL, 10)))
            found = target;
    }
    free(line);
    if (maps)
        fclose(maps);
    return found;
}

/* What a process, or one thread of it, holds by a descriptor or a link in its directory in /proc. */
static const char *held_in(const char *directory, bool queues)
{
    static const char *const links[] = {"cwd", "root", "exe"};
    char path[96];
    const char *found = NULL;
    for (size_t i = 0; i < sizeof links / sizeof *links && !found; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, links[i]);
        found = held_by_link(path, queues);
    }
    snprintf(path, sizeof path, "%s/fd", directory);
    DIR *list = found ? NULL : opendir(path);
    struct dirent *entry;
    while (list && !found && (entry = readdir(list))) {
        if (entry->d_name[0] == '.')
            continue;
        snprintf(path, sizeof path, "%s/fd/%.20s", directory, entry->d_name);
        found = held_by_link(path, queues);
    }
    if (list)
        closedir(list);
    return found;
}

/* What a process holds that cannot be saved, in words or as a path with DELETED; NULL: nothing. */
static const char *held_by(pid_t pid, bool queues)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d", pid);
    const char *found = held_in(path, queues);
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR *threads = found ? NULL : opendir(path);
    struct dirent *entry;
    while (threads && !found && (entry = readdir(threads))) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == pid)
            continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.20s", pid, entry->d_name);
        found = held_in(path, queues);
    }
    if (threads)
        closedir(threads);
    return found ? found : held_by_maps(pid);
}

static void show(pid_t pid, const char *holding)
{
    char path[40], command[MAX_SHOWN] = "", shown[MAX_SHOWN];
    snprintf(path, sizeof path, "/proc/%d/cmdline", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? 0 : read(fd, command, sizeof command - 1);
    if (fd >= 0)
        close(fd);
    while (size > 0 && !command[size - 1])
        size--;
    command[size > 0 ? size : 0] = 0;
    for (ssize_t i = 0; i < size; i++)
        if ((unsigned char)command[i] < ' ')
            command[i] = ' ';
    snprintf(shown, sizeof shown, "%s", holding);
    for (char *at = shown; *at; at++)
        if ((unsigned char)*at < ' ')
            *at = '?';
    dprintf(STDOUT_FILENO, "%d\t%s\t%s\n", pid, shown, command);
}

int list_unsavable(bool queues)
{
    prctl(PR_SET_DUMPABLE, 0);
    read_devices();
    DIR *list = opendir("/proc");
    struct dirent *entry;
    int found = 0;
    while (list && found < MAX_FOUND && (entry = readdir(list))) {
        pid_t pid = (pid_t)atoi(entry->d_name);
        const char *holding = pid > 0 && pid != getpid() ? held_by(pid, queues) : NULL;
        if (holding) {
            show(pid, holding);
            found++;
        }
    }
    if (list)
        closedir(list);
    return list ? 0 : 1;
}
