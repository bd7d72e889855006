/* Relays frames between many clients and the one link to the guest.
 *
 * Owns which client each stream belongs to, the credit of each stream, and freezing. Not here: what is done as time
 * passes (timing.c), and the meaning of operations. Its contract is PROTOCOL.md, "The keeper".
 *
 * A client's stream `s` in slot `c` is stream `c << 20 | s` to the guest. Only whole frames are relayed, so a client
 * may disconnect at any moment without tearing one. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "protocol.h"
#include "relay.h"

#define MAX_TIME_MS (INT64_MAX / 4) /* times may be added */

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
    FREEZE_TIMEOUT_MS = 5000,
    FREEZE_RETRY_MS = 100,
};

struct buffer {
    uint8_t *data;
    size_t start, end, capacity;
};

struct client {
    int fd; /* -1: gone; the slot is free when streams is 0 too */
    bool greeted;
    bool holds; /* HOLD or QUIESCE: until this client sends RELEASE or disconnects */
    unsigned streams, uses; /* its open streams, and those of them that count as use */
    struct buffer in, out;
};

struct stream {
    struct stream *next;
    uint32_t id;
    bool idle;   /* opened with IDLE 1: does not count as use of the sandbox */
    bool socket; /* a network operation: the guest has a socket for it */
    uint32_t credit[CHANNELS];
};

static struct client clients[CLIENTS];
static int client_count; /* slots in use or once used */
static struct stream *buckets[BUCKETS];
static struct buffer from_guest, to_guest;
struct relay_ends ends;
static uint8_t hello[HEADER_SIZE + 64];
static size_t hello_size;
static bool had_client;
bool paused, shutdown_sent;
int holders;
unsigned open_streams;

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

/* Makes room for `more` bytes at the end. */
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

/* Reads once into `b`, with room for the whole of a frame that has begun. 0: nothing now; -1: the end. */
static int fill(struct buffer *b, int fd)
{
    reserve(b, b->capacity >= LARGE || used(b) < SMALL / 2 ? 1 : LARGE - used(b));
    ssize_t n = read(fd, b->data + b->end, b->capacity - b->end);
    if (n > 0)
        b->end += (size_t)n;
    return n > 0 ? 1 : (n < 0 && (errno == EAGAIN || errno == EINTR)) ? 0 : -1;
}

/* Writes the queue. False: the other end is gone. */
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

/* Writes what can be written now, queues the rest. */
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
_Static_assert(sizeof(struct header) == HEADER_SIZE, "struct header must have the layout of the wire format");

static struct header header_at(const uint8_t *at)
{
    struct header h;
    memcpy(&h, at, sizeof h);
    return h;
}

size_t put_frame(uint8_t *at, uint8_t type, uint32_t stream, const void *payload, uint32_t length)
{
    struct header h = {.length = length, .type = type, .stream = stream};
    memcpy(at, &h, sizeof h);
    if (length)
        memcpy(at + HEADER_SIZE, payload, length);
    return HEADER_SIZE + length;
}

uint32_t put_field(uint8_t *at, uint16_t tag, const void *value, uint32_t length)
{
    memcpy(at, &tag, 2);
    memcpy(at + 2, &length, 4);
    memcpy(at + 6, value, length);
    return 6 + length;
}

/* The integer field `wanted` of a payload; `fallback` when it is missing, -1 when the fields are malformed. */
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
        if (size > length - 6 || (field_type(tag) == FIELD_INTEGER && size != INTEGER_SIZE))
            return -1;
        if (tag == wanted)
            memcpy(&found, payload + 6, INTEGER_SIZE);
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

void send_to_guest(const void *frame, size_t size)
{
    if (!pass(&to_guest, ends.to_guest, frame, size))
        give_up("writing to the guest");
}

static void reset(const struct stream *s)
{
    uint8_t frame[HEADER_SIZE];
    send_to_guest(frame, put_frame(frame, FRAME_RESET, s->id, NULL, 0));
}

/* Has the guest close its sockets: gVisor cannot save a socket that a process waits for. */
static void reset_sockets(void)
{
    for (int i = 0; i < BUCKETS; i++)
        for (struct stream *s = buckets[i]; s; s = s->next)
            if (s->socket)
                reset(s);
}

/* ---- freezing ---- */

static void thaw(void)
{
    if (write(ends.freezer, ends.thaw, strlen(ends.thaw)) < 0)
        dprintf(STDERR_FILENO, "keeper: thawing failed\n");
}

