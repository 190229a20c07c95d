/* Protects: atomic operations and the arithmetic, bit and conversion intrinsics against known values. */
#include "emu/testing.h"

#include <algorithm>

struct Totals {
    int added, subtracted, least, most, kept;
    unsigned anded, ored, xored, counted, down;
    unsigned long long wide;
    float real;
    double real64;
};

static __global__ void accumulate(Totals *t, int *taken)
{
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const unsigned u = static_cast<unsigned>(i);
    taken[atomicAdd(&t->added, 1)] = 1; /* every value once */
    atomicSub(&t->subtracted, i);
    atomicMin(&t->least, 50 - i);
    atomicMax(&t->most, i * 3);
    atomicCAS(&t->kept, 0, i + 1);
    atomicAnd(&t->anded, ~(1u << u % 20));
    atomicOr(&t->ored, 1u << u % 7);
    atomicXor(&t->xored, u);
    atomicInc(&t->counted, 9);
    atomicDec(&t->down, 4);
    atomicAdd(&t->wide, 1ull << 33);
    atomicAdd(&t->real, 0.5f); /* exact in any order */
    atomicAdd(&t->real64, 0.25);
}

static void atomics(void **)
{
    const int n = 256;
    const Device<Totals> totals(std::vector<Totals>{{0, 0, 1000, -5, 0, ~0u, 0, 0, 0, 0, 0, 0, 0}});
    const Device<int> taken(std::vector<int>(n, 0));
    assert_cuda(MTP_LAUNCH(accumulate, 4, 64, 0, nullptr, totals.get(), taken.get()));
    const Totals t = totals.read()[0];
    unsigned xored = 0, down = 0;
    for (unsigned i = 0; i < n; i++) {
        xored ^= i;
        down = down == 0 || down > 4 ? 4 : down - 1;
    }
    assert_int_equal(t.added, n);
    assert_int_equal(t.subtracted, -n * (n - 1) / 2);
    assert_int_equal(t.least, 50 - (n - 1));
    assert_int_equal(t.most, 3 * (n - 1));
    assert_true(t.kept >= 1 && t.kept <= n);
    assert_int_equal(t.anded, 0xfff00000u);
    assert_int_equal(t.ored, 127);
    assert_int_equal(t.xored, xored);
    assert_int_equal(t.counted, n % 10);
    assert_int_equal(t.down, down);
    assert_true(t.wide == static_cast<unsigned long long>(n) << 33);
    assert_true(t.real == 0.5f * n && t.real64 == 0.25 * n);
    for (int one : taken.read()) assert_int_equal(one, 1);
}

static __global__ void in_shared(int *out)
{
    MTP_SHARED(int, bins, [8]);
    if (threadIdx.x < 8) bins[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(&bins[threadIdx.x % 8], 1);
    const int old = atomicExch(&bins[0], 0); /* what is taken out is taken once */
    atomicAdd(&bins[0], old);
    __syncthreads();
    if (threadIdx.x < 8) out[threadIdx.x] = bins[threadIdx.x];
}

static void shared_atomics(void **)
{
    const Device<int> out(8);
    assert_cuda(MTP_LAUNCH(in_shared, 1, 256, 0, nullptr, out.get()));
    for (int got : out.read()) assert_int_equal(got, 32);
}

static void bits(void **)
{
    assert_int_equal(__popc(0xf0f0u), 8);
    assert_int_equal(__popcll(~0ull), 64);
    assert_int_equal(__clz(0), 32);
    assert_int_equal(__clz(1 << 20), 11);
    assert_int_equal(__clzll(0), 64);
    assert_int_equal(__ffs(0), 0);
    assert_int_equal(__ffs(8), 4);
    assert_int_equal(__brev(0x80000001u), 0x80000001u);
    assert_int_equal(__brev(0x2u), 0x40000000u);
    assert_int_equal(__byte_perm(0x33221100u, 0x77665544u, 0x7531u), 0x77553311u);
    assert_int_equal(__byte_perm(0x80000000u, 0u, 0xbbbbu), 0xffffffffu); /* the sign of byte 3 */
    assert_int_equal(__funnelshift_l(0x80000000u, 0x1u, 1), 3);
    assert_int_equal(__funnelshift_r(0x2u, 0x1u, 1), 0x80000001u);
    assert_int_equal(__umulhi(0xffffffffu, 0xffffffffu), 0xfffffffeu);
    assert_int_equal(__mulhi(-2, 0x40000000), -1);
    assert_true(__umul64hi(~0ull, 2) == 1);
    assert_int_equal(__float_as_uint(1.0f), 0x3f800000u);
    assert_true(__int_as_float(__float_as_int(-2.5f)) == -2.5f);
    assert_true(__longlong_as_double(__double_as_longlong(0.1)) == 0.1);
}

static void conversions(void **)
{
    const float nan = __uint_as_float(0x7fc00000u);
    assert_int_equal(__float2int_rn(2.5f), 2);
    assert_int_equal(__float2int_rn(3.5f), 4);
    assert_int_equal(__float2int_rz(-2.9f), -2);
    assert_int_equal(__float2int_rd(-2.1f), -3);
    assert_int_equal(__float2int_ru(2.1f), 3);
    assert_int_equal(__float2int_rz(1e20f), 2147483647);
    assert_int_equal(__float2int_rz(-1e20f), -2147483647 - 1);
    assert_int_equal(__float2int_rz(nan), 0);
    assert_int_equal(__float2uint_rn(-5.0f), 0);
    assert_int_equal(__float2uint_rz(1e20f), 4294967295u);
    assert_true(__saturatef(1.5f) == 1.0f && __saturatef(-1.0f) == 0.0f && __saturatef(nan) == 0.0f);
    assert_true(min(3, 5u) == 3u && max(-1, 2ll) == 2 && max(1.0f, 2) == 2.0f);
    assert_true(fmaxf(nan, 1.0f) == 1.0f && min(nan, 1.0f) == 1.0f);
    assert_true(fabsf(rsqrtf(4.0f) - 0.5f) == 0.0f && __fdividef(6.0f, 3.0f) == 2.0f);
    assert_true(__fmaf_rn(3.0f, 4.0f, 5.0f) == 17.0f);
    /* bf16 rounds to nearest even: 1 + 2^-8 goes down, 1 + 3 * 2^-8 up */
    assert_true(__bfloat162float(__float2bfloat16_rn(1.00390625f)) == 1.0f);
    assert_true(__bfloat162float(__float2bfloat16_rn(1.01171875f)) == 1.015625f);
    const __nv_bfloat16 two = __float2bfloat16_rn(2.0f), three = __float2bfloat16_rn(3.0f);
    assert_true(__bfloat162float(__hfma(two, three, two)) == 8.0f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(atomics),
        cmocka_unit_test(shared_atomics),
        cmocka_unit_test(bits),
        cmocka_unit_test(conversions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
