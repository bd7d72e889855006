/* `sudo` without set-user-ID: what its two sides say to each other. See sudo.c (the supervisor) and sudo_client.c.
 *
 * They exchange packets on a socket (SOCK_SEQPACKET), which the supervisor listens on as SUDO_SOCKET:
 *
 *   client                                 supervisor                            the command
 *     |-- connect ------------------------>|
 *     |<-- HELLO --------------------------|  the credentials that come along: uid 0, and this pid
 *     |-- REQUEST size, 4 descriptors ---->|  those that come along say who asks
 *     |-- MORE, until all of it is there ->|-- vfork ... execve --------------->|
 *     |-- SIGNAL ------------------------->|-- to its process group ----------->|
 *     |<-- STOPPED signal -----------------|
 *     |<-- ENDED wait status --------------|<-- SIGCHLD ------------------------| exits
 *     |       or FAILED, with a text       |
 *     |-- close before that -------------->|-- SIGHUP, then SIGKILL ----------->|
 */
#ifndef ATOLL_SUDO_H
#define ATOLL_SUDO_H

#include <poll.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "frame.h"
#include "tree.h"

#define SUDO_DIRECTORY "/run/atoll-sudo" /* in which only root inside can make files: no name can be taken */
#define SUDO_SOCKET SUDO_DIRECTORY "/%d" /* the supervisor's pid */

enum {
    SUDO_DESCRIPTORS = 4,          /* 0, 1, 2 and the working directory */
    SUDO_PACKET_BYTES = 8 << 10,   /* gVisor's buffers took 16 KiB once */
    SUDO_REQUEST_BYTES = 1 << 20,  /* of arguments and environment together */
    SUDO_ARGUMENTS = 64 << 10,
    SUDO_VARIABLES = 1024,
    SUDO_DEPTH = 256, /* how far a process may be below its supervisor */
    SUDO_RUNNING = 64, /* commands of one supervisor at a time */
};

enum sudo_kind {
    SUDO_REQUEST = 1, /* value: how many bytes it has */
    SUDO_MORE,
    SUDO_SIGNAL, /* value: the signal */
    SUDO_HELLO,
    SUDO_FAILED,  /* a text follows */
    SUDO_STOPPED, /* value: the signal */
    SUDO_ENDED,   /* value: a wait status */
};

struct sudo_packet {
    uint32_t kind;
    uint32_t value;
};

enum sudo_flags {
    SUDO_TERMINAL = 1,   /* its descriptor 0 is to be its controlling terminal */
    SUDO_LOGIN = 2,      /* the shell of the user, as a login shell in its home, gets the arguments */
    SUDO_BACKGROUND = 4, /* the answer is ENDED once it has started, and the connection is of no more use */
    SUDO_KEEP_HOME = 8,  /* HOME, SHELL and MAIL stay as they were sent */
    SUDO_CHECK = 16,     /* nothing is started: it is asked whether it may be */
};

/* A request. After it come strings, each with its NUL: the user (as users_find() takes it), the arguments, variables,
 * and variables that replace those which the supervisor sets. */
struct sudo_request {
    uint32_t flags;
    uint32_t mask;    /* of new files */
    uint64_t ignored; /* bit n - 1: signal n stays ignored */
    uint32_t arguments, variables, overrides;
    uint32_t reserved;
};

/* ---- in the supervisor ---- */

/* Before a job begins: listens if it says who may use `sudo`, else does not. Returns whether it does. */
bool sudo_begin(struct fields job, const struct tree *tree, int marker);

/* Adds what is to be waited for, at most SUDO_POLLED entries. Returns how many. */
enum { SUDO_ASKING = 16, SUDO_POLLED = SUDO_RUNNING + SUDO_ASKING + 1 };
int sudo_poll(struct pollfd *fds);

/* In how many ms sudo_serve() has to be called at the latest, however little happens. -1: at no time. */
int sudo_timeout(void);

/* Does what can be done at once with what has been polled. */
void sudo_serve(const struct pollfd *fds, int count);

/* A child has ended or was stopped; it need not be one of sudo's. */
void sudo_child(pid_t pid, int status);

/* Nothing is left of the job: what is still connected is of other trees. */
void sudo_end(void);

/* Before the supervisor exits. */
void sudo_stop(void);

/* ---- the client ---- */

bool is_sudo(const char *argument);
int sudo_main(char **argv);

#endif
