/* AdamW and what it needs to know of all gradients together (formulas: ops.h). The numbers of an update stay on the
 * device, in the control block. */
#include <math.h>

#include "cuda/cuda.h"
#include "philox.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 256, DECAY_GRAIN = 16;

struct adamw_span {
    float *m, *v;
    const float *g;
    bf16 *shadow;          /* or NULL */
    const uint8_t *decays; /* or NULL */
    const double *control;
    int64_t n;
    double weight_decay, beta1, beta2, eps;
    uint64_t seed, place;
};

/* What every thread needs of the control block, in fp32. */
struct adamw_numbers {
    float grad_scale, decay, beta1, rest1, beta2, rest2, step_size, inv_root_bias2, eps;
};

__device__ __forceinline__ adamw_numbers numbers_of(const adamw_span &s)
{
    const double lr = s.control[MTP_CONTROL_LR];
    return {(float)s.control[MTP_CONTROL_FACTOR],
            (float)(1 - lr * s.weight_decay),
            (float)s.beta1,
            (float)(1 - s.beta1),
            (float)s.beta2,
            (float)(1 - s.beta2),
            (float)(lr / s.control[MTP_CONTROL_BIAS1]),
            (float)(1 / sqrt(s.control[MTP_CONTROL_BIAS2])),
            (float)s.eps};
}

/* N values from i on. Each value has the same bits whatever N is. */
template <int N, typename P>
__device__ __forceinline__ pack<N> update(const P *p, const adamw_span &s, const adamw_numbers &c, int64_t i)
{
    pack<N> pi = load<N>(p + i), mi = load<N>(s.m + i), vi = load<N>(s.v + i);
    const pack<N> gi = load<N>(s.g + i);
    const float decay = !s.decays || s.decays[i / DECAY_GRAIN] ? c.decay : 1.0f;
#pragma unroll
    for (int j = 0; j < N; j++) {
        const float grad = c.grad_scale * gi.v[j];
        mi.v[j] = fmaf(c.beta1, mi.v[j], c.rest1 * grad);
        vi.v[j] = fmaf(c.beta2, vi.v[j], c.rest2 * (grad * grad));
        const float root = fmaf(sqrtf(vi.v[j]), c.inv_root_bias2, c.eps);
        pi.v[j] = fmaf(pi.v[j], decay, -(c.step_size * mi.v[j] / root));
    }
    store<N>(s.m + i, mi);
    store<N>(s.v + i, vi);
    return pi;
}

template <int N>
__global__ void __launch_bounds__(THREADS) adamw_kernel(float *p, adamw_span s)
{
    MTP_SHARED(adamw_numbers, numbers, [1]);
    if (s.control[MTP_CONTROL_SKIP] != 0) return;
    if (threadIdx.x == 0) numbers[0] = numbers_of(s);
    __syncthreads();
    const adamw_numbers c = numbers[0];
    const int64_t step = (int64_t)gridDim.x * blockDim.x * N;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N; i < s.n; i += step) {
        const pack<N> pi = update<N>(p, s, c, i);
        store<N>(p + i, pi);
        if (s.shadow) store<N>(s.shadow + i, pi);
    }
}

/* A thread takes the values that share a block of random numbers. */
template <int N>
__global__ void __launch_bounds__(THREADS) adamw_rounded_kernel(bf16 *p, adamw_span s)
{
    constexpr int GROUP = 8;
    MTP_SHARED(adamw_numbers, numbers, [1]);
    if (s.control[MTP_CONTROL_SKIP] != 0) return;
    if (threadIdx.x == 0) numbers[0] = numbers_of(s);
    __syncthreads();
    const adamw_numbers c = numbers[0];
    const uint64_t update_number = (uint64_t)s.control[MTP_CONTROL_STEP];
    const int64_t step = (int64_t)gridDim.x * blockDim.x * GROUP;
    for (int64_t first = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * GROUP; first < s.n; first += step) {
        const mtp__philox random = mtp__random_block(s.seed, update_number, (s.place + (uint64_t)first) / GROUP);
#pragma unroll
        for (int k = 0; k < GROUP; k += N) {
            if (first + k >= s.n) break;
            pack<N> pi = update<N>(p, s, c, first + k);
#pragma unroll
            for (int j = 0; j < N; j++)
                pi.v[j] =
                    __uint_as_float(mtp__round_to_bf16(__float_as_uint(pi.v[j]), mtp__random_bits(&random, k + j)));
            store<N>(p + first + k, pi); /* which rounds nothing any more */
        }
    }
}

} // namespace

extern "C" mtp_status mtp__cuda_adamw(mtp_device *device, const mtp_adamw_args *a)
{
    const char *op = "adamw";
    MTP_TRY(mtp__check_adamw(op, a));
    const int64_t n = mtp_view_count(a->p);
    const adamw_span span = {(float *)a->m.data,
                             (float *)a->v.data,
                             (const float *)a->g.data,
                             (bf16 *)a->shadow.data,
                             (const uint8_t *)a->decays.data,
                             (const double *)a->control.data,
                             n,
                             a->weight_decay,
                             a->beta1,
                             a->beta2,
                             a->eps,
                             a->seed,
                             (uint64_t)a->place};
    auto flat = [&](const mtp_view &view) { return mtp_view_1d(view.data, view.dtype, n); };
    const int pack = pack_of(n, flat(a->p), flat(a->m), flat(a->v), flat(a->g), flat(a->shadow));
    return with_pack(pack, [&](auto width) -> mtp_status {
        constexpr int N = decltype(width)::value;
        if (a->p.dtype == MTP_BF16)
            MTP_CUDA_TRY(op, MTP_LAUNCH(adamw_rounded_kernel<N>, blocks_for(device, divide_up(n, 8), THREADS), THREADS,
                                        0, device->stream, (bf16 *)a->p.data, span));
        else
            MTP_CUDA_TRY(op, MTP_LAUNCH(adamw_kernel<N>, blocks_for(device, n / N, THREADS), THREADS, 0, device->stream,
                                        (float *)a->p.data, span));
        return MTP_OK;
    });
}

