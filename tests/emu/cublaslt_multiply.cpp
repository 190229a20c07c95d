/* D = alpha op(A) op(B) + beta C by plain loops: factors as fp32, fp32 sums, one rounding at the end. */
#include "emu/cublaslt.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <vector>

namespace emu
{

static float element(const void *data, cudaDataType type, size_t at)
{
    switch (type) {
    case CUDA_R_16BF:
        return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[at]);
    case CUDA_R_16F:
        return __half2float(static_cast<const __half *>(data)[at]);
    default:
        return static_cast<const float *>(data)[at];
    }
}

static void set_element(void *data, cudaDataType type, size_t at, float value)
{
    switch (type) {
    case CUDA_R_16BF:
        static_cast<__nv_bfloat16 *>(data)[at] = __float2bfloat16_rn(value);
        break;
    case CUDA_R_16F:
        static_cast<__half *>(data)[at] = __float2half_rn(value);
        break;
    default:
        static_cast<float *>(data)[at] = value;
    }
}

static size_t place(const Layout &layout, uint64_t row, uint64_t col)
{
    const uint64_t ld = static_cast<uint64_t>(layout.ld);
    return layout.order == CUBLASLT_ORDER_COL ? row + col * ld : row * ld + col;
}

static size_t base(const Layout &layout, int32_t batch)
{
    return static_cast<size_t>(layout.stride * batch);
}

/* Rows of `depth` values: row i is op(A)'s row i, or op(B)'s column i. */
static std::vector<float> lines(const void *data, const Layout &layout, int32_t batch, bool along_rows, uint64_t count,
                                uint64_t depth)
{
    std::vector<float> out(count * depth);
    const size_t first = base(layout, batch);
    for (uint64_t i = 0; i < count; i++)
        for (uint64_t k = 0; k < depth; k++)
            out[i * depth + k] =
                element(data, layout.type, first + (along_rows ? place(layout, i, k) : place(layout, k, i)));
    return out;
}

static float dot(const float *x, const float *y, uint64_t n)
{
    constexpr unsigned LANES = 16;
    float sums[LANES] = {};
    uint64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (unsigned j = 0; j < LANES; j++) sums[j] += x[i + j] * y[i + j];
    float sum = 0;
    for (; i < n; i++) sum += x[i] * y[i];
    for (float one : sums) sum += one;
    return sum;
}

void multiply(const Product &p, float alpha, float beta)
{
    const uint64_t m = p.d.rows, n = p.d.cols;
    const uint64_t depth = p.operation.a == CUBLAS_OP_N ? p.a.cols : p.a.rows;
    for (int32_t batch = 0; batch < p.d.batch; batch++) {
        const std::vector<float> a = lines(p.a_data, p.a, batch, p.operation.a == CUBLAS_OP_N, m, depth);
        const std::vector<float> b = lines(p.b_data, p.b, batch, p.operation.b != CUBLAS_OP_N, n, depth);
        for (uint64_t col = 0; col < n; col++) {
            for (uint64_t row = 0; row < m; row++) {
                float value = alpha * dot(&a[row * depth], &b[col * depth], depth);
                if (beta != 0.0f) value += beta * element(p.c_data, p.c.type, base(p.c, batch) + place(p.c, row, col));
                set_element(p.d_data, p.d.type, base(p.d, batch) + place(p.d, row, col), value);
            }
        }
    }
}

} // namespace emu
