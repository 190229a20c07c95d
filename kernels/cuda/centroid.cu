/* The centroid head: top-k of the centroid scores, and cross-entropy over the tokens of a few centroids.
 *
 *   z[j] = x . e[j]      loss = log sum exp z - z[target]      dz = scale (softmax(z) - onehot)
 *   dx = sum dz[j] e[j]      de[j] = sum over rows dz[j] x
 *
 * The pairs of a centroid are brought together (centroid_sort.cu); its P rows of e, a block of memory, meet them in
 * tiles:
 *   1. z [pairs, P]: the rows of x of a tile of pairs against the centroid's rows of e
 *   2. a block of threads a row: maximum, sum, loss, argmax over its slots; z becomes dz in place
 *   3. slot_dx [pairs, H] = dz e, then a row adds up its slots in their order
 *   4. de: a block has some rows of one centroid and up to SEGMENT_PAIRS of its pairs, in order; centroids with more
 *      have their segments added up in order by a second pass
 * No sum depends on the order in which blocks run. Rows are taken in chunks so that z and slot_dx stay within
 * logits_budget (never less than 64 rows). Products are fp32, or have bf16 factors on a device in bf16 mode
 * (product.cuh); x and e of another type are converted first. head_hierarchical is the case k = 0 with every target's
 * centroid forced. */
#include "cuda/centroid.h"
#include "cuda/product.cuh"

namespace mtp
{
namespace
{

/* ---- top-k ------------------------------------------------------------------------------------------------------- */

enum { TOPK_WARPS = 4, DIGITS = 256 };

struct topk_rows {
    const float *scores;
    int64_t scores_row;
    int *selected;
    int64_t selected_row;
    int *unsorted; /* [R, k] */
    int R, C, k;
};

/* A number that orders as the score does: -0 as 0, NaN as -infinity. */
__device__ unsigned order_of(float score)
{
    if (!(score == score)) score = -INFINITY;
    const unsigned bits = __float_as_uint(score == 0.0f ? 0.0f : score);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

/* The k-th largest order of a row, digit by digit from the top; *equal: how many of those that have it are taken. */
__device__ unsigned threshold_of(const topk_rows &a, const float *x, int *histogram, int *equal)
{
    const int lane = (int)threadIdx.x % WARP;
    unsigned prefix = 0, mask = 0;
    int needed = a.k;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = lane; i < DIGITS; i += WARP) histogram[i] = 0;
        __syncwarp();
        for (int i = lane; i < a.C; i += WARP) {
            const unsigned order = order_of(x[i]);
            if ((order & mask) == prefix) atomicAdd(&histogram[order >> shift & 255u], 1);
        }
        __syncwarp();
        /* lane l has the digits [8 l, 8 l + 8); those of higher lanes come first */
        int own = 0;
        for (int i = 0; i < DIGITS / WARP; i++) own += histogram[lane * (DIGITS / WARP) + i];
        int above = own; /* of this lane and the higher ones */
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int other = __shfl_down_sync(ALL_LANES, above, offset);
            if (lane + offset < WARP) above += other;
        }
        above -= own;
        int digit = -1, rest = 0;
        if (above < needed && above + own >= needed) {
            rest = needed - above;
            digit = (lane + 1) * (DIGITS / WARP) - 1;
            while (histogram[digit] < rest) rest -= histogram[digit--];
        }
        const int holder = __ffs((int)__ballot_sync(ALL_LANES, digit >= 0)) - 1;
        digit = __shfl_sync(ALL_LANES, digit, holder);
        needed = __shfl_sync(ALL_LANES, rest, holder);
        prefix |= (unsigned)digit << shift;
        mask |= 255u << shift;
        __syncwarp(); /* the histogram was read */
    }
    *equal = needed;
    return prefix;
}

