/* Spawned processes: their records, pipes and supervisors.
 *
 * Owns how a process is set up, how its supervisor's reports change its record, how its output is read, how it is
 * signalled and how long its record is kept. Not here: attachments and what they were sent (attach.c), how a program is
 * started (supervisor.c), which supervisor runs it (slots.c), how a tree is killed (tree.c).
 */
#define _GNU_SOURCE
#include "proc.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "guest.h"
#include "link.h"
#include "slots.h"
#include "tree.h"

enum {
    DEFAULT_RING_BYTES = 65536,
    MAX_RING_BYTES = 1 << 20,
    LAST_SIGNAL = 64,
    ENDED_KEPT = 64,
    COMMAND_KEPT = 1024,
    RECORD_ROOM = COMMAND_KEPT + 256,
    READS_PER_ROUND = 4,
    MAX_PIPE_BYTES = 1 << 20,  /* assumed content of a pipe when FIONREAD fails */
    TERMINAL_BUFFER = 128 << 10,
    COMMAND_TIMEOUT_MS = 5000, /* after that a supervisor counts as stuck and is killed */
    SWEEP_EVERY_MS = 20,
    SWEEPS = 10,
};

/* A SIGNAL stream that waits for the supervisor's report. */
struct waiter {
    struct stream stream;
    struct waiter *next;
    struct proc *proc;
    uint32_t sequence;
};

static struct proc *procs;
static int64_t last_id;
static struct timer sweep_timer;
static int sweeps_left;

struct proc *proc_find(int64_t id)
{
    struct proc *proc = procs;
    while (proc && proc->id != id)
        proc = proc->next;
    return proc;
}

/* ---- output ---- */

static void settle(struct output *output)
{
    if (output->settled)
        return;
    output->settled = true;
    output->at_end = output->ring.total;
    attach_settled(output);
}

/* An extra channel stays open for writing until the tree is gone: only its other direction has ended. */
static void output_closed(struct output *output)
{
    output->open = false;
    if (output->channel < FIRST_CHANNEL || !output->proc->slot)
        loop_remove(&output->source);
    if (output->proc->state == PROC_ENDED)
        settle(output);
    attach_output(output);
}

/* EIO of a terminal means that no process has it open; it may be opened again while its session lives. */
static bool is_end(const struct output *output, ssize_t count)
{
    if (count == 0)
        return true;
    return !(output->proc->terminal && output->channel == 1 && errno == EIO && output->proc->state != PROC_ENDED);
}

/* All writers have closed and the pipe is empty: the end is seen without allocating a buffer. */
static bool is_drained(const struct output *output)
{
    int count;
    return output->source.hangup && output->channel < FIRST_CHANNEL && !output->proc->terminal &&
           ioctl(output->source.fd, FIONREAD, &count) == 0 && count == 0;
}

static bool read_some(struct output *output)
{
    struct iovec places[2];
    if (is_drained(output)) {
        output_closed(output);
        return false;
    }
    size_t room = attach_room(output);
    bool settling = output->proc->state == PROC_ENDED && !output->settled;
    if (settling && room > output->to_settle)
        room = output->to_settle;
    if (!room)
        return false;
    int parts = ring_reserve(&output->ring, room, places);
    if (!parts)
        return false;
    ssize_t count = readv(output->source.fd, places, parts);
    if (count > 0) {
        ring_commit(&output->ring, (size_t)count);
        if (settling && !(output->to_settle -= (size_t)count))
            settle(output);
        attach_output(output);
        /* A short read has emptied a pipe, unless its end follows. For a terminal it proves nothing. */
        if (output->channel < FIRST_CHANNEL && (size_t)count < room && !settling && !output->source.hangup &&
            !output->proc->terminal)
            output->source.readable = false;
        return true;
    }
    if (count < 0 && errno == EINTR)
        return true;
    if (count < 0 && errno == EAGAIN) {
        output->source.readable = false;
        if (settling)
            settle(output);
    } else if (is_end(output, count)) {
        output_closed(output);
    } else {
        output->source.readable = false;
    }
    return false;
}

void proc_fill(struct output *output)
{
    for (int i = 0; i < READS_PER_ROUND; i++)
        if (!output->open || !output->source.readable || !read_some(output))
            return;
    loop_soon(&output->fill_task);
}

