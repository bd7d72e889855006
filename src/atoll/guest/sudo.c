/* `sudo` in the supervisor: commands that processes of its tree have started as another user.
 *
 * Owns who may, and what of a request is believed. Programs gain no rights by execve() in a sandbox, so what starts the
 * command has them already: the supervisor, which is root, and whose tree the command belongs to as all else that is
 * started there. It is killed, timed and accounted for with it. Not here: options, environment and terminals, all of
 * which are the client's (sudo_client.c), since who may ask may ask for anything; how a program is started (program.c).
 *
 * Every byte comes from inside. A packet is read when there is one, never waited for: a client can delay no other, and
 * not the reaping of the tree. One that says nothing, or only a part, is dropped after a while, and sooner when there
 * are too many of these: others wait to be accepted until then. Who asks is what the kernel says, in the credentials of
 * the message that also has the descriptors, and where it can say so (gVisor cannot) of who has connected.
 */
#define _GNU_SOURCE
#include "sudo.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "guest.h"
#include "loop.h"
#include "program.h"
#include "users.h"

#define GUEST_DIRECTORY "/run/atoll" /* contract/inside.py */

enum {
    MAX_CLIENTS = SUDO_ASKING + SUDO_RUNNING,
    ASK_MS = 5000,   /* how long a client may take for its request */
    CROWD_MS = 250,  /* the same where others wait for its place */
    GRACE_MS = 2000, /* between SIGHUP and SIGKILL for a command whose client is gone */
    BACKLOG = 64,
    FAILED_BYTES = 512,
};

enum client_state { FREE, ASKING, RUNNING, ABANDONED };

struct client {
    enum client_state state;
    int socket; /* -1: ABANDONED, or it has its answer */
    pid_t command;
    int64_t deadline; /* ASKING, ABANDONED */
    struct ucred who; /* of the message with the descriptors */
    int fds[SUDO_DESCRIPTORS];
    uint8_t *request;
    size_t size, filled;
};

static struct client clients[MAX_CLIENTS];
static int listener = -1;
static char *allowed; /* who may, as the host calls that user */
static const struct tree *own_tree;
static int own_marker;

/* ---- clients ---- */

static void drop_request(struct client *client)
{
    if (client->filled || client->request)
        program_close(client->fds, SUDO_DESCRIPTORS);
    free(client->request);
    client->request = NULL;
    client->size = client->filled = 0;
}

static void drop(struct client *client)
{
    drop_request(client);
    if (client->socket >= 0)
        close(client->socket);
    *client = (struct client){.socket = -1};
}

