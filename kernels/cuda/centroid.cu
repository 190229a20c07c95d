/* The centroid head: cross-entropy over the tokens of a few centroids (their choice: topk.cu).
 *
 *   z[j] = x . e[j]      loss = log sum exp z - z[target]      dz = scale (softmax(z) - onehot)
 *   dx = sum dz[j] e[j]      de[j] = sum over rows dz[j] x
 *
 * The pairs of a centroid are brought together (centroid_sort.cu); its P rows of e, a block of memory, meet them in
 * tiles:
 *   1. z: the rows of x of a tile of pairs against the centroid's rows of e. The logits stay in registers: each pair
 *      leaves its maximum and its sum, 12 bytes instead of P logits
 *   2. a warp has a row: loss, argmax, miss over its slots
 *   3. z again, the same way, for dz [pairs, P]
 *   4. slot_dx [pairs, H] = dz e, then a row adds up its slots in their order
 *   5. de: a block has some rows of one centroid and up to SEGMENT_PAIRS of its pairs, in order; centroids with more
 *      have their segments added up in order by a second pass
 * No sum depends on the order in which blocks run. Rows are taken in chunks so that the pairs' memory stays within
 * logits_budget (never less than 64 rows). Products are fp32, or have bf16 factors, dz among them, on a device in bf16
 * mode (product.cuh); x and e of another type, or with rows not aligned to 16 bytes, are copied first.
 * head_hierarchical is the case k = 0 with every target's centroid forced. */
#include "cuda/centroid.h"
#include "cuda/product.cuh"

