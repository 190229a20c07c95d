/* The post-norm with its residual, alone or with the norm that reads its result (formulas: ops.h; how rows are cut up:
 * norm.cuh). */
#include "cuda/norm.cuh"

namespace
{

using namespace mtp;
using namespace mtp::norm;

/* ---- forward ----------------------------------------------------------------------------------------------------- */

struct post_forward {
    matrix<const float> residual;
    const void *x;
    int64_t x_stride;
    weight w;
    const float *scalar; /* NULL: 1 */
    matrix<float> y;     /* may be residual, or x */
    float *rstd;
    weight next_w;
    void *next_y; /* NULL: no next norm */
    int64_t next_stride;
    float *next_rstd;
    int64_t rows;
    int width;
    float eps;
};

template <typename S, int N>
__global__ void __launch_bounds__(THREADS, 4) post_norm_kernel(post_forward a)
{
    const int64_t r = row_of_warp();
    if (r >= a.rows) return;
    const bool first_lane = threadIdx.x % WARP == 0;
    const S *x = (const S *)a.x + r * a.x_stride;
    const float *residual = a.residual.row(r);
    float *y = a.y.row(r), sumsq = 0.0f;
    each_pack<N>(a.width, [&](int i) { sumsq = add_squares(sumsq, load<N>(x + i)); });
    const float rstd = reciprocal_rms(warp_sum(sumsq), a.width, a.eps), factor = a.scalar ? *a.scalar : 1.0f;
    if (first_lane) a.rstd[r] = rstd;
    float next_sumsq = 0.0f;
    each_pack<N>(a.width, [&](int i) {
        pack<N> v = load<N>(x + i);
        const pack<N> w = a.w.at<N>(i), old = load<N>(residual + i);
        for (int j = 0; j < N; j++) v.v[j] = factor * fmaf(v.v[j] * rstd, w.v[j], old.v[j]);
        store<N>(y + i, v);
        next_sumsq = add_squares(next_sumsq, v);
    });
    if (!a.next_y) return;
    const float next_rstd = reciprocal_rms(warp_sum(next_sumsq), a.width, a.eps);
    if (first_lane) a.next_rstd[r] = next_rstd;
    S *next = (S *)a.next_y + r * a.next_stride;
    each_pack<N>(a.width, [&](int i) { /* what the lane itself has written */
                                       pack<N> v = load<N>(y + i);
                                       const pack<N> w = a.next_w.at<N>(i);
                                       for (int j = 0; j < N; j++) v.v[j] = v.v[j] * next_rstd * w.v[j];
                                       store<N>(next + i, v);
    });
}

/* ---- backward ---------------------------------------------------------------------------------------------------- */

struct post_backward {
    chunk_sums sums;
    matrix<const float> residual; /* with dscalar */
    matrix<const float> dy;       /* absent: zero */
    matrix<float> dresidual;      /* optional; may be dy */
    const void *x;
    void *dx; /* optional; may be x */
    int64_t x_stride, dx_stride;
    weight w;
    const float *rstd, *scalar; /* scalar NULL: 1 */
    int add_dresidual, has_next;
    weight next_w;
    matrix<const float> y;
    const float *next_rstd;
    const void *next_dy;
    int64_t next_stride;
};

/* With g the gradient of y, which is dy + next_rstd next_w next_dy - y next_rstd^3 / width sum(y next_w next_dy), and
 * s the scalar: dresidual (+)= s g; dx = s (rstd w g - x rstd^3 / width sum(x w g)); dw += s x rstd g;
 * next_dw += y next_rstd next_dy; dscalar = sum g residual + rstd sum(x w g). The sums that hold g are made of sums of
 * its three parts, so that one pass gives all of them. */
template <typename S, int N>
__device__ __forceinline__ double post_backward_row(const post_backward &b, int64_t r, float *dw, float *next_dw)
{
    const int width = b.sums.width;
    const S *x = (const S *)b.x + r * b.x_stride, *next_dy = (const S *)b.next_dy + r * b.next_stride;
    const float *dy = b.dy.row(r), *y = b.y.row(r), *residual = b.residual.row(r);
    const float rstd = b.rstd[r], factor = b.scalar ? *b.scalar : 1.0f, next_rstd = b.has_next ? b.next_rstd[r] : 0.0f;
    float next_product = 0.0f, branch[3] = {}, with_residual[3] = {}; /* of dy, next_w next_dy, y */
    each_pack<N>(width, [&](int i) {
        const pack<N> xw = times(load<N>(x + i), b.w.at<N>(i));
        pack<N> old = {};
        if (b.sums.dscalar) old = load<N>(residual + i);
        if (b.dy.data) {
            const pack<N> g = load<N>(dy + i);
            branch[0] = add_product(branch[0], xw, g);
            with_residual[0] = add_product(with_residual[0], old, g);
        }
        if (b.has_next) {
            const pack<N> n = times(b.next_w.at<N>(i), load<N>(next_dy + i)), yi = load<N>(y + i);
            next_product = add_product(next_product, yi, n);
            branch[1] = add_product(branch[1], xw, n);
            branch[2] = add_product(branch[2], xw, yi);
            with_residual[1] = add_product(with_residual[1], old, n);
            with_residual[2] = add_product(with_residual[2], old, yi);
        }
    });
    const float next_beta = next_rstd * (warp_sum(next_product) / (float)width * next_rstd * next_rstd);
    const float product = warp_sum(branch[0] + next_rstd * branch[1] - next_beta * branch[2]);
    const float alpha = factor * rstd, beta = alpha * (product / (float)width * rstd * rstd);
    each_pack<N>(width, [&](int i) {
        const pack<N> xi = load<N>(x + i);
        pack<N> g = {};
        if (b.dy.data) g = load<N>(dy + i);
        if (b.has_next) {
            const pack<N> n = load<N>(next_dy + i), yi = load<N>(y + i), next_w = b.next_w.at<N>(i);
            if (b.sums.next_dw)
                for (int j = 0; j < N; j++) next_dw[i + j] = fmaf(yi.v[j] * next_rstd, n.v[j], next_dw[i + j]);
            for (int j = 0; j < N; j++) g.v[j] += next_rstd * next_w.v[j] * n.v[j] - next_beta * yi.v[j];
        }
        if (b.sums.dw)
            for (int j = 0; j < N; j++) dw[i + j] = fmaf(xi.v[j] * alpha, g.v[j], dw[i + j]);
        if (b.dx) {
            const pack<N> w = b.w.at<N>(i);
            pack<N> out;
            for (int j = 0; j < N; j++) out.v[j] = alpha * w.v[j] * g.v[j] - beta * xi.v[j];
            store<N>((S *)b.dx + r * b.dx_stride + i, out);
        }
        if (b.dresidual.data) { /* last: it may be dy */
            for (int j = 0; j < N; j++) g.v[j] *= factor;
            if (b.add_dresidual) {
                const pack<N> old = load<N>(b.dresidual.row(r) + i);
                for (int j = 0; j < N; j++) g.v[j] += old.v[j];
            }
            store<N>(b.dresidual.row(r) + i, g);
        }
    });
    if (!b.sums.dscalar) return 0.0;
    const float of_residual = warp_sum(with_residual[0] + next_rstd * with_residual[1] - next_beta * with_residual[2]);
    return (double)of_residual + (double)rstd * (double)product;
}

template <typename S, int N>
__global__ void __launch_bounds__(THREADS, 2) post_backward_kernel(post_backward b)
{
    MTP_DYNAMIC_SHARED(float, sums);
    MTP_SHARED(double, scalars, [WARPS]);
    sum_chunk(b.sums, sums, scalars,
              [&](int64_t r, float *dw, float *next_dw) { return post_backward_row<S, N>(b, r, dw, next_dw); });
}

} // namespace

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

