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

static mtp_status attention_branch(mtp__step *step, const mtp__layer *layer, mtp__saved_layer *saved)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;
    const mtp_view q_raw = mtp__first_rows(saved->q_raw, rows);

    MTP_TRY(rmsnorm(step, mtp__first_rows(saved->x_in, rows), layer->input_norm, mtp__first_rows(saved->a, rows),
                    mtp__first_rows(saved->rstd_in, rows)));
    MTP_TRY(mtp__step_linear_fwd(step, mtp__first_rows(saved->a, rows), mtp__param_value(layer->q_proj), q_raw,
                                 MTP_OVERWRITE));
    MTP_TRY(rmsnorm(step, mtp__as_head_rows(saved->q_raw, rows, NH), layer->q_norm,
                    mtp__as_head_rows(saved->q, rows, NH), mtp__first_rows(saved->rstd_q, rows * NH)));
    const mtp_view q = mtp__as_heads(saved->q, rows, NH);
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
                                          .o = mtp__as_heads(saved->o, rows, NH),
                                          .lse = mtp__first_rows(saved->lse, rows),
                                          .scratch = step->scratch};
    MTP_TRY(ops->attention_fwd(device, &attention));
    MTP_TRY(mtp__step_linear_fwd(step, mtp__first_rows(saved->o, rows), mtp__param_value(layer->o_proj),
                                 mtp__first_rows(saved->attention_out, rows), MTP_OVERWRITE));
    return residual_norm(step, mtp__first_rows(saved->x_in, rows), mtp__first_rows(saved->attention_out, rows),
                         layer->post_attention_norm, NULL, mtp__first_rows(saved->x_mid, rows),
                         mtp__first_rows(saved->rstd_post_attention, rows));
}

static mtp_status mlp_branch(mtp__step *step, const mtp__layer *layer, mtp__saved_layer *saved, mtp_view y)
{
    const int64_t rows = step->num_rows;
    const mtp_view m = mtp__first_rows(saved->m, rows), act = mtp__first_rows(step->act, rows);
    const mtp_view gate = mtp__first_rows(saved->gate, rows), up = mtp__first_rows(saved->up, rows);

    MTP_TRY(rmsnorm(step, mtp__first_rows(saved->x_mid, rows), layer->pre_feedforward_norm, m,
                    mtp__first_rows(saved->rstd_pre_feedforward, rows)));
    MTP_TRY(mtp__step_linear_fwd(step, m, mtp__param_value(layer->gate_proj), gate, MTP_OVERWRITE));
    MTP_TRY(mtp__step_linear_fwd(step, m, mtp__param_value(layer->up_proj), up, MTP_OVERWRITE));
    const mtp_geglu_args geglu = {.gate = gate, .up = up, .y = act};
    MTP_TRY(step->context->ops->geglu_fwd(step->context->device, &geglu));
    MTP_TRY(mtp__step_linear_fwd(step, act, mtp__param_value(layer->down_proj), mtp__first_rows(saved->mlp_out, rows),
                                 MTP_OVERWRITE));
    return residual_norm(step, mtp__first_rows(saved->x_mid, rows), mtp__first_rows(saved->mlp_out, rows),
                         layer->post_feedforward_norm, layer->layer_scalar, mtp__first_rows(y, rows),
                         mtp__first_rows(saved->rstd_post_feedforward, rows));
}

