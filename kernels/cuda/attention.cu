/* Query-only attention: forward, and backward with respect to the queries.
 *
 *   S = q K^T (scale 1)      P = softmax over the keys the row sees      o = P V      lse = log sum exp S
 *   dP = do V^T              dS = P (dP - rowsum(do o))                  dq = dS K
 *
 * Two paths. Which one runs depends on the device's mode, the type of K/V and the head width, never on the data:
 *  - fused (attention_fused.cu): a device in bf16 mode, BF16 K/V, head width 256 or 512. K/V must be 16-byte aligned,
 *    and so must q, o, do and dq when they are BF16.
 *  - general (this file): everything else, in fp32 for any type and width. The oracle of the other one. It is a kernel
 *    and not a chain of cuBLASLt products around a masked softmax: those would need the key ranges on the host, which
 *    a captured graph does not have, and memory for scores.
 *
 * The general path: a block of four warps has a tile of 16 rows (positions times query heads of one K/V head), each
 * warp four of them from scores to output, so that only the staging of K and V needs barriers. A lane computes the
 * scores of one key and owns every 32nd column of the output. Keys come in blocks of 32 counted from the document's
 * first token, with the running maximum and sum of the online softmax; a block of which a row sees nothing adds zeros.
 * So the bits of a row do not depend on its company. */
#include "cuda/attention.h"

namespace mtp
{
namespace
{

enum {
    GENERAL_THREADS = 128,
    TILE_ROWS = 16,
    WARP_ROWS = 4,
    KEYS = 32,   /* of a block: one a lane */
    CHUNK = 128, /* columns of K or V that are staged together */
    LINE = CHUNK + 1
};

struct general_shared {
    float *q, *dout; /* [TILE_ROWS, D] */
    float *chunk;    /* [KEYS, LINE] */
    float *weight;   /* [TILE_ROWS, KEYS]: P, or dS */
};

size_t general_floats(int D, bool backward)
{
    return (size_t)(TILE_ROWS * D * (backward ? 2 : 1) + KEYS * LINE + TILE_ROWS * KEYS);
}

__device__ general_shared general_carve(float *shared, int D, bool backward)
{
    general_shared s;
    s.q = shared;
    s.dout = s.q + TILE_ROWS * D;
    s.chunk = backward ? s.dout + TILE_ROWS * D : s.dout;
    s.weight = s.chunk + KEYS * LINE;
    return s;
}

/* The rows of a tile, zeros where there is none. */
__device__ void stage_rows(const attention_problem &p, const attention_tile &tile, int head_tile, const void *src,
                           int64_t row_stride, int64_t head_stride, float *dst)
{
    for (int i = (int)threadIdx.x; i < TILE_ROWS * p.D; i += GENERAL_THREADS) {
        const attention_row r = attention_row_of(p, tile, head_tile, i / p.D);
        dst[i] = r.valid ? attention_get(p, src, r.row * row_stride + r.head * head_stride + i % p.D) : 0.0f;
    }
}

/* Columns [column, column + CHUNK) of K (which 0) or V (which 1) of a block of keys; zeros for keys that no row of the
 * tile sees and behind the last column. Barriers on both sides. */
template <typename T>
__device__ void stage_keys(const attention_problem &p, const attention_tile &tile, int head_tile, int which, int first,
                           int column, float *chunk)
{
    const T *src = static_cast<const T *>(p.kv) + which * p.kv_which + head_tile / (p.head_tiles / p.NKV) * p.kv_head;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < KEYS * CHUNK; i += GENERAL_THREADS) {
        const int key = first + i / CHUNK, d = column + i % CHUNK;
        const bool valid = key >= tile.begin && key < tile.end && d < p.D;
        chunk[i / CHUNK * LINE + i % CHUNK] = valid ? to_float(src[key * p.kv_token + d]) : 0.0f;
    }
    __syncthreads();
}

/* dot[i] += rows[i] . (the lane's key), over one chunk. */
__device__ void add_products(const float *rows, const float *chunk, int D, int column, float (&dot)[WARP_ROWS])
{
    const float *key = chunk + (int)threadIdx.x % WARP * LINE;
    const int width = min((int)CHUNK, D - column);
    for (int d = 0; d < width; d++) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; i++) dot[i] = fmaf(rows[i * D + column + d], key[d], dot[i]);
    }
}

