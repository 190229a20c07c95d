/* Moving and converting rows: embedding, gather, scatter, convert, axpy (formulas: ops.h). All of it is bandwidth. */
#include <math.h>

#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int THREADS = 256;

/* Threads of a block that handles one row. */
int threads_of(int64_t width, int pack)
{
    const int64_t needed = divide_up(divide_up(width, pack), WARP) * WARP;
    return (int)(needed < THREADS ? needed : THREADS);
}

/* ---- embedding, gather, scatter: one block a row ----------------------------------------------------------------- */

/* y = round(factor * x) in the precision of T, factor rounded to it too */
template <typename T, typename Y, int N>
__global__ void __launch_bounds__(THREADS)
    embed_kernel(Y *y, int64_t y_stride, const T *table, int64_t table_stride, const int32_t *ids, int limit, int width,
                 float root, fault *fault)
{
    const int64_t r = blockIdx.x;
    const int id = ids[r];
    if (!in_range(fault, FAULT_EMBED, id, limit, (int)r)) return;
    const float factor = to_float(from_float<T>(root));
    const T *from = table + id * table_stride;
    for (int i = (int)threadIdx.x * N; i < width; i += (int)blockDim.x * N) {
        pack<N> x = load<N>(from + i);
        for (int j = 0; j < N; j++) x.v[j] = to_float(from_float<T>(factor * x.v[j]));
        store<N>(y + r * y_stride + i, x);
    }
}

template <typename T, typename D, int N>
__global__ void __launch_bounds__(THREADS)
    gather_kernel(D *dst, int64_t dst_stride, const T *src, int64_t src_stride, const int32_t *index, int limit,
                  int width, bool accumulate, fault *fault)
{
    const int64_t r = blockIdx.x;
    const int at = index[r];
    const bool none = at == MTP_NO_ROW;
    if (none ? accumulate : !in_range(fault, FAULT_GATHER, at, limit, (int)r)) return;
    for (int i = (int)threadIdx.x * N; i < width; i += (int)blockDim.x * N) {
        pack<N> x = {};
        if (!none) x = load<N>(src + at * src_stride + i);
        if (accumulate) {
            const pack<N> old = load<N>(dst + r * dst_stride + i);
            for (int j = 0; j < N; j++) x.v[j] += old.v[j];
        }
        store<N>(dst + r * dst_stride + i, x);
    }
}

template <int N>
__global__ void __launch_bounds__(THREADS)
    scatter_kernel(float *dst, int64_t dst_stride, const float *src, int64_t src_stride, const int32_t *index,
                   int limit, int width, bool accumulate, fault *fault)
{
    const int64_t r = blockIdx.x;
    const int at = index[r];
    if (at == MTP_NO_ROW || !in_range(fault, FAULT_SCATTER, at, limit, (int)r)) return;
    for (int i = (int)threadIdx.x * N; i < width; i += (int)blockDim.x * N) {
        pack<N> x = load<N>(src + r * src_stride + i);
        if (accumulate) {
            const pack<N> old = load<N>(dst + at * dst_stride + i);
            for (int j = 0; j < N; j++) x.v[j] += old.v[j];
        }
        store<N>(dst + at * dst_stride + i, x);
    }
}

/* ---- whole tensors ----------------------------------------------------------------------------------------------- */

/* Two tensors of one shape as rows of their last axis; axes that are contiguous in both are one axis. */
struct pair_shape {
    int64_t width, rows;
    int rank; /* of the rows */
    int64_t shape[MTP_MAX_RANK], from[MTP_MAX_RANK], to[MTP_MAX_RANK];
};

pair_shape collapse(const mtp_view &from, const mtp_view &to)
{
    pair_shape s = {};
    const int last = from.rank - 1;
    s.width = from.shape[last];
    s.rows = 1;
    int axis = last - 1;
    for (; axis >= 0; axis--) {
        const bool joined = from.shape[axis] == 1 || (from.stride[axis] == s.width && to.stride[axis] == s.width);
        if (!joined) break;
        s.width *= from.shape[axis];
    }
    for (; axis >= 0; axis--) { /* innermost first */
        if (from.shape[axis] == 1) continue;
        s.shape[s.rank] = from.shape[axis];
        s.from[s.rank] = from.stride[axis];
        s.to[s.rank++] = to.stride[axis];
        s.rows *= from.shape[axis];
    }
    return s;
}

