/* `sudo` as programs start it: the guest's program under that name.
 *
 * Owns the options, the environment of the command, its terminal, and which signals are passed on. It has no rights but
 * those of who started it, and decides nothing: the supervisor of its process tree starts the command (sudo.c). It looks
 * for that among its own parents, and believes only one that is root, which is what the kernel says.
 *
 * Where stdin and stdout are terminals, the command gets a terminal of its own, and this passes on what is typed and
 * shown: a session can have only one terminal, and the one that this was started in belongs to another session. Where
 * one of them is something else, the command has the three descriptors as they are, and no controlling terminal.
 */
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "program.h"
#include "sudo.h"
#include "users.h"

enum {
    MAX_OVERRIDES = 256,
    RELAY_BYTES = 16 << 10,
    DRAIN_MS = 50, /* how long output may take from a terminal that something in the background still has open */
    DRAIN_READS = 16, /* and how much it may be: more than a terminal holds */
    REOPEN_MS = 100, /* how often a terminal that no process has open is looked at */
};

struct options {
    const char *user, *group;
    bool keep_env, set_home, login, shell, background, list, check;
    const char *keep_list[16];
    int keep_lists;
    char *overrides[MAX_OVERRIDES + 1];
    int override_count;
    char **command; /* ends with NULL */
};

static _Noreturn void fail(const char *about, const char *words)
{
    dprintf(2, about ? "sudo: %s: %s\n" : "sudo: %s%s\n", about ? about : "", words);
    exit(1);
}

static _Noreturn void usage(const char *about, const char *words)
{
    static const char text[] =
        "usage: sudo [-u USER] [-g GROUP] [-EHbnS] [--preserve-env=NAMES] [-i | -s] [NAME=VALUE…] [COMMAND [ARGUMENT…]]\n"
        "       sudo -l [COMMAND] | -v | -k | -K | -h | -V\n";
    if (words)
        dprintf(2, about ? "sudo: %s: %s\n" : "sudo: %s%s\n", about ? about : "", words);
    (void)!write(words ? 2 : 1, text, sizeof text - 1);
    exit(words ? 1 : 0);
}

/* ---- options ---- */

static bool is_assignment(const char *word)
{
    if (!isalpha((unsigned char)*word) && *word != '_')
        return false;
    while (isalnum((unsigned char)*word) || *word == '_')
        word++;
    return *word == '=';
}

static void keep(struct options *options, const char *names)
{
    if (options->keep_lists == (int)(sizeof options->keep_list / sizeof *options->keep_list))
        usage(NULL, "too many --preserve-env");
    options->keep_list[options->keep_lists++] = names;
}

static void say_version(void)
{
    static const char text[] = "sudo of Atoll: the supervisor of this process tree starts the command\n";
    (void)!write(1, text, sizeof text - 1);
    exit(0);
}

/* An option without a value. What is about passwords has nothing to do: none is asked for. */
static void take_switch(struct options *options, char letter)
{
    const char name[] = {'-', letter, 0};
    switch (letter) {
    case 'E': options->keep_env = true; break;
    case 'H': options->set_home = true; break;
    case 'i': options->login = true; break;
    case 's': options->shell = true; break;
    case 'b': options->background = true; break;
    case 'l': options->list = true; break;
    case 'v': options->check = true; break;
    case 'n': case 'S': case 'A': case 'k': break;
    case 'K': exit(0);
    case 'h': usage(NULL, NULL);
    case 'V': say_version(); break;
    default: usage(name, "this option is not supported");
    }
}

static void take_value(struct options *options, char letter, const char *value)
{
    const char name[] = {'-', letter, 0};
    if (!value || !*value)
        usage(name, "this option needs a value");
    if (letter == 'u')
        options->user = *value == '#' ? value + 1 : value;
    else if (letter == 'g')
        options->group = *value == '#' ? value + 1 : value;
}

