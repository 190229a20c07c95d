/* What a training step cannot do without: the floating-point operations of one supervised position with all its draft
 * steps, 2 a multiply-add. At a rate of operations that gives the least time of a step; measured steps are given in
 * percent of it. Counted exactly once: products over the keys that a row sees, gradients of all weights, no gradient of
 * K and V, the token half of the pre-projection once a position, scores once again in the backward pass of attention
 * and of the centroid head. Left out: norms, RoPE, GeGLU, residuals, the optimizer (under 1 % of the operations). */
#ifndef MTP_BENCH_FLOOR_H
#define MTP_BENCH_FLOOR_H

#include "mtp/drafter.h"
#include "mtp/loss.h"

typedef enum floor_part {
    FLOOR_PRE_PROJECTION,
    FLOOR_POST_PROJECTION,
    FLOOR_Q_AND_O,
    FLOOR_MLP,
    FLOOR_SLIDING, /* attention of the sliding layers */
    FLOOR_FULL,    /* of the layers that see all */
    FLOOR_HEAD,
    FLOOR_PARTS
} floor_part;

typedef struct floor_count {
    double forward[FLOOR_PARTS], backward[FLOOR_PARTS];
    double total;
} floor_count;

/* Of a position, in the mean over a document of `document` tokens that are all supervised; `K` draft steps. */
floor_count floor_operations(const mtp_drafter_config *config, mtp_head_mode head, int64_t document, int64_t K);

#endif
