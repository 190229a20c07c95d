/* The backward pass: draft steps from the last to the first, layers from the last to the first, each op's backward in
 * the reverse order of forward.c. K and V are constants, tokens carry no gradient; the state chain carries it from step
 * k + 1 into step k unless detach_state cuts it. Parameter gradients are added; frozen parameters have none. */
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

/* dy becomes the gradient of the residual, in place; the branch gets `dbranch`. */
static mtp_status residual_norm_bwd(mtp__step *step, mtp_view residual, mtp_view x, const mtp__param *w,
                                    const mtp__param *scalar, mtp_view rstd, mtp_view dy, mtp_view dbranch)
{
    const mtp_residual_norm_args args = {.residual = residual,
                                         .x = x,
                                         .w = mtp__param_value(w),
                                         .scalar = scalar ? mtp__param_value(scalar) : (mtp_view){0},
                                         .rstd = rstd,
                                         .eps = (float)step->drafter->config.rms_norm_eps,
                                         .dy = dy,
                                         .dresidual = dy,
                                         .dx = dbranch,
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
    const mtp_view dbranch = mtp__first_rows(step->dbranch, rows), dm = mtp__first_rows(step->dm, rows);
    const mtp_view dact = mtp__first_rows(step->dact, rows), act = mtp__first_rows(step->act, rows);
    const mtp_view dgate = dact, dup = mtp__first_rows(step->dup, rows); /* dgate takes dact's place */
    const mtp_view m = mtp__first_rows(saved->m, rows);

    MTP_TRY(residual_norm_bwd(step, mtp__first_rows(saved->x_mid, rows), mtp__first_rows(saved->mlp_out, rows),
                              layer->post_feedforward_norm, layer->layer_scalar,
                              mtp__first_rows(saved->rstd_post_feedforward, rows), dx, dbranch));
    MTP_TRY(mtp__step_linear_dx(step, dbranch, mtp__param_value(layer->down_proj), dact, MTP_OVERWRITE));
    const mtp_geglu_args geglu = {.gate = mtp__first_rows(saved->gate, rows),
                                  .up = mtp__first_rows(saved->up, rows),
                                  .y = act,
                                  .dy = dact,
                                  .dgate = dgate,
                                  .dup = dup};
    MTP_TRY(step->context->ops->geglu_bwd(step->context->device, &geglu));
    MTP_TRY(mtp__step_linear_dw(step, dbranch, act, mtp__param_grad(layer->down_proj)));
    MTP_TRY(mtp__step_linear_dw(step, dgate, m, mtp__param_grad(layer->gate_proj)));
    MTP_TRY(mtp__step_linear_dw(step, dup, m, mtp__param_grad(layer->up_proj)));
    MTP_TRY(mtp__step_linear_dx(step, dgate, mtp__param_value(layer->gate_proj), dm, MTP_OVERWRITE));
    MTP_TRY(mtp__step_linear_dx(step, dup, mtp__param_value(layer->up_proj), dm, MTP_ACCUMULATE));
    return rmsnorm_bwd(step, mtp__first_rows(saved->x_mid, rows), layer->pre_feedforward_norm,
                       mtp__first_rows(saved->rstd_pre_feedforward, rows), dm, dx, MTP_ACCUMULATE);
}

/* dx: gradient of x_mid in, of the layer's input out. */
static mtp_status attention_branch_bwd(mtp__step *step, const mtp__layer *layer, const mtp__saved_layer *saved,
                                       mtp_view dx)
{
    const mtp_backend *ops = step->context->ops;
    mtp_device *device = step->context->device;
    const int64_t rows = step->num_rows, NH = step->drafter->config.num_heads;
    const mtp_layer_type type = layer->type;
    const mtp_view dbranch = mtp__first_rows(step->dbranch, rows), da = mtp__first_rows(step->dm, rows);
    /* the block is as wide as the widest layer: rows of this layer stand closer together */
    const mtp_view dq = mtp_view_2d(step->dheads.data, MTP_F32, rows, saved->q.shape[1]);
    const mtp_view dq_heads = mtp__as_heads(dq, rows, NH), dq_rows = mtp__as_head_rows(dq, rows, NH);

    MTP_TRY(residual_norm_bwd(step, mtp__first_rows(saved->x_in, rows), mtp__first_rows(saved->attention_out, rows),
                              layer->post_attention_norm, NULL, mtp__first_rows(saved->rstd_post_attention, rows), dx,
                              dbranch));
    MTP_TRY(mtp__step_linear_dw(step, dbranch, mtp__first_rows(saved->o, rows), mtp__param_grad(layer->o_proj)));
    MTP_TRY(mtp__step_linear_dx(step, dbranch, mtp__param_value(layer->o_proj), dq, MTP_OVERWRITE));
    const mtp_attention_args attention = {.q = mtp__as_heads(saved->q, rows, NH),
                                          .kv = step->kv[type],
                                          .key_begin = mtp__first_rows(step->key_begin[type], rows),
                                          .key_end = mtp__first_rows(step->key_end, rows),
                                          .doc_begin = mtp__first_rows(step->doc_begin, rows),
                                          .o = mtp__as_heads(saved->o, rows, NH),
                                          .lse = mtp__first_rows(saved->lse, rows),
                                          .do_ = dq_heads,
                                          .dq = dq_heads,
                                          .scratch = step->scratch};
    MTP_TRY(ops->attention_bwd(device, &attention));
    const mtp_rope_args rope = {.x = dq_heads,
                                .cos = mtp__first_rows(step->cos[type], rows),
                                .sin = mtp__first_rows(step->sin[type], rows),
                                .y = dq_heads};
    MTP_TRY(ops->rope_bwd(device, &rope));
    MTP_TRY(rmsnorm_bwd(step, mtp__as_head_rows(saved->q_raw, rows, NH), layer->q_norm,
                        mtp__first_rows(saved->rstd_q, rows * NH), dq_rows, dq_rows, MTP_OVERWRITE));
    MTP_TRY(mtp__step_linear_dw(step, dq, mtp__first_rows(saved->a, rows), mtp__param_grad(layer->q_proj)));
    MTP_TRY(mtp__step_linear_dx(step, dq, mtp__param_value(layer->q_proj), da, MTP_OVERWRITE));
    return rmsnorm_bwd(step, mtp__first_rows(saved->x_in, rows), layer->input_norm,
                       mtp__first_rows(saved->rstd_in, rows), da, dx, MTP_ACCUMULATE);
}

/* Gradient of state_{k+1} (step->dstate) into n_k: dn_k += dstate Wpost, dWpost += dstate^T n_k. */
static mtp_status state_bwd(mtp__step *step, int32_t k, mtp_view dn)
{
    const int64_t rows = step->num_rows;
    const mtp_view dstate = mtp__first_rows(step->dstate, rows);
    const mtp__param *post = step->drafter->post_projection;
    MTP_TRY(mtp__step_linear_dw(step, dstate, mtp__first_rows(step->drafts[k].n, rows), mtp__param_grad(post)));
    return mtp__step_linear_dx(step, dstate, mtp__param_value(post), dn, MTP_ACCUMULATE);
}

void mtp__step_finished(const mtp__step *step, const mtp__param *const *params, int count)
{
    int64_t final = 0;
    if (!step->watch.ready || !step->last_chunk) return;
    for (int i = 0; i < count; i++) {
        if (!params[i] || !params[i]->grad) continue;
        const int64_t end = params[i]->grad - (const float *)step->drafter->grads + params[i]->count;
        if (end > final) final = end;
    }
    if (final > 0) step->watch.ready(step->watch.user, final);
}

/* Both branches of a layer, in the draft step after which nothing adds to its gradients. */
static void layer_finished(const mtp__step *step, const mtp__layer *layer)
{
    const mtp__param *const params[] = {layer->down_proj, layer->gate_proj, layer->up_proj,
                                        layer->o_proj,    layer->q_proj,    layer->input_norm};
    mtp__step_finished(step, params, sizeof params / sizeof *params);
}

static mtp_status draft_step_bwd(mtp__step *step, int32_t k, bool chain_in, bool chain_out)
{
    const mtp_drafter *drafter = step->drafter;
    const mtp__saved_draft *draft = &step->drafts[k];
    const int64_t rows = step->num_rows, Hb = drafter->config.backbone_hidden_size;
    const mtp_view dn = mtp_view_rows(step->dn, k * step->Rc, rows), dx = mtp__first_rows(step->dx, rows);

    if (chain_in) MTP_TRY(state_bwd(step, k, dn));
    MTP_TRY(rmsnorm_bwd(step, mtp__first_rows(draft->x_out, rows), drafter->final_norm,
                        mtp__first_rows(draft->rstd_final, rows), dn, dx, MTP_OVERWRITE));
    if (k == 0) mtp__step_finished(step, (const mtp__param *const[]){drafter->final_norm, drafter->post_projection}, 2);
    for (int64_t l = drafter->config.num_layers - 1; l >= 0; l--) {
        MTP_TRY(mlp_branch_bwd(step, &drafter->layers[l], &draft->layers[l], dx));
        MTP_TRY(attention_branch_bwd(step, &drafter->layers[l], &draft->layers[l], dx));
        if (k == 0) layer_finished(step, &drafter->layers[l]);
    }
    const mtp_view w = mtp__param_value(drafter->pre_projection), dw = mtp__param_grad(drafter->pre_projection);
    if (dw.data) {
        MTP_TRY(mtp__step_linear_dw(step, dx, mtp__first_rows(draft->embedding, rows), mtp_view_cols(dw, 0, Hb)));
        MTP_TRY(mtp__step_linear_dw(step, dx, mtp__first_rows(draft->state, rows), mtp_view_cols(dw, Hb, Hb)));
    }
    if (!chain_out) return MTP_OK;
    return mtp__step_linear_dx(step, dx, mtp_view_cols(w, Hb, Hb), mtp__first_rows(step->dstate, rows), MTP_OVERWRITE);
}

mtp_status mtp__step_backward(mtp__step *step)
{
    const int32_t K = step->config.num_speculative_steps;
    const bool chain = !step->config.detach_state;
    const mtp_drafter *drafter = step->drafter;
    mtp__step_finished(step, (const mtp__param *const[]){drafter->embed, drafter->centroids}, 2); /* by the head */
    for (int32_t k = K - 1; k >= 0; k--) MTP_TRY(draft_step_bwd(step, k, chain && k + 1 < K, chain && k > 0));
    return MTP_OK;
}
