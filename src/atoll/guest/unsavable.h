/* What gVisor cannot save: see unsavable.c. */
#ifndef ATOLL_UNSAVABLE_H
#define ATOLL_UNSAVABLE_H

#include <stdbool.h>

/* Writes a line per process that holds something that cannot be saved; with `queues`, message queues count too. */
int list_unsavable(bool queues);

#endif
