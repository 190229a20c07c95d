/* Protects: every fault that a stored sample can carry is named by `mtp check`, with the file and the first token: one
 * sample of six is bent, and the report must say that one, for that reason, and no other. */
#include "samples.h"

#include <math.h>

#include "mtp/check.h"

#define SAMPLE MTP_TEST_DATA "/sample"
enum { SAMPLES = 6, BENT = 3, DONOR = 4, LOCAL_HEADS = 2, LOCAL_DIM = 32, GLOBAL_DIM = 64, HB = 128, VOCAB = 2048 };

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

static const char *source(int i)
{
    return test_path(SAMPLE "/eval/sample_%04d.safetensors", 100 + i);
}

/* Copies of six samples, in a fresh directory. */
static const char *six_samples(void)
{
    const char *dir = test_dir();
    for (int i = 0; i < SAMPLES; i++) test_copy(source(i), test_path("%s/sample_%04d.safetensors", dir, 100 + i));
    return dir;
}

static mtp_check_report check(const char *dir)
{
    const mtp_dataset_options opening = {.hidden_norm = MTP_HIDDEN_UNSET};
    const mtp_check_options options = {.structure_only = false};
    mtp_check_report report;
    assert_ok(mtp_check_run(context, &dir, 1, verifier, &opening, &options, NULL, NULL, &report));
    return report;
}

static void expect(const char *dir, mtp_check_reason reason, int64_t index, const char *text)
{
    mtp_check_report report = check(dir);
    assert_int_equal(report.num_samples, SAMPLES);
    for (int64_t i = 0; i < report.num_bad; i++)
        if (!strstr(report.bad[i].path, "sample_0103"))
            fail_msg("%s: %s", report.bad[i].path, report.bad[i].finding.message);
    assert_int_equal(report.num_bad, 1);
    const mtp_check_finding *finding = &report.bad[0].finding;
    if (finding->reason != reason || finding->index != index || !strstr(finding->message, text))
        fail_msg("want %s at %lld with \"%s\", got %s at %lld: %s", mtp_check_reason_name(reason), (long long)index,
                 text, mtp_check_reason_name(finding->reason), (long long)finding->index, finding->message);
    assert_int_equal(report.counts[reason], 1);
    assert_int_equal(report.counts[MTP_CHECK_GOOD], SAMPLES - 1);
    mtp_check_report_free(&report);
}

/* Write the bent sample in the place of the right one and check all. */
static void expect_bent(test_sample *sample, mtp_check_reason reason, int64_t index, const char *text)
{
    const char *dir = six_samples();
    test_sample_write(sample, test_path("%s/sample_0103.safetensors", dir));
    test_sample_free(sample);
    expect(dir, reason, index, text);
}

/* ---- ways to bend --------------------------------------------------------------------------------------------- */

static size_t row_bytes(const test_tensor *tensor)
{
    return (size_t)(tensor->count / tensor->shape[0]) * mtp_dtype_size(tensor->dtype);
}

/* Row t becomes row t + by; rows that leave at one end come in at the other. */
static void roll(test_sample *sample, const char *name, int by)
{
    test_tensor *tensor = test_sample_find(sample, name);
    const size_t row = row_bytes(tensor), rows = (size_t)tensor->shape[0];
    char *old = tensor->data, *rolled = malloc(row * rows + 1);
    for (size_t t = 0; t < rows; t++) memcpy(rolled + t * row, old + (t + rows + (size_t)by) % rows * row, row);
    tensor->data = rolled;
    free(old);
}

/* Row t becomes row t + 1, the last one stays: how a lag of one token looks when nothing wraps around. */
static void lag(test_sample *sample, const char *name)
{
    test_tensor *tensor = test_sample_find(sample, name);
    const size_t row = row_bytes(tensor);
    memmove(tensor->data, (char *)tensor->data + row, row * (size_t)(tensor->shape[0] - 1));
}

/* The same tensor of a longer sample, cut. */
static void replace(test_sample *sample, const char *name, const char *path)
{
    test_sample other = test_sample_load(path);
    test_tensor *to = test_sample_find(sample, name), *from = test_sample_find(&other, name);
    assert_true(from->shape[0] >= to->shape[0]);
    memcpy(to->data, from->data, row_bytes(to) * (size_t)to->shape[0]);
    test_sample_free(&other);
}

static void scale(test_sample *sample, const char *name, double factor)
{
    test_tensor *tensor = test_sample_find(sample, name);
    for (int64_t i = 0; i < tensor->count; i++) test_tensor_set(tensor, i, factor * test_tensor_get(tensor, i));
}