/* Returns how many words it took. */
static int take_long(struct options *options, char **words)
{
    static const struct {
        const char *name;
        char letter;
        bool has_value;
    } known[] = {
        {"user", 'u', true},           {"group", 'g', true},       {"prompt", 'p', true},
        {"preserve-env", 'E', false},  {"set-home", 'H', false},   {"login", 'i', false},
        {"shell", 's', false},         {"background", 'b', false}, {"non-interactive", 'n', false},
        {"stdin", 'S', false},         {"list", 'l', false},       {"validate", 'v', false},
        {"reset-timestamp", 'k', false}, {"remove-timestamp", 'K', false}, {"help", 'h', false},
        {"version", 'V', false},       {"askpass", 'A', false},
    };
    const char *word = *words + 2;
    size_t length = strcspn(word, "=");
    const char *value = word[length] ? word + length + 1 : NULL;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strncmp(known[i].name, word, length) || known[i].name[length])
            continue;
        if (known[i].has_value) {
            take_value(options, known[i].letter, value ? value : words[1]);
            return value ? 1 : 2;
        }
        if (value && known[i].letter == 'E')
            keep(options, value);
        else if (value)
            usage(*words, "this option has no value");
        else
            take_switch(options, known[i].letter);
        return 1;
    }
    usage(*words, "this option is not supported");
}

static int take_letters(struct options *options, char **words)
{
    for (const char *at = *words + 1; *at; at++) {
        if (!strchr("ugp", *at)) {
            take_switch(options, *at);
            continue;
        }
        take_value(options, *at, at[1] ? at + 1 : words[1]);
        return at[1] ? 1 : 2;
    }
    return 1;
}

static void take_options(struct options *options, char **words)
{
    bool forgets = false; /* -k alone is no request */
    while (*words && (**words == '-' ? (*words)[1] != 0 : is_assignment(*words))) {
        if (**words != '-') {
            if (options->override_count == MAX_OVERRIDES)
                usage(NULL, "too many variables");
            options->overrides[options->override_count++] = *words++;
            continue;
        }
        if (!strcmp(*words, "--")) {
            words++;
            break;
        }
        forgets |= !strcmp(*words, "-k") || !strcmp(*words, "--reset-timestamp");
        words += (*words)[1] == '-' ? take_long(options, words) : take_letters(options, words);
    }
    while (*words && is_assignment(*words) && options->override_count < MAX_OVERRIDES)
        options->overrides[options->override_count++] = *words++;
    options->command = words;
    if (options->login && options->shell)
        usage(NULL, "-i and -s exclude each other");
    if (options->login && options->keep_env)
        usage(NULL, "-i and -E exclude each other");
    if (options->list || options->check || options->login || options->shell || *words)
        return;
    if (forgets)
        exit(0);
    usage(NULL, "a command is missing");
}

/* ---- the environment ---- */

/* What `sudo` keeps: the look of a terminal, and how the sandbox reaches the network. Without the latter, a package
 * manager would not get out (contract/inside.py, runtime/secrets/ca_bundle.py, runtime/egress/registries.py). */
static bool is_kept(const char *entry)
{
    static const char *const names[] = {
        "COLORS", "COLORTERM", "DISPLAY", "HOSTNAME", "LANG", "LANGUAGE", "LINGUAS", "LS_COLORS", "TERM", "TZ",
        "XAUTHORITY", "http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY",
        "FTP_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO",
        "NODE_EXTRA_CA_CERTS", "PIP_CERT", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST",
        "npm_config_registry", "npm_config_cafile",
    };
    size_t length = strcspn(entry, "=");
    if (!strncmp(entry, "LC_", 3))
        return true;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strlen(names[i]) == length && !strncmp(names[i], entry, length))
            return true;
    return false;
}

static bool is_asked_for(const struct options *options, const char *entry)
{
    size_t length = strcspn(entry, "=");
    for (int i = 0; i < options->keep_lists; i++)
        for (const char *at = options->keep_list[i]; *at; at += strcspn(at, ","), at += *at == ',')
            if (strcspn(at, ",") == length && !strncmp(at, entry, length))
                return true;
    return options->keep_env;
}

