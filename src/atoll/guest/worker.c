/* Workers: processes that carry out file operations.
 *
 * Owns how an operation gets a process under the right user, how its bytes and its result come back, how it is
 * abandoned, and which worker may serve another call. Not here: what an operation does (files.c, search.c, tar_in.c,
 * tar_out.c, watch.c, tree.c).
 *
 * A worker may block for ever on a slow file system, run out of memory or be killed from inside the sandbox: its stream
 * then ends with an errno and nothing else happens. It serves one operation at a time. Guest and worker exchange
 * messages on a socket pair (SOCK_SEQPACKET), whose end means that the worker is gone:
 *
 *   guest                                    worker
 *     |-- fork, with the first job ------------>|  becomes the user of the call, for good
 *     |<-- WANTS_OUTPUT ------------------------|  only for more output than fits into a message
 *     |-- a pipe, SCM_RIGHTS ------------------>|
 *     |<-- DONE result, little output ----------|  then ends, or is idle
 *     |-- job, with all its input ------------->|  the next job: of the same user, and small
 *     |<-- STALE -------------------------------|  the name means another user now: ends; the guest forks another
 *     |-- close ------------------------------->|  not needed any more: ends
 *
 * A worker is used again only by the same user, and only after an operation that is declared `reusable` and succeeded,
 * or did not find its path: whatever a process of that user did to it (a limit set from outside, say) ends with it. The
 * user's name is looked up again for each call. Input that is not complete when the worker starts, or that is large,
 * comes through a pipe of the guest's, and needs a new worker. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "guest.h"
#include "link.h"
#include "loop.h"
#include "sink.h"
#include "stream.h"
#include "users.h"

enum {
    MAX_RESULT_BYTES = 8192,
    MAX_REQUEST_BYTES = 16 << 10, /* of a job for an idle worker */
    INLINE_BYTES = 32 << 10,      /* input or output that is passed in a message */
    BUFFER_SIZE = 2 * MAX_RECORD,
    FLUSH_AT = INLINE_BYTES,
    USUAL_MEMORY_MB = 512,
    KILL_AFTER_MS = 2000, /* the time a worker has to clean up after RESET */
    GATHER_MS = 2,        /* how long a worker is not started because all of its input may come at once */
    MAX_IDLE = 4,
    IDLE_AFTER_MS = 1000,
    WIDE_PIPE = 1 << 20,
};

/* To an idle worker; the request and the input follow. */
struct job_message {
    const struct operation *operation; /* of the same program, so at the same address */
    uint32_t request_size, input_size;
};

enum answer_kind { ANSWER_WANTS_OUTPUT = 1, ANSWER_STALE, ANSWER_DONE };

/* To the guest; after ANSWER_DONE the result and the output follow. */
struct answer {
    uint32_t kind;
    uint32_t idle; /* 1: it waits for another job */
    uint32_t result_size, output_size;
};

/* ---- in the worker ---- */

static const char *volatile leftover;

static void on_abandoned(int signal)
{
    (void)signal;
    if (leftover)
        unlink(leftover);
    _exit(1);
}

void job_set_leftover(const char *path)
{
    leftover = path;
    if (path)
        sigaction(SIGTERM, &(struct sigaction){.sa_handler = on_abandoned}, NULL);
}

void job_hold_abandon(bool hold)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigprocmask(hold ? SIG_BLOCK : SIG_UNBLOCK, &set, NULL);
}

const char *job_path(struct job *job, uint16_t tag)
{
    char *path = fields_string(job->fields, tag);
    for (int i = 0; i < JOB_PATHS; i++)
        if (!job->paths[i]) {
            job->paths[i] = path;
            break;
        }
    return path ? path : "";
}

int job_fail(struct job *job, int error, const char *about)
{
    job->about = about;
    return error;
}

