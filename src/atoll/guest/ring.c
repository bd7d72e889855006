/* The kept output of a channel: a ring that overwrites its oldest bytes.
 *
 * Owns offsets and memory. Not here: readers, and whether bytes may be overwritten (attach.c).
 *
 * Address space is reserved with the first byte, memory only as bytes reach a page: a process that prints one line
 * costs one page, whatever the size of its ring.
 */
#define _GNU_SOURCE
#include "ring.h"

#include "loop.h"

enum { SMALLEST = 4096 };

void ring_begin(struct ring *ring, size_t size)
{
    *ring = (struct ring){.size = size < SMALLEST ? SMALLEST : size};
}

void ring_free(struct ring *ring)
{
    pages_free(ring->bytes, ring->size);
    ring->bytes = NULL;
    ring->kept = 0;
}

uint64_t ring_oldest(const struct ring *ring)
{
    return ring->total - ring->kept;
}

/* The at most two pieces of memory for `size` bytes at `offset`. */
static int stretches(const struct ring *ring, uint64_t offset, size_t size, struct iovec out[2])
{
    size_t at = (size_t)(offset % ring->size), first = ring->size - at;
    if (size <= first) {
        out[0] = (struct iovec){ring->bytes + at, size};
        return 1;
    }
    out[0] = (struct iovec){ring->bytes + at, first};
    out[1] = (struct iovec){ring->bytes, size - first};
    return 2;
}

int ring_reserve(struct ring *ring, size_t want, struct iovec places[2])
{
    if (!ring->bytes && !(ring->bytes = pages_alloc(ring->size)))
        return 0;
    return stretches(ring, ring->total, want < ring->size ? want : ring->size, places);
}

void ring_commit(struct ring *ring, size_t size)
{
    ring->total += size;
    ring->kept = ring->kept + size < ring->size ? ring->kept + size : ring->size;
}

int ring_view(const struct ring *ring, uint64_t offset, size_t most, struct iovec parts[2])
{
    size_t size = (size_t)(ring->total - offset);
    return stretches(ring, offset, size < most ? size : most, parts);
}
