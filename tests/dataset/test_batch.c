/* Protects: every stored variant of a sample gives the same batch, padding is zero and outside every document, types
 * that differ become fp32 without changing a value, and hidden states stored before the final norm come out normalised.
 */
#include "samples.h"

#include <math.h>

#include "base/real.h"
#include "mtp/data.h"

enum { LENGTH = 7, PROMPT = 3 };

static mtp_verifier *verifier;

static int open_verifier(void **state)
{
    (void)state;
    return mtp_verifier_open(test_tiny_verifier(), NULL, &verifier) == MTP_OK ? 0 : -1;
}

static int close_verifier(void **state)
{
    (void)state;
    mtp_verifier_close(verifier);
    return 0;
}

static mtp_dataset *open_dir(const char *dir)
{
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_dataset *dataset = NULL;
    assert_ok(mtp_dataset_open(&dir, 1, verifier, &options, &dataset));
    return dataset;
}

static mtp_batch *collate(const mtp_dataset *dataset, bool packed)
{
    int64_t samples[16];
    mtp_batch *batch = NULL;
    for (int64_t i = 0; i < mtp_dataset_size(dataset); i++) samples[i] = i;
    assert_ok(mtp_batch_collate(dataset, samples, mtp_dataset_size(dataset), packed, &batch));
    return batch;
}

static float value_at(const mtp_view *view, int64_t index)
{
    float value;
    mtp__real_to_f32(&value, (const char *)view->data + (size_t)index * mtp_dtype_size(view->dtype), view->dtype, 1);
    return value;
}

/* Does the batch hold the first `length` tokens of `sample` from place `begin` on? */
static void check_document(const mtp_batch *batch, int64_t begin, test_sample *sample, int64_t length)
{
    static const char *const keys[MTP_LAYER_TYPES][2] = {{"kv_last_local_k", "kv_last_local_v"},
                                                         {"kv_last_global_k", "kv_last_global_v"}};
    for (int64_t t = 0; t < length; t++) {
        assert_int_equal(batch->token_ids[begin + t], (int)test_tensor_get(test_sample_find(sample, "token_ids"), t));
        assert_int_equal(batch->loss_mask[begin + t], (int)test_tensor_get(test_sample_find(sample, "loss_mask"), t));
        for (int64_t i = 0; i < TINY_HB; i++)
            assert_true((double)value_at(&batch->hidden_states, (begin + t) * TINY_HB + i) ==
                        test_tensor_get(test_sample_find(sample, "hidden_states"), t * TINY_HB + i));
        for (int type = 0; type < MTP_LAYER_TYPES; type++) {
            const mtp_view *kv = &batch->kv[type];
            const int64_t width = kv->shape[3] * kv->shape[4];
            for (int part = 0; part < 2; part++)
                for (int64_t i = 0; i < width; i++)
                    assert_true((double)value_at(kv, ((begin + t) * 2 + part) * width + i) ==
                                test_tensor_get(test_sample_find(sample, keys[type][part]), t * width + i));
        }
    }
}

static void check_shapes(const mtp_batch *batch, int64_t lines, int64_t seq)
{
    assert_int_equal(batch->batch, lines);
    assert_int_equal(batch->seq, seq);
    const int64_t hidden[3] = {lines, seq, TINY_HB};
    const int64_t local[5] = {lines, seq, 2, TINY_LOCAL_HEADS, TINY_LOCAL_DIM};
    const int64_t global[5] = {lines, seq, 2, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM};
    assert_int_equal(batch->hidden_states.rank, 3);
    assert_memory_equal(batch->hidden_states.shape, hidden, sizeof hidden);
    assert_int_equal(batch->kv[MTP_LAYER_SLIDING].rank, 5);
    assert_memory_equal(batch->kv[MTP_LAYER_SLIDING].shape, local, sizeof local);
    assert_memory_equal(batch->kv[MTP_LAYER_FULL].shape, global, sizeof global);
}

/* ---- shapes of a batch ---------------------------------------------------------------------------------------- */

