/* Protects: the collectives between 2, 3 and 4 processes: exact results, the same bits on all ranks and in a second
 * run, operations in flight beside each other, and a rank that dies or hangs is noticed and named by the others. */
#include "support.h"

#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/real.h"
#include "comm/net.h"
#include "mtp/comm.h"

/* In a child an assert of cmocka would go on with the parent's other tests. */
#define CHECK(condition)                                                                        \
    do {                                                                                        \
        if (!(condition)) {                                                                     \
            fprintf(stderr, "rank %s: line %d: %s: %s\n", getenv("RANK"), __LINE__, #condition, \
                    mtp_last_error()->message);                                                 \
            _exit(1);                                                                           \
        }                                                                                       \
    } while (0)

enum { RANKS_MAX = 4 };

typedef struct world {
    int size;
    double seconds;
    void (*body)(mtp_comm *comm, int out); /* `out`: a pipe to the test */
    bool own_store;                        /* a process of its own hosts the store, as mtprun does */
    char received[RANKS_MAX][4096];
    size_t received_size[RANKS_MAX];
    int status[RANKS_MAX];
} world;

static void set_number(const char *name, int value)
{
    char text[16];
    snprintf(text, sizeof text, "%d", value);
    setenv(name, text, 1);
}

static int free_port(void)
{
    int fd, port;
    assert_ok(mtp__net_listen("127.0.0.1", 0, &fd, &port));
    close(fd);
    return port;
}

static void run_rank(const world *own, int rank, int out)
{
    const mtp_comm_options options = {.seconds = own->seconds};
    mtp_comm *comm;
    set_number("RANK", rank);
    set_number("LOCAL_RANK", rank);
    CHECK(mtp_comm_create(&options, &comm) == MTP_OK);
    own->body(comm, out);
    mtp_comm_free(comm);
    _exit(0);
}

/* The store in a process of its own: this one must fork, so it may not have threads. Returns the process. */
static pid_t host_store(int *port)
{
    int ends[2];
    assert_int_equal(pipe(ends), 0);
    const pid_t pid = fork();
    if (pid == 0) {
        const mtp_store_server_options options = {.secret = getenv("MTP_RDZV_SECRET")};
        mtp_store_server *server;
        CHECK(mtp_store_server_start(&options, &server) == MTP_OK);
        const int bound = mtp_store_server_port(server);
        CHECK(write(ends[1], &bound, sizeof bound) == sizeof bound);
        for (;;) pause();
    }
    assert_true(pid > 0);
    assert_int_equal(read(ends[0], port, sizeof *port), sizeof *port);
    close(ends[0]);
    close(ends[1]);
    return pid;
}

static void run_world(world *own)
{
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    int pipes[RANKS_MAX][2], port = 0;
    pid_t ranks[RANKS_MAX], store = 0;
    set_number("WORLD_SIZE", own->size);
    set_number("LOCAL_WORLD_SIZE", own->size);
    unsetenv("MTP_RDZV_ENDPOINT");
    unsetenv("MTP_RDZV_SECRET");
    if (own->own_store) {
        setenv("MTP_RDZV_SECRET", "a secret of the test", 1);
        store = host_store(&port);
        setenv("MTP_RDZV_ENDPOINT", test_path("127.0.0.1:%d", port), 1);
    } else {
        set_number("MTP_RDZV_PORT", free_port());
    }
    for (int rank = 0; rank < own->size; rank++) {
        assert_int_equal(pipe(pipes[rank]), 0);
        ranks[rank] = fork();
        if (ranks[rank] == 0) run_rank(own, rank, pipes[rank][1]);
        assert_true(ranks[rank] > 0);
        close(pipes[rank][1]);
    }
    for (int rank = 0; rank < own->size; rank++) {
        size_t size = 0;
        ssize_t got;
        while ((got = read(pipes[rank][0], own->received[rank] + size, sizeof own->received[rank] - size)) > 0)
            size += (size_t)got;
        own->received_size[rank] = size;
        close(pipes[rank][0]);
        waitpid(ranks[rank], &own->status[rank], 0);
    }
    if (store) {
        kill(store, SIGKILL);
        waitpid(store, NULL, 0);
    }
}

static void assert_all_ended_well(const world *own)
{
    for (int rank = 0; rank < own->size; rank++)
        if (own->status[rank] != 0) fail_msg("rank %d of %d: status %x", rank, own->size, (unsigned)own->status[rank]);
}

/* ---- results -------------------------------------------------------------------------------------------------- */

/* Small whole numbers: every order of summation is exact. */
static float value_at(int rank, int64_t i)
{
    return (float)((i * 7 + rank * 13) % 31 - 15);
}

