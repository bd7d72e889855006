/* Feeds the keeper's relay with frames of hostile guests and careless clients, in any order and any pieces.
 *
 * The input is a script: an operation, a length, and so many bytes for it. Bytes from the guest arrive as DATA of
 * real streams often enough, since a client's OPEN in the script registers them. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

static jmp_buf ended;
static void leave(int code) __attribute__((noreturn));
static void leave(int code)
{
    longjmp(ended, code + 1);
}
#define _exit leave
#define poll(fds, count, timeout) poll(fds, count, 0) /* never waits */
#include "../../src/atoll/drivers/keeper/relay.c"
#include "../../src/atoll/drivers/keeper/timing.c"

void give_up(const char *what)
{
    (void)what;
    leave(1);
}

static void pair(int fds[2])
{
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) < 0)
        abort();
}

static void forget_everything(void)
{
    for (int i = 0; i < client_count; i++) {
        if (clients[i].fd >= 0)
            close(clients[i].fd);
        release(&clients[i].in);
        release(&clients[i].out);
        clients[i] = (struct client){0};
    }
    client_count = 0;
    for (int i = 0; i < BUCKETS; i++)
        while (buckets[i]) {
            struct stream *next = buckets[i]->next;
            free(buckets[i]);
            buckets[i] = next;
        }
    release(&from_guest);
    release(&to_guest);
    hello_size = 0;
    had_client = shutdown_sent = paused = expiry_enforced = is_cut = asked = pinged = false;
    expired_ms = tick_ms = 0;
    open_streams = 0;
    holders = 0;
}

static void drain(int fd)
{
    static char sink[65536];
    while (read(fd, sink, sizeof sink) > 0)
        ;
}

static int guest[2], to[2], peers[4];

static void connect_client(int index)
{
    int fds[2];
    pair(fds);
    int slot = 0;
    while (slot < client_count && (clients[slot].fd >= 0 || clients[slot].streams > 0))
        slot++;
    if (slot == client_count)
        client_count++;
    clients[slot] = (struct client){.fd = fds[0]};
    peers[index] = fds[1];
    greet(&clients[slot]);
}

static void play(const uint8_t *data, size_t size)
{
    while (size >= 2) {
        uint8_t op = data[0];
        size_t length = data[1];
        data += 2;
        size -= 2;
        if (length > size)
            length = size;
        int index = op >> 4 & 3;
        switch (op & 3) {
        case 0: /* the guest says something */
            if (write(guest[1], data, length) == (ssize_t)length)
                take_from_guest();
            break;
        case 1: /* a client says something */
            if (peers[index] >= 0 && write(peers[index], data, length) >= 0)
                for (int i = 0; i < client_count; i++)
                    if (clients[i].fd >= 0)
                        take_from_client(&clients[i]);
            break;
        case 2: /* a client comes, or goes */
            if (peers[index] < 0) {
                connect_client(index);
            } else {
                close(peers[index]);
                peers[index] = -1;
                for (int i = 0; i < client_count; i++)
                    if (clients[i].fd >= 0)
                        take_from_client(&clients[i]);
            }
            break;
        case 3: /* nothing happens for a while */
            shrink();
            check_lifetime();
            break;
        }
        drain(to[1]);
        for (int i = 0; i < 4; i++)
            if (peers[i] >= 0)
                drain(peers[i]);
        data += length;
        size -= length;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t greeting[] = {28, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 8, 0, 0, 0, 1, 0,
                                       0,  0, 0, 0, 0, 0, 2, 0, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
    signal(SIGPIPE, SIG_IGN);
    pair(guest);
    pair(to);
    for (int i = 0; i < 4; i++)
        peers[i] = -1;
    ends = (struct relay_ends){.from_guest = guest[0], .to_guest = to[0], .listener = -1, .exit_file = open("/dev/null", O_WRONLY), .freezer = -1, .frozen = -1};
    ends.activity = ends.exit_file;
    if (setjmp(ended) == 0) {
        if (size == 0 || data[0] & 1) {
            if (write(guest[1], greeting, sizeof greeting) != sizeof greeting)
                abort();
            take_from_guest();
        }
        connect_client(0);
        if (size)
            play(data + 1, size - 1);
    }
    forget_everything();
    close(ends.exit_file);
    for (int i = 0; i < 2; i++) {
        close(guest[i]);
        close(to[i]);
    }
    for (int i = 0; i < 4; i++)
        if (peers[i] >= 0)
            close(peers[i]);
    return 0;
}