namespace mtp
{
namespace
{

/* ---- tiles of pairs ---------------------------------------------------------------------------------------------- */

struct pair_tile {
    int centroid, first, count;
};

/* The tile with this number; false behind the last one. */
template <int TILE_ROWS>
__device__ bool find_tile(const grouped &g, int number, pair_tile *tile)
{
    if (number >= g.tile_begin[g.C]) return false;
    const int c = g.tile_of[number];
    tile->centroid = c;
    tile->first = g.begin[c] + (number - g.tile_begin[c]) * TILE_ROWS;
    tile->count = min((int)TILE_ROWS, g.begin[c + 1] - tile->first);
    return true;
}

/* The rows of e of a centroid from its `first` on, `width` columns from `column` on. */
template <typename T, bool ROWS_ARE_DEPTH>
__device__ indexed_rows<T, ROWS_ARE_DEPTH> tokens_of(const grouped &g, int centroid, int first, int column, int width)
{
    const T *e = static_cast<const T *>(g.e) + ((int64_t)centroid * g.P + first) * g.e_row + column;
    return {e, g.e_row, NULL, g.P - first, width};
}

/* The rows of x of some pairs. */
template <typename T, bool ROWS_ARE_DEPTH>
__device__ indexed_rows<T, ROWS_ARE_DEPTH> rows_of(const grouped &g, int first, int count, int column, int width)
{
    return {static_cast<const T *>(g.x) + column, g.x_row, g.row_of + first, count, width};
}

/* dz of some pairs. */
template <typename T, bool ROWS_ARE_DEPTH>
__device__ indexed_rows<T, ROWS_ARE_DEPTH> dz_of(const grouped &g, int first, int count, int column, int width)
{
    return {static_cast<const T *>(g.dz) + (int64_t)first * g.dz_row + column, g.dz_row, NULL, count, width};
}

template <typename T>
__device__ __forceinline__ void store_pair(T *at, float x, float y)
{
    struct alignas(2 * sizeof(T)) two {
        T v[2];
    };
    *reinterpret_cast<two *>(at) = two{{from_float<T>(x), from_float<T>(y)}};
}

/* ---- the logits -------------------------------------------------------------------------------------------------- */

/* What the groups of lanes that have a row's logits tell each other. */
template <typename Product>
struct told {
    pair_part part[Product::ROW_PARTS][Product::ROWS];
};

/* One row of a tile over the lanes that have it; `width` columns are logits. */
template <typename Product>
__device__ pair_part part_of(const grouped &g, const Product &product, int r, int slot0, int width)
{
    pair_part part = {-INFINITY, 0, INT32_MAX};
    product.pairs(r, [&](int j, float z0, float z1) {
        if (j < width) part.top = fmaxf(part.top, z0);
        if (j + 1 < width) part.top = fmaxf(part.top, z1);
    });
#pragma unroll
    for (int offset = Product::ROW_LANES / 2; offset > 0; offset /= 2)
        part.top = fmaxf(part.top, __shfl_xor_sync(ALL_LANES, part.top, offset));
    product.pairs(r, [&](int j, float z0, float z1) {
        if (j < width) part.sum += expf(z0 - part.top);
        if (j + 1 < width) part.sum += expf(z1 - part.top);
        if (!g.argmax) return;
        if (j < width && !(z0 < part.top)) part.best = min(part.best, g.order[slot0 + j]);
        if (j + 1 < width && !(z1 < part.top)) part.best = min(part.best, g.order[slot0 + j + 1]);
    });
#pragma unroll
    for (int offset = Product::ROW_LANES / 2; offset > 0; offset /= 2) {
        part.sum += __shfl_xor_sync(ALL_LANES, part.sum, offset);
        part.best = min(part.best, __shfl_xor_sync(ALL_LANES, part.best, offset));
    }
    return part;
}

/* Adds b to a; parts without a logit (sum 0) change nothing. */
__device__ __forceinline__ void add_part(pair_part *a, const pair_part &b)
{
    if (b.top > a->top) {
        a->sum *= expf(a->top - b.top);
        a->top = b.top;
        a->best = b.best;
        a->sum += b.sum;
    } else {
        if (b.top == a->top) a->best = min(a->best, b.best);
        a->sum += b.top > -INFINITY || !(b.sum == 0) ? b.sum * expf(b.top - a->top) : 0.0f;
    }
}

/* The target's logit, and the logits that were asked for. */
template <typename Product>
__device__ void hand_out(const grouped &g, const Product &product, int r, int pair, int token0, int slot0, int width)
{
    const int row = g.row_of[pair], own = g.own[row] - slot0, number = g.number_of[pair];
    float *logits = g.logits && number < g.k ? g.logits + row * g.logits_row + (int64_t)number * g.P + token0 : NULL;
    product.pairs(r, [&](int j, float z0, float z1) {
        if (j < width && j == own) g.own_z[row] = z0;
        if (j + 1 < width && j + 1 == own) g.own_z[row] = z1;
        if (logits && j < width) logits[j] = z0;
        if (logits && j + 1 < width) logits[j + 1] = z1;
    });
}

template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) pair_sums(grouped g)
{
    using T = typename Product::factor;
    MTP_SHARED(typename Product::shared, shared, [1]);
    static_assert(sizeof(told<Product>) <= sizeof(typename Product::shared), "it takes the place of the tiles");
    pair_tile tile;
    if (!find_tile<Product::ROWS>(g, (int)blockIdx.x, &tile)) return;
    const int token0 = (int)blockIdx.y * Product::COLS, slot0 = tile.centroid * g.P + token0;
    const int width = min((int)Product::COLS, g.P - token0);
    Product product;
    product.run(rows_of<T, false>(g, tile.first, tile.count, 0, g.width),
                tokens_of<T, false>(g, tile.centroid, token0, 0, g.width), g.width, shared);
    told<Product> *told_by = reinterpret_cast<told<Product> *>(shared);
#pragma unroll
    for (int r = 0; r < Product::OWN_ROWS; r++) {
        const int i = Product::row(r);
        const pair_part part = part_of(g, product, r, slot0, width);
        if ((int)threadIdx.x % Product::ROW_LANES == 0) told_by->part[Product::part()][i] = part;
        if (i < tile.count) hand_out(g, product, r, tile.first + i, token0, slot0, width);
    }
    __syncthreads();
    for (int i = (int)threadIdx.x; i < tile.count; i += Product::THREADS) {
        pair_part all = told_by->part[0][i];
#pragma unroll
        for (int p = 1; p < Product::ROW_PARTS; p++) add_part(&all, told_by->part[p][i]);
        g.part[(int64_t)(tile.first + i) * g.columns + blockIdx.y] = all;
    }
}

/* dz, from the same logits bit for bit. */
template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) pair_dz(grouped g)
{
    using T = typename Product::factor;
    MTP_SHARED(typename Product::shared, shared, [1]);
    pair_tile tile;
    if (!find_tile<Product::ROWS>(g, (int)blockIdx.x, &tile)) return;
    const int token0 = (int)blockIdx.y * Product::COLS, slot0 = tile.centroid * g.P + token0;
    const int width = g.P - token0, whole = g.dz_row - token0;
    Product product;
    product.run(rows_of<T, false>(g, tile.first, tile.count, 0, g.width),
                tokens_of<T, false>(g, tile.centroid, token0, 0, g.width), g.width, shared);
#pragma unroll
    for (int r = 0; r < Product::OWN_ROWS; r++) {
        const int pair = tile.first + Product::row(r);
        if (Product::row(r) >= tile.count) continue;
        const int row = g.row_of[pair], own = g.own[row] - slot0;
        const float top = g.top[row], factor = g.factor[row], scale = g.scale[row];
        T *dz = static_cast<T *>(g.dz) + (int64_t)pair * g.dz_row + token0;
        product.pairs(r, [&](int j, float z0, float z1) {
            const float d0 = expf(z0 - top) * factor - (j == own ? scale : 0.0f);
            const float d1 = expf(z1 - top) * factor - (j + 1 == own ? scale : 0.0f);
            if (j < whole) store_pair(dz + j, j < width ? d0 : 0.0f, j + 1 < width ? d1 : 0.0f);
        });
    }
}

