/* The numbers of PROTOCOL.md. The guest, the keeper and wire.py (checked by a test) agree on these. */
#ifndef ATOLL_PROTOCOL_H
#define ATOLL_PROTOCOL_H

enum {
    PROTOCOL_VERSION = 1,
    HEADER_SIZE = 12,
    MAX_PAYLOAD = 262144,
    MAX_RECORD = 65536,
    INITIAL_CREDIT = 65536,
    MAX_CHANNELS = 8,
    FIRST_CHANNEL = 3,
};

enum frame_type {
    FRAME_HELLO = 1,
    FRAME_OPEN = 2,
    FRAME_DATA = 3,
    FRAME_EOF = 4,
    FRAME_CREDIT = 5,
    FRAME_RESET = 6,
    FRAME_CONTROL = 7,
    FRAME_EVENT = 8,
    FRAME_END = 9,
    FRAME_SHUTDOWN = 10,
    FRAME_FAILED = 32,
    FRAME_GONE = 33,
    FRAME_FREEZE = 34,
    FRAME_FROZEN = 35,
    FRAME_ADOPT = 36,
    FRAME_ADOPTED = 37,
};

enum op {
    OP_SPAWN = 1,
    OP_ATTACH = 2,
    OP_SIGNAL = 3,
    OP_PROCS = 4,
    OP_PS = 5,
    OP_READ = 10,
    OP_WRITE = 11,
    OP_STAT = 12,
    OP_LIST = 13,
    OP_MKDIR = 14,
    OP_REMOVE = 15,
    OP_RENAME = 16,
    OP_SYMLINK = 17,
    OP_CHMOD = 18,
    OP_TAR_OUT = 20,
    OP_TAR_IN = 21,
    OP_GLOB = 22,
    OP_GREP = 23,
    OP_WATCH = 24,
    OP_DIAL = 30,
    OP_LISTEN = 31,
    OP_ACCEPT = 32,
};

enum event {
    EVENT_STARTED = 1,
    EVENT_GAP = 2,
    EVENT_CONNECTED = 3,
    EVENT_LISTENING = 4,
    EVENT_ACCEPTED = 5,
};

enum action {
    ACTION_SIGNAL = 1,
    ACTION_RESIZE = 2,
};

enum change {
    CHANGE_READY = 0,
    CHANGE_CREATED = 1,
    CHANGE_MODIFIED = 2,
    CHANGE_DELETED = 3,
    CHANGE_MOVED_FROM = 4,
    CHANGE_MOVED_TO = 5,
    CHANGE_ATTRIBUTES = 6,
    CHANGE_LOST = 7,
};

enum kind {
    KIND_FILE = 1,
    KIND_DIRECTORY = 2,
    KIND_SYMLINK = 3,
    KIND_FIFO = 4,
    KIND_SOCKET = 5,
    KIND_CHAR_DEVICE = 6,
    KIND_BLOCK_DEVICE = 7,
};

/* Field tags: i = integer, s = string of bytes without NUL, b = any bytes. */
enum tag {
    TAG_VERSION = 1,      /* i */
    TAG_EPOCH = 2,        /* i */
    TAG_OP = 3,           /* i */
    TAG_ERRNO = 4,        /* i */
    TAG_MESSAGE = 5,      /* b */
    TAG_WINDOW = 6,       /* i */
    TAG_USER = 7,         /* s */
    TAG_EVENT = 8,        /* i */
    TAG_ACTION = 9,       /* i */
    TAG_PAUSE_MS = 10,    /* i */
    TAG_IDLE = 11,        /* i */
    TAG_WAITING = 12,     /* i */
    TAG_ARGV = 20,        /* s, repeated */
    TAG_SHELL = 21,       /* s */
    TAG_ENV = 22,         /* s, repeated */
    TAG_CWD = 23,         /* s */
    TAG_STDIN = 24,       /* i */
    TAG_PTY_ROWS = 25,    /* i */
    TAG_PTY_COLS = 26,    /* i */
    TAG_KEEP = 27,        /* i */
    TAG_CHANNELS = 28,    /* i */
    TAG_RING = 29,        /* i */
    TAG_PROC = 30,        /* i */
    TAG_PID = 31,         /* i */
    TAG_PPID = 32,        /* i */
    TAG_EXIT_CODE = 33,   /* i */
    TAG_SIGNAL = 34,      /* i */
    TAG_TREE = 35,        /* i */
    TAG_OUT_TOTAL = 36,   /* i */
    TAG_ERR_TOTAL = 37,   /* i */
    TAG_OUT_OFFSET = 38,  /* i */
    TAG_ERR_OFFSET = 39,  /* i */
    TAG_DURATION_US = 40, /* i */
    TAG_KILLED = 41,      /* i */
    TAG_LOSSLESS = 42,    /* i */
    TAG_CHANNEL = 43,     /* i */
    TAG_COMMAND = 44,     /* b */
    TAG_STARTED_US = 45,  /* i */
    TAG_ENDED_US = 46,    /* i */
    TAG_LIVE = 47,        /* i */
    TAG_STATE = 48,       /* s, one letter as in /proc */
    TAG_RSS_BYTES = 49,   /* i */
    TAG_CPU_US = 50,      /* i */
    TAG_QUIET = 51,       /* i */
    TAG_PATH = 60,        /* s */
    TAG_OFFSET = 61,      /* i */
    TAG_LIMIT = 62,       /* i */
    TAG_SIZE = 63,        /* i */
    TAG_MODE = 64,        /* i */
    TAG_MTIME_NS = 65,    /* i */
    TAG_APPEND = 66,      /* i */
    TAG_ATOMIC = 67,      /* i */
    TAG_PARENTS = 68,     /* i */
    TAG_EXCLUSIVE = 69,   /* i */
    TAG_FOLLOW = 70,      /* i */
    TAG_KIND = 71,        /* i */
    TAG_UID = 72,         /* i */
    TAG_GID = 73,         /* i */
    TAG_TARGET = 74,      /* s */
    TAG_NAME = 75,        /* b */
    TAG_RECURSIVE = 76,   /* i */
    TAG_MISSING_OK = 77,  /* i */
    TAG_TO = 78,          /* s */
    TAG_INSIDE = 79,      /* i */
    TAG_COUNT = 80,       /* i */
    TAG_PATTERN = 81,     /* s */
    TAG_HIDDEN = 82,      /* i */
    TAG_TRUNCATED = 83,   /* i */
    TAG_IGNORE_CASE = 84, /* i */
    TAG_INCLUDE = 85,     /* s */
    TAG_LINE = 86,        /* i */
    TAG_TEXT = 87,        /* b */
    TAG_CHANGE = 88,      /* i */
    TAG_PORT = 100,       /* i */
    TAG_HOST = 101,       /* s */
    TAG_CONN = 102,       /* i */
    TAG_PEER_PORT = 103,  /* i */
};

#endif
