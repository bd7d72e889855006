/* Workers: one forked process per file operation.
 *
 * Owns how an operation gets a process of its own under the right user, how its bytes and its result come back, and how
 * it is abandoned. Not here: what an operation does (files.c, search.c, tar_in.c, tar_out.c, watch.c, tree.c).
 *
 * A worker may block for ever on a slow file system, run out of memory or be killed from inside the sandbox: its stream
 * then ends with an errno and nothing else happens. The result comes over a pipe of its own, whose end means that the
 * worker is gone.
 */
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
#include <sys/stat.h>
#include <unistd.h>

#include "guest.h"
#include "link.h"
#include "loop.h"
#include "sink.h"
#include "stream.h"
#include "users.h"

enum {
    MAX_RESULT_BYTES = 8192,
    BUFFER_SIZE = 2 * MAX_RECORD,
    FLUSH_AT = 32 << 10,
    USUAL_MEMORY_MB = 512,
    DONE_MARK = 0xd0, /* the last byte that a worker sends */
    KILL_AFTER_MS = 2000, /* the time a worker has to clean up after RESET */
    WIDE_PIPE = 1 << 20,
};

struct worker {
    struct stream stream;
    struct worker *next;
    pid_t pid; /* 0 once reaped: the kernel may then reuse the number */
    struct source in, out, status;
    struct sink sink;
    bool out_done, status_done;
    uint8_t *result;
    size_t result_size;
    struct timer kill_timer;
};

static struct worker *workers;

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
    return path ? path : "";
}

int job_fail(struct job *job, int error, const char *about)
{
    job->about = about;
    return error;
}

