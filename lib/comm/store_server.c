/* The store's server: one thread, one poll loop, no call that blocks. */
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "comm/frame.h"
#include "comm/net.h"
#include "comm/secret.h"
#include "comm/table.h"
#include "mtp/comm.h"

enum {
    STRANGERS_MAX = 64,    /* connections that have not proved themselves, at one time */
    REFUSALS_LOGGED = 100, /* after so many lines a scan of the port does not fill the log */
    OUTPUT_MAX = 4 << 20,  /* replies that a client does not read */
    READ_SIZE = 64 << 10,
};

typedef struct bytes {
    uint8_t *data;
    size_t size, capacity;
} bytes;

typedef struct connection {
    int fd;
    bool trusted; /* proved that it knows the secret */
    bool closing;
    uint8_t nonce[MTP__NONCE_SIZE];
    bytes in, out;
    int64_t deadline; /* of the handshake, the started frame or the unsent reply; 0: none */
    bool waiting;     /* a GET whose key is not there */
    int64_t wait_end;
    uint8_t wait_key[MTP_STORE_KEY_MAX];
    size_t wait_key_size;
    char name[MTP__NET_NAME];
} connection;

struct mtp_store_server {
    int listener, wake, port;
    char *secret;
    int64_t io_ms;
    const mtp_logger *logger;
    pthread_t thread;
    /* of the thread alone: */
    mtp__table table;
    connection **connections;
    struct pollfd *polls; /* the listener, the wake-up, one for each connection */
    size_t count;
    int refused;
};

static bool append(bytes *to, const void *data, size_t size)
{
    if (to->size + size > to->capacity) {
        size_t capacity = to->capacity ? to->capacity : 256;
        while (capacity < to->size + size) capacity *= 2;
        uint8_t *grown = realloc(to->data, capacity);
        if (!grown) return false;
        to->data = grown;
        to->capacity = capacity;
    }
    if (size > 0) memcpy(to->data + to->size, data, size);
    to->size += size;
    return true;
}

static void drop_front(bytes *from, size_t size)
{
    from->size -= size;
    if (from->size > 0) memmove(from->data, from->data + size, from->size);
}

static void refuse(mtp_store_server *server, connection *peer, const char *why)
{
    peer->closing = true;
    if (server->refused++ < REFUSALS_LOGGED)
        mtp_log(server->logger, MTP_LOG_WARNING, "store: refused %s: %s%s", peer->name, why,
                server->refused == REFUSALS_LOGGED ? " (further refusals are not logged)" : "");
}

static void reply(mtp_store_server *server, connection *peer, mtp__frame_kind kind, const void *value, size_t size)
{
    uint8_t header[MTP__FRAME_HEADER];
    mtp__frame_build(header, kind, NULL, 0, NULL, 0);
    mtp__frame_put_number(header + 4, 4, size);
    if (peer->out.size + size > OUTPUT_MAX)
        refuse(server, peer, "it does not read its replies");
    else if (!append(&peer->out, header, sizeof header) || !append(&peer->out, value, size))
        refuse(server, peer, "out of memory for a reply");
}

static void reply_refusal(mtp_store_server *server, connection *peer, const char *why)
{
    reply(server, peer, MTP__FRAME_REFUSED, why, strlen(why));
}

/* Answer the clients that wait for this key. */
static void wake_waiting(mtp_store_server *server, const mtp__frame *set)
{
    const mtp__table_entry *entry = mtp__table_find(&server->table, set->key, set->key_size);
    for (size_t i = 0; i < server->count; i++) {
        connection *peer = server->connections[i];
        if (!peer->waiting || peer->wait_key_size != set->key_size ||
            memcmp(peer->wait_key, set->key, set->key_size) != 0)
            continue;
        peer->waiting = false;
        reply(server, peer, MTP__FRAME_DONE, entry->value, entry->value_size);
    }
}

