/* Extended attributes of files, as WRITE, STAT and LIST have them: those whose names begin with the field XATTR_PREFIX.
 *
 * Owns the form of the field XATTRS, how a set of attributes replaces another, and what is left out of a file that has
 * too many. Not here: files (files.c). Only `user.` attributes: others are the kernel's, and no metadata.
 */
#define _GNU_SOURCE
#include "xattrs.h"

#include <errno.h>
#include <string.h>
#include <sys/xattr.h>

enum { MAX_LIST = 64 << 10, MAX_NAME = 255, SIZE_BYTES = 4 }; /* the first two are the kernel's limits */

static char listed[MAX_LIST]; /* names, each with a NUL: not allocated, because a worker serves many calls */
static const char USER[] = "user.";

/* One attribute of a field XATTRS. */
struct xattr {
    const char *name; /* what follows the prefix, with a NUL */
    const uint8_t *value;
    uint32_t size;
};

/* Removes the first attribute from `rest`. False: there is none, or `rest` is not of the form. */
static bool next(struct fields *rest, struct xattr *xattr)
{
    const uint8_t *end = rest->size ? memchr(rest->at, 0, rest->size) : NULL;
    if (!end || end == rest->at)
        return false;
    size_t name = (size_t)(end - rest->at) + 1;
    if (rest->size - name < SIZE_BYTES)
        return false;
    *xattr = (struct xattr){(const char *)rest->at, end + 1 + SIZE_BYTES, get_u32(end + 1)};
    size_t taken = name + SIZE_BYTES;
    if (rest->size - taken < xattr->size)
        return false;
    taken += xattr->size;
    *rest = (struct fields){rest->at + taken, rest->size - taken};
    return true;
}

static struct fields given(struct fields fields)
{
    const uint8_t *value = NULL;
    uint32_t size = 0;
    fields_find(fields, TAG_XATTRS, &value, &size);
    return (struct fields){value, size};
}

/* The prefix, with a NUL. False: none was asked for. */
static bool take_prefix(struct fields fields, char prefix[MAX_NAME + 1], size_t *length)
{
    const uint8_t *value;
    uint32_t size;
    if (!fields_find(fields, TAG_XATTR_PREFIX, &value, &size) || size > MAX_NAME)
        return false;
    memcpy(prefix, value, size);
    prefix[size] = 0;
    *length = size;
    return true;
}

bool xattrs_are_wanted(struct fields fields)
{
    const uint8_t *value;
    uint32_t size;
    return fields_find(fields, TAG_XATTR_PREFIX, &value, &size);
}

bool xattrs_are_valid(struct fields fields)
{
    const uint8_t *value;
    uint32_t size;
    struct fields rest = given(fields);
    struct xattr xattr;
    if (!fields_find(fields, TAG_XATTR_PREFIX, &value, &size))
        return rest.size == 0;
    if (size < sizeof USER || size >= MAX_NAME || memcmp(value, USER, sizeof USER - 1) != 0 || rest.size > MAX_XATTRS)
        return false;
    while (next(&rest, &xattr))
        if (size + strlen(xattr.name) > MAX_NAME)
            return false;
    return rest.size == 0;
}

void xattrs_pack(struct pack *pack, struct fields fields, const char *path, bool follow)
{
    char prefix[MAX_NAME + 1];
    uint8_t found[MAX_XATTRS];
    size_t length, size = 0;
    if (!take_prefix(fields, prefix, &length))
        return;
    ssize_t names = follow ? listxattr(path, listed, sizeof listed) : llistxattr(path, listed, sizeof listed);
    for (const char *name = listed; names > 0 && name < listed + names; name += strlen(name) + 1) {
        if (strncmp(name, prefix, length) != 0 || !name[length])
            continue;
        size_t head = strlen(name + length) + 1 + SIZE_BYTES;
        if (size + head >= sizeof found) /* an empty value could not be told from one that is asked for its size */
            continue;
        uint8_t *value = found + size + head;
        size_t room = sizeof found - size - head;
        ssize_t count = follow ? getxattr(path, name, value, room) : lgetxattr(path, name, value, room);
        if (count < 0)
            continue;
        memcpy(found + size, name + length, head - SIZE_BYTES);
        put_u32(value - SIZE_BYTES, (uint32_t)count);
        size += head + (size_t)count;
    }
    if (size)
        pack_bytes(pack, TAG_XATTRS, found, size);
}

static bool is_given(struct fields rest, const char *name)
{
    struct xattr xattr;
    while (next(&rest, &xattr))
        if (!strcmp(xattr.name, name))
            return true;
    return false;
}

static int remove_others(int fd, const char *prefix, size_t length, struct fields kept)
{
    ssize_t names = flistxattr(fd, listed, sizeof listed);
    if (names < 0)
        return kept.size == 0 && errno == ENOTSUP ? 0 : errno;
    for (const char *name = listed; name < listed + names; name += strlen(name) + 1)
        if (!strncmp(name, prefix, length) && name[length] && !is_given(kept, name + length) &&
            fremovexattr(fd, name) < 0 && errno != ENODATA)
            return errno;
    return 0;
}

int xattrs_replace(struct job *job, int fd)
{
    char name[MAX_NAME + 1];
    size_t length;
    struct fields rest = given(job->fields);
    struct xattr xattr;
    int64_t count = 0;
    if (!take_prefix(job->fields, name, &length))
        return 0;
    int error = remove_others(fd, name, length, rest);
    while (!error && next(&rest, &xattr)) {
        memcpy(name + length, xattr.name, strlen(xattr.name) + 1); /* it fits: see xattrs_are_valid() */
        if (fsetxattr(fd, name, xattr.value, xattr.size, 0) < 0)
            error = errno;
        count++;
    }
    if (!error)
        pack_int(&job->result, TAG_COUNT, count);
    return error;
}
