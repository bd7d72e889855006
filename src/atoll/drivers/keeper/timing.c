/* What the keeper does as time passes: it records the use of the sandbox, pauses one that is unused, asks a guest that
 * is silent, and ends the sandbox's lifetime.
 *
 * Owns the times, and the file `activity`. Not here: clients, frames and freezing (relay.c). Its contract is PROTOCOL.md,
 * "The keeper". */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "protocol.h"
#include "relay.h"

enum {
    ACTIVITY_MS = 1000,      /* the shortest interval between two writes of the time of the last use */
    SILENCE_TICK_MS = 5000,
    PING_TICK = 2,           /* ticks of silence after which the guest is asked to answer */
    STALLED_TICK = 6,        /* ticks of silence after which clients no longer wait for it */
    EXPIRY_GRACE_MS = 2000,  /* how long a guest may take to end when its lifetime is over */
    FREEZE_AGAIN_MS = 1000,
    CLOCK_MS = 60000,        /* how often the clock of the day is looked at, which may be set */
};

#define PING_STREAM (1U << 31) /* no client's stream: those have less than 31 bits */

static int64_t used_ms, recorded_ms;
static bool use_noted;        /* and not yet recorded */
static int64_t recorded_use;  /* the last use, by the clock of the day, as the file has it */
static bool asked;            /* a client's frame was relayed, and the guest has sent nothing since */
static bool pinged;           /* a ping was sent that is not answered */
static int64_t unanswered_ms; /* since when, by the clock of the day, clients no longer wait for it; 0: they do */
static int silent_ticks;      /* how many ticks the guest has been silent while it was awaited */
static int64_t tick_ms;       /* the next tick; 0: the guest is not awaited */
static int64_t expired_ms;    /* since when the sandbox is being ended for its lifetime; 0: it is not */
static bool expiry_enforced;  /* the guest had not ended in time, and was frozen */
static bool is_cut;           /* the lifetime is over, and the clients of then were told */
static int64_t freeze_at_ms;  /* not to be frozen again before this */

