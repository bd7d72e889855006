/* How many clients share the one stream to a guest.
 *
 * Knows frames' headers, who owns which stream, and how much each stream may still carry. Refuses to know what
 * operations mean. PROTOCOL.md, "The keeper", is its contract.
 *
 * A client's stream `s` in slot `c` is stream `c << 20 | s` to the guest. Only whole frames are passed on, so a
 * client may vanish at any moment without tearing one. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "keeper.h"
#include "protocol.h"

enum {
    CLIENTS = 1024,
    STREAM_BITS = 20,
    BUCKETS = 1024,
    CHANNELS = FIRST_CHANNEL + MAX_CHANNELS,
    SMALL = 16 * 1024,
    LARGE = 2 * (HEADER_SIZE + MAX_PAYLOAD),
    GUEST_QUEUE = 1 << 20,   /* above this, clients are not read */
    CLIENT_QUEUE = 64 << 20, /* above this, a client that does not read is dropped */
    MAX_CREDIT = 16 << 20,
    HELLO_TIMEOUT_MS = 20000,
    IDLE_MS = 1000,
};

struct buffer {
    uint8_t *data;
    size_t start, end, capacity;
};

struct client {
    int fd; /* -1: gone; the slot is free when streams is 0 too */
    bool greeted;
    unsigned streams;
    struct buffer in, out;
};

struct stream {
    struct stream *next;
    uint32_t id;
    uint32_t credit[CHANNELS];
};

static struct client clients[CLIENTS];
static int client_count; /* slots in use or once used */
static struct stream *buckets[BUCKETS];
static struct buffer from_guest, to_guest;
static struct relay_ends ends;
static uint8_t hello[HEADER_SIZE + 64];
static size_t hello_size;
static bool had_client, shutdown_sent;

/* ---- buffers ---- */

static size_t used(const struct buffer *b)
{
    return b->end - b->start;
}

static void release(struct buffer *b)
{
    free(b->data);
    *b = (struct buffer){0};
}

/* Room for `more` bytes behind what is there. */
static void reserve(struct buffer *b, size_t more)
{
    if (b->start == b->end)
        b->start = b->end = 0;
    if (b->capacity - b->end >= more)
        return;
    if (b->start > 0) {
        memmove(b->data, b->data + b->start, used(b));
        b->end -= b->start;
        b->start = 0;
    }
    if (b->capacity - b->end >= more)
        return;
    size_t capacity = b->capacity ? b->capacity : SMALL;
    while (capacity - b->end < more)
        capacity *= 2;
    uint8_t *data = realloc(b->data, capacity);
    if (!data)
        give_up("out of memory");
    b->data = data;
    b->capacity = capacity;
}

static void append(struct buffer *b, const void *data, size_t size)
{
    reserve(b, size);
    memcpy(b->data + b->end, data, size);
    b->end += size;
}

/* Read once into `b`. A frame that has begun is given all the room that it needs. 0: nothing now; -1: the end. */
static int fill(struct buffer *b, int fd)
{
    reserve(b, b->capacity >= LARGE || used(b) < SMALL / 2 ? 1 : LARGE - used(b));
    ssize_t n = read(fd, b->data + b->end, b->capacity - b->end);
    if (n > 0)
        b->end += (size_t)n;
    return n > 0 ? 1 : (n < 0 && (errno == EAGAIN || errno == EINTR)) ? 0 : -1;
}

/* Write what is queued. False: the other end is gone. */
static bool flush(struct buffer *b, int fd)
{
    while (used(b) > 0) {
        ssize_t n = write(fd, b->data + b->start, used(b));
        if (n < 0)
            return errno == EAGAIN || errno == EINTR;
        b->start += (size_t)n;
    }
    return true;
}

/* Write now what can be written, queue the rest. */
static bool pass(struct buffer *queue, int fd, const uint8_t *data, size_t size)
{
    if (used(queue) == 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno != EAGAIN && errno != EINTR)
            return false;
        if (n > 0) {
            data += n;
            size -= (size_t)n;
        }
    }
    if (size > 0)
        append(queue, data, size);
    return true;
}

/* ---- frames ---- */

