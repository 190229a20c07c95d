/* Internal to lib/model: the memory of a step and what forward, head and backward share.
 *
 * A step works through the rows of a batch in chunks of at most Rc = rows_per_chunk rows. Everything below is laid out
 * for Rc rows once; a shorter chunk uses the first rows of each buffer.
 *
 * What is kept of all draft steps has N rows: K * Rc in TRAIN mode, where step k of a chunk of `num_rows` rows has
 * those from k * num_rows on (mtp__of_step), so that a product over the rows of all steps takes one contiguous matrix
 * (mtp__of_steps). In EVALUATE mode nothing is kept for a backward pass: N is Rc, and the buffers of all layers and
 * draft steps are the same memory. */
#ifndef MTP_MODEL_WORKSPACE_H
#define MTP_MODEL_WORKSPACE_H

#include "model/graphs.h"
#include "model/stage.h"
#include "model/step.h"
#include "model/tokens.h"

/* What a layer keeps. Factors and results of products have the dtype in which the device stores them; the residual
 * stream (x_in, x_mid) and statistics of rows are F32. The backward pass leaves gradients in the place of activations
 * that it has read for the last time: those of q_raw, attention_out, gate_up and mlp_out, which are the factors of the
 * weights' gradients. */
typedef struct mtp__saved_layer {
    mtp_view x_in;                         /* [N, H] input of the layer */
    mtp_view a;                            /* [N, H] after the input norm */
    mtp_view q_raw;                        /* [N, NH * D] before the q norm */
    mtp_view q;                            /* [N, NH * D] after q norm and RoPE */
    mtp_view o;                            /* [N, NH * D] attention output */
    mtp_view lse;                          /* [N, NH] */
    mtp_view attention_out;                /* [N, H] after o_proj */
    mtp_view x_mid;                        /* [N, H] after the attention residual */
    mtp_view m;                            /* [N, H] after the pre-feedforward norm */
    mtp_view gate_up;                      /* [N, 2 * I]: columns [gate ; up] */
    mtp_view act;                          /* [N, I] gelu(gate) * up; the memory of gate in EVALUATE mode */
    mtp_view mlp_out;                      /* [N, H] after down_proj */
    mtp_view rstd_in, rstd_post_attention; /* [N] */
    mtp_view rstd_pre_feedforward, rstd_post_feedforward;
    mtp_view rstd_q; /* [N, NH] */
} mtp__saved_layer;

struct mtp__step {
    mtp_context *context;
    mtp_drafter *drafter;
    mtp_view table;        /* the verifier's embedding [V, Hb], host */
    mtp_view device_table; /* the same as ops may be given it; data NULL: a chunk brings the rows that it needs */
    mtp_step_config config;
    mtp__step_mode mode;
    mtp_dtype weights;    /* of matrices, as products take them */
    int64_t Rc;           /* rows of a chunk */
    mtp_dtype stored;     /* of factors and results of products: the device's */
    int32_t *centroid_of; /* host [V]; NULL for a dense head */

    void *memory; /* device block behind the arena */
    mtp__arena arena;
    mtp__saved_layer *layers; /* [num_layers] */
    mtp_view state;           /* [N, Hb] state_k, stored */
    mtp_view x_out;           /* [N, H] output of the last layer, F32 */
    mtp_view rstd_final;      /* [N] */
    mtp_view n;               /* [K * Rc, H] after the final norm, stored, in either mode */

    mtp__stage stage;             /* what is brought from host memory */
    mtp_view kv[MTP_LAYER_TYPES]; /* of the batch, [S, 2, NKV, D] */
    mtp_view hidden;              /* of the batch, [S, Hb] */
    bool padded;                  /* sizes of chunks are rounded up */
    mtp__graphs graphs;

    /* Of the chunk at hand, as long as it needs them: num_rows rows, num_tokens tokens, head_rows rows of the head
     * (chunk.c). Device I32 [num_rows]. */
    mtp_view places, positions, doc_begin, key_end, key_begin[MTP_LAYER_TYPES];
    mtp_view cos[MTP_LAYER_TYPES], sin[MTP_LAYER_TYPES]; /* [Rc, D/2] */

