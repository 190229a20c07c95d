/* One drafter case: forward, losses and gradients of one batch of all its samples, and the AdamW curve when it has one.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/context.h"
#include "base/error.h"
#include "formats/json.h"
#include "golden.h"
#include "model/step.h"
#include "run/trained.h"

typedef struct golden_case {
    const char *directory;
    mtp_step_config config;
    char objective[32]; /* "" for cross-entropy */
    bool bf16;
    bool has_curve;
    mtp_adamw_config adamw;
    double learning_rate;
    int64_t curve_steps;

    mtp_context *context;
    mtp_verifier *verifier;
    mtp_dataset *dataset;
    mtp_batch *batch;
    mtp__rows rows;
    int64_t counts[64];
    bool *redrafted; /* [K, R]: this step or an earlier one of the row had another token than the case (bf16) */
    mtp_safetensors *expected, *curve;
} golden_case;

static const char *path_of(char *buffer, size_t size, const golden_case *c, const char *name)
{
    snprintf(buffer, size, "%s/%s", c->directory, name);
    return buffer;
}

/* ---- reading the case ------------------------------------------------------------------------------------------- */

static mtp_status choose(const mtp__json_node *root, const char *key, const char *const *names, int count, int *value)
{
    const char *text;
    MTP_TRY(mtp__json_get_string(root, key, &text));
    for (*value = 0; *value < count; ++*value)
        if (strcmp(names[*value], text) == 0) return MTP_OK;
    return mtp__json_fail(root, MTP_E_DATA, "%s is \"%s\", which this checker does not know", key, text);
}

static mtp_status read_curve_settings(const mtp__json_node *root, golden_case *c)
{
    mtp__json_node curve, betas;
    size_t count;
    c->has_curve = mtp__json_has(root, "curve");
    if (!c->has_curve) return MTP_OK;
    MTP_TRY(mtp__json_get_object(root, "curve", &curve));
    MTP_TRY(mtp__json_get_array(&curve, "betas", &betas, &count));
    if (count != 2) return mtp__json_fail(&betas, MTP_E_DATA, "expected two numbers");
    const mtp__json_node first = mtp__json_item(&betas, 0), second = mtp__json_item(&betas, 1);
    MTP_TRY(mtp__json_as_double(&first, &c->adamw.beta1));
    MTP_TRY(mtp__json_as_double(&second, &c->adamw.beta2));
    MTP_TRY(mtp__json_get_double(&curve, "lr", &c->learning_rate));
    MTP_TRY(mtp__json_get_double(&curve, "eps", &c->adamw.epsilon));
    MTP_TRY(mtp__json_get_double(&curve, "weight_decay", &c->adamw.weight_decay));
    MTP_TRY(mtp__json_get_double(&curve, "clip_norm", &c->adamw.max_grad_norm));
    return mtp__json_get_int64(&curve, "steps", 1, 100000, &c->curve_steps);
}

static mtp_status read_settings(const mtp__json_node *root, golden_case *c)
{
    static const char *const modes[] = {"flat", "masked", "hierarchical"}, *const feedings[] = {"teacher", "self"};
    int64_t K, offset;
    int mode, feeding;
    if (mtp__json_has(root, "kd")) {
        const char *objective;
        MTP_TRY(mtp__json_get_string(root, "kd", &objective));
        snprintf(c->objective, sizeof c->objective, "%s", objective);
    }
    MTP_TRY(mtp__json_get_int64(root, "K", 1, 64, &K));
    MTP_TRY(mtp__json_get_int64(root, "position_offset", 0, 1, &offset));
    MTP_TRY(choose(root, "mode", modes, 3, &mode));
    MTP_TRY(choose(root, "feeding", feedings, 2, &feeding));
    MTP_TRY(mtp__json_get_double(root, "beta", &c->config.step_weight_beta));
    MTP_TRY(mtp__json_get_double(root, "centroid_weight", &c->config.centroid_weight));
    c->config.num_speculative_steps = (int32_t)K;
    c->config.position_offset = (int32_t)offset;
    c->config.head_mode = (mtp_head_mode)mode;
    c->config.feeding = (mtp_feeding)feeding;
    return read_curve_settings(root, c);
}

