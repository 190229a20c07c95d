/* Linear layers: y = x W^T, dx = dy W, dW = dy^T x (shapes: ops.h), as sgemm over two-dimensional tiles, one thread a
 * tile.
 *
 * Row independence: a tile of model rows is a multiple of 64 rows; what is left over runs as one more tile padded with
 * zero rows in scratch (cpu.h says why). When the BLAS keeps the bits of an element whatever the tile around it
 * (info.rows_exact), tiles are cut to feed all threads; otherwise they are fixed. */
#include <omp.h>
#include <string.h>

#include "check.h"
#include "check_args.h"
#include "cpu/cpu.h"

/* ---- how to cut C[rows, cols] ------------------------------------------------------------------------------------ */

typedef struct tiling {
    int64_t rows, cols; /* of a tile */
    int64_t row_tiles, col_tiles;
    int64_t unit; /* products run on multiples of this many rows */
} tiling;

enum {
    ROWS_MOST = MTP__GEMM_ROWS_MOST, /* more than that gains nothing and unbalances the threads */
    ROWS_CONVERTED = 256,            /* when rows are first converted to fp32 in scratch */
    DEPTH_CONVERTED = 512,           /* the same for the rows that dW sums over */
    FIXED_ROWS = MTP__TILE_MAX,
    /* packing one element of a factor costs about as much as so many multiply-adds: of A, and of B */
    PACKING_ROWS = 20,
    PACKING_COLS = 28,
    /* rows of B that stand a multiple of this many floats apart (4 KiB) fall into one set of the first-level cache */
    ALIASING = 1024,
    PADDING = 16,
};

static int64_t divide_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

static int64_t round_up(int64_t n, int64_t unit)
{
    return divide_up(n, unit) * unit;
}

/* Elements between the rows of a matrix for BLAS, which wants at least the width even when there is one row. */
static int64_t leading(const mtp_view *matrix)
{
    return matrix->stride[0] > matrix->shape[1] ? matrix->stride[0] : matrix->shape[1];
}

static tiling tiles_of(int64_t rows, int64_t cols, int64_t tile_rows, int64_t tile_cols, int64_t unit)
{
    return (tiling){.rows = tile_rows,
                    .cols = tile_cols,
                    .row_tiles = divide_up(rows, tile_rows),
                    .col_tiles = divide_up(cols, tile_cols),
                    .unit = unit};
}

/* Time of the slowest thread in multiply-adds a depth, packing included. */
static double cost_of(const tiling *t, int64_t threads)
{
    const double rounds = (double)divide_up(t->row_tiles * t->col_tiles, threads);
    return rounds *
           ((double)t->rows * (double)t->cols + PACKING_ROWS * (double)t->rows + PACKING_COLS * (double)t->cols);
}

/* The cheapest way to cut C[rows, cols] of depth `depth` into tiles of at most `most` rows. Columns are cut at
 * multiples of 64 only, and never so fine that a BLAS could take the tile for a small product. */
static tiling cut(const mtp_device *device, int64_t rows, int64_t cols, int64_t depth, int64_t most)
{
    if (cols * depth <= MTP__SMALL_FACTOR)
        return tiles_of(rows, cols, FIXED_ROWS, cols, mtp__cpu_tile_rows_of(1, cols, depth));
    if (!device->info.rows_exact) return tiles_of(rows, cols, FIXED_ROWS, cols, MTP__TILE_MIN);
    const int64_t threads = device->num_threads, padded = round_up(rows, MTP__TILE_MIN);
    if (most > padded) most = padded;
    tiling best = tiles_of(rows, cols, most, cols, MTP__TILE_MIN);
    double least = cost_of(&best, threads);
    for (int64_t tile_rows = MTP__TILE_MIN; tile_rows <= most; tile_rows += MTP__TILE_MIN)
        for (int64_t parts = 1; parts <= 4 * threads; parts++) {
            const int64_t tile_cols = parts == 1 ? cols : round_up(divide_up(cols, parts), 64);
            if (parts > 1 && (cols % 64 != 0 || tile_cols * depth <= MTP__SMALL_FACTOR || cols % tile_cols != 0))
                continue;
            const tiling t = tiles_of(rows, cols, tile_rows, tile_cols, MTP__TILE_MIN);
            const double cost = cost_of(&t, threads);
            if (cost < least) {
                best = t;
                least = cost;
            }
        }
    return best;
}