static void packed_and_padded(void **state)
{
    (void)state;
    static const int64_t lengths[3] = {5, 1, 9};
    test_sample samples[3];
    const char *dir = test_dir();
    for (int i = 0; i < 3; i++) {
        samples[i] = test_sample_make(lengths[i], 1, 100 + (uint64_t)i);
        test_sample_write(&samples[i], test_path("%s/s%d.safetensors", dir, i));
    }
    mtp_dataset *dataset = open_dir(dir);
    mtp_batch *packed = collate(dataset, true), *padded = collate(dataset, false);
    check_shapes(packed, 1, 15);
    check_shapes(padded, 3, 9);
    assert_int_equal(packed->num_documents, 3);
    int64_t begin = 0;
    for (int i = 0; i < 3; i++) {
        assert_int_equal(packed->document_begin[i], begin);
        assert_int_equal(packed->document_end[i], begin + lengths[i]);
        assert_int_equal(packed->document_sample[i], i);
        assert_int_equal(padded->document_begin[i], i * 9);
        assert_int_equal(padded->document_end[i], i * 9 + lengths[i]);
        check_document(packed, begin, &samples[i], lengths[i]);
        check_document(padded, i * 9, &samples[i], lengths[i]);
        for (int64_t t = 0; t < 9; t++) {
            const int64_t place = i * 9 + t;
            assert_int_equal(padded->document_ids[place], t < lengths[i] ? i : -1);
            if (t < lengths[i]) assert_int_equal(packed->document_ids[begin + t], i);
            if (t < lengths[i]) continue;
            assert_int_equal(padded->token_ids[place], 0);
            assert_int_equal(padded->loss_mask[place], 0);
            for (int64_t j = 0; j < TINY_HB; j++)
                assert_true(value_at(&padded->hidden_states, place * TINY_HB + j) == 0.0f);
            for (int64_t j = 0; j < 2 * TINY_LOCAL_HEADS * TINY_LOCAL_DIM; j++)
                assert_true(value_at(&padded->kv[0], place * 2 * TINY_LOCAL_HEADS * TINY_LOCAL_DIM + j) == 0.0f);
        }
        begin += lengths[i];
    }
    /* tokens 0 and 1 of a document can be no target: 3 of 5, 0 of 1, 7 of 9 */
    assert_int_equal(packed->num_supervised, 10);
    assert_int_equal(padded->num_supervised, 10);
    mtp_batch_free(packed);
    mtp_batch_free(padded);
    mtp_batch_free(NULL);
    mtp_dataset_close(dataset);
    for (int i = 0; i < 3; i++) test_sample_free(&samples[i]);
}

static void mixed_types_become_fp32(void **state)
{
    (void)state;
    static const mtp_dtype types[3] = {MTP_BF16, MTP_F16, MTP_BF16};
    test_sample samples[3];
    const char *dir = test_dir();
    for (int i = 0; i < 3; i++) {
        samples[i] = test_sample_make(LENGTH, PROMPT, 7 + (uint64_t)i);
        test_sample_retype(&samples[i], "hidden_states", types[i]);
        test_sample_retype(&samples[i], "kv_last_local_k", MTP_BF16); /* V stays F32: K and V differ */
        test_sample_retype(&samples[i], "kv_last_global_k", i == 1 ? MTP_F32 : MTP_F16);
        test_sample_retype(&samples[i], "kv_last_global_v", i == 1 ? MTP_F32 : MTP_F16);
        test_sample_write(&samples[i], test_path("%s/s%d.safetensors", dir, i));
    }
    mtp_dataset *dataset = open_dir(dir);
    mtp_batch *batch = collate(dataset, true);
    assert_int_equal(batch->hidden_states.dtype, MTP_F32);
    assert_int_equal(batch->kv[MTP_LAYER_SLIDING].dtype, MTP_F32);
    assert_int_equal(batch->kv[MTP_LAYER_FULL].dtype, MTP_F32);
    for (int i = 0; i < 3; i++) check_document(batch, i * LENGTH, &samples[i], LENGTH);
    mtp_batch_free(batch);
    static const int64_t same[2] = {0, 2};
    assert_ok(mtp_batch_collate(dataset, same, 2, true, &batch));
    assert_int_equal(batch->hidden_states.dtype, MTP_BF16);
    assert_int_equal(batch->kv[MTP_LAYER_FULL].dtype, MTP_F16);
    check_document(batch, LENGTH, &samples[2], LENGTH);
    mtp_batch_free(batch);
    mtp_dataset_close(dataset);
    for (int i = 0; i < 3; i++) test_sample_free(&samples[i]);
}

