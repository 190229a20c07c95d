/* The memory of a step, in one place: what is taken here is all that a step ever uses. */
#include <stdlib.h>
#include <string.h>

#include "model/workspace.h"

static mtp_view matrix(mtp__arena *arena, const char *label, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = {rows, cols};
    return mtp__arena_view(arena, label, MTP_F32, 2, shape);
}

static mtp_view vector(mtp__arena *arena, const char *label, mtp_dtype dtype, int64_t n)
{
    return mtp__arena_view(arena, label, dtype, 1, &n);
}

static int64_t widest_heads(const mtp_drafter_config *config)
{
    int64_t head_dim = 0;
    for (int type = 0; type < MTP_LAYER_TYPES; type++)
        if (config->geometry[type].head_dim > head_dim) head_dim = config->geometry[type].head_dim;
    return config->num_heads * head_dim;
}

static void layout_layer(mtp__step *step, const mtp_drafter_config *config, mtp_layer_type type,
                         mtp__saved_layer *saved, mtp__arena *arena)
{
    static const char label[] = "activations";
    const int64_t Rc = step->Rc, H = config->hidden_size, NH = config->num_heads;
    const int64_t heads = NH * config->geometry[type].head_dim;
    saved->x_in = matrix(arena, label, Rc, H);
    saved->a = matrix(arena, label, Rc, H);
    saved->q_raw = matrix(arena, label, Rc, heads);
    saved->q = matrix(arena, label, Rc, heads);
    saved->o = matrix(arena, label, Rc, heads);
    saved->lse = matrix(arena, label, Rc, NH);
    saved->attention_out = matrix(arena, label, Rc, H);
    saved->x_mid = matrix(arena, label, Rc, H);
    saved->m = matrix(arena, label, Rc, H);
    saved->gate = matrix(arena, label, Rc, config->intermediate_size);
    saved->up = matrix(arena, label, Rc, config->intermediate_size);
    saved->mlp_out = matrix(arena, label, Rc, H);
    saved->rstd_in = vector(arena, label, MTP_F32, Rc);
    saved->rstd_post_attention = vector(arena, label, MTP_F32, Rc);
    saved->rstd_pre_feedforward = vector(arena, label, MTP_F32, Rc);
    saved->rstd_post_feedforward = vector(arena, label, MTP_F32, Rc);
    saved->rstd_q = vector(arena, label, MTP_F32, Rc * NH);
}

/* Evaluation keeps nothing: every layer of a type uses the first one's buffers, and one residual stream runs through.
 */
static void share_layers(const mtp_drafter_config *config, mtp__saved_draft *draft)
{
    const mtp__saved_layer *of_type[MTP_LAYER_TYPES] = {0};
    for (int64_t l = 0; l < config->num_layers; l++) {
        const mtp_layer_type type = config->layer_types[l];
        if (of_type[type])
            draft->layers[l] = *of_type[type];
        else
            of_type[type] = &draft->layers[l];
        draft->layers[l].x_in = draft->layers[l].x_mid = draft->x_out;
    }
}

static void layout_draft(mtp__step *step, const mtp_drafter_config *config, mtp__saved_draft *draft, mtp__arena *arena)
{
    static const char label[] = "activations";
    draft->embedding = matrix(arena, label, step->Rc, config->backbone_hidden_size);
    draft->state = matrix(arena, label, step->Rc, config->backbone_hidden_size);
    draft->x_out = matrix(arena, label, step->Rc, config->hidden_size);
    draft->rstd_final = vector(arena, label, MTP_F32, step->Rc);
    bool seen[MTP_LAYER_TYPES] = {false};
    for (int64_t l = 0; l < config->num_layers; l++) {
        const mtp_layer_type type = config->layer_types[l];
        if (step->mode == MTP__STEP_EVALUATE && seen[type]) continue;
        seen[type] = true;
        layout_layer(step, config, type, &draft->layers[l], arena);
    }
    if (step->mode == MTP__STEP_EVALUATE) share_layers(config, draft);
}

static void layout_head(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "head";
    const int64_t Mc = step->config.num_speculative_steps * step->Rc, H = config->hidden_size;
    step->head_index = vector(arena, label, MTP_I32, Mc);
    step->head_target = vector(arena, label, MTP_I32, Mc);
    step->head_centroid = vector(arena, label, MTP_I32, Mc);
    step->head_scale = vector(arena, label, MTP_F32, Mc);
    step->head_centroid_scale = vector(arena, label, MTP_F32, Mc);
    step->head_loss = vector(arena, label, MTP_F32, Mc);
    step->head_centroid_loss = vector(arena, label, MTP_F32, Mc);
    step->head_argmax = vector(arena, label, MTP_I32, Mc);
    step->head_miss = vector(arena, label, MTP_U8, Mc);
    step->head_x = matrix(arena, label, Mc, H);
    if (step->mode == MTP__STEP_TRAIN) step->head_dx = matrix(arena, label, Mc, H);
    if (!config->ordered) return;
    const int64_t selected[2] = {Mc, config->centroid_top_k};
    step->head_scores = matrix(arena, label, Mc, config->num_centroids);
    step->head_selected = mtp__arena_view(arena, label, MTP_I32, 2, selected);
}

