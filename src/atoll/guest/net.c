/* Connections on loopback: dialling, listening, accepting.
 *
 * Owns TCP on 127.0.0.1 and ::1, half-closed connections, and accepted connections that wait for ACCEPT. Not here:
 * names, other addresses, the content of a connection. The host decides which ports and peers are permitted.
 */
#define _GNU_SOURCE
#include "net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "link.h"
#include "loop.h"
#include "refuse.h"
#include "sink.h"
#include "stream.h"

enum { MAX_WAITING = 128, ACCEPT_TIMEOUT_MS = 30000, BACKLOG = 1024 };

struct address {
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } at;
    socklen_t size;
};

/* 0, or EINVAL when it is not a port or not loopback. */
static int read_address(struct fields fields, int64_t lowest_port, struct address *address)
{
    int64_t port = fields_int(fields, TAG_PORT, -1);
    const uint8_t *host = (const uint8_t *)"127.0.0.1";
    uint32_t size = 9;
    fields_find(fields, TAG_HOST, &host, &size);
    if (port < lowest_port || port > 65535)
        return EINVAL;
    memset(address, 0, sizeof *address);
    if (size == 9 && !memcmp(host, "127.0.0.1", 9)) {
        address->size = sizeof address->at.v4;
        address->at.v4 = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
        address->at.v4.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return 0;
    }
    if (size == 3 && !memcmp(host, "::1", 3)) {
        address->size = sizeof address->at.v6;
        address->at.v6 = (struct sockaddr_in6){
            .sin6_family = AF_INET6, .sin6_port = htons((uint16_t)port), .sin6_addr = in6addr_loopback};
        return 0;
    }
    return EINVAL;
}

