/* The gated activation of the MLP and its backward (formulas: ops.h). */
#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

mtp_status mtp__cpu_geglu_fwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_fwd";
    MTP_TRY(mtp__check_geglu_fwd(op, a, MTP_F32));
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        device->vec->geglu(mtp__row(&a->y, r), mtp__row(&a->gate, r), mtp__row(&a->up, r), width);
    return MTP_OK;
}

mtp_status mtp__cpu_geglu_bwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_bwd";
    MTP_TRY(mtp__check_geglu_bwd(op, a, MTP_F32));
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        device->vec->geglu_bwd(a->y.data ? mtp__row(&a->y, r) : NULL, a->dgate.data ? mtp__row(&a->dgate, r) : NULL,
                               a->dup.data ? mtp__row(&a->dup, r) : NULL, mtp__row(&a->gate, r), mtp__row(&a->up, r),
                               mtp__row(&a->dy, r), width);
    return MTP_OK;
}