static void on_fill_task(struct task *task)
{
    proc_fill(container_of(task, struct output, fill_task));
}

static void on_output(struct source *source)
{
    struct output *output = container_of(source, struct output, source);
    if (output->channel >= FIRST_CHANNEL)
        sink_flush(&output->sink);
    else if (output->proc->terminal)
        sink_flush(&output->proc->input_sink);
    proc_fill(output);
}

static void on_input(struct source *source)
{
    sink_flush(&container_of(source, struct proc, input)->input_sink);
}

/* END waits for what is in the pipe now, not for what a child may add for ever. */
static void begin_settling(struct output *output)
{
    int count;
    bool is_terminal = output->proc->terminal && output->channel == 1;
    if (!output->open) {
        settle(output);
        return;
    }
    if (is_terminal) /* FIONREAD leaves out bytes that are still in the line discipline; read until empty */
        output->to_settle = TERMINAL_BUFFER;
    else if (ioctl(output->source.fd, FIONREAD, &count) == 0)
        output->to_settle = (size_t)count;
    else
        output->to_settle = MAX_PIPE_BYTES;
    if (!output->to_settle) {
        settle(output); /* what is written from now on is an event */
        return;
    }
    output->source.readable = true;
    proc_fill(output);
}

/* ---- the end of a process ---- */

static void main_ended(struct proc *proc)
{
    proc->state = PROC_ENDED;
    proc->ended_us = unix_time_us();
    proc->ended_after_kill = proc->tree_kill_asked;
    for (int i = 0; i < proc->output_count; i++)
        begin_settling(&proc->outputs[i]);
    attach_ended(proc);
}

static void drop(struct proc *proc)
{
    struct proc **at = &procs;
    while (*at != proc)
        at = &(*at)->next;
    *at = proc->next;
    timer_cancel(&proc->kill_timer);
    loop_remove(&proc->input);
    sink_free(&proc->input_sink);
    for (int i = 0; i < proc->output_count; i++) {
        struct output *output = &proc->outputs[i];
        loop_not_soon(&output->fill_task);
        loop_remove(&output->source);
        sink_free(&output->sink);
        ring_free(&output->ring);
    }
    free(proc->command);
    loop_free(proc);
}

/* The list is newest first: records behind the kept ones are older. */
void proc_trim(void)
{
    int ended = 0;
    for (struct proc *proc = procs, *next; proc; proc = next) {
        next = proc->next;
        if (proc->state != PROC_ENDED || proc->slot || proc->waiters)
            continue;
        if (++ended > ENDED_KEPT && !proc->attachments)
            drop(proc);
    }
}

static void answer_waiters(struct proc *proc, int64_t sequence, int error)
{
    for (struct waiter **at = &proc->waiters; *at;) {
        struct waiter *waiter = *at;
        if (sequence >= 0 && waiter->sequence != (uint32_t)sequence) {
            at = &waiter->next;
            continue;
        }
        *at = waiter->next;
        if (error)
            stream_fail(&waiter->stream, error, NULL);
        else
            stream_end(&waiter->stream, &(struct pack){0});
    }
}

/* Goes on for a while after the last find: a dying supervisor closes its socket before the kernel reparents its
 * children. */
static void on_sweep(struct timer *timer)
{
    const struct tree everything = {.root = getpid(), .spare = guest_knows_child};
    sweeps_left = tree_kill_sweep(&everything) ? SWEEPS : sweeps_left - 1;
    if (sweeps_left > 0)
        timer_set(timer, SWEEP_EVERY_MS, on_sweep);
}

void proc_left(struct proc *proc)
{
    proc->slot = NULL;
    timer_cancel(&proc->kill_timer);
    answer_waiters(proc, -1, 0);
    if (proc->state == PROC_STARTING) { /* it was refused */
        drop(proc);
        return;
    }
    for (int i = 0; i < proc->output_count; i++) {
        struct output *output = &proc->outputs[i];
        if (!output->open) {
            loop_remove(&output->source);
        } else if (proc->terminal || output->channel >= FIRST_CHANNEL) { /* the end of a pipe is an event */
            output->source.readable = true;
            proc_fill(output);
        }
    }
    loop_remove(&proc->input);
    proc_trim();
}

