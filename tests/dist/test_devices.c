/* Protects: ranks whose device memory is not host memory: gradients and, with shared moments, weights travel by NCCL or
 * through host memory over Gloo, and the losses are those of one process on the same device. Both ranks use the first
 * GPU, which NCCL takes in the emulator's build only. */
#include "dist.h"

static void two_ranks_on_a_gpu(void **state)
{
    (void)state;
    const char *alone = dist_train_with(1, "device=cuda:0", dist_max_steps(2), dist_budget(3), dist_accumulation(2));
    const char *both = dist_train_with(2, "device=cuda:0", dist_max_steps(2), dist_budget(3), "bucket_mib=1",
                                       "distributed.backend=gloo");
    const char *shared = dist_train_with(2, "device=cuda:0", dist_max_steps(2), dist_budget(3), "bucket_mib=1",
                                         "distributed.backend=gloo", "zero_stage=1");
    dist_same_training(alone, both, 2);
#ifdef MTP_TEST_EMULATOR
    /* a sum of two does not depend on the order */
    const char *nccl = dist_train_with(2, "device=cuda:0", dist_max_steps(2), dist_budget(3), "bucket_mib=1",
                                       "zero_stage=1", "distributed.backend=nccl");
    char *c = test_train_metrics(nccl), *d = test_train_metrics(both);
    assert_string_equal(c, d);
    free(c);
    free(d);
#endif
    char *a = test_train_metrics(both), *b = test_train_metrics(shared);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

/* The copies that products take are renewed where another rank has updated the masters. */
static void bf16_on_two_ranks(void **state)
{
    (void)state;
    const char *runs[2];
    for (int stage = 0; stage < 2; stage++)
        runs[stage] = dist_train_with(2, "device=cuda:0", "precision=bf16", dist_max_steps(3), dist_budget(3),
                                      "distributed.backend=gloo", test_path("zero_stage=%d", stage));
    char *a = test_train_metrics(runs[0]), *b = test_train_metrics(runs[1]);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

/* Why the test cannot be made here; NULL when it can. */
static const char *obstacle(void)
{
#ifndef MTP_TEST_GLOO
    return "this build has no Gloo (MTP_GLOO=OFF)";
#endif
    return test_no_gpu();
}

int main(void)
{
    if (obstacle()) {
        printf("skipped: %s\n", obstacle());
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_ranks_on_a_gpu),
        cmocka_unit_test(bf16_on_two_ranks),
    };
    return cmocka_run_group_tests(tests, dist_setup, NULL);
}