struct header {
    uint32_t length;
    uint8_t type, channel;
    uint16_t reserved;
    uint32_t stream;
};
_Static_assert(sizeof(struct header) == HEADER_SIZE, "the header is packed by its layout");

static struct header header_at(const uint8_t *at)
{
    struct header h;
    memcpy(&h, at, sizeof h);
    return h;
}

static size_t put_frame(uint8_t *at, uint8_t type, uint32_t stream, const void *payload, uint32_t length)
{
    struct header h = {.length = length, .type = type, .stream = stream};
    memcpy(at, &h, sizeof h);
    if (length)
        memcpy(at + HEADER_SIZE, payload, length);
    return HEADER_SIZE + length;
}

static uint32_t put_field(uint8_t *at, uint16_t tag, const void *value, uint32_t length)
{
    memcpy(at, &tag, 2);
    memcpy(at + 2, &length, 4);
    memcpy(at + 6, value, length);
    return 6 + length;
}

/* The integer field `tag` of a payload; `fallback` when it is missing, -1 when the fields are broken. */
static int64_t int_field(const uint8_t *payload, uint32_t length, uint16_t wanted, int64_t fallback)
{
    int64_t found = fallback;
    while (length > 0) {
        uint16_t tag;
        uint32_t size;
        if (length < 6)
            return -1;
        memcpy(&tag, payload, 2);
        memcpy(&size, payload + 2, 4);
        if (size > length - 6 || (tag == wanted && size != 8))
            return -1;
        if (tag == wanted)
            memcpy(&found, payload + 6, 8);
        payload += 6 + size;
        length -= 6 + size;
    }
    return found;
}

/* ---- streams ---- */

static struct stream **find(uint32_t id)
{
    struct stream **at = &buckets[(id ^ id >> STREAM_BITS) % BUCKETS];
    while (*at && (*at)->id != id)
        at = &(*at)->next;
    return at;
}

static void to_the_guest(const void *frame, size_t size)
{
    if (!pass(&to_guest, ends.to_guest, frame, size))
        give_up("writing to the guest");
}

static void drop_client(struct client *c)
{
    uint32_t slot = (uint32_t)(c - clients);
    close(c->fd);
    c->fd = -1;
    release(&c->in);
    release(&c->out);
    if (c->streams == 0)
        return;
    for (int i = 0; i < BUCKETS; i++)
        for (struct stream *s = buckets[i]; s; s = s->next)
            if (s->id >> STREAM_BITS == slot) {
                uint8_t frame[HEADER_SIZE];
                to_the_guest(frame, put_frame(frame, FRAME_RESET, s->id, NULL, 0));
            }
}

static bool to_a_client(struct client *c, const uint8_t *data, size_t size)
{
    if (c->fd < 0)
        return true;
    if (!pass(&c->out, c->fd, data, size) || used(&c->out) > CLIENT_QUEUE) {
        drop_client(c);
        return false;
    }
    return true;
}

/* ---- the end ---- */

static size_t gone_frame(uint8_t *frame, const char *message, int status)
{
    uint8_t fields[512];
    uint32_t size = 0;
    int64_t value;
    if (status >= 0 && WIFEXITED(status)) {
        value = WEXITSTATUS(status);
        size += put_field(fields + size, TAG_EXIT_CODE, &value, 8);
    } else if (status >= 0 && WIFSIGNALED(status)) {
        value = WTERMSIG(status);
        size += put_field(fields + size, TAG_SIGNAL, &value, 8);
    }
    size += put_field(fields + size, TAG_MESSAGE, message, (uint32_t)strnlen(message, 256));
    return put_frame(frame, FRAME_GONE, 0, fields, size);
}

/* runsc waits until its helper processes, which are children of ours, are reaped; the machine's init may be slow. */
static void reap_all(void)
{
    for (int round = 0; round < 1000; round++) {
        pid_t pid = wait4(-1, NULL, WNOHANG, NULL);
        if (pid < 0)
            return;
        if (pid == 0)
            poll(NULL, 0, 2);
    }
}

