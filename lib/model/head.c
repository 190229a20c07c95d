/* Heads and losses of a chunk (formulas: mtp/loss.h and kernels/ops.h). The supervised rows of all draft steps are
 * gathered into one matrix, so each product over the vocabulary or the centroids is done once a chunk. */
#include <string.h>

#include "base/error.h"
#include "model/workspace.h"

static mtp_head_args head_args(const mtp__step *step, mtp_view x, int64_t rows)
{
    const mtp_drafter *drafter = step->drafter;
    mtp_head_args args = {.x = x,
                          .e = mtp__param_factor(drafter->embed),
                          .logits_budget = step->config.logits_budget,
                          .scratch = step->scratch};
    if (drafter->config.ordered) {
        const int64_t C = drafter->config.num_centroids, V = drafter->config.vocab_size;
        args.order = mtp_view_2d(drafter->order, MTP_I32, C, V / C);
        args.slot_of = mtp_view_1d(drafter->slot_of, MTP_I32, V);
        args.selected = mtp__first_rows(step->head_selected, rows);
    }
    return args;
}

/* Centroid scores and selection of `x` into head_scores and head_selected. */
static mtp_status select_centroids(mtp__step *step, mtp_view x, int64_t rows)
{
    const mtp_topk_args topk = {.scores = mtp__first_rows(step->head_scores, rows),
                                .selected = mtp__first_rows(step->head_selected, rows),
                                .scratch = step->scratch};
    MTP_TRY(mtp__step_linear_fwd(step, x, mtp__param_factor(step->drafter->centroids), topk.scores, MTP_OVERWRITE));
    return step->context->ops->topk(step->context->device, &topk);
}

mtp_status mtp__step_argmax(mtp__step *step, int32_t k)
{
    const mtp_backend *ops = step->context->ops;
    const int64_t rows = step->num_rows;
    const mtp_view x = mtp__step_n(step, k);
    const bool ordered = step->drafter->config.ordered;
    if (ordered) MTP_TRY(select_centroids(step, x, rows));
    mtp_head_args args = head_args(step, x, rows);
    args.argmax = mtp__first_rows(step->head_argmax, rows);
    return (ordered ? ops->head_candidates : ops->head_flat)(step->context->device, &args);
}

mtp_status mtp__step_logits(mtp__step *step, int32_t k, mtp__step_outputs *outputs)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const mtp_drafter_config *config = &step->drafter->config;
    const int64_t rows = step->num_rows, own = step->own_rows, R = step->rows->num_rows;
    const int64_t width =
        config->ordered ? config->centroid_top_k * (config->vocab_size / config->num_centroids) : config->vocab_size;
    const mtp_view x = mtp__step_n(step, k);
    const size_t bytes = (size_t)(rows * width) * sizeof(float);
    void *logits = NULL; /* only reference checks ask for logits: not part of the plan */

    if (config->ordered) MTP_TRY(select_centroids(step, x, rows));
    MTP_TRY(ops->memory_alloc(device, bytes, &logits));
    mtp_head_args args = head_args(step, x, rows);
    args.logits = mtp_view_2d(logits, MTP_F32, rows, width);
    mtp_status status = (config->ordered ? ops->head_candidates : ops->head_flat)(device, &args);
    const int64_t at = k * R + step->first_row;
    if (status == MTP_OK)
        status = ops->download(device, outputs->logits + at * width, logits, (size_t)(own * width) * sizeof(float));
    if (status == MTP_OK && config->ordered && outputs->selected)
        status = ops->download(device, outputs->selected + at * config->centroid_top_k, step->head_selected.data,
                               (size_t)(own * config->centroid_top_k) * sizeof(int32_t));
    ops->memory_free(device, logits);
    return status;
}

/* -log p(centroid of the target) and, when it counts, its gradients; *wrote_dx tells whether head_dx has content. */
static mtp_status centroid_term(mtp__step *step, bool *wrote_dx)
{
    const int64_t m = step->head_rows;
    const mtp__param *centroids = step->drafter->centroids;
    const mtp_view x = mtp__first_rows(step->head_x, m), scores = mtp__first_rows(step->head_scores, m);
    const bool counts = step->config.head_mode == MTP_HEAD_HIERARCHICAL || step->config.centroid_weight != 0;
    const bool backward = step->mode == MTP__STEP_TRAIN && counts;
    mtp_xent_args xent = {.logits = scores,
                          .target = step->head_centroid,
                          .scale = step->head_centroid_scale,
                          .loss = mtp__first_rows(step->head_centroid_loss, m)};
    if (backward) xent.dlogits = scores;
    MTP_TRY(step->context->ops->xent(step->context->device, &xent));
    *wrote_dx = backward;
    if (!backward) return MTP_OK;
    MTP_TRY(mtp__step_linear_dw(step, scores, x, mtp__param_grad(centroids)));
    return mtp__step_linear_dx(step, scores, mtp__param_factor(centroids), mtp__first_rows(step->head_dx, m),
                               MTP_OVERWRITE);
}

