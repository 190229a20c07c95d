#include "model/step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/real.h"
#include "model/embedding.h"
#include "model/workspace.h"

void mtp__step_weights(const mtp_step_config *config, double *weights)
{
    double sum = 0;
    for (int32_t k = 0; k < config->num_speculative_steps; k++) sum += weights[k] = pow(config->step_weight_beta, k);
    for (int32_t k = 0; k < config->num_speculative_steps; k++) weights[k] /= sum;
}

double mtp__step_total(const mtp_step_config *config, const mtp__step_sums *sums, const int64_t *counts)
{
    double weights[MTP_MAX_SPECULATIVE_STEPS], total = 0;
    mtp__step_weights(config, weights);
    for (int32_t k = 0; k < config->num_speculative_steps; k++)
        if (counts[k] > 0)
            total += weights[k] * (sums[k].loss + config->centroid_weight * sums[k].centroid_loss) / (double)counts[k];
    return total;
}

static mtp_status check_config(const mtp_step_config *config, const mtp_drafter_config *drafter)
{
    if (config->num_speculative_steps < 1 || config->num_speculative_steps > MTP_MAX_SPECULATIVE_STEPS)
        return MTP_FAIL(MTP_E_CONFIG, "num_speculative_steps is %d; it must be 1 to %d", config->num_speculative_steps,
                        MTP_MAX_SPECULATIVE_STEPS);
    if (config->position_offset != 0 && config->position_offset != 1)
        return MTP_FAIL(MTP_E_CONFIG,
                        "position_offset is %d; it must be 0 (vLLM, sglang) or 1 (transformers, llama.cpp)",
                        config->position_offset);
    if (!(config->step_weight_beta > 0) || !isfinite(config->step_weight_beta))
        return MTP_FAIL(MTP_E_CONFIG, "step_weight_beta is %g; it must be greater than 0", config->step_weight_beta);
    if (!(config->centroid_weight >= 0) || !isfinite(config->centroid_weight))
        return MTP_FAIL(MTP_E_CONFIG, "centroid_weight is %g; it must be 0 or more", config->centroid_weight);
    if (config->rows_per_chunk < 0)
        return MTP_FAIL(MTP_E_CONFIG, "rows_per_chunk is %lld; it must be 1 or more",
                        (long long)config->rows_per_chunk);
    if (!drafter->ordered && config->head_mode != MTP_HEAD_FLAT)
        return MTP_FAIL(MTP_E_CONFIG,
                        "head = \"%s\" needs a drafter with centroids (use_ordered_embeddings); this one has a dense "
                        "head: use head = \"flat\"",
                        config->head_mode == MTP_HEAD_MASKED ? "masked" : "hierarchical");
    return MTP_OK;
}

/* The parts that need no drafter: settings and host arrays of the layout. */
static mtp_status prepare(mtp__step *step, const mtp_drafter_config *drafter, const mtp_step_config *config,
                          mtp__step_mode mode)
{
    MTP_TRY(check_config(config, drafter));
    step->config = *config;
    step->mode = mode;
    const bool host = step->context->ops->memory_is_host;
    step->Rc = config->rows_per_chunk ? config->rows_per_chunk
               : host                 ? MTP__ROWS_PER_CHUNK_HOST
                                      : MTP__ROWS_PER_CHUNK_DEVICE;
    if (config->logits_budget == 0)
        step->config.logits_budget = (size_t)(host ? MTP__LOGITS_MIB_HOST : MTP__LOGITS_MIB_DEVICE) << 20;
    const size_t K = (size_t)config->num_speculative_steps, Mc = K * (size_t)step->Rc;
    step->layers = calloc((size_t)drafter->num_layers, sizeof *step->layers);
    step->padded = step->context->ops->graph != NULL;
    step->host_ids = calloc((size_t)step->Rc, sizeof *step->host_ids);
    step->host_floats = calloc(2 * Mc, sizeof *step->host_floats);
    step->host_bytes = calloc(Mc, 1);
    if (!step->layers || !step->host_ids || !step->host_floats || !step->host_bytes)
        return MTP_FAIL(MTP_E_MEMORY, "out of memory for a training step");
    if (config->feeding == MTP_FEED_SELF) return MTP_OK;
    return mtp__tokens_create(step->Rc, config->num_speculative_steps, &step->tokens);
}

