/* The op contract: what a backend computes. Each backend fills one table (kernels/cpu does); the model in lib/ is
 * written once against it.
 *
 * Rules that hold for every op:
 *  - Arguments are views; an op owns nothing, allocates nothing and keeps nothing after it returns. Scratch is an
 *    argument: <op>_scratch(device, args) gives the bytes, from shapes and dtypes alone (data pointers are not looked
 *    at, so a dry run may ask with NULL data; every optional part is assumed present). Scratch is 64-byte aligned, its
 *    content is undefined before and after.
 *  - Real-valued inputs may be F32, BF16 or F16 where the comment says "real"; arithmetic is fp32; outputs are F32
 *    unless said otherwise. Indices are I32. The last axis of every view is contiguous; leading axes may be strided.
 *    Shapes that do not fit together, a NULL that is not optional, a dtype that is not taken, an index out of range
 *    where the check is cheap: MTP_E_ARGUMENT naming the op and the view. At least one row: an empty tensor never
 *    reaches an op.
 *  - Views that the comment calls "stored" are F32, or of the dtype in which the device stores activations
 *    (mtp_device_info.stored): factors and results of products, and the gradients of those. The residual stream and its
 *    gradient, statistics of rows, losses and parameter gradients are F32 everywhere.
 *  - Every gradient output says MTP_OVERWRITE or MTP_ACCUMULATE; an optional output with data == NULL is not computed.
 *  - Outputs do not alias inputs unless the comment allows it.
 *  - Same inputs, same bits, with any number of threads: fixed reduction orders, no float atomics.
 *  - Row independence: what an op computes for a row (forward, and the gradient with respect to a row's input) has the
 *    same bits whatever other rows are computed with it and wherever it stands among them, provided that the device's
 *    rows_exact holds. Sums over rows (weight gradients) are equal to float order only.
 *
 * Shape letters: see mtp/tensor.h. y = x W^T with W stored [out, in], as torch.nn.Linear stores it. */
#ifndef MTP_OPS_H
#define MTP_OPS_H

#include "mtp/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mtp_device mtp_device; /* one backend instance: threads or a GPU with its streams and handles */

typedef enum mtp_write { MTP_OVERWRITE, MTP_ACCUMULATE } mtp_write;

typedef struct mtp_scratch {
    void *data;
    size_t size;
} mtp_scratch;

/* ---- rows ---------------------------------------------------------------------------------------------------- */

/* y[r] = round(factor * table[ids[r]]), factor = sqrt(width) rounded to the table's dtype and the product rounded to it
 * again: the scaled word embedding of Gemma as engines run it (transformers, Gemma4TextScaledWordEmbedding). */
typedef struct mtp_embed_args {
    mtp_view table; /* real [V, Hb] */
    mtp_view ids;   /* I32 [R]; an id outside [0, V) is MTP_E_ARGUMENT */
    mtp_view y;     /* stored [R, Hb] */
} mtp_embed_args;

/* The index of a row that is not there. */
enum { MTP_NO_ROW = -1 };

/* dst[r] (+)= src[index[r]] (gather) and dst[index[r]] (+)= src[r] (scatter; indices are distinct). Where index[r] is
 * MTP_NO_ROW a gather takes a row of zeros and a scatter passes row r over. */
typedef struct mtp_gather_args {
    mtp_view src;   /* gather: real [N, D]; scatter: F32 [R, D] */
    mtp_view index; /* I32 [R] */
    mtp_view dst;   /* gather: stored [R, D], F32 when added to; scatter: F32 [N, D] */
    mtp_write write;
} mtp_gather_args;

/* dst = src, converted; F32, BF16 (round to nearest even), F16 either way; the same shape. */
typedef struct mtp_convert_args {
    mtp_view src;
    mtp_view dst;
} mtp_convert_args;

/* y (+)= alpha * x over equal shapes, F32. */
typedef struct mtp_axpy_args {
    mtp_view x;
    mtp_view y;
    float alpha;
    mtp_write write;
} mtp_axpy_args;

/* ---- linear layers ------------------------------------------------------------------------------------------- */

/* fwd: y[R, N]  (+)= x[R, M] w[N, M]^T      x, w real, y stored
 * dx:  dx[R, M] (+)= dy[R, N] w[N, M]       w real, dy and dx stored
 * dw:  dw[N, M] (+)= dy[R, N]^T x[R, M]     x real, dy stored, dw F32
 * Every stored view may have either dtype by itself; a BF16 one that is added to is rounded again. w may be a column
 * block of a wider matrix (mtp_view_cols): that is how the pre-projection takes [embedding ; state] without a
 * concatenation. The three views of one layer keep their roles in all three ops. */