/* The token term by the head mode, and the argmax of serving. */
static mtp_status token_term(mtp__step *step, bool accumulate_dx)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t m = step->head_rows;
    const bool ordered = step->drafter->config.ordered;
    mtp_head_args args = head_args(step, mtp__first_rows(step->head_x, m), m);
    args.target = step->head_target;
    args.argmax = mtp__first_rows(step->head_argmax, m);
    if (ordered) args.miss = mtp__first_rows(step->head_miss, m);
    if (ordered && step->config.head_mode != MTP_HEAD_MASKED) {
        MTP_TRY(ops->head_candidates(device, &args));
        args.argmax = args.miss = (mtp_view){0};
    }
    args.loss = mtp__first_rows(step->head_loss, m);
    if (step->mode == MTP__STEP_TRAIN) {
        args.scale = step->head_scale;
        args.dx = mtp__first_rows(step->head_dx, m);
        args.dx_write = accumulate_dx ? MTP_ACCUMULATE : MTP_OVERWRITE;
        args.de = mtp__param_grad(step->drafter->embed);
        args.de_write = MTP_ACCUMULATE;
    }
    switch (step->config.head_mode) {
    case MTP_HEAD_FLAT:
        return ops->head_flat(device, &args);
    case MTP_HEAD_MASKED:
        return ops->head_candidates(device, &args);
    case MTP_HEAD_HIERARCHICAL:
        return ops->head_hierarchical(device, &args);
    }
    return MTP_FAIL(MTP_E_INTERNAL, "head mode %d", (int)step->config.head_mode);
}

/* Sums of the head's rows. */
static mtp_status tally(mtp__step *step)
{
    const int64_t m = step->head_rows;
    const bool ordered = step->drafter->config.ordered;
    mtp_tally_args args = {.index = step->head_index,
                           .target = step->head_target,
                           .argmax = mtp__first_rows(step->head_argmax, m),
                           .loss = mtp__first_rows(step->head_loss, m),
                           .sums = step->sums,
                           .rows_per_step = step->num_rows,
                           .joined = step->config.head_mode == MTP_HEAD_HIERARCHICAL};
    if (ordered) args.centroid_loss = mtp__first_rows(step->head_centroid_loss, m);
    if (ordered) args.miss = mtp__first_rows(step->head_miss, m);
    return step->context->ops->tally(step->context->device, &args);
}

/* The rows' own results into the places of their (step, row) pairs. */
static mtp_status deliver(mtp__step *step, mtp__step_outputs *outputs)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t m = step->num_supervised, R = step->rows->num_rows;
    const bool ordered = step->drafter->config.ordered;
    const bool hierarchical = step->config.head_mode == MTP_HEAD_HIERARCHICAL;
    float *loss = step->host_floats, *centroid_loss = loss + m;
    uint8_t *miss = step->host_bytes;
    int64_t at = 0; /* in the order of chunk.c */

    memset(centroid_loss, 0, (size_t)m * sizeof *loss);
    memset(miss, 0, (size_t)m);
    MTP_TRY(ops->download(device, loss, step->head_loss.data, (size_t)m * sizeof *loss));
    if (ordered) MTP_TRY(ops->download(device, centroid_loss, step->head_centroid_loss.data, (size_t)m * sizeof *loss));
    if (ordered) MTP_TRY(ops->download(device, miss, step->head_miss.data, (size_t)m));
    for (int32_t k = 0; k < step->config.num_speculative_steps; k++)
        for (int64_t r = 0; r < step->own_rows; r++) {
            const int64_t i = k * R + step->first_row + r;
            if (!step->rows->supervised[i]) continue;
            if (outputs->loss) outputs->loss[i] = hierarchical ? loss[at] + centroid_loss[at] : loss[at];
            if (outputs->centroid_loss) outputs->centroid_loss[i] = hierarchical ? 0.0f : centroid_loss[at];
            if (outputs->miss) outputs->miss[i] = miss[at];
            at++;
        }
    return MTP_OK;
}

mtp_status mtp__step_losses(mtp__step *step)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t m = step->head_rows;
    bool wrote_dx = false;
    mtp_view dx = {0};
    if (step->mode == MTP__STEP_TRAIN) {
        dx = mtp__of_steps(step, step->dx, step->config.num_speculative_steps);
        MTP_TRY(ops->memory_zero(device, step->dx.data, (size_t)mtp_view_count(dx) * sizeof(float)));
    }
    if (m == 0) return MTP_OK;
    const mtp_gather_args gather = {.src = step->n, .index = step->head_index, .dst = mtp__first_rows(step->head_x, m)};
    MTP_TRY(ops->gather_rows(device, &gather));
    if (step->drafter->config.ordered) {
        MTP_TRY(select_centroids(step, gather.dst, m));
        MTP_TRY(centroid_term(step, &wrote_dx));
    }
    MTP_TRY(token_term(step, wrote_dx));
    if (step->mode == MTP__STEP_TRAIN) {
        const mtp_gather_args scatter = {
            .src = mtp__first_rows(step->head_dx, m), .index = step->head_index, .dst = dx, .write = MTP_OVERWRITE};
        MTP_TRY(ops->scatter_rows(device, &scatter));
    }
    MTP_TRY(tally(step));
    return step->outputs ? deliver(step, step->outputs) : MTP_OK;
}
