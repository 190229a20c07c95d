/* One connection to the store. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm/frame.h"
#include "comm/net.h"
#include "comm/secret.h"
#include "mtp/comm.h"

enum { RETRY_MS = 50 };

struct mtp_store {
    int fd; /* -1 after a failure */
    double seconds;
    char endpoint[2 * MTP__NET_NAME];
    char local[MTP__NET_NAME];
    char failure[256]; /* what the first failure said */
    uint8_t *buffer;   /* the last reply */
    size_t capacity;
};

static mtp_status grow(mtp_store *store, size_t size)
{
    if (size <= store->capacity) return MTP_OK;
    uint8_t *grown = realloc(store->buffer, size);
    if (!grown) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a frame of %zu bytes", size);
    store->buffer = grown;
    store->capacity = size;
    return MTP_OK;
}

static mtp_status receive_frame(mtp_store *store, int64_t deadline, mtp__frame *frame)
{
    bool complete;
    MTP_TRY(grow(store, MTP__FRAME_HEADER));
    MTP_TRY(mtp__net_receive(store->fd, store->buffer, MTP__FRAME_HEADER, deadline));
    MTP_TRY(mtp__frame_parse(store->buffer, MTP__FRAME_HEADER, frame, &complete));
    const size_t size = frame->size;
    MTP_TRY(grow(store, size));
    MTP_TRY(mtp__net_receive(store->fd, store->buffer + MTP__FRAME_HEADER, size - MTP__FRAME_HEADER, deadline));
    return mtp__frame_parse(store->buffer, size, frame, &complete);
}

static mtp_status send_frame(mtp_store *store, mtp__frame_kind kind, const void *key, size_t key_size,
                             const void *value, size_t value_size, int64_t deadline)
{
    MTP_TRY(grow(store, MTP__FRAME_HEADER + key_size + value_size));
    mtp__frame_build(store->buffer, kind, key, key_size, value, value_size);
    return mtp__net_send(store->fd, store->buffer, MTP__FRAME_HEADER + key_size + value_size, deadline);
}

/* Both sides prove that they know the secret. MTP_E_CONFIG: they do not share one. */
static mtp_status shake_hands(mtp_store *store, const char *secret, int64_t deadline)
{
    uint8_t server_nonce[MTP__NONCE_SIZE], answer[MTP__NONCE_SIZE + MTP__DIGEST_SIZE], expected[MTP__DIGEST_SIZE];
    mtp__frame frame;
    MTP_TRY(receive_frame(store, deadline, &frame));
    if (frame.kind != MTP__FRAME_HELLO) return MTP_FAIL(MTP_E_FORMAT, "the server does not greet as a store does");
    memcpy(server_nonce, frame.value, sizeof server_nonce);
    MTP_TRY(mtp__random_bytes(answer, MTP__NONCE_SIZE));
    mtp__secret_proof(secret, MTP__ROLE_CLIENT, server_nonce, answer, answer + MTP__NONCE_SIZE);
    MTP_TRY(send_frame(store, MTP__FRAME_PROOF, NULL, 0, answer, sizeof answer, deadline));
    MTP_TRY(receive_frame(store, deadline, &frame));
    mtp__secret_proof(secret, MTP__ROLE_SERVER, server_nonce, answer, expected);
    if (frame.kind != MTP__FRAME_WELCOME || !mtp__same_digest(frame.value, expected))
        return MTP_FAIL(MTP_E_CONFIG, "the store has another secret; MTP_RDZV_SECRET must be the same everywhere");
    return MTP_OK;
}

static mtp_status try_once(mtp_store *store, const char *host, int port, const char *secret, int64_t deadline)
{
    struct sockaddr_storage address;
    socklen_t length = sizeof address;
    MTP_TRY(mtp__net_connect(host, port, deadline, &store->fd));
    if (getsockname(store->fd, (struct sockaddr *)&address, &length) == 0) mtp__net_name(&address, 0, store->local);
    const mtp_status status = shake_hands(store, secret, deadline);
    if (status == MTP_OK) return MTP_OK;
    close(store->fd);
    store->fd = -1;
    return status;
}

static mtp_status connect_until(mtp_store *store, const char *secret, int64_t deadline)
{
    char host[MTP__NET_NAME];
    int port;
    MTP_TRY(mtp__net_split(store->endpoint, host, &port));
    for (;;) {
        const mtp_status status = try_once(store, host, port, secret, deadline);
        if (status != MTP_E_IO || mtp__net_now() + RETRY_MS >= deadline) return status;
        nanosleep(&(struct timespec){.tv_nsec = RETRY_MS * 1000000L}, NULL);
    }
}

mtp_status mtp_store_connect(const char *endpoint, const char *secret, double seconds, mtp_store **store)
{
    MTP_REQUIRE(endpoint != NULL && secret != NULL && store != NULL && seconds > 0);
    *store = NULL;
    mtp_store *made = calloc(1, sizeof *made);
    if (!made) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a connection to the store");
    made->fd = -1;
    made->seconds = seconds;
    mtp_status status = MTP_OK;
    if (strlen(endpoint) >= sizeof made->endpoint)
        status = MTP_FAIL(MTP_E_CONFIG, "an endpoint of %zu letters is too long", strlen(endpoint));
    else
        snprintf(made->endpoint, sizeof made->endpoint, "%s", endpoint);
    if (status == MTP_OK) status = connect_until(made, secret, mtp__net_deadline(seconds));
    if (status != MTP_OK) {
        mtp_store_close(made);
        return mtp__fail_prefix(status, "the store at %s", endpoint);
    }
    *store = made;
    return MTP_OK;
}

