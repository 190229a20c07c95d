/* RMSNorm, alone or with RoPE behind it, and the post-norm with its residual, alone or with the norm that reads its
 * result (formulas: ops.h). Rows are independent; weight gradients are summed over fixed chunks of 64 rows, and the
 * chunks in order, so threads do not matter. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

enum {
    CHUNK_ROWS = 64,
    PIECE = 1024, /* floats of a weight converted at a time */
};

static float reciprocal_rms(const mtp__vec *vec, const float *x, int64_t width, float eps)
{
    return (float)(1.0 / sqrt(vec->sumsq(x, width) / (double)width + (double)eps));
}

/* Elements [first, first + count) of a weight as fp32: its own memory, or converted in `piece`. */
static const float *weight_piece(const mtp__vec *vec, const mtp_view *w, int64_t first, int64_t count, float *piece)
{
    if (w->dtype == MTP_F32) return (const float *)w->data + first;
    vec->to_f32(piece, (const uint16_t *)w->data + first, w->dtype, count);
    return piece;
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* y = x rstd w; returns rstd. */
static float normalize(const mtp__vec *vec, float *y, const float *x, const mtp_view *w, int64_t width, float eps)
{
    const float rstd = reciprocal_rms(vec, x, width, eps);
    if (!w->data) {
        vec->scale(y, rstd, x, width);
        return rstd;
    }
    float piece[PIECE];
    for (int64_t i = 0; i < width; i += PIECE) {
        const int64_t count = width - i < PIECE ? width - i : PIECE;
        vec->mul(y + i, x + i, weight_piece(vec, w, i, count, piece), rstd, count);
    }
    return rstd;
}

/* to = RoPE of row r of the op, or its inverse with sign -1; `to` may be `from`. */
static void rotate_row(const mtp__vec *vec, const mtp_rmsnorm_args *a, float *to, const float *from, int64_t r,
                       float sign)
{
    const int64_t at = r / (a->x.shape[0] / a->cos.shape[0]);
    vec->rotate(to, from, mtp__row(&a->cos, at), mtp__row(&a->sin, at), sign, a->x.shape[1] / 2);
}

static void norm_row(const mtp__vec *vec, const mtp_rmsnorm_args *a, int64_t r)
{
    const int64_t width = a->x.shape[1];
    float *y = mtp__row(&a->y, r);
    const float *x = y; /* another dtype is converted in place of the result */
    if (a->x.dtype == MTP_F32)
        x = mtp__row(&a->x, r);
    else
        vec->to_f32(y, mtp__row_any(&a->x, r), a->x.dtype, width);
    const float rstd = normalize(vec, y, x, &a->w, width, a->eps);
    if (a->rstd.data) ((float *)a->rstd.data)[r] = rstd;
    if (a->cos.data) rotate_row(vec, a, y, y, r, 1.0f);
}

mtp_status mtp__cpu_rmsnorm_fwd(mtp_device *device, const mtp_rmsnorm_args *a)
{
    const char *op = "rmsnorm_fwd";
    MTP_TRY(mtp__check_rmsnorm_fwd(op, a, MTP_F32));
    const int64_t rows = a->x.shape[0];
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) norm_row(device->vec, a, r);
    return MTP_OK;
}

static void residual_norm_row(const mtp__vec *vec, const mtp_residual_norm_args *a, float scalar, int64_t r)
{
    const int64_t width = a->x.shape[1];
    const float *x = mtp__row(&a->x, r), *residual = mtp__row(&a->residual, r);
    float *y = mtp__row(&a->y, r);
    const float rstd = reciprocal_rms(vec, x, width, a->eps);
    ((float *)a->rstd.data)[r] = rstd;
    float piece[PIECE];
    for (int64_t i = 0; i < width; i += PIECE) {
        const int64_t count = width - i < PIECE ? width - i : PIECE;
        vec->add_mul(y + i, residual + i, x + i, weight_piece(vec, &a->w, i, count, piece), rstd, scalar, count);
    }
    if (a->next_w.data)
        ((float *)a->next_rstd.data)[r] = normalize(vec, mtp__row(&a->next_y, r), y, &a->next_w, width, a->eps);
}

mtp_status mtp__cpu_residual_norm_fwd(mtp_device *device, const mtp_residual_norm_args *a)
{
    const char *op = "residual_norm_fwd";
    MTP_TRY(mtp__check_residual_norm_fwd(op, a, MTP_F32));
    const int64_t rows = a->x.shape[0];
    const float scalar = a->scalar.data ? *(const float *)a->scalar.data : 1.0f;
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t r = 0; r < rows; r++) residual_norm_row(device->vec, a, scalar, r);
    return MTP_OK;
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* What the backward of both ops needs in scratch: the weights as fp32 (ones when there is none), a sum of each weight
 * gradient and of the scalar's for each chunk of rows, and some rows for each thread. */
enum { THREAD_ROWS = 3 };
typedef struct backward_scratch {
    float *w, *dw, *next_w, *next_dw, *rows;
    double *dscalar;
    int64_t num_chunks, row_size;
    size_t total;
} backward_scratch;