static mtp_status read_case(golden_case *c)
{
    char path[4096];
    json_t *json;
    MTP_TRY(mtp__json_read(path_of(path, sizeof path, c, "case.json"), &json));
    const mtp__json_node root = mtp__json_root(json, path);
    const mtp_status status = read_settings(&root, c);
    json_decref(json);
    return status;
}

static mtp_status open_data(golden_case *c, const mtp_context_options *device)
{
    char path[4096];
    const mtp_dataset_options data_options = {.hidden_norm = MTP_HIDDEN_UNSET};
    MTP_TRY(mtp_context_create(device, &c->context));
    c->bf16 = device->bf16;
    if (c->bf16 && c->context->ops == mtp__backend_cpu()) c->context->ops = golden_rounded_backend();
    MTP_TRY(mtp_verifier_open(path_of(path, sizeof path, c, "verifier"), NULL, &c->verifier));
    const char *samples = path_of(path, sizeof path, c, "samples");
    MTP_TRY(mtp_dataset_open(&samples, 1, c->verifier, &data_options, &c->dataset));
    const int64_t count = mtp_dataset_size(c->dataset);
    int64_t *all = malloc(sizeof *all * (size_t)count);
    if (!all) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a batch");
    for (int64_t i = 0; i < count; i++) all[i] = i;
    const mtp_status status = mtp_batch_collate(c->dataset, all, count, true, &c->batch);
    free(all);
    MTP_TRY(status);
    MTP_TRY(mtp__rows_create(c->batch->batch * c->batch->seq, c->config.num_speculative_steps, &c->rows));
    MTP_TRY(mtp__rows_build(c->batch, MTP__ROWS_SUPERVISED, NULL, &c->rows));
    mtp__rows_count(&c->rows, c->counts);
    c->redrafted = calloc((size_t)(c->rows.K * c->rows.num_rows), sizeof *c->redrafted);
    if (!c->redrafted) return MTP_FAIL(MTP_E_MEMORY, "out of memory for a batch");
    if (c->rows.num_rows < MTP__ROWS_PER_CHUNK_HOST) c->config.rows_per_chunk = MTP__ROWS_PER_CHUNK_HOST;
    MTP_TRY(mtp_safetensors_open(path_of(path, sizeof path, c, "expected.safetensors"), &c->expected));
    if (c->has_curve) MTP_TRY(mtp_safetensors_open(path_of(path, sizeof path, c, "curve.safetensors"), &c->curve));
    return MTP_OK;
}

static void close_case(golden_case *c)
{
    mtp_safetensors_close(c->curve);
    mtp_safetensors_close(c->expected);
    free(c->redrafted);
    mtp__rows_free(&c->rows);
    mtp_batch_free(c->batch);
    mtp_dataset_close(c->dataset);
    mtp_verifier_close(c->verifier);
    mtp_context_free(c->context);
}

