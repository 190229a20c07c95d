/* Protects: what is wrong with a sample, a mask or a directory is found and named (file, key, index) before training,
 * and nothing is read as something it is not. */
#include "samples.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mtp/data.h"

enum { LENGTH = 8, PROMPT = 3 };

static mtp_verifier *verifier;

static int set_up(void **state)
{
    (void)state;
    return mtp_verifier_open(test_tiny_verifier(), NULL, &verifier) == MTP_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    mtp_verifier_close(verifier);
    return 0;
}

/* Lines that the data set logs, one after the other. */
static char logged[4096];
static void keep_line(void *user, mtp_log_level level, const char *line)
{
    (void)user;
    const size_t used = strlen(logged);
    snprintf(logged + used, sizeof logged - used, "%d %s\n", (int)level, line);
}
static const mtp_logger logger = {.write = keep_line, .min_level = MTP_LOG_INFO};

static mtp_status open_path(const char *path, mtp_hidden_norm norm, mtp_dataset **dataset)
{
    const mtp_dataset_options options = {.hidden_norm = norm, .logger = &logger};
    logged[0] = '\0';
    return mtp_dataset_open(&path, 1, verifier, &options, dataset);
}

static void refuses(const char *path, mtp_status expected, const char *text)
{
    mtp_dataset *dataset = NULL;
    assert_fails(open_path(path, MTP_HIDDEN_UNSET, &dataset), expected, text);
    assert_null(dataset);
}

static test_sample sound(void)
{
    return test_sample_make(LENGTH, PROMPT, 9);
}

/* Make a tensor fp8, every byte 0x38: 1.0. */
static void make_f8(test_sample *sample, const char *key)
{
    test_tensor *tensor = test_sample_find(sample, key);
    free(tensor->data);
    tensor->dtype = MTP_F8_E4M3;
    tensor->data = calloc((size_t)tensor->count + 1, 1);
    memset(tensor->data, 0x38, (size_t)tensor->count);
}

/* Writes and frees the sample; its path. */
static const char *written(test_sample *sample)
{
    const char *path = test_path("%s/bad.safetensors", test_dir());
    test_sample_write(sample, path);
    test_sample_free(sample);
    return path;
}

static void sidecar(const char *dir, const char *text)
{
    test_write(test_path("%s/masks.jsonl", dir), text, strlen(text));
}

/* ---- headers -------------------------------------------------------------------------------------------------- */

static void missing_and_unknown_keys(void **state)
{
    (void)state;
    test_sample sample = sound();
    test_sample_remove(&sample, "kv_last_global_v");
    test_sample_remove(&sample, "hidden_states");
    const char *path = written(&sample);
    refuses(path, MTP_E_DATA, "bad.safetensors: missing hidden_states; missing kv_last_global_v");
    sample = sound();
    test_sample_put(&sample, "los_mask", MTP_U8, LENGTH);
    test_sample_put(&sample, "kv_last_local_k_scales", MTP_F32, LENGTH);
    path = written(&sample);
    refuses(path, MTP_E_DATA, "kv_last_local_k_scales");
    sample = sound();
    test_sample_put(&sample, "los_mask", MTP_U8, LENGTH);
    test_sample_put(&sample, "teacher", MTP_F32, LENGTH);
    path = written(&sample);
    refuses(path, MTP_E_DATA, "unknown tensor los_mask");
    refuses(path, MTP_E_DATA, "unknown tensor teacher");
    sample = sound();
    test_sample_put(&sample, "verifier_kv_last_local", MTP_F32, LENGTH, 2, TINY_LOCAL_HEADS, TINY_LOCAL_DIM);
    path = written(&sample);
    refuses(path, MTP_E_DATA, "both kv_last_local_k and verifier_kv_last_local");
}