/* ---- y and dx: C[rows, cols] (+)= A[rows, depth] op(B) ----------------------------------------------------------- */

typedef struct product {
    const mtp_device *device;
    const mtp_view *a; /* real */
    const float *b;    /* [cols, depth] when trans_b, else [depth, cols] */
    int64_t ldb;
    bool trans_b;
    const mtp_view *c;
    mtp_write write;
    int64_t rows, cols, depth;
    tiling tiles;
} product;

/* Scratch: a copy of B when it is not fp32 or its rows alias; then for each thread the padded (or converted) rows of A
 * and the padded rows of C. */
typedef struct product_scratch {
    float *b, *a_rows, *c_rows;
    int64_t ldb;            /* of the copy of B */
    int64_t a_size, c_size; /* floats a thread */
    bool copies_b;
    size_t total;
} product_scratch;

/* Packing reads 16 rows of a transposed B side by side: when they alias, lines leave the cache before they are used up,
 * and a product of 256 rows takes a fifth longer (OpenBLAS 0.3.21, AVX-512). Copying B costs a quarter of that. */
static bool rows_alias(const product *p, const mtp_view *b)
{
    return p->trans_b && leading(b) % ALIASING == 0;
}

static product_scratch lay_out(const product *p, const mtp_view *b, void *base)
{
    mtp__carver carver = {.base = base};
    product_scratch s = {.ldb = b->shape[1] % ALIASING == 0 ? b->shape[1] + PADDING : b->shape[1],
                         .copies_b = b->dtype != MTP_F32 || rows_alias(p, b)};
    const int64_t threads = p->device->num_threads;
    if (s.copies_b) s.b = mtp__carve(&carver, b->shape[0] * s.ldb, sizeof(float));
    s.a_size = round_up((p->a->dtype != MTP_F32 ? ROWS_CONVERTED : p->tiles.unit) * p->depth, 16);
    s.c_size = round_up(p->tiles.unit * p->tiles.cols, 16);
    s.a_rows = mtp__carve(&carver, threads * s.a_size, sizeof(float));
    s.c_rows = mtp__carve(&carver, threads * s.c_size, sizeof(float));
    s.total = carver.used;
    return s;
}

static void plan(product *p)
{
    p->tiles = cut(p->device, p->rows, p->cols, p->depth, p->a->dtype == MTP_F32 ? ROWS_MOST : ROWS_CONVERTED);
}

static void multiply(const product *p, int64_t rows, const float *a, int64_t lda, int64_t first_col, int64_t cols,
                     float *c, int64_t ldc)
{
    const float *b = p->b + (p->trans_b ? first_col * p->ldb : first_col);
    mtp__cpu_gemm(false, p->trans_b, rows, cols, p->depth, a, lda, b, p->ldb, p->write == MTP_ACCUMULATE ? 1.0f : 0.0f,
                  c, ldc);
}

/* Rows [first, first + count) of A as fp32 in `to`, with zero rows up to `padded`. */
static void copy_rows(const product *p, int64_t first, int64_t count, int64_t padded, float *to)
{
    for (int64_t r = 0; r < count; r++)
        p->device->vec->to_f32(to + r * p->depth, mtp__row_any(p->a, first + r), p->a->dtype, p->depth);
    memset(to + count * p->depth, 0, (size_t)((padded - count) * p->depth) * sizeof *to);
}

/* The rest of a tile, fewer rows than a unit: through padded copies of A (already there when A was converted) and C. */
static void multiply_rest(const product *p, int64_t first_row, int64_t count, const float *a_padded, int64_t first_col,
                          int64_t cols, float *c_rows)
{
    const size_t bytes = (size_t)cols * sizeof(float);
    if (p->write == MTP_ACCUMULATE) {
        for (int64_t r = 0; r < count; r++) memcpy(c_rows + r * cols, mtp__row(p->c, first_row + r) + first_col, bytes);
        memset(c_rows + count * cols, 0, (size_t)(p->tiles.unit - count) * bytes);
    }
    multiply(p, p->tiles.unit, a_padded, p->depth, first_col, cols, c_rows, cols);
    for (int64_t r = 0; r < count; r++) memcpy(mtp__row(p->c, first_row + r) + first_col, c_rows + r * cols, bytes);
}

