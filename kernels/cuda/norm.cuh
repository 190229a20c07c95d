/* What RMSNorm (norm.cu) and the post-norm with its residual (norm_residual.cu) share. Internal to kernels/cuda.
 *
 * A warp owns a row: lane l holds the packs l, l + 32, ... of it (a pack is one element, or as many as make 16 bytes of
 * the narrowest type where rows are aligned), so a row's bits depend on its width alone. Weight gradients are summed in
 * two passes: a block adds a chunk of rows (its warps in order) into one partial sum in scratch, then the partial sums
 * are added in order. */
#ifndef MTP_KERNELS_CUDA_NORM_CUH
#define MTP_KERNELS_CUDA_NORM_CUH

#include "cuda/cuda.h"

namespace mtp
{
namespace norm
{

constexpr int WARPS = 8; /* of a block, at most */
constexpr int THREADS = WARPS * WARP;

template <typename T>
struct matrix {
    T *data; /* NULL: absent */
    int64_t stride;
    __device__ __forceinline__ T *row(int64_t r) const
    {
        return data + r * stride;
    }
};

template <typename T>
matrix<T> of(const mtp_view &view)
{
    return {(T *)view.data, view.data ? view.stride[0] : 0};
}

/* The weight of a norm, of any real dtype; data NULL: ones. It stays in cache, so its dtype is no template parameter.
 */
struct weight {
    const void *data;
    int dtype, no_padding; /* the last word is all ours, here and below: what a launch copies is defined */
    template <int N>
    __device__ __forceinline__ pack<N> at(int i) const
    {
        if (!data) {
            pack<N> ones;
            for (int j = 0; j < N; j++) ones.v[j] = 1.0f;
            return ones;
        }
        if (dtype == MTP_BF16) return load<N>((const bf16 *)data + i);
        if (dtype == MTP_F16) return load<N>((const f16 *)data + i);
        return load<N>((const float *)data + i);
    }
};

inline weight weight_of(const mtp_view &view)
{
    return {view.data, (int)view.dtype, 0};
}

__device__ __forceinline__ float reciprocal_rms(float sumsq, int width, float eps)
{
    return 1.0f / sqrtf(sumsq / (float)width + eps);
}

__device__ __forceinline__ int64_t row_of_warp()
{
    return (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
}

/* Calls body(first element) for the lane's packs of `width` elements. */
template <int N, typename Body>
__device__ __forceinline__ void each_pack(int width, Body body)
{
    for (int i = (int)threadIdx.x % WARP * N; i < width; i += WARP * N) body(i);
}

template <int N>
__device__ __forceinline__ float add_squares(float sum, const pack<N> &x)
{
    for (int j = 0; j < N; j++) sum = fmaf(x.v[j], x.v[j], sum);
    return sum;
}

/* sum + a . b */
template <int N>
__device__ __forceinline__ float add_product(float sum, const pack<N> &a, const pack<N> &b)
{
    for (int j = 0; j < N; j++) sum = fmaf(a.v[j], b.v[j], sum);
    return sum;
}

template <int N>
__device__ __forceinline__ pack<N> times(const pack<N> &a, const pack<N> &b)
{
    pack<N> c;
    for (int j = 0; j < N; j++) c.v[j] = a.v[j] * b.v[j];
    return c;
}

/* ---- backward: sums over chunks of rows -------------------------------------------------------------------------- */

struct chunk_sums {
    float *dw, *next_dw; /* partial sums [chunks, width]; NULL: not wanted */
    double *dscalar;     /* [chunks]; NULL: not wanted */
    int64_t rows, chunk_rows;
    int width, no_padding;
};

/* A block's chunk of rows; its warps take them in turn. row(r, dw, next_dw) adds the row's part of the weight gradients
 * to the warp's sums in shared memory, each lane the elements that are its own in every row, and returns the row's part
 * of dscalar in every lane. */
template <typename Row>
__device__ __forceinline__ void sum_chunk(const chunk_sums &c, float *sums, double *scalars, Row row)
{
    const int warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP, lane = (int)threadIdx.x % WARP;
    const int kinds = (c.dw ? 1 : 0) + (c.next_dw ? 1 : 0), all = warps * c.width;
    const int64_t first = (int64_t)blockIdx.x * c.chunk_rows;
    const int64_t end = first + c.chunk_rows < c.rows ? first + c.chunk_rows : c.rows;
    float *next_sums = sums + (c.dw ? all : 0);
    for (int i = (int)threadIdx.x; i < kinds * all; i += (int)blockDim.x) sums[i] = 0.0f;
    __syncthreads();
    double dscalar = 0;
    for (int64_t r = first + warp; r < end; r += warps)
        dscalar += row(r, sums + warp * c.width, next_sums + warp * c.width);
    if (lane == 0) scalars[warp] = dscalar;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < kinds * c.width; i += (int)blockDim.x) {
        const bool next = !c.dw || i >= c.width;
        const int column = i >= c.width ? i - c.width : i;
        const float *from = (next ? next_sums : sums) + column;
        float sum = 0.0f;
        for (int k = 0; k < warps; k++) sum += from[k * c.width];
        (next ? c.next_dw : c.dw)[(int64_t)blockIdx.x * c.width + column] = sum;
    }
    if (c.dscalar && threadIdx.x == 0) {
        double sum = 0;
        for (int k = 0; k < warps; k++) sum += scalars[k];
        c.dscalar[blockIdx.x] = sum;
    }
}

/* ---- backward: launches ------------------------------------------------------------------------------------------ */

/* Chunks follow from the number of rows alone: at least 16 rows, at most 512 chunks. */
struct backward_scratch {
    float *dw, *next_dw;
    double *dscalar;
    int64_t chunks, chunk_rows;
    size_t total;
};

/* `post`: with the sums of the post-norm. */
backward_scratch lay_out(int64_t rows, int64_t width, bool post, void *base);

/* Gradients of parameters, absent ones with data NULL. */
struct parameter_gradients {
    const mtp_view *dw, *next_dw, *dscalar;
    mtp_write dw_write, dscalar_write;
};

/* What to sum, and the shape of the launch: as many warps as their sums fit in half of a block's shared memory. */
struct backward_launch {
    chunk_sums sums;
    int warps;
    size_t shared;
};

mtp_status plan_backward(const mtp_device *device, const char *op, const mtp_view &x, const backward_scratch &s,
                         const parameter_gradients &to, backward_launch *launch);

template <typename Kernel, typename Args>
mtp_status launch_backward(mtp_device *device, const char *op, Kernel kernel, const Args &args,
                           const backward_launch &launch, const backward_scratch &s)
{
    MTP_CUDA_TRY(op, allow_shared(kernel, launch.shared));
    MTP_CUDA_TRY(op, MTP_LAUNCH(kernel, (unsigned)s.chunks, launch.warps * WARP, launch.shared, device->stream, args));
    return MTP_OK;
}

/* The partial sums into the gradients. */
mtp_status add_partial_sums(mtp_device *device, const char *op, const backward_scratch &s,
                            const parameter_gradients &to);

inline const mtp_view absent = {};

} // namespace norm
} // namespace mtp

#endif
