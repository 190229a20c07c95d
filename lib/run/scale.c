/* The model behind mtp_scale_predict: operations and bytes of the official drafters on GPUs that work in parallel.
 *
 * Everything is counted for one supervised position with its K draft steps. Query-only attention has no gradient of
 * keys and values, so its backward pass is 1.5 times its forward pass, not 2.5 times. */
#include "mtp/scale.h"

#include <stdlib.h>
#include <string.h>

#include "data/official.h"
#include "model/step.h"
#include "model/tensors.h"
#include "mtp/pack.h"

enum { V = 262144, CENTROIDS = 2048, TOP_K = 32, LAYERS = 4, SLIDING = 3, BATCHES = 2, BUCKET_MIB = 25 };

/* The drafter of each official verifier, by the index of mtp__official_at. */
typedef struct drafter_size {
    int64_t hidden_size, intermediate_size, num_heads, sliding_window;
    bool ordered;
} drafter_size;

static const drafter_size sizes[] = {
    {256, 2048, 4, 512, true},     {256, 2048, 4, 512, true},     {1024, 8192, 16, 1024, false},
    {1024, 8192, 16, 1024, false}, {1024, 8192, 32, 1024, false},
};
static const int64_t head_dims[] = {256, 512};

/* The share of the matrix rate that kernels of each kind are expected to reach. */
static const double products_of_256 = 0.50, products_of_1024 = 0.78;
static const double sliding_forward = 0.62, sliding_backward = 0.58, full_forward = 0.55, full_backward = 0.48;
static const double dense_head = 0.75, centroid_head = 0.35;
static const double memory_share = 0.88;
/* masters, two moments and gradients in fp32, read or written: 7 passes; and the copy in bf16 */
static const double optimizer_bytes = 30;

/* ---- work of one position -----------------------------------------------------------------------------------------
 */

typedef struct work {
    double operations;
    double forward, head_backward, body_backward; /* seconds at the matrix rate 1 */
} work;

static void add(work *all, double forward, double backward, double forward_share, double backward_share)
{
    all->operations += forward + backward;
    all->forward += forward / forward_share;
    all->body_backward += backward / backward_share;
}

/* Keys that a query of a sliding layer sees, on average over the positions of a document. */
static double mean_window(int64_t length, int64_t window)
{
    const double T = (double)length, W = (double)window;
    return length <= window ? (T + 1) / 2 : (W * (W + 1) / 2 + (T - W) * W) / T;
}

static void add_attention(work *all, const drafter_size *size, int64_t length, double K)
{
    const double heads = (double)size->num_heads;
    const double sliding = SLIDING * 4 * heads * 256 * mean_window(length, size->sliding_window) * K;
    const double full = 4 * heads * 512 * mean_window(length, length) * K;
    add(all, sliding, 1.5 * sliding, sliding_forward, sliding_backward);
    add(all, full, 1.5 * full, full_forward, full_backward);
}

/* The dense head forms its gradients beside the forward pass; the one of centroids works on the tokens of the best. */
static void add_head(work *all, const drafter_size *size, double K)
{
    const double H = (double)size->hidden_size, candidates = (TOP_K + 1) * (double)(V / CENTROIDS);
    const double forward = size->ordered ? (2 * CENTROIDS * H + 2 * candidates * H) * K : 2.0 * V * H * K;
    const double backward = size->ordered ? 3 * 2 * candidates * H * K : 2 * forward;
    const double share = size->ordered ? centroid_head : dense_head;
    all->operations += forward + backward;
    all->forward += forward / share;
    all->head_backward += backward / share;
}

static work work_of(const drafter_size *size, int64_t backbone, const mtp_scale_options *options)
{
    work all = {.operations = 0};
    const double K = (double)options->num_speculative_steps, H = (double)size->hidden_size, Hb = (double)backbone;
    const double products = size->hidden_size == 256 ? products_of_256 : products_of_1024;
    /* the token half of pre_projection once a token, the state half once a draft step */
    add(&all, 2 * Hb * H * (1 + K), 2 * Hb * H * (1 + K) + 2 * Hb * H * (K - 1), products, products);
    add(&all, 2 * Hb * H * (K - 1), 4 * Hb * H * (K - 1), products, products);
    const double width = (double)(size->num_heads * (SLIDING * head_dims[0] + head_dims[1]));
    add(&all, 4 * H * width * K, 8 * H * width * K, products, products);
    const double mlp = LAYERS * 6 * H * (double)size->intermediate_size * K;
    add(&all, mlp, 2 * mlp, products, products);
    add_attention(&all, size, options->length, K);
    add_head(&all, size, K);
    return all;
}