static bool is_of_sudo(const char *entry)
{
    static const char *const names[] = {"PATH=", "SUDO_COMMAND=", "SUDO_USER=", "SUDO_UID=", "SUDO_GID="};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strncmp(entry, names[i], strlen(names[i])))
            return true;
    return false;
}

/* ---- the request ---- */

struct body {
    char *at;
    size_t size, cap;
};

static void add_bytes(struct body *body, const void *bytes, size_t size)
{
    if (body->size + size > SUDO_REQUEST_BYTES)
        fail(NULL, "the arguments and the environment are too long: 1 MiB is the most");
    if (body->size + size > body->cap) {
        body->cap = (body->size + size) * 2;
        if (!(body->at = realloc(body->at, body->cap)))
            fail(NULL, strerror(ENOMEM));
    }
    memcpy(body->at + body->size, bytes, size);
    body->size += size;
}

static void add(struct body *body, const char *string)
{
    add_bytes(body, string, strlen(string) + 1);
}

/* The words as one line, as `sudo -s` does: a shell reads each as it is. */
static char *join(char **words)
{
    size_t size = 1;
    for (char **at = words; *at; at++)
        size += 2 * strlen(*at) + 1;
    char *line = malloc(size), *to = line;
    if (!line)
        fail(NULL, strerror(ENOMEM));
    for (char **at = words; *at; at++) {
        if (to > line)
            *to++ = ' ';
        for (const char *from = *at; *from; from++) {
            if (!isalnum((unsigned char)*from) && !strchr("_-$", *from) && !((unsigned char)*from & 0x80))
                *to++ = '\\';
            *to++ = *from;
        }
    }
    *to = 0;
    return line;
}

/* Where the command is, as far as this user can see; else as it was given. */
static const char *locate(const char *name)
{
    static char found[4096];
    for (const char *at = program_path + 5; !strchr(name, '/') && *at; at += strcspn(at, ":"), at += *at == ':') {
        snprintf(found, sizeof found, "%.*s/%s", (int)strcspn(at, ":"), at, name);
        if (access(found, X_OK) == 0)
            return found;
    }
    return name;
}

static void add_command_variable(struct body *body, char **command)
{
    struct body text = {0};
    static const char name[] = "SUDO_COMMAND=";
    enum { SHOWN = 4096 };
    add_bytes(&text, name, sizeof name - 1);
    for (char **at = command; *at && text.size < SHOWN; at++) {
        const char *word = at == command ? locate(*at) : *at;
        if (at != command)
            add_bytes(&text, " ", 1);
        add_bytes(&text, word, strlen(word));
    }
    add_bytes(&text, "", 1);
    add(body, text.at);
    free(text.at);
}

static const char *own_shell(void)
{
    const char *shell = getenv("SHELL");
    struct account account;
    char uid[16];
    snprintf(uid, sizeof uid, "%u", getuid());
    if (!shell || !*shell)
        shell = users_find(uid, &account) == 0 ? account.shell : "/bin/sh";
    return shell;
}

static void add_user(struct body *body, const struct options *options)
{
    char own[16], spec[600];
    snprintf(own, sizeof own, "%u", getuid());
    const char *user = options->user ? options->user : options->group ? own : "root";
    if (options->group)
        snprintf(spec, sizeof spec, "%.255s:%.255s", user, options->group);
    else
        snprintf(spec, sizeof spec, "%.255s", user);
    if (strchr(user, ':'))
        fail(user, "unknown user");
    add(body, spec);
}

static uint64_t ignored_signals(void)
{
    uint64_t found = 0;
    struct sigaction action;
    for (int signal = 1; signal < 32; signal++)
        if (sigaction(signal, NULL, &action) == 0 && action.sa_handler == SIG_IGN)
            found |= 1ULL << (signal - 1);
    return found;
}