static void answer(struct client *client, enum sudo_kind kind, uint32_t value, const char *text)
{
    uint8_t packet[sizeof(struct sudo_packet) + FAILED_BYTES];
    const struct sudo_packet head = {.kind = kind, .value = value};
    size_t size = text ? strnlen(text, FAILED_BYTES) : 0;
    memcpy(packet, &head, sizeof head);
    if (size)
        memcpy(packet + sizeof head, text, size);
    if (client->socket >= 0)
        (void)!send(client->socket, packet, sizeof head + size, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void refuse(struct client *client, const char *text)
{
    answer(client, SUDO_FAILED, 0, text);
    drop(client);
}

static int count_in(enum client_state state)
{
    int count = 0;
    for (int i = 0; i < MAX_CLIENTS; i++)
        count += clients[i].state == state;
    return count;
}

static bool is_crowded(void)
{
    return count_in(ASKING) >= SUDO_ASKING;
}

/* When its time is over. INT64_MAX: never. */
static int64_t end_of(const struct client *client, bool crowded)
{
    if (client->state == ASKING)
        return client->deadline - (crowded ? (ASK_MS - CROWD_MS) * 1000 : 0);
    return client->state == ABANDONED ? client->deadline : INT64_MAX;
}

/* ---- listening ---- */

/* In the places where programs look for it, unless the image has one there. The links are of the sandbox's files: where
 * they are taken to and it may not be used, it says so. The directory of the guest's program is of the runtime's making:
 * with bwrap root alone can enter it, with runsc everyone can write there. */
static void install(void)
{
    static const char program[] = GUEST_DIRECTORY "/guest", first[] = "/usr/local/bin/sudo";
    static const char *const parents[] = {"/usr", "/usr/local", "/usr/local/bin"};
    static bool installed;
    if (installed)
        return;
    installed = true;
    chmod(GUEST_DIRECTORY, 0755);
    (void)!symlink(program, "/usr/bin/sudo");
    if (symlink(program, first) == 0 || errno != ENOENT)
        return;
    for (size_t i = 0; i < sizeof parents / sizeof *parents; i++)
        mkdir(parents[i], 0755);
    (void)!symlink(program, first);
}

void sudo_stop(void)
{
    char path[64];
    if (listener < 0)
        return;
    snprintf(path, sizeof path, SUDO_SOCKET, getpid());
    unlink(path);
    close(listener);
    listener = -1;
}

static void start_listening(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int one = 1;
    snprintf(address.sun_path, sizeof address.sun_path, SUDO_SOCKET, getpid());
    mkdir(SUDO_DIRECTORY, 0755);
    unlink(address.sun_path); /* of a supervisor that was killed */
    listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (listener >= 0 && setsockopt(listener, SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0 &&
        bind(listener, (const struct sockaddr *)&address, sizeof address) == 0 &&
        chmod(address.sun_path, 0666) == 0 && listen(listener, BACKLOG) == 0)
        return;
    sudo_stop();
}

bool sudo_begin(struct fields job, const struct tree *tree, int marker)
{
    free(allowed);
    allowed = fields_string(job, TAG_SUDO);
    own_tree = tree;
    own_marker = marker;
    if (!allowed) {
        sudo_stop();
        return false;
    }
    install();
    if (listener < 0)
        start_listening();
    return listener >= 0;
}

void sudo_end(void)
{
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (clients[i].state != FREE)
            drop(&clients[i]);
}

/* ---- who asks ---- */

static bool may_ask(uid_t uid)
{
    struct account account;
    if (uid == 0)
        return true;
    bool same = users_find(allowed, &account) == 0 && account.uid == uid;
    users_forget(&account);
    return same;
}

/* Without it, processes would be started in a tree whose end they outlive. */
static bool is_of_tree(pid_t pid)
{
    return tree_contains(own_tree, pid, SUDO_DEPTH);
}

static void take_connection(void)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    const int one = 1;
    struct ucred who;
    socklen_t size = sizeof who;
    if (fd < 0)
        return;
    if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof one) < 0 ||
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) < 0) {
        close(fd);
        return;
    }
    struct client *client = clients;
    while (client->state != FREE)
        client++; /* there is one: not more than SUDO_RUNNING run, and it is not crowded */
    *client = (struct client){.state = ASKING, .socket = fd, .deadline = now_us() + ASK_MS * 1000};
    for (int i = 0; i < SUDO_DESCRIPTORS; i++)
        client->fds[i] = -1;
    if (!may_ask(who.uid))
        refuse(client, "this user may not use it in this sandbox");
    else
        answer(client, SUDO_HELLO, 0, NULL);
}

/* ---- a request ---- */

/* What is left of the strings of a request. */
struct strings {
    char *at, *end;
};

static char *next_string(struct strings *strings)
{
    char *string = strings->at, *end = memchr(string, 0, (size_t)(strings->end - string));
    if (!end)
        return NULL;
    strings->at = end + 1;
    return string;
}

/* Pointers into the request, ended by NULL, with room for `spare` more. NULL: there are fewer strings, or no memory. */
static char **take_list(struct strings *strings, uint32_t count, size_t spare)
{
    char **list = calloc(count + spare + 1, sizeof *list);
    for (uint32_t i = 0; list && i < count; i++)
        if (!(list[i] = next_string(strings))) {
            free(list);
            return NULL;
        }
    return list;
}

struct environment {
    char **list;
    size_t count, room;
    char *own[16]; /* to be freed */
    size_t own_count;
};

static void put(struct environment *environment, char *entry)
{
    size_t length = strcspn(entry, "=") + 1, i = 0;
    while (i < environment->count && strncmp(environment->list[i], entry, length))
        i++;
    if (i == environment->room)
        return;
    environment->list[i] = entry;
    environment->count += i == environment->count;
}

