/* Protects: the key-value store: values arrive, waits end, numbers add up from many clients at once; whoever does not
 * know the secret, sends garbage or dawdles is refused and logged, and nobody else suffers from it. */
#include "support.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "comm/frame.h"
#include "comm/net.h"
#include "comm/secret.h"
#include "mtp/comm.h"

static const char secret[] = "an example of a secret";

/* ---- a server whose log can be read --------------------------------------------------------------------------- */

typedef struct fixture {
    pthread_mutex_t lock;
    char log[8192];
    mtp_logger logger;
    mtp_store_server *server;
    char endpoint[32];
} fixture;

static void keep_line(void *user, mtp_log_level level, const char *line)
{
    fixture *own = user;
    (void)level;
    pthread_mutex_lock(&own->lock);
    const size_t used = strlen(own->log);
    snprintf(own->log + used, sizeof own->log - used, "%s\n", line);
    pthread_mutex_unlock(&own->lock);
}

static bool logged(fixture *own, const char *text)
{
    pthread_mutex_lock(&own->lock);
    const bool there = strstr(own->log, text) != NULL;
    pthread_mutex_unlock(&own->lock);
    return there;
}

static void assert_logged(fixture *own, const char *text)
{
    const int64_t end = mtp__net_deadline(10);
    while (!logged(own, text) && mtp__net_now() < end) nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
    if (!logged(own, text)) fail_msg("the log does not say \"%s\":\n%s", text, own->log);
}

static void begin(fixture *own, double io_seconds)
{
    *own = (fixture){.logger = {.write = keep_line, .user = own, .min_level = MTP_LOG_INFO}};
    pthread_mutex_init(&own->lock, NULL);
    const mtp_store_server_options options = {.secret = secret, .io_seconds = io_seconds, .logger = &own->logger};
    assert_ok(mtp_store_server_start(&options, &own->server));
    snprintf(own->endpoint, sizeof own->endpoint, "127.0.0.1:%d", mtp_store_server_port(own->server));
}

static void end(fixture *own)
{
    mtp_store_server_stop(own->server);
    pthread_mutex_destroy(&own->lock);
}

static mtp_store *client(const fixture *own)
{
    mtp_store *store;
    assert_ok(mtp_store_connect(own->endpoint, secret, 10, &store));
    return store;
}

static int stranger(const fixture *own)
{
    int fd;
    assert_ok(mtp__net_connect("127.0.0.1", mtp_store_server_port(own->server), mtp__net_deadline(10), &fd));
    return fd;
}

/* Read until the server closes; fails when it does not. */
static void assert_closed(int fd)
{
    char piece[256];
    const int64_t deadline = mtp__net_deadline(10);
    for (;;) {
        struct pollfd poller = {.fd = fd, .events = POLLIN};
        assert_true(mtp__net_now() < deadline);
        if (poll(&poller, 1, 1000) <= 0) continue;
        const ssize_t got = recv(fd, piece, sizeof piece, 0);
        if (got == 0 || (got < 0 && errno == ECONNRESET)) break;
    }
    close(fd);
}

/* ---- what clients do ------------------------------------------------------------------------------------------ */

static void values(void **state)
{
    (void)state;
    fixture own;
    void *value;
    size_t size;
    bool there;
    int64_t sum;
    begin(&own, 0);
    mtp_store *a = client(&own), *b = client(&own);
    assert_string_equal(mtp_store_local_address(a), "127.0.0.1");
    assert_ok(mtp_store_set(a, "key", "va\0lue", 6));
    assert_ok(mtp_store_get(b, "key", 0, &value, &size));
    assert_int_equal(size, 6);
    assert_memory_equal(value, "va\0lue\0", 7);
    free(value);
    assert_ok(mtp_store_set(b, "key", NULL, 0));
    assert_ok(mtp_store_get(a, "key", 0, &value, &size));
    assert_int_equal(size, 0);
    free(value);
    assert_ok(mtp_store_check(a, "key", &there));
    assert_true(there);
    assert_ok(mtp_store_check(a, "other", &there));
    assert_false(there);
    assert_ok(mtp_store_add(a, "n", 5, &sum));
    assert_ok(mtp_store_add(b, "n", -7, &sum));
    assert_int_equal(sum, -2);
    assert_fails(mtp_store_add(a, "key", 1, &sum), MTP_E_ARGUMENT, "no number");
    assert_fails(mtp_store_get(a, "other", 0.05, &value, NULL), MTP_E_NOT_FOUND, "'other'");
    /* a refusal and a wait that ran out leave the connection usable */
    assert_ok(mtp_store_check(a, "n", &there));
    assert_true(there);
    mtp_store_close(a);
    mtp_store_close(b);
    mtp_store_close(NULL);
    end(&own);
}