/* ---- the gradients ----------------------------------------------------------------------------------------------- */

template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) pair_dx(grouped g)
{
    using T = typename Product::factor;
    MTP_SHARED(typename Product::shared, shared, [1]);
    pair_tile tile;
    if (!find_tile<Product::ROWS>(g, (int)blockIdx.x, &tile)) return;
    const int column0 = (int)blockIdx.y * Product::COLS, width = g.line - column0;
    Product product;
    product.run(dz_of<T, false>(g, tile.first, tile.count, 0, g.dz_row),
                tokens_of<T, true>(g, tile.centroid, 0, column0, g.width - column0), g.P, shared);
#pragma unroll
    for (int r = 0; r < Product::OWN_ROWS; r++) {
        if (Product::row(r) >= tile.count) continue;
        float *dx = g.slot_dx + (int64_t)(tile.first + Product::row(r)) * g.line + column0;
        product.pairs(r, [&](int j, float x, float y) {
            if (j < width) store_pair(dx + j, x, y);
        });
    }
}

/* The gradient of a centroid's token. */
__device__ float *token_row(const grouped &g, int centroid, int j)
{
    return g.de + ((int64_t)centroid * g.P + j) * g.de_row;
}

template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) token_de(grouped g)
{
    using T = typename Product::factor;
    MTP_SHARED(typename Product::shared, shared, [1]);
    const int number = (int)blockIdx.x, token0 = (int)blockIdx.y * Product::ROWS;
    const int column0 = (int)blockIdx.z * Product::COLS, width = g.H - column0;
    if (number >= g.segment_begin[g.C]) return;
    const int centroid = g.segment_of[number], segment = number - g.segment_begin[centroid];
    const int first = g.begin[centroid] + segment * SEGMENT_PAIRS;
    const int count = min(SEGMENT_PAIRS, g.begin[centroid + 1] - first);
    if (count == 0 && g.de_add) return;
    const bool whole = g.part_begin[centroid] == g.part_begin[centroid + 1];
    Product product;
    product.run(dz_of<T, true>(g, first, count, token0, g.dz_row - token0),
                rows_of<T, true>(g, first, count, column0, g.width - column0), count, shared);
#pragma unroll
    for (int r = 0; r < Product::OWN_ROWS; r++) {
        const int token = token0 + Product::row(r);
        if (token >= g.P) continue;
        float *to = whole ? token_row(g, centroid, token) + column0
                          : g.part_de + ((int64_t)(g.part_begin[centroid] + segment) * g.P + token) * g.H + column0;
        const bool add = whole && g.de_add;
        product.pairs(r, [&](int j, float x, float y) {
            if (g.de_even && j < width) {
                float2 *two = reinterpret_cast<float2 *>(to + j);
                *two = add ? make_float2(two->x + x, two->y + y) : make_float2(x, y);
                return;
            }
            if (j < width) to[j] = add ? to[j] + x : x;
            if (j + 1 < width) to[j + 1] = add ? to[j + 1] + y : y;
        });
    }
}

enum { PART_THREADS = 256, PART_BLOCKS = 8 /* of a centroid */ };

