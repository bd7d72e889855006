/* A guest that is not ours: it stands where the real one would and plays a script against the host.
 *
 * The script is appended to the program itself, the last 8 bytes of the file being its length, so that one build serves
 * every test. It is a sequence of `u8 what, u32 length, bytes`:
 *
 *   w  write the bytes
 *   f  write the bytes as one frame whose stream number is that of the last OPEN
 *   F  the same, over and over again: a u32 says how often, the frame follows
 *   r  read frames until an OPEN has come
 *   e  answer each OPEN from now on with the bytes as one frame, for ever
 *   d  read and drop everything, for ever
 *   h  hold still, reading nothing, for ever
 *   x  exit with the status that the first byte says
 *
 * SIGTERM is ignored and so is SHUTDOWN: it does not go by itself. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static uint32_t stream;

static void put(const uint8_t *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = write(1, bytes, size);
        if (n > 0) {
            bytes += n;
            size -= (size_t)n;
        }
    }
}

static void get(uint8_t *bytes, size_t size)
{
    while (size > 0) {
        ssize_t n = read(0, bytes, size);
        if (n > 0) {
            bytes += n;
            size -= (size_t)n;
        }
    }
}

static void wait_for_open(void)
{
    static uint8_t payload[262144];
    for (;;) {
        uint8_t header[12];
        uint32_t length;
        get(header, sizeof header);
        memcpy(&length, header, 4);
        if (length > sizeof payload)
            _exit(99);
        get(payload, length);
        if (header[4] == 2) {
            memcpy(&stream, header + 8, 4);
            return;
        }
    }
}

int main(int argc, char **argv)
{
    (void)argc;
    signal(SIGTERM, SIG_IGN);
    fcntl(0, F_SETFL, fcntl(0, F_GETFL) & ~O_NONBLOCK);
    fcntl(1, F_SETFL, fcntl(1, F_GETFL) & ~O_NONBLOCK);
    int self = open(argv[0], O_RDONLY);
    uint64_t size = 0;
    off_t end = lseek(self, -8, SEEK_END);
    if (self < 0 || end < 0 || read(self, &size, 8) != 8 || size > (uint64_t)end)
        _exit(98);
    uint8_t *script = malloc(size + 1);
    lseek(self, end - (off_t)size, SEEK_SET);
    for (uint64_t have = 0; have < size;) {
        ssize_t n = read(self, script + have, size - have);
        if (n <= 0)
            _exit(97);
        have += (uint64_t)n;
    }
    close(self);
    for (uint64_t at = 0; at + 5 <= size;) {
        uint8_t what = script[at];
        uint32_t length, times = 1;
        memcpy(&length, script + at + 1, 4);
        uint8_t *bytes = script + at + 5;
        at += 5 + (uint64_t)length;
        static uint8_t rest[65536];
        switch (what) {
        case 'w': put(bytes, length); break;
        case 'F':
            memcpy(&times, bytes, 4);
            bytes += 4;
            length -= 4;
            /* fall through */
        case 'f':
            memcpy(bytes + 8, &stream, 4);
            while (times-- > 0)
                put(bytes, length);
            break;
        case 'r': wait_for_open(); break;
        case 'e':
            for (;;) {
                wait_for_open();
                memcpy(bytes + 8, &stream, 4);
                put(bytes, length);
            }
        case 'd':
            for (;;)
                get(rest, 1);
        case 'h':
            for (;;)
                pause();
        case 'x': _exit(bytes[0]);
        default: _exit(96);
        }
    }
    for (;;)
        pause();
}