extern "C" mtp_status mtp__cuda_residual_norm_fwd(mtp_device *device, const mtp_residual_norm_args *a)
{
    const char *op = "residual_norm_fwd";
    MTP_TRY(mtp__check_residual_norm_fwd(op, a, device->info.stored));
    const int64_t rows = a->x.shape[0], width = a->x.shape[1];
    const bool next = a->next_w.data != NULL;
    const mtp_view &next_w = next ? a->next_w : absent, &next_y = next ? a->next_y : absent;
    const post_forward args = {of<const float>(a->residual),
                               a->x.data,
                               a->x.stride[0],
                               weight_of(a->w),
                               (const float *)a->scalar.data,
                               of<float>(a->y),
                               (float *)a->rstd.data,
                               weight_of(next_w),
                               next_y.data,
                               next_y.stride[0],
                               (float *)a->next_rstd.data,
                               rows,
                               (int)width,
                               a->eps};
    return dispatch_stored(a->x.dtype, [&](auto tag) {
        using S = typename decltype(tag)::type;
        constexpr int WIDE = wide_pack<S>();
        const bool wide = packs_fit<WIDE>(width, a->x, a->w, a->residual, a->y, next_w, next_y);
        return with_pack<WIDE>(wide, [&](auto n) -> mtp_status {
            constexpr int N = decltype(n)::value;
            MTP_CUDA_TRY(op, MTP_LAUNCH((post_norm_kernel<S, N>), (unsigned)divide_up(rows, WARPS), THREADS, 0,
                                        device->stream, args));
            return MTP_OK;
        });
    });
}