/* A drafter of the case with gradients, and a step for it. */
static mtp_status load(golden_case *c, const char *freeze, mtp__step_mode mode, mtp_drafter **drafter, mtp__step **step)
{
    char path[4096];
    MTP_TRY(mtp_drafter_load(c->context, path_of(path, sizeof path, c, "assistant"), drafter));
    if (freeze) MTP_TRY(mtp_drafter_freeze(*drafter, freeze));
    if (mode == MTP__STEP_TRAIN) MTP_TRY(mtp__drafter_alloc_grads(*drafter));
    return mtp__step_create(*drafter, c->verifier, &c->config, mode, step);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

static mtp_status compare_integers(golden_case *c, golden_result *result, const char *name, const int32_t *words,
                                   const uint8_t *bytes, int64_t count)
{
    int64_t *want;
    MTP_TRY(golden_integers(c->expected, name, count, &want));
    for (int64_t i = 0; i < count; i++) golden_note_integer(result, name, words ? words[i] : bytes[i], want[i]);
    free(want);
    return MTP_OK;
}

/* Tokens that the steps took: all of the case, but drafted ones in bf16. */
static mtp_status compare_inputs(golden_case *c, golden_result *result, int32_t k, const char *name,
                                 const int32_t *tokens)
{
    const int64_t R = c->rows.num_rows;
    bool *const other = c->redrafted + k * R;
    int64_t *want;
    if (!c->bf16 || c->config.feeding != MTP_FEED_SELF || k == 0)
        return compare_integers(c, result, name, tokens, NULL, R);
    MTP_TRY(golden_integers(c->expected, name, R, &want));
    for (int64_t r = 0; r < R; r++) {
        if (!c->rows.valid[k * R + r]) continue;
        other[r] = tokens[r] != want[r] || other[r - R];
        result->drafts++;
        result->redrafted += other[r];
    }
    free(want);
    return MTP_OK;
}

static mtp_status compare_rows(golden_case *c, golden_result *result, const mtp__step_outputs *outputs)
{
    const int64_t R = c->rows.num_rows;
    char name[64];
    MTP_TRY(compare_integers(c, result, "rows.sample", c->rows.document, NULL, R));
    MTP_TRY(compare_integers(c, result, "rows.position", c->rows.position, NULL, R));
    for (int32_t k = 0; k < c->rows.K; k++) {
        snprintf(name, sizeof name, "step%d.valid", k);
        MTP_TRY(compare_integers(c, result, name, NULL, c->rows.valid + k * R, R));
        snprintf(name, sizeof name, "step%d.supervised", k);
        MTP_TRY(compare_integers(c, result, name, NULL, c->rows.supervised + k * R, R));
        snprintf(name, sizeof name, "step%d.input_token", k);
        MTP_TRY(compare_inputs(c, result, k, name, outputs->input_token + k * R));
        snprintf(name, sizeof name, "step%d.target", k);
        MTP_TRY(compare_integers(c, result, name, c->rows.target + k * R, NULL, R));
    }
    return MTP_OK;
}

/* What step k has of every row, [R, width]; rows that another token was drafted for are as expected. */
static mtp_status compare_places(golden_case *c, golden_result *result, golden_group group, const char *name, int32_t k,
                                 float *got, int64_t width)
{
    const int64_t R = c->rows.num_rows;
    if (c->bf16) MTP_TRY(golden_take(c->expected, name, got, R, width, c->redrafted + k * R));
    return golden_compare(result, group, c->expected, name, got, R * width, 0);
}

/* Only the set of selected centroids counts: bring our blocks of logits into the expected order. `missing` [R, top_k]:
 * those that we did not select. */
static mtp_status reorder_logits(golden_case *c, golden_result *result, int32_t k, const mtp_drafter_config *config,
                                 const mtp__step_outputs *outputs, float *logits, bool *missing)
{
    const int64_t R = c->rows.num_rows, top_k = config->centroid_top_k, P = config->vocab_size / config->num_centroids;
    const int32_t *selected = outputs->selected + k * R * top_k;
    const float *ours = outputs->logits + k * R * top_k * P;
    char name[64];
    int64_t *want;
    snprintf(name, sizeof name, "step%d.selected", k);
    MTP_TRY(golden_integers(c->expected, name, R * top_k, &want));
    for (int64_t r = 0; r < R; r++) {
        for (int64_t j = 0; j < top_k; j++) {
            const int64_t centroid = want[r * top_k + j];
            int64_t i = 0;
            while (i < top_k && selected[r * top_k + i] != centroid) i++;
            missing[r * top_k + j] = i == top_k;
            float *block = logits + (r * top_k + j) * P;
            if (i < top_k)
                memcpy(block, ours + (r * top_k + i) * P, (size_t)P * sizeof(float));
            else
                memset(block, 0, (size_t)P * sizeof(float));
            if (!c->bf16) {
                golden_note_integer(result, name, i < top_k, 1);
            } else if (!c->redrafted[k * R + r]) {
                result->selections++;
                result->reselected += i == top_k;
            }
        }
    }
    free(want);
    return MTP_OK;
}

static mtp_status compare_selected(golden_case *c, golden_result *result, int32_t k, const mtp_drafter_config *config,
                                   const mtp__step_outputs *outputs)
{
    const int64_t R = c->rows.num_rows, top_k = config->centroid_top_k, P = config->vocab_size / config->num_centroids;
    float *logits = malloc(sizeof *logits * (size_t)(R * top_k * P));
    bool *missing = malloc((size_t)(R * top_k) * sizeof *missing);
    mtp_status status = logits && missing ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for logits");
    char name[64];
    snprintf(name, sizeof name, "step%d.selected_logits", k);
    if (status == MTP_OK) status = reorder_logits(c, result, k, config, outputs, logits, missing);
    if (status == MTP_OK && c->bf16) status = golden_take(c->expected, name, logits, R * top_k, P, missing);
    if (status == MTP_OK) status = compare_places(c, result, GOLDEN_LOGITS, name, k, logits, top_k * P);
    free(logits);
    free(missing);
    return status;
}

static mtp_status compare_forward(golden_case *c, golden_result *result, const mtp_drafter_config *config,
                                  const mtp__step_outputs *outputs)
{
    const int64_t R = c->rows.num_rows, H = config->hidden_size, Hb = config->backbone_hidden_size;
    const int64_t V = config->vocab_size;
    char name[64];
    for (int32_t k = 0; k < c->rows.K; k++) {
        snprintf(name, sizeof name, "step%d.hidden", k);
        MTP_TRY(compare_places(c, result, GOLDEN_HIDDEN, name, k, outputs->hidden + k * R * H, H));
        snprintf(name, sizeof name, "step%d.state", k);
        MTP_TRY(compare_places(c, result, GOLDEN_STATE, name, k, outputs->state + k * R * Hb, Hb));
        if (config->ordered) {
            MTP_TRY(compare_selected(c, result, k, config, outputs));
            continue;
        }
        snprintf(name, sizeof name, "step%d.logits", k);
        MTP_TRY(compare_places(c, result, GOLDEN_LOGITS, name, k, outputs->logits + k * R * V, V));
    }
    return MTP_OK;
}

static mtp_status compare_losses(golden_case *c, golden_result *result, const mtp__step_outputs *outputs,
                                 const mtp__step_sums *sums)
{
    const int64_t R = c->rows.num_rows;
    const int32_t K = c->rows.K;
    float steps[64], centroid_steps[64];
    float *by_row = malloc(sizeof *by_row * (size_t)(2 * R * K)), *centroid_by_row = by_row + R * K;
    bool *other = malloc((size_t)(R * K) * sizeof *other);
    if (!by_row || !other) return MTP_FAIL(MTP_E_MEMORY, "out of memory for losses");
    for (int32_t k = 0; k < K; k++) { /* ours is [K, R], theirs [R, K] */
        for (int64_t r = 0; r < R; r++) {
            by_row[r * K + k] = outputs->loss[k * R + r];
            centroid_by_row[r * K + k] = outputs->centroid_loss[k * R + r];
            other[r * K + k] = c->redrafted[k * R + r];
        }
        steps[k] = c->counts[k] ? (float)(sums[k].loss / (double)c->counts[k]) : 0.0f;
        centroid_steps[k] = c->counts[k] ? (float)(sums[k].centroid_loss / (double)c->counts[k]) : 0.0f;
    }
    const float total = (float)mtp__step_total(&c->config, sums, c->counts);
    mtp_status status = golden_take(c->expected, "loss.rows", by_row, R * K, 1, other);
    if (status == MTP_OK) status = golden_take(c->expected, "loss.centroid_rows", centroid_by_row, R * K, 1, other);
    free(other);
    if (status == MTP_OK) status = golden_compare(result, GOLDEN_LOSS, c->expected, "loss.rows", by_row, R * K, 0);
    if (status == MTP_OK)
        status = golden_compare(result, GOLDEN_LOSS, c->expected, "loss.centroid_rows", centroid_by_row, R * K, 0);
    free(by_row);
    MTP_TRY(status);
    MTP_TRY(golden_compare(result, GOLDEN_LOSS, c->expected, "loss.step", steps, K, 0));
    MTP_TRY(golden_compare(result, GOLDEN_LOSS, c->expected, "loss.centroid_step", centroid_steps, K, 0));
    return golden_compare(result, GOLDEN_LOSS, c->expected, "loss.total", &total, 1, 0);
}

static mtp_status alloc_outputs(const golden_case *c, const mtp_drafter_config *config, mtp__step_outputs *outputs)
{
    const size_t places = (size_t)c->rows.K * (size_t)c->rows.num_rows;
    const int64_t width =
        config->ordered ? config->centroid_top_k * (config->vocab_size / config->num_centroids) : config->vocab_size;
    outputs->input_token = calloc(places, sizeof(int32_t));
    outputs->loss = calloc(places, sizeof(float));
    outputs->centroid_loss = calloc(places, sizeof(float));
    outputs->hidden = calloc(places * (size_t)config->hidden_size, sizeof(float));
    outputs->state = calloc(places * (size_t)config->backbone_hidden_size, sizeof(float));
    outputs->logits = calloc(places * (size_t)width, sizeof(float));
    if (config->ordered) outputs->selected = calloc(places * (size_t)config->centroid_top_k, sizeof(int32_t));
    const bool complete = outputs->input_token && outputs->loss && outputs->centroid_loss && outputs->hidden &&
                          outputs->state && outputs->logits && (!config->ordered || outputs->selected);
    return complete ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for the outputs of %zu rows and steps", places);
}

static void free_outputs(mtp__step_outputs *outputs)
{
    free(outputs->input_token);
    free(outputs->loss);
    free(outputs->centroid_loss);
    free(outputs->hidden);
    free(outputs->state);
    free(outputs->logits);
    free(outputs->selected);
}

static mtp_status check_forward(golden_case *c, golden_result *result)
{
    mtp_drafter *drafter = NULL;
    mtp__step *step = NULL;
    mtp__step_outputs outputs = {0};
    mtp__step_sums sums[64];
    mtp_status status = load(c, NULL, MTP__STEP_EVALUATE, &drafter, &step);
    if (status == MTP_OK) status = alloc_outputs(c, mtp_drafter_get_config(drafter), &outputs);
    if (status == MTP_OK) status = mtp__step_run(step, c->batch, &c->rows, c->counts, sums, &outputs);
    if (status == MTP_OK) status = compare_rows(c, result, &outputs);
    if (status == MTP_OK) status = compare_forward(c, result, mtp_drafter_get_config(drafter), &outputs);
    if (status == MTP_OK) status = compare_losses(c, result, &outputs, sums);
    free_outputs(&outputs);
    mtp__step_free(step);
    mtp_drafter_free(drafter);
    return status;
}

/* ---- gradients and curve ----------------------------------------------------------------------------------------- */

static mtp_status largest_gradient(const golden_case *c, double *largest)
{
    *largest = 0;
    for (size_t i = 0; i < mtp_safetensors_count(c->expected); i++) {
        const mtp_safetensors_entry *entry = mtp_safetensors_at(c->expected, i);
        double *values;
        if (strncmp(entry->name, "grad.", 5) != 0) continue;
        MTP_TRY(golden_reals(c->expected, entry->name, entry->count, &values));
        for (int64_t j = 0; j < entry->count; j++) *largest = fmax(*largest, fabs(values[j]));
        free(values);
    }
    return MTP_OK;
}

/* `memory` is a parameter's value or gradient on the device; the expected tensor has its rows in the order of files. */
static mtp_status compare_parameter(golden_case *c, golden_result *result, golden_group group,
                                    const mtp_safetensors *expected, const char *name, const mtp_drafter *drafter,
                                    const mtp__param *param, const float *memory, double floor)
{
    const size_t bytes = (size_t)param->count * sizeof(float);
    const int64_t width = param->by_slot ? param->shape[1] : param->count, rows = param->count / width;
    float *got = malloc(2 * bytes), *values = got + param->count;
    if (!got) return MTP_FAIL(MTP_E_MEMORY, "out of memory for %s", name);
    mtp_status status = c->context->ops->download(c->context->device, got, memory, bytes);
    for (int64_t row = 0; status == MTP_OK && row < rows; row++) {
        const int64_t place = param->by_slot ? drafter->token_ordering[row] : row;
        memcpy(values + place * width, got + row * width, (size_t)width * sizeof(float));
    }
    if (status == MTP_OK) status = golden_compare(result, group, expected, name, values, param->count, floor);
    free(got);
    return status;
}

static mtp_status compare_gradients(golden_case *c, golden_result *result, const mtp_drafter *drafter)
{
    double largest;
    size_t expected = 0;
    char name[256];
    MTP_TRY(largest_gradient(c, &largest));
    for (size_t i = 0; i < mtp_safetensors_count(c->expected); i++)
        expected += strncmp(mtp_safetensors_at(c->expected, i)->name, "grad.", 5) == 0;
    if (expected != (size_t)drafter->num_params)
        return MTP_FAIL(MTP_E_DATA, "the case has %zu gradients, the drafter %lld parameters", expected,
                        (long long)drafter->num_params);
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        snprintf(name, sizeof name, "grad.%s", param->name);
        MTP_TRY(compare_parameter(c, result, GOLDEN_GRADIENTS, c->expected, name, drafter, param, param->grad,
                                  0.01 * largest));
    }
    return MTP_OK;
}