static backward_scratch lay_out(const mtp_device *device, int64_t rows, int64_t width, bool next, void *base)
{
    mtp__carver carver = {.base = base};
    backward_scratch s = {.num_chunks = (rows + CHUNK_ROWS - 1) / CHUNK_ROWS, .row_size = (width + 15) / 16 * 16};
    s.w = mtp__carve(&carver, width, sizeof(float));
    s.dw = mtp__carve(&carver, s.num_chunks * s.row_size, sizeof(float));
    if (next) {
        s.next_w = mtp__carve(&carver, width, sizeof(float));
        s.next_dw = mtp__carve(&carver, s.num_chunks * s.row_size, sizeof(float));
    }
    s.dscalar = mtp__carve(&carver, s.num_chunks, sizeof(double));
    s.rows = mtp__carve(&carver, THREAD_ROWS * device->num_threads * s.row_size, sizeof(float));
    s.total = carver.used;
    return s;
}

/* Row i of the calling thread. */
static float *thread_row(const backward_scratch *s, int i)
{
    return s->rows + (THREAD_ROWS * omp_get_thread_num() + i) * s->row_size;
}

static void load_weight(const mtp__vec *vec, const mtp_view *w, int64_t width, float *to)
{
    if (w->data)
        vec->to_f32(to, w->data, w->dtype, width);
    else
        for (int64_t i = 0; i < width; i++) to[i] = 1.0f;
}

/* dw (+)= the sum of the chunks, in order */
static void add_chunks(const mtp_device *device, const backward_scratch *s, float *sums, const mtp_view *dw,
                       mtp_write write)
{
    enum { columns = 64 };
    const int64_t width = dw->shape[0];
    const mtp__vec *vec = device->vec;
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t i = 0; i < width; i += columns) {
        const int64_t count = width - i < columns ? width - i : columns;
        float *sum = sums + i, *to = (float *)dw->data + i;
        for (int64_t c = 1; c < s->num_chunks; c++) vec->axpy(sum, 1.0f, sums + c * s->row_size + i, count);
        if (write == MTP_ACCUMULATE)
            vec->axpy(to, 1.0f, sum, count);
        else
            memcpy(to, sum, (size_t)count * sizeof *to);
    }
}

/* dx (+)= factor (rstd w dy - x rstd^3 / width sum(x w dy)); `product` is that sum. */
static void input_gradient_row(const mtp__vec *vec, float *dx, mtp_write write, const float *x, const float *w,
                               const float *dy, float rstd, float factor, float product, int64_t width, float *spare)
{
    const double mean = (double)product / (double)width * (double)rstd * (double)rstd;
    const float alpha = factor * rstd, beta = (float)((double)alpha * mean);
    if (write == MTP_OVERWRITE) {
        vec->norm_dx(dx, x, w, dy, alpha, beta, width);
        return;
    }
    vec->norm_dx(spare, x, w, dy, alpha, beta, width);
    vec->axpy(dx, 1.0f, spare, width);
}

/* One chunk of rows; of each row dw comes first, because dx may be dy. */
static void rmsnorm_chunk(const mtp_device *device, const mtp_rmsnorm_args *a, const backward_scratch *s, int64_t chunk)
{
    const mtp__vec *vec = device->vec;
    const int64_t rows = a->x.shape[0], width = a->x.shape[1], first = chunk * CHUNK_ROWS;
    float *dw = s->dw + chunk * s->row_size;
    float *converted = thread_row(s, 0), *spare = thread_row(s, 1), *turned = thread_row(s, 2);
    memset(dw, 0, (size_t)width * sizeof *dw);
    for (int64_t r = first; r < rows && r < first + CHUNK_ROWS; r++) {
        const float *x = converted, *dy = mtp__row(&a->dy, r);
        if (a->cos.data) {
            rotate_row(vec, a, turned, dy, r, -1.0f);
            dy = turned;
        }
        if (a->x.dtype == MTP_F32)
            x = mtp__row(&a->x, r);
        else
            vec->to_f32(converted, mtp__row_any(&a->x, r), a->x.dtype, width);
        const float rstd = ((const float *)a->rstd.data)[r];
        if (a->dw.data) vec->mul_add(dw, x, dy, rstd, width);
        if (a->dx.data)
            input_gradient_row(vec, mtp__row(&a->dx, r), a->dx_write, x, s->w, dy, rstd, 1.0f,
                               vec->dot3(x, s->w, dy, width), width, spare);
    }
}

size_t mtp__cpu_rmsnorm_bwd_scratch(const mtp_device *device, const mtp_rmsnorm_args *a)
{
    return lay_out(device, a->x.shape[0], a->x.shape[1], false, NULL).total;
}

