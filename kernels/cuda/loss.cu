/* Cross-entropy: of dense rows of logits, and of the flat head over the whole vocabulary.
 *
 *   z = x e^T      loss = log sum exp z - z[target]      dz = scale (softmax(z) - onehot)      dx = dz e      de = dz^T
 * x
 *
 * A block of threads has a row: one pass for maximum, sum and argmax together, one for the gradient, which takes the
 * place of the logits. The flat head works through chunks of rows whose logits fit the budget, three products a chunk.
 * In bf16 mode the gradient is rounded to bf16, in the first half of the row's own memory, and all products have bf16
 * factors. */
#include "cuda/cuda.h"

namespace mtp
{
namespace
{

enum { ROW_THREADS = 256, PER_THREAD = 4 };
const size_t default_budget = (size_t)256 << 20;

struct xent_rows {
    const float *z;
    int64_t z_row;
    int N, no_padding;  /* what a launch copies is defined */
    const int *order;   /* the tokens of the places in a row; NULL: the places themselves */
    const int *slot_of; /* its inverse */
    const int *target;  /* NULL: no loss, no gradient */
    const float *scale; /* with dz */
    float *loss;        /* optional, as all of the following */
    int *argmax;
    float *logits;
    int64_t logits_row;
    void *dz; /* may be z */
    int64_t dz_row;
    mtp::fault *fault;
};

/* Maximum with its lowest token, and the sum of exp(z - top), of the elements seen so far. */
struct running_row {
    float top, sum;
    int best;
};

/* Indices rise from call to call. */
__device__ __forceinline__ void add_element(running_row *r, float z, int index, const int *order)
{
    if (z > r->top) {
        r->sum = fmaf(r->sum, expf(r->top - z), 1.0f);
        r->top = z;
        r->best = order ? order[index] : index;
    } else {
        r->sum += expf(z - r->top);
        if (order && z == r->top) r->best = min(r->best, order[index]);
    }
}

/* Over the threads of the block, in a fixed order. */
__device__ running_row combine_threads(running_row r, float *shared)
{
    running_row all;
    all.top = block_max(r.top, shared);
    all.sum = block_sum(r.top > -INFINITY ? r.sum * expf(r.top - all.top) : 0.0f, shared);
    /* the lowest index is the largest of the negated ones: they are exact in fp32 up to 2^24, so halves are compared */
    const bool holds = r.top == all.top;
    const float high = block_max(holds ? -(float)(r.best >> 16) : -INFINITY, shared);
    const float low =
        block_max(holds && -(float)(r.best >> 16) == high ? -(float)(r.best & 0xffff) : -INFINITY, shared);
    all.best = ((int)-high << 16) + (int)-low;
    return all;
}

/* Writes the gradient of a row, PER_THREAD elements a thread at a time. All of them are read before any is written: an
 * element of dz never stands behind its logit, so dz may be z whatever its type. */
template <typename T>
__device__ void write_gradient(const float *z, T *dz, int N, float top, float factor, float scale, int own)
{
    for (int first = 0; first < N; first += ROW_THREADS * PER_THREAD) {
        float x[PER_THREAD];
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++) {
            const int i = first + n * ROW_THREADS + (int)threadIdx.x;
            x[n] = i < N ? z[i] : 0.0f;
        }
        if (sizeof(T) < sizeof(float)) __syncthreads();
#pragma unroll
        for (int n = 0; n < PER_THREAD; n++) {
            const int i = first + n * ROW_THREADS + (int)threadIdx.x;
            if (i < N) dz[i] = from_float<T>(expf(x[n] - top) * factor - (i == own ? scale : 0.0f));
        }
    }
}

template <typename T>
__global__ void __launch_bounds__(ROW_THREADS) xent_kernel(xent_rows a)
{
    MTP_SHARED(float, shared, [WARP]);
    MTP_SHARED(float, target_logit, [1]);
    const int64_t row = blockIdx.x;
    const float *z = a.z + row * a.z_row;
    running_row r = {-INFINITY, 0, 0};
    for (int i = (int)threadIdx.x; i < a.N; i += ROW_THREADS) {
        const float x = z[i];
        add_element(&r, x, i, a.order);
        if (a.logits) a.logits[row * a.logits_row + i] = x;
    }
    const int own = a.target ? target_slot(a.fault, a.order, a.slot_of, a.target[row], a.N, (int)row) : -1;
    if (threadIdx.x == 0) target_logit[0] = own >= 0 ? z[own] : NAN;
    const running_row all = combine_threads(r, shared); /* its barriers publish target_logit before z changes */
    if (threadIdx.x == 0) {
        if (a.argmax) a.argmax[row] = all.best;
        if (a.loss) a.loss[row] = (all.top - target_logit[0]) + logf(all.sum);
    }
    if (!a.dz) return;
    const float scale = a.scale[row];
    write_gradient(z, static_cast<T *>(a.dz) + row * a.dz_row, a.N, all.top, scale / all.sum, scale, own);
}

mtp_status launch_rows(mtp_device *device, const char *op, const xent_rows &a, int64_t rows, bool half)
{
    auto kernel = half ? xent_kernel<bf16> : xent_kernel<float>;
    MTP_CUDA_TRY(op, MTP_LAUNCH(kernel, (unsigned)rows, ROW_THREADS, 0, device->stream, a));
    return MTP_OK;
}

mtp_status xent(mtp_device *device, const mtp_xent_args *a)
{
    const char *op = "xent";
    MTP__CHECK(op, logits, MTP_F32, -1, -1);
    const int64_t R = a->logits.shape[0], N = a->logits.shape[1];
    if (N > INT32_MAX / 2 || R > INT32_MAX)
        return MTP_FAIL(MTP_E_ARGUMENT, "%s: logits are [%lld, %lld]; indices are 32 bits wide", op, (long long)R,
                        (long long)N);
    MTP__CHECK(op, target, MTP_I32, R);
    MTP__CHECK_OPTIONAL(op, loss, MTP_F32, R);
    MTP__CHECK_OPTIONAL(op, dlogits, MTP_F32, R, N);
    if (a->dlogits.data) MTP__CHECK(op, scale, MTP_F32, R);
    xent_rows x = {};
    x.z = (const float *)a->logits.data;
    x.z_row = a->logits.stride[0];
    x.N = (int)N;
    x.target = (const int *)a->target.data;
    x.scale = (const float *)a->scale.data;
    x.loss = (float *)a->loss.data;
    x.dz = a->dlogits.data;
    x.dz_row = a->dlogits.stride[0];
    x.fault = device->fault;
    return launch_rows(device, op, x, R, false);
}

/* ---- the flat head ----------------------------------------------------------------------------------------------- */

constexpr int64_t ROW_UNIT = 64, LINE_UNIT = 64;

struct flat_head {
    int64_t R, H, V;
    int64_t chunk;    /* rows */
    int64_t line;     /* elements from row to row of the logits */
    mtp_dtype factor; /* type of the factors of products */
    float *z;         /* [chunk, line]; then dz, of the factors' type */
    void *x;          /* [chunk, H], when x is not of the factors' type */
    void *e;          /* [V, H], when e is not */
    void *workspace;
};

flat_head carve_flat(mtp__carver *carver, const mtp_device *device, const mtp_head_args *a)
{
    flat_head f = {};
    f.R = a->x.shape[0];
    f.H = a->x.shape[1];
    f.V = a->e.shape[0];
    f.factor = device->bf16 ? MTP_BF16 : MTP_F32;
    f.line = divide_up(f.V, LINE_UNIT) * LINE_UNIT;
    const size_t budget = a->logits_budget ? a->logits_budget : default_budget;
    const int64_t fit = (int64_t)(budget / ((size_t)f.line * sizeof(float))) / ROW_UNIT * ROW_UNIT;
    const int64_t all = divide_up(f.R, ROW_UNIT) * ROW_UNIT;
    f.chunk = fit < ROW_UNIT ? ROW_UNIT : fit < all ? fit : all;
    f.z = (float *)mtp__carve(carver, f.chunk * f.line, sizeof(float));
    if (f.factor != a->x.dtype) f.x = mtp__carve(carver, f.chunk * f.H, mtp_dtype_size(f.factor));
    if (f.factor != a->e.dtype) f.e = mtp__carve(carver, f.V * f.H, mtp_dtype_size(f.factor));
    f.workspace = mtp__carve(carver, (int64_t)mtp__cuda_gemm_workspace(device), 1);
    return f;
}

mtp_status check_flat(const mtp_head_args *a)
{
    MTP_TRY(mtp__check_head_flat("head_flat", a));
    const int64_t V = a->e.shape[0];
    if (V > INT32_MAX / 2)
        return MTP_FAIL(MTP_E_ARGUMENT, "head_flat: e has %lld rows; this backend takes 2^30", (long long)V);
    return MTP_OK;
}

/* What the three products of a chunk have in common. */
mtp__gemm product_of(const flat_head &f, int64_t m, int64_t n, int64_t k)
{
    mtp__gemm g = {};
    g.m = m;
    g.n = n;
    g.k = k;
    g.batch = 1;
    g.dtype = f.factor;
    return g;
}

mtp_status chunk_gradients(mtp_device *device, const mtp_head_args *a, const flat_head &f, int64_t row0, int64_t rows,
                           const mtp_view &x, const mtp_view &e)
{
    const int64_t dz_row = f.line * (int64_t)(sizeof(float) / mtp_dtype_size(f.factor));
    if (a->dx.data) {
        mtp__gemm g = product_of(f, rows, f.H, f.V);
        g.a = f.z;
        g.lda = dz_row;
        g.b = e.data;
        g.ldb = e.stride[0];
        g.c = mtp__row(&a->dx, row0);
        g.ldc = a->dx.stride[0];
        g.beta = a->dx_write == MTP_ACCUMULATE ? 1.0f : 0.0f;
        MTP_TRY(mtp__cuda_gemm(device, "head_flat", &g, f.workspace));
    }
    if (a->de.data) {
        mtp__gemm g = product_of(f, f.V, f.H, rows);
        g.trans_a = true;
        g.a = f.z;
        g.lda = dz_row;
        g.b = x.data;
        g.ldb = x.stride[0];
        g.c = (float *)a->de.data;
        g.ldc = a->de.stride[0];
        g.beta = a->de_write == MTP_ACCUMULATE || row0 > 0 ? 1.0f : 0.0f;
        MTP_TRY(mtp__cuda_gemm(device, "head_flat", &g, f.workspace));
    }
    return MTP_OK;
}

xent_rows chunk_rows(const mtp_device *device, const mtp_head_args *a, const flat_head &f, int64_t row0)
{
    xent_rows r = {};
    r.z = f.z;
    r.z_row = f.line;
    r.N = (int)f.V;
    r.fault = device->fault;
    r.order = (const int *)a->order.data;
    r.slot_of = (const int *)a->slot_of.data;
    if (a->target.data) r.target = (const int *)a->target.data + row0;
    if (a->scale.data) r.scale = (const float *)a->scale.data + row0;
    if (a->loss.data) r.loss = (float *)a->loss.data + row0;
    if (a->argmax.data) r.argmax = (int *)a->argmax.data + row0;
    if (a->logits.data) r.logits = mtp__row(&a->logits, row0);
    r.logits_row = a->logits.stride[0];
    if (a->dx.data || a->de.data) r.dz = f.z;
    r.dz_row = f.line * (int64_t)(sizeof(float) / mtp_dtype_size(f.factor));
    return r;
}

mtp_status flat_chunk(mtp_device *device, const mtp_head_args *a, const flat_head &f, int64_t row0, const mtp_view &e)
{
    const char *op = "head_flat";
    const int64_t rows = f.R - row0 < f.chunk ? f.R - row0 : f.chunk;
    mtp_view x = mtp_view_rows(a->x, row0, rows);
    if (f.x) {
        MTP_TRY(mtp__cuda_convert_matrix(device, op, &x, f.x, f.factor));
        x = mtp_view_2d(f.x, f.factor, rows, f.H);
    }
    mtp__gemm g = product_of(f, rows, f.V, f.H);
    g.trans_b = true;
    g.a = x.data;
    g.lda = x.stride[0];
    g.b = e.data;
    g.ldb = e.stride[0];
    g.c = f.z;
    g.ldc = f.line;
    MTP_TRY(mtp__cuda_gemm(device, op, &g, f.workspace));
    MTP_TRY(launch_rows(device, op, chunk_rows(device, a, f, row0), rows, f.factor == MTP_BF16));
    return chunk_gradients(device, a, f, row0, rows, x, e);
}

mtp_status flat(mtp_device *device, const mtp_head_args *a)
{
    MTP_TRY(check_flat(a));
    MTP_TRY(mtp__check_scratch("head_flat", &a->scratch, mtp__cuda_head_flat_scratch(device, a)));
    mtp__carver carver = {};
    carver.base = (char *)a->scratch.data;
    const flat_head f = carve_flat(&carver, device, a);
    mtp_view e = a->e;
    if (f.e) {
        MTP_TRY(mtp__cuda_convert_matrix(device, "head_flat", &e, f.e, f.factor));
        e = mtp_view_2d(f.e, f.factor, f.V, f.H);
    }
    for (int64_t row0 = 0; row0 < f.R; row0 += f.chunk) MTP_TRY(flat_chunk(device, a, f, row0, e));
    return MTP_OK;
}

} // namespace
} // namespace mtp

mtp_status mtp__cuda_xent(mtp_device *device, const mtp_xent_args *a)
{
    return mtp::xent(device, a);
}

mtp_status mtp__cuda_head_flat(mtp_device *device, const mtp_head_args *a)
{
    return mtp::flat(device, a);
}

size_t mtp__cuda_head_flat_scratch(const mtp_device *device, const mtp_head_args *a)
{
    mtp__carver carver = {};
    mtp::carve_flat(&carver, device, a);
    return carver.used;
}
