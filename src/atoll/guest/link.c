/* The byte stream to and from the host.
 *
 * Owns the two descriptors, reading and writing whole frames, and the limits on queued bytes. Not here: streams
 * (stream.c).
 *
 * Memory is bounded: DATA is queued only while less than FULL bytes are queued, and every other frame answers a frame
 * of the host's or a stream that it opened, so reading pauses while PAUSE bytes are queued. The buffers are released
 * after a second without traffic.
 */
#define _GNU_SOURCE
#include "link.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "guest.h"
#include "loop.h"

enum {
    IN_SIZE = 2 * (MAX_PAYLOAD + HEADER_SIZE),
    OUT_SIZE = 1 << 20,
    FULL = 256 << 10,  /* above this, no more DATA is queued */
    PAUSE = 512 << 10, /* above this, the host is not read */
    COPY_BELOW = 16 << 10,
    TRIM_AFTER_MS = 1000,
};

static struct source in, out;
static uint8_t *in_buffer, *out_buffer;
static size_t in_start, in_end;
static size_t out_start, out_end, out_size;
static bool held; /* whole frames are left unread because too much output is queued */
static bool bulk;
static struct timer trim_timer;

void link_renew(void)
{
    loop_renew(&in);
    loop_renew(&out);
}

static void on_event(struct source *source)
{
    (void)source; /* only the flags matter: the main loop reads and flushes in every round */
}

void link_start(int in_fd, int out_fd)
{
    if (loop_add(&in, in_fd, on_event) || loop_add(&out, out_fd, on_event))
        _exit(71);
    in.readable = out.writable = true;
}

_Noreturn void link_violation(const char *rule)
{
    struct iovec parts[] = {
        {"atoll-guest: protocol: ", 23},
        {(char *)rule, strlen(rule)},
        {"\n", 1},
    };
    if (writev(2, parts, 3) < 0) {
        /* stderr is closed: the exit status says it */
    }
    guest_end(70);
}

static size_t waiting(void)
{
    return out_end - out_start;
}

static void on_trim(struct timer *timer)
{
    if (in_start == in_end && in_buffer) {
        pages_free(in_buffer, IN_SIZE);
        in_buffer = NULL;
        in_start = in_end = 0;
    }
    if (!waiting() && out_buffer) {
        pages_free(out_buffer, out_size);
        out_buffer = NULL;
        out_start = out_end = out_size = 0;
    }
    if (in_buffer || out_buffer)
        timer_set(timer, TRIM_AFTER_MS, on_trim);
}

static void touch(void)
{
    if (!trim_timer.set)
        timer_set(&trim_timer, TRIM_AFTER_MS, on_trim);
}

/* Without memory for its own answers the guest cannot serve any stream. */
static void *pages_or_die(size_t size)
{
    void *pages = pages_alloc(size);
    if (!pages)
        guest_end(71);
    touch();
    return pages;
}

/* Makes `size` bytes of room at the end; moves or grows the queue if it must. */
static uint8_t *out_place(size_t size)
{
    if (!out_buffer) {
        out_size = OUT_SIZE;
        out_buffer = pages_or_die(out_size);
    }
    if (!waiting())
        out_start = out_end = 0;
    if (out_size - out_end < size && out_start) {
        memmove(out_buffer, out_buffer + out_start, waiting());
        out_end -= out_start;
        out_start = 0;
    }
    if (out_size - out_end < size) {
        size_t bigger = out_size;
        while (bigger - out_end < size)
            bigger *= 2;
        uint8_t *moved = pages_or_die(bigger);
        memcpy(moved, out_buffer, out_end);
        pages_free(out_buffer, out_size);
        out_buffer = moved;
        out_size = bigger;
    }
    return out_buffer + out_end;
}

static void out_append(const void *bytes, size_t size)
{
    if (!size)
        return;
    memcpy(out_place(size), bytes, size);
    out_end += size;
}

void link_send(uint8_t type, uint8_t channel, uint32_t stream, const void *payload, size_t size)
{
    uint8_t header[HEADER_SIZE];
    frame_write_header(header, &(struct frame){(uint32_t)size, type, channel, stream});
    out_append(header, sizeof header);
    out_append(payload, size);
}

size_t link_room(void)
{
    return waiting() < FULL ? MAX_PAYLOAD : 0;
}