typedef struct mtp_linear_args {
    mtp_view x; /* fwd: input; dx: output; dw: input */
    mtp_view w; /* fwd, dx: input; dw: output */
    mtp_view y; /* fwd: output; dx, dw: input (dy) */
    mtp_write write;
    mtp_scratch scratch;
} mtp_linear_args;

/* ---- norms, residuals, activation ---------------------------------------------------------------------------- */

/* RMSNorm over the last axis (no +1 on the weight): y = x * rstd * w, rstd = (mean(x^2) + eps)^(-1/2).
 * Backward, d the width: dx = rstd * (w dy) - x * rstd^3 / d * sum(x w dy); dw = sum over rows of x rstd dy.
 * Heads are rows: pass [R * NH, D]. With cos and sin, which have a row for every NH rows of x, RoPE (mtp_rope_args)
 * follows: y = RoPE(RMSNorm(x; w)), and dy is the gradient of that. */
typedef struct mtp_rmsnorm_args {
    mtp_view x;    /* real [R, D] */
    mtp_view w;    /* real [D]; data NULL: no weight */
    mtp_view y;    /* stored [R, D]; fwd: output, may be x itself when both have one dtype; bwd: not used */
    mtp_view rstd; /* F32 [R]; fwd: output (optional); bwd: input */
    float eps;
    mtp_view cos; /* F32 [R / NH, D/2]; data NULL: no RoPE. With it x, y, dy and dx are stored and of one dtype */
    mtp_view sin;
    mtp_view dy; /* bwd: stored [R, D] */
    mtp_view dx; /* bwd: F32, or stored when overwritten, [R, D], optional; overwritten, it may be dy itself, or x
                    itself, where it has the same dtype */
    mtp_view dw; /* bwd: F32 [D], optional */
    mtp_write dx_write;
    mtp_write dw_write;
    mtp_scratch scratch;
} mtp_rmsnorm_args;

/* y = scalar * (residual + RMSNorm(x; w)): a Gemma post-norm with its residual, and the layer_scalar that ends a layer.
 * Backward: dresidual = scalar dy; dx = RMSNorm'(scalar dy); dscalar = sum dy (residual + RMSNorm(x; w)).
 * With next_w the norm that reads y is computed as well: next_y = RMSNorm(y; next_w). Backward: what stands for dy
 * above is then dy + RMSNorm'(next_dy), and y is an input. */
typedef struct mtp_residual_norm_args {
    mtp_view residual; /* F32 [R, D] */
    mtp_view x;        /* stored [R, D] */
    mtp_view w;        /* real [D] */
    mtp_view scalar;   /* F32 [1]; data NULL: 1 */
    mtp_view y;        /* F32 [R, D]; fwd: output, may be residual, or x where it is F32; bwd: input with next_w */
    mtp_view rstd;     /* F32 [R]; fwd: output; bwd: input */
    float eps;
    mtp_view next_w;    /* real [D]; data NULL: no next norm, and the views of it are not used */
    mtp_view next_y;    /* stored [R, D]; fwd: output */
    mtp_view next_rstd; /* F32 [R]; fwd: output; bwd: input */
    mtp_view next_dy;   /* bwd: stored [R, D] */
    mtp_view next_dw;   /* bwd: F32 [D], optional; written as dw_write says */
    mtp_view dy;        /* bwd: F32 [R, D]; with next_w optional: data NULL is zero */
    mtp_view dresidual; /* bwd: F32 [R, D], optional; may be dy itself when dresidual_write is MTP_OVERWRITE */
    mtp_view dx;        /* bwd: the dtype of x, [R, D], optional, overwritten; may be x itself */
    mtp_view dw;        /* bwd: F32 [D], optional */
    mtp_view dscalar;   /* bwd: F32 [1], optional */
    mtp_write dresidual_write;
    mtp_write dw_write;
    mtp_write dscalar_write;
    mtp_scratch scratch;
} mtp_residual_norm_args;

/* y = gelu_tanh(gate) * up, gelu_tanh(g) = 0.5 g (1 + tanh(sqrt(2/pi) (g + 0.044715 g^3))).
 * Backward: dgate = dy up gelu'(gate), dup = dy gelu(gate). Outputs may alias inputs elementwise. */