static void shapes_types_and_lengths(void **state)
{
    static const struct {
        const char *key;
        mtp_dtype dtype;
        int32_t rank;
        int64_t shape[4];
        const char *text;
    } cases[] = {
        {"hidden_states", MTP_F32, 2, {LENGTH, TINY_HB + 1}, "hidden_states is F32 [8, 9]; expected [S, 8]"},
        {"hidden_states", MTP_F32, 2, {LENGTH - 1, TINY_HB}, "hidden_states is F32 [7, 8], but token_ids has 8 tokens"},
        {"hidden_states", MTP_I64, 2, {LENGTH, TINY_HB}, "hidden_states is I64"},
        {"hidden_states", MTP_F8_E4M3, 2, {LENGTH, TINY_HB}, "there is no hidden_states_scales"},
        {"hidden_states", MTP_F32, 3, {LENGTH, 0, TINY_HB}, "hidden_states is F32 [8, 0, 8]"},
        {"kv_last_local_k",
         MTP_F32,
         3,
         {LENGTH, TINY_LOCAL_DIM, TINY_LOCAL_HEADS},
         "K/V geometry of the verifier's layer 0"},
        {"kv_last_local_v", MTP_F32, 3, {LENGTH, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM}, "expected [S, 2, 4]"},
        {"kv_last_global_k",
         MTP_F32,
         3,
         {LENGTH + 2, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM},
         "every key must have the same length"},
        {"kv_last_global_v",
         MTP_F32,
         4,
         {2, LENGTH, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM},
         "kv_last_global_v is F32 [2, 8, 1, 6]"},
        {"kv_last_global_v", MTP_F8_E5M2, 3, {LENGTH, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM}, "F8_E5M2"},
        {"token_ids", MTP_I16, 1, {LENGTH}, "token_ids is I16 [8]; expected I64 or I32 [S]"},
        {"token_ids", MTP_I64, 2, {1, LENGTH}, "token_ids is I64 [1, 8]"},
        {"token_ids", MTP_I64, 1, {0}, "the sample is empty"},
        {"loss_mask", MTP_F32, 1, {LENGTH}, "loss_mask is F32 [8]; expected U8, BOOL or I64 [S]"},
        {"loss_mask", MTP_U8, 1, {LENGTH - 2}, "loss_mask is U8 [6], but token_ids has 8 tokens"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_sample sample = sound();
        test_sample_remove(&sample, cases[i].key);
        test_sample_add(&sample, cases[i].key, cases[i].dtype, cases[i].rank, cases[i].shape);
        const char *path = written(&sample);
        refuses(path, MTP_E_DATA, cases[i].text);
        refuses(path, MTP_E_DATA, "bad.safetensors: ");
    }
}

static void scales_must_fit(void **state)
{
    static const struct {
        const char *key;
        mtp_dtype dtype;
        int32_t rank;
        int64_t shape[3];
        const char *text;
    } cases[] = {
        {"kv_last_local_k", MTP_F32, 1, {LENGTH - 1}, "neither one scale a token nor one a token and head"},
        {"kv_last_local_k", MTP_F32, 2, {LENGTH, 3}, "kv_last_local_k_scales is F32 [8, 3]"},
        {"kv_last_local_k", MTP_F32, 3, {LENGTH, TINY_LOCAL_HEADS, TINY_LOCAL_DIM}, "neither one scale a token"},
        {"hidden_states", MTP_I64, 1, {LENGTH}, "hidden_states_scales is I64"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_sample sample = sound();
        make_f8(&sample, cases[i].key);
        test_sample_add(&sample, test_path("%s_scales", cases[i].key), cases[i].dtype, cases[i].rank, cases[i].shape);
        refuses(written(&sample), MTP_E_DATA, cases[i].text);
    }
}

static void metadata_is_checked(void **state)
{
    static const struct {
        const char *key, *value;
        mtp_status status;
        const char *text;
    } cases[] = {
        {"hidden_norm", "none", MTP_E_DATA, "hidden_norm \"none\"; \"pre\" or \"post\""},
        {"format", "mtp-sample-2", MTP_E_VERSION, "this program reads mtp-sample-1"},
        {"window", "8", MTP_E_DATA, "window 8, the verifier's sliding_window is 4"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_sample sample = sound();
        sample.num_metadata = 1;
        sample.metadata[0] = (mtp_safetensors_pair){cases[i].key, cases[i].value};
        refuses(written(&sample), cases[i].status, cases[i].text);
    }
    test_sample sample = sound();
    sample.metadata[1] = (mtp_safetensors_pair){"window", "4"};
    sample.metadata[2] = (mtp_safetensors_pair){"format", "mtp-sample-1"};
    sample.metadata[3] = (mtp_safetensors_pair){"verifier", "anything"};
    sample.num_metadata = 4;
    mtp_dataset *dataset = NULL;
    assert_ok(open_path(written(&sample), MTP_HIDDEN_UNSET, &dataset));
    mtp_dataset_close(dataset);
}

static void the_norm_must_be_known(void **state)
{
    (void)state;
    test_sample sample = sound();
    sample.num_metadata = 0;
    const char *unlabelled = written(&sample);
    refuses(unlabelled, MTP_E_CONFIG, "hidden_norm = \"pre\"");
    refuses(unlabelled, MTP_E_CONFIG, "hidden_norm = \"post\"");
    mtp_dataset *dataset = NULL;
    assert_ok(open_path(unlabelled, MTP_HIDDEN_PRE, &dataset));
    mtp_dataset_close(dataset);
    sample = sound();
    const char *post = written(&sample);
    assert_fails(open_path(post, MTP_HIDDEN_PRE, &dataset), MTP_E_CONFIG, "the file says hidden_norm \"post\"");
    assert_ok(open_path(post, MTP_HIDDEN_POST, &dataset));
    mtp_dataset_close(dataset);
}

/* ---- values --------------------------------------------------------------------------------------------------- */

static void bad_values_are_named(void **state)
{
    static const struct {
        const char *key;
        int64_t index;
        double value;
        const char *text;
    } cases[] = {
        {"hidden_states", 2 * TINY_HB + 5, NAN, "hidden_states: NaN or Inf at token 2, value 5"},
        {"kv_last_local_k", (3 * TINY_LOCAL_HEADS + 1) * TINY_LOCAL_DIM + 2, INFINITY,
         "kv_last_local_k: NaN or Inf at token 3, head 1, value 2"},
        {"kv_last_global_v", 7 * TINY_GLOBAL_DIM, -INFINITY, "kv_last_global_v: NaN or Inf at token 7, value 0"},
        {"token_ids", 4, TINY_VOCAB, "token_ids[4] is 32, outside the vocabulary of 32"},
        {"token_ids", 0, -1, "token_ids[0] is -1"},
    };
    static const mtp_dtype types[] = {MTP_F32, MTP_BF16, MTP_F16};
    (void)state;
    const int64_t first = 0;
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (int j = 0; j < 3; j++) {
            test_sample sample = sound();
            if (strcmp(cases[i].key, "token_ids") != 0) test_sample_retype(&sample, cases[i].key, types[j]);
            test_tensor_set(test_sample_find(&sample, cases[i].key), cases[i].index, cases[i].value);
            const char *path = written(&sample);
            assert_ok(open_path(path, MTP_HIDDEN_UNSET, &dataset));
            assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA, cases[i].text);
            assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA, path);
            assert_null(batch);
            mtp_dataset_close(dataset);
        }
}

static void rows_of_zeros_are_named(void **state)
{
    (void)state;
    const int64_t first = 0;
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    for (int pre = 0; pre < 2; pre++) {
        test_sample sample = sound();
        sample.metadata[0].value = pre ? "pre" : "post";
        for (int i = 0; i < TINY_HB; i++)
            test_tensor_set(test_sample_find(&sample, "hidden_states"), 6 * TINY_HB + i, i % 2 ? -0.0 : 0.0);
        assert_ok(open_path(written(&sample), MTP_HIDDEN_UNSET, &dataset));
        assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA,
                     "hidden_states: every value of token 6 is zero");
        mtp_dataset_close(dataset);
    }
}

