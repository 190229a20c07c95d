/* Internal to lib/model: the memory of a step and what forward, head and backward share.
 *
 * A step works through the rows of a batch in chunks of at most Rc = rows_per_chunk rows. Everything below is laid out
 * for Rc rows once; a shorter chunk uses the first rows of each buffer. In EVALUATE mode nothing is kept for a backward
 * pass: the buffers of all layers and draft steps are the same memory. */
#ifndef MTP_MODEL_WORKSPACE_H
#define MTP_MODEL_WORKSPACE_H

#include "model/stage.h"
#include "model/step.h"

/* What a layer keeps of one draft step. All F32. */
typedef struct mtp__saved_layer {
    mtp_view x_in;                         /* [Rc, H] input of the layer */
    mtp_view a;                            /* [Rc, H] after the input norm */
    mtp_view q_raw;                        /* [Rc, NH * D] before the q norm */
    mtp_view q;                            /* [Rc, NH * D] after q norm and RoPE */
    mtp_view o;                            /* [Rc, NH * D] attention output */
    mtp_view lse;                          /* [Rc, NH] */
    mtp_view attention_out;                /* [Rc, H] after o_proj */
    mtp_view x_mid;                        /* [Rc, H] after the attention residual */
    mtp_view m;                            /* [Rc, H] after the pre-feedforward norm */
    mtp_view gate, up;                     /* [Rc, I] */
    mtp_view mlp_out;                      /* [Rc, H] after down_proj */
    mtp_view rstd_in, rstd_post_attention; /* [Rc] */
    mtp_view rstd_pre_feedforward, rstd_post_feedforward;
    mtp_view rstd_q; /* [Rc * NH] */
} mtp__saved_layer;

/* What a draft step keeps. */
typedef struct mtp__saved_draft {
    mtp_view embedding; /* [Rc, Hb] scaled token embedding */
    mtp_view state;     /* [Rc, Hb] state_k */
    mtp_view x_out;     /* [Rc, H] output of the last layer */
    mtp_view n;         /* [Rc, H] after the final norm: a slice of mtp__step.n */
    mtp_view rstd_final;
    mtp__saved_layer *layers; /* [num_layers] */
} mtp__saved_draft;

struct mtp__step {
    mtp_context *context;
    mtp_drafter *drafter;
    mtp_view table;        /* the verifier's embedding [V, Hb], host */
    mtp_view device_table; /* the same as ops may be given it; data NULL: rows are brought as they are needed (stage) */
    mtp_step_config config;
    mtp__step_mode mode;
    int64_t Rc;           /* rows of a chunk */
    int32_t *centroid_of; /* host [V]; NULL for a dense head */

    void *memory; /* device block behind the arena */
    mtp__arena arena;
    mtp__saved_draft *drafts; /* [K] */
    mtp_view n;               /* [K * Rc, H] */

    /* The chunk's rows, device I32 [Rc]. */
    mtp_view tokens, places, positions, doc_begin, key_end, key_begin[MTP_LAYER_TYPES];
    mtp_view cos[MTP_LAYER_TYPES], sin[MTP_LAYER_TYPES]; /* [Rc, D/2] */

    mtp__stage stage;             /* what is brought from host memory */
    mtp_view kv[MTP_LAYER_TYPES]; /* of the batch, [B * S, 2, NKV, D] */

    /* Scratch of the forward pass: the MLP's activation [Rc, I]. */
    mtp_view act;
    /* The head: Mc = K * Rc rows at most (supervised rows of all draft steps). */
    mtp_view head_index, head_target, head_centroid; /* I32 [Mc] */
    mtp_view head_x, head_dx;                        /* [Mc, H] */
    mtp_view head_scale, head_centroid_scale;        /* F32 [Mc] */
    mtp_view head_loss, head_centroid_loss;          /* F32 [Mc] */
    mtp_view head_scores;                            /* [Mc, C] */
    mtp_view head_selected;                          /* I32 [Mc, k] */
    mtp_view head_argmax;                            /* I32 [Mc] */
    mtp_view head_miss;                              /* U8 [Mc] */
    /* Gradients of the backward pass. */
    mtp_view dn;              /* [K * Rc, H] */
    mtp_view dx, dbranch, dm; /* [Rc, H]: residual stream, branch output, branch input */
    mtp_view dheads;          /* [Rc, NH * D]; the memory of dact */
    mtp_view dact, dup;       /* [Rc, I]; dact becomes dgate */
    mtp_view dstate;          /* [Rc, Hb] */
    mtp_scratch scratch;

