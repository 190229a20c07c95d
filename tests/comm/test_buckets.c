/* Protects: gradients summed in buckets are the sums over all ranks, whatever the size of the buckets and however they
 * became ready, also for a rank that says nothing before the end; the same bits on all ranks; also through a copy in
 * host memory; values of one rank reach the others. */
#include "support.h"

#include "comm/buckets.h"

enum { COUNT = 1000 };

#define CHECK(condition)                                                                                     \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            return fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, mtp_last_error()->message), 1; \
    } while (0)

/* Whole numbers, whose sums are exact. */
static float number(int rank, int64_t i, int round)
{
    return (float)((i * 7 + rank * 131 + round * 17) % 1000);
}

static int sums_are_right(mtp_comm *comm, mtp_context *context, bool staged, int64_t bucket)
{
    static float data[COUNT];
    const mtp_comm_place place = mtp_comm_where(comm);
    mtp__buckets *buckets = NULL;
    CHECK(mtp__buckets_create(comm, context, staged, data, COUNT, bucket, &buckets) == MTP_OK);
    for (int round = 0; round < 3; round++) {
        for (int64_t i = 0; i < COUNT; i++) data[i] = number(place.rank, i, round);
        /* each rank in pieces of its own; the last one not at all */
        for (int64_t final = 0; place.rank + 1 < place.world_size && final <= COUNT; final += 90 * (place.rank + 1))
            mtp__buckets_ready(buckets, final);
        CHECK(mtp__buckets_finish(buckets) == MTP_OK);
        for (int64_t i = 0; i < COUNT; i++) {
            float sum = 0;
            for (int rank = 0; rank < place.world_size; rank++) sum += number(rank, i, round);
            CHECK(data[i] == sum);
        }
    }
    mtp__buckets_free(buckets);
    return 0;
}

static int bits_are_the_same(mtp_comm *comm, mtp_context *context)
{
    static float data[COUNT], all[8 * COUNT];
    const mtp_comm_place place = mtp_comm_where(comm);
    mtp__buckets *buckets = NULL;
    test_rng rng = {(uint64_t)place.rank + 1};
    test_fill(&rng, data, COUNT, 1.0f);
    CHECK(mtp__buckets_create(comm, context, false, data, COUNT, 300, &buckets) == MTP_OK);
    CHECK(mtp__buckets_finish(buckets) == MTP_OK);
    mtp__buckets_free(buckets);
    CHECK(mtp_comm_all_gather(comm, data, sizeof data, all) == MTP_OK);
    for (int rank = 0; rank < place.world_size; rank++) CHECK(memcmp(all + rank * COUNT, data, sizeof data) == 0);
    for (int staged = 0; staged < 2; staged++) {
        for (int64_t i = 0; i < COUNT; i++) data[i] = number(place.rank, i, 0);
        CHECK(mtp__broadcast_values(comm, context, staged, data + 10, 20 * sizeof *data, 1) == MTP_OK);
        CHECK(mtp__broadcast_values(comm, context, staged, data, 0, 0) == MTP_OK);
        for (int64_t i = 0; i < COUNT; i++) CHECK(data[i] == number(i >= 10 && i < 30 ? 1 : place.rank, i, 0));
    }
    return 0;
}

/* The program of a rank. */
static int be_a_rank(void)
{
    const mtp_comm_options options = {.seconds = 60};
    const mtp_context_options context_options = {.num_threads = 1};
    const int64_t sizes[] = {COUNT, 2 * COUNT, 64, 37};
    mtp_comm *comm = NULL;
    mtp_context *context = NULL;
    CHECK(mtp_context_create(&context_options, &context) == MTP_OK);
    CHECK(mtp_comm_create(&options, &comm) == MTP_OK);
    int failed = bits_are_the_same(comm, context);
    for (int staged = 0; staged < 2 && !failed; staged++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes && !failed; i++)
            failed = sums_are_right(comm, context, staged, sizes[i]);
    mtp_comm_free(comm);
    mtp_context_free(context);
    return failed;
}

static void with_ranks(int world_size)
{
#ifndef MTP_TEST_GLOO
    print_message("skipped: this build has no Gloo (MTP_GLOO=OFF)\n");
    skip();
#endif
    const char *const self = test_self();
    test_expect(test_execute((const char *const[]){MTP_TEST_LAUNCHER, "--nproc-per-node", test_path("%d", world_size),
                                                   self, "rank", NULL}),
                0, "", "");
}

static void two(void **state)
{
    (void)state;
    with_ranks(2);
}

static void four(void **state)
{
    (void)state;
    with_ranks(4);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "rank") == 0) return be_a_rank();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two),
        cmocka_unit_test(four),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
