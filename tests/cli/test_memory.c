/* Protects: what a run and an evaluation do with the memory of a device: the verifier's embedding table lies there or
 * not with the same numbers, the decision is said, and too little memory is an error with the plan and what to change.
 * On a machine without a GPU the emulator is the device; how much memory it has is the test's choice there. */
#include "dist.h"

#include <unistd.h>

static const char *config, *data;

static int setup(void **state)
{
    (void)state;
    data = dist_data(2, 7);
    config = test_path("%s/run.toml", test_dir());
    const char *text = test_path("[model]\ndrafter = \"%s/sample/drafter_init\"\nverifier = \"%s/sample/verifier\"\n"
                                 "[data]\ntrain_data = [\"%s\"]\neval_data = [\"%s\"]\ntokens_per_batch = %d\n"
                                 "[loss]\nnum_speculative_steps = 1\n"
                                 "[train]\nmax_steps = 1\n"
                                 "[output]\noutput_dir = \"unset\"\nlogging_steps = 1\nsave_steps = 0\n"
                                 "[device]\ndevice = \"cuda:0\"\n",
                                 MTP_TEST_DATA, MTP_TEST_DATA, data, data, 2 * DIST_TOKENS);
    test_write(config, text, strlen(text));
    return 0;
}

static test_run train(const char *out, const char *memory, const char *place, const char *more)
{
    return test_execute((const char *const[]){
        "/usr/bin/env", memory, MTP_TEST_PROGRAM, "train", config, "--set", test_path("output_dir=%s", out), "--set",
        test_path("embedding_on_device=%s", place), more ? "--set" : NULL, more, NULL});
}

static const char *trained(const char *memory, const char *place, const char *more, const char *said)
{
    const char *out = test_path("%s/run", test_dir());
    test_expect(train(out, memory, place, more), 0, "", said);
    return out;
}

static void the_table_may_lie_on_the_device_or_not(void **state)
{
    (void)state;
    const char *on = trained("A=", "auto", NULL, "verifier embedding of 0.5 MiB: held on the device");
    const char *off = trained("A=", "off", NULL, "rows are brought to the device as they are needed");
    char *a = test_train_metrics(on), *b = test_train_metrics(off);
    assert_string_equal(a, b);
    free(a);
    free(b);
}

#ifdef MTP_TEST_EMULATOR
enum { MIB = 1 << 20 };
static const char alone[] =
    "eval_data=[]"; /* the plan of an evaluation is for batches that the few samples do not fill */

static json_int_t planned(const char *key)
{
    test_run run = test_mtp("plan", config, "--json", "--set", "embedding_on_device=off", "--set", alone);
    if (run.exit_code != 0) fail_msg("%s", run.err);
    json_t *plan = json_loads(run.out, 0, NULL);
    assert_non_null(plan);
    const json_int_t value = json_integer_value(json_object_get(plan, key));
    json_decref(plan);
    test_run_free(&run);
    return value;
}

/* The plan is what is taken: with as much as it says a run has enough, with less it does not begin. */
static void too_little_memory_is_said_with_the_plan(void **state)
{
    (void)state;
    const int need = (int)((planned("device_bytes") + MIB - 1) / MIB);
    trained(test_path("MTP_EMU_MEMORY=%d", need), "auto", alone, "verifier embedding of 0.5 MiB: ");
    const char *out = test_path("%s/run", test_dir()), *less = test_path("MTP_EMU_MEMORY=%d", need - 1);
    test_run run = train(out, less, "auto", alone);
    assert_int_equal(run.exit_code, 1);
    static const char *const said[] = {"too little memory: ",      "are free",    "rows_per_chunk", "optimizer moments",
                                       "K/V of a batch",           "activations", "device",         "host",
                                       "zero_stage = 1 on several"};
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        if (!strstr(run.err, said[i])) fail_msg("\"%s\" is not said: %s", said[i], run.err);
    test_run_free(&run);
    assert_int_not_equal(access(out, F_OK), 0);
    /* wanted there all the same */
    test_expect(train(out, less, "on", alone), 1, "", "verifier embedding");
    test_expect(test_execute((const char *const[]){"/usr/bin/env", less, MTP_TEST_PROGRAM, "plan", config, "--set",
                                                   alone, NULL}),
                0, "\"auto\": it does not fit", "");
    /* by default as many rows at once as a micro-batch can have */
    test_expect(test_mtp("plan", config), 0, test_path("%d rows at once (rows_per_chunk), 2048 MiB", 2 * DIST_TOKENS),
                "");
}

static void an_evaluation_says_it_too(void **state)
{
    (void)state;
    const char *const argv[] = {"/usr/bin/env",
                                "MTP_EMU_MEMORY=3",
                                MTP_TEST_PROGRAM,
                                "eval",
                                "--device",
                                "cuda:0",
                                "--model",
                                MTP_TEST_DATA "/sample/drafter_init",
                                "--verifier",
                                MTP_TEST_DATA "/sample/verifier",
                                "--data",
                                data,
                                NULL};
    test_expect(test_execute(argv), 1, "", "--embedding-on-device off");
}
#endif

int main(void)
{
    if (test_no_gpu()) {
        printf("skipped: %s\n", test_no_gpu());
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_table_may_lie_on_the_device_or_not),
#ifdef MTP_TEST_EMULATOR
        cmocka_unit_test(too_little_memory_is_said_with_the_plan),
        cmocka_unit_test(an_evaluation_says_it_too),
#endif
    };
    return cmocka_run_group_tests(tests, setup, NULL);
}