/* Close after a failure: the next reply could be the answer to this request. */
static mtp_status give_up(mtp_store *store, mtp_status status)
{
    mtp__fail_prefix(status, "the store at %s", store->endpoint);
    snprintf(store->failure, sizeof store->failure, "%.*s", (int)sizeof store->failure - 1, mtp_last_error()->message);
    close(store->fd);
    store->fd = -1;
    return status;
}

/* Send one request and read its reply: DONE or ABSENT. */
static mtp_status exchange(mtp_store *store, mtp__frame_kind kind, const char *key, const void *value, size_t size,
                           double wait_seconds, mtp__frame *reply)
{
    const size_t key_size = strlen(key);
    if (store->fd < 0) return MTP_FAIL(MTP_E_IO, "closed after a failure: %s", store->failure);
    if (key_size < 1 || key_size > MTP_STORE_KEY_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "a key of the store has 1 to %d bytes, not %zu", MTP_STORE_KEY_MAX, key_size);
    const int64_t deadline = mtp__net_deadline(store->seconds + wait_seconds);
    mtp_status status = send_frame(store, kind, key, key_size, value, size, deadline);
    if (status == MTP_OK) status = receive_frame(store, deadline, reply);
    if (status != MTP_OK) return give_up(store, status);
    if (reply->kind == MTP__FRAME_REFUSED)
        return MTP_FAIL(MTP_E_ARGUMENT, "the store refuses key '%s': %.*s", key, (int)reply->value_size,
                        (const char *)reply->value);
    if (reply->kind != MTP__FRAME_DONE && reply->kind != MTP__FRAME_ABSENT)
        return give_up(store, MTP_FAIL(MTP_E_FORMAT, "an answer of kind %d, which answers nothing", (int)reply->kind));
    return MTP_OK;
}

static mtp_status expect_size(mtp_store *store, const mtp__frame *reply, size_t size)
{
    if (reply->kind == MTP__FRAME_DONE && reply->value_size == size) return MTP_OK;
    return give_up(store, MTP_FAIL(MTP_E_FORMAT, "an answer of %zu bytes, not %zu", reply->value_size, size));
}

mtp_status mtp_store_set(mtp_store *store, const char *key, const void *value, size_t size)
{
    mtp__frame reply;
    MTP_REQUIRE(store != NULL && key != NULL && (value != NULL || size == 0));
    if (size > MTP_STORE_VALUE_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "key '%s': a value of %zu bytes; the store takes %d", key, size,
                        MTP_STORE_VALUE_MAX);
    MTP_TRY(exchange(store, MTP__FRAME_SET, key, value, size, 0, &reply));
    return expect_size(store, &reply, 0);
}

mtp_status mtp_store_get(mtp_store *store, const char *key, double seconds, void **value, size_t *size)
{
    mtp__frame reply;
    uint8_t wait[4];
    MTP_REQUIRE(store != NULL && key != NULL && value != NULL && seconds >= 0 && seconds <= 1e6);
    *value = NULL;
    mtp__frame_put_number(wait, sizeof wait, (uint64_t)(seconds * 1000));
    MTP_TRY(exchange(store, MTP__FRAME_GET, key, wait, sizeof wait, seconds, &reply));
    if (reply.kind == MTP__FRAME_ABSENT)
        return MTP_FAIL(MTP_E_NOT_FOUND, "nobody set '%s' in the store at %s within %g s", key, store->endpoint,
                        seconds);
    char *copy = malloc(reply.value_size + 1);
    if (!copy) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a value of %zu bytes", reply.value_size);
    memcpy(copy, reply.value, reply.value_size);
    copy[reply.value_size] = '\0';
    *value = copy;
    if (size) *size = reply.value_size;
    return MTP_OK;
}

mtp_status mtp_store_add(mtp_store *store, const char *key, int64_t amount, int64_t *sum)
{
    mtp__frame reply;
    uint8_t number[8];
    MTP_REQUIRE(store != NULL && key != NULL && sum != NULL);
    mtp__frame_put_number(number, sizeof number, (uint64_t)amount);
    MTP_TRY(exchange(store, MTP__FRAME_ADD, key, number, sizeof number, 0, &reply));
    MTP_TRY(expect_size(store, &reply, sizeof number));
    *sum = (int64_t)mtp__frame_number(reply.value, sizeof number);
    return MTP_OK;
}

mtp_status mtp_store_check(mtp_store *store, const char *key, bool *there)
{
    mtp__frame reply;
    MTP_REQUIRE(store != NULL && key != NULL && there != NULL);
    MTP_TRY(exchange(store, MTP__FRAME_CHECK, key, NULL, 0, 0, &reply));
    MTP_TRY(expect_size(store, &reply, 1));
    *there = reply.value[0] != 0;
    return MTP_OK;
}

const char *mtp_store_local_address(const mtp_store *store)
{
    return store->local;
}

void mtp_store_close(mtp_store *store)
{
    if (!store) return;
    if (store->fd >= 0) close(store->fd);
    free(store->buffer);
    free(store);
}
