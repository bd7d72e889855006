/* A libFuzzer harness over the parts of the guest that read hostile bytes and need no process to do so: frames and
 * fields, the rules of streams, glob patterns, tar headers, kept output. The first byte of an input says which.
 *
 * Links the guest's own frame.c, match.c, tarhead.c and ring.c and includes stream.c, whose epoch has to be reset between
 * two inputs; stubs for the rest are below. The streams have a kind that uses every call, so that turns, credit and ends
 * are exercised too.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "frame.h"
#include "link.h"
#include "loop.h"
#include "match.h"
#include "ring.h"
#include "stream.c"
#include "tarhead.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) \
            abort(); \
    } while (0)

/* ---- what the parts need of the rest ---- */

static jmp_buf violated;
static void *garbage[65536];
static size_t garbage_count;
static size_t room;
static uint64_t sent_data;

_Noreturn void link_violation(const char *rule)
{
    CHECK(rule && *rule);
    longjmp(violated, 1);
}

void link_send(uint8_t type, uint8_t channel, uint32_t stream, const void *payload, size_t size)
{
    /* What the guest says must keep the rules as well. */
    CHECK(size <= MAX_PAYLOAD && channel < CHANNELS);
    CHECK((stream == 0) == (type == FRAME_HELLO));
    if (type == FRAME_CREDIT)
        CHECK(size == 4 && get_u32(payload) > 0);
    else
        CHECK(fields_check((struct fields){payload, size}) == NULL);
}

size_t link_room(void)
{
    return room;
}

void loop_free(void *memory)
{
    CHECK(garbage_count < sizeof garbage / sizeof *garbage);
    garbage[garbage_count++] = memory;
}

void *pages_alloc(size_t size)
{
    return malloc(size);
}

void pages_free(void *pages, size_t size)
{
    (void)size;
    free(pages);
}

/* ---- a stream that does a little of everything ---- */

struct fake {
    struct stream stream;
    struct fake *next;
    uint64_t received[CHANNELS];
    bool slow; /* its RESET is answered later */
};

static struct fake *fakes;

static void end_fake(struct fake *fake, int error)
{
    struct fake **at = &fakes;
    while (*at != fake)
        at = &(*at)->next;
    *at = fake->next;
    stream_fail(&fake->stream, error, "fake");
}

static void fake_data(struct stream *stream, int channel, const uint8_t *bytes, size_t size)
{
    struct fake *fake = (struct fake *)stream;
    CHECK(size > 0 && !stream->reset && stream->inbound[channel].open);
    fake->received[channel] += size;
    if (bytes[0] & 1)
        stream_consumed(stream, channel, size);
    if (bytes[0] == 0xee)
        end_fake(fake, EIO);
}

static void fake_eof(struct stream *stream, int channel)
{
    stream_eof(stream, channel);
}

static void fake_control(struct stream *stream, struct fields fields)
{
    struct fake *fake = (struct fake *)stream;
    fake->slow = fields_int(fields, TAG_SIGNAL, 0) & 1;
    char *text = fields_string(fields, TAG_PATH);
    CHECK(!text || strlen(text) <= fields.size);
    free(text);
    stream_want(stream);
}

static void fake_reset(struct stream *stream)
{
    struct fake *fake = (struct fake *)stream;
    if (!fake->slow)
        end_fake(fake, ECANCELED);
}

static bool fake_pump(struct stream *stream)
{
    if (!stream->credit[1])
        return false;
    uint64_t part = stream->credit[1] < 1000 ? stream->credit[1] : 1000;
    stream->credit[1] -= part;
    sent_data += part;
    room -= part < room ? part : room;
    return stream->credit[1] > 0;
}

static const struct stream_kind fake_kind = {
    .data = fake_data, .eof = fake_eof, .control = fake_control, .reset = fake_reset, .pump = fake_pump};

void operation_epoch(void)
{
}