static int open_socket(const struct address *address)
{
    return socket(address->at.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* ---- a connection ---- */

struct connection {
    struct stream stream;
    struct source source;
    struct sink sink;
    bool connected;
    bool received_all; /* the peer's direction has ended */
};

static void close_connection(struct connection *connection)
{
    loop_remove(&connection->source);
    sink_free(&connection->sink);
}

static void fail(struct connection *connection, int error)
{
    close_connection(connection);
    stream_fail(&connection->stream, error, NULL);
}

static bool end_when_done(struct connection *connection)
{
    if (!connection->received_all || !connection->sink.done)
        return false;
    close_connection(connection);
    stream_end(&connection->stream, &(struct pack){0});
    return true;
}

static void say_connected(struct connection *connection)
{
    uint8_t space[32];
    struct pack fields = PACK(space);
    int one = 1;
    setsockopt(connection->source.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connection->connected = true;
    sink_begin(&connection->sink, &connection->source, SINK_SHUTDOWN);
    sink_set_writer(&connection->sink, &connection->stream, 0);
    stream_listen(&connection->stream, 0);
    pack_int(&fields, TAG_EVENT, EVENT_CONNECTED);
    stream_event(&connection->stream, &fields);
}

static void finish_connecting(struct connection *connection)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(connection->source.fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error)
        fail(connection, error);
    else
        say_connected(connection);
}

static void on_connection(struct source *source)
{
    struct connection *connection = container_of(source, struct connection, source);
    if (!connection->connected) {
        if (source->writable)
            finish_connecting(connection);
        if (source->fd < 0 || !connection->connected)
            return;
    }
    sink_flush(&connection->sink);
    if (!end_when_done(connection))
        stream_want(&connection->stream);
}

/* Without credit nothing may be read, but an end must still be noticed. */
static ssize_t peek_end(struct connection *connection)
{
    char byte;
    ssize_t count = recv(connection->source.fd, &byte, 1, MSG_PEEK);
    if (count > 0)
        errno = EAGAIN;
    return count > 0 ? -1 : count;
}

static ssize_t receive(struct connection *connection)
{
    uint64_t *credit = &connection->stream.credit[1];
    if (!*credit)
        return peek_end(connection);
    size_t size = *credit < MAX_PAYLOAD ? (size_t)*credit : MAX_PAYLOAD;
    uint8_t *place = link_reserve(&size);
    if (!place) {
        errno = EINTR;
        return -1;
    }
    ssize_t count = recv(connection->source.fd, place, size, 0);
    if (count > 0) {
        link_commit(connection->stream.id, 1, (size_t)count);
        *credit -= (uint64_t)count;
        /* Read until EAGAIN: gVisor may have reported the end together with the data, and does not report it again. */
    }
    return count;
}

static bool pump(struct stream *stream)
{
    struct connection *connection = container_of(stream, struct connection, stream);
    if (!connection->connected || connection->received_all || !connection->source.readable)
        return false;
    bool had_credit = stream->credit[1] > 0;
    ssize_t count = receive(connection);
    if (count == 0) {
        connection->received_all = true;
        stream_eof(stream, 1);
        end_when_done(connection);
        return false;
    }
    if (count < 0 && errno != EAGAIN && errno != EINTR) {
        fail(connection, errno);
        return false;
    }
    if (count < 0 && errno == EAGAIN && had_credit)
        connection->source.readable = false;
    /* Once more when the credit was just used up, to notice an end. */
    return connection->source.readable && had_credit;
}

static void take_data(struct stream *stream, int channel, const uint8_t *bytes, size_t size)
{
    struct connection *connection = container_of(stream, struct connection, stream);
    (void)channel;
    sink_put(&connection->sink, bytes, size);
    end_when_done(connection);
}

static void take_eof(struct stream *stream, int channel)
{
    struct connection *connection = container_of(stream, struct connection, stream);
    (void)channel;
    sink_eof(&connection->sink);
    end_when_done(connection);
}

static void take_reset(struct stream *stream)
{
    struct connection *connection = container_of(stream, struct connection, stream);
    /* A reset, not an end of file: the peer must not mistake a part for the whole. */
    struct linger abort = {.l_onoff = 1, .l_linger = 0};
    setsockopt(connection->source.fd, SOL_SOCKET, SO_LINGER, &abort, sizeof abort);
    fail(connection, ECANCELED);
}

static const struct stream_kind connection_kind = {
    .data = take_data,
    .eof = take_eof,
    .reset = take_reset,
    .pump = pump,
};

/* Takes ownership of the descriptor, also when it fails. */
static struct connection *begin_connection(uint32_t id, struct fields fields, int fd)
{
    struct connection *connection = calloc(1, sizeof *connection);
    int error = connection ? loop_add(&connection->source, fd, on_connection) : ENOMEM;
    if (error) {
        close(fd);
        free(connection);
        stream_refuse(id, error, NULL);
        return NULL;
    }
    stream_begin(&connection->stream, &connection_kind, id, fields);
    return connection;
}

void net_open_dial(uint32_t id, struct fields fields)
{
    struct address address;
    int error = read_address(fields, 1, &address);
    if (error) {
        stream_refuse(id, error, "PORT or HOST");
        return;
    }
    int fd = open_socket(&address);
    if (fd < 0) {
        stream_refuse(id, errno, NULL);
        return;
    }
    /* Loopback often refuses or connects at once; after EINPROGRESS the loop reports the outcome. */
    if (connect(fd, &address.at.any, address.size) < 0 && errno != EINPROGRESS) {
        stream_refuse(id, errno, NULL);
        close(fd);
        return;
    }
    begin_connection(id, fields, fd);
}

/* ---- listening ---- */

struct listener;

struct waiting {
    struct waiting *next;
    struct listener *listener;
    struct timer timer;
    int64_t id;
    int fd;
};

struct listener {
    struct stream stream;
    struct source source;
    int waiting_count;
    int port; /* as the host asked for it; 0: any */
};

static struct waiting *all_waiting;
static int64_t last_id;

static void accept_some(struct listener *listener);

/* Removes one from the list; the caller owns its descriptor. */
static int take_out(struct waiting *waiting)
{
    struct waiting **at = &all_waiting;
    int fd = waiting->fd;
    while (*at != waiting)
        at = &(*at)->next;
    *at = waiting->next;
    timer_cancel(&waiting->timer);
    waiting->listener->waiting_count--;
    loop_free(waiting);
    return fd;
}

static void on_not_taken(struct timer *timer)
{
    struct waiting *waiting = container_of(timer, struct waiting, timer);
    struct listener *listener = waiting->listener;
    close(take_out(waiting));
    accept_some(listener);
}

static void announce(struct listener *listener, int fd, int peer_port)
{
    struct waiting *waiting = calloc(1, sizeof *waiting);
    if (!waiting) {
        close(fd);
        return;
    }
    waiting->id = ++last_id;
    waiting->fd = fd;
    waiting->listener = listener;
    waiting->next = all_waiting;
    all_waiting = waiting;
    listener->waiting_count++;
    timer_set(&waiting->timer, ACCEPT_TIMEOUT_MS, on_not_taken);
    uint8_t space[64];
    struct pack event = PACK(space);
    pack_int(&event, TAG_EVENT, EVENT_ACCEPTED);
    pack_int(&event, TAG_CONN, waiting->id);
    pack_int(&event, TAG_PEER_PORT, peer_port);
    stream_event(&listener->stream, &event);
}

static int port_of(const struct address *address)
{
    return ntohs(address->at.any.sa_family == AF_INET6 ? address->at.v6.sin6_port : address->at.v4.sin_port);
}

static void accept_some(struct listener *listener)
{
    while (listener->source.readable && listener->waiting_count < MAX_WAITING) {
        struct address peer = {.size = sizeof peer.at};
        int fd = accept4(listener->source.fd, &peer.at.any, &peer.size, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            announce(listener, fd, port_of(&peer));
        else if (errno != EINTR && errno != ECONNABORTED)
            listener->source.readable = false; /* EAGAIN; or out of descriptors, until the next connection */
    }
}

static void on_listener(struct source *source)
{
    accept_some(container_of(source, struct listener, source));
}

static void stop_listening(struct stream *stream)
{
    struct listener *listener = container_of(stream, struct listener, stream);
    for (struct waiting *waiting = all_waiting, *next; waiting; waiting = next) {
        next = waiting->next;
        if (waiting->listener == listener)
            close(take_out(waiting));
    }
    loop_remove(&listener->source);
    refuse_resume(listener->port);
    stream_fail(stream, ECANCELED, NULL);
}

static const struct stream_kind listener_kind = {.reset = stop_listening};

static int start_listening(struct listener *listener, const struct address *address)
{
    int one = 1, fd = open_socket(address);
    if (fd < 0)
        return errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    int error = bind(fd, &address->at.any, address->size) < 0 || listen(fd, BACKLOG) < 0 ? errno : 0;
    if (!error)
        error = loop_add(&listener->source, fd, on_listener);
    if (error)
        close(fd);
    return error;
}

void net_open_listen(uint32_t id, struct fields fields)
{
    struct address address;
    struct listener *listener = calloc(1, sizeof *listener);
    int error = listener ? read_address(fields, 0, &address) : ENOMEM;
    if (!error) {
        listener->port = port_of(&address);
        refuse_yield(listener->port);
        error = start_listening(listener, &address);
    }
    if (error) {
        refuse_resume(0);
        free(listener);
        stream_refuse(id, error, "PORT or HOST");
        return;
    }
    stream_begin(&listener->stream, &listener_kind, id, fields);
    address.size = sizeof address.at;
    getsockname(listener->source.fd, &address.at.any, &address.size);
    uint8_t space[64];
    struct pack event = PACK(space);
    pack_int(&event, TAG_EVENT, EVENT_LISTENING);
    pack_int(&event, TAG_PORT, port_of(&address));
    stream_event(&listener->stream, &event);
}

void net_open_accept(uint32_t id, struct fields fields)
{
    int64_t wanted = fields_int(fields, TAG_CONN, 0);
    struct waiting *waiting = all_waiting;
    while (waiting && waiting->id != wanted)
        waiting = waiting->next;
    if (!waiting) {
        stream_refuse(id, ENOENT, "no such connection is waiting");
        return;
    }
    struct listener *listener = waiting->listener;
    struct connection *connection = begin_connection(id, fields, take_out(waiting));
    if (connection)
        say_connected(connection);
    accept_some(listener);
}
