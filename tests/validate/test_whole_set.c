/* Protects: what a check says about a whole data set: clean ones pass, in every form they are shipped in; a fault that
 * all samples share is seen although the samples agree; and where a data set is too small, that is said instead of a
 * verdict. */
#include "samples.h"

#include <unistd.h>

#include "mtp/check.h"
#include "pack.h"

#define SAMPLE MTP_TEST_DATA "/sample"
enum { SAMPLES = 6 };

static mtp_context *context;
static mtp_verifier *verifier;

static int setup(void **state)
{
    (void)state;
    const mtp_context_options options = {.num_threads = 1};
    assert_ok(mtp_context_create(&options, &context));
    assert_ok(mtp_verifier_open(SAMPLE "/verifier", NULL, &verifier));
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    mtp_verifier_close(verifier);
    mtp_context_free(context);
    return 0;
}

static mtp_check_report check(const char *path, mtp_hidden_norm norm)
{
    const mtp_dataset_options opening = {.hidden_norm = norm};
    const mtp_check_options options = {.structure_only = false};
    mtp_check_report report;
    assert_ok(mtp_check_run(context, &path, 1, verifier, &opening, &options, NULL, NULL, &report));
    return report;
}

static void expect_clean(const char *path, mtp_hidden_norm norm, int64_t samples)
{
    mtp_check_report report = check(path, norm);
    if (report.num_bad) fail_msg("%s: %s", report.bad[0].path, report.bad[0].finding.message);
    assert_int_equal(report.num_samples, samples);
    assert_int_equal(report.counts[MTP_CHECK_GOOD], samples);
    assert_int_equal(report.num_evidence, 7);
    for (int64_t i = 0; i < report.num_evidence; i++) assert_true(report.evidence[i].possible);
    mtp_check_report_free(&report);
}

static void clean_data_pass(void **state)
{
    (void)state;
    expect_clean(SAMPLE "/train", MTP_HIDDEN_UNSET, 100);
    expect_clean(SAMPLE "/eval", MTP_HIDDEN_UNSET, 20);
    expect_clean(SAMPLE "/raw", MTP_HIDDEN_PRE, 6);
}

/* What was packed is checked from its shards; fp8 has a tolerance of its own. */
static void packed_data_pass(void **state)
{
    (void)state;
    const char *inputs[] = {SAMPLE "/raw"};
    for (int fp8 = 0; fp8 < 2; fp8++) {
        const char *dir = test_path("%s/packed", test_dir());
        mtp_pack_options options = test_pack_options(inputs, 1, verifier);
        mtp_pack_summary summary;
        options.hidden_norm = MTP_HIDDEN_PRE;
        options.fp8 = fp8 != 0;
        assert_ok(mtp_pack(dir, &options, &summary));
        expect_clean(dir, MTP_HIDDEN_UNSET, 6);
    }
}

/* A shard whose bytes were changed in the middle: NaN in some field. */
static void damaged_shard(void **state)
{
    (void)state;
    const char *inputs[] = {SAMPLE "/raw"}, *dir = test_path("%s/packed", test_dir());
    const char *path = test_path("%s/shard-00000.h5", dir);
    mtp_pack_options options = test_pack_options(inputs, 1, verifier);
    mtp_pack_summary summary;
    options.hidden_norm = MTP_HIDDEN_PRE;
    assert_ok(mtp_pack(dir, &options, &summary));
    size_t size;
    char *bytes = test_read(path, &size);
    memset(bytes + size / 2, 0xff, 64);
    test_write(path, bytes, size);
    free(bytes);
    mtp_check_report report = check(dir, MTP_HIDDEN_UNSET);
    assert_int_equal(report.num_bad, 1);
    assert_int_equal(report.bad[0].finding.reason, MTP_CHECK_NONFINITE);
    assert_true(report.bad[0].finding.index >= 0);
    mtp_check_report_free(&report);
}

static void wrong_norm_setting(void **state)
{
    (void)state;
    mtp_check_report report = check(SAMPLE "/raw", MTP_HIDDEN_POST);
    assert_int_equal(report.counts[MTP_CHECK_HIDDEN_NORM], 6);
    mtp_check_report_free(&report);
    /* the other way round: rows after the norm, labelled as before it */
    const char *dir = test_dir();
    for (int i = 0; i < SAMPLES; i++) {
        test_sample sample = test_sample_load(test_path(SAMPLE "/eval/sample_%04d.safetensors", 100 + i));
        for (int j = 0; j < sample.num_metadata; j++)
            if (strcmp(sample.metadata[j].key, "hidden_norm") == 0) sample.metadata[j].value = "pre";
        test_sample_write(&sample, test_path("%s/sample_%04d.safetensors", dir, 100 + i));
        test_sample_free(&sample);
    }
    report = check(dir, MTP_HIDDEN_UNSET);
    assert_int_equal(report.counts[MTP_CHECK_HIDDEN_NORM], SAMPLES);
    assert_non_null(strstr(report.bad[0].finding.message, "hidden_norm = \"post\""));
    mtp_check_report_free(&report);
}

