/* Moving and converting rows: embedding, gather, scatter, convert, axpy (formulas: ops.h). */
#include <math.h>
#include <string.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

/* `least`: 0, or MTP_NO_ROW where that is an index. */
static mtp_status check_indices(const char *op, const char *name, const mtp_view *indices, int64_t limit, int32_t least)
{
    for (int64_t r = 0; r < indices->shape[0]; r++) {
        const int32_t index = ((const int32_t *)indices->data)[r];
        if (index < least || index >= limit)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s[%lld] is %d, outside [0, %lld)", op, name, (long long)r, (int)index,
                            (long long)limit);
    }
    return MTP_OK;
}

/* ---- embedding, gather, scatter ---------------------------------------------------------------------------------- */

mtp_status mtp__cpu_embed_fwd(mtp_device *device, const mtp_embed_args *a)
{
    const char *op = "embed_fwd";
    const int64_t rows = a->ids.shape[0], width = a->table.shape[1];
    MTP__CHECK(op, table, MTP__REAL, -1, -1);
    MTP__CHECK(op, ids, MTP_I32, -1);
    MTP__CHECK(op, y, MTP_F32, rows, width);
    MTP_TRY(check_indices(op, "ids", &a->ids, a->table.shape[0], 0));
    const mtp_dtype dtype = a->table.dtype;
    const int32_t *ids = a->ids.data;
    const float root = (float)sqrt((double)width);
    float factor = root;
    if (dtype != MTP_F32) {
        uint16_t rounded;
        device->vec->from_f32(&rounded, dtype, &root, 1);
        device->vec->to_f32(&factor, &rounded, dtype, 1);
    }
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        device->vec->scale_rounded(mtp__row(&a->y, r), mtp__row_any(&a->table, ids[r]), dtype, factor, width);
    return MTP_OK;
}

/* y += x, x of any real dtype: through fp32 in pieces that stay in the first cache. */
static void add_row(const mtp__vec *vec, float *y, const void *x, mtp_dtype dtype, int64_t n)
{
    enum { piece = 1024 };
    float values[piece];
    if (dtype == MTP_F32) {
        vec->axpy(y, 1.0f, x, n);
        return;
    }
    for (int64_t i = 0; i < n; i += piece) {
        const int64_t count = n - i < piece ? n - i : piece;
        vec->to_f32(values, (const uint16_t *)x + i, dtype, count);
        vec->axpy(y + i, 1.0f, values, count);
    }
}

mtp_status mtp__cpu_gather_rows(mtp_device *device, const mtp_gather_args *a)
{
    const char *op = "gather_rows";
    const int64_t rows = a->index.shape[0], width = a->src.shape[1];
    MTP__CHECK(op, src, MTP__REAL, -1, -1);
    MTP__CHECK(op, index, MTP_I32, -1);
    MTP__CHECK(op, dst, MTP_F32, rows, width);
    MTP_TRY(check_indices(op, "index", &a->index, a->src.shape[0], MTP_NO_ROW));
    const int32_t *index = a->index.data;
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        float *to = mtp__row(&a->dst, r);
        if (index[r] == MTP_NO_ROW) {
            if (a->write == MTP_OVERWRITE) memset(to, 0, (size_t)width * sizeof *to);
        } else if (a->write == MTP_ACCUMULATE) {
            add_row(device->vec, to, mtp__row_any(&a->src, index[r]), a->src.dtype, width);
        } else {
            device->vec->to_f32(to, mtp__row_any(&a->src, index[r]), a->src.dtype, width);
        }
    }
    return MTP_OK;
}

