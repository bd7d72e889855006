/* Headers of tar archives: ustar, pax, and GNU's extensions for long names.
 *
 * Owns the bytes of a header. Not here: files (tar_in.c, tar_out.c). Pure, and fuzzed unchanged: archives are hostile.
 */
#define _GNU_SOURCE
#include "tarhead.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Offsets of the fields of a header. */
enum {
    NAME = 0, NAME_SIZE = 100,
    MODE = 100, UID = 108, GID = 116, SMALL_SIZE = 8,
    SIZE = 124, MTIME = 136, LARGE_SIZE = 12,
    CHECKSUM = 148,
    TYPE = 156,
    TARGET = 157, TARGET_SIZE = 100,
    MAGIC = 257,
    PREFIX = 345, PREFIX_SIZE = 155,
};

bool tar_is_zero(const uint8_t *block)
{
    for (int i = 0; i < TAR_BLOCK; i++)
        if (block[i])
            return false;
    return true;
}

/* Octal, or GNU's base-256 for larger numbers. */
static bool parse_number(const uint8_t *at, int size, int64_t *value)
{
    int64_t result = 0;
    int i = 0;
    if (at[0] & 0x80) {
        if (at[0] != 0x80)
            return false; /* negative, or too large */
        for (i = 1; i < size; i++) {
            if (result >> 54)
                return false;
            result = result << 8 | at[i];
        }
        *value = result;
        return true;
    }
    while (i < size && at[i] == ' ')
        i++;
    for (; i < size && at[i] && at[i] != ' '; i++) {
        if (at[i] < '0' || at[i] > '7' || result >> 59)
            return false;
        result = result << 3 | (at[i] - '0');
    }
    *value = result;
    return true;
}

static int64_t checksum(const uint8_t *block)
{
    int64_t sum = 0;
    for (int i = 0; i < TAR_BLOCK; i++)
        sum += i >= CHECKSUM && i < CHECKSUM + SMALL_SIZE ? ' ' : block[i];
    return sum;
}

const char *tar_parse(const uint8_t *block, struct tar_header *header)
{
    int64_t sum;
    memset(header, 0, sizeof *header);
    if (!parse_number(block + CHECKSUM, SMALL_SIZE, &sum) || sum != checksum(block))
        return "not a tar header (checksum)";
    if (!parse_number(block + SIZE, LARGE_SIZE, &header->size) ||
        !parse_number(block + MODE, SMALL_SIZE, &header->mode) ||
        !parse_number(block + MTIME, LARGE_SIZE, &header->mtime_s))
        return "number in a tar header";
    header->type = (char)block[TYPE];
    /* In GNU's own format the prefix field holds other things. */
    bool has_prefix = !memcmp(block + MAGIC, "ustar\0", 6) && block[PREFIX];
    size_t prefix = has_prefix ? strnlen((const char *)block + PREFIX, PREFIX_SIZE) : 0;
    memcpy(header->name, block + PREFIX, prefix);
    if (prefix)
        header->name[prefix++] = '/';
    memcpy(header->name + prefix, block + NAME, strnlen((const char *)block + NAME, NAME_SIZE));
    memcpy(header->target, block + TARGET, strnlen((const char *)block + TARGET, TARGET_SIZE));
    header->sparse = header->type == 'S';
    return NULL;
}

void tar_override_clear(struct tar_override *override)
{
    free(override->name);
    free(override->target);
    *override = (struct tar_override){0};
}

static bool parse_decimal(const char *at, size_t size, int64_t *value, size_t *used)
{
    int64_t result = 0;
    size_t i = 0;
    for (; i < size && at[i] >= '0' && at[i] <= '9'; i++) {
        if (result > (INT64_MAX - 9) / 10)
            return false;
        result = result * 10 + (at[i] - '0');
    }
    *value = result;
    *used = i;
    return i > 0;
}

/* "1700000000.123456789"; times before 1970 are taken as 1970. */
static bool parse_time(const char *at, size_t size, struct tar_override *override)
{
    size_t used, digits = 0;
    bool negative = size && at[0] == '-';
    if (!parse_decimal(at + negative, size - negative, &override->mtime_s, &used))
        return false;
    int64_t ns = 0;
    for (size_t i = negative + used + 1; i < size && digits < 9; i++, digits++) {
        if (at[i] < '0' || at[i] > '9')
            return false;
        ns = ns * 10 + (at[i] - '0');
    }
    for (; digits < 9; digits++)
        ns *= 10;
    override->mtime_ns = ns;
    if (negative)
        override->mtime_s = override->mtime_ns = 0;
    override->has_mtime = true;
    return true;
}

static bool set_text(char **text, const char *value, size_t size)
{
    if (memchr(value, 0, size))
        return false;
    free(*text);
    return (*text = strndup(value, size)) != NULL;
}

