#include "check_args.h"

#include <math.h>

#include "check.h"

/* ---- rows -------------------------------------------------------------------------------------------------------- */

/* Two views of one shape, of any rank. */
static mtp_status check_pair(const char *op, const char *from_name, const mtp_view *from, const char *to_name,
                             const mtp_view *to, int dtype)
{
    static const int64_t any[MTP_MAX_RANK] = {-1, -1, -1, -1, -1};
    if (from->rank < 1 || from->rank > MTP_MAX_RANK)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s has %d axes; it must have 1 to %d", op, from_name, (int)from->rank,
                        (int)MTP_MAX_RANK);
    MTP_TRY(mtp__check_view(op, from_name, from, dtype, from->rank, any));
    return mtp__check_view(op, to_name, to, dtype, from->rank, from->shape);
}

mtp_status mtp__check_convert(const char *op, const mtp_convert_args *a)
{
    return check_pair(op, "src", &a->src, "dst", &a->dst, MTP__REAL);
}

mtp_status mtp__check_axpy(const char *op, const mtp_axpy_args *a)
{
    return check_pair(op, "x", &a->x, "y", &a->y, MTP_F32);
}

/* ---- linear layers ----------------------------------------------------------------------------------------------- */

mtp_status mtp__check_linear_fwd(const char *op, const mtp_linear_args *a, mtp_dtype stored)
{
    MTP__CHECK(op, x, MTP__REAL, -1, -1);
    MTP__CHECK(op, w, MTP__REAL, -1, a->x.shape[1]);
    MTP__CHECK(op, y, mtp__stored_as(&a->y, stored), a->x.shape[0], a->w.shape[0]);
    return MTP_OK;
}

mtp_status mtp__check_linear_dx(const char *op, const mtp_linear_args *a, mtp_dtype stored)
{
    MTP__CHECK(op, x, mtp__stored_as(&a->x, stored), -1, -1);
    MTP__CHECK(op, w, MTP__REAL, -1, a->x.shape[1]);
    MTP__CHECK(op, y, mtp__stored_as(&a->y, stored), a->x.shape[0], a->w.shape[0]);
    return MTP_OK;
}

mtp_status mtp__check_linear_dw(const char *op, const mtp_linear_args *a, mtp_dtype stored)
{
    MTP__CHECK(op, x, MTP__REAL, -1, -1);
    MTP__CHECK(op, w, MTP_F32, -1, a->x.shape[1]);
    MTP__CHECK(op, y, mtp__stored_as(&a->y, stored), a->x.shape[0], a->w.shape[0]);
    return MTP_OK;
}

/* ---- norms ------------------------------------------------------------------------------------------------------- */

/* Two views that may be one must then have one dtype: a row is read after parts of it were written. */
static mtp_status check_alias(const char *op, const char *to_name, const mtp_view *to, const char *from_name,
                              const mtp_view *from)
{
    if (!to->data || to->data != from->data || to->dtype == from->dtype) return MTP_OK;
    return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s is %s and in the place of %s, which is %s; use memory of its own", op,
                    to_name, mtp_dtype_name(to->dtype), from_name, mtp_dtype_name(from->dtype));
}

/* RoPE behind a norm: x has the dtype of the stored views, and each row of cos the same number of rows of x. */
static mtp_status check_norm_rope(const char *op, const mtp_rmsnorm_args *a, mtp_dtype dtype)
{
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    MTP__CHECK(op, x, dtype, rows, width);
    if (width % 2 != 0)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: x has heads of width %lld; with cos it must be even", op,
                        (long long)width);
    MTP__CHECK(op, cos, MTP_F32, -1, width / 2);
    MTP__CHECK(op, sin, MTP_F32, a->cos.shape[0], width / 2);
    if (rows % a->cos.shape[0] != 0)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: x has %lld rows, cos %lld; each row of cos must belong to the same number",
                        op, (long long)rows, (long long)a->cos.shape[0]);
    return MTP_OK;
}

