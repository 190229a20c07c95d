#include "emu/nccl_link.h"

#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

namespace emu
{

static constexpr int PATIENCE_MS = 60000, STEP_MS = 5;

/* A name without a file behind it (Linux's abstract sockets). */
static socklen_t address_of(const std::string &name, sockaddr_un *address)
{
    *address = {};
    address->sun_family = AF_UNIX;
    memcpy(address->sun_path + 1, name.data(), name.size());
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
}

Link::Link(std::string name, int rank, int ranks)
    : name_(std::move(name)), rank_(rank), ranks_(ranks), sockets_(static_cast<size_t>(ranks), -1)
{
}

Link::~Link()
{
    for (int socket : sockets_)
        if (socket >= 0) close(socket);
}

bool Link::accept_all()
{
    sockaddr_un address;
    const socklen_t size = address_of(name_, &address);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (listener < 0) return false;
    bool ok = bind(listener, reinterpret_cast<sockaddr *>(&address), size) == 0 && listen(listener, ranks_) == 0;
    for (int i = 1; ok && i < ranks_; i++) {
        pollfd waiting = {listener, POLLIN, 0};
        int rank = -1;
        ok = poll(&waiting, 1, PATIENCE_MS) == 1;
        const int peer = ok ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
        ok = peer >= 0 && recv(peer, &rank, sizeof rank, MSG_WAITALL) == sizeof rank && rank > 0 && rank < ranks_ &&
             sockets_[static_cast<size_t>(rank)] < 0;
        if (ok)
            sockets_[static_cast<size_t>(rank)] = peer;
        else if (peer >= 0)
            close(peer);
    }
    close(listener);
    return ok;
}

bool Link::connect_to_first()
{
    sockaddr_un address;
    const socklen_t size = address_of(name_, &address);
    for (int waited = 0; waited < PATIENCE_MS; waited += STEP_MS) {
        const int peer = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        if (peer < 0) return false;
        if (connect(peer, reinterpret_cast<sockaddr *>(&address), size) == 0) {
            sockets_[0] = peer;
            return ::send(peer, &rank_, sizeof rank_, MSG_NOSIGNAL) == sizeof rank_;
        }
        close(peer);
        poll(nullptr, 0, STEP_MS);
    }
    return false;
}

/* Everybody says that it is there, and hears that all are. */
bool Link::open()
{
    if (ranks_ == 1) return true;
    char token = 1;
    if (rank_ != 0) return connect_to_first() && receive(0, &token, 1);
    bool ok = accept_all();
    for (int i = 1; ok && i < ranks_; i++) ok = send(i, &token, 1);
    return ok;
}

bool Link::send(int rank, const void *data, size_t bytes)
{
    const char *at = static_cast<const char *>(data);
    while (bytes > 0 && !aborted_) {
        const ssize_t sent = ::send(sockets_[static_cast<size_t>(rank)], at, bytes, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        at += sent;
        bytes -= static_cast<size_t>(sent);
    }
    return bytes == 0;
}

bool Link::receive(int rank, void *data, size_t bytes)
{
    char *at = static_cast<char *>(data);
    while (bytes > 0 && !aborted_) {
        const ssize_t got = recv(sockets_[static_cast<size_t>(rank)], at, bytes, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        at += got;
        bytes -= static_cast<size_t>(got);
    }
    return bytes == 0;
}

void Link::abort()
{
    aborted_ = true;
    for (int socket : sockets_)
        if (socket >= 0) shutdown(socket, SHUT_RDWR);
}

} // namespace emu