/* de of the tokens of the centroids that have parts: the parts in order. */
__global__ void __launch_bounds__(PART_THREADS) sum_parts(grouped g)
{
    const int centroid = (int)blockIdx.x, begin = g.part_begin[centroid], end = g.part_begin[centroid + 1];
    if (begin == end) return;
    for (int token = (int)blockIdx.y; token < g.P; token += PART_BLOCKS) {
        float *de = token_row(g, centroid, token);
        for (int i = (int)threadIdx.x; i < g.H; i += PART_THREADS) {
            float sum = g.de_add ? de[i] : 0.0f;
            for (int part = begin; part < end; part++) sum += g.part_de[((int64_t)part * g.P + token) * g.H + i];
            de[i] = sum;
        }
    }
}

/* ---- rows over their pairs --------------------------------------------------------------------------------------- */

enum { ROW_THREADS = 256, ROWS_A_BLOCK = ROW_THREADS / WARP };

/* The parts of the slots [from, to) of a row over the lanes of a warp. */
__device__ pair_part sum_row(const grouped &g, const int *place, int from, int to)
{
    const int lane = (int)threadIdx.x % WARP;
    pair_part all = {-INFINITY, 0, INT32_MAX};
    for (int i = from * g.columns + lane; i < to * g.columns; i += WARP) {
        const int pair = place[i / g.columns];
        if (pair >= 0) add_part(&all, g.part[(int64_t)pair * g.columns + i % g.columns]);
    }
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const pair_part other = {__shfl_xor_sync(ALL_LANES, all.top, offset),
                                 __shfl_xor_sync(ALL_LANES, all.sum, offset),
                                 __shfl_xor_sync(ALL_LANES, all.best, offset)};
        add_part(&all, other);
    }
    return all;
}

/* A warp has a row: loss, argmax, miss, and what dz needs. */
__global__ void __launch_bounds__(ROW_THREADS) combine_rows(grouped g)
{
    const int row = (int)blockIdx.x * ROWS_A_BLOCK + (int)threadIdx.x / WARP;
    if (row >= g.R) return;
    const int *place = g.place + (int64_t)row * g.slots;
    const pair_part open = sum_row(g, place, 0, g.k);
    pair_part all = open;
    add_part(&all, sum_row(g, place, g.k, g.slots));
    if (threadIdx.x % WARP != 0) return;
    if (g.loss) g.loss[row] = g.own[row] < 0 ? NAN : (all.top - g.own_z[row]) + logf(all.sum);
    if (g.miss) g.miss[row] = place[g.k] >= 0;
    if (g.argmax) g.argmax[row] = open.best;
    g.top[row] = all.top;
    if (g.scale) g.factor[row] = g.scale[row] / all.sum;
}

/* dx of a row: its pairs in the order of the slots. A warp has a row, a lane 16 bytes of it at a time. */
__global__ void __launch_bounds__(ROW_THREADS) sum_slots(grouped g)
{
    enum { PIECE = 4 };
    const int row = (int)blockIdx.x * ROWS_A_BLOCK + (int)threadIdx.x / WARP;
    if (row >= g.R) return;
    const int *place = g.place + (int64_t)row * g.slots;
    for (int first = (int)threadIdx.x % WARP * PIECE; first < g.H; first += WARP * PIECE) {
        float *dx = g.dx + row * g.dx_row + first;
        const int n = min((int)PIECE, g.H - first);
        float sum[PIECE];
#pragma unroll
        for (int i = 0; i < PIECE; i++) sum[i] = g.dx_add && i < n ? dx[i] : 0.0f;
#pragma unroll 4
        for (int s = 0; s < g.slots; s++) {
            if (place[s] < 0) continue;
            const pack<PIECE> part = load<PIECE>(g.slot_dx + (int64_t)place[s] * g.line + first);
#pragma unroll
            for (int i = 0; i < PIECE; i++) sum[i] += part.v[i];
        }
#pragma unroll
        for (int i = 0; i < PIECE; i++)
            if (i < n) dx[i] = sum[i];
    }
}

/* ---- arguments, scratch, launches -------------------------------------------------------------------------------- */

const size_t default_budget = (size_t)256 << 20;
constexpr int64_t CHUNK_MIN = 64;

/* Factors of products: their type, and elements in 16 bytes. */
struct factors {
    mtp_dtype dtype;
    int64_t size, grain;
};

factors factors_of(const mtp_device *device)
{
    const mtp_dtype dtype = device->bf16 ? MTP_BF16 : MTP_F32;
    const int64_t size = (int64_t)mtp_dtype_size(dtype);
    return {dtype, size, 16 / size};
}

