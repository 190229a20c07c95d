/* The part of cuBLASLt that kernels/cuda calls: descriptors, heuristics, products; what the library refuses is refused
 * here. The algorithm it hands out works for the problem it was chosen for only, and overwrites its workspace. */
#include "emu/cublaslt.h"
#include "emu/block.h"
#include "emu/device_memory.h"
#include "emu/fault.h"
#include "emu/stream.h"

#include <cstdlib>
#include <cstring>

using namespace emu;

namespace
{

constexpr uint32_t MAGIC = 0x4c74656d;

Layout *layout_of(cublasLtMatrixLayout_t handle)
{
    return reinterpret_cast<Layout *>(handle);
}
Operation *operation_of(cublasLtMatmulDesc_t handle)
{
    return reinterpret_cast<Operation *>(handle);
}
Preference *preference_of(cublasLtMatmulPreference_t handle)
{
    return reinterpret_cast<Preference *>(handle);
}

template <class T>
cublasStatus_t take(T &field, const void *from, size_t bytes)
{
    if (!from || bytes != sizeof field) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(&field, from, sizeof field);
    return CUBLAS_STATUS_SUCCESS;
}

/* The library's table of types (cublasLtMatmul, regular data): sums and scale in fp32. */
bool types_supported(const Operation &o, const Layout &a, const Layout &b, const Layout &c, const Layout &d)
{
    if (o.scale != CUDA_R_32F || a.type != b.type || c.type != d.type) return false;
    const bool tf32 = o.compute == CUBLAS_COMPUTE_32F_FAST_TF32 || o.compute == CUBLAS_COMPUTE_32F_FAST_16BF ||
                      o.compute == CUBLAS_COMPUTE_32F_FAST_16F;
    if (o.compute != CUBLAS_COMPUTE_32F && o.compute != CUBLAS_COMPUTE_32F_PEDANTIC && !tf32) return false;
    if (a.type == CUDA_R_32F) return c.type == CUDA_R_32F;
    if (tf32 || (a.type != CUDA_R_16BF && a.type != CUDA_R_16F)) return false;
    return c.type == a.type || c.type == CUDA_R_32F;
}

struct Sizes {
    uint64_t m, n, k;
};

cublasStatus_t check(const Operation &o, const Layout &a, const Layout &b, const Layout &c, const Layout &d,
                     Sizes *sizes)
{
    const bool ta = o.a != CUBLAS_OP_N, tb = o.b != CUBLAS_OP_N;
    *sizes = {ta ? a.cols : a.rows, tb ? b.rows : b.cols, ta ? a.rows : a.cols};
    if ((tb ? b.cols : b.rows) != sizes->k || c.rows != sizes->m || d.rows != sizes->m || c.cols != sizes->n ||
        d.cols != sizes->n)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (sizes->m == 0 || sizes->n == 0 || sizes->k == 0) return CUBLAS_STATUS_INVALID_VALUE;
    for (const Layout *layout : {&a, &b, &c, &d}) {
        const bool cols = layout->order == CUBLASLT_ORDER_COL;
        if (layout->ld < static_cast<int64_t>(cols ? layout->rows : layout->cols)) return CUBLAS_STATUS_INVALID_VALUE;
        if (layout->batch != d.batch) return CUBLAS_STATUS_INVALID_VALUE;
    }
    if (d.batch > 1 && d.stride < static_cast<int64_t>(d.ld * static_cast<int64_t>(d.cols - 1)))
        return CUBLAS_STATUS_INVALID_VALUE; /* products that write over each other */
    if (o.epilogue != CUBLASLT_EPILOGUE_DEFAULT || o.pointers != CUBLASLT_POINTER_MODE_HOST)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    return types_supported(o, a, b, c, d) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

uint32_t problem_of(const Operation &o, const Layout &a, const Layout &d, const Sizes &s)
{
    const uint64_t parts[] = {static_cast<uint64_t>(o.compute),
                              static_cast<uint64_t>(o.a),
                              static_cast<uint64_t>(o.b),
                              static_cast<uint64_t>(a.type),
                              static_cast<uint64_t>(d.type),
                              s.m,
                              s.n,
                              s.k,
                              static_cast<uint64_t>(d.batch)};
    uint64_t hash = 1469598103934665603u;
    for (uint64_t part : parts) hash = (hash ^ part) * 1099511628211u;
    return static_cast<uint32_t>(hash ^ hash >> 32);
}

void must_be_device(const char *name, const void *data, const Layout &layout)
{
    const uint64_t bytes = layout_bytes(layout);
    if (is_device(data, bytes)) return;
    char where[160];
    if (device_address(data))
        device_describe(data, where, sizeof where);
    else
        snprintf(where, sizeof where, "an address of host memory");
    host_fault("cublasLtMatmul: matrix %s, %llu bytes at %s, is not within live device memory", name,
               static_cast<unsigned long long>(bytes), where);
}

bool overlap(const void *a, const Layout &la, const void *b, const Layout &lb)
{
    const char *x = static_cast<const char *>(a), *y = static_cast<const char *>(b);
    return x < y + layout_bytes(lb) && y < x + layout_bytes(la);
}

bool aligned(const void *data, uint64_t to)
{
    return reinterpret_cast<uintptr_t>(data) % to == 0;
}

} // namespace

size_t emu::element_bytes(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 0;
}

uint64_t emu::layout_bytes(const Layout &l)
{
    const bool cols = l.order == CUBLASLT_ORDER_COL;
    const uint64_t lines = cols ? l.cols : l.rows, width = cols ? l.rows : l.cols;
    const uint64_t one = (lines - 1) * static_cast<uint64_t>(l.ld) + width;
    return (one + static_cast<uint64_t>(l.batch - 1) * static_cast<uint64_t>(l.stride)) * element_bytes(l.type);
}

extern "C" {

size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    default:
        return "another status of cuBLAS";
    }
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return cublasLtGetStatusName(status);
}

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    if (!handle) return CUBLAS_STATUS_INVALID_VALUE;
    *handle = static_cast<cublasLtHandle_t>(malloc(1));
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    free(handle);
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    *layout = reinterpret_cast<cublasLtMatrixLayout_t>(new Layout{type, rows, cols, ld, CUBLASLT_ORDER_COL, 1, 0});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete layout_of(layout);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t handle,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t bytes)
{
    Layout *layout = layout_of(handle);
    if (!layout) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        return take(layout->order, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
        return take(layout->rows, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
        return take(layout->cols, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_LD:
        return take(layout->ld, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return take(layout->batch, value, bytes);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return take(layout->stride, value, bytes);
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

/* ---- operations -------------------------------------------------------------------------------------------------- */

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *operation, cublasComputeType_t compute,
                                        cudaDataType_t scale)
{
    if (!operation) return CUBLAS_STATUS_INVALID_VALUE;
    *operation = reinterpret_cast<cublasLtMatmulDesc_t>(
        new Operation{compute, scale, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_POINTER_MODE_HOST, CUBLASLT_EPILOGUE_DEFAULT});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation)
{
    delete operation_of(operation);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t handle, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    Operation *operation = operation_of(handle);
    if (!operation) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return take(operation->a, value, bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return take(operation->b, value, bytes);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        return take(operation->pointers, value, bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return take(operation->epilogue, value, bytes);
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

/* ---- algorithms -------------------------------------------------------------------------------------------------- */

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    *preference = reinterpret_cast<cublasLtMatmulPreference_t>(
        new Preference{0, CUBLASLT_REDUCTION_SCHEME_MASK, {256, 256, 256, 256}});
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete preference_of(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t handle,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes)
{
    Preference *preference = preference_of(handle);
    if (!preference) return CUBLAS_STATUS_INVALID_VALUE;
    switch (attribute) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES:
        return take(preference->workspace, value, bytes);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK:
        return take(preference->reductions, value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES:
        return take(preference->alignment[0], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES:
        return take(preference->alignment[1], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES:
        return take(preference->alignment[2], value, bytes);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES:
        return take(preference->alignment[3], value, bytes);
    default:
        return CUBLAS_STATUS_INVALID_VALUE;
    }
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t results[], int *found)
{
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!operation || !a || !b || !c || !d || !preference || !results || !found || wanted < 1)
        return CUBLAS_STATUS_INVALID_VALUE;
    *found = 0;
    {
        const Lock lock(api_mutex());
        if (thread_captures()) return CUBLAS_STATUS_NOT_SUPPORTED; /* the library may load and measure what it offers */
    }
    Sizes sizes;
    const Operation &o = *operation_of(operation);
    const Layout &la = *layout_of(a), &lb = *layout_of(b), &lc = *layout_of(c), &ld = *layout_of(d);
    const cublasStatus_t status = check(o, la, lb, lc, ld, &sizes);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    const Preference &p = *preference_of(preference);
    const Layout *layouts[] = {&la, &lb, &lc, &ld};
    for (int i = 0; i < 4; i++)
        if (p.alignment[i] < element_bytes(layouts[i]->type)) return CUBLAS_STATUS_NOT_SUPPORTED;
    Algorithm algorithm = {MAGIC, problem_of(o, la, ld, sizes), {}, 0};
    memcpy(algorithm.alignment, p.alignment, sizeof algorithm.alignment);
    algorithm.workspace = p.workspace < 65536 ? 0 : 65536;
    results[0] = cublasLtMatmulHeuristicResult_t();
    memcpy(&results[0].algo, &algorithm, sizeof algorithm);
    results[0].workspaceSize = algorithm.workspace;
    results[0].state = CUBLAS_STATUS_SUCCESS;
    results[0].wavesCount = 1.0f;
    *found = 1;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t operation, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *algo, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    const Lock lock(api_mutex());
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!operation || !alpha || !beta || !a || !b || !d || !a_layout || !b_layout || !c_layout || !d_layout)
        return CUBLAS_STATUS_INVALID_VALUE;
    Product p = {*operation_of(operation),
                 *layout_of(a_layout),
                 *layout_of(b_layout),
                 *layout_of(c_layout),
                 *layout_of(d_layout),
                 a,
                 b,
                 c,
                 d};
    Sizes sizes;
    const cublasStatus_t status = check(p.operation, p.a, p.b, p.c, p.d, &sizes);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    float factors[2];
    memcpy(&factors[0], alpha, sizeof(float));
    memcpy(&factors[1], beta, sizeof(float));
    if (factors[1] != 0.0f && !c) return CUBLAS_STATUS_INVALID_VALUE;
    if (c == d && (p.c.ld != p.d.ld || p.c.stride != p.d.stride)) return CUBLAS_STATUS_INVALID_VALUE;
    const struct {
        const char *name;
        const void *data;
        const Layout *layout;
    } matrices[] = {{"A", a, &p.a}, {"B", b, &p.b}, {"C", factors[1] != 0.0f ? c : d, &p.c}, {"D", d, &p.d}};
    for (const auto &matrix : matrices) {
        if (!aligned(matrix.data, element_bytes(matrix.layout->type))) return CUBLAS_STATUS_INVALID_VALUE;
        must_be_device(matrix.name, matrix.data, *matrix.layout);
    }
    if (overlap(a, p.a, d, p.d) || overlap(b, p.b, d, p.d)) host_fault("cublasLtMatmul: D overlaps a factor");
    size_t used = 0;
    if (algo) {
        Algorithm chosen;
        memcpy(&chosen, algo, sizeof chosen);
        if (chosen.magic != MAGIC || chosen.problem != problem_of(p.operation, p.a, p.d, sizes))
            return CUBLAS_STATUS_NOT_SUPPORTED;
        for (int i = 0; i < 4; i++)
            if (!aligned(matrices[i].data, chosen.alignment[i])) return CUBLAS_STATUS_INVALID_VALUE;
        if (chosen.workspace > workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
        used = chosen.workspace;
    }
    if (workspace_bytes && (!workspace || !aligned(workspace, 16))) return CUBLAS_STATUS_INVALID_VALUE;
    if (workspace_bytes && !is_device(workspace, workspace_bytes))
        host_fault("cublasLtMatmul: the workspace, %zu bytes at %p, is not within live device memory", workspace_bytes,
                   workspace);
    const cudaError_t queued = enqueue(stream, WorkKind::LIBRARY, "cublasLtMatmul", [=] {
        if (used) memset(workspace, 0xff, used);
        multiply(p, factors[0], factors[1]);
    });
    return queued == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
}

} // extern "C"
