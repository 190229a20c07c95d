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

static mtp_status residual_norm(mtp__step *step, mtp_view residual, mtp_view x, const mtp__param *w,
                                const mtp__param *scalar, mtp_view y, mtp_view rstd)
{
    const mtp_residual_norm_args args = {.residual = residual,
                                         .x = x,
                                         .w = mtp__param_value(w),
                                         .scalar = scalar ? mtp__param_value(scalar) : (mtp_view){0},
                                         .y = y,
                                         .rstd = rstd,
                                         .eps = (float)step->drafter->config.rms_norm_eps};
    return step->context->ops->residual_norm_fwd(step->context->device, &args);
}

static mtp_status attention_branch(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;

    MTP_TRY(rmsnorm(step, saved->x_in, layer->input_norm, saved->a, saved->rstd_in));
    MTP_TRY(mtp__step_linear_fwd(step, saved->a, mtp__param_value(layer->q_proj), saved->q_raw, MTP_OVERWRITE));
    MTP_TRY(rmsnorm(step, mtp__as_head_rows(saved->q_raw, NH), layer->q_norm, mtp__as_head_rows(saved->q, NH),
                    mtp__flat(saved->rstd_q)));
    const mtp_view q = mtp__as_heads(saved->q, NH);
    const mtp_rope_args rope = {.x = q,
                                .cos = mtp__first_rows(step->cos[layer->type], rows),
                                .sin = mtp__first_rows(step->sin[layer->type], rows),
                                .y = q};
    MTP_TRY(ops->rope_fwd(device, &rope));
    const mtp_attention_args attention = {.q = q,
                                          .kv = step->kv[layer->type],
                                          .key_begin = mtp__first_rows(step->key_begin[layer->type], rows),
                                          .key_end = mtp__first_rows(step->key_end, rows),
                                          .doc_begin = mtp__first_rows(step->doc_begin, rows),
                                          .o = mtp__as_heads(saved->o, NH),
                                          .lse = saved->lse,
                                          .scratch = step->scratch};
    MTP_TRY(ops->attention_fwd(device, &attention));
    MTP_TRY(mtp__step_linear_fwd(step, saved->o, mtp__param_value(layer->o_proj), saved->attention_out, MTP_OVERWRITE));
    return residual_norm(step, saved->x_in, saved->attention_out, layer->post_attention_norm, NULL, saved->x_mid,
                         saved->rstd_post_attention);
}

static mtp_status mlp_branch(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved, mtp_view y)
{
    MTP_TRY(rmsnorm(step, saved->x_mid, layer->pre_feedforward_norm, saved->m, saved->rstd_pre_feedforward));
    MTP_TRY(mtp__step_linear_fwd(step, saved->m, mtp__param_value(layer->gate_proj), saved->gate, MTP_OVERWRITE));
    MTP_TRY(mtp__step_linear_fwd(step, saved->m, mtp__param_value(layer->up_proj), saved->up, MTP_OVERWRITE));
    const mtp_geglu_args geglu = {.gate = saved->gate, .up = saved->up, .y = saved->act};
    MTP_TRY(step->context->ops->geglu_fwd(step->context->device, &geglu));
    MTP_TRY(mtp__step_linear_fwd(step, saved->act, mtp__param_value(layer->down_proj), saved->mlp_out, MTP_OVERWRITE));
    return residual_norm(step, saved->x_mid, saved->mlp_out, layer->post_feedforward_norm, layer->layer_scalar, y,
                         saved->rstd_post_feedforward);
}

/* ---- a chunk ---------------------------------------------------------------------------------------------------- */

static mtp_status upload_ids(mtp__step *step, mtp_view to, const int32_t *ids, int64_t count)
{
    return step->context->ops->upload(step->context->device, to.data, ids, (size_t)count * sizeof *ids);
}

/* Positions, key ranges and rotary tables of the chunk's rows. */
static mtp_status upload_rows(mtp__step *step)
{
    const mtp__rows *rows = step->rows;
    const int64_t first = step->first_row, count = step->num_rows;
    int32_t *ids = step->host_ids;

    MTP_TRY(upload_ids(step, step->places, rows->place + first, count));
    MTP_TRY(upload_ids(step, step->doc_begin, rows->doc_begin + first, count));
    for (int64_t r = 0; r < count; r++) ids[r] = rows->place[first + r] + 1;
    MTP_TRY(upload_ids(step, step->key_end, ids, count));
    for (int64_t r = 0; r < count; r++) ids[r] = rows->position[first + r] + step->config.position_offset;
    MTP_TRY(upload_ids(step, step->positions, ids, count));
    MTP_TRY(upload_ids(step, step->key_begin[MTP_LAYER_FULL], rows->doc_begin + first, count));
    const int64_t window = step->drafter->config.sliding_window;
    for (int64_t r = 0; r < count; r++) {
        const int64_t begin = rows->place[first + r] - window + 1, document = rows->doc_begin[first + r];
        ids[r] = (int32_t)(begin > document ? begin : document);
    }
    MTP_TRY(upload_ids(step, step->key_begin[MTP_LAYER_SLIDING], ids, count));

    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (!step->drafter->inv_freq[type]) continue;
        const mtp_rope_table_args table = {
            .positions = mtp__first_rows(step->positions, count),
            .inv_freq = mtp_view_1d(step->drafter->inv_freq[type], MTP_F32, step->cos[type].shape[1]),
            .cos = mtp__first_rows(step->cos[type], count),
            .sin = mtp__first_rows(step->sin[type], count)};
        MTP_TRY(step->context->ops->rope_table(step->context->device, &table));
    }
    return MTP_OK;
}

