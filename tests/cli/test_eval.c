/* Protects: `mtp eval`: one JSON object with the documented keys and the reference's counts, the table, several data
 * sets, what is said about short samples, and the exit codes of wrong use and bad data. */
#include "support.h"

#include <jansson.h>

#define SAMPLE MTP_TEST_DATA "/sample"

static int64_t count_at(json_t *root, const char *object, const char *key, int index)
{
    json_t *value = json_object_get(json_object_get(root, object), key);
    if (index >= 0) value = json_array_get(value, (size_t)index);
    assert_true(json_is_integer(value));
    return (int64_t)json_integer_value(value);
}

static void json_is_one_object(void **state)
{
    (void)state;
    test_run run = test_mtp("eval", "--model", SAMPLE "/drafter_reference", "--verifier", SAMPLE "/verifier", "--data",
                            SAMPLE "/eval", "--position-offset=1", "--threads", "1", "--json");
    assert_int_equal(run.exit_code, 0);
    json_t *root = json_loads(run.out, 0, NULL); /* fails on anything behind the object */
    assert_non_null(root);
    assert_int_equal(count_at(root, "rounds", "count", -1), 2570);
    assert_int_equal(count_at(root, "rounds", "accepted", 0), 570);
    assert_int_equal(count_at(root, "rounds", "accepted", 1), 222);
    assert_int_equal(count_at(root, "rounds", "accepted", 2), 113);
    assert_int_equal(count_at(root, "positions", "count", -1), 3462);
    assert_int_equal(count_at(root, "positions", "accepted", 2), 202);
    assert_int_equal(json_array_size(json_object_get(json_object_get(root, "rounds"), "conditional")), 3);
    assert_int_equal(json_integer_value(json_object_get(root, "num_speculative_steps")), 3);
    assert_int_equal(json_integer_value(json_object_get(root, "position_offset")), 1);
    static const char *const keys[] = {"model",     "verifier",    "loss",          "accuracy",       "centroid_miss",
                                       "head_mode", "num_samples", "short_samples", "gapped_samples", "seconds"};
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) assert_non_null(json_object_get(root, keys[i]));
    json_t *samples = json_object_get(root, "samples");
    assert_int_equal(json_array_size(samples), 20);
    int64_t rounds = 0;
    for (size_t i = 0; i < 20; i++) rounds += count_at(json_array_get(samples, i), "rounds", "count", -1);
    assert_int_equal(rounds, 2570);
    assert_non_null(strstr(json_string_value(json_object_get(json_array_get(samples, 0), "path")), "sample_0100"));
    json_t *lengths = json_object_get(json_object_get(root, "buckets"), "length");
    assert_int_equal(json_array_size(lengths), 2); /* 128..255 and 256..511 */
    assert_int_equal(json_integer_value(json_object_get(json_array_get(lengths, 0), "begin")), 128);
    json_decref(root);
    test_run_free(&run);
}

static void table_over_several_data_sets(void **state)
{
    (void)state;
    test_run run = test_mtp("eval", "--model", SAMPLE "/drafter_reference", "--verifier", SAMPLE "/verifier", "--data",
                            SAMPLE "/eval/sample_0100.safetensors", SAMPLE "/eval/sample_0101.safetensors",
                            "--num-speculative-steps", "3", "--threads", "1");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "rounds                                             164\n")); /* 76 + 88 */
    assert_non_null(strstr(run.out, "accepted length without the bonus token"));
    assert_non_null(strstr(run.out, "accepted length with the bonus token"));
    assert_non_null(strstr(run.out, "without the bonus token, mean over samples "));
    assert_non_null(strstr(run.out, "centroid_miss, draft 3"));
    assert_non_null(strstr(run.out, "2 samples in "));
    test_run_free(&run);
}

static void says_short_and_gapped_samples(void **state)
{
    (void)state;
    static const char goldens[] = MTP_TEST_DATA "/goldens/e2b_masked";
    test_run run =
        test_mtp("eval", "--model", test_path("%s/assistant", goldens), "--verifier", test_path("%s/verifier", goldens),
                 "--data", test_path("%s/samples", goldens), "--num-speculative-steps", "10");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "1 too short for a round of 10 drafts"));
    assert_non_null(strstr(run.out, "3 with unsupervised tokens behind the first supervised one"));
    test_run_free(&run);
    run =
        test_mtp("eval", "--model", test_path("%s/assistant", goldens), "--verifier", test_path("%s/verifier", goldens),
                 "--data", test_path("%s/samples", goldens), "--num-speculative-steps", "16");
    assert_int_equal(run.exit_code, 3);
    assert_string_equal(run.out, "");
    assert_non_null(strstr(run.err, "of 3 samples none is long enough"));
    test_run_free(&run);
}

static void wrong_use(void **state)
{
    (void)state;
    test_run run = test_mtp("eval", "--model", SAMPLE "/drafter_init", "--data", SAMPLE "/eval");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "--verifier"));
    test_run_free(&run);
    run = test_mtp("eval", "--model", SAMPLE "/drafter_init", "--verifier", SAMPLE "/verifier", "--data",
                   SAMPLE "/eval", "--position-offset", "2");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "--position-offset"));
    test_run_free(&run);
    run = test_mtp("eval", "--help");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "greedy decoding"));
    test_run_free(&run);
}

static void bad_data(void **state)
{
    (void)state;
    test_run run = test_mtp("eval", "--model", SAMPLE "/drafter_init", "--verifier", SAMPLE "/verifier", "--data",
                            test_path("%s/nothing", test_dir()));
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "nothing"));
    test_run_free(&run);
    run = test_mtp("eval", "--model", MTP_TEST_DATA "/goldens/e2b_masked/assistant", "--verifier", SAMPLE "/verifier",
                   "--data", SAMPLE "/eval");
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "error"));
    test_run_free(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(json_is_one_object),
        cmocka_unit_test(table_over_several_data_sets),
        cmocka_unit_test(says_short_and_gapped_samples),
        cmocka_unit_test(wrong_use),
        cmocka_unit_test(bad_data),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