static void bad_arguments(void **state)
{
    (void)state;
    const char *dir = test_dir();
    test_sample_file(test_path("%s/a.safetensors", dir), LENGTH, PROMPT, 1);
    mtp_dataset *dataset = open_dir(dir);
    mtp_batch *batch = NULL;
    const int64_t beyond = 1;
    assert_fails(mtp_batch_collate(dataset, &beyond, 1, true, &batch), MTP_E_ARGUMENT, "sample 1 of a data set of 1");
    assert_fails(mtp_batch_collate(dataset, &beyond, 0, true, &batch), MTP_E_ARGUMENT, "num_samples >= 1");
    assert_null(batch);
    mtp_dataset_close(dataset);
}

/* ---- variants of a sample ------------------------------------------------------------------------------------- */

/* Write the variant, read it, and compare with the plain form. */
static void check_variant(test_sample *variant, test_sample *plain)
{
    const char *dir = test_dir();
    test_sample_write(variant, test_path("%s/a.safetensors", dir));
    mtp_dataset *dataset = open_dir(dir);
    mtp_batch *batch = collate(dataset, true);
    check_shapes(batch, 1, LENGTH);
    check_document(batch, 0, plain, LENGTH);
    mtp_batch_free(batch);
    mtp_dataset_close(dataset);
    test_sample_free(variant);
}

static void integer_types(void **state)
{
    (void)state;
    test_sample plain = test_sample_make(LENGTH, PROMPT, 3);
    static const mtp_dtype mask_types[] = {MTP_U8, MTP_BOOL, MTP_I64};
    for (int i = 0; i < 3; i++) {
        test_sample variant = test_sample_make(LENGTH, PROMPT, 3);
        test_sample_retype(&variant, "loss_mask", mask_types[i]);
        if (i) test_sample_retype(&variant, "token_ids", MTP_I32);
        check_variant(&variant, &plain);
    }
    test_sample_free(&plain);
}

/* Replace K and V of one kind by [S, 2, NKV, D], with a batch axis when asked for. */
static void stack(test_sample *sample, const char *kind, bool batched)
{
    const char *names[2] = {test_path("kv_last_%s_k", kind), test_path("kv_last_%s_v", kind)};
    const test_tensor shape = *test_sample_find(sample, names[0]);
    const int64_t width = shape.shape[1] * shape.shape[2];
    const char *name = test_path("verifier_kv_last_%s", kind);
    test_tensor *stacked = batched
                               ? test_sample_put(sample, name, MTP_F32, 1, LENGTH, 2, shape.shape[1], shape.shape[2])
                               : test_sample_put(sample, name, MTP_F32, LENGTH, 2, shape.shape[1], shape.shape[2]);
    for (int part = 0; part < 2; part++)
        for (int64_t t = 0; t < LENGTH; t++)
            for (int64_t i = 0; i < width; i++)
                test_tensor_set(stacked, (t * 2 + part) * width + i,
                                test_tensor_get(test_sample_find(sample, names[part]), t * width + i));
    test_sample_remove(sample, names[0]);
    test_sample_remove(sample, names[1]);
}

static void stacked_and_batched_kv(void **state)
{
    (void)state;
    test_sample plain = test_sample_make(LENGTH, PROMPT, 4);
    test_sample variant = test_sample_make(LENGTH, PROMPT, 4);
    stack(&variant, "local", false);
    check_variant(&variant, &plain);
    variant = test_sample_make(LENGTH, PROMPT, 4);
    stack(&variant, "local", true);
    stack(&variant, "global", false);
    check_variant(&variant, &plain);
    variant = test_sample_make(LENGTH, PROMPT, 4);
    test_tensor *keys = test_sample_find(&variant, "kv_last_local_k");
    keys->rank = 4; /* [S, NKV, D] -> [1, S, NKV, D] */
    memmove(keys->shape + 1, keys->shape, 3 * sizeof *keys->shape);
    keys->shape[0] = 1;
    check_variant(&variant, &plain);
    test_sample_free(&plain);
}

