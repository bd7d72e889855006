/* Frames and fields as bytes: see frame.c. */
#ifndef ATOLL_FRAME_H
#define ATOLL_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

struct frame {
    uint32_t length;
    uint8_t type;
    uint8_t channel;
    uint32_t stream;
};

/* Received fields: a view, valid as long as the bytes it points to. */
struct fields {
    const uint8_t *at;
    size_t size;
};

/* A buffer of fixed size in which fields are packed. */
struct pack {
    uint8_t *at;
    size_t size;
    size_t cap;
    bool overflow;
};

#define PACK(array) {(array), 0, sizeof(array), false}

uint16_t get_u16(const uint8_t *at);
uint32_t get_u32(const uint8_t *at);
void put_u32(uint8_t *at, uint32_t value);

void frame_write_header(uint8_t *at, const struct frame *frame);

/* Both return NULL, or the rule that the host broke. The first reads HEADER_SIZE bytes, the second the payload. */
const char *frame_read_header(const uint8_t *at, struct frame *frame);
const char *frame_check_payload(const struct frame *frame, const uint8_t *payload);

/* NULL when every field is whole and of its tag's type, else the rule that was broken. */
const char *fields_check(struct fields fields);

/* Removes the first field from `rest`. Only for fields that passed fields_check(). */
bool fields_next(struct fields *rest, uint16_t *tag, const uint8_t **value, uint32_t *size);

bool fields_find(struct fields fields, uint16_t tag, const uint8_t **value, uint32_t *size);
int64_t fields_int(struct fields fields, uint16_t tag, int64_t missing);
size_t fields_count(struct fields fields, uint16_t tag);

/* A copy that ends with NUL, to be freed; NULL when missing or out of memory. */
char *fields_string(struct fields fields, uint16_t tag);

void pack_int(struct pack *pack, uint16_t tag, int64_t value);
void pack_bytes(struct pack *pack, uint16_t tag, const void *bytes, size_t size);
void pack_string(struct pack *pack, uint16_t tag, const char *string);

/* ERRNO and MESSAGE: the subject (may be NULL) and the errno's text. */
void pack_error(struct pack *pack, int error, const char *about);

#endif