static void layout_gradients(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "activation gradients";
    const int64_t Rc = step->Rc, H = config->hidden_size;
    step->dn = matrix(arena, label, step->config.num_speculative_steps * Rc, H);
    step->dx = matrix(arena, label, Rc, H);
    step->dbranch = matrix(arena, label, Rc, H);
    step->dm = matrix(arena, label, Rc, H);
    /* attention and MLP take turns in the wide buffer */
    const int64_t heads = widest_heads(config), I = config->intermediate_size;
    const mtp_view wide = matrix(arena, label, Rc, heads > I ? heads : I);
    step->dheads = mtp_view_2d(wide.data, MTP_F32, Rc, heads);
    step->dact = mtp_view_2d(wide.data, MTP_F32, Rc, I);
    step->dup = matrix(arena, label, Rc, config->intermediate_size);
}

/* ---- scratch: the most that any op asks for at these shapes ---------------------------------------------------- */

static void most(size_t *largest, size_t bytes)
{
    if (bytes > *largest) *largest = bytes;
}

static size_t linear_scratch(const mtp__step *step, int64_t rows, int64_t in, int64_t out)
{
    const mtp_backend *ops = step->context->ops;
    const mtp_linear_args args = {.x = mtp_view_2d(NULL, MTP_F32, rows, in),
                                  .w = mtp_view_2d(NULL, MTP_F32, out, in),
                                  .y = mtp_view_2d(NULL, MTP_F32, rows, out)};
    size_t bytes = ops->linear_fwd_scratch(step->context->device, &args);
    if (step->mode == MTP__STEP_TRAIN) {
        most(&bytes, ops->linear_dx_scratch(step->context->device, &args));
        most(&bytes, ops->linear_dw_scratch(step->context->device, &args));
    }
    return bytes;
}

static size_t norm_scratch(const mtp__step *step, int64_t rows, int64_t width)
{
    const mtp_backend *ops = step->context->ops;
    const mtp_view x = mtp_view_2d(NULL, MTP_F32, rows, width), w = mtp_view_1d(NULL, MTP_F32, width);
    const mtp_view rstd = mtp_view_1d(NULL, MTP_F32, rows), one = mtp_view_1d(NULL, MTP_F32, 1);
    const mtp_rmsnorm_args norm = {.x = x, .w = w, .y = x, .rstd = rstd, .dy = x, .dx = x, .dw = w};
    const mtp_residual_norm_args residual = {.residual = x,
                                             .x = x,
                                             .w = w,
                                             .scalar = one,
                                             .y = x,
                                             .rstd = rstd,
                                             .dy = x,
                                             .dresidual = x,
                                             .dx = x,
                                             .dw = w,
                                             .dscalar = one};
    size_t bytes = ops->rmsnorm_bwd_scratch(step->context->device, &norm);
    most(&bytes, ops->residual_norm_bwd_scratch(step->context->device, &residual));
    return bytes;
}

static size_t attention_scratch(const mtp__step *step, const mtp_drafter_config *config, mtp_layer_type type)
{
    const mtp_backend *ops = step->context->ops;
    const int64_t Rc = step->Rc, NH = config->num_heads, D = config->geometry[type].head_dim;
    const mtp_view q = mtp_view_3d(NULL, MTP_F32, Rc, NH, D), index = mtp_view_1d(NULL, MTP_I32, Rc);
    const mtp_attention_args args = {.q = q,
                                     .kv = mtp_view_4d(NULL, MTP_BF16, 1, 2, config->geometry[type].num_kv_heads, D),
                                     .key_begin = index,
                                     .key_end = index,
                                     .doc_begin = index,
                                     .o = q,
                                     .lse = mtp_view_2d(NULL, MTP_F32, Rc, NH),
                                     .do_ = q,
                                     .dq = q};
    size_t bytes = ops->attention_fwd_scratch(step->context->device, &args);
    if (step->mode == MTP__STEP_TRAIN) most(&bytes, ops->attention_bwd_scratch(step->context->device, &args));
    return bytes;
}