/* With several layers the last counts; the others may hold anything. */
static void last_of_several_layers(void **state)
{
    (void)state;
    enum { LAYERS = 3 };
    test_sample plain = test_sample_make(LENGTH, PROMPT, 5), variant = test_sample_make(LENGTH, PROMPT, 5);
    test_sample_remove(&variant, "hidden_states");
    test_tensor *layers = test_sample_put(&variant, "hidden_states", MTP_F32, LENGTH, LAYERS, TINY_HB);
    for (int64_t t = 0; t < LENGTH; t++)
        for (int64_t layer = 0; layer < LAYERS; layer++)
            for (int64_t i = 0; i < TINY_HB; i++)
                test_tensor_set(layers, (t * LAYERS + layer) * TINY_HB + i,
                                layer == LAYERS - 1
                                    ? test_tensor_get(test_sample_find(&plain, "hidden_states"), t * TINY_HB + i)
                                    : (double)NAN);
    check_variant(&variant, &plain);
    test_sample_free(&plain);
}

/* A verifier without full layers: samples have no global keys, batches no such tensor. */
static void a_type_without_kv(void **state)
{
    static const char config[] =
        "{\"model_type\": \"gemma4_text\", \"vocab_size\": 32, \"hidden_size\": 8, \"num_hidden_layers\": 2, "
        "\"head_dim\": 4, \"layer_types\": [\"sliding_attention\", \"sliding_attention\"], \"num_key_value_heads\": 2, "
        "\"sliding_window\": 4, \"rms_norm_eps\": 1e-06}";
    (void)state;
    const char *home = test_tiny_verifier(), *dir = test_dir();
    const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
    mtp_verifier *local = NULL;
    mtp_dataset *dataset = NULL;
    mtp_batch *batch = NULL;
    const int64_t first = 0;
    test_write(test_path("%s/config.json", home), config, sizeof config - 1);
    assert_ok(mtp_verifier_open(home, NULL, &local));
    test_sample sample = test_sample_make(LENGTH, PROMPT, 5);
    test_sample_write(&sample, test_path("%s/a.safetensors", dir));
    assert_fails(mtp_dataset_open(&dir, 1, local, &options, &dataset), MTP_E_DATA, "unknown tensor kv_last_global_k");
    test_sample_remove(&sample, "kv_last_global_k");
    test_sample_remove(&sample, "kv_last_global_v");
    test_sample_write(&sample, test_path("%s/a.safetensors", dir));
    assert_ok(mtp_dataset_open(&dir, 1, local, &options, &dataset));
    for (int packed = 0; packed < 2; packed++) {
        assert_ok(mtp_batch_collate(dataset, &first, 1, packed, &batch));
        assert_null(batch->kv[MTP_LAYER_FULL].data);
        assert_non_null(batch->kv[MTP_LAYER_SLIDING].data);
        mtp_batch_free(batch);
    }
    mtp_dataset_close(dataset);
    mtp_verifier_close(local);
    test_sample_free(&sample);
}

/* ---- fp8 ------------------------------------------------------------------------------------------------------ */

enum { MAX_SCALES = 64 };

/* Make `name` fp8 with random bytes and give it scales of the given shape. plain gets byte times scale, where row t and
 * head h of a tensor [S, heads, width] take scale t * per_token + h * per_head + offset. */