/* sum[i] += weight[i] . (the block's keys), over the columns of one chunk: sum[i][j] is column lane + 32 j. */
template <int SPAN>
__device__ void add_weighted(const float *weight, const float *chunk, float (*sum)[SPAN], int column)
{
    const int lane = (int)threadIdx.x % WARP;
    for (int k = 0; k < KEYS; k++) {
#pragma unroll
        for (int j = 0; j < CHUNK / WARP; j++) {
            const float x = chunk[k * LINE + lane + j * WARP];
#pragma unroll
            for (int i = 0; i < WARP_ROWS; i++)
                sum[i][column / WARP + j] = fmaf(weight[i * KEYS + k], x, sum[i][column / WARP + j]);
        }
    }
}

/* A warp's four rows: which they are, and the keys they see (none when there is no such row). */
struct warp_rows {
    attention_row row[WARP_ROWS];
    int begin[WARP_ROWS], end[WARP_ROWS];
};

__device__ warp_rows warp_rows_of(const attention_problem &p, const attention_tile &tile, int head_tile)
{
    warp_rows w;
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        w.row[i] = attention_row_of(p, tile, head_tile, (int)threadIdx.x / WARP * WARP_ROWS + i);
        w.begin[i] = w.row[i].valid ? p.key_begin[w.row[i].row] : 0;
        w.end[i] = w.row[i].valid ? p.key_end[w.row[i].row] : 0;
    }
    return w;
}

template <int SPAN>
__device__ void store_rows(const attention_problem &p, const warp_rows &w, const float (&sum)[WARP_ROWS][SPAN],
                           const float (&factor)[WARP_ROWS], void *dst, int64_t row_stride, int64_t head_stride)
{
    const int lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        if (!w.row[i].valid) continue;
        const int64_t row = w.row[i].row * row_stride + w.row[i].head * head_stride;
#pragma unroll
        for (int j = 0; j < SPAN; j++) {
            const float x = sum[i][j] * factor[i] + 0.0f;
            if (lane + j * WARP >= p.D) continue;
            if (p.stored_bf16)
                static_cast<bf16 *>(dst)[row + lane + j * WARP] = from_float<bf16>(x);
            else
                static_cast<float *>(dst)[row + lane + j * WARP] = x;
        }
    }
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* Running maximum and sum of a warp's rows. */
struct running {
    float top[WARP_ROWS], sum[WARP_ROWS];
};

/* Scores of one block into probabilities against the running maximum; what was summed before shrinks with it. */
template <int SPAN>
__device__ void online_softmax(const warp_rows &w, int first, const float (&score)[WARP_ROWS], running *r,
                               float (*out)[SPAN], float *weight)
{
    const int lane = (int)threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        const bool seen = first + lane >= w.begin[i] && first + lane < w.end[i];
        const float top = fmaxf(r->top[i], warp_max(seen ? score[i] : -INFINITY));
        const float shrink = r->top[i] == top ? 1.0f : expf(r->top[i] - top); /* 0 at the first block */
        const float x = seen ? expf(score[i] - top) : 0.0f;
        r->sum[i] = fmaf(r->sum[i], shrink, warp_sum(x));
        r->top[i] = top;
        weight[i * KEYS + lane] = x;
#pragma unroll
        for (int j = 0; j < SPAN; j++) out[i][j] *= shrink;
    }
    __syncwarp();
}