/* Six samples in which row t of a tensor holds what belongs to t + 1. */
static const char *all_shifted(const char *name)
{
    const char *dir = test_dir();
    for (int i = 0; i < SAMPLES; i++) {
        test_sample sample = test_sample_load(test_path(SAMPLE "/eval/sample_%04d.safetensors", 100 + i));
        test_tensor *tensor = test_sample_find(&sample, name);
        const size_t row = (size_t)(tensor->count / tensor->shape[0]) * mtp_dtype_size(tensor->dtype);
        const size_t rest = row * (size_t)(tensor->shape[0] - 1);
        char *first = malloc(row);
        memcpy(first, tensor->data, row);
        memmove(tensor->data, (char *)tensor->data + row, rest);
        memcpy((char *)tensor->data + rest, first, row);
        free(first);
        test_sample_write(&sample, test_path("%s/sample_%04d.safetensors", dir, 100 + i));
        test_sample_free(&sample);
    }
    return dir;
}

static void shifts_that_all_samples_share(void **state)
{
    (void)state;
    static const struct {
        const char *name;
        mtp_check_reason reason;
    } cases[] = {{"hidden_states", MTP_CHECK_HIDDEN_SHIFTED},
                 {"kv_last_local_k", MTP_CHECK_K_SHIFTED},
                 {"kv_last_local_v", MTP_CHECK_V_SHIFTED},
                 {"kv_last_global_k", MTP_CHECK_K_SHIFTED},
                 {"kv_last_global_v", MTP_CHECK_V_SHIFTED}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        mtp_check_report report = check(all_shifted(cases[i].name), MTP_HIDDEN_UNSET);
        for (int64_t j = 0; j < report.num_bad; j++)
            if (report.bad[j].finding.reason != cases[i].reason)
                fail_msg("%s: %s", cases[i].name, report.bad[j].finding.message);
        assert_int_equal(report.num_bad, SAMPLES);
        mtp_check_report_free(&report);
    }
}

/* Two samples say nothing about how K/V follow from the text. */
static void too_little_data(void **state)
{
    (void)state;
    const char *dir = test_dir();
    for (int i = 0; i < 2; i++)
        test_copy(test_path(SAMPLE "/eval/sample_%04d.safetensors", 100 + i),
                  test_path("%s/sample_%04d.safetensors", dir, 100 + i));
    mtp_check_report report = check(dir, MTP_HIDDEN_UNSET);
    assert_int_equal(report.num_bad, 0);
    bool said = false;
    for (int64_t i = 0; i < report.num_evidence; i++)
        if (!report.evidence[i].possible && strstr(report.evidence[i].note, "not enough evidence: 2 samples"))
            said = true;
    assert_true(said);
    mtp_check_report_free(&report);
}

/* A quantised verifier, say: config.json alone, the embedding from elsewhere. What rests on k_norm is not tested. */
static void verifier_without_weights(void **state)
{
    (void)state;
    const char *bare = test_path("%s/verifier", test_dir()), *path = SAMPLE "/raw";
    const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_PRE};
    const mtp_check_options options = {.structure_only = false};
    mtp_verifier *other = NULL;
    mtp_check_report report;
    int64_t untested = 0;
    test_copy(SAMPLE "/verifier", bare);
    assert_int_equal(unlink(test_path("%s/model.safetensors", bare)), 0);
    assert_ok(mtp_verifier_open(bare, SAMPLE "/verifier", &other));
    assert_ok(mtp_check_run(context, &path, 1, other, &opening, &options, NULL, NULL, &report));
    assert_int_equal(report.num_bad, 0);
    for (int64_t i = 0; i < report.num_evidence; i++)
        untested += !report.evidence[i].possible && strstr(report.evidence[i].note, "no k_norm weight") != NULL;
    assert_int_equal(untested, MTP_LAYER_TYPES);
    mtp_check_report_free(&report);
    mtp_verifier_close(other);
}

/* Golden data are random numbers: their structure is right, and nothing else may be asked of them. */
static void structure_only(void **state)
{
    (void)state;
    static const char *const cases[] = {"e2b_masked", "e2b_bf16_data", "m31b_flat_k5"};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *path = test_path(MTP_TEST_DATA "/goldens/%s/samples", cases[i]);
        const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_UNSET};
        const mtp_check_options options = {.structure_only = true};
        mtp_verifier *random = NULL;
        mtp_check_report report;
        assert_ok(mtp_verifier_open(test_path(MTP_TEST_DATA "/goldens/%s/verifier", cases[i]), NULL, &random));
        assert_ok(mtp_check_run(context, &path, 1, random, &opening, &options, NULL, NULL, &report));
        if (report.num_bad) fail_msg("%s: %s", report.bad[0].path, report.bad[0].finding.message);
        assert_true(report.num_samples > 0);
        assert_int_equal(report.num_evidence, 1);
        assert_false(report.evidence[0].possible);
        mtp_check_report_free(&report);
        mtp_verifier_close(random);
    }
}

static bool stop_at_two(void *user, int64_t done, int64_t total)
{
    (void)user;
    (void)total;
    return done < 2;
}

static void interrupted(void **state)
{
    (void)state;
    const char *path = SAMPLE "/raw";
    const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_PRE};
    const mtp_check_options options = {.structure_only = true};
    mtp_check_report report;
    assert_fails(mtp_check_run(context, &path, 1, verifier, &opening, &options, stop_at_two, NULL, &report),
                 MTP_E_INTERRUPTED, "after 2 of 6");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(clean_data_pass),
        cmocka_unit_test(packed_data_pass),
        cmocka_unit_test(damaged_shard),
        cmocka_unit_test(wrong_norm_setting),
        cmocka_unit_test(shifts_that_all_samples_share),
        cmocka_unit_test(too_little_data),
        cmocka_unit_test(verifier_without_weights),
        cmocka_unit_test(structure_only),
        cmocka_unit_test(interrupted),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