static void multiply_tile(const product *p, int64_t tile, float *a_rows, float *c_rows)
{
    const tiling *t = &p->tiles;
    const int64_t first_row = tile / t->col_tiles * t->rows, first_col = tile % t->col_tiles * t->cols;
    const int64_t rows = p->rows - first_row < t->rows ? p->rows - first_row : t->rows;
    const int64_t cols = p->cols - first_col < t->cols ? p->cols - first_col : t->cols;
    const int64_t whole = rows / t->unit * t->unit, rest = rows - whole;
    const bool converted = p->a->dtype != MTP_F32;
    const float *a = converted ? a_rows : mtp__row(p->a, first_row);
    const float *a_rest = converted ? a_rows + whole * p->depth : a_rows;
    if (converted)
        copy_rows(p, first_row, rows, whole + (rest ? t->unit : 0), a_rows);
    else if (rest)
        copy_rows(p, first_row + whole, rest, t->unit, a_rows);
    if (whole)
        multiply(p, whole, a, converted ? p->depth : leading(p->a), first_col, cols,
                 mtp__row(p->c, first_row) + first_col, leading(p->c));
    if (rest) multiply_rest(p, first_row + whole, rest, a_rest, first_col, cols, c_rows);
}

static mtp_status run_product(const char *op, product *p, const mtp_view *b, const mtp_scratch *scratch)
{
    plan(p);
    const product_scratch s = lay_out(p, b, scratch->data);
    MTP_TRY(mtp__check_scratch(op, scratch, s.total));
    p->b = s.copies_b ? s.b : b->data;
    p->ldb = s.copies_b ? s.ldb : leading(b);
    const int64_t tiles = p->tiles.row_tiles * p->tiles.col_tiles, copied = s.copies_b ? b->shape[0] : 0;
#pragma omp parallel num_threads(p->device->num_threads)
    {
        const int64_t thread = omp_get_thread_num();
        if (copied) {
#pragma omp for schedule(static)
            for (int64_t r = 0; r < copied; r++)
                p->device->vec->to_f32(s.b + r * s.ldb, mtp__row_any(b, r), b->dtype, b->shape[1]);
        }
#pragma omp for schedule(dynamic)
        for (int64_t tile = 0; tile < tiles; tile++)
            multiply_tile(p, tile, s.a_rows + thread * s.a_size, s.c_rows + thread * s.c_size);
    }
    return MTP_OK;
}

static mtp_status check_sizes(const char *op, const mtp_linear_args *a)
{
    const mtp_view *views[3] = {&a->x, &a->w, &a->y};
    for (int i = 0; i < 3; i++)
        if (views[i]->shape[0] > INT32_MAX / 2 || views[i]->stride[0] > INT32_MAX || views[i]->shape[1] > INT32_MAX / 2)
            return MTP_FAIL(MTP_E_ARGUMENT, "%s: %c is larger than BLAS can index (2^30 rows, 2^31 elements a row)", op,
                            "xwy"[i]);
    return MTP_OK;
}

static product forward(const mtp_device *device, const mtp_linear_args *a)
{
    return (product){.device = device,
                     .a = &a->x,
                     .trans_b = true,
                     .c = &a->y,
                     .write = a->write,
                     .rows = a->x.shape[0],
                     .cols = a->w.shape[0],
                     .depth = a->x.shape[1]};
}

static product input_gradient(const mtp_device *device, const mtp_linear_args *a)
{
    return (product){.device = device,
                     .a = &a->y,
                     .trans_b = false,
                     .c = &a->x,
                     .write = a->write,
                     .rows = a->x.shape[0],
                     .cols = a->x.shape[1],
                     .depth = a->w.shape[0]};
}

size_t mtp__cpu_linear_fwd_scratch(const mtp_device *device, const mtp_linear_args *a)
{
    product p = forward(device, a);
    plan(&p);
    return lay_out(&p, &a->w, NULL).total;
}

mtp_status mtp__cpu_linear_fwd(mtp_device *device, const mtp_linear_args *a)
{
    MTP_TRY(mtp__check_linear_fwd("linear_fwd", a, MTP_F32));
    MTP_TRY(check_sizes("linear_fwd", a));
    product p = forward(device, a);
    return run_product("linear_fwd", &p, &a->w, &a->scratch);
}

size_t mtp__cpu_linear_dx_scratch(const mtp_device *device, const mtp_linear_args *a)
{
    product p = input_gradient(device, a);
    plan(&p);
    return lay_out(&p, &a->w, NULL).total;
}

