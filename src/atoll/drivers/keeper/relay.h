/* What relay.c and timing.c share. */
#ifndef ATOLL_RELAY_H
#define ATOLL_RELAY_H

#include "keeper.h"

#define LIFETIME_OVER "its lifetime (ttl) is over"

/* relay.c: clients, streams and the link to the guest */
extern struct relay_ends ends;
extern bool paused; /* the sandbox is frozen until it is next used */
extern bool shutdown_sent;
extern int holders;           /* clients that hold the others back */
extern unsigned open_streams; /* those that count as use */
bool is_greeted(void);        /* whether the guest has sent HELLO */
bool is_sending(void);        /* whether the guest has not read all that is sent to it */
bool is_used_now(void);       /* whether a connected client has a stream that counts as use */
bool has_no_clients(void);
void send_to_guest(const void *frame, size_t size);
size_t put_frame(uint8_t *at, uint8_t type, uint32_t stream, const void *payload, uint32_t length);
uint32_t put_field(uint8_t *at, uint16_t tag, const void *value, uint32_t length);
/* Sends GONE and disconnects: all clients, or with `waiting` only clients with an unanswered request. */
void cut_clients(const char *message, bool waiting);
/* 0 when every process of the sandbox is frozen; an errno when none is. */
int freeze(void);
/* Sends the guest SHUTDOWN. */
void shut_down(void);

/* timing.c: what is done as time passes */
int64_t now_ms(void);
/* The sandbox is in use. It is recorded later, when no client waits for what is relayed. */
void note_use(void);
void record_use(void);
/* The time without use counts from here, though this was none. */
void restart_idle(void);
/* A frame was sent to the guest that it has to answer; it has sent something; a frame answers the keeper's ping. */
void guest_was_asked(void);
void guest_was_heard(void);
bool is_pong(uint32_t stream, uint8_t type);
/* Whether the lifetime is over; and whether the sandbox is being ended for it. */
bool is_past_end(void);
bool is_ending(void);
/* What is due now: call them in every round of the loop. */
void check_silence(void);
void check_lifetime(void);
void check_pause(void);
/* How long the loop may wait, in milliseconds; -1: for ever. */
int time_left(void);

#endif
