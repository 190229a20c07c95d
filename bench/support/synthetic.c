#include "synthetic.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "base/error.h"
#include "base/real.h"
#include "base/rng.h"
#include "model/weights.h"
#include "run/trained.h"

typedef struct official_size {
    const char *name;
    int64_t Hb, H, I, NH, NKV, NKV_full, W;
    bool ordered;
} official_size;

static const official_size sizes[] = {
    {"e2b", 1536, 256, 2048, 4, 1, 1, 512, true},      {"e4b", 2560, 256, 2048, 4, 2, 2, 512, true},
    {"12b", 3840, 1024, 8192, 16, 8, 1, 1024, false},  {"26b-a4b", 2816, 1024, 8192, 16, 8, 2, 1024, false},
    {"31b", 5376, 1024, 8192, 32, 16, 4, 1024, false},
};

mtp_status synthetic_config(const char *size, int64_t vocab_size, mtp_drafter_config *config)
{
    const official_size *row = NULL;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        if (strcmp(sizes[i].name, size) == 0) row = &sizes[i];
    if (!row) return MTP_FAIL(MTP_E_CONFIG, "size \"%s\": use e2b, e4b, 12b, 26b-a4b or 31b", size);
    *config = (mtp_drafter_config){
        .vocab_size = vocab_size ? vocab_size : 262144,
        .hidden_size = row->H,
        .backbone_hidden_size = row->Hb,
        .intermediate_size = row->I,
        .num_heads = row->NH,
        .num_layers = 4,
        .geometry = {{.head_dim = 256,
                      .num_kv_heads = row->NKV,
                      .rope_theta = 1e4,
                      .partial_rotary_factor = 1,
                      .rope_factor = 1},
                     {.head_dim = 512,
                      .num_kv_heads = row->NKV_full,
                      .rope_theta = 1e6,
                      .partial_rotary_factor = 0.25,
                      .rope_factor = 1,
                      .proportional = true}},
        .sliding_window = row->W,
        .rms_norm_eps = 1e-6,
        .ordered = row->ordered,
        .num_centroids = row->ordered ? (vocab_size ? vocab_size : 262144) / 128 : 0,
        .centroid_top_k = row->ordered ? 32 : 0,
        .max_position_embeddings = 262144,
        .dtype = MTP_BF16,
    };
    config->layer_types = malloc(4 * sizeof *config->layer_types);
    if (!config->layer_types) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    for (int i = 0; i < 4; i++) config->layer_types[i] = i == 3 ? MTP_LAYER_FULL : MTP_LAYER_SLIDING;
    return MTP_OK;
}

/* Cheap numbers of unit variance, uniform: the timing does not depend on the distribution. */
static void fill(float *x, int64_t n, float scale, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = scale * 1.7320508f * (float)((double)(seed >> 33) * 0x1p-30 - 1.0);
    }
}

static void fill_bf16(uint16_t *x, int64_t n, float scale, uint64_t seed)
{
    float block[256];
    for (int64_t first = 0; first < n; first += 256) {
        const int64_t count = n - first < 256 ? n - first : 256;
        fill(block, count, scale, seed + (uint64_t)first);
        mtp__real_from_f32(x + first, MTP_BF16, block, count);
    }
}

mtp_status synthetic_drafter(mtp_context *context, const mtp_drafter_config *config, mtp_drafter **drafter)
{
    MTP_TRY(mtp__drafter_create(context, config, "synthetic", MTP_F32, drafter));
    for (int64_t i = 0; i < (*drafter)->num_params; i++) {
        const mtp__param *param = &(*drafter)->params[i];
        float *values = malloc((size_t)param->count * sizeof *values);
        if (!values) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
        if (param->rank == 2)
            fill(values, param->count, 1.0f / sqrtf((float)param->shape[1]), (uint64_t)i + 1);
        else
            for (int64_t j = 0; j < param->count; j++) values[j] = strstr(param->name, "q_norm") ? 0.06f : 1.0f;
        const mtp_status uploaded = mtp__param_write(*drafter, param, 0, values, param->count);
        free(values);
        MTP_TRY(uploaded);
    }
    if (!config->ordered) return MTP_OK;
    int64_t *ordering = malloc((size_t)config->vocab_size * sizeof *ordering);
    uint32_t *permutation = malloc((size_t)config->vocab_size * sizeof *permutation);
    if (!ordering || !permutation) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    mtp__rng rng = mtp__rng_make(1, 2);
    mtp__rng_permutation(&rng, (uint32_t)config->vocab_size, permutation);
    for (int64_t i = 0; i < config->vocab_size; i++) ordering[i] = permutation[i];
    const mtp_status status = mtp__drafter_set_ordering(*drafter, ordering, "synthetic");
    free(permutation);
    free(ordering);
    return status;
}

