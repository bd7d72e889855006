/* Operations on files: see files.c. */
#ifndef ATOLL_FILES_H
#define ATOLL_FILES_H

#include <sys/stat.h>

#include "worker.h"

extern const struct operation operation_read, operation_write, operation_stat, operation_list, operation_mkdir,
    operation_remove, operation_rename, operation_symlink, operation_chmod, operation_chown;

/* KIND, SIZE, MODE, UID, GID, MTIME_NS, and TARGET of a link that is found as `name` below `directory`. */
void files_pack_stat(struct pack *pack, int directory, const char *name, const struct stat *status);
int files_kind(mode_t mode);

/* mkdir -p. 0 or an errno. */
int files_make_directories(const char *path, mode_t mode);

/* Opens a regular file; -1 and errno, EISDIR or EINVAL for other types. Never blocks on a pipe or device. */
int files_open_regular(int directory, const char *path, int flags, mode_t mode, struct stat *status);

/* Copies up to `limit` bytes (or to the end) of a file to channel 1. Returns how many, or -1 and errno. */
int64_t files_send(struct job *job, int fd, int64_t offset, int64_t limit);

#endif