    /* Host mirrors of index arrays and results, [Rc] or [Mc]. */
    int32_t *host_ids;
    float *host_floats;
    uint8_t *host_bytes;
    mtp__step_watch watch; /* `ready` NULL: nobody is told */

    /* Of the chunk at hand. */
    bool last_chunk; /* of the run */
    const mtp_batch *batch;
    const mtp__rows *rows;
    int64_t first_row, num_rows; /* rows [first_row, first_row + num_rows) of `rows` */
    int64_t num_supervised;      /* M: rows of the head */
};

/* Lay the step out in `arena` (measuring or real). With a measuring arena step->drafts may be filled with NULL data. */
mtp_status mtp__step_layout(mtp__step *step, const mtp_drafter_config *config, mtp__arena *arena);

/* lib/model/forward.c: draft step k of the chunk: from tokens (step->tokens and, on the host, step->host_ids) and
 * state_k to n_k. */
mtp_status mtp__step_begin_chunk(mtp__step *step);
mtp_status mtp__step_forward(mtp__step *step, int32_t k);
/* state_{k+1} = post_projection(n_k) into `state` [Rc, Hb]. */
mtp_status mtp__step_project_state(mtp__step *step, int32_t k, mtp_view state);

/* lib/model/head.c: argmax of step k for all rows of the chunk, as serving takes it, into host [num_rows]; and the
 * losses of the chunk's supervised rows, with dn and the head's gradients in TRAIN mode. */
mtp_status mtp__step_argmax(mtp__step *step, int32_t k, int32_t *argmax);
mtp_status mtp__step_losses(mtp__step *step, const int64_t *counts, mtp__step_sums *sums, mtp__step_outputs *outputs);
/* Selected centroids and logits of step k for all rows of the chunk, into outputs (evaluation only). */
mtp_status mtp__step_logits(mtp__step *step, int32_t k, mtp__step_outputs *outputs);

/* lib/model/backward.c: all draft steps, from dn to the parameter gradients. */
mtp_status mtp__step_backward(mtp__step *step);
/* Tell the watch, in the last chunk of a watched run, that the gradients up to those of these parameters are final.
 * NULLs and frozen ones are passed over. */
void mtp__step_finished(const mtp__step *step, const mtp__param *const *params, int count);

/* ---- small helpers ------------------------------------------------------------------------------------------- */
static inline mtp_view mtp__first_rows(mtp_view view, int64_t rows)
{
    return mtp_view_rows(view, 0, rows);
}
/* [Rc, NH * D] seen as [rows, NH, D] and as [rows * NH, D]. */
static inline mtp_view mtp__as_heads(mtp_view view, int64_t rows, int64_t num_heads)
{
    return mtp_view_3d(view.data, view.dtype, rows, num_heads, view.shape[1] / num_heads);
}
static inline mtp_view mtp__as_head_rows(mtp_view view, int64_t rows, int64_t num_heads)
{
    return mtp_view_2d(view.data, view.dtype, rows * num_heads, view.shape[1] / num_heads);
}
mtp_status mtp__step_linear_fwd(mtp__step *step, mtp_view x, mtp_view w, mtp_view y, mtp_write write);
mtp_status mtp__step_linear_dx(mtp__step *step, mtp_view dy, mtp_view w, mtp_view dx, mtp_write write);
/* Accumulates; does nothing when the parameter is frozen (dw.data NULL). */
mtp_status mtp__step_linear_dw(mtp__step *step, mtp_view dy, mtp_view x, mtp_view dw);

#endif