static void release(mtp__step *step)
{
    mtp__graphs_clear(&step->graphs);
    free(step->layers);
    mtp__tokens_free(&step->tokens);
    free(step->host_ids);
    free(step->host_floats);
    free(step->host_bytes);
    free(step->centroid_of);
    mtp__stage_release(&step->stage);
    mtp__arena_unwrap(&step->arena);
    if (step->memory) step->context->ops->memory_free(step->context->device, step->memory);
}

mtp_status mtp__step_plan(const mtp_drafter_config *drafter, const mtp_context *context, mtp_dtype masters,
                          const mtp_step_config *config, mtp__step_mode mode, mtp__arena *measured)
{
    MTP_REQUIRE(drafter && context && config && measured);
    mtp__step step = {.context = (mtp_context *)(uintptr_t)context, /* only asked for scratch sizes */
                      .weights = mtp__factor_dtype(context, masters)};
    mtp__arena_measure(measured);
    mtp_status status = prepare(&step, drafter, config, mode);
    if (status == MTP_OK) status = mtp__step_layout(&step, drafter, measured);
    release(&step);
    return status;
}

static mtp_status map_centroids(mtp__step *step)
{
    const mtp_drafter *drafter = step->drafter;
    const int64_t V = drafter->config.vocab_size;
    if (!drafter->config.ordered) return MTP_OK;
    step->centroid_of = malloc((size_t)V * sizeof *step->centroid_of);
    if (!step->centroid_of) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a map of %lld tokens", (long long)V);
    for (int64_t slot = 0; slot < V; slot++)
        step->centroid_of[drafter->token_ordering[slot]] = (int32_t)(slot / (V / drafter->config.num_centroids));
    return MTP_OK;
}

static mtp_status build(mtp__step *step, const mtp_drafter *drafter)
{
    mtp__arena measured;
    mtp__arena_measure(&measured);
    MTP_TRY(map_centroids(step));
    MTP_TRY(mtp__step_layout(step, &drafter->config, &measured));
    MTP_TRY(step->context->ops->memory_alloc(step->context->device, measured.used, &step->memory));
    mtp__arena_wrap(&step->arena, step->memory, measured.used);
    MTP_TRY(mtp__step_layout(step, &drafter->config, &step->arena));
    mtp__graphs_create(step->context, &step->graphs);
    MTP_TRY(mtp__stage_create(&step->stage));
    return mtp__step_begin_update(step);
}

mtp_status mtp__step_create(mtp_drafter *drafter, const mtp_verifier *verifier, const mtp_step_config *config,
                            mtp__step_mode mode, mtp__step **step)
{
    MTP_REQUIRE(drafter && verifier && config && step);
    *step = NULL;
    MTP_TRY(mtp_verifier_check_drafter(verifier, &drafter->config));
    if (mode == MTP__STEP_TRAIN && !drafter->grads && mtp_drafter_num_trained(drafter) > 0)
        return MTP_FAIL(MTP_E_ARGUMENT, "a training step needs the drafter's gradients (mtp__drafter_alloc_grads)");
    mtp__step *created = calloc(1, sizeof *created);
    if (!created) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a training step");
    created->context = drafter->context;
    created->drafter = drafter;
    created->weights = mtp__factor_dtype(drafter->context, drafter->masters);
    created->table = mtp_verifier_embedding(verifier);
    created->device_table = mtp__embedding_held(drafter, verifier);
    mtp_status status = prepare(created, &drafter->config, config, mode);
    if (status == MTP_OK) status = build(created, drafter);
    if (status != MTP_OK) {
        mtp__step_free(created);
        return status;
    }
    *step = created;
    return MTP_OK;
}

void mtp__step_free(mtp__step *step)
{
    if (!step) return;
    release(step);
    free(step);
}