    /* Fed from the data: the chunk's tokens (tokens.h), Uc at most. Self-fed: embedding is [N, Hb], a row's own at each
     * step, and there is no list. */
    mtp__tokens tokens;
    mtp_view embed_table; /* what embed_fwd reads: the table or the rows of it that the chunk brought */
    size_t table_rows_at; /* where those begin in the block */
    mtp_view token_ids;   /* device I32 [num_tokens]: rows of embed_table; self-fed: of the step at hand */
    mtp_view entry_of;    /* device I32 [K * num_rows] */
    mtp_view taken_by;    /* device I32 [K * num_tokens] */
    mtp_view embedding;   /* [Uc, Hb] scaled token embedding, stored */
    mtp_view token_half;  /* [Uc, H] F32, its product with the left half of the pre-projection; later its gradient */

    /* The head: Mc = K * Rc rows at most (supervised rows of all draft steps). */
    mtp_view head_index, head_target, head_centroid; /* I32 [head_rows] */
    mtp_view head_scale, head_centroid_scale;        /* F32 [head_rows] */
    mtp_view head_x, head_dx;                        /* [Mc, H], stored and F32 */
    mtp_view head_loss, head_centroid_loss;          /* F32 [Mc] */
    mtp_view head_scores;                            /* [Mc, C] */
    mtp_view head_selected;                          /* I32 [Mc, k] */
    mtp_view head_argmax;                            /* I32 [Mc] */
    mtp_view head_miss;                              /* U8 [Mc] */
    /* Gradients of the backward pass, all but dx stored. */
    mtp_view dx;     /* [K * Rc, H] F32: of n, and from there of the residual stream down to the first layer's input */
    mtp_view dinput; /* [Rc, H]: of a branch's input */
    mtp_view dheads; /* [Rc, NH * D]; the memory of dact */
    mtp_view dact;   /* [Rc, I] */
    mtp_view dstate; /* [(K - 1) * Rc, Hb], at least Rc rows: of state_1 and on */
    mtp_view sums;   /* F64 [K, MTP_TALLY_COLUMNS] of the runs since they were cleared */
    mtp_scratch scratch;

    /* Host copies of results, [Rc] or [Mc]. */
    int32_t *host_ids;
    float *host_floats;
    uint8_t *host_bytes;
    mtp__step_watch watch; /* `ready` NULL: nobody is told */

    /* Of the run and the chunk at hand. */
    const mtp_batch *batch;
    const mtp__rows *rows;
    mtp__step_outputs *outputs;
    bool last_chunk;                         /* of the run */
    int64_t first_row, own_rows;             /* rows [first_row, first_row + own_rows) of `rows` */
    int64_t num_supervised;                  /* M: supervised (step, row) pairs of them */
    int64_t num_rows, num_tokens, head_rows; /* as ops see them: these, the tokens and M, or rounded up */
};

/* Lay the step out in `arena` (measuring or real). With a measuring arena the views have NULL data. */
mtp_status mtp__step_layout(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena);

/* lib/model/chunk.c: the next chunk of the run, from row `first` on: which rows it has, and what ops read of them. */
mtp_status mtp__chunk_begin(mtp__step *step, int64_t first, const int64_t *counts);
/* Self-fed: draft step k takes what the drafter said (step->head_argmax) at the step before. */
mtp_status mtp__chunk_feed(mtp__step *step, int32_t k);
/* Does feeding go through the host? */
bool mtp__chunk_waits(const mtp__step *step);
size_t mtp__chunk_size(const mtp__step *step, const mtp_drafter_config *config); /* bytes of the block, at most */
int64_t mtp__chunk_tokens(const mtp__step *step);                                /* Uc */

/* lib/model/forward.c: what all draft steps of the chunk read; then draft step k, from tokens and state_k to n_k. */
mtp_status mtp__step_prepare(mtp__step *step);
mtp_status mtp__step_forward(mtp__step *step, int32_t k);
/* state_{k+1} = post_projection(n_k) into `state` [num_rows, Hb]. */
mtp_status mtp__step_project_state(mtp__step *step, int32_t k, mtp_view state);

