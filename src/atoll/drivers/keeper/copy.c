/* Copies a layer (of a frozen sandbox), and merges several layers into one.
 *
 * Owns every type of file that can be in an upper directory of an overlay, whiteouts and opaque directories included,
 * and how overlayfs combines one layer with those below it. Not here: checkpoints, and who may use a layer.
 *
 * The content is hostile: no symlink is followed, every name is relative to a directory that is held open, and a file
 * is checked again after it was opened. Data is shared where the file system can (FICLONE), and holes stay holes.
 *
 * Where data cannot be shared, a file that is already in a committed layer is hard-linked instead of copied: committed
 * layers are never written. Whether a file of a sandbox is unchanged since an earlier copy is known from that copy's
 * `index`: the path, inode and ctime of all files that it took. */
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
#include <time.h>
#include <unistd.h>

#include "keeper.h"

enum {
    MAX_DEPTH = 4000,
    BUCKETS = 4096,
    MAX_LIST_BYTES = 65536,
    PIECE = 1 << 30,
    SECOND_NS = 1000000000,
    SETTLING_NS = 100000000,
};

/* Files with several hard links: the path of the first copy. One whose path is too long for a system call has one more
 * link while the copy is made, named by the inode of its source, in the directory `twins` beside `upper`: without it,
 * each of its names would become a copy of its data. */
struct twin {
    struct twin *next;
    ino_t inode;
    bool staged;
    char path[];
};

/* A file that a copy took, an entry of its index. */
struct taken {
    uint64_t path; /* a hash */
    uint64_t inode;
    int64_t changed_ns;
};

static struct twin *twins[BUCKETS];
static int target_root;
static int staging = -1; /* the directory `twins`, once there is one */
static bool clones;     /* the file system supports FICLONE */
static bool from_committed; /* the source is a committed layer, which is never written */
static const char *opaque = "trusted.overlay.opaque";
static int64_t shift;   /* added to each uid and gid of the source */
static FILE *index_file;
static int64_t settled_ns;           /* a file changed later may change again within the resolution of its ctime */
static int since = -1;               /* the earlier copy */
static struct taken *known;          /* the index of the earlier copy, as a hash table */
static size_t known_mask;
static char path[PATH_MAX * 4]; /* of the current entry, for messages, the index and twins */
static size_t path_length;

static void fail(const char *what)
{
    static char message[sizeof path + 64];
    snprintf(message, sizeof message, "copying %s: %s", path_length ? path : ".", what);
    give_up(message);
}