static bool is_frozen_now(void)
{
    char text[256];
    ssize_t size = pread(ends.frozen, text, sizeof text - 1, 0);
    text[size > 0 ? size : 0] = 0;
    for (char *line = text, *end; *line; line = end + (*end != 0)) {
        end = line + strcspn(line, "\n");
        if ((size_t)(end - line) == strlen(ends.is_frozen) && !memcmp(line, ends.is_frozen, (size_t)(end - line)))
            return true;
    }
    return false;
}

/* Processes that wait for each other in the kernel (a parent for its vforked child, gVisor for a process that it
 * traces) can keep each other from freezing. Thawed for a moment, they can be frozen. */
int freeze(void)
{
    if (ends.freezer < 0)
        return EOPNOTSUPP;
    int64_t began = now_ms(), again = began + FREEZE_RETRY_MS;
    if (write(ends.freezer, ends.freeze, strlen(ends.freeze)) < 0)
        return errno;
    while (!is_frozen_now()) {
        if (now_ms() > began + FREEZE_TIMEOUT_MS) {
            thaw();
            return EBUSY;
        }
        if (now_ms() > again) {
            thaw();
            poll(NULL, 0, 1);
            if (write(ends.freezer, ends.freeze, strlen(ends.freeze)) < 0)
                return errno;
            again = now_ms() + FREEZE_RETRY_MS;
        }
        poll(NULL, 0, 1);
    }
    return 0;
}

/* Waits until the guest has read all that was sent to it, so that no frame is torn when the sandbox is saved to
 * disk. */
static int quiesce(void)
{
    int64_t until = now_ms() + FREEZE_TIMEOUT_MS;
    struct pollfd p = {.fd = ends.to_guest, .events = POLLIN}; /* a FIFO, readable until the guest has read all */
    while (flush(&to_guest, ends.to_guest) && (used(&to_guest) > 0 || poll(&p, 1, 0) == 1)) {
        if (now_ms() > until)
            return EBUSY;
        poll(NULL, 0, 1);
    }
    return 0;
}

static void thaw_unless_held(void)
{
    if (!paused && holders == 0)
        thaw();
}

static void release_hold(struct client *c)
{
    if (!c->holds)
        return;
    c->holds = false;
    holders--;
    restart_idle();
    if (ends.freezer >= 0)
        thaw_unless_held();
}

static void resume(void)
{
    if (paused) {
        paused = false;
        thaw_unless_held();
    }
}

static void wake(void)
{
    note_use();
    resume();
}

static void drop_client(struct client *c)
{
    uint32_t slot = (uint32_t)(c - clients);
    release_hold(c);
    close(c->fd);
    c->fd = -1;
    release(&c->in);
    release(&c->out);
    if (c->uses)
        note_use(); /* until now: its streams end when the guest says so, which may be never */
    if (c->streams == 0)
        return;
    for (int i = 0; i < BUCKETS; i++)
        for (struct stream *s = buckets[i]; s; s = s->next)
            if (s->id >> STREAM_BITS == slot)
                reset(s);
}

static bool send_to_client(struct client *c, const uint8_t *data, size_t size)
{
    if (c->fd < 0)
        return true;
    if (!pass(&c->out, c->fd, data, size) || used(&c->out) > CLIENT_QUEUE) {
        drop_client(c);
        return false;
    }
    return true;
}

/* FREEZE. False: drop the client. */
static bool take_freeze(struct client *c, const uint8_t *payload, uint32_t length)
{
    int64_t action = int_field(payload, length, TAG_ACTION, -1), error = 0;
    if (action == FREEZE_RELEASE) {
        release_hold(c);
    } else if ((action == FREEZE_HOLD || action == FREEZE_QUIESCE) && !c->holds) {
        if (action == FREEZE_QUIESCE) {
            wake(); /* a frozen guest reads nothing */
            reset_sockets();
        }
        error = action == FREEZE_HOLD ? freeze() : quiesce();
        c->holds = !error;
        holders += c->holds;
    } else if (action == FREEZE_PAUSE) {
        error = freeze();
        paused = paused || !error;
    } else {
        return false;
    }
    uint8_t frame[HEADER_SIZE + 16], fields[16];
    append(&c->out, frame, put_frame(frame, FRAME_FROZEN, 0, fields, put_field(fields, TAG_ERRNO, &error, 8)));
    return true;
}

/* RECONFIGURE: replaces whether the sandbox ends with its last client, when it is paused, and when its lifetime is over.
 * Sent when a sandbox of the warm pool is claimed, and when its lifetime is changed. False: drop the client. */