/* The last word, for all clients and for those who wait to be one: the first of these for up to `patience_ms`. */
static void tell_all(int listener, int patience_ms, const uint8_t *frame, size_t size)
{
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0)
            to_a_client(&clients[i], frame, size);
    struct pollfd p = {.fd = listener, .events = POLLIN};
    for (int timeout = patience_ms; poll(&p, 1, timeout) == 1; timeout = 0) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            return;
        if (write(fd, frame, size) != (ssize_t)size)
            dprintf(STDERR_FILENO, "keeper: a client left before it was told\n");
        close(fd);
    }
}

static void finish(const char *message, int status) __attribute__((noreturn));
static void finish(const char *message, int status)
{
    uint8_t frame[HEADER_SIZE + 512];
    size_t size = gone_frame(frame, message, status);
    char text[320];
    int n = snprintf(text, sizeof text, "%s\n", message);
    if (write(ends.exit_file, text, (size_t)n) != n)
        dprintf(STDERR_FILENO, "keeper: the reason could not be written: %s", text);
    tell_all(ends.listener, 0, frame, size);
    /* Slow readers get a second to take what is theirs. */
    for (int round = 0; round < 20; round++) {
        bool waiting = false;
        for (int i = 0; i < client_count; i++)
            if (clients[i].fd >= 0 && used(&clients[i].out) > 0 && flush(&clients[i].out, clients[i].fd))
                waiting |= used(&clients[i].out) > 0;
        if (!waiting)
            break;
        poll(NULL, 0, 50);
    }
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0)
            close(clients[i].fd);
    reap_all();
    _exit(0);
}

static void violation(const char *what) __attribute__((noreturn));
static void violation(const char *what)
{
    char message[256];
    snprintf(message, sizeof message, "protocol: %s", what);
    uint8_t frame[HEADER_SIZE];
    to_the_guest(frame, put_frame(frame, FRAME_SHUTDOWN, 0, NULL, 0));
    finish(message, -1);
}

/* ---- guest to clients ---- */

static void greet(struct client *c)
{
    if (hello_size && c->fd >= 0 && !c->greeted) {
        c->greeted = true;
        to_a_client(c, hello, hello_size);
    }
}

static void first_frame(const struct header *h, const uint8_t *frame)
{
    if (h->type != FRAME_HELLO || h->stream != 0 || h->length > sizeof hello - HEADER_SIZE)
        violation("the first frame is not HELLO");
    if (int_field(frame + HEADER_SIZE, h->length, TAG_VERSION, -1) != PROTOCOL_VERSION)
        violation("a version that is not 1");
    memcpy(hello, frame, HEADER_SIZE + h->length);
    hello_size = HEADER_SIZE + h->length;
    for (int i = 0; i < client_count; i++)
        greet(&clients[i]);
}

/* Check one frame of the guest's and make it the client's. Returns whose it is, or NULL: nobody's. */
static struct client *take_guest_frame(uint8_t *frame)
{
    struct header h = header_at(frame);
    if (!hello_size) {
        first_frame(&h, frame);
        return NULL;
    }
    struct stream **at = find(h.stream), *s = *at;
    if (!s)
        violation("a frame of a stream that is not open");
    switch (h.type) {
    case FRAME_DATA:
        if (h.length == 0 || h.channel >= CHANNELS || s->credit[h.channel] < h.length)
            violation("more data than was asked for");
        s->credit[h.channel] -= h.length;
        break;
    case FRAME_EOF:
    case FRAME_CREDIT:
        if (h.channel >= CHANNELS || h.length != (h.type == FRAME_EOF ? 0 : 4))
            violation("a bad frame of flow control");
        break;
    case FRAME_EVENT:
    case FRAME_END:
        if (h.channel != 0)
            violation("a channel where none belongs");
        break;
    default:
        violation("a frame of a type that is not the guest's");
    }
    struct client *c = &clients[h.stream >> STREAM_BITS];
    h.stream &= (1u << STREAM_BITS) - 1;
    memcpy(frame, &h, sizeof h);
    if (h.type == FRAME_END) {
        *at = s->next;
        free(s);
        c->streams--;
    }
    return c;
}

static void check_size(const struct header *h)
{
    if (h->length > MAX_PAYLOAD || h->reserved != 0)
        violation("a frame that is too large");
}