static void set(struct environment *environment, const char *name, const char *value)
{
    char *entry = NULL;
    if (environment->own_count < sizeof environment->own / sizeof *environment->own &&
        asprintf(&entry, "%s=%s", name, value) > 0) {
        environment->own[environment->own_count++] = entry;
        put(environment, entry);
    }
}

static void set_number(struct environment *environment, const char *name, unsigned value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    set(environment, name, text);
}

static const char *name_of(const struct account *account, char *space, size_t size)
{
    snprintf(space, size, "%u", account->uid);
    return account->name ? account->name : space;
}

/* What `sudo` promises about the two users is not left to the client. */
static void set_users(struct environment *environment, const struct account *target, const struct ucred *who,
                      bool keep_home)
{
    char number[16], mail[300];
    struct account asking;
    const char *name = name_of(target, number, sizeof number);
    snprintf(mail, sizeof mail, "/var/mail/%s", name);
    set(environment, "USER", name);
    set(environment, "LOGNAME", name);
    if (!keep_home) {
        set(environment, "HOME", target->home);
        set(environment, "SHELL", target->shell);
        set(environment, "MAIL", mail);
    }
    set_number(environment, "SUDO_UID", who->uid);
    set_number(environment, "SUDO_GID", who->gid);
    snprintf(number, sizeof number, "%u", who->uid);
    bool known = users_find(number, &asking) == 0;
    set(environment, "SUDO_USER", known && asking.name ? asking.name : number);
    users_forget(&asking);
}

static void explain(char *text, size_t size, const char *about, int error)
{
    const char *words = error == ENOENT && !strchr(about, '/') ? "command not found" : strerror(error);
    snprintf(text, size, "%.300s: %s", about, words);
}

static void started(struct client *client, pid_t pid, bool in_background)
{
    drop_request(client);
    if (in_background) {
        answer(client, SUDO_ENDED, 0, NULL);
        drop(client);
        return;
    }
    client->state = RUNNING;
    client->command = pid;
}

/* Starts what is asked for. Everything in `request` has been counted, and nothing else is known of it. */
static const char *start(struct client *client, const struct sudo_request *request, char *user, char **arguments,
                         struct environment *environment, char **overrides)
{
    static char text[FAILED_BYTES], login[64];
    static struct program program;
    const struct spawn_job job = {
        .in = client->fds[0],
        .out = client->fds[1],
        .err = client->fds[2],
        .terminal = -1,
        .marker = own_marker,
    };
    bool is_login = request->flags & SUDO_LOGIN;
    const struct inherited inherited = {
        .directory = is_login ? -1 : client->fds[3],
        .mask = (request->mask | 022) & 0777,
        .ignored = request->ignored,
        .terminal = request->flags & SUDO_TERMINAL,
    };
    int error;
    const char *about, *failed = NULL;
    program = (struct program){.job = &job, .inherited = &inherited, .terminal = -1, .nofile = *guest_first_nofile()};
    if (users_find(user, &program.account)) {
        snprintf(text, sizeof text, "unknown user or group %.255s", user);
        return text;
    }
    if (request->flags & SUDO_CHECK) {
        users_forget(&program.account);
        answer(client, SUDO_ENDED, 0, NULL);
        drop(client);
        return NULL;
    }
    set_users(environment, &program.account, &client->who, request->flags & SUDO_KEEP_HOME);
    for (char **at = overrides; *at; at++)
        put(environment, *at);
    program.argv = arguments;
    program.env = environment->list;
    program.path = program_path;
    program.file = arguments[0];
    if (is_login) {
        const char *slash = strrchr(program.account.shell, '/');
        snprintf(login, sizeof login, "-%.60s", slash ? slash + 1 : program.account.shell);
        program.file = program.account.shell;
        arguments[0] = login;
    }
    pid_t pid = program_start(&program, &error, &about);
    if (pid) {
        started(client, pid, request->flags & SUDO_BACKGROUND);
    } else {
        explain(text, sizeof text, about, error);
        failed = text;
    }
    users_forget(&program.account);
    return failed;
}