static void handle_proof(mtp_store_server *server, connection *peer, const mtp__frame *frame)
{
    uint8_t proof[MTP__DIGEST_SIZE];
    if (frame->kind != MTP__FRAME_PROOF) {
        refuse(server, peer, "it asks before it has proved that it knows the secret");
        return;
    }
    mtp__secret_proof(server->secret, MTP__ROLE_CLIENT, peer->nonce, frame->value, proof);
    if (!mtp__same_digest(frame->value + MTP__NONCE_SIZE, proof)) {
        /* the client learns that this was the reason, and nothing else */
        reply_refusal(server, peer, "another secret");
        refuse(server, peer, "it has another secret");
        return;
    }
    peer->trusted = true;
    mtp__secret_proof(server->secret, MTP__ROLE_SERVER, peer->nonce, frame->value, proof);
    reply(server, peer, MTP__FRAME_WELCOME, proof, sizeof proof);
}

static void handle_set(mtp_store_server *server, connection *peer, const mtp__frame *frame)
{
    const char *why = mtp__table_set(&server->table, frame->key, frame->key_size, frame->value, frame->value_size);
    if (why) {
        reply_refusal(server, peer, why);
        return;
    }
    reply(server, peer, MTP__FRAME_DONE, NULL, 0);
    wake_waiting(server, frame);
}

static void handle_get(mtp_store_server *server, connection *peer, const mtp__frame *frame)
{
    const mtp__table_entry *entry = mtp__table_find(&server->table, frame->key, frame->key_size);
    const uint64_t wait = mtp__frame_number(frame->value, frame->value_size);
    if (entry) {
        reply(server, peer, MTP__FRAME_DONE, entry->value, entry->value_size);
    } else if (wait == 0) {
        reply(server, peer, MTP__FRAME_ABSENT, NULL, 0);
    } else {
        peer->waiting = true;
        peer->wait_end = mtp__net_now() + (int64_t)wait;
        memcpy(peer->wait_key, frame->key, frame->key_size);
        peer->wait_key_size = frame->key_size;
    }
}

static void handle_add(mtp_store_server *server, connection *peer, const mtp__frame *frame)
{
    const mtp__table_entry *entry = mtp__table_find(&server->table, frame->key, frame->key_size);
    uint8_t sum[8];
    if (entry && entry->value_size != sizeof sum) {
        reply_refusal(server, peer, "its value is no number to add to");
        return;
    }
    /* unsigned: an overflow wraps */
    const uint64_t old = entry ? mtp__frame_number(entry->value, sizeof sum) : 0;
    mtp__frame_put_number(sum, sizeof sum, old + mtp__frame_number(frame->value, sizeof sum));
    const char *why = mtp__table_set(&server->table, frame->key, frame->key_size, sum, sizeof sum);
    if (why) {
        reply_refusal(server, peer, why);
        return;
    }
    reply(server, peer, MTP__FRAME_DONE, sum, sizeof sum);
    wake_waiting(server, frame);
}

static void handle(mtp_store_server *server, connection *peer, const mtp__frame *frame)
{
    if (!peer->trusted) {
        handle_proof(server, peer, frame);
        return;
    }
    switch ((int)frame->kind) {
    case MTP__FRAME_SET:
        handle_set(server, peer, frame);
        break;
    case MTP__FRAME_GET:
        handle_get(server, peer, frame);
        break;
    case MTP__FRAME_ADD:
        handle_add(server, peer, frame);
        break;
    case MTP__FRAME_CHECK: {
        const uint8_t there = mtp__table_find(&server->table, frame->key, frame->key_size) != NULL;
        reply(server, peer, MTP__FRAME_DONE, &there, 1);
        break;
    }
    default:
        refuse(server, peer, "it sends what only the server sends");
        break;
    }
}

/* Handle what has arrived in full. Before the proof nothing larger than a proof is let in. */
static void handle_input(mtp_store_server *server, connection *peer)
{
    size_t used = 0;
    mtp__frame frame = {.size = 0};
    bool complete = true;
    /* one request at a time: while a GET waits, what follows it stays unread */
    while (!peer->closing && !peer->waiting && complete && used < peer->in.size) {
        if (mtp__frame_parse(peer->in.data + used, peer->in.size - used, &frame, &complete) != MTP_OK) {
            refuse(server, peer, mtp_last_error()->message);
        } else if (!peer->trusted && frame.size > 0 && frame.kind != MTP__FRAME_PROOF) {
            refuse(server, peer, "it asks before it has proved that it knows the secret");
        } else if (complete) {
            handle(server, peer, &frame);
            used += frame.size;
        }
    }
    if (used > 0) drop_front(&peer->in, used);
}