ssize_t job_read(struct job *job, void *bytes, size_t size)
{
    if (job->input.size) {
        size_t count = job->input.size < size ? job->input.size : size;
        memcpy(bytes, job->input.at, count);
        job->input.at += count;
        job->input.size -= count;
        return (ssize_t)count;
    }
    return job->in < 0 ? 0 : read(job->in, bytes, size);
}

static _Noreturn void end_worker(void)
{
    _exit(1); /* the guest is gone, or has abandoned the operation */
}

static void send_answer(struct job *job, struct answer answer)
{
    struct iovec parts[] = {
        {&answer, sizeof answer},
        {job->result.at, answer.result_size},
        {job->buffer, answer.output_size},
    };
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    while (sendmsg(job->link, &message, MSG_NOSIGNAL) < 0)
        if (errno != EINTR)
            end_worker();
}

void job_open_output(struct job *job)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    char empty;
    struct msghdr message = {
        .msg_iov = &(struct iovec){&empty, 1},
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof control,
    };
    if (job->out >= 0)
        return;
    send_answer(job, (struct answer){.kind = ANSWER_WANTS_OUTPUT});
    ssize_t size;
    while ((size = recvmsg(job->link, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    if (size <= 0 || !CMSG_FIRSTHDR(&message))
        end_worker();
    memcpy(&job->out, CMSG_DATA(&control.header), sizeof job->out);
}

static void write_out(struct job *job, const void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t count = write(job->out, (const char *)bytes + done, size - done);
        if (count < 0 && errno != EINTR)
            end_worker();
        if (count > 0)
            done += (size_t)count;
    }
}

void job_widen(int pipe)
{
    /* Refused when this user's pipe buffers are at their limit; then it is only slower. */
    fcntl(pipe, F_SETPIPE_SZ, WIDE_PIPE);
}

void job_flush(struct job *job)
{
    if (job->buffered) {
        job_open_output(job);
        write_out(job, job->buffer, job->buffered);
    }
    job->buffered = 0;
}

/* Queues bytes while they may still go along with the result. */
void job_write(struct job *job, const void *bytes, size_t size)
{
    if (job->out < 0 && job->buffered + size <= INLINE_BYTES) {
        memcpy(job->buffer + job->buffered, bytes, size);
        job->buffered += size;
        return;
    }
    job_flush(job);
    job_open_output(job);
    write_out(job, bytes, size);
}

void job_begin_record(struct job *job)
{
    if (job->buffered >= FLUSH_AT)
        job_flush(job);
    job->record = (struct pack){job->buffer + job->buffered + 4, 0, MAX_RECORD - 4, false};
}

void job_end_record(struct job *job)
{
    if (job->record.overflow)
        return;
    put_u32(job->buffer + job->buffered, (uint32_t)job->record.size);
    job->buffered += 4 + job->record.size;
}

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif

static void limit_memory(size_t megabytes)
{
#ifndef SANITIZED /* the sanitizer's shadow alone takes terabytes of address space */
    rlim_t bytes = (rlim_t)(megabytes ? megabytes : USUAL_MEMORY_MB) << 20;
    setrlimit(RLIMIT_AS, &(struct rlimit){bytes, bytes});
#else
    (void)megabytes;
#endif
}

/* Root with an absolute path needs no lookup in /etc/passwd. */
static bool needs_account(struct job *job, const char *user)
{
    const uint8_t *path;
    uint32_t size;
    static const uint16_t paths[] = {TAG_PATH, TAG_TO};
    for (int i = 0; i < 2; i++)
        if (fields_find(job->fields, paths[i], &path, &size) && !(size && path[0] == '/'))
            return true;
    return user != NULL;
}

static struct account became; /* the user that this worker is; no groups: root, as the guest is */

static bool is_another(const struct account *account)
{
    size_t size = (size_t)account->group_count * sizeof *account->groups;
    return became.uid != account->uid || became.gid != account->gid || became.group_count != account->group_count ||
           (size && memcmp(became.groups, account->groups, size));
}

/* Becomes the user of the first job; those that follow name the same one, but the name may mean another user by then:
 * ESTALE. */
static int take_user(struct job *job, bool first)
{
    struct account account;
    char *user = fields_string(job->fields, TAG_USER);
    bool is_root = !user;
    if (!needs_account(job, user))
        return chdir("/") < 0 ? errno : 0;
    int error = users_find(user, &account);
    free(user);
    if (error)
        return job_fail(job, error, !is_root && error == ENOENT ? "no such user" : "user");
    if (!is_root && first && (error = users_become(&account)))
        return job_fail(job, error, "becoming the user");
    if (!is_root && !first && is_another(&account))
        return ESTALE;
    if (chdir(account.home) < 0 && chdir("/") < 0)
        error = errno;
    if (!is_root && first)
        became = account;
    else
        users_forget(&account);
    return error;
}

static void carry_out(struct job *job, const struct operation *operation, bool first)
{
    static uint8_t result[MAX_RESULT_BYTES], buffer[BUFFER_SIZE];
    job->result = (struct pack)PACK(result);
    job->buffer = buffer;
    job->out = -1;
    int error = operation->as_root ? 0 : take_user(job, first);
    bool has_user = !error;
    if (!first && error == ESTALE) {
        send_answer(job, (struct answer){.kind = ANSWER_STALE});
        _exit(0);
    }
    /* After the change of user, which clears it. Only matters in tests: PID 1 takes all processes along. */
    if (first)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!error && first) {
        umask(022);
        limit_memory(operation->memory_mb);
    }
    if (!error)
        error = operation->run(job);
    if (job->out >= 0 || job->buffered > INLINE_BYTES)
        job_flush(job);
    if (job->out >= 0)
        close(job->out);
    if (error) {
        job->result.size = 0;
        job->result.overflow = false;
        pack_error(&job->result, error, job->about);
    }
    const bool idle = operation->reusable && has_user && (!error || error == ENOENT) && job->in < 0;
    const struct answer answer = {
        .kind = ANSWER_DONE,
        .idle = idle,
        .result_size = (uint32_t)job->result.size,
        .output_size = (uint32_t)job->buffered,
    };
    send_answer(job, answer);
    if (!idle)
        _exit(0);
    for (int i = 0; i < JOB_PATHS; i++)
        free(job->paths[i]);
}