static void bad_scales_and_masks_are_named(void **state)
{
    (void)state;
    const int64_t first = 0;
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    test_sample sample = sound();
    make_f8(&sample, "kv_last_local_k");
    test_tensor_set(test_sample_put(&sample, "kv_last_local_k_scales", MTP_F32, LENGTH), 5, NAN);
    assert_ok(open_path(written(&sample), MTP_HIDDEN_UNSET, &dataset));
    assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA,
                 "kv_last_local_k_scales: the scale of token 5 is nan");
    mtp_dataset_close(dataset);
    sample = sound();
    make_f8(&sample, "kv_last_local_k");
    test_tensor_set(test_sample_find(&sample, "kv_last_local_k"), 9, 0x7f);
    test_tensor *scales = test_sample_put(&sample, "kv_last_local_k_scales", MTP_F32, LENGTH);
    for (int i = 0; i < LENGTH; i++) test_tensor_set(scales, i, 1);
    assert_ok(open_path(written(&sample), MTP_HIDDEN_UNSET, &dataset));
    assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA,
                 "kv_last_local_k: NaN or Inf at token 1, head 0, value 1");
    mtp_dataset_close(dataset);
    sample = sound();
    test_tensor_set(test_sample_find(&sample, "loss_mask"), 6, 2);
    refuses(written(&sample), MTP_E_DATA, "loss_mask[6] is 2");
}

