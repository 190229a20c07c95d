/* Sockets with time limits. Internal. */
#ifndef MTP_COMM_NET_H
#define MTP_COMM_NET_H

#include <stdint.h>
#include <sys/socket.h>

#include "base/error.h"

enum { MTP__NET_NAME = 128 };

/* Milliseconds of a clock that never jumps. */
int64_t mtp__net_now(void);
/* Now and `seconds` more. */
int64_t mtp__net_deadline(double seconds);
/* Split "host:port" or "[v6]:port". MTP_E_CONFIG. */
mtp_status mtp__net_split(const char *endpoint, char host[MTP__NET_NAME], int *port);
/* A non-blocking listening socket; `port` 0 takes a free one, and *bound says which it is. */
mtp_status mtp__net_listen(const char *host, int port, int *fd, int *bound);
/* One attempt to connect, until `deadline`. The socket is non-blocking. MTP_E_IO. */
mtp_status mtp__net_connect(const char *host, int port, int64_t deadline, int *fd);
/* "127.0.0.1:1234" for messages; without the port when `port` is false. */
void mtp__net_name(const struct sockaddr_storage *address, int port, char name[MTP__NET_NAME]);
/* Send or receive exactly `size` bytes of a non-blocking socket before `deadline`. MTP_E_IO. */
mtp_status mtp__net_send(int fd, const void *data, size_t size, int64_t deadline);
mtp_status mtp__net_receive(int fd, void *data, size_t size, int64_t deadline);

#endif
