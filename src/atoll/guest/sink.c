/* Bytes from the host, written to a pipe, a socket or a terminal.
 *
 * Owns partial writes, returning credit, and the form of an end of input. Not here: the process that reads.
 *
 * Credit is returned only for bytes that were written, so the queue never holds more than a window. Input for a reader
 * that is gone is discarded, with credit: the host must not hang on a process that closed its stdin.
 */
#define _GNU_SOURCE
#include "sink.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SMALLEST_QUEUE = 4096, END_OF_TRANSMISSION = 4 };

void sink_begin(struct sink *sink, struct source *source, enum sink_end end)
{
    *sink = (struct sink){.source = source, .end = end};
    source->writable = true; /* to be tried: the kernel reports only changes */
}

void sink_set_writer(struct sink *sink, struct stream *writer, int channel)
{
    sink->writer = writer;
    sink->channel = channel;
    sink->foreign = sink->size;
}

void sink_free(struct sink *sink)
{
    free(sink->queue);
    sink->queue = NULL;
    sink->start = sink->size = sink->cap = sink->foreign = 0;
}

static void consumed(struct sink *sink, size_t size)
{
    size_t foreign = size < sink->foreign ? size : sink->foreign;
    sink->foreign -= (uint32_t)foreign;
    if (sink->writer && size > foreign)
        stream_consumed(sink->writer, sink->channel, size - foreign);
}

static void give_up(struct sink *sink)
{
    uint32_t left = sink->size;
    sink->done = true;
    if (sink->end == SINK_CLOSE)
        loop_remove(sink->source);
    consumed(sink, left);
    sink_free(sink);
}

/* How many bytes were written; sets done when the descriptor will never accept more. */
static size_t attempt(struct sink *sink, const uint8_t *bytes, size_t size)
{
    if (!sink->source->writable)
        return 0;
    ssize_t count = write(sink->source->fd, bytes, size);
    if (count >= 0)
        return (size_t)count;
    if (errno == EAGAIN)
        sink->source->writable = false;
    else if (errno != EINTR)
        give_up(sink);
    return 0;
}

static void pass_end_on(struct sink *sink)
{
    static const uint8_t end_of_transmission = END_OF_TRANSMISSION;
    switch (sink->end) {
    case SINK_CLOSE:
        loop_remove(sink->source);
        break;
    case SINK_SHUTDOWN:
        shutdown(sink->source->fd, SHUT_WR);
        break;
    case SINK_TERMINAL:
        if (!attempt(sink, &end_of_transmission, 1))
            return; /* continues when it is writable; a terminal that is gone has set done */
        /* A terminal has no end: the next attachment may type on. */
        sink->ending = false;
        return;
    }
    sink->done = true;
}

void sink_flush(struct sink *sink)
{
    while (sink->size && sink->source->writable && !sink->done) {
        size_t count = attempt(sink, sink->queue + sink->start, sink->size);
        if (sink->done)
            return;
        sink->start += (uint32_t)count;
        sink->size -= (uint32_t)count;
        consumed(sink, count);
    }
    if (!sink->size && sink->queue)
        sink_free(sink);
    if (!sink->size && sink->ending && !sink->done)
        pass_end_on(sink);
}

static bool make_room(struct sink *sink, size_t size)
{
    if (sink->start && sink->cap - sink->start - sink->size < size) {
        memmove(sink->queue, sink->queue + sink->start, sink->size);
        sink->start = 0;
    }
    if (sink->cap - sink->start - sink->size >= size)
        return true;
    uint32_t cap = sink->cap ? sink->cap : SMALLEST_QUEUE;
    while (cap - sink->size < size)
        cap *= 2;
    uint8_t *queue = realloc(sink->queue, cap);
    if (!queue)
        return false;
    sink->queue = queue;
    sink->cap = cap;
    return true;
}

void sink_put(struct sink *sink, const uint8_t *bytes, size_t size)
{
    size_t taken = 0;
    if (!sink->size && !sink->done) {
        taken = attempt(sink, bytes, size);
        consumed(sink, taken);
    }
    size_t left = size - taken;
    if (!left)
        return;
    if (sink->done) {
        consumed(sink, left);
    } else if (!make_room(sink, left)) {
        /* Without memory the input ends here: a gap in it would be worse than an end. */
        give_up(sink);
        consumed(sink, left);
    } else {
        memcpy(sink->queue + sink->start + sink->size, bytes + taken, left);
        sink->size += (uint32_t)left;
    }
}

void sink_eof(struct sink *sink)
{
    sink->ending = true;
    sink_flush(sink);
}