/* `embedding` = scaled embeddings of ids[0..count), which are in `ids_device` as well; `half` = their product with the
 * left half of the pre-projection. */
static mtp_status embed(mtp__step *step, const int32_t *ids, mtp_view ids_device, int64_t count, mtp_view embedding,
                        mtp_view half)
{
    const int64_t Hb = step->drafter->config.backbone_hidden_size;
    mtp_embed_args args = {
        .table = step->device_table, .ids = mtp__first_rows(ids_device, count), .y = mtp__first_rows(embedding, count)};
    if (!step->device_table.data)
        MTP_TRY(mtp__stage_rows(&step->stage, step->table, ids, args.ids, count, &args.table, &args.ids));
    MTP_TRY(step->context->ops->embed_fwd(step->context->device, &args));
    return mtp__step_linear_fwd(step, args.y, mtp_view_cols(mtp__param_value(step->drafter->pre_projection), 0, Hb),
                                mtp__first_rows(half, count), MTP_OVERWRITE);
}

/* The tokens that the chunk is fed with from the data, for all draft steps. */
static mtp_status embed_tokens(mtp__step *step)
{
    const mtp__tokens *tokens = &step->tokens;
    MTP_TRY(upload_ids(step, step->entry_of, tokens->entry_of, tokens->K * tokens->max_rows));
    if (step->mode == MTP__STEP_TRAIN)
        MTP_TRY(upload_ids(step, step->taken_by, tokens->taken_by, tokens->K * tokens->capacity));
    if (tokens->count == 0) return MTP_OK;
    MTP_TRY(upload_ids(step, step->token_ids, tokens->ids, tokens->count));
    return embed(step, tokens->ids, step->token_ids, tokens->count, step->embedding, step->token_half);
}

mtp_status mtp__step_begin_chunk(mtp__step *step, int64_t first)
{
    const mtp__rows *rows = step->rows;
    const int64_t rest = rows->num_rows - first;
    const bool from_data = step->config.feeding == MTP_FEED_TEACHER;
    step->first_row = first;
    step->num_rows = rest < step->Rc ? rest : step->Rc;
    if (from_data) mtp__tokens_build(&step->tokens, rows, first, &step->num_rows);
    step->last_chunk = first + step->num_rows == rows->num_rows;

    MTP_TRY(upload_rows(step));
    const int64_t count = step->num_rows;
    const mtp_view hidden = step->batch->hidden_states;
    mtp_gather_args gather = {.dst = mtp__first_rows(step->state, count)};
    MTP_TRY(mtp__stage_rows(
        &step->stage, mtp_view_2d(hidden.data, hidden.dtype, hidden.shape[0] * hidden.shape[1], hidden.shape[2]),
        rows->place + first, mtp__first_rows(step->places, count), count, &gather.src, &gather.index));
    MTP_TRY(step->context->ops->gather_rows(step->context->device, &gather));
    return from_data ? embed_tokens(step) : MTP_OK;
}

/* ---- a draft step ------------------------------------------------------------------------------------------------ */

/* x0 = Wpre [scale E[token] ; state]. A step that does not exist has no token half. */
static mtp_status pre_projection(mtp__step *step, int32_t k, mtp_view x0)
{
    const int64_t rows = step->num_rows, Hb = step->drafter->config.backbone_hidden_size;
    if (step->config.feeding == MTP_FEED_SELF) {
        MTP_TRY(upload_ids(step, step->token_ids, step->host_ids, rows));
        MTP_TRY(embed(step, step->host_ids, step->token_ids, rows, mtp__of_step(step, step->embedding, k), x0));
    } else {
        const mtp_gather_args gather = {
            .src = step->token_half, .index = mtp_view_rows(step->entry_of, k * step->Rc, rows), .dst = x0};
        MTP_TRY(step->context->ops->gather_rows(step->context->device, &gather));
    }
    return mtp__step_linear_fwd(step, mtp__of_step(step, step->state, k),
                                mtp_view_cols(mtp__param_value(step->drafter->pre_projection), Hb, Hb), x0,
                                MTP_ACCUMULATE);
}

mtp_status mtp__step_forward(mtp__step *step, int32_t k)
{
    const mtp_drafter *drafter = step->drafter;
    const mtp_view x_out = mtp__of_step(step, step->x_out, k);
    mtp__saved_layer saved = mtp__layer_of_step(step, 0, k);
    MTP_TRY(pre_projection(step, k, saved.x_in));
    for (int64_t l = 0; l < drafter->config.num_layers; l++) {
        const bool last = l + 1 == drafter->config.num_layers;
        const mtp__saved_layer above = last ? (mtp__saved_layer){.x_in = x_out} : mtp__layer_of_step(step, l + 1, k);
        MTP_TRY(attention_branch(step, &drafter->layers[l], &saved));
        MTP_TRY(mlp_branch(step, &drafter->layers[l], &saved, above.x_in));
        saved = above;
    }
    return rmsnorm(step, x_out, drafter->final_norm, mtp__step_n(step, k), mtp__of_step(step, step->rstd_final, k));
}

mtp_status mtp__step_project_state(mtp__step *step, int32_t k, mtp_view state)
{
    return mtp__step_linear_fwd(step, mtp__step_n(step, k), mtp__param_value(step->drafter->post_projection), state,
                                MTP_OVERWRITE);
}
