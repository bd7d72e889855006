/* Glob patterns: braces, components, characters.
 *
 * Owns the pattern language of PROTOCOL.md. Not here: file systems (search.c). Pure, and fuzzed unchanged.
 *
 * Braces are expanded first, each alternative is split at its slashes, and all alternatives are matched together: a set
 * of components holds what the next name may match. So a tree is walked once, in order, whatever the pattern, and no
 * match is found twice. Characters are UTF-8 where the bytes are valid, else single bytes; matching never recurses.
 */
#define _GNU_SOURCE
#include "match.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PATTERN_BYTES = 4096, MAX_ALTERNATIVES = 256, MAX_COMPONENTS = 4096 };

/* ---- one name ---- */

/* The next character and its size in bytes; a byte that begins no valid sequence counts as a character of its own,
 * equal to no other. */
static uint32_t character(const char *at, const char *end, size_t *size)
{
    const unsigned char *bytes = (const unsigned char *)at;
    size_t left = (size_t)(end - at), need = 1;
    uint32_t value = bytes[0];
    if (value >= 0xc2 && value <= 0xdf)
        need = 2, value &= 0x1f;
    else if (value >= 0xe0 && value <= 0xef)
        need = 3, value &= 0x0f;
    else if (value >= 0xf0 && value <= 0xf4)
        need = 4, value &= 0x07;
    *size = 1;
    if (need == 1)
        return value < 0x80 ? value : 0x110000 + value;
    if (need > left)
        return 0x110000 + bytes[0];
    for (size_t i = 1; i < need; i++) {
        if ((bytes[i] & 0xc0) != 0x80)
            return 0x110000 + bytes[0];
        value = value << 6 | (bytes[i] & 0x3f);
    }
    *size = need;
    return value;
}

static bool in_class(const char *name, size_t size, uint32_t c)
{
    static const struct {
        const char *name;
        int (*test)(int c);
    } classes[] = {
        {"alpha", isalpha}, {"digit", isdigit}, {"alnum", isalnum}, {"upper", isupper}, {"lower", islower},
        {"space", isspace}, {"blank", isblank}, {"punct", ispunct}, {"xdigit", isxdigit}, {"cntrl", iscntrl},
        {"graph", isgraph}, {"print", isprint},
    };
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        if (strlen(classes[i].name) == size && !memcmp(classes[i].name, name, size))
            return c < 0x80 && classes[i].test((int)c);
    return false;
}

/* The end of the bracket that opens before `at`, or NULL when it never closes and is an ordinary character. */
static const char *bracket_end(const char *at, const char *end)
{
    if (at < end && (*at == '!' || *at == '^'))
        at++;
    if (at < end && *at == ']')
        at++;
    while (at < end && *at != ']') {
        if (*at == '[' && at + 1 < end && at[1] == ':') {
            const char *close = memmem(at + 2, (size_t)(end - at - 2), ":]", 2);
            at = close ? close + 2 : at + 1;
        } else {
            at += *at == '\\' && at + 1 < end ? 2 : 1;
        }
    }
    return at < end ? at : NULL;
}

static uint32_t bracket_character(const char **at, const char *end)
{
    size_t size;
    if (**at == '\\' && *at + 1 < end)
        ++*at;
    uint32_t c = character(*at, end, &size);
    *at += size;
    return c;
}

/* Matches the content of a bracket expression against one character. */
static bool in_bracket(const char *at, const char *end, uint32_t c)
{
    bool negated = at < end && (*at == '!' || *at == '^'), found = false;
    at += negated;
    while (at < end) {
        const char *close;
        if (*at == '[' && at + 1 < end && at[1] == ':' && (close = memmem(at + 2, (size_t)(end - at - 2), ":]", 2))) {
            found |= in_class(at + 2, (size_t)(close - at - 2), c);
            at = close + 2;
            continue;
        }
        uint32_t low = bracket_character(&at, end), high = low;
        if (at + 1 < end && *at == '-') {
            at++;
            high = bracket_character(&at, end);
        }
        found |= low <= c && c <= high;
    }
    return found != negated;
}