extern "C" size_t mtp__cuda_residual_norm_bwd_scratch(const mtp_device *device, const mtp_residual_norm_args *a)
{
    (void)device;
    return lay_out(a->x.shape[0], a->x.shape[1], true, NULL).total;
}

extern "C" mtp_status mtp__cuda_residual_norm_bwd(mtp_device *device, const mtp_residual_norm_args *a)
{
    const char *op = "residual_norm_bwd";
    MTP_TRY(mtp__check_residual_norm_bwd(op, a, device->info.stored));
    const int64_t width = a->x.shape[1];
    const bool next = a->next_w.data != NULL;
    const mtp_view &next_w = next ? a->next_w : absent, &next_dy = next ? a->next_dy : absent;
    const mtp_view &y = next ? a->y : absent, &residual = a->dscalar.data ? a->residual : absent;
    const backward_scratch s = lay_out(a->x.shape[0], width, true, a->scratch.data);
    MTP_TRY(mtp__check_scratch(op, &a->scratch, s.total));
    const parameter_gradients to = {&a->dw, next ? &a->next_dw : &absent, &a->dscalar, a->dw_write, a->dscalar_write};
    backward_launch launch;
    MTP_TRY(plan_backward(device, op, a->x, s, to, &launch));
    const post_backward args = {launch.sums,
                                of<const float>(residual),
                                of<const float>(a->dy),
                                of<float>(a->dresidual),
                                a->x.data,
                                a->dx.data,
                                a->x.stride[0],
                                a->dx.stride[0],
                                weight_of(a->w),
                                (const float *)a->rstd.data,
                                (const float *)a->scalar.data,
                                a->dresidual_write == MTP_ACCUMULATE,
                                next,
                                weight_of(next_w),
                                of<const float>(y),
                                (const float *)a->next_rstd.data,
                                next_dy.data,
                                next_dy.stride[0]};
    MTP_TRY(dispatch_stored(a->x.dtype, [&](auto tag) {
        using S = typename decltype(tag)::type;
        constexpr int WIDE = wide_pack<S>();
        const bool wide = packs_fit<WIDE>(width, a->x, a->w, a->dy, a->dx, a->dresidual, residual, next_w, next_dy, y);
        return with_pack<WIDE>(wide, [&](auto n) {
            return launch_backward(device, op, post_backward_kernel<S, decltype(n)::value>, args, launch, s);
        });
    }));
    return add_partial_sums(device, op, s, to);
}
