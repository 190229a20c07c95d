/* mtp_init: an untrained drafter. */
#include "model/init.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "model/config.h"
#include "model/directions.h"
#include "model/export.h"
#include "model/kmeans.h"
#include "model/table.h"
#include "model/tensors.h"
#include "model/weights.h"
#include "mtp/safetensors.h"

enum { CHUNK = 1 << 16, MATRIX_STREAM = 0x6d617472 };
static const double LOGIT_STD = 0.8;
static const float Q_NORM = 0.5f;

typedef struct maker {
    mtp_context *context;
    const mtp_init_options *options;
    mtp_verifier *verifier;
    json_t *config_json;
    mtp_drafter_config config;
    mtp_drafter *drafter;
    mtp_init_result result;
} maker;

/* ---- configuration -------------------------------------------------------------------------------------------- */

static bool geometry_is_given(const mtp_init_geometry *g)
{
    return g->hidden_size || g->intermediate_size || g->num_hidden_layers || g->num_attention_heads ||
           g->num_centroids || g->centroid_intermediate_top_k;
}

static mtp_status read_config(maker *make)
{
    const mtp_init_options *options = make->options;
    const char *directory = mtp_verifier_directory(make->verifier), *origin = options->config;
    if (origin && geometry_is_given(&options->geometry))
        return MTP_FAIL(MTP_E_CONFIG, "%s gives the geometry already; sizes cannot be named beside it", origin);
    if (origin) {
        MTP_TRY(mtp__json_read(origin, &make->config_json));
    } else {
        origin = "the drafter's configuration";
        MTP_TRY(mtp__init_config(mtp_verifier_get_config(make->verifier), directory, &options->geometry,
                                 &make->config_json));
    }
    MTP_TRY(mtp__drafter_config_parse(make->config_json, origin, &make->config));
    if (options->token_ordering && !make->config.ordered)
        return MTP_FAIL(MTP_E_CONFIG, "%s: a token ordering was given, but the head is dense (use_ordered_embeddings)",
                        options->token_ordering);
    return mtp_verifier_check_drafter(make->verifier, &make->config);
}

/* ---- the ordered head ----------------------------------------------------------------------------------------- */

static mtp_status read_ordering(maker *make)
{
    const char *path = make->options->token_ordering;
    const int64_t V = make->config.vocab_size;
    mtp_safetensors *file = NULL;
    const mtp_safetensors_entry *entry;
    int64_t *ordering = NULL;
    MTP_TRY(mtp_safetensors_open(path, &file));
    mtp_status status = mtp_safetensors_get(file, MTP__TOKEN_ORDERING, &entry);
    if (status == MTP_OK && (entry->dtype != MTP_I64 || entry->rank != 1 || entry->shape[0] != V))
        status = MTP_FAIL(MTP_E_DATA, "%s: %s must be I64 [%lld]", path, MTP__TOKEN_ORDERING, (long long)V);
    if (status == MTP_OK && !(ordering = malloc(entry->size)))
        status = MTP_FAIL(MTP_E_MEMORY, "out of memory for an ordering of %lld tokens", (long long)V);
    if (status == MTP_OK) status = mtp_safetensors_copy(entry, ordering, entry->size);
    if (status == MTP_OK) status = mtp__drafter_set_ordering(make->drafter, ordering, path);
    free(ordering);
    mtp_safetensors_close(file);
    return status;
}

static mtp_status cluster(maker *make)
{
    const mtp_view table = mtp_verifier_embedding(make->verifier);
    const int64_t C = make->config.num_centroids;
    mtp__kmeans_result result;
    mtp_log(make->options->logger, MTP_LOG_INFO,
            "clustering %lld tokens into %lld centroids: %.3g operations an iteration, at most 12",
            (long long)table.shape[0], (long long)C, 2.0 * (double)table.shape[0] * (double)table.shape[1] * (double)C);
    MTP_TRY(mtp__balanced_kmeans(make->context, table, C, make->options->seed, &result));
    mtp_log(make->options->logger, MTP_LOG_INFO,
            "clustered in %lld iterations; %.3f of the variance is within clusters", (long long)result.iterations,
            result.inertia);
    make->result.cluster_inertia = result.inertia;
    const mtp_status status = mtp__drafter_set_ordering(make->drafter, result.ordering, "clusters");
    free(result.ordering);
    return status;
}

/* ---- embedding and centroids ---------------------------------------------------------------------------------- */