typedef struct mtp_geglu_args {
    mtp_view gate; /* stored [R, I], and all others of the same dtype */
    mtp_view up;
    mtp_view y;  /* fwd: output; bwd: optional output, the forward value once more (for the next dw) */
    mtp_view dy; /* bwd */
    mtp_view dgate;
    mtp_view dup;
} mtp_geglu_args;

/* ---- rotary embedding ---------------------------------------------------------------------------------------- */

/* cos[r, i] = cosf(angle), sin[r, i] = sinf(angle), angle = (float)position[r] * inv_freq[i], all in fp32: that is the
 * reference's arithmetic (double precision differs from it by 0.014 in cos at position 262,143). Positions 0..2^24. */
typedef struct mtp_rope_table_args {
    mtp_view positions; /* I32 [R] */
    mtp_view inv_freq;  /* F32 [D/2] */
    mtp_view cos;       /* F32 [R, D/2] */
    mtp_view sin;       /* F32 [R, D/2] */
} mtp_rope_table_args;

/* Half-split pairs (i, i + D/2): y_i = x_i c_i - x_{i+D/2} s_i, y_{i+D/2} = x_{i+D/2} c_i + x_i s_i.
 * bwd is the inverse rotation of the gradient: pass dy as x, dx as y. y may be x. */
typedef struct mtp_rope_args {
    mtp_view x;   /* stored [R, NH, D] */
    mtp_view cos; /* F32 [R, D/2] */
    mtp_view sin;
    mtp_view y; /* [R, NH, D], the dtype of x */
} mtp_rope_args;

/* ---- query-only attention ------------------------------------------------------------------------------------ */

/* o[r, h] = sum_j softmax_j(q[r, h] . K[j, g]) V[j, g] over the keys j in [key_begin[r], key_end[r]),
 * g = h / (NH / NKV), scale 1. lse[r, h] is the log-sum-exp of the scores. Backward gives dq only, K and V being
 * constants: P = exp(S - lse), dS = P (dO V^T - rowsum(dO o)), dq = dS K.
 * Keys outside a row's range are never part of its result; blocks of keys that no row of a tile sees are skipped.
 * Rows of one document stand together and tiles of keys start at doc_begin, so a row's bits do not depend on what else
 * is packed. Finite values only. */
typedef struct mtp_attention_args {
    mtp_view q;         /* stored [R, NH, D], D a multiple of 2, 16..512 */
    mtp_view kv;        /* real [S, 2, NKV, D]: index 0 K, 1 V; S tokens of all packed documents */
    mtp_view key_begin; /* I32 [R], doc_begin <= key_begin < key_end <= S */
    mtp_view key_end;   /* I32 [R] */
    mtp_view doc_begin; /* I32 [R]: first token of the row's document; not decreasing over rows */
    mtp_view o;         /* [R, NH, D], the dtype of q; fwd: output; bwd: input */
    mtp_view lse;       /* F32 [R, NH]; fwd: output; bwd: input */
    mtp_view do_;       /* bwd: [R, NH, D], the dtype of q */
    mtp_view dq;        /* bwd: [R, NH, D], the dtype of q, overwritten; may be do_ */
    mtp_scratch scratch;
} mtp_attention_args;

/* ---- heads and losses ---------------------------------------------------------------------------------------- */

/* selected[r] = ids of the k largest scores of row r, in descending order of score; ties: the lowest id first. */
typedef struct mtp_topk_args {
    mtp_view scores;   /* F32 [R, C] */
    mtp_view selected; /* I32 [R, k], 1 <= k <= C */
    mtp_scratch scratch;
} mtp_topk_args;

/* Cross-entropy of dense rows: loss[r] = logsumexp(logits[r]) - logits[r, target[r]];
 * dlogits[r] = scale[r] * (softmax(logits[r]) - onehot(target[r])), optional, may be logits itself. Used for the
 * centroid term over [R, C]. */
typedef struct mtp_xent_args {
    mtp_view logits; /* F32 [R, N] */
    mtp_view target; /* I32 [R] */
    mtp_view scale;  /* F32 [R]; needed with dlogits */
    mtp_view loss;   /* F32 [R], optional */
    mtp_view dlogits;
} mtp_xent_args;