/* Can the products take the rows of a matrix from where they lie? fp32 takes any. */
bool fits(const factors &f, const mtp_view &view)
{
    if (view.dtype != f.dtype) return false;
    return f.dtype == MTP_F32 || (view.shape[1] % f.grain == 0 && view.stride[0] % f.grain == 0);
}

void set_sizes(grouped *g, const factors &f, const mtp_head_args *a, int64_t k)
{
    g->R = (int)a->x.shape[0];
    g->H = (int)a->x.shape[1];
    g->V = (int)a->e.shape[0];
    g->C = (int)a->order.shape[0];
    g->P = (int)a->order.shape[1];
    g->k = (int)k;
    g->slots = (int)k + 1;
    g->dz_row = (int)(divide_up(g->P, f.grain) * f.grain);
    g->line = (int)(divide_up(g->H, f.grain) * f.grain);
    g->width = f.dtype == MTP_F32 ? g->H : g->line;
    g->columns = (int)divide_up(g->P, f.dtype == MTP_F32 ? (int)fp32_product::COLS : (int)bf16_product<64>::COLS);
}

int64_t chunk_of(const grouped &g, const factors &f, const mtp_head_args *a)
{
    const int64_t R = a->x.shape[0];
    const int64_t pair_bytes =
        g.dz_row * f.size + (g.line + 3) * (int64_t)sizeof(float) + g.columns * (int64_t)sizeof(pair_part);
    const size_t budget = a->logits_budget ? a->logits_budget : default_budget;
    const int64_t fit = (int64_t)(budget / (size_t)(g.slots * pair_bytes)) / CHUNK_MIN * CHUNK_MIN;
    const int64_t chunk = fit < CHUNK_MIN ? CHUNK_MIN : fit;
    return chunk < R ? chunk : R;
}

grouped carve_grouped(mtp__carver *carver, const mtp_device *device, const mtp_head_args *a, int64_t k, int64_t *chunk)
{
    const factors f = factors_of(device);
    grouped g = {};
    set_sizes(&g, f, a, k);
    *chunk = chunk_of(g, f, a);
    const int64_t rows = *chunk, pairs = rows * g.slots;
    g.place = (int *)mtp__carve(carver, pairs, sizeof(int));
    g.row_of = (int *)mtp__carve(carver, pairs, sizeof(int));
    g.number_of = (int *)mtp__carve(carver, pairs, sizeof(int));
    g.own = (int *)mtp__carve(carver, rows, sizeof(int));
    g.count = (int *)mtp__carve(carver, divide_up(rows, PART_ROWS) * g.C, sizeof(int));
    g.begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.tile_begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.segment_begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.part_begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.tile_of = (int *)mtp__carve(carver, pairs / fp32_product::ROWS + (g.C < pairs ? g.C : pairs), sizeof(int));
    g.segment_of = (int *)mtp__carve(carver, pairs / SEGMENT_PAIRS + g.C, sizeof(int));
    g.part = (pair_part *)mtp__carve(carver, pairs * g.columns, sizeof(pair_part));
    g.own_z = (float *)mtp__carve(carver, rows, sizeof(float));
    g.top = (float *)mtp__carve(carver, rows, sizeof(float));
    g.factor = (float *)mtp__carve(carver, rows, sizeof(float));
    /* a centroid has at most one pair a row, and two parts or more when it has any */
    const int64_t parts = rows > SEGMENT_PAIRS ? 2 * (pairs / SEGMENT_PAIRS) : 0;
    g.part_de = (float *)mtp__carve(carver, parts * g.P * g.H, sizeof(float));
    g.dz = mtp__carve(carver, pairs * g.dz_row, (size_t)f.size);
    g.slot_dx = (float *)mtp__carve(carver, pairs * g.line, sizeof(float));
    if (!fits(f, a->x)) g.x_copy = mtp__carve(carver, rows * g.width, (size_t)f.size);
    if (!fits(f, a->e)) g.e_copy = mtp__carve(carver, (int64_t)g.V * g.width, (size_t)f.size);
    return g;
}

size_t grouped_scratch(const mtp_device *device, const mtp_head_args *a, int64_t k)
{
    mtp__carver carver = {};
    int64_t chunk;
    carve_grouped(&carver, device, a, k, &chunk);
    return carver.used;
}