/* ---- memory -------------------------------------------------------------------------------------------------------
 */

static mtp_drafter_config config_of(const drafter_size *size, const mtp__official *verifier, mtp_layer_type *types)
{
    mtp_drafter_config config = {.vocab_size = V,
                                 .hidden_size = size->hidden_size,
                                 .backbone_hidden_size = verifier->hidden_size,
                                 .intermediate_size = size->intermediate_size,
                                 .num_heads = size->num_heads,
                                 .num_layers = LAYERS,
                                 .layer_types = types,
                                 .sliding_window = size->sliding_window,
                                 .rms_norm_eps = 1e-6,
                                 .ordered = size->ordered,
                                 .num_centroids = size->ordered ? CENTROIDS : 0,
                                 .centroid_top_k = size->ordered ? TOP_K : 0,
                                 .max_position_embeddings = 131072,
                                 .dtype = MTP_BF16};
    for (int layer = 0; layer < LAYERS; layer++) types[layer] = layer < SLIDING ? MTP_LAYER_SLIDING : MTP_LAYER_FULL;
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        config.geometry[type] = (mtp_layer_geometry){.head_dim = head_dims[type],
                                                     .num_kv_heads = verifier->num_kv_heads[type],
                                                     .rope_theta = type == MTP_LAYER_FULL ? 1e6 : 1e4,
                                                     .partial_rotary_factor = type == MTP_LAYER_FULL ? 0.25 : 1,
                                                     .rope_factor = 1,
                                                     .proportional = type == MTP_LAYER_FULL};
    return config;
}

static mtp_status count_parameters(const mtp_drafter_config *config, int64_t *count)
{
    mtp__tensor_spec *specs = NULL;
    int64_t num_specs = 0;
    *count = 0;
    MTP_TRY(mtp__tensor_specs(config, &specs, &num_specs));
    for (int64_t i = 0; i < num_specs; i++)
        if (strcmp(specs[i].name, MTP__TOKEN_ORDERING) != 0)
            *count += specs[i].shape[0] * (specs[i].rank > 1 ? specs[i].shape[1] : 1);
    free(specs);
    return MTP_OK;
}

/* What the training step lays out for itself: a dry run. */
static mtp_status step_bytes(const mtp_drafter_config *config, int64_t K, uint64_t *bytes)
{
    const mtp_context_options options = {.num_threads = 1};
    const mtp_step_config step = {.num_speculative_steps = (int32_t)K,
                                  .head_mode = config->ordered ? MTP_HEAD_MASKED : MTP_HEAD_FLAT,
                                  .step_weight_beta = 0.6,
                                  .centroid_weight = config->ordered ? 1 : 0,
                                  .rows_per_chunk = MTP__ROWS_PER_CHUNK_DEVICE,
                                  .logits_budget = (size_t)MTP__LOGITS_MIB_DEVICE << 20};
    mtp_context *context = NULL;
    mtp__arena arena;
    MTP_TRY(mtp_context_create(&options, &context));
    const mtp_status status = mtp__step_plan(config, context, MTP_F32, &step, MTP__STEP_TRAIN, &arena);
    if (status == MTP_OK) *bytes = arena.used;
    mtp_context_free(context);
    return status;
}

/* ---- time ---------------------------------------------------------------------------------------------------------
 */

/* Gradients of the head are final before the backward pass of the body begins, and travel during it; those of the body
 * follow as they become final, the last bucket after everything. */
static double exposed(const mtp_scale_options *options, double all_reduce, double bytes, double window)
{
    const double last =
        all_reduce * ((double)options->bucket_bytes < bytes ? (double)options->bucket_bytes / bytes : 1);
    return all_reduce - window > last ? all_reduce - window : last;
}

