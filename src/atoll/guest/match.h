/* Glob patterns: see match.c. */
#ifndef ATOLL_MATCH_H
#define ATOLL_MATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One component of one alternative of a pattern. The components of an alternative are consecutive. */
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
    bool hidden;     /* wildcards match a leading dot */
};

/* 0 or an errno, with a reason. Its memory lives as long as the worker, or until glob_free(). */
int glob_compile(struct glob *glob, const char *pattern, bool hidden, const char **reason);
void glob_free(struct glob *glob);

/* A set holds the components that the next name may match. glob_begin() gives the set of the directory where the search
 * begins. */
void glob_begin(const struct glob *glob, uint8_t *set);

/* One name in a directory with this set. True when it matches. `below` is the set for its content if it is a directory,
 * `behind` for its content if it is a symlink to one: "**" does not follow symlinks. */
bool glob_step(const struct glob *glob, const uint8_t *set, const char *name, bool is_directory, uint8_t *below,
               uint8_t *behind);

bool glob_set_is_empty(const struct glob *glob, const uint8_t *set);

/* Matches a whole name against one component. */
bool match_name(const char *pattern, size_t size, const char *name);

#endif
