/* The gated activation of the MLP and its backward (formulas: ops.h). */
#include "check.h"
#include "cpu/cpu.h"

mtp_status mtp__cpu_geglu_fwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_fwd";
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    MTP__CHECK(op, gate, MTP_F32, -1, -1);
    MTP__CHECK(op, up, MTP_F32, rows, width);
    MTP__CHECK(op, y, MTP_F32, rows, width);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        device->vec->geglu(mtp__row(&a->y, r), mtp__row(&a->gate, r), mtp__row(&a->up, r), width);
    return MTP_OK;
}

mtp_status mtp__cpu_geglu_bwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_bwd";
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    MTP__CHECK(op, gate, MTP_F32, -1, -1);
    MTP__CHECK(op, up, MTP_F32, rows, width);
    MTP__CHECK(op, dy, MTP_F32, rows, width);
    MTP__CHECK_OPTIONAL(op, y, MTP_F32, rows, width);
    MTP__CHECK_OPTIONAL(op, dgate, MTP_F32, rows, width);
    MTP__CHECK_OPTIONAL(op, dup, MTP_F32, rows, width);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        device->vec->geglu_bwd(a->y.data ? mtp__row(&a->y, r) : NULL, a->dgate.data ? mtp__row(&a->dgate, r) : NULL,
                               a->dup.data ? mtp__row(&a->dup, r) : NULL, mtp__row(&a->gate, r), mtp__row(&a->up, r),
                               mtp__row(&a->dy, r), width);
    return MTP_OK;
}
