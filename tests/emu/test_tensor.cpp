/* Protects: the fragments of mma.sync and ldmatrix as the PTX manual lays them out, and cp.async, whose data is there
 * after the wait and not before. */
#include "emu/ptx.h"
#include "emu/testing.h"

static float rounded(float x)
{
    return __bfloat162float(__float2bfloat16_rn(x));
}

static __device__ unsigned two(const float *at, int step)
{
    const __nv_bfloat162 pair = __floats2bfloat162_rn(at[0], at[step]);
    unsigned bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

/* A [16, 16], B [16, 8], C [16, 8], row-major; fragments taken by the manual's formulas. */
static __global__ void one_product(float *c, const float *a, const float *b)
{
    const int q = static_cast<int>(threadIdx.x) / 4, p = static_cast<int>(threadIdx.x) % 4;
    const unsigned fa[4] = {two(a + q * 16 + 2 * p, 1), two(a + (q + 8) * 16 + 2 * p, 1),
                            two(a + q * 16 + 2 * p + 8, 1), two(a + (q + 8) * 16 + 2 * p + 8, 1)};
    float fc[4] = {c[q * 8 + 2 * p], c[q * 8 + 2 * p + 1], c[(q + 8) * 8 + 2 * p], c[(q + 8) * 8 + 2 * p + 1]};
    mtp::mma_bf16(fc, fa, two(b + 2 * p * 8 + q, 8), two(b + (2 * p + 8) * 8 + q, 8));
    c[q * 8 + 2 * p] = fc[0], c[q * 8 + 2 * p + 1] = fc[1];
    c[(q + 8) * 8 + 2 * p] = fc[2], c[(q + 8) * 8 + 2 * p + 1] = fc[3];
}

static void product_of_fragments(void **)
{
    const std::vector<float> a = numbers(256, 1), b = numbers(128, 2), c = numbers(128, 3);
    const Device<float> da(a), db(b), dc(c);
    assert_cuda(MTP_LAUNCH(one_product, 1, 32, 0, nullptr, dc.get(), da.get(), db.get()));
    const std::vector<float> got = dc.read();
    for (size_t i = 0; i < 16; i++) {
        for (size_t j = 0; j < 8; j++) {
            double sum = static_cast<double>(c[i * 8 + j]);
            for (size_t k = 0; k < 16; k++) sum += static_cast<double>(rounded(a[i * 16 + k]) * rounded(b[k * 8 + j]));
            assert_true(fabs(sum - static_cast<double>(got[i * 8 + j])) < 2e-6);
        }
    }
}

/* Four matrices [8, 8] of 16 bits below each other; what every lane gets of each. */
static __global__ void read_matrices(unsigned *out, bool transposed)
{
    MTP_SHARED(uint16_t, rows, [32][8]);
    for (int i = 0; i < 8; i++)
        rows[threadIdx.x][i] = static_cast<uint16_t>(100 * threadIdx.x + static_cast<unsigned>(i));
    __syncthreads();
    unsigned x[4];
    if (transposed)
        mtp::load_matrices_transposed(x, &rows[threadIdx.x][0]);
    else
        mtp::load_matrices(x, &rows[threadIdx.x][0]);
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + static_cast<unsigned>(i)] = x[i];
}

static void matrices(void **)
{
    for (bool transposed : {false, true}) {
        const Device<unsigned> out(128);
        assert_cuda(MTP_LAUNCH(read_matrices, 1, 32, 0, nullptr, out.get(), transposed));
        const std::vector<unsigned> got = out.read();
        for (unsigned lane = 0; lane < 32; lane++) {
            for (unsigned m = 0; m < 4; m++) {
                const unsigned row = lane / 4, col = lane % 4 * 2;
                const unsigned low = transposed ? 100 * (8 * m + col) + row : 100 * (8 * m + row) + col;
                const unsigned high = transposed ? 100 * (8 * m + col + 1) + row : 100 * (8 * m + row) + col + 1;
                assert_int_equal(got[4 * lane + m], low | high << 16);
            }
        }
    }
}

/* Two groups of copies in flight; the first is there after wait<1>, the second after wait<0>. */
static __global__ void copies(float *out, const float *in)
{
    MTP_SHARED(float4, box, [2][32]);
    const unsigned lane = threadIdx.x;
    float *mine = out + 8 * lane;
    mtp::copy_async(&box[0][lane], in + 4 * lane, true);
    mtp::copy_commit();
    mtp::copy_async(&box[1][lane], in + 128 + 4 * lane, lane % 2 == 0);
    mtp::copy_commit();
    mine[0] = box[0][lane].x;
    mtp::copy_wait<1>();
    mine[1] = box[0][lane].x;
    mine[2] = box[1][lane].x;
    mtp::copy_wait<0>();
    __syncthreads();
    mine[3] = box[0][31 - lane].y;
    mine[4] = box[1][31 - lane].z;
}

static void asynchronous_copies(void **)
{
    const std::vector<float> in = numbers(256, 4);
    const Device<float> din(in), out(256);
    assert_cuda(MTP_LAUNCH(copies, 1, 32, 0, nullptr, out.get(), din.get()));
    const std::vector<float> got = out.read();
    for (size_t lane = 0; lane < 32; lane++) {
        const float *mine = &got[8 * lane];
        assert_true(mine[0] != mine[0]);
        assert_true(mine[1] == in[4 * lane]);
        assert_true(mine[2] != mine[2]);
        assert_true(mine[3] == in[4 * (31 - lane) + 1]);
        assert_true(mine[4] == ((31 - lane) % 2 == 0 ? in[128 + 4 * (31 - lane) + 2] : 0.0f));
    }
}

static __global__ void move_16(uint4 *to, const uint4 *from)
{
    mtp::store_16(to + threadIdx.x, mtp::load_16(from + (31 - threadIdx.x)));
}

static void vectors(void **)
{
    std::vector<uint4> in(32);
    for (unsigned i = 0; i < 32; i++) in[i] = make_uint4(i, i + 1, i + 2, i + 3);
    const Device<uint4> from(in), to(32);
    assert_cuda(MTP_LAUNCH(move_16, 1, 32, 0, nullptr, to.get(), from.get()));
    const std::vector<uint4> got = to.read();
    for (unsigned i = 0; i < 32; i++) assert_true(got[i].x == 31 - i && got[i].w == 34 - i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(product_of_fragments),
        cmocka_unit_test(matrices),
        cmocka_unit_test(asynchronous_copies),
        cmocka_unit_test(vectors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
