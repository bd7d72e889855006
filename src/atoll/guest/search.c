/* Finding names (GLOB) and lines (GREP). They run in workers.
 *
 * Owns which files are searched, how many files are read quickly, and the limit on matches. Not here: the pattern
 * language of globs (match.c) and how trees are walked (walk.c).
 *
 * Most patterns contain a literal that every match must contain. The C library finds a literal at memory speed, and the
 * regular expression, which is slow, only sees lines that contain it.
 */
#define _GNU_SOURCE
#include "search.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "files.h"
#include "match.h"
#include "walk.h"

enum {
    BLOCK = 256 << 10,
    MAX_LINE_BYTES = 1 << 20, /* of a longer line only the beginning is searched */
    BINARY_WITHIN = 8192,
    TEXT_KEPT = 4096,
    CONTEXT_KEPT = 8192,
    MAX_CONTEXT = 100,
    GREP_MEMORY_MB = 192,
    LITERAL_LIMIT = 256,
};

/* How many matches were found, and whether there are more. */
struct tally {
    int64_t found, limit;
    bool truncated;
};

static bool begin_tally(struct job *job, struct tally *tally)
{
    *tally = (struct tally){.limit = fields_int(job->fields, TAG_LIMIT, INT64_MAX)};
    return tally->limit >= 0;
}

/* Counts one match; false when it exceeds the limit. */
static bool count_one(struct tally *tally)
{
    tally->truncated = tally->found == tally->limit;
    tally->found += !tally->truncated;
    return !tally->truncated;
}

static void pack_tally(struct job *job, const struct tally *tally)
{
    pack_int(&job->result, TAG_COUNT, tally->found);
    pack_int(&job->result, TAG_TRUNCATED, tally->truncated);
}

/* ---- GLOB ---- */

struct glob_search {
    struct job *job;
    struct glob glob;
    struct tally tally;
    uint8_t *behind;
};

static enum walk_answer glob_entry(struct walk *walk, const struct walk_entry *entry)
{
    struct glob_search *search = walk->data;
    struct job *job = search->job;
    struct stat status;
    bool is_directory = entry->type == DT_DIR, is_link = entry->type == DT_LNK;
    if (is_link && fstatat(entry->directory, entry->name, &status, 0) == 0)
        is_directory = S_ISDIR(status.st_mode);
    bool matched =
        glob_step(&search->glob, entry->mark, entry->name, is_directory, entry->child_mark, search->behind);
    if (matched && fstatat(entry->directory, entry->name, &status, AT_SYMLINK_NOFOLLOW) == 0) {
        if (!count_one(&search->tally))
            return WALK_STOP;
        job_begin_record(job);
        pack_bytes(&job->record, TAG_NAME, entry->path, entry->path_size);
        files_pack_stat(&job->record, entry->directory, entry->name, &status);
        job_end_record(job);
    }
    if (!is_directory)
        return WALK_ON;
    if (is_link)
        memcpy(entry->child_mark, search->behind, search->glob.set_size);
    if (glob_set_is_empty(&search->glob, entry->child_mark))
        return WALK_ON;
    return is_link ? WALK_THROUGH : WALK_INTO;
}

static int run_glob(struct job *job)
{
    struct glob_search search = {.job = job};
    const char *path = job_path(job, TAG_PATH), *reason;
    bool hidden = fields_int(job->fields, TAG_HIDDEN, 0) == 1;
    if (!begin_tally(job, &search.tally))
        return job_fail(job, EINVAL, "LIMIT");
    int error = glob_compile(&search.glob, job_path(job, TAG_PATTERN), hidden, &reason);
    if (error)
        return job_fail(job, error, reason);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return job_fail(job, errno, path);
    uint8_t *first = malloc(search.glob.set_size);
    search.behind = malloc(search.glob.set_size);
    if (!first || !search.behind)
        return ENOMEM;
    glob_begin(&search.glob, first);
    struct walk walk = {
        .visit = glob_entry, .mark_size = search.glob.set_size, .first_mark = first, .data = &search};
    error = walk_tree(&walk, fd);
    pack_tally(job, &search.tally);
    return job_fail(job, error, walk.stuck_at);
}

const struct operation operation_glob = {.run = run_glob, .gives_output = true};

/* ---- GREP: the pattern ---- */

struct needle {
    regex_t regex;
    bool is_literal; /* the literal is the whole pattern: no regular expression needed */
    char literal[LITERAL_LIMIT];
    size_t literal_size; /* 0: no literal is known that every match contains */
};

struct literal_run {
    char text[LITERAL_LIMIT];
    size_t size;
};

