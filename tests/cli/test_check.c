/* Protects: `mtp check`: the leak test's report and exit code, the plain check of samples with the loader's own checks,
 * and what is said about a damaged sample. */
#include "support.h"

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
    test_run run = test_mtp("check", SAMPLE "/eval", "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 0);
    assert_non_null(
        strstr(run.out, "20 samples are whole and fit the verifier: 4529 tokens, 3522 of them supervised\n"));
    test_run_free(&run);

    size_t size;
    char *bytes = test_read(SAMPLE "/eval/sample_0100.safetensors", &size);
    const char *damaged = test_path("%s/damaged.safetensors", test_dir());
    test_write(damaged, bytes, size - 1000);
    run = test_mtp("check", SAMPLE "/eval/sample_0101.safetensors", damaged, "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "damaged.safetensors"));
    assert_string_equal(run.out, "");
    test_run_free(&run);

    memset(bytes + size - 4096, 0xff, 4096); /* NaN in whichever tensor comes last */
    test_write(damaged, bytes, size);
    run = test_mtp("check", damaged, "--verifier", SAMPLE "/verifier");
    assert_int_equal(run.exit_code, 3);
    assert_non_null(strstr(run.err, "damaged.safetensors"));
    test_run_free(&run);
    free(bytes);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(leak_report),
        cmocka_unit_test(one_sample_has_no_other_document),
        cmocka_unit_test(samples_are_read_whole),
        cmocka_unit_test(wrong_use),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
