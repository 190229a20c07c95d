/* Internal: what a drafter is made of. lib/model/weights.c fills it; forward.c and backward.c compute with it. */
#ifndef MTP_MODEL_DRAFTER_H
#define MTP_MODEL_DRAFTER_H

#include "base/context.h"
#include "mtp/drafter.h"

typedef struct mtp__param {
    char *name;
    int32_t rank;
    int64_t shape[2];
    int64_t count; /* product of the shape */
    mtp_dtype stored;
    bool trained;
    bool by_slot;    /* rows in the order of token_ordering (model/slots.h) */
    int64_t place;   /* of its first value among those of all parameters, a multiple of 16 */
    mtp_dtype dtype; /* of value: F32, or BF16 of a matrix whose master weights are that */
    void *value;     /* device, always present */
    void *shadow;    /* device, BF16: value rounded to nearest even, or NULL; see mtp__param_factor */
    float *grad;     /* device, NULL until mtp__drafter_alloc_grads, and for frozen parameters */
} mtp__param;

/* Parameters of one layer, by role. */
typedef struct mtp__layer {
    mtp_layer_type type;
    mtp__param *input_norm, *post_attention_norm;             /* [H] */
    mtp__param *pre_feedforward_norm, *post_feedforward_norm; /* [H] */
    mtp__param *q_proj;                                       /* [NH * D, H] */
    mtp__param *q_norm;                                       /* [D] */
    mtp__param *o_proj;                                       /* [H, NH * D] */
    mtp__param *gate_proj, *up_proj;                          /* [I, H] */
    mtp__param *down_proj;                                    /* [H, I] */
    mtp__param *layer_scalar;                                 /* [1] */
} mtp__layer;

struct mtp_drafter {
    mtp_context *context;
    mtp_drafter_config config;
    char *directory;    /* where it was loaded from */
    mtp__param *params; /* [num_params], in export order */
    int64_t num_params;
    mtp__param **placed; /* [num_params], in the order of values and gradients in memory: matrices as the backward pass
                            finishes their gradients, then vectors, then scalars */
    mtp_dtype masters;   /* of the matrices */
    mtp__param *embed;   /* model.embed_tokens.weight [V, H]: the head; by slot when ordered */
    mtp__param *final_norm;           /* model.norm.weight [H] */
    mtp__param *pre_projection;       /* [H, 2 * Hb]: columns [embedding ; state] */
    mtp__param *post_projection;      /* [Hb, H] */
    mtp__param *centroids;            /* masked_embedding.centroids.weight [C, H]; NULL when dense */
    mtp__layer *layers;               /* [num_layers] */
    int64_t *token_ordering;          /* host [V], as stored; NULL when dense */
    int32_t *order;                   /* device [C, P], the same as I32; NULL when dense */
    int32_t *slot_of;                 /* device [V], inverse permutation; NULL when dense */
    float *inv_freq[MTP_LAYER_TYPES]; /* device [D/2]; NULL for a type without layers */
    void *values;                     /* device memory behind all value pointers, one block */
    void *shadows;                    /* behind all shadow pointers; NULL: there are none */
    void *grads;                      /* device memory behind all grad pointers, one block */
    int64_t num_grads;                /* floats in it */
    mtp_view embedding;               /* device [V, Hb]: the table of a verifier; data NULL: not held (embedding.h) */
    const void *embedding_of;         /* the host table that it is a copy of */
    int embedding_holders;
};

/* Gradient memory for the parameters that are trained now (one zeroed block). Called once by a trainer. */
mtp_status mtp__drafter_alloc_grads(mtp_drafter *drafter);
/* Are there shadows of matrices whose masters are of this dtype. */
static inline bool mtp__has_shadows(const mtp_context *context, mtp_dtype masters)
{
    return masters == MTP_F32 && context->ops->device_info(context->device)->factors == MTP_BF16;
}
/* What products take of a matrix whose masters are of this dtype. */
static inline mtp_dtype mtp__factor_dtype(const mtp_context *context, mtp_dtype masters)
{
    return mtp__has_shadows(context, masters) ? MTP_BF16 : masters;
}
/* A view of a parameter's value ([n] or [rows, cols]), of its shadow and of its gradient (data NULL when it has none).
 */
mtp_view mtp__param_value(const mtp__param *param);
mtp_view mtp__param_shadow(const mtp__param *param);
mtp_view mtp__param_grad(const mtp__param *param);
/* What products take: the shadow where there is one, else the value. Devices whose products take bf16 factors have
 * shadows of fp32 matrices, so that no product converts them again; optimizer and mtp__param_write renew them. */
mtp_view mtp__param_factor(const mtp__param *param);
/* Values [first, first + count) of a parameter from and to host memory in fp32; a bf16 value is rounded to nearest
 * even. */
mtp_status mtp__param_write(const mtp_drafter *drafter, const mtp__param *param, int64_t first, const float *values,
                            int64_t count);
mtp_status mtp__param_read(const mtp_drafter *drafter, const mtp__param *param, int64_t first, float *values,
                           int64_t count);
/* Does weight decay apply: two axes and trained. */
static inline bool mtp__param_decays(const mtp__param *param)
{
    return param->trained && param->rank == 2;
}

#endif
