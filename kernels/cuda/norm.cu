/* RMSNorm, and the post-norm with its residual (formulas: ops.h).
 *
 * A warp owns a row: lane l holds the elements l, l + 32, ... (times a pack of 4 where rows are aligned), so a row's
 * bits depend on its width alone. Weight gradients are summed in two passes: a block adds a chunk of rows (its warps in
 * order) into one partial sum in scratch, then the partial sums are added in order. */
#include "cuda/cuda.h"

namespace
{

using namespace mtp;

constexpr int WARPS = 8; /* of a block, at most */
constexpr int THREADS = WARPS * WARP;

struct rows_of {
    float *data; /* NULL: absent */
    int64_t stride;
    __device__ __forceinline__ float *row(int64_t r) const
    {
        return data + r * stride;
    }
};

rows_of of(const mtp_view &view)
{
    return {(float *)view.data, view.stride[0]};
}

__device__ __forceinline__ float reciprocal_rms(float sumsq, int width, float eps)
{
    return 1.0f / sqrtf(sumsq / (float)width + eps);
}

/* ---- forward ----------------------------------------------------------------------------------------------------- */

/* y = scalar (residual + x rstd w); residual, w, scalar and rstd may be absent. y may be residual or x: a lane reads
 * its elements before it writes them. */
template <typename X, typename W, int N>
__global__ void __launch_bounds__(THREADS)
    norm_kernel(rows_of y, float *rstd_out, const X *x, int64_t x_stride, const W *w, rows_of residual,
                const float *scalar, int64_t rows, int width, float eps)
{
    const int lane = (int)threadIdx.x % WARP;
    const int64_t r = (int64_t)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (r >= rows) return; /* the whole warp */
    const X *from = x + r * x_stride;
    float sumsq = 0.0f;
    for (int i = lane * N; i < width; i += WARP * N) {
        const pack<N> v = load<N>(from + i);
        for (int j = 0; j < N; j++) sumsq = fmaf(v.v[j], v.v[j], sumsq);
    }
    const float rstd = reciprocal_rms(warp_sum(sumsq), width, eps), factor = scalar ? *scalar : 1.0f;
    if (rstd_out && lane == 0) rstd_out[r] = rstd;
    for (int i = lane * N; i < width; i += WARP * N) {
        pack<N> v = load<N>(from + i);
        for (int j = 0; j < N; j++) v.v[j] *= rstd;
        if (w) {
            const pack<N> weight = load<N>(w + i);
            for (int j = 0; j < N; j++) v.v[j] *= weight.v[j];
        }
        if (residual.data) {
            const pack<N> old = load<N>(residual.row(r) + i);
            for (int j = 0; j < N; j++) v.v[j] = factor * (old.v[j] + v.v[j]);
        }
        store<N>(y.row(r) + i, v);
    }
}

mtp_status norm_forward(mtp_device *device, const char *op, const mtp_view &x, const mtp_view &w,
                        const mtp_view &residual, const mtp_view &scalar, const mtp_view &y, const mtp_view &rstd,
                        float eps)
{
    const int64_t rows = x.shape[0], width = x.shape[1];
    return dispatch(x.dtype, [&](auto x_tag) {
        return dispatch(w.data ? w.dtype : MTP_F32, [&](auto w_tag) {
            using X = typename decltype(x_tag)::type;
            using W = typename decltype(w_tag)::type;
            return with_pack(pack_of(width, x, w, residual, y), [&](auto n) -> mtp_status {
                constexpr int N = decltype(n)::value;
                MTP_CUDA_TRY(op, MTP_LAUNCH((norm_kernel<X, W, N>), (unsigned)divide_up(rows, WARPS), THREADS, 0,
                                            device->stream, of(y), (float *)rstd.data, (const X *)x.data, x.stride[0],
                                            (const W *)w.data, of(residual), (const float *)scalar.data, rows,
                                            (int)width, eps));
                return MTP_OK;
            });
        });
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

/* Both ops: with g = scalar dy and p = sum(x w dy),
 * dx (+)= rstd w g - x rstd^3 / width sum(x w g); dw partial = sum x rstd g; dresidual (+)= g;
 * dscalar partial = sum dy residual + rstd p. */
struct backward {
    rows_of dy, dx, dresidual, residual;
    const float *rstd, *scalar; /* scalar NULL: 1 */
    float *dw;                  /* partial sums [chunks, width]; NULL: not wanted */
    double *dscalar;            /* [chunks]; NULL: not wanted */
    int64_t rows, chunk_rows;
    int width;
    bool add_dx, add_dresidual;
};

/* One row of the backward by one warp; `sums` are the warp's weight gradients in shared memory (each lane its own
 * elements). Returns the row's part of dscalar in every lane. */
template <typename X, typename W, int N>
__device__ __forceinline__ double backward_row(const backward &b, const X *x, const W *w, float *sums, int64_t r)
{
    const int lane = (int)threadIdx.x % WARP;
    const float *dy = b.dy.row(r);
    const float rstd = b.rstd[r], factor = b.scalar ? *b.scalar : 1.0f;
    float product = 0.0f, with_residual = 0.0f;
    for (int i = lane * N; i < b.width; i += WARP * N) {
        const pack<N> xi = load<N>(x + i), g = load<N>(dy + i);
        pack<N> wi;
        for (int j = 0; j < N; j++) wi.v[j] = 1.0f;
        if (w) wi = load<N>(w + i);
        for (int j = 0; j < N; j++) product = fmaf(xi.v[j] * wi.v[j], g.v[j], product);
        if (b.dscalar) {
            const pack<N> old = load<N>(b.residual.row(r) + i);
            for (int j = 0; j < N; j++) with_residual = fmaf(old.v[j], g.v[j], with_residual);
        }
    }
    product = warp_sum(product);
    if (b.dscalar) with_residual = warp_sum(with_residual);
    const float alpha = factor * rstd, beta = alpha * (product / (float)b.width * rstd * rstd);
    for (int i = lane * N; i < b.width; i += WARP * N) {
        const pack<N> xi = load<N>(x + i), g = load<N>(dy + i);
        if (b.dw)
            for (int j = 0; j < N; j++) sums[i + j] = fmaf(xi.v[j] * alpha, g.v[j], sums[i + j]);
        if (b.dx.data) {
            pack<N> wi, out;
            for (int j = 0; j < N; j++) wi.v[j] = 1.0f;
            if (w) wi = load<N>(w + i);
            for (int j = 0; j < N; j++) out.v[j] = alpha * wi.v[j] * g.v[j] - beta * xi.v[j];
            if (b.add_dx) {
                const pack<N> old = load<N>(b.dx.row(r) + i);
                for (int j = 0; j < N; j++) out.v[j] += old.v[j];
            }
            store<N>(b.dx.row(r) + i, out);
        }
        if (b.dresidual.data) { /* last: it may be dy */
            pack<N> out;
            for (int j = 0; j < N; j++) out.v[j] = factor * g.v[j];
            if (b.add_dresidual) {
                const pack<N> old = load<N>(b.dresidual.row(r) + i);
                for (int j = 0; j < N; j++) out.v[j] += old.v[j];
            }
            store<N>(b.dresidual.row(r) + i, out);
        }
    }
    return (double)with_residual + (double)rstd * (double)product;
}

/* One block a chunk of rows; its warps take the rows in turn. */
template <typename X, typename W, int N>
__global__ void __launch_bounds__(THREADS, 2) backward_kernel(backward b, const X *x, int64_t x_stride, const W *w)
{
    MTP_DYNAMIC_SHARED(float, sums); /* [warps, width] when dw is wanted */
    MTP_SHARED(double, scalars, [WARPS]);
    const int warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP, lane = (int)threadIdx.x % WARP;
    const int64_t first = (int64_t)blockIdx.x * b.chunk_rows;
    const int64_t end = first + b.chunk_rows < b.rows ? first + b.chunk_rows : b.rows;
    float *own = sums + (int64_t)warp * b.width;
    if (b.dw)
        for (int i = lane * N; i < b.width; i += WARP * N)
            for (int j = 0; j < N; j++) own[i + j] = 0.0f;
    double dscalar = 0;
    for (int64_t r = first + warp; r < end; r += warps)
        dscalar += backward_row<X, W, N>(b, x + r * x_stride, w, own, r);
    if (lane == 0) scalars[warp] = dscalar;
    __syncthreads();
    if (b.dw)
        for (int i = (int)threadIdx.x; i < b.width; i += (int)blockDim.x) {
            float sum = 0.0f;
            for (int k = 0; k < warps; k++) sum += sums[(int64_t)k * b.width + i];
            b.dw[(int64_t)blockIdx.x * b.width + i] = sum;
        }
    if (b.dscalar && threadIdx.x == 0) {
        double sum = 0;
        for (int k = 0; k < warps; k++) sum += scalars[k];
        b.dscalar[blockIdx.x] = sum;
    }
}

/* dw (+)= the partial sums. A block takes 32 columns; its warps add every 8th chunk, then the warps' sums in order. */
__global__ void __launch_bounds__(THREADS)
    add_chunks_kernel(float *dw, const float *partial, int64_t chunks, int width, bool accumulate)
{
    MTP_SHARED(float, shared, [WARPS][WARP]);
    const int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, i = (int)blockIdx.x * WARP + lane;
    float sum = 0.0f;
    if (i < width)
        for (int64_t c = warp; c < chunks; c += WARPS) sum += partial[c * width + i];
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp != 0 || i >= width) return;
    for (int k = 1; k < WARPS; k++) sum += shared[k][lane];
    dw[i] = accumulate ? dw[i] + sum : sum;
}

__global__ void add_scalars_kernel(float *dscalar, const double *partial, int64_t chunks, bool accumulate)
{
    double sum = accumulate ? (double)*dscalar : 0.0;
    for (int64_t c = 0; c < chunks; c++) sum += partial[c];
    *dscalar = (float)sum;
}

/* Chunks follow from the number of rows alone: at least 64 rows, at most 256 chunks. */
struct backward_scratch {
    float *dw;
    double *dscalar;
    int64_t chunks, chunk_rows;
    size_t total;
};

backward_scratch lay_out(int64_t rows, int64_t width, void *base)
{
    mtp__carver carver = {(char *)base, 0};
    backward_scratch s = {};
    s.chunk_rows = divide_up(rows, 256) > 64 ? divide_up(rows, 256) : 64;
    s.chunks = divide_up(rows, s.chunk_rows);
    s.dw = (float *)mtp__carve(&carver, s.chunks * width, sizeof(float));
    s.dscalar = (double *)mtp__carve(&carver, s.chunks, sizeof(double));
    s.total = carver.used;
    return s;
}

/* Warps of a block: as many as their sums fit in half of a block's shared memory. */
int warps_for(const mtp_device *device, int64_t width)
{
    int warps = WARPS;
    while (warps > 1 && (int64_t)warps * width * (int64_t)sizeof(float) > device->shared_block / 2) warps /= 2;
    return warps;
}

mtp_status norm_backward(mtp_device *device, const char *op, backward b, const mtp_view &x, const mtp_view &w,
                         const mtp_view &dw, mtp_write dw_write, const mtp_view &dscalar, mtp_write dscalar_write,
                         int pack, const mtp_scratch *scratch)
{
    const backward_scratch s = lay_out(x.shape[0], x.shape[1], scratch->data);
    MTP_TRY(mtp__check_scratch(op, scratch, s.total));
    b.rows = x.shape[0];
    b.width = (int)x.shape[1];
    b.chunk_rows = s.chunk_rows;
    b.dw = dw.data ? s.dw : NULL;
    b.dscalar = dscalar.data ? s.dscalar : NULL;
    const int warps = warps_for(device, b.width);
    const size_t shared = dw.data ? (size_t)warps * (size_t)b.width * sizeof(float) : 0;
    if (shared > (size_t)device->shared_block - sizeof(double) * WARPS)
        return MTP_FAIL(MTP_E_UNSUPPORTED, "%s: rows of %lld elements; the cuda backend takes up to %d here", op,
                        (long long)x.shape[1], device->shared_block / (int)sizeof(float) - 2 * WARPS);
    MTP_TRY(dispatch(x.dtype, [&](auto x_tag) {
        return dispatch(w.data ? w.dtype : MTP_F32, [&](auto w_tag) {
            using X = typename decltype(x_tag)::type;
            using W = typename decltype(w_tag)::type;
            return with_pack(pack, [&](auto n) -> mtp_status {
                constexpr int N = decltype(n)::value;
                MTP_CUDA_TRY(op, allow_shared(backward_kernel<X, W, N>, shared));
                MTP_CUDA_TRY(op, MTP_LAUNCH((backward_kernel<X, W, N>), (unsigned)s.chunks, warps * WARP, shared,
                                            device->stream, b, (const X *)x.data, x.stride[0], (const W *)w.data));
                return MTP_OK;
            });
        });
    }));
    if (dw.data)
        MTP_CUDA_TRY(op,
                     MTP_LAUNCH(add_chunks_kernel, (unsigned)divide_up(b.width, WARP), THREADS, 0, device->stream,
                                (float *)dw.data, (const float *)s.dw, s.chunks, b.width, dw_write == MTP_ACCUMULATE));
    if (dscalar.data)
        MTP_CUDA_TRY(op, MTP_LAUNCH(add_scalars_kernel, 1, 1, 0, device->stream, (float *)dscalar.data,
                                    (const double *)s.dscalar, s.chunks, dscalar_write == MTP_ACCUMULATE));
    return MTP_OK;
}

const mtp_view absent = {};

} // namespace

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

extern "C" mtp_status mtp__cuda_rmsnorm_fwd(mtp_device *device, const mtp_rmsnorm_args *a)
{
    const char *op = "rmsnorm_fwd";
    MTP_TRY(mtp__check_rmsnorm_fwd(op, a));
    return norm_forward(device, op, a->x, a->w, absent, absent, a->y, a->rstd, a->eps);
}

extern "C" size_t mtp__cuda_rmsnorm_bwd_scratch(const mtp_device *device, const mtp_rmsnorm_args *a)
{
    (void)device;
    return lay_out(a->x.shape[0], a->x.shape[1], NULL).total;
}

extern "C" mtp_status mtp__cuda_rmsnorm_bwd(mtp_device *device, const mtp_rmsnorm_args *a)
{
    const char *op = "rmsnorm_bwd";
    MTP_TRY(mtp__check_rmsnorm_bwd(op, a));
    const int64_t width = a->x.shape[1];
    backward b = {};
    b.dy = of(a->dy);
    b.dx = of(a->dx);
    b.rstd = (const float *)a->rstd.data;
    b.add_dx = a->dx_write == MTP_ACCUMULATE;
    return norm_backward(device, op, b, a->x, a->w, a->dw, a->dw_write, absent, MTP_OVERWRITE,
                         pack_of(width, a->x, a->w, a->dy, a->dx), &a->scratch);
}

extern "C" mtp_status mtp__cuda_residual_norm_fwd(mtp_device *device, const mtp_residual_norm_args *a)
{
    const char *op = "residual_norm_fwd";
    MTP_TRY(mtp__check_residual_norm_fwd(op, a));
    return norm_forward(device, op, a->x, a->w, a->residual, a->scalar, a->y, a->rstd, a->eps);
}

extern "C" size_t mtp__cuda_residual_norm_bwd_scratch(const mtp_device *device, const mtp_residual_norm_args *a)
{
    (void)device;
    return lay_out(a->x.shape[0], a->x.shape[1], NULL).total;
}

extern "C" mtp_status mtp__cuda_residual_norm_bwd(mtp_device *device, const mtp_residual_norm_args *a)
{
    const char *op = "residual_norm_bwd";
    MTP_TRY(mtp__check_residual_norm_bwd(op, a));
    const int64_t width = a->x.shape[1];
    backward b = {};
    b.dy = of(a->dy);
    b.dx = of(a->dx);
    b.dresidual = of(a->dresidual);
    b.residual = of(a->residual);
    b.rstd = (const float *)a->rstd.data;
    b.scalar = (const float *)a->scalar.data;
    b.add_dresidual = a->dresidual_write == MTP_ACCUMULATE;
    const mtp_view &residual = a->dscalar.data ? a->residual : absent;
    return norm_backward(device, op, b, a->x, a->w, a->dw, a->dw_write, a->dscalar, a->dscalar_write,
                         pack_of(width, a->x, a->w, a->dy, a->dx, a->dresidual, residual), &a->scratch);
}