void operation_open(uint32_t id, struct fields fields)
{
    int64_t op = fields_int(fields, TAG_OP, 0);
    if (op == 0) {
        stream_refuse(id, ENOSYS, "no such operation");
        return;
    }
    struct fake *fake = calloc(1, sizeof *fake);
    CHECK(fake);
    stream_begin(&fake->stream, &fake_kind, id, fields);
    fake->next = fakes;
    fakes = fake;
    fake->slow = op & 1;
    for (int i = 0; i < CHANNELS; i++)
        if (op >> i & 1)
            stream_listen(&fake->stream, i);
    stream_want(&fake->stream);
}

static void collect(void)
{
    while (garbage_count)
        free(garbage[--garbage_count]);
}

/* ---- the targets ---- */

static void fuzz_stream(const uint8_t *data, size_t size)
{
    struct frame frame;
    if (!setjmp(violated)) {
        while (size >= HEADER_SIZE) {
            if (frame_read_header(data, &frame))
                break;
            if (size - HEADER_SIZE < frame.length)
                break;
            /* Of exactly its size, so that reading beyond it is seen. */
            uint8_t *payload = malloc(frame.length ? frame.length : 1);
            memcpy(payload, data + HEADER_SIZE, frame.length);
            bool broken = frame_check_payload(&frame, payload) != NULL;
            if (broken) {
                free(payload);
                break;
            }
            garbage[garbage_count++] = payload;
            room = 4096;
            if (frame.type != FRAME_SHUTDOWN)
                streams_take(&frame, payload);
            streams_pump();
            if (frame.stream && frame.channel == 0 && streams_busy())
                streams_pump();
            collect();
            data += HEADER_SIZE + frame.length;
            size -= HEADER_SIZE + frame.length;
        }
    }
    while (fakes)
        end_fake(fakes, 0);
    collect();
    CHECK(stream_count == 0 && !turns);
    epoch = 0;
}

static void fuzz_fields(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, data, size);
    struct fields fields = {copy, size};
    if (!fields_check(fields)) {
        size_t counted = 0, total = 0;
        uint16_t tag;
        const uint8_t *value;
        uint32_t length;
        for (struct fields rest = fields; fields_next(&rest, &tag, &value, &length);) {
            counted++;
            total += 6 + length;
            free(fields_string(fields, tag));
            CHECK(fields_count(fields, tag) > 0);
        }
        CHECK(total == size && counted <= size / 6);
        fields_int(fields, TAG_PORT, 0);
        /* Put together again, it is the same. */
        uint8_t *space = malloc(size ? size : 1);
        struct pack pack = {space, 0, size, false};
        for (struct fields rest = fields; fields_next(&rest, &tag, &value, &length);)
            pack_bytes(&pack, tag, value, length);
        CHECK(!pack.overflow && pack.size == size && !memcmp(space, copy, size));
        free(space);
    }
    free(copy);
}

static void fuzz_glob(const uint8_t *data, size_t size)
{
    const uint8_t *nul = memchr(data, 0, size);
    size_t pattern_size = nul ? (size_t)(nul - data) : size;
    char *pattern = strndup((const char *)data, pattern_size);
    char *name = nul ? strndup((const char *)nul + 1, size - pattern_size - 1) : strdup("name");
    struct glob glob;
    const char *reason = NULL;
    if (glob_compile(&glob, pattern, size & 1, &reason)) {
        CHECK(reason && *reason);
    } else {
        uint8_t *set = malloc(glob.set_size), *below = malloc(glob.set_size), *behind = malloc(glob.set_size);
        glob_begin(&glob, set);
        CHECK(!glob_set_is_empty(&glob, set));
        for (int depth = 0; depth < 3 && !glob_set_is_empty(&glob, set); depth++) {
            glob_step(&glob, set, name, depth & 1, below, behind);
            memcpy(set, depth ? behind : below, glob.set_size);
        }
        free(set);
        free(below);
        free(behind);
        glob_free(&glob);
    }
    match_name(pattern, strlen(pattern), name);
    /* A name without special characters matches itself. */
    if (!strpbrk(name, "*?[\\"))
        CHECK(match_name(name, strlen(name), name));
    CHECK(match_name("*", 1, name));
    free(pattern);
    free(name);
}