template <typename T, int SPAN>
__device__ void forward_tile(const attention_problem &p, const attention_tile &tile, int head_tile,
                             const general_shared &s)
{
    const warp_rows w = warp_rows_of(p, tile, head_tile);
    const int own = (int)threadIdx.x / WARP * WARP_ROWS;
    const bool active = w.row[0].valid; /* a warp without rows only helps to stage */
    float *weight = s.weight + own * KEYS;
    float out[WARP_ROWS][SPAN] = {};
    running r;
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        r.top[i] = -INFINITY;
        r.sum[i] = 0;
    }
    stage_rows(p, tile, head_tile, p.q, p.q_row, p.q_head, s.q);
    for (int first = attention_first_block(p, tile, KEYS); first < tile.end;
         first = attention_next_block(p, tile, first + KEYS, KEYS)) {
        float score[WARP_ROWS] = {};
        for (int column = 0; column < p.D; column += CHUNK) {
            stage_keys<T>(p, tile, head_tile, 0, first, column, s.chunk);
            if (active) add_products(s.q + own * p.D, s.chunk, p.D, column, score);
        }
        if (active) online_softmax(w, first, score, &r, out, weight);
#pragma unroll
        for (int column = 0; column < SPAN * WARP; column += CHUNK) {
            if (column >= p.D) break;
            stage_keys<T>(p, tile, head_tile, 1, first, column, s.chunk);
            if (active) add_weighted<SPAN>(weight, s.chunk, out, column);
        }
    }
    if (!active) return;
    float factor[WARP_ROWS];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; i++) {
        factor[i] = 1 / r.sum[i];
        if (w.row[i].valid && threadIdx.x % WARP == 0)
            p.lse[w.row[i].row * p.lse_row + w.row[i].head] = r.top[i] + logf(r.sum[i]);
    }
    store_rows<SPAN>(p, w, out, factor, p.o, p.o_row, p.o_head);
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

template <typename T, int SPAN>
__device__ void backward_tile(const attention_problem &p, const attention_tile &tile, int head_tile,
                              const general_shared &s)
{
    const warp_rows w = warp_rows_of(p, tile, head_tile);
    const int lane = (int)threadIdx.x % WARP, own = (int)threadIdx.x / WARP * WARP_ROWS;
    const bool active = w.row[0].valid;
    float *weight = s.weight + own * KEYS;
    float dq[WARP_ROWS][SPAN] = {};
    float lse[WARP_ROWS] = {}, delta[WARP_ROWS] = {}; /* delta: rowsum(do o) */
    stage_rows(p, tile, head_tile, p.q, p.q_row, p.q_head, s.q);
    stage_rows(p, tile, head_tile, p.dout, p.dout_row, p.dout_head, s.dout);
    __syncthreads();
    for (int i = 0; active && i < WARP_ROWS; i++) {
        if (!w.row[i].valid) continue;
        const int64_t o = w.row[i].row * p.o_row + w.row[i].head * p.o_head;
        float sum = 0;
        for (int d = lane; d < p.D; d += WARP)
            sum = fmaf(s.dout[(own + i) * p.D + d], attention_get(p, p.o, o + d), sum);
        delta[i] = warp_sum(sum);
        lse[i] = p.lse[w.row[i].row * p.lse_row + w.row[i].head];
    }
    for (int first = attention_first_block(p, tile, KEYS); first < tile.end;
         first = attention_next_block(p, tile, first + KEYS, KEYS)) {
        float score[WARP_ROWS] = {}, dweight[WARP_ROWS] = {};
        for (int column = 0; column < p.D; column += CHUNK) {
            stage_keys<T>(p, tile, head_tile, 0, first, column, s.chunk);
            if (active) add_products(s.q + own * p.D, s.chunk, p.D, column, score);
            stage_keys<T>(p, tile, head_tile, 1, first, column, s.chunk);
            if (active) add_products(s.dout + own * p.D, s.chunk, p.D, column, dweight);
        }
        for (int i = 0; i < WARP_ROWS; i++) {
            const bool seen = first + lane >= w.begin[i] && first + lane < w.end[i];
            weight[i * KEYS + lane] = seen ? expf(score[i] - lse[i]) * (dweight[i] - delta[i]) : 0.0f;
        }
        __syncwarp();
#pragma unroll
        for (int column = 0; column < SPAN * WARP; column += CHUNK) {
            if (column >= p.D) break;
            stage_keys<T>(p, tile, head_tile, 0, first, column, s.chunk);
            if (active) add_weighted<SPAN>(weight, s.chunk, dq, column);
        }
    }
    const float factor[WARP_ROWS] = {1, 1, 1, 1};
    if (active) store_rows<SPAN>(p, w, dq, factor, p.dq, p.dq_row, p.dq_head);
}