void mtp__step_set_watch(mtp__step *step, const mtp__step_watch *watch)
{
    step->watch = watch ? *watch : (mtp__step_watch){0};
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* A device matrix of a stored dtype as fp32 in host memory: through the second half of that, where it is BF16. */
static mtp_status download_stored(mtp__step *step, mtp_view matrix, float *to)
{
    enum { PIECE = 256 };
    uint16_t piece[PIECE];
    const int64_t n = mtp_view_count(matrix);
    const size_t bytes = (size_t)n * mtp_dtype_size(matrix.dtype);
    char *end = (char *)(to + n) - bytes;
    MTP_TRY(step->context->ops->download(step->context->device, end, matrix.data, bytes));
    for (int64_t i = 0; matrix.dtype != MTP_F32 && i < n; i += PIECE) {
        const int64_t count = n - i < PIECE ? n - i : PIECE;
        memcpy(piece, end + (size_t)i * sizeof *piece, (size_t)count * sizeof *piece);
        mtp__real_to_f32(to + i, piece, matrix.dtype, count);
    }
    return MTP_OK;
}

/* Copy a device matrix [num_rows, width] to rows of a host array [K, R, width], and zero the steps that do not exist.
 */
static mtp_status deliver_matrix(mtp__step *step, int32_t k, mtp_view matrix, float *to)
{
    const int64_t R = step->rows->num_rows, width = matrix.shape[1], at = k * R + step->first_row;
    MTP_TRY(download_stored(step, mtp__first_rows(matrix, step->own_rows), to + at * width));
    for (int64_t r = 0; r < step->own_rows; r++)
        if (!step->rows->valid[at + r]) memset(to + (at + r) * width, 0, (size_t)width * sizeof(float));
    return MTP_OK;
}

/* What was fed at step k: the data's tokens, or what the drafter said at the step before, which is in host_ids. */
static void deliver_tokens(const mtp__step *step, int32_t k, mtp__step_outputs *outputs)
{
    const mtp__rows *rows = step->rows;
    const int64_t at = k * rows->num_rows + step->first_row;
    const bool drafted = step->config.feeding == MTP_FEED_SELF && k > 0;
    const int32_t *fed = drafted ? step->host_ids : rows->input_token + at;
    if (outputs->input_token)
        for (int64_t r = 0; r < step->own_rows; r++) outputs->input_token[at + r] = rows->valid[at + r] ? fed[r] : 0;
}

static void clear_logits(const mtp__step *step, int32_t k, mtp__step_outputs *outputs)
{
    const mtp_drafter_config *config = &step->drafter->config;
    const int64_t top_k = config->centroid_top_k;
    const int64_t width = config->ordered ? top_k * (config->vocab_size / config->num_centroids) : config->vocab_size;
    for (int64_t r = 0; r < step->own_rows; r++) {
        const int64_t at = k * step->rows->num_rows + step->first_row + r;
        if (step->rows->valid[at]) continue;
        memset(outputs->logits + at * width, 0, (size_t)width * sizeof(float));
        if (outputs->selected) memset(outputs->selected + at * top_k, 0, (size_t)top_k * sizeof(int32_t));
    }
}

/* What the drafter said at step k, into host_ids. */
static mtp_status deliver_argmax(mtp__step *step, int32_t k, mtp__step_outputs *outputs)
{
    const int64_t at = k * step->rows->num_rows + step->first_row;
    MTP_TRY(step->context->ops->download(step->context->device, step->host_ids, step->head_argmax.data,
                                         (size_t)step->own_rows * sizeof *step->host_ids));
    if (outputs->argmax)
        for (int64_t r = 0; r < step->own_rows; r++)
            outputs->argmax[at + r] = step->rows->valid[at + r] ? step->host_ids[r] : 0;
    return MTP_OK;
}

static mtp_status deliver_step(mtp__step *step, int32_t k, mtp__step_outputs *outputs)
{
    if (outputs->logits) {
        MTP_TRY(mtp__step_logits(step, k, outputs));
        clear_logits(step, k, outputs);
    }
    if (outputs->hidden) MTP_TRY(deliver_matrix(step, k, mtp__step_n(step, k), outputs->hidden));
    if (outputs->state) {
        const mtp_view state = mtp__first_rows(step->dstate, step->num_rows); /* nothing is in it before backward */
        MTP_TRY(mtp__step_project_state(step, k, state));
        MTP_TRY(deliver_matrix(step, k, state, outputs->state));
    }
    return MTP_OK;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

/* All that the device does for a chunk. Without outputs, and unless feeding goes through the host, nothing in it waits,
 * and its calls depend on the chunk's sizes and the batch's views alone. */
static mtp_status compute(void *user)
{
    mtp__step *step = user;
    mtp__step_outputs *outputs = step->outputs;
    const int32_t K = step->config.num_speculative_steps;
    const bool self = step->config.feeding == MTP_FEED_SELF;
    MTP_TRY(mtp__step_prepare(step));
    for (int32_t k = 0; k < K; k++) {
        if (k > 0) MTP_TRY(mtp__step_project_state(step, k - 1, mtp__of_step(step, step->state, k)));
        if (k > 0 && self) MTP_TRY(mtp__chunk_feed(step, k));
        if (outputs) deliver_tokens(step, k, outputs);
        MTP_TRY(mtp__step_forward(step, k));
        if (outputs) MTP_TRY(deliver_step(step, k, outputs));
        const bool asked = outputs && (outputs->argmax || outputs->input_token);
        if (!asked && !(self && k + 1 < K)) continue;
        MTP_TRY(mtp__step_argmax(step, k));
        if (asked) MTP_TRY(deliver_argmax(step, k, outputs));
    }
    MTP_TRY(mtp__step_losses(step));
    if (step->mode == MTP__STEP_TRAIN && step->head_rows > 0) MTP_TRY(mtp__step_backward(step));
    return MTP_OK;
}

/* The chunk of the rows from `first` on. */
static mtp_status run_chunk(mtp__step *step, int64_t first, const int64_t *counts)
{
    MTP_TRY(mtp__chunk_begin(step, first, counts));
    const bool watched = step->watch.ready && step->last_chunk;
    if (step->outputs || watched || mtp__chunk_waits(step)) return compute(step);
    const mtp__graph_key key = {{step->stage.set, step->num_rows, step->num_tokens, step->head_rows}};
    return mtp__graphs_run(&step->graphs, &key, compute, step);
}

static mtp_status run(mtp__step *step, const int64_t *counts)
{
    const int64_t generation = step->stage.generation;
    MTP_TRY(mtp__stage_batch(&step->stage, step->batch, step->kv, &step->hidden));
    if (step->stage.generation != generation) mtp__graphs_clear(&step->graphs);
    mtp_status status = MTP_OK;
    for (int64_t first = 0; first < step->rows->num_rows && status == MTP_OK; first += step->own_rows)
        status = run_chunk(step, first, counts);
    if (status == MTP_OK) return mtp__stage_batch_done(&step->stage);
    const mtp_error error = *mtp_last_error();
    (void)mtp__stage_batch_done(&step->stage); /* some of it is launched */
    return mtp__fail_again(&error);
}

void mtp__step_sums_of(const double *numbers, int32_t K, mtp__step_sums *sums)
{
    for (int32_t k = 0; k < K; k++) {
        const double *of = numbers + k * MTP_TALLY_COLUMNS;
        sums[k] = (mtp__step_sums){.loss = of[MTP_TALLY_LOSS],
                                   .centroid_loss = of[MTP_TALLY_CENTROID_LOSS],
                                   .count = (int64_t)of[MTP_TALLY_COUNT],
                                   .correct = (int64_t)of[MTP_TALLY_CORRECT],
                                   .missed = (int64_t)of[MTP_TALLY_MISSED]};
    }
}

mtp_view mtp__step_device_sums(const mtp__step *step)
{
    return step->sums;
}

mtp_status mtp__step_begin_update(mtp__step *step)
{
    return step->context->ops->memory_zero(step->context->device, step->sums.data,
                                           (size_t)mtp_view_count(step->sums) * sizeof(double));
}

mtp__step_counts mtp__step_counted(const mtp__step *step)
{
    const mtp__graphs *graphs = &step->graphs;
    return (mtp__step_counts){.called = graphs->called,
                              .captured = graphs->captured,
                              .launched = graphs->launched,
                              .refused = graphs->refused,
                              .nodes = graphs->nodes};
}

mtp_status mtp__step_run(mtp__step *step, const mtp_batch *batch, const mtp__rows *rows, const int64_t *counts,
                         mtp__step_sums *sums, mtp__step_outputs *outputs)
{
    MTP_REQUIRE(step && batch && rows && counts);
    const int32_t K = step->config.num_speculative_steps;
    if (rows->K != K) return MTP_FAIL(MTP_E_ARGUMENT, "rows have %d draft steps, the step has %d", rows->K, K);
    if (rows->num_rows < 1) return MTP_FAIL(MTP_E_ARGUMENT, "a step needs at least one row");
    if (outputs) {
        const size_t places = (size_t)K * (size_t)rows->num_rows;
        if (outputs->loss) memset(outputs->loss, 0, places * sizeof(float));
        if (outputs->centroid_loss) memset(outputs->centroid_loss, 0, places * sizeof(float));
        if (outputs->miss) memset(outputs->miss, 0, places);
    }
    if (sums) MTP_TRY(mtp__step_begin_update(step));
    step->batch = batch;
    step->rows = rows;
    step->outputs = outputs;
    MTP_TRY(run(step, counts));
    if (!sums) return MTP_OK;
    double numbers[MTP_MAX_SPECULATIVE_STEPS * MTP_TALLY_COLUMNS];
    MTP_TRY(step->context->ops->download(step->context->device, numbers, step->sums.data,
                                         (size_t)mtp_view_count(step->sums) * sizeof *numbers));
    mtp__step_sums_of(numbers, K, sums);
    return MTP_OK;
}