/* The three heads share one argument struct. z[i] = x . e[i]; q = softmax over the head's candidates;
 * loss[r] = -log q[target[r]]; dz = scale[r] * (q - onehot). scale is w_k / N_k of the loss (the global mean), so dx
 * and de are gradients of the total loss. Without dx and de nothing backward is computed; without target there is no
 * loss and only argmax (and logits) come out.
 *
 * Rows of e and de, and places of logits, are slots: slot i stands for token order[i], and centroid c has the slots
 * [c P, (c + 1) P), one block of memory. target and argmax are tokens. head_flat may be called without order: then
 * slots are tokens.
 *
 * head_flat         candidates: all V tokens. Works through rows in chunks of at most logits_budget bytes of logits
 *                   (never less than 64 rows), three products a chunk. logits (optional): [R, V].
 * head_candidates   candidates: the tokens of the selected centroids, and of the target's centroid when it was not
 *                   selected (the forced centroid). argmax is taken without the forced centroid, as serving takes it.
 *                   miss[r] = 1 when the target's centroid was not selected. Grouped by centroid: each centroid's P
 *                   rows of e meet all rows that selected it in one product. logits (optional): [R, k * P], the
 *                   slots of the selected centroids in the order of `selected`.
 * head_hierarchical candidates: the P tokens of the target's centroid; needs target; argmax, miss, logits and selected
 *                   are not used. (The first level, -log p(centroid), is mtp_xent_args on the centroid scores.)
 * argmax ties: the lowest token id. */
typedef struct mtp_head_args {
    mtp_view x;        /* real [R, H] */
    mtp_view e;        /* real [V, H] */
    mtp_view order;    /* I32 [C, P]: the token of each slot (token_ordering); head_flat: optional */
    mtp_view slot_of;  /* I32 [V]: the slot of each token, the inverse of order; given with it */
    mtp_view selected; /* I32 [R, k]; head_candidates */
    mtp_view target;   /* I32 [R], optional where said */
    mtp_view scale;    /* F32 [R]; needed with dx or de */
    mtp_view loss;     /* F32 [R], optional */
    mtp_view argmax;   /* I32 [R], optional */
    mtp_view miss;     /* U8 [R], optional */
    mtp_view logits;   /* F32, optional, see above */
    mtp_view dx;       /* F32 [R, H], optional */
    mtp_view de;       /* F32 [V, H], optional */
    mtp_write dx_write;
    mtp_write de_write;
    size_t logits_budget; /* head_flat, and on cuda the pairs of the other two: bytes; 0 means 256 MiB */
    mtp_scratch scratch;
} mtp_head_args;

/* Sums over rows of the head, added to `sums` in double and in an order that only the places of the rows decide. Row i
 * belongs to draft step index[i] / rows_per_step; a row with index MTP_NO_ROW is passed over. Columns of a step:
 * MTP_TALLY_*. `joined`: the loss of a row is loss[i] + centroid_loss[i] (in fp32), and the column of centroid losses
 * gets nothing (hierarchical heads). Places outside of `sums`: MTP_E_ARGUMENT. */
enum {
    MTP_TALLY_LOSS,
    MTP_TALLY_CENTROID_LOSS,
    MTP_TALLY_COUNT,
    MTP_TALLY_CORRECT,
    MTP_TALLY_MISSED,
    MTP_TALLY_COLUMNS
};
typedef struct mtp_tally_args {
    mtp_view index;         /* I32 [M] */
    mtp_view target;        /* I32 [M] */
    mtp_view argmax;        /* I32 [M]; correct: argmax = target */
    mtp_view loss;          /* F32 [M] */
    mtp_view centroid_loss; /* F32 [M], optional (0) */
    mtp_view miss;          /* U8 [M], optional (0) */
    mtp_view sums;          /* F64 [K, MTP_TALLY_COLUMNS], contiguous */
    int64_t rows_per_step;
    bool joined;
} mtp_tally_args;

/* ---- optimizer ----------------------------------------------------------------------------------------------- */

/* The control block of an optimizer: F64 [MTP_CONTROL] in device memory, all 0 before the first update. The ops of an
 * update hand each other these numbers on the device, so that none of them waits and the host may look later. */
