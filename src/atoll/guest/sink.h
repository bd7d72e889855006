/* Bytes from the host, written to a descriptor: see sink.c. */
#ifndef ATOLL_SINK_H
#define ATOLL_SINK_H

#include <stdbool.h>
#include <stdint.h>

#include "loop.h"
#include "stream.h"

/* What the end of the input does to the descriptor. */
enum sink_end { SINK_CLOSE, SINK_SHUTDOWN, SINK_TERMINAL };

struct sink {
    struct source *source;
    struct stream *writer; /* the stream that gets credit; NULL when none writes */
    int channel;
    enum sink_end end;
    uint8_t *queue;
    uint32_t start, size, cap;
    uint32_t foreign; /* bytes at the front from an earlier writer: no credit for them */
    bool ending;      /* the writer sent EOF */
    bool done;        /* the end was passed on, or the other side accepts no more */
};

void sink_begin(struct sink *sink, struct source *source, enum sink_end end);
void sink_set_writer(struct sink *sink, struct stream *writer, int channel);
void sink_put(struct sink *sink, const uint8_t *bytes, size_t size);
void sink_eof(struct sink *sink);

/* To be called when the source has an event. */
void sink_flush(struct sink *sink);
void sink_free(struct sink *sink);

#endif
