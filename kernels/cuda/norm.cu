/* RMSNorm, alone or with RoPE behind it (formulas: ops.h; how rows are cut up: norm.cuh). */
#include "cuda/norm.cuh"

namespace mtp
{
namespace norm
{
namespace
{

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

__global__ void __launch_bounds__(1)
    add_scalars_kernel(float *dscalar, const double *partial, int64_t chunks, bool accumulate)
{
    double sum = accumulate ? (double)*dscalar : 0.0;
    for (int64_t c = 0; c < chunks; c++) sum += partial[c];
    *dscalar = (float)sum;
}

} // namespace

backward_scratch lay_out(int64_t rows, int64_t width, bool post, void *base)
{
    mtp__carver carver = {(char *)base, 0};
    backward_scratch s = {};
    s.chunk_rows = divide_up(rows, 512) > 16 ? divide_up(rows, 512) : 16;
    s.chunks = divide_up(rows, s.chunk_rows);
    s.dw = (float *)mtp__carve(&carver, s.chunks * width, sizeof(float));
    if (post) {
        s.next_dw = (float *)mtp__carve(&carver, s.chunks * width, sizeof(float));
        s.dscalar = (double *)mtp__carve(&carver, s.chunks, sizeof(double));
    }
    s.total = carver.used;
    return s;
}

mtp_status plan_backward(const mtp_device *device, const char *op, const mtp_view &x, const backward_scratch &s,
                         const parameter_gradients &to, backward_launch *launch)
{
    const int64_t width = x.shape[1];
    chunk_sums *sums = &launch->sums;
    sums->rows = x.shape[0];
    sums->width = (int)width;
    sums->no_padding = 0;
    sums->chunk_rows = s.chunk_rows;
    sums->dw = to.dw->data ? s.dw : NULL;
    sums->next_dw = to.next_dw->data ? s.next_dw : NULL;
    sums->dscalar = to.dscalar->data ? s.dscalar : NULL;
    const int kinds = (sums->dw ? 1 : 0) + (sums->next_dw ? 1 : 0);
    const size_t of_warp = (size_t)kinds * (size_t)width * sizeof(float);
    launch->warps = WARPS;
    while (launch->warps > 1 && (size_t)launch->warps * of_warp > (size_t)device->shared_block / 2) launch->warps /= 2;
    launch->shared = (size_t)launch->warps * of_warp;
    if (launch->shared > (size_t)device->shared_block - sizeof(double) * WARPS)
        return MTP_FAIL(MTP_E_UNSUPPORTED, "%s: rows of %lld elements; the cuda backend takes up to %d here", op,
                        (long long)width, device->shared_block / (kinds * (int)sizeof(float)) - 2 * WARPS);
    return MTP_OK;
}

mtp_status add_partial_sums(mtp_device *device, const char *op, const backward_scratch &s,
                            const parameter_gradients &to)
{
    const struct {
        const mtp_view *to;
        const float *partial;
    } weights[] = {{to.dw, s.dw}, {to.next_dw, s.next_dw}};
    for (const auto &w : weights) {
        if (!w.to->data) continue;
        const int width = (int)w.to->shape[0];
        MTP_CUDA_TRY(op, MTP_LAUNCH(add_chunks_kernel, (unsigned)divide_up(width, WARP), THREADS, 0, device->stream,
                                    (float *)w.to->data, w.partial, s.chunks, width, to.dw_write == MTP_ACCUMULATE));
    }
    if (to.dscalar->data)
        MTP_CUDA_TRY(op, MTP_LAUNCH(add_scalars_kernel, 1, 1, 0, device->stream, (float *)to.dscalar->data,
                                    (const double *)s.dscalar, s.chunks, to.dscalar_write == MTP_ACCUMULATE));
    return MTP_OK;
}

namespace
{

/* The angles of RoPE: a row of cos and sin for every `heads` rows. */
struct angles {
    matrix<const float> cosine, sine;
    int64_t heads;
};

/* ---- forward ----------------------------------------------------------------------------------------------------- */

struct norm_forward {
    const void *x;
    int64_t x_stride;
    void *y; /* may be x: a lane reads its elements before it writes them */
    int64_t y_stride;
    weight w;
    float *rstd; /* optional */
    int64_t rows;
    int width;
    float eps;
    angles rope;
};

template <typename X, typename S, int N>
__global__ void __launch_bounds__(THREADS, 4) norm_kernel(norm_forward a)
{
    const int64_t r = row_of_warp();
    if (r >= a.rows) return; /* the whole warp */
    const X *x = (const X *)a.x + r * a.x_stride;
    S *y = (S *)a.y + r * a.y_stride;
    float sumsq = 0.0f;
    each_pack<N>(a.width, [&](int i) { sumsq = add_squares(sumsq, load<N>(x + i)); });
    const float rstd = reciprocal_rms(warp_sum(sumsq), a.width, a.eps);
    if (a.rstd && threadIdx.x % WARP == 0) a.rstd[r] = rstd;
    each_pack<N>(a.width, [&](int i) {
        pack<N> v = load<N>(x + i);
        const pack<N> w = a.w.at<N>(i);
        for (int j = 0; j < N; j++) v.v[j] = v.v[j] * rstd * w.v[j];
        store<N>(y + i, v);
    });
}

/* Rows are heads, and RoPE follows: a lane holds packs of pairs (i, i + width / 2). */
template <typename S, int N>
__global__ void __launch_bounds__(THREADS, 2) norm_rope_kernel(norm_forward a)
{
    const int64_t r = row_of_warp();
    const int half = a.width / 2;
    if (r >= a.rows) return;
    const S *x = (const S *)a.x + r * a.x_stride;
    S *y = (S *)a.y + r * a.y_stride;
    const float *cosine = a.rope.cosine.row(r / a.rope.heads), *sine = a.rope.sine.row(r / a.rope.heads);
    float sumsq = 0.0f;
    each_pack<N>(half, [&](int i) { sumsq = add_squares(add_squares(sumsq, load<N>(x + i)), load<N>(x + half + i)); });
    const float rstd = reciprocal_rms(warp_sum(sumsq), a.width, a.eps);
    if (a.rstd && threadIdx.x % WARP == 0) a.rstd[r] = rstd;
    each_pack<N>(half, [&](int i) {
        const pack<N> c = load<N>(cosine + i), s = load<N>(sine + i);
        pack<N> low = times(load<N>(x + i), a.w.at<N>(i)), high = times(load<N>(x + half + i), a.w.at<N>(half + i));
        for (int j = 0; j < N; j++) {
            const float u = low.v[j] * rstd, v = high.v[j] * rstd;
            low.v[j] = u * c.v[j] - v * s.v[j];
            high.v[j] = v * c.v[j] + u * s.v[j];
        }
        store<N>(y + i, low);
        store<N>(y + half + i, high);
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

struct norm_backward {
    chunk_sums sums;
    const void *x, *dy;
    int64_t x_stride, dy_stride;
    weight w;
    const float *rstd;
    void *dx; /* optional; may be dy, or x */
    int64_t dx_stride;
    int dx_bf16, add_dx; /* add_dx: it is fp32 */
    angles rope;
};

/* dx (+)= rstd w dy - x rstd^3 / width sum(x w dy); dw += x rstd dy */
template <typename X, typename S, int N>
__device__ __forceinline__ void norm_backward_row(const norm_backward &b, int64_t r, float *dw)
{
    const int width = b.sums.width;
    const X *x = (const X *)b.x + r * b.x_stride;
    const S *dy = (const S *)b.dy + r * b.dy_stride;
    const float rstd = b.rstd[r];
    float product = 0.0f;
    each_pack<N>(width,
                 [&](int i) { product = add_product(product, times(load<N>(x + i), b.w.at<N>(i)), load<N>(dy + i)); });
    const float beta = rstd * (warp_sum(product) / (float)width * rstd * rstd);
    each_pack<N>(width, [&](int i) {
        const pack<N> xi = load<N>(x + i), g = load<N>(dy + i);
        if (b.sums.dw)
            for (int j = 0; j < N; j++) dw[i + j] = fmaf(xi.v[j] * rstd, g.v[j], dw[i + j]);
        if (!b.dx) return;
        const pack<N> w = b.w.at<N>(i);
        pack<N> out;
        for (int j = 0; j < N; j++) out.v[j] = rstd * w.v[j] * g.v[j] - beta * xi.v[j];
        if (b.dx_bf16) {
            store<N>((bf16 *)b.dx + r * b.dx_stride + i, out);
            return;
        }
        float *dx = (float *)b.dx + r * b.dx_stride + i;
        if (b.add_dx) {
            const pack<N> old = load<N>(dx);
            for (int j = 0; j < N; j++) out.v[j] += old.v[j];
        }
        store<N>(dx, out);
    });
}

template <typename X, typename S, int N>
__global__ void __launch_bounds__(THREADS, 2) norm_backward_kernel(norm_backward b)
{
    MTP_DYNAMIC_SHARED(float, sums);
    MTP_SHARED(double, scalars, [WARPS]);
    sum_chunk(b.sums, sums, scalars, [&](int64_t r, float *dw, float *) {
        norm_backward_row<X, S, N>(b, r, dw);
        return 0.0;
    });
}

/* The same with dy turned back first. */
template <typename S, int N>
__device__ __forceinline__ void norm_rope_backward_row(const norm_backward &b, int64_t r, float *dw)
{
    const int half = b.sums.width / 2;
    const S *x = (const S *)b.x + r * b.x_stride, *dy = (const S *)b.dy + r * b.dy_stride;
    const float *cosine = b.rope.cosine.row(r / b.rope.heads), *sine = b.rope.sine.row(r / b.rope.heads);
    const float rstd = b.rstd[r];
    auto turn_back = [&](int i, pack<N> &low, pack<N> &high) {
        const pack<N> c = load<N>(cosine + i), s = load<N>(sine + i), u = load<N>(dy + i), v = load<N>(dy + half + i);
        for (int j = 0; j < N; j++) {
            low.v[j] = u.v[j] * c.v[j] + v.v[j] * s.v[j];
            high.v[j] = v.v[j] * c.v[j] - u.v[j] * s.v[j];
        }
    };
    float product = 0.0f;
    each_pack<N>(half, [&](int i) {
        pack<N> low, high;
        turn_back(i, low, high);
        product = add_product(product, times(load<N>(x + i), b.w.at<N>(i)), low);
        product = add_product(product, times(load<N>(x + half + i), b.w.at<N>(half + i)), high);
    });
    const float beta = rstd * (warp_sum(product) / (float)b.sums.width * rstd * rstd);
    each_pack<N>(half, [&](int i) {
        pack<N> g[2];
        turn_back(i, g[0], g[1]);
        for (int k = 0; k < 2; k++) {
            const int at = i + k * half;
            const pack<N> xi = load<N>(x + at), w = b.w.at<N>(at);
            if (b.sums.dw)
                for (int j = 0; j < N; j++) dw[at + j] = fmaf(xi.v[j] * rstd, g[k].v[j], dw[at + j]);
            if (!b.dx) continue;
            pack<N> out;
            for (int j = 0; j < N; j++) out.v[j] = rstd * w.v[j] * g[k].v[j] - beta * xi.v[j];
            store<N>((S *)b.dx + r * b.dx_stride + at, out);
        }
    });
}

template <typename S, int N>
__global__ void __launch_bounds__(THREADS, 2) norm_rope_backward_kernel(norm_backward b)
{
    MTP_DYNAMIC_SHARED(float, sums);
    MTP_SHARED(double, scalars, [WARPS]);
    sum_chunk(b.sums, sums, scalars, [&](int64_t r, float *dw, float *) {
        norm_rope_backward_row<S, N>(b, r, dw);
        return 0.0;
    });
}

angles angles_of(const mtp_rmsnorm_args *a)
{
    return {of<const float>(a->cos), of<const float>(a->sin), a->cos.data ? a->x.shape[0] / a->cos.shape[0] : 1};
}

/* Elements of a pack of RoPE's pairs: 8 where a warp then has something for every lane, else 4, or 1. */
template <typename... Views>
int rope_pack(int64_t width, const Views &...views)
{
    if (width / 2 % (8 * WARP) == 0 && packs_fit<8>(width / 2, views...)) return 8;
    return packs_fit<4>(width / 2, views...) ? 4 : 1;
}

template <typename Body>
mtp_status with_rope_pack(int pack, Body body)
{
    if (pack == 8) return body(std::integral_constant<int, 8>());
    return with_pack<4>(pack == 4, body);
}

} // namespace
} // namespace norm
} // namespace mtp

using namespace mtp;
using namespace mtp::norm;

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

extern "C" mtp_status mtp__cuda_rmsnorm_fwd(mtp_device *device, const mtp_rmsnorm_args *a)
{
    const char *op = "rmsnorm_fwd";
    MTP_TRY(mtp__check_rmsnorm_fwd(op, a, device->info.stored));
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    const unsigned blocks = (unsigned)divide_up(rows, WARPS);
    const norm_forward args = {a->x.data,       a->x.stride[0],        a->y.data, a->y.stride[0],
                               weight_of(a->w), (float *)a->rstd.data, rows,      (int)width,
                               a->eps,          angles_of(a)};
    if (a->cos.data)
        return dispatch_stored(a->y.dtype, [&](auto tag) {
            using S = typename decltype(tag)::type;
            return with_rope_pack(rope_pack(width, a->x, a->w, a->y, a->cos, a->sin), [&](auto n) -> mtp_status {
                constexpr int N = decltype(n)::value;
                MTP_CUDA_TRY(op, MTP_LAUNCH((norm_rope_kernel<S, N>), blocks, THREADS, 0, device->stream, args));
                return MTP_OK;
            });
        });
    return dispatch(a->x.dtype, [&](auto x_tag) {
        return dispatch_stored(a->y.dtype, [&](auto y_tag) {
            using X = typename decltype(x_tag)::type;
            using S = typename decltype(y_tag)::type;
            constexpr int WIDE = wide_pack<X, S>();
            return with_pack<WIDE>(packs_fit<WIDE>(width, a->x, a->w, a->y), [&](auto n) -> mtp_status {
                constexpr int N = decltype(n)::value;
                MTP_CUDA_TRY(op, MTP_LAUNCH((norm_kernel<X, S, N>), blocks, THREADS, 0, device->stream, args));
                return MTP_OK;
            });
        });
    });
}

extern "C" size_t mtp__cuda_rmsnorm_bwd_scratch(const mtp_device *device, const mtp_rmsnorm_args *a)
{
    (void)device;
    return lay_out(a->x.shape[0], a->x.shape[1], false, NULL).total;
}

extern "C" mtp_status mtp__cuda_rmsnorm_bwd(mtp_device *device, const mtp_rmsnorm_args *a)
{
    const char *op = "rmsnorm_bwd";
    MTP_TRY(mtp__check_rmsnorm_bwd(op, a, device->info.stored));
    const int64_t width = a->x.shape[1];
    const backward_scratch s = lay_out(a->x.shape[0], width, false, a->scratch.data);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, s.total));
    const parameter_gradients to = {&a->dw, &absent, &absent, a->dw_write, MTP_OVERWRITE};
    backward_launch launch;
    MTP_TRY(plan_backward(device, op, a->x, s, to, &launch));
    const norm_backward args = {launch.sums,
                                a->x.data,
                                a->dy.data,
                                a->x.stride[0],
                                a->dy.stride[0],
                                weight_of(a->w),
                                (const float *)a->rstd.data,
                                a->dx.data,
                                a->dx.stride[0],
                                a->dx.dtype == MTP_BF16,
                                a->dx_write == MTP_ACCUMULATE,
                                angles_of(a)};
    if (a->cos.data) {
        MTP_TRY(dispatch_stored(a->dy.dtype, [&](auto tag) {
            using S = typename decltype(tag)::type;
            return with_rope_pack(rope_pack(width, a->x, a->w, a->dy, a->dx, a->cos, a->sin), [&](auto n) {
                return launch_backward(device, op, norm_rope_backward_kernel<S, decltype(n)::value>, args, launch, s);
            });
        }));
        return add_partial_sums(device, op, s, to);
    }
    MTP_TRY(dispatch(a->x.dtype, [&](auto x_tag) {
        return dispatch_stored(a->dy.dtype, [&](auto y_tag) {
            using X = typename decltype(x_tag)::type;
            using S = typename decltype(y_tag)::type;
            constexpr int WIDE = wide_pack<X, S>();
            return with_pack<WIDE>(packs_fit<WIDE>(width, a->x, a->w, a->dy, a->dx), [&](auto n) {
                return launch_backward(device, op, norm_backward_kernel<X, S, decltype(n)::value>, args, launch, s);
            });
        });
    }));
    return add_partial_sums(device, op, s, to);
}