static void quantise(test_sample *variant, const char *name, int32_t rank, const int64_t *shape, test_tensor *expected,
                     int64_t heads, int64_t per_token, int64_t per_head, int64_t offset, int64_t row_stride,
                     int64_t row_offset)
{
    test_rng rng = {77};
    test_tensor *bytes = test_sample_find(variant, name);
    free(bytes->data);
    bytes->dtype = MTP_F8_E4M3;
    bytes->data = calloc((size_t)bytes->count + 1, 1);
    for (int64_t i = 0; i < bytes->count; i++) test_tensor_set(bytes, i, (double)(0x20 + test_below(&rng, 0x40)));
    test_tensor *scales = test_sample_add(variant, test_path("%s_scales", name), MTP_F32, rank, shape);
    for (int64_t i = 0; i < scales->count; i++) test_tensor_set(scales, i, (double)(float)(0.01 * (double)(i + 1)));
    bytes = test_sample_find(variant, name);
    const int64_t width = expected->count / LENGTH / heads;
    for (int64_t t = 0; t < LENGTH; t++)
        for (int64_t h = 0; h < heads; h++)
            for (int64_t i = 0; i < width; i++) {
                float value;
                const uint8_t byte = ((uint8_t *)bytes->data)[t * row_stride + row_offset + h * width + i];
                mtp__real_from_f8_e4m3(&value, &byte, 1);
                const float scale = (float)test_tensor_get(scales, t * per_token + h * per_head + offset);
                test_tensor_set(expected, (t * heads + h) * width + i, (double)(value * scale));
            }
}