mtp_status mtp__check_rmsnorm_fwd(const char *op, const mtp_rmsnorm_args *a, mtp_dtype stored)
{
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    MTP__CHECK(op, x, MTP__REAL, -1, -1);
    MTP__CHECK_OPTIONAL(op, w, MTP__REAL, width);
    MTP__CHECK(op, y, mtp__stored_as(&a->y, stored), rows, width);
    MTP__CHECK_OPTIONAL(op, rstd, MTP_F32, rows);
    if (a->cos.data) MTP_TRY(check_norm_rope(op, a, a->y.dtype));
    return check_alias(op, "y", &a->y, "x", &a->x);
}

mtp_status mtp__check_rmsnorm_bwd(const char *op, const mtp_rmsnorm_args *a, mtp_dtype stored)
{
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    MTP__CHECK(op, x, MTP__REAL, -1, -1);
    MTP__CHECK_OPTIONAL(op, w, MTP__REAL, width);
    MTP__CHECK(op, rstd, MTP_F32, rows);
    MTP__CHECK(op, dy, mtp__stored_as(&a->dy, stored), rows, width);
    const int dx_dtype = a->dx_write == MTP_ACCUMULATE ? (int)MTP_F32 : mtp__stored_as(&a->dx, stored);
    MTP__CHECK_OPTIONAL(op, dx, a->cos.data ? (int)a->dy.dtype : dx_dtype, rows, width);
    MTP__CHECK_OPTIONAL(op, dw, MTP_F32, width);
    if (a->cos.data) MTP_TRY(check_norm_rope(op, a, a->dy.dtype));
    if (a->dx.data && a->dx_write == MTP_ACCUMULATE) {
        if (a->dx.data == a->dy.data || a->dx.data == a->x.data)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: dx may be %s only when it is overwritten", op,
                            a->dx.data == a->dy.data ? "dy" : "x");
        if (a->cos.data) return MTP_FAIL(MTP_E_ARGUMENT, "%s: with cos dx is overwritten, not added to", op);
    }
    MTP_TRY(check_alias(op, "dx", &a->dx, "dy", &a->dy));
    return check_alias(op, "dx", &a->dx, "x", &a->x);
}

mtp_status mtp__check_residual_norm_fwd(const char *op, const mtp_residual_norm_args *a, mtp_dtype stored)
{
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    MTP__CHECK(op, x, mtp__stored_as(&a->x, stored), -1, -1);
    MTP__CHECK(op, residual, MTP_F32, rows, width);
    MTP__CHECK(op, w, MTP__REAL, width);
    MTP__CHECK_OPTIONAL(op, scalar, MTP_F32, 1);
    MTP__CHECK(op, y, MTP_F32, rows, width);
    MTP__CHECK(op, rstd, MTP_F32, rows);
    if (a->next_w.data) {
        MTP__CHECK(op, next_w, MTP__REAL, width);
        MTP__CHECK(op, next_y, a->x.dtype, rows, width);
        MTP__CHECK(op, next_rstd, MTP_F32, rows);
    }
    return check_alias(op, "y", &a->y, "x", &a->x);
}

