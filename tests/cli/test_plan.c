/* Protects: mtp plan counts what a run allocates, from configurations alone. */
#include "support.h"

#include <jansson.h>
#include <unistd.h>

#include "base/arena.h"
#include "base/error.h"
#include "data/store.h"
#include "model/step.h"
#include "run/config.h"
#include "run/plan.h"
#include "run/trainer.h"
#include "train.h"

static json_t *plan_json(const char *config)
{
    test_run run = test_mtp("plan", config, "--json");
    if (run.exit_code != 0) fail_msg("exit code %d: %s", run.exit_code, run.err);
    json_t *plan = json_loads(run.out, 0, NULL);
    assert_non_null(plan);
    test_run_free(&run);
    return plan;
}

static int64_t bytes_of(const json_t *plan, const char *what)
{
    size_t index;
    json_t *line;
    json_array_foreach(json_object_get(plan, "memory"), index, line)
    {
        if (strcmp(json_string_value(json_object_get(line, "what")), what) == 0)
            return json_integer_value(json_object_get(line, "bytes"));
    }
    fail_msg("no line \"%s\"", what);
    return 0;
}

static void counts_what_is_allocated(void **state)
{
    (void)state;
    const char *run = test_path("%s/run", test_dir());
    json_t *plan = plan_json(test_train_file(run));
    mtp_train_config *config = test_config(run, "seed=7");
    mtp__ranks alone = {.world_size = 1};
    const mtp__trainer_options options = {.ranks = &alone};
    mtp__trainer trainer;
    assert_ok(mtp__trainer_open(config, &options, &trainer));
    int64_t values = 0;
    for (int64_t i = 0; i < trainer.drafter->num_params; i++) values += trainer.drafter->params[i].count;
    assert_int_equal(json_integer_value(json_object_get(plan, "parameters")), values);
    assert_int_equal(bytes_of(plan, "parameters"), 4 * values);
    assert_int_equal(json_integer_value(json_object_get(plan, "trained")), mtp_drafter_num_trained(trainer.drafter));
    assert_int_equal(bytes_of(plan, "gradients"), 4 * mtp_drafter_num_trained(trainer.drafter));
    assert_int_equal(bytes_of(plan, "optimizer moments"), (int64_t)trainer.optimizer->moment_bytes);
    mtp__arena arena;
    assert_ok(mtp__step_plan(&trainer.drafter->config, trainer.context, trainer.drafter->masters, &trainer.step_config,
                             MTP__STEP_TRAIN, &arena));
    for (int32_t i = 0; i < arena.num_labels; i++)
        assert_int_equal(bytes_of(plan, arena.labels[i].label), (int64_t)arena.labels[i].bytes);
    const mtp_loader_stats stats = mtp_loader_get_stats(trainer.loader);
    /* the plan does not know the data: it counts the most documents that a micro-batch could have, 40 bytes each */
    const int64_t foreseen = bytes_of(plan, "loader"), ring = (int64_t)stats.memory_bytes;
    const int64_t unknown =
        (config->prefetch + config->gradient_accumulation_steps + 1) * 40 * config->tokens_per_batch;
    if (ring > foreseen || ring < foreseen - unknown)
        fail_msg("loader: %lld foreseen, %lld taken", (long long)foreseen, (long long)ring);
    mtp__trainer_close(&trainer);
    mtp_train_config_free(config);
    json_decref(plan);
    assert_int_not_equal(access(run, F_OK), 0);
}

