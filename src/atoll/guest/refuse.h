/* The answer to what may not leave the sandbox: see refuse.c. */
#ifndef ATOLL_REFUSE_H
#define ATOLL_REFUSE_H

#include <stdbool.h>

/* The port of the egress proxy, from the command line. Listening begins with refuse_resume(). */
bool refuse_set_port(const char *text);

/* The host is about to listen on this port: if it is the proxy's, leave it to the host. */
void refuse_yield(int port);

/* The host no longer listens on this port: if it is the proxy's, answer there again. 0: whichever it is. */
void refuse_resume(int port);

#endif
