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

/* The norm that read the result y of a post-norm, and the gradient that came to it. */
typedef struct next_norm {
    const mtp__param *w; /* NULL: it has been passed already */
    mtp_view y, rstd, dy;
} next_norm;

/* In place: dy becomes the gradient of the residual, the branch's output x its own. */
static mtp_status residual_norm_bwd(mtp__step *step, mtp_view residual, mtp_view x, const mtp__param *w,
                                    const mtp__param *scalar, mtp_view rstd, mtp_view dy, next_norm next)
{
    const mtp_residual_norm_args args = {.residual = residual,
                                         .x = x,
                                         .w = mtp__param_value(w),
                                         .scalar = scalar ? mtp__param_value(scalar) : (mtp_view){0},
                                         .rstd = rstd,
                                         .eps = (float)step->drafter->config.rms_norm_eps,
                                         .y = next.y,
                                         .next_w = next.w ? mtp__param_value(next.w) : (mtp_view){0},
                                         .next_rstd = next.rstd,
                                         .next_dy = next.dy,
                                         .next_dw = next.w ? mtp__param_grad(next.w) : (mtp_view){0},
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

/* Gradient of m, from that of gate and up. */
static mtp_status gate_and_up_bwd(mtp__step *step, const mtp__layer *layer, mtp_view dgate_up, mtp_view dm)
{
    const mtp_view gate_w = mtp__param_factor(layer->gate_proj), up_w = mtp__param_factor(layer->up_proj);
    const mtp_view both = mtp__joined(gate_w, up_w);
    if (both.data) return mtp__step_linear_dx(step, dgate_up, both, dm, MTP_OVERWRITE);
    MTP_TRY(mtp__step_linear_dx(step, mtp__gate_of(dgate_up), gate_w, dm, MTP_OVERWRITE));
    return mtp__step_linear_dx(step, mtp__up_of(dgate_up), up_w, dm, MTP_ACCUMULATE);
}

/* dx: the part of the gradient of the layer's output that did not come through `next` in, that of x_mid without what
 * comes through the MLP out; that, the gradient of m, is left in step->dinput. */
static mtp_status mlp_branch_bwd(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved, mtp_view dx,
                                 next_norm next)
{
    const int64_t rows = step->num_rows;
    const mtp_view dact = mtp__first_rows(step->dact, rows), dm = mtp__first_rows(step->dinput, rows);
    const mtp_view gate = mtp__gate_of(saved->gate_up), up = mtp__up_of(saved->gate_up);

    MTP_TRY(residual_norm_bwd(step, saved->x_mid, saved->mlp_out, layer->post_feedforward_norm, layer->layer_scalar,
                              saved->rstd_post_feedforward, dx, next));
    MTP_TRY(mtp__step_linear_dx(step, saved->mlp_out, mtp__param_factor(layer->down_proj), dact, MTP_OVERWRITE));
    const mtp_geglu_args geglu = {.gate = gate, .up = up, .dy = dact, .dgate = gate, .dup = up};
    MTP_TRY(step->context->ops->geglu_bwd(step->context->device, &geglu));
    return gate_and_up_bwd(step, layer, saved->gate_up, dm);
}

/* RoPE and the norm of heads: the gradient of q in, of q_raw in its place. */
static mtp_status norm_heads_bwd(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved, mtp_view dq)
{
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;
    const mtp_view q_rows = mtp__as_head_rows(saved->q_raw, NH);
    const mtp_rmsnorm_args args = {.x = q_rows,
                                   .w = mtp__param_value(layer->q_norm),
                                   .rstd = mtp__flat(saved->rstd_q),
                                   .eps = (float)step->drafter->config.rms_norm_eps,
                                   .cos = mtp__first_rows(step->cos[layer->type], rows),
                                   .sin = mtp__first_rows(step->sin[layer->type], rows),
                                   .dy = mtp__as_head_rows(dq, NH),
                                   .dx = q_rows,
                                   .dw = mtp__param_grad(layer->q_norm),
                                   .dw_write = MTP_ACCUMULATE,
                                   .scratch = step->scratch};
    return step->context->ops->rmsnorm_bwd(step->context->device, &args);
}

/* dx: what mlp_branch_bwd left in, the gradient of the layer's input without what comes through attention out; that,
 * the gradient of a, is left in step->dinput. */
static mtp_status attention_branch_bwd(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved,
                                       mtp_view dx)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;
    const mtp_layer_type type = layer->type;
    const mtp_view da = mtp__first_rows(step->dinput, rows);
    /* the block is as wide as the widest layer: rows of this layer stand closer together */
    const mtp_view dq = mtp_view_2d(step->dheads.data, step->stored, rows, saved->q.shape[1]);
    const mtp_view dq_heads = mtp__as_heads(dq, NH);
    const next_norm next = {layer->pre_feedforward_norm, saved->x_mid, saved->rstd_pre_feedforward, da};

    MTP_TRY(residual_norm_bwd(step, saved->x_in, saved->attention_out, layer->post_attention_norm, NULL,
                              saved->rstd_post_attention, dx, next));
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
    MTP_TRY(norm_heads_bwd(step, layer, saved, dq));
    return mtp__step_linear_dx(step, saved->q_raw, mtp__param_factor(layer->q_proj), da, MTP_OVERWRITE);
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

static mtp_status gate_and_up_weights(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved)
{
    const int32_t K = step->config.num_speculative_steps;
    const mtp_view dw = mtp__joined(mtp__param_grad(layer->gate_proj), mtp__param_grad(layer->up_proj));
    if (dw.data)
        return mtp__step_linear_dw(step, mtp__of_steps(step, saved->gate_up, K), mtp__of_steps(step, saved->m, K), dw);
    MTP_TRY(weight(step, mtp__gate_of(saved->gate_up), saved->m, layer->gate_proj, K));
    return weight(step, mtp__up_of(saved->gate_up), saved->m, layer->up_proj, K);
}

static mtp_status layer_weights(mtp__step *step, int64_t l)
{
    const int32_t K = step->config.num_speculative_steps;
    const mtp__layer *layer = &step->drafter->layers[l];
    const mtp__saved_layer *saved = &step->layers[l];
    MTP_TRY(weight(step, saved->mlp_out, saved->act, layer->down_proj, K));
    MTP_TRY(gate_and_up_weights(step, layer, saved));
    MTP_TRY(weight(step, saved->attention_out, saved->o, layer->o_proj, K));
    MTP_TRY(weight(step, saved->q_raw, saved->a, layer->q_proj, K));
    const mtp__param *const params[] = {layer->down_proj, layer->gate_proj, layer->up_proj, layer->o_proj,
                                        layer->q_proj};
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
    const mtp_view da = mtp__first_rows(step->dinput, step->num_rows);
    next_norm next = {0};
    for (int64_t l = drafter->config.num_layers - 1; l >= 0; l--) {
        const mtp__layer *layer = &drafter->layers[l];
        const mtp__saved_layer saved = mtp__layer_of_step(step, l, k);
        MTP_TRY(mlp_branch_bwd(step, layer, &saved, dx, next));
        MTP_TRY(attention_branch_bwd(step, layer, &saved, dx));
        if (k == 0) MTP_TRY(layer_weights(step, l));
        next = (next_norm){layer->input_norm, saved.x_in, saved.rstd_in, da};
    }
    MTP_TRY(rmsnorm_bwd(step, next.y, next.w, next.rstd, next.dy, dx, MTP_ACCUMULATE));
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