enum {
    MTP_CONTROL_LR,     /* learning rate of this update */
    MTP_CONTROL_SUM,    /* sum of the squares of all gradients: a result of sumsq */
    MTP_CONTROL_NORM,   /* its root */
    MTP_CONTROL_FACTOR, /* what the gradients are scaled by: min(1, max_norm / (norm + 1e-6)) */
    MTP_CONTROL_STEP,   /* updates made, this one included unless it is skipped */
    MTP_CONTROL_SKIP,   /* 1: this update changes nothing; 0 */
    MTP_CONTROL_BIAS1,  /* 1 - beta1^step */
    MTP_CONTROL_BIAS2,  /* 1 - beta2^step */
    MTP_CONTROL
};

/* *result (+)= sum of squares of x, accumulated in double in a fixed order. */
typedef struct mtp_sumsq_args {
    mtp_view x;      /* F32, contiguous, any shape */
    mtp_view result; /* F64 [1] */
    mtp_write write;
    mtp_scratch scratch;
} mtp_sumsq_args;

/* Begins an update whose sum of squares is in the control block: everything else of it. The update is skipped, and is
 * not counted as a step, when `skip` says so, or when the norm or a value of `watch` is not finite. */
typedef struct mtp_clip_args {
    mtp_view control;    /* F64 [MTP_CONTROL] */
    mtp_view watch;      /* F64 [n], optional: sums of losses, for instance */
    double lr, max_norm; /* max_norm 0: no clipping */
    double beta1, beta2;
    bool skip;
} mtp_clip_args;

/* AdamW as torch.optim.AdamW, with lr, step and factor of the control block; nothing when it says to skip.
 * g' = factor g; p *= 1 - lr * weight_decay; m = beta1 m + (1 - beta1) g'; v = beta2 v + (1 - beta2) g'^2;
 * p -= lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps).
 * A BF16 p is rounded stochastically: of its two neighbours the result is one, so that the mean is exact. The random
 * numbers are Philox4x32-10 of the key `seed` and the counter (step, place of the value), so they depend on nothing
 * else: not on how the values are cut into spans, nor on what ran before. */
typedef struct mtp_adamw_args {
    mtp_view p;      /* F32 or BF16 [n], updated in place; contiguous as all of these */
    mtp_view m, v;   /* F32 [n], updated in place */
    mtp_view g;      /* F32 [n] */
    mtp_view shadow; /* BF16 [n], optional, of an F32 p: p rounded to nearest even */
    mtp_view
        decays; /* U8 [ceil(n / 16)], optional: not 0 where weight decay applies to 16 values; absent: everywhere */
    mtp_view control; /* F64 [MTP_CONTROL] */
    double beta1, beta2, eps, weight_decay;
    uint64_t seed; /* for a BF16 p */
    int64_t place; /* the same: of p[0] among all values; a multiple of 16 */
} mtp_adamw_args;

/* ---- the table ------------------------------------------------------------------------------------------------ */

/* X(op, argument struct, has scratch) */
#define MTP_OP_LIST(X)                              \
    X(embed_fwd, mtp_embed_args, 0)                 \
    X(gather_rows, mtp_gather_args, 0)              \
    X(scatter_rows, mtp_gather_args, 0)             \
    X(convert, mtp_convert_args, 0)                 \
    X(axpy, mtp_axpy_args, 0)                       \
    X(linear_fwd, mtp_linear_args, 1)               \
    X(linear_dx, mtp_linear_args, 1)                \
    X(linear_dw, mtp_linear_args, 1)                \
    X(rmsnorm_fwd, mtp_rmsnorm_args, 0)             \
    X(rmsnorm_bwd, mtp_rmsnorm_args, 1)             \
    X(residual_norm_fwd, mtp_residual_norm_args, 0) \
    X(residual_norm_bwd, mtp_residual_norm_args, 1) \
    X(geglu_fwd, mtp_geglu_args, 0)                 \
    X(geglu_bwd, mtp_geglu_args, 0)                 \
    X(rope_table, mtp_rope_table_args, 0)           \
    X(rope_fwd, mtp_rope_args, 0)                   \
    X(rope_bwd, mtp_rope_args, 0)                   \
    X(attention_fwd, mtp_attention_args, 1)         \
    X(attention_bwd, mtp_attention_args, 1)         \
    X(topk, mtp_topk_args, 1)                       \
    X(xent, mtp_xent_args, 0)                       \
    X(head_flat, mtp_head_args, 1)                  \
    X(head_candidates, mtp_head_args, 1)            \
    X(head_hierarchical, mtp_head_args, 1)          \
    X(tally, mtp_tally_args, 0)                     \
    X(sumsq, mtp_sumsq_args, 1)                     \
    X(clip, mtp_clip_args, 0)                       \
    X(adamw, mtp_adamw_args, 0)

