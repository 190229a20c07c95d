/* The memory of a step, in one place: what is taken here is all that a step ever uses. */
#include "model/workspace.h"

static mtp_view matrix(mtp__arena *arena, const char *label, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = {rows, cols};
    return mtp__arena_view(arena, label, MTP_F32, 2, shape);
}

/* Of a factor or a result of products. */
static mtp_view stored(const mtp__step *step, mtp__arena *arena, const char *label, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = {rows, cols};
    return mtp__arena_view(arena, label, step->stored, 2, shape);
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

/* Rows of what is kept of all draft steps: N of workspace.h. */
static int64_t rows_kept(const mtp__step *step)
{
    return step->mode == MTP__STEP_TRAIN ? step->config.num_speculative_steps * step->Rc : step->Rc;
}

static void layout_layer(mtp__step *step, const mtp_drafter_config *config, mtp_layer_type type,
                         mtp__saved_layer *saved, mtp__arena *arena)
{
    static const char label[] = "activations";
    const int64_t N = rows_kept(step), H = config->hidden_size, NH = config->num_heads, I = config->intermediate_size;
    const int64_t heads = NH * config->geometry[type].head_dim;
    saved->x_in = matrix(arena, label, N, H);
    saved->a = stored(step, arena, label, N, H);
    saved->q_raw = stored(step, arena, label, N, heads);
    saved->q = stored(step, arena, label, N, heads);
    saved->o = stored(step, arena, label, N, heads);
    saved->lse = matrix(arena, label, N, NH);
    saved->attention_out = stored(step, arena, label, N, H);
    saved->x_mid = matrix(arena, label, N, H);
    saved->m = stored(step, arena, label, N, H);
    saved->gate_up = stored(step, arena, label, N, 2 * I);
    saved->act = step->mode == MTP__STEP_TRAIN ? stored(step, arena, label, N, I) : mtp_view_cols(saved->gate_up, 0, I);
    saved->mlp_out = stored(step, arena, label, N, H);
    saved->rstd_in = vector(arena, label, MTP_F32, N);
    saved->rstd_post_attention = vector(arena, label, MTP_F32, N);
    saved->rstd_pre_feedforward = vector(arena, label, MTP_F32, N);
    saved->rstd_post_feedforward = vector(arena, label, MTP_F32, N);
    saved->rstd_q = matrix(arena, label, N, NH);
}

/* Evaluation keeps nothing: every layer of a type uses the first one's buffers, and one residual stream runs through.
 */
static void share_layers(mtp__step *step, const mtp_drafter_config *config)
{
    const mtp__saved_layer *of_type[MTP_LAYER_TYPES] = {0};
    for (int64_t l = 0; l < config->num_layers; l++) {
        const mtp_layer_type type = config->layer_types[l];
        if (of_type[type])
            step->layers[l] = *of_type[type];
        else
            of_type[type] = &step->layers[l];
        step->layers[l].x_in = step->layers[l].x_mid = step->x_out;
    }
}

static void layout_activations(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "activations";
    const int64_t N = rows_kept(step);
    bool seen[MTP_LAYER_TYPES] = {false};
    step->state = stored(step, arena, label, N, config->backbone_hidden_size);
    step->x_out = matrix(arena, label, N, config->hidden_size);
    step->rstd_final = vector(arena, label, MTP_F32, N);
    step->n = stored(step, arena, label, step->config.num_speculative_steps * step->Rc, config->hidden_size);
    for (int64_t l = 0; l < config->num_layers; l++) {
        const mtp_layer_type type = config->layer_types[l];
        if (step->mode == MTP__STEP_EVALUATE && seen[type]) continue;
        seen[type] = true;
        layout_layer(step, config, type, &step->layers[l], arena);
    }
    if (step->mode == MTP__STEP_EVALUATE) share_layers(step, config);
}

static void layout_tokens(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "tokens";
    const int64_t Hb = config->backbone_hidden_size, Uc = mtp__chunk_tokens(step);
    if (step->config.feeding == MTP_FEED_SELF) {
        step->embedding = stored(step, arena, label, rows_kept(step), Hb);
        return;
    }
    step->embedding = stored(step, arena, label, Uc, Hb);
    step->token_half = matrix(arena, label, Uc, config->hidden_size);
}

static void layout_head(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "head";
    const int64_t Mc = step->config.num_speculative_steps * step->Rc, H = config->hidden_size;
    step->head_loss = vector(arena, label, MTP_F32, Mc);
    step->head_centroid_loss = vector(arena, label, MTP_F32, Mc);
    step->head_argmax = vector(arena, label, MTP_I32, Mc);
    step->head_miss = vector(arena, label, MTP_U8, Mc);
    step->head_x = stored(step, arena, label, Mc, H);
    const int64_t sums[2] = {step->config.num_speculative_steps, MTP_TALLY_COLUMNS};
    step->sums = mtp__arena_view(arena, label, MTP_F64, 2, sums);
    if (step->mode == MTP__STEP_TRAIN) step->head_dx = matrix(arena, label, Mc, H);
    if (!config->ordered) return;
    const int64_t selected[2] = {Mc, config->centroid_top_k};
    step->head_scores = matrix(arena, label, Mc, config->num_centroids);
    step->head_selected = mtp__arena_view(arena, label, MTP_I32, 2, selected);
}

static void layout_gradients(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "activation gradients";
    const int64_t K = step->config.num_speculative_steps, Rc = step->Rc, H = config->hidden_size;
    const bool train = step->mode == MTP__STEP_TRAIN, chain = train && !step->config.detach_state;
    step->dstate = stored(step, arena, label, chain && K > 2 ? (K - 1) * Rc : Rc, config->backbone_hidden_size);
    if (!train) return; /* there it takes states that are asked for */
    step->dx = matrix(arena, label, K * Rc, H);
    step->dinput = stored(step, arena, label, Rc, H);
    /* attention and MLP take turns in the wide buffer */
    const int64_t heads = widest_heads(config), I = config->intermediate_size;
    const mtp_view wide = stored(step, arena, label, Rc, heads > I ? heads : I);
    step->dheads = mtp_view_2d(wide.data, step->stored, Rc, heads);
    step->dact = mtp_view_2d(wide.data, step->stored, Rc, I);
}

/* ---- scratch: the most that any op asks for at these shapes ---------------------------------------------------- */

static void most(size_t *largest, size_t bytes)
{
    if (bytes > *largest) *largest = bytes;
}

/* Of a layer [out, in] that `rows` rows pass at a time, with a result (and gradient of it) of dtype y; the weight's
 * gradient takes `dw_rows` at a time. */
static size_t linear_scratch(const mtp__step *step, int64_t rows, int64_t dw_rows, int64_t in, int64_t out, mtp_dtype y)
{
    const mtp_backend *ops = step->context->ops;
    mtp_linear_args args = {.x = mtp_view_2d(NULL, step->stored, rows, in),
                            .w = mtp_view_2d(NULL, step->weights, out, in),
                            .y = mtp_view_2d(NULL, y, rows, out)};
    size_t bytes = ops->linear_fwd_scratch(step->context->device, &args);
    if (step->mode == MTP__STEP_EVALUATE) return bytes;
    most(&bytes, ops->linear_dx_scratch(step->context->device, &args));
    args.x = mtp_view_2d(NULL, step->stored, dw_rows, in);
    args.y = mtp_view_2d(NULL, y, dw_rows, out);
    most(&bytes, ops->linear_dw_scratch(step->context->device, &args));
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
    const mtp_view q = mtp_view_3d(NULL, step->stored, Rc, NH, D), index = mtp_view_1d(NULL, MTP_I32, Rc);
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
    mtp_head_args args = {.x = mtp_view_2d(NULL, step->stored, Mc, H),
                          .e = mtp_view_2d(NULL, step->weights, V, H),
                          .target = index,
                          .scale = number,
                          .loss = number,
                          .argmax = index,
                          .logits_budget = step->config.logits_budget};
    if (step->mode == MTP__STEP_TRAIN)
        args.dx = mtp_view_2d(NULL, MTP_F32, Mc, H), args.de = mtp_view_2d(NULL, MTP_F32, V, H);
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
    most(&bytes, linear_scratch(step, Mc, Mc, H, config->num_centroids, MTP_F32));
    return bytes;
}

static size_t largest_scratch(const mtp__step *step, const mtp_drafter_config *config)
{
    const int64_t Rc = step->Rc, H = config->hidden_size, Hb = config->backbone_hidden_size;
    const int64_t N = rows_kept(step), I = config->intermediate_size, tokens = mtp__chunk_tokens(step);
    size_t bytes = head_scratch(step, config);
    most(&bytes, linear_scratch(step, tokens, tokens > N ? tokens : N, Hb, H, MTP_F32));
    most(&bytes, linear_scratch(step, Rc, N, H, Hb, step->stored));
    most(&bytes, linear_scratch(step, Rc, N, H, 2 * I, step->stored));
    most(&bytes, linear_scratch(step, Rc, N, I, H, step->stored));
    if (step->mode == MTP__STEP_TRAIN) most(&bytes, norm_scratch(step, Rc, H));
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        const int64_t D = config->geometry[type].head_dim;
        if (D == 0) continue;
        most(&bytes, linear_scratch(step, Rc, N, H, config->num_heads * D, step->stored));
        most(&bytes, linear_scratch(step, Rc, N, config->num_heads * D, H, step->stored));
        if (step->mode == MTP__STEP_TRAIN) most(&bytes, norm_scratch(step, Rc * config->num_heads, D));
        most(&bytes, attention_scratch(step, config, (mtp_layer_type)type));
    }
    return bytes;
}