/* The ids of the selected scores in the order of the ids. */
__device__ void collect(const topk_rows &a, const float *x, unsigned threshold, int equal, int *id)
{
    const int lane = (int)threadIdx.x % WARP;
    const unsigned below = (1u << lane) - 1;
    int taken = 0, ties = 0;
    for (int first = 0; first < a.C; first += WARP) {
        const unsigned order = first + lane < a.C ? order_of(x[first + lane]) : 0;
        const unsigned tied = __ballot_sync(ALL_LANES, first + lane < a.C && order == threshold);
        const bool take = order > threshold || ((tied >> lane & 1u) && ties + __popc(tied & below) < equal);
        const unsigned all = __ballot_sync(ALL_LANES, first + lane < a.C && take);
        if (all >> lane & 1u) id[taken + __popc(all & below)] = first + lane;
        taken += __popc(all);
        ties += __popc(tied);
    }
}

/* A warp has a row: the threshold, the ids above it, and the place of each by counting those that come before. */
__global__ void __launch_bounds__(TOPK_WARPS *WARP, 8) topk_kernel(topk_rows a)
{
    MTP_SHARED(int, histogram, [TOPK_WARPS][DIGITS]);
    const int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    const int64_t row = (int64_t)blockIdx.x * TOPK_WARPS + warp;
    if (row >= a.R) return;
    const float *x = a.scores + row * a.scores_row;
    int *id = a.unsorted + row * a.k;
    int equal;
    const unsigned threshold = threshold_of(a, x, histogram[warp], &equal);
    collect(a, x, threshold, equal, id);
    __syncwarp();
    for (int i = lane; i < a.k; i += WARP) {
        const unsigned own = order_of(x[id[i]]);
        int rank = 0;
        for (int j = 0; j < a.k; j++) {
            const unsigned other = order_of(x[id[j]]);
            rank += other > own || (other == own && j < i);
        }
        a.selected[row * a.selected_row + rank] = id[i];
    }
}

mtp_status topk(mtp_device *device, const mtp_topk_args *a)
{
    const char *op = "topk";
    MTP__CHECK(op, scores, MTP_F32, -1, -1);
    const int64_t R = a->scores.shape[0], C = a->scores.shape[1];
    MTP__CHECK(op, selected, MTP_I32, R, -1);
    const int64_t k = a->selected.shape[1];
    if (k > C || C > INT32_MAX / 2 || R > INT32_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: selected asks for %lld of the %lld scores of a row", op, (long long)k,
                        (long long)C);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, mtp__cuda_topk_scratch(device, a)));
    topk_rows t = {};
    t.scores = (const float *)a->scores.data;
    t.scores_row = a->scores.stride[0];
    t.selected = (int *)a->selected.data;
    t.selected_row = a->selected.stride[0];
    t.unsorted = (int *)a->scratch.data;
    t.R = (int)R;
    t.C = (int)C;
    t.k = (int)k;
    const unsigned blocks = (unsigned)divide_up(R, TOPK_WARPS);
    MTP_CUDA_TRY(op, MTP_LAUNCH(topk_kernel, blocks, TOPK_WARPS * WARP, 0, device->stream, t));
    return MTP_OK;
}

/* ---- products over the pairs of centroids ------------------------------------------------------------------------ */

struct pair_tile {
    int centroid, first, count;
};