void job_write(struct job *job, const void *bytes, size_t size)
{
    for (size_t done = 0; done < size;) {
        ssize_t count = write(job->out, (const char *)bytes + done, size - done);
        if (count < 0 && errno != EINTR)
            _exit(1); /* the reader is gone */
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
    if (job->buffered)
        job_write(job, job->buffer, job->buffered);
    job->buffered = 0;
}

void job_begin_record(struct job *job)
{
    if (!job->buffer && !(job->buffer = malloc(BUFFER_SIZE)))
        _exit(1);
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

static int take_user(struct job *job)
{
    struct account account;
    char *user = fields_string(job->fields, TAG_USER);
    if (!needs_account(job, user))
        return chdir("/") < 0 ? errno : 0;
    int error = users_find(user, &account);
    if (error)
        return job_fail(job, error, user && error == ENOENT ? "no such user" : "user");
    if (user && (error = users_become(&account)))
        return job_fail(job, error, "becoming the user");
    if (chdir(account.home) < 0 && chdir("/") < 0)
        return errno;
    return 0;
}

static _Noreturn void work(struct job *job, const struct operation *operation, int status)
{
    static uint8_t space[MAX_RESULT_BYTES - 1];
    job->result = (struct pack)PACK(space);
    signal(SIGPIPE, SIG_IGN);
    int error = operation->as_root ? 0 : take_user(job);
    /* After the change of user, which clears it. Only matters in tests: PID 1 takes all processes along. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!error) {
        umask(022);
        limit_memory(operation->memory_mb);
        error = operation->run(job);
    }
    if (job->out >= 0)
        job_flush(job);
    if (error) {
        job->result.size = 0;
        job->result.overflow = false;
        pack_error(&job->result, error, job->about);
    }
    for (size_t done = 0; done < job->result.size;) {
        ssize_t count = write(status, space + done, job->result.size - done);
        if (count <= 0)
            _exit(1);
        done += (size_t)count;
    }
    /* Last, so that a worker that was killed before has not reported success. */
    const uint8_t mark = DONE_MARK;
    (void)!write(status, &mark, 1);
    _exit(0);
}

/* ---- in the guest ---- */

static void finish(struct worker *worker)
{
    timer_cancel(&worker->kill_timer);
    loop_remove(&worker->in);
    loop_remove(&worker->out);
    loop_remove(&worker->status);
    sink_free(&worker->sink);
    if (worker->stream.reset)
        stream_fail(&worker->stream, ECANCELED, NULL);
    else if (!worker->result_size || worker->result[worker->result_size - 1] != DONE_MARK)
        stream_fail(&worker->stream, EIO, "the worker of this operation was killed");
    else
        stream_end(&worker->stream, &(struct pack){worker->result, worker->result_size - 1, 0, false});
    free(worker->result);
    worker->result = NULL;
    for (struct worker **at = &workers; *at; at = &(*at)->next)
        if (*at == worker) {
            *at = worker->next;
            break;
        }
}

static void finish_when_done(struct worker *worker)
{
    if (worker->status_done && worker->out_done)
        finish(worker);
}

static void on_status(struct source *source)
{
    struct worker *worker = container_of(source, struct worker, status);
    while (!worker->status_done && source->readable) {
        uint8_t spill;
        bool full = worker->result_size == MAX_RESULT_BYTES;
        if (!worker->result && !(worker->result = malloc(MAX_RESULT_BYTES)))
            full = true;
        ssize_t count = read(source->fd, full ? &spill : worker->result + worker->result_size,
                             full ? 1 : MAX_RESULT_BYTES - worker->result_size);
        if (count > 0 && !full)
            worker->result_size += (size_t)count;
        else if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR))
            worker->status_done = true;
        else if (count < 0 && errno == EAGAIN)
            source->readable = false;
    }
    if (worker->status_done)
        finish_when_done(worker);
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

static bool pump(struct stream *stream)
{
    struct worker *worker = container_of(stream, struct worker, stream);
    if (worker->out_done || stream->reset)
        return false;
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

static void take_data(struct stream *stream, int channel, const uint8_t *bytes, size_t size)
{
    (void)channel;
    sink_put(&container_of(stream, struct worker, stream)->sink, bytes, size);
}

static void take_eof(struct stream *stream, int channel)
{
    (void)channel;
    sink_eof(&container_of(stream, struct worker, stream)->sink);
}

static void on_kill_timer(struct timer *timer)
{
    struct worker *worker = container_of(timer, struct worker, kill_timer);
    if (worker->pid)
        kill(worker->pid, SIGKILL);
    /* The host does not wait for a worker that SIGKILL does not end. */
    worker->status_done = worker->out_done = true;
    finish(worker);
}

static void abandon(struct stream *stream)
{
    struct worker *worker = container_of(stream, struct worker, stream);
    /* Its input stays open: an end of file would mean that the host had sent everything. */
    if (worker->pid)
        kill(worker->pid, SIGTERM);
    if (!worker->out_done)
        out_ended(worker);
    timer_set(&worker->kill_timer, KILL_AFTER_MS, on_kill_timer);
    finish_when_done(worker);
}

static const struct stream_kind worker_kind = {
    .data = take_data,
    .eof = take_eof,
    .reset = abandon,
    .pump = pump,
};

void worker_child_ended(pid_t pid)
{
    for (struct worker *worker = workers; worker; worker = worker->next)
        if (worker->pid == pid)
            worker->pid = 0;
}

bool worker_has_child(pid_t pid)
{
    for (struct worker *worker = workers; worker; worker = worker->next)
        if (worker->pid == pid)
            return true;
    return false;
}

static int make_pipe(int ends[2], bool wanted)
{
    ends[0] = ends[1] = -1;
    return wanted && pipe2(ends, O_CLOEXEC) < 0 ? errno : 0;
}

static void close_pipe(int ends[2])
{
    for (int i = 0; i < 2; i++)
        if (ends[i] >= 0)
            close(ends[i]);
}

struct pipes {
    int in[2], out[2], status[2];
};

static int start(struct worker *worker, struct fields fields, const struct operation *operation, struct pipes *pipes)
{
    int error;
    if ((error = make_pipe(pipes->in, operation->takes_input)) ||
        (error = make_pipe(pipes->out, operation->gives_output)) || (error = make_pipe(pipes->status, true)))
        return error;
    /* A copy, because children do not inherit the buffer that holds the frame. */
    uint8_t *copy = malloc(fields.size + 1);
    if (!copy)
        return ENOMEM;
    memcpy(copy, fields.at, fields.size);
    const int keep[] = {pipes->in[0], pipes->out[1], pipes->status[1]};
    worker->pid = guest_fork("atoll-worker", keep, 3);
    error = errno;
    if (worker->pid == 0) {
        struct job job = {.fields = {copy, fields.size}, .in = pipes->in[0], .out = pipes->out[1]};
        work(&job, operation, pipes->status[1]);
    }
    free(copy);
    return worker->pid < 0 ? error : 0;
}

static void keep_end(struct source *source, int *fd, void (*wake)(struct source *source))
{
    source->fd = -1;
    if (*fd < 0)
        return;
    if (loop_add(source, *fd, wake) == 0)
        *fd = -1; /* now owned by the loop */
    else
        source->fd = -1;
}

void worker_open(uint32_t id, struct fields fields, const struct operation *operation)
{
    struct worker *worker = calloc(1, sizeof *worker);
    struct pipes pipes = {{-1, -1}, {-1, -1}, {-1, -1}};
    int error = worker ? start(worker, fields, operation, &pipes) : ENOMEM;
    if (error) {
        stream_refuse(id, error, "starting a worker");
        free(worker);
    } else {
        stream_begin(&worker->stream, &worker_kind, id, fields);
        worker->next = workers;
        workers = worker;
        keep_end(&worker->in, &pipes.in[1], on_in);
        keep_end(&worker->out, &pipes.out[0], on_out);
        keep_end(&worker->status, &pipes.status[0], on_status);
        worker->out_done = worker->out.fd < 0;
        worker->status_done = worker->status.fd < 0;
        if (operation->gives_output && worker->out_done)
            kill(worker->pid, SIGKILL); /* it must not succeed without its output */
        if (operation->takes_input && worker->in.fd >= 0) {
            stream_listen(&worker->stream, 0);
            sink_begin(&worker->sink, &worker->in, SINK_CLOSE);
            sink_set_writer(&worker->sink, &worker->stream, 0);
        }
    }
    close_pipe(pipes.in);
    close_pipe(pipes.out);
    close_pipe(pipes.status);
}
