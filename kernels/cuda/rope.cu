/* Rotary embedding: the table of angles, and the rotation with its inverse (formulas: ops.h). */
#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 256;
constexpr int POSITION_MOST = 1 << 24; /* fp32 holds every integer up to here */

/* The arithmetic of the reference: an fp32 product, then cosf and sinf of the full range (no fast intrinsics). */
__global__ void __launch_bounds__(THREADS)
    table_kernel(float *cosine, int64_t cos_stride, float *sine, int64_t sin_stride, const int32_t *positions,
                 const float *inv_freq, int64_t rows, int pairs, fault *fault)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x, total = rows * pairs;
    for (int64_t p = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; p < total; p += step) {
        const int64_t r = p / pairs;
        const int i = (int)(p - r * pairs), position = positions[r];
        if (!in_range(fault, FAULT_POSITION, position, POSITION_MOST + 1, (int)r)) continue;
        const float angle = (float)position * inv_freq[i];
        cosine[r * cos_stride + i] = cosf(angle);
        sine[r * sin_stride + i] = sinf(angle);
    }
}

template <typename T>
struct heads {
    T *data;
    int64_t row, head; /* strides */
};

/* One thread a pack of pairs (i, i + D/2) of one head. */
template <typename T, int N>
__global__ void __launch_bounds__(THREADS)
    rotate_kernel(heads<T> y, heads<T> x, const float *cosine, int64_t cos_stride, const float *sine,
                  int64_t sin_stride, float sign, int64_t rows, int num_heads, int pairs)
{
    const int packs = pairs / N;
    const int64_t step = (int64_t)gridDim.x * blockDim.x, total = rows * num_heads * packs;
    for (int64_t p = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; p < total; p += step) {
        const int64_t head_row = p / packs, r = head_row / num_heads;
        const int i = (int)(p - head_row * packs) * N, h = (int)(head_row - r * num_heads);
        const T *from = x.data + r * x.row + h * x.head + i;
        T *to = y.data + r * y.row + h * y.head + i;
        const pack<N> low = load<N>(from), high = load<N>(from + pairs);
        const pack<N> c = load<N>(cosine + r * cos_stride + i), s = load<N>(sine + r * sin_stride + i);
        pack<N> out_low, out_high;
        for (int j = 0; j < N; j++) {
            const float sj = sign * s.v[j];
            out_low.v[j] = low.v[j] * c.v[j] - high.v[j] * sj;
            out_high.v[j] = high.v[j] * c.v[j] + low.v[j] * sj;
        }
        store<N>(to, out_low);
        store<N>(to + pairs, out_high);
    }
}

mtp_status rotate(mtp_device *device, const char *op, const mtp_rope_args *a, float sign)
{
    const int64_t rows = a->x.shape[0], num_heads = a->x.shape[1], width = a->x.shape[2];
    MTP_TRY(mtp__check_rope(op, a, device->info.stored));
    return dispatch_stored(a->x.dtype, [&](auto tag) {
        using T = typename decltype(tag)::type;
        constexpr int WIDE = wide_pack<T>();
        const heads<T> y = {(T *)a->y.data, a->y.stride[0], a->y.stride[1]};
        const heads<T> x = {(T *)a->x.data, a->x.stride[0], a->x.stride[1]};
        return with_pack<WIDE>(packs_fit<WIDE>(width / 2, a->x, a->y, a->cos, a->sin), [&](auto n) -> mtp_status {
            constexpr int N = decltype(n)::value;
            const unsigned blocks = blocks_for(device, rows * num_heads * (width / 2 / N), THREADS);
            MTP_CUDA_TRY(op, MTP_LAUNCH((rotate_kernel<T, N>), blocks, THREADS, 0, device->stream, y, x,
                                        (const float *)a->cos.data, a->cos.stride[0], (const float *)a->sin.data,
                                        a->sin.stride[0], sign, rows, (int)num_heads, (int)(width / 2)));
            return MTP_OK;
        });
    });
}

} // namespace

extern "C" mtp_status mtp__cuda_rope_table(mtp_device *device, const mtp_rope_table_args *a)
{
    const char *op = "rope_table";
    const int64_t rows = a->positions.shape[0], pairs = a->inv_freq.shape[0];
    MTP__CHECK(op, positions, MTP_I32, -1);
    MTP__CHECK(op, inv_freq, MTP_F32, -1);
    MTP__CHECK(op, cos, MTP_F32, rows, pairs);
    MTP__CHECK(op, sin, MTP_F32, rows, pairs);
    MTP_CUDA_TRY(op, MTP_LAUNCH(table_kernel, blocks_for(device, rows * pairs, THREADS), THREADS, 0, device->stream,
                                (float *)a->cos.data, a->cos.stride[0], (float *)a->sin.data, a->sin.stride[0],
                                (const int32_t *)a->positions.data, (const float *)a->inv_freq.data, rows, (int)pairs,
                                device->fault));
    return MTP_OK;
}

extern "C" mtp_status mtp__cuda_rope_fwd(mtp_device *device, const mtp_rope_args *a)
{
    return rotate(device, "rope_fwd", a, 1.0f);
}

extern "C" mtp_status mtp__cuda_rope_bwd(mtp_device *device, const mtp_rope_args *a)
{
    return rotate(device, "rope_bwd", a, -1.0f);
}
