/* Frames and fields as bytes.
 *
 * Owns the header and the rules of PROTOCOL.md that can be checked on one frame alone. Not here: numbers and field
 * types (protocol.h), descriptors, streams, the meaning of operations. It checks every size before it reads, allocates
 * nothing but the copies that a caller asks for, and is fuzzed unchanged (tests/guest/fuzz_frames.c).
 */
#define _GNU_SOURCE
#include "frame.h"

#include <stdlib.h>
#include <string.h>

uint16_t get_u16(const uint8_t *at)
{
    return (uint16_t)(at[0] | at[1] << 8);
}

uint32_t get_u32(const uint8_t *at)
{
    return (uint32_t)at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

void put_u32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> 8 * i);
}

static int64_t get_i64(const uint8_t *at)
{
    return (int64_t)((uint64_t)get_u32(at) | (uint64_t)get_u32(at + 4) << 32);
}

void frame_write_header(uint8_t *at, const struct frame *frame)
{
    put_u32(at, frame->length);
    at[4] = frame->type;
    at[5] = frame->channel;
    at[6] = at[7] = 0;
    put_u32(at + 8, frame->stream);
}

static bool type_is_for_guest(uint8_t type)
{
    switch (type) {
    case FRAME_HELLO:
    case FRAME_OPEN:
    case FRAME_DATA:
    case FRAME_EOF:
    case FRAME_CREDIT:
    case FRAME_RESET:
    case FRAME_CONTROL:
    case FRAME_SHUTDOWN:
        return true;
    default:
        return false;
    }
}

static bool type_has_channel(uint8_t type)
{
    return type == FRAME_DATA || type == FRAME_EOF || type == FRAME_CREDIT;
}

static const char *length_rule(uint8_t type, uint32_t length)
{
    switch (type) {
    case FRAME_DATA:
        return length == 0 ? "DATA without bytes" : NULL;
    case FRAME_EOF:
    case FRAME_RESET:
    case FRAME_SHUTDOWN:
        return length != 0 ? "payload in a frame without one" : NULL;
    case FRAME_CREDIT:
        return length != 4 ? "CREDIT not of 4 bytes" : NULL;
    default:
        return NULL;
    }
}

const char *frame_read_header(const uint8_t *at, struct frame *frame)
{
    frame->length = get_u32(at);
    frame->type = at[4];
    frame->channel = at[5];
    frame->stream = get_u32(at + 8);
    if (frame->length > MAX_PAYLOAD)
        return "payload too long";
    if (!type_is_for_guest(frame->type))
        return "unknown type";
    if (at[6] || at[7])
        return "reserved bytes";
    if (frame->channel && !type_has_channel(frame->type))
        return "channel in a frame without one";
    bool whole_guest = frame->type == FRAME_HELLO || frame->type == FRAME_SHUTDOWN;
    if (whole_guest != (frame->stream == 0))
        return "stream number";
    return length_rule(frame->type, frame->length);
}

const char *frame_check_payload(const struct frame *frame, const uint8_t *payload)
{
    switch (frame->type) {
    case FRAME_HELLO:
    case FRAME_OPEN:
    case FRAME_CONTROL:
        return fields_check((struct fields){payload, frame->length});
    case FRAME_CREDIT:
        return get_u32(payload) == 0 ? "CREDIT of 0" : NULL;
    default:
        return NULL;
    }
}

const char *fields_check(struct fields fields)
{
    while (fields.size) {
        if (fields.size < 6)
            return "field cut short";
        uint32_t size = get_u32(fields.at + 2);
        if (size > fields.size - 6)
            return "field overruns its payload";
        enum field_type type = field_type(get_u16(fields.at));
        if (type == FIELD_INTEGER && size != INTEGER_SIZE)
            return "integer not of 8 bytes";
        if (type == FIELD_STRING && memchr(fields.at + 6, 0, size))
            return "NUL in a string";
        fields.at += 6 + size;
        fields.size -= 6 + size;
    }
    return NULL;
}

bool fields_next(struct fields *rest, uint16_t *tag, const uint8_t **value, uint32_t *size)
{
    if (rest->size < 6)
        return false;
    *tag = get_u16(rest->at);
    *size = get_u32(rest->at + 2);
    *value = rest->at + 6;
    rest->at += 6 + *size;
    rest->size -= 6 + *size;
    return true;
}

bool fields_find(struct fields fields, uint16_t tag, const uint8_t **value, uint32_t *size)
{
    uint16_t found;
    const uint8_t *at;
    uint32_t length;
    while (fields_next(&fields, &found, &at, &length))
        if (found == tag) {
            *value = at;
            *size = length;
            return true;
        }
    return false; /* the caller's default stays */
}

int64_t fields_int(struct fields fields, uint16_t tag, int64_t missing)
{
    const uint8_t *value;
    uint32_t size;
    return fields_find(fields, tag, &value, &size) ? get_i64(value) : missing;
}

size_t fields_count(struct fields fields, uint16_t tag)
{
    size_t count = 0;
    uint16_t found;
    const uint8_t *value;
    uint32_t size;
    while (fields_next(&fields, &found, &value, &size))
        count += found == tag;
    return count;
}

char *fields_string(struct fields fields, uint16_t tag)
{
    const uint8_t *value;
    uint32_t size;
    if (!fields_find(fields, tag, &value, &size))
        return NULL;
    char *copy = malloc(size + 1);
    if (copy) {
        memcpy(copy, value, size);
        copy[size] = 0;
    }
    return copy;
}

void pack_bytes(struct pack *pack, uint16_t tag, const void *bytes, size_t size)
{
    if (pack->overflow || size > pack->cap - pack->size || pack->cap - pack->size - size < 6) {
        pack->overflow = true;
        return;
    }
    uint8_t *at = pack->at + pack->size;
    at[0] = (uint8_t)tag;
    at[1] = (uint8_t)(tag >> 8);
    put_u32(at + 2, (uint32_t)size);
    if (size)
        memcpy(at + 6, bytes, size);
    pack->size += 6 + size;
}

void pack_int(struct pack *pack, uint16_t tag, int64_t value)
{
    uint8_t bytes[8];
    put_u32(bytes, (uint32_t)(uint64_t)value);
    put_u32(bytes + 4, (uint32_t)((uint64_t)value >> 32));
    pack_bytes(pack, tag, bytes, sizeof bytes);
}

void pack_string(struct pack *pack, uint16_t tag, const char *string)
{
    pack_bytes(pack, tag, string, strlen(string));
}

void pack_error(struct pack *pack, int error, const char *about)
{
    char message[512];
    const char *words = strerror(error);
    size_t size = 0;
    if (about) {
        size = strnlen(about, 384);
        memcpy(message, about, size);
        memcpy(message + size, ": ", 2);
        size += 2;
    }
    size_t more = strnlen(words, sizeof message - size);
    memcpy(message + size, words, more);
    pack_int(pack, TAG_ERRNO, error);
    pack_bytes(pack, TAG_MESSAGE, message, size + more);
}