/* Take the rotary embedding off again. */
static void unrotate(test_sample *sample, const char *name, int64_t heads, int64_t width, double theta, int64_t turning)
{
    test_tensor *tensor = test_sample_find(sample, name);
    const int64_t pairs = width / 2;
    for (int64_t t = 0; t < tensor->shape[0]; t++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < turning; i++) {
                const double angle = (double)t * pow(theta, -2 * (double)i / (double)width);
                const int64_t a = (t * heads + head) * width + i, b = a + pairs;
                const double x = test_tensor_get(tensor, a), y = test_tensor_get(tensor, b);
                test_tensor_set(tensor, a, x * cos(angle) + y * sin(angle));
                test_tensor_set(tensor, b, y * cos(angle) - x * sin(angle));
            }
}

/* ---- hidden states -------------------------------------------------------------------------------------------- */

static void hidden_before_the_norm(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(SAMPLE "/train/sample_0000.safetensors");
    replace(&sample, "hidden_states", SAMPLE "/raw/sample_0000.safetensors");
    expect_bent(&sample, MTP_CHECK_HIDDEN_NORM, 0, "hidden_norm = \"pre\"");
}

static void hidden_shifted(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    roll(&sample, "hidden_states", 1);
    expect_bent(&sample, MTP_CHECK_HIDDEN_SHIFTED, 57, "row t holds position t+1");
    sample = test_sample_load(source(BENT));
    roll(&sample, "hidden_states", -1);
    expect_bent(&sample, MTP_CHECK_HIDDEN_SHIFTED, 57, "row t holds position t-1");
    sample = test_sample_load(source(BENT));
    lag(&sample, "hidden_states"); /* and not "repeated-rows" for its last two */
    expect_bent(&sample, MTP_CHECK_HIDDEN_SHIFTED, 57, "row t holds position t+1");
}

static void hidden_of_another_scale(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    scale(&sample, "hidden_states", 1.25);
    expect_bent(&sample, MTP_CHECK_SCALE, 0, "on average 1.25");
}

static void ids_of_another_tokenizer(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    test_tensor *ids = test_sample_find(&sample, "token_ids");
    for (int64_t i = 0; i < ids->count; i++)
        test_tensor_set(ids, i, (double)(((int64_t)test_tensor_get(ids, i) * 7 + 13) % VOCAB));
    expect_bent(&sample, MTP_CHECK_TOKENS, 57, "another tokenizer");
    sample = test_sample_load(source(BENT));
    test_tensor_set(test_sample_find(&sample, "token_ids"), 77, VOCAB);
    expect_bent(&sample, MTP_CHECK_IDS, 77, "token_ids[77] is 2048");
}

/* ---- K and V -------------------------------------------------------------------------------------------------- */

static void k_shifted(void **state)
{
    (void)state;
    static const char *const names[] = {"kv_last_local_k", "kv_last_global_k"};
    for (int i = 0; i < 2; i++) {
        test_sample sample = test_sample_load(source(BENT));
        roll(&sample, names[i], 1);
        expect_bent(&sample, MTP_CHECK_K_SHIFTED, 0, test_path("%s: row t fits rotary position t + 1", names[i]));
        sample = test_sample_load(source(BENT));
        lag(&sample, names[i]);
        expect_bent(&sample, MTP_CHECK_K_SHIFTED, 0, test_path("%s: row t fits rotary position t + 1", names[i]));
    }
    test_sample sample = test_sample_load(source(BENT));
    roll(&sample, names[0], -1);
    expect_bent(&sample, MTP_CHECK_K_SHIFTED, 0, "kv_last_local_k: row t fits rotary position t - 1");
}

static void v_shifted(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    roll(&sample, "kv_last_local_v", 1);
    expect_bent(&sample, MTP_CHECK_V_SHIFTED, 0, "kv_last_local_v: row t follows from token and hidden state t+1");
    sample = test_sample_load(source(BENT));
    roll(&sample, "kv_last_local_v", -1);
    expect_bent(&sample, MTP_CHECK_V_SHIFTED, 0, "kv_last_local_v: row t follows from token and hidden state t-1");
    sample = test_sample_load(source(BENT));
    lag(&sample, "kv_last_global_v");
    expect_bent(&sample, MTP_CHECK_V_SHIFTED, 0, "kv_last_global_v: K of token t");
}

static void swapped(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    static const char *const pairs[2][2] = {{"kv_last_local_k", "kv_last_global_k"},
                                            {"kv_last_local_v", "kv_last_global_v"}};
    for (int i = 0; i < 2; i++) { /* both hold 64 values a token */
        test_tensor *local = test_sample_find(&sample, pairs[i][0]), *global = test_sample_find(&sample, pairs[i][1]);
        void *data = local->data;
        local->data = global->data;
        global->data = data;
    }
    expect_bent(&sample, MTP_CHECK_SWAPPED, 0, "local and global are swapped");
}

static void k_without_rope(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    unrotate(&sample, "kv_last_local_k", LOCAL_HEADS, LOCAL_DIM, 1e4, LOCAL_DIM / 2);
    expect_bent(&sample, MTP_CHECK_K_ROPE, 0, "kv_last_local_k fits its norm without rotary embedding");
    sample = test_sample_load(source(BENT));
    unrotate(&sample, "kv_last_global_k", 1, GLOBAL_DIM, 1e6, GLOBAL_DIM / 8);
    expect_bent(&sample, MTP_CHECK_K_ROPE, 0, "kv_last_global_k fits its norm without rotary embedding");
}