/* The table on the directions, unscaled, into the drafter's embedding, row by row as memory has them; sums for its mean
 * and variance. */
static mtp_status project(maker *make, const float *directions, double *sum, double *squares)
{
    const mtp_context *context = make->context;
    const mtp_view view = mtp_verifier_embedding(make->verifier);
    const int64_t V = view.shape[0], Hb = view.shape[1], H = make->config.hidden_size;
    const int64_t *tokens = make->drafter->token_ordering; /* NULL when dense */
    mtp__table table = {0};
    void *weight = NULL;
    float *block = malloc((size_t)(MTP__TABLE_BLOCK * H) * sizeof *block);
    if (!block) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a block of embeddings");
    mtp_status status = mtp__table_open(make->context, view, H, &table);
    if (status == MTP_OK)
        status = context->ops->memory_alloc(context->device, (size_t)(H * Hb) * sizeof(float), &weight);
    if (status == MTP_OK)
        status = context->ops->upload(context->device, weight, directions, (size_t)(H * Hb) * sizeof(float));
    for (int64_t first = 0; first < V && status == MTP_OK; first += MTP__TABLE_BLOCK) {
        const int64_t count = V - first < MTP__TABLE_BLOCK ? V - first : MTP__TABLE_BLOCK;
        MTP_TRY_GOTO(status, mtp__table_read(&table, tokens ? tokens + first : NULL, first, count), done);
        MTP_TRY_GOTO(status, mtp__table_project(&table, count, weight, H, block), done);
        for (int64_t i = 0; i < count * H; i++) {
            *sum += (double)block[i];
            *squares += (double)block[i] * (double)block[i];
        }
        MTP_TRY_GOTO(status, mtp__param_write(make->drafter, make->drafter->embed, first * H, block, count * H), done);
    }
done:
    context->ops->memory_free(context->device, weight);
    mtp__table_close(&table);
    free(block);
    return status;
}

/* Scale the embedding; add each row to its centroid's sum [C, H] (NULL when dense). */
static mtp_status scale(const maker *make, float factor, double *centroid_sums)
{
    const mtp_drafter *drafter = make->drafter;
    const int64_t V = make->config.vocab_size, H = make->config.hidden_size;
    const int64_t P = make->config.ordered ? V / make->config.num_centroids : 1;
    mtp_status status = MTP_OK;
    float *block = malloc((size_t)(MTP__TABLE_BLOCK * H) * sizeof *block);
    if (!block) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a block of embeddings");
    for (int64_t first = 0; first < V && status == MTP_OK; first += MTP__TABLE_BLOCK) {
        const int64_t count = V - first < MTP__TABLE_BLOCK ? V - first : MTP__TABLE_BLOCK;
        MTP_TRY_GOTO(status, mtp__param_read(drafter, drafter->embed, first * H, block, count * H), done);
        for (int64_t i = 0; i < count * H; i++) block[i] *= factor;
        for (int64_t i = 0; centroid_sums && i < count * H; i++)
            centroid_sums[(first + i / H) / P * H + i % H] += (double)block[i];
        MTP_TRY_GOTO(status, mtp__param_write(drafter, drafter->embed, first * H, block, count * H), done);
    }
done:
    free(block);
    return status;
}

static mtp_status scale_and_average(const maker *make, float factor)
{
    const int64_t C = make->config.num_centroids, H = make->config.hidden_size;
    const double P = (double)make->config.vocab_size / (double)(C ? C : 1);
    if (!make->config.ordered) return scale(make, factor, NULL);
    double *sums = calloc((size_t)(C * H), sizeof *sums);
    float *means = malloc((size_t)(C * H) * sizeof *means);
    mtp_status status = sums && means ? scale(make, factor, sums)
                                      : MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld centroids", (long long)C);
    for (int64_t i = 0; i < C * H && status == MTP_OK; i++) means[i] = (float)(sums[i] / P);
    if (status == MTP_OK) status = mtp__param_write(make->drafter, make->drafter->centroids, 0, means, C * H);
    free(sums);
    free(means);
    return status;
}