static const char *run(struct client *client)
{
    static const char malformed[] = "the request is malformed";
    struct sudo_request request;
    if (client->size < sizeof request)
        return malformed;
    memcpy(&request, client->request, sizeof request);
    struct strings strings = {(char *)client->request + sizeof request, (char *)client->request + client->size};
    if (!request.arguments || request.arguments > SUDO_ARGUMENTS || request.variables > SUDO_VARIABLES ||
        request.overrides > SUDO_VARIABLES)
        return malformed;
    char *user = next_string(&strings);
    char **arguments = user ? take_list(&strings, request.arguments + 1, 0) : NULL;
    size_t spare = request.overrides + 16;
    char **variables = arguments ? take_list(&strings, request.variables, spare) : NULL;
    char **overrides = variables ? take_list(&strings, request.overrides, 0) : NULL;
    struct environment environment = {.list = variables, .count = request.variables, .room = request.variables + spare};
    const char *failed = malformed;
    /* The first of the arguments is empty: its place is for a shell (struct program). */
    if (overrides && strings.at == strings.end && !arguments[0][0] && *user)
        failed = count_in(RUNNING) + count_in(ABANDONED) < SUDO_RUNNING
                     ? start(client, &request, user, arguments + 1, &environment, overrides)
                     : "as many commands as may run at a time (64) run already";
    for (size_t i = 0; i < environment.own_count; i++)
        free(environment.own[i]);
    free(arguments);
    free(variables);
    free(overrides);
    return failed;
}

/* ---- packets ---- */

struct packet {
    struct sudo_packet head;
    uint8_t data[SUDO_PACKET_BYTES];
    size_t size; /* of the data */
    struct ucred who;
    bool has_who;
    int fds[SUDO_DESCRIPTORS];
    int fd_count;
};

/* False: there is none now, or the client is gone (`lost`), or it is not one of ours. */
static bool receive(struct client *client, struct packet *packet, bool *lost)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(SUDO_DESCRIPTORS * sizeof(int))];
    } control;
    struct iovec parts[] = {{&packet->head, sizeof packet->head}, {packet->data, sizeof packet->data}};
    struct msghdr message = {
        .msg_iov = parts,
        .msg_iovlen = 2,
        .msg_control = &control,
        .msg_controllen = sizeof control,
    };
    ssize_t size = recvmsg(client->socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (size < 0 && (errno == EAGAIN || errno == EINTR))
        return false;
    packet->fd_count = 0;
    packet->has_who = false;
    for (struct cmsghdr *at = size < 0 ? NULL : CMSG_FIRSTHDR(&message); at; at = CMSG_NXTHDR(&message, at)) {
        if (at->cmsg_level != SOL_SOCKET)
            continue;
        if (at->cmsg_type == SCM_CREDENTIALS && at->cmsg_len == CMSG_LEN(sizeof packet->who)) {
            memcpy(&packet->who, CMSG_DATA(at), sizeof packet->who);
            packet->has_who = true;
        }
        for (size_t i = 0; at->cmsg_type == SCM_RIGHTS && CMSG_LEN((i + 1) * sizeof(int)) <= at->cmsg_len; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
            if (packet->fd_count < SUDO_DESCRIPTORS)
                packet->fds[packet->fd_count++] = fd;
            else
                close(fd);
        }
    }
    *lost = size < (ssize_t)sizeof packet->head || message.msg_flags & (MSG_TRUNC | MSG_CTRUNC);
    if (*lost) {
        program_close(packet->fds, (size_t)packet->fd_count);
        return false;
    }
    packet->size = (size_t)size - sizeof packet->head;
    return true;
}

/* The first packet of a request. What was wrong, or NULL. */
static const char *take_request(struct client *client, struct packet *packet)
{
    if (packet->fd_count != SUDO_DESCRIPTORS || !packet->has_who)
        return "the request has not its descriptors";
    if (!may_ask(packet->who.uid))
        return "this user may not use it in this sandbox";
    if (!is_of_tree(packet->who.pid))
        return "the supervisor that was asked is another one's, or too far above";
    if (!packet->head.value || packet->head.value > SUDO_REQUEST_BYTES)
        return "the arguments and the environment are too long: 1 MiB is the most";
    if (!(client->request = malloc(packet->head.value)))
        return strerror(ENOMEM);
    client->size = packet->head.value;
    client->who = packet->who;
    memcpy(client->fds, packet->fds, sizeof client->fds);
    packet->fd_count = 0;
    return NULL;
}