/* ---- masks ---------------------------------------------------------------------------------------------------- */

static const char *dir_without_masks(void)
{
    const char *dir = test_dir();
    for (int i = 0; i < 2; i++) {
        test_sample sample = sound();
        test_sample_remove(&sample, "loss_mask");
        test_sample_write(&sample, test_path("%s/s%d.safetensors", dir, i));
        test_sample_free(&sample);
    }
    return dir;
}

static void masks_from_a_sidecar(void **state)
{
    (void)state;
    const char *dir = dir_without_masks();
    refuses(dir, MTP_E_DATA, "put loss_mask (U8 [S]) into the file");
    refuses(dir, MTP_E_DATA, "{\"file\": \"s0.safetensors\", \"prompt_len\": N}");
    sidecar(dir, "{\"file\": \"s1.safetensors\", \"loss_mask\": [0, 1, false, true, 0, 0, 1, 0]}\n\n"
                 "{\"file\": \"s0.safetensors\", \"prompt_len\": 5, \"prompt_ids\": [1, 2], \"total_len\": 8}\n");
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    static const int64_t both[2] = {0, 1};
    static const uint8_t expected[2 * LENGTH] = {0, 0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 0, 1, 0};
    assert_ok(open_path(dir, MTP_HIDDEN_UNSET, &dataset));
    assert_int_equal(mtp_dataset_sample(dataset, 0).prompt_len, 5);
    assert_int_equal(mtp_dataset_sample(dataset, 0).num_supervised, 3);
    assert_int_equal(mtp_dataset_sample(dataset, 1).prompt_len, 1);
    assert_int_equal(mtp_dataset_sample(dataset, 1).num_supervised, 3);
    assert_string_equal(mtp_dataset_sample(dataset, 1).name, "s1.safetensors");
    assert_ok(mtp_batch_collate(dataset, both, 2, true, &batch));
    assert_memory_equal(batch->loss_mask, expected, sizeof expected);
    assert_int_equal(batch->num_supervised, 5);
    mtp_batch_free(batch);
    mtp_dataset_close(dataset);
    /* one file of the directory, by its own path */
    assert_ok(open_path(test_path("%s/s0.safetensors", dir), MTP_HIDDEN_UNSET, &dataset));
    assert_int_equal(mtp_dataset_size(dataset), 1);
    mtp_dataset_close(dataset);
}

