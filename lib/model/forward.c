/* The forward pass of one draft step, op by op as the reference runs it (transformers, modeling_gemma4_assistant):
 *
 *   x = Wpre [scale E[token] ; state]
 *   each layer: a = RMS(x; w_in); q = RoPE(RMS_head(Wq a; w_qn)); o = attention(q, K, V of the layer's type)
 *               x = x + RMS(Wo o; w_pa); m = RMS(x; w_pf); m = Wd (gelu(Wg m) * (Wu m))
 *               x = layer_scalar * (x + RMS(m; w_pof))
 *   n = RMS(x; w_final); state' = Wpost n */
#include "base/error.h"
#include "model/workspace.h"

mtp_status mtp__step_linear_fwd(mtp__step *step, mtp_view x, mtp_view w, mtp_view y, mtp_write write)
{
    const mtp_linear_args args = {.x = x, .w = w, .y = y, .write = write, .scratch = step->scratch};
    return step->context->ops->linear_fwd(step->context->device, &args);
}

static mtp_status rmsnorm(mtp__step *step, mtp_view x, const mtp__param *w, mtp_view y, mtp_view rstd)
{
    const mtp_rmsnorm_args args = {
        .x = x, .w = mtp__param_value(w), .y = y, .rstd = rstd, .eps = (float)step->drafter->config.rms_norm_eps};
    return step->context->ops->rmsnorm_fwd(step->context->device, &args);
}

/* A norm that reads the result of a post-norm, and is computed with it. */
typedef struct next_norm {
    const mtp__param *w;
    mtp_view y, rstd;
} next_norm;

static mtp_status residual_norm(mtp__step *step, mtp_view residual, mtp_view x, const mtp__param *w,
                                const mtp__param *scalar, mtp_view y, mtp_view rstd, next_norm next)
{
    const mtp_residual_norm_args args = {.residual = residual,
                                         .x = x,
                                         .w = mtp__param_value(w),
                                         .scalar = scalar ? mtp__param_value(scalar) : (mtp_view){0},
                                         .y = y,
                                         .rstd = rstd,
                                         .eps = (float)step->drafter->config.rms_norm_eps,
                                         .next_w = mtp__param_value(next.w),
                                         .next_y = next.y,
                                         .next_rstd = next.rstd};
    return step->context->ops->residual_norm_fwd(step->context->device, &args);
}

/* q = RoPE(RMSNorm(q_raw)), head by head. */
static mtp_status norm_heads(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved)
{
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;
    const mtp_rmsnorm_args args = {.x = mtp__as_head_rows(saved->q_raw, NH),
                                   .w = mtp__param_value(layer->q_norm),
                                   .y = mtp__as_head_rows(saved->q, NH),
                                   .rstd = mtp__flat(saved->rstd_q),
                                   .eps = (float)step->drafter->config.rms_norm_eps,
                                   .cos = mtp__first_rows(step->cos[layer->type], rows),
                                   .sin = mtp__first_rows(step->sin[layer->type], rows)};
    return step->context->ops->rmsnorm_fwd(step->context->device, &args);
}

/* From a, the branch's input, to x_mid and m, the next branch's input. */
static mtp_status attention_branch(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t NH = step->drafter->config.num_heads;

    MTP_TRY(mtp__step_linear_fwd(step, saved->a, mtp__param_factor(layer->q_proj), saved->q_raw, MTP_OVERWRITE));
    MTP_TRY(norm_heads(step, layer, saved));
    const mtp_attention_args attention = {.q = mtp__as_heads(saved->q, NH),
                                          .kv = step->kv[layer->type],
                                          .key_begin = step->key_begin[layer->type],
                                          .key_end = step->key_end,
                                          .doc_begin = step->doc_begin,
                                          .o = mtp__as_heads(saved->o, NH),
                                          .lse = saved->lse,
                                          .scratch = step->scratch};
    MTP_TRY(ops->attention_fwd(device, &attention));
    MTP_TRY(
        mtp__step_linear_fwd(step, saved->o, mtp__param_factor(layer->o_proj), saved->attention_out, MTP_OVERWRITE));
    return residual_norm(step, saved->x_in, saved->attention_out, layer->post_attention_norm, NULL, saved->x_mid,
                         saved->rstd_post_attention,
                         (next_norm){layer->pre_feedforward_norm, saved->m, saved->rstd_pre_feedforward});
}

/* One product where the two weights lie together. */
static mtp_status gate_and_up(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved)
{
    const mtp_view gate_w = mtp__param_factor(layer->gate_proj), up_w = mtp__param_factor(layer->up_proj);
    const mtp_view both = mtp__joined(gate_w, up_w);
    if (both.data) return mtp__step_linear_fwd(step, saved->m, both, saved->gate_up, MTP_OVERWRITE);
    MTP_TRY(mtp__step_linear_fwd(step, saved->m, gate_w, mtp__gate_of(saved->gate_up), MTP_OVERWRITE));
    return mtp__step_linear_fwd(step, saved->m, up_w, mtp__up_of(saved->gate_up), MTP_OVERWRITE);
}

