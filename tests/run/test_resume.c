/* Protects: a run that is stopped and resumed is the run that was never stopped, bit for bit: weights, moments,
 * metrics; and one that would not be is refused with the list of differences. */
#include "support.h"

#include <sys/stat.h>
#include <unistd.h>

#include "train.h"

static const char *checkpoint(const char *run, int step)
{
    return test_path("%s/checkpoints/step-%08d", run, step);
}

static void same_metrics(const char *one, const char *other)
{
    char *a = test_train_metrics(one), *b = test_train_metrics(other);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

/* 20 steps = 10 + 10. Two micro-batches a step and three an epoch, so the resume falls into the middle of an epoch,
 * which has another order than the first; every schedule, and evaluations on the way. */
static void check_resume(const char *scheduler)
{
    const char *whole = test_path("%s/whole", test_dir()), *parts = test_path("%s/parts", test_dir());
    const char *const overrides[] = {test_path("lr_scheduler_type=\"%s\"", scheduler),
                                     "max_steps=20",
                                     "warmup_steps=3",
                                     "gradient_accumulation_steps=2",
                                     "eval_steps=5",
                                     test_path("eval_data=[\"%s/sample/eval/sample_0100.safetensors\"]", MTP_TEST_DATA),
                                     "save_steps=10",
                                     "keep_best=true",
                                     NULL};
    test_train_ok(whole, overrides);
    test_copy(whole, parts);
    /* the first half as it was left: the checkpoint of step 10, and metrics that had gone further */
    assert_int_equal(system(test_path("rm -r %s/checkpoints/step-00000020 %s/export", parts, parts)), 0);
    mtp_train_config *config = test_train_config(parts, overrides);
    free(config->resume);
    config->resume = strdup("auto");
    mtp_train_result result;
    assert_ok(test_train(config, &result));
    mtp_train_config_free(config);
    assert_int_equal(result.resumed_from, 10);
    assert_int_equal(result.step, 20);
    test_same_checkpoint(checkpoint(whole, 20), checkpoint(parts, 20));
    same_metrics(whole, parts);
}

static void whole_equals_parts_constant(void **state)
{
    (void)state;
    check_resume("constant");
}

static void whole_equals_parts_cosine(void **state)
{
    (void)state;
    check_resume("cosine");
}

/* Ten steps and ten more of a constant schedule are twenty. */
static void constant_run_can_be_lengthened(void **state)
{
    (void)state;
    const char *whole = test_path("%s/whole", test_dir()), *parts = test_path("%s/parts", test_dir());
    test_run_training(whole, "max_steps=8");
    const mtp_train_result first = test_run_training(parts, "max_steps=4");
    assert_int_equal(first.step, 4);
    assert_int_equal(first.resumed_from, -1);
    const mtp_train_result second = test_run_training(parts, "max_steps=8", "resume=auto");
    assert_int_equal(second.step, 8);
    assert_int_equal(second.resumed_from, 4);
    test_same_checkpoint(checkpoint(whole, 8), checkpoint(parts, 8));
    same_metrics(whole, parts);
}

static void refused(const char *run, const char *override, mtp_status status, const char *message)
{
    mtp_train_config *config = test_config(run, "resume=auto", override);
    assert_fails(test_train(config, NULL), status, message);
    mtp_train_config_free(config);
}

static void changed_settings_are_refused(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=2", "lr_scheduler_type=\"cosine\"");
    refused(run, "learning_rate=1e-3", MTP_E_CONFIG, "optimizer.learning_rate: 0.003 then, 0.001 now");
    refused(run, "learning_rate=1e-3", MTP_E_CONFIG, "optimizer.lr_scheduler_type: \"cosine\" then, \"constant\" now");
    refused(run, "seed=8", MTP_E_CONFIG, "train.seed: 7 then, 8 now");
    refused(run, "tokens_per_batch=700", MTP_E_CONFIG, "data.tokens_per_batch: 640 then, 700 now");
    refused(run, test_path("train_data=[\"%s/sample/train/sample_0000.safetensors\"]", MTP_TEST_DATA), MTP_E_CONFIG,
            "the training data: 6 samples (fingerprint");
    mtp_train_config *config = test_config(run, "resume=auto", "lr_scheduler_type=\"cosine\"", "max_steps=4");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "train.max_steps: 2 then, 4 now");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "spreads the learning rate over the whole run");
    mtp_train_config_free(config);
    config = test_config(run, "resume=auto", "lr_scheduler_type=\"cosine\"", "max_steps=1");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "has done 2 steps, the run shall have 1");
    mtp_train_config_free(config);
}

