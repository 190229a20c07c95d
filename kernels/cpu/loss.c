/* Cross-entropy: of dense rows of logits, and of the flat head over the whole vocabulary.
 *
 *   z = x e^T      loss = log sum exp z - z[target]      dz = scale (softmax(z) - onehot)      dx = dz e      de = dz^T
 * x
 *
 * The flat head works through chunks of rows whose logits fit the budget. A chunk's vocabulary is cut into blocks of
 * VOCAB_BLOCK tokens (the last one 0.5 to 1.5 of that, so that no product is small): the threads share the blocks, and
 * the logits of a block are stored together. e is read once for z and once for the gradients, so a chunk costs three
 * products. dx sums over the vocabulary: blocks are summed in order within one of at most NUM_PARTIALS ranges, and the
 * ranges in order, whatever the number of threads. */
#include <math.h>
#include <omp.h>
#include <string.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

enum { VOCAB_BLOCK = 1024, MAX_WIDTH = VOCAB_BLOCK + VOCAB_BLOCK / 2, NUM_PARTIALS = 32, SUM_BLOCK = 4096 };
static const size_t default_budget = (size_t)256 << 20;

/* Sum of exp(x - top) with the blocks of a long row added in double. */
static double sum_exp(const mtp__vec *vec, const float *x, float top, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i += SUM_BLOCK)
        sum += (double)vec->sum_exp(x + i, top, n - i < SUM_BLOCK ? n - i : SUM_BLOCK);
    return sum;
}

/* ---- dense rows -------------------------------------------------------------------------------------------------- */

static mtp_status check_ids(const char *op, const char *name, const mtp_view *ids, int64_t end)
{
    const int32_t *id = ids->data;
    for (int64_t r = 0; r < ids->shape[0]; r++)
        if (id[r] < 0 || id[r] >= end)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s[%lld] is %d, outside [0, %lld)", op, name, (long long)r, id[r],
                            (long long)end);
    return MTP_OK;
}

mtp_status mtp__cpu_xent(mtp_device *device, const mtp_xent_args *a)
{
    const char *op = "xent";
    MTP__CHECK(op, logits, MTP_F32, -1, -1);
    const int64_t R = a->logits.shape[0], N = a->logits.shape[1];
    MTP__CHECK(op, target, MTP_I32, R);
    MTP__CHECK_OPTIONAL(op, loss, MTP_F32, R);
    MTP__CHECK_OPTIONAL(op, dlogits, MTP_F32, R, N);
    if (a->dlogits.data) MTP__CHECK(op, scale, MTP_F32, R);
    MTP_TRY(check_ids(op, "target", &a->target, N));

    const int32_t *target = a->target.data;
#pragma omp parallel for schedule(static) num_threads(device->num_threads)
    for (int64_t r = 0; r < R; r++) {
        const float *z = mtp__row(&a->logits, r);
        const float top = device->vec->max(z, N);
        const double sum = sum_exp(device->vec, z, top, N);
        if (a->loss.data) ((float *)a->loss.data)[r] = (float)(((double)top - (double)z[target[r]]) + log(sum));
        if (!a->dlogits.data) continue;
        const float scale = ((const float *)a->scale.data)[r];
        float *dz = mtp__row(&a->dlogits, r);
        device->vec->softmax_scaled(dz, z, top, (float)((double)scale / sum), N);
        dz[target[r]] -= scale;
    }
    return MTP_OK;
}

mtp_status mtp__cpu_check_targets(const char *op, const mtp_head_args *a)
{
    const int32_t *order = a->order.data, *slot_of = a->slot_of.data, *target = a->target.data;
    const int64_t V = a->e.shape[0];
    if (!target) return MTP_OK;
    MTP_TRY(check_ids(op, "target", &a->target, V));
    for (int64_t r = 0; order && r < a->target.shape[0]; r++) {
        const int32_t slot = slot_of[target[r]];
        if (slot < 0 || slot >= V || order[slot] != target[r])
            return MTP_FAIL(MTP_E_ARGUMENT,
                            "%s: slot_of gives slot %d for token %d, which order does not hold there; the two must be "
                            "inverse to each other",
                            op, slot, target[r]);
    }
    return MTP_OK;
}

