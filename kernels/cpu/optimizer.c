/* AdamW and the sum of squares that the gradient norm is made of (formulas: ops.h). */
#include <math.h>

#include "check.h"
#include "cpu/cpu.h"

/* The view is one stretch of memory of a known shape. */
static mtp_status check_flat(const char *op, const char *name, const mtp_view *view, const mtp_view *like)
{
    static const int64_t any[MTP_MAX_RANK] = {-1, -1, -1, -1, -1};
    if (view->rank < 1 || view->rank > MTP_MAX_RANK)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s has %d axes; it must have 1 to %d", op, name, (int)view->rank,
                        (int)MTP_MAX_RANK);
    MTP_TRY(mtp__check_view(op, name, view, MTP_F32, like->rank, like == view ? any : like->shape));
    int64_t stride = 1;
    for (int32_t axis = view->rank - 1; axis >= 0; axis--) {
        if (view->shape[axis] > 1 && view->stride[axis] != stride)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s is not contiguous (axis %d has stride %lld)", op, name, (int)axis,
                            (long long)view->stride[axis]);
        stride *= view->shape[axis];
    }
    return MTP_OK;
}

static mtp_status check_numbers(const mtp_adamw_args *a)
{
    if (a->step < 1) return MTP_FAIL(MTP_E_ARGUMENT, "adamw: step is %lld; it counts from 1", (long long)a->step);
    if (!(a->beta1 >= 0 && a->beta1 < 1 && a->beta2 >= 0 && a->beta2 < 1))
        return MTP_FAIL(MTP_E_ARGUMENT, "adamw: beta1 = %g, beta2 = %g; both must be in [0, 1)", a->beta1, a->beta2);
    if (!(a->eps > 0 && a->eps < INFINITY))
        return MTP_FAIL(MTP_E_ARGUMENT, "adamw: eps = %g; it must be positive", a->eps);
    if (!isfinite(a->lr) || !isfinite(a->weight_decay) || !isfinite(a->grad_scale))
        return MTP_FAIL(MTP_E_ARGUMENT, "adamw: lr = %g, weight_decay = %g, grad_scale = %g; all must be finite", a->lr,
                        a->weight_decay, a->grad_scale);
    return MTP_OK;
}

mtp_status mtp__cpu_adamw(mtp_device *device, const mtp_adamw_args *a)
{
    enum { block = 1 << 14 };
    MTP_TRY(check_flat("adamw", "p", &a->p, &a->p));
    MTP_TRY(check_flat("adamw", "m", &a->m, &a->p));
    MTP_TRY(check_flat("adamw", "v", &a->v, &a->p));
    MTP_TRY(check_flat("adamw", "g", &a->g, &a->p));
    MTP_TRY(check_numbers(a));
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
    MTP_TRY(check_flat("sumsq", "x", &a->x, &a->x));
    if (!a->result) return MTP_FAIL(MTP_E_ARGUMENT, "sumsq: result is NULL");
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
