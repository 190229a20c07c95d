/* Protects: the library keeps no state of its own: two drafters trained at the same time in two threads of one process
 * come out as the ones that were trained alone. */
#include "support.h"

#include <pthread.h>

#include "train.h"

typedef struct job {
    mtp_train_config *config;
    mtp_status status;
    char message[1024];
} job;

static void *work(void *argument)
{
    job *j = argument;
    j->status = test_train(j->config, NULL);
    if (j->status != MTP_OK) snprintf(j->message, sizeof j->message, "%.1000s", mtp_last_error()->message);
    return NULL;
}

static mtp_train_config *config_of(const char *run, int which)
{
    static const char dense[] = "drafter=\"" MTP_TEST_DATA "/sample/drafter_init_dense\"";
    return which == 0 ? test_config(run, "num_threads=2")
                      : test_config(run, "num_threads=2", dense, "seed=8", "feeding=self");
}

static void together_is_alone(void **state)
{
    (void)state;
    pthread_t threads[2];
    job jobs[2];
    const char *alone[2], *together[2];
    for (int i = 0; i < 2; i++) {
        alone[i] = test_path("%s/alone%d", test_dir(), i);
        together[i] = test_path("%s/together%d", test_dir(), i);
        mtp_train_config *config = config_of(alone[i], i);
        assert_ok(test_train(config, NULL));
        mtp_train_config_free(config);
    }
    for (int i = 0; i < 2; i++) {
        jobs[i] = (job){.config = config_of(together[i], i)};
        assert_int_equal(pthread_create(&threads[i], NULL, work, &jobs[i]), 0);
    }
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_join(threads[i], NULL), 0);
    for (int i = 0; i < 2; i++) {
        if (jobs[i].status != MTP_OK) fail_msg("thread %d: %s", i, jobs[i].message);
        mtp_train_config_free(jobs[i].config);
        test_same_checkpoint(test_path("%s/checkpoints/step-00000006", alone[i]),
                             test_path("%s/checkpoints/step-00000006", together[i]));
        char *a = test_train_metrics(alone[i]), *b = test_train_metrics(together[i]);
        assert_string_equal(a, b);
        free(a);
        free(b);
    }
}

/* The same bits with one thread as with three: nothing depends on how the work was divided. */
static void threads_do_not_matter(void **state)
{
    (void)state;
    const char *one = test_path("%s/one", test_dir()), *three = test_path("%s/three", test_dir());
    test_run_training(one, "num_threads=1");
    test_run_training(three, "num_threads=3");
    test_same_checkpoint(test_path("%s/checkpoints/step-00000006", one),
                         test_path("%s/checkpoints/step-00000006", three));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(together_is_alone),
        cmocka_unit_test(threads_do_not_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
