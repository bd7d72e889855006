/* Streams: their numbers, credit in both directions, fair turns to send.
 *
 * Owns the rules of PROTOCOL.md that span frames. Not here: what a stream serves (its struct stream_kind) and how
 * frames are read and written (link.c).
 *
 * Turns are a queue: a stream that sent one frame goes to its end, so that a busy stream delays the others by one
 * frame.
 */
#define _GNU_SOURCE
#include "stream.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "guest.h"
#include "link.h"
#include "loop.h"

enum {
    BUCKETS = 64,
    MAX_STREAMS = 4096,
    WIDE_WINDOW = 256 << 10, /* of a channel that has carried half its first credit */
    TURNS_PER_ROUND = 16,
};

static struct stream *buckets[BUCKETS];
static unsigned stream_count;
static struct stream *turns, **turns_tail = &turns;
static int64_t epoch;

static struct stream **find(uint32_t id)
{
    struct stream **at = &buckets[id % BUCKETS];
    while (*at && (*at)->id != id)
        at = &(*at)->same_hash;
    return at;
}

static void forget(struct stream *stream)
{
    if (!stream->known)
        return;
    struct stream **at = find(stream->id);
    *at = stream->same_hash;
    stream->known = false;
    stream_count--;
}

void stream_begin(struct stream *stream, const struct stream_kind *kind, uint32_t id, struct fields fields)
{
    memset(stream, 0, sizeof *stream);
    stream->kind = kind;
    stream->id = id;
    stream->known = true;
    int64_t window = fields_int(fields, TAG_WINDOW, 0);
    for (int i = 0; i < CHANNELS; i++)
        stream->credit[i] = window > 0 ? (uint64_t)window : 0;
    stream->same_hash = buckets[id % BUCKETS];
    buckets[id % BUCKETS] = stream;
    stream_count++;
}

void stream_refuse(uint32_t id, int error, const char *about)
{
    uint8_t space[640];
    struct pack fields = PACK(space);
    pack_error(&fields, error, about);
    link_send(FRAME_END, 0, id, fields.at, fields.size);
}

void stream_listen(struct stream *stream, int channel)
{
    stream->inbound[channel] = (struct inbound){.open = true, .allowed = INITIAL_CREDIT, .window = INITIAL_CREDIT};
}

/* A window is widened only for streams that use it: most carry a few bytes and should not cost a CREDIT frame. */
void stream_consumed(struct stream *stream, int channel, size_t size)
{
    struct inbound *inbound = &stream->inbound[channel];
    inbound->owed += (uint32_t)size;
    if (!stream->known || inbound->eof || inbound->owed < inbound->window / 2)
        return;
    uint32_t grant = inbound->owed;
    if (inbound->window < WIDE_WINDOW) {
        grant += WIDE_WINDOW - inbound->window;
        inbound->window = WIDE_WINDOW;
    }
    inbound->owed = 0;
    inbound->allowed += grant;
    uint8_t payload[4];
    put_u32(payload, grant);
    link_send(FRAME_CREDIT, (uint8_t)channel, stream->id, payload, sizeof payload);
}

void stream_want(struct stream *stream)
{
    if (stream->has_turn)
        return;
    stream->has_turn = true;
    stream->next_turn = NULL;
    *turns_tail = stream;
    turns_tail = &stream->next_turn;
}

static void drop_turn(struct stream *stream)
{
    if (!stream->has_turn)
        return;
    struct stream **at = &turns;
    while (*at != stream)
        at = &(*at)->next_turn;
    *at = stream->next_turn;
    if (turns_tail == &stream->next_turn)
        turns_tail = at;
    stream->has_turn = false;
}

void stream_event(struct stream *stream, const struct pack *fields)
{
    if (stream->known && !stream->reset)
        link_send(FRAME_EVENT, 0, stream->id, fields->at, fields->size);
}

void stream_eof(struct stream *stream, int channel)
{
    if (stream->known && !stream->reset)
        link_send(FRAME_EOF, (uint8_t)channel, stream->id, NULL, 0);
}