static _Noreturn void work(struct job *job, const struct operation *operation)
{
    static uint8_t bytes[MAX_REQUEST_BYTES + INLINE_BYTES];
    signal(SIGPIPE, SIG_IGN);
    carry_out(job, operation, true);
    for (;;) {
        struct job_message next;
        struct iovec parts[] = {{&next, sizeof next}, {bytes, sizeof bytes}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t size = recvmsg(job->link, &message, 0);
        if (size < 0 && errno == EINTR)
            continue;
        if (size < (ssize_t)sizeof next)
            _exit(0);
        *job = (struct job){
            .fields = {bytes, next.request_size},
            .input = {bytes + next.request_size, next.input_size},
            .in = -1,
            .link = job->link,
        };
        carry_out(job, next.operation, false);
    }
}

/* ---- in the guest ---- */

struct worker;

/* A worker process. */
struct crew {
    struct crew *next; /* first: loop_free() overwrites it, while an event may still read the source */
    struct source source;
    pid_t pid;             /* 0 once reaped: the kernel may then reuse the number */
    char *user;            /* the USER of its jobs; NULL: root */
    struct worker *worker; /* the operation that it carries out; NULL while it is idle */
};

/* An operation. */
struct worker {
    struct stream stream;
    const struct operation *operation;
    struct crew *crew; /* NULL while its input is gathered, and once it has ended */
    uint8_t *request;  /* as it came; kept until a worker cannot turn out to be stale */
    size_t request_size;
    uint8_t *input; /* gathered so far */
    size_t input_size;
    bool gathering;
    struct timer gather_timer;
    struct source in, out;
    struct sink sink;
    bool out_done, done;
    uint8_t *result; /* and the output that came with it, behind */
    size_t result_size, output_size, output_sent;
    struct timer kill_timer;
};

static struct crew *crews;
static struct timer idle_timer;

static void drop_crew(struct crew *crew)
{
    struct crew **at = &crews;
    while (*at != crew)
        at = &(*at)->next;
    *at = crew->next;
    loop_remove(&crew->source);
    free(crew->user);
    loop_free(crew);
}

static void dismiss_idle(int keep)
{
    for (struct crew *crew = crews, *next; crew; crew = next) {
        next = crew->next;
        if (!crew->worker && --keep < 0)
            drop_crew(crew);
    }
}

void workers_dismiss_idle(void)
{
    dismiss_idle(0);
}

static void on_idle(struct timer *timer)
{
    (void)timer;
    dismiss_idle(0);
}

static void free_request(struct worker *worker)
{
    free(worker->request);
    free(worker->input);
    worker->request = worker->input = NULL;
}

static void finish(struct worker *worker)
{
    if (worker->crew) /* not idle: it was abandoned, or has died */
        drop_crew(worker->crew);
    worker->crew = NULL;
    timer_cancel(&worker->kill_timer);
    timer_cancel(&worker->gather_timer);
    loop_remove(&worker->in);
    loop_remove(&worker->out);
    sink_free(&worker->sink);
    free_request(worker);
    if (worker->stream.reset)
        stream_fail(&worker->stream, ECANCELED, NULL);
    else if (!worker->result)
        stream_fail(&worker->stream, EIO, "the worker of this operation was killed");
    else
        stream_end(&worker->stream, &(struct pack){worker->result, worker->result_size, 0, false});
    free(worker->result);
    worker->result = NULL;
}

static void finish_when_done(struct worker *worker)
{
    if (worker->done && worker->out_done && worker->output_sent == worker->output_size)
        finish(worker);
}

static void on_out(struct source *source)
{
    stream_want(&container_of(source, struct worker, out)->stream);
}

static void on_in(struct source *source)
{
    sink_flush(&container_of(source, struct worker, in)->sink);
}

static void out_ended(struct worker *worker)
{
    loop_remove(&worker->out);
    worker->out_done = true;
}

/* ---- sending its output ---- */

/* Without credit nothing may be read, but an end of file must still be noticed: the host may have given credit for
 * exactly the bytes there were. */
static bool is_at_end(struct worker *worker)
{
    int left = 1;
    return worker->out.hangup && ioctl(worker->out.fd, FIONREAD, &left) == 0 && left == 0;
}

static void send_some(struct worker *worker)
{
    uint64_t *credit = &worker->stream.credit[1];
    size_t size = *credit < MAX_PAYLOAD ? (size_t)*credit : MAX_PAYLOAD;
    uint8_t *place = link_reserve(&size);
    if (!place)
        return;
    ssize_t count = read(worker->out.fd, place, size);
    if (count > 0) {
        link_commit(worker->stream.id, 1, (size_t)count);
        *credit -= (uint64_t)count;
        if ((size_t)count < size && !worker->out.hangup)
            worker->out.readable = false;
    } else if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
        worker->out.readable = errno == EINTR;
    } else {
        out_ended(worker);
    }
}