/* A FIFO holds 64 KiB by default; with a fast reader that means a context switch per 64 KiB. */
static void expect_bulk(size_t size)
{
    if (bulk || size < COPY_BELOW)
        return;
    bulk = true;
    fcntl(out.fd, F_SETPIPE_SZ, 512 << 10);
}

static size_t written(ssize_t count)
{
    if (count >= 0)
        return (size_t)count;
    if (errno == EAGAIN || errno == EINTR) {
        out.writable = errno == EINTR;
        return 0;
    }
    guest_end(0); /* the other end of a socket is closed: as SHUTDOWN */
}

void link_send_data(uint32_t stream, uint8_t channel, const struct iovec *parts, int count)
{
    uint8_t header[HEADER_SIZE];
    size_t size = 0;
    struct iovec all[4];
    for (int i = 0; i < count; i++) {
        size += parts[i].iov_len;
        all[i + 2] = parts[i];
    }
    frame_write_header(header, &(struct frame){(uint32_t)size, FRAME_DATA, channel, stream});
    size_t done = 0;
    expect_bulk(size);
    if (size >= COPY_BELOW && out.writable) {
        all[0] = (struct iovec){out_buffer + out_start, waiting()};
        all[1] = (struct iovec){header, sizeof header};
        done = written(writev(out.fd, all, count + 2));
    }
    if (done < waiting()) {
        out_start += done;
        done = 0;
    } else {
        done -= waiting();
        out_start = out_end = 0;
    }
    all[1] = (struct iovec){header, sizeof header};
    for (int i = 1; i < count + 2; i++) {
        size_t skip = done < all[i].iov_len ? done : all[i].iov_len;
        done -= skip;
        out_append((uint8_t *)all[i].iov_base + skip, all[i].iov_len - skip);
    }
}

uint8_t *link_reserve(size_t *size)
{
    if (!link_room())
        return NULL;
    if (*size > MAX_PAYLOAD)
        *size = MAX_PAYLOAD;
    return out_place(HEADER_SIZE + *size) + HEADER_SIZE;
}

void link_commit(uint32_t stream, uint8_t channel, size_t size)
{
    frame_write_header(out_buffer + out_end, &(struct frame){(uint32_t)size, FRAME_DATA, channel, stream});
    out_end += HEADER_SIZE + size;
    expect_bulk(size);
}

void link_flush(void)
{
    while (waiting() && out.writable)
        out_start += written(write(out.fd, out_buffer + out_start, waiting()));
}

/* Dispatches every whole frame; leaves the beginning of one, or all the rest when reading must pause. */
static void take_frames(void (*take)(const struct frame *frame, const uint8_t *payload))
{
    struct frame frame;
    held = false;
    while (in_end - in_start >= HEADER_SIZE) {
        if (waiting() >= PAUSE) {
            held = true;
            return;
        }
        const char *broken = frame_read_header(in_buffer + in_start, &frame);
        if (broken)
            link_violation(broken);
        if (in_end - in_start < HEADER_SIZE + (size_t)frame.length)
            break;
        const uint8_t *payload = in_buffer + in_start + HEADER_SIZE;
        broken = frame_check_payload(&frame, payload);
        if (broken)
            link_violation(broken);
        in_start += HEADER_SIZE + frame.length;
        take(&frame, payload);
    }
    if (in_start && in_end > in_start)
        memmove(in_buffer, in_buffer + in_start, in_end - in_start);
    in_end -= in_start;
    in_start = 0;
}

bool link_busy(void)
{
    return (held || in.readable) && waiting() < PAUSE;
}

void link_read(void (*take)(const struct frame *frame, const uint8_t *payload))
{
    if (held)
        take_frames(take);
    if (held || !in.readable || waiting() >= PAUSE)
        return;
    if (!in_buffer)
        in_buffer = pages_or_die(IN_SIZE);
    touch();
    size_t room = IN_SIZE - in_end;
    ssize_t count = read(in.fd, in_buffer + in_end, room);
    if (count == 0)
        guest_end(0); /* only a test's socket or pipe has an end: the host is gone */
    if (count < 0) {
        if (errno != EAGAIN && errno != EINTR)
            guest_end(0);
        in.readable = errno == EINTR;
        return;
    }
    /* A short read has emptied it, unless an end of file follows. */
    in.readable = in.hangup || (size_t)count == room;
    in_end += (size_t)count;
    take_frames(take);
}