/* Calls body(from offset, to offset) for every pack of the tensors. */
template <int N, typename Body>
__device__ __forceinline__ void each_pack(const pair_shape &s, Body body)
{
    const int64_t of_row = s.width / N, total = s.rows * of_row, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t p = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; p < total; p += step) {
        int64_t row = s.rows == 1 ? 0 : p / of_row;
        int64_t from = (p - row * of_row) * N, to = from;
        for (int axis = 0; axis < s.rank; axis++) {
            const int64_t outer = row / s.shape[axis], at = row - outer * s.shape[axis];
            from += at * s.from[axis];
            to += at * s.to[axis];
            row = outer;
        }
        body(from, to);
    }
}

template <typename From, typename To, int N>
__global__ void __launch_bounds__(THREADS) convert_kernel(To *dst, const From *src, pair_shape shape)
{
    each_pack<N>(shape, [&](int64_t from, int64_t to) { store<N>(dst + to, load<N>(src + from)); });
}

template <int N>
__global__ void __launch_bounds__(THREADS)
    axpy_kernel(float *y, const float *x, float alpha, bool accumulate, pair_shape shape)
{
    each_pack<N>(shape, [&](int64_t from, int64_t to) {
        pack<N> sum = load<N>(x + from);
        if (accumulate) {
            const pack<N> old = load<N>(y + to);
            for (int j = 0; j < N; j++) sum.v[j] = fmaf(alpha, sum.v[j], old.v[j]);
        } else {
            for (int j = 0; j < N; j++) sum.v[j] *= alpha;
        }
        store<N>(y + to, sum);
    });
}

/* After both views were checked. */
mtp_status convert(mtp_device *device, const char *op, const mtp_view &src, const mtp_view &dst)
{
    const pair_shape shape = collapse(src, dst);
    return dispatch(src.dtype, [&](auto from_tag) {
        return dispatch(dst.dtype, [&](auto to_tag) {
            using From = typename decltype(from_tag)::type;
            using To = typename decltype(to_tag)::type;
            constexpr int WIDE = wide_pack<From, To>();
            return with_pack<WIDE>(packs_fit<WIDE>(shape.width, src, dst), [&](auto n) -> mtp_status {
                constexpr int N = decltype(n)::value;
                const unsigned blocks = blocks_for(device, shape.rows * shape.width / N, THREADS);
                MTP_CUDA_TRY(op, MTP_LAUNCH((convert_kernel<From, To, N>), blocks, THREADS, 0, device->stream,
                                            (To *)dst.data, (const From *)src.data, shape));
                return MTP_OK;
            });
        });
    });
}

/* body(type_of<real>(), type_of<stored>(), integral_constant<int, elements of a pack>()) for rows that move from a real
 * matrix to a stored one. */
template <typename Body>
mtp_status dispatch_rows(int64_t width, const mtp_view &from, const mtp_view &to, Body body)
{
    return dispatch(from.dtype, [&](auto from_tag) {
        return dispatch_stored(to.dtype, [&](auto to_tag) {
            constexpr int WIDE = wide_pack<typename decltype(from_tag)::type, typename decltype(to_tag)::type>();
            return with_pack<WIDE>(packs_fit<WIDE>(width, from, to), [&](auto n) { return body(from_tag, to_tag, n); });
        });
    });
}

} // namespace

extern "C" mtp_status mtp__cuda_embed_fwd(mtp_device *device, const mtp_embed_args *a)
{
    const char *op = "embed_fwd";
    const int64_t rows = a->ids.shape[0], width = a->table.shape[1];
    MTP__CHECK(op, table, MTP__REAL, -1, -1);
    MTP__CHECK(op, ids, MTP_I32, -1);
    MTP__CHECK(op, y, mtp__stored_as(&a->y, device->info.stored), rows, width);
    const float root = (float)sqrt((double)width);
    return dispatch_rows(width, a->table, a->y, [&](auto from, auto to, auto n) -> mtp_status {
        using T = typename decltype(from)::type;
        using Y = typename decltype(to)::type;
        constexpr int N = decltype(n)::value;
        MTP_CUDA_TRY(op,
                     MTP_LAUNCH((embed_kernel<T, Y, N>), (unsigned)rows, threads_of(width, N), 0, device->stream,
                                (Y *)a->y.data, a->y.stride[0], (const T *)a->table.data, a->table.stride[0],
                                (const int32_t *)a->ids.data, (int)a->table.shape[0], (int)width, root, device->fault));
        return MTP_OK;
    });
}