template <typename T, int SPAN, bool BACKWARD>
__global__ void __launch_bounds__(GENERAL_THREADS, 2) attention_general(attention_problem p, attention_list list)
{
    MTP_DYNAMIC_SHARED(float, shared);
    MTP_SHARED(attention_work, work, [1]);
    const general_shared s = general_carve(shared, p.D, BACKWARD);
    while (attention_pull(p, list, work)) {
        if (BACKWARD)
            backward_tile<T, SPAN>(p, work->tile, work->head_tile, s);
        else
            forward_tile<T, SPAN>(p, work->tile, work->head_tile, s);
    }
}

/* ---- arguments and launches -------------------------------------------------------------------------------------- */

template <typename T, int SPAN, bool BACKWARD>
mtp_status launch_span(mtp_device *device, const char *op, const attention_problem &p, const attention_list &list)
{
    auto kernel = attention_general<T, SPAN, BACKWARD>;
    const size_t bytes = general_floats(p.D, BACKWARD) * sizeof(float);
    MTP_CUDA_TRY(op, allow_shared(kernel, bytes));
    const int64_t most = (int64_t)p.R * p.head_tiles, wanted = (int64_t)device->multiprocessors * 4;
    const unsigned blocks = (unsigned)(most < wanted ? most : wanted);
    MTP_CUDA_TRY(op, MTP_LAUNCH(kernel, blocks, GENERAL_THREADS, bytes, device->stream, p, list));
    return MTP_OK;
}

template <typename T, bool BACKWARD>
mtp_status launch_type(mtp_device *device, const char *op, const attention_problem &p, const attention_list &list)
{
    if (p.D <= 128) return launch_span<T, 128 / WARP, BACKWARD>(device, op, p, list);
    if (p.D <= 256) return launch_span<T, 256 / WARP, BACKWARD>(device, op, p, list);
    return launch_span<T, 512 / WARP, BACKWARD>(device, op, p, list);
}

mtp_status general(mtp_device *device, const char *op, attention_problem p, mtp_dtype dtype, void *scratch,
                   bool backward)
{
    attention_list list;
    attention_cut(&p, TILE_ROWS);
    MTP_TRY(attention_list_build(device, op, &p, scratch, &list));
    return dispatch(dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        return backward ? launch_type<T, true>(device, op, p, list) : launch_type<T, false>(device, op, p, list);
    });
}

enum { GROUP_MAX = 256 };