static mtp_status check_gradients(golden_case *c, golden_result *result)
{
    mtp_drafter *drafter = NULL;
    mtp__step *step = NULL;
    mtp__step_sums sums[64];
    mtp_status status = load(c, NULL, MTP__STEP_TRAIN, &drafter, &step);
    if (status == MTP_OK) status = mtp__step_run(step, c->batch, &c->rows, c->counts, sums, NULL);
    if (status == MTP_OK) status = compare_gradients(c, result, drafter);
    mtp__step_free(step);
    mtp_drafter_free(drafter);
    return status;
}

static mtp_status make_optimizer(const golden_case *c, const mtp_drafter *drafter, mtp__optimizer **optimizer)
{
    mtp__optim_tensor *tensors = calloc((size_t)drafter->num_params, sizeof *tensors);
    if (!tensors) return MTP_FAIL(MTP_E_MEMORY, "out of memory for an optimizer");
    const int64_t count = mtp__trained_tensors(drafter, tensors);
    const mtp_status status = mtp__optimizer_create(drafter->context, tensors, count, &c->adamw, NULL, optimizer);
    free(tensors);
    return status;
}

static void relative(golden_result *result, golden_group group, const char *name, int64_t step, double got, double want)
{
    char where[128];
    snprintf(where, sizeof where, "%s[%lld]", name, (long long)step);
    const double error = fabs(got - want) / fmax(fabs(want), 1e-30);
    golden_note(result, group, where, error, 1);
    result->group[group].squares += error * error;
    result->group[group].tensors++;
}