/* What ranks share: moments with zero_stage 1, the copy that a checkpoint is written from. */
static void a_rank_of_several_needs_less(void **state)
{
    (void)state;
    const char *config = test_train_file("out");
    json_t *alone = plan_json(config);
    test_run run = test_mtp("plan", config, "--json", "--world-size", "4", "--set", "zero_stage=1");
    assert_int_equal(run.exit_code, 0);
    json_t *four = json_loads(run.out, 0, NULL);
    assert_non_null(four);
    test_run_free(&run);
    assert_int_equal(bytes_of(four, "gradients"), bytes_of(alone, "gradients"));
    const int64_t moments = bytes_of(four, "optimizer moments"), all = bytes_of(alone, "optimizer moments");
    assert_true(4 * moments > all - all / 50 && 4 * moments < all + all / 50);
    assert_true(bytes_of(four, "checkpoint copy") <= bytes_of(alone, "checkpoint copy") / 4 + 1);
    json_decref(four);
    run = test_mtp("plan", config, "--json", "--world-size", "4");
    four = json_loads(run.out, 0, NULL);
    assert_non_null(four);
    test_run_free(&run);
    assert_int_equal(bytes_of(four, "optimizer moments"), all);
    json_decref(four);
    json_decref(alone);
    test_expect(test_mtp("plan", config, "--bandwidth", "40"), 2, "", "takes no CONFIG");
    /* nothing that is given is without effect */
    test_expect(test_mtp("plan", config, "--world-size", "4", "--zero-stage", "1"), 2, "", "--set has the keys of one");
    test_expect(test_mtp("plan", config, "--length", "5"), 2, "", "--length is about the official sizes");
    test_expect(test_mtp("plan", "--tokens", "5", "--positions", "5"), 2, "", "--positions needs --world-size");
    test_expect(test_mtp("plan", "--tokens", "5", "--set", "seed=1"), 2, "", "--set needs a CONFIG");
    test_expect(test_mtp("plan", "--tokens", "5", "--json"), 2, "", "it has no --json");
}

static void total_is_the_sum_of_what_is_not_mapped(void **state)
{
    (void)state;
    json_t *plan = plan_json(test_train_file("out")), *line;
    json_int_t sum = 0;
    size_t index, mapped = 0;
    json_array_foreach(json_object_get(plan, "memory"), index, line)
    {
        if (json_is_true(json_object_get(line, "mapped")))
            mapped++;
        else
            sum += json_integer_value(json_object_get(line, "bytes"));
    }
    assert_int_equal(sum, json_integer_value(json_object_get(plan, "total_bytes")));
    assert_int_equal(mapped, 1);
    json_decref(plan);
}

/* config.json of both is enough. */
static void needs_neither_weights_nor_data(void **state)
{
    (void)state;
    const char *dir = test_dir();
    test_run copy = test_execute((const char *const[]){
        "/bin/sh", "-c",
        test_path(
            "mkdir %s/d %s/v && cp %s/sample/drafter_init/config.json %s/d && cp %s/sample/verifier/config.json %s/v",
            dir, dir, MTP_TEST_DATA, dir, MTP_TEST_DATA, dir),
        NULL});
    assert_int_equal(copy.exit_code, 0);
    test_run_free(&copy);
    test_run bare = test_mtp("plan", test_train_file("out"), "--set", test_path("drafter=%s/d", dir), "--set",
                             test_path("verifier=%s/v", dir), "--set", "train_data=[\"/nowhere\"]");
    test_run full = test_mtp("plan", test_train_file("out"));
    if (bare.exit_code != 0) fail_msg("%s", bare.err);
    assert_string_equal(bare.out, full.out);
    assert_non_null(strstr(full.out, "optimizer moments"));
    assert_non_null(strstr(full.out, "total"));
    test_run_free(&bare);
    test_run_free(&full);
}

static void mistakes_have_their_exit_codes(void **state)
{
    (void)state;
    test_run run = test_mtp("plan", "/nowhere.toml");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "mtp: error: "));
    test_run_free(&run);
    run = test_mtp("plan", test_train_file("out"), "--set", test_path("verifier=%s", test_dir()));
    assert_int_not_equal(run.exit_code, 0);
    assert_non_null(strstr(run.err, "config.json"));
    test_run_free(&run);
    /* a shipped configuration as it is: whose paths these are, and what to do */
    const char *shipped = MTP_TEST_DATA "/../../configs/e2b.toml";
    test_expect(test_mtp("plan", shipped), 2, "", "e2b.toml:5: drafter: there is no directory models/");
    test_expect(test_mtp("plan", shipped), 2, "", "--set drafter=DIR");
    test_expect(test_mtp("plan", shipped, "--set", "drafter=" MTP_TEST_DATA "/sample/drafter_init"), 2, "",
                "e2b.toml:6: verifier: there is no directory models/gemma-4-E2B-it. Put the path");
}

