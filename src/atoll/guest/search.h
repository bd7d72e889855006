/* Finding names and lines: see search.c. */
#ifndef ATOLL_SEARCH_H
#define ATOLL_SEARCH_H

#include "worker.h"

extern const struct operation operation_glob, operation_grep;

#endif
