/* Answers programs that try to leave the sandbox while no host process serves the egress proxy.
 *
 * Owns the proxy's port as long as no LISTEN of the host has it. A connection there gets one HTTP answer, 403, that
 * names the rule which would allow the request. Without it a program would say that a name does not resolve, or that a
 * connection was refused, and neither says why. Not here: the proxy itself, which is the host's (net.c listens for it).
 *
 * Every client is hostile: a connection holds no more than a descriptor, is read to a bound and closed in time, and
 * what it sent is used for the text of its own answer alone. */
#define _GNU_SOURCE
#include "refuse.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "loop.h"

enum { MAX_REFUSALS = 32, BACKLOG = 128, TIMEOUT_MS = 5000, CHUNK = 4096, MAX_READ = 256 << 10, MAX_TARGET = 255 };

struct refusal {
    struct source source;
    struct timer timer;
    size_t received;
};

static struct source listener = {.fd = -1};
static int proxy_port;
static int refusal_count;

static void accept_some(void);

static void close_refusal(struct refusal *refusal)
{
    timer_cancel(&refusal->timer);
    loop_remove(&refusal->source);
    loop_free(refusal);
    refusal_count--;
    accept_some();
}

static void on_timeout(struct timer *timer)
{
    close_refusal(container_of(timer, struct refusal, timer));
}

/* The host and port of a request to a proxy, as far as they can be part of a rule: "example.com:443". Empty: none. */
static void read_target(const char *request, size_t size, char *target)
{
    const char *end = request + size, *at = memchr(request, ' ', size);
    size_t used = 0;
    *target = 0;
    if (!at)
        return;
    bool tunnel = size > 8 && !memcmp(request, "CONNECT ", 8);
    at++;
    if (end - at > 7 && !memcmp(at, "http://", 7))
        at += 7;
    else if (!tunnel)
        return;
    while (at < end && used < MAX_TARGET && (isalnum((unsigned char)*at) || strchr(".-:[]", *at)) && *at)
        target[used++] = *at++;
    target[used] = 0;
    if (used && !strchr(target, ':'))
        strcpy(target + used, ":80");
}

static void answer(struct refusal *refusal, const char *request, size_t size)
{
    char name[65] = "", target[MAX_TARGET + 4], fix[400], text[600], head[600];
    gethostname(name, sizeof name - 1);
    read_target(request, size, target);
    snprintf(fix, sizeof fix, "atoll network %s --allow %s", name, *target ? target : "HOST:PORT");
    int length = snprintf(text, sizeof text,
                          "No connection leaves this sandbox: it has no network policy, or no process serves it now. "
                          "To allow this one: %s\n",
                          fix);
    /* In the reason too: of an answer to CONNECT, programs show nothing else. */
    int head_length = snprintf(head, sizeof head,
                               "HTTP/1.1 403 No network policy; to allow this: %s\r\n"
                               "Content-Type: text/plain; charset=utf-8\r\n"
                               "Content-Length: %d\r\nConnection: close\r\n\r\n",
                               fix, length);
    send(refusal->source.fd, head, (size_t)head_length, MSG_NOSIGNAL | MSG_MORE);
    send(refusal->source.fd, text, (size_t)length, MSG_NOSIGNAL);
    shutdown(refusal->source.fd, SHUT_WR);
}

/* Reads to the end also after the answer: closing with unread data would be a reset, which can destroy the answer. */
static void on_refusal(struct source *source)
{
    struct refusal *refusal = container_of(source, struct refusal, source);
    char chunk[CHUNK];
    while (source->readable) {
        ssize_t count = recv(source->fd, chunk, sizeof chunk, 0);
        if (count < 0 && errno == EINTR)
            continue;
        if (count < 0 && errno == EAGAIN) {
            source->readable = false;
            return;
        }
        if (count > 0 && !refusal->received)
            answer(refusal, chunk, (size_t)count);
        if (count > 0 && (refusal->received += (size_t)count) <= MAX_READ)
            continue;
        close_refusal(refusal);
        return;
    }
}

static void refuse(int fd)
{
    struct refusal *refusal = calloc(1, sizeof *refusal);
    if (!refusal || loop_add(&refusal->source, fd, on_refusal)) {
        free(refusal);
        close(fd);
        return;
    }
    refusal_count++;
    timer_set(&refusal->timer, TIMEOUT_MS, on_timeout);
}

static void accept_some(void)
{
    while (listener.fd >= 0 && listener.readable && refusal_count < MAX_REFUSALS) {
        int fd = accept4(listener.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0)
            refuse(fd);
        else if (errno != EINTR && errno != ECONNABORTED)
            listener.readable = false; /* EAGAIN; or out of descriptors, until the next connection */
    }
}

static void on_listener(struct source *source)
{
    (void)source;
    accept_some();
}

bool refuse_set_port(const char *text)
{
    char *end;
    long port = strtol(text, &end, 10);
    if (port < 1 || port > 65535 || *end)
        return false;
    proxy_port = (int)port;
    return true;
}

void refuse_yield(int port)
{
    if (port == proxy_port && listener.fd >= 0)
        loop_remove(&listener);
}

void refuse_resume(int port)
{
    if (!proxy_port || listener.fd >= 0 || (port && port != proxy_port))
        return;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)proxy_port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    /* Root inside may have taken the port: then it answers, and nothing is lost but the text. */
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, BACKLOG) < 0 ||
        loop_add(&listener, fd, on_listener))
        close(fd);
}
