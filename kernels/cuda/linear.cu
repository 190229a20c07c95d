/* Linear layers: y = x W^T, dx = dy W, dW = dy^T x (shapes: ops.h), by cuBLASLt.
 *
 * Factors that are not in the precision of the products (fp32, or bf16 in bf16 mode) are first converted in scratch;
 * stored views and bf16 weights of a device in bf16 mode are taken, and results that are stored written, as they are.
 * The algorithm of a shape is asked for once and kept: the same shape always runs the same one, and only algorithms
 * whose reductions have a fixed order are taken, so the same inputs give the same bits. */
#include <stdlib.h>
#include <string.h>

#include "cuda/cuda.h"

/* ---- algorithms by shape ----------------------------------------------------------------------------------------- */

namespace
{

using namespace mtp;

constexpr size_t WORKSPACE = (size_t)32 << 20; /* what cuBLASLt asks for on sm_90 */
constexpr int PLANS = 4096, PROBES = 16;

/* Everything that the choice depends on. No padding: compared byte by byte. */
struct shape_key {
    int64_t m, n, k, lda, ldb, ldc, stride_a, stride_b, stride_c, batch;
    int32_t trans_a, trans_b, dtype, c_dtype, accumulate, align_a, align_b, align_c, used, no_padding;
};

struct plan {
    shape_key key;
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t a, b, c; /* as cuBLASLt sees them: column-major, factors exchanged */
    cublasLtMatmulAlgo_t algorithm;
};

uint64_t hash_of(const shape_key &key)
{
    uint64_t hash = 0xcbf29ce484222325u;
    const unsigned char *bytes = reinterpret_cast<const unsigned char *>(&key);
    for (size_t i = 0; i < sizeof key; i++) hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

/* Largest power of two up to 16 bytes that divides the address. */
int32_t alignment_of(const void *data)
{
    const uintptr_t address = (uintptr_t)data;
    for (int32_t align = 16; align > 1; align /= 2)
        if (address % (uintptr_t)align == 0) return align;
    return 1;
}

void drop(plan *p)
{
    if (p->operation) cublasLtMatmulDescDestroy(p->operation);
    if (p->a) cublasLtMatrixLayoutDestroy(p->a);
    if (p->b) cublasLtMatrixLayoutDestroy(p->b);
    if (p->c) cublasLtMatrixLayoutDestroy(p->c);
    *p = plan{};
}

mtp_status create_layout(const char *op, cublasLtMatrixLayout_t *layout, cudaDataType type, int64_t rows, int64_t cols,
                         int64_t ld, int64_t batch, int64_t stride)
{
    MTP_CUBLAS_TRY(op, cublasLtMatrixLayoutCreate(layout, type, (uint64_t)rows, (uint64_t)cols, ld));
    if (batch == 1) return MTP_OK;
    const int32_t count = (int32_t)batch;
    MTP_CUBLAS_TRY(op,
                   cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    MTP_CUBLAS_TRY(op, cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                        sizeof stride));
    return MTP_OK;
}

/* A row-major matrix is its transpose in column-major order, so C = op(A) op(B) is computed as C^T = op(B)^T op(A)^T:
 * cuBLASLt's first factor is our B. */
mtp_status describe(const char *op, const mtp__gemm *g, plan *p)
{
    const cudaDataType type = g->dtype == MTP_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    const cudaDataType c_type = g->c_dtype == MTP_BF16 ? CUDA_R_16BF : CUDA_R_32F;
    const cublasOperation_t first = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    MTP_CUBLAS_TRY(op, cublasLtMatmulDescCreate(&p->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    MTP_CUBLAS_TRY(op, cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
    MTP_CUBLAS_TRY(op,
                   cublasLtMatmulDescSetAttribute(p->operation, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
    MTP_TRY(create_layout(op, &p->b, type, g->trans_b ? g->k : g->n, g->trans_b ? g->n : g->k, g->ldb, g->batch,
                          g->stride_b));
    MTP_TRY(create_layout(op, &p->a, type, g->trans_a ? g->m : g->k, g->trans_a ? g->k : g->m, g->lda, g->batch,
                          g->stride_a));
    return create_layout(op, &p->c, c_type, g->n, g->m, g->ldc, g->batch, g->stride_c);
}

mtp_status set_limits(const char *op, cublasLtMatmulPreference_t preference, const shape_key &key)
{
    const uint64_t workspace = WORKSPACE;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t align_first = (uint32_t)key.align_b, align_second = (uint32_t)key.align_a;
    const uint32_t align_result = (uint32_t)key.align_c;
    const struct {
        cublasLtMatmulPreferenceAttributes_t attribute;
        const void *value;
        size_t size;
    } limits[] = {
        {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace},
        {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions, sizeof reductions},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_first, sizeof align_first},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_second, sizeof align_second},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_result, sizeof align_result},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_result, sizeof align_result},
    };
    for (const auto &limit : limits)
        MTP_CUBLAS_TRY(op, cublasLtMatmulPreferenceSetAttribute(preference, limit.attribute, limit.value, limit.size));
    return MTP_OK;
}

mtp_status choose(mtp_device *device, const char *op, const mtp__gemm *g, plan *p)
{
    cublasLtMatmulPreference_t preference = NULL;
    MTP_CUBLAS_TRY(op, cublasLtMatmulPreferenceCreate(&preference));
    mtp_status status = set_limits(op, preference, p->key);
    cublasLtMatmulHeuristicResult_t found = {};
    int count = 0;
    if (status == MTP_OK) {
        const cublasStatus_t answer = cublasLtMatmulAlgoGetHeuristic(device->lt, p->operation, p->b, p->a, p->c, p->c,
                                                                     preference, 1, &found, &count);
        if (answer != CUBLAS_STATUS_SUCCESS || count < 1)
            status =
                MTP_FAIL_FOREIGN(MTP_E_BACKEND, (int)answer,
                                 "%s: cuBLASLt has no algorithm for a product [%lld, %lld] in %s of depth %lld "
                                 "in %s (leading dimensions %lld, %lld, %lld)",
                                 op, (long long)g->m, (long long)g->n, mtp_dtype_name(g->c_dtype), (long long)g->k,
                                 mtp_dtype_name(g->dtype), (long long)g->lda, (long long)g->ldb, (long long)g->ldc);
    }
    cublasLtMatmulPreferenceDestroy(preference);
    p->algorithm = found.algo;
    return status;
}

} // namespace

struct mtp__cuda_plans {
    plan table[PLANS];
};

mtp_status mtp__cuda_plans_create(struct mtp__cuda_plans **plans)
{
    *plans = (struct mtp__cuda_plans *)calloc(1, sizeof **plans);
    return *plans ? MTP_OK : MTP_FAIL(MTP_E_MEMORY, "out of memory for a table of products");
}

void mtp__cuda_plans_free(struct mtp__cuda_plans *plans)
{
    if (!plans) return;
    for (plan &p : plans->table) drop(&p);
    free(plans);
}

static mtp_status find_plan(mtp_device *device, const char *op, const mtp__gemm *g, plan **found)
{
    shape_key key;
    memset(&key, 0, sizeof key);
    key.m = g->m, key.n = g->n, key.k = g->k;
    key.lda = g->lda, key.ldb = g->ldb, key.ldc = g->ldc;
    key.stride_a = g->stride_a, key.stride_b = g->stride_b, key.stride_c = g->stride_c, key.batch = g->batch;
    key.trans_a = g->trans_a, key.trans_b = g->trans_b, key.dtype = g->dtype, key.c_dtype = g->c_dtype;
    key.accumulate = g->beta != 0.0f;
    key.align_a = alignment_of(g->a), key.align_b = alignment_of(g->b), key.align_c = alignment_of(g->c);
    key.used = 1;
    const uint64_t hash = hash_of(key);
    plan *slot = NULL;
    for (int probe = 0; probe < PROBES; probe++) {
        plan *p = &device->plans->table[(hash + (uint64_t)probe) % PLANS];
        if (memcmp(&p->key, &key, sizeof key) == 0) {
            *found = p;
            return MTP_OK;
        }
        if (!p->key.used && !slot) slot = p;
    }
    if (device->capturing)
        return MTP_FAIL(MTP_E_BACKEND,
                        "%s: a product [%lld, %lld] of depth %lld is captured before it has run once: its algorithm is "
                        "not chosen yet",
                        op, (long long)g->m, (long long)g->n, (long long)g->k);
    if (!slot) slot = &device->plans->table[hash % PLANS]; /* all taken: the oldest guess goes */
    drop(slot);
    slot->key = key;
    mtp_status status = describe(op, g, slot);
    if (status == MTP_OK) status = choose(device, op, g, slot);
    if (status != MTP_OK) drop(slot);
    *found = slot;
    return status;
}

size_t mtp__cuda_gemm_workspace(const mtp_device *device)
{
    (void)device;
    return WORKSPACE;
}

mtp_status mtp__cuda_gemm(mtp_device *device, const char *op, const mtp__gemm *gemm, void *workspace)
{
    plan *p = NULL;
    MTP_TRY(find_plan(device, op, gemm, &p));
    const float one = 1.0f;
    MTP_CUBLAS_TRY(op,
                   cublasLtMatmul(device->lt, p->operation, &one, gemm->b, p->b, gemm->a, p->a, &gemm->beta, gemm->c,
                                  p->c, gemm->c, p->c, &p->algorithm, workspace, WORKSPACE, device->stream));
    return MTP_OK;
}

/* ---- the ops ----------------------------------------------------------------------------------------------------- */

namespace
{

mtp_dtype product_dtype(const mtp_device *device)
{
    return device->bf16 ? MTP_BF16 : MTP_F32;
}

/* cuBLASLt wants at least the width even when there is one row. */
int64_t leading(const mtp_view &matrix)
{
    return matrix.stride[0] > matrix.shape[1] ? matrix.stride[0] : matrix.shape[1];
}

struct factor {
    const void *data;
    int64_t ld;
};

/* A factor in the precision of the products: itself, or converted into the next part of scratch. */
mtp_status take(mtp_device *device, const char *op, const mtp_view &view, mtp__carver *carver, factor *taken)
{
    const mtp_dtype dtype = product_dtype(device);
    if (view.dtype == dtype) {
        *taken = {view.data, leading(view)};
        return MTP_OK;
    }
    void *copy = mtp__carve(carver, mtp_view_count(view), mtp_dtype_size(dtype));
    *taken = {copy, view.shape[1]};
    return mtp__cuda_convert_matrix(device, op, &view, copy, dtype);
}

size_t scratch_for(const mtp_device *device, const mtp_view &a, const mtp_view &b)
{
    const mtp_dtype dtype = product_dtype(device);
    mtp__carver carver = {NULL, 0};
    mtp__carve(&carver, (int64_t)WORKSPACE, 1);
    if (a.dtype != dtype) mtp__carve(&carver, mtp_view_count(a), mtp_dtype_size(dtype));
    if (b.dtype != dtype) mtp__carve(&carver, mtp_view_count(b), mtp_dtype_size(dtype));
    return carver.used;
}

/* c (+)= op(first) op(second), the shapes of op() being [m, k] and [k, n] */
mtp_status multiply(mtp_device *device, const char *op, const mtp_view &first, bool trans_first, const mtp_view &second,
                    bool trans_second, const mtp_view &c, mtp_write write, const mtp_scratch *scratch)
{
    MTP_TRY(mtp__check_scratch(op, scratch, scratch_for(device, first, second)));
    mtp__carver carver = {(char *)scratch->data, 0};
    void *workspace = mtp__carve(&carver, (int64_t)WORKSPACE, 1);
    factor a, b;
    MTP_TRY(take(device, op, first, &carver, &a));
    MTP_TRY(take(device, op, second, &carver, &b));
    mtp__gemm gemm = {};
    gemm.trans_a = trans_first;
    gemm.trans_b = trans_second;
    gemm.m = c.shape[0];
    gemm.n = c.shape[1];
    gemm.k = first.shape[trans_first ? 0 : 1];
    gemm.a = a.data;
    gemm.lda = a.ld;
    gemm.b = b.data;
    gemm.ldb = b.ld;
    gemm.beta = write == MTP_ACCUMULATE ? 1.0f : 0.0f;
    gemm.c = c.data;
    gemm.c_dtype = c.dtype;
    gemm.ldc = leading(c);
    gemm.batch = 1;
    gemm.dtype = product_dtype(device);
    return mtp__cuda_gemm(device, op, &gemm, workspace);
}

} // namespace

extern "C" size_t mtp__cuda_linear_fwd_scratch(const mtp_device *device, const mtp_linear_args *a)
{
    return scratch_for(device, a->x, a->w);
}

extern "C" mtp_status mtp__cuda_linear_fwd(mtp_device *device, const mtp_linear_args *a)
{
    MTP_TRY(mtp__check_linear_fwd("linear_fwd", a, device->info.stored));
    return multiply(device, "linear_fwd", a->x, false, a->w, true, a->y, a->write, &a->scratch);
}

extern "C" size_t mtp__cuda_linear_dx_scratch(const mtp_device *device, const mtp_linear_args *a)
{
    return scratch_for(device, a->y, a->w);
}

extern "C" mtp_status mtp__cuda_linear_dx(mtp_device *device, const mtp_linear_args *a)
{
    MTP_TRY(mtp__check_linear_dx("linear_dx", a, device->info.stored));
    return multiply(device, "linear_dx", a->y, false, a->w, false, a->x, a->write, &a->scratch);
}

extern "C" size_t mtp__cuda_linear_dw_scratch(const mtp_device *device, const mtp_linear_args *a)
{
    return scratch_for(device, a->y, a->x);
}

extern "C" mtp_status mtp__cuda_linear_dw(mtp_device *device, const mtp_linear_args *a)
{
    MTP_TRY(mtp__check_linear_dw("linear_dw", a, device->info.stored));
    return multiply(device, "linear_dw", a->y, true, a->x, false, a->w, a->write, &a->scratch);
}