typedef struct mtp_device_options {
    int num_threads; /* cpu: worker threads of every op; 0: the number of cores this process may use */
    const char *isa; /* cpu: "plain", "avx2", "avx512"; NULL: the best this machine has. Not available: an error */
    int index;       /* cuda: which device, counted as the CUDA runtime counts them */
    bool bf16;       /* cuda: products take their factors rounded to bf16 and add in fp32; false: all is fp32 */
} mtp_device_options;

/* A device that a backend could open: a row of `mtp devices`. */
typedef struct mtp_device_row {
    char name[128];    /* "NVIDIA H200, sm_90, 132 multiprocessors" */
    uint64_t memory;   /* bytes in all */
    bool usable;       /* device_open would take it */
    char why_not[128]; /* what is missing when it is not usable */
} mtp_device_row;

/* What a device is, for `mtp --version` and the run's record. Strings live as long as the device. */
typedef struct mtp_device_info {
    const char *backend; /* "cpu", "cuda" */
    const char *isa;     /* "avx512"; "NVIDIA H200, sm_90" */
    const char *blas;    /* "OpenBLAS 0.3.21, kernel Cooperlake, pthread" */
    int num_threads;
    mtp_dtype factors;     /* of products: what converts nothing when it is handed to one; MTP_F32 or MTP_BF16 */
    mtp_dtype stored;      /* of activations and their gradients ("stored" views): MTP_F32 or MTP_BF16 */
    bool rows_exact;       /* row independence holds bit for bit with this BLAS; measured when the device opens */
    const char *rows_note; /* one sentence: what was measured; what follows when rows_exact is false */
    void *stream;          /* cuda: the cudaStream_t that ops run on, for what is to run between them; else NULL */
} mtp_device_info;

/* Devices of several processes, one of each, that exchange device memory without a way through their hosts. All
 * processes call the same functions in the same order, but for those that say otherwise. */
typedef struct mtp_device_group mtp_device_group;
enum { MTP_GROUP_ID = 128 };

typedef struct mtp_group_ops {
    /* A number that one process makes and that all open a group with. Not a function of all. */
    mtp_status (*make_id)(uint8_t id[MTP_GROUP_ID]);
    /* Blocks until all `size` are there. The device must outlive the group. */
    mtp_status (*open)(mtp_device *device, const uint8_t id[MTP_GROUP_ID], int rank, int size,
                       mtp_device_group **group);
    /* A mark behind all that was launched on the device so far. From any thread; not a function of all. Free it. */
    mtp_status (*mark)(mtp_device_group *group, void **mark);
    void (*mark_free)(mtp_device_group *group, void *mark); /* accepts NULL */
    /* Begin when the device has passed `mark` (NULL: now), return when the result is there; MTP_E_BACKEND when that
     * takes longer than `seconds`, another device failed, or the group was cancelled: then it is of no more use. From
     * one thread at a time. `sum`: F32 or BF16, in place; the order of the additions is the library's, the same for the
     * same devices and count. */
    mtp_status (*sum)(mtp_device_group *group, void *mark, void *memory, size_t count, mtp_dtype dtype, double seconds);
    mtp_status (*broadcast)(mtp_device_group *group, void *mark, void *memory, size_t bytes, int root, double seconds);
    /* Let an operation that is at work fail. From any thread; not a function of all. */
    void (*cancel)(mtp_device_group *group);
    void (*close)(mtp_device_group *group); /* accepts NULL */
} mtp_group_ops;

/* A place in the device's work. */
typedef struct mtp_mark mtp_mark;

/* Work that was captured once and is launched as a whole. */
typedef struct mtp_graph mtp_graph;

/* Between capture_begin and capture_end, which one thread calls, its calls put work into the graph and nothing runs.
 * Only ops, memory_zero, upload_async and download_async may be called in between; anything else, and a product of a
 * shape that the device has not run before, fails and spoils the capture. Arguments are kept as they are: views and
 * numbers; a launch reads and writes what lies at those addresses then, host memory of copies included. A graph is
 * launched in the order of the device's other work. */