mtp_status mtp__step_begin_chunk(mtp__step *step)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const mtp__rows *rows = step->rows;
    const int64_t first = step->first_row, count = step->num_rows;
    const size_t bytes = (size_t)count * sizeof(int32_t);
    int32_t *ids = step->host_ids;

    MTP_TRY(ops->upload(device, step->places.data, rows->place + first, bytes));
    MTP_TRY(ops->upload(device, step->doc_begin.data, rows->doc_begin + first, bytes));
    for (int64_t r = 0; r < count; r++) ids[r] = rows->place[first + r] + 1;
    MTP_TRY(ops->upload(device, step->key_end.data, ids, bytes));
    for (int64_t r = 0; r < count; r++) ids[r] = rows->position[first + r] + step->config.position_offset;
    MTP_TRY(ops->upload(device, step->positions.data, ids, bytes));
    MTP_TRY(ops->upload(device, step->key_begin[MTP_LAYER_FULL].data, rows->doc_begin + first, bytes));
    const int64_t window = step->drafter->config.sliding_window;
    for (int64_t r = 0; r < count; r++) {
        const int64_t begin = rows->place[first + r] - window + 1, document = rows->doc_begin[first + r];
        ids[r] = (int32_t)(begin > document ? begin : document);
    }
    MTP_TRY(ops->upload(device, step->key_begin[MTP_LAYER_SLIDING].data, ids, bytes));

    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (!step->drafter->inv_freq[type]) continue;
        const mtp_rope_table_args table = {
            .positions = mtp__first_rows(step->positions, count),
            .inv_freq = mtp_view_1d(step->drafter->inv_freq[type], MTP_F32, step->cos[type].shape[1]),
            .cos = mtp__first_rows(step->cos[type], count),
            .sin = mtp__first_rows(step->sin[type], count)};
        MTP_TRY(ops->rope_table(device, &table));
    }
    const mtp_view hidden = step->batch->hidden_states;
    mtp_gather_args gather = {.dst = mtp__first_rows(step->drafts[0].state, count)};
    MTP_TRY(mtp__stage_rows(
        &step->stage, mtp_view_2d(hidden.data, hidden.dtype, hidden.shape[0] * hidden.shape[1], hidden.shape[2]),
        rows->place + first, mtp__first_rows(step->places, count), count, &gather.src, &gather.index));
    return ops->gather_rows(device, &gather);
}

mtp_status mtp__step_forward(mtp__step *step, int32_t k)
{
    const mtp_drafter *drafter = step->drafter;
    mtp__saved_draft *draft = &step->drafts[k];
    const int64_t rows = step->num_rows, Hb = drafter->config.backbone_hidden_size;
    const int64_t num_layers = drafter->config.num_layers;
    const mtp_view embedding = mtp__first_rows(draft->embedding, rows);
    const mtp_view x0 = mtp__first_rows(draft->layers[0].x_in, rows), w = mtp__param_value(drafter->pre_projection);

    mtp_embed_args embed = {.table = step->device_table, .ids = mtp__first_rows(step->tokens, rows), .y = embedding};
    if (!step->device_table.data)
        MTP_TRY(mtp__stage_rows(&step->stage, step->table, step->host_ids, embed.ids, rows, &embed.table, &embed.ids));
    MTP_TRY(step->context->ops->embed_fwd(step->context->device, &embed));
    MTP_TRY(mtp__step_linear_fwd(step, embedding, mtp_view_cols(w, 0, Hb), x0, MTP_OVERWRITE));
    MTP_TRY(
        mtp__step_linear_fwd(step, mtp__first_rows(draft->state, rows), mtp_view_cols(w, Hb, Hb), x0, MTP_ACCUMULATE));
    for (int64_t l = 0; l < num_layers; l++) {
        const mtp_view y = l + 1 < num_layers ? draft->layers[l + 1].x_in : draft->x_out;
        MTP_TRY(attention_branch(step, &drafter->layers[l], &draft->layers[l]));
        MTP_TRY(mlp_branch(step, &drafter->layers[l], &draft->layers[l], y));
    }
    return rmsnorm(step, mtp__first_rows(draft->x_out, rows), drafter->final_norm, mtp__first_rows(draft->n, rows),
                   mtp__first_rows(draft->rstd_final, rows));
}

mtp_status mtp__step_project_state(mtp__step *step, int32_t k, mtp_view state)
{
    return mtp__step_linear_fwd(step, mtp__first_rows(step->drafts[k].n, step->num_rows),
                                mtp__param_value(step->drafter->post_projection),
                                mtp__first_rows(state, step->num_rows), MTP_OVERWRITE);
}