/* Of the output that came with the result. True: there is more, and credit for it. */
static bool send_rest(struct worker *worker)
{
    uint64_t *credit = &worker->stream.credit[1];
    size_t left = worker->output_size - worker->output_sent, room = link_room();
    size_t size = left < *credit ? left : (size_t)*credit;
    size = size < room ? size : room;
    if (size) {
        uint8_t *from = worker->result + worker->result_size + worker->output_sent;
        link_send_data(worker->stream.id, 1, &(struct iovec){from, size}, 1);
        *credit -= size;
        worker->output_sent += size;
    }
    return worker->output_sent < worker->output_size && *credit;
}

static bool pump(struct stream *stream)
{
    struct worker *worker = container_of(stream, struct worker, stream);
    if (stream->reset)
        return false;
    if (worker->out_done) {
        bool more = worker->done && send_rest(worker);
        finish_when_done(worker);
        return more;
    }
    bool had_credit = stream->credit[1] > 0;
    if (worker->out.readable && had_credit)
        send_some(worker);
    else if (is_at_end(worker))
        out_ended(worker);
    /* Once more when the credit was just used up, to notice an end. */
    bool more = !worker->out_done && worker->out.readable && had_credit;
    finish_when_done(worker);
    return more;
}

/* ---- what a worker answers ---- */