static int64_t clock_ms(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int64_t now_ms(void)
{
    return clock_ms(CLOCK_MONOTONIC);
}

/* ---- use ---- */

/* The file `activity`: when the sandbox was last used, the number of open streams, since when the guest has not
 * answered (0: it does), and whether a connected client uses it. Never synced: it describes processes, which do not
 * outlive a power failure. */
static void write_activity(void)
{
    const int64_t note[4] = {recorded_use, open_streams, unanswered_ms, is_used_now()};
    if (pwrite(ends.activity, note, sizeof note, 0) < 0)
        dprintf(STDERR_FILENO, "keeper: the time of the last use could not be written\n");
}

void note_use(void)
{
    used_ms = now_ms();
    use_noted = true;
}

void restart_idle(void)
{
    used_ms = now_ms();
}

/* Writes the last use, unless it was written shortly before. */
void record_use(void)
{
    static unsigned recorded_streams;
    static bool recorded_now;
    if (!use_noted)
        return;
    use_noted = false;
    bool is_same = recorded_streams == open_streams && recorded_now == is_used_now();
    if (recorded_ms && used_ms - recorded_ms < ACTIVITY_MS && is_same)
        return;
    recorded_ms = used_ms;
    recorded_streams = open_streams;
    recorded_now = is_used_now();
    recorded_use = clock_ms(CLOCK_REALTIME);
    write_activity();
}

/* When the sandbox is to be paused if it stays idle, or -1. */
static int64_t pause_at(void)
{
    bool may_pause = ends.pause_after_ms && ends.freezer >= 0 && !paused && !holders && !shutdown_sent;
    return may_pause && is_greeted() && open_streams == 0 ? used_ms + ends.pause_after_ms : -1;
}

void check_pause(void)
{
    if (pause_at() < 0 || now_ms() < pause_at())
        return;
    paused = freeze() == 0;
    restart_idle(); /* if freezing failed, it is tried again after the same time */
}

/* ---- a guest that does not answer ----
 *
 * Root inside can stop the guest with SIGSTOP (gVisor), and a client must not wait for it without end. While the guest
 * is awaited and sends nothing, the keeper pings it, which it answers in its loop however long its operations take;
 * clients that wait are sent GONE if it does not. Ticks are counted, not time: when this process or the machine stood
 * still, that is one tick, and whatever the guest sent meanwhile is read first. */

static bool is_awaited(void)
{
    return is_greeted() && !paused && !holders && !shutdown_sent && (open_streams || asked || is_sending());
}

/* A SIGNAL for a process that does not exist. */
static void ping(void)
{
    uint8_t frame[HEADER_SIZE + 56], fields[56];
    const int64_t op = OP_SIGNAL, none = 0;
    uint32_t size = put_field(fields, TAG_OP, &op, 8);
    size += put_field(fields + size, TAG_PROC, &none, 8);
    size += put_field(fields + size, TAG_SIGNAL, &none, 8);
    send_to_guest(frame, put_frame(frame, FRAME_OPEN, PING_STREAM, fields, size));
    pinged = true;
}

bool is_pong(uint32_t stream, uint8_t type)
{
    if (stream != PING_STREAM || !pinged || type != FRAME_END)
        return false;
    pinged = false;
    return true;
}

void guest_was_asked(void)
{
    asked = true;
}

void guest_was_heard(void)
{
    asked = false;
    tick_ms = silent_ticks = 0;
    if (unanswered_ms) {
        unanswered_ms = 0;
        write_activity();
    }
}

void check_silence(void)
{
    if (!tick_ms || now_ms() < tick_ms)
        return;
    tick_ms = now_ms() + SILENCE_TICK_MS;
    silent_ticks++;
    if (silent_ticks >= PING_TICK && !pinged)
        ping();
    if (silent_ticks < STALLED_TICK)
        return;
    char message[256];
    int seconds = silent_ticks * SILENCE_TICK_MS / 1000;
    snprintf(message, sizeof message, "stalled: the guest has sent nothing for %d s", seconds);
    if (!unanswered_ms) {
        unanswered_ms = clock_ms(CLOCK_REALTIME) - 1000 * seconds;
        write_activity();
    }
    cut_clients(message, true);
}

static void plan_tick(void)
{
    if (!is_awaited()) {
        tick_ms = silent_ticks = 0;
    } else if (!tick_ms) {
        tick_ms = now_ms() + SILENCE_TICK_MS;
    }
}

/* ---- the lifetime ---- */

/* How much of the lifetime is left. One that is renewed by use ends `renewal_ms` after the last use that the file has,
 * which may be ACTIVITY_MS older than the true one: processes of the host count the same (runtime/state/expiries.py). */
static int64_t lifetime_ms(void)
{
    if (!ends.expires_ms)
        return INT64_MAX;
    if (ends.renewal_ms)
        record_use();
    if (ends.renewal_ms && is_used_now())
        return ends.renewal_ms;
    int64_t end = ends.expires_ms, renewed = recorded_use + ends.renewal_ms + ACTIVITY_MS;
    if (ends.renewal_ms && renewed > end)
        end = renewed;
    return end - clock_ms(CLOCK_REALTIME);
}

bool is_past_end(void)
{
    return lifetime_ms() <= 0;
}

bool is_ending(void)
{
    return expired_ms != 0;
}

/* The sandbox is to be put to sleep with its processes, which takes a process of the host: until one comes it is frozen,
 * whenever no client is connected. A client that holds it saves it, and is waited for. */
static void freeze_at_end(void)
{
    if (!is_past_end()) { /* it was given a longer one */
        is_cut = false;
        return;
    }
    if (holders)
        return;
    if (!is_cut) {
        is_cut = true;
        cut_clients(LIFETIME_OVER, false);
    }
    if (paused || !has_no_clients() || ends.freezer < 0 || now_ms() < freeze_at_ms)
        return;
    paused = freeze() == 0;
    freeze_at_ms = now_ms() + FREEZE_AGAIN_MS;
}

/* Ends the sandbox when its lifetime is over: clients are sent GONE, the guest SHUTDOWN. This process cannot kill: a
 * guest that does not obey is frozen, until a process of the host removes the sandbox. */
void check_lifetime(void)
{
    if (!is_greeted())
        return;
    if (ends.freezes_at_end && !expired_ms) {
        freeze_at_end();
    } else if (expired_ms) {
        if (!expiry_enforced && now_ms() >= expired_ms + EXPIRY_GRACE_MS) {
            expiry_enforced = true;
            freeze();
        }
    } else if (is_past_end()) {
        expired_ms = now_ms();
        cut_clients(LIFETIME_OVER, false);
        shut_down();
    }
}

/* Until when the loop may wait before `check_lifetime`, or -1. */
static int64_t lifetime_at(void)
{
    if (expired_ms)
        return expiry_enforced ? -1 : expired_ms + EXPIRY_GRACE_MS;
    int64_t left = lifetime_ms();
    if (left > 0)
        return ends.expires_ms ? now_ms() + (left > CLOCK_MS ? CLOCK_MS : left) : -1;
    if (!ends.freezes_at_end || !(is_cut || holders))
        return now_ms();
    return paused || holders || !has_no_clients() || ends.freezer < 0 ? -1 : freeze_at_ms;
}

int time_left(void)
{
    plan_tick();
    const int64_t moments[] = {pause_at(), tick_ms ? tick_ms : -1, lifetime_at()};
    int64_t until = -1;
    for (int i = 0; i < 3; i++)
        if (moments[i] >= 0 && (until < 0 || moments[i] < until))
            until = moments[i];
    int64_t left = until - now_ms();
    return until < 0 ? -1 : left < 0 ? 0 : left > INT32_MAX ? INT32_MAX : (int)left;
}
