/* Protects: `mtp check`: the leak test's report and exit code, the check of samples with its report,
 * JSON and --max-bad, and what is said about a drafter of another size. */
#include "support.h"

#include <jansson.h>

#define SAMPLE MTP_TEST_DATA "/sample"

static void leak_report(void **state)
{
    (void)state;
    test_run run = test_mtp("check", "--leak", SAMPLE "/drafter_reference", SAMPLE "/eval/sample_0100.safetensors",
                            SAMPLE "/eval/sample_0105.safetensors", "--verifier", SAMPLE "/verifier",
                            "--rows-per-document", "5", "--threads", "1");
    assert_int_equal(run.exit_code, 0);
    static const char *const properties[] = {"future",         "window",          "other rows",     "other documents",
                                             "packed = alone", "packed = padded", "chunks = whole", "control"};
    for (size_t i = 0; i < sizeof properties / sizeof *properties; i++)
        assert_non_null(strstr(run.out, test_path("holds       %s ", properties[i])));
    assert_non_null(strstr(run.out, "10 rows compared, all equal bit for bit\n"));
    assert_non_null(strstr(run.out, "40 rows compared")); /* four sizes of chunks */
    assert_non_null(strstr(run.out, "10 of 10 rows moved\n"));
    assert_non_null(strstr(run.out, "no leak found in 2 samples\n"));
    test_run_free(&run);
}

static void one_sample_has_no_other_document(void **state)
{
    (void)state;
    test_run run = test_mtp("check", "--leak", SAMPLE "/drafter_init_dense", SAMPLE "/eval/sample_0100.safetensors",
                            "--verifier", SAMPLE "/verifier", "--rows-per-document", "2", "--threads", "1");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "not tested  other documents"));
    test_run_free(&run);
}

static void samples_are_read_whole(void **state)
{
    (void)state;
    test_run run = test_mtp("check", SAMPLE "/eval", "--verifier", SAMPLE "/verifier", "--drafter",
                            SAMPLE "/drafter_reference", "--threads", "1");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "20 samples, 20 good (4529 tokens, 3522 of them supervised), 0 bad (0.00 %)\n"));
    assert_non_null(strstr(run.out, "tested      next token from hidden states"));
    test_run_free(&run);
}

/* What the library says goes to stderr, and a warning is marked as one: a line for a file that is not there. */
static void warnings_are_marked(void **state)
{
    (void)state;
    static const char line[] = "{\"file\": \"gone.safetensors\", \"prompt_len\": 3}\n";
    const char *directory = test_path("%s", test_dir());
    test_copy(SAMPLE "/eval/sample_0100.safetensors", test_path("%s/sample_0100.safetensors", directory));
    test_write(test_path("%s/more.jsonl", directory), line, sizeof line - 1);
    test_run run = test_mtp("check", directory, "--verifier", SAMPLE "/verifier", "--structure-only");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.err, "mtp: warning: "));
    assert_non_null(strstr(run.err, "gone.safetensors is not there"));
    assert_non_null(strstr(run.err, "mtp: data: 1 sample, "));
    test_run_free(&run);
}

/* Two samples, the second cut short. */
static void bad_samples_are_named(void **state)
{
    (void)state;
    size_t size;
    char *bytes = test_read(SAMPLE "/eval/sample_0100.safetensors", &size);
    const char *damaged = test_path("%s/damaged.safetensors", test_dir());
    test_write(damaged, bytes, size - 1000);
    free(bytes);
    test_run run = test_mtp("check", SAMPLE "/eval/sample_0101.safetensors", damaged, "--verifier", SAMPLE "/verifier",
                            "--threads", "1");
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.out, test_path("%s: file: ", damaged)));
    assert_non_null(strstr(run.out, "truncated or malformed file"));
    assert_non_null(strstr(run.out, "not tested  K/V follow from the text: not enough evidence: 1 sample of"));
    assert_non_null(strstr(run.out, "2 samples, 1 good"));
    test_run_free(&run);

    run = test_mtp("check", SAMPLE "/eval/sample_0101.safetensors", damaged, "--verifier", SAMPLE "/verifier",
                   "--threads", "1", "--max-bad", "0.5");
    assert_int_equal(run.exit_code, 0);
    test_run_free(&run);
}

