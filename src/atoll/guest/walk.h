/* Walking directory trees: see walk.c. */
#ifndef ATOLL_WALK_H
#define ATOLL_WALK_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

enum walk_answer {
    WALK_ON,      /* to the next entry */
    WALK_INTO,    /* into this directory (a symlink to one is skipped) */
    WALK_THROUGH, /* into this directory, or through this symlink into one */
    WALK_STOP,
};

/* An entry as a visitor sees it. */
struct walk_entry {
    int directory;     /* the open directory that holds it */
    const char *name;
    const char *path;  /* relative to the start of the walk */
    size_t path_size;
    unsigned char type; /* DT_…, never DT_UNKNOWN */
    void *mark;        /* the visitor's data for this directory */
    void *child_mark;  /* the visitor may set it for the entry, before WALK_INTO */
};

struct walk {
    enum walk_answer (*visit)(struct walk *walk, const struct walk_entry *entry);
    /* After everything in a directory; may be NULL. 0 or an errno, which ends the walk. */
    int (*leave)(struct walk *walk, int directory, const char *name);
    /* A directory could not be entered: 0 to skip it, or the errno that ends the walk; may be NULL. */
    int (*blocked)(struct walk *walk, const struct walk_entry *entry, int error);
    size_t mark_size;
    const void *first_mark;
    void *data;
    const char *stuck_at; /* after an error: the path */
};

/* Opens a directory, never through a link. -1 and errno. */
int walk_open(int at, const char *name);

/* Visits everything below the directory, in byte order. 0 or an errno. */
int walk_tree(struct walk *walk, int directory);

unsigned char walk_type(mode_t mode);

#endif