mtp_status mtp__check_residual_norm_bwd(const char *op, const mtp_residual_norm_args *a, mtp_dtype stored)
{
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    MTP__CHECK(op, x, mtp__stored_as(&a->x, stored), -1, -1);
    MTP__CHECK(op, w, MTP__REAL, width);
    MTP__CHECK_OPTIONAL(op, scalar, MTP_F32, 1);
    MTP__CHECK(op, rstd, MTP_F32, rows);
    if (a->next_w.data) {
        MTP__CHECK(op, next_w, MTP__REAL, width);
        MTP__CHECK(op, y, MTP_F32, rows, width);
        MTP__CHECK(op, next_rstd, MTP_F32, rows);
        MTP__CHECK(op, next_dy, a->x.dtype, rows, width);
        MTP__CHECK_OPTIONAL(op, next_dw, MTP_F32, width);
    }
    if (!a->next_w.data || a->dy.data) MTP__CHECK(op, dy, MTP_F32, rows, width);
    MTP__CHECK_OPTIONAL(op, dresidual, MTP_F32, rows, width);
    MTP__CHECK_OPTIONAL(op, dx, a->x.dtype, rows, width);
    MTP__CHECK_OPTIONAL(op, dw, MTP_F32, width);
    MTP__CHECK_OPTIONAL(op, dscalar, MTP_F32, 1);
    if (a->dscalar.data) MTP__CHECK(op, residual, MTP_F32, rows, width);
    if (a->dresidual.data && a->dresidual.data == a->dy.data && a->dresidual_write == MTP_ACCUMULATE)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: dresidual may be dy only when it is overwritten", op);
    return MTP_OK;
}

/* ---- MLP --------------------------------------------------------------------------------------------------------- */

mtp_status mtp__check_geglu_fwd(const char *op, const mtp_geglu_args *a, mtp_dtype stored)
{
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    const int dtype = mtp__stored_as(&a->gate, stored);
    MTP__CHECK(op, gate, dtype, -1, -1);
    MTP__CHECK(op, up, dtype, rows, width);
    MTP__CHECK(op, y, dtype, rows, width);
    return MTP_OK;
}

mtp_status mtp__check_geglu_bwd(const char *op, const mtp_geglu_args *a, mtp_dtype stored)
{
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    const int dtype = mtp__stored_as(&a->gate, stored);
    MTP__CHECK(op, gate, dtype, -1, -1);
    MTP__CHECK(op, up, dtype, rows, width);
    MTP__CHECK(op, dy, dtype, rows, width);
    MTP__CHECK_OPTIONAL(op, y, dtype, rows, width);
    MTP__CHECK_OPTIONAL(op, dgate, dtype, rows, width);
    MTP__CHECK_OPTIONAL(op, dup, dtype, rows, width);
    return MTP_OK;
}

/* ---- rotary embedding -------------------------------------------------------------------------------------------- */

mtp_status mtp__check_rope(const char *op, const mtp_rope_args *a, mtp_dtype stored)
{
    const int64_t rows = a->x.shape[0], heads = a->x.shape[1], width = a->x.shape[2];
    MTP__CHECK(op, x, mtp__stored_as(&a->x, stored), -1, -1, -1);
    if (width % 2 != 0)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: x has heads of width %lld; it must be even", op, (long long)width);
    MTP__CHECK(op, cos, MTP_F32, rows, width / 2);
    MTP__CHECK(op, sin, MTP_F32, rows, width / 2);
    MTP__CHECK(op, y, a->x.dtype, rows, heads, width);
    return MTP_OK;
}

/* ---- heads ------------------------------------------------------------------------------------------------------- */

/* The tokens of the slots. */
static mtp_status check_order(const char *op, const mtp_head_args *a)
{
    const int64_t V = a->e.shape[0];
    MTP__CHECK(op, order, MTP_I32, -1, -1);
    MTP__CHECK(op, slot_of, MTP_I32, V);
    const int64_t C = a->order.shape[0], P = a->order.shape[1];
    if (C * P != V || V > INT32_MAX || (C > 1 && a->order.stride[0] != P))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: order is [%lld, %lld]; it must be contiguous and name the %lld rows of e",
                        op, (long long)C, (long long)P, (long long)V);
    return MTP_OK;
}

static mtp_status check_grouped(const char *op, const mtp_head_args *a)
{
    MTP__CHECK(op, x, MTP__REAL, -1, -1);
    const int64_t R = a->x.shape[0], H = a->x.shape[1];
    MTP__CHECK(op, e, MTP__REAL, -1, H);
    const int64_t V = a->e.shape[0];
    MTP_TRY(check_order(op, a));
    MTP__CHECK_OPTIONAL(op, target, MTP_I32, R);
    MTP__CHECK_OPTIONAL(op, loss, MTP_F32, R);
    MTP__CHECK_OPTIONAL(op, dx, MTP_F32, R, H);
    MTP__CHECK_OPTIONAL(op, de, MTP_F32, V, H);
    if (a->dx.data || a->de.data) MTP__CHECK(op, scale, MTP_F32, R);
    return MTP_OK;
}