static void take_from_guest(void)
{
    if (fill(&from_guest, ends.from_guest) < 0)
        give_up("reading from the guest");
    /* Neighbouring frames of one client go out in one write. */
    struct client *owner = NULL;
    uint8_t *run = NULL;
    size_t run_size = 0;
    while (used(&from_guest) >= HEADER_SIZE) {
        uint8_t *frame = from_guest.data + from_guest.start;
        struct header h = header_at(frame);
        check_size(&h);
        size_t size = HEADER_SIZE + h.length;
        if (used(&from_guest) < size) {
            break;
        }
        struct client *c = take_guest_frame(frame);
        if (c != owner || !c) {
            if (owner)
                to_a_client(owner, run, run_size);
            owner = c;
            run = frame;
            run_size = 0;
        }
        run_size += size;
        from_guest.start += size;
    }
    if (owner)
        to_a_client(owner, run, run_size);
}

/* ---- clients to guest ---- */

/* Check one frame of a client's and make it the guest's. 1: pass it on; 0: drop it; -1: drop the client. */
static int take_client_frame(struct client *c, uint8_t *frame)
{
    struct header h = header_at(frame);
    if (h.type == FRAME_SHUTDOWN)
        return h.stream == 0 && h.length == 0 ? 1 : -1;
    if (h.stream == 0 || h.stream >> STREAM_BITS)
        return -1;
    h.stream |= (uint32_t)(c - clients) << STREAM_BITS;
    struct stream **at = find(h.stream), *s = *at;
    if (h.type == FRAME_OPEN) {
        int64_t window = int_field(frame + HEADER_SIZE, h.length, TAG_WINDOW, 0);
        if (s || window < 0 || window > MAX_CREDIT || !(s = calloc(1, sizeof *s)))
            return -1;
        s->id = h.stream;
        for (int i = 0; i < CHANNELS; i++)
            s->credit[i] = (uint32_t)window;
        *at = s;
        c->streams++;
    } else if (h.type < FRAME_DATA || h.type > FRAME_CONTROL || h.channel >= CHANNELS) {
        return -1;
    } else if (!s) {
        return 0; /* it crossed with END */
    } else if (h.type == FRAME_CREDIT) {
        uint32_t more;
        if (h.length != 4)
            return -1;
        memcpy(&more, frame + HEADER_SIZE, 4);
        if (more > MAX_CREDIT - s->credit[h.channel])
            return -1;
        s->credit[h.channel] += more;
    }
    memcpy(frame, &h, sizeof h);
    return 1;
}

static void take_from_client(struct client *c)
{
    if (fill(&c->in, c->fd) < 0) {
        drop_client(c);
        return;
    }
    uint8_t *run = NULL;
    size_t run_size = 0;
    int verdict = 0;
    while (used(&c->in) >= HEADER_SIZE) {
        uint8_t *frame = c->in.data + c->in.start;
        struct header h = header_at(frame);
        size_t size = HEADER_SIZE + h.length;
        if (h.length > MAX_PAYLOAD || h.reserved != 0) {
            verdict = -1;
            break;
        }
        if (used(&c->in) < size)
            break;
        verdict = take_client_frame(c, frame);
        if (verdict < 0)
            break;
        if (verdict == 0 || !run) {
            if (run)
                to_the_guest(run, run_size);
            run = verdict ? frame : NULL;
            run_size = 0;
        }
        run_size += verdict ? size : 0;
        c->in.start += size;
    }
    if (run)
        to_the_guest(run, run_size);
    if (verdict < 0)
        drop_client(c);
}

static void accept_client(void)
{
    int fd = accept4(ends.listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0)
        return;
    int slot = 0;
    while (slot < client_count && (clients[slot].fd >= 0 || clients[slot].streams > 0))
        slot++;
    if (slot == CLIENTS) {
        close(fd);
        return;
    }
    if (slot == client_count)
        client_count++;
    clients[slot] = (struct client){.fd = fd};
    had_client = true;
    greet(&clients[slot]);
}

/* ---- the loop ---- */