static void sizes(void **state)
{
    (void)state;
    fixture own;
    char key[MTP_STORE_KEY_MAX + 2];
    void *value;
    size_t size;
    char *large = malloc(MTP_STORE_VALUE_MAX + 1);
    for (size_t i = 0; i <= MTP_STORE_VALUE_MAX; i++) large[i] = (char)(i * 31 >> 3);
    memset(key, 'k', sizeof key);
    key[MTP_STORE_KEY_MAX + 1] = '\0';
    begin(&own, 0);
    mtp_store *store = client(&own);
    assert_fails(mtp_store_set(store, key, "", 0), MTP_E_ARGUMENT, "512 bytes");
    assert_fails(mtp_store_set(store, "", "", 0), MTP_E_ARGUMENT, "512 bytes");
    assert_fails(mtp_store_set(store, "k", large, MTP_STORE_VALUE_MAX + 1), MTP_E_ARGUMENT, "takes 1048576");
    key[MTP_STORE_KEY_MAX] = '\0';
    assert_ok(mtp_store_set(store, key, large, MTP_STORE_VALUE_MAX));
    assert_ok(mtp_store_get(store, key, 0, &value, &size));
    assert_int_equal(size, MTP_STORE_VALUE_MAX);
    assert_memory_equal(value, large, size);
    free(value);
    /* 64 MiB in all: the rest is refused, what is there stays, and replacing needs no new room */
    mtp_status status = MTP_OK;
    int stored = 0;
    for (; status == MTP_OK && stored < 100; stored++) {
        snprintf(key, sizeof key, "fill%d", stored);
        status = mtp_store_set(store, key, large, MTP_STORE_VALUE_MAX);
    }
    assert_int_equal(status, MTP_E_ARGUMENT);
    assert_non_null(strstr(mtp_last_error()->message, "full"));
    assert_int_equal(stored, 63);
    assert_ok(mtp_store_set(store, "fill1", large, MTP_STORE_VALUE_MAX));
    mtp_store_close(store);
    end(&own);
    free(large);
}

enum { THREADS = 4, ADDS = 50 };

static void *add_many(void *argument)
{
    const fixture *own = argument;
    mtp_store *store;
    void *value = NULL;
    int64_t sum;
    mtp_status status = mtp_store_connect(own->endpoint, secret, 10, &store);
    for (int i = 0; status == MTP_OK && i < ADDS; i++) status = mtp_store_add(store, "sum", 1, &sum);
    if (status == MTP_OK) status = mtp_store_get(store, "go", 10, &value, NULL);
    const bool right = status == MTP_OK && strcmp(value, "now") == 0;
    free(value);
    mtp_store_close(store);
    return right ? argument : NULL;
}

static void many_clients(void **state)
{
    (void)state;
    fixture own;
    pthread_t threads[THREADS];
    int64_t sum = 0;
    begin(&own, 0);
    mtp_store *store = client(&own);
    for (int i = 0; i < THREADS; i++) assert_int_equal(pthread_create(&threads[i], NULL, add_many, &own), 0);
    const int64_t deadline = mtp__net_deadline(20);
    while (sum != THREADS * ADDS && mtp__net_now() < deadline) assert_ok(mtp_store_add(store, "sum", 0, &sum));
    assert_int_equal(sum, THREADS * ADDS);
    assert_ok(mtp_store_set(store, "go", "now", 3));
    for (int i = 0; i < THREADS; i++) {
        void *result;
        pthread_join(threads[i], &result);
        assert_ptr_equal(result, &own);
    }
    mtp_store_close(store);
    end(&own);
}

