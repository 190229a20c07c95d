/* Query-only attention on bf16 tensor cores, for head widths 256 and 512: forward, and backward with respect to the
 * queries. The formulas stand in attention.cu.
 *
 * q and do are bf16 or rounded to it, and so are P and dS before they meet V and K; sums, softmax and lse are fp32. A
 * tile has ROWS rows (positions times query heads of one K/V head) in shared memory and walks the keys in blocks of
 * KEYS, counted from the document's first token. A warp has 16 rows and D / SPLIT columns of the result in registers;
 * with SPLIT 2 the two warps of the same rows compute the scores of half of the keys each and exchange them through
 * shared memory. K and V have one buffer each and are copied (cp.async) while the other one is multiplied. Only blocks
 * at the edges of what the tile's rows see test single keys. ROWS and KEYS are chosen by the shared memory that a block
 * of the device may have, so results of devices that differ there differ in rounding. */
#include "cuda/attention.h"
#include "cuda/ptx.cuh"

namespace mtp
{
namespace
{

template <int D_, int ROWS_, int KEYS_, int SPLIT_, bool BACKWARD_>
struct fused {
    static constexpr int D = D_, ROWS = ROWS_, KEYS = KEYS_, SPLIT = SPLIT_;
    static constexpr bool BACKWARD = BACKWARD_;
    static constexpr int THREADS = ROWS / 16 * SPLIT * WARP;
    static constexpr int COLS = D / SPLIT;          /* of the result, of a warp */
    static constexpr int OUT = COLS / 8;            /* fragments of the result */
    static constexpr int SCORES = KEYS / SPLIT / 8; /* fragments of the scores */
    static constexpr int ROW_BYTES = D * (int)sizeof(bf16);
    /* shared memory: q, do (backward), K, V, P or dS (SPLIT 2), two numbers a row */
    static constexpr int DOUT = ROWS * ROW_BYTES;
    static constexpr int K = DOUT + (BACKWARD ? ROWS * ROW_BYTES : 0);
    static constexpr int V = K + KEYS * ROW_BYTES;
    static constexpr int WEIGHT = V + KEYS * ROW_BYTES;
    static constexpr int STATS = WEIGHT + (SPLIT == 2 ? ROWS * KEYS * (int)sizeof(bf16) : 0);
    static constexpr int BYTES = STATS + ROWS * 2 * (int)sizeof(float);
};

/* Where a thread stands: its warp's rows, columns and keys. Its own two rows are row + lane / 4 and 8 behind it. */
template <typename F>
struct place {
    int lane, part;       /* part: of the columns, and of the keys of a block */
    int row;              /* first row of the warp's 16 */
    int begin[2], end[2]; /* keys that the thread's rows see; none where the tile has no such row */
};

template <typename F>
__device__ attention_row own_row(const place<F> &w, const attention_problem &p, const attention_work &work, int i)
{
    return attention_row_of(p, work.tile, work.head_tile, w.row + w.lane / 4 + 8 * i);
}

template <typename F>
__device__ place<F> place_of(const attention_problem &p, const attention_work &work)
{
    place<F> w;
    const int warp = (int)threadIdx.x / WARP;
    w.lane = (int)threadIdx.x % WARP;
    w.part = warp % F::SPLIT;
    w.row = warp / F::SPLIT * 16;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const attention_row r = own_row(w, p, work, i);
        w.begin[i] = r.valid ? p.key_begin[r.row] : 0;
        w.end[i] = r.valid ? p.key_end[r.row] : 0;
    }
    return w;
}

/* Address of 16 bytes of a matrix of CHUNKS times 16 bytes a row: the place within the row is exchanged so that eight
 * rows below each other lie in different banks. */
template <int CHUNKS>
__device__ __forceinline__ char *swizzled(char *matrix, int row, int chunk)
{
    const int turn = CHUNKS >= 8 ? row & 7 : row / (8 / CHUNKS) & (CHUNKS - 1);
    return matrix + (row * CHUNKS + (chunk ^ turn)) * 16;
}

__device__ __forceinline__ uint32_t pack(float low, float high)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* ---- into shared memory ------------------------------------------------------------------------------------------ */

/* The rows of a tile as bf16; zeros where there is none. Those that are bf16 are copied with the next group of keys, so
 * the caller starts that afterwards and waits for both; fp32 ones are there at the next barrier. */
template <typename F>
__device__ void stage_rows(const attention_problem &p, const attention_work &work, const void *data, int64_t row_stride,
                           int64_t head_stride, char *dst)
{
    if (p.stored_bf16) {
#pragma unroll 1
        for (int i = (int)threadIdx.x; i < F::ROWS * F::D / 8; i += F::THREADS) {
            const int row = i / (F::D / 8), chunk = i % (F::D / 8);
            const attention_row r = attention_row_of(p, work.tile, work.head_tile, row);
            const int64_t at = r.valid ? r.row * row_stride + r.head * head_stride + chunk * 8 : 0;
            copy_async(swizzled<F::D / 8>(dst, row, chunk), static_cast<const bf16 *>(data) + at, r.valid);
        }
        return;
    }
    const float *src = static_cast<const float *>(data);
    for (int i = (int)threadIdx.x; i < F::ROWS * F::D / 2; i += F::THREADS) {
        const int row = i / (F::D / 2), column = i % (F::D / 2) * 2;
        const attention_row r = attention_row_of(p, work.tile, work.head_tile, row);
        const float *x = src + r.row * row_stride + r.head * head_stride + column;
        const uint32_t pair = r.valid ? pack(x[0], x[1]) : 0;
        memcpy(swizzled<F::D / 8>(dst, row, column / 8) + column % 8 * 2, &pair, sizeof pair);
    }
}

/* Starts to copy K (which 0) or V (which 1) of a block of keys; zeros for keys that no row of the tile sees. Behind the
 * tile's last key there is nothing to copy, but the group is closed all the same: waits count groups. */
template <typename F>
__device__ void start_keys(const attention_problem &p, const attention_work &work, int which, int first, char *dst)
{
    const bf16 *src =
        static_cast<const bf16 *>(p.kv) + which * p.kv_which + work.head_tile / (p.head_tiles / p.NKV) * p.kv_head;
    if (first < work.tile.end) {
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < F::KEYS * F::D / 8; i += F::THREADS) {
            const int row = i / (F::D / 8), chunk = i % (F::D / 8), key = first + row;
            const bool valid = key >= work.tile.begin && key < work.tile.end;
            copy_async(swizzled<F::D / 8>(dst, row, chunk),
                       src + (valid ? key : work.tile.begin) * p.kv_token + chunk * 8, valid);
        }
    }
    copy_commit();
}