/* More rows at once, more activations; the rest stays. */
static void follows_the_configuration(void **state)
{
    (void)state;
    const char *config = test_train_file("out");
    test_run small = test_mtp("plan", config, "--json", "--set", "rows_per_chunk=64");
    test_run large = test_mtp("plan", config, "--json", "--set", "rows_per_chunk=1024");
    json_t *a = json_loads(small.out, 0, NULL), *b = json_loads(large.out, 0, NULL);
    assert_true(bytes_of(b, "activations") > 8 * bytes_of(a, "activations"));
    assert_int_equal(json_integer_value(json_object_get(b, "rows_per_chunk")), 1024);
    test_expect(test_mtp("plan", config), 0, "512 rows at once (rows_per_chunk), 256 MiB of logits", "");
    assert_int_equal(bytes_of(a, "optimizer moments"), bytes_of(b, "optimizer moments"));
    /* each of the four micro-batches of the ring has a buffer */
    test_run direct = test_mtp("plan", config, "--json", "--set", "rows_per_chunk=64", "--set", "direct_io=on");
    json_t *c = json_loads(direct.out, 0, NULL);
    assert_int_equal(bytes_of(c, "loader") - bytes_of(a, "loader"), 4 * (MTP__STORE_BOUNCE + MTP__STORE_BLOCK));
    json_decref(c);
    test_run_free(&direct);
    json_decref(a);
    json_decref(b);
    test_run_free(&small);
    test_run_free(&large);
}

/* Memory that runs out later than the plan could foresee is said with the plan too; other failures stay as they are. */
static void a_plan_explains_memory_that_runs_out(void **state)
{
    (void)state;
    mtp_plan_line lines[2] = {{.what = "activations", .note = "training step", .bytes = 3 << 20, .on_device = true},
                              {.what = "loader", .note = "", .bytes = 2 << 20}};
    const mtp_plan plan = {.num_lines = 2,
                           .lines = lines,
                           .device_bytes = 3 << 20,
                           .host_bytes = 2 << 20,
                           .has_device = true,
                           .device_free = 1 << 20,
                           .device_total = 4 << 20,
                           .device = "a device",
                           .remedy = "a smaller one"};
    assert_int_equal(mtp__plan_explain(&plan, MTP_FAIL(MTP_E_IO, "a disk")), MTP_E_IO);
    assert_string_equal(mtp_last_error()->message, "a disk");
    assert_int_equal(mtp__plan_explain(NULL, MTP_FAIL(MTP_E_MEMORY, "none")), MTP_E_MEMORY);
    assert_string_equal(mtp_last_error()->message, "none");
    assert_int_equal(mtp__plan_explain(&plan, MTP_FAIL(MTP_E_MEMORY, "K/V of a batch")), MTP_E_MEMORY);
    assert_string_equal(mtp_last_error()->message,
                        "K/V of a batch\nless is needed with a smaller one\n"
                        "memory, MiB                            device         host\n"
                        "activations                               3.0               training step\n"
                        "loader                                                 2.0\n"
                        "total                                     3.0          2.0\n"
                        "free                                      1.0               of 4.0 of a device\n");
    assert_fails(mtp__plan_check(&plan), MTP_E_MEMORY,
                 "too little memory: 3.0 MiB of a device are needed, 1.0 are free");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_plan_explains_memory_that_runs_out),   cmocka_unit_test(counts_what_is_allocated),
        cmocka_unit_test(total_is_the_sum_of_what_is_not_mapped), cmocka_unit_test(needs_neither_weights_nor_data),
        cmocka_unit_test(mistakes_have_their_exit_codes),         cmocka_unit_test(follows_the_configuration),
        cmocka_unit_test(a_rank_of_several_needs_less),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