static void end_run(struct needle *needle, struct literal_run *run)
{
    if (run->size > needle->literal_size) {
        memcpy(needle->literal, run->text, run->size);
        needle->literal_size = run->size;
    }
    run->size = 0;
}

/* Skips a bracket expression or a group, whatever its content. */
static const char *skip_bracket(const char *at)
{
    at++;
    if (*at == '^')
        at++;
    if (*at == ']')
        at++;
    while (*at && *at != ']') {
        if (*at == '[' && at[1] && strchr(":.=", at[1])) {
            char end[3] = {at[1], ']', 0};
            const char *close = strstr(at + 2, end);
            at = close ? close + 1 : at;
        }
        at++;
    }
    return *at ? at + 1 : at;
}

static const char *skip_group(const char *at)
{
    int depth = 0;
    do {
        if (*at == '[') {
            at = skip_bracket(at);
            continue;
        }
        depth += *at == '(';
        depth -= *at == ')';
        at += *at == '\\' && at[1] ? 2 : 1;
    } while (*at && depth > 0);
    return at;
}

static bool is_special(char c)
{
    return strchr("\\.[](){}*+?|^$", c) != NULL;
}

/* The longest literal that every match of the expression contains. Anything uncertain ends the current literal; with an
 * alternation anywhere there is none. */
static void find_literal(struct needle *needle, const char *pattern)
{
    struct literal_run run = {.size = 0};
    needle->is_literal = *pattern && strcspn(pattern, "\\.[](){}*+?|^$") == strlen(pattern);
    if (strchr(pattern, '|'))
        return;
    for (const char *at = pattern; *at;) {
        if (*at == '*' || *at == '?' || *at == '{') {
            if (run.size)
                run.size--; /* the repeated character may be absent */
            end_run(needle, &run);
            /* Bounds, and further repetitions of the same element. */
            at = *at == '{' ? at + strcspn(at, "}") : at;
            at += *at != 0;
        } else if (*at == '[' || *at == '(') {
            end_run(needle, &run);
            at = *at == '[' ? skip_bracket(at) : skip_group(at);
        } else if (*at == '\\' && at[1] && is_special(at[1])) {
            run.text[run.size++] = at[1];
            at += 2;
        } else if (is_special(*at)) {
            end_run(needle, &run);
            at += *at == '\\' && at[1] ? 2 : 1;
        } else {
            run.text[run.size++] = *at++;
        }
        if (run.size == sizeof run.text) {
            needle->is_literal = false;
            end_run(needle, &run);
        }
    }
    end_run(needle, &run);
}

static int compile_needle(struct job *job, struct needle *needle)
{
    static char message[256];
    bool ignore_case = fields_int(job->fields, TAG_IGNORE_CASE, 0) == 1;
    const char *pattern = job_path(job, TAG_PATTERN);
    int code = regcomp(&needle->regex, pattern, REG_EXTENDED | REG_NOSUB | REG_NEWLINE | (ignore_case ? REG_ICASE : 0));
    if (code) {
        regerror(code, &needle->regex, message, sizeof message);
        return job_fail(job, code == REG_ESPACE ? ENOMEM : EINVAL, message);
    }
    if (!ignore_case)
        find_literal(needle, pattern);
    return 0;
}

static bool line_matches(const struct needle *needle, char *line, size_t size)
{
    if (needle->is_literal)
        return memmem(line, size, needle->literal, needle->literal_size) != NULL;
#ifdef REG_STARTEND
    regmatch_t span = {.rm_so = 0, .rm_eo = (regoff_t)size};
    return regexec(&needle->regex, line, 0, &span, REG_STARTEND) == 0;
#else
    char saved = line[size]; /* a line is always followed by a byte: its newline, or one reserved for this */
    line[size] = 0;
    bool matched = regexec(&needle->regex, line, 0, NULL, 0) == 0;
    line[size] = saved;
    return matched;
#endif
}

/* ---- GREP: the files ---- */

struct line_search {
    struct job *job;
    struct needle needle;
    struct glob include;
    bool has_include, by_path, hidden; /* by_path: INCLUDE has a slash, and is matched against the path */
    uint8_t *unused;
    struct tally tally;
    int64_t context; /* lines to show before and after each match */
    char *buffer; /* MAX_LINE_BYTES, and one more byte */
};

/* A file being searched. */
struct reading {
    const char *name;
    size_t name_size;
    int fd;
    off_t offset; /* where in the file the buffer begins */
    int64_t line; /* the number of the line that begins at the front of the buffer */
    size_t size;  /* of what is in the buffer */
    bool skipping; /* in the rest of a line that was too long */
};