/* One step of AdamW: the loss and the norm of the gradients before it. */
static mtp_status advance(golden_case *c, mtp_drafter *drafter, mtp__step *step, mtp__optimizer *optimizer,
                          double *loss, double *norm)
{
    mtp__step_sums sums[64];
    mtp__optim_result done;
    MTP_TRY(
        c->context->ops->memory_zero(c->context->device, drafter->grads, (size_t)drafter->num_grads * sizeof(float)));
    MTP_TRY(mtp__step_run(step, c->batch, &c->rows, c->counts, sums, NULL));
    MTP_TRY(mtp__optimizer_step(optimizer, &(mtp__optim_update){.learning_rate = c->learning_rate}));
    MTP_TRY(mtp__optimizer_read(optimizer, &done));
    *loss = mtp__step_total(&c->config, sums, c->counts);
    *norm = done.norm;
    return MTP_OK;
}

static mtp_status run_curve(golden_case *c, golden_result *result, mtp_drafter *drafter, mtp__step *step,
                            mtp__optimizer *optimizer)
{
    double *losses, *norms = NULL;
    MTP_TRY(golden_reals(c->curve, "loss.total", c->curve_steps, &losses));
    mtp_status status = golden_reals(c->curve, "grad_norm", c->curve_steps, &norms);
    for (int64_t i = 0; i < c->curve_steps && status == MTP_OK; i++) {
        double loss = 0, norm = 0;
        status = advance(c, drafter, step, optimizer, &loss, &norm);
        if (status != MTP_OK) break;
        relative(result, GOLDEN_CURVE_LOSS, "loss.total", i, loss, losses[i]);
        relative(result, GOLDEN_CURVE_NORM, "grad_norm", i, norm, norms[i]);
    }
    free(losses);
    free(norms);
    return status;
}