extern "C" mtp_status mtp__cuda_gather_rows(mtp_device *device, const mtp_gather_args *a)
{
    const char *op = "gather_rows";
    const int64_t rows = a->index.shape[0], width = a->src.shape[1];
    MTP__CHECK(op, src, MTP__REAL, -1, -1);
    MTP__CHECK(op, index, MTP_I32, -1);
    const bool accumulate = a->write == MTP_ACCUMULATE;
    MTP__CHECK(op, dst, accumulate ? (int)MTP_F32 : mtp__stored_as(&a->dst, device->info.stored), rows, width);
    return dispatch_rows(width, a->src, a->dst, [&](auto from, auto to, auto n) -> mtp_status {
        using T = typename decltype(from)::type;
        using D = typename decltype(to)::type;
        constexpr int N = decltype(n)::value;
        MTP_CUDA_TRY(op, MTP_LAUNCH((gather_kernel<T, D, N>), (unsigned)rows, threads_of(width, N), 0, device->stream,
                                    (D *)a->dst.data, a->dst.stride[0], (const T *)a->src.data, a->src.stride[0],
                                    (const int32_t *)a->index.data, (int)a->src.shape[0], (int)width, accumulate,
                                    device->fault));
        return MTP_OK;
    });
}

extern "C" mtp_status mtp__cuda_scatter_rows(mtp_device *device, const mtp_gather_args *a)
{
    const char *op = "scatter_rows";
    const int64_t rows = a->index.shape[0], width = a->src.shape[1];
    MTP__CHECK(op, index, MTP_I32, -1);
    MTP__CHECK(op, src, MTP_F32, rows, -1);
    MTP__CHECK(op, dst, MTP_F32, -1, width);
    return with_pack<4>(packs_fit<4>(width, a->src, a->dst), [&](auto n) -> mtp_status {
        constexpr int N = decltype(n)::value;
        MTP_CUDA_TRY(op, MTP_LAUNCH(scatter_kernel<N>, (unsigned)rows, threads_of(width, N), 0, device->stream,
                                    (float *)a->dst.data, a->dst.stride[0], (const float *)a->src.data,
                                    a->src.stride[0], (const int32_t *)a->index.data, (int)a->dst.shape[0], (int)width,
                                    a->write == MTP_ACCUMULATE, device->fault));
        return MTP_OK;
    });
}

extern "C" mtp_status mtp__cuda_convert(mtp_device *device, const mtp_convert_args *a)
{
    MTP_TRY(mtp__check_convert("convert", a));
    return convert(device, "convert", a->src, a->dst);
}

extern "C" mtp_status mtp__cuda_axpy(mtp_device *device, const mtp_axpy_args *a)
{
    const char *op = "axpy";
    MTP_TRY(mtp__check_axpy(op, a));
    const pair_shape shape = collapse(a->x, a->y);
    return with_pack<4>(packs_fit<4>(shape.width, a->x, a->y), [&](auto n) -> mtp_status {
        constexpr int N = decltype(n)::value;
        const unsigned blocks = blocks_for(device, shape.rows * shape.width / N, THREADS);
        MTP_CUDA_TRY(op, MTP_LAUNCH(axpy_kernel<N>, blocks, THREADS, 0, device->stream, (float *)a->y.data,
                                    (const float *)a->x.data, a->alpha, a->write == MTP_ACCUMULATE, shape));
        return MTP_OK;
    });
}

mtp_status mtp__cuda_convert_matrix(mtp_device *device, const char *op, const mtp_view *src, void *dst, mtp_dtype to)
{
    return convert(device, op, *src, mtp_view_nd(dst, to, src->rank, src->shape));
}
