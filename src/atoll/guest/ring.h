/* The kept output of a channel: see ring.c. */
#ifndef ATOLL_RING_H
#define ATOLL_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The last bytes of a channel. Offsets count from the channel's first byte ever. */
struct ring {
    uint8_t *bytes;
    size_t size;
    size_t kept;
    uint64_t total; /* all bytes ever: the offset of the next one */
};

void ring_begin(struct ring *ring, size_t size);
void ring_free(struct ring *ring);

/* The offset of the oldest byte that is kept. */
uint64_t ring_oldest(const struct ring *ring);

/* Places for at most `want` new bytes, which overwrite the oldest if they must; then ring_commit() with how many were
 * written. Returns the number of places, 0 when out of memory. */
int ring_reserve(struct ring *ring, size_t want, struct iovec places[2]);
void ring_commit(struct ring *ring, size_t size);

/* The pieces that hold the bytes from `offset` on (between oldest and total), at most `most` bytes. */
int ring_view(const struct ring *ring, uint64_t offset, size_t most, struct iovec parts[2]);

#endif