static void predict_times(const mtp_scale_options *options, const work *each, mtp_scale *scale)
{
    const double positions = (double)options->positions, ranks = (double)options->world_size;
    const double bytes = 4 * (double)scale->num_parameters;
    scale->operations = each->operations;
    scale->compute_seconds =
        positions * (each->forward + each->head_backward + each->body_backward) / options->matrix_rate;
    scale->optimizer_seconds = optimizer_bytes * (double)scale->num_parameters / (options->memory_rate * memory_share);
    if (options->world_size > 1) {
        scale->all_reduce_seconds = bytes * 2 * (ranks - 1) / ranks / options->bandwidth;
        scale->exposed_seconds =
            exposed(options, scale->all_reduce_seconds, bytes, positions * each->body_backward / options->matrix_rate);
    }
    const double alone = scale->compute_seconds + scale->optimizer_seconds;
    scale->step_seconds = alone + scale->exposed_seconds;
    scale->efficiency = alone / scale->step_seconds;
    scale->positions_per_second = ranks * positions / scale->step_seconds;
}

static mtp_status fill_in(const mtp_scale_options *given, mtp_scale_options *options)
{
    *options = *given;
    if (options->world_size < 1 || (options->world_size > 1 && !(options->bandwidth > 0)))
        return MTP_FAIL(MTP_E_CONFIG, "%lld ranks with a bandwidth of %g bytes/s between them; several ranks need one",
                        (long long)options->world_size, options->bandwidth);
    if (options->matrix_rate == 0) options->matrix_rate = 790e12;
    if (options->memory_rate == 0) options->memory_rate = 4.3e12;
    if (options->positions == 0) options->positions = 16384;
    if (options->length == 0) options->length = 4096;
    if (options->num_speculative_steps == 0) options->num_speculative_steps = 3;
    if (options->bucket_bytes == 0) options->bucket_bytes = (int64_t)BUCKET_MIB << 20;
    if (options->zero_stage >= 0 && options->zero_stage <= 1 && options->matrix_rate > 0 && options->memory_rate > 0 &&
        options->positions > 0 && options->length > 0 && options->num_speculative_steps > 0 &&
        options->num_speculative_steps <= MTP_MAX_SPECULATIVE_STEPS && options->bucket_bytes > 0)
        return MTP_OK;
    return MTP_FAIL(MTP_E_CONFIG, "rates, positions, length, bucket and draft steps (at most %d) must be above 0",
                    (int)MTP_MAX_SPECULATIVE_STEPS);
}

mtp_status mtp_scale_predict(int64_t index, const mtp_scale_options *options, mtp_scale *scale)
{
    mtp_scale_options own;
    mtp_layer_type types[LAYERS];
    uint64_t step = 0;
    MTP_REQUIRE(options && scale);
    *scale = (mtp_scale){.name = mtp_pack_official(index)};
    if (!scale->name || index >= (int64_t)(sizeof sizes / sizeof *sizes))
        return MTP_FAIL(MTP_E_NOT_FOUND, "there is no official size %lld", (long long)index);
    MTP_TRY(fill_in(options, &own));
    const mtp__official *verifier = mtp__official_at(index);
    const mtp_drafter_config config = config_of(&sizes[index], verifier, types);
    MTP_TRY(count_parameters(&config, &scale->num_parameters));
    MTP_TRY(step_bytes(&config, own.num_speculative_steps, &step));
    const work each = work_of(&sizes[index], verifier->hidden_size, &own);
    predict_times(&own, &each, scale);
    const double token = (double)mtp_pack_official_bytes(index, false, false, false, 1000000) / 1e6;
    scale->data_bytes_per_second = token * (double)own.positions / scale->step_seconds;
    const uint64_t values = (uint64_t)scale->num_parameters; /* 10 bytes each: master, bf16 copy, gradient */
    const uint64_t sharers = own.zero_stage == 1 ? (uint64_t)own.world_size : 1;
    scale->memory_bytes = 10 * values + (8 * values + sharers - 1) / sharers + step +
                          (uint64_t)(BATCHES * token * (double)own.positions) +
                          2 * (uint64_t)V * (uint64_t)verifier->hidden_size; /* the verifier's embedding table */
    return MTP_OK;
}