/* ---- the flat head: arguments and scratch ------------------------------------------------------------------------ */

typedef struct flat {
    int64_t R, H, V;
    int64_t unit;         /* rows come in multiples of: 64, or 256 where the products are small */
    int64_t chunk;        /* rows, a multiple of unit */
    int64_t num_blocks;   /* of the vocabulary */
    int64_t num_partials; /* ranges of blocks with a dx of their own */
    float *x;             /* [chunk, H], zero rows at the end */
    float *logits;        /* block after block, each [chunk, its width] */
    float *block_top;     /* [num_blocks, chunk]: maximum of a row in a block */
    float *block_sum;     /* [num_blocks, chunk]: sum of exp(z - block_top) */
    float *top;           /* [chunk]: maximum of the row */
    float *factor;        /* [chunk]: scale / sum of exp(z - top) */
    float *dx;            /* [num_partials, chunk, H] */
    float *e;             /* per thread [MAX_WIDTH, H]: e converted */
    float *dz;            /* per thread [256, MAX_WIDTH] */
} flat;

static int64_t block_width(const flat *f, int64_t block)
{
    return block + 1 < f->num_blocks ? VOCAB_BLOCK : f->V - block * VOCAB_BLOCK;
}

/* Block of a slot. */
static int64_t block_of(const flat *f, int64_t slot)
{
    const int64_t block = slot / VOCAB_BLOCK;
    return block < f->num_blocks ? block : f->num_blocks - 1;
}

static int64_t round_up(int64_t rows, int64_t unit)
{
    return (rows + unit - 1) / unit * unit;
}

static float *block_logits(const flat *f, int64_t block, int64_t row)
{
    return f->logits + block * VOCAB_BLOCK * f->chunk + row * block_width(f, block);
}

static flat carve_flat(mtp__carver *carver, const mtp_device *device, const mtp_head_args *a)
{
    flat f = {.R = a->x.shape[0], .H = a->x.shape[1], .V = a->e.shape[0]};
    const size_t budget = a->logits_budget ? a->logits_budget : default_budget;
    f.num_blocks = f.V < VOCAB_BLOCK ? 1 : (f.V + VOCAB_BLOCK / 2) / VOCAB_BLOCK;
    f.unit = mtp__cpu_tile_rows_of(1, block_width(&f, f.num_blocks - 1), f.H);
    const int64_t fit = (int64_t)(budget / ((size_t)f.V * sizeof(float))) / f.unit * f.unit;
    const int64_t all = round_up(f.R, f.unit);
    f.chunk = fit < f.unit ? f.unit : fit < all ? fit : all;
    f.num_partials = f.num_blocks < NUM_PARTIALS ? f.num_blocks : NUM_PARTIALS;
    f.x = mtp__carve(carver, f.chunk * f.H, sizeof(float));
    f.logits = mtp__carve(carver, f.chunk * f.V, sizeof(float));
    f.block_top = mtp__carve(carver, f.num_blocks * f.chunk, sizeof(float));
    f.block_sum = mtp__carve(carver, f.num_blocks * f.chunk, sizeof(float));
    f.top = mtp__carve(carver, f.chunk, sizeof(float));
    f.factor = mtp__carve(carver, f.chunk, sizeof(float));
    f.dx = mtp__carve(carver, f.num_partials * f.chunk * f.H, sizeof(float));
    f.e = mtp__carve(carver, (int64_t)device->num_threads * MAX_WIDTH * f.H, sizeof(float));
    f.dz = mtp__carve(carver, (int64_t)device->num_threads * MTP__TILE_MAX * MAX_WIDTH, sizeof(float));
    return f;
}

static mtp_status check_flat(const mtp_head_args *a)
{
    MTP_TRY(mtp__check_head_flat("head_flat", a));
    const int64_t V = a->e.shape[0];
    if (V > INT32_MAX) return MTP_FAIL(MTP_E_ARGUMENT, "head_flat: e has %lld rows; token ids are I32", (long long)V);
    return mtp__cpu_check_targets("head_flat", a);
}