/* The lines before a match, read again: the buffer may not have them any more. */
static void pack_before(struct line_search *search, const struct reading *reading, off_t line)
{
    char text[CONTEXT_KEPT];
    off_t start = line > CONTEXT_KEPT ? line - CONTEXT_KEPT : 0;
    ssize_t size = pread(reading->fd, text, (size_t)(line - start), start);
    if (size <= 0 || size != line - start)
        return;
    size_t begin = (size_t)size;
    for (int64_t lines = 0; lines < search->context && begin > 0; lines++) {
        char *newline = memrchr(text, '\n', begin - 1);
        begin = newline ? (size_t)(newline + 1 - text) : 0;
    }
    pack_bytes(&search->job->record, TAG_BEFORE, text + begin, (size_t)size - 1 - begin);
}

static void pack_after(struct line_search *search, const struct reading *reading, off_t following)
{
    char text[CONTEXT_KEPT];
    ssize_t size = pread(reading->fd, text, sizeof text, following);
    size_t end = 0;
    if (size <= 0)
        return;
    for (int64_t lines = 0; lines < search->context && end < (size_t)size; lines++) {
        char *newline = memchr(text + end, '\n', (size_t)size - end);
        end = newline ? (size_t)(newline + 1 - text) : (size_t)size;
    }
    pack_bytes(&search->job->record, TAG_AFTER, text, end - (text[end - 1] == '\n'));
}

/* `at` is the offset of the line in the buffer. */
static bool report_line(struct line_search *search, const struct reading *reading, int64_t number, size_t at,
                        size_t size, bool has_end)
{
    const char *text = search->buffer + at;
    struct job *job = search->job;
    if (!count_one(&search->tally))
        return false;
    job_begin_record(job);
    pack_bytes(&job->record, TAG_NAME, reading->name, reading->name_size);
    pack_int(&job->record, TAG_LINE, number);
    pack_bytes(&job->record, TAG_TEXT, text, size < TEXT_KEPT ? size : TEXT_KEPT);
    off_t line = reading->offset + (off_t)at;
    if (search->context && line > 0)
        pack_before(search, reading, line);
    if (search->context && has_end)
        pack_after(search, reading, line + (off_t)size + 1);
    job_end_record(job);
    return true;
}

static int64_t count_newlines(const char *from, const char *to)
{
    int64_t count = 0;
    while (from < to && (from = memchr(from, '\n', (size_t)(to - from)))) {
        count++;
        from++;
    }
    return count;
}

/* Searches whole lines: everything up to `size` ends with a newline, or with the file. False when enough was found. */
static bool search_lines(struct line_search *search, struct reading *reading, size_t size)
{
    const struct needle *needle = &search->needle;
    char *at = search->buffer, *end = at + size, *counted = at;
    while (at < end) {
        char *line = at;
        if (needle->literal_size) {
            char *hit = memmem(at, (size_t)(end - at), needle->literal, needle->literal_size);
            if (!hit)
                break;
            char *before = memrchr(at, '\n', (size_t)(hit - at));
            line = before ? before + 1 : at;
        }
        char *newline = memchr(line, '\n', (size_t)(end - line));
        size_t length = (size_t)((newline ? newline : end) - line);
        if (line_matches(needle, line, length)) {
            reading->line += count_newlines(counted, line);
            counted = line;
            if (!report_line(search, reading, reading->line, (size_t)(line - search->buffer), length, newline != NULL))
                return false;
        }
        at = newline ? newline + 1 : end;
    }
    reading->line += count_newlines(counted, end);
    return true;
}

/* Searches the whole lines in the buffer; the beginning of a line stays for the next block. */
static bool search_buffer(struct line_search *search, struct reading *reading, bool at_end)
{
    char *newline = memrchr(search->buffer, '\n', reading->size);
    size_t whole = at_end ? reading->size : newline ? (size_t)(newline + 1 - search->buffer) : 0;
    if (!whole && reading->size == MAX_LINE_BYTES)
        whole = reading->size;
    bool cut = whole && !at_end && !newline;
    if (whole && !search_lines(search, reading, whole))
        return false;
    memmove(search->buffer, search->buffer + whole, reading->size - whole);
    reading->size -= whole;
    reading->offset += (off_t)whole;
    reading->skipping |= cut;
    return true;
}

