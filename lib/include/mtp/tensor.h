/* Data types and tensor views: the vocabulary that files, model, kernels and programs share.
 *
 * A view never owns memory. Shape letters used in all comments: S tokens in a packed batch, R rows (supervised
 * positions), K draft steps, H drafter hidden, Hb backbone (verifier) hidden, I MLP width, D head dim, NH query heads,
 * NKV K/V heads, V vocabulary, C centroids, P = V / C tokens of a centroid, W sliding window. */
#ifndef MTP_TENSOR_H
#define MTP_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mtp/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(symbol, bytes per element, name in a safetensors header) */
#define MTP_DTYPE_LIST(X)        \
    X(MTP_F32, 4, "F32")         \
    X(MTP_BF16, 2, "BF16")       \
    X(MTP_F16, 2, "F16")         \
    X(MTP_F64, 8, "F64")         \
    X(MTP_F8_E4M3, 1, "F8_E4M3") \
    X(MTP_F8_E5M2, 1, "F8_E5M2") \
    X(MTP_I64, 8, "I64")         \
    X(MTP_I32, 4, "I32")         \
    X(MTP_I16, 2, "I16")         \
    X(MTP_I8, 1, "I8")           \
    X(MTP_U64, 8, "U64")         \
    X(MTP_U32, 4, "U32")         \
    X(MTP_U16, 2, "U16")         \
    X(MTP_U8, 1, "U8")           \
    X(MTP_BOOL, 1, "BOOL")

typedef enum mtp_dtype {
#define MTP_DTYPE_ENUM_(symbol, size, name) symbol,
    MTP_DTYPE_LIST(MTP_DTYPE_ENUM_)
#undef MTP_DTYPE_ENUM_
        MTP_DTYPE_COUNT
} mtp_dtype;

enum { MTP_MAX_RANK = 5 };

/* A tensor somebody else owns. Strides are in elements; the last axis is contiguous (stride 1) in every view that an
 * op takes. `data == NULL` means "absent" where an argument is optional. */
typedef struct mtp_view {
    void *data;
    mtp_dtype dtype;
    int32_t rank;
    int64_t shape[MTP_MAX_RANK];
    int64_t stride[MTP_MAX_RANK];
} mtp_view;

/* Bytes of one element; 0 for a value outside the enumeration. */
MTP_API size_t mtp_dtype_size(mtp_dtype dtype);
/* The safetensors name ("BF16"); "?" for a value outside the enumeration. */
MTP_API const char *mtp_dtype_name(mtp_dtype dtype);
/* True for the types that ops take as real-valued input: F32, BF16, F16. */
MTP_API bool mtp_dtype_is_compute(mtp_dtype dtype);

/* Contiguous views of one to five axes. */
MTP_API mtp_view mtp_view_nd(void *data, mtp_dtype dtype, int32_t rank, const int64_t *shape);
static inline mtp_view mtp_view_1d(void *data, mtp_dtype dtype, int64_t n)
{
    return mtp_view_nd(data, dtype, 1, &n);
}
static inline mtp_view mtp_view_2d(void *data, mtp_dtype dtype, int64_t rows, int64_t cols)
{
    const int64_t shape[2] = {rows, cols};
    return mtp_view_nd(data, dtype, 2, shape);
}
static inline mtp_view mtp_view_3d(void *data, mtp_dtype dtype, int64_t a, int64_t b, int64_t c)
{
    const int64_t shape[3] = {a, b, c};
    return mtp_view_nd(data, dtype, 3, shape);
}
static inline mtp_view mtp_view_4d(void *data, mtp_dtype dtype, int64_t a, int64_t b, int64_t c, int64_t d)
{
    const int64_t shape[4] = {a, b, c, d};
    return mtp_view_nd(data, dtype, 4, shape);
}
/* Columns [first, first + count) of a matrix: the same rows and row stride, no copy. */
MTP_API mtp_view mtp_view_cols(mtp_view matrix, int64_t first, int64_t count);
/* Rows [first, first + count) along the first axis. */
MTP_API mtp_view mtp_view_rows(mtp_view tensor, int64_t first, int64_t count);
/* Number of elements (the product of the shape). */
MTP_API int64_t mtp_view_count(mtp_view tensor);

#ifdef __cplusplus
}
#endif
#endif