/* ---- the flat head: the passes over a chunk of rows -------------------------------------------------------------- */

/* The rows of e of a block in fp32. */
static const float *block_rows(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t block,
                               int64_t *stride)
{
    float *copy = f->e + omp_get_thread_num() * MAX_WIDTH * f->H;
    return mtp__cpu_rows_f32(device, &a->e, block * VOCAB_BLOCK, block_width(f, block), copy, stride);
}

static int64_t tile_rows(int64_t padded, int64_t row)
{
    return padded - row < MTP__TILE_MAX ? padded - row : MTP__TILE_MAX;
}

/* Logits of a block with each row's maximum and sum. */
static void block_forward(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t block, int64_t row0,
                          int64_t rows, int64_t padded)
{
    const int64_t width = block_width(f, block);
    int64_t stride;
    const float *e = block_rows(device, a, f, block, &stride);
    for (int64_t tile = 0; tile < padded; tile += MTP__TILE_MAX)
        mtp__cpu_gemm(false, true, tile_rows(padded, tile), width, f->H, f->x + tile * f->H, f->H, e, stride, 0,
                      block_logits(f, block, tile), width);
    for (int64_t r = 0; r < rows; r++) {
        const float *z = block_logits(f, block, r);
        const float top = device->vec->max(z, width);
        f->block_top[block * f->chunk + r] = top;
        f->block_sum[block * f->chunk + r] = device->vec->sum_exp(z, top, width);
        if (a->logits.data)
            memcpy(mtp__row(&a->logits, row0 + r) + block * VOCAB_BLOCK, z, sizeof(float) * (size_t)width);
    }
}

/* The lowest token among the slots of row r whose logits are `top`. */
static int32_t best_token(const mtp_head_args *a, const flat *f, int64_t r, float top)
{
    const int32_t *order = a->order.data;
    int32_t best = INT32_MAX;
    for (int64_t b = 0; b < f->num_blocks; b++) {
        if (f->block_top[b * f->chunk + r] < top) continue;
        const float *z = block_logits(f, b, r);
        const int32_t *token = order + b * VOCAB_BLOCK;
        for (int64_t j = 0; j < block_width(f, b); j++)
            if (!(z[j] < top) && token[j] < best) best = token[j];
    }
    return best;
}

/* Row r of the chunk over all blocks: loss, argmax, and what its gradient needs. */
static void combine_row(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t row0, int64_t r)
{
    int64_t best = 0;
    for (int64_t b = 1; b < f->num_blocks; b++)
        if (f->block_top[b * f->chunk + r] > f->block_top[best * f->chunk + r]) best = b;
    const float top = f->block_top[best * f->chunk + r];
    double sum = 0;
    for (int64_t b = 0; b < f->num_blocks; b++)
        sum += (double)f->block_sum[b * f->chunk + r] * exp((double)f->block_top[b * f->chunk + r] - (double)top);
    if (a->argmax.data) {
        const int64_t within = device->vec->argmax(block_logits(f, best, r), block_width(f, best));
        ((int32_t *)a->argmax.data)[row0 + r] =
            a->order.data ? best_token(a, f, r, top) : (int32_t)(best * VOCAB_BLOCK + within);
    }
    if (a->loss.data) {
        const int64_t own = mtp__cpu_target_slot(a, row0 + r), block = block_of(f, own);
        const float z = block_logits(f, block, r)[own - block * VOCAB_BLOCK];
        ((float *)a->loss.data)[row0 + r] = (float)(((double)top - (double)z) + log(sum));
    }
    f->top[r] = top;
    if (a->scale.data) f->factor[r] = (float)((double)((const float *)a->scale.data)[row0 + r] / sum);
}

/* dz of a tile of rows of a block; rows of padding are zero. */
static void tile_gradient(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t block, int64_t row0,
                          int64_t first, int64_t rows, int64_t padded, float *dz)
{
    const int64_t width = block_width(f, block);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t r = first + i, own = mtp__cpu_target_slot(a, row0 + r);
        device->vec->softmax_scaled(dz + i * width, block_logits(f, block, r), f->top[r], f->factor[r], width);
        if (block_of(f, own) == block)
            dz[i * width + own - block * VOCAB_BLOCK] -= ((const float *)a->scale.data)[row0 + r];
    }
    memset(dz + rows * width, 0, sizeof(float) * (size_t)((padded - rows) * width));
}

