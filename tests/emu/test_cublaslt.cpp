/* Protects: products of cuBLASLt's twin in every type, transposition and order against plain loops in double precision,
 * and that it refuses what the library refuses. */
#include "emu/testing.h"

#include <cublasLt.h>

#define assert_blas(call) assert_int_equal((call), CUBLAS_STATUS_SUCCESS)

struct Case {
    int m, n, k;
    bool ta, tb;
    cudaDataType in, out;
    float beta;
    int pad, batch;
};

/* A matrix of floats, also as device memory of the type. */
struct Matrix {
    int rows, cols, ld, batch;
    std::vector<float> values;
    void *device = nullptr;
    cudaDataType type;
    cublasLtMatrixLayout_t layout;

    Matrix(int rows_, int cols_, int pad, int batch_, cudaDataType type_, unsigned seed)
        : rows(rows_), cols(cols_), ld(rows_ + pad), batch(batch_), values(numbers(count(), seed)), type(type_)
    {
        const int64_t stride = static_cast<int64_t>(ld) * cols;
        const size_t bytes = count() * (type == CUDA_R_32F ? 4 : 2);
        std::vector<char> raw(bytes);
        for (size_t i = 0; i < count(); i++) {
            if (type == CUDA_R_32F) {
                memcpy(&raw[4 * i], &values[i], 4);
            } else {
                const __nv_bfloat16 rounded = __float2bfloat16_rn(values[i]);
                values[i] = __bfloat162float(rounded);
                memcpy(&raw[2 * i], &rounded, 2);
            }
        }
        assert_cuda(cudaMalloc(&device, bytes));
        assert_cuda(cudaMemcpy(device, raw.data(), bytes, cudaMemcpyHostToDevice));
        assert_blas(
            cublasLtMatrixLayoutCreate(&layout, type, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), ld));
        assert_blas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batch, sizeof batch));
        assert_blas(cublasLtMatrixLayoutSetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                                     sizeof stride));
    }
    ~Matrix()
    {
        cudaFree(device);
        cublasLtMatrixLayoutDestroy(layout);
    }
    size_t count() const
    {
        return static_cast<size_t>(ld) * static_cast<size_t>(cols) * static_cast<size_t>(batch);
    }
    size_t at(int b, int row, int col) const
    {
        return static_cast<size_t>((b * cols + col) * ld + row);
    }
    std::vector<float> read() const
    {
        std::vector<char> raw(count() * (type == CUDA_R_32F ? 4 : 2));
        std::vector<float> out(count());
        assert_cuda(cudaMemcpy(raw.data(), device, raw.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < count(); i++) {
            __nv_bfloat16 value;
            memcpy(&value, &raw[2 * i], 2);
            if (type == CUDA_R_32F)
                memcpy(&out[i], &raw[4 * i], 4);
            else
                out[i] = __bfloat162float(value);
        }
        return out;
    }
};

static cublasLtHandle_t handle;

static cublasLtMatmulDesc_t new_operation(bool ta, bool tb)
{
    cublasLtMatmulDesc_t operation;
    const cublasOperation_t a = ta ? CUBLAS_OP_T : CUBLAS_OP_N, b = tb ? CUBLAS_OP_T : CUBLAS_OP_N;
    assert_blas(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    assert_blas(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSA, &a, sizeof a));
    assert_blas(cublasLtMatmulDescSetAttribute(operation, CUBLASLT_MATMUL_DESC_TRANSB, &b, sizeof b));
    return operation;
}

static cublasStatus_t choose(cublasLtMatmulDesc_t operation, const Matrix &a, const Matrix &b, const Matrix &c,
                             uint64_t workspace, cublasLtMatmulHeuristicResult_t *result)
{
    cublasLtMatmulPreference_t preference;
    int found = 0;
    const uint32_t align = 4;
    assert_blas(cublasLtMatmulPreferenceCreate(&preference));
    assert_blas(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                                     sizeof workspace));
    for (auto which : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                       CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES})
        assert_blas(cublasLtMatmulPreferenceSetAttribute(preference, which, &align, sizeof align));
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, operation, a.layout, b.layout, c.layout,
                                                                 c.layout, preference, 1, result, &found);
    assert_blas(cublasLtMatmulPreferenceDestroy(preference));
    if (status == CUBLAS_STATUS_SUCCESS) assert_int_equal(found, 1);
    return status;
}

