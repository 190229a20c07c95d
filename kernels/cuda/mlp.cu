/* The gated activation of the MLP and its backward (formulas: ops.h). */
#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 256;
constexpr float ROOT_2_OVER_PI = 0.7978845608028654f, CUBIC = 0.044715f;

template <typename T>
struct matrix {
    T *data; /* NULL: not wanted */
    int64_t stride;
    __device__ __forceinline__ T *at(int64_t r, int i) const
    {
        return data + r * stride + i;
    }
};

/* 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2u)) with u = sqrt(2/pi) (g + 0.044715 g^3): the share of g that gelu lets through,
 * without the cancellation of 1 + tanh for negative g. */
__device__ __forceinline__ float share_of(float g)
{
    return 1.0f / (1.0f + expf(-2.0f * ROOT_2_OVER_PI * (g + CUBIC * g * g * g)));
}

/* Calls body(row, first element) for the packs of a matrix: a thread has the same columns in every gridDim.y-th row. */
template <int N, typename Body>
__device__ __forceinline__ void each_pack(int64_t rows, int width, Body body)
{
    const int i = ((int)blockIdx.x * (int)blockDim.x + (int)threadIdx.x) * N;
    if (i >= width) return;
    for (int64_t r = blockIdx.y; r < rows; r += gridDim.y) body(r, i);
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    geglu_kernel(matrix<T> y, matrix<const T> gate, matrix<const T> up, int64_t rows, int width)
{
    each_pack<N>(rows, width, [&](int64_t r, int i) {
        const pack<N> g = load<N>(gate.at(r, i));
        pack<N> u = load<N>(up.at(r, i));
        for (int j = 0; j < N; j++) u.v[j] *= g.v[j] * share_of(g.v[j]);
        store<N>(y.at(r, i), u);
    });
}

template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    geglu_bwd_kernel(matrix<T> y, matrix<T> dgate, matrix<T> dup, matrix<const T> gate, matrix<const T> up,
                     matrix<const T> dy, int64_t rows, int width)
{
    each_pack<N>(rows, width, [&](int64_t r, int i) {
        const pack<N> g = load<N>(gate.at(r, i)), u = load<N>(up.at(r, i)), d = load<N>(dy.at(r, i));
        pack<N> value, to_gate, to_up;
        for (int j = 0; j < N; j++) {
            const float x = g.v[j], share = share_of(x), gelu = x * share;
            const float slope =
                share + 2.0f * x * share * (1.0f - share) * ROOT_2_OVER_PI * (1.0f + 3.0f * CUBIC * x * x);
            value.v[j] = gelu * u.v[j];
            to_gate.v[j] = d.v[j] * u.v[j] * slope;
            to_up.v[j] = d.v[j] * gelu;
        }
        if (y.data) store<N>(y.at(r, i), value);
        if (dgate.data) store<N>(dgate.at(r, i), to_gate);
        if (dup.data) store<N>(dup.at(r, i), to_up);
    });
}

template <typename T>
matrix<T> of(const mtp_view &view)
{
    return {(T *)view.data, view.stride[0]};
}

/* Blocks for a matrix of packs: all of its columns, and rows up to what fills the device. */
dim3 grid_for(const mtp_device *device, int64_t rows, int64_t packs)
{
    const int64_t across = divide_up(packs, THREADS),
                  most = divide_up(blocks_for(device, rows * packs, THREADS), across);
    return dim3((unsigned)across, (unsigned)(most < rows ? most : rows));
}

} // namespace

extern "C" mtp_status mtp__cuda_geglu_fwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_fwd";
    MTP_TRY(mtp__check_geglu_fwd(op, a, device->info.stored));
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    return dispatch_stored(a->gate.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        constexpr int WIDE = wide_pack<T>();
        return with_pack<WIDE>(packs_fit<WIDE>(width, a->gate, a->up, a->y), [&](auto n) -> mtp_status {
            constexpr int N = decltype(n)::value;
            MTP_CUDA_TRY(op,
                         MTP_LAUNCH((geglu_kernel<T, N>), grid_for(device, rows, width / N), THREADS, 0, device->stream,
                                    of<T>(a->y), of<const T>(a->gate), of<const T>(a->up), rows, (int)width));
            return MTP_OK;
        });
    });
}

extern "C" mtp_status mtp__cuda_geglu_bwd(mtp_device *device, const mtp_geglu_args *a)
{
    const char *op = "geglu_bwd";
    MTP_TRY(mtp__check_geglu_bwd(op, a, device->info.stored));
    const int64_t rows = a->gate.shape[0], width = a->gate.shape[1];
    return dispatch_stored(a->gate.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        constexpr int WIDE = wide_pack<T>();
        const bool wide = packs_fit<WIDE>(width, a->gate, a->up, a->dy, a->y, a->dgate, a->dup);
        return with_pack<WIDE>(wide, [&](auto n) -> mtp_status {
            constexpr int N = decltype(n)::value;
            MTP_CUDA_TRY(op,
                         MTP_LAUNCH((geglu_bwd_kernel<T, N>), grid_for(device, rows, width / N), THREADS, 0,
                                    device->stream, of<T>(a->y), of<T>(a->dgate), of<T>(a->dup), of<const T>(a->gate),
                                    of<const T>(a->up), of<const T>(a->dy), rows, (int)width));
            return MTP_OK;
        });
    });
}
