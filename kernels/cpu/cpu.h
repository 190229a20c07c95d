/* What the files of the CPU backend share: the device, its threads and its inner loops. Internal to kernels/cpu. */
#ifndef MTP_KERNELS_CPU_H
#define MTP_KERNELS_CPU_H

#include "base/error.h"
#include "check.h"
#include "cpu/vec.h"
#include "ops.h"

struct mtp_device {
    int num_threads;     /* name it in every parallel region: num_threads(device->num_threads) */
    const mtp__vec *vec; /* inner loops of the chosen instruction set */
    mtp_device_info info;
    char blas[160];
    char note[256];
};

/* Ops of the table, one file a subject: cpu/<subject>.c. */
#define MTP__CPU_DECLARE_0(op, args) mtp_status mtp__cpu_##op(mtp_device *device, const args *a);
#define MTP__CPU_DECLARE_1(op, args)                             \
    mtp_status mtp__cpu_##op(mtp_device *device, const args *a); \
    size_t mtp__cpu_##op##_scratch(const mtp_device *device, const args *a);
#define MTP__CPU_DECLARE(op, args, scratch) MTP__CPU_DECLARE_##scratch(op, args)
MTP_OP_LIST(MTP__CPU_DECLARE)
#undef MTP__CPU_DECLARE
#undef MTP__CPU_DECLARE_0
#undef MTP__CPU_DECLARE_1

/* Single-threaded row-major sgemm on tiles: C[m, n] = beta C + op(A) op(B), beta 0 or 1. A thin name for cblas_sgemm,
 * so that only cpu/blas.c sees CBLAS. Callers keep m (rows of C that are rows of the model) to the sizes of
 * mtp__cpu_tile_rows_of. */
void mtp__cpu_gemm(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, const float *a, int64_t lda,
                   const float *b, int64_t ldb, float beta, float *c, int64_t ldc);

/* Products over model rows run in tiles of exactly 64, 128, 192 or 256 rows, the last one padded (with copies in
 * scratch), because the bits of a row of sgemm depend on small row counts: padded size of the tile that holds `rows` <=
 * 256 rows. For the next function only: callers ask mtp__cpu_tile_rows_of. */
enum { MTP__TILE_MIN = 64, MTP__TILE_MAX = 256 };
static inline int64_t mtp__cpu_tile_rows(int64_t rows)
{
    return (rows + MTP__TILE_MIN - 1) / MTP__TILE_MIN * MTP__TILE_MIN;
}

/* BLAS libraries switch to other kernels for small products (OpenBLAS: m n k <= 10^6), and a row must not change
 * kernels with the number of rows. So a product C[rows, n] of depth k with few elements in its n x k factor is cut by
 * itself and not by its rows: with n and k up to MTP__DOUBLE_WIDTH it runs in double precision on strips of 64 rows,
 * which costs little there and takes the noise of sgemm out of small models (their training amplifies it a thousandfold
 * in ten steps); with one of them larger it always runs on 256 rows. A larger product is above the switch with 64 rows
 * as well. */
enum { MTP__SMALL_FACTOR = 1 << 14, MTP__DOUBLE_WIDTH = 256, MTP__GEMM_ROWS_MOST = 768 /* of a tile, anywhere */ };
static inline bool mtp__cpu_in_double(int64_t n, int64_t k)
{
    return n * k <= MTP__SMALL_FACTOR && n <= MTP__DOUBLE_WIDTH && k <= MTP__DOUBLE_WIDTH;
}
static inline int64_t mtp__cpu_tile_rows_of(int64_t rows, int64_t n, int64_t k)
{
    const bool whole = n * k <= MTP__SMALL_FACTOR && !mtp__cpu_in_double(n, k);
    return whole ? MTP__TILE_MAX : mtp__cpu_tile_rows(rows);
}

/* Rows [first, first + count) of a real matrix in fp32: in place when they are, else converted into `copy` [count,
 * width]. *stride: elements from row to row. */
static inline const float *mtp__cpu_rows_f32(const mtp_device *device, const mtp_view *matrix, int64_t first,
                                             int64_t count, float *copy, int64_t *stride)
{
    const int64_t width = matrix->shape[1];
    *stride = matrix->dtype == MTP_F32 ? matrix->stride[0] : width;
    if (matrix->dtype == MTP_F32) return mtp__row(matrix, first);
    for (int64_t j = 0; j < count; j++)
        device->vec->to_f32(copy + j * width, mtp__row_any(matrix, first + j), matrix->dtype, width);
    return copy;
}

/* The slot of a row's target: a row of e. */
static inline int64_t mtp__cpu_target_slot(const mtp_head_args *a, int64_t row)
{
    const int32_t target = ((const int32_t *)a->target.data)[row];
    return a->slot_of.data ? ((const int32_t *)a->slot_of.data)[target] : target;
}
/* Every target of a head, when there are any, must be a token that slot_of and order agree about. */
mtp_status mtp__cpu_check_targets(const char *op, const mtp_head_args *a);

/* Makes the BLAS single-threaded where it has threads of its own, checks its results against a plain loop (wrong ones:
 * MTP_E_BACKEND), measures whether the bits of a row depend on its place in a tile or on the tile's size, and fills
 * device->blas, device->note and device->info.rows_exact. A few milliseconds. */
mtp_status mtp__cpu_blas_open(mtp_device *device);

#endif