static mtp_status compare_final_weights(golden_case *c, golden_result *result, const mtp_drafter *drafter)
{
    char name[256];
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        if (!param->trained) continue;
        snprintf(name, sizeof name, "final.%s", param->name);
        MTP_TRY(compare_parameter(c, result, GOLDEN_CURVE_WEIGHTS, c->curve, name, drafter, param, param->value, 0));
    }
    return MTP_OK;
}

/* What a curve starts with. */
typedef struct training {
    mtp_drafter *drafter;
    mtp__step *step;
    mtp__optimizer *optimizer;
} training;

static mtp_status begin_training(golden_case *c, training *t)
{
    MTP_TRY(load(c, "*.layer_scalar", MTP__STEP_TRAIN, &t->drafter, &t->step));
    return make_optimizer(c, t->drafter, &t->optimizer);
}

static void end_training(training *t)
{
    mtp__optimizer_free(t->optimizer);
    mtp__step_free(t->step);
    mtp_drafter_free(t->drafter);
}

static mtp_status check_curve(golden_case *c, golden_result *result)
{
    training t = {0};
    mtp_status status = begin_training(c, &t);
    if (status == MTP_OK) status = run_curve(c, result, t.drafter, t.step, t.optimizer);
    if (status == MTP_OK) status = compare_final_weights(c, result, t.drafter);
    end_training(&t);
    return status;
}