mtp_status check(const mtp_device *device, const char *op, const mtp_attention_args *a, bool backward)
{
    const int dtype = mtp__stored_as(&a->q, device->info.stored);
    MTP__CHECK(op, q, dtype, -1, -1, -1);
    MTP__CHECK(op, kv, MTP__REAL, -1, 2, -1, a->q.shape[2]);
    const int64_t R = a->q.shape[0], NH = a->q.shape[1], NKV = a->kv.shape[2], D = a->q.shape[2];
    if (D < 16 || D > 512 || D % 2)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: head width %lld of q; it must be even and 16 to 512", op, (long long)D);
    if (NH % NKV || NH / NKV > GROUP_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: q has %lld heads, kv %lld; 1 to %d query heads must share each K/V head",
                        op, (long long)NH, (long long)NKV, GROUP_MAX);
    if (R > INT32_MAX / (NH * TILE_ROWS) || a->kv.shape[0] > INT32_MAX - KEYS)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: %lld rows of %lld heads and %lld tokens; indices are 32 bits wide", op,
                        (long long)R, (long long)NH, (long long)a->kv.shape[0]);
    MTP__CHECK(op, key_begin, MTP_I32, R);
    MTP__CHECK(op, key_end, MTP_I32, R);
    MTP__CHECK(op, doc_begin, MTP_I32, R);
    MTP__CHECK(op, o, dtype, R, NH, D);
    MTP__CHECK(op, lse, MTP_F32, R, NH);
    if (backward) {
        MTP__CHECK(op, do_, dtype, R, NH, D);
        MTP__CHECK(op, dq, dtype, R, NH, D);
    }
    return MTP_OK;
}

attention_problem problem_of(const mtp_attention_args *a, bool backward)
{
    attention_problem p = {};
    p.q = a->q.data;
    p.kv = a->kv.data;
    p.key_begin = (const int *)a->key_begin.data;
    p.key_end = (const int *)a->key_end.data;
    p.doc_begin = (const int *)a->doc_begin.data;
    p.o = a->o.data;
    p.lse = (float *)a->lse.data;
    p.q_row = a->q.stride[0];
    p.q_head = a->q.stride[1];
    p.o_row = a->o.stride[0];
    p.o_head = a->o.stride[1];
    p.lse_row = a->lse.stride[0];
    p.kv_token = a->kv.stride[0];
    p.kv_which = a->kv.stride[1];
    p.kv_head = a->kv.stride[2];
    if (backward) {
        p.dout = a->do_.data;
        p.dq = a->dq.data;
        p.dout_row = a->do_.stride[0];
        p.dout_head = a->do_.stride[1];
        p.dq_row = a->dq.stride[0];
        p.dq_head = a->dq.stride[1];
    }
    p.R = (int)a->q.shape[0];
    p.S = (int)a->kv.shape[0];
    p.NH = (int)a->q.shape[1];
    p.NKV = (int)a->kv.shape[2];
    p.D = (int)a->q.shape[2];
    p.group = p.NH / p.NKV;
    p.stored_bf16 = a->q.dtype == MTP_BF16;
    return p;
}

bool is_fused(const mtp_device *device, const mtp_attention_args *a)
{
    return device->bf16 && a->kv.dtype == MTP_BF16 && (a->q.shape[2] == 256 || a->q.shape[2] == 512);
}

mtp_status run(mtp_device *device, const char *op, const mtp_attention_args *a, bool backward)
{
    MTP_TRY(check(device, op, a, backward));
    MTP_TRY(mtp__check_scratch(op, &a->scratch, attention_list_bytes(a->q.shape[0])));
    const attention_problem p = problem_of(a, backward);
    if (is_fused(device, a)) return attention_fused(device, op, p, a->scratch.data, backward);
    return general(device, op, p, a->kv.dtype, a->scratch.data, backward);
}

} // namespace
} // namespace mtp

mtp_status mtp__cuda_attention_fwd(mtp_device *device, const mtp_attention_args *a)
{
    return mtp::run(device, "attention_fwd", a, false);
}

size_t mtp__cuda_attention_fwd_scratch(const mtp_device *, const mtp_attention_args *a)
{
    return mtp::attention_list_bytes(a->q.shape[0]);
}

mtp_status mtp__cuda_attention_bwd(mtp_device *device, const mtp_attention_args *a)
{
    return mtp::run(device, "attention_bwd", a, true);
}

size_t mtp__cuda_attention_bwd_scratch(const mtp_device *, const mtp_attention_args *a)
{
    return mtp::attention_list_bytes(a->q.shape[0]);
}
