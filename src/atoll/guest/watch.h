/* Watching for changes: see watch.c. */
#ifndef ATOLL_WATCH_H
#define ATOLL_WATCH_H

#include "worker.h"

extern const struct operation operation_watch;

#endif