/* From m to y, the next layer's x_in, and what is next to that. */
static mtp_status mlp_branch(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved, mtp_view y,
                             next_norm next)
{
    MTP_TRY(gate_and_up(step, layer, saved));
    const mtp_geglu_args geglu = {
        .gate = mtp__gate_of(saved->gate_up), .up = mtp__up_of(saved->gate_up), .y = saved->act};
    MTP_TRY(step->context->ops->geglu_fwd(step->context->device, &geglu));
    MTP_TRY(mtp__step_linear_fwd(step, saved->act, mtp__param_factor(layer->down_proj), saved->mlp_out, MTP_OVERWRITE));
    return residual_norm(step, saved->x_mid, saved->mlp_out, layer->post_feedforward_norm, layer->layer_scalar, y,
                         saved->rstd_post_feedforward, next);
}

/* ---- a chunk ---------------------------------------------------------------------------------------------------- */

/* Scaled embeddings of step->token_ids, and `half`, their product with the left half of the pre-projection. */
static mtp_status embed(mtp__step *step, mtp_view embedding, mtp_view half)
{
    const int64_t Hb = step->drafter->config.backbone_hidden_size;
    const mtp_embed_args args = {.table = step->embed_table, .ids = step->token_ids, .y = embedding};
    MTP_TRY(step->context->ops->embed_fwd(step->context->device, &args));
    return mtp__step_linear_fwd(step, embedding, mtp_view_cols(mtp__param_factor(step->drafter->pre_projection), 0, Hb),
                                half, MTP_OVERWRITE);
}

mtp_status mtp__step_prepare(mtp__step *step)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t rows = step->num_rows;
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (!step->drafter->inv_freq[type]) continue;
        const mtp_rope_table_args table = {
            .positions = step->positions,
            .inv_freq = mtp_view_1d(step->drafter->inv_freq[type], MTP_F32, step->cos[type].shape[1]),
            .cos = mtp__first_rows(step->cos[type], rows),
            .sin = mtp__first_rows(step->sin[type], rows)};
        MTP_TRY(ops->rope_table(device, &table));
    }
    const mtp_gather_args gather = {
        .src = step->hidden, .index = step->places, .dst = mtp__first_rows(step->state, rows)};
    MTP_TRY(ops->gather_rows(device, &gather));
    if (step->config.feeding == MTP_FEED_SELF || step->num_tokens == 0) return MTP_OK;
    return embed(step, mtp__first_rows(step->embedding, step->num_tokens),
                 mtp__first_rows(step->token_half, step->num_tokens));
}

/* ---- a draft step ------------------------------------------------------------------------------------------------ */

/* x0 = Wpre [scale E[token] ; state]. A step that does not exist has no token half. */
static mtp_status pre_projection(mtp__step *step, int32_t k, mtp_view x0)
{
    const int64_t rows = step->num_rows, Hb = step->drafter->config.backbone_hidden_size;
    if (step->config.feeding == MTP_FEED_SELF) {
        MTP_TRY(embed(step, mtp__of_step(step, step->embedding, k), x0));
    } else {
        const mtp_gather_args gather = {
            .src = step->token_half, .index = mtp_view_rows(step->entry_of, k * rows, rows), .dst = x0};
        MTP_TRY(step->context->ops->gather_rows(step->context->device, &gather));
    }
    return mtp__step_linear_fwd(step, mtp__of_step(step, step->state, k),
                                mtp_view_cols(mtp__param_factor(step->drafter->pre_projection), Hb, Hb), x0,
                                MTP_ACCUMULATE);
}

mtp_status mtp__step_forward(mtp__step *step, int32_t k)
{
    const mtp_drafter *drafter = step->drafter;
    const mtp__saved_layer end = {.x_in = mtp__of_step(step, step->x_out, k),
                                  .a = mtp__step_n(step, k),
                                  .rstd_in = mtp__of_step(step, step->rstd_final, k)};
    mtp__saved_layer saved = mtp__layer_of_step(step, 0, k);
    MTP_TRY(pre_projection(step, k, saved.x_in));
    MTP_TRY(rmsnorm(step, saved.x_in, drafter->layers[0].input_norm, saved.a, saved.rstd_in));
    for (int64_t l = 0; l < drafter->config.num_layers; l++) {
        const bool last = l + 1 == drafter->config.num_layers;
        const mtp__saved_layer above = last ? end : mtp__layer_of_step(step, l + 1, k);
        const next_norm next = {last ? drafter->final_norm : drafter->layers[l + 1].input_norm, above.a, above.rstd_in};
        MTP_TRY(attention_branch(step, &drafter->layers[l], &saved));
        MTP_TRY(mlp_branch(step, &drafter->layers[l], &saved, above.x_in, next));
        saved = above;
    }
    return MTP_OK;
}

mtp_status mtp__step_project_state(mtp__step *step, int32_t k, mtp_view state)
{
    return mtp__step_linear_fwd(step, mtp__step_n(step, k), mtp__param_factor(step->drafter->post_projection), state,
                                MTP_OVERWRITE);
}