static int start(struct worker *worker);

/* The worker serves another call, or ends by itself. */
static void release_crew(struct worker *worker, bool idle)
{
    struct crew *crew = worker->crew;
    worker->crew = NULL;
    crew->worker = NULL;
    if (!idle || worker->stream.reset) { /* after RESET it was sent SIGTERM */
        drop_crew(crew);
        return;
    }
    dismiss_idle(MAX_IDLE);
    timer_set(&idle_timer, IDLE_AFTER_MS, on_idle);
}

static void take_done(struct worker *worker, const struct answer *answer, const uint8_t *bytes)
{
    size_t size = (size_t)answer->result_size + answer->output_size;
    worker->done = true;
    worker->result = malloc(size + 1);
    if (worker->result) {
        memcpy(worker->result, bytes, size);
        worker->result_size = answer->result_size;
        worker->output_size = worker->stream.reset ? 0 : answer->output_size;
    }
    release_crew(worker, answer->idle == 1);
    stream_want(&worker->stream);
    finish_when_done(worker);
}

/* Makes a pipe for its output. 0 or an errno. */
static int give_output(struct worker *worker)
{
    int ends[2];
    if (worker->out.fd >= 0)
        return EINVAL;
    if (pipe2(ends, O_CLOEXEC) < 0)
        return errno;
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof(int))];
    } control = {0};
    control.header = (struct cmsghdr){
        .cmsg_level = SOL_SOCKET,
        .cmsg_type = SCM_RIGHTS,
        .cmsg_len = CMSG_LEN(sizeof(int)),
    };
    memcpy(CMSG_DATA(&control.header), &ends[1], sizeof(int));
    const struct msghdr message = {
        .msg_iov = &(struct iovec){"", 1},
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof control,
    };
    int error = sendmsg(worker->crew->source.fd, &message, MSG_NOSIGNAL) < 0 ? errno : 0;
    close(ends[1]);
    if (!error)
        error = loop_add_reader(&worker->out, ends[0], on_out);
    if (error) {
        close(ends[0]);
        worker->out.fd = -1;
    } else {
        worker->out_done = false;
    }
    return error;
}

/* It has died, or must: it cannot be served. */
static void lose(struct worker *worker)
{
    if (worker->crew->pid)
        kill(worker->crew->pid, SIGKILL);
    worker->done = true;
    drop_crew(worker->crew);
    worker->crew = NULL;
    finish_when_done(worker);
}

/* False: what it sent makes no sense. */
static bool take_answer(struct worker *worker, const struct answer *answer, const uint8_t *bytes, size_t size)
{
    switch (answer->kind) {
    case ANSWER_WANTS_OUTPUT:
        return worker->operation->gives_output && !give_output(worker);
    case ANSWER_STALE:
        if (!worker->request || worker->stream.reset)
            return false;
        release_crew(worker, false);
        if (start(worker)) {
            worker->done = true;
            finish(worker);
        }
        return true;
    case ANSWER_DONE:
        if (size != (size_t)answer->result_size + answer->output_size || answer->result_size > MAX_RESULT_BYTES ||
            (answer->output_size && !worker->operation->gives_output))
            return false;
        take_done(worker, answer, bytes);
        return true;
    default:
        return false;
    }
}