mtp_status mtp__step_layout(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena)
{
    static const char label[] = "rotary tables";

    step->stored = step->context->ops->device_info(step->context->device)->stored;
    /* who evaluates reads the results of a batch before the next one */
    mtp__stage_layout(&step->stage, step->context, mtp__chunk_size(step, config),
                      step->mode == MTP__STEP_TRAIN ? MTP__STAGE_SETS : 1, arena);
    for (int type = 0; type < MTP_LAYER_TYPES; type++) {
        if (config->geometry[type].head_dim == 0) continue;
        step->cos[type] = matrix(arena, label, step->Rc, config->geometry[type].head_dim / 2);
        step->sin[type] = matrix(arena, label, step->Rc, config->geometry[type].head_dim / 2);
    }
    layout_tokens(step, config, arena);
    layout_activations(step, config, arena);
    layout_gradients(step, config, arena);
    layout_head(step, config, arena);
    step->scratch.size = largest_scratch(step, config);
    step->scratch.data = mtp__arena_take(arena, "kernel scratch", step->scratch.size);
    return arena->failure;
}

mtp__saved_layer mtp__layer_of_step(const mtp__step *step, int64_t l, int32_t k)
{
    const mtp__saved_layer *kept = &step->layers[l];
    return (mtp__saved_layer){.x_in = mtp__of_step(step, kept->x_in, k),
                              .a = mtp__of_step(step, kept->a, k),
                              .q_raw = mtp__of_step(step, kept->q_raw, k),
                              .q = mtp__of_step(step, kept->q, k),
                              .o = mtp__of_step(step, kept->o, k),
                              .lse = mtp__of_step(step, kept->lse, k),
                              .attention_out = mtp__of_step(step, kept->attention_out, k),
                              .x_mid = mtp__of_step(step, kept->x_mid, k),
                              .m = mtp__of_step(step, kept->m, k),
                              .gate_up = mtp__of_step(step, kept->gate_up, k),
                              .act = mtp__of_step(step, kept->act, k),
                              .mlp_out = mtp__of_step(step, kept->mlp_out, k),
                              .rstd_in = mtp__of_step(step, kept->rstd_in, k),
                              .rstd_post_attention = mtp__of_step(step, kept->rstd_post_attention, k),
                              .rstd_pre_feedforward = mtp__of_step(step, kept->rstd_pre_feedforward, k),
                              .rstd_post_feedforward = mtp__of_step(step, kept->rstd_post_feedforward, k),
                              .rstd_q = mtp__of_step(step, kept->rstd_q, k)};
}
