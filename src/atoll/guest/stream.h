/* Streams, credit and turns: see stream.c. */
#ifndef ATOLL_STREAM_H
#define ATOLL_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "frame.h"

enum { CHANNELS = FIRST_CHANNEL + MAX_CHANNELS };

struct stream;

/* What a stream serves. Any may be NULL. */
struct stream_kind {
    void (*data)(struct stream *stream, int channel, const uint8_t *bytes, size_t size);
    void (*eof)(struct stream *stream, int channel);
    void (*control)(struct stream *stream, struct fields fields);
    /* The host abandons the stream: end what it serves, then call stream_end(), now or later. */
    void (*reset)(struct stream *stream);
    /* Sends at most one DATA frame; true when it has more to send. Called after stream_want(), while there is room. */
    bool (*pump)(struct stream *stream);
};

/* The first member of the structure that serves a stream; allocated with malloc, freed by stream_end(). */
struct stream {
    const struct stream_kind *kind;
    uint32_t id;
    bool known;    /* the host knows it: false once a new epoch dropped it */
    bool reset;    /* the host sent RESET (or a new epoch did): nothing but END may be sent */
    bool has_turn;
    struct stream *same_hash;
    struct stream *next_turn;
    uint64_t credit[CHANNELS]; /* bytes that may be sent to the host */
    struct inbound {
        bool open;
        bool eof;
        uint32_t allowed; /* bytes that the host may still send */
        uint32_t owed;    /* bytes consumed since the last CREDIT */
        uint32_t window;
    } inbound[CHANNELS];
};

/* Registers a stream under its number; WINDOW is read from the fields of its OPEN. */
void stream_begin(struct stream *stream, const struct stream_kind *kind, uint32_t id, struct fields fields);

/* Sends END for a stream that was not begun. */
void stream_refuse(uint32_t id, int error, const char *about);

/* The host may send on this channel. */
void stream_listen(struct stream *stream, int channel);

/* `size` received bytes of the channel were consumed: returns credit for them. */
void stream_consumed(struct stream *stream, int channel, size_t size);

void stream_want(struct stream *stream);
void stream_event(struct stream *stream, const struct pack *fields);
void stream_eof(struct stream *stream, int channel);

/* Sends END; the stream's memory is freed after this round. */
void stream_end(struct stream *stream, const struct pack *fields);
void stream_fail(struct stream *stream, int error, const char *about);

/* Gives turns until there is no more room or no stream wants one. */
void streams_pump(void);

/* A stream wants a turn, and there is room. */
bool streams_busy(void);

/* One frame from the host that passed the checks of frame.c. */
void streams_take(const struct frame *frame, const uint8_t *payload);

#endif