static void on_answer(struct source *source)
{
    static uint8_t bytes[MAX_RESULT_BYTES + INLINE_BYTES];
    struct crew *crew = container_of(source, struct crew, source);
    while (source->readable && source->fd >= 0) {
        struct answer answer;
        struct iovec parts[] = {{&answer, sizeof answer}, {bytes, sizeof bytes}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t size = recvmsg(source->fd, &message, 0);
        struct worker *worker = crew->worker;
        if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
            source->readable = errno == EINTR;
        } else if (!worker) {
            drop_crew(crew); /* an idle one that was killed */
        } else if (size < (ssize_t)sizeof answer ||
                   !take_answer(worker, &answer, bytes, (size_t)size - sizeof answer)) {
            lose(worker);
        } else {
            /* Nothing follows an answer until it is replied to, and the end of the socket is an event of its own. */
            source->readable = source->hangup;
        }
    }
}

/* ---- starting ---- */

static int send_job(struct crew *crew, struct worker *worker)
{
    struct job_message job = {worker->operation, (uint32_t)worker->request_size, (uint32_t)worker->input_size};
    struct iovec parts[] = {
        {&job, sizeof job},
        {worker->request, worker->request_size},
        {worker->input, worker->input_size},
    };
    const struct msghdr message = {.msg_iov = parts, .msg_iovlen = 3};
    if (sendmsg(crew->source.fd, &message, MSG_NOSIGNAL) < 0)
        return errno;
    /* A process inside may have stopped it while it was idle. */
    if (crew->pid)
        kill(crew->pid, SIGCONT);
    return 0;
}

static bool same_user(const char *one, const char *other)
{
    return one && other ? !strcmp(one, other) : one == other;
}

static struct crew *find_idle(struct worker *worker, const char *user)
{
    if (!worker->operation->reusable || worker->request_size > MAX_REQUEST_BYTES || worker->gathering)
        return NULL;
    for (struct crew *crew = crews, *next; crew; crew = next) {
        next = crew->next;
        if (crew->worker || !same_user(crew->user, user))
            continue;
        if (send_job(crew, worker) == 0)
            return crew;
        drop_crew(crew);
    }
    return NULL;
}

static int fork_crew(struct crew *crew, const struct worker *worker, int in)
{
    int link[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, link) < 0)
        return errno;
    const int keep[] = {link[1], in};
    crew->pid = guest_fork("atoll-worker", keep, 2);
    if (crew->pid == 0) {
        struct job job = {
            .fields = {worker->request, worker->request_size},
            .input = {worker->input, worker->input_size},
            .in = in,
            .link = link[1],
        };
        work(&job, worker->operation);
    }
    int error = crew->pid < 0 ? errno : 0;
    close(link[1]);
    if (!error && (error = loop_add_reader(&crew->source, link[0], on_answer)))
        kill(crew->pid, SIGKILL); /* it must not succeed without its output */
    if (error)
        close(link[0]);
    return error;
}

/* Has the input that was not gathered come through a pipe. */
static int make_input(struct worker *worker, int *theirs)
{
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) < 0)
        return errno;
    int error = loop_add(&worker->in, ends[1], on_in);
    if (error) {
        worker->in.fd = -1;
        close(ends[0]);
        close(ends[1]);
        return error;
    }
    sink_begin(&worker->sink, &worker->in, SINK_CLOSE);
    sink_set_writer(&worker->sink, &worker->stream, 0);
    *theirs = ends[0];
    return 0;
}

/* Gives the operation to an idle worker, or to a new one. 0 or an errno. */
static int start(struct worker *worker)
{
    char *user = fields_string((struct fields){worker->request, worker->request_size}, TAG_USER);
    struct crew *crew = find_idle(worker, user);
    int error = 0, in = -1;
    if (!crew) {
        crew = calloc(1, sizeof *crew);
        error = !crew ? ENOMEM : worker->gathering ? make_input(worker, &in) : 0;
        if (!error)
            error = fork_crew(crew, worker, in);
        if (in >= 0)
            close(in);
        if (error) {
            free(crew);
            free(user);
            return error;
        }
        crew->user = user;
        crew->next = crews;
        crews = crew;
        free_request(worker);
    } else {
        free(user);
    }
    crew->worker = worker;
    worker->crew = crew;
    worker->gathering = false;
    timer_cancel(&worker->gather_timer);
    return 0;
}

