/* Headers of tar archives: see tarhead.c. */
#ifndef ATOLL_TARHEAD_H
#define ATOLL_TARHEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { TAR_BLOCK = 512, TAR_MAX_EXTENSION_BYTES = 1 << 20 };

/* The fields of a header, or of the pax records that replace them. */
struct tar_header {
    char type;
    bool sparse;
    int64_t size;
    int64_t mode;
    int64_t mtime_s;
    int64_t mtime_ns;
    char name[257];  /* prefix and name of a ustar header */
    char target[101];
};

/* What extension headers set for the next entry. NULL or false: not set. */
struct tar_override {
    char *name;
    char *target;
    bool has_size, has_mtime, sparse;
    int64_t size, mtime_s, mtime_ns;
};

bool tar_is_zero(const uint8_t *block);

/* NULL, or the error in the block. */
const char *tar_parse(const uint8_t *block, struct tar_header *header);

/* The records of a pax header ('x'). NULL, or the error. */
const char *tar_parse_pax(const char *records, size_t size, struct tar_override *override);

void tar_override_clear(struct tar_override *override);

/* Writes a ustar header. False when the name, target or a number does not fit and needs pax records as well; the header
 * then holds what fits. */
bool tar_format(uint8_t *block, const struct tar_header *header, const char *name, const char *target, int64_t uid,
                int64_t gid);

/* Appends one pax record. Returns the new size; when that is larger than `cap`, nothing was written. */
size_t tar_put_pax(char *records, size_t size, size_t cap, const char *key, const char *value, size_t value_size);

/* Whether a name stays below the directory it is unpacked to: not empty, not absolute, no "..". */
bool tar_name_is_safe(const char *name);

#endif