mtp_status mtp__cpu_linear_dx(mtp_device *device, const mtp_linear_args *a)
{
    MTP_TRY(mtp__check_linear_dx("linear_dx", a, MTP_F32));
    MTP_TRY(check_sizes("linear_dx", a));
    product p = input_gradient(device, a);
    return run_product("linear_dx", &p, &a->w, &a->scratch);
}

/* ---- dw[N, M] (+)= dy[R, N]^T x[R, M]: no padding; an element sums over all rows in one order -------------------- */

/* Tiles depend on the shape of w and on the threads only where the BLAS keeps the bits of an element in any tile. */
static tiling cut_weights(const mtp_device *device, const mtp_linear_args *a)
{
    const int64_t out = a->w.shape[0], in = a->w.shape[1], rows = a->x.shape[0];
    const bool free_tiles = device->info.rows_exact && a->x.dtype == MTP_F32 && out % 64 == 0 && in % 64 == 0 &&
                            64 * rows > MTP__SMALL_FACTOR;
    if (free_tiles) return cut(device, out, in, rows, ROWS_MOST);
    return tiles_of(out, in, 256, 256, 1);
}

static int64_t converted_size(const mtp_linear_args *a, const tiling *t)
{
    return a->x.dtype == MTP_F32 ? 0 : round_up(DEPTH_CONVERTED * t->cols, 16);
}

size_t mtp__cpu_linear_dw_scratch(const mtp_device *device, const mtp_linear_args *a)
{
    const tiling t = cut_weights(device, a);
    return (size_t)(converted_size(a, &t) * device->num_threads) * sizeof(float);
}

/* One tile of dw, the rows of x in chunks of DEPTH_CONVERTED when they have to be converted first. */
static void weight_tile(const mtp_device *device, const mtp_linear_args *a, const tiling *t, int64_t tile,
                        float *x_rows)
{
    const int64_t first_out = tile / t->col_tiles * t->rows, first_in = tile % t->col_tiles * t->cols;
    const int64_t outs = a->w.shape[0] - first_out < t->rows ? a->w.shape[0] - first_out : t->rows;
    const int64_t ins = a->w.shape[1] - first_in < t->cols ? a->w.shape[1] - first_in : t->cols;
    const int64_t rows = a->x.shape[0];
    float *dw = mtp__row(&a->w, first_out) + first_in;
    const float beta = a->write == MTP_ACCUMULATE ? 1.0f : 0.0f;
    if (a->x.dtype == MTP_F32) {
        mtp__cpu_gemm(true, false, outs, ins, rows, mtp__row(&a->y, 0) + first_out, leading(&a->y),
                      mtp__row(&a->x, 0) + first_in, leading(&a->x), beta, dw, leading(&a->w));
        return;
    }
    for (int64_t r = 0; r < rows; r += DEPTH_CONVERTED) {
        const int64_t count = rows - r < DEPTH_CONVERTED ? rows - r : DEPTH_CONVERTED;
        const mtp_view columns = mtp_view_cols(a->x, first_in, ins);
        for (int64_t i = 0; i < count; i++)
            device->vec->to_f32(x_rows + i * ins, mtp__row_any(&columns, r + i), a->x.dtype, ins);
        mtp__cpu_gemm(true, false, outs, ins, count, mtp__row(&a->y, r) + first_out, leading(&a->y), x_rows, ins,
                      r > 0 ? 1.0f : beta, dw, leading(&a->w));
    }
}

mtp_status mtp__cpu_linear_dw(mtp_device *device, const mtp_linear_args *a)
{
    MTP_TRY(mtp__check_linear_dw("linear_dw", a, MTP_F32));
    MTP_TRY(check_sizes("linear_dw", a));
    MTP_TRY(mtp__check_scratch("linear_dw", &a->scratch, mtp__cpu_linear_dw_scratch(device, a)));
    const tiling t = cut_weights(device, a);
    const int64_t tiles = t.row_tiles * t.col_tiles, size = converted_size(a, &t);
    float *x_rows = a->scratch.data;
#pragma omp parallel for num_threads(device->num_threads) schedule(dynamic)
    for (int64_t tile = 0; tile < tiles; tile++)
        weight_tile(device, a, &t, tile, size ? x_rows + omp_get_thread_num() * size : NULL);
    return MTP_OK;
}
