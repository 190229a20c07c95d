/* AdamW and the sum of squares that the gradient norm is made of (formulas: ops.h). */
#include <math.h>

#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 256;

struct adamw_numbers {
    float grad_scale, decay, beta1, rest1, beta2, rest2, step_size, inv_root_bias2, eps;
};

template <int N>
__global__ void __launch_bounds__(THREADS)
    adamw_kernel(float *p, float *m, float *v, const float *g, int64_t n, adamw_numbers c)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x * N;
    for (int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N; i < n; i += step) {
        pack<N> pi = load<N>(p + i), mi = load<N>(m + i), vi = load<N>(v + i);
        const pack<N> gi = load<N>(g + i);
        for (int j = 0; j < N; j++) {
            const float grad = c.grad_scale * gi.v[j];
            mi.v[j] = c.beta1 * mi.v[j] + c.rest1 * grad;
            vi.v[j] = c.beta2 * vi.v[j] + c.rest2 * grad * grad;
            pi.v[j] = pi.v[j] * c.decay - c.step_size * mi.v[j] / (sqrtf(vi.v[j]) * c.inv_root_bias2 + c.eps);
        }
        store<N>(p + i, pi);
        store<N>(m + i, mi);
        store<N>(v + i, vi);
    }
}

} // namespace

extern "C" mtp_status mtp__cuda_adamw(mtp_device *device, const mtp_adamw_args *a)
{
    const char *op = "adamw";
    MTP_TRY(mtp__check_adamw(op, a));
    const double bias1 = 1 - pow(a->beta1, (double)a->step), bias2 = 1 - pow(a->beta2, (double)a->step);
    const adamw_numbers numbers = {(float)a->grad_scale,   (float)(1 - a->lr * a->weight_decay),
                                   (float)a->beta1,        (float)(1 - a->beta1),
                                   (float)a->beta2,        (float)(1 - a->beta2),
                                   (float)(a->lr / bias1), (float)(1 / sqrt(bias2)),
                                   (float)a->eps};
    const int64_t n = mtp_view_count(a->p);
    auto flat = [&](const mtp_view &view) { return mtp_view_1d(view.data, MTP_F32, n); };
    const int pack = pack_of(n, flat(a->p), flat(a->m), flat(a->v), flat(a->g));
    return with_pack(pack, [&](auto width) -> mtp_status {
        constexpr int N = decltype(width)::value;
        MTP_CUDA_TRY(op, MTP_LAUNCH(adamw_kernel<N>, blocks_for(device, n / N, THREADS), THREADS, 0, device->stream,
                                    (float *)a->p.data, (float *)a->m.data, (float *)a->v.data,
                                    (const float *)a->g.data, n, numbers));
        return MTP_OK;
    });
}

/* ---- sum of squares: one double a block of fixed size, then these in a fixed order ------------------------------- */

namespace
{

constexpr int SUM_BLOCK = 1 << 14;

__global__ void __launch_bounds__(THREADS) squares_kernel(double *sums, const float *x, int64_t n)
{
    MTP_SHARED(double, shared, [WARP]);
    const int64_t first = (int64_t)blockIdx.x * SUM_BLOCK, end = first + SUM_BLOCK < n ? first + SUM_BLOCK : n;
    double sum = 0;
    for (int64_t i = first + threadIdx.x; i < end; i += blockDim.x) sum += (double)x[i] * (double)x[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(THREADS) total_kernel(double *total, const double *sums, int64_t n)
{
    MTP_SHARED(double, shared, [WARP]);
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += sums[i];
    sum = block_sum(sum, shared);
    if (threadIdx.x == 0) *total = sum;
}

} // namespace

extern "C" size_t mtp__cuda_sumsq_scratch(const mtp_device *device, const mtp_sumsq_args *a)
{
    (void)device;
    return (size_t)(divide_up(mtp_view_count(a->x), SUM_BLOCK) + 1) * sizeof(double);
}

extern "C" mtp_status mtp__cuda_sumsq(mtp_device *device, const mtp_sumsq_args *a)
{
    const char *op = "sumsq";
    MTP_TRY(mtp__check_sumsq(op, a));
    MTP_TRY(mtp__check_scratch(op, &a->scratch, mtp__cuda_sumsq_scratch(device, a)));
    const int64_t n = mtp_view_count(a->x), blocks = divide_up(n, SUM_BLOCK);
    double *total = (double *)a->scratch.data, *sums = total + 1;
    MTP_CUDA_TRY(op, MTP_LAUNCH(squares_kernel, (unsigned)blocks, THREADS, 0, device->stream, sums,
                                (const float *)a->x.data, n));
    MTP_CUDA_TRY(op, MTP_LAUNCH(total_kernel, 1, THREADS, 0, device->stream, total, (const double *)sums, blocks));
    MTP_CUDA_TRY(op, cudaMemcpyAsync(a->result, total, sizeof *total, cudaMemcpyDeviceToHost, device->stream));
    MTP_CUDA_TRY(op, cudaStreamSynchronize(device->stream)); /* the result is host memory */
    return MTP_OK;
}