/* Beside scratch: the views, from row0 on. */
void set_views(grouped *g, const mtp_device *device, const mtp_head_args *a, int64_t row0, int64_t rows)
{
    g->R = (int)rows;
    g->parts = (int)divide_up(rows, PART_ROWS);
    g->x = g->x_copy ? g->x_copy : mtp__row_any(&a->x, row0);
    g->x_row = g->x_copy ? g->width : a->x.stride[0];
    g->e = g->e_copy ? g->e_copy : a->e.data;
    g->e_row = g->e_copy ? g->width : a->e.stride[0];
    g->order = (const int *)a->order.data;
    g->slot_of = (const int *)a->slot_of.data;
    g->selected_row = a->selected.stride[0];
    if (g->k) g->selected = (const int *)a->selected.data + row0 * g->selected_row;
    if (a->target.data) g->target = (const int *)a->target.data + row0;
    if (a->scale.data) g->scale = (const float *)a->scale.data + row0;
    if (a->loss.data) g->loss = (float *)a->loss.data + row0;
    if (g->k && a->argmax.data) g->argmax = (int *)a->argmax.data + row0;
    if (g->k && a->miss.data) g->miss = (uint8_t *)a->miss.data + row0;
    if (g->k && a->logits.data) g->logits = mtp__row(&a->logits, row0);
    g->logits_row = a->logits.stride[0];
    if (a->dx.data) g->dx = mtp__row(&a->dx, row0);
    g->dx_row = a->dx.stride[0];
    g->de = (float *)a->de.data;
    g->de_row = a->de.stride[0];
    g->dx_add = a->dx_write == MTP_ACCUMULATE;
    g->de_even = g->H % 2 == 0 && g->de_row % 2 == 0 && (uintptr_t)g->de % sizeof(float2) == 0;
    g->de_add = a->de_write == MTP_ACCUMULATE || row0 > 0;
    g->fault = device->fault;
}

enum { COPY_THREADS = 256 };

/* Rows in bf16, each followed by zeros up to `line` elements. */
template <typename S>
__global__ void __launch_bounds__(COPY_THREADS)
    copy_rows(const S *from, int64_t stride, int width, bf16 *to, int line, int64_t count)
{
    const int64_t step = (int64_t)gridDim.x * COPY_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * COPY_THREADS + threadIdx.x; i < count; i += step) {
        const int64_t row = i / line, column = i - row * line;
        to[i] = from_float<bf16>(column < width ? to_float(from[row * stride + column]) : 0.0f);
    }
}

mtp_status copy_matrix(mtp_device *device, const char *op, const mtp_view &from, void *to, int line)
{
    const int64_t width = from.shape[1], count = from.shape[0] * line;
    if (line == width) return mtp__cuda_convert_matrix(device, op, &from, to, factors_of(device).dtype);
    return dispatch(from.dtype, [&](auto tag) {
        using S = typename decltype(tag)::type;
        MTP_CUDA_TRY(op,
                     MTP_LAUNCH(copy_rows<S>, blocks_for(device, count, COPY_THREADS), COPY_THREADS, 0, device->stream,
                                (const S *)from.data, from.stride[0], (int)width, (bf16 *)to, line, count));
        return MTP_OK;
    });
}

template <typename Product, typename TokenProduct>
mtp_status run_chunk(mtp_device *device, const char *op, const grouped &g)
{
    const int64_t pairs = (int64_t)g.R * g.slots;
    const int64_t tiles = pairs / Product::ROWS + (g.C < pairs ? g.C : pairs); /* no more than this */
    const dim3 logits((unsigned)tiles, (unsigned)g.columns);
    const dim3 dz((unsigned)tiles, (unsigned)divide_up(g.dz_row, Product::COLS));
    const dim3 dx((unsigned)tiles, (unsigned)divide_up(g.line, Product::COLS));
    const dim3 de((unsigned)(g.C + pairs / SEGMENT_PAIRS), (unsigned)divide_up(g.P, TokenProduct::ROWS),
                  (unsigned)divide_up(g.H, TokenProduct::COLS));
    const dim3 parts((unsigned)g.C, PART_BLOCKS);
    const unsigned rows = (unsigned)divide_up(g.R, ROWS_A_BLOCK);
    cudaStream_t stream = device->stream;
    MTP_TRY(grouped_sort(device, op, g, Product::ROWS));
    MTP_CUDA_TRY(op, MTP_LAUNCH(pair_sums<Product>, logits, Product::THREADS, 0, stream, g));
    MTP_CUDA_TRY(op, MTP_LAUNCH(combine_rows, rows, ROW_THREADS, 0, stream, g));
    if (!g.dx && !g.de) return MTP_OK;
    MTP_CUDA_TRY(op, MTP_LAUNCH(pair_dz<Product>, dz, Product::THREADS, 0, stream, g));
    if (g.dx) {
        MTP_CUDA_TRY(op, MTP_LAUNCH(pair_dx<Product>, dx, Product::THREADS, 0, stream, g));
        MTP_CUDA_TRY(op, MTP_LAUNCH(sum_slots, rows, ROW_THREADS, 0, stream, g));
    }
    if (g.de) MTP_CUDA_TRY(op, MTP_LAUNCH(token_de<TokenProduct>, de, TokenProduct::THREADS, 0, stream, g));
    if (g.de && g.R > SEGMENT_PAIRS) MTP_CUDA_TRY(op, MTP_LAUNCH(sum_parts, parts, PART_THREADS, 0, stream, g));
    return MTP_OK;
}