static void read_some(mtp_store_server *server, connection *peer)
{
    uint8_t piece[READ_SIZE];
    const ssize_t got = recv(peer->fd, piece, sizeof piece, 0);
    if (got > 0) {
        if (!append(&peer->in, piece, (size_t)got))
            refuse(server, peer, "out of memory for its request");
        else if (peer->waiting && peer->in.size > 2 * MTP_STORE_VALUE_MAX)
            refuse(server, peer, "it goes on asking while it waits");
        else
            handle_input(server, peer);
    } else if (got == 0) {
        if (!peer->trusted) refuse(server, peer, "it left without a proof that it knows the secret");
        peer->closing = true;
    } else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) {
        peer->closing = true;
    }
}

static void write_some(connection *peer)
{
    while (peer->out.size > 0) {
        const ssize_t sent = send(peer->fd, peer->out.data, peer->out.size, MSG_NOSIGNAL);
        if (sent > 0) {
            drop_front(&peer->out, (size_t)sent);
        } else if (errno != EINTR) {
            if (errno != EAGAIN && errno != EWOULDBLOCK) peer->closing = true;
            return;
        }
    }
}

/* The clock of a handshake runs from its start, that of a frame or reply from its first byte. */
static void set_clock(const mtp_store_server *server, connection *peer)
{
    const bool busy = !peer->trusted || peer->out.size > 0 || (peer->in.size > 0 && !peer->waiting);
    if (!busy)
        peer->deadline = 0;
    else if (peer->deadline == 0)
        peer->deadline = mtp__net_now() + server->io_ms;
}

static void check_clock(mtp_store_server *server, connection *peer, int64_t now)
{
    if (peer->closing) return;
    if (peer->waiting && now >= peer->wait_end) {
        peer->waiting = false;
        reply(server, peer, MTP__FRAME_ABSENT, NULL, 0);
        handle_input(server, peer);
    }
    if (peer->deadline && now >= peer->deadline) refuse(server, peer, "it takes too long over one frame");
}

static void free_connection(connection *peer)
{
    if (!peer) return;
    close(peer->fd);
    free(peer->in.data);
    free(peer->out.data);
    free(peer);
}

static size_t count_strangers(const mtp_store_server *server)
{
    size_t strangers = 0;
    for (size_t i = 0; i < server->count; i++) strangers += !server->connections[i]->trusted;
    return strangers;
}

static void admit(mtp_store_server *server, int fd, const struct sockaddr_storage *address)
{
    connection *peer = calloc(1, sizeof *peer);
    if (!peer) {
        close(fd);
        return;
    }
    peer->fd = fd;
    mtp__net_name(address, 1, peer->name);
    if (server->count == MTP_STORE_CONNECTIONS_MAX || count_strangers(server) == STRANGERS_MAX)
        refuse(server, peer, "too many connections");
    else if (mtp__random_bytes(peer->nonce, sizeof peer->nonce) != MTP_OK)
        refuse(server, peer, mtp_last_error()->message);
    else
        reply(server, peer, MTP__FRAME_HELLO, peer->nonce, sizeof peer->nonce);
    if (peer->closing) {
        free_connection(peer);
        return;
    }
    set_clock(server, peer);
    server->connections[server->count++] = peer;
}

static void accept_all(mtp_store_server *server)
{
    for (;;) {
        struct sockaddr_storage address;
        socklen_t length = sizeof address;
        const int fd = accept4(server->listener, (struct sockaddr *)&address, &length, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0)
            admit(server, fd, &address);
        else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS)
            nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL); /* poll would come back at once */
        if (fd < 0 && errno != EINTR && errno != ECONNABORTED) return;
    }
}

/* How long poll may sleep: until the next deadline. */
static int sleep_ms(const mtp_store_server *server)
{
    int64_t next = INT64_MAX;
    for (size_t i = 0; i < server->count; i++) {
        const connection *peer = server->connections[i];
        if (peer->deadline && peer->deadline < next) next = peer->deadline;
        if (peer->waiting && peer->wait_end < next) next = peer->wait_end;
    }
    if (next == INT64_MAX) return -1;
    const int64_t left = next - mtp__net_now();
    return left < 0 ? 0 : left > 60000 ? 60000 : (int)left + 1;
}

