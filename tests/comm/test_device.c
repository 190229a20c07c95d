/* Protects: sums and broadcasts between devices of several processes by NCCL, here its twin in the emulator: exact
 * results in device memory, behind the work that was launched before; a rank that dies ends them on the others; what a
 * device cannot do is said. */
#include "support.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/context.h"
#include "base/real.h"
#include "comm/net.h"
#include "mtp/comm.h"

enum { RANKS = 3, VICTIM = 1, COUNT = 5000, WRONG = 3, NO_DEVICE = 4 };

typedef int (*body_function)(mtp_comm *ranks, mtp_comm *devices, mtp_context *context);

static int wrong(int line, const char *what)
{
    fprintf(stderr, "rank %s: line %d: %s: %s\n", getenv("RANK"), line, what, mtp_last_error()->message);
    return WRONG;
}
#define NEED(condition) \
    if (!(condition)) return wrong(__LINE__, #condition)

static int be_rank(int rank, body_function body)
{
    char number[16];
    mtp_comm *ranks, *devices;
    mtp_context *context = NULL;
    const mtp_comm_options options = {.seconds = 10, .heartbeat_seconds = 0.2};
    const mtp_context_options cuda = {.device = "cuda:0"};
    snprintf(number, sizeof number, "%d", rank);
    setenv("RANK", number, 1);
    setenv("LOCAL_RANK", number, 1);
    NEED(mtp_comm_create(&options, &ranks) == MTP_OK);
    NEED(mtp_context_create(&cuda, &context) == MTP_OK);
    NEED(mtp_comm_create_device(ranks, context, &devices) == MTP_OK);
    const int code = body(ranks, devices, context);
    mtp_comm_free(devices);
    mtp_context_free(context);
    mtp_comm_free(ranks);
    return code;
}

static void run_world(body_function body, int status[RANKS])
{
#if !defined(MTP_TEST_GLOO) || !defined(MTP_TEST_EMULATOR)
    (void)body, (void)status, (void)be_rank;
    print_message("skipped: devices of several ranks on one machine are those of the emulator (MTP_EMULATOR=ON)\n");
    skip();
#else
    int fd, port;
    pid_t pids[RANKS];
    assert_ok(mtp__net_listen("127.0.0.1", 0, &fd, &port));
    close(fd);
    setenv("MTP_RDZV_PORT", test_path("%d", port), 1);
    setenv("WORLD_SIZE", test_path("%d", RANKS), 1);
    setenv("LOCAL_WORLD_SIZE", test_path("%d", RANKS), 1);
    for (int rank = 0; rank < RANKS; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) _exit(be_rank(rank, body));
        assert_true(pids[rank] > 0);
    }
    for (int rank = 0; rank < RANKS; rank++) assert_int_equal(waitpid(pids[rank], &status[rank], 0), pids[rank]);
#endif
}

static int exact(mtp_comm *ranks, mtp_comm *devices, mtp_context *context)
{
    const mtp_backend *ops = context->ops;
    const int rank = mtp_comm_where(devices).rank;
    static float values[COUNT];
    static uint16_t halves[COUNT];
    void *memory = NULL;
    (void)ranks;
    NEED(ops->memory_alloc(context->device, sizeof values, &memory) == MTP_OK);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) values[i] = (float)((i + round) % 17 * (rank + 1));
        NEED(ops->upload(context->device, memory, values, sizeof values) == MTP_OK);
        /* launched, and not waited for: the sum begins behind it */
        NEED(ops->memory_zero(context->device, memory, 8) == MTP_OK);
        NEED(mtp_comm_all_reduce(devices, memory, COUNT, MTP_F32, MTP_REDUCE_SUM) == MTP_OK);
        NEED(ops->download(context->device, values, memory, sizeof values) == MTP_OK);
        for (int i = 0; i < COUNT; i++) NEED(values[i] == (i < 2 ? 0 : (float)((i + round) % 17 * 6)));
    }
    /* 1 + 2 + 3, 2 + 4 + 6 in bf16 */
    for (int i = 0; i < COUNT; i++) values[i] = (float)((i % 2 + 1) * (rank + 1));
    mtp__real_from_f32(halves, MTP_BF16, values, COUNT);
    NEED(ops->upload(context->device, memory, halves, sizeof halves) == MTP_OK);
    NEED(mtp_comm_all_reduce(devices, memory, COUNT, MTP_BF16, MTP_REDUCE_SUM) == MTP_OK);
    NEED(ops->download(context->device, halves, memory, sizeof halves) == MTP_OK);
    mtp__real_to_f32(values, halves, MTP_BF16, COUNT);
    for (int i = 0; i < COUNT; i++) NEED(values[i] == (float)(i % 2 + 1) * 6);
    for (int root = 0; root < RANKS; root++) {
        for (int i = 0; i < COUNT; i++) values[i] = (float)(rank * 1000 + i);
        NEED(ops->upload(context->device, memory, values, sizeof values) == MTP_OK);
        NEED(mtp_comm_broadcast(devices, memory, sizeof values, root) == MTP_OK);
        NEED(ops->download(context->device, values, memory, sizeof values) == MTP_OK);
        for (int i = 0; i < COUNT; i++) NEED(values[i] == (float)(root * 1000 + i));
    }
    ops->memory_free(context->device, memory);
    return 0;
}

