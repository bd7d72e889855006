/* Glob patterns: see match.c. */
#ifndef ATOLL_MATCH_H
#define ATOLL_MATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One component of one alternative of a pattern. Those of an alternative follow each other. */
struct component {
    const char *pattern;
    size_t size;
    bool deep;           /* "**": any number of directories */
    bool last;           /* of its alternative */
    bool directory_only; /* the pattern ended with a slash */
};

struct glob {
    struct component *components;
    int count;
    size_t set_size; /* bytes of a set of components */
    bool hidden;     /* a leading dot needs no dot */
};

/* 0 or an errno, with a reason. What it allocates lives as long as the worker (or is freed by glob_free). */
int glob_compile(struct glob *glob, const char *pattern, bool hidden, const char **reason);
void glob_free(struct glob *glob);

/* Sets say which components the next name may match. The first is that of the directory where the search begins. */
void glob_begin(const struct glob *glob, uint8_t *set);

/* One name in a directory with this set. True when it is a match. `below` is the set for the inside of it should it be
 * a directory, `behind` that for the inside should it be a link to one: "**" does not go through links. */
bool glob_step(const struct glob *glob, const uint8_t *set, const char *name, bool is_directory, uint8_t *below,
               uint8_t *behind);

bool glob_set_is_empty(const struct glob *glob, const uint8_t *set);

/* A whole name against one component. */
bool match_name(const char *pattern, size_t size, const char *name);

#endif