mtp_status mtp__check_head_flat(const char *op, const mtp_head_args *a)
{
    MTP__CHECK(op, x, MTP__REAL, -1, -1);
    const int64_t R = a->x.shape[0], H = a->x.shape[1];
    MTP__CHECK(op, e, MTP__REAL, -1, H);
    const int64_t V = a->e.shape[0];
    if (a->order.data || a->slot_of.data) MTP_TRY(check_order(op, a));
    MTP__CHECK_OPTIONAL(op, target, MTP_I32, R);
    MTP__CHECK_OPTIONAL(op, loss, MTP_F32, R);
    MTP__CHECK_OPTIONAL(op, argmax, MTP_I32, R);
    MTP__CHECK_OPTIONAL(op, logits, MTP_F32, R, V);
    MTP__CHECK_OPTIONAL(op, dx, MTP_F32, R, H);
    MTP__CHECK_OPTIONAL(op, de, MTP_F32, V, H);
    if (a->miss.data) return MTP_FAIL(MTP_E_ARGUMENT, "%s: miss has no meaning here; leave it out", op);
    if ((a->loss.data || a->dx.data || a->de.data) && !a->target.data)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: loss, dx and de need target", op);
    if (a->dx.data || a->de.data) MTP__CHECK(op, scale, MTP_F32, R);
    return MTP_OK;
}

mtp_status mtp__check_head_candidates(const char *op, const mtp_head_args *a)
{
    MTP_TRY(check_grouped(op, a));
    const int64_t R = a->x.shape[0], C = a->order.shape[0], P = a->order.shape[1];
    MTP__CHECK(op, selected, MTP_I32, R, -1);
    const int64_t k = a->selected.shape[1], width = k * P;
    if (k > C)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: selected names %lld of %lld centroids", op, (long long)k, (long long)C);
    MTP__CHECK_OPTIONAL(op, argmax, MTP_I32, R);
    MTP__CHECK_OPTIONAL(op, miss, MTP_U8, R);
    MTP__CHECK_OPTIONAL(op, logits, MTP_F32, R, width);
    if (!a->target.data && (a->loss.data || a->miss.data || a->dx.data || a->de.data))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: loss, miss, dx and de need target", op);
    return MTP_OK;
}

mtp_status mtp__check_head_hierarchical(const char *op, const mtp_head_args *a)
{
    MTP_TRY(check_grouped(op, a));
    MTP__CHECK(op, target, MTP_I32, a->x.shape[0]);
    return MTP_OK;
}

mtp_status mtp__check_tally(const char *op, const mtp_tally_args *a)
{
    const int64_t m = a->index.shape[0];
    MTP__CHECK(op, index, MTP_I32, -1);
    MTP__CHECK(op, target, MTP_I32, m);
    MTP__CHECK(op, argmax, MTP_I32, m);
    MTP__CHECK(op, loss, MTP_F32, m);
    MTP__CHECK_OPTIONAL(op, centroid_loss, MTP_F32, m);
    MTP__CHECK_OPTIONAL(op, miss, MTP_U8, m);
    MTP__CHECK(op, sums, MTP_F64, -1, MTP_TALLY_COLUMNS);
    if (a->sums.shape[0] > 1 && a->sums.stride[0] != MTP_TALLY_COLUMNS)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: rows of sums are %lld apart; it must be contiguous", op,
                        (long long)a->sums.stride[0]);
    if (a->rows_per_step < 1 || a->rows_per_step > INT32_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: rows_per_step is %lld; it must be 1 to %d", op,
                        (long long)a->rows_per_step, INT32_MAX);
    return MTP_OK;
}