/* lib/model/head.c: argmax of step k for all rows of the chunk, as serving takes it, into step->head_argmax; and the
 * losses of the chunk's supervised rows, added to step->sums, with dx and the head's gradients in TRAIN mode. */
mtp_status mtp__step_argmax(mtp__step *step, int32_t k);
mtp_status mtp__step_losses(mtp__step *step);
/* Selected centroids and logits of step k for all rows of the chunk, into outputs (evaluation only). */
mtp_status mtp__step_logits(mtp__step *step, int32_t k, mtp__step_outputs *outputs);

/* lib/model/backward.c: all draft steps, from the gradient of n to the parameter gradients. */
mtp_status mtp__step_backward(mtp__step *step);
/* Tell the watch, in the last chunk of a watched run, that the gradients up to those of these parameters are final.
 * NULLs and frozen ones are passed over. */
void mtp__step_finished(const mtp__step *step, const mtp__param *const *params, int count);

/* ---- views and products ------------------------------------------------------------------------------------- */
static inline mtp_view mtp__first_rows(mtp_view view, int64_t rows)
{
    return mtp_view_rows(view, 0, rows);
}
/* Rows of draft step k in a buffer of N rows; of the first `steps` draft steps together, in TRAIN mode. */
static inline mtp_view mtp__of_step(const mtp__step *step, mtp_view kept, int32_t k)
{
    return mtp_view_rows(kept, step->mode == MTP__STEP_TRAIN ? k * step->num_rows : 0, step->num_rows);
}
static inline mtp_view mtp__of_steps(const mtp__step *step, mtp_view kept, int32_t steps)
{
    return mtp_view_rows(kept, 0, steps * step->num_rows);
}
/* n of draft step k. */
static inline mtp_view mtp__step_n(const mtp__step *step, int32_t k)
{
    return mtp_view_rows(step->n, k * step->num_rows, step->num_rows);
}
/* What layer l keeps of draft step k. */
mtp__saved_layer mtp__layer_of_step(const mtp__step *step, int64_t l, int32_t k);
/* gate and up of a view of both. */
static inline mtp_view mtp__gate_of(mtp_view both)
{
    return mtp_view_cols(both, 0, both.shape[1] / 2);
}
static inline mtp_view mtp__up_of(mtp_view both)
{
    return mtp_view_cols(both, both.shape[1] / 2, both.shape[1] / 2);
}
/* Two matrices of the same rows of a parameter block as one, when the second lies right behind the first; else data
 * NULL. */
static inline mtp_view mtp__joined(mtp_view first, mtp_view second)
{
    if (!first.data) return (mtp_view){0};
    const char *end = (const char *)first.data + (size_t)mtp_view_count(first) * mtp_dtype_size(first.dtype);
    if (second.data != (const void *)end || first.dtype != second.dtype) return (mtp_view){0};
    return mtp_view_2d(first.data, first.dtype, first.shape[0] + second.shape[0], first.shape[1]);
}
/* [rows, NH * D] seen as [rows, NH, D] and as [rows * NH, D]; [rows, NH] seen as [rows * NH]. */
static inline mtp_view mtp__as_heads(mtp_view view, int64_t num_heads)
{
    return mtp_view_3d(view.data, view.dtype, view.shape[0], num_heads, view.shape[1] / num_heads);
}
static inline mtp_view mtp__as_head_rows(mtp_view view, int64_t num_heads)
{
    return mtp_view_2d(view.data, view.dtype, view.shape[0] * num_heads, view.shape[1] / num_heads);
}
static inline mtp_view mtp__flat(mtp_view view)
{
    return mtp_view_1d(view.data, view.dtype, view.shape[0] * view.shape[1]);
}
mtp_status mtp__step_linear_fwd(mtp__step *step, mtp_view x, mtp_view w, mtp_view y, mtp_write write);
mtp_status mtp__step_linear_dx(mtp__step *step, mtp_view dy, mtp_view w, mtp_view dx, mtp_write write);
/* Accumulates; does nothing when the parameter is frozen (dw.data NULL). */
mtp_status mtp__step_linear_dw(mtp__step *step, mtp_view dy, mtp_view x, mtp_view dw);

#endif
