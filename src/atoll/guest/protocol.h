/* The numbers of PROTOCOL.md, and the type of every field: the one list that the guest, the keeper and
 * contract/protocol.py (a test compares all three) agree on. To add a number, add a row here and in protocol.py.
 *
 * Each list is an X-macro: X(NAME, NUMBER) per row, for fields X(NAME, NUMBER, TYPE). */
#ifndef ATOLL_PROTOCOL_H
#define ATOLL_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL_LIMITS(X) \
    X(PROTOCOL_VERSION, 1)   \
    X(HEADER_SIZE, 12)       \
    X(MAX_PAYLOAD, 262144)   \
    X(MAX_RECORD, 65536)     \
    X(INITIAL_CREDIT, 65536) \
    X(MAX_CHANNELS, 8)       \
    X(FIRST_CHANNEL, 3)      \
    X(MAX_XATTRS, 4096)

#define FRAME_TYPES(X) \
    X(HELLO, 1)         \
    X(OPEN, 2)          \
    X(DATA, 3)          \
    X(EOF, 4)           \
    X(CREDIT, 5)        \
    X(RESET, 6)         \
    X(CONTROL, 7)       \
    X(EVENT, 8)         \
    X(END, 9)           \
    X(SHUTDOWN, 10)     \
    X(FAILED, 32)       \
    X(GONE, 33)         \
    X(FREEZE, 34)       \
    X(FROZEN, 35)       \
    X(RECONFIGURE, 36)  \
    X(RECONFIGURED, 37)

#define OPERATIONS(X) \
    X(SPAWN, 1)    \
    X(ATTACH, 2)   \
    X(SIGNAL, 3)   \
    X(PROCS, 4)    \
    X(PS, 5)       \
    X(READ, 10)    \
    X(WRITE, 11)   \
    X(STAT, 12)    \
    X(LIST, 13)    \
    X(MKDIR, 14)   \
    X(REMOVE, 15)  \
    X(RENAME, 16)  \
    X(SYMLINK, 17) \
    X(CHMOD, 18)   \
    X(CHOWN, 19)   \
    X(TAR_OUT, 20) \
    X(TAR_IN, 21)  \
    X(GLOB, 22)    \
    X(GREP, 23)    \
    X(WATCH, 24)   \
    X(DIAL, 30)    \
    X(LISTEN, 31)  \
    X(ACCEPT, 32)

#define EVENT_KINDS(X) \
    X(STARTED, 1)   \
    X(GAP, 2)       \
    X(CONNECTED, 3) \
    X(LISTENING, 4) \
    X(ACCEPTED, 5)

/* ACTION in CONTROL. */
#define CONTROL_ACTIONS(X) \
    X(SIGNAL, 1) \
    X(RESIZE, 2)

/* ACTION in FREEZE, which the keeper alone reads. */
#define FREEZE_ACTIONS(X) \
    X(PAUSE, 1)   \
    X(HOLD, 2)    \
    X(RELEASE, 3) \
    X(QUIESCE, 4)

/* CHANGE in the records of WATCH. */
#define CHANGES(X) \
    X(READY, 0)      \
    X(CREATED, 1)    \
    X(MODIFIED, 2)   \
    X(DELETED, 3)    \
    X(MOVED_FROM, 4) \
    X(MOVED_TO, 5)   \
    X(ATTRIBUTES, 6) \
    X(LOST, 7)

/* KIND. */
#define FILE_TYPES(X) \
    X(FILE, 1)         \
    X(DIRECTORY, 2)    \
    X(SYMLINK, 3)      \
    X(FIFO, 4)         \
    X(SOCKET, 5)       \
    X(CHAR_DEVICE, 6)  \
    X(BLOCK_DEVICE, 7)

/* INTEGER: 8 bytes, signed. STRING: bytes without NUL. BYTES: any bytes. ARGV, ENV and EXCLUDE are repeated; STATE is one letter
 * as in /proc. */