static float expected_at(int size, int64_t i, mtp_reduce reduce)
{
    float result = value_at(0, i);
    for (int rank = 1; rank < size; rank++) {
        const float value = value_at(rank, i);
        if (reduce == MTP_REDUCE_SUM)
            result += value;
        else
            result = reduce == MTP_REDUCE_MAX ? fmaxf(result, value) : fminf(result, value);
    }
    return result;
}

static void check_all_reduce(mtp_comm *comm, int64_t count, mtp_dtype dtype, mtp_reduce reduce)
{
    const mtp_comm_place place = mtp_comm_where(comm);
    float *values = malloc((size_t)(count + 1) * sizeof *values);
    void *data = malloc((size_t)(count + 1) * sizeof *values);
    for (int64_t i = 0; i < count; i++) values[i] = value_at(place.rank, i);
    mtp__real_from_f32(data, dtype, values, count);
    CHECK(mtp_comm_all_reduce(comm, data, count, dtype, reduce) == MTP_OK);
    mtp__real_to_f32(values, data, dtype, count);
    for (int64_t i = 0; i < count; i++) CHECK(values[i] == expected_at(place.world_size, i, reduce));
    free(data);
    free(values);
}

static void all_operations(mtp_comm *comm, int out)
{
    static const int64_t counts[] = {0, 1, 3, 1000, 70001};
    const mtp_comm_place place = mtp_comm_where(comm);
    (void)out;
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        for (int reduce = MTP_REDUCE_SUM; reduce <= MTP_REDUCE_MIN; reduce++) {
            check_all_reduce(comm, counts[i], MTP_F32, (mtp_reduce)reduce);
            check_all_reduce(comm, counts[i], MTP_BF16, (mtp_reduce)reduce);
        }
    for (int root = 0; root < place.world_size; root++) {
        int32_t data[300] = {0};
        for (int i = 0; place.rank == root && i < 300; i++) data[i] = i + root;
        CHECK(mtp_comm_broadcast(comm, data, sizeof data, root) == MTP_OK);
        for (int i = 0; i < 300; i++) CHECK(data[i] == i + root);
    }
    const int16_t mine[3] = {(int16_t)place.rank, 5, (int16_t)(10 * place.rank)};
    int16_t gathered[3 * RANKS_MAX + 1];
    gathered[3 * place.world_size] = 77;
    CHECK(mtp_comm_all_gather(comm, mine, sizeof mine, gathered) == MTP_OK);
    for (int rank = 0; rank < place.world_size; rank++)
        CHECK(gathered[3 * rank] == rank && gathered[3 * rank + 1] == 5 && gathered[3 * rank + 2] == 10 * rank);
    CHECK(gathered[3 * place.world_size] == 77);
    float nan_of_one = place.rank == place.world_size - 1 ? NAN : 1;
    CHECK(mtp_comm_all_reduce(comm, &nan_of_one, 1, MTP_F32, MTP_REDUCE_MAX) == MTP_OK);
    CHECK(isnan(nan_of_one));
    CHECK(mtp_comm_broadcast(comm, gathered, 1, place.world_size) == MTP_E_ARGUMENT);
    CHECK(mtp_comm_all_reduce(comm, gathered, 1, MTP_I32, MTP_REDUCE_SUM) == MTP_E_ARGUMENT);
    CHECK(mtp_comm_barrier(comm) == MTP_OK);
}

/* Several started, then waited for out of order, while a caller computes. */
static void in_flight(mtp_comm *comm, int out)
{
    enum { BUCKETS = 6, VALUES = 5000 };
    static float data[BUCKETS][VALUES];
    mtp_comm_request *requests[BUCKETS];
    const mtp_comm_place place = mtp_comm_where(comm);
    (void)out;
    for (int bucket = 0; bucket < BUCKETS; bucket++) {
        for (int64_t i = 0; i < VALUES; i++) data[bucket][i] = value_at(place.rank, i + bucket);
        CHECK(mtp_comm_all_reduce_start(comm, data[bucket], VALUES, MTP_F32, MTP_REDUCE_SUM, &requests[bucket]) ==
              MTP_OK);
    }
    CHECK(mtp_comm_barrier(comm) == MTP_OK);
    for (int bucket = BUCKETS - 1; bucket >= 0; bucket--) {
        CHECK(mtp_comm_wait(comm, requests[bucket]) == MTP_OK);
        for (int64_t i = 0; i < VALUES; i++)
            CHECK(data[bucket][i] == expected_at(place.world_size, i + bucket, MTP_REDUCE_SUM));
    }
}

/* Numbers whose sum depends on the order. */
static void inexact_sum(mtp_comm *comm, int out)
{
    float data[500];
    const mtp_comm_place place = mtp_comm_where(comm);
    test_rng rng = {(uint64_t)place.rank + 11};
    test_fill(&rng, data, 500, 1000.0f / (float)(place.rank + 3));
    /* ranks arrive in another order than they are numbered */
    nanosleep(&(struct timespec){.tv_nsec = 3000000L * (place.world_size - place.rank)}, NULL);
    CHECK(mtp_comm_all_reduce(comm, data, 500, MTP_F32, MTP_REDUCE_SUM) == MTP_OK);
    CHECK(write(out, data, sizeof data) == (ssize_t)sizeof data);
}

