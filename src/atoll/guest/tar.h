/* Archives: see tar_out.c and tar_in.c. */
#ifndef ATOLL_TAR_H
#define ATOLL_TAR_H

#include "worker.h"

extern const struct operation operation_tar_out, operation_tar_in;

#endif
