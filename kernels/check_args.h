/* What the arguments of an op must be, on every backend (the contract: ops.h). `op` is the name that messages begin
 * with. Scratch, what only reading the data shows (ids, order) and limits of one implementation are each backend's own
 * checks. Internal to kernels/. */
#ifndef MTP_KERNELS_CHECK_ARGS_H
#define MTP_KERNELS_CHECK_ARGS_H

#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

mtp_status mtp__check_convert(const char *op, const mtp_convert_args *a);
mtp_status mtp__check_axpy(const char *op, const mtp_axpy_args *a);
mtp_status mtp__check_rmsnorm_fwd(const char *op, const mtp_rmsnorm_args *a);
mtp_status mtp__check_rmsnorm_bwd(const char *op, const mtp_rmsnorm_args *a);
mtp_status mtp__check_residual_norm_fwd(const char *op, const mtp_residual_norm_args *a);
mtp_status mtp__check_residual_norm_bwd(const char *op, const mtp_residual_norm_args *a);
mtp_status mtp__check_geglu_fwd(const char *op, const mtp_geglu_args *a);
mtp_status mtp__check_geglu_bwd(const char *op, const mtp_geglu_args *a);
mtp_status mtp__check_head_flat(const char *op, const mtp_head_args *a);
mtp_status mtp__check_head_candidates(const char *op, const mtp_head_args *a);
mtp_status mtp__check_head_hierarchical(const char *op, const mtp_head_args *a);
mtp_status mtp__check_tally(const char *op, const mtp_tally_args *a);
mtp_status mtp__check_adamw(const char *op, const mtp_adamw_args *a);
mtp_status mtp__check_sumsq(const char *op, const mtp_sumsq_args *a);

#ifdef __cplusplus
}
#endif
#endif