static void serve_ready(mtp_store_server *server, size_t polled)
{
    const int64_t now = mtp__net_now();
    for (size_t i = 0; i < polled; i++)
        if (server->polls[2 + i].revents & (POLLIN | POLLHUP | POLLERR)) read_some(server, server->connections[i]);
    for (size_t i = 0; i < polled; i++) check_clock(server, server->connections[i], now);
    size_t kept = 0;
    for (size_t i = 0; i < server->count; i++) {
        connection *peer = server->connections[i];
        /* what a wait held back is handled when the wait ended */
        if (!peer->closing && peer->in.size > 0) handle_input(server, peer);
        write_some(peer);
        set_clock(server, peer);
        if (peer->closing)
            free_connection(peer);
        else
            server->connections[kept++] = peer;
    }
    server->count = kept;
}

static void *serve(void *argument)
{
    mtp_store_server *server = argument;
    for (;;) {
        const size_t polled = server->count;
        server->polls[0] = (struct pollfd){.fd = server->listener, .events = POLLIN};
        server->polls[1] = (struct pollfd){.fd = server->wake, .events = POLLIN};
        for (size_t i = 0; i < polled; i++) {
            const connection *peer = server->connections[i];
            const short out = peer->out.size > 0 ? POLLOUT : 0;
            server->polls[2 + i] = (struct pollfd){.fd = peer->fd, .events = (short)(POLLIN | out)};
        }
        if (poll(server->polls, 2 + polled, sleep_ms(server)) < 0 && errno != EINTR) break;
        if (server->polls[1].revents) break;
        serve_ready(server, polled);
        if (server->polls[0].revents) {
            accept_all(server);
            for (size_t i = 0; i < server->count; i++) write_some(server->connections[i]);
        }
    }
    return NULL;
}

static void free_server(mtp_store_server *server)
{
    for (size_t i = 0; i < server->count; i++) free_connection(server->connections[i]);
    mtp__table_free(&server->table);
    if (server->listener >= 0) close(server->listener);
    if (server->wake >= 0) close(server->wake);
    free(server->connections);
    free(server->polls);
    free(server->secret);
    free(server);
}

static mtp_status start(mtp_store_server *server, const mtp_store_server_options *options)
{
    server->secret = strdup(options->secret);
    server->connections = calloc(MTP_STORE_CONNECTIONS_MAX, sizeof(connection *));
    server->polls = calloc(MTP_STORE_CONNECTIONS_MAX + 2, sizeof *server->polls);
    if (!server->secret || !server->connections || !server->polls)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for the store");
    server->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->wake < 0) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "the store's event: %s", strerror(errno));
    const char *address = options->address ? options->address : "127.0.0.1";
    MTP_TRY_AT(mtp__net_listen(address, options->port, &server->listener, &server->port), "the store");
    const int code = pthread_create(&server->thread, NULL, serve, server);
    if (code != 0) return MTP_FAIL_FOREIGN(MTP_E_IO, code, "the store's thread: %s", strerror(code));
    return MTP_OK;
}

mtp_status mtp_store_server_start(const mtp_store_server_options *options, mtp_store_server **server)
{
    MTP_REQUIRE(options != NULL && server != NULL && options->secret != NULL);
    MTP_REQUIRE(options->port >= 0 && options->port <= 65535 && options->io_seconds >= 0);
    *server = NULL;
    if (strlen(options->secret) < MTP_STORE_SECRET_MIN)
        return MTP_FAIL(MTP_E_CONFIG, "a secret of %zu letters; MTP_RDZV_SECRET needs at least %d",
                        strlen(options->secret), MTP_STORE_SECRET_MIN);
    mtp_store_server *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for the store");
    made->listener = made->wake = -1;
    made->io_ms = options->io_seconds > 0 ? (int64_t)(options->io_seconds * 1000) + 1 : 10000;
    made->logger = options->logger;
    const mtp_status status = start(made, options);
    if (status != MTP_OK) {
        free_server(made);
        return status;
    }
    *server = made;
    return MTP_OK;
}

int mtp_store_server_port(const mtp_store_server *server)
{
    return server->port;
}

void mtp_store_server_stop(mtp_store_server *server)
{
    if (!server) return;
    const uint64_t one = 1;
    while (write(server->wake, &one, sizeof one) < 0 && errno == EINTR) continue;
    pthread_join(server->thread, NULL);
    free_server(server);
}
