#include "samples.h"

#include "base/real.h"

static const char tiny_config[] =
    "{\"model_type\": \"gemma4_text\", \"vocab_size\": 32, \"hidden_size\": 8, \"num_hidden_layers\": 2, \"head_dim\": "
    "4, "
    "\"layer_types\": [\"sliding_attention\", \"full_attention\"], \"num_key_value_heads\": 2, \"global_head_dim\": 6, "
    "\"attention_k_eq_v\": true, \"num_global_key_value_heads\": 1, \"sliding_window\": 4, \"rms_norm_eps\": 1e-06, "
    "\"final_logit_softcapping\": 30.0}";

const char *test_tiny_verifier(void)
{
    const char *dir = test_dir();
    test_rng rng = {11};
    test_sample model = {0};
    test_tensor *table = test_sample_put(&model, "model.embed_tokens.weight", MTP_BF16, TINY_VOCAB, TINY_HB);
    for (int64_t i = 0; i < table->count; i++) test_tensor_set(table, i, (double)test_uniform(&rng));
    test_tensor *norm = test_sample_put(&model, "model.norm.weight", MTP_BF16, TINY_HB);
    for (int64_t i = 0; i < TINY_HB; i++) test_tensor_set(norm, i, 1 + (double)i / 8);
    test_write(test_path("%s/config.json", dir), tiny_config, sizeof tiny_config - 1);
    test_sample_write(&model, test_path("%s/model.safetensors", dir));
    test_sample_free(&model);
    return dir;
}

/* ---- values --------------------------------------------------------------------------------------------------- */

double test_tensor_get(const test_tensor *tensor, int64_t index)
{
    const char *at = (const char *)tensor->data + (size_t)index * mtp_dtype_size(tensor->dtype);
    float real;
    int64_t wide;
    int32_t narrow;
    switch (tensor->dtype) {
    case MTP_I64:
        memcpy(&wide, at, sizeof wide);
        return (double)wide;
    case MTP_I32:
        memcpy(&narrow, at, sizeof narrow);
        return narrow;
    case MTP_F32:
    case MTP_BF16:
    case MTP_F16:
        mtp__real_to_f32(&real, at, tensor->dtype, 1);
        return (double)real;
    default:
        return *(const uint8_t *)at;
    }
}

void test_tensor_set(test_tensor *tensor, int64_t index, double value)
{
    char *at = (char *)tensor->data + (size_t)index * mtp_dtype_size(tensor->dtype);
    const float real = (float)value;
    int64_t wide;
    int32_t narrow;
    switch (tensor->dtype) {
    case MTP_I64:
        wide = (int64_t)value;
        memcpy(at, &wide, sizeof wide);
        break;
    case MTP_I32:
        narrow = (int32_t)value;
        memcpy(at, &narrow, sizeof narrow);
        break;
    case MTP_F32:
    case MTP_BF16:
    case MTP_F16:
        mtp__real_from_f32(at, tensor->dtype, &real, 1);
        break;
    default:
        *(uint8_t *)at = (uint8_t)value;
        break;
    }
}

/* ---- samples -------------------------------------------------------------------------------------------------- */

test_tensor *test_sample_add(test_sample *sample, const char *name, mtp_dtype dtype, int32_t rank, const int64_t *shape)
{
    if (sample->num_tensors == 16) fail_msg("too many tensors");
    test_tensor *tensor = &sample->tensors[sample->num_tensors++];
    *tensor = (test_tensor){.dtype = dtype, .rank = rank, .count = 1};
    snprintf(tensor->name, sizeof tensor->name, "%s", name);
    for (int32_t i = 0; i < rank; i++) tensor->count *= tensor->shape[i] = shape[i];
    tensor->data = calloc((size_t)tensor->count + 1, mtp_dtype_size(dtype));
    return tensor;
}

/* Multiples of 1/16 in (-8, 8): exact in bf16 and f16. */
static void fill(test_tensor *tensor, test_rng *rng)
{
    for (int64_t i = 0; i < tensor->count; i++) test_tensor_set(tensor, i, (double)(test_below(rng, 255) - 127) / 16);
}