mtp_status mtp__cpu_rmsnorm_bwd(mtp_device *device, const mtp_rmsnorm_args *a)
{
    const char *op = "rmsnorm_bwd";
    MTP_TRY(mtp__check_rmsnorm_bwd(op, a, MTP_F32));
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    const backward_scratch s = lay_out(device, rows, width, false, a->scratch.data);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, s.total));
    load_weight(device->vec, &a->w, width, s.w);
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t chunk = 0; chunk < s.num_chunks; chunk++) rmsnorm_chunk(device, a, &s, chunk);
    if (a->dw.data) add_chunks(device, &s, s.dw, &a->dw, a->dw_write);
    return MTP_OK;
}

/* dy of a row, or with a next norm dy plus what comes through that, in a row of the thread. */
static const float *gradient_of_y(const mtp__vec *vec, const mtp_residual_norm_args *a, const backward_scratch *s,
                                  float *next_dw, int64_t r)
{
    const int64_t width = a->x.shape[1];
    if (!a->next_w.data) return mtp__row(&a->dy, r);
    const float *y = mtp__row(&a->y, r), *next_dy = mtp__row(&a->next_dy, r);
    const float next_rstd = ((const float *)a->next_rstd.data)[r];
    float *total = thread_row(s, 0);
    if (a->next_dw.data) vec->mul_add(next_dw, y, next_dy, next_rstd, width);
    input_gradient_row(vec, total, MTP_OVERWRITE, y, s->next_w, next_dy, next_rstd, 1.0f,
                       vec->dot3(y, s->next_w, next_dy, width), width, NULL);
    if (a->dy.data) vec->axpy(total, 1.0f, mtp__row(&a->dy, r), width);
    return total;
}

/* One chunk of rows; dresidual comes last, because it may be dy. */
static void residual_norm_chunk(const mtp_device *device, const mtp_residual_norm_args *a, const backward_scratch *s,
                                float scalar, int64_t chunk)
{
    const mtp__vec *vec = device->vec;
    const int64_t rows = a->x.shape[0], width = a->x.shape[1], first = chunk * CHUNK_ROWS;
    float *dw = s->dw + chunk * s->row_size, *next_dw = s->next_dw + chunk * s->row_size;
    memset(dw, 0, (size_t)width * sizeof *dw);
    memset(next_dw, 0, (size_t)width * sizeof *next_dw);
    double dscalar = 0;
    for (int64_t r = first; r < rows && r < first + CHUNK_ROWS; r++) {
        const float *x = mtp__row(&a->x, r), *dy = gradient_of_y(vec, a, s, next_dw, r);
        const float rstd = ((const float *)a->rstd.data)[r];
        const float product = vec->dot3(x, s->w, dy, width);
        if (a->dscalar.data)
            dscalar += (double)vec->dot(dy, mtp__row(&a->residual, r), width) + (double)rstd * (double)product;
        if (a->dw.data) vec->mul_add(dw, x, dy, rstd * scalar, width);
        if (a->dx.data)
            input_gradient_row(vec, mtp__row(&a->dx, r), MTP_OVERWRITE, x, s->w, dy, rstd, scalar, product, width,
                               NULL);
        if (!a->dresidual.data) continue;
        if (a->dresidual_write == MTP_ACCUMULATE)
            vec->axpy(mtp__row(&a->dresidual, r), scalar, dy, width);
        else
            vec->scale(mtp__row(&a->dresidual, r), scalar, dy, width);
    }
    s->dscalar[chunk] = dscalar;
}

size_t mtp__cpu_residual_norm_bwd_scratch(const mtp_device *device, const mtp_residual_norm_args *a)
{
    return lay_out(device, a->x.shape[0], a->x.shape[1], true, NULL).total;
}

mtp_status mtp__cpu_residual_norm_bwd(mtp_device *device, const mtp_residual_norm_args *a)
{
    const char *op = "residual_norm_bwd";
    MTP_TRY(mtp__check_residual_norm_bwd(op, a, MTP_F32));
    const backward_scratch s = lay_out(device, a->x.shape[0], a->x.shape[1], true, a->scratch.data);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, s.total));
    load_weight(device->vec, &a->w, a->x.shape[1], s.w);
    if (a->next_w.data) load_weight(device->vec, &a->next_w, a->x.shape[1], s.next_w);
    const float scalar = a->scalar.data ? *(const float *)a->scalar.data : 1.0f;
#pragma omp parallel for num_threads(device->num_threads) schedule(static)
    for (int64_t chunk = 0; chunk < s.num_chunks; chunk++) residual_norm_chunk(device, a, &s, scalar, chunk);
    if (a->dw.data) add_chunks(device, &s, s.dw, &a->dw, a->dw_write);
    if (a->next_w.data && a->next_dw.data) add_chunks(device, &s, s.next_dw, &a->next_dw, a->dw_write);
    if (a->dscalar.data) {
        double total = a->dscalar_write == MTP_ACCUMULATE ? (double)*(const float *)a->dscalar.data : 0.0;
        for (int64_t chunk = 0; chunk < s.num_chunks; chunk++) total += s.dscalar[chunk];
        *(float *)a->dscalar.data = (float)total;
    }
    return MTP_OK;
}