static mtp_status take_weights(golden_case *c, const mtp_drafter *drafter, golden_steps *steps)
{
    const mtp_backend *ops = c->context->ops;
    int64_t at = 0;
    for (int64_t i = 0; i < drafter->num_params; i++)
        steps->num_weights += drafter->params[i].trained ? drafter->params[i].count : 0;
    steps->weights = malloc((size_t)(steps->num_weights + 1) * sizeof *steps->weights);
    if (!steps->weights) return MTP_FAIL(MTP_E_MEMORY, "out of memory for weights");
    for (int64_t i = 0; i < drafter->num_params; i++) {
        const mtp__param *param = &drafter->params[i];
        if (!param->trained) continue;
        MTP_TRY(
            ops->download(c->context->device, steps->weights + at, param->value, (size_t)param->count * sizeof(float)));
        at += param->count;
    }
    return MTP_OK;
}

mtp_status golden_run_steps(const char *directory, const mtp_context_options *device, int64_t count,
                            golden_steps *steps)
{
    golden_case c = {.directory = directory};
    training t = {0};
    mtp_status status = read_case(&c);
    if (!c.has_curve) {
        c.adamw = (mtp_adamw_config){.beta1 = 0.9, .beta2 = 0.999, .epsilon = 1e-8, .max_grad_norm = 1};
        c.learning_rate = 1e-3;
    }
    if (status == MTP_OK) status = open_data(&c, device);
    if (status == MTP_OK) status = begin_training(&c, &t);
    for (int64_t i = 0; i < count && status == MTP_OK; i++)
        status = advance(&c, t.drafter, t.step, t.optimizer, &steps->loss[i], &steps->norm[i]);
    if (status == MTP_OK) status = take_weights(&c, t.drafter, steps);
    end_training(&t);
    close_case(&c);
    return status;
}

mtp_status golden_run_case(const char *directory, const mtp_context_options *device, golden_result *result,
                           const char **skipped)
{
    static const char *const objectives[] = {"kl", "rkl", "jsd", "tv", "nla", "lk_hybrid"};
    golden_case c = {.directory = directory};
    mtp_status status = read_case(&c);
    if (status == MTP_OK && c.objective[0]) {
        for (size_t i = 0; i < sizeof objectives / sizeof *objectives; i++)
            if (strcmp(objectives[i], c.objective) == 0) *skipped = objectives[i];
        return *skipped ? MTP_OK : MTP_FAIL(MTP_E_DATA, "%s: objective \"%s\" is unknown", directory, c.objective);
    }
    if (status == MTP_OK) status = open_data(&c, device);
    if (status == MTP_OK) status = check_forward(&c, result);
    if (status == MTP_OK) status = check_gradients(&c, result);
    if (status == MTP_OK && c.has_curve) status = check_curve(&c, result);
    close_case(&c);
    return status;
}