/* Matches one element of the pattern (not a star) against one character. Advances both on a match. */
static bool match_one(const char **pattern, const char *pattern_end, const char **name, const char *name_end)
{
    size_t name_size, size;
    const char *at = *pattern, *close;
    uint32_t c = character(*name, name_end, &name_size);
    if (*at == '?') {
        at++;
    } else if (*at == '[' && (close = bracket_end(at + 1, pattern_end))) {
        if (!in_bracket(at + 1, close, c))
            return false;
        at = close + 1;
    } else {
        if (*at == '\\' && at + 1 < pattern_end)
            at++;
        if (character(at, pattern_end, &size) != c)
            return false;
        at += size;
    }
    *pattern = at;
    *name += name_size;
    return true;
}

bool match_name(const char *pattern, size_t size, const char *name)
{
    const char *pattern_end = pattern + size, *name_end = name + strlen(name);
    const char *after_star = NULL, *star_name = NULL;
    /* Backtracking to the last star suffices: anything more that an earlier star could match, the last can match
     * too. */
    while (name < name_end) {
        if (pattern < pattern_end && *pattern == '*') {
            after_star = ++pattern;
            star_name = name;
        } else if (pattern < pattern_end && match_one(&pattern, pattern_end, &name, name_end)) {
            continue;
        } else if (after_star) {
            size_t step;
            character(star_name, name_end, &step);
            star_name += step;
            pattern = after_star;
            name = star_name;
        } else {
            return false;
        }
    }
    while (pattern < pattern_end && *pattern == '*')
        pattern++;
    return pattern == pattern_end;
}

/* ---- braces ---- */

struct alternatives {
    char *texts[MAX_ALTERNATIVES];
    int count;
};

/* The first brace with a matching end and a comma of its own; other braces are ordinary characters. */
static bool find_braces(const char *text, const char **open, const char **close)
{
    for (const char *start = text; *start; start++) {
        if (*start == '\\' && start[1]) {
            start++;
            continue;
        }
        if (*start != '{')
            continue;
        int depth = 0;
        bool comma = false;
        for (const char *at = start; *at; at++) {
            if (*at == '\\' && at[1])
                at++;
            else if (*at == '{')
                depth++;
            else if (*at == ',' && depth == 1)
                comma = true;
            else if (*at == '}' && --depth == 0) {
                *open = start;
                *close = at;
                if (comma)
                    return true;
                break;
            }
        }
    }
    return false;
}

static char *join(const char *text, size_t head, const char *middle, size_t size, const char *tail)
{
    size_t tail_size = strlen(tail);
    char *joined = malloc(head + size + tail_size + 1);
    if (joined) {
        memcpy(joined, text, head);
        memcpy(joined + head, middle, size);
        memcpy(joined + head + size, tail, tail_size + 1);
    }
    return joined;
}

/* Replaces a brace by each of its parts. 0 or an errno. */
static int split_braces(struct alternatives *todo, const char *text, const char *open, const char *close)
{
    const char *part = open + 1;
    int depth = 0;
    for (const char *at = part; at <= close; at++) {
        if (*at == '\\' && at < close) {
            at++;
            continue;
        }
        depth += *at == '{';
        depth -= *at == '}' && at < close;
        if ((*at == ',' && depth == 0) || at == close) {
            if (todo->count == MAX_ALTERNATIVES)
                return E2BIG;
            char *joined = join(text, (size_t)(open - text), part, (size_t)(at - part), close + 1);
            if (!joined)
                return ENOMEM;
            todo->texts[todo->count++] = joined;
            part = at + 1;
        }
    }
    return 0;
}

static int expand(const char *pattern, struct alternatives *done)
{
    struct alternatives *todo = calloc(1, sizeof *todo);
    char *first = strdup(pattern);
    int error = todo && first ? 0 : ENOMEM;
    done->count = 0;
    if (!error)
        todo->texts[todo->count++] = first;
    while (!error && todo->count) {
        char *text = todo->texts[--todo->count];
        const char *open, *close;
        if (find_braces(text, &open, &close)) {
            error = split_braces(todo, text, open, close);
            free(text);
        } else if (done->count == MAX_ALTERNATIVES) {
            free(text);
            error = E2BIG;
        } else {
            done->texts[done->count++] = text;
        }
    }
    while (todo && todo->count)
        free(todo->texts[--todo->count]);
    free(todo);
    return error;
}

/* ---- components ---- */