test_sample test_sample_make(int64_t num_tokens, int64_t prompt_len, uint64_t seed)
{
    test_sample sample = {.metadata = {{"hidden_norm", "post"}}, .num_metadata = 1};
    test_rng rng = {seed};
    test_tensor *ids = test_sample_put(&sample, "token_ids", MTP_I64, num_tokens);
    for (int64_t i = 0; i < num_tokens; i++) test_tensor_set(ids, i, (double)test_below(&rng, TINY_VOCAB));
    fill(test_sample_put(&sample, "hidden_states", MTP_F32, num_tokens, TINY_HB), &rng);
    fill(test_sample_put(&sample, "kv_last_local_k", MTP_F32, num_tokens, TINY_LOCAL_HEADS, TINY_LOCAL_DIM), &rng);
    fill(test_sample_put(&sample, "kv_last_local_v", MTP_F32, num_tokens, TINY_LOCAL_HEADS, TINY_LOCAL_DIM), &rng);
    fill(test_sample_put(&sample, "kv_last_global_k", MTP_F32, num_tokens, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM), &rng);
    fill(test_sample_put(&sample, "kv_last_global_v", MTP_F32, num_tokens, TINY_GLOBAL_HEADS, TINY_GLOBAL_DIM), &rng);
    test_tensor *mask = test_sample_put(&sample, "loss_mask", MTP_U8, num_tokens);
    for (int64_t i = prompt_len; i < num_tokens; i++) test_tensor_set(mask, i, 1);
    return sample;
}

test_sample test_sample_load(const char *path)
{
    test_sample sample = {0};
    mtp_safetensors *file = NULL;
    assert_ok(mtp_safetensors_open(path, &file));
    for (size_t i = 0; i < mtp_safetensors_count(file); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(file, i);
        test_tensor *tensor = test_sample_add(&sample, entry->name, entry->dtype, entry->rank, entry->shape);
        memcpy(tensor->data, entry->data, entry->size);
    }
    for (size_t i = 0; i < mtp_safetensors_metadata_count(file) && i < 8; i++) {
        const mtp_safetensors_pair pair = mtp_safetensors_metadata_at(file, i);
        sample.metadata[sample.num_metadata++] =
            (mtp_safetensors_pair){test_path("%s", pair.key), test_path("%s", pair.value)};
    }
    mtp_safetensors_close(file);
    return sample;
}

void test_sample_free(test_sample *sample)
{
    for (int i = 0; i < sample->num_tensors; i++) free(sample->tensors[i].data);
    *sample = (test_sample){0};
}

test_tensor *test_sample_find(test_sample *sample, const char *name)
{
    for (int i = 0; i < sample->num_tensors; i++)
        if (strcmp(sample->tensors[i].name, name) == 0) return &sample->tensors[i];
    fail_msg("no tensor %s", name);
    return NULL;
}

void test_sample_remove(test_sample *sample, const char *name)
{
    test_tensor *tensor = test_sample_find(sample, name);
    free(tensor->data);
    *tensor = sample->tensors[--sample->num_tensors];
}

void test_sample_retype(test_sample *sample, const char *name, mtp_dtype dtype)
{
    test_tensor *tensor = test_sample_find(sample, name), old = *tensor;
    tensor->dtype = dtype;
    tensor->data = calloc((size_t)old.count + 1, mtp_dtype_size(dtype));
    for (int64_t i = 0; i < old.count; i++) test_tensor_set(tensor, i, test_tensor_get(&old, i));
    free(old.data);
}

void test_sample_write(const test_sample *sample, const char *path)
{
    mtp_safetensors_source sources[16];
    for (int i = 0; i < sample->num_tensors; i++) {
        const test_tensor *tensor = &sample->tensors[i];
        sources[i] = (mtp_safetensors_source){.name = tensor->name,
                                              .dtype = tensor->dtype,
                                              .rank = tensor->rank,
                                              .shape = tensor->shape,
                                              .data = tensor->data};
    }
    if (mtp_safetensors_write(path, sample->metadata, (size_t)sample->num_metadata, sources,
                              (size_t)sample->num_tensors) != MTP_OK)
        fail_msg("%s", mtp_last_error()->message);
}

void test_sample_file(const char *path, int64_t num_tokens, int64_t prompt_len, uint64_t seed)
{
    test_sample sample = test_sample_make(num_tokens, prompt_len, seed);
    test_sample_write(&sample, path);
    test_sample_free(&sample);
}