mtp_status mtp__cpu_scatter_rows(mtp_device *device, const mtp_gather_args *a)
{
    const char *op = "scatter_rows";
    const int64_t rows = a->index.shape[0], width = a->src.shape[1];
    MTP__CHECK(op, index, MTP_I32, -1);
    MTP__CHECK(op, src, MTP_F32, rows, -1);
    MTP__CHECK(op, dst, MTP_F32, -1, width);
    MTP_TRY(check_indices(op, "index", &a->index, a->dst.shape[0], MTP_NO_ROW));
    const int32_t *index = a->index.data;
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        if (index[r] == MTP_NO_ROW) continue;
        float *to = mtp__row(&a->dst, index[r]);
        if (a->write == MTP_ACCUMULATE)
            device->vec->axpy(to, 1.0f, mtp__row(&a->src, r), width);
        else
            memcpy(to, mtp__row(&a->src, r), (size_t)width * sizeof *to);
    }
    return MTP_OK;
}

/* ---- whole tensors ----------------------------------------------------------------------------------------------- */

/* A tensor as rows of its last axis, each row in chunks: the unit of work of a thread. */
enum { CHUNK = 1 << 14 };

typedef struct chunks {
    int64_t width, chunks_of_a_row, total;
} chunks;

static chunks chunks_of(const mtp_view *view)
{
    const int64_t width = view->shape[view->rank - 1], of_a_row = (width + CHUNK - 1) / CHUNK;
    return (chunks){.width = width, .chunks_of_a_row = of_a_row, .total = mtp_view_count(*view) / width * of_a_row};
}

static int64_t chunk_length(const chunks *c, int64_t chunk)
{
    const int64_t rest = c->width - chunk % c->chunks_of_a_row * CHUNK;
    return rest < CHUNK ? rest : CHUNK;
}

static void *chunk_address(const mtp_view *view, const chunks *c, int64_t chunk)
{
    int64_t row = chunk / c->chunks_of_a_row, offset = chunk % c->chunks_of_a_row * CHUNK;
    for (int32_t axis = view->rank - 2; axis >= 0; axis--) {
        offset += row % view->shape[axis] * view->stride[axis];
        row /= view->shape[axis];
    }
    return (char *)view->data + offset * (int64_t)mtp_dtype_size(view->dtype);
}

/* Between two 16-bit types through fp32, in pieces that stay in the first cache. */
static void convert_chunk(const mtp__vec *vec, void *dst, mtp_dtype to, const void *src, mtp_dtype from, int64_t n)
{
    enum { piece = 1024 };
    float values[piece];
    if (to == from) {
        memcpy(dst, src, (size_t)n * mtp_dtype_size(to));
    } else if (to == MTP_F32) {
        vec->to_f32(dst, src, from, n);
    } else if (from == MTP_F32) {
        vec->from_f32(dst, to, src, n);
    } else {
        for (int64_t i = 0; i < n; i += piece) {
            const int64_t count = n - i < piece ? n - i : piece;
            vec->to_f32(values, (const uint16_t *)src + i, from, count);
            vec->from_f32((uint16_t *)dst + i, to, values, count);
        }
    }
}

mtp_status mtp__cpu_convert(mtp_device *device, const mtp_convert_args *a)
{
    MTP_TRY(mtp__check_convert("convert", a));
    const chunks c = chunks_of(&a->src);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < c.total; i++)
        convert_chunk(device->vec, chunk_address(&a->dst, &c, i), a->dst.dtype, chunk_address(&a->src, &c, i),
                      a->src.dtype, chunk_length(&c, i));
    return MTP_OK;
}

mtp_status mtp__cpu_axpy(mtp_device *device, const mtp_axpy_args *a)
{
    MTP_TRY(mtp__check_axpy("axpy", a));
    const chunks c = chunks_of(&a->x);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < c.total; i++) {
        const float *x = chunk_address(&a->x, &c, i);
        float *y = chunk_address(&a->y, &c, i);
        if (a->write == MTP_ACCUMULATE)
            device->vec->axpy(y, a->alpha, x, chunk_length(&c, i));
        else
            device->vec->scale(y, a->alpha, x, chunk_length(&c, i));
    }
    return MTP_OK;
}