/* Drops the rest of a line of which the beginning was already searched. */
static void skip_rest(struct line_search *search, struct reading *reading)
{
    if (!reading->skipping)
        return;
    char *newline = memchr(search->buffer, '\n', reading->size);
    size_t rest = newline ? (size_t)(newline + 1 - search->buffer) : reading->size;
    memmove(search->buffer, search->buffer + rest, reading->size - rest);
    reading->size -= rest;
    reading->offset += (off_t)rest;
    reading->line += newline != NULL;
    reading->skipping = !newline;
}

/* False when enough was found. A file that cannot be read is skipped. */
static bool search_file(struct line_search *search, struct reading *reading)
{
    bool first = true;
    reading->line = 1;
    for (;;) {
        size_t room = MAX_LINE_BYTES - reading->size;
        ssize_t count = read(reading->fd, search->buffer + reading->size, room < BLOCK ? room : BLOCK);
        if (count < 0 && errno == EINTR)
            continue;
        if (count <= 0)
            return !reading->size || search_buffer(search, reading, true);
        if (first && memchr(search->buffer, 0, count < BINARY_WITHIN ? (size_t)count : BINARY_WITHIN))
            return true;
        first = false;
        reading->size += (size_t)count;
        skip_rest(search, reading);
        if (!search_buffer(search, reading, false))
            return false;
    }
}

static bool name_is_included(const struct line_search *search, const char *name)
{
    for (int i = 0; i < search->include.count; i++)
        if (match_name(search->include.components[i].pattern, search->include.components[i].size, name))
            return true;
    return !search->has_include;
}

static enum walk_answer grep_entry(struct walk *walk, const struct walk_entry *entry)
{
    struct line_search *search = walk->data;
    struct stat status;
    bool is_directory = entry->type == DT_DIR;
    if (entry->name[0] == '.' && !search->hidden)
        return WALK_ON;
    bool included = search->by_path
        ? glob_step(&search->include, entry->mark, entry->name, is_directory, entry->child_mark, search->unused)
        : name_is_included(search, entry->name);
    if (is_directory)
        return search->by_path && glob_set_is_empty(&search->include, entry->child_mark) ? WALK_ON : WALK_INTO;
    if (entry->type != DT_REG || !included)
        return WALK_ON;
    int fd = files_open_regular(entry->directory, entry->name, O_RDONLY | O_NOFOLLOW, 0, &status);
    if (fd < 0)
        return WALK_ON;
    struct reading reading = {.name = entry->path, .name_size = entry->path_size, .fd = fd};
    bool more = search_file(search, &reading);
    close(fd);
    return more ? WALK_ON : WALK_STOP;
}

static int search_path(struct line_search *search, const char *path)
{
    struct stat status;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd >= 0) {
        struct walk walk = {.visit = grep_entry, .data = search};
        if (search->by_path) {
            uint8_t *first = malloc(search->include.set_size);
            search->unused = malloc(search->include.set_size);
            if (!first || !search->unused)
                return ENOMEM;
            glob_begin(&search->include, first);
            walk.mark_size = search->include.set_size;
            walk.first_mark = first;
        }
        return walk_tree(&walk, fd);
    }
    if (errno != ENOTDIR)
        return errno;
    fd = files_open_regular(AT_FDCWD, path, O_RDONLY, 0, &status);
    if (fd < 0)
        return errno;
    struct reading reading = {.name = "", .fd = fd};
    search_file(search, &reading);
    return 0;
}

static int run_grep(struct job *job)
{
    struct line_search *search = calloc(1, sizeof *search);
    const char *path = job_path(job, TAG_PATH), *reason;
    char *include = fields_string(job->fields, TAG_INCLUDE);
    if (!search || !(search->buffer = malloc(MAX_LINE_BYTES + 1)))
        return ENOMEM;
    search->job = job;
    search->hidden = fields_int(job->fields, TAG_HIDDEN, 0) == 1;
    search->has_include = include != NULL;
    search->by_path = include && strchr(include, '/');
    search->context = fields_int(job->fields, TAG_CONTEXT, 0);
    if (search->context < 0 || search->context > MAX_CONTEXT)
        return job_fail(job, EINVAL, "CONTEXT");
    if (!begin_tally(job, &search->tally))
        return job_fail(job, EINVAL, "LIMIT");
    int error = include ? glob_compile(&search->include, include, true, &reason) : 0;
    if (error)
        return job_fail(job, error, reason);
    if ((error = compile_needle(job, &search->needle)))
        return error;
    error = search_path(search, path);
    pack_tally(job, &search->tally);
    if (search->context)
        pack_int(&job->result, TAG_CONTEXT, search->context);
    return job_fail(job, error, path);
}

const struct operation operation_grep = {.run = run_grep, .gives_output = true, .memory_mb = GREP_MEMORY_MB};
