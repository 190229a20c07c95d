/* Protects: every fault that a stored sample can carry is named by a check, with the file and the first token: one
 * sample of six is bent, and that one is found, for that reason, and no other. */
#include "faults.h"

enum { SAMPLES = 6, BENT = TEST_BENT - TEST_FIRST };

static mtp_context *context;
static mtp_verifier *verifier;

static int setup(void **state)
{
    (void)state;
    const mtp_context_options options = {.num_threads = 1};
    assert_ok(mtp_context_create(&options, &context));
    assert_ok(mtp_verifier_open(TEST_SAMPLES "/verifier", NULL, &verifier));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    mtp_verifier_close(verifier);
    mtp_context_free(context);
    return 0;
}

static void expect(const char *name, const mtp_check_finding *finding, mtp_check_reason reason, int64_t index,
                   const char *text)
{
    if (finding->reason != reason || finding->index != index || !strstr(finding->message, text))
        fail_msg("%s: want %s at %lld with \"%s\", got %s at %lld: %s", name, mtp_check_reason_name(reason),
                 (long long)index, text, mtp_check_reason_name(finding->reason), (long long)finding->index,
                 finding->message);
}

/* Check six samples, of which the bent one stands in its place. */
static void expect_in_directory(const char *dir, const char *name, mtp_check_reason reason, int64_t index,
                                const char *text)
{
    const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_UNSET};
    const mtp_check_options options = {.structure_only = false};
    mtp_check_report report;
    assert_ok(mtp_check_run(context, &dir, 1, verifier, &opening, &options, NULL, NULL, &report));
    assert_int_equal(report.num_samples, SAMPLES);
    for (int64_t i = 0; i < report.num_bad; i++)
        if (!strstr(report.bad[i].path, "sample_0103"))
            fail_msg("%s: %s: %s", name, report.bad[i].path, report.bad[i].finding.message);
    assert_int_equal(report.num_bad, 1);
    expect(name, &report.bad[0].finding, reason, index, text);
    assert_int_equal(report.counts[reason], 1);
    assert_int_equal(report.counts[MTP_CHECK_GOOD], SAMPLES - 1);
    mtp_check_report_free(&report);
}

/* Faults that a data set shows as a whole, and of each kind that is learnt from the samples themselves the first: there
 * the bent sample must not spoil what is learnt. */
static void one_of_six(void **state)
{
    bool seen[MTP_CHECK_REASONS] = {false};
    (void)state;
    for (int i = 0; i < test_num_faults; i++) {
        const test_fault *fault = &test_faults[i];
        const bool learnt = fault->reason >= MTP_CHECK_K_SHIFTED && !seen[fault->reason];
        if (!fault->whole && !learnt) continue;
        seen[fault->reason] = true;
        const char *dir = test_eval_samples(SAMPLES);
        test_sample sample = fault->make(fault);
        test_sample_write(&sample, test_path("%s/sample_0103.safetensors", dir));
        test_sample_free(&sample);
        expect_in_directory(dir, fault->name, fault->reason, fault->index, fault->text);
    }
}

/* All the others against what six good samples teach: the bent one is handed over in an open file. */
static void every_fault(void **state)
{
    (void)state;
    const char *dir = test_eval_samples(SAMPLES), *path = test_path("%s/bent.safetensors", test_dir());
    const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_UNSET};
    const mtp_check_options options = {.structure_only = false};
    mtp_dataset *dataset = NULL;
    mtp_check *check = NULL;
    assert_ok(mtp_dataset_open(&dir, 1, verifier, &opening, &dataset));
    assert_ok(mtp_check_create(context, dataset, &options, &check));
    for (int i = -1; i < test_num_faults; i++) { /* first the right one */
        mtp_safetensors *file = NULL;
        mtp_check_finding finding;
        if (i >= 0 && test_faults[i].whole) continue;
        test_sample sample =
            i < 0 ? test_sample_load(test_eval_sample(TEST_BENT)) : test_faults[i].make(&test_faults[i]);
        test_sample_write(&sample, path);
        test_sample_free(&sample);
        assert_ok(mtp_safetensors_open(path, &file));
        assert_ok(mtp_check_sample(check, BENT, file, &finding));
        mtp_safetensors_close(file);
        if (i < 0)
            expect("the right sample", &finding, MTP_CHECK_GOOD, -1, "");
        else
            expect(test_faults[i].name, &finding, test_faults[i].reason, test_faults[i].index, test_faults[i].text);
    }
    mtp_check_free(check);
    mtp_dataset_close(dataset);
}

static void truncated_file(void **state)
{
    (void)state;
    const char *dir = test_eval_samples(SAMPLES), *path = test_path("%s/sample_0103.safetensors", dir);
    size_t size;
    char *bytes = test_read(path, &size);
    test_write(path, bytes, size - 1000);
    free(bytes);
    expect_in_directory(dir, "truncated", MTP_CHECK_FILE, -1, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(one_of_six),
        cmocka_unit_test(every_fault),
        cmocka_unit_test(truncated_file),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