/* The supervisor was killed: its orphans are now children of the guest, recognised by belonging to no slot or
 * worker. */
void proc_lost(struct proc *proc)
{
    sweeps_left = SWEEPS;
    timer_set(&sweep_timer, 0, on_sweep);
    if (proc->state == PROC_STARTING) {
        attach_refused(proc, ECHILD, "the supervisor of this process was killed");
    } else if (proc->state == PROC_RUNNING) {
        proc->lost = true;
        main_ended(proc);
    }
    proc_left(proc);
}

static bool marker_in_use(int marker)
{
    for (struct proc *proc = procs; proc; proc = proc->next)
        if (proc->slot && proc->marker == marker)
            return true;
    return false;
}

bool proc_claims_orphan(pid_t pid)
{
    return !guest_has_subreapers() && marker_in_use(tree_marker_of(pid));
}

static int choose_marker(void)
{
    int marker = TREE_DEFAULT_MARKER;
    while (!guest_has_subreapers() && marker < TREE_LAST_MARKER && marker_in_use(marker))
        marker++;
    return marker;
}

/* ---- what the supervisor reports ---- */

void proc_report(struct proc *proc, struct report *report)
{
    switch (report->kind) {
    case REPORT_STARTED:
        proc->pid = report->value;
        proc->uid = (uid_t)report->number;
        proc->state = PROC_RUNNING;
        attach_started(proc);
        break;
    case REPORT_REFUSED:
        report->text[sizeof report->text - 1] = 0;
        attach_refused(proc, report->value, report->text[0] ? report->text : NULL);
        break;
    case REPORT_ENDED:
        proc->wait_status = report->value;
        proc->duration_us = report->number;
        main_ended(proc);
        break;
    case REPORT_DONE:
        if (proc->state == PROC_ENDED)
            timer_cancel(&proc->kill_timer);
        answer_waiters(proc, report->number, report->value);
        break;
    }
}

/* ---- signals ---- */

static int send_command(struct proc *proc, int signal, bool tree)
{
    if (!proc->slot)
        return ESRCH;
    const struct supervisor_command command = {.signal = signal, .tree = tree, .sequence = ++proc->sequence};
    int error = slot_send(proc->slot, command);
    if (!error && signal && proc->state != PROC_ENDED)
        proc->signals_asked |= 1ULL << (signal - 1);
    return error;
}

static void on_kill_timer(struct timer *timer)
{
    slot_kill(container_of(timer, struct proc, kill_timer)->slot);
}

static int send_signal(struct proc *proc, int signal, bool tree)
{
    if (signal < 0 || signal > LAST_SIGNAL)
        return EINVAL;
    int error = send_command(proc, signal, tree);
    if (signal == SIGKILL && tree && proc->slot) {
        if (proc->state != PROC_ENDED)
            proc->tree_kill_asked = true;
        if (!proc->kill_timer.set)
            timer_set(&proc->kill_timer, COMMAND_TIMEOUT_MS, on_kill_timer);
    }
    return error;
}

void proc_kill(struct proc *proc)
{
    send_signal(proc, SIGKILL, true);
}

static void resize(struct proc *proc, struct fields fields)
{
    int64_t rows = fields_int(fields, TAG_PTY_ROWS, 0), columns = fields_int(fields, TAG_PTY_COLS, 0);
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    int fd = proc->terminal ? proc->outputs[0].source.fd : -1;
    if (fd < 0 || rows <= 0 || rows >= 65536 || columns <= 0 || columns >= 65536 || ioctl(fd, TIOCSWINSZ, &size) < 0)
        return;
    /* gVisor sends no signal for a new size, and does not tell to whom. Who does not handle it ignores it. */
    if (tcgetpgrp(fd) < 0)
        send_command(proc, SIGWINCH, true);
}

void proc_control(struct proc *proc, struct fields fields)
{
    int64_t action = fields_int(fields, TAG_ACTION, 0), signal = fields_int(fields, TAG_SIGNAL, -1);
    if (action == ACTION_SIGNAL && signal > 0 && signal <= LAST_SIGNAL)
        send_signal(proc, (int)signal, fields_int(fields, TAG_TREE, 0) == 1);
    else if (action == ACTION_RESIZE)
        resize(proc, fields);
}