/* Tiles are as tall as what they hold: pairs of a centroid, and its tokens. */
mtp_status choose_tiles(mtp_device *device, const char *op, const grouped &g)
{
    using low = bf16_product<64>;
    using high = bf16_product<128>;
    if (!device->bf16) return run_chunk<fp32_product, fp32_product>(device, op, g);
    const bool many = (int64_t)g.R * g.slots / g.C > low::ROWS, large = g.P > low::ROWS;
    if (many) return large ? run_chunk<high, high>(device, op, g) : run_chunk<high, low>(device, op, g);
    return large ? run_chunk<low, high>(device, op, g) : run_chunk<low, low>(device, op, g);
}

mtp_status check_address(const char *op, const char *name, const mtp_view &view)
{
    if ((uintptr_t)view.data % 16 == 0) return MTP_OK;
    return MTP_FAIL(MTP_E_ARGUMENT, "%s: %s begins at %p; it must be a multiple of 16 bytes", op, name, view.data);
}

mtp_status run_grouped(const char *op, mtp_device *device, const mtp_head_args *a, int64_t k)
{
    MTP_TRY(mtp__check_scratch(op, &a->scratch, grouped_scratch(device, a, k)));
    mtp__carver carver = {};
    carver.base = (char *)a->scratch.data;
    int64_t chunk;
    grouped g = carve_grouped(&carver, device, a, k, &chunk);
    if (device->bf16 && !g.x_copy) MTP_TRY(check_address(op, "x", a->x));
    if (device->bf16 && !g.e_copy) MTP_TRY(check_address(op, "e", a->e));
    if (g.e_copy) MTP_TRY(copy_matrix(device, op, a->e, g.e_copy, g.width));
    const int64_t R = a->x.shape[0];
    for (int64_t row0 = 0; row0 < R; row0 += chunk) {
        const int64_t rows = R - row0 < chunk ? R - row0 : chunk;
        if (g.x_copy) MTP_TRY(copy_matrix(device, op, mtp_view_rows(a->x, row0, rows), g.x_copy, g.width));
        set_views(&g, device, a, row0, rows);
        MTP_TRY(choose_tiles(device, op, g));
    }
    return MTP_OK;
}

mtp_status candidates(mtp_device *device, const mtp_head_args *a)
{
    const char *op = "head_candidates";
    MTP_TRY(mtp__check_head_candidates(op, a));
    return run_grouped(op, device, a, a->selected.shape[1]);
}

mtp_status hierarchical(mtp_device *device, const mtp_head_args *a)
{
    const char *op = "head_hierarchical";
    MTP_TRY(mtp__check_head_hierarchical(op, a));
    return run_grouped(op, device, a, 0);
}

} // namespace
} // namespace mtp

mtp_status mtp__cuda_head_candidates(mtp_device *device, const mtp_head_args *a)
{
    return mtp::candidates(device, a);
}

size_t mtp__cuda_head_candidates_scratch(const mtp_device *device, const mtp_head_args *a)
{
    return mtp::grouped_scratch(device, a, a->selected.shape[1]);
}

mtp_status mtp__cuda_head_hierarchical(mtp_device *device, const mtp_head_args *a)
{
    return mtp::hierarchical(device, a);
}

size_t mtp__cuda_head_hierarchical_scratch(const mtp_device *device, const mtp_head_args *a)
{
    return mtp::grouped_scratch(device, a, 0);
}