static mtp_status fill_embedding(maker *make)
{
    const mtp_view table = mtp_verifier_embedding(make->verifier);
    const int64_t H = make->config.hidden_size, Hb = table.shape[1];
    const double count = (double)table.shape[0] * (double)H;
    double sum = 0, squares = 0;
    float *directions = malloc((size_t)(H * Hb) * sizeof *directions);
    if (!directions) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %lld directions", (long long)H);
    mtp_log(make->options->logger, MTP_LOG_INFO, "projecting the verifier's embedding: %lld to %lld values a token",
            (long long)Hb, (long long)H);
    mtp_status status = mtp__leading_directions(make->context, table, H, make->options->seed, directions);
    if (status == MTP_OK) status = project(make, directions, &sum, &squares);
    free(directions);
    MTP_TRY(status);
    const double variance = squares / count - sum / count * (sum / count);
    if (!(variance > 0) || !isfinite(variance))
        return MTP_FAIL(MTP_E_DATA, "%s: the embedding has the variance %g; is it a trained model?",
                        mtp_verifier_directory(make->verifier), variance);
    return scale_and_average(make, (float)(LOGIT_STD / sqrt((double)H) / sqrt(variance)));
}

/* ---- everything else ------------------------------------------------------------------------------------------ */

static bool ends_with(const char *name, const char *end)
{
    const size_t length = strlen(name), tail = strlen(end);
    return length >= tail && strcmp(name + length - tail, end) == 0;
}

/* Vectors are constant; matrices normal with variance 1 / columns, each from a stream of its own. */
static mtp_status fill_param(const maker *make, const mtp__param *param, uint64_t stream, float *chunk)
{
    mtp__rng rng = mtp__rng_make(make->options->seed, stream);
    const float constant = ends_with(param->name, "q_norm.weight") ? Q_NORM : 1.0f;
    const float deviation = param->rank == 2 ? 1.0f / sqrtf((float)param->shape[1]) : 0;
    for (int64_t first = 0; first < param->count; first += CHUNK) {
        const int64_t n = param->count - first < CHUNK ? param->count - first : CHUNK;
        for (int64_t i = 0; i < n; i++) chunk[i] = param->rank == 2 ? deviation * mtp__rng_normal(&rng) : constant;
        MTP_TRY(mtp__param_write(make->drafter, param, first, chunk, n));
    }
    return MTP_OK;
}

static mtp_status fill_others(const maker *make)
{
    const mtp_drafter *drafter = make->drafter;
    mtp_status status = MTP_OK;
    float *chunk = malloc(CHUNK * sizeof *chunk);
    if (!chunk) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %d values", CHUNK);
    for (int64_t i = 0; i < drafter->num_params && status == MTP_OK; i++) {
        const mtp__param *param = &drafter->params[i];
        if (param != drafter->embed && param != drafter->centroids)
            status = fill_param(make, param, MATRIX_STREAM + (uint64_t)i, chunk);
    }
    free(chunk);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------------------------ */

static mtp_status build(maker *make)
{
    const mtp_init_options *options = make->options;
    MTP_TRY(mtp_verifier_open(options->verifier, options->embedding_from, &make->verifier));
    MTP_TRY(read_config(make));
    const mtp__export_request request = {.config = make->config_json,
                                         .output = options->output,
                                         .verifier = options->verifier,
                                         .num_speculative_tokens = options->num_speculative_tokens,
                                         .force = options->force,
                                         .logger = options->logger};
    mtp_export_result exported;
    MTP_TRY(mtp__export_preflight(&request)); /* before minutes of work */
    MTP_TRY(mtp__drafter_create(make->context, &make->config, options->output, MTP_F32, &make->drafter));
    if (make->config.ordered) MTP_TRY(options->token_ordering ? read_ordering(make) : cluster(make));
    MTP_TRY(fill_embedding(make));
    MTP_TRY(fill_others(make));
    make->result.num_parameters = mtp_drafter_num_trained(make->drafter);
    MTP_TRY(mtp__export_drafter(make->drafter, &request, &exported));
    mtp_export_result_free(&exported);
    return MTP_OK;
}

mtp_status mtp_init(mtp_context *context, const mtp_init_options *options, mtp_init_result *result)
{
    MTP_REQUIRE(context && options && options->verifier && options->output);
    if (options->num_speculative_tokens < 1)
        return MTP_FAIL(MTP_E_CONFIG, "num_speculative_tokens is %lld; it must be at least 1",
                        (long long)options->num_speculative_tokens);
    maker make = {.context = context, .options = options};
    const mtp_status status = build(&make);
    if (result) *result = make.result;
    mtp_drafter_free(make.drafter);
    mtp_drafter_config_free(&make.config);
    json_decref(make.config_json);
    mtp_verifier_close(make.verifier);
    return status;
}