/* What does not touch the numbers may change. */
static void free_settings_may_change(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=2");
    test_run_training(run, "max_steps=3", "resume=auto", "save_steps=1", "prefetch=4", "logging_steps=2");
}

static void wsd_can_be_lengthened_before_its_decay(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=4", "lr_scheduler_type=\"wsd\"", "lr_decay_ratio=0.5", "save_steps=1",
                      "keep_last=0");
    mtp_train_config *config =
        test_config(run, "resume=auto", "max_steps=8", "lr_scheduler_type=\"wsd\"", "lr_decay_ratio=0.5");
    assert_fails(test_train(config, NULL), MTP_E_CONFIG, "train.max_steps: 4 then, 8 now");
    mtp_train_config_free(config);
    const char *from = test_path("resume=%s", checkpoint(run, 2));
    const mtp_train_result result =
        test_run_training(run, from, "max_steps=5", "lr_scheduler_type=\"wsd\"", "lr_decay_ratio=0.5");
    assert_int_equal(result.resumed_from, 2);
    assert_int_equal(result.step, 5);
}

/* Going back to an earlier checkpoint sets the later ones aside: they are of another history. */
static void later_checkpoints_are_set_aside(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=4", "save_steps=1", "keep_last=0");
    const char *from = test_path("resume=%s", checkpoint(run, 2));
    const mtp_train_result result = test_run_training(run, from, "max_steps=3");
    assert_int_equal(result.resumed_from, 2);
    assert_int_equal(access(checkpoint(run, 3), F_OK), 0);
    assert_int_not_equal(access(checkpoint(run, 4), F_OK), 0);
    assert_int_equal(access(test_path("%s.superseded", checkpoint(run, 4)), F_OK), 0);
    const mtp_train_result next = test_run_training(run, "resume=auto", "max_steps=3");
    assert_int_equal(next.resumed_from, 3);
}

/* A checkpoint of one run can begin another. */
static void another_run_can_go_on(void **state)
{
    (void)state;
    const char *one = test_path("%s/one", test_dir()), *two = test_path("%s/two", test_dir());
    test_run_training(one, "max_steps=2");
    const mtp_train_result result = test_run_training(two, test_path("resume=%s", checkpoint(one, 2)), "max_steps=4");
    assert_int_equal(result.resumed_from, 2);
    assert_int_equal(access(checkpoint(two, 4), F_OK), 0);
    mtp_train_config *config = test_config(two, test_path("resume=%s", checkpoint(one, 2)));
    assert_fails(test_train(config, NULL), MTP_E_EXISTS, "holds another run");
    mtp_train_config_free(config);
}

static void a_run_is_not_begun_twice(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    const mtp_train_result none =
        test_run_training(run, "resume=auto", "max_steps=2"); /* auto begins what is not there */
    assert_int_equal(none.resumed_from, -1);
    mtp_train_config *config = test_config(run, "max_steps=2");
    assert_fails(test_train(config, NULL), MTP_E_EXISTS, "holds a run; go on with it (--resume auto)");
    mtp_train_config_free(config);
    const char *stranger = test_path("%s/stranger", test_dir());
    assert_int_equal(mkdir(stranger, 0777), 0);
    test_write(test_path("%s/metrics.jsonl", stranger), "{}\n", 3);
    config = test_config(stranger, "resume=auto");
    assert_fails(test_train(config, NULL), MTP_E_EXISTS, "is not a run of mtp");
    mtp_train_config_free(config);
}

/* What a save that was killed left is gone before the free disk is counted, not only after the next save. */
static void leftovers_are_removed_first(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    test_run_training(run, "max_steps=2");
    const char *leftover = test_path("%s/checkpoints/.step-00000009.tmp-1", run);
    assert_int_equal(mkdir(leftover, 0777), 0);
    test_write(test_path("%s/.shard-00000-of-00001.safetensors.tmp-1-0", leftover), "half", 4);
    mtp_train_config *config = test_config(run, "max_steps=2", "resume=auto");
    assert_ok(test_train(config, NULL)); /* nothing is left to do, so nothing is saved */
    mtp_train_config_free(config);
    assert_int_equal(access(leftover, F_OK), -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whole_equals_parts_constant),     cmocka_unit_test(whole_equals_parts_cosine),
        cmocka_unit_test(constant_run_can_be_lengthened),  cmocka_unit_test(changed_settings_are_refused),
        cmocka_unit_test(free_settings_may_change),        cmocka_unit_test(wsd_can_be_lengthened_before_its_decay),
        cmocka_unit_test(later_checkpoints_are_set_aside), cmocka_unit_test(another_run_can_go_on),
        cmocka_unit_test(a_run_is_not_begun_twice),        cmocka_unit_test(leftovers_are_removed_first),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