static void check_product(const Case &t)
{
    const Matrix a(t.ta ? t.k : t.m, t.ta ? t.m : t.k, t.pad, t.batch, t.in, 1);
    const Matrix b(t.tb ? t.n : t.k, t.tb ? t.k : t.n, t.pad, t.batch, t.in, 2);
    const Matrix c(t.m, t.n, t.pad, t.batch, t.out, 3);
    const Device<char> workspace(65536);
    const float alpha = 0.5f;
    cublasLtMatmulHeuristicResult_t chosen;
    const cublasLtMatmulDesc_t operation = new_operation(t.ta, t.tb);
    assert_blas(choose(operation, a, b, c, 65536, &chosen));
    assert_blas(cublasLtMatmul(handle, operation, &alpha, a.device, a.layout, b.device, b.layout, &t.beta, c.device,
                               c.layout, c.device, c.layout, &chosen.algo, workspace.get(), 65536, nullptr));
    const std::vector<float> got = c.read();
    for (int batch = 0; batch < t.batch; batch++) {
        for (int i = 0; i < t.m; i++) {
            for (int j = 0; j < t.n; j++) {
                double sum = 0;
                for (int k = 0; k < t.k; k++)
                    sum += static_cast<double>(a.values[t.ta ? a.at(batch, k, i) : a.at(batch, i, k)]) *
                           static_cast<double>(b.values[t.tb ? b.at(batch, j, k) : b.at(batch, k, j)]);
                const double want = 0.5 * sum + static_cast<double>(t.beta * c.values[c.at(batch, i, j)]);
                const double tolerance = t.out == CUDA_R_32F ? 1e-5 : 1e-2 * (1 + fabs(want));
                assert_true(fabs(want - static_cast<double>(got[c.at(batch, i, j)])) <= tolerance);
            }
            for (int p = 0; p < t.pad; p++) /* between the columns nothing changes */
                assert_true(got[c.at(batch, t.m + p, t.n - 1)] == c.values[c.at(batch, t.m + p, t.n - 1)]);
        }
    }
    assert_blas(cublasLtMatmulDescDestroy(operation));
}

static void products(void **)
{
    for (int bits = 0; bits < 16; bits++) {
        const cudaDataType in = bits & 4 ? CUDA_R_16BF : CUDA_R_32F, out = bits & 8 ? in : CUDA_R_32F;
        const bool ta = bits & 1, tb = bits & 2;
        check_product({17, 5, 33, ta, tb, in, out, 0.0f, 0, 1});
        check_product({8, 24, 16, ta, tb, in, out, 1.0f, 3, 3});
        check_product({1, 1, 1, ta, tb, in, out, 1.0f, 0, 1});
    }
}

/* beta 0 does not read C: it may hold anything. */
static void beta_zero(void **)
{
    const Matrix a(4, 4, 0, 1, CUDA_R_32F, 1), b(4, 4, 0, 1, CUDA_R_32F, 2), c(4, 4, 0, 1, CUDA_R_32F, 3);
    const float one = 1.0f, zero = 0.0f;
    const cublasLtMatmulDesc_t operation = new_operation(false, false);
    assert_cuda(cudaMemset(c.device, 0xff, 64));
    assert_blas(cublasLtMatmul(handle, operation, &one, a.device, a.layout, b.device, b.layout, &zero, c.device,
                               c.layout, c.device, c.layout, nullptr, nullptr, 0, nullptr));
    for (float x : c.read()) assert_true(x == x);
    assert_blas(cublasLtMatmulDescDestroy(operation));
}