static void copy_attributes(int source, int target)
{
    static char names[MAX_LIST_BYTES], value[MAX_LIST_BYTES];
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

static bool is_opaque(int directory)
{
    char value;
    return fgetxattr(directory, opaque, &value, 1) == 1 && value == 'y';
}

/* Of a directory that a lower layer has made; the opaque mark stays, because it hides the layers below both. */
static void clear_attributes(int target)
{
    static char names[MAX_LIST_BYTES];
    ssize_t size = flistxattr(target, names, sizeof names);
    for (char *name = names; size > 0 && name < names + size; name += strlen(name) + 1)
        if (strcmp(name, opaque) && fremovexattr(target, name) < 0 && errno != ENODATA)
            fail(name);
}

static uid_t shifted(uid_t id)
{
    return (uid_t)((int64_t)id + shift);
}

static void finish(int source, int target, const struct stat *status)
{
    const struct timespec times[] = {status->st_atim, status->st_mtim};
    if (fchown(target, shifted(status->st_uid), shifted(status->st_gid)) < 0)
        fail("owner");
    if (from_committed)
        clear_attributes(target);
    copy_attributes(source, target); /* after chown, which clears capabilities; before chmod, which may forbid it */
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
            return; /* only a hole is left */
        off_t end = data < 0 ? size : lseek(source, data, SEEK_HOLE);
        off_t from = data < 0 ? at : data, to = from;
        while (from < end) {
            size_t piece = end - from < PIECE ? (size_t)(end - from) : PIECE;
            ssize_t count = copy_file_range(source, &from, target, &to, piece, 0);
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

static void forget_twin(struct twin **at)
{
    struct twin *twin = *at;
    *at = twin->next;
    if (twin->staged && unlinkat(staging, twin->path, 0) < 0)
        fail("twins");
    free(twin);
}

/* False: there is none yet, or its copy has as many names as a file may have. */
static bool link_twin(struct twin **at, int to, const char *name)
{
    if (!*at)
        return false;
    if (linkat((*at)->staged ? staging : target_root, (*at)->path, to, name, 0) == 0)
        return true;
    if (errno != EMLINK)
        fail("link");
    forget_twin(at);
    return false;
}

static int open_staging(void)
{
    if (mkdirat(target_root, "../twins", 0700) < 0)
        fail("twins");
    int fd = openat(target_root, "../twins", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        fail("twins");
    return fd;
}

static void remember_twin(ino_t inode, int to, const char *name)
{
    char number[32];
    bool staged = path_length >= PATH_MAX;
    if (staged && staging < 0)
        staging = open_staging();
    snprintf(number, sizeof number, "%llu", (unsigned long long)inode);
    if (staged && linkat(to, name, staging, number, 0) < 0) {
        if (errno == EMLINK)
            return;
        fail("twins");
    }
    const char *kept = staged ? number : path;
    struct twin *twin = malloc(sizeof *twin + strlen(kept) + 1), **at = find_twin(inode);
    if (!twin)
        fail("memory");
    *twin = (struct twin){.next = *at, .inode = inode, .staged = staged};
    strcpy(twin->path, kept);
    *at = twin;
}

static void forget_twins(void)
{
    for (int i = 0; i < BUCKETS; i++)
        while (twins[i])
            forget_twin(&twins[i]);
    if (staging >= 0 && (close(staging) < 0 || unlinkat(target_root, "../twins", AT_REMOVEDIR) < 0))
        fail("twins");
    staging = -1;
}

static int64_t changed_ns(const struct stat *status)
{
    return (int64_t)status->st_ctim.tv_sec * SECOND_NS + status->st_ctim.tv_nsec;
}

static uint64_t path_hash(void)
{
    uint64_t hash = 14695981039346656037ULL; /* FNV-1a */
    for (const char *at = path; *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211ULL;
    return hash;
}

static struct taken *find_known(const struct taken *wanted)
{
    size_t at = (wanted->path ^ wanted->inode) & known_mask;
    while (known[at].inode && memcmp(&known[at], wanted, sizeof *wanted))
        at = (at + 1) & known_mask;
    return &known[at];
}

/* Reads the index of an earlier copy. Without one, or beyond the end of an incomplete one, files are copied. */
static void read_index(const char *file)
{
    struct stat status;
    FILE *stream = fopen(file, "re");
    if (!stream || fstat(fileno(stream), &status) < 0)
        return;
    size_t count = (size_t)status.st_size / sizeof(struct taken), slots = 16;
    while (slots < 2 * count)
        slots *= 2;
    known = calloc(slots, sizeof *known);
    if (!known)
        fail("memory");
    known_mask = slots - 1;
    struct taken one;
    while (fread(&one, sizeof one, 1, stream) == 1 && count--)
        *find_known(&one) = one;
    fclose(stream);
}

/* Hard-links the file of a committed layer, where data cannot be shared. */
static bool linked(int from, const char *name, int to, const char *as)
{
    return !clones && linkat(from, name, to, as, 0) == 0;
}

static struct taken taken_now(const struct stat *seen)
{
    return (struct taken){path_hash(), seen->st_ino, changed_ns(seen)};
}

/* Adds a file to the index for the next copy. */
static void add_to_index(const struct stat *seen)
{
    const struct taken now = taken_now(seen);
    if (now.changed_ns < settled_ns && fwrite(&now, sizeof now, 1, index_file) != 1)
        fail("index");
}

/* Takes a file from a committed layer: the earlier copy, if it is unchanged since, or the layer that is merged. */
static bool take_committed(int from, int to, const char *name, const struct stat *seen)
{
    if (!index_file)
        return from_committed && shift == 0 && linked(from, name, to, name);
    const struct taken now = taken_now(seen);
    return known && find_known(&now)->inode && linked(since, path, to, name);
}

static void copy_content(int from, int to, const char *name)
{
    struct stat status;
    int source = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOATIME | O_CLOEXEC);
    if (source < 0 && errno == EPERM)
        source = openat(from, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (source < 0 || fstat(source, &status) < 0)
        fail("open");
    if (!S_ISREG(status.st_mode)) {
        errno = ESTALE;
        fail("changed during the copy");
    }
    int target = openat(to, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (target < 0)
        fail("create");
    copy_data(source, target, status.st_size);
    finish(source, target, &status);
    close(source);
    close(target);
}

static void copy_file(int from, int to, const char *name, const struct stat *seen)
{
    bool has_twins = seen->st_nlink > 1;
    if (index_file)
        add_to_index(seen);
    if (has_twins && link_twin(find_twin(seen->st_ino), to, name))
        return;
    if (!take_committed(from, to, name, seen))
        copy_content(from, to, name);
    if (has_twins)
        remember_twin(seen->st_ino, to, name);
}

static void copy_link(int from, int to, const char *name, const struct stat *status)
{
    char target[PATH_MAX + 1];
    const struct timespec times[] = {status->st_atim, status->st_mtim};
    ssize_t size = readlinkat(from, name, target, sizeof target - 1);
    if (size < 0)
        fail("link");
    target[size] = 0;
    if (symlinkat(target, to, name) < 0 ||
        fchownat(to, name, shifted(status->st_uid), shifted(status->st_gid), AT_SYMLINK_NOFOLLOW) < 0 ||
        utimensat(to, name, times, AT_SYMLINK_NOFOLLOW) < 0)
        fail("link");
}

static void copy_node(int from, int to, const char *name, const struct stat *status)
{
    (void)from;
    /* A device can only be a whiteout: no process inside may make another. */
    if (S_ISBLK(status->st_mode) || (S_ISCHR(status->st_mode) && status->st_rdev != makedev(0, 0))) {
        errno = EPERM;
        fail("device refused");
    }
    if (mknodat(to, name, status->st_mode & ~07777U, makedev(0, 0)) < 0 ||
        fchownat(to, name, shifted(status->st_uid), shifted(status->st_gid), AT_SYMLINK_NOFOLLOW) < 0)
        fail("node");
    if (S_ISCHR(status->st_mode))
        return;
    const struct timespec times[] = {status->st_atim, status->st_mtim};
    if (fchmodat(to, name, status->st_mode & 07777, 0) < 0)
        fail("mode");
    if (utimensat(to, name, times, AT_SYMLINK_NOFOLLOW) < 0)
        fail("times");
}

static int open_directory(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        fail("directory");
    return fd;
}

static void remove_tree(int parent, const char *name, int depth)
{
    if (unlinkat(parent, name, 0) == 0)
        return;
    if (errno != EISDIR || depth > MAX_DEPTH)
        fail("remove");
    DIR *list = fdopendir(open_directory(parent, name));
    if (!list)
        fail("list");
    for (struct dirent *entry; errno = 0, (entry = readdir(list));)
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            remove_tree(dirfd(list), entry->d_name, depth + 1);
    if (errno)
        fail("list");
    closedir(list);
    if (unlinkat(parent, name, AT_REMOVEDIR) < 0)
        fail("remove");
}

static void copy_directory(int source, int target, int depth);

/* Prepares the target for an entry of a higher layer. True when the entry is a directory in both, to be merged;
 * otherwise the lower entry is removed, and `hides` is set when it was not a directory and thus hid the layers
 * below. */
static bool make_way(int from, int to, const char *name, bool is_directory, bool *hides)
{
    struct stat below;
    *hides = false;
    if (fstatat(to, name, &below, AT_SYMLINK_NOFOLLOW) < 0) {
        if (errno != ENOENT)
            fail("stat");
        return false;
    }
    if (is_directory && S_ISDIR(below.st_mode)) {
        int source = open_directory(from, name);
        bool hides_all = is_opaque(source);
        close(source);
        if (!hides_all)
            return true;
    }
    *hides = !S_ISDIR(below.st_mode);
    remove_tree(to, name, 0);
    return false;
}

static void copy_entry(int from, int to, const char *name, int depth)
{
    struct stat status;
    bool hides = false, merges = false;
    if (fstatat(from, name, &status, AT_SYMLINK_NOFOLLOW) < 0)
        fail("stat");
    if (from_committed)
        merges = make_way(from, to, name, S_ISDIR(status.st_mode), &hides);
    if (S_ISREG(status.st_mode)) {
        copy_file(from, to, name, &status);
    } else if (S_ISLNK(status.st_mode)) {
        copy_link(from, to, name, &status);
    } else if (!S_ISDIR(status.st_mode)) {
        copy_node(from, to, name, &status);
    } else {
        int source = open_directory(from, name);
        if (!merges && mkdirat(to, name, 0700) < 0)
            fail("directory");
        int target = open_directory(to, name);
        copy_directory(source, target, depth + 1);
        if (hides && fsetxattr(target, opaque, "y", 1, 0) < 0)
            fail("opaque");
        close(target);
    }
}

/* Takes ownership of `source`. */
static void copy_directory(int source, int target, int depth)
{
    struct stat status;
    struct dirent *entry;
    if (depth > MAX_DEPTH) {
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
    if (depth) /* The directory `upper` itself belongs to the host. */
        finish(source, target, &status);
    closedir(list);
}

static int open_upper(const char *layer)
{
    int directory = open(layer, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int upper = directory < 0 ? -1 : openat(directory, "upper", O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (directory >= 0)
        close(directory);
    return upper;
}

static int open_upper_or_fail(const char *layer)
{
    int upper = open_upper(layer);
    if (upper < 0)
        give_up(layer);
    return upper;
}

static void begin(const char *target)
{
    char upper[PATH_MAX];
    /* Two descriptors for each level of directories. */
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    snprintf(upper, sizeof upper, "%s/upper", target);
    if (mkdir(upper, 0700) < 0)
        give_up(upper);
    target_root = open_upper_or_fail(target);
    int one = openat(target_root, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    int other = openat(target_root, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    clones = one >= 0 && other >= 0 && ioctl(one, FICLONE, other) == 0;
    close(one);
    close(other);
}

static FILE *make_index(const char *layer)
{
    char file[PATH_MAX];
    snprintf(file, sizeof file, "%s/index", layer);
    FILE *stream = fopen(file, "wxe");
    if (!stream)
        give_up(file);
    return stream;
}

void copy_layer(const char *source, const char *target, const char *earlier)
{
    struct timespec now;
    char file[PATH_MAX];
    begin(target);
    index_file = make_index(target);
    clock_gettime(CLOCK_REALTIME, &now);
    settled_ns = (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec - SETTLING_NS;
    if (earlier && (since = open_upper(earlier)) >= 0) {
        snprintf(file, sizeof file, "%s/index", earlier);
        read_index(file);
    }
    copy_directory(open_upper_or_fail(source), target_root, 0);
    forget_twins();
    if (fclose(index_file) != 0)
        fail("index");
}

void merge_layers(const char *target, unsigned owner, char **layers, int count, bool rootless)
{
    begin(target);
    from_committed = true;
    if (rootless)
        opaque = "user.overlay.opaque";
    for (int i = 0; i < count; i++) {
        shift = (int64_t)owner - strtoll(layers[2 * i + 1], NULL, 10);
        copy_directory(open_upper_or_fail(layers[2 * i]), target_root, 0);
        forget_twins();
    }
}
