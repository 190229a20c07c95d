#include "faults.h"

#include <math.h>

enum { LOCAL_HEADS = 2, LOCAL_DIM = 32, GLOBAL_DIM = 64, VOCAB = 2048 };

const char *test_eval_sample(int number)
{
    return test_path(TEST_SAMPLES "/eval/sample_%04d.safetensors", number);
}

const char *test_eval_samples(int count)
{
    const char *dir = test_dir();
    for (int i = TEST_FIRST; i < TEST_FIRST + count; i++)
        test_copy(test_eval_sample(i), test_path("%s/sample_%04d.safetensors", dir, i));
    return dir;
}

static test_sample right(void)
{
    return test_sample_load(test_eval_sample(TEST_BENT));
}

static size_t row_bytes(const test_tensor *tensor)
{
    return (size_t)(tensor->count / tensor->shape[0]) * mtp_dtype_size(tensor->dtype);
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

/* ---- rows of another token ------------------------------------------------------------------------------------ */

/* Row t becomes row t + amount; rows that leave at one end come in at the other. */
static test_sample rolled(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    const size_t row = row_bytes(tensor), rows = (size_t)tensor->shape[0], by = (size_t)(int64_t)fault->amount;
    char *old = tensor->data, *data = malloc(row * rows + 1);
    for (size_t t = 0; t < rows; t++) memcpy(data + t * row, old + (t + rows + by) % rows * row, row);
    tensor->data = data;
    free(old);
    return sample;
}

/* Row t becomes row t + 1, the last one stays: how a lag of one token looks when nothing wraps around. */
static test_sample lagging(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    const size_t row = row_bytes(tensor);
    memmove(tensor->data, (char *)tensor->data + row, row * (size_t)(tensor->shape[0] - 1));
    return sample;
}

/* ---- other values --------------------------------------------------------------------------------------------- */

static test_sample before_the_norm(const test_fault *fault)
{
    test_sample sample = test_sample_load(TEST_SAMPLES "/train/sample_0000.safetensors");
    replace(&sample, fault->tensor, TEST_SAMPLES "/raw/sample_0000.safetensors");
    return sample;
}

static test_sample scaled(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    for (int64_t i = 0; i < tensor->count; i++) test_tensor_set(tensor, i, fault->amount * test_tensor_get(tensor, i));
    return sample;
}

static test_sample other_tokenizer(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *ids = test_sample_find(&sample, fault->tensor);
    for (int64_t i = 0; i < ids->count; i++)
        test_tensor_set(ids, i, (double)(((int64_t)test_tensor_get(ids, i) * 7 + 13) % VOCAB));
    return sample;
}

static test_sample outside_vocabulary(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor_set(test_sample_find(&sample, fault->tensor), 77, VOCAB);
    return sample;
}

static test_sample swapped(const test_fault *fault)
{
    static const char *const pairs[2][2] = {{"kv_last_local_k", "kv_last_global_k"},
                                            {"kv_last_local_v", "kv_last_global_v"}};
    test_sample sample = right();
    (void)fault;
    for (int i = 0; i < 2; i++) { /* both hold 64 values a token */
        test_tensor *local = test_sample_find(&sample, pairs[i][0]), *global = test_sample_find(&sample, pairs[i][1]);
        void *data = local->data;
        local->data = global->data;
        global->data = data;
    }
    return sample;
}

/* Take the rotary embedding off again. */
static test_sample unrotated(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    const bool local = strstr(fault->tensor, "local") != NULL;
    const int64_t heads = local ? LOCAL_HEADS : 1, width = local ? LOCAL_DIM : GLOBAL_DIM, pairs = width / 2;
    const int64_t turning = local ? pairs : pairs / 4;
    for (int64_t t = 0; t < tensor->shape[0]; t++)
        for (int64_t head = 0; head < heads; head++)
            for (int64_t i = 0; i < turning; i++) {
                const double angle = (double)t * pow(local ? 1e4 : 1e6, -2 * (double)i / (double)width);
                const int64_t a = (t * heads + head) * width + i, b = a + pairs;
                const double x = test_tensor_get(tensor, a), y = test_tensor_get(tensor, b);
                test_tensor_set(tensor, a, x * cos(angle) + y * sin(angle));
                test_tensor_set(tensor, b, y * cos(angle) - x * sin(angle));
            }
    return sample;
}

/* One tensor, or without a name all K/V. */
static test_sample of_another_sample(const test_fault *fault)
{
    static const char *const names[] = {"kv_last_local_k", "kv_last_local_v", "kv_last_global_k", "kv_last_global_v"};
    test_sample sample = right();
    for (int i = 0; i < 4; i++)
        if (!fault->tensor || strcmp(fault->tensor, names[i]) == 0)
            replace(&sample, names[i], test_eval_sample(TEST_DONOR));
    return sample;
}

/* ---- bad rows ------------------------------------------------------------------------------------------------- */

static test_sample zeroed(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    memset((char *)tensor->data + 40 * row_bytes(tensor), 0, 16 * row_bytes(tensor));
    return sample;
}

static test_sample not_finite(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    test_tensor_set(tensor, 33 * (tensor->count / tensor->shape[0]) + 5, fault->amount);
    return sample;
}

static test_sample repeated(const test_fault *fault)
{
    test_sample sample = right();
    test_tensor *tensor = test_sample_find(&sample, fault->tensor);
    const size_t row = row_bytes(tensor);
    for (size_t t = 61; t < 77; t++) memcpy((char *)tensor->data + t * row, (char *)tensor->data + 60 * row, row);
    return sample;
}

/* ---- headers -------------------------------------------------------------------------------------------------- */

static test_sample shorter(const test_fault *fault)
{
    test_sample sample = right();
    test_sample_find(&sample, fault->tensor)->shape[0]--;
    return sample;
}

static test_sample of_another_verifier(const test_fault *fault)
{
    test_sample sample = right();
    (void)fault;
    for (int i = 0; i < sample.num_metadata; i++)
        if (strcmp(sample.metadata[i].key, "verifier") == 0) sample.metadata[i].value = "another";
    return sample;
}

static test_sample of_another_type(const test_fault *fault)
{
    test_sample sample = right();
    test_sample_retype(&sample, fault->tensor, MTP_F32);
    return sample;
}

/* ---- all of them ---------------------------------------------------------------------------------------------- */

#define HIDDEN "hidden_states"
#define LOCAL_K "kv_last_local_k"
#define LOCAL_V "kv_last_local_v"
#define GLOBAL_K "kv_last_global_k"
#define GLOBAL_V "kv_last_global_v"

const test_fault test_faults[] = {
    {"before the norm", before_the_norm, HIDDEN, 0, MTP_CHECK_HIDDEN_NORM, 0, "hidden_norm = \"pre\"", true},
    {"hidden states of t+1", rolled, HIDDEN, 1, MTP_CHECK_HIDDEN_SHIFTED, 57, "row t holds position t+1", false},
    {"hidden states of t-1", rolled, HIDDEN, -1, MTP_CHECK_HIDDEN_SHIFTED, 57, "row t holds position t-1", false},
    /* and not "repeated-rows" for its last two */
    {"hidden states lag", lagging, HIDDEN, 0, MTP_CHECK_HIDDEN_SHIFTED, 57, "row t holds position t+1", false},
    {"scale of hidden states", scaled, HIDDEN, 1.25, MTP_CHECK_SCALE, 0, "on average 1.25", false},
    {"other tokenizer", other_tokenizer, "token_ids", 0, MTP_CHECK_TOKENS, 57, "another tokenizer", false},
    {"outside the vocabulary", outside_vocabulary, "token_ids", 0, MTP_CHECK_IDS, 77, "token_ids[77] is 2048", false},
    {"local K of t+1", rolled, LOCAL_K, 1, MTP_CHECK_K_SHIFTED, 0, LOCAL_K ": row t fits rotary position t + 1", false},
    {"local K of t-1", rolled, LOCAL_K, -1, MTP_CHECK_K_SHIFTED, 0, LOCAL_K ": row t fits rotary position t - 1",
     false},
    {"local K lags", lagging, LOCAL_K, 0, MTP_CHECK_K_SHIFTED, 0, LOCAL_K ": row t fits rotary position t + 1", false},
    {"global K of t+1", rolled, GLOBAL_K, 1, MTP_CHECK_K_SHIFTED, 0, GLOBAL_K ": row t fits rotary position t + 1",
     false},
    {"global K lags", lagging, GLOBAL_K, 0, MTP_CHECK_K_SHIFTED, 0, GLOBAL_K ": row t fits rotary position t + 1",
     false},
    {"local V of t+1", rolled, LOCAL_V, 1, MTP_CHECK_V_SHIFTED, 0,
     LOCAL_V ": row t follows from token and hidden state t+1", false},
    {"local V of t-1", rolled, LOCAL_V, -1, MTP_CHECK_V_SHIFTED, 0,
     LOCAL_V ": row t follows from token and hidden state t-1", false},
    {"global V lags", lagging, GLOBAL_V, 0, MTP_CHECK_V_SHIFTED, 0, GLOBAL_V ": K of token t", false},
    {"swapped", swapped, NULL, 0, MTP_CHECK_SWAPPED, 0, "local and global are swapped", false},
    {"local K without RoPE", unrotated, LOCAL_K, 0, MTP_CHECK_K_ROPE, 0,
     LOCAL_K " fits its norm without rotary embedding", false},
    {"global K without RoPE", unrotated, GLOBAL_K, 0, MTP_CHECK_K_ROPE, 0,
     GLOBAL_K " fits its norm without rotary embedding", false},
    {"K/V of another sample", of_another_sample, NULL, 0, MTP_CHECK_OTHER_KV, 0, LOCAL_K " does not follow", false},
    {"local V of another sample", of_another_sample, LOCAL_V, 0, MTP_CHECK_OTHER_KV, 0, LOCAL_V " does not follow",
     false},
    {"global K of another sample", of_another_sample, GLOBAL_K, 0, MTP_CHECK_OTHER_KV, 0,
     GLOBAL_V " is not K without weight and rotation", false},
    {"scale of local K", scaled, LOCAL_K, 1.5, MTP_CHECK_SCALE, 0, LOCAL_K, false},
    {"scale of global V", scaled, GLOBAL_V, 0.5, MTP_CHECK_SCALE, 0, GLOBAL_V, false},
    {"zero hidden states", zeroed, HIDDEN, 0, MTP_CHECK_ZERO_ROWS, 40, HIDDEN, false},
    {"zero local K", zeroed, LOCAL_K, 0, MTP_CHECK_ZERO_ROWS, 40, LOCAL_K, false},
    {"zero global V", zeroed, GLOBAL_V, 0, MTP_CHECK_ZERO_ROWS, 40, GLOBAL_V, false},
    {"NaN hidden states", not_finite, HIDDEN, NAN, MTP_CHECK_NONFINITE, 33, "at token 33, value 5", false},
    {"infinite local K", not_finite, LOCAL_K, INFINITY, MTP_CHECK_NONFINITE, 33, "at token 33, value 5", false},
    {"NaN global V", not_finite, GLOBAL_V, NAN, MTP_CHECK_NONFINITE, 33, "at token 33, value 5", false},
    {"repeated hidden states", repeated, HIDDEN, 0, MTP_CHECK_REPEATED_ROWS, 61, HIDDEN, false},
    {"repeated local K", repeated, LOCAL_K, 0, MTP_CHECK_REPEATED_ROWS, 61, LOCAL_K, false},
    {"repeated global V", repeated, GLOBAL_V, 0, MTP_CHECK_REPEATED_ROWS, 61, GLOBAL_V, false},
    {"lying lengths", shorter, LOCAL_V, 0, MTP_CHECK_HEADER, -1, "every key must have the same length", true},
    {"other verifier", of_another_verifier, NULL, 0, MTP_CHECK_PROVENANCE, -1,
     "another, in most samples it is verifier", false},
    {"other type", of_another_type, HIDDEN, 0, MTP_CHECK_PROVENANCE, -1,
     "type of hidden_states is F32, in most samples it is BF16", true},
};
const int test_num_faults = (int)(sizeof test_faults / sizeof *test_faults);