static void refusals(void **)
{
    const Matrix a(8, 4, 0, 1, CUDA_R_32F, 1), b(4, 6, 0, 1, CUDA_R_32F, 2), c(8, 6, 0, 1, CUDA_R_32F, 3);
    const Matrix bf16(8, 4, 0, 1, CUDA_R_16BF, 4), narrow(8, 5, 0, 1, CUDA_R_32F, 5), two(8, 6, 0, 2, CUDA_R_32F, 6);
    const Device<char> workspace(65536 + 8);
    const float one = 1.0f, zero = 0.0f;
    cublasLtMatmulHeuristicResult_t chosen;
    const cublasLtMatmulDesc_t plain = new_operation(false, false), turned = new_operation(true, false);
    assert_int_equal(choose(turned, a, b, c, 0, &chosen), CUBLAS_STATUS_INVALID_VALUE);     /* depth 8 and 4 */
    assert_int_equal(choose(plain, a, b, narrow, 0, &chosen), CUBLAS_STATUS_INVALID_VALUE); /* 6 columns into 5 */
    assert_int_equal(choose(plain, a, b, two, 0, &chosen), CUBLAS_STATUS_INVALID_VALUE);    /* 1 and 2 products */
    assert_int_equal(choose(plain, bf16, b, c, 0, &chosen), CUBLAS_STATUS_NOT_SUPPORTED);   /* bf16 times fp32 */
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_GELU;
    assert_blas(cublasLtMatmulDescSetAttribute(turned, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    assert_int_equal(cublasLtMatmulDescSetAttribute(plain, CUBLASLT_MATMUL_DESC_TRANSA, &one, 1),
                     CUBLAS_STATUS_INVALID_VALUE);
    assert_blas(choose(plain, a, b, c, 65536, &chosen));

    const auto run = [&](const void *a_data, void *scratch, size_t bytes) {
        return cublasLtMatmul(handle, plain, &one, a_data, a.layout, b.device, b.layout, &zero, c.device, c.layout,
                              c.device, c.layout, &chosen.algo, scratch, bytes, nullptr);
    };
    assert_blas(run(a.device, workspace.get(), 65536));
    assert_int_equal(run(a.device, workspace.get(), 1024), CUBLAS_STATUS_INVALID_VALUE);      /* too small */
    assert_int_equal(run(a.device, workspace.get() + 8, 65536), CUBLAS_STATUS_INVALID_VALUE); /* not 16-byte aligned */
    assert_int_equal(run(a.device, nullptr, 65536), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(run(static_cast<char *>(a.device) + 2, workspace.get(), 65536), CUBLAS_STATUS_INVALID_VALUE);
    assert_int_equal(run(nullptr, workspace.get(), 65536), CUBLAS_STATUS_INVALID_VALUE);
    /* an algorithm of another problem */
    assert_int_equal(cublasLtMatmul(handle, plain, &one, a.device, a.layout, narrow.device, narrow.layout, &zero,
                                    c.device, c.layout, c.device, c.layout, &chosen.algo, nullptr, 0, nullptr),
                     CUBLAS_STATUS_INVALID_VALUE);
    const Matrix wide(8, 4, 0, 1, CUDA_R_32F, 7), b2(4, 2, 0, 1, CUDA_R_32F, 8), c2(8, 2, 0, 1, CUDA_R_32F, 9);
    assert_int_equal(cublasLtMatmul(handle, plain, &one, wide.device, wide.layout, b2.device, b2.layout, &zero,
                                    c2.device, c2.layout, c2.device, c2.layout, &chosen.algo, workspace.get(), 65536,
                                    nullptr),
                     CUBLAS_STATUS_NOT_SUPPORTED);
    assert_blas(cublasLtMatmulDescDestroy(plain));
    assert_blas(cublasLtMatmulDescDestroy(turned));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(products),
        cmocka_unit_test(beta_zero),
        cmocka_unit_test(refusals),
    };
    if (cublasLtCreate(&handle) != CUBLAS_STATUS_SUCCESS) return 2;
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    cublasLtDestroy(handle);
    return failed;
}