/* ---- those who do not belong here ----------------------------------------------------------------------------- */

static void wrong_secret(void **state)
{
    (void)state;
    fixture own;
    mtp_store *store;
    begin(&own, 0);
    assert_fails(mtp_store_connect(own.endpoint, "another secret", 10, &store), MTP_E_CONFIG, "MTP_RDZV_SECRET");
    assert_null(store);
    assert_logged(&own, "another secret");
    const mtp_store_server_options weak = {.secret = "short"};
    mtp_store_server *none;
    assert_fails(mtp_store_server_start(&weak, &none), MTP_E_CONFIG, "at least 8");
    end(&own);
}

/* A request without a proof, the protocol of others, a frame of 4 GB. */
static void garbage(void **state)
{
    (void)state;
    fixture own;
    uint8_t frame[64];
    bool there;
    begin(&own, 0);
    mtp_store *store = client(&own);

    int fd = stranger(&own);
    mtp__frame_build(frame, MTP__FRAME_SET, "k", 1, "v", 1);
    assert_ok(mtp__net_send(fd, frame, MTP__FRAME_HEADER + 2, mtp__net_deadline(10)));
    assert_closed(fd);
    assert_logged(&own, "before it has proved");

    fd = stranger(&own);
    assert_ok(mtp__net_send(fd, "GET / HTTP/1.1\r\n\r\n", 18, mtp__net_deadline(10)));
    assert_closed(fd);
    assert_logged(&own, "the first byte is 0x47");

    fd = stranger(&own);
    mtp__frame_put_number(frame + 4, 4, 0xffffffff);
    assert_ok(mtp__net_send(fd, frame, MTP__FRAME_HEADER, mtp__net_deadline(10)));
    assert_closed(fd);
    assert_logged(&own, "a value of 4294967295 bytes");

    /* the proof of another connection */
    fd = stranger(&own);
    uint8_t zeros[MTP__NONCE_SIZE + MTP__DIGEST_SIZE] = {0}, proof[MTP__FRAME_HEADER + sizeof zeros];
    mtp__frame_build(proof, MTP__FRAME_PROOF, NULL, 0, zeros, sizeof zeros);
    assert_ok(mtp__net_send(fd, proof, sizeof proof, mtp__net_deadline(10)));
    assert_closed(fd);
    assert_logged(&own, "it has another secret");

    assert_ok(mtp_store_check(store, "k", &there));
    assert_false(there);
    mtp_store_close(store);
    end(&own);
}

/* One who says nothing, and one who sends a byte now and then, keep no connection for longer than the limit. */
static void slow(void **state)
{
    (void)state;
    fixture own;
    bool there;
    begin(&own, 0.3);
    mtp_store *store = client(&own);
    const int silent = stranger(&own), dripping = stranger(&own);
    const uint8_t bytes[] = {MTP__FRAME_MAGIC, MTP__FRAME_PROOF, 0, 0};
    for (size_t i = 0; i < sizeof bytes; i++) {
        (void)send(dripping, bytes + i, 1, MSG_NOSIGNAL);
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    }
    assert_closed(silent);
    assert_closed(dripping);
    assert_logged(&own, "takes too long");
    /* a client that proved itself may be idle */
    assert_ok(mtp_store_check(store, "k", &there));
    mtp_store_close(store);
    end(&own);
}

/* More strangers than the store lets wait at its door: it refuses the last ones and serves those inside. */
static void crowd(void **state)
{
    (void)state;
    fixture own;
    bool there;
    int fds[70];
    begin(&own, 2);
    mtp_store *store = client(&own);
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) fds[i] = stranger(&own);
    assert_logged(&own, "too many connections");
    assert_ok(mtp_store_check(store, "k", &there));
    for (size_t i = 0; i < sizeof fds / sizeof *fds; i++) close(fds[i]);
    mtp_store *late = client(&own);
    mtp_store_close(late);
    mtp_store_close(store);
    end(&own);
}