#define FIELD_TAGS(X) \
    X(VERSION, 1, INTEGER)      \
    X(EPOCH, 2, INTEGER)        \
    X(OP, 3, INTEGER)           \
    X(ERRNO, 4, INTEGER)        \
    X(MESSAGE, 5, BYTES)        \
    X(WINDOW, 6, INTEGER)       \
    X(USER, 7, STRING)          \
    X(EVENT, 8, INTEGER)        \
    X(ACTION, 9, INTEGER)       \
    X(PAUSE_MS, 10, INTEGER)    \
    X(IDLE, 11, INTEGER)        \
    X(WAITING, 12, INTEGER)     \
    X(EXPIRES_MS, 13, INTEGER)  \
    X(RENEWAL_MS, 14, INTEGER)  \
    X(FREEZES_AT_END, 15, INTEGER) \
    X(ARGV, 20, STRING)         \
    X(SHELL, 21, STRING)        \
    X(ENV, 22, STRING)          \
    X(CWD, 23, STRING)          \
    X(STDIN, 24, INTEGER)       \
    X(PTY_ROWS, 25, INTEGER)    \
    X(PTY_COLS, 26, INTEGER)    \
    X(KEEP, 27, INTEGER)        \
    X(CHANNELS, 28, INTEGER)    \
    X(RING, 29, INTEGER)        \
    X(PROC, 30, INTEGER)        \
    X(PID, 31, INTEGER)         \
    X(PPID, 32, INTEGER)        \
    X(EXIT_CODE, 33, INTEGER)   \
    X(SIGNAL, 34, INTEGER)      \
    X(TREE, 35, INTEGER)        \
    X(OUT_TOTAL, 36, INTEGER)   \
    X(ERR_TOTAL, 37, INTEGER)   \
    X(OUT_OFFSET, 38, INTEGER)  \
    X(ERR_OFFSET, 39, INTEGER)  \
    X(DURATION_US, 40, INTEGER) \
    X(KILLED, 41, INTEGER)      \
    X(LOSSLESS, 42, INTEGER)    \
    X(CHANNEL, 43, INTEGER)     \
    X(COMMAND, 44, BYTES)       \
    X(STARTED_US, 45, INTEGER)  \
    X(ENDED_US, 46, INTEGER)    \
    X(LIVE, 47, INTEGER)        \
    X(STATE, 48, STRING)        \
    X(RSS_BYTES, 49, INTEGER)   \
    X(CPU_US, 50, INTEGER)      \
    X(QUIET, 51, INTEGER)       \
    X(MERGE, 52, INTEGER)       \
    X(SUDO, 53, STRING)         \
    X(PATH, 60, STRING)         \
    X(OFFSET, 61, INTEGER)      \
    X(LIMIT, 62, INTEGER)       \
    X(SIZE, 63, INTEGER)        \
    X(MODE, 64, INTEGER)        \
    X(MTIME_NS, 65, INTEGER)    \
    X(APPEND, 66, INTEGER)      \
    X(ATOMIC, 67, INTEGER)      \
    X(PARENTS, 68, INTEGER)     \
    X(EXCLUSIVE, 69, INTEGER)   \
    X(FOLLOW, 70, INTEGER)      \
    X(KIND, 71, INTEGER)        \
    X(UID, 72, INTEGER)         \
    X(GID, 73, INTEGER)         \
    X(TARGET, 74, STRING)       \
    X(NAME, 75, BYTES)          \
    X(RECURSIVE, 76, INTEGER)   \
    X(MISSING_OK, 77, INTEGER)  \
    X(TO, 78, STRING)           \
    X(INSIDE, 79, INTEGER)      \
    X(COUNT, 80, INTEGER)       \
    X(PATTERN, 81, STRING)      \
    X(HIDDEN, 82, INTEGER)      \
    X(TRUNCATED, 83, INTEGER)   \
    X(IGNORE_CASE, 84, INTEGER) \
    X(INCLUDE, 85, STRING)      \
    X(LINE, 86, INTEGER)        \
    X(TEXT, 87, BYTES)          \
    X(CHANGE, 88, INTEGER)      \
    X(EXCLUDE, 89, STRING)      \
    X(OWNER, 90, STRING)        \
    X(CONTEXT, 91, INTEGER)     \
    X(BEFORE, 92, BYTES)        \
    X(AFTER, 93, BYTES)         \
    X(XATTR_PREFIX, 94, STRING) \
    X(XATTRS, 95, BYTES)        \
    X(PORT, 100, INTEGER)       \
    X(HOST, 101, STRING)        \
    X(CONN, 102, INTEGER)       \
    X(PEER_PORT, 103, INTEGER)

#define LIMIT_MEMBER(name, number) name = number,
#define FRAME_MEMBER(name, number) FRAME_##name = number,
#define OP_MEMBER(name, number) OP_##name = number,
#define EVENT_MEMBER(name, number) EVENT_##name = number,
#define ACTION_MEMBER(name, number) ACTION_##name = number,
#define FREEZE_MEMBER(name, number) FREEZE_##name = number,
#define CHANGE_MEMBER(name, number) CHANGE_##name = number,
#define KIND_MEMBER(name, number) KIND_##name = number,
#define TAG_MEMBER(name, number, type) TAG_##name = number,

enum { PROTOCOL_LIMITS(LIMIT_MEMBER) };
enum frame_type { FRAME_TYPES(FRAME_MEMBER) };
enum op { OPERATIONS(OP_MEMBER) };
enum event { EVENT_KINDS(EVENT_MEMBER) };
enum action { CONTROL_ACTIONS(ACTION_MEMBER) };
enum freeze_action { FREEZE_ACTIONS(FREEZE_MEMBER) };
enum change { CHANGES(CHANGE_MEMBER) };
enum kind { FILE_TYPES(KIND_MEMBER) };
enum tag { FIELD_TAGS(TAG_MEMBER) };

enum field_type { FIELD_UNKNOWN, FIELD_INTEGER, FIELD_STRING, FIELD_BYTES };

enum { INTEGER_SIZE = 8 };

/* The type of a tag's value. FIELD_UNKNOWN for a tag of a later version, which is ignored whatever it holds. */
static inline enum field_type field_type(uint16_t tag)
{
    switch (tag) {
#define TAG_CASE(name, number, type) \
    case number: \
        return FIELD_##type;
        FIELD_TAGS(TAG_CASE)
#undef TAG_CASE
    default:
        return FIELD_UNKNOWN;
    }
}

#endif
