/* Attachments of streams to a process: what each was sent, and when each gets END.
 *
 * Owns offsets into the kept output, credit, which attachment may block the process and which skips a gap instead. Not
 * here: how output is read and how a process is ended (proc.c).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <sys/wait.h>

#include "link.h"
#include "proc.h"

struct attachment {
    struct stream stream;
    struct attachment *next;
    struct proc *proc;
    bool spawned; /* the stream that started the process: its RESET kills, unless KEEP */
    bool lossless;
    bool quiet; /* wants no STARTED */
    int turn;
    uint64_t cursor[MAX_OUTPUTS]; /* the next byte to send */
    uint64_t goal[MAX_OUTPUTS];   /* END waits for this; UINT64_MAX while the process runs */
    bool eof_sent[MAX_OUTPUTS];
};

static bool sees(const struct attachment *attachment, const struct output *output)
{
    return output->channel < FIRST_CHANNEL || attachment->proc->writer == attachment;
}

static int index_of(const struct output *output)
{
    return (int)(output - output->proc->outputs);
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* The offset up to which this attachment is sent a channel, as of now. */
static uint64_t end_of(const struct attachment *attachment, int i)
{
    return smaller(attachment->goal[i], attachment->proc->outputs[i].ring.total);
}

size_t attach_room(const struct output *output)
{
    int i = index_of(output);
    uint64_t unsent = 0;
    for (struct attachment *at = output->proc->attachments; at; at = at->next)
        if (at->lossless && !at->stream.reset && sees(at, output) && at->cursor[i] < end_of(at, i)) {
            uint64_t behind = output->ring.total - at->cursor[i];
            unsent = behind > unsent ? behind : unsent;
        }
    return unsent < output->ring.size ? output->ring.size - (size_t)unsent : 0;
}

/* ---- the end ---- */

static void pack_outcome(struct pack *fields, const struct proc *proc)
{
    const struct output *out = &proc->outputs[0], *err = proc->terminal ? NULL : &proc->outputs[1];
    int status = proc->wait_status;
    bool killed = proc->ended_after_kill;
    pack_int(fields, TAG_PROC, proc->id);
    if (!proc->lost && WIFEXITED(status)) {
        pack_int(fields, TAG_EXIT_CODE, WEXITSTATUS(status));
    } else if (!proc->lost) {
        pack_int(fields, TAG_SIGNAL, WTERMSIG(status));
        killed |= (proc->signals_asked >> ((WTERMSIG(status) - 1) & 63)) & 1;
    }
    pack_int(fields, TAG_OUT_TOTAL, (int64_t)(out->settled ? out->at_end : out->ring.total));
    pack_int(fields, TAG_ERR_TOTAL, !err ? 0 : (int64_t)(err->settled ? err->at_end : err->ring.total));
    if (!proc->lost)
        pack_int(fields, TAG_DURATION_US, proc->duration_us);
    if (killed)
        pack_int(fields, TAG_KILLED, 1);
}

static void set_writer(struct proc *proc, struct attachment *writer)
{
    struct stream *stream = writer ? &writer->stream : NULL;
    proc->writer = writer;
    if (proc->input_sink.source) {
        sink_set_writer(&proc->input_sink, stream, 0);
        if (stream)
            stream_listen(stream, 0);
    }
    for (int i = 0; i < proc->output_count; i++) {
        struct output *output = &proc->outputs[i];
        if (output->channel < FIRST_CHANNEL)
            continue;
        sink_set_writer(&output->sink, stream, output->channel);
        if (stream)
            stream_listen(stream, output->channel);
    }
}

static void detach(struct attachment *attachment)
{
    struct proc *proc = attachment->proc;
    struct attachment **at = &proc->attachments;
    while (*at != attachment)
        at = &(*at)->next;
    *at = attachment->next;
    if (proc->writer == attachment)
        set_writer(proc, NULL);
    /* Reading may have been blocked by this attachment. */
    for (int i = 0; i < proc->output_count; i++)
        loop_soon(&proc->outputs[i].fill_task);
}

static void end(struct attachment *attachment)
{
    uint8_t space[512];
    struct pack fields = PACK(space);
    struct proc *proc = attachment->proc;
    if (attachment->stream.reset)
        pack_error(&fields, ECANCELED, NULL);
    else if (proc->lost)
        pack_error(&fields, ECHILD, "the supervisor of this process was killed; how it ended is not known");
    pack_outcome(&fields, proc);
    detach(attachment);
    stream_end(&attachment->stream, &fields);
    proc_trim();
}

static bool is_complete(const struct attachment *attachment)
{
    const struct proc *proc = attachment->proc;
    if (proc->state != PROC_ENDED)
        return false;
    if (attachment->stream.reset)
        return true;
    for (int i = 0; i < proc->output_count; i++)
        if (sees(attachment, &proc->outputs[i]) && attachment->cursor[i] < attachment->goal[i])
            return false;
    return true;
}

/* ---- sending ---- */

/* The ring has overwritten bytes that were to be sent next: sends GAP with the offset that follows. */
static void skip_gap(struct attachment *attachment, int i)
{
    struct output *output = &attachment->proc->outputs[i];
    uint64_t oldest = ring_oldest(&output->ring);
    if (attachment->cursor[i] >= oldest)
        return;
    attachment->cursor[i] = oldest;
    uint8_t space[64];
    struct pack fields = PACK(space);
    pack_int(&fields, TAG_EVENT, EVENT_GAP);
    pack_int(&fields, TAG_CHANNEL, output->channel);
    pack_int(&fields, TAG_OFFSET, (int64_t)oldest);
    stream_event(&attachment->stream, &fields);
}

static bool send_from(struct attachment *attachment, int i)
{
    struct output *output = &attachment->proc->outputs[i];
    uint64_t *credit = &attachment->stream.credit[output->channel];
    if (!sees(attachment, output))
        return false;
    if (attachment->cursor[i] < end_of(attachment, i) && *credit) {
        skip_gap(attachment, i);
        if (attachment->cursor[i] >= end_of(attachment, i))
            return true; /* everything up to its goal was overwritten */
        struct iovec parts[2];
        size_t most = (size_t)smaller(*credit, smaller(MAX_PAYLOAD, end_of(attachment, i) - attachment->cursor[i]));
        int count = ring_view(&output->ring, attachment->cursor[i], most, parts);
        link_send_data(attachment->stream.id, (uint8_t)output->channel, parts, count);
        *credit -= most;
        attachment->cursor[i] += most;
        output->sent = attachment->cursor[i] > output->sent ? attachment->cursor[i] : output->sent;
        proc_fill(output); /* there may be room now for output in the pipe */
        return true;
    }
    /* stdout and stderr end with END: an EOF for each would wake the host twice more for every command. */
    if (output->channel >= FIRST_CHANNEL && !output->open && attachment->cursor[i] >= output->ring.total &&
        !attachment->eof_sent[i]) {
        attachment->eof_sent[i] = true;
        stream_eof(&attachment->stream, output->channel);
    }
    return false;
}

static bool pump(struct stream *stream)
{
    struct attachment *attachment = container_of(stream, struct attachment, stream);
    struct proc *proc = attachment->proc;
    bool sent = false;
    if (proc->state == PROC_STARTING)
        return false;
    for (int k = 0; k < proc->output_count && !sent && !stream->reset; k++) {
        int i = (attachment->turn + k) % proc->output_count;
        sent = send_from(attachment, i);
        if (sent)
            attachment->turn = i + 1;
    }
    if (!sent && is_complete(attachment)) {
        end(attachment);
        return false;
    }
    return sent;
}

static void take_data(struct stream *stream, int channel, const uint8_t *bytes, size_t size)
{
    struct proc *proc = container_of(stream, struct attachment, stream)->proc;
    if (channel == 0 && proc->input_sink.source)
        sink_put(&proc->input_sink, bytes, size);
    else if (channel == 0)
        stream_consumed(stream, 0, size); /* it has no input: as for one that has closed it */
    for (int i = 0; channel && i < proc->output_count; i++)
        if (proc->outputs[i].channel == channel)
            sink_put(&proc->outputs[i].sink, bytes, size);
}

static void take_eof(struct stream *stream, int channel)
{
    struct proc *proc = container_of(stream, struct attachment, stream)->proc;
    if (channel == 0 && proc->input_sink.source)
        sink_eof(&proc->input_sink);
    for (int i = 0; channel && i < proc->output_count; i++)
        if (proc->outputs[i].channel == channel)
            sink_eof(&proc->outputs[i].sink);
}

static void take_control(struct stream *stream, struct fields fields)
{
    proc_control(container_of(stream, struct attachment, stream)->proc, fields);
}

static void take_reset(struct stream *stream)
{
    struct attachment *attachment = container_of(stream, struct attachment, stream);
    if (attachment->spawned && !attachment->proc->keep && attachment->proc->state != PROC_ENDED) {
        proc_kill(attachment->proc);
        /* END follows when the main process is gone; its output until then blocks nothing. */
        for (int i = 0; i < attachment->proc->output_count; i++)
            loop_soon(&attachment->proc->outputs[i].fill_task);
        return;
    }
    if (attachment->spawned && !attachment->proc->keep)
        proc_kill(attachment->proc);
    detach(attachment);
    stream_fail(stream, ECANCELED, NULL);
    proc_trim();
}

static const struct stream_kind attachment_kind = {
    .data = take_data,
    .eof = take_eof,
    .control = take_control,
    .reset = take_reset,
    .pump = pump,
};

/* ---- attaching ---- */

static void say_started(struct attachment *attachment)
{
    uint8_t space[64];
    struct pack fields = PACK(space);
    pack_int(&fields, TAG_EVENT, EVENT_STARTED);
    pack_int(&fields, TAG_PROC, attachment->proc->id);
    pack_int(&fields, TAG_PID, attachment->proc->pid);
    stream_event(&attachment->stream, &fields);
}

static struct attachment *attach(struct proc *proc, uint32_t id, struct fields fields)
{
    struct attachment *attachment = calloc(1, sizeof *attachment);
    if (!attachment)
        return NULL;
    stream_begin(&attachment->stream, &attachment_kind, id, fields);
    attachment->proc = proc;
    for (int i = 0; i < proc->output_count; i++)
        attachment->goal[i] = proc->outputs[i].settled ? proc->outputs[i].ring.total : UINT64_MAX;
    attachment->next = proc->attachments;
    proc->attachments = attachment;
    return attachment;
}

struct attachment *attach_spawner(struct proc *proc, uint32_t id, struct fields fields)
{
    struct attachment *attachment = attach(proc, id, fields);
    if (attachment) {
        attachment->spawned = attachment->lossless = true;
        attachment->quiet = fields_int(fields, TAG_QUIET, 0) == 1;
        set_writer(proc, attachment);
    }
    return attachment;
}

/* The requested offset, or the oldest kept; an offset not yet reached means: new output only. */
static uint64_t first_byte(const struct output *output, struct fields fields)
{
    if (output->channel >= FIRST_CHANNEL)
        return output->sent;
    int64_t asked = fields_int(fields, output->channel == 1 ? TAG_OUT_OFFSET : TAG_ERR_OFFSET, -1);
    if (asked < 0)
        return ring_oldest(&output->ring);
    return smaller((uint64_t)asked, output->ring.total);
}

void proc_open_attach(uint32_t id, struct fields fields)
{
    struct proc *proc = proc_find(fields_int(fields, TAG_PROC, 0));
    bool wants_input = fields_int(fields, TAG_STDIN, 0) == 1;
    if (!proc || proc->state == PROC_STARTING) {
        stream_refuse(id, ESRCH, NULL);
        return;
    }
    if (wants_input && proc->writer) {
        stream_refuse(id, EBUSY, "another stream writes to this process");
        return;
    }
    struct attachment *attachment = attach(proc, id, fields);
    if (!attachment) {
        stream_refuse(id, ENOMEM, NULL);
        return;
    }
    attachment->lossless = fields_int(fields, TAG_LOSSLESS, 0) == 1;
    for (int i = 0; i < proc->output_count; i++)
        attachment->cursor[i] = first_byte(&proc->outputs[i], fields);
    if (wants_input)
        set_writer(proc, attachment);
    if (wants_input && !proc->input_sink.source)
        stream_listen(&attachment->stream, 0);
    say_started(attachment);
    stream_want(&attachment->stream);
}

/* ---- called by proc.c ---- */

void attach_started(struct proc *proc)
{
    for (struct attachment *at = proc->attachments; at; at = at->next) {
        if (!at->quiet)
            say_started(at);
        stream_want(&at->stream);
    }
}

void attach_refused(struct proc *proc, int error, const char *about)
{
    while (proc->attachments) {
        struct attachment *attachment = proc->attachments;
        detach(attachment);
        if (attachment->stream.reset)
            error = ECANCELED;
        stream_fail(&attachment->stream, error, about);
    }
}

void attach_output(struct output *output)
{
    for (struct attachment *at = output->proc->attachments; at; at = at->next)
        if (sees(at, output))
            stream_want(&at->stream);
}

void attach_settled(struct output *output)
{
    for (struct attachment *at = output->proc->attachments; at; at = at->next)
        at->goal[index_of(output)] = output->at_end;
    attach_output(output);
}

void attach_ended(struct proc *proc)
{
    for (struct attachment *at = proc->attachments; at; at = at->next)
        stream_want(&at->stream);
}
