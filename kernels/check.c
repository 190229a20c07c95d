#include "check.h"

#include <stdio.h>

/* "F32 [8, any, 256]" */
static void describe(char *text, size_t size, const char *dtype, int32_t rank, const int64_t *shape)
{
    int used = snprintf(text, size, "%s [", dtype);
    for (int32_t i = 0; i < rank && used >= 0 && (size_t)used < size; i++) {
        const char *comma = i ? ", " : "";
        const size_t rest = size - (size_t)used;
        if (shape[i] < 0)
            used += snprintf(text + used, rest, "%sany", comma);
        else
            used += snprintf(text + used, rest, "%s%lld", comma, (long long)shape[i]);
    }
    if (used >= 0 && (size_t)used < size) snprintf(text + used, size - (size_t)used, "]");
}

static bool fits(const mtp_view *view, int dtype, int32_t rank, const int64_t *shape)
{
    if (dtype == MTP__REAL ? !mtp_dtype_is_compute(view->dtype) : (int)view->dtype != dtype) return false;
    if (view->rank != rank) return false;
    for (int32_t i = 0; i < rank; i++)
        if (shape[i] < 0 ? view->shape[i] < 1 : view->shape[i] != shape[i]) return false;
    return true;
}

mtp_status mtp__check_view(const char *op, const char *name, const mtp_view *view, int dtype, int32_t rank,
                           const int64_t *shape)
{
    if (!view->data) return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s is missing (data is NULL)", op, name);
    if (!fits(view, dtype, rank, shape)) {
        char want[160], got[160];
        const int32_t got_rank = view->rank >= 0 && view->rank <= MTP_MAX_RANK ? view->rank : 0;
        describe(want, sizeof want, dtype == MTP__REAL ? "F32, BF16 or F16" : mtp_dtype_name((mtp_dtype)dtype), rank,
                 shape);
        describe(got, sizeof got, mtp_dtype_name(view->dtype), got_rank, view->shape);
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s is %s; it must be %s", op, name, got, want);
    }
    const int32_t last = rank - 1;
    if (view->shape[last] > 1 && view->stride[last] != 1)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: the last axis of %s has stride %lld; it must be contiguous", op, name,
                        (long long)view->stride[last]);
    int64_t inner = view->shape[last]; /* elements that one step along the axis to the left must clear */
    for (int32_t i = last - 1; i >= 0; i--) {
        if (view->shape[i] == 1) continue;
        if (view->stride[i] < inner)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: axis %d of %s has stride %lld, less than the %lld elements inside it",
                            op, (int)i, name, (long long)view->stride[i], (long long)inner);
        inner = view->stride[i] * view->shape[i];
    }
    return MTP_OK;
}

mtp_status mtp__check_scratch(const char *op, const mtp_scratch *scratch, size_t needed)
{
    if (scratch->size < needed || (needed && !scratch->data))
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: scratch has %zu bytes, needs %zu (ask %s_scratch)", op,
                        scratch->data ? scratch->size : 0, needed, op);
    if ((uintptr_t)scratch->data % 64)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: scratch at %p is not 64-byte aligned", op, scratch->data);
    return MTP_OK;
}