static size_t head_scratch(const mtp__step *step, const mtp_drafter_config *config)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t Mc = step->config.num_speculative_steps * step->Rc, V = config->vocab_size, H = config->hidden_size;
    const mtp_view index = mtp_view_1d(NULL, MTP_I32, Mc), number = mtp_view_1d(NULL, MTP_F32, Mc);
    const mtp_view x = mtp_view_2d(NULL, MTP_F32, Mc, H);
    mtp_head_args args = {.x = x,
                          .e = mtp_view_2d(NULL, MTP_F32, V, H),
                          .target = index,
                          .scale = number,
                          .loss = number,
                          .argmax = index,
                          .logits_budget = step->config.logits_budget};
    if (step->mode == MTP__STEP_TRAIN) args.dx = x, args.de = args.e;
    size_t bytes = 0;
    if (step->config.head_mode == MTP_HEAD_FLAT) most(&bytes, ops->head_flat_scratch(device, &args));
    if (!config->ordered) return bytes;
    args.order = mtp_view_2d(NULL, MTP_I32, config->num_centroids, V / config->num_centroids);
    args.slot_of = mtp_view_1d(NULL, MTP_I32, V);
    args.selected = mtp_view_2d(NULL, MTP_I32, Mc, config->centroid_top_k);
    most(&bytes, ops->head_candidates_scratch(device, &args)); /* the argmax of serving, in every mode */
    if (step->config.head_mode == MTP_HEAD_HIERARCHICAL) most(&bytes, ops->head_hierarchical_scratch(device, &args));
    const mtp_topk_args topk = {.scores = mtp_view_2d(NULL, MTP_F32, Mc, config->num_centroids),
                                .selected = args.selected};
    most(&bytes, ops->topk_scratch(device, &topk));
    most(&bytes, linear_scratch(step, Mc, H, config->num_centroids));
    return bytes;
}

static size_t largest_scratch(const mtp__step *step, const mtp_drafter_config *config)
{
    const int64_t Rc = step->Rc, H = config->hidden_size, Hb = config->backbone_hidden_size;
    size_t bytes = head_scratch(step, config);
    most(&bytes, linear_scratch(step, Rc, Hb, H));
    most(&bytes, linear_scratch(step, Rc, H, Hb));
    most(&bytes, linear_scratch(step, Rc, H, config->intermediate_size));
    most(&bytes, linear_scratch(step, Rc, config->intermediate_size, H));
    if (step->mode == MTP__STEP_TRAIN) most(&bytes, norm_scratch(step, Rc, H));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t D = config->geometry[type].head_dim;
        if (D == 0) continue;
        most(&bytes, linear_scratch(step, Rc, H, config->num_heads * D));
        most(&bytes, linear_scratch(step, Rc, config->num_heads * D, H));
        if (step->mode == MTP__STEP_TRAIN) most(&bytes, norm_scratch(step, Rc * config->num_heads, D));
        most(&bytes, attention_scratch(step, config, (mtp_layer_type)type));
    }
    return bytes;
}

mtp_status mtp__step_layout(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    const int32_t K = step->config.num_speculative_steps;
    const int64_t Rc = step->Rc;
    static const char rows_label[] = "row indices and rotary tables";

    step->tokens = vector(arena, rows_label, MTP_I32, Rc);
    step->places = vector(arena, rows_label, MTP_I32, Rc);
    step->positions = vector(arena, rows_label, MTP_I32, Rc);
    step->doc_begin = vector(arena, rows_label, MTP_I32, Rc);
    step->key_end = vector(arena, rows_label, MTP_I32, Rc);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        step->key_begin[type] = vector(arena, rows_label, MTP_I32, Rc);
        if (config->geometry[type].head_dim == 0) continue;
        step->cos[type] = matrix(arena, rows_label, Rc, config->geometry[type].head_dim / 2);
        step->sin[type] = matrix(arena, rows_label, Rc, config->geometry[type].head_dim / 2);
    }
    mtp__stage_layout(&step->stage, step->context, Rc, config->backbone_hidden_size, arena);
    step->act = matrix(arena, "activations", Rc, config->intermediate_size);
    step->n = matrix(arena, "activations", K * Rc, config->hidden_size);
    for (int32_t k = 0; k < K; k++) {
        mtp__saved_draft *draft = &step->drafts[k];
        if (k == 0 || step->mode == MTP__STEP_TRAIN) {
            layout_draft(step, config, draft, arena);
        } else { /* the buffers of step 0; the layer array stays this step's own */
            mtp__saved_layer *layers = draft->layers;
            memcpy(layers, step->drafts[0].layers, (size_t)config->num_layers * sizeof *layers);
            *draft = step->drafts[0];
            draft->layers = layers;
        }
        draft->n = mtp_view_rows(step->n, k * Rc, Rc);
    }
    step->dstate = matrix(arena, "activation gradients", Rc, config->backbone_hidden_size);
    if (step->mode == MTP__STEP_TRAIN) layout_gradients(step, config, arena);
    layout_head(step, config, arena);
    step->scratch.size = largest_scratch(step, config);
    step->scratch.data = mtp__arena_take(arena, "kernel scratch", step->scratch.size);
    return arena->failure;
}