/* Gradients of a range of blocks: de of its tokens, and its part of dx. */
static void range_backward(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t range, int64_t row0,
                           int64_t rows, int64_t padded)
{
    float *dz = f->dz + (int64_t)omp_get_thread_num() * MTP__TILE_MAX * MAX_WIDTH;
    const int64_t first = range * f->num_blocks / f->num_partials, end = (range + 1) * f->num_blocks / f->num_partials;
    for (int64_t block = first; block < end; block++) {
        const int64_t width = block_width(f, block);
        int64_t stride = 0;
        const float *e = a->dx.data ? block_rows(device, a, f, block, &stride) : NULL;
        for (int64_t tile = 0; tile < padded; tile += MTP__TILE_MAX) {
            const int64_t m = tile_rows(padded, tile), valid = rows - tile < m ? rows - tile : m;
            tile_gradient(device, a, f, block, row0, tile, valid, m, dz);
            if (a->dx.data)
                mtp__cpu_gemm(false, false, m, f->H, width, dz, width, e, stride, block > first,
                              f->dx + (range * f->chunk + tile) * f->H, f->H);
            if (a->de.data)
                mtp__cpu_gemm(true, false, width, f->H, m, dz, width, f->x + tile * f->H, f->H,
                              a->de_write == MTP_ACCUMULATE || row0 > 0 || tile > 0,
                              mtp__row(&a->de, block * VOCAB_BLOCK), a->de.stride[0]);
        }
    }
}

static void sum_dx(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t row0, int64_t r)
{
    float *sum = f->dx + r * f->H;
    for (int64_t range = 1; range < f->num_partials; range++)
        device->vec->axpy(sum, 1, f->dx + (range * f->chunk + r) * f->H, f->H);
    float *dx = mtp__row(&a->dx, row0 + r);
    if (a->dx_write == MTP_ACCUMULATE)
        device->vec->axpy(dx, 1, sum, f->H);
    else
        memcpy(dx, sum, sizeof(float) * (size_t)f->H);
}

static void flat_chunk(const mtp_device *device, const mtp_head_args *a, const flat *f, int64_t row0)
{
    const int64_t rows = f->R - row0 < f->chunk ? f->R - row0 : f->chunk, padded = round_up(rows, f->unit);
    const bool backward = a->dx.data || a->de.data;
    for (int64_t r = 0; r < rows; r++)
        device->vec->to_f32(f->x + r * f->H, mtp__row_any(&a->x, row0 + r), a->x.dtype, f->H);
    memset(f->x + rows * f->H, 0, sizeof(float) * (size_t)((padded - rows) * f->H));
#pragma omp parallel num_threads(device->num_threads)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t b = 0; b < f->num_blocks; b++) block_forward(device, a, f, b, row0, rows, padded);
#pragma omp for schedule(static)
        for (int64_t r = 0; r < rows; r++) combine_row(device, a, f, row0, r);
        if (backward) {
#pragma omp for schedule(dynamic, 1)
            for (int64_t p = 0; p < f->num_partials; p++) range_backward(device, a, f, p, row0, rows, padded);
        }
        if (a->dx.data) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) sum_dx(device, a, f, row0, r);
        }
    }
}

mtp_status mtp__cpu_head_flat(mtp_device *device, const mtp_head_args *a)
{
    MTP_TRY(check_flat(a));
    MTP_TRY(mtp__check_scratch("head_flat", &a->scratch, mtp__cpu_head_flat_scratch(device, a)));
    mtp__carver carver = {.base = a->scratch.data};
    const flat f = carve_flat(&carver, device, a);
    for (int64_t row0 = 0; row0 < f.R; row0 += f.chunk) flat_chunk(device, a, &f, row0);
    return MTP_OK;
}

size_t mtp__cpu_head_flat_scratch(const mtp_device *device, const mtp_head_args *a)
{
    mtp__carver carver = {0};
    carve_flat(&carver, device, a);
    return carver.used;
}