static void report_as_json(void **state)
{
    (void)state;
    size_t size;
    char *bytes = test_read(SAMPLE "/eval/sample_0100.safetensors", &size);
    const char *bent = test_path("%s/bent.safetensors", test_dir());
    memset(bytes + size - 4096, 0xff, 4096); /* NaN in whichever tensor comes last */
    test_write(bent, bytes, size);
    free(bytes);
    test_run run = test_mtp("check", SAMPLE "/eval/sample_0101.safetensors", bent, "--verifier", SAMPLE "/verifier",
                            "--threads", "1", "--json");
    assert_int_equal(run.exit_code, 3);
    json_t *root = json_loads(run.out, 0, NULL);
    assert_non_null(root);
    assert_int_equal(json_integer_value(json_object_get(root, "num_samples")), 2);
    assert_int_equal(json_integer_value(json_object_get(root, "num_good")), 1);
    assert_true(json_real_value(json_object_get(root, "bad_share")) == 0.5);
    const json_t *bad = json_array_get(json_object_get(root, "bad"), 0);
    assert_string_equal(json_string_value(json_object_get(bad, "path")), bent);
    const char *reason = json_string_value(json_object_get(bad, "reason"));
    assert_non_null(reason);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(root, "counts"), reason)), 1);
    assert_int_equal(json_array_size(json_object_get(root, "bad")), 1);
    assert_true(json_array_size(json_object_get(root, "tests")) > 0);
    json_decref(root);
    test_run_free(&run);
}

/* A drafter whose backbone is wider than the verifier's hidden states. */
static void drafter_of_another_size(void **state)
{
    (void)state;
    size_t size;
    char *config = test_read(SAMPLE "/drafter_reference/config.json", &size);
    char *width = strstr(config, "\"backbone_hidden_size\": 128");
    assert_non_null(width);
    memcpy(width, "\"backbone_hidden_size\": 256", strlen("\"backbone_hidden_size\": 256"));
    const char *dir = test_dir();
    test_write(test_path("%s/config.json", dir), config, size);
    free(config);
    test_run run = test_mtp("check", SAMPLE "/eval", "--verifier", SAMPLE "/verifier", "--drafter", dir);
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "backbone_hidden_size is 256, the verifier's is 128"));
    test_run_free(&run);
}

static void wrong_use(void **state)
{
    (void)state;
    test_run run = test_mtp("check", SAMPLE "/eval");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "--verifier"));
    test_run_free(&run);
    run = test_mtp("check", "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 2);
    assert_non_null(strstr(run.err, "DATA"));
    test_run_free(&run);
}

/* A sample that cannot be read is bad; its line in the sidecar has a file all the same. */
static void bad_sample_with_a_sidecar(void **state)
{
    (void)state;
    const char *directory = test_path("%s/raw", test_dir());
    test_copy(SAMPLE "/raw", directory);
    test_write(test_path("%s/sample_0001.safetensors", directory), "x", 1);
    test_run run =
        test_mtp("check", directory, "--verifier", SAMPLE "/verifier", "--hidden-norm", "pre", "--max-bad", "1");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(strstr(run.out, "sample_0001.safetensors"));
    assert_non_null(strstr(run.out, "6 samples, 5 good"));
    assert_null(strstr(run.err, "is not there"));
    test_run_free(&run);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leak_report),
        cmocka_unit_test(one_sample_has_no_other_document),
        cmocka_unit_test(samples_are_read_whole),
        cmocka_unit_test(warnings_are_marked),
        cmocka_unit_test(bad_samples_are_named),
        cmocka_unit_test(bad_sample_with_a_sidecar),
        cmocka_unit_test(report_as_json),
        cmocka_unit_test(drafter_of_another_size),
        cmocka_unit_test(wrong_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
