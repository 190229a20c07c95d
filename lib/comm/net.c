#include "comm/net.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int64_t mtp__net_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int64_t mtp__net_deadline(double seconds)
{
    return mtp__net_now() + (int64_t)(seconds * 1000);
}

mtp_status mtp__net_split(const char *endpoint, char host[MTP__NET_NAME], int *port)
{
    const char *start = endpoint, *colon = strrchr(endpoint, ':'), *end = colon;
    char *rest = NULL;
    const long number = colon ? strtol(colon + 1, &rest, 10) : 0;
    if (!colon || colon[1] < '0' || colon[1] > '9' || *rest || number < 1 || number > 65535)
        return MTP_FAIL(MTP_E_CONFIG, "'%s' is no endpoint; write HOST:PORT with a port from 1 to 65535", endpoint);
    if (*start == '[' && end > start && end[-1] == ']') {
        start++;
        end--;
    } else if (memchr(start, ':', (size_t)(end - start))) {
        return MTP_FAIL(MTP_E_CONFIG, "'%s' is no endpoint; an IPv6 address stands in brackets: [::1]:29500", endpoint);
    }
    if (end == start || end - start >= MTP__NET_NAME)
        return MTP_FAIL(MTP_E_CONFIG, "'%s' is no endpoint; write HOST:PORT", endpoint);
    memcpy(host, start, (size_t)(end - start));
    host[end - start] = '\0';
    *port = (int)number;
    return MTP_OK;
}

static mtp_status look_up(const char *host, int port, int flags, struct addrinfo **found)
{
    char service[16];
    const struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = flags};
    snprintf(service, sizeof service, "%d", port);
    const int code = getaddrinfo(host, service, &hints, found);
    if (code != 0) return MTP_FAIL_FOREIGN(MTP_E_IO, code, "the address of '%s': %s", host, gai_strerror(code));
    return MTP_OK;
}

static int open_socket(const struct addrinfo *address)
{
    const int one = 1;
    const int fd =
        socket(address->ai_family, address->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address->ai_protocol);
    if (fd >= 0) (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static int port_of(const struct sockaddr_storage *address)
{
    if (address->ss_family == AF_INET) return ntohs(((const struct sockaddr_in *)address)->sin_port);
    if (address->ss_family == AF_INET6) return ntohs(((const struct sockaddr_in6 *)address)->sin6_port);
    return 0;
}

mtp_status mtp__net_listen(const char *host, int port, int *fd, int *bound)
{
    struct addrinfo *found;
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    const int one = 1;
    MTP_TRY(look_up(host, port, AI_PASSIVE, &found));
    int error = 0;
    *fd = -1;
    for (const struct addrinfo *try = found; try && *fd < 0; try = try->ai_next) {
        *fd = open_socket(try);
        if (*fd < 0) {
            error = errno;
            continue;
        }
        (void)setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        if (bind(*fd, try->ai_addr, try->ai_addrlen) == 0 && listen(*fd, 128) == 0 &&
            getsockname(*fd, (struct sockaddr *)&address, &length) == 0)
            break;
        error = errno;
        close(*fd);
        *fd = -1;
    }
    freeaddrinfo(found);
    if (*fd < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, error, "cannot listen on %s:%d: %s", host, port, strerror(error));
    *bound = port_of(&address);
    return MTP_OK;
}

/* 0, or an errno. */
static int wait_for(int fd, short events, int64_t deadline)
{
    for (;;) {
        const int64_t left = deadline - mtp__net_now();
        struct pollfd poller = {.fd = fd, .events = events};
        if (left <= 0) return ETIMEDOUT;
        const int ready = poll(&poller, 1, left > 60000 ? 60000 : (int)left);
        if (ready > 0) return 0;
        if (ready < 0 && errno != EINTR) return errno;
    }
}

static int finish_connect(int fd, const struct addrinfo *address, int64_t deadline)
{
    int error = 0;
    socklen_t length = sizeof error;
    if (connect(fd, address->ai_addr, address->ai_addrlen) == 0) return 0;
    if (errno != EINPROGRESS && errno != EINTR) return errno;
    const int waited = wait_for(fd, POLLOUT, deadline);
    if (waited != 0) return waited;
    return getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

mtp_status mtp__net_connect(const char *host, int port, int64_t deadline, int *fd)
{
    struct addrinfo *found;
    int error = 0;
    MTP_TRY(look_up(host, port, 0, &found));
    *fd = -1;
    for (const struct addrinfo *try = found; try && *fd < 0; try = try->ai_next) {
        *fd = open_socket(try);
        error = *fd < 0 ? errno : finish_connect(*fd, try, deadline);
        if (error == 0 || *fd < 0) continue;
        close(*fd);
        *fd = -1;
    }
    freeaddrinfo(found);
    if (*fd < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, error, "cannot connect to %s:%d: %s", host, port, strerror(error));
    return MTP_OK;
}

void mtp__net_name(const struct sockaddr_storage *address, int port, char name[MTP__NET_NAME])
{
    char host[INET6_ADDRSTRLEN + 16];
    if (getnameinfo((const struct sockaddr *)address, sizeof *address, host, sizeof host, NULL, 0, NI_NUMERICHOST) != 0)
        snprintf(host, sizeof host, "?");
    if (port)
        snprintf(name, MTP__NET_NAME, strchr(host, ':') ? "[%s]:%d" : "%s:%d", host, port_of(address));
    else
        snprintf(name, MTP__NET_NAME, "%s", host);
}

static mtp_status broken(int error)
{
    if (error == ETIMEDOUT) return MTP_FAIL_FOREIGN(MTP_E_IO, error, "no answer within the time limit");
    return MTP_FAIL_FOREIGN(MTP_E_IO, error, "the connection broke: %s", strerror(error));
}

mtp_status mtp__net_send(int fd, const void *data, size_t size, int64_t deadline)
{
    const char *next = data;
    while (size > 0) {
        const ssize_t sent = send(fd, next, size, MSG_NOSIGNAL);
        if (sent >= 0) {
            next += sent;
            size -= (size_t)sent;
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const int waited = wait_for(fd, POLLOUT, deadline);
            if (waited != 0) return broken(waited);
        } else if (errno != EINTR) {
            return broken(errno);
        }
    }
    return MTP_OK;
}

mtp_status mtp__net_receive(int fd, void *data, size_t size, int64_t deadline)
{
    char *next = data;
    while (size > 0) {
        const ssize_t got = recv(fd, next, size, 0);
        if (got > 0) {
            next += got;
            size -= (size_t)got;
        } else if (got == 0) {
            return MTP_FAIL(MTP_E_IO, "the other side closed the connection");
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            const int waited = wait_for(fd, POLLIN, deadline);
            if (waited != 0) return broken(waited);
        } else if (errno != EINTR) {
            return broken(errno);
        }
    }
    return MTP_OK;
}
