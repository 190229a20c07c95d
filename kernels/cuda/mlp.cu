/* The gated activation of the MLP and its backward (formulas: ops.h). */
#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 256;
constexpr float ROOT_2_OVER_PI = 0.7978845608028654f, CUBIC = 0.044715f;

struct matrix {
    float *data; /* NULL: not wanted */
    int64_t stride;
};

/* 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)) with u = sqrt(2/pi) (g + 0.044715 g^3): the share of g that gelu lets through,
 * without the cancellation of 1 + tanh for negative g. */
__device__ __forceinline__ float share_of(float g)
{
    return 1.0f / (1.0f + expf(-2.0f * ROOT_2_OVER_PI * (g + CUBIC * g * g * g)));
}

template <int N>
__global__ void __launch_bounds__(THREADS) geglu_kernel(matrix y, matrix gate, matrix up, int64_t rows, int width)
{
    const int packs = width / N;
    const int64_t step = (int64_t)gridDim.x * blockDim.x, total = rows * packs;
    for (int64_t p = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; p < total; p += step) {
        const int64_t r = p / packs, i = (p - r * packs) * N;
        const pack<N> g = load<N>(gate.data + r * gate.stride + i);
        pack<N> u = load<N>(up.data + r * up.stride + i);
        for (int j = 0; j < N; j++) u.v[j] *= g.v[j] * share_of(g.v[j]);
        store<N>(y.data + r * y.stride + i, u);
    }
}

template <int N>
__global__ void __launch_bounds__(THREADS)
    geglu_bwd_kernel(matrix y, matrix dgate, matrix dup, matrix gate, matrix up, matrix dy, int64_t rows, int width)
{
    const int packs = width / N;
    const int64_t step = (int64_t)gridDim.x * blockDim.x, total = rows * packs;
    for (int64_t p = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; p < total; p += step) {
        const int64_t r = p / packs, i = (p - r * packs) * N;
        const pack<N> g = load<N>(gate.data + r * gate.stride + i), u = load<N>(up.data + r * up.stride + i);
        const pack<N> d = load<N>(dy.data + r * dy.stride + i);
        pack<N> value, to_gate, to_up;
        for (int j = 0; j < N; j++) {
            const float x = g.v[j], share = share_of(x), gelu = x * share;
            const float slope =
                share + 2.0f * x * share * (1.0f - share) * ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
            value.v[j] = gelu * u.v[j];
            to_gate.v[j] = d.v[j] * u.v[j] * slope;
            to_up.v[j] = d.v[j] * gelu;
        }
        if (y.data) store<N>(y.data + r * y.stride + i, value);
        if (dgate.data) store<N>(dgate.data + r * dgate.stride + i, to_gate);
        if (dup.data) store<N>(dup.data + r * dup.stride + i, to_up);
    }
}

matrix of(const mtp_view &view)
{
    return {(float *)view.data, view.stride[0]};
}

} // namespace

extern "C" mtp_status mtp__cuda_geglu_fwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_fwd";
    MTP_TRY(mtp__check_geglu_fwd(op, a));
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    return with_pack(pack_of(width, a->gate, a->up, a->y), [&](auto n) -> mtp_status {
        constexpr int N = decltype(n)::value;
        MTP_CUDA_TRY(op, MTP_LAUNCH(geglu_kernel<N>, blocks_for(device, rows * (width / N), THREADS), THREADS, 0,
                                    device->stream, of(a->y), of(a->gate), of(a->up), rows, (int)width));
        return MTP_OK;
    });
}

extern "C" mtp_status mtp__cuda_geglu_bwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_bwd";
    MTP_TRY(mtp__check_geglu_bwd(op, a));
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    return with_pack(pack_of(width, a->gate, a->up, a->dy, a->y, a->dgate, a->dup), [&](auto n) -> mtp_status {
        constexpr int N = decltype(n)::value;
        MTP_CUDA_TRY(op, MTP_LAUNCH(geglu_bwd_kernel<N>, blocks_for(device, rows * (width / N), THREADS), THREADS, 0,
                                    device->stream, of(a->y), of(a->dgate), of(a->dup), of(a->gate), of(a->up),
                                    of(a->dy), rows, (int)width));
        return MTP_OK;
    });
}