/* ---- verifier ---------------------------------------------------------------------------------------------------- */

static mtp_status write_config(const char *directory, const mtp_drafter_config *config)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/config.json", directory);
    FILE *file = fopen(path, "w");
    if (!file) return MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: %s", path, strerror(errno));
    const bool equal = config->geometry[0].num_kv_heads == config->geometry[1].num_kv_heads;
    fprintf(file,
            "{\"architectures\": [\"Gemma4ForCausalLM\"], \"model_type\": \"gemma4_text\", \"vocab_size\": %lld, "
            "\"hidden_size\": %lld, \"num_hidden_layers\": 2, \"layer_types\": [\"sliding_attention\", "
            "\"full_attention\"], \"num_attention_heads\": %lld, \"num_key_value_heads\": %lld, "
            "\"num_global_key_value_heads\": %lld, \"attention_k_eq_v\": %s, \"head_dim\": %lld, \"global_head_dim\": "
            "%lld, \"num_kv_shared_layers\": 0, \"sliding_window\": %lld, \"rms_norm_eps\": 1e-06, "
            "\"final_logit_softcapping\": 30.0, \"tie_word_embeddings\": true, \"intermediate_size\": 64}\n",
            (long long)config->vocab_size, (long long)config->backbone_hidden_size, (long long)config->num_heads,
            (long long)config->geometry[0].num_kv_heads, (long long)config->geometry[1].num_kv_heads,
            equal ? "false" : "true", (long long)config->geometry[0].head_dim, (long long)config->geometry[1].head_dim,
            (long long)config->sliding_window);
    return fclose(file) == 0 ? MTP_OK : MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: %s", path, strerror(errno));
}

/* The header by hand, then a hole where the table is: only rows that are used take memory. */
static mtp_status write_table(const char *directory, const mtp_drafter_config *config, const int32_t *tokens,
                              int64_t count)
{
    char path[4096], header[512];
    const int64_t V = config->vocab_size, Hb = config->backbone_hidden_size;
    const long long norm = 2 * Hb, table = 2 * V * Hb;
    snprintf(path, sizeof path, "%s/model.safetensors", directory);
    int length =
        snprintf(header + 8, sizeof header - 16,
                 "{\"model.embed_tokens.weight\":{\"dtype\":\"BF16\",\"shape\":[%lld,%lld],\"data_offsets\":[0,"
                 "%lld]},\"model.norm.weight\":{\"dtype\":\"BF16\",\"shape\":[%lld],\"data_offsets\":[%lld,%lld]}}",
                 (long long)V, (long long)Hb, table, (long long)Hb, table, table + norm);
    while (length % 8) header[8 + length++] = ' ';
    const uint64_t size = (uint64_t)length;
    memcpy(header, &size, sizeof size);
    const int file = open(path, O_CREAT | O_TRUNC | O_RDWR, 0644);
    uint16_t *row = malloc((size_t)norm);
    const off_t start = 8 + length;
    bool good = file >= 0 && row && ftruncate(file, start + table + norm) == 0 &&
                pwrite(file, header, (size_t)start, 0) == start;
    for (int64_t i = 0; good && i < count; i++) {
        fill_bf16(row, Hb, 0.03f, (uint64_t)tokens[i] + 7);
        good = pwrite(file, row, (size_t)norm, start + tokens[i] * norm) == norm;
    }
    for (int64_t i = 0; good && i < Hb; i++) row[i] = 0x3f80; /* 1 */
    good = good && pwrite(file, row, (size_t)norm, start + table) == norm;
    free(row);
    if (file >= 0) good = close(file) == 0 && good;
    return good ? MTP_OK : MTP_FAIL_FOREIGN(MTP_E_IO, errno, "%s: %s", path, strerror(errno));
}

mtp_status synthetic_verifier(const char *directory, const mtp_drafter_config *config, const int32_t *tokens,
                              int64_t num_tokens, mtp_verifier **verifier)
{
    MTP_TRY(write_config(directory, config));
    MTP_TRY(write_table(directory, config, tokens, num_tokens));
    return mtp_verifier_open(directory, NULL, verifier);
}

