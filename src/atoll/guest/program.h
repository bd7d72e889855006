/* How a program is started: see program.c. */
#ifndef ATOLL_PROGRAM_H
#define ATOLL_PROGRAM_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "supervisor.h"
#include "users.h"

enum { EXIT_NOT_FOUND = 127, EXIT_CANNOT_RUN = 126 };

/* What a program that `sudo` starts has from who asked for it; a job has none of it. */
struct inherited {
    int directory; /* a descriptor of the working directory; -1: the home of the user */
    mode_t mask;
    uint64_t ignored; /* bit n - 1: signal n stays ignored */
    bool terminal;    /* its stdin is to be its controlling terminal */
};

/* The program to start, prepared before the fork so that the child only makes system calls. */
struct program {
    const struct spawn_job *job;
    const struct inherited *inherited; /* NULL: the program of a job */
    struct account account;
    const char *file; /* what is executed: a path, or a name that is looked up in `path` */
    char **argv;      /* with `inherited`, there is room for one more before it */
    char **env;
    char *line; /* the shell's command line; NULL: no shell */
    const char *path; /* "PATH=…" */
    char *cwd;
    int terminal; /* the slave side */
    bool merge; /* stderr is stdout */
    struct rlimit nofile;
    volatile int error; /* an errno of the child before execve() */
    const char *volatile about;
};

/* Prepares the program that a job asks for. 0, or an errno and its subject. */
int program_prepare(struct program *program, const struct spawn_job *job, const char **about);

/* Starts it. Its pid, or 0, an errno and its subject. */
pid_t program_start(struct program *program, int *error, const char **about);

/* Releases what program_prepare() allocated, and the program's ends of all channels but stdout and stderr. */
void program_forget(struct program *program);

void program_close(const int *ends, size_t count);

extern const char program_too_few_descriptors[];
extern const char program_path[]; /* PATH, where an environment does not say it */

#endif