static bool take_reconfigure(struct client *c, const uint8_t *payload, uint32_t length)
{
    int64_t keep = int_field(payload, length, TAG_KEEP, 1), pause_ms = int_field(payload, length, TAG_PAUSE_MS, 0);
    int64_t expires_ms = int_field(payload, length, TAG_EXPIRES_MS, 0);
    int64_t renewal_ms = int_field(payload, length, TAG_RENEWAL_MS, 0);
    int64_t freezes = int_field(payload, length, TAG_FREEZES_AT_END, 0);
    if (keep < 0 || keep > 1 || pause_ms < 0 || pause_ms > INT32_MAX)
        return false;
    if (expires_ms < 0 || expires_ms > MAX_TIME_MS || renewal_ms < 0 || renewal_ms > MAX_TIME_MS)
        return false;
    if (freezes < 0 || freezes > 1)
        return false;
    ends.ephemeral = !keep;
    ends.pause_after_ms = (int)pause_ms;
    ends.expires_ms = expires_ms;
    ends.renewal_ms = renewal_ms;
    ends.freezes_at_end = freezes;
    restart_idle(); /* a paused sandbox stays paused */
    uint8_t frame[HEADER_SIZE];
    append(&c->out, frame, put_frame(frame, FRAME_RECONFIGURED, 0, NULL, 0));
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

/* runsc waits until its helper processes, which are the keeper's children, are reaped; the machine's init may be
 * slow. */
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

/* Sends a last frame to the connections in the backlog: the first of these is waited for `patience_ms`. */
static void send_to_backlog(int listener, int patience_ms, const uint8_t *frame, size_t size)
{
    struct pollfd p = {.fd = listener, .events = POLLIN};
    for (int timeout = patience_ms; poll(&p, 1, timeout) == 1; timeout = 0) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            return;
        if (write(fd, frame, size) != (ssize_t)size)
            dprintf(STDERR_FILENO, "keeper: a client disconnected before the last frame\n");
        close(fd);
    }
}

static void send_to_all(int listener, int patience_ms, const uint8_t *frame, size_t size)
{
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0)
            send_to_client(&clients[i], frame, size);
    send_to_backlog(listener, patience_ms, frame, size);
}

void cut_clients(const char *message, bool waiting)
{
    uint8_t frame[HEADER_SIZE + 512];
    size_t size = gone_frame(frame, message, -1);
    bool congested = used(&to_guest) > GUEST_QUEUE; /* then a client may wait whose frames were not read */
    if (!waiting)
        send_to_backlog(ends.listener, 0, frame, size);
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0 && (!waiting || clients[i].streams || congested) &&
            send_to_client(&clients[i], frame, size))
            drop_client(&clients[i]);
}

void shut_down(void)
{
    uint8_t frame[HEADER_SIZE];
    shutdown_sent = true;
    resume(); /* a frozen guest cannot shut down */
    send_to_guest(frame, put_frame(frame, FRAME_SHUTDOWN, 0, NULL, 0));
}

static void finish(const char *message, int status) __attribute__((noreturn));
static void finish(const char *message, int status)
{
    uint8_t frame[HEADER_SIZE + 512];
    size_t size = gone_frame(frame, message, status);
    record_use();
    char text[320];
    int n = snprintf(text, sizeof text, "%s\n", message);
    if (write(ends.exit_file, text, (size_t)n) != n)
        dprintf(STDERR_FILENO, "keeper: the reason of the end could not be written: %s", text);
    send_to_all(ends.listener, 0, frame, size);
    /* Slow clients have a second to read their queues. */
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
    send_to_guest(frame, put_frame(frame, FRAME_SHUTDOWN, 0, NULL, 0));
    finish(message, -1);
}

/* ---- guest to clients ---- */

static void greet(struct client *c)
{
    if (hello_size && c->fd >= 0 && !c->greeted) {
        c->greeted = true;
        send_to_client(c, hello, hello_size);
    }
}

/* The HELLO of the new epoch, which a restored guest is sent and answers with. */
static size_t epoch_hello(uint8_t *frame)
{
    uint8_t fields[28];
    int64_t version = PROTOCOL_VERSION;
    uint32_t size = put_field(fields, TAG_VERSION, &version, 8);
    size += put_field(fields + size, TAG_EPOCH, &ends.epoch, 8);
    return put_frame(frame, FRAME_HELLO, 0, fields, size);
}

