/* Connections on loopback: see net.c. */
#ifndef ATOLL_NET_H
#define ATOLL_NET_H

#include "frame.h"

void net_open_dial(uint32_t id, struct fields fields);
void net_open_listen(uint32_t id, struct fields fields);
void net_open_accept(uint32_t id, struct fields fields);

#endif