static void fuzz_tar(const uint8_t *data, size_t size)
{
    struct tar_header header;
    struct tar_override override = {0};
    uint8_t block[TAR_BLOCK] = {0}, out[TAR_BLOCK];
    memcpy(block, data, size < sizeof block ? size : sizeof block);
    tar_is_zero(block);
    tar_parse(block, &header);
    /* With a checksum that is right, so that the rest is reached. */
    int64_t sum = 0;
    for (int i = 0; i < TAR_BLOCK; i++)
        sum += i >= 148 && i < 156 ? ' ' : block[i];
    memset(block + 148, 0, 8);
    for (int i = 5; i >= 0; i--, sum >>= 3)
        block[148 + i] = (uint8_t)('0' + (sum & 7));
    if (!tar_parse(block, &header)) {
        CHECK(header.size >= 0 && header.mode >= 0 && header.mtime_s >= 0);
        tar_name_is_safe(header.name);
        struct tar_header again;
        if (tar_format(out, &header, header.name, header.target, 0, 0)) {
            CHECK(!tar_parse(out, &again));
            CHECK(again.size == header.size && again.mtime_s == header.mtime_s);
            CHECK(!strcmp(again.name, header.name) && !strcmp(again.target, header.target));
        }
    }
    char *copy = malloc(size ? size : 1);
    memcpy(copy, data, size);
    if (!tar_parse_pax(copy, size, &override) && override.name) {
        char *records = malloc(size + 64);
        size_t used = tar_put_pax(records, 0, size + 64, "path", override.name, strlen(override.name));
        struct tar_override again = {0};
        CHECK(used <= size + 64 && !tar_parse_pax(records, used, &again) && !strcmp(again.name, override.name));
        tar_override_clear(&again);
        free(records);
    }
    tar_override_clear(&override);
    free(copy);
}

/* Against a model that keeps everything. */
static void fuzz_ring(const uint8_t *data, size_t size)
{
    struct ring ring;
    uint8_t *all = malloc(size * 300 + 1);
    size_t total = 0;
    ring_begin(&ring, size ? data[0] * 40 : 0);
    for (size_t i = 1; i < size; i++) {
        struct iovec parts[2];
        size_t want = data[i] + 1 + (data[i] & 1 ? 4000 : 0), done = 0;
        want = want > 290 && total > 200 * size ? 290 : want;
        if (total + want > size * 300)
            break;
        int count = ring_reserve(&ring, want, parts);
        CHECK(count >= 1);
        size_t come = want - want / 3;
        for (int p = 0; p < count && done < come; p++)
            for (size_t k = 0; k < parts[p].iov_len && done < come; k++, done++)
                all[total + done] = ((uint8_t *)parts[p].iov_base)[k] = (uint8_t)(total + done + i);
        ring_commit(&ring, done);
        total += done;
        CHECK(ring.total == total && ring.kept <= ring.size);
        uint64_t from = ring_oldest(&ring) + (ring.kept ? data[i] % (ring.kept + 1) : 0);
        if (from < total) {
            size_t seen = 0;
            count = ring_view(&ring, from, SIZE_MAX, parts);
            for (int p = 0; p < count; p++) {
                CHECK(!memcmp(all + from + seen, parts[p].iov_base, parts[p].iov_len));
                seen += parts[p].iov_len;
            }
            CHECK(from + seen == total);
        }
    }
    ring_free(&ring);
    free(all);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size)
        return 0;
    switch (data[0] % 8) {
    case 1:
        fuzz_fields(data + 1, size - 1);
        break;
    case 2:
        fuzz_glob(data + 1, size - 1);
        break;
    case 3:
        fuzz_tar(data + 1, size - 1);
        break;
    case 4:
        fuzz_ring(data + 1, size - 1);
        break;
    default:
        fuzz_stream(data + 1, size - 1);
        break;
    }
    return 0;
}