void stream_end(struct stream *stream, const struct pack *fields)
{
    if (stream->known)
        link_send(FRAME_END, 0, stream->id, fields->at, fields->size);
    drop_turn(stream);
    forget(stream);
    loop_free(stream);
}

void stream_fail(struct stream *stream, int error, const char *about)
{
    uint8_t space[640];
    struct pack fields = PACK(space);
    pack_error(&fields, error, about);
    stream_end(stream, &fields);
}

void streams_pump(void)
{
    for (int i = 0; i < TURNS_PER_ROUND && turns && link_room(); i++) {
        struct stream *stream = turns;
        drop_turn(stream);
        if (stream->kind->pump && stream->kind->pump(stream))
            stream_want(stream);
    }
}

bool streams_busy(void)
{
    return turns && link_room();
}

static void reset(struct stream *stream)
{
    if (stream->reset)
        return;
    stream->reset = true;
    stream->kind->reset(stream);
}

static void take_hello(struct fields fields)
{
    int64_t asked = fields_int(fields, TAG_EPOCH, 0);
    if (asked <= epoch)
        link_violation("epoch not greater than before");
    epoch = asked;
    for (int i = 0; i < BUCKETS; i++)
        while (buckets[i]) {
            struct stream *stream = buckets[i];
            forget(stream);
            reset(stream);
        }
    uint8_t space[64];
    struct pack answer = PACK(space);
    pack_int(&answer, TAG_VERSION, PROTOCOL_VERSION);
    pack_int(&answer, TAG_EPOCH, epoch);
    operation_epoch();
    link_send(FRAME_HELLO, 0, 0, answer.at, answer.size);
}

static void take_open(uint32_t id, struct fields fields)
{
    if (*find(id))
        link_violation("OPEN of a stream in use");
    if (stream_count >= MAX_STREAMS)
        stream_refuse(id, EMFILE, "too many streams");
    else
        operation_open(id, fields);
}

static void take_data(struct stream *stream, int channel, const uint8_t *bytes, uint32_t size)
{
    struct inbound *inbound = &stream->inbound[channel];
    if (!inbound->open)
        return;
    if (inbound->eof)
        link_violation("DATA after EOF");
    if (size > inbound->allowed)
        link_violation("DATA beyond the credit");
    inbound->allowed -= size;
    if (!stream->reset && stream->kind->data)
        stream->kind->data(stream, channel, bytes, size);
}

static void take_eof(struct stream *stream, int channel)
{
    struct inbound *inbound = &stream->inbound[channel];
    if (!inbound->open || inbound->eof)
        return;
    inbound->eof = true;
    if (!stream->reset && stream->kind->eof)
        stream->kind->eof(stream, channel);
}

static void take_credit(struct stream *stream, int channel, uint32_t more)
{
    /* At 2^32 per frame, 64 bits do not overflow before 2^32 frames. */
    stream->credit[channel] += more;
    if (!stream->reset)
        stream_want(stream);
}

void streams_take(const struct frame *frame, const uint8_t *payload)
{
    struct fields fields = {payload, frame->length};
    if (frame->type == FRAME_HELLO) {
        take_hello(fields);
        return;
    }
    if (frame->type == FRAME_OPEN) {
        take_open(frame->stream, fields);
        return;
    }
    struct stream *stream = *find(frame->stream);
    if (!stream || frame->channel >= CHANNELS)
        return; /* it crossed with END, or names a channel that no stream has */
    switch (frame->type) {
    case FRAME_DATA:
        take_data(stream, frame->channel, payload, frame->length);
        break;
    case FRAME_EOF:
        take_eof(stream, frame->channel);
        break;
    case FRAME_CREDIT:
        take_credit(stream, frame->channel, get_u32(payload));
        break;
    case FRAME_RESET:
        reset(stream);
        break;
    case FRAME_CONTROL:
        if (!stream->reset && stream->kind->control)
            stream->kind->control(stream, fields);
        break;
    default:
        break;
    }
}