static void start_or_fail(struct worker *worker)
{
    size_t passed = worker->gathering ? worker->input_size : 0;
    int error = start(worker);
    if (error) {
        free_request(worker);
        timer_cancel(&worker->gather_timer);
        loop_remove(&worker->in);
        stream_fail(&worker->stream, error, "starting a worker");
    } else if (passed) {
        stream_consumed(&worker->stream, 0, passed);
    }
}

static void on_gathered(struct timer *timer)
{
    start_or_fail(container_of(timer, struct worker, gather_timer));
}

static void take_data(struct stream *stream, int channel, const uint8_t *bytes, size_t size)
{
    struct worker *worker = container_of(stream, struct worker, stream);
    (void)channel;
    if (worker->gathering) {
        uint8_t *grown = worker->input_size + size <= INLINE_BYTES ? realloc(worker->input, worker->input_size + size)
                                                                   : NULL;
        if (grown) {
            memcpy(grown + worker->input_size, bytes, size);
            worker->input = grown;
            worker->input_size += size;
            return;
        }
        start_or_fail(worker);
    }
    if (worker->crew && worker->sink.source)
        sink_put(&worker->sink, bytes, size);
}

static void take_eof(struct stream *stream, int channel)
{
    struct worker *worker = container_of(stream, struct worker, stream);
    (void)channel;
    if (worker->gathering) {
        worker->gathering = false; /* it is complete */
        start_or_fail(worker);
    } else if (worker->sink.source) {
        sink_eof(&worker->sink);
    }
}

static void on_kill_timer(struct timer *timer)
{
    struct worker *worker = container_of(timer, struct worker, kill_timer);
    if (worker->crew && worker->crew->pid)
        kill(worker->crew->pid, SIGKILL);
    /* The host does not wait for a worker that SIGKILL does not end. */
    finish(worker);
}

static void abandon(struct stream *stream)
{
    struct worker *worker = container_of(stream, struct worker, stream);
    if (!worker->crew) { /* not started, or ended, with output that is not wanted any more */
        finish(worker);
        return;
    }
    /* Its input stays open: an end of file would mean that the host had sent everything. */
    if (worker->crew->pid)
        kill(worker->crew->pid, SIGTERM);
    if (!worker->out_done)
        out_ended(worker);
    timer_set(&worker->kill_timer, KILL_AFTER_MS, on_kill_timer);
}

static const struct stream_kind worker_kind = {
    .data = take_data,
    .eof = take_eof,
    .reset = abandon,
    .pump = pump,
};

static struct crew *find_crew(pid_t pid)
{
    struct crew *crew = crews;
    while (crew && crew->pid != pid)
        crew = crew->next;
    return crew;
}

void worker_child_ended(pid_t pid)
{
    struct crew *crew = find_crew(pid);
    if (crew)
        crew->pid = 0;
}

bool worker_has_child(pid_t pid)
{
    return find_crew(pid) != NULL;
}

void worker_open(uint32_t id, struct fields fields, const struct operation *operation)
{
    struct worker *worker = calloc(1, sizeof *worker);
    /* A copy, because children do not inherit the buffer that holds the frame. */
    uint8_t *request = malloc(fields.size + 1);
    if (!worker || !request) {
        free(worker);
        free(request);
        stream_refuse(id, ENOMEM, "starting a worker");
        return;
    }
    memcpy(request, fields.at, fields.size);
    stream_begin(&worker->stream, &worker_kind, id, fields);
    worker->operation = operation;
    worker->request = request;
    worker->request_size = fields.size;
    worker->in.fd = worker->out.fd = -1;
    worker->out_done = true;
    if (operation->takes_input) {
        stream_listen(&worker->stream, 0);
        worker->gathering = true;
        timer_set(&worker->gather_timer, GATHER_MS, on_gathered);
    } else {
        start_or_fail(worker);
    }
}