#define SHAPE(...)                                                                         \
    (int32_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (const int64_t[]) \
    {                                                                                      \
        __VA_ARGS__                                                                        \
    }

static void fp8_with_scales(void **state)
{
    (void)state;
    const int64_t heads = TINY_LOCAL_HEADS, width = TINY_LOCAL_HEADS * TINY_LOCAL_DIM;
    static const struct {
        const char *name;
        int32_t rank;
        int64_t shape[4];
        int64_t heads, per_token, per_head;
    } cases[] = {
        {"kv_last_local_k", 1, {LENGTH}, TINY_LOCAL_HEADS, 1, 0},
        {"kv_last_local_k", 3, {LENGTH, 1, 1}, TINY_LOCAL_HEADS, 1, 0},
        {"kv_last_local_v", 2, {LENGTH, TINY_LOCAL_HEADS}, TINY_LOCAL_HEADS, TINY_LOCAL_HEADS, 1},
        {"kv_last_local_v", 3, {LENGTH, TINY_LOCAL_HEADS, 1}, TINY_LOCAL_HEADS, TINY_LOCAL_HEADS, 1},
        {"kv_last_global_k", 3, {LENGTH, 1, 1}, 1, 1, 0},
        {"hidden_states", 1, {LENGTH}, 1, 1, 0},
        {"hidden_states", 2, {LENGTH, 1}, 1, 1, 0},
        {"hidden_states", 3, {LENGTH, 1, 1}, 1, 1, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        test_sample plain = test_sample_make(LENGTH, PROMPT, 6), variant = test_sample_make(LENGTH, PROMPT, 6);
        test_tensor *expected = test_sample_find(&plain, cases[i].name);
        quantise(&variant, cases[i].name, cases[i].rank, cases[i].shape, expected, cases[i].heads, cases[i].per_token,
                 cases[i].per_head, 0, expected->count / LENGTH, 0);
        check_variant(&variant, &plain);
        test_sample_free(&plain);
    }
    /* stacked, one scale a token, K or V, and head; with a batch axis on both */
    for (int part = 0; part < 2; part++) {
        test_sample plain = test_sample_make(LENGTH, PROMPT, 6), variant = test_sample_make(LENGTH, PROMPT, 6);
        stack(&variant, "local", true);
        quantise(&variant, "verifier_kv_last_local", SHAPE(1, LENGTH, 2, TINY_LOCAL_HEADS, 1),
                 test_sample_find(&plain, "kv_last_local_k"), heads, 2 * heads, 1, 0, 2 * width, 0);
        test_tensor *values = test_sample_find(&plain, "kv_last_local_v");
        const test_tensor *bytes = test_sample_find(&variant, "verifier_kv_last_local");
        const test_tensor *scales = test_sample_find(&variant, "verifier_kv_last_local_scales");
        for (int64_t t = 0; t < LENGTH; t++)
            for (int64_t j = 0; j < width; j++) {
                float value;
                mtp__real_from_f8_e4m3(&value, (const uint8_t *)bytes->data + (t * 2 + 1) * width + j, 1);
                const float scale = (float)test_tensor_get(scales, (t * 2 + 1) * heads + j / TINY_LOCAL_DIM);
                test_tensor_set(values, t * width + j, (double)(value * scale));
            }
        check_variant(&variant, &plain);
        test_sample_free(&plain);
    }
    /* several layers of hidden states, a scale for each token and layer */
    test_sample plain = test_sample_make(LENGTH, PROMPT, 6), variant = test_sample_make(LENGTH, PROMPT, 6);
    test_sample_remove(&variant, "hidden_states");
    test_sample_put(&variant, "hidden_states", MTP_F32, LENGTH, 2, TINY_HB);
    quantise(&variant, "hidden_states", SHAPE(LENGTH, 2), test_sample_find(&plain, "hidden_states"), 1, 2, 0, 1,
             2 * TINY_HB, TINY_HB);
    check_variant(&variant, &plain);
    test_sample_free(&plain);
}

/* ---- the final norm ------------------------------------------------------------------------------------------- */

/* In double: x (mean x^2 + eps)^-1/2 w. */
static void hidden_before_the_norm(void **state)
{
    static const mtp_dtype types[] = {MTP_F32, MTP_BF16, MTP_F16};
    static const double tolerance[] = {4e-7, 1.0 / 256, 1.0 / 2048};
    (void)state;
    for (int i = 0; i < 3; i++) {
        test_sample sample = test_sample_make(LENGTH, PROMPT, 8);
        test_sample_retype(&sample, "hidden_states", types[i]);
        sample.metadata[0].value = "pre";
        const char *dir = test_dir();
        test_sample_write(&sample, test_path("%s/a.safetensors", dir));
        test_sample plain = test_sample_make(LENGTH, PROMPT, 8);
        test_sample_retype(&plain, "hidden_states", types[(i + 1) % 3]);
        test_sample_write(&plain, test_path("%s/b.safetensors", dir));
        mtp_dataset *dataset = open_dir(dir);
        mtp_batch *alone = NULL, *mixed = collate(dataset, true);
        const int64_t first = 0;
        assert_ok(mtp_batch_collate(dataset, &first, 1, true, &alone));
        assert_int_equal(alone->hidden_states.dtype, types[i]);
        assert_int_equal(mixed->hidden_states.dtype, MTP_F32);
        for (int64_t t = 0; t < LENGTH; t++) {
            double sum = 0;
            const test_tensor *x = test_sample_find(&sample, "hidden_states");
            for (int64_t j = 0; j < TINY_HB; j++) sum += pow(test_tensor_get(x, t * TINY_HB + j), 2);
            for (int64_t j = 0; j < TINY_HB; j++) {
                const double expected =
                    test_tensor_get(x, t * TINY_HB + j) / sqrt(sum / TINY_HB + 1e-6) * (1 + (double)j / 8);
                const double got = (double)value_at(&alone->hidden_states, t * TINY_HB + j);
                assert_true(fabs(got - expected) <= tolerance[i] * fabs(expected));
                /* a neighbour of another type changes nothing */
                assert_true((double)value_at(&mixed->hidden_states, t * TINY_HB + j) == got);
            }
        }
        check_document(mixed, LENGTH, &plain, LENGTH); /* labelled post: untouched */
        mtp_batch_free(alone);
        mtp_batch_free(mixed);
        mtp_dataset_close(dataset);
        test_sample_free(&sample);
        test_sample_free(&plain);
    }
}

/* The extraction's rows before the norm against the same rows after it, on real data. Both files hold bf16 roundings
 * (2^-8 relative at most) of what one fp32 forward pass computed, so the norm of a stored row is off by the rounding of
 * its input, the other file by that of its output, and our own output is rounded too: 3 * 2^-8 together. */
static void raw_samples_equal_the_trained_ones(void **state)
{
    (void)state;
    const char *raw = MTP_TEST_DATA "/sample/raw", *train = MTP_TEST_DATA "/sample/train";
    mtp_verifier *real = NULL;
    mtp_dataset *before = NULL, *after = NULL;
    mtp_batch *a = NULL, *b = NULL;
    static const int64_t samples[6] = {0, 1, 2, 3, 4, 5};
    assert_ok(mtp_verifier_open(MTP_TEST_DATA "/sample/verifier", NULL, &real));
    mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_PRE};
    assert_ok(mtp_dataset_open(&raw, 1, real, &options, &before));
    options.hidden_norm = MTP_HIDDEN_UNSET;
    assert_ok(mtp_dataset_open(&train, 1, real, &options, &after));
    assert_int_equal(mtp_dataset_size(before), 6);
    assert_int_equal(mtp_dataset_size(after), 100);
    assert_int_equal(mtp_dataset_sample(before, 0).prompt_len, 44);
    assert_ok(mtp_batch_collate(before, samples, 6, true, &a));
    assert_ok(mtp_batch_collate(after, samples, 6, true, &b));
    assert_int_equal(a->seq, b->seq);
    assert_int_equal(a->num_supervised, b->num_supervised);
    assert_memory_equal(a->token_ids, b->token_ids, (size_t)a->seq * sizeof *a->token_ids);
    assert_memory_equal(a->loss_mask, b->loss_mask, (size_t)a->seq);
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        assert_memory_equal(a->kv[type].data, b->kv[type].data, (size_t)mtp_view_count(a->kv[type]) * 2);
    const int64_t count = mtp_view_count(a->hidden_states);
    int64_t equal = 0;
    double worst = 0;
    for (int64_t i = 0; i < count; i++) {
        const double x = (double)value_at(&a->hidden_states, i), y = (double)value_at(&b->hidden_states, i);
        equal += x == y;
        if (fabs(x - y) > worst * fabs(y)) worst = fabs(x - y) / fabs(y);
    }
    print_message("hidden states: %.1f %% equal, largest relative difference %.2f * 2^-8\n",
                  100.0 * (double)equal / (double)count, worst * 256);
    assert_true(worst <= 3.05 / 256);
    assert_true(equal > count * 7 / 10);
    mtp_batch_free(a);
    mtp_batch_free(b);
    mtp_dataset_close(before);
    mtp_dataset_close(after);
    mtp_verifier_close(real);
}

/* Every folder of reference samples is read. */
static void reference_samples_are_read(void **state)
{
    static const char *const names[] = {"e2b_bf16_data", "e2b_flat", "m12b_flat", "m31b_flat_k5", "real_head_dims"};
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *root = test_path(MTP_TEST_DATA "/goldens/%s", names[i]), *dir = test_path("%s/samples", root);
        const mtp_dataset_options options = {.hidden_norm = MTP_HIDDEN_UNSET};
        mtp_verifier *own = NULL;
        mtp_dataset *dataset = NULL;
        assert_ok(mtp_verifier_open(test_path("%s/verifier", root), NULL, &own));
        assert_ok(mtp_dataset_open(&dir, 1, own, &options, &dataset));
        mtp_batch *batch = collate(dataset, true);
        assert_int_equal(batch->hidden_states.dtype, i == 0 ? MTP_BF16 : MTP_F32);
        assert_true(batch->num_supervised > 0);
        mtp_batch_free(batch);
        mtp_dataset_close(dataset);
        mtp_verifier_close(own);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(packed_and_padded),
        cmocka_unit_test(mixed_types_become_fp32),
        cmocka_unit_test(bad_arguments),
        cmocka_unit_test(integer_types),
        cmocka_unit_test(stacked_and_batched_kv),
        cmocka_unit_test(last_of_several_layers),
        cmocka_unit_test(a_type_without_kv),
        cmocka_unit_test(fp8_with_scales),
        cmocka_unit_test(hidden_before_the_norm),
        cmocka_unit_test(raw_samples_equal_the_trained_ones),
        cmocka_unit_test(reference_samples_are_read),
    };
    return cmocka_run_group_tests(tests, open_verifier, close_verifier);
}