static bool take_pax(const char *key, size_t key_size, const char *value, size_t size, struct tar_override *override)
{
#define IS(text) (key_size == sizeof text - 1 && !memcmp(key, text, sizeof text - 1))
    size_t used;
    if (IS("path"))
        return set_text(&override->name, value, size);
    if (IS("linkpath"))
        return set_text(&override->target, value, size);
    if (IS("size"))
        return override->has_size = parse_decimal(value, size, &override->size, &used) && used == size;
    if (IS("mtime"))
        return parse_time(value, size, override);
    if (key_size >= 10 && !memcmp(key, "GNU.sparse", 10))
        override->sparse = true;
    return true;
#undef IS
}

const char *tar_parse_pax(const char *records, size_t size, struct tar_override *override)
{
    while (size) {
        int64_t length;
        size_t used;
        if (!parse_decimal(records, size, &length, &used) || used == size || records[used] != ' ' ||
            length <= (int64_t)used + 1 || length > (int64_t)size || records[length - 1] != '\n')
            return "pax record";
        const char *key = records + used + 1;
        size_t rest = (size_t)length - used - 2; /* without the newline */
        const char *equals = memchr(key, '=', rest);
        if (!equals)
            return "pax record";
        size_t key_size = (size_t)(equals - key);
        if (!take_pax(key, key_size, equals + 1, rest - key_size - 1, override))
            return "value in a pax record";
        records += length;
        size -= (size_t)length;
    }
    return NULL;
}

/* ---- writing ---- */

static bool put_octal(uint8_t *at, int size, int64_t value)
{
    bool fits = value >= 0 && value < INT64_C(1) << (3 * (size - 1));
    if (!fits)
        value = 0;
    for (int i = size - 2; i >= 0; i--) {
        at[i] = (uint8_t)('0' + (value & 7));
        value >>= 3;
    }
    at[size - 1] = 0;
    return fits;
}

/* A name of up to 256 bytes fits if it can be split at a slash. A longer one is truncated here, and whole in a pax
 * record. */
static bool put_name(uint8_t *block, const char *name)
{
    size_t size = strlen(name);
    if (size <= NAME_SIZE) {
        memcpy(block + NAME, name, size);
        return true;
    }
    for (size_t i = size - NAME_SIZE - 1; i < size && i <= PREFIX_SIZE; i++)
        if (name[i] == '/' && i > 0 && i + 1 < size) {
            memcpy(block + PREFIX, name, i);
            memcpy(block + NAME, name + i + 1, size - i - 1);
            return true;
        }
    memcpy(block + NAME, name, NAME_SIZE);
    return false;
}

bool tar_format(uint8_t *block, const struct tar_header *header, const char *name, const char *target, int64_t uid,
                int64_t gid)
{
    size_t target_size = strlen(target);
    memset(block, 0, TAR_BLOCK);
    bool fits = put_name(block, name);
    memcpy(block + TARGET, target, target_size < TARGET_SIZE ? target_size : TARGET_SIZE);
    fits &= target_size <= TARGET_SIZE;
    fits &= put_octal(block + MODE, SMALL_SIZE, header->mode & 07777);
    put_octal(block + UID, SMALL_SIZE, uid);
    put_octal(block + GID, SMALL_SIZE, gid);
    fits &= put_octal(block + SIZE, LARGE_SIZE, header->size);
    fits &= put_octal(block + MTIME, LARGE_SIZE, header->mtime_s) && !header->mtime_ns;
    block[TYPE] = (uint8_t)header->type;
    memcpy(block + MAGIC, "ustar\0" "00", 8);
    put_octal(block + CHECKSUM, SMALL_SIZE - 1, checksum(block));
    block[CHECKSUM + SMALL_SIZE - 1] = ' ';
    return fits;
}

size_t tar_put_pax(char *records, size_t size, size_t cap, const char *key, const char *value, size_t value_size)
{
    /* The length counts its own digits. */
    size_t bare = strlen(key) + value_size + 3, length = bare + 1;
    char digits[24];
    for (int tries = 0; tries < 3; tries++)
        length = bare + (size_t)snprintf(digits, sizeof digits, "%zu", length);
    if (size + length > cap)
        return size + length;
    char *at = records + size;
    at += sprintf(at, "%zu %s=", length, key);
    memcpy(at, value, value_size);
    at[value_size] = '\n';
    return size + length;
}

bool tar_name_is_safe(const char *name)
{
    if (!*name || *name == '/')
        return false;
    while (*name) {
        size_t size = strcspn(name, "/");
        if (size == 2 && !memcmp(name, "..", 2))
            return false;
        name += size;
        while (*name == '/')
            name++;
    }
    return true;
}