/* A restored guest may first send the rest of a frame that it had begun when it was saved: bytes before its HELLO are
 * stale. */
static void skip_stale(void)
{
    uint8_t wanted[HEADER_SIZE + 28];
    size_t size = epoch_hello(wanted);
    while (used(&from_guest) >= size && memcmp(from_guest.data + from_guest.start, wanted, size))
        from_guest.start++;
}

static void first_frame(const struct header *h, const uint8_t *frame)
{
    if (h->type != FRAME_HELLO || h->stream != 0 || h->length > sizeof hello - HEADER_SIZE)
        violation("the first frame is not HELLO");
    if (int_field(frame + HEADER_SIZE, h->length, TAG_VERSION, -1) != PROTOCOL_VERSION)
        violation("protocol version is not 1");
    memcpy(hello, frame, HEADER_SIZE + h->length);
    hello_size = HEADER_SIZE + h->length;
    for (int i = 0; i < client_count; i++)
        greet(&clients[i]);
}

/* Checks one frame from the guest and restores the client's stream number. Returns its client, or NULL: not for a
 * client. */
static struct client *take_guest_frame(uint8_t *frame)
{
    struct header h = header_at(frame);
    if (!hello_size) {
        first_frame(&h, frame);
        return NULL;
    }
    if (is_pong(h.stream, h.type))
        return NULL;
    struct stream **at = find(h.stream), *s = *at;
    if (!s)
        violation("frame of a stream that is not open");
    switch (h.type) {
    case FRAME_DATA:
        if (h.length == 0 || h.channel >= CHANNELS || s->credit[h.channel] < h.length)
            violation("DATA beyond the credit");
        s->credit[h.channel] -= h.length;
        break;
    case FRAME_EOF:
    case FRAME_CREDIT:
        if (h.channel >= CHANNELS || h.length != (h.type == FRAME_EOF ? 0 : 4))
            violation("malformed EOF or CREDIT");
        break;
    case FRAME_EVENT:
    case FRAME_END:
        if (h.channel != 0)
            violation("channel in a frame without one");
        break;
    default:
        violation("frame type that a guest may not send");
    }
    struct client *c = &clients[h.stream >> STREAM_BITS];
    h.stream &= (1u << STREAM_BITS) - 1;
    memcpy(frame, &h, sizeof h);
    if (h.type == FRAME_END) {
        *at = s->next;
        c->streams--;
        c->uses -= !s->idle;
        open_streams -= !s->idle;
        if (!s->idle)
            note_use();
        free(s);
    }
    return c;
}

static void check_size(const struct header *h)
{
    if (h->length > MAX_PAYLOAD || h->reserved != 0)
        violation("payload too long or reserved bytes set");
}

static void take_from_guest(void)
{
    if (fill(&from_guest, ends.from_guest) < 0)
        give_up("reading from the guest");
    if (ends.epoch && !hello_size) {
        skip_stale();
        if (used(&from_guest) < HEADER_SIZE + 28)
            return;
    }
    /* Consecutive frames for one client are sent in one write. */
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
                send_to_client(owner, run, run_size);
            owner = c;
            run = frame;
            run_size = 0;
        }
        run_size += size;
        from_guest.start += size;
    }
    if (owner)
        send_to_client(owner, run, run_size);
}

/* ---- clients to guest ---- */

/* Checks one frame from a client and sets the guest's stream number. 1: relay it; 2: relay it, though it does not count
 * as use of the sandbox; 0: drop it; -1: drop the client. */
static int take_client_frame(struct client *c, uint8_t *frame)
{
    struct header h = header_at(frame);
    if (h.type == FRAME_SHUTDOWN)
        return h.stream == 0 && h.length == 0 ? 1 : -1;
    if (h.type == FRAME_FREEZE)
        return h.stream == 0 && take_freeze(c, frame + HEADER_SIZE, h.length) ? 0 : -1;
    if (h.type == FRAME_RECONFIGURE)
        return h.stream == 0 && take_reconfigure(c, frame + HEADER_SIZE, h.length) ? 0 : -1;
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
        int64_t op = int_field(frame + HEADER_SIZE, h.length, TAG_OP, 0);
        s->socket = op == OP_DIAL || op == OP_LISTEN || op == OP_ACCEPT;
        s->idle = int_field(frame + HEADER_SIZE, h.length, TAG_IDLE, 0) == 1;
        c->streams++;
        c->uses += !s->idle;
        open_streams += !s->idle;
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
    return s->idle ? 2 : 1;
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
        if (verdict == 1)
            wake();
        else if (verdict)
            resume();
        if (verdict > 0)
            guest_was_asked();
        if (verdict == 0 || !run) {
            if (run)
                send_to_guest(run, run_size);
            run = verdict ? frame : NULL;
            run_size = 0;
        }
        run_size += verdict ? size : 0;
        c->in.start += size;
    }
    if (run)
        send_to_guest(run, run_size);
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