static struct body make_request(const struct options *options, bool terminal)
{
    struct body body = {0};
    struct sudo_request head = {.ignored = ignored_signals(), .overrides = (uint32_t)options->override_count};
    head.mask = umask(022);
    umask((mode_t)head.mask);
    head.flags = (terminal ? SUDO_TERMINAL : 0) | (options->login ? SUDO_LOGIN : 0) |
                 (options->background ? SUDO_BACKGROUND : 0) |
                 (options->keep_env && !options->set_home ? SUDO_KEEP_HOME : 0) |
                 (options->list || options->check ? SUDO_CHECK : 0);
    add_bytes(&body, &head, sizeof head);
    add_user(&body, options);
    add(&body, "");
    char *line[4] = {(char *)own_shell()}, *check[] = {"true", NULL};
    char **command = options->command;
    if (options->login || options->shell) {
        if (*command) {
            line[1] = "-c";
            line[2] = join(command);
        }
        command = line;
    }
    if (head.flags & SUDO_CHECK)
        command = check;
    for (char **at = command; *at; at++, head.arguments++)
        add(&body, *at);
    for (char **at = environ; *at; at++)
        if (!is_of_sudo(*at) && strchr(*at, '=') && (is_kept(*at) || is_asked_for(options, *at))) {
            add(&body, *at);
            head.variables++;
        }
    add(&body, program_path);
    add_command_variable(&body, command);
    head.variables += 2;
    for (int i = 0; i < options->override_count; i++)
        add(&body, options->overrides[i]);
    if (head.variables > SUDO_VARIABLES || head.arguments > SUDO_ARGUMENTS)
        fail(NULL, "too many arguments or variables");
    memcpy(body.at, &head, sizeof head);
    return body;
}

/* ---- the supervisor ---- */

/* Waits for a packet. Its size, or -1 when the supervisor is gone. */
static ssize_t receive(int fd, struct sudo_packet *packet, char *text, size_t room, struct ucred *who)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(struct ucred))];
    } control;
    struct iovec parts[] = {{packet, sizeof *packet}, {text, room}};
    ssize_t size;
    /* A reset comes before packets that are there already; it is reported once. */
    for (int tries = 0;; tries++) {
        struct msghdr message = {
            .msg_iov = parts,
            .msg_iovlen = 2,
            .msg_control = &control,
            .msg_controllen = sizeof control,
        };
        size = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (size < 0 && (errno == EINTR || (errno == ECONNRESET && !tries)))
            continue;
        struct cmsghdr *header = size > 0 ? CMSG_FIRSTHDR(&message) : NULL;
        *who = (struct ucred){.uid = (uid_t)-1};
        if (header && header->cmsg_type == SCM_CREDENTIALS && header->cmsg_len == CMSG_LEN(sizeof *who))
            memcpy(who, CMSG_DATA(header), sizeof *who);
        return size >= (ssize_t)sizeof *packet ? size - (ssize_t)sizeof *packet : -1;
    }
}

static _Noreturn void explain_failure(const char *text, ssize_t size)
{
    char shown[512];
    snprintf(shown, sizeof shown, "%.*s", (int)size, text);
    fail(NULL, shown);
}

/* A connection to the supervisor with this pid; -1: it is none, or does not listen. */
static int try_supervisor(pid_t pid)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int one = 1;
    struct sudo_packet packet;
    struct ucred who;
    char text[512];
    snprintf(address.sun_path, sizeof address.sun_path, SUDO_SOCKET, pid);
    if (access(address.sun_path, F_OK) < 0)
        return -1;
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof one) == 0 &&
        connect(fd, (const struct sockaddr *)&address, sizeof address) == 0) {
        ssize_t size = receive(fd, &packet, text, sizeof text, &who);
        if (size >= 0 && who.uid == 0 && packet.kind == SUDO_FAILED)
            explain_failure(text, size);
        if (size >= 0 && who.uid == 0 && who.pid == pid && packet.kind == SUDO_HELLO)
            return fd;
    }
    if (fd >= 0)
        close(fd);
    return -1;
}

static int find_supervisor(void)
{
    pid_t pid = getppid();
    for (int depth = 0; pid > 1 && depth < SUDO_DEPTH; depth++, pid = tree_parent(pid)) {
        int fd = try_supervisor(pid);
        if (fd >= 0)
            return fd;
    }
    fail(NULL, "it cannot be used here: the sandbox does not allow it, or this process is too far from its start");
}

