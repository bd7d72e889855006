/* Extended attributes of files: see xattrs.c. */
#ifndef ATOLL_XATTRS_H
#define ATOLL_XATTRS_H

#include "worker.h"

bool xattrs_are_wanted(struct fields fields);

/* Whether XATTR_PREFIX and XATTRS are absent, or of the form that PROTOCOL.md says. */
bool xattrs_are_valid(struct fields fields);

/* Packs the wanted ones of a file, if it has any. */
void xattrs_pack(struct pack *pack, struct fields fields, const char *path, bool follow);

/* Replaces those of an open file, if the host asked for it. 0 or an errno. */
int xattrs_replace(struct job *job, int fd);

#endif