static const char *take_asking(struct client *client, struct packet *packet)
{
    bool is_first = packet->head.kind == SUDO_REQUEST && !client->request;
    if (!is_first && (packet->head.kind != SUDO_MORE || !client->request || packet->fd_count))
        return "the request is malformed";
    const char *wrong = is_first ? take_request(client, packet) : NULL;
    if (wrong)
        return wrong;
    if (packet->size > client->size - client->filled)
        return "the request is malformed";
    memcpy(client->request + client->filled, packet->data, packet->size);
    client->filled += packet->size;
    return client->filled < client->size ? NULL : run(client);
}

/* The command leads a session of its own, where a stop that comes from a terminal counts for nothing. */
static void pass_signal(const struct client *client, uint32_t signal)
{
    if (signal == SIGTSTP || signal == SIGTTIN || signal == SIGTTOU)
        signal = SIGSTOP;
    if (signal >= 1 && signal < 32)
        kill(-client->command, (int)signal);
}

/* Its client was killed, or it lied. */
static void abandon(struct client *client)
{
    close(client->socket);
    client->socket = -1;
    client->state = ABANDONED;
    client->deadline = now_us() + GRACE_MS * 1000;
    kill(-client->command, SIGHUP);
    kill(-client->command, SIGCONT);
}

static void serve(struct client *client)
{
    static struct packet packet;
    bool lost = false;
    const char *wrong = NULL;
    if (!receive(client, &packet, &lost)) {
        if (lost && client->state == RUNNING)
            abandon(client);
        else if (lost)
            drop(client);
        return;
    }
    if (client->state == ASKING)
        wrong = take_asking(client, &packet);
    else if (packet.head.kind == SUDO_SIGNAL)
        pass_signal(client, packet.head.value);
    program_close(packet.fds, (size_t)packet.fd_count);
    if (wrong)
        refuse(client, wrong);
}

/* ---- called by supervisor.c ---- */

int sudo_poll(struct pollfd *fds)
{
    int count = 0;
    if (listener < 0)
        return 0;
    fds[count++] = (struct pollfd){.fd = is_crowded() ? -1 : listener, .events = POLLIN};
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (clients[i].state != FREE && clients[i].socket >= 0)
            fds[count++] = (struct pollfd){.fd = clients[i].socket, .events = POLLIN};
    return count;
}

int sudo_timeout(void)
{
    int64_t first = INT64_MAX;
    bool crowded = listener >= 0 && is_crowded();
    for (int i = 0; listener >= 0 && i < MAX_CLIENTS; i++)
        if (end_of(&clients[i], crowded) < first)
            first = end_of(&clients[i], crowded);
    if (first == INT64_MAX)
        return -1;
    int64_t now = now_us();
    return first <= now ? 0 : (int)((first - now + 999) / 1000);
}

static void expire(struct client *client)
{
    if (client->state == ABANDONED) {
        kill(-client->command, SIGKILL);
        client->deadline = INT64_MAX;
    } else {
        refuse(client, "the request took too long");
    }
}

void sudo_serve(const struct pollfd *fds, int count)
{
    bool asked = false, crowded = is_crowded();
    for (int i = 0; i < count; i++) {
        if (!fds[i].revents)
            continue;
        if (fds[i].fd == listener) {
            asked = true;
            continue;
        }
        for (int k = 0; k < MAX_CLIENTS; k++)
            if (clients[k].state != FREE && clients[k].socket == fds[i].fd) {
                serve(&clients[k]);
                break;
            }
    }
    int64_t now = now_us();
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (end_of(&clients[i], crowded) <= now)
            expire(&clients[i]);
    if (asked)
        take_connection();
}

void sudo_child(pid_t pid, int status)
{
    for (int i = 0; listener >= 0 && i < MAX_CLIENTS; i++) {
        struct client *client = &clients[i];
        if (client->state != RUNNING && client->state != ABANDONED)
            continue;
        if (client->command != pid)
            continue;
        if (WIFSTOPPED(status)) {
            answer(client, SUDO_STOPPED, (uint32_t)WSTOPSIG(status), NULL);
        } else {
            /* What the command was forking while it got SIGHUP may have missed it, in gVisor. */
            if (client->state == ABANDONED)
                kill(-pid, SIGKILL);
            answer(client, SUDO_ENDED, (uint32_t)status, NULL);
            drop(client);
        }
        return;
    }
}