static void bad_sidecars_are_named(void **state)
{
    static const struct {
        const char *text;
        mtp_status status;
        const char *message;
    } cases[] = {
        {"{\"file\": \"s0.safetensors\", \"prompt_len\": 1}\n{\"file\": \"s1.safetensors\", \"prompt_len\": 1}\n"
         "{\"file\": \"s0.safetensors\", \"prompt_len\": 1}",
         MTP_E_DATA, "s0.safetensors is listed twice"},
        {"{\"file\": \"s0.safetensors\", \"prompt_len\": 9}", MTP_E_DATA, "masks.jsonl:1: prompt_len is 9"},
        {"\n{\"file\": \"s0.safetensors\", \"loss_mask\": [1, 1]}", MTP_E_DATA,
         "masks.jsonl:2: loss_mask has 2 entries"},
        {"{\"file\": \"s0.safetensors\", \"loss_mask\": [1, 2]}", MTP_E_FORMAT, "loss_mask[1]"},
        {"{\"file\": \"s0.safetensors\", \"loss_mask\": []}", MTP_E_DATA, "is empty"},
        {"{\"file\": \"s0.safetensors\", \"loss_mask\": [1], \"prompt_len\": 1}", MTP_E_DATA, "has both prompt_len"},
        {"{\"file\": \"s0.safetensors\"}", MTP_E_DATA, "has neither prompt_len"},
        {"{\"file\": \"s0.safetensors\", \"prompt_len\": -1}", MTP_E_FORMAT, "prompt_len"},
        {"{\"file\": \"s0.safetensors\", \"prompt_len\": 1.5}", MTP_E_FORMAT, "prompt_len"},
        {"{\"file\": \"x/s0.safetensors\", \"prompt_len\": 1}", MTP_E_DATA, "without directory"},
        {"{\"file\": \"s0\", \"prompt_len\": 1}", MTP_E_DATA, "masks.jsonl:1 is for \"s0\""},
        {"{\"step\": 1}", MTP_E_DATA, "no key file"},
        {"[1]", MTP_E_FORMAT, "masks.jsonl:1"},
        {"{\"file\": ", MTP_E_FORMAT, "masks.jsonl:1"},
        {"", MTP_E_FORMAT, "masks.jsonl"},
    };
    (void)state;
    const char *dir = dir_without_masks();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sidecar(dir, cases[i].text);
        refuses(dir, cases[i].status, cases[i].message);
    }
}

static void sidecar_and_file_must_agree(void **state)
{
    (void)state;
    const char *dir = test_dir();
    test_sample sample = sound();
    test_sample_write(&sample, test_path("%s/s0.safetensors", dir));
    test_sample_free(&sample);
    sidecar(dir,
            "{\"file\": \"s0.safetensors\", \"prompt_len\": 3}\n{\"file\": \"gone.safetensors\", \"prompt_len\": 3}\n");
    mtp_dataset *dataset = NULL;
    assert_ok(open_path(dir, MTP_HIDDEN_UNSET, &dataset));
    assert_non_null(strstr(logged, "masks.jsonl:2: gone.safetensors is not there"));
    mtp_dataset_close(dataset);
    sidecar(dir, "{\"file\": \"s0.safetensors\", \"prompt_len\": 4}\n");
    refuses(dir, MTP_E_DATA, "loss_mask of the file says 1 for token 3, the sidecar says 0");
}

static void short_samples_supervise_nothing(void **state)
{
    (void)state;
    const char *dir = test_dir();
    for (int length = 1; length <= 3; length++) {
        test_sample_file(test_path("%s/s%d.safetensors", dir, length), length, 0, 4);
    }
    mtp_dataset *dataset = NULL;
    assert_ok(open_path(dir, MTP_HIDDEN_UNSET, &dataset));
    assert_non_null(strstr(logged, "2 samples have no token that could be a target"));
    for (int64_t i = 0; i < 3; i++) {
        mtp_batch *batch = NULL;
        assert_ok(mtp_batch_collate(dataset, &i, 1, true, &batch));
        assert_int_equal(batch->num_supervised, i == 2);
        mtp_batch_free(batch);
    }
    mtp_dataset_close(dataset);
}

/* ---- paths ---------------------------------------------------------------------------------------------------- */