/* The last centroid whose first number is not behind this one; begin has C + 1 entries. */
__device__ int centroid_of(const int *begin, int C, int number)
{
    int low = 0, high = C - 1;
    while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (begin[middle] <= number)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The tile with this number; false behind the last one. */
template <int TILE_ROWS>
__device__ bool find_tile(const grouped &g, int number, pair_tile *tile)
{
    if (number >= g.tile_begin[g.C]) return false;
    const int c = centroid_of(g.tile_begin, g.C, number);
    tile->centroid = c;
    tile->first = g.begin[c] + (number - g.tile_begin[c]) * TILE_ROWS;
    tile->count = min((int)TILE_ROWS, g.begin[c + 1] - tile->first);
    return true;
}

/* Is a matrix readable four elements at a time from multiples of four columns on? */
template <typename T>
__device__ bool is_wide(const T *matrix, int64_t stride)
{
    return stride % 4 == 0 && reinterpret_cast<uintptr_t>(matrix) % (4 * sizeof(T)) == 0;
}

/* The rows of e of a centroid from its `first` on, `width` columns from `column` on. */
template <typename T, bool ROWS_ARE_DEPTH>
__device__ indexed_rows<T, ROWS_ARE_DEPTH> tokens_of(const grouped &g, int centroid, int first, int column, int width)
{
    const T *e = static_cast<const T *>(g.e) + ((int64_t)centroid * g.P + first) * g.e_row;
    const int rows = g.P - first;
    return {e, g.e_row, NULL, rows, rows, column, width, is_wide(e, g.e_row) && column % 4 == 0};
}

/* The rows of x of some pairs. */
template <typename T, bool ROWS_ARE_DEPTH>
__device__ indexed_rows<T, ROWS_ARE_DEPTH> rows_of(const grouped &g, int first, int count, int column, int width)
{
    const T *x = static_cast<const T *>(g.x);
    return {x, g.x_row, g.row_of + first, g.R, count, column, width, is_wide(x, g.x_row) && column % 4 == 0};
}

/* dz of some pairs. */
template <bool ROWS_ARE_DEPTH>
__device__ indexed_rows<float, ROWS_ARE_DEPTH> dz_of(const grouped &g, int first, int count, int column, int width)
{
    return {g.z + (int64_t)first * g.P, g.P, NULL, count, count, column, width, g.P % 4 == 0 && column % 4 == 0};
}

template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) pair_logits(grouped g)
{
    using T = typename Product::factor;
    MTP_SHARED(typename Product::shared, shared, [1]);
    pair_tile tile;
    if (!find_tile<Product::ROWS>(g, (int)blockIdx.x, &tile)) return;
    const int token0 = (int)blockIdx.y * Product::COLS;
    Product product;
    product.run(rows_of<T, false>(g, tile.first, tile.count, 0, g.H),
                tokens_of<T, false>(g, tile.centroid, token0, 0, g.H), g.H, shared);
    product.each([&](int i, int j, float z) {
        if (i < tile.count && token0 + j < g.P) g.z[(int64_t)(tile.first + i) * g.P + token0 + j] = z;
    });
}

template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) pair_dx(grouped g)
{
    using T = typename Product::factor;
    MTP_SHARED(typename Product::shared, shared, [1]);
    pair_tile tile;
    if (!find_tile<Product::ROWS>(g, (int)blockIdx.x, &tile)) return;
    const int column0 = (int)blockIdx.y * Product::COLS;
    Product product;
    product.run(dz_of<false>(g, tile.first, tile.count, 0, g.P),
                tokens_of<T, true>(g, tile.centroid, 0, column0, g.H - column0), g.P, shared);
    product.each([&](int i, int j, float x) {
        if (i < tile.count && column0 + j < g.H) g.slot_dx[(int64_t)(tile.first + i) * g.H + column0 + j] = x;
    });
}

/* The gradient of a centroid's token. */
__device__ float *token_row(const grouped &g, int centroid, int j)
{
    return g.de + ((int64_t)centroid * g.P + j) * g.de_row;
}