/* ---- products of a warp ------------------------------------------------------------------------------------------ */

/* score = the warp's 16 rows of `rows` times its part of `keys`, over the whole width. */
template <typename F>
__device__ void multiply_keys(const place<F> &w, char *rows, char *keys, float (&score)[F::SCORES][4])
{
    const int matrix = w.lane / 8, key0 = w.part * (F::KEYS / F::SPLIT);
#pragma unroll
    for (int j = 0; j < F::SCORES; j++)
#pragma unroll
        for (int n = 0; n < 4; n++) score[j][n] = 0;
#pragma unroll 1
    for (int k = 0; k < F::D / 8; k += 4) { /* chunks of 8 columns: two steps of 16 */
        uint32_t a[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
            load_matrices(a[i], swizzled<F::D / 8>(rows, w.row + w.lane % 16, k + 2 * i + w.lane / 16));
        if constexpr (F::SCORES == 1) {
            uint32_t b[4];
            load_matrices(b, swizzled<F::D / 8>(keys, key0 + w.lane % 8, k + matrix));
            mma_bf16(score[0], a[0], b[0], b[1]);
            mma_bf16(score[0], a[1], b[2], b[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int j = 0; j < F::SCORES; j += 2) {
                    uint32_t b[4];
                    load_matrices(b, swizzled<F::D / 8>(keys, key0 + j * 8 + matrix / 2 * 8 + w.lane % 8,
                                                        k + 2 * i + matrix % 2));
                    mma_bf16(score[j], a[i], b[0], b[1]);
                    mma_bf16(score[j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }
}

/* The warp's part of P or dS for the other warp of its rows. */
template <typename F>
__device__ void share_weights(const place<F> &w, const float (&weight)[F::SCORES][4], char *shared)
{
#pragma unroll
    for (int j = 0; j < F::SCORES; j++) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t pair = pack(weight[j][2 * i], weight[j][2 * i + 1]);
            char *chunk = swizzled<F::KEYS / 8>(shared, w.row + w.lane / 4 + 8 * i, w.part * F::SCORES + j);
            memcpy(chunk + w.lane % 4 * 4, &pair, sizeof pair);
        }
    }
}

/* out += the warp's rows of weights times its columns of `values`, over the keys of the block. */
template <typename F>
__device__ void add_values(const place<F> &w, const float (&weight)[F::SCORES][4], char *shared, char *values,
                           float (&out)[F::OUT][4])
{
    const int matrix = w.lane / 8;
#pragma unroll(F::SPLIT == 2 ? 1 : F::KEYS / 16) /* SPLIT 1: weight stays in registers */
    for (int k = 0; k < F::KEYS; k += 16) {
        uint32_t a[4];
        if constexpr (F::SPLIT == 2) {
            load_matrices(a, swizzled<F::KEYS / 8>(shared, w.row + w.lane % 16, k / 8 + w.lane / 16));
        } else {
#pragma unroll
            for (int i = 0; i < 4; i++)
                a[i] = pack(weight[k / 8 + i / 2][i % 2 * 2], weight[k / 8 + i / 2][i % 2 * 2 + 1]);
        }
#pragma unroll
        for (int j = 0; j < F::OUT; j += 2) {
            uint32_t b[4];
            load_matrices_transposed(b, swizzled<F::D / 8>(values, k + matrix % 2 * 8 + w.lane % 8,
                                                           w.part * (F::COLS / 8) + j + matrix / 2));
            mma_bf16(out[j], a, b[0], b[1]);
            mma_bf16(out[j + 1], a, b[2], b[3]);
        }
    }
}

/* Is a key of the block at `first` seen by every row of the tile? Then single keys need no test. */
template <typename F>
__device__ __forceinline__ bool is_inner(const attention_work &work, int first)
{
    return first >= work.tile.inner_begin && first + F::KEYS <= work.tile.inner_end;
}

/* Does the thread's element n of score fragment j stand for a key that its row sees? */
template <typename F>
__device__ __forceinline__ bool is_seen(const place<F> &w, int first, int j, int n)
{
    const int key = first + w.part * (F::KEYS / F::SPLIT) + j * 8 + w.lane % 4 * 2 + n % 2;
    return key >= w.begin[n / 2] && key < w.end[n / 2];
}

__device__ __forceinline__ float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float quad_sum(float x)
{
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

template <typename F>
__device__ void store_rows(const place<F> &w, const attention_problem &p, const attention_work &work,
                           const float (&out)[F::OUT][4], const float (&factor)[2], void *dst, int64_t row_stride,
                           int64_t head_stride)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const attention_row r = own_row(w, p, work, i);
        if (!r.valid) continue;
        const int64_t at = r.row * row_stride + r.head * head_stride + w.part * F::COLS + w.lane % 4 * 2;
        if (p.stored_bf16) {
            bf16 *row = static_cast<bf16 *>(dst) + at;
#pragma unroll
            for (int j = 0; j < F::OUT; j++)
                store<2>(row + j * 8, {{out[j][2 * i] * factor[i] + 0.0f, out[j][2 * i + 1] * factor[i] + 0.0f}});
        } else {
            float *row = static_cast<float *>(dst) + at;
#pragma unroll
            for (int j = 0; j < F::OUT; j++) {
                row[j * 8] = out[j][2 * i] * factor[i] + 0.0f;
                row[j * 8 + 1] = out[j][2 * i + 1] * factor[i] + 0.0f;
            }
        }
    }
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* What the row's other warp has put there, or the own value when a row has one warp. `stats` holds [ROWS][2]. */
template <typename F>
__device__ __forceinline__ float *stat_of(const place<F> &w, float *stats, int i, int part)
{
    return stats + (w.row + w.lane / 4 + 8 * i) * 2 + part;
}

/* Masks the scores of a block; top[i]: their maximum over the thread's row, in this warp's part of the keys. */
template <typename F>
__device__ void mask_scores(const place<F> &w, const attention_work &work, int first, float (&score)[F::SCORES][4],
                            float (&top)[2])
{
    if (!is_inner<F>(work, first)) {
#pragma unroll
        for (int j = 0; j < F::SCORES; j++)
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (!is_seen(w, first, j, n)) score[j][n] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] = -INFINITY;
#pragma unroll
        for (int j = 0; j < F::SCORES; j++) top[i] = fmaxf(top[i], fmaxf(score[j][2 * i], score[j][2 * i + 1]));
        top[i] = quad_max(top[i]);
    }
}

/* Scores into probabilities against the running maximum; what was summed before shrinks with it. block_top: of the
 * block's scores, over all of its keys. */
template <typename F>
__device__ void online_softmax(const float (&block_top)[2], float (&top)[2], float (&sum)[2],
                               float (&score)[F::SCORES][4], float (&out)[F::OUT][4])
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float next = fmaxf(top[i], block_top[i]);
        const float base = next == -INFINITY ? 0.0f : next; /* nothing seen so far: all become zero */
        const float shrink = __expf(top[i] - base);
        sum[i] *= shrink;
#pragma unroll
        for (int j = 0; j < F::SCORES; j++) {
            score[j][2 * i] = __expf(score[j][2 * i] - base);
            score[j][2 * i + 1] = __expf(score[j][2 * i + 1] - base);
            sum[i] += score[j][2 * i] + score[j][2 * i + 1];
        }
#pragma unroll
        for (int j = 0; j < F::OUT; j++) {
            out[j][2 * i] *= shrink;
            out[j][2 * i + 1] *= shrink;
        }
        top[i] = next;
    }
}

template <typename F>
__device__ void forward_tile(const attention_problem &p, const attention_work &work, char *shared)
{
    const place<F> w = place_of<F>(p, work);
    char *k = shared + F::K, *v = shared + F::V, *weight = shared + F::WEIGHT;
    float *stats = reinterpret_cast<float *>(shared + F::STATS);
    float out[F::OUT][4] = {};
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}; /* sum: over this thread's keys */
    int first = attention_first_block(p, work.tile, F::KEYS);
    stage_rows<F>(p, work, p.q, p.q_row, p.q_head, shared);
    start_keys<F>(p, work, 0, first, k);
    start_keys<F>(p, work, 1, first, v);
    while (first < work.tile.end) {
        const int next = attention_next_block(p, work.tile, first + F::KEYS, F::KEYS);
        float score[F::SCORES][4], block_top[2];
        copy_wait<1>();
        __syncthreads(); /* K is there */
        multiply_keys<F>(w, shared, k, score);
        mask_scores<F>(w, work, first, score, block_top);
        if (F::SPLIT == 2 && w.lane % 4 == 0)
            for (int i = 0; i < 2; i++) *stat_of(w, stats, i, w.part) = block_top[i];
        __syncthreads(); /* K is free, maxima are there */
        start_keys<F>(p, work, 0, next, k);
        if (F::SPLIT == 2)
            for (int i = 0; i < 2; i++) block_top[i] = fmaxf(block_top[i], *stat_of(w, stats, i, 1 - w.part));
        online_softmax<F>(block_top, top, sum, score, out);
        if (F::SPLIT == 2) share_weights<F>(w, score, weight);
        copy_wait<1>();
        __syncthreads(); /* V and P are there */
        add_values<F>(w, score, weight, v, out);
        __syncthreads(); /* V and P are free */
        start_keys<F>(p, work, 1, next, v);
        first = next;
    }
    copy_wait<0>();
    for (int i = 0; i < 2; i++) {
        sum[i] = quad_sum(sum[i]);
        if (F::SPLIT == 2 && w.lane % 4 == 0) *stat_of(w, stats, i, w.part) = sum[i];
    }
    if (F::SPLIT == 2) {
        __syncthreads();
        for (int i = 0; i < 2; i++) sum[i] = *stat_of(w, stats, i, 0) + *stat_of(w, stats, i, 1);
    }
    for (int i = 0; i < 2; i++) {
        const attention_row r = own_row(w, p, work, i);
        if (r.valid && w.part == 0 && w.lane % 4 == 0) p.lse[r.row * p.lse_row + r.head] = top[i] + logf(sum[i]);
    }
    const float factor[2] = {1 / sum[0], 1 / sum[1]};
    store_rows<F>(w, p, work, out, factor, p.o, p.o_row, p.o_head);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* stats[row] = {rowsum(do o), lse}, do as it is multiplied: rounded. A warp takes one row after the other. */
template <typename F>
__device__ void stage_stats(const attention_problem &p, const attention_work &work, float *stats)
{
    const int lane = (int)threadIdx.x % WARP;
    for (int row = (int)threadIdx.x / WARP; row < F::ROWS; row += F::THREADS / WARP) {
        const attention_row r = attention_row_of(p, work.tile, work.head_tile, row);
        float delta = 0;
        if (r.valid) {
            const int64_t dout = r.row * p.dout_row + r.head * p.dout_head, o = r.row * p.o_row + r.head * p.o_head;
            for (int i = lane; i < F::D; i += WARP) {
                const float x = to_float(from_float<bf16>(attention_get(p, p.dout, dout + i)));
                delta = fmaf(x, attention_get(p, p.o, o + i), delta);
            }
        }
        delta = warp_sum(delta);
        if (lane == 0) {
            stats[row * 2] = delta;
            stats[row * 2 + 1] = r.valid ? p.lse[r.row * p.lse_row + r.head] : 0.0f;
        }
    }
}

/* dS = P (dP - delta), into dweight. */
template <typename F>
__device__ void score_gradient(const place<F> &w, const attention_work &work, int first, float *stats,
                               const float (&score)[F::SCORES][4], float (&dweight)[F::SCORES][4])
{
    const bool inner = is_inner<F>(work, first);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const float delta = *stat_of(w, stats, i, 0), lse = *stat_of(w, stats, i, 1);
#pragma unroll
        for (int j = 0; j < F::SCORES; j++)
#pragma unroll
            for (int n = 2 * i; n < 2 * i + 2; n++) {
                const bool seen = inner || is_seen(w, first, j, n);
                dweight[j][n] = seen ? __expf(score[j][n] - lse) * (dweight[j][n] - delta) : 0.0f;
            }
    }
}

