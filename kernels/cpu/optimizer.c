/* AdamW and the sum of squares that the gradient norm is made of (formulas: ops.h). */
#include <math.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

mtp_status mtp__cpu_adamw(mtp_device *device, const mtp_adamw_args *a)
{
    enum { block = 1 << 14 };
    MTP_TRY(mtp__check_adamw("adamw", a));
    const double bias1 = 1 - pow(a->beta1, (double)a->step), bias2 = 1 - pow(a->beta2, (double)a->step);
    const mtp__vec_adamw step = {
        .grad_scale = (float)a->grad_scale,
        .decay = (float)(1 - a->lr * a->weight_decay),
        .beta1 = (float)a->beta1,
        .rest1 = (float)(1 - a->beta1),
        .beta2 = (float)a->beta2,
        .rest2 = (float)(1 - a->beta2),
        .step_size = (float)(a->lr / bias1),
        .inv_root_bias2 = (float)(1 / sqrt(bias2)),
        .eps = (float)a->eps,
    };
    float *p = a->p.data, *m = a->m.data, *v = a->v.data;
    const float *g = a->g.data;
    const int64_t n = mtp_view_count(a->p);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < n; i += block)
        device->vec->adamw(p + i, m + i, v + i, g + i, n - i < block ? n - i : block, &step);
    return MTP_OK;
}

/* ---- sum of squares: one double a block, added in order ---------------------------------------------------------- */

enum { SUM_BLOCK = 1 << 16 };

static int64_t num_blocks(int64_t n)
{
    return (n + SUM_BLOCK - 1) / SUM_BLOCK;
}

size_t mtp__cpu_sumsq_scratch(const mtp_device *device, const mtp_sumsq_args *a)
{
    (void)device;
    return (size_t)num_blocks(mtp_view_count(a->x)) * sizeof(double);
}

mtp_status mtp__cpu_sumsq(mtp_device *device, const mtp_sumsq_args *a)
{
    MTP_TRY(mtp__check_sumsq("sumsq", a));
    MTP_TRY(mtp__check_scratch("sumsq", &a->scratch, mtp__cpu_sumsq_scratch(device, a)));
    const float *x = a->x.data;
    double *sums = a->scratch.data;
    const int64_t n = mtp_view_count(a->x), blocks = num_blocks(n);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < blocks; i++) {
        const int64_t first = i * SUM_BLOCK;
        sums[i] = device->vec->sumsq(x + first, n - first < SUM_BLOCK ? n - first : SUM_BLOCK);
    }
    double total = 0;
    for (int64_t i = 0; i < blocks; i++) total += sums[i];
    *a->result = total;
    return MTP_OK;
}