template <typename Product>
__global__ void __launch_bounds__(Product::THREADS, 2) token_de(grouped g)
{
    MTP_SHARED(typename Product::shared, shared, [1]);
    const int number = (int)blockIdx.x, token0 = (int)blockIdx.y * Product::ROWS;
    const int column0 = (int)blockIdx.z * Product::COLS;
    if (number >= g.segment_begin[g.C]) return;
    const int centroid = centroid_of(g.segment_begin, g.C, number), segment = number - g.segment_begin[centroid];
    const int first = g.begin[centroid] + segment * SEGMENT_PAIRS;
    const int count = min(SEGMENT_PAIRS, g.begin[centroid + 1] - first);
    if (count == 0 && g.de_add) return;
    const bool whole = g.part_begin[centroid] == g.part_begin[centroid + 1];
    float *part = g.part_de + (int64_t)(g.part_begin[centroid] + segment) * g.P * g.H;
    Product product;
    product.run(dz_of<true>(g, first, count, token0, g.P - token0),
                rows_of<typename Product::factor, true>(g, first, count, column0, g.H - column0), count, shared);
    product.each([&](int i, int j, float x) {
        if (token0 + i >= g.P || column0 + j >= g.H) return;
        if (!whole) {
            part[(int64_t)(token0 + i) * g.H + column0 + j] = x;
            return;
        }
        float *de = token_row(g, centroid, token0 + i) + column0 + j;
        *de = g.de_add ? *de + x : x;
    });
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

enum { ROW_THREADS = 128 };

/* Maximum of the slots [from, to) of a row; the logits of the selected ones are copied out. */
__device__ float slots_top(const grouped &g, int row, const int *place, int from, int to, float *shared)
{
    float top = -INFINITY;
    for (int s = from; s < to; s++) {
        if (place[s] < 0) continue;
        const float *z = g.z + (int64_t)place[s] * g.P;
        for (int j = (int)threadIdx.x; j < g.P; j += ROW_THREADS) {
            top = fmaxf(top, z[j]);
            if (g.logits && s < g.k) g.logits[row * g.logits_row + (int64_t)s * g.P + j] = z[j];
        }
    }
    return block_max(top, shared);
}

/* The lowest token id among the logits of the selected centroids that are `top`. */
__device__ int best_token(const grouped &g, int row, const int *place, float top, int *shared)
{
    int best = INT32_MAX;
    for (int s = 0; s < g.k; s++) {
        if (place[s] < 0) continue;
        const float *z = g.z + (int64_t)place[s] * g.P;
        const int *token = g.order + (int64_t)g.selected[row * g.selected_row + s] * g.P;
        for (int j = (int)threadIdx.x; j < g.P; j += ROW_THREADS)
            if (!(z[j] < top)) best = min(best, token[j]);
    }
    for (int offset = WARP / 2; offset > 0; offset /= 2) best = min(best, __shfl_xor_sync(ALL_LANES, best, offset));
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = best;
    __syncthreads();
    for (int w = 0; w < ROW_THREADS / WARP; w++) best = min(best, shared[w]);
    __syncthreads();
    return best;
}

/* The target's place in z, or -1 without a target. */
__device__ int64_t own_place(const grouped &g, int row, const int *place)
{
    const int slot = g.target ? target_slot(g.fault, g.order, g.slot_of, g.target[row], g.V, row) : -1;
    if (slot < 0) return -1;
    const int centroid = slot / g.P;
    int s = g.k;
    if (place[s] < 0)
        for (s = 0; s < g.k && g.selected[row * g.selected_row + s] != centroid;) s++;
    return place[s] < 0 ? -1 : (int64_t)place[s] * g.P + slot % g.P;
}

/* Row by row over its slots: loss, argmax, miss, logits; z becomes dz. */
__global__ void __launch_bounds__(ROW_THREADS) combine_rows(grouped g)
{
    MTP_SHARED(float, shared, [WARP]);
    MTP_SHARED(int, shared_token, [ROW_THREADS / WARP]);
    const int row = (int)blockIdx.x;
    const int *place = g.place + (int64_t)row * g.slots;
    const float open_top = slots_top(g, row, place, 0, g.k, shared);
    const float top = fmaxf(open_top, slots_top(g, row, place, g.k, g.slots, shared));
    const int64_t own = own_place(g, row, place);
    float sum = 0;
    for (int s = 0; s < g.slots; s++) {
        if (place[s] < 0) continue;
        const float *z = g.z + (int64_t)place[s] * g.P;
        for (int j = (int)threadIdx.x; j < g.P; j += ROW_THREADS) sum += expf(z[j] - top);
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) {
        if (g.loss) g.loss[row] = own < 0 ? NAN : (top - g.z[own]) + logf(sum);
        if (g.miss) g.miss[row] = place[g.k] >= 0;
    }
    if (g.argmax) {
        const int best = best_token(g, row, place, open_top, shared_token);
        if (threadIdx.x == 0) g.argmax[row] = best;
    }
    if (!g.backward) return;
    __syncthreads(); /* the target's logit was read */
    const float scale = g.scale[row], factor = scale / sum;
    for (int s = 0; s < g.slots; s++) {
        if (place[s] < 0) continue;
        const int64_t first = (int64_t)place[s] * g.P;
        for (int j = (int)threadIdx.x; j < g.P; j += ROW_THREADS)
            g.z[first + j] = expf(g.z[first + j] - top) * factor - (first + j == own ? scale : 0.0f);
    }
}

/* dx of a row: its pairs in the order of the slots. */
__global__ void __launch_bounds__(ROW_THREADS) sum_slots(grouped g)
{
    const int row = (int)blockIdx.x;
    const int *place = g.place + (int64_t)row * g.slots;
    for (int i = (int)threadIdx.x; i < g.H; i += ROW_THREADS) {
        float *dx = g.dx + row * g.dx_row + i;
        float sum = g.dx_add ? *dx : 0.0f;
        for (int s = 0; s < g.slots; s++)
            if (place[s] >= 0) sum += g.slot_dx[(int64_t)place[s] * g.H + i];
        *dx = sum;
    }
}

/* ---- arguments, scratch, launches -------------------------------------------------------------------------------- */

const size_t default_budget = (size_t)256 << 20;
constexpr int64_t CHUNK_MIN = 64;

int64_t chunk_of(const mtp_head_args *a, int64_t k)
{
    const int64_t R = a->x.shape[0];
    const size_t row_bytes = (size_t)((k + 1) * (a->order.shape[1] + a->x.shape[1])) * sizeof(float);
    const size_t budget = a->logits_budget ? a->logits_budget : default_budget;
    const int64_t fit = (int64_t)(budget / row_bytes) / CHUNK_MIN * CHUNK_MIN;
    const int64_t chunk = fit < CHUNK_MIN ? CHUNK_MIN : fit;
    return chunk < R ? chunk : R;
}

mtp_dtype factor_of(const mtp_device *device)
{
    return device->bf16 ? MTP_BF16 : MTP_F32;
}

grouped carve_grouped(mtp__carver *carver, const mtp_device *device, const mtp_head_args *a, int64_t k)
{
    const mtp_dtype factor = factor_of(device);
    grouped g = {};
    g.R = (int)a->x.shape[0];
    g.H = (int)a->x.shape[1];
    g.V = (int)a->e.shape[0];
    g.C = (int)a->order.shape[0];
    g.P = (int)a->order.shape[1];
    g.k = (int)k;
    g.slots = (int)k + 1;
    const int64_t chunk = chunk_of(a, k), pairs = chunk * g.slots;
    g.place = (int *)mtp__carve(carver, pairs, sizeof(int));
    g.row_of = (int *)mtp__carve(carver, pairs, sizeof(int));
    g.count = (int *)mtp__carve(carver, divide_up(chunk, PART_ROWS) * g.C, sizeof(int));
    g.begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.tile_begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.segment_begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    g.part_begin = (int *)mtp__carve(carver, g.C + 1, sizeof(int));
    /* a centroid has at most one pair a row, and two parts or more when it has any */
    const int64_t parts = chunk > SEGMENT_PAIRS ? 2 * (pairs / SEGMENT_PAIRS) : 0;
    g.part_de = (float *)mtp__carve(carver, parts * g.P * g.H, sizeof(float));
    g.z = (float *)mtp__carve(carver, pairs * g.P, sizeof(float));
    g.slot_dx = (float *)mtp__carve(carver, pairs * g.H, sizeof(float));
    if (a->x.dtype != factor) g.x_copy = mtp__carve(carver, chunk * g.H, mtp_dtype_size(factor));
    if (a->e.dtype != factor) g.e_copy = mtp__carve(carver, (int64_t)g.V * g.H, mtp_dtype_size(factor));
    return g;
}

size_t grouped_scratch(const mtp_device *device, const mtp_head_args *a, int64_t k)
{
    mtp__carver carver = {};
    carve_grouped(&carver, device, a, k);
    return carver.used;
}

/* Beside scratch: the views, from row0 on. */
void set_views(grouped *g, const mtp_device *device, const mtp_head_args *a, int64_t row0, int64_t rows)
{
    g->R = (int)rows;
    g->parts = (int)divide_up(rows, PART_ROWS);
    g->x = g->x_copy ? g->x_copy : mtp__row_any(&a->x, row0);
    g->x_row = g->x_copy ? g->H : a->x.stride[0];
    g->e = g->e_copy ? g->e_copy : a->e.data;
    g->e_row = g->e_copy ? g->H : a->e.stride[0];
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
    g->de_add = a->de_write == MTP_ACCUMULATE || row0 > 0;
    g->backward = a->dx.data || a->de.data;
    g->fault = device->fault;
}

template <typename Product>
mtp_status run_chunk(mtp_device *device, const char *op, const grouped &g)
{
    const int64_t pairs = (int64_t)g.R * g.slots;
    const int64_t tiles = pairs / Product::ROWS + (g.C < pairs ? g.C : pairs); /* no more than this */
    const dim3 logits((unsigned)tiles, (unsigned)divide_up(g.P, Product::COLS));
    const dim3 dx((unsigned)tiles, (unsigned)divide_up(g.H, Product::COLS));
    const dim3 de((unsigned)(g.C + pairs / SEGMENT_PAIRS), (unsigned)divide_up(g.P, Product::ROWS),
                  (unsigned)divide_up(g.H, Product::COLS));
    const dim3 parts((unsigned)g.C, PART_BLOCKS);
    cudaStream_t stream = device->stream;
    MTP_TRY(grouped_sort(device, op, g, Product::ROWS));
    MTP_CUDA_TRY(op, MTP_LAUNCH((pair_logits<Product>), logits, Product::THREADS, 0, stream, g));
    MTP_CUDA_TRY(op, MTP_LAUNCH(combine_rows, (unsigned)g.R, ROW_THREADS, 0, stream, g));
    if (g.dx) {
        MTP_CUDA_TRY(op, MTP_LAUNCH((pair_dx<Product>), dx, Product::THREADS, 0, stream, g));
        MTP_CUDA_TRY(op, MTP_LAUNCH(sum_slots, (unsigned)g.R, ROW_THREADS, 0, stream, g));
    }
    if (g.de) MTP_CUDA_TRY(op, MTP_LAUNCH(token_de<Product>, de, Product::THREADS, 0, stream, g));
    if (g.de && g.R > SEGMENT_PAIRS) MTP_CUDA_TRY(op, MTP_LAUNCH(sum_parts, parts, PART_THREADS, 0, stream, g));
    return MTP_OK;
}

mtp_status run_grouped(const char *op, mtp_device *device, const mtp_head_args *a, int64_t k)
{
    MTP_TRY(mtp__check_scratch(op, &a->scratch, grouped_scratch(device, a, k)));
    const int64_t R = a->x.shape[0], chunk = chunk_of(a, k);
    mtp__carver carver = {};
    carver.base = (char *)a->scratch.data;
    grouped g = carve_grouped(&carver, device, a, k);
    if (g.e_copy) MTP_TRY(mtp__cuda_convert_matrix(device, op, &a->e, g.e_copy, factor_of(device)));
    for (int64_t row0 = 0; row0 < R; row0 += chunk) {
        const int64_t rows = R - row0 < chunk ? R - row0 : chunk;
        const mtp_view x = mtp_view_rows(a->x, row0, rows);
        if (g.x_copy) MTP_TRY(mtp__cuda_convert_matrix(device, op, &x, g.x_copy, factor_of(device)));
        set_views(&g, device, a, row0, rows);
        MTP_TRY(device->bf16 ? run_chunk<bf16_product>(device, op, g) : run_chunk<fp32_product>(device, op, g));
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

mtp_status mtp__cuda_topk(mtp_device *device, const mtp_topk_args *a)
{
    return mtp::topk(device, a);
}

size_t mtp__cuda_topk_scratch(const mtp_device *, const mtp_topk_args *a)
{
    mtp__carver carver = {};
    mtp__carve(&carver, a->scores.shape[0] * a->selected.shape[1], sizeof(int));
    return carver.used;
}

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