static void results(void **state)
{
    (void)state;
    for (int size = 2; size <= RANKS_MAX; size++) {
        world own = {.size = size, .seconds = 60, .body = all_operations, .own_store = size == 2};
        run_world(&own);
        assert_all_ended_well(&own);
        own.body = in_flight;
        run_world(&own);
        assert_all_ended_well(&own);
    }
}

static void same_bits(void **state)
{
    (void)state;
    for (int size = 2; size <= RANKS_MAX; size++) {
        world first = {.size = size, .seconds = 60, .body = inexact_sum}, second = first;
        run_world(&first);
        run_world(&second);
        assert_all_ended_well(&first);
        assert_all_ended_well(&second);
        assert_int_equal(first.received_size[0], 500 * sizeof(float));
        for (int rank = 0; rank < size; rank++) {
            assert_memory_equal(first.received[rank], first.received[0], 500 * sizeof(float));
            assert_memory_equal(second.received[rank], first.received[0], 500 * sizeof(float));
        }
    }
}

/* ---- faults --------------------------------------------------------------------------------------------------- */

enum { VICTIM = 1 };

/* The others say what went wrong, twice: the second operation fails at once with the same. */
static void tell_failure(mtp_comm *comm, int out)
{
    float data[100] = {0};
    CHECK(mtp_comm_all_reduce(comm, data, 100, MTP_F32, MTP_REDUCE_SUM) == MTP_E_BACKEND);
    const char *message = mtp_last_error()->message;
    CHECK(write(out, message, strlen(message) + 1) > 0);
    const int64_t start = mtp__net_now();
    CHECK(mtp_comm_barrier(comm) == MTP_E_BACKEND);
    CHECK(mtp__net_now() - start < 1000);
}

static void killed_body(mtp_comm *comm, int out)
{
    if (mtp_comm_where(comm).rank == VICTIM) raise(SIGKILL);
    tell_failure(comm, out);
}

static void hanging_body(mtp_comm *comm, int out)
{
    /* longer than the limit and the time to report; then it ends by itself */
    if (mtp_comm_where(comm).rank == VICTIM) {
        sleep(15);
        _exit(0);
    }
    tell_failure(comm, out);
}

static void assert_named(const world *own, const char *how)
{
    const char *expected = test_path("%s: rank 1 (", how);
    for (int rank = 0; rank < own->size; rank++) {
        if (rank == VICTIM) continue;
        assert_int_equal(own->status[rank], 0);
        if (!strstr(own->received[rank], expected)) fail_msg("rank %d says: %s", rank, own->received[rank]);
    }
}

static void killed(void **state)
{
    (void)state;
    world own = {.size = 3, .seconds = 20, .body = killed_body, .own_store = true};
    run_world(&own);
    assert_true(WIFSIGNALED(own.status[VICTIM]));
    assert_named(&own, "dead, stopped or ended");
}

static void hanging(void **state)
{
    (void)state;
    world own = {.size = 3, .seconds = 5, .body = hanging_body, .own_store = true};
    run_world(&own);
    assert_named(&own, "alive, but hangs or is busy elsewhere");
}

/* Ranks that never meet: the others did not start. */
static void missing_rank(void **state)
{
    (void)state;
    const mtp_comm_options options = {.seconds = 0.3};
    mtp_comm *comm;
    setenv("RANK", "1", 1);
    setenv("LOCAL_RANK", "1", 1);
    set_number("WORLD_SIZE", 2);
    set_number("LOCAL_WORLD_SIZE", 2);
    unsetenv("MTP_RDZV_ENDPOINT");
    set_number("MTP_RDZV_PORT", free_port());
    assert_fails(mtp_comm_create(&options, &comm), MTP_E_IO, "rank 1 of 2: the store at 127.0.0.1:");
    assert_null(comm);
}

static void alone(void **state)
{
    (void)state;
    const mtp_comm_options options = {.seconds = 1};
    mtp_comm *comm;
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
    assert_ok(mtp_comm_create(&options, &comm));
    assert_int_equal(mtp_comm_where(comm).world_size, 1);
    all_operations(comm, -1);
    in_flight(comm, -1);
    mtp_comm_free(comm);
    mtp_comm_free(NULL);
}

int main(void)
{
    setenv("TORCHELASTIC_RUN_ID", "test", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(results), cmocka_unit_test(same_bits),    cmocka_unit_test(killed),
        cmocka_unit_test(hanging), cmocka_unit_test(missing_rank), cmocka_unit_test(alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