static void forget_waiter(struct stream *stream)
{
    struct waiter *waiter = container_of(stream, struct waiter, stream);
    struct waiter **at = &waiter->proc->waiters;
    while (*at != waiter)
        at = &(*at)->next;
    *at = waiter->next;
    stream_fail(stream, ECANCELED, NULL);
}

static const struct stream_kind waiter_kind = {.reset = forget_waiter};

void proc_open_signal(uint32_t id, struct fields fields)
{
    struct proc *proc = proc_find(fields_int(fields, TAG_PROC, 0));
    int64_t signal = fields_int(fields, TAG_SIGNAL, -1);
    bool tree = fields_int(fields, TAG_TREE, 0) == 1;
    if (!proc || (!tree && proc->state == PROC_ENDED) || !proc->slot) {
        stream_refuse(id, ESRCH, NULL);
        return;
    }
    struct waiter *waiter = calloc(1, sizeof *waiter);
    int error = !waiter ? ENOMEM : signal < 0 || signal > LAST_SIGNAL ? EINVAL : send_signal(proc, (int)signal, tree);
    if (error) {
        free(waiter);
        stream_refuse(id, error, NULL);
        return;
    }
    stream_begin(&waiter->stream, &waiter_kind, id, fields);
    waiter->proc = proc;
    waiter->sequence = proc->sequence;
    waiter->next = proc->waiters;
    proc->waiters = waiter;
}

/* ---- starting ---- */

struct request {
    int64_t rows, columns, channels, ring;
    bool has_input, terminal, keep;
};

static const char *read_request(struct fields fields, struct request *request)
{
    const uint8_t *value;
    uint32_t size;
    bool line = fields_find(fields, TAG_SHELL, &value, &size);
    if (line == (fields_count(fields, TAG_ARGV) > 0))
        return "either ARGV or SHELL";
    request->rows = fields_int(fields, TAG_PTY_ROWS, 0);
    request->columns = fields_int(fields, TAG_PTY_COLS, 0);
    request->terminal = request->rows || request->columns;
    if (request->terminal &&
        (request->rows < 1 || request->rows > 65535 || request->columns < 1 || request->columns > 65535))
        return "PTY_ROWS and PTY_COLS";
    request->channels = fields_int(fields, TAG_CHANNELS, 0);
    if (request->channels < 0 || request->channels > MAX_CHANNELS)
        return "CHANNELS";
    request->ring = fields_int(fields, TAG_RING, DEFAULT_RING_BYTES);
    if (request->ring < 0 || request->ring > MAX_RING_BYTES)
        return "RING";
    request->has_input = fields_int(fields, TAG_STDIN, 0) == 1;
    request->keep = fields_int(fields, TAG_KEEP, 0) == 1;
    return NULL;
}

static void copy_command(struct proc *proc, struct fields fields)
{
    uint16_t tag;
    const uint8_t *value;
    uint32_t size;
    size_t length = 0;
    char command[COMMAND_KEPT];
    while (fields_next(&fields, &tag, &value, &size)) {
        if (tag != TAG_ARGV && tag != TAG_SHELL)
            continue;
        if (length && length < sizeof command)
            command[length++] = ' ';
        size_t part = size < sizeof command - length ? size : sizeof command - length;
        memcpy(command + length, value, part);
        length += part;
    }
    proc->command = strndup(command, length);
}

/* The guest's end and the process's end of one connection. */
struct ends {
    int ours, theirs;
};

static int make_pipe(struct ends *ends, bool we_read)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return errno;
    *ends = (struct ends){fds[!we_read], fds[we_read]};
    return 0;
}

