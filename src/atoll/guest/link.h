/* The byte stream to the host: see link.c. */
#ifndef ATOLL_LINK_H
#define ATOLL_LINK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "frame.h"

void link_start(int in, int out);

/* After a restore from disk: watches the descriptors again, because the keeper behind them may be another. */
void link_renew(void);

/* Any frame but DATA. Never fails and never blocks: such frames are few and small, and reading pauses when many are
 * queued. */
void link_send(uint8_t type, uint8_t channel, uint32_t stream, const void *payload, size_t size);

/* How many bytes of DATA may be queued now; 0 when the host has not read what was sent before. */
size_t link_room(void);

/* DATA from the caller's memory: at most link_room() bytes. */
void link_send_data(uint32_t stream, uint8_t channel, const struct iovec *parts, int count);

/* DATA that is read directly into the buffer: first a place for at most *size bytes, then how many were read. Nothing
 * else may be sent in between. NULL when there is no room. */
uint8_t *link_reserve(size_t *size);
void link_commit(uint32_t stream, uint8_t channel, size_t size);

void link_flush(void);

/* Reads once, and passes each whole frame to `take`. */
void link_read(void (*take)(const struct frame *frame, const uint8_t *payload));

/* There is more to read, and reading is not paused. */
bool link_busy(void);

/* The host broke a rule: reports it on stderr and ends the guest with status 70. */
_Noreturn void link_violation(const char *rule);

#endif