static int add_component(struct glob *glob, const char *pattern, size_t size)
{
    if (glob->count == MAX_COMPONENTS)
        return E2BIG;
    struct component *grown = realloc(glob->components, (size_t)(glob->count + 1) * sizeof *grown);
    char *copy = malloc(size + 1);
    if (grown)
        glob->components = grown;
    if (!grown || !copy) {
        free(copy);
        return ENOMEM;
    }
    memcpy(copy, pattern, size);
    copy[size] = 0;
    glob->components[glob->count++] = (struct component){
        .pattern = copy, .size = size, .deep = size == 2 && !memcmp(copy, "**", 2)};
    return 0;
}

static int add_alternative(struct glob *glob, const char *text, const char **reason)
{
    int first = glob->count;
    if (*text == '/') {
        *reason = "the pattern must be relative";
        return EINVAL;
    }
    while (*text) {
        size_t size = strcspn(text, "/");
        bool is_dot = size == 0 || (size == 1 && *text == '.');
        if (size == 2 && !memcmp(text, "..", 2)) {
            *reason = "the pattern must not contain ..";
            return EINVAL;
        }
        int error = is_dot ? 0 : add_component(glob, text, size);
        if (error)
            return error;
        text += size;
        if (*text == '/')
            text++;
        if (!*text && text[-1] == '/' && glob->count > first)
            glob->components[glob->count - 1].directory_only = true;
    }
    if (glob->count > first)
        glob->components[glob->count - 1].last = true;
    return 0;
}

int glob_compile(struct glob *glob, const char *pattern, bool hidden, const char **reason)
{
    *glob = (struct glob){.hidden = hidden};
    *reason = "bad pattern";
    if (strlen(pattern) > MAX_PATTERN_BYTES) {
        *reason = "the pattern is too long";
        return EINVAL;
    }
    struct alternatives *alternatives = malloc(sizeof *alternatives);
    if (!alternatives)
        return ENOMEM;
    int error = expand(pattern, alternatives);
    for (int i = 0; i < alternatives->count; i++) {
        if (!error)
            error = add_alternative(glob, alternatives->texts[i], reason);
        free(alternatives->texts[i]);
    }
    free(alternatives);
    if (error == E2BIG) {
        *reason = "the pattern has too many alternatives";
        error = EINVAL;
    }
    if (!error && !glob->count) {
        *reason = "the pattern is empty";
        error = EINVAL;
    }
    glob->set_size = ((size_t)glob->count + 7) / 8;
    if (error)
        glob_free(glob);
    return error;
}

void glob_free(struct glob *glob)
{
    for (int i = 0; i < glob->count; i++)
        free((char *)glob->components[i].pattern);
    free(glob->components);
    glob->components = NULL;
    glob->count = 0;
}

/* ---- sets ---- */

static bool has(const uint8_t *set, int i)
{
    return set[i / 8] >> (i % 8) & 1;
}

/* "**" may match nothing, so the component after it is added too. */
static void add(const struct glob *glob, uint8_t *set, int i)
{
    for (;; i++) {
        set[i / 8] |= (uint8_t)(1 << (i % 8));
        if (!glob->components[i].deep || glob->components[i].last)
            return;
    }
}

void glob_begin(const struct glob *glob, uint8_t *set)
{
    memset(set, 0, glob->set_size);
    for (int i = 0; i < glob->count; i++)
        if (i == 0 || glob->components[i - 1].last)
            add(glob, set, i);
}

bool glob_set_is_empty(const struct glob *glob, const uint8_t *set)
{
    for (size_t i = 0; i < glob->set_size; i++)
        if (set[i])
            return false;
    return true;
}

static bool is_visible(const struct glob *glob, const struct component *component, const char *name)
{
    if (name[0] != '.' || glob->hidden)
        return true;
    const char *pattern = component->pattern;
    return !component->deep && (pattern[0] == '.' || (pattern[0] == '\\' && pattern[1] == '.'));
}

bool glob_step(const struct glob *glob, const uint8_t *set, const char *name, bool is_directory, uint8_t *below,
               uint8_t *behind)
{
    bool matched = false;
    memset(below, 0, glob->set_size);
    memset(behind, 0, glob->set_size);
    for (int i = 0; i < glob->count; i++) {
        const struct component *component = &glob->components[i];
        if (!has(set, i) || !is_visible(glob, component, name))
            continue;
        if (!component->deep && !match_name(component->pattern, component->size, name))
            continue;
        if (component->last)
            matched |= is_directory || !component->directory_only;
        if (component->deep) {
            add(glob, below, i);
        } else if (!component->last) {
            add(glob, below, i + 1);
            add(glob, behind, i + 1);
        }
    }
    return matched;
}