template <typename F>
__device__ void backward_tile(const attention_problem &p, const attention_work &work, char *shared)
{
    const place<F> w = place_of<F>(p, work);
    char *dout = shared + F::DOUT, *k = shared + F::K, *v = shared + F::V, *weight = shared + F::WEIGHT;
    float *stats = reinterpret_cast<float *>(shared + F::STATS);
    float dq[F::OUT][4] = {};
    int first = attention_first_block(p, work.tile, F::KEYS);
    stage_rows<F>(p, work, p.q, p.q_row, p.q_head, shared);
    stage_rows<F>(p, work, p.dout, p.dout_row, p.dout_head, dout);
    start_keys<F>(p, work, 1, first, v);
    start_keys<F>(p, work, 0, first, k);
    stage_stats<F>(p, work, stats);
    while (first < work.tile.end) {
        const int next = attention_next_block(p, work.tile, first + F::KEYS, F::KEYS);
        float score[F::SCORES][4], dweight[F::SCORES][4];
        copy_wait<1>();
        __syncthreads(); /* V is there */
        multiply_keys<F>(w, dout, v, dweight);
        copy_wait<0>();
        __syncthreads(); /* V is free, K is there */
        start_keys<F>(p, work, 1, next, v);
        multiply_keys<F>(w, shared, k, score);
        score_gradient<F>(w, work, first, stats, score, dweight);
        if (F::SPLIT == 2) {
            share_weights<F>(w, dweight, weight);
            __syncthreads(); /* dS is there */
        }
        add_values<F>(w, dweight, weight, k, dq);
        __syncthreads(); /* K and dS are free */
        start_keys<F>(p, work, 0, next, k);
        first = next;
    }
    copy_wait<0>();
    const float factor[2] = {1, 1};
    store_rows<F>(w, p, work, dq, factor, p.dq, p.dq_row, p.dq_head);
}

