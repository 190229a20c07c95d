/* Protects: a run that launches the next step before it reads the results of the last one is the run that reads them at
 * once: the same metrics, bad steps and weights, to the last bit; so is one that was stopped and goes on. On a GPU
 * where there is one; else on the CPU, where results are always read at once. */
#include "support.h"

#include <stdlib.h>

#include "run/trainer.h"
#include "train.h"

/* Two documents, a step for each of them, and one of the two is bad. */
enum { STEPS = 4 };

static mtp_train_config *config_of(const char *run, const char *more)
{
    const char *data = test_path("train_data=[\"%s\", \"%s\"]", MTP_TEST_DATA "/sample/train/sample_0001.safetensors",
                                 test_huge_sample(4));
    return test_config(run, test_no_gpu() ? "device=cpu" : "device=cuda:0", data, "tokens_per_batch=320",
                       "num_speculative_steps=1", test_path("max_steps=%d", STEPS), "resume=auto", "keep_last=0", more);
}

static const char *train(const char *name, const char *more)
{
    const char *run = test_path("%s/%s", test_dir(), name);
    mtp_train_config *config = config_of(run, more);
    mtp_train_result result;
    assert_ok(test_train(config, &result));
    assert_int_equal(result.step, STEPS);
    assert_int_equal(result.bad_steps, 2);
    mtp_train_config_free(config);
    return run;
}

/* bad_steps.jsonl up to the time of each line. */
static char *bad_steps(const char *run)
{
    char *text = test_read(test_path("%s/bad_steps.jsonl", run), NULL), *to = text;
    for (const char *from = text, *end; (end = strstr(from, "\"time\"")); from = strchr(end, '\n') + 1) {
        memmove(to, from, (size_t)(end - from));
        to += end - from;
    }
    *to = '\0';
    return text;
}

static void same_run(const char *one, const char *other)
{
    char *a = test_train_metrics(one), *b = test_train_metrics(other);
    char *c = bad_steps(one), *d = bad_steps(other);
    assert_string_equal(a, b);
    assert_string_equal(c, d);
    assert_non_null(strstr(c, "huge.safetensors"));
    const char *last = test_path("checkpoints/step-%08d", STEPS);
    test_same_checkpoint(test_path("%s/%s", one, last), test_path("%s/%s", other, last));
    free(a), free(b), free(c), free(d);
}

typedef struct stopper {
    int asked, stop_at;
} stopper;

static bool stop_at(void *user)
{
    stopper *s = user;
    return ++s->asked >= s->stop_at;
}

static void the_run_is_the_same(void **state)
{
    (void)state;
    const char *late = train("late", "save_steps=0");
    same_run(late, train("at_once", "save_steps=1")); /* a checkpoint needs what is before it */
    const char *stopped = test_path("%s/stopped", test_dir());
    mtp_train_config *config = config_of(stopped, "save_steps=0");
    stopper s = {.stop_at = 3};
    const mtp_train_options options = {.stop = stop_at, .user = &s};
    mtp_train_result result;
    assert_fails(mtp_train(config, &options, &result), MTP_E_INTERRUPTED, "interrupted at step 2");
    assert_ok(test_train(config, &result));
    assert_int_equal(result.resumed_from, 2);
    mtp_train_config_free(config);
    same_run(late, stopped);
}

static void too_many_bad_steps_end_it(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    mtp_train_config *config = config_of(run, "max_bad_steps=0");
    mtp_train_result result;
    assert_fails(test_train(config, &result), MTP_E_DATA, "huge.safetensors");
    assert_int_equal(result.bad_steps, 1);
    char *names = bad_steps(run), *metrics = test_train_metrics(run);
    assert_non_null(strstr(names, "\"bad_steps\""));
    assert_null(strstr(strstr(names, "\"bad_steps\"") + 1, "\"bad_steps\"")); /* nothing of the step behind it */
    assert_int_equal(result.step, (int64_t)strtoll(strstr(names, "\"step\":") + 7, NULL, 10) - 1);
    free(names), free(metrics);
    mtp_train_config_free(config);
}

/* Where the device works beside the host a step is launched before the one in front of it is read; and a trainer can be
 * closed with one under way. */
static void a_step_is_launched_before_the_last_is_read(void **state)
{
    (void)state;
    mtp_train_config *config = config_of(test_path("%s/run", test_dir()), "seed=7");
    const mtp_comm_options comm = {.seconds = 100};
    mtp__ranks alone = {0};
    const mtp__trainer_options options = {.ranks = &alone};
    mtp__trainer trainer;
    mtp__update update;
    bool stopped = false;
    assert_ok(mtp__ranks_open(&comm, &alone));
    assert_ok(mtp__trainer_open(config, &options, &trainer));
    assert_int_equal(trainer.lag, trainer.context->ops->memory_is_host ? 0 : 1);
    for (int64_t step = 0; step < 2; step++) {
        assert_ok(mtp__trainer_launch(&trainer, step, false, &stopped));
        if (mtp__trainer_flying(&trainer) <= trainer.lag) continue;
        assert_ok(mtp__trainer_read(&trainer, &update));
        assert_int_equal(update.step, step + 1 - trainer.lag);
    }
    assert_int_equal(mtp__trainer_flying(&trainer), trainer.lag);
    assert_ok(mtp__trainer_launch(&trainer, 2, true, &stopped));
    assert_true(stopped);
    assert_int_equal(mtp__trainer_flying(&trainer), trainer.lag);
    mtp__trainer_close(&trainer);
    mtp__ranks_close(&alone);
    mtp_train_config_free(config);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_run_is_the_same),
        cmocka_unit_test(too_many_bad_steps_end_it),
        cmocka_unit_test(a_step_is_launched_before_the_last_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