/* ---- optimizer --------------------------------------------------------------------------------------------------- */

/* The view is one stretch of memory, of the shape of `like`, which may be the view itself. */
static mtp_status check_flat(const char *op, const char *name, const mtp_view *view, int dtype, const mtp_view *like)
{
    static const int64_t any[MTP_MAX_RANK] = {-1, -1, -1, -1, -1};
    if (view->rank < 1 || view->rank > MTP_MAX_RANK)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s has %d axes; it must have 1 to %d", op, name, (int)view->rank,
                        (int)MTP_MAX_RANK);
    MTP_TRY(mtp__check_view(op, name, view, dtype, like->rank, like == view ? any : like->shape));
    int64_t stride = 1;
    for (int32_t axis = view->rank - 1; axis >= 0; axis--) {
        if (view->shape[axis] > 1 && view->stride[axis] != stride)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s is not contiguous (axis %d has stride %lld)", op, name, (int)axis,
                            (long long)view->stride[axis]);
        stride *= view->shape[axis];
    }
    return MTP_OK;
}

static mtp_status check_betas(const char *op, double beta1, double beta2)
{
    if (beta1 >= 0 && beta1 < 1 && beta2 >= 0 && beta2 < 1) return MTP_OK;
    return MTP_FAIL(MTP_E_ARGUMENT, "%s: beta1 = %g, beta2 = %g; both must be in [0, 1)", op, beta1, beta2);
}

mtp_status mtp__check_adamw(const char *op, const mtp_adamw_args *a)
{
    const bool rounded = a->p.dtype == MTP_BF16;
    MTP_TRY(check_flat(op, "p", &a->p, rounded ? MTP_BF16 : MTP_F32, &a->p));
    MTP_TRY(check_flat(op, "m", &a->m, MTP_F32, &a->p));
    MTP_TRY(check_flat(op, "v", &a->v, MTP_F32, &a->p));
    MTP_TRY(check_flat(op, "g", &a->g, MTP_F32, &a->p));
    if (a->shadow.data) MTP_TRY(check_flat(op, "shadow", &a->shadow, MTP_BF16, &a->p));
    MTP__CHECK_OPTIONAL(op, decays, MTP_U8, (mtp_view_count(a->p) + 15) / 16);
    MTP__CHECK(op, control, MTP_F64, MTP_CONTROL);
    if (rounded && a->shadow.data) return MTP_FAIL(MTP_E_ARGUMENT, "%s: a BF16 p has no shadow", op);
    if (rounded && (a->place < 0 || a->place % 16 != 0))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: place is %lld; it must be a multiple of 16", op, (long long)a->place);
    MTP_TRY(check_betas(op, a->beta1, a->beta2));
    if (!(a->eps > 0 && a->eps < INFINITY))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: eps = %g; it must be positive", op, a->eps);
    if (!isfinite(a->weight_decay))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: weight_decay = %g; it must be finite", op, a->weight_decay);
    return MTP_OK;
}

mtp_status mtp__check_sumsq(const char *op, const mtp_sumsq_args *a)
{
    MTP_TRY(check_flat(op, "x", &a->x, MTP_F32, &a->x));
    MTP__CHECK(op, result, MTP_F64, 1);
    return MTP_OK;
}

mtp_status mtp__check_clip(const char *op, const mtp_clip_args *a)
{
    MTP__CHECK(op, control, MTP_F64, MTP_CONTROL);
    MTP__CHECK_OPTIONAL(op, watch, MTP_F64, -1);
    MTP_TRY(check_betas(op, a->beta1, a->beta2));
    if (!isfinite(a->lr) || !(a->max_norm >= 0 && a->max_norm < INFINITY))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: lr = %g, max_norm = %g; both must be finite, and max_norm not negative",
                        op, a->lr, a->max_norm);
    return MTP_OK;
}