/* ---- launches ---------------------------------------------------------------------------------------------------- */

template <typename F>
__global__ void __launch_bounds__(F::THREADS, 1) attention_fused_kernel(attention_problem p, attention_list list)
{
    MTP_DYNAMIC_SHARED(char, shared);
    MTP_SHARED(attention_work, work, [1]); /* read where it is needed: registers are short */
    while (attention_pull(p, list, work)) {
        if constexpr (F::BACKWARD)
            backward_tile<F>(p, *work, shared);
        else
            forward_tile<F>(p, *work, shared);
    }
}

template <typename F>
mtp_status launch(mtp_device *device, const char *op, attention_problem p, void *scratch)
{
    attention_list list;
    auto kernel = attention_fused_kernel<F>;
    attention_cut(&p, F::ROWS);
    MTP_TRY(attention_list_build(device, op, &p, scratch, &list));
    MTP_CUDA_TRY(op, allow_shared(kernel, F::BYTES));
    /* 255 registers a thread: 256 threads a multiprocessor; and 1 KiB that every block needs beside its own */
    const int by_registers = 256 / F::THREADS, by_shared = device->shared_processor / (F::BYTES + 1024);
    const int each = by_shared < 1 ? 1 : by_shared < by_registers ? by_shared : by_registers;
    const int64_t most = (int64_t)p.R * p.head_tiles, wanted = (int64_t)device->multiprocessors * each;
    const unsigned blocks = (unsigned)(most < wanted ? most : wanted);
    MTP_CUDA_TRY(op, MTP_LAUNCH(kernel, blocks, F::THREADS, F::BYTES, device->stream, p, list));
    return MTP_OK;
}