static int64_t now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void sandbox_ended(void)
{
    /* What the guest wrote last is still in the pipe. */
    struct pollfd p = {.fd = ends.from_guest, .events = POLLIN};
    while (poll(&p, 1, 0) == 1 && (p.revents & POLLIN))
        take_from_guest();
    int status = -1;
    if (wait4(ends.pid, &status, WNOHANG, NULL) != ends.pid)
        status = -1;
    char message[64];
    if (status >= 0 && WIFEXITED(status))
        snprintf(message, sizeof message, "exited with status %d", WEXITSTATUS(status));
    else if (status >= 0 && WIFSIGNALED(status))
        snprintf(message, sizeof message, "killed by signal %d", WTERMSIG(status));
    else
        snprintf(message, sizeof message, "ended");
    finish(message, status);
}

static bool nobody_left(void)
{
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0)
            return false;
    return true;
}

static void shrink(void)
{
    struct buffer *shared[] = {&from_guest, &to_guest};
    for (int i = 0; i < 2; i++)
        if (used(shared[i]) == 0)
            release(shared[i]);
    for (int i = 0; i < client_count; i++) {
        if (used(&clients[i].in) == 0)
            release(&clients[i].in);
        if (used(&clients[i].out) == 0)
            release(&clients[i].out);
    }
}

void relay_run(const struct relay_ends *given)
{
    static struct pollfd polls[4 + CLIENTS];
    static int slots[4 + CLIENTS];
    ends = *given;
    int64_t deadline = now_ms() + HELLO_TIMEOUT_MS;
    bool shrunk = false;
    for (;;) {
        if (ends.ephemeral && had_client && !shutdown_sent && nobody_left()) {
            uint8_t frame[HEADER_SIZE];
            shutdown_sent = true;
            to_the_guest(frame, put_frame(frame, FRAME_SHUTDOWN, 0, NULL, 0));
        }
        int n = 0;
        polls[n++] = (struct pollfd){.fd = ends.from_guest, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = ends.pidfd, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = ends.listener, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = used(&to_guest) ? ends.to_guest : -1, .events = POLLOUT};
        bool congested = used(&to_guest) > GUEST_QUEUE;
        for (int i = 0; i < client_count; i++)
            if (clients[i].fd >= 0) {
                short want = (short)((hello_size && !congested ? POLLIN : 0) | (used(&clients[i].out) ? POLLOUT : 0));
                slots[n] = i;
                polls[n++] = (struct pollfd){.fd = clients[i].fd, .events = want};
            }
        int timeout = !hello_size ? (int)(deadline - now_ms()) : shrunk ? -1 : IDLE_MS;
        int ready = poll(polls, (nfds_t)n, !hello_size && timeout < 0 ? 0 : timeout);
        if (ready < 0 && errno != EINTR)
            give_up("poll");
        if (ready == 0 && !hello_size) {
            relay_fail(ends.listener, ETIMEDOUT, "the guest did not answer in time");
            finish("the guest did not answer in time", -1);
        }
        if (ready == 0) {
            shrink();
            shrunk = true;
            continue;
        }
        shrunk = false;
        if (polls[3].revents && !flush(&to_guest, ends.to_guest))
            give_up("writing to the guest");
        if (polls[0].revents)
            take_from_guest();
        for (int i = 4; i < n; i++) {
            struct client *c = &clients[slots[i]];
            if (c->fd != polls[i].fd)
                continue;
            if ((polls[i].revents & POLLOUT) && !flush(&c->out, c->fd))
                drop_client(c);
            else if (polls[i].revents & POLLIN)
                take_from_client(c);
            else if (polls[i].revents & (POLLHUP | POLLERR | POLLNVAL))
                drop_client(c);
        }
        if (polls[1].revents)
            sandbox_ended();
        if (polls[2].revents)
            accept_client();
    }
}

/* Tell those who wait for a sandbox that it did not start. */
void relay_fail(int listener, int error, const char *message)
{
    static uint8_t frame[HEADER_SIZE + 8192], fields[8192];
    int64_t number = error;
    uint32_t size = put_field(fields, TAG_ERRNO, &number, 8);
    size += put_field(fields + size, TAG_MESSAGE, message, (uint32_t)strnlen(message, 8000));
    size_t total = put_frame(frame, FRAME_FAILED, 0, fields, size);
    tell_all(listener, 2000, frame, total);
}