/* Several at once, as the buckets of a backward pass. */
static int in_flight(mtp_comm *ranks, mtp_comm *devices, mtp_context *context)
{
    enum { PIECES = 8 };
    const mtp_backend *ops = context->ops;
    static float values[PIECES * COUNT];
    mtp_comm_request *requests[PIECES];
    void *memory = NULL;
    (void)ranks;
    NEED(ops->memory_alloc(context->device, sizeof values, &memory) == MTP_OK);
    for (int i = 0; i < PIECES * COUNT; i++) values[i] = (float)(i % 1000);
    NEED(ops->upload(context->device, memory, values, sizeof values) == MTP_OK);
    for (int piece = 0; piece < PIECES; piece++)
        NEED(mtp_comm_all_reduce_start(devices, (float *)memory + piece * COUNT, COUNT, MTP_F32, MTP_REDUCE_SUM,
                                       &requests[piece]) == MTP_OK);
    for (int piece = 0; piece < PIECES; piece++) NEED(mtp_comm_wait(devices, requests[piece]) == MTP_OK);
    NEED(ops->download(context->device, values, memory, sizeof values) == MTP_OK);
    for (int i = 0; i < PIECES * COUNT; i++) NEED(values[i] == (float)(i % 1000 * RANKS));
    ops->memory_free(context->device, memory);
    return 0;
}

static int refused(mtp_comm *ranks, mtp_comm *devices, mtp_context *context)
{
    float value = 1;
    (void)ranks, (void)context;
    NEED(mtp_comm_all_reduce(devices, &value, 1, MTP_F32, MTP_REDUCE_MAX) == MTP_E_UNSUPPORTED);
    NEED(strstr(mtp_last_error()->message, "devices add up"));
    /* no operation follows a failure */
    NEED(mtp_comm_barrier(devices) == MTP_E_UNSUPPORTED);
    return 0;
}

static int killed(mtp_comm *ranks, mtp_comm *devices, mtp_context *context)
{
    void *memory = NULL;
    mtp_status status = MTP_OK;
    (void)ranks;
    if (mtp_comm_where(devices).rank == VICTIM) raise(SIGKILL);
    NEED(context->ops->memory_alloc(context->device, COUNT * sizeof(float), &memory) == MTP_OK);
    for (int i = 0; i < 1000 && status == MTP_OK; i++)
        status = mtp_comm_all_reduce(devices, memory, COUNT, MTP_F32, MTP_REDUCE_SUM);
    NEED(status == MTP_E_BACKEND);
    context->ops->memory_free(context->device, memory);
    return 0;
}

static void results(void **state)
{
    (void)state;
    static const body_function bodies[] = {exact, in_flight, refused};
    int status[RANKS] = {0};
    for (size_t i = 0; i < sizeof bodies / sizeof *bodies; i++) {
        run_world(bodies[i], status);
        for (int rank = 0; rank < RANKS; rank++)
            if (status[rank] != 0) fail_msg("body %zu: rank %d has status %x", i, rank, (unsigned)status[rank]);
    }
}

static void a_death(void **state)
{
    (void)state;
    int status[RANKS] = {0};
    run_world(killed, status);
    for (int rank = 0; rank < RANKS; rank++)
        if (rank == VICTIM ? !WIFSIGNALED(status[rank]) : status[rank] != 0)
            fail_msg("rank %d has status %x", rank, (unsigned)status[rank]);
}

static void no_devices(void **state)
{
    (void)state;
    mtp_comm *ranks, *devices;
    mtp_context *context;
    unsetenv("WORLD_SIZE");
    unsetenv("RANK");
    unsetenv("LOCAL_RANK");
    assert_ok(mtp_comm_create(&(mtp_comm_options){.seconds = 1}, &ranks));
    assert_ok(mtp_context_create(&(mtp_context_options){.num_threads = 1}, &context));
    /* a world of one has nobody to exchange with, on any device */
    assert_ok(mtp_comm_create_device(ranks, context, &devices));
    float value = 3;
    assert_ok(mtp_comm_all_reduce(devices, &value, 1, MTP_F32, MTP_REDUCE_SUM));
    assert_true(value == 3);
    mtp_comm_free(devices);
    mtp_context_free(context);
    mtp_comm_free(ranks);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(results), cmocka_unit_test(a_death),
                                       cmocka_unit_test(no_devices)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