static int make_socket(struct ends *ends)
{
    int fds[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return errno;
    *ends = (struct ends){fds[0], fds[1]};
    return 0;
}

/* O_NONBLOCK because /dev/ptmx of a hostile image may be any file. The supervisor opens the slave side. */
static int make_terminal(struct ends *ends, const struct request *request)
{
    struct winsize size = {.ws_row = (unsigned short)request->rows, .ws_col = (unsigned short)request->columns};
    int number, unlock = 0, fd = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno;
    ends->ours = fd;
    if (ioctl(fd, TIOCGPTN, &number) < 0 || ioctl(fd, TIOCSPTLCK, &unlock) < 0 || ioctl(fd, TIOCSWINSZ, &size) < 0)
        return errno;
    return 0;
}

struct stdio {
    struct ends in, out, err, terminal, extras[MAX_CHANNELS];
};

static void init_stdio(struct stdio *stdio)
{
    struct ends *all = (struct ends *)stdio;
    for (size_t i = 0; i < sizeof *stdio / sizeof *all; i++)
        all[i] = (struct ends){-1, -1};
}

static void close_stdio(struct stdio *stdio, bool ours)
{
    struct ends *all = (struct ends *)stdio;
    for (size_t i = 0; i < sizeof *stdio / sizeof *all; i++) {
        if (all[i].theirs >= 0)
            close(all[i].theirs);
        if (ours && all[i].ours >= 0)
            close(all[i].ours);
    }
}

static int create_stdio(struct stdio *stdio, const struct request *request)
{
    int error;
    if (request->terminal) {
        if ((error = make_terminal(&stdio->terminal, request)))
            return error;
    } else {
        if ((error = make_pipe(&stdio->out, true)) || (error = make_pipe(&stdio->err, true)))
            return error;
        if (request->has_input && (error = make_pipe(&stdio->in, false)))
            return error;
    }
    for (int i = 0; i < request->channels; i++)
        if ((error = make_socket(&stdio->extras[i])))
            return error;
    return 0;
}

static int assign_supervisor(struct proc *proc, struct fields fields, const struct stdio *stdio, int extra_count)
{
    struct spawn_job job = {
        .fields = fields,
        .in = stdio->in.theirs,
        .out = stdio->out.theirs,
        .err = stdio->err.theirs,
        .terminal = stdio->terminal.ours,
        .extra_count = extra_count,
        .marker = proc->marker,
    };
    for (int i = 0; i < extra_count; i++)
        job.extras[i] = stdio->extras[i].theirs;
    return slot_assign(&proc->slot, proc, job);
}

/* 0, or an errno: the process must not run then, for its output would be lost. */
static int begin_output(struct proc *proc, int channel, int fd, size_t ring)
{
    struct output *output = &proc->outputs[proc->output_count++];
    output->proc = proc;
    output->channel = channel;
    output->fill_task.run = on_fill_task;
    output->open = true;
    ring_begin(&output->ring, ring);
    bool written = channel >= FIRST_CHANNEL || proc->terminal;
    int error = (written ? loop_add : loop_add_reader)(&output->source, fd, on_output);
    if (error)
        output->open = false; /* as if closed; the descriptor is closed with the record */
    if (channel >= FIRST_CHANNEL)
        sink_begin(&output->sink, &output->source, SINK_SHUTDOWN);
    return error;
}

static int connect_stdio(struct proc *proc, const struct stdio *stdio, const struct request *request)
{
    size_t ring = (size_t)request->ring;
    int error = 0, last;
    proc->input.fd = -1;
    if (request->terminal) {
        error = begin_output(proc, 1, stdio->terminal.ours, ring);
        sink_begin(&proc->input_sink, &proc->outputs[0].source, SINK_TERMINAL);
    } else {
        error = begin_output(proc, 1, stdio->out.ours, ring);
        if ((last = begin_output(proc, 2, stdio->err.ours, ring)))
            error = last;
        if (request->has_input) {
            if ((last = loop_add(&proc->input, stdio->in.ours, on_input)))
                error = last;
            sink_begin(&proc->input_sink, &proc->input, SINK_CLOSE);
        }
    }
    for (int i = 0; i < request->channels; i++)
        if ((last = begin_output(proc, FIRST_CHANNEL + i, stdio->extras[i].ours, ring)))
            error = last;
    return error;
}

void proc_open_spawn(uint32_t id, struct fields fields)
{
    struct request request;
    struct stdio stdio;
    const char *wrong = read_request(fields, &request);
    if (wrong) {
        stream_refuse(id, EINVAL, wrong);
        return;
    }
    init_stdio(&stdio);
    /* Allocate only the outputs that it has: the record is kept long after the process. */
    size_t outputs = (request.terminal ? 1 : 2) + (size_t)request.channels;
    struct proc *proc = calloc(1, sizeof *proc + outputs * sizeof *proc->outputs);
    int error = proc ? create_stdio(&stdio, &request) : ENOMEM;
    if (!error) {
        proc->marker = choose_marker();
        error = assign_supervisor(proc, fields, &stdio, (int)request.channels);
    }
    close_stdio(&stdio, error != 0);
    if (error) {
        free(proc);
        stream_refuse(id, error, "starting a process");
        return;
    }
    proc->id = ++last_id;
    proc->keep = request.keep;
    proc->terminal = request.terminal;
    proc->started_us = unix_time_us();
    copy_command(proc, fields);
    error = connect_stdio(proc, &stdio, &request);
    proc->next = procs;
    procs = proc;
    if (error || !attach_spawner(proc, id, fields)) {
        stream_refuse(id, error ? error : ENOMEM, "starting a process");
        proc_kill(proc);
    }
}

/* ---- the list, made without a worker so that it works at the process limit, when one must choose what to kill ---- */

struct listing {
    struct stream stream;
    uint8_t *records;
    size_t size, sent;
};

static size_t pack_record(uint8_t *at, const struct proc *proc)
{
    struct pack record = {at + 4, 0, RECORD_ROOM - 4, false};
    pack_int(&record, TAG_PROC, proc->id);
    pack_int(&record, TAG_PID, proc->pid);
    pack_string(&record, TAG_COMMAND, proc->command ? proc->command : "");
    pack_int(&record, TAG_UID, proc->uid);
    pack_int(&record, TAG_STARTED_US, proc->started_us);
    pack_int(&record, TAG_OUT_TOTAL, (int64_t)proc->outputs[0].ring.total);
    pack_int(&record, TAG_ERR_TOTAL, proc->terminal ? 0 : (int64_t)proc->outputs[1].ring.total);
    if (proc->state == PROC_ENDED) {
        if (!proc->lost && WIFEXITED(proc->wait_status))
            pack_int(&record, TAG_EXIT_CODE, WEXITSTATUS(proc->wait_status));
        else if (!proc->lost)
            pack_int(&record, TAG_SIGNAL, WTERMSIG(proc->wait_status));
        pack_int(&record, TAG_ENDED_US, proc->ended_us);
    }
    pack_int(&record, TAG_LIVE, proc->slot != NULL);
    put_u32(at, (uint32_t)record.size);
    return 4 + record.size;
}

static void end_listing(struct listing *listing, int error)
{
    free(listing->records);
    if (error)
        stream_fail(&listing->stream, error, NULL);
    else
        stream_end(&listing->stream, &(struct pack){0});
}

static bool pump_listing(struct stream *stream)
{
    struct listing *listing = container_of(stream, struct listing, stream);
    size_t left = listing->size - listing->sent;
    size_t most = left < MAX_PAYLOAD ? left : MAX_PAYLOAD;
    if (most > stream->credit[1])
        most = (size_t)stream->credit[1];
    if (most) {
        link_send_data(stream->id, 1, &(struct iovec){listing->records + listing->sent, most}, 1);
        stream->credit[1] -= most;
        listing->sent += most;
    }
    if (listing->sent == listing->size) {
        end_listing(listing, 0);
        return false;
    }
    return most > 0;
}

static void reset_listing(struct stream *stream)
{
    end_listing(container_of(stream, struct listing, stream), ECANCELED);
}

static const struct stream_kind listing_kind = {.pump = pump_listing, .reset = reset_listing};

void proc_open_list(uint32_t id, struct fields fields)
{
    size_t count = 1;
    for (struct proc *proc = procs; proc; proc = proc->next)
        count++;
    struct listing *listing = calloc(1, sizeof *listing);
    uint8_t *records = malloc(count * RECORD_ROOM);
    if (!listing || !records) {
        free(listing);
        free(records);
        stream_refuse(id, ENOMEM, NULL);
        return;
    }
    stream_begin(&listing->stream, &listing_kind, id, fields);
    listing->records = records;
    for (struct proc *proc = procs; proc; proc = proc->next)
        if (proc->state != PROC_STARTING)
            listing->size += pack_record(records + listing->size, proc);
    stream_want(&listing->stream);
}
