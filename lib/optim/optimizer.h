/* Internal: AdamW with clipping over a list of named tensors. It knows tensors, not drafters, so that the reference
 * case of the optimizer alone runs through the same code as training. */
#ifndef MTP_OPTIM_OPTIMIZER_H
#define MTP_OPTIM_OPTIMIZER_H

#include "base/context.h"
#include "mtp/optim.h"

/* One trained tensor, or with moments that are sharded over ranks a part of one: F32 device memory of the caller, which
 * outlives the optimizer. */
typedef struct mtp__optim_tensor {
    const char *name; /* of the whole tensor */
    int64_t first;    /* place of its first value in the whole tensor; a part has views of one axis */
    mtp_view value;
    mtp_view grad; /* same shape */
    bool decays;   /* weight decay applies: two axes, not excluded by name */
} mtp__optim_tensor;

/* One of several ranks that share the moments. */
typedef struct mtp__optim_rank {
    int64_t rank, world_size;
} mtp__optim_rank;

typedef struct mtp__optimizer {
    mtp_context *context;
    mtp_adamw_config config;
    int64_t step; /* updates done */
    int64_t num_tensors;
    mtp__optim_tensor *tensors; /* what is updated here: all of them, or this rank's share */
    int64_t num_measured;
    mtp__optim_tensor *measured; /* all of them, for the norm */
    mtp_view *exp_avg;           /* [num_tensors] first moments, shapes of the values */
    mtp_view *exp_avg_sq;        /* [num_tensors] second moments */
    void *moments;               /* device memory behind both */
    size_t moment_bytes;
    mtp_scratch scratch; /* device memory, for the norm */
} mtp__optimizer;

/* Zero moments for `tensors`, which are copied (names and views stay the caller's). */
mtp_status mtp__optimizer_create(mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                 const mtp_adamw_config *config, mtp__optimizer **optimizer);
/* With moments of the rank's share of the values only (lib/optim/share.h; NULL: of all). mtp__optimizer_step changes no
 * other values; they are to be handed from rank to rank. */
mtp_status mtp__optimizer_create_share(mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                       const mtp_adamw_config *config, const mtp__optim_rank *rank,
                                       mtp__optimizer **optimizer);
void mtp__optimizer_free(mtp__optimizer *optimizer); /* accepts NULL */
/* Bytes of moments and scratch that mtp__optimizer_create would allocate, without a rank, for tensors of these sizes;
 * only shapes are looked at. */
void mtp__optimizer_plan(const mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                         size_t *moment_bytes, size_t *scratch_bytes);

/* Euclidean norm of all gradients together, those of other ranks' shares too, in double and in a fixed order. Not
 * finite when a gradient is not. */
mtp_status mtp__optimizer_grad_norm(mtp__optimizer *optimizer, double *norm);
/* The factor that clipping applies to gradients of this norm. */
double mtp__optimizer_clip(const mtp_adamw_config *config, double norm);
/* One update with gradients scaled by grad_scale; counts the step. Allocates nothing. */
mtp_status mtp__optimizer_step(mtp__optimizer *optimizer, double learning_rate, double grad_scale);

#endif