static void kv_of_another_sample(void **state)
{
    (void)state;
    static const char *const names[] = {"kv_last_local_k", "kv_last_local_v", "kv_last_global_k", "kv_last_global_v"};
    test_sample sample = test_sample_load(source(BENT));
    for (int i = 0; i < 4; i++) replace(&sample, names[i], source(DONOR));
    expect_bent(&sample, MTP_CHECK_OTHER_KV, 0, "kv_last_local_k does not follow");
    sample = test_sample_load(source(BENT));
    replace(&sample, "kv_last_local_v", source(DONOR));
    expect_bent(&sample, MTP_CHECK_OTHER_KV, 0, "kv_last_local_v does not follow");
    sample = test_sample_load(source(BENT));
    replace(&sample, "kv_last_global_k", source(DONOR));
    expect_bent(&sample, MTP_CHECK_OTHER_KV, 0, "kv_last_global_v is not K without weight and rotation");
}

static void kv_of_another_scale(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    scale(&sample, "kv_last_local_k", 1.5);
    expect_bent(&sample, MTP_CHECK_SCALE, 0, "kv_last_local_k");
    sample = test_sample_load(source(BENT));
    scale(&sample, "kv_last_global_v", 0.5);
    expect_bent(&sample, MTP_CHECK_SCALE, 0, "kv_last_global_v");
}

/* ---- rows ----------------------------------------------------------------------------------------------------- */

static void bad_rows(void **state)
{
    (void)state;
    static const char *const names[] = {"hidden_states", "kv_last_local_k", "kv_last_global_v"};
    for (int i = 0; i < 3; i++) {
        test_sample sample = test_sample_load(source(BENT));
        test_tensor *tensor = test_sample_find(&sample, names[i]);
        memset((char *)tensor->data + 40 * row_bytes(tensor), 0, 16 * row_bytes(tensor));
        expect_bent(&sample, MTP_CHECK_ZERO_ROWS, 40, names[i]);

        sample = test_sample_load(source(BENT));
        tensor = test_sample_find(&sample, names[i]);
        test_tensor_set(tensor, 33 * (tensor->count / tensor->shape[0]) + 5, i == 1 ? (double)INFINITY : (double)NAN);
        expect_bent(&sample, MTP_CHECK_NONFINITE, 33, "at token 33, value 5");

        sample = test_sample_load(source(BENT));
        tensor = test_sample_find(&sample, names[i]);
        for (size_t t = 61; t < 77; t++)
            memcpy((char *)tensor->data + t * row_bytes(tensor), (char *)tensor->data + 60 * row_bytes(tensor),
                   row_bytes(tensor));
        expect_bent(&sample, MTP_CHECK_REPEATED_ROWS, 61, names[i]);
    }
}

/* ---- files and headers ---------------------------------------------------------------------------------------- */

static void truncated_file(void **state)
{
    (void)state;
    const char *dir = six_samples(), *path = test_path("%s/sample_0103.safetensors", dir);
    size_t size;
    char *bytes = test_read(path, &size);
    test_write(path, bytes, size - 1000);
    free(bytes);
    expect(dir, MTP_CHECK_FILE, -1, "");
}

static void lying_lengths(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    test_sample_find(&sample, "kv_last_local_v")->shape[0]--;
    expect_bent(&sample, MTP_CHECK_HEADER, -1, "every key must have the same length");
}

static void another_origin(void **state)
{
    (void)state;
    test_sample sample = test_sample_load(source(BENT));
    for (int i = 0; i < sample.num_metadata; i++)
        if (strcmp(sample.metadata[i].key, "verifier") == 0) sample.metadata[i].value = "another";
    expect_bent(&sample, MTP_CHECK_PROVENANCE, -1, "another, in most samples it is verifier");
    sample = test_sample_load(source(BENT));
    test_sample_retype(&sample, "hidden_states", MTP_F32);
    expect_bent(&sample, MTP_CHECK_PROVENANCE, -1, "type of hidden_states is F32, in most samples it is BF16");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hidden_before_the_norm),
        cmocka_unit_test(hidden_shifted),
        cmocka_unit_test(hidden_of_another_scale),
        cmocka_unit_test(ids_of_another_tokenizer),
        cmocka_unit_test(k_shifted),
        cmocka_unit_test(v_shifted),
        cmocka_unit_test(swapped),
        cmocka_unit_test(k_without_rope),
        cmocka_unit_test(kv_of_another_sample),
        cmocka_unit_test(kv_of_another_scale),
        cmocka_unit_test(bad_rows),
        cmocka_unit_test(truncated_file),
        cmocka_unit_test(lying_lengths),
        cmocka_unit_test(another_origin),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