static void send_packet(int fd, enum sudo_kind kind, uint32_t value, const void *data, size_t size, const int *fds)
{
    struct sudo_packet head = {.kind = kind, .value = value};
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(SUDO_DESCRIPTORS * sizeof(int))];
    } control = {0};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)data, size}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (fds) {
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        control.header = (struct cmsghdr){
            .cmsg_level = SOL_SOCKET,
            .cmsg_type = SCM_RIGHTS,
            .cmsg_len = CMSG_LEN(SUDO_DESCRIPTORS * sizeof(int)),
        };
        memcpy(CMSG_DATA(&control.header), fds, SUDO_DESCRIPTORS * sizeof *fds);
    }
    while (sendmsg(fd, &message, MSG_NOSIGNAL) < 0 && errno == EINTR) {
    }
    /* If it failed, the answer that comes, or none, says so. */
}

static void send_request(int fd, const struct body *body, const int *fds)
{
    for (size_t sent = 0; sent < body->size;) {
        size_t size = body->size - sent < SUDO_PACKET_BYTES ? body->size - sent : SUDO_PACKET_BYTES;
        send_packet(fd, sent ? SUDO_MORE : SUDO_REQUEST, sent ? 0 : (uint32_t)body->size, body->at + sent, size,
                    sent ? NULL : fds);
        sent += size;
    }
}

/* ---- the terminal ---- */

static struct {
    int master; /* -1: the command has our descriptors */
    int slave;
    bool is_raw;
    struct termios before;
    char typed[RELAY_BYTES];
    size_t typed_size;
    bool input_ended;
    bool unopened; /* by any process: it may be opened again, and the end of our side would end the command */
} terminal = {.master = -1, .slave = -1};

static void copy_size(void)
{
    struct winsize size;
    if (terminal.master >= 0 && ioctl(0, TIOCGWINSZ, &size) == 0)
        ioctl(terminal.master, TIOCSWINSZ, &size);
}

static void make_terminal(void)
{
    int number, unlock = 0, fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    char path[32];
    if (fd < 0 || tcgetattr(0, &terminal.before) < 0 || ioctl(fd, TIOCGPTN, &number) < 0 ||
        ioctl(fd, TIOCSPTLCK, &unlock) < 0) {
        if (fd >= 0)
            close(fd);
        return;
    }
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    terminal.slave = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (terminal.slave < 0) {
        close(fd);
        return;
    }
    terminal.master = fd;
    tcsetattr(terminal.slave, TCSANOW, &terminal.before);
    copy_size();
}

static bool is_in_foreground(void)
{
    pid_t group = tcgetpgrp(0);
    return group < 0 || group == getpgrp();
}

/* Keys go to the command's terminal, which gives them a meaning. */
static void make_raw(void)
{
    struct termios raw = terminal.before;
    if (terminal.master < 0 || terminal.is_raw || !is_in_foreground())
        return;
    cfmakeraw(&raw);
    terminal.is_raw = tcsetattr(0, TCSADRAIN, &raw) == 0;
}

static void restore_terminal(void)
{
    if (terminal.is_raw)
        tcsetattr(0, TCSADRAIN, &terminal.before);
    terminal.is_raw = false;
}

static void write_all(const char *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t count = write(1, bytes + done, size - done);
        if (count > 0)
            done += (size_t)count;
        else if (errno == EAGAIN)
            poll(&(struct pollfd){.fd = 1, .events = POLLOUT}, 1, -1);
        else if (errno != EINTR)
            return;
    }
}

/* False: no process has the command's terminal open any more. */
static bool show_output(void)
{
    char bytes[RELAY_BYTES];
    ssize_t count = read(terminal.master, bytes, sizeof bytes);
    if (count > 0)
        write_all(bytes, (size_t)count);
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
}

