/* What the arguments of an op must be, on every backend (the contract: ops.h). `op` is the name that messages begin
 * with, `stored` the dtype in which the device stores activations. Scratch, what only reading the data shows (ids,
 * order) and limits of one implementation are each backend's own checks. Internal to kernels/. */
#ifndef MTP_KERNELS_CHECK_ARGS_H
#define MTP_KERNELS_CHECK_ARGS_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The dtype that a stored view must have, which a device takes as F32 or as it stores: its own if that is allowed. */
static inline int mtp__stored_as(const mtp_view *view, mtp_dtype stored)
{
    return view->dtype == stored ? (int)stored : (int)MTP_F32;
}

mtp_status mtp__check_convert(const char *op, const mtp_convert_args *a);
mtp_status mtp__check_axpy(const char *op, const mtp_axpy_args *a);
mtp_status mtp__check_linear_fwd(const char *op, const mtp_linear_args *a, mtp_dtype stored);
mtp_status mtp__check_linear_dx(const char *op, const mtp_linear_args *a, mtp_dtype stored);
mtp_status mtp__check_linear_dw(const char *op, const mtp_linear_args *a, mtp_dtype stored);
mtp_status mtp__check_rope(const char *op, const mtp_rope_args *a, mtp_dtype stored);
mtp_status mtp__check_rmsnorm_fwd(const char *op, const mtp_rmsnorm_args *a, mtp_dtype stored);
mtp_status mtp__check_rmsnorm_bwd(const char *op, const mtp_rmsnorm_args *a, mtp_dtype stored);
mtp_status mtp__check_residual_norm_fwd(const char *op, const mtp_residual_norm_args *a, mtp_dtype stored);
mtp_status mtp__check_residual_norm_bwd(const char *op, const mtp_residual_norm_args *a, mtp_dtype stored);
mtp_status mtp__check_geglu_fwd(const char *op, const mtp_geglu_args *a, mtp_dtype stored);
mtp_status mtp__check_geglu_bwd(const char *op, const mtp_geglu_args *a, mtp_dtype stored);
mtp_status mtp__check_head_flat(const char *op, const mtp_head_args *a);
mtp_status mtp__check_head_candidates(const char *op, const mtp_head_args *a);
mtp_status mtp__check_head_hierarchical(const char *op, const mtp_head_args *a);
mtp_status mtp__check_tally(const char *op, const mtp_tally_args *a);
mtp_status mtp__check_adamw(const char *op, const mtp_adamw_args *a);
mtp_status mtp__check_sumsq(const char *op, const mtp_sumsq_args *a);
mtp_status mtp__check_clip(const char *op, const mtp_clip_args *a);

#ifdef __cplusplus
}
#endif
#endif
