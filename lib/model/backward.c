/* The backward pass: draft steps from the last to the first, layers from the last to the first, each op's backward in
 * the reverse order of forward.c. K and V are constants, tokens carry no gradient; the state chain carries it from step
 * k + 1 into step k unless detach_state cuts it. Parameter gradients are added; frozen parameters have none.
 *
 * Both factors of a weight's gradient are kept for all draft steps, so each is one product over the rows of all of
 * them, done when the last of them (k = 0) has passed the layer. */
#include "base/error.h"
#include "model/workspace.h"

mtp_status mtp__step_linear_dx(mtp__step *step, mtp_view dy, mtp_view w, mtp_view dx, mtp_write write)
{
    const mtp_linear_args args = {.x = dx, .w = w, .y = dy, .write = write, .scratch = step->scratch};
    return step->context->ops->linear_dx(step->context->device, &args);
}

mtp_status mtp__step_linear_dw(mtp__step *step, mtp_view dy, mtp_view x, mtp_view dw)
{
    if (!dw.data) return MTP_OK;
    const mtp_linear_args args = {.x = x, .w = dw, .y = dy, .write = MTP_ACCUMULATE, .scratch = step->scratch};
    return step->context->ops->linear_dw(step->context->device, &args);
}

static mtp_status rmsnorm_bwd(mtp__step *step, mtp_view x, const mtp__param *w, mtp_view rstd, mtp_view dy, mtp_view dx,
                              mtp_write dx_write)
{
    const mtp_rmsnorm_args args = {.x = x,
                                   .w = mtp__param_value(w),
                                   .rstd = rstd,
                                   .eps = (float)step->drafter->config.rms_norm_eps,
                                   .dy = dy,
                                   .dx = dx,
                                   .dw = mtp__param_grad(w),
                                   .dx_write = dx_write,
                                   .dw_write = MTP_ACCUMULATE,
                                   .scratch = step->scratch};
    return step->context->ops->rmsnorm_bwd(step->context->device, &args);
}

/* In place: dy becomes the gradient of the residual, the branch's output x its own. */
static mtp_status residual_norm_bwd(mtp__step *step, mtp_view residual, mtp_view x, const mtp__param *w,
                                    const mtp__param *scalar, mtp_view rstd, mtp_view dy)
{
    const mtp_residual_norm_args args = {.residual = residual,
                                         .x = x,
                                         .w = mtp__param_value(w),
                                         .scalar = scalar ? mtp__param_value(scalar) : (mtp_view){0},
                                         .rstd = rstd,
                                         .eps = (float)step->drafter->config.rms_norm_eps,
                                         .dy = dy,
                                         .dresidual = dy,
                                         .dx = x,
                                         .dw = mtp__param_grad(w),
                                         .dscalar = scalar ? mtp__param_grad(scalar) : (mtp_view){0},
                                         .dresidual_write = MTP_OVERWRITE,
                                         .dw_write = MTP_ACCUMULATE,
                                         .dscalar_write = MTP_ACCUMULATE,
                                         .scratch = step->scratch};
    return step->context->ops->residual_norm_bwd(step->context->device, &args);
}

/* dx: gradient of the layer's output in, of x_mid out. */
static mtp_status mlp_branch_bwd(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved, mtp_view dx)
{
    const int64_t rows = step->num_rows;
    const mtp_view dact = mtp__first_rows(step->dact, rows), dm = mtp__first_rows(step->dinput, rows);

    MTP_TRY(residual_norm_bwd(step, saved->x_mid, saved->mlp_out, layer->post_feedforward_norm, layer->layer_scalar,
                              saved->rstd_post_feedforward, dx));
    MTP_TRY(mtp__step_linear_dx(step, saved->mlp_out, mtp__param_factor(layer->down_proj), dact, MTP_OVERWRITE));
    const mtp_geglu_args geglu = {
        .gate = saved->gate, .up = saved->up, .dy = dact, .dgate = saved->gate, .dup = saved->up};
    MTP_TRY(step->context->ops->geglu_bwd(step->context->device, &geglu));
    MTP_TRY(mtp__step_linear_dx(step, saved->gate, mtp__param_factor(layer->gate_proj), dm, MTP_OVERWRITE));
    MTP_TRY(mtp__step_linear_dx(step, saved->up, mtp__param_factor(layer->up_proj), dm, MTP_ACCUMULATE));
    return rmsnorm_bwd(step, saved->x_mid, layer->pre_feedforward_norm, saved->rstd_pre_feedforward, dm, dx,
                       MTP_ACCUMULATE);
}

