/* Internal: AdamW with clipping over a list of named tensors. It knows tensors, not drafters, so that the reference
 * case of the optimizer alone runs through the same code as training.
 *
 * An update is launched and not waited for: learning rate, norm, clip factor, number of the step and whether it is
 * skipped stand in a control block on the device (ops.h), which can be read at once or later. */
#ifndef MTP_OPTIM_OPTIMIZER_H
#define MTP_OPTIM_OPTIMIZER_H

#include "base/context.h"
#include "mtp/optim.h"

/* Tensors are laid out and cut at multiples of so many values. */
enum { MTP__OPTIM_GRAIN = 16 };

/* One trained tensor, or with moments that are sharded over ranks a part of one: device memory of the caller, which
 * outlives the optimizer. Tensors that stand behind each other in the list, and in memory as well (each beginning at
 * the next multiple of 16 values behind the one before), are updated together; what lies between them is then updated
 * too, and stays 0 when value and gradient there are 0. */
typedef struct mtp__optim_tensor {
    const char *name; /* of the whole tensor */
    int64_t first;    /* place of its first value in the whole tensor; a part has views of one axis */
    int64_t place;    /* and among all values there are: a multiple of 16; for the rounding of BF16 values */
    mtp_view value;   /* F32, or BF16: rounded stochastically */
    mtp_view grad;    /* F32, the same shape */
    mtp_view shadow;  /* BF16, the same shape: an F32 value rounded, renewed by every update; data NULL: none */
    bool decays;      /* weight decay applies: two axes, not excluded by name */
} mtp__optim_tensor;

/* One of several ranks that share the moments. */
typedef struct mtp__optim_rank {
    int64_t rank, world_size;
} mtp__optim_rank;

/* Neighbouring tensors as one, of one axis. */
typedef struct mtp__optim_span {
    const char *name; /* of the first */
    int64_t place;
    mtp_view value, grad, shadow;
    mtp_view exp_avg, exp_avg_sq;
    mtp_view decays; /* U8, one for 16 values; data NULL: all do */
    double weight_decay;
} mtp__optim_span;

/* Values that one of the ranks updates and hands to the others. */
typedef struct mtp__optim_stretch {
    int root;
    mtp_view value, shadow;
} mtp__optim_stretch;

typedef struct mtp__optimizer {
    mtp_context *context;
    mtp_adamw_config config;
    int64_t num_tensors;
    mtp__optim_tensor *tensors; /* what is updated here: all of them, or this rank's share */
    mtp_view *exp_avg;          /* [num_tensors] first moments, shapes of the values */
    mtp_view *exp_avg_sq;       /* [num_tensors] second moments */
    int64_t num_spans;
    mtp__optim_span *spans; /* the same, neighbours together */
    int64_t num_measured;
    mtp_view *measured; /* gradients of all tensors, neighbours together, for the norm */
    int64_t num_stretches;
    mtp__optim_stretch *stretches; /* of all ranks; none without a rank */
    mtp_view control;              /* F64 [MTP_CONTROL] on the device */
    mtp_scratch scratch;           /* for the norm */
    void *moments;                 /* device memory behind the moments: all first ones, all second ones */
    size_t moment_bytes;
    void *extra; /* device memory behind control block, marks of decay and scratch */
    size_t extra_bytes;
} mtp__optimizer;

/* Zero moments for `tensors`, which are copied (names and views stay the caller's). With `rank`, moments of the rank's
 * share of the values only (lib/optim/share.h; NULL: of all): mtp__optimizer_step changes no other values; they are to
 * be handed from rank to rank, `stretches` says which. */
mtp_status mtp__optimizer_create(mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                                 const mtp_adamw_config *config, const mtp__optim_rank *rank,
                                 mtp__optimizer **optimizer);
void mtp__optimizer_free(mtp__optimizer *optimizer); /* accepts NULL */
/* Bytes of moments, and of everything else, that mtp__optimizer_create would allocate for tensors of these sizes; only
 * shapes are looked at. */
mtp_status mtp__optimizer_plan(const mtp_context *context, const mtp__optim_tensor *tensors, int64_t num_tensors,
                               const mtp__optim_rank *rank, size_t *moment_bytes, size_t *extra_bytes);

/* What an update is made with. */
typedef struct mtp__optim_update {
    double learning_rate;
    mtp_view watch; /* F64 [n] in device memory: no update when one of these is not finite; data NULL: nothing */
    bool skip;      /* no update: the host has found a reason already */
} mtp__optim_update;

/* Launch one update: the norm of all gradients, those of other ranks' shares too, in double and in a fixed order; the
 * clip factor; AdamW. It is skipped on the device, where every value, moment and the number of the step keep their
 * bits, when the norm is not finite or for a reason of `update`. Waits for nothing and allocates nothing. */
mtp_status mtp__optimizer_step(mtp__optimizer *optimizer, const mtp__optim_update *update);

/* What became of an update. */
typedef struct mtp__optim_result {
    double learning_rate;
    double norm;   /* not finite when a gradient is not */
    double factor; /* that the gradients were scaled by */
    int64_t step;  /* updates made so far, skipped ones not counted */
    bool skipped;
} mtp__optim_result;

/* Of the last one that was launched; waits for the device. */
mtp_status mtp__optimizer_read(mtp__optimizer *optimizer, mtp__optim_result *result);
/* The same from a copy of the control block, which a download that is ordered behind the step has made. */
mtp__optim_result mtp__optim_result_of(const double control[MTP_CONTROL]);
/* Go on behind `step` updates. */
mtp_status mtp__optimizer_set_step(mtp__optimizer *optimizer, int64_t step);

#endif