static void drain_output(void)
{
    struct pollfd fd = {.fd = terminal.master, .events = POLLIN};
    for (int i = 0; i < DRAIN_READS && terminal.master >= 0; i++)
        if (poll(&fd, 1, DRAIN_MS) <= 0 || !show_output())
            return;
}

static void take_keys(void)
{
    ssize_t count = read(0, terminal.typed + terminal.typed_size, sizeof terminal.typed - terminal.typed_size);
    if (count > 0)
        terminal.typed_size += (size_t)count;
    else if (count == 0 || (errno != EAGAIN && errno != EINTR))
        terminal.input_ended = true;
}

static void pass_keys(void)
{
    ssize_t count = write(terminal.master, terminal.typed, terminal.typed_size);
    if (count <= 0)
        return;
    terminal.typed_size -= (size_t)count;
    memmove(terminal.typed, terminal.typed + count, terminal.typed_size);
}

/* ---- while the command runs ---- */

static const int passed_on[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM, SIGTSTP, SIGCONT, SIGWINCH};
enum { SENT = 1, TYPED };
static volatile sig_atomic_t caught[32];

static void on_signal(int signal, siginfo_t *info, void *context)
{
    (void)context;
    caught[signal] = info->si_code == SI_KERNEL ? TYPED : SENT;
}

/* gVisor makes a signal of a key though the terminal is raw: it is given back to the command's terminal as that key. */
static bool retype(int signal)
{
    const int key = signal == SIGINT ? VINTR : signal == SIGQUIT ? VQUIT : signal == SIGTSTP ? VSUSP : -1;
    if (key < 0 || caught[signal] != TYPED || !terminal.is_raw || terminal.typed_size == RELAY_BYTES)
        return false;
    terminal.typed[terminal.typed_size++] = (char)terminal.before.c_cc[key];
    return true;
}

/* They are caught while the client waits, and stay blocked otherwise. Those that are ignored stay ignored. */
static sigset_t catch_signals(void)
{
    sigset_t blocked, before;
    sigemptyset(&blocked);
    for (size_t i = 0; i < sizeof passed_on / sizeof *passed_on; i++) {
        struct sigaction action;
        sigaddset(&blocked, passed_on[i]);
        if (sigaction(passed_on[i], NULL, &action) == 0 && action.sa_handler != SIG_IGN)
            sigaction(passed_on[i], &(struct sigaction){.sa_sigaction = on_signal, .sa_flags = SA_SIGINFO}, NULL);
    }
    sigprocmask(SIG_BLOCK, &blocked, &before);
    for (size_t i = 0; i < sizeof passed_on / sizeof *passed_on; i++)
        sigdelset(&before, passed_on[i]);
    /* Else the terminal would be given back to a shell that no longer waits for it. */
    signal(SIGTTOU, SIG_IGN);
    return before;
}

static void pass_signals(int fd)
{
    for (size_t i = 0; i < sizeof passed_on / sizeof *passed_on; i++) {
        int signal = passed_on[i];
        if (!caught[signal])
            continue;
        bool retyped = retype(signal);
        caught[signal] = 0;
        if (retyped)
            continue;
        if (signal == SIGCONT)
            make_raw();
        if (signal == SIGWINCH || signal == SIGCONT)
            copy_size();
        if (signal != SIGWINCH || terminal.master < 0)
            send_packet(fd, SUDO_SIGNAL, (uint32_t)signal, NULL, 0, NULL);
    }
}

/* As the command ended: with its exit status, or of the same signal. */
static _Noreturn void end_like(int status)
{
    if (WIFEXITED(status))
        exit(WEXITSTATUS(status));
    int number = WTERMSIG(status);
    sigset_t set;
    setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0});
    signal(number, SIG_DFL);
    sigemptyset(&set);
    sigaddset(&set, number);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    raise(number);
    exit(128 + number);
}