static void lost_server(void **state)
{
    (void)state;
    fixture own;
    bool there;
    begin(&own, 0);
    mtp_store *store = client(&own);
    end(&own);
    assert_fails(mtp_store_check(store, "k", &there), MTP_E_IO, own.endpoint);
    assert_fails(mtp_store_check(store, "k", &there), MTP_E_IO, "closed after a failure");
    mtp_store_close(store);
    assert_fails(mtp_store_connect(own.endpoint, secret, 0.2, &store), MTP_E_IO, "refused");
    assert_fails(mtp_store_connect("nowhere", secret, 0.2, &store), MTP_E_CONFIG, "HOST:PORT");
    assert_fails(mtp_store_connect("::1:5", secret, 0.2, &store), MTP_E_CONFIG, "brackets");
}

/* A server that does not know the secret learns nothing from us and cannot pose as the store. */
static void *pose(void *argument)
{
    const int listener = *(int *)argument;
    struct pollfd poller = {.fd = listener, .events = POLLIN};
    uint8_t out[128], in[MTP__FRAME_HEADER + MTP__NONCE_SIZE + MTP__DIGEST_SIZE];
    const uint8_t zeros[MTP__NONCE_SIZE] = {0};
    if (poll(&poller, 1, 10000) <= 0) return NULL;
    const int fd = accept(listener, NULL, NULL);
    mtp__frame_build(out, MTP__FRAME_HELLO, NULL, 0, zeros, sizeof zeros);
    mtp__net_send(fd, out, MTP__FRAME_HEADER + sizeof zeros, mtp__net_deadline(10));
    mtp__net_receive(fd, in, sizeof in, mtp__net_deadline(10));
    mtp__frame_build(out, MTP__FRAME_WELCOME, NULL, 0, in + MTP__FRAME_HEADER + MTP__NONCE_SIZE, MTP__DIGEST_SIZE);
    mtp__net_send(fd, out, MTP__FRAME_HEADER + MTP__DIGEST_SIZE, mtp__net_deadline(10));
    close(fd);
    return NULL;
}

static void false_server(void **state)
{
    (void)state;
    int listener, port;
    pthread_t thread;
    mtp_store *store;
    assert_ok(mtp__net_listen("127.0.0.1", 0, &listener, &port));
    assert_int_equal(pthread_create(&thread, NULL, pose, &listener), 0);
    assert_fails(mtp_store_connect(test_path("127.0.0.1:%d", port), secret, 10, &store), MTP_E_CONFIG, "secret");
    pthread_join(thread, NULL);
    close(listener);
}

/* FIPS 180-4 and RFC 4231 examples. */
static void digests(void **state)
{
    (void)state;
    uint8_t digest[MTP__DIGEST_SIZE];
    static const uint8_t abc[4] = {0xba, 0x78, 0x16, 0xbf}, two_blocks[4] = {0x24, 0x8d, 0x6a, 0x61},
                         jefe[4] = {0x5b, 0xdc, 0xc1, 0x46}, long_key[4] = {0x60, 0xe4, 0x31, 0x59};
    mtp__sha256("abc", 3, digest);
    assert_memory_equal(digest, abc, 4);
    mtp__sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, digest);
    assert_memory_equal(digest, two_blocks, 4);
    mtp__hmac_sha256("Jefe", 4, "what do ya want for nothing?", 28, digest);
    assert_memory_equal(digest, jefe, 4);
    uint8_t key[131];
    memset(key, 0xaa, sizeof key);
    mtp__hmac_sha256(key, sizeof key, "Test Using Larger Than Block-Size Key - Hash Key First", 54, digest);
    assert_memory_equal(digest, long_key, 4);
    char one[MTP_STORE_SECRET_SIZE], other[MTP_STORE_SECRET_SIZE];
    assert_ok(mtp_store_make_secret(one));
    assert_ok(mtp_store_make_secret(other));
    assert_int_equal(strspn(one, "0123456789abcdef"), MTP_STORE_SECRET_SIZE - 1);
    assert_string_not_equal(one, other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(digests),      cmocka_unit_test(values),  cmocka_unit_test(sizes),
        cmocka_unit_test(many_clients), cmocka_unit_test(garbage), cmocka_unit_test(wrong_secret),
        cmocka_unit_test(slow),         cmocka_unit_test(crowd),   cmocka_unit_test(lost_server),
        cmocka_unit_test(false_server),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