typedef struct mtp_graph_ops {
    mtp_status (*capture_begin)(mtp_device *device);
    /* Ends the capture in any case; a spoiled one is MTP_E_BACKEND and no graph. */
    mtp_status (*capture_end)(mtp_device *device, mtp_graph **graph);
    mtp_status (*launch)(mtp_device *device, mtp_graph *graph);
    int64_t (*num_nodes)(const mtp_graph *graph);       /* kernels, copies and fills */
    void (*free)(mtp_device *device, mtp_graph *graph); /* waits for the device; accepts NULL */
} mtp_graph_ops;

/* What a device has done since it was opened. */
typedef struct mtp_device_counts {
    int64_t waits;       /* calls that had to wait for the device */
    int64_t allocations; /* of device and of pinned host memory */
    int64_t launches;    /* of graphs */
} mtp_device_counts;

typedef struct mtp_backend {
    const char *name;
    bool memory_is_host; /* device memory is ordinary memory: host views may be passed to ops as they are */
    /* The devices there are: up to `capacity` rows, *count may be more. */
    mtp_status (*device_list)(mtp_device_row *rows, int capacity, int *count);
    mtp_status (*device_open)(const mtp_device_options *options, mtp_device **device);
    void (*device_close)(mtp_device *device); /* accepts NULL */
    const mtp_device_info *(*device_info)(const mtp_device *device);
    mtp_device_counts (*device_counts)(const mtp_device *device);

    /* Device memory, 64-byte aligned. upload and download are complete when they return. */
    mtp_status (*memory_alloc)(mtp_device *device, size_t bytes, void **memory);
    void (*memory_free)(mtp_device *device, void *memory); /* accepts NULL */
    mtp_status (*memory_zero)(mtp_device *device, void *memory, size_t bytes);
    /* Host memory that upload and download are fastest with (pinned pages), 64-byte aligned. */
    mtp_status (*host_alloc)(mtp_device *device, size_t bytes, void **memory);
    void (*host_free)(mtp_device *device, void *memory); /* accepts NULL */
    mtp_status (*upload)(mtp_device *device, void *memory, const void *host, size_t bytes);
    mtp_status (*download)(mtp_device *device, void *host, const void *memory, size_t bytes);
    /* The same in the order of the ops, without waiting; complete when a mark behind them has been waited for. Host
     * memory from host_alloc must keep its content (upload) or stays undefined (download) until then. Other memory:
     * upload_async has read it when it returns, and is refused while capturing; download_async is refused. On a device
     * whose memory is the host's both copy at once. */
    mtp_status (*upload_async)(mtp_device *device, void *memory, const void *host, size_t bytes);
    mtp_status (*download_async)(mtp_device *device, void *host, const void *memory, size_t bytes);
    /* upload_async beside the ops: it begins when the device has passed `after` (NULL: at once), and from the next
     * uploads_join on what is launched comes behind it. Neither is captured. */
    mtp_status (*upload_beside)(mtp_device *device, void *memory, const void *host, size_t bytes, mtp_mark *after);
    mtp_status (*uploads_join)(mtp_device *device);
    /* A mark behind all that was launched so far: a new one when *mark is NULL, else that one is moved here. */
    mtp_status (*mark)(mtp_device *device, mtp_mark **mark);
    /* Return when all in front of the mark is done. Indices out of range that kernels met until then: MTP_E_ARGUMENT,
     * as download says it. */
    mtp_status (*mark_wait)(mtp_device *device, mtp_mark *mark);
    void (*mark_free)(mtp_device *device, mtp_mark *mark); /* accepts NULL */
    /* Bytes of device memory that are free, and all there are. */
    mtp_status (*memory_info)(mtp_device *device, uint64_t *left, uint64_t *total);
    const mtp_graph_ops *graph; /* NULL: nothing can be captured */
    const mtp_group_ops *group; /* NULL: its devices exchange nothing among themselves */

#define MTP_OP_ENTRY_0(op, args) mtp_status (*op)(mtp_device * device, const args *a);
#define MTP_OP_ENTRY_1(op, args)                          \
    mtp_status (*op)(mtp_device * device, const args *a); \
    size_t (*op##_scratch)(const mtp_device *device, const args *a);
#define MTP_OP_ENTRY(op, args, scratch) MTP_OP_ENTRY_##scratch(op, args)
    MTP_OP_LIST(MTP_OP_ENTRY)
#undef MTP_OP_ENTRY
#undef MTP_OP_ENTRY_0
#undef MTP_OP_ENTRY_1
} mtp_backend;

/* The CPU backend. A constant. */
const mtp_backend *mtp__backend_cpu(void);

#ifdef __cplusplus
}
#endif
#endif