/* Whether the kernel has killed a process of the sandbox for its memory limit. */
static bool was_out_of_memory(void)
{
    char text[512];
    ssize_t size = ends.oom < 0 ? 0 : pread(ends.oom, text, sizeof text - 1, 0);
    text[size > 0 ? size : 0] = 0;
    const char *count = strstr(text, "oom_kill ");
    return count && atoi(count + strlen("oom_kill ")) > 0;
}

static void sandbox_ended(void)
{
    /* The guest's last frames are still in the pipe. */
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
    /* Not if it ended in good order: newer gVisor also survives such a kill, of one of its processes. */
    if (!(status >= 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0) && was_out_of_memory())
        snprintf(message, sizeof message, "out of memory: it reached its memory limit");
    if (is_past_end())
        snprintf(message, sizeof message, LIFETIME_OVER);
    finish(message, status);
}

bool has_no_clients(void)
{
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0)
            return false;
    return true;
}

bool is_greeted(void)
{
    return hello_size > 0;
}

bool is_used_now(void)
{
    for (int i = 0; i < client_count; i++)
        if (clients[i].fd >= 0 && clients[i].uses)
            return true;
    return false;
}

bool is_sending(void)
{
    return used(&to_guest) > 0;
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
    note_use();
    int64_t deadline = now_ms() + HELLO_TIMEOUT_MS;
    bool shrunk = false;
    for (;;) {
        if (ends.ephemeral && had_client && !shutdown_sent && has_no_clients())
            shut_down();
        check_lifetime();
        int n = 0;
        polls[n++] = (struct pollfd){.fd = ends.from_guest, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = ends.pidfd, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = is_ending() ? -1 : ends.listener, .events = POLLIN};
        polls[n++] = (struct pollfd){.fd = used(&to_guest) ? ends.to_guest : -1, .events = POLLOUT};
        bool congested = used(&to_guest) > GUEST_QUEUE;
        for (int i = 0; i < client_count; i++)
            if (clients[i].fd >= 0) {
                bool listen = hello_size && !congested && (holders == 0 || clients[i].holds);
                short want = (short)((listen ? POLLIN : 0) | (used(&clients[i].out) ? POLLOUT : 0));
                slots[n] = i;
                polls[n++] = (struct pollfd){.fd = clients[i].fd, .events = want};
            }
        record_use();
        int64_t waits = deadline - now_ms();
        int timeout = hello_size ? time_left() : waits < 0 ? 0 : (int)waits;
        if (hello_size && !shrunk && (timeout < 0 || timeout > IDLE_MS))
            timeout = IDLE_MS;
        int ready = poll(polls, (nfds_t)n, timeout);
        if (ready < 0 && errno != EINTR)
            give_up("poll");
        if (polls[0].revents)
            guest_was_heard();
        else
            check_silence();
        if (ready == 0 && !hello_size) {
            relay_fail(ends.listener, ETIMEDOUT, "the guest did not send HELLO within 20 s");
            finish("the guest did not send HELLO within 20 s", -1);
        }
        if (ready == 0) {
            if (!shrunk)
                shrink();
            shrunk = true;
            check_pause();
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
            else if ((polls[i].revents & POLLIN) && (holders == 0 || c->holds)) /* HOLD may have begun in this round */
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

void relay_announce(const struct relay_ends *given)
{
    uint8_t frame[HEADER_SIZE + 28];
    ends = *given;
    size_t size = epoch_hello(frame);
    if (write(ends.to_guest, frame, size) != (ssize_t)size)
        give_up("announcing the epoch");
}

/* Sends FAILED to all clients that wait for the sandbox to start. */
void relay_fail(int listener, int error, const char *message)
{
    static uint8_t frame[HEADER_SIZE + 8192], fields[8192];
    int64_t number = error;
    uint32_t size = put_field(fields, TAG_ERRNO, &number, 8);
    size += put_field(fields + size, TAG_MESSAGE, message, (uint32_t)strnlen(message, 8000));
    size_t total = put_frame(frame, FRAME_FAILED, 0, fields, size);
    send_to_all(listener, 2000, frame, total);
}