/* ---- batch ------------------------------------------------------------------------------------------------------- */

mtp_status synthetic_batch(const mtp_drafter_config *config, int64_t num_tokens, mtp_batch *batch)
{
    const int64_t S = num_tokens, Hb = config->backbone_hidden_size;
    *batch = (mtp_batch){.batch = 1, .seq = S, .num_documents = 1, .num_supervised = S - 2};
    batch->token_ids = calloc((size_t)S, sizeof(int32_t));
    batch->loss_mask = calloc((size_t)S, 1);
    batch->document_ids = calloc((size_t)S, sizeof(int32_t));
    batch->document_begin = calloc(1, sizeof(int32_t));
    batch->document_end = calloc(1, sizeof(int32_t));
    batch->document_sample = calloc(1, sizeof(int64_t));
    batch->hidden_states = mtp_view_3d(calloc((size_t)(S * Hb), 2), MTP_BF16, 1, S, Hb);
    bool complete = batch->token_ids && batch->loss_mask && batch->document_ids && batch->document_begin &&
                    batch->document_end && batch->document_sample && batch->hidden_states.data;
    for (int type = 0; complete && type < MTP_LAYER_TYPES; type++) {
        const int64_t shape[5] = {1, S, 2, config->geometry[type].num_kv_heads, config->geometry[type].head_dim};
        const int64_t count = 2 * S * shape[3] * shape[4];
        uint16_t *kv = calloc((size_t)count, 2);
        complete = kv != NULL;
        if (kv) fill_bf16(kv, count, 1.0f, 99u + (uint64_t)type);
        batch->kv[type] = mtp_view_nd(kv, MTP_BF16, 5, shape);
    }
    if (!complete) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a batch of %lld tokens", (long long)S);
    mtp__rng rng = mtp__rng_make(5, 5);
    for (int64_t i = 0; i < S; i++) {
        batch->token_ids[i] = (int32_t)mtp__rng_below(&rng, (uint64_t)config->vocab_size);
        batch->loss_mask[i] = 1;
    }
    fill_bf16(batch->hidden_states.data, S * Hb, 1.0f, 3);
    batch->document_end[0] = (int32_t)S;
    return MTP_OK;
}

mtp_status synthetic_split(mtp_batch *batch, int64_t document)
{
    const int64_t count = (batch->seq + document - 1) / document;
    int32_t *begin = calloc((size_t)count, sizeof *begin), *end = calloc((size_t)count, sizeof *end);
    int64_t *sample = calloc((size_t)count, sizeof *sample);
    free(batch->document_begin);
    free(batch->document_end);
    free(batch->document_sample);
    batch->document_begin = begin;
    batch->document_end = end;
    batch->document_sample = sample;
    if (!begin || !end || !sample) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld documents", (long long)count);
    batch->num_documents = count;
    for (int64_t i = 0; i < count; i++) {
        begin[i] = (int32_t)(i * document);
        end[i] = (int32_t)((i + 1) * document < batch->seq ? (i + 1) * document : batch->seq);
        sample[i] = i;
        for (int32_t t = begin[i]; t < end[i]; t++) batch->document_ids[t] = (int32_t)i;
    }
    return MTP_OK;
}

void synthetic_batch_free(mtp_batch *batch)
{
    free(batch->token_ids);
    free(batch->loss_mask);
    free(batch->document_ids);
    free(batch->document_begin);
    free(batch->document_end);
    free(batch->document_sample);
    free(batch->hidden_states.data);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) free(batch->kv[type].data);
    *batch = (mtp_batch){0};
}

double synthetic_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double synthetic_peak_rss(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return 1024.0 * (double)usage.ru_maxrss;
}

mtp_status synthetic_optimizer(mtp_context *context, const mtp_drafter *drafter, mtp__optimizer **optimizer)
{
    const mtp_adamw_config adamw = {
        .beta1 = 0.9, .beta2 = 0.95, .epsilon = 1e-8, .weight_decay = 0.01, .max_grad_norm = 1.0};
    mtp__optim_tensor *tensors = calloc((size_t)drafter->num_params, sizeof *tensors);
    if (!tensors) return MTP_FAIL(MTP_E_MEMORY, "out of memory");
    const int64_t count = mtp__trained_tensors(drafter, tensors);
    const mtp_status status = mtp__optimizer_create(context, tensors, count, &adamw, NULL, optimizer);
    free(tensors);
    return status;
}