static void paths_that_hold_no_samples(void **state)
{
    (void)state;
    const char *dir = test_dir();
    refuses(dir, MTP_E_NOT_FOUND, "no *.safetensors files in this directory");
    refuses(test_path("%s/nothing", dir), MTP_E_NOT_FOUND, "no such file or directory");
    const char *path = test_path("%s/a.safetensors", dir);
    test_write(path, "", 0);
    refuses(path, MTP_E_FORMAT, path);
    test_write(path, "\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10);
    refuses(dir, MTP_E_FORMAT, path);
    refuses(MTP_TEST_DATA "/sample/drafter_init", MTP_E_DATA, "missing token_ids");
}

static void a_sample_is_taken_once(void **state)
{
    (void)state;
    const char *dir = test_dir();
    test_sample sample = sound();
    test_sample_write(&sample, test_path("%s/a.safetensors", dir));
    test_sample_free(&sample);
    const char *paths[2] = {dir, test_path("%s/./a.safetensors", dir)};
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *dataset = NULL;
    assert_fails(mtp_dataset_open(paths, 2, verifier, &options, &dataset), MTP_E_CONFIG, "is given twice");
}

static void a_file_that_changes_is_noticed(void **state)
{
    (void)state;
    const char *path = test_path("%s/a.safetensors", test_dir());
    test_sample sample = sound();
    test_sample_write(&sample, path);
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    const int64_t first = 0;
    assert_ok(open_path(path, MTP_HIDDEN_UNSET, &dataset));
    for (int64_t i = PROMPT; i < LENGTH; i++) test_tensor_set(test_sample_find(&sample, "loss_mask"), i, 0);
    test_sample_write(&sample, path);
    assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA, "loss_mask changed");
    test_sample_retype(&sample, "hidden_states", MTP_BF16);
    test_sample_write(&sample, path);
    assert_fails(mtp_batch_collate(dataset, &first, 1, true, &batch), MTP_E_DATA,
                 "changed since the data set was opened");
    test_sample_free(&sample);
    mtp_dataset_close(dataset);
}

static void fingerprint_knows_the_samples(void **state)
{
    (void)state;
    const char *dir = test_dir(), *moved = test_dir();
    test_sample a = test_sample_make(5, 2, 1), b = test_sample_make(6, 2, 2);
    test_sample_write(&a, test_path("%s/a.safetensors", dir));
    test_sample_write(&b, test_path("%s/b.safetensors", dir));
    test_sample_write(&a, test_path("%s/a.safetensors", moved));
    test_sample_write(&b, test_path("%s/b.safetensors", moved));
    mtp_dataset *one = NULL, *two = NULL;
    assert_ok(open_path(dir, MTP_HIDDEN_UNSET, &one));
    assert_ok(open_path(moved, MTP_HIDDEN_UNSET, &two));
    assert_true(mtp_dataset_fingerprint(one) == mtp_dataset_fingerprint(two));
    const uint64_t whole = mtp_dataset_fingerprint(one);
    mtp_dataset_close(two);
    const char *reversed[2] = {test_path("%s/b.safetensors", dir), test_path("%s/a.safetensors", dir)};
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    assert_ok(mtp_dataset_open(reversed, 2, verifier, &options, &two));
    assert_true(mtp_dataset_fingerprint(two) != whole);
    mtp_dataset_close(two);
    test_sample_write(&b, test_path("%s/a.safetensors", moved));
    assert_ok(open_path(moved, MTP_HIDDEN_UNSET, &two));
    assert_true(mtp_dataset_fingerprint(two) != whole);
    mtp_dataset_close(two);
    mtp_dataset_close(one);
    test_sample_free(&a);
    test_sample_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(missing_and_unknown_keys),
        cmocka_unit_test(shapes_types_and_lengths),
        cmocka_unit_test(scales_must_fit),
        cmocka_unit_test(metadata_is_checked),
        cmocka_unit_test(the_norm_must_be_known),
        cmocka_unit_test(bad_values_are_named),
        cmocka_unit_test(rows_of_zeros_are_named),
        cmocka_unit_test(bad_scales_and_masks_are_named),
        cmocka_unit_test(masks_from_a_sidecar),
        cmocka_unit_test(bad_sidecars_are_named),
        cmocka_unit_test(sidecar_and_file_must_agree),
        cmocka_unit_test(short_samples_supervise_nothing),
        cmocka_unit_test(paths_that_hold_no_samples),
        cmocka_unit_test(a_sample_is_taken_once),
        cmocka_unit_test(a_file_that_changes_is_noticed),
        cmocka_unit_test(fingerprint_knows_the_samples),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