/* Tiles from large to small; the last of each kind fits the 99 KiB of sm_86, sm_89 and sm_120. */
struct variant {
    int D;
    bool backward;
    int bytes;
    mtp_status (*run)(mtp_device *device, const char *op, attention_problem p, void *scratch);
};

template <int D, int ROWS, int KEYS, int SPLIT, bool BACKWARD>
constexpr variant variant_of()
{
    using F = fused<D, ROWS, KEYS, SPLIT, BACKWARD>;
    return {D, BACKWARD, F::BYTES + (int)sizeof(attention_work), launch<F>};
}

const variant variants[] = {
    variant_of<256, 128, 64, 1, false>(), variant_of<256, 64, 64, 1, false>(), variant_of<512, 64, 64, 2, false>(),
    variant_of<512, 64, 32, 2, false>(),  variant_of<512, 64, 16, 2, false>(), variant_of<256, 128, 32, 1, true>(),
    variant_of<256, 64, 32, 1, true>(),   variant_of<512, 64, 32, 2, true>(),  variant_of<512, 64, 16, 2, true>(),
    variant_of<512, 32, 16, 2, true>(),
};

/* What is copied or stored 16 bytes at a time. */
mtp_status check_alignment(const char *op, const attention_problem &p, bool backward)
{
    const struct {
        const char *name;
        const void *data;
        int64_t strides[3];
    } views[] = {{"kv", p.kv, {p.kv_token, p.kv_which, p.kv_head}},
                 {"q", p.q, {p.q_row, p.q_head, 0}},
                 {"o", p.o, {p.o_row, p.o_head, 0}},
                 {"do_", p.dout, {p.dout_row, p.dout_head, 0}},
                 {"dq", p.dq, {p.dq_row, p.dq_head, 0}}};
    const int count = !p.stored_bf16 ? 1 : backward ? 5 : 3;
    for (int i = 0; i < count; i++) {
        bool aligned = (uintptr_t)views[i].data % 16 == 0;
        for (int64_t stride : views[i].strides) aligned = aligned && stride % 8 == 0;
        if (!aligned)
            return MTP_FAIL(MTP_E_ARGUMENT,
                            "%s: %s is moved 16 bytes at a time in bf16 mode; its address and strides must be "
                            "multiples of 16 bytes",
                            op, views[i].name);
    }
    return MTP_OK;
}

} // namespace

mtp_status attention_fused(mtp_device *device, const char *op, attention_problem p, void *scratch, bool backward)
{
    MTP_TRY(check_alignment(op, p, backward));
    for (const variant &v : variants)
        if (v.D == p.D && v.backward == backward && v.bytes <= device->shared_block)
            return v.run(device, op, p, scratch);
    return MTP_FAIL(MTP_E_UNSUPPORTED,
                    "%s: head width %d in bf16 mode needs 99 KiB of shared memory a block; this "
                    "device has %d bytes",
                    op, p.D, device->shared_block);
}

} // namespace mtp