static void take_answer(int fd)
{
    struct sudo_packet packet;
    struct ucred who;
    char text[512];
    ssize_t size = receive(fd, &packet, text, sizeof text, &who);
    if (size >= 0 && packet.kind == SUDO_STOPPED) {
        restore_terminal();
        raise(SIGSTOP);
        return; /* continued: the signal that did it is passed on */
    }
    drain_output();
    restore_terminal();
    if (size < 0)
        fail(NULL, "the supervisor of this process tree has ended");
    if (packet.kind == SUDO_FAILED)
        explain_failure(text, size);
    end_like((int)packet.value);
}

static _Noreturn void attend(int fd, const sigset_t *mask)
{
    for (;;) {
        bool relays = terminal.master >= 0;
        bool reads = relays && terminal.is_raw && !terminal.input_ended && terminal.typed_size < RELAY_BYTES;
        struct pollfd fds[] = {
            {.fd = fd, .events = POLLIN},
            {.fd = terminal.unopened ? -1 : terminal.master,
             .events = (short)(POLLIN | (terminal.typed_size ? POLLOUT : 0))},
            {.fd = reads ? 0 : -1, .events = POLLIN},
        };
        const struct timespec interval = {.tv_nsec = REOPEN_MS * 1000000L};
        int ready = ppoll(fds, 3, terminal.unopened ? &interval : NULL, mask);
        pass_signals(fd);
        if (ready == 0 && terminal.unopened)
            terminal.unopened = !show_output();
        if (ready <= 0)
            continue;
        if (fds[2].revents)
            take_keys();
        if (relays && fds[1].revents & POLLOUT)
            pass_keys();
        if (relays && fds[1].revents & (POLLIN | POLLHUP | POLLERR))
            terminal.unopened = !show_output();
        if (fds[0].revents)
            take_answer(fd);
    }
}

/* ---- the start ---- */

/* What is closed becomes /dev/null, so that neither this nor the command opens anything in its place. */
static void open_closed(void)
{
    for (int i = 0; i < 3; i++)
        if (fcntl(i, F_GETFD) < 0 && open("/dev/null", O_RDWR) != i)
            exit(1);
}

static void choose_descriptors(int *fds, bool may_relay)
{
    if (may_relay && isatty(0) && isatty(1))
        make_terminal();
    for (int i = 0; i < 3; i++)
        fds[i] = terminal.master >= 0 && (i < 2 || isatty(i)) ? terminal.slave : i;
    fds[3] = open(".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fds[3] < 0)
        fds[3] = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC);
}

static _Noreturn void say_list(int fd, const struct options *options)
{
    struct sudo_packet packet;
    struct ucred who;
    char text[512], host[65] = "";
    ssize_t size = receive(fd, &packet, text, sizeof text, &who);
    if (size >= 0 && packet.kind == SUDO_FAILED)
        explain_failure(text, size);
    if (size < 0)
        fail(NULL, "the supervisor of this process tree has ended");
    gethostname(host, sizeof host - 1);
    const char *found = options->list && *options->command ? locate(*options->command) : NULL;
    if (found && access(found, F_OK) < 0)
        exit(1);
    if (found)
        dprintf(1, "%s\n", found);
    else if (options->list)
        dprintf(1, "User %s may run the following commands on %s:\n    (ALL : ALL) NOPASSWD: ALL\n",
                getenv("USER") ? getenv("USER") : "", host);
    exit(0);
}

bool is_sudo(const char *argument)
{
    const char *slash = argument ? strrchr(argument, '/') : NULL;
    return argument && !strcmp(slash ? slash + 1 : argument, "sudo");
}

int sudo_main(char **argv)
{
    static struct options options;
    int fds[SUDO_DESCRIPTORS];
    open_closed();
    take_options(&options, argv + 1);
    bool checks = options.list || options.check;
    int fd = find_supervisor();
    choose_descriptors(fds, !checks && !options.background);
    struct body body = make_request(&options, terminal.master >= 0);
    sigset_t mask = catch_signals();
    send_request(fd, &body, fds);
    free(body.at);
    close(fds[3]);
    if (terminal.slave >= 0)
        close(terminal.slave);
    if (checks)
        say_list(fd, &options);
    make_raw();
    attend(fd, &mask);
}