/* dx: gradient of x_mid in, of the layer's input out. */
static mtp_status attention_branch_bwd(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved,
                                       mtp_view dx)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;
    const mtp_layer_type type = layer->type;
    const mtp_view da = mtp__first_rows(step->dinput, rows);
    /* the block is as wide as the widest layer: rows of this layer stand closer together */
    const mtp_view dq = mtp_view_2d(step->dheads.data, MTP_F32, rows, saved->q.shape[1]);
    const mtp_view dq_heads = mtp__as_heads(dq, NH), q_rows = mtp__as_head_rows(saved->q_raw, NH);

    MTP_TRY(residual_norm_bwd(step, saved->x_in, saved->attention_out, layer->post_attention_norm, NULL,
                              saved->rstd_post_attention, dx));
    MTP_TRY(mtp__step_linear_dx(step, saved->attention_out, mtp__param_factor(layer->o_proj), dq, MTP_OVERWRITE));
    const mtp_attention_args attention = {.q = mtp__as_heads(saved->q, NH),
                                          .kv = step->kv[type],
                                          .key_begin = step->key_begin[type],
                                          .key_end = step->key_end,
                                          .doc_begin = step->doc_begin,
                                          .o = mtp__as_heads(saved->o, NH),
                                          .lse = saved->lse,
                                          .do_ = dq_heads,
                                          .dq = dq_heads,
                                          .scratch = step->scratch};
    MTP_TRY(ops->attention_bwd(device, &attention));
    const mtp_rope_args rope = {.x = dq_heads,
                                .cos = mtp__first_rows(step->cos[type], rows),
                                .sin = mtp__first_rows(step->sin[type], rows),
                                .y = dq_heads};
    MTP_TRY(ops->rope_bwd(device, &rope));
    MTP_TRY(rmsnorm_bwd(step, q_rows, layer->q_norm, mtp__flat(saved->rstd_q), mtp__as_head_rows(dq, NH), q_rows,
                        MTP_OVERWRITE));
    MTP_TRY(mtp__step_linear_dx(step, saved->q_raw, mtp__param_factor(layer->q_proj), da, MTP_OVERWRITE));
    return rmsnorm_bwd(step, saved->x_in, layer->input_norm, saved->rstd_in, da, dx, MTP_ACCUMULATE);
}

void mtp__step_finished(const mtp__step *step, const mtp__param *const *params, int count)
{
    int64_t final = 0;
    if (!step->watch.ready || !step->last_chunk) return;
    for (int i = 0; i < count; i++) {
        /* vectors lie behind all matrices, and are final with the last of these */
        if (!params[i] || !params[i]->grad || params[i]->rank != 2) continue;
        const int64_t end = params[i]->grad - (const float *)step->drafter->grads + params[i]->count;
        if (end > final) final = end;
    }
    if (final > 0) step->watch.ready(step->watch.user, final);
}

/* ---- weights, over the rows of all draft steps ------------------------------------------------------------------- */

/* dw += dy^T x over the first `steps` draft steps. */
static mtp_status weight(mtp__step *step, mtp_view dy, mtp_view x, const mtp__param *param, int32_t steps)
{
    return mtp__step_linear_dw(step, mtp__of_steps(step, dy, steps), mtp__of_steps(step, x, steps),
                               mtp__param_grad(param));
}

static mtp_status layer_weights(mtp__step *step, int64_t l)
{
    const int32_t K = step->config.num_speculative_steps;
    const mtp__layer *layer = &step->drafter->layers[l];
    const mtp__saved_layer *saved = &step->layers[l];
    MTP_TRY(weight(step, saved->mlp_out, saved->act, layer->down_proj, K));
    MTP_TRY(weight(step, saved->gate, saved->m, layer->gate_proj, K));
    MTP_TRY(weight(step, saved->up, saved->m, layer->up_proj, K));
    MTP_TRY(weight(step, saved->attention_out, saved->o, layer->o_proj, K));
    MTP_TRY(weight(step, saved->q_raw, saved->a, layer->q_proj, K));
    const mtp__param *const params[] = {layer->down_proj, layer->gate_proj, layer->up_proj,
                                        layer->o_proj,    layer->q_proj,    layer->input_norm};
    mtp__step_finished(step, params, sizeof params / sizeof *params);
    return MTP_OK;
}

