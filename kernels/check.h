/* Argument checks and scratch carving that the ops of all backends share. Internal to kernels/. */
#ifndef MTP_KERNELS_CHECK_H
#define MTP_KERNELS_CHECK_H

#include "base/error.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MTP__REAL = -1 }; /* as a dtype to check for: F32, BF16 or F16 */

/* The view must have data, this dtype, this rank and this shape (-1: any length >= 1), a contiguous last axis and
 * leading axes that do not overlap. The message names op, view, what it is and what it must be. */
mtp_status mtp__check_view(const char *op, const char *name, const mtp_view *view, int dtype, int32_t rank,
                           const int64_t *shape);
/* Scratch must be there, 64-byte aligned and of at least `needed` bytes. */
mtp_status mtp__check_scratch(const char *op, const mtp_scratch *scratch, size_t needed);

#ifdef __cplusplus
}
#endif

/* Check the view `field` of the op's arguments `a`: MTP__CHECK(op, q, MTP_F32, rows, heads, width). */
#ifdef __cplusplus
template <typename... Sizes>
inline mtp_status mtp__check_sizes(const char *op, const char *name, const mtp_view *view, int dtype, Sizes... sizes)
{
    const int64_t shape[] = {(int64_t)sizes...};
    return mtp__check_view(op, name, view, dtype, (int32_t)sizeof...(sizes), shape);
}
#define MTP__CHECK(op, field, dtype, ...) MTP_TRY(mtp__check_sizes((op), #field, &a->field, (dtype), __VA_ARGS__))
#else
#define MTP__CHECK(op, field, dtype, ...)                                                        \
    MTP_TRY(mtp__check_view((op), #field, &a->field, (int)(dtype),                               \
                            (int32_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
                            (const int64_t[]){__VA_ARGS__}))
#endif
/* The same for a view whose absence (data == NULL) is allowed. */
#define MTP__CHECK_OPTIONAL(op, field, dtype, ...)                    \
    do {                                                              \
        if (a->field.data) MTP__CHECK(op, field, dtype, __VA_ARGS__); \
    } while (0)

/* Parts of scratch, 64-byte aligned. With base == NULL only the total is counted: one layout function serves the size
 * query and the op. */
typedef struct mtp__carver {
    char *base;
    size_t used;
} mtp__carver;

static inline void *mtp__carve(mtp__carver *carver, int64_t count, size_t element)
{
    void *part = carver->base ? carver->base + carver->used : NULL;
    carver->used += ((size_t)count * element + 63) / 64 * 64;
    return part;
}

/* Row r of an F32 matrix view. */
static inline float *mtp__row(const mtp_view *view, int64_t r)
{
    return (float *)view->data + r * view->stride[0];
}
/* Address of row r of a view of any dtype. */
static inline const void *mtp__row_any(const mtp_view *view, int64_t r)
{
    return (const char *)view->data + (size_t)(r * view->stride[0]) * mtp_dtype_size(view->dtype);
}

#endif