/* ---- sum of squares: one double a block of fixed size, then these in a fixed order ------------------------------- */

namespace
{

constexpr int SUM_BLOCK = 1 << 14;

/* Thread t adds values 4 (t + THREADS k) .. + 3 in order, whether they are loaded one by one or four at once. */
template <int N>
__global__ void __launch_bounds__(THREADS) squares_kernel(double *sums, const float *x, int64_t n)
{
    constexpr int GROUP = 4;
    MTP_SHARED(double, shared, [WARP]);
    const int64_t first = (int64_t)blockIdx.x * SUM_BLOCK, end = first + SUM_BLOCK < n ? first + SUM_BLOCK : n;
    double sum = 0;
    for (int64_t i = first + threadIdx.x * GROUP; i < end; i += THREADS * GROUP) {
#pragma unroll
        for (int k = 0; k < GROUP; k += N) {
            if (i + k >= end) break;
            const pack<N> xi = load<N>(x + i + k);
#pragma unroll
            for (int j = 0; j < N; j++) sum = fma((double)xi.v[j], (double)xi.v[j], sum);
        }
    }
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(THREADS) total_kernel(double *total, const double *sums, int64_t n, bool accumulate)
{
    MTP_SHARED(double, shared, [WARP]);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *total = accumulate ? *total + sum : sum;
}

} // namespace

extern "C" size_t mtp__cuda_sumsq_scratch(const mtp_device *device, const mtp_sumsq_args *a)
{
    (void)device;
    return (size_t)divide_up(mtp_view_count(a->x), SUM_BLOCK) * sizeof(double);
}

extern "C" mtp_status mtp__cuda_sumsq(mtp_device *device, const mtp_sumsq_args *a)
{
    const char *op = "sumsq";
    MTP_TRY(mtp__check_sumsq(op, a));
    MTP_TRY(mtp__check_scratch(op, &a->scratch, mtp__cuda_sumsq_scratch(device, a)));
    const int64_t n = mtp_view_count(a->x), blocks = divide_up(n, SUM_BLOCK);
    double *sums = (double *)a->scratch.data;
    MTP_TRY(with_pack(pack_of(n, mtp_view_1d(a->x.data, MTP_F32, n)), [&](auto width) -> mtp_status {
        constexpr int N = decltype(width)::value;
        MTP_CUDA_TRY(op, MTP_LAUNCH(squares_kernel<N>, (unsigned)blocks, THREADS, 0, device->stream, sums,
                                    (const float *)a->x.data, n));
        return MTP_OK;
    }));
    MTP_CUDA_TRY(op, MTP_LAUNCH(total_kernel, 1, THREADS, 0, device->stream, (double *)a->result.data,
                                (const double *)sums, blocks, a->write == MTP_ACCUMULATE));
    return MTP_OK;
}

/* ---- the decision ------------------------------------------------------------------------------------------------ */

namespace
{

/* One warp. */
__global__ void __launch_bounds__(WARP) clip_kernel(double *control, const double *watch, int64_t n, double lr,
                                                    double max_norm, double beta1, double beta2, bool skip)
{
    const double norm = sqrt(control[MTP_CONTROL_SUM]);
    bool good = isfinite(norm) && !skip;
    for (int64_t i = threadIdx.x; i < n; i += WARP) good = good && isfinite(watch[i]);
    good = __all_sync(ALL_LANES, good);
    if (threadIdx.x != 0) return;
    const double step = control[MTP_CONTROL_STEP] + (good ? 1 : 0);
    control[MTP_CONTROL_LR] = lr;
    control[MTP_CONTROL_NORM] = norm;
    control[MTP_CONTROL_FACTOR] = max_norm > 0 ? fmin(1.0, max_norm / (norm + 1e-6)) : 1.0;
    control[MTP_CONTROL_STEP] = step;
    control[MTP_CONTROL_SKIP] = good ? 0 : 1;
    control[MTP_CONTROL_BIAS1] = 1 - pow(beta1, step);
    control[MTP_CONTROL_BIAS2] = 1 - pow(beta2, step);
}

} // namespace

extern "C" mtp_status mtp__cuda_clip(mtp_device *device, const mtp_clip_args *a)
{
    const char *op = "clip";
    MTP_TRY(mtp__check_clip(op, a));
    MTP_CUDA_TRY(op, MTP_LAUNCH(clip_kernel, 1, WARP, 0, device->stream, (double *)a->control.data,
                                (const double *)a->watch.data, a->watch.data ? a->watch.shape[0] : 0, a->lr,
                                a->max_norm, a->beta1, a->beta2, a->skip));
    return MTP_OK;
}