/* The gradient of each token's half, in the half's place: the sum over the draft steps, in their order. */
static mtp_status sum_by_token(mtp__step *step, mtp_view dhalf)
{
    const int32_t K = step->config.num_speculative_steps;
    const mtp_view dx = mtp__of_steps(step, step->dx, K);
    for (int32_t k = 0; k < K; k++) {
        const mtp_gather_args gather = {.src = dx,
                                        .index = mtp_view_rows(step->taken_by, k * step->num_tokens, step->num_tokens),
                                        .dst = dhalf,
                                        .write = k == 0 ? MTP_OVERWRITE : MTP_ACCUMULATE};
        MTP_TRY(step->context->ops->gather_rows(step->context->device, &gather));
    }
    return MTP_OK;
}

static mtp_status pre_projection_weights(mtp__step *step)
{
    const int32_t K = step->config.num_speculative_steps;
    const int64_t Hb = step->drafter->config.backbone_hidden_size;
    const mtp_view dw = mtp__param_grad(step->drafter->pre_projection), dx = mtp__of_steps(step, step->dx, K);
    if (!dw.data) return MTP_OK;
    if (step->config.feeding == MTP_FEED_SELF) {
        MTP_TRY(mtp__step_linear_dw(step, dx, mtp__of_steps(step, step->embedding, K), mtp_view_cols(dw, 0, Hb)));
    } else if (step->num_tokens > 0) {
        const mtp_view dhalf = mtp__first_rows(step->token_half, step->num_tokens);
        MTP_TRY(sum_by_token(step, dhalf));
        MTP_TRY(mtp__step_linear_dw(step, dhalf, mtp__first_rows(step->embedding, step->num_tokens),
                                    mtp_view_cols(dw, 0, Hb)));
    }
    return mtp__step_linear_dw(step, dx, mtp__of_steps(step, step->state, K), mtp_view_cols(dw, Hb, Hb));
}

/* ---- draft steps ------------------------------------------------------------------------------------------------- */

/* The gradient of state_k, k >= 1. */
static mtp_view dstate_of(const mtp__step *step, int32_t k)
{
    return mtp_view_rows(step->dstate, (k - 1) * step->num_rows, step->num_rows);
}

static mtp_status draft_step_bwd(mtp__step *step, int32_t k)
{
    const mtp_drafter *drafter = step->drafter;
    const int32_t K = step->config.num_speculative_steps;
    const bool chain = !step->config.detach_state;
    const int64_t Hb = drafter->config.backbone_hidden_size;
    const mtp_view dx = mtp__of_step(step, step->dx, k);

    if (chain && k + 1 < K)
        MTP_TRY(mtp__step_linear_dx(step, dstate_of(step, k + 1), mtp__param_factor(drafter->post_projection), dx,
                                    MTP_ACCUMULATE));
    MTP_TRY(rmsnorm_bwd(step, mtp__of_step(step, step->x_out, k), drafter->final_norm,
                        mtp__of_step(step, step->rstd_final, k), dx, dx, MTP_OVERWRITE));
    if (k == 0) {
        if (chain && K > 1) MTP_TRY(weight(step, step->dstate, step->n, drafter->post_projection, K - 1));
        mtp__step_finished(step, (const mtp__param *const[]){drafter->final_norm, drafter->post_projection}, 2);
    }
    for (int64_t l = drafter->config.num_layers - 1; l >= 0; l--) {
        const mtp__saved_layer saved = mtp__layer_of_step(step, l, k);
        MTP_TRY(mlp_branch_bwd(step, &drafter->layers[l], &saved, dx));
        MTP_TRY(attention_branch_bwd(step, &drafter->layers[l], &saved, dx));
        if (k == 0) MTP_TRY(layer_weights(step, l));
    }
    if (k == 0) return pre_projection_weights(step);
    if (!chain) return MTP_OK;
    return mtp__step_linear_dx(step, dx, mtp_view_cols(mtp__param_factor(drafter->pre_projection), Hb, Hb),
                               dstate_of(step, k), MTP_OVERWRITE);
}

mtp_status mtp__step_backward(mtp__step *step)
{
    const mtp_drafter *drafter = step->drafter;
    mtp__step_finished(step, (const mtp__param *const[]){drafter->embed, drafter->centroids}, 2); /* by the head */
    for (int32_t k = step->config.num_speculative_steps - 1; k >= 0; k--) MTP_TRY(draft_step_bwd(step, k));
    return MTP_OK;
}
